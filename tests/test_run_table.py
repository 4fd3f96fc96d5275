"""Tables with a row per run, from any trainer: read in every format, reported like any results folder, or refused."""

from __future__ import annotations

import io
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from matplotlib.text import Text

from lab import main
from lab.analysis import curves, from_frame, study
from lab.analysis.laws import optimum
from lab.core.errors import RequestError
from lab.records import store
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from labwatch.tables import run_table, table_files
from labwatch.tables.columns import Columns
from sweeping import OutputOf

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "your_own_sweep.md"
PUBLISHED = DOCS / "tables" / "z_loss_16M_to_221M.csv"
LRS = (1e-3, 1e-2, 1e-1, 3e-1)


def table(seeds: int = 3, **columns: object) -> pd.DataFrame:
    """Two arms at two sizes; the arm ``clip`` off is unstable at the highest learning rate, and worse by its seed."""
    rows = [
        {
            "Learning Rate": lr,
            "eval/loss": 3.0 - size / 1e6 + (2.0 if clip == "off" and lr == 0.3 else 0.0) + 0.01 * seed,
            "n_params": size,
            "seed": seed,
            "clip": clip,
            "tokens/s": 100.0 * lr + seed,
            "host": f"node{seed}",
        }
        for clip in ("off", "on")
        for size in (100_000, 400_000)
        for lr in LRS
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows).assign(**columns)


def import_it(folder: Path, frame: pd.DataFrame, *options: str) -> int:
    frame.to_csv(folder / "runs.csv", index=False)
    return main(["import", str(folder / "runs.csv"), f"out={folder / 'out'}", *options])


def test_columns_are_found_and_settings_told_from_measurements(tmp_path: Path) -> None:
    assert import_it(tmp_path, table(), "--steps", "500") == 0
    records = store.read(tmp_path / "out")
    points = from_frame(table()).points
    assert list(dict.fromkeys(points["arm"])) == ["clip off", "clip on"]
    assert sorted(points["size"].unique()) == [100_000, 400_000]
    assert sorted(points["lr"].unique()) == sorted(LRS)
    assert set(records.runs["steps"]) == {500}
    assert set(records.runs["notes"]) == {f"host: node{seed}" for seed in range(3)}
    assert {*records.metrics["probe"]} == {"val_loss", "tokens/s"}
    assert set(records.metrics["step"]) == {500}


def runs_of(frame: pd.DataFrame, **columns: Any) -> pd.DataFrame:
    """The table of runs that is made of a table."""
    return run_table.records_of(frame, Columns(**columns)).records.runs


def roles_of(frame: pd.DataFrame, **columns: Any) -> dict[str, str]:
    """What is said of each column of a table."""
    return dict(run_table.records_of(frame, Columns(**columns)).mapping)


def two_arms() -> pd.DataFrame:
    """Two arms at one learning rate, paired by three seeds, with what a tracker notes beside them."""
    losses = {"baseline": (3.251, 3.262, 3.243), "muon": (3.148, 3.166, 3.139)}
    rows = [
        {"arm": arm, "lr": 1e-3, "seed": seed, "n_params": 124_000_000, "val_loss": loss}
        for arm, seeds in losses.items()
        for seed, loss in enumerate(seeds)
    ]
    noted = {"State": ["finished", "crashed"] * 3, "_step": 5000, "host": ["a", "a", "b", "a", "b", "a"]}
    return pd.DataFrame(rows).assign(**noted, **{"grad norm": [0.31, 0.33, 0.3, 0.3, 0.29, 0.33]})


def test_two_arms_at_one_learning_rate_are_compared_by_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_it(tmp_path, two_arms()) == 0
    assert "arm (baseline, muon)" in capsys.readouterr().out
    arms = study(tmp_path / "out")
    assert list(arms.points["arm"].unique()) == ["baseline", "muon"]
    (contrast,) = answer(arms).contrasts
    (difference,) = contrast.differences["muon"].values()
    by_seed = [-0.103, -0.096, -0.104]
    assert difference.values == pytest.approx(by_seed)
    assert difference.n == 3
    assert difference.high < 0


@pytest.mark.parametrize(
    ("column", "role"),
    [
        ({"State": ["finished", "crashed"] * 24}, "not used: bookkeeping"),
        ({"note": [None] * 48}, "not used: empty"),
        ({"summary.tokens": [1, 2] * 24}, "not used: measured"),
        ({"data_seed": [7, 8, 9] * 16}, "not used: follows from the seed"),
        ({"min_lr": [lr / 10 for lr in LRS for _ in range(3)] * 4}, "not used: follows from the learning rate"),
        ({"dataset": ["c4"] * 48}, "same in all runs"),
        ({"Name": [f"run-{number}" for number in range(48)]}, "not used: a name for each run"),
    ],
)
def test_what_is_no_setting_makes_no_arm(column: dict[str, Any], role: str) -> None:
    frame = table().assign(**column)
    (name,) = column
    assert name in roles_of(frame)[role].split(", ")
    assert roles_of(frame)["arm"] == "clip (off, on)"


def test_a_step_that_is_low_because_a_run_diverged_sets_nothing_apart() -> None:
    """Half the learning rates diverge early; with an arm of their own, sensitivity would be a hundredth."""
    rows = [
        {"lr": lr, "seed": seed, "n_params": 1000, "loss": loss, "_step": step, "epoch": epoch, "State": state}
        for lr, loss, step, epoch, state in (
            (1e-3, 3.1, 5000, 5, "finished"),
            (3e-3, 3.0, 4999, 5, "finished"),
            (1e-2, 3.0, 5000, 5, "finished"),
            (3e-2, math.nan, 1100, 1, "crashed"),
            (0.1, math.nan, 1100, 1, "crashed"),
            (0.3, math.nan, 1100, 1, "failed"),
        )
        for seed in range(3)
    ]
    frame = pd.DataFrame(rows)
    read = from_frame(frame, initial_loss=11.0)
    assert read.points["arm"].nunique() == 1
    assert read.curves["total"].iloc[0].mean == pytest.approx((0.1 + 3 * 8) / 6)
    assert set(read.runs["steps"]) == {5000}
    assert roles_of(frame, initial_loss="11")["not used: cut short where a run diverged"] == "epoch"


