"""The law of rounded logits: the loss that a number format adds to a model whose output logits drift."""

from __future__ import annotations

import re

import numpy as np
import scipy  # its parts are loaded when they are used
from numpy.typing import ArrayLike, NDArray

from lab.core.errors import RequestError

# Stored bits of the mantissa by name of the format.
MANTISSA_BITS = {"fp32": 23, "fp16_emulated": 10, "bf16": 7}
BF16 = MANTISSA_BITS["bf16"]
RESULTS_IN_FP32 = ("fp8_current", "fp8_delayed", "mxfp8", "mxfp4", "nvfp4")  # precisions that round operands alone
# Nats per token that rounding may cost.
COSTLY = 0.01
FORMATS = {23: "fp32", 10: "fp16", 7: "bf16", 3: "E4M3", 2: "E5M2"}
FEWEST_BITS, MOST_BITS = 2, 23


def spacing(level: ArrayLike, mantissa_bits: ArrayLike) -> NDArray[np.float64]:
    """Distance between neighbouring numbers, near a level, of a format with this many stored mantissa bits.

    ``s = 2 ** (floor(log2 |level|) - mantissa_bits)``; a level of 0 has spacing 0.
    """
    level, bits = np.abs(np.asarray(level, dtype=float)), np.asarray(mantissa_bits)
    with np.errstate(divide="ignore"):
        exponent = np.floor(np.log2(level))
    return np.asarray(np.exp2(exponent - bits))


def rounding_cost(level: ArrayLike, mantissa_bits: ArrayLike) -> NDArray[np.float64]:
    """Loss that rounding adds to a token whose logits lie near a level, nats.

    A logit that is rounded to a multiple of ``s`` has an error that is uniform between ``-s/2`` and ``s/2``. The mean
    over the vocabulary of the exponentials of these errors is ``sinh(s/2) / (s/2)``. It multiplies the softmax
    normalizer, and its log is added to the loss: ``s**2 / 24`` for small ``s``. There is no free parameter. The cost is
    smaller only if one token takes nearly all of the probability: the normalizer's error then cancels the target's.
    """
    half = spacing(level, mantissa_bits) / 2
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        # log sinh(x) without overflow; its series for small x, where the difference would cancel
        large = half - np.log(2 * half) + np.log1p(-np.exp(-2 * half))
    return np.where(half < 1e-2, half**2 / 6, large)


def level_at_cost(cost: float, mantissa_bits: int) -> float:
    """The smallest power of two at which rounding logits to this format costs at least ``cost`` nats per token."""
    size = scipy.optimize.brentq(lambda log2: float(rounding_cost(2.0**log2, 0)) - cost, -20, 20)
    return float(2.0 ** (round(size) + mantissa_bits))  # the cost jumps at powers of two, so the root is a whole number


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
