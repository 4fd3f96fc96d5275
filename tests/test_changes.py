"""Single changes of a base and trials of which some were kept: which base, which noise, and what is said of each."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab.analysis import changes, from_frame
from lab.analysis.changes import BEYOND, WITHIN, Noise, cannot_tell, noise_of_neighbours, noise_of_repeats
from lab.analysis.sensitivity import Study
from lab.core.errors import RequestError
from lab.report import build
from sweeping import OutputOf

BASE = {"beta1": 0.9, "warmup": 1000, "act": "gelu"}
CHANGES = [("beta1", 0.98), ("beta1", 0.8), ("warmup", 250), ("act", "swiglu")]


def changed(**columns: Any) -> dict[str, Any]:
    """A row of the base with other values."""
    return {**BASE, "val_loss": 3.0, **columns}


def found(rows: list[dict[str, Any]], **options: Any) -> pd.DataFrame:
    """The single changes in a table of these rows."""
    return changes.single_changes(from_frame(pd.DataFrame(rows), **options))


def effects(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """The effect by key and value, rounded."""
    return {(key, value): round(effect, 4) for key, value, effect in table[["key", "value", "effect"]].to_numpy()}


# The noise of a seed.


def test_noise_of_repeats_pools_the_spread_of_each_group() -> None:
    noise = noise_of_repeats([[1.0, 3.0], [10.0, 12.0, 14.0], [50.0]])
    assert noise == Noise(pytest.approx(math.sqrt((2 + 8) / 3)), 3, True)
    assert noise_of_repeats([[1.0], [2.0]]) is None


def test_noise_of_neighbours_is_that_of_one_run_and_ignores_a_few_bad_changes() -> None:
    rng = np.random.default_rng(0)
    losses = rng.normal(3, 0.01, 2001)
    losses[::40] += 0.5
    noise = noise_of_neighbours(np.diff(losses).tolist())
    assert noise is not None
    assert not noise.is_repeated
    assert noise.sd == pytest.approx(0.01, rel=0.12)
    assert noise_of_neighbours([0.1, 0.2]) is None


def test_an_effect_is_beyond_the_noise_where_its_interval_excludes_zero() -> None:
    """The critical t of 4 degrees of freedom is 2.776."""
    noise = Noise(0.01, 4, True)
    critical = 2.776 * 0.01 * math.sqrt(2)
    assert noise.verdict_on(1.01 * critical) == noise.verdict_on(-1.01 * critical) == BEYOND
    assert noise.verdict_on(0.99 * critical) != BEYOND
    assert noise.verdict_on(0.99 * critical, runs=2, base_runs=2) == BEYOND
    assert noise.verdict_on(math.nan) == ""


def test_repeats_have_the_power_that_tables_give() -> None:
    """Two groups of six find a difference of two standard deviations with 80 %, five do not (Cohen 1988, table 2.4)."""
    noise = Noise(0.01, 2, True)
    assert noise.repeats_for(0.02) == noise.repeats_for(-0.02) == 6
    assert noise.verdict_on(0.02) == cannot_tell(6) == "cannot tell: repeat the baseline 6 times"
    assert noise.verdict_on(0.005) == WITHIN
    assert noise.verdict_on(0.0) == WITHIN


# Single changes of a base.


@pytest.mark.parametrize("names", [("changed_key", "value"), ("knob", "to"), ("Hyperparameter", "new_value")])
def test_a_column_that_names_changes_needs_no_other(names: tuple[str, str]) -> None:
    key, value = names
    rows: list[dict[str, Any]] = [{key: "baseline", value: None, "loss": 3.0}]
    rows += [{key: name, value: to, "loss": 3.1 + place} for place, (name, to) in enumerate(CHANGES)]
    assert effects(found(rows)) == {
        ("beta1", "0.98"): 0.1, ("beta1", "0.8"): 1.1, ("warmup", "250"): 2.1, ("act", "swiglu"): 3.1
    }  # fmt: skip


def test_a_change_may_be_named_with_its_value() -> None:
    rows = [{"change": "none", "loss": 3.0}, {"change": "beta1=0.98", "loss": 3.2}, {"change": "wd -> 0", "loss": 2.9}]
    assert effects(found(rows)) == {("beta1", "0.98"): 0.2, ("wd", "0"): -0.1}


def test_a_table_whose_rows_each_differ_from_one_in_a_column_is_one_of_single_changes() -> None:
    rows = [changed(), *(changed(**{name: to, "val_loss": 3.5}) for name, to in CHANGES)]
    table = found(rows)
    assert effects(table) == {(name, str(to)): 0.5 for name, to in CHANGES}
    said = table.set_index("value")
    assert said.loc["250", "change"] == "down, x 0.25"
    assert said.loc["0.98", "change"] == "up, x 1.09"
    assert said.loc["swiglu", "change"] == "gelu to swiglu"
    assert said.loc["250", "ratio"] == 0.25
    assert math.isnan(said.loc["swiglu", "ratio"])


def test_each_size_and_optimizer_has_a_base_of_its_own() -> None:
    """The tuned values of the bases differ, so that no single row is the base of all."""
    rows = []
    for place, (optimizer, size) in enumerate([("adamw", 10), ("adamw", 1000), ("lion", 10), ("lion", 1000)]):
        own = {"optimizer": optimizer, "params": size, "beta1": 0.9 + place / 100}
        rows += [changed(**own, val_loss=3.0 + place)]
        rows += [changed(**{**own, name: to, "val_loss": 3.1 + place}) for name, to in CHANGES]
    table = found(rows)
    assert len(table) == 16
    assert table["effect"].round(6).unique().tolist() == [0.1]
    assert set(zip(table["arm"], table["size"], strict=True)) == {
        (arm, size) for arm in ("adamw", "lion") for size in (10, 1000)
    }


def test_a_crossed_table_is_none_of_single_changes() -> None:
    rows = [changed(beta1=b, warmup=w) for b in (0.8, 0.9, 0.98) for w in (250, 1000, 2000)]
    study = from_frame(pd.DataFrame(rows))
    assert study.changes.empty
    assert study.points["arm"].nunique() == 9


def test_changes_are_not_looked_for_where_arms_were_named() -> None:
    rows = [changed(), *(changed(**{name: to}) for name, to in CHANGES)]
    study = from_frame(pd.DataFrame(rows), arm=["beta1", "warmup", "act"])
    assert study.changes.empty
    assert study.points["arm"].nunique() == 5


def with_learning_rates() -> list[dict[str, Any]]:
    """A base, its learning rates, and other changes; what was changed is named."""
    base = {"optimizer": "lion", "lr": 0.01, "wd": 0.1, "key": None, "value": None, "val_loss": 3.0}
    rows = [base]
    rows += [{**base, "key": "lr", "value": lr, "lr": lr, "val_loss": 3.2} for lr in (0.003, 0.03)]
    return [*rows, *({**base, "key": "wd", "value": wd, "wd": wd, "val_loss": 3.1} for wd in (0, 0.2))]


def test_changes_of_the_learning_rate_make_a_curve_and_others_are_points_of_none() -> None:
    study = from_frame(pd.DataFrame(with_learning_rates()))
    assert sorted(zip(study.points["lr"], study.points["loss"], strict=True)) == [
        (0.003, 3.2),
        (0.01, 3.0),
        (0.03, 3.2),
    ]
    assert effects(changes.single_changes(study)) == {("wd", "0"): 0.1, ("wd", "0.2"): 0.1}
    assert changes.single_changes(study)["before"].tolist() == ["0.1", "0.1"]


def test_the_learning_rate_of_a_change_may_be_told_by_its_value_alone() -> None:
    rows = [{**row, "lr": 0.01} for row in with_learning_rates()]
    assert sorted(from_frame(pd.DataFrame(rows)).points["lr"]) == [0.003, 0.01, 0.03]


def test_the_base_of_a_change_is_the_one_that_agrees_in_most_columns() -> None:
    """Steps follow from the batch, so that its change is one of two columns."""
    rows = []
    for tokens, base_loss in ((1024, 3.0), (4096, 2.0)):
        own = {"tokens": tokens, "batch": 8, "steps": tokens // 8, "changed": "", "to": None, "loss": base_loss}
        rows += [
            own,
            {**own, "batch": 16, "steps": tokens // 16, "changed": "batch", "to": 16, "loss": base_loss + 0.1},
        ]
        rows += [{**own, "changed": "beta2", "to": 0.99, "loss": base_loss + 0.2}]
    table = found(rows)
    assert table["effect"].round(6).tolist() == [0.2, 0.2, 0.1, 0.1]
    assert sorted(table["base_loss"]) == [2.0, 2.0, 3.0, 3.0]


def test_a_change_may_have_the_value_of_another_base() -> None:
    """The rate of a change is that of the other optimizer's base, and so are all values but the optimizer."""
    rows = []
    for optimizer, lr, base_loss in (("kron", 0.004, 3.0), ("cautious", 0.008, 2.0)):
        base = {"optimizer": optimizer, "lr": lr, "wd": 0.1, "changed": "", "to": None, "loss": base_loss}
        rows += [base, {**base, "lr": 0.008, "changed": "learning_rate", "to": 0.008, "loss": base_loss + 0.1}]
        rows += [{**base, "wd": 0.0, "changed": "wd", "to": 0.0, "loss": base_loss + 0.2}]
    assert found(rows)["effect"].round(6).tolist() == [0.2, 0.2]


