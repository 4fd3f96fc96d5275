"""Two processes that share a fleet say what one process says, to 1e-5, and go on from one another's checkpoints."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import on_ranks
from lab.core import distributed, files, machine
from lab.core.errors import RequestError
from lab.records import store
from lab.training.building import check_ranks
from small import configs

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}

# One process trains what the others compare with, and has processes to fork from.
pytestmark = pytest.mark.xdist_group("sweeping")

ROUNDING = 2**-24  # of float32


def differing(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[str]:
    """Names of the values that are not equal to 1e-5, or of which rounding alone could not make the difference."""
    assert [set(run) for run in ours] == [set(run) for run in theirs]

    def equal(one: Any, other: Any, rounding: float) -> bool:
        if isinstance(one, float) and isinstance(other, float) and not math.isnan(one):
            return math.isclose(one, other, rel_tol=1e-5, abs_tol=rounding)
        return repr(one) == repr(other)

    return [
        name
        for a, b in zip(ours, theirs, strict=True)
        for name in a
        if not equal(a[name], b[name], rounding(name, a["parameters"]))
    ]


def rounding(name: str, parameters: int) -> float:
    """By how much rounding may change a value that is small: a difference of weights, or a cosine near 0.

    A dot product of n terms is off by at most n roundings of the product of the norms, and so is a cosine. Each update
    rounds the weights.
    """
    if " grad_lag_cosine " in name:
        return parameters * ROUNDING
    return on_ranks.STEPS * ROUNDING if " distance_from_init " in name else 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Values of a fleet of one and of three runs in this process; it leaves a checkpoint of the three."""
    return {1: on_ranks.trained(folder, 1), 3: on_ranks.trained(folder, 3, halfway="one process")}


