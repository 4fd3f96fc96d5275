"""A made-up board of one failure, whose arms remove the shares of its control's damage that a test gives them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pandas as pd

import planted
from lab.analysis.stress.arms import REFERENCE
from studies.board.failures import AT_EASE, CELLS, CURVE, STRESSED, Cell, cells_table, read_failures

FAILURE, RULE = read_failures().failures["attention_logits"], read_failures().rule
LR, EASY = FAILURE.stressed.lr, 0.03
AT_INIT, BIGRAM, BEST = 4.5, 2.43, 2.4
LOST, SPREAD = 0.5, 0.02
# arms of the board with distinct shares
SHARES = {"sigma_reparam": 1.0, "peri_ln": 0.5, "rmsnorm": 0.0, "nope": -0.6}


def tables(
    shares: Mapping[str, float] = SHARES,
    lost: float = LOST,
    spread: float = SPREAD,
    gains: Mapping[str, float] = MappingProxyType({}),
) -> dict[Cell, pd.DataFrame]:
    """The runs of each cell by seed; arms that pass the screening have the fresh seeds, too.

    Args:
        shares: of the control's damage that each arm removes.
        lost: the damage of the control.
        spread: of losses over seeds.
        gains: by how much an arm trains better, under stress and at ease.
    """
    rng, found = np.random.default_rng(0), dict[Cell, pd.DataFrame]()

    def add(cell: Cell, loss: float, seeds: tuple[int, ...]) -> None:
        table = pd.DataFrame({"loss": loss + spread * rng.standard_normal(len(seeds))}, index=list(seeds))
        numbers = {"loss_at_init": AT_INIT, "loss_bigram": BIGRAM, "parameters": 1000, "seconds": 60.0}
        found[cell] = table.assign(**numbers, versions="here")

    every = (*RULE.screened, *RULE.fresh)
    add(Cell(FAILURE.name, REFERENCE, STRESSED, LR), BEST + lost, every)
    add(Cell(FAILURE.name, REFERENCE, AT_EASE, EASY), BEST, every)
    for arm, share in shares.items():
        seeds, best = every if share >= RULE.passes_screening else RULE.screened, BEST - gains.get(arm, 0.0)
        add(Cell(FAILURE.name, arm, STRESSED, LR), best + lost * (1 - share), seeds)
        add(Cell(FAILURE.name, arm, AT_EASE, EASY), best, seeds)
    for arm in (REFERENCE, *shares):
        for lr in read_failures().grid:
            loss = BEST - 0.1 + lost * (1 - shares.get(arm, 0.0)) * (lr > EASY) * 2
            add(Cell(CURVE, arm, CURVE, lr), loss, RULE.screened)
    return found


def write(folder: Path, of_cells: Mapping[Cell, pd.DataFrame]) -> Path:
    """Records of these runs, and which of them belong to which cell."""
    cards, ids = list[dict[str, object]](), dict[Cell, dict[int, str]]()
    for number, (cell, table) in enumerate(of_cells.items()):
        for seed, run in table.iterrows():
            card = planted.card(
                **{
                    "seed": int(str(seed)),
                    "optimizer.lr": cell.lr,
                    "final_val_loss": run["loss"],
                    "loss_at_init": run["loss_at_init"],
                    "loss_bigram": run["loss_bigram"],
                    "versions": run["versions"],
                    "parameters": int(run["parameters"]),
                    "recipe": f"cell{number}",
                }
            )
            cards.append(card)
            ids.setdefault(cell, {})[int(str(seed))] = str(card["id"])
    planted.write(folder, cards)
    (folder / CELLS).write_text(cells_table(ids, {}).to_csv(index=False))
    return folder
