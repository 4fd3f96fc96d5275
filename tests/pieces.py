"""Pieces of the lab put together for tests, from the same files a user's request reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

import lab.optim.schedule
import lab.probes.activations
import lab.probes.formats
import lab.probes.routing
import lab.probes.updates
import lab.training.config  # noqa: F401  (these fill the registries)
from lab import Standard
from lab.core.registry import INTERVENTIONS
from lab.core.schema import build, stack
from lab.model.config import ModelConfig
from lab.model.layers import Operands
from lab.model.transformer import Transformer
from lab.optim.optimizer import Optimizer, build_optimizer

CONF = Path(__file__).parents[1] / "conf"
CPU = torch.device("cpu")


@cache
def _read(group: str, name: str) -> DictConfig:
    config = OmegaConf.load(CONF / group / f"{name}.yaml")
    assert isinstance(config, DictConfig)
    return config


def recipe(group: str, name: str) -> dict[str, Any]:
    """What ``conf/group/name.yaml`` says."""
    values: Any = OmegaConf.to_container(_read(group, name))
    return {str(key): value for key, value in values.items()}


def intervention(name: str, **changes: Any) -> Any:
    """An intervention with the numbers of its file, some of them changed."""
    return build(INTERVENTIONS[name], {**(recipe("intervention", name)[name] or {}), **changes}, f"intervention.{name}")


def optimizer(name: str, *per_run: Mapping[str, Any], without: Sequence[str] = ()) -> Optimizer:
    """A stacked optimizer with the numbers of its file: one run per set of changes; links ``without`` left out."""
    values = recipe("optimizer", name)
    numbers = {key: value for key, value in values.items() if key not in without}
    numbers["chain"] = [link for link in values["chain"] if link not in without]
    return stack([build_optimizer({**numbers, **changes}) for changes in per_run], CPU)


def model(
    *seeds: int,
    width: int = 8,
    depth: int = 2,
    head_width: int = 4,
    vocabulary: int = 11,
    changes: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
    operands: Operands | None = None,
) -> Transformer:
    """Runs of these seeds at initialization."""
    scale, config = Standard().attention_scale(head_width), ModelConfig("small", width, depth, head_width)
    made = Transformer(config, vocabulary, len(seeds), changes or {}, scale, operands).to(dtype)
    made.initialize(seeds, made.factors(Standard(), width))
    return made


def weights_of(made: Transformer) -> dict[str, Tensor]:
    """Every weight by its name."""
    return {name: layer.weight for name, layer in made.layers()}


def tokens(*seeds: int, batch: int = 3, length: int = 7, vocabulary: int = 11) -> Tensor:
    """Random tokens ``[r b t]``, those of a run decided by its seed alone."""
    draws = (torch.Generator().manual_seed(seed) for seed in seeds)
    return torch.stack([torch.randint(vocabulary, (batch, length), generator=draw) for draw in draws])
