"""How a step is carried out: as it is written, or traced once and compiled whole."""

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

from lab.hooks import listening
from lab.probes.probe import Listener

Heard = dict[tuple[str, str], Tensor]
# Changes what it holds, nested dicts of tensors, in place; the other arguments are what is new at a step.
Update = Callable[..., None]


def can_compile() -> bool:
    """Whether this machine has what compiling takes: a C++ compiler, and the headers of Python."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    return bool(compiler) and (Path(sysconfig.get_path("include")) / "Python.h").exists()


class Eager:
    """Operation by operation; nothing to wait for."""

    def __init__(self, update: Update, held: Any, probes: Sequence[str]) -> None:
        self.update, self.held, self.probes = update, held, probes

    def __call__(self, *news: Tensor, listens: bool) -> Heard:
        """One step; what the probes heard of it ``[r]``, by (probe, where), nothing if they do not listen."""
        listener = Listener(self.probes if listens else ())
        with listening(listener):
            self.update(self.held, *news)
        return listener.heard


class Compiled(Eager):
    """Forward, backward and update as one graph, traced at the first step.

    Numbers per run are inputs of the graph, so that fleets of one shape share what was compiled, across processes, too.
    The probes are part of it at every step, listened to or not: fused, they cost less than a second graph would.
    """

    def __init__(self, update: Update, held: Any, probes: Sequence[str]) -> None:
        super().__init__(update, held, probes)
        self.graph: Callable[..., list[Tensor]] | None = None
        self.keys: list[tuple[str, str]] = []

    def __call__(self, *news: Tensor, listens: bool) -> Heard:
        inputs = [tensor.detach() for tensor in (*trees.tree_leaves(self.held), *news)]
        if self.graph is None:
            self.graph = torch.compile(self._trace(inputs), fullgraph=True, dynamic=False)
        with torch.no_grad():  # the backward pass is in the graph
            values = self.graph(*inputs)
        return dict(zip(self.keys, values, strict=True)) if listens else {}

    def _trace(self, inputs: Sequence[Tensor]) -> Callable[..., list[Tensor]]:
        _, shape = trees.tree_flatten(self.held)

        def step(*tensors: Tensor) -> list[Tensor]:
            held = trees.tree_unflatten(tensors[: shape.num_leaves], shape)
            heard = Eager(self.update, held, self.probes)(*tensors[shape.num_leaves :], listens=True)
            self.keys = list(heard)
            return list(heard.values())

        # tracing carries the step out: on copies
        return make_fx(step)(*(tensor.clone() for tensor in inputs))