def test_two_bases_that_are_as_near_are_refused() -> None:
    base = {"changed": None, "to": None, "loss": 3.0}
    rows = [{**base, "arch": "a"}, {**base, "arch": "a"}, {**base, "arch": "b"}, {**base, "arch": "b"}]
    with pytest.raises(RequestError, match=r"row 5 changes wd, and its base may be row 1 or row 3"):
        found([*rows, {"changed": "wd", "to": 0, "loss": 3.1, "arch": "c"}])


@pytest.mark.parametrize(("loss", "broke"), [(3.29, False), (3.31, True), (math.nan, True), (2.5, False)])
def test_a_change_breaks_a_run_that_ends_a_costly_margin_above_its_base(loss: float, broke: bool) -> None:
    rows = [changed(), *(changed(**{name: to, "val_loss": loss}) for name, to in CHANGES)]
    assert found(rows, initial_loss=9)["broke"].tolist() == [broke] * 4


def test_a_change_that_ends_above_the_initial_loss_broke() -> None:
    rows = [changed(), *(changed(**{name: to, "val_loss": 3.2}) for name, to in CHANGES)]
    assert found(rows, initial_loss=3.1)["broke"].all()


def test_effects_are_paired_by_seed_and_judged_by_the_spread_of_the_base() -> None:
    rows: list[dict[str, Any]] = []
    for seed, shift in enumerate((0.0, 0.01, 0.02)):
        rows += [{"change": "", "seed": seed, "loss": 3 + shift}, {"change": "a=1", "seed": seed, "loss": 3.2 + shift}]
    rows += [{"change": "b=1", "seed": 0, "loss": 3.001}]
    study = from_frame(pd.DataFrame(rows))
    table = changes.single_changes(study)
    assert effects(table) == {("a", "1"): 0.2, ("b", "1"): 0.001}
    assert dict(zip(table["key"], table["n"], strict=True)) == {"a": 3, "b": 1}
    assert changes.noise_of_bases(study) == Noise(pytest.approx(0.01), 2, True)
    assert changes.changes_as_text(study, table)["noise"].tolist() == [BEYOND, WITHIN]


