"""Failures of the user's own code in a line: what they raised, and at which line of which of their files."""

from __future__ import annotations

import inspect
import linecache
import sysconfig
import traceback
from pathlib import Path
from typing import Any

from lab.core.errors import RequestError

OWN_CODE = "own code fails"  # how the reason of a run begins that failed so
LAB = Path(__file__).parents[1]
INSTALLED = {"site-packages", "dist-packages"}
LONGEST_MESSAGE = 300  # characters


class OwnCodeError(RequestError):
    """Code of the user's own raised an exception, or does what no fleet can train."""


def own_failure(fault: BaseException, own: Any) -> str:
    """An exception of the user's own code, after what failed: `` at mine.py:12: ValueError: no forward``.

    Args:
        fault: the exception.
        own: the class, the function or the module that raised it.
    """
    text = fault.msg if isinstance(fault, SyntaxError) else str(fault)  # without its place again
    message = " ".join(text.split())[:LONGEST_MESSAGE]
    place = place_in_own_code(fault, own) or place_of_definition(own)
    return f"{place and f' at {place}'}: {type(fault).__name__}{message and ': '}{message}"


def place_in_own_code(fault: BaseException, own: Any) -> str:
    """``FILE:LINE`` where an exception passed through code of the user's own; empty where it did not.

    It is the innermost line in the file of ``own``, or else in any file that is neither the lab's nor installed.
    """
    if isinstance(fault, SyntaxError) and fault.filename and Path(fault.filename).is_file():
        return f"{_shown(fault.filename)}:{fault.lineno}"
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(fault.__traceback__)][::-1]
    file = source_file(own)
    inside = [frame for frame in frames if frame[0] == file] or [frame for frame in frames if _is_users(*frame)]
    return f"{_shown(inside[0][0])}:{inside[0][1]}" if inside else ""


def defined_at(own: Any) -> str:
    """`` (FILE:LINE)`` where a class or a function is defined, after what is wrong with it; empty as below."""
    place = place_of_definition(own)
    return f" ({place})" if place else ""


def place_of_definition(own: Any) -> str:
    """``FILE:LINE`` where a class or a function is defined; empty where no file of others than the lab says so."""
    try:
        file, line = source_file(own), inspect.getsourcelines(own)[1]
    except (OSError, TypeError):
        return ""
    return f"{_shown(file)}:{line}" if file else ""


def source_file(own: Any) -> str:
    """The file in which a class, a function or a module is defined; empty where there is none, or it is the lab's."""
    try:
        file = inspect.getsourcefile(own) or ""
    except (OSError, TypeError):  # defined in a cell or at a prompt, or built in
        return ""
    # of the program, such as a notebook's, that runs a cell
    if getattr(own, "__module__", "") == "__main__" and is_installed(file):
        return ""
    return "" if Path(file).is_relative_to(LAB) else file


def is_installed(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to the lab."""
    is_inside = any(Path(file).is_relative_to(house) for house in (sysconfig.get_path("stdlib"), LAB))
    return is_inside or bool(INSTALLED & {*Path(file).parts})


def _is_users(file: str, line: int) -> bool:
    """Whether a line is the user's, of a file or of a cell of a notebook."""
    return bool(linecache.getline(file, line)) and not is_installed(file)


def _shown(file: str) -> str:
    """A file for readers, from the current folder on if it lies inside."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
