"""How many seeds a claim takes: against simulation, and as `lab claims --power` says it."""

from __future__ import annotations

import math
import runpy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

import planted
from committed import RESULTS, in_one_process, judged
from lab.analysis.contrasts import POWER, seeds_for
from lab.analysis.statistics import student_t
from lab.core import shipped
from studies.claims.decision import ABOVE_ZERO, alpha_of, decide
from studies.claims.effects import Qualified
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.scoreboard import ScoreboardRow, read
from studies.claims.verdicts import judge_claim
from sweeping import OutputOf

CLAIM = "qk_layernorm_lowers_sensitivity"
SCRIPT = runpy.run_path(str(RESULTS / "power.py"))
open_claims = SCRIPT["open_claims"]


@pytest.mark.parametrize(("effect", "reading"), [(1.0, 1), (1.0, 2)])
def test_so_many_seeds_decide_in_four_of_five_worlds(effect: float, reading: int) -> None:
    count = seeds_for(effect, 1.0, alpha_of(reading))

    def share(seeds: int) -> float:
        worlds = np.random.default_rng(seeds).normal(effect, 1.0, (1000, seeds))
        words = [decide([student_t(values)], ABOVE_ZERO, reading=reading).verdict for values in worlds]
        return words.count("reproduced") / len(words)

    assert share(int(count)) > POWER - 0.03
    assert share(int(count) - 2) < POWER


def test_more_spread_a_smaller_effect_and_a_later_reading_take_more_seeds() -> None:
    usual = seeds_for(0.5, 1.0, 0.04)
    assert usual < min(seeds_for(0.5, 1.2, 0.04), seeds_for(0.4, 1.0, 0.04), seeds_for(0.5, 1.0, 0.002))
    assert seeds_for(1.0, 2.0, 0.04) == usual  # only their ratio counts
    assert alpha_of(2) < alpha_of(1)


def test_an_effect_on_the_wrong_side_takes_no_number_of_seeds() -> None:
    assert seeds_for(0.0, 1.0, 0.04) == seeds_for(-1.0, 1.0, 0.04) == math.inf
    assert seeds_for(1e-6, 1.0, 0.04) == math.inf
    assert seeds_for(1.0, 0.0, 0.04) == 3


def test_each_part_has_its_seeds_and_the_claim_those_of_the_hardest(tmp_path: Path, output_of: OutputOf) -> None:
    planted.write(tmp_path / "pilot", list(planted.cards()))
    first, head, *parts, pilot, last = output_of(
        "claims", tmp_path / "pilot", "--power", CLAIM, "--effect", "0.02"
    ).splitlines()
    assert first == "LR sensitivity is lower with qk-layernorm, at every size (Wortsman 2023, 1), in nats/token"
    assert head.split()[0] == "part"
    assert [line.split()[:2] for line in parts] == [["24.7k", "parameters"], ["98.6k", "parameters"]]
    assert pilot == "pilot of 3 seeds; an interval of reading 1 has a level of 96.0%"
    assert last.endswith(f" each: {max(int(line.split()[-1]) for line in parts)}")
    spreads = [float(line.split()[3]) for line in parts]
    assert [int(line.split()[-1]) for line in parts] == [seeds_for(0.02, spread, alpha_of(1)) for spread in spreads]
    assert output_of("claims", tmp_path / "pilot", "--power", CLAIM, "--effect=-0.1").endswith("each: none\n")


def opened(means: list[float], spreads: list[float], readings: int = 0, **control: list[float]) -> tuple[float, int]:
    """The seeds that decide a claim whose four seeds have these means and spreads in its parts, and its reading."""
    seeds, names = np.array([-1.0, -1.0, 1.0, 1.0]) * math.sqrt(3 / 4), list("0123")
    parts = pd.DataFrame(
        {f"part {n}": m + s * seeds for n, (m, s) in enumerate(zip(means, spreads, strict=True))}, names
    )
    weak = Qualified(pd.Series(control["control"], names)) if control else None
    claim = CLAIMS[CLAIM]._replace(effects=lambda *_: Qualified(parts, control=weak), sweep="made", unit="nats/token")
    records = planted.records(list(planted.cards(seeds=(0, 1, 2, 3))))
    folder = Evidence("made", records, readings={CLAIM: ["inconclusive"] * readings} if readings else {})
    (one,) = open_claims([ScoreboardRow(claim, judge_claim(claim, [folder]))], [folder])
    assert one.seeds == (4 if readings else 0)
    return one.more + one.seeds, readings + 1


@pytest.mark.parametrize(
    ("means", "spreads", "readings"),
    [
        ([0.1], [0.2], 1),  # above zero
        ([0.001], [0.04], 0),  # no effect that counts
        ([0.1, 0.12], [0.2, 0.2], 0),  # both parts
        ([0.05, -0.2], [0.2, 0.3], 0),  # one against
    ],
)
def test_so_many_seeds_decide_an_open_claim_in_four_of_five_worlds(
    means: list[float], spreads: list[float], readings: int
) -> None:
    """More where one of several outcomes will do, fewer where every part must lie on its side at once."""
    count, reading = opened(means, spreads, readings)

    def share(seeds: float) -> float:
        worlds = np.random.default_rng(1).normal(size=(1000, len(means), int(seeds)))
        scaled = np.array(means)[:, None] + np.array(spreads)[:, None] * worlds
        words = [decide([student_t(part) for part in one], ABOVE_ZERO, 0.02, reading).verdict for one in scaled]
        return 1 - words.count("inconclusive") / len(words)

    assert share(count) > POWER**2
    assert share(count / 2) < POWER - 0.1


def test_one_of_two_parts_speaks_against_a_claim_at_half_of_alpha() -> None:
    seeds, _ = opened([0.05, -0.2], [2.0, 0.3])
    assert seeds == seeds_for(0.2, 0.3, alpha_of(1) / 2) > seeds_for(0.2, 0.3, alpha_of(1))


def test_a_weak_control_takes_seeds() -> None:
    strong, weak = [1.0, 1.1], [0.01, 0.01]
    assert opened(strong, weak, control=[0.3, -0.1, 0.2, 0.1])[0] == seeds_for(
        0.125, np.std([3, -1, 2, 1], ddof=1) / 10, 0.05
    )
    assert math.isnan(opened(strong, weak, control=[-0.3, 0.1, -0.2, -0.1])[0])


def test_a_header_names_the_open_claims_once_and_changes_nothing_else() -> None:
    """Whether it named some before or not."""
    folder = Evidence("mup", planted.records(list(planted.cards())))
    claim = CLAIMS[CLAIM]._replace(effects=lambda *_: pd.Series([1.0, -0.5, 0.3], list("012")), sweep="mup")
    claims = list(open_claims([ScoreboardRow(claim, judge_claim(claim, [folder]))], [folder]))
    text = shipped.sweeps()["mup"].read_text()
    named = SCRIPT["in_header"](text, claims)
    assert named == SCRIPT["in_header"](SCRIPT["in_header"](text, []), claims)
    assert f"{SCRIPT['HEAD']}\n#   - {CLAIM}: {claims[0]}\n" in named
    assert named.count(SCRIPT["HEAD"]) == 1
    assert "fresh seeds of 4,000 steps" in str(claims[0])
    assert yaml.safe_load(named) == yaml.safe_load(text)
    assert SCRIPT["HEAD"] not in SCRIPT["in_header"](text, [])


@pytest.mark.slow
@in_one_process
def test_headers_and_the_readme_name_open_claims() -> None:
    for path, text in SCRIPT["written"](list(open_claims(judged(), read([RESULTS])))):
        assert path.read_text() == text, path.name
