"""A drawing with its caption, as notebooks display it."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, NamedTuple

from lab.analysis.rendering import html

if TYPE_CHECKING:
    from lab.analysis.rendering.layout import Drawing

PIXELS = 2  # of a picture, for each point of its width


class Shown(NamedTuple):
    """A drawing as a picture (PNG) and its caption, which notebooks display below it."""

    png: bytes
    caption: str

    def __repr__(self) -> str:
        return self.caption

    def _ipython_display_(self) -> None:
        """Display both: pictures, unlike ``<svg>``, are shown wherever a notebook is, such as on GitHub."""
        from IPython.display import display  # there where a notebook runs

        title, *others = [" ".join(paragraph.split()) for paragraph in self.caption.split("\n\n")]
        picture = {"image/png": b64encode(self.png).decode(), "text/plain": title}
        look = {"width": int.from_bytes(self.png[16:20]) // PIXELS, "alt": title}
        caption = {"text/html": "".join(map(html.paragraph, [title, *others]))}
        for output, metadata in ((picture, {"image/png": look}), (caption, {})):
            display(output, metadata=metadata, raw=True)  # type: ignore[no-untyped-call]


def shown(drawing: Drawing) -> Shown:
    """The drawing as a picture."""
    from lab.analysis.rendering import layout  # matplotlib is slow to import

    return Shown(layout.png(drawing, PIXELS * 72), drawing.caption)
