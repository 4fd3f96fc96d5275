"""A config holds what its fields allow, says so in one line where it does not, and stacks run by run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from lab import PerRun, PerRunSeed, bounded, one_of, over, per_run_max, per_run_mean, per_run_norm, per_run_rms
from lab.core.schema import build, leaves, stack
from pieces import CPU


@dataclass(frozen=True)
class Inner:
    """A part."""

    coefficient: PerRun = bounded(at_least=0, below=1)


@dataclass(frozen=True)
class Sample:
    """A config with a field of every kind."""

    width: int = bounded(above=0)
    rate: PerRun = bounded(above=0)
    device: str = one_of("cpu", "cuda")
    names: tuple[str, ...] = ()
    seed: PerRunSeed = 0
    parts: dict[str, Inner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.width == 13:
            raise ValueError("width 13 is unlucky")


GOOD: dict[str, Any] = {"width": 8, "rate": 1e-3, "device": "cpu", "names": ["a", "b"], "seed": 3}


def test_values_come_out_in_the_type_of_their_field() -> None:
    made = build(Sample, {**GOOD, "width": "1e2", "rate": "1e-3", "seed": 4.0}, "")
    assert made == Sample(100, 1e-3, "cpu", ("a", "b"), 4)
    assert [type(value) for value in (made.width, made.rate, made.seed)] == [int, float, int]
    assert isinstance(build(Sample, {**GOOD, "rate": 1}, "").rate, float)
    assert build(Sample, {**GOOD, "seed": 2**60 + 1}, "").seed == 2**60 + 1


def sample(rate: float, seed: int, coefficient: float) -> Sample:
    return build(Sample, {**GOOD, "rate": rate, "seed": seed, "parts": {"b": Inner(coefficient), "a": Inner(0.5)}}, "")


def test_leaves_know_which_fields_may_differ_inside_a_fleet() -> None:
    found = {key: (value, free) for key, value, free in leaves(sample(1e-3, 3, 0.1))}
    assert found == {
        "width": (8, False),
        "rate": (1e-3, True),
        "device": ("cpu", False),
        "names": (("a", "b"), False),
        "seed": (3, True),
        "parts.a.coefficient": (0.5, True),
        "parts.b.coefficient": (0.1, True),
    }


def test_stacking_makes_vectors_of_numbers_per_run() -> None:
    together = stack([sample(1e-3, 3, 0.1), sample(0.3, 3, 0.0), sample(1e-3, 2**60 + 1, 0.2)], CPU)
    assert together.rate.tolist() == [1e-3, 0.3, 1e-3]
    assert together.rate.dtype == torch.float64
    assert together.seed == (3, 3, 2**60 + 1)
    assert together.parts["b"].coefficient.tolist() == [0.1, 0.0, 0.2]
    assert list(together.parts) == ["b", "a"]
    assert (together.width, together.device, together.names) == (8, "cpu", ("a", "b"))
    assert stack([sample(1e-3, 3, 0.1)], CPU).rate.tolist() == [1e-3]  # a fleet of one is a run


def test_one_number_per_run_meets_every_entry_of_that_run() -> None:
    number_r, tensor_rbt = torch.tensor([2.0, 1 / 3], dtype=torch.float64), torch.ones(2, 3, 4)
    spread = over(number_r, tensor_rbt)
    assert isinstance(spread, torch.Tensor)
    assert spread.shape == (2, 1, 1)
    assert spread.dtype == torch.float32  # rounded once, to the precision it meets
    assert (spread * tensor_rbt)[1].eq(torch.tensor(1 / 3)).all()
    assert over(number_r, torch.ones(2)).shape == (2,)
    assert over(0.5, tensor_rbt) == 0.5


def test_reductions_keep_the_runs_apart() -> None:
    x_rbt = torch.tensor([[[1.0, -2.0], [3.0, 4.0]], [[0.0, math.nan], [5.0, 6.0]], [[-3.0, -3.0], [-3.0, -3.0]]])
    broken = [False, True, False]
    for reduce, expected in ((per_run_mean, [1.5, -3]), (per_run_max, [4, -3]), (per_run_rms, [math.sqrt(7.5), 3])):
        value_r = reduce(x_rbt)
        assert value_r.isnan().tolist() == broken
        assert value_r[[0, 2]].tolist() == pytest.approx(expected)
    norm_r = per_run_norm([x_rbt, x_rbt[:, 0]])
    assert norm_r.isnan().tolist() == broken
    assert norm_r[[0, 2]].tolist() == pytest.approx([math.sqrt(35), math.sqrt(54)])
