"""What an accelerator asks of a step, asked where there is none: it looks at no value, and can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode

import lab.training.fleet
from lab import Fleet
from lab.training.engine import Captured, Compiled
from lab.training.loop import train
from small import configs

NOWHERE = torch.device("meta")
RUNS = ("optimizer.lr=1e-2 seed=0", "optimizer.lr=1e-1 seed=1", "optimizer.lr=1e-2 seed=1 data.seed=0")
RECIPES = [
    "data=stdlib precision=bf16 optimizer=adamw_coupled",
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_loop_asks_for_no_value(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without values ``.item()``, a branch on a tensor, or a tensor left on the host is an error."""
    monkeypatch.setattr(lab.training.fleet, "pick_device", lambda name: NOWHERE)
    shared = ("probes=all", "probes.every=2", "steps=4", "model.depth=1", *recipe.split())
    fleet = Fleet(configs(*RUNS, shared=shared))
    results = list(train(fleet))
    assert [len(result.probe_values) > 1 for result in results] == [False, True, False, True, True]
    assert {value.device for result in results for value in result.probe_values.values()} == {NOWHERE}
    assert not fleet.engine.faults
    assert {tensor.device for tensor in fleet.tensors().values()} == {NOWHERE}


def test_a_text_lies_on_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("data=stdlib",)
    assert Fleet(configs(*RUNS, shared=text)).feed.loader.tokens_n is None
    monkeypatch.setattr(lab.training.fleet, "pick_device", lambda name: NOWHERE)
    tokens_n = Fleet(configs(*RUNS, shared=text)).feed.loader.tokens_n
    assert tokens_n is not None
    assert (tokens_n.device, tokens_n.dtype) == (NOWHERE, torch.uint8)


class Tape(TorchDispatchMode):
    """Stands for ``torch.cuda.CUDAGraph``: every kernel of a block, to be launched again on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kernel._schema.is_mutable:
            for tensor in trees.tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self.before.setdefault(tensor.data_ptr(), (tensor, tensor.clone()))
        made = kernel(*args, **(kwargs or {}))
        self.kernels.append((kernel, args, kwargs or {}, made))
        return made

    def forget(self) -> None:
        """Leave memory as it was: what is captured is not carried out."""
        for tensor, value in self.before.values():
            tensor.copy_(value)

    def replay(self) -> None:
        """Launch the kernels; what each makes goes where it made it the first time."""
        for kernel, args, kwargs, made in self.kernels:
            for there, fresh in zip(trees.tree_leaves(made), trees.tree_leaves(kernel(*args, **kwargs)), strict=True):
                if isinstance(there, Tensor) and there.data_ptr() != fresh.data_ptr():
                    there.copy_(fresh)


@contextmanager
def taped(graph: Tape, pool: Any) -> Iterator[None]:
    with graph:
        yield
    graph.forget()


class Stream:
    """Stands for a CUDA stream."""

    def wait_stream(self, other: Any) -> None:
        """Nothing runs beside."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA as far as a capture needs it, played by the CPU."""
    stands_for = {"CUDAGraph": Tape, "graph": taped, "Stream": Stream, "current_stream": Stream}
    for name, stand_in in stands_for.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


@pytest.mark.slow
@pytest.mark.usefixtures("cuda")
def test_replaying_a_captured_step_is_training() -> None:
    """The state moves once a step, the first one too; new batches are seen, and values heard outlive the next step."""
    shared = ("probes=all", "probes.every=3", "model.depth=1")
    eager = Fleet(configs(*RUNS, shared=shared))
    captured = Fleet(configs(*RUNS, shared=(*shared, "engine=compiled")))
    assert isinstance(captured.engine, Compiled)
    tensors = [t.detach() for t in (*trees.tree_leaves(captured.engine.training_state), *_inputs(captured))]
    for with_probes in (False, True):
        traced = torch.no_grad()(captured.engine._trace(tensors, with_probes=with_probes))
        captured.engine.graphs[with_probes] = Captured(traced, tensors, 3)
    assert torch.equal(captured.state.weights["embedding"], eager.state.weights["embedding"])
    heard = [[fleet.step(step) for step in range(8)] for fleet in (eager, captured)]
    assert [len(values) for values in heard[1]] == [len(values) for values in heard[0]]
    for one, other in zip(*heard, strict=True):
        for key, value in one.items():
            torch.testing.assert_close(other[key], value, rtol=1e-5, atol=1e-6)
    for name, tensor in eager.tensors().items():
        torch.testing.assert_close(captured.tensors()[name], tensor, rtol=1e-5, atol=1e-6)


def _inputs(fleet: Fleet) -> tuple[Tensor, Tensor, Tensor]:
    return fleet.feed.loader.batch(0), fleet.step_sr[0], fleet.shape_sr[0]
