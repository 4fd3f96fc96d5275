"""The rule of the claims, their choice of runs, and `lab claims` as its user meets it."""

from __future__ import annotations

import json
import math
import re
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import planted
from lab.analysis import findings, judge, points, probe_values, sensitivity, study
from lab.analysis.statistics import student_t
from studies.claims import effects, scoreboard
from studies.claims.curve_summaries import summarize_curves
from studies.claims.decision import VERDICTS
from studies.claims.evidence import ArmTables, Config, Evidence, at_one_rate
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import FIGURES_OF_THE_PAPER, SOURCES, judge_claim
from sweeping import OutputOf

LOWERS = CLAIMS["qk_layernorm_lowers_sensitivity"]
BOUNDS = CLAIMS["qk_layernorm_bounds_the_logits"]


def evidence(cards, name="made") -> Evidence:
    return Evidence(name, planted.records(list(cards)))


@pytest.mark.parametrize(("at_the_top", "verdict"), [(0.3, "inconclusive"), (0.4, "contradicted"), (0.2, "reproduced")])
def test_a_loss_at_the_limit_counts_for_neither_side(at_the_top: float, verdict: str) -> None:
    """A loss has no margin there, which is not the lack of a difference between two runs."""
    runs = list(planted.cards())
    for card in runs:
        if card["intervention"] == planted.BOTH[1]:
            top = card["optimizer.lr"] == max(planted.LRS)
            card["final_val_loss"] = 2.0 + (at_the_top + 0.001 * (card["seed"] - 1)) * top
    assert judge_claim(CLAIMS["qk_layernorm_keeps_every_learning_rate"], [evidence(runs)]).verdict == verdict


def test_values_known_to_steps_only_are_no_more_certain_than_the_steps() -> None:
    """Three equal values: Student's t(2) of the standard deviation of a uniform error, over the square root of 3."""
    half = 4.302653 * 0.5 / math.sqrt(12) / math.sqrt(3)
    known = student_t([1.0, 1.0, 1.0], resolution=0.5)
    assert (known.low, known.high) == (pytest.approx(1 - half), pytest.approx(1 + half))
    exact, coarse = student_t([1.0, 1.1, 1.3]), student_t([1.0, 1.1, 1.3], resolution=0.5)
    assert (coarse.high - 1.1333333) ** 2 == pytest.approx((exact.high - 1.1333333) ** 2 + half**2, rel=1e-5)


def test_the_step_of_a_slope_is_its_spread() -> None:
    steps = pd.DataFrame([[0.5, 0.4, 0.3, 0.5]], columns=[1e4, 3e4, 2e5, 1e6])
    errors = np.random.default_rng(0).uniform(-0.5, 0.5, (100_000, 4)) * steps.to_numpy()
    slopes = effects.slope(pd.DataFrame(errors, columns=steps.columns))
    assert effects.slope_resolution(steps).item() / math.sqrt(12) == pytest.approx(slopes.std(), rel=0.02)


def arm_of_losses(losses: dict[float, float]) -> ArmTables:
    """One curve, alike in all three seeds."""
    cards = list(planted.cards(arms=["z_loss"], widths=[32], lrs=tuple(losses)))
    for card in cards:
        card["final_val_loss"] = losses[card["optimizer.lr"]]
    (group,) = evidence(cards).groups([])
    (arm,) = group.arms({})
    return arm


def test_arms_with_other_learning_rates_are_compared_at_one_that_both_have() -> None:
    """At all rates of either the second arm has no whole curve; a seed without the one rate counts in neither case."""
    bare = planted.cards(arms=["z_loss"], widths=[32], lrs=(0.1, 0.3))
    both = planted.cards(arms=["qk_layernorm+z_loss"], widths=[32], lrs=(0.1, 0.3))
    normed = [card for card in both if card["optimizer.lr"] == (0.1 if card["seed"] == 2 else 0.3)]
    (group,) = evidence([*bare, *normed]).groups(["intervention"])
    choices: list[Config] = [{"intervention.qk_layernorm": None}, {"intervention.qk_layernorm": "on"}]
    assert group.arms(*choices)[1].loss(0.3).isna().all(axis=None)
    first, second = at_one_rate(group, 0.3, choices)
    assert first.loss(0.3).notna().all(axis=None)
    assert second.loss(0.3)[second.sizes[0]].notna().tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("losses", "log_lost", "step"),
    [
        # above 1.9 + 0.3: a third of the way from 1e-2 to 0.1; the loss at 1e-3 is too high, but below the best LR
        ({1e-3: 2.3, 1e-2: 1.9, 1e-1: 2.8, 1.0: 2.9}, -2 + 1 / 3, 1.0),
        # it crosses at the second step above the best one, half-way, and comes back
        ({1e-3: 2.0, 1e-2: 1.9, 1e-1: 2.1, 0.5: 2.3, 1.0: 2.0}, -1 + 0.5 * math.log10(5), math.log10(5)),
        # it does not cross: the grid goes on by its smallest step
        ({1e-3: 2.0, 1e-2: 1.9, 1e-1: 2.1, 0.2: 2.15}, math.log10(0.2) + math.log10(2), math.log10(2)),
    ],
)
def test_eta_div_is_known_to_a_step_of_the_grid(losses: dict[float, float], log_lost: float, step: float) -> None:
    arm = arm_of_losses(losses)
    assert arm.table("log_lost").to_numpy() == pytest.approx(log_lost)
    assert arm.resolution("log_lost").to_numpy() == pytest.approx(step)
    (interval,) = effects.Qualified(arm.table("log_lost"), arm.resolution("log_lost")).intervals()
    assert interval.high - log_lost == pytest.approx(4.302653 * step / math.sqrt(12) / math.sqrt(3))


