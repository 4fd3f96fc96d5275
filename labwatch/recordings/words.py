"""What is said of a recording: lines for people, and the same as values for JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lab.analysis.statistics import Interval
from lab.analysis.text import capitalized, finite, listed, number
from lab.core.errors import RequestError
from labwatch.events.levels import Level
from labwatch.recordings.diagnosis import Finding, causes, diagnose
from labwatch.recordings.moves import Move
from labwatch.recordings.reaching import Reach, reaches
from labwatch.recordings.readings import Change, quantities
from labwatch.recordings.recording import Recording, is_recording, read_recording

MOST, MOST_WEIGHTS = 3, 2  # further moves, and weights, that a line names
# A deviation from no noise at all is not written as a number, and this is.
MOST_DEVIATIONS = 1e4


class Report(NamedTuple):
    """What a recording says.

    Attributes:
        findings: what left its usual values; each is an alarm.
        found: of each a line, and values for JSON.
        lines: for these and for all else.
        plain: all of it as values for JSON.
        recording: what was read.
    """

    findings: list[Finding]
    found: list[tuple[str, dict[str, Any]]]
    lines: list[str]
    plain: dict[str, Any]
    recording: Recording


def report(path: Path, levels: Mapping[str, Level]) -> Report:
    """What a recording says of where something began, and of what comes.

    Raises:
        RequestError: the file cannot be read.
    """
    try:
        recording = read_recording(path)
    except (OSError, EOFError, ValueError) as error:
        raise RequestError(f"{path} cannot be read as a recording: {error}") from None
    name = path.name
    findings, checks = diagnose(recording)
    coming = reaches(recording, levels)
    unknown = [
        of
        for of, known in quantities().items()
        if of not in levels and known.keys().isdisjoint(("level", "counts")) and recording.places(of)
    ]
    found = [(f"{name} {sentence(finding)}", _plain_finding(finding, recording)) for finding in findings]
    lines = [line for line, _ in found]
    lines += [f"{name}: not found in the model: {what}" for what in recording.header.get("not_found", [])]
    lines += [f"{name}: {_reach(reach)}" for reach in coming]
    lines += [
        f"{name}: {of} was not recorded, so its level is not watched" for of in levels if not recording.places(of)
    ]
    if levels and unknown:
        lines.append(f"{name}: no level known of {listed(unknown)}")
    lines.append(f"{name}: {checked(checks)}")
    plain = {
        "every": recording.header.get("every", 1),
        "not_found": recording.header.get("not_found", []),
        "findings": [values for _, values in found],
        "checks": checks,
        "reaches": [{of: finite(value) for of, value in reach._asdict().items()} for reach in coming],
        "no_level": unknown,
    }
    return Report(findings, found, lines, plain, recording)


class GrowingRecording:
    """A file that may be a recording, to be read again whenever it has grown."""

    def __init__(self, path: Path, levels: Mapping[str, Level]) -> None:
        self.path, self.levels = path, levels
        self.size, self.told = -1, set[int]()

    def poll(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield a line, and values for JSON, for what is new since the last call.

        Raises:
            RequestError: the file cannot be read.
        """
        size = self.path.stat().st_size if self.path.is_file() else -1
        if size == self.size or not is_recording(self.path):
            return
        self.size = size
        found = report(self.path, self.levels)
        for line, plain in found.found:
            if plain["step"] not in self.told:
                self.told.add(plain["step"])
                yield line, plain


def checked(checks: Mapping[str, str]) -> str:
    """``24 checks: 21 passed, 2 too few rows (loss scale, ...), 1 alarm (...)``."""
    counts = Counter(checks.values())
    parts = [f"{counts['passed']} passed"] if counts["passed"] else []
    for outcome in ("alarm", "changed without harm", "too few rows", "not recorded"):
        if counts[outcome]:
            names = ", ".join(name for name, of in checks.items() if of == outcome)
            plural = "s" * (outcome == "alarm" and counts[outcome] != 1)
            parts.append(f"{counts[outcome]} {outcome}{plural} ({names})")
    return f"{len(checks)} checks: {', '.join(parts)}"


def sentence(finding: Finding) -> str:
    """``step 150: weights of block1 moved first, ...``: what moved first, where, by how much, and what to see next."""
    return f"step {finding.step}: {what_moved(finding)}. Look next at {next_look(finding)}."


def next_look(finding: Finding) -> str:
    """What to look at next."""
    cause = _cause(finding)
    return str(cause.get("next_at_start", cause["next"]) if finding.since is None else cause["next"])


def _cause(finding: Finding) -> Mapping[str, Any]:
    """The words for a kind of cause, or for what the measurement that decides shows of it."""
    if finding.functions:
        moved = {move.quantity for move in finding.moves}
        return quantities()[next((name for name in ("given", "loss_code") if name in moved), "functions")]
    known = quantities().get(finding.moves[0].quantity, {}) if finding.moves and not finding.changes else {}
    return known if "said" in known and known["kind"] == finding.kind else causes()[finding.kind]


