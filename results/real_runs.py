"""Make the committed numbers of public runs from the published tables, and from the lab's own records.

``python results/real_runs.py STEPLAW.csv OUTPUT_EMBEDDING.csv MARIN.csv`` writes them into ``studies/real_runs``,
whose README says where the tables come from and what was changed.

- Step Law, and sweeps of the lab (means over seeds): a row for each curve.
- output embedding: the runs with the columns that the claims need.
- Marin: the table.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from lab.analysis.curves import load, points
from studies.real_runs.curves import HOME, UNIGRAM, curves_of

SEQUENCE = 2048  # tokens of a sequence of Step Law
RESULTS = Path(__file__).parent
OWN = ("qk_layernorm", "logit_growth")  # sweeps of the lab


def step_law(path: Path) -> pd.DataFrame:
    """The curves of Step Law, by the smoothed loss; a rate that is spelled in two ways is one."""
    table = pd.read_csv(path)
    runs = pd.DataFrame(
        {
            "source": "Step Law",
            "arm": "adamw",
            **table[["parameters", "tokens"]],
            "batch": table["batch_sequences"] * SEQUENCE,
            "lr": table["lr"].map(lambda lr: float(f"{2 ** (round(2 * np.log2(lr)) / 2):.4g}")),
            "loss": table["loss_smooth"],
            "loss_unigram": UNIGRAM["Step Law"],
        }
    )
    return curves_of(runs)


def own(name: str) -> pd.DataFrame:
    """The lab's own models in a folder of results, with and without a norm of queries and keys: means over seeds."""
    records = load(RESULTS / name)
    runs = points(records.runs)
    cards = records.runs.set_index("id").loc[runs["id"]]
    normed = cards["intervention"].str.contains("qk_layernorm").to_numpy()
    (batch,) = set(records.runs["batch_size"] * records.runs["seq_len"])
    (steps,) = set(records.runs["steps"])
    runs = runs.assign(arm=np.where(normed, "adamw, qk-norm", "adamw"))
    means = runs.groupby(["arm", "size", "lr"], as_index=False)[["loss", "loss_unigram"]].mean()
    means = means.rename(columns={"size": "parameters"})
    return means.assign(source="the lab", tokens=batch * steps, batch=batch)


def output_embedding(path: Path) -> pd.DataFrame:
    """The runs at the highest rates of the baseline, z-loss, and centred output embeddings."""
    table = pd.read_csv(path)
    kept = table[table["arm"].isin(["baseline", "zloss 0.0001", "mucentering"])]
    return pd.DataFrame(
        {
            "parameters": kept["params"],
            "tokens": kept["tokens"],
            "batch": kept["tokens"] / kept["steps"],
            **kept[["arm", "lr"]],
            "loss": kept["test_loss"],
            "log_z": kept["mean_logsqZ"] ** 0.5,
            "largest_logit": kept["logits_absmax"],
        }
    ).sort_values(["parameters", "arm", "lr"])


def main(steplaw: str, embedding: str, marin: str) -> None:
    """Write the three tables."""
    curves = pd.concat([step_law(Path(steplaw)), *(curves_of(own(name)) for name in OWN)])
    form = {"index": False, "float_format": "%.6g", "lineterminator": "\n"}
    curves.to_csv(HOME / "curves.csv", **form)
    output_embedding(Path(embedding)).to_csv(HOME / "output_embedding.csv", **form)
    shutil.copyfile(marin, HOME / "marin.csv")


if __name__ == "__main__":
    main(*sys.argv[1:])
