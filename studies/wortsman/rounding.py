"""Runs whose output logits were rounded, beside the law of what that costs."""

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
from labwatch.events.logit_rounding import MANTISSA_BITS, rounding_cost

# Quantiles of a normal distribution over tokens; the mean over them approximates the integral.
QUANTILES = 1999
PUBLISHED = Path(__file__).with_name("published_output_logits.csv")


def mean_rounding_cost(mean: ArrayLike, std: ArrayLike, mantissa_bits: ArrayLike) -> NDArray[np.float64]:
    """``rounding_cost`` over tokens whose levels are normal with this mean and standard deviation, nats per token."""
    mean, std, bits = (np.asarray(each, dtype=float)[..., None] for each in (mean, std, mantissa_bits))
    quantile_q = scipy.special.ndtri((np.arange(QUANTILES) + 0.5) / QUANTILES)
    return np.asarray(rounding_cost(mean + std * quantile_q, bits).mean(-1))


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
