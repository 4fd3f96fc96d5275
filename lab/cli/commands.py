"""Sub-commands: each reads its arguments and calls the library."""

from __future__ import annotations

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


def _of(module: str) -> Callable[[list[str]], None]:
    """The command in a module, which is loaded when it is carried out."""

    def run(arguments: list[str]) -> None:
        import_module(module).run(arguments)

    return run


def _stress(arguments: list[str]) -> None:
    if not any(word.partition("=")[0] == "--params" for word in arguments):
        _of("lab.features.stress.command")(arguments)
        return
    try:
        _of("lab.features.predict.command")(arguments)
    finally:
        if not isinstance(sys.exception(), RequestError):  # whose line stands alone
            say("lab: lab stress --params is lab predict --params now", error=True)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "train": _train,
    "stress": _stress,
    "import": _of("lab.cli.importing"),
    "report": _of("lab.features.report.command"),
    "coordcheck": _of("lab.features.coordcheck.command"),
    "predict": _of("lab.features.predict.command"),
    "watch": _of("labwatch.watch.command"),
    "selftest": _of("lab.features.selftest.command"),
    "claims": _claims,
    "leaderboard": _of("lab.features.leaderboard.command"),
    "check": _of("lab.features.guard.command"),
    "compare": _compare,
    "status": _status,
    "export": _export,
    "list": _list,
}
