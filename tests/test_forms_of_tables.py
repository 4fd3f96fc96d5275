"""Forms in which people keep runs: wide and Markdown tables, lists of trials, failed runs, settings in names."""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab import main
from lab.analysis import from_frame, study
from lab.core.errors import RequestError
from lab.records import store
from lab.report import build
from labwatch.tables import run_table, table_files
from labwatch.tables.columns import Columns
from labwatch.tables.run_names import settings_in
from labwatch.tables.run_table import Imported
from sweeping import OutputOf

LRS = (1e-3, 3e-3, 1e-2)


def read(folder: Path, text: str, name: str = "runs.csv", **columns: Any) -> Imported:
    """What is imported from a file of this text."""
    (folder / name).write_text(text)
    return run_table.records_of(table_files.read_table(str(folder / name)), Columns(**columns), name)


def points(imported: Imported) -> dict[tuple[int, float], float]:
    """The final loss by size and learning rate."""
    runs = imported.records.runs
    return dict(
        zip(
            zip(runs["parameters_without_embeddings"], runs["optimizer.lr"], strict=True),
            runs["final_val_loss"],
            strict=True,
        )
    )


# Wide tables.


@pytest.mark.parametrize(
    ("text", "sizes", "lrs"),
    [
        ("lr,64,128\n0.01,3.5,nan\n0.001,3.4,3.1\n", [64, 128], [0.001, 0.01]),
        ("learning rate\t1.5M\t6M\n0.01\t3.5\tdiverged\n0.001\t3.4\t3.1\n", [1_500_000, 6_000_000], [0.001, 0.01]),
        ("lr,width=64,width=128\n0.01,3.5,\n0.001,3.4,3.1\n", [64, 128], [0.001, 0.01]),
        ("lr \\ width;64;128\n0.01;3.5;inf\n0.001;3.4;3.1\n", [64, 128], [0.001, 0.01]),
        ("width,0.001,0.01\n64,3.4,3.5\n128,3.1,nan\n", [64, 128], [0.001, 0.01]),
        (",1e-3,1e-2\n64,3.4,3.5\n128,3.1,\n", [64, 128], [0.001, 0.01]),
        ("params,lr 0.001,lr 0.01\n64,3.4,3.5\n128,3.1,nan\n", [64, 128], [0.001, 0.01]),
        ("lr,loss_64,loss_128\n0.01,3.5,nan\n0.001,3.4,3.1\n", [64, 128], [0.001, 0.01]),
    ],
)
def test_a_loss_in_each_cell_is_a_run_in_each_cell(
    tmp_path: Path, text: str, sizes: list[int], lrs: list[float]
) -> None:
    """An empty cell is no run; one that says so in words or numbers diverged."""
    found = points(read(tmp_path, text, "runs.tsv", initial_loss="7"))
    wanted = {(sizes[0], lrs[0]): 3.4, (sizes[0], lrs[1]): 3.5, (sizes[1], lrs[0]): 3.1}
    lost = {key: loss for key, loss in found.items() if math.isnan(loss)}
    assert {key: loss for key, loss in found.items() if key not in lost} == wanted
    assert set(lost) == (set() if re.search(r",(?=\n)", text) else {(sizes[1], lrs[1])})


def test_seeds_across_are_seeds_and_the_mapping_says_so(tmp_path: Path) -> None:
    imported = read(tmp_path, "arm,lr,seed 1,seed 2\nbase,0.1,3.1,3.2\nclip,0.1,3.0,3.1\n")
    assert imported.mapping[0] == ("a loss in each cell", "seed across, seed 1, seed 2")
    assert sorted(imported.records.runs["seed"]) == [1, 1, 2, 2]
    assert set(imported.records.runs["arm"]) == {"base", "clip"}


