"""What can be named on the command line, one line each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lab import app, request
from lab.core.errors import RequestError, nearest
from lab.core.registry import KINDS, first_line


def _comment(path: Path) -> str:
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    return next((line for line in lines if not line.startswith("@package")), "")


def _sweeps() -> Iterator[tuple[str, str]]:
    for name, path in request.sweeps().items():
        yield name, _comment(path)


def _models() -> Iterator[tuple[str, str]]:
    from omegaconf import OmegaConf

    for path in sorted(app.data_folder("conf").glob("model/*.yaml"), key=lambda path: (len(path.stem), path.stem)):
        values = OmegaConf.load(path)
        yield path.stem, f"width {values.width}, depth {values.depth}, head width {values.head_width}"


def _optimizers() -> Iterator[tuple[str, str]]:
    for path in sorted(app.data_folder("conf").glob("optimizer/*.yaml")):
        yield path.stem, _comment(path)


def _entries(kind: str) -> Callable[[], Iterator[tuple[str, str]]]:
    def lines() -> Iterator[tuple[str, str]]:
        import lab.training.config  # noqa: F401  (fills the registries)

        registry = KINDS[kind]
        for name in registry:
            yield name, first_line(getattr(registry[name], "measure", registry[name]))

    return lines


def _figures() -> Iterator[tuple[str, str]]:
    from lab.analysis.figures import FIGURES

    for name in FIGURES:
        yield name, first_line(FIGURES[name])


SHELVES: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "sweeps": _sweeps,
    "models": _models,
    "guests": _entries("model"),
    "interventions": _entries("intervention"),
    "parametrizations": _entries("parametrization"),
    "optimizers": _optimizers,
    "schedules": _entries("schedule"),
    "data": _entries("data"),
    "probes": _entries("probe"),
    "trackers": _entries("tracker"),
    "figures": _figures,
}


def lines(shelves: Sequence[str]) -> Iterator[str]:
    """The entries of the shelves named, of all when none is.

    Raises:
        RequestError: there is no such shelf.
    """
    for shelf in shelves:
        if shelf not in SHELVES:
            raise RequestError(f"unknown list {shelf!r}; {nearest(shelf, SHELVES)}")
    for shelf in shelves or SHELVES:
        entries = list(SHELVES[shelf]())
        if len(shelves) != 1:
            yield f"{shelf}:"
        indent, wide = "" if len(shelves) == 1 else "  ", max((len(name) for name, _ in entries), default=0)
        yield from (f"{indent}{name:{wide}}  {line}".rstrip() for name, line in entries)
