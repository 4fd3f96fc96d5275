"""What a request would cost: time and memory from trials, fleets packed to memory, and what is said of it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lab import Fleet
from lab.core import machine
from lab.core.errors import RequestError
from lab.records import plans
from lab.sweeping import dry_run, job
from lab.sweeping.capacity import ENOUGH_ON_CPU, Host, bytes_asked, bytes_per_run, check_fits, measure_host, most_runs
from lab.sweeping.dry_run import Cost, try_fleet
from lab.sweeping.planner import Point, points
from lab.training.evaluation import PASS_TOKENS, VALIDATION_TOKENS, Evaluation
from lab.training.loop import train
from small import configs, tree

GIGABYTE = 1e9


@pytest.mark.parametrize(
    ("seconds", "processes", "end"),
    [([3, 1, 1, 1], 2, 3), ([1, 1, 3], 2, 4), ([2, 2, 2], 1, 6), ([5], 4, 5), ([], 2, 0)],
)
def test_a_sweep_ends_with_its_last_fleet(seconds: list[float], processes: int, end: float) -> None:
    assert dry_run.makespan(seconds, processes) == end


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[], float]:
    """Steps, probes and looks that take no time but on a clock of ours."""
    now = [0.0]

    def step(fleet: Fleet, step: int) -> dict[tuple[str, str], torch.Tensor]:
        now[0] += 0.3 * fleet.runs
        if not fleet.config.probes.fires(step, fleet.config.steps):
            return {}
        now[0] += 0.5
        return {("train_loss", ""): torch.zeros(fleet.runs)}

    def loss(evaluation: Evaluation, *, whole: bool, indices: Sequence[int] | None = None) -> torch.Tensor:
        tokens = evaluation.held_out_nt[:, 1:].numel() if whole else VALIDATION_TOKENS
        runs = len(evaluation.seeds if indices is None else indices)
        now[0] += 1e-4 * tokens * runs
        return torch.zeros(runs)

    monkeypatch.setattr(Fleet, "step", step)
    monkeypatch.setattr(Evaluation, "loss", loss)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return lambda: now[0]


@pytest.mark.parametrize("shared", ["steps=40 probes.every=5", "steps=1"])
def test_time_is_made_of_all_that_training_does(shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = configs("seed=0", "seed=0 optimizer.lr=1", "seed=1", shared=tuple(shared.split()))
    clock = fake_clock(monkeypatch)
    expected = dry_run._run_trial(wanted)[0].seconds
    began = clock()
    for _ in train(Fleet(wanted)):
        pass
    assert expected == pytest.approx(clock() - began, rel=1e-3)


def allocated_at_most(work: Callable[[], object]) -> int:
    """Bytes of tensors that were there at once, of those that ``work`` made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]  # type: ignore[union-attr]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param("model.width=64 seq_len=128 batch_size=8", marks=pytest.mark.slow),
        "model.width=64 seq_len=128 batch_size=24 batch=constant batch.micro_batch=8",
    ],
)
def test_tensors_take_what_was_counted(shape: str) -> None:
    def taken(runs: int) -> int:
        fleet = Fleet(configs(*["seed=0"] * runs, shared=shape.split()))
        windows = PASS_TOKENS // fleet.config.seq_len  # of a single pass
        fleet.evaluation.held_out_nt = fleet.evaluation.held_out_nt[:windows]
        fleet.step(0)
        passing = (lambda: fleet.step(1), lambda: fleet.evaluation.loss(whole=True))
        kept = [*fleet.tensors().values(), *(fleet.state.sums.gradients.values() if fleet.state.sums else ())]
        return sum(tensor.nbytes for tensor in kept) + max(map(allocated_at_most, passing))

    asked = bytes_asked(configs("seed=0", shared=shape.split())[0])
    assert asked / 1.3 < (taken(3) - taken(1)) / 2 < asked


@pytest.mark.slow
@pytest.mark.skipif(torch.backends.mps.is_available(), reason="that device is here")
def test_a_device_that_is_not_here_is_said_to_be_the_trouble() -> None:
    with pytest.raises(RequestError, match="cannot be tried here: device=mps is not available"):
        try_fleet(points([tree("device=mps")]), [None])


def take(folder: Path, plan: str, answer: Connection) -> None:
    """What a launcher's process does with a fleet, and what it took."""
    machine.configure_process()
    job.train_fleet(folder, plan, 0)
    answer.send(machine.peak_memory())


@pytest.mark.slow
def test_a_job_takes_the_memory_its_trial_took(tmp_path: Path) -> None:
    fleet = points([tree("model.width=64", "batch_size=64", "steps=3", f"seed={seed}") for seed in range(4)])
    plan = plans.freeze(tmp_path, [[{"id": point.id, "tree": point.tree} for point in fleet]])
    processes = machine.clean_process_context()
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=take, args=(tmp_path, plan, theirs))  # type: ignore[attr-defined]
    process.start()
    theirs.close()
    taken = ours.recv()
    process.join()
    tried = try_fleet(fleet, [None])
    assert tried
    assert tried.own + tried.shared == pytest.approx(taken, rel=0.3)
    assert tried.own > 2.5 * bytes_per_run(fleet[0].config)  # the twin that must differ: not of an empty process


@pytest.mark.xdist_group("sweeping")
def test_a_run_that_no_memory_holds_is_refused_after_its_trial() -> None:
    asked = points([tree("model.width=1048576", "model.head_width=1024")])
    with pytest.raises(RequestError, match="too large for the free memory: width 1048576 depth 2"):
        next(dry_run.estimate([asked], 0, Host()))


