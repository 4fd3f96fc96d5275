"""A user's own optimizer and module: trained as their authors mean it, in any company, and refused in one line."""

from __future__ import annotations

import importlib
import json
import math
import pickle
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from lab import run_config
from lab.__main__ import main
from lab.core.errors import RequestError
from lab.core.files import quoted, text_digest
from lab.core.hooks import listening
from lab.core.registry import LINKS, MODELS
from lab.core.schema import stack
from lab.core.usage import OptionParser
from lab.features.stress.plan import Plan, read_plan, read_plans
from lab.features.stress.training import make_card
from lab.model.config import ModelConfig
from lab.model.custom import CustomModel, check_custom_model
from lab.model.own_module import entry_of, huggingface_builder, shrunk
from lab.model.watched import BY_SHAPE, ModuleListener, Probed, Watched
from lab.optim.links.torch_optimizer import link_of
from lab.optim.optimizer import Optimizer, build_optimizer
from lab.optim.schedule import Cosine
from lab.records import store
from lab.records.plans import Setting
from lab.sweeping import own_code
from lab.sweeping.bench import compose_settings
from lab.sweeping.compose import parse
from lab.sweeping.job import train_fleet
from lab.sweeping.local_jobs import JobEnd
from lab.sweeping.planner import points
from lab.training.building import check_own_code, probed_modules
from pieces import CPU, optimizer
from small import tree
from sweeping import OutputOf
from test_optim import at, draw, noise, walk

SHAPE = ModelConfig("tiny", 16, 2, 8)


class Memory(torch.optim.Optimizer):
    """Keeps a list of tensors, a number of a weight, and a number of the group."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.9, order: int = 2) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "order": order, "k": 0})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for weight in group["params"]:
                state = self.state[weight]
                past = state.setdefault("past", [torch.zeros_like(weight) for _ in range(group["order"])])
                state["n"] = state.get("n", 0) + 1
                past.insert(0, group["momentum"] * past.pop() + weight.grad)
                weight.sub_(group["lr"] * sum(past) / math.sqrt(group["k"] * state["n"]))


class Closure(Memory):
    def step(self, closure: Callable[[], float]) -> None:  # type: ignore[override]
        closure()


class Hidden(Memory):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.count = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.count += 1


class NoRate(Memory):
    def __init__(self, params: Any) -> None:
        super().__init__(params)


@pytest.fixture(autouse=True)
def _entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (LINKS, MODELS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def own(kind: Any, *runs: dict[str, float]) -> Optimizer:
    """A chain with an optimizer of torch's, stacked over runs."""
    link = link_of(kind)
    LINKS.replace(link.__name__, link)
    fixed = {"name": link.__name__, "chain": ["clip", link.__name__, "peak", "schedule"], "clip": math.inf}
    chain: Optimizer = stack([build_optimizer(fixed | run) for run in runs], CPU)
    return chain


def test_torchs_adamw_equals_the_labs_run_by_run() -> None:
    runs = [
        {"lr": 0.1, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
        {"lr": 0.01, "weight_decay": 0.0, "beta1": 0.8, "beta2": 0.99, "eps": 1e-6},
    ]
    theirs = own(torch.optim.AdamW, *runs)
    labs = optimizer("adamw_coupled", *({**run, "clip": math.inf} for run in runs))
    gradients, shape_sr = noise(20, 2), Cosine(0.1, 1e-3).shape(20, labs.lr)
    ours, expected = (walk(chain, gradients, shape_sr) for chain in (theirs, labs))
    for name, weight in expected.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-12, atol=1e-12)


def test_a_run_has_the_same_bits_alone_and_in_company_and_a_rate_of_zero_moves_nothing() -> None:
    runs = [{"lr": 0.3, "momentum": 0.5}, {"lr": 0.01}]
    gradients, shape_sr = noise(6, 2), torch.tensor([[1.0, 0.5]] * 5 + [[0.0, 0.0]], dtype=torch.float64)
    together = walk(own(Memory, *runs), gradients, shape_sr)
    alone = [{name: value[1:] for name, value in step.items()} for step in gradients]
    single = walk(own(Memory, runs[1]), alone, shape_sr[:, 1:], weights=draw(101))
    before_last = walk(own(Memory, *runs), gradients[:5], shape_sr)
    for name, weight in single.items():
        assert torch.equal(weight[0], together[name][1])
        assert torch.equal(before_last[name], together[name])


class Everything(torch.optim.Optimizer):
    """Keeps state of every form, of weights and of all together, has two modes, and is linear in nothing."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.5, 0.9), order: int = 2, sign: bool = False
    ) -> None:
        assert 0 < lr < 1
        assert isinstance(order, int)
        assert isinstance(sign, bool)
        super().__init__(params, {"lr": lr, "betas": betas, "order": order, "sign": sign, "warm": True, "note": "a"})
        self.is_training = False

    def train(self) -> None:
        self.is_training = True

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert self.is_training
        together = self.state.setdefault("together", {"count": 0})  # type: ignore[arg-type, call-overload]
        together["count"] += 1
        for group in self.param_groups:
            if together["count"] == 4:
                group["warm"] = False
            slow, fast = group["betas"]
            for weight in group["params"]:
                state = self.state[weight]
                state.setdefault("means", {"past": [torch.zeros_like(weight) for _ in range(group["order"])]})
                state.setdefault("last", torch.zeros_like(weight, dtype=torch.float32))
                past = state["means"]["past"]
                past.insert(0, slow * past.pop() + weight.grad)
                direction = sum(past).sign() if group["sign"] else sum(past) + 0.1 * state["last"]
                state["last"].copy_(fast * direction)
                boost = 2.0 if group["warm"] else 1.0
                weight.mul_(1 - group["lr"] ** 2).sub_(boost * group["lr"] * direction / math.sqrt(together["count"]))


class Stateless(torch.optim.Optimizer):
    """Counts its steps where no optimizer should, for the test."""

    steps: ClassVar[list[int]] = []

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.steps.append(1)
        for weight in self.param_groups[0]["params"]:
            weight.grad.mul_(2)
            weight.sub_(self.param_groups[0]["lr"] * weight.grad)


def by_hand(
    kind: Any, run: dict[str, Any], gradients: Sequence[dict[str, Tensor]], rates: Sequence[float], weights: Any
) -> dict[str, Tensor]:
    """What an ordinary loop with a scheduler makes of the weights of one run, the first of each tensor."""
    theirs = {name: nn.Parameter(weight[0].clone()) for name, weight in weights.items()}
    betas = {"betas": (run["beta1"], run["beta2"])} if "beta1" in run else {}
    given = {key: value for key, value in run.items() if key not in ("lr", "beta1", "beta2")}
    torchs = kind(list(theirs.values()), **betas, **given)
    if hasattr(torchs, "train"):
        torchs.train()
    for gradient, rate in zip(gradients, rates, strict=True):
        for group in torchs.param_groups:
            group["lr"] = run["lr"] * rate
        for name, weight in theirs.items():
            weight.grad = gradient[name][0].clone()
        with torch.no_grad():
            torchs.step()
    return {name: weight.detach() for name, weight in theirs.items()}


@pytest.mark.parametrize(
    ("kind", "runs"),
    [
        (Everything, [{"lr": 0.3}, {"lr": 30.0, "beta1": 0.3, "beta2": 0.7, "order": 3, "sign": False}]),
        (Everything, [{"lr": 0.3, "sign": True}]),
        (Memory, [{"lr": 0.1, "momentum": 0.5}, {"lr": 2.0, "order": 4}]),
        (torch.optim.SGD, [{"lr": 0.1, "momentum": 0.0}, {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1}]),
        (torch.optim.NAdam, [{"lr": 0.1, "beta1": 0.8, "beta2": 0.9}]),
    ],
)
def test_a_run_is_what_an_ordinary_loop_with_a_scheduler_makes(kind: Any, runs: list[dict[str, Any]]) -> None:
    """Of runs with other numbers, which keep other state, too."""
    gradients, rates = noise(8, len(runs)), [1.0, 0.7, 0.5, 0.5, 0.2, 0.1, 0.05, 0.01]
    shape_sr = torch.tensor(rates, dtype=torch.float64)[:, None].expand(-1, len(runs))
    ours = walk(own(kind, *runs), gradients, shape_sr)
    for run, numbers in enumerate(runs):
        of_run = [{name: value[run : run + 1] for name, value in gradient.items()} for gradient in gradients]
        for name, weight in by_hand(kind, numbers, of_run, rates, draw(100 + run)).items():
            torch.testing.assert_close(ours[name][run], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [Memory, Everything, Stateless, torch.optim.Adam])
def test_it_goes_on_from_its_tensors_in_another_process(kind: Any) -> None:
    """Also where a run has diverged meanwhile: what a fresh optimizer keeps is found without its weights."""
    gradients, rate_r = noise(6, 2), torch.ones(2, dtype=torch.float64)
    gradients[1]["query"][1] = math.nan
    whole = walk(own(kind, {"lr": 0.1}, {"lr": 0.1}), gradients, rate_r.expand(6, 2))
    weights, state = draw(100, 101), None
    for part in (gradients[:4], gradients[4:]):
        chain = own(kind, {"lr": 0.1}, {"lr": 0.1})  # as a new process would build it
        fresh = chain.begin(weights)
        if state:
            for link, tensors in state.items():
                assert {name: tensor.shape for name, tensor in fresh[link].items()} == {
                    name: tensor.shape for name, tensor in tensors.items()
                }
        state = state or fresh
        for step, gradient in enumerate(part):
            chain.step(gradient, state, at(step, weights, rate_r))
    for name, weight in whole.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [Memory, Everything, torch.optim.Adam])
def test_a_run_whose_state_is_reset_has_a_fresh_optimizer_and_its_neighbour_none(kind: Any) -> None:
    gradients, rate_r = noise(6, 2), torch.ones(2, dtype=torch.float64)
    chain, weights, numbers = own(kind, {"lr": 0.1}, {"lr": 0.1}), draw(100, 101), {"lr": 0.1}
    state = chain.begin(weights)
    for step, gradient in enumerate(gradients):
        if step == 3:
            at_reset = {name: weight.clone() for name, weight in weights.items()}
            for link, tensors in chain.begin(weights).items():  # as the response adam_reset does
                for name, tensor in tensors.items():
                    state[link][name][0].copy_(tensor[0])
        chain.step(gradient, state, at(step, weights, rate_r))
    first = [{name: value[:1] for name, value in gradient.items()} for gradient in gradients[3:]]
    second = [{name: value[1:] for name, value in gradient.items()} for gradient in gradients]
    for name, weight in by_hand(kind, numbers, first, [1.0] * 3, at_reset).items():
        torch.testing.assert_close(weights[name][0], weight, rtol=1e-10, atol=1e-10)
    for name, weight in by_hand(kind, numbers, second, [1.0] * 6, draw(101)).items():
        torch.testing.assert_close(weights[name][1], weight, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("at", ["__init__", "step"])
def test_memory_that_runs_out_in_an_optimizer_is_no_reason_to_blame_it_yet(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A smaller fleet may have enough."""
    chain = own(Memory, {"lr": 0.1})

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Memory, at, fail)
    with pytest.raises(MemoryError):
        chain.begin(draw(100))


