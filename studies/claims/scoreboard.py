"""The scoreboard: every claim judged on results folders."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.analysis.rendering import html
from lab.analysis.statistics import FEWEST_SEEDS, Interval
from lab.analysis.text import capitalized, count, finite, first_to_last
from lab.core.errors import RequestError, nearest
from lab.records import store
from lab.report.answer import Answer, InText, OnPage, Part, Sorted
from studies.claims.decision import ALPHA, CONTRADICTED, DECIDED, NOT_RUN, REPRODUCED, VERDICTS
from studies.claims.evidence import Evidence, read_evidence
from studies.claims.registry import CLAIMS
from studies.claims.statistics import benjamini_hochberg
from studies.claims.verdicts import (
    CONSTANT,
    FIGURES_OF_THE_PAPER,
    LOG10,
    QUESTION,
    SOURCES,
    Claim,
    Verdict,
    amount,
    judge_claim,
    verdict_of,
)
from studies.claims.verdicts import committed as verdicts_by_claim

# Marks around the two tables in a document.
MARKS = ("<!-- claims -->", "<!-- end of claims -->")
SUBJECT_MARKS = ("<!-- claims by subject -->", "<!-- end of claims by subject -->")
EFFECT = "effect [95 % interval]"
PUBLIC_RUNS = "public runs"  # as a source of claims, besides ``SOURCES``
COLUMNS_OF_PAGE = [
    *("claim", "verdict", EFFECT, "q", "seeds", "why not", "stated in", "about"),
    *("parameters", "steps", "λT", "on other text"),
]
PROSE = ("claim", EFFECT, "why not", "stated in", "about")
# What verdicts on claims of a kind are called, and the words of claims and of questions in the order of columns.
NOT_HERE, YES, NO = "not at this size", "answered yes", "answered no"
WORD_OF_KIND = {(CONSTANT, CONTRADICTED): NOT_HERE, (QUESTION, REPRODUCED): YES, (QUESTION, CONTRADICTED): NO}
WORDS = (*VERDICTS[:3], NOT_HERE, *VERDICTS[3:])
ANSWERS = (YES, NO)
# The tails of a t distribution are not known so far out that a smaller share than this would mean anything.
LEAST_Q = 1e-4
FALSE_SHARE = 0.05  # expected share of false decisions among the decided claims that are counted as certain
# The folder, inside one of results, of sweeps trained on a corpus that every machine has; and the figures judged on it.
OTHER_TEXT, FIGURES_ON_OTHER_TEXT = "other_text", ("1", "6", "8", "9")


OF_THE_LAB = "These verdicts come with the lab; lab claims DIR judges runs of your own."


class ScoreboardRow(NamedTuple):
    """A claim and its verdict.

    Attributes:
        on_other_text: its verdict on another corpus; empty if it was not judged there.
        q: the expected share of false verdicts among all claims whose q is at most this one; NaN without a test.
    """

    claim: Claim
    verdict: Verdict
    on_other_text: str = ""
    q: float = math.nan

    @property
    def word(self) -> str:
        """What the verdict is called, given the kind of the claim."""
        return WORD_OF_KIND.get((self.claim.kind, self.verdict.verdict), self.verdict.verdict)

    @property
    def is_screening(self) -> bool:
        """Whether the claim is decided at the minimum number of seeds."""
        return self.verdict.verdict in DECIDED and self.verdict.seeds == FEWEST_SEEDS

    @property
    def said(self) -> str:
        """The word, with the size at which a constant does not hold."""
        if self.word != NOT_HERE:
            return self.word
        return f"does not hold at up to {count(self.verdict.parameters[-1])} parameters"

    @property
    def ours(self) -> bool:
        """Whether the lab restated a claim of the paper, or gave it a bound or a comparison of its own."""
        return bool(self.claim.restates) or self.claim.ours

    @property
    def figure(self) -> str:
        """The figure of the paper, marked if the claim is the lab's own version."""
        return f"{self.claim.figure} (ours)" if self.ours else self.claim.figure

    @property
    def shown(self) -> str:
        """The folder judged and the figure of its report that shows the claim; empty if none was judged."""
        return f"{Path(self.verdict.folder).name}/{self.claim.shown_in}" if self.verdict.folder else ""

    @property
    def effect(self) -> str:
        """``0.148 [0.12, 0.17]`` and the unit; if the unit is the log10 of a number, the number itself."""
        if math.isnan(self.verdict.effect):
            return ""
        unit, interval = self.claim.unit, Interval(*self.verdict[1:4])
        return f"{interval.spelled(lambda value: amount(value, unit))} {unit.removeprefix(LOG10)}".rstrip()


