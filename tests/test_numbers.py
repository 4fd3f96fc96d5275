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
from lab.studies.numbers import limits, numbers
from lab.studies.numbers.limits import Limit, read_limits
from lab.studies.numbers.numbers import Row, read_numbers, risks, rows
from lab.studies.numbers.page import NumbersPage, limit_text, yours

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "your_numbers.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^lab stress.*", PAGE, re.MULTILINE)]
FORMATS = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]["precision"]["kind"]
LARGE = ("params=7e9", "lr=3e-4", "beta2=.95", "eps=1e-8", "batch=4M", "precision=bf16", "qk_norm=no")


def row_of(risk: str, *words: str) -> Row:
    return next(row for row in rows(read_numbers(words)) if row.risk.name == risk)


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
    row = row_of("learning_rate", "params=1e10", "lr=1e-4", "qk_norm=no")
    assert row.limit.middle == pytest.approx(0.1 * 10 ** (-0.4 * 5))
    assert row.decades.middle == pytest.approx(1.0)
    assert row.beyond == pytest.approx(math.log10(1e10 / 4e5))
    assert row.decades.earliest < 1 < row.decades.latest


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("lr", "verdict"), [("1e-4", "clear"), ("1e-3", "open"), ("1e-2", "beyond")])
def test_a_number_is_judged_by_the_whole_interval(lr: str, verdict: str) -> None:
    assert row_of("learning_rate", "params=1e10", f"lr={lr}", "qk_norm=no").verdict == verdict


def test_below_what_ran_no_end_is_known() -> None:
    low = Limit("planted", 3, (1e4, 1e5), (400, 400), tried=(3e-3, 0.3), level=Crossing(0.01, 3e-3, math.inf))
    assert low.at(1e9, None) == (0.01, 0.0, math.inf)


def test_a_short_warm_up_is_beyond_and_a_long_one_lies_on_the_other_side() -> None:
    given = ("params=7e9", "beta2=.95")  # a memory of 20 steps
    assert [row_of("warm_up", *given, f"warmup={steps}").verdict for steps in (0, 10)] == ["beyond", "beyond"]
    assert row_of("warm_up", *given, "warmup=10").decades.middle < 0
    assert row_of("warm_up", *given, "warmup=2000").decades.middle > 0


def test_derived_numbers_have_their_formula() -> None:
    assert row_of("warm_up", "params=7e9", "warmup=500", "beta2=.98").value == pytest.approx(500 * 0.02)
    decay = row_of("weight_decay", "params=7e9", "weight_decay=.2", "lr=1e-3", "tokens=6M", "batch=2k")
    assert decay.value == pytest.approx(0.2 * 1e-3 * 3000)


def test_a_limit_is_shown_in_the_number_and_the_words_that_the_user_gave() -> None:
    row = row_of("warm_up", "params=7e9", "warmup=2k", "beta2=.95")
    assert yours(row) == "warmup=2k"
    assert float(limit_text(row).partition(" ")[0]) == pytest.approx(row.limit.middle * 20, rel=0.01)
    page = NumbersPage(read_numbers(["params=7B", "lr=3e-4", "batch=4M"]), "")
    assert page.title == "A run of 7B parameters: lr=3e-4 batch=4M"


@pytest.mark.parametrize("risk", [risk.name for risk in risks()])
def test_a_limit_of_one_size_tells_no_large_model_that_it_is_clear(risk: str) -> None:
    safe = ("params=7e9", "lr=1e-9", "weight_decay=1e-9", "beta2=.9", "eps=1e-30", "batch=1", "tokens=1e9", "depth=1")
    for precision in FORMATS:
        for normed in ("yes", "no"):
            words = (*safe, "warmup=1e6", f"precision={precision}", f"qk_norm={normed}", "z_loss=no")
            judged = {row.risk.name: row for row in rows(read_numbers(words))}
            assert risk not in judged or judged[risk].verdict != "clear" or judged[risk].source.has_trend


