"""A run by its numbers: limits, verdicts, what is said of what the records do not know, and thresholds."""

from __future__ import annotations

import json
import math
import re
import shlex
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import lab
import measure_limits
from lab.__main__ import main
from lab.analysis.laws.brackets import PowerLaw
from lab.analysis.laws.fits import Crossing
from lab.core.errors import RequestError
from lab.features.numbers import limits, numbers
from lab.features.numbers.answer import answer_of, limit_text, remarks, yours
from lab.features.numbers.limits import Limit, read_limits
from lab.features.numbers.numbers import Row, read_numbers, risks, rows

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "your_numbers.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^lab stress.*", PAGE, re.MULTILINE)]
FORMATS = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]["precision"]["kind"]
LARGE = ("params=7e9", "lr=3e-4", "beta2=.95", "eps=1e-8", "batch=4M", "precision=bf16", "qk_norm=no")


def row_of(risk: str, *words: str) -> Row:
    return next(row for row in rows(read_numbers(words)) if row.risk.name == risk)


def verdicts(*words: str) -> dict[str, str]:
    return {row.risk.name: row.verdict for row in rows(read_numbers(words))}


SPREAD: Any = ([[1e-3, 0], [0, 1e-3]], 0.1, 10)  # the covariance, the scatter and the degrees of freedom of a law


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the learning rate that is 0.1 at 1e5 parameters and 2e6 tokens, and falls by 0.4 decades per decade.

    It rises by 0.2 with tokens, lies at a tenth of that for Lion, and twice as high for Muon.
    """
    law = PowerLaw(
        height=-1.0,
        exponents={"params": -0.4, "tokens": 0.2},
        centres={"params": 1e5, "tokens": 2e6},
        covariance=[[1e-3, 0, 0], [0, 1e-3, 0], [0, 0, 1e-3]],
        scatter=0.1,
        freedom=10,
    )
    offsets = {"adamw": (0.0, 0.0), "lion": (-1.0, 0.1), "muon": (0.301, 0.1)}
    falling = Limit("planted", "AdamW", 7, (2e4, 4e8), (400, 400), tried=(1e-3, 1.0), law=law, offsets=offsets)
    known = {**read_limits(), "failing_lr": falling}
    monkeypatch.setattr("lab.features.numbers.numbers.read_limits", lambda: known)


@pytest.mark.usefixtures("planted")
def test_a_limit_with_a_trend_is_extrapolated_to_the_size_and_the_tokens() -> None:
    given = ("params=1e10", "lr=1e-4", "qk_norm=no", "optimizer=adamw")
    row = row_of("learning_rate", *given, "tokens=2e6")
    assert row.limit.middle == pytest.approx(0.1 * 10 ** (-0.4 * 5))
    assert row.decades.middle == pytest.approx(1.0)
    assert row.factors_of_two.middle == pytest.approx(math.log2(10))
    assert row.beyond == pytest.approx(math.log10(1e10 / 4e8))
    assert row_of("learning_rate", *given, "tokens=2e9").decades.middle == pytest.approx(1.6)
    without = row_of("learning_rate", *given)
    assert without.limit == row_of("learning_rate", *given, "tokens=200B").limit
    assert any("20 to each parameter" in remark for remark in without.remarks)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("lr", "verdict"), [("1e-4", "clear"), ("1e-3", "open"), ("3e-2", "beyond")])
def test_a_number_is_judged_by_the_whole_interval(lr: str, verdict: str) -> None:
    assert row_of("learning_rate", "params=1e10", f"lr={lr}", "qk_norm=no", "tokens=2e6").verdict == verdict


@pytest.mark.usefixtures("planted")
def test_each_optimizer_has_its_own_level_and_an_unknown_one_the_spread_of_all() -> None:
    def limit(optimizer: str) -> Crossing:
        return row_of("learning_rate", "params=1e8", "lr=1e-3", "qk_norm=no", f"optimizer={optimizer}").limit

    adamw, lion, muon, unknown = map(limit, ("adamw", "lion", "muon", "kron"))
    assert lion.middle == pytest.approx(adamw.middle / 10)
    assert muon.middle == pytest.approx(2 * adamw.middle, rel=1e-3)
    assert unknown.earliest < lion.earliest
    assert unknown.latest > muon.latest
    known = numbers.read_limits()["failing_lr"]
    offsets = [offset for offset, _ in known.offsets.values()]
    assert known.law is not None
    spread = statistics.stdev(offsets) * math.sqrt(1 + 1 / 3)  # of one more, beside the mean over three
    assert unknown == known.law.predict({"params": 1e8, "tokens": 2e9}, statistics.mean(offsets), spread)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(("optimizer", "verdict"), [("adamw", "clear"), ("kron", "does not carry over")])
def test_an_optimizer_of_which_no_run_tells_is_never_clear(optimizer: str, verdict: str) -> None:
    given = ("params=1e8", "qk_norm=no", f"optimizer={optimizer}", "tokens=2e9")
    assert row_of("learning_rate", *given, "lr=1e-9").verdict == verdict
    assert row_of("learning_rate", *given, "lr=9").verdict == "beyond"


@pytest.mark.usefixtures("planted")
def test_the_interval_of_a_mixture_reaches_from_all_parameters_to_the_active_ones() -> None:
    def limit(*sizes: str) -> Crossing:
        return row_of("learning_rate", *sizes, "lr=1e-3", "qk_norm=no", "tokens=2e9").limit

    both, large, small = limit("params=1e9", "active=1e8"), limit("params=1e9"), limit("params=1e8")
    assert (both.earliest, both.latest) == (large.earliest, small.latest)
    assert large.middle < both.middle < small.middle
    rising = replace(numbers.read_limits()["failing_lr"], law=PowerLaw(-1.0, {"params": 0.4}, {"params": 1e5}, *SPREAD))
    ends = rising.at({"params": 1e9, "active": 1e8}), rising.at({"params": 1e9}), rising.at({"params": 1e8})
    assert (ends[0].earliest, ends[0].latest) == (ends[2].earliest, ends[1].latest)


def test_below_what_ran_no_end_is_known() -> None:
    low = Limit("planted", "AdamW", 3, (1e4, 1e5), (4, 4), tried=(3e-3, 0.3), level=Crossing(0.01, 3e-3, math.inf))
    assert low.at({"params": 1e9}) == (0.01, 0.0, math.inf)


def decision(*words: str) -> tuple[str, str]:
    found = answer_of(read_numbers(words), "")
    return found.data["decision"].word, found.headline


def test_the_first_line_says_go_look_or_stop_and_how_far_the_cliff_is() -> None:
    def asked(size: str, lr: str) -> tuple[str, str]:
        return decision(f"params={size}", f"lr={lr}", "qk_norm=no", "optimizer=adamw")

    assert asked("300M", "1e-3")[0] == "go"
    assert asked("300M", "1e-2")[0] == "look"
    word, lead = asked("300M", "0.1")
    assert word == "stop"
    assert lead.startswith("Stop: learning rate without qk-norm is beyond the limit")
    assert "factors of two above the cliff" in lead
    assert "factors of two below the cliff" in asked("300M", "1e-3")[1]
    assert asked("175B", "1e-5")[0] == "look"  # clear, at more than 30 times the size of any public run
    assert "326 times" in asked("175B", "1e-5")[1]
    assert verdicts("params=175B", "lr=1e-5", "qk_norm=no")["learning_rate"] == "does not carry over"
    assert verdicts("params=175B", "lr=1", "qk_norm=no")["learning_rate"] == "beyond"
    clear_and_open = ("params=300M", "lr=1e-3", "qk_norm=no", "optimizer=adamw", "warmup=500", "beta2=.98")
    assert decision(*clear_and_open)[0] == "look"


def test_tokens_far_from_all_that_ran_are_no_reason_to_go() -> None:
    def asked(*words: str) -> tuple[str, str]:
        given = ("params=1B", "lr=1e-3", "qk_norm=no", "optimizer=adamw", *words)
        return decision(*given)[0], verdicts(*given)["learning_rate"]

    assert asked("tokens=2.9T") == ("go", "clear")
    assert asked("tokens=3.1T") == ("look", "does not carry over")
    assert "31 times the tokens" in decision("params=1B", "lr=1e-3", "qk_norm=no", "tokens=3.1T")[1]
    assert verdicts("params=1B", "lr=1", "qk_norm=no", "tokens=3.1T")["learning_rate"] == "beyond"


@pytest.mark.parametrize("words", [("experts=64",), ("active=100M",), ("experts=8", "active=50M")])
def test_what_is_not_covered_is_no_reason_to_go(words: tuple[str, ...]) -> None:
    given = ("params=300M", "lr=1e-4", "qk_norm=no", "optimizer=muon")
    assert decision(*given)[0] == "go"
    word, lead = decision(*given, *words)
    assert word == "look"
    assert all(each in lead for each in words)
    assert decision("params=300M", "lr=1", "qk_norm=no", *words)[0] == "stop"


@pytest.mark.parametrize("precision", FORMATS)
def test_a_format_that_no_public_run_had_is_no_reason_to_go(precision: str) -> None:
    given = ("params=300M", "lr=1e-4", "qk_norm=no", "optimizer=adamw")
    word, lead = decision(*given, f"precision={precision}")
    assert word == ("go" if precision in ("fp32", "bf16") else "look")
    assert word == "go" or "small models alone" in lead or "is open" in lead


@pytest.mark.parametrize(("optimizer", "verdict"), [("adamw", "beyond"), ("lion", "beyond"), ("kron", "not tried")])
def test_no_warm_up_is_beyond_for_optimizers_that_need_one_and_else_unknown(optimizer: str, verdict: str) -> None:
    given = ("params=300M", "warmup=0", "beta2=.98", f"optimizer={optimizer}")
    assert verdicts(*given)["warm_up"] == verdict
    assert decision(*given)[0] == ("stop" if verdict == "beyond" else "look")


@pytest.mark.parametrize("optimizer", ["sgd", "other"])
@pytest.mark.parametrize("lr", ["1e-6", "1"])
def test_a_learning_rate_in_a_unit_in_which_nothing_ran_is_not_judged(optimizer: str, lr: str) -> None:
    given = ("params=300M", f"lr={lr}", "qk_norm=no", f"optimizer={optimizer}")
    assert decision(*given)[0] == "look"
    assert "cliff" not in decision(*given)[1]
    titles = numbers.left_out(read_numbers(given))[f"optimizer={optimizer}"]
    assert "learning rate without qk-norm" in titles


@pytest.mark.parametrize("word", ["optimizer=SOAP", "optimizer=Adam-mini", "precision=BF16", "qk_norm=No"])
def test_a_word_is_read_in_any_case(word: str) -> None:
    key, _, text = word.partition("=")
    assert read_numbers([word])[key] == text.lower().replace("-", "_")


@pytest.mark.parametrize("text", ["7e9", "7B", "7b", "7000M", "7_000_000_000", "7,000,000,000"])
def test_a_number_is_read_as_people_write_it_and_shown_in_their_words(text: str) -> None:
    given = read_numbers([f"params={text}", "lr=3e-4"])
    assert given["params"] == 7e9
    assert f"A run of {text} parameters: lr=3e-4" in answer_of(given, "").text().splitlines()


def test_what_did_not_run_is_no_reason_to_go() -> None:
    words = ("params=300M", "lr=1e-3", "qk_norm=no", "optimizer=adamw")
    clear = row_of("learning_rate", *words)
    untried = clear._replace(decades=Crossing(1.0, -math.inf, math.inf))
    given = read_numbers(words)
    assert (clear.verdict, numbers.decide([clear], given).word) == ("clear", "go")
    assert (untried.verdict, numbers.decide([clear, untried], given).word) == ("not tried", "look")


@pytest.mark.parametrize("lr", ["1e-4", "1e-3", "1e-2", "0.1", "1"])
def test_the_distance_from_the_cliff_has_the_lower_end_of_its_interval_first(lr: str) -> None:
    lead = decision("params=300M", f"lr={lr}", "qk_norm=no", "optimizer=adamw")[1]
    middle, low, high = map(float, re.findall(r"is ([\d.]+) \[([-\d.]+), ([-\d.]+)\] factors of two", lead)[0])
    assert low < middle < high


def test_what_broke_no_run_counts_all_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"adamw": {"epsilon 1e-8": [0, 2], "epsilon 1e-6": [0, 3], "lr x 2": [1, 4], "lr x 0.5": [0, 4]}}
    monkeypatch.setattr("lab.features.numbers.numbers.public", lambda: {"changes": changes})
    broke, none = numbers.changes_of("adamw")
    assert broke.endswith("of adamw: lr x 2 (1 of 4).")
    assert none.endswith(": epsilon (of 5).")


def test_what_was_not_named_gives_no_reason_to_go() -> None:
    assert decision("params=300M")[0] == "look"
    assert decision("params=300M", "lr=1e-9")[0] == "look"
    assert decision("params=300M", "lr=1e-9", "qk_norm=yes")[0] == "look"


@pytest.mark.parametrize(
    ("lr", "fail_on", "code"),
    [("0.1", "stop", 1), ("0.1", "look", 1), ("1e-2", "stop", 0), ("1e-2", "look", 1), ("1e-3", "look", 0)],
)
def test_programs_get_an_exit_code(lr: str, fail_on: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["stress", "--params", "300M", f"lr={lr}", "qk_norm=no", "--fail-on", fail_on, "--json"]
    assert main(words) == code
    assert json.loads(capsys.readouterr().out)["decision"]["word"] in ("go", "look", "stop")


def test_a_page_says_which_single_changes_broke_runs_of_the_optimizer() -> None:
    def said(optimizer: str) -> str:
        return " ".join(numbers.changes_of(optimizer))

    assert "beta1 0.98 (5 of 5)" in said("adam_mini")
    assert "warmup x 0.25" not in said("muon")
    assert "epsilon" in said("muon").partition("broke none")[2]
    assert "(0 of" not in said("muon")
    assert "none of kron is here" in said("kron")
    assert not numbers.changes_of(None)


def test_a_warm_up_that_broke_most_runs_is_not_clear() -> None:
    for optimizer in ("adamw", "nadamw", "lion", "soap", "other"):
        given = ("params=130M", "warmup=500", "beta2=.98", f"optimizer={optimizer}")
        assert row_of("warm_up", *given).verdict not in ("clear", "does not carry over")
    assert "warm_up" not in verdicts("params=130M", "warmup=0", "beta2=.98", "optimizer=muon")


def test_a_short_warm_up_is_beyond_and_a_long_one_lies_on_the_other_side() -> None:
    given = ("params=7e9", "beta2=.95")  # a memory of 20 steps
    assert [row_of("warm_up", *given, f"warmup={steps}").verdict for steps in (0, 10)] == ["beyond", "beyond"]
    assert row_of("warm_up", *given, "warmup=100").decades.middle < 0
    assert row_of("warm_up", *given, "warmup=2000").decades.middle > 0


def test_derived_numbers_have_their_formula() -> None:
    assert row_of("warm_up", "params=7e9", "warmup=500", "beta2=.98").value == pytest.approx(500 * 0.02)
    decay = row_of("weight_decay", "params=7e9", "weight_decay=.2", "lr=1e-3", "tokens=6M", "batch=2k")
    assert decay.value == pytest.approx(0.2 * 1e-3 * 3000)


def test_a_limit_is_shown_in_the_number_and_the_words_that_the_user_gave() -> None:
    row = row_of("warm_up", "params=7e9", "warmup=2k", "beta2=.95")
    assert yours(row) == "warmup=2k"
    assert float(limit_text(row).partition(" ")[0]) == pytest.approx(row.limit.middle * 20, rel=0.01)
    page = answer_of(read_numbers(["params=7B", "lr=3e-4", "batch=4M"]), "")
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
    assert any("AdamW" in remark for remark in remarks(read_numbers(["params=1e5"])))
    assert not numbers.far_away(read_numbers(["params=1e5", "optimizer=adamw"]))


def test_a_number_far_from_all_that_ran_is_named_first() -> None:
    def first(*words: str) -> str:
        return " ".join(remarks(read_numbers([*words, "optimizer=adamw"]))[:2])

    assert "times" not in first("params=7B")
    assert "130 times" in first("params=70B")
    assert "tokens=15T" in first("params=7B", "tokens=15T")
    assert "tokens" not in first("params=7B", "tokens=50B")
    assert "lr=1e9 is above 10" in first("params=7B", "lr=1e9")
    assert "above 10" not in first("params=7B", "lr=10")


def test_a_number_outside_of_what_ran_is_named() -> None:
    assert any("80" in remark and "8" in remark for remark in row_of("depth", "params=7e9", "depth=80").remarks)
    assert not row_of("depth", "params=7e9", "depth=4").remarks


@pytest.mark.parametrize("optimizer", ["soap", "kron"])  # of the first, no warm-up that ran was too short
def test_no_limit_of_an_optimizer_is_not_called_no_run_of_it(optimizer: str) -> None:
    remarks = row_of("warm_up", "params=300M", "warmup=500", "beta2=.98", f"optimizer={optimizer}").remarks
    said = next(remark for remark in remarks if "interval covers" in remark)
    assert f"where {optimizer} begins to fail" in said
    assert f"has {optimizer}" not in said


def test_the_learning_rate_and_the_size_of_a_limit_are_named_where_they_are_not_the_users() -> None:
    def remarks(*words: str) -> str:
        return " ".join(row_of("epsilon", *words).remarks)

    assert "0.001, the nearest that ran; yours is 3e-4" in remarks("params=7e9", "lr=3e-4")
    assert "0.01, the nearest that ran" in remarks("params=7e9", "lr=6e-3")  # in decades
    assert "1, the highest that ran" in remarks("params=7e9")
    assert not remarks("params=1e5", "lr=1e-2")
    assert "below those that ran, from 24.7k" in remarks("params=1e3", "lr=1e-2")


def test_risks_that_a_number_excludes_are_named_and_left_out() -> None:
    given = read_numbers([*LARGE[:-1], "qk_norm=yes"])
    assert "attention_logits" not in {row.risk.name for row in rows(given)}
    assert any("(qk_norm=yes): learning rate without qk-norm" in remark for remark in remarks(given))


def test_what_the_records_do_not_know_is_not_covered() -> None:
    assert any("optimizer=muon" in remark for remark in remarks(read_numbers(["params=1e9", "optimizer=muon"])))


@pytest.mark.parametrize("precision", sorted({*FORMATS} - {"fp32", "bf16"}))
def test_every_low_precision_has_a_limit(precision: str) -> None:
    given = ["params=1e9", "lr=3e-4", f"precision={precision}", "qk_norm=no"]
    of_format = {risk.name for risk in risks() if precision in risk.when.get("precision", ())}
    assert of_format & verdicts(*given).keys()
    assert not any(remark.startswith("Not covered") for remark in remarks(read_numbers(given)))


def test_a_format_that_costs_at_every_rate_has_no_limit_that_ran() -> None:
    row = row_of("mxfp4", "params=1e9", "lr=3e-4", "precision=mxfp4")
    assert row.verdict == "not tried"
    assert row.limit.middle == 0


def test_two_records_that_disagree_on_a_level_give_none() -> None:
    row = row_of("attention_logits", "params=7e9", "lr=3e-4", "qk_norm=no")
    levels = [read_limits()[name].beyond for name in ("early_logits", "early_logits_of_long_runs")]
    assert all(f"{level:.3g}" in row.does_not_carry for level in levels)
    assert "attention_logit_max" not in answer_of(read_numbers(LARGE), "").data["thresholds"]


def test_every_risk_has_a_limit_a_source_and_a_way_to_act() -> None:
    for risk in risks():
        assert risk.limit in read_limits()
        assert all(re.search(r"arXiv:\d{4}\.\d{5}|logbook", sentence) for sentence in risk.published)
        assert risk.published
        assert bool(risk.act) != bool(risk.threshold)
        assert risk.test.startswith("lab ")


@pytest.mark.parametrize("name", ["failing_lr", "warm_up", "rounded_logits", "fp8_delayed"])
def test_shipped_limits_are_those_of_the_committed_records(name: str) -> None:
    entry = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["limits"][name]
    found, shipped = measure_limits.measure(entry, HOME / "results"), read_limits()[name]
    assert found.at({"params": 7e9}) == pytest.approx(shipped.at({"params": 7e9}), rel=1e-4)
    assert (found.sweep, found.runs, found.seeds) == (shipped.sweep, shipped.runs, shipped.seeds)
    assert found.sizes == pytest.approx(shipped.sizes, rel=1e-5)


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
        == answer_of(read_numbers(["params=7e9", "lr=3e-4", "qk_norm=no"]), "").table["risk"].tolist()
    )
    assert "attention logits" in page._repr_html_()
    with pytest.raises(RequestError, match="'bf61'; nearest: bf16"):
        lab.numbers(7e9, precision="bf61")


def test_the_page_names_all_numbers() -> None:
    known = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]
    named = re.findall(r"`(?:--)?(\w+)`", "".join(re.findall(r"^\| `.*?\|", PAGE, re.MULTILINE)))
    assert set(named) == set(known)
