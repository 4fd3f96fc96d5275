"""Which runs make a curve, what the arms are called, and that nothing is mixed."""

import pandas as pd
import pytest

import planted
from lab.analysis import load, points
from lab.core.errors import RequestError
from planted import BOTH


def laid(*groups):
    return points(planted.table(card for group in groups for card in group))


def small(arms=("z_loss",), widths=(32,), lrs=(1e-3, 1e-2), seeds=(0, 1), **changes):
    return planted.cards(arms, widths, lrs, seeds, **changes)


def names(*groups):
    return list(laid(*groups)["arm"].unique())


def test_a_curve_runs_over_learning_rates_and_seeds_of_one_arm_and_size():
    runs = laid(planted.cards())
    assert runs["curve"].nunique() == 4
    assert set(runs.groupby("curve").size()) == {21}
    assert list(runs["arm"].unique()) == ["without qk-layernorm", "with qk-layernorm"]
    assert (runs.groupby("curve")[["arm", "size", "parameters"]].nunique() == 1).all(axis=None)


def test_the_gains_of_an_intervention_make_no_size_of_their_own():
    runs = laid(planted.cards())
    assert runs["parameters"].nunique() == 4
    assert sorted(runs["size"].unique()) == [24736, 98624]


WEIGHT_DECAY, COEFFICIENT = "optimizer.weight_decay", "intervention.z_loss.coefficient"


def test_a_table_of_positions_makes_no_size_of_its_own():
    table = {"intervention": "learned_positions+z_loss", "intervention.learned_positions.positions": 512}
    runs = [planted.card(), planted.card(**table, parameters_without_embeddings=24_736 + 512 * 32)]
    made = points(planted.table(runs))
    assert made["parameters"].tolist() == made["size"].tolist() == [24_736, 24_736]
    assert made["arm"].nunique() == 2


def test_recipes_of_one_shape_are_of_one_size():
    """A gate of the MLP adds a third to the parameters."""
    larger = {"optimizer.beta2": 0.9, "parameters_without_embeddings": 32_928}
    runs = laid(small(recipe="llama", **larger), small(recipe="opt"), small(recipe="opt", widths=(64,)))
    assert runs.groupby("arm")["size"].unique().map(list).to_dict() == {"llama": [24736], "opt": [24736, 98624]}
    assert sorted(runs["parameters"].unique()) == [24736, 32928, 98624]
    assert laid(small(**larger), small())["size"].nunique() == 2


def test_runs_that_differ_in_a_number_are_never_one_curve():
    runs = laid(small(), small(**{WEIGHT_DECAY: 1e-3}), small(**{WEIGHT_DECAY: None}))
    assert list(runs["arm"].unique()) == ["no weight decay", "weight decay 0.0001", "weight decay 0.001"]
    assert set(runs.groupby("arm", sort=False)["curve"].nunique()) == {1}
    assert not runs.duplicated(["curve", "lr", "seed"]).any()
    assert len(runs) == 12


@pytest.mark.parametrize(
    ("groups", "arms"),
    [
        ([{}], ["with z-loss"]),
        ([{"arms": ("none",)}], ["without interventions"]),
        ([{"arms": ("z_loss", "none")}], ["without z-loss", "with z-loss"]),
        ([{"arms": BOTH}], ["without qk-layernorm", "with qk-layernorm"]),
        (
            [{"arms": ("none", "a_b", "c", "a_b+c")}],
            ["without a-b or c", "with a-b", "with c", "with a-b and c"],
        ),
        ([{"arms": ("none", *"abcd")}], ["with none of them", "with a", "with b", "with c", "with d"]),
        (
            [{"arms": ("z_loss", "none")}, {COEFFICIENT: 1e-3}],
            ["without z-loss", "coefficient 0.0001 with z-loss", "coefficient 0.001 with z-loss"],
        ),
        ([{}, {"optimizer.name": "lion", "optimizer.chain": ["clip"]}], ["adamw", "lion"]),
        (
            [{}, {"model.beta1": 1.0, "optimizer.beta1": 0.8}],
            ["optimizer.beta1 0.9", "model.beta1 1, optimizer.beta1 0.8"],
        ),
        (
            [{"intervention.z_slope.coefficient": 1.0, COEFFICIENT: value} for value in (1e-4, 1e-3)],
            ["z_loss.coefficient 0.0001", "z_loss.coefficient 0.001"],
        ),
        ([{"steps": 400}, {"steps": 1000}], ["steps 400", "steps 1000"]),
        ([{"batch_size": size, "batch.micro_batch": size / 2} for size in (8, 16)], ["batch size 8", "batch size 16"]),
        (
            [{"batch_size": 8, "batch.micro_batch": size} for size in (2, 4)] + [{"batch_size": 16}],
            ["batch size 16", "micro batch 2, batch size 8", "micro batch 4, batch size 8"],
        ),
        ([{}, {"data.name": "code", "data_fingerprint": "b"}], ["code", "text"]),
        ([{}, {"data_fingerprint": "b"}], ["data fingerprint a1b2c3d4e5f60718", "data fingerprint b"]),
        ([{"widths": (32,)}, {"widths": (64,), "model.head_width": 32}], ["with z-loss"]),
        ([{}, {"model.head_width": 8}], ["head width 8", "head width 16"]),
        (
            [{"widths": (32, 64, 128)}, {"model.depth": 8, "parameters_without_embeddings": 98_848}],
            ["depth 2", "depth 8"],
        ),
    ],
)
def test_arms_are_named_by_what_differs_and_sizes_are_not_arms(groups, arms):
    assert names(*(small(**group) for group in groups)) == arms


@pytest.mark.parametrize("key", ["model.name", "scale.name", "out", "probes.every", "probes.names"])
def test_what_changes_no_number_makes_no_arm(key):
    assert names(small(seeds=[0]), small(seeds=[1], **{key: "7"})) == ["with z-loss"]
    assert laid(small(seeds=[0]), small(seeds=[1], **{key: "7"}))["curve"].nunique() == 1


def test_a_data_seed_is_a_replicate_of_its_own():
    runs = laid(small(seeds=[0], **{"data.seed": 0}), small(seeds=[0], **{"data.seed": 5}))
    assert runs["curve"].nunique() == 1
    assert set(runs["seed"]) == {"0", "0/5"}


def test_of_two_runs_at_one_point_the_first_stays():
    cards = [*small(), *small(**{"probes.every": 8})]
    runs = laid(cards)
    assert len(runs) == 4
    assert set(runs["id"]) < {card["id"] for card in cards}


def test_failed_runs_are_on_no_curve():
    cards = list(small())
    cards[0] |= {"status": "failed", "final_val_loss": None, "reason": "out of memory"}
    assert set(laid(cards)["id"]) == {card["id"] for card in cards[1:]}


def test_folders_are_overlaid_and_equal_ids_are_one_run(tmp_path):
    cards = list(small())
    broken = [cards[0] | {"status": "failed", "final_val_loss": None}, *cards[1:]]
    one = planted.write(tmp_path / "one", broken[:3])
    other = planted.write(tmp_path / "other", cards)
    runs, metrics, _ = load(one, other)
    assert sorted(runs["id"]) == sorted(card["id"] for card in cards)
    assert set(runs["status"]) == {"finished"}
    assert set(metrics["id"]) == set(runs["id"])
    assert not metrics.duplicated(["id", "step", "probe", "where"]).any()
    pd.testing.assert_frame_equal(load(other, one).runs, runs)
    assert len(load(one).runs) == 3
    assert "folder" not in runs


def test_an_absent_folder_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no results folder"):
        load(tmp_path / "nowhere")
