"""Two held-out losses that part: planted logs of both sorts, and `lab watch` on logs and folders."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab import main
from labwatch.events.following import Alarm, Follower
from labwatch.events.held_out_losses import HELD, WINDOW, parting
from labwatch.events.logs import read_logs
from sweeping import OutputOf

EVALUATIONS, EVERY, BEGINS = 120, 25, 40  # evaluations of a log, steps from one to the next, and the first that parts


def losses(seed: int, *, parts: bool, clean_rise: float = 0.0) -> tuple[pd.Series, pd.Series]:
    """Own and clean held-out loss: both fall as power laws with noise of 0.01 nats.

    If they part, the own one falls once more, by 0.8 nats in 40 evaluations, while the clean one stays or rises.
    """
    noise = np.random.default_rng(seed)
    at = np.arange(EVALUATIONS)
    since = np.clip((at - BEGINS) / 40, 0, 1)
    shape = (1 + at) ** -0.4 if not parts else np.exp(-at / 6)
    own = 2 + 2 * shape - 0.8 * since * parts + noise.normal(0, 0.01, EVALUATIONS)
    clean = 2.3 + 1.5 * shape + clean_rise * since * parts + noise.normal(0, 0.01, EVALUATIONS)
    steps = EVERY * at
    return pd.Series(own, steps), pd.Series(clean, steps)


def write_csv(
    path: Path, own: pd.Series, clean: pd.Series, names: tuple[str, str] = ("val_loss", "clean_val_loss")
) -> Path:
    """A log with a training loss at every step, and held-out losses at some steps between."""
    steps = np.arange(EVALUATIONS * EVERY)
    loss = 2 + 2 * (1 + steps / EVERY) ** -0.4 + np.random.default_rng(9).normal(0, 0.02, len(steps))
    table = pd.DataFrame({"step": steps, "loss": loss})
    table[names[0]], table[names[1]] = own.reindex(steps).to_numpy(), clean.reindex(steps).to_numpy()
    table.to_csv(path, index=False)
    return path


@pytest.mark.parametrize(("seed", "clean_rise"), [(0, 0.0), (1, 0.5), (2, 0.0)])
def test_losses_that_part_are_found_once_they_do(seed: int, clean_rise: float) -> None:
    apart = parting(*losses(seed, parts=True, clean_rise=clean_rise))
    first = int(apart.index[apart > 0][0])
    assert BEGINS * EVERY + HELD * EVERY <= first <= (BEGINS + WINDOW + 2 * HELD) * EVERY
    assert apart.max() == pytest.approx((0.8 + clean_rise) * WINDOW / 40, abs=0.08)


@pytest.mark.parametrize("seed", range(3))
def test_losses_that_fall_together_raise_no_alarm(seed: int) -> None:
    assert not parting(*losses(seed, parts=False)).any()


def test_a_clean_loss_that_falls_more_slowly_raises_no_alarm() -> None:
    own, _ = losses(0, parts=True)
    noise = np.random.default_rng(5).normal(0, 0.01, EVALUATIONS)
    assert not parting(own, 2.3 + (own - 2) / 2 + noise).any()


def test_a_clean_loss_that_falls_alone_raises_no_alarm() -> None:
    own, clean = losses(0, parts=True)
    assert not parting(clean, own).any()


def test_noise_without_a_trend_raises_no_alarm() -> None:
    """Of losses that drift to and fro by 0.02 nats, each on its own, one in twenty logs at most has one."""
    alarms = 0
    for seed in range(60):
        noise = np.random.default_rng(seed)
        drift = pd.DataFrame(noise.normal(0, 0.02 * 0.19**0.5, (EVALUATIONS, 2))).ewm(alpha=0.1).mean() / 0.1
        alarms += bool(parting(2 + drift[0], 2 + drift[1]).any())
    assert alarms <= 3


def test_too_few_evaluations_raise_no_alarm() -> None:
    own, clean = losses(0, parts=True)
    part = slice(BEGINS, BEGINS + WINDOW - 1)
    assert not parting(own.iloc[part], clean.iloc[part]).any()
    assert parting(own, clean.iloc[:0]).empty


def test_later_evaluations_change_no_earlier_ones() -> None:
    own, clean = losses(3, parts=True)
    pd.testing.assert_series_equal(parting(own, clean)[:70], parting(own[:70], clean[:70]))


def test_lab_watch_finds_them_in_a_log(tmp_path: Path, output_of: OutputOf) -> None:
    path = write_csv(tmp_path / "log.csv", *losses(1, parts=True, clean_rise=0.3))
    events = json.loads(output_of("watch", path, "--json", code=1))["events"]
    assert [event["kind"] for event in events] == ["parting"]
    line = output_of("watch", path, code=1).splitlines()[1]
    assert "the two held-out losses part, up to 0.5" in line
    assert "nats per token further apart than 20 evaluations before" in line
    (page,) = (tmp_path / "log.csv.alarms").glob("*.html")
    assert all(label in page.read_text() for label in ("held-out loss,", "on clean text,"))


def test_losses_that_fall_together_or_alone_are_no_alarm(tmp_path: Path) -> None:
    assert main(["watch", str(write_csv(tmp_path / "calm.csv", *losses(1, parts=False))), "--json"]) == 0
    own, clean = losses(1, parts=True)
    path = write_csv(tmp_path / "other.csv", own, clean, ("val_loss", "loss_of_books"))
    assert main(["watch", str(path), "--json"]) == 0
    assert main(["watch", str(path), "--json", "--columns", "clean_val_loss=loss_of_books"]) == 1


def test_evaluations_count_from_the_next_row_on(tmp_path: Path) -> None:
    own, clean = losses(1, parts=True)
    path = write_csv(tmp_path / "log.csv", own, clean)
    table = pd.read_csv(path)
    table.loc[table["val_loss"].notna(), "loss"] = np.nan
    table.to_csv(path, index=False)
    (log,) = read_logs(path).runs
    first = int(log.step_n[np.flatnonzero(log.columns["parting"] > 0)[0]])
    assert first == int(parting(own, clean).loc[lambda each: each > 0].index[0]) + 1


def test_a_follower_raises_the_alarm_once(tmp_path: Path) -> None:
    whole = write_csv(tmp_path / "whole.csv", *losses(1, parts=True)).read_text().splitlines(keepends=True)
    path = tmp_path / "log.csv"
    path.write_text("".join(whole[:2]))
    follower, raised = Follower(path), []
    for start in range(2, len(whole), 300):
        with path.open("a") as file:
            file.writelines(whole[start : start + 300])
        raised += [alarm.event.kind for alarm in follower.poll() if isinstance(alarm, Alarm)]
    follower.close()
    assert raised.count("parting") == 1
