"""The board of interventions: its rule on planted records, its ranks, its refusals, and what arms.yaml says."""

from __future__ import annotations

import csv
import json
import math
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from scipy.stats import t, ttest_1samp

import planted
import planted_board
from drawn_texts import complaints
from lab.__main__ import main
from lab.analysis import leaderboard, points, sensitivity, study, transfer
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.statistics import student_t
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS
from lab.core.shipped import data_folder, load
from lab.records import store
from lab.records.store import NO_METRICS, Records
from lab.report import build
from lab.report.answers import answer
from lab.report.build import make_report
from lab.studies.figures import FIGURES
from lab.studies.leaderboard.arms import arm_cards, left_out, meanings
from lab.studies.leaderboard.board import (
    ALPHA,
    HARMS,
    HELPS,
    MARGIN,
    NO_DIFFERENCE,
    NOT_COMPARABLE,
    OPEN,
    Board,
    Row,
    verdict,
)
from lab.studies.leaderboard.curves import curves_of
from lab.studies.leaderboard.documents import markdown_pages
from lab.studies.leaderboard.listing import board_notes, board_of, headline
from lab.studies.leaderboard.page import board_page

PLAIN, NORMED = ("z_loss",), ("qk_layernorm", "z_loss")
Arms = Mapping[tuple[str, ...], float]


# As many as make a board, none of them with qk-layernorm.
SOME_ARMS = [arm for arm in planted_board.arms() if "qk_layernorm" not in arm][:20]


def board(effects: Arms, meaning: Mapping[str, str] | None = None, **changes: Any) -> Board:
    return Board(curves_of(records(effects, **changes), {}), meaning or {})


def records(effects: Arms, **changes: Any) -> Records:
    return Records(planted.table(planted_board.cards({PLAIN: 0.0, **effects}, **changes)), NO_METRICS)


def row(of: Board, name: str, panel: str = "without qk-layernorm") -> Row:
    (found,) = [one for one in of.rows if one.name == name and one.panel == panel]
    return found


@pytest.mark.parametrize(
    ("effect", "spread", "word"),
    [
        (-0.1, 0.01, HELPS),
        (0.1, 0.01, HARMS),
        (0.0, 0.01, NO_DIFFERENCE),
        (-0.03, 0.001, NO_DIFFERENCE),  # certain, and smaller than the margin
        (0.0, 0.2, OPEN),
    ],
)
def test_a_planted_difference_gets_its_verdict(effect: float, spread: float, word: str) -> None:
    found = row(board({("peri_ln", "z_loss"): effect}, spread=spread), "peri_ln")
    assert found.verdict == word
    assert found.seeds == 6


def test_a_certain_difference_below_the_margin_still_beats_the_reference() -> None:
    found = row(board({("peri_ln", "z_loss"): -0.03}, spread=0.001), "peri_ln")
    assert found.beats_reference
    assert found.verdict == NO_DIFFERENCE


def test_two_seeds_decide_nothing() -> None:
    found = row(board({("peri_ln", "z_loss"): -0.5}, seeds=(10, 11)), "peri_ln")
    assert found.verdict == OPEN
    assert math.isnan(found.p)


