"""The page, the figures and the plain summary, made from planted records."""

import base64
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from markupsafe import escape

import planted
import planted_claims
from lab.__main__ import main
from lab.analysis import all_pairs, findings, points, study
from lab.analysis.rendering import html
from lab.analysis.text import plain_text
from lab.core import files
from lab.core.errors import RequestError
from lab.records import store
from lab.report import build
from lab.report.all_figures import FIGURES
from lab.report.replies import answer
from lab.sweeping.local_jobs import JobEnd
from studies.claims.evidence import Evidence
from studies.claims.judgement import yes_or_no
from studies.claims.scoreboard import judge_all, read

pytestmark = pytest.mark.xdist_group("page")  # one process draws the page
# Of what planted runs recorded these figures can be drawn.
DRAWN = {"learning_rate_sensitivity", "best_loss_with_size", "loss_over_steps", "max_attention_logit"}
DRAWN |= {"attention_logit_with_size", "failing_learning_rate"}
HOSTILE = '_<script>alert("1")</script> $x^{2 \\foo$ & {0} \u2603'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A study with a hostile arm, a diverged run and a failed one, and its page."""
    cards = list(planted.cards(arms=("z_loss", HOSTILE)))
    cards[20] |= {"status": "diverged", "diverged_at": 200, "final_val_loss": math.nan, "reason": "loss is NaN"}
    cards[4] |= {"status": "failed", "final_val_loss": None, "reason": "<b>out of memory</b>"}
    folder = planted.write(tmp_path_factory.mktemp("runs") / "a <i>study", cards)
    build.write_report(study([folder]), [folder])
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text()


@pytest.mark.slow
def test_an_answer_may_name_arms_of_its_own(tmp_path, monkeypatch):
    """The question of this sweep is asked of arms without their bursts."""
    monkeypatch.setattr(build, "FIGURES", {})
    runs = planted_claims.records(planted_claims.cards("adam_theory", dict.fromkeys(range(3), True)))
    store.write_imported(tmp_path / "adam_theory", runs)
    store.note_command(tmp_path / "adam_theory", "lab sweep adam_theory")
    build.make_report([tmp_path / "adam_theory"])
    assert build.NOTES["beside"] in (tmp_path / "adam_theory/report.html").read_text()


class Links(HTMLParser):
    """Collects tags and everything that could fetch something."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.ids, self.links = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]


def test_the_page_needs_nothing_but_itself(page):
    links = Links(page)
    assert not {"link", "img", "iframe", "object", "b", "i"} & set(links.tags)
    assert page.count("<script") == page.count(f"<script>{html.SCRIPT}</script>") == 1
    assert links.tags.count("svg") == len(DRAWN), "each figure once"
    assert links.links
    assert all(re.match(r"#|data:text/csv;base64,", link) for link in links.links), "so that it can be mailed alone"
    assert "url(http" not in page
    assert "@import" not in page
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert len(page) < 2e6


def test_the_page_holds_every_table_and_drawing_to_save(folder, page):
    saved = re.findall(r'<a download="([^"]+)" href="data:text/csv;base64,([^"]+)"', page)
    assert {name: base64.b64decode(data).decode() for name, data in saved} == {
        path.name: path.read_text() for path in folder.glob("tables/*")
    }
    for kind in ("svg", "png", "pdf"):
        assert set(re.findall(rf'<button type="button" data-{kind}="(\w+)"', page)) == DRAWN


def test_a_large_table_is_a_file_beside_the_page_only(tmp_path, monkeypatch, undrawn):
    monkeypatch.setattr(build, "LARGEST_INSIDE", 10)
    folder = planted.write(tmp_path / "large", list(planted.cards(**LONE)))
    page = build.write_report(study([folder]), [folder]).page.read_text()
    assert "data:text/csv" not in page
    assert (folder / "tables/losses.csv").stat().st_size > 10


def test_one_figure_and_one_table_are_open_and_the_rest_is_folded(page):
    body = page[page.index("<main") : page.index("</main>")]
    shown = re.sub(r"<details>.*?</details>", "", body, flags=re.DOTALL)
    assert (shown.count("<figure"), shown.count("<table")) == (1, 1)
    assert re.findall(r"<h2>(.*)</h2>", shown) == ["Final loss against learning rate, and sensitivity"]
    assert len(re.findall(r"<details><summary><h2>", body)) == body.count("<section") - 1
    assert body.count("<figure") == len(DRAWN)