def test_a_frame_with_sizes_across_is_read_and_each_nan_is_a_run() -> None:
    frame = pd.DataFrame({"lr": LRS, "64": [3.4, 3.3, 3.5], "256": [3.1, 3.2, np.nan]})
    runs = from_frame(frame, initial_loss=8).runs
    assert runs["status"].tolist().count("diverged") == 1
    assert len(runs) == 6


def test_numbers_across_beside_a_loss_are_no_losses(tmp_path: Path) -> None:
    imported = read(tmp_path, "lr,val_loss,64,128\n0.01,3.5,1,2\n0.001,3.4,2,1\n")
    assert len(imported.records.runs) == 2


# Markdown.

MARKDOWN = """# Notes on the sweep

Some text, with a bar | in it.

| lr | `val_loss` | arm |
|---:|:---|-----|
| 0.001 | **3.10** | base |
| 0.003 | 3.00 | base |
| 0.001 | 3.05 | clip |
| 0.003 | 2.95 | clip |

That was it.
"""


@pytest.mark.parametrize("source", ["runs.md", "-"])
def test_a_table_of_markdown_is_read_among_its_text(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(MARKDOWN))
    (tmp_path / "runs.md").write_text(MARKDOWN)
    frame = table_files.read_table(source if source == "-" else str(tmp_path / source))
    runs = from_frame(frame, arm="arm").points
    assert {(row.arm, row.lr): row.loss for row in runs.itertuples()} == {
        ("base", 0.001): 3.1,
        ("base", 0.003): 3.0,
        ("clip", 0.001): 3.05,
        ("clip", 0.003): 2.95,
    }


def test_a_table_of_markdown_without_bars_at_its_ends_and_a_wide_one_are_read(tmp_path: Path) -> None:
    plain = "lr | loss\n--- | ---\n0.1 | 3\n0.2 | 2.5\n"
    assert sorted(read(tmp_path, plain, "a.md").records.runs["final_val_loss"]) == [2.5, 3.0]
    wide = "| lr | 64 | 128 |\n|---|---|---|\n| 0.1 | 3 | 2.5 |\n| 0.01 | | 2.6 |\n"
    assert points(read(tmp_path, wide, "b.md")) == {(64, 0.1): 3.0, (128, 0.1): 2.5, (128, 0.01): 2.6}


# Cells.


def test_no_cell_is_shifted_or_left_out(tmp_path: Path) -> None:
    """Rows may end in a sign too many, as people write them, but not in a cell that has no name."""
    assert points(read(tmp_path, "size,lr,loss\n64,0.1,3,\n64,0.2,2,\n")) == {(64, 0.1): 3.0, (64, 0.2): 2.0}
    with pytest.raises(RequestError, match="row 2 has 4 cells, and the head 3"):
        read(tmp_path, "size,lr,loss\n64,0.1,3\n64,0.2,2,5\n")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('{"lr": 0.1, "loss": 3, "a.b": 1, "a": {"b": 2}}\n', "'a.b'"),
        ('lr,loss,config,config.wd\n0.1,3,"{""wd"": 1}",2\n', "'config.wd'"),
        ("lr,loss,loss\n0.1,3,2\n", "'loss'"),
    ],
)
def test_two_columns_of_one_name_are_never_one(tmp_path: Path, text: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"two columns are called {name}"):
        read(tmp_path, text, "a.jsonl" if text[0] == "{" else "a.csv")
    with pytest.raises(RequestError, match="two columns are called '1'"):
        from_frame(pd.DataFrame([[0.1, 3.0, 1, 2]], columns=["lr", "loss", 1, "1"]))


# Runs that failed.


def states(*cells: tuple[Any, str], **more: Any) -> pd.DataFrame:
    """A run at each learning rate with this loss and state."""
    rows = [{"lr": 10.0**-place, "loss": loss, "status": state} for place, (loss, state) in enumerate(cells)]
    return pd.DataFrame(rows).assign(**more)


