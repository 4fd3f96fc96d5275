"""Engines: carry out a training step eagerly, or traced once, and then captured or compiled whole."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as trees

from lab.core import machine
from lab.core.hooks import listening
from lab.probes.listener import Listener

ProbeValues = dict[tuple[str, str], Tensor]
# Changes its first argument, a tree of tensors, in place; the other arguments are the inputs of a step.
Update = Callable[..., None]
# A step as a function of tensors, which it changes in place; returns probe values.
Step = Callable[..., list[Tensor]]
WARM_UPS = 3  # steps that compile, tune and allocate before a CUDA graph is captured


def can_compile() -> bool:
    """Whether this machine has a C++ compiler and the headers of Python, which compiling needs."""
    return machine.compiler() is not None and (Path(sysconfig.get_path("include")) / "Python.h").exists()


class Eager:
    """Carries out a step operation by operation.

    Args:
        update: a step as a function of the training state, changed in place, and of the inputs of the step.
        training_state: weights, optimizer state and whatever else a step changes, as a tree of tensors.
        probes: names of the probes.
    """

    def __init__(self, update: Update, training_state: Any, probes: Sequence[str]) -> None:
        self.update, self.training_state, self.probes = update, training_state, probes
        self.faults: dict[str, str] = {}  # messages of probes that raised, by name; they stay silent from then on

    def __call__(self, *inputs: Tensor, with_probes: bool) -> ProbeValues:
        """Carry out a step; returns probe values ``[r]`` by (probe, hook point), none unless ``with_probes``."""
        return self._carry_out(self.training_state, inputs, with_probes=with_probes)

    def forget(self) -> None:
        """Take the numbers per run anew at the next step."""

    def _carry_out(self, training_state: Any, inputs: Sequence[Tensor], *, with_probes: bool) -> ProbeValues:
        listener = Listener(self.probes if with_probes else (), self.faults)
        with listening(listener):
            self.update(training_state, *inputs)
        return listener.probe_values


class Traced(Eager):
    """Traces forward, backward and update as one graph at the first step, and a second graph with probes.

    On CUDA both are captured.  Numbers per run are inputs of both graphs.
    """

    def __init__(self, update: Update, training_state: Any, probes: Sequence[str]) -> None:
        super().__init__(update, training_state, probes)
        self.graphs: dict[bool, Step] = {}
        self.keys: list[tuple[str, str]] = []

    def __call__(self, *inputs: Tensor, with_probes: bool) -> ProbeValues:
        with_probes = with_probes and bool(self.probes)
        tensors = [tensor.detach() for tensor in (*trees.tree_leaves(self.training_state), *inputs)]
        if with_probes not in self.graphs:
            # the backward pass is in the graph
            graph: Step = torch.no_grad()(self._compile(self._trace(tensors, with_probes=with_probes)))
            if tensors[0].is_cuda:
                pools = [captured.graph.pool() for captured in self.graphs.values() if isinstance(captured, Captured)]
                graph = Captured(graph, tensors, len(inputs), *pools)
            self.graphs[with_probes] = graph
        values = self.graphs[with_probes](*tensors)
        return {key: value.clone() for key, value in zip(self.keys, values, strict=True)} if with_probes else {}

    def _compile(self, graph: Step) -> Step:
        return graph

    def forget(self) -> None:
        self.graphs.clear()  # traced anew, and compiled from the cache

    def _trace(self, tensors: Sequence[Tensor], *, with_probes: bool) -> Step:
        _, tree = trees.tree_flatten(self.training_state)

        def step(*traced: Tensor) -> list[Tensor]:
            training_state = trees.tree_unflatten(traced[: tree.num_leaves], tree)
            probe_values = self._carry_out(training_state, traced[tree.num_leaves :], with_probes=with_probes)
            self.keys = list(probe_values) or self.keys
            return list(probe_values.values())

        # tracing carries out the step, so it gets copies
        return make_fx(step)(*(tensor.clone() for tensor in tensors))


class Compiled(Traced):
    """Compiles both graphs.  Fleets of one shape share the compiled code, even across processes."""

    def _compile(self, graph: Step) -> Step:
        is_cuda = trees.tree_leaves(self.training_state)[0].is_cuda
        if is_cuda:  # over a hundred kernels, for a job that has a GPU to itself
            torch._inductor.config.compile_threads = machine.cores()
        # on a CPU, steps of small models would spend a tenth of their time in Python, which calls kernels one by one
        compiled: Step = torch.compile(graph, fullgraph=True, dynamic=False, options={"cpp_wrapper": not is_cuda})
        return compiled


class Captured:
    """A step captured as a CUDA graph: one launch instead of hundreds.

    The tensors of the training state must stay at their addresses.  The inputs of a step are copied into buffers, from
    which the graph reads them.  The next step overwrites the tensors that a step returns.

    Args:
        step: the step to capture; it is carried out ``WARM_UPS`` times, and the training state is then restored.
        tensors: the tensors of the training state, then the inputs of a step.
        input_count: how many of ``tensors`` are inputs.
        pool: memory of another graph, which is never replayed at the same time, to share.
    """

    def __init__(self, step: Step, tensors: Sequence[Tensor], input_count: int, pool: Any = None) -> None:
        training_state = tensors[: len(tensors) - input_count]
        self.buffers = [tensor.clone() for tensor in tensors[len(training_state) :]]
        before = [tensor.clone() for tensor in training_state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step(*training_state, *self.buffers)
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(training_state, before, strict=True):
            tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.values = step(*training_state, *self.buffers)

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        for buffer, value in zip(self.buffers, tensors[len(tensors) - len(self.buffers) :], strict=True):
            buffer.copy_(value)
        self.graph.replay()
        return self.values
