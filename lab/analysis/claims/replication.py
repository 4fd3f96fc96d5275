"""An independent replication of figure 3, and whether our curves have its shape.

Numbers: github.com/flxst/output-embedding-centering (arXiv 2601.02031), final test loss without weight decay at the
seven learning rates of the paper, with and without z-loss of 1e-4, one seed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from lab.analysis.claims.evidence import ArmTables, Evidence, MissingRunsError, extent
from lab.analysis.claims.judging import ON, QK, WIDTH, Z_LOSS
from lab.analysis.claims.output import DECAY, PLAIN_LOSS, WITH_Z
from lab.analysis.sensitivity import regret
from lab.analysis.text import count

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
WITHOUT = {
    "16M": (3.961, 3.881, 3.850, 3.841, 3.857, 4.269, 5.065),
    "29M": (3.688, 3.614, 3.591, 3.592, 3.596, 4.298, 5.107),
    "57M": (3.442, 3.387, 3.372, 3.369, 3.397, 3.614, 6.050),
    "109M": (3.261, 3.211, 3.202, 3.208, 3.230, 3.344, 5.023),
    "221M": (3.090, 3.050, 3.050, 3.076, 3.153, 3.305, 5.099),
}
WITH = {
    "16M": (3.961, 3.878, 3.848, 3.836, 3.841, 3.854, 3.955),
    "29M": (3.687, 3.613, 3.585, 3.586, 3.580, 3.599, 3.606),
    "57M": (3.442, 3.385, 3.367, 3.366, 3.382, 3.452, 4.578),
    "109M": (3.261, 3.211, 3.202, 3.204, 3.230, 3.279, 3.735),
    "221M": (3.089, 3.050, 3.049, 3.069, 3.091, 3.173, 3.478),
}
CALM = 1e-2
PARTED = 0.05
THEIR_SET_UP = (
    "16M to 221M parameters with embeddings, 100,000 steps of 131,072 tokens of FineWeb, vocabulary 50,304, SwiGLU, "
    "RoPE on half of each head, xavier initialization, bf16"
)

Curves = Mapping[str, Sequence[float]]


def compare(folders: Sequence[Evidence]) -> Iterator[str]:
    """A line for each trait of the shape, theirs and ours (mean over seeds, S in the same way), then the set-up."""
    yield "figure 3 by others (arXiv 2601.02031, one seed, no weight decay), with and without z-loss:"
    ours = next(_ours(folders), None)
    theirs = dict(_traits(LRS, WITHOUT, WITH))
    mine = dict(_traits(*ours[:3])) if ours else dict.fromkeys(theirs, "not run")
    for trait, value in theirs.items():
        yield f"  {trait}: theirs {value}; ours {mine[trait]}"
    yield f"  set-up: theirs {THEIR_SET_UP}; ours {ours[3] if ours else 'not run'}"


def _traits(lrs: Sequence[float], without: Curves, with_z: Curves) -> Iterator[tuple[str, str]]:
    apart = {size: np.subtract(without[size], with_z[size]) for size in without}
    calm = max(abs(gap[np.array(lrs) <= CALM]).max() for gap in apart.values())
    yield f"curves coincide up to LR {CALM:g}, largest difference", f"{calm:.3f}"
    starts = {size: _first(lrs, gap) for size, gap in apart.items()}
    yield f"first LR at which the loss without is worse by {PARTED:g}", _listed(starts)
    shares = {size: _share(lrs, without[size], with_z[size]) for size in without}
    yield "S with z-loss over S without", _listed(shares)


def _first(lrs: Sequence[float], gap: np.ndarray) -> str:
    return next((f"{lr:g}" for lr, apart in zip(lrs, gap, strict=True) if apart > PARTED), "none")


def _share(lrs: Sequence[float], without: Sequence[float], with_z: Sequence[float]) -> str:
    off, on = (regret(np.array(lrs), np.array(losses)).total for losses in (without, with_z))
    return f"{on / off:.2f}" if off else "undefined"


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{value} at {size}" for size, value in values.items())


def _ours(folders: Sequence[Evidence]) -> Iterator[tuple[Sequence[float], Curves, Curves, str]]:
    """Learning rates and mean curves by size of the first setting that has both arms."""
    for some in (setting for folder in folders for setting in folder.settings((WIDTH, Z_LOSS, DECAY))):
        if some.holds({QK: ON}):
            try:
                off, on = some.arms(PLAIN_LOSS, WITH_Z)
            except MissingRunsError:
                continue
            if off.sizes == on.sizes and min(off.lrs) <= CALM and off.whole and on.whole:
                yield off.lrs, _means(off), _means(on), _set_up(off)


def _set_up(arm: ArmTables) -> str:
    runs = arm.evidence.records.runs
    run = runs[runs["id"].isin(arm.ids)].iloc[0]
    return (
        f"{extent([arm])} of {run['batch_size'] * run['seq_len']:,} tokens of {run['data.name']}, GELU, RoPE on whole "
        f"heads, truncated normal initialization, {run['precision']}, {len(arm.seeds)} seeds"
    )


def _means(arm: ArmTables) -> Curves:
    table = pd.DataFrame({lr: arm.loss(lr).mean() for lr in arm.lrs})
    return {count(size): list(losses) for size, losses in zip(table.index, table.to_numpy(), strict=True)}
