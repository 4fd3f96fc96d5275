"""A disk that is full, or may not be written: one line says so, and with space the rest is made."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import planted
from lab.analysis.rendering.layout import Drawing
from lab.records import store
from sweeping import TIMINGS, assert_same, lab
from test_faults import MINI

pytestmark = [pytest.mark.xdist_group("full disk"), pytest.mark.usefixtures("briefly")]


def trained(folder: Path) -> store.Records:
    """What the command leaves there, which has to come to its end, timings left out."""
    assert lab(*MINI, f"out={folder}") == 0
    runs, metrics, _ = store.read(folder)
    return store.Records(runs.drop(columns=TIMINGS), metrics)


WHOLE: list[store.Records] = []


@pytest.fixture
def whole(tmp_path: Path) -> store.Records:
    if not WHOLE:
        WHOLE.append(trained(tmp_path / "whole"))
    return WHOLE[0]


def assert_refused(folder: Path, said: str, capsys: pytest.CaptureFixture[str]) -> int:
    """The command fails in so many words, and leaves nothing half written; returns its exit code."""
    capsys.readouterr()
    code = lab(*MINI, f"out={folder}")
    error = capsys.readouterr().err.splitlines()
    assert code in (1, 2)
    assert said in error[-1]
    assert all(line.startswith("lab: ") for line in error)
    assert not list(folder.rglob(".*"))
    return code


@pytest.mark.parametrize("first", [6, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 12))])
def test_whichever_write_fails_first_the_rest_is_made_with_space(
    first: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    whole: store.Records,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make, made = tempfile.mkstemp, list[Any]()

    def full(*args: Any, **named: Any) -> tuple[int, str]:
        made.append(args)
        if len(made) > first:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(*args, **named)

    with monkeypatch.context() as short:
        short.setattr(tempfile, "mkstemp", full)
        assert_refused(tmp_path / "out", "No space left on device", capsys)
    assert_same(trained(tmp_path / "out"), whole)


def test_a_figure_that_cannot_be_written_is_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.report.build.FIGURES", {"blank": lambda *_: Drawing()})
    planted.write(tmp_path, list(planted.cards()))
    (tmp_path / "figures").write_text("in the way")
    assert lab("report", str(tmp_path)) == 2
    assert f"cannot write {tmp_path / 'figures'}" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


class Disk:
    """A file system of its own, in memory, for whoever may mount one."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.mount("-t", "tmpfs", "tmpfs", str(place))

    def mount(self, *words: str) -> None:
        if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
            pytest.skip("may not mount here")

    def become(self, options: str) -> None:
        self.mount("-o", f"remount,{options}", str(self.place))


@pytest.fixture
def a_disk(tmp_path: Path) -> Iterator[Disk]:
    if shutil.which("mount") is None:
        pytest.skip("may not mount here")
    (tmp_path / "disk").mkdir()
    yield Disk(tmp_path / "disk")
    subprocess.run(["umount", str(tmp_path / "disk")], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("pages", [4, 8, 12])
def test_a_disk_that_is_full_is_said_and_with_space_the_rest_is_made(
    pages: int, a_disk: Disk, whole: store.Records, capsys: pytest.CaptureFixture[str]
) -> None:
    a_disk.become(f"size={4 * pages}k")
    assert_refused(a_disk.place / "out", "No space left on device", capsys)
    a_disk.become("size=8m")
    assert_same(trained(a_disk.place / "out"), whole)


@pytest.mark.slow
def test_a_read_only_disk_is_refused_before_anything_trains(
    a_disk: Disk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(a_disk.place / "there")
    before = {path: path.read_bytes() for path in a_disk.place.rglob("*") if path.is_file()}
    a_disk.become("ro")
    monkeypatch.setattr("lab.sweeping.job.train_fleet", lambda *job: pytest.fail("something is trained"))
    assert assert_refused(a_disk.place / "new", "Read-only file system", capsys) == 2
    assert lab(*MINI, f"out={a_disk.place / 'there'}") == 0, "what finished before needs no writing"
    assert {path: path.read_bytes() for path in a_disk.place.rglob("*") if path.is_file()} == before
    a_disk.become("rw")
