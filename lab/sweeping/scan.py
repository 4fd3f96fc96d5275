"""Scan a checkpoint: the best single step at each batch size, and the noise scales that should predict it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from lab.analysis.text import finite
from lab.core import machine
from lab.core.errors import RequestError, nearest
from lab.model.loss import losses
from lab.records import plans
from lab.studies.batch_size.frozen import BestStep, FrozenLaw, best_step, frozen_law
from lab.training.batches import BatchLoader
from lab.training.checkpoint import Checkpointer
from lab.training.config import RunConfig, run_config
from lab.training.fleet import Fleet
from lab.training.identity import run_id

BATCHES = (2, 8, 32, 128)
SEQUENCES = 256  # in all batches of one size together, and in the measurement of the noise
CURVED = 32  # of the latter, the sequences whose deviations from the mean gradient are multiplied by the Hessian
HELD_OUT = 64  # windows on which the loss after a step is measured
# Sizes of the steps that are tried, in multiples of the best one that the noise predicts.
MULTIPLES = (0.4, 0.8, 1.2)
# Length of a finite difference over that of the weights; its truncation and rounding errors in float64 are below 1e-8.
DIFFERENCE = 1e-5
FIRST_UNSEEN = 10**6  # index of a batch that no run reaches


class Landscape(Protocol):
    """A loss around frozen weights, as flat vectors ``[d]``."""

    def example_gradients(self) -> Iterator[Tensor]:
        """Yield the gradient ``[d]`` of one example after another."""
        ...

    def hessian_product(self, vector: Tensor) -> Tensor:
        """The Hessian times a vector ``[d]``."""
        ...

    def gradients(self, batch_size: int) -> Iterator[Tensor]:
        """Yield the gradients ``[d]`` of batches of this size."""
        ...

    def loss_after(self, step: Tensor) -> float:
        """Held-out loss of the weights plus a step ``[d]``."""
        ...


@dataclass(frozen=True)
class FrozenNoise:
    """The gradient and its noise at a checkpoint, of one example each, unbiased.

    Attributes:
        squared_norm: |G|² of the true gradient G.
        trace: tr Σ of the covariance Σ of an example's gradient.
        curvature: GᵀHG.
        curved_trace: tr(HΣ).
    """

    squared_norm: float
    trace: float
    curvature: float
    curved_trace: float

    @property
    def b_simple(self) -> float:
        """tr Σ / |G|², examples (McCandlish et al. 2018, eq. 2.9)."""
        return self.trace / self.squared_norm if self.squared_norm > 0 else math.inf

    @property
    def b_noise(self) -> float:
        """tr(HΣ) / GᵀHG, examples (McCandlish et al. 2018, sec. 2.2)."""
        return self.curved_trace / self.curvature if self.curvature > 0 else math.inf

    def best_step(self, batch_size: float) -> float:
        """Step size at which the loss falls most (McCandlish et al. 2018, sec. 2.2); NaN if GᵀHG is not positive."""
        bend = self.curvature + self.curved_trace / batch_size
        return self.squared_norm / bend if bend > 0 and self.squared_norm > 0 else math.nan


@dataclass(frozen=True)
class Scan:
    """Results of a scan; batch sizes and noise scales in sequences, gains in nats per token."""

    noise: FrozenNoise
    steps: dict[int, BestStep]
    step_law: FrozenLaw
    gain_law: FrozenLaw


def measure_noise(landscape: Landscape, curved: int = CURVED) -> FrozenNoise:
    """Measure the gradient and its noise; ``curved_trace`` from the deviations of the first ``curved`` examples."""
    total, squares, n, first = torch.tensor(0.0), 0.0, 0, list[Tensor]()
    for gradient in landscape.example_gradients():
        total, squares, n = total + gradient, squares + float(gradient.square().sum()), n + 1
        if n <= curved:
            first.append(gradient)
    mean = total / n
    trace = (squares - n * float(mean.square().sum())) / (n - 1)
    unbias = n / (n - 1)  # the mean was measured on the same examples
    bends = [float(deviation @ landscape.hessian_product(deviation)) for deviation in (each - mean for each in first)]
    curved_trace = unbias * sum(bends) / len(bends)
    curvature = float(mean @ landscape.hessian_product(mean)) - curved_trace / n
    return FrozenNoise(float(mean.square().sum()) - trace / n, trace, curvature, curved_trace)


def scan_steps(landscape: Landscape, batches: Sequence[int] = BATCHES, curved: int = CURVED) -> Scan:
    """Find the best step at each batch size by the held-out loss after steps around the predicted one.

    Raises:
        RequestError: the gradient is too small against its noise, or fewer than three batch sizes have a best step.
    """
    noise = measure_noise(landscape, curved)
    steps = {}
    for batch in batches:
        middle = noise.best_step(batch)
        if not math.isfinite(middle):
            raise RequestError("the gradient is too small against its noise at this checkpoint; scan a later one")
        sizes = [multiple * middle for multiple in MULTIPLES]
        after = [[landscape.loss_after(-size * gradient) for size in sizes] for gradient in landscape.gradients(batch)]
        means = [sum(column) / len(after) for column in zip(*after, strict=True)]
        steps[batch] = best_step(sizes, means, landscape.loss_after(torch.tensor(0.0)))
    try:
        laws = [frozen_law({batch: step[part] for batch, step in steps.items()}) for part in (0, 1)]
    except ValueError as error:
        raise RequestError(str(error)) from None
    return Scan(noise, steps, *laws)


class RunLandscape:
    """The loss around the weights of a run, in float64, whatever the precision of the run."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor]) -> None:
        """Take the weights of the run, with a leading axis of size one."""
        exact = replace(config, precision="fp32", engine="eager", device="cpu")
        self.fleet, self.config = Fleet([exact], dtype=torch.float64), config
        self.weights = {name: weights[name].detach().double() for name in self.fleet.state.weights}
        windows_nt = self.fleet.evaluation.held_out_nt
        self.held_out_rnt = windows_nt[:: max(1, len(windows_nt) // HELD_OUT)][:HELD_OUT].unsqueeze(0)
        self.length = math.sqrt(sum(float(weight.square().sum()) for weight in self.weights.values()))

    def _batches(self, size: int) -> Iterator[Tensor]:
        """Yield batches of unseen training windows ``[1 b t+1]``, ``SEQUENCES`` windows in all."""
        fleet, config = self.fleet, self.config
        seeds = fleet.config.data.entry.seed
        loader = BatchLoader(fleet.corpus, seeds, size, config.seq_len, fleet.device, resident=False)
        return (loader.batch(FIRST_UNSEEN + n) for n in range(max(1, SEQUENCES // size)))

    def _moved(self, step: Tensor) -> dict[str, Tensor]:
        if step.ndim == 0:
            return self.weights
        parts = torch.split(step, [weight.numel() for weight in self.weights.values()])
        named = zip(self.weights.items(), parts, strict=True)
        return {name: weight + part.view_as(weight) for (name, weight), part in named}

    def _gradient(self, weights: dict[str, Tensor], windows_rbt: Tensor) -> Tensor:
        gradients, _ = self.fleet.step_function.gradients_of(weights, windows_rbt)
        return torch.cat([gradients[name].flatten() for name in self.weights])

    def example_gradients(self) -> Iterator[Tensor]:
        """Yield the gradient ``[d]`` of one sequence after another."""
        return self.gradients(1)

    def gradients(self, batch_size: int) -> Iterator[Tensor]:
        """Yield the gradients ``[d]`` of batches of unseen training text."""
        return (self._gradient(self.weights, windows_rbt) for windows_rbt in self._batches(batch_size))

    def hessian_product(self, vector: Tensor) -> Tensor:
        """The Hessian times a vector, by a central difference of gradients on unseen training text."""
        windows_rbt = next(self._batches(HELD_OUT))
        size = DIFFERENCE * self.length / float(vector.norm())
        above, below = (self._gradient(self._moved(sign * size * vector), windows_rbt) for sign in (1, -1))
        return (above - below) / (2 * size)

    @torch.no_grad()
    def loss_after(self, step: Tensor) -> float:
        """Cross-entropy on held-out text, nats per token."""
        names = (name for name, _ in self.fleet.model.named_parameters())
        moved = dict(zip(names, self._moved(step).values(), strict=True))
        logits_rbtv, _ = functional_call(self.fleet.model, moved, self.held_out_rnt[..., :-1])
        _, loss_r = losses(logits_rbtv, self.held_out_rnt[..., 1:], {})
        return float(loss_r[0])


def open_checkpoint(folder: Path, run: str | None = None) -> tuple[str, RunLandscape]:
    """Open the newest checkpoint of a run, by default of the first run that has one.

    Raises:
        RequestError: the folder, a checkpoint of the run, or a plan with its config is missing.
    """
    if not folder.is_dir():
        raise RequestError(f"no results folder {folder}")
    fleets = plans.checkpointed_fleets(folder)
    if not fleets:
        raise RequestError(
            f"no checkpoint in {folder}; stop a sweep with checkpoint.steps=N before its end, and scan its folder"
        )
    name = run or fleets[0][0]
    ids = next((ids for ids in fleets if name in ids), None)
    if ids is None:
        known = [each for fleet in fleets for each in fleet]
        raise RequestError(f"no checkpoint of run {name!r} in {folder}; {nearest(name, known)}")
    configs = _configs(folder, ids)
    fleet, skipped = Fleet(configs), list[str]()
    if not Checkpointer(folder, ids, configs[0].checkpoint).restore(fleet.tensors(), skipped.append):
        raise RequestError(skipped[0] if skipped else f"no checkpoint of run {name} in {folder}")
    index = ids.index(name)
    weights = {key: weight[index : index + 1].detach().cpu() for key, weight in fleet.state.weights.items()}
    return name, RunLandscape(configs[index], weights)


def _configs(folder: Path, ids: Sequence[str]) -> list[RunConfig]:
    """The configs of these runs, from the plans of the folder; each must reproduce the id of its run.

    Raises:
        RequestError: no plan has a config, or it is not that of the run, or the data have changed.
    """
    planned: dict[str, Mapping[str, Any]] = {}
    for plan, fleets in plans.fleets_of_plans(folder).items():
        for index, fleet in enumerate(fleets):
            if set(fleet) & set(ids):
                points = plans.thaw(folder, plan, index)
                planned |= {point["id"]: point for point in points if {"tree", "data_fingerprint"} <= point.keys()}
    if missing := set(ids) - set(planned):
        raise RequestError(f"no plan in {folder} has the config of run {min(missing)}")
    return [_config(folder, name, planned[name]) for name in ids]


def _config(folder: Path, name: str, point: Mapping[str, Any]) -> RunConfig:
    try:
        config = run_config(point["tree"])
    except (TypeError, AttributeError) as fault:
        raise RequestError(f"the plan of run {name} in {folder} holds no config: {fault}") from None
    if run_id(config, str(point["data_fingerprint"])) != name:
        raise RequestError(f"the plan in {folder} that names run {name} holds the config of another run")
    if config.data.entry.open().fingerprint != point["data_fingerprint"]:
        raise RequestError(f"the data of run {name} are not those it was planned on")
    return config


def scan_lines(folder: Path, run: str | None = None, *, as_json: bool = False) -> Iterator[str]:
    """Yield the lines that ``lab scan`` prints."""
    machine.configure_torch()
    name, landscape = open_checkpoint(folder, run)
    result = scan_steps(landscape)
    if as_json:
        yield json.dumps(_plain(name, result), indent=1, allow_nan=False)
        return
    yield f"run {name}, frozen at its newest checkpoint"
    yield f"{'batch':>6} {'best step':>10} {'gain, nats/token':>17}"
    for batch, step in result.steps.items():
        yield f"{batch:>6} {step.size:>10.3g} {step.gain:>17.3g}"
    for what, law in (("best steps", result.step_law), ("gains", result.gain_law)):
        yield f"noise scale by {what}: {law.scale:.3g} sequences (limit {law.limit:.3g}, R² {law.r_squared:.2f})"
    yield f"noise scale by the Hessian, tr(HΣ) / GᵀHG: {result.noise.b_noise:.3g} sequences"
    yield f"simple noise scale, tr Σ / |G|²: {result.noise.b_simple:.3g} sequences"
    yield "Caution: all of this is about one step of plain gradient descent from here, not about a whole run of Adam."


def _plain(name: str, result: Scan) -> dict[str, Any]:
    noise = {"b_simple": result.noise.b_simple, "b_noise": result.noise.b_noise, **asdict(result.noise)}
    return {
        "run": name,
        **_finite(noise),
        "steps": [{"batch_size": batch, **_finite(step._asdict())} for batch, step in result.steps.items()],
        "step_law": _finite(result.step_law._asdict()),
        "gain_law": _finite(result.gain_law._asdict()),
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {key: finite(value) for key, value in values.items()}
