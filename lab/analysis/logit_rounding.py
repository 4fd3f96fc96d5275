"""The law of rounded logits: the loss that a number format adds to a model whose output logits drift."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
from numpy.typing import ArrayLike, NDArray

from lab.analysis.probe_values import near
from lab.core import files
from lab.records.store import RUN_COLUMNS, Records

# Stored bits of the mantissa by name of the format.
MANTISSA_BITS = {"fp32": 23, "fp16_emulated": 10, "bf16": 7}
BF16 = MANTISSA_BITS["bf16"]
RESULTS_IN_FP32 = ("fp8_current", "fp8_delayed", "mxfp8", "mxfp4", "nvfp4")  # precisions that round operands alone
# Nats per token that rounding may cost.
COSTLY = 0.01
# Quantiles of a normal distribution over tokens; the mean over them approximates the integral.
QUANTILES = 1999
PUBLISHED = Path(__file__).with_name("published_output_logits.csv")


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


def mean_rounding_cost(mean: ArrayLike, std: ArrayLike, mantissa_bits: ArrayLike) -> NDArray[np.float64]:
    """``rounding_cost`` over tokens whose levels are normal with this mean and standard deviation, nats per token."""
    mean, std, bits = (np.asarray(each, dtype=float)[..., None] for each in (mean, std, mantissa_bits))
    quantile_q = scipy.special.ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)
    return np.asarray(rounding_cost(mean + std * quantile_q, bits).mean(-1))


def level_at_cost(cost: float, mantissa_bits: int) -> float:
    """The smallest power of two at which rounding logits to this format costs at least ``cost`` nats per token."""
    size = scipy.optimize.brentq(lambda log2: float(rounding_cost(2.0**log2, 0)) - cost, -20, 20)
    return float(2.0 ** (round(size) + mantissa_bits))  # the cost jumps at powers of two, so the root is a whole number


def rounded_runs(records: Records) -> pd.DataFrame:
    """Runs whose products are rounded and that have a twin in fp32, equal in everything else; indexed by run id.

    Columns: ``mantissa_bits``; ``harm``, the final held-out loss minus the twin's, not capped at initialization;
    ``law``, the ``mean_rounding_cost`` of the final mean and spread over tokens of log Z. Harm and law are in nats per
    token. The table is empty if runs did not record ``val_loss``, ``log_z`` and ``log_z_std``.
    """
    runs = records.runs.set_index("id")
    bits = runs["precision"].map(MANTISSA_BITS)
    if "mantissa_bits" in runs:
        bits = bits.fillna(runs["mantissa_bits"].where(runs["precision"] == "mantissa"))
    last = {probe: near(records, probe, "", part=1.0) for probe in ("val_loss", "log_z", "log_z_std")}
    if any(values.empty for values in last.values()):
        return pd.DataFrame(columns=["mantissa_bits", "harm", "law"])
    table = pd.DataFrame({"mantissa_bits": bits, **last})
    rest = [name for name in runs if name not in (*RUN_COLUMNS, "precision", "mantissa_bits")]
    twin = pd.Series([repr(row) for row in runs[["intervention", *rest]].to_numpy().tolist()], runs.index)
    table["val_loss"] = table["val_loss"].where(runs["final_val_loss"].notna())
    exact = table["mantissa_bits"] == MANTISSA_BITS["fp32"]
    exact_loss = dict(zip(twin[exact], table["val_loss"][exact], strict=True))
    table = table[~exact & twin.isin(set(exact_loss))].dropna()
    table["harm"] = table["val_loss"] - twin[table.index].map(exact_loss).astype(float)
    table["law"] = mean_rounding_cost(table["log_z"], table["log_z_std"], table["mantissa_bits"])
    return table[["mantissa_bits", "harm", "law"]]


@cache
def published() -> pd.DataFrame:
    """Published runs of 16 to 221 million parameters in bf16, a row each.

    Columns: ``size`` (parameters) and ``lr``; ``mean_logit`` and its ``mean_logit_std_over_tokens``;
    ``loss_minus_mu_centering``: the final loss minus the loss with a centred head, in which logits stay small, in
    nats per token.

    References:
        arXiv:2601.02031, repository flxst/output-embedding-centering, ``loss_overview_all.csv``: baseline without
        z-loss, 1e5 steps, one seed.
    """
    return files.read_csv(PUBLISHED, comment="#")
