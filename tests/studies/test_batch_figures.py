"""Figures and answers of sweeps of batch sizes, on planted sweeps."""

from __future__ import annotations

from functools import cache

import pytest

import planted_claims
from drawn_texts import complaints
from lab.analysis import Records, Study, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import style
from lab.analysis.text import format_value
from lab.report.all_figures import FIGURES
from studies.batch_size import FIRST_FIGURES
from studies.batch_size.answer import cautions as batch_cautions
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim

COLUMN = style.Page(3.25, 8.0)
HEADLINES = {
    "steps_to_target": "steps_with_batch",
    "learning_rate_and_batch": "best_lr_with_batch",
    "noise_scale": "noise_scale_with_loss",
}


@cache
def planted(sweep: str, without_highest: int = 0) -> Records:
    """A planted sweep in which claims hold; of its largest batch so many of the highest learning rates are missing."""
    runs = planted_claims.cards(sweep, dict.fromkeys(range(3), True))
    largest = max(run["batch_size"] for run, _ in runs)
    lrs = sorted({run["optimizer.lr"] for run, _ in runs})[: -without_highest or None]
    kept = [(run, _) for run, _ in runs if run["batch_size"] < largest or run["optimizer.lr"] in lrs]
    return planted_claims.records(kept)


def study_of(records: Records) -> Study:
    return Study(records, judge(points(records.runs)), None, None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("page", [COLUMN], ids=["column"])
@pytest.mark.parametrize(
    ("sweep", "name"), [*HEADLINES.items(), ("steps_to_target", "best_lr_with_batch")], ids=lambda name: name
)
def test_figures_of_batches_can_be_read(sweep: str, name: str, page: style.Page) -> None:
    with style.drawn_for(page):
        assert not complaints(FIGURES[name](planted(sweep)))


@pytest.mark.slow
@pytest.mark.parametrize("sweep", HEADLINES)
def test_a_report_of_batches_opens_with_their_figure(sweep: str) -> None:
    records = planted(sweep)
    drawn = []
    for name in FIRST_FIGURES[:3]:
        try:
            FIGURES[name](records)
        except NothingToDrawError:
            continue
        drawn.append(name)
    assert drawn[0] == HEADLINES[sweep]


@pytest.mark.slow
def test_a_dropped_batch_size_is_told_of_wherever_the_others_are() -> None:
    """With the two highest learning rates gone from the largest batch, its best one is the highest left."""
    records = planted("steps_to_target", without_highest=2)
    refusal = f"since the best learning rate, {format_value(2**-5)}, is the highest tried"
    cautions = batch_cautions(study_of(records))
    assert [caution.split(" at ")[0] for caution in cautions] == [
        "Left out: Adam",
        "Left out: momentum",
        "Left out: SGD",
    ]
    assert all("batch of 4096" in caution and refusal in caution for caution in cautions)
    for name in ("steps_with_batch", "best_lr_with_batch"):
        assert all(caution in FIGURES[name](records).caption for caution in cautions)


def test_a_verdict_says_which_batch_sizes_it_leaves_out() -> None:
    """The smallest batches end at the edge where their runs at low learning rates are gone."""
    runs = planted_claims.cards("steps_to_target", dict.fromkeys(range(3), True))
    low = sorted({run["optimizer.lr"] for run, _ in runs})[1]
    slow = [
        (run, {key: (9.0,) * 4 if key[0] == "val_loss" else value for key, value in recorded.items()})
        if run["batch_size"] == 1 and run["optimizer.name"] == "adamw" and run["optimizer.lr"] > 2 * low
        else (run, recorded)
        for run, recorded in runs
    ]
    verdict = judge_claim(CLAIMS["three_regimes"], [Evidence("steps_to_target", planted_claims.records(slow))])
    assert "left out: adamw at batch 1: " in verdict.reason