def test_no_verdict_rests_on_what_was_not_given() -> None:
    row = row_of("warm_up", "params=7e9", "warmup=2000")
    assert (row.verdict, row.missing) == ("no number", ["beta2"])
    assert math.isnan(row.decades.middle)
    assert row_of("learning_rate", "params=7e9", "lr=1").missing == ["qk_norm"]
    assert verdicts("params=7e9", "lr=1").keys().isdisjoint({"mxfp8", "mxfp4", "nvfp4", "fp8", "fp16", "output_logits"})
    assert any("AdamW" in remark for remark in NumbersPage(read_numbers(["params=1e5"]), "").remarks())
    assert not numbers.far_away(read_numbers(["params=1e5", "optimizer=adamw"]))


def test_a_number_far_from_all_that_ran_is_named_first() -> None:
    def remarks(*words: str) -> str:
        return " ".join(NumbersPage(read_numbers([*words, "optimizer=adamw"]), "").remarks()[:2])

    assert "times" not in remarks("params=3e8")
    assert "17.8k times" in remarks("params=7B")
    assert "lr=1e9 is above 10" in remarks("params=7B", "lr=1e9")
    assert "above 10" not in remarks("params=7B", "lr=10")


def test_a_number_outside_of_what_ran_is_named() -> None:
    assert any("80" in remark and "8" in remark for remark in row_of("depth", "params=7e9", "depth=80").remarks)
    assert not row_of("depth", "params=7e9", "depth=4").remarks


def test_the_learning_rate_and_the_size_of_a_limit_are_named_where_they_are_not_the_users() -> None:
    def remarks(*words: str) -> str:
        return " ".join(row_of("epsilon", *words).remarks)

    assert "0.001, the nearest that ran; yours is 3e-4" in remarks("params=7e9", "lr=3e-4")
    assert "0.01, the nearest that ran" in remarks("params=7e9", "lr=6e-3")  # in decades
    assert "1, the highest that ran" in remarks("params=7e9")
    assert not remarks("params=1e5", "lr=1e-2")
    assert "below those that ran, from 24.7k" in remarks("params=1e3", "lr=1e-2")


def test_risks_that_a_number_excludes_are_named_and_left_out() -> None:
    page = NumbersPage(read_numbers([*LARGE[:-1], "qk_norm=yes"]), "")
    assert "attention_logits" not in {row.risk.name for row in page.rows}
    assert any("(qk_norm=yes): learning rate without qk-norm" in remark for remark in page.remarks())


def test_what_the_records_do_not_know_is_not_covered() -> None:
    remarks = NumbersPage(read_numbers(["params=1e9", "optimizer=muon"]), "").remarks()
    assert any("optimizer=muon" in remark for remark in remarks)


@pytest.mark.parametrize("precision", sorted({*FORMATS} - {"fp32", "bf16"}))
def test_every_low_precision_has_a_limit(precision: str) -> None:
    given = ["params=1e9", "lr=3e-4", f"precision={precision}", "qk_norm=no"]
    of_format = {risk.name for risk in risks() if precision in risk.when.get("precision", ())}
    assert of_format & verdicts(*given).keys()
    assert not any(remark.startswith("Not covered") for remark in NumbersPage(read_numbers(given), "").remarks())


def test_a_format_that_costs_at_every_rate_has_no_limit_that_ran() -> None:
    row = row_of("mxfp4", "params=1e9", "lr=3e-4", "precision=mxfp4")
    assert row.verdict == "not tried"
    assert row.limit.middle == 0


def test_two_records_that_disagree_on_a_level_give_none() -> None:
    row = row_of("attention_logits", "params=7e9", "lr=3e-4", "qk_norm=no")
    levels = [read_limits()[name].beyond for name in ("early_logits", "early_logits_of_long_runs")]
    assert all(f"{level:.3g}" in row.does_not_carry for level in levels)
    assert "attention_logit_max" not in NumbersPage(read_numbers(LARGE), "").thresholds


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
        assert "output_logit" in capsys.readouterr().out


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
