"""Figures show the planted numbers, mark outcomes and missing runs, and are drawn only where they apply."""

import itertools
import math

import numpy as np
import pytest

import planted
from lab.analysis import Records, judge, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.grouping import facets, ways_to_grow
from lab.analysis.rendering import panels
from lab.core import files
from lab.report.all_figures import FIGURES

SEEDS = (0, 1)
LR, EPS, WIDTH, DEPTH = "optimizer.lr", "optimizer.eps", "model.width", "model.depth"


def cards(seeds=SEEDS, lrs=(1e-2, 1e-1), loss=lambda card: 2.0, **axes):
    """A card per point of the product of these axes (dotted keys), its final loss by ``loss``."""
    made = []
    for values in itertools.product(seeds, lrs, *axes.values()):
        card = planted.card(**dict(zip(("seed", LR, *axes), values, strict=True)), steps=41)
        card["parameters_without_embeddings"] = 12 * card[DEPTH] * card[WIDTH] ** 2 + card[WIDTH]
        card["final_val_loss"] = loss(card)
        made.append(card | {"id": files.digest(card)})
    return made


def records(cards, values):
    """``values(card, step)`` gives rows ``(probe, where, value)``."""
    rows = [(card["id"], step, *row) for card in cards for step in range(0, 41, 4) for row in values(card, step)]
    return planted.records_of(cards, rows)


def everything(card, step):
    gradient = 0.02 / card[WIDTH] * (1 + card["seed"])
    yield from (("train_loss", "", 3.0 + card[LR]), ("output_logit_mean", "", -step), ("log_z_square", "", 1.0 + step))
    yield ("head_common_mode", "head", 0.5)
    for block in range(card[DEPTH]):
        yield from ((probe, f"block{block}", 2.0 + step) for probe in ("attention_logit_max", "query_norm", "key_norm"))
        yield from (("query_key_cosine", f"block{block}", 0.1), ("block_rms", f"block{block}", 1.0 + block))
        for tensor in ("mlp_up", "attention.key"):
            yield ("grad_rms", f"block{block}.{tensor}", gradient / (1 + block))
            yield ("update_rms", f"block{block}.{tensor}", 0.3)


def drawn(records, names):
    """Which of these figures apply."""
    names_drawn = set()
    for name in names:
        try:
            FIGURES[name](records)
        except NothingToDrawError:
            continue
        names_drawn.add(name)
    return names_drawn


def line(axes):
    """Every line of a panel that has more than one point and is no reference, as (x, y)."""
    lines = [line for line in axes.get_lines() if line.get_marker() in ("None", "") and len(line.get_xdata()) > 1]
    return [
        (list(line.get_xdata()), list(line.get_ydata())) for line in lines if line.get_transform() == axes.transData
    ]


SIZES = {"best_loss_with_size", "gradient_with_size", "key_gradient_with_size", "block_output_with_size"}
SIZES |= {"attention_logit_with_size"}
SETTINGS = {"loss_against_setting", "updates_by_epsilon"}
SPIKES = {"responses", "spike_arms", "anatomy_of_a_spike", "state_and_data", "restarts", "detector_scores"}
SPIKES |= {"updates_and_descent", "repeated_bursts", "spike_causes", "own_spikes", "alarms_on_own_spikes"}
SPIKES |= {"own_spike_remedies"}
CORPUS = {"sources", "two_held_out_losses"}
DEEP = {"gradient_with_depth", "embedding_gradient"}
OF_MANY_ARMS = {"loss_by_arm"}
CROSSING = {"runaway_rates", "failing_learning_rate"}  # which need a curve that fails
OF_ONE_PROBE = {"distance_from_init", "logit_rounding", "loss_scale_over_steps"}
PRECISION = {"spikes_by_loss_scale", "rounding_faults"}
BATCHES = {"batch_ramps", "noise_scale_with_loss", "best_lr_with_batch", "steps_with_batch"}
EXPERTS = {"routers", "experts_by_arm"}
WARMUP = "schedule.warmup"


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ({WIDTH: (16, 32)}, SIZES),
        ({EPS: (0.0, 1e-8, 1e-3)}, SETTINGS),
        ({WARMUP: (0.01, 0.05, 0.25), WIDTH: (16, 32)}, {"best_loss_with_size", "loss_against_setting"}),
        ({WARMUP: (0.01, 0.05)}, set()),
        ({EPS: (1e-9, 1e-8, 1e-3), WARMUP: (0.01, 0.05, 0.25)}, set()),
    ],
    ids=["sizes", "epsilon", "warmup and sizes", "two values", "two settings"],
)
def test_a_figure_is_there_where_its_data_are(axes, names):
    candidates = {"best_loss_with_size"} | SETTINGS if len(names) == 2 else SIZES | SETTINGS
    assert drawn(records(cards(seeds=(0,), **axes), everything), candidates) == names


