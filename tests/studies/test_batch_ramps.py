"""Batches that grow: over tokens, in a figure, and what a batch that follows its noise scale saves."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest

import planted
import planted_claims
from drawn_texts import complaints
from lab.analysis import Records
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.probe_values import late, near
from lab.analysis.rendering import style
from lab.report.all_figures import FIGURES
from noisy_quadratic import NoisyQuadratic
from studies.batch_size.measures import loss_at, over_tokens, predicted_saving, tokens_to
from studies.batch_size.tuning import crossings
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim

SCHEDULES = ("quarter", "palm", "glm_130b", "mt_nlg", "gpt3", "adaptive", "constant")
SEQ_LEN, SEQUENCES = 32, 32_000
RAMP = {"glm_130b": 0.025, "mt_nlg": 0.044, "gpt3": 0.04}


def batch_at(name: str, share: float) -> int:
    """Sequences of an update after this share of the tokens."""
    if name in RAMP:
        return 16 + round(7 * min(1.0, share / RAMP[name])) * 16
    if name == "palm":
        return 32 if share < 5 / 74 else 64 if share < 18 / 74 else 128
    return {"quarter": 32, "constant": 128, "adaptive": 32 + 16 * round(6 * share**0.5)}[name]


def trained(name: str, lr: float, seed: int) -> tuple[dict[str, object], list[tuple[object, ...]]]:
    """A run whose loss falls with its tokens and, slowly, with its updates; a hundredth higher per seed."""
    batches: list[int] = []
    while (size := batch_at(name, sum(batches) / SEQUENCES)) + sum(batches) <= SEQUENCES:
        batches.append(size)
    final = 2 + 0.1 * math.log10(lr / 1e-2) ** 2 + 0.01 * seed - 0.02 * batches[-1] / 128 + 0.01 * (name == "palm")
    settings = {"optimizer.lr": lr, "batch.name": name, "batch_size": 128, "steps": len(batches), "seed": seed}
    if name == "adaptive":
        settings |= {"steps": 1000, "updates": len(batches)}
    card = planted.card(**settings, final_val_loss=final, tokens=SEQ_LEN * sum(batches))
    rows: list[tuple[object, ...]] = []
    for step in sorted({*range(0, len(batches), 5), len(batches) - 1}):
        seen = sum(batches[:step])
        loss = final + 3.6 / (1 + 60 * seen / SEQUENCES + 0.02 * step)
        measured = {("val_loss", ""): loss, ("batch", "sequences"): batches[step], ("batch", "tokens"): SEQ_LEN * seen}
        rows += [(card["id"], step, *key, value) for key, value in measured.items()]
    return card, rows


@cache
def records(names: tuple[str, ...] = SCHEDULES, seeds: int = 3) -> Records:
    """A sweep of batch schedules as training leaves it."""
    made = [trained(name, lr, seed) for name in names for lr in (1e-2, 1e-1) for seed in range(seeds)]
    rows = [row for _, metrics in made for row in metrics]
    return planted.records_of([card for card, _ in made], rows)


def run_of(name: str, tables: Records) -> str:
    """Id of the run of a schedule with the lower learning rate and the first seed."""
    runs = tables.runs
    (found,) = runs["id"][(runs["batch.name"] == name) & (runs["optimizer.lr"] == 1e-2) & (runs["seed"] == 0)]
    return str(found)


def test_a_run_over_its_tokens_leaves_out_the_last_record() -> None:
    tables = records()
    run = over_tokens(tables)[run_of("constant", tables)]
    assert run.index[-1] == 245
    assert run["tokens"].tolist()[:3] == [0, 5 * 128 * 32, 10 * 128 * 32]
    middle = (run["loss"].iloc[1] + run["loss"].iloc[2]) / 2
    assert loss_at(run, 7.5 * 128 * 32) == pytest.approx(middle)
    assert tokens_to(run, middle) == pytest.approx(7.5 * 128 * 32)
    assert math.isnan(tokens_to(run, 1.0))
    assert math.isnan(float(loss_at(run, 249 * 128 * 32)))


def test_analyses_read_the_updates_of_an_adaptive_run() -> None:
    """Of 1000 steps it made fewer than 400 updates, and its records end with them."""
    tables = records(("adaptive",))
    name = run_of("adaptive", tables)
    made = int(tables.runs.set_index("id").loc[name, "updates"])
    assert 250 < made < 400
    losses = tables.metrics[(tables.metrics["id"] == name) & (tables.metrics["probe"] == "val_loss")]
    values = losses.set_index("step")["value"]
    half = min(values.index, key=lambda step: abs(step - (made - 1) / 2))
    assert near(tables, "val_loss", "", 0.5)[name] == values[half]
    assert late(tables, "val_loss", "")[name] == pytest.approx(values[values.index >= 0.9 * (made - 1)].mean())
    # the last record is on other text, so a target that only it reaches is not reached
    target = (values.iloc[-1] + values.iloc[-2]) / 2
    assert math.isnan(crossings(tables._replace(runs=tables.runs.assign(loss_bigram=target)))["steps"][name])


def test_the_figure_shows_batch_and_paired_losses_at_equal_tokens() -> None:
    drawing = FIGURES["batch_ramps"](records())
    batch_axes, loss_axes, final_axes = drawing.axes
    lines = [line for line in batch_axes.get_lines() if len(line.get_xdata()) > 2]
    palm = next(line for line in lines if float(line.get_ydata()[-1]) == 128 and float(line.get_ydata()[0]) == 32)
    assert {round(value) for value in palm.get_ydata()} >= {32, 64, 128}
    ahead = [line for line in loss_axes.get_lines() if len(line.get_xdata()) > 2]
    assert len(ahead) == len(SCHEDULES) - 1
    assert all(float(line.get_ydata()[10]) < 0 for line in ahead)
    dots = {round(float(line.get_ydata()[0])): float(line.get_xdata()[0]) for line in final_axes.get_lines()[:-1]}
    rows = [label.get_text() for label in final_axes.get_yticklabels()]
    assert rows == ["adaptive", "glm_130b", "gpt3", "mt_nlg", "palm", "quarter"]
    # tuned to 1e-2; the quarter ends with a smaller batch, palm a hundredth higher
    assert [dots[rows.index(name)] for name in ("gpt3", "palm", "quarter")] == pytest.approx([0, 0.01, 0.015])


@pytest.mark.parametrize(("page", "seeds"), [(style.SCREEN, 3), (style.Page(3.25, 8.0), 1)], ids=["screen", "column"])
def test_the_figure_can_be_read(page: style.Page, seeds: int) -> None:
    with style.drawn_for(page):
        drawing = FIGURES["batch_ramps"](records(seeds=seeds))
        assert not complaints(drawing)
    assert ("intervals" in drawing.caption) == (seeds == 3)


def test_without_a_constant_batch_there_is_no_figure() -> None:
    with pytest.raises(NothingToDrawError, match="beside a constant one"):
        FIGURES["batch_ramps"](records(("palm", "quarter")))
    tables = records(("palm", "constant"))
    decayed = tables.runs.assign(**{"optimizer.weight_decay": np.where(tables.runs["batch.name"] == "palm", 0.1, 0)})
    with pytest.raises(NothingToDrawError, match="other settings differ"):
        FIGURES["batch_ramps"](tables._replace(runs=decayed))
    with pytest.raises(NothingToDrawError, match="recorded its batch"):
        FIGURES["batch_ramps"](tables._replace(metrics=tables.metrics[tables.metrics["probe"] == "val_loss"]))


# All directions alike, so that the simple noise scale is the one that steps depend on, and the path does not depend on
# the batch.
ISOTROPIC = NoisyQuadratic.power_law(dimensions=4, power=0.0)
FRACTION, TARGET = 0.01, 0.02  # of the best step; a hundredth of the loss at the start


def test_a_constant_batch_saves_nothing() -> None:
    batch_n, noise_n, _ = ISOTROPIC.greedy(lambda noise: 8.0, FRACTION, TARGET)
    assert predicted_saving(noise_n, batch_n) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("exchange", [1.0, 100.0])
def test_the_saving_foretold_by_the_noise_is_the_one_observed(exchange: float) -> None:
    """Both paths end at the same loss; the constant batch is the mean of the one that follows the noise."""
    batch_n, noise_n, _ = ISOTROPIC.greedy(lambda noise: math.sqrt(exchange * noise), FRACTION, TARGET)
    constant_n, *_ = ISOTROPIC.greedy(lambda noise: float(batch_n.mean()), FRACTION, TARGET)
    foretold = predicted_saving(noise_n, batch_n)
    assert foretold > 0.01
    assert 1 - len(batch_n) / len(constant_n) == pytest.approx(foretold, abs=2 / len(constant_n))
    # a tenth of the updates, as a probe records them
    assert predicted_saving(noise_n[::10], batch_n[::10]) == pytest.approx(foretold, rel=0.05)


SOURCE_OF = {"glm_130b": "GLM-130B", "mt_nlg": "MT-NLG", "gpt3": "GPT-3"}


def test_a_schedule_whose_best_learning_rate_ends_the_grid_is_not_judged() -> None:
    claim = CLAIMS["growth_in_a_line_leads_and_ends_level"]
    rising = [
        (run | {"final_val_loss": 2 - 0.1 * math.log10(run["optimizer.lr"])}, recorded)
        for run, recorded in planted_claims.cards("batch_ramps", {0: True, 1: True, 2: True})
        if run["batch.name"] in ("gpt3", "constant", "quarter")
    ]
    verdict = judge_claim(claim, [Evidence("batch_ramps", planted_claims.records(rising))])
    assert verdict.verdict == "not run"
    assert verdict.reason.startswith("batch=gpt3: the best learning rate, 0.3, is the highest tried")


@pytest.mark.parametrize("name", ["glm_130b"])
def test_where_small_batches_win_no_ramp_shows_that_growth_helps(name: str) -> None:
    (claim,) = [one for one in CLAIMS.values() if one.sweep == "batch_ramps" and one.source == SOURCE_OF[name]]
    runs = planted_claims.cards("batch_ramps", dict.fromkeys(range(3), True))
    for run, _ in runs:
        if run["batch.name"] == "quarter":
            run["final_val_loss"] -= 0.3
    verdict = judge_claim(claim, [Evidence("batch_ramps", planted_claims.records(runs))])
    assert verdict.verdict == "not testable here"
    assert verdict.reason.startswith("the control shows no effect of batch.name: -0.2 [")
