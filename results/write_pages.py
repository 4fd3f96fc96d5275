"""Write the verdicts on all claims, and what pages quote of them and of the board: ``make results-readme``.

``python results/write_pages.py`` judges the committed records, and writes ``verdicts.json``, the tables in the README
of the results, and quoted effects, shares and boards wherever a page marks them. With ``--check`` it writes nothing,
names the pages that differ, and ends with exit code 1 if there are any. With names of claims it judges these alone, on
the folders of their sweeps, and writes what quotes claims, in seconds.
"""

import re
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd

import paper_pairs
import public_limits
import runaway
import score_recorder
import transfer
from lab.analysis.statistics import Spread, student_t
from lab.analysis.stress.battery import SPREADS, Battery, read_battery
from lab.analysis.stress.lines import strips
from lab.analysis.stress.measures import Outcomes
from lab.analysis.text import markdown_table
from lab.core import files, shipped
from lab.features.predict.limits import FILE as LIMITS
from lab.features.predict.numbers import answer_of, base_rate, text_of
from lab.features.predict.numbers import published_runs as known_runs
from lab.features.predict.numbers import rows as rows_of_risks
from lab.features.stress.card import card_of
from lab.features.stress.reference import FILE as REFERENCE
from lab.features.stress.reference import outcomes_by_recipe, published_outcomes
from lab.features.stress.sizes import SCORES
from lab.records import store
from measure_limits import limits_text
from score_crash_test import (
    agreement_markdown,
    agreements,
    by_width,
    coverage,
    first_looks,
    first_looks_text,
    order_markdown,
    order_over_size,
    recipes_markdown,
    reference_spreads,
    reference_table,
    score_records,
)
from studies.board.matrix import read_matrix
from studies.board.page import answer_of as board_answer
from studies.board.public_runs import FILE as BROKEN_PUBLIC_RUNS
from studies.board.text import as_csv as board_csv
from studies.board.text import headline
from studies.claims import public_table, scoreboard
from studies.claims.costs import BEFORE, HELD_OUT, first_onsets
from studies.claims.public_claims import effect_text
from studies.claims.registry import BY_STUDY, CLAIMS, study_of
from studies.claims.scoreboard import ScoreboardRow
from studies.claims.verdicts import effects_of
from studies.real_runs.curves import broken_by_arm
from studies.real_runs.effects import STEP
from studies.spikes.own_spikes import changes, removable