@pytest.mark.slow
def test_every_figure_but_those_of_settings_shows_probes_or_sizes():
    complete = records(cards(seeds=(0,), **{WIDTH: (16, 32)}), everything)
    others = SIZES | SETTINGS | BATCHES | SPIKES | DEEP | OF_ONE_PROBE | OF_MANY_ARMS | PRECISION | CORPUS | EXPERTS
    others |= CROSSING
    assert drawn(complete, set(FIGURES) - SIZES) == set(FIGURES) - others
    without_probes = Records(complete.runs, complete.metrics.head(0))
    assert drawn(without_probes, FIGURES) == {"learning_rate_sensitivity", "best_loss_with_size"}


ARCHITECTURES = ("z_loss", "normformer+z_loss", "post_layernorm+z_loss")


def test_gradients_of_deep_models_are_shown_by_block():
    loss = lambda card: 3.0 if "post" in card["intervention"] else 2.0  # noqa: E731
    made = cards(loss=loss, **{DEPTH: (4,), "intervention": ARCHITECTURES})
    figure = FIGURES["gradient_with_depth"](records(made, everything))
    lines = line(figure.axes[0])
    mean = math.sqrt(2) * 0.02 / 32
    assert [x for x, _ in lines] == [[1, 2, 3, 4]] * 2
    assert lines[1][1] == pytest.approx([mean, mean / 2, mean / 3, mean / 4]), "geometric mean over seeds"
    assert "never beat a bigram model: with post-layernorm." in figure.caption


def test_the_loss_against_a_setting_carries_the_planted_values():
    loss = lambda card: 2.0 + card[EPS] * 100 + card[LR] + 0.1 * card["seed"]  # noqa: E731
    figure = FIGURES["loss_against_setting"](records(cards(loss=loss, **{EPS: (0.0, 1e-4, 1e-3, 1e-2)}), everything))
    above, below = figure.axes
    lines = line(above)
    assert [x for x, _ in lines] == [[1e-4, 1e-3, 1e-2]] * 2, "zero is joined to nothing"
    assert [y for _, y in lines] == [
        pytest.approx([2.05 + lr + eps * 100 for eps in (1e-4, 1e-3, 1e-2)]) for lr in (0.01, 0.1)
    ]
    at_zero = [mark for mark in above.get_lines() if mark.get_marker() == "o" and len(mark.get_xdata()) == 1]
    assert {mark.get_xdata()[0] < 1e-4 for mark in at_zero} == {True}
    assert [float(mark.get_ydata()[0]) for mark in at_zero] == pytest.approx([2.06, 2.15])
    assert below.get_xticklabels()[0].get_text() == "0"
    gradient = math.sqrt(2) * 0.02 / 32
    assert line(below)[0][1] == pytest.approx([gradient] * 3), "geometric mean over seeds"


def test_what_changes_with_the_batch_is_no_setting():
    made = cards(batch_size=(16, 32, 64))
    for card in made:
        card["steps"] = 6400 // card["batch_size"]
    (axes,) = FIGURES["loss_against_setting"](records(made, everything)).axes
    assert axes.get_xlabel() == "batch size with steps"


