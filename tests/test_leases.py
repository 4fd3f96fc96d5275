"""Commands in one folder share its runs: a run has one holder, the dead hold nothing, and what they left is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lab.core import machine
from lab.core.errors import RequestError
from lab.records import leases, store
from lab.records.leases import Lease
from lab.sweeping import pipeline
from lab.sweeping.job import train_fleet
from lab.sweeping.planner import plan_sweep
from lab.sweeping.sharing import Sharing
from small import tree
from sweeping import TIMINGS, assert_same, needs_proc
from test_store import leave

RUNS = [f"run{number}" for number in range(6)]


def held(folder: Path, request: str = "mine", runs: Sequence[str] = RUNS) -> list[str]:
    """The runs that a job of a request would get just now."""
    with Lease(folder, request, runs) as lease:
        return lease.runs


def test_a_run_has_one_holder_until_it_is_released(tmp_path: Path) -> None:
    with Lease(tmp_path, "theirs", RUNS[:4]) as theirs:
        assert theirs.runs == RUNS[:4]
        assert held(tmp_path) == RUNS[4:]
        assert held(tmp_path, "theirs") == RUNS  # jobs of one request do not keep runs from each other
        assert [member.held for member in leases.living(tmp_path)] == [RUNS[:4]]
        assert leases.living(tmp_path, without="theirs") == []
    assert held(tmp_path) == RUNS
    assert leases.living(tmp_path) == []
    for request in ("mine", "theirs"):
        leases.forget(tmp_path, request)
    assert not [*(tmp_path / "plans/leases").iterdir()]


def test_a_command_reads_what_its_jobs_left_to_others(tmp_path: Path) -> None:
    with Lease(tmp_path, "theirs", RUNS[:2]):
        leave(tmp_path, "run2")
        assert held(tmp_path, runs=RUNS[:4]) == ["run3"]
        assert leases.skipped(tmp_path, "mine") == {*RUNS[:3]}
        assert leases.skipped(tmp_path, "theirs") == set()
    assert held(tmp_path, runs=RUNS[:1]) == ["run0"]
    assert leases.skipped(tmp_path, "mine") == {"run1", "run2"}
    leases.forget(tmp_path, "mine")
    assert leases.skipped(tmp_path, "mine") == set()


def test_what_is_recorded_is_held_by_nobody(tmp_path: Path) -> None:
    leave(tmp_path, "run1")
    leave(tmp_path, "run2", "diverged")
    leave(tmp_path, "run3", "failed")
    assert held(tmp_path) == ["run0", "run3", "run4", "run5"]


def test_an_error_while_runs_are_claimed_leaves_no_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "is_recorded", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        held(tmp_path)
    assert not [*(tmp_path / "plans/leases").glob("run*")]
    assert leases.living(tmp_path) == []


def changed(folder: Path, **values: Any) -> None:
    """Write other values into the only lease of a folder."""
    (path,) = folder.glob("plans/leases/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def silent(folder: Path, seconds: float) -> None:
    (path,) = folder.glob("plans/leases/*.json")
    os.utime(path, (time.time() - seconds,) * 2)


LEASES: dict[str, tuple[Callable[[Path], object], bool]] = {
    "a moment ago": (lambda folder: silent(folder, 0), True),
    "within a minute": (lambda folder: silent(folder, 55), True),
    "stopped": (lambda folder: silent(folder, 61), False),
    "another process of the same id": (lambda folder: changed(folder, started="1"), False),
    "another machine": (lambda folder: changed(folder, machine="far", process=2**30), True),
    "another machine without a sign": (
        lambda folder: (changed(folder, machine="far"), silent(folder, 61)),
        False,
    ),
    "another namespace of processes": (
        lambda folder: changed(folder, machine=f"{leases._this_machine()} of a container", process=2**30),
        True,
    ),
    "garbled": (lambda folder: changed(folder, process="x"), False),
}


@needs_proc
@pytest.mark.parametrize(("change", "counts"), LEASES.values(), ids=list(LEASES))
def test_whose_process_has_ended_or_who_gives_no_sign_holds_nothing(
    change: Callable[[Path], object], counts: bool, tmp_path: Path
) -> None:
    with Lease(tmp_path, "theirs", RUNS):
        change(tmp_path)
        assert held(tmp_path) == ([] if counts else RUNS)
        assert len(leases.living(tmp_path)) == counts
        leases.forget(tmp_path, "mine")
        assert any((tmp_path / "plans/leases").iterdir()) == counts


@needs_proc
def test_a_process_that_is_killed_holds_nothing_from_then_on(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from lab.records.leases import Lease\n"
        f"with Lease(Path({str(tmp_path)!r}), 'theirs', {RUNS!r}): print('held', flush=True); os.read(0, 1)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout
    assert other.stdout.readline() == "held\n"
    assert held(tmp_path) == []
    other.kill()
    while machine.process_started(other.pid) is not None:  # a zombie counts as ended, too
        time.sleep(0.01)
    with Lease(tmp_path, "mine", RUNS) as lease:
        assert lease.runs == RUNS
        assert {*lease.claims.values()} == {1}  # the claims of the dead are not removed under a third one's feet
        assert held(tmp_path, "a third") == []
    other.communicate()
    leases.forget(tmp_path, "mine")
    assert not [*(tmp_path / "plans/leases").iterdir()]


def test_a_job_gives_signs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "SIGN_EVERY", 0.01)
    with Lease(tmp_path, "theirs", RUNS):
        silent(tmp_path, 100)
        deadline = time.monotonic() + 10
        while not leases.living(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert held(tmp_path) == []


@pytest.mark.parametrize("stale", [False, True], ids=["new", "left by the dead"])
def test_many_at_once_each_get_what_no_other_has(stale: bool, tmp_path: Path) -> None:
    runs = [f"r{number}" for number in range(40)]
    if stale:
        abandoned = Lease(tmp_path, "dead", runs)
        abandoned.__enter__()
        abandoned.over.set()
        changed(tmp_path, started="1", machine=leases._this_machine())
    gate, requests = threading.Barrier(8), [Lease(tmp_path, str(number), runs) for number in range(8)]

    def claim(lease: Lease) -> list[str]:
        gate.wait()
        return lease.__enter__().runs

    with ThreadPoolExecutor(8) as threads:
        got = list(threads.map(claim, requests))
    assert sorted(run for each in got for run in each) == sorted(runs)
    for lease in requests:
        lease.__exit__(None, None, None)
    assert held(tmp_path, "next", runs) == runs


@pytest.mark.parametrize(
    ("content", "age", "counts"),
    [("", 0, True), ("", 61, False), ("../../elsewhere", 0, False), ("nobody", 0, False), ("x" * 100, 0, False)],
)
def test_claims_that_make_no_sense_hold_nothing(content: str, age: float, counts: bool, tmp_path: Path) -> None:
    """An empty one is not written yet."""
    (tmp_path / "plans/leases").mkdir(parents=True)
    claim = tmp_path / "plans/leases/run0.3"
    claim.write_text(content)
    os.utime(claim, (time.time() - age,) * 2)
    (tmp_path / "plans/leases/run1.x").write_text("")
    (tmp_path / "elsewhere.json").write_text(json.dumps({"request": "x"}))
    assert held(tmp_path, runs=["run0", "run1"]) == (["run1"] if counts else ["run0", "run1"])


def test_nothing_is_written_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(RequestError, match=r"a run cannot be called '\.\./x'"):
        held(tmp_path / "runs", runs=["../x"])
    (tmp_path / "runs/plans").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RequestError, match="a link"):
        held(tmp_path / "runs")
    assert not [*(tmp_path / "elsewhere").iterdir()]


@needs_proc
def test_when_a_process_started() -> None:
    assert machine.process_started(os.getpid()) == machine.process_started(os.getpid())
    child = subprocess.Popen(["true"])
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    assert machine.process_started(child.pid) is None  # a zombie
    child.wait()
    assert machine.process_started(child.pid) is None


def test_a_command_says_once_who_trains_its_runs(tmp_path: Path) -> None:
    with Sharing(tmp_path, RUNS[:3]) as mine:
        assert mine.look() == []
        with Lease(tmp_path, mine.request, RUNS[:2]), Lease(tmp_path, "apart", RUNS[3:]):
            assert mine.look() == []
            with Sharing(tmp_path, RUNS[2:]) as theirs:
                for one in (mine, theirs):
                    assert ["another command" in line for line in one.look()] in ([True], [True, True])
                    assert one.look() == []
                    assert not one.is_alone
        assert mine.is_alone
    assert not [*(tmp_path / "plans/leases").iterdir()]


def never() -> bool:
    return False


def ended(lease: Lease) -> None:
    lease.__exit__(None, None, None)


def test_a_command_waits_for_what_others_hold_and_takes_what_they_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, done, waited = Lease(tmp_path, "one", ["run0"]), Lease(tmp_path, "two", ["run1"]), list[float]()

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            leave(tmp_path, "run1")
            ended(done)
        if len(waited) == 4:
            ended(left)

    monkeypatch.setattr("lab.sweeping.sharing.time.sleep", sleep)
    with Sharing(tmp_path, RUNS) as mine:
        with left, done:
            assert held(tmp_path, mine.request, RUNS[:3]) == ["run2"]
            assert mine.await_others(never) == {"run0"}
            assert len(waited) == 4
        assert held(tmp_path, mine.request, ["run0"]) == ["run0"]
        assert mine.elsewhere == {"run1"}
        assert mine.await_others(never) == set()


def test_a_command_that_waits_can_be_told_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.sweeping.sharing.time.sleep", lambda _: os.kill(os.getpid(), 15))
    with Lease(tmp_path, "theirs", RUNS), Sharing(tmp_path, RUNS) as mine:
        held(tmp_path, mine.request)
        with pytest.raises(SystemExit) as end:
            pipeline._left_by_others([], mine)
    assert end.value.code == machine.EXIT_PREEMPTED


CONFIG = ["data=synthetic", "steps=3", "model.width=16", "model.depth=1", "seq_len=16", "batch_size=4"]
CONFIG += ["probes.every=2", "validation=short"]


def trained(folder: Path, disturb: Callable[[Sequence[str]], Any]) -> store.Records:
    """The records of two fleets of two runs; ``disturb`` gets the ids of the runs before each round of jobs."""
    trees = [{**tree(f"seed={s}", f"optimizer.lr={lr}", *CONFIG), "out": str(folder)} for s in (0, 1) for lr in (1, 2)]
    plan = plan_sweep(trees, max_runs=2, one=False, shard="1/1", is_local=True, slots=[None])

    def launch(jobs: Sequence[Sequence[str]]) -> list[str]:
        disturb([point.id for point in plan.mine])
        for fleet, _ in jobs:
            name, index, request = fleet.removeprefix("fleet=").split("/")
            train_fleet(folder, name, int(index), request=request)
        return []

    pipeline.train(plan, launch, command="lab")
    records = store.read(folder)
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


@pytest.mark.usefixtures("undrawn", "briefly")
def test_a_fleet_of_which_others_hold_a_run_is_trained_without_it_and_the_run_once_they_leave_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = trained(tmp_path / "alone", lambda runs: None)
    assert "4 trained, 0 already there" in capsys.readouterr().out
    theirs = Lease(tmp_path / "shared", "theirs", [])

    def hold(runs: Sequence[str]) -> None:
        theirs.wanted = theirs.wanted or runs[1:3]
        if not theirs.over.is_set():
            theirs.__enter__()

    def leave_them(_: float) -> None:
        assert len(store.read(tmp_path / "shared").runs) == 2
        ended(theirs)

    monkeypatch.setattr("lab.sweeping.sharing.time.sleep", leave_them)
    assert_same(trained(tmp_path / "shared", hold), alone)
    said = capsys.readouterr()
    assert "waiting for another command, which trains 2 of these runs" in said.err
    assert "4 trained, 0 already there" in said.out
    assert not [*(tmp_path / "shared/plans/leases").iterdir()]
