"""From the words of a command line to its sub-command, and from the outcome to an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from lab.cli import commands, interrupt
from lab.core import distributed, machine, usage
from lab.core.errors import RequestError, nearest
from lab.core.printing import say, texts_on_stdout

DONE, FAILED, REFUSED, FAULT = 0, 1, 2, 70
HELP = ("help", "-h", "--help")
UNREAD = 141  # as of a program that SIGPIPE ends


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    machine.configure_process()
    if distributed.world_size() > 1 and arguments[:1] != ["selftest"]:  # which each rank carries out
        _on_ranks(arguments)
    return _coded(lambda: _dispatch(arguments), as_json=_asks_for_json(arguments))


def _asks_for_json(arguments: Sequence[str]) -> bool:
    """Whether a command line asks a command that can answer in JSON to do so."""
    word, *rest = arguments or [""]
    return "--json" in rest and word in usage.COMMANDS and "--json" in usage.COMMANDS[word].parsed_options


def _on_ranks(arguments: Sequence[str]) -> NoReturn:
    """Let the first rank carry out the request, and the others train what it sends them."""
    from lab.sweeping import launch

    code = _coded(distributed.join)
    if distributed.is_joined():
        is_first = distributed.is_first_rank()
        work = (lambda: _dispatch(arguments)) if is_first else launch.follow_first_rank
        code = _coded(work, as_json=is_first and _asks_for_json(arguments))
        if distributed.is_first_rank() and code in (DONE, REFUSED):  # the other ranks still wait for the next fleet
            distributed.send_to_all(None)
        if code in (DONE, REFUSED, machine.EXIT_PREEMPTED):  # after any other end the other ranks cannot be reached
            distributed.leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's threads hold Python's tensors, and abort if they outlive the interpreter


def _coded(work: Callable[[], None], *, as_json: bool = False) -> int:
    """Do the work; returns its exit code.

    A refusal is a line on stderr, and ``as_json`` also the answer on stdout, unless there is one already.
    """
    before = texts_on_stdout()
    try:
        work()
        return DONE
    except RequestError as refusal:
        reason = " ".join(str(refusal).split())
        say(f"lab: {reason}", error=True)
        if as_json and texts_on_stdout() == before:
            say(json.dumps({"verdict": "refused", "reasons": [reason]}, ensure_ascii=False))
        return REFUSED
    except KeyboardInterrupt:
        interrupt.report()
        return interrupt.INTERRUPTED
    except SystemExit as end:
        if end.code == machine.EXIT_PREEMPTED and distributed.is_first_rank():
            say("lab: preempted; the same command resumes from the checkpoint", error=True)
        return end.code if isinstance(end.code, int) else FAILED if end.code else DONE
    except BrokenPipeError:  # whoever reads the output, such as head, has read enough
        return UNREAD
    except Exception:
        say(traceback.format_exc().rstrip(), error=True)
        say("\nA fault of the lab, not of your request; please report it with the lines above.", error=True)
        return FAULT


def _dispatch(arguments: Sequence[str]) -> None:
    word, *rest = arguments or [""]
    if word in HELP and rest:  # lab help sweep
        word, rest = rest[0], ["--help"]
    if word in ("", *HELP):
        say(usage.overview())
        raise SystemExit(DONE if word else REFUSED)
    if word in ("--version", "version"):
        from importlib.metadata import version

        say(f"instability-lab {version('instability-lab')}")
        return
    if word in ("-sc", "--shell-completion"):
        from lab.cli import listing

        say(" ".join(listing.complete(arguments, list(commands.COMMANDS))))
        return
    if word in usage.FORMER:
        raise RequestError(f"lab {word} is now {usage.FORMER[word]}")
    if word not in commands.COMMANDS:
        raise RequestError(f"unknown command {word!r}; {nearest(word, [*commands.COMMANDS, 'help', 'version'])}")
    if {*rest} & {*HELP[1:]}:
        others = [other for other in rest if other not in HELP[1:]]
        has_own_help = word == "train" or (word == "sweep" and others and commands.is_sweep(others[0]))
        if not has_own_help or not others:
            say(usage.command_help(word))
        if not has_own_help:
            return
        if not others:
            say("")  # the help of a request continues with all keys
        rest = [*others, "--help"]
    commands.COMMANDS[word](rest)
