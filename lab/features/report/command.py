"""`lab report`."""

from __future__ import annotations

import traceback
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.analysis.sensitivity import WINDOW, Window, study, window_of
from lab.analysis.text import positive
from lab.core import machine
from lab.core.errors import RequestError
from lab.core.printing import say, say_json
from lab.core.usage import OptionParser
from lab.records import store
from lab.report import build
from lab.report.answer import note_damage
from lab.report.build import Report
from lab.sweeping.local_jobs import run_jobs


def run(arguments: Sequence[str]) -> None:
    """Write the report of one folder or several, or their figures for a paper."""
    given = OptionParser("report").read(arguments)
    folders, window = given.folders, window_of(given.window or WINDOW)
    if not folders:
        raise RequestError("report which folder? lab report DIR [DIR ...]")
    if given.format:
        drawn = _paper_figures(folders, given.format, given.width, window)
        if given.json:
            say_json({"figures": list(drawn)})
            return
        for path in drawn:
            say(f"figure: {path}")
        return
    if given.width:
        raise RequestError("--width goes with --format pdf or --format png")
    index, failures = None, dict[Path, str]()
    several = _results_folders(folders[0]) if len(folders) == 1 else []
    note_damage(*(several or folders))
    if several:
        ends = _write_reports(several, window)
        reports = [end for end in ends.values() if not isinstance(end, str)]
        failures = {folder: end for folder, end in ends.items() if isinstance(end, str)}
        lines = [f"report: {report.page}" for report in reports]
        page = index = build.write_index(folders[0], reports, failures)
    else:
        report, summary = build.make_report(folders, window, positive("--difference", given.difference))
        page, reports = report.page, [report]
        lines = [summary, *(f"card: {folder / 'card.html'}" for folder in folders if (folder / "card.html").is_file())]
    reasons = [f"no report of {folder}: {reason}" for folder, reason in failures.items()]
    if given.json:
        answer = {"index": index, "reports": [report._asdict() for report in reports]}
        say_json(answer | ({"verdict": "refused", "reasons": reasons} if reasons else {}))
    else:
        say("\n".join([*lines, f"{'index' if index else 'report'}: {page}"]))
    if given.open:
        webbrowser.open(page.absolute().as_uri())
    if reasons:
        raise RequestError("; ".join(reasons))


def _results_folders(folder: Path) -> list[Path]:
    """The results folders directly inside a folder that is not one itself, without those that links lead elsewhere."""
    inside = []
    for path in store.results_folders(folder):
        if path.resolve().is_relative_to(folder.resolve()):
            inside.append(path)
        else:
            say(f"skipped: {path} is a link that leads out of {folder}", error=True)
    return inside


def _paper_figures(folders: Sequence[Path], format_name: str, width: str | None, window: Window) -> Iterator[Path]:
    """Write the figures of the folders for a paper, overlaid in the first, or of each folder in a single one."""
    page = build.paper_of(format_name, width)
    several = _results_folders(folders[0]) if len(folders) == 1 else []
    for group in [[folder] for folder in several] or [list(folders)]:
        yield from build.write_figures(study(group, window), group[0], format_name, page)


def _write_reports(folders: Sequence[Path], window: Window) -> dict[Path, Report | str]:
    """Write the report of each folder, as many at once as there are cores; the reason for a folder that has none."""
    slots = [None] * min(machine.cores(), len(folders))
    ends = run_jobs(_write_report, ((folder, window) for folder in folders), slots, imports=["lab.report.build"])
    return {
        folder: end.answer or f"its process ended with exit code {end.exit_code}"
        for folder, end in zip(folders, ends, strict=True)
    }


def _write_report(folder: Path, window: Window) -> Report | str:
    """The report, or why there is none; a fault, which is no refusal, is printed as well."""
    try:
        return build.make_report([folder], window)[0]
    except RequestError as refusal:
        return str(refusal)
    except Exception as fault:
        say(traceback.format_exc().rstrip(), error=True)
        return f"{type(fault).__name__}: {fault}"
