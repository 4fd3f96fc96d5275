"""Runs of one fleet at their own pace: going back, skipping, resetting, leaving out updates, resuming from a kill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import Fleet
from lab.core.registry import RESPONSES
from lab.core.spike_trigger import STALLED_FOR
from lab.responses.response import Action, AdamResetWarmup, Memory, Reading, Response, RestartAndLower
from lab.sweeping.capacity import bytes_asked
from lab.sweeping.job import train_resumably
from lab.training.checkpoint import Checkpointer
from lab.training.clock import Clock, Snapshots
from lab.training.control import Control
from lab.training.loop import StepResult, train
from lab.training.recorder import Recorder
from lab.training.step import TrainingState, begin_readings, update_kept
from sampling import few
from small import brief, configs, records, untimed

ARMED = ("model.depth=1", "steps=16", "schedule.warmup=2", "probes.every=4", "response=rewind_and_skip")
NO_UPDATES = ("model.depth=1", "steps=12", "response=skip_update", "response.start=0")
SNAPSHOTS = ("response.rewind=4", "response.snapshot_every=2", "response.snapshots=4")


@dataclass(frozen=True)
class AtStep(Response):
    """Acts once, after the update of one step."""

    step: int = 9
    action: Action | None = None

    def act(self, reading: Reading, memory: Memory) -> Action | None:
        if reading.step != self.step or memory:
            return None
        memory["done"] = 1
        return self.action


pytestmark = pytest.mark.usefixtures("as_in_training")


def fleet(*per_run: str, actions: dict[int, Action] | None = None, shared: tuple[str, ...] = ()) -> Fleet:
    """A fleet with armed responses, some of whose runs act after step 9."""
    made = Fleet(configs(*per_run, shared=(*ARMED, *SNAPSHOTS, *shared)))
    for run, action in (actions or {}).items():
        control(made).responses[run] = AtStep(action=action)
    return made


def control(made: Fleet) -> Control:
    assert made.control is not None
    return made.control


@pytest.mark.slow
def test_a_silent_response_changes_no_bits_and_records_no_event() -> None:
    silent = records(fleet("seed=0", "seed=1"))
    plainly = Fleet(configs("seed=0", "seed=1", shared=ARMED[:4]))
    for armed, free in zip(silent, records(plainly), strict=True):
        assert sorted(armed.metrics) == sorted(free.metrics)  # records sort their rows
        assert armed.outcome["final_val_loss"] == free.outcome["final_val_loss"]
        assert (armed.outcome["ending"], armed.outcome["spikes"], armed.events) == ("none", 0, [])


@pytest.mark.parametrize("action", [Action(rewind=4, skip=5)])
def test_a_run_that_acts_changes_no_bits_of_its_neighbours(action: Action) -> None:
    together = records(fleet("seed=0", "seed=1", "seed=2", actions={1: action}))
    assert together[1] == records(fleet("seed=1", actions={0: action}))[0]
    calm = records(fleet("seed=0", "seed=1", "seed=2"))
    assert [together[run] for run in (0, 2)] == [calm[run] for run in (0, 2)]
    assert together[1].outcome["final_val_loss"] != calm[1].outcome["final_val_loss"] or action == Action(rewind=3)


def test_going_back_without_skipping_repeats_the_losses() -> None:
    # PaLM's replay: the same state and the same data give the same spike
    again, once = fleet("seed=0", actions={0: Action(rewind=4)}), fleet("seed=0")
    ends = [records(made)[0] for made in (again, once)]
    assert control(again).logs[0].losses == control(once).logs[0].losses
    assert ends[0].metrics == ends[1].metrics
    assert ends[0].outcome["rewound_steps"] == 4  # from 10 updates to the snapshot after 6
    assert [event[:3] for event in ends[0].events] == [(6, 6, "rewind")]


def test_a_run_that_ends_before_its_neighbour_is_measured_at_its_own_steps_alone() -> None:
    shared = ("probes.every=1", "probes.names=[train_loss]")
    for run in records(fleet("seed=0", "seed=1", actions={1: Action(rewind=4)}, shared=shared)):
        assert [step for step, *_ in run.metrics] == [*range(16)]


def test_skipped_batches_are_never_drawn() -> None:
    made, drawn = fleet("seed=0", actions={0: Action(rewind=4, skip=5)}), list[int]()
    batch = made.feed.loader.batch
    made.feed.loader.batch = lambda step: drawn.append(int(step[0])) or batch(step)  # type: ignore[method-assign, func-returns-value, index]
    (run,) = records(made)
    assert drawn == [*range(10), *range(11, 21)]  # back to batch 6, and 5 left out
    assert run.outcome["skipped_batches"] == 5
    assert [(step, probe) for step, probe, *_ in run.metrics if probe == "train_loss"] == [
        (step, "train_loss") for step in (0, 4, 8, 12, 15)
    ]


def test_divergence_counts_updates_without_repeated_ones() -> None:
    recorder = Recorder(fleet("seed=0"))
    recorder.keep(StepResult(0, 0, {}, torch.tensor([5.0])))
    recorder.keep(StepResult(20, 15, {}, torch.tensor([torch.nan])))  # of 16 steps, four of them made twice
    assert recorder.runs()[0].outcome["diverged_at"] == 16


def test_a_rewound_run_equals_one_that_drew_those_batches() -> None:
    made = fleet("seed=0", actions={0: Action(rewind=4, skip=5)})
    (run,) = records(made)
    by_hand = fleet("seed=0")
    for batch in [*range(6), *range(11, 21)]:
        control(by_hand).clock.batch_r[0] = batch
        by_hand.advance(control(by_hand).clock, with_probes=False)
        control(by_hand).clock.tick(0, updated=True)
    assert by_hand.evaluation.loss(whole=True).tolist() == [run.outcome["final_val_loss"]]


def test_a_factor_of_the_learning_rate_and_a_reset() -> None:
    frozen = fleet("seed=0", "seed=0", actions={0: Action(lr_factor=0.0), 1: Action(reset="moments")})
    before: dict[str, torch.Tensor] = {}
    for result in train(frozen):
        if result.done == 10:  # both have just acted
            before = {name: tensor.clone() for name, tensor in frozen.tensors().items()}
        if result.done == 11:
            break
    clock = control(frozen).clock
    assert clock.age_r.tolist() == [11, 1]
    for name, weight in frozen.state.weights.items():
        assert torch.equal(weight[0], before[f"weight.{name}"][0])
        assert not before[f"adam.mean.{name}"][1].any()
        # the first update of a fresh Adam is the sign of the gradient times the learning rate, for gradients >> epsilon
        step = (before[f"weight.{name}"][1] - weight[1]).double()
        clear = frozen.state.links["adam"][f"mean.{name}"][1].abs() > 1e-6
        lr = float(frozen.shape_sr[10, 1]) * float(frozen.config.optimizer.lr[1])
        sign = frozen.state.links["adam"][f"mean.{name}"][1].sign().double()
        decay = float(frozen.shape_sr[10, 1]) * float(frozen.config.optimizer.links["decay"].weight_decay[1])  # type: ignore[attr-defined]
        expected = lr * sign + decay * before[f"weight.{name}"][1].double()
        assert torch.allclose(step[clear], expected[clear], rtol=2e-2, atol=lr * 1e-2)


def test_an_update_left_out_changes_nothing_and_the_run_stalls() -> None:
    stuck = Fleet(configs("seed=0", "seed=1", shared=(*NO_UPDATES, "response.norm=1e-9")))
    before = {name: tensor.clone() for name, tensor in stuck.tensors().items()}
    (run, _) = records(stuck)
    assert all(torch.equal(tensor, before[name]) for name, tensor in stuck.tensors().items())
    assert run.outcome["ending"] == "stalled"
    assert run.outcome["skipped_batches"] == 13  # one more than it has steps
    assert control(stuck).clock.age_r.tolist() == [0, 0]
    assert control(stuck).clock.batch_r.tolist() == [13, 13]  # its batch is not seen again


def test_no_update_is_left_out_before_the_start() -> None:
    (run,) = records(Fleet(configs("response.norm=1e-9", shared=(*NO_UPDATES, "response.start=9"))))
    assert [(step, kind) for step, _, kind, *_ in run.events][:1] == [(9, "skip_update")]


def test_one_run_leaves_out_its_updates_and_the_other_does_not() -> None:
    shared = NO_UPDATES
    pair = records(Fleet(configs("response.norm=1e-9", "response.norm=1e9", shared=shared)))
    (alone,) = records(Fleet(configs("response.norm=1e9", shared=shared)))
    assert pair[1] == alone
    assert pair[0].outcome["skipped_batches"] > 0 == pair[1].outcome["skipped_batches"]


def test_each_further_spike_lowers_the_rate_again() -> None:
    response = RestartAndLower(first_factor=0.5, repeated_factor=0.25, repeated_within=10)
    memory: Memory = {}
    actions = [response.act(Reading(step, 9.0, 1.0, spike_begins=True), memory) for step in (20, 29, 39, 40)]
    assert [action and action.lr_factor for action in actions] == [0.5, 0.125, 0.0625, None]


def test_a_reset_with_warm_up_rises_from_the_last_spike() -> None:
    response, memory = AdamResetWarmup(warmup=4, most=2), Memory()
    spikes = [False, True, False, False, True, False, False, False, False, False, True]
    actions = [response.act(Reading(step, 9.0, 1.0, begins), memory) for step, begins in enumerate(spikes)]
    factors = [action and action.lr_factor for action in actions]
    assert factors == [None, 0.0, 0.25, 0.5, 0.0, 0.25, 0.5, 0.75, 1.0, None, None]  # no third time
    assert [step for step, action in enumerate(actions) if action and action.reset == "moments"] == [1, 4]


# What a response needs, besides a spike, to act in a run of 8 steps.
NEEDED = {
    "rewind_and_skip": ("response.rewind=1",),
    "rewind_and_rescale": ("response.rewind=1", "precision=fp16_emulated", "loss_scale=torch"),
    "restart_and_lower": ("response.rewind=1",),
    "earlier_state": ("response.rewind_weights=1", "response.rewind_moments=1", "bad_batches=rare_tokens"),
    "branch": ("response.rewind=1", "response.snapshot_every=2", "response.start=0", "response.change=moments"),
    "skip_update": ("response.norm=1e-9", "response.start=4"),
    "activation_clamp": ("response.multiple=0.5",),
}


@pytest.mark.parametrize("name", few(RESPONSES, 1))
def test_every_response_changes_a_run_with_a_spike_and_lets_it_end(name: str) -> None:
    needed = ("model.depth=1", "steps=8", "schedule.warmup=2", *NEEDED.get(name, ()))
    answering = Fleet(configs("", shared=(f"response={name}", *needed)))
    silent = Fleet(configs("", shared=[key for key in needed if not key.startswith("response.")]))
    read = control(answering).read
    control(answering).read = lambda *about: {  # type: ignore[method-assign]
        run: reading._replace(spike_begins=reading.step == 4) for run, reading in read(*about).items()
    }
    losses = [records(made)[0].outcome["final_val_loss"] for made in (answering, silent)]
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_rewind_changes_no_record(tmp_path: Path) -> None:
    def made() -> Fleet:
        return fleet("seed=0", "seed=1", actions={1: Action(rewind=4, skip=5, lr_factor=0.5)})

    updates, resumed = list[int](), made()
    first, second = Recorder(made()), Recorder(resumed)
    checkpointer = Checkpointer(tmp_path, ["one", "two"], resumed.config.checkpoint)
    told = lambda: bool(updates) and updates[-1] == 11  # noqa: E731
    note = lambda result: updates.append(result.done)  # noqa: E731
    assert not train_resumably(first, checkpointer, note, print, told)
    assert train_resumably(second, checkpointer, note, print, lambda: False)
    assert updates == [result.done for result in train(made())]
    assert untimed(second) == records(made())


def test_the_estimate_of_memory_counts_snapshots() -> None:
    plain, armed = configs("", "response=rewind_and_skip response.snapshots=6", shared=("model.width=64",))
    state = sum(tensor.nbytes for tensor in Fleet([plain]).tensors().values())
    assert bytes_asked(armed) - bytes_asked(plain) == pytest.approx(7 * state, rel=0.05)


@pytest.mark.parametrize(("updates", "step"), [(1, 8), (3, 6), (4, 6), (9, 4)])
def test_a_run_goes_back_no_further_than_it_must(updates: int, step: int) -> None:
    clock, tensor = Clock.begin(2), torch.zeros(2)
    snapshots = Snapshots({"weight": tensor}, 3)
    for now in range(10):
        if now % 2 == 0:
            snapshots.take(clock)
        tensor += torch.tensor([1.0, 10.0])
        clock.tick(0, updated=True)
        clock.tick(1, updated=True)
    snapshots.go_back(0, clock, updates)
    assert clock.step_r.tolist() == [step, 10]
    assert tensor.tolist() == [step, 100]
    abandoned = [snapshot["position"]["step_r"][0] > step for snapshot in snapshots.ring]
    assert [not usable for usable, _ in (snapshot["usable_r"] for snapshot in snapshots.ring)] == abandoned
    assert all(usable for _, usable in (snapshot["usable_r"] for snapshot in snapshots.ring))


def test_a_run_that_goes_back_again_keeps_its_lower_learning_rate() -> None:
    made = fleet("seed=0", actions={0: Action(lr_factor=0.5)})
    for step in range(12):
        control(made).before_step()
        control(made).after_step()
        if step == 11:
            control(made).carry_out(0, Action(rewind=4))
    assert control(made).clock.step_r.tolist() == [8]  # before the factor was set, after step 9
    assert control(made).clock.lr_factor_r.tolist() == [0.5]


def test_an_update_of_nan_that_is_left_out_leaves_no_trace() -> None:
    weight = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    before = weight.clone()

    def update() -> None:
        weight.fill_(torch.nan)

    update_kept(update, torch.tensor([False, True]), [weight], traced=False)
    assert torch.equal(weight[0], before[0])
    assert weight[1].isnan().all()


def test_every_action_is_an_event() -> None:
    made = fleet("seed=0", actions={0: Action(rewind=4, skip=5, reset="moments", lr_factor=0.5)})
    for _ in range(10):
        control(made).before_step()
        control(made).after_step()
    assert [(step, batch, kind, value) for step, batch, kind, value, _ in control(made).logs[0].events] == [
        (6, 6, "rewind", 4),
        (6, 6, "skip_batches", 5),
        (6, 11, "reset", 0),
        (6, 11, "lr_factor", 0.5),
    ]


def test_a_record_counts_all_that_its_events_tell_of() -> None:
    """Of a run that goes back, skips batches and leaves out updates more than once, each by other numbers."""
    made = control(fleet("seed=0"))
    actions = {9: Action(rewind=4, skip=5), 13: Action(rewind=1), 15: Action(skip=2), 17: Action(rewind=9, skip=3)}
    for iteration in range(20):
        made.before_step()
        made.readings["kept"].fill_(iteration not in (11, 12))
        made.after_step()
        if iteration in actions:
            made.carry_out(0, actions[iteration])
    (log,) = made.logs
    rewinds, skips = (
        [value for *_, name, value, _ in log.events if name == kind] for kind in ("rewind", "skip_batches")
    )
    assert len(set(rewinds)) == len(set(skips)) == 3
    outcome = log.outcome()
    assert outcome["rewound_steps"] == sum(rewinds)
    assert outcome["skipped_batches"] == sum(skips) + 2
    assert made.clock.step_r[0] == 20 - 2 - outcome["rewound_steps"]


@pytest.mark.parametrize("response", [(), ("response=rewind_and_skip",)])
def test_held_out_losses_at_both_ends_are_of_the_whole_text(response: tuple[str, ...]) -> None:
    shared = ("model.depth=1", "steps=6", "schedule.warmup=2", "probes.every=1", "validation=whole", *response)
    made = brief(Fleet(configs("seed=0", "seed=1", shared=shared)))
    slices: list[torch.Tensor] = []
    loss = made.evaluation.loss

    def kept(*, whole: bool, **how: Any) -> torch.Tensor:
        slices.extend([] if whole else [loss(whole=False)])
        return loss(whole=whole, **how)

    made.evaluation.loss = kept  # type: ignore[method-assign]
    for run, (outcome, metrics, _) in enumerate(records(made)):
        losses = [value for _, probe, _, value in metrics if probe == "val_loss"]
        assert [losses[0], losses[-1]] == [outcome["loss_at_init"], outcome["final_val_loss"]]
        of_slices = [float(loss_r[run]) for loss_r in slices]
        assert losses[1:-1] == of_slices[-5:-1] if response else losses[1:-1] == of_slices
        assert not {losses[0], losses[-1]} & {*of_slices}


@pytest.mark.parametrize(("after", "end"), [(2.0, (33, "recovered", 7)), (6.5, (40, "stuck", 7))])
def test_bursts_spikes_and_endings_are_events(after: float, end: tuple[int, str, float]) -> None:
    shared = ("steps=40", "bad_batches=huge_loss", "bad_batches.start=30", "bad_batches.length=3")
    run = Fleet(configs("seed=0", shared=shared))
    watched = control(run)
    for loss in [2.0] * 30 + [6.0, 7.0, 6.0] + [after] * 7:
        watched.before_step()
        watched.readings["loss"].fill_(loss)
        watched.after_step()
    events = [(step, kind, value) for step, _, kind, value, _ in watched.logs[0].events]
    assert events == [(30, "burst", 1), (30, "spike", 6), end]
    assert watched.logs[0].ending == end[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_fleet_goes_back_as_an_eager_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    actions = {0: Action(rewind=4, skip=5), 1: Action(reset="moments", lr_factor=0.5)}
    eager, traced = (
        fleet("seed=0", "seed=1", actions=actions, shared=(f"engine={name}",)) for name in ("eager", "compiled")
    )
    pairs = list(zip(records(eager), records(traced), strict=True))
    for run, (one, other) in enumerate(pairs):
        assert [event[:4] for event in one.events] == [event[:4] for event in other.events]
        assert control(traced).logs[run].losses == pytest.approx(control(eager).logs[run].losses, rel=1e-4)
        assert other.outcome["final_val_loss"] == pytest.approx(one.outcome["final_val_loss"], rel=1e-4)
    again = fleet("seed=0", "seed=0", actions={0: Action(rewind=4)}, shared=("engine=compiled",))
    repeated, once = records(again)
    assert repeated.metrics == once.metrics


def test_a_spike_from_which_training_goes_back_has_recovered() -> None:
    made = control(fleet("seed=0"))
    for _ in range(10):
        made.before_step()
        made.after_step()
    made.logs[0].watch.first = 9
    made.carry_out(0, Action(rewind=4))
    assert made.logs[0].ending == "recovered"
    assert [kind for _, _, kind, *_ in made.logs[0].events] == ["recovered", "rewind"]


@pytest.mark.parametrize(("skip", "skipped"), [(2, 4), (7, 7)])
def test_no_batch_comes_twice_where_only_new_ones_may(skip: int, skipped: int) -> None:
    made = control(fleet("seed=0"))
    for _ in range(10):
        made.before_step()
        made.after_step()
    made.carry_out(0, Action(rewind=4, skip=skip, only_new=True))
    assert made.clock.at(0) == (6, 6 + skipped)
    assert made.logs[0].skipped_batches == skipped


def test_a_factor_of_the_learning_rate_is_noted_where_it_changes() -> None:
    made = control(fleet("seed=0"))
    for factor in (0.5, 0.5, 0.25):
        made.carry_out(0, Action(lr_factor=factor))
    assert [(kind, value) for _, _, kind, value, _ in made.logs[0].events] == [("lr_factor", 0.5), ("lr_factor", 0.25)]


def test_the_loss_of_an_update_left_out_counts_unless_it_overflowed() -> None:
    made = control(fleet("seed=0"))
    for kept, loss in ((1, 3.0), (0, 4.0), (0, math.inf), (1, 5.0)):
        made.readings["kept"].fill_(kept)
        made.readings["loss"].fill_(loss)
        made.after_step()
    assert made.logs[0].losses == [3.0, 4.0, 5.0]


def test_a_resumed_run_compares_its_next_loss_with_what_was_usual() -> None:
    shared = ("model.depth=1", "steps=12", "response=soft_lr_guard")
    before, resumed = (control(Fleet(configs("seed=0", "seed=1", shared=shared))) for _ in range(2))
    for loss in (3.0, 2.0):
        before.before_step()
        before.readings["loss"].copy_(torch.tensor([loss, 2 * loss]))
        before.after_step()
    resumed.restore(before.state())
    usual_loss_r = resumed.readings["usual_loss"]
    assert torch.equal(usual_loss_r, before.readings["usual_loss"])
    assert 0 < usual_loss_r[0] < usual_loss_r[1] < math.inf


def test_a_resumed_run_took_the_seconds_before_too() -> None:
    recorder = Recorder(fleet("seed=0"))
    recorder.keep(StepResult(0, 0, {}, torch.tensor([5.0])))
    recorder.restore({**recorder.state(), "seconds": 1000.0})
    assert recorder.runs()[0].outcome["wall_seconds"] >= 1000


def test_a_run_stalls_after_a_hundred_updates_left_out_in_a_row() -> None:
    readings = begin_readings(1, torch.device("cpu"))
    state = TrainingState({}, {}, torch.zeros(1), readings, ())
    made = Control(configs("seed=0", shared=("steps=300", "response=skip_update")), state, lambda run, name: None)
    for kept, updates in ((0, STALLED_FOR - 1), (1, 1), (0, STALLED_FOR - 1)):
        readings["kept"].fill_(kept)
        for _ in range(updates):
            made.after_step()
    assert not made.has_ended
    made.after_step()
    assert made.has_ended
    assert made.logs[0].ending == "stalled"


def test_a_run_stalls_after_twenty_overflows_at_the_floor_of_its_loss_scale() -> None:
    readings = begin_readings(1, torch.device("cpu"))
    state = TrainingState({}, {}, torch.zeros(1), readings, ())
    made = Control(configs("seed=0", shared=("steps=300", "response=skip_update")), state, lambda run, name: None)
    readings["kept"].fill_(0)
    endings = []
    for overflows in range(1, 21):
        readings["at_floor"].fill_(overflows)
        made.after_step()
        endings.append(made.logs[0].ending)
    assert endings == ["none"] * 19 + ["stalled"]
    assert made.has_ended


@pytest.mark.parametrize("weights", [True, False])
def test_part_of_a_state_that_goes_back_leaves_the_rest_and_the_other_runs_where_they_are(weights: bool) -> None:
    tensors = {"weight.head": torch.zeros(2, 3), "adam.first": torch.zeros(2, 3)}
    clock, snapshots = Clock.begin(2), Snapshots(tensors, most=3)
    for update in range(1, 7):
        if update in (2, 4):  # after one update, and after three
            snapshots.take(clock)
        for run in (0, 1):
            clock.tick(run, updated=True)
        for tensor in tensors.values():
            tensor.fill_(update)
    assert snapshots.restore_part(1, clock, 2, weights=weights) == 3
    assert tensors["weight.head"][:, 0].tolist() == [6, 3 if weights else 6]
    assert tensors["adam.first"][:, 0].tolist() == [6, 6 if weights else 3]
    assert (clock.step_r.tolist(), clock.batch_r.tolist()) == ([6, 6], [6, 6])
    assert clock.age_r.tolist() == [6, 6 if weights else 3]  # which the bias correction of Adam's moments follows
