"""The README and the page of commands: their commands run, only smaller, and their numbers are those of the records."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import cache
from html import unescape
from pathlib import Path

import pytest

from committed import RESULTS, in_one_process, judged
from lab.__main__ import main
from lab.analysis import findings, load, points, study
from lab.analysis.runaway import HALF, rates
from labwatch.events.detectors import GRADIENT_RISE, LIMIT, LOGIT_RISE
from labwatch.events.logit_rounding import COSTLY, MANTISSA_BITS, level_at_cost
from studies.claims import public_table, scoreboard
from studies.claims.registry import BY_STUDY, CLAIMS

HOME = Path(__file__).parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")
FINDINGS_PAGE = (HOME / "docs" / "findings.md").read_text(encoding="utf-8")
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
SCRIPT = runpy.run_path(str(RESULTS / "write_pages.py"))
between = SCRIPT["between"]
# Pages that quote effects of claims, and how many at least.
QUOTING = {"docs/findings.md": 10, "docs/before_you_launch.md": 10, "docs/low_precision.md": 1}
QUOTING |= {"docs/my_run_has_spiked.md": 3, "docs/held_to_real_runs.md": 10, "docs/which_batch_size.md": 1}
OF_STUDIES = [page for page in SCRIPT["QUOTING"] if page.startswith("studies/")]
QUOTING |= {page: 1 for page in OF_STUDIES if "<!-- effect of" in (HOME / page).read_text(encoding="utf-8")}
# Sweeps that are judged in a moment, and on one text.
A_FEW = ("epsilon", "depth_width", "spike_responses", "optimizer_arms", "kappa")
SMALLER = ["scale=toy", "hydra/launcher=basic", "seed=0", "optimizer.lr=1e-2,1e-1"]
RECIPE = "hydra:\n  sweeper:\n    params:\n      optimizer.lr: 1e-3,1e-2,1e-1,3e-1\n"
NAMED = ("baselines", "logit_growth", "noise_scale", "quickstart")  # folders of results that commands name
SMALLER_CHECK = ["model.width=32,128", "model.depth=1", "batch_size=8", "optimizer.lr=1e-1"]


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE)
    named = [shlex.split(line, comments=True)[1] for line in COMMANDS if line.startswith("make ")]
    assert {"quickstart", "test"} <= set(named) <= set(targets)


@pytest.mark.slow
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


# What stands beside claims: the law of failing rates and what it rests on, and what qualifies a claim.
OF_NO_CLAIM = {"law_params", "law_tokens", "law_n", "law_correlation", "rise_of_the_lab", "diverged_loss"}
OF_NO_CLAIM |= {f"way_of_{runs}" for runs in ("the_lab", "public_runs")} | {"allowed_by_nats", "allowed_by_share"}
OF_NO_CLAIM |= {f"costly_at_{width}_{steps}" for width in (16, 32) for steps in (200, 800)}
OF_NO_CLAIM |= {"gradients_above_epsilon", "base_falls_with_batch", "quiet_100"}
OF_NO_CLAIM |= {"runaway_off", "runaway_width", "runaway_steps", "unfitted_off"}
OF_NO_CLAIM |= {"runaway_of_stable", "runaway_of_unstable", "stable_too_low"}
OF_NO_CLAIM |= {"scatter_of_runaway", "scatter_of_failing"}
OF_NO_CLAIM |= {f"quiet_by_chance_{updates}" for updates in (20, 100)}


@cache
def verdicts() -> dict[str, str]:
    """By claim its verdict, on committed records and on runs of others."""
    words = {row.claim.name: row.word for row in scoreboard.committed()}
    return words | {row.claim.name: row.decision.verdict for row in public_table.judge_all()}


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_effects_are_those_of_reproduced_claims(page: str) -> None:
    text = (HOME / page).read_text(encoding="utf-8")
    effects, shares = ([found[1] for found in SCRIPT[marks].findall(text)] for marks in ("EFFECT", "SHARE"))
    assert len({*effects, *shares}) >= QUOTING[page]
    assert {verdicts()[name] for name in {*effects, *shares} - OF_NO_CLAIM} == {"reproduced"}
    for table in ("PUBLIC_RUNS", "LEFT_OUT"):  # which a script writes, marks and all
        text = SCRIPT[table].sub("", text)
    quoted = "; ".join(found[2] for found in SCRIPT["EFFECT"].findall(text))
    assert SCRIPT["NUMBERS"].findall(text) == SCRIPT["NUMBERS"].findall(quoted)  # none stands outside of marks
    # a line that begins so is HTML, not prose
    assert not re.findall(r"^\s*<!-- (?:effect|share|tally)", text, re.MULTILINE)


@pytest.mark.parametrize("page", OF_STUDIES)
def test_the_page_of_a_study_counts_its_verdicts_and_what_its_sweeps_cost(page: str) -> None:
    text, (rows, study) = (HOME / page).read_text(encoding="utf-8"), (scoreboard.committed(), Path(page).parent.name)
    assert SCRIPT["quote_study"](text, rows) == text
    assert [found[1] for marks in ("OF_STUDY", "SWEEPS") for found in SCRIPT[marks].findall(text)] == [study] * 2
    *sweeps, total = re.findall(r"^\| (\w+) \| .*\| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert {claim.sweep for claim in BY_STUDY[study]} <= {sweep for sweep, _, _ in sweeps}
    assert total == ("all", *(str(sum(int(row[column]) for row in sweeps)) for column in (1, 2)))


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
    quote = SCRIPT["quote"]
    page = "by <!-- effect of a -->1 [0, 2]<!-- end --> nats. <!-- tally -->none<!-- end -->"
    assert quote(page, {"a": "3 [2, 4]"}, "2") == (
        "by <!-- effect of a -->3 [2, 4]<!-- end --> nats. <!-- tally -->2<!-- end -->"
    )
    with pytest.raises(KeyError):
        quote(page, {}, "2")


@pytest.mark.slow
@in_one_process
def test_the_pages_are_those_of_the_committed_results() -> None:
    for path, text in SCRIPT["pages"](judged()):
        assert path.read_text(encoding="utf-8") == text, path.name
    assert len(SCRIPT["BOARD"].findall(FINDINGS_PAGE)) == len(SCRIPT["TRANSFER"].findall(FINDINGS_PAGE)) == 1


@pytest.mark.slow
def test_a_check_names_the_pages_that_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = SCRIPT["main"]
    monkeypatch.setitem(main.__globals__, "pages", lambda rows: [(HOME / "README.md", f"{README}stale")])
    assert main("--check") == 1
    assert capsys.readouterr().out.startswith("README.md differs")
    assert (HOME / "README.md").read_text(encoding="utf-8") == README


def test_the_counts_by_subject_are_those_of_the_claims() -> None:
    """The verdicts of the tables of claims, counted again."""
    tables = scoreboard.markdown_tables(scoreboard.committed())
    lines = [line.strip("| ").split(" | ") for line in between(tables, scoreboard.MARKS).splitlines()]
    questions = {claim.sentence for claim in CLAIMS.values() if claim.kind == "question"}
    rows = [
        (each[1].endswith("(ours)"), re.sub("does not hold at up to .* parameters", scoreboard.NOT_HERE, each[2]))
        for each in lines
        if len(each) > 2 and each[0] not in {"claim", *questions}
    ]
    paper, ours = ([verdict for is_ours, verdict in rows if is_ours == asked] for asked in (False, True))
    counts = [
        [int(cell) for cell in line.strip("| ").split(" | ")[1:]]
        for line in between(tables, scoreboard.SUBJECT_MARKS).splitlines()[3:-1]
    ]
    expected = [[len(verdicts), *map(verdicts.count, scoreboard.WORDS)] for verdicts in (paper, ours)]
    assert counts[-2:] == expected
    assert counts[-2] == [sum(column) for column in zip(*counts[:-2], strict=True)]


def test_the_numbers_of_its_page_are_those_of_the_committed_quickstart() -> None:
    page = (HOME / "docs" / "quickstart.md").read_text(encoding="utf-8")
    number = r"\d\.\d{3} ± \d\.\d{3}"
    made = list[str]()
    for folder in ("quickstart", "quickstart_fp32"):
        of_folder = study([RESULTS / folder])
        made += re.findall(number, " ".join(findings.headline(of_folder.pairs)))
        first_lost = of_folder.seeds.groupby("arm")["eta_div"]
        assert first_lost.apply(set).to_dict()["without qk-layernorm"] == {0.1}
        assert first_lost.count().to_dict()["with qk-layernorm"] == 0
    assert re.findall(number, page) == made
    assert len(made) == 8
    assert "from learning rate 0.1 on" in " ".join(page.split())


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_first_picture_shows_from_where_the_committed_quickstart_fails(page: str) -> None:
    records = load(RESULTS / "quickstart")
    found = {(rate.arm, rate.size): rate.rate for rate in rates(records, points(records.runs)) if rate.quantity == HALF}
    small, large = (found["without qk-layernorm", size].mean for size in (24736, 98624))
    alt = f"fail from {small:.2g} and from {large:.2g}; with it they stay low, and neither fails up to 0.3]"
    picture = "results/quickstart/figures/failing_learning_rate.svg"
    text = (HOME / page).read_text(encoding="utf-8")
    assert re.search(re.escape(alt) + rf"\((?:\.\./)?{picture}\)", text)
    assert page == "README.md" or f"fail from {small:.2g} and from {large:.2g} on." in " ".join(text.split())
    drawn = re.findall(r"<!-- (fails from .*?|not up to .*?) -->", (HOME / picture).read_text(encoding="utf-8"))
    assert drawn == [f"fails from {small:.2g}", "not up to 0.3", f"fails from {large:.2g}", "not up to 0.3"]
    assert {found["with qk-layernorm", size].low for size in (24736, 98624)} == {0.3}


def test_the_first_page_is_short_and_begins_with_what_everybody_understands() -> None:
    assert len(README.splitlines()) <= 150
    screen, _, _ = README.partition("\n## ")
    assert "](results/quickstart/figures/failing_learning_rate.svg)" in screen
    assert screen.count("![") == 1
    assert not re.search(r"\bp [<=]|\(p |95 %|±|\bnull\b|\[\d", screen)
    assert re.findall(r"^make (\w+)", screen, re.MULTILINE) == ["quickstart", "test"]


def test_the_terminal_shows_the_committed_quickstart() -> None:
    """A new run has the same numbers wherever its text and its bits are the same. Halfway it has two of three seeds."""
    drawn = unescape((HOME / "docs" / "terminal.svg").read_text(encoding="utf-8")).replace("\xa0", " ")
    assert "$ lab sweep quickstart<" in drawn
    points = study([RESULTS / "quickstart"]).points
    small = points[(points["size"] == points["size"].min()) & (points["seed"].astype(int) < 2)]
    for arm, losses in small.groupby("arm"):
        row = re.sub(r"<.*?>", "", next(line for line in drawn.split("<text") if f"width 32  {arm}" in line))
        shown = re.findall(r"\d\.\d+", row.partition(str(arm))[2])
        assert [*map(float, shown)] == pytest.approx(losses.groupby("lr")["loss"].mean().to_list(), abs=0.006)


@pytest.mark.slow
@pytest.mark.usefixtures("briefly")
def test_the_lab_commands_work_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only ``lab report`` draws: one page with figures shows what all of them would.

    A smaller sweep is not the one that the baseline is of, and ``lab check`` says so.
    """
    monkeypatch.chdir(tmp_path)
    assert {*re.findall(r"\bresults/(\w+)", "\n".join(COMMANDS))} == {*NAMED}
    (tmp_path / "docs").symlink_to(HOME / "docs")
    for name in (*NAMED, "board"):
        shutil.copytree(RESULTS / name, tmp_path / "results" / name)
    (tmp_path / "README.md").write_text(README)
    for log in ("your_log.csv", "your_replay.csv"):
        (tmp_path / log).write_text("step,loss\n" + "".join(f"{step},{3 - step / 200}\n" for step in range(200)))
    (tmp_path / "mine.yaml").write_text(RECIPE)
    (tmp_path / "recipe.yaml").write_text("intervention: [rmsnorm]\n")
    lines = [shlex.split(line, comments=True) for line in COMMANDS if line.startswith("lab ")]
    requests = dict.fromkeys((*words,) for _, *words in lines)
    assert len(requests) >= 6
    for words in requests:
        if words == ("report", "results"):  # all of them, on all cores
            words = ("report", "results/quickstart")
        kept = [word for word in words if not word.startswith("scale=")]  # no other scale is as small
        added = [key for key in SMALLER if not any(word.startswith(key.split("=")[0]) for word in kept)]
        if words[0] == "train" and "-m" not in words:  # which trains one run
            added = [key.partition(",")[0] for key in added]
        check = SMALLER_CHECK if "model.width=32" not in words else []  # that of depths is small
        brief = [] if "--params" in words else ["steps=2", "seed=0,1", "--tests", "lr_x10"]
        added = {"sweep": added, "train": added, "coordcheck": check, "stress": brief}.get(words[0], [])
        smaller = [*(kept if added else words), *added]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["lab", *smaller])
            if words[0] in ("sweep", "train"):
                patch.setattr("lab.report.build.FIGURES", {})
            code, output = main(smaller), capsys.readouterr()
            judges = words[0] == "check" and "--baseline" in words
            alarms = words == ("watch", "docs/recording.jsonl")  # in which a fault was planted
            assert code == (2 if judges else 1 if alarms else 0), output.err
            assert not judges or output.out.startswith("cannot judge: ")


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
    *_, trained, advice = made.stdout.splitlines()
    assert "84 trained, 0 already there" in trained
    assert advice.endswith("lab stress")
    assert (tmp_path / "clone/runs/quickstart/report.html").exists()
    left = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path / "clone", capture_output=True, check=True)
    assert left.stdout == b""