def test_margin_over_the_best_loss_plus_three_tenths() -> None:
    arm = arm_of_losses({1e-3: 2.6, 1e-2: 1.9, 1e-1: 2.15, 0.3: 2.3, 1.0: 2.9})
    assert arm.margin_over_costly_loss(0.3).to_numpy() == pytest.approx(0.1)
    assert arm.margin_over_costly_loss(0.1).to_numpy() == pytest.approx(-0.05)
    assert [arm.lost(lr).to_numpy().tolist() for lr in arm.lrs] == [[[lost]] * 3 for lost in (0, 0, 0, 1, 1)]
    # not the 0.4 of the under-trained 1e-3, nor the 0.7 of 1.0, which lies beyond the paper's window
    assert effects.largest_margin_over_costly_loss(arm).table.to_numpy() == pytest.approx(0.1)
    stuck = arm_of_losses(dict.fromkeys((1e-3, 1e-2, 1e-1, 1.0), planted.BIGRAM + 1))
    assert stuck.margin_over_costly_loss(1.0).isna().all(axis=None)


def test_an_optimum_at_the_end_of_the_grid_is_known_to_a_step_of_it() -> None:
    cards = list(planted.cards(arms=["z_loss"], widths=[32, 64]))
    for card in cards:
        card["final_val_loss"] = 2 - 0.1 * math.log10(card["optimizer.lr"])
    (group,) = evidence(cards).groups(["model.width"])
    (interval,) = effects.drift(*group.arms({})).intervals()
    step = math.log10(3)
    half = 4.302653 * math.sqrt(2) * step / math.sqrt(12) / math.sqrt(3)
    assert (interval.mean, interval.high) == (pytest.approx(0), pytest.approx(half))


def test_an_arm_in_which_more_changes_than_the_claim_says_is_no_arm() -> None:
    """The arm with qk-layernorm has another batch size as well."""
    off, on = planted.cards(arms=["z_loss"]), planted.cards(arms=["qk_layernorm+z_loss"], batch_size=32)
    assert judge_claim(BOUNDS, [evidence([*off, *on])]).verdict == "not run"
    assert judge_claim(BOUNDS, [evidence(planted.cards())]).verdict == "reproduced"


def test_what_is_equal_but_for_the_arithmetic_is_equal() -> None:
    off = list(planted.cards(arms=["z_loss"], widths=[32]))
    changes = [{"intervention": "qk_layernorm+z_loss", "final_val_loss": c["final_val_loss"]} for c in off]
    for card, change in zip(off, changes, strict=True):
        change["final_val_loss"] -= 1e-12 * (card["optimizer.lr"] == 0.3)
    on = [planted.card(**{**card, **change, "id": None}) for card, change in zip(off, changes, strict=True)]
    verdict = judge_claim(LOWERS, [evidence([*off, *on])])
    assert (verdict.verdict, verdict.seeds, verdict.effect) == ("no effect", 3, 0.0)
    assert verdict.reason.startswith("no effect that counts: within 0.02 nats/token of 0; tried: ")


def test_a_claim_is_judged_on_its_own_sweep_first() -> None:
    small, large = evidence(planted.cards(widths=[32]), "results/qk_layernorm"), evidence(planted.cards(), "large")
    verdict = judge_claim(BOUNDS, [large, small])
    assert (verdict.folder, verdict.sweep, verdict.parameters) == (small.name, "qk_layernorm", [24_736])
    without = evidence(planted.cards(arms=["z_loss"]), "qk_layernorm")
    verdict = judge_claim(BOUNDS, [without, large])
    assert (verdict.folder, verdict.sweep, verdict.steps) == ("large", "large", [400])


