"""The model is the one the paper describes, for every run of a fleet and whoever stands beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from lab import HookIntervention, Role
from lab.core.hooks import HookPoint, listening
from lab.core.registry import INTERVENTIONS
from lab.interventions.loss_terms import ZLoss
from lab.model.loss import losses
from lab.model.transformer import Transformer, rotate
from pieces import intervention, model, tokens, weights_of
from tests import reference

CHANGES = [name for name in INTERVENTIONS if issubclass(INTERVENTIONS[name], HookIntervention)]
# Interventions whose model says at first what it says without them: exactly, or but for rounding.
SILENT = (
    "biases",
    "depth_scaling",
    "embedding_gradient_shrink",
    "norm_biases",
    "norm_without_gain",
)  # at the base depth
EQUIVALENT = ("late_qk_scaling", "pb_relax", "split_qk_scaling")
OTHER_INITIAL_VALUES = (
    *("deepnorm", "embedding_init", "grouped_query_attention", "head_init", "small_init", "zero_init_projections"),
    *("experts", "magnitude_direction"),
)
WITHOUT_A_WEIGHT = {"tied_head": "head"} | dict.fromkeys(
    ("dyt", "ln_scaling", "ngpt", "norm_biases", "norm_without_gain", "parallel_blocks", "qkv_norm", "rmsnorm"), "norm"
)
SHAPES = [  # width, head width, vocabulary, batch, positions; a run of the last two fills no whole vectors anywhere
    (16, 8, 29, 16, 12),  # every product has the 4096 multiplications from which bits do not depend on company
    (10, 10, 37, 47, 9),
    (6, 2, 5, 1, 3),
]


def changes(*names: str) -> dict[str, Any]:
    return {name: intervention(name) for name in names}


@torch.no_grad()
def stir(made: Transformer) -> Transformer:
    """Move every weight from where it starts, the gains above all, so that none can hide."""
    draw = torch.Generator().manual_seed(5)
    for _, layer in made.layers():
        layer.weight.add_(0.2 * torch.randn(layer.weight.shape, generator=draw))
    return made


def gradients(made: Transformer, rows_rbt: Tensor, terms: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
    """Gradients of the loss, and the loss itself."""
    weights = weights_of(made)
    loss_r, _ = losses(made(rows_rbt[..., :-1])[0], rows_rbt[..., 1:], terms or {})
    parts = torch.autograd.grad(loss_r.sum(), list(weights.values()))
    return {**dict(zip(weights, parts, strict=True)), "loss": loss_r.detach()}


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("z_loss", [False, True], ids=["plain", "z_loss"])
@pytest.mark.parametrize("qk_layernorm", [False, True], ids=["bare", "qk_layernorm"])
def test_forward_and_gradients_equal_the_reference(depth: int, heads: int, qk_layernorm: bool, z_loss: bool) -> None:
    seeds, coefficients = (0, 1, 7), (1e-4, 0.3, 0.0)
    made = stir(model(*seeds, width=4 * heads, depth=depth, changes=changes("qk_layernorm") if qk_layernorm else {}))
    rows_rbt = tokens(*seeds, length=5 + heads % 2)  # with two heads a run fills whole vectors
    terms = {"z_loss": ZLoss(torch.tensor(coefficients, dtype=torch.float64))} if z_loss else {}
    ours = gradients(made, rows_rbt, terms)
    logits_rbtv, _ = made(rows_rbt[..., :-1])
    for run, coefficient in enumerate(coefficients):
        leaves = {name: weight[run].detach().requires_grad_() for name, weight in weights_of(made).items()}
        seen = reference.transformer(leaves, rows_rbt[run, :, :-1], depth, heads, qk_layernorm)
        loss, _ = reference.losses(seen.logits, rows_rbt[run, :, 1:], coefficient if z_loss else 0.0)
        close(logits_rbtv[run], seen.logits)
        close(ours["loss"][run], loss)
        for name, theirs in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
            assert theirs.abs().max() > 1e-6, f"{name} has no gradient, so nothing was compared"
            close(ours[name][run], theirs, name)


def close(ours: Tensor, theirs: Tensor, name: str = "") -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def test_the_reference_tells_the_arms_apart() -> None:
    weights = {name: weight[0] for name, weight in weights_of(stir(model(0, changes=changes("qk_layernorm")))).items()}
    rows_bt = tokens(0)[0]
    on, off = (reference.transformer(weights, rows_bt, 2, 2, toggle).logits for toggle in (True, False))
    assert (on - off).abs().max() > 0.01
    assert (on - reference.transformer(weights, rows_bt, 2, 1, False).logits).abs().max() > 0.01


def companies(names: list[str]) -> list[tuple[str, ...]]:
    """Sort interventions into groups in which none excludes another."""
    groups: list[list[str]] = []
    for name in names:
        free = [group for group in groups if not any(excludes(name, each) for each in group)]
        if free:
            free[0].append(name)
        else:
            groups.append([name])
    return [tuple(group) for group in groups]


@cache
def excludes(a: str, b: str) -> bool:
    return any(one in getattr(intervention(other), "excludes", ()) for one, other in ((a, b), (b, a)))


COMPANIES = companies(CHANGES)
UNTIED = companies([name for name in CHANGES if name != "tied_head"])  # a tied head reads the rows of all tokens


@pytest.mark.parametrize("names", [(), *UNTIED], ids=lambda names: names[0] if names else "bare")
def test_later_tokens_get_exactly_no_gradient_from_earlier_outputs(names: tuple[str, ...]) -> None:
    length, now = 7, 3
    made = model(0, 1, changes=changes(*names))
    rows_rbt = torch.stack([torch.randperm(11, generator=torch.Generator().manual_seed(s))[:length] for s in (0, 1)])
    logits_rbtv, _ = made(rows_rbt.unsqueeze(1))
    embedding_rvd = weights_of(made)["embedding"]
    (gradient_rvd,) = torch.autograd.grad(logits_rbtv[:, :, : now + 1].square().sum(), [embedding_rvd])
    for run in range(2):
        assert gradient_rvd[run, rows_rbt[run, now + 1 :]].eq(0).all()
        assert gradient_rvd[run, rows_rbt[run, : now + 1]].ne(0).all()


def test_rotary_scores_depend_on_distance_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    q_k, k_k = (torch.randn(6, dtype=torch.float64, generator=draw) for _ in range(2))
    scores_ts = rotate(q_k.expand(9, -1)) @ rotate(k_k.expand(9, -1)).T
    torch.testing.assert_close(scores_ts[1:, 1:], scores_ts[:-1, :-1], rtol=0, atol=1e-12)
    assert scores_ts[0].diff().abs().min() > 1e-3  # and they do depend on it
    torch.testing.assert_close(scores_ts[0, 0], q_k @ k_k)  # distance nought turns nothing
    torch.testing.assert_close(rotate(q_k.expand(9, -1)).norm(dim=1), q_k.norm().expand(9))


def test_first_block_scores_survive_a_shift_of_the_text() -> None:
    made, heard = model(0), {}
    with listening(lambda kind, where, *values: heard.setdefault((kind, where), []).append(values[0].detach())):
        made(torch.tensor([[[9, 1, 2, 3, 4, 5]]]))
        made(torch.tensor([[[9, 9, 9, 1, 2, 3]]]))
    early, late = heard["scores", "block0"]
    torch.testing.assert_close(early[..., 1:4, 1:4], late[..., 3:6, 3:6], rtol=0, atol=1e-12)
    early, late = heard["scores", "block1"]  # the text before has been mixed in by then
    assert (early[..., 1:4, 1:4] - late[..., 3:6, 3:6]).abs().max() > 1e-3


def test_initial_scale() -> None:
    """Truncated normals have std 1/sqrt(fan-in) *after* the cut, which is at two of the uncut normal's."""
    width, vocabulary = 32, 256
    fan_ins = {"query": 32, "key": 32, "value": 32, "output": 32, "mlp_up": 32, "mlp_down": 128, "head": 32}
    weights = weights_of(model(*range(6), width=width, depth=1, head_width=8, vocabulary=vocabulary))
    density, inside = math.exp(-2) / math.sqrt(2 * math.pi), math.erf(math.sqrt(2))
    cut_std = math.sqrt(1 - 4 * density / inside)  # of a unit normal cut at two
    for part, fan_in in fan_ins.items():
        weight = weights[part if part == "head" else f"block0.{part}" if "mlp" in part else f"block0.attention.{part}"]
        std, count = fan_in**-0.5, weight.numel()
        assert abs(weight.std() / std - 1) < 4 * 0.6 / math.sqrt(count), part  # 0.6: std error of a cut normal's std
        assert abs(weight.mean() / std) < 4 / math.sqrt(count), part
        assert 1.98 * std < weight.abs().max() * cut_std <= 2 * std, part
    embedding = weights["embedding"]
    assert abs(embedding.std() * math.sqrt(width) - 1) < 4 * 0.71 / math.sqrt(embedding.numel())
    assert embedding.abs().max() * math.sqrt(width) > 3.5  # not cut
    for name, weight in weights.items():
        assert weight.eq(1).all() == name.endswith("norm"), name


