"""Links that clip a gradient or a direction, of a whole run or of each tensor, or leave out the update of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.core.axes import over, per_run_max, per_run_norm, per_run_rms
from lab.core.distributed import mean_over_ranks
from lab.core.registry import LINKS
from lab.core.roles import MATRICES, Role
from lab.core.schema import PerRun, bounded
from lab.optim.links.link import Link, Now, Tensors, average, per_run, shaped

SMALLEST_DEVIATION = 1e-6  # added to a standard deviation that divides


@LINKS.register("clip")
@dataclass(frozen=True)
class Clip(Link):
    """Scale a run's whole gradient down to norm ``clip`` (Pascanu et al. 2013); infinity switches it off."""

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    clip: PerRun = bounded(above=0, infinite=True)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r = per_run_norm(updates.values())
        keep_r = torch.where(norm_r > self.clip, self.clip / norm_r, 1.0)
        return {name: gradient * over(keep_r, gradient) for name, gradient in updates.items()}


@LINKS.register("clip_adamw")
@dataclass(frozen=True)
class ClipAdamW(Clip):
    """``clip`` of the weights that AdamW updates beside Muon: all but the matrices of the blocks (XTuner, 2026).

    Muon divides a matrix's momentum by its own norm, so these gradients need no clip, and here they do not count in the
    norm that decides over the others (github.com/InternLM/xtuner, pull request 2001).
    """

    roles: ClassVar = tuple(role for role in Role if role not in MATRICES)


@LINKS.register("clip_relative")
@dataclass(frozen=True)
class ClipRelative(Link):
    """Scale a run's gradient down to ``clip_ratio`` times a moving average of its norm, so that a burst is clipped.

    The average begins at the norm of the first gradient.  Clipped norms enter it, so that a burst raises it slowly.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    clip_ratio: PerRun = bounded(above=0, infinite=True)
    clip_memory: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {"norm": per_run(weights)}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r, average_r = per_run_norm(updates.values()), state["norm"]
        average_r.copy_(torch.where(average_r == 0, norm_r, average_r))
        limit_r = average_r * over(self.clip_ratio, average_r)
        is_clipped_r = norm_r > limit_r
        clipped_r = torch.where(is_clipped_r, limit_r, norm_r)
        keep_r = torch.where(is_clipped_r, limit_r / norm_r, 1.0)
        average(average_r, clipped_r, self.clip_memory)
        return {name: gradient * over(keep_r, gradient) for name, gradient in updates.items()}


@LINKS.register("shrink_embedding")
@dataclass(frozen=True)
class ShrinkEmbedding(Link):
    """Multiply the embedding's gradient by ``shrink``, which rises to 1 after ``shrink_until`` steps (GLM-130B's log).

    It rises along a line of ``shrink_ramp`` steps.  A custom model has no weight called ``embedding``.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    shrink: PerRun = bounded(at_least=0)
    shrink_until: PerRun = bounded(at_least=0, infinite=True)
    shrink_ramp: PerRun = bounded(at_least=0)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        begin, ramp, least = (torch.as_tensor(number) for number in (self.shrink_until, self.shrink_ramp, self.shrink))
        progress = ((now.step - begin) / ramp.clamp(min=1)).clamp(0, 1)
        factor = least + (1 - least) * progress
        return {name: g * over(factor, g) if name == "embedding" else g for name, g in updates.items()}


@LINKS.register("clip_update")
@dataclass(frozen=True)
class ClipUpdate(Link):
    """Scale the direction of a weight down to RMS ``clip_update``, each weight apart (Shazeer & Stern 2018, sec. 6)."""

    takes: ClassVar = ("direction",)
    clip_update: PerRun = bounded(above=0, infinite=True)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        clipped = {}
        for name, direction in updates.items():
            rms_r = per_run_rms(direction)
            limit_r = over(self.clip_update, rms_r)
            clipped[name] = direction * over(torch.where(rms_r > limit_r, limit_r / rms_r, 1.0), direction)
        return clipped


