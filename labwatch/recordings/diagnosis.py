"""Where did it begin? What left its usual values first in a recording, in which part of the model, and why.

What is measured at one step has an order: the learning rate, the weights before the update, what they make of the batch
(the residual stream, attention, routers, logits, the loss), the gradients of that, and the update. The earliest
recorded step decides, and within it the earliest in this order (that of ``causes.yaml``), since what comes later
follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lab.core import shipped
from lab.core.windows import MERGE
from labwatch.events.detectors import Event
from labwatch.recordings.moves import USUAL, Move
from labwatch.recordings.readings import FEWEST_ROWS, MOST, Change, Readings, Sign, quantities
from labwatch.recordings.recording import Recording
from labwatch.recordings.signs import CHECKS, OF_SAMPLES
from labwatch.recordings.signs_of_code import NOT_USED

# One part is apart from the others if its logarithm moved so many times as far.
APART = 2.0
ALIKE = math.log(2)  # by which gradients of a part must have changed to have moved with those of another
AFTER_STEPS = 20  # a row that is so many steps after the loss rose in one step shows what followed from that
LOSS = "loss"
# All that a pass measures may follow from these; in reinforcement learning they are of what the policy itself sampled.
OF_BATCH = (
    *("input_rms", "token_perplexity", "label_perplexity", "label_count", "distinct_rows", "cross_entropy"),
    *("token_gone", "token_new", "label_gone", "label_new"),
)
OF_EDITS = ("grad_edit", "grad_signs", "grad_left")  # what loops do to gradients
OF_PASS = ("activations", "attention", "router", "output_logits", "gradients", "optimizer")


@cache
def causes() -> Mapping[str, Mapping[str, Any]]:
    """What is said of each kind of cause, in their order within a step; see the file."""
    table: Mapping[str, Mapping[str, Any]] = shipped.load(Path(__file__).with_name("causes.yaml"))
    return table


class Finding(NamedTuple):
    """What left its usual values first.

    Attributes:
        kind: of cause, a key of ``causes``.
        parts: of the model; none if it is all of them, or the whole.
        since: the last recorded step at which all was as usual; None if there is none.
        step: the recorded step at which it was seen first.
        moves: those that decide, and then all others of the same event in the order of their steps.
        weights: names of single ones, where they are known.
        functions: of torch that are called no longer, or now, if that is what was first.
        changes: of settings, if these are what was first.
        loss_step: at which the loss rose; None if it did not.
        last: the step at which the event was seen last.
        as_before: what was recorded and had not moved when it was seen first, so that it is no cause.
    """

    kind: str
    parts: list[str]
    since: int | None
    step: int
    moves: list[Move]
    weights: list[str]
    functions: list[str]
    changes: list[Change]
    loss_step: int | None
    last: int
    as_before: list[str]

    def explains(self, event: Event) -> bool:
        """Whether an alarm of the loss belongs to this event."""
        since = -1 if self.since is None else self.since
        return event.kind == "spike" and since < event.step <= self.last


class Diagnosis(NamedTuple):
    """The findings of a recording, each an alarm, and the outcome of each check.

    An outcome is ``alarm``, ``passed``, ``changed without harm``, ``too few rows`` or ``not recorded``.
    """

    findings: list[Finding]
    checks: dict[str, str]


def diagnose(recording: Recording) -> Diagnosis:
    """What left its usual values in a recording, and where each such event began."""
    read = Readings(recording)
    others = (LOSS, *OF_BATCH) if read.is_of_rewards else OF_SAMPLES  # which mean little here
    checks = {name: of for name, of in CHECKS.items() if of[1] not in others}
    signs = {name: list(check(read)) if len(read.step_m) else [] for name, (check, _) in checks.items()}
    if read.rounded_since is not None:
        signs |= {name: [] for name in ROUNDING_EXPLAINS}
    clear = [sign.row for of_check in signs.values() for sign in of_check if not (sign.is_vague or sign.is_harmless)]
    for name, of_check in signs.items():
        signs[name] = [
            sign for sign in of_check if not (sign.is_vague and any(0 < row - sign.row <= USUAL for row in clear))
        ]
    findings = [_finding(read, [sign], range(1)) for name in AT_START for sign in signs[name] if sign.row == 0]
    later = [
        sign
        for name, of_check in signs.items()
        for sign in of_check
        if not sign.is_harmless
        if sign.row or not (name in AT_START or sign.kind in ("dead", "weights"))
    ]
    findings += [_first(read, rows, of_event) for rows, of_event in _events(read, later)]
    outcomes = {
        name: _outcome(read, column, signs[name])
        for name, (_, column) in checks.items()
        if read.has(column) or not quantities().get(column, {}).get("extra")
    }
    if not read.is_of_rewards:
        outcomes[LOSS] = "alarm" if read.rises else "passed"
    return Diagnosis(sorted(findings, key=lambda finding: finding.step), outcomes)


ROUNDING_EXPLAINS = ("frozen parts", "updates that are zero", "weights against updates")
AT_START = (
    *("weights that no optimizer has", "frozen parts", "zero gradients", "initial weights", "initial values"),
    *("sizes of updates", "labels that attention sees", "probabilities for logits", "updates that rounding loses"),
    *("clipping under a loss scale", "residuals of all blocks", "KL divergence"),
)


def _outcome(read: Readings, column: str, signs: Sequence[Sign]) -> str:
    if signs:
        return "changed without harm" if all(sign.is_harmless for sign in signs) else "alarm"
    values = [read.column(column, place) for place in read.recording.places(column)]
    rows = max((np.count_nonzero(np.isfinite(value_m)) for value_m in values), default=0)
    return "passed" if rows >= FEWEST_ROWS else "too few rows" if rows else "not recorded"


def _events(read: Readings, signs: Sequence[Sign]) -> Iterator[tuple[range, list[Sign]]]:
    """The rows that begin and end each event, and its signs; what is less than ``MERGE`` rows apart is one event."""
    rows = sorted({sign.row for sign in signs} | {read.row_of(rise.first) for rise in read.rises})
    for row_n in np.split(rows, np.flatnonzero(np.diff(rows) >= MERGE) + 1) if rows else ():
        of_event = range(row_n[0], row_n[-1] + 1)
        yield of_event, [sign for sign in signs if sign.row in of_event]


def _first(read: Readings, rows: range, signs: list[Sign]) -> Finding:
    """The finding of an event: of its signs, and of the moves that lasted up to its first row, the first ones."""
    anchor, at_anchor = rows.start, [sign for sign in signs if sign.row == rows.start]
    rise, left = read.rise_before(anchor), [sign for sign in signs if sign.kind == "policy"]
    before = [
        Sign(quantities()[name]["kind"], move.row, [place] * bool(place), [move])
        for (name, place), moves in read.moves.items()
        for move in ([] if at_anchor else moves)
        if read.settled < move.row <= anchor <= move.end
        and anchor - move.row < (USUAL if rise and rise.is_step else MERGE)
        and (read.step_m[move.row] < rise.first if rise else move.row < anchor)
        and (move.change < 0) == bool(quantities()[name].get("falls"))
    ]
    first = min([anchor, *(sign.row for sign in before)])
    found = [sign for sign in [*at_anchor, *before] if sign.row == first]
    if rise and first == anchor:
        is_late = rise.is_step and read.step_m[anchor] - rise.first > AFTER_STEPS
        effects = OF_PASS if is_late else ("gradients", "optimizer")
        found = [sign for sign in found if sign.is_exact or sign.kind not in effects]
        found.append(Sign("data" if rise.is_step or rise.last >= read.step_m[anchor] else "unseen", first))
    elif (
        left
        and {sign.kind for sign in found} <= {"gradients", "optimizer", "policy"}  # the first that shows of it
        and not any(sign.is_exact for sign in found)
    ):
        found = [left[0]._replace(row=first)]
    elif not found:  # the loss rose after the last row
        found = [Sign("unseen", first)]
    return _finding(read, found, range(first, rows.stop))


def _finding(read: Readings, signs: Sequence[Sign], rows: range) -> Finding:
    """What the signs of the first of these rows say together: the kind that comes first, and its parts."""
    row = signs[0].row
    kind, chosen = _deciding(read, signs, row)
    deciding = sorted((move for sign in chosen for move in sign.moves), key=lambda move: -abs(move.change))
    rest = [move for moves in read.moves.values() for move in moves if move.row in rows and move not in deciding]
    rest.sort(key=lambda move: (move.row, -abs(move.change)))
    earlier = [read.row_before(row, read.column(move.quantity, move.place)) for move in deciding[:1]]
    since = int(read.step_m[earlier[0] if earlier else row - 1]) if row else None
    parts = _parts(read, chosen, kind)
    weights = list(dict.fromkeys(name for sign in chosen for name in sign.weights))
    changes = [change for sign in chosen for change in sign.changes]
    step = int(read.step_m[row])
    if changes:
        since, step = changes[0].since, changes[0].step
    if begun := [sign.at for sign in chosen if sign.at is not None]:
        since, step = min(begun) - 1, min(begun)
    functions = [name for sign in chosen for name in sign.functions]
    last = int(read.step_m[rows.stop - 1])
    if rows.stop == len(read.step_m):  # losses may follow that last row
        last = int(max([last, *read.recording.loss_step_n[-1:]]))
    loss_step = next((rise.first for rise in read.rises if (-1 if since is None else since) < rise.first <= last), None)
    is_exact = any(sign.is_exact for sign in chosen)
    if kind == "gradients" and len(parts) != 1 and loss_step is not None and loss_step > step and not is_exact:
        kind = "instability"
    elif kind == "gradients" and not (parts or chosen[0].is_exact or read.is_of_rewards) and deciding[0].change > 0:
        kind = "data"
    moved = {move.quantity for move in [*deciding, *rest] if move.row == row}
    as_before = [
        what for name, what in causes()[kind].get("as_before", {}).items() if read.has(name) and name not in moved
    ]
    moves = [*deciding, *rest]
    return Finding(kind, parts, since, step, moves, weights, functions, changes, loss_step, last, as_before)


def _deciding(read: Readings, signs: Sequence[Sign], row: int) -> tuple[str, list[Sign]]:
    """The kind of cause of the signs of a row that none of the others explains, and those of them that show it."""
    of_batch = [] if read.is_of_rewards else [move for name in OF_BATCH for move in read.moves.get((name, ""), [])]
    if any(move.row == row for move in of_batch):
        signs = [sign for sign in signs if sign.kind not in OF_PASS or sign.is_exact] or [Sign("data", row)]
    if not any(sign.kind in ("precision", "not_finite") for sign in signs):
        signs = [sign for sign in signs if sign.changes] or [sign for sign in signs if sign.is_exact] or signs
    if any(move.quantity in OF_EDITS for sign in signs for move in sign.moves):  # so updates between were others, too
        signs = [sign for sign in signs if not any(move.quantity == "change_over_updates" for move in sign.moves)]
    in_evaluation = [sign for sign in signs if any(move.quantity == "in_evaluation" for move in sign.moves)]
    signs = in_evaluation or signs  # in which parts may call other functions
    functions = [name for sign in signs if sign.kind != "gradients" for name in sign.functions]
    if functions:  # which may leave weights without a use, but not a part that they use as before
        is_used = not any(name.startswith("no longer uses") or name.endswith(NOT_USED) for name in functions)
        trained = {part for part in read.places if not (is_used and math.isnan(read.column("grad_rms", part)[row]))}
        signs = [sign for sign in signs if sign.kind != "frozen" or sign.changes or trained.isdisjoint(sign.parts)]
    if {"reward", "gradients"} <= {sign.kind for sign in signs}:  # gradients do not raise what samples get
        signs = [sign for sign in signs if sign.kind == "reward" and sign.moves[0].change > 0] or signs
    if {sign.kind for sign in signs} == {"reward", "policy"}:  # with other ratios or samples rewards fall, too
        signs = [sign for sign in signs if sign.kind == "policy"]
    kind = min((sign.kind for sign in signs), key=list(causes()).index)
    chosen = [sign for sign in signs if sign.kind == kind]
    if kind == "not_finite" and not _parts(read, chosen, kind):  # by now all is, so to which part was something done?
        chosen = [sign for sign in signs if sign.functions or (sign.at is not None and sign.kind != kind)] or chosen
    if not read.rises:
        chosen = [sign for sign in chosen if sign.begins] or chosen
    if kind == "gradients" and not any(sign.is_exact or sign.begins for sign in chosen):  # others moved, in more noise
        named = {part for sign in chosen for part in sign.parts}
        alike = [read.change("grad_rms", part, row) for part in read.recording.places("grad_rms") if part not in named]
        chosen += [Sign(kind, row, [move.place], [move]) for move in alike if ALIKE < abs(move.change) < math.inf]
    return kind, chosen


def _parts(read: Readings, signs: Sequence[Sign], kind: str) -> list[str]:
    """The parts that signs name: none if it is all, and one if it is far apart from the others."""
    if not all(sign.parts for sign in signs) and kind != "output_logits":
        return []
    size = dict[str, float]()
    for sign in signs:
        for part in sign.parts:
            size[part] = max(size.get(part, 0.0), *(abs(move.change) for move in sign.moves), 0.0)
    parts = sorted(size, key=lambda part: -size[part])
    if kind == "output_logits":  # which is what makes them, if it is a part of the model
        return ["head" if read.has("log_z") or "head" in read.recording.places("param_rms") else "other"]
    if kind == "activations" and not signs[0].is_exact:  # later blocks get what an earlier one returned
        return [min(parts, key=_depth)]
    if len(parts) > 1 and not signs[0].is_exact and size[parts[0]] > APART * size[parts[1]] > 0:
        return parts[:1]
    return [] if len(parts) >= max(2, MOST * len(read.places)) else sorted(parts, key=_depth)


def _depth(part: str) -> tuple[int, str]:
    return (int(part[5:]) if part.startswith("block") else -1, part)