def test_a_trial_leaves_random_numbers_weights_and_gradients_alone() -> None:
    torch.manual_seed(5)
    before, weights = torch.get_rng_state(), draw(100)
    chain = own(Everything, {"lr": 0.1})
    state = chain.begin(weights)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(not tensor.any() for tensor in state["Everything"].values())
    for name, weight in draw(100).items():
        assert torch.equal(weights[name], weight)
        assert weights[name].grad is None


def test_each_step_of_a_run_is_one_of_its_optimizer_on_gradients_of_its_own() -> None:
    chain, weights, rate_r = own(Stateless, {"lr": 0.1}, {"lr": 0.2}), draw(100, 101), torch.ones(2)
    state, gradients = chain.begin(weights), noise(3, 2)
    Stateless.steps.clear()
    for step, gradient in enumerate(gradients):
        chain.step(gradient, state, at(step, weights, rate_r))
    assert len(Stateless.steps) == 3 * 2
    for gradient, expected in zip(gradients, noise(3, 2), strict=True):
        assert all(torch.equal(gradient[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("kind", "word"), [(Closure, "closure"), (Hidden, "count"), (NoRate, "lr"), (dict, "torch.optim.Optimizer")]
)
def test_an_optimizer_that_no_fleet_can_train_is_refused_in_one_line(kind: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word) as refusal:
        own(kind, {"lr": 0.1}).begin(draw(0))
    assert "\n" not in str(refusal.value)


def test_an_optimizer_of_matrices_leaves_the_others_to_adam() -> None:
    link = link_of(torch.optim.Muon)
    LINKS.replace("Muon", link)
    numbers = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "lr": 0.1, "clip": 1.0}
    chain = build_optimizer({"name": "Muon", "chain": ["clip", "Muon", "adam", "peak", "schedule"], **numbers})
    assert "Muon" in chain.links_of("matrix")
    assert "adam" not in chain.links_of("matrix")
    assert "Muon" not in chain.links_of("gain")


def test_the_numbers_switches_and_texts_of_an_optimizer_are_its_keys() -> None:
    given = list[Any]()

    class Keys(torch.optim.SGD):
        """Made for the test."""

        def __init__(
            self,
            weights: Any,
            lr: float = 2e-3,
            betas: tuple[float, ...] = (0.5, 0.6, 0.7),
            eps: float = 1.0,
            order: int = 3,
            flag: bool = False,
            mode: str = "a",
            other: Any = None,
            pair: tuple[int, int] = (1, 2),
        ) -> None:
            given[:] = [betas, eps, order, flag, mode, other, pair]
            super().__init__(weights, lr)

    link = link_of(Keys)
    assert link.__doc__ == "Made for the test."
    assert [field.name for field in fields(link)] == [
        *("lr", "source", "eps", "order", "flag", "mode", "beta1", "beta2", "beta3")
    ]
    own(Keys, {"lr": 0.1, "beta2": 0.9, "order": 5.0, "flag": True, "mode": "b", "eps": 2}).begin(draw(0))  # type: ignore[dict-item]
    assert given == [(0.5, 0.9, 0.7), 2.0, 5, True, "b", None, (1, 2)]
    assert [type(given[1]), type(given[2])] == [float, int]


class Recurrent(nn.Module):
    """A module that vmap cannot batch, with blocks that write into a residual stream."""

    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.gru = nn.GRU(width, width, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gru(x)[0]

    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, scale: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(vocab_size, n_embd), scale
        self.blocks = nn.ModuleList(self.Block(n_embd) for _ in range(n_layer))
        self.head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
        x = self.scale * self.embedding(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x if targets is not None else x[:, -1:]), None


def test_a_module_takes_the_shape_by_the_names_of_its_arguments_and_announces_its_blocks() -> None:
    entry: Any = entry_of(Recurrent, "Recurrent")
    assert dict(entry.takes) == {"vocabulary": "vocab_size", "width": "n_embd", "depth": "n_layer"}
    make = lambda: entry(scale=2.0).build(SHAPE, 11, 7)  # noqa: E731
    check_custom_model("Recurrent", make, 11, 7)
    model, tokens_rbt = CustomModel(make, 2, {}, SHAPE), torch.arange(28).reshape(2, 2, 7) % 11
    model.initialize((3, 4), {})
    probed = {}
    with listening(lambda kind, where, *values: probed.update({(kind, where): values[0]})):
        logits_rbtv, _ = model(tokens_rbt)
    torch.manual_seed(4)
    alone = make()
    assert torch.equal(logits_rbtv[1], alone(tokens_rbt[1], tokens_rbt[1])[0])
    first = alone.blocks[0](2.0 * alone.embedding(tokens_rbt[1]))
    assert torch.equal(probed["block_output", "block0"][1], first)
    assert ("block_output", "block1") in probed


class Attention(nn.Module):
    """Attention by a softmax of its own, or by torch's function."""

    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.products, self.fused = nn.Linear(width, 3 * width), fused

    def scores(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.products(x).chunk(3, 2))
        return q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]), v

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            q, k, v = (part.unflatten(2, (2, -1)).transpose(1, 2) for part in self.products(x).chunk(3, 2))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        scores, v = self.scores(x)
        future = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)


