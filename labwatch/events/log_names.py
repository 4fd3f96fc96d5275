"""What the names in a log stand for: which of them is the step, the loss, the reward and so on, by ``names.yaml``."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from lab.analysis.text import listed
from lab.core import shipped
from lab.core.errors import RequestError, nearest

STEP, LOSS, REWARD, HELD_OUT_LOSS = "step", "loss", "reward", "val_loss"
# What names mean; the file says how.
_WORDS = shipped.load(Path(__file__).with_name("names.yaml"))
NAMES: dict[str, list[str]] = _WORDS["columns"]
UNITS: dict[str, str] = _WORDS["units"]
WHOLE_NAMES, LAST_NAMES, PASSES, HELD_OUT, OF_WHOLE, OF_REWARD, OTHERS, AVERAGES, ADVERSARIAL = (
    frozenset(_WORDS[kind])
    for kind in ("whole", "last", "passes", "held_out", "of_whole", "of_reward", "others", "averages", "adversarial")
)
SCORES, OF_POLICIES = frozenset(_WORDS["scores"]), frozenset(_WORDS["of_policies"])
# How well names fit: those that end with a usual one; averages and parts of a loss; losses of adversarial training;
# where lines hold ``400/3000`` without a name; and names that come last.
ENDING, SECOND, PART, ADVERSARIAL_RANK, PROGRESS_RANK, LAST = 100, 100, 200, 400, 500, 600
# Two of these measurements, or the first alone, are those of reinforcement learning.
OF_REWARDS = (REWARD, "kl", "update_kl", "entropy")
# What is followed besides where these are logged.
OF_SAMPLES = ("zero_variance", "response_length", "truncated", "clip_fraction")
# Columns of this name and a number are gradient norms of the micro-batches of a step.
MICRO_BATCH = "micro_batch_norm_"
# A column ``loss=NAME or loss=OTHER`` holds what the other name says, which may be meant as well.
OR = " or "
# What a person says of a log: names of columns, or a pattern whose groups are columns.
Given = Mapping[str, str] | re.Pattern[str]
UNIT_OF_NAME = re.compile(r"\s\((?:k|%|nats|nats/token)\)$")
MOST_NAMES = 10_000  # different names; a log with more holds no measurements
MOST_OTHERS = 3  # names that are shown of those that might have been taken


@lru_cache(maxsize=MOST_NAMES)
def plain_name(name: str) -> str:
    """``train/CrossEntropyLoss -> train_cross_entropy_loss``."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", UNIT_OF_NAME.sub("", name.strip()))
    return re.sub(r"[^0-9a-z_]+", "_", words.lower()).rstrip("_")


@lru_cache(maxsize=MOST_NAMES)
def rank_of(column: str, name: str) -> int | None:
    """How well a name fits a column: 0 is best; None if it does not fit."""
    plain, usual = plain_name(name), NAMES[column]
    if plain in usual:
        return usual.index(plain) + (LAST if plain in LAST_NAMES else 0)
    if column == STEP and is_progress(name):
        return PROGRESS_RANK
    known = [each for each in usual if each not in WHOLE_NAMES]
    if endings := [ending for ending in known if plain.endswith(f"_{ending}")]:
        ending = max(endings, key=len)
        rest, rank = set(plain.removesuffix(ending).strip("_").split("_")), usual.index(ending)
    elif beginnings := [beginning for beginning in known if plain.startswith(f"{beginning}_")]:  # loss_avg
        rest, rank = set(plain.removeprefix(max(beginnings, key=len)).strip("_").split("_")), len(usual)
        if column not in (LOSS, REWARD) and not rest <= AVERAGES:
            return None
    else:
        is_adversarial = column == LOSS and plain.split("_")[0] in ADVERSARIAL
        return ADVERSARIAL_RANK if is_adversarial and not {*plain.split("_")} & (OTHERS | HELD_OUT) else None
    if rest & OTHERS or (rest & HELD_OUT and column not in (HELD_OUT_LOSS, "clean_val_loss")):
        return None
    of_whole = OF_WHOLE | AVERAGES | (OF_REWARD if column == REWARD else set())
    is_part = column in (LOSS, REWARD) and not rest <= of_whole
    if is_part and column == REWARD and rank == len(usual):  # rewards/chosen, which is no reward of a policy
        return None
    is_average = column != REWARD and bool(rest & AVERAGES)
    return ENDING + rank + (SECOND if is_average else 0) + (PART if is_part else 0)


