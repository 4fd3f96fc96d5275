"""Signs in the code: functions, arguments and buffers of the model, and functions of the loss."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from labwatch.recordings.moves import Move
from labwatch.recordings.readings import CONSTANT_CHANGE, FEWEST_ROWS, MOST, Readings, Sign, factor, is_harmless
from labwatch.recordings.recording import OF_LOSS
from labwatch.recordings.signs_of_columns import no_longer_constant

# What functions and weights of attention are called. Code that changes is of attention, too, if in the first of its
# blocks logits change by this factor, and what it returns by less than the next, or what its mask leaves does by this
# share. A residual adds what a matrix makes to something else. What only gradients notice: functions that keep all
# values, and a weight that is taken out of the graph.
OF_ATTENTION = r"att(n|ention)(\.|_func|_forward)|dot_product_attention|flex_attention"
ATTENTION_LEAPS, OUTPUT_LEAPS, OTHER_MASK = 2.0, 1.5, 0.01
OF_ATTENTION_MODULE = r"[ .](self_)?att(n|ention)\."
KEEPS_VALUES, TAKEN_OUT = re.compile("(no longer|now) (detach|clone|contiguous|alias|requires_grad_)"), "now detach of"
COMBINES = re.compile(r"^now (detach|add|sub|rsub|mul|neg)\b")  # as in ``2 * x.detach() - x``, which is x
FORMAT = re.compile(r" in b?float\d+$")
MASKS = r"(and|or|invert|logical_\w+|ne|eq|[gl][te]|tri[lu]|eye|masked_fill)\b"
OF_MASK = rf"(([\w.]*\.)?{MASKS}|\w+\((torch\.bool\)|{MASKS}))"
MAKES_MASK = re.compile(rf"^(no longer|now) {OF_MASK}")
RESIDUAL = re.compile(r"\bi?add\((\S*(linear|transpose), \S+|\S+, \S*(linear|transpose))\)$")
CAST = re.compile(r"^((no longer|now) )?(to|float|half|bfloat16|double|type|type_as)\b")
# Logits are scaled before the loss takes them, as by a temperature.
SCALES_LOGITS = re.compile(r"^(no longer|now) (Mul|Div)\((the model\)|.*\) of the model)")
TAKES_LOGITS = re.compile(r"Log(Softmax|Sigmoid|sumexp)|BinaryCrossEntropyWithLogits")
VIEWS = re.compile(r"^(no longer|now) (view|reshape|flatten|contiguous|getitem|(un)?squeeze)\(")
NUMBER, SIZE = re.compile(r"-?\d[\d.e+-]*"), re.compile(r"\d+(?=[,\]])")
NOT_USED = "which is not used"
FEWEST_TO_SKIP = 6  # rows after which it is no chance if a part skips something in the last ones alone


def other_functions(read: Readings) -> Iterator[Sign]:
    """Parts that call other functions of torch, or with other numbers, than in all rows before, from one row on."""
    found = defaultdict[int, dict[str, list[str]]](dict)
    for (what, place), of_rows in read.recording.names.items():
        if what == "functions" and (change := _one_change(of_rows)):
            row, words = change
            found[row][place] = words
    yield from _other_loss(read, found)
    sizes = _sizes_of_new_shapes(read)
    for row, of in list(found.items()):
        if row in sizes:  # a sum over tokens is divided by their number
            of = found[row] = {place: words for place, words in of.items() if not _differ_little(words, sizes[row])}
        are_gone = [name.startswith("no longer") for name in _calls(read, row, read.blocks) if RESIDUAL.search(name)]
        if not of or (2 * sum(are_gone) > len(are_gone) and _differ_in_format(read, row, of)):
            del found[row]  # a residual is lost, so what comes after it gets another format
    for row, of in found.items():
        if taken := {place: names for place in of if (names := [x for x in of[place] if x.startswith(TAKEN_OUT)])}:
            of = taken
        if of.keys() == {"embedding"} and row in read.given:
            continue  # positions and masks of a batch of another shape are made by other calls
        functions = list(dict.fromkeys(name for names in of.values() for name in names))
        yield _sign_of_code(read, row, of, functions)
    yield from _other_calls(read, found, sizes)


def _other_loss(read: Readings, found: Mapping[int, dict[str, list[str]]]) -> Iterator[Sign]:
    """The code of the loss changed: what a policy is trained for, or what labels mean, or a factor of all gradients.

    Or what scales the logits.

    Its functions are taken out of those that were found.
    """
    rows = {row: of.pop(OF_LOSS) for row, of in found.items() if OF_LOSS in of}
    one_row = _one_other(read, OF_LOSS)
    if one_row is not None and one_row not in found:
        rows[one_row] = []
    for row, functions in rows.items():
        has_hardly_changed = row != one_row and _differ_little(functions)
        if found.get(row) or has_hardly_changed:  # or it follows code of parts
            continue
        move = Move("loss_code", "", row, row + 1, 1.0, 1.0, math.nan)
        changed = {
            name
            for name in ("loss_weight", "cross_entropy")
            if any(sign.row == row for sign in no_longer_constant(read, name))
        }
        takes_logits = any(map(TAKES_LOGITS.match, read.recording.names.get(("functions", OF_LOSS), {}).get(0, [])))
        functions = [*functions, *_calls(read, row, [OF_LOSS])]
        kind = "gradients" if changed == {"loss_weight"} else "policy" if read.is_of_rewards else "data"
        if kind == "data" and (takes_logits or read.has("log_z")) and any(map(SCALES_LOGITS.search, functions)):
            kind = "output_logits"
        yield Sign(kind, row, (), [move], functions=functions, is_exact=True, is_harmless=is_harmless(read, row))


def _differ_little(functions: Sequence[str], size: float = 1.0) -> bool:
    """Whether functions that are gone are the new ones, with numbers that differ by little, or by about a factor."""
    gone, new = (
        [name.removeprefix(how) for name in functions if name.startswith(how)] for how in ("no longer ", "now ")
    )
    without = [sorted(NUMBER.sub("", name) for name in of) for of in (gone, new)]
    pairs = zip(*([float(x) for name in sorted(of) for x in NUMBER.findall(name)] for of in (gone, new)), strict=False)
    apart = [factor(a / b if b else math.inf) for a, b in pairs]
    return without[0] == without[1] and all(min(each, factor(each / size)) < CONSTANT_CHANGE for each in apart)


def _one_change(of_rows: Mapping[int, Collection[Any]]) -> tuple[int, list[str]] | None:
    """The row in which code, which is written where it changes, did so, and what is gone and new, in words.

    Once, or once more in the next row, and not among the first.
    """
    told = [(row, {*names}) for row, names in sorted(of_rows.items())]
    rows = [row for (_, before), (row, now) in pairwise(told) if before != now]
    if not rows or rows[-1] > rows[0] + 1 or rows[0] < FEWEST_ROWS - 1:
        return None
    (_, before), (_, now) = told[0], told[-1]
    words = [*(f"no longer {name}" for name in sorted(before - now)), *(f"now {name}" for name in sorted(now - before))]
    return (rows[0], words) if words else None


def _one_other(read: Readings, place: str) -> int | None:
    """The row in which the fingerprint of the calls of a part changed."""
    code_m = read.column("code", place)
    change = _one_change({int(row): [code_m[row]] for row in np.flatnonzero(np.isfinite(code_m))})
    return change[0] if change else None


def _calls(read: Readings, row: int, places: Collection[str]) -> list[str]:
    """What parts call no longer, or now, and with the outputs of which others, in a row in which that changed."""
    return [name for place in places for name in read.recording.names.get(("calls", place), {}).get(row, [])]


def _other_calls(read: Readings, other_functions: Collection[int], reshaped: Collection[int]) -> Iterator[Sign]:
    """Parts that call the same functions more or less often, or with the outputs of others.

    Few rows do not tell this of a single part, in which chance may skip or repeat a module, nor of a batch of another
    shape.
    """
    found = defaultdict[int, list[str]](list)
    for place in read.recording.places("code"):
        row, told = _one_other(read, place), read.recording.names.get(("functions", place), {})
        is_added = row in told and row == min(told)  # a part that was not used until then
        if row is not None and place != OF_LOSS and not is_added:
            found[row].append(place)
    for row, places in found.items():
        is_of_most = len({*places} & {*read.blocks}) >= max(2, MOST * len(read.blocks))
        calls = _calls(read, row, places)
        is_own = bool(calls) and not any("." in name.partition("(")[0] for name in calls)  # and of no module inside
        is_mask = bool(calls) and all(map(MAKES_MASK.search, calls))
        is_told = is_of_most or is_own or is_mask or _is_residual(calls)
        is_told = is_told or {*places} == {"head"} or len(read.step_m) >= FEWEST_TO_SKIP
        of_shape = row in reshaped and (is_of_most or not is_own)  # which all blocks get
        is_view = {*places} == {"head"} and bool(calls) and all(map(VIEWS.search, calls))
        if of_shape or is_view or row in other_functions or not is_told:
            continue
        yield _sign_of_code(read, row, places, list(dict.fromkeys(calls)) or ["other calls than before"])


def _is_residual(calls: Sequence[str]) -> bool:
    """Whether calls differ in what is added to what enters, and not in what makes it."""
    return any(map(RESIDUAL.search, calls)) and not any(".linear(" in name for name in calls)


def lacks_residual(read: Readings) -> Iterator[Sign]:
    """Blocks that, from the start, do not add to what enters as all other blocks do, and else have their matrices."""
    for block, lacking in read.named("lacks").get(0, {}).items():
        if _is_residual(lacking):
            moves = [Move("lacks", block, 0, 1, 1.0, math.nan, math.inf)]
            yield Sign("activations", 0, [block], moves, [name for name in lacking if RESIDUAL.search(name)])


def _sizes_of_new_shapes(read: Readings) -> dict[int, float]:
    """Rows whose batch has shapes that none before had, and the factor between its size and that of the first one."""
    sizes, shapes = dict[int, float](), list[list[str]]()
    for row, given in sorted(read.given.items()):
        if given not in shapes:
            shapes.append(given)
            now, first = (math.prod(map(int, SIZE.findall("".join(of[:1])))) or 1 for of in (given, shapes[0]))
            sizes[row] = factor(now / first)
    return sizes


def other_arguments(read: Readings) -> Iterator[Sign]:
    """Arguments of the model that are missing or new from one row on, or of another number format or number of axes."""
    without_sizes = {row: [SIZE.sub("n", name) for name in of] for row, of in read.given.items()}
    if change := _one_change(without_sizes):
        row, functions = change
        move = Move("given", "", row, row + 1, 1.0, 1.0, math.nan)
        yield Sign("data", row, (), [move], functions=functions, is_exact=True)


def written_buffers(read: Readings) -> Iterator[Sign]:
    """Buffers that had the same values in all rows, and have others in all rows from one on."""
    found, rows_of = defaultdict[int, dict[str, list[str]]](dict), defaultdict[tuple[str, str], list[int]](list)
    for (what, place), of_rows in read.recording.names.items():
        for row, names in of_rows.items() if what == "buffer_written" else ():
            for name in names:
                rows_of[place, name].append(row)
    for (place, name), rows in rows_of.items():
        if len(rows) == 1 and rows[0] >= FEWEST_ROWS - 1:
            found[rows[0]].setdefault(place, []).append(name)
    for row, of in found.items():
        moves = [Move("buffer_written", place, row, row + 1, 1.0, 0.0, math.nan) for place in of]
        blocks = [place for place in of if place in read.blocks] or read.blocks  # a buffer beside these is for all
        is_mask = _is_other_mask(read, row, blocks)
        kind, parts = ("attention", blocks) if is_mask else ("weights", [*of])
        names = [name for names in of.values() for name in names]
        yield Sign(kind, row, sorted(parts), moves, names, is_exact=True)


def _sign_of_code(read: Readings, row: int, places: Collection[str], functions: Sequence[str]) -> Sign:
    """Other code of some parts; a mask that is made before the first block is for all blocks."""
    is_of_all = {*places} == {"embedding"} and all(map(MAKES_MASK.search, functions))
    kind = "attention" if is_of_all else _kind_of_code(read, row, places, functions)
    return Sign(kind, row, list(read.blocks) if is_of_all else sorted(places), functions=functions, is_exact=True)


def _differ_in_format(read: Readings, row: int, places: Collection[str]) -> bool:
    """Whether parts call the same functions as before, but for casts and for the formats of what functions return."""
    told = [read.recording.names.get(("functions", place), {}) for place in places]
    pairs = [(of_rows[max(at for at in of_rows if at < row)], of_rows[row]) for of_rows in told if row in of_rows]
    return bool(pairs) and all(_without_formats(before) == _without_formats(now) for before, now in pairs)


def _without_formats(functions: Sequence[str]) -> set[str]:
    return {FORMAT.sub("", name) for name in functions if not (CAST.search(name) or name.endswith(NOT_USED))}


def _kind_of_code(read: Readings, row: int, places: Collection[str], functions: Sequence[str]) -> str:
    """What changes with the functions of some parts: gradients alone, the head, the choice of experts, or attention."""
    told = [name for name in functions if not name.endswith(NOT_USED)]
    if any("no part of the model" in name for name in told) or (told and all(map(KEEPS_VALUES.search, told))):
        return "gradients"
    if any(name.startswith("now detach") for name in told) and all(map(COMBINES.search, told)):
        return "gradients"
    of_formats = [name for name in told if FORMAT.search(name) or CAST.search(name)]
    if of_formats and (all(map(CAST.search, told)) or _differ_in_format(read, row, places)):
        return "precision"
    if {*places} == {"head"}:
        return "output_logits"
    first = [block for block in read.blocks if block in places][:1]
    if any(mask.value > mask.usual == 0 for mask in (read.change("attention_ahead", block, row) for block in first)):
        return "attention"
    calls = _calls(read, row, places)
    if all(map(MAKES_MASK.search, functions)) and not read.has("router_entropy"):  # experts have masks, too
        return "attention"
    if any(map(RESIDUAL.search, calls)):
        return "activations"
    if calls and not all(re.search(OF_ATTENTION_MODULE, name.partition("(")[0]) for name in calls):
        return "activations"
    if all("topk" in name for name in functions):
        return "router"
    change, output = (
        [abs(read.change(name, block, row).change) for block in first] for name in ("attention_logit_max", "block_rms")
    )
    leaps = any(math.log(ATTENTION_LEAPS) < size < math.inf for size in change)
    leaps &= not any(math.log(OUTPUT_LEAPS) < size < math.inf for size in output)  # as of a scale in all of the block
    leaps |= _is_other_mask(read, row, first)
    return "attention" if leaps or all(re.search(OF_ATTENTION, name) for name in functions) else "activations"


def _is_other_mask(read: Readings, row: int, blocks: Collection[str]) -> bool:
    """Whether attention of some blocks sees another share of the tokens than in the row before."""
    masks = [read.change(name, block, row) for name in ("attention_ahead", "attention_seen") for block in blocks]
    return any(abs(mask.value - mask.usual) > OTHER_MASK for mask in masks)
