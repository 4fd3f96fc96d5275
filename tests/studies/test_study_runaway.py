"""Rates at which something runs away: planted laws, ladders and designs, and the committed runs of the study."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest

from lab.analysis.crossings import crossing
from studies.runaway.rates import effects, error_of, errors_of_nulls, ladders, law

UNIGRAM = {256: 3.0}
LRS = 0.01 * 10 ** (0.15 * np.arange(9))
SETTINGS = {"vocabulary": 256, "batch_size": 16, "seq_len": 32, "beta2": 0.95, "precision": "bf16", "depth": 2}
SETTINGS |= {"optimizer": "adamw_coupled", "weight_decay": 0.1}


def ladder(logit: np.ndarray, loss: np.ndarray, **settings: object) -> pd.DataFrame:
    """The runs of one ladder."""
    own = {"stage": "line", "row": "one", "seed": 0, "id": "", "status": "finished", "intervention": "z_loss"}
    losses = {"loss": loss, "logit": logit, "loss_at_init": 5.5}
    return pd.DataFrame({"lr": LRS, **losses, **{**own, **SETTINGS, "width": 16, "steps": 200, **settings}})


def test_a_ladder_has_the_rate_at_which_its_logits_pass_the_level_and_its_loss_goes_half_of_the_way() -> None:
    logit = 500 * (LRS / 0.05) ** 4
    loss = 2.0 + np.maximum(np.log10(LRS / 0.02), 0)  # best 2, so half of the way is 2.5
    (row,) = ladders(ladder(logit, loss), UNIGRAM).to_dict("records")
    assert row["runaway"].at == pytest.approx(0.05)
    assert row["runaway"].slope == pytest.approx(4)
    assert row["failing"].at == pytest.approx(0.02 * 10**0.5, rel=0.01)
    assert row["costly"].at == pytest.approx(0.02 * 10**0.3, rel=0.01)
    assert row["share"] == pytest.approx(0.15)


def test_independent_decay_has_exponents_of_its_own() -> None:
    """With independent decay rates fall half as fast with width, and with the root of steps; with coupled decay not."""
    generator, parts = np.random.default_rng(2), []
    for optimizer, width, steps in product(("adamw", "adamw_coupled"), (16, 32, 64), (200, 800)):
        is_independent = optimizer == "adamw"
        slopes = (-0.5, -0.5) if is_independent else (-1.0, 0.0)
        at = 0.05 * (width / 32) ** slopes[0] * (steps / 400) ** slopes[1] * (0.5 if is_independent else 1)
        logit = 500 * (LRS / (at * 10 ** (0.01 * generator.standard_normal()))) ** 5
        own = {"row": f"{optimizer} {width} {steps}", "width": width, "steps": steps, "optimizer": optimizer}
        parts.append(ladder(logit, np.full(9, 2.0), **own))
    over = ["width", "steps", "is_independent", "width_if_independent", "steps_if_independent"]
    fitted = law(ladders(pd.concat(parts), UNIGRAM), "runaway", over)
    truth = dict(zip(over, (-1.0, 0.0, math.log10(0.5), 0.5, -0.5), strict=True))
    for name, exponent in truth.items():
        assert fitted.exponents[name] == pytest.approx(exponent, abs=0.05), name


def test_what_independent_decay_adds_up_to_has_an_exponent() -> None:
    generator, parts = np.random.default_rng(3), []
    for total, steps in product((0.0, 1.0, 10.0), (200, 400, 800)):
        coupled = {"optimizer": "adamw_coupled", "weight_decay": 0.1}
        decay = {"optimizer": "adamw", "weight_decay": total / steps} if total else coupled
        at = 0.05 * (total or 1.0) ** 0.25
        logit = 500 * (LRS / (at * 10 ** (0.01 * generator.standard_normal()))) ** 5
        parts.append(ladder(logit, np.full(9, 2.0), row=f"{total} {steps}", steps=steps, **decay))
    fitted = law(ladders(pd.concat(parts), UNIGRAM), "runaway", ["steps", "total_if_independent"])
    assert fitted.exponents["total_if_independent"] == pytest.approx(0.25, abs=0.03)
    assert fitted.exponents["steps"] == pytest.approx(0, abs=0.03)


def test_a_run_that_diverged_has_run_away_whatever_its_logits_were() -> None:
    runs = ladder(np.full(9, 1.0), np.full(9, 2.0))
    runs.loc[runs["lr"] > 0.05, ["status", "loss"]] = "diverged", math.nan
    (row,) = ladders(runs, UNIGRAM).to_dict("records")
    assert row["runaway"].high == row["failing"].high == LRS[LRS > 0.05][0]


def design(effect_of: dict[str, float], noise: float = 0.01) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A factorial of three settings, twice, whose rates follow these effects."""
    signs = pd.DataFrame(product((-1, 1), repeat=3), columns=["a", "b", "c"], index=[*"12345678"])
    generator, rows = np.random.default_rng(0), []
    for name, levels in [*signs.iterrows(), *signs.iterrows()]:
        log = -1.0 + noise * generator.standard_normal()
        log += sum(size / 2 * np.prod([levels[part] for part in key.split(" x ")]) for key, size in effect_of.items())
        rows.append({"row": name, "runaway": crossing([1e-4, 1.0], [1e-4 / 10**log, 10**-log], 1.0, log=True)})
    return pd.DataFrame(rows), signs