def test_of_a_fleet_that_no_memory_holds_a_half_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, tried = points([tree(f"seed={seed}") for seed in range(4)]), list[int]()

    def attempt(fleet: Sequence[Point], slots: Sequence[str | None], register: object) -> Cost | None:
        tried.append(len(fleet))
        return Cost(60.0, 0.0, GIGABYTE, GIGABYTE) if len(fleet) == 1 else None

    monkeypatch.setattr(dry_run, "try_fleet", attempt)
    told = list(dry_run.estimate([asked], 0, Host()))
    assert tried == [4, 2, 1]
    assert "about 4.0 min one fleet after another" in told[-1]


@pytest.mark.parametrize(
    ("huge", "choice"),
    [
        ("batch_size=10000000", r"batch_size=\d+ would fit"),
        ("seq_len=3000000", r"seq_len=\d+ would fit"),
        ("model.depth=1000000000", "a smaller model may fit"),
    ],
)
def test_a_run_that_cannot_fit_is_refused_with_a_choice_that_does(huge: str, choice: str) -> None:
    key, _, value = huge.partition("=")
    [config] = configs(huge)
    with pytest.raises(RequestError, match=f"{key}={value}.* take at least .* GB are free; {choice}") as refusal:
        check_fits(config, Host("cpu", [None, None], 8 * GIGABYTE, 16 * GIGABYTE))
    if "would fit" in choice:
        check_fits(*configs(str(refusal.value).split("; ")[1].split()[0]), Host("cpu", [None], 0.0, 16 * GIGABYTE))


def test_a_run_that_fits_alone_is_trained() -> None:
    [config] = configs("model.width=1024 model.head_width=8")
    alone = bytes_asked(config) + 150e6
    check_fits(config, Host("cpu", [None] * 8, alone / 8, alone))
    with pytest.raises(RequestError, match="take at least"):
        check_fits(config, Host("cpu", [None], alone, alone / 2))


@pytest.mark.parametrize("at_once", [1, 3])
def test_the_largest_fleet_stands_for_all(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run takes a minute to train, half a minute to start, and 1 GB besides the 1 GB that processes share."""
    asked, tried = points([tree(f"seed={seed}") for seed in range(5)]), list[tuple[int, int]]()

    def attempt(fleet: Sequence[Point], slots: Sequence[str | None], register: object) -> Cost:
        tried.append((len(fleet), len(slots)))
        return Cost(60.0 * len(fleet), 30.0, GIGABYTE * len(fleet), GIGABYTE)

    monkeypatch.setattr(dry_run, "try_fleet", attempt)
    told = list(dry_run.estimate([asked[:1], asked[1:3], asked[3:]], 7, Host("cpu", [None] * at_once, 8 * GIGABYTE)))
    assert tried == [(2, at_once)]
    assert "5 runs in 3 fleets" in told[0]
    both = {1: ("6.5 min", "3.0 GB of memory of 8.0 GB"), 3: ("2.5 min with 3", "6.0 GB of memory of 24.0 GB")}
    assert all(part in told[-1] for part in both[at_once])


def test_fleets_fit_into_memory() -> None:
    config = configs("")[0]
    each = bytes_per_run(config)
    for runs in (1, 3, 8):
        assert most_runs(config, Host("cpu", [None], (150e6 + (runs + 0.5) * each) / 0.8)) == runs
    assert most_runs(config, Host("cpu", [None], 0.0)) == 1
    assert most_runs(config, Host("cpu")) == ENOUGH_ON_CPU == 8
    on_gpu = most_runs(config, Host("cuda", [None], 80 * GIGABYTE))
    assert 0.7 * 80 * GIGABYTE < on_gpu * each < 0.8 * 80 * GIGABYTE
    assert most_runs(config, Host("cuda", [None], 80 * GIGABYTE), max_runs=5) == 5
    assert most_runs(config, Host("cpu"), max_runs=20) == 20


def test_graphics_memory_is_that_of_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the devices that jobs will use, shared by those that share one; the others do not matter."""
    free = [1 * GIGABYTE, 80 * GIGABYTE, 60 * GIGABYTE]
    monkeypatch.setattr("lab.sweeping.capacity.pick_device", torch.device)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda place: (free[place], 80 * GIGABYTE))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert measure_host("cuda", ["1", "2"]).memory == 60 * GIGABYTE
    assert measure_host("cuda", ["1", "1", "2"]).memory == 40 * GIGABYTE
    assert measure_host("cuda", [None]).memory == 1 * GIGABYTE


@pytest.mark.parametrize(
    ("group", "top", "names"),
    [
        ("0::/jobs/7", "", ("memory.max", "memory.current", "inactive_file")),
        ("4:memory:/jobs/7", "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
    ],
)
def test_what_a_control_group_leaves_is_what_is_free(
    group: str, top: str, names: tuple[str, str, str], tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n1:cpu:/else\n")
    home = tmp_path / "sys/fs/cgroup" / top
    for place, limit in ((home, "max"), (home / "jobs", "1000"), (home / "jobs/7", "800")):
        place.mkdir(parents=True, exist_ok=True)
        limited, used, dropped = names
        (place / limited).write_text(f"{limit}\n")
        (place / used).write_text("500\n")
        (place / "memory.stat").write_text(f"anon 400\n{dropped} 100\n")
    assert list(machine.free_cgroup_memory(tmp_path)) == [400, 600]
