"""Tab completion: sub-commands and sweep names here, keys and groups by Hydra."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from lab import app, catalogue, request


def answer(arguments: Sequence[str], sub_commands: Sequence[str]) -> Sequence[str]:
    """The words that may come next; or, where keys are asked for, let Hydra print them (``install=bash``, too)."""
    line = os.environ.get("COMP_LINE", "")
    words, fresh = line.split(), line.endswith(" ")
    place = len(words) if fresh else len(words) - 1
    if "query=" in " ".join(arguments):
        if place == 1:
            return sub_commands
        if place == 2 and words[1] in ("sweep", "list"):
            return list(request.sweeps() if words[1] == "sweep" else catalogue.SHELVES)
        if place < 1 or words[1] not in ("sweep", "train", "coordcheck"):
            return []
        own = 3 if words[1] == "sweep" else 2
        os.environ["COMP_LINE"] = " ".join([words[0], *words[own:]]) + " " * fresh
    sys.argv = ["lab", *arguments]
    app.hydra_main()
    return []
