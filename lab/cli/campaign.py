"""Campaigns: several sweeps, trained one after another in the order in which an hour of a core decides most claims."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, NoReturn

import pandas as pd
from omegaconf import ListConfig

from lab.analysis.judging.verdicts import FIGURES_OF_THE_PAPER, SOURCES, Claim
from lab.analysis.text import listed, plain_text
from lab.cli import launch, multirun
from lab.cli.compose import Request, parse
from lab.core import distributed, shipped
from lab.core.errors import RequestError, nearest
from lab.core.files import quoted
from lab.core.printing import say
from lab.studies.claims import CLAIMS
from lab.sweeping.dry_run import core_seconds
from lab.sweeping.planner import SweepPlan
from lab.sweeping.progress import CampaignPart

HOUR = 3600.0  # seconds


class PlannedSweep(NamedTuple):
    """One sweep of a campaign: the words after ``lab sweep``, and what they leave to do."""

    words: Sequence[str]
    plan: SweepPlan

    @property
    def sweep(self) -> str:
        """The name of the sweep."""
        return self.words[0]

    @property
    def claims(self) -> list[Claim]:
        """The claims that the sweep decides, of every source."""
        return [claim for claim in map(CLAIMS.__getitem__, CLAIMS) if claim.sweep == self.sweep]

    @property
    def claims_per_core_hour(self) -> float:
        """Claims that an hour of a core decides, finished runs included, so that the order stays when it is resumed."""
        return len(self.claims) * HOUR / core_seconds(self.plan.mine)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the missing runs are trained, on all slots of this machine."""
        return core_seconds(self.plan.missing) / len(self.plan.host.slots)

    @property
    def is_done(self) -> bool:
        """Whether all runs and the report exist."""
        return not self.plan.missing and (self.plan.folder / "report.html").exists()


def read_arguments(arguments: Sequence[str]) -> tuple[str, Path, bool]:
    """The name of a campaign, its folder, and whether to estimate only.

    Raises:
        RequestError: there is no such campaign, or an argument is neither ``out=DIR`` nor ``--dry-run``.
    """
    name, *options = arguments
    known = shipped.campaigns()
    if name not in known:
        raise RequestError(f"unknown campaign {name!r}; {nearest(name, known)}")
    out = str(Path("runs", name))
    for word in options:
        if word.startswith("out="):
            out = str(parse([word])[0].value())
        elif word != "--dry-run":
            option = word.partition("=")[0]
            raise RequestError(f"lab campaign has no option {option!r}; {nearest(option, ['out', '--dry-run'])}")
    return name, Path(out), "--dry-run" in options


def plan(name: str, out: Path) -> list[PlannedSweep]:
    """Plan the parts of a campaign; finished parts first, then those that decide most claims per core-hour.

    Raises:
        RequestError: the file of the campaign makes no sense, or a part cannot be planned.
    """
    if distributed.world_size() > 1:
        raise RequestError("lab campaign plans its parts in one process; leave torchrun away")
    parts = [PlannedSweep(words, _plan(words)) for words in _read(shipped.campaigns()[name], out)]
    return sorted(parts, key=lambda part: (not part.is_done, -part.claims_per_core_hour))


def _read(path: Path, out: Path) -> Iterator[list[str]]:
    """What follows ``lab sweep`` for each part, with the folder of its records."""
    lines = launch.read_sweep(path).get("parts")
    if not isinstance(lines, ListConfig) or not lines or not all(isinstance(line, str) and line for line in lines):
        raise RequestError(f"{path} must hold parts: a list of what follows `lab sweep`")
    for line in lines:
        words = line.split()
        folder = str(out / words[0])
        is_plain = re.fullmatch(r"[/.\w-]+", folder)
        yield [*words, f"out={folder if is_plain else quoted(Path(folder))}"]


def _request(words: Sequence[str]) -> Request:
    """The request of ``lab sweep`` with these words, which is also the command that the folder notes."""
    sweep = launch.find_sweep(words[0])
    return launch.read_request(words[1:], launch.command_line(["sweep", *words]), name=sweep.stem, sweep=sweep)


def _plan(words: Sequence[str]) -> SweepPlan:
    return multirun.plan(multirun.compose(_request(words)))


def table(parts: Sequence[PlannedSweep]) -> Iterator[str]:
    """A row for each part, what it decides and how long it takes, and the total."""
    rows = [_row(part.sweep, [part], part.claims_per_core_hour) for part in parts]
    decided = {claim.order for part in parts for claim in part.claims}
    rate = len(decided) * HOUR / sum(core_seconds(part.plan.mine) for part in parts)
    yield from plain_text(pd.DataFrame([*rows, _row("in all", parts, rate)]))
    slots = len(parts[0].plan.host.slots)
    yield f"hours with {slots} at once, if each core is as fast as those of benchmarks/RESULTS.md; nothing was timed"


def _row(name: str, parts: Sequence[PlannedSweep], claims_per_core_hour: float) -> dict[str, str | int]:
    claims = {claim.order: claim for part in parts for claim in part.claims}
    figures = {claim.figure for claim in claims.values() if claim.source == SOURCES[0]}
    return {
        "part": name,
        "runs": sum(len(part.plan.mine) for part in parts),
        "left": sum(len(part.plan.missing) for part in parts),
        "hours left": f"{sum(part.seconds_left for part in parts) / HOUR:.2f}",
        "claims": len(claims),
        "per core-hour": f"{claims_per_core_hour:.3g}",
        "figures": ", ".join(sorted(figures, key=FIGURES_OF_THE_PAPER.index)) if len(parts) == 1 else "",
    }


def train(name: str, out: Path, parts: Sequence[PlannedSweep]) -> None:
    """Train what is missing, part after part; a part that fails does not stop the others.

    Raises:
        SystemExit: with status 1 when a part failed; or told to stop.
    """
    started, failed = time.monotonic(), []
    seconds = [part.seconds_left for part in parts]
    before, left = [0.0, *accumulate(seconds)], sum(len(part.plan.missing) for part in parts)
    say(f"campaign {name}: {left} runs to train in about {sum(seconds) / HOUR:.2g} hours")
    for index, part in enumerate(parts):
        title = f"campaign {name}, part {index + 1} of {len(parts)}"
        todo = f"{len(part.plan.missing)} of {len(part.plan.mine)} runs to train"
        say(f"{title}: {part.sweep}, {'already there' if part.is_done else todo}")
        after = before[-1] - before[index + 1]
        if not part.is_done and not _train_part(
            part, CampaignPart(title, started, before[index], seconds[index], after)
        ):
            failed.append(part.sweep)
    if failed:
        _exit_failed(failed)
    say(f"all {len(parts)} parts are there; next: lab claims {out}")


def _train_part(part: PlannedSweep, position: CampaignPart) -> bool:
    """Train a part; returns whether none of its runs failed."""
    try:
        multirun.carry_out(_request(part.words), position)  # planned anew: others may have trained some of it meanwhile
    except RequestError as refusal:  # a full disk; it made sense when it was planned
        say(f"lab: {part.sweep}: {refusal}", error=True)
        return False
    except SystemExit as end:
        if end.code != 1:
            raise
        return False
    return True


def _exit_failed(sweeps: Sequence[str]) -> NoReturn:
    line = f"lab: {listed(sweeps)} did not finish; the same command trains what is missing"
    say(line, error=True)
    raise SystemExit(1)
