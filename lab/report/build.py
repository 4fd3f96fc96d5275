"""Write the report of one or more results folders: a page, its figures and its tables; or its figures for a paper."""

from __future__ import annotations

import platform
import re
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import matplotlib
import numpy as np
import pandas as pd
from markupsafe import Markup

from lab.analysis import contrasts
from lab.analysis.changes import has_trials
from lab.analysis.contrasts import power_of_difference, tested
from lab.analysis.curves import load, switches_text
from lab.analysis.drawing.registry import MOST_ARMS, NothingToDrawError, run_counts
from lab.analysis.laws import fits, optimum
from lab.analysis.rendering import html, layout, style
from lab.analysis.runaway import read_runaways
from lab.analysis.sensitivity import WINDOW, Study, Window, has_sensitivity, study, study_of
from lab.analysis.text import LEARNING_RATE, NO_AXIS, capitalized, count, few, format_value, listed, plain_text
from lab.core import files, shelf, shipped
from lab.core.errors import RequestError, nearest
from lab.core.registry import first_line
from lab.records import store
from lab.records.imported import UNKNOWN_SIZE, is_imported, size_name
from lab.report import judged, tables
from lab.report.all_figures import FIGURES, FIRST_FIGURES
from lab.report.findings import notes, undertrained
from lab.report.replies import Reply, answer, dates, questions
from lab.report.tried import sections

NOTES: Mapping[str, str] = shipped.load(Path(__file__).with_name("page.yaml"))
FAILING = "Learning rates from which runs fail"
LARGEST_INSIDE = 2**20  # bytes of a table that the page holds as a file to save
NAMED_ARMS = 12  # with more arms, only the tables name them
MOST_PAIRS = 400  # with more, a page shows no differences of all pairs


class Report(NamedTuple):
    """A page, and its summary for an overview of many reports.

    Attributes:
        page: the file of the page.
        study: the name of the study that asks its question; empty if none does.
        question: the question of the sweep; empty without one.
        answer: the answer, in a sentence or two.
        verdicts: how many claims have each verdict on these runs; empty if no claim is about them.
        thumbnail: the file of its first figure; None without one.
    """

    page: Path
    study: str
    question: str
    answer: str
    verdicts: dict[str, int]
    thumbnail: Path | None


def summary(study: Study, difference: float | None = None, reply: Reply | None = None) -> str:
    """The table of sensitivities as plain text, or of losses if no sensitivity is defined, then the notes on it.

    The arms of an imported table are also compared; for ``difference`` see ``power_of_difference``, and ``reply`` is
    the answer to its question, if it is known already.
    """
    said = [line for part in sections(study) for line in ("", part.title, *plain_text(part.table), *part.notes)]
    if has_trials(study):
        return "\n".join([*said[1:], "", *notes(study)])
    table = tables.sensitivities_as_text(study) if has_sensitivity(study.curves) else tables.losses_as_text(study)
    named = [] if study.window == WINDOW else [f"Sensitivity over the {study.along.values} from {study.window}."]
    lines = [*plain_text(table), *named, *said]
    if is_imported(study.records) and (compared := (reply or answer(study)).contrasts) and compared[0].differences:
        beside = contrasts.table(compared).assign(**tested(compared[0]))
        lines += ["", compared[0].title(), *plain_text(beside), power_of_difference(compared[0], difference), ""]
    return "\n".join([*lines, *notes(study)])


def make_report(
    folders: Sequence[Path], window: Window = WINDOW, difference: float | None = None
) -> tuple[Report, str]:
    """Read results folders and write their report into the first; returns it and its ``summary``.

    Args:
        folders: one or more results folders.
        window: the learning rates over which sensitivity is a mean.
        difference: see ``power_of_difference``.

    Raises:
        RequestError: a folder cannot be read or written, all runs failed, or the window is invalid.
    """
    read = study(folders, window)
    reply = answer(read) if is_imported(read.records) else None
    return write_report(read, folders, "", difference, reply), summary(read, difference, reply)


