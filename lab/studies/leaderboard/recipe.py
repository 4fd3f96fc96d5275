"""The leaderboard on a user's recipe in two stages: few seeds for every arm, then fresh seeds for the best arms."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.analysis.text import format_p, listed
from lab.core.errors import RequestError
from lab.records import store
from lab.studies.leaderboard.arms import meanings
from lab.studies.leaderboard.board import HELPS, QK, Panel, Reference, Row, read_board
from lab.studies.leaderboard.curves import PART
from lab.studies.leaderboard.listing import change

FEWEST_LRS = 4
FIRST_SEEDS, FRESH_SEEDS = 3, 6
SURVIVORS = 12
STAGES = ("stage_1", "stage_2")


class ArmChoice(NamedTuple):
    """An arm, and the override that makes it from a recipe.

    Attributes:
        name: the name of the arm.
        word: the override, such as ``intervention=[relu,z_loss]`` or ``optimizer=lion``.
    """

    name: str
    word: str


class Recipe(NamedTuple):
    """A recipe, and the arms that can be tried on it.

    Attributes:
        file: the sweep file, which sweeps learning rate and seed alone.
        interventions: the interventions of the recipe.
        optimizer: the name of its optimizer.
        lrs: the number of its learning rates.
        seeds: its seeds.
        arms: the arms that can be compared with it.
        refused: the reasons why other arms cannot, by their names.
    """

    file: Path
    interventions: frozenset[str]
    optimizer: str
    lrs: int
    seeds: tuple[int, ...]
    arms: Sequence[ArmChoice]
    refused: Mapping[str, str]

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """Seeds of the first stage."""
        start = self.seeds[0]
        return self.seeds if len(self.seeds) >= FIRST_SEEDS else tuple(range(start, start + FIRST_SEEDS))

    @property
    def fresh_seeds(self) -> tuple[int, ...]:
        """Seeds of the second stage, on none of which its arms were chosen."""
        start = max(self.first_seeds) + 1
        return tuple(range(start, start + FRESH_SEEDS))

    @property
    def own_word(self) -> str:
        """The override that makes the recipe itself."""
        return f"intervention=[{','.join(sorted(self.interventions))}]"

    def commands(self, arms: Sequence[ArmChoice], seeds: Sequence[int], out: Path) -> Iterator[str]:
        """The commands that train the recipe and these arms."""
        interventions, optimizers = (
            [arm.word.partition("=")[2] for arm in arms if arm.word.startswith(group)]
            for group in ("intervention", "optimizer")
        )
        shared = [f"seed={','.join(map(str, seeds))}", f"out={out}"]
        own = self.own_word.partition("=")[2]
        yield shlex.join(["lab", "sweep", str(self.file), f"intervention={','.join([own, *interventions])}", *shared])
        if optimizers:
            yield shlex.join(["lab", "sweep", str(self.file), f"optimizer={','.join(optimizers)}", *shared])


def lines(recipe: Recipe, folder: Path) -> Iterator[str]:
    """Yield what the records of both stages say, and the command that trains what is missing.

    Raises:
        RequestError: the records of a stage cannot be read, or hold no reference.
    """
    first = _panel(recipe, folder / STAGES[0])
    if missing := _missing(first, recipe.arms, recipe.first_seeds):
        yield from _to_train(recipe, 1, recipe.arms, recipe.first_seeds, folder, missing)
        yield f"Then `lab leaderboard --recipe {recipe.file}` chooses at most {SURVIVORS} for stage 2, on fresh seeds."
        if recipe.refused:
            yield f"{len(recipe.refused)} arms do not apply:"
            yield from (f"  {name}: {reason}" for name, reason in recipe.refused.items())
        return
    chosen, rows = survivors(recipe, first), _rows(first, recipe.arms)
    if not chosen:
        seeds, arms = len(recipe.first_seeds), len(recipe.arms)
        yield f"Add none of them: on {seeds} seeds none of {arms} arms has a lower instability part than the recipe."
        return
    yield f"Stage 1 chose {len(chosen)} of {len(recipe.arms)} arms by their instability part, nats/token:"
    yield from (f"  {arm.name}: {change(rows[arm.name].differences[PART])}" for arm in chosen)
    second = _panel(recipe, folder / STAGES[1])
    if missing := _missing(second, chosen, recipe.fresh_seeds):
        yield from _to_train(recipe, 2, chosen, recipe.fresh_seeds, folder, missing)
        return
    yield from _answer(recipe, second, chosen)


def _to_train(
    recipe: Recipe,
    stage: int,
    arms: Sequence[ArmChoice],
    seeds: Sequence[int],
    folder: Path,
    missing: Sequence[str],
) -> Iterator[str]:
    """Yield what a stage trains, and the commands; the same commands train what is missing of it."""
    runs = (len(arms) + 1) * len(seeds) * recipe.lrs
    yield (
        f"Stage {stage} of 2 trains {len(arms)} arms beside the recipe, on {len(seeds)} seeds and {recipe.lrs} "
        f"learning rates: {runs:,} runs; the command with --dry-run says how many hours they take."
    )
    if len(missing) < len(arms):
        yield f"It lacks seeds of {listed(missing)}."
    yield from (f"  {command}" for command in recipe.commands(arms, seeds, folder / STAGES[stage - 1]))


def _panel(recipe: Recipe, folder: Path) -> Panel | None:
    """The panel of the recipe itself; None without records.

    Raises:
        RequestError: the records have no reference, or no other arm.
    """
    if not folder.is_dir() or store.find(folder) is None:
        return None
    reference = Reference(recipe.interventions - {QK}, recipe.optimizer)
    for panel in read_board([folder], meanings(), reference).panels:
        if panel.reference.interventions == recipe.interventions:
            return panel
    raise RequestError(f"{folder} holds no arm beside the recipe of {recipe.file}")


def _rows(panel: Panel | None, arms: Sequence[ArmChoice]) -> dict[str, Row]:
    names = {arm.name for arm in arms}
    return {row.name: row for row in panel.rows if row.name in names} if panel else {}


def _missing(panel: Panel | None, arms: Sequence[ArmChoice], seeds: Sequence[int]) -> list[str]:
    rows = _rows(panel, arms)
    return [arm.name for arm in arms if arm.name not in rows or rows[arm.name].seeds < len(seeds)]


def survivors(recipe: Recipe, first: Panel | None) -> list[ArmChoice]:
    """The arms with the lowest instability part in the first stage, at most a dozen, and only below the recipe's."""
    rows = _rows(first, recipe.arms)
    means = {name: row.differences[PART].mean for name, row in rows.items() if row.differences[PART].mean < 0}
    best = sorted(means, key=lambda name: means[name])[:SURVIVORS]
    choices = {arm.name: arm for arm in recipe.arms}
    return [choices[name] for name in best]