def ends(frame: pd.DataFrame, **columns: Any) -> list[str]:
    """How each run ended, in the order of the rows."""
    runs = run_table.records_of(frame, Columns(**columns)).records.runs
    by_lr = dict(zip(runs["optimizer.lr"], runs["status"], strict=True))
    return [by_lr[lr] for lr in frame["lr"]]


@pytest.mark.parametrize("state", ["crash", "Crashed", "FAILED", "out of memory", "OOM", "killed", "timed-out"])
def test_a_loss_of_a_run_that_failed_is_none(state: str) -> None:
    frame = states((3.1, "finished"), (9.9, state), (0.0, state), (math.nan, state), (3.2, "keep"))
    assert ends(frame) == ["finished", "failed", "failed", "failed", "finished"]
    reasons = run_table.records_of(frame, Columns()).records.runs["reason"].dropna()
    assert set(reasons) == {re.sub("[ -]", "_", state.lower())}


def test_a_run_that_failed_at_the_end_of_its_log_has_a_loss() -> None:
    """Steps that were planned tell nothing of its end."""
    frame = states((3.1, "finished"), (3.2, "crashed"), (3.3, "crashed"), _step=[5000, 4990, 800])
    assert ends(frame) == ["finished", "finished", "failed"]
    assert ends(frame.rename(columns={"_step": "max_steps"})) == ["finished", "failed", "failed"]


def test_a_loss_of_zero_is_none_whatever_the_state_says() -> None:
    frame = states((3.1, "done"), (0.0, "done"), (2.9, "discard"))
    assert ends(frame) == ["finished", "failed", "finished"]
    assert ends(frame.drop(columns="status")) == ["finished", "failed", "finished"]
    assert ends(frame.rename(columns={"loss": "perplexity"})) == ["finished", "failed", "finished"]
    imported = run_table.records_of(frame, Columns())
    assert ("failed", "1 of 3 runs, left out: loss 0") in imported.mapping


def test_a_failed_run_without_a_loss_counts_at_its_initial_loss_where_that_is_known() -> None:
    frame = states((3.1, "finished"), (math.nan, "crashed"), (3.0, "finished"))
    assert ends(frame) == ["finished", "failed", "finished"]
    assert ends(frame, initial_loss="9") == ["finished", "diverged", "finished"]


@pytest.mark.parametrize("column", [{"status": ["", "diverged", ""]}, {"diverged": [False, True, False]}])
def test_a_run_that_is_said_to_have_diverged_has_whatever_its_loss(column: dict[str, Any]) -> None:
    frame = states((3.1, ""), (3.2, ""), (3.0, "")).drop(columns="status").assign(**column)
    assert ends(frame) == ["finished", "diverged", "finished"]
    assert from_frame(frame).points["arm"].nunique() == 1


def test_a_run_that_failed_is_no_try_of_the_one_that_ended() -> None:
    frame = pd.concat([states((math.nan, "crash")), states((math.nan, "crash")), states((3.0, "finished"))])
    runs = run_table.records_of(frame, Columns()).records.runs
    assert sorted(runs["status"]) == ["failed", "finished"]
    assert runs["id"].is_unique


def test_unfinished_runs_are_left_out_and_the_command_counts_them(tmp_path: Path, output_of: OutputOf) -> None:
    states((3.1, "ok"), (3.0, "running"), (3.0, "pruned")).to_csv(tmp_path / "a.csv", index=False)
    said = output_of("import", tmp_path / "a.csv", f"out={tmp_path / 'out'}")
    assert "1 runs imported, 2 left out" in said
    assert "left out: running, pruned" in said or "left out: pruned, running" in said


# Trials without learning rates.

TRIALS = """commit\tval_bpb\tmemory_gb\tstatus\tdescription
aa01\t1.3120\t5.5\tkeep\tbaseline
aa02\t1.2990\t5.5\tkeep\tmatrix lr 0.03 to 0.04
aa04\t0.000000\t0.0\tcrash\ttie the head
aa05\t1.2870\t6.1\tkeep\tlonger cooldown
aa07\t1.2902\t6.1\tdiscard\tcap 15 to 10
"""


