"""What a user sees while a sweep trains: lines, and in a terminal a live block that nothing can tear."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from lab.core import machine
from lab.core.machine import cores
from lab.records import plans
from lab.records.plans import FleetProgress
from lab.sweeping import job, progress
from lab.sweeping.launch import show_planning
from lab.sweeping.planner import points
from lab.sweeping.progress import ProgressLog, ProgressMonitor, ProgressWriter, busy, clock, summary
from lab.sweeping.terminal import Scene, cells, scene, sketch
from lab.training.loop import StepResult
from lab.training.recorder import Run, fleet_summary, ranges
from small import configs, tree
from sweeping import OutputOf

NAN, INF = math.nan, math.inf


def test_the_sketch_puts_each_loss_under_its_learning_rate() -> None:
    losses = {
        ("width 32  z_loss", 1e-3): [3.0, 3.2],
        ("width 32  z_loss", 1e-1): [4.0, NAN],
        ("width 32  z_loss", 3e-1): [INF, NAN],
        ("width 64  z_loss", 1e-3): [2.0],
        ("width 64  z_loss", 1e-1): [123456.0],
        ("width 64  z_loss", 2.5e-2): [],
    }
    assert drawn(sketch(losses, 80), 80) == [
        "loss so far      0.001 0.025       0.1 0.3",
        "width 32  z_loss  ▅3.1              x4   x",
        "width 64  z_loss    ▁2     · █1.23e+05",
    ]
    assert drawn(sketch(losses, 30), 30) == [
        "loss so far      0.001 to 0.3",
        "width 32  z_loss ▅ xx",
        "width 64  z_loss ▁·█",
    ]


def drawn(renderable: Any, width: int) -> list[str]:
    """The lines of something in a terminal of so many columns."""
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    with console.capture() as capture:
        console.print(renderable)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_places_are_called_what_the_report_calls_them() -> None:
    wanted = configs(
        "intervention=[z_loss] optimizer.lr=1e-3",
        "intervention=[z_loss] optimizer.lr=1e-2 seed=1",
        "model.width=32 intervention=[qk_layernorm,z_loss] optimizer.lr=1e-3",
        "model.width=32 intervention=[z_loss] optimizer.lr=1e-3",
    )
    assert cells(wanted) == [
        ("width 16  without qk-layernorm", 1e-3),
        ("width 16  without qk-layernorm", 1e-2),
        ("width 32  with qk-layernorm", 1e-3),
        ("width 32  without qk-layernorm", 1e-3),
    ]
    deep = configs("", "model.depth=3", "model.depth=3 optimizer.eps=1e-5")
    assert [name for name, _ in cells(deep)] == [
        "width 16 depth 2  epsilon 1e-8",
        "width 16 depth 3  epsilon 1e-8",
        "width 16 depth 3  epsilon 1e-5",
    ]


def standing(step: int = 50, losses: Any = (), verdict: str | None = None, **other: Any) -> FleetProgress:
    """A fleet somewhere on its hundred steps."""
    return FleetProgress(
        **{"steps": 100, "seconds": 9.0, "rate": 4.0, "evaluation": 0.0, "notes": (), **other},
        step=step,
        losses=losses,
        verdict=verdict,
    )


A, B = "width 32  z_loss", "width 32  qk_layernorm+z_loss"
SCENE = Scene(
    [(f"{A}  seed 0", [(A, 1e-3), (A, 1e-1)]), (f"{B}  seed 0", [(B, 1e-3), (B, 1e-1)]), (f"{B}  seed 1", [(B, 1e-1)])],
    [((B, 1e-3), 2.0)],
)
STANDINGS = {0: standing(100, [2.5, 3.5], verdict="done"), 1: standing(25, [4.0, NAN])}


def block(standings: dict[int, FleetProgress], width: int = 80) -> list[str]:
    """The display a quarter of the way."""
    return drawn(SCENE.drawn(standings, 0.25, 20, width), width)


def test_the_block_at_eighty_columns() -> None:
    assert block(STANDINGS) == [
        " 25%  1/3 fleets  1 diverged  0:20 elapsed, 1:00 left",
        "width 32  qk_layernorm+z_l… ━━       step 25/100  4.0/s  0:19 left  1/2 diverged",
        "",
        "loss so far                   0.001  0.1",
        "width 32  z_loss               ▁2.5 █3.5",
        "width 32  qk_layernorm+z_loss    ▅3    x",
    ]


@pytest.mark.parametrize("width", [10, 200])
def test_the_block_fits(width: int) -> None:
    lines = block({1: standing(99, [4.0, NAN], rate=12345.0)}, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 6


def test_time_left_counts_the_last_evaluation() -> None:
    fleet = standing(60, rate=4.0, evaluation=20.0, seconds=30.0)
    assert (fleet.left, fleet.share) == (40 / 4.0 + 20, 0.5)
    assert "0:30 left" in block({1: fleet})[1]
    assert standing(99, rate=4.0, evaluation=20.0, seconds=30.0).share < 0.6
    assert standing(1, rate=0.0, evaluation=20.0).share == 0.01  # by steps while no rate is known
    assert standing(100, rate=4.0, evaluation=20.0, verdict="done").left == 0
    assert standing(100, rate=0.0, verdict="done").share == 1


def test_the_line_of_a_fleet_counts_runs_that_failed_and_says_why_once() -> None:
    ends = [{"status": "finished", "final_val_loss": loss} for loss in (2.5, 2.0)]
    ends += [{"status": "failed", "reason": "out of memory"}] * 2
    assert fleet_summary([Run(end, []) for end in ends]) == "val loss 2.000..2.500, 2 failed, out of memory"


def test_a_run_that_ends_worse_than_it_began_diverged(tmp_path: Path) -> None:
    """Its loss is finite; the line of its fleet, the header and the sketch still say the same."""
    ends = [{"status": "finished", "final_val_loss": 2.0}, {"status": "diverged", "final_val_loss": 9.0}]
    verdict = fleet_summary([Run(end, []) for end in ends])
    config, done = configs("")[0], ProgressWriter(tmp_path, "plan", 0, 100, 2)
    fleet = job._Job(tmp_path, {"a": config, "b": config}, done, None, lambda: False)  # type: ignore[arg-type]
    assert fleet.finish([Run(end, []) for end in ends])
    read = plans.read_progress(tmp_path, "plan")[0]
    lines = block({0: read})
    assert verdict == read.verdict == "val loss 2.000..2.000, 1 diverged"
    assert "1/3 fleets  1 diverged" in lines[0]
    assert ["width", "32", "z_loss", "▁2", "x"] in map(str.split, lines)


def test_a_log_gets_a_line_now_and_then() -> None:
    lines, times = Said(), []
    log = ProgressLog(3, lines)
    for second in range(7200):
        before = len(lines)
        log.show(STANDINGS, second / 7200, float(second))
        times += [second] * (len(lines) - before)
    log.close()
    assert lines[0] == "1%  1/3 fleets  1 diverged  1:00 elapsed, ? left"
    assert lines[-1].endswith(" left")
    assert times[:3] == [60, 120, 180]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == sorted(gaps)
    assert 60 == gaps[0] < gaps[-1] < 7200 / 10


def test_a_log_says_that_planning_takes_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for _ in show_planning(range(2000), 2000):
        assert capsys.readouterr().err == ("planning 2,000 points\n" if 10 <= now < 10.01 else "")
        now += 0.01


def test_a_refusal_while_planning_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch, output_of: OutputOf) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    planning, refusal = output_of(
        "train", "-m", "data=synthetic", "optimizer.lr=1e-2,1e-1,-1", "out=nowhere", code=2
    ).rsplit("\x1b[2K", 1)
    assert "planning 3 points" in planning
    assert refusal.endswith("lab: optimizer.lr must be above 0, not -1\n")


@pytest.mark.skipif(sys.platform == "win32", reason="has no such server")
def test_the_server_of_jobs_ignores_an_interrupt_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or its imports, and those of its jobs, would end in tracebacks."""
    from multiprocessing import forkserver

    signals, seen = (signal.SIGINT, signal.SIGTERM), []
    before = [signal.getsignal(number) for number in signals]
    monkeypatch.setattr(forkserver, "ensure_running", lambda: seen.extend(map(signal.getsignal, signals)))
    machine.clean_process_context()
    assert seen == [signal.SIG_IGN, signal.SIG_IGN]
    assert [signal.getsignal(number) for number in signals] == before


