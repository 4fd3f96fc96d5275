"""Settings in the names of runs, as in ``clip/lr=0.01,seed=1`` or ``clip_lr0.01_seed1``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pandas as pd

from labwatch.tables.columns import AVERAGES, GLUED, QUANTITIES, USUAL_NAMES

PAIR = re.compile(r"([A-Za-z][\w.]*)=(.*?)(?=[_-][A-Za-z][\w.]*=|$)")  # lr=1e-3 of lr=1e-3_seed=1
WITH_ARM = re.compile(rf"(.+)_({'|'.join([*USUAL_NAMES['lr'], *USUAL_NAMES['seed']])})")  # clip_lr, for clip and lr
# Settings glued to their numbers, in names of which they are a part between signs: lr1e-3 of lr1e-3_seed1.
PARTED = r"(?<![A-Za-z0-9]){}(?![A-Za-z0-9]|\.\d)"
VALUE = r"(\d+(?:[.p]\d+)?(?:e-?\d+)?)"
GLUE = re.compile(PARTED.format(rf"({'|'.join(sorted(GLUED, key=len, reverse=True))})[_-]?{VALUE}"), re.IGNORECASE)
# What may mean something else unless every name has one: s1 for a seed, w64 for a width, and 124M for a size.
SHORT = {"s": "seed", "w": "width", "": "params"}
GLUE_OF_ALL = [re.compile(PARTED.format(form)) for form in (r"(s)(\d+)", r"(w)(\d+)", r"()(\d+(?:\.\d+)?[kmbKMB])")]
# ``lr: 3e-4`` and ``seed 1`` are ``lr=3e-4`` and ``seed=1``; and the number of ``lr=3e-4-s1`` ends before a word.
APART = re.compile(rf"(?<![A-Za-z0-9])({'|'.join(GLUED)})(?: *[:=] *| +(?=[.\d]))", re.IGNORECASE)
ENDED = re.compile(rf"((?<![A-Za-z0-9])(?:{'|'.join(GLUED)})={VALUE})[_-](?=[A-Za-z]\w*(?![\w.]*=))", re.IGNORECASE)
SEED = re.compile(r"[\W_]*(?<![a-z])(?:seed|s|run|#)[\s_=:-]*\d+[\W_]*|[(#]\d+\)?$")
AVERAGE = re.compile(rf"(?<![a-z])(?:{'|'.join(AVERAGES)})(?![a-z])(?:[ _](?:over|of|across)[ _].*)?|\u00b1")


def averages_of(names: pd.Series[str], has_seed: pd.Series[bool], *, is_of_seeds: bool) -> pd.Series[bool]:
    """Which names, or cells of a column of seeds, say that their row sums up the others of the name.

    ``lr=0.1 avg`` does beside ``lr=0.1 s1`` and ``lr=0.1 s2``; alone it is the name of a run, as it is with a seed.
    """
    lower = names.str.lower().str.strip()
    sums, is_seeded = lower.str.contains(AVERAGE), has_seed | lower.str.contains(SEED)
    if sums.all():
        return ~sums
    known = lower[is_seeded & ~sums].str.replace(SEED, " ", regex=True).map(_bare)
    rest = lower.str.replace(AVERAGE, "", regex=True).map(_bare)
    return sums & ((rest.isin(known) & ~is_seeded) | ((rest == "") & is_of_seeds))


def _bare(name: str) -> str:
    return " ".join(re.sub(r"[^a-z0-9.=+-]+", " ", name).strip(" -=").split())


def _key(name: str) -> str:
    return name.lower() if name.lower() in GLUED else name


def settings_in(names: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """The settings in the name of each run, and what else tells it from the others.

    ``clip/lr=0.01,seed=1`` has ``{lr: 0.01, seed: 1}`` and ``clip``, as ``clip_lr0.01_seed1`` has.
    """
    apart = [ENDED.sub(r"\1 ", APART.sub(r"\1=", name)) for name in names]
    parts = [re.split(r"[/,;&\s()\[\]]+", name) for name in apart]
    found = [{_key(key): value for part in of_name for key, value in PAIR.findall(part)} for of_name in parts]
    rests = [[PAIR.sub("", part) for part in of_name] for of_name in parts]
    shared = set.intersection(*map(set, found)) if found else set()
    for pairs, rest in zip(found, rests, strict=True):
        for key in [*pairs]:
            match = WITH_ARM.fullmatch(key)
            if match and match[2] not in pairs and not (key in shared and key in QUANTITIES):
                pairs[match[2]] = pairs.pop(key)
                rest.append(match[1])
    for pattern in (GLUE, *GLUE_OF_ALL):
        glued = [[match for part in rest for match in pattern.findall(part)] for rest in rests]
        counts = [len(matches) for matches in glued]
        # a sweep whose names hold rates may have a baseline of no seed
        is_of_rates = pattern is GLUE_OF_ALL[0] and sum(counts) > 1 and all("lr" in pairs for pairs in found)
        if pattern is GLUE or (max(counts, default=0) == 1 and (min(counts) == 1 or is_of_rates)):
            rests = [[pattern.sub("", part) for part in rest] for rest in rests]
            for pairs, matches in zip(found, glued, strict=True):
                for key, value in matches:
                    pairs.setdefault({**GLUED, **SHORT}[key.lower()], re.sub(r"(?<=\d)p(?=\d)", ".", value))
    words = [[word for part in rest if (word := re.sub(r"[_-]*[_-]", "_", part).strip("_"))] for rest in rests]
    alike = set.intersection(*map(set, words)) if words else set()
    own = [[word for word in of_name if word not in alike] for of_name in words]
    told = own if all(own) else words
    return [
        ({key: number_or_word(value) for key, value in pairs.items()}, " ".join(rest))
        for pairs, rest in zip(found, told, strict=True)
    ]


def number_or_word(value: Any) -> Any:
    """A number or a boolean as it is, and one in text as a number; else the text."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and "e" not in value.lower() else number
