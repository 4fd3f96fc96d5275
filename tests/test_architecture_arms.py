"""The architecture's arms do exactly what algebra says of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lab import Fleet, per_run_rms
from lab.core.hooks import listening
from lab.interventions.blocks import HeadGain
from lab.interventions.embedding import sinusoids
from lab.model.layers import LayerNorm
from lab.model.transformer import Transformer
from lab.optim.links import Now
from lab.optim.links.clipping import ShrinkEmbedding
from pieces import intervention, model, tokens, weights_of
from small import configs
from test_model import gradients

WIDE = {"width": 64, "head_width": 16, "vocabulary": 101}


def changed(*names: str, **sizes: Any) -> Transformer:
    return model(0, changes={name: intervention(name) for name in names}, **sizes)


def heard(made: Transformer, rows_rbt: Tensor) -> dict[tuple[str, str], Tensor]:
    """The first tensor of every announcement, by kind and place."""
    values: dict[tuple[str, str], Tensor] = {}
    with torch.no_grad(), listening(lambda kind, where, *tensors: values.__setitem__((kind, where), tensors[0])):
        made(rows_rbt)
    return values


@pytest.mark.parametrize("alpha", [0.125, 0.1])
def test_a_shrunk_embedding_gradient_is_alpha_times_the_whole(alpha: float) -> None:
    factor_r = torch.tensor([alpha], dtype=torch.float64)
    shrink = type(intervention("embedding_gradient_shrink"))(factor_r)
    whole, shrunk = (
        gradients(model(0, changes=each), tokens(0)) for each in ({}, {"embedding_gradient_shrink": shrink})
    )
    assert torch.equal(shrunk.pop("loss"), whole.pop("loss"))
    for name, gradient in whole.items():
        expected = gradient * alpha if name == "embedding" else gradient
        torch.testing.assert_close(shrunk[name], expected, rtol=1e-15 if name == "embedding" else 0, atol=1e-18)


def after_training(*shared: str, steps: int = 6) -> dict[str, Tensor]:
    """The weights of two runs, of which the second has an eighth of the embedding's gradient."""
    both = ("embedding_gradient_shrink.alpha=1", "embedding_gradient_shrink.alpha=0.125")
    interventions = "tied_head," if "tied" in shared else ""
    fleet = Fleet(
        configs(
            *(f"intervention.{each}" for each in both),
            shared=(f"intervention=[{interventions}embedding_gradient_shrink]", *(s for s in shared if s != "tied")),
        )
    )
    for step in range(steps):
        fleet.step(step)
    return fleet.state.weights


UNCLIPPED = ("optimizer.clip=inf", "optimizer.eps=0")


def test_adam_undoes_a_shrunk_embedding_gradient() -> None:
    weights = after_training(*UNCLIPPED)
    assert all(torch.equal(weight[0], weight[1]) for weight in weights.values())


@pytest.mark.parametrize(
    "carrier",
    [("optimizer.clip=0.05", "optimizer.eps=0"), ("optimizer.clip=inf", "optimizer.eps=1e-3"), (*UNCLIPPED, "tied")],
    ids=["clip", "epsilon", "tied"],
)
def test_clip_epsilon_or_a_tied_head_let_the_shrink_through(carrier: tuple[str, ...]) -> None:
    embedding = after_training(*carrier)["embedding"]
    assert not torch.allclose(embedding[0], embedding[1], rtol=1e-4)


def test_the_shrink_of_the_link_ends_in_a_ramp() -> None:
    link = ShrinkEmbedding(*(torch.tensor([each], dtype=torch.float64) for each in (0.1, 6.0, 4.0)))
    one = {"embedding": torch.ones(1, 2, dtype=torch.float64), "head": torch.ones(1, 2, dtype=torch.float64)}
    factors = []
    for step in range(12):
        made = link(one, {}, Now(torch.tensor(step), {}, torch.ones(1), {}))
        assert torch.equal(made["head"], one["head"])
        factors.append(made["embedding"][0, 0].item())
    assert factors == pytest.approx([0.1] * 7 + [0.325, 0.55, 0.775, 1, 1])


def test_gradients_of_a_normalized_embedding_are_orthogonal() -> None:
    made = changed("embedding_layernorm", **WIDE)
    with torch.no_grad():
        made.embedding.weight.mul_(100)  # so that LayerNorm's epsilon is small beside the variance
    gradient_rvd = gradients(made, tokens(0, vocabulary=101))["embedding"]
    row_rvd = made.embedding.weight.detach()
    centred_rvd = row_rvd - row_rvd.mean(-1, keepdim=True)
    seen_rv = gradient_rvd.abs().amax(-1) > 0
    assert seen_rv.sum() > 5
    assert F.cosine_similarity(gradient_rvd, centred_rvd, dim=-1)[seen_rv].abs().max() < 1e-8
    assert (gradient_rvd.sum(-1).abs() < 1e-12 * gradient_rvd.abs().sum(-1) + 1e-18).all()