@pytest.mark.parametrize(
    ("seeds", "text"),
    [([0, 1, 2], "0-2"), ([4], "4"), ([1, 0], "0,1"), ([3, 4, 5, 9, 9, 11, 12], "3-5,9,11,12"), ([], "")],
)
def test_seeds_are_told_as_ranges(seeds: list[int], text: str) -> None:
    assert ranges(seeds) == text


def test_clock() -> None:
    assert [clock(seconds) for seconds in (0, 59.4, 75, 3675)] == ["0:00", "0:59", "1:15", "1:01:15"]


def test_a_fleet_of_several_arms_says_so() -> None:
    trees = [tree(f"optimizer.eps={eps}", f"seed={seed}") for eps in (1e-8, 1e-6) for seed in (0, 1)]
    whole = points(trees)
    made = scene([whole[:2], whole[2:]], [(whole[0], 2.0)])
    assert [label for label, _ in made.fleets] == [f"width 16  epsilon 1e-8 and 1 more  seed {seed}" for seed in (0, 1)]
    assert made.earlier == [(("width 16  epsilon 1e-8", whole[0].config.optimizer.lr), 2.0)]


class Said(list[str]):
    """Lines, as they are said."""

    def __call__(self, text: str) -> None:
        self.append(text)


class Shown:
    """A screen that remembers what it last showed."""

    closed = 0

    def show(self, standings: Any, done: float, elapsed: float) -> None:
        self.standings, self.done, self.elapsed = standings, done, elapsed

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "READ_EVERY", 0.01)


