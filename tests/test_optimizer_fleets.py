"""Every optimizer in a whole fleet: neighbours, checkpoints, the compiled step, evaluation; and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lab import Fleet, Link, RunConfig
from lab.core.errors import RequestError
from lab.core.registry import LINKS
from lab.optim.optimizer import build_optimizer
from lab.sweeping.capacity import bytes_asked
from lab.training.building import check_ranks
from lab.training.identity import columns, run_id, static_key
from pieces import CONF, recipe
from sampling import few, some
from small import configs, trained
from test_checkpoint import go_on
from test_engine import compiles

OPTIMIZERS = sorted(path.stem for path in (CONF / "optimizer").glob("*.yaml"))
# What an optimizer needs of the rest of a run, and numbers at which its links act within a few steps.
SHARED = {
    "schedule_free": ("schedule=constant",),
    "adamw_qk_clip": ("intervention=[z_loss]", "optimizer.qk_clip=0.3"),
    "adamw_spectral_cap": ("optimizer.spectral_cap=1",),
    "adamw_skip_sigma": ("optimizer.skip_sigmas=0.5", "optimizer.skip_fewest=3", "optimizer.skip_window=4"),
    "adamw_adagc": ("optimizer.adagc_warmup=3",),
    "adamw_zclip": ("optimizer.z_warmup=3", "optimizer.z_threshold=0.5"),
    "spam": ("optimizer.reset_every=5", "optimizer.reset_warmup=3", "optimizer.spike_ratio=2"),
    "stable_spam": ("optimizer.reset_every=5",),
}
BROKEN = "optimizer.lr=1e30 schedule.warmup=0 seed=2"


def of(name: str, *per_run: str, shared: tuple[str, ...] = ()) -> list[RunConfig]:
    """Configs of runs with this optimizer."""
    return configs(*per_run, shared=(f"optimizer={name}", *SHARED.get(name, ()), *shared))


@pytest.mark.parametrize(
    "name",
    some(OPTIMIZERS, ("muon", "adamw_qk_clip", "stable_spam")),
)
def test_a_run_has_the_same_bits_alone_and_in_company_and_learns(name: str) -> None:
    """Beside a run that breaks, too."""
    rates = ("optimizer.lr=1e-3 seed=0", BROKEN, "optimizer.lr=1e-2 seed=1")
    shared = ("probes.every=3", "probes.names=[train_loss,grad_norm_clipped,update_rms]", "model.depth=1")
    together = trained(of(name, *rates, shared=shared))
    for index in (0, 2):
        (alone,) = trained(of(name, rates[index], shared=shared))
        assert repr(alone) == repr(together[index])
        assert alone[0]["final_val_loss"] < alone[0]["loss_at_init"]
    assert not together[0][0]["notes"]


NEW = [
    name for name in OPTIMIZERS if {*recipe("optimizer", name)["chain"]} - {"clip", "adam", "peak", "schedule", "decay"}
]


@pytest.mark.parametrize("name", few(NEW, 1))
def test_an_optimizer_goes_on_from_a_checkpoint_to_the_same_bits(name: str, tmp_path: Path) -> None:
    wanted = of(name, "optimizer.lr=1e-3", "optimizer.lr=1e-2 seed=1", shared=("probes.every=3", "model.depth=1"))
    whole, *_ = go_on(tmp_path / "alone", wanted, ids=["a", "b"])
    go_on(tmp_path, wanted, cut_after=10, ids=["a", "b"])
    resumed, steps, _ = go_on(tmp_path, wanted, ids=["a", "b"])
    assert steps == [8, 9, 10, 11]
    assert repr(resumed) == repr(whole)


def weights_after(name: str, engine: str, steps: int = 8) -> dict[str, torch.Tensor]:
    per_run = ("optimizer.lr=1e-3 seed=0", "optimizer.lr=2e-3 seed=1")
    wanted = of(name, *per_run, shared=("model.depth=1", "probes=none", "schedule.warmup=2"))
    fleet = Fleet([replace(config, engine=engine) for config in wanted])
    for step in range(steps):
        fleet.step(step)
    links = {f"{link}.{key}": value for link, state in fleet.state.links.items() for key, value in state.items()}
    return {**fleet.state.weights, **links}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_number_of_a_step_is_frozen_into_its_graph(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler is given is the whole step, with all state of its links."""
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    eager, traced = (weights_after(name, engine) for engine in ("eager", "compiled"))
    torch.testing.assert_close(traced, eager, rtol=1e-5, atol=1e-8)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "schedule_free"])
def test_an_optimizer_leaves_the_same_weights_when_compiled(name: str) -> None:
    eager, compiled = (weights_after(name, engine) for engine in ("eager", "compiled"))
    torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=1e-5)


