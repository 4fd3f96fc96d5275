"""The usage, the help and the option parsers of commands, made from the table in usage.yaml."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from lab.core import shipped
from lab.core.errors import RequestError, nearest

COLUMN = 52  # where meanings begin in the usage


class Command(NamedTuple):
    """One command.

    Attributes:
        takes: the arguments that must or may follow the name of the command.
        does: the purpose of the command, in half a sentence.
        example: the arguments of an example.
        options: the meaning of each option, by its form, such as ``--margin PERCENT``; the form shows its values.
    """

    takes: str
    does: str
    example: str
    options: Mapping[str, str] = {}

    @property
    def parsed_options(self) -> dict[str, list[str]]:
        """The values that each option takes, by its name; three dots end the value of an option that may be repeated.

        Overrides such as ``out=DIR`` are left out, since Hydra parses them.
        """
        words = (form.split() for form in self.options if form.startswith("--"))
        return {option: values for option, *values in words}


_TABLE = shipped.load(Path(__file__).with_suffix(".yaml"))


def _command(takes: str, does: str, example: str, options: Mapping[str, str | None]) -> Command:
    return Command(takes, does, example, {form: text or _TABLE["shared"][form] for form, text in options.items()})


COMMANDS = {word: _command(**entry) for word, entry in _TABLE["commands"].items()}
FORMER: dict[str, str] = _TABLE["former"]  # words that were commands, and the command that each is part of now
NOTE = (
    "lab COMMAND --help says what a command takes, with an example; lab train --help shows every key.",
    'Tab completion: eval "$(lab -sc install=bash)"',
)


def overview() -> str:
    """One or two lines for each command, and the notes."""
    return "\n".join(
        [*_rows({f"lab {word} {command.takes}": command.does for word, command in COMMANDS.items()}), "", *NOTE]
    )


def command_help(word: str) -> str:
    """The help of a command: its arguments, its purpose, its options and an example."""
    command = COMMANDS[word]
    lines = [f"lab {word} {command.takes}{' [OPTION ...]' * bool(command.options)}", "", f"  {command.does}", ""]
    options = [f"  {row}" for row in _rows(command.options)]
    return "\n".join([*lines, *options, *[""] * bool(options), f"example: lab {word} {command.example}"])


def _rows(meanings: Mapping[str, str]) -> Iterator[str]:
    column = min(COLUMN, max(map(len, meanings), default=0) + 2)
    for form, meaning in meanings.items():
        if len(form) + 2 > column:
            yield form
        yield f"{'' if len(form) + 2 > column else form:{column}}{meaning}"


class OptionParser(argparse.ArgumentParser):
    """Parser of the folders and options of a command; its errors are one line each, instead of a usage."""

    def __init__(self, word: str) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.options = COMMANDS[word].parsed_options
        self.add_argument("folders", nargs="*", type=Path)
        for option, values in self.options.items():
            if len(values) > 1:
                self.add_argument(option, nargs=len(values))
            elif values and values[0].endswith("..."):
                self.add_argument(option, type=_nonempty, action="append", default=[])
            elif values:
                self.add_argument(option, type=_nonempty)
            else:
                self.add_argument(option, action="store_true")

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Read arguments, in any order.

        Raises:
            RequestError: an option is unknown, lacks its value, or takes none.
        """
        values, unknown = self.parse_known_intermixed_args(arguments)
        if unknown:
            option = unknown[0].partition("=")[0]
            raise RequestError(f"unknown option {option!r}; {nearest(option, self.options)}")
        return values

    def error(self, message: str) -> NoReturn:
        option, _, reason = message.removeprefix("argument ").partition(": ")
        if reason.startswith("ignored explicit argument"):
            raise RequestError(f"{option} takes no value")
        raise RequestError(f"{option} wants {'two learning rates, LOW HIGH' if option == '--window' else 'a value'}")


def _nonempty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected one argument")
    return text
