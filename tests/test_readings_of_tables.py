"""What tables mean that can be read in two ways: rates, words of states, scores, averages, bases, and last rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab import main
from lab.analysis import changes, from_frame, load, tables
from lab.analysis.sensitivity import Study
from lab.core.errors import RequestError
from labwatch.tables import run_table, table_files
from labwatch.tables.columns import Columns, ending_of
from labwatch.tables.run_table import Imported
from sweeping import OutputOf

RATES = {1e-4: 2.5, 1e-3: 2.3, 1e-2: 2.6}  # the loss of each
WINDOW = (1e-5, 1.0)


def read(folder: Path, text: str, name: str = "runs.csv", **columns: Any) -> Imported:
    """What is imported from a file of this text."""
    (folder / name).write_text(text)
    return run_table.records_of(table_files.read_table(str(folder / name)), Columns(**columns), name)


def sweep(**columns: Any) -> pd.DataFrame:
    """A run at each learning rate, with its loss and other columns; a function is one of the learning rate."""
    values = {name: [of(lr) for lr in RATES] if callable(of) else of for name, of in columns.items()}
    return pd.DataFrame(values | {"val_loss": list(RATES.values())})


def best(study: Study) -> set[float]:
    return {float(lr) for lrs in study.curves["best_lr"] for lr in lrs}


def remarks(frame: pd.DataFrame) -> dict[str, str]:
    return dict(run_table.records_of(frame, Columns()).mapping)


# Learning rates.


@pytest.mark.parametrize(
    "columns",
    [
        {"learning_rate": float, "lr": 1e-5},
        {"args/lr": float, "train/lr": lambda lr: lr / 10},
        {"lr": 1e-6, "config.lr": float},
        {"learning_rate": float, "train/learning_rate": 0.0},
        {"peak_lr": float, "lr": lambda lr: min(lr, 5e-4)},
        {"Name": lambda lr: f"lr{lr}_seed0", "min_lr": 1e-5, "lr": 1e-5},
        {"run": lambda lr: f"adam (lr={lr})", "lr": 1e-5},
    ],
)
def test_the_peak_of_a_schedule_is_the_rate_and_not_its_last_one(columns: dict[str, Any]) -> None:
    assert best(from_frame(sweep(**columns), window=WINDOW)) == {1e-3}


@pytest.mark.parametrize("columns", [{"lr": float, "base_lr": 1e-3}, {"actor/lr": float, "critic/lr": 1e-3}])
def test_of_two_rates_neither_of_which_is_the_peak_somebody_must_say_which(columns: dict[str, Any]) -> None:
    first, second = columns
    with pytest.raises(RequestError, match="--lr COLUMN"):
        from_frame(sweep(**columns))
    assert best(from_frame(sweep(**columns), lr=first, window=WINDOW)) == {1e-3}
    assert (
        f"(not {second})"
        in dict(run_table.records_of(sweep(**columns), Columns(lr=first)).mapping)["peak learning rate"]
    )


@pytest.mark.parametrize(
    ("rates", "losses", "is_said"),
    [
        ((1e-4, 1e-3, 1e-2), [2.31] * 3, True),
        ((1e-4, 1e-3, 1e-2), [2.3101, 2.3104, 2.31], True),
        ((1e-4, 1e-3, 1e-2), [2.31, 2.3, 2.32], False),
        ((1e-3, 2e-3, 4e-3), [2.31] * 3, True),
        ((1e-3, 2e-3, 4e-3), [2.3101, 2.3104, 2.31], False),
        ((1e-4, 1e-2), [2.31] * 2, False),
    ],
)
def test_a_rate_that_changes_nothing_is_asked_about(rates: Sequence[float], losses: list[float], is_said: bool) -> None:
    said = remarks(pd.DataFrame({"lr": rates, "val_loss": losses})).get("learning rate has no effect", "")
    assert ("does the rate reach the optimizer?" in said) == is_said


# States.

LOST = (
    "DIVERGED at ep202|NaN from ep37|failed: loss nan|stopped early (nan)|blew up @ 300|loss=inf|"
    "did not recover, diverged"
)
SOUND = (
    "clean|not diverged|finished, no nan|never diverged|no sign of nan or inf|nan-free|0 NaN steps|diverged: no|"
    "diverged, recovered|didn't diverge|info|error rate 3%"
)


@pytest.mark.parametrize("column", ["status", "outcome"])
@pytest.mark.parametrize("words", LOST.split("|"))
def test_words_in_a_state_say_that_a_run_diverged(words: str, column: str) -> None:
    runs = from_frame(sweep(lr=float, **{column: ["ok", words, "ok"]}), window=WINDOW)
    assert runs.points.set_index("lr")["outcome"].to_dict()[1e-3] == "diverged"
    assert best(runs) == {1e-4}


@pytest.mark.parametrize("words", SOUND.split("|"))
def test_a_state_that_denies_it_says_no_such_thing(words: str) -> None:
    assert ending_of(words) == ""


def test_what_a_run_died_of_is_said_in_its_state_or_in_place_of_its_loss(tmp_path: Path) -> None:
    imported = read(
        tmp_path, "lr,val_loss,state\n1e-4,2.5,ok\n1e-3,2.3,killed: 12 h\n1e-2,OOM,\n1e-1,2.4 (nan later),\n"
    )
    runs = imported.records.runs.set_index("optimizer.lr")
    assert runs["status"].to_dict() == {1e-4: "finished", 1e-3: "failed", 1e-2: "failed", 1e-1: "diverged"}
    assert runs.loc[[1e-3, 1e-2], "reason"].tolist() == ["killed", "oom"]


# Losses.


@pytest.mark.parametrize("name", ["value", "objective", "metric"])
def test_what_a_search_made_best_is_a_loss_only_if_somebody_says_so(name: str) -> None:
    frame = sweep(params_lr=float).rename(columns={"val_loss": name})
    with pytest.raises(RequestError, match=f"--loss {name}"):
        from_frame(frame)
    assert best(from_frame(frame, loss=name, window=WINDOW)) == {1e-3}


@pytest.mark.parametrize("name", ["val_accuracy", "eval/top1_acc", "mean_reward"])
def test_what_is_better_where_it_is_higher_is_no_loss(name: str) -> None:
    frame = sweep(lr=float).rename(columns={"val_loss": name})
    for options in ({}, {"loss": name}):
        with pytest.raises(RequestError, match="--loss"):
            from_frame(frame, **options)


def test_a_time_is_no_loss_whatever_follows_its_group() -> None:
    frame = sweep(lr=float, **{"timing_s/val_loss": [3.0, 2.0, 1.0]}).rename(columns={"val_loss": "train/loss"})
    assert best(from_frame(frame, window=WINDOW)) == {1e-3}


def experiments(header: dict[str, Any], **more: Any) -> str:
    """The lines of a file of an agent's experiments."""
    trials = [
        (1.20, "keep", "baseline"),
        (1.21, "discard", "baseline rerun"),
        (1.10, "keep", "muon"),
        (0, "crash", "x"),
    ]
    rows = [{"run": n, "metric": m, "status": s, "description": d, **more} for n, (m, s, d) in enumerate(trials)]
    return "\n".join(
        map(json.dumps, [{"type": "config", **header}, rows[0], {"type": "hook", "exit_code": 0}, *rows[1:]])
    )


