"""Restarts where updates are left out: each run at its own step and once; with a fresh loss scale where one asks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lab import Fleet, run_config
from lab.responses.response import Action, Reading, RewindAndRescale
from lab.sweeping.job import train_resumably
from lab.training.checkpoint import Checkpointer
from lab.training.loop import StepResult, train
from lab.training.recorder import Recorder, Run
from small import configs, tree

FP16 = ("precision=fp16_emulated", "loss_scale=torch", "schedule=constant", "probes.every=4", "model.depth=1")
SHORT = (*FP16, "steps=12")
LOWER, FRESH = {"step": 6, "optimizer.lr": 1e-3}, {"step": 6, "loss_scale": "fresh"}
WINDOWS = 40  # held-out ones
# A scale of which fp16 gradients of a run of this size overflow, and one of which all of them round to zero.
TOO_LARGE, TOO_SMALL = 2.0**26, 2.0**-30


pytestmark = pytest.mark.usefixtures("as_in_training")


def fleet(restarts: list[dict[str, Any]], *seeds: int, shared: tuple[str, ...] = SHORT) -> Fleet:
    schedule = {"restarts": {"name": "mine", "restarts": restarts}}
    made = Fleet([run_config(tree(*shared, f"seed={seed}") | schedule) for seed in seeds])
    made.evaluation.held_out_nt = made.evaluation.held_out_nt[:WINDOWS]
    return made


def rescale(made: Fleet, run: int, scale: float) -> None:
    made.state.links["loss_scale"]["scale"][run] = scale


def trained(made: Fleet, meddle: Callable[[StepResult], None]) -> list[Run]:
    recorder = Recorder(made)
    for result in train(made):
        recorder.keep(result)
        meddle(result)
    return recorder.runs()


def restarts_of(run: Run) -> list[tuple[int, int]]:
    return [event[:2] for event in run.events if event[2] == "restart"]


def overflows_after(updates: int, made: Fleet, run: int = 1) -> Callable[[StepResult], None]:
    return lambda result: rescale(made, run, TOO_LARGE) if result.done == updates else None


@pytest.mark.slow
@pytest.mark.parametrize("killed_after", [6])
def test_a_kill_while_updates_are_left_out_at_a_restart_notes_it_once(killed_after: int, tmp_path: Path) -> None:
    whole, first, second = (Recorder(fleet([LOWER], 0, 1)) for _ in range(3))
    runs, done = trained(whole.fleet, overflows_after(6, whole.fleet)), list[int]()

    def on_result(result: StepResult) -> None:
        done.append(result.done)
        overflows_after(6, first.fleet)(result)

    checkpointer = Checkpointer(tmp_path, ["one", "two"], first.fleet.config.checkpoint)
    stop = lambda: bool(done) and done[-1] == killed_after  # noqa: E731
    assert not train_resumably(first, checkpointer, on_result, print, stop)
    assert train_resumably(second, checkpointer, lambda result: None, print, lambda: False)
    assert runs[1].outcome["skipped_batches"] > 2
    for run, again in zip(runs, second.runs(), strict=True):
        assert restarts_of(run) == [(6, 6)]
        assert (repr(again.events), again.metrics) == (repr(run.events), run.metrics)  # an overflow's norm is NaN
        assert again.outcome["final_val_loss"] == run.outcome["final_val_loss"]


@pytest.mark.slow
def test_a_run_that_leaves_out_updates_restarts_at_its_own_step() -> None:
    together, alone = fleet([LOWER, FRESH | {"step": 9}], 0, 1), fleet([LOWER, FRESH | {"step": 9}], 1)
    runs = trained(together, overflows_after(2, together))
    (late,) = trained(alone, overflows_after(2, alone, run=0))
    skipped = late.outcome["skipped_batches"]
    assert skipped > 2
    assert (restarts_of(runs[0]), restarts_of(runs[1])) == ([(6, 6), (9, 9)], [(6, 6 + skipped), (9, 9 + skipped)])
    assert (runs[1].metrics, repr(runs[1].events)) == (late.metrics, repr(late.events))
    assert runs[1].outcome["final_val_loss"] == late.outcome["final_val_loss"]


def test_a_fresh_loss_scale_that_is_the_old_one_changes_no_bits() -> None:
    made, plain = fleet([FRESH], 0), fleet([LOWER | {"optimizer.lr": tree(*SHORT)["optimizer"]["lr"]}], 0)
    (run,), (other,) = (trained(each, lambda result: None) for each in (made, plain))
    assert (run.metrics, run.outcome["final_val_loss"]) == (other.metrics, other.outcome["final_val_loss"])
    assert [event[4] for event in run.events] == ["6: loss_scale=fresh"]
    for name, tensor in plain.tensors().items():
        assert torch.equal(made.tensors()[name], tensor) != (name == "loss_scale.since"), name
    assert made.state.links["loss_scale"]["since"].tolist() == [6]  # updates since the restart


STALL = (*FP16, "loss_scale.init=16", "steps=32", "optimizer.lr=1e-2", "optimizer.weight_decay=0", "probes=none")
SEEDS, RESTART = 5, 6
PASSING = range(3, 33)  # the updates of the overflow that passes


def stalls(restart: dict[str, Any]) -> tuple[np.ndarray, list[str]]:
    """Falls of the loss where an overflow passes that collapsed the scale, and endings of runs where one stays."""
    made = fleet([{"step": RESTART, **restart}], *2 * [*range(SEEDS)], shared=STALL)
    head, healthy = made.state.weights["head"], list[torch.Tensor]()

    @torch.no_grad()
    def meddle(result: StepResult) -> None:
        if result.done == PASSING.start:
            healthy.append(head[:SEEDS].clone())
            head[:SEEDS].mul_(3e6)
        if result.done == PASSING.stop:
            head[:SEEDS].copy_(healthy[0])
        if result.done == RESTART:
            head[SEEDS:].mul_(3e6)

    outcomes = [run.outcome for run in trained(made, meddle)]
    fell = [outcome["loss_at_init"] - outcome["final_val_loss"] for outcome in outcomes[:SEEDS]]
    return np.array(fell), [outcome["ending"] for outcome in outcomes[SEEDS:]]


@pytest.mark.slow
def test_a_fresh_loss_scale_ends_stalls_of_a_collapsed_one() -> None:
    """As in runs 12.17 to 12.34 of OPT-175B, where it helped some runs."""
    kept, endings = stalls({"optimizer.beta1": 0.9})
    reset, endings_after_reset = stalls({"loss_scale": "fresh"})
    assert (reset > 2 * kept).sum() >= 4
    assert endings == endings_after_reset == ["stalled"] * SEEDS


def test_the_recipe_of_welm() -> None:
    recipe = RewindAndRescale(rewind=4, skip=5, lr_factor=0.5, snapshot_every=2, snapshots=4)
    calm, spike = (Reading(9, 2.0, 1.0, spike_begins=begins) for begins in (False, True))
    assert recipe.act(calm, {}) is None
    action = recipe.act(spike, {})
    assert action == Action(rewind=4, skip=5, lr_factor=0.5, fresh_loss_scale=True)
    made = Fleet(configs("seed=0", shared=(*SHORT, "response=rewind_and_rescale")))
    assert made.control is not None
    rescale(made, 0, TOO_SMALL)
    made.control.before_step()  # takes a snapshot
    made.control.carry_out(0, action)
    assert made.state.links["loss_scale"]["scale"].tolist() == [65536.0]
    assert [event[2:4] for event in made.control.logs[0].events][-2:] == [
        ("fresh_loss_scale", TOO_SMALL),
        ("lr_factor", 0.5),
    ]
