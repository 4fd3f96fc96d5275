"""Fast paths do what the plain one does: bf16 products, fp32 products by oneDNN, the compiled step."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from cap import HiddenQuartic, LogitOfTarget
from lab import Fleet, RunConfig
from lab.core import machine
from lab.core.errors import RequestError
from lab.core.registry import INTERVENTIONS
from lab.records import store
from lab.sweeping.launch import train_plan
from lab.sweeping.planner import WORTH_COMPILING, Point, engine_for, plan_sweep, training_flops, with_engine
from lab.sweeping.request import Request
from lab.training import engine
from lab.training.identity import static_key
from lab.training.loop import train
from sampling import few
from small import configs, trained, tree

RATES = ("optimizer.lr=1e-3 seed=0", "optimizer.lr=1e-1 seed=1", "optimizer.lr=3e-2 seed=1 optimizer.eps=1e-6")


def losses(wanted: list[RunConfig], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Training loss ``[s r]`` at every step, in float64."""
    fleet = Fleet([replace(config, probes=replace(config.probes, every=1)) for config in wanted], dtype)
    return torch.stack([result.probe_values["train_loss", ""].double() for result in list(train(fleet))[1:]])


@pytest.mark.slow
def test_bf16_keeps_the_first_digits_of_a_loss() -> None:
    """Of untrained models two or three, since eight bits are kept of what is multiplied; fewer as steps go by."""
    exact = losses(configs(*RATES), torch.float64)
    full, half = (losses(configs(*RATES, shared=(f"precision={name}",))) for name in ("fp32", "bf16"))
    torch.testing.assert_close(full[0], exact[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(half[0], exact[0], rtol=3e-3, atol=0)
    torch.testing.assert_close(half, exact, rtol=2e-2, atol=0)  # and it learns what the others learn
    assert not torch.allclose(half[0], full[0], rtol=1e-6)  # it did round


def test_weights_state_and_what_is_normalized_stay_fp32() -> None:
    fleet = Fleet(configs(*RATES, shared=("precision=bf16", "probes.every=1")))
    heard = fleet.step(0)
    kept = [*fleet.state.weights.values(), *fleet.state.links["adam"].values(), heard["block_rms", "block0"]]
    assert {tensor.dtype for tensor in kept} == {torch.float32}


def test_a_bf16_run_is_the_same_bits_in_any_company() -> None:
    shared = ("precision=bf16", "seq_len=16", "batch_size=8")
    together = trained(configs(*RATES, shared=shared))
    assert repr(together) == repr([trained([config])[0] for config in configs(*RATES, shared=shared)])


@pytest.mark.parametrize("rounds", [False, True])
def test_fp32_products_go_to_onednn_only_if_it_keeps_them_exact(rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    switch = machine._matmul_backend()
    before = switch.fp32_precision
    true_bmm = torch.bmm

    def bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Of a library that rounds operands to bf16, or of one that is exact, whatever this processor's does."""
        kept = a.dtype if a.dtype != torch.float32 or not rounds else torch.bfloat16
        return true_bmm(a.to(kept).double(), b.to(kept).double()).to(a.dtype)

    monkeypatch.setattr(torch, "bmm", bmm)
    try:
        for intel, bf16, library in [
            (False, True, "MKL" if rounds else "oneDNN"),
            (True, True, "MKL"),
            (False, False, "MKL"),
        ]:
            switch.fp32_precision = "none"
            monkeypatch.setattr(machine, "is_intel", lambda intel=intel: intel)
            monkeypatch.setattr(machine, "multiplies_bf16", lambda bf16=bf16: bf16)
            machine.configure_torch()
            assert machine.matmul_library() == library
    finally:
        switch.fp32_precision = before
        torch.set_flush_denormal(False)


def compiles(test: Any) -> Any:
    """A test that compiles; torch warns of its own ways."""
    if_it_can = pytest.mark.skipif(not engine.can_compile(), reason="no C++ compiler here")
    return if_it_can(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


BROKEN = "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=2"


EVERY_STEP = "probes.every=1 probes.names=[train_loss,attention_logit_max,grad_norm]"  # one graph, and not the largest


def test_compiled_code_is_kept_for_each_instruction_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for longer vectors writes beyond the end of tensors where another process compiles its kernels anew."""

    def folder(capability: str) -> str:
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)  # and the folder stays from the process before
        machine.configure_process()
        return os.environ["TORCHINDUCTOR_CACHE_DIR"]

    monkeypatch.setenv("LAB_CACHE", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    folders = [folder(capability) for capability in ("avx2", "avx512", "avx2")]
    assert folders[0] == folders[2] != folders[1]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    assert folder("avx512") == "elsewhere"


def test_processes_that_start_from_here_ask_for_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not (pages.exists() and "[madvise]" in pages.read_text() and platform.libc_ver() >= ("glibc", "2.35")):
        pytest.skip("only glibc from 2.35 on asks, where the kernel gives them on demand")
    asks = "large = bytearray(2**26); print(any('hg' in line.split() for line in open('/proc/self/smaps')))"
    for given, wanted in ((None, "True"), ("glibc.malloc.hugetlb=0", "False")):  # the user's own setting stays
        monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
        if given:
            monkeypatch.setenv("GLIBC_TUNABLES", given)
        machine.configure_process()
        assert subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True).stdout.strip() == wanted


@compiles
@pytest.mark.parametrize(
    ("precision", "probes"),
    [("fp32", EVERY_STEP), ("bf16", "probes=all")],
)
@pytest.mark.slow
def test_a_compiled_run_is_an_eager_one(precision: str, probes: str) -> None:
    """To rounding, step by step and probe by probe; a run that breaks does so at the same step."""
    shared = (f"precision={precision}", "model.depth=1", "optimizer.beta2=0.99", *probes.split())
    wanted = configs(*RATES[:2], BROKEN, shared=shared)
    eager, compiled = (trained([replace(config, engine=name) for config in wanted]) for name in ("eager", "compiled"))
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for (outcome, rows), (fast_outcome, fast_rows) in zip(eager, compiled, strict=True):
        assert {key: outcome[key] for key in ("status", "diverged_at")} == {
            key: fast_outcome[key] for key in ("status", "diverged_at")
        }
        assert [row[:3] for row in rows] == [row[:3] for row in fast_rows]
        if outcome["status"] == "finished":
            values, fast = (torch.tensor([row[3] for row in of]) for of in (rows, fast_rows))
            torch.testing.assert_close(fast, values, rtol=tolerance, atol=tolerance)
    assert eager[2][0]["diverged_at"] is not None


@pytest.mark.slow
def test_a_users_loss_terms_are_the_same_traced_and_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    for name, term in (("hidden", HiddenQuartic), ("target", LogitOfTarget)):
        monkeypatch.setitem(INTERVENTIONS._entries, name, term)
    coefficients = ("+intervention.hidden.coefficient=0", "+intervention.target.coefficient=0")
    per_run = ("", "intervention.hidden.coefficient=1", "intervention.target.coefficient=0.1")
    wanted = configs(
        *per_run, shared=(*coefficients, "optimizer.lr=1e-2", "model.depth=1", "probes.names=[train_loss]")
    )
    eager, traced = (losses([replace(config, engine=name) for config in wanted]) for name in ("eager", "compiled"))
    torch.testing.assert_close(eager, traced, rtol=1e-5, atol=0)
    assert len(set(eager[-1].tolist())) == len(wanted)


@compiles
@pytest.mark.slow
def test_compiled_listening_and_place_change_no_bits() -> None:
    """Company changes none of what is trained here; for a fleet of another size sums may be taken in another order."""
    shared = ("precision=bf16", "engine=compiled", "model.depth=1", "probes.names=[train_loss,attention_logit_max]")
    heard = trained(configs(*RATES, shared=shared))
    deaf = trained(configs(*RATES, shared=(*shared, "probes=none")))
    assert [outcome for outcome, _ in heard] == [outcome for outcome, _ in deaf]
    assert repr(heard) == repr(trained(configs(*RATES[::-1], shared=shared))[::-1])
    [(outcome, rows)] = trained(configs(RATES[0], shared=shared))
    assert outcome["final_val_loss"] == pytest.approx(heard[0][0]["final_val_loss"], rel=1e-6)
    assert [row[-1] for row in rows] == pytest.approx([row[-1] for row in heard[0][1]], rel=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")
def test_a_captured_step_is_the_step() -> None:
    """Every step moves the state once, the first one, too; values outlive the next step."""
    shared = ("device=cuda", "probes.every=1")
    eager, captured = (losses(configs(*RATES, shared=(*shared, f"engine={name}"))) for name in ("eager", "compiled"))
    torch.testing.assert_close(captured, eager, rtol=1e-4, atol=1e-4)


def point(*overrides: str) -> Point:
    (config,) = configs("", shared=overrides)
    return Point(" ".join(overrides), tree(*overrides), config, static_key(config))


def test_compiled_where_the_work_repays_it_for_all_shapes_together() -> None:
    """A rule on all points asked for; what a point costs is counted in FLOPs, and never timed."""
    steps = math.ceil(12 * WORTH_COMPILING["cpu"] / training_flops(point().config))
    long = point(f"steps={steps}")
    assert training_flops(long.config) == pytest.approx(WORTH_COMPILING["cpu"], rel=0.01)
    assert engine_for([long, point(f"steps={steps}", "optimizer.lr=0.5")]) == "compiled"
    assert engine_for([long, point("model.depth=1")]) == "eager"
    assert engine_for([long, point(f"steps={steps}", "optimizer.lr=0.5"), point("model.depth=1")]) == "compiled"
    halves = [point(f"steps={steps // 2 + 1}", f"seed={seed}") for seed in range(2)]
    assert engine_for(halves[:1]) == "eager"
    assert engine_for(halves) == "compiled"


def test_a_gpu_captures_what_is_not_worth_compiling() -> None:
    """Except a custom model, whose code may look at values."""
    short = point("steps=10")
    assert engine_for([short], "cuda") == "captured"
    longer = point(f"steps={math.ceil(10 * WORTH_COMPILING['cuda'] / training_flops(short.config))}")
    assert engine_for([longer], "cuda") == "compiled"
    assert engine_for([longer], "cuda", compiles=False) == "captured"
    custom = replace(short, config=replace(short.config, custom_model=object()))
    assert engine_for([custom], "cuda") == "eager"


def test_an_engine_named_is_kept_and_ids_know_no_engine() -> None:
    auto, named = point(), point("engine=compiled")
    chosen = with_engine([auto, named], "eager")
    assert [one.config.engine for one in chosen] == [one.tree["engine"] for one in chosen] == ["eager", "compiled"]
    assert [one.id for one in chosen] == [auto.id, named.id]


def request(folder: Path, *overrides: str) -> list[str]:
    """Engines of the fleets that a request to this folder would launch."""
    plans: list[str] = []

    def launch(jobs: object, initial_job_idx: int) -> list[Any]:
        frozen = sorted((folder / "plans").glob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)[-1]
        plans.extend(one["tree"]["engine"] for line in frozen.read_text().splitlines()[1:] for one in json.loads(line))
        return []

    trees = [tree(f"out={folder}", *overrides)]
    plan = plan_sweep(trees, max_runs=8, is_single=False, shard="1/1", is_local=True, slots=[None])
    with pytest.raises(SystemExit):  # nothing was trained
        train_plan(plan, Mock(launch=launch), Request(command="lab"))
    return plans


def test_a_folder_keeps_the_engine_of_its_first_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORTH_COMPILING, "cpu", 1.0)
    monkeypatch.setattr("lab.sweeping.planner.can_compile", lambda: True)
    assert request(tmp_path / "a") == ["compiled"]
    monkeypatch.setitem(WORTH_COMPILING, "cpu", math.inf)
    assert request(tmp_path / "a", "seed=1") == ["compiled"]
    assert request(tmp_path / "b") == ["eager"]
    assert store.check_version(tmp_path / "a") == "compiled"


def test_without_a_compiler_nothing_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORTH_COMPILING, "cpu", 1.0)
    monkeypatch.setattr("lab.sweeping.planner.can_compile", lambda: False)
    assert request(tmp_path) == ["eager"]
    with pytest.raises(RequestError, match="engine=compiled takes one process, a C"):
        request(tmp_path / "b", "engine=compiled")
    assert not (tmp_path / "b").exists()


# Every optimizer link and intervention that was not in the first recipes, in as few runs as their exclusions allow.
ARMS = {
    "post_layernorm": (
        "intervention=[embedding_gradient_shrink,embedding_layernorm,embedding_scale,split_qk_scaling,pb_relax,"
        "post_layernorm,relu,biases,tied_head]",
        "optimizer=adamw_shrink_embedding",
        "optimizer.chain=[clip_relative,shrink_embedding,adam,clip_update,rms_scale,decay,peak,schedule]",
        "optimizer.shrink_until=4",
        "~optimizer.clip",
        "+optimizer.clip_ratio=0.5",
        "+optimizer.clip_memory=0.9",
        "+optimizer.clip_update=0.5",
    ),
    "palm": (
        "intervention=[embedding_gradient_shrink,embedding_init,learned_positions,deepnorm,normformer]",
        "optimizer=palm",
    ),
    "experts": (
        "intervention=[experts,balance,router_z,router_bias,swiglu]",
        "intervention.experts.top_k=2",
        "intervention.experts.router=sigmoid",
        "intervention.experts.capacity=1.25",
        "intervention.experts.jitter=0.1",
    ),
    "momentum": ("intervention=[late_qk_scaling,normformer]", "optimizer=momentum"),
}


@pytest.mark.parametrize("arms", few(ARMS, 1))
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_arms_leave_the_same_weights_when_traced(arms: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is given is the whole step: no number of a step is frozen into it and no state is lost."""
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    torch.testing.assert_close(*weights_of_arms(arms), rtol=1e-6, atol=1e-9)


@compiles
@pytest.mark.slow
def test_experts_leave_the_same_weights_when_compiled() -> None:
    eager, compiled = weights_of_arms("experts")
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


def weights_of_arms(arms: str) -> list[dict[str, torch.Tensor]]:
    """Weights after six updates, by the eager engine and by the compiled one."""
    shared = (*ARMS[arms], "model.depth=1", "probes=none", "schedule.warmup=2")
    wanted = configs("optimizer.lr=1e-3 seed=0", "optimizer.lr=2e-3 seed=1", shared=shared)
    fleets = [Fleet([replace(config, engine=name) for config in wanted]) for name in ("eager", "compiled")]
    for fleet in fleets:
        for step in range(6):
            fleet.step(step)
    return [fleet.state.weights for fleet in fleets]