@pytest.mark.parametrize(
    "header", [{"metricName": "val_bpb", "metricUnit": ""}, {"metricName": "val", "metricUnit": "bpb"}]
)
def test_the_header_of_an_agents_file_names_its_metric_and_its_unit(tmp_path: Path, header: dict[str, str]) -> None:
    imported = read(tmp_path, experiments({**header, "bestDirection": "lower"}), "runs.jsonl")
    runs = imported.records.runs
    assert sorted(runs["status"]) == ["failed", "finished", "finished", "finished"]
    assert runs["final_val_loss"].max() == pytest.approx(1.21 * math.log(2))
    kept = changes.trials(from_frame(table_files.read_table(str(tmp_path / "runs.jsonl")))).kept
    assert kept["change"].tolist() == ["baseline", "muon"]


@pytest.mark.parametrize("header", [{"metricName": "val_loss", "bestDirection": "higher"}, {"metricName": "total_ms"}])
def test_an_agents_metric_that_is_no_loss_is_asked_about(tmp_path: Path, header: dict[str, str]) -> None:
    with pytest.raises(RequestError, match="--loss"):
        read(tmp_path, experiments(header), "runs.jsonl")
    imported = read(tmp_path, experiments(header, eval_loss=2.5), "runs.jsonl")
    assert dict(imported.mapping)["final loss"].startswith("eval_loss")


