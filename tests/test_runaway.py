"""Rates at which planted curves fail and run away, and that each level is what its measurement says."""

import json
import math

import numpy as np
import pandas as pd
import pytest

import planted
from lab.analysis import Records
from lab.analysis.crossings import rate_text
from lab.analysis.curves import points
from lab.analysis.runaway import COSTLY as NATS_UP
from lab.analysis.runaway import HALF, crossings, rates, read_runaways
from lab.analysis.sensitivity import judge, study_of
from lab.analysis.stress.battery import read_battery
from lab.core.shipped import results
from lab.report import tables
from labwatch.events.logit_rounding import BF16, COSTLY, level_at_cost
from studies.claims.registry import CLAIMS

LRS = 1e-3 * 10 ** (0.3 * np.arange(9))
WAY = planted.UNIGRAM - 2.0


def world(knee: float = 0.05, seeds: int = 3, power: float = 5, diverged: float = math.inf) -> Records:
    """Curves whose loss goes the whole way in a decade above .01, and whose attention logits pass 200 at the knee."""
    runs, metrics = [], []
    for seed in range(seeds):
        for lr in LRS:
            run, loss = (
                f"{seed}-{lr:.3g}",
                2.0 + WAY * max(0.0, math.log10(lr / 0.01)) + 0.1 * max(0, math.log10(0.01 / lr)),
            )
            lost = lr >= diverged
            ending = {"final_val_loss": math.nan if lost else loss, "status": "diverged" if lost else "finished"}
            runs.append(planted.card(id=run, seed=seed, **ending, **{"optimizer.lr": lr}))
            metrics += [
                (run, step, "attention_logit_max", "block0", value)
                for step, value in ((0, 1.0), (9, 200 * (lr / knee) ** power))
            ]
    table = pd.DataFrame(metrics, columns=["id", "step", "probe", "where", "value"])
    return Records(pd.DataFrame(runs), table)


def test_planted_rates_and_slopes_are_found():
    records = world()
    found = {rate.quantity: rate for rate in rates(records, points(records.runs))}
    assert set(found) == {HALF, NATS_UP, "attention_logits", "attention_logits_of_the_paper"}
    assert found[HALF].rate.mean == pytest.approx(0.01 * 10**0.5, rel=0.02)
    assert found[HALF].slope.mean == pytest.approx(WAY, rel=0.05)
    assert found["attention_logits"].rate.mean == pytest.approx(0.05)
    assert found["attention_logits"].slope.mean == pytest.approx(5, rel=1e-4)
    assert found["attention_logits_of_the_paper"].rate.mean == pytest.approx(0.05 * 50**0.2, rel=1e-4)
    for rate in found.values():
        assert rate.rate.low < rate.rate.mean < rate.rate.high


def test_a_run_that_diverged_lies_beyond_every_level():
    diverged = LRS[4]
    records = world(knee=10.0, diverged=diverged)
    for row in crossings(records, points(records.runs)).itertuples():
        if row.quantity != HALF and row.quantity != NATS_UP:
            assert (row.crossing.low, row.crossing.high) == pytest.approx((LRS[3], diverged), rel=1e-5)
            assert row.crossing.slope == math.inf


def test_without_a_unigram_loss_there_is_no_half_of_the_way():
    records = world()
    unknown = records._replace(runs=records.runs.drop(columns="loss_unigram"))
    assert HALF not in set(crossings(unknown, points(unknown.runs))["quantity"])


def test_the_report_tells_each_arm_its_rates_by_size():
    records = world()
    shown = tables.failing_rates(study_of(records)).set_index("what passes its level")
    (size,) = set(shown) - {"arm"}
    assert shown.loc["attention logits 200", size].startswith("0.05 [")
    assert "(slope 5)" in shown.loc["attention logits 200", size]
    by_seed = tables.crossings_by_seed(study_of(records))
    assert len(by_seed) == 3 * 4


def test_levels_are_what_was_measured():
    verdicts = {row["name"]: row for row in json.loads((results() / "verdicts.json").read_text())}
    runaways, battery = read_runaways(), read_battery().tests
    kappa = verdicts["blocks_lose_their_worth_at_a_kappa"]
    mean, low, high = (10 ** kappa[end] for end in ("effect", "low", "high"))
    assert f"{mean:.0f} [{low:.0f}, {high:.0f}]" in runaways["attention_logits"].means
    assert low < runaways["attention_logits"].level < high
    assert runaways["output_logits"].level == level_at_cost(COSTLY, BF16)
    assert math.log10(runaways["residual_stream"].level) == pytest.approx(battery["residual_growth"].fails, abs=0.01)
    assert math.log10(runaways["router_logits"].level) == pytest.approx(battery["router_logits"].fails, abs=0.01)
    for runaway in runaways.values():
        assert runaway.measured in CLAIMS or runaway.measured.endswith(".yaml")
        verdict = verdicts.get(runaway.measured, {"verdict": "reproduced"})["verdict"]
        assert verdict == "reproduced" or verdict in runaway.means


def test_judged_points_have_the_same_rates():
    records = world(seeds=1)
    ended = points(records.runs)
    told = [[rate_text(rate.rate) for rate in rates(records, table)] for table in (ended, judge(ended))]
    assert told[0] == told[1]
