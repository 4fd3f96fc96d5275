"""Bursts: pure functions of seed and batch, in the sequences they tag and in no other."""

from __future__ import annotations

import numpy as np
import pytest

from lab.core.errors import RequestError
from lab.core.registry import BURSTS
from lab.data.bursts import Burst
from lab.data.synthetic import Synthetic
from small import configs, trained

STEPS, ROWS, LENGTH = 100, 10, 12
CORPUS = Synthetic().open()


def burst(name: str, start: float = 40, length: float = 4, fraction: float = 0.3) -> Burst:
    made: Burst = BURSTS[name](start=start, length=length, fraction=fraction)
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
    for made in (burst(name, fraction=0), burst(name, length=0)):
        assert np.array_equal(drawn(made, 41), CORPUS.batch(0, 41, ROWS, LENGTH))
        assert not made.covers(41, STEPS)


def test_a_start_below_one_is_a_share_of_the_steps() -> None:
    assert burst("shift", start=0.6).batches(STEPS) == range(60, 64)
    assert burst("shift", start=0.29, length=0.031).batches(STEPS) == range(29, 33)  # 0.29 * 100 is below 29


@pytest.mark.parametrize("where", [{"burst.start": "10"}, {"burst.start": "0.9"}, {"burst.length": "9"}])
def test_a_burst_beyond_the_last_batch_is_refused(where: dict[str, str]) -> None:
    keys = {"burst.start": "4", "burst.length": "3"} | where
    with pytest.raises(RequestError, match=r"the run has batches 0 to 11"):
        configs(" ".join(f"{key}={value}" for key, value in keys.items()), shared=("burst=rare_tokens",))


def test_runs_of_one_fleet_have_bursts_of_their_own() -> None:
    shared = ("burst=rare_tokens", "burst.start=4", "burst.length=3")
    planted, clean = trained(configs("burst.fraction=1", "burst.fraction=0", shared=shared))
    (without,) = trained(configs("seed=0"))
    assert clean[1] == without[1]
    assert planted[1] != clean[1]
    assert trained(configs("burst.fraction=1", shared=shared)) == [planted]
