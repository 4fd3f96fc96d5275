"""The recorder as a callback of the Trainer of Lightning: ``lab.lightning.Recorder()``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from labwatch.recorder import recorder


class Recorder(Callback):
    """Records training, see ``lab.record``; the loss is what ``training_step`` returns.

    Args:
        every: how many updates lie between two that are measured.
        out: the file, by default ``probes.jsonl`` in the folder of the trainer's logs.
    """

    def __init__(self, every: int = 100, out: str | Path | None = None) -> None:
        self.every, self.out = every, out
        self.losses: list[Tensor] = []  # of the micro-batches since the last update
        self.recorder: recorder.Recorder | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        out = Path(self.out or Path(trainer.log_dir or trainer.default_root_dir) / "probes.jsonl")
        out.parent.mkdir(parents=True, exist_ok=True)
        self.made = trainer.global_step
        self.recorder = recorder.record(
            trainer.model, trainer.optimizers, self.every, out, first_step=self.made, scaler=_scaler(trainer)
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(loss.detach() * trainer.accumulate_grad_batches)  # which Lightning has divided by it
        if self.recorder and trainer.global_step > self.made:
            self.made = trainer.global_step
            self.recorder.step(torch.stack(self.losses).mean())
            self.losses.clear()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.recorder:
            self.recorder.close()


def _scaler(trainer: Any) -> Any:
    """The loss scaler of training in fp16; None without one."""
    return getattr(trainer.precision_plugin, "scaler", None)