# Columns whose names mean something to the lab, or to another column.
NAMES = """
tokens device out batch_size seq_len validation precision recipe custom_model probes engine source loss size rate steps
table axis follows notes burst versions id spikes parameters intervention column curve outcome D/N tokens/param D.N
config/x x.y.z 0 N D arm name
"""


def crossed(name: str, values: tuple[Any, Any], seeds: int = 2) -> pd.DataFrame:
    """Two values of a column, each at three learning rates, of which the second costs half a nat."""
    rows = [
        {"learning_rate": lr, "val_loss": 3 + abs(place - 1) / 10 + cost / 2, "random_seed": seed, name: value}
        for cost, value in enumerate(values)
        for place, lr in enumerate(LRS[:3])
        for seed in range(seeds)
    ]
    return pd.DataFrame(rows)


@pytest.mark.parametrize("name", NAMES.split())
def test_no_column_is_ignored_or_merged_whatever_its_name(name: str) -> None:
    """Two values make two curves, or it is asked what the column is, and they do once --arm says so."""
    for values in (("x", "y"), (2000, 4000)):
        frame, refusal = crossed(name, values), name
        try:
            records, mapping = run_table.records_of(frame, Columns())
        except RequestError as fault:
            refusal = str(fault)
            records, mapping = run_table.records_of(frame, Columns(arm=[name]))
        assert name in refusal
        points = curves.points(records.runs)
        assert len(points) == 12
        assert points.groupby(["arm", "size"])["loss"].nunique().tolist() == [2, 2]
        assert any(name in text for _, text in mapping), mapping


@pytest.mark.parametrize(
    "names", [("a.b", "a/b"), ("config/wd", "wd"), ("params_wd", "config.wd"), ("arm", "method"), ("x", "column.x")]
)
def test_two_columns_of_like_names_are_two_settings(names: tuple[str, str]) -> None:
    rows = [
        {"lr": lr, "loss": 3 + cost, names[0]: one, names[1]: other}
        for lr in LRS[:3]
        for cost, (one, other) in enumerate((one, other) for one in "pq" for other in "rs")
    ]
    assert from_frame(pd.DataFrame(rows)).points.groupby("arm")["loss"].nunique().tolist() == [1, 1, 1, 1]


def test_a_name_is_cut_at_no_slash_but_that_of_a_tracker() -> None:
    arms = {
        name: set(from_frame(crossed(name, (10, 20))).points["arm"]) for name in ("D/N", "config/x", "a/b/c", "o.wd")
    }
    assert arms == {
        "D/N": {"D/N 10", "D/N 20"},
        "config/x": {"x 10", "x 20"},
        "a/b/c": {"a/b/c 10", "a/b/c 20"},
        "o.wd": {"wd 10", "wd 20"},
    }


@pytest.mark.parametrize(
    ("name", "is_size"),
    [
        *[(name, True) for name in ("N", "config/N", "non_embedding_params", "num_parameters", "Params", "d_model")],
        *[(name, False) for name in ("D/N", "tokens/params", "tokens per N", "n", "loss/N", "N_layers")],
    ],
)
def test_a_size_is_found_by_its_names_and_is_no_part_of_a_fraction(name: str, is_size: bool) -> None:
    runs = runs_of(crossed(name, (100_000, 400_000)))
    assert set(runs["parameters_without_embeddings"]) == ({100_000, 400_000} if is_size else {1})


def test_a_number_called_n_that_is_small_is_no_size() -> None:
    assert set(runs_of(crossed("N", (1, 2)))["parameters_without_embeddings"]) == {1}


def test_a_word_that_names_sizes_follows_from_them_and_another_does_not() -> None:
    frame = crossed("params", (70_000_000, 160_000_000))
    of_size = dict(zip((70_000_000, 160_000_000), ("pythia-70m", "pythia-160m"), strict=True))
    named = frame.assign(model=frame["params"].map(of_size))
    assert roles_of(named)["not used: follows from the size"] == "model"
    kinds = frame.assign(model=frame["params"].map({70_000_000: "dense", 160_000_000: "experts"}))
    assert roles_of(kinds)["arm"] == "model (dense, experts)"


def grid(**follow: Callable[[pd.DataFrame], Any]) -> pd.DataFrame:
    """Sizes, tokens and batches that cross, with columns that follow from them."""
    rows = [
        {"lr": lr, "N": size, "D": tokens, "bs": batch, "loss": 3 + abs(place - 1) / 10 + batch / 1e4 + tokens / 1e11}
        for size in (100_000_000, 400_000_000)
        for tokens in (1_000_000_000, 4_000_000_000)
        for batch in (32, 64, 128)
        for place, lr in enumerate(LRS[:3])
    ]
    return pd.DataFrame(rows).assign(**follow)