def test_many_changes_are_told_by_key_direction_and_ratio(tmp_path: Path, output_of: OutputOf) -> None:
    rows = []
    for place in range(15):
        own = {"task": f"t{place}", "key": "", "value": None, "wd": 0.1, "loss": 3.0}
        rows += [own, {**own, "key": "wd", "value": 0.2, "wd": 0.2, "loss": 3.01}]
        rows += [{**own, "key": "wd", "value": 0, "wd": 0, "loss": 3.0 + 0.4 * (place < 5)}]
        rows += [{**own, "key": "clip", "value": 1, "loss": 2.99}]
    pd.DataFrame(rows).to_json(tmp_path / "runs.jsonl", orient="records", lines=True)
    output_of("import", tmp_path / "runs.jsonl", f"out={tmp_path / 'out'}")
    lines = output_of("report", tmp_path / "out").splitlines()
    told = [" ".join(line.split()) for line in lines]
    assert "wd off, from 0.1 15 +0.0000 +0.0000 +0.40 5 of 15 task t0; task t1; task t2; 2 more" in told
    assert "wd up, x 2 15 +0.0100 +0.0100 +0.0100 0 of 15" in told
    assert "clip 1 15 -0.0100 -0.0100 -0.0100 0 of 15" in told
    assert len(pd.read_csv(tmp_path / "out" / "tables" / "single_changes.csv")) == 45
    assert "Single changes of a base" in (tmp_path / "out" / "report.html").read_text()