def read(folders: Sequence[Path]) -> list[Evidence]:
    """Read these folders and the folders directly inside them, as far as they hold records, in the order of names.

    Raises:
        RequestError: one of them is not a folder, or its records cannot be read.
    """
    for folder in folders:
        if not folder.is_dir():
            raise RequestError(f"no results folder {folder}")
    inside = [path for folder in folders for path in (folder, *sorted(folder.iterdir())) if path.is_dir()]
    records = {folder: store.find(folder) for folder in dict.fromkeys(inside)}
    return [read_evidence(folder, table) for folder, table in records.items() if table]


def read_other_text(folders: Sequence[Path]) -> list[Evidence]:
    """Read the sweeps on other text inside these folders, which ``read`` leaves out."""
    return read([path for folder in folders if (path := folder / OTHER_TEXT).is_dir()])


def judge_all(
    folders: Sequence[Evidence],
    figures: Collection[str] = (),
    other_text: Sequence[Evidence] = (),
    sweeps: Collection[str] | None = None,
) -> list[ScoreboardRow]:
    """Judge claims on these folders, and separately on ``other_text``; the first source's claims are ordered by figure.

    Args:
        figures: figures of the first source to which the claims are limited; empty for every claim of every source.
        sweeps: limits the claims to those that these sweeps test, or that answer their questions.
    """
    claims = [claim for claim in CLAIMS.values() if not figures or _is_of(claim, figures)]
    if sweeps is not None:
        claims = [claim for claim in claims if not {claim.sweep, *claim.affirms, *claim.denies}.isdisjoint(sweeps)]
    claims.sort(key=_position)
    return _rows((claim, judge_claim(claim, folders), _judge_apart(claim, other_text)) for claim in claims)


def _rows(judged: Iterable[tuple[Claim, Verdict, str]]) -> list[ScoreboardRow]:
    """The rows of claims, with their verdicts here and on other text; their q comes from the p of all of them."""
    found = list(judged)
    qs = benjamini_hochberg([verdict.p for _, verdict, _ in found])
    return [ScoreboardRow(*each, q=max(q, LEAST_Q)) for each, q in zip(found, qs, strict=True)]


def committed() -> list[ScoreboardRow]:
    """The rows of the committed results, as they were judged, of the claims whose studies are there."""
    entries = {name: entry for name, entry in verdicts_by_claim().items() if name in CLAIMS}
    return _rows((CLAIMS[name], verdict_of(entry), entry["on_other_text"]) for name, entry in entries.items())


def judged_again(
    names: Collection[str], folders: Sequence[Evidence], other_text: Sequence[Evidence]
) -> list[ScoreboardRow]:
    """The committed rows, with these claims judged on these folders, as ``judge_all`` does."""
    kept = [(row.claim, row.verdict, row.on_other_text) for row in committed() if row.claim.name not in names]
    anew = [
        (claim, judge_claim(claim, folders), _judge_apart(claim, other_text))
        for claim in map(CLAIMS.__getitem__, names)
    ]
    return _rows(sorted([*kept, *anew], key=lambda judged: _position(judged[0])))


def to_commit(rows: Sequence[ScoreboardRow]) -> str:
    """The content of ``results/verdicts.json``, from which ``committed`` makes the rows: a line for each claim."""
    lines = []
    for row in rows:
        verdict = row.verdict._replace(folder=row.verdict.folder and f"results/{Path(row.verdict.folder).name}")
        entry = {"name": row.claim.name, **verdict._asdict(), "on_other_text": row.on_other_text}
        known = {key: finite(value) for key, value in entry.items()}
        lines.append(json.dumps(known, allow_nan=False, ensure_ascii=False))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _is_of(claim: Claim, figures: Collection[str]) -> bool:
    return claim.source == SOURCES[0] and claim.figure in figures


def _position(claim: Claim) -> tuple[int, int, int, int]:
    """Key of the order of claims: by source, the first source by figure, restated claims after the originals."""
    original = CLAIMS[claim.restates] if claim.restates else claim
    figure = FIGURES_OF_THE_PAPER.index(claim.figure) if claim.source == SOURCES[0] else 0
    return SOURCES.index(claim.source), figure, original.order, claim.order


def _judge_apart(claim: Claim, other_text: Sequence[Evidence]) -> str:
    if not _is_of(claim, FIGURES_ON_OTHER_TEXT):
        return ""
    verdict = judge_claim(claim, other_text).verdict
    return "" if verdict == "not run" else verdict


def verdicts(folder: str | Path, *figures: str) -> pd.DataFrame:
    """Judge claims on a folder and those inside it.

    Args:
        figures: figures of Wortsman et al. 2023, such as ``"1"`` or ``"E.7"``; by default every claim of every source.

    Raises:
        RequestError: no such figure, no such folder, or records that cannot be read.
    """
    for figure in figures:
        if figure not in FIGURES_OF_THE_PAPER:
            raise RequestError(f"the paper has no figure {figure!r}; {nearest(figure, FIGURES_OF_THE_PAPER)}")
    return table(judge_all(read([Path(folder)]), figures))


