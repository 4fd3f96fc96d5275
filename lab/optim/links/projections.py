"""Links that project weights once a step is taken: norms that stay, attention scores and spectra with a bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.core.axes import causal_mask, over, per_run_norm, select_per_run
from lab.core.distributed import max_over_ranks
from lab.core.hooks import HookIntervention
from lab.core.registry import LINKS
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun, bounded, one_of
from lab.optim.links.learning_rate import Decay, DecayLRSquared
from lab.optim.links.link import Link, Now, Tensors, shaped

QUERY, KEY = ".attention.query", ".attention.key"
FIRST_ITERATIONS = 30  # of the power method before training; afterwards each step adds one


@LINKS.register("keep_norm")
@dataclass(frozen=True)
class KeepNorm(Link):
    """Scale each of the blocks' matrices, after the step, to the Frobenius norm that it began with.

    After ``to_weight_norm`` this is the hyperball step of AdamH and MuonH (levanter's ``adamh``): a matrix turns by
    about the learning rate.  The head is none of them.  Weight decay of these matrices would do nothing.
    """

    takes: ClassVar = ("step",)
    roles: ClassVar = MATRICES

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"norm.{name}": per_run_norm([weight.detach()]) for name, weight in weights.items()}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        steps = {}
        for name, step in updates.items():
            moved = now.weights[name] - step
            norm_r = per_run_norm([moved])
            back_r = torch.where(norm_r == 0, 1.0, state[f"norm.{name}"] / norm_r)
            # the weight less the moved one times the factor; written so, inductor can compile it after Muon's products
            steps[name] = now.weights[name] * over(1 - back_r, moved) + step * over(back_r, moved)
        return steps

    def objection(self, config: Any) -> str | None:
        for name, link in config.optimizer.links_of(Role.MATRIX).items():
            if isinstance(link, DecayLRSquared) or (isinstance(link, Decay) and link.weight_decay > 0):
                return (
                    f"keeps the norm of each matrix, so {name!r} does nothing there; leave it out"
                    + ", or say +optimizer.matrix.weight_decay=0" * isinstance(link, Decay)
                )
        for part, role in (("query", Role.QUERY), ("output", Role.MATRIX)):
            std = config.parametrization.entry.factors(role, config.model.width, config.model.width).init_std
            for entry in config.intervention.values():
                if isinstance(entry, HookIntervention):
                    std = entry.initial_std(f"block0.attention.{part}", std, config.model)
            if std == 0 and config.model.depth:
                return f"keeps the norm of each matrix, so attention's {part} matrices, which start at zero, stay there"
        return None


def _normalized_again(config: Any) -> str | None:
    """Why scaling queries and keys does nothing in a run; None where no intervention normalizes them."""
    for name, entry in config.intervention.items():
        if getattr(entry, "normalizes_queries_and_keys", False):
            return f"scales queries and keys, which {name} normalizes again; leave one of the two out"
    return None


@LINKS.register("qk_clip")
@dataclass(frozen=True)
class QKClip(Link):
    """Scale down, after the step, queries and keys of each head whose largest score was above ``qk_clip`` (Kimi K2).

    With the largest score S of the batch the weights of queries are multiplied by (qk_clip / S) ** ``qk_clip_share``,
    those of keys by the rest of that ratio (arXiv:2507.20534, sec. 2.1).  Scores count as at the hook point
    ``scores``, before what attaches there.  Moments are not rescaled.  Of heads that share a key the largest score of
    all counts.
    """

    takes: ClassVar = ("step",)
    roles: ClassVar = (*MATRICES, Role.BIAS)
    events: ClassVar = ("scores",)
    needs_whole_weights: ClassVar = True
    qk_clip: PerRun = bounded(above=0, infinite=True)
    qk_clip_share: PerRun = bounded(at_least=0, at_most=1)

    def observe(self, *announced: Any) -> Tensor:
        """The largest causal score of each head, ``[r h]``."""
        (scores_rbhts,) = announced
        return max_over_ranks(torch.where(causal_mask(scores_rbhts), scores_rbhts, -torch.inf).amax((1, 3, 4)))

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        steps = dict(updates)
        for where, largest_rh in now.measured.items():
            # in the precision of numbers per run, since kernels round the last bit of a power by its place
            limit_r1, share_r1 = (torch.as_tensor(number).view(-1, 1) for number in (self.qk_clip, self.qk_clip_share))
            ratio_rh = torch.where(largest_rh > limit_r1, limit_r1 / largest_rh, 1.0)
            queries, keys = (now.weights[f"{where}{part}"].shape[-1] for part in (QUERY, KEY))
            ratio_rg = ratio_rh.view(len(ratio_rh), -1, queries // keys).amin(-1)
            ratio_rh = ratio_rg.repeat_interleave(queries // keys, dim=1)
            for part, ratio_r, power_r1 in ((QUERY, ratio_rh, share_r1), (KEY, ratio_rg, 1 - share_r1)):
                factor_rh = (ratio_r**power_r1).to(largest_rh)
                for name in (f"{where}{part}", f"{where}{part}.biases"):
                    if name in steps:
                        steps[name] = _scaled_heads(now.weights[name], steps[name], factor_rh)
        return steps

    def objection(self, config: Any) -> str | None:
        return _normalized_again(config)


def _scaled_heads(weight: Tensor, step: Tensor, factor_rh: Tensor) -> Tensor:
    """The step after which each head of a weight ``[r i (h k)]`` or ``[r h 1 k]`` is multiplied by its factor."""
    runs, heads = factor_rh.shape
    by_head = (runs, heads, 1, -1) if weight.ndim == 4 else (runs, weight.shape[1], heads, -1)
    factor = factor_rh.view(runs, heads, 1, 1) if weight.ndim == 4 else factor_rh.view(runs, 1, heads, 1)
    weight_h, step_h = weight.reshape(by_head), step.reshape(by_head)
    return torch.where(factor == 1, step_h, weight_h - (weight_h - step_h) * factor).view_as(step)


@LINKS.register("spectral_cap")
@dataclass(frozen=True)
class SpectralCap(Link):
    """Scale down, after the step, each of the blocks' matrices whose largest singular value is above ``spectral_cap``.

    It is found by the power method, one iteration per step.  ``capped: query_key`` leaves other matrices alone.
    """

    takes: ClassVar = ("step",)
    roles: ClassVar = MATRICES
    needs_whole_weights: ClassVar = True
    spectral_cap: PerRun = bounded(above=0, infinite=True)
    capped: str = one_of("matrices", "query_key")

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {f"vector.{name}": _first_vector(weight.detach()) for name, weight in weights.items()}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        steps = dict(updates)
        for name, step in updates.items():
            if self.capped == "query_key" and not name.endswith((QUERY, KEY)):
                continue
            weight, vector_ro1 = now.weights[name], state[f"vector.{name}"]
            moved = weight - step
            value_r, after_ro1 = _power_iteration(moved, vector_ro1)
            vector_ro1.copy_(after_ro1)
            limit_r = shaped(self.spectral_cap, value_r)
            shrunk = moved * over(limit_r / value_r, moved)
            steps[name] = select_per_run(value_r > limit_r, weight - shrunk, step)
        return steps

    def objection(self, config: Any) -> str | None:
        return _normalized_again(config) if self.capped == "query_key" else None


def _power_iteration(matrix_rio: Tensor, vector_ro1: Tensor) -> tuple[Tensor, Tensor]:
    """The largest singular value ``[r]``, as this vector sees it, and a vector nearer to its right singular one."""
    # sums of products, since a product with a vector rounds otherwise for one run than for several
    image_ri1 = (matrix_rio * vector_ro1.transpose(1, 2)).sum(2, keepdim=True)
    length_r = per_run_norm([image_ri1])
    back_ro1 = (matrix_rio * image_ri1).sum(1).unsqueeze(2)
    norm_r = per_run_norm([back_ro1])
    # a matrix of zeros has no singular vectors
    after_ro1 = select_per_run(norm_r == 0, vector_ro1, back_ro1 / over(norm_r, back_ro1))
    return torch.where(length_r == 0, 0.0, norm_r / length_r), after_ro1


def _first_vector(matrix_rio: Tensor) -> Tensor:
    """A vector ``[r o 1]`` near the right singular one, from the same draw for every run."""
    runs, _, outputs = matrix_rio.shape
    drawn_o1 = torch.randn(outputs, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vector_ro1: Tensor = torch.div(drawn_o1, drawn_o1.norm()).to(matrix_rio).expand(runs, -1, -1).clone()
    for _ in range(FIRST_ITERATIONS):
        _, vector_ro1 = _power_iteration(matrix_rio, vector_ro1)
    return vector_ro1
