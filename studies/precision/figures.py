"""Figures of low precision: what rounds to zero or saturates as runs go on, and spikes by loss scale."""

from __future__ import annotations

import pandas as pd

from lab.analysis.drawing.registry import NothingToDrawError, figure
from lab.analysis.drawing.series import ProbeSeries, over_steps
from lab.analysis.probe_values import late
from lab.analysis.rendering import panels
from lab.analysis.rendering.hover import Quantity
from lab.analysis.rendering.layout import Sheet
from lab.analysis.text import format_value
from lab.records.store import Records
from studies.claims import row_panels
from studies.claims.row_panels import RowPanel
from studies.precision.effects import FIRST, LATE_PART, has_loss_scales, scale_exponent, spike_rate

SHARES = (-0.03, 1.03)
SPIKES, ZEROS = Quantity("loss spikes in 1000 updates", ""), Quantity("share of gradients that are zero", "")
COUNTED = (RowPanel("spikes", SPIKES.name, SPIKES), RowPanel("zeros", "share of gradients\nthat are zero", ZEROS))


@figure("rounding_faults")
def rounding_faults(records: Records, runs: pd.DataFrame) -> Sheet:
    """What low precision loses, against step: gradients, saturated entries, and gains that share a number.

    The first row is the largest share, over products, of a gradient's entries that round to zero. The second is the
    largest share of an operand's entries beyond the largest number of its format. The third is the largest share of the
    gains of a norm that MXFP8 would round to one number, whether gains are rounded or not. Means over seeds, one line
    per learning rate; arms with qk-layernorm are left out if there are others.
    """
    has_qk = records.runs["intervention"].astype(str).str.contains("qk_layernorm", regex=False)
    without = runs[runs["id"].isin(records.runs.loc[~has_qk, "id"])]
    rows = [
        ProbeSeries("gradient_underflow", None, "gradients that\nround to zero", "linear"),
        ProbeSeries("saturation", None, "saturated\nentries", "linear"),
        ProbeSeries("gain_code", None, "gains with\none number", "linear"),
    ]
    rounds = set(records.metrics.loc[records.metrics["probe"] == rows[0].probe, "id"])
    drawn = without if set(without["id"]) & rounds else runs
    return over_steps(records, drawn[drawn["id"].isin(rounds)], rows)


@figure("spikes_by_loss_scale")
def spikes_by_loss_scale(records: Records, runs: pd.DataFrame) -> Sheet:
    """How often the loss spikes at each constant loss scale, and how many gradients of the first block are zero.

    Spikes are counted at each update, in runs without bad data. Gradients are those of the first block's queries as
    they reach the optimizer, a mean over the run but for its first fifth. Bars are 95 % intervals over seeds.
    """
    if not has_loss_scales(records.runs):
        raise NothingToDrawError("nothing to draw: runs do not differ in a constant loss scale")
    cards = records.runs.set_index("id")
    table = runs.set_index("id").assign(
        exponent=scale_exponent(records.runs),
        spikes=spike_rate(records),
        zeros=late(records, "zero_gradients", FIRST, LATE_PART),
        precision=cards["precision"],
        eps=cards["optimizer.eps"],
    )
    table = table.reset_index()
    if table["spikes"].isna().all():
        raise NothingToDrawError("nothing to draw: no run tells its loss spikes")
    exponents = sorted(table["exponent"].dropna().unique(), reverse=True)
    names = [f"loss scale 2^{exponent:g}" for exponent in exponents]
    table["name"] = table["exponent"].map(dict(zip(exponents, names, strict=True)))
    table = table.sort_values(["precision", "eps"], kind="stable")
    table["arm"] = table["precision"] + ", epsilon " + table["eps"].map(format_value)
    looks = panels.arm_looks(table["arm"].unique())
    sheet = row_panels.grouped_rows(table, COUNTED, names, "arm", looks)
    sheet.figure.axes[1].set_xlim(*SHARES)
    sheet.keys(("arm", panels.arm_keys(looks, linestyle="")))
    return sheet
