"""What a GPU must give as the CPU does: eager and captured steps, one rank, company, a resumed fleet, halved memory."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import RunConfig
from lab.records import store
from lab.sweeping.job import train_resumably
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from lab.training.fleet import Fleet
from lab.training.loop import StepResult
from lab.training.recorder import Recorder
from small import configs, trained

DEVICE = "cuda"
RUNS = ("optimizer.lr=1e-3 seed=0", "optimizer.lr=1e-1 seed=1", "optimizer.lr=1e-2 seed=1 data.seed=0")
BROKEN = "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=2"
SHARED = (f"device={DEVICE}", "probes=all", "probes.every=3", "data=stdlib")
ENGINES = ["eager", "captured", pytest.param("compiled", marks=pytest.mark.slow)]
RECIPES = {
    "fp32": "",
    "bf16": "precision=bf16",
    "no qk-layernorm": "precision=bf16 intervention=[] optimizer=adamw_coupled",
    "low precision": "precision=mxfp8",
    "fp16": "precision=fp16_emulated loss_scale=torch",
    "muon": "optimizer=muon",
    "micro-batches": "batch=constant batch.micro_batch=2",
    "burst and response": "bad_batches=conflicting_labels bad_batches.start=4 response=skip_update response.start=2",
}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")


def wanted(engine: str, *others: str, runs: tuple[str, ...] = RUNS) -> list[RunConfig]:
    return configs(*runs, shared=(*SHARED, f"engine={engine}", *others))


def differing(ours: list[Any], theirs: list[Any], tolerance: float) -> list[Any]:
    """Step, probe, hook point and both values, where they differ by more than this share of the larger, plus 1e-3."""
    pairs = [(a, b) for one, other in zip(ours, theirs, strict=True) for a, b in zip(one[1], other[1], strict=True)]
    assert all(a[:3] == b[:3] for a, b in pairs)
    return [(*a, b[3]) for a, b in pairs if b[3] != pytest.approx(a[3], rel=tolerance, abs=1e-3, nan_ok=True)]


def final_losses(runs: list[Any]) -> list[float]:
    return [outcome["final_val_loss"] for outcome, _ in runs]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_captured_step_is_the_eager_one(recipe: str) -> None:
    """Step by step and probe by probe; the kernels are the same."""
    eager, captured = (trained(wanted(engine, *RECIPES[recipe].split())) for engine in ("eager", "captured"))
    assert not differing(eager, captured, tolerance=1e-3)
    assert final_losses(captured) == pytest.approx(final_losses(eager), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "tolerance"), [("fp32", 1e-4), ("bf16", 1e-2)])
def test_a_compiled_step_is_the_eager_one(recipe: str, tolerance: float) -> None:
    """To rounding, step by step and probe by probe."""
    eager, compiled = (trained(wanted(engine, *RECIPES[recipe].split())) for engine in ("eager", "compiled"))
    assert not differing(eager, compiled, tolerance=5 * tolerance)
    assert final_losses(compiled) == pytest.approx(final_losses(eager), rel=tolerance)


def test_a_run_is_that_of_the_cpu() -> None:
    of_gpu = trained(wanted("eager"))
    of_cpu = trained([replace(config, device="cpu") for config in wanted("eager")])
    assert not differing(of_gpu, of_cpu, tolerance=0.02)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_seed_gives_the_same_bits(engine: str, precision: str) -> None:
    ours, again = (trained(wanted(engine, f"precision={precision}")) for _ in range(2))
    assert repr(ours) == repr(again)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_breaks_changes_no_bit_of_its_neighbours(engine: str) -> None:
    good = trained(wanted(engine, runs=(*RUNS, RUNS[0])))
    beside = trained(wanted(engine, runs=(*RUNS, BROKEN)))
    assert repr(good[:3]) == repr(beside[:3])
    assert beside[3][0]["diverged_at"] is not None


@pytest.mark.parametrize("engine", ENGINES)
def test_a_fleet_goes_on_from_its_checkpoint_to_the_same_bits(engine: str, tmp_path: Path) -> None:
    def finish(folder: Path, cut_after: int) -> list[Any]:
        keeper = Checkpointer(folder, ["a", "b", "c"], CheckpointConfig(steps=4, minutes=0.0, keep=2))
        tape, results = Recorder(Fleet(wanted(engine))), list[StepResult]()
        if train_resumably(tape, keeper, results.append, print, lambda: len(results) > cut_after):
            assert results[-1].is_last
        return [(outcome["final_val_loss"], rows) for outcome, rows, _ in tape.runs()]

    whole = finish(tmp_path / "alone", cut_after=99)
    finish(tmp_path, cut_after=6)
    assert repr(finish(tmp_path, cut_after=99)) == repr(whole)


def test_memory_that_gives_out_halves_a_fleet(tmp_path: Path) -> None:
    """Memory for about five of eight runs: the command trains all of them, and notes it."""
    shape = ("model.width=256", "model.depth=2", "batch_size=64", "seq_len=256", "steps=3", "probes=none")
    config = configs("", shared=(*SHARED, *shape))[0]
    torch.cuda.reset_peak_memory_stats()
    trained([config])
    of_one = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    share = 5 * of_one / torch.cuda.get_device_properties(0).total_memory
    program = (
        f"import sys, torch; torch.cuda.set_per_process_memory_fraction({share}); sys.path.insert(0, 'tests');"
        "from pathlib import Path; from lab.records import plans; from lab.sweeping import job;"
        "from lab.sweeping.planner import points; from small import tree;"
        f"fleet = points([tree(*{(*SHARED, *shape)!r}, f'seed={{seed}}') for seed in range(8)]);"
        "frozen = [[{'id': point.id, 'tree': point.tree} for point in fleet]];"
        f"folder = Path({str(tmp_path)!r}); job.train_fleet(folder, plans.freeze(folder, frozen), 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
    runs = store.read(tmp_path).runs
    assert runs["status"].tolist() == ["finished"] * 8
    assert runs["notes"].str.contains("out of memory in fleets of 8").all()


def test_one_rank_is_one_process(tmp_path: Path) -> None:
    """By NCCL, under torchrun."""
    keys = ["device=cuda", "engine=eager", "steps=6", "model.width=16", "model.head_width=8"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "lab", "train"]
    subprocess.run([*torchrun, *keys, f"out={tmp_path / 'rank'}"], check=True, timeout=300)
    subprocess.run([sys.executable, "-m", "lab", "train", *keys, f"out={tmp_path / 'plain'}"], check=True, timeout=300)
    of_rank, plain = (store.read(tmp_path / name).runs["final_val_loss"][0] for name in ("rank", "plain"))
    assert of_rank == pytest.approx(plain, rel=1e-5)
