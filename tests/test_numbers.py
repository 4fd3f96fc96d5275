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
from lab.features.predict import limits, numbers
from lab.features.predict.limits import Limit, read_limits
from lab.features.predict.numbers import (
    Published,
    Row,
    answer_of,
    base_rate,
    contradicting,
    distance,
    published_runs,
    read_numbers,
    risks,
    rows,
)

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "your_numbers.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line)[1:] for line in re.findall(r"^lab predict.*", PAGE, re.MULTILINE)]
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
    falling = Limit("AdamW", (2e4, 4e8), (400, 400), tried=(1e-3, 1.0), law=law, offsets=offsets)
    known = {**read_limits(), "failing_lr": falling}
    monkeypatch.setattr("lab.features.predict.numbers.read_limits", lambda: known)


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
@pytest.mark.parametrize(("lr", "verdict"), [("1e-4", "not beyond"), ("1e-3", "open"), ("3e-2", "beyond")])
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
@pytest.mark.parametrize(("optimizer", "verdict"), [("adamw", "not beyond"), ("kron", "not judged")])
def test_a_rate_of_an_optimizer_of_which_no_run_tells_is_never_short_of_the_limit(optimizer: str, verdict: str) -> None:
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


def headline(*words: str) -> str:
    return answer_of(read_numbers(words), "").headline


UNSTABLE = [run for run in published_runs() if run.outcome == "unstable"]


def without(run: Published) -> list[Published]:
    return [other for other in published_runs() if other is not run]


@pytest.mark.parametrize("run", published_runs(), ids=lambda run: run.name)
def test_no_published_run_reads_as_a_permission(run: Published) -> None:
    found = answer_of(run.numbers, "", without(run))
    assert re.match(r"Of \d risks? (\d|none) could be judged\. Learning rate", found.headline)
    against = next(other for other in without(run) if f": {other.name} (" in found.headline)
    assert against.outcome == ("stable" if found.data["is_beyond"] else "unstable")
    assert not {"go", "look", "clear", "safe"} & set(re.findall(r"\w+", found.text().lower().replace("look at", "")))
    for row in found.data["risks"]:
        assert row["verdict"] == "beyond" or row["contradicted_by"]["outcome"] == "unstable"


def test_the_first_line_says_how_many_risks_were_judged_what_was_found_and_what_contradicts_it() -> None:
    given = ("params=300M", "qk_norm=no", "optimizer=adamw", "tokens=6B")
    first = headline(*given, "lr=1e-3")
    assert first.startswith("Of 2 risks 1 could be judged. Learning rate without qk-norm: not beyond the limit")
    assert "unstable with no number beyond a limit: 830M at 8e-3 (params=830e6 lr=8e-3" in first
    assert "open, since" in headline(*given, "lr=1e-2")
    assert "beyond the limit of public runs (lr=0.1, -" in headline(*given, "lr=0.1")
    assert headline(*given, "lr=0.1").endswith("No published run here contradicts that.")
    assert "Of 2 risks none could be judged" in headline("params=175B", "lr=1e-5", "qk_norm=no")
    assert "not judged, since qk_norm= not given" in headline("params=300M", "lr=1e-9")
    short = headline("params=300M", "lr=1e-9", "qk_norm=no", "warmup=0", "beta2=.98")
    assert "Short warm-up: beyond the limit" in short  # before what is not beyond


def test_a_first_line_without_any_risk_names_a_run_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.features.predict.numbers.risks", list)
    assert re.match("No risk could be judged.*unstable", headline("params=300M", "lr=1e-9"))


def test_what_contradicts_a_number_beyond_its_limit_was_stable_there() -> None:
    def published(name: str, lr: str, outcome: str) -> Published:
        given = read_numbers(["params=300M", f"lr={lr}", "qk_norm=no", "optimizer=adamw", "tokens=6B"])
        return Published(name, given, outcome, "", "", "")

    known = [
        published("far above", "2", "stable"),
        published("above", "0.2", "stable"),
        published("diverged above", "0.1", "unstable"),
        published("below", "1e-3", "stable"),
        published("spiked below", "2e-3", "unstable"),
    ]
    for lr, name in (("0.1", "above"), ("1", "far above"), ("1e-3", "spiked below"), ("1e-2", "spiked below")):
        given = read_numbers(["params=300M", f"lr={lr}", "qk_norm=no", "optimizer=adamw", "tokens=6B"])
        assert (contradicting(rows(given)[0], given, known) or known[0]).name == name
    assert base_rate(known) == "Of the 2 published runs here with no number beyond a limit, 1 were unstable."


