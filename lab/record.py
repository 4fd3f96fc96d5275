"""What a fleet leaves behind: one card and one list of probe values per run, in plain Python numbers."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lab import __version__, machine
from lab.config import RunConfig, columns
from lab.fleet import Fleet
from lab.trackers import tag
from lab.train import Moment

Row = tuple[int, str, str, float]
Run = tuple[Mapping[str, Any], Sequence[Row]]


class Tape:
    """Keeps the moments of a fleet on its device, and unrolls them run by run at the end."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet, self.started = fleet, time.perf_counter()
        self._keys: list[tuple[int, str, str]] = []
        self._values: list[torch.Tensor] = []
        self._whole: list[torch.Tensor] = []

    def keep(self, moment: Moment) -> None:
        """Take down what was heard; nothing is copied off the device yet."""
        if moment.heard:
            self._keys += [(moment.step, probe, where) for probe, where in moment.heard]
            self._values.append(torch.stack([value_r.to(self.fleet.shape_sr) for value_r in moment.heard.values()]))
        if moment.val_loss_r is not None:
            self._whole.append(moment.val_loss_r)

    def latest(self) -> list[dict[str, float]]:
        """What was heard last, run by run, under the names trackers use; one copy off the device."""
        heard_kr = self._values[-1]
        tags = [tag(probe, where) for _, probe, where in self._keys[-len(heard_kr) :]]
        return [dict(zip(tags, values, strict=True)) for values in heard_kr.T.tolist()]

    def runs(self) -> list[Run]:
        """Outcome and probe values of every run, in the fleet's order."""
        runs, seconds = self.fleet.runs, time.perf_counter() - self.started
        at_init, final = (loss_r.tolist() for loss_r in (self._whole[0], self._whole[-1]))
        values = torch.cat(self._values).T.tolist() if self._values else [[] for _ in range(runs)]
        speed = {"wall_seconds": seconds / runs, "model_steps_per_second": self.fleet.config.steps * runs / seconds}
        sizes = dict(zip(("parameters", "parameters_without_embeddings"), self.fleet.parameters(), strict=True))
        return [
            (
                {**outcome(at_init[run], final[run], first_bad, self.fleet.config.steps), **sizes, **speed},
                [(*key, value) for key, value in zip(self._keys, values[run], strict=True)],
            )
            for run, first_bad in enumerate(self.fleet.first_bad_r.tolist())
        ]


def outcome(loss_at_init: float, final: float, first_bad: int, steps: int) -> dict[str, Any]:
    """How a run ended.  It diverged if it went non-finite, or did not end below where it began; nothing else counts.

    ``first_bad`` is the first step with a non-finite loss, -1 for none; a run whose last update broke it went bad at
    ``steps``.
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


def card(name: str, config: RunConfig, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """A row of ``runs.parquet``."""
    corpus = config.data.entry.open()
    return {
        "id": name,
        **columns(config),
        **outcome,
        "loss_bigram": corpus.loss_bigram(config.seq_len),
        "versions": f"instability-lab {__version__}, python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread, fp32 products by {machine.products()}",
        "data_fingerprint": corpus.fingerprint,
        "data_notes": ", ".join(f"{key} {value}" for key, value in corpus.notes.items()),
    }


def label(configs: Sequence[RunConfig]) -> str:
    """A fleet in a few words."""
    config, rates = configs[0], sorted({config.optimizer.lr for config in configs})
    lr = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g}..{rates[-1]:g}"
    switched_on = "+".join(sorted(config.intervention)) or "none"
    seeds = ",".join(str(seed) for seed in sorted({config.seed for config in configs}))
    runs = f"{len(configs)} run{'s' * (len(configs) > 1)}"
    return f"width {config.model.width} depth {config.model.depth}  {switched_on}  lr {lr}  seed {seeds}  {runs}"


def verdict(runs: Sequence[Run]) -> str:
    """A fleet's end in a few words: the range of final losses, and how many runs did not finish."""
    outcomes = [outcome for outcome, _ in runs]
    finals = [o["final_val_loss"] for o in outcomes if o["status"] == "finished"]
    words = [f"val loss {min(finals):.3f}..{max(finals):.3f}"] if finals else []
    for status in ("diverged", "failed"):
        count = sum(o["status"] == status for o in outcomes)
        words += [f"{count} {status}"] if count else []
    words += sorted({o["reason"] for o in outcomes if o["status"] == "failed"})
    return ", ".join(words)