class Attending(nn.Module):
    """Two blocks of attention without residuals, and a mixer that attends as well."""

    class Block(nn.Module):
        def __init__(self, width: int, fused: bool) -> None:
            super().__init__()
            self.attn, self.other = Attention(width, fused), Attention(width, fused)

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.attn(x))

    def __init__(self, vocab_size: int, n_embd: int, n_layer: int, fused: bool = False) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size)
        self.blocks = nn.ModuleList(self.Block(n_embd, fused) for _ in range(n_layer))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embedding(idx)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def probed_of(
    watched: Watched, *, fused: bool, one_by_one: bool = False
) -> tuple[dict[Any, Tensor], CustomModel, Tensor]:
    """What two runs of a model announce, the model, and its tokens."""
    entry: Any = entry_of(Attending, "Attending")
    model = CustomModel(lambda: entry(fused=fused).build(SHAPE, 11, 7), 2, {}, SHAPE, watched=watched)
    model.one_by_one = one_by_one
    model.initialize((3, 4), {})
    probed, tokens_rbt = {}, torch.arange(28).reshape(2, 2, 7) % 11
    silent, _ = model(tokens_rbt)
    with listening(lambda kind, where, *values: probed.update({(kind, where): values[0]})):
        logits_rbtv, _ = model(tokens_rbt)
    assert torch.equal(logits_rbtv, silent)
    return probed, model, tokens_rbt


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_attention_scores_are_probed_by_their_shape(fused: bool, one_by_one: bool) -> None:
    probed, _, tokens_rbt = probed_of(Watched(), fused=fused, one_by_one=one_by_one)
    torch.manual_seed(4)
    alone = Attending(11, 16, 2, fused)
    expected, _ = alone.blocks[0].attn.scores(alone.embedding(tokens_rbt[1]))
    past = torch.ones(7, 7).tril().bool()
    torch.testing.assert_close(probed["scores", "block0"][1][..., past], expected[..., past])
    assert {where for kind, where in probed if kind == "scores"} == {"block0", "block1"}


def test_attention_scores_are_probed_in_modules_of_a_name() -> None:
    probed, _, tokens_rbt = probed_of(Watched(attn="blocks.*.other", block="blocks.1"), fused=False)
    torch.manual_seed(3)
    alone = Attending(11, 16, 2)
    expected, _ = alone.blocks[0].other.scores(alone.blocks[0].attn(alone.embedding(tokens_rbt[0])))
    past = torch.ones(7, 7).tril().bool()
    torch.testing.assert_close(probed["scores", "blocks.0.other"][0][..., past], expected[..., past])
    assert {where for kind, where in probed if kind == "scores"} == {"blocks.0.other", "block0"}
    assert [where for kind, where in probed if kind == "block_output"] == ["block0"]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pattern", ["blocks.*.*", "blocks.*", "*"])
def test_both_modules_of_a_block_have_a_place_of_their_own(pattern: str, fused: bool) -> None:
    """Scores are those of the innermost module that is watched."""
    probed, *_ = probed_of(Watched(attn=pattern), fused=fused)
    places = {where for kind, where in probed if kind == "scores"}
    assert places == {"block0.attn", "block0.other", "block1.attn", "block1.other"}


class Does(nn.Module):
    """A part of parts that does what it is told."""

    def __init__(self, act: Callable[[Tensor], Any], parts: int = 1) -> None:
        super().__init__()
        self.act, self.parts = act, nn.Sequential(*(nn.Identity() for _ in range(parts)))

    def forward(self, x: Tensor) -> Any:
        return self.act(x)


class Also(Does):
    """Of another class."""


class Stack(nn.Module):
    """Lists of parts; the last list computes, its first part on the input."""

    def __init__(self, *lists: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, parts in enumerate(lists):
            setattr(self, f"list{number}", nn.ModuleList(parts))
        self.last = lists[-1]

    def forward(self, x: Tensor) -> Tensor:
        for part in self.last:
            x = out[0] if isinstance(out := part(x), tuple) else out
        return x


ROWS, LENGTH = 2, 5
INPUT = torch.randn(ROWS, LENGTH, 12, generator=torch.Generator().manual_seed(0))
SQUARE = torch.randn(ROWS, 3, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1))
Q, K = (torch.randn(ROWS, heads, LENGTH, 4, generator=torch.Generator().manual_seed(heads)) for heads in (6, 2))


def probed_in(module: nn.Module, watched: Watched = BY_SHAPE) -> Probed:
    _, probed = ModuleListener(module, watched).listen(lambda: module(INPUT), INPUT.shape[:2])
    return probed


def attending(query: Tensor, key: Tensor, **how: Any) -> Callable[[Tensor], Tensor]:
    """A part with torch's attention."""

    def act(x: Tensor) -> Tensor:
        nn.functional.scaled_dot_product_attention(query, key, key, **how)
        return x

    return act


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (attending(Q, K, enable_gqa=True), Q @ K[:, [0, 0, 0, 1, 1, 1]].mT / 2),
        (attending(Q, K[:, :1], enable_gqa=True), Q @ K[:, :1].mT / 2),
        (attending(Q, Q, scale=1.0), Q @ Q.mT),
        (attending(Q, Q, scale=0.0), 0 * Q @ Q.mT),
        (attending(Q, K, scale=0.1, enable_gqa=True), 0.1 * Q @ K.repeat_interleave(3, 1).mT),
        (attending(Q.flatten(0, 1), Q.flatten(0, 1)), Q @ Q.mT / 2),
        (lambda x: [x, torch.softmax(SQUARE, -1)][0], SQUARE),
        (lambda x: [x, nn.functional.softmax(SQUARE, dim=-1)][0], SQUARE),
        (lambda x: [x, SQUARE.flatten(0, 1).softmax(2)][0], SQUARE),
        (lambda x: [x, SQUARE.softmax(-1), (2 * SQUARE).softmax(-1)][0], SQUARE),  # the first counts
        (lambda x: [x, torch.softmax(input=SQUARE, dim=-1)][0], SQUARE),
        (lambda x: [x, nn.functional.scaled_dot_product_attention(key=Q, value=Q, query=2 * Q)][0], Q @ Q.mT),
        (lambda x: [x, SQUARE[:, :, 1:].softmax(-1), SQUARE.softmax(-1)][0], SQUARE),
        (lambda x: [x, SQUARE[..., 1:].softmax(-1), SQUARE.softmax(-1)][0], SQUARE),
        (lambda x: [x, x.softmax(-1), SQUARE[:, 0].softmax(-1), SQUARE[:1].softmax(-1), SQUARE.softmax(-1)][0], SQUARE),
        (lambda x: (SQUARE, x), SQUARE),  # what a part makes itself
        (lambda x: [x, SQUARE[0].softmax(-1), SQUARE.flatten(0, 1)[:5].softmax(-1)][0], None),
        (lambda x: x, None),
    ],
)
def test_the_scores_of_a_block_are_what_its_first_softmax_over_the_window_takes(
    act: Callable[[Tensor], Any], expected: Tensor | None
) -> None:
    probed = probed_in(nn.Sequential(Stack([Does(act), Does(lambda x: x)])) if expected is not SQUARE else Watcher(act))
    assert [*probed.scores] == ([] if expected is None else ["block0"])
    if expected is not None:
        torch.testing.assert_close(probed.scores["block0"], expected)


class Watcher(Stack):
    """As a stack, and goes on with its input whatever its part makes."""

    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__([Does(act)])

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x


def test_what_is_outside_of_blocks_is_not_probed_and_a_model_without_any_is_probed_whole() -> None:
    inside, outside = Stack([Does(lambda x: x)]), Does(lambda x: [x, SQUARE.softmax(-1)][0])
    for parts in ([inside, outside], [outside, inside]):
        assert not probed_in(nn.Sequential(*parts)).scores
    alone = probed_in(Does(lambda x: [x, SQUARE.softmax(-1)][0]))
    assert [*alone.scores] == [""]
    assert not alone.blocks


