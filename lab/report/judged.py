"""What claims of papers say of the runs of a folder, where the shelf of studies holds any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from markupsafe import Markup

from lab.analysis.sensitivity import Study
from lab.core.shelf import modules


class Judgement(NamedTuple):
    """What claims of papers say of the runs of a folder.

    Attributes:
        word: the answer to its question; empty if no claim gives it.
        text: the evidence for the word.
        verdicts: how many claims have each verdict; empty if none is about these runs.
        study: the name of the study whose claims these are; empty if none.
        section: of the page.
    """

    word: str = ""
    text: str = ""
    verdicts: Mapping[str, int] = MappingProxyType({})
    study: str = ""
    section: Markup = Markup()


def judgement(study: Study, folder: Path, commands: Sequence[str]) -> Judgement:
    """What the claims on the shelf say of the runs of a folder, which these commands trained."""
    found: list[Judgement] = [module.judged(study, folder, commands) for module in modules("judgement")]
    return found[0] if found else Judgement()


def trained_sweeps(folder: str | Path, commands: Iterable[str]) -> list[str]:
    """The names of the sweeps that filled a folder with these commands; without any the name of the folder."""
    words = [command.split() for command in commands]
    trained = [Path(line[2]).stem for line in words if line[:2] == ["lab", "sweep"] and len(line) > 2]
    return trained or [Path(folder).name]