def test_a_run_to_which_the_risk_applies_contradicts_before_a_nearer_one() -> None:
    normed = ("params=8e9", "lr=2e-3", "qk_norm=yes", "z_loss=yes", "optimizer=adamw")
    spiked = Published("spiked", read_numbers(["params=1e6", *normed[1:]]), "unstable", "", "", "")
    given = read_numbers(normed)
    nearest = contradicting(rows(given)[0], given, published_runs())
    assert nearest is not None
    assert nearest.name == "Marin 8B at 2e-3"
    assert distance(nearest.numbers, given) < distance(spiked.numbers, given)
    assert contradicting(rows(given)[0], given, [*published_runs(), spiked]) is spiked


def test_runs_are_near_in_size_rate_tokens_optimizer_and_norm() -> None:
    run = read_numbers(["params=1e9", "lr=1e-3", "tokens=20B", "optimizer=adamw", "qk_norm=no"])
    others = {
        1.0: ["params=1e10", "lr=1e-3", "tokens=20B", "optimizer=adamw", "qk_norm=no"],
        2.0: ["params=1e9", "lr=1e-4", "tokens=200B"],
        3.0: ["params=1e8", "optimizer=muon", "qk_norm=yes"],
    }
    assert [distance(run, read_numbers(words)) for words in others.values()] == pytest.approx([*others])


def test_tokens_far_from_all_that_ran_leave_a_rate_unjudged() -> None:
    def verdict(*words: str) -> str:
        return verdicts("params=1B", "qk_norm=no", "optimizer=adamw", *words)["learning_rate"]

    assert verdict("lr=1e-3", "tokens=2.9T") == "not beyond"
    assert verdict("lr=1e-3", "tokens=3.1T") == "not judged"
    assert verdict("lr=1", "tokens=3.1T") == "beyond"


def test_fine_tuning_and_reinforcement_learning_are_named_as_not_measured() -> None:
    found = answer_of(read_numbers(["params=7e9", "lr=1e-5"]), "")
    for text in (found.text(), found.html(), found.markdown(), found.json()):
        assert all(word in text for word in ("Fine-tuning", "LoRA", "reinforcement learning"))


@pytest.mark.parametrize("words", [("experts=64",), ("active=100M",), ("precision=fp8_current",)])
def test_what_is_not_covered_is_said(words: tuple[str, ...]) -> None:
    found = answer_of(read_numbers(["params=300M", "lr=1e-4", "qk_norm=no", "optimizer=muon", *words]), "")
    assert f"Not covered: {words[0]}: " in found.text()
    assert found.data["not_covered"][0].startswith(f"{words[0]}: ")


@pytest.mark.parametrize(("optimizer", "verdict"), [("adamw", "beyond"), ("lion", "beyond"), ("kron", "not judged")])
def test_no_warm_up_is_beyond_for_optimizers_that_need_one_and_else_unknown(optimizer: str, verdict: str) -> None:
    assert verdicts("params=300M", "warmup=0", "beta2=.98", f"optimizer={optimizer}")["warm_up"] == verdict


def test_a_warm_up_in_a_memory_that_no_run_had_is_not_judged() -> None:
    row = row_of("warm_up", "params=1e9", "warmup=477", "beta2=.999", "optimizer=adamw")
    assert (row.verdict, row.reason) == ("not judged", "no public run had beta2=.999")
    assert row_of("warm_up", "params=1e9", "warmup=477", "beta2=.99", "optimizer=adamw").reason != row.reason


@pytest.mark.parametrize("optimizer", ["sgd", "other"])
@pytest.mark.parametrize("lr", ["1e-6", "1"])
def test_a_learning_rate_in_a_unit_in_which_nothing_ran_is_not_judged(optimizer: str, lr: str) -> None:
    given = ("params=300M", f"lr={lr}", "qk_norm=no", f"optimizer={optimizer}")
    assert "none could be judged" in headline(*given)
    left_out = answer_of(read_numbers(given), "").data["left_out"]
    assert f"learning rate without qk-norm (optimizer={optimizer})" in left_out


@pytest.mark.parametrize("word", ["optimizer=SOAP", "optimizer=Adam-mini", "precision=BF16", "qk_norm=No"])
def test_a_word_is_read_in_any_case(word: str) -> None:
    key, _, text = word.partition("=")
    assert read_numbers([word])[key] == text.lower().replace("-", "_")