# Trials.


def trials_of(*rows: tuple[str, float, str], **columns: Any) -> changes.Trials:
    """The trials in a table of descriptions, losses and statuses."""
    frame = pd.DataFrame(rows, columns=["description", "val_loss", "status"]).assign(**columns)
    return changes.trials(from_frame(frame))


REPEATED = [
    ("baseline", 3.000, "keep"),
    ("baseline (rerun, seed 2)", 3.002, "discard"),
    ("Baseline again", 2.998, "discard"),
]


def test_repeats_of_the_baseline_are_the_noise_that_kept_changes_are_held_against() -> None:
    said = trials_of(*REPEATED, ("wider", 2.9, "keep"), ("no-op", 2.8995, "keep"), ("bad", 3.4, "discard"))
    assert said.noise == Noise(pytest.approx(0.002), 2, True)
    assert said.repeated == ["1", "2", "3"]
    assert said.kept["change"].tolist() == ["baseline", "wider", "no-op"]
    assert said.kept["effect"].tolist()[1:] == pytest.approx([-0.1, -0.0005])
    assert said.kept["verdict"].tolist() == ["", BEYOND, WITHIN]
    assert said.tried == 3
    assert said.best == "5 (no-op), 2.8995"


@pytest.mark.parametrize(
    "pair",
    [
        ("lr 0.02 to 0.03", "lr 0.03 to 0.04"),
        ("warmup 100", "warmup 200"),
        ("run 3 epochs", "run 5 epochs"),
        ("wd=0.1", "wd=0.2"),
        ("", ""),
    ],
)
def test_other_changes_are_no_repeats(pair: tuple[str, str]) -> None:
    said = trials_of(("base", 3.0, "keep"), *((text, 3.1, "discard") for text in pair), ("x", 2.9, "keep"))
    assert said.noise is None
    assert said.kept["verdict"].tolist() == ["", cannot_tell(3)]


def test_a_description_after_another_change_was_kept_is_no_repeat() -> None:
    assert trials_of(("base", 3.0, "keep"), ("a", 2.9, "keep"), ("base", 2.9, "discard")).noise is None
    again = trials_of(("base", 3.0, "keep"), ("a", 2.9, "keep"), ("b", 3.0, "discard"), ("a (rerun)", 2.92, "discard"))
    assert again.noise is not None
    assert again.noise.freedom == 1
    assert again.kept["loss"].tolist() == pytest.approx([3.0, 2.91])


def test_without_repeats_the_noise_is_that_of_discarded_neighbours() -> None:
    rng = np.random.default_rng(1)
    rows = [(f"idea {letter}", 3 + rng.normal(0, 0.01), "discard") for letter in "abcdefghijklmnopqrst"]
    rows = [
        ("base", 3.0, "keep"),
        *rows[:10],
        ("better", 2.5, "keep"),
        *((text, loss - 0.5, s) for text, loss, s in rows[10:]),
    ]
    said = trials_of(*rows)
    assert said.noise is not None
    assert (said.noise.is_repeated, said.noise.freedom) == (False, 18)
    assert 0.005 < said.noise.sd < 0.02


@pytest.mark.parametrize(
    ("column", "kept", "not_kept"),
    [
        ("decision", "accepted", "rejected"),
        ("kept", True, False),
        ("Outcome", "Keep", "crash?"),
        ("verdict", "merged", "no"),
    ],
)
def test_what_was_kept_is_said_in_many_words(column: str, kept: Any, not_kept: Any) -> None:
    rows = [{"idea": "a", "loss": 3.0, column: kept}, {"idea": "b", "loss": 3.1, column: not_kept}]
    study = from_frame(pd.DataFrame([*rows, {"idea": "c", "loss": 2.9, column: kept}]))
    assert changes.trials(study).kept["change"].tolist() == ["a", "c"]


def test_a_crash_is_no_trial_and_neither_kept_nor_best() -> None:
    said = trials_of(("base", 3.0, "keep"), ("oom", 0.0, "crash"), ("zero", 0.0, "keep"), ("deeper", 2.9, "keep"))
    assert said.kept["change"].tolist() == ["base", "deeper"]
    assert said.best.startswith("4 (deeper)")


