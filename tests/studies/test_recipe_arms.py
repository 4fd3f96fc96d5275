"""Arms of published recipes: what a scaled loss is to Adam, and the embedding's share of the gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import planted
import planted_claims
from lab.analysis import Records
from lab.analysis.drawing.registry import NothingToDrawError
from lab.core.axes import per_run_norm, per_run_rms
from lab.core.schema import stack
from lab.optim.links import Now
from lab.optim.optimizer import build_optimizer
from lab.report.all_figures import FIGURES
from pieces import CPU, intervention, model, recipe, tokens
from studies.architecture.effects import embedding_share
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.verdicts import judge_claim
from test_model import gradients


def path(loss_scale: float, eps: float, clip: float) -> Tensor:
    """Where AdamW leaves a vector whose gradients are those of a loss times a factor, some of them clipped."""
    chain = stack([build_optimizer({**recipe("optimizer", "adamw"), "eps": eps, "clip": clip})], CPU)
    weights = {"w": torch.ones(1, 7, dtype=torch.float64)}
    state, draws = chain.begin(weights), torch.Generator().manual_seed(0)
    for step in range(50):
        gradient = 0.5 * torch.randn(1, 7, generator=draws, dtype=torch.float64) * loss_scale
        chain.step({"w": gradient}, state, Now(torch.tensor(step), weights, torch.ones(1).double(), {"w": 1.0}))
    return weights["w"]


@pytest.mark.parametrize("eps", [1e-8, 1e-6])
def test_a_loss_times_1e_4_is_an_epsilon_times_1e4_to_adam(eps: float) -> None:
    """With clipping at as much less; without, gradients of the scaled loss would not be clipped."""
    expected = path(1e-4, eps, 1e-4)
    torch.testing.assert_close(path(1.0, 1e4 * eps, 1.0), expected, rtol=1e-12, atol=0)
    assert (path(1.0, eps, 1.0) - expected).abs().max() > 1e-6
    assert (path(1e-4, eps, 1.0) - expected).abs().max() > 1e-6


def shares_of(*names: str) -> tuple[float, float]:
    """The share of one model's gradient as its records give it, and as its tensors do."""
    made = model(0, changes={name: intervention(name) for name in names}, width=16, head_width=16)
    by_name = gradients(made, tokens(0))
    del by_name["loss"]
    card = planted.card(
        intervention="+".join(sorted(names)) or "none",
        parameters=sum(gradient.numel() for gradient in by_name.values()),
        parameters_without_embeddings=sum(
            gradient.numel() for name, gradient in by_name.items() if name not in ("embedding", "head")
        ),
    )
    rows = [
        (card["id"], 0, "grad_rms", "embedding", per_run_rms(by_name["embedding"]).item()),
        (card["id"], 0, "grad_norm_clipped", "", per_run_norm(by_name.values()).item()),
    ]
    (share,) = embedding_share(planted.records_of([card], rows))["value"]
    embedding = by_name.pop("embedding").norm().item()
    return share, embedding / math.hypot(*(gradient.norm().item() for gradient in by_name.values()))


@pytest.mark.parametrize(
    "names", [(), ("tied_head",), ("embedding_init", "learned_positions")], ids=["head of its own", "tied", "positions"]
)
def test_the_embeddings_share_is_its_gradients_norm_over_that_of_all_others(names: tuple[str, ...]) -> None:
    recorded, exact = shares_of(*names)
    assert recorded == pytest.approx(exact, rel=1e-6)


def test_a_share_is_not_a_number_where_no_other_weight_has_a_gradient() -> None:
    """Rounding can leave the whole norm below that of the embedding: then the remainder is negative, not small."""
    card = planted.card(parameters=40, parameters_without_embeddings=20)
    rows = [(card["id"], 0, "grad_rms", "embedding", 1.0), (card["id"], 0, "grad_norm_clipped", "", 3.0)]
    (share,) = embedding_share(planted.records_of([card], rows))["value"]
    assert math.isnan(share)


def shown(*interventions: str) -> Records:
    """Runs whose embedding has 20 of 29 parts of the squared gradient."""
    runs = [planted.card(intervention=name, seed=seed) for name in interventions for seed in (0, 1)]
    entries = (runs[0]["parameters"] - runs[0]["parameters_without_embeddings"]) / 2
    rows = [
        row
        for run in runs
        for step in range(0, 400, 25)
        for row in (
            (run["id"], step, "grad_rms", "embedding", math.sqrt(20 / entries)),
            (run["id"], step, "grad_norm_clipped", "", math.sqrt(29)),
        )
    ]
    return planted.records_of(runs, rows)


def test_the_figure_of_the_embeddings_gradient_shows_its_share() -> None:
    figure = FIGURES["embedding_gradient"](shown("embedding_init", "embedding_scale"))
    assert [axes.get_title() for axes in figure.axes[:2]] == ["with embedding-init", "with embedding-scale"]
    heights = [line.get_ydata() for axes in figure.axes for line in axes.get_lines() if len(line.get_xdata()) > 9]
    assert len(heights) == 2
    assert all(y == pytest.approx(math.sqrt(20 / 9), rel=1e-5) for y in heights)


def test_runs_whose_embedding_begins_as_usual_get_no_figure_of_its_gradient() -> None:
    with pytest.raises(NothingToDrawError, match="no run has embedding_scale or embedding_init"):
        FIGURES["embedding_gradient"](shown("z_loss", "qk_layernorm"))


def test_a_curve_that_moves_as_a_whole_widens_no_range() -> None:
    """As a larger epsilon that is nothing but a lower learning rate: best and lost rates are ten times as high."""
    runs = planted_claims.cards("decay_and_epsilon", dict.fromkeys(range(4), True))
    for run, _ in runs:
        factor = 10 if run["optimizer.eps"] > 1e-3 else 1
        shape = {"best": 1e-2 * factor, "low": 0.1, "cliff": 0.2 * factor}
        run["final_val_loss"] = planted_claims.loss(run["optimizer.lr"], **shape) + 1e-3 * run["seed"]
    folder = [Evidence("decay_and_epsilon", planted_claims.records(runs))]
    lost, width = (
        judge_claim(CLAIMS[name], folder)
        for name in ("a_larger_epsilon_raises_the_lost_rate", "a_larger_epsilon_widens_the_range")
    )
    assert (lost.verdict, lost.effect) == ("reproduced", pytest.approx(1, abs=0.1))
    assert (width.verdict, width.effect) == ("inconclusive", pytest.approx(0, abs=0.1))


def test_a_recipe_that_only_its_learning_rate_sets_apart_is_not_testable() -> None:
    """Either recipe falls fast and ends high at the higher rate; at equal rates the one that was taken ends higher."""
    runs = planted_claims.cards("recipe_arms", dict.fromkeys(range(3), True))
    claim, taken = CLAIMS["a_known_recipe_begins_higher_and_ends_lower"], "embedding_init"
    for run, _ in runs:
        high = run["optimizer.lr"] > 2e-2
        run["final_val_loss"] = 1.9 + 0.3 * high + 0.1 * (taken in run["intervention"]) + 0.01 * run["seed"]
    verdict = judge_claim(claim, [Evidence("recipe_arms", planted_claims.records(runs))])
    assert verdict.verdict == "not testable here"
    assert verdict.reason.startswith("the control shows no effect of intervention: at equal rates of 0.0")