@pytest.mark.parametrize("text", ["7e9", "7B", "7b", "7000M", "7_000_000_000", "7,000,000,000"])
def test_a_number_is_read_as_people_write_it_and_shown_in_their_words(text: str) -> None:
    given = read_numbers([f"params={text}", "lr=3e-4"])
    assert given["params"] == 7e9
    assert f"A run of {text} parameters: lr=3e-4" in answer_of(given, "").text().splitlines()


@pytest.mark.parametrize(("lr", "code"), [("0.1", 1), ("1e-2", 0), ("1e-3", 0)])
def test_programs_get_an_exit_code(lr: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "--params", "300M", f"lr={lr}", "qk_norm=no", "--fail-on", "stop", "--json"]
    assert main(words) == code
    assert json.loads(capsys.readouterr().out)["is_beyond"] == bool(code)


@pytest.mark.parametrize(("lr", "code"), [("0.1", 1), ("1e-3", 0)])
def test_the_words_of_before_still_work_and_say_so(lr: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--params=300M", f"lr={lr}", "qk_norm=no", "--fail-on", "stop"]
    assert main(["stress", *words]) == code
    former = capsys.readouterr()
    assert main(["predict", *words]) == code
    assert former.out == capsys.readouterr().out
    assert former.err == "lab: lab stress --params is lab predict --params now\n"


def test_a_warm_up_that_broke_most_runs_is_not_told_to_be_long_enough() -> None:
    for optimizer in ("adamw", "nadamw", "lion", "soap", "other"):
        given = ("params=130M", "warmup=500", "beta2=.98", f"optimizer={optimizer}")
        assert row_of("warm_up", *given).verdict != "not beyond"
    assert "warm_up" not in verdicts("params=130M", "warmup=0", "beta2=.98", "optimizer=muon")


def test_a_short_warm_up_is_beyond_and_a_long_one_lies_on_the_other_side() -> None:
    given = ("params=7e9", "beta2=.95")  # a memory of 20 steps
    assert [row_of("warm_up", *given, f"warmup={steps}").verdict for steps in (0, 10)] == ["beyond", "beyond"]
    assert row_of("warm_up", *given, "warmup=100").decades.middle < 0
    assert row_of("warm_up", *given, "warmup=2000").decades.middle > 0


def test_a_warm_up_is_counted_in_memories() -> None:
    assert row_of("warm_up", "params=7e9", "warmup=500", "beta2=.98").value == pytest.approx(500 * 0.02)


def test_a_limit_is_shown_in_the_number_and_the_words_that_the_user_gave() -> None:
    row = row_of("warm_up", "params=7e9", "warmup=2k", "beta2=.95")
    assert row.yours == "warmup=2k"
    assert float(row.limit_text.partition(" ")[0]) == pytest.approx(row.limit.middle * 20, rel=0.01)
    page = answer_of(read_numbers(["params=7B", "lr=3e-4", "batch=4M"]), "")
    assert page.title == "A run of 7B parameters: lr=3e-4 batch=4M"


@pytest.mark.parametrize("risk", [risk.name for risk in risks()])
def test_a_limit_of_one_size_tells_no_large_model_that_it_lies_short_of_it(risk: str) -> None:
    safe = ("params=7e9", "lr=1e-9", "beta2=.9", "batch=1", "tokens=1e9", "warmup=1e6", "z_loss=no")
    for precision in FORMATS:
        for normed in ("yes", "no"):
            words = (*safe, f"precision={precision}", f"qk_norm={normed}")
            judged = {row.risk.name: row for row in rows(read_numbers(words))}
            assert risk not in judged or judged[risk].verdict != "not beyond" or judged[risk].source.law.exponents


def test_no_verdict_rests_on_what_was_not_given() -> None:
    row = row_of("warm_up", "params=7e9", "warmup=2000")
    assert (row.verdict, row.missing) == ("not judged", ["beta2"])
    assert row_of("learning_rate", "params=7e9", "lr=1").missing == ["qk_norm"]
    assert "output_logits" not in verdicts("params=7e9", "lr=1")
    assumed = "No optimizer is given, so these are the limits of AdamW."
    for words, is_said in ((["params=1e5"], True), (["params=1e5", "optimizer=adamw"], False)):
        assert (assumed in answer_of(read_numbers(words), "").text()) == is_said


def test_a_number_outside_of_what_ran_is_named() -> None:
    given = ("params=3e8", "qk_norm=no", "tokens=6B", "optimizer=adamw")
    assert any("1e-5" in remark for remark in row_of("learning_rate", *given, "lr=1e-5").remarks)
    (remark,) = row_of("warm_up", "params=3e8", "warmup=1e6", "beta2=.95", "optimizer=adamw").remarks
    assert remark == "Your 1e6 lies outside of what ran, 100 to 4000."  # 5 to 200 memories of 20 steps
    assert not row_of("learning_rate", *given, "lr=1e-3").remarks
    assert "below those that ran, from 6.22k" in " ".join(
        row_of("learning_rate", "params=1e3", "lr=1e-3", "qk_norm=no").remarks
    )


@pytest.mark.parametrize("optimizer", ["soap", "kron"])  # of the first, no warm-up that ran was too short
def test_no_limit_of_an_optimizer_is_not_called_no_run_of_it(optimizer: str) -> None:
    remarks = row_of("warm_up", "params=300M", "warmup=500", "beta2=.98", f"optimizer={optimizer}").remarks
    said = next(remark for remark in remarks if "interval covers" in remark)
    assert f"where {optimizer} begins to fail" in said
    assert f"has {optimizer}" not in said


def test_a_number_that_no_limit_depends_on_is_named() -> None:
    given = ("params=7e9", "lr=3e-4", "qk_norm=no", "weight_decay=.1", "tokens=1T", "active=1B", "depth=32")
    assert "No limit depends on weight_decay= and depth=." in answer_of(read_numbers(given), "").text()
    assert "No limit depends" not in answer_of(read_numbers(given[:3]), "").text()


def test_risks_that_a_number_excludes_are_named_and_left_out() -> None:
    given = read_numbers([*LARGE[:-1], "qk_norm=yes"])
    assert "learning_rate" not in {row.risk.name for row in rows(given)}
    assert "Not asked: learning rate without qk-norm (qk_norm=yes)" in answer_of(given, "").text()


def test_every_risk_has_a_limit_of_public_runs_a_source_and_a_test() -> None:
    for risk in risks():
        assert risk.limit in read_limits()
        assert all(re.search(r"arXiv:\d{4}\.\d{5}|logbook", sentence) for sentence in risk.published)
        assert risk.published
        assert any(source in read_limits()[risk.limit].runs for source in ("Step Law", "Marin", "output embedding"))
        assert risk.test.startswith("lab ")


@pytest.mark.parametrize("name", read_limits())
def test_shipped_limits_are_those_of_the_committed_records(name: str) -> None:
    entry = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["limits"][name]
    found, shipped = measure_limits.measure(entry), read_limits()[name]
    assert found.at({"params": 7e9}) == pytest.approx(shipped.at({"params": 7e9}), rel=1e-4)
    assert found.runs == shipped.runs
    assert found.steps == pytest.approx(shipped.steps, rel=1e-5)
    assert found.sizes == pytest.approx(shipped.sizes, rel=1e-5)


def test_the_page_quotes_what_the_lab_says() -> None:
    (shown,) = re.findall(r"((?:^> .*\n)+)", PAGE, re.MULTILINE)
    run = next(run for run in published_runs() if run.name == "OLMo-0424-7B")
    said = answer_of(run.numbers, "", without(run)).headline
    assert " ".join(line.removeprefix("> ") for line in shown.splitlines()) == said
    words = " ".join(PAGE.split())
    counted = re.findall(r"(\d+) published runs\]\S+ none had a number beyond its limit, and (\d+)", words)
    assert counted == [(str(len(published_runs())), str(len(UNSTABLE)))]
    assert base_rate(published_runs()).startswith(f"Of the {len(published_runs())} ")


def test_published_runs_name_their_sources() -> None:
    for run in published_runs():
        assert run.outcome in ("stable", "unstable")
        assert re.search(r"arXiv:\d{4}\.\d{5}|marin-community", run.source)
        assert run.published


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
    assert page.command == "lab predict --params 7B lr=0.0003 qk_norm=no"
    assert (
        page.table["risk"].tolist()
        == answer_of(read_numbers(["params=7e9", "lr=3e-4", "qk_norm=no"]), "").table["risk"].tolist()
    )
    assert "short warm-up" in page._repr_html_()
    with pytest.raises(RequestError, match="'bf61'; nearest: bf16"):
        lab.numbers(7e9, precision="bf61")


def test_the_page_names_all_numbers() -> None:
    known = yaml.safe_load(limits.FILE.with_name("risks.yaml").read_text())["numbers"]
    named = re.findall(r"`(?:--)?(\w+)`", "".join(re.findall(r"^\| `.*?\|", PAGE, re.MULTILINE)))
    assert set(named) == set(known)
