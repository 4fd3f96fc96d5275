"""Draw ``terminal.svg``: what ``lab sweep quickstart`` shows in a terminal halfway.

``python docs/terminal.py`` trains the sweep anew, into a folder that is removed afterwards.
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

COMMAND = ("sweep", "quickstart")
COLUMNS = 80  # so that the letters can be read on a telephone
DRAWING = Path(__file__).with_name("terminal.svg")
# How a live display is erased before it is drawn again, and what switches the cursor.
ERASED, CURSOR = re.compile(r"\r?(?:\x1b\[2K(?:\x1b\[1A)?|\r?\x1b\[1A)+"), re.compile(r"\x1b\[\?25[hl]")


def shown_by(arguments: tuple[str, ...], folder: str) -> str:
    """All that the lab writes to a terminal while it carries these out in a folder."""
    written: list[bytes] = []

    def read(descriptor: int) -> bytes:
        written.append(os.read(descriptor, 65536))
        return written[-1]

    os.environ |= {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    os.chdir(folder)
    pty.spawn([str(Path(sys.executable).with_name("lab")), *arguments], read)
    return b"".join(written).decode().replace("\r\n", "\n")


def halfway(text: str) -> str:
    """The first display that says 50 % or more."""
    frames = [frame.strip("\n") for frame in ERASED.split(CURSOR.sub("", text))]
    displays = [frame for frame in frames if re.match(r" *\d+%", frame)]
    return next(frame for frame in displays if int(frame.split("%")[0]) >= 50)


def draw(display: str) -> str:
    """The drawing, as SVG that loads no font."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ lab {' '.join(COMMAND)}", style="bold"), Text.from_ansi(display), sep="\n")
    svg = console.export_svg(title="instability-lab", theme=MONOKAI)
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        shown = shown_by(COMMAND, folder)
    DRAWING.write_text(draw(halfway(shown)), encoding="utf-8")
