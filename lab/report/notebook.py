"""Show figures in notebooks with their captions, as the report shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lab.analysis.rendering import html
from lab.analysis.sensitivity import WINDOW, window_of
from lab.records.store import Records


class Shown(NamedTuple):
    """A drawing (one ``<svg>`` element) and its caption, which notebooks display as HTML."""

    svg: str
    caption: str

    def __repr__(self) -> str:
        return self.caption

    def _repr_html_(self) -> str:
        return html.figure(self.svg, self.caption)


def show(records: Records, name: str, window: Sequence[float] = WINDOW) -> Shown:
    """Draw a figure of the report or of `lab predict`.

    Args:
        records: the records, as ``load`` reads them.
        name: a name from ``lab list figures``, or ``logit_forecast`` or ``gradient_forecast``.
        window: the lowest and the highest learning rate over which sensitivity is a mean.

    Raises:
        RequestError: there is no figure of that name, these records hold nothing that it shows, or the window is
            invalid.
    """
    # here, since matplotlib is slow to import
    from lab.analysis.forecast.figures import gradient_forecast, logit_forecast
    from lab.analysis.rendering import layout
    from lab.studies.figures import FIGURES

    forecasts = {"gradient_forecast": gradient_forecast, "logit_forecast": logit_forecast}
    drawing = forecasts[name](records) if name in forecasts else FIGURES[name](records, None, window_of(window))
    return Shown(layout.svg(drawing, name), drawing.caption)
