"""Config trees for properties: any value that each field of each registered entry allows."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, get_type_hints

from hypothesis import strategies as st

from lab import PerRun, PerRunSeed, RunConfig
from lab.core.registry import DATA, INTERVENTIONS, LINKS, PARAMETRIZATIONS, PROBES, SCHEDULES, TRACKERS
from lab.core.roles import TUNABLE_ROLES
from lab.training.checkpoint import CheckpointConfig
from lab.training.config import LOW_PRECISIONS
from lab.training.rules import SWITCHES
from small import tree

MOST = 2**53  # of what not all runs have, a table keeps no larger whole number exact
RULES = [[name] for name in LINKS if LINKS[name].takes == ("gradient",) and LINKS[name].makes == "direction"]
words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def of_field(kind: type, field: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    """Values that a field allows, its edges among them."""
    hint = get_type_hints(kind, include_extras=True)[field.name]
    hint = {PerRun: float, PerRunSeed: int}.get(hint, hint)
    bounds = field.metadata
    above, least, below, most = (bounds.get(name) for name in ("above", "at least", "below", "at most"))
    if hint is int:
        low = least if above is None else above + 1
        high = below - 1 if below is not None else MOST if most is None else most
        return st.integers(low, high) | st.sampled_from([low, high])
    if hint is float:
        low = least if above is None else above
        high = (math.inf if bounds.get("infinite") else sys.float_info.max) if below is most is None else below or most
        ends = {"exclude_min": above is not None, "exclude_max": below is not None}
        floats = st.floats(low, high, allow_nan=False, allow_subnormal=False, **ends)
        return floats | st.sampled_from([high * 0.5, low + sys.float_info.min])
    if "choices" in bounds:
        return st.sampled_from(bounds["choices"])
    return words if hint is str else st.none() | words


def entry(kind: type) -> st.SearchStrategy[dict[str, Any]]:
    """All fields of an entry."""
    return st.fixed_dictionaries({field.name: of_field(kind, field) for field in dataclasses.fields(kind)})


def named(registry: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any entry of a registry under its name."""
    return st.sampled_from(list(registry)).flatmap(
        lambda name: entry(registry[name]).map(lambda values: {"name": name, **values})
    )


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """The tree of a run that makes sense."""
    made = deepcopy(tree())
    heads, half = draw(st.integers(1, 2**20)), draw(st.integers(1, 2**20))
    shape = {"width": 2 * heads * half, "head_width": 2 * half, "depth": draw(st.integers(0, MOST))}
    made["model"] = {"name": draw(words), **shape}
    for group, registry in {
        "parametrization": PARAMETRIZATIONS,
        "schedule": SCHEDULES,
        "data": DATA,
        "tracker": TRACKERS,
    }.items():
        made[group] = draw(named(registry))
    drawn = draw(st.lists(st.sampled_from(list(INTERVENTIONS)), unique=True))
    on = [name for name in drawn if not {*drawn} & {*getattr(INTERVENTIONS[name], "excludes", ())}]
    on = [name for name in on if {*getattr(INTERVENTIONS[name], "requires", ())} <= {*on}]
    made["intervention"] = {name: draw(entry(INTERVENTIONS[name])) for name in on}
    if experts := made["intervention"].get("experts"):  # a token has at most all, and an expert a place for one
        experts["top_k"] = min(experts["top_k"], experts["number"])
        experts["capacity"] = max(experts["capacity"], float(experts["number"]))
    clips = draw(st.sampled_from([[], ["clip"], ["clip_relative"], ["shrink_embedding"], ["adagc"], ["zclip"]]))
    rules = draw(st.sampled_from([*RULES, [], ["adam", "clip_update"], ["muon", "adam"], ["muon", "lion", "cautious"]]))
    first = [*clips, *rules]
    between = draw(st.lists(st.sampled_from(["decay", "decay_lr_squared", "rms_scale", "lr_factor"]), unique=True))
    after = draw(st.permutations(["schedule", *between]))
    coupled = draw(st.integers(0, after.index("schedule"))) if rules else 0  # how many precede the peak
    chain = [*first, *after[:coupled], "peak", *after[coupled:]]
    made["optimizer"] = {"name": draw(words), "chain": list(chain)}
    for link in chain:
        made["optimizer"] |= draw(entry(LINKS[link]))
    if draw(st.booleans()):
        made["optimizer"][draw(st.sampled_from(TUNABLE_ROLES))] = {"lr": draw(st.floats(1e-9, 1e9))}
    possible = [name for name in PROBES if name != "noise_scale"]  # which takes micro-batches
    names = draw(st.lists(st.sampled_from(possible), unique=True))
    made["probes"] = {"name": draw(words), "every": draw(st.integers(1, MOST)), "names": names}
    made["checkpoint"] = draw(entry(CheckpointConfig))
    made["scale"]["name"] = draw(words)
    if "learned_positions" in on:
        made["intervention"]["learned_positions"]["positions"] = 2**62  # windows are not longer
    plain = [field for field in dataclasses.fields(RunConfig) if field.metadata or field.name == "out"]
    drawn = {field.name: draw(of_field(RunConfig, field)) for field in plain}
    for factor, most in {"steps": 2**19, "batch_size": 2**17, "seq_len": 2**17}.items():
        drawn[factor] = min(drawn[factor], most)  # their product, the tokens, is MOST at most
    if drawn["precision"] in ("fp32", *LOW_PRECISIONS):  # without a master copy weights have the format of products
        drawn["master_weights"] = "fp32"
    if drawn["precision"] not in LOW_PRECISIONS:
        drawn |= SWITCHES
    if drawn["precision"] in ("mxfp4", "nvfp4"):  # they have one format of gradients
        drawn["gradient_format"] = SWITCHES["gradient_format"]
    drawn["mantissa_bits"] = float(draw(st.integers(2, 23))) if drawn["precision"] == "mantissa" else 0.0
    drawn["gradient_sum"] = "fp32"  # others take micro-batches and a loss scale
    return made | drawn


@st.composite
def shuffled(draw: st.DrawFn, value: Any) -> Any:
    """The same tree, its keys in another order."""
    if not isinstance(value, Mapping):
        return value
    return {key: draw(shuffled(value[key])) for key in draw(st.permutations(list(value)))}