def make_growing_report(folder: Path, ids: Collection[str], growth: str) -> None:
    """Write the report of these runs of a folder in which a sweep still trains; it reloads itself.

    Args:
        folder: the results folder.
        ids: the ids of the runs.
        growth: the extent of the runs in words, such as ``14 of 84 runs``.

    Raises:
        RequestError: the folder cannot be read or written, or all these runs failed.
    """
    write_report(study_of(load(folder).of(ids)), [folder], growth)


def write_report(
    study: Study,
    folders: Sequence[str | Path],
    growth: str = "",
    difference: float | None = None,
    reply: Reply | None = None,
) -> Report:
    """Write ``report.html``, ``figures/*.svg`` and ``tables/*.csv`` of a study into the first of its folders.

    The same records give the same bytes. For ``growth`` see ``make_growing_report``, for ``difference``
    ``power_of_difference``; ``reply`` is the answer to the question, if it is known already.
    """
    paths = [Path(folder) for folder in folders]
    out = paths[0]
    for name, table in tables.files(study).items():
        files.write_csv(out / "tables" / f"{name}.csv", table, within=out, float_format="%.6g")
    title = " and ".join(path.resolve().name for path in paths)
    commands = list(dict.fromkeys(command for path in paths for command in store.commands(path)))
    judgement = judged.judgement(study, out, commands)
    reply = reply or answer(study, judged.trained_sweeps(out, commands), judgement.word, judgement.text)
    question = " ".join(questions(paths)) or reply.subject
    first, *others = [*_figures(study, out), Markup()]
    body = [
        *_laws(study),
        html.paragraph(reply.text, "lead", reply.word),
        *[html.paragraph(NOTES["growing"].format(growth), "warning")] * bool(growth),
        *_partial(study),
        *_tried(study, out),
        *([] if has_trials(study) else _compared(study, reply, difference)),
        *_verdicts(judgement.verdicts),
        first,
        *_facts(study, paths, commands),
        judgement.section,
        *_tables(study, out, folded=bool(reply.contrasts)),
        *others,
        *_cautions(study),
        *_provenance(study, commands),
    ]
    files.write_text(out / "report.html", html.document(title, body, question, reloads=bool(growth)))
    thumbnail = next((path for name in first_figures() if (path := out / "figures" / f"{name}.svg").is_file()), None)
    return Report(out / "report.html", judgement.study, question, str(reply), dict(judgement.verdicts), thumbnail)


def write_index(folder: Path, reports: Sequence[Report], failures: Mapping[Path, str]) -> Path:
    """Write ``index.html``, an overview of the reports in a folder by study; returns its path.

    Args:
        failures: results folders without a report, each with the reason.
    """
    titles = {study.__name__.rpartition(".")[2]: re.split(r": | \(", first_line(study))[0] for study in shelf.studies()}
    by_study = {name: [report for report in reports if report.study == name] for name in [*titles, ""]}
    sections = [
        html.section(titles.get(name, "Others"), html.cards(_tile(report, folder) for report in group))
        for name, group in sorted(by_study.items(), key=lambda item: (item[0] == "", -len(item[1])))
        if group
    ]
    if failures:
        lines = [f"{path.name}: {reason}" for path, reason in failures.items()]
        sections.append(html.section("Folders without a report", html.bullets(lines)))
    lead = html.paragraph(f"{len(reports)} results folders by study. Each tile leads to its report.", "note")
    page = folder / "index.html"
    files.write_text(page, html.document(folder.resolve().name, [lead, *sections], "Reports", filters="cards"))
    return page


def _tile(report: Report, folder: Path) -> html.Card:
    page, thumbnail = (
        quote(path.relative_to(folder).as_posix()) if path else "" for path in (report.page, report.thumbnail)
    )
    name = report.page.parent.name
    verdicts = Markup().join(_verdicts(report.verdicts))
    return html.Card(page, report.question or name, name, report.answer, thumbnail, verdicts)


