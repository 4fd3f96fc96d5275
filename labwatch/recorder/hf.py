"""The recorder as a callback of the Trainer of Hugging Face's transformers: ``lab.hf.Recorder()``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from lab.core import distributed
from labwatch.recorder import recorder


class Recorder(TrainerCallback):
    """Records training, see ``lab.record``; the loss is the one that the model returns.

    Args:
        every: how many updates lie between two that are measured.
        out: the file, by default ``probes.jsonl`` in the folder of the trainer's outputs.
    """

    def __init__(self, every: int = 100, out: str | Path | None = None) -> None:
        self.every, self.out = every, out
        self.losses: list[Tensor] = []
        self.is_sum = False  # whether losses of micro-batches add up to that of the batch, and not their mean
        self.recorder: recorder.Recorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        out = Path(self.out or Path(args.output_dir) / "probes.jsonl")
        out.parent.mkdir(parents=True, exist_ok=True)
        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
        self.recorder = recorder.record(model, optimizer, self.every, out, first_step=state.global_step)
        self.hook = model.register_forward_hook(self._keep_loss, with_kwargs=True)

    def _keep_loss(self, _: nn.Module, __: Any, given: Any, output: Any) -> None:
        loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
        if torch.is_grad_enabled() and loss is not None:
            self.losses.append(loss.detach())
            self.is_sum = given.get("num_items_in_batch") is not None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.recorder and self.losses:
            loss = torch.stack(self.losses).sum() if self.is_sum else torch.stack(self.losses).mean()
            if self.is_sum and distributed.is_joined() and args.average_tokens_across_devices:
                loss = loss * args.world_size  # of which the recorder takes the mean
            self.recorder.step(loss)
        self.losses.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hook.remove()
        if self.recorder:
            self.recorder.close()
