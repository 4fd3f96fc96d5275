"""What stands beside the verdicts: sizes, steps and decay, earlier verdicts, other text, and what we restated."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from markupsafe import escape

import planted
from lab.__main__ import main
from studies.claims import scoreboard
from studies.claims.evidence import Evidence
from studies.claims.registry import CLAIMS
from studies.claims.scoreboard import ScoreboardRow
from studies.claims.verdicts import Verdict, judge_claim
from sweeping import OutputOf

RESULTS = Path(__file__).parents[2] / "results"
FALLS = CLAIMS["instability_rises_without"]
KAPPA = CLAIMS["kappa_up_to_a_hundred_is_harmless"]


def verdict(name: str, reason: str = "", sweep: str = "qk_layernorm", steps: tuple[int, ...] = (1000,)) -> Verdict:
    return Verdict(name, 1.0, 0.5, 1.5, 3, reason, f"results/{sweep}", sweep, (24_736, 393_856), steps, (0.1,))


def row_of(page: str, sentence: str) -> dict[str, str]:
    """The cells of a claim's line on the page of claims, by the name of their column."""
    lines = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in page.splitlines() if "<tr>" in line]
    return dict(zip(lines[0], next(line for line in lines if str(escape(sentence)) in line), strict=True))


@pytest.fixture
def page_of(tmp_path: Path) -> Callable[..., str]:
    """What ``lab claims DIR --html FILE`` writes, with more words."""

    (tmp_path / "claims.html").symlink_to("target.html")

    def page(folder: Path, *words: str) -> str:
        assert main(["claims", str(folder), "--html", str(tmp_path / "claims.html"), *words]) == 0
        return (tmp_path / "target.html").read_text()

    return page


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of results on one text, with a sweep on other text inside, in which instability falls with size."""
    folder = tmp_path_factory.mktemp("results")
    planted.write(folder / "qk_layernorm", list(planted.cards(arms=["z_loss"], widths=[32, 64, 128])))
    other = list(planted.cards(arms=["z_loss"], widths=[32, 64, 128], data_fingerprint="0" * 16))
    best = {32: 1.9, 64: 1.95, 128: 2.0}
    for card in other:
        lr = card["optimizer.lr"]
        card["final_val_loss"] = best[card["model.width"]] + 0.01 * card["seed"] * lr
        card["final_val_loss"] += max(0.0, math.log10(lr / 1e-2)) * 32 / card["model.width"]
    planted.write(folder / "other_text" / "qk_layernorm", other)
    return folder


def test_sweeps_on_other_text_are_judged_apart(
    results: Path, page_of: Callable[..., str], capsys: pytest.CaptureFixture[str], output_of: OutputOf
) -> None:
    text = page_of(results)
    cells = row_of(text, FALLS.sentence)
    assert (cells["verdict"], cells["on other text"]) == ("reproduced", "contradicted")
    assert capsys.readouterr().out.startswith("page: ")
    assert cells["parameters"] == "24.7k to 394k"
    alone = {one["claim"]: one["verdict"] for one in json.loads(output_of("claims", results / "other_text", "--json"))}
    assert alone[FALLS.sentence] == "contradicted"
    assert "also on other text: of " in text
    assert 'data-sorts="verdict"' in text, "rows are chosen by their verdict"


def test_other_text_is_asked_of_four_figures_only(results: Path) -> None:
    other = scoreboard.read_other_text([results])
    alone = {row.claim.figure for row in scoreboard.judge_all(other) if row.verdict.seeds}
    beside = {row.claim.figure for row in scoreboard.judge_all([], other_text=other) if row.on_other_text}
    assert "E.2" in alone
    assert beside == alone & {"1", "6", "8", "9"} == {"1", "9"}


@pytest.mark.parametrize(
    ("here", "there", "counted"),
    [
        (("reproduced", "reproduced"), ("reproduced", "contradicted"), "of 2 decided on both, 1 agree and 1 disagree"),
        (("contradicted",), ("contradicted",), "of 1 decided on both, 1 agree and 0 disagree"),
        (("reproduced",), ("inconclusive",), "of 0 decided on both, 0 agree and 0 disagree"),
    ],
)
def test_only_verdicts_that_are_decided_on_both_texts_agree(
    here: tuple[str, ...], there: tuple[str, ...], counted: str
) -> None:
    rows = [ScoreboardRow(FALLS, verdict(one), other) for one, other in zip(here, there, strict=True)]
    assert list(scoreboard.tallies(rows))[-1].endswith(counted)


def test_without_other_text_nothing_is_counted() -> None:
    assert not any("other text" in line for line in scoreboard.tallies([ScoreboardRow(FALLS, verdict("reproduced"))]))


def test_decay_times_steps_is_of_independent_decay() -> None:
    independent = planted.cards(widths=[32], **{"optimizer.weight_decay": 0.01})
    records = planted.records(list(independent))
    judged = judge_claim(CLAIMS["qk_layernorm_bounds_the_logits"], [Evidence("qk_layernorm", records)])
    assert judged.decay_times_steps == [4.0]
    coupled = records._replace(runs=records.runs.assign(**{"optimizer.name": "adamw_coupled"}))
    claim = CLAIMS["qk_layernorm_bounds_the_logits"]._replace(holds={})
    assert judge_claim(claim, [Evidence("qk_layernorm", coupled)]).decay_times_steps == []


def test_restated_claims_are_marked_and_counted_apart() -> None:
    rows = scoreboard.judge_all([], ["10"])
    figures = [row.figure for row in rows]
    after = [row.claim.sentence for row in rows].index(KAPPA.sentence) + 1
    assert figures[after:] == ["10 (ours)"] * 3 + ["10"]
    assert list(scoreboard.tallies(rows))[:2] == [
        "3 claims: 3 not run",
        "3 restated or bounded by us: 3 not run",
    ]
    table = scoreboard.markdown_by_subject(rows).splitlines()
    assert table[-3:-1] == [f"| {whose} | 3 | {7 * '0 | '}3 |" for whose in ("all", "restated or bounded by us")]


def test_one_is_counted_in_the_singular() -> None:
    question = ScoreboardRow(FALLS._replace(kind="question", ours=True), verdict("reproduced"))
    claim = ScoreboardRow(FALLS, verdict("inconclusive"))
    assert next(scoreboard.tallies([claim])) == "1 claim: 1 inconclusive"
    assert list(scoreboard.tallies([claim, claim, question]))[::2] == [
        "2 claims: 2 inconclusive",
        "1 question: 1 answered yes",
    ]
    assert next(scoreboard.tallies([question])) == "0 claims: none"
    unrun = ScoreboardRow(FALLS, verdict("not run"))
    for rows, them in (([unrun], "it"), ([unrun, unrun], "them")):
        assert (
            scoreboard.answer_of(rows)
            .text()
            .endswith(f"{len(rows)} not run and not shown; --verdict 'not run' shows {them}")
        )


def test_claims_are_counted_under_what_they_are_about() -> None:
    rows = [ScoreboardRow(FALLS._replace(about="spikes of loss"), verdict("reproduced"))]
    assert "| spikes of loss | 1 | 1 | 0 | 0 | 0 | 0 | 0 | 0 | 0 |" in scoreboard.markdown_by_subject(rows).splitlines()


def test_the_log_of_a_size_is_shown_as_the_size() -> None:
    claim = CLAIMS["gradients_meet_epsilon_at_a_size"]
    judged = verdict("reproduced")._replace(effect=7.0, low=6.0, high=8.0)
    assert ScoreboardRow(claim, judged).effect == "10M [1M, 100M] parameters"
    assert ScoreboardRow(FALLS, judged).effect == "7 [6, 8] nats/token per decade"


@pytest.mark.slow
def test_claims_without_runs_are_counted_and_shown_on_request_only(
    results: Path, page_of: Callable[..., str], output_of: OutputOf
) -> None:
    def listed(*words: str) -> str:
        return output_of("claims", results, *words)

    text = listed()
    assert FALLS.sentence in text
    assert KAPPA.sentence not in text
    assert re.search(r"\d+ not run and not shown; --verdict 'not run' shows them", text)
    assert KAPPA.sentence not in page_of(results)
    asked = listed("--verdict", "not run", "--figure", KAPPA.figure)
    assert KAPPA.sentence in asked
    assert "not shown" not in asked
    assert FALLS.sentence not in asked
    assert {row["figure"] for row in json.loads(listed("--figure", "1", "--json"))} == {"1"}


@pytest.mark.slow
def test_one_source_alone_ends_with_the_figures_that_show_its_claims(results: Path, output_of: OutputOf) -> None:
    drawn = results / "qk_layernorm" / "figures" / "learning_rate_sensitivity.svg"
    out = output_of("claims", results, "--source", "Wortsman 2023")
    assert "figure: " not in out
    assert not out.endswith("\n\n")
    drawn.parent.mkdir()
    drawn.write_text("<svg/>")
    *_, last = output_of("claims", results, "--source", "Wortsman 2023").splitlines()
    assert last == f"figure: {drawn}"
    assert {one["source"] for one in json.loads(output_of("claims", results, "--source", "GLM-130B", "--json"))} == {
        "GLM-130B"
    }


def test_decided_claims_are_counted_by_their_q() -> None:
    rows = [ScoreboardRow(FALLS, verdict(word), q=q) for word, q in (("in part", 0.05), ("no effect", 0.06))]
    rows.append(ScoreboardRow(FALLS, verdict("inconclusive"), q=0.01))
    said = "2 decided, 1 of them with q at most 0.05, 2 by a screening on 3 seeds"
    assert list(scoreboard.tallies(rows))[1] == said
    more = [row._replace(verdict=row.verdict._replace(seeds=4)) for row in rows]
    assert list(scoreboard.tallies(more))[1] == "2 decided, 1 of them with q at most 0.05"


def test_a_decision_on_the_fewest_seeds_is_called_a_screening() -> None:
    words = ("reproduced", "contradicted", "inconclusive")
    rows = [ScoreboardRow(FALLS, verdict(word)._replace(seeds=n)) for word in words for n in (3, 4)]
    few, more = "3 (screening)", "4"
    assert scoreboard.table(rows)["seeds"].tolist() == [few, more, few, more, "3", "4"]


def test_what_is_only_asked_is_not_called_contradicted() -> None:
    constant, question = FALLS._replace(kind="constant"), FALLS._replace(kind="question", ours=True)
    words = ("reproduced", "contradicted", "inconclusive")
    rows = [ScoreboardRow(claim, verdict(word)) for claim in (FALLS, constant, question) for word in words]
    assert scoreboard.table(rows)["verdict"].tolist() == [
        *words,
        *("reproduced", "does not hold at up to 394k parameters", "inconclusive"),
        *("answered yes", "answered no", "inconclusive"),
    ]
    claims, _, asked = scoreboard.tallies(rows)
    assert claims == "6 claims: 2 reproduced, 1 contradicted, 1 not at this size, 2 inconclusive"
    assert asked == "3 questions: 1 answered yes, 1 answered no, 1 inconclusive"
    head, _, *lines = scoreboard.markdown_by_subject(rows).splitlines()[1:-1]
    column = head.split(" | ").index("not at this size")
    assert [line.strip("| ").split(" | ")[column] for line in lines[-2:]] == ["1", "0"], "questions are no claims"


def test_a_q_is_no_smaller_than_what_is_known_of_tails(results: Path, output_of: OutputOf) -> None:
    qs = [one["q"] for one in json.loads(output_of("claims", results, "--json")) if one["q"] is not None]
    assert min(qs) == 1e-4
    rows = [ScoreboardRow(FALLS, verdict("reproduced"), q=q) for q in (1e-4, 0.002, math.nan)]
    assert scoreboard.table(rows)["q"].tolist() == ["at most 0.0001", "0.002", ""]


def test_a_claim_that_is_judged_again_changes_its_own_row() -> None:
    """On the committed records of its sweep it stays what it is among all; the q of the others come from all p."""
    name = "qk_layernorm_lowers_sensitivity"
    folders, other_text = (scoreboard.read([home / CLAIMS[name].sweep]) for home in (RESULTS, RESULTS / "other_text"))
    before, same = scoreboard.committed(), scoreboard.judged_again([name], folders, other_text)
    none = scoreboard.judged_again([name], [], [])
    shown = [[(row.claim.name, row.word, row.effect, row.on_other_text) for row in rows] for rows in (before, same)]
    assert shown[0] == shown[1]
    (changed,) = [(row, again) for row, again in zip(before, none, strict=True) if row.verdict != again.verdict]
    assert (changed[0].claim.name, changed[0].word, changed[1].word) == (name, "reproduced", "not run")
    others = [(row.q, again.q) for row, again in zip(before, none, strict=True) if scoreboard.LEAST_Q < row.q < 1]
    assert len(others) > 10
    assert all(again > q for q, again in others)  # one of the smallest p is not among them any more
