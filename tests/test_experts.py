"""Mixtures of experts: the router against published formulas, what balances it, and runs alone and in company."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from committed import RESULTS
from lab import Fleet, Predictions
from lab.analysis.curves import idle_parameters
from lab.core.distributed import copy_whole
from lab.core.errors import RequestError
from lab.core.hooks import HookPoint, collecting
from lab.core.registry import PROBES
from lab.core.routing import Routing, gates, route, variation, within_capacity
from lab.interventions.experts import begin_routing, learn_from_routes, routing_with
from lab.model.config import ModelConfig
from lab.model.loss import IGNORED, losses
from lab.records import store
from lab.sweeping.cautions import find_cautions
from lab.training.building import active_parameters, build_model, count_parameters
from lab.training.identity import columns
from pieces import intervention, model, tokens, weights_of
from small import configs, trained

# Logits of six tokens for four experts, and what published formulas make of them in float64.
LOGITS = torch.tensor(
    [[2, 1, 0, -1], [0.5, 0, 0.25, -0.5], [3, -1, 0, 1], [-2, 0, 1, 0.5], [1, 1.5, -1, 0], [4, 2, 2.5, 0]],
    dtype=torch.float64,
).view(1, 2, 3, 4)
SMALL = ("intervention=[experts]", "probes=experts", "model.depth=2")


def routed(top_k: int = 1, *, shift: float = 0.0, bias: list[float] | None = None, **how: Any) -> Routing:
    logits_rbte = (LOGITS + shift).requires_grad_()
    bias_re = None if bias is None else torch.tensor([bias], dtype=torch.float64)
    return route(logits_rbte, top_k, **{"is_sigmoid": False, "bias_re": bias_re, **how})


def term(name: str, routing: Routing) -> Tensor:
    """A term of the loss with coefficient 1, a mean over tokens."""
    nothing: Any = None
    predictions = Predictions(nothing, nothing, nothing, nothing, {"block0": routing})
    value: Tensor = intervention(name, coefficient=1.0)(predictions).mean()
    return value


def gradient_of_first_token(name: str, routing: Routing) -> list[float]:
    (gradient_rbte,) = torch.autograd.grad(term(name, routing), routing.logits_rbte)
    return gradient_rbte[0, 0, 0].tolist()


def exactly(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-9, abs=1e-12)


def test_router_z_loss() -> None:
    routing = routed()
    assert term("router_z", routing).item() == pytest.approx(7.428366035494676, rel=1e-12)
    assert gradient_of_first_token("router_z", routing) == exactly(
        0.523757647911762, 0.1926796708230481, 0.07088288962748039, 0.026076357824774507
    )
    at_zero = routing._replace(logits_rbte=torch.zeros(1, 2, 3, 8))
    assert term("router_z", at_zero).item() == pytest.approx(math.log(8) ** 2)


def test_top_1_of_a_softmax() -> None:
    routing = routed()
    mean_e = routing.shares_rbte.mean((0, 1, 2))
    assert mean_e.tolist() == exactly(0.484378728173711, 0.21258716089811114, 0.1850686310771853, 0.1179654798509926)
    assert routing.counts().tolist() == [[4, 1, 1, 0]]
    assert term("balance", routing).item() == pytest.approx(1.5567804697800938, rel=1e-12)
    assert gradient_of_first_token("balance", routing) == exactly(
        0.07872322768964776, -0.05000028235362355, -0.01839407593066536, -0.010328869405358803
    )
    assert variation(routing.counts()).item() == pytest.approx(1)
    assert PROBES["router_entropy"].measure(routing).item() == pytest.approx(0.980353706960005, rel=1e-12)


def test_top_2_of_a_softmax() -> None:
    routing = routed(2)
    assert routing.counts().tolist() == [[5, 2, 3, 2]]
    assert term("balance", routing).item() == pytest.approx(1.2127349385327728, rel=1e-12)
    assert variation(routing.counts()).item() == pytest.approx(0.4082482904638631, rel=1e-12)
    raw, normalized = (gates(routing, is_normalized=normalized)[0, 0, 0].tolist() for normalized in (False, True))
    assert raw == pytest.approx([0.64391426, 0.23688282, 0, 0], rel=1e-7)
    assert normalized == pytest.approx([0.7310585786, 0.2689414214, 0, 0], rel=1e-9)


def test_top_2_of_sigmoids() -> None:
    routing = routed(2, is_sigmoid=True)
    assert term("balance", routing).item() == pytest.approx(1.036598249590445, rel=1e-12)
    assert gates(routing, is_normalized=True)[0, 0, 0, :2].tolist() == exactly(0.5464491031607007, 0.4535508968392993)


@pytest.mark.parametrize(("shift", "with_epsilon"), [(-50.0, 0.31564988634172225), (-60.0, 2.6128723e-05)])
def test_scores_that_underflow_hide_no_imbalance(shift: float, with_epsilon: float) -> None:
    """Sigmoids divided by their sum plus 1e-20, as other programs have it, lose the balance loss."""
    routing = routed(2, is_sigmoid=True, shift=shift)
    scores = routing.scores_rbte.detach().view(6, 4)
    load = torch.tensor([5, 2, 3, 2], dtype=torch.float64) / 12
    theirs = 4 * (load * (scores / (scores.sum(-1, keepdim=True) + 1e-20)).mean(0)).sum()
    assert theirs.item() == pytest.approx(with_epsilon, rel=1e-6)
    assert term("balance", routing).item() == pytest.approx(1.2127349385327728, rel=1e-9)


def test_the_balance_loss_may_be_below_1() -> None:
    shares = torch.tensor([[0.26, 0.74], [0.51, 0.49], [0.51, 0.49], [0.25, 0.75]], dtype=torch.float64)
    chosen = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=torch.bool)
    routing = Routing(shares.log().view(1, 1, 4, 2), shares.view(1, 1, 4, 2), chosen.view(1, 1, 4, 2), None, 1, False)
    assert shares.mean(0).tolist() == exactly(0.3825, 0.6175)
    assert term("balance", routing).item() == pytest.approx(0.8825, rel=1e-12)


@pytest.mark.parametrize("name", ["balance", "router_z"])
@pytest.mark.parametrize("garbage", [1e3, math.nan, math.inf])
def test_ignored_targets_leave_no_trace(name: str, garbage: float) -> None:
    targets_rbt = torch.zeros(1, 2, 3, dtype=torch.int64)
    targets_rbt[0, 0, 1], targets_rbt[0, 1, 2] = IGNORED, IGNORED
    counted_rbt = targets_rbt != IGNORED
    dirty_rbte = torch.where(counted_rbt[..., None], LOGITS, garbage).requires_grad_()
    terms, words_rbtv = {name: intervention(name, coefficient=1.0)}, torch.zeros(1, 2, 3, 5, dtype=torch.float64)
    routing = route(dirty_rbte, 1, is_sigmoid=False)
    loss_r, without_r = losses(words_rbtv, targets_rbt, terms, routes={"block0": routing})
    kept_rbte = LOGITS[counted_rbt].view(1, 1, 4, 4)
    alone = term(name, route(kept_rbte, 1, is_sigmoid=False))
    torch.testing.assert_close((loss_r - without_r)[0], alone, rtol=1e-12, atol=0)
    (felt_rbte,) = torch.autograd.grad(loss_r.sum(), dirty_rbte)
    assert felt_rbte.isfinite().all()
    assert felt_rbte[~counted_rbt].eq(0).all()


def test_the_bias_moves_against_the_load() -> None:
    kept = {"bias.block0": torch.zeros(1, 4, dtype=torch.float64)}
    learn_from_routes(kept, {"block0": routed(2)}, {"router_bias": intervention("router_bias", rate=1e-3)})
    assert kept["bias.block0"].tolist() == [[-1e-3, 1e-3, 0, 1e-3]]


def test_the_bias_chooses_and_never_enters_gates() -> None:
    routing = routed(2, is_sigmoid=True, bias=[0.9, 0, 0, -0.9])
    assert routing.counts().tolist() == [[6, 2, 4, 0]]
    assert gates(routing, is_normalized=True)[0, 0, 1].tolist() == exactly(0.5254436125783152, 0, 0.4745563874216848, 0)


@pytest.mark.parametrize(("places", "dropped"), [(2, 0.375), (3, 0.25), (4, 0.125)])
def test_capacity_drops_later_routes(places: int, dropped: float) -> None:
    chosen = F.one_hot(torch.tensor([0, 0, 1, 0, 2, 0, 0, 1]), 4).bool().view(1, 1, 8, 4)
    kept = within_capacity(chosen, places)
    assert 1 - kept.sum().item() / 8 == dropped
    assert not kept[0, 0, -2:].any(-1)[0]  # the sixth token for expert 0


@pytest.mark.parametrize(("factor", "places"), [(1, 2), (1.25, 3), (2, 4)])
def test_capacity_is_a_multiple_of_the_fair_share(factor: float, places: int) -> None:
    """Places are whole: a part of one is one."""
    router = intervention("experts", number=4, capacity=factor).attach(
        HookPoint("mlp_gate", "block0"), 1, ModelConfig("", 8, 2, 8)
    )
    with torch.no_grad():
        router.weight.zero_()  # all eight tokens to the first expert
        passed_rbtm = router(torch.ones(1, 1, 8, 4), torch.ones(1, 1, 8, 8))
    assert passed_rbtm.ne(0).sum() == places


@pytest.mark.parametrize("logits", [(16.05, 16.0), (8.02, 8.0)])
def test_of_equal_scores_the_first_is_chosen(logits: tuple[float, float]) -> None:
    first, second = (torch.tensor(pair, dtype=torch.float32).view(1, 1, 1, 2) for pair in (logits, logits[::-1]))
    assert [route(z, 1, is_sigmoid=False).chosen_rbte.flatten().tolist() for z in (first, second)] == [
        [True, False],
        [False, True],
    ]
    flips = [PROBES["router_flips"].measure(route(z, 1, is_sigmoid=False)).item() for z in (first, second)]
    assert flips == [0, 1]  # in bf16 they are equal


def test_a_mixture_is_the_sum_of_its_experts_times_their_gates() -> None:
    for numbers in ({"top_k": 2}, {"top_k": 3, "gates": "normalized", "router": "sigmoid", "shared": 1}):
        change = intervention("experts", number=4, hidden=0.5, **numbers)
        made = model(0, depth=1, changes={"experts": change})
        up, down, router = (weights_of(made)[f"block0.{name}"][0] for name in ("mlp_up", "mlp_down", "gate.experts"))
        x_rbtd = torch.randn(1, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        expected = torch.zeros(2, 3, 8, dtype=torch.float64)
        for b, t in [(b, t) for b in range(2) for t in range(3)]:
            x = x_rbtd[0, b, t]
            scores = (x @ router).sigmoid() if change.router == "sigmoid" else (x @ router).softmax(0)
            best = scores.argsort(descending=True)[: change.top_k]
            total = scores[best].sum() if change.gates == "normalized" else 1.0
            experts = [(int(e), scores[e] / total) for e in best] + [(4, torch.tensor(1.0))] * change.shared
            for expert, gate in experts:
                units = slice(4 * expert, 4 * expert + 4)
                expected[b, t] += gate * F.gelu(x @ up[:, units], approximate="tanh") @ down[units]
        torch.testing.assert_close(made.block0.mlp(x_rbtd)[0], expected)  # type: ignore[union-attr, operator]


def test_a_token_without_a_place_passes_no_expert() -> None:
    made = model(0, depth=1, changes={"experts": intervention("experts", number=4, capacity=0.5)})
    with collecting("router") as routes, collecting("mlp_output") as outputs:
        made(tokens(0, batch=4, length=8))
    counts_e = routes["block0"].counts()[0]
    passed_bt = outputs["block0"][0].ne(0).any(-1)
    assert passed_bt.sum() == counts_e.clamp(max=4).sum()  # half of the fair share of 32 routes
    assert not passed_bt.all()
    assert passed_bt[:, 0].sum() >= passed_bt[:, -1].sum()


def test_a_router_in_bf16_has_logits_and_scores_of_bf16() -> None:
    for precision, is_rounded in (("bf16", True), ("fp32", False)):
        change = intervention("experts", number=4, router_precision=precision)
        with collecting("router") as routes:
            model(0, depth=1, changes={"experts": change}, dtype=torch.float32)(tokens(0))
        for values in (routes["block0"].logits_rbte, routes["block0"].scores_rbte):
            assert torch.equal(values, values.to(torch.bfloat16).float()) == is_rounded


def test_with_one_normalized_gate_the_router_learns_nothing() -> None:
    made = model(0, depth=1, changes={"experts": intervention("experts", gates="normalized")})
    logits_rbtv, _ = made(tokens(0))
    (gradient,) = torch.autograd.grad(logits_rbtv.square().sum(), [weights_of(made)["block0.gate.experts"]])
    assert gradient.eq(0).all()


def test_a_router_that_learns_nothing_is_cautioned_against() -> None:
    gates = "intervention.experts.gates=normalized"
    idle, raw, two = configs(gates, "", f"{gates} intervention.experts.top_k=2", shared=SMALL)
    (caution,) = find_cautions([idle, raw])
    assert caution.startswith("routers learn nothing from the text in 1 of 2 runs")
    assert not [*find_cautions([raw, two])]


def test_an_expert_starts_as_an_mlp_of_its_own() -> None:
    made = model(0, width=64, depth=1, changes={"experts": intervention("experts", number=4, router_init=0.1)})
    stds = {name: weight.std().item() for name, weight in weights_of(made).items()}
    assert stds["block0.mlp_down"] == pytest.approx(1 / 8, rel=0.05)  # of 64 hidden units, not of 256
    assert stds["block0.gate.experts"] == pytest.approx(0.1 / 8, rel=0.2)


@pytest.mark.parametrize("names", ["experts", "experts,swiglu"])
def test_parameters_that_act_on_a_token_are_told_apart(names: str) -> None:
    shape = ("intervention.experts.top_k=2", "intervention.experts.shared=1", "intervention.experts.hidden=0.5")
    (config,) = configs("", shared=(f"intervention=[{names}]", *shape, "model.depth=2"))
    built = build_model(config, 1)
    total, _ = count_parameters(built)
    idle = 2 * 6 * 8 * 16 * (3 if "swiglu" in names else 2)  # blocks, experts, hidden units, width, matrices
    assert active_parameters(config, built) == total - idle
    assert idle_parameters(pd.DataFrame([{"id": "a", **columns(config)}])).tolist() == [idle]
    (dense,) = configs("intervention=[z_loss]")
    assert active_parameters(dense, build_model(dense, 1)) == count_parameters(build_model(dense, 1))[0]
    assert idle_parameters(pd.DataFrame([{"id": "a", **columns(dense)}])).tolist() == [0]


KINDS = {
    "balance": ("intervention.balance.coefficient=0.1", "intervention.balance.coefficient=0"),
    "router_z": ("intervention.router_z.coefficient=0.1", "intervention.router_z.coefficient=0"),
    "router_bias": ("intervention.router_bias.rate=0.1", "intervention.router_bias.rate=0"),
}
MIXED = (
    *SMALL[1:],
    "intervention=[experts,balance,router_z,router_bias]",
    *("intervention.experts.router=sigmoid", "intervention.experts.top_k=2", "intervention.experts.jitter=0.1"),
    "intervention.experts.capacity=1.25",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_coefficients_differ_inside_a_fleet(name: str) -> None:
    shared = (f"intervention=[experts,{name}]", *SMALL[1:])
    pair = configs(*KINDS[name], shared=shared)
    together = trained(pair)
    assert together == [run for config in pair for run in trained([config])]
    assert together[0] != together[1]


def test_runs_with_everything_have_the_same_bits_alone() -> None:
    three = configs("seed=0", "seed=1 intervention.router_bias.rate=0.1", "seed=0 optimizer.lr=0.1", shared=MIXED)
    assert trained(three) == [run for config in three for run in trained([config])]


def test_a_fleet_goes_on_from_its_tensors_to_the_same_bits() -> None:
    two = configs("seed=0", "seed=1 intervention.router_bias.rate=0.1", shared=MIXED)
    through, begun, resumed = Fleet(two), Fleet(two), Fleet(two)
    for step in range(6):
        through.step(step)
        if step < 3:
            begun.step(step)
    for name, tensor in resumed.tensors().items():
        copy_whole(tensor, begun.tensors()[name])
    for step in range(3, 6):
        resumed.step(step)
    ours, theirs = resumed.tensors(), through.tensors()
    assert {"router.random", "router.bias.block1"} <= ours.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_jitter_and_bias_learn_from_training_alone() -> None:
    fleet = Fleet(configs("", shared=MIXED))
    before = {name: tensor.clone() for name, tensor in fleet.state.links["router"].items()}
    losses = [fleet.evaluation.loss(whole=False).tolist() for _ in range(2)]
    assert losses[0] == losses[1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in fleet.state.links["router"].items())
    fleet.step(0)
    assert [name for name, tensor in fleet.state.links["router"].items() if torch.equal(tensor, before[name])] == []


def test_no_jitter_reaches_the_held_out_loss() -> None:
    noisy, plain = (Fleet(configs(f"intervention.experts.jitter={size}", shared=MIXED)) for size in (0.9, 0))
    assert torch.equal(noisy.evaluation.loss(whole=False), plain.evaluation.loss(whole=False))


def test_jitter_spreads_the_input_of_a_router_evenly_within_its_bounds() -> None:
    """Anew for each run, each block and each update."""
    change, blocks = intervention("experts", number=8, jitter=0.25), ["block0", "block1"]
    kept, factors = begin_routing({"experts": change}, blocks, [1, 2], torch.zeros(1), with_load=False), []
    for where in blocks * 2:
        router = change.attach(HookPoint("mlp_gate", where), 2, ModelConfig("", 8, 2, 8))
        with torch.no_grad(), routing_with(kept, is_training=True), collecting("router") as routes:
            router.weight.copy_(torch.eye(8))
            router(torch.ones(2, 4, 50, 8 * 32), torch.ones(2, 4, 50, 8))
        factors += routes[where].logits_rbte
        if where == blocks[-1]:
            learn_from_routes(kept, {}, {})
    for factor_bte in factors:
        assert 0.75 <= factor_bte.min() < 0.76
        assert 1.24 < factor_bte.max() <= 1.25
        assert factor_bte.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.corrcoef(torch.stack(factors).flatten(1)).triu(1).abs().max() < 0.1


@pytest.mark.slow
def test_jitter_changes_training() -> None:
    with_it, without = configs("intervention.experts.jitter=0.1", "intervention.experts.jitter=0", shared=SMALL)
    (noisy,), (plain,) = trained([with_it]), trained([without])
    assert noisy[0]["loss_at_init"] == plain[0]["loss_at_init"]
    assert noisy[0]["final_val_loss"] != plain[0]["final_val_loss"]


def test_dead_experts_are_counted_over_the_last_updates() -> None:
    load = torch.ones(1, 50, 8)
    load[..., 0], load[..., 1], load[:, -1, 1] = 0, 0, 50  # one of no route, one of all of its own in the last update
    assert PROBES["dead_experts"].measure(load).item() == 1
    assert PROBES["expert_load_max"].measure(load).item() == pytest.approx(50 / (350 / 8))


def test_every_block_has_values() -> None:
    (run,) = trained(configs("", shared=MIXED))
    names = [name for name in PROBES if name.startswith(("router_", "expert_", "dead_"))]
    for name in names:
        values = [value for _, probe, where, value in run[1] if probe == name and where == "block1"]
        assert values, name
        assert all(map(math.isfinite, values)), name


@pytest.mark.parametrize("words", ["intervention.experts.top_k=9", "intervention.experts.capacity=0.01"])
def test_what_no_router_can_do_is_refused(words: str) -> None:
    with pytest.raises(RequestError):
        configs(words, shared=SMALL)


def test_a_model_without_experts_announces_no_routes() -> None:
    with collecting("router") as routes:
        model(0)(tokens(0))
    assert routes == {}


def test_a_fast_bias_at_the_last_step_is_quoted() -> None:
    records = store.read(RESULTS / "experts_bias")
    loads = records.metrics.query("probe == 'expert_load_cv_batch'")
    last = loads[loads["step"] == loads["step"].max()].groupby("id")["value"].mean()
    by_rate = last.groupby(records.runs.set_index("id")["intervention.router_bias.rate"]).mean()
    page = (RESULTS.parent / "docs" / "experts.md").read_text(encoding="utf-8")
    assert f"by {by_rate[1.0] - by_rate[0.0]:.3f} at its last step" in page
