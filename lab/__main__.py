"""The door: sweep, train, report, export, list; each a thin function over the library."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from lab import machine, ranks
from lab.registry import RequestError, nearest

USAGE = """\
lab sweep NAME|FILE.yaml [key=value,value ...]   train a sweep; the same command again trains only what is missing
lab train [key=value ...]                        train one run; with -m and key=a,b a sweep without a file
lab report DIR [DIR ...]                         rebuild figures and report.html; several overlaid, in the first
lab claims [DIR ...] [--json|--markdown]         which claims of the paper the records bear out (default: results)
lab export DIR --to csv|tensorboard|wandb|trackio [--out FOLDER]    hand records on
lab list [sweeps|models|interventions|optimizers|schedules|data|probes|trackers|figures]

out=DIR says where records go.  --dry-run prints points, fleets and cost, and trains nothing.
--cfg job shows the config and --help the keys, also after `sweep NAME`.  lab list says what there is.
Tab completion: eval "$(lab -sc install=bash)"
"""
DONE, FAILED, REFUSED, INTERRUPTED, FAULT = 0, 1, 2, 130, 70


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    os.environ["HYDRA_FULL_ERROR"] = "1"
    machine.prepare()
    if ranks.count() > 1:
        _on_ranks(arguments)
    return _coded(lambda: _dispatch(arguments))


def _on_ranks(arguments: Sequence[str]) -> NoReturn:
    """The first rank takes the request, the others train what it tells them to."""
    from lab import app

    code = _coded(ranks.join)
    if ranks.joined():
        code = _coded((lambda: _dispatch(arguments)) if ranks.is_first() else app.follow)
        if ranks.is_first() and code in (DONE, REFUSED):  # the others wait for what is next
            ranks.tell(None)
        if code in (DONE, REFUSED, machine.PREEMPTED):  # else they cannot be reached
            ranks.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads hold tensors of Python's, and abort where they outlive its interpreter


def _coded(work: Callable[[], None]) -> int:
    """Do it; returns the exit code that says how it went."""
    try:
        work()
        return DONE
    except RequestError as refusal:
        return _refuse(str(refusal))
    except KeyboardInterrupt:
        print("\ninterrupted; the same command trains what is missing", file=sys.stderr)
        return INTERRUPTED
    except SystemExit as end:
        if end.code == machine.PREEMPTED and ranks.is_first():
            print("lab: preempted; the same command goes on from the checkpoint", file=sys.stderr)
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except BrokenPipeError:
        return FAILED
    except Exception as fault:
        from lab import request

        if request.is_refusal(fault):
            return _refuse(request.one_line(fault))
        traceback.print_exc()
        print("\nA fault of the lab, not of your request; please report it with the lines above.", file=sys.stderr)
        return FAULT


def _refuse(line: str) -> int:
    print("lab:", " ".join(line.split()), file=sys.stderr)
    return REFUSED


def _dispatch(arguments: Sequence[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        raise SystemExit(DONE if arguments else REFUSED)
    word, rest = arguments[0], list(arguments[1:])
    if word in ("-sc", "--shell-completion"):
        from lab import completion

        print(*completion.answer(arguments, list(COMMANDS)))
        return
    if word not in COMMANDS:
        raise RequestError(f"unknown sub-command {word!r}; {nearest(word, COMMANDS)}")
    if word != "train" and rest in (["--help"], ["-h"]):
        print(USAGE, end="")
        return
    COMMANDS[word](rest)


def _without_m(arguments: list[str]) -> list[str]:
    return [word for word in arguments if word not in ("-m", "--multirun")]


def _sweep(arguments: list[str]) -> None:
    from lab import request

    if not arguments or arguments[0].startswith("-") or ("=" in arguments[0] and not arguments[0].endswith(".yaml")):
        raise RequestError(f"lab sweep needs a name or a FILE.yaml first; known: {', '.join(request.sweeps())}")
    sweep = request.find_sweep(arguments[0])
    request.run(_without_m(arguments[1:]), name=sweep.stem, sweep=sweep)


def _train(arguments: list[str]) -> None:
    from lab import request

    words = _without_m(arguments)
    request.run(words, name="train", one=len(words) == len(arguments))


def _report(arguments: list[str]) -> None:
    from lab.analysis import report

    if not arguments:
        raise RequestError("report which folder? lab report DIR [DIR ...]")
    folders = [Path(folder) for folder in arguments]
    page = report.build(folders)
    print(report.summary(folders))
    print(f"report: {page}")


def _claims(arguments: list[str]) -> None:
    from lab.analysis import scoreboard

    folders, given = _options(arguments, ["--json", "--markdown"], switches=True)
    print(scoreboard.written([Path(folder) for folder in folders or ["results"]], *given))


def _export(arguments: list[str]) -> None:
    from lab import export

    folders, given = _options(arguments, ["--to", "--out"])
    if len(folders) != 1 or not given.get("--to"):
        raise RequestError(f"lab export DIR --to {'|'.join(export.destinations())} [--out FOLDER]")
    print(export.export(Path(folders[0]), given["--to"], Path(given["--out"]) if "--out" in given else None))


def _options(arguments: list[str], known: Sequence[str], *, switches: bool = False) -> tuple[list[str], dict[str, str]]:
    """Plain words, and what is given as ``--key value`` or ``--key=value``; switches take no value."""
    words, given, rest = [], {}, iter(arguments)
    for word in rest:
        key, equals, value = word.partition("=")
        if not word.startswith("-"):
            words.append(word)
        elif key not in known:
            raise RequestError(f"unknown option {key!r}; {nearest(key, known)}")
        else:
            given[key] = value if equals or switches else next(rest, "")
    return words, given


def _list(arguments: list[str]) -> None:
    from lab import catalogue

    for line in catalogue.lines(arguments):
        print(line)


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "sweep": _sweep,
    "train": _train,
    "report": _report,
    "claims": _claims,
    "export": _export,
    "list": _list,
}


if __name__ == "__main__":
    sys.exit(main())
