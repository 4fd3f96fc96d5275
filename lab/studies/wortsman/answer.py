"""Quantities that answer questions about learning rates, logits and updates, and those for all other sweeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis import probe_values
from lab.analysis.contrasts import (
    ANY_SWEEP,
    NO_REFERENCE,
    Measures,
    by_rate,
    by_size,
    change_over_size,
    final_losses,
    of_curves,
    own_points,
    slope_over_size,
    valued,
)
from lab.analysis.grouping import ways_to_grow
from lab.analysis.sensitivity import HIGH, Study, compares_sensitivity

NATS, HIGHEST = "nats/token", np.inf


def _recorded(
    probe: str, ends: str = "", rate: float = HIGH, reduced_by: str = "late", *, decades: bool = True, **options: Any
) -> Callable[[Study], pd.DataFrame]:
    """A function that makes the points of a study, with a probe's value, at the highest learning rate up to ``rate``.

    Args:
        ends: the end of the name of the part of the model, of several the last; ``*`` takes the largest of all parts.
    """

    def points(study: Study) -> pd.DataFrame:
        places = [where for where in probe_values.places(study.records, probe) if ends == "*" or where.endswith(ends)]
        chosen = places if ends == "*" else places[-1:]
        values = [getattr(probe_values, reduced_by)(study.records, probe, where, **options) for where in chosen]
        if not values:
            return study.points.head(0)
        largest: pd.Series = pd.concat(values, axis=1).max(axis=1)
        return _up_to(rate, valued(study, np.log10(largest.where(largest > 0)) if decades else largest))

    return points


def _up_to(rate: float, points: pd.DataFrame) -> pd.DataFrame:
    top = points.loc[points["lr"] <= rate, "lr"].max()
    chosen: pd.DataFrame = points[points["lr"] == top]
    return chosen


def _top_losses(study: Study) -> pd.DataFrame:
    return _up_to(HIGHEST, final_losses(study))


def _beside_no_blocks(study: Study) -> pd.DataFrame:
    """Best losses by kappa and steps above models without blocks of the same width, steps and seed."""
    cards = study.records.runs.set_index("id").loc[study.points["id"]]
    if KAPPA not in cards:
        return study.points.head(0)
    keys = {"width": "model.width", "steps": "steps", "depth": "model.depth", "kappa": KAPPA}
    points = study.points.assign(**{name: cards[key].to_numpy() for name, key in keys.items()})
    points["value"] = points.groupby(["curve", "seed"])["capped"].transform("min")
    alone, pair = points[points["depth"] == 0], ["width", "steps", "seed"]
    without = alone.groupby(pair)["value"].mean().reindex(pd.MultiIndex.from_frame(points[pair])).to_numpy()
    names = [f"kappa {kappa:g}, {steps:g} steps" for kappa, steps in zip(points["kappa"], points["steps"], strict=True)]
    points = points.assign(value=points["value"] - without, arm=names).sort_values(["steps", "kappa"], kind="stable")
    return points[points["depth"] > 0]


KAPPA = "intervention.kappa_transplant.kappa"
MEASURES = Measures()
MEASURES.add(
    "Change of the best learning rate",
    "decades",
    change_over_size("log_best"),
    asked_by=("mup", "rms_scaled_lr"),
    pairs=("seed", "lr"),
)(own_points)
MEASURES.add(
    "Largest stable learning rate",
    "",
    of_curves("log_lost"),
    "higher",
    is_log=True,
    asked_by=("qk_layernorm", "architecture_arms", "decay_and_epsilon", "mup"),
)(own_points)
MEASURES.add("Best learning rate", "", of_curves("log_best"), is_log=True, asked_by=("decay_strength",))(own_points)
MEASURES.add("Largest attention logit, late in training", "", by_size, is_log=True, asked_by=("pointwise_attention",))(
    _recorded("attention_logit_max", "*")
)
MEASURES.add("Largest attention logit, a tenth into the run", "", by_size, is_log=True, asked_by=("logit_growth",))(
    _recorded("attention_logit_max", "*", 1e-2, "near", part=0.1)
)
MEASURES.add("Mean log² Z, late in training", "", by_size, "lower", is_log=True, asked_by=("output_logits",))(
    _recorded("log_z_square", rate=0.1)
)
MEASURES.add(
    "Mean log² Z, late in training",
    "",
    by_rate,
    "lower",
    is_log=True,
    asked_by=("output_logit_drift", "wide_output_logits"),
)(_recorded("log_z_square", rate=HIGHEST))
MEASURES.add(
    "RMS of the last gain, late in training",
    "",
    by_size,
    reference="batch size 2, weight decay 0, steps 2000 without fixed-gains or gain-lr",
    asked_by=("final_gain", "wide_output_logits"),
)(_recorded("param_rms", "final_norm", HIGHEST, decades=False))
MEASURES.add(
    "RMS of updates of the last block's first MLP layer",
    "",
    by_rate,
    is_log=True,
    asked_by=("stalled_block", "epsilon"),
)(_recorded("update_rms", ".mlp_up", HIGHEST))
MEASURES.add("Final loss", NATS, by_rate, "lower", asked_by=("epsilon", "rounded_logits"))(_top_losses)
MEASURES.add("Final loss", NATS, by_rate, "lower", reference="mantissa bits 23", asked_by=("mantissa_bits",))(
    _top_losses
)
MEASURES.add("Best loss", NATS, of_curves("best"), "lower", asked_by=("qk_norm_axis",))(own_points)
MEASURES.add("Best loss above that without blocks", NATS, by_size, reference=NO_REFERENCE, asked_by=("kappa",))(
    _beside_no_blocks
)
MEASURES.add("LR sensitivity", NATS, of_curves("total"), "lower", asked_by=("schedules",), affirmed_by="different")(
    own_points
)


@MEASURES.add(
    "LR sensitivity",
    "nats/token per decade",
    slope_over_size("total"),
    asked_by=("depth_width",),
    pairs=("seed", "lr"),
)
def _ways_to_grow(study: Study) -> pd.DataFrame:
    return ways_to_grow(study.records.runs, study.points)


@MEASURES.add("LR sensitivity", NATS, of_curves("total"), "lower", asked_by=(ANY_SWEEP,))
def _comparable_by_sensitivity(study: Study) -> pd.DataFrame:
    return study.points if compares_sensitivity(study) else study.points.head(0)


MEASURES.add("Best loss over learning rates", NATS, of_curves("best"), "lower", asked_by=(ANY_SWEEP,))(own_points)
