"""Campaigns: several sweeps, trained one after another, first those that decide most claims per core-hour."""

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
    """One sweep of a campaign: the words after ``lab sweep``, and the plan of what is left to train."""

    words: Sequence[str]
    plan: SweepPlan

    @property
    def sweep(self) -> str:
        """The name of the sweep."""
        return _stem(self.words[0])

    @property
    def claims(self) -> list[Claim]:
        """The claims that the sweep decides, of every source."""
        return [claim for claim in map(CLAIMS.__getitem__, CLAIMS) if claim.sweep == self.sweep]

    @property
    def claims_per_core_hour(self) -> float:
        """Claims per core-hour of the whole sweep; finished runs count, so a resumed campaign keeps its order."""
        return len(self.claims) * HOUR / core_seconds(self.plan.mine)

    @property
    def seconds_left(self) -> float:
        """Estimated seconds until the missing runs are trained, on all slots of this machine."""
        return core_seconds(self.plan.missing) / len(self.plan.host.slots)

    @property
    def is_done(self) -> bool:
        """Whether all runs and the report exist."""
        return not self.plan.missing and (self.plan.folder / "report.html").exists()


class Campaign(NamedTuple):
    """The arguments of ``lab campaign``.

    Attributes:
        name: the name of the campaign.
        file: the file that lists its parts.
        out: the folder that holds a results folder for each part.
        settings: overrides that choose and set the launcher of every part.
        dry_run: whether to estimate only.
    """

    name: str
    file: Path
    out: Path
    settings: Sequence[str] = ()
    dry_run: bool = False


def read_arguments(arguments: Sequence[str]) -> Campaign:
    """Read the arguments of ``lab campaign``: a name or a file, and options.

    Raises:
        RequestError: there is no such campaign, or an option is unknown.
    """
    word, *options = arguments
    known = shipped.campaigns()
    file = Path(word) if Path(word).suffix in (".yaml", ".yml") else known.get(word)
    if file is None:
        raise RequestError(f"unknown campaign {word!r}; {nearest(word, known)}; or give a FILE.yaml")
    if not file.is_file():
        raise RequestError(f"no campaign file {file}")
    out, settings = str(Path("runs", file.stem)), []
    for option in options:
        key = option.partition("=")[0]
        if key == "out" and "=" in option:
            out = str(parse([option])[0].value())
        elif re.fullmatch(r"hydra[/.]launcher.*", key):
            settings.append(option)
        elif option != "--dry-run":
            choices = ["out", "hydra/launcher", "--dry-run"]
            raise RequestError(f"lab campaign has no option {key!r}; {nearest(key, choices)}")
    return Campaign(file.stem, file, Path(out), settings, "--dry-run" in options)


def _stem(sweep: str) -> str:
    """The name of a sweep that is given by name or by file."""
    return Path(sweep).stem if Path(sweep).suffix in (".yaml", ".yml") else sweep


def plan(campaign: Campaign) -> list[PlannedSweep]:
    """Plan the parts of a campaign; finished parts first, then those that decide most claims per core-hour.

    Raises:
        RequestError: the campaign file is invalid, or a part cannot be planned.
    """
    if distributed.world_size() > 1:
        raise RequestError("lab campaign plans its parts in one process; run it without torchrun")
    parts = [PlannedSweep(words, _plan(words)) for words in _read(campaign)]
    return sorted(parts, key=lambda part: (not part.is_done, -part.claims_per_core_hour))


def _read(campaign: Campaign) -> Iterator[list[str]]:
    """The words after ``lab sweep`` for each part, with its results folder and the launcher of the campaign."""
    path = campaign.file
    lines = launch.read_sweep(path).get("parts")
    if not isinstance(lines, ListConfig) or not lines or not all(isinstance(line, str) and line for line in lines):
        raise RequestError(f"{path} must hold parts: a list of sweeps, each written as after `lab sweep`")
    for line in lines:
        words = line.split()
        folder = str(campaign.out / _stem(words[0]))
        is_plain = re.fullmatch(r"[/.\w-]+", folder)
        yield [*words, *campaign.settings, f"out={folder if is_plain else quoted(Path(folder))}"]


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
    yield f"hours with {slots} at once, on cores as fast as those of benchmarks/RESULTS.md; nothing was timed here"


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


def train(campaign: Campaign, parts: Sequence[PlannedSweep]) -> None:
    """Train what is missing, part after part; a part that fails does not stop the others.

    Raises:
        SystemExit: with status 1 when a part failed; or a signal asked it to stop.
    """
    started, failed = time.monotonic(), []
    seconds = [part.seconds_left for part in parts]
    before, left = [0.0, *accumulate(seconds)], sum(len(part.plan.missing) for part in parts)
    say(f"campaign {campaign.name}: {left} runs to train in about {sum(seconds) / HOUR:.2g} hours")
    for index, part in enumerate(parts):
        title = f"campaign {campaign.name}, part {index + 1} of {len(parts)}"
        todo = f"{len(part.plan.missing)} of {len(part.plan.mine)} runs to train"
        say(f"{title}: {part.sweep}, {'already there' if part.is_done else todo}")
        after = before[-1] - before[index + 1]
        if not part.is_done and not _train_part(
            part, CampaignPart(title, started, before[index], seconds[index], after)
        ):
            failed.append(part.sweep)
    if failed:
        _exit_failed(failed)
    say(f"all {len(parts)} parts are there; next: lab claims {campaign.out}")


def _train_part(part: PlannedSweep, position: CampaignPart) -> bool:
    """Train a part; returns whether none of its runs failed."""
    try:
        multirun.carry_out(_request(part.words), position)  # planned anew: others may have trained some of it meanwhile
    except RequestError as refusal:  # such as a full disk; the request itself was valid when it was planned
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