def test_blocks_are_the_longest_list_of_parts_of_one_class_that_have_parts() -> None:
    one, two = [Does(lambda x: 2 * x)], [Does(lambda x: x + 1) for _ in range(2)]
    leaves = [nn.Linear(12, 12) for _ in range(4)]
    mixed = [Does(lambda x: x), Also(lambda x: x), Does(lambda x: x)]
    for lists in ([one, two], [leaves, one, two], [mixed, two]):
        probed = probed_in(Stack(*lists))
        assert torch.equal(probed.blocks["block0"], INPUT + 1)
        assert torch.equal(probed.blocks["block1"], INPUT + 1 + 1)
    assert [*probed_in(Stack(two, one)).blocks] == []  # the longer one is not called
    assert [*probed_in(Stack(leaves)).blocks] == []


@pytest.mark.parametrize(
    ("act", "is_probed"),
    [
        (lambda x: (x, None), True),
        (lambda x: x.transpose(0, 1), False),
        (lambda x: x[0], False),
        (lambda x: x[..., None], False),
    ],
)
def test_the_stream_is_the_first_output_of_a_block_where_it_has_its_shape(act: Any, is_probed: bool) -> None:
    assert [*probed_in(Watcher(act)).blocks] == ["block0"] * is_probed


def test_nobody_listens_after_a_forward_pass() -> None:
    module = Watcher(lambda x: [x, SQUARE.softmax(-1)][0])
    listener = ModuleListener(module, BY_SHAPE)
    first, second = (listener.listen(lambda: module(INPUT), INPUT.shape[:2])[1] for _ in range(2))
    module(2 * INPUT)
    assert torch.equal(first.blocks["block0"], second.blocks["block0"])
    assert not [part for part in module.modules() if part._forward_hooks or part._forward_pre_hooks]


def test_a_name_that_no_module_has_is_refused_with_the_nearest() -> None:
    entry: Any = entry_of(Attending, "Attending", Watched(attn="blocks.*.atn"))
    with pytest.raises(RequestError, match=r"Attending has no module 'blocks.\*.atn'; nearest: .*blocks.0.attn"):
        check_custom_model("Attending", lambda: entry().build(SHAPE, 11, 7), 11, 7, entry.watched)


def test_an_operation_that_vmap_calls_run_by_run_is_no_reason_to_warn_or_to_call_the_module_so() -> None:
    class Counting(Recurrent):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:  # type: ignore[override]
            x = self.embedding(idx)
            return self.head(x + 0 * torch.histc(x.detach(), bins=4, min=-1, max=1).sum())

    model = CustomModel(lambda: Counting(11, 16, 1), 2, {}, SHAPE)
    model(torch.zeros(2, 2, 7, dtype=torch.long))  # warnings are errors here
    assert not model.one_by_one


def test_memory_that_runs_out_is_no_reason_to_call_a_module_run_by_run() -> None:
    """Fleets that do not fit are halved, which takes the error itself."""
    calls = list[int]()

    class Large(Recurrent):
        def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, None]:
            calls.append(idx.ndim)
            raise MemoryError

    model = CustomModel(lambda: Large(11, 16, 1), 2, {}, SHAPE)
    with pytest.raises(MemoryError):
        model(torch.zeros(2, 2, 7, dtype=torch.long))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("build", "word"),
    [
        (lambda width, depth: None, "vocabulary"),
        (lambda vocabulary, widht: None, "width"),
        ("not callable", "builds a torch.nn.Module"),
    ],
)
def test_a_builder_that_cannot_be_called_is_refused(build: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        entry_of(build, "mine")


ODD = ModelConfig("odd", 24, 3, 4)  # six heads


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("vocabulary, width, depth, heads, head_width, seq_len", (11, 24, 3, 6, 4, 7)),
        ("vocab_size, d_model, n_layer, n_head, head_dim, block_size", (11, 24, 3, 6, 4, 7)),
        ("n_vocab, n_embd, n_layers, n_heads, n_ctx", (11, 24, 3, 6, 7)),
        ("num_tokens, hidden_size, num_layers, num_heads, max_seq_len", (11, 24, 3, 6, 7)),
        ("max_position_embeddings, vocab_size, dim, num_hidden_layers, num_attention_heads", (7, 11, 24, 3, 6)),
        ("vocab_size, *args, scale=0.5, tied=True, kind='a', other=None, **kwargs", (11, (), 0.5, True, "a", None, {})),
    ],
)
def test_a_builder_gets_the_shape_by_every_name_of_published_code(arguments: str, given: tuple[Any, ...]) -> None:
    names: dict[str, Any] = {}
    returned = re.sub(r"=[^,]*|\*", "", arguments)
    exec(f"def build({arguments}): return ({returned})", names)
    entry: Any = entry_of(names["build"], "mine")
    assert entry().build(ODD, 11, 7) == given


def test_the_numbers_switches_and_texts_of_a_builder_are_its_keys() -> None:
    def build(vocab_size: int, scale: float = 0.5, tied: bool = True, kind: str = "a", other: Any = None) -> Any:
        """Made for the test."""
        return scale, tied, kind, other

    entry: Any = entry_of(build, "mine")
    assert entry.__name__ == "mine"
    assert entry.__doc__ == "Made for the test."
    assert {field.name: field.type for field in fields(entry)} == {
        **{"source": "str", "scale": float, "tied": bool},
        "kind": str,
    }
    assert entry(scale=2.0, kind="b").build(ODD, 11, 7) == (2.0, True, "b", None)


class Config:
    """A config of transformers, as far as it is read: some of its names are its own."""

    attribute_map: ClassVar = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer"}

    def __init__(self, **values: Any) -> None:
        self.values = {"vocab_size": 50_000, "n_embd": 96, "n_layer": 12, **values}

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        return cls(**values)


@pytest.mark.parametrize(
    ("values", "small"),
    [
        ({}, {"vocab_size": 11, "n_embd": 24, "n_layer": 3}),  # and no key that it lacks
        ({"max_position_embeddings": 2048, "use_cache": True}, {"max_position_embeddings": 7, "use_cache": False}),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, {"num_attention_heads": 6, "num_key_value_heads": 1}),
        ({"num_attention_heads": 32, "num_key_value_heads": 16}, {"num_key_value_heads": 3}),
        ({"num_attention_heads": 32, "num_key_value_heads": 1}, {"num_key_value_heads": 1}),
        ({"num_attention_heads": 32, "num_key_value_heads": 32}, {"num_key_value_heads": 6}),
        ({"num_attention_heads": 32, "num_key_value_heads": None}, {"num_key_value_heads": 6}),
        ({"head_dim": 128, "v_head_dim": 64, "qk_rope_head_dim": None}, {"head_dim": 4, "v_head_dim": 4}),
        ({"intermediate_size": 384}, {"intermediate_size": 96}),
        ({"n_embd": 48, "intermediate_size": 384}, {"intermediate_size": 192}),
        ({"intermediate_size": 4 * 70}, {"intermediate_size": 72}),  # a multiple of 8
        ({"moe_intermediate_size": 96, "q_lora_rank": 64}, {"moe_intermediate_size": 24, "q_lora_rank": 16}),
        ({"shared_expert_intermediate_size": 192, "kv_lora_rank": 4}, {"shared_expert_intermediate_size": 48}),
        ({"kv_lora_rank": 4, "q_lora_rank": None}, {"kv_lora_rank": 8, "q_lora_rank": None}),
        ({"num_experts": 64, "num_local_experts": 4}, {"num_experts": 8, "num_local_experts": 4}),
        ({"n_routed_experts": 256}, {"n_routed_experts": 8}),
        ({"n_routed_experts": None, "num_experts": 0}, {"n_routed_experts": None, "num_experts": 0}),
        (
            {"attention_dropout": 0.1, "resid_pdrop": 0.2, "drop_path": 1},
            {"attention_dropout": 0.0, "resid_pdrop": 0.0},
        ),
        ({"drop_path": 1, "rope_theta": 1e6}, {"drop_path": 1, "rope_theta": 1e6}),
        ({"pad_token_id": 3, "eos_token_id": 4, "bos_token_id": 5}, dict.fromkeys(("pad_token_id", "eos_token_id"))),
        ({"layer_types": ["a", "b", "c", "d"]}, {"layer_types": ["a", "b", "c"]}),
        ({"layer_types": ["a", "b"]}, {"layer_types": ["a", "b", "b"]}),
        ({"layer_types": None}, {"layer_types": None}),
    ],
)
def test_a_config_is_shrunk_with_its_ratios_and_its_kinds_of_layers(values: Any, small: dict[str, Any]) -> None:
    made = shrunk(Config(**values), 11, 24, 3, 6, 4, 7).to_dict()
    assert {key: made[key] for key in small} == small
    assert {*made} == {*Config(**values).to_dict()}
    assert made["vocab_size"] == 11