def table(rows: Sequence[ScoreboardRow]) -> pd.DataFrame:
    """The scoreboard as a table.

    Its columns: ``source, figure, claim, verdict, effect [95 % interval], q, parameters, steps, λT, seeds, why
    not``; λT is weight decay times steps.
    """
    return pd.DataFrame(
        {
            "source": [row.claim.source for row in rows],
            "figure": [row.figure for row in rows],
            "claim": [row.claim.sentence for row in rows],
            "verdict": [row.said for row in rows],
            EFFECT: [row.effect for row in rows],
            "q": [_spell_q(row.q) for row in rows],
            "parameters": [first_to_last(map(count, row.verdict.parameters)) for row in rows],
            "steps": [first_to_last(map("{:g}".format, row.verdict.steps)) for row in rows],
            "λT": [first_to_last(map("{:g}".format, row.verdict.decay_times_steps)) for row in rows],
            "seeds": [f"{row.verdict.seeds}{' (screening)' * row.is_screening}" for row in rows],
            "why not": [row.verdict.reason for row in rows],
        }
    )


def _spell_q(q: float) -> str:
    if math.isnan(q):
        return ""
    return f"at most {LEAST_Q:g}" if q <= LEAST_Q else f"{q:.2g}" if q < 0.001 else f"{q:.3f}"


def chosen(folders: Sequence[Path], source: str = "", figure: str = "", verdict: str = "") -> list[ScoreboardRow]:
    """All claims, or one source's, figure's or verdict's, judged on folders; without folders as they are committed.

    Args:
        figure: a figure of the paper, or the section or equation of another source.

    Raises:
        RequestError: the source, figure, verdict or folder does not exist, or records cannot be read.
    """
    figures = list(dict.fromkeys(claim.figure for claim in CLAIMS.values()))
    for kind, name, known in (
        ("source", source, (*SOURCES, PUBLIC_RUNS)),
        ("figure", figure, figures),
        ("verdict", verdict, (*WORDS, *ANSWERS)),
    ):
        if name and name not in known:
            raise RequestError(f"no claims of {kind} {name!r}; {nearest(name, known)}")
    rows = judge_all(read(folders), other_text=read_other_text(folders)) if folders else committed()
    return [
        row
        for row in rows
        if source in ("", row.claim.source) and figure in ("", row.claim.figure) and verdict in ("", row.word)
    ]


def answer_of(
    every: Sequence[ScoreboardRow], *, all_of_them: bool = False, draws: bool = False, is_committed: bool = False
) -> Answer:
    """A row for each claim, with the reason if it is not reproduced; on a page everything that is known of it.

    Args:
        all_of_them: whether to show claims that are not run, too, which are only counted else.
        draws: whether to name the figures that show the claims, as far as they are drawn.
        is_committed: whether these are the verdicts that come with the lab.
    """
    rows = [row for row in every if all_of_them or row.verdict.verdict != NOT_RUN]
    first, *counts = tallies(every)
    if left_out := len(every) - len(rows):
        counts.append(f"{left_out} not run and not shown; --verdict 'not run' shows {'them' if left_out > 1 else 'it'}")
    known = table(rows)
    brief = known.drop(columns=["claim", "why not"])
    brief["claim (our figure)"] = [_sentence(row) for row in rows]
    known["stated in"] = [f"{row.claim.source}, {row.figure}" for row in rows]
    known["about"] = [row.claim.about for row in rows]
    known["on other text"] = [row.on_other_text for row in rows]
    notes = [OF_THE_LAB, f"lab claims --source '{PUBLIC_RUNS}' holds them against those."]
    parts: list[Part] = [
        OnPage([counts, Sorted(known[COLUMNS_OF_PAGE], "verdict", PROSE)]),
        InText([brief, counts, *(_drawn(rows) if draws else []), *(notes if is_committed else [])]),
    ]
    return Answer(first, parts, title="Claims of papers and their verdicts", data=[_plain(row) for row in every])


def _sentence(row: ScoreboardRow) -> str:
    """A claim, the figure that shows it, and why it is not reproduced."""
    figure, reason = row.shown and f" ({row.shown})", row.verdict.reason
    return f"{row.claim.sentence}{figure}{reason and f'; why not: {reason}'}"


def _drawn(rows: Sequence[ScoreboardRow]) -> list[str]:
    """A line for each figure that shows one of these claims, in the folder on which it was judged."""
    shown = dict.fromkeys((row.verdict.folder, row.claim.shown_in) for row in rows if row.verdict.folder)
    paths = [Path(folder) / "figures" / f"{name}.svg" for folder, name in shown]
    return [f"figure: {path}" for path in paths if path.exists()]