def is_progress(name: str) -> bool:
    """Whether a name stands for the first number of ``400/3000``."""
    return name.startswith("N/")


def is_pass(name: str) -> bool:
    """Whether a name stands for passes over the data."""
    return plain_name(name).split("_")[-1] in PASSES and rank_of(STEP, name) is not None


def is_part(column: str, name: str) -> bool:
    """Whether a loss, or a reward, may be one of several parts of that of training."""
    rank = rank_of(column, name)
    return rank is not None and ENDING + PART <= rank < PROGRESS_RANK


def is_some_loss(name: str) -> bool:
    """Whether a name is of a loss of training, be it a part or an auxiliary one."""
    words = {*plain_name(name).split("_")}
    return rank_of(LOSS, name) is not None or ("loss" in words and not words & HELD_OUT and not is_of_other(name))


def is_of_other(name: str) -> bool:
    """Whether a name fits a column that is no loss, such as the scale of a loss."""
    return any(rank_of(column, name) is not None for column in NAMES if column != LOSS)


def is_of_rewards(name: str) -> bool:
    """Whether a name fits a column of reinforcement learning, even if it is called a loss, as an entropy may be."""
    return any(rank_of(column, name) is not None for column in OF_REWARDS)


def fits(column: str, names: Iterable[str]) -> list[str]:
    """The names that fit a column, the best first."""
    ranks = [(rank, place, name) for place, name in enumerate(names) if (rank := rank_of(column, name)) is not None]
    return [name for *_, name in sorted(ranks)]


def usual_columns(
    names: Iterable[str], given: Mapping[str, str], of_log: Iterable[str] | None = None
) -> dict[str, str]:
    """The name of each column that is present: as ``given``, or else the one that fits best.

    Scores and returns beside a loss are rewards only in reinforcement learning, as other names of the log, ``of_log``,
    say; by default these are the ``names``.
    """
    names = list(names)
    found = dict[str, str]()
    for column in NAMES:
        fitting = fits(column, names)
        if column in given:
            fitting = [name for name in names if given[column] in (name, plain_name(name))]
        if fitting:
            found[column] = fitting[0]
    words = {word for name in of_log or names for word in plain_name(name).split("_")}
    if (
        plain_name(found.get(REWARD, "")) in SCORES
        and LOSS in found
        and REWARD not in given
        and not words & OF_POLICIES
    ):
        del found[REWARD]
    if LOSS not in found and REWARD in found:
        found[LOSS] = found[REWARD]  # rows of reinforcement learning need no loss
    has_experts = "router_balance" in found or plain_name(found.get(LOSS, "")) == "lm_loss"
    is_open = "router_z" not in found and "log_z_square" not in given
    if has_experts and is_open and found.get("log_z_square") == "z_loss":
        found["router_z"] = found.pop("log_z_square")  # so Megatron-LM calls the z-loss of its routers
    return found | {name: name for name in names if re.fullmatch(rf"{MICRO_BATCH}\d+", name)}


def of_rewards(columns: Container[str]) -> bool:
    """Whether columns are those of reinforcement learning, where the loss says little and is in no unit."""
    known = [name in columns for name in OF_REWARDS]
    return known[0] or sum(known) > 1


