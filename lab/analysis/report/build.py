"""Write the report of one or more results folders: a page, its figures and its tables."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd

from lab.analysis.figures import FIGURES
from lab.analysis.figures.registry import NothingToDrawError
from lab.analysis.rendering import html, layout
from lab.analysis.report import tables
from lab.analysis.report.findings import headline, notes
from lab.analysis.sensitivity import Study
from lab.analysis.text import count, listed, plain_text, spell
from lab.core import files
from lab.core.errors import RequestError
from lab.core.registry import first_line
from lab.records import store

SENSITIVITY = """Sensitivity is the mean, over the learning rates from 3e-4 to 3e-1, of how much worse than the best one
a learning rate ends (nats/token; Wortsman et al. 2023, arXiv:2309.14322, sec. 2.2). Its two parts add up to it:
learning rates below the best one were too slow for the steps given (under-training), those above it too fast
(instability). ± is a 95 % Student-t interval over n seeds; below three seeds the values are shown. eta_div is the
smallest learning rate at which a run diverged or, above its best learning rate, ended worse than a bigram model."""
PAIRED = "Differences are paired by seed, in nats/token; ± is a 95 % Student-t interval over n seeds."
DIFFERENCES = """The first arm's number minus the second arm's, taken seed by seed: the same seed means the same order
of the data and the same initial values of the weights both arms have. An interval that leaves out zero is a
difference; intervals are not widened for the number of comparisons."""
LOSSES = """Mean over seeds of the final held-out loss, nats/token, at most that at initialization. * some seed was
unstable: above its best learning rate, and worse than a bigram model. † some seed diverged: no number any more, or no
lower than at initialization."""

# Figures that come first on the page, in this order; the others follow by name.
FIRST = ("learning_rate_sensitivity", "best_loss_with_size", "loss_against_setting", "loss_over_steps")


def summary(study: Study) -> str:
    """The table of sensitivities as plain text, then the notes on it."""
    return "\n".join([*plain_text(tables.sensitivities(study)), *notes(study)])


def write_report(study: Study, folders: Sequence[str | Path]) -> Path:
    """Write ``report.html``, ``figures/*.svg`` and ``tables/*.csv`` of a study into the first of its folders.

    Returns:
        Path of the page; the same records give the same bytes.
    """
    paths = [Path(folder) for folder in folders]
    out = paths[0]
    for name, table in tables.files(study).items():
        csv = table.to_csv(index=False, float_format="%.6g", lineterminator="\n")
        files.write_text(out / "tables" / f"{name}.csv", csv)
    figures = list(_figures(study, out))
    title = " and ".join(path.resolve().name for path in paths)
    body = [*_findings(study), *figures, *_details(study), *_provenance(study, paths)]
    files.write_text(out / "report.html", html.document(title, body))
    return out / "report.html"


def _figures(study: Study, out: Path) -> Iterator[str]:
    """Sections of the figures that apply, each also written as a file; files of the others are removed."""
    for name in sorted(FIGURES, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        title, file = first_line(FIGURES[name]).rstrip("."), out / "figures" / f"{name}.svg"
        try:
            drawing = FIGURES[name](study.records, study.points)
            svg = layout.svg(drawing, name)
            shown = html.figure(svg, drawing.caption)
        except RequestError as refusal:
            file.unlink(missing_ok=True)
            if isinstance(refusal, NothingToDrawError):
                continue
            shown = html.paragraph(str(refusal))
        else:
            files.write_text(file, svg)
        yield html.section(title, shown)


def _findings(study: Study) -> Iterator[str]:
    yield html.paragraph(_extent(study), "lead")
    if len(study.pairs):
        yield html.section("Between the arms", html.bullets(headline(study.pairs)), html.paragraph(PAIRED))
    cautions = list(notes(study))
    if cautions:
        yield html.section("Read with care", html.bullets(cautions))
    table = html.table(tables.sensitivities(study))
    yield html.section("Learning-rate sensitivity", html.paragraph(SENSITIVITY), table)


def _extent(study: Study) -> str:
    statuses = {name: int((study.records.runs["status"] == name).sum()) for name in store.STATUSES}
    points, runs = study.points, study.records.runs
    lrs, steps = sorted(points["lr"].unique()), sorted(set(map(spell, map(float, runs["steps"]))))
    return (
        f"{len(runs)} runs ({', '.join(f'{n} {name}' for name, n in statuses.items())}): arms "
        f"{listed(points['arm'].unique())}; {listed(map(count, sorted(points['size'].unique())))} parameters without "
        f"embeddings; {len(lrs)} peak learning rates from {lrs[0]:g} to {lrs[-1]:g}; "
        f"{points['seed'].nunique()} seeds; {listed(steps)} steps."
    )


def _details(study: Study) -> Iterator[str]:
    if len(study.pairs):
        shown = html.table(tables.differences(study))
        yield html.section("Differences between arms, paired by seed", html.paragraph(DIFFERENCES), shown)
    yield html.section("Final loss by learning rate", html.paragraph(LOSSES), html.table(tables.losses(study)))
    lost = tables.lost(study)
    if len(lost):
        yield html.section("Runs that failed or diverged", html.table(lost))


def _provenance(study: Study, folders: list[Path]) -> Iterator[str]:
    """All that is needed to make the page again."""
    commands = "\n".join(dict.fromkeys(command for folder in folders for command in store.commands(folder)))
    runs = study.records.runs
    facts = {name: sorted(runs[name].dropna().unique()) for name in ("versions", "data_fingerprint", "data_notes")}
    lines = [f"{name.replace('_', ' ')}: {'; '.join(values)}" for name, values in facts.items() if any(values)]
    libraries = {"Python": platform.python_version(), "matplotlib": matplotlib.__version__}
    libraries |= {"numpy": np.__version__, "pandas": pd.__version__}
    lines += [f"page made with {', '.join(f'{name} {version}' for name, version in libraries.items())}"]
    settings = "\n".join(f"{key} = {value}" for key, value in tables.shared_settings(study).items())
    yield html.section("What sets the arms and sizes apart", html.table(tables.arms(study)))
    yield html.section("How this was made", html.block(commands or "no command on record"), html.bullets(lines))
    yield html.section("What all runs share", html.block(settings))
