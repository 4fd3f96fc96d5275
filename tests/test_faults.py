"""A disk that is full, a clock that jumps, a probe that raises: the sweep says so, and what it leaves is right."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import planted
from lab import Probe
from lab.analysis.rendering.layout import Drawing
from lab.core.hooks import announce
from lab.core.registry import PROBES
from lab.records import store
from lab.training.engine import Compiled
from small import configs, trained
from sweeping import TIMINGS, assert_same, finished, lab
from test_checkpoint import go_on

MINI = [
    "train",
    "-m",
    "seed=0,1",
    "data=synthetic",
    "validation=short",
    "model.width=16",
    "model.depth=1",
    "seq_len=16",
    "batch_size=4",
]
MINI += ["steps=12", "probes.every=4"]
MINI += ["hydra/launcher=basic", "hydra.sweeper.max_runs=1"]


@pytest.mark.slow
@pytest.mark.usefixtures("briefly")
def test_a_clock_that_jumps_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*MINI, "seed=0"]
    assert lab(*words, f"out={tmp_path / 'steady'}") == 0
    clock, chance = time.time, random.Random(0)
    monkeypatch.setattr(time, "time", lambda: clock() + chance.uniform(-1e5, 1e5))
    capsys.readouterr()
    assert lab(*words, f"out={tmp_path / 'jumping'}", "checkpoint.minutes=1e-5") == 0
    told = capsys.readouterr().out.splitlines()[0]
    assert 0 <= float(told.split(" s  ")[0].split()[-1]) < 60
    steady, jumping = (store.read(tmp_path / name) for name in ("steady", "jumping"))
    assert jumping.runs["wall_seconds"].between(0, 60, inclusive="neither").all()
    assert_same(*(store.Records(found.runs.drop(columns=TIMINGS), found.metrics) for found in (steady, jumping)))


@pytest.mark.usefixtures("briefly")
def test_a_disk_that_is_full_is_said_and_with_space_the_rest_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, calls = tempfile.mkstemp, list[Any]()

    def full(*args: Any, **named: Any) -> tuple[int, str]:
        calls.append(args)
        if len(calls) > 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(*args, **named)

    whole = finished(tmp_path / "whole", *MINI)
    with monkeypatch.context() as short:
        short.setattr(tempfile, "mkstemp", full)
        capsys.readouterr()
        assert lab(*MINI, f"out={tmp_path / 'out'}") in (1, 2)
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "out").rglob(".*")), "nothing half written"
    assert_same(finished(tmp_path / "out", *MINI), whole)


def test_a_figure_that_cannot_be_written_is_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.report.build.FIGURES", {"blank": lambda *_: Drawing()})
    planted.write(tmp_path, list(planted.cards()))
    (tmp_path / "figures").write_text("in the way")
    assert lab("report", str(tmp_path)) == 2
    assert f"cannot write {tmp_path / 'figures'}" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def break_off(*heard: Any) -> Tensor:
    raise ZeroDivisionError("no number\nof that kind")


ONCE = ("model.depth=1", "steps=2", "probes.every=1")  # one graph to trace


@pytest.mark.parametrize("event", ["scores", "gradients", "val_loss"])
def test_a_probe_that_raises_is_silent_and_the_run_goes_on(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROBES._entries, "broken", Probe("broken", event, break_off))
    fine, broken = (
        trained(configs("", shared=(*ONCE, probes)))
        for probes in ("probes.names=[train_loss]", "probes.names=[train_loss,broken]")
    )
    said = "probe broken is silent, having raised ZeroDivisionError: no number"
    assert len(fine) == 1
    assert repr([({**outcome, "notes": said}, rows) for outcome, rows in fine]) == repr(broken)
    assert all(outcome["notes"] is None and len(rows) == 2 for outcome, rows in fine)


def test_a_probe_that_raises_leaves_the_traced_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **how: graph)
    monkeypatch.setitem(PROBES._entries, "broken", Probe("broken", "scores", break_off))
    monkeypatch.setitem(PROBES._entries, "fine", Probe("fine", "scores", lambda scores: scores.amax(1)))

    def update(held: Tensor, new: Tensor) -> None:
        for block in ("block0", "block1"):
            announce("scores", block, new)
        held.add_(new)

    held = torch.zeros(2, 3)
    step = Compiled(update, held, ["broken", "fine"])
    for number in (1.0, 2.0):
        heard = step(torch.full((2, 3), number), with_probes=True)
        assert {where: values.tolist() for where, values in heard.items()} == {
            ("fine", "block0"): [number, number],
            ("fine", "block1"): [number, number],
        }
    assert torch.equal(held, torch.full((2, 3), 3.0))
    assert list(step.faults) == ["broken"]


@pytest.mark.usefixtures("briefly")
def test_of_a_probe_that_raises_one_line_is_said_and_its_records_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROBES._entries, "broken", Probe("broken", "scores", break_off))
    assert lab(*MINI, "probes.names=[train_loss,broken]", f"out={tmp_path}") == 0  # in two fleets
    said = "probe broken is silent, having raised ZeroDivisionError: no number"
    assert capsys.readouterr().err == f"lab: {said}; training goes on\n"
    runs, metrics, _ = store.read(tmp_path)
    assert runs["notes"].tolist() == [said, said]
    assert set(metrics["probe"]) == {"train_loss"}


def test_a_probe_is_silent_from_its_fault_on_also_after_a_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = []

    def measure(scores: Tensor) -> Tensor:
        heard.append(scores)
        return break_off() if len(heard) == 4 else scores.flatten(1).amax(1)  # at the last block of the second time

    monkeypatch.setitem(PROBES._entries, "broken", Probe("broken", "scores", measure))
    wanted = configs("", shared=("probes.names=[train_loss,broken]", "probes.every=3", "model.depth=2"))
    go_on(tmp_path, wanted, cut_after=10)
    ((*_, rows),), steps, _ = go_on(tmp_path, wanted)
    assert steps[0] == 8
    assert [(step, where) for step, name, where, _ in rows if name == "broken"] == [(0, "block0"), (0, "block1")]
    assert {step for step, name, *_ in rows if name == "train_loss"} == {0, 3, 6, 9, 11}
