"""Probes overhear the real step: each says what its formula says, of every run apart, and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from lab import HookIntervention
from lab.core.hooks import TENSOR_POINTS, HookPoint, listening
from lab.core.registry import PROBES
from lab.core.schema import build
from lab.interventions.loss_terms import ZLoss
from lab.model.loss import losses
from lab.model.transformer import Transformer
from lab.optim.links import Now
from lab.probes.formats import (
    block_overflow_fp16,
    block_overflow_mx,
    block_underflow_e4m3,
    block_underflow_mx,
    grad_underflow_e4m3,
    grad_underflow_fp16,
    grad_underflow_mx,
)
from lab.probes.listener import Listener, ProbesConfig, probe
from lab.probes.updates import HeldOutLoss
from pieces import intervention, model, optimizer, tokens, weights_of
from tests import reference

Heard = dict[tuple[str, str], Tensor]
DEPTH, HEADS, SEEDS = 2, 2, (0, 5, 9)
EPS, CLIPS, DECAY, LR, BETA1, BETA2 = (1e-8, 1e-2, 1e-4), (0.1, 1.0, math.inf), 0.1, 0.05, 0.9, 0.95
BLOCKS = ["block0", "block1"]
# These compare micro-batches or steps, or measure what such a step does not have; other tests have them.
OF_OTHERS = ("noise_scale", "batch", "loss_scale", "grad_lag_cosine", "distance_from_init")
OF_OTHERS += ("gradient_underflow", "saturation", "gain_octave", "gain_code", "source_rows", "clean_val_loss")
OF_OTHERS += tuple(name for name in PROBES if PROBES[name].event in ("router", "router_load"))
OF_ANY_STEP = tuple(name for name in PROBES if name not in OF_OTHERS)
HELD_OUT = 10**4  # seed of the held-out tokens


@dataclass
class Steps:
    """A few training steps of three runs, with an ear at each."""

    names: tuple[str, ...] = OF_ANY_STEP
    dtype: torch.dtype = torch.float64
    changes: Mapping[str, Any] = field(default_factory=lambda: {"qk_layernorm": intervention("qk_layernorm")})
    seeds: tuple[int, ...] = SEEDS
    batch: int = 3
    spoil: Callable[[Transformer], None] | None = None

    def run(self, count: int) -> tuple[dict[str, Tensor], list[Heard]]:
        """Final weights, and what was heard at each step."""
        made = model(*self.seeds, depth=DEPTH, head_width=8 // HEADS, changes=self.changes, dtype=self.dtype)
        if self.spoil:
            self.spoil(made)
        runs = [{"eps": e, "clip": c, "weight_decay": DECAY, "lr": LR} for e, c in zip(EPS, CLIPS, strict=True)]
        chain = optimizer("adamw", *(runs[SEEDS.index(seed)] for seed in self.seeds))
        weights, heard = weights_of(made), []
        state, shape_r = chain.begin(weights), torch.full((len(self.seeds),), 0.5, dtype=torch.float64)

        def gradients_of(weights: dict[str, Tensor], rows_rbt: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            names = (name for name, _ in made.named_parameters())
            leaves = {
                name: weight.detach().requires_grad_() for name, weight in zip(names, weights.values(), strict=True)
            }
            logits_rbtv, _ = functional_call(made, leaves, rows_rbt[..., :-1])
            loss_r, _ = losses(logits_rbtv, rows_rbt[..., 1:], {"z_loss": ZLoss(0.01)})
            return dict(zip(weights, torch.autograd.grad(loss_r.sum(), list(leaves.values())), strict=True)), loss_r

        for step in range(count):
            rows_rbt = tokens(*(seed + 100 * step for seed in self.seeds), batch=self.batch)
            listener = Listener(self.names)
            with listening(listener if self.names else None):
                loss_r, bare_r = losses(made(rows_rbt[..., :-1])[0], rows_rbt[..., 1:], {"z_loss": ZLoss(0.01)})
                parts = torch.autograd.grad(loss_r.sum(), list(weights.values()))
                held_out = HeldOutLoss(
                    gradients_of, weights, tokens(*[HELD_OUT] * len(self.seeds), batch=self.batch), lambda _: 0.5 * LR
                )
                now = Now(torch.tensor(step), weights, shape_r, dict.fromkeys(weights, 1.0), held_out)
                chain.step(dict(zip(weights, parts, strict=True)), state, now)
            listener("val_loss", "", bare_r)  # the one that is not part of a step
            heard.append(listener.probe_values)
        return {name: weight.detach() for name, weight in weights.items()}, heard


@pytest.fixture(scope="module")
def heard() -> Heard:
    """What all probes heard of the third step."""
    return Steps().run(3)[1][2]


@dataclass
class Told:
    """The same third step of one run by the reference model and by hand."""

    seen: reference.Seen
    targets: Tensor
    cross_entropy: Tensor
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]
    clipped: dict[str, Tensor]
    direction: dict[str, Tensor]
    second: dict[str, Tensor]
    held_out: dict[str, Tensor]
    curvature: Tensor


@pytest.fixture(scope="module")
def told() -> list[Told]:
    return [by_hand(run) for run in range(len(SEEDS))]


def by_hand(run: int) -> Told:
    start = model(*SEEDS, depth=DEPTH, head_width=8 // HEADS, changes={"qk_layernorm": intervention("qk_layernorm")})
    weights = {name: weight[run].detach() for name, weight in weights_of(start).items()}
    mean, square = ({name: torch.zeros_like(weight) for name, weight in weights.items()} for _ in range(2))
    for step in range(3):
        rows = tokens(SEEDS[run] + 100 * step)[0]
        leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        seen = reference.transformer(leaves, rows[:, :-1], DEPTH, HEADS, True)
        loss, bare = reference.losses(seen.logits, rows[:, 1:], 0.01)
        gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        norm = math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        clipped = {name: g * min(1.0, CLIPS[run] / norm) for name, g in gradients.items()}
        direction, second = {}, {}
        for name, g in clipped.items():
            mean[name] = BETA1 * mean[name] + (1 - BETA1) * g
            square[name] = BETA2 * square[name] + (1 - BETA2) * g * g
            m, v = mean[name] / (1 - BETA1 ** (step + 1)), square[name] / (1 - BETA2 ** (step + 1))
            direction[name], second[name] = m / (v.sqrt() + EPS[run]), v
        held_out = held_out_gradients(weights)
        steps = {name: 0.5 * LR * each for name, each in direction.items()}
        after = held_out_gradients({name: weight - steps[name] for name, weight in weights.items()})
        bend = sum((step * (held_out[name] - after[name])).sum() for name, step in steps.items())
        curvature = bend / sum((step * mean[name]).sum() for name, step in steps.items()) / 38
        before = weights
        weights = {name: w - 0.5 * (LR * direction[name] + DECAY * w) for name, w in weights.items()}
    return Told(seen, rows[:, 1:], bare, before, gradients, clipped, direction, second, held_out, curvature)


def held_out_gradients(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    rows = tokens(HELD_OUT)[0]
    logits = reference.transformer(leaves, rows[:, :-1], DEPTH, HEADS, True).logits
    loss, _ = reference.losses(logits, rows[:, 1:], 0.01)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def rms(x: Tensor) -> Tensor:
    return (x.detach() ** 2).mean().sqrt()


def norm_of(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([x.flatten() for x in tensors.values()]).norm()


def bimodality(x: Tensor) -> Tensor:
    z = (x - x.mean()) / x.std(correction=0)
    return ((z**3).mean() ** 2 + 1) / (z**4).mean()


def cosines(firsts: Mapping[str, Tensor], seconds: Mapping[str, Tensor]) -> dict[str, Tensor]:
    flat = {name: (first.flatten(), seconds[name].flatten()) for name, first in firsts.items()}
    flat[""] = (torch.cat([pair[0] for pair in flat.values()]), torch.cat([pair[1] for pair in flat.values()]))
    return {name: torch.cosine_similarity(*pair, dim=0) for name, pair in flat.items()}


def common_mode(head_dv: Tensor) -> Tensor:
    """The norm of the matrix that has the mean column everywhere, over that of the head."""
    return head_dv.mean(1, keepdim=True).expand_as(head_dv).norm() / head_dv.norm()


def causal_max(scores_bhts: Tensor) -> Tensor:
    length = scores_bhts.shape[-1]
    return torch.stack([scores_bhts[..., t, s].max() for t in range(length) for s in range(t + 1)]).max()


def entropy(weights_bhts: Tensor) -> Tensor:
    return -torch.where(weights_bhts > 0, weights_bhts * weights_bhts.clamp(min=1e-300).log(), 0.0).sum(-1).mean()


def mean_norm(x_bhtk: Tensor) -> Tensor:
    return (x_bhtk.detach() ** 2).sum(-1).sqrt().mean()


def cosine(q_bhtk: Tensor, k_bhsk: Tensor) -> Tensor:
    places = [(t, s) for t in range(q_bhtk.shape[2]) for s in range(t + 1)]
    q, k = (torch.stack([x[:, :, pair[side]] for pair in places]) for side, x in enumerate((q_bhtk, k_bhsk)))
    return torch.cosine_similarity(q, k, dim=-1).abs().mean()


def by_block(measure: Callable[..., Tensor], *seen: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip(BLOCKS, map(measure, *seen), strict=True))


def below(numbers: dict[str, Tensor], limit: Callable[[str], Tensor | float]) -> dict[str, Tensor]:
    return {name: (x.abs() < limit(name)).double().mean() for name, x in numbers.items()}


def underflow(x: Tensor, fmt: str) -> Tensor:
    """Entries nearer to zero than to the smallest number of a format, halves to zero."""
    x = x.detach().float().reshape(-1, x.shape[-1])
    if fmt == "mx":  # blocks of 32, a shorter row being one block
        scale = torch.cat(
            [2.0 ** (b.abs().amax(-1, keepdim=True).log2().floor() - 8).expand_as(b) for b in x.split(32, -1)], -1
        )
    else:
        scale = x.abs().max() / 448 if fmt == "e4m3" else torch.tensor(2.0**-15)
    return ((x != 0) & (x.abs() <= scale * 2.0**-10)).double().mean()


def mx_overflow(x: Tensor) -> Tensor:
    """Entries of a block of 32 that are 464 times its scale or more, 15 of 16 parts of the next power of two."""
    x = x.detach().float().reshape(-1, x.shape[-1])
    scale = 2.0 ** (x.abs().amax(-1, keepdim=True).log2().floor() - 8)
    return (x.abs() >= 464 * scale).double().mean()


def ranks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: (w**2).sum() / torch.linalg.matrix_norm(w, 2) ** 2 for n, w in weights.items() if w.ndim == 2}


def spectral_entropy(query_do: Tensor, key_do: Tensor) -> Tensor:
    energy = torch.linalg.eigvalsh((query_do @ key_do.T) @ (query_do @ key_do.T).T).clamp(min=1e-300)
    return -(energy / energy.sum() * (energy / energy.sum()).log()).sum()


# What each probe should say of one run, by where.
FORMULAS: dict[str, Callable[[Told, int], dict[str, Tensor]]] = {
    "train_loss": lambda told, run: {"": told.cross_entropy},
    "val_loss": lambda told, run: {"": told.cross_entropy},
    "attention_logit_max": lambda told, run: dict(zip(BLOCKS, map(causal_max, told.seen.scores), strict=True)),
    "attention_entropy": lambda told, run: dict(zip(BLOCKS, map(entropy, told.seen.attention), strict=True)),
    "output_logit_mean": lambda told, run: {"": told.seen.logits.mean()},
    "output_logit_rms": lambda told, run: {"": rms(told.seen.logits)},
    "log_z": lambda told, run: {"": told.seen.logits.exp().sum(-1).log().mean()},
    "log_z_square": lambda told, run: {"": (told.seen.logits.exp().sum(-1).log() ** 2).mean()},
    "log_z_std": lambda told, run: {"": told.seen.logits.exp().sum(-1).log().std(correction=0)},
    "query_norm": lambda told, run: by_block(mean_norm, told.seen.queries),
    "key_norm": lambda told, run: by_block(mean_norm, told.seen.keys),
    "query_key_cosine": lambda told, run: by_block(cosine, told.seen.queries, told.seen.keys),
    "block_rms": lambda told, run: dict(zip(BLOCKS, map(rms, told.seen.outputs), strict=True)),
    "block_kurtosis": lambda told, run: by_block(lambda x: (x**4).mean() / (x**2).mean() ** 2, told.seen.outputs),
    "block_underflow_e4m3": lambda told, run: by_block(lambda x: underflow(x, "e4m3"), told.seen.outputs),
    "block_underflow_mx": lambda told, run: by_block(lambda x: underflow(x, "mx"), told.seen.outputs),
    "block_overflow_fp16": lambda told, run: by_block(lambda x: (x.abs() > 65519).double().mean(), told.seen.outputs),
    "block_overflow_mx": lambda told, run: by_block(mx_overflow, told.seen.outputs),
    **{
        f"grad_underflow_{fmt}": lambda told, run, fmt=fmt: {n: underflow(g, fmt) for n, g in told.clipped.items()}
        for fmt in ("fp16", "e4m3", "mx")
    },
    "grad_below_eps": lambda told, run: below(told.clipped, lambda name: EPS[run]),
    "moment_ratio": lambda told, run: {
        n: rms(torch.where(told.second[n] > 0, g / told.second[n].sqrt(), 0.0)) for n, g in told.clipped.items()
    },
    "moment_outliers": lambda told, run: {
        n: (g**2 > 9 * told.second[n]).double().mean() for n, g in told.clipped.items()
    },
    "stable_rank": lambda told, run: ranks(told.weights),
    "query_key_entropy": lambda told, run: {
        b: spectral_entropy(told.weights[f"{b}.attention.query"], told.weights[f"{b}.attention.key"]) for b in BLOCKS
    },
    "grad_norm": lambda told, run: {"": norm_of(told.gradients)},
    "grad_norm_clipped": lambda told, run: {"": norm_of(told.clipped)},
    "grad_rms": lambda told, run: {name: rms(g) for name, g in told.clipped.items()},
    "update_rms": lambda told, run: {name: rms(d) for name, d in told.direction.items()},
    "zero_gradients": lambda told, run: {n: (g == 0).double().mean() for n, g in told.gradients.items()},
    "update_large": lambda told, run: {n: (d.abs() > 0.8).double().mean() for n, d in told.direction.items()},
    "update_bimodality": lambda told, run: {name: bimodality(d) for name, d in told.direction.items()},
    "update_descent_cosine": lambda told, run: cosines(told.direction, told.held_out),
    "update_curvature": lambda told, run: {"": told.curvature},
    "param_rms": lambda told, run: {name: rms(w) for name, w in told.weights.items()},
    "head_common_mode": lambda told, run: {"head": common_mode(told.weights["head"])},
    "eps_ratio": lambda told, run: {name: EPS[run] / rms(g) for name, g in told.clipped.items()},
}


@pytest.mark.parametrize("name", OF_ANY_STEP)
def test_every_probe_says_what_its_formula_says(name: str, heard: Heard, told: list[Told]) -> None:
    assert name in FORMULAS, "a new probe needs its formula here, written a second time"
    for run, truth in enumerate(told):
        expected = FORMULAS[name](truth, run)
        assert {where for probe_name, where in heard if probe_name == name} == set(expected)
        for where, value in expected.items():
            torch.testing.assert_close(
                heard[name, where][run], value.detach(), rtol=1e-9, atol=1e-12, msg=f"{name} {where}"
            )


OF_A_PASS = tuple(name for name in OF_ANY_STEP if PROBES[name].event in (*TENSOR_POINTS, "query_key", "log_z"))


@pytest.mark.parametrize("name", OF_A_PASS)
def test_a_probe_says_how_numbers_of_two_micro_batches_become_one(name: str) -> None:
    """It says ``largest`` if the number of both is the larger one, and ``is_root`` if their squares average."""
    made, announced = model(*SEEDS, depth=DEPTH, head_width=8 // HEADS), list[tuple[Any, ...]]()

    def keep(kind: str, where: str, *values: Any) -> None:
        if kind == PROBES[name].event:
            announced.append(values)

    rows_rbt = tokens(*SEEDS, batch=4)
    with torch.no_grad(), listening(keep):
        losses(made(rows_rbt[..., :-1])[0], rows_rbt[..., 1:], {"z_loss": ZLoss(0.01)})
    halves = [[x.chunk(2, 1) if isinstance(x, Tensor) else (x, x) for x in values] for values in announced]
    whole_pr = torch.stack([PROBES[name].measure(*values) for values in announced])
    first_pr, second_pr = (
        torch.stack([PROBES[name].measure(*(pair[side] for pair in pairs)) for pairs in halves]) for side in (0, 1)
    )
    if torch.equal(first_pr, second_pr):  # as where nothing overflows
        return
    assert PROBES[name].largest == torch.equal(whole_pr, torch.maximum(first_pr, second_pr))
    assert PROBES[name].is_root == torch.allclose(whole_pr**2, (first_pr**2 + second_pr**2) / 2, rtol=1e-9, atol=0)


def test_the_step_that_is_measured_has_something_to_tell_apart(told: list[Told]) -> None:
    """Before or after the clip, with the future or without, with decay or without: it matters here."""
    assert float(norm_of(told[0].gradients)) > 2 * float(norm_of(told[0].clipped))
    assert float(norm_of(told[0].clipped)) == pytest.approx(CLIPS[0])
    assert norm_of(told[2].gradients) == norm_of(told[2].clipped)
    assert any(scores.max() > causal_max(scores) + 0.1 for truth in told for scores in truth.seen.scores)
    decayed = {n: told[0].direction[n] + DECAY / LR * w for n, w in told[0].weights.items()}
    assert abs(rms(decayed["final_norm"]) / rms(told[0].direction["final_norm"]) - 1) > 0.1
    assert max(EPS[1] / rms(g) for g in told[1].clipped.values()) > 1  # where epsilon is larger than the gradient
    assert min(rms(d) for d in told[1].direction.values()) < 0.5  # the update shrinks


@pytest.mark.parametrize("name", OF_ANY_STEP)
def test_contract_of_probes(name: str, heard: Heard) -> None:
    """One finite number per run, that keeps no graph alive, the same whoever else listens."""
    mine = {key: value for key, value in heard.items() if key[0] == name}
    assert mine
    alone = Steps(names=(name,)).run(3)[1][2]
    assert set(alone) == set(mine)
    for key, value_r in mine.items():
        assert value_r.shape == (len(SEEDS),)
        assert value_r.is_floating_point()
        assert value_r.isfinite().all()
        assert not value_r.requires_grad
        assert torch.equal(alone[key], value_r)


@torch.no_grad()
def break_second_run(made: Transformer) -> None:
    for weight in weights_of(made).values():
        weight[1].fill_(math.nan)


def test_a_broken_run_is_heard_and_touches_no_other() -> None:
    fine, hurt = (Steps(dtype=torch.float32, spoil=spoil).run(2)[1][1] for spoil in (None, break_second_run))
    assert set(fine) == set(hurt)
    for key, value_r in hurt.items():
        assert value_r[1].isnan(), key
        assert torch.equal(value_r[[0, 2]], fine[key][[0, 2]]), key


def test_a_run_alone_says_what_it_says_in_company() -> None:
    company = Steps(dtype=torch.float32, batch=16).run(2)[1][1]
    for place, seed in enumerate(SEEDS):
        alone = Steps(dtype=torch.float32, seeds=(seed,), batch=16).run(2)[1][1]
        for key, value_r in company.items():
            assert torch.equal(alone[key], value_r[place : place + 1]), key


def test_listening_changes_no_bit() -> None:
    deaf, _ = Steps(names=(), dtype=torch.float32).run(4)
    listened, heard = Steps(dtype=torch.float32).run(4)
    assert {name for name, _ in heard[3]} == set(OF_ANY_STEP)
    assert all(torch.equal(deaf[name], listened[name]) for name in deaf)


def test_values_are_kept_from_later_steps() -> None:
    """What was heard is a copy: later steps change weights and moments in place."""
    first = Steps().run(1)[1][0]
    _, every = Steps().run(3)
    assert all(torch.equal(every[0][key], value) for key, value in first.items())
    assert not torch.equal(every[0]["param_rms", "head"], every[1]["param_rms", "head"])


class Cap(nn.Module):
    def forward(self, scores_rbhts: Tensor) -> Tensor:
        return 0.1 * torch.tanh(scores_rbhts / 0.1)


class ScoreCap(HookIntervention):
    hook_points: ClassVar = ("scores",)

    def attach(self, point: HookPoint, runs: int, config: Any) -> nn.Module:
        return Cap()


def test_the_score_is_heard_before_its_cap() -> None:
    capped, bare = (Steps(names=("attention_logit_max",), changes=c).run(1)[1][0] for c in ({"cap": ScoreCap()}, {}))
    where = ("attention_logit_max", "block0")
    assert torch.equal(capped[where], bare[where])
    assert capped[where].min() > 0.1  # no capped score is as large
    assert not torch.equal(capped[where[0], "block1"], bare[where[0], "block1"])  # and the cap is there


def test_entropy_of_even_attention() -> None:
    """Query t spreads over t + 1 keys: the mean of ln 1, ln 2, ..."""
    length = 6

    @torch.no_grad()
    def silence(made: Transformer) -> None:
        for name, weight in weights_of(made).items():
            if "query" in name:
                weight.zero_()

    value_r = Steps(names=("attention_entropy",), changes={}, spoil=silence).run(1)[1][0]["attention_entropy", "block1"]
    even = sum(math.log(t + 1) for t in range(length)) / length
    assert value_r.tolist() == pytest.approx([even] * 3, rel=1e-12)


def test_what_formats_would_lose_of_planted_numbers() -> None:
    """A quarter of the entries of the first run are too small or too large for a format, none of the second."""
    wide = torch.ones(2, 4, 32)
    wide[0, 0] = 2.0**-26  # below half of the smallest number of fp16, and 2**-18 of the largest
    for fmt in (grad_underflow_fp16, grad_underflow_e4m3):
        assert fmt({"w": wide})["w"].tolist() == [0.25, 0.0]
    assert grad_underflow_mx({"w": wide})["w"].tolist() == [0.0, 0.0]  # alone in its block, it has a scale of its own
    mixed = wide.clone()
    mixed[0, :, ::4] = 2.0**-19
    assert block_underflow_mx(mixed)[0].item() == pytest.approx(0.25 * 3 / 4)
    assert block_underflow_e4m3(mixed)[0].item() == pytest.approx(0.25 + 0.25 * 3 / 4)
    wide[0, 0] = 65520.0
    assert block_overflow_fp16(wide).tolist() == [0.25, 0.0]
    wide[0, 1, :8], wide[0, 1, 8:] = 1.9, 1.7  # of 2, at most 1.75 fits and up to 1.8125 rounds to it
    assert block_overflow_mx(wide).tolist() == [0.25 + 0.25 / 4, 0.0]


def test_when_probes_fire() -> None:
    config = build(ProbesConfig, {"name": "x", "every": 4, "names": ["grad_norm"]}, "probes")
    assert [step for step in range(11) if config.fires(step, 11)] == [0, 4, 8, 10]
    assert not any(ProbesConfig("none", 1).fires(step, 5) for step in range(5))


def test_no_probe_means_nothing_is_heard() -> None:
    listener = Listener(())
    listener("train_loss", "", torch.ones(2))
    assert not listener.probe_values
    assert not listener.measures("train_loss")
    assert Listener(["grad_norm"]).measures("gradients")


def test_a_name_is_taken_once() -> None:
    def grad_norm(loss_r: Tensor) -> Tensor:
        return loss_r

    with pytest.raises(ValueError, match="probe 'grad_norm' is already registered"):
        probe(event="train_loss")(grad_norm)