def test_a_config_without_a_width_cannot_be_shrunk() -> None:
    with pytest.raises(RequestError, match="hidden_size in Config"):
        shrunk(Config(n_embd=None), 11, 24, 3, 6, 4, 7)


@pytest.fixture
def transformers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for the package, which need not be installed."""

    def fail(**_: Any) -> Any:
        raise KeyError("model_type")

    class MineConfig(Config):
        def to_json_string(self) -> str:
            return json.dumps(self.values)

    built = SimpleNamespace(from_config=lambda config, **how: (config.values, how))
    auto = SimpleNamespace(for_model=lambda **values: MineConfig(**values) if "n_embd" in values else fail())
    package = SimpleNamespace(
        MineConfig=MineConfig, BrokenConfig=fail, AutoConfig=auto, AutoModelForCausalLM=built, Other=None
    )
    monkeypatch.setitem(sys.modules, "transformers", package)
    return package


@pytest.mark.usefixtures("transformers", "here")
def test_a_config_is_given_by_its_class_its_file_or_the_folder_of_it() -> None:
    Path("config.json").write_text('{"n_embd": 48}')
    for given, width in (("MineConfig", 96), ("config.json", 48), (".", 48)):
        name, build, text = huggingface_builder(given)
        assert (name, json.loads(text)["n_embd"]) == ("Mine", width)
        values, how = build(11, 24, 3, 6, 4, 7)
        assert (values["n_embd"], values["vocab_size"]) == (24, 11)
        assert how == {"attn_implementation": "eager"}
        assert own_code.read("model", given).remark.startswith("Mine is shrunk")
    absolute = str(Path("config.json").resolve())
    assert own_code.entries_for_jobs([own_code.read("model", "config.json")])[0][:2] == ["model", absolute]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("MinConfig", "nearest: MineConfig"),
        ("XyzzyConfig", "nearest: LlamaConfig, Qwen3Config, GPT2Config"),
        ("BrokenConfig", "BrokenConfig cannot be made without arguments.*KeyError: 'model_type'"),
        ("broken.json", "broken.json is no config of transformers: JSONDecodeError"),
        ("other.json", "other.json is no config of transformers.*KeyError: 'model_type'"),
        ("list.json", "list.json is no config of transformers: TypeError"),
        ("absent.json", "absent.json is no config of transformers"),
    ],
)
@pytest.mark.usefixtures("transformers", "here")
def test_a_config_that_cannot_be_made_is_refused_in_a_line(given: str, said: str) -> None:
    for name, text in (("broken", "{"), ("other", '{"model_type": "nope"}'), ("list", "[1]")):
        Path(f"{name}.json").write_text(text)
    with pytest.raises(RequestError, match=said) as refusal:
        own_code.read("model", given)
    assert "\n" not in str(refusal.value)


def test_a_key_of_its_own_is_known(here: Path, output_of: OutputOf) -> None:
    (here / "own.py").write_text("import torch\n\nclass Mine(torch.optim.SGD):\n    pass\n")
    assert "optimizer.momentun" in output_of(
        "stress", "--dry-run", "--optimizer", "own.py:Mine", "optimizer.momentun=1", code=2
    )


def test_a_file_that_was_changed_is_read_again(tmp_path: Path) -> None:
    file, links = tmp_path / "own.py", []
    for base in ("SGD", "NAdam"):
        file.write_text(f"import torch\n\nclass Mine(torch.optim.{base}):\n    pass\n")
        links.append((own_code.read("optimizer", f"{file}:Mine"), LINKS["Mine"].optimizer.__bases__))
    (first, sgd), (second, nadam) = links
    assert (sgd, nadam) == ((torch.optim.SGD,), (torch.optim.NAdam,))
    assert first.words != second.words


# A model and an optimizer in files of their own, with places for what goes wrong, which is in the line "# here".
MODEL = """
import sys, torch
from torch import nn

class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        raise ArithmeticError("backward")  {function}

class Mine(nn.Module):
    def __init__(self, vocab_size, n_embd):
        super().__init__()
        self.embedding, self.head, self.calls = nn.Embedding(vocab_size, n_embd), nn.Linear(n_embd, vocab_size), 0
        {init}
    def hook(self, *gradients):
        raise ValueError("in a hook")  {hook}
    def forward(self, idx):
        self.calls += 1
        {before}
        logits = self.head(self.embedding(idx))
        {after}
        return logits
"""
OPTIMIZER = """
import sys, torch
from collections import deque

class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3{arguments}):
        super().__init__(params, {{"lr": lr}})
        {init}
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = n = state.get("n", 0) + 1
                {step}
                p.sub_(group["lr"] * p.grad)