def test_a_folder_belongs_to_the_sweeps_of_its_commands() -> None:
    tables = planted.records(list(planted.cards(widths=[32])))
    commands = ["lab train steps=3", "lab sweep qk_layernorm out=mine", "lab sweep my/steps.yaml"]
    assert Evidence("mine", tables, commands).sweeps == ["qk_layernorm", "steps"]
    assert Evidence("results/mup", tables).sweeps == ["mup"]
    mine, named = Evidence("mine", tables, commands[1:2]), evidence(planted.cards(), "other")
    assert judge_claim(BOUNDS, [named, mine]).folder == "mine"


def test_values_of_a_probe_are_reduced_once_by_each_function() -> None:
    runs, calls = evidence(planted.cards(widths=[32], seeds=[0])), list[str]()
    peak, end = lambda *args: probe_values.peak(*args), lambda *args: probe_values.near(*args, part=1.0)
    start = partial(lambda *args, part: calls.append("start") or probe_values.near(*args, part), part=0.0)
    for reduce, expected in 2 * [
        (peak, probe_values.peak(runs.records, "train_loss", "")),
        (end, probe_values.near(runs.records, "train_loss", "", 1.0)),
        (start, probe_values.near(runs.records, "train_loss", "", 0.0)),
    ]:
        assert runs.probe_values(reduce, "train_loss", "") == expected.to_dict()
    assert calls == ["start"]


def test_of_equals_the_group_with_most_runs_is_judged() -> None:
    small, large = evidence(planted.cards(widths=[32]), "small"), evidence(planted.cards(), "large")
    assert judge_claim(BOUNDS, [small, large]).folder == "large"
    assert judge_claim(BOUNDS, [large, evidence(planted.cards(), "as large")]).folder == "large"


def test_a_trend_of_an_undertrained_arm_settles_nothing() -> None:
    """Tiny runs on bytes: S falls with size, since more and more learning rates train in time."""
    runs = evidence(planted.cards(widths=[32, 64, 128]))
    total = judge_claim(CLAIMS["sensitivity_rises_without"], [runs])
    assert total.verdict == "inconclusive"
    assert total.reason.startswith("undertrained")
    assert judge_claim(CLAIMS["instability_rises_without"], [runs]).verdict == "reproduced"


def test_a_curve_stuck_at_chance_is_no_stable_curve() -> None:
    stuck = planted.cards(arms=["qk_layernorm+z_loss"], final_val_loss=planted.BIGRAM + 1)
    verdict = judge_claim(LOWERS, [evidence([*planted.cards(arms=["z_loss"]), *stuck])])
    assert verdict.verdict == "inconclusive"
    assert "never fell below the bigram" in verdict.reason