def _answer(recipe: Recipe, second: Panel | None, chosen: Sequence[ArmChoice]) -> Iterator[str]:
    rows = list(_rows(second, chosen).values())
    for row in rows:
        yield f"  {row.name}: {row.verdict}, {change(row.differences[PART])}, p {format_p(row.p_adjusted) or 'none'}"
    helping = [row for row in rows if row.verdict == HELPS]
    judged = (
        f"Chosen among {len(recipe.arms)} arms on other seeds, judged on {len(recipe.fresh_seeds)} fresh seeds alone, "
        f"with Holm's correction over {len(chosen)}"
    )
    if not helping:
        yield f"Add none of them: no arm certainly lowers the instability part by more than the margin. {judged}."
        return
    added = listed(f"{row.name} ({_price(row)})" for row in helping)
    together = "" if len(helping) == 1 else " Each was tried alone; their combination was not."
    yield f"Add {added}. {judged}.{together}"


def _price(row: Row) -> str:
    """``-0.100 [-0.120, -0.080] nats/token, p 0.002, +64 parameters, 1.05 times the time``."""
    parts = [f"{change(row.differences[PART])} nats/token, p {format_p(row.p_adjusted)}"]
    parts.append(f"{row.parameters_added:+,} parameters" if row.parameters_added else "no parameters")
    parts += [] if math.isnan(row.cost) else [f"{row.cost:.2f} times the time"]
    return ", ".join(parts)
