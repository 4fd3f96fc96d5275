"""What holds of any records: folders merge in any order, sensitivity is about differences of losses alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planted
from lab.analysis import Records, by_curve, curves, per_seed
from lab.analysis.sensitivity import PARTS, best_lr_fine, split, spread
from lab.records import store


def card(name: str, status: str, more: Any) -> dict[str, Any]:
    """A run's card is its id's alone, apart from whether it failed; some have columns that others lack."""
    extra = {"intervention.z_loss.coefficient": 0.5} if name < "c" else {"parametrization.base_width": 32}
    if status == "failed":
        return {"id": name, "status": status, "reason": "memory", **extra}
    loss = {"final_val_loss": math.nan if name == "b" else 2.0, "loss_at_init": 5.0}
    return {"id": name, "status": status, "data.path": more, **loss, **extra}


def leave(folder: Path, runs: dict[str, str], gathered: int) -> Path:
    """A folder with these runs, so many of them in its tables already."""
    store.open_folder(folder, "eager")
    for place, (name, status) in enumerate(runs.items()):
        rows = [] if status == "failed" else [(0, "train_loss", "", math.nan), (3, "grad_rms", f"block{name}", 0.1)]
        store.write_run(folder, card(name, status, f"text of {name}"), rows)
        if place == gathered:
            store.gather(folder)
    return folder


def alike(one: Records, other: Records) -> None:
    """The same runs and values, in whatever order of columns and rows of metrics."""
    pd.testing.assert_frame_equal(one.runs, other.runs, check_like=True)
    order = ["id", "step", "probe", "where"]
    both = [part.metrics.sort_values(order, ignore_index=True) for part in (one, other)]
    pd.testing.assert_frame_equal(*both)


folders = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["finished", "failed"]), min_size=1)


@pytest.mark.slow
@given(folders, folders, st.integers(0, 4), st.integers(0, 4))
def test_folders_overlay_in_any_order_and_any_number_of_times(
    a: dict[str, str], b: dict[str, str], some: int, more: int
) -> None:
    with TemporaryDirectory() as place:
        one, other = leave(Path(place) / "a", a, some), leave(Path(place) / "b", b, more)
        whole = curves.load(one, other)
        alike(curves.load(other, one), whole)
        alike(curves.load(other, one, one, other), whole)
        alike(curves.load(one, one), curves.load(one))
        best = {name: "finished" if "finished" in [p.get(name) for p in (a, b)] else "failed" for name in a | b}
        assert dict(zip(whole.runs["id"], whole.runs["status"], strict=True)) == best


@given(folders, st.integers(0, 6))
def test_gathering_again_changes_no_byte_and_nothing_that_is_read(runs: dict[str, str], some: int) -> None:
    with TemporaryDirectory() as place:
        folder = leave(Path(place), runs, some)
        before = store.read(folder)
        alike(store.gather(folder), before)
        tables = {path: path.read_bytes() for path in folder.glob("*.parquet")}
        alike(store.gather(folder), before)
        assert {path: path.read_bytes() for path in folder.glob("*.parquet")} == tables


loss = st.floats(-30, 30) | st.sampled_from([math.nan, math.inf, -math.inf])
curve_losses = st.lists(loss, min_size=2, max_size=len(planted.LRS))


def curve(losses: Sequence[float], at_init: float, factor: float = 1.0, shift: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "lr": planted.LRS[: len(losses)],
            "loss": factor * np.array(losses) + shift,
            "loss_at_init": factor * at_init + shift,
        }
    )


@given(curve_losses, st.floats(0.1, 20), st.floats(0.1, 10), st.floats(-50, 50), st.randoms())
def test_sensitivity_is_of_differences_alone(
    losses: list[float], at_init: float, factor: float, shift: float, order: Any
) -> None:
    plain = split(curve(losses, at_init))
    moved = curve(losses, at_init, factor, shift)
    found = split(moved.iloc[order.sample(range(len(losses)), len(losses))])
    assert found.total == pytest.approx(factor * plain.total, rel=1e-9, abs=1e-9)
    # which of two bests that rounding tells apart is the first is not for a shift to keep
    finite = sorted(min(loss, at_init) if math.isfinite(loss) else at_init for loss in losses)
    if finite[1] - finite[0] > 1e-9:
        assert found == pytest.approx([factor * part for part in plain], rel=1e-9, abs=1e-9)
        assert best_lr_fine(moved) == pytest.approx(best_lr_fine(curve(losses, at_init)), rel=1e-3)
    assert spread(moved) == pytest.approx(factor * spread(curve(losses, at_init)), rel=1e-9, abs=1e-9)


@given(curve_losses, st.floats(0.1, 20), st.data())
def test_a_loss_that_is_no_number_counts_as_untrained(losses: list[float], at_init: float, data: st.DataObject) -> None:
    place = data.draw(st.sampled_from(range(len(losses))))
    lost, untrained = list(losses), list(losses)
    lost[place], untrained[place] = data.draw(st.sampled_from([math.nan, math.inf, at_init + 7])), at_init
    assert split(curve(lost, at_init)) == split(curve(untrained, at_init))
    best = best_lr_fine(curve(untrained, at_init))
    assert best_lr_fine(curve(lost, at_init)) == pytest.approx(best, nan_ok=True)


@given(st.lists(st.floats(-3, 3) | st.just(math.nan), min_size=28, max_size=28), st.randoms())
def test_runs_and_seeds_may_come_in_any_order(changes: list[float], order: Any) -> None:
    cards = list(planted.cards(arms=["none"], widths=[32], seeds=range(4)))
    for one, change in zip(cards, changes, strict=True):
        one["final_val_loss"] += change
    mixed = order.sample(cards, len(cards))
    one, other = (by_curve(per_seed(curves.points(planted.table(some)))) for some in (cards, mixed))
    for part in PARTS:
        assert list(one[part]) == list(other[part])
    assert one[["best_lr", "eta_div"]].map(str).equals(other[["best_lr", "eta_div"]].map(str))
    points = curves.points(planted.table(cards)).sample(frac=1, random_state=order.randrange(99))
    backwards = by_curve(per_seed(points))  # the seeds in another order
    for part in PARTS:
        ours, theirs = one[part].iloc[0], backwards[part].iloc[0]
        assert theirs[:4] == pytest.approx(ours[:4])
        assert sorted(theirs.values) == sorted(ours.values)
