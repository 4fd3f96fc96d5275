"""Cautions: settings of a request that will not do what their names say, printed before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from numbers import Real

from lab.analysis.curves import FREE, LR, SHAPE
from lab.analysis.text import listed
from lab.core.hooks import HookIntervention
from lab.interventions.experts import Experts
from lab.records.store import ENTRIES
from lab.training.config import RunConfig
from lab.training.identity import columns

OUTSIDE_BLOCKS = {"embedding", "readout", "logits"}  # kinds of hook points that a model of depth 0 has, too
FLOOR, FLOOR_SHARE = "schedule.floor", "schedule.floor_share"

Cause = tuple[str, str]  # what does nothing, and why


def find_cautions(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line for each setting that does nothing, or less than its name says, in some of these runs."""
    yield from _long_warmups(configs)
    yield from _high_floors(configs)
    for idle in (_unattached_interventions, _idle_positions, _idle_key_heads, _idle_attention, _idle_routers):
        counts = Counter(cause for config in configs for cause in idle(config))
        for (what, why), runs in sorted(counts.items()):
            yield f"{what} in {runs} of {len(configs)} runs: {why}"


def _long_warmups(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line about warm-ups that last to the end of their run."""
    lengths: Counter[tuple[float, int, int, str]] = Counter()
    for config in configs:
        warmup, over = getattr(config.schedule.entry, "warmup", 0.0), config.schedule.over
        length = warmup * config.duration if warmup < 1 else warmup
        last = config.duration - (config.batch_size * config.seq_len if over == "tokens" else 1)  # before the update
        lengths[length, last, config.duration, over] += length > last
    too_long = +lengths
    if too_long:
        (warmup, last, duration, over), _ = too_long.most_common(1)[0]
        yield (
            f"the warm-up lasts to the end of {too_long.total()} of {len(configs)} runs: one of {warmup:g} {over} in a "
            f"run of {duration} lets the learning rate rise to {last / warmup:.0%} of its peak and no further"
        )


def _high_floors(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line about floors of the learning rate that its peak does not exceed."""
    floors: Counter[tuple[float, float]] = Counter()
    for config in configs:
        entry, lr = config.schedule.entry, config.optimizer.lr
        floor = max(getattr(entry, "floor", 0.0), getattr(entry, "floor_share", 0.0) * lr)
        floors[floor, lr] += floor >= lr
    too_high = +floors
    if too_high:
        (floor, lr), _ = too_high.most_common(1)[0]
        yield (
            f"the schedule is constant after its warm-up in {too_high.total()} of {len(configs)} runs: a floor of "
            f"{floor:g} is not below a peak of {lr:g}; {FLOOR_SHARE}=0.1 ends at a tenth of each peak"
        )


def find_single_rates(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line if numbers that vary with the learning rate leave arms of a single learning rate.

    Args:
        configs: all that a request asks for, whether or not they are trained already.
    """
    rows = [columns(config) for config in configs if config.seed == configs[0].seed]  # of many seeds, one is enough
    no_settings = {*FREE, ENTRIES}
    settings = dict.fromkeys(key for row in rows for key in row if key not in no_settings and "probes." not in key)
    values = {key: [row.get(key) for row in rows] for key in settings}
    varying = {key: each for key, each in values.items() if len(set(each)) > 1}
    numbers = [key for key, each in varying.items() if key not in SHAPE and all(map(_is_number_or_absent, each))]

    def rates_of_arms(keys: Sequence[str]) -> list[set[float]]:
        """The learning rates of each arm, if these keys distinguish arms."""
        rates: dict[tuple[object, ...], set[float]] = {}
        for index, row in enumerate(rows):
            rates.setdefault(tuple(varying[key][index] for key in keys), set()).add(row[LR])
        return list(rates.values())

    named = [key for key in varying if key not in numbers]
    following = [key for key in numbers if all(len(rates) == 1 for rates in rates_of_arms([*named, key]))]
    rates = max(map(len, rates_of_arms([key for key in varying if key not in following])), default=0)
    if following and rates > 1:
        have = "have other values" if len(following) > 1 else "has another value"
        floor = f"; {FLOOR_SHARE}=0.1 ends at a tenth of each peak" if FLOOR in following else ""
        yield (
            f"{listed(sorted(following))} {have} at each learning rate, so each of {rates} learning rates is an arm "
            f"of its own, and none has a sensitivity{floor}"
        )


def _is_number_or_absent(value: object) -> bool:
    return value is None or (isinstance(value, Real) and not isinstance(value, bool))


def _unattached_interventions(config: RunConfig) -> Iterator[Cause]:
    """Interventions at hook points that a model without blocks lacks; those of initial values have none."""
    for name, entry in config.intervention.items():
        is_attached = isinstance(entry, HookIntervention) and bool(entry.hook_points)
        if is_attached and not config.model.depth and not {*entry.hook_points} & OUTSIDE_BLOCKS:
            yield f"{name} changes nothing", "a model of depth 0 has no blocks to attach it to"


def _idle_positions(config: RunConfig) -> Iterator[Cause]:
    """Blocks without positions, of which the model has none."""
    if "nope" in config.intervention and 0 < config.model.depth < config.intervention["nope"].every:
        yield "nope changes nothing", "their models have fewer blocks than nope.every"


def _idle_key_heads(config: RunConfig) -> Iterator[Cause]:
    """Shared keys, of which the model has none."""
    entry, heads = config.intervention.get("grouped_query_attention"), config.model.heads
    if entry and entry.key_value_heads(heads) == heads:
        yield "grouped_query_attention changes nothing", "no heads share a key"


def _idle_attention(config: RunConfig) -> Iterator[Cause]:
    """Queries that start at zero and stay there, as a squared ReLU has no gradient at zero."""
    present = {*config.intervention}
    starts_at_zero = config.parametrization.name == "mup_full" and not {"small_init", "magnitude_direction"} & present
    if starts_at_zero and "pointwise_attention" in present:
        yield (
            "pointwise_attention attends to nothing",
            "queries start at zero with parametrization=mup_full, and relu(score)^2 has no gradient there; "
            "parametrization=mup_simple trains them",
        )


def _idle_routers(config: RunConfig) -> Iterator[Cause]:
    """Routers with a single gate of one, which have no gradient from the loss of the text."""
    for entry in config.intervention.values():
        if isinstance(entry, Experts) and entry.top_k == 1 and entry.gates == "normalized":
            why = "a single normalized gate is 1; intervention.experts.gates=raw lets them learn"
            yield "routers learn nothing from the text", why