def _compared(study: Study, reply: Reply, difference: float | None) -> Iterator[Markup]:
    """Yield cautions about a sensitivity that the answer quotes, then the quantities of the question for every arm."""
    if reply.speaks_of_sensitivity and (slow := undertrained(study)):
        yield html.paragraph(slow, "warning")
    if reply.contrasts:
        first, *others = reply.contrasts
        title = "" if others else f"{first.title()}. "
        seeds = first.measure.points(study).groupby("arm")["seed"].agg(set)
        is_paired = not first.reference or any(seeds[first.reference] & seeds[arm] for arm in first.differences)
        beside = f"{NOTES['beside'] if is_paired else NOTES['apart']} " if first.reference else ""
        yield html.paragraph(f"{title}{beside}{NOTES['intervals']}", "note")
        shown = contrasts.table(reply.contrasts)
        if is_imported(study.records) and first.differences:
            column = tested(first)
            yield html.table(shown.assign(**column if any(column["p"]) else {}))
            yield html.paragraph(f"{NOTES['tests']} {power_of_difference(first, difference)}", "note")
        else:
            yield html.table(shown)


def _tried(study: Study, out: Path) -> Iterator[Markup]:
    """Yield sections of single changes and of trials, each also written as a table."""
    for part in sections(study):
        files.write_csv(out / "tables" / f"{part.name}.csv", part.numbers, within=out, float_format="%.6g")
        notes_on = [html.paragraph(note, "note") for note in part.notes]
        yield html.section(part.title, html.table(part.table, prose=("verdict",)), _csv(out, part.name), *notes_on)


def _laws(study: Study) -> Iterator[Markup]:
    """Yield the laws of the best learning rate of imported runs in which several numbers vary."""
    found = optimum.fit_laws(study.records, study.points) if is_imported(study.records) else []
    laws = [law for law in found if law.power and study.along != NO_AXIS]
    for law in laws:
        yield html.paragraph(f"{optimum.LAW.format(axis=study.along)}: {law.text}.", "lead")
    if laws:
        yield html.paragraph(fits.ABOUT["law"].format(axis=study.along), "note")


def _partial(study: Study) -> Iterator[Markup]:
    ended, expected = run_counts(study.records, study.points)
    if ended < expected:
        yield html.paragraph(f"Partial: {ended} of {expected} runs ended.", "warning")


def _verdicts(counts: Mapping[str, int]) -> Iterator[Markup]:
    if counts:
        n = sum(counts.values())
        tested = f"{n} {'claim' if n == 1 else 'claims'} of papers tested:"
        yield html.bullets([tested, *(f"{n} {verdict}" for verdict, n in counts.items())], "verdicts")


def _figures(study: Study, out: Path) -> Iterator[Markup]:
    """Yield sections of the figures that apply, each also written as a file; files of other figures are removed."""
    first, arms, drawn = first_figures(), study.points["arm"].nunique(), 0
    for name in [*filter(FIGURES.__contains__, first), *sorted(set(FIGURES) - set(first))]:
        title, file = first_line(FIGURES[name]), out / "figures" / f"{name}.svg"
        if drawn and arms > MOST_ARMS:
            files.remove(file, within=out)
            continue
        try:
            drawing = FIGURES[name](study.records, study.points, study.window)
            svg = layout.svg(drawing, name)
        except NothingToDrawError:
            files.remove(file, within=out)
            continue
        except Exception as fault:  # the page says so, and the other figures are drawn
            files.remove(file, within=out)
            shown = html.paragraph(_fault(fault), "warning")
        else:
            title = drawing.caption.split("\n")[0]
            files.write_text(file, svg, within=out)
            shown, drawn = html.figure(svg, drawing.caption, html.savers(name)), drawn + 1
        yield html.section(title.rstrip("."), shown, folded=drawn > 1)
    if arms > MOST_ARMS:
        yield html.paragraph(
            f"With {arms} arms only one figure is drawn; of a board, lab leaderboard --html draws each arm."
        )


def _fault(fault: Exception) -> str:
    """What a refusal says; of any other exception also its type, and the line that raised it."""
    if isinstance(fault, RequestError):
        return str(fault)
    place = traceback.extract_tb(fault.__traceback__)[-1]
    kind = f"{type(fault).__name__}: {fault}".removesuffix(": ")
    return f"This figure could not be drawn: {kind} ({Path(place.filename).name}, line {place.lineno})."


