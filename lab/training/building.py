"""Choose and check the device, ranks, model and learning rates that a config asks for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.core import distributed
from lab.core.distributed import check_divisible
from lab.core.errors import RequestError
from lab.core.hooks import HookIntervention, LossTerm, WeightIntervention
from lab.core.number_formats import Mantissa
from lab.core.own_failures import OWN_CODE, OwnCodeError, own_failure, place_in_own_code
from lab.core.registry import PROBES
from lab.interventions.experts import Experts
from lab.model import low_precision
from lab.model.custom import Build, CustomModel, check_custom_model, probed_modules_of
from lab.model.layers import Operands
from lab.model.low_precision import LowPrecision
from lab.model.transformer import Transformer
from lab.model.transformer import mlp_parts as mlp_parts_of
from lab.model.watched import BY_SHAPE, Watched
from lab.optim.links.torch_optimizer import TorchOptimizer
from lab.training.config import RunConfig
from lab.training.rules import SWITCHES

# How names of weights in a block begin that have an entry for each hidden unit.
OF_EXPERTS = ("mlp_up", "mlp_down", "mlp_hidden", "gate.swiglu")
FORMATS = {"fp32": None, "bf16": torch.bfloat16, "fp16_emulated": torch.float16}


def operand_format(config: RunConfig) -> Operands | None:
    """The format to which products round their operands and results; None rounds nothing."""
    if config.precision == "mantissa":
        return Mantissa(torch.as_tensor(config.mantissa_bits).view(-1))
    if config.precision in low_precision.PRECISIONS:
        return LowPrecision(config.precision, **{name: getattr(config, name) for name in SWITCHES})
    return FORMATS[config.precision]


def pick_device(device: str) -> torch.device:
    """Return the device that a config names; ``auto`` is the first available of cuda, mps and cpu.

    Raises:
        RequestError: the device is not available.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return distributed.rank_device(next(name for name, is_available in available.items() if is_available))
    if not available[device]:
        raise RequestError(
            f"device={device} is not available here; available: {', '.join(d for d in available if available[d])}"
        )
    return distributed.rank_device(device)


def check_ranks(config: RunConfig) -> None:
    """Refuse a run whose batch or weights cannot be split among the ranks.

    Raises:
        RequestError: the number of ranks does not divide the batch size or a weight.
    """
    distributed.batch_rows(config.rows, config.rows_key)
    if distributed.world_size() == 1:
        return
    if config.custom_model:
        name = next(iter(config.custom_model))
        raise RequestError(f"custom model {name} trains in one process; start it without torchrun")
    for name in config.probes.names:
        if PROBES[name].event in ("descent", "adam_direction"):
            raise RequestError(f"probe {name} measures in one process; leave it out, or start without torchrun")
    if config.precision in low_precision.PRECISIONS:
        raise RequestError(f"precision={config.precision} takes its scales in one process; start it without torchrun")
    if config.response:
        raise RequestError(f"response={config.response.name} trains in one process; start it without torchrun")
    if config.ranks == "fsdp":
        for name, link in config.optimizer.links.items():
            if link.needs_whole_weights:
                raise RequestError(
                    f"ranks=fsdp shares weights, and optimizer link {name} needs them whole; say ranks=ddp"
                )
        with torch.device("meta"):
            model = build_model(config, 1)
        check_divisible({name: weight.shape for name, weight in model.weights().items()})


def check_own_code(config: RunConfig) -> None:
    """Check the custom model of a run and its optimizers of the user's own, if it has any, in a few throwaway steps.

    Raises:
        RequestError: they cannot be trained in a fleet.
    """
    for name, entry in config.custom_model.items():
        vocabulary = config.data.entry.open().vocabulary
        make, (own,) = _builder(entry, config), _own_models(config)
        check_custom_model(name, make, vocabulary, config.seq_len, _watched(entry), own)
    for phase in config.phases:
        for name in _own_optimizers(phase):
            model = build_model(phase, 1)
            with _refusing_own_failures(config):
                phase.optimizer.begin_link(name, model.weights(), model.roles())


@contextmanager
def _refusing_own_failures(config: RunConfig) -> Iterator[None]:
    """Within the block, what the user's own code raises becomes a line."""
    try:
        yield
    except (Exception, SystemExit) as fault:
        if isinstance(fault, RequestError) or not (failure := failure_of_own_code(fault, config)):
            raise
        raise OwnCodeError(failure) from None


def failure_of_own_code(fault: BaseException, config: RunConfig) -> str:
    """An exception of the user's own model or optimizer in a line; empty where it did not pass through their code."""
    if isinstance(fault, OwnCodeError):
        return f"{OWN_CODE}: {fault}"
    every = [*_own_models(config), *(own for phase in config.phases for own in _own_optimizers(phase).values())]
    failed = next((own for own in every if place_in_own_code(fault, own)), None)
    return f"{OWN_CODE}{own_failure(fault, failed)}" if failed else ""


