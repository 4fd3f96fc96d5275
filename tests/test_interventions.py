"""What is attached to the model does what its formula says, of every run apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab import Fleet, HookIntervention, RunConfig, run_config
from lab.core.hooks import HookPoint, listening
from lab.core.registry import INTERVENTIONS, PARAMETRIZATIONS
from lab.model import low_precision
from lab.model.config import ModelConfig
from lab.model.layers import Operands
from lab.records import store
from lab.sweeping.cautions import find_cautions
from lab.training.building import FORMATS, operand_format
from lab.training.identity import columns
from pieces import intervention, model, recipe, tokens, weights_of
from small import configs, tree
from test_model import companies
from tests import reference

HOOKED = [name for name in INTERVENTIONS if issubclass(INTERVENTIONS[name], HookIntervention)]


def inside(made: Any, rows_rbt: Tensor) -> dict[str, list[Any]]:
    """What is announced on the way, by kind."""
    heard: dict[str, list[Any]] = {}
    with listening(lambda kind, where, *tensors: heard.setdefault(kind, []).append(tensors)):
        made(rows_rbt)
    return heard


def test_layernorm_over_the_model_width_sees_all_heads_at_once() -> None:
    changed = {"qk_layernorm_model": intervention("qk_layernorm_model")}
    made, rows_rbt = model(0, depth=1, changes=changed), tokens(0)
    with torch.no_grad():
        for name, weight in weights_of(made).items():
            if "qk_layernorm_model" in name:
                weight.copy_(1 + torch.arange(8, dtype=torch.float64) / 8)  # a gain per place, not per head
    q_rbhtk, raw_rbhtk = (inside(m, rows_rbt)["query_key"][0][0] for m in (made, model(0, depth=1)))
    gain = 1 + torch.arange(8, dtype=torch.float64) / 8
    for t in range(rows_rbt.shape[-1]):
        whole = unturned(raw_rbhtk)[0, 0, :, t].flatten()
        expected = reference.layer_norm(whole, gain)
        torch.testing.assert_close(unturned(q_rbhtk)[0, 0, :, t].flatten(), expected)


def unturned(q_rbhtk: Tensor) -> Tensor:
    """Queries before their positions turned them and their scale shrank them."""
    length, size = q_rbhtk.shape[-2:]
    angle = torch.arange(length)[:, None] / 10000.0 ** (2 * torch.arange(size // 2, dtype=torch.float64) / size)
    turned = torch.complex(*q_rbhtk.chunk(2, dim=-1)) * torch.exp(-1j * angle)
    return torch.cat([turned.real, turned.imag], dim=-1) * math.sqrt(size)


def test_pointwise_attention_is_squared_relu_over_a_root() -> None:
    made = model(0, changes={"pointwise_attention": intervention("pointwise_attention")})
    heard = inside(made, tokens(0))
    for (scores_rbhts,), (weights_rbhts,) in zip(heard["scores"], heard["attention"], strict=True):
        length = scores_rbhts.shape[-1]
        for t in range(length):
            past = scores_rbhts[..., t, : t + 1]
            expected = torch.where(past > 0, past**2, 0.0) / math.sqrt(length)
            torch.testing.assert_close(weights_rbhts[..., t, : t + 1], expected)
            assert weights_rbhts[..., t, t + 1 :].eq(0).all()


@pytest.fixture(scope="module")
def formats() -> dict[str, Operands | None]:
    """How products round by default in each precision."""
    precisions = [*FORMATS, "mantissa mantissa_bits=5", *low_precision.PRECISIONS]
    return dict(
        zip(precisions, map(operand_format, configs(*(f"precision={each}" for each in precisions))), strict=True)
    )


@pytest.mark.parametrize("names", [(), *companies(HOOKED)], ids=lambda names: names[0] if names else "nothing")
def test_no_token_sees_the_future_in_any_precision(
    names: tuple[str, ...], formats: dict[str, Operands | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the largest entry of an operand, which fp8 and NVFP4 take over all tokens at once."""
    monkeypatch.setattr(low_precision, "magnitude", lambda x_r: x_r.new_full(x_r.shape[:1], 8.0))
    changes = {name: intervention(name) for name in names}
    rows_rbt, known = tokens(0), 4
    other_rbt = rows_rbt.clone()
    other_rbt[..., known:] = (other_rbt[..., known:] + 1) % 11
    for precision, operands in formats.items():
        made = model(0, depth=1, changes=changes, operands=operands, dtype=torch.float32)
        one_rbtv, other_rbtv = made(rows_rbt)[0], made(other_rbt)[0]
        assert torch.equal(one_rbtv[..., :known, :], other_rbtv[..., :known, :]), precision
        assert not torch.equal(one_rbtv[..., known:, :], other_rbtv[..., known:, :]), precision


