"""The recorder: collects what a fleet measures and hands it out as one card and one list of probe values per run."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import torch

from lab.core import distributed, machine
from lab.records.trackers import tag
from lab.training.building import count_parameters
from lab.training.clock import Event
from lab.training.config import RunConfig
from lab.training.fleet import Fleet
from lab.training.identity import columns
from lab.training.loop import StepResult

Row = tuple[int, str, str, float]
Key = tuple[int, str, str]
Names = tuple[tuple[str, str], ...]
Steps = tuple[int, ...] | None  # of each run, where they differ; -1 for a run that had ended


class Run(NamedTuple):
    """The outcome of a run: columns of its record, its probe values, and its events."""

    outcome: Mapping[str, Any]
    metrics: Sequence[Row]
    events: Sequence[Event] = ()


class Recorder:
    """Keeps the probe values of a fleet on its device, and splits them by run at the end."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.started = fleet, time.perf_counter()
        self._probed_steps: list[tuple[int, Names, Steps]] = []
        self._names: dict[Names, Names] = {}
        self._values: list[torch.Tensor] = []
        self._val_losses: list[torch.Tensor] = []
        self._tracked = self._done = 0

    def keep(self, result: StepResult) -> None:
        """Keep the result of a step; nothing is copied off the device yet."""
        self._done = result.done
        if result.probe_values:
            names = tuple(result.probe_values)
            self._probed_steps.append((result.step, self._names.setdefault(names, names), result.steps))
            values_r = result.probe_values.values()
            self._values.append(torch.stack([value_r.to(self.fleet.shape_sr) for value_r in values_r]))
        if result.val_loss_r is not None:
            self._val_losses.append(result.val_loss_r)

    def state(self) -> dict[str, Any]:
        """Return the state that a checkpoint stores besides the fleet's tensors."""
        self._values = [torch.cat(self._values)] if self._values else []
        return {
            "probed_steps": self._probed_steps,
            "values": self._values,
            "whole": self._val_losses,
            "faults": self.fleet.engine.faults,
            "first_bad_r": self.fleet.state.first_bad_r,
            "seconds": time.perf_counter() - self.started,
            "control": self.fleet.control.state() if self.fleet.control else None,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        probed = state["probed_steps"] if "probed_steps" in state else state["heard"]  # in older checkpoints
        self._probed_steps = [(step, self._names.setdefault(names, names), steps) for step, names, steps in probed]
        if self.fleet.control:
            self.fleet.control.restore(state["control"])
        self._values, self._val_losses = (
            [values.to(self.fleet.device) for values in state[key]] for key in ("values", "whole")
        )
        self.fleet.state.first_bad_r.copy_(state["first_bad_r"])
        self.fleet.engine.faults |= state.get("faults", {})
        self.started = time.perf_counter() - state["seconds"]

    def new_values(self) -> Iterator[tuple[int, list[dict[str, float]]]]:
        """Yield the values recorded since the last call: the step, and for each run its values by tracker tag."""
        steps, self._tracked = self._probed_steps[self._tracked :], len(self._probed_steps)
        if steps:
            counts = [len(names) for _, names, _ in steps]
            # a tensor of values covers one step or more
            values = torch.cat(self._values[-len(steps) :])[-sum(counts) :]
            for (step, names, _), values_kr in zip(steps, torch.split(values, counts), strict=True):
                tags = [tag(*name) for name in names]
                yield step, [dict(zip(tags, values_k, strict=True)) for values_k in values_kr.T.tolist()]

    def runs(self) -> list[Run]:
        """Return outcome and probe values of every run, in the fleet's order."""
        runs, seconds = self.fleet.runs, time.perf_counter() - self.started
        at_init, final = (loss_r.tolist() for loss_r in (self._val_losses[0], self._val_losses[-1]))
        values = torch.cat(self._values).T.tolist() if self._values else [[] for _ in range(runs)]
        speed = {"wall_seconds": seconds / runs, "model_steps_per_second": self._done * runs / seconds}
        updates = min(self._done, self.fleet.config.steps)  # results of a controlled fleet include what it repeated
        notes = {"notes": "; ".join(self.fleet.engine.faults.values()) or None}
        sizes = dict(
            zip(("parameters", "parameters_without_embeddings"), count_parameters(self.fleet.model), strict=True)
        )
        if self.fleet.config.adaptive:
            sizes["updates"] = updates
        logs = self.fleet.control.logs if self.fleet.control else []
        # a run that went back before its first step with a non-finite loss has none
        first_bad = [log.first_bad() for log in logs] or self.fleet.state.first_bad_r.tolist()
        return [
            Run(
                {**outcome(at_init[run], final[run], first_bad[run], updates), **sizes, **speed, **notes}
                | (logs[run].outcome() if logs else {}),
                self._rows(run, values[run]),
                logs[run].events if logs else (),
            )
            for run in range(runs)
        ]

    def _rows(self, run: int, values: Sequence[float]) -> list[Row]:
        """The probe values of a run; where it went back, only the updates that count have values."""
        keys = [key for result in self._probed_steps for key in self._keys(run, *result)]
        rows = {key: value for key, value in zip(keys, values, strict=True) if key}
        return sorted(((*key, value) for key, value in rows.items()), key=lambda row: row[0])

    def _keys(self, run: int, step: int, names: Names, steps: Steps) -> Iterator[Key | None]:
        """Step, probe and place of each value of a result; None for those that are not this run's."""
        own = step if steps is None else steps[run]
        # an adaptive run ends before the last of its steps, so only the loop knows when probes fired
        fires = steps is None or (own >= 0 and self.fleet.config.probes.fires(own, self.fleet.config.steps))
        for probe, where in names:
            # before the first update the whole held-out text counts, not the slice, as it does after the last one,
            # whose result comes at the end and replaces that of the slice
            is_slice = steps is not None and probe == "val_loss" and own == 0
            yield (own, probe, where) if fires and not is_slice else None


def outcome(loss_at_init: float, final: float, first_bad: int, steps: int) -> dict[str, Any]:
    """Judge how a run ended: it diverged if a loss was not finite, or the final loss is not below the initial one.

    Args:
        loss_at_init: held-out loss before the first update, nats per token.
        final: held-out loss after the last update, nats per token.
        first_bad: the first step with a non-finite loss, or -1.
        steps: updates in all; if only the final loss is not finite, the run diverged at this step.

    Returns:
        Columns of the run's record.
    """
    broken = first_bad >= 0 or not math.isfinite(final)
    grew = not broken and not final < loss_at_init
    return {
        "status": "diverged" if broken or grew else "finished",
        "diverged_at": (first_bad if first_bad >= 0 else steps) if broken else None,
        "reason": "loss not finite" if broken else "final loss not below the loss at initialization" if grew else None,
        "loss_at_init": loss_at_init,
        "final_val_loss": final,
    }


def failure(reason: str) -> Run:
    """The record of a run that could not be trained."""
    return Run({"status": "failed", "reason": reason.split("\n")[0]}, [])


def run_card(name: str, config: RunConfig, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """Build a row of ``runs.parquet``."""
    corpus = config.data.entry.open()
    return {
        "id": name,
        **columns(config),
        **outcome,
        "loss_bigram": corpus.loss_bigram(config.seq_len, config.validation_targets),
        "loss_unigram": corpus.loss_unigram(config.seq_len, config.validation_targets),
        "versions": f"instability-lab {version('instability-lab')}, python {platform.python_version()}, "
        f"torch {torch.__version__}, {torch.get_num_threads()} thread, fp32 products by {machine.matmul_library()}"
        + (f", {distributed.world_size()} ranks, {config.ranks}" if distributed.is_joined() else ""),
        "data_fingerprint": corpus.fingerprint,
        "data_notes": ", ".join(f"{key} {value}" for key, value in corpus.notes.items()),
    }


def fleet_label(configs: Sequence[RunConfig]) -> str:
    """Name a fleet in a few words, for the user."""
    config, rates = configs[0], sorted({config.optimizer.lr for config in configs})
    lr = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}..{rates[-1]:g}"
    switched_on = "+".join(sorted(config.intervention)) or "none"
    runs = f"{len(configs)} run{'s' * (len(configs) > 1)}"
    size = " ".join([*config.custom_model, f"width {config.model.width} depth {config.model.depth}"])
    return f"{size}  {switched_on}  lr {lr}  seed {ranges(config.seed for config in configs)}  {runs}"


def ranges(numbers: Iterable[Any]) -> str:
    """Name integers by their ranges: ``0, 1, 2, 5, 7, 8 -> 0-2,5,7,8``."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ",".join(f"{span[0]}-{span[-1]}" if len(span) > 2 else ",".join(map(str, span)) for span in spans)


def fleet_summary(runs: Sequence[Run]) -> str:
    """Sum up a fleet: the range of its final losses, and how many runs did not finish."""
    outcomes = [run.outcome for run in runs]
    finals = [o["final_val_loss"] for o in outcomes if o["status"] == "finished"]
    words = [f"val loss {min(finals):.3f}..{max(finals):.3f}"] if finals else []
    for status in ("diverged", "failed"):
        count = sum(o["status"] == status for o in outcomes)
        words += [f"{count} {status}"] if count else []
    words += sorted({o["reason"] for o in outcomes if o["status"] == "failed"})
    return ", ".join(words)