def described(
    columns: Mapping[str, str],
    unit: str = "nats",
    others: Iterable[str] = (),
    *,
    losses: Sequence[str] = (),
    is_held_out: bool = False,
) -> str:
    """Which names were taken for the step, the loss and so on, what else each may have been, and the unit of the loss.

    Args:
        columns: the name of each column.
        unit: of the loss.
        others: names of the log that were not taken.
        losses: those without a total, each of which is judged by itself.
        is_held_out: whether all lines with losses say that they are of held-out data.
    """
    taken = [name for column, name in columns.items() if OR not in column]
    others = [name for name in others if name not in taken and not {*plain_name(name).split("_")} & {*UNITS}]

    def shown(column: str) -> str:
        also = [name for name in fits(column, others) if _may_be_meant(column, name)][:MOST_OTHERS]
        return f"{column} '{columns[column]}'" + (f" (not {', '.join(map(repr, also))})" if also else "")

    found = [shown(STEP)] if STEP in columns else []
    named = ("grad_norm", "lr", *OF_REWARDS, *(OF_SAMPLES if of_rewards(columns) else ()))
    more = [shown(column) for column in named if column in columns]
    units = f" in {unit}" if unit == "nats" else f" in {unit}, converted to nats"
    if columns[LOSS] == columns.get(REWARD):
        return ", ".join([*found, "no loss, of reinforcement learning", *more])
    if is_held_out or rank_of(HELD_OUT_LOSS, columns[LOSS]) is not None:
        units += " of held-out data, since no loss of training was found"
    if losses:
        several = f"losses {listed(list(map(repr, losses)))} without a total, each judged by itself"
        return ", ".join([*found, several, *more])
    if of_rewards(columns):
        units = " of reinforcement learning, judged only where it is not finite"
        more += [] if REWARD in columns else ["no reward was found (--columns reward=COLUMN)"]
    return ", ".join([*found, f"{shown(LOSS)}{units}", *more])


def _may_be_meant(column: str, name: str) -> bool:
    """Whether a name that fits a column may well be meant by it."""
    if column == STEP:
        return not is_progress(name) and plain_name(name) not in LAST_NAMES and not is_pass(name)
    return rank_of(column, name) != ADVERSARIAL_RANK


def given_columns(text: str) -> dict[str, str]:
    """``step=COLUMN,loss=COLUMN`` as a dictionary.

    Raises:
        RequestError: a part is no pair, or its key is no column of a log.
    """
    given = dict[str, str]()
    for pair in text.split(","):
        key, separator, column = pair.partition("=")
        if not separator or not column:
            raise RequestError(f"--columns wants step=COLUMN,loss=COLUMN, not {pair!r}")
        if key not in NAMES:
            raise RequestError(f"--columns has no key {key!r}; {nearest(key, NAMES)}")
        given[key] = column
    return given


def given_pattern(text: str) -> re.Pattern[str]:
    """A regular expression whose named groups are columns: ``it (?P<step>\\d+): (?P<loss>\\S+)``.

    Raises:
        RequestError: it is none, or a name is no column of a log, or no group is called ``loss`` or ``reward``.
    """
    try:
        pattern = re.compile(text)
    except re.error as fault:
        raise RequestError(f"--pattern {text!r} is no regular expression: {fault}") from None
    for name in pattern.groupindex:
        if name not in NAMES:
            raise RequestError(f"--pattern has a group {name!r}, which is no column; {nearest(name, NAMES)}")
    if not {LOSS, REWARD} & {*pattern.groupindex}:
        raise RequestError(f"--pattern {text!r} has no group (?P<loss>...)")
    return pattern


def missing_column(column: str, names: Iterable[object], given: Mapping[str, str]) -> str:
    """The message about a log that lacks a column of steps or losses."""
    known = [str(name) for name in names if str(name)]
    if column in given:
        return f"has no column {given[column]!r}; {nearest(given[column], known)}"
    plural = {STEP: "steps", LOSS: "losses"}[column]
    shown = ", ".join(known[:12]) + (f" and {len(known) - 12} more" if len(known) > 12 else "")
    likely = ({"loss"}, HELD_OUT - {"best", "held"}, {"value"})
    name = next((name for words in likely for name in known if words & {*plain_name(name).split("_")}), "COLUMN")
    example = f"{column}={name if ' ' not in name else repr(name)}"
    return f"has no column of {plural} among {shown or 'none'}; --columns {example} names it"
