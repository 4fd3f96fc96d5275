"""A run's record does not depend on its company, on who listens, or on how it ended for its neighbours."""

from __future__ import annotations

import gc
import math

import pytest
import torch
import torch.nn.functional as F

from cap import Cap, HiddenQuartic
from lab import Fleet
from lab.core.hooks import listening
from lab.core.registry import INTERVENTIONS
from lab.training.evaluation import PASS_TOKENS, VALIDATION_TOKENS
from lab.training.loop import train
from lab.training.recorder import outcome
from sampling import few
from small import brief, configs, trained

PER_RUN = [
    f"optimizer.lr={lr} seed={seed} schedule.warmup={warmup} optimizer.eps={eps}"
    for lr, seed, warmup, eps in ((1e-3, 0, 0.1, 1e-8), (1e-1, 0, 2, 1e-8), (3e-2, 1, 0, 1e-6), (1e4, 2, 0.1, 1e-8))
]
# The last shape fills no whole number of vectors: whatever a kernel does to the tail of a buffer, it does there.
SHAPES = [
    (),
    ("intervention=[]", "optimizer=adamw_coupled"),
    ("model.depth=0", "parametrization=mup_simple"),
    (
        "optimizer=palm",
        "optimizer.chain=[clip_relative,adam_beta2_ramp,clip_update,peak,schedule,decay_lr_squared]",
        *("~optimizer.clip", "+optimizer.clip_ratio=1", "+optimizer.clip_memory=0.9", "+optimizer.clip_update=0.8"),
        "intervention=[biases,deepnorm,embedding_gradient_shrink,embedding_layernorm,learned_positions,normformer,relu]",
    ),
    ("model.width=18", "model.head_width=6", "seq_len=21", "batch_size=3"),
]


@pytest.mark.parametrize("shared", few(SHAPES, 2), ids=lambda shared: " ".join(shared) or "default")
def test_a_run_is_the_same_bits_alone_and_in_any_company(shared: tuple[str, ...]) -> None:
    wanted = configs(*PER_RUN, shared=shared)
    together = trained(wanted)
    alone = [trained([config])[0] for config in wanted]
    backwards = trained(wanted[::-1])[::-1]
    assert repr(together) == repr(alone) == repr(backwards)
    assert len({repr(rows) for _, rows in together}) == len(wanted)  # the twin that must differ


def test_a_broken_run_leaves_its_neighbours_alone() -> None:
    calm, wild = "optimizer.lr=1e-2", "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0 seed=1"
    together = trained(configs(calm, wild, f"{calm} seed=3"))
    assert together[1][0]["status"] == "diverged"
    assert together[1][0]["diverged_at"] is not None
    assert any(math.isnan(value) for *_, value in together[1][1])
    assert repr([together[0], together[2]]) == repr(trained(configs(calm, f"{calm} seed=3")))


def test_a_step_leaves_no_tensor_in_a_reference_cycle() -> None:
    """Only a fleet does, once, so memory is free at once however seldom Python looks for garbage."""
    left = []
    for steps in (4, 12):
        wanted = configs(*PER_RUN[:2], shared=(f"steps={steps}", "probes=all", "probes.every=2"))
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            trained(wanted)
            gc.collect()
            left.append(sum(isinstance(each, torch.Tensor) for each in gc.garbage))
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert left[0] == left[1]


def test_a_run_diverged_at_its_first_step_without_a_finite_loss() -> None:
    wild = "optimizer.lr=1e30 optimizer.clip=inf schedule.warmup=0"
    ((result, rows),) = trained(configs(wild, shared=("probes.every=1", "intervention=[]")))
    bad = [step for step, probe, _, value in rows if probe == "train_loss" and not math.isfinite(value)]
    assert len(bad) > 1
    assert result["diverged_at"] == bad[0] > 0


def test_listening_changes_no_bits() -> None:
    heard, deaf = (trained(configs(*PER_RUN, shared=(f"probes={name}",))) for name in ("all", "none"))
    assert [result for result, _ in heard] == [result for result, _ in deaf]
    assert all(rows and not none for (_, rows), (_, none) in zip(heard, deaf, strict=True))


def test_arms_share_the_initial_values_of_the_weights_they_share() -> None:
    with_norm, without = (
        Fleet(configs("seed=3", shared=(arm,))) for arm in ("intervention=[qk_layernorm,z_loss]", "intervention=[]")
    )
    assert set(without.state.weights) < set(with_norm.state.weights)
    assert all(torch.equal(weight, with_norm.state.weights[name]) for name, weight in without.state.weights.items())
    assert torch.equal(with_norm.feed.loader.batch(7), without.feed.loader.batch(7))


def test_data_and_initial_values_follow_their_own_seeds() -> None:
    fleet = Fleet(configs("seed=1", "seed=1 data.seed=5", "seed=5"))
    batch_rbt = fleet.feed.loader.batch(3)
    assert torch.equal(batch_rbt[1], batch_rbt[2])
    assert not torch.equal(batch_rbt[0], batch_rbt[1])
    query_rdd = fleet.state.weights["block0.attention.query"]
    assert torch.equal(query_rdd[0], query_rdd[1])
    assert not torch.equal(query_rdd[0], query_rdd[2])


def test_probes_fire_at_the_first_every_kth_and_the_last_step() -> None:
    (result, rows), *_ = trained(configs("", shared=("probes.every=5", "steps=12")))
    steps: dict[tuple[str, str], list[int]] = {}
    for step, probe, where, _ in rows:
        steps.setdefault((probe, where), []).append(step)
    assert set(map(tuple, steps.values())) == {(0, 5, 10, 11)}
    assert {probe for probe, _ in steps} == set(configs("")[0].probes.names)
    losses = {step: value for step, probe, _, value in rows if probe == "val_loss"}
    assert losses[0] == result["loss_at_init"]
    assert losses[11] == result["final_val_loss"]
    assert {where for probe, where in steps if probe == "attention_logit_max"} == {"block0", "block1"}
    assert {where for probe, where in steps if probe == "train_loss"} == {""}