def first_figures() -> list[str]:
    """Names of the figures that come first on the page, in this order; the others follow by name."""
    return [name for study in shelf.studies() for name in getattr(study, "FIRST_FIGURES", ())] + list(FIRST_FIGURES)


def _facts(study: Study, folders: Sequence[Path], commands: Sequence[str]) -> Iterator[Markup]:
    """Yield facts about these runs: dates, command, data, versions and extent."""
    runs = study.records.runs
    command = f"{commands[0]}{f' (and {len(commands) - 1} more)' if len(commands) > 1 else ''}" if commands else ""
    data = [str(name) for name in runs["data.name"].dropna().unique()] if "data.name" in runs else []
    versions = sorted(map(str, runs["versions"].dropna().unique()))
    facts = [dates(folders), command, f"data: {listed(data)}" if data else "", "; ".join(versions)]
    yield html.paragraph(" · ".join(fact for fact in facts if fact), "facts")
    yield html.paragraph(_extent(study), "facts")


def _extent(study: Study) -> str:
    points, runs = study.points, study.records.runs
    arms = list(points["arm"].unique())
    shared = set.intersection(*(set(str(names).split("+")) for names in runs["intervention"])) - {"none"}
    has_sizes = set(points["size"]) != {UNKNOWN_SIZE}
    return str(
        html.macros("extent.txt").extent(
            runs=len(runs),
            statuses={name: int((runs["status"] == name).sum()) for name in store.STATUSES},
            arms=len(arms),
            names=arms if len(arms) <= NAMED_ARMS else [],
            common=switches_text(sorted(shared), ()) if shared else "",
            size_name=size_name(study.records),
            sizes=few(map(count, sorted(points["size"].unique()))) if has_sizes else [],
            axis=study.along,
            lrs=list(map(format_value, sorted(points["lr"].unique()))) if study.along != NO_AXIS else [],
            seeds=points["seed"].nunique(),
            steps=few(map(format_value, sorted(set(map(float, runs["steps"]))))) if "steps" in runs else [],
            window="" if study.window == WINDOW else study.window,
        )
    )


def _tables(study: Study, out: Path, *, folded: bool) -> Iterator[Markup]:
    """Yield sections of tables; all but the first are folded, and that one if it should be."""
    if has_sensitivity(study.curves):
        sensitivities = html.table(tables.sensitivities_as_text(study))
        by_seed = _csv(out, "sensitivity", "sensitivity_by_seed", "optima_by_seed")
        about = NOTES["sensitivity"].format(axis=study.along, window=study.window)
        title = "Learning-rate sensitivity" if study.along == LEARNING_RATE else capitalized(study.along.sensitivity)
        yield html.section(title, sensitivities, by_seed, html.paragraph(about, "note"), folded=folded)
        folded = True
        if len(study.pairs):
            many = f"{len(study.pairs):,} differences are more than a page shows; all are in the file."
            is_short = len(study.pairs) <= MOST_PAIRS
            shown = html.table(tables.differences_as_text(study)) if is_short else html.paragraph(many)
            parts = shown, _csv(out, "differences"), html.paragraph(NOTES["differences"], "note")
            yield html.section("Differences between arms, paired by seed", *parts, folded=True)
    if len(failing := tables.failing_rates(study)):
        levels = "; ".join(f"{each.title} {each.level:g} ({each.means})" for each in read_runaways().values())
        about = html.paragraph(NOTES["failing"].format(levels=levels), "note")
        parts = html.table(failing), _csv(out, "crossings_by_seed"), about
        yield html.section(FAILING, *parts, folded=folded)
    yield from _optima(study)
    title, about = "Final loss", NOTES["losses"]
    if study.along != NO_AXIS:
        title, about = f"{title} by {study.along.name}", f"{about} {NOTES['unstable'].format(axis=study.along)}"
    parts = html.table(tables.losses_as_text(study)), _csv(out, "losses"), html.paragraph(about, "note")
    yield html.section(title, *parts, folded=folded)
    lost = tables.lost(study)
    if len(lost):
        yield html.section("Runs that failed or diverged", html.table(lost), folded=True)