def _own_models(config: RunConfig) -> list[Any]:
    """What builds the custom model of a run, if it has one: the user's class or function."""
    return [getattr(entry, "builder", type(entry)) for entry in config.custom_model.values()]


def _own_optimizers(config: RunConfig) -> dict[str, Any]:
    """The user's own optimizers of a run, by the names of their links."""
    return {name: link.optimizer for name, link in config.optimizer.links.items() if isinstance(link, TorchOptimizer)}


def _builder(entry: Any, config: RunConfig) -> Build:
    """What builds the module of one run; a ``build`` with a third argument gets the length of a window."""
    shape = [config.model, config.data.entry.open().vocabulary, config.seq_len]
    return partial(entry.build, *shape[: len(inspect.signature(entry.build).parameters)])


def _watched(entry: Any) -> Watched:
    """Which modules of a custom model are probed; without a word of its entry they are found by shape."""
    watched: Watched = getattr(entry, "watched", BY_SHAPE)
    return watched


def probed_modules(config: RunConfig) -> Watched | None:
    """The names of the modules of the custom model of a run that are probed; None without one.

    Raises:
        RequestError: it fails while probes listen, or no module has a name to be watched.
    """
    for entry in config.custom_model.values():
        vocabulary = config.data.entry.open().vocabulary
        with _refusing_own_failures(config):
            return probed_modules_of(_builder(entry, config), vocabulary, config.seq_len, _watched(entry))
    return None


def hook_interventions(config: RunConfig) -> dict[str, HookIntervention]:
    """Interventions that attach to the model, by name, and the response if it does."""
    entries = {**config.intervention, **({config.response.name: config.response.entry} if config.response else {})}
    return {name: entry for name, entry in entries.items() if isinstance(entry, HookIntervention)}


def loss_terms(config: RunConfig) -> dict[str, LossTerm]:
    """Interventions that add to the loss, by name."""
    return {name: entry for name, entry in config.intervention.items() if isinstance(entry, LossTerm)}


def weight_interventions(config: RunConfig) -> dict[str, WeightIntervention]:
    """Interventions on how weights are trained, by name."""
    return {name: entry for name, entry in config.intervention.items() if isinstance(entry, WeightIntervention)}


def role_lr(config: RunConfig, role: str) -> float:
    """Factor of the learning rate of weights with this role; they are not trained where it is 0."""
    return math.prod(entry.lr_factor(role) for entry in weight_interventions(config).values())


def build_model(config: RunConfig, runs: int) -> Transformer | CustomModel:
    """The model of so many runs, its weights not initialized."""
    vocabulary, operands = config.data.entry.open().vocabulary, operand_format(config)
    for entry in config.custom_model.values():
        make = _builder(entry, config)
        assert not isinstance(operands, (Mantissa, LowPrecision)), "refused with the config"
        return CustomModel(make, runs, hook_interventions(config), config.model, operands, _watched(entry))
    scale = config.parametrization.entry.attention_scale(config.model.head_width)
    model = Transformer(config.model, vocabulary, runs, hook_interventions(config), scale, operands)
    model.freeze(lambda role: role_lr(config, role) == 0)
    return model


def count_parameters(model: Transformer | CustomModel) -> tuple[int, int]:
    """Numbers of parameters of one run: all, and without input embedding and output head."""
    sizes = {name: weight[0].numel() for name, weight in model.weights().items()}
    total = sum(sizes.values())
    return total, total - sum(sizes[name] for name in model.ends)


def mlp_parts(config: RunConfig) -> tuple[int, int]:
    """Number of MLPs side by side in a block, and hidden units of each."""
    return mlp_parts_of(hook_interventions(config).values(), config.model.width)


def active_parameters(config: RunConfig, model: Transformer | CustomModel) -> int:
    """Number of parameters of one run that act on a token: all but those of experts that it does not pass."""
    total, _ = count_parameters(model)
    for entry in (entry for entry in config.intervention.values() if isinstance(entry, Experts)):
        parts = [(name.partition(".")[2], weight) for name, weight in model.weights().items()]
        of_experts = sum(weight[0].numel() for name, weight in parts if name.startswith(OF_EXPERTS))
        total -= of_experts * (entry.number - entry.top_k) // (entry.number + entry.shared)
    return total


def lr_shape(config: RunConfig, seen_s: NDArray[np.int64]) -> Tensor:
    """LR over peak ``[s r]`` of the updates before which a fleet has seen so many sequences."""
    done_s = torch.from_numpy(seen_s * config.seq_len) if config.schedule.over == "tokens" else None
    shape_sr: Tensor = config.schedule.entry.shape(config.duration, config.optimizer.lr, done_s)
    return shape_sr
