"""The lab guards itself: the smoke sweep is what it was, and a recipe that is broken on purpose is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lab.analysis import load
from lab.analysis.curves import points
from lab.analysis.guard import check as gate
from lab.analysis.guard import compare, render
from lab.analysis.guard.compare import Comparison
from lab.analysis.sensitivity import paired
from lab.interventions.attention import QKLayerNorm
from lab.interventions.loss_terms import ZLoss
from lab.model import transformer
from lab.optim.links import Adam, Clip
from lab.optim.optimizer import Optimizer
from sweeping import finished

SMOKE = Path(__file__).parents[1] / "results" / "baselines" / "smoke.json"
ON = "intervention=[qk_layernorm,z_loss]"
pytestmark = pytest.mark.xdist_group("smoke")  # trained once for all of these
Fault = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smoke sweep as it stands."""
    folder = tmp_path_factory.mktemp("smoke") / "smoke"
    subprocess.run([sys.executable, "-m", "lab", "sweep", "smoke", f"out={folder}"], check=True, capture_output=True)
    return folder


def test_qk_layernorm_lowers_sensitivity_beyond_the_spread_of_seeds(smoke: Path) -> None:
    runs = load(smoke).runs
    assert len(runs) == 40
    gain = paired(points(runs), "without qk-layernorm", "with qk-layernorm").iloc[0]
    assert gain["total"].n == 5
    assert gain["total"].low > 0
    assert gain["above"].low > 0  # and it is instability that qk-layernorm takes away


def test_the_smoke_sweep_is_what_it_was(smoke: Path) -> None:
    found = check(smoke, SMOKE)
    assert found.verdict == "ok", "\n".join(render.text(found))
    assert len(found.changes) == 2 * len(compare.QUANTITIES) + 1


def check(folder: Path, baseline: Path, margin: float = 0.05) -> Comparison:
    return gate.check_folder(folder, baseline, margin).comparison


def qk_layernorm_off(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(QKLayerNorm, "attach", lambda self, runs, model: nn.Identity())


def decay_forms_swapped(patch: pytest.MonkeyPatch) -> None:
    step = Optimizer.step

    def swapped(optimizer: Optimizer, *given: Any) -> None:
        names = list(optimizer.links)
        places = {"peak": names.index("decay"), "decay": names.index("peak")}
        names = sorted(names, key=lambda name: places.get(name, names.index(name)))
        step(replace(optimizer, links={name: optimizer.links[name] for name in names}), *given)

    patch.setattr(Optimizer, "step", swapped)


def z_loss_flipped(patch: pytest.MonkeyPatch) -> None:
    call = ZLoss.__call__
    patch.setattr(ZLoss, "__call__", lambda self, log_z_rbt: -call(self, log_z_rbt))


def rope_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transformer, "rotate", lambda x_tk, scale=1.0: scale * x_tk)


def clip_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Clip, "__call__", lambda self, updates, state, now: updates)


def epsilon_large(patch: pytest.MonkeyPatch) -> None:
    call = Adam.__call__
    patch.setattr(
        Adam, "__call__", lambda self, *given: call(replace(self, eps=torch.full_like(self.eps, 0.1)), *given)
    )


def broken(fault: Fault, folder: Path, *words: str) -> Path:
    """A sweep trained with a fault in the code, its config the same."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        finished(folder, "sweep", *words, "hydra/launcher=basic")
    return folder


def told(found: Comparison) -> set[str]:
    return {f"{change.arm}: {change.quantity}" for change in found.changes if change.verdict == "regression"}


def test_qk_layernorm_silently_off_is_found(smoke: Path, tmp_path: Path) -> None:
    for run in load(smoke).runs.query("intervention == 'z_loss'")["id"]:  # which it cannot change
        copytree(smoke / "runs" / run, tmp_path / "off" / "runs" / run)
    (tmp_path / "off" / "store.json").write_text((smoke / "store.json").read_text())
    found = check(broken(qk_layernorm_off, tmp_path / "off", "smoke"), SMOKE)
    assert found.verdict == "regression"
    parts = ("LR sensitivity", "its instability part", "growth of the attention logits")
    assert told(found) == {f"with qk-layernorm: {part}" for part in parts}
    assert found.remarks == []  # nothing in the config tells


@pytest.mark.slow
def test_a_large_epsilon_is_found(tmp_path: Path) -> None:
    found = check(broken(epsilon_large, tmp_path / "smoke", "smoke"), SMOKE)
    assert found.verdict == "regression"
    assert "with qk-layernorm: LR sensitivity" in told(found)


class Unseen(NamedTuple):
    """A fault that the smoke sweep cannot see, why not, and the words of a sweep that sees it, within a margin."""

    fault: Fault
    why: str
    words: tuple[str, ...]
    margin: float = 0.05


BRIEF = ("data=synthetic", "batch_size=6", "steps=200", "seed=0,1,2,3,4", "model=d32")
UNSEEN = {
    "decay forms swapped": Unseen(
        decay_forms_swapped,
        "in 200 steps a decay of 1e-4 shrinks weights by 2 % at most, in either form",
        ("weight_decay", *BRIEF, "optimizer.lr=1e-2,3e-2,1e-1"),
    ),
    "z-loss sign flipped": Unseen(
        z_loss_flipped,
        "with a coefficient of 1e-4 log Z has no time to run away; with one of 1e-2 it has",
        ("smoke", ON, "intervention.z_loss.coefficient=1e-2", "seed=0,1,2"),
    ),
    "RoPE dropped": Unseen(
        rope_dropped,
        "in 200 steps of the synthetic text models learn which token follows which, and no positions",
        ("quickstart", "model=d32", ON, "optimizer.lr=3e-3,1e-2,3e-2"),
    ),
    "clip ignored": Unseen(
        clip_ignored,
        "gradients are below norm 1 but for the first steps, and Adam divides by their size; where attention is "
        "saturated their norm jumps up to a hundredfold",
        ("kappa", *BRIEF, "model.depth=2", "intervention.kappa_transplant.kappa=1e4", "optimizer.lr=3e-3,1e-2"),
        margin=0.02,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", UNSEEN)
def test_what_the_smoke_sweep_cannot_see_another_sweep_does(name: str, tmp_path: Path) -> None:
    fault, _, words, margin = UNSEEN[name]
    assert check(broken(fault, tmp_path / "smoke", "smoke"), SMOKE).verdict == "ok"
    finished(tmp_path / "whole", "sweep", *words, "hydra/launcher=basic")
    found = check(broken(fault, tmp_path / "broken", *words), tmp_path / "whole", margin)
    assert found.verdict == "regression", "\n".join(render.text(found))