def test_the_model_of_no_blocks_is_a_line_and_no_panel():
    kappa = "intervention.kappa_transplant.kappa"
    made = cards(loss=lambda card: 3.0 if card[DEPTH] == 0 else 2.0, **{kappa: (1.0, 10.0, 100.0), DEPTH: (0, 2)})
    (axes,) = FIGURES["loss_against_setting"](records(made, everything)).axes
    (yardstick,) = [line for line in axes.get_lines() if line.get_label() == "model of no blocks"]
    assert set(yardstick.get_ydata()) == {3.0}
    assert all(y == [2.0] * 3 for _, y in line(axes))


def test_growth_is_shown_against_size_learning_rate_and_block():
    figure = FIGURES["gradient_with_size"](records(cards(**{WIDTH: (16, 64)}), everything))
    left, middle, right = figure.axes
    mean = {width: math.sqrt(2) * 0.02 / width for width in (16, 64)}
    sizes = [12 * 2 * width**2 + width for width in (16, 64)]
    assert line(left) == [(sizes, pytest.approx([mean[16], mean[64]]))] * 2
    assert line(middle) == [([1e-2, 1e-1], pytest.approx([mean[width]] * 2)) for width in (16, 64)]
    assert line(right) == [([1, 2], pytest.approx([mean[64], mean[64] / 2]))] * 2


def test_epsilon_is_a_line_where_gradients_come_near_it():
    def epsilons(eps):
        axes = FIGURES["gradient_with_size"](records(cards(**{WIDTH: (16, 64), EPS: (eps,)}), everything)).axes[0]
        return [set(line.get_ydata()) for line in axes.get_lines() if line.get_label() == "Adam's epsilon"]

    assert epsilons(1e-4) == [{1e-4}]
    assert epsilons(1e-15) == []


@pytest.mark.parametrize("name", ["gradient_with_size", "updates_over_steps"])
def test_runs_without_adam_have_no_line_at_its_epsilon(name):
    made = [{key: value for key, value in card.items() if key != EPS} for card in cards(**{WIDTH: (16, 64)})]
    axes = FIGURES[name](records(made, everything)).axes
    assert not [line for each in axes for line in each.get_lines() if line.get_label() == "Adam's epsilon"]


def test_the_best_loss_is_foretold_by_the_power_law_of_smaller_sizes():
    def loss(card):
        return 9 * card["parameters_without_embeddings"] ** -0.1 + abs(math.log10(card[LR]) + 2) + (card[WIDTH] == 128)

    made = cards(loss=loss, lrs=(1e-3, 1e-2, 1e-1), **{WIDTH: (16, 32, 64, 128)})
    left, right = FIGURES["best_loss_with_size"](records(made, everything)).axes
    sizes = sorted({card["parameters_without_embeddings"] for card in made})
    law = [9 * size**-0.1 for size in sizes]
    seen, fit, mark = left.get_lines()
    assert list(seen.get_ydata()) == pytest.approx([*law[:3], law[3] + 1])
    assert list(fit.get_ydata()) == pytest.approx(law)
    assert (mark.get_xdata()[0], mark.get_ydata()[0]) == (sizes[3], pytest.approx(law[3]))
    assert list(right.get_lines()[0].get_ydata()) == pytest.approx([1e-2] * 4)