@LINKS.register("zclip")
@dataclass(frozen=True)
class ZClip(Link):
    """Clip a run's gradient whose norm is far above the usual, by its z-score (ZClip, arXiv:2504.02507, alg. 1).

    Mean mu and variance of the norm cover the first ``z_warmup`` steps, then are moving averages with ``z_memory``,
    which clipped norms enter as clipped.  A norm whose z-score is above ``z_threshold`` becomes mu plus
    ``z_threshold`` ** 2 / z standard deviations, so the larger a spike the nearer to mu.  No norm exceeds ``clip``.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    z_threshold: PerRun = bounded(above=0, infinite=True)
    z_memory: PerRun = bounded(at_least=0, below=1)
    z_warmup: PerRun = bounded(at_least=1)
    clip: PerRun = bounded(above=0, infinite=True)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {name: per_run(weights) for name in ("mean", "variance", "count")}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r = per_run_norm(updates.values())
        mean_r, variance_r, count_r = (state[name] for name in ("mean", "variance", "count"))
        threshold_r, memory_r, most_r = (
            shaped(number, norm_r) for number in (self.z_threshold, self.z_memory, self.clip)
        )
        is_usual_r = count_r < shaped(self.z_warmup, norm_r)
        deviation_r = variance_r.sqrt()
        z_r = (norm_r - mean_r) / (deviation_r + SMALLEST_DEVIATION)
        is_spike_r = ~is_usual_r & (z_r > threshold_r)
        clipped_r = torch.where(is_spike_r, mean_r + threshold_r * threshold_r / z_r * deviation_r, norm_r)
        # in the warm-up each norm counts alike; afterwards the variance is about the new mean
        weight_r = torch.where(is_usual_r, 1 / (count_r + 1), 1 - memory_r)
        new_mean_r = mean_r + (clipped_r - mean_r) * weight_r
        about_r = torch.where(is_usual_r, clipped_r - mean_r, clipped_r - new_mean_r)
        variance_r.add_((about_r * (clipped_r - new_mean_r) - variance_r) * weight_r)
        mean_r.copy_(new_mean_r)
        count_r.add_(1)
        limit_r = torch.minimum(clipped_r, most_r)
        keep_r = torch.where(norm_r > limit_r, limit_r / norm_r, 1.0)
        return {name: gradient * over(keep_r, gradient) for name, gradient in updates.items()}


@LINKS.register("adagc")
@dataclass(frozen=True)
class AdaGC(Link):
    """Clip the gradient of each tensor to ``adagc_ratio`` times a moving average of its norm (arXiv:2502.11034).

    Clipped norms enter the average, with ``adagc_memory``, so it rises slowly.  In the first ``adagc_warmup`` steps the
    whole run is clipped to ``clip``, and the average is the smallest norm so far; norms of zero do not count.
    ``pytorch_optimizer`` counts these steps from 1 and leaves the last out: its 100 are 99 here.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    adagc_ratio: PerRun = bounded(above=0, infinite=True)
    adagc_memory: PerRun = bounded(at_least=0, below=1)
    adagc_warmup: PerRun = bounded(at_least=0)
    clip: PerRun = bounded(above=0, infinite=True)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        # a tensor's average is infinite until its first gradient
        averages = {f"norm.{name}": per_run(weights, torch.inf) for name in weights}
        return {"count": per_run(weights), **averages}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        norm_r = per_run_norm(updates.values())
        ratio_r, memory_r, most_r = (
            shaped(number, norm_r) for number in (self.adagc_ratio, self.adagc_memory, self.clip)
        )
        warms_up_r = state["count"] < shaped(self.adagc_warmup, norm_r)
        keep_r = torch.where(norm_r > most_r, most_r / norm_r, 1.0)
        clipped = {}
        for name, gradient in updates.items():
            own_r, average_r = per_run_norm([gradient]), state[f"norm.{name}"]
            usual_r = torch.where(average_r.isinf(), own_r, average_r)
            limit_r = ratio_r * usual_r
            own_keep_r = torch.where(own_r > limit_r, limit_r / own_r, 1.0)
            own_keep_r = torch.where(warms_up_r, keep_r, own_keep_r)
            after_r = own_r * own_keep_r
            smallest_r = torch.where(after_r == 0, average_r, torch.minimum(average_r, after_r))
            mixed_r = usual_r * memory_r + after_r * (1 - memory_r)
            # a tensor without any gradient so far has no average
            mixed_r = torch.where(average_r.isinf() & (own_r == 0), average_r, mixed_r)
            average_r.copy_(torch.where(warms_up_r, smallest_r, mixed_r))
            clipped[name] = gradient * over(own_keep_r, gradient)
        state["count"].add_(1)
        return clipped


