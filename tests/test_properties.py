"""What holds of every config and sweep: a config survives its record, an id is what it says, no point is lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st

from lab import run_config
from lab.cli.compose import expand, parse
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.core.registry import INTERVENTIONS
from lab.core.shipped import data_folder
from lab.records import store
from lab.sweeping.planner import Point, pack, points, shard_points
from lab.training.identity import columns, run_id, static_key
from lab.training.rules import SWITCHES
from sampling import few
from small import tree
from trees import shuffled, trees

# The documentation's list: keys that two runs which are one may differ in.
COSMETIC = ("out", "device", "engine", "ranks", "checkpoint.", "tracker.", "model.name", "scale.")


def parsed(words: list[str]) -> list[Any]:
    return list(OverridesParser.create().parse_overrides(words))


@given(st.lists(trees(), min_size=1, max_size=3))
def test_a_config_comes_back_from_its_records_as_it_was(some: list[dict[str, Any]]) -> None:
    made = [columns(run_config(one)) for one in some]
    with TemporaryDirectory() as place:
        store.open_folder(Path(place), "eager")
        for number, row in enumerate(made):
            store.write_run(Path(place), {"id": f"run{number}", "status": "finished", **row}, [])
        for runs in (store.gather(Path(place)).runs, store.read(Path(place)).runs):
            for (_, found), row in zip(runs.iterrows(), made, strict=True):
                for key, value in row.items():
                    assert found[key] == value if value is not None else found.isna()[key], key


@given(trees(), st.data())
def test_equal_configs_have_equal_ids(one: dict[str, Any], data: st.DataObject) -> None:
    other = data.draw(shuffled(one))
    other["probes"] = {**other["probes"], "names": data.draw(st.permutations(one["probes"]["names"]))}
    assert run_config(other) == run_config(one) or other["probes"]["names"] != one["probes"]["names"]
    assert run_id(run_config(other), "text") == run_id(run_config(one), "text")
    through = json.loads(json.dumps(one))  # as a frozen plan keeps it
    assert run_config(through) == run_config(one)


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
# What a choice needs of others, without which it would do nothing.
NEEDS = {
    "optimizer=schedule_free": "schedule=constant",
    "optimizer=adamw_qk_clip": "intervention=[z_loss]",
    "optimizer=adamw_spectral_cap": "intervention=[z_loss]",
}


def choices() -> Iterator[str]:
    """Every file of every group, alone."""
    for group in ("model", "parametrization", "optimizer", "schedule", "data", "probes", "tracker"):
        yield from (f"{group}={path.stem}" for path in sorted((data_folder("conf") / group).glob("*.yaml")))
    for path in sorted((data_folder("conf") / "intervention").glob("*.yaml")):
        yield f"intervention=[{','.join([*getattr(INTERVENTIONS[path.stem], 'requires', ()), path.stem])}]"


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


@pytest.mark.parametrize(
    "choice", [(), ("precision=mxfp8",), *few(((choice,) for choice in choices()), 20)], ids="".join
)
def test_every_leaf_is_in_the_id_or_known_not_to_be(choice: tuple[str, ...]) -> None:
    """Of a choice the leaves that it brings or sets; the others are those of the default."""
    one = tree(*choice, *(NEEDS[each] for each in choice if each in NEEDS))
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


@cache
def pool() -> list[Point]:
    """Points of several shapes, which differ in all that may differ within a fleet too."""
    shapes = ("", "model.depth=1", "intervention=[z_loss]", "schedule=wsd", "precision=bf16")
    rates = ("optimizer.lr=1e-3", "optimizer.lr=1e-2", "optimizer.eps=1e-6", "schedule.warmup=0.1")
    return points(
        tree(*shape.split(), rate, f"seed={seed}") for shape in shapes for rate in rates for seed in (0, 2**63 - 1)
    )


some_points = st.lists(st.sampled_from(range(40)), unique=True, max_size=40).map(lambda at: [pool()[i] for i in at])


@given(some_points, st.lists(st.integers(1, 9), min_size=40, max_size=40), st.integers(-2, 12))
def test_every_point_is_in_one_fleet_of_its_shape(some: list[Point], most: list[int], at_once: int) -> None:
    shapes = sorted({static_key(point.config) for point in pool()})
    limit = {shape: most[place] for place, shape in enumerate(shapes)}
    fleets = pack(some, lambda config: limit[static_key(config)], at_once)
    assert sorted(point.id for fleet in fleets for point in fleet) == sorted(point.id for point in some)
    for fleet in fleets:
        (shape,) = {static_key(point.config) for point in fleet}
        assert 1 <= len(fleet) <= limit[shape]
        assert [some.index(point) for point in fleet] == sorted(some.index(point) for point in fleet)
    assert [some.index(fleet[0]) for fleet in fleets] == sorted(some.index(fleet[0]) for fleet in fleets)
    assert len(fleets) >= min(at_once, len(some))


@given(some_points, st.integers(1, 9), st.integers(1, 12))
def test_shards_part_any_sweep(some: list[Point], grain: int, shards: int) -> None:
    parts = [shard_points(some, grain, f"{index}/{shards}") for index in range(1, shards + 1)]
    assert sorted(point.id for mine in parts for point in mine) == sorted(point.id for point in some)
    assert all(mine == [point for point in some if point in mine] for mine in parts)
