"""Sources of a mixture: the probe counts their rows, and spikes of the gradient norm rank them, on planted records."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pandas as pd
import pytest

import planted_claims
from drawn_texts import complaints
from lab.analysis import Records, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import style
from lab.analysis.sensitivity import study_of
from lab.contrib.data import Mixture
from lab.core.registry import DATA
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from planted_sources import CALM, CAUSE, SOURCES, SPIKES, STEPS
from studies.claims.effects import qualified
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from studies.spikes.own_spikes import START, ranked, source_traits
from sweeping import finished

CLAIM = CLAIMS["leaving_out_the_source_ranked_first_removes_spikes"]


@cache
def world(*, good: bool = True, seeds: int = 3) -> Records:
    return planted_claims.records(planted_claims.cards("source_filter", dict.fromkeys(range(seeds), good)))


def whole(records: Records) -> pd.DataFrame:
    ids = records.runs.loc[records.runs["data.without"] == "none", "id"]
    return source_traits(records).loc[ids]


@pytest.mark.slow
@pytest.mark.parametrize("micro", ["", pytest.param("batch.micro_batch=2", marks=pytest.mark.slow)])
def test_the_probe_counts_rows_of_each_source_of_each_batch(tmp_path: Path, micro: str) -> None:
    words = ["train", "-m", "data=mixture", "steps=6", "batch_size=4", "seed=0,5", "model=d32", "model.depth=1"]
    words += ["probes.every=1", "probes.names=[source_rows]", "engine=eager", "validation=short"]
    records = finished(tmp_path, *words, *(["batch=constant", micro] if micro else []))
    corpus = DATA["mixture"]().open()
    for run, seed in zip(records.runs["id"], records.runs["seed"], strict=True):
        rows = records.metrics[records.metrics["id"] == run]
        for step in range(6):
            of_step = rows[rows["step"] == step].set_index("where")["value"].to_dict()
            assert of_step == corpus.rows_by_source(int(seed), step, 4)


def test_other_data_have_no_sources(tmp_path: Path) -> None:
    words = ["train", "data=trigram", "steps=3", "model=d32", "probes.names=[source_rows]", "engine=eager"]
    assert finished(tmp_path, *words).metrics.empty


def test_spikes_are_counted_where_they_were_planted() -> None:
    traits = whole(world())
    assert set(traits[f"{CAUSE}.spikes"]) == set(traits[f"{CAUSE}.batches"] - 1) == {len(SPIKES)}
    assert set(traits["rate"]) == {1000 * len(SPIKES) / (STEPS - START)}
    assert not traits[[f"{name}.spikes" for name in SOURCES if name != CAUSE]].to_numpy().any()


@pytest.mark.slow
def test_spikes_before_the_model_has_learned_do_not_count() -> None:
    records = world()
    metrics = records.metrics.copy()
    metrics.loc[(metrics["probe"] == "grad_norm") & (metrics["step"] == START - 40), "value"] = 50.0
    earlier = records._replace(metrics=metrics)
    pd.testing.assert_series_equal(whole(earlier)["rate"], whole(records)["rate"])
    metrics.loc[(metrics["probe"] == "grad_norm") & (metrics["step"] == START + 40), "value"] = 50.0
    assert (whole(earlier)["rate"] == whole(records)["rate"] + 1).all()


def test_sources_are_ranked_by_spikes_then_by_norms() -> None:
    sums = whole(world()).sum()
    counts = {name: {key: float(sums[f"{name}.{key}"]) for key in ("spikes", "batches", "norm")} for name in SOURCES}
    order = ranked(counts)
    assert (order[0], order[-1]) == (CAUSE, CALM)
    # many spikes of a source that is in most batches are fewer per batch
    counts["noise"] = {"spikes": 40.0, "batches": 3000.0, "norm": 0.0}
    assert ranked(counts)[:2] == [CAUSE, "noise"]


def test_no_run_tests_a_source_that_it_has_ranked() -> None:
    """One seed in which another source spikes has its own ranking left out, and spoils that of no other."""
    odd = planted_claims.records(planted_claims.cards("source_filter", {0: True, 1: True, 2: True, 3: False}))
    metrics = odd.metrics.copy()
    ids = set(odd.runs.loc[odd.runs["seed"] == 3, "id"])
    renamed = {CAUSE: CALM, CALM: CAUSE}
    in_odd = metrics["id"].isin(ids) & (metrics["probe"] == "source_rows")
    where = metrics["where"].astype(str)
    metrics["where"] = where.where(~in_odd, where.replace(renamed))
    (group,) = Evidence("source_filter", odd._replace(metrics=metrics)).groups(CLAIM.frees)
    table = pd.DataFrame(qualified(CLAIM.effects(*CLAIM.arms(group))).table)
    # by the other seeds the cause is ranked first, and in the odd one it may be left out without harm
    assert (table["ranked_first"] > 0).tolist() == [True, True, True, False]
    assert (table["ranked_last"] > 0).tolist() == [True, True, True, False]


@pytest.mark.parametrize("left_out", [["none", "runs"], ["none"], ["echo", "runs"]])
def test_without_arms_to_compare_there_is_no_verdict(left_out: list[str]) -> None:
    records = world()
    runs = records.runs[records.runs["data.without"].isin(left_out)]
    verdict = judge_claim(CLAIM, [Evidence("source_filter", records._replace(runs=runs))])
    assert (verdict.verdict, verdict.seeds) == ("not run", 0)


@pytest.mark.parametrize("page", [style.SCREEN, pytest.param(style.Page(3.25, 8.0), marks=pytest.mark.slow)])
def test_the_figure_of_sources_can_be_read(page: style.Page) -> None:
    with style.drawn_for(page):
        sheet = FIGURES["sources"](world(), judge(points(world().runs)))
        assert not complaints(sheet)
    names = [label.get_text() for label in sheet.axes[0].get_yticklabels()]
    assert names[:2] == ["whole mixture", CAUSE]


def test_without_a_source_that_was_left_out_there_is_nothing_to_draw() -> None:
    runs = world().runs
    whole_mixture = runs[runs["data.without"] == "none"]
    with pytest.raises(NothingToDrawError, match="no source of a mixture was left out"):
        FIGURES["sources"](world(), judge(points(whole_mixture)))


def test_the_question_is_answered_by_the_rate_of_spikes() -> None:
    (said,) = answer(study_of(world()), ["source_filter"]).contrasts
    assert said.measure.name == "Gradient-norm spikes in 1000 steps"
    means = {arm: next(iter(levels.values())).mean for arm, levels in said.levels.items()}
    assert means.pop(f"without {CAUSE}") == 0
    assert set(means.values()) == {9}
    assert "whole mixture" in means


def test_the_mixture_of_the_sweep_has_small_sources_of_one_share() -> None:
    notes = Mixture(trigram=96.0).open().notes
    assert {name: notes[name] for name in SOURCES} == dict.fromkeys(SOURCES, 0.01)