def arms_of(text: str, folder: Path) -> set[str]:
    """The arms of a table of this text."""
    (folder / "runs.csv").write_text(text)
    return set(from_frame(table_files.read_table(str(folder / "runs.csv"))).points["arm"])


def test_a_list_of_trials_is_a_table_of_arms(tmp_path: Path, output_of: OutputOf) -> None:
    (tmp_path / "results.tsv").write_text(TRIALS)
    out = tmp_path / "out"
    said = output_of("import", tmp_path / "results.tsv", f"out={out}")
    assert re.search(r"failed +1 of 5 runs, left out: crash", said)
    runs = study(out).points
    assert dict(zip(runs["arm"], runs["loss"], strict=True)) == pytest.approx(
        {name: bpb * math.log(2) for name, bpb in (("aa01", 1.312), ("aa02", 1.299), ("aa05", 1.287), ("aa07", 1.2902))}
    )
    assert "aa04: crash" in study(out).failed["reason"].tolist()


@pytest.mark.parametrize(
    ("text", "arms"),
    [
        (TRIALS.replace("\t", ",").replace("commit", "trial"), {"aa01", "aa02", "aa05", "aa07"}),
        ("description,val_loss\nbase,3.1\ncap at 10,3.0\n", {"description base", "description cap at 10"}),
        ("optimizer,val_loss\nadamw,3.1\nmuon,3.0\nlion,3.2\n", {"adamw", "muon", "lion"}),
        ("run,wd,val_loss\na,0.1,3.1\nb,0.1,3.0\nc,0.2,2.9\n", {"a", "b", "c"}),
    ],
)
def test_a_column_that_names_each_trial_names_its_arm(tmp_path: Path, text: str, arms: set[str]) -> None:
    assert arms_of(text, tmp_path) == arms


def test_a_trial_that_was_tried_again_is_one_arm(tmp_path: Path) -> None:
    again = TRIALS.replace("\t", ",").replace("aa04", "aa05")
    assert arms_of(again, tmp_path) == {"aa01", "aa02", "aa05", "aa07"}


def test_runs_of_one_arm_are_no_trials(tmp_path: Path) -> None:
    """Nobody said which of them are seeds."""
    with pytest.raises(RequestError, match=r"row 1 and row 2 are one run.* such as run"):
        read(tmp_path, "run,method,val_loss\na,x,3.1\nb,x,3.0\nc,y,2.9\nd,y,2.8\n")
    seeded = "run,seed,val_loss\na,0,3.1\nb,1,3.0\n"
    assert len({*read(tmp_path, seeded).records.runs["seed"]}) == 2
    assert arms_of(seeded, tmp_path) == {"a table"}


# Multipliers of a learning rate.


@pytest.mark.parametrize("name", ["lr_multiplier", "LR mult", "config/lr_scale", "learning_rate_factor"])
@pytest.mark.parametrize("same", [{}, {"lr": 0.01}])
def test_a_multiplier_is_the_axis_where_the_learning_rate_does_not_vary(name: str, same: dict[str, float]) -> None:
    frame = pd.DataFrame({name: [0.5, 1, 2], "val_loss": [3.1, 3.0, 3.2], **dict.fromkeys(same, 0.01)})
    read_back = from_frame(frame)
    assert read_back.axis == name.removeprefix("config/").replace("_", " ")
    assert sorted(read_back.points["lr"]) == [0.5, 1, 2]


def test_a_multiplier_beside_learning_rates_is_a_setting() -> None:
    rows = [
        {"lr": lr, "lr_multiplier": times, "loss": 3 + abs(place - 1) + times / 10}
        for place, lr in enumerate(LRS)
        for times in (1, 2)
    ]
    read_back = from_frame(pd.DataFrame(rows))
    assert read_back.axis == "learning rate"
    assert set(read_back.points["arm"]) == {"lr multiplier 1", "lr multiplier 2"}


