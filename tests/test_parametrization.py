"""What each parametrization makes of a weight's scale, learning rate and attention, and that none moves the base."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab import Fleet, Role, Standard
from lab.core.hooks import listening
from lab.core.registry import PARAMETRIZATIONS
from lab.model.layers import Linear, draw
from lab.model.parametrization import MuPFull
from pieces import recipe
from small import configs, trained

BASE = 16  # the width of a small model
# From the paper's table: LR of linear layers, std of the head, at twice the base width relative to standard; what
# multiplies the scores of heads 8 wide; std of the queries.
TABLE = {
    "standard": (1.0, 1.0, 8**-0.5, 1.0),
    "inverse_head_width": (1.0, 1.0, 1 / 8, 1.0),
    "mup_simple": (0.5, 1.0, 8**-0.5, 1.0),
    "mup_intermediate": (0.5, 0.5**0.5, 8**-0.5, 1.0),
    "mup_full": (0.5, 0.5**0.5, 1 / 8, 0.0),
}


def wanted(name: str, base: int = BASE) -> tuple[str, ...]:
    shared = (f"parametrization={name}",)
    return (
        (*shared, f"parametrization.base_width={base}") if "base_width" in recipe("parametrization", name) else shared
    )


def rows(name: str, base: int = BASE) -> str:
    """All that is recorded of two short runs, to the last bit."""
    return repr([run[1] for run in trained(configs("seed=0", "seed=1", shared=wanted(name, base)))])


@pytest.fixture(scope="module")
def standard() -> str:
    return rows("standard")


@pytest.mark.parametrize("name", ["mup_simple", pytest.param("mup_intermediate", marks=pytest.mark.slow)])
def test_at_the_base_width_mup_trains_as_standard_bit_for_bit(name: str, standard: str) -> None:
    assert rows(name) == standard
    assert rows(name, BASE // 2) != standard


def test_full_mup_is_standard_at_the_base_width_but_for_attention(
    standard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rows("mup_full") != standard
    monkeypatch.setattr(MuPFull, "attention_scale", Standard.attention_scale)
    assert rows("mup_full") != standard
    factors = MuPFull.factors
    monkeypatch.setattr(
        MuPFull, "factors", lambda own, role, *sizes: factors(own, Role.MATRIX if role is Role.QUERY else role, *sizes)
    )
    assert rows("mup_full") == standard


def test_every_parametrization_has_its_row() -> None:
    assert set(TABLE) == set(PARAMETRIZATIONS)


@pytest.mark.parametrize("name", TABLE)
def test_at_twice_the_base_width_each_factor_is_the_tables(name: str) -> None:
    lr, head, _, query = TABLE[name]
    fleet = Fleet(configs("", shared=("model.width=32", "probes=none", *wanted(name))))
    start = Fleet(configs("", shared=("model.width=32", "probes=none"))).state.weights
    for key, weight in fleet.state.weights.items():
        assert fleet.step_function.lr_factor[key] == (1.0 if key == "embedding" or "norm" in key else lr), key
        part = head if key == "head" else query if key.endswith("attention.query") else 1.0
        torch.testing.assert_close(weight, start[key] * part, rtol=1e-6, atol=0, msg=key)


def test_curvature_is_measured_along_the_step_that_is_made() -> None:
    """At twice the base width, where the learning rate of linear layers is half that of the others."""
    shared = ("probes.names=[update_curvature]", "probes.every=1", "optimizer.weight_decay=0", "schedule.warmup=0")
    fleet = Fleet(configs("", shared=(*wanted("mup_simple", BASE // 2), *shared)), torch.float64)
    weights, slice_rbt = fleet.state.weights, fleet.evaluation.slice().unsqueeze(0)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    curvature_r = fleet.step(0)["update_curvature", ""]
    gradients, after = (fleet.step_function.gradients_of(each, slice_rbt)[0] for each in (before, weights))
    steps = {name: before[name] - weights[name] for name in weights}
    bend = sum((step * (gradients[name] - after[name])).sum() for name, step in steps.items())
    slope = sum((step * fleet.state.links["adam"][f"mean.{name}"]).sum() for name, step in steps.items())
    torch.testing.assert_close(curvature_r[0], bend / slope / 38, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", TABLE)
def test_scores_are_products_of_queries_and_keys_times_the_scale(name: str) -> None:
    fleet = Fleet(configs("", shared=("intervention=[]", *wanted(name))))
    fleet.state.weights["block0.attention.query"].data.normal_(generator=torch.Generator().manual_seed(0))
    heard: dict[tuple[str, str], Tensor] = {}
    with listening(lambda kind, where, *values: heard.update({(kind, where): values[0].detach()})):
        fleet.model(fleet.feed.loader.batch(0))
    query, key, scores = (heard[kind, "block0"] for kind in ("query", "key", "scores"))
    # a token's query and key are turned by the same angle
    torch.testing.assert_close(scores.diagonal(dim1=-2, dim2=-1), TABLE[name][2] * (query * key).sum(-1))


def test_a_weight_that_starts_at_nothing_is_drawn_as_nothing() -> None:
    assert torch.equal(draw(Linear(1, 4, 6, None, Role.QUERY), "query", 0, 0.0), torch.zeros(4, 6, dtype=torch.float64))


@pytest.mark.parametrize("intervention", ["[]", "[qk_layernorm]"])
def test_queries_that_start_at_nothing_learn(intervention: str) -> None:
    fleet = Fleet(configs("", shared=(*wanted("mup_full"), f"intervention={intervention}")))
    query = fleet.state.weights["block0.attention.query"]
    assert query.count_nonzero() == 0
    for step in range(3):
        fleet.step(step)
    assert query.isfinite().all()
    assert query.ne(0).all()