def test_qk_clip_bounds_the_scores_of_the_batch_it_saw() -> None:
    """After an update of almost nothing the same batch has a largest score of exactly the bound, where it had more."""
    (config,) = of("adamw_qk_clip", "optimizer.lr=1e-12", shared=("schedule.warmup=0", "optimizer.weight_decay=0"))
    fleet = Fleet([config], dtype=torch.float64)
    with config.optimizer.measuring() as before:
        fleet.step_function.gradients_of(fleet.state.weights, fleet.feed.loader.batch(0))
    fleet.step(0)
    with config.optimizer.measuring() as after:
        fleet.step_function.gradients_of(fleet.state.weights, fleet.feed.loader.batch(0))
    first = before["qk_clip"]["block0"]
    assert first.max() > 0.3
    torch.testing.assert_close(after["qk_clip"]["block0"], first.clamp(max=0.3), rtol=1e-6, atol=0)


def test_qk_clip_scales_biases_of_queries_and_keys_too() -> None:
    biased = ("intervention=[biases]", "optimizer.qk_clip=1e-3", "schedule.warmup=0")
    (config,) = of("adamw_qk_clip", "optimizer.lr=0.1", shared=biased)
    fleet = Fleet([config], dtype=torch.float64)
    for step in range(3):
        fleet.step(step)
    biases = {name: weight for name, weight in fleet.state.weights.items() if name.endswith("biases")}
    assert (
        biases["block0.attention.query.biases"].abs().max() < 0.05 < biases["block0.attention.value.biases"].abs().max()
    )


def test_an_average_is_evaluated_and_the_weights_between_are_trained() -> None:
    (config,) = of("schedule_free", "optimizer.lr=1e-2")
    fleet = Fleet([config])
    for step in range(6):
        fleet.step(step)
    evaluated = fleet.evaluation.loss(whole=True)
    averages = {name: fleet.state.links["schedule_free"][f"mean.{name}"] for name in fleet.state.weights}
    with torch.no_grad():
        for name, weight in fleet.state.weights.items():
            assert (weight != averages[name]).any()
            weight.copy_(averages[name])
    fleet.evaluation.averages = dict
    assert torch.equal(fleet.evaluation.loss(whole=True), evaluated)


@pytest.mark.slow
def test_numbers_of_a_role_have_columns_and_may_differ_in_a_fleet() -> None:
    plain, *own = configs("", "+optimizer.embedding.weight_decay=0", "+optimizer.embedding.weight_decay=0.5")
    column = "optimizer.embedding.weight_decay"
    assert [columns(config).get(column) for config in (plain, *own)] == [None, 0, 0.5]
    assert {*columns(own[0])} - {*columns(plain)} == {column}
    assert static_key(own[0]) == static_key(own[1]) != static_key(plain)
    assert len({run_id(config, "data") for config in (plain, *own)}) == 3
    together = trained(own)
    assert repr(together) == repr([trained([config])[0] for config in own])
    assert together[0] != together[1]


def test_all_links_keep_what_they_say_per_weight() -> None:
    """Memory is planned by what links keep: two moments, three, one and the average, or nothing."""
    names = ("adamw", "sgd", "momentum", "lion", "ademamix", "schedule_free")
    per_weight = {name: bytes_asked(of(name, "", shared=("model.width=256",))[0]) for name in names}
    (config,) = of("adamw", "", shared=("model.width=256",))
    moment = (per_weight["adamw"] - per_weight["sgd"]) / 2
    assert per_weight["momentum"] - per_weight["sgd"] == moment
    assert per_weight["lion"] - per_weight["sgd"] == moment
    assert per_weight["ademamix"] - per_weight["adamw"] == moment
    assert per_weight["schedule_free"] - per_weight["adamw"] == 2 * moment
    assert moment == 4 * (12 * 2 * 256**2 + 2 * config.data.entry.open().vocabulary * 256)


def test_kept_norms_of_queries_that_do_not_start_at_zero_are_no_refusal() -> None:
    configs("optimizer=adamh", "optimizer=adamh parametrization=mup_full intervention=[small_init]")


def test_a_decay_of_other_weights_beside_kept_norms_is_no_refusal() -> None:
    chain = "optimizer.chain=[clip,adam,to_weight_norm,peak,decay,schedule,keep_norm]"
    (config,) = configs(f"optimizer=adamh {chain} +optimizer.weight_decay=0.1 +optimizer.matrix.weight_decay=0")
    assert config.optimizer.links_of("query")["decay"].weight_decay == 0
    assert config.optimizer.links_of("head")["decay"].weight_decay == 0.1


def test_links_that_need_whole_weights_are_refused_their_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    (config,) = of("muon", "ranks=fsdp")
    with pytest.raises(RequestError, match="optimizer link muon needs them whole; say ranks=ddp"):
        check_ranks(config)
    check_ranks(replace(config, ranks="ddp"))


def test_every_link_says_what_it_takes() -> None:
    kinds: dict[str, Any] = {name: LINKS[name] for name in LINKS}
    assert all(issubclass(kind, Link) and kind.roles for kind in kinds.values())
    assert {name for name, kind in kinds.items() if kind.events} == {"qk_clip", "skip_sigma"}
    assert build_optimizer(recipe("optimizer", "muon")).links["muon"].needs_whole_weights
