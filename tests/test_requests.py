"""Requests that are carried out with a caution, and programs that are interrupted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lab.sweeping.cautions import find_cautions
from small import configs

HOME = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("warmup", "steps", "share"),
    [("500", 100, "20%"), ("100", 100, "99%"), ("101", 100, "98%"), ("0.999", 100, "99%"), ("0.5", 1, "0%")],
)
def test_a_warm_up_that_lasts_to_the_end_of_its_run_is_said_with_the_peak_it_reaches(
    warmup: str, steps: int, share: str
) -> None:
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


def test_tab_completion_and_status_load_neither_torch_nor_what_completion_does_not_need() -> None:
    program = (
        "import sys; from lab.__main__ import main; main(sys.argv[2:]); sys.exit(any(m in sys.modules for m in %r))"
    )
    for line, words, modules in (
        ("lab train model=d", ["-sc", "query=bash"], ("torch", "pandas")),
        ("", ["status", "results/quickstart"], ("torch", "hydra", "matplotlib")),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", program % (modules,), "lab", *words],
            env={"COMP_LINE": line, "COMP_POINT": str(len(line)), "PATH": "", "HOME": "/"},
            cwd=HOME,
            check=False,
            capture_output=True,
        )
        assert ended.returncode == 0, words
