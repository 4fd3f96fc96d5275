"""One step of a fleet, as `lab sweep` takes it, and the matrix products of such a step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from shapes import BATCH, HEAD_WIDTH, LENGTH, VOCABULARY, depth

from lab.core import machine
from lab.core.shipped import data_folder
from lab.training.building import FORMATS
from lab.training.config import run_config
from lab.training.fleet import Fleet
from lab.training.loop import StepResult, train
from lab.training.recorder import Recorder


def loop(width: int, *overrides: str, runs: int) -> Callable[[], int]:
    """Build a step of the whole fleet: batch, update, probes when they fire, recording; it returns model-steps."""
    machine.configure_torch()
    shape = [f"seq_len={LENGTH}", f"batch_size={BATCH}", f"model.width={width}", f"model.head_width={HEAD_WIDTH}"]
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        overrides_of_all = [*shape, f"model.depth={depth(width)}", "steps=100000", *overrides]
        tree: Any = OmegaConf.to_container(compose("config", overrides_of_all), resolve=True)
    del tree["fleet"]
    # one data seed for all runs, as in a sweep over learning rates and as on the other sides
    trees = [{**tree, "optimizer": tree["optimizer"] | {"lr": 1e-3 / (run + 1)}} for run in range(runs)]
    recorder = Recorder(Fleet([run_config(tree) for tree in trees]))
    results: Iterator[StepResult] = train(recorder.fleet)
    recorder.keep(next(results))

    def step() -> int:
        recorder.keep(next(results))
        return runs

    return step


def shapes_of_products(width: int, runs: int) -> list[tuple[int, int, int, int]]:
    """Return the shapes (r, n, i, o) of a step's forward products ``[r n i] @ [r i o]``."""
    tokens, pairs = BATCH * LENGTH, runs * BATCH * width // HEAD_WIDTH
    linear = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    shapes = [(runs, tokens, *sizes) for sizes in [*linear * depth(width), (width, VOCABULARY)]]
    return shapes + [(pairs, LENGTH, HEAD_WIDTH, LENGTH), (pairs, LENGTH, LENGTH, HEAD_WIDTH)] * depth(width)


def products(width: int, precision: str, runs: int) -> Callable[[], int]:
    """Build a step of a fleet's matrix products alone, forward and backward: no engine can be faster.

    A CPU without fast products of bf16 multiplies in fp32, as the lab does there.
    """
    machine.configure_torch()
    shapes = shapes_of_products(width, runs)
    operands = (FORMATS[precision] if machine.multiplies_bf16() else None) or torch.float32
    matrices = {shape: [torch.randn(s, dtype=operands) for s in _operands(*shape)] for shape in set(shapes)}

    def step() -> int:
        for shape in shapes:
            a_rni, b_rio, c_rno = matrices[shape]
            torch.bmm(a_rni, b_rio)
            torch.bmm(c_rno, b_rio.transpose(1, 2))
            torch.bmm(a_rni.transpose(1, 2), c_rno)
        return runs

    return step


def floor_of_step(width: int, runs: int) -> tuple[float, float]:
    """Count the floating-point operations of a step, and the bytes that it moves at least.

    Each product is computed once forward and twice backward, and reads and writes bf16.  Of each weight, in fp32,
    value, gradient and two moments are read and three are written.  Elementwise operations count no further bytes.
    """
    shapes = shapes_of_products(width, runs)
    flops = sum(6.0 * r * n * i * o for r, n, i, o in shapes)
    weights = runs * (12 * depth(width) * width**2 + 2 * VOCABULARY * width)
    return flops, sum(6.0 * r * (n * i + i * o + n * o) for r, n, i, o in shapes) + 28.0 * weights


def _operands(r: int, n: int, i: int, o: int) -> tuple[tuple[int, int, int], ...]:
    return (r, n, i), (r, i, o), (r, n, o)