"""
HERE = "# here"


def written(template: str, **parts: str) -> int:
    """Write ``mine.py`` with these parts; returns the number of the line that is marked, 0 without one."""
    nothing = dict.fromkeys(("function", "hook", "arguments"), "") | dict.fromkeys(
        ("init", "before", "after", "step"), "pass"
    )
    text = template.format(**nothing | parts)
    Path("mine.py").write_text(text)
    return next((number for number, line in enumerate(text.splitlines(), 1) if HERE in line), 0)


def tree_of(kind: str, *words: str) -> dict[str, Any]:
    """The config tree of a small run with the code in ``mine.py``."""
    code = own_code.read(kind, "mine.py:Mine")
    return tree(*code.with_settings([*words, "steps=6", "probes=none"]))


def refusal_of(kind: str) -> str:
    with pytest.raises(RequestError) as refusal:
        check_own_code(run_config(tree_of(kind)))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"before": f"raise ValueError('two\\nlines')  {HERE}"}, "ValueError: two lines"),
        ({"before": f"sys.exit(0)  {HERE}"}, "SystemExit: 0"),
        ({"after": f"logits = logits.view(1, 2, 3)  {HERE}"}, "RuntimeError: shape"),
        ({"init": f"self.heads = {{}}['heads']  {HERE}"}, "KeyError: 'heads'"),
        ({"init": f"raise SystemExit  {HERE}"}, "SystemExit"),
        ({"init": f"self.large = nn.Parameter(torch.empty(10**16))  {HERE}"}, "RuntimeError: "),
        ({"init": f"raise MemoryError  {HERE}"}, "MemoryError"),
        ({"hook": HERE, "init": "self.head.register_full_backward_hook(self.hook)"}, "ValueError: in a hook"),
        ({"hook": HERE, "after": "logits.requires_grad and logits.register_hook(self.hook)"}, "ValueError: in a hook"),
        ({"function": HERE, "after": "logits = Fails.apply(logits)"}, "ArithmeticError: backward"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_a_model_raises_is_told_in_a_line_with_its_place(parts: dict[str, str], said: str) -> None:
    line = written(MODEL, **parts)
    assert refusal_of("model").startswith(f"custom model Mine fails at mine.py:{line}: {said}")
    assert "\n" not in refusal_of("model")


@pytest.mark.parametrize(
    ("after", "said"),
    [
        ("logits = logits.mean()", r"makes \(\) of tokens"),
        ("logits = logits[:, :-1]", r"makes \(2, 11, 256\) of tokens"),
        ("yield logits", "makes generator of tokens"),
        ("logits = [logits]", "makes list of tokens"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_model_that_makes_something_else_is_refused_with_its_place(after: str, said: str) -> None:
    written(MODEL, after=after)
    assert re.search(rf"^custom model Mine {said} .* \(mine.py:13\)$", refusal_of("model"))


@pytest.mark.parametrize(
    "after",
    [
        "return logits, None",
        "return types.SimpleNamespace(loss=None, logits=logits)",
        "return collections.namedtuple('Output', 'loss logits')(None, logits)",
    ],
)
@pytest.mark.usefixtures("here")
def test_logits_may_stand_in_an_output_as_published_code_makes_it(after: str) -> None:
    written(f"import collections, types\n{MODEL}", after=after)
    check_own_code(run_config(tree_of("model")))


@pytest.mark.parametrize("after", ["logits = logits * torch.rand(1)", "logits = logits + 0 * torch.rand(1)"])
@pytest.mark.usefixtures("here")
def test_a_model_that_draws_at_random_is_refused_even_where_it_makes_no_difference(after: str) -> None:
    written(MODEL, after=after)
    assert "makes other logits of the same tokens the next time" in refusal_of("model")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("class Mine:\n    def __init__(self, vocab_size): pass", "builds Mine, not a torch.nn.Module (mine.py:1)"),
        ("def Mine(vocab_size):\n    yield", "builds generator, not a torch.nn.Module (mine.py:1)"),
        ("from torch import nn\ndef Mine(vocab_size):\n    return nn.Identity()", "has no parameters (mine.py:2)"),
        (
            "from torch import nn\ndef Mine(vocab_size):\n    return nn.Embedding(vocab_size, vocab_size).bfloat16()",
            "has weight in torch.bfloat16: keep weights in float32",
        ),
        ("Mine = 3", "Mine is no function or class"),
        ("from torch import nn\nMine = nn.Linear(2, 2)", "Mine takes no vocabulary"),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_no_model_is_refused(text: str, said: str) -> None:
    Path("mine.py").write_text(text)
    assert said in refusal_of("model")


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        ("import torch\ndef Mine(:", "mine.py:2", "SyntaxError: "),
        ("\n\nimport a_package_that_nobody_has", "mine.py:3", "ModuleNotFoundError: No module named 'a_package"),
        ("import sys\nsys.exit(0)", "mine.py:2", "SystemExit: 0"),
        ("def inner():\n    1 / 0\ninner()", "mine.py:2", "ZeroDivisionError: "),
        ("import json\njson.loads('x')", "mine.py:2", "JSONDecodeError: "),
        ("import broken_beside", "broken_beside.py:1", "SyntaxError: "),
    ],
)
@pytest.mark.parametrize("kind", own_code.KINDS)
@pytest.mark.usefixtures("here")
def test_a_file_that_cannot_be_imported_is_told_in_a_line(kind: str, text: str, place: str, said: str) -> None:
    Path("broken_beside.py").write_text("def (:")
    Path("mine.py").write_text(text)
    assert f"mine.py cannot be imported: it fails at {place}: {said}" in refusal_of(kind)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (
            {"step": f"raise ValueError('no step')  {HERE}"},
            "Mine fails in its first steps at mine.py:{}: ValueError: no",
        ),
        ({"step": f"sys.exit(0)  {HERE}"}, "Mine fails in its first steps at mine.py:{}: SystemExit: 0"),
        ({"init": f"raise KeyError('rank')  {HERE}"}, "the constructor of Mine fails at mine.py:{}: KeyError: 'rank'"),
        ({"init": f"sys.exit()  {HERE}"}, "the constructor of Mine fails at mine.py:{}: SystemExit"),
        ({"step": f"torch.empty(10**16)  {HERE}"}, "own code fails at mine.py:{}: RuntimeError: "),
        ({"arguments": ", *, rank"}, "Mine takes 'rank', which has no default"),
        ({"step": "p.grad.zero_()"}, "Mine moves no weight in its first 20 steps"),
        ({"step": "p.grad.fill_(float('nan'))"}, "Mine makes weights that are not finite"),
        ({"step": "if p.ndim < 2: p.mul_(torch.inf)"}, "Mine makes weights that are not finite"),
        ({"step": "p.data, p.grad = p.data.half(), p.grad.half()"}, "Mine makes float16 ["),
        ({"step": "p.data = p.data[:1]; p.grad = p.grad[:1]"}, "Mine makes float32 [1"),
        ({"step": "state.setdefault('past', []).append(p.grad)"}, "Mine keeps something else with every step"),
        ({"step": "state.setdefault('past', deque()).append(1.0)"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = torch.zeros(n)"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = torch.zeros(2).to((torch.float32, torch.float64)[n % 2])"}, "something else with"),
        ({"step": "state['mode'] = 'ab'[n % 2]"}, "Mine keeps something else with every step"),
        ({"step": "group['mode'] = 'ab'[n % 2]"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = (p.grad,)"}, "/past as tuple, which no checkpoint can hold"),
        ({"step": "state['past'] = p.grad.to_sparse()"}, "/past as a sparse tensor, which no checkpoint can hold"),
        ({"step": "state['past'] = p.grad.numpy()"}, "/past as ndarray, which no checkpoint can hold"),
        ({"step": "state['past'] = {'deep': [object()]}"}, "/past/deep/0 as object, which no checkpoint can hold"),
        ({"init": "self.k = 0", "step": "self.k += 1"}, "Mine changes its attribute k"),
        ({"init": "self.past = {}", "step": "self.past[p] = p.grad"}, "Mine changes its attribute past"),
        ({"init": "self.past = (torch.zeros(1), )", "step": "self.past[0].add_(1)"}, "Mine changes its attribute past"),
        ({"step": "self.made_late = [n]"}, "Mine changes its attribute made_late"),
    ],
)
@pytest.mark.usefixtures("here")
def test_an_optimizer_that_fails_in_a_trial_is_refused_before_training(parts: dict[str, str], said: str) -> None:
    line = written(OPTIMIZER, **parts)
    told = refusal_of("optimizer")
    assert said.format(line) in told
    assert "\n" not in told
    assert "mine.py:" in told or "rank" in parts.get("arguments", "")


@pytest.mark.parametrize(
    "parts",
    [
        {"init": "self.past = list(params)", "step": "self.past"},  # its weights are no state
        {"step": "state.setdefault('mode', 'warm'); state.setdefault('shape', (2, [3.0, None]))"},
        {"step": "if n == 2: state['second'] = p.grad"},
        {"step": "p.grad.mul_(n > 5)"},  # as RAdam, which moves nothing at first
        {"step": "p.grad.mul_(p.ndim > 1)"},
        {"step": "group['warm'] = n < 3"},
    ],
)
@pytest.mark.usefixtures("here")
def test_an_optimizer_may_keep_constants_and_begin_late(parts: dict[str, str]) -> None:
    written(OPTIMIZER, **parts)
    check_own_code(run_config(tree_of("optimizer")))


LATE = [
    ("model", {"before": f"if self.calls > 6: raise ValueError('late')  {HERE}"}, "at mine.py:{}: ValueError: late"),
    ("model", {"before": f"if self.calls > 6: sys.exit(0)  {HERE}"}, "at mine.py:{}: SystemExit: 0"),
    ("model", {"before": f"if self.calls > 6: raise KeyboardInterrupt  {HERE}"}, "at mine.py:{}: KeyboardInterrupt"),
    ("model", {"before": f"assert len(idx) < 3, 'batch'  {HERE}"}, "at mine.py:{}: AssertionError: batch"),
    ("model", {"after": "logits = logits[:2]"}, ": Mine makes (2, 12, 256) of tokens ("),
    ("optimizer", {"step": f"if n == 5: raise ValueError('fifth')  {HERE}"}, "at mine.py:{}: ValueError: fifth"),
    ("optimizer", {"step": f"if n == 5: sys.exit(0)  {HERE}"}, "at mine.py:{}: SystemExit: 0"),
    ("optimizer", {"step": f"if n == 5: raise MemoryError('mine')  {HERE}"}, "at mine.py:{}: MemoryError: mine"),
    ("optimizer", {"step": "if n == 5: p.data, p.grad = p.double(), p.grad.double()"}, ": Mine makes float64 ["),
    ("optimizer", {"step": "if n == 5: state['late'] = p.grad"}, "/late only after its first steps (mine.py:5)"),
    (
        "optimizer",
        {"step": "state['past'] = torch.zeros(2 if n < 5 else 1)"},
        "/past in its state, which was float32 [2]",
    ),
    ("optimizer", {"step": "n == 5 and state.clear()"}, "Mine no longer keeps weight/"),
]


@pytest.mark.parametrize(("kind", "parts", "said"), LATE)
@pytest.mark.usefixtures("as_in_training", "briefly")
def test_code_that_fails_in_a_job_is_the_reason_of_its_runs(
    here: Path, kind: str, parts: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a traceback; an interrupt that no person can have sent is theirs, too."""
    monkeypatch.setattr("signal.getsignal", lambda _: signal.SIG_IGN)  # as in a process of its own
    line = written(MODEL if kind == "model" else OPTIMIZER, **parts)
    fleet, notes = points([tree_of(kind, f"seed={seed}") for seed in range(2)]), list[str]()
    monkeypatch.setattr("lab.sweeping.progress.ProgressWriter.note", lambda _, text: notes.append(text))
    assert not train_fleet(here, "plan", 0, {point.id: point.config for point in fleet})
    reasons = set(store.read(here).runs["reason"])
    assert len(reasons) == 1
    assert reasons.pop().startswith("own code fails")
    assert said.format(line) in store.read(here).runs["reason"][0]
    assert not [note for note in notes if "Traceback" in note]