@pytest.mark.usefixtures("quick")
def test_a_line_per_finished_fleet_and_each_note_once(tmp_path: Path) -> None:
    said, warned, shown = Said(), Said(), Shown()
    with ProgressMonitor(tmp_path, "plan", ["first", "second"], [1, 3], said, warned, shown):
        for index in (1, 0):
            sayer = ProgressWriter(tmp_path, "plan", index, 100, 1)
            sayer.note("lab: no network")
            sayer.end(f"val loss {index}", [2.0])
            time.sleep(0.1)
        assert said == ["1/2  second  0 s  val loss 1", "2/2  first  0 s  val loss 0"]
    assert warned == ["lab: no network"]
    assert len(said) == 2
    assert (shown.done, shown.closed) == (1.0, 1)
    assert not list(tmp_path.glob("plans/*.progress"))


def test_what_is_garbled_is_not_heard(tmp_path: Path) -> None:
    shown = Shown()
    watcher = ProgressMonitor(tmp_path, "plan", ["first", "second"], [1, 1], Said(), Said(), shown)
    whole = {"step": 1, "steps": 2, "seconds": 1, "rate": 0, "evaluation": 0, "losses": [NAN], "notes": []}
    whole["verdict"] = None
    plans.write_progress(tmp_path, "plan", 1, FleetProgress(**whole))
    plans.write_progress(tmp_path, "plan", 99, FleetProgress(**whole))
    place = tmp_path / "plans" / "plan.progress"
    (place / "1 (copy)").write_text("x")
    (place / "2").mkdir()
    for text in (json.dumps(whole)[:-9], "[]", json.dumps({**whole, "losses": ["x"]})):
        (place / "0").write_text(text)
        watcher.report()
        assert list(shown.standings) == [1], text
    assert (shown.done, shown.standings[1].diverged) == (0.25, 1)


class Losses:
    """Losses on a device, and how often they were copied off it."""

    copied = 0
    device = SimpleNamespace(type="cpu")

    def tolist(self) -> list[float]:
        Losses.copied += 1
        return [1.0, NAN]


def test_a_fleet_speaks_seldom_and_copies_losses_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(Losses, "copied", 0)
    sayer, written = ProgressWriter(tmp_path, "plan", 0, 1000, 2), []
    sayer.write()
    monkeypatch.setattr(plans, "write_progress", lambda *said: written.append(said[-1]))
    for step in range(1000):
        now += 0.01
        values: Any = {("train_loss", ""): Losses()} if step % 25 == 0 else {}
        sayer.update(StepResult(step, step, values, None))
    assert len(written) == Losses.copied == 20
    assert str(written[-1].losses) == "[1.0, nan]"
    assert written[-1].rate == pytest.approx(100)
    assert (written[-1].step, written[-1].steps, written[-1].verdict) == (999, 1000, None)


@pytest.mark.parametrize(("device", "said"), [("cpu", "busy machine: 4 % of a core"), ("cuda", "")])
def test_a_fleet_says_what_share_of_a_core_it_has(
    device: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, spent = 100.0, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "process_time", lambda: spent)
    monkeypatch.setattr(Losses, "device", SimpleNamespace(type=device))
    sayer = ProgressWriter(tmp_path, "plan", 0, 100, 2)
    for step in range(4):
        now, spent = now + 1.0, spent + (0.04 if step > 1 else 0.9)
        sayer.update(StepResult(step, step, {("train_loss", ""): cast(Any, Losses())}, None))
        if step == 1:
            assert busy(plans.read_progress(tmp_path, "plan")) == ""
    standing = plans.read_progress(tmp_path, "plan")
    assert busy(standing) == said
    assert summary(standing, 1, 0.5, 10.0).endswith(said or "left")
    assert busy({0: standing[0]._replace(verdict="it has ended")}) == ""


