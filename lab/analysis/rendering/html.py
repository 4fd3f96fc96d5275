"""Fill templates, and build self-contained HTML pages: no script, font or picture is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from lab.analysis.text import capitalized, few, listed
from lab.core.files import read_text
from lab.core.printing import printable

TEMPLATES = Path(__file__).with_name("templates")
STYLE, SCRIPT = (read_text(TEMPLATES / name) for name in ("page.css", "page.js"))
# The only script that a browser may run; styles are allowed inline, since drawings carry their own.
SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{SCRIPT_DIGEST}'; style-src 'unsafe-inline'; img-src 'self' file: data:; "
    "base-uri 'none'; form-action 'none'"
)
RELOAD_SECONDS = 10
HEADING = re.compile(r'^<section id="([\w-]+)">\n(?:<details><summary>)?<h2>(.*)</h2>', re.MULTILINE)


def _visible(value: Any) -> Any:
    """A value of a template with invisible characters escaped; all but ``Markup`` passes through here."""
    return value if isinstance(value, Markup) else printable(str(value))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(("html", "svg")),
    finalize=_visible,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {"capitalized": capitalized, "few": few, "listed": listed}


def render(template: str, **values: Any) -> str:
    """A text made from a template; in HTML and SVG every value that is no ``Markup`` is escaped."""
    return ENVIRONMENT.get_template(template).render(values)


@cache
def macros(template: str) -> Any:
    """The macros of a template of HTML or SVG, which escape every value that is no ``Markup``."""
    return ENVIRONMENT.get_template(template).module


PIECES = macros("page.html")


def document(title: str, body: Iterable[Markup], heading: str = "", *, filters: str = "", reloads: bool = False) -> str:
    """A whole page, with a list of contents where it has three sections or more.

    Args:
        title: the title of the window; also the heading, or a line above it if another ``heading`` is given.
        filters: the kind of elements that a field at the top filters by the words typed, such as ``cards``.
        reloads: whether an open page reloads every ``RELOAD_SECONDS``.
    """
    content = Markup("\n").join(body)
    sections = [(name, Markup(re.split("[,:]", entry)[0])) for name, entry in HEADING.findall(content)]
    contents = sections if len(sections) >= 3 else []
    frame = (Markup(POLICY), Markup(STYLE), Markup(SCRIPT), RELOAD_SECONDS if reloads else 0)
    return str(PIECES.document(title, heading, content, contents, filters, *frame))


def section(title: str, *parts: Markup, folded: bool = False) -> Markup:
    """A heading with HTML below it, hidden until it is pressed if ``folded``; the list of contents shows it."""
    return Markup(PIECES.section(title, anchor(title) or "section", parts, folded))


def anchor(name: str) -> str:
    """The fragment of an address for this name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def paragraph(text: str, kind: str = "plain", word: str = "") -> Markup:
    """A paragraph after a highlighted ``word``; ``kind`` is ``plain``, ``lead``, ``facts``, ``note`` or ``warning``."""
    return Markup(PIECES.paragraph(text, kind, word))


def bullets(lines: Iterable[str], kind: str = "plain") -> Markup:
    """A list of lines; its ``kind`` is ``plain`` or ``verdicts``."""
    return Markup(PIECES.bullets(lines, kind))


def block(text: str) -> Markup:
    """Preformatted text, such as a command."""
    return Markup(PIECES.block(text))


def downloads(tables: Mapping[str, str]) -> Markup:
    """Links that save files of text, by name, whose content the page holds."""
    data = {name: base64.b64encode(text.encode()).decode() for name, text in tables.items()}
    return Markup(PIECES.downloads(data))


def savers(drawing: str) -> Markup:
    """Buttons that save the drawing above under this name: as SVG, as PNG, and, by printing it alone, as PDF."""
    return Markup(PIECES.savers(drawing, ("svg", "png", "pdf")))


def table(frame: pd.DataFrame, prose: Iterable[str] = (), *, sorts: bool = False, kind: str = "") -> Markup:
    """A table that scrolls inside itself.

    Args:
        prose: columns whose text is wrapped.
        sorts: whether pressing the head of a column sorts by it, and a field above keeps rows with all words typed.
        kind: the column of a table that sorts by whose values rows may also be chosen.
    """
    return Markup(PIECES.table(list(frame), frame.to_numpy().tolist(), set(prose), sorts, kind))


def figure(svg: str, caption: str, files: Markup | str = "") -> Markup:
    """An inline drawing with its caption, whose first paragraph becomes the drawing's label.

    Args:
        svg: trusted HTML, as ``layout.svg`` makes it.
        files: HTML below the drawing, as made by ``savers``.
    """
    label, *paragraphs = [" ".join(text.split()) for text in caption.split("\n\n")]
    opening = Markup('<svg role="group" aria-label="{}" ').format(printable(label))
    return Markup(PIECES.figure(Markup(svg.replace("<svg ", opening, 1)), paragraphs, files))


class Card(NamedTuple):
    """A tile of an overview that leads to a page.

    Attributes:
        link: the address of the page.
        picture: a file beside the overview, or empty.
        more: HTML below the text.
    """

    link: str
    title: str
    kicker: str
    text: str
    picture: str
    more: Markup


def cards(tiles: Iterable[Card]) -> Markup:
    """Tiles, as many beside one another as fit."""
    return Markup(PIECES.cards(tiles))
