"""What holds of every config and sweep: a config survives its record, an id is what it says, no point is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lab import run_config
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.sweeping.compose import expand, parse
from lab.training.identity import run_id
from lab.training.rules import SWITCHES
from small import tree

# The documentation's list: keys that two runs which are one may differ in.
COSMETIC = ("out", "device", "engine", "ranks", "checkpoint.", "tracker.", "model.name", "scale.")


def parsed(words: list[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(words))


def test_the_order_of_keys_and_probes_is_no_part_of_an_id() -> None:
    one = tree()
    other = dict(reversed(one.items()))
    other["probes"] = {**dict(reversed(one["probes"].items())), "names": one["probes"]["names"][::-1]}
    assert run_id(run_config(other), "text") == run_id(run_config(one), "text")
    assert run_config(json.loads(json.dumps(one))) == run_config(one), "as a frozen plan keeps it"


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a tree by its dotted key; a list is one."""
    if not isinstance(values, Mapping):
        return {prefix: values}
    parts = (flat(value, f"{prefix}.{key}" if prefix else key) for key, value in values.items())
    return {key: value for part in parts for key, value in part.items()}


def test_there_is_one_zero() -> None:
    assert len({run_id(run_config(tree(f"optimizer.weight_decay={zero}")), "text") for zero in ("0", "-0.0")}) == 1


SWITCHED = (
    *("e4m3", "gradients", "rounded", "ends", "same", "noise"),
    *("width", "none", "xavier", "qkv", "gelu", "rmsnorm", "sigmoid", "normalized"),
)
LINK_WORDS = ("twelve", "spectral", "query_key")


def changed(value: Any) -> list[Any]:
    """Other values, one of which makes sense in the place of this one."""
    if isinstance(value, list):
        return [value[:-1], ["val_loss"]]
    if isinstance(value, str):
        return [
            f"{value}x",
            "bpe",
            "bf16",
            "fsdp",
            "cpu",
            "eager",
            "short",
            "tokens",
            "sinusoidal",
            *LINK_WORDS,
            *SWITCHED,
        ]
    return ["x"] if value is None else [2 * value, value / 2, value + 1, 0.5]


def another(one: dict[str, Any], key: str, value: Any) -> dict[str, Any] | None:
    """The tree with one leaf changed, if that makes sense."""
    for new in changed(value):
        other = deepcopy(one)
        *path, last = key.split(".")
        place = other
        for step in path:
            place = place[step]
        place[last] = new
        try:
            run_config(other)
        except RequestError:
            continue
        if new != value:
            return other
    return None


# By group: none, numbers of a format, a schedule, data, and an intervention with numbers of its own.
CHOICES = [
    (),
    ("precision=mxfp8",),
    ("optimizer=muon",),
    ("optimizer=schedule_free", "schedule=constant"),
    ("schedule=wsd",),
    ("data=mixture",),
    ("intervention=[experts,balance]",),
    ("probes=all",),
]


@pytest.mark.parametrize("choice", CHOICES, ids="".join)
def test_every_leaf_is_in_the_id_or_known_not_to_be(choice: tuple[str, ...]) -> None:
    """Of a choice the leaves that it brings or sets; the others are those of the default."""
    one = tree(*choice)
    usual = flat(tree()) if choice else {}
    before, unchanged = run_id(run_config(one), "text"), []
    for key, value in flat(one).items():
        if key in usual and usual[key] == value and not (key in SWITCHES and "precision=mxfp8" in choice):
            continue
        other = another(one, key, value)
        if other is None:  # a name out of a list, or the shape, which changes as a whole
            assert key.endswith(".name") or key in (
                "model.head_width",
                "model.width",
                "optimizer.chain",
                "tokens",
                "validation",
                "master_weights",
                "gradient_sum",
                "mantissa_bits",
                *(() if "precision=mxfp8" in choice else SWITCHES),
            ), key
        elif not key.startswith(COSMETIC):
            assert run_id(run_config(other), "text") != before, key
        elif run_id(run_config(other), "text") != before:
            unchanged.append(key)
    assert not unchanged


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=6)
values = st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans(), texts)


def typed(value: Any) -> str:
    """As a user types it."""
    if isinstance(value, str):
        return quoted(Path("x")).replace("x", value.replace("\\", "\\\\").replace("'", "\\'"))
    return str(value).lower() if isinstance(value, bool) else repr(value)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.lists(values, min_size=1, max_size=3)), max_size=5))
def test_a_sweep_is_the_product_of_the_values_given_last(asked: list[tuple[str, list[Any]]]) -> None:
    made = expand(parse([f"{key}={','.join(map(typed, some))}" for key, some in asked]))
    last = dict(asked)  # a key keeps the place where it was named first
    expected = [dict(zip(last, point, strict=True)) for point in itertools.product(*last.values())]
    found = [{word.key: word.value for word in point} for point in made]
    assert repr(found) == repr(expected)
