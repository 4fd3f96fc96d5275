"""The law of rounded logits, against logits that are rounded."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import planted_claims
from lab.analysis import Records
from lab.analysis.drawing.registry import NothingToDrawError
from lab.report.all_figures import FIGURES
from labwatch.events.logit_rounding import (
    MANTISSA_BITS,
    level_at_cost,
    rounding_cost,
    spacing,
)
from labwatch.events.logs import mantissa_bits_by_run
from studies.wortsman.rounding import mean_rounding_cost, published, rounded_runs
from test_figure_contract import small, wrong

VOCABULARY, TOKENS = 4000, 400


def rounding_loss(level: float, bits: int) -> float:
    """Loss that rounding adds on average to a target drawn from the softmax of flat logits around a level."""
    random = np.random.default_rng(0)
    logits_tv = level + 2 * random.standard_normal((TOKENS, VOCABULARY))
    mantissa_tv, exponent_tv = np.frexp(logits_tv)
    rounded_tv = np.ldexp(np.round(mantissa_tv * 2 ** (bits + 1)) / 2 ** (bits + 1), exponent_tv)
    exact_tv, rounded_tv = (each - np.logaddexp.reduce(each, 1, keepdims=True) for each in (logits_tv, rounded_tv))
    return float((np.exp(exact_tv) * (exact_tv - rounded_tv)).sum(1).mean())


def test_neighbours_of_a_format_are_as_far_apart_as_the_spacing() -> None:
    for level in (1.0, 1.5, 100.0, -300.0, 65000.0):
        assert spacing(level, 23) == abs(
            np.nextafter(np.float32(level), np.float32(np.inf * level)) - np.float32(level)
        )
        assert spacing(level, 10) == abs(
            np.nextafter(np.float16(level), np.float16(np.inf * level)) - np.float16(level)
        )
    assert spacing(0.0, 7) == 0


@pytest.mark.parametrize(("level", "bits"), [(48.0, 5), (200.0, 7), (-400.0, 7), (700.0, 7)])
def test_the_law_is_what_rounding_costs(level: float, bits: int) -> None:
    """Of logits that spread over half a spacing and more, so that their errors are uniform."""
    assert float(rounding_cost(level, bits)) == pytest.approx(rounding_loss(level, bits), rel=0.1)


def test_logits_of_scaled_formats_stay_fp32() -> None:
    precisions = ("fp32", "bf16", "nvfp4", "mxfp8")
    runs = pd.DataFrame({"id": precisions, "precision": precisions})
    assert mantissa_bits_by_run(runs).to_dict() == {"fp32": 23, "bf16": 7, "nvfp4": 23, "mxfp8": 23}
    runs["kept_in_bf16"] = ["none", "none", "ends", "none"]
    assert mantissa_bits_by_run(runs).to_dict() == {"fp32": 23, "bf16": 7, "nvfp4": 7, "mxfp8": 23}


def test_small_and_large_spacings_meet_their_limits_without_overflow() -> None:
    for s in (1e-6, 1e-3):
        assert float(rounding_cost(1.0, -math.log2(s))) == pytest.approx(s**2 / 24, rel=1e-3)
    spacings = 2.0 ** np.arange(-9, 4)
    exactly = [math.log(math.sinh(s / 2) / (s / 2)) for s in spacings]
    np.testing.assert_allclose(rounding_cost(1.0, -np.log2(spacings)), exactly, rtol=1e-4)
    assert float(rounding_cost(2.0**20, 2)) == pytest.approx(2.0**17 - math.log(2.0**18), rel=1e-9)
    assert float(rounding_cost(0.0, 7)) == 0


def test_the_mean_over_tokens_is_that_of_drawn_tokens() -> None:
    levels = np.random.default_rng(0).normal(250, 120, 400_000)
    assert float(mean_rounding_cost(250, 120, 7)) == pytest.approx(rounding_cost(levels, 7).mean(), rel=0.02)
    assert float(mean_rounding_cost(250, 0, 7)) == pytest.approx(float(rounding_cost(250, 7)), rel=1e-9)


def test_a_format_costs_a_hundredth_from_its_power_of_two() -> None:
    for bits in (2, 7, 10, 23):
        level = level_at_cost(0.01, bits)
        assert float(rounding_cost(level, bits)) >= 0.01 > float(rounding_cost(level * 0.999, bits))
    assert level_at_cost(0.01, 10) == 8 * level_at_cost(0.01, 7)


def test_ten_published_runs_lose_most_of_what_the_law_says() -> None:
    high = published().query("lr >= 0.1")
    law = mean_rounding_cost(high["mean_logit"], high["mean_logit_std_over_tokens"], 7)
    assert len(published()) == 35
    assert len(high) == 10
    assert (high["loss_minus_mu_centering"] / law).between(0.6, 1).all()
    assert np.corrcoef(np.log(law), np.log(high["loss_minus_mu_centering"]))[0, 1] > 0.99


def planted_bits() -> Records:
    """Runs of 2 to 7 mantissa bits that lose 1.5 times the law, and their twins of 23 bits."""
    return planted_claims.records(planted_claims.cards("mantissa_bits", dict.fromkeys(range(3), True)))


def test_a_rounded_run_is_held_against_the_twin_that_differs_in_nothing_else() -> None:
    records = planted_bits()
    table = rounded_runs(records)
    runs = records.runs.set_index("id")
    assert set(table.index) == set(runs.index[runs["mantissa_bits"] < 23])
    np.testing.assert_allclose(table["harm"] / table["law"], 1.5, rtol=0.3)
    assert table.groupby(runs["mantissa_bits"])["law"].mean().is_monotonic_decreasing
    alone = records._replace(runs=records.runs[~((records.runs["mantissa_bits"] == 23) & (records.runs["seed"] == 1))])
    assert set(runs.loc[rounded_runs(alone).index, "seed"]) == {0, 2}


def test_a_run_that_did_not_end_has_no_harm() -> None:
    records = planted_bits()
    broken = records.runs["mantissa_bits"] == 2
    runs = records.runs.assign(final_val_loss=records.runs["final_val_loss"].where(~broken))
    assert set(rounded_runs(records._replace(runs=runs))["mantissa_bits"]) == {3, 4, 5, 6, 7}


def test_bf16_has_its_twin_in_fp32() -> None:
    records = planted_bits()
    precision = records.runs["mantissa_bits"].map({7: "bf16", 23: "fp32"})
    runs = records.runs.assign(precision=precision)[precision.notna()].drop(columns="mantissa_bits")
    table = rounded_runs(records._replace(runs=runs))
    assert len(table) == 6
    assert set(table["mantissa_bits"]) == {7}


def test_the_figure_shows_every_number_of_bits_and_the_published_runs() -> None:
    figure = FIGURES["logit_rounding"](planted_bits())
    texts = [text for points in figure.points for text in points.texts]
    assert sum("costs" in text and "[" in text for text in texts) >= 8
    assert sum(text.startswith("published, ") for text in texts) == 15
    assert "15 of 35 runs of 16 to 221 million parameters" in figure.caption
    assert not wrong(iter([("logit_rounding", figure)]))
    with pytest.raises(NothingToDrawError, match="no rounded run has a twin"):
        FIGURES["logit_rounding"](small("one size"))


def test_the_page_of_results_says_what_formats_cost() -> None:
    words = " ".join((Path(__file__).parents[1] / "results" / "README.md").read_text().split())
    high = published().query("lr >= 0.1")
    share = high["loss_minus_mu_centering"] / mean_rounding_cost(
        high["mean_logit"], high["mean_logit_std_over_tokens"], MANTISSA_BITS["bf16"]
    )
    assert f"at learning rates of 0.1 and more lose {100 * share.min():.0f} to {100 * share.max():.0f} % of it" in words
    bf16, fp16 = (level_at_cost(0.01, MANTISSA_BITS[name]) for name in ("bf16", "fp16_emulated"))
    assert f"bf16 costs a hundredth of a nat from |log Z| {bf16:g} on, fp16 from {fp16:g}." in words
