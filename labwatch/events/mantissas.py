"""Mantissa bits of number formats, as an option gives them and as alarms name them."""

from __future__ import annotations

import re

from lab.core.errors import RequestError

FORMATS = {23: "fp32", 10: "fp16", 7: "bf16", 3: "E4M3", 2: "E5M2"}
FEWEST_BITS, MOST_BITS = 2, 23


def format_name(mantissa_bits: float) -> str:
    """The name of the format with this many stored mantissa bits."""
    return FORMATS.get(int(mantissa_bits)) or f"a format of {mantissa_bits:g} mantissa bits"


def mantissa_bits_of(text: str) -> int:
    """Stored mantissa bits from the text of an option.

    Raises:
        RequestError: the text is no whole number from 2 to 23.
    """
    if not re.fullmatch("[0-9]{1,2}", text) or not FEWEST_BITS <= int(text) <= MOST_BITS:
        known = ", ".join(f"{bits} {name}" for bits, name in FORMATS.items())
        raise RequestError(
            f"mantissa bits are a whole number from {FEWEST_BITS} to {MOST_BITS}, not {text!r}; known: {known}"
        )
    return int(text)