def test_lines_over_the_steps_carry_the_planted_values():
    def values(card, step):
        broken = card["seed"] == 1 and card[LR] == 0.1 and step > 20
        yield ("train_loss", "", 3 + card[LR] + card["seed"])
        yield ("attention_logit_max", "block0", math.nan if broken else 10 ** (1 + card["seed"]))
        yield ("attention_logit_max", "block1", math.nan if broken else 1.0)

    made = cards(loss=lambda card: 5.0 if card[LR] == 0.1 else 2.0)
    losses, logits = FIGURES["loss_over_steps"](records(made, values)).axes
    steps = list(range(0, 41, 4))
    assert [(x, y[0]) for x, y in line(losses)] == [(steps, pytest.approx(3.51)), (steps, pytest.approx(3.6))]
    stable, diverged = (y for _, y in line(logits))
    assert stable == pytest.approx([10**1.5] * 11), "geometric mean of the largest over blocks"
    assert np.isfinite(diverged).tolist() == [step <= 20 for step in steps], "no mean over some of the seeds"
    marks = {mark.get_marker(): float(mark.get_xdata()[0]) for mark in logits.get_lines() if mark.get_marker() in "x^"}
    assert marks == {"x": 20.0}


def test_logits_that_are_zero_are_drawn_without_a_warning():
    def values(card, step):
        return [("train_loss", "", 3.0), ("attention_logit_max", "block0", 0.0)]

    assert FIGURES["loss_over_steps"](records(cards(), values)).axes


@pytest.mark.parametrize("best", [0.03, 100.0])
def test_one_best_rate_at_every_size_is_drawn_without_a_warning(best):
    lrs = [best * factor for factor in (0.1, 0.3, 1.0, 3.0, 10.0)]
    made = cards(lrs=lrs, loss=lambda card: 2.0 + abs(math.log10(card[LR] / best)), **{WIDTH: (16, 32)})
    *_, rates = FIGURES["best_loss_with_size"](records(made, lambda card, step: [("train_loss", "", 3.0)])).axes
    low, high = rates.get_ylim()
    assert low < best < high
    assert rates.get_yscale() == "log"


def test_the_cost_of_a_drift_is_the_loss_above_the_lowest_of_any_run():
    def values(card, step):
        yield from (("log_z_square", "", 1.0 + step), ("head_common_mode", "head", 0.5))
        yield ("train_loss", "", 1.5 + (0.25 if card[LR] == 0.1 else 0.0) + (0.5 if step == 0 else 0.0))

    drift, common, cost = FIGURES["output_logit_drift"](records(cards(), values)).axes
    assert [y for _, y in line(drift)] == [pytest.approx([1.0 + step for step in range(0, 41, 4)])] * 2
    assert [y for _, y in line(common)] == [pytest.approx([0.5] * 11)] * 2
    assert [y for _, y in line(cost)] == [pytest.approx([0.5 + above] + [max(above, 1e-6)] * 10) for above in (0, 0.25)]
    with pytest.raises(NothingToDrawError, match="head_common_mode"):
        FIGURES["output_logit_drift"](records(cards(), lambda card, step: [("train_loss", "", 1.0)]))


def test_a_seed_without_a_value_is_still_marked_as_lost():
    def values(card, step):
        yield ("block_rms", "block0", math.nan if card["status"] == "diverged" else 2.0)

    made = cards(**{WIDTH: (16, 32)})
    made[-1] |= {"status": "diverged", "diverged_at": 9, "final_val_loss": math.nan}
    left = FIGURES["block_output_with_size"](records(made, values)).axes[0]
    assert line(left)[1][1] == [2.0, 2.0]
    assert [list(mark.get_xdata()) for mark in left.get_lines() if mark.get_marker() == "^"] == [[12 * 2 * 32**2 + 32]]


def diamonds(axes):
    """Where a panel marks failing rates, and whether the marks are filled."""
    lines = [line for line in axes.get_lines() if line.get_marker() == "D" and line.get_transform() == axes.transData]
    return [(*map(float, line.get_xydata()[0]), line.get_fillstyle() == "full") for line in lines]


