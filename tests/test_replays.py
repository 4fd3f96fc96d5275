"""`lab watch LOG --replay LOG`: faults that look like a loss spike are told apart from one, from two logs alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab import main
from planted import cards, heard, write
from sweeping import OutputOf
from test_watch import bump, calm

STEPS = 1000
QUIET = calm()
SPIKED = QUIET + bump(3.0)


def log(path: Path, loss: np.ndarray, **columns: np.ndarray) -> Path:
    """A log of all digits, as long as its losses."""
    columns = {name: values[: len(loss)] for name, values in columns.items()}
    pd.DataFrame({"step": range(len(loss)), "loss": loss, **columns}).to_csv(path, index=False, na_rep="nan")
    return path


def cause(path: Path, run: Path, replay: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[int, str]]:
    """Steps and causes of loss spikes and departures."""
    code = main(["watch", str(run), "--replay", str(replay), "--json"])
    output = json.loads(capsys.readouterr().out)
    assert code == int(bool(output["events"]))
    return [(each["step"], each["cause"]) for each in [*output["events"], *output["departures"]]]


def micro_norms(**broken: float) -> dict[str, np.ndarray]:
    """Gradient norms of four micro-batches, some of which break at step 500."""
    norms = {f"micro_batch_norm_{n}": np.random.default_rng(n).lognormal(0, 0.1, STEPS) for n in range(4)}
    for name, value in broken.items():
        norms[name][500] = value
    return norms


BROKEN = np.where(np.arange(STEPS) >= 500, math.nan, QUIET)
LATER = np.arange(STEPS) >= 505
LAST_BITS = QUIET * np.where(np.arange(STEPS) >= 400, 1 + 1e-7, 1.0)
RERUN = SPIKED * np.random.default_rng(9).normal(1, 1e-3, STEPS)  # the same spike on a machine that rounds otherwise
ONE_BROKEN, ALL_BROKEN = {"micro_batch_norm_2": math.nan}, dict.fromkeys(micro_norms(), math.nan)
DOUBLES: dict[str, tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], tuple[int, str]]] = {
    "a spike": (SPIKED, SPIKED, {}, (500, "spike")),
    "a spike on another machine": (SPIKED, RERUN, {}, (500, "spike")),
    "a loss that is no number twice": (BROKEN, BROKEN, micro_norms(**ONE_BROKEN), (500, "spike")),
    "a spike that diverges only once": (np.where(LATER, math.nan, SPIKED), SPIKED, {}, (500, "spike")),
    "a spike that returns at three tenths": (SPIKED, QUIET + bump(0.9), {}, (500, "corrupted_state")),
    "one broken micro-batch": (BROKEN, QUIET, micro_norms(**ONE_BROKEN), (500, "faulty_micro_batch")),
    "all micro-batches broken": (BROKEN, QUIET, micro_norms(**ALL_BROKEN), (500, "corrupted_state")),
    "a flipped bit without a spike": (QUIET + 0.03 * (np.arange(STEPS) > 600), QUIET, {}, (601, "corrupted_state")),
    "a spike that hangs on the last bits": (LAST_BITS + bump(3.0), QUIET, {}, (500, "rounding")),
    "parts that do not add up": (SPIKED, SPIKED, {"parts_error": np.full(STEPS, 0.5)}, (500, "scaling_bug")),
    "a killed or hanging process": (QUIET[:700], QUIET, {}, (699, "stopped")),
    "a spike without a replay": (SPIKED, QUIET[:500], {}, (500, "not_replayed")),
}


@pytest.mark.parametrize("name", DOUBLES)
def test_each_double_has_its_cause(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, replayed, columns, expected = DOUBLES[name]
    run, replay = log(tmp_path / "log.csv", loss, **columns), log(tmp_path / "replay.csv", replayed)
    assert cause(tmp_path, run, replay, capsys) == [expected]


def test_a_log_that_its_replay_repeats_has_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = np.where(np.arange(STEPS) % 5, math.nan, 1.0)
    run, replay = (log(tmp_path / name, QUIET, lr=rates) for name in ("log.csv", "replay.csv"))
    assert cause(tmp_path, run, replay, capsys) == []


def test_the_line_names_the_cause_and_what_it_means(tmp_path: Path, output_of: OutputOf) -> None:
    run, replay = log(tmp_path / "log.csv", SPIKED), log(tmp_path / "replay.csv", QUIET)
    line = next(
        line for line in output_of("watch", run, "--replay", replay, code=1).splitlines() if "loss spike" in line
    )
    assert ", likely cause: corrupted_state (a fault of memory or checkpoint, since it does not return" in line
    assert "\ncut.csv step 699: departs from its replay, likely cause: stopped" in output_of(
        "watch", log(tmp_path / "cut.csv", QUIET[:700]), "--replay", replay
    )
    assert list(json.loads(output_of("watch", run, "--json", code=1))) == ["events", "notes"]


def test_the_page_of_a_run_links_one_that_compares_it_with_its_replay(tmp_path: Path, output_of: OutputOf) -> None:
    run, replay = log(tmp_path / "log.csv", SPIKED), log(tmp_path / "replay.csv", QUIET)
    output_of("watch", run, code=1)
    page = tmp_path / "log.csv.alarms" / "log.csv.html"
    assert "<a href" not in page.read_text(encoding="utf-8")
    output_of("watch", run, "--replay", replay, code=1)
    assert '<a href="log.csv.compared.html">' in page.read_text(encoding="utf-8")
    assert "<h2>B against A</h2>" in page.with_name("log.csv.compared.html").read_text(encoding="utf-8")
    told = output_of("watch", run, replay, code=2)
    assert f"lab watch {run} --replay {replay}" in told
    assert f"lab compare {run} {replay}" in told


def test_runs_of_folders_are_paired_by_their_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output_of: OutputOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list(cards(arms=("z_loss",), widths=(32,), lrs=(1e-3,), seeds=(0, 1)))
    once = write(tmp_path / "once", runs, every=4)
    changed = lambda run, **kept: [  # noqa: E731
        (step, probe, where, value + (run["seed"] == 1 and probe == "train_loss" and step == 200))
        for step, probe, where, value in heard(run, **kept)
    ]
    monkeypatch.setattr("planted.heard", changed)
    again = write(tmp_path / "again", runs, every=4)
    (departed,) = cause(tmp_path, again, once, capsys)
    assert departed == (200, "corrupted_state")
    assert "no results folder or log" in output_of("watch", once, "--replay", tmp_path / "none.csv", code=2)


OTHER_BATCHES = calm(77)
MACHINE = np.random.default_rng(8).normal(1, 1e-3, STEPS)  # how another machine rounds


def test_another_run_is_judged_only_as_long_as_it_has_the_same_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parted = np.where(np.arange(STEPS) < 200, QUIET, OTHER_BATCHES) * MACHINE
    run = log(tmp_path / "log.csv", SPIKED + bump(2.0, 700) + bump(2.0, 900))
    replay = log(tmp_path / "replay.csv", parted)
    *spikes, (step, departs) = cause(tmp_path, run, replay, capsys)
    assert spikes == [(at, "other_batches") for at in (500, 700, 900)]
    assert departs == "other_batches"
    assert step == pytest.approx(200, abs=6)
    early = log(tmp_path / "early.csv", QUIET + bump(2.0, 100, 5) + bump(2.0, 700))
    assert [word for _, word in cause(tmp_path, early, replay, capsys)] == [
        "not_batch",
        "other_batches",
        "other_batches",
    ]
    unrelated = log(tmp_path / "unrelated.csv", calm(78))
    assert cause(tmp_path, unrelated, replay, capsys) == [(0, "other_batches")]
    at_once = log(tmp_path / "at_once.csv", calm(78) + bump(8.0, 6, 3))
    assert cause(tmp_path, at_once, replay, capsys) == [(6, "other_batches"), (0, "other_batches")]


def test_another_machine_on_the_same_batches_is_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replay = log(tmp_path / "replay.csv", QUIET * MACHINE)
    assert cause(tmp_path, log(tmp_path / "log.csv", QUIET), replay, capsys) == []
    assert cause(tmp_path, log(tmp_path / "spiked.csv", SPIKED), replay, capsys) == [(500, "not_batch")]


def test_a_fault_that_changes_the_noise_for_good_is_not_taken_for_other_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = np.where(np.arange(STEPS) < 500, QUIET, OTHER_BATCHES + 1.0)
    run, replay = log(tmp_path / "log.csv", broken), log(tmp_path / "replay.csv", QUIET)
    assert cause(tmp_path, run, replay, capsys) == [(500, "corrupted_state")]


def other_seed(seed: int) -> np.ndarray:
    """The loss of another seed of the model on the same batches."""
    return QUIET * np.random.default_rng(seed).normal(1, 2e-3, STEPS)


def twin_causes(tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Path, *twins: Path) -> list[tuple[int, str]]:
    words = [word for twin in twins for word in ("--replay", str(twin))]
    assert main(["watch", str(run), *words, "--json"]) == 1
    return [(each["step"], each["cause"]) for each in json.loads(capsys.readouterr().out)["events"]]


@pytest.mark.parametrize(
    ("sharing", "expected"), [(0, "not_batch"), (1, "not_batch"), (2, "batch"), (3, "batch"), (4, "batch")]
)
def test_an_event_that_most_twins_lack_is_not_the_batchs(
    sharing: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four runs of other seeds on the same batches; some have a spike two steps later, of another size."""
    twins = [
        log(tmp_path / f"twin{n}.csv", other_seed(n) + (bump(0.8, 502) if n < sharing else bump(3.0, 800)))
        for n in range(4)
    ]
    assert twin_causes(tmp_path, capsys, log(tmp_path / "log.csv", SPIKED), *twins) == [(500, expected)]


def test_twins_that_end_before_the_event_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = log(tmp_path / "log.csv", SPIKED)
    short = [log(tmp_path / f"short{n}.csv", other_seed(n)[:300]) for n in range(2)]
    assert twin_causes(tmp_path, capsys, run, *short) == [(500, "not_replayed")]
    whole = log(tmp_path / "whole.csv", other_seed(5) + bump(1.0))
    assert twin_causes(tmp_path, capsys, run, *short, whole) == [(500, "batch")]


def test_runs_of_a_table_are_twins_of_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "chart.csv"
    columns = {f"seed {n} - train/loss": other_seed(n) for n in range(3)}
    pd.DataFrame({"Step": range(STEPS), **columns}).to_csv(table, index=False)
    assert twin_causes(tmp_path, capsys, log(tmp_path / "log.csv", SPIKED), table) == [(500, "not_batch")]
