"""Which column of a table of runs is what: the quantities, the settings that set arms apart, and why others do not."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.text import spelled_out
from lab.core import shipped
from lab.core.errors import RequestError, nearest

# What columns are called; the file says which.
_NAMES: dict[str, Any] = shipped.load(Path(__file__).with_name("columns.yaml"))
USUAL_NAMES: dict[str, list[str]] = _NAMES["usual"]
BEFORE_TRAINING = {"init", "initial", "at"}
HELD_OUT = {"val", "valid", "validation", "eval", "dev", "test"}
LOSS_WORDS = {"loss", "perplexity", "ppl", "bpb", "nll"}
QUANTITIES = {*chain(*USUAL_NAMES.values())}
LOGGED_STEPS, ARM_NAMES, RUN_NAMES, PREFIXES = (_NAMES[key] for key in ("logged_steps", "arms", "runs", "prefixes"))
BOOKKEEPING = {*_NAMES["bookkeeping"], *LOGGED_STEPS}
UNFINISHED, FAILED, DIVERGED, AVERAGES = (_NAMES[key] for key in ("unfinished", "failed", "diverged", "averages"))
NOTES, LOST_AT = _NAMES["notes"], _NAMES["lost_at"]
UNSURE, SCORES, LAST_RATES, OF_MACHINES = (_NAMES[key] for key in ("unsure", "scores", "last_rates", "of_machines"))
CHANGED, SET_TO, SET_FROM, BASES = (_NAMES[key] for key in ("changed", "set_to", "set_from", "bases"))
DECISIONS, KEPT, DESCRIPTIONS = (_NAMES[key] for key in ("decisions", "kept", "descriptions"))
BASE_WORDS = {word for word in BASES if word.isalpha()} - {"none", "nothing"}
GLUED: dict[str, str] = _NAMES["glued"]
LARGEST_POWER = 99  # in a cell such as 10^-4
FEWEST_OF_CAPITALS = 1000  # parameters or tokens of a column called N or D, which may number anything
# Nats in a unit of losses; a perplexity is their exponential.
LN2 = math.log(2)
LOSS_UNITS = {"nats": 1.0, "bits": LN2, "bits_per_byte": LN2, "perplexity": math.nan}
UNIT_NAMES = {"ppl": "perplexity", "perplexity": "perplexity", "bpb": "bits_per_byte", "bits_per_byte": "bits_per_byte"}
SAME_LR = 1.005  # learning rates within this ratio, which agree in three digits, are one
MANY_LRS = 3  # at which each value of a column occurs that sets arms apart
# What a column is that holds none of the quantities: a setting that sets arms apart, or that all runs share; or else
# why it is no setting.
BEST = "column "  # before the name of a column of which the best is taken, among those of the design
DESIGN_NAMES = {"lr": "learning rate"}
ARM, SHARED, NAME = "arm", "same in all runs", "a name for each run"
EMPTY, NOTED, MEASURED, CUT = "empty", "bookkeeping", "measured", "cut short where a run diverged"
NOT_NAMED, NOT_NEEDED, NOTE = "not named by --arm", "not needed", "a note"
FOLLOWS = "follows from "  # and from what


class Columns(NamedTuple):
    """Which column holds what; ``None`` looks for a usual name, a number holds for all runs.

    Attributes:
        lr: peak learning rates; a table may have none.
        loss: final losses; what is empty or not finite is a diverged run.
        size: numbers of parameters, or any other whole number above 0 that grows with the model.
        seed: seeds; all runs are of one seed without it.
        arm: columns of settings that set arms apart; see ``roles_of``.
        initial_loss: losses at initialization, at which diverged runs count.
        steps: numbers of training steps.
        axis: the numeric setting along which curves run, instead of the learning rate.
        best_over: settings over which the best run is taken, so that they set no runs apart.
        unit: of the losses, one of ``LOSS_UNITS``; None takes what the name of the column says, or else nats.
        keep: which row of a run counts that has several: ``last``, ``best``, or ``error`` if none may have.
    """

    lr: str | None = None
    loss: str | None = None
    size: str | None = None
    seed: str | None = None
    arm: Sequence[str] | None = None
    initial_loss: str | None = None
    steps: str | None = None
    axis: str | None = None
    best_over: Sequence[str] | None = None
    unit: str | None = None
    keep: str | None = None


def column_of(table: pd.DataFrame, key: str, given: str | None) -> str | float | None:
    """The column of a quantity, or the number that holds for all runs; None if there is neither.

    ``key`` is a field of ``Columns``, and ``given`` its value there.

    Raises:
        RequestError: there is no such column, or none of losses.
    """
    option = f"--{key.replace('_', '-')}"
    if given is not None:
        if given in table:
            if key == "loss" and {*words_of(given)} & {*SCORES}:
                raise RequestError(f"--loss: {given} is better where it is higher; give the column of a loss")
            return given
        try:
            number = float(spelled_out(given)) if key in ("size", "steps", "initial_loss") else math.nan
        except ValueError:
            number = math.nan
        if math.isfinite(number):
            return number
        raise RequestError(f"{option}: no column {given!r}; {nearest(given, map(str, table))}")
    found = usual_column(table, key)
    if key == "loss" and found is not None:
        _refuse_other_losses(table, found)
    if found is None and key == "loss":
        numeric = [str(name) for name in table if not is_word(table[name])]
        if unsure := next((name for usual in UNSURE for name in numeric if end_of(name) == usual), None):
            raise RequestError(f"{unsure} may be a loss or a score; --loss {unsure} if lower is better")
        usual_names = " or ".join(USUAL_NAMES[key][1:4])
        raise RequestError(f"no column is called {usual_names}; {option} COLUMN says which it is")
    return found


def _refuse_other_losses(table: pd.DataFrame, found: str) -> None:
    """Refuse a training loss where an unusual name may be that of a held-out one, by which another run is best."""
    losses = {name: pd.to_numeric(table[name], errors="coerce") for name in called_so(table, "loss")}
    held_out = [name for name in losses if {*re.split(r"[^a-z]+", name.lower())} & HELD_OUT]
    if found in held_out or found not in losses or losses[found].isna().all():
        return
    best = losses[found].reset_index(drop=True).idxmin()
    if rivals := [name for name in held_out if losses[name].reset_index(drop=True).idxmin() != best]:
        raise RequestError(f"the final loss may be {' or '.join([found, *rivals])}; --loss COLUMN says which it is")


def usual_column(table: pd.DataFrame, key: str) -> str | None:
    """The column that has a usual name of a quantity, the first in the order of these names; None without one.

    Raises:
        RequestError: several columns are called learning rates, and which holds the peaks is not known.
    """
    if key == "lr":
        return _peak_rate(table)
    for usual in USUAL_NAMES.get(key, ()):
        same = [str(name) for name in table if _is_called(str(name), usual, whole=True)]
        ends = [str(name) for name in table if _is_called(str(name), usual)]
        if (same or len(ends) == 1) and _may_be(table[(same or ends)[0]], key, usual):
            found = (same or ends)[0]
            return found if key != "seed" else _varying_seed(table, found)
    return _varying_seed(table, None) if key == "seed" else None


def rates_of(table: pd.DataFrame) -> list[str]:
    """The columns of numbers that are called learning rates, in the order of their usual names."""
    names = [str(name) for name in table if not pd.api.types.is_bool_dtype(table[name])]
    called = [
        name
        for is_whole in (True, False)
        for usual in USUAL_NAMES["lr"]
        for name in names
        if _is_called(name, usual, whole=is_whole)
    ]
    return [*dict.fromkeys(called)]


def called_so(table: pd.DataFrame, key: str) -> list[str]:
    """The columns of numbers that might hold a quantity, by their names."""
    if key == "lr":
        rivals = rates_of(table)
    elif key == "seed":
        rivals = [str(name) for name in table if is_seed(str(name))]
    elif key == "loss":
        names = [str(name) for name in table if path_of(str(name))[0].lower() not in OF_MACHINES]
        rivals = [name for name in names if {*words_of(name)} & LOSS_WORDS and not {*words_of(name)} & BEFORE_TRAINING]
    else:
        rivals = []
    return [name for name in rivals if not is_word(table[name]) and table[name].notna().any()]


def as_rates(column: pd.Series[Any]) -> pd.Series[float]:
    """A column of learning rates, or of their logarithms, as numbers; NaN where it holds none."""
    numbers = pd.to_numeric(column, errors="coerce").astype(float)
    logarithm = re.match("log(2|10)", end_of(str(column.name)))
    return float(logarithm[1]) ** numbers if logarithm else numbers


def _peak_rate(table: pd.DataFrame) -> str | None:
    """The column of peak learning rates: of those that differ, the one that no other exceeds in any row.

    The last rate of a schedule, which trackers log under such a name, lies below the peak. None if there is no other.
    """
    rates = {name: as_rates(table[name]) for name in rates_of(table)}
    lasts = [as_rates(table[name]) for name in table if end_of(str(name)) in LAST_RATES]
    rates = {name: rate for name, rate in rates.items() if not any(rate.equals(last) for last in lasts)}
    unlike: dict[str, pd.Series[float]] = {}
    for name, rate in rates.items():
        if not any(is_peak(rate, other) and is_peak(other, rate) for other in unlike.values()):
            unlike[name] = rate
    if len(unlike) <= 1:
        return next(iter(unlike), None)
    varying = [name for name, rate in unlike.items() if rate.nunique() > 1] or [*unlike]
    highest = [name for name in varying if all(is_peak(unlike[name], other) for other in unlike.values())]
    if not highest:
        raise RequestError(f"the peak learning rate may be {' or '.join(unlike)}; --lr COLUMN says which it is")
    return highest[0]


def is_peak(peak: pd.Series[Any], rate: pd.Series[Any]) -> bool:
    """Whether no learning rate exceeds the one in its row that may be its peak."""
    numbers = pd.to_numeric(rate, errors="coerce")
    return bool(((numbers <= pd.to_numeric(peak, errors="coerce") * SAME_LR) | numbers.isna()).all())


def _varying_seed(table: pd.DataFrame, found: str | None) -> str | None:
    """The only other column of seeds that varies, such as ``data_seed``, where the one that was found does not."""
    if found is not None and table[found].nunique() > 1:
        return found
    others = [str(name) for name in table if is_seed(str(name)) and not is_word(table[name])]
    varying = [name for name in others if table[name].nunique() > 1]
    return varying[0] if len(varying) == 1 else found


def is_seed(name: str) -> bool:
    """Whether a column is called as one of seeds, of whatever they are."""
    return "seed" in words_of(name)


def words_of(name: str) -> list[str]:
    """``eval/Top1_acc -> [top1, acc]``."""
    return re.split(r"[^a-z0-9]+", end_of(name))


def _any_of(words: Sequence[str]) -> str:
    spaced = sorted((word.replace("_", " ") for word in words), key=len, reverse=True)
    return rf"(?<![a-z0-9'])(?:{'|'.join(spaced)})(?![a-z])"


_ENDINGS = [re.compile(_any_of(words)) for words in (DIVERGED, FAILED, UNFINISHED)]
_RECOVERED = re.compile(_any_of(_NAMES["recovered"]))
# What may stand between a negation and the word that it denies, as in ``no sign of nan or inf``.
_FILLERS = ["a", "any", "sign", "signs", "of", "or", "and", "the", "loss", "yet", "steps", "t"]
_BETWEEN = _any_of([*DIVERGED, *FAILED, *_FILLERS])
_NEGATED = re.compile(rf"{_any_of(_NAMES['negations'])}[ ']+(?:{_BETWEEN} +)*$")
_DENIED = re.compile(r" *(?:free\b|rates?\b|[:=?] *(?:no|none|false|0)\b)")


def ending_of(cell: Any) -> str:
    """The word of a status that says how a run ended, one of ``DIVERGED``, ``FAILED`` or ``UNFINISHED``; else nothing.

    >>> ending_of("stopped early (NaN at ep 202)"), ending_of("finished, no nan")
    ('nan', '')
    """
    text = " ".join(re.sub(r"[\s_-]+|/(?=\D)", lambda gap: " or " if gap[0] == "/" else " ", str(cell).lower()).split())

    def said(pattern: re.Pattern[str]) -> str:
        words = (
            match[0]
            for match in pattern.finditer(text)
            if not _NEGATED.search(text[: match.start()]) and not _DENIED.match(text, match.end())
        )
        return next(words, "").replace(" ", "_")

    diverged, *others = map(said, _ENDINGS)
    return next(filter(None, ["" if said(_RECOVERED) else diverged, *others]), "")


# 2^-8, 10**4, 3 x 10^{-4}
POWER = re.compile(
    r"(?:([-+]?\d+(?:\.\d*)?) ?(?:[*x\u00d7\u00b7]|\\cdot|\\times) ?)?(2|10)(?:\^|\*\*)(?:\{([-+]?\d+)\}|([-+]?\d+))"
)


def computed(word: str) -> str:
    """A power as a number, as tables of widths and learning rates have it: ``2^-8``, ``3 x 10^{-4}``; else the word."""
    plain = word.strip().strip("$").replace("\u2212", "-").strip()
    if not (match := POWER.fullmatch(plain)):
        return word
    factor, base, braced, exponent = match.groups()
    power = int(braced or exponent)
    return repr(float(factor or 1) * float(base) ** power) if abs(power) <= LARGEST_POWER else word


@cache
def path_of(name: str) -> Sequence[str]:
    """The parts of a name, ``config/optim.LR -> [config, optim, LR]``; a fraction, as ``D/N``, is one part."""
    name = re.sub(r"^(params|user_attrs)_", r"\1/", re.sub(r"[ -]", "_", name.strip()))  # as Optuna calls them
    above, slash, below = name.rpartition("/")
    if slash and above not in PREFIXES:
        *parts, end = path_of(above)
        if {end, end.lower()} & QUANTITIES and end not in PREFIXES:
            return [*parts, f"{end}/{below}"]
    return re.split(r"[/.]", name)


def end_of(name: str) -> str:
    """``config/LR -> lr``."""
    return path_of(name)[-1].lower()


def short_name(name: str) -> str:
    """A name without the prefixes of a tracker and without the groups that dots join, as in ``config.optim.wd -> wd``.

    Nothing is cut at a slash, which may divide, as in ``D/N``.
    """
    name = re.sub(r"^(params|user_attrs)_", "", name)
    while (parts := re.split(r"[/.]", name, maxsplit=1))[0].lower() in PREFIXES and len(parts) > 1:
        name = parts[1]
    return name if "/" in name else name.rpartition(".")[2] or name


def _is_called(name: str, usual: str, *, whole: bool = False) -> bool:
    """Whether a column has a usual name, at its end or as a ``whole``; one in capitals is meant as it is written."""
    parts, wanted = path_of(name), path_of(usual)
    if not usual.isupper():
        parts, wanted = [part.lower() for part in parts], [part.lower() for part in wanted]
    if whole or len(parts) <= len(wanted):
        return whole and parts == wanted
    return parts[-len(wanted) :] == wanted and parts[0].lower() not in OF_MACHINES


def _may_be(cells: pd.Series[Any], key: str, usual: str) -> bool:
    """Whether a column with a usual name can be a quantity: one that is all words cannot, and N and D are large."""
    if key not in ("size", "tokens", "axis"):
        return True
    if pd.api.types.is_bool_dtype(cells):
        return False
    numbers = pd.to_numeric(cells.map(spelled_out, na_action="ignore"), errors="coerce")
    return bool(numbers.notna().any()) and (not usual.isupper() or bool(numbers.min() >= FEWEST_OF_CAPITALS))


def as_text(column: pd.Series[Any]) -> pd.Series[str]:
    """The cells as text, those that are empty as well, so that they are like one another and unlike the others."""
    return column.map(str)


def is_word(column: pd.Series[Any]) -> bool:
    """Whether the values are words or booleans, and no numbers."""
    return pd.api.types.is_bool_dtype(column) or not pd.api.types.is_numeric_dtype(column)


def is_arm(name: str) -> bool:
    """Whether a column is called as one of arms."""
    return end_of(name) in ARM_NAMES


def is_named_base(column: pd.Series[Any]) -> pd.Series[bool]:
    """Which cells call a run the baseline."""
    words = as_text(column).str.lower().str.split(r"[^a-z]+", regex=True)
    return words.map(lambda of_cell: bool({*of_cell} & BASE_WORDS))


def roles_of(
    others: pd.DataFrame,
    design: pd.DataFrame,
    is_cut: pd.Series[bool],
    arm: Sequence[str] | None = None,
    measured: Collection[str] = (),
    *,
    are_trials: bool = False,
) -> dict[str, str]:
    """What each of these columns is, or why it is no setting.

    A column sets arms apart if ``arm`` names it. Where that is ``None``, it does so if each of its values occurs with
    three learning rates or more, or if it is needed to tell runs apart; unless it is bookkeeping, or other columns
    determine it, or it only says where a diverged run was cut short.

    Args:
        others: the columns that hold none of the quantities.
        design: ``lr``, or the axis in its place, ``seed``, ``size`` and other columns in which runs differ.
        is_cut: the runs that ended early.
        arm: as in ``Columns``.
        measured: columns that set no arms apart.
        are_trials: whether a row may be an arm of its own, since runs have neither learning rates nor seeds.

    Raises:
        RequestError: there is no column that ``arm`` names.
    """
    for name in arm or ():
        if name not in others:
            raise RequestError(f"--arm: no column {name!r}; {nearest(name, map(str, others))}")
    if arm is not None:
        return {str(name): ARM if name in arm else NOT_NAMED for name in others}
    roles = {str(name): _role(others[name], design, is_cut, name in measured) for name in others}
    before = dict(roles)
    runs = design.add_prefix("of the design ").apply(as_text)
    runs = runs.assign(**{name: as_text(others[name]) for name, role in roles.items() if role == ARM})
    while (same := runs.duplicated(keep=False)).any() and (needed := _splitting(others[same], roles, runs[same])):
        roles[needed] = ARM
        runs[needed] = as_text(others[needed])
    if runs.duplicated().any() and are_trials and (named := _name_of_trials(others[~is_cut], roles)):
        roles = {name: NOT_NEEDED if role == ARM else role for name, role in before.items()} | {named: ARM}
    if ARM not in roles.values():  # arms whose seeds differ need no column to be told apart
        words = [name for name, role in roles.items() if role == NOT_NEEDED and is_word(others[name])]
        words = [name for name in words if as_text(others[name]).value_counts().min() > 1]
        roles |= dict.fromkeys([name for name in words if is_arm(name)][:1] or words[:1], ARM)
    arms = {name: others[name] for name, role in roles.items() if role == ARM}
    # of columns that follow from one another the one with fewer values stays, of as many a word, and then the first
    ranks = {name: (is_arm(name), -arm.nunique(), is_word(arm)) for name, arm in reversed(arms.items())}
    for arm_name in sorted(ranks, key=lambda name: ranks[name]):
        rest = [column for other, column in arms.items() if other != arm_name]
        if sources := followed_by(arms[arm_name], rest, design):
            roles[arm_name] = follows_text(sources)
            del arms[arm_name]
    kept = {name: NOTE if is_word(others[name]) else MEASURED for name in roles}
    return {name: kept[name] if role == NOT_NEEDED else role for name, role in roles.items()}


def follows_text(sources: Sequence[pd.Series[Any]]) -> str:
    """That a column follows from these, ``follows from D and bs``."""
    return f"{FOLLOWS}{' and '.join(str(source.name).removeprefix(BEST) for source in sources)}"


def followed_by(column: pd.Series[Any], arms: Sequence[pd.Series[Any]], design: pd.DataFrame) -> list[pd.Series[Any]]:
    """The fewest columns that determine this one; none if nothing does.

    A number follows from settings, the size, and what the best is taken over; a word follows from words only, since it
    may stand for more than a number that changes with it.
    """
    sources = [arm for arm in arms if is_word(arm) or not is_word(column)]
    if not is_word(column):
        sources += [design[name] for name in design if name == "size" or str(name).startswith(BEST)]
    codes = pd.DataFrame({at: pd.factorize(values, use_na_sentinel=False)[0] for at, values in enumerate(sources)})
    codes = codes.assign(own=pd.factorize(column, use_na_sentinel=False)[0]).drop_duplicates()

    def determine(places: Sequence[int]) -> bool:
        return bool(places) and not codes[[*places, "own"]].drop_duplicates().duplicated([*places]).any()

    needed = [*range(len(sources))]
    if not determine(needed):
        return []
    for place in [*needed]:
        without = [other for other in needed if other != place]
        needed = without if determine(without) else needed
    return [sources[place] for place in needed]


def _name_of_trials(others: pd.DataFrame, roles: Mapping[str, str]) -> str | None:
    """The column that names each run, where each is a trial of its own, as in a list of changes that were tried.

    None if runs of one arm would then be taken for arms.
    """
    words = [name for name in others if is_word(others[name]) and roles[str(name)] not in (NOTED, EMPTY, MEASURED)]
    if any(is_arm(str(name)) and others[name].duplicated().any() for name in others):
        return None
    unique = [name for name in words if others[name].notna().all() and others[name].is_unique]
    called = [name for usual in RUN_NAMES for name in others if end_of(str(name)) == usual and others[name].is_unique]
    is_plain = not any(2 * others[name].nunique() <= len(others) for name in words)
    return next((str(name) for name in [*called, *(unique if is_plain else [])]), None)


def _role(column: pd.Series[Any], design: pd.DataFrame, is_cut: pd.Series[bool], is_measured: bool) -> str:
    name, values = str(column.name), as_text(column)
    if column.isna().all():
        return EMPTY
    if end_of(name) in BOOKKEEPING:
        return NOTED
    if is_measured or re.match(r"(summary|metrics?)[/.]", name.lower()):
        return MEASURED
    if values.nunique() == 1:
        return SHARED
    if is_arm(name) and 2 * column.nunique() <= len(column) and (is_base := is_named_base(column)).any():
        return ARM if not is_base.all() else NOT_NEEDED
    if is_word(column):  # of a machine with a seed of its own; arms have several, and these may differ
        seeds = design["seed"].groupby(values).nunique()
        if seeds.min() == 1 and values.groupby(design["seed"]).nunique().max() == 1:
            return f"{FOLLOWS}the seed"
        if _names_sizes(values, design["size"]):
            return f"{FOLLOWS}the size"
    else:
        # a switch may add gains, and so determine the exact size; a width or a depth follows from it
        for key in design:
            is_fixed = values.groupby(as_text(design[key])).nunique().max() == 1 and not values.is_unique
            if is_fixed and (key not in ("lr", "seed") or values.nunique() == design[key].nunique()):
                return f"{FOLLOWS}the {DESIGN_NAMES.get(str(key), str(key))}"
        if _is_cut_short(column, design["size"], is_cut):
            return CUT
    if is_seed(name):
        return NOTED
    if (design["lr"].groupby(values).nunique() >= MANY_LRS).all():
        return ARM
    return NAME if end_of(name) in RUN_NAMES and values.is_unique else NOT_NEEDED


def _names_sizes(words: pd.Series[str], size: pd.Series[float]) -> bool:
    """Whether words name the sizes of one family, as ``pythia-70m`` does, and differ in nothing else."""
    families = words.str.lower().str.replace(r"\d+(\.\d+)?[kmbt]\b", "", regex=True)
    return families.nunique() == 1 and bool((words.groupby(size).nunique() == 1).all())


def _is_cut_short(column: pd.Series[Any], size: pd.Series[float], is_cut: pd.Series[bool]) -> bool:
    """Whether a number is the same for all runs of a size, but lower for those that were cut short."""
    whole = column.where(~is_cut).groupby(size).transform("max")
    same = (column == whole) | (is_cut & ~(column > whole))
    return bool(is_cut.any() and same.all())


def _splitting(others: pd.DataFrame, roles: Mapping[str, str], runs: pd.DataFrame) -> str | None:
    """The column that tells most of these runs apart, which are alike in all settings so far; None without one.

    A number must repeat as a setting does; of columns that do as well, words come first, and those with few values.
    """
    best: tuple[Any, ...] = ()
    for position, name in enumerate(roles):
        values = as_text(others[name])
        repeats = 2 * values.nunique() <= len(values) if is_word(others[name]) else values.value_counts().min() > 1
        if roles[name] not in (NOT_NEEDED, CUT) or not (repeats or is_arm(name)):
            continue
        resolved = int(runs.duplicated().sum() - runs.assign(**{name: values}).duplicated().sum())
        rank = (resolved, is_arm(name), is_word(others[name]), -values.nunique(), -position, name)
        best = max(best, rank) if resolved else best
    return str(best[-1]) if best else None