def test_interventions_build_a_module_at_each_hook_point() -> None:
    config = ModelConfig("small", 8, 2, 4)
    for name in HOOKED:
        entry = intervention(name)
        for kind in entry.hook_points:
            module = entry.attach(HookPoint(kind, "block0.attention", 4), 2, config)
            assert isinstance(module, nn.Module), f"{name} at {kind}"


def config_of(parametrization: str, *names: str, precision: str = "fp32") -> RunConfig:
    """A run with these interventions, small enough for milliseconds."""
    size = ("model.depth=1", "model.width=8", "model.head_width=4", "seq_len=6", "batch_size=2")
    values = recipe("parametrization", parametrization)
    if "base_width" in values:
        values["base_width"] = 8
    needed = {other for name in names for other in getattr(INTERVENTIONS[name], "requires", ())}
    changes = {name: recipe("intervention", name)[name] for name in (*names, *needed)}
    usual = tree(*size, "probes=none", "steps=2", "schedule.warmup=0")
    return run_config(usual | {"parametrization": values, "intervention": changes, "precision": precision})


def after_first_steps(config: RunConfig) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights before and after two steps."""
    fleet = Fleet([config])
    before = {name: weight.clone() for name, weight in fleet.state.weights.items()}
    for step in range(2):
        fleet.step(step)
    return before, fleet.state.weights


LATER_FIELDS = {
    "intervention.biases.layers": "qkv",
    "intervention.deepnorm.init": "xavier",
    "intervention.nope.every": 4,
    "intervention.norm_without_gain.norm": "rmsnorm",
    "intervention.peri_ln.norm": "rmsnorm",
    "intervention.qk_rmsnorm.gain": "none",
    "intervention.qk_rmsnorm.over": "width",
    "intervention.rmsnorm.offset": 1.0,
    "intervention.small_init.projections_back": "same",
    "intervention.small_init.std": 0.02,
    "intervention.swiglu.gate": "gelu",
    "intervention.tied_head.scale": "none",
}


@pytest.mark.slow
def test_ids_of_older_runs_know_nothing_of_later_fields() -> None:
    assert {key for key in store.DEFAULTS if key.startswith("intervention.")} == LATER_FIELDS.keys()
    for key, value in LATER_FIELDS.items():
        name = key.split(".")[1]
        usual, other = configs(f"intervention=[{name}]", f"intervention=[{name}] {key}={value}")
        assert key not in columns(usual)
        assert columns(other)[key] == value


@pytest.mark.parametrize("parametrization", list(PARAMETRIZATIONS))
def test_first_steps_are_finite_with_every_intervention(parametrization: str) -> None:
    for names in companies(list(INTERVENTIONS)):
        _, weights = after_first_steps(config_of(parametrization, *names))
        assert all(weight.isfinite().all() for weight in weights.values()), names


@pytest.mark.parametrize("name", list(INTERVENTIONS))
def test_queries_that_begin_at_zero_learn_with_every_intervention(name: str) -> None:
    """In fp16, in which a gradient of 1e5 is infinite; with one exception, which is cautioned against."""
    config = config_of("mup_full", name, precision="fp16_emulated")
    before, weights = after_first_steps(config)
    query = "block0.attention.query"
    assert before[query].eq(0).all() == (name not in ("small_init", "magnitude_direction"))
    assert all(weight.isfinite().all() for weight in weights.values())
    assert weights[query].eq(0).all() == (name == "pointwise_attention")
    cautioned = any("attends to nothing in 1 of 1 runs" in line for line in find_cautions([config]))
    assert cautioned == (name == "pointwise_attention")


@pytest.mark.parametrize("name", ["small_init", "magnitude_direction"])
def test_nobody_is_cautioned_about_queries_that_are_drawn(name: str) -> None:
    config = config_of("mup_full", "pointwise_attention", name)
    _, weights = after_first_steps(config)
    assert weights["block0.attention.query"].ne(0).any()
    assert not any("attends to nothing" in line for line in find_cautions([config]))
