"""Signs in the weights, gradients, updates and outputs of parts of the model."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from lab.core.windows import Numbers
from labwatch.recordings.moves import TIMES_LARGEST, TINY, Move, moves_of, usual
from labwatch.recordings.readings import (
    BACK,
    CALM_STEPS,
    FEWEST_ROWS,
    FEWEST_STEPS,
    LASTING,
    LASTS,
    LEAST_RATE,
    MOST,
    STEP_LASTS,
    Readings,
    Sign,
    is_harmless,
    more_of_fewer,
    quantities,
    range_before,
    rows_from,
)
from labwatch.recordings.recording import OF_LOSS, OF_PROBABILITIES

# A block is unlike the others from the first row on if its weights are larger by this factor than their median.
# Or if its attention logits are so many times smaller, as those of small queries and keys. And an embedding of such an
# RMS is unlike any, since the first norm makes its gradients as many times larger. A block has not been trained, as all
# others have, if of so many more gains and biases of its norms all entries are one number.
UNLIKE, SMALLER_LOGITS, SMALL_EMBEDDING, UNTRAINED = 4.0, 30.0, 1e-3, 0.2
GAIN = re.compile(r"(norm|(^|[._])ln)[^.]*\.(weight|gain|scale|g)$", re.IGNORECASE)
# Attention has collapsed if its entropy is so small, in nats.
COLLAPSED = 0.05
# A model is sure of what it predicts if its output logits have this standard deviation. Attention and routers are sure
# if their largest logits are so large. Initial matrices are wide if one makes random numbers so many times as large,
# and narrow if none makes them more than so large; a gain of one keeps their size. Weights of a part are large at first
# if this is their RMS, and so are the residual stream and what enters it.
SURE, SURE_LOGITS, WIDE, NARROW, LARGE, LARGE_STREAM, LARGE_INPUT = 3.0, 8.0, 3.0, 0.02, 3.0, 15.0, 4.0
# A model is to predict the next tokens if so many labels are these; it sees them if so much more attention is on later
# tokens than a prefix that all see would have, if the tokens without a label were that. It copies if its labels are the
# tokens that it gets, none of its blocks sees later ones, and the loss falls to such a share.
NEXT, AHEAD, COPIED = 0.9, 0.05, 0.05
# Updates are too large if the first ones of most parts change weights by such a share of their size, or by half of that
# in a later row of the first steps, or where the loss does not fall to such a share; or if two in so many steps do by
# such a one while the largest attention logits of all blocks grow so many times and to such a share of their level, or
# these grow so many times beyond it. They are too small if in so many steps, of a model that had just been made, they
# never change weights by such a share. They change apart from gradients if the logarithm of what a rate of one would
# make of them changes by so much more.
LARGE_UPDATES, LONG_UPDATES, SMALL_UPDATES, SMALL_STEPS, UPDATES_APART = 0.2, 0.015, 1e-4, 100, 1.1
LOGITS_GREW, NEAR_LOGITS, FAR_LOGITS, LEARNED = 4.0, 0.125, 4.0, 0.9
# Weights have moved by more than their updates can if it is so many times what these explain, or so many times, and in
# a block so many times as much as in the median one. The first are small. They stay behind their updates if the
# logarithm of that is so far below the rows before, for some rows.
BEYOND_UPDATES, BEYOND, UNLIKE_BLOCKS, OF_FIRST, BEHIND_UPDATES = 3.4, 1.5, 3.0, 2.0, 0.65
# Weights of most parts shrink if they are such a share of what they were at the row before.
HALF = 0.5
# Weights are rounded if so many of their entries need no more digits than a 16-bit format has; others do by chance.
ROUNDED = 0.99
# What a block makes of its input, or its attention logits, change apart from the others if their logarithm changes by
# so much more, by so many times the median spread of the others, and by ``TIMES_LARGEST`` times as much as ever: blocks
# drift apart while they learn, each at its own time. Logits smaller than the least are harmless.
APART, LOGITS_APART, SPREADS, LEAST_LOGIT = 0.7, 2.0, 8.0, 1.0
# Gradients change apart from those of the next part by this factor.
GRADIENTS_APART = 3.0
# What writes weights in more steps than this that lie apart, or in the first steps, does so by habit, unless it began
# later than so many times the steps that lie between.
HABIT, LATE_HABIT = 2, 4


def not_finite(read: Readings) -> Iterator[Sign]:
    """The first row with numbers that are not finite, by the parts in which they are."""
    scaled = read.has("loss_scale")
    of_names = {what: read.named(f"{what}_not_finite") for what in ("weight", "gradient", "update")}
    rows = [next(iter(rows)) for what, rows in of_names.items() if rows and not (scaled and what == "gradient")]
    names = ("block_rms", "param_rms", "attention_logit_max", *(() if scaled else ("grad_rms",)), "update_rms")
    infinite = {
        (name, place): int(np.argmax(value_m))
        for (name, place), column_m in read.recording.columns.items()
        if name in names and place and (value_m := np.isinf(column_m)).any()
    }
    bad_step_n = read.recording.loss_step_n[~np.isfinite(read.recording.loss_n)]
    began_well = len(bad_step_n) and bad_step_n[0] > read.recording.loss_step_n[0]
    loss_at = int(bad_step_n[0]) if began_well and not scaled else None
    if not rows and not infinite:
        if loss_at is not None and read.column("row_share")[read.row_of(loss_at)] != 0:  # of no label, which is of data
            yield Sign("not_finite", read.row_of(loss_at), at=loss_at)
        return
    first = min([*rows, *infinite.values()])
    at = loss_at if loss_at is not None and loss_at <= read.step_m[first] else None
    for what in ("weight", "activation", "gradient", "update"):
        parts = of_names.get(what, {}).get(first, {})
        if what == "activation":
            made = {place for (name, place), row in infinite.items() if row == first and name[:3] in ("blo", "att")}
            found = [block for block in read.blocks if block in made]
            entering = read.column("input_rms")[first]
            is_of_all = np.isinf(entering) or (np.isnan(entering) and 1 < len(found) == len(read.blocks))
            parts = {} if is_of_all else {place: [] for place in found[:1]}
        if parts and not (what == "gradient" and scaled):
            yield Sign(
                "not_finite", first, sorted(parts), weights=[name for of in parts.values() for name in of], at=at
            )
            return
    yield Sign("not_finite", first, sorted({place for (_, place), row in infinite.items() if row == first}), at=at)


def zero_gradients(read: Readings) -> Iterator[Sign]:
    """Weights whose gradients are exactly zero in some rows in a row, in which labels count."""
    is_taught_m = ~read.teach_nothing_m & (read.column("row_share") != 0)
    rows = {row: parts for row, parts in _but_idle_gains(read, "gradient_zero").items() if is_taught_m[row]}
    end = len(read.step_m)
    for row, parts in rows.items():
        lasts = LASTING + (row == 0)  # behind two matrices that are zero at first there are no gradients in two updates
        is_first = row == next(filter(None, rows), None) and row >= LASTING  # and the last row may show it alone
        then = [rows.get(later, {}) for later in range(row + 1, min(row + lasts, end) if is_first else row + lasts)]
        lasting = {
            place: kept
            for place, names in parts.items()
            if (kept := [name for name in names if all(name in zero.get(place, []) for zero in then)])
        }
        if lasting:
            names, is_of_all = [name for of in lasting.values() for name in of], len(lasting) >= MOST * len(read.places)
            yield Sign("dead", row, sorted(lasting), weights=names, is_exact=is_of_all)  # as where no label counts
            return


def _but_idle_gains(read: Readings, what: str) -> dict[int, dict[str, list[str]]]:
    """Names of weights of which something is so, but for gains of norms of which it is so from the first row on.

    A norm that gets zeros, as before the first block of a decoder of queries, has nothing to multiply.
    """
    rows = read.named(what)
    idle = {name for of in rows.get(0, {}).values() for name in of if GAIN.search(name)}
    kept = {row: {part: [x for x in of if x not in idle] for part, of in parts.items()} for row, parts in rows.items()}
    return {row: of for row, parts in kept.items() if (of := {part: names for part, names in parts.items() if names})}


def silent(read: Readings) -> Iterator[Sign]:
    """Blocks of which something is zero from one row on that never was; one block whose attention has collapsed."""
    for name in ("block_rms", "attention_logit_max", "attention_entropy", "router_logit_max"):
        least = COLLAPSED if name == "attention_entropy" else 0.0
        rows = dict[str, int]()
        for block in read.blocks:
            value_m = np.abs(read.column(name, block))
            row_n = np.flatnonzero(np.isfinite(value_m))
            usual = int((value_m[row_n] > least).sum())
            if LASTING <= usual < len(row_n) and (value_m[row_n[usual:]] <= least).all():
                rows[block] = int(row_n[usual])
        for block, row in rows.items() if not least or len(rows) == 1 else ():  # it collapses in all by what they get
            yield Sign(quantities()[name]["kind"], row, [block], [read.change(name, block, row)], is_exact=not least)


def frozen(read: Readings) -> Iterator[Sign]:
    """Parts that lose their gradients, or whose updates become zero, while others are trained.

    Or blocks that never have any, after one that is trained; what is frozen by plan comes first.
    """
    places = read.recording.places("grad_rms")
    trained = {block for block in read.blocks if np.isfinite(read.column("grad_rms", block)).any()}
    known = trained | {*read.named("left_out").get(0, {})}
    never = [block for of in read.lists for n, block in enumerate(of) if block not in known and trained & {*of[:n]}]
    if never and not read.takes_turns:
        yield Sign("frozen", 0, never, is_exact=True)
    has_pm = np.isfinite([read.column("grad_rms", place) for place in places])
    for place, has_m in () if read.takes_turns else zip(places, has_pm, strict=True):
        is_trained_m = has_m & ~(read.column("update_ratio", place) == 0)
        lost = np.flatnonzero(~is_trained_m & (has_pm.sum(axis=0) > has_m) & (read.column("lr") != 0))
        if len(lost) and not is_trained_m[lost[0] :].any() and is_trained_m[: lost[0]].any():
            yield Sign("frozen", int(lost[0]), [place])


def lost_gradients(read: Readings) -> Iterator[Sign]:
    """Weights that get no gradient any more, in no row from one on, though they did in those before."""
    yield from _never_again(read, read.named("gradient_missing"))


def left_out(read: Readings) -> Iterator[Sign]:
    """Weights that get gradients from the start, and that no optimizer has, nor anything else writes."""
    written = {name for parts in read.recording.written.values() for of in parts.values() for name in of}
    parts, start = read.named("left_out").get(0, {}), read.step_m[0]
    joined = {part for of in read.recording.settings if of.step_n and of.step_n[0] > start for part in of.parts}
    names = [name for of in parts.values() for name in of]
    if names and written.isdisjoint(names) and joined.isdisjoint(parts):
        moves = [Move("left_out", place, 0, 1, 1.0, 0.0, math.inf) for place in parts]
        yield Sign("frozen", 0, sorted(parts), moves, names, is_exact=True)


def rounded_weights(read: Readings) -> Iterator[Sign]:
    """Weights in fp32 that updates move, and that have no more digits than a 16-bit format in each row from one on."""
    found = defaultdict[int, list[Move]](list)
    for place in read.recording.places("weights_rounded"):
        share_m = read.column("weights_rounded", place)
        row_n = np.flatnonzero(np.isfinite(share_m))
        first = int(np.flatnonzero(np.append(True, ~(share_m[row_n] > ROUNDED)))[-1])
        is_moved = (read.column("update_ratio", place)[row_n[first:]] > 0).any()
        if first < len(row_n) > 1 and is_moved:
            row, before = int(row_n[first]), float(share_m[row_n[first - 1]]) if first else math.nan
            found[row].append(Move("weights_rounded", place, row, row + 1, float(share_m[row]), before, math.inf))
    for row, moves in found.items():
        if len(moves) >= MOST * len(read.places):  # of single parts entries may not have moved at all
            yield Sign("precision", row, [move.place for move in moves], moves, is_exact=True)


def rounded_updates(read: Readings) -> Iterator[Sign]:
    """Weights in 16 bits, of which rounding leaves many as they were at an update."""
    row, places = read.rounded_since, read.recording.places("updates_lost")
    if row is not None:
        moves = [
            Move("updates_lost", place, row, row + 1, lost, math.nan, math.inf)
            for place in places
            if (lost := float(read.column("updates_lost", place)[row])) > 0
        ]
        yield Sign("precision", row, moves=moves, is_exact=True)


def lost_updates(read: Readings) -> Iterator[Sign]:
    """Weights of some parts whose updates are zero in each row from one on, while the rate is not much lower.

    Unless those of others are so by chance, now and then, as of scalars under an optimizer that masks signs.
    """
    rate_m, places = read.column("lr"), read.recording.places("update_ratio")
    high_m = rate_m >= BACK * np.fmax.accumulate(rate_m)
    rows = {row: of for row, of in _but_idle_gains(read, "update_zero").items() if len(of) < MOST * len(places)}
    signs = list(_never_again(read, rows))
    if {name for sign in signs for name in sign.weights} == {x for of in rows.values() for x in chain(*of.values())}:
        yield from (sign for sign in signs if high_m[sign.row])


def _never_again(read: Readings, lacking: Mapping[int, Mapping[str, list[str]]]) -> Iterator[Sign]:
    """Weights that lack something in each row from one on, and in none before."""
    updates_pm = [read.column("update_ratio", place) for place in read.recording.places("update_ratio")]
    missing, found = defaultdict[tuple[str, str], list[int]](list), defaultdict[int, list[tuple[str, str]]](list)
    measured = [
        row for row in range(len(read.step_m)) if row in lacking or any(np.isfinite(m[row]) for m in updates_pm)
    ]
    for row, parts in lacking.items():
        for place, names in parts.items():
            for name in names:
                missing[place, name].append(row)
    for key, rows in missing.items():
        if rows == [row for row in measured if row >= rows[0]]:
            found[rows[0]].append(key)
    for row, lost in () if read.takes_turns else found.items():
        weights = [name for _, name in lost]
        yield Sign("frozen", row, sorted({place for place, _ in lost}), weights=weights, is_exact=True)


def written_weights(read: Readings) -> Iterator[Sign]:
    """Weights that something else than the optimizer writes, unless it always did or does so again and again."""
    start = int(read.recording.loss_step_n[0]) if len(read.recording.loss_step_n) else 0
    early = start + CALM_STEPS
    of_habit = {
        name for step, parts in read.recording.written.items() if step < early for of in parts.values() for name in of
    }  # as an average of the weights that is a part of the model
    written = [
        (step, {place: rest for place, names in parts.items() if (rest := [x for x in names if x not in of_habit])})
        for step, parts in read.recording.written.items()
    ]
    begun = [(step, parts) for (_, before), (step, parts) in pairwise([(0, {}), *written]) if parts and not before]
    if len(begun) > HABIT:
        (first, _), (second, _), *_ = begun
        is_late = first - start > LATE_HABIT * (second - first)
        begun = begun[:1] if is_late else []
    for step, parts in begun:
        names = [name for of in parts.values() for name in of]
        yield Sign("weights", read.row_of(step), sorted(parts), weights=names, is_exact=True, at=step)


def lost_counts(read: Readings) -> Iterator[Sign]:
    """Optimizers that have counted fewer updates than at the row before."""
    found = dict[int, list[Move]]()
    for place in read.recording.places("state_updates"):
        count_m = read.column("state_updates", place)
        for row in (np.flatnonzero(np.diff(count_m) < 0) + 1).tolist():
            found.setdefault(row, []).append(read.change("state_updates", place, row))
    for row, moves in found.items():
        yield Sign("optimizer", row, [move.place for move in moves], moves, is_exact=True)


def unlike_weights(read: Readings) -> Iterator[Sign]:
    """Blocks whose weights are larger than those of the others from the first row on, or alone have not been trained.

    Or a tiny embedding.
    """
    rms, embedding = read.at_start("param_rms"), float(read.column("param_rms", "embedding")[0])
    if 0 < embedding < SMALL_EMBEDDING and read.is_fresh:
        usual = float(np.median([*rms.values()]))
        yield Sign("weights", 0, ["embedding"], [Move("param_rms", "embedding", 0, 1, embedding, usual, math.inf)])
        return
    for block, value in rms.items():
        usual = float(np.median([other for name, other in rms.items() if name != block] or [math.nan]))
        if len(rms) >= 3 and value > UNLIKE * usual:
            yield Sign("weights", 0, [block], [Move("param_rms", block, 0, 1, value, usual, math.inf)])
    shares = read.at_start("constant_norms")
    for block, others in ((block, {*blocks} - {block}) for blocks in read.lists for block in blocks):
        most = max([shares[other] for other in others], default=math.nan)
        if len(others) >= 2 and shares[block] > most + UNTRAINED:
            yield Sign("weights", 0, [block], [Move("constant_norms", block, 0, 1, shares[block], most, math.inf)])
    logits = read.at_start("attention_logit_max")
    for block, value in logits.items():
        least = min([other for name, other in logits.items() if name != block], default=math.nan)
        if len(logits) >= 3 and 0 < value * SMALLER_LOGITS < least:
            yield Sign("weights", 0, [block], [Move("attention_logit_max", block, 0, 1, value, least, math.inf)])


def unusual_initial_values(read: Readings) -> Iterator[Sign]:
    """Initial matrices that are all too small; or ones that are too large, as logits may show, too.

    These may be so after training, so labels are no more likely than other tokens.
    """
    gains = _at_first(read, "weight_gain", read.recording.places("weight_gain"))
    if gains and 0 < max(gain.value for gain in gains) < NARROW:
        yield Sign("weights", 0, [gain.place for gain in gains], gains)
    if not read.is_untrained:
        return
    if wide := [gain for gain in gains if gain.value > WIDE]:
        yield Sign("weights", 0, [gain.place for gain in wide], wide)
    others = {*read.places} - {gain.place for gain in gains}  # parts without a matrix that multiplies
    large = [size for size in _at_first(read, "param_rms", sorted(others)) if size.value > LARGE]
    if large and read.is_fresh:
        yield Sign("weights", 0, [size.place for size in large], large)
    stream, entering = _at_first(read, "block_rms", read.blocks), _at_first(read, "input_rms", [""])
    (embedding,), of_blocks = (_at_first(read, "param_rms", places) for places in (["embedding"], read.blocks))
    is_sure, is_tied = read.initial_deviation > SURE, "head" not in {gain.place for gain in wide}
    enters = bool(stream) and min(size.value for size in [*entering, *stream]) > LARGE_INPUT and read.is_fresh
    is_large = bool(of_blocks) and embedding.value > UNLIKE * np.median([size.value for size in of_blocks])
    is_large = is_large and (enters or (is_sure and is_tied))  # no matrix but the embedding can make it sure
    if is_large:
        yield Sign("weights", 0, ["embedding"], [embedding])
    elif enters:
        yield Sign("activations", 0, ["embedding"], entering, is_exact=True)
    elif stream and max(output.value for output in stream) > LARGE_STREAM and read.is_fresh:
        yield Sign("activations", 0, moves=stream, is_exact=True)
    if is_sure and not (is_large and is_tied):
        yield Sign("output_logits", 0, moves=_at_first(read, "output_logit_rms", [""]))
    for name in ("attention_logit_max", "router_logit_max"):
        logits = _at_first(read, name, read.blocks)
        if logits and min(logit.value for logit in logits) > SURE_LOGITS:
            yield Sign(quantities()[name]["kind"], 0, moves=logits)


def _at_first(read: Readings, name: str, places: Sequence[str]) -> list[Move]:
    """What was measured in the first row, as moves from nothing known."""
    return [Move(name, place, 0, 1, float(read.column(name, place)[0]), math.nan, math.inf) for place in places]


def sees_labels(read: Readings) -> Iterator[Sign]:
    """Blocks that see, from the start, the next tokens, which the model is to predict, beyond those without a label.

    Or one that sees later tokens and comes after one that does not. A list of blocks that all see them is an encoder,
    if those of another list do not. Or labels that are the tokens themselves, of which none sees later ones, and which
    soon are told without an error.
    """
    prompt = 1 - float(read.column("label_share")[0])
    lists = [_at_first(read, "attention_ahead", blocks) for blocks in read.lists]
    decoders = [of for of in lists if min(ahead.value for ahead in of) <= AHEAD] or lists
    seen = [ahead for of in decoders for ahead in of if ahead.value > AHEAD + prompt / 2]
    if not read.column("label_next")[0] > NEXT:
        pairs = [pair for of in lists for pair in pairwise(of)]
        after = [ahead for before, ahead in pairs if before.value == 0 and ahead.value > AHEAD]
        seen = after if len(after) == 1 else []
    if seen:
        yield Sign("attention", 0, [ahead.place for ahead in seen], seen, is_exact=True)
    loss_n, same = read.recording.loss_n, float(read.column("label_same")[0])
    is_causal = all(ahead.value == 0 for of in lists for ahead in of)
    if same > NEXT and is_causal and np.median(loss_n[-FEWEST_STEPS:]) < COPIED * loss_n[0]:
        yield Sign("data", 0, moves=[Move("label_same", "", 0, 1, same, math.nan, math.inf)], is_exact=True)


def probabilities(read: Readings) -> Iterator[Sign]:
    """A loss that takes the softmax or sigmoid of what is one already."""
    if OF_PROBABILITIES in read.recording.names.get(("functions", OF_LOSS), {}).get(0, []):
        yield Sign("output_logits", 0, moves=[Move("probabilities", "", 0, 1, 1.0, math.nan, math.inf)])


def unusual_updates(read: Readings) -> Iterator[Sign]:
    """Updates that are too large for the weights from the start, or that stay too small for a model to learn.

    Or that are large for long, if attention logits of all blocks grow beyond their level.
    """
    ratio_pm = np.array([read.column("update_ratio", place) for place in read.recording.places("update_ratio")])
    known_m = np.isfinite(ratio_pm).any(axis=0) if len(ratio_pm) else np.zeros(0, dtype=bool)
    if not known_m.any():
        return
    ratio_n = np.nanmedian(ratio_pm[:, known_m], axis=0)
    lr_m = read.column("lr")
    is_small = 0 < ratio_n.max() < SMALL_UPDATES and len(ratio_n) >= FEWEST_ROWS and read.step_m[-1] >= SMALL_STEPS
    is_small = is_small and read.is_fresh and lr_m[-1] <= lr_m[len(lr_m) // 2]  # it has warmed up
    early_n, logits = ratio_n[read.step_m[known_m] <= SMALL_STEPS], quantities()["attention_logit_max"]["level"]
    first = np.array([*read.at_start("attention_logit_max").values()])
    early = [read.column("attention_logit_max", block)[read.step_m <= SMALL_STEPS] for block in read.blocks]
    largest = np.array([np.nan_to_num(logit_m).max(initial=0) for logit_m in early])
    have_grown = len(early) > 0 and (largest > np.maximum(LOGITS_GREW * first, NEAR_LOGITS * logits)).all()
    are_far = (largest > FAR_LOGITS * logits).all()
    is_long = have_grown and len(early_n) > 1 and (are_far or np.median(np.sort(early_n)[-3:]) > LONG_UPDATES)
    loss_n = read.recording.loss_n
    is_judged = read.step_m[-1] >= SMALL_STEPS and len(loss_n) and not read.is_of_rewards
    learns = not is_judged or np.median(loss_n[-STEP_LASTS:]) < LEARNED * loss_n[0]
    is_large = known_m[0] and ratio_n[0] > (LARGE_UPDATES if learns else LARGE_UPDATES / 2)
    is_large = is_large or early_n[1:].max(initial=0) > LARGE_UPDATES / 2
    if is_large or is_small or is_long:
        ratio = float(ratio_n[0] or early_n.max(initial=0))
        yield Sign("rate", 0, moves=[Move("update_ratio", "", 0, 1, ratio, math.nan, math.inf)])


def updates_apart(read: Readings) -> Iterator[Sign]:
    """Updates that change in one row, with the learning rate taken out, by much more than the gradients do."""
    places = [place for place in read.recording.places("update_ratio") if place in read.recording.places("grad_rms")]
    if not places:
        return
    rate_pm = np.array([read.rate_of(place) for place in places])
    names = ("update_ratio", "param_rms", "grad_rms")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_pm, weight_pm, grad_pm = (np.array([read.column(name, place) for place in places]) for name in names)
        is_high_pm = rate_pm > LEAST_RATE * np.fmax.accumulate(rate_pm, axis=1)  # else weights may round updates away
        log_qpm = np.log([np.where(is_high_pm, ratio_pm * weight_pm / rate_pm, math.nan), grad_pm])
        # the first update of Adam is of another size than all others
        row_n = np.flatnonzero(np.isfinite(log_qpm).any(axis=1).all(axis=0) & (np.arange(log_qpm.shape[2]) > 0))
        if not len(row_n):
            return
        update_n, grad_n = (of_n - usual(of_n) for of_n in np.nanmedian(log_qpm[:, :, row_n], axis=1))
        apart_n = np.abs(update_n - np.clip(grad_n, np.minimum(update_n, 0), np.maximum(update_n, 0)))
    for row in row_n[apart_n > UPDATES_APART].tolist():
        if row > read.settled:
            yield Sign("optimizer", row, moves=[read.change("update_ratio", place, row) for place in places])
            return


def weights_beyond_updates(read: Readings) -> Iterator[Sign]:
    """Weights that are farther from where they were at the row before than all updates between can have moved them."""
    more_m = np.where(np.arange(len(read.step_m)) < 2, OF_FIRST, 1.0)
    of_blocks_pm = np.array([read.column("change_over_updates", block) for block in read.blocks])
    for place in read.recording.places("change_over_updates"):
        beyond_m, least_m = read.column("change_over_updates", place), BEYOND_UPDATES * more_m
        if place in read.blocks and len(read.blocks) > 2:
            unlike_m = UNLIKE_BLOCKS * np.median(of_blocks_pm, axis=0)
            least_m = np.fmin(least_m, np.maximum(unlike_m, BEYOND) * more_m)
        if (beyond_m > least_m).any():
            row = int(np.argmax(beyond_m > least_m))
            names = read.recording.names.get(("weight_moved", place), {}).get(row, [])
            move = Move("change_over_updates", place, row, row + 1, float(beyond_m[row]), 1.0, math.nan)
            yield Sign("weights", row, [place], [move], names, is_exact=True)


def shrinking_weights(read: Readings) -> Iterator[Sign]:
    """Weights of most parts that halve from one row to the next, as a decay makes them that has no rate."""
    places = [place for place in read.recording.places("param_rms") if place != "other"]
    has_halved = [read.column("param_rms", place)[1:] < HALF * read.column("param_rms", place)[:-1] for place in places]
    halved_m = np.mean(has_halved, axis=0) >= MOST if places else np.zeros(0, dtype=bool)
    if halved_m.any():
        row = int(halved_m.argmax()) + 1
        yield Sign("optimizer", row, moves=[read.change("param_rms", place, row) for place in places], is_exact=True)


def weights_behind_updates(read: Readings) -> Iterator[Sign]:
    """Weights that, in some rows in a row, move less far with the same updates than in the rows before."""
    name = "change_over_updates"
    for place in read.recording.places(name):
        ratio_m = read.column(name, place)
        row_n = np.flatnonzero(np.isfinite(ratio_m) & (ratio_m > 0))
        log_n = np.log(ratio_m[row_n])
        later_kn, (lowest_n, _) = rows_from(log_n), range_before(log_n)
        is_behind_n = lowest_n - np.fmax.reduce(later_kn) > BEHIND_UPDATES * more_of_fewer(later_kn)
        for n in np.flatnonzero(is_behind_n).tolist():
            if n >= FEWEST_ROWS and row_n[n] > read.settled:
                yield Sign("optimizer", int(row_n[n]), [place], [read.change(name, place, int(row_n[n]))])
                break


def outputs_apart(read: Readings) -> Iterator[Sign]:
    """Blocks whose output changed against their input, and apart from the outputs of other blocks."""
    gain_pm, entering_m = dict[str, Numbers](), read.column("input_rms")
    for block in read.blocks:
        leaving_m = read.column("block_rms", block)
        with np.errstate(invalid="ignore", divide="ignore"):
            gain_pm[block] = leaving_m / entering_m
        entering_m = leaving_m
    yield from _apart(read, gain_pm, APART, "block_rms", "activations")


def logits_apart(read: Readings) -> Iterator[Sign]:
    """Blocks whose largest attention logit changed apart from those of the other blocks."""
    logit_pm = {block: read.column("attention_logit_max", block) for block in read.blocks}
    of_size_pm = {block: np.maximum(logit_m, LEAST_LOGIT) for block, logit_m in logit_pm.items()}
    yield from _apart(read, of_size_pm, LOGITS_APART, "attention_logit_max", "attention")


def gradients_apart(read: Readings) -> Iterator[Sign]:
    """Parts whose gradients changed against those of the next part on the way to the loss, and for some rows.

    So a part counts from which on the backward pass goes wrong, and not all to which it comes after that.
    """
    parts = [part for part in ("embedding", *read.blocks, "head") if part in read.places]
    for part, later in pairwise(parts):
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio_m = read.column("grad_rms", part) / read.column("grad_rms", later)
        for move in moves_of("grad_rms", part, ratio_m, read.settled):
            lasts = move.end - move.row >= LASTS or move.end == len(read.step_m)
            if move.row > read.settled and lasts and abs(move.change) > math.log(GRADIENTS_APART):
                own, other = (read.change("grad_rms", each, move.row) for each in (part, later))
                farther = own if abs(own.change) >= abs(other.change) else other
                yield Sign("gradients", move.row, [farther.place], [farther], begins=True)
                return


def _changes(value_m: Numbers) -> Numbers:
    """The logarithm of the factor to each row from the last one before that is finite; NaN where it is not."""
    row_n = np.flatnonzero(np.isfinite(value_m))
    change_m = np.full(len(value_m) - 1, math.nan)
    change_m[row_n[1:] - 1] = np.diff(np.log(np.maximum(value_m[row_n], TINY)))
    return change_m


def _apart(read: Readings, value_pm: Mapping[str, Numbers], least: float, quantity: str, kind: str) -> Iterator[Sign]:
    """The first row at which the logarithm of a block changed by so much more or less than those of the others."""
    change_pm = {block: _changes(value_m) for block, value_m in value_pm.items()}
    for block, change_m in change_pm.items():
        others_pm = np.array([of_other_m for other, of_other_m in change_pm.items() if other != block])
        if len(others_pm) > 1:
            usual_m = np.median(others_pm, axis=0)
            spread_m = np.median(np.abs(others_pm - usual_m), axis=0)
            away_m = np.nan_to_num(np.abs(change_m - usual_m))
            largest_m = np.append(0.0, np.maximum.accumulate(away_m)[:-1])
            is_apart_m = away_m > np.maximum(least, np.maximum(SPREADS * spread_m, TIMES_LARGEST * largest_m))
            is_apart_m[: read.settled] = False
            if is_apart_m.any():
                row = int(np.argmax(is_apart_m)) + 1
                moves = [read.change(quantity, block, row)]  # without code or weights that changed, it may be learned
                yield Sign(kind, row, [block], moves, is_harmless=is_harmless(read, row))
