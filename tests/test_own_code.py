"""A user's own optimizer and module: trained as their authors mean it, in any company, and refused in one line."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lab import run_config
from lab.__main__ import main
from lab.cli import own_code
from lab.cli.stress import read_plan
from lab.core.errors import RequestError
from lab.core.hooks import listening
from lab.core.registry import LINKS, MODELS
from lab.core.schema import stack
from lab.model.config import ModelConfig
from lab.model.custom import CustomModel, check_custom_model
from lab.model.own_module import entry_of, huggingface_builder
from lab.model.watched import Watched
from lab.optim.links.torch_optimizer import link_of
from lab.optim.optimizer import Optimizer, build_optimizer
from lab.optim.schedule import Cosine
from lab.records import store
from lab.sweeping.job import train_fleet
from lab.sweeping.planner import points
from lab.training.building import check_own_code
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


def test_it_goes_on_from_its_tensors_in_another_process() -> None:
    gradients, rate_r = noise(6, 1), torch.ones(1, dtype=torch.float64)
    whole = walk(own(Memory, {"lr": 0.1}), gradients, rate_r.expand(6, 1))
    weights, state = draw(100), None
    for part in (gradients[:3], gradients[3:]):
        chain = own(Memory, {"lr": 0.1})  # as a new process would build it
        fresh = chain.begin(weights)
        if state:
            for link, tensors in state.items():
                assert fresh[link].keys() == tensors.keys()
        state = state or fresh
        for step, gradient in enumerate(part):
            chain.step(gradient, state, at(step, weights, rate_r))
    for name, weight in whole.items():
        assert torch.equal(weights[name], weight)


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
    heard = {}
    with listening(lambda kind, where, *values: heard.update({(kind, where): values[0]})):
        logits_rbtv, _ = model(tokens_rbt)
    torch.manual_seed(4)
    alone = make()
    assert torch.equal(logits_rbtv[1], alone(tokens_rbt[1], tokens_rbt[1])[0])
    first = alone.blocks[0](2.0 * alone.embedding(tokens_rbt[1]))
    assert torch.equal(heard["block_output", "block0"][1], first)
    assert ("block_output", "block1") in heard


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


def heard_of(
    watched: Watched, *, fused: bool, one_by_one: bool = False
) -> tuple[dict[Any, Tensor], CustomModel, Tensor]:
    """What two runs of a model announce, the model, and its tokens."""
    entry: Any = entry_of(Attending, "Attending")
    model = CustomModel(lambda: entry(fused=fused).build(SHAPE, 11, 7), 2, {}, SHAPE, watched=watched)
    model.one_by_one = one_by_one
    model.initialize((3, 4), {})
    heard, tokens_rbt = {}, torch.arange(28).reshape(2, 2, 7) % 11
    silent, _ = model(tokens_rbt)
    with listening(lambda kind, where, *values: heard.update({(kind, where): values[0]})):
        logits_rbtv, _ = model(tokens_rbt)
    assert torch.equal(logits_rbtv, silent)
    return heard, model, tokens_rbt


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_attention_scores_are_heard_by_their_shape(fused: bool, one_by_one: bool) -> None:
    heard, _, tokens_rbt = heard_of(Watched(), fused=fused, one_by_one=one_by_one)
    torch.manual_seed(4)
    alone = Attending(11, 16, 2, fused)
    expected, _ = alone.blocks[0].attn.scores(alone.embedding(tokens_rbt[1]))
    past = torch.ones(7, 7).tril().bool()
    torch.testing.assert_close(heard["scores", "block0"][1][..., past], expected[..., past])
    assert {where for kind, where in heard if kind == "scores"} == {"block0", "block1"}


def test_attention_scores_are_heard_in_modules_of_a_name() -> None:
    heard, _, tokens_rbt = heard_of(Watched(attn="blocks.*.other", block="blocks.1"), fused=False)
    torch.manual_seed(3)
    alone = Attending(11, 16, 2)
    expected, _ = alone.blocks[0].other.scores(alone.blocks[0].attn(alone.embedding(tokens_rbt[0])))
    past = torch.ones(7, 7).tril().bool()
    torch.testing.assert_close(heard["scores", "blocks.0.other"][0][..., past], expected[..., past])
    assert {where for kind, where in heard if kind == "scores"} == {"blocks.0.other", "block0"}
    assert [where for kind, where in heard if kind == "block_output"] == ["block0"]


def test_both_modules_of_a_block_have_a_place_of_their_own() -> None:
    heard, *_ = heard_of(Watched(attn="blocks.*.*"), fused=True)
    places = {where for kind, where in heard if kind == "scores"}
    assert {"block0.attn", "block0.other", "block1.attn", "block1.other"} <= places


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
    ("text", "said"),
    [
        ("class Mine:\n    def __init__(self, vocab_size): pass", "builds Mine, not a torch.nn.Module (mine.py:1)"),
        ("def Mine(vocab_size):\n    yield", "builds generator, not a torch.nn.Module (mine.py:1)"),
        ("from torch import nn\ndef Mine(vocab_size):\n    return nn.Identity()", "has no parameters (mine.py:2)"),
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
        ({"step": "p.mul_(torch.inf)"}, "Mine makes weights that are not finite"),
        ({"step": "p.data, p.grad = p.data.half(), p.grad.half()"}, "Mine makes float16 ["),
        ({"step": "p.data = p.data[:1]; p.grad = p.grad[:1]"}, "Mine makes float32 [1"),
        ({"step": "state.setdefault('past', []).append(p.grad)"}, "Mine keeps something else with every step"),
        ({"step": "state.setdefault('past', deque()).append(1.0)"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = torch.zeros(n)"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = torch.zeros(2).to((torch.float32, torch.float64)[n % 2])"}, "something else with"),
        ({"step": "state['mode'] = 'ab'[n % 2]"}, "Mine keeps something else with every step"),
        ({"step": "group['mode'] = 'ab'[n % 2]"}, "Mine keeps something else with every step"),
        ({"step": "state['past'] = (p.grad,)"}, "/past as tuple, which no checkpoint can hold"),
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
        {"step": "state['late'] = state.get('late', 0) + (n > 1)"},
        {"step": "p.grad.mul_(n > 5)"},  # as RAdam, which moves nothing at first
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
    assert set(store.read(recipes.parent).runs["guest"]) == {"Recurrent"}