def test_effects_of_settings_and_of_two_together_are_found() -> None:
    rows, signs = design({"a": -0.4, "c": 0.1, "a x b": 0.2})
    found = effects(rows, signs, "runaway", ["a", "b"])
    for name, truth in {"a": -0.4, "b": 0.0, "c": 0.1, "a x b": 0.2}.items():
        assert found[name].low < truth < found[name].high, name
        assert found[name].high - found[name].low < 0.05, name


def planted(exponents: dict[str, float]) -> pd.DataFrame:
    """Ladders of several shapes whose logits run away by a power law in width and steps."""
    generator, parts = np.random.default_rng(1), []
    for width, steps in product((16, 32, 64, 128), (200, 800)):
        at = 0.05 * (width / 32) ** exponents["width"] * (steps / 400) ** exponents["steps"]
        logit = 500 * (LRS / (at * 10 ** (0.01 * generator.standard_normal()))) ** 5
        parts.append(ladder(logit, np.full(9, 2.0), row=f"{width} {steps}", width=width, steps=steps))
    return ladders(pd.concat(parts), UNIGRAM)


def test_a_power_law_is_found_and_carried_to_settings_that_follow_it() -> None:
    table = planted({"width": -0.4, "steps": 0.1})
    fitted = law(table, "runaway", ["width", "steps"])
    for name, truth in {"width": -0.4, "steps": 0.1}.items():
        assert fitted.exponent(name).low < truth < fitted.exponent(name).high
    far = pd.DataFrame({"width": [1024.0], "steps": [6e4]})
    at = 0.05 * (1024 / 32) ** -0.4 * (6e4 / 400) ** 0.1
    right = error_of(fitted, far.assign(low=at * 0.99, high=at * 1.01))
    wrong = error_of(fitted, far.assign(low=at * 9.9, high=at * 10.1))
    assert right.low < 0 < right.high
    assert wrong.high < 0
    assert wrong.mean == pytest.approx(right.mean - 1, abs=0.01)


def test_settings_of_which_no_rate_failed_do_not_count() -> None:
    fitted = law(planted({"width": -0.4, "steps": 0.1}), "runaway", ["width", "steps"])
    far = pd.DataFrame({"width": [1024.0] * 2, "steps": [6e4] * 2, "low": [0.01] * 2, "high": [0.011, math.inf]})
    assert error_of(fitted, far).mean == error_of(fitted, far[:1]).mean


def test_a_null_that_is_right_is_off_by_nothing() -> None:
    table = planted({"width": -1.0, "steps": 0.0})  # N^-1/2
    public = pd.DataFrame({"parameters": [12 * 1024.0**2 * 2], "tokens": [1e9], "source": ["Step Law"]})
    public = public.assign(low=0.05 * 32 / 1024 * 0.99, high=0.05 * 32 / 1024 * 1.01)
    nulls = errors_of_nulls(table, "runaway", pd.concat([public, public.assign(source="Marin")]))
    assert nulls.loc["N^-1/2", "absolute"] < 0.02 < nulls.loc["constant", "absolute"]
