"""Bursts: pure functions of seed and batch, in the sequences they tag and in no other."""

from __future__ import annotations

import numpy as np
import pytest

from lab import Fleet
from lab.core.registry import BURSTS
from lab.data.bursts import Burst
from lab.data.synthetic import Synthetic
from lab.training.identity import columns, identify
from lab.training.loop import train
from small import configs, trained

STEPS, ROWS, LENGTH = 100, 10, 12
CORPUS = Synthetic().open()


def burst(name: str, start: float = 40, length: float = 4, fraction: float = 0.3, repeats: float = 1) -> Burst:
    made: Burst = BURSTS[name](start=start, length=length, fraction=fraction, repeats=repeats)
    return made


def drawn(made: Burst, batch: int, seed: int = 0) -> np.ndarray:
    return made.batch(CORPUS, seed, batch, ROWS, LENGTH, STEPS)


@pytest.mark.parametrize("name", sorted(BURSTS))
def test_a_burst_changes_its_own_sequences_in_its_own_batches(name: str) -> None:
    made = burst(name)
    for batch in (39, 40, 43, 44):
        plain = CORPUS.batch(0, batch, ROWS, LENGTH)
        changed = (drawn(made, batch) != plain).any(1)
        tagged = made.sources(0, batch, ROWS, STEPS)
        assert not changed[~tagged].any()
        assert changed[tagged].all()
        expected = 0 if batch in (39, 44) else 1 if (name, batch) == ("ramped_shift", 40) else 3
        assert tagged.sum() == expected
    assert np.array_equal(drawn(made, 41), drawn(made, 41))
    assert drawn(made, 41).max() < CORPUS.vocabulary
    assert not np.array_equal(made.sources(0, 43, 64, STEPS), made.sources(1, 43, 64, STEPS))


@pytest.mark.parametrize("name", sorted(BURSTS))
def test_a_burst_of_no_sequences_or_no_batches_changes_nothing(name: str) -> None:
    for made in (burst(name, fraction=0), burst(name, length=0), burst(name, length=0, repeats=10**15)):
        assert np.array_equal(drawn(made, 41), CORPUS.batch(0, 41, ROWS, LENGTH))
        assert not made.covers(41, STEPS)


def test_a_start_below_one_is_a_share_of_the_steps() -> None:
    assert burst("shift", start=0.6).batches(STEPS) == (range(60, 64),)
    assert burst("shift", start=0.29, length=0.031).batches(STEPS) == (range(29, 33),)  # 0.29 * 100 is below 29


@pytest.mark.parametrize("name", sorted(BURSTS))
def test_a_burst_that_repeats_changes_its_batches_alone(name: str) -> None:
    made, once = burst(name, fraction=1, repeats=3), burst(name, fraction=1)
    assert made.batches(STEPS) == (range(40, 44), range(60, 64), range(80, 84))
    for batch in range(36, STEPS):
        plain = CORPUS.batch(0, batch, ROWS, LENGTH)
        is_changed = not np.array_equal(drawn(made, batch), plain)
        assert is_changed == made.covers(batch, STEPS) == (batch % 20 < 4 and batch >= 40), batch
    assert np.array_equal(drawn(made, 42), drawn(once, 42))
    assert not np.array_equal(drawn(made, 62), drawn(made, 42))  # drawn by its own batch
    assert [made.share(batch, STEPS) for batch in (40, 43)] == [made.share(batch, STEPS) for batch in (80, 83)]


def test_bursts_are_spread_over_the_rest_of_the_run() -> None:
    batches = burst("shift", start=0.1, length=2, repeats=7).batches(STEPS)
    assert [each.start for each in batches] == [10, 22, 35, 48, 61, 74, 87]
    assert burst("shift", start=40, length=0.03, repeats=20).batches(STEPS)[-1] == range(97, 100)


def test_bursts_that_just_fill_the_rest_of_the_run_are_taken() -> None:
    shared = ("bad_batches=rare_tokens", "bad_batches.start=4")
    (run,) = configs("bad_batches.length=4 bad_batches.repeats=2", shared=shared)
    assert [len(each) for each in run.bad_batches.entry.batches(run.steps)] == [4, 4]


def test_conflicting_labels_rename_every_second_token() -> None:
    windows_nt = np.arange(8).reshape(1, 8)
    drawn_nt = np.zeros((1, 8), dtype=np.uint64)
    changed_nt = BURSTS["conflicting_labels"](0, 1, 1).change(windows_nt, drawn_nt, 256)
    assert (changed_nt == windows_nt)[0].tolist() == [True, False] * 4


def test_a_burst_that_comes_once_keeps_its_id() -> None:
    shared = ("bad_batches=shift", "bad_batches.start=3")
    once, said, thrice = configs("", "bad_batches.repeats=1", "bad_batches.repeats=3", shared=shared)
    assert "bad_batches.repeats" not in columns(once)
    assert columns(once) == columns(said)
    assert columns(thrice) == columns(once) | {"bad_batches.repeats": 3}
    assert identify(once, "")[1] == identify(thrice, "")[1]  # they may share a fleet


@pytest.mark.slow
def test_runs_of_one_fleet_have_bursts_of_their_own() -> None:
    shared = ("bad_batches=rare_tokens", "bad_batches.start=4", "bad_batches.length=3")
    planted, clean = trained(configs("bad_batches.fraction=1", "bad_batches.fraction=0", shared=shared))
    (without,) = trained(configs("seed=0"))
    assert sorted(clean[1]) == sorted(without[1])  # records sort their rows
    assert planted[1] != clean[1]
    assert trained(configs("bad_batches.fraction=1", shared=shared)) == [planted]


@pytest.mark.slow
def test_a_run_meets_each_of_its_bursts() -> None:
    repeats = ("bad_batches=huge_loss", "bad_batches.start=6", "bad_batches.repeats=3")
    armed = ("response=earlier_state", "response.snapshot_every=2", "response.snapshots=4")
    spans = ("response.rewind_weights=2", "response.rewind_moments=2")
    once, thrice = events("bad_batches.repeats=1", "", shared=repeats)
    assert once == [(6, "burst")]
    assert thrice == [(6, "burst"), (8, "burst"), (10, "burst")]
    (answered,) = events("", shared=(*repeats, *armed, *spans))
    assert [step for step, kind in answered if kind == "rewind_weights"] == [6]


def events(*per_run: str, shared: tuple[str, ...]) -> list[list[tuple[int, str]]]:
    """Step and kind of the bursts of each run, and of the changes of its state."""
    made = Fleet(configs(*per_run, shared=shared))
    for _ in train(made):
        pass
    assert made.control
    kinds = ("burst", "rewind_weights")
    return [[(event[0], event[2]) for event in log.events if event[2] in kinds] for log in made.control.logs]
