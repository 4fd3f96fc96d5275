"""What saves time says the same: statuses, reports that are up to date, short validations, a fleet in this process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import planted
from lab.core import machine
from lab.data.corpus import bigram_loss
from lab.records import plans, store
from lab.report import build
from lab.sweeping import launch
from lab.sweeping.planner import plan_sweep, points
from lab.sweeping.request import Request
from lab.training.config import run_config
from lab.training.fleet import Fleet
from lab.training.identity import columns
from lab.training.loop import train
from lab.training.recorder import run_card
from small import tree
from sweeping import TIMINGS, assert_same
from test_store import leave

# What every run says, without which records make no sense.
WHOLE = {"optimizer.lr": 1e-3, "steps": 4, "batch_size": 4, "seq_len": 12}


def of_records(folder: Path) -> dict[str, str]:
    """The statuses as the records tell them, read whole."""
    records = store.find(folder)
    return dict(zip(records.runs["id"], records.runs["status"], strict=True)) if records else {}


def test_statuses_are_those_of_the_records_in_every_state_of_a_folder(tmp_path: Path) -> None:
    steps: list[Callable[[], object]] = [
        lambda: leave(tmp_path, "a"),
        lambda: leave(tmp_path, "b", "failed"),
        lambda: store.gather(tmp_path),
        lambda: leave(tmp_path, "b", "diverged"),
        lambda: leave(tmp_path, "c", "failed"),
        lambda: store.gather(tmp_path),
        lambda: (tmp_path / "runs/c/run.json").unlink(),
        lambda: (tmp_path / "runs/a/metrics.parquet").write_text("damaged"),
        lambda: (tmp_path / "metrics.parquet").unlink(),
        lambda: (tmp_path / "runs.parquet").write_text("damaged"),
    ]
    seen = []
    for step in steps:
        step()
        assert store.statuses(tmp_path) == of_records(tmp_path)
        seen.append(tuple(sorted(store.statuses(tmp_path).items())))
    assert len(set(seen)) > 4


def test_the_digest_of_the_tables_is_there_once_they_hold_every_run(tmp_path: Path) -> None:
    assert store.digest_of_tables(tmp_path) is None
    leave(tmp_path, "a")
    assert store.digest_of_tables(tmp_path) is None
    store.gather(tmp_path)
    first = store.digest_of_tables(tmp_path)
    assert first
    leave(tmp_path, "b")
    assert store.digest_of_tables(tmp_path) is None
    store.gather(tmp_path)
    assert store.digest_of_tables(tmp_path) not in (None, first)
    leave(tmp_path, "c", "failed")
    store.gather(tmp_path)
    assert store.digest_of_tables(tmp_path) is None  # it may be trained again, and fail otherwise


@pytest.fixture
def reported(tmp_path: Path, undrawn: None) -> Path:
    folder = planted.write(tmp_path / "out", list(planted.cards())[:4])
    build.make_report([folder])
    return folder


@pytest.mark.slow
def test_a_report_is_drawn_again_if_its_records_or_commands_are_newer(
    reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launch._report(reported) == ""  # it is left as it is
    for change in (
        lambda: planted.write(reported, list(planted.cards())[:5]),
        lambda: store.note_command(reported, "lab sweep other"),
        (reported / "report.html").unlink,
    ):
        change()
        assert launch._report(reported) == build.summary(build.study([reported]))
        assert launch._report(reported) == ""


def test_a_short_validation_has_as_many_tokens_as_training() -> None:
    trees = [
        tree(f"validation={kind}", f"steps={steps}") for kind, steps in [("whole", 12), ("short", 12), ("short", 99)]
    ]
    configs = [run_config(one) for one in trees]
    targets = [len(Fleet([config]).evaluation.held_out_nt) * config.seq_len for config in configs]
    assert targets[0] >= 65_536
    assert 1024 <= targets[1] < 1100
    assert configs[2].trained_tokens <= targets[2] < 1.1 * configs[2].trained_tokens
    fleet = Fleet([configs[2]])
    *_, last = train(Fleet([configs[1]]))
    assert last.val_loss_r is not None
    corpus = configs[2].data.entry.open()
    card = run_card("a", configs[2], {})
    assert card["loss_bigram"] == bigram_loss(corpus.pair_counts(), np.asarray(fleet.evaluation.held_out_nt))
    assert card["loss_bigram"] != corpus.loss_bigram(12)


def test_a_whole_validation_is_no_part_of_an_id() -> None:
    whole, short = tree("validation=whole"), tree("validation=short")
    absent = {key: value for key, value in whole.items() if key != "validation"}
    ids = [points([one])[0].id for one in (whole, absent, short)]
    assert ids[0] == ids[1] != ids[2]
    assert "validation" not in columns(run_config(whole))
    assert columns(run_config(short))["validation"] == "short"


def test_the_first_interrupt_asks_to_stop_and_the_second_stops() -> None:
    stopped = []

    def interrupt_twice() -> None:
        with machine.catching_sigterm(interrupts=True) as stop_requested:
            signal.raise_signal(signal.SIGINT)
            stopped.append(stop_requested())
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        interrupt_twice()
    assert stopped == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


INSIDE_ITSELF = """
import signal, sys
from lab.core import machine

sent = 0

def send(*_):
    global sent
    if sent < 300:
        sent += 1
        signal.raise_signal(signal.SIGTERM)

with machine.catching_sigterm() as stop_requested:
    sys.setprofile(send)  # at each call, those of a handler included
    send()
    while sent < 300:
        stop_requested()
    sys.setprofile(None)
    print(sent, stop_requested())
"""


def test_signals_inside_the_handler_of_another_block_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", INSIDE_ITSELF], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "300 True\n"


def test_of_nested_blocks_each_knows_of_a_signal_in_the_other() -> None:
    with machine.catching_sigterm() as stop_requested:
        with machine.catching_sigterm() as inside:
            signal.raise_signal(signal.SIGTERM)
            assert inside()
        assert stop_requested()
        with machine.catching_sigterm() as later:
            assert later()
    with machine.catching_sigterm() as stop_requested:
        assert not stop_requested()


def here(folder: Path) -> store.Records:
    """Records of a fleet of two, trained in this process; timings left out."""
    trees = [{**tree("validation=short", f"seed={seed}"), "out": str(folder)} for seed in (0, 1)]
    plan = plan_sweep(trees, max_runs=None, is_single=False, shard="1/1", is_local=True, slots=[None])
    launch.train_plan(plan, Mock(), Request(command="lab"), trains_here=True)
    records = store.read(folder)
    return store.Records(records.runs.drop(columns=TIMINGS), records.metrics)


@pytest.mark.slow
def test_an_interrupted_fleet_goes_on_from_its_checkpoint(
    tmp_path: Path, undrawn: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plans, "thaw", lambda *_: pytest.fail("the process that planned the fleet read it back"))
    whole = here(tmp_path / "whole")
    step, steps = Fleet.step, list[int]()

    def interrupted(fleet: Fleet, index: int) -> Any:
        steps.append(index)
        if index == 5:
            signal.raise_signal(signal.SIGINT)
        return step(fleet, index)

    with monkeypatch.context() as patch:
        patch.setattr(Fleet, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            here(tmp_path / "cut")
    assert steps == list(range(6))
    monkeypatch.setattr(Fleet, "step", lambda fleet, index: (steps.append(index), step(fleet, index))[1])
    assert_same(here(tmp_path / "cut"), whole)
    assert steps == list(range(12))
    assert "2 trained, 0 already there" in capsys.readouterr().out
