"""What a command answers: a feature fills it, and here it becomes text, a page, JSON, JUnit XML or Markdown."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from xml.etree import ElementTree

import pandas as pd
from markupsafe import Markup

from lab.analysis.rendering import html
from lab.analysis.text import few, listed, markdown_table, plain_text, to_json
from lab.core import files
from lab.core.printing import printable, say
from lab.records import store

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing

LINE_LENGTH = 120


class Section(NamedTuple):
    """Parts of an answer under a title; of a page those that are ``folded`` show when a reader presses it."""

    title: str
    parts: Sequence[Part]
    folded: bool = False


class Figure(NamedTuple):
    """A figure, drawn where a page shows it; text and Markdown have ``lines`` in its place, if there are any."""

    name: str
    draw: Callable[[], Drawing]
    lines: Sequence[str] = ()


class Sorted(NamedTuple):
    """A table that a page sorts and filters, by the values of the column ``kind``; columns of ``prose`` are wrapped."""

    table: pd.DataFrame
    kind: str
    prose: Sequence[str]


class OnPage(NamedTuple):
    """Parts that a page has alone, since they take room."""

    parts: Sequence[Part]


class InText(NamedTuple):
    """Parts that a page shows in another way, and only text and Markdown have."""

    parts: Sequence[Part]


Shown: TypeAlias = str | Section | Figure | Sorted | pd.DataFrame | Sequence[str]
Part: TypeAlias = Shown | OnPage | InText


class Case(NamedTuple):
    """A test case of JUnit XML; ``fails`` is ``failure``, ``error``, or empty where it passes."""

    name: str
    message: str
    fails: str


@dataclass(frozen=True)
class Answer:
    """An answer; in a notebook it displays itself.

    Attributes:
        headline: what it comes to, a sentence.
        parts: what it rests on, in the order of reading. A text is a paragraph, and several are a list. Empty parts,
            and sections of empty parts alone, are left out. HTML (``Markup``) stands on a page as it is.
        title: what was asked.
        command: the command line that makes it.
        made: how else it was made, lines for its page.
        data: the same for programs: mappings, named tuples and plain values.
        cases: of a check, what passes and what fails.
    """

    headline: str
    parts: Sequence[Part]
    title: str = ""
    command: str = ""
    data: Any = None
    cases: Sequence[Case] = ()
    made: Sequence[str] = ()

    @property
    def table(self) -> pd.DataFrame:
        """The first table."""
        return next(part for part in self.parts if isinstance(part, pd.DataFrame))

    def text(self) -> str:
        """Lines for a terminal."""
        return "\n".join(_lines([self.headline, self.title, *self.parts]))

    def html(self) -> str:
        """A page of HTML."""
        made = [*[html.block(self.command)] * bool(self.command), *map(_markup, _filled([self.made], on_page=True))]
        return html.document(self.title, [*self._body(), *[html.section("How this was made", *made)] * bool(made)])

    def _repr_html_(self) -> str:
        return "\n".join(self._body())

    def _body(self) -> list[Markup]:
        return [html.paragraph(self.headline, "lead"), *map(_markup, _filled(self.parts, on_page=True))]

    def json(self) -> str:
        """Its data as JSON; a number that is not finite is null."""
        return to_json(self.data)

    def markdown(self) -> str:
        """A section of Markdown, such as for the summary of a step on GitHub."""
        return "\n\n".join([f"## {_literal(self.headline)}", *_markdown([self.title, *self.parts], "###")]) + "\n"

    def junit(self) -> str:
        """Its cases as JUnit XML."""
        suite = ElementTree.Element("testsuite", {"name": self.title, "tests": str(len(self.cases))})
        for kind in ("failure", "error"):
            suite.set(f"{kind}s", str(sum(case.fails == kind for case in self.cases)))
        for name, message, fails in self.cases:
            case = ElementTree.SubElement(suite, "testcase", {"classname": self.title, "name": name})
            if fails:
                ElementTree.SubElement(case, fails, {"message": message})
        for element in suite.iter():  # XML cannot hold control characters
            element.attrib.update({key: printable(value) for key, value in element.attrib.items()})
        ElementTree.indent(suite, " ")
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _filled(parts: Iterable[Part], *, on_page: bool = False) -> list[Shown]:
    """The parts that a page has, or text, and that are not empty."""
    found = list[Shown]()
    for part in parts:
        if isinstance(part, OnPage | InText):
            found += _filled(part.parts, on_page=on_page) if isinstance(part, OnPage) == on_page else []
        elif isinstance(part, Figure):
            found += [part] if on_page or part.lines else []
        elif isinstance(part, Sorted):
            found += [part if on_page else part.table] if len(part.table) else []
        elif len(_filled(part.parts, on_page=on_page) if isinstance(part, Section) else part) > 0:
            found.append(part)
    return found


def _lines(parts: Iterable[Part]) -> Iterator[str]:
    is_apart = False
    for number, part in enumerate(_filled(parts)):
        was_apart, is_apart = is_apart, not isinstance(part, str)
        if number and (was_apart or is_apart):
            yield ""
        if isinstance(part, str):
            yield from _wrapped(part)
        elif isinstance(part, Section):
            yield from (*_wrapped(part.title), *_lines(part.parts))
        elif isinstance(part, pd.DataFrame):
            yield from plain_text(part)
        elif isinstance(part, Figure):
            yield from part.lines
        elif not isinstance(part, Sorted):  # which became its table
            yield from (line for text in part for line in _wrapped(text, "- "))


def _wrapped(text: str, bullet: str = "") -> list[str]:
    """A text in lines, no word of which is broken, such as a path."""
    lines = textwrap.wrap(text, LINE_LENGTH - len(bullet), break_long_words=False, break_on_hyphens=False)
    return [f"{' ' * len(bullet) if number else bullet}{line}" for number, line in enumerate(lines)]


def _markup(part: Shown) -> Markup:
    if isinstance(part, str):
        return part if isinstance(part, Markup) else html.paragraph(part)
    if isinstance(part, Section):
        return html.section(part.title, *map(_markup, _filled(part.parts, on_page=True)), folded=part.folded)
    if isinstance(part, Figure):
        from lab.analysis.rendering import layout  # matplotlib is slow to import

        drawing = part.draw()
        return html.figure(layout.svg(drawing, part.name), drawing.caption, html.savers(part.name))
    if isinstance(part, Sorted):
        return html.table(part.table, part.prose, sorts=True, kind=part.kind)
    return html.table(part) if isinstance(part, pd.DataFrame) else html.bullets(part)


def _markdown(parts: Iterable[Part], heading: str) -> Iterator[str]:
    for part in _filled(parts):
        if isinstance(part, str):
            yield _literal(part)
        elif isinstance(part, Section):
            yield from (f"{heading} {_literal(part.title)}", *_markdown(part.parts, f"{heading}#"))
        elif isinstance(part, pd.DataFrame):
            yield markdown_table(part.astype(str).rename(columns=_literal).map(_literal))
        elif isinstance(part, Figure):
            yield "\n".join(["```text", *part.lines, "```"])
        elif not isinstance(part, Sorted):  # which became its table
            yield "\n".join(f"- {_literal(text)}" for text in part)


def _literal(text: str) -> str:
    """Text in a line of Markdown, with all markup escaped."""
    return escape(re.sub(r"([\\`*\[\]|_~])", r"\\\1", printable(text).replace("\n", " ")))


def give(answer: Answer, given: argparse.Namespace) -> None:
    """Say an answer, or its JSON with ``--json``, and write the other forms that options name a file for."""
    say(answer.json() if given.json else answer.text())
    for form in ("html", "junit", "markdown"):
        if path := getattr(given, form, None):
            files.write_output(Path(path), getattr(answer, form)())
            if not given.json:
                say(f"{'page' if form == 'html' else form}: {path}")


def give_one(answer: Answer, given: argparse.Namespace) -> None:
    """Write the page of an answer, or say it in the one form that an option asks for."""
    if given.html:
        files.write_output(Path(given.html), answer.html())
        say(f"page: {given.html}")
    else:
        say(answer.json() if given.json else answer.markdown() if getattr(given, "markdown", False) else answer.text())


def note_damage(*folders: Path) -> None:
    """Say which records of these folders are damaged, since the runs count as missing."""
    for folder in folders:
        if names := store.damaged(folder):
            runs = "1 run is" if len(names) == 1 else f"{len(names)} runs are"
            say(f"lab: {folder}: {runs} damaged and left out: {listed(few(names))}", error=True)
