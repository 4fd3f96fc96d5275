"""Points, their ids, and the fleets they pack into."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from lab.sweeping.planner import Point, pack, points
from lab.training.identity import columns, static_key
from small import configs, tree


def ids(*overrides: str) -> list[str]:
    """Ids of small runs, one per string of overrides, in the order asked."""
    return [points([tree(*one.split())])[0].id for one in overrides]


CHANGES = (
    "optimizer.lr=2e-2 optimizer.eps=1e-6 optimizer.weight_decay=0 optimizer.clip=inf optimizer.beta1=0.8 "
    "seed=1 data.seed=1 "
    "schedule=constant schedule.warmup=0.2 schedule.floor=0 schedule.floor_share=0.1 parametrization=mup_simple "
    "model.width=32 model.depth=1 model.head_width=16 steps=13 seq_len=11 batch_size=5 intervention=[z_loss] "
    "intervention=[] data=stdlib optimizer=adamw_coupled optimizer.chain=[adam,peak,schedule] "
    "intervention.z_loss.coefficient=1e-3 probes.every=4 "
    "probes.names=[val_loss]"
)
NO_CHANGES = "out=elsewhere device=cpu model.name=x scale.name=x intervention=[z_loss,qk_layernorm]"


def test_the_id_covers_whatever_can_change_a_record_and_nothing_else() -> None:
    changed = [change for change in CHANGES.split() if not change.startswith("optimizer.chain")]
    assert len({*ids("", *changed)}) == 1 + len(changed)
    assert {*ids("", *NO_CHANGES.split())} == {*ids("")}


def test_a_floor_without_a_share_of_the_peak_leaves_an_id_what_it_was() -> None:
    before = tree()
    del before["schedule"]["floor_share"]
    assert [points([before])[0].id] == ids("schedule.floor_share=0")


def test_a_link_less_in_the_chain_is_another_run() -> None:
    chain = "optimizer.chain=[adam,peak,decay,schedule]"
    assert ids("~optimizer.clip " + chain) != ids("")


@pytest.mark.parametrize(
    ("words", "without"),
    [
        ("optimizer.chain=[adam,peak,decay,schedule]", "~optimizer.clip"),
        (
            "optimizer.chain=[clip,sgd,peak,schedule]",
            " ".join(f"~optimizer.{key}" for key in ("beta1", "beta2", "eps", "weight_decay")),
        ),
        (
            "optimizer=adamw_embedding_lr optimizer.chain=[clip,adam,peak,schedule]",
            " ".join(f"~optimizer.{key}" for key in ("embedding", "lr_factor", "weight_decay")),
        ),
    ],
)
def test_numbers_without_a_link_are_left_out(words: str, without: str) -> None:
    assert ids(words) == ids(f"{words} {without}")


def test_the_id_follows_the_text_of_a_file(tmp_path: Path) -> None:
    place = tmp_path / "text.txt"
    fox, sphinx = "the quick brown fox jumps over the lazy dog. " * 200, "jackdaws love my big sphinx of quartz. " * 230
    found = []
    for content in (fox, sphinx, fox):
        place.write_text(content)
        found += ids(f"data=text data.path={place}")
    assert found[0] == found[2] != found[1]


def test_equal_points_are_one_run() -> None:
    assert len(points([tree("model.name=a"), tree("model.name=b"), tree("seed=1")])) == 2


def grid(seeds: int, rates: int, arms: tuple[str, ...]) -> list[Point]:
    """Points of a small sweep."""
    trees = [
        tree(f"intervention={arm}", f"optimizer.lr={10**-rate}", f"seed={seed}")
        for arm, rate, seed in itertools.product(arms, range(rates), range(seeds))
    ]
    return points(trees)


@pytest.mark.parametrize(("seeds", "rates", "max_runs"), [(3, 2, 4), (2, 3, 1), (2, 2, 3)])
def test_fleets_hold_every_point_once_and_share_a_shape(seeds: int, rates: int, max_runs: int) -> None:
    asked = grid(seeds, rates, ("[]", "[z_loss]"))
    fleets = pack(asked, lambda _: max_runs)
    assert sorted(point.id for fleet in fleets for point in fleet) == sorted(point.id for point in asked)
    assert all(len(fleet) <= max_runs for fleet in fleets)
    assert all(len({static_key(point.config) for point in fleet}) == 1 for fleet in fleets)
    assert max(map(len, fleets)) - min(map(len, fleets)) <= 1
    first_seeds = [fleet[0].config.seed for fleet in fleets]
    assert first_seeds == sorted(first_seeds)


@pytest.mark.parametrize(
    ("at_once", "sizes"), [(1, [6, 2]), (2, [3, 3, 2]), (3, [3, 3, 2]), (4, [2] * 4), (9, [1] * 8)]
)
def test_no_core_is_left_idle_for_a_large_fleet(at_once: int, sizes: list[int]) -> None:
    asked = points([tree(f"seed={seed}") for seed in range(6)] + [tree(f"seed={s}", "model.depth=1") for s in (0, 1)])
    assert sorted(map(len, pack(asked, lambda _: 8, at_once)), reverse=True) == sizes


def test_fleets_of_a_long_sweep_are_as_large_as_they_may_be_and_of_a_short_one_end_together() -> None:
    long, short = grid(8, 10, ("[]",)), grid(3, 6, ("[]",))
    assert sorted(map(len, pack(long, lambda _: 8, 2))) == [8] * 10
    assert sorted(map(len, pack(short, lambda _: 6, 2))) == [4, 4, 5, 5]


def test_what_is_per_run_shares_a_fleet_and_all_else_does_not() -> None:
    per_run = "optimizer.lr=1 optimizer.eps=1e-6 optimizer.weight_decay=0 optimizer.clip=2 optimizer.beta1=0.8 "
    per_run += "optimizer.beta2=0.9 "
    per_run += (
        "seed=1 data.seed=2 schedule.warmup=3 schedule.floor=0 schedule.floor_share=0.1 "
        "intervention.z_loss.coefficient=1 out=x scale.name=x"
    )
    assert {static_key(config) for config in configs("", *per_run.split())} == {static_key(configs("")[0])}
    static = (
        "steps=13 batch_size=5 seq_len=11 model.width=32 intervention=[] schedule=constant parametrization=mup_simple "
    )
    static += "optimizer=adamw_coupled probes.every=3 data=stdlib device=cpu precision=bf16 engine=eager"
    # which links have numbers of a role; bursts and responses, also if they have the same numbers
    static += " +optimizer.embedding.lr=0.1 +optimizer.head.lr=0.1"
    static += " bad_batches=shift bad_batches=rare_tokens response=lower_lr"
    keys = [static_key(config) for config in configs("", *static.split())]
    assert len(set(keys)) == len(keys)


def test_columns_are_the_keys_a_user_types() -> None:
    row = columns(configs("")[0])
    for key in [
        "model.name",
        "model.width",
        "optimizer.lr",
        "optimizer.chain",
        "schedule.name",
        "schedule.warmup",
        "data.name",
        "data.seed",
        "seed",
        "steps",
        "intervention.z_loss.coefficient",
        "parametrization.name",
        "probes.every",
        "scale.name",
        "precision",
        "device",
        "out",
    ]:
        assert key in row, key
    assert row["intervention"] == "qk_layernorm+z_loss"
    assert columns(configs("intervention=[]")[0])["intervention"] == "none"
