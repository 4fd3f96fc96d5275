"""A recorder for any training loop: every so many updates it measures the model, and writes lines of JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from lab.core import distributed
from lab.core.errors import RequestError
from lab.probes import routing
from labwatch.recorder.called import Called, fingerprint
from labwatch.recorder.kept_sizes import KeptSizes, Writes
from labwatch.recorder.measuring import Measurement, Moment, Sampled
from labwatch.recorder.parts import find_parts, plain
from labwatch.recorder.settings import Settings
from labwatch.recorder.tally import WEIGHTS_OF_LOSS, Key, Known, of_experts, of_places, of_whole

# Weights are said to have moved by more than their updates if they changed by more than this share of their own size
# and are so many numbers, since the updates of one may cancel out; and named if that is so many times what the updates
# explain. Where these explain nothing, the last number stands.
LEAST_CHANGE, FEWEST, NAMED, BEYOND_ALL = 0.05, 8, 2.0, 1e6
# NaN if the loss is no cross-entropy.
OF_LABELS = ["label_perplexity", "label_share", "label_count", "label_loss", "label_next", "label_same"]
OF_LABELS += ["row_share", "loss_weight", "label_gone", "label_new"]
OF_LABELS += ["excess_surprisal", "sample_weight", "sample_weight_rms"]
OF_LOAD = (routing.expert_load_max, routing.expert_load_cv, routing.dead_experts)
log = logging.getLogger("lab")

OfUpdates = Settings | Writes | KeptSizes  # what is read at every update


def record(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    every: int = 100,
    out: str | Path = "probes.jsonl",
    *,
    first_step: int = 0,
    scaler: Any = None,
    extra: Mapping[str, Callable[[], Any]] | None = None,
    on_spike: bool = False,
) -> Recorder:
    """A recorder of a training loop; call its ``step(loss)`` after each update.

    Args:
        model: the module whose forward pass is trained, wrapped and compiled as it is called.
        optimizer: of ``torch.optim``, or several.
        every: how many updates lie between two that are measured, the first included; of others the loss is written.
        out: the file of lines of JSON, to which they are added.
        first_step: the number of the next update, of a run that goes on from a checkpoint.
        scaler: the ``GradScaler`` of training in fp16.
        extra: by name what else to record, such as a reward: functions that return a number, each called once at an
            update that is measured, in ``step``. Of several ranks the mean is written.
        on_spike: whether to keep the sizes of weights and gradients of each part at every update, and to write those
            around a rise of the loss. All else is measured every so many updates only, since a step that measures all
            takes nearly twice as long. Sizes add about 1 % to a step of 512 tokens on a CPU, and more to a shorter one.

    Raises:
        RequestError: there is no module or optimizer, no weight to train, no folder for the file, an extra is no
            function or is called ``step``, ``loss`` or ``lr``, or weights are sharded and ``on_spike`` is set.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(model, nn.Module):
        raise RequestError(f"lab.record takes a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizers, Iterable) or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
        raise RequestError(f"lab.record takes a torch.optim.Optimizer, or a list, not {type(optimizer).__name__}")
    if not any(weight.requires_grad for weight in model.parameters()):
        raise RequestError("lab.record: the model has no weight that is trained")
    if type(every) is not int or every < 1:
        raise RequestError(f"lab.record: every={every!r} is no number of updates")
    if not Path(out).parent.is_dir():
        raise RequestError(f"lab.record: no folder {Path(out).parent} for {Path(out).name}")
    for name, value in (extra or {}).items():
        if not callable(value) or "/" in name or name in ("step", "loss", "lr"):
            raise RequestError(f"lab.record: extra={{{name!r}: ...}} takes another name, without /, and a function")
    if on_spike and any(hasattr(weight, "to_local") for weight in model.parameters()):
        raise RequestError("lab.record: on_spike=True takes whole weights, and these are sharded")
    return Recorder(model, list(optimizers), every, Path(out), first_step, scaler, extra or {}, on_spike)


class Recorder:
    """Measures every so many updates, and writes the loss of each; see ``record``."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        every: int,
        out: Path,
        first_step: int,
        scaler: Any,
        extra: Mapping[str, Callable[[], Any]],
        on_spike: bool,
    ) -> None:
        self.model, self.optimizers, self.every, self.out, self.scaler = model, optimizers, every, out, scaler
        self.extra = extra
        self.parts = find_parts(model)
        self.sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        self.device = next(model.parameters()).device
        self.is_told = False
        self.next_step: int | None = first_step  # None once it has ended
        self.measurement: Measurement | None = None
        self.losses: list[tuple[int, Tensor | float]] = []
        self.settings = Settings(model, self.parts, self.optimizers)
        self._of_updates: list[OfUpdates] = [self.settings, Writes(model, self.parts, self.optimizers)]
        if on_spike:
            self._of_updates.append(KeptSizes(model, self.parts, self.optimizers))
        self.samples, self.moments = dict[str, Sampled](), dict[str, Moment]()
        self.entries, self.kept, self.paces = dict[str, Tensor](), dict[str, Tensor](), dict[str, float]()
        self.functions, self.calls, self.given = dict[str, set[str]](), dict[str, Counter[str]](), list[str]()
        self._finalize = weakref.finalize(self, _write_losses, self.losses, self._of_updates, out)
        self._arm()

    def step(self, loss: Tensor | float) -> None:
        """Take the loss of an update that was just made; waits for the device at updates that are measured only.

        Args:
            loss: of the batch of this process, nats per token; its mean over ranks is written.
        """
        if self.next_step is None:
            return
        self.losses.append((self.next_step, loss.detach().clone() if isinstance(loss, Tensor) else loss))
        self.next_step += 1
        try:
            for each in self._of_updates:
                each.end_of_update(self.losses[-1][0])
            if self.measurement:
                self._finish(self.measurement)
            self._arm()
        except Exception as fault:
            self._end(f"{type(fault).__name__}: {fault}".split("\n")[0])

    def close(self) -> None:
        """Write the losses since the last update that was measured, and end."""
        if self.measurement:
            self._end_measurement()
        self.next_step = self.measurement = None
        self._finalize()

    def _arm(self) -> None:
        """Measure the next update, if it is its turn."""
        self.measurement = None
        self.settings.is_measured = self.next_step is not None and self.next_step % self.every == 0
        if self.settings.is_measured:
            self.measurement = Measurement(
                self.model,
                self.parts,
                self.optimizers,
                self.settings,
                self.samples,
                self.moments,
                self.entries,
                self.kept,
                self.scaler,
            )
            # also where the recorder is dropped unclosed, as by a cell of a notebook that is run again
            self._end_measurement = weakref.finalize(self, self.measurement.end)

    def _end(self, reason: str) -> None:
        """Measure no more; training goes on."""
        self.close()
        log.warning("lab.record has ended, and training goes on: %s", reason)

    def _finish(self, measurement: Measurement) -> None:
        """Bring the numbers of an update to the host, and write them."""
        self._end_measurement()
        keys = [Key("loss", piece=f"{step:012d}") for step, _ in self.losses]
        for key, (_, loss) in zip(keys, self.losses, strict=True):
            measurement.tally.add(key, loss)
        for name, value in self.extra.items():
            measurement.tally.add(Key(name), torch.as_tensor(value()))
        known = measurement.tally.known(self.device, is_sound=not measurement.fault)
        if known is None:
            self._end(measurement.fault or "another rank has failed, or measures something else")
            return
        for key in map(Key, WEIGHTS_OF_LOSS) if distributed.is_joined() else ():  # gradients are means over ranks
            if weight := known.get(key):
                known[key] = weight._replace(value=weight.value / torch.distributed.get_world_size())
        rows: list[dict[str, Any]] = [{"step": int(key.piece), "loss": known.pop(key).value} for key in keys]
        for each in self._of_updates:
            each.add_to(rows)
        rows[-1] |= self._of_changes(known, measurement)
        rows[-1] |= _columns(known, self.sizes, measurement.lr, self.parts.expert)
        rows[-1] |= self._of_code(measurement.called) | self._of_experts(rows[-1])
        self.losses.clear()
        if distributed.is_joined() and torch.distributed.get_rank():
            return
        if not self.is_told:
            rows[-1] |= self._of_matrices(known, measurement.called.looked_up) | self._left_out(known)
            rows[-1] |= self._lacking()
            rows.insert(0, self._header(known, measurement))
            self.is_told = True
        _write(rows, self.out)

    def _of_code(self, called: Called) -> dict[str, Any]:
        """What the parts compute, where that differs from the update that was measured before."""
        found = dict[str, Any]()
        for place, functions in called.functions.items():
            if functions != self.functions.get(place):
                found[f"functions/{place}"] = sorted(functions)
        for place, calls in called.calls.items():
            before = self.calls.get(place, Counter(calls))
            if calls != before or place not in self.calls:
                found[f"code/{place}"] = fingerprint(calls)
            if calls != before:
                found[f"calls/{place}"] = [
                    *(f"no longer {call}" for call in sorted(before - calls)),
                    *(f"now {call}" for call in sorted(calls - before)),
                ]
        if called.given != self.given:
            found["given"] = called.given
        self.functions, self.calls, self.given = called.functions, called.calls, called.given
        return found

    def _of_changes(self, known: dict[Key, Known], measurement: Measurement) -> dict[str, Any]:
        """How far weights moved since the update that was measured before, against what their updates explain.

        Updates explain the larger one of both measured steps, over its learning rate, times the sum of the learning
        rates between. Of each part the weight counts that moved farthest against that. Where it moved by less than
        ``LEAST_CHANGE`` of its own size, or has fewer than ``FEWEST`` numbers, it counts as explained.
        """
        found = defaultdict[str, list[tuple[float, str]]](list)
        for key in [key for key in known if key.name == "followed_step"]:
            step = max(known.pop(key).value, known.get(key._replace(name="step_rms"), Known(0.0, 0.0)).value)
            travelled, rate = measurement.travelled[key.piece]
            paces = [pace for pace in (self.paces.get(key.piece), step / rate if rate else None) if pace is not None]
            moved, size = (known.pop(key._replace(name=name), None) for name in ("moved", "followed_rms"))
            if moved and size and paces and not min(paces) == 0 < max(paces):  # the first updates may be the largest
                explained = max(paces) * travelled
                beyond = min(moved.value / explained if explained else math.inf, BEYOND_ALL)
                is_changed = moved.value > LEAST_CHANGE * size.value and self.sizes[key.piece] >= FEWEST
                found[key.where].append((beyond if is_changed else min(beyond, 1.0), plain(key.piece)))
            self.paces |= {key.piece: paces[-1]} if paces else {}
        for key in [key for key in known if key.name in ("moved", "followed_rms")]:  # of an update that was not made
            del known[key]
        columns: dict[str, Any] = {f"change_over_updates/{place}": max(of)[0] for place, of in found.items()}
        named = {place: [name for beyond, name in sorted(of)[::-1] if beyond > NAMED] for place, of in found.items()}
        return columns | {f"weight_moved/{place}": names for place, names in named.items() if names}

    def _of_experts(self, row: Mapping[str, Any]) -> dict[str, float]:
        """By block the share of experts that get no gradient, as those that no token reaches."""
        found = dict[str, float]()
        for block, router in self.parts.routers.items():
            if (name := f"expert_grad_rms/{block}") in row:
                found[f"idle_experts/{block}"] = 1 - sum(rms != 0 for rms in row[name]) / router.experts
        return found

    def _of_matrices(self, known: Mapping[Key, Known], looked_up: Container[str]) -> dict[str, float]:
        """Of each block, and of the head, the largest gain of a matrix: its RMS times the root of its smaller side.

        Of matrices that multiply something, and not of those whose numbers are looked up.
        """
        found, weights = defaultdict[str, float](float), dict(self.model.named_parameters())
        embeddings = {id(part.weight) for part in self.model.modules() if isinstance(part, nn.Embedding)}
        for key, number in known.items():
            weight = weights.get(key.piece)
            multiplies = key.piece not in looked_up and id(weight) not in embeddings
            if key.name != "param_rms" or weight is None or weight.ndim < 2 or not multiplies:
                continue
            entering = min(weight.shape[-2:]) if weight.ndim < 4 else weight[0].numel()
            found[key.where] = max(found[key.where], number.value * math.sqrt(entering))
        return {f"weight_gain/{place}": gain for place, gain in found.items() if place not in ("embedding", "other")}

    def _lacking(self) -> dict[str, list[str]]:
        """By ``lacks/BLOCK`` what all other blocks call, if these are alike, and this one does not."""
        calls = {
            place: Counter({call: count for call, count in self.calls[place].items() if not call.startswith("after ")})
            for place in self.parts.blocks
        }
        found = dict[str, list[str]]()
        for place, own in calls.items():
            others = [other for name, other in calls.items() if name != place]
            if len(others) > 1 and all(other == others[0] for other in others) and others[0] - own:
                found[f"lacks/{place}"] = sorted(others[0] - own)
        return found

    def _left_out(self, known: Mapping[Key, Known]) -> dict[str, list[str]]:
        """By ``left_out/PART`` the weights that get gradients and that no optimizer has.

        Unless these are most of those that are no experts, as where one of several optimizers is recorded.
        """
        held = {id(weight) for each in self.optimizers for group in each.param_groups for weight in group["params"]}
        weights = dict(self.model.named_parameters())
        trained = [key for key in known if key.name == "backward" and key.piece in weights and known[key].value >= 0]
        lacking = [key for key in trained if id(weights[key.piece]) not in held]
        found = defaultdict[str, list[str]](list)
        of_experts = {*self.parts.expert, *self.parts.stacked}
        all_rest, rest = (
            sum(self.sizes[key.piece] for key in keys if key.piece not in of_experts) for keys in (trained, lacking)
        )
        if 2 * rest < all_rest:
            for key in lacking:
                found[f"left_out/{key.where}"].append(plain(key.piece))
        return found

    def _header(self, known: Mapping[Key, Known], measurement: Measurement) -> dict[str, Any]:
        """What was found in the model, and what was not."""
        of_block = {name: {key.where for key in known if key.name == name} for name in {key.name for key in known}}
        names = {id(module): plain(name) for name, module in self.model.named_modules()}
        blocks = self.parts.blocks
        found, missing = list[str](), list[str]()

        def tell(what: str, is_found: bool) -> None:
            (found if is_found else missing).append(what)

        tell("blocks", bool(blocks))
        for what, name in (("residual stream", "block_rms"), ("attention scores", "attention_logit_max")):
            without = sorted(blocks.keys() - of_block.get(name, set()), key=lambda place: int(place[5:]))
            tell(what, len(without) < len(blocks) or "" in of_block.get(name, set()))
            if 0 < len(without) < len(blocks):
                missing.append(f"{what} of {', '.join(without)}")
        tell("output logits", "log_z" in of_block)
        if self.parts.routers:
            tell("router logits", "router_logit_max" in of_block)
            tell("expert load", "expert_load" in of_block)
        tell("gradients", "grad_rms" in of_block)
        tell("updates" if measurement.of_adam else "updates, of a sample of weights", "step_rms" in of_block)
        return {
            "recorder": version("instability-lab"),
            "every": self.every,
            "parameters": sum(self.sizes.values()),
            "blocks": {place: names[id(block)] for place, block in blocks.items()},
            "found": found,
            "not_found": missing,
        }


def _columns(
    known: Mapping[Key, Known], sizes: Mapping[str, int], lr: float | None, of_experts_only: Container[str]
) -> dict[str, Any]:
    """The columns of a row: of the whole model, then of each of its parts as ``NAME/PART``, lists of its experts."""
    ratios = dict[Key, Known]()  # of whole tensors, not of the shards of a rank
    for key, eps in known.items():
        if key.name == "eps":
            rms = known[key._replace(name="grad_rms")].value
            ratios[key._replace(name="eps_ratio")] = Known(eps.value / rms, 1.0) if rms else Known(math.nan, 0.0)
    known = {**{key: number for key, number in known.items() if key.name != "eps"}, **ratios}
    experts = of_experts(known)
    loads = experts.get("expert_load", {})
    found = {name: {place: number.value for place, number in of.items()} for name, of in of_places(known).items()}
    steps, weights = found.pop("step_rms", {}), found.get("param_rms", {})
    found["update_ratio"] = {place: step / weights[place] for place, step in steps.items() if weights[place] > 0}
    with distributed.alone():
        for measure in OF_LOAD:
            found[measure.__name__] = {block: measure(torch.tensor([[load]])).item() for block, load in loads.items()}
    unclipped, backward = found.pop("unclipped", {}), found.pop("backward", {})
    after = {place: rms for place, rms in found.get("grad_rms", {}).items() if backward.get(place)}
    before = unclipped or backward
    shrunk = [rms / before[place] for place, rms in after.items() if before.get(place)]
    clipped = min(1.0, median(shrunk)) if shrunk else 1.0  # which acts on all parts alike
    found["grad_edit"] = {place: rms / backward[place] / clipped for place, rms in after.items() if clipped}
    against, signs = (sum(found.pop(name, {}).values()) for name in ("against_gradient", "with_signs"))
    if signs:
        found["update_signs"] = {"": against / signs}
    for name in ("no_gradient", "buffer_written"):  # which are named
        found.pop(name, None)
    found["grad_left"] = found.pop("left", {})
    columns: dict[str, Any] = {} if lr is None else {"lr": lr}
    before_clipping = "unclipped" if any(key.name == "unclipped" for key in known) else "backward"
    for column, of in (("grad_norm", before_clipping), ("grad_norm_clipped", "grad_rms")):
        squares = [number.value**2 * sizes[key.piece] for key, number in known.items() if key.name == of]
        columns |= {column: math.sqrt(math.fsum(squares))} if squares else {}
    found["input_rms"] = {place: math.sqrt(square) for place, square in found.pop("input_square", {}).items()}
    found |= {name: {} for name in OF_LABELS if any(map(math.isnan, found.get(name, {}).values()))}
    found = {name: of for name, of in found.items() if of and name not in experts}
    columns |= {name: of_whole(name, of) for name, of in found.items()}
    columns |= {f"{name}/{place}": number for name, of in found.items() for place, number in of.items() if place}
    columns |= {f"{name}/{block}": numbers for name, of in experts.items() for block, numbers in of.items()}
    return columns | _names_of_faulty({key: of for key, of in known.items() if key.piece not in of_experts_only})


def _names_of_faulty(known: Mapping[Key, Known]) -> dict[str, list[str]]:
    """By ``WHAT/PART`` the names of weights whose gradient or update is exactly zero, or whose numbers are not finite.

    Gradients are those before clipping, unless all of these are finite.
    """
    unclipped = "unclipped" if any(key.name == "unclipped" for key in known) else "backward"
    spoiled = any(key.name == unclipped and not math.isfinite(value) for key, (value, _) in known.items())
    what_of = {unclipped: "gradient", "grad_rms": "gradient", "param_rms": "weight", "step_rms": "update"}
    found = defaultdict[str, list[str]](list)
    for key, (value, weight) in known.items():
        what = what_of.get(key.name)
        if key.name == "buffer_written" and value:
            found[f"{key.name}/{key.where}"].append(key.piece)
        elif key.name == "no_gradient":
            found[f"gradient_missing/{key.where}"].append(key.piece)
        if what is None or weight <= 0:
            continue
        is_first = key.name != "grad_rms" or key._replace(name=unclipped) not in known
        if not math.isfinite(value) and (is_first or not spoiled):
            found[f"{what}_not_finite/{key.where}"].append(key.piece)
        elif value == 0 and what != "weight" and is_first:
            found[f"{what}_zero/{key.where}"].append(key.piece)
    return dict(found)


def _rounded(value: Any) -> Any:
    """A number to seven digits, and each of a list."""
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _write(rows: Iterable[Mapping[str, Any]], out: Path) -> None:
    with out.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # the run was killed as it wrote a line
                file.write(b"\n")
        for row in rows:
            file.write(f"{json.dumps({key: _rounded(value) for key, value in row.items()})}\n".encode())


def _write_losses(losses: list[tuple[int, Tensor | float]], of_updates: Iterable[OfUpdates], out: Path) -> None:
    """Write the losses that no measurement has written yet; those of one process, so not of several ranks."""
    with suppress(Exception):  # at the end of a process, even of one that failed
        if losses and not distributed.is_joined():
            rows: list[dict[str, Any]] = [{"step": step, "loss": float(loss)} for step, loss in losses]
            for each in of_updates:
                each.add_to(rows)
            _write(rows, out)
        losses.clear()
    for each in of_updates:
        each.hooks.close()