def test_failing_rates_are_marked_on_their_curves():
    """Half of the way from 2 to a unigram model's 4 is 3, which one arm passes halfway from 0.01 to 0.1."""
    losses = {("without", 1e-3): 2.0, ("without", 1e-2): 2.5, ("without", 1e-1): 3.5}
    made = cards(
        lrs=(1e-3, 1e-2, 1e-1),
        seeds=(0, 1, 2),
        intervention=("none", "qk_layernorm"),
        loss=lambda card: 2.0 if "qk" in card["intervention"] else losses["without", card[LR]],
    )
    figure = FIGURES["failing_learning_rate"](records([card | {"loss_unigram": 4.0} for card in made], everything))
    (fails, holds) = sorted(diamonds(figure.axes[0]))
    assert fails == (pytest.approx(10**-1.5), pytest.approx(math.sqrt(2.5 * 3.5)), True), "on a line of log by log"
    assert holds == (0.1, pytest.approx(2.0), False)
    assert {text.get_text() for text in figure.axes[0].texts} >= {"fails from 0.032", "not up to 0.1"}
    calm = [card | {"loss_unigram": 9.0} for card in made]
    with pytest.raises(NothingToDrawError):
        FIGURES["failing_learning_rate"](records(calm, everything))


def notice(made):
    figure = FIGURES["learning_rate_sensitivity"](records(made, lambda card, step: []))
    return [text.get_text() for text in figure.texts if "partial" in text.get_text()]


def test_a_partial_sweep_says_so_in_its_figures():
    made = cards(seeds=(0, 1, 2), lrs=(1e-3, 1e-2, 1e-1), intervention=("none", "qk_layernorm"), **{WIDTH: (16, 32)})
    assert notice(made) == []
    assert notice(made[:-2]) == ["partial: 34 of 36 runs"]
    lost = [card | {"status": "failed"} if card["seed"] == 2 else card for card in made]
    assert notice(lost) == ["partial: 24 of 36 runs"]


@pytest.mark.slow
def test_many_arms_along_a_setting_are_lines_of_one_panel():
    made = cards(**{EPS: (0.0, 1e-8, 1e-5, 1e-4, 1e-3)})
    assert len(FIGURES["learning_rate_sensitivity"](records(made, everything)).axes) == 2
    named = cards(**{"parametrization.name": ("a", "b", "c", "d", "e")})
    assert len(FIGURES["learning_rate_sensitivity"](records(named, everything)).axes) == 2
    named = cards(**{"parametrization.name": tuple("abcdefghijkl")})
    figure = FIGURES["learning_rate_sensitivity"](records(named, everything))
    assert len(figure.axes) == 13, "more arms than colours have a panel each"
    assert len({round(axes.get_position().y0, 3) for axes in figure.axes[:12]}) == 4, "in four rows"


def test_an_arm_has_one_look_whatever_sizes_it_has():
    made = planted.table([*cards(**{EPS: [1e-8], WIDTH: [64]}), *cards(**{EPS: [1e-6], WIDTH: [32]})])
    runs = judge(points(made))
    assert list(runs["arm"].unique()) == ["epsilon 1e-8", "epsilon 1e-6"]
    assert facets(made, runs).looks == panels.arm_looks(runs["arm"].unique())


def test_crossing_shapes_become_ways_to_grow():
    shapes = {(64, 2), (64, 4), (64, 8), (96, 2), (128, 2), (80, 3), (96, 4)}
    grid = cards(**{WIDTH: (64, 80, 96, 128), DEPTH: (2, 3, 4, 8)})
    made = [card for card in grid if (card[WIDTH], card[DEPTH]) in shapes]
    runs = ways_to_grow(planted.table(made), judge(points(planted.table(made))))
    sizes = runs.groupby("arm")["parameters"].unique().map(sorted).to_dict()
    n = {shape: 12 * shape[1] * shape[0] ** 2 + shape[0] for shape in shapes}
    assert sizes == {
        "with z-loss, wider": [n[64, 2], n[96, 2], n[128, 2]],
        "with z-loss, deeper": [n[64, 2], n[64, 4], n[64, 8]],
        "with z-loss, wider and deeper": [n[64, 2], n[80, 3], n[96, 4]],
    }
    assert len(runs) == 9 * 4
    assert runs.groupby(["curve", "lr", "seed"]).ngroups == len(runs)