@pytest.mark.parametrize(
    ("column", "role"),
    [
        ({"iters": lambda runs: runs["D"] // runs["bs"]}, "D and bs"),
        ({"steps": lambda runs: runs["D"] // runs["bs"]}, "D and bs"),
        ({"warmup": lambda runs: 1000 * runs["bs"]}, "bs"),
        ({"flops": lambda runs: 6 * runs["N"] * runs["D"]}, "D and size"),
        ({"min_loss": lambda runs: runs["N"] + runs["D"] * runs["bs"]}, "D, bs and size"),
        ({"width": lambda runs: runs["N"] // 1000}, "the size"),
        ({"min_lr": lambda runs: runs["lr"] / 10}, "the learning rate"),
    ],
)
def test_a_column_that_follows_from_others_names_no_arm(column: dict[str, Any], role: str) -> None:
    frame = grid(**column)
    (name,) = column
    read = from_frame(frame)
    assert set(read.points["arm"]) == {
        f"D {tokens}, bs {batch}" for tokens in (10**9, 4 * 10**9) for batch in (32, 64, 128)
    }
    said = roles_of(frame)
    if name == "steps":
        assert said["steps"].endswith("; follows from D and bs")
    else:
        assert said[f"not used: follows from {role.replace(', bs and size', ' and bs and size')}"] == name


def test_a_word_follows_from_words_and_a_number_that_goes_with_it_from_the_word() -> None:
    frame = crossed("optimizer", ("adam", "muon"))
    tied = frame.assign(
        qk_norm=frame["optimizer"] == "muon",
        beta2=frame["optimizer"].map({"adam": 0.95, "muon": 0.99}),
        method=frame["optimizer"].map({"adam": "ours", "muon": "theirs"}),
    )
    assert set(from_frame(tied.drop(columns="method")).points["arm"]) == {"adam", "muon"}
    assert set(from_frame(tied).points["arm"]) == {"ours", "theirs"}
    # a word that goes with a number stands for more than the number
    tuned = grid(model=lambda runs: runs["D"].map(str) + "x")
    assert set(from_frame(tuned).points["arm"]) == {
        f"bs {batch}, model {tokens}x" for batch in (32, 64, 128) for tokens in (10**9, 4 * 10**9)
    }


def test_a_number_that_is_partly_empty_is_not_the_same_in_all_runs() -> None:
    frame = crossed("momentum", (0.9, math.nan))
    assert from_frame(frame).points["arm"].nunique() == 2
    assert "momentum" in roles_of(frame)["arm"]


def test_seeds_of_their_own_hide_no_setting() -> None:
    frame = crossed("wd", (0.1, 0.2)).assign(random_seed=[*[0, 1] * 3, *[2, 3] * 3])
    assert set(from_frame(frame).points["arm"]) == {"wd 0.1", "wd 0.2"}


def chinchilla(**columns: Any) -> pd.DataFrame:
    """Two arms at three sizes, each with steps and tokens of its own."""
    rows = [
        {
            "method": arm,
            "params": size,
            "lr": lr,
            "steps": size // 50_000,
            "tokens": 20 * size,
            "loss": 3 + abs(place - 1),
        }
        for arm in ("base", "clip")
        for size in (100_000_000, 300_000_000, 1_000_000_000)
        for place, lr in enumerate(LRS[:3])
    ]
    return pd.DataFrame(rows).assign(**columns)


@pytest.mark.parametrize("columns", [{}, {"arm": ["method"]}])
def test_steps_and_tokens_that_grow_with_the_size_set_no_arms_apart(columns: dict[str, Any]) -> None:
    read = from_frame(chinchilla(), **columns)
    assert set(read.points["arm"]) == {"base", "clip"}
    assert read.points.groupby("arm")["size"].nunique().tolist() == [3, 3]
    assert "steps" not in read.runs
    assert set(read.metrics["step"]) == {2000, 6000, 20000}


def test_steps_set_arms_apart_where_they_alone_do_or_are_named() -> None:
    frame = crossed("steps", (1000, 2000))
    assert set(from_frame(frame).points["arm"]) == {"steps 1000", "steps 2000"}
    assert set(from_frame(frame, arm="steps").points["arm"]) == {"steps 1000", "steps 2000"}
    with pytest.raises(RequestError, match=r"one run, alike in lr, seed, size, method;.* such as steps"):
        runs_of(frame.assign(method="x"), arm=["method"])


def test_steps_that_were_logged_set_no_arms_apart() -> None:
    """A run that stopped early by itself is on the curve of the others."""
    frame = crossed("wd", (0.1, 0.2)).assign(_step=[800 if lr == 0.1 else 5000 for lr in LRS[:3] for _ in "ab"] * 2)
    assert set(from_frame(frame).points["arm"]) == {"wd 0.1", "wd 0.2"}


def test_what_tells_runs_apart_is_not_said_to_tell_none() -> None:
    frame = two_arms().assign(acc=[0.31, 0.32, 0.33, 0.34, 0.35, 0.36], host=["a", "b", "c", "d", "e", "f"], data="c4")
    said = roles_of(frame.drop(columns="host").assign(comment=[*"uvwxyz"]))
    assert said["not used: measured"].split(", ") == ["grad norm", "acc"]
    assert said["not used: a note"] == "comment"
    assert said["same in all runs"] == "data"
    assert not [role for role in said if "apart" in role]


def test_a_cut_run_keeps_the_steps_that_it_made_beyond_the_others() -> None:
    frame = chinchilla().query("method == 'base'").drop(columns="method").assign(_step=100, steps=500, state="finished")
    frame.loc[0, ["loss", "state", "_step"]] = math.nan, "crashed", 900
    steps = run_table.records_of(frame, Columns(initial_loss="9", steps="_step")).records.metrics
    assert sorted(steps["step"].unique()) == [100, 900]
    frame.loc[0, "_step"] = 7
    assert set(run_table.records_of(frame, Columns(initial_loss="9", steps="_step")).records.metrics["step"]) == {100}


def test_equal_rows_of_two_tables_are_two_runs() -> None:
    frame = two_arms()
    first, other, again = (run_table.records_of(frame, Columns(), name).records.runs for name in ("a", "b", "a"))
    assert not {*first["id"]} & {*other["id"]}
    assert set(first["id"]) == set(again["id"])
    assert first["id"].is_unique
    better = run_table.records_of(frame.assign(val_loss=frame["val_loss"] - 0.1), Columns(), "a").records.runs
    assert not {*first["id"]} & {*better["id"]}


@pytest.mark.parametrize("former", [{}, {"restarts": "ledger"}], ids=["now", "before keys were renamed"])
def test_what_the_lab_exports_is_the_same_study_again(tmp_path: Path, former: dict[str, str]) -> None:
    results = DOCS.parent / "results" / "quickstart"
    assert main(["export", str(results), "--to", "csv", "--out", str(tmp_path)]) == 0
    exported = pd.read_csv(tmp_path / "runs.csv", dtype=str, keep_default_na=False).rename(columns=former)
    exported.to_csv(tmp_path / "runs.csv", index=False)
    assert main(["import", str(tmp_path / "runs.csv"), f"out={tmp_path / 'out'}"]) == 0
    own, read = study(results), study(tmp_path / "out")
    same = ["arm", "size", "lr", "seed", "capped", "outcome"]
    pd.testing.assert_frame_equal(read.points[same], own.points[same])
    assert [interval.values for interval in read.curves["above"]] == [i.values for i in own.curves["above"]]


def along_beta2(**columns: Any) -> pd.DataFrame:
    """Two arms along beta2 at one learning rate; with the arm ``qk`` off, each decade from 0.99 costs 0.3 nats."""
    rows = [
        {"beta2": beta2, "lr": 3e-3, "seed": seed, "qk": qk, "loss": 3 + cost * (qk == "off") + seed / 100}
        for qk in ("off", "on")
        for beta2, cost in ((0.9, 0.3), (0.99, 0.0), (0.999, 0.3))
        for seed in range(3)
    ]
    return pd.DataFrame(rows).assign(**columns)


def test_any_setting_may_be_the_axis(tmp_path: Path, capsys: pytest.CaptureFixture[str], undrawn: None) -> None:
    assert import_it(tmp_path, along_beta2(), "--axis", "beta2") == 0
    read = study(tmp_path / "out")
    assert read.axis == "beta2"
    assert sorted(read.points["lr"].unique()) == [0.9, 0.99, 0.999]
    assert [interval.mean for interval in read.curves["total"]] == pytest.approx([0.2, 0.0])
    assert set(read.runs["optimizer.lr"]) == {3e-3}
    assert main(["report", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Sensitivity to beta2" in page
    assert "learning rate" not in page
    assert "best beta2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arms", "axis", "figure"),
    [
        (("high learning rate", "low learning rate"), "warmup", "learning_rate_sensitivity"),
        (("LR by layer", "peak learning rates, instability part"), "beta2", "learning_rate_sensitivity"),
        (("at learning rate 0", "over the learning rates"), "", "loss_by_arm"),
    ],
)
def test_arms_have_the_names_that_a_table_gives_them(
    tmp_path: Path,
    output_of: OutputOf,
    monkeypatch: pytest.MonkeyPatch,
    arms: tuple[str, str],
    axis: str,
    figure: str,
) -> None:
    """Also if they speak of learning rates, and nothing else does where curves run along another axis or none."""
    drawings: list[Any] = []
    monkeypatch.setattr(
        "lab.report.build.FIGURES", {figure: lambda *study: drawings.append(FIGURES[figure](*study)) or drawings[-1]}
    )
    frame = along_beta2().drop(columns="lr").replace(dict(zip(("off", "on"), arms, strict=True)))
    frame = frame.rename(columns={"beta2": axis}) if axis else frame[frame["beta2"] == 0.99].drop(columns="beta2")
    assert import_it(tmp_path, frame.rename(columns={"qk": "arm"}), *(["--axis", axis] if axis else [])) == 0
    printed, read = output_of("report", tmp_path / "out"), study(tmp_path / "out")
    (drawn,) = drawings
    texts = [text.get_text() for text in drawn.findobj(Text)] + [text for marks in drawn.points for text in marks.texts]
    page = re.sub("<!--.*?-->", "", (tmp_path / "out" / "report.html").read_text())  # of drawings, a line each
    assert "could not be drawn" not in page
    for said in (printed, page, read._repr_html_(), drawn.caption, *map(unwrapped, texts), repr(read)):
        others = said.replace(arms[0], "").replace(arms[1], "")
        assert not re.search(r"learning[- ]rate|\bLRs?\b|instability part|under-training", others, re.IGNORECASE)
    for said in (printed, page, read._repr_html_(), unwrapped(" ".join(texts))):
        assert set(arms) == {arm for arm in arms if arm in said}


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_a_window_of_an_axis_bounds_its_sensitivity() -> None:
    frame = pd.concat([along_beta2(), along_beta2(beta2=0.5).drop_duplicates(["qk", "seed"]).assign(loss=9.0)])
    whole = from_frame(frame, axis="beta2").curves["total"].iloc[0].mean
    inside = from_frame(frame, axis="beta2", window=(0.9, 0.999)).curves["total"].iloc[0].mean
    assert inside == pytest.approx(0.2)
    assert whole > 1


@pytest.mark.slow
def test_an_axis_may_begin_at_zero_and_the_best_learning_rate_be_taken(tmp_path: Path) -> None:
    warm = along_beta2().rename(columns={"beta2": "warmup"}).replace({"warmup": {0.9: 0, 0.99: 100, 0.999: 1000}})
    worse = warm.assign(lr=3e-2, loss=warm["loss"] + 1)
    frame = pd.concat([warm, worse], ignore_index=True)
    assert set(from_frame(frame, axis="warmup").points["arm"]) == {
        f"lr {lr}, qk {qk}" for qk in ("off", "on") for lr in ("0.003", "0.03")
    }
    best = from_frame(frame, axis="warmup", best_over="lr")
    assert set(best.points["arm"]) == {"qk off", "qk on"}
    assert best.points["loss"].max() < 4
    assert import_it(tmp_path, frame, "--axis", "warmup", "--best-over", "lr") == 0
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "could not be drawn" not in (tmp_path / "out" / "report.html").read_text()


def test_arms_without_learning_rates_are_compared_by_the_tests_of_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    """Three arms, of which one is the baseline by its name; the paired differences are by hand."""
    rows = [
        {"optimizer": name, "seed": seed, "val_loss": 3.0 + 0.1 * seed + cost + 0.01 * noise}
        for name, cost, noises in (("adamw", -0.1, (0, 1, -1)), ("baseline", 0, (0, 0, 0)), ("sgd", 0.5, (1, 0, 1)))
        for seed, noise in enumerate(noises)
    ]
    assert import_it(tmp_path, pd.DataFrame(rows)) == 0
    read = study(tmp_path / "out")
    assert read.axis == ""
    (contrast,) = answer(read).contrasts
    assert contrast.reference == "baseline"
    changes = {arm: cell for arm, cells in contrast.differences.items() for cell in cells.values()}
    assert changes["adamw"].values == pytest.approx([-0.1, -0.09, -0.11])
    p = {arm: scipy.stats.ttest_1samp(interval.values, 0).pvalue for arm, interval in changes.items()}
    adjusted = {"adamw": max(p["adamw"], 2 * p["sgd"]), "sgd": 2 * p["sgd"]}
    capsys.readouterr()
    said = output_of("report", tmp_path / "out", "--difference", "0.005")
    for arm, p_of_arm in adjusted.items():
        (line,) = [line for line in said.splitlines() if line.startswith(arm) and "[" in line]
        assert line.endswith(f"{p_of_arm:.2g}")
    assert re.search(r"so 3 seeds find one of 0.0\d+ with probability 80%; one of 0.005 takes \d+ seeds", said)
    assert (tmp_path / "out" / "figures" / "loss_by_arm.svg").exists()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "learning rates" not in page
    assert "could not be drawn" not in page


def test_arms_that_share_no_seed_are_compared_by_their_means() -> None:
    frame = two_arms().assign(seed=range(6))
    (contrast,) = answer(from_frame(frame)).contrasts
    (difference,) = contrast.differences["muon"].values()
    assert difference.mean == pytest.approx(-0.101)
    spread = math.hypot(*(frame[frame["arm"] == arm]["val_loss"].std() for arm in ("baseline", "muon")))
    assert difference.high - difference.mean == pytest.approx(4.3027 * spread / math.sqrt(3), rel=1e-4)


@pytest.mark.parametrize(
    ("unit", "name", "stored"),
    [
        ("bits", "loss", 3.0 / math.log(2)),
        ("perplexity", "loss", math.exp(3.0)),
        (None, "val_ppl", math.exp(3.0)),
        ("bits_per_byte", "loss", 3.0 / math.log(2)),
    ],
)
def test_losses_are_read_in_their_unit(unit: str | None, name: str, stored: float) -> None:
    frame = two_arms().drop(columns="val_loss").assign(**{name: stored})
    assert set(runs_of(frame, unit=unit)["final_val_loss"].round(9)) == {3.0}
    assert ("nats per byte" in roles_of(frame, unit=unit).get("unit of losses", "")) == (unit == "bits_per_byte")


def test_a_run_that_was_tried_again_counts_as_asked() -> None:
    first = two_arms()
    frame = pd.concat([first.assign(val_loss=first["val_loss"] - 0.5), first], ignore_index=True)
    with pytest.raises(RequestError, match=r"row 1 and row 7 are one run.*--keep last or --keep best"):
        runs_of(frame)
    assert sorted(runs_of(frame, keep="last")["final_val_loss"]) == sorted(first["val_loss"])
    assert sorted(runs_of(frame, keep="best")["final_val_loss"]) == sorted(first["val_loss"] - 0.5)
    with pytest.raises(RequestError, match="--keep: 'first' is none of"):
        runs_of(frame, keep="first")


def test_the_best_over_a_setting_is_taken_where_asked() -> None:
    """Three batch sizes at each learning rate; steps follow from batch and tokens, and set nothing apart."""
    rows = [
        {
            "lr": lr,
            "D": tokens,
            "bs": batch,
            "steps": tokens // batch,
            "N": size,
            "loss": 3 + abs(i - 1) + (batch != 64),
        }
        for size in (1_000_000, 4_000_000)
        for tokens in (1_000_000, 4_000_000)
        for i, lr in enumerate(LRS[:3])
        for batch in (32, 64, 128)
    ]
    runs = runs_of(pd.DataFrame(rows), best_over=["bs"], size="N")
    assert len(runs) == 12
    assert sorted(set(runs["final_val_loss"])) == [3, 4]
    assert set(from_frame(pd.DataFrame(rows), size="N", best_over="bs").points["arm"]) == {"D 1000000", "D 4000000"}


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(RequestError, match="has no rows"):
        from_frame(pd.DataFrame({"lr": [], "seed": [], "val_loss": []}))


def test_the_best_over_a_rate_is_taken_where_a_setting_is_called_as_the_rate_is() -> None:
    """``lr`` is what a schedule left of the rate in the last step."""
    rates = {"learning_rate": [1e-3, 1e-3, 1e-2, 1e-2], "min_lr": [1e-5] * 4, "lr": [1e-5] * 4, "seed": [0, 1] * 2}
    runs = runs_of(pd.DataFrame({**rates, "loss": [2.0, 2.1, 1.8, 2.2]}), best_over=["learning_rate"])
    assert sorted(runs["final_val_loss"]) == [1.8, 2.1]


@pytest.mark.parametrize("length", ["tokens", "steps"])
def test_a_best_over_runs_of_unlike_length_is_named(length: str) -> None:
    """Only AdamW has the longest runs, so that the best of each optimizer is of another length."""
    rows = [
        {"optimizer": optimizer, "lr": lr, length: tokens, "loss": 3 + lr - tokens / 1e4}
        for optimizer, longest in (("adamw", 3), ("lion", 2))
        for tokens in (1000, 2000, 4000)[:longest]
        for lr in LRS[:3]
    ]
    said = roles_of(pd.DataFrame(rows), arm=["optimizer"], best_over=["lr"])
    assert said["length of runs differs"].startswith(f"{length}, ")
    alike = roles_of(pd.DataFrame(rows), arm=["optimizer", length], best_over=["lr"])
    assert "length of runs differs" not in alike
    at_equal_tokens = [{**row, "tokens": 8e6, "batch": 8e6 / row[length], "steps": row[length]} for row in rows]
    said = roles_of(pd.DataFrame(at_equal_tokens), arm=["optimizer"], best_over=["lr", "batch"])
    assert "length of runs differs" not in said


def scaling_law(step: float = 2.0) -> pd.DataFrame:
    """Sizes N, tokens D and batches; the best learning rate is 2e-3 (N/1e8)^-0.8 (D/5e9)^0.3, and the batch 256."""
    rows = []
    for size, width in ((6e7, 512), (1.2e8, 768), (2.4e8, 1024), (4.3e8, 1280)):
        for tokens in (2e9, 4e9, 1e10, 2e10):
            optimum = 2e-3 * (size / 1e8) ** -0.8 * (tokens / 5e9) ** 0.3
            for place in range(round(math.log(optimum, step)) - 3, round(math.log(optimum, step)) + 4):
                lr = step**place
                for batch in (64, 256, 1024):
                    loss = 2.5 + 0.06 * math.log(lr / optimum) ** 2 + 0.03 * math.log(batch / 256) ** 2
                    row = {"N": int(size), "D": int(tokens), "lr": lr, "bs": batch, "h": width}
                    rows.append({**row, "iters": int(tokens / batch / 2048), "smooth loss": loss})
    return pd.DataFrame(rows)


def test_the_law_of_the_optimum_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf, undrawn: None
) -> None:
    options = ("--size", "N", "--loss", "smooth loss", "--best-over", "bs")
    assert import_it(tmp_path, scaling_law(), *options) == 0
    said = capsys.readouterr().out
    assert re.search(r"arm +D \(2e\+09, 4e\+09, 1e\+10, 2e\+10\)", said)
    assert re.search(r"best over +bs, \d+ of \d+ rows", said)
    read = study(tmp_path / "out")
    (law,) = optimum.fit_laws(read.records, read.points)
    powers = re.findall(r"(\w+)\^(\S+) \[(\S+), (\S+)\]", law.text)
    assert [(name, float(power)) for name, power, *_ in powers] == [("size", -0.8), ("D", 0.3)]
    assert all(float(low) <= float(power) <= float(high) for _, power, low, high in powers)
    assert "size^-0.80 [" in output_of("predict", tmp_path / "out")
    assert main(["report", str(tmp_path / "out")]) == 0
    assert "Law of the best learning rate: size^-0.80 [" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize("name", ["curve", "lr"])
def test_a_law_holds_whatever_its_numbers_are_called(name: str) -> None:
    frame = scaling_law().rename(columns={"lr": "warmup", "D": name})
    read = from_frame(frame, size="N", loss="smooth loss", best_over="bs", axis="warmup")
    (law,) = optimum.fit_laws(read.records, read.points)
    powers = dict(re.findall(r"(\w+)\^(\S+)", law.text))
    assert (powers["size"], powers[name]) == ("-0.80", "0.30")


def test_a_transfer_is_measured_in_steps_of_the_grid(tmp_path: Path, output_of: OutputOf) -> None:
    """The optimum falls by two steps of the grid from the small size to the large one, in each of three seeds."""
    rows = [
        {"lr": 10**place, "seed": seed, "N": size, "loss": 3 + (place - best - noise) ** 2}
        for size, best in ((1000, -2.0), (8000, -3.0))
        for seed, noise in enumerate((-0.1, 0.0, 0.1))
        for place in np.arange(-5, 0.1, 0.5)
    ]

    def transfer(runs: pd.DataFrame) -> dict[str, str]:
        (found,) = optimum.transfer_table(from_frame(runs, size="N").points).to_dict("records")
        return found  # type: ignore[return-value]

    found = transfer(pd.DataFrame(rows))
    assert (found["shift in steps"], found["could have seen"]) == ("-2.00", "0.00")
    assert float(found["cost"].split()[0]) == pytest.approx(1, rel=0.1)
    noisy = pd.DataFrame(rows).assign(loss=lambda runs: runs["loss"] + 0.05 * (runs["seed"] - 1) * (runs["lr"] < 2e-3))
    assert float(transfer(noisy)["could have seen"]) > 0
    assert transfer(pd.DataFrame(rows).query("seed == 0"))["could have seen"] == "1.00"
    assert import_it(tmp_path, pd.DataFrame(rows), "--size", "N") == 0
    assert re.search(r"loss|runs.csv +1k +8k +0.01 to 0.001 +-2.00", output_of("predict", tmp_path / "out"))


def wandb_rows() -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    """Config, summary and name of two arms; without qk-norm the highest learning rate diverges at step 800."""
    for qk_norm in (True, False):
        for lr in LRS[:3]:
            for seed in range(3):
                lost = lr == 0.1 and not qk_norm
                config = {"optim": {"lr": lr, "betas": [0.9, 0.95]}, "seed": seed, "qk_norm": qk_norm}
                loss = math.nan if lost else 3 + lr + seed / 100
                summary = {
                    "eval/loss": loss,
                    "train/loss": loss + 1,
                    "_step": 800 if lost else 5000,
                    "_runtime": lr + seed,
                }
                yield config, summary, f"sunny-{lr}-{seed}-{qk_norm}"


def of_wandb(nested: Callable[[Any], Any]) -> pd.DataFrame:
    """The runs table as the API gives it, with whatever text its cells became."""
    rows = [
        {"name": name, "config": nested(config), "summary": nested(summary)} for config, summary, name in wandb_rows()
    ]
    return pd.DataFrame(rows)


def of_wandb_page() -> pd.DataFrame:
    """The runs table as the web page exports it."""
    rows = []
    for config, summary, name in wandb_rows():
        wide = {f"summary.{key}": value for key, value in summary.items()}
        settings = {"config.optim.lr": config["optim"]["lr"], "seed": config["seed"], "qk_norm": config["qk_norm"]}
        state = "crashed" if summary["_step"] == 800 else "finished"
        rows.append({"Name": name, "State": state, "Tags": "", "Runtime": summary["_runtime"], **settings, **wide})
    return pd.DataFrame(rows)


@pytest.mark.parametrize("frame", [of_wandb(dict), of_wandb(json.dumps), of_wandb_page()])
def test_a_runs_table_of_wandb_is_read_in_every_form(tmp_path: Path, frame: pd.DataFrame) -> None:
    """Sensitivity is 2.70 with the diverged runs at 11; it was a hundredth with an arm of their own."""
    frame.to_csv(tmp_path / "a.csv", index=False)
    for table_read in (frame, table_files.read_table(str(tmp_path / "a.csv"))):
        read = from_frame(table_read, initial_loss=11)
        assert list(read.points["arm"].unique()) == ["qk norm False", "qk norm True"]
        assert set(read.runs["steps"]) == {5000}
        mean = {arm: interval.mean for arm, interval in zip(read.curves["arm"], read.curves["total"], strict=True)}
        assert mean["qk norm False"] == pytest.approx((0 + 0.009 + 8 - 0.001 - 0.01) / 3, abs=1e-6)
    reasons = read.runs.loc[read.runs["status"] == "diverged", "reason"]
    assert set(reasons) == {f"sunny-0.1-{seed}-False: no finite loss" for seed in range(3)}


def test_trials_of_optuna_are_runs_but_those_that_were_pruned() -> None:
    rows = [
        {"number": n, "value": 3 + abs(i - 1) + (name == "adam"), "params_lr": lr, "params_optimizer": name}
        for n, (name, i, lr) in enumerate((name, i, lr) for name in ("adam", "muon") for i, lr in enumerate(LRS))
    ]
    frame = pd.DataFrame(rows).assign(state="COMPLETE", duration="0 days 01:00:00")
    frame.loc[3, ["value", "state"]] = 7.0, "PRUNED"
    read = from_frame(frame, loss="value")
    assert list(read.points["arm"].unique()) == ["adam", "muon"]
    assert len(read.points) == 7
    assert list(read.failed["reason"]) == ["pruned"]


def test_the_last_result_of_a_trial_of_ray_counts() -> None:
    rows = [
        {"config/lr": lr, "loss": 5 - n, "trial_id": f"t{lr}", "training_iteration": n, "time_total_s": n, "pid": 7}
        for lr in LRS
        for n in range(1, 4)
    ]
    assert from_frame(pd.DataFrame(rows)).points["loss"].tolist() == [2.0] * 4


def test_learning_rates_that_agree_in_three_digits_are_one() -> None:
    frame = table().replace({"Learning Rate": {0.1: 0.1003}})
    frame.loc[frame["seed"] == 1, "Learning Rate"] = frame["Learning Rate"].replace(0.1003, 0.1)
    assert sorted(from_frame(frame).points["lr"].unique()) == sorted(LRS)
    apart = frame.replace({"Learning Rate": {0.1003: 0.11}})
    assert from_frame(apart).points["lr"].nunique() == 5


@pytest.mark.parametrize("name", ["baseline", "None"])
def test_names_of_arms_are_kept_as_given(tmp_path: Path, name: str) -> None:
    frame = table().rename(columns={"clip": "method"}).replace({"method": {"off": name}})
    frame.to_csv(tmp_path / "a.csv", index=False)
    arms = from_frame(table_files.read_table(str(tmp_path / "a.csv"))).points["arm"]
    assert set(arms) == {name, "on"}
    alone = from_frame(frame[frame["method"] == name]).points["arm"]
    assert set(alone) == {name}


def test_settings_that_cross_at_one_learning_rate_are_arms_and_measurements_are_not() -> None:
    rows = [
        {"lr": 1e-3, "seed": seed, "loss": 3 + seed / 100, "optimizer": name, "wd": wd, "best_epoch": 3 + (seed > 0)}
        for name in ("adam", "muon")
        for wd in (0.0, 0.1)
        for seed in range(3)
    ]
    arms = set(from_frame(pd.DataFrame(rows)).points["arm"])
    assert arms == {f"{name}, wd {wd}" for name in ("adam", "muon") for wd in ("0", "0.1")}


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    frame = two_arms().assign(n_params="124M", max_steps="20,000")
    frame.to_parquet(tmp_path / "a.parquet")
    runs = runs_of(table_files.read_table(str(tmp_path / "a.parquet")), steps="max_steps")
    assert set(runs["parameters_without_embeddings"]) == {124_000_000}
    assert set(runs["steps"]) == {20_000}
    frame.assign(arm=[name.encode() for name in frame["arm"]]).to_parquet(tmp_path / "b.parquet")
    assert set(from_frame(table_files.read_table(str(tmp_path / "b.parquet"))).points["arm"]) == {"baseline", "muon"}


def test_every_format_gives_the_same_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = table().assign(**{"eval/loss": lambda runs: runs["eval/loss"].where(runs["seed"] > 0)})
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "b.tsv", index=False, sep="\t")
    frame.to_json(tmp_path / "c.jsonl", orient="records", lines=True)
    frame.to_parquet(tmp_path / "d.parquet")
    monkeypatch.setattr("sys.stdin", io.StringIO((tmp_path / "c.jsonl").read_text()))
    sources = [*map(str, sorted(tmp_path.iterdir())), "-"]
    columns = Columns(initial_loss="9")
    first, *others = [run_table.records_of(table_files.read_table(source), columns).records for source in sources]
    assert (first.runs["status"] == "diverged").sum() == 16
    for one in others:
        pd.testing.assert_frame_equal(one.runs, first.runs)
        pd.testing.assert_frame_equal(one.metrics, first.metrics)


def test_published_runs_have_the_published_sensitivity() -> None:
    """16M to 221M parameters with and without z-loss (arXiv 2601.02031): S as computed from the same losses by hand."""
    published = from_frame(pd.read_csv(PUBLISHED))
    curves = published.curves.set_index(["arm", "size"])["total"].map(lambda interval: interval.mean)
    shown = [round(curves[("z-loss off", size)], 3) for size in (16_000_000, 29_000_000, 57_000_000)]
    assert shown == [0.262, 0.336, 0.435]
    shown = [round(curves[("z-loss on", size)], 3) for size in (16_000_000, 29_000_000, 57_000_000)]
    assert shown == [0.046, 0.028, 0.201]
    assert published.curves["total"].map(lambda interval: interval.n).eq(1).all()


def test_the_page_shows_what_its_commands_and_its_code_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    """Its blocks in their order: commands and code are run, and what they show has been printed, or is in a table."""
    for name in ("docs", "results"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    for lr in LRS:
        log = tmp_path / "logs" / "clip" / f"lr={lr}_seed=1.jsonl"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(json.dumps({"step": step, "val/loss": 4 - step + lr}) + "\n" for step in range(3)))
    monkeypatch.chdir(tmp_path)
    printed = "".join((DOCS / "tables" / "my_trainer.csv").read_text().splitlines(keepends=True)[:3])
    for kind, block in re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.splitlines() if kind == "sh" else ():
            assert main(shlex.split(line)[1:]) == 0, line
        if kind == "python" and "wandb" not in block:
            exec(block, {})  # the page's own code
        printed += capsys.readouterr().out
        assert kind != "text" or block in printed, block
    assert "from 0.001 to 0.3" in Path("runs/my_trainer/report.html").read_text()


def test_the_tables_of_the_page_are_runs_of_the_lab() -> None:
    own = study("results/quickstart_fp32").curves["total"].map(lambda interval: interval.mean)
    read = from_frame(pd.read_csv(DOCS / "tables" / "my_trainer.csv"), initial_loss="eval/loss_at_step_0").curves
    assert read["total"].map(lambda interval: interval.mean).tolist() == pytest.approx(own.tolist())
    for name, folder in (("two_arms", "qk_layernorm"), ("warm_up", "warm_up")):
        losses = store.read(DOCS.parent / "results" / folder).runs["final_val_loss"]
        table_of_page = pd.read_csv(DOCS / "tables" / f"{name}.csv")
        assert set(table_of_page.get("val_loss", table_of_page.get("loss"))) <= set(losses)


def test_runs_of_wandb_become_a_table_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    """With a stand-in for ``wandb``, whose runs have nested configs and summaries."""
    runs = [
        SimpleNamespace(
            config={"optimizer": {"lr": lr}, "seed": seed, "n_params": 1000},
            name=f"run-{lr}-{seed}",
            state="finished",
            summary=SimpleNamespace(_json_dict={"eval/loss": 2 + lr + seed, "_step": 99, "_runtime": 3.5}),
        )
        for lr in LRS
        for seed in range(3)
    ]
    projects = {"me/my-project": runs}
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Api=lambda: SimpleNamespace(runs=projects.__getitem__)))
    monkeypatch.chdir(tmp_path)
    [of_wandb, _] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(of_wandb, {})  # the page's own code
    for is_new in (True, False):
        capsys.readouterr()
        said = json.loads(output_of("import", "runs.csv", "out=out", "--json"))
        assert [said[key] for key in ("folder", "runs", "is_new")] == ["out", len(runs), is_new]
        assert said["mapping"]["not used: bookkeeping"] == "State, summary._runtime"
    records = store.read(tmp_path / "out")
    assert sorted(records.runs["optimizer.lr"].unique()) == sorted(LRS)
    assert set(records.runs["steps"]) == {99}


def test_other_commands_work_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides those of the page; a table that lacks a run of its grid is not called partial."""
    only = "learning_rate_sensitivity"
    monkeypatch.setattr("lab.report.build.FIGURES", {only: FIGURES[only]})
    out = tmp_path / "out"
    assert import_it(tmp_path, table().iloc[1:], "--initial-loss", "9") == 0
    assert main(["report", str(out)]) == 0
    assert "partial" not in (out / "figures" / "learning_rate_sensitivity.svg").read_text()
    page = (out / "report.html").read_text()
    assert "imported from runs.csv" in page
    assert " is lowest for clip on: 0.000" in page
    assert "model size: " in page
    assert "without embeddings" not in page
    assert "Partial: " not in page
    assert main(["status", str(out)]) == 0
    assert main(["export", str(out), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    assert main(["claims", str(out)]) == 0
    assert "A fault of the lab" not in capsys.readouterr().err


def test_a_table_is_imported_once_or_replaced_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_it(tmp_path, table()) == 0
    first = (tmp_path / "out" / "runs.parquet").read_bytes()
    assert import_it(tmp_path, table()) == 0
    assert "48 runs already there" in capsys.readouterr().out
    assert import_it(tmp_path, table(seeds=2)) == 2
    assert "holds another table; --replace replaces it" in capsys.readouterr().err
    assert (tmp_path / "out" / "runs.parquet").read_bytes() == first
    assert import_it(tmp_path, table(seeds=2), "--replace") == 0
    assert len(store.read(tmp_path / "out").runs) == 32


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("second", ["two", "one"])
def test_no_run_of_two_tables_is_lost(tmp_path: Path, output_of: OutputOf, second: str) -> None:
    """Tables have arms of their own by name; of two tables with one name, what repeats a point is named by reports."""
    worse = table().assign(**{"eval/loss": lambda runs: runs["eval/loss"] + 0.5})
    outs = [tmp_path / "first", tmp_path / "second"]
    for frame, out, name in ((table(), outs[0], "one"), (worse, outs[1], second)):
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        assert main(["import", str(tmp_path / f"{name}.csv"), f"out={out}"]) == 0
    arms = {f"clip {clip}, table {name}.csv" for clip in ("off", "on") for name in ("one", "two")}
    assert set(study(outs).points["arm"]) == (arms if second == "two" else {"clip off", "clip on"})
    if second == "one":
        assert "Left out, since another run is the same point: 48 runs" in output_of("report", *outs)


def test_trained_records_are_never_replaced(tmp_path: Path) -> None:
    assert import_it(tmp_path, table()) == 0
    records = store.read(tmp_path / "out")
    store.write_imported(tmp_path / "out", records._replace(runs=records.runs.assign(versions="lab 0.1.0")))
    assert import_it(tmp_path, table(seeds=2), "--replace") == 2
