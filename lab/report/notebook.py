"""Show figures in notebooks with their captions, as the report shows them."""

from __future__ import annotations

from typing import NamedTuple

from lab.analysis.rendering import html
from lab.records.store import Records


class Shown(NamedTuple):
    """A drawing (one ``<svg>`` element) and its caption, which notebooks display as HTML."""

    svg: str
    caption: str

    def __repr__(self) -> str:
        return self.caption

    def _repr_html_(self) -> str:
        return html.figure(self.svg, self.caption)


def show(records: Records, name: str) -> Shown:
    """Draw a figure of the report or of `lab predict`.

    Args:
        records: as ``load`` reads them.
        name: a name that ``lab list figures`` gives, or ``logit_forecast`` or ``gradient_forecast``.

    Raises:
        RequestError: there is no figure of that name, or these records hold nothing that it shows.
    """
    # here, since matplotlib is slow to import
    from lab.analysis.forecast.figures import gradient_forecast, logit_forecast
    from lab.analysis.rendering import layout
    from lab.studies.figures import FIGURES

    forecasts = {"gradient_forecast": gradient_forecast, "logit_forecast": logit_forecast}
    draw = forecasts[name] if name in forecasts else FIGURES[name]
    drawing = draw(records)
    return Shown(layout.svg(drawing, name), drawing.caption)