def tallies(rows: Sequence[ScoreboardRow]) -> Iterator[str]:
    """Yield counts of verdicts (``60 claims: 30 reproduced, ...``), of decided and restated claims, on other text."""
    claims = [row.word for row in rows if not row.ours]
    yield _tally(f"claim{'s' * (len(claims) != 1)}", claims)
    if decided := [row for row in rows if row.verdict.verdict in DECIDED]:
        certain, few = sum(row.q <= FALSE_SHARE for row in decided), sum(row.is_screening for row in decided)
        screened = f", {few} by a screening on {FEWEST_SEEDS} seeds" * (few > 0)
        yield f"{len(decided)} decided, {certain} of them with q at most {FALSE_SHARE:g}{screened}"
    if restated := [row.word for row in rows if row.ours and row.claim.kind != QUESTION]:
        yield _tally("restated or bounded by us", restated)
    if asked := [row.word for row in rows if row.claim.kind == QUESTION]:
        yield _tally(f"question{'s' * (len(asked) > 1)}", asked)
    if pairs := [(row.verdict.verdict, row.on_other_text) for row in rows if row.on_other_text]:
        agree = [here == there for here, there in pairs if here in DECIDED and there in DECIDED]
        yield (
            f"{len(pairs)} also on other text: of {len(agree)} decided on both, {sum(agree)} agree and "
            f"{len(agree) - sum(agree)} disagree"
        )


def counts_of(words: Sequence[str]) -> dict[str, int]:
    """How many verdicts are called by each word, in the order of verdicts; without words that none has."""
    return {word: words.count(word) for word in (*ANSWERS, *WORDS) if word in words}


def _tally(what: str, words: Sequence[str]) -> str:
    counts = [f"{number} {word}" for word, number in counts_of(words).items()]
    return f"{len(words)} {what}: {', '.join(counts) or 'none'}"


def _plain(row: ScoreboardRow) -> dict[str, Any]:
    """A claim for programs; ``parameters``, ``steps`` and ``decay_times_steps`` are those of the judged runs."""
    verdict = row.verdict
    return {
        "name": row.claim.name,
        "source": row.claim.source,
        "figure": row.claim.figure,
        "claim": row.claim.sentence,
        "verdict": row.word,
        "effect": verdict.effect,
        "low": verdict.low,
        "high": verdict.high,
        "n": verdict.seeds,
        "seeds": verdict.seeds,
        "interval_level": 1 - ALPHA,
        "sweep": verdict.sweep,
        "parameters": _ends(verdict.parameters),
        "steps": _ends(verdict.steps),
        "reason": verdict.reason,
        "decay_times_steps": _ends(verdict.decay_times_steps),
        "ours": row.ours,
        "p": verdict.p,
        "q": row.q,
    }


def _ends(rising: Sequence[float]) -> list[float] | None:
    return [rising[0], rising[-1]] if rising else None


def markdown_tables(rows: Sequence[ScoreboardRow]) -> str:
    """Both tables in Markdown, each between its marks: the counts by subject, then every claim."""
    return f"{markdown_by_subject(rows)}\n\n{markdown(rows)}"


def markdown_by_subject(rows: Sequence[ScoreboardRow]) -> str:
    """The first table of `results/README.md`: the number of claims with each verdict, by subject."""
    paper = [row for row in rows if not row.ours]
    words = {subject: [row.word for row in paper if row.claim.about == subject] for subject in _subjects(paper)}
    words["all"] = [row.word for row in paper]
    words["restated or bounded by us"] = [row.word for row in rows if row.ours and row.claim.kind != QUESTION]
    counts = [[subject, len(found), *map(found.count, WORDS)] for subject, found in words.items()]
    return str(html.macros("claims.md").by_subject(SUBJECT_MARKS, WORDS, counts))


def markdown(rows: Sequence[ScoreboardRow]) -> str:
    """The tables of `results/README.md`: every claim of each subject, in few columns, and counts below."""
    columns = table(rows)[["claim", "verdict", EFFECT, "q", "seeds", "steps", "parameters"]].astype(str)
    columns.insert(1, "stated in", [f"{row.claim.source}, {row.figure}" for row in rows])
    cells = columns.map(lambda cell: cell.replace("|", "&#124;")).to_numpy().tolist()
    subjects = [
        (capitalized(subject), [cells[i] for i, row in enumerate(rows) if row.claim.about == subject])
        for subject in _subjects(rows)
    ]
    return str(html.macros("claims.md").claims(MARKS, list(columns), subjects, list(tallies(rows))))


def _subjects(rows: Sequence[ScoreboardRow]) -> list[str]:
    return list(dict.fromkeys(row.claim.about for row in rows))
