"""What is kept of weights at every update: sizes around a rise of the loss, and which something else has written."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lab.core.windows import FEWEST, NORMAL, WINDOW
from labwatch.recorder.measuring import CLIP, guarded
from labwatch.recorder.parts import Parts, plain
from labwatch.recordings.recording import WRITTEN

# The loss has risen if it lies so many scaled median absolute deviations, and nats, above the median of those before.
DEVIATIONS, LEAST_RISE = 8.0, 0.05
BEFORE, AFTER = 20, 5  # updates around the first one of a rise
COMPARED = 64  # entries of each weight that are kept from one update to the next
OTHERS = -1  # weights of no optimizer


class KeptSizes:
    """Norms of weights and of gradients before clipping, kept on their device until the losses are on the host."""

    def __init__(self, model: nn.Module, parts: Parts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.where, self.optimizers, self.fault = parts.where, optimizers, ""
        self.update: tuple[list[str], Tensor] | None = None
        self.kept = dict[int, tuple[float, list[str], Tensor]]()
        self.losses = deque[float](maxlen=WINDOW)
        self.hooks = ExitStack()
        self.hooks.enter_context(CLIP.before(self._keep))
        for optimizer in optimizers:
            self.hooks.callback(optimizer.register_step_pre_hook(self._keep).remove)

    @guarded
    def _keep(self, *_: Any) -> None:
        """Keep the norms of an update, before its gradients are clipped or else before it is made."""
        if self.update is None:
            trained = {name: weight for name, weight in self.weights.items() if weight.grad is not None}
            gradients = [weight.grad for weight in trained.values() if weight.grad is not None]
            self.update = (
                list(trained),
                torch.stack(torch._foreach_norm([*trained.values(), *gradients], 2, torch.float32)),
            )

    def end_of_update(self, step: int) -> None:
        if self.fault:
            raise RuntimeError(self.fault)
        if self.update is not None:
            lr = float(self.optimizers[0].param_groups[0].get("lr", math.nan))
            self.kept[step], self.update = (lr, *self.update), None

    def add_to(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add what was kept to the rows around the first one of a rise; what was kept is then forgotten."""
        risen = list[int]()
        for row in rows:
            is_high = len(self.losses) >= FEWEST and not row["loss"] <= self._highest()
            if is_high:
                risen.append(row["step"])
            else:
                self.losses.append(row["loss"])
        begins = [step for before, step in zip([-math.inf, *risen], risen, strict=False) if step - before > BEFORE]
        for row in rows:
            if row["step"] in self.kept and any(-BEFORE <= row["step"] - begin <= AFTER for begin in begins):
                row |= self._columns(*self.kept[row["step"]])
        self.kept.clear()

    def _highest(self) -> float:
        usual = median(self.losses)
        return usual + max(DEVIATIONS * NORMAL * median(abs(loss - usual) for loss in self.losses), LEAST_RISE)

    def _columns(self, lr: float, names: Sequence[str], norms: Tensor) -> Mapping[str, float]:
        squares, counts = defaultdict[str, float](float), defaultdict[str, int](int)
        of_weights, of_gradients = norms.double().square().reshape(2, -1).tolist()
        for name, of_weight, of_gradient in zip(names, of_weights, of_gradients, strict=True):
            place = self.where[name]
            counts[place] += self.weights[name].numel()
            squares[f"param_rms/{place}"] += of_weight
            squares[f"grad_rms/{place}"] += of_gradient
        columns = {name: math.sqrt(square / counts[name.partition("/")[2]]) for name, square in squares.items()}
        return {"lr": lr, "grad_norm": math.sqrt(sum(of_gradients))} | columns


class After(NamedTuple):
    """Weights of an optimizer after an update, those of one device.

    Attributes:
        places: their addresses in memory.
        versions: how often each was written to.
        entries: views of some of its entries.
        values: of these, one after another.
    """

    weights: list[Tensor]
    places: list[int]
    versions: list[int]
    entries: list[Tensor]
    values: Tensor


class Writes:
    """Which weights have other values before an update than after the one before, so that no optimizer wrote them.

    Torch counts how often a tensor is written to, so entries are compared only where that says so; not of what is
    written as ``.data``, and not of shards.
    """

    def __init__(self, model: nn.Module, parts: Parts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.name_of = {id(weight): name for name, weight in model.named_parameters()}
        self.where, self.fault = parts.where, ""
        self.after = dict[int, After]()
        self.now = list[tuple[After, Tensor]]()
        self.kept, self.told = dict[int, list[tuple[After, Tensor]]](), dict[str, list[str]]()
        self.hooks = ExitStack()
        for number, optimizer in enumerate(optimizers):
            self.hooks.callback(optimizer.register_step_pre_hook(partial(self._compare, number)).remove)
            self.hooks.callback(optimizer.register_step_post_hook(partial(self._keep_trained, number)).remove)
        self.optimizers, self.weights = optimizers, list(model.parameters())
        self._keep_others()

    def _keep_others(self) -> None:
        """Keep those that no optimizer has, as the matrices beside adapters; not what is quantized."""
        trained = {id(weight) for each in self.optimizers for group in each.param_groups for weight in group["params"]}
        others = [weight for weight in self.weights if id(weight) not in trained and type(weight) is nn.Parameter]
        self._keep(OTHERS, [weight for weight in others if weight.is_floating_point() and weight.dtype.itemsize > 1])

    @guarded
    def _compare_others(self) -> None:
        before = self.after.get(OTHERS)
        if before and [weight._version for weight in before.weights] != before.versions:
            self._keep_others()
            now = self.after.get(OTHERS)
            if now and now.places == before.places:  # and no optimizer got one
                self.now.append((now, now.values != before.values))

    def _keep_trained(self, number: int, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        self._keep(number, [weight for weight in weights if id(weight) in self.name_of])

    @guarded
    def _keep(self, number: int, found: list[Tensor]) -> None:
        found = [weight for weight in found if not hasattr(weight, "to_local") and weight.device == found[0].device]
        if not found:
            self.after.pop(number, None)
            return
        places, last = [weight.data_ptr() for weight in found], self.after.get(number)
        entries = last.entries if last and last.places == places else [_some(weight) for weight in found]
        self.after[number] = After(found, places, [weight._version for weight in found], entries, torch.cat(entries))

    @guarded
    def _compare(self, number: int, *_: Any) -> None:
        if number == 0:
            self._compare_others()
        after = self.after.get(number)
        if after and [weight._version for weight in after.weights] != after.versions:
            self.now.append((after, torch.cat(after.entries) != after.values))

    def end_of_update(self, step: int) -> None:
        if self.fault:
            raise RuntimeError(self.fault)
        if self.now:
            self.kept[step], self.now = self.now, []

    def add_to(self, rows: Sequence[dict[str, Any]]) -> None:
        """Add to each row the names of the weights of its update, by part, unless they are those of the row before."""
        for row in rows:
            found = defaultdict[str, list[str]](list)
            for after, differs in self.kept.pop(row["step"], ()):
                pieces = torch.split(differs.cpu(), [len(entries) for entries in after.entries])
                for weight, piece in zip(after.weights, pieces, strict=True):
                    if piece.any():
                        name = self.name_of[id(weight)]
                        found[self.where[name]].append(plain(name))
            if found != self.told:
                row[WRITTEN] = self.told = dict(found)


def _some(weight: Tensor) -> Tensor:
    """Evenly spaced entries, which change with the weight."""
    entries: Tensor = weight.detach().flatten()[:: max(1, weight.numel() // COMPARED)]
    return entries
