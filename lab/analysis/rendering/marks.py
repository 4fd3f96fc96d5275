"""Meaning of bands, marks and lines: each kind that is drawn has an entry in the key and a sentence in the caption."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from lab.analysis.rendering import style
from lab.analysis.rendering.style import INK
from lab.analysis.text import first_to_last

# With more seeds, bands hold the middle part of them only, since the range of seeds grows with their number.
MOST_SEEDS_OF_RANGE = 5
INTERVAL, SEED = "interval", "seed"
RANGE, MIDDLE, MIDDLE_PART = "range", "middle", (0.1, 0.9)
OUTCOMES = {"unstable": "x", "diverged": "^"}
OUTCOME_LOOK: dict[str, Any] = {"markersize": 7, "markeredgewidth": 1.6, "fillstyle": "none"}
AT_INIT, BIGRAM, EPSILON = "at initialization", "bigram model", "Adam's epsilon"

SENTENCES = {
    RANGE: "Bands reach from the lowest to the highest of {seeds} seeds.",
    MIDDLE: "Bands hold the middle 80 % of {seeds} seeds.",
    "unstable": "A cross marks runs of which some seed was unstable: its {axis.name} is above the best one, and it "
    "ended worse than a bigram model of the text.",
    "diverged": "A triangle marks runs of which some seed diverged: its loss was non-finite, or ended no lower than it "
    "began.",
    INTERVAL: "Bars are 95 % Student-t intervals over {seeds} seeds.",
    SEED: "A short line is a seed, since fewer than three seeds have no interval.",
}
# What the sentence on unstable runs says of a table, which does not tell the loss of a bigram model.
OF_TABLES = ("ended worse than a bigram model of the text", "ended more than 0.3 above the best loss")
# In the order of their entries in a key; intervals and seeds have none.
KINDS = (RANGE, MIDDLE, *OUTCOMES, AT_INIT, BIGRAM)


def kind_of_band(seeds: int) -> str:
    """The kind of band for this number of seeds."""
    return RANGE if seeds <= MOST_SEEDS_OF_RANGE else MIDDLE


def band_ends(values: np.ndarray) -> tuple[float, float]:
    """The ends of the band of these values, one per seed."""
    if kind_of_band(len(values)) == RANGE:
        return float(values.min()), float(values.max())
    low, high = np.quantile(values, MIDDLE_PART)
    return float(low), float(high)


def name(artist: Artist, kind: str, seeds: int = 0) -> None:
    """Note the kind of an artist, and for bands the number of seeds."""
    artist.set_gid(f"{kind}|{seeds}")


def drawn(figure: Figure) -> dict[str, list[Artist]]:
    """Artists in view by kind: those of ``KINDS`` first, in that order."""
    artists: dict[str, list[Artist]] = {kind: [] for kind in KINDS}
    for axes in figure.axes:
        for artist in axes.get_children():
            if "|" in str(artist.get_gid()) and _is_in_view(artist):
                artists.setdefault(str(artist.get_gid()).rpartition("|")[0], []).append(artist)
    return {kind: shown for kind, shown in artists.items() if shown}


def _is_in_view(artist: Artist) -> bool:
    if not isinstance(artist, Line2D) or artist.axes is None:
        return True
    is_upright = artist.get_transform() == artist.axes.get_xaxis_transform()
    low, high = sorted(artist.axes.get_xlim() if is_upright else artist.axes.get_ylim())
    values = np.asarray(artist.get_xdata() if is_upright else artist.get_ydata(), dtype=float)
    return bool(((values >= low) & (values <= high)).any())


def keys(figure: Figure) -> list[Any]:
    """An entry for each kind drawn."""
    return [_key(kind, artists) for kind, artists in drawn(figure).items() if kind not in (INTERVAL, SEED)]


def _key(kind: str, artists: Iterable[Artist]) -> Any:
    if kind in (RANGE, MIDDLE):
        part = "range" if kind == RANGE else "middle 80 %"
        return Patch(color=INK, alpha=0.25, linewidth=0, label=f"{part} of {_seeds(artists)} seeds")
    if kind in OUTCOMES:
        return Line2D([], [], linestyle="", color=INK, marker=OUTCOMES[kind], label=kind, **OUTCOME_LOOK)
    lines = [artist for artist in artists if isinstance(artist, Line2D)]
    if not lines:
        return Patch(color=INK, alpha=0.25, linewidth=0, label=kind)
    key = Line2D([], [])
    key.update_from(lines[0])
    key.set(color=INK, label=kind)
    return key


def sentences(figure: Figure, others: Mapping[str, str]) -> Iterator[str]:
    """Sentences on the kinds drawn: those of ``others`` first, then those that every figure shares."""
    artists_by_kind = drawn(figure)
    for kind, sentence in (*others.items(), *SENTENCES.items()):
        if kind in artists_by_kind:
            yield sentence.format(seeds=_seeds(artists_by_kind[kind]), axis=style.axis())


def _seeds(artists: Iterable[Artist]) -> str:
    """``3``, or ``2 to 3`` if bands differ in their number of seeds."""
    counts = {int(str(artist.get_gid()).rpartition("|")[2]) for artist in artists}
    return first_to_last(map(str, sorted(counts)))
