"""The loss is cross-entropy plus named terms, per run, over the targets that count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cap import HiddenQuartic, LogitOfTarget
from lab import LossTerm, Predictions
from lab.core.axes import mean_over_tokens
from lab.core.errors import RequestError
from lab.core.hooks import listening
from lab.core.registry import INTERVENTIONS
from lab.core.schema import build, stack
from lab.interventions.loss_terms import ZLoss
from lab.model.loss import IGNORED, losses
from pieces import CPU, intervention, model, recipe, tokens, weights_of

TERMS = [name for name in INTERVENTIONS if issubclass(INTERVENTIONS[name], LossTerm)]
TERMS = [name for name in TERMS if "routes" not in INTERVENTIONS[name].uses]  # test_experts.py has these
RUNS, BATCH, LENGTH, VOCABULARY = 3, 2, 5, 7


def draw(scale: float = 2.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits ``[r b t v]`` that ask for gradients, and targets."""
    generator = torch.Generator().manual_seed(0)
    logits_rbtv = scale * torch.randn(RUNS, BATCH, LENGTH, VOCABULARY, generator=generator, dtype=dtype)
    return logits_rbtv.requires_grad_(), torch.randint(VOCABULARY, (RUNS, BATCH, LENGTH), generator=generator)


def gradient(loss_r: Tensor, logits_rbtv: Tensor) -> Tensor:
    return torch.autograd.grad(loss_r.sum(), [logits_rbtv], retain_graph=True)[0]


def test_without_terms_it_is_cross_entropy() -> None:
    logits_rbtv, targets_rbt = draw()
    loss_r, cross_entropy_r = losses(logits_rbtv, targets_rbt, {})
    for run in range(RUNS):
        theirs = F.cross_entropy(logits_rbtv[run].flatten(0, 1), targets_rbt[run].flatten())
        torch.testing.assert_close(loss_r[run], theirs, rtol=1e-12, atol=0)
        (felt,) = torch.autograd.grad(theirs, [logits_rbtv])
        torch.testing.assert_close(gradient(loss_r, logits_rbtv)[run], felt[run], rtol=1e-12, atol=1e-15)
    assert torch.equal(loss_r, cross_entropy_r)


def test_z_loss_is_its_coefficient_times_the_mean_square_of_log_z() -> None:
    logits_rbtv, targets_rbt = draw()
    coefficients = torch.tensor([1e-4, 0.0, 0.5], dtype=torch.float64)
    loss_r, cross_entropy_r = losses(logits_rbtv, targets_rbt, {"z_loss": ZLoss(coefficients)})
    log_z_rbt = logits_rbtv.exp().sum(-1).log()
    added_r = coefficients * (log_z_rbt**2).mean((1, 2))
    torch.testing.assert_close(loss_r - cross_entropy_r, added_r, rtol=1e-11, atol=1e-15)
    added = gradient(loss_r, logits_rbtv) - gradient(cross_entropy_r, logits_rbtv)
    torch.testing.assert_close(added, gradient(added_r, logits_rbtv), rtol=1e-11, atol=1e-15)
    assert added[2].abs().max() > 1e-3


@pytest.mark.parametrize("name", TERMS)
def test_contract_of_loss_terms(name: str) -> None:
    """A term moves the loss and its gradient, never the cross-entropy that is reported, and sees no other run."""
    logits_rbtv, targets_rbt = draw()
    loss_r, cross_entropy_r = losses(logits_rbtv, targets_rbt, {name: intervention(name)})
    bare_r, _ = losses(logits_rbtv, targets_rbt, {})
    assert torch.equal(cross_entropy_r, bare_r)
    assert loss_r.shape == (RUNS,)
    assert (loss_r != bare_r).all()
    assert not torch.equal(gradient(loss_r, logits_rbtv), gradient(bare_r, logits_rbtv))
    alone_r, _ = losses(logits_rbtv[1:2], targets_rbt[1:2], {name: intervention(name)})
    assert torch.equal(alone_r, loss_r[1:2])


def test_terms_add_up() -> None:
    logits_rbtv, targets_rbt = draw()
    some, more = ZLoss(0.1), ZLoss(0.2)
    loss_r, cross_entropy_r = losses(logits_rbtv, targets_rbt, {"some": some, "more": more})
    summed_r = sum(losses(logits_rbtv, targets_rbt, {"one": term})[0] - cross_entropy_r for term in (some, more))
    torch.testing.assert_close(loss_r - cross_entropy_r, summed_r, rtol=1e-12, atol=0)