def what_moved(finding: Finding) -> str:
    """What moved first, where, when and by how much; what followed; and what the numbers exclude."""
    cause = _cause(finding)
    is_from_start = finding.since is None
    said = str(cause.get("at_start", cause["said"]) if is_from_start else cause["said"]).format(
        parts=listed(finding.parts) if finding.parts else "all parts"
    )
    deciding = [move for move in finding.moves if move.row == finding.moves[0].row and _decides(finding, move)]
    evidence = [_moved(move) for move in deciding[:1] if "of_names" not in cause]
    if finding.weights:
        evidence.append(_first(finding.weights, MOST_WEIGHTS, "more weights"))
    if finding.functions:
        evidence = [_first(finding.functions)]
    if finding.changes:
        said, evidence = f"{' and '.join(map(_changed, finding.changes[:MOST]))}", []
        said += f", and {len(finding.changes) - MOST} more" if len(finding.changes) > MOST else ""
    text = said + (f" ({'; '.join(evidence)})" if evidence else "")
    text += ", from the first row on" if is_from_start else f", {_interval(finding)}"
    if finding.loss_step is not None:
        lead = finding.loss_step - finding.step
        text += f"; the loss rose at step {finding.loss_step}" + (f", {_steps(lead)} later" if lead > 0 else "")
    others = [move for move in finding.moves if move not in deciding]
    if others and not is_from_start:
        text += f". With it or later: {_first(list(map(_where, others)))}"
    if finding.as_before and not is_from_start:
        text += f". {capitalized(listed(finding.as_before))} {'is' if _is_one(finding) else 'are'} as before"
    return text


def _first(words: Sequence[str], most: int = MOST, others: str = "more") -> str:
    """The first words of a list, and how many others there are."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more} {others}" if more > 0 else "")


def _is_one(finding: Finding) -> bool:
    return len(finding.as_before) == 1 and not finding.as_before[0].endswith("s")


def _decides(finding: Finding, move: Move) -> bool:
    known = quantities().get(move.quantity, {})
    kind = "gradients" if finding.kind == "instability" else finding.kind
    is_rate = kind == "rate" and not finding.changes
    return is_rate or known.get("kind") == kind or "counts" in known or move.quantity == "loss_scale"


def _interval(finding: Finding) -> str:
    """Between which steps it began, as far as it was recorded."""
    if finding.since is None or finding.step - finding.since <= 1:
        return f"at step {finding.step}"
    return f"between the recorded steps {finding.since} and {finding.step}"


def _changed(change: Change) -> str:
    of = f" of the weights of {listed(change.parts)}" if change.parts else ""
    return f"{change.name}{of} went from {_short(change.before)} to {_short(change.value)}"


def _moved(move: Move) -> str:
    if move.quantity == "change_over_updates":
        return f"they moved {_short(move.value)} times as far as all updates since the row before explain"
    way = "rose" if move.value > move.usual else "fell"
    if not math.isfinite(move.usual):
        return f"{_where(move)} is {_short(move.value)}"
    if math.isinf(move.deviations) and move.row == 0:
        return f"{_where(move)} is {_short(move.value)}, and {_short(move.usual)} in the other blocks"
    text = f"{_where(move)} {way} from {_short(move.usual)} to {_short(move.value)}"
    if move.deviations < MOST_DEVIATIONS:
        text += f", {_short(move.deviations)} deviations of its own noise"
    return text


def _short(value: float) -> str:
    return number(float(f"{value:.3g}"))


def _steps(steps: int) -> str:
    return f"{steps} step{'s' * (steps != 1)}"


def _where(measured: Move | Reach) -> str:
    return f"{measured.quantity} of {measured.place}" if measured.place else measured.quantity


def _reach(reach: Reach) -> str:
    now = f"{_where(reach)} is {_short(reach.value)}"
    level = _short(reach.level)
    if math.isinf(reach.step):
        return f"{now}, and has no trend towards the level {level}"
    if reach.step == reach.low == reach.high:
        return f"{now}, beyond the level {level}"
    ends = Interval(reach.step, reach.low, reach.high)
    when = ends.spelled(lambda step: "never" if math.isinf(step) else f"{step:,.0f}")
    return f"{now}; at its present trend it reaches the level {level} at step {when}"


def _plain_finding(finding: Finding, recording: Recording) -> dict[str, Any]:
    """A finding as values for JSON."""
    moves = [
        {
            "quantity": move.quantity,
            "place": move.place,
            "step": int(recording.step_m[move.row]),
            "value": finite(move.value),
            "usual": finite(move.usual),
            "deviations": finite(move.deviations),
        }
        for move in finding.moves
    ]
    return {
        "step": finding.step,
        "since": finding.since,
        "kind": finding.kind,
        "parts": finding.parts,
        "weights": finding.weights,
        "functions": finding.functions,
        "loss_step": finding.loss_step,
        "moves": moves,
        "text": capitalized(what_moved(finding)),
        "next": next_look(finding),
    }