def _optima(study: Study) -> Iterator[Markup]:
    """Yield a section that says whether the best learning rate of imported runs transfers."""
    if not is_imported(study.records) or study.along == NO_AXIS:
        return
    if len(table := optimum.transfer_table(study.points, study.along)):
        about = html.paragraph(fits.ABOUT["transfer"].format(axis=study.along), "note")
        yield html.section(optimum.TRANSFER.format(axis=study.along), html.table(table), about, folded=True)


def _csv(out: Path, *names: str) -> Markup:
    """Links that save these tables, whose text the page holds, so that it can be sent alone; none for large ones."""
    paths = {f"{name}.csv": out / "tables" / f"{name}.csv" for name in names}
    small = {name: path for name, path in paths.items() if path.stat().st_size <= LARGEST_INSIDE}
    return html.downloads({name: files.read_text(path) for name, path in small.items()})


def _cautions(study: Study) -> Iterator[Markup]:
    of_studies = (module.cautions(study) for module in shelf.modules("answer") if hasattr(module, "cautions"))
    cautions = [*chain(*of_studies), *notes(study)]
    if cautions:
        yield html.section("Read with care", html.bullets(cautions), folded=True)


def _provenance(study: Study, commands: Sequence[str]) -> Iterator[Markup]:
    """Yield sections with everything that is needed to make the page again."""
    runs = study.records.runs
    facts = {name: sorted(runs[name].dropna().unique()) for name in ("versions", "data_fingerprint", "data_notes")}
    lines = [f"{name.replace('_', ' ')}: {'; '.join(values)}" for name, values in facts.items() if any(values)]
    libraries = {"Python": platform.python_version(), "matplotlib": matplotlib.__version__}
    libraries |= {"numpy": np.__version__, "pandas": pd.__version__}
    lines += [f"page made with {', '.join(f'{name} {version}' for name, version in libraries.items())}"]
    settings = "\n".join(f"{key} = {value}" for key, value in tables.shared_settings(study).items())
    command = html.block("\n".join(commands) or "no command on record")
    yield html.section("Settings in which arms and sizes differ", html.table(tables.arms(study)), folded=True)
    yield html.section("How this was made", command, html.bullets(lines), folded=True)
    yield html.section("Settings that all runs share", html.block(settings), folded=True)


FORMATS = ("pdf", "png")
TEXT_SIZE = 8.0  # points
COLUMN = "3.25"  # inches, the width of a column in most proceedings
NARROWEST, WIDEST = 2.0, 20.0


def paper_of(format_name: str, width: str | None = None) -> style.Page:
    """The page of a paper, by the format and the width (inches) of figures from the command line.

    Raises:
        RequestError: the format is unknown, or the width is not a number of inches from 2 to 20.
    """
    if format_name not in FORMATS:
        raise RequestError(f"unknown format {format_name!r}; {nearest(format_name, FORMATS)}")
    try:
        inches = float(width or COLUMN)
    except ValueError:
        inches = 0.0
    if not NARROWEST <= inches <= WIDEST:
        raise RequestError(f"--width must be a number of inches from {NARROWEST:g} to {WIDEST:g}, not {width!r}")
    return style.Page(inches, TEXT_SIZE)


def write_figures(study: Study, folder: Path, format_name: str, page: style.Page) -> Iterator[Path]:
    """Write every figure that applies to a study as ``figures/NAME.pdf`` or ``.png`` in a folder; yield the paths."""
    for name in FIGURES:
        path = folder / "figures" / f"{name}.{format_name}"
        with style.drawn_for(page):
            try:
                drawing = FIGURES[name](study.records, study.points, study.window)
            except NothingToDrawError:
                files.remove(path, within=folder)
                continue
            layout.save(drawing, path, within=folder)
        yield path