RESULTS = Path(__file__).parent
HOME = RESULTS.parent
RECORDER = HOME / "docs" / "record_your_run.md"
VERDICTS, README = RESULTS / "verdicts.json", RESULTS / "README.md"
# The tables of `lab claims --markdown` in the README of the results.
TABLES = (scoreboard.SUBJECT_MARKS, scoreboard.MARKS)
# Pages that quote claims or the board.
QUOTING = (
    *("docs/findings.md", "docs/before_you_launch.md", "docs/low_precision.md", "docs/my_run_has_spiked.md"),
    *("docs/crash_test.md", "docs/experts.md", "docs/held_to_real_runs.md"),
    "docs/which_batch_size.md",
    *(f"studies/{study}/README.md" for study in BY_STUDY),
)
# What stands between these marks is written anew; the name of a claim stands in the mark.
EFFECT = re.compile(r"(<!-- effect of (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
SHARE = re.compile(r"(<!-- share of (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
TALLY = re.compile(r"(<!-- tally -->)(.*?)(<!-- end -->)", re.DOTALL)
OF_STUDY = re.compile(r"(<!-- tally of (\w+) -->)(.*?)(<!-- end -->)", re.DOTALL)
SWEEPS = re.compile(r"(<!-- sweeps of (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BOARD = re.compile(r"(<!-- board -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TRANSFER = re.compile(r"(<!-- transfer -->)(.*?)(<!-- end -->)", re.DOTALL)
RECIPES = re.compile(r"(<!-- published recipes -->\n)(.*?)(<!-- end -->)", re.DOTALL)
AGREEMENT = re.compile(r"(<!-- agreement with what was published -->\n)(.*?)(<!-- end -->)", re.DOTALL)
FIRST_LOOKS = re.compile(r"(<!-- first looks -->)(.*?)(<!-- end -->)", re.DOTALL)
ORDER = re.compile(r"(<!-- order over size -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PAIRS = re.compile(r"(<!-- pairs of one paper -->\n)(.*?)(<!-- end -->)", re.DOTALL)
BY_RATE = re.compile(r"(<!-- pairs by (failing rate|the standard fix) -->)(.*?)(<!-- end -->)", re.DOTALL)
BESIDE = re.compile(r"(<!-- pairs beside the standard fix -->\n)(.*?)(<!-- end -->)", re.DOTALL)
ON_LADDERS = re.compile(r"(<!-- pairs on fine ladders -->\n)(.*?)(<!-- end -->)", re.DOTALL)
COVERAGE = re.compile(r"(<!-- coverage -->)(.*?)(<!-- end -->)", re.DOTALL)
PUBLIC_RUNS = re.compile(r"(<!-- public runs -->\n)(.*?)(<!-- end -->)", re.DOTALL)
LEFT_OUT = re.compile(r"(<!-- left out -->\n)(.*?)(<!-- end -->)", re.DOTALL)
NUMBERS = re.compile(r"-?[\d.e-]+ \[-?[\d.e-]+, -?[\d.e-]+\]")  # an effect and its interval


def between(text: str, marks: tuple[str, str]) -> str:
    """The part of a text from the first mark to the second."""
    return text[text.index(marks[0]) : text.index(marks[1]) + len(marks[1])]


def quotable(rows: Sequence[ScoreboardRow]) -> dict[str, str]:
    """``0.148 [0.12, 0.17]`` of each claim that has an effect, by its name; a screening is called so."""
    found = {row.claim.name: (NUMBERS.match(row.effect), row.is_screening) for row in rows}
    return {name: numbers[0] + " (screening)" * few for name, (numbers, few) in found.items() if numbers}


@cache
def share_of(name: str) -> str:
    """``70 of 71 (92 to 100 %)``, of a claim on the share of hits in the trials of its sweep."""
    claim = CLAIMS[name]
    _, effects = effects_of(claim, scoreboard.read([RESULTS / claim.sweep]))
    (interval,) = effects.intervals()
    hits = ((effects.table + effects.minus) * effects.trials).sum()
    low, high = (100 * (end + effects.minus) for end in (interval.low, interval.high))
    return f"{hits:.0f} of {effects.trials.sum():.0f} ({low:.0f} to {high:.0f} %)"


def quote(text: str, effects: Mapping[str, str], tally: str) -> str:
    """The text of a page with the effects of claims and the tally of verdicts where it marks them.

    Raises:
        KeyError: a claim has no effect.
    """
    text = EFFECT.sub(lambda found: f"{found[1]}{effects[found[2]]}{found[4]}", text)
    return TALLY.sub(lambda found: f"{found[1]}{tally}{found[3]}", text)


def quote_shares(text: str) -> str:
    """The text of a page with the shares of hits of some claims where it marks them."""
    return SHARE.sub(lambda found: f"{found[1]}{share_of(found[2])}{found[4]}", text)


def quote_public_runs(text: str) -> str:
    """The text of a page with the claims on public runs, and how well they are foretold, where it marks them."""
    text = PUBLIC_RUNS.sub(lambda found: f"{found[1]}{_public_tables()[0]}\n{found[3]}", text)
    return LEFT_OUT.sub(lambda found: f"{found[1]}{_public_tables()[1]}\n{found[3]}", text)


def quote_study(text: str, rows: Sequence[ScoreboardRow]) -> str:
    """The text of a page with the verdicts on the claims of a study, and with its sweeps, where it marks them."""
    words = {row.claim.name: row.word for row in rows}
    text = OF_STUDY.sub(lambda found: f"{found[1]}{_tally(found[2], words)}{found[4]}", text)
    return SWEEPS.sub(lambda found: f"{found[1]}{_sweeps(found[2])}\n{found[4]}", text)


def _tally(study: str, words: Mapping[str, str]) -> str:
    """``14 claims: 5 reproduced, 9 inconclusive``, of a study, given the word of every claim."""
    counts = scoreboard.counts_of([words[claim.name] for claim in BY_STUDY[study]])
    return f"{len(BY_STUDY[study])} claims: {', '.join(f'{count} {word}' for word, count in counts.items())}"


def _sweeps(study: str) -> str:
    """The sweeps of a study and what they cost, as a table in Markdown."""
    _, _, folders = README.read_text(encoding="utf-8").partition("## What the folders hold")
    cells = [line.strip("| ").split(" | ") for line in folders.partition("\n## ")[0].splitlines() if "|" in line]
    of_study = [(row[0], row[1], int(row[-2]), int(row[-1])) for row in cells if study_of(row[0]) == study]
    table = pd.DataFrame(of_study, columns=["sweep", "question", "runs", "core-minutes"])
    return markdown_table(
        pd.concat([table, pd.DataFrame([table.sum(numeric_only=True)]).assign(sweep="all", question="")])
    )


@cache
def _public_tables() -> tuple[str, str]:
    """Claims on public runs, and how well their failing rates are foretold, as tables in Markdown."""
    rows = public_table.judge_all()
    scores = public_limits.held_out()
    shares = ["inside", "costly among clear", "best among beyond"]
    shown = scores.round(3).astype({"curves": int})
    shown[shares] = (100 * shown[shares]).round().astype(int).astype(str) + " %"
    return f"{markdown_table(public_table.table(rows))}\n\n{public_table.tally(rows)}", markdown_table(shown)


def public_effects() -> dict[str, str]:
    """``0.476 [0.264, 0.687]`` of each claim on public runs, by its name, of the law's exponents, and its errors."""
    found = {row.claim.name: effect_text(*row.decision.shown[:3]) for row in public_table.judge_all()}
    law = public_limits.law_of(public_limits.curves_of_sources(public_limits.ADAMW), public_limits.LAW)
    found |= {f"law_{name}": effect_text(*law.exponent(name)[:3]) for name in public_limits.LAW}
    sizes = public_limits.curves_of_sources(public_limits.ADAMW).groupby(["source", "params"])[["params", "tokens"]]
    logs = np.log10(sizes.mean())
    found["law_correlation"] = f"{logs['params'].corr(logs['tokens']):.2f}"
    found["law_n"] = str(law.exponent(public_limits.LAW[0]).n)
    for source, name in {"the lab": "way_of_the_lab", "Step Law": "way_of_public_runs"}.items():
        found[name] = effect_text(*public_limits.way_fallen(source)[:3])
    found["diverged_loss"] = f"{public_limits.diverged_loss():.2f}"
    for name, ends in public_limits.allowed().items():
        found[f"allowed_{name.replace(' ', '_')}"] = "{:+.2f} to {:+.2f}".format(*ends)
    curves = public_limits.curves_of_sources({"the lab": ["adamw"]})
    steps = np.log10(curves["failing_lr"] / curves["edge_lr"]) / STEP
    found["rise_of_the_lab"] = effect_text(*student_t((curves["failing_loss"] - curves["edge_loss"]) / steps)[:3])
    for (width, steps_n), rate in public_limits.costly_rates().stack().items():
        found[f"costly_at_{width}_{steps_n}"] = f"{rate:.3f}"
    return found


def spike_effects() -> dict[str, str]:
    """What qualifies claims on spikes: how much lower large batches start, and for how long a spike does not return."""
    planted = store.read(RESULTS / "adam_theory")
    losses = planted.metrics[planted.metrics["probe"] == HELD_OUT].sort_values("step").astype({"id": str})
    before = losses[(losses["step"] > 0) & (losses["step"] <= losses["id"].map(first_onsets(planted)))]
    usual = before.groupby("id")["value"].agg(lambda values: values.iloc[-BEFORE:].median())
    runs = planted.runs[planted.runs["optimizer.eps"] == planted.runs["optimizer.eps"].min()]  # the usual one
    batches = np.log10(runs.set_index("id")["batch_size"])
    found = {"base_falls_with_batch": f"{-np.polyfit(batches, usual.reindex(batches.index), 1)[0]:.2f}"}
    causes = store.read(RESULTS / "spike_causes")
    halved = changes(causes)[lambda table: table["change"] == "lr"]
    for updates in (20, 100):
        found[f"quiet_{updates}"] = f"{(halved['wait'] > halved['back'] + updates).sum()} of {len(halved)}"
        found[f"quiet_by_chance_{updates}"] = f"{100 * removable(causes, updates):.0f} %"
    return found


@cache
def board_line() -> str:
    """What the board advises."""
    return f"**{headline(read_matrix(RESULTS / 'board'))}**\n"


@cache
def predictions() -> list[transfer.Prediction]:
    """What the board says of published orderings."""
    return transfer.predict(RESULTS / "board", transfer.published())


def quote_board(text: str) -> str:
    """The text of a page with what the board advises and how well it predicts, where the page marks them."""
    if not (RESULTS / "board").is_dir():  # not trained yet
        return text
    text = BOARD.sub(lambda found: f"{found[1]}{board_line()}{found[3]}", text)
    return TRANSFER.sub(lambda found: f"{found[1]}{transfer.headline(predictions())}{found[3]}", text)


@cache
def crash_test() -> tuple[Battery, dict[str, Outcomes]]:
    """The crash test with the spreads of the reference records, and these records by recipe."""
    battery = read_battery()
    by_recipe = outcomes_by_recipe(store.read(RESULTS / "stress" / "recipes"), battery)
    spreads = reference_spreads(by_recipe, battery)
    tests = {name: replace(test, spread=spreads.get(name, Spread())) for name, test in battery.tests.items()}
    return battery._replace(tests=tests), by_recipe


def reference_files() -> Iterator[tuple[Path, str]]:
    """What the crash test reads of its reference records: spreads over seeds, and the numbers of each recipe."""
    battery, by_recipe = crash_test()
    spreads = {name: test.spread for name, test in battery.tests.items() if test.spread.freedom}
    lines = [f"{name}: {{sd: {spread.sd:.4g}, freedom: {spread.freedom}}}" for name, spread in spreads.items()]
    yield SPREADS, "\n".join(["# Written by `make results-readme` from results/stress/recipes.", *lines, ""])
    yield RESULTS / "stress" / "cards.md", "\n".join(recipe_cards())
    yield LIMITS, limits_text()
    yield SCORES, score_records(RESULTS).to_csv(index=False, float_format="%.4g", lineterminator="\n")
    yield RESULTS / "published_runs.md", "\n".join(published_runs())
    yield REFERENCE, reference_table(by_recipe, battery).to_csv(index=False, float_format="%.4g", lineterminator="\n")


PUBLISHED_RUNS = """# Published runs by their numbers

Do the limits of `lab predict --params` know which large runs became unstable? They do not, as the last column shows, so
numbers within the limits permit nothing. The table has what the limits say of published runs, and what was published of
each. Nothing was fitted to these runs, since the limits rest on public runs of up to 537 million parameters. Each run
is left out of those that may contradict it. What a finding means, and what no small model can tell, is on the page
[Your numbers](../docs/your_numbers.md). `make results-readme` writes this page.
"""


def published_runs() -> Iterator[str]:
    """Yield the page of published runs by their numbers, in Markdown."""
    yield PUBLISHED_RUNS
    yield f"{base_rate(known_runs())}\n"
    rows = [
        {
            "run": run.name,
            "learning rate": row.yours.removeprefix("lr="),
            "limit at its size": row.limit_text,
            "factors of two to it": row.factors_text,
            "finding": row.verdict,
            "was": f"{run.outcome}: {run.published}",
        }
        for run in known_runs()
        for row in rows_of_risks(run.numbers)
        if row.risk.number == "lr" and row.risk.limit.startswith("failing_lr")
    ]
    yield markdown_table(pd.DataFrame(rows)) + "\n"
    for run in known_runs():
        answer = answer_of(run.numbers, "", [other for other in known_runs() if other is not run])
        size, *others = (f"{key}={text_of(value)}" for key, value in run.numbers.items())
        yield f"## {run.name}\n"
        yield f"```sh\nlab predict --params {size.removeprefix('params=')} {' '.join(others)}\n```\n"
        yield f"- Numbers: {run.about} ({run.source}).\n- Published, {run.outcome}: {run.published}."
        yield f"- The lab, without this run: {answer.headline}\n"
        yield markdown_table(answer.table) + "\n"


CARDS = """# The cards of the published recipes

What can each published recipe not stand, when it trains a tiny model? This page has a card of five minutes for each,
trained with the seeds 10 to 15, and 10 to 33 where MXFP8 is judged. A strip is drawn in zones: passes (`.`), weak
(`:`) and fails (`#`), with a mark for each seed, or the number of seeds that share a place. What the tests mean, and
what they do not, is on the page [Crash test](../../docs/crash_test.md). `lab stress recipe=NAME` makes a card anew,
with figures. `make results-readme` writes this page from the records in `recipes`.
"""


def recipe_cards() -> Iterator[str]:
    """Yield the card of each published recipe, in Markdown."""
    battery, by_recipe = crash_test()
    yield CARDS
    for recipe, done in by_recipe.items():
        made = card_of(recipe, f"lab stress recipe={recipe}", RESULTS, battery.on_cards, done, battery)
        path = shipped.data_folder("conf") / "recipe" / f"{recipe}.yaml"
        told = shipped.load(path)["recipe"]
        facts = {"Size": "size", "Source": "source", "Published": "published", "Differs here": "missing"}
        yield f"## {recipe}\n"
        yield f"{shipped.comment_of(path.read_text(encoding='utf-8'))}\n"
        yield "\n".join(
            f"- {title}: {' '.join(str(told[key]).split())}" for title, key in facts.items() if told.get(key)
        )
        yield "\n".join(["", "```text", made.headline(), "", *strips(made.lines), "```", ""])


def quote_crash_test(text: str) -> str:
    """The text of a page with the published recipes under the crash test, where it marks them."""
    text = RECIPES.sub(lambda found: f"{found[1]}{_crash_test_tables()[0]}{found[3]}", text)
    text = AGREEMENT.sub(lambda found: f"{found[1]}{_crash_test_tables()[1]}{found[3]}", text)
    text = ORDER.sub(lambda found: f"{found[1]}{_order_over_size()}\n{found[3]}", text)
    text = PAIRS.sub(lambda found: f"{found[1]}{_pairs_of_one_paper()}\n{found[3]}", text)
    text = BY_RATE.sub(lambda found: f"{found[1]}{_ordered_by(found[2])}{found[4]}", text)
    text = BESIDE.sub(lambda found: f"{found[1]}{_wrapped(paper_pairs.remark(_pairs()))}\n{found[3]}", text)
    text = ON_LADDERS.sub(lambda found: f"{found[1]}{_wrapped(paper_pairs.verdict(_pairs()))}\n{found[3]}", text)
    text = FIRST_LOOKS.sub(lambda found: f"{found[1]}{_first_looks()}{found[3]}", text)
    return COVERAGE.sub(lambda found: f"{found[1]}{_coverage()}{found[3]}", text)


@cache
def _crash_test_tables() -> tuple[str, str]:
    """The published recipes, and how well their numbers agree with what was published, as tables in Markdown."""
    battery, by_recipe = crash_test()
    table, published = reference_table(by_recipe, battery), published_outcomes()
    return recipes_markdown(table, published, battery), agreement_markdown(agreements(table, published, battery))


@cache
def _order_over_size() -> str:
    """Whether the published recipes keep their order over widths, as a table in Markdown."""
    battery, by_recipe = crash_test()
    by_size = by_width(store.read(RESULTS / "stress" / "sizes"), battery)
    ran = {recipe for of_width in by_size.values() for recipe in of_width}
    by_size[32] = {recipe: done for recipe, done in by_recipe.items() if recipe in ran}
    return order_markdown(order_over_size(by_size, battery), battery)


@cache
def _pairs() -> pd.DataFrame:
    """The numbers of pairs of runs of one paper."""
    battery, _ = crash_test()
    return paper_pairs.measured(battery)


def _pairs_of_one_paper() -> str:
    """How many pairs of runs of one paper each number orders rightly, as a table in Markdown."""
    battery, _ = crash_test()
    return paper_pairs.markdown(_pairs(), battery)


def _ordered_by(name: str) -> str:
    """``43.5 of 54 pairs``, by the failing rate or by the standard fix."""
    number = paper_pairs.FAILING if name == "failing rate" else paper_pairs.UNFIXED
    score = paper_pairs.ordered(_pairs()).set_index("number").loc[number]
    return f"{score['right']:g} of {score['pairs']:g} pairs"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 120))


@cache
def _first_looks() -> str:
    """How well cards of one minute agree with those of five, over the published recipes."""
    battery, by_recipe = crash_test()
    return _wrapped(first_looks_text(first_looks(by_recipe, battery)))


@cache
def _coverage() -> str:
    """``92 to 96 %``, over the tests and over three and six seeds."""
    battery, by_recipe = crash_test()
    shares = [share for seeds in (3, 6) for share in coverage(by_recipe, battery, seeds).values()]
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def pages_of_claims(rows: Sequence[ScoreboardRow], quoted: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    """The file of verdicts and each page that quotes claims, as each should be, given what else they quote."""
    yield VERDICTS, scoreboard.to_commit(rows)
    text, tables = README.read_text(encoding="utf-8"), scoreboard.markdown_tables(rows)
    for marks in TABLES:
        text = text.replace(between(text, marks), between(tables, marks))
    above = {"gradients_above_epsilon": quotable(rows)["gradients_reach_epsilon"]}
    effects, tally = {**quoted, **quotable(rows), **above}, next(scoreboard.tallies(rows))
    yield README, quote(text, effects, tally)
    for page in QUOTING:
        yield HOME / page, quote_study(quote((HOME / page).read_text(encoding="utf-8"), effects, tally), rows)


def pages(rows: Sequence[ScoreboardRow]) -> Iterator[tuple[Path, str]]:
    """Each file that is written from committed records, with the text that it should have."""
    quoted = public_effects() | spike_effects() | runaway.quoted()
    for page, text in pages_of_claims(rows, quoted):
        yield page, quote_public_runs(quote_crash_test(quote_board(quote_shares(text))))
    yield RECORDER, score_recorder.quote(RECORDER.read_text(encoding="utf-8"))
    yield RESULTS / "published_orderings.csv", files.csv_text(transfer.table(predictions()))
    matrix = read_matrix(RESULTS / "board")
    yield RESULTS / "board.txt", f"{board_answer(matrix).text()}\n"
    yield RESULTS / "board.csv", f"{board_csv(matrix)}\n"
    yield BROKEN_PUBLIC_RUNS, files.csv_text(broken_by_arm())
    yield from reference_files()


def main(*options: str) -> int:
    """Write the pages and the verdicts, or with ``--check`` name the pages that differ; returns the exit code."""
    if names := [name for name in options if name in CLAIMS]:
        sweeps = {CLAIMS[name].sweep for name in names}
        rows = scoreboard.judged_again(names, *(scoreboard.read(of) for of in _folders(sweeps)))
        marks = (mark for page in QUOTING for mark in EFFECT.finditer((HOME / page).read_text(encoding="utf-8")))
        written = pages_of_claims(rows, {mark[2]: mark[3] for mark in marks})
    else:
        folders, other_text = scoreboard.read([RESULTS]), scoreboard.read_other_text([RESULTS])
        written = pages(scoreboard.judge_all(folders, other_text=other_text))
    stale = [(path, text) for path, text in written if not path.exists() or path.read_text(encoding="utf-8") != text]
    if options == ("--check",):
        for path, _ in stale:
            print(f"{path.relative_to(HOME)} differs from the committed results; make results-readme writes it")
        return int(bool(stale))
    for path, text in stale:
        path.write_text(text, encoding="utf-8")
    return 0


def _folders(sweeps: Collection[str]) -> Iterator[list[Path]]:
    """The folders of these sweeps among the results, and among those on other text."""
    for home in (RESULTS, RESULTS / scoreboard.OTHER_TEXT):
        yield [home / sweep for sweep in sorted(sweeps) if (home / sweep).is_dir()]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
