"""What the parts of a model and its loss compute: by which functions of torch, how often, and of which outputs."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from labwatch.recorder.parts import BETWEEN, EMBEDDING, HEAD, Parts, names, plain
from labwatch.recordings.recording import OF_LOSS, OF_PROBABILITIES


class Called:
    """The functions that each part of a model calls in the passes of an update.

    Attributes:
        functions: by part their names, with the numbers and words that they were given.
        calls: by part how often each is called in the first pass, in which module and with the outputs of which others.
            Of the experts of a block and what chooses among them, which depend on the batch, only whether.
            Those of the loss stand beside the parts, as the graph of its backward pass has them.
        looked_up: names of weights of which some are chosen by their place, as biases of positions, and not multiplied.
        given: what the model gets in the first pass: of each tensor its name, number format and shape.
        modules: names of the modules of the part that is running, the innermost last.
    """

    def __init__(self, model: nn.Module, parts: Parts) -> None:
        self.parts = parts
        self.name_of = {id(weight): name for name, weight in model.named_parameters() if name in parts.where}
        self.is_sharded = any(hasattr(weight, "to_local") for weight in model.parameters())
        self.functions, self.calls = defaultdict[str, set[str]](set), defaultdict[str, Counter[str]](Counter)
        self.unused = dict[int, tuple[str, str, Tensor]]()  # by part what functions returned, until one gets it
        self.made = dict[int, tuple[weakref.ref[Tensor], str, str]]()  # by which function of which part
        self.modules, self.given = list[str](), list[str]()
        self.looked_up = set[str]()
        self.block = ""  # that began last in a pass
        self.is_first = True
        self.last_of_model = -1  # the number of the last node that a pass added to the graph

    def begin(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Begin a pass of the model with these arguments."""
        if self.is_first:
            of: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
            self.given = [
                f"{name} {str(x.dtype).removeprefix('torch.')} {[*x.shape]}" for name in of for x in tensors(of[name])
            ]
        self.block = "the embedding"
        self.unused.clear()
        self.made.clear()
        self.modules.clear()

    def end(self, output: Any) -> None:
        """End a pass, which returns this."""
        self.is_used(output)
        self._leads_to(HEAD)
        for place in (EMBEDDING, HEAD):
            self.keep_unused(place)
        self.is_first = False

    def enter(self, place: str) -> None:
        """Begin a block, and count after which one."""
        self._leads_to(place)
        if self.is_first:
            self.calls[place][f"after {self.block}"] += 1
            self.block = place

    def _leads_to(self, place: str) -> None:
        """What was called since the last block is of this part, which gets it."""
        self.functions[place] |= self.functions.pop(BETWEEN, set())
        self.calls[place] += self.calls.pop(BETWEEN, Counter())
        for key, (of, told, x) in self.unused.items():
            self.unused[key] = (place if of == BETWEEN else of, told, x)

    def is_used(self, given: Any) -> None:
        for x in tensors(given):
            self.unused.pop(id(x), None)

    def keep(self, place: str, function: Any, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep the name of a function and its numbers and words, but for sizes and what other measurements tell.

        Of one whose output enters no other function of its part that is kept, too, and the weights that are used; but
        for those of experts, which a batch may not need.  A sharded model gathers its weights outside of blocks, by
        functions that differ from step to step, into other tensors.
        """
        if self.is_sharded and place in (EMBEDDING, BETWEEN, HEAD):
            return
        name = getattr(function, "__name__", "_")
        taken, weights = [*tensors([args, kwargs])], list[str]()
        for x in taken:
            self.unused.pop(id(x), None)
            if isinstance(x, nn.Parameter) and name != "__get__" and not self.is_sharded:
                weights.append(self.name_of.get(id(x), "a weight that is no part of the model"))
        if name in names()["chooses"] and len(taken) > 1:
            self.looked_up.update(weights)
        self.functions[place] |= {f"uses {plain(weight)}" for weight in weights if weight not in self.parts.expert}
        self._count(place, name, taken, [*tensors(output)])
        if name.startswith("_") or "dropout" in name or name == "register_hook":
            return
        kernel = names()["kernels"].get(name)
        if kernel:  # of which scores tell more
            named = dict(zip(kernel["arguments"], args, strict=False)) | dict(kwargs)
            given = [named[key] for key in names()["arguments"]["scale"] if isinstance(named.get(key), float)]
        else:
            whole = (int,) if name in names()["whole"] else ()
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, (float, bool, str, torch.dtype, *whole))]
        told = f"{name}({', '.join(f'{x:g}' if isinstance(x, float) else str(x) for x in given)})" if given else name
        if isinstance(output, Tensor) and output.is_floating_point() and output.dtype != torch.float32:
            told += f" in {str(output.dtype).removeprefix('torch.')}"
        if name == "detach" and weights:  # which get no gradient from here
            place, told = self.parts.where.get(weights[0], place), f"{told} of {plain(weights[0])}"
        self.functions[place].add(told)
        if isinstance(output, Tensor):
            of = f" of {plain(weights[0])}" if weights else ""
            self.unused[id(output)] = (place, f"{name}{of}, which is not used", output)

    def returns(self, output: Tensor) -> None:
        """Keep up to where the graph is that of the model."""
        if output.grad_fn is not None:
            self.last_of_model = max(self.last_of_model, output.grad_fn._sequence_nr())

    def keep_loss(self, losses: Any) -> None:
        """Keep the functions between what the model returned and the first loss of the update, and their numbers."""
        if OF_LOSS in self.calls:
            return
        of_losses = [*tensors(losses)]
        nodes, calls = [loss.grad_fn for loss in of_losses], dict[Any, str]()
        is_double = any(loss.dtype == torch.float64 for loss in of_losses)  # as Python's numbers are
        functions, is_of_model = set[str](), False
        while nodes:
            node = nodes.pop()
            if node is None or node in calls or _is_weight(node):
                continue
            if node._sequence_nr() <= self.last_of_model:
                is_of_model = True
                continue
            entering = [entering for entering, _ in node.next_functions]
            while entering and entering[-1] is None:  # data, which is told where something follows it
                entering.pop()
            of = [self._named(each) for each in entering]
            calls[node] = f"{_name(node)}({', '.join(of)})"
            numbers = "" if is_double else ", ".join(f"{number:g}" for number in _numbers(node))
            told = f"{_name(node)}({numbers})" if numbers else _name(node)
            functions.add(f"{told} of the model" if numbers and "the model" in of else told)
            functions |= {OF_PROBABILITIES} if _is_of_probabilities(node) else set()
            nodes += entering
        if is_of_model and calls:
            self.functions[OF_LOSS], self.calls[OF_LOSS] = functions, Counter(calls.values())

    def _named(self, node: Any) -> str:
        """What enters a function of the loss, itself or a view of it."""
        node = _seen_through(node, self.last_of_model)
        if node is None:
            return "data"
        if _is_weight(node):
            return "a weight"
        return "the model" if node._sequence_nr() <= self.last_of_model else _name(node)

    def keep_unused(self, place: str) -> None:
        """Keep the functions of a part of which the output entered no other."""
        unused = {key: told for key, (of, told, _) in self.unused.items() if of == place}
        self.functions[place] |= {*unused.values()}
        for key in unused:
            del self.unused[key]

    def _count(self, place: str, name: str, given: list[Tensor], output: list[Tensor]) -> None:
        """Count a call, and keep of its output that it made it."""
        if not self.is_first or self.is_sharded or not output or name == "__set__":
            return
        module = self.modules[-1] if self.modules else ""
        layer = self.parts.routers[place].layer if place in self.parts.routers else None
        of_experts = layer is not None and (not layer or f"{module}.".startswith(f"{layer}."))
        path = ".".join(filter(None, [layer if of_experts else module, name.strip("_")]))
        passes_on = name == "__get__" or "dropout" in name  # a view is of what made the whole; others tell of dropout
        if not passes_on:
            from_others = [] if of_experts else [self._maker(place, x) for x in given]
            call = f"{path}({', '.join(from_others)})"
            self.calls[place][call] += not (of_experts and self.calls[place][call])
        for x in output if name.endswith("_") or not any(output[0] is x for x in given) else ():
            if not passes_on:
                self.made[id(x)] = (weakref.ref(x), place, path)
            elif given and id(given[0]) in self.made:
                self.made[id(x)] = (weakref.ref(x), *self.made[id(given[0])][1:])

    def _maker(self, place: str, x: Tensor) -> str:
        """What made a tensor: a function of this part, or else it entered the part, or is a weight."""
        if isinstance(x, nn.Parameter):
            return "a weight"
        reference, of, path = self.made.get(id(x), (None, "", ""))
        return path if reference is not None and reference() is x and of == place else "input"


def _is_of_probabilities(node: Any) -> bool:
    """Whether a function takes the probabilities that another made, or a view or cast of them, for logits."""
    if _name(node) not in names()["of_logits"]:
        return False
    made = _seen_through(node.next_functions[0][0])
    return made is not None and _name(made) in names()["probabilities"]


def _seen_through(node: Any, last: int = -1) -> Any:
    """What made the tensor of which this is a view or a cast, among the functions after the one of this number."""
    while node is not None and node._sequence_nr() > last and _name(node) in names()["views"]:
        node = node.next_functions[0][0]
    return node


def _is_weight(node: Any) -> bool:
    return bool(node.name().endswith("AccumulateGrad"))


def _name(node: Any) -> str:
    """The function whose backward pass a node of the graph is."""
    return str(node.name()).partition("Backward")[0]


def _numbers(node: Any) -> Iterator[float]:
    """The numbers that a function got beside tensors; of whole ones, such as sizes, its axes alone."""
    for key in dir(node):
        value = getattr(node, key) if key.startswith("_saved_") else None
        if isinstance(value, Tensor) and (value.ndim, value.dtype, value.is_cpu) == (0, torch.float64, True):
            value = value.item()  # which is a number of Python
        if isinstance(value, float):
            yield value
        elif key == "_saved_dim" and value is not None:
            axes = value if isinstance(value, tuple) else (value,)
            yield from (axis if axis < 2**63 else axis - 2**64 for axis in axes)  # those from the end are below zero


def fingerprint(calls: Mapping[str, int]) -> int:
    """A number that differs if calls do."""
    return crc32("\n".join(f"{call} {count}" for call, count in sorted(calls.items())).encode())


def tensors(output: Any) -> Iterator[Tensor]:
    """The tensors in what a module takes or returns."""
    if isinstance(output, Tensor):
        yield output
    elif is_dataclass(output) and not isinstance(output, Mapping):
        yield from tensors(vars(output))
    elif isinstance(output, Mapping | tuple | list):
        for part in output.values() if isinstance(output, Mapping) else output:
            yield from tensors(part)
