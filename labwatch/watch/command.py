"""`lab watch`: alarms of a log as it is, or as it grows."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.usage import OptionParser
from labwatch.events.levels import read_levels
from labwatch.events.log_names import Given, given_columns, given_pattern
from labwatch.events.logit_rounding import mantissa_bits_of

if TYPE_CHECKING:
    from labwatch.events.following import Alarm, Follower
    from labwatch.events.levels import Level

PAUSE = 1.0  # seconds between two looks at a log that grows
LONGEST_COMMAND = 60.0  # seconds that the command of an alarm may take


def run(arguments: Sequence[str]) -> None:
    """Watch what the words of the command line name.

    Raises:
        RequestError: nothing can be watched there.
        SystemExit: with status 1 if an alarm was raised, else 0.
    """
    raise SystemExit(watch(OptionParser("watch").read(arguments)))


def watch(given: argparse.Namespace) -> int:
    """Watch what the words of a command line name; returns 1 if an alarm was raised, 0 if none."""
    if not given.folders:
        raise RequestError("watch which folder or log? lab watch DIR|LOG [--replay DIR|LOG] [--follow] [--json]")
    if len(given.folders) > 1:
        first, second, *_ = given.folders
        raise RequestError(
            f"lab watch takes one folder or log; lab watch {first} --replay {second} tells the cause of its spikes by "
            f"another run of its steps, and lab compare {first} {second} shows what lies between two logs"
        )
    path = given.folders[0]
    columns: Given = given_columns(given.columns) if given.columns else {}
    if given.pattern:
        if given.columns:
            raise RequestError("--pattern names the columns itself, so it goes without --columns")
        columns = given_pattern(given.pattern)
    bits = mantissa_bits_of(given.mantissa_bits) if given.mantissa_bits else None
    levels = {}
    if given.thresholds:
        from labwatch.recordings.readings import quantities

        levels = read_levels(Path(given.thresholds), quantities())
    if given.on_alarm and not given.follow:
        raise RequestError("--on-alarm goes with --follow")
    if given.follow:
        if given.replay:
            raise RequestError("--replay goes without --follow: a replay is compared with a log that has ended")
        from labwatch.events.following import Follower

        return _follow(Follower(path, columns, bits, levels), levels, given.on_alarm, as_json=given.json)
    from labwatch.watch import watching

    replays = [Path(log) for log in given.replay]
    lines, alarmed = watching.watch(
        path, replays=replays, mantissa_bits=bits, columns=columns, levels=levels, as_json=given.json
    )
    for line in lines:
        say(line)
    return int(alarmed)


def _follow(follower: Follower, levels: Mapping[str, Level], command: str | None, *, as_json: bool) -> int:
    """Raise the alarms of a growing log until an interrupt; returns 1 if any was raised, 0 if none."""
    from labwatch.events.following import Alarm
    from labwatch.recordings.recording import is_recording
    from labwatch.recordings.words import GrowingRecording
    from labwatch.watch.watching import JUDGED

    raised, is_waiting = 0, False
    recording = GrowingRecording(follower.path, levels)
    try:
        with closing(follower), _interrupted_by_sigterm():
            while True:
                is_new = False
                for found in follower.poll():
                    is_new = True
                    if isinstance(found, Alarm):
                        if found.event.kind in JUDGED and is_recording(follower.path):
                            continue
                        raised += 1
                        _raise(found, command, as_json=as_json)
                    else:
                        say(found, error=as_json)
                for line, plain in recording.poll():
                    is_new = True
                    raised += 1
                    say(json.dumps(plain | {"text": line}) if as_json else line)
                if not is_new:
                    if not follower.runs and not is_waiting:
                        say(f"{follower.fault()}; waiting for more", error=True)
                        is_waiting = True
                    time.sleep(PAUSE)
    except KeyboardInterrupt:
        pass
    if not raised and not follower.is_judged():
        raise RequestError(follower.fault())
    say(f"{raised} alarm{'s' * (raised != 1)} raised", error=as_json)
    return int(raised > 0)


def _raise(alarm: Alarm, command: str | None, *, as_json: bool) -> None:
    """Say an alarm, and hand it to the command of the user."""
    from labwatch.watch.words import next_look, plain_event, sentence

    text = sentence(alarm.log, alarm.event, is_growing=True)
    advice = next_look(alarm.log, alarm.event, {})
    plain = json.dumps(plain_event(alarm.log, alarm.event) | {"text": text, "next": advice}, allow_nan=False)
    say(plain if as_json else f"{text}. Look next at {advice}.")
    if not command:
        return
    try:
        done = subprocess.run(
            command,
            shell=True,
            input=f"{plain}\n",
            text=True,
            capture_output=True,
            timeout=LONGEST_COMMAND,
            check=False,
        )
    except subprocess.TimeoutExpired:
        say(f"--on-alarm: stopped after {LONGEST_COMMAND:g} s", error=True)
        return
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()
        say(f"--on-alarm: exit code {done.returncode}{f', {words[-1]}' if words else ''}", error=True)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM, which a scheduler sends, ends as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
