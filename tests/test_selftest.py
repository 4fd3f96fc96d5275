"""`lab selftest` passes on a sound machine, and names the core, device or rank that computes something else."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch

from lab.__main__ import main
from lab.core import shipped
from lab.features.selftest import command as selftest
from test_gates_page import SCHEMA
from test_ranks import ENVIRONMENT, TORCHRUN


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller matrices, one known run, and two cores that are said to be there."""
    monkeypatch.setattr(selftest, "SIZE", 32)
    monkeypatch.setattr(selftest, "SECONDS", 0.0)
    monkeypatch.setattr(selftest, "_cores", lambda: [*os.sched_getaffinity(0)][:1] * 3)
    monkeypatch.setattr(selftest, "_losses", lambda words: trained(tuple(words)))
    table = shipped.load(selftest.Path(selftest.__file__).with_suffix(".yaml"))
    brief = {**table, "runs": {"fp32": table["runs"]["fp32"]}}
    monkeypatch.setattr(selftest.shipped, "load", lambda path: brief if "selftest" in str(path) else load(path))


load, losses = shipped.load, selftest._losses


@cache
def trained(words: tuple[str, ...]) -> dict[int, float]:
    """Losses of a run, trained once for all tests."""
    return losses([*words])


def said(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["selftest", "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_sound_machine_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, content = said(capsys)
    jsonschema.validate(content, {**SCHEMA, "anyOf": [{"$ref": "#/$defs/selftest"}]})
    assert (code, content["passes"], content["differing"]) == (0, True, [])
    names = {check["name"] for check in content["checks"]}
    assert {f"matmul in {name} against float64" for name in ("float32", "bfloat16", "float16")} <= names
    assert sum("loss at step" in name for name in names) == 4
    assert main(["selftest"]) == 0
    assert "checks pass" in capsys.readouterr().out


def test_a_core_with_other_bits_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, matrices = iter([7, 8, 9]), selftest._matrices
    monkeypatch.setattr(selftest, "_cores", lambda: list(numbers))
    monkeypatch.setattr(selftest, "_on_core", lambda core: on_core(core))
    on: list[int | None] = []

    def on_core(core: int | None) -> Any:
        on.append(core)
        return selftest._alone()

    def spoiled(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = matrices(device, dtype)
        first[0, 0] += 0.5 * (on[-1] == 8)
        return first, second

    monkeypatch.setattr(selftest, "_matrices", spoiled)
    code, content = said(capsys)
    assert (code, content["differing"]) == (1, ["core 8"])


def test_a_run_that_learns_something_else_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = iter([0.0, 0.1])
    known = load(selftest.Path(selftest.__file__).with_suffix(".yaml"))
    words = (*known["shared"], *known["runs"]["fp32"]["words"], "device=cpu")

    def repeated(_: list[str]) -> dict[int, float]:
        offset = next(offsets)
        return {step: loss + (offset if step else 0) for step, loss in trained(words).items()}

    monkeypatch.setattr(selftest, "_losses", repeated)
    code, content = said(capsys)
    failed = [check["name"] for check in content["checks"] if not check["passes"]]
    assert code == 1
    assert failed == ["training in fp32, repeats that differ"]
    monkeypatch.setattr(selftest, "_losses", lambda _: dict.fromkeys(trained(words), float("nan")))
    code, content = said(capsys)
    failed = {check["name"] for check in content["checks"] if not check["passes"]}
    assert code == 1
    assert "training in fp32, loss at step 60" in failed


@pytest.mark.slow
def test_each_rank_is_tested() -> None:
    words = [*TORCHRUN, "-m", "lab", "selftest", "--json"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places = {check["place"] for check in json.loads(done.stdout)["checks"]}
    assert any(place.startswith("rank 0 core") for place in places)
    assert any(place.startswith("rank 1 core") for place in places)
