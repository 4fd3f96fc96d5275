"""The README and the page of commands: their commands run, only smaller, and their numbers are those of the records.

``python tests/test_readme.py`` writes the tables of claims into the README of the results, and effects of claims into
the pages that quote them.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from committed import RESULTS, in_one_process, judged
from lab.__main__ import main
from lab.analysis import findings, study, tables
from lab.analysis.events.detectors import GRADIENT_RISE, LIMIT, LOGIT_RISE
from lab.analysis.judging.verdicts import effects_of
from lab.analysis.logit_rounding import COSTLY, MANTISSA_BITS, level_at_cost
from lab.analysis.sensitivity import Window
from lab.report import scoreboard
from lab.studies.claims import CLAIMS
from lab.studies.leaderboard.listing import board_of, headline
from lab.studies.leaderboard.pairs import pair_panels
from lab.studies.leaderboard.transfer import agreement, by_prediction, predict, published, score, without_runs

HOME = Path(__file__).parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")
LAUNCH_PAGE = (HOME / "docs" / "before_you_launch.md").read_text(encoding="utf-8")
COMMANDS_PAGE = (HOME / "docs" / "commands.md").read_text(encoding="utf-8")
COMMANDS = [
    *re.findall(r"^\| \*\*.*?\| `(lab .*?)` \|", README, re.MULTILINE),  # one for each question
    *(
        line
        for block in re.findall(r"```sh\n(.*?)```", README + COMMANDS_PAGE, re.DOTALL)
        for line in block.splitlines()
        if line
    ),
]
# The tables of `lab claims --markdown` in the README of the results.
TABLES = (scoreboard.SUBJECT_MARKS, scoreboard.MARKS)
# Pages that quote effects of claims, each between a mark with the claim's name and an end, and how many at least.
QUOTING = {"README.md": 10, "docs/before_you_launch.md": 10, "docs/low_precision.md": 1, "docs/my_run_has_spiked.md": 3}
QUOTED = re.compile(r"(<!-- effect of (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
SHARE = re.compile(r"(<!-- share of (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
TALLY = re.compile(r"(<!-- tally -->)(.*?)(<!-- end -->)", re.DOTALL)
BOARD = re.compile(r"(<!-- board -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TRANSFER = re.compile(r"(<!-- transfer -->)(.*?)(<!-- end -->)", re.DOTALL)
NUMBERS = re.compile(r"-?[\d.e-]+ \[-?[\d.e-]+, -?[\d.e-]+\]")  # an effect and its interval
# Sweeps that are judged in a moment, and on one text.
A_FEW = ("epsilon", "depth_width", "spike_responses", "optimizer_arms", "kappa")
SMALLER = ["scale=toy", "hydra/launcher=basic", "seed=0", "optimizer.lr=1e-2,1e-1"]
RECIPE = "hydra:\n  sweeper:\n    params:\n      optimizer.lr: 1e-3,1e-2,1e-1,3e-1\n"
SMALLER_CHECK = ["model.width=32,128", "model.depth=1", "batch_size=8", "optimizer.lr=1e-1"]


@cache
def claims() -> str:
    """What ``lab claims results --markdown`` prints."""
    return scoreboard.markdown_tables(judged())


def between(text: str, marks: tuple[str, str]) -> str:
    """The part of a text from the first mark to the second."""
    return text[text.index(marks[0]) : text.index(marks[1]) + len(marks[1])]


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE)
    named = [shlex.split(line, comments=True)[1] for line in COMMANDS if line.startswith("make ")]
    assert {"quickstart", "test"} <= set(named) <= set(targets)


def test_the_rows_of_a_few_sweeps_are_those_of_the_committed_results() -> None:
    """But for q, which depends on all rows."""

    def without_q(text: str) -> set[tuple[str, ...]]:
        cells = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
        return {(*each[:4], *each[5:]) for each in cells}

    folders = scoreboard.read([RESULTS / name for name in A_FEW])
    rows = scoreboard.judge_all(folders)
    made = without_q(scoreboard.markdown([row for row in rows if row.claim.sweep in A_FEW]))
    assert len(made) > 20
    assert made <= without_q((RESULTS / "README.md").read_text())


def test_the_verdicts_that_come_with_the_lab_are_those_of_the_tables() -> None:
    shipped, results = scoreboard.markdown_tables(scoreboard.committed()), (RESULTS / "README.md").read_text("utf-8")
    for marks in TABLES:
        assert between(shipped, marks) == between(results, marks)


def rows_of_the_results() -> dict[str, tuple[str, str, str]]:
    """Verdict, effect and seeds of each claim, by its sentence, in the tables of the results."""
    lines = between((RESULTS / "README.md").read_text(encoding="utf-8"), scoreboard.MARKS).splitlines()
    cells = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    return {each[0]: (each[2], each[3], each[5]) for each in cells}


def effects_of_the_results() -> dict[str, str]:
    """``0.148 [0.12, 0.17]`` of each claim by name, from the tables of the results; a screening is called so."""
    rows = {name: rows_of_the_results()[CLAIMS[name].sentence] for name in CLAIMS}
    found = {name: NUMBERS.match(effect) for name, (_, effect, _) in rows.items()}
    return {name: one[0] + " (screening)" * rows[name][2].endswith("(screening)") for name, one in found.items() if one}


@cache
def share_of(name: str) -> str:
    """``70 of 71 (92 to 100 %)``, of a claim on the share of hits in the trials of its sweep."""
    claim = CLAIMS[name]
    _, effects = effects_of(claim, scoreboard.read([RESULTS / claim.sweep]))
    (interval,) = effects.intervals()
    hits = ((effects.table + effects.minus) * effects.trials).sum()
    low, high = (100 * (end + effects.minus) for end in (interval.low, interval.high))
    return f"{hits:.0f} of {effects.trials.sum():.0f} ({low:.0f} to {high:.0f} %)"


def quote(text: str, effects: dict[str, str], tally: str) -> str:
    """Put the effects of claims, the shares of some, and the tally of verdicts, where a page marks them.

    Raises:
        KeyError: a claim has no effect.
    """
    text = SHARE.sub(lambda found: f"{found[1]}{share_of(found[2])}{found[4]}", text)
    text = QUOTED.sub(lambda found: f"{found[1]}{effects[found[2]]}{found[4]}", text)
    return TALLY.sub(lambda found: f"{found[1]}{tally}{found[3]}", text)


def tally_of_the_results() -> str:
    """The line that counts the verdicts of all claims that are not ours."""
    return re.findall(r"^- (\d+ claims: .*)\.$", (RESULTS / "README.md").read_text(encoding="utf-8"), re.MULTILINE)[0]


def quote_board(text: str) -> str:
    """Put what helps on each board, and the agreement with what was published, where the README marks them."""
    changes = {"leaderboard": "Changes of the model", "leaderboard_optimizers": "Optimizers, clipping and decay"}
    lines = [
        f"- {named} {panel.title}: {headline(panel)}.\n"
        for sweep, named in changes.items()
        for panel in board_of([RESULTS / sweep]).panels
    ]
    (pairs,) = pair_panels(board_of([RESULTS / "leaderboard_pairs"]))
    lines.append(f"- {pairs.heading}: {headline(pairs)}.\n")
    other = board_of([RESULTS / "other_text" / "leaderboard"], Window(3e-3, 3))
    lines.append(f"- Arms that help or harm, on another text {other.panels[0].title}: {headline(other.panels[0])}.\n")
    predictions = predict(board_of([]), published(), RESULTS)
    text = BOARD.sub(lambda found: f"{found[1]}{''.join(lines)}{found[3]}", text)
    said = f"{agreement(score(predictions))}. {without_runs(predictions)}. {by_prediction(predictions)}"
    return TRANSFER.sub(lambda found: f"{found[1]}{said}{found[3]}", text)


def test_the_board_in_the_readme_is_that_of_the_committed_results() -> None:
    assert quote_board(README) == README
    assert len(BOARD.findall(README)) == len(TRANSFER.findall(README)) == 1


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_effects_are_those_of_reproduced_claims(page: str) -> None:
    text = (HOME / page).read_text(encoding="utf-8")
    assert text == quote(text, effects_of_the_results(), tally_of_the_results())
    effects, shares = ([found[1] for found in marks.findall(text)] for marks in (QUOTED, SHARE))
    named = effects + shares
    assert len(set(named)) >= QUOTING[page]
    assert {rows_of_the_results()[CLAIMS[name].sentence][0] for name in named} == {"reproduced"}
    assert len(NUMBERS.findall(text)) == len(effects)  # none stands outside of marks
    assert not re.findall(
        r"^\s*<!-- (?:effect|share|tally)", text, re.MULTILINE
    )  # a line that begins so is HTML, not prose


def test_the_page_before_a_launch_acts_where_alarms_sound() -> None:
    acts = [line.split(" | ")[3] for line in LAUNCH_PAGE.splitlines() if line.startswith("| ")]
    factors = {"logit_growth": LOGIT_RISE, "gradient_spike": GRADIENT_RISE, "epsilon_ratio": LIMIT}
    words = {1.0: "at 1 ", 4.0: "at four times ", 5.0: "at five times "}
    for alarm, factor in factors.items():
        (act,) = [act for act in acts if f"(alarm `{alarm}`)" in act]
        assert words[factor] in act
    bf16, fp16 = (level_at_cost(COSTLY, MANTISSA_BITS[name]) for name in ("bf16", "fp16_emulated"))
    (act,) = [act for act in acts if "(alarm `logit_rounding`)" in act]
    assert act.startswith(f"at {bf16:g} in bf16, at {fp16:g} in fp16 ")


def test_a_quoted_effect_is_redrawn() -> None:
    page = "by <!-- effect of a -->1 [0, 2]<!-- end --> nats. <!-- tally -->none<!-- end -->"
    assert quote(page, {"a": "3 [2, 4]"}, "2") == (
        "by <!-- effect of a -->3 [2, 4]<!-- end --> nats. <!-- tally -->2<!-- end -->"
    )
    with pytest.raises(KeyError):
        quote(page, {}, "2")


@pytest.mark.slow
@in_one_process
@pytest.mark.parametrize("marks", TABLES)
def test_the_tables_of_claims_are_those_of_the_committed_results(marks: tuple[str, str]) -> None:
    assert between((RESULTS / "README.md").read_text(encoding="utf-8"), marks) == between(claims(), marks)


@pytest.mark.slow
@in_one_process
def test_the_verdicts_that_come_with_the_lab_are_those_of_the_committed_results() -> None:
    for shipped, row in zip(scoreboard.committed(), judged(), strict=True):
        assert shipped.claim == row.claim
        assert shipped.verdict[1:4] == pytest.approx(row.verdict[1:4], nan_ok=True)
    assert list(scoreboard.text(scoreboard.committed())) == list(scoreboard.text(judged()))


@pytest.mark.slow
@in_one_process
def test_the_counts_by_subject_are_those_of_the_claims() -> None:
    """The verdicts of the tables of claims, counted again."""
    lines = [line.strip("| ").split(" | ") for line in between(claims(), scoreboard.MARKS).splitlines()]
    questions = {claim.sentence for claim in CLAIMS.values() if claim.kind == "question"}
    rows = [
        (each[1].endswith("(ours)"), re.sub("does not hold at up to .* parameters", scoreboard.NOT_HERE, each[2]))
        for each in lines
        if len(each) > 2 and each[0] not in {"claim", *questions}
    ]
    paper, ours = ([verdict for is_ours, verdict in rows if is_ours == asked] for asked in (False, True))
    counts = [
        [int(cell) for cell in line.strip("| ").split(" | ")[1:]]
        for line in between(claims(), scoreboard.SUBJECT_MARKS).splitlines()[3:-1]
    ]
    expected = [[len(verdicts), *map(verdicts.count, scoreboard.WORDS)] for verdicts in (paper, ours)]
    assert counts[-2:] == expected
    assert counts[-2] == [sum(column) for column in zip(*counts[:-2], strict=True)]


def test_the_numbers_of_the_readme_are_those_of_the_committed_quickstart() -> None:
    made = study([HOME / "results" / "quickstart"])
    number = r"\d\.\d{3} ± \d\.\d{3}"
    assert re.findall(number, README) == re.findall(number, " ".join(findings.headline(made.pairs)))
    assert len(re.findall(number, README)) == 4
    first_lost = made.seeds.groupby("arm")["eta_div"]
    assert first_lost.apply(set).to_dict()["without qk-layernorm"] == {0.1}
    assert first_lost.count().to_dict()["with qk-layernorm"] == 0
    assert "from learning rate 0.1 on" in " ".join(README.split())


def test_the_terminal_shows_the_committed_quickstart() -> None:
    """A new run has the same numbers wherever its text and its bits are the same."""
    drawn = unescape((HOME / "docs" / "terminal.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    assert "$ lab sweep quickstart<" in drawn
    rows = tables.sensitivities_as_text(study([RESULTS / "quickstart"])).drop(columns="n").astype(str)
    assert len(rows) == 4
    for cells in rows.to_numpy().tolist():
        assert re.search(r" +".join(map(re.escape, cells)), drawn)


@pytest.mark.slow
@pytest.mark.usefixtures("briefly")
def test_the_lab_commands_work_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only ``lab report`` draws: one page with figures shows what all of them would.

    A smaller sweep is not the one that the baseline is of, and ``lab check`` says so.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("results", "docs"):
        (tmp_path / folder).symlink_to(HOME / folder)
    (tmp_path / "README.md").write_text(README)
    for log in ("your_log.csv", "your_replay.csv"):
        (tmp_path / log).write_text("step,loss\n" + "".join(f"{step},{3 - step / 200}\n" for step in range(200)))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    requests = [shlex.split(line, comments=True)[1:] for line in COMMANDS if line.startswith("lab ")]
    assert len(requests) >= 6
    for words in requests:
        kept = [word for word in words if not word.startswith("scale=")]  # no other scale is as small
        added = [key for key in SMALLER if not any(word.startswith(key.split("=")[0]) for word in kept)]
        check = SMALLER_CHECK if "model.width=32" not in words else []  # that of depths is small
        added = {"sweep": added, "train": added, "coordcheck": check}.get(words[0], [])
        smaller = [*(kept if added else words), *added]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["lab", *smaller])
            if words[0] in ("sweep", "train"):
                patch.setattr("lab.report.build.FIGURES", {})
            code, output = main(smaller), capsys.readouterr()
            assert code == (2 if words[0] == "check" else 0), output.err
            assert words[0] != "check" or output.out.startswith("cannot judge: ")


@pytest.mark.slow
def test_quickstart_in_a_clean_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(HOME), str(tmp_path / "clone")], check=True)
    made = subprocess.run(
        ["make", "--no-print-directory", "quickstart"],
        cwd=tmp_path / "clone",
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "84 trained, 0 already there" in made.stdout.splitlines()[-1]
    assert (tmp_path / "clone/runs/quickstart/report.html").exists()
    left = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path / "clone", capture_output=True, check=True)
    assert left.stdout == b""


if __name__ == "__main__":  # the tables and the effects, put where they stand
    results = (RESULTS / "README.md").read_text(encoding="utf-8")
    for marks in TABLES:
        results = results.replace(between(results, marks), between(claims(), marks))
    (RESULTS / "README.md").write_text(results, encoding="utf-8")
    (RESULTS / "verdicts.json").write_text(scoreboard.to_commit(judged()), encoding="utf-8")
    for page in QUOTING:
        quoted = quote((HOME / page).read_text(encoding="utf-8"), effects_of_the_results(), tally_of_the_results())
        (HOME / page).write_text(quote_board(quoted), encoding="utf-8")