def test_without_a_question_the_quantity_and_the_arms_head_the_page(tmp_path, undrawn):
    folder = planted.write(tmp_path / "opt", list(planted.cards(widths=(32,))))
    for noted in ("commands.json", "requests.json"):
        (folder / noted).unlink()
    report = build.write_report(study([folder]), [folder])
    assert report.question == "LR sensitivity: without qk-layernorm, with qk-layernorm"
    assert f"<h1>{report.question}</h1>" in report.page.read_text()


def test_the_page_opens_with_its_question_and_answer(folder, page):
    opening = re.sub(r"<[^>]*>", " ", page[page.index("<h1>") : page.index("<section")])
    question, said, *_ = [" ".join(line.split()) for line in opening.splitlines() if line.strip()]
    assert question == "Does the largest usable learning rate fall with size, and does qk-layernorm stop that?"
    made = study([folder])
    rows = judge_all([Evidence(str(folder), made.records, store.commands(folder))])
    expected = answer(made, ["qk_layernorm"], *yes_or_no(rows, ["qk_layernorm"]))
    assert said == str(escape(f"{expected.word} {expected.text}".strip()))
    assert "Partial: 83 of 84 runs ended." in opening
    table = page[page.index("The row of the reference") : page.index("<section")]
    assert all(str(escape(arm)) in table for arm in made.points["arm"].unique())
    assert " (reference)</td>" in table


def test_contents_name_every_section_in_order(page):
    names = re.findall(r'<section id="([^"]+)"', page)
    contents = page[page.index("<nav") : page.index("</nav>")]
    assert re.findall(r'href="#([^"]+)"', contents) == names
    assert len(names) == len(set(names)) > 8


