"""Updates around a planted spike: their traits by hand, the figure, the answer, and what the controls catch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import planted
import planted_claims
from drawn_texts import complaints
from lab.analysis import Records
from lab.analysis.rendering import style
from lab.report.all_figures import FIGURES
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from studies.spikes.planted import update_traits

SEEDS = dict.fromkeys(range(3), True)
ONSET = 40


def planted_records() -> Records:
    return planted_claims.records(planted_claims.cards("adam_theory", SEEDS))


def by_hand(**columns: list[float]) -> Records:
    """One run of 80 steps, measured every tenth; its burst begins at step 40."""
    names = {
        "loss": ("val_loss", ""),
        "cosine": ("update_descent_cosine", ""),
        "lag": ("grad_lag_cosine", ""),
        "embedding": ("update_rms", "embedding"),
        "mlp": ("update_rms", "block0.mlp_up"),
    }
    card = planted.card(**{"steps": 80, "spikes": 1, "bad_batches": "rare_tokens"})
    rows = [
        (card["id"], 10 * row, *names[name], value)
        for name, values in columns.items()
        for row, value in enumerate(values)
    ]
    return planted.records_of([card], rows, [(card["id"], ONSET, ONSET, "burst", 1.0, "")])


COLUMNS = {
    # steps     0    10   20   30   40 (the burst)    50    60   70
    "loss": [6.0, 3.0, 2.0, 2.0, 2.0, 3.0, 5.0, 2.0],
    "cosine": [0.5, 0.4, 0.1, 0.2, -0.1, -0.3, 0.4, 0.2],
    "lag": [math.nan, 0.9, 0.3, 0.5, 0.1, 0.1, 0.1, 0.1],
    "embedding": [1.0, 0.9, 0.1, 0.1, 0.1, 0.2, 0.3, 0.1],
    "mlp": [1.0, 0.9, 0.3, 0.3, 0.3, 0.4, 0.5, 0.3],
}


def test_traits_are_what_a_hand_reads_off() -> None:
    """Usual are steps 20 and 30; the held-out loss is highest before the update of step 60."""
    (traits,) = update_traits(by_hand(**COLUMNS)).to_dict("records")
    assert traits == pytest.approx(
        {
            "lag": 0.4,
            "rms": 0.2,
            "embedding_rms": 0.1,
            "largest_rms": 0.4,
            "cosine": 0.15,
            "rising_cosine": -0.2,
            "large_cosine": 0.05,
        }
    )


def test_without_a_large_update_the_largest_counts() -> None:
    calm = {"embedding": [0.1] * 8, "mlp": [0.3, 0.3, 0.3, 0.3, 0.3, 0.31, 0.3, 0.3]}
    (traits,) = update_traits(by_hand(**{**COLUMNS, **calm})).to_dict("records")
    assert traits["large_cosine"] == pytest.approx(-0.3)


def test_a_run_that_diverges_in_its_burst_has_the_traits_from_before() -> None:
    broken = {name: [*values[:5], *[math.nan] * 3] for name, values in COLUMNS.items()}
    (traits,) = update_traits(by_hand(**broken)).to_dict("records")
    assert traits["cosine"] == pytest.approx(0.15)
    assert traits["rms"] == pytest.approx(0.2)


def test_without_the_probe_there_are_no_traits() -> None:
    without = {name: values for name, values in COLUMNS.items() if name != "cosine"}
    assert update_traits(by_hand(**without)).empty


@pytest.mark.parametrize("name", ["the_update_leaves_the_descent_as_the_loss_rises", "large_updates_leave_the_descent"])
def test_a_loss_that_does_not_rise_shows_nothing(name: str) -> None:
    """Cosines fall as before, but no batch raises the held-out loss: the control says so."""
    runs = planted_claims.cards("adam_theory", SEEDS)
    for _, recorded in runs:
        recorded["val_loss", ""] = [*[2.0] * 62, *[2.01] * 3, *[2.0] * 36]
    verdict = judge_claim(CLAIMS[name], [Evidence("adam_theory", planted_claims.records(runs))])
    assert verdict.verdict == "not testable here", verdict
    assert "the control shows no effect" in verdict.reason


def test_no_lower_epsilon_prevents_a_freeze_that_no_epsilon_brings() -> None:
    runs = planted_claims.cards("adam_theory", SEEDS)
    for _, recorded in runs:
        recorded["update_rms", "embedding"] = [0.12] * 101
    claim = CLAIMS["a_lower_epsilon_prevents_the_freeze"]._replace(untestable="")
    verdict = judge_claim(claim, [Evidence("adam_theory", planted_claims.records(runs))])
    assert verdict.verdict == "not testable here", verdict
    assert "the control shows no effect" in verdict.reason


def _from_upper_left(axes: Any) -> tuple[float, float]:
    return -round(axes.get_position().y0, 3), axes.get_position().x0


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [style.SCREEN, pytest.param(style.Page(3.25, 8.0), marks=pytest.mark.slow)],
    ids=["screen", "column"],
)
def test_the_figure_can_be_read_and_holds_what_was_planted(page: style.Page) -> None:
    records = planted_records()
    with style.drawn_for(page):
        figure = FIGURES["updates_and_descent"](records)
        assert not complaints(figure)
    below_titles = sorted((axes for axes in figure.axes if axes.get_title()), key=_from_upper_left)
    titles = [axes.get_title().replace("\n", " ") for axes in below_titles]
    assert titles == [
        f"{burst}, epsilon {eps}" for burst in ("rare tokens", "repeated character") for eps in ("1e-8", "0.01")
    ]
    labels = [axes.get_ylabel().replace("\n", " ") for axes in figure.axes if axes.get_ylabel()]
    assert labels[1] == "update RMS"
    cosine = next(axes for axes in figure.axes if axes.get_ylabel() == "cosine with\nthe descent")
    lines = [line for line in cosine.get_lines() if len(line.get_xdata()) > 2]
    assert len(lines) == 3  # one for each batch size
    for line in lines:
        steps, values = (np.asarray(data, dtype=float) for data in (line.get_xdata(), line.get_ydata()))
        assert steps.min() >= 210
        assert steps.max() <= 300
        assert values[steps < 240] == pytest.approx(0.06, rel=0.01)
        assert values[(steps > 244) & (steps < 265)] == pytest.approx(-0.05, rel=0.01)