def by_two(folder: Path) -> Any:
    """What two ranks of torchrun found of all fleets."""
    words = [*TORCHRUN, str(HERE / "on_ranks.py"), str(folder)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def meeting_at(port: int) -> dict[str, str]:
    """Environment of two ranks."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**where, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def as_rank_of_two(rank: int, port: int, folder: Path) -> None:
    """Be one of two ranks, in a process of its own."""
    os.environ |= {**meeting_at(port), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    on_ranks.main(folder, "--one-run")
    os._exit(0)  # as lab does


def by_two_forks(folder: Path) -> Any:
    """What two ranks found of one run, without the time that torchrun and its processes take to load torch."""
    processes: Any = machine.clean_process_context()
    port = unused_port()
    pair = [processes.Process(target=as_rank_of_two, args=(rank, port, folder)) for rank in (0, 1)]
    for process in pair:
        process.start()
    for process in pair:
        process.join()
    assert [process.exitcode for process in pair] == [0, 0]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(folder: Path, alone: dict[int, list[dict[str, Any]]]) -> Any:
    return by_two(folder)


def test_a_run_of_two_processes_is_that_of_one(tmp_path: Path) -> None:
    found, alone = by_two_forks(tmp_path), on_ranks.trained(tmp_path, 1)
    assert differing(found["fsdp 1"], alone) == []
    assert len(alone[0]) > 300


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
@pytest.mark.parametrize("runs", [1, 3])
def test_losses_norms_and_probes_are_those_of_one_process(how: str, runs: int, found: Any, alone: Any) -> None:
    assert differing(found[f"{how} {runs}"], alone[runs]) == []
    assert len(alone[runs][0]) > 300
    assert [run["status"] for run in alone[runs]] == ["finished", "finished", "diverged"][:runs]
    norms = [value for name, value in alone[1][0].items() if " grad_norm " in name]
    assert min(norms) > 0.1  # so that clipping acts


@pytest.mark.slow
def test_micro_batches_and_their_noise_are_those_of_one_process(found: Any) -> None:
    alone = on_ranks.trained_in_parts()
    for how in ("ddp", "fsdp"):
        assert differing(found[f"{how} in parts"], alone) == [], how
    noise = [value for name, value in alone[0].items() if " noise_scale trace" in name]
    assert math.isfinite(noise[-1])
    assert noise[-1] > 0


@pytest.mark.slow
def test_other_optimizers_take_the_steps_of_one_process(found: Any) -> None:
    alone = on_ranks.losses_by("ddp")
    for how, losses in found["optimizers"].items():
        assert len(losses) >= 5
        for name, loss_r in losses.items():
            assert loss_r == pytest.approx(alone[name], rel=1e-5), (how, name)


@pytest.mark.slow
def test_fsdp_leaves_each_rank_its_half_of_the_weights(found: Any) -> None:
    assert found["held"] == 0.5
    assert found["held, cut along runs"] == 1  # a run alone would be all on the first rank


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp resumed", "fsdp resumed", "ddp resumed as fsdp"])
def test_ranks_go_on_from_one_process_and_from_one_another(name: str, found: Any, alone: Any) -> None:
    assert differing(found[name], alone[3]) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_one_process_goes_on_from_two_ranks(how: str, folder: Path, found: Any, alone: Any) -> None:
    assert differing(on_ranks.trained(folder, 3, resumed=f"{how} 3"), alone[3]) == []
    kept = folder / f"checkpoints/{files.digest([f'{how} 1'])}/{on_ranks.HALF}"
    for name in ("__1_0.distcp", ".metadata", "rest.pt"):
        whole = (kept / name).read_bytes()
        middle = slice(len(whole) // 2, len(whole) // 2 + 100)  # longer than what is only there to fill
        turned = whole[: middle.start] + bytes(byte ^ 1 for byte in whole[middle]) + whole[middle.stop :]
        for damaged in (whole[:-9], turned):
            (kept / name).write_bytes(damaged)
            with pytest.raises(AssertionError):
                on_ranks.trained(folder, 1, resumed=f"{how} 1")
        (kept / name).write_bytes(whole)
    assert on_ranks.trained(folder, 1, resumed=f"{how} 1")


def as_rank(monkeypatch: pytest.MonkeyPatch, place: int, count: int) -> None:
    for name, value in (("RANK", place), ("LOCAL_RANK", place), ("WORLD_SIZE", count), ("LOCAL_WORLD_SIZE", count)):
        monkeypatch.setenv(name, str(value))


def test_what_ranks_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config, sharded = configs("", "ranks=fsdp", shared=("batch_size=6",))
    check_ranks(config)
    (in_parts,) = configs("", shared=("batch_size=8", "batch=constant", "batch.micro_batch=2"))
    as_rank(monkeypatch, 1, 4)
    with pytest.raises(RequestError, match="batch_size 6 cannot be shared by 4 ranks"):
        check_ranks(config)
    with pytest.raises(RequestError, match=r"batch\.micro_batch 2 cannot be shared by 4 ranks"):
        check_ranks(in_parts)
    as_rank(monkeypatch, 2, 3)
    assert distributed.batch_rows(6) == slice(4, 6)
    check_ranks(config)
    (curved,) = configs("", shared=("batch_size=6", "probes.names=[grad_lag_cosine,update_curvature]"))
    with pytest.raises(RequestError, match="probe update_curvature measures in one process; leave it out, or start"):
        check_ranks(curved)
    with pytest.raises(RequestError, match="3 ranks cannot share embedding, 256 long; say ranks=ddp"):
        check_ranks(sharded)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RequestError, match="3 ranks on a machine with 2 CUDA devices"):
        distributed.rank_device("cuda")
    with pytest.raises(RequestError, match="device=mps takes one process"):
        distributed.rank_device("mps")


TRAIN = [
    "train",
    "data=synthetic",
    "validation=short",
    "model.width=16",
    "steps=100",
    "device=cpu",
    "probes.every=50",
    "checkpoint.steps=20",
]


def two(folder: Path, *words: str) -> list[subprocess.Popen[str]]:
    """The command line as two ranks, without torchrun, so that each has an exit code of its own."""
    meeting = {**ENVIRONMENT, **meeting_at(unused_port())}
    command = [sys.executable, "-m", "lab", *TRAIN, f"out={folder}", *words]
    return [
        subprocess.Popen(
            command,
            env={**meeting, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]


def ended(pair: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    said = [rank.communicate(timeout=120) for rank in pair]
    return [(rank.returncode, *words) for rank, words in zip(pair, said, strict=True)]


@pytest.mark.slow
def test_a_refusal_is_one_line_of_the_first_rank(tmp_path: Path) -> None:
    (code, out, error), other = ended(two(tmp_path, "batch_size=3"))
    assert (code, out) == (2, "")
    assert error == "lab: batch_size 3 cannot be shared by 2 ranks; give a multiple of 2\n"
    assert other == (0, "", "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_ranks_told_to_stop_keep_and_exit_75_and_torchrun_goes_on(tmp_path: Path) -> None:
    pair = two(tmp_path, "ranks=fsdp")
    while not list(tmp_path.glob("checkpoints/*/[0-9]*")) and pair[0].poll() is None:
        time.sleep(0.01)
    for rank in pair:
        rank.send_signal(signal.SIGTERM)
    first, other = ended(pair)
    assert first[0] == other[0] == 75, first[2] + other[2]
    assert first[2] == "lab: preempted; the same command resumes from the checkpoint\n"
    assert other[1:] == ("", "")
    words = [*TORCHRUN, "-m", "lab", *TRAIN, f"out={tmp_path}"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1 trained, 0 already there") == 1
    assert "is not used" not in done.stderr
    (versions,) = store.read(tmp_path).runs["versions"]
    assert versions.endswith("2 ranks, ddp")
    assert not list((tmp_path / "checkpoints").iterdir())
