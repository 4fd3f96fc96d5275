"""Sub-commands: each reads its arguments and calls the library."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core.errors import RequestError
from lab.core.printing import say, say_json
from lab.core.usage import OptionParser

if TYPE_CHECKING:
    from lab.sweeping.request import Request


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
    from labwatch.events.logs import measurements

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
        found = run_folders.read_run_folder(source, measurements, given.loss)
        read = run_table.records_of(found.table, named, source.resolve().name, found.measured)
        read.mapping.extend(found.remarks)
    else:
        read = run_table.records_of(table_files.read_table(tables[0]), named, source.name)
    command = shlex.join(["lab", "import", *arguments])
    is_new = run_table.write(Path(out), read.records, command, replace=given.replace)
    runs = len(read.records.runs)
    failed = int((read.records.runs["status"] == "failed").sum())
    if given.json:
        say_json({"folder": out, "runs": runs, "is_new": is_new, "mapping": dict(read.mapping)})
        return
    width = max(len(meaning) for meaning, _ in read.mapping)
    for meaning, column in read.mapping:
        say(f"{meaning:{width}}  {column}")
    left_out = f", {failed} left out" if failed else ""
    say(f"{runs - failed} runs {'imported' if is_new else 'already there'}{left_out}; lab report {shlex.quote(out)}")


def _claims(arguments: list[str]) -> None:
    from lab.core import shelf

    shelf.module("claims", "command", "lab claims").judge_claims(OptionParser("claims").read(arguments))


def _export(arguments: list[str]) -> None:
    from lab.records import export
    from lab.report.answer import note_damage

    given = OptionParser("export").read(arguments)
    if len(given.folders) != 1 or not given.to:
        raise RequestError(f"lab export DIR --to {'|'.join(export.destinations())} [--out FOLDER]")
    said = export.export_records(given.folders[0], given.to, Path(given.out) if given.out else None)
    note_damage(given.folders[0])
    say(said)


def _compare(arguments: list[str]) -> None:
    from lab.records.store import is_results_folder

    given = OptionParser("compare").read(arguments)
    if not given.folders:
        raise RequestError("compare what? lab compare A B, two results folders, or lab compare LOG LOG [...]")
    are_results = all(map(is_results_folder, given.folders))
    import_module("lab.features.guard.command" if are_results else "labwatch.compare.command").compare(given)


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
        say_json(named)
        return
    for line in listing.lines(named):
        say(line)


def _of(package: str) -> Callable[[list[str]], None]:
    """The command of a feature, which is loaded when it is carried out."""

    def run(arguments: list[str]) -> None:
        import_module(f"{package}.command").run(arguments)

    return run


def _stress(arguments: list[str]) -> None:
    if not any(word.partition("=")[0] == "--params" for word in arguments):
        _of("lab.features.stress")(arguments)
        return
    try:
        _of("lab.features.predict")(arguments)
    finally:
        if not isinstance(sys.exception(), RequestError):  # whose line stands alone
            say("lab: lab stress --params is lab predict --params now", error=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "train": _train,
    "stress": _stress,
    "import": _import,
    "report": _of("lab.features.report"),
    "coordcheck": _of("lab.features.coordcheck"),
    "predict": _of("lab.features.predict"),
    "watch": _of("labwatch.watch"),
    "selftest": _of("lab.features.selftest"),
    "claims": _claims,
    "leaderboard": _of("lab.features.leaderboard"),
    "check": _of("lab.features.guard"),
    "compare": _compare,
    "status": _status,
    "export": _export,
    "list": _list,
}