TINY = ("data=synthetic", "validation=short", "model.width=16", "model.head_width=8", "seq_len=12", "batch_size=4")
TINY += ("steps=6", "seed=0", "hydra/launcher=basic")


@pytest.mark.usefixtures("here", "briefly")
def test_a_run_that_own_code_ends_is_told_in_a_line(output_of: OutputOf) -> None:
    line = written(OPTIMIZER, step=f"if n == 5: raise ValueError('fifth')  {HERE}")
    told = output_of("train", "--optimizer", "mine.py:Mine", *TINY, "out=out", code=2)
    assert told == f"lab: own code fails at mine.py:{line}: ValueError: fifth\n"


@pytest.mark.usefixtures("here", "briefly")
def test_a_crash_test_whose_runs_all_failed_by_own_code_has_no_card(output_of: OutputOf) -> None:
    line = written(MODEL, before=f"assert len(idx) < 3, 'large'  {HERE}")
    told = output_of("stress", "--model", "mine.py:Mine", *TINY, "--tests", "lr_x10", "out=out", code=2).splitlines()
    failure = f"own code fails at mine.py:{line}: AssertionError: large"
    assert told[-1].endswith(f" has no card, since 6 of 6 runs failed: {failure}")
    assert "lab: Mine takes no depth, so it has the size that it is built with" in told
    assert not [word for word in told if "Traceback" in word]
    assert not list(Path("out").rglob("card.*"))


@pytest.mark.usefixtures("here", "briefly")
def test_a_crash_test_whose_runs_failed_otherwise_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.training.fleet.Fleet.step", None)
    written(MODEL)
    assert main(["stress", "--model", "mine.py:Mine", *TINY, "--tests", "lr_x10", "out=out"]) == 1
    told = capsys.readouterr().err
    assert told.endswith(" has no card, since 6 of 6 runs failed: TypeError: 'NoneType' object is not callable\n")
    assert "Traceback" in told


@pytest.mark.usefixtures("here")
def test_a_model_that_fails_while_probes_listen_is_refused_in_a_line() -> None:
    line = written(MODEL, before=f"assert idx.any(), 'zeros'  {HERE}")
    with pytest.raises(RequestError, match=f"own code fails at mine.py:{line}: AssertionError: zeros"):
        probed_modules(run_config(tree_of("model")))


@pytest.mark.usefixtures("here")
def test_a_test_that_own_code_cannot_take_is_left_out_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A depth that it refuses is no reason to refuse the card."""
    plans = list[Plan]()
    monkeypatch.setattr("lab.features.stress.training._card_of_possible_tests", plans.append)
    line = written(MODEL.replace("n_embd)", "n_embd, n_layer)"), init=f"assert n_layer < 8, 'too deep'  {HERE}")
    code = [own_code.read("model", "mine.py:Mine")]
    make_card(read_plan(TINY, "lab stress", names=["lr_x10", "depth"], code=code))
    assert [test.name for test in plans[0].tests] == ["lr_x10"]
    assert [f"fails at mine.py:{line}: AssertionError: too deep" in why for why in plans[0].left_out.values()] == [True]


@pytest.mark.usefixtures("here")
def test_a_check_only_tries_own_code(output_of: OutputOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.features.stress.command.make_card", lambda plan: pytest.fail("it trains"))
    words = ["stress", "--model", "mine.py:Mine", *TINY, "--check"]
    written(MODEL)
    assert output_of(*words).startswith("Mine with ")
    assert "works: it trains in fleets" in output_of(*words)
    line = written(MODEL, before=f"assert len(idx) > 99, 'small'  {HERE}")
    assert f"fails at mine.py:{line}: AssertionError: small" in output_of(*words, code=2)
    assert not Path("runs").exists()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What trials of a dry run answer, in a process that knows no code of the user's own yet; all is pickled."""
    answers = list[Any]()

    def in_another_process(work: Any, arguments: Any, slots: Any) -> list[JobEnd]:
        for sent in map(pickle.dumps, arguments):
            for registry in (LINKS, MODELS):
                registry._entries.pop("Mine", None)
            answers.append(work(*pickle.loads(sent)))
        return [JobEnd(0, False, 1.0, answers[-1])] * len(slots)

    monkeypatch.setattr("lab.sweeping.dry_run.run_jobs", in_another_process)
    monkeypatch.setattr("lab.sweeping.dry_run.ENOUGH", 1e-9)
    return answers


@pytest.mark.parametrize("name", ["lion", "muon", "adopt"])
def test_an_optimizer_of_the_lab_is_given_by_its_name_and_stands_beside_that_of_the_recipe(name: str) -> None:
    code = own_code.read_options(OptionParser("stress").read(["--optimizer", name]))
    plans = read_plans(["llama"], ["steps=20"], "lab stress", code=code)
    assert [plan.recipe for plan in plans] == [f"llama trained by {name} with steps=20", "llama with steps=20"]
    trees = [next(iter(compose_settings(plan.request, [Setting((), 0.01)]).values()))[0] for plan in plans]
    assert [made["optimizer"]["name"] for made in trees] == [name, "adamw_coupled"]
    with pytest.raises(RequestError, match=f"nearest: .*{name}"):
        own_code.read("optimizer", f"{name}x")


@pytest.mark.parametrize("kind", own_code.KINDS)
@pytest.mark.usefixtures("here", "answers")
def test_a_dry_run_tries_own_code_in_another_process(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    template, said = {
        "model": (MODEL, "AssertionError: large"),
        "optimizer": (OPTIMIZER, "AssertionError: fourth"),
    }[kind]
    words = ["train", f"--{kind}", "mine.py:Mine", *TINY, "out=out", "--dry-run"]
    written(template)
    assert main(words) == 0
    assert "FLOPs each, about" in capsys.readouterr().out
    written(template, before="assert len(idx) < 3, 'large'", step="assert n < 4, 'fourth'")
    assert main(words) == 2
    assert re.search(rf"cannot be tried here: own code fails at mine.py:\d+: {said}", capsys.readouterr().err)
    assert not Path("out").exists()


@pytest.mark.usefixtures("here")
def test_a_dry_run_halves_a_fleet_for_which_own_code_has_no_memory(
    answers: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    line = written(MODEL, before=f"if len(idx) > 2: raise MemoryError  {HERE}")
    assert main(["train", "-m", "--model", "mine.py:Mine", *TINY, "seed=0,1", "out=out", "--dry-run"]) == 2
    assert capsys.readouterr().err.endswith(f"own code fails at mine.py:{line}: MemoryError\n")
    assert answers == [None, f"own code fails at mine.py:{line}: MemoryError"]


@pytest.mark.usefixtures("here")
def test_no_step_of_an_own_optimizer_can_be_traced() -> None:
    written(OPTIMIZER)
    for engine in ("captured", "compiled"):
        with pytest.raises(RequestError, match=r"'Mine'.*engine=eager"):
            run_config(tree_of("optimizer", f"engine={engine}"))


ALIASES = """
import functools, torch

def make(base):
    class optimizer(base):
        pass
    return optimizer

class Plain(torch.optim.SGD):
    def step(self, closure=None):
        return super().step()

Mine, Other = make(torch.optim.SGD), Plain
Nan = Null = Plain
Short = NaN = lambda vocab_size: model(vocab_size)

def model(vocab_size):
    return torch.nn.Embedding(vocab_size, vocab_size)

Part = functools.partial(model)
"""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("optimizer", name) for name in ("Mine", "Plain", "Other", "Nan", "Null")),
        *(("model", name) for name in ("Short", "Part", "NaN")),
    ],
)
@pytest.mark.usefixtures("here")
def test_code_has_the_name_that_it_was_given_by(kind: str, name: str) -> None:
    Path("mine.py").write_text(ALIASES)
    code = own_code.read(kind, f"mine.py:{name}")
    plan = read_plan([], "lab stress", code=[code])
    assert plan.recipe == {"model": name, "optimizer": f"the default recipe trained by {name}"}[kind]
    assert plan.folder == Path("runs/stress", name)
    config = run_config(tree(*code.words))
    assert (config.optimizer.name if kind == "optimizer" else next(iter(config.custom_model))) == name