def test_a_window_of_learning_rates_has_a_board_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The grid is ten times as high, and so is the window; on the usual window some of it is outside."""
    arms = {PLAIN: 0.0, ("peri_ln", "z_loss"): -0.1}
    low = written(tmp_path / "low", records(arms))
    high = written(tmp_path / "high", records(arms, lrs=[10 * lr for lr in planted_board.LRS]))
    expected = leaderboard(low)["instability part"].tolist()
    assert leaderboard(high, window=(3e-3, 3))["instability part"].tolist() == expected
    assert leaderboard(high)["instability part"].tolist() != expected
    assert main(["leaderboard", str(high), "--window", "3e-3", "3"]) == 0
    shown = capsys.readouterr().out
    assert expected[1] in shown
    assert "Sensitivity is a mean over learning rates from 0.003 to 3." in shown


def test_notes_name_arms_that_never_acted_and_arms_that_never_trained() -> None:
    """By panel: with qk-layernorm dyt trains, and peri_ln acts."""
    beside = {("dyt", "qk_layernorm", "z_loss"): -0.01, ("peri_ln", "qk_layernorm", "z_loss"): -0.1, NORMED: -0.01}
    without = {("peri_ln", "z_loss"): 0.0, ("relu", "z_loss"): -0.1, ("dyt", "z_loss"): 0.1}
    made = records({**without, **beside}, spread=0.0)
    is_dyt = made.runs["intervention"] == "dyt+z_loss"
    made.runs.loc[is_dyt, "final_val_loss"] = made.runs["loss_bigram"] + 0.1
    notes = [note for note in board_notes(Board(curves_of(made, {}), {})) if "qk-layernorm, " in note]
    assert notes[0].startswith("Without qk-layernorm, runs of peri_ln end exactly as")
    assert notes[1].startswith("Without qk-layernorm, no run of dyt ended better than a bigram model")
    assert notes[2].startswith("With qk-layernorm, runs of dyt end exactly as")
    assert len(notes) == 3


def test_the_ninety_percent_interval_decides_equivalence() -> None:
    """A difference whose 90 % interval ends just inside the margin, or just outside."""
    values = [-0.02, 0.0, 0.02, -0.01, 0.01, 0.0]
    half = t.ppf(0.95, 5) * student_t(values).error
    for shift, word in ((MARGIN - half - 1e-6, NO_DIFFERENCE), (MARGIN - half + 1e-6, OPEN)):
        assert verdict(student_t([value + shift for value in values]), 1.0, "same") == word


def test_p_is_that_of_a_paired_t_test_and_holm_counts_the_panel() -> None:
    effects = {(name, "z_loss"): effect for name, effect in (("peri_ln", -0.08), ("relu", -0.05), ("dyt", 0.01))}
    made = board(effects)
    ps = {}
    for name in ("peri_ln", "relu", "dyt"):
        found = row(made, name)
        changes = found.curve.seeds["above"] - found.reference.seeds["above"]
        assert found.p == pytest.approx(ttest_1samp(changes, 0).pvalue)
        ps[name] = found.p
    by_p, largest = sorted(ps, key=lambda name: ps[name]), 0.0
    for left, name in zip((3, 2, 1), by_p, strict=True):
        largest = max(largest, min(1.0, left * ps[name]))
        assert row(made, name).p_adjusted == pytest.approx(largest)


def test_the_sweep_has_as_many_holm_levels_as_its_header_says() -> None:
    """45 in the stricter panel: every arm but the two whose learning rate has another unit."""
    made = board(dict.fromkeys(planted_board.arms(), 0.0), meanings())
    tests = {panel.title: sum(not math.isnan(one.p) for one in panel.rows) for panel in made.panels}
    assert tests == {"without qk-layernorm": 45, "with qk-layernorm": 39}
    assert "45 Holm levels" in (data_folder("sweeps") / "leaderboard.yaml").read_text(encoding="utf-8")
    assert {one.name for one in made.rows if one.verdict == NOT_COMPARABLE} == {"ngpt", "rezero"}


def test_the_rule_is_that_of_the_frozen_header() -> None:
    text = (data_folder("sweeps") / "leaderboard.yaml").read_text(encoding="utf-8").replace("\n#  ", "")
    assert f"below {ALPHA:g}" in text
    assert f"within {MARGIN:g} nats" in text
    assert "90 % interval" in text


def test_an_arm_is_compared_with_the_reference_of_its_panel() -> None:
    made = board({NORMED: -0.1, ("peri_ln", "qk_layernorm", "z_loss"): -0.1, ("peri_ln", "z_loss"): -0.1})
    assert row(made, "peri_ln").verdict == HELPS
    assert row(made, "peri_ln", "with qk-layernorm").verdict == NO_DIFFERENCE
    assert row(made, "qk_layernorm").verdict == HELPS


def test_an_intervention_of_the_reference_is_compared() -> None:
    made = board({(): 0.2, ("relu", "z_loss"): 0.1})
    found = row(made, "z_loss")
    assert found.verdict == HELPS
    assert not found.reference.interventions
    assert found.ranks is None  # its arm is the reference
    assert made.panels[0].rank == (1, 1)
    assert row(made, "relu").ranks == (2, 2)


def test_ranks_are_ranges_and_ties_are_ties() -> None:
    effects = {"relu": -0.3, "biases": -0.3, "peri_ln": -0.1, "dyt": 0.3}
    made = board({(name, "z_loss"): effect for name, effect in effects.items()}, spread=0.005)
    assert row(made, "relu").ranks == row(made, "biases").ranks == (1, 2)
    assert row(made, "peri_ln").ranks == (3, 3)
    assert made.panels[0].rank == (4, 4)
    assert row(made, "dyt").ranks == (5, 5)
    first, second, third, last = made.panels[0].rows
    assert {first.name, second.name} == {"relu", "biases"}
    assert (first.beats_neighbour, second.beats_neighbour, third.beats_neighbour) == (False, True, True)
    assert not last.neighbour


def test_an_arm_of_another_unit_is_compared_by_its_best_loss_and_its_range() -> None:
    """Ten times lower learning rates: the same curve over them has the same best loss and range."""
    effects = {("peri_ln", "z_loss"): 0.5}
    lower = [lr / 10 for lr in planted.LRS]
    lion = planted_board.cards({PLAIN: 0.5}, lrs=lower, spread=0, **{"optimizer.name": "lion"})
    runs = [*planted_board.cards({PLAIN: 0.0, **effects}, spread=0), *lion]
    made = Board(curves_of(Records(planted.table(runs), NO_METRICS), {}), {"lion": "other"})
    unstable, found = row(made, "peri_ln"), row(made, "lion")
    assert found.verdict == NOT_COMPARABLE
    assert math.isnan(found.p)
    assert found.differences["best"].mean == pytest.approx(0)
    for measure in ("range", "at_3", "at_10"):
        assert found.differences[measure].mean == pytest.approx(unstable.differences[measure].mean, abs=1e-3)


def test_a_grid_of_its_own_is_not_comparable() -> None:
    lower = [lr / 10 for lr in planted.LRS]
    runs = [*planted_board.cards({PLAIN: 0.0}), *planted_board.cards({("peri_ln", "z_loss"): 0.0}, lrs=lower)]
    made = Board(curves_of(Records(planted.table(runs), NO_METRICS), {}), {})
    assert row(made, "peri_ln").verdict == NOT_COMPARABLE


def test_seeds_that_lack_a_learning_rate_are_left_out() -> None:
    cards = list(planted_board.cards({PLAIN: 0.0, ("peri_ln", "z_loss"): -0.1}))
    kept = [
        one for one in cards if (one["intervention"], one["seed"], one["optimizer.lr"]) != ("peri_ln+z_loss", 15, 0.3)
    ]
    found = row(Board(curves_of(Records(planted.table(kept), NO_METRICS), {}), {}), "peri_ln")
    assert (found.seeds, found.curve.incomplete, found.curve.runs) == (5, 1, 41)


def test_arms_of_one_name_are_told_apart_by_their_numbers() -> None:
    cards = [
        *planted_board.cards({PLAIN: 0.0}),
        *planted_board.cards({("relu", "z_loss"): 0.0}, **{"optimizer.eps": 1e-6}),
        *planted_board.cards({("relu", "z_loss"): 0.0}),
    ]
    made = Board(curves_of(Records(planted.table(cards), NO_METRICS), {}), {})
    assert len({one.name for one in made.rows}) == 2


def test_a_second_size_is_a_panel_of_its_own() -> None:
    runs = [
        *planted_board.cards({PLAIN: 0.0, ("relu", "z_loss"): -0.1}),
        *planted_board.cards({PLAIN: 0.0, ("relu", "z_loss"): 0.1}, **{"model.width": 64}),
    ]
    made = Board(curves_of(Records(planted.table(runs), NO_METRICS), {}), {})
    found = {one.panel: one.verdict for one in made.rows}
    assert found == {"without qk-layernorm, width 32": HELPS, "without qk-layernorm, width 64": HARMS}


def test_every_arm_is_on_the_board_or_left_out() -> None:
    described = {name for name, card in arm_cards().items() if not card.is_optimizer}
    assert set().union(*planted_board.arms()) == described
    own = {name for name in INTERVENTIONS if INTERVENTIONS[name].__module__.startswith("lab.")}
    assert own == described | (set(left_out()) & own)
    assert not described & set(left_out())


def test_every_optimizer_is_on_the_board_or_left_out() -> None:
    text = (data_folder("sweeps") / "leaderboard_optimizers.yaml").read_text(encoding="utf-8")
    params = load(data_folder("sweeps") / "leaderboard_optimizers.yaml")["hydra"]["sweeper"]["params"]
    swept = set(params["optimizer"].replace(" ", "").split(","))
    for names in re.findall(r"lab sweep leaderboard_optimizers optimizer=([\w,]+)", text):
        swept |= set(names.split(","))
    described = {name for name, card in arm_cards().items() if card.is_optimizer}
    assert swept - {"adamw"} == described
    files = {path.stem for path in (data_folder("conf") / "optimizer").glob("*.yaml")}
    assert files == described | (set(left_out()) - set(INTERVENTIONS))


@pytest.mark.parametrize("name", arm_cards())
def test_an_arm_says_what_it_is(name: str) -> None:
    card = arm_cards()[name]
    assert all((card.title, card.formula, card.source))
    assert card.lr in ("same", "shifted", "other")
    assert isinstance(card.defaults, Mapping)
    if card.is_optimizer:
        return
    entry = INTERVENTIONS[name]
    places = set(getattr(entry, "hook_points", ()))
    assert {place for place in card.at if place not in ("loss", "update", "initial values")} == places
    assert ("update" in card.at) == hasattr(entry, "lr_factor")
    assert ("loss" in card.at) == hasattr(entry, "uses")


def written(folder: Path, cards: Records) -> Path:
    store.note_command(folder, "lab sweep leaderboard")
    store.write_imported(folder, cards)
    return folder


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    shown = capsys.readouterr()
    assert not shown.out
    (line,) = shown.err.splitlines()
    return line


def test_the_command_shows_the_board(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path, records({("peri_ln", "z_loss"): -0.1}))
    assert main(["leaderboard", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "peri_ln" in shown
    assert "1 comparison: 1 helps." in shown
    assert main(["leaderboard", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["arm"], found["verdict"], found["seeds"], found["runs"]) == ("peri_ln", HELPS, 6, 42)
    assert found["command"] == "lab sweep leaderboard"
    assert main(["leaderboard", str(folder), "--csv"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert dict(zip(*csv.reader([head, line]), strict=True))["verdict"] == HELPS


def test_a_folder_without_the_reference_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cards = Records(planted.table(planted_board.cards({("peri_ln", "z_loss"): 0.0})), NO_METRICS)
    line = refusal(capsys, "leaderboard", str(written(tmp_path, cards)))
    assert "the reference is missing" in line
    assert "z_loss" in line


def test_all_pairs_of_a_board_measure_each_arm_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = points(records(dict.fromkeys(planted_board.arms()[:12], 0.0), seeds=(10, 11, 12)).runs)
    measured = []
    own = sensitivity.per_seed
    monkeypatch.setattr(sensitivity, "per_seed", lambda *about: measured.append(0) or own(*about))
    assert len(sensitivity.all_pairs(runs)) == 12 * 11 / 2
    assert len(measured) == 1


@pytest.mark.slow
def test_pages_of_arms_are_up_to_date() -> None:
    """`python docs/interventions.py` writes them."""
    folder = Path(__file__).parents[1] / "docs" / "interventions"
    made = runpy.run_path(str(folder.with_suffix(".py")))["pages"]()
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == made


def test_a_page_has_the_rows_of_its_arm() -> None:
    made = board(
        {("peri_ln", "z_loss"): -0.1, ("relu", "z_loss"): 0.0, ("peri_ln", "qk_layernorm", "z_loss"): 0.0, NORMED: 0.0}
    )
    pages = markdown_pages(made, {"relu": ["relu2"], "qk_rmsnorm": ["qk_layernorm"]})
    rows = [line for line in pages["peri_ln.md"].splitlines() if line.startswith("| peri_ln |")]
    assert [row.split(" | ")[1:3] for row in rows] == [
        ["without qk-layernorm", HELPS],
        ["with qk-layernorm", NO_DIFFERENCE],
    ]
    assert "| cannot be combined with | [relu2](relu2.md) |" in pages["relu.md"]
    assert "Not trained yet" in pages["dyt.md"]
    index = {line.split("(")[0]: line for line in pages["index.md"].splitlines() if line.startswith("| [")}
    assert index["| [peri_ln]"].endswith("| helps | no difference |")
    assert index["| [qk_rmsnorm]"].endswith("| not trained | not applicable |")


def test_the_headline_counts_arms_by_verdict() -> None:
    effects = {("peri_ln", "z_loss"): -0.2, ("relu", "z_loss"): -0.2, ("dyt", "z_loss"): 0.2}
    cards = planted.table(planted_board.cards({PLAIN: 0.0, **effects}, spread=0.01))
    is_slow = (cards["intervention"] == "relu+z_loss") & (cards["optimizer.lr"] < 2e-3)
    cards.loc[is_slow, "final_val_loss"] += 1.0
    (panel,) = Board(curves_of(Records(cards, NO_METRICS), {}), {}).panels
    raises = "relu (raises LR sensitivity as a whole)"
    assert headline(panel) in (
        f"2 of 3 arms help: {first} and {second}; 1 harms: dyt; 6 seeds"
        for first, second in (("peri_ln", raises), (raises, "peri_ln"))
    )


def test_the_headline_says_where_there_is_too_little_to_take_off() -> None:
    effects = {PLAIN: 0.0, ("peri_ln", "z_loss"): 0.0, NORMED: -0.3, ("qk_layernorm", "relu", "z_loss"): -0.3}
    _, beside = board(effects, spread=0.001).panels
    assert headline(beside).startswith("none of 1 arms is shown to help: all of the instability part, 0.05")
    assert headline(beside).endswith(" nats, is less than the margin of 0.06; 6 seeds")
    (alone,) = board({("peri_ln", "z_loss"): 0.0}, spread=0.001).panels
    assert headline(alone) == "none of 1 arms is shown to help; 6 seeds"


def test_a_drawing_of_an_arm_has_both_curves_of_each_panel() -> None:
    """In the plant an arm that helps ends lower than its reference at high learning rates, where y grows downwards."""
    made = board({("peri_ln", "z_loss"): -0.2, ("peri_ln", "qk_layernorm", "z_loss"): 0.0, NORMED: 0.0}, spread=0.0)
    pages = markdown_pages(made, {})
    drawing = ElementTree.fromstring(pages["peri_ln.svg"])
    lines = [one.attrib for one in drawing.findall(".//{*}polyline")]
    assert [one["class"] for one in lines] == ["reference", "arm"] * 2
    reference, arm = ([tuple(map(float, point.split(","))) for point in one["points"].split()] for one in lines[:2])
    assert len(reference) == len(arm) == len(planted_board.LRS)
    assert [x for x, _ in reference] == [x for x, _ in arm] == sorted({x for x, _ in arm})
    assert arm[-1][1] > reference[-1][1]
    assert lines[2]["points"] == lines[3]["points"]
    assert "dyt.svg" not in pages
    alone = markdown_pages(board({("peri_ln", "z_loss"): 0.0}, lrs=[1e-2]), {})
    assert len(ElementTree.fromstring(alone["peri_ln.svg"]).findall(".//{*}polyline")) == 2
    assert "](peri_ln.svg)" in pages["peri_ln.md"]


def test_the_page_pins_the_reference_links_every_row_and_loads_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    effects = {("peri_ln", "z_loss"): -0.1, ("qk_rmsnorm", "z_loss"): 0.0, ("qk_layernorm", "relu", "z_loss"): 0.0}
    folder = written(tmp_path, records({NORMED: -0.1, **effects}))
    file = tmp_path / "board.html"
    file.symlink_to("target.html")
    assert main(["leaderboard", str(folder), "--html", str(file)]) == 0
    assert file.is_symlink()
    assert capsys.readouterr().out == f"page: {file}\n"
    text = file.read_text(encoding="utf-8")
    head, body = re.findall(r"<thead>(.*?)</thead>\s*<tbody>(.*?)</tbody>", text, re.DOTALL)[0]
    assert 'class="pinned"' in head
    assert "(reference)" in head
    assert "(reference)" not in body
    rows = re.findall(r'<tr id="([\w-]+)">', text)
    assert sorted(rows) == sorted(set(rows))
    assert "peri-ln-without-qk-layernorm" in rows
    assert all(f'href="#{name}"' in text for name in rows)
    assert body.count("of-reference") == 3  # the curve of the reference beside each arm
    assert "lab sweep leaderboard" in body
    assert "Not applicable beside the reference of this panel: qk_rmsnorm." in text
    assert not re.search(r'(?:src|href)="(?!#)', text)


def test_a_page_shows_a_hostile_command_as_text(tmp_path: Path) -> None:
    store.note_command(tmp_path, "lab sweep '<script>alert(1)</script>'")
    store.write_imported(tmp_path, records({("peri_ln", "z_loss"): -0.1}))
    made = board_page(board_of([tmp_path]))
    assert "<script>alert" not in made
    assert "&lt;script&gt;alert(1)" in made


def test_folders_with_references_of_their_own_are_families_of_their_own(tmp_path: Path) -> None:
    """Holm counts the arms of each sweep apart; folders that share a reference are one."""
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, arms in zip(folders, ({("relu", "z_loss"): -0.1}, {("dyt", "z_loss"): -0.1}, {}), strict=True):
        folder.mkdir()
        written(folder, records(arms))
    apart = board_of(folders[:2])
    assert [panel.title.split(", ")[1] for panel in apart.panels] == ["sweep first", "sweep second"]
    assert all(one.p == one.p_adjusted for one in apart.rows)
    rest = tmp_path / "rest"
    rest.mkdir()
    cards = planted.table(planted_board.cards({("dyt", "z_loss"): -0.1}))
    together = board_of([folders[0], written(rest, Records(cards, NO_METRICS))])
    assert len(together.panels) == 1
    assert {one.name for one in together.rows} == {"relu", "dyt"}


def test_a_report_of_many_arms_draws_one_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arms = ["z_loss", *(f"{name}+z_loss" for name in ("dyt", "peri_ln", "relu", "rmsnorm"))]
    folder = planted.write(tmp_path / "runs", list(planted.cards(arms, lrs=planted.LRS[::3], seeds=(10,))))
    report = folder / "report.html"

    def figures() -> int:
        make_report([folder])
        return len(list((folder / "figures").glob("*.svg")))

    assert figures() > 1
    assert "more than a page shows" not in report.read_text(encoding="utf-8")
    monkeypatch.setattr(build, "MOST_ARMS", 4)
    monkeypatch.setattr(build, "MOST_PAIRS", 9)
    assert figures() == 1
    text = report.read_text(encoding="utf-8")
    assert "With 5 arms only one figure is drawn" in text
    assert "20 differences are more than a page shows" in text


def test_the_figure_shows_every_comparable_arm_with_its_verdict() -> None:
    effects = dict.fromkeys(SOME_ARMS, 0.0) | {("peri_ln", "z_loss"): -0.1, ("dyt", "z_loss"): 0.1}
    drawing = FIGURES["leaderboard"](records(effects))
    assert not complaints(drawing)
    texts = [text.split("\n") for points in drawing.points for text in points.texts]
    verdicts = {(name, verdict) for name, verdict, *_ in texts}
    assert {("peri_ln", HELPS), ("dyt", HARMS)} <= verdicts
    heights = {height for points in drawing.points for height in points.line.get_ydata()}
    assert heights == set(range(len(heights)))  # each on the line of its name
    assert {name for name, _ in verdicts} == {
        row.name for row in board(effects, meanings()).rows if row.verdict != NOT_COMPARABLE
    }
    with pytest.raises(NothingToDrawError, match="3 arms, of the 12 to 150 of a board"):
        FIGURES["leaderboard"](records({("z_loss",): 0.0, ("peri_ln", "z_loss"): -0.1, ("dyt", "z_loss"): 0.1}))


def test_the_report_on_a_board_answers_with_its_changes(tmp_path: Path) -> None:
    """Not with the arm of most parameters, which has no other of its size to be compared with."""
    effects = dict.fromkeys(SOME_ARMS, 0.0) | {("peri_ln", "z_loss"): -0.1, ("dyt", "z_loss"): 0.1}
    said = answer(study(written(tmp_path / "board", records(effects))))
    assert re.fullmatch(r"Change of the instability part without .* for peri_ln to .* for dyt\.", str(said))
    (shown,) = said.contrasts
    expected = row(board(effects, meanings()), "peri_ln").differences["above"]
    assert shown.levels["peri_ln"]["without qk-layernorm"] == expected
    few = written(tmp_path / "few", records({NORMED: -0.1, ("peri_ln", "z_loss"): -0.1}))
    assert "Change of the instability part" not in str(answer(study(few)))


def test_notebooks_get_the_board_as_tables(tmp_path: Path) -> None:
    folder = written(tmp_path / "board", records({("z_loss",): 0.0, ("relu", "z_loss"): -0.1}))
    table = leaderboard(folder)
    assert [*table.index] == ["(reference)", "relu"]
    assert table.loc["relu", "verdict"] == HELPS
    pair = {("peri_ln", "relu", "z_loss"): -0.3, ("peri_ln", "z_loss"): -0.1, ("relu", "z_loss"): -0.1}
    pairs = leaderboard(written(tmp_path / "pairs", records(pair)), "pairs without qk-layernorm")
    assert pairs.loc["peri_ln+relu", "verdict"] == HELPS
    with pytest.raises(RequestError, match="no panel 'with'"):
        leaderboard(folder, "with")
    assert transfer(folder).set_index("ordering").loc["T2", "predicted"] == "not on the board"
