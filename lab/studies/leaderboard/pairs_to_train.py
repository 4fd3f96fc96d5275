"""Which pairs of the best arms of a board to train next, on fresh seeds, and what they say once they are trained."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lab.analysis.statistics import FEWEST_SEEDS, power_of
from lab.analysis.text import format_p, listed
from lab.core.errors import RequestError
from lab.records import store
from lab.studies.leaderboard import arms
from lab.studies.leaderboard.board import ALPHA, HARMS, HELPS, MARGIN, QK, Base, Board, Panel, Row, read_board
from lab.studies.leaderboard.curves import PART
from lab.studies.leaderboard.listing import change, ranks_shown
from lab.studies.leaderboard.pairs import pair_panels, sum_word

BEST = 12  # number of arms that are paired
FRESH_SEEDS = 6
SWEEP = "leaderboard"
# Keys that the command sets itself. Loss spikes are counted in the training losses of every step.
OWN_KEYS = ("intervention", "seed", "out", "shard", "probes.every", "probes.names")
PROBES = ("probes.every=1", "probes.names=[train_loss]")


class PanelPairs(NamedTuple):
    """The best arms of a panel, and their pairs.

    Attributes:
        title: of the panel.
        recipe: the interventions of its reference.
        comparable: the number of arms among which the best were chosen.
        best: the best ones, in rising order of the difference.
        tied: the others whose ranks reach into theirs.
        left_out: pairs that are not trained, with the reason.
        pairs: all other pairs, each in alphabetical order.
        lrs: the number of learning rates.
        seconds: wall time of a run, a median over arms; NaN if it was not recorded.
        spread: standard deviation of a difference over seeds, a median over arms, nats/token.
    """

    title: str
    recipe: frozenset[str]
    comparable: int
    best: Sequence[Row]
    tied: Sequence[Row]
    left_out: Mapping[tuple[str, str], str]
    pairs: Sequence[tuple[str, str]]
    lrs: int
    seconds: float
    spread: float

    def without(self, refused: Mapping[tuple[str, str], str]) -> PanelPairs:
        """The same without the pairs that planning refused, and those that are arms of the board already."""
        reasons = {pair: refused.get(pair, "") or _reason_on_board(pair) for pair in self.pairs}
        left_out = {pair: reason for pair, reason in reasons.items() if reason}
        return self._replace(pairs=[pair for pair in self.pairs if pair not in left_out], left_out=left_out)

    @property
    def arms(self) -> list[frozenset[str]]:
        """The interventions of the reference, of the members and of the pairs."""
        members = [row.name for row in self.best if any(row.name in pair for pair in self.pairs)]
        return [self.recipe | set(added) for added in ((), *((name,) for name in members), *self.pairs)]

    def runs(self, seeds: Sequence[int]) -> int:
        """The number of runs of all of these."""
        return len(self.arms) * len(seeds) * self.lrs


def best_pairs(board: Board) -> list[PanelPairs]:
    """The pairs of the best arms of each panel.

    The best are at most a dozen interventions that can be compared by sensitivity and are not worse than the reference,
    by the mean difference in the instability part.

    Raises:
        RequestError: the board has several settings, or no panel has two such interventions.
    """
    if len({base.curve.setting for base in board.bases}) > 1:
        titles = listed(base.title for base in board.bases)
        raise RequestError(f"pairs are trained in one setting, and this board has several: {titles}")
    bases = {base.title: base for base in board.bases}
    found = [_pairs(panel, bases[panel.title]) for panel in board.panels]
    if not any(row.pairs for row in found):
        raise RequestError(
            f"no pair to train: no panel has two single interventions with {FEWEST_SEEDS} seeds whose mean is not "
            "above the reference"
        )
    return found


def _pairs(panel: Panel, base: Base) -> PanelPairs:
    single = [row for row in panel.rows if row.name in arms.arm_cards() and not arms.arm_cards()[row.name].is_optimizer]
    ranked = [row for row in single if row.ranks is not None]
    not_worse = [row for row in ranked if row.differences[PART].mean <= 0 and row.verdict != HARMS]
    best, others = not_worse[:BEST], not_worse[BEST:]
    tied = [row for row in others if row.ranks is not None and row.ranks[0] <= BEST]
    deviations = [float(np.std(row.differences[PART].values, ddof=1)) for row in ranked]
    seconds = [float(curve.seconds.median()) for curve in base.curves if len(curve.seconds)]
    return PanelPairs(
        title=panel.title,
        recipe=base.curve.interventions,
        comparable=len(ranked),
        best=best,
        tied=tied,
        left_out={},
        pairs=list(combinations(sorted(row.name for row in best), 2)),
        lrs=len(base.curve.lrs),
        seconds=float(np.median(seconds)) if seconds else math.nan,
        spread=float(np.median(deviations)) if deviations else math.nan,
    )


def _reason_on_board(pair: tuple[str, str]) -> str:
    if QK in pair:
        return "the panel with qk-layernorm has the other beside it"
    return "it is an arm of the board" if "+".join(pair) in arms.combinations() else ""


def sweep_words(folder: Path) -> list[str]:
    """The name of the sweep that trained a folder, and its overrides but for those that the pairs set themselves."""
    for command in store.commands(folder):
        program, *words = shlex.split(command)
        if program == "lab" and len(words) > 1 and words[0] == "sweep":
            return [word for word in words[1:] if not word.startswith("-") and word.split("=")[0] not in OWN_KEYS]
    return [SWEEP]


class Stage(NamedTuple):
    """Where the pairs of a board are trained.

    Attributes:
        board: the folder of the board.
        words: the name of its sweep, and overrides, as ``sweep_words`` reads them.
        seeds: fresh ones, on none of which the best arms were chosen.
    """

    board: Path
    words: Sequence[str]
    seeds: Sequence[int]

    @property
    def out(self) -> Path:
        """The folder of the pairs, beside the board's."""
        return self.board.with_name(f"{self.board.name}_pairs")

    def command(self, pairs: PanelPairs) -> str:
        """The command that trains the pairs of a panel, their members and the reference."""
        interventions = ",".join(f"[{','.join(sorted(names))}]" for names in pairs.arms)
        words = [*self.words, f"intervention={interventions}", f"seed={','.join(map(str, self.seeds))}"]
        return shlex.join(["lab", "sweep", *words, *PROBES, f"out={self.out}"])


