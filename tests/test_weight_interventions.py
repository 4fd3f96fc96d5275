"""Gains that stay, gains that learn more slowly, and a head without a mean: what happens to weights in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lab import Fleet
from lab.model import layers
from lab.training.building import count_parameters
from small import configs, trained
from test_checkpoint import go_on

DECAY = "optimizer.weight_decay=0.1"
PLAIN, FIXED, CENTRED = (
    "intervention=[qk_layernorm]",
    "intervention=[fixed_gains,qk_layernorm]",
    "intervention=[mu_centering]",
)
ROUNDED = ("precision=mantissa", "optimizer.weight_decay=0")


def after(steps: int, *per_run: str, shared: tuple[str, ...] = ()) -> Fleet:
    """A fleet so many steps on."""
    fleet = Fleet(configs(*(per_run or ("",)), shared=shared))
    for step in range(steps):
        fleet.step(step)
    return fleet


def gains(fleet: Fleet) -> dict[str, torch.Tensor]:
    return {name: layer.weight for name, layer in fleet.model.layers() if layer.role == "gain"}


def test_fixed_gains_stay_at_one_whatever_decays_and_learned_ones_move() -> None:
    fixed, learned = (after(3, shared=(arm, DECAY)) for arm in (FIXED, PLAIN))
    assert (
        set(gains(fixed))
        == set(gains(learned))
        > {"block0.mlp_norm", "final_norm", "block1.attention.key.qk_layernorm"}
    )
    assert all(weight.eq(1).all() for weight in gains(fixed).values())
    assert all(weight.ne(1).any() for weight in gains(learned).values())
    assert count_parameters(fixed.model) == count_parameters(learned.model)


def test_fixed_gains_have_no_part_in_the_norm_that_clips() -> None:
    fleet = Fleet(configs("", shared=(FIXED,)))
    weight_gradients, _ = fleet.step_function.gradients_of(fleet.state.weights, fleet.feed.loader.batch(0))
    assert set(weight_gradients) == set(fleet.model.weights()) - set(gains(fleet))
    assert not any("norm" in name for name in fleet.state.links["adam"])


def test_the_learning_rate_of_gains_is_multiplied_and_no_other() -> None:
    """The first update of Adam has the size of its learning rate, so the steps of gains tell the factor."""
    alike = ("optimizer.weight_decay=0", "schedule.warmup=0")
    slow, usual = (after(1, shared=(f"intervention=[{arm}]", *alike)) for arm in ("gain_lr", ""))
    for name, weight in slow.state.weights.items():
        if name in gains(slow):
            torch.testing.assert_close(weight - 1, 0.1 * (usual.state.weights[name] - 1), rtol=1e-3, atol=1e-9)
            assert weight.ne(1).any()
        else:
            assert torch.equal(weight, usual.state.weights[name])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_centring_takes_the_mean_off_the_head_and_leaves_probabilities(precision: str) -> None:
    shared = (f"precision={precision}", "optimizer.weight_decay=0")
    centred, free = (after(1, shared=(arm, *shared)) for arm in (CENTRED, "intervention=[]"))
    assert centred.state.weights["head"].double().mean(-1).abs().max() < 1e-7
    assert free.state.weights["head"].double().mean(-1).abs().max() > 1e-4
    tokens_rbt = free.feed.loader.batch(5)[..., :-1]
    for fleet in (centred, free):  # exactly, to tell what rounding adds from what centring takes
        fleet.model.double()
        for module in fleet.model.modules():
            if hasattr(module, "operands"):
                module.operands = None
            if hasattr(module, "rounding"):  # of the products of attention
                module.rounding = dict.fromkeys(module.rounding)
    logits = [fleet.model(tokens_rbt)[0].detach() for fleet in (centred, free)]
    torch.testing.assert_close(*(each.log_softmax(-1) for each in logits), rtol=0, atol=1e-6)
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert all(
        torch.equal(weight, free.state.weights[name])
        for name, weight in centred.state.weights.items()
        if name != "head"
    )


def test_an_update_that_is_left_out_is_not_centred() -> None:
    shared = (CENTRED, "precision=fp16_emulated", "loss_scale=torch", "loss_scale.init=1e30")
    fleet = Fleet(configs("", shared=shared))
    before = fleet.state.weights["head"].clone()
    fleet.step(0)  # its scaled gradients overflow
    assert torch.equal(fleet.state.weights["head"], before)


@pytest.mark.slow
def test_each_run_rounds_to_its_own_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "MULTIPLIES_BF16", False)
    bits = (
        "mantissa_bits=2",
        "mantissa_bits=7",
        "mantissa_bits=23 optimizer.lr=1e30 optimizer.clip=inf seed=1",
        "mantissa_bits=23",
    )
    together = trained(configs(*bits, shared=ROUNDED))
    assert repr(together) == repr([trained(configs(each, shared=ROUNDED))[0] for each in bits])
    assert together[0][0]["loss_at_init"] != together[1][0]["loss_at_init"]
    for run, precision in ((1, "bf16"), (3, "fp32")):
        (same,) = trained(configs("", shared=(f"precision={precision}", ROUNDED[1])))
        assert repr(same) == repr(together[run])


@pytest.mark.slow
def test_a_fleet_that_is_cut_off_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    wanted = configs(
        *("mantissa_bits=3", "mantissa_bits=9 seed=1"),
        shared=("probes.every=3", "intervention=[fixed_gains,mu_centering]", "precision=mantissa"),
    )
    whole, *_ = go_on(tmp_path / "alone", wanted, ids=["a", "b"])
    go_on(tmp_path, wanted, cut_after=10, ids=["a", "b"])
    resumed, steps, _ = go_on(tmp_path, wanted, ids=["a", "b"])
    assert steps == [8, 9, 10, 11]
    assert repr(resumed) == repr(whole)
    assert Fleet(wanted).state.weights["head"].isfinite().all()
