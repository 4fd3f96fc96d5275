"""Requests that are carried out with a caution, and programs that are interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.sweeping.cautions import find_cautions, find_single_rates
from small import configs

HOME = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("warmup", "steps", "share"),
    [("500", 100, "20%"), ("0.999", 100, "99%"), ("0.5", 1, "0%")],
)
def test_a_warm_up_to_the_end_is_said_with_its_peak(warmup: str, steps: int, share: str) -> None:
    requested = configs("schedule.warmup=0", f"schedule.warmup={warmup}", shared=(f"steps={steps}",))
    [line] = find_cautions(requested[1:] if steps == 1 else requested)
    assert line.startswith(f"the warm-up lasts to the end of 1 of {1 if steps == 1 else 2} runs: one of ")
    assert f"in a run of {steps} lets the learning rate rise to {share} of its peak" in line


@pytest.mark.parametrize("words", ["schedule.warmup=99", "schedule.warmup=0.99", "schedule.warmup=0", "schedule=wsd"])
def test_a_warm_up_that_ends_needs_no_word(words: str) -> None:
    assert list(find_cautions(configs(words, shared=("steps=100",)))) == []


def test_what_has_nothing_to_attach_to_is_said() -> None:
    requested = configs(
        "model.depth=0 intervention=[qk_layernorm,z_loss]",
        "model.depth=0 intervention=[z_loss]",
        "model.depth=0 intervention=[kappa_transplant]",
        "model.depth=1 intervention=[qk_layernorm,z_loss]",
    )
    assert list(find_cautions(requested)) == [
        f"{name} changes nothing in 1 of 4 runs: a model of depth 0 has no blocks to attach it to"
        for name in ("kappa_transplant", "qk_layernorm")
    ]
    assert list(find_cautions(requested[3:])) == []
    # a model without blocks has a head, whose initial values are at no hook point
    assert list(find_cautions(configs("model.depth=0 intervention=[head_init]"))) == []


@pytest.mark.parametrize(
    ("name", "idle", "active"),
    [
        ("nope", "intervention.nope.every=3", "intervention.nope.every=2"),
        ("grouped_query_attention", "model.head_width=16", "model.head_width=8"),
        ("grouped_query_attention", "intervention.grouped_query_attention.queries=1", ""),
    ],
)
def test_what_no_block_and_no_head_has_is_said(name: str, idle: str, active: str) -> None:
    requested = configs(f"intervention=[{name}] {idle}", f"intervention=[{name}] {active}")
    (line,) = find_cautions(requested)
    assert line.startswith(f"{name} changes nothing in 1 of 2 runs")
    assert list(find_cautions(requested[1:])) == []


def test_a_floor_that_no_peak_exceeds_is_said() -> None:
    lrs = ("optimizer.lr=0.01", "optimizer.lr=0.1", "optimizer.lr=0.2")
    (line,) = find_cautions(configs(*lrs, shared=("schedule.floor=0.1",)))
    assert line.startswith("the schedule is constant after its warm-up in 2 of 3 runs: a floor of 0.1 is not below ")
    assert "a peak of 0.01" in line
    assert "schedule.floor_share" in line
    (line,) = find_cautions(configs(*lrs, shared=("schedule=wsd", "schedule.floor_share=1")))
    assert "in 3 of 3 runs" in line
    assert list(find_cautions(configs(*lrs, shared=("schedule.floor=9e-3",)))) == []
    assert list(find_cautions(configs(*lrs, shared=("schedule=constant",)))) == []


RATES = ("optimizer.lr=0.01", "optimizer.lr=0.03", "optimizer.lr=0.1")
FOLLOWING = {
    "schedule.floor": "schedule.floor='${divide:${optimizer.lr},10}'",
    "optimizer.weight_decay": "optimizer.weight_decay='${divide:${optimizer.lr},100}'",
    "intervention.z_loss.coefficient": "intervention.z_loss.coefficient=${optimizer.lr}",
}


@pytest.mark.parametrize("key", FOLLOWING)
def test_a_key_that_makes_each_learning_rate_an_arm_is_named(key: str) -> None:
    shapes = ("model.width=16 seed=0", "model.width=16 seed=1", "model.width=32 seed=0")
    requested = configs(*(f"{rate} {shape} {FOLLOWING[key]}" for rate in RATES for shape in shapes))
    (line,) = find_single_rates(requested)
    assert line.startswith(f"{key} has another value at each learning rate")
    assert ("schedule.floor_share" in line) == (key == "schedule.floor")


def test_all_keys_that_follow_the_learning_rate_are_named_together() -> None:
    (line,) = find_single_rates(configs(*RATES, shared=tuple(FOLLOWING.values())))
    assert line.startswith(
        "intervention.z_loss.coefficient, optimizer.weight_decay and schedule.floor have other values at each "
    )


@pytest.mark.parametrize(
    "words",
    [
        [f"{rate} batch_size={size} seed={seed}" for rate in RATES for size in (2, 4) for seed in (0, 1)],
        [f"optimizer={name} optimizer.lr={lr}" for name, lr in (("adamw", 0.01), ("lion", 0.001), ("sgd", 1))],
        RATES[:1],
    ],
    ids=lambda words: words[0],
)
def test_a_sweep_whose_arms_have_several_learning_rates_needs_no_word(words: list[str]) -> None:
    assert list(find_single_rates(configs(*words))) == []


ENDED = "interrupted; the same command trains what is missing\n"
INTERRUPTED_IMPORT = """
class Swallowing:  # as libraries do: the interrupt of an import becomes another error
    def find_spec(self, name, *_):
        if name == "lab.cli.commands":
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(9999):
                    pass
            except KeyboardInterrupt:
                raise ImportError(name)

sys.meta_path.insert(0, Swallowing())
"""
INTERRUPTED_FINALIZER = """
class Finalized:  # where Python raises nothing
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(9999):
            pass

import lab.cli.dispatch
lab.cli.dispatch.run = lambda words: Finalized() and 0
"""
INTERRUPTED_AT_EXIT = """
import atexit
atexit.register(os.kill, os.getpid(), signal.SIGINT)
"""
INTERRUPTED_AT_WORK = """
import lab.cli.dispatch
def work(words):
    os.kill(os.getpid(), signal.SIGINT)
    while True:
        pass
lab.cli.dispatch._dispatch = work
"""


@pytest.mark.parametrize(
    ("moment", "code", "error"),
    [
        (INTERRUPTED_IMPORT, 130, ENDED),
        (INTERRUPTED_FINALIZER, 130, ENDED),
        (INTERRUPTED_AT_WORK, 130, ENDED),
        (INTERRUPTED_AT_EXIT, 0, ""),
    ],
    ids=["import", "finalizer", "work", "exit"],
)
def test_an_interrupt_ends_in_one_line_whatever_is_going_on(moment: str, code: int, error: str) -> None:
    program = f"import os, signal, sys; from lab.__main__ import main\n{moment}\nsys.exit(main())"
    ended = subprocess.run(
        [sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (code, error)