def source_of(kind: str, given: Any) -> tuple[str, str]:
    """The name of code, and the digest on which ids depend."""
    code = own_code.read(kind, given)
    return code.name, re.search(r"source='(\w+)'", " ".join(code.words))[1]  # type: ignore[index]


@pytest.mark.parametrize(("kind", "name"), [("model", "model"), ("optimizer", "Plain")])
def test_a_digest_that_looks_like_a_number_is_none(
    kind: str, name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_code, "text_digest", lambda text: "18596108006599e0")
    Path("mine.py").write_text(ALIASES)
    composed = tree(*own_code.read(kind, f"mine.py:{name}").words)
    own = composed["optimizer"] if kind == "optimizer" else composed["custom_model"][name]
    assert own["source"] == "18596108006599e0"


@pytest.fixture
def theirs(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of ``mine.py``, as a script of the user's imports it."""
    Path("mine.py").write_text(ALIASES)
    monkeypatch.syspath_prepend(here)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield importlib.import_module("mine")
    sys.modules.pop("mine", None)


@pytest.mark.parametrize(("kind", "name"), [("optimizer", "Mine"), ("optimizer", "Plain"), ("model", "model")])
def test_an_object_finds_the_runs_of_its_file(theirs: Any, kind: str, name: str) -> None:
    assert source_of(kind, getattr(theirs, name)) == source_of(kind, f"mine.py:{name}")


@pytest.mark.parametrize("given", [torch.optim.NAdam, "NAdam", "torch.optim:NAdam"])
def test_an_optimizer_of_torch_finds_its_runs_however_it_is_given(given: Any) -> None:
    assert source_of("optimizer", given) == ("NAdam", text_digest(""))


def test_an_object_that_is_no_longer_that_of_its_file_finds_other_runs(theirs: Any) -> None:
    of_file = source_of("optimizer", "mine.py:Plain")
    theirs.Plain.step = lambda self, closure=None: None
    patched = source_of("optimizer", theirs.Plain)
    Path("mine.py").write_text(ALIASES.replace("super().step()", "None"))
    changed = source_of("optimizer", theirs.Mine)  # what it needs of the file may have changed, too
    inside = source_of("optimizer", theirs.make(torch.optim.SGD))
    assert inside[0] == "optimizer"
    assert len({of_file, patched, changed, inside, source_of("optimizer", "mine.py:Plain")}) == 5


def test_a_class_of_a_notebook_finds_its_runs_until_what_it_does_changes() -> None:
    cell = (
        "import torch\nclass Mine(torch.optim.SGD):\n    k = {}\n    def step(self, closure=None):\n        return {}"
    )

    def defined(text: str) -> tuple[str, str]:
        cell = {"__name__": "__main__"}
        exec(compile(text, f"<cell {len(text)}>", "exec"), cell)
        return source_of("optimizer", cell["Mine"])

    first = defined(cell.format(1, 2))
    assert first == defined("\n\n" + cell.format(1, 2))
    assert len({first, defined(cell.format(1, 3)), defined(cell.format(2, 2))}) == 3


@pytest.mark.usefixtures("here", "unreported", "briefly")
def test_train_takes_own_code_in_python_as_on_the_command_line(theirs: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import lab

    words = [word for word in TINY if not word.startswith("hydra")]
    assert main(["train", "--optimizer", "mine.py:Plain", *words, "out=out"]) == 0
    assert "1 trained, 0 already there" in capsys.readouterr().out
    lab.train(*words, out="out", optimizer=theirs.Plain)
    assert "0 trained, 1 already there" in capsys.readouterr().out
    assert set(store.read(Path("out")).runs["optimizer.name"]) == {"Plain"}
    requests = json.loads(Path("out", "requests.json").read_text())
    assert any("--optimizer=Plain" in str(request) for request in requests)


@pytest.mark.parametrize("command", [["train"], ["sweep", "quickstart"]])
@pytest.mark.usefixtures("here")
def test_train_and_sweep_take_own_code_with_its_keys(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The rate is its author's, where no sweep gives others."""
    written(OPTIMIZER, arguments="=2e-3, k=3")
    Path("mine.py").write_text(Path("mine.py").read_text().replace("lr=1e-3=2e-3", "lr=2e-3"))
    assert main([*command, "--optimizer", "mine.py:Mine", "optimizer.k=5", "--cfg", "job"]) == 0
    chosen = OmegaConf.create(capsys.readouterr().out).optimizer
    assert (chosen.name, list(chosen.chain), chosen.k) == ("Mine", ["clip", "Mine", "peak", "schedule"], 5)
    assert chosen.lr == (2e-3 if command == ["train"] else 3e-4)


@pytest.mark.parametrize(
    "name", ["mine.py", "two words.py", "ünï.py", 'it\'s "quoted".py', "$dollar{x}=1.py", "back\\slash.py"]
)
@pytest.mark.usefixtures("here")
def test_jobs_find_a_file_of_any_name(name: str) -> None:
    """As a launcher passes it: in the words of a job."""
    Path(name).write_text(ALIASES)
    entries = own_code.entries_for_jobs(
        [own_code.read("optimizer", f"{name}:Mine"), own_code.read("optimizer", "NAdam")]
    )
    (word,) = parse([f"+own_code={quoted(json.dumps(entries))}"])
    LINKS._entries.clear()
    own_code.register(json.loads(str(word.value)))
    assert {"Mine", "NAdam"} <= {*LINKS}


@pytest.mark.usefixtures("here")
def test_a_job_that_finds_another_text_does_not_train_it() -> None:
    Path("mine.py").write_text(ALIASES)
    entries = own_code.entries_for_jobs([own_code.read("optimizer", "mine.py:Mine")])
    Path("mine.py").write_text(ALIASES + "\n")
    with pytest.raises(RequestError, match=r"mine.py:Mine changed since these runs were planned"):
        own_code.register(entries)


@pytest.mark.extras
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "GPT2Config", "MixtralConfig", "DeepseekV3Config"])
def test_configs_of_transformers_are_shrunk_and_trainable(name: str) -> None:
    _, build, _ = huggingface_builder(name)
    entry: Any = entry_of(build, name)
    module = entry().build(SHAPE, 50, 12)
    check_custom_model(name, lambda: entry().build(SHAPE, 50, 12), 50, 12)
    assert module.config.num_hidden_layers == 2
    assert module.config.hidden_size == 16
    assert module.config.vocab_size == 50


def test_models_of_ones_own_have_more_steps_than_recipes_unless_told_otherwise() -> None:
    def steps(*words: str) -> list[str]:
        plan = read_plan(words, "lab stress", code=[own_code.read("model", f"{__file__}:Recurrent")])
        return [str(word.value) for word in plan.request.words if word.key == "steps"]

    assert steps() == ["400"]
    assert steps("steps=30") == ["30"]


@pytest.mark.slow
def test_a_card_of_own_code(tmp_path: Path) -> None:
    """The command trains in processes of its own, which find the code; the card has a line for what can be tested."""
    import json

    file = Path(__file__)
    words = ["--tests", "lr_x10,residual_growth", "seed=0", "steps=20", f"out={tmp_path}/card", "--json"]
    assert main(["stress", "--optimizer", f"{file}:Memory", "--model", f"{file}:Recurrent", *words]) == 0
    own, recipes = sorted((tmp_path / "card").glob("*/card.json"), key=lambda path: "Memory" not in path.parent.name)
    for path in (own, recipes):
        assert [test["name"] for test in json.loads(path.read_text())["tests"]] == ["lr_x10", "residual_growth"]
    assert set(store.read(own.parent).runs["optimizer.name"]) == {"Memory"}
    assert set(store.read(recipes.parent).runs["optimizer.name"]) == {"adamw"}
    assert set(store.read(recipes.parent).runs["custom_model"]) == {"Recurrent"}