def test_a_number_along_which_runs_differ_is_offered_as_the_axis() -> None:
    with pytest.raises(RequestError, match=r"--axis COLUMN tells them apart, such as temperature"):
        from_frame(pd.DataFrame({"temperature": [0.5, 1, 2], "val_loss": [3.1, 3.0, 3.2]}))


# Settings in names.


@pytest.mark.parametrize(
    ("names", "settings", "rests"),
    [
        (["train_seed3", "train_seed4"], [{"seed": 3}, {"seed": 4}], ["train", "train"]),
        (["a_lr0.01_seed3", "b_lr0.1_seed3"], [{"lr": 0.01, "seed": 3}, {"lr": 0.1, "seed": 3}], ["a", "b"]),
        (["base_lr0.01", "clip_lr1e-3"], [{"lr": 0.01}, {"lr": 1e-3}], ["base", "clip"]),
        (["a/lr0p01-s1", "b/lr3e-4-s2"], [{"lr": 0.01, "seed": 1}, {"lr": 3e-4, "seed": 2}], ["a", "b"]),
        (["x-130m-wd2", "x-1.3B"], [{"params": "130m", "weight_decay": 2}, {"params": "1.3B"}], ["x", "x"]),
        (["w64_LR1e-3", "w128_LR1e-3"], [{"width": 64, "lr": 1e-3}, {"width": 128, "lr": 1e-3}], ["", ""]),
        (["base_lr=0.1_seed=1", "clip_lr=0.1_seed=1"], [{"lr": 0.1, "seed": 1}] * 2, ["base", "clip"]),
        (["base_lr=0.1", "base_lr=0.2"], [{"base_lr": 0.1}, {"base_lr": 0.2}], ["", ""]),
        (["train_seed=1.5", "seed_2"], [{"seed": 1.5}, {"seed": 2}], ["train", ""]),
        (["gpt2", "v1.5", "2b", "s1"], [{}, {}, {}, {}], ["gpt2", "v1.5", "2b", "s1"]),
        (["base/run", "clip/run"], [{}, {}], ["base", "clip"]),
    ],
)
def test_settings_are_read_from_names(names: list[str], settings: list[dict[str, Any]], rests: list[str]) -> None:
    found = settings_in(names)
    assert [pairs for pairs, _ in found] == settings
    assert [rest for _, rest in found] == rests


def test_logs_with_seeds_in_their_names_are_arms_of_seeds(tmp_path: Path, undrawn: None) -> None:
    for arm, cost in (("base", 0.1), ("clip", 0.0)):
        for seed in range(3):
            rows = [f"step:{step} train_loss:{5 - step / 20 + cost + 0.01 * seed:.4f}" for step in range(0, 60, 10)]
            (tmp_path / "logs" / arm).mkdir(parents=True, exist_ok=True)
            (tmp_path / "logs" / arm / f"train_seed{seed}.log").write_text("\n".join([*rows, ""]))
    assert main(["import", str(tmp_path / "logs"), f"out={tmp_path / 'out'}"]) == 0
    runs = study(tmp_path / "out").points
    assert set(runs["arm"]) == {"folder base", "folder clip"}
    assert sorted(runs["seed"].unique()) == ["0", "1", "2"]
    assert main(["report", str(tmp_path / "out")]) == 0


def test_names_of_a_table_tell_the_settings_that_no_column_has() -> None:
    rows = [
        {"name": f"{arm}_lr{lr:g}_s{seed}", "val_loss": 3 + abs(place - 1) + 0.01 * seed}
        for arm in ("base", "clip")
        for place, lr in enumerate(LRS)
        for seed in (1, 2)
    ]
    imported = run_table.records_of(pd.DataFrame(rows), Columns())
    assert imported.mapping[0] == ("read from name", "lr, seed, variant")
    runs = from_frame(pd.DataFrame(rows)).points
    assert set(runs["arm"]) == {"base", "clip"}
    assert sorted(runs["lr"].unique()) == list(LRS)
    with_columns = pd.DataFrame(rows).assign(lr=[lr for _ in "ab" for lr in LRS for _ in "12"], seed=[1, 2] * 6)
    assert not [line for line in run_table.records_of(with_columns, Columns(keep="last")).mapping if "read" in line[0]]