# Names, notes, averages.


def test_rates_and_seeds_are_read_in_names_and_averages_are_no_runs(tmp_path: Path) -> None:
    rows = [
        f"| lr={lr} {seed} | {loss} |" for lr, loss in (("3e-4", 2.2), ("1e-4", 2.4)) for seed in ("s1", "s2", "avg")
    ]
    text = "\n".join(["## Runs | lr, loss", "| Run | Loss |", "|--|--|", *rows, "| **Baseline (lr=2e-4)** | **2.1** |"])
    study = from_frame(table_files.read_table(str(_written(tmp_path / "runs.md", text))))
    seeds = study.points.groupby(["arm", "lr"])["seed"].nunique().to_dict()
    assert sorted(seeds.values()) == [1, 2, 2]
    assert {lr for (arm, lr), n in seeds.items() if n == 1 and "Baseline" in arm} == {2e-4}


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("of_all", ["mean", "avg over seeds", "std"])
def test_an_average_over_seeds_is_no_run_but_an_arm_may_be_called_mean(tmp_path: Path, of_all: str) -> None:
    rows = [f"{arm},1e-3,{seed},2.{seed}" for arm in ("mean", "max") for seed in (1, 2)]
    rows += [f"{arm},1e-3,{of_all},2.15" for arm in ("mean", "max")]
    imported = read(tmp_path, "\n".join(["method,lr,seed,val_loss", *rows]))
    assert len(imported.records.runs) == 4
    assert dict(imported.mapping)["left out, as no run"] == of_all


def test_a_number_may_have_a_label_and_a_note_but_no_second_number(tmp_path: Path) -> None:
    text = "lr,seed,val_loss\n3e-4 (best of 2),seed=1,2.3\nlr=1e-3,s1,2.2*\n3e-3),1,2.5 <- worse\n"
    runs = read(tmp_path, text).records.runs
    assert dict(zip(runs["optimizer.lr"], runs["final_val_loss"], strict=True)) == {3e-4: 2.3, 1e-3: 2.2, 3e-3: 2.5}
    with pytest.raises(RequestError, match="no number"):
        read(tmp_path, "lr,val_loss\n3e-4 to 3e-5,2.3\n1e-3 to 1e-4,2.2\n")


@pytest.mark.parametrize(
    "text",
    [
        "lr;val_loss\n0,0001;2,500\n0,001;2,300\n0,01;2,600\n",
        "lr,val_loss\n"
        + "".join(f"np.float64({lr}),\"tensor({loss}, device='cuda:0')\"\n" for lr, loss in RATES.items()),
    ],
)
def test_numbers_with_commas_and_as_libraries_print_them_are_numbers(tmp_path: Path, text: str) -> None:
    runs = read(tmp_path, text).records.runs
    assert dict(zip(runs["optimizer.lr"], runs["final_val_loss"], strict=True)) == RATES


def test_a_loss_that_may_have_thousands_or_decimals_is_asked_about(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"2\.310"):
        read(tmp_path, 'lr,val_loss\n1e-3,"2,310"\n1e-2,"2,505"\n')


def test_seeds_are_those_that_vary() -> None:
    frame = pd.concat([sweep(lr=float, seed=42, data_seed=seed) for seed in (1, 2, 3)])
    assert set(from_frame(frame, window=WINDOW).points["seed"]) == {"1", "2", "3"}


# Long tables and bases.

LONG = "sweep,value,val_loss\nlr,1e-4,2.5\nlr,1e-3,2.3\nlr,1e-2,2.6\nwd,0.1,2.41\nwd,0.3,{}\nwd,1,2.45\n"


