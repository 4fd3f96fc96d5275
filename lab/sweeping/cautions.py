"""Cautions: settings of a request that will not do what their names say, printed before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lab.core.hooks import HookIntervention
from lab.training.config import RunConfig

OUTSIDE_BLOCKS = {"embedding", "readout", "logits"}  # kinds of hook points that a model of depth 0 has, too


def find_cautions(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line for each setting that does nothing, or less than its name says, in some of these runs."""
    yield from _long_warmups(configs)
    yield from _unattached_interventions(configs)


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


def _unattached_interventions(configs: Sequence[RunConfig]) -> Iterator[str]:
    """Yield a line for each intervention at hook points that a model without blocks lacks."""
    names = Counter(
        name
        for config in configs
        for name, entry in config.intervention.items()
        if isinstance(entry, HookIntervention) and not config.model.depth and not {*entry.hook_points} & OUTSIDE_BLOCKS
    )
    for name, runs in sorted(names.items()):
        yield (
            f"{name} changes nothing in {runs} of {len(configs)} runs: a model of depth 0 has no blocks to attach it to"
        )