@pytest.mark.parametrize("garbage", [1e3, math.nan, math.inf, -math.inf])
def test_ignored_targets_leave_no_trace(garbage: float) -> None:
    """Nor do the logits there: in no loss, in no gradient, in nothing that is overheard."""
    logits_rbtv, targets_rbt = draw()
    ignored_rbt = torch.zeros_like(targets_rbt, dtype=torch.bool)
    ignored_rbt[0, 0, 1:], ignored_rbt[2, 1, 2] = True, True
    targets_rbt = targets_rbt.masked_fill(ignored_rbt, IGNORED)
    dirty_rbtv = logits_rbtv.detach().clone()
    dirty_rbtv[ignored_rbt] = garbage
    dirty_rbtv.requires_grad_()
    terms, heard = {name: intervention(name) for name in TERMS}, {}
    with listening(lambda kind, where, *values: heard.__setitem__(kind, values)):
        loss_r, cross_entropy_r = losses(dirty_rbtv, targets_rbt, terms)
    for run in range(RUNS):
        counted_bt = ~ignored_rbt[run]
        kept = logits_rbtv[run][counted_bt][None, None], targets_rbt[run][counted_bt][None, None]
        alone_r, bare_r = losses(*kept, terms)
        torch.testing.assert_close(loss_r[run], alone_r[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(cross_entropy_r[run], bare_r[0], rtol=1e-12, atol=0)
        torch.testing.assert_close(heard["train_loss"][0][run].detach(), bare_r[0].detach(), rtol=1e-12, atol=0)
        log_z = torch.logsumexp(kept[0], -1).mean().detach()
        torch.testing.assert_close(mean_over_tokens(*heard["log_z"])[run].detach(), log_z, rtol=1e-12, atol=0)
    felt = gradient(loss_r, dirty_rbtv)
    assert felt[ignored_rbt].eq(0).all()
    assert torch.equal(felt, gradient(losses(logits_rbtv, targets_rbt, terms)[0], logits_rbtv))
    assert felt[~ignored_rbt].ne(0).any(-1).all()


def test_the_mean_is_over_tokens_and_never_over_runs() -> None:
    logits_rbtv, targets_rbt = draw()
    felt = gradient(losses(logits_rbtv, targets_rbt, {})[0], logits_rbtv)
    alone = gradient(losses(logits_rbtv[:1], targets_rbt[:1], {})[0], logits_rbtv)
    assert torch.equal(felt[0], alone[0])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_run_changes_no_bit_of_the_others(broken: float) -> None:
    logits_rbtv, targets_rbt = draw(dtype=torch.float32)
    hurt_rbtv = logits_rbtv.detach().clone()
    hurt_rbtv[1] = broken
    hurt_rbtv.requires_grad_()
    terms = {name: intervention(name) for name in TERMS}
    fine_r, hurt_r = losses(logits_rbtv, targets_rbt, terms)[0], losses(hurt_rbtv, targets_rbt, terms)[0]
    assert hurt_r[1].isnan()
    others = [0, 2]
    assert torch.equal(fine_r[others], hurt_r[others])
    assert torch.equal(gradient(fine_r, logits_rbtv)[others], gradient(hurt_r, hurt_rbtv)[others])


def test_large_logits_do_not_overflow() -> None:
    logits_rbtv, targets_rbt = draw(scale=1e4, dtype=torch.float32)
    loss_r, _ = losses(logits_rbtv, targets_rbt, {"z_loss": ZLoss(1e-4)})
    theirs_r, _ = losses(logits_rbtv.double(), targets_rbt, {"z_loss": ZLoss(1e-4)})
    torch.testing.assert_close(loss_r, theirs_r.float(), rtol=1e-5, atol=0)


def test_coefficients_are_per_run_and_never_negative() -> None:
    term = stack([intervention("z_loss", coefficient=c) for c in (0.0, 1e-4)], CPU)
    assert term.coefficient.tolist() == [0.0, 1e-4]
    assert recipe("intervention", "z_loss")["z_loss"]["coefficient"] == 1e-4  # the paper's
    with pytest.raises(RequestError, match="coefficient must be at least 0"):
        build(ZLoss, {"coefficient": -1e-4}, "intervention.z_loss")


def quartic(logits_rbtv: Tensor, targets_rbt: Tensor, hidden_rbtd: Tensor) -> Tensor:
    return hidden_rbtd.square().square().sum(-1) / hidden_rbtd.shape[-1]


def square_of_target(logits_rbtv: Tensor, targets_rbt: Tensor, hidden_rbtd: Tensor) -> Tensor:
    one_hot_rbtv = F.one_hot(targets_rbt, logits_rbtv.shape[-1])
    return (logits_rbtv * one_hot_rbtv).sum(-1) ** 2


@pytest.mark.parametrize(("term", "value"), [(HiddenQuartic, quartic), (LogitOfTarget, square_of_target)])
def test_gradients_of_terms_on_hidden_states_and_logits(term: type[LossTerm], value: Callable[..., Tensor]) -> None:
    """All weights of a model get the gradient that autograd finds of the same formula."""
    made, rows_rbt = model(0, 1, 2), tokens(0, 1, 2)
    targets_rbt, coefficient_r = rows_rbt[..., 1:], torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    seen: list[Tensor] = []
    made.final_norm.register_forward_hook(lambda module, given, output: seen.append(output))
    logits_rbtv, hidden_rbtd = made(rows_rbt[..., :-1])
    loss_r, cross_entropy_r = losses(logits_rbtv, targets_rbt, {"term": term(coefficient_r)}, hidden_rbtd)
    bare_rbt = F.cross_entropy(logits_rbtv.movedim(-1, 1), targets_rbt, reduction="none")
    expected_r = (bare_rbt + coefficient_r.view(-1, 1, 1) * value(logits_rbtv, targets_rbt, seen[0])).mean((1, 2))
    torch.testing.assert_close(loss_r, expected_r, rtol=1e-12, atol=0)
    weights = weights_of(made)
    felt, expected, bare = (
        torch.autograd.grad(total_r.sum(), list(weights.values()), retain_graph=True, allow_unused=True)
        for total_r in (loss_r, expected_r, cross_entropy_r)
    )
    for name, mine, theirs, without in zip(weights, felt, expected, bare, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-13)
        assert torch.equal(mine[0], without[0])
        if name != "head" or term is LogitOfTarget:
            assert (mine[1:] - without[1:]).abs().amax() > 1e-4, name


@pytest.mark.parametrize("garbage", [1e3, math.nan, math.inf])
def test_a_term_sees_nothing_of_ignored_tokens(garbage: float) -> None:
    logits_rbtv, targets_rbt = draw()
    hidden_rbtd = torch.rand(RUNS, BATCH, LENGTH, 4, dtype=torch.float64).requires_grad_()
    ignored_rbt = torch.zeros_like(targets_rbt, dtype=torch.bool)
    ignored_rbt[1, 0, 2] = True
    targets_rbt = targets_rbt.masked_fill(ignored_rbt, IGNORED)
    dirty = [value.detach().clone() for value in (logits_rbtv, hidden_rbtd)]
    for value in dirty:
        value[ignored_rbt] = garbage
        value.requires_grad_()
    terms = {"hidden": HiddenQuartic(0.5), "logit": LogitOfTarget(0.5)}
    clean_r, _ = losses(logits_rbtv, targets_rbt, terms, hidden_rbtd)
    loss_r, _ = losses(dirty[0], targets_rbt, terms, dirty[1])
    assert torch.equal(loss_r, clean_r)
    clean = torch.autograd.grad(clean_r.sum(), [logits_rbtv, hidden_rbtd])
    for felt, expected in zip(torch.autograd.grad(loss_r.sum(), dirty), clean, strict=True):
        assert felt[ignored_rbt].eq(0).all()
        assert torch.equal(felt, expected)


def test_a_term_gets_only_what_it_uses() -> None:
    class Log(LossTerm):
        uses: ClassVar = ("log_z_rbt",)

        def __call__(self, predictions: Predictions) -> Tensor:
            assert [name for name, value in predictions._asdict().items() if value is not None] == ["log_z_rbt"]
            return predictions.log_z_rbt

    logits_rbtv, targets_rbt = draw()
    losses(logits_rbtv, targets_rbt, {"log": Log()}, logits_rbtv)