@LINKS.register("stable_spam")
@dataclass(frozen=True)
class StableSpam(Link):
    """Clip each tensor's largest entries, then scale its gradient by its norms so far (arXiv:2502.17055, alg. 1).

    Entries beyond the average largest one (``max_memory``) shrink by the ratio of both.  Then the norm becomes the
    average norm (``norm_memory``) over the root of the average squared norm (``norm_square_memory``), about 1.  All
    averages are bias-corrected.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"
    max_memory: PerRun = bounded(at_least=0, below=1)
    norm_memory: PerRun = bounded(at_least=0, below=1)
    norm_square_memory: PerRun = bounded(at_least=0, below=1)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        averages = {f"{part}.{name}": per_run(weights) for name in weights for part in ("max", "norm", "square")}
        return {"count": per_run(weights), **averages}

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        state["count"].add_(1)
        count_r, scaled = state["count"], {}
        memories = {"max": self.max_memory, "norm": self.norm_memory, "square": self.norm_square_memory}

        def averaged(which: str, name: str, value_r: Tensor) -> Tensor:
            memory_r, average_r = torch.as_tensor(memories[which]), state[f"{which}.{name}"]
            average_r.mul_(shaped(memory_r, count_r)).add_(value_r * shaped(1 - memory_r, count_r))
            # in the precision of numbers per run, since kernels round the last bit of an exp by its place
            unbias_r = 1 - (memory_r.log() * count_r.to(memory_r.dtype)).exp()
            return average_r / shaped(unbias_r, count_r)

        for name, gradient in updates.items():
            largest_r = per_run_max(gradient.abs())
            usual_r = averaged("max", name, largest_r)
            shrink_r = torch.where(largest_r > usual_r, usual_r / largest_r, 1.0)
            clipped = torch.where(
                gradient.abs() > over(usual_r, gradient), gradient * over(shrink_r, gradient), gradient
            )
            norm_r = per_run_norm([clipped])
            mean_r, square_r = averaged("norm", name, norm_r), averaged("square", name, norm_r.square())
            factor_r = mean_r / (square_r.sqrt() * norm_r)
            scaled[name] = clipped * over(torch.where(norm_r == 0, 0.0, factor_r), clipped)
        return scaled


class Gate(Link):
    """A link that decides whether an update takes place: ``kept`` in its state is 1 or 0 for each run.

    Weights, and the state of all other links, stay bit for bit where it does not.
    """

    takes: ClassVar = ("gradient",)
    makes: ClassVar = "gradient"

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        return {"kept": per_run(weights, 1.0)}


@LINKS.register("skip_sigma")
@dataclass(frozen=True)
class SkipSigma(Gate):
    """Leave out updates whose loss or gradient norm is ``skip_sigmas`` standard deviations above the mean (OLMo 2).

    Mean and deviation are taken over the last ``skip_window`` updates that were made; the first ``skip_fewest`` are all
    made.  What is left out does not count, so a limit stays while an event lasts.  A loss or norm that is not finite
    is always left out.
    """

    events: ClassVar = ("train_loss",)
    skip_sigmas: PerRun = bounded(above=0)
    skip_fewest: PerRun = bounded(at_least=2)
    skip_window: int = bounded(at_least=2)

    def begin(self, weights: Mapping[str, Tensor]) -> Tensors:
        past = {name: per_run(weights)[:, None].repeat(1, self.skip_window) for name in ("losses", "norms")}
        return {**super().begin(weights), "count": per_run(weights), **past}

    def observe(self, *announced: Any) -> Tensor:
        """The loss of the batch, ``[r]``."""
        (loss_r,) = announced
        return mean_over_ranks(loss_r)

    def __call__(self, updates: Tensors, state: Tensors, now: Now) -> Tensors:
        count_r = state["count"]
        values = {"losses": now.measured[""].to(count_r), "norms": per_run_norm(now.gradients.values())}
        is_early_r = count_r < shaped(self.skip_fewest, count_r)
        keep_r = torch.ones_like(is_early_r)
        for name, value_r in values.items():
            keep_r = keep_r & value_r.isfinite() & (is_early_r | (value_r <= self._limit(state[name], count_r)))
        for name, value_r in values.items():
            past_rw = state[name]
            newest_rw = torch.cat([past_rw[:, 1:], value_r[:, None]], 1)
            past_rw.copy_(torch.where(keep_r[:, None], newest_rw, past_rw))
        count_r.add_(keep_r.to(count_r))
        state["kept"].copy_(keep_r)
        return dict(updates)

    def _limit(self, past_rw: Tensor, count_r: Tensor) -> Tensor:
        """Mean plus so many standard deviations ``[r]`` of the filled places of the window, which are the last ones."""
        filled_r1 = count_r.clamp(max=self.skip_window)[:, None]
        is_filled_rw = torch.arange(self.skip_window, 0, -1, device=past_rw.device) <= filled_r1
        mean_r1 = torch.where(is_filled_rw, past_rw, 0.0).sum(1, keepdim=True) / filled_r1
        square_r1 = torch.where(is_filled_rw, (past_rw - mean_r1).square(), 0.0).sum(1, keepdim=True)
        deviation_r = (square_r1 / (filled_r1 - 1)).sqrt()[:, 0]
        return mean_r1[:, 0] + shaped(self.skip_sigmas, deviation_r) * deviation_r
