"""The card of a recipe: what the crash test says of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.patches import Rectangle

from lab.analysis.rendering import html, layout, panels, style
from lab.analysis.rendering.layout import Drawing, Sheet
from lab.analysis.stress import card_json
from lab.analysis.stress.battery import (
    CARD_FILE,
    FAILS,
    NOT_JUDGED,
    OPEN,
    PASSES,
    WEAK,
    Battery,
    StressTest,
    read_battery,
)
from lab.analysis.stress.cures import CURES, HARMS, IN_PART, LOSES, SCREENED, Cure
from lab.analysis.stress.lines import BETWEEN, VERDICTS, Line, along, is_judged, lines_of, strips
from lab.analysis.stress.measures import FAILS_ABOVE, Outcomes, best_lr, curve, failing_lrs, fitted_best_lrs
from lab.analysis.stress.rates import FineCurve, Passing, fine_curve, passings
from lab.analysis.text import capitalized, count, first_to_last, format_p, format_value, listed
from lab.core.errors import RequestError, nearest
from lab.features.stress.reference import beside_published, published_verdicts
from lab.report.answer import Answer, Figure, OnPage, Part, Section

COLOURS = {PASSES: "#009E73", WEAK: "#E69F00", FAILS: "#D55E00"}
ENDS = {PASSES: (0.0, BETWEEN[0]), WEAK: BETWEEN, FAILS: (BETWEEN[1], 1.0)}
HEIGHT = 0.56  # of a strip, of its row


@layout.styled
def card_figure(lines: Sequence[Line], names: Sequence[str] = ()) -> Sheet:
    """A strip per test: where recipes pass, where they are weak and where they fail, with a dot for each seed.

    Each strip has a scale of its own. Seeds beyond its ends lie at the ends. Bars are 95 % intervals of the mean. A
    test that is not judged shows neither.
    """
    names = names or [f"{line.test.title}: {line.verdict}" for line in lines]
    sheet, [[axes]] = layout.facets([""], [""], panels.rows_height(names), 1, room=panels.rows_room(names))
    axes.grid(visible=False)
    for row, line in enumerate(lines):
        for zone, (left, right) in ENDS.items():
            place = ((left, row - HEIGHT / 2), right - left, HEIGHT)
            axes.add_patch(Rectangle(*place, facecolor=COLOURS[zone], alpha=0.25, linewidth=0))
        test, interval = line.test, line.interval
        if line.shown_values and interval.low <= interval.high:
            ends = [along(test, interval.low), along(test, interval.high)]
            axes.plot(ends, [row, row], color=style.INK, linewidth=1.2)
        seeds = [along(test, value) for value in line.shown_values]
        (dots,) = axes.plot(seeds, [row] * len(seeds), "o", color=style.INK, markersize=5, alpha=0.8)
        zones = "passes {}, fails {}".format(*line.edges)
        texts = [
            f"{test.title}\nseed {seed + 1} of {interval.n}\n{value:.3g} {test.unit}\n{zones}"
            for seed, value in enumerate(line.shown_values)
        ]
        panels.add_hover_texts(axes, dots, texts)
    axes.set_yticks(range(len(names)), list(map(panels.row_name, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([sum(ends) / 2 for ends in ENDS.values()], list(ENDS))
    return sheet


SENTENCES = html.macros("card.txt")  # a macro for each kind of sentence
# The keys of the JSON that hold a field as it is, with its name. An earlier card may lack some.
FIELDS = {key: key for key in ("recipe", "command", "stopped", "is_judged", "parameters", "left_out")}
FIELDS |= {"active_parameters": "active", "loss_bigram": "bigram", "sizes": "trend"}


@dataclass(frozen=True)
class Card:
    """The card of a recipe; in a notebook it displays itself.

    Attributes:
        recipe: its name for readers.
        command: the command line that makes it.
        folder: of its records.
        lines: what it says of each test, in their order.
        losses: of the recipe itself, a row per learning rate and a column per seed; empty where no test uses them.
        bigram: loss of a bigram model of the text, nats per token; NaN without losses.
        parameters: of the model.
        active: those that act on a token; fewer where the model has experts.
        is_judged: whether the recipe ends better than a bigram model at any learning rate, as far as its card tells.
        cures: what single changes do about the tests that it fails; None where none was asked for.
        left_out: by title of a test why the recipe cannot take it.
        trend: of the headroom over size, see ``SizeTrend.plain``; None without three sizes.
        stopped: that a signal stopped it before all tests had ended, in a sentence; empty if none did.
        fine: what else is known of its curve.
    """

    recipe: str
    command: str
    folder: Path
    lines: Sequence[Line]
    losses: pd.DataFrame
    bigram: float
    parameters: int
    active: int
    is_judged: bool = True
    cures: Sequence[Cure] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    trend: Mapping[str, Any] | None = None
    stopped: str = ""
    fine: FineCurve = field(default_factory=FineCurve)

    @property
    def size(self) -> str:
        """Its parameters in words: ``41.2k``, or with experts ``72.4k (35.5k active)``."""
        active = f" ({count(self.active)} active)" if self.active < self.parameters else ""
        return f"{count(self.parameters)}{active}"

    @property
    def table(self) -> pd.DataFrame:
        """A row per test."""
        rows = [
            {
                "test": line.test.title,
                "verdict": line.verdict,
                "value": line.number,
                "passes": line.edges[0],
                "fails": line.edges[1],
                "seeds": line.interval.n,
            }
            for line in self.lines
        ]
        return pd.DataFrame(rows)

    @property
    def best_loss(self) -> float:
        """Lowest loss over learning rates of the mean over seeds, nats per token; NaN without losses."""
        return float(self.losses.mean(axis=1).min()) if len(self.losses) else math.nan

    @property
    def passings(self) -> Mapping[str, Passing]:
        """Where it fails, and where its attention logits run away if they were recorded, by quantity; none unjudged."""
        found = passings(self.losses, self.fine) if self.is_judged else ()
        return {passing.quantity: passing for passing in found}

    @property
    def rate_table(self) -> pd.DataFrame:
        """A row for each of ``passings``."""
        return pd.DataFrame([passing.row for passing in self.passings.values()])

    @property
    def failing_lrs(self) -> dict[int, float]:
        """By seed the learning rate from which it ends ``FAILS_ABOVE`` above its best loss; NaN where it never does."""
        return failing_lrs(self.losses)

    @property
    def fails_from(self) -> str:
        """``from a learning rate of 0.1 to 0.12 on (in 5 of 6 seeds)``, or ``at no learning rate up to 1``."""
        known = sorted(lr for lr in self.failing_lrs.values() if lr > 0)
        if not known:
            return f"at no learning rate up to {self.losses.index[-1]:g}"
        ends = first_to_last(f"{lr:.2g}" for lr in known)
        seeds = len(self.failing_lrs)
        return f"from a learning rate of {ends} on{f' (in {len(known)} of {seeds} seeds)' * (len(known) < seeds)}"

    @property
    def cure_table(self) -> pd.DataFrame:
        """A row for each change that was tried on a test."""
        rows = [
            {
                "test": cure.test.title,
                "change": cure.change,
                "verdict": cure.verdict,
                "removes": cure.effect,
                "of the damage": cure.share,
                "p (Holm)": format_p(cure.p),
                "left": cure.what_is_left,
                "at the best LR": cure.cost_at_best,
                "seeds": f"{cure.improvement.n}{' fresh' * cure.is_confirmed}",
                "parameters": f"{cure.parameters:+,}",
                "time of a step": f"{cure.step_time or ''}",
            }
            for cure in self.cures or ()
            if not cure.reason
        ]
        return pd.DataFrame(rows)

    def cure_line(self) -> str:
        """Which changes cure which failure, and which of the tests on which changes were tried by name."""
        tried = {cure.test.name for cure in self.cures or () if not cure.reason}
        failed = [line.test for line in self.lines if line.may_fail]
        others = [
            line.test
            for line in self.lines
            if line.verdict in (WEAK, OPEN) and not line.may_fail and (line.test.cured_as or line.test.name) in tried
        ]
        if not failed and not others:
            return "There is no test that it fails or may fail, so there is nothing to cure."
        if self.cures is None:
            return "No cure was tried; --cures 10 tries ten single changes on each test that it fails or may fail."
        return " ".join([*map(self._cured, [*failed, *others]), *self._costly()])

    def _costly(self) -> Iterator[str]:
        """Yield which changes would cure a test and are not advised."""
        helping = [cure for cure in self.cures or () if cure.verdict in (CURES, IN_PART) and not cure.is_advised]
        if costly := {cure.change: f"{cure.change} ({cure.cost_at_best})" for cure in helping}:
            yield (
                f"Left out are {listed(costly.values())}, since at the best LR they lose more than {LOSES:g} nats, or "
                "end no better than a bigram model."
            )

    def _cured(self, test: StressTest) -> str:
        of_test = [cure for cure in self.cures or () if cure.test.name == (test.cured_as or test.name)]
        tried = sum(not cure.reason for cure in of_test)
        if not tried:
            why = "no change could be tried on it" if of_test else "no change is known to try on it"
            return f"{capitalized(test.title)}: {why}."
        advised = [cure for cure in of_test if cure.is_advised]
        parts = [
            f"{head} {listed(_at_a_price(cure) for cure in advised if cure.verdict == verdict)}"
            for verdict, head in ((CURES, "is cured by"), (IN_PART, "is cured in part by"), (HARMS, "is made worse by"))
            if any(cure.verdict == verdict for cure in advised)
        ]
        if test.cured_as and parts:  # its cures are measured in the unit of another test
            parts[-1] += f", as measured by {of_test[0].test.title}"
        unsure = sum(cure.verdict in (OPEN, SCREENED) for cure in of_test)
        none = f"is cured by none of the {tried} changes tried"
        none += f", of which {unsure} {'are' if unsure > 1 else 'is'} open" if unsure else ""
        if tried == 1:
            none = "stays open with the change tried" if unsure else "is not cured by the change tried"
        return f"{capitalized(test.title)} {'; '.join(parts) or none}."

    def figure(self) -> Drawing:
        """The strips of all tests."""
        return card_figure(self.lines)

    @property
    def answer(self) -> Answer:
        """Its text, its page and its JSON."""
        parts: list[Part] = [
            self.cure_line() if self.is_judged else "",
            *[Figure("card", self.figure, list(strips(self.lines)))] * bool(self.lines),
            OnPage([self.table]),
            Section("Learning rates", [self.rate_table, SENTENCES.learning_rates()] if self.passings else []),
            Section("Which single change cures it?", [*self._cures(), list(self._untried())]),
            Section("Headroom with size", [self.trend["sentences"] if self.trend and self.is_judged else []]),
            OnPage([self._beside()]),
            Section("What the numbers mean, and what they do not", [self.notes()]),
            OnPage([Section("What each test stands for", [[_failure(line.test) for line in self.lines]])]),
        ]
        made = [f"Records: {self.folder}."]
        title = f"Crash test of {self.recipe}"
        return Answer(self.headline(), parts, title=title, command=self.command, data=self.data, made=made)

    @property
    def data(self) -> dict[str, Any]:
        """Its JSON, which ``read_card`` reads."""
        best = best_lr(self.losses)
        return {
            **card_json.plain(self, FIELDS),
            "folder": str(self.folder),
            "headline": self.headline(),
            "best_lr": best,
            "fitted_best_lrs": card_json.by_seed(fitted_best_lrs(self.losses)),
            "failing_lrs": card_json.by_seed(self.failing_lrs),
            "learning_rates": {
                "passed": [passing.plain for passing in self.passings.values()],
                "loss_unigram": self.fine.unigram,
                "between": card_json.by_lr(self.fine.between),
                "attention_logits": card_json.by_lr(self.fine.logits),
            },
            "best_loss": self.best_loss,
            "losses_at_best_lr": card_json.by_seed(self.losses.T.get(best, {})),
            "curve": card_json.by_lr(self.losses),
            "tests": list(map(card_json.of_line, self.lines)),
            "not_tested": self.not_tested(),
            "cures": None if self.cures is None else list(map(card_json.of_cure, self.cures)),
        }

    def _repr_html_(self) -> str:
        """What notebooks display."""
        return self.answer._repr_html_()

    def _beside(self) -> Section:
        table = beside_published(self.recipe, self.lines)
        return Section("Beside published recipes", [table, SENTENCES.beside()] if len(table) else [])

    def _cures(self) -> Iterator[Part]:
        """Yield a table for each test, so that its title and units take no width in each row."""
        table = self.cure_table
        for test in {cure.test.title: cure.test for cure in self.cures or () if not cure.reason}.values():
            of_test = table[table["test"] == test.title].drop(columns="test")
            for column, unit in (("removes", test.unit), ("at the best LR", "nats")):
                of_test[column] = of_test[column].str.removesuffix(f" {unit}")
                of_test = of_test.rename(columns={column: f"{column}, {unit}"})
            yield from (f"On {test.title}:", of_test)

    def _untried(self) -> Iterator[str]:
        """Yield which changes were not tried, those together that have one reason on the same tests."""
        every = {cure.test.title for cure in self.cures or ()}
        tests = dict[tuple[str, str], list[str]]()  # by reason and change
        for cure in self.cures or ():
            if cure.reason:
                tests.setdefault((cure.reason, cure.change), []).append(cure.test.title)
        changes = dict[tuple[str, str], list[str]]()  # by reason and the tests
        for (reason, change), titles in tests.items():
            on = f" on {listed(titles)}" if len(titles) < len(every) else ""
            changes.setdefault((reason, on), []).append(change)
        for (reason, on), names in changes.items():
            yield f"Not tried{on}: {listed(names)}, since {reason}."

    def headline(self) -> str:
        """Which tests it fails, in which it is weak or open, which it passes, and which say nothing of it."""
        return f"{self.stopped} {self._verdicts()}".strip()

    def _verdicts(self) -> str:
        if not self.is_judged:
            lowest, highest, best = self.losses.index[0], self.losses.index[-1], best_lr(self.losses)
            lrs = {"lowest": format_value(lowest), "highest": format_value(highest), "best": format_value(best)}
            return str(SENTENCES.not_judged(**lrs, bigram=self.bigram, loss=self.best_loss))
        titles = dict[str, list[str]]()
        for line in self.lines:
            between = f" ({listed(line.between, 'or')})" if line.between else ""
            titles.setdefault(line.verdict, []).append(f"{line.test.title}{between}")
        parts = [f"{capitalized(word)}: {listed(titles.get(word, ['none']))}." for word in VERDICTS]
        if NOT_JUDGED in titles:
            parts.append(f"Not judged: {listed(titles[NOT_JUDGED])}.")
        return " ".join(parts)

    def notes(self) -> list[str]:
        """What the numbers mean, and what they do not; a sentence each."""
        notes = SENTENCES.notes(
            best=format_value(best_lr(self.losses)) if len(self.losses) else "",
            fitted=[f"{lr:.2g}" for lr in sorted(fitted_best_lrs(self.losses))],
            fails_from=self.fails_from if len(self.losses) else "",
            fails_above=FAILS_ABOVE,
            is_bound=any(line.is_bound for line in self.lines),
            is_capped=any(line.capped and line.shown_values for line in self.lines)
            or any(cure.capped for cure in self.cures or ()),
            caveats={
                line.test.title: line.caveat
                for line in self.lines
                if self.is_judged and line.caveat and line.verdict != FAILS
            },
            has_cures=any(not cure.reason for cure in self.cures or ()),
            left_out=self.left_out,
            counts_experts=bool(self.trend) and self.active < self.parameters,
            parameters=self.size,
        )
        return [*(line.test.explained for line in self.lines), *notes.splitlines()]

    def not_tested(self) -> list[str]:
        """What the card does not say, a sentence each: tests that were not run, and what no small model can tell."""
        run = {line.test.name for line in self.lines}
        others = [test.title for test in read_battery().tests.values() if test.name not in run]
        return [*([f"Not run: {listed(others)}."] if others else []), str(SENTENCES.limits(self.size))]


def _at_a_price(cure: Cure) -> str:
    """A change, what it removes and, if it helps, what it costs."""
    price = f"; costs {cure.costs}" if cure.verdict in (CURES, IN_PART) else ""
    return f"{cure.change} ({cure.effect}{price})"


def _failure(test: StressTest) -> str:
    """What fails at scale, who says so, and which recipes are known to fail the test here."""
    known = "no recipe is known to fail it here"
    if test.fails_with is not None:
        known = f"{' '.join(test.fails_with) or 'the default recipe'} fails it here"
    return f"{capitalized(test.title)}: {test.failure} ({test.source}); {known}.{published_verdicts(test.name)}"


def card_of(
    recipe: str,
    command: str,
    folder: Path,
    tests: Sequence[StressTest],
    done: Outcomes,
    battery: Battery,
    between: Outcomes = MappingProxyType({}),
) -> Card:
    """The card that these runs make; tests some of whose runs are missing are left out.

    Args:
        between: runs of the recipe itself at learning rates that no test reads.
    """
    losses, lines = curve(done), lines_of(tests, done, battery)
    tables = list(done.values())
    bigram = float(tables[0]["loss_bigram"].mean()) if len(losses) else math.nan
    parameters, active = (int(tables[0][key].iloc[0]) if tables else 0 for key in ("parameters", "active"))
    fine = fine_curve(done, between)
    return Card(recipe, command, folder, lines, losses, bigram, parameters, active, is_judged(done), fine=fine)


def read_card(folder: Path) -> Card:
    """The card that ``lab stress`` left in a folder.

    Raises:
        RequestError: there is none, it is damaged, or it has a test or a change that is unknown here.
    """
    content, tests = card_json.read(folder), dict(read_battery().tests)
    if unknown := [test["name"] for test in content.get("tests", ()) if test.get("name") not in tests]:
        raise RequestError(
            f"{folder / CARD_FILE} has a test {unknown[0]!r} that is unknown here; {nearest(unknown[0], tests)}"
        )
    try:
        for entry in content["tests"]:  # its texts and zones are those of the card
            tests[entry["name"]] = replace(tests[entry["name"]], **card_json.fields(entry, card_json.OF_TEST))
        losses = content.get("curve", {content["best_lr"]: content["losses_at_best_lr"]})  # of an earlier card
        fine, has_trend = content.get("learning_rates"), "sentences" in (content["sizes"] or {})
        return Card(
            folder=folder,
            lines=[card_json.line_of(entry, tests[entry["name"]]) for entry in content["tests"]],
            losses=card_json.from_lrs(losses),
            cures=content["cures"] and [card_json.cure_of(entry, tests[entry["test"]]) for entry in content["cures"]],
            fine=card_json.curve_of(fine) if fine else FineCurve(),
            **{**card_json.fields(content, FIELDS), "trend": content["sizes"] if has_trend else None},
        )
    except card_json.FAULTS:
        raise card_json.damaged(folder) from None
