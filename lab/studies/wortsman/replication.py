"""An independent replication of figure 3, compared with the lab's curves.

``replication.csv``: final test loss without weight decay at the seven learning rates of the paper, with and without
z-loss of 1e-4, one seed (github.com/flxst/output-embedding-centering, arXiv 2601.02031).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import significant
from lab.analysis.judging.evidence import ArmTables, Evidence, MissingRunsError, extent
from lab.analysis.judging.verdicts import DECAY, ON, QK, WIDTH, Z_LOSS
from lab.analysis.sensitivity import regret
from lab.analysis.text import count

CALM_LR = 1e-2
WORSE = 0.05
THEIR_SET_UP = (
    "16M to 221M parameters with embeddings, 100,000 steps of 131,072 tokens of FineWeb, vocabulary 50,304, SwiGLU, "
    "RoPE on half of each head, xavier initialization, bf16"
)


class Replication(NamedTuple):
    """Mean final losses (nats/token), a row per number of parameters and a column per LR; and the set-up in words."""

    without: pd.DataFrame
    with_z_loss: pd.DataFrame
    set_up: str


def theirs() -> Replication:
    """The published replication."""
    losses = pd.read_csv(Path(__file__).with_suffix(".csv"))
    losses["lr"] = significant(losses["lr"])
    without, with_z_loss = (
        losses.pivot(index="parameters", columns="lr", values=column) for column in ("without_z_loss", "with_z_loss")
    )
    return Replication(without, with_z_loss, THEIR_SET_UP)


def ours(folders: Sequence[Evidence]) -> Replication | None:
    """The lab's curves, means over seeds, of the first group that has both arms; None if there is none."""
    for group in (group for folder in folders for group in folder.groups((WIDTH, Z_LOSS, DECAY))):
        if group.holds({QK: ON}):
            try:
                off, on = group.arms(*({Z_LOSS: value, DECAY: 0.0} for value in (None, ON)))
            except MissingRunsError:
                continue
            if off.sizes == on.sizes and min(off.lrs) <= CALM_LR and off.complete and on.complete:
                return Replication(_mean_losses(off), _mean_losses(on), _set_up(off))
    return None


def compare(folders: Sequence[Evidence]) -> Iterator[str]:
    """Yield a line for each trait of the curves, theirs and the lab's, then the set-ups; both S are computed alike."""
    yield "figure 3 by others (arXiv 2601.02031, one seed, no weight decay), with and without z-loss:"
    other, own = theirs(), ours(folders)
    own_traits = dict(_traits(own)) if own else {}
    for trait, value in _traits(other):
        yield f"  {trait}: theirs {value}; ours {own_traits.get(trait, 'not run')}"
    yield f"  set-up: theirs {other.set_up}; ours {own.set_up if own else 'not run'}"


def _traits(curves: Replication) -> Iterator[tuple[str, str]]:
    gaps = curves.without - curves.with_z_loss
    lrs = gaps.columns.to_numpy(dtype=float)
    calm = np.abs(gaps.to_numpy()[:, lrs <= CALM_LR]).max()
    yield f"curves coincide up to LR {CALM_LR:g}, largest difference", f"{calm:.3f}"
    first = [next((f"{lr:g}" for lr in lrs[gap > WORSE]), "none") for gap in gaps.to_numpy()]
    yield f"first LR at which the loss without is worse by {WORSE:g}", _at_sizes(gaps.index, first)
    pairs = zip(curves.without.to_numpy(), curves.with_z_loss.to_numpy(), strict=True)
    yield "S with z-loss over S without", _at_sizes(gaps.index, [_share(lrs, *losses) for losses in pairs])


def _share(lrs: np.ndarray, without: np.ndarray, with_z_loss: np.ndarray) -> str:
    off, on = regret(lrs, without).total, regret(lrs, with_z_loss).total
    return f"{on / off:.2f}" if off else "undefined"


def _at_sizes(sizes: Iterable[int], values: Iterable[str]) -> str:
    return ", ".join(f"{value} at {count(size)}" for size, value in zip(sizes, values, strict=True))


def _mean_losses(arm: ArmTables) -> pd.DataFrame:
    return pd.DataFrame({lr: arm.loss(lr).mean() for lr in arm.lrs})


def _set_up(arm: ArmTables) -> str:
    runs = arm.evidence.records.runs
    run = runs[runs["id"].isin(arm.ids)].iloc[0]
    return (
        f"{extent([arm])} of {run['batch_size'] * run['seq_len']:,} tokens of {run['data.name']}, GELU, RoPE on whole "
        f"heads, truncated normal initialization, {run['precision']}, {len(arm.seeds)} seeds"
    )