def test_a_folder_of_failed_runs_proves_nothing(tmp_path: Path) -> None:
    failed = [{**card, "status": "failed", "final_val_loss": None} for card in planted.cards(widths=[32], seeds=[0])]
    planted.write(tmp_path / "failed", failed)
    assert {line.verdict.verdict for line in scoreboard.judge_all(scoreboard.read([tmp_path]))} == {"not run"}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results folders, one of them empty."""
    folder = tmp_path_factory.mktemp("results")
    planted.write(folder / "mine", list(planted.cards()))
    (folder / "empty").mkdir()
    (folder / "notes.txt").write_text("not a folder")
    return folder


def test_json_says_everything_and_nothing_else(results: Path, output_of: OutputOf) -> None:
    claims = json.loads(output_of("claims", results, "--json"))
    numbers = ("effect", "low", "high", "n", "seeds", "interval_level")
    keys = ("name", "source", "figure", "claim", "verdict", *numbers, "sweep", "parameters", "steps", "reason")
    assert {tuple(one) for one in claims} == {(*keys, "decay_times_steps", "ours", "p", "q")}
    sources = list(dict.fromkeys(one["source"] for one in claims))
    assert sources == [source for source in SOURCES if source in {CLAIMS[name].source for name in CLAIMS}]
    figures = [one["figure"] for one in claims if one["source"] == SOURCES[0]]
    assert list(dict.fromkeys(figures)) == list(FIGURES_OF_THE_PAPER)
    for one in claims:
        assert one["verdict"] in VERDICTS
        assert bool(one["reason"]) == (one["verdict"] != "reproduced")
        unknown = one["verdict"] == "not run"
        assert [one[key] is None for key in ("effect", "parameters", "steps")] == [unknown] * 3
    (first,) = [one for one in claims if one["claim"] == BOUNDS.sentence]
    assert (first["verdict"], first["seeds"], first["sweep"]) == ("reproduced", 3, "qk_layernorm")
    assert (first["parameters"], first["steps"]) == ([24_736, 98_624], [400, 400])
    assert (first["decay_times_steps"], first["ours"]) == ([0.04, 0.04], False)
    assert {one["claim"] for one in claims if one["ours"]} == {
        CLAIMS[name].sentence for name in CLAIMS if CLAIMS[name].restates or CLAIMS[name].ours
    }


def test_for_the_eye_every_claim_has_a_line(results: Path, output_of: OutputOf) -> None:
    folders = [str(results / name) for name in ("mine", "empty")]
    text = output_of("claims", *folders)
    lines = text.splitlines()
    left_out = output_of("claims", *folders, "--verdict", "not run").splitlines()
    not_run = [line for line in left_out if line.startswith(SOURCES)]
    (line,) = [line for line in lines if BOUNDS.sentence in line]
    assert line.split()[:4] == ["Wortsman", "2023", "2", "reproduced"]
    assert line.endswith("(mine/loss_over_steps)")
    head = next(text for text in lines if text.startswith("source "))
    beside = {"parameters": "24.7k to 98.6k ", "steps": "400 ", "λT": "0.04 ", "seeds": "3 "}
    assert all(line[head.index(column) :].startswith(value) for column, value in beside.items()), line
    run = [line for line in lines if line.startswith(SOURCES)]
    heads = [*run, *not_run]
    assert len(heads) == len(list(CLAIMS))
    ours = [name for name in CLAIMS if CLAIMS[name].restates or CLAIMS[name].ours]
    assert sum("(ours)" in head for head in heads) == len(ours)
    column = line.index(BOUNDS.sentence)
    assert all(head[column:].startswith(tuple(CLAIMS[name].sentence for name in CLAIMS)) for head in run)
    assert all("; why not: " in text for text in not_run)
    assert any("sweep epsilon" in text for text in not_run)
    tallies = re.findall(
        r"(\d+) (?:claims?|restated or bounded by us|questions?): ((?:\d+ [a-z ]+(?:, )?)+)", " ".join(text.split())
    )
    counts = [sum(int(part.split()[0]) for part in parts.split(", ")) for _, parts in tallies]
    assert [int(whole) for whole, _ in tallies] == counts
    assert (len(counts), sum(counts)) == (3, len(heads))


def test_every_figure_named_is_ours() -> None:
    from lab.report.all_figures import FIGURES

    assert {CLAIMS[name].shown_in for name in CLAIMS} <= set(FIGURES)


def test_the_optimum_between_grid_points_is_found() -> None:
    lrs = np.array(planted.LRS)
    losses = 2 + 0.3 * (np.log10(lrs) - np.log10(0.02)) ** 2
    curve = pd.DataFrame({"lr": lrs, "loss": losses, "loss_at_init": 5.6}).sample(frac=1, random_state=0)
    curve = curve.assign(curve=0, seed="0", arm="", parameters=1)
    best, at_edge = (sensitivity.optima(runs).iloc[0] for runs in (curve, curve[curve["lr"] >= 0.03]))
    assert best["best_lr_fine"] == pytest.approx(0.02)
    assert at_edge["best_lr_fine"] == 0.03
    assert best["spread"] == pytest.approx(losses.max() - losses.min())
    assert sensitivity.shifted(0.02) == pytest.approx((0.02 / 1000**0.5, 0.02 * 1000**0.5))


def test_where_sensitivity_misleads_the_reader_is_told(tmp_path: Path) -> None:
    usual = list(planted.cards(arms=["z_loss"], widths=[32], seeds=[0], final_val_loss=2.0))
    scaled = list(planted.cards(arms=["z_loss"], widths=[32], seeds=[0], **{"optimizer.name": "adamw_rms_scaled"}))
    told = list(findings.notes(study([planted.write(tmp_path / "both", [*usual, *scaled])])))
    (edge,) = [line for line in told if "the lowest or highest tried" in line]
    (meaning,) = [line for line in told if "means something else" in line]
    assert ("adamw at 24.7k" in edge, "rms_scaled" in edge) == (True, False)
    assert ("adamw at 24.7k" in meaning, "adamw_rms_scaled at 24.7k" in meaning) == (False, True)
    alone = "\n".join(findings.notes(study([planted.write(tmp_path / "one", scaled)])))
    assert "means something else" not in alone


def test_effect_sizes_are_paired() -> None:
    assert student_t([1.0, 2.0, 3.0]).dz == pytest.approx(2.0)
    assert math.isnan(student_t([1.0, 2.0]).dz)
    assert math.isnan(student_t([1.0, 1.0, 1.0]).dz)


def test_a_curve_lost_nowhere_counts_one_step_further() -> None:
    made = planted.cards(("none",), (32,), (1e-3, 1e-2, 1e-1), (0,), final_val_loss=2.0)
    (summary,) = summarize_curves(judge(points(planted.table(made))))
    assert summary.values["log_lost"] == pytest.approx(0)
    assert summary.resolutions["log_lost"] == pytest.approx(1)