def test_a_weight_starts_from_its_seed_and_name_alone() -> None:
    others = [name for name in CHANGES if name not in (*OTHER_INITIAL_VALUES, *WITHOUT_A_WEIGHT)]
    bare, dressed = weights_of(model(3)), weights_of(model(3, changes=changes(*companies(others)[0])))
    assert set(bare) < set(dressed)
    company, deep, single = weights_of(model(1, 3, 2)), weights_of(model(3, depth=3)), model(3, dtype=torch.float32)
    for name, weight in bare.items():
        assert torch.equal(weight, dressed[name])  # in every arm
        assert torch.equal(weight[0], company[name][1])  # at every place in every fleet
        assert torch.equal(weight, deep[name])  # at every depth
        assert torch.equal(weight.float(), weights_of(single)[name])  # in every precision


def test_weights_of_other_names_and_seeds_differ() -> None:
    weights = weights_of(model(0, 1, 2**40, depth=2))
    drawn = {(name, run): w[run] for name, w in weights.items() if "norm" not in name for run in range(3)}
    alike = [tuple(value.shape) for value in drawn.values()]
    assert alike.count((8, 8)) == 24
    assert len({tuple(value.flatten().tolist()) for value in drawn.values()}) == len(drawn)


def test_every_parameter_is_the_weight_of_one_named_layer() -> None:
    for names in COMPANIES:
        made = model(0, 1, changes=changes(*names))
        weights = weights_of(made)
        assert len(weights) == len(list(made.layers()))
        assert {id(weight) for weight in weights.values()} == {id(parameter) for parameter in made.parameters()}
        assert all(len(weight) == 2 for weight in weights.values())
        assert not any("at_" in name or "changes" in name for name in weights)


