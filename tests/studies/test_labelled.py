"""Alarms scored on labelled runs: hits, misses, leads and false alarms, their intervals, and the figure of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import planted
import planted_claims
from lab.analysis import Records, study
from lab.records import store
from lab.report.replies import answer
from labwatch.events.scores import rate_interval, score_runs, share_interval, summarize
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim

# Steps 240 to 249.
BURST = {"bad_batches": "shift", "bad_batches.start": 0.6, "bad_batches.length": 10.0, "bad_batches.fraction": 0.3}
FLAT = np.ones(400)


def high(*steps: int) -> np.ndarray:
    """A flat measurement that is fifty times as high at these steps."""
    return np.where(np.isin(np.arange(400), steps), 50.0, 1.0)


def records(*runs: tuple[dict[str, object], np.ndarray, np.ndarray]) -> Records:
    """Runs of 400 steps from their settings, losses and gradient norms, measured at every step."""
    cards = [planted.card(**settings, seed=seed) for seed, (settings, _, _) in enumerate(runs)]
    rows = [
        (card["id"], step, probe, "", value)
        for card, (_, *columns) in zip(cards, runs, strict=True)
        for probe, column in zip(("train_loss", "grad_norm"), columns, strict=True)
        for step, value in enumerate(column)
    ]
    return planted.records_of(cards, rows)


CLEAN = ({}, FLAT, FLAT)


def scored(loss: np.ndarray, norm: np.ndarray) -> dict[str, tuple[object, ...]]:
    """By kind of alarm: hit, delay, lead, false alarms and clean steps of a run with a burst."""
    scores = score_runs(records((BURST, loss, norm), CLEAN))
    rows = scores[scores["bad_batches"] == "shift"].set_index("kind").drop(columns=["id", "bad_batches"])
    return {str(kind): tuple(row) for kind, row in rows.iterrows()}


def test_an_alarm_in_the_burst_is_a_hit_with_a_lead() -> None:
    both = scored(high(245, 246), high(240, 241))
    assert both == {"spike": (True, 5, 0, 0, 240), "gradient_spike": (True, 0, 5, 0, 240)}
    assert scored(high(240), high(246))["gradient_spike"][:3] == (True, 6, -6)


def test_the_edges_of_the_label() -> None:
    """The step before the burst is clean; 20 measurements after its last belong to it, and then nothing is known."""
    assert scored(FLAT, high(239))["gradient_spike"][::3] == (False, 1)
    assert scored(FLAT, high(240))["gradient_spike"][::3] == (True, 0)
    assert scored(FLAT, high(269))["gradient_spike"][::3] == (True, 0)
    assert scored(FLAT, high(270))["gradient_spike"][::3] == (False, 0)


def hits(repeats: float, norm: np.ndarray) -> list[list[object]]:
    """Hit, delay, false alarms and clean steps of each burst of a run whose burst comes several times."""
    scores = score_runs(records((BURST | {"bad_batches.repeats": repeats}, FLAT, norm), CLEAN))
    rows = scores[(scores["bad_batches"] == "shift") & (scores["kind"] == "gradient_spike")]
    columns: list[list[object]] = rows[["hit", "delay", "false_alarms", "clean_steps"]].values.tolist()
    return columns


def test_several_bursts_have_hits_of_their_own() -> None:
    """Bursts of 10 steps at 240, 293 and 346; an alarm behind the label of the second counts as nothing."""
    first, second, third = hits(3.0, high(100, 245, 325, 350))
    assert first == [True, 5, 1, 240]
    assert second == [False, pytest.approx(math.nan, nan_ok=True), 0, 0]
    assert third == [True, 4, 0, 0]
    assert hits(math.nan, high(100, 245, 325, 350)) == [first]
    assert [hit for hit, *_ in hits(16.0, high(252))][:3] == [False, True, False]  # bursts at 240, 250, 260


def test_a_run_without_a_burst_is_clean_to_its_end() -> None:
    scores = score_runs(records((BURST, FLAT, FLAT), ({}, high(100, 300), FLAT)))
    clean = scores[scores["bad_batches"] == "none"].set_index("kind")
    assert clean.loc["spike", ["false_alarms", "clean_steps"]].tolist() == [2, 400]
    of_loss, of_norm = summarize(scores)
    assert (of_loss.false_alarms.n, of_loss.clean_steps, of_loss.found.mean) == (2, 640, 0)
    assert of_norm.false_alarms.high == pytest.approx(3.689 / 0.64, rel=1e-3)


def test_a_run_that_diverges_first_has_met_no_burst() -> None:
    broken = np.where(np.arange(400) >= 200, np.nan, 1.0)
    scores = score_runs(records((BURST, broken, FLAT), (BURST, FLAT, FLAT), CLEAN))
    assert sorted(set(zip(scores["bad_batches"], scores["clean_steps"], strict=True))) == [
        ("none", 200),
        ("none", 400),
        ("shift", 240),
    ]


@pytest.mark.parametrize("treated", [{"response": "lower_lr"}, {"restarts": "mine"}, {"bad_batches.fraction": 0.0}])
def test_only_runs_that_are_left_to_their_burst_count(treated: dict[str, object]) -> None:
    assert score_runs(records((BURST | treated, high(240), FLAT), CLEAN)).empty
    assert score_runs(records((BURST, high(240), FLAT))).empty, "without a clean run nothing can be false"


def test_the_intervals_are_exact() -> None:
    """Tables of Garwood 1936, and of Clopper and Pearson 1934."""
    assert rate_interval(5, 1.0)[:3] == pytest.approx((5, 1.6235, 11.6683), abs=1e-4)
    assert rate_interval(0, 2.0)[:3] == pytest.approx((0, 0, 1.8444), abs=1e-4)
    assert share_interval(3, 10)[:3] == pytest.approx((0.3, 0.06674, 0.65245), abs=1e-4)
    assert share_interval(10, 10)[:3] == pytest.approx((1, 0.69150, 1), abs=1e-4)
    assert np.isnan([rate_interval(0, 0.0).mean, share_interval(0, 0).mean]).all()


@pytest.fixture(scope="module")
def sweep() -> Records:
    """The sweep of labelled spikes in which the gradient norm warns; one run has a false alarm.

    It warns three measurements before the loss, in shifts two.
    """
    made = planted_claims.records(planted_claims.cards("labelled_spikes", dict.fromkeys(range(3), True)))
    metrics = made.metrics.copy()
    clean = made.runs.loc[made.runs["bad_batches"] == "none", "id"].iloc[0]
    metrics.loc[(metrics["id"] == clean) & (metrics["probe"] == "grad_norm") & (metrics["step"] == 200), "value"] = 90.0
    shifts = made.runs.loc[made.runs["bad_batches"] == "shift", "id"]
    is_first = (metrics["probe"] == "grad_norm") & (metrics["step"] == 243)
    metrics.loc[metrics["id"].isin(shifts) & is_first, "value"] = 1.0
    return made._replace(metrics=metrics)


def test_one_long_warning_does_not_stand_for_others() -> None:
    runs = planted_claims.cards("labelled_spikes", dict.fromkeys(range(3), False))
    for card, recorded in runs:
        if card["bad_batches"] == "shift" and card["optimizer.lr"] == 1e-2:
            recorded["grad_norm", ""][61] = 20.0
            recorded["train_loss", ""] = [2.0] * 75 + [4.0] * 3 + [2.0] * 23
    claim = CLAIMS["gradient_norms_warn_of_the_spike"]._replace(untestable="")
    verdict = judge_claim(claim, [Evidence("labelled_spikes", planted_claims.records(runs))])
    assert (verdict.verdict, verdict.effect) == ("in part", pytest.approx(-4.5)), "there are few false alarms"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep in a folder, in which the embedding alone has large updates, after its bursts began."""
    folder = tmp_path_factory.mktemp("results") / "labelled_spikes"
    store.open_folder(folder, "eager")
    for card, recorded in planted_claims.cards("labelled_spikes", dict.fromkeys(range(3), True)):
        rows = planted_claims.records([(card, recorded)]).metrics[["step", "probe", "where", "value"]]
        values = list(rows.itertuples(index=False, name=None))
        for step in sorted(set(rows["step"])):
            values += [
                (step, "update_rms", "embedding", 1.0 if 244 <= step < 260 and card["bad_batches"] != "none" else 0.2),
                (step, "update_rms", "block0.mlp_up", 0.1),
                (step, "update_rms", "block0.attention.value", 0.1),
            ]
        store.write_run(folder, card, values)
    store.gather(folder)
    return folder


@pytest.mark.slow
def test_the_answer_speaks_of_alarms(folder: Path) -> None:
    said = answer(study([folder]))
    assert said.text.startswith("Share of bursts found is 1.000 [0.735, 1.000] for loss spike, ")
    lead, false_alarms = (said.contrasts[number].levels["large update"][""] for number in (1, 2))
    assert (lead.mean, false_alarms.mean, round(false_alarms.high, 2)) == (8, 0, 0.7)


@pytest.mark.slow
def test_the_loss_finds_the_bursts_of_the_committed_runs() -> None:
    loss, *_ = summarize(score_runs(store.read(Path(__file__).parents[2] / "results" / "labelled_spikes")))
    assert loss.kind == "spike"
    assert (loss.found.n, loss.false_alarms.n) == (63, 0)
    assert loss.found.mean * loss.found.n >= 62