def test_a_table_of_sweeps_has_a_curve_along_rates_and_changes_of_the_run_that_they_share(tmp_path: Path) -> None:
    study = from_frame(table_files.read_table(str(_written(tmp_path / "runs.csv", LONG.format(2.3)))), window=WINDOW)
    assert best(study) == {1e-3}
    effects = changes.single_changes(study).set_index(["key", "value"])["effect"].round(4).to_dict()
    assert effects == {("wd", "0.1"): 0.11, ("wd", "0.3"): 0.0, ("wd", "1"): 0.15}


def test_a_sweep_of_nobody_knows_what_is_left_out_or_chosen(tmp_path: Path) -> None:
    imported = read(tmp_path, LONG.format(2.42))
    assert len(imported.records.runs) == 3
    assert "3 rows of wd" in dict(imported.mapping)["left out"]
    chosen = read(tmp_path, LONG.format(2.42), axis="wd")
    assert sorted(chosen.records.runs["wd"]) == [0.1, 0.3, 1.0]
    with pytest.raises(RequestError, match="--axis"):
        read(tmp_path, LONG.format(2.42).replace("lr", "batch"))


@pytest.mark.parametrize("base", ["baseline", "A0_default", "control"])
def test_the_base_of_changes_is_the_run_that_is_called_so_whatever_its_size(base: str) -> None:
    """Most rows have another norm, position encoding and size than the base."""
    settings = {base: ("layer", "learned", 1000), "rope": ("layer", "rope", 990), "alibi": ("layer", "alibi", 990)}
    settings |= {"none": ("layer", "none", 990), "rms": ("rms", "learned", 995)}
    losses = dict(zip(settings, (2.3, 2.4, 2.5, 2.2, 2.25), strict=True))
    rows = [
        {
            "run": run,
            "seed": seed,
            "lr": 1e-3,
            "norm": norm,
            "pos": pos,
            "params": size,
            "val_loss": losses[run] + seed / 100,
        }
        for run, (norm, pos, size) in [*settings.items()][::-1]
        for seed in range(1, 10 if run == "rms" else 3)
    ]
    table = changes.single_changes(from_frame(pd.DataFrame(rows)))
    assert table.set_index("value")["effect"].round(4).to_dict() == {
        "rope": 0.1,
        "alibi": 0.2,
        "none": -0.1,
        "rms": -0.05,
    }


# Logs in a folder.


def test_a_final_loss_is_that_of_the_last_rows_if_they_are_noisy(tmp_path: Path, output_of: OutputOf) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, 400)
    for lr, end, length in ((0.001, 2.0, 400), (0.01, 2.3, 200)):
        steps = np.arange(1, length + 1)
        losses = end + 3 * np.exp(-steps / 30) + noise[:length]
        losses[-1] = end + (2 if lr == 0.001 else -2)  # a last batch of its own
        (tmp_path / f"lr={lr}").mkdir()
        pd.DataFrame({"step": steps, "loss": losses}).to_csv(tmp_path / f"lr={lr}" / "log.csv", index=False)
    said = output_of("import", str(tmp_path), f"out={tmp_path / 'out'}")
    ends = load(tmp_path / "out").runs.set_index("optimizer.lr")["final_val_loss"]
    assert ends.to_dict() == pytest.approx({0.001: 2.0, 0.01: 2.3}, abs=0.06)
    assert "medians of the last rows" in said
    assert "lengths differ" in said
    assert "by 2, step 200 to 400" in said


def test_a_log_that_descends_without_noise_ends_at_its_last_loss(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    pd.DataFrame({"step": range(200), "loss": np.linspace(9, 2, 200)}).to_csv(
        tmp_path / "logs" / "lr=0.1.csv", index=False
    )
    main(["import", str(tmp_path / "logs"), f"out={tmp_path / 'out'}"])
    assert load(tmp_path / "out").runs["final_val_loss"].tolist() == [2.0]


def test_tables_of_records_say_what_makes_a_study_of_them(tmp_path: Path) -> None:
    records = run_table.records_of(sweep(lr=float), Columns()).records
    with pytest.raises(TypeError, match=r"study\(FOLDER\).*from_frame"):
        tables.sensitivities(records)  # type: ignore[arg-type]
