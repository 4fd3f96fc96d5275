"""Numbers of the search for a small model that fails like a large one: ``python results/faithful_toy.py``.

Reads ``screen.csv``, ``beyond.csv`` and ``changes.csv`` of ``faithful_toy/``, a row for each run, and draws
``screen.svg`` beside them. ``python results/faithful_toy.py runs/faithful_toy`` first adds to them what was trained
there, in ``screen``, ``beyond`` and ``changes``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from lab.analysis.crossings import SLOPE_OVER
from lab.analysis.curves import load
from lab.analysis.rendering import layout
from lab.analysis.sensitivity import LOST
from lab.core import files
from lab.data.corpus import Corpus
from lab.data.text import StandardLibrary
from studies.claims.curve_summaries import steepness
from studies.faithful_toy import figures, yardstick
from studies.faithful_toy.screen import RESPONSES, design_rows, effects
from studies.faithful_toy.single_changes import KEYS, single_changes_of
from studies.real_runs.curves import read_real_runs

FOLDER = Path(__file__).with_suffix("")
LR = "learning_rate"
FIRST = ("adamw", "nadamw", "lion", "muon")  # optimizers that were trained before the others
COLUMNS = ["id", "intervention", "precision", "steps", "seq_len", "data.vocabulary", "model.depth", "model.width"]
COLUMNS += ["optimizer.name", *KEYS.values(), "seed", "status", "final_val_loss", "loss_at_init", "loss_bigram"]
BEYOND = ["batch_size", "schedule.name", "optimizer.chain"]  # what else the runs beyond the screen vary


def runs_of(name: str, trained: Path | None, others: Sequence[str] = ()) -> pd.DataFrame:
    """The committed runs, and those that were trained in a folder, which are then committed, too.

    They have the columns that all tables have, and these others.
    """
    table = FOLDER / f"{name}.csv"
    runs = files.read_csv(table) if table.exists() else pd.DataFrame(columns=COLUMNS)
    if trained and (trained / name).exists():
        new = load(trained / name).runs.reindex(columns=[*COLUMNS, *others])
        runs = pd.concat([runs[~runs["id"].isin(new["id"])], new]) if len(runs) else new
        files.write_csv(table, runs.sort_values("id"), float_format="%.6g")
    return runs.reset_index(drop=True)


def unigram_loss(text: Corpus) -> float:
    """The entropy of the tokens of the training part, nats."""
    share = np.asarray(text.pair_counts().sum(axis=1), float).ravel()
    share = share[share > 0] / share.sum()
    return float(-(share * np.log(share)).sum())


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    unigram = {256: unigram_loss(StandardLibrary().open()), 2048: unigram_loss(StandardLibrary("bpe", 2048).open())}
    screen = runs_of("screen", folder)
    rows = design_rows(screen, unigram)
    print("loss of a unigram model, by vocabulary:", unigram)
    print(rows.round(2).to_string())
    for response in RESPONSES:
        print(response, *(f"  {name}: {effect}" for name, effect in effects(rows, response).items()), sep="\n")
    (FOLDER / "screen.svg").write_text(layout.svg(figures.screen(rows), "screen"), encoding="utf-8")
    print("beyond the screen, nats per 0.15 decades, and as a share of the way to a unigram model:")
    beyond = runs_of("beyond", folder, BEYOND)
    same = [*COLUMNS[1:9], *KEYS.values(), "seed"]
    same.remove(KEYS[LR])
    for setting, own in beyond.groupby(["model.width", "steps", *BEYOND, "seed"]):
        of_screen = (screen[same].astype(str) == own[same].astype(str).iloc[0]).all(axis=1)
        own = pd.concat([own, screen[of_screen]])
        ladder = own.sort_values("optimizer.lr")[["optimizer.lr", "final_val_loss"]].to_numpy(float).T
        rise, room = steepness(*ladder), unigram[2048] - ladder[1].min()
        print(*setting, rise, rise / room, ladder.round(3).tolist())
    public = read_real_runs().curves[lambda curves: curves["source"] == "Step Law"]
    ends = public["failing_loss"] - public[["edge_loss", "best_loss"]].T
    print("the first failing step of public runs on longer steps, nats per 0.15 decades, between two bounds:")
    for step in (0.15, 0.3, 0.5, 0.6):
        print(step, "decades:", (ends * SLOPE_OVER / step).mean(axis=1).round(2).tolist())
    made = single_changes_of(runs_of("changes", folder))
    print(
        made.groupby(["optimizer", *yardstick.CHANGE])["excess"]
        .agg(["mean", "min", "max", "size"])
        .round(3)
        .to_string()
    )
    marin = yardstick.changes_of(read_real_runs().changes)
    for title, changes in {"all changes": marin, "without the learning rate": marin[marin["key"] != LR]}.items():
        changes = changes.reset_index(drop=True)
        for whose, toy in {"of four optimizers": made[made["optimizer"].isin(FIRST)], "of all": made}.items():
            said = yardstick.toy_scores(changes, toy)
            print(f"{title} {whose}: {said.notna().sum()} of {len(changes)}", yardstick.score(changes, toy))
            print("by chance as concordant:", yardstick.chance_of_concordance(changes, said))
    print("real models held against the yardstick:")
    tables = marin["table"]
    proxies = {"130m tables for 300m ones": (tables.str.startswith("300m"), tables.str.startswith("130m"))}
    proxies |= {f"all others for {name}": (tables == name, tables != name) for name in sorted(tables.unique())}
    for title, (asked, proxy) in proxies.items():
        changes = marin[asked].reset_index(drop=True)
        p = yardstick.chance_of_concordance(changes, yardstick.toy_scores(changes, marin[proxy]))
        print(title, yardstick.score(changes, marin[proxy]), "by chance as concordant:", p)
    factors = {"Marin": yardstick.factors_to_failure(marin), "here": yardstick.factors_to_failure(made, LOST)}
    print("first failing multiple of the best rate:", (10 ** pd.DataFrame(factors)).dropna().round(1), sep="\n")