def test_initial_rms_of_embeddings() -> None:
    rms = {}
    for name in ("embedding_scale", "embedding_init"):
        made = changed(name, width=256, head_width=16, depth=0, vocabulary=200)
        rms[name] = per_run_rms(made.at_embedding(made.embedding(tokens(0, vocabulary=200)))).item()
    assert rms["embedding_scale"] == pytest.approx(1, rel=0.05)
    assert rms["embedding_init"] == pytest.approx(0.006, rel=0.05)


def test_a_small_embedding_gets_a_larger_gradient() -> None:
    """The first LayerNorm divides by the RMS of its input, so its gradient is larger by the inverse."""
    norms = []
    for names in (("embedding_scale",), ("embedding_init",)):
        made = changed(*names, width=64, head_width=16, depth=1, vocabulary=101)
        felt = gradients(made, tokens(0, vocabulary=101))
        scale = 8.0 if names == ("embedding_scale",) else 1.0  # the root of the width is outside of the table
        norms.append((felt["embedding"].norm() / scale / felt["head"].norm()).item())
    assert norms[1] / norms[0] > 10


def test_sinusoidal_positions_begin_118_times_larger() -> None:
    build = type(intervention("learned_positions"))
    tables = [
        weights_of(model(0, changes={"learned_positions": build(init, 0.006, 512)}, **WIDE))[
            "embedding.learned_positions"
        ]
        for init in ("sinusoidal", "gaussian")
    ]
    rms = [per_run_rms(table).item() for table in tables]
    assert rms[0] == pytest.approx(math.sqrt(0.5), rel=1e-12)
    assert rms[0] / rms[1] == pytest.approx(118, rel=0.02)
    assert torch.equal(tables[0][0], sinusoids(512, 64))
    frequency = 10_000 ** (-6 / 64)
    assert sinusoids(9, 64)[5, 6:8].tolist() == pytest.approx([math.sin(5 * frequency), math.cos(5 * frequency)])


def test_learned_positions_are_the_only_positions() -> None:
    made = changed("learned_positions", depth=1)
    with torch.no_grad():
        weights_of(made)["embedding.learned_positions"].zero_()
    logits_rbtv = made(torch.tensor([[[1, 2, 3, 4], [3, 1, 2, 4]]]))[0]
    torch.testing.assert_close(logits_rbtv[0, 0, 3], logits_rbtv[0, 1, 3], rtol=1e-10, atol=1e-12)  # a bag of tokens


def test_a_tied_head_gets_the_gradients_of_both_ends() -> None:
    tied, untied = changed("tied_head"), model(0)
    assert "head" not in weights_of(tied)
    assert tied.ends == ("embedding",)
    with torch.no_grad():
        untied.head.weight.copy_(untied.embedding.weight.transpose(-1, -2) * 8**-0.5)
    both, apart = gradients(tied, tokens(0)), gradients(untied, tokens(0))
    torch.testing.assert_close(both["loss"], apart["loss"])
    expected = apart["embedding"] + apart["head"].transpose(-1, -2) * 8**-0.5
    torch.testing.assert_close(both["embedding"], expected)


def test_palms_initial_logits_have_unit_spread() -> None:
    """Of hidden states of RMS 1 that know nothing of the embedding; half a nat is what unit spread costs."""
    unit = type(intervention("embedding_init"))(1.0)
    made = model(0, changes={"tied_head": intervention("tied_head"), "embedding_init": unit}, **WIDE)
    draws = torch.Generator().manual_seed(9)
    hidden_rbtd = torch.randn(1, 20, 30, 64, dtype=torch.float64, generator=draws)
    targets = torch.randint(101, (600,), generator=draws)
    logits_nv = made.at_readout(hidden_rbtd, made).detach().flatten(0, 2)
    assert logits_nv.std().item() == pytest.approx(1, rel=0.05)
    assert abs(F.cross_entropy(logits_nv, targets).item() - math.log(101)) < 0.6
    without_scale = F.cross_entropy(8 * logits_nv, targets).item()  # the spread is the root of the width
    assert without_scale - math.log(101) > 3


def test_normformer_without_its_layernorms_is_the_baseline() -> None:
    made, rows_rbt = changed("normformer", dtype=torch.float32), tokens(0)
    assert sum(isinstance(module, HeadGain) for module in made.modules()) == 2
    assert not torch.equal(made(rows_rbt)[0], model(0, dtype=torch.float32)(rows_rbt)[0])
    for where in made.blocks:
        block = made.get_submodule(where)
        for point in (block.at_attention_output, block.at_mlp_hidden):
            assert isinstance(point.changes["normformer"], LayerNorm)
            point.changes["normformer"] = torch.nn.Identity()
    assert torch.equal(made(rows_rbt)[0], model(0, dtype=torch.float32)(rows_rbt)[0])


