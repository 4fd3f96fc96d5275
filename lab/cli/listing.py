"""Names a user may type: lists for `lab list`, and tab completion."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lab.cli import hydra_app, launch
from lab.cli.compose import reading_request
from lab.core.errors import RequestError, nearest
from lab.core.registry import KINDS, first_line


def _comment(path: Path) -> str:
    lines = [line.lstrip("# ") for line in path.read_text().splitlines() if line.startswith("# ")]
    return next((line for line in lines if not line.startswith("@package")), "")


def _sweeps() -> Iterator[tuple[str, str]]:
    for name, path in launch.sweeps().items():
        yield name, _comment(path)


def _campaigns() -> Iterator[tuple[str, str]]:
    for name, path in launch.campaigns().items():
        yield name, _comment(path)


def _models() -> Iterator[tuple[str, str]]:
    from omegaconf import OmegaConf

    for path in sorted(
        hydra_app.data_folder("conf").glob("model/*.yaml"), key=lambda path: (len(path.stem), path.stem)
    ):
        values = OmegaConf.load(path)
        yield path.stem, f"width {values.width}, depth {values.depth}, head width {values.head_width}"


def _optimizers() -> Iterator[tuple[str, str]]:
    for path in sorted(hydra_app.data_folder("conf").glob("optimizer/*.yaml")):
        yield path.stem, _comment(path)


def _ledgers() -> Iterator[tuple[str, str]]:
    for path in sorted(hydra_app.data_folder("conf").glob("ledger/*.yaml")):
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


def _detectors() -> Iterator[tuple[str, str]]:
    from lab.analysis.spikes.alarms import LABELS
    from lab.analysis.spikes.detectors import KINDS

    for name in KINDS:
        yield name, LABELS[name][0]


LISTS: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
    "sweeps": _sweeps,
    "campaigns": _campaigns,
    "models": _models,
    "guests": _entries("model"),
    "interventions": _entries("intervention"),
    "parametrizations": _entries("parametrization"),
    "optimizers": _optimizers,
    "schedules": _entries("schedule"),
    "batches": _entries("batch"),
    "data": _entries("data"),
    "bursts": _entries("burst"),
    "loss_scales": _entries("loss_scale"),
    "responses": _entries("response"),
    "ledgers": _ledgers,
    "detectors": _detectors,
    "probes": _entries("probe"),
    "trackers": _entries("tracker"),
    "figures": _figures,
}


def lines(names: Sequence[str]) -> Iterator[str]:
    """The entries of the lists named, or of all lists.

    Raises:
        RequestError: there is no such list.
    """
    for name in names:
        if name not in LISTS:
            raise RequestError(f"unknown list {name!r}; {nearest(name, LISTS)}")
    indent = "" if len(names) == 1 else "  "
    for name in names or LISTS:
        entries = list(LISTS[name]())
        if len(names) != 1:
            yield f"{name}:"
        width = max((len(entry) for entry, _ in entries), default=0)
        yield from (f"{indent}{entry:{width}}  {line}".rstrip() for entry, line in entries)


def complete(arguments: Sequence[str], sub_commands: Sequence[str]) -> Sequence[str]:
    """The words that may come next; Hydra itself prints completions of keys, and the script of ``install=bash``.

    Raises:
        RequestError: Hydra refuses the arguments.
    """
    line = os.environ.get("COMP_LINE", "")
    words, starts_word = line.split(), line.endswith(" ")
    index = len(words) if starts_word else len(words) - 1
    if "query=" in " ".join(arguments):
        if index == 1:
            return sub_commands
        if index == 2 and words[1] in ("sweep", "campaign", "list"):
            return list({"sweep": launch.sweeps, "campaign": launch.campaigns}.get(words[1], lambda: LISTS)())
        if index < 1 or words[1] not in ("sweep", "train", "coordcheck"):
            return []
        first_override = 3 if words[1] == "sweep" else 2
        os.environ["COMP_LINE"] = " ".join([words[0], *words[first_override:]]) + " " * starts_word
    sys.argv = ["lab", *arguments]
    with reading_request():
        hydra_app.hydra_main()
    return []
