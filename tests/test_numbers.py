"""A run by its numbers: limits, verdicts, what is said of what the records do not know, and thresholds."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml

import lab
import measure_limits
from lab.__main__ import main
from lab.analysis.forecast.fits import Crossing, Line
from lab.core.errors import RequestError
from lab.studies.numbers import limits
from lab.studies.numbers.limits import Limit, read_limits
from lab.studies.numbers.numbers import read_numbers, risks, rows
from lab.studies.numbers.page import NumbersPage

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "your_numbers.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^lab stress.*", PAGE, re.MULTILINE)]
LARGE = ("params=7e9", "lr=3e-4", "beta2=.95", "eps=1e-8", "batch=4M", "precision=bf16", "qk_norm=no")


def verdicts(*words: str) -> dict[str, str]:
    return {row.risk.name: row.verdict for row in rows(read_numbers(words))}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the learning rate that falls from 0.1 at 1e5 parameters by 0.4 decades per decade of size."""
    line = Line(centre=5.0, height=-1.0, slope=-0.4, points=21, spread=5.0, scatter=0.07)
    falling = Limit("planted", 7, (2e4, 4e5), (400, 400), tried=(1e-3, 1.0), line=line)
    known = {**read_limits(), "costly_lr": falling}
    monkeypatch.setattr("lab.studies.numbers.numbers.read_limits", lambda: known)


@pytest.mark.usefixtures("planted")
def test_a_limit_with_a_trend_is_extrapolated_to_the_size() -> None:
    (row,) = (row for row in rows(read_numbers(["params=1e10", "lr=1e-4"])) if row.risk.name == "learning_rate")
    assert row.limit.middle == pytest.approx(0.1 * 10 ** (-0.4 * 5))
    assert row.decades.middle == pytest.approx(1.0)
    assert row.beyond == pytest.approx(math.log10(1e10 / 4e5))
    assert row.decades.earliest < 1 < row.decades.latest


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("lr", "verdict"), [("1e-4", "clear"), ("1e-3", "open"), ("1e-2", "beyond")])
def test_a_number_is_judged_by_the_whole_interval(lr: str, verdict: str) -> None:
    assert verdicts("params=1e10", f"lr={lr}")["learning_rate"] == verdict


def test_below_what_ran_no_end_is_known() -> None:
    low = Limit("planted", 3, (1e4, 1e5), (400, 400), tried=(3e-3, 0.3), level=Crossing(0.01, 3e-3, math.inf))
    assert low.at(1e9, None) == (0.01, 0.0, math.inf)


def test_what_is_not_given_is_not_guessed() -> None:
    (row,) = (row for row in rows(read_numbers(["params=7e9", "warmup=2000"])) if row.risk.name == "warm_up")
    assert (row.verdict, row.missing) == ("no number", ["beta2"])
    assert math.isnan(row.decades.middle)


def test_a_number_outside_of_what_ran_is_named() -> None:
    (row,) = (row for row in rows(read_numbers(["params=7e9", "depth=80"])) if row.risk.name == "depth")
    assert any("80" in remark and "8" in remark for remark in row.remarks)
    (row,) = (row for row in rows(read_numbers(["params=7e9", "depth=4"])) if row.risk.name == "depth")
    assert not row.remarks


def test_the_learning_rate_and_the_size_of_a_limit_are_named_where_they_are_not_the_users() -> None:
    def remarks(*words: str) -> str:
        (row,) = (row for row in rows(read_numbers(words)) if row.risk.name == "epsilon")
        return " ".join(row.remarks)

    assert "0.001, the nearest that ran; yours is 0.0003" in remarks("params=7e9", "lr=3e-4")
    assert "1, the highest that ran" in remarks("params=7e9")
    assert not remarks("params=1e5", "lr=1e-2")
    assert "below those that ran, from 24.7k" in remarks("params=1e3", "lr=1e-2")


def test_risks_that_a_number_excludes_are_named_and_left_out() -> None:
    page = NumbersPage(read_numbers([*LARGE[:-1], "qk_norm=yes"]), "")
    assert "attention_logits" not in {row.risk.name for row in page.rows}
    assert any("attention logits (qk_norm=yes)" in remark for remark in page.remarks())


def test_what_the_records_do_not_know_is_not_covered() -> None:
    remarks = NumbersPage(read_numbers(["params=1e9", "optimizer=muon"]), "").remarks()
    assert any("optimizer=muon" in remark for remark in remarks)


FORMATS = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]["precision"]["kind"]


@pytest.mark.parametrize("precision", sorted({*FORMATS} - {"fp32", "bf16"}))
def test_every_low_precision_has_a_limit(precision: str) -> None:
    given = ["params=1e9", "lr=3e-4", f"precision={precision}", "qk_norm=no"]
    of_format = {risk.name for risk in risks() if precision in risk.when.get("precision", ())}
    assert of_format & verdicts(*given).keys()
    assert not any(remark.startswith("Not covered") for remark in NumbersPage(read_numbers(given), "").remarks())


def test_a_format_that_costs_at_every_rate_has_no_limit_that_ran() -> None:
    given = read_numbers(["params=1e9", "lr=3e-4", "precision=mxfp4"])
    (row,) = (row for row in rows(given) if row.risk.name == "mxfp4")
    assert row.verdict == "open"
    assert row.limit.middle == 0


def test_every_risk_has_a_limit_a_source_and_a_way_to_act() -> None:
    for risk in risks():
        assert risk.limit in read_limits()
        assert all(re.search(r"arXiv:\d{4}\.\d{5}|logbook", sentence) for sentence in risk.published)
        assert risk.published
        assert bool(risk.act) != bool(risk.threshold)
        assert risk.test.startswith("lab ")


@pytest.mark.parametrize("name", ["costly_lr", "warm_up", "fp8_delayed"])
def test_shipped_limits_are_those_of_the_committed_records(name: str) -> None:
    entry = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["limits"][name]
    found, shipped = measure_limits.measure(entry, HOME / "results"), read_limits()[name]
    assert found.at(7e9, None) == pytest.approx(shipped.at(7e9, None), rel=1e-4)
    assert (found.sweep, found.seeds, found.sizes) == (shipped.sweep, shipped.seeds, shipped.sizes)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[-1])
def test_the_commands_of_the_page(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    printed = capsys.readouterr().out
    if "--json" in words:
        assert json.loads(printed)["numbers"]["params"] == 7e9
    else:
        assert "What no small model can tell" in printed
    if "--thresholds" in words:
        (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
        assert json.loads(Path("thresholds.json").read_text()) == json.loads(shown)
        assert "<table" in Path("numbers.html").read_text()
        assert (
            main(["watch", str(HOME / "docs/tables/their_run.log"), "--thresholds", "thresholds.json", "--json"]) == 1
        )
        assert "attention_logit_max" in capsys.readouterr().out


def test_the_same_from_python() -> None:
    page = lab.numbers("7B", lr=3e-4, qk_norm="no")
    assert page.command == "lab stress --params 7B lr=0.0003 qk_norm=no"
    assert (
        page.table["risk"].tolist()
        == NumbersPage(read_numbers(["params=7e9", "lr=3e-4", "qk_norm=no"]), "").table["risk"].tolist()
    )
    assert "attention logits" in page._repr_html_()
    with pytest.raises(RequestError, match="'bf61'; nearest: bf16"):
        lab.numbers(7e9, precision="bf61")


def test_the_page_names_all_numbers() -> None:
    known = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]
    named = re.findall(r"`(?:--)?(\w+)`", "".join(re.findall(r"^\| `.*?\|", PAGE, re.MULTILINE)))
    assert set(named) == set(known)
