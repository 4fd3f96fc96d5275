"""An earlier state at a burst: weights, moments or both go back, while steps, data and neighbours go on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab import Fleet
from lab.core import machine
from lab.training.loop import train
from lab.training.recorder import Run
from small import configs, records
from test_clock import control

BURST, STEPS = 10, 16
SHARED = (
    "model.depth=1",
    f"steps={STEPS}",
    "schedule.warmup=2",
    "probes.every=4",
    "bad_batches=rare_tokens",
    f"bad_batches.start={BURST}",
)
ARMED = (*SHARED, "bad_batches.length=2", "response=earlier_state", "response.snapshot_every=2", "response.snapshots=4")
CELLS = {
    f"response.rewind_weights={weights} response.rewind_moments={moments}": (weights, moments)
    for weights in (0, 4)
    for moments in (0, 4)
}


pytestmark = pytest.mark.usefixtures("as_in_training")


def fleet(*per_run: str, shared: tuple[str, ...] = ()) -> Fleet:
    return Fleet(configs(*per_run, shared=(*ARMED, *shared)))


@pytest.fixture(scope="module")
def states() -> list[dict[str, Tensor]]:
    """What the four cells hold before each update, each in a row of every tensor."""
    machine.configure_torch()
    made = fleet(*CELLS)
    kept = list[dict[str, Tensor]]()
    for _ in train(made):  # the first result comes before the first update
        ages_r = torch.tensor(control(made).clock.age_r)
        kept.append({name: tensor.clone() for name, tensor in made.tensors().items()} | {"age": ages_r})
    return kept


@pytest.mark.slow
def test_each_cell_has_the_weights_and_moments_that_it_names_and_none_else(states: list[dict[str, Tensor]]) -> None:
    at_burst, untouched = states[BURST], 0
    for run, (weights, moments) in enumerate(CELLS.values()):
        for name in states[0]:
            back = weights if name.startswith("weight.") else moments
            assert torch.equal(at_burst[name][run], states[BURST - back][name][untouched]), (name, weights, moments)
    assert at_burst["age"].tolist() == [BURST, BURST - 4, BURST, BURST - 4]
    assert not torch.equal(at_burst["weight.embedding"][0], at_burst["weight.embedding"][3])


def ended(made: Fleet) -> list[Run]:
    runs = records(made)
    assert control(made).clock.step_r.tolist() == control(made).clock.batch_r.tolist() == [STEPS] * len(runs)
    return runs


@pytest.fixture(scope="module")
def together() -> list[Run]:
    """The records of the four cells, trained as one fleet."""
    machine.configure_torch()
    return ended(fleet(*CELLS))


@pytest.mark.slow
@pytest.mark.parametrize("cell", [1, 2])
def test_a_cell_has_the_same_bits_alone(cell: int, together: list[Run]) -> None:
    assert ended(fleet(list(CELLS)[cell])) == [together[cell]]


def test_the_cells_differ_from_the_burst_on_and_not_before(together: list[Run]) -> None:
    losses = [{step: value for step, probe, _, value in run.metrics if probe == "train_loss"} for run in together]
    assert len({tuple(one[step] for step in (0, 4, 8)) for one in losses}) == 1
    assert len({one[12] for one in losses}) == 4


@pytest.mark.slow
def test_what_went_back_is_an_event_also_where_it_is_nothing(together: list[Run]) -> None:
    gone_back = [[event[:4] for event in run.events if event[2].startswith("rewind")] for run in together]
    assert gone_back == [
        [(BURST, BURST, "rewind_weights", weights), (BURST, BURST, "rewind_moments", moments)]
        for weights, moments in CELLS.values()
    ]
    (calm,) = ended(fleet(next(iter(CELLS)), shared=("bad_batches.fraction=0",)))
    assert [event[2] for event in calm.events] == ["rewind_weights", "rewind_moments"]


def test_nothing_gone_back_is_a_run_without_a_response(together: list[Run]) -> None:
    (free,) = records(Fleet(configs("", shared=(*SHARED, "bad_batches.length=2"))))
    assert together[0].metrics == free.metrics
    assert together[0].outcome["final_val_loss"] == free.outcome["final_val_loss"]