def test_the_gain_of_a_head_multiplies_that_head() -> None:
    gain, mixed_rbhtk = HeadGain(2, 3), torch.randn(2, 1, 3, 4, 5)
    with torch.no_grad():
        gain.weight.copy_(torch.tensor([[1.0, 2, 3], [4, 5, 6]]))
    assert torch.equal(gain(mixed_rbhtk)[1, 0, 2], 6 * mixed_rbhtk[1, 0, 2])


@pytest.mark.parametrize("name", ["post_layernorm", "deepnorm"])
def test_post_layernorm_bounds_the_residual_stream(name: str) -> None:
    rows_rbt, deep = tokens(0), {"depth": 24, "width": 16, "head_width": 4}
    last = ("block_output", "block23")
    assert per_run_rms(heard(changed(name, **deep), rows_rbt)[last]).item() == pytest.approx(1, abs=1e-5)
    grown = heard(model(0, **deep), rows_rbt)
    assert per_run_rms(grown[last]) > 2 * per_run_rms(grown["block_output", "block0"])


def test_deepnorm_follows_its_formula() -> None:
    """x <- LN(sqrt(2 N) x + f(x)), and values, outputs and the MLP begin smaller by sqrt(2 N)."""
    made, plain = changed("deepnorm", depth=3), changed("post_layernorm", depth=3)
    smaller = {"value", "output", "mlp_up", "mlp_down"}
    for name, weight in weights_of(plain).items():
        factor = 6**-0.5 if name.rpartition(".")[2] in smaller and "norm" not in name else 1
        torch.testing.assert_close(weights_of(made)[name], factor * weight)
    block, x_rbtd = made.get_submodule("block1"), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    middle = F.layer_norm(6**0.5 * x_rbtd + block.attend(x_rbtd), (8,), eps=1e-6)
    expected = F.layer_norm(6**0.5 * middle + block.mlp(middle), (8,), eps=1e-6)
    torch.testing.assert_close(block(x_rbtd), expected)


def test_relu_replaces_gelu() -> None:
    block, x_rbtd = changed("relu").get_submodule("block0"), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(block.mlp(x_rbtd), block.mlp_down(block.mlp_up(x_rbtd).relu()))


def test_biases_are_added_to_the_outputs_of_linear_layers() -> None:
    """Weights of attention sum to one, so a bias on values passes it whole."""
    made, x_rbtd = changed("biases"), torch.randn(1, 2, 5, 8, dtype=torch.float64)
    block, biases = made.get_submodule("block0"), weights_of(made)
    names = {name.split(".")[-2]: name for name in biases if name.startswith("block0") and name.endswith("biases")}
    assert set(names) == {"query", "key", "value", "attention_output", "mlp_up", "mlp_output"}
    assert all(biases[name].eq(0).all() for name in names.values())
    bare_rbtd = block.attend(x_rbtd)
    with torch.no_grad():
        for part in ("value", "attention_output", "mlp_up", "mlp_output"):
            biases[names[part]].normal_()
    up_h, down_d, value_k, output_d = (
        biases[names[part]].flatten() for part in ("mlp_up", "mlp_output", "value", "attention_output")
    )
    hidden_rbth = F.gelu(block.mlp_up(x_rbtd) + up_h, approximate="tanh")
    torch.testing.assert_close(block.mlp(x_rbtd), block.mlp_down(hidden_rbth) + down_d)
    passed_rbtd = block.attention.output(value_k.expand(1, 1, 1, 8)) + output_d
    torch.testing.assert_close(block.attend(x_rbtd), bare_rbtd + passed_rbtd)
    for part in ("query", "key"):
        with torch.no_grad():
            before_rbtd = block.attend(x_rbtd)
            biases[names[part]].normal_()
        assert not torch.allclose(block.attend(x_rbtd), before_rbtd)


def test_queries_and_keys_share_the_scale() -> None:
    """Largest entries before the product: both by d ** -1/4, or the query alone by d ** -1/2, or neither."""
    sizes = {}
    for names in ((), ("split_qk_scaling",), ("late_qk_scaling",)):
        values: dict[str, Any] = {}
        with listening(lambda kind, where, *tensors, into=values: into.setdefault(kind, tensors)):
            changed(*names, width=16, head_width=16)(tokens(0))
        sizes[names] = [tensor.norm().item() for tensor in values["query_key"][:2]]
    query, key = sizes[("late_qk_scaling",)]
    assert sizes[()] == pytest.approx([query / 4, key])
    assert sizes[("split_qk_scaling",)] == pytest.approx([query / 2, key / 2])


def test_relaxed_scores_are_alpha_times_smaller() -> None:
    plain, relaxed = (heard(made, tokens(0))["scores", "block0"] for made in (model(0), changed("pb_relax")))
    torch.testing.assert_close(relaxed * 32, plain)
