"""Measures in the numbers of public runs the limits that come with the package, as ``risks.yaml`` describes them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import public_limits
from lab.analysis.laws.brackets import PowerLaw
from lab.core import shipped
from lab.features.predict.limits import FILE, Limit

KINDS: Mapping[str, Callable[..., Limit]] = {
    "failing_rate": public_limits.failing_rate,
    "shortest_warm_up": public_limits.shortest_warm_up,
    "rounding_cost": public_limits.rounding_cost,
}


def limits_text() -> str:
    """The content of the file of limits."""
    found = {name: measure(entry) for name, entry in shipped.load(FILE.with_name("risks.yaml"))["limits"].items()}
    lines = [
        f"{name}: {_flow({key: each for key, each in vars(limit).items() if each})}" for name, limit in found.items()
    ]
    return "\n".join(["# Written by `make results-readme` from studies/real_runs.", *lines, ""])


def measure(entry: Mapping[str, Any]) -> Limit:
    """The limit that an entry of ``risks.yaml`` describes.

    Its first key names how it is measured, a key of ``KINDS``; the others are arguments of that function.
    """
    (kind, of), *others = entry.items()
    return KINDS[kind](of, **dict(others))


def _flow(value: Any) -> str:
    """A value in the flow style of YAML, which takes a number with an exponent for text unless it has a point."""
    if isinstance(value, PowerLaw):
        value = value._asdict()
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_flow(each)}' for key, each in value.items())}}}"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_flow, value))}]"
    if not math.isfinite(value):
        return f"{'-' * (value < 0)}.{'inf' if math.isinf(value) else 'nan'}"
    text = f"{value:.6g}"
    return text if "." in text else text.replace("e", ".0e")
