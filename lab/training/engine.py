"""Engines: carry out a training step eagerly, or traced once and compiled whole."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as trees

from lab.core.hooks import listening
from lab.probes.listener import Listener

ProbeValues = dict[tuple[str, str], Tensor]
# Changes its first argument, nested dicts of tensors, in place; the other arguments are the inputs of a step.
Update = Callable[..., None]
# A step as a function of tensors, which it changes in place; returns probe values.
Step = Callable[..., list[Tensor]]
WARM_UPS = 3  # steps that compile, tune and allocate before a CUDA graph is captured


def can_compile() -> bool:
    """Whether this machine has a C++ compiler and the headers of Python, which compiling needs."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return bool(compiler) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


class Eager:
    """Carries out a step operation by operation."""

    def __init__(self, update: Update, held: Any, probes: Sequence[str]) -> None:
        self.update, self.held, self.probes = update, held, probes
        self.faults: dict[str, str] = {}  # messages of probes that raised, and are silent since

    def __call__(self, *news: Tensor, listens: bool) -> ProbeValues:
        """Carry out a step; returns probe values ``[r]`` by (probe, hook point), none unless they listen."""
        return self._carry_out(self.held, news, listens=listens)

    def _carry_out(self, held: Any, news: Sequence[Tensor], *, listens: bool) -> ProbeValues:
        listener = Listener(self.probes if listens else (), self.faults)
        with listening(listener):
            self.update(held, *news)
        return listener.heard


class Compiled(Eager):
    """Compiles forward, backward and update as one graph, traced at the first step, and a second graph with probes.

    Numbers per run are inputs of both graphs, so fleets of one shape share the compiled code, even across processes.
    """

    def __init__(self, update: Update, held: Any, probes: Sequence[str]) -> None:
        super().__init__(update, held, probes)
        self.graphs: dict[bool, Step] = {}
        self.keys: list[tuple[str, str]] = []

    def __call__(self, *news: Tensor, listens: bool) -> ProbeValues:
        listens = listens and bool(self.probes)
        inputs = [tensor.detach() for tensor in (*trees.tree_leaves(self.held), *news)]
        if listens not in self.graphs:
            compiled = torch.compile(self._trace(inputs, listens=listens), fullgraph=True, dynamic=False)
            graph: Step = torch.no_grad()(compiled)  # the backward pass is in the graph
            self.graphs[listens] = Captured(graph, inputs, len(news)) if inputs[0].is_cuda else graph
        values = self.graphs[listens](*inputs)
        return {key: value.clone() for key, value in zip(self.keys, values, strict=True)} if listens else {}

    def _trace(self, inputs: Sequence[Tensor], *, listens: bool) -> Step:
        _, shape = trees.tree_flatten(self.held)

        def step(*tensors: Tensor) -> list[Tensor]:
            held = trees.tree_unflatten(tensors[: shape.num_leaves], shape)
            heard = self._carry_out(held, tensors[shape.num_leaves :], listens=listens)
            self.keys = list(heard) or self.keys
            return list(heard.values())

        # tracing carries out the step, so it gets copies
        return make_fx(step)(*(tensor.clone() for tensor in inputs))


class Captured:
    """A step captured as a CUDA graph: one launch instead of hundreds; inputs are copied to where it reads them.

    Tensors that a step changes must stay at their address; those it returns are overwritten by the next step.
    """

    def __init__(self, step: Step, inputs: Sequence[Tensor], news: int) -> None:
        held = inputs[: len(inputs) - news]
        self.news = [tensor.clone() for tensor in inputs[len(held) :]]
        before = [tensor.clone() for tensor in held]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(*held, *self.news)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.values = step(*held, *self.news)

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        for buffer, value in zip(self.news, inputs[len(inputs) - len(self.news) :], strict=True):
            buffer.copy_(value)
        self.graph.replay()
        return self.values
