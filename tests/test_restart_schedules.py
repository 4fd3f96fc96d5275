"""Restart schedules change what they declare and nothing else, and faulty ones are refused in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab import Fleet, RunConfig, run_config
from lab.core.shipped import data_folder
from lab.sweeping.capacity import Host, most_runs
from lab.sweeping.job import train_resumably
from lab.training.checkpoint import Checkpointer
from lab.training.identity import columns, run_id, static_key
from lab.training.loop import train
from lab.training.recorder import Recorder
from small import configs, tree

SHIPPED = sorted(path for path in data_folder("conf").glob("restarts/*.yaml") if path.stem != "none")
SGD, MOMENTUM = (["clip", rule, "peak", "decay", "schedule"] for rule in ("sgd", "momentum"))
ADAM = ["clip", "adam", "peak", "decay", "schedule"]
SHORT = ("model.depth=1", "steps=12", "schedule.warmup=2", "probes.every=4")


pytestmark = pytest.mark.usefixtures("as_in_training")


def fleet(*restarts: dict[str, Any], shared: tuple[str, ...] = SHORT) -> Fleet:
    return Fleet([restarted(*restarts, shared=(*shared, f"seed={seed}")) for seed in range(2)])


def restarted(*restarts: dict[str, Any], shared: tuple[str, ...] = SHORT) -> RunConfig:
    return run_config(tree(*shared) | {"restarts": {"name": "mine", "restarts": list(restarts)}})


def after(made: Fleet, updates: int) -> dict[str, torch.Tensor]:
    """Copies of all tensors after so many updates."""
    for result in train(made):
        if result.done == updates:
            return {name: tensor.clone() for name, tensor in made.tensors().items()}
    raise AssertionError(updates)


SAME = [
    {"optimizer.lr": 1e-2},
    {"optimizer.chain": ADAM},
    {"intervention.relu": True},
]


def same_bits(changes: dict[str, Any], *overrides: str) -> bool:
    """Whether a restart leaves weights, state and held-out loss as they are in runs without."""
    shared = (*SHORT, "intervention=[qk_layernorm,relu,z_loss]", *overrides)
    same = fleet({"step": 6, **changes}, shared=shared)
    plain = Fleet(configs("seed=0", "seed=1", shared=shared))
    changed, free = after(same, 11), after_plain(plain, 11)
    is_same = changed.keys() == free.keys() and all(torch.equal(changed[name], free[name]) for name in free)
    return is_same and torch.equal(same.evaluation.loss(whole=False), plain.evaluation.loss(whole=False))


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_a_restart_that_changes_nothing_changes_no_bits(changes: dict[str, Any]) -> None:
    assert same_bits(changes)


def test_a_restart_that_changes_something_changes_bits() -> None:
    assert not same_bits({"intervention.relu": False})
    assert not same_bits({"schedule.floor": 9e-3})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it traces
def test_a_traced_restart_changes_bits_where_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    traced = (*SHORT, "engine=compiled", "model.depth=1", "probes=none", "batch=constant", "batch.micro_batch=2")
    restarts = {"step": 3, "optimizer.chain": ADAM, "intervention.z_loss": True}, {"step": 6, "intervention.relu": True}
    plain, changed = Fleet(configs("seed=0", "seed=1", shared=traced)), fleet(*restarts, shared=traced)
    for result in train(changed):
        if result.done in (6, 7):
            free = after_plain(plain, result.done, done=6 * (result.done == 7))
            weight = changed.tensors()["weight.block0.mlp_up"]
            assert torch.equal(weight, free["weight.block0.mlp_up"]) == (result.done == 6)
        if result.done == 7:
            break


SWAPS = [
    (
        {"optimizer.chain": MOMENTUM, "optimizer.momentum": 0.5},
        ("optimizer=momentum", "optimizer.lr=1e-2", "optimizer.momentum=0.5"),
    ),
    ({"intervention.relu": True}, ("intervention=[qk_layernorm,relu,z_loss]",)),
    ({"schedule.floor": 9e-3}, ("schedule.floor=9e-3",)),
]


@pytest.mark.parametrize(("changes", "overrides"), SWAPS, ids=str)
def test_a_run_goes_on_as_one_of_the_other_config_would(changes: dict[str, Any], overrides: tuple[str, ...]) -> None:
    """From the same weights and the state of the links that stay; a new rule begins fresh, with a new age."""
    made, weights, state = fleet({"step": 6, **changes}), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    other = Fleet(configs("seed=0", "seed=1", shared=(*SHORT, *overrides)))
    for result in train(made):
        if result.done == 6:
            for name, tensor in other.tensors().items():
                if name in made.tensors() and (name.startswith("weight.") or "optimizer.chain" not in changes):
                    tensor.data.copy_(made.tensors()[name])
            state = {name: tensor.clone() for name, tensor in made.tensors().items() if name.startswith("adam.")}
        if result.done == 7:
            weights = {name: tensor.clone() for name, tensor in made.tensors().items()}
            break
    age_r = torch.full((2,), 0 if "optimizer.chain" in changes else 6)
    other._step(6, 1, age_r, other.shape_sr[6], with_probes=False)
    assert all(torch.equal(weights[name], tensor) for name, tensor in other.tensors().items())
    left = {name: tensor for name, tensor in state.items() if name not in other.tensors()}
    assert all(torch.equal(weights[name], tensor) for name, tensor in left.items()), "of links that are gone"


def test_a_link_that_comes_back_begins_fresh() -> None:
    made = fleet({"step": 3, "optimizer.chain": SGD}, {"step": 6, "optimizer.chain": ADAM})
    free = fleet({"step": 3, "optimizer.chain": SGD}, {"step": 6, "optimizer.lr": 2e-2})
    before, gone = after(made, 6), after(free, 6)
    assert before["adam.mean.head"].abs().max() > 0
    assert torch.equal(before["adam.mean.head"], gone["adam.mean.head"])
    made = fleet({"step": 3, "optimizer.chain": SGD}, {"step": 6, "optimizer.chain": ADAM})
    again = after(made, 7)
    assert made.control is not None
    assert made.control.clock.age_r.tolist() == [1, 1]
    beta1, beta2 = 0.9, 0.95
    square = again["adam.mean.head"].square() / (1 - beta1) ** 2 * (1 - beta2)  # of one gradient alone
    assert torch.allclose(again["adam.square.head"], square, rtol=1e-4, atol=0)


def after_plain(made: Fleet, updates: int, done: int = 0) -> dict[str, torch.Tensor]:
    for step in range(done, updates):
        made.step(step)
    return made.tensors()


def test_a_restart_changes_what_it_declares_from_its_step_on() -> None:
    changed, free = fleet({"step": 6, "optimizer.lr": 1e-3}), Fleet(configs("seed=0", "seed=1", shared=SHORT))
    before = after_plain(free, 6)
    assert all(torch.equal(tensor, before[name]) for name, tensor in after(changed, 6).items())
    changed = fleet({"step": 6, "optimizer.lr": 1e-3})
    weights = {name: weight.clone() for name, weight in free.state.weights.items()}
    restarted = after(changed, 7)
    free.step(6)
    lr = tree(*SHORT)["optimizer"]["lr"]
    for name, tensor in free.tensors().items():
        if name.startswith("adam."):
            assert torch.equal(restarted[name], tensor), "of the same gradient at the same weights"
    for name, weight in free.state.weights.items():
        moved, usual = restarted[f"weight.{name}"] - weights[name], weight - weights[name]
        assert 0 < moved.abs().max() < 0.2 * usual.abs().max()
        assert (moved - usual * 1e-3 / lr).abs().max() < 2e-4  # decay does not depend on the learning rate
    assert [event[:3] for event in control_events(changed)] == [(6, 6, "restart")]


def control_events(made: Fleet) -> list[tuple[int, int, str, float, str]]:
    assert made.control is not None
    return made.control.logs[0].events


NUMBERS = {"step": 6, "optimizer.lr": 1e-3}, {"step": 9, "optimizer.clip": 0.01, "optimizer.beta2": 0.5}
HOT_SWAPS = {"step": 4, "intervention.relu": True, "optimizer.chain": SGD}, {"step": 8, "optimizer.chain": ADAM}


@pytest.mark.parametrize(
    ("restarts", "killed_after"),
    [(NUMBERS, 8), (HOT_SWAPS, 4)],
    ids=lambda value: value if isinstance(value, int) else f"{len(value[0])} keys",
)
def test_a_kill_between_restarts_changes_no_record(
    restarts: tuple[dict[str, Any], ...], killed_after: int, tmp_path: Path
) -> None:
    whole, first, second = (Recorder(fleet(*restarts)) for _ in range(3))
    for result in train(whole.fleet):
        whole.keep(result)
    checkpointer, done = Checkpointer(tmp_path, ["one", "two"], first.fleet.config.checkpoint), list[int]()
    stop = lambda: bool(done) and done[-1] == killed_after  # noqa: E731
    assert not train_resumably(first, checkpointer, lambda result: done.append(result.done), print, stop)
    assert train_resumably(second, checkpointer, lambda result: None, print, lambda: False)
    for run, again in zip(whole.runs(), second.runs(), strict=True):
        assert (again.metrics, again.events) == (run.metrics, run.events)
        assert again.outcome["final_val_loss"] == run.outcome["final_val_loss"]


def test_the_restart_schedule_is_a_column_and_a_part_of_the_id() -> None:
    plain, scheduled = configs("seed=0", "seed=0 restarts=glm_130b")
    assert (columns(plain)["restarts"], columns(scheduled)["restarts"]) == ("none", "glm_130b")
    assert "restarts.entries" not in columns(plain)
    assert columns(scheduled)["restarts.entries"] == "6: optimizer.lr=0.005"
    assert run_id(plain, "data") != run_id(scheduled, "data")


def test_runs_of_a_fleet_share_what_restarts_swap() -> None:
    lower, lowest = ({"step": 6, "optimizer.lr": lr} for lr in (1e-3, 1e-4))
    relu, sgd, later = {"intervention.relu": True}, {"optimizer.chain": SGD}, {"step": 7, "intervention.relu": True}
    assert static_key(restarted(lower)) == static_key(restarted(lowest))
    keys = {static_key(restarted(each)) for each in (lower, lower | relu, lower | sgd, later)}
    assert len(keys) == 4
    assert run_id(restarted(lower), "data") != run_id(restarted(lowest), "data")
    assert columns(restarted(lower | relu | sgd))["restarts.entries"] == (
        "6: optimizer.lr=0.001 intervention.relu=on optimizer.chain=clip,sgd,peak,decay,schedule"
    )


def test_a_run_that_may_fall_behind_at_a_swap_trains_alone() -> None:
    scaled = ("precision=fp16_emulated", "loss_scale=torch")
    swapped, lower = {"step": 6, "intervention.relu": True}, {"step": 6, "optimizer.lr": 1e-3}
    assert most_runs(restarted(swapped, shared=(*SHORT, *scaled)), Host()) == 1
    assert most_runs(restarted(swapped), Host()) == most_runs(restarted(lower, shared=(*SHORT, *scaled)), Host()) == 8


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_schedules_restart_a_run_of_the_usual_length(path: Path) -> None:
    (config,) = configs("steps=400", shared=(f"restarts={path.stem}",))
    assert config.restarts is not None
    steps = [restart.step for restart in config.restarts.restarts]
    assert steps == sorted(set(steps))
    assert steps[-1] < 400


def test_a_share_of_the_steps_is_rounded_to_the_nearest_step() -> None:
    config = restarted({"step": 0.29, "optimizer.lr": 1e-3}, shared=(*SHORT, "steps=100"))
    assert config.restarts is not None
    assert [restart.step for restart in config.restarts.restarts] == [29]  # 0.29 * 100 is less than 29
