"""What a recorder costs on a CPU, side by side with training without one: ``python benchmarks/recorder.py [ROUNDS]``.

``python benchmarks/recorder.py sizes`` prints what norms of weights and gradients at every step (``on_spike=True``) add
to it: the time of the processor that they take inside a step, as a share of the rest of it.

A model of width 512 and 24 blocks is trained with AdamW. In each round one step is plain and one is recorded, in an
order that changes from round to round, so that other load on the machine meets both. Medians over rounds, and what
recording every 100 steps adds to a step, go into the page.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lab

PAGE = Path(__file__).parents[1] / "docs" / "record_your_run.md"
MARKS = ("<!-- recorder cost -->", "<!-- end of recorder cost -->")
WIDTH, BLOCKS, HEAD_WIDTH, VOCABULARY, ROWS, LENGTH = 512, 24, 64, 4096, 4, 128
EVERY = 100
SIZES_STEPS = 9
IDLE_CALLS = 1000  # of the recorder at steps that it does not record


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block(width) for _ in range(blocks)), nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def step_of(after: Callable[[Tensor], Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Seconds of a step of training, with what is called after the backward pass or the update."""
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1))
    started = time.perf_counter()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    after(loss)
    return time.perf_counter() - started


def sizes() -> None:
    """Print what norms at every step cost, for some shapes."""
    torch.set_num_threads(1)
    for width, blocks, rows in ((512, 6, 4), (512, 6, 1)):
        model = Model(width, blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        shares = list[float]()
        for _ in range(SIZES_STEPS):
            tokens = torch.randint(VOCABULARY, (rows, LENGTH + 1))
            started = time.process_time()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            before = time.process_time()
            weights = [weight for weight in model.parameters() if weight.grad is not None]
            torch.stack(torch._foreach_norm([*weights, *(w.grad for w in weights if w.grad is not None)]))
            after = time.process_time()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            shares.append((after - before) / (time.process_time() - after + before - started))
        parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
        print(f"{parameters:.1f}M parameters, {rows * LENGTH} tokens: {median(shares):.2%}")


def main(rounds: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with several, each small operation would wait for the other load on a machine
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    with TemporaryDirectory() as folder:
        step_of(lambda _: None, model, optimizer)  # makes the moments
        for number in range(rounds):
            for kind in sorted(seconds, reverse=bool(number % 2)):
                recorder = (
                    lab.record(model, optimizer, 1, Path(folder) / "probes.jsonl") if kind == "recorded" else None
                )
                seconds[kind].append(step_of(recorder.step if recorder else lambda _: None, model, optimizer))
                if recorder:
                    recorder.close()
        waiting = lab.record(model, optimizer, 10**9, Path(folder) / "waiting.jsonl", first_step=1)
        loss = torch.ones(())
        started = time.perf_counter()
        for _ in range(IDLE_CALLS):
            waiting.step(loss)
        idle = (time.perf_counter() - started) / IDLE_CALLS
    plain, recorded = median(seconds["plain"]), median(seconds["recorded"])
    share = ((recorded - plain) / EVERY + idle) / plain
    parameters = sum(weight.numel() for weight in model.parameters()) / 1e6
    lines = [
        f"On one core, for width {WIDTH} and {BLOCKS} blocks ({parameters:.0f}M parameters), a step of {ROWS * LENGTH} "
        f"tokens took {plain:.1f} s, and {recorded:.1f} s where it was recorded (medians of {rounds} rounds, "
        f"interleaved, on a machine with other load). At other steps `recorder.step` took {idle * 1e6:.0f} "
        f"microseconds. So recording every {EVERY} steps adds {share:.2%} to a step."
    ]
    text = fill(" ".join(lines), 120)
    print(text)
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["sizes"]:
        sizes()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
