"""Learning rates that a sweep adds where its curves cross: how many, for which seeds, and that they repeat."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.analysis.crossings import crossing, halving_lrs
from lab.analysis.curves import points
from lab.analysis.runaway import crossings
from lab.records import store
from lab.sweeping.refinement import MOST, REFINED
from sweeping import lab

SIZE = ["data=synthetic", "validation=short", "model.width=16", "model.depth=1", "steps=24", "probes=all"]
TRAIN = ["train", "-m", "seed=0,1", "optimizer.lr=0.01,1,100", "intervention=[]", *SIZE, "hydra/launcher=basic"]
WIDTH = 0.3


@given(at=st.floats(1.1e-3, 0.9), width=st.floats(0.02, 0.3))
def test_halving_ends_in_a_narrow_bracket_after_as_many_rates_as_it_takes(at, width):
    lrs = [1e-3, 1e-2, 1e-1, 1.0]
    for _ in range(math.ceil(math.log2(1 / width)) + 1):
        found = crossing(lrs, [lr / at for lr in lrs], 1.0, log=True)
        more = halving_lrs([found, found], width)
        assert len(more) <= 1
        lrs += more
    assert not more
    assert found.low <= at <= found.high
    assert found.width <= width
    assert all(lr == float(f"{lr:.3g}") for lr in lrs)


def test_the_widest_bracket_comes_first_and_open_ones_are_left():
    seeds = [
        crossing([0.01, 0.1, 1], [0, 0, 9], 1),
        crossing([0.01, 0.02], [0, 9], 1),
        crossing([0.01, 0.1], [0, 0], 1),
    ]
    assert halving_lrs(seeds, 0.05) == [0.316, 0.0141]


@pytest.mark.slow
def test_a_refined_sweep_trains_all_seeds_at_the_same_rates_and_repeats_nothing(tmp_path: Path, capsys) -> None:
    assert lab(*TRAIN, "--refine", str(WIDTH), f"out={tmp_path / 'fine'}") == 0
    assert "at most 12 learning rates" in capsys.readouterr().err
    records = store.read(tmp_path / "fine")
    ended = points(records.runs)
    rates = ended.groupby("seed")["lr"].agg(set)
    assert rates["0"] == rates["1"]
    assert 3 < len(rates["0"]) <= 3 + MOST
    found = crossings(records, ended)
    crossed = [each for each in found.loc[found["quantity"].isin(REFINED), "crossing"] if not each.is_censored]
    assert crossed
    assert max(each.width for each in crossed) <= WIDTH
    assert lab(*TRAIN, "--refine", str(WIDTH), f"out={tmp_path / 'fine'}") == 0
    assert f"0 trained, {len(ended)} already there" in capsys.readouterr().out
    more = ",".join(map(str, sorted(rates["0"])))
    assert lab(*TRAIN, f"optimizer.lr={more}", f"out={tmp_path / 'plain'}") == 0
    assert set(store.read(tmp_path / "plain").runs["id"]) == set(records.runs["id"])
    file = tmp_path / "mine.yaml"
    file.write_text(f"hydra: {{sweeper: {{refine: {WIDTH}, params: {{optimizer.lr: '0.01,1,100'}}}}}}\n")
    words = [word for word in TRAIN[2:] if not word.startswith("optimizer.lr")]
    assert lab("sweep", str(file), *words, f"out={tmp_path / 'fine'}") == 0
    assert f"0 trained, {len(ended)} already there" in capsys.readouterr().out