def test_the_page_says_how_it_was_made_and_what_it_rests_on(page):
    assert "lab sweep qk_layernorm" in page
    assert "a1b2c3d4e5f60718" in page
    assert f"Python {sys.version.split()[0]}" in page
    assert "84 runs (82 finished, 1 diverged, 1 failed)" in page
    assert "seed 1 has no run at learning rate 0.001" in page


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes_without_torch(folder):
    made = [folder / "report.html", *folder.glob("figures/*.svg"), *folder.glob("tables/*.csv")]
    before = {path: path.read_bytes() for path in made}
    again = (
        "import sys; from lab.features.report.command import run; run(sys.argv[1:]); assert 'torch' not in sys.modules"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-W", "error", "-c", again, str(folder)], check=True, env=environment)
    assert {path: path.read_bytes() for path in made} == before
    assert {path.stem for path in folder.glob("figures/*")} == DRAWN
    assert len(made) == 1 + len(DRAWN) + 6


def test_text_tables_align_their_columns_and_end_without_spaces():
    table = pd.DataFrame({"arm": ["none", "z_loss"], "n": [3, 12], "note": ["", "worse"]})
    assert plain_text(table) == ["arm     n   note", "none    3", "z_loss  12  worse"]


def test_the_summary_warns_where_the_number_misleads(tmp_path):
    cards = list(planted.cards(arms=("qk_layernorm+z_loss",), widths=(32,), seeds=(0, 1)))
    text = build.summary(study([planted.write(tmp_path / "slow", cards)]))
    assert "24.8k" in text
    assert "More than half of the sensitivity is under-training" in text
    assert "Fewer than 3 seeds" in text
    assert "±" not in text
    steep = [
        card | {"final_val_loss": 2 + card["optimizer.lr"]} for card in planted.cards(("none",), (32,), seeds=range(3))
    ]
    text = build.summary(study([planted.write(tmp_path / "fast", steep)]))
    assert "More than half" not in text
    assert "±" in text


def test_the_summary_says_why_there_is_no_number(tmp_path):
    cards = list(planted.cards(arms=("none",), widths=(32,), lrs=(1e-2,)))
    text = build.summary(study([planted.write(tmp_path / "one", cards)]))
    assert "No sensitivity, which takes two learning rates" in text
    assert text.splitlines()[0].split() == ["arm", "parameters", "0.01"]  # a table of losses instead


def test_a_best_learning_rate_at_an_end_of_three_or_more_is_named(tmp_path):
    def warned(name, lrs):
        made = study([planted.write(tmp_path / name, list(planted.cards(("none",), (32,), lrs)))])
        return [note for note in findings.notes(made) if note.startswith("The best learning rate is the lowest or")]

    lrs = planted.LRS  # losses fall up to the fourth
    (highest,) = warned("highest", lrs[:3])
    assert ": without interventions at 24.7k. Train beyond it" in highest
    assert warned("lowest", lrs[3:6]) == [highest]
    assert warned("inside", lrs[2:5]) == []
    assert warned("two", lrs[2:4]) == [], "one of two is always at an end"


def gaps(folder, missing):
    """What is noted of learning rates without runs, in a study of two arms, all but the ``missing`` runs."""
    present = [card for card in planted.cards(("none", "z_loss"), (32,)) if not missing(card)]
    return [note for note in findings.notes(study([planted.write(folder, present)])) if "at learning rate" in note]


def test_learning_rates_that_no_seed_of_an_arm_ran_are_named(tmp_path):
    def missing(card):
        return card["intervention"] == "z_loss" and card["optimizer.lr"] in (0.03, 0.3)

    assert gaps(tmp_path / "whole", lambda card: False) == []
    (note,) = gaps(tmp_path / "lacking", missing)
    assert note.startswith("No seed has a run at learning rate 0.03 and 0.3, where other curves have one")
    assert note.endswith(": with z-loss at 24.7k.")
    assert gaps(tmp_path / "nowhere", lambda card: card["optimizer.lr"] == 0.3) == []


def test_seeds_with_unequal_learning_rates_are_named(tmp_path):
    def missing(card):
        return card["intervention"] == "none" and card["seed"] == 1 and card["optimizer.lr"] == 0.1

    (note,) = gaps(tmp_path / "lacking", missing)
    assert note.startswith(
        "without z-loss at 24.7k: seed 1 has no run at learning rate 0.1; the mean sensitivity takes each seed"
    )


def test_a_folder_of_failures_is_refused_with_its_reason(tmp_path):
    cards = [card | {"status": "failed", "reason": "no memory"} for card in planted.cards(widths=(32,), seeds=(0,))]
    with pytest.raises(RequestError, match="all 14 runs failed, the first with: no memory"):
        study([planted.write(tmp_path / "failed", cards)])


def test_sizes_of_which_no_setting_tells_are_curves_of_their_own(tmp_path, undrawn):
    """A table from elsewhere, in which all models have one width and depth."""
    folder = planted.write(tmp_path / "theirs", list(planted.cards(lrs=planted.LRS[::2])))
    runs = files.read_table(folder / "runs.parquet").assign(**{"model.width": 32, "model.name": "theirs"})
    files.write_table(folder / "runs.parquet", runs)
    _, text = build.make_report([folder])
    made = points(runs)
    assert len(made) == len(runs)
    assert set(made.groupby(["arm", "size"])["curve"].nunique()) == {1}
    assert made["curve"].nunique() == 4
    assert all(f" {size} " in text for size in ("24.7k", "98.6k"))


def test_learning_rates_that_six_digits_do_not_tell_apart_are_named(tmp_path):
    made = [*planted.cards(lrs=(0.1, 0.3)), *planted.cards(lrs=(0.1 * 3,), seeds=(0,))]
    said = [note for note in findings.notes(study([planted.write(tmp_path / "runs", made)])) if "six digits" in note]
    assert said == [
        "Learning rates that agree in six digits are one, and one of their runs is shown: 0.3 and 0.30000000000000004."
    ]


def test_runs_of_which_none_has_a_block_are_the_curves_along_a_setting():
    made = [
        card
        for eps in (1e-8, 1e-7, 1e-6)
        for card in planted.cards(("z_loss",), (32,), (1e-3, 1e-2), **{"model.depth": 0, "optimizer.eps": eps})
    ]
    (axes,) = FIGURES["loss_against_setting"](planted.records(made)).axes
    joined = [line for line in axes.get_lines() if line.get_linestyle() != "None"]
    curves = [line for line in joined if len(line.get_xdata()) == 3]
    assert [list(line.get_xdata()) for line in curves] == [[1e-8, 1e-7, 1e-6]] * 2


def test_the_headline_follows_the_paired_intervals():
    def sentences(second, losses):
        cards = list(planted.cards(arms=("none", "z_loss"), widths=(32, 64)))
        for card in cards:
            high = card["optimizer.lr"] == 0.3
            card["final_val_loss"] = 2 + high * losses[card["intervention"]](card)
        return findings.headline(all_pairs(points(planted.table(cards))))

    worse, better = lambda card: 1 + 0.01 * card["seed"], lambda card: 0.5
    first = sentences("z_loss", {"none": worse, "z_loss": better})
    assert first[0].startswith("LR sensitivity is lower with z-loss than without z-loss at every size, by 0.073")
    assert first[1].startswith("The instability part is lower with z-loss")
    assert sentences("none", {"none": better, "z_loss": worse})[0].startswith("LR sensitivity is lower without z-loss")
    noisy = sentences("none", {"none": lambda card: card["seed"], "z_loss": lambda card: 1 + 0.1 * card["seed"]})
    assert "differs from zero at no size" in noisy[0]
    mixed = {"none": worse, "z_loss": lambda card: 0.5 if card["model.width"] == 32 else card["seed"]}
    assert "differs from zero at 1 of 2 sizes" in sentences("none", mixed)[0]


LONE = {"arms": ("none",), "widths": (32,), "seeds": (0,), "lrs": (1e-2,)}


@pytest.mark.slow
def test_a_report_clears_away_figures_that_no_longer_apply(tmp_path):
    folder = planted.write(tmp_path / "one", list(planted.cards(**LONE)))
    stale, other = folder / "figures" / "best_loss_with_size.svg", folder / "figures" / "mine.svg"
    stale.parent.mkdir()
    for file in (stale, other):
        file.write_text("<svg/>")
    build.write_report(study([folder]), [folder])
    assert not stale.exists()
    assert other.exists()
    assert "Best loss over the learning rates" not in (folder / "report.html").read_text()


def test_the_loss_axis_holds_both_references_and_no_more():
    cards = list(planted.cards(arms=("z_loss",), widths=(32,)))
    cards[-1] |= {"final_val_loss": 1e9}
    cards[-2] |= {"status": "diverged", "diverged_at": 9, "final_val_loss": math.inf}
    for card in cards:
        card["loss_bigram"] = 1.5
    for name in ("learning_rate_sensitivity", "loss_over_steps"):
        axes = FIGURES[name](planted.records(cards)).axes[0]
        bottom, top = axes.get_ylim()
        assert max(max(line.get_ydata()) for line in axes.get_lines() if len(line.get_ydata())) < top
        assert planted.AT_INIT < top < 1.2 * planted.AT_INIT
        assert 1.2 < bottom < 1.5


@pytest.mark.slow
def test_a_folder_of_results_folders_gets_a_report_of_each(tmp_path, capsys, output_of, monkeypatch):
    figure, two = "learning_rate_sensitivity", {**LONE, "lrs": (1e-3, 1e-2)}
    monkeypatch.setattr(build, "FIGURES", {figure: FIGURES[figure]})
    single = planted.write(tmp_path / "alone", list(planted.cards(**two)))
    build.write_report(study([single]), [single])
    names = ("first", "second")
    several = [planted.write(tmp_path / "all" / name, list(planted.cards(**two))) for name in names]
    (tmp_path / "all" / "no results").mkdir()
    assert main(["report", str(tmp_path / "all")]) == 0
    printed = [*(f"report: {folder / 'report.html'}" for folder in several), f"index: {tmp_path / 'all/index.html'}"]
    assert capsys.readouterr().out.splitlines() == printed
    index = (tmp_path / "all" / "index.html").read_text()
    links = [f"{name}/{file}" for name in names for file in ("report.html", "figures/learning_rate_sensitivity.svg")]
    assert Links(index).links == links
    said = build.write_report(study([single]), [single])
    assert index.count(str(escape(said.answer))) == index.count(str(escape(said.question))) == 2
    assert index.count("<h2>") == 1, "both of one study"
    drawn = f"figures/{figure}.svg"
    assert (several[1] / drawn).read_bytes() == (single / drawn).read_bytes()
    assert "no runs in" in output_of("report", tmp_path / "all" / "no results", code=2)


@pytest.fixture
def in_this_process(monkeypatch, undrawn):
    """Reports of several folders without figures, in the process of the test."""

    def run(work, arguments, slots, imports):
        return [JobEnd(0, False, 0.0, work(*each)) for each in arguments]

    monkeypatch.setattr("lab.features.report.command.run_jobs", run)


def broken(folders, *others):
    if folders[0].name == "faulty":
        raise ValueError("planted")
    return MADE(folders, *others)


MADE = build.make_report


@pytest.mark.usefixtures("in_this_process")
def test_a_folder_that_fails_is_a_line_of_the_index(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(build, "make_report", broken)
    for name in ("damaged", "faulty", "good"):
        planted.write(tmp_path / "all" / name, list(planted.cards(**LONE)))
    (tmp_path / "all/damaged/runs.parquet").write_bytes(b"damaged")
    assert main(["report", str(tmp_path / "all")]) == 2
    printed = capsys.readouterr()
    index = (tmp_path / "all/index.html").read_text()
    assert "good/report.html" in Links(index).links
    assert (tmp_path / "all/good/report.html").exists()
    assert printed.out.splitlines() == [f"report: {tmp_path}/all/good/report.html", f"index: {tmp_path}/all/index.html"]
    (last,) = [line for line in printed.err.splitlines() if line.startswith("lab: ")]
    reasons = {"damaged": "the tables in", "faulty": "ValueError: planted"}
    for name, reason in reasons.items():
        assert re.search(rf"no report of \S*{name}: .*{reason}", last)
        assert re.search(rf"<li>{name}: .*{reason}", index)
    assert main(["report", str(tmp_path / "all"), "--json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    assert [Path(report["page"]).parent.name for report in answer["reports"]] == ["good"]
    assert "; ".join(answer["reasons"]) == last.removeprefix("lab: ")


@pytest.mark.slow
@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_reports_for_programs_name_their_files(tmp_path, output_of, monkeypatch):
    name = "learning_rate_sensitivity"
    monkeypatch.setattr("lab.report.build.FIGURES", {name: FIGURES[name]})
    for name in ("one", "other"):
        planted.write(tmp_path / "all" / name, list(planted.cards(**LONE)))
    made = []
    for folder in (tmp_path / "all", tmp_path / "all/one"):
        made.append(json.loads(output_of("report", folder, "--json")))
    assert [one["index"] for one in made] == [str(tmp_path / "all/index.html"), None]
    pages = [[report["page"] for report in one["reports"]] for one in made]
    assert pages == [[str(tmp_path / f"all/{name}/report.html") for name in ("one", "other")], [pages[0][0]]]
    assert made[1]["reports"][0]["answer"]
    assert all(
        path.endswith(".pdf")
        for path in json.loads(output_of("report", tmp_path / "all/one", "--format", "pdf", "--json"))["figures"]
    )


@pytest.mark.usefixtures("in_this_process", "undrawn")
def test_a_linked_folder_that_leaves_the_parent_is_skipped_and_stays_as_it_is(tmp_path, capsys):
    away = planted.write(tmp_path / "away", list(planted.cards(**LONE)))
    mine = planted.write(tmp_path / "all" / "mine", list(planted.cards(**LONE)))
    (tmp_path / "all" / "again").symlink_to(mine)
    (tmp_path / "all" / "theirs").symlink_to(away)
    before = sorted(away.rglob("*"))
    assert main(["report", str(tmp_path / "all")]) == 0
    said = capsys.readouterr().err
    assert f"skipped: {tmp_path}/all/theirs is a link that leads out of {tmp_path}/all\n" in said
    assert sorted(away.rglob("*")) == before
    assert {"mine/report.html", "again/report.html"} <= set(Links((tmp_path / "all/index.html").read_text()).links)


def test_a_figure_that_raises_becomes_a_note_and_the_others_are_drawn(tmp_path, monkeypatch):
    def faulty(*_):
        """A faulty figure."""
        raise ZeroDivisionError

    first = "learning_rate_sensitivity"
    monkeypatch.setattr(build, "FIGURES", {"faulty": faulty, first: FIGURES[first]})
    folder = planted.write(tmp_path / "one", list(planted.cards(**LONE | {"lrs": (1e-3, 1e-2)})))
    files.write_text(folder / "figures/faulty.svg", "of before")
    page = build.write_report(study([folder]), [folder]).page.read_text()
    note = r"This figure could not be drawn: ZeroDivisionError \(\S+, line \d+\)"
    assert re.search(rf'<h2>A faulty figure</h2>\n<p class="warning">{note}', page)
    assert (folder / f"figures/{first}.svg").exists()
    assert not (folder / "figures/faulty.svg").exists()


@pytest.mark.slow
def test_a_report_is_opened_in_the_browser_on_request(tmp_path, undrawn, output_of, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.chdir(tmp_path)
    planted.write(tmp_path / "all" / "one", list(planted.cards(**LONE)))
    assert main(["report", "all/one"]) == 0
    assert opened == []
    assert main(["report", "all/one", "--open"]) == 0
    assert main(["report", "--open", "all"]) == 0
    assert opened == [(tmp_path / "all" / name).as_uri() for name in ("one/report.html", "index.html")]
    assert "nearest: --open" in output_of("report", "all", "--opne", code=2)


def test_claims_of_the_paper_are_shown_where_the_sweep_tests_them(tmp_path, undrawn):
    folder = planted.write(tmp_path / "one", list(planted.cards(widths=(32, 64, 128))))
    report = build.write_report(study([folder]), [folder])
    rows = [row for row in judge_all(read([folder])) if row.verdict.folder and row.claim.sweep == "qk_layernorm"]
    assert report.verdicts == Counter(row.verdict.verdict for row in rows)
    page = report.page.read_text()
    assert all(str(escape(row.claim.sentence)) in page for row in rows)
    (folder / "commands.json").write_text('["lab sweep schedules"]')
    assert build.write_report(study([folder]), [folder]).verdicts == {}
