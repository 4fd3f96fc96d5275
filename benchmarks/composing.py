"""How long do the configs of the quickstart take, composed by the lab and by Hydra?

``python benchmarks/composing.py`` composes them by turns, and Hydra's once with files read at every point, as it does,
and once with files read once.  It prints seconds per point, medians of the turns, and how often the lab's fits in.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from statistics import median
from typing import Any
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource

from lab.core.shipped import data_folder
from lab.sweeping import launch
from lab.sweeping.request import find_sweep, read_request

TURNS, POINTS = 5, 20  # of Hydra, each turn
WORDS = ["model=d64", "optimizer.lr=1e-2"]


def by_the_lab() -> float:
    """Seconds per point of the quickstart."""
    request = read_request([], "lab sweep quickstart", name="quickstart", sweep=find_sweep("quickstart"))
    began = time.perf_counter()
    points = len([*launch.compose(request).trees])
    return (time.perf_counter() - began) / points


def by_hydra() -> float:
    """Seconds per point."""
    began = time.perf_counter()
    with initialize_config_dir(str(data_folder("conf").absolute()), version_base=None):
        for seed in range(POINTS):
            compose("config", overrides=[*WORDS, f"seed={seed}"])
    return (time.perf_counter() - began) / POINTS


def by_hydra_with_files_read_once() -> float:
    """Seconds per point, where Hydra gets copies of files that were read before."""
    load = FileConfigSource.load_config
    read: Callable[..., Any] = cache(lambda folder, path: load(FileConfigSource("lab", folder), path))

    def copied(self: FileConfigSource, config_path: str) -> Any:
        return deepcopy(read(f"file://{self.path}", config_path))

    with patch.object(FileConfigSource, "load_config", copied):
        by_hydra()
        return by_hydra()


def main() -> None:
    """Measure and print."""
    ways = (by_the_lab, by_hydra, by_hydra_with_files_read_once)
    seconds = [[way() for way in ways] for _ in range(TURNS)]
    for way, times in zip(ways, zip(*seconds, strict=True), strict=True):
        ratio = median(each / of_the_lab for each, (of_the_lab, *_) in zip(times, seconds, strict=True))
        print(f"{way.__name__.replace('_', ' ')}: {1e3 * median(times):.1f} ms, {ratio:.1f} times")


if __name__ == "__main__":
    main()
