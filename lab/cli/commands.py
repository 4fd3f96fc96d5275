"""Sub-commands: each reads its arguments and calls the library."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lab.core import machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser

if TYPE_CHECKING:
    import pandas as pd

    from lab.analysis.sensitivity import Window
    from lab.report.build import Report
    from lab.sweeping.request import Request


def _say_json(value: Any) -> None:
    say(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False, default=str))


def _sweep(arguments: list[str]) -> None:
    from lab.core import shipped
    from lab.sweeping import request

    if not arguments or not is_sweep(arguments[0]):
        raise RequestError(f"lab sweep needs a name or a FILE.yaml first; known: {', '.join(shipped.sweeps())}")
    sweep, command = request.find_sweep(arguments[0]), request.command_line(sys.argv[1:])
    _carry_out(request.read_request(arguments[1:], command, name=sweep.stem, sweep=sweep))


def is_sweep(word: str) -> bool:
    """Whether a word may name a sweep, and is neither an option nor an override."""
    return not word.startswith("-") and ("=" not in word or word.endswith(".yaml"))


def _train(arguments: list[str]) -> None:
    from lab.sweeping import request

    command = request.command_line(sys.argv[1:])
    _carry_out(request.read_request(arguments, command, name="train", is_single=True))


def _carry_out(asked: Request) -> None:
    from lab.cli import listing
    from lab.sweeping import launch

    if not asked.show:
        launch.carry_out(asked)
        return
    for line in listing.config_lines(asked):
        say(line)


def _import(arguments: list[str]) -> None:
    from lab.records import run_folders, run_table, table_files
    from lab.records.columns import Columns

    given = OptionParser("import").read(arguments)
    words = list(map(str, given.folders))
    out = next((word.removeprefix("out=") for word in words if word.startswith("out=")), "")
    tables = [word for word in words if not word.startswith("out=")]
    if len(tables) != 1 or not out:
        raise RequestError("lab import TABLE|DIR out=DIR, a file, a folder of runs, or - for standard input")
    options = {key: getattr(given, key) for key in Columns._fields}
    lists = {key: options[key].split(",") for key in ("arm", "best_over") if options[key] is not None}
    source, named = Path(tables[0]), Columns(**options | lists)
    if source.is_dir():
        found = run_folders.read_run_folder(source, _measurements, given.loss)
        read = run_table.records_of(found.table, named, source.resolve().name, found.measured)
        read.mapping.extend(found.remarks)
    else:
        read = run_table.records_of(table_files.read_table(tables[0]), named, source.name)
    command = shlex.join(["lab", "import", *arguments])
    is_new = run_table.write(Path(out), read.records, command, replace=given.replace)
    runs = len(read.records.runs)
    failed = int((read.records.runs["status"] == "failed").sum())
    if given.json:
        _say_json({"folder": out, "runs": runs, "is_new": is_new, "mapping": dict(read.mapping)})
        return
    width = max(len(meaning) for meaning, _ in read.mapping)
    for meaning, column in read.mapping:
        say(f"{meaning:{width}}  {column}")
    left_out = f", {failed} left out" if failed else ""
    say(f"{runs - failed} runs {'imported' if is_new else 'already there'}{left_out}; lab report {shlex.quote(out)}")


def _measurements(log: Path) -> dict[str, pd.Series]:
    """The measurements in a log of text, by step."""
    import pandas as pd

    from lab.analysis.events.log_names import OR
    from lab.analysis.events.logs import read_logs

    *others, run = read_logs(log).runs
    if others:
        raise RequestError(f"{log} holds {len(others) + 1} runs; give each a file")
    return {name: pd.Series(values, run.step_n) for name, values in run.columns.items() if OR not in name}


def _report(arguments: list[str]) -> None:
    from lab.analysis.sensitivity import WINDOW
    from lab.records.columns import positive
    from lab.report import build
    from lab.report.answer import note_damage

    given = OptionParser("report").read(arguments)
    folders, window = given.folders, _window(given) or WINDOW
    if not folders:
        raise RequestError("report which folder? lab report DIR [DIR ...]")
    if given.format:
        drawn = _paper_figures(folders, given.format, given.width, window)
        if given.json:
            _say_json({"figures": list(drawn)})
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
        _say_json(answer | ({"verdict": "refused", "reasons": reasons} if reasons else {}))
    else:
        say("\n".join([*lines, f"{'index' if index else 'report'}: {page}"]))
    if given.open:
        import webbrowser

        webbrowser.open(page.absolute().as_uri())
    if reasons:
        raise RequestError("; ".join(reasons))


def _results_folders(folder: Path) -> list[Path]:
    """The results folders directly inside a folder that is not one itself, without those that links lead elsewhere."""
    from lab.records import store

    inside = []
    for path in store.results_folders(folder):
        if path.resolve().is_relative_to(folder.resolve()):
            inside.append(path)
        else:
            say(f"skipped: {path} is a link that leads out of {folder}", error=True)
    return inside


def _window(given: argparse.Namespace) -> Window | None:
    """The window of learning rates, if it was given."""
    from lab.analysis.sensitivity import window_of

    return window_of(given.window) if given.window else None


def _paper_figures(folders: Sequence[Path], format_name: str, width: str | None, window: Window) -> Iterator[Path]:
    """Write the figures of the folders for a paper, overlaid in the first, or of each folder in a single one."""
    from lab.analysis.sensitivity import study
    from lab.report import build

    form = build.paper_of(format_name, width)
    several = _results_folders(folders[0]) if len(folders) == 1 else []
    for group in [[folder] for folder in several] or [list(folders)]:
        yield from build.write_figures(study(group, window), group[0], form)


def _write_reports(folders: Sequence[Path], window: Window) -> dict[Path, Report | str]:
    """Write the report of each folder, as many at once as there are cores; the reason for a folder that has none."""
    from lab.sweeping.local_jobs import run_jobs

    slots = [None] * min(machine.cores(), len(folders))
    ends = run_jobs(_write_report, ((folder, window) for folder in folders), slots, imports=["lab.report.build"])
    return {
        folder: end.answer or f"its process ended with exit code {end.exit_code}"
        for folder, end in zip(folders, ends, strict=True)
    }


def _write_report(folder: Path, window: Window) -> Report | str:
    """The report, or why there is none; a fault, which is no refusal, is printed as well."""
    from lab.report import build

    try:
        return build.make_report([folder], window)[0]
    except RequestError as refusal:
        return str(refusal)
    except Exception as fault:
        say(traceback.format_exc().rstrip(), error=True)
        return f"{type(fault).__name__}: {fault}"


def _coordcheck(arguments: list[str]) -> None:
    from lab.features import coordcheck
    from lab.sweeping import launch

    check = coordcheck.check_coordinates(launch.compose_points([*coordcheck.DEFAULTS, *arguments]))
    check.write()
    for line in check.lines():
        say(line)
    if not check.passed:
        raise SystemExit(1)


def _selftest(arguments: list[str]) -> None:
    from lab.cli import selftest

    given = OptionParser("selftest").read(arguments)
    if given.folders:
        raise RequestError(f"lab selftest takes no {str(given.folders[0])!r}")
    raise SystemExit(selftest.check_machine(given.json))


def _claims(arguments: list[str]) -> None:
    from lab.core import shelf

    shelf.claims("command", "lab claims").judge_claims(OptionParser("claims").read(arguments))


def _export(arguments: list[str]) -> None:
    from lab.records import export
    from lab.report.answer import note_damage

    given = OptionParser("export").read(arguments)
    if len(given.folders) != 1 or not given.to:
        raise RequestError(f"lab export DIR --to {'|'.join(export.destinations())} [--out FOLDER]")
    said = export.export_records(given.folders[0], given.to, Path(given.out) if given.out else None)
    note_damage(given.folders[0])
    say(said)


def _check(arguments: list[str]) -> None:
    from lab.analysis.guard import check
    from lab.analysis.guard.compare import UNCLEAR
    from lab.analysis.text import listed
    from lab.features.guard import baselines, cards
    from lab.features.guard.answer import answer_of
    from lab.report.answer import give, note_damage

    given = OptionParser("check").read(arguments)
    if given.save or given.show:
        _keep_baseline(given)
        return
    by_itself = given.fail_on in cards.FAILING and not given.baseline
    if given.fail_on and given.fail_on != UNCLEAR and not by_itself:
        verdicts = listed(cards.FAILING, "or")
        raise RequestError(f"--fail-on takes {UNCLEAR}, or without --baseline {verdicts}, not {given.fail_on!r}")
    if by_itself:
        _check_verdicts(given)
    if len(given.folders) != 1 or not given.baseline:
        raise RequestError("lab check DIR --baseline FILE|DIR [--margin 5%] [--strict]")
    folder, margin = given.folders[0], check.margin_of(given.margin or "5%")
    comparison = baselines.check(folder, Path(given.baseline), margin, given.strict, _window(given))
    comparison = comparison._replace(fails_on_unclear=bool(given.fail_on))
    note_damage(folder)
    give(answer_of(comparison), given)
    raise SystemExit(comparison.exit_code)


def _check_verdicts(given: argparse.Namespace) -> NoReturn:
    """Judge a card by its own verdicts, without a baseline, and end with the exit code."""
    from lab.features.guard import cards

    others = ("margin", "strict", "junit", "markdown", "window", "json")
    if len(given.folders) != 1 or any(getattr(given, name) for name in others):
        raise RequestError(f"lab check DIR --fail-on {given.fail_on} takes the folder of a card and no more")
    lines, code = cards.check_verdicts(given.folders[0], given.fail_on)
    say("\n".join(lines))
    raise SystemExit(code)


def _keep_baseline(given: argparse.Namespace) -> None:
    """Save a baseline, or show one."""
    from lab.analysis.sensitivity import WINDOW
    from lab.features.guard import baselines
    from lab.report.answer import give

    others = ("baseline", "margin", "strict", "fail_on", "junit", "markdown", "json", *["window"] * bool(given.show))
    if (
        any(getattr(given, name) for name in others)
        or len(given.folders) != bool(given.save)
        or (given.save and given.show)
    ):
        raise RequestError(
            "lab check DIR --save FILE [--window LOW HIGH], or lab check --show FILE, with no other option"
        )
    if given.show:
        give(baselines.show(Path(given.show)), given)
    else:
        give(baselines.save(given.folders[0], Path(given.save), _window(given) or WINDOW), given)


def _compare(arguments: list[str]) -> None:
    from lab.analysis.events.logs import is_results_folder
    from lab.analysis.sensitivity import WINDOW
    from lab.features.guard import side_by_side
    from lab.features.watch import answer
    from lab.features.watch.two_logs import compare_logs, follow_siblings, margin_of
    from lab.report.answer import give

    given = OptionParser("compare").read(arguments)
    if not given.folders:
        raise RequestError("compare what? lab compare A B, two results folders, or lab compare LOG LOG [...]")
    if all(map(is_results_folder, given.folders)):
        if len(given.folders) != 2 or given.within or given.html or given.siblings:
            raise RequestError(
                "lab compare A B takes two results folders; --within, --html and --siblings go with logs"
            )
        compared = side_by_side.compare_folders(given.folders[0], given.folders[1], _window(given) or WINDOW)
        give(side_by_side.answer_of(compared), given)
    elif given.window:
        raise RequestError("--window goes with two results folders, and these are logs")
    elif given.siblings:
        if given.within:
            raise RequestError("--siblings goes without --within")
        give(answer.siblings_answer(follow_siblings(given.folders)), given)
    else:
        margin = margin_of(given.within) if given.within else None
        give(answer.answer_of(compare_logs(given.folders, margin)), given)


def _status(arguments: list[str]) -> None:
    from lab.records.status import read_status
    from lab.report.answer import note_damage

    given = OptionParser("status").read(arguments)
    if len(given.folders) != 1:
        raise RequestError("status of which folder? lab status DIR")
    status = read_status(given.folders[0])
    note_damage(given.folders[0])
    say(status.as_json() if given.json else "\n".join(status.lines()))


def _list(arguments: list[str]) -> None:
    from lab.cli import listing

    given = OptionParser("list").read(arguments)
    named = listing.read_lists([str(name) for name in given.folders])
    if given.json:
        _say_json(named)
        return
    for line in listing.lines(named):
        say(line)


def _of_feature(name: str) -> Callable[[list[str]], None]:
    """The command of a feature, which is loaded when it is carried out."""

    def run(arguments: list[str]) -> None:
        import_module(f"lab.features.{name}.command").run(arguments)

    return run


def _stress(arguments: list[str]) -> None:
    if not any(word.partition("=")[0] == "--params" for word in arguments):
        _of_feature("stress")(arguments)
        return
    try:
        _of_feature("predict")(arguments)
    finally:
        if not isinstance(sys.exception(), RequestError):  # whose line stands alone
            say("lab: lab stress --params is lab predict --params now", error=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "train": _train,
    "stress": _stress,
    "import": _import,
    "report": _report,
    "coordcheck": _coordcheck,
    "predict": _of_feature("predict"),
    "watch": _of_feature("watch"),
    "selftest": _selftest,
    "claims": _claims,
    "leaderboard": _of_feature("board"),
    "check": _check,
    "compare": _compare,
    "status": _status,
    "export": _export,
    "list": _list,
}
