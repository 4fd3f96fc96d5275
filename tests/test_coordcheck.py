"""A coordinate check passes what keeps updates in scale, fails what does not, and says which coordinate grew."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from lab.__main__ import main
from lab.analysis.rendering import layout
from lab.core.registry import PARAMETRIZATIONS
from lab.core.roles import Role
from lab.features.coordcheck import command as coordcheck
from lab.model.parametrization import Factors, MuPIntermediate
from lab.sweeping import launch
from lab.training.config import run_config
from lab.training.fleet import Fleet

# A learning rate at which the embedding forgets at once how it began, which no parametrization of the paper rescales.
SMALL = ["model.width=32,128", "model.depth=1", "batch_size=8", "optimizer.lr=1e-1"]


pytestmark = pytest.mark.usefixtures("here")


def lab(*words: str) -> int:
    """Exit code of a check."""
    sys.argv = ["lab", "coordcheck", *words]
    return main(["coordcheck", *words])


def checked(*words: str) -> coordcheck.CoordinateCheck:
    return coordcheck.check_coordinates(launch.compose_points([*coordcheck.DEFAULTS, *SMALL, *words]))


@pytest.mark.slow
def test_standard_fails_and_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(*SMALL, "out=here") == 1
    said = capsys.readouterr().out.splitlines()
    assert {"block0.scores", "block0.block_output"} <= {line.split()[0] for line in said if line.endswith("GROWS")}
    assert said[-1].startswith("standard fails by block0.query block0.key ")
    assert said[-1].endswith("; here")
    table = pd.read_csv("here/coordcheck.csv")
    assert set(table["width"]) == {32, 128}
    assert set(table["seed"]) == {0, 1, 2, 3, 4}
    assert set(table["step"]) == set(range(1, 11))
    kinds = {"query", "key", "scores", "block_output"}
    assert set(table["coordinate"]) == {*(f"block0.{kind}" for kind in kinds), "logits"}
    assert Path("here/coordcheck.svg").read_text().startswith("<svg")


def test_mup_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(*SMALL, "parametrization=mup_full") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("mup_full passes ")


@pytest.mark.slow
def test_a_forgotten_learning_rate_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(MuPIntermediate):
        """As it should be, but for the learning rate of one role."""

        def factors(self, role_of_weight: Role, fan_in: int, width: int) -> Factors:
            right = super().factors(role_of_weight, fan_in, width)
            return replace(right, lr=1.0) if role_of_weight is Role.HEAD else right

    monkeypatch.setitem(PARAMETRIZATIONS._entries, "mup_intermediate", Forgetful)
    check = checked("parametrization=mup_intermediate")
    assert not check.passed
    judged = coordcheck.slopes(check.changes)
    assert "logits" in set(judged.loc[~judged["holds"], "coordinate"])


def test_a_change_is_that_of_what_reaches_the_hook_points() -> None:
    points = launch.compose_points([*coordcheck.DEFAULTS, *SMALL, "model.width=32", "seed=0", "steps=1"])
    (config,) = (run_config(tree) for tree in points)
    rows = {row["coordinate"]: row["change"] for row in coordcheck.changes([config])}
    fleet = Fleet([config])
    tokens_rbt = fleet.evaluation.held_out_nt[:8, :-1].expand(1, -1, -1)

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return fleet.model(tokens_rbt)[0]

    before = logits()
    fleet.step(0)
    assert rows["logits"] == pytest.approx(float((logits() - before).square().mean().sqrt()), rel=1e-5)


def planted(power: float, noise: float, seeds: int = 4) -> pd.DataFrame:
    """Changes that follow a power of the width, seed by seed a little more or less."""
    draw = np.random.default_rng(0).normal(0, noise, seeds)
    return pd.DataFrame(
        [
            {
                "width": width,
                "depth": 1,
                "seed": seed,
                "step": step,
                "coordinate": "logits",
                "change": step * width**slope,
            }
            for seed, slope in enumerate(power + draw - draw.mean())
            for width in (32, 64, 128)
            for step in (1, 2)
        ]
    )


DEPTHS = ["model.width=16", "model.depth=2,8", "batch_size=4", "seq_len=32", "seed=0,1,2"]


@pytest.mark.slow
def test_depth_fails_by_the_last_block_unless_branches_are_scaled(capsys: pytest.CaptureFixture[str]) -> None:
    """CompleteP at alpha 1 (arXiv:2505.01618): without it the changes of aligned branches add up."""
    assert lab(*DEPTHS) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("slope in depth")
    assert "last_block.block_output" in said[-1]
    assert set(pd.read_csv("runs/coordcheck/coordcheck.csv")["depth"]) == {2, 8}
    check = coordcheck.check_coordinates(
        launch.compose_points([*coordcheck.DEFAULTS, *DEPTHS, "intervention=[depth_scaling]"])
    )
    assert check.checked == "standard with depth_scaling"
    slopes = [coordcheck.slopes(pd.read_csv("runs/coordcheck/coordcheck.csv")), check.slopes]
    alone, scaled = (each.set_index("coordinate")["slope"]["last_block.block_output"] for each in slopes)
    assert scaled.high < 0.5 < 0.8 < alone.low


def test_the_whole_interval_of_a_power_lies_below_the_bound() -> None:
    (row,) = coordcheck.slopes(planted(0.1, 0.01)).itertuples()
    assert row.slope.mean == pytest.approx(0.1)
    assert row.holds
    assert not coordcheck.slopes(planted(0.5, 0.01))["holds"].any()
    assert not coordcheck.slopes(planted(0.1, 0.5))["holds"].any()  # nobody can tell
    assert coordcheck.slopes(planted(-1.0, 0.1))["holds"].all()


@pytest.mark.parametrize("broken", [np.nan, 0.0])
def test_a_change_that_is_no_number_or_none_does_not_hold(broken: float) -> None:
    changes = planted(0.0, 0.01)
    changes.loc[changes["seed"].eq(1) & changes["width"].eq(128), "change"] = broken
    assert not coordcheck.slopes(changes)["holds"].any()
    assert list(coordcheck.lines(changes))[-1].endswith("GROW")
    layout.svg(coordcheck.figure(changes), "broken")
