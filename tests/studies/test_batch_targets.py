"""Steps to a target, tuned batch sizes, and the noise scale beside the loss, on records made by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from lab.analysis import Records
from planted import BIGRAM, card
from planted import records_of as records
from studies.batch_size import measures
from studies.batch_size.measures import budget_pairs, mean_noise_scale
from studies.batch_size.tuning import (
    crossing,
    crossings,
    noise_sums,
    ratio_of_means,
    tune,
    tuned_steps,
)

LRS = [0.01, 0.02, 0.04, 0.08, 0.16]


def test_a_crossing_is_straight_between_records() -> None:
    assert crossing([0, 10, 20, 40], [5.0, 4.0, 3.0, 2.0], 2.5) == (30.0, 20.0)
    assert crossing([0, 10, 20], [5.0, 3.0, 2.0], 3.0) == (10.0, 10.0)
    assert crossing([0, 10, 20], [5.0, 4.0, 3.0], 3.0) == (20.0, 10.0), "as low as the target in the last record"
    assert crossing([5, 10], [2.0, 1.0], 3.0) == (5.0, 0.0), "low enough from the first record on"


def test_a_loss_that_is_no_number_is_no_crossing() -> None:
    assert crossing([0, 10, 20, 30], [5.0, math.nan, 3.0, 1.0], 2.0) == (25.0, 10.0)
    assert crossing([0, 10, 20], [5.0, 4.0, -math.inf], 2.0) == pytest.approx((math.nan, math.nan), nan_ok=True)
    assert all(map(math.isnan, crossing([0, 10], [5.0, 4.0], 2.0)))
    assert all(map(math.isnan, crossing([], [], 2.0)))


def test_each_run_is_held_to_the_bigram_of_its_text() -> None:
    """The last record is on other held-out text."""
    runs = [card(seed=seed, loss_bigram=bigram, steps=400) for seed, bigram in ((0, 2.0), (1, 3.0), (2, 1.0))]
    losses = ((0, 4.0), (100, 3.0), (200, 2.0), (300, 1.5), (399, 0.5), (400, 0.1))
    rows = [(run["id"], step, "val_loss", "", value) for run in runs for step, value in losses]
    rows += [(runs[0]["id"], 0, "val_loss", "other", 0.0), (runs[0]["id"], 0, "train_loss", "", 0.0)]
    steps = crossings(records(runs, rows))["steps"]
    assert steps[runs[0]["id"]] == 200
    assert steps[runs[1]["id"]] == 100
    assert math.isnan(steps[runs[2]["id"]])


def bowl(best: float, fewest: float = 100.0, seeds: int = 3) -> np.ndarray:
    """Steps ``[s l]``, a parabola of log steps over log learning rate around ``best``."""
    return np.array([[fewest * math.exp(0.1 * math.log(lr / best) ** 2) for lr in LRS]] * seeds)


def test_the_best_learning_rate_is_the_vertex() -> None:
    tuned = tune(LRS, bowl(0.03))
    assert tuned.refusal == ""
    assert tuned.lr_s == pytest.approx([0.03] * 3)
    assert tuned.steps_s == pytest.approx([bowl(0.03)[0].min()] * 3)


@pytest.mark.parametrize(("best", "words"), [(0.005, "0.01, is the lowest"), (0.5, "0.16, is the highest")])
def test_a_best_learning_rate_at_the_edge_of_the_grid_is_refused(best: float, words: str) -> None:
    tuned = tune(LRS, bowl(best))
    assert words in tuned.refusal
    assert np.isnan([*tuned.steps_s, *tuned.lr_s]).all()


def test_fewer_than_three_trials_that_reached_the_target_are_refused() -> None:
    """A learning rate counts where every seed reached the target."""
    steps = bowl(0.04)
    steps[:, [0, 4]] = math.nan
    assert tune(LRS, steps).refusal == ""
    steps[1, 3] = math.nan
    assert tune(LRS, steps).refusal.startswith("2 of 5 learning rates reached the target")


def test_a_learning_rate_that_some_seed_did_not_reach_is_not_the_best() -> None:
    steps = bowl(0.02)
    steps[2, 1] = math.nan
    assert tune(LRS, steps).refusal.startswith("the best learning rate, 0.01,")


def batch_runs(best_lrs: dict[int, float]) -> Records:
    """Runs of Adam at several batch sizes, each with a best learning rate, of 1000 steps and a constant schedule."""
    runs, rows = [], []
    for batch, best in best_lrs.items():
        for lr in LRS:
            for seed in (0, 1, 2):
                run = card(seed=seed, batch_size=batch, steps=1000, **{"optimizer.lr": lr, "schedule.name": "constant"})
                needed = 50 * (1 + 32 / batch) * math.exp(0.1 * math.log(lr / best) ** 2) * (1 + 0.01 * seed)
                runs.append(run)
                rows += [(run["id"], 0, "val_loss", "", 2 * BIGRAM), (run["id"], 900, "val_loss", "", 0.0)]
                rows += [(run["id"], round(needed), "val_loss", "", BIGRAM)]
    return records(runs, rows)


def test_tuned_batch_sizes_lie_on_their_hyperbola() -> None:
    (tuned,) = tuned_steps(batch_runs({1: 0.001, 4: 0.02, 16: 0.03, 64: 0.04, 256: 0.05, 1024: 0.5}))
    assert list(tuned.batches) == [4, 16, 64, 256]
    assert tuned.fit.scale == pytest.approx(32, rel=0.1)
    first, last = tuned.cautions()
    assert first == "Left out: Adam at a batch of 1, since the best learning rate, 0.01, is the lowest tried."
    assert "batch of 1024" in last


def test_optimizers_come_in_one_order_whichever_run_is_first() -> None:
    adam = batch_runs({4: 0.02, 16: 0.03})
    names = {"sgd": "s", "adamw": "a", "momentum": "m"}
    runs = pd.concat(
        [adam.runs.assign(id=adam.runs["id"] + end, **{"optimizer.name": name}) for name, end in names.items()]
    )
    metrics = pd.concat([adam.metrics.assign(id=adam.metrics["id"] + end) for end in names.values()])
    several = adam._replace(runs=runs, metrics=metrics)
    for shuffled in (runs, runs[::-1]):
        assert [tuned.name for tuned in tuned_steps(several._replace(runs=shuffled))] == ["Adam", "momentum", "SGD"]


def test_runs_that_differ_in_more_are_not_one_curve() -> None:
    both = batch_runs({4: 0.02, 16: 0.03})
    twice = both._replace(runs=pd.concat([both.runs, both.runs.assign(intervention="none")]))
    assert tuned_steps(both)
    assert not tuned_steps(twice)
    assert not tuned_steps(both._replace(runs=both.runs.assign(**{"schedule.name": "cosine"})))


def test_budgets_are_those_of_most_batch_sizes() -> None:
    pairs = {(16.0, 800.0), (64.0, 200.0), (256.0, 50.0), (16.0, 200.0), (256.0, 200.0), (8.0, 7.0)}
    at_examples, at_steps = budget_pairs(pairs)
    assert at_examples == [(16, 800), (64, 200), (256, 50)]
    assert at_steps == [(16, 200), (64, 200), (256, 200)]


def measured(*rows: tuple[int, float, float]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["step", "trace", "squared_norm"]).set_index("step")


def test_a_noise_scale_is_a_ratio_of_means_and_nan_without_a_gradient() -> None:
    assert ratio_of_means(measured((0, 4, 1), (1, 2, 3), (2, math.nan, 1))) == 1.5
    assert ratio_of_means(measured((0, -4, 1))) == 0
    assert math.isnan(ratio_of_means(measured((0, 4, 1), (1, 4, -1))))
    assert math.isnan(ratio_of_means(measured((0, math.inf, 1))))


def test_the_noise_scale_to_a_target_weighs_quarters_alike_and_ends_there() -> None:
    rows = [(step, 1000.0 if step < 25 else 1.0, 1.0) for step in range(0, 100, 5)]
    assert mean_noise_scale(measured(*rows, (100, 1e9, 1.0)), 100) == pytest.approx((1000 + 3) / 4)
    assert mean_noise_scale(measured((0, 2.0, 1.0)), 100) == 2
    assert math.isnan(mean_noise_scale(measured((0, 2.0, 1.0), (30, 2.0, -1.0)), 100))


def growing(scales: tuple[float, ...], losses: tuple[float, ...], **changes: object) -> Records:
    """A run of 100 steps with a record of both in the middle of each tenth, and the last loss on other text."""
    run = card(steps=100, **changes)
    rows = [(run["id"], 99, "val_loss", "", 9.0)]
    for tenth, (scale, loss) in enumerate(zip(scales, losses, strict=True)):
        step, norm = 10 * tenth + 5, 10.0**-tenth
        rows += [(run["id"], step, "val_loss", "", loss)]
        rows += [(run["id"], step, "noise_scale", f"trace.{part}", scale * norm / 2) for part in ("block0", "head")]
        rows += [(run["id"], step, "noise_scale", f"squared_norm.{part}", norm / 2) for part in ("block0", "head")]
    return records([run], rows)


TENTHS = tuple(range(10))


@pytest.mark.parametrize("part", ["trace", "squared_norm"])
def test_a_group_that_is_nan_makes_its_sum_nan_at_that_step_alone(part: str) -> None:
    run = growing((40.0,) * 10, (3.0,) * 10)
    run.metrics.loc[(run.metrics["step"] == 35) & (run.metrics["where"] == f"{part}.head"), "value"] = math.nan
    sums = noise_sums(run).loc[run.runs["id"].iloc[0]]
    assert sums.index[sums[part].isna()].tolist() == [35]
    assert sums["trace"].dropna().tolist() == pytest.approx(
        [40 * 10.0**-n for n in TENTHS if part != "trace" or n != 3]
    )


def test_the_noise_scale_beside_the_loss() -> None:
    run = growing(tuple(10.0 + 10 * n for n in TENTHS), tuple(5 - 0.3 * n for n in TENTHS))
    tenths = measures.by_tenth(run)
    assert tenths["noise_scale"].tolist() == pytest.approx([10.0 + 10 * n for n in TENTHS])
    assert tenths["loss"].tolist() == pytest.approx([5 - 0.3 * n for n in TENTHS])
    name = run.runs["id"].iloc[0]
    traits = measures.noise_traits(run).loc[name]
    assert (traits["rank"], traits["growth"]) == pytest.approx((-1, 1))
    assert (traits["first_loss"], traits["last_loss"]) == pytest.approx((5, 2.3))
    assert measures.noise_at(run, "", "", loss=4.85)[name] == pytest.approx(math.sqrt(10 * 20))
    # over the second half traces and norms are summed apart, so its first tenth dominates
    assert 10 ** traits["late"] == pytest.approx(61.1, abs=0.1)


def test_tenths_whose_gradient_is_lost_in_noise_are_left_out() -> None:
    run = growing(tuple(10.0 + n for n in TENTHS), tuple(5 - 0.3 * n for n in TENTHS))
    lost = (run.metrics["step"] == 35) & run.metrics["where"].str.startswith("squared")
    run.metrics.loc[lost, "value"] *= -1
    empty = (run.metrics["step"] == 65) & run.metrics["where"].str.startswith("squared")
    run.metrics.loc[empty, "value"] = 0.0
    run.metrics.loc[(run.metrics["step"] == 45) & (run.metrics["probe"] == "val_loss"), "value"] = math.nan
    run.metrics.loc[(run.metrics["step"] == 55) & (run.metrics["where"] == "trace.head"), "value"] = math.inf
    assert measures.by_tenth(run).index.get_level_values("tenth").tolist() == [0, 1, 2, 7, 8, 9]
