"""The local launcher: one device per job, and a job that hangs loses only itself."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.instability_lab import LocalLauncher
from lab.__main__ import main
from lab.core import machine
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.sweeping.local_jobs import choose_slots, run_jobs

pytestmark = pytest.mark.xdist_group("sweeping")  # where processes to fork from are there already


@pytest.fixture(autouse=True)
def _plugins_are_found() -> None:
    Plugins.instance()  # executes the launcher's module once more, so that what is patched must be patched later


def leave_a_trace(config: DictConfig) -> None:
    """A job that says where it ran and when, once ``seed`` jobs have begun; job 1 of a folder ``hangs`` never ends."""
    folder, number, began = Path(config.out), config.fleet, time.time()
    (folder / f"{number}.began").write_text(str(began))
    while len(list(folder.glob("*.began"))) < config.seed or (number == 1 and folder.name == "hangs"):
        time.sleep(0.01)
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    trace = {"device": device, "began": began, "ended": time.time(), "here": str(Path.cwd())}
    (folder / f"{number}.json").write_text(json.dumps(trace))


def launch(folder: Path, jobs: int, device: str = "auto", at_once: int = 1, **options: Any) -> list[JobReturn]:
    """Jobs of ``leave_a_trace``, run by a local launcher with these options; a job waits until so many have begun."""
    launcher = LocalLauncher(**{"processes": 0, "devices": None, "timeout_minutes": None, **options})
    context: Any = None  # nothing is composed
    config = OmegaConf.create({"device": device})
    launcher.setup(hydra_context=context, task_function=leave_a_trace, config=config)
    folder.mkdir(exist_ok=True)
    each = [[f"fleet={job}", f"out={quoted(folder)}", f"seed={at_once}"] for job in range(jobs)]
    return list(launcher.launch(each, initial_job_idx=0))


def traces(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def most_at_once(found: list[dict[str, Any]]) -> int:
    return max(sum(other["began"] <= one["began"] < other["ended"] for other in found) for one in found)


class SlurmLauncher(LocalLauncher):
    """Named as that of submitit, whose package need not be there."""


def test_slurm_is_refused_where_there_is_none(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(here))
    launchers = Path("conf/hydra/launcher")
    launchers.mkdir(parents=True)
    (launchers / "mine.yaml").write_text(
        "{_target_: hydra_plugins.SlurmLauncher, processes: 0, devices: null, timeout_minutes: null}"
    )
    monkeypatch.setitem(Plugins.instance().class_name_to_class, "hydra_plugins.SlurmLauncher", SlurmLauncher)
    words = ["train", "data=synthetic", "steps=3", "--config-dir", "conf", "hydra/launcher=mine"]
    monkeypatch.setattr(sys, "argv", ["lab", *words])
    assert main(words) == 2
    said = "lab: there is no srun here, so no SLURM to launch jobs; hydra/launcher=local trains here\n"
    assert capsys.readouterr() == ("", said)
    assert [path.name for path in Path().iterdir()] == ["conf"]


@pytest.mark.parametrize(("processes", "each"), [(4, 2), pytest.param(0, 1, marks=pytest.mark.slow)])
def test_jobs_share_out_the_devices(processes: int, each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.core.machine.visible_gpus", lambda: ["0", "1", "2"])
    jobs = launch(tmp_path, 6, at_once=2 * each, processes=processes, devices=[0, 2], timeout_minutes=2)
    assert all(job.status is JobStatus.COMPLETED for job in jobs)
    found = traces(tmp_path)
    assert len(found) == 6
    assert {trace["device"] for trace in found} == {"0", "2"}
    for device in ("0", "2"):
        assert most_at_once([trace for trace in found if trace["device"] == device]) == each
    assert most_at_once(found) == 2 * each


def test_paths_mean_in_a_job_what_they_mean_where_the_sweep_was_started(here: Path) -> None:
    launch(Path("it's 1, here").absolute(), 1, "cpu")
    (trace,) = traces(Path("it's 1, here"))
    assert trace["here"] == str(here)


@pytest.mark.slow
def test_all_devices_are_used_unless_jobs_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.core.machine.visible_gpus", lambda: ["0", "1"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    launch(tmp_path, 2, at_once=2)
    assert {trace["device"] for trace in traces(tmp_path)} == {"0", "1"}
    launch(tmp_path, 2, "cpu")
    assert {trace["device"] for trace in traces(tmp_path)} == {None}


def test_visible_devices_keep_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8f2")
    assert machine.visible_gpus() == ["5", "GPU-8f2"]


def test_without_devices_there_is_a_job_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 3)
    assert choose_slots(0, [], "cpu") == [None] * 3
    assert choose_slots(5, [], "cpu") == [None] * 5
    monkeypatch.setattr(machine, "visible_gpus", lambda: ["a", "b"])
    assert choose_slots(3, ["a", "b"], "cpu") == ["a", "b", "a"]


@pytest.mark.slow
def test_a_job_that_hangs_loses_only_itself(tmp_path: Path) -> None:
    folder = tmp_path / "hangs"
    folder.mkdir()
    jobs = launch(folder, 4, processes=2, timeout_minutes=0.1)
    assert 1 < time.time() - float((folder / "1.began").read_text()) < 90
    assert [job.status for job in jobs] == [JobStatus.COMPLETED, JobStatus.FAILED, *[JobStatus.COMPLETED] * 2]
    assert str(jobs[1]._return_value) == "job 1 was killed after 0.1 minutes"
    assert sorted(path.stem for path in folder.glob("*.json")) == ["0", "2", "3"]


def count_signals(folder: Path, is_deaf: bool) -> int:
    """A job that says when it has begun, and how many signals it got in two seconds; a deaf one goes on for an hour."""
    times = list[float]()
    signal.signal(signal.SIGTERM, lambda *_: times.append(time.monotonic()))
    (folder / f"{is_deaf}.began").touch()
    while is_deaf or not times or time.monotonic() < times[0] + 2:
        time.sleep(0.01)
    return len(times)


@pytest.mark.slow
def test_a_job_that_is_to_stop_is_asked_rarely_and_killed_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.sweeping.local_jobs.STOP_WITHIN", 4.0)
    jobs = [(tmp_path, False), (tmp_path, True), (tmp_path, False)]
    ends = run_jobs(count_signals, jobs, [None] * 2, stop_requested=lambda: len(list(tmp_path.iterdir())) == 2)
    assert [(end.exit_code, end.answer) for end in ends] == [(0, 1), (-signal.SIGKILL, None)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"devices": [0, 7]}, "hydra.launcher.devices names 7; there: 0, 1"),
        ({"processes": -1}, "hydra.launcher.processes must be at least 0, not -1"),
        ({"timeout_minutes": 0}, "hydra.launcher.timeout_minutes must be above 0, not 0"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lab.core.machine.visible_gpus", lambda: ["0", "1"])
    with pytest.raises(RequestError, match=said):
        launch(tmp_path, 1, **options)