def test_a_table_with_learning_rates_is_none_of_trials() -> None:
    frame = pd.DataFrame({"lr": [1e-3, 1e-2, 1e-1], "loss": [3.0, 2.9, 3.1], "status": ["keep", "keep", "discard"]})
    assert not changes.has_trials(from_frame(frame))


def test_hundreds_of_trials_make_a_report_that_says_where_the_noise_is_from(
    tmp_path: Path, output_of: OutputOf
) -> None:
    rng = np.random.default_rng(2)
    rows = [
        {
            "commit": f"{at:07x}",
            "val_bpb": 1 - at * 1e-5 + rng.normal(0, 1e-3),
            "status": "discard" if at % 10 else "keep",
        }
        for at in range(510)
    ]
    (tmp_path / "results.jsonl").write_text(
        "\n".join(json.dumps({**row, "description": row["commit"]}) for row in rows)
    )
    output_of("import", tmp_path / "results.jsonl", f"out={tmp_path / 'out'}")
    study: Study = build.study([tmp_path / "out"])
    assert study.points["arm"].nunique() == 510
    said = build.summary(study)
    assert "differences of neighbours that were discarded, since no trial was repeated" in said
    assert "nats/byte" in said


def test_repeats_of_a_base_that_no_seed_tells_apart_are_its_seeds() -> None:
    base = {"change": "baseline", "batch": 8}
    rows = [{**base, "loss": 3 + shift} for shift in (0, 0.02, 0.01)] + [{**base, "change": "wd=0", "loss": 3.5}]
    study = from_frame(pd.DataFrame(rows))
    assert sorted(study.points["loss"]) == [3, 3.01, 3.02]
    assert changes.noise_of_bases(study) == Noise(pytest.approx(0.01), 2, True)


@pytest.mark.parametrize("loss", [math.inf, math.nan, 1e40])
def test_a_change_that_diverged_has_no_loss_and_counts_at_the_initial_one(loss: float) -> None:
    rows = [changed(), *(changed(**{name: to, "val_loss": loss}) for name, to in CHANGES)]
    study = from_frame(pd.DataFrame(rows), initial_loss=9)
    assert study.changes["status"].tolist() == ["diverged"] * 4
    assert study.changes["final_val_loss"].isna().all()
    assert changes.single_changes(study)["effect"].tolist() == [6.0] * 4


def test_best_over_takes_all_rows_of_a_table_of_changes() -> None:
    rows = [{"lr": lr, "wd": 0.1, "loss": 3 + lr} for lr in (0.1, 0.2, 0.3)]
    rows += [{"lr": 0.1, "wd": wd, "loss": 3 - wd} for wd in (0.2, 0.3, 0.4)]
    frame = pd.DataFrame(rows)
    assert len(from_frame(frame).changes) == 3
    best = from_frame(frame, best_over="wd")
    assert best.changes.empty
    assert best.points["loss"].tolist() == pytest.approx([2.6, 3.2, 3.3])


def test_what_changes_with_a_setting_is_no_second_change() -> None:
    """Steps follow from the batch at equal tokens."""
    base = {"batch": 8, "steps": 100, "wd": 0.1, "loss": 3.0}
    rows = [base, {**base, "batch": 16, "steps": 50}, {**base, "batch": 4, "steps": 200}]
    rows += [{**base, "wd": wd} for wd in (0, 0.2)]
    assert set(effects(found(rows, loss="loss", steps="100"))) == {
        ("batch", "16"), ("batch", "4"), ("wd", "0"), ("wd", "0.2")
    }  # fmt: skip


@pytest.mark.parametrize(("off", "on"), [(0, 1), (False, True), ("no", "yes")])
def test_two_switches_of_a_base_are_changes_and_one_is_an_arm(off: Any, on: Any) -> None:
    frame = pd.DataFrame({"qk_norm": [off, on, off], "z_loss": [off, off, on], "loss": [3.0, 2.9, 2.8]})
    assert changes.single_changes(from_frame(frame))["effect"].tolist() == pytest.approx([-0.2, -0.1])
    crossed = pd.DataFrame({"lr": [0.1, 0.2, 0.3] * 2, "qk_norm": [off] * 3 + [on] * 3, "loss": [3.0, 2.9, 3.1] * 2})
    assert from_frame(crossed).changes.empty