def test_roles() -> None:
    layers = dict(model(0, depth=1, changes=changes("qk_layernorm")).layers())
    by_role = {role: sorted(name for name, layer in layers.items() if layer.role is role) for role in Role}
    assert by_role[Role.EMBEDDING] == ["embedding"]
    assert by_role[Role.HEAD] == ["head"]
    assert all("norm" in name for name in by_role[Role.GAIN])
    assert by_role[Role.QUERY] == ["block0.attention.query"]
    assert len(by_role[Role.MATRIX]) == 5


@pytest.mark.parametrize("name", CHANGES)
def test_contract_of_interventions(name: str) -> None:
    """Attached, it changes what the model says; what it owns learns; what it does not own starts as without it."""
    rows_rbt = tokens(0, 1)
    bare, dressed = model(0, 1), model(0, 1, changes=changes(name))
    for run in range(2):
        without, with_it = bare(rows_rbt)[0][run], dressed(rows_rbt)[0][run]
        assert torch.equal(without, with_it) == (name in SILENT) or name in EQUIVALENT
        assert torch.allclose(without, with_it, rtol=1e-12) == (name in (*SILENT, *EQUIVALENT))
    before, after = weights_of(bare), weights_of(dressed)
    gone, kept = before.keys() - after.keys(), before.keys() & after.keys()
    assert bool(gone) == (name in WITHOUT_A_WEIGHT)
    assert all(each.endswith(WITHOUT_A_WEIGHT[name]) for each in gone)
    assert all(torch.equal(before[each], after[each]) for each in kept) == (name not in OTHER_INITIAL_VALUES)
    own = set(after) - set(before)
    assert all(name in weight for weight in own)
    felt = gradients(dressed, rows_rbt)
    for weight in own:
        assert felt[weight].flatten(1).abs().amax(1).gt(0).all(), f"{weight} does not learn"
    assert felt["loss"].isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("names", [(), *COMPANIES], ids=lambda names: names[0] if names else "bare")
def test_a_run_alone_has_the_bits_of_the_run_in_company(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    width, head_width, vocabulary, batch, positions = shape
    if width**3 < 4096:  # fewer multiplications than those from which bits do not depend on company
        names = tuple(name for name in names if name != "sigma_reparam")

    def bits(*seeds: int) -> dict[str, Tensor]:
        sizes = {"width": width, "head_width": head_width, "vocabulary": vocabulary}
        made = model(*seeds, **sizes, changes=changes(*names), dtype=torch.float32)
        return gradients(made, tokens(*seeds, batch=batch, length=positions + 1, vocabulary=vocabulary))

    company = bits(4, 0, 2)
    for place, seed in enumerate((4, 0, 2)):
        for name, value in bits(seed).items():
            assert torch.equal(value[0], company[name][place]), name


@pytest.mark.parametrize("names", COMPANIES, ids=lambda names: names[0])
def test_a_broken_run_changes_no_bit_of_the_others(names: tuple[str, ...]) -> None:
    whole, broken = (model(0, 1, 2, changes=changes(*names), dtype=torch.float32) for _ in range(2))
    with torch.no_grad():
        weights_of(broken)["block0.mlp_up"][1, 0, 0] = math.nan
    rows_rbt = tokens(0, 1, 2)
    fine, hurt = gradients(whole, rows_rbt), gradients(broken, rows_rbt)
    assert hurt["loss"][1].isnan()
    for name, value in fine.items():
        assert torch.equal(value[[0, 2]], hurt[name][[0, 2]]), name


def test_interventions_stack_in_one_order_however_they_are_named() -> None:
    class Scale(HookIntervention):
        hook_points: ClassVar = ("logits",)

        def __init__(self, summand: float, factor: float) -> None:
            self.summand, self.factor = summand, factor

        def attach(self, point: HookPoint, runs: int, config: Any) -> torch.nn.Module:
            made = torch.nn.Identity()
            made.register_forward_hook(lambda module, given, out: self.factor * (out + self.summand))
            return made

    double, shift = Scale(0, 2), Scale(1, 1)
    rows_rbt = tokens(0)
    one, other = model(0, changes={"a": double, "b": shift}), model(0, changes={"b": shift, "a": double})
    assert torch.equal(one(rows_rbt)[0], other(rows_rbt)[0])
    assert not torch.equal(one(rows_rbt)[0], model(0, changes={"b": double, "a": shift})(rows_rbt)[0])
