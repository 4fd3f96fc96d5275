"""Write the loss of a unigram model on the data of committed records, whose columns lack it.

``python results/unigram_losses.py`` writes ``lab/records/unigram_losses.yaml``: by the fingerprint of the data the loss
on all held-out tokens, nats per token. Data that cannot be made here, such as another machine's text, keep what is
written of them, if anything is.
"""

from pathlib import Path

import pandas as pd

from lab.core import files, shipped
from lab.core.registry import DATA
from lab.core.schema import build
from lab.records.store import UNIGRAM_LOSSES
from lab.training import config  # noqa: F401  registers the sources of data

RESULTS = Path(__file__).parent


def sources() -> pd.DataFrame:
    """A row for each fingerprint in the committed records: a run with these data."""
    tables = [pd.read_parquet(path) for path in sorted(RESULTS.rglob("runs*.parquet"))]
    columns = ["data_fingerprint", "seq_len"]
    return pd.concat(
        [
            table[[*columns, *(name for name in table if name.startswith("data."))]]
            for table in tables
            if "seq_len" in table
        ]
    ).drop_duplicates("data_fingerprint")


def loss_of(row: pd.Series) -> float | None:
    """The loss of a unigram model on the data of a run; None where they cannot be made here."""
    settings = {key.removeprefix("data."): value for key, value in row.dropna().items() if key.startswith("data.")}
    kind = DATA[settings.pop("name")]
    try:
        corpus = build(kind, {key: value for key, value in settings.items() if key != "seed"}, "data").open()
    except Exception as refusal:
        print(f"{row['data_fingerprint']}: {refusal}")
        return None
    return corpus.loss_unigram(int(row["seq_len"])) if corpus.fingerprint == row["data_fingerprint"] else None


if __name__ == "__main__":
    known = shipped.load(UNIGRAM_LOSSES) if UNIGRAM_LOSSES.exists() else {}
    found = {row["data_fingerprint"]: loss_of(row) for _, row in sources().iterrows()}
    losses = known | {name: round(loss, 6) for name, loss in found.items() if loss is not None}
    print("not made here:", *(name for name, loss in found.items() if loss is None))
    lines = [f'"{name}": {losses[name]}' for name in sorted(losses)]
    files.write_text(UNIGRAM_LOSSES, "\n".join(["# Written by results/unigram_losses.py.", *lines, ""]))
