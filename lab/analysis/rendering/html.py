"""Build self-contained HTML pages: no script, font or picture is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

import pandas as pd

from lab.core.files import printable

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; border-bottom: 1px solid #ccc; padding-bottom: .2rem; }
p, li { max-width: 46rem; }
.lead { color: #444; margin-top: 0; }
.wide { overflow-x: auto; }
figure { margin: 0; }
figure svg { display: block; max-width: 100%; min-width: 32rem; height: auto; }
figcaption p { font-size: .9rem; color: #333; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #e4e4e4; white-space: nowrap; }
th { border-bottom: 1px solid #888; font-weight: 600; }
caption { text-align: left; color: #333; padding-bottom: .4rem; }
pre, code { font: .85rem/1.5 ui-monospace, monospace; }
pre, .settings { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: .6rem .8rem; }
@media print {
  body { margin: 0; max-width: none; font-size: 11pt; }
  figure, table { break-inside: avoid; }
  h2 { break-after: avoid; }
  figure svg { min-width: 0; }
  .wide { overflow: visible; }
}
"""


def document(title: str, body: Iterable[str]) -> str:
    """A whole page; ``title`` is plain text, ``body`` is HTML."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_literal(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_literal(title)}</h1>\n" + "\n".join(body) + "\n</body>\n</html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading in plain text, with HTML below it."""
    return "\n".join([f"<section>\n<h2>{_literal(title)}</h2>", *parts, "</section>"])


def paragraph(text: str, kind: str = "plain") -> str:
    """Plain text as a paragraph; its ``kind`` is ``plain`` or ``lead``."""
    return f'<p class="{kind}">{_literal(text)}</p>'


def bullets(lines: Iterable[str]) -> str:
    """Lines of plain text as a list."""
    return "<ul>\n" + "\n".join(f"<li>{_literal(line)}</li>" for line in lines) + "\n</ul>"


def block(text: str) -> str:
    """Preformatted plain text, such as a command."""
    return f"<pre>{_literal(text)}</pre>"


def table(frame: pd.DataFrame) -> str:
    """A table whose cells are shown as plain text."""
    cells = [[_literal(str(cell)) for cell in row] for row in [list(frame.columns), *frame.to_numpy().tolist()]]
    head = "".join(f'<th scope="col">{cell}</th>' for cell in cells[0])
    body = "\n".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells[1:])
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def figure(svg: str, caption: str) -> str:
    """An inline drawing with its caption, plain text; the caption's first paragraph becomes the drawing's label."""
    paragraphs = [" ".join(text.split()) for text in caption.split("\n\n")]
    labelled = svg.replace("<svg ", f'<svg role="img" aria-label="{_literal(paragraphs[0])}" ', 1)
    body = "\n".join(map(paragraph, paragraphs[1:]))
    return f'<figure><div class="wide">{labelled}</div>\n<figcaption>\n{body}\n</figcaption></figure>'


def _literal(text: str) -> str:
    """Escape plain text for HTML, attributes included; every text of a page passes through here."""
    return escape(printable(text))
