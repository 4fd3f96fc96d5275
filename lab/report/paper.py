"""Write the figures of a report for a paper: in the width of a column, with text of 8 points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import layout, style
from lab.analysis.sensitivity import Study
from lab.core import files
from lab.core.errors import RequestError, nearest
from lab.studies.figures import FIGURES

FORMATS = ("pdf", "png")
TEXT_SIZE = 8.0  # points
COLUMN = "3.25"  # inches, the width of a column in most proceedings
NARROWEST, WIDEST = 2.0, 20.0


class Paper(NamedTuple):
    """A format (``pdf`` or ``png``), and the page for which figures are drawn."""

    format: str
    page: style.Page


def paper_of(format_name: str, width: str | None = None) -> Paper:
    """Read the format and the width (inches) of figures from the command line.

    Raises:
        RequestError: the format is unknown, or the width is not a number of inches from 2 to 20.
    """
    if format_name not in FORMATS:
        raise RequestError(f"unknown format {format_name!r}; {nearest(format_name, FORMATS)}")
    try:
        inches = float(width or COLUMN)
    except ValueError:
        inches = 0.0
    if not NARROWEST <= inches <= WIDEST:
        raise RequestError(f"--width must be a number of inches from {NARROWEST:g} to {WIDEST:g}, not {width!r}")
    return Paper(format_name, style.Page(inches, TEXT_SIZE))


def write_figures(study: Study, folder: Path, form: Paper) -> Iterator[Path]:
    """Write every figure that applies to a study as ``figures/NAME.pdf`` or ``.png`` in a folder; yield the paths."""
    for name in FIGURES:
        path = folder / "figures" / f"{name}.{form.format}"
        with style.drawn_for(form.page):
            try:
                drawing = FIGURES[name](study.records, study.points, study.window)
            except NothingToDrawError:
                files.remove(path, within=folder)
                continue
            layout.save(drawing, path, within=folder)
        yield path