def test_losses_of_halves_stand_in_their_places(tmp_path: Path) -> None:
    """A fleet that is halved begins anew: its rate is not counted backwards, and nobody stands in another's place."""
    import torch

    def values(*losses: float) -> dict[tuple[str, str], Any]:
        return {("train_loss", ""): torch.tensor(losses)}

    sayer = ProgressWriter(tmp_path, "plan", 0, 100, 3)
    sayer.update(StepResult(50, 50, values(1.0, 2.0, 3.0), None))
    sayer.write()
    sayer.update(StepResult(1, 1, values(4.0, 5.0), None), 1)
    sayer.note("halved")
    said = plans.read_progress(tmp_path, "plan")[0]
    assert list(said.losses) == [1.0, 4.0, 5.0]
    assert said.rate >= 0
    sayer.end("1 failed", [1.0, None, 2.0])
    said = plans.read_progress(tmp_path, "plan")[0]
    assert (list(said.losses), said.diverged) == ([1.0, None, 2.0], 0)


def test_the_held_out_loss_goes_before_the_training_loss(tmp_path: Path) -> None:
    import torch

    def told(**losses: float) -> float:
        whole = losses.pop("whole", None)
        values = {(probe, ""): torch.tensor([loss]) for probe, loss in losses.items()}
        sayer = ProgressWriter(tmp_path, "plan", 0, 10, 1)
        sayer.update(StepResult(1, 1, values, None if whole is None else torch.tensor([whole])))
        sayer.note("now")
        return float(plans.read_progress(tmp_path, "plan")[0].losses[0])

    assert told(train_loss=1, val_loss=2, whole=3) == 3
    assert told(train_loss=1, val_loss=2) == 2
    assert told(train_loss=1) == 1


# In a terminal: a process of its own at the end of a pseudo-terminal.

SWEEP = ["train", "-m", "data=synthetic", "validation=short", "model.width=16", "optimizer.lr=1e-3,1e30", "out=two"]


class Teletype:
    """A command line at a terminal of eighty columns."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.master, slave = pty.openpty()
        environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
        command = [sys.executable, "-m", "lab", *words]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment)
        os.close(slave)

    def read(self) -> Iterator[str]:
        """What appears, piece by piece, until the program ends."""
        with open(self.master, "rb", buffering=0) as terminal:
            try:
                while piece := terminal.read(65536):
                    yield piece.decode(errors="replace")
            except OSError:  # how Linux says that the other end is closed
                return


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
@pytest.mark.parametrize("launcher", ["local", "basic"])
def test_in_a_terminal_a_block_comes_and_goes(launcher: str, tmp_path: Path) -> None:
    terminal = Teletype(tmp_path, *SWEEP, "steps=300", f"hydra/launcher={launcher}")
    fleets = min(2, cores()) if launcher == "local" else 1  # of two runs
    text = "".join(terminal.read())
    assert terminal.process.wait() == 0
    assert "loss so far" in text
    assert re.search(r"\b\d+/300 +\d", text), "no fleet under way was seen"
    after = text.rsplit("loss so far", 1)[1]
    assert "\x1b[?25h" in after
    assert [text.count(f"{ended}/{fleets}  width 16 depth 2") for ended in range(1, fleets + 1)] == [1] * fleets
    assert "2 trained, 0 already there, 1 diverged, 0 failed" in after


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_an_interrupted_terminal_is_left_clean(tmp_path: Path) -> None:
    terminal = Teletype(tmp_path, *SWEEP, "steps=100000")
    text, interrupted = "", False
    for piece in terminal.read():
        text += piece
        if "/100000 " in text and not interrupted:
            terminal.process.send_signal(signal.SIGINT)
            interrupted = True
    assert terminal.process.wait() == 130
    assert text.endswith("interrupted; the same command trains what is missing\r\n")
    assert "\x1b[?25h" in text.rsplit("loss so far", 1)[1]


@pytest.mark.slow
def test_without_a_terminal_nothing_is_drawn_and_rich_is_not_loaded(tmp_path: Path) -> None:
    program = "import sys; from lab.__main__ import main; code = main(); sys.exit(code or 'rich' in sys.modules)"
    words = [sys.executable, "-c", program, *SWEEP, "steps=30", "hydra/launcher=basic"]
    told = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (told.returncode, told.stderr) == (0, "")
    assert re.match(
        r"1/1  width 16 depth 2  \S+  lr 0.001..1e\+30  seed 0  2 runs  \d+ s  val loss \S+, 1 diverged\n", told.stdout
    )
    assert "\x1b" not in told.stdout
