"""Each intervention computes its published formula, and changes nothing where the formula is the identity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lab import Predictions
from lab.core.hooks import HookPoint, listening
from lab.core.schema import stack
from lab.interventions.weights import spectral_norm
from lab.model.config import ModelConfig
from lab.model.layers import Layer
from lab.model.loss import losses
from lab.model.transformer import Transformer
from pieces import CPU, intervention, model, tokens, weights_of

CONFIG = ModelConfig("small", 8, 2, 4)


def made(*names: str, depth: int = 2, **numbers: Any) -> Transformer:
    return model(0, depth=depth, changes={name: intervention(name, **numbers) for name in names})


def part(name: str, kind: str, where: str = "block0", size: int = 8, heads: int = 0, **numbers: Any) -> nn.Module:
    """The module of one hook point in float64, its learned weights at their fixed initial values, or at zero."""
    module = intervention(name, **numbers).attach(HookPoint(kind, where, size, heads), 1, CONFIG)
    assert module is not None
    for layer in module.modules():
        if isinstance(layer, Layer):
            value = layer.fixed_value()
            layer.weight.data = torch.zeros(layer.weight.shape) if value is None else value.unsqueeze(0)
    return module.double()


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def measured(whole: Transformer, kind: str) -> list[Tensor]:
    """The tensors that pass the hook points of a kind."""
    seen: list[Tensor] = []
    with listening(lambda event, where, *values: seen.append(values[0].detach()) if event == kind else None):
        whole(tokens(0))
    return seen


@torch.no_grad()
def scaled(whole: Transformer, factor: float, *endings: str) -> Transformer:
    for name, weight in weights_of(whole).items():
        if name.endswith(endings):
            weight.mul_(factor)
    return whole


def same(one: Transformer, other: Transformer, tolerance: float = 1e-9) -> bool:
    return torch.allclose(one(tokens(0))[0], other(tokens(0))[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "kind", "cap", "x", "expected"),
    [("score_softcap", "scores", 50.0, 100.0, 48.20137900), ("logit_softcap", "logits", 30.0, 30.0, 22.84782467)],
)
def test_softcaps(name: str, kind: str, cap: float, x: float, expected: float) -> None:
    module = part(name, kind, cap=cap)
    capped = module(torch.tensor([[x, -x, 1e-3, 0.0]], dtype=torch.float64))[0]
    assert capped[:2].tolist() == pytest.approx([expected, -expected], rel=1e-9)
    assert capped[2] == pytest.approx(1e-3, rel=1e-8)  # the slope at 0 is 1
    wide = part(name, kind, cap=1e6)(drawn(1, 9))
    torch.testing.assert_close(wide, drawn(1, 9), rtol=1e-9, atol=0)


def test_rms_norm_is_layernorm_without_a_mean() -> None:
    x = drawn(1, 5, 8)
    centred = x - x.mean(-1, keepdim=True)
    norm = part("rmsnorm", "norm")
    torch.testing.assert_close(norm(centred), F.layer_norm(centred, (8,), eps=1e-6))
    torch.testing.assert_close(norm(1e3 * x), norm(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(1, 5, dtype=torch.float64), rtol=1e-5, atol=0)
    assert (norm(x) - F.layer_norm(x, (8,))).abs().max() > 0.01


def test_qk_rmsnorm_bounds_scores() -> None:
    whole = scaled(made("qk_rmsnorm"), 1e4, ".query", ".key")
    assert all(scores.abs().max() <= 2 + 1e-9 for scores in measured(whole, "scores"))
    assert measured(scaled(made(), 1e4, ".query", ".key"), "scores")[0].abs().max() > 2


def test_qk_rmsnorm_over_a_head_or_over_the_width() -> None:
    x_rbhtk, gain_d = drawn(1, 2, 2, 3, 4), drawn(8, seed=1)
    per_head = x_rbhtk / x_rbhtk.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    over_width = x_rbhtk / x_rbhtk.square().mean((2, 4), keepdim=True).add(1e-6).sqrt()
    norm = part("qk_rmsnorm", "key", size=4, heads=2, over="width")
    with torch.no_grad():
        next(norm.parameters()).copy_(gain_d)
    torch.testing.assert_close(norm(x_rbhtk), over_width * gain_d.view(2, 1, 4))
    for over, expected in (("head", per_head), ("width", over_width)):
        free = part("qk_rmsnorm", "key", size=4, heads=2, over=over, gain="none")
        assert not [*free.parameters()]
        torch.testing.assert_close(free(x_rbhtk), expected)


def test_qk_l2norm_bounds_scores_by_its_squared_gain() -> None:
    whole = made("qk_l2norm")
    scores = measured(whole, "scores")[0]
    assert scores.abs().max() <= 2 + 1e-9
    torch.testing.assert_close(measured(scaled(made("qk_l2norm"), -7.0, ".query"), "scores")[0], -scores)
    torch.testing.assert_close(measured(scaled(made("qk_l2norm"), 3.0, ".qk_l2norm"), "scores")[0], 9 * scores)
    q_tk, k_sk = (F.normalize(drawn(1, 1, 2, 3, 4, seed=seed), dim=-1) for seed in (1, 2))
    gained = part("qk_l2norm", "rotation", size=4)(7 * q_tk, 5 * k_sk, 0.5)
    torch.testing.assert_close(gained[0][..., :1, :], 2 * q_tk[..., :1, :])  # position 0 is not rotated
    torch.testing.assert_close(gained[1][..., :1, :], k_sk[..., :1, :])


def test_qkv_norm_is_blind_to_the_scale_of_its_matrices() -> None:
    endings = (".query", ".key", ".value")
    one, other = (scaled(made("qkv_norm"), factor, *endings) for factor in (1e3, 1e6))  # beyond the norms' epsilon
    assert same(one, other, 1e-6)
    assert not same(made(), scaled(made(), 50.0, *endings), 1e-2)
    gains = {name for name in weights_of(made("qkv_norm")) if name.endswith("_norm") and "attention." not in name}
    assert gains == {"block0.mlp_norm", "block1.mlp_norm", "final_norm"}


def test_without_positions_scores_do_not_depend_on_the_distance() -> None:
    one, other = torch.tensor([[[1, 2, 3, 4]]]), torch.tensor([[[1, 3, 2, 4]]])
    for name, alike in (("nope", True), (None, False)):
        whole = model(0, depth=1, changes={name: intervention(name)} if name else {})
        last = [whole(rows_rbt)[0][..., -1, :] for rows_rbt in (one, other)]
        assert torch.allclose(*last) == alike  # the last token sees a bag of the others


def test_positions_may_be_missing_in_every_so_many_blocks() -> None:
    whole = model(0, depth=4, changes={"nope": intervention("nope", every=2)})
    attached = [bool(block.attention.at_rotation.changes) for block in map(whole.get_submodule, whole.blocks)]
    assert attached == [False, True, False, True]


@pytest.mark.parametrize(("heads", "first", "last"), [(8, 1 / 2, 1 / 256), (4, 1 / 4, 1 / 256), (1, 1 / 256, 1 / 256)])
def test_alibi_lowers_scores_with_the_distance(heads: int, first: float, last: float) -> None:
    changed = intervention("alibi").attach(HookPoint("scores", "block0"), 1, ModelConfig("", 4 * heads, 1, 4))
    scores_rbhts = drawn(1, 2, heads, 5, 5)
    lowered_rbhts = changed(scores_rbhts)
    for t in range(5):
        for s in range(t + 1):
            torch.testing.assert_close(lowered_rbhts[:, :, 0, t, s], scores_rbhts[:, :, 0, t, s] - first * (t - s))
            torch.testing.assert_close(lowered_rbhts[:, :, -1, t, s], scores_rbhts[:, :, -1, t, s] - last * (t - s))
    q_tk, k_sk = drawn(1, 1, 1, 3, 4), drawn(1, 1, 1, 3, 4, seed=1)
    turned = part("alibi", "rotation", size=4)(q_tk, k_sk, 0.5)
    assert torch.equal(turned[0], q_tk / 2)
    assert torch.equal(turned[1], k_sk)


@pytest.mark.parametrize(("queries", "shared"), [(1, 1), (2, 2), (3, 2), (4, 4), (0, 4), (100, 4)])
def test_grouped_queries_share_keys_and_values(queries: int, shared: int) -> None:
    sizes: dict[str, Any] = {"width": 16, "head_width": 4}
    grouped = model(
        0, **sizes, changes={"grouped_query_attention": intervention("grouped_query_attention", queries=queries)}
    )
    plain = model(0, **sizes)
    with torch.no_grad():
        for name, weight in weights_of(plain).items():
            own = weights_of(grouped)[name]
            if name.endswith((".key", ".value")):  # neighbouring queries have equal columns
                assert own.shape == (1, 16, 16 // shared)
                own = torch.cat([head for head in own.split(4, dim=-1) for _ in range(shared)], dim=-1)
            weight.copy_(own)
    assert same(grouped, plain)
    assert shared == 1 or not same(grouped, model(0, **sizes))


def test_shared_keys_have_biases_and_norms_of_their_own_width() -> None:
    changes = {"biases": {}, "grouped_query_attention": {"queries": 0}, "qk_rmsnorm": {"over": "width"}}
    whole = model(0, width=16, changes={name: intervention(name, **numbers) for name, numbers in changes.items()})
    shapes = {name.removeprefix("block0.attention."): weight.shape[1:] for name, weight in weights_of(whole).items()}
    assert shapes["query.biases"] == (4, 1, 4)
    assert shapes["key.biases"] == shapes["value.biases"] == (1, 1, 4)
    assert (shapes["query.qk_rmsnorm.layer"], shapes["key.qk_rmsnorm.layer"]) == ((16,), (4,))
    assert whole(tokens(0))[0].isfinite().all()


def test_a_sink_is_a_key_whose_value_is_zero() -> None:
    scores = drawn(1, 2, 2, 5, 5)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    plain = torch.where(causal, scores, -torch.inf).softmax(-1)
    for name in ("attention_sink", "softmax_one"):
        weights = part(name, "weighing")(scores)
        exponents = torch.where(causal, scores.exp(), 0.0)
        torch.testing.assert_close(weights, exponents / (1 + exponents.sum(-1, keepdim=True)))
    sink = part("attention_sink", "weighing")
    with torch.no_grad():
        sink.weight.fill_(-torch.inf)
    torch.testing.assert_close(sink(scores), plain)


def test_sigmoid_attention() -> None:
    weights = part("sigmoid_attention", "weighing")(drawn(1, 2, 2, 5, 5))
    expected = torch.where(torch.ones(5, 5, dtype=torch.bool).tril(), 1 / (1 + 5 * (-drawn(1, 2, 2, 5, 5)).exp()), 0.0)
    torch.testing.assert_close(weights, expected)


def test_a_gate_of_zero_weights_halves_attention() -> None:
    gated = scaled(made("attention_gate"), 0.0, ".attention_gate")
    halved = scaled(made(), 0.5, ".attention.output")
    assert same(gated, halved)
    assert not same(made("attention_gate"), halved, 1e-3)


@pytest.mark.parametrize("name", ["peri_ln", "reordered_norm"])
def test_norms_after_a_branch_take_its_scale_away(name: str) -> None:
    endings = (".attention.output", ".mlp_down")
    one, other = (scaled(made(name), factor, *endings) for factor in (1e3, 1e6))  # beyond the norms' epsilon
    assert same(one, other, 1e-6)
    assert not same(made(), scaled(made(), 50.0, *endings), 1e-2)


def test_reordered_norm() -> None:
    x, branch, norm = drawn(1, 2, 3, 8), lambda x: x.square(), lambda x: x / 2
    torch.testing.assert_close(part("reordered_norm", "residual")(x, branch, norm), x + x.square() / 2)


def test_parallel_blocks_have_one_norm_and_add_both_branches() -> None:
    block, x_rbtd = dict(made("parallel_blocks").named_modules())["block1"], drawn(1, 2, 3, 8)
    with torch.no_grad():
        block.attention_norm.weight.copy_(drawn(1, 8, seed=1))  # type: ignore[operator,union-attr]
    normed_rbtd = F.layer_norm(x_rbtd, (8,), eps=1e-6) * drawn(8, seed=1)
    expected_rbtd = x_rbtd + block.attention(normed_rbtd)  # type: ignore[operator]
    hidden_rbtm = F.gelu(normed_rbtd @ block.mlp_up.weight[0], approximate="tanh")  # type: ignore[index,union-attr]
    expected_rbtd = expected_rbtd + hidden_rbtm @ block.mlp_down.weight[0]  # type: ignore[index,union-attr]
    torch.testing.assert_close(block(x_rbtd), expected_rbtd)
    assert not hasattr(block, "mlp_norm")


def test_norms_after_branches_may_be_rms_norms() -> None:
    x_rbtd = drawn(1, 2, 3, 8)
    expected = x_rbtd / x_rbtd.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(part("peri_ln", "mlp_output", norm="rmsnorm")(x_rbtd), expected)


def test_norms_without_a_gain_or_with_a_bias() -> None:
    x = drawn(1, 5, 8)
    torch.testing.assert_close(part("norm_without_gain", "norm")(x), F.layer_norm(x, (8,), eps=1e-6))
    expected = x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    torch.testing.assert_close(part("norm_without_gain", "norm", norm="rmsnorm")(x), expected)
    biased = part("norm_biases", "norm")
    torch.testing.assert_close(biased(x), F.layer_norm(x, (8,), eps=1e-6))  # the bias begins at zero
    with torch.no_grad():
        for weight, seed in zip(biased.parameters(), (1, 2), strict=True):
            weight.copy_(drawn(8, seed=seed))
    torch.testing.assert_close(biased(x), F.layer_norm(x, (8,), drawn(8, seed=1), drawn(8, seed=2), eps=1e-6))


def test_a_gain_may_be_one_plus_a_weight() -> None:
    x, norm = drawn(1, 5, 8), part("rmsnorm", "norm", offset=1.0)
    expected = x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()
    assert next(norm.parameters()).eq(0).all()
    torch.testing.assert_close(norm(x), expected)
    with torch.no_grad():
        next(norm.parameters()).copy_(drawn(8, seed=1))
    torch.testing.assert_close(norm(x), expected * (1 + drawn(8, seed=1)))


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        ("all", {"query", "key", "value", "attention_output", "mlp_up", "mlp_output"}),
        ("qkv", {"query", "key", "value"}),
        ("not_qkv", {"attention_output", "mlp_up", "mlp_output"}),
    ],
)
def test_biases_of_some_layers(layers: str, parts: set[str]) -> None:
    names = [name.split(".")[-2] for name in weights_of(made("biases", depth=1, layers=layers)) if "biases" in name]
    assert set(names) == parts


def test_ln_scaling_divides_by_the_root_of_the_block() -> None:
    assert same(made("ln_scaling", depth=1), made(depth=1))
    first, second = (measured(whole, "query") for whole in (made(), made("ln_scaling")))
    torch.testing.assert_close(first[0], second[0])
    norms = dict(made("ln_scaling").named_modules())
    x = drawn(1, 2, 3, 8)
    expected = F.layer_norm(x, (8,), eps=1e-6)
    torch.testing.assert_close(norms["block1.mlp_norm"](x), expected / math.sqrt(2))
    torch.testing.assert_close(norms["final_norm"](x), expected)


def test_dynamic_tanh() -> None:
    x = drawn(1, 3, 8)
    torch.testing.assert_close(part("dyt", "norm", alpha=0.5)(x), torch.tanh(0.5 * x))


@pytest.mark.parametrize("name", ["rezero", "zero_init_projections"])
def test_blocks_begin_as_the_identity(name: str) -> None:
    whole = made(name)
    first, second = measured(whole, "block_output")
    embedded = whole.embedding(tokens(0))
    assert torch.equal(first, embedded)
    assert torch.equal(second, embedded)


def test_scales_of_branches() -> None:
    assert same(made("layerscale", init=1.0), made())
    assert same(made("depth_scaling", base_depth=1), scaled(made(), 0.5, ".attention.output", ".mlp_down"))
    assert same(made("layerscale", init=0.5), scaled(made(), 0.5, ".attention.output", ".mlp_down"))


def test_activations() -> None:
    x, inputs = drawn(1, 2, 3, 8), drawn(1, 2, 3, 8, seed=1)
    torch.testing.assert_close(part("relu2", "activation")(x), torch.where(x > 0, x * x, 0.0))
    gate = part("swiglu", "mlp_gate")
    with torch.no_grad():
        gate.weight.copy_(drawn(1, 8, 8, seed=2))
    opened = inputs @ gate.weight[0]
    torch.testing.assert_close(gate(x, inputs), x * opened * torch.sigmoid(opened))
    other = part("swiglu", "mlp_gate", gate="gelu")
    with torch.no_grad():
        next(other.parameters()).copy_(drawn(1, 8, 8, seed=2))
    torch.testing.assert_close(other(x, inputs), x * F.gelu(opened, approximate="tanh"))
    gate.limit = 0.1
    clamped = opened.clamp(max=0.1)
    torch.testing.assert_close(gate(x, inputs), x.clamp(-0.1, 0.1) * clamped * torch.sigmoid(clamped))


def test_swiglu_is_clamped_as_in_deepseek_v4_and_by_an_infinite_limit_not_at_all() -> None:
    entry = stack([intervention("swiglu", limit=limit) for limit in (10.0, math.inf)], CPU)
    gate = entry.attach(HookPoint("mlp_gate", "block0", 8, 0), 2, CONFIG)
    assert gate is not None
    gate.double()
    weight_rdm = drawn(2, 8, 8, seed=2)
    with torch.no_grad():
        next(gate.parameters()).copy_(weight_rdm)
    linear, inputs = (6 * drawn(2, 1, 4, 8, seed=seed).requires_grad_() for seed in (0, 1))
    made = gate(linear, inputs)
    by_linear, by_inputs = torch.autograd.grad(made.sum(), (linear, inputs))
    with torch.no_grad():
        opened = inputs @ weight_rdm[:, None]
        assert all((beyond > 10).any() for beyond in (linear[0], -linear[0], opened[0], -opened[0]))
        held, least = linear[0].clamp(-10, 10), opened[0].clamp(max=10)
        share = 1 / (1 + (-least).exp())
        slope = torch.where(opened[0] < 10, held * (share + least * share * (1 - share)), 0.0)
        torch.testing.assert_close(made[0], held * least * share)
        torch.testing.assert_close(by_linear[0], torch.where(linear[0].abs() < 10, least * share, 0.0))
        torch.testing.assert_close(by_inputs[0], slope @ weight_rdm[0].T)
        assert torch.equal(made[1], linear[1] * F.silu(opened[1]))


def test_a_head_of_zeros_is_uniform_and_blocks_get_no_gradient() -> None:
    whole, rows_rbt = made("head_init", std=0.0), tokens(0)
    loss_r, _ = losses(whole(rows_rbt[..., :-1])[0], rows_rbt[..., 1:], {})
    assert loss_r.tolist() == pytest.approx([math.log(11)], rel=1e-12)
    weights = weights_of(whole)
    gradients = dict(zip(weights, torch.autograd.grad(loss_r.sum(), list(weights.values())), strict=True))
    assert gradients["head"].abs().max() > 0
    assert all(gradient.eq(0).all() for name, gradient in gradients.items() if name != "head")


def test_small_initial_values() -> None:
    whole = model(*range(8), width=32, depth=2, head_width=8, changes={"small_init": intervention("small_init")})
    small = math.sqrt(2 / (5 * 32))
    for name, weight in weights_of(whole).items():
        if not name.endswith("norm"):
            expected = small / 2 if name.endswith((".output", ".mlp_down")) else small
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name


@pytest.mark.parametrize(
    ("name", "numbers", "inside", "back"),
    [
        ("small_init", {"std": 0.02}, 0.02, 0.02 / 2),
        ("small_init", {"std": 0.006, "projections_back": "same"}, 0.006, 0.006),
        ("small_init", {"projections_back": "same"}, math.sqrt(2 / (5 * 32)), math.sqrt(2 / (5 * 32))),
        ("deepnorm", {"init": "xavier"}, math.sqrt(2 / (32 + 128)) / 2, math.sqrt(2 / (32 + 128)) / 2),
    ],
)
def test_published_initial_values(name: str, numbers: dict[str, Any], inside: float, back: float) -> None:
    """Of the MLP of two blocks: 2 is the root of twice the depth."""
    whole = model(*range(8), width=32, depth=2, head_width=8, changes={name: intervention(name, **numbers)})
    weights = weights_of(whole)
    assert weights["block1.mlp_up"].std().item() == pytest.approx(inside, rel=0.05)
    assert weights["block1.mlp_down"].std().item() == pytest.approx(back, rel=0.05)


def test_biases_begin_at_zero_whatever_the_other_initial_values() -> None:
    whole = made("biases", "norm_biases", "small_init")
    biases = {name: weight for name, weight in weights_of(whole).items() if "biases" in name and "gain" not in name}
    assert len(biases) == 2 * 6 + 5
    assert all(weight.eq(0).all() for weight in biases.values())


def test_a_tied_head_may_leave_logits_unscaled() -> None:
    hidden, table = drawn(1, 2, 3, 8), drawn(1, 11, 8, seed=1)
    for scale, factor in (("none", 1.0), ("inverse_root", 8**-0.5)):
        logits = part("tied_head", "readout", scale=scale)(hidden, table, None)
        torch.testing.assert_close(logits, factor * hidden @ table[0].T)


def test_ngpt_stays_on_the_unit_sphere() -> None:
    entry, whole = intervention("ngpt"), made("ngpt")
    with torch.no_grad():
        for name, weight in weights_of(whole).items():
            weight.add_(0.3 * drawn(*weight.shape, seed=len(name)))
        entry.after_update(weights_of(whole))
    for hidden in measured(whole, "block_output"):
        torch.testing.assert_close(hidden.norm(dim=-1), torch.ones(hidden.shape[:-1], dtype=torch.float64))
    axes = {"embedding": -1, "attention.output": -1, "mlp_down": -1, "attention.query": -2, "mlp_up": -2, "head": -2}
    for ending, axis in axes.items():
        for name, weight in weights_of(whole).items():
            if name.endswith(ending):
                norms = weight.norm(dim=axis)
                torch.testing.assert_close(norms, torch.ones_like(norms))


def test_a_branch_of_ngpt_moves_by_alpha_along_the_sphere() -> None:
    h, unit = F.normalize(drawn(1, 2, 3, 8), dim=-1), lambda x: F.normalize(x, dim=-1)
    moved = part("ngpt", "residual")(h, torch.square, unit)
    torch.testing.assert_close(moved, unit(h + 0.05 * (unit(h.square()) - h)))
    backwards = part("ngpt", "residual")
    backwards.weight.data.neg_()  # of alpha the magnitude counts
    assert torch.equal(backwards(h, torch.square, unit), moved)


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_spectral_norm_is_the_largest_singular_value(shape: tuple[int, ...]) -> None:
    weight = drawn(*shape).requires_grad_()
    sigma = spectral_norm(weight)
    torch.testing.assert_close(sigma.flatten(), torch.linalg.svdvals(weight)[:, 0], rtol=1e-3, atol=0)
    (ours,) = torch.autograd.grad(sigma.sum(), weight)
    left, _, right = torch.linalg.svd(weight)
    theirs = left[:, :, :1] @ right[:, :1]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.05)


def test_sigma_reparam_divides_a_matrix_of_zeros_by_one() -> None:
    module, weight = part("sigma_reparam", "weight"), torch.cat([torch.zeros(1, 4, 6), torch.ones(1, 4, 6)]).double()
    for tiny in (0.0, 1e-170, 1e-300):  # of which the squares are 0
        weight[0, 1, 2] = tiny
        leaf = weight.clone().requires_grad_()
        out = module(leaf)
        begins = 1 + math.sqrt(6 / 4)
        torch.testing.assert_close(out[0], begins * weight[0])
        torch.testing.assert_close(out[1], begins * weight[1] / math.sqrt(24))
        (gradient,) = torch.autograd.grad(out[0].sum(), leaf)
        torch.testing.assert_close(gradient[0], torch.full_like(gradient[0], begins))
    assert module(weight * torch.nan).isnan().all()  # a run that has diverged stays so


def test_magnitude_and_direction_of_a_fused_matrix_are_trained_apart() -> None:
    """Against algorithm 2 of Hägele et al. 2026, which splits the gradient of the product at each step."""
    width, shape = 4, (4, 6)  # inputs, outputs
    entry = intervention("magnitude_direction")
    module = entry.attach(HookPoint("weight", "block0", shape[1], inputs=shape[0]), 1, CONFIG)
    assert module is not None
    module.double()
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Layer)}
    for layer in layers.values():
        layer.weight.data = layer.fixed_value().unsqueeze(0)  # type: ignore[union-attr]
    weight = drawn(1, *shape).requires_grad_()
    weights = {"embedding": drawn(1, 9, width), "block0.attention.query": weight}
    with torch.no_grad():
        entry.after_update(weights)
    torch.testing.assert_close(module(weight), weight)
    optimizer = torch.optim.Adam([weight, *module.parameters()], lr=0.1)

    fused, radius = weight.detach()[0].clone(), math.sqrt(shape[0] * shape[1] / width)
    raws = {
        name: torch.full((size,), math.log(math.e - 1), dtype=torch.float64)
        for name, size in zip("io", shape, strict=True)
    }
    moments = {
        name: (torch.zeros(size).double(),) * 2 for name, size in (("W", shape), ("i", shape[0]), ("o", shape[1]))
    }
    assert radius == pytest.approx(fused.norm().item())

    def adam(name: str, value: Tensor, gradient: Tensor, step: int) -> Tensor:
        mean, square = moments[name]
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient**2
        moments[name] = mean, square
        return value - 0.1 * mean / (1 - 0.9**step) / ((square / (1 - 0.999**step)).sqrt() + 1e-8)

    for step in range(1, 6):
        gradient = drawn(*shape, seed=step)
        optimizer.zero_grad()
        (module(weight)[0] * gradient).sum().backward()
        optimizer.step()
        with torch.no_grad():
            entry.after_update(weights)
        by_input, by_output = F.softplus(raws["i"])[:, None], F.softplus(raws["o"])
        direction = fused / by_input / by_output
        of_input, of_output = (direction * gradient * by_output).sum(1), (direction * gradient * by_input).sum(0)
        direction = adam("W", direction, gradient * by_input * by_output, step)
        direction = direction * radius / direction.norm()
        raws["i"] = adam("i", raws["i"], of_input * torch.sigmoid(raws["i"]), step)
        raws["o"] = adam("o", raws["o"], of_output * torch.sigmoid(raws["o"]), step)
        fused = F.softplus(raws["i"])[:, None] * direction * F.softplus(raws["o"])
        torch.testing.assert_close(module(weight)[0].detach(), fused, rtol=1e-9, atol=1e-12)


def test_directions_keep_their_norm_and_start_near_it() -> None:
    wide = model(
        0, width=64, depth=1, head_width=16, changes={"magnitude_direction": intervention("magnitude_direction")}
    )
    before = {name: weight.detach().clone() for name, weight in weights_of(wide).items()}
    with torch.no_grad():
        intervention("magnitude_direction").after_update(weights_of(wide))
    moved = {name for name, weight in weights_of(wide).items() if not torch.equal(weight, before[name])}
    matrices = {name for name, weight in before.items() if weight.ndim == 3 and name.startswith("block")}
    assert moved == matrices
    assert len(matrices) == 6
    for name in matrices:
        after = weights_of(wide)[name]
        assert after.norm().item() == pytest.approx(math.sqrt(after.numel() / 64))
        assert before[name].norm().item() == pytest.approx(after.norm().item(), rel=0.05)


def test_sigma_reparam_is_blind_to_scale() -> None:
    assert same(made("sigma_reparam"), scaled(made("sigma_reparam"), 20.0, ".query", ".value", ".output", ".mlp_up"))
    wide = model(0, width=64, depth=1, head_width=16, changes={"sigma_reparam": intervention("sigma_reparam")})
    matrix = wide.block0.mlp_up.matrix()
    torch.testing.assert_close(matrix, wide.block0.mlp_up.weight, rtol=0.1, atol=0)


def test_label_smoothing_and_max_z_loss() -> None:
    logits, targets = drawn(1, 2, 3, 5), torch.tensor([[[0, 4, 2], [1, 1, 3]]])
    terms = {"label_smoothing": intervention("label_smoothing", amount=0.3)}
    loss_r, _ = losses(logits, targets, terms)
    expected = F.cross_entropy(logits.view(-1, 5), targets.view(-1), label_smoothing=0.3)
    torch.testing.assert_close(loss_r[0], expected)
    term = intervention("max_z_loss", coefficient=2.0)
    predictions = Predictions(logits, *(torch.empty(0),) * 3)
    torch.testing.assert_close(term(predictions), 2 * logits.max(-1).values ** 2)
