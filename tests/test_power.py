"""How many seeds a claim takes: against simulation, and as `lab power` says it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import planted
from lab.__main__ import main
from lab.analysis.judging.decision import ABOVE_ZERO, alpha_of, decide
from lab.analysis.statistics import student_t
from lab.report.power import POWER, seeds_for

CLAIM = "qk_layernorm_lowers_sensitivity"


@pytest.mark.parametrize(("effect", "reading"), [(1.0, 1), (0.6, 1), (1.0, 2)])
def test_so_many_seeds_decide_in_four_of_five_worlds_and_one_less_does_not(effect: float, reading: int) -> None:
    count = seeds_for(effect, 1.0, reading=reading)

    def share(seeds: int) -> float:
        worlds = np.random.default_rng(seeds).normal(effect, 1.0, (2000, seeds))
        words = [decide([student_t(values)], ABOVE_ZERO, reading=reading).verdict for values in worlds]
        return words.count("reproduced") / len(words)

    assert share(int(count)) > POWER - 0.03
    assert share(int(count) - 2) < POWER


def test_more_spread_a_smaller_effect_and_a_later_reading_take_more_seeds() -> None:
    usual = seeds_for(0.5, 1.0)
    assert usual < min(seeds_for(0.5, 1.2), seeds_for(0.4, 1.0), seeds_for(0.5, 1.0, reading=2))
    assert seeds_for(1.0, 2.0) == usual  # only their ratio counts
    assert alpha_of(2) < alpha_of(1)


def test_an_effect_on_the_wrong_side_takes_no_number_of_seeds() -> None:
    assert seeds_for(0.0, 1.0) == seeds_for(-1.0, 1.0) == math.inf
    assert seeds_for(1e-6, 1.0) == math.inf
    assert seeds_for(1.0, 0.0) == 3


def test_each_part_has_its_seeds_and_the_claim_those_of_the_hardest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted.write(tmp_path / "pilot", list(planted.cards()))
    assert main(["power", str(tmp_path / "pilot"), CLAIM, "--effect", "0.02"]) == 0
    first, head, *parts, pilot, last = capsys.readouterr().out.splitlines()
    assert first == "LR sensitivity is lower with qk-layernorm, at every size (Wortsman 2023, 1), in nats/token"
    assert head.split()[0] == "part"
    assert [line.split()[:2] for line in parts] == [["24.7k", "parameters"], ["98.6k", "parameters"]]
    assert pilot == "pilot of 3 seeds; the interval is that of reading 1, 96.0%"
    assert last.endswith(f" each: {max(int(line.split()[-1]) for line in parts)}")
    spreads = [float(line.split()[3]) for line in parts]
    assert [int(line.split()[-1]) for line in parts] == [seeds_for(0.02, spread) for spread in spreads]
    assert main(["power", str(tmp_path / "pilot"), CLAIM, "--effect=-0.1"]) == 0
    assert capsys.readouterr().out.endswith("each: none\n")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "power of which claim? lab power DIR CLAIM [--effect NUMBER] [--reading N]"),
        (["pilot", "qk_layernorm_lowers_sensitivit"], f"nearest: {CLAIM}"),
        (["nowhere", CLAIM], "no results folder nowhere"),
        (["pilot", CLAIM, "--effect", "large"], "--effect must be a number, not large"),
        (["pilot", CLAIM, "--effect", "nan"], "--effect must be a number, not nan"),
        (["pilot", CLAIM, "--reading", "7"], "--reading must be a number from 1 to 6, not 7"),
        (["pilot", CLAIM], "pilot has 2 whole seeds of qk_layernorm_lowers_sensitivity; a spread takes 3"),
        (["pilot", "large_kappa_costs"], "lab sweep kappa seed=100,101,102,103 trains a pilot"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(
    words: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    planted.write(Path("pilot"), list(planted.cards(seeds=(0, 1))))
    assert main(["power", *words]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert line in error