# Pointers of Git LFS.

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * '0'}\nsize 637723\n"


@pytest.mark.parametrize("name", ["runs.csv", "runs.jsonl", "runs.parquet", "runs.md"])
def test_a_pointer_of_git_lfs_is_named_as_what_it_is(tmp_path: Path, name: str, output_of: OutputOf) -> None:
    (tmp_path / name).write_text(POINTER)
    assert "pointer of Git LFS" in output_of("import", tmp_path / name, f"out={tmp_path / 'out'}", code=2)


def test_pointers_in_a_folder_of_logs_and_of_records_are_named(tmp_path: Path, output_of: OutputOf) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_text(POINTER)
    (tmp_path / "logs" / "b.log").write_text(POINTER)
    assert "pointer of Git LFS" in output_of("import", tmp_path / "logs", f"out={tmp_path / 'out'}", code=2)
    rows = [{"step": step, "loss": 3.0 - step} for step in range(2)]
    (tmp_path / "logs" / "c.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = output_of("import", tmp_path / "logs", f"out={tmp_path / 'out'}")
    assert [name for name in ("a.jsonl", "b.log") if re.search(rf"not read +{name}: it is a pointer of", said)] == [
        "a.jsonl",
        "b.log",
    ]
    (tmp_path / "out" / "runs.parquet").write_text(POINTER)
    with pytest.raises(RequestError, match="pointer of Git LFS"):
        store.read(tmp_path / "out")


# What a table cannot be, and what it must not lose.


@pytest.mark.parametrize("name", ["derived", "single_change", "trial", "follows", "probes", "table", "recipe"])
def test_a_column_of_any_name_sets_arms_apart(name: str) -> None:
    """None is ignored because the lab's own records have a key of that name, and no two curves become one."""
    rows = [{"lr": lr, "loss": 3 + cost + lr, name: cost} for lr in LRS for cost in (0, 1)]
    runs = from_frame(pd.DataFrame(rows)).points
    assert len(runs) == 6
    assert runs.groupby("arm")["loss"].agg(lambda losses: round(losses.min())).tolist() == [3, 4]


@pytest.mark.parametrize("value", [-0.1, -1])
def test_values_of_an_axis_are_not_below_zero(value: float) -> None:
    frame = pd.DataFrame({"wd": [0.0, 0.1, value], "loss": [3.1, 3.0, 3.2]})
    with pytest.raises(RequestError, match=rf"row 3: wd {value:g} is not from 0 to"):
        from_frame(frame, axis="wd")


def test_a_row_of_two_tables_is_two_runs(tmp_path: Path) -> None:
    text = "lr,loss\n0.1,3\n0.01,3.1\n"
    ids = [set(read(tmp_path, text, name).records.runs["id"]) for name in ("a.csv", "b.csv")]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize(
    ("word", "number"),
    [("2^-8", 2**-8), ("10**-3", 1e-3), ("3 x 10^{-4}", 3e-4), ("$2^{-10}$", 2**-10), ("1.5×10^-2", 1.5e-2)],  # noqa: RUF001
)
def test_powers_are_numbers_in_cells_and_in_names_of_columns(tmp_path: Path, word: str, number: float) -> None:
    assert from_frame(pd.DataFrame({"lr": [word, "0.5"], "loss": [3.0, 3.1]})).points["lr"].min() == pytest.approx(
        number
    )
    lrs = {lr for _, lr in points(read(tmp_path, f"width,{word},0.5\n64,3.4,3.5\n128,3.1,3.2\n"))}
    assert min(lrs) == pytest.approx(number, rel=1e-5)


@pytest.mark.parametrize("name", ["log2_lr", "Log2LR", "config.log10_lr", "log10 learning rate"])
def test_a_logarithm_of_the_learning_rate_is_read_as_one(tmp_path: Path, name: str) -> None:
    base = 2 if "2" in name else 10
    lrs = {lr for _, lr in points(read(tmp_path, f"{name},64,128\n-3,3.4,3.2\n-2,3.3,3.1\n-1.5,3.6,3.5\n"))}
    assert sorted(lrs) == pytest.approx([base**power for power in (-3, -2, -1.5)], rel=1e-3)


@pytest.mark.parametrize("word", ["2^-8x", "7^2", "1.2.3x10^4", "10^999", "a^2"])
def test_other_words_are_no_powers(word: str) -> None:
    rows = [{"lr": lr, "loss": 3 + lr, "note": note} for lr in LRS for note in (word, "b")]
    assert set(from_frame(pd.DataFrame(rows)).points["arm"]) == {f"note {word}", "note b"}


def test_a_refusal_names_the_cell_of_a_wide_table(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"run lr=0.01 size=128: a diverged run counts at its initial loss"):
        read(tmp_path, "lr,64,128\n0.01,3.5,nan\n0.001,3.4,3.1\n")


def test_a_leap_between_neighbours_is_named_as_a_cliff() -> None:
    """Only above the best learning rate, and only the first one of a curve."""
    frame = pd.DataFrame({"lr": [1e-4, 1e-3, 1e-2, 1e-1], "loss": [5.0, 3.0, 3.9, 7.0]})
    said = build.summary(from_frame(frame))
    assert "leaps by more than 1 nat from one learning rate to the next" in said
    assert "from 0.01 to 0.1" in said
    assert "0.0001 to 0.001" not in said
    for losses in ([5.0, 3.0, 3.9, 4.8], [3.5, 5.0, 3.0, 3.5]):
        assert "leaps" not in build.summary(from_frame(frame.assign(loss=losses)))


def test_learning_rates_that_differ_in_the_third_digit_are_two() -> None:
    frame = pd.DataFrame({"lr": [1.00e-3, 1.01e-3, 1.03e-3], "loss": [3.0, 3.1, 3.2]})
    assert len(from_frame(frame).points) == 3


@pytest.mark.parametrize(("share", "ended"), [(0.97, True), (0.6, False)])
def test_a_crash_counts_only_if_its_log_is_as_long_as_others(share: float, ended: bool) -> None:
    frame = pd.DataFrame(
        {
            "lr": LRS,
            "loss": [3.0, 3.1, 3.2],
            "state": ["finished", "finished", "crashed"],
            "_step": [100, 100, 100 * share],
        }
    )
    assert len(from_frame(frame).points) == 2 + ended


def test_a_table_of_too_many_seeds_is_refused_with_what_to_do() -> None:
    count = 20_001
    frame = pd.DataFrame({"lr": np.tile([0.1, 0.2, 0.3], count // 3), "seed": range(count), "loss": 3.0})
    with pytest.raises(RequestError, match=r"20,001 runs make 20,001 curves of one seed.*at most 20,000"):
        from_frame(frame)


def test_numbers_across_of_one_and_more_are_sizes(tmp_path: Path) -> None:
    runs = read(tmp_path, "optimizer,12,24\nadamw,3.1,3.0\nlion,3.2,3.1\n").records.runs
    assert sorted(runs["parameters_without_embeddings"]) == [12, 12, 24, 24]


def test_two_columns_with_the_end_of_a_usual_name_are_not_chosen_between() -> None:
    frame = pd.DataFrame({"lr": LRS, "domain_a.loss": [3.0, 3.1, 3.2], "domain_b.loss": [4.0, 4.1, 4.2]})
    with pytest.raises(RequestError, match="--loss COLUMN says which"):
        from_frame(frame)
    assert from_frame(frame, loss="domain_b.loss").points["loss"].min() == 4
