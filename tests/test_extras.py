"""Launchers of other packages take fleets as they are: SLURM by a stand-in, Ray on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

import slurm
from lab.records import store
from sweeping import TIMINGS, assert_same

WORDS = [
    "train",
    "-m",
    "seed=0,1,2",
    "optimizer.lr=1e-2,1e-1",
    "steps=20",
    "model.width=16",
    "data=synthetic",
    "validation=short",
]
PLUGINS = {"slurm": "hydra_plugins.hydra_submitit_launcher", "ray": "hydra_plugins.hydra_ray_launcher"}
there = {extra for extra, plugin in PLUGINS.items() if find_spec(plugin)}
needs_slurm = pytest.mark.skipif("slurm" not in there, reason="pip install 'instability-lab[slurm]'")
needs_ray = pytest.mark.skipif("ray" not in there, reason="pip install 'instability-lab[ray]'")
# No token written to the home folder, no statistics sent, no other cluster of this machine.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}


def train(folder: Path, *words: str, **environment: str) -> store.Records:
    """Records of six runs in three fleets, trained in ``folder`` with a relative ``out``."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "lab", *WORDS, "hydra.sweeper.max_runs=2", "out=records", *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "6 trained, 0 already there, 0 diverged, 0 failed" in done.stdout
    assert "val loss" in done.stdout, "fleets say how far they are through the folder"
    records = store.read(folder / "records")
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


@pytest.mark.parametrize(("launcher", "extra"), [("slurm", "slurm")])
def test_an_extra_that_is_not_there_is_named(launcher: str, extra: str, tmp_path: Path) -> None:
    if extra in there:
        pytest.skip(f"{extra} is installed")
    command = [sys.executable, "-m", "lab", *WORDS, f"hydra/launcher={launcher}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(f"needs an extra: pip install 'instability-lab[{extra}]'\n")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.extras
@needs_slurm
def test_slurm_gets_one_array_job_and_gives_the_same_records(tmp_path: Path) -> None:
    commands = slurm.install(tmp_path / "bin")
    path = f"{commands}:{os.environ['PATH']}"
    options = ["hydra/launcher=slurm", "hydra.launcher.partition=debug", "hydra.launcher.array_parallelism=2"]
    assert_same(train(tmp_path / "slurm", *options, PATH=path), train(tmp_path / "local"))
    script = (commands / "script.sh").read_text()
    asked = slurm.directives(script)
    promised = {"array": "0-2%2", "cpus-per-task": "1", "mem": "4GB", "time": "120", "partition": "debug"}
    assert promised.items() <= asked.items()
    assert asked["job-name"] == "lab"
    assert script.index("export OMP_NUM_THREADS=1") < script.index("srun")


@pytest.mark.extras
@needs_slurm
def test_a_script_that_slurm_refuses_is_told_and_exits_1(tmp_path: Path) -> None:
    path = f"{slurm.install(tmp_path / 'bin')}:{os.environ['PATH']}"
    words = [*WORDS, "hydra/launcher=slurm", "+hydra.launcher.additional_parameters.partitoin=debug"]
    done = subprocess.run(
        [sys.executable, "-m", "lab", *words],
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "unrecognized option '--partitoin'" in done.stderr
    assert "0 trained, 0 already there, 0 diverged, 6 failed" in done.stdout


@pytest.mark.extras
@needs_ray
def test_ray_gives_the_same_records(tmp_path: Path) -> None:
    assert_same(train(tmp_path / "ray", "hydra/launcher=ray", **RAY), train(tmp_path / "local"))


@contextmanager
def ray_cluster(folder: Path) -> Iterator[str]:
    """The address of a cluster that was begun in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["start", "--head", "--block", "--num-cpus=2", f"--port={port}", "--include-dashboard=false"]
    # a place of its own, with a short path for the sake of its sockets, so that nobody else takes it for theirs
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as own, open(folder / "log", "w") as log:
        environment = {**os.environ, **RAY, "RAY_TMPDIR": own}
        del environment["RAY_ADDRESS"]
        command = [sys.executable, "-m", "ray.scripts.scripts", *words]
        head = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            while "block forever" not in (folder / "log").read_text() and head.poll() is None:
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait()


@pytest.mark.extras
@needs_ray
def test_a_ray_cluster_that_is_there_already_and_began_elsewhere(tmp_path: Path) -> None:
    for name in ("elsewhere", "here"):
        (tmp_path / name).mkdir()
    (tmp_path / "here/text.txt").write_text("the quick brown fox jumps over the lazy dog and runs on\n" * 400)
    words = ["data=text", "data.path=text.txt"]
    with ray_cluster(tmp_path / "elsewhere") as address:
        records = train(tmp_path / "here", *words, "hydra/launcher=ray_cluster", **{**RAY, "RAY_ADDRESS": address})
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["log"]
    (tmp_path / "here/records").rename(tmp_path / "here/records_of_ray")
    assert_same(records, train(tmp_path / "here", *words))
