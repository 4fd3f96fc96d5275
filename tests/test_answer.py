"""An answer, rendered in each of its forms."""

from __future__ import annotations

import json
import math
from typing import NamedTuple
from xml.etree import ElementTree

import pandas as pd
from markupsafe import Markup

from lab.analysis.rendering import layout
from lab.analysis.rendering.layout import Sheet
from lab.report.answer import LINE_LENGTH, Answer, Case, Figure, InText, OnPage, Section, Sorted


class Pair(NamedTuple):
    a: float
    b: float


TABLE = pd.DataFrame({"arm": ["a|b", "<i>c</i>"], "loss": ["1.0", "2.0"]})
ANSWER = Answer(
    "It fails.",
    ["A paragraph.", TABLE, ["first", "second"], Section("More", ["said of it", Section("Deeper", ["still"])])],
    title="Does it stand?",
    command="lab ask --now",
    data={"numbers": [Pair(1.0, math.nan)], "text": "ü"},
    cases=[Case("good", "", ""), Case("bad", "1 -> 2", "failure"), Case("ugly", "none", "error")],
)


def test_a_text_has_the_headline_first_and_sets_tables_and_lists_apart() -> None:
    assert ANSWER.text().split("\n\n") == [
        "It fails.\nDoes it stand?\nA paragraph.",
        "arm       loss\na|b       1.0\n<i>c</i>  2.0",
        "- first\n- second",
        "More\nsaid of it",
        "Deeper\nstill",
    ]


def test_lines_are_wrapped_between_words_and_hang_below_their_bullet() -> None:
    path = "runs/" + "x" * LINE_LENGTH + "-y/report"
    lines = Answer("", [["word " * 60, path]]).text().splitlines()
    assert max(map(len, lines[:-1])) <= LINE_LENGTH
    assert [line[:2] for line in lines] == ["- ", "  ", "  ", "- "]
    assert lines[-1] == f"- {path}"


def test_what_is_empty_is_left_out_of_every_form() -> None:
    empty = [[], "", pd.DataFrame([]), Section("Nothing", [[], Section("Within", [""])])]
    bare, padded = Answer("Done.", ["x"], title="t"), Answer("Done.", [*empty, "x", *empty], title="t")
    for form in ("text", "html", "markdown", "_repr_html_"):
        assert getattr(bare, form)() == getattr(padded, form)()
    assert Answer("", ["x"]).text() == "x"


def test_a_page_holds_all_parts_with_markup_escaped_and_how_it_was_made() -> None:
    page = ANSWER.html()
    assert "<i>c" not in page
    for piece in ("<h1>Does it stand?", '<p class="lead">It fails.', "&lt;i&gt;c", "<li>first", "<h2>More", "lab ask"):
        assert piece in page
    shown = ANSWER._repr_html_()
    assert "It fails." in shown
    assert "<html" not in shown


def test_data_become_json_with_named_tuples_as_objects_and_null_for_no_number() -> None:
    assert json.loads(ANSWER.json()) == {"numbers": [{"a": 1.0, "b": None}], "text": "ü"}
    assert "ü" in ANSWER.json()


def test_markdown_escapes_what_would_be_markup() -> None:
    text = ANSWER.markdown()
    assert text.startswith("## It fails.\n\nDoes it stand?\n\n")
    assert "| a\\|b | 1.0 |" in text
    assert "&lt;i&gt;" in text
    assert "\n- first\n- second\n" in text
    assert text.index("### More") < text.index("#### Deeper")


def test_cases_that_fail_are_counted_and_told() -> None:
    suite = ElementTree.fromstring(ANSWER.junit())
    assert [suite.attrib[name] for name in ("tests", "failures", "errors")] == ["3", "1", "1"]
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["error"]]
    assert suite[1][0].attrib["message"] == "1 -> 2"


def test_the_table_of_an_answer_is_its_first() -> None:
    assert ANSWER.table is TABLE


def test_a_figure_is_drawn_for_a_page_and_nowhere_else() -> None:
    drawn = list[str]()

    def draw() -> Sheet:
        sheet, _ = layout.facets(["panel"], ["loss"], 8)
        drawn.append("once")
        return sheet

    found = Answer("Done.", [Section("Alone", [Figure("curve", layout.styled(draw))]), "text"], title="t")
    assert found.text() == "Done.\nt\ntext"
    assert "Alone" not in found.markdown()
    assert not drawn
    assert "<svg" in found.html()
    assert len(drawn) == 1


def test_text_has_lines_in_the_place_of_a_figure() -> None:
    found = Answer(
        "Done.",
        [Figure("strips", layout.styled(lambda: layout.facets(["panel"], ["loss"], 8)[0]), ["[..#]  " + "x" * 200])],
    )
    assert found.text().splitlines() == ["Done.", "", f"[..#]  {'x' * 200}"]  # whole, since they are drawn
    assert "```text\n[..#]  x" in found.markdown()
    assert "[..#]" not in found.html()


def test_a_page_and_a_text_may_show_the_same_in_two_ways() -> None:
    found = Answer(
        "Done.", [OnPage(["wide", Markup("<b>bold</b>")]), InText(["short"]), Section("None", [OnPage([""])])]
    )
    assert found.text() == "Done.\nshort"
    assert "wide" not in found.markdown()
    assert "<b>bold</b>" in found.html()
    assert "short" not in found.html()
    assert "None" not in found.html()


def test_a_table_that_sorts_is_a_plain_one_in_text() -> None:
    found = Answer("Done.", [Sorted(TABLE, kind="arm", prose=["loss"]), Sorted(TABLE.iloc[:0], "arm", [])])
    assert found.text() == Answer("Done.", [TABLE]).text()
    assert found.markdown() == Answer("Done.", [TABLE]).markdown()
    assert found.html().count('data-sorts="arm"') == 1
    assert found.html().count('<td class="prose">') == 2


def test_a_page_says_how_else_it_was_made_and_folds_what_is_long() -> None:
    page = Answer("Done.", [Section("Long", ["text"], folded=True)], made=["Records: here."]).html()
    assert "<details><summary><h2>Long" in page
    assert page.index("How this was made") < page.index("<li>Records: here.")
    assert "How this was made" not in Answer("Done.", ["text"]).html()
