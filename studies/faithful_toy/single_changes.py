"""What single changes of a tuned base cost a small model, told as the yardstick takes them."""

from __future__ import annotations

import pandas as pd

from lab.analysis.sensitivity import capped
from studies.faithful_toy.yardstick import CHANGE, with_directions

# Columns of the records, by what Marin's tables call them.
KEYS = {
    "learning_rate": "optimizer.lr",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
    "epsilon": "optimizer.eps",
    "max_grad_norm": "optimizer.clip",
    "momentum": "optimizer.momentum",
    "warmup": "schedule.warmup",
    "weight_decay": "optimizer.weight_decay",
}
# Of optimizers that Marin's tables call otherwise.
NAMES = {
    "adamw_coupled": "adamw",
    "NAdam": "nadamw",
    "MARS": "mars",
    "SOAP": "soap",
    "Scion": "scion",
    "AdamMini": "adam_mini",
}


def single_changes_of(runs: pd.DataFrame) -> pd.DataFrame:
    """A row for each run that differs from its optimizer's base in one key: ``optimizer``, ``CHANGE``, ``excess``.

    The base has the commonest value of each key but the learning rate, and of the rates that were tried with these the
    best one, on average over the seeds that ran all of them. A run is compared with the base of its seed.

    Args:
        runs: run cards of one small model, in which nothing but the optimizer, ``KEYS`` and the seed differ.
    """
    columns = {key: column for key, column in KEYS.items() if column in runs}
    loss = capped(runs.rename(columns={"final_val_loss": "loss"}))
    runs = runs.assign(loss=loss, optimizer=runs["optimizer.name"].replace(NAMES))
    rows = []
    for optimizer, own in runs.groupby("optimizer"):
        usual = {column: own[column].mode() for column in columns.values()}
        base = {column: values.iloc[0] for column, values in usual.items() if len(values)}
        del base[KEYS["learning_rate"]]
        plain = own[(own[list(base)] == pd.Series(base)).all(axis=1)]
        ladder = plain.pivot_table("loss", KEYS["learning_rate"], "seed").dropna(axis="columns")
        base[KEYS["learning_rate"]] = ladder.mean(axis=1).idxmin()
        differs = own[list(base)] != pd.Series(base)
        at_base = own[~differs.any(axis=1)].set_index("seed")["loss"]
        for key, column in columns.items():
            if column not in base:
                continue
            alone = own[differs[column] & (differs.sum(axis=1) == 1) & own["seed"].isin(at_base.index)]
            for value, each, seed in zip(alone[column], alone["loss"], alone["seed"], strict=True):
                ratio = value / base[column] if base[column] else float("nan")
                rows.append([optimizer, key, value, ratio, each - at_base[seed]])
    made = pd.DataFrame(rows, columns=["optimizer", "key", "value", "ratio", "excess"])
    return with_directions(made)[["optimizer", *CHANGE, "excess"]]