def stage_of(folder: Path) -> Stage:
    """The stage that follows a board."""
    last = int(store.read(folder).runs["seed"].max())
    return Stage(folder, sweep_words(folder), range(last + 1, last + 1 + FRESH_SEEDS))


def lines(pairs: Sequence[PanelPairs], stage: Stage) -> Iterator[str]:
    """Yield for each panel the command that trains its pairs, or the answer once they are trained.

    Raises:
        RequestError: the records of the pairs cannot be read, or hold no reference.
    """
    out = stage.out
    trained: list[Panel] = []
    if out.is_dir() and store.find(out) is not None:
        trained = pair_panels(read_board([out], arms.meanings()))
    for best in pairs:
        rows = {row.name: row for panel in trained if panel.title == f"pairs {best.title}" for row in panel.rows}
        missing = [name for pair in best.pairs if not _is_whole(rows.get(name := "+".join(pair)))]
        if best.pairs and not missing:
            yield from _answer(best, list(rows.values()), stage)
            continue
        yield from _to_train(best, stage)
        if len(missing) < len(best.pairs):
            yield f"  It lacks seeds of {len(missing)} of {len(best.pairs)} pairs: {listed(missing)}."


def _is_whole(row: Row | None) -> bool:
    if row is None or row.pair is None:
        return False
    return row.seeds >= FRESH_SEEDS and row.pair.interaction.n >= FRESH_SEEDS


def _to_train(pairs: PanelPairs, stage: Stage) -> Iterator[str]:
    if len(pairs.best) < 2:
        yield f"Pairs {pairs.title}: none, since no two of {pairs.comparable} arms are as good as the reference."
        return
    yield f"Pairs {pairs.title}: the {len(pairs.best)} best of {pairs.comparable} comparable arms, nats/token:"
    for row in pairs.best:
        yield f"  {row.name}: {change(row.differences[PART])}, rank {ranks_shown(row.ranks)}"
    if pairs.tied:
        yield f"  Left out although they tie with these: {listed(row.name for row in pairs.tied)}."
    every = len(pairs.pairs) + len(pairs.left_out)
    if pairs.left_out:
        yield f"{len(pairs.left_out)} of their {every} pairs are left out:"
        for reason in dict.fromkeys(pairs.left_out.values()):
            alike = ("+".join(pair) for pair, its_reason in pairs.left_out.items() if its_reason == reason)
            yield f"  {', '.join(alike)}: {reason}"
    if not pairs.pairs:
        yield "No pair is left to train."
        return
    runs = pairs.runs(stage.seeds)
    hours = runs * pairs.seconds / 3600
    cost = "the command with --dry-run says how many hours they take"
    if not math.isnan(hours):
        cost = f"about {hours:.2g} core-hours, since a run of {stage.board} took {pairs.seconds:.2g} s"
    yield (
        f"Train {len(pairs.pairs)} pairs and their members beside the recipe, on {len(stage.seeds)} seeds that chose "
        f"none of them: {runs:,} runs, {cost}."
    )
    yield f"  {stage.command(pairs)}"
    if pairs.spread > 0:
        power = power_of(len(stage.seeds), MARGIN, pairs.spread, ALPHA / len(pairs.pairs))
        yield (
            f"Differences of arms spread by {pairs.spread:.2g} nats over seeds. So {len(stage.seeds)} seeds show "
            f"{MARGIN:g} nats beyond the better half with {power:.0%} probability, at the strictest of "
            f"{len(pairs.pairs)} Holm levels."
        )
    yield f"Then `lab leaderboard {stage.board} --pairs` says which help, and `lab leaderboard {stage.out}` shows all."


def _answer(pairs: PanelPairs, rows: Sequence[Row], stage: Stage) -> Iterator[str]:
    helping = [row for row in rows if row.verdict == HELPS]
    judged = f"judged on {len(stage.seeds)} seeds that chose none of their members, with Holm's correction"
    if not helping:
        yield f"Pairs {pairs.title}: none of {len(rows)} helps beyond its better half, {judged}."
        return
    verb = "helps" if len(helping) == 1 else "help"
    yield f"Pairs {pairs.title}: {len(helping)} of {len(rows)} {verb} beyond the better half, {judged}:"
    for row in helping:
        assert row.pair is not None
        beyond = f"{change(row.differences[PART])} nats/token beyond {row.pair.better}, p {format_p(row.p_adjusted)}"
        yield f"  {row.name}: {beyond}; sum of both {sum_word(row.pair.interaction)}"
