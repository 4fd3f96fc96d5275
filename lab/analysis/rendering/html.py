"""Build self-contained HTML pages: no script, font or picture is loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import pandas as pd

from lab.core.printing import printable

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
# The only script that a browser may run; drawings carry styles of their own.
SCRIPT_DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; script-src 'sha256-{SCRIPT_DIGEST}'; style-src 'unsafe-inline'; img-src 'self' file: data:; "
    "base-uri 'none'; form-action 'none'"
)
RELOAD_SECONDS = 10
RELOAD = f'<meta http-equiv="refresh" content="{RELOAD_SECONDS}">\n'
HEADING = re.compile(r'^<section id="([\w-]+)">\n<h2>(.*)</h2>', re.MULTILINE)


def document(title: str, body: Iterable[str], heading: str = "", *, reloads: bool = False) -> str:
    """A whole page, with a list of contents where it has three sections or more.

    Args:
        title: plain text, for the window; also the heading, or where there is another stands above that.
        body: HTML.
        heading: plain text.
        reloads: while it is open, every ``RELOAD_SECONDS``.
    """
    content = "\n".join(body)
    contents = _contents(content)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"{RELOAD if reloads else ''}"
        f"<title>{_literal(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
        f'<div class="page{" with-contents" if contents else ""}">\n{contents}<main>\n'
        f"{paragraph(title, 'kicker') if heading else ''}<h1>{_literal(heading or title)}</h1>\n{content}\n"
        f"</main>\n</div>\n"
        f"<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _contents(content: str) -> str:
    sections = HEADING.findall(content)
    if len(sections) < 3:
        return ""
    links = "\n".join(f'<li><a href="#{name}">{re.split("[,:]", title)[0]}</a></li>' for name, title in sections)
    return f'<nav aria-label="Contents"><ol>\n{links}\n</ol></nav>\n'


def section(title: str, *parts: str) -> str:
    """A heading in plain text, with HTML below it; the contents list it."""
    name = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "section"
    return "\n".join([f'<section id="{name}">\n<h2>{_literal(title)}</h2>', *parts, "</section>"])


def paragraph(text: str, kind: str = "plain") -> str:
    """Plain text as a paragraph; its ``kind`` is ``plain``, ``lead``, ``kicker``, ``facts``, ``note`` or
    ``warning``."""
    return f'<p class="{kind}">{_literal(text)}</p>'


def bullets(lines: Iterable[str], kind: str = "plain") -> str:
    """Lines of plain text as a list; its ``kind`` is ``plain`` or ``verdicts``."""
    return f'<ul class="{kind}">\n' + "\n".join(f"<li>{_literal(line)}</li>" for line in lines) + "\n</ul>"


def block(text: str) -> str:
    """Preformatted plain text, such as a command."""
    return f"<pre>{_literal(text)}</pre>"


def links(files: Mapping[str, str], drawing: str = "", formats: Iterable[str] = ()) -> str:
    """Links to files beside the page, by label, and buttons that save the drawing above, of this name.

    Args:
        formats: of the buttons: ``png`` saves a picture, ``pdf`` prints the drawing on a page of its size.
    """
    parts = [f'<a href="{_literal(path)}">{_literal(label)}</a>' for label, path in files.items()]
    for kind in formats:
        parts.append(f'<button type="button" data-{kind}="{_literal(drawing)}" hidden>{kind.upper()}</button>')
    return f'<p class="files">{" ".join(parts)}</p>'


def table(frame: pd.DataFrame, prose: Iterable[str] = (), *, sorts: bool = False) -> str:
    """A table whose cells are shown as plain text; it scrolls inside itself.

    Args:
        prose: columns that are wrapped.
        sorts: by the column whose head is pressed; a field above keeps the rows that have all words typed.
    """
    wrapped = [' class="prose"' if name in set(prose) else "" for name in frame]
    cells = [[_literal(str(cell)) for cell in row] for row in [list(frame.columns), *frame.to_numpy().tolist()]]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in cells[0])
    rows = ["".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(wrapped, row, strict=True)) for row in cells[1:]]
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    content = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    kind = ' data-sorts=""' if sorts else ""
    return f'<div class="table" tabindex="0"><table{kind}>\n{content}\n</table></div>'


def figure(svg: str, caption: str, files: str = "", narrow: str = "") -> str:
    """An inline drawing with its caption, plain text; the caption's first paragraph becomes the drawing's label.

    Args:
        files: as made by ``links``; stands between the drawing and its caption.
        narrow: the same figure drawn for a narrow screen, which shows it instead.
    """
    paragraphs = [" ".join(text.split()) for text in caption.split("\n\n")]
    label = f'<svg role="group" aria-label="{_literal(paragraphs[0])}" '
    drawings = {"drawing wide": svg, "drawing narrow": narrow} if narrow else {"drawing": svg}
    shown = "".join(f'<div class="{kind}">{each.replace("<svg ", label, 1)}</div>' for kind, each in drawings.items())
    body = "\n".join(map(paragraph, paragraphs[1:]))
    between = f"\n{files}" if files else ""
    return f"<figure>{shown}{between}\n<figcaption>\n{body}\n</figcaption></figure>"


def card(link: str, title: str, picture: str, *parts: str) -> str:
    """A tile of an overview that leads to a page; ``picture`` is a file beside the page, or empty."""
    shown = f'<img class="thumbnail" src="{_literal(picture)}" alt="" loading="lazy">\n' if picture else ""
    return (
        f'<a class="card" href="{_literal(link)}">\n{shown}<h2>{_literal(title)}</h2>\n' + "\n".join(parts) + "\n</a>"
    )


def cards(tiles: Iterable[str]) -> str:
    """Tiles, as many beside one another as fit."""
    return '<div class="cards">\n' + "\n".join(tiles) + "\n</div>"


def _literal(text: str) -> str:
    """Escape plain text for HTML, attributes included; every text of a page passes through here."""
    return escape(printable(text))
