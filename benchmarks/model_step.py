"""Milliseconds per model-step: the lab's fleets beside the plain loop a user would otherwise write.

    python benchmarks/model_step.py [WIDTH ...]

Both train the same points (batch 16 x 64 bytes, qk-layernorm, z-loss, clip 1, AdamW, fp32; two blocks up to width 64,
four above) with every core at their disposal: the plain loop one model at a time at its best thread count, the lab one
single-threaded process per core with eight runs each, probes at their default interval.  Rounds alternate, so that what
else the machine does hits both; wall time is divided by all model-steps done.  Ratios are of medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

ROUNDS, SECONDS, RUNS = 7, 2.0, 8
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def plain(width: int, threads: int) -> Callable[[], int]:
    """One step of the plain loop: nn.Module, scaled_dot_product_attention, fused AdamW."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    from lab.data.text import StandardLibrary

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = (nn.LayerNorm(width, eps=1e-6, bias=False) for _ in range(2))
            self.norm_q, self.norm_k = (nn.LayerNorm(16, eps=1e-6, bias=False) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            def rotate(y: torch.Tensor) -> torch.Tensor:
                a, b = y.chunk(2, -1)
                return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

            q, k, v = (y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in self.qkv(self.norm_1(x)).chunk(3, -1))
            q, k = rotate(self.norm_q(q)), rotate(self.norm_k(k))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(depth(width)))
            self.norm = nn.LayerNorm(width, eps=1e-6, bias=False)
            angle = torch.outer(torch.arange(64.0), 10_000 ** (-torch.arange(0, 16, 2) / 16))
            self.cos, self.sin = angle.cos(), angle.sin()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = block(x, self.cos, self.sin)
            return self.head(self.norm(x))

    torch.set_num_threads(threads)
    model, corpus, seen = Model(), StandardLibrary(seed=0).open(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> int:
        nonlocal seen
        tokens = torch.from_numpy(corpus.batch(0, seen, 16, 64))
        seen += 1
        logits = model(tokens[:, :-1])
        loss = (
            F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 1e-4 * logits.logsumexp(-1).square().mean()
        )
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return 1

    return step


def fleet(width: int) -> Callable[[], int]:
    """One step of a fleet, the probes listening when they should."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from lab import machine
    from lab.app import data_folder
    from lab.config import run_config
    from lab.fleet import Fleet
    from lab.hooks import listening
    from lab.probes.probe import Listener

    machine.settle()
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        composed = compose(
            "config", ["seq_len=64", "steps=100000", f"model.width={width}", f"model.depth={depth(width)}"]
        )
    tree = OmegaConf.to_container(composed, resolve=True)
    assert isinstance(tree, dict)
    del tree["fleet"]
    trees = [{**tree, "seed": seed} for seed in range(RUNS)]
    runs, seen = Fleet([run_config(one) for one in trees]), 0  # type: ignore[arg-type]

    def step() -> int:
        nonlocal seen
        fires = runs.config.probes.fires(seen, runs.config.steps)
        with listening(Listener(runs.config.probes.names if fires else ())):
            runs.step(seen)
        seen += 1
        return RUNS

    return step


def depth(width: int) -> int:
    """Blocks at a width."""
    return 2 if width <= 64 else 4


def serve(kind: str, width: int, threads: int) -> None:
    """A worker: for every line read, step for a while and say how many model-steps were done."""
    step = plain(width, threads) if kind == "plain" else fleet(width)
    for _ in range(3):
        step()
    print("ready", flush=True)
    for _ in sys.stdin:
        done, until = 0, time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            done += step()
        print(done, flush=True)


class Side:
    """Workers of one kind that run at the same time."""

    def __init__(self, kind: str, width: int, workers: int, threads: int) -> None:
        words = [sys.executable, __file__, "--serve", kind, str(width), str(threads)]
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        pipe = subprocess.PIPE
        self.workers = [
            subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment) for _ in range(workers)
        ]
        for worker in self.workers:
            assert worker.stdout is not None
            worker.stdout.readline()

    def milliseconds(self) -> float:
        """Wall time over all model-steps done, every worker busy."""
        started = time.perf_counter()
        for worker in self.workers:
            assert worker.stdin is not None
            print(file=worker.stdin, flush=True)
        done = sum(int(worker.stdout.readline()) for worker in self.workers if worker.stdout)
        return (time.perf_counter() - started) / done * 1e3

    def close(self) -> None:
        """Let the workers go."""
        for worker in self.workers:
            worker.kill()
            worker.wait()


def compare(width: int) -> Iterator[str]:
    """Rows of the table for one width."""
    threads = sorted({1, CORES})
    sides = {f"plain loop, {count} thread{'s' * (count > 1)}": Side("plain", width, 1, count) for count in threads}
    sides[f"lab, {CORES} processes of {RUNS} runs"] = Side("lab", width, CORES, 1)
    timings: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            timings[name].append(side.milliseconds())
    for side in sides.values():
        side.close()
    best = min(statistics.median(times) for name, times in timings.items() if name.startswith("plain"))
    for name, times in timings.items():
        median = statistics.median(times)
        spread = f"{min(times):.2f}..{max(times):.2f}"
        yield f"| {width} x {depth(width)} | {name} | {median:.2f} | {spread} | {best / median:.2f} |"


def main() -> None:
    """Print the table."""
    print("| width x blocks | | ms per model-step | range | speed, best plain loop = 1 |\n|---|---|---|---|---|")
    for width in [int(word) for word in sys.argv[1:]] or [32, 64, 128]:
        for row in compare(width):
            print(row, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()
