"""One of each kind that can be added to the lab from outside."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import nn

import lab
from lab import (
    Factors,
    Link,
    PackedCorpus,
    PerRun,
    PerRunSeed,
    Role,
    Standard,
    bounded,
    fingerprint,
    over,
    per_run_max,
    seed,
)


@lab.register("intervention", "score_cap")
@dataclass(frozen=True)
class ScoreCap(lab.HookIntervention):
    """Squash attention scores into (-cap, cap)."""

    hook_points: ClassVar = ("scores",)
    cap: PerRun = bounded(above=0)

    def attach(self, point, runs, config):
        return Squash(self.cap)


class Squash(nn.Module):
    def __init__(self, cap):
        super().__init__()
        self.cap = cap

    def forward(self, scores_rbhts):
        cap = over(self.cap, scores_rbhts)
        return cap * torch.tanh(scores_rbhts / cap)


@lab.register("intervention", "z_slope")
@dataclass(frozen=True)
class ZSlope(lab.LossTerm):
    """Punish log Z by its size and not its square: a term of the loss."""

    uses: ClassVar = ("log_z_rbt",)
    coefficient: PerRun = bounded(at_least=0)

    def __call__(self, predictions):
        log_z_rbt = predictions.log_z_rbt
        return over(self.coefficient, log_z_rbt) * log_z_rbt.abs()


@lab.register("link", "bounded_direction")
@dataclass(frozen=True)
class BoundedDirection(Link):
    """No entry of Adam's direction beyond ``bound``."""

    takes: ClassVar = ("direction",)
    makes: ClassVar = "direction"
    bound: PerRun = bounded(above=0)

    def __call__(self, updates, state, now):
        bounds = {name: over(self.bound, update) for name, update in updates.items()}
        return {name: torch.clamp(update, -bounds[name], bounds[name]) for name, update in updates.items()}


@lab.register("parametrization", "root_width")
@dataclass(frozen=True)
class RootWidth(Standard):
    """Learning rate of matrices times the root of base width / width."""

    base_width: int = bounded(above=0)

    def factors(self, role: Role, fan_in: int, width: int) -> Factors:
        lr = (self.base_width / width) ** 0.5 if role in (Role.MATRIX, Role.QUERY) else 1.0
        return Factors(super().factors(role, fan_in, width).init_std, lr)


@lab.register("probe", "output_logit_max", event="logits")
def output_logit_max(logits_rbtv):
    """Largest output logit."""
    return per_run_max(logits_rbtv)


lab.add_stress_tests(Path(__file__).with_name("own_tests.yaml"))


@lab.register("data", "counting")
@dataclass(frozen=True)
class Counting:
    """The numbers 0, 1, 2, ... written out, one after the other: three bytes in four are easy."""

    upto: int = bounded(above=0)
    seed: PerRunSeed = seed(0)

    def open(self):
        return count(self.upto)


@cache
def count(upto: int) -> PackedCorpus:
    text = " ".join(map(str, range(upto))).encode()
    tokens = np.frombuffer(text, dtype=np.uint8)
    training, reserved = np.split(tokens, [tokens.size * 9 // 10])
    return PackedCorpus(
        training=training, reserved=reserved, fingerprint=fingerprint(training, reserved), notes={"upto": upto}
    )


@lab.register("model", "window_mlp")
@dataclass(frozen=True)
class WindowMLP:
    """The last few tokens side by side, through an MLP (Bengio et al. 2003)."""

    window: int = bounded(above=0)

    def build(self, shape, vocabulary):
        return Window(self.window, shape.width, shape.depth, vocabulary)


class Window(nn.Module):
    """A plain module: tokens [b t] to logits [b t v]; it knows of one run and no fleet."""

    def __init__(self, window: int, width: int, depth: int, vocabulary: int):
        super().__init__()
        self.window = window
        self.embedding = nn.Embedding(vocabulary, width)
        self.first = nn.Linear(window * width, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        seen = nn.functional.pad(self.embedding(tokens), (0, 0, self.window - 1, 0))
        x = torch.tanh(self.first(seen.unfold(1, self.window, 1).flatten(2)))
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.head(x)