@pytest.mark.parametrize("every", [5, 1])
def test_the_held_out_loss_is_heard_before_the_update(every: int) -> None:
    """On the same rows at every step at which probes fire, which may be each."""
    wanted = configs(*PER_RUN[:2], shared=(f"probes.every={every}", "steps=12"))
    heard = {result.step: result.probe_values for result in train(Fleet(wanted))}
    fleet = Fleet(wanted)
    rows = fleet.evaluation.slice().clone()
    for step in range(11):
        if step and step % every == 0:
            assert torch.equal(fleet.evaluation.slice(), rows)
            assert torch.equal(heard[step]["val_loss", ""], fleet.evaluation.loss(whole=False))
        fleet.step(step)


def test_every_held_out_window_counts_as_much_as_any_other() -> None:
    """Windows are seen in several passes and a part of one, here of another language; some are left out of a look."""
    fleet = brief(Fleet(configs("seed=0", "seed=1", shared=("validation=whole",))))
    length = fleet.evaluation.held_out_nt.shape[1] - 1
    fleet.evaluation.held_out_nt[-(len(fleet.evaluation.held_out_nt) % (PASS_TOKENS // length)) :] = 0
    with torch.no_grad():
        fleet.state.weights["head"].mul_(8)
        logits_rntv = fleet.model(fleet.evaluation.held_out_nt[:, :-1].expand(2, -1, -1))[0].double()
    targets_rnt = fleet.evaluation.held_out_nt[:, 1:].expand(2, -1, -1)
    loss_rnt = F.cross_entropy(logits_rntv.movedim(-1, 1), targets_rnt, reduction="none")
    torch.testing.assert_close(fleet.evaluation.loss(whole=True), loss_rnt.mean((1, 2)), rtol=1e-6, atol=0)
    glanced_rnt = loss_rnt[:, :: loss_rnt[0].numel() // VALIDATION_TOKENS]
    torch.testing.assert_close(fleet.evaluation.loss(whole=False), glanced_rnt.mean((1, 2)), rtol=1e-6, atol=0)


def test_a_single_step_is_the_first_and_the_last() -> None:
    (result, rows), *_ = trained(configs("", shared=("steps=1",)))
    keys = [row[:3] for row in rows]
    assert len(keys) == len(set(keys))
    assert dict(zip(keys, [value for *_, value in rows], strict=True))[0, "val_loss", ""] == result["final_val_loss"]


def test_a_number_per_run_in_the_forward_pass_is_each_runs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INTERVENTIONS._entries, "cap", Cap)
    wanted = configs(*(f"+intervention.cap.cap={cap}" for cap in (0.01, 50.0)))
    together = trained(wanted)
    assert repr(together) == repr([trained([config])[0] for config in wanted])
    assert together[0][0]["loss_at_init"] != together[1][0]["loss_at_init"]


def test_a_loss_term_gets_the_hidden_states_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INTERVENTIONS._entries, "hidden", HiddenQuartic)
    fleet = Fleet(configs("", shared=("intervention=[]", "+intervention.hidden.coefficient=2")))
    tokens_rbt, heard, hidden = fleet.feed.loader.batch(0), {}, []
    removed = fleet.model.final_norm.register_forward_hook(lambda module, given, output: hidden.append(output))
    logits_rbtv, _ = fleet.model(tokens_rbt[..., :-1])
    removed.remove()
    cross_entropy = F.cross_entropy(logits_rbtv.flatten(0, 2), tokens_rbt[..., 1:].flatten())
    loss = cross_entropy + 2 * hidden[0].pow(4).mean()
    names = ("final_norm", "block0.mlp_up", "embedding")
    expected = torch.autograd.grad(loss, [fleet.state.weights[name] for name in names])
    with listening(lambda kind, where, *values: heard.__setitem__(kind, values[0])):
        fleet.step_function.update(fleet.state, tokens_rbt, fleet.step_sr[0], fleet.shape_sr[0])
    for name, gradient in zip(names, expected, strict=True):
        torch.testing.assert_close(heard["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def test_a_high_loss_on_the_way_is_not_divergence() -> None:
    assert outcome(5.0, 4.9, -1, 10)["status"] == "finished"
    assert outcome(5.0, 5.0, -1, 10)["status"] == "diverged"
    assert outcome(5.0, math.inf, -1, 10) | {"final_val_loss": 0} == outcome(5.0, math.nan, 10, 10) | {
        "final_val_loss": 0
    }
    assert outcome(5.0, 1.0, 3, 10)["diverged_at"] == 3
    assert outcome(5.0, 6.0, -1, 10)["diverged_at"] is None


def test_training_lowers_the_held_out_loss() -> None:
    (result, _), *_ = trained(configs("optimizer.lr=1e-2", shared=("steps=60", "seq_len=32")))
    assert result["final_val_loss"] < result["loss_at_init"] - 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_elsewhere_a_run_agrees_with_its_solo_self_over_twenty_steps() -> None:
    wanted = configs(*PER_RUN[:3], shared=("device=cuda", "steps=20", "probes.every=1"))
    for (_, rows), config in zip(trained(wanted), wanted, strict=True):
        alone = [value for *_, value in trained([config])[0][1]]
        assert [value for *_, value in rows] == pytest.approx(alone, rel=1e-5)
