"""Faults that look like a loss spike are told apart from one: each is planted in a run, which is then replayed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lab.model.loss import losses
from lab.studies.alarms.replays import ReplayEvidence, diagnose
from lab.training.fleet import Fleet
from pieces import model, tokens
from small import configs


def flip_exponent(weight: Tensor) -> None:
    """Flip one bit of one entry of a weight, in the exponent."""
    bits = weight.view(torch.int32).flatten()
    bits[:1] ^= 1 << 29


def last_bit(weight: Tensor) -> None:
    """Change every entry by one unit in the last place."""
    weight.copy_(weight.nextafter(torch.full_like(weight, torch.inf)))


Ending = tuple[float, dict[str, Tensor]]


def ending(change: Callable[[Tensor], None] | None) -> Ending:
    """The training loss of the sixth step, before which one weight was changed, and the weights after it."""
    fleet = Fleet(configs("", shared=("probes.every=1", "probes.names=[train_loss]", "model.depth=1")))
    for step in range(6):
        if change and step == 5:
            with torch.no_grad():
                change(fleet.state.weights["block0.mlp_up"])
        values = fleet.step(step)
    return values["train_loss", ""].item(), fleet.state.weights


def diagnosed(run: Ending, replay: Ending) -> str:
    returns = all(torch.equal(weight, replay[1][name]) for name, weight in run[1].items())
    return diagnose(ReplayEvidence(run[0], replay[0], returns, 1e-7, (1.0, 1.1), 1.0))


@pytest.fixture(scope="module")
def replay() -> Ending:
    return ending(None)


def test_a_replay_without_a_change_is_the_same_to_the_bit(replay: Ending) -> None:
    assert diagnosed(ending(None), replay) == "spike"


@pytest.mark.parametrize(("change", "name"), [(flip_exponent, "corrupted_state"), (last_bit, "rounding")])
def test_a_changed_weight_is_seen_in_the_replay(change: Callable[[Tensor], None], name: str, replay: Ending) -> None:
    assert diagnosed(ending(change), replay) == name


def test_one_broken_micro_batch_is_no_spike() -> None:
    """A spike of the data raises the norms of all micro-batches that hold such data, and comes again in the replay."""
    assert diagnose(ReplayEvidence(math.nan, 2.0, False, 1e-7, (1.0, math.nan, 0.9, 1.2), 1.0)) == "faulty_micro_batch"
    assert diagnose(ReplayEvidence(math.nan, math.nan, True, 1e-7, (1.0, math.nan, 0.9, 1.2), 1.0)) == "spike"
    assert diagnose(ReplayEvidence(9.0, 9.0, True, 1e-7, (60.0, 55.0), 1.0)) == "spike"
    assert diagnose(ReplayEvidence(math.nan, 2.0, False, 1e-7, (math.nan, math.nan), 1.0)) == "corrupted_state"


def parts_error(weigh: Callable[[int], float]) -> float:
    """Relative difference between the gradient of a batch and the weighted sum of those of two unequal parts."""
    made, rows_rbt = model(0), tokens(0, batch=6)
    trained = list(made.parameters())

    def gradient(rows: Tensor) -> Tensor:
        loss_r, _ = losses(made(rows[..., :-1])[0], rows[..., 1:], {})
        return torch.cat([part.flatten() for part in torch.autograd.grad(loss_r.sum(), trained)])

    whole = gradient(rows_rbt)
    summed = torch.stack([weigh(part.shape[1]) * gradient(part) for part in (rows_rbt[:, :2], rows_rbt[:, 2:])]).sum(0)
    return ((summed - whole).norm() / whole.norm()).item()


@pytest.mark.parametrize(
    ("weigh", "name"),
    [(lambda rows: rows / 6, "spike"), (lambda rows: 1 / 2, "scaling_bug"), (lambda rows: 1.0, "scaling_bug")],
    ids=["by tokens", "mean of means", "sum"],
)
def test_a_scaling_bug_shows_before_the_first_update(weigh: Callable[[int], float], name: str) -> None:
    assert diagnose(ReplayEvidence(3.0, 3.0, True, parts_error(weigh), (1.0, 1.1), 1.0)) == name
