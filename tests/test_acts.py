"""Interventions that share a hook point act in an order that makes sense, however they are called or asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pandas as pd
import pytest
import torch

import planted
from cap import Cap
from lab import Act, HookIntervention, RunConfig
from lab.core.hooks import HookPoint, acting_at, non_alphabetical_orders
from lab.core.number_formats import as_fp16
from lab.core.registry import INTERVENTIONS
from lab.model.transformer import Transformer
from lab.records import store
from lab.training import identity
from pieces import intervention, model, tokens, weights_of
from small import configs
from studies.claims.evidence import Evidence
from test_model import companies

HOOKED = {name: intervention(name) for name in INTERVENTIONS if issubclass(INTERVENTIONS[name], HookIntervention)}
SHARING = [(a, b) for a, b in combinations(sorted(HOOKED), 2) if {*HOOKED[a].hook_points} & {*HOOKED[b].hook_points}]
# In exact arithmetic the model computes the same with and without these.
IDENTITIES = ("pb_relax", "late_qk_scaling", "split_qk_scaling", "embedding_gradient_shrink")
ROUNDING = ("fp16_residual", "fp16_softmax", "fp16_gelu")
# Pairs at one hook point that acted the other way around in older records.
TURNED = {
    ("kappa_transplant", "qk_layernorm"),
    ("kappa_transplant", "qk_layernorm_model"),
    ("pb_relax", "qk_layernorm"),
    ("pb_relax", "qk_layernorm_model"),
    ("fp16_residual", "learned_positions"),
    ("fp16_residual", "normformer"),
}


def exclude(a: str, b: str) -> bool:
    return a in HOOKED[b].excludes or b in HOOKED[a].excludes


def made(*names: str, **others: HookIntervention) -> Transformer:
    """A model in float64 whose weights are all random: no gain is one, and no bias zero."""
    whole = model(0, depth=1, changes={**{name: HOOKED[name] for name in names}, **others})
    with torch.no_grad():
        for name, weight in sorted(weights_of(whole).items()):
            draw = torch.Generator().manual_seed(sum(map(ord, name)))
            weight.copy_(torch.randn(weight.shape, generator=draw, dtype=weight.dtype))
    return whole


def at(whole: Transformer, kind: str) -> HookPoint:
    return next(point for point in whole.modules() if isinstance(point, HookPoint) and point.kind == kind)


@pytest.mark.parametrize("names", companies(list(HOOKED)), ids=lambda names: names[0])
def test_the_order_in_which_they_are_asked_for_does_not_matter(names: tuple[str, ...]) -> None:
    rows_rbt = tokens(0)
    assert torch.equal(made(*names)(rows_rbt)[0], made(*names[::-1])(rows_rbt)[0])


def test_two_with_one_act_commute_or_exclude_each_other() -> None:
    for a, b in (pair for pair in SHARING if not exclude(*pair)):
        points = [HOOKED[name].hook_points for name in (a, b)]
        for kind in points[0].keys() & points[1].keys():
            if points[0][kind] == points[1][kind]:
                assert points[0][kind] is not Act.REPLACE, (a, b)
                first, second = at(made(a, b), kind).changes.values()
                x_r = torch.randn(1, 2, 3, 8, dtype=torch.float64)
                torch.testing.assert_close(first(second(x_r)), second(first(x_r)))


@pytest.mark.parametrize("same", IDENTITIES)
def test_what_changes_nothing_alone_changes_nothing_in_company(same: str) -> None:
    others = [name for name in HOOKED if name not in (same, *ROUNDING) and not exclude(same, name)]
    for names in companies(others):
        with_it, without = (made(*some)(tokens(0))[0] for some in ((same, *names), names))
        torch.testing.assert_close(with_it, without, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("other", ["qk_layernorm", "qk_layernorm_model", "biases", "late_qk_scaling"])
def test_kappa_is_the_mean_square_of_queries_and_keys_in_company(other: str) -> None:
    whole, kappa = made("kappa_transplant", other), HOOKED["kappa_transplant"].kappa
    for kind in ("query", "key"):
        out_rbhtk = at(whole, kind)(torch.randn(1, 2, 2, 3, 4, dtype=torch.float64))
        square = out_rbhtk.square().mean(-1)
        torch.testing.assert_close(square, torch.full_like(square, kappa))


@pytest.mark.parametrize("other", [b if a == "fp16_residual" else a for a, b in SHARING if "fp16_residual" in (a, b)])
def test_the_residual_stream_is_in_fp16_in_company(other: str) -> None:
    whole = made("fp16_residual", other)
    for kind in HOOKED["fp16_residual"].hook_points:
        out_rbtd = at(whole, kind)(torch.randn(1, 2, 3, 8, dtype=torch.float64))
        assert torch.equal(out_rbtd, as_fp16(out_rbtd)), kind


def test_the_scale_is_on_normalized_tokens_not_on_positions() -> None:
    names = ("embedding_layernorm", "embedding_scale", "learned_positions", "fp16_residual")
    for order in (names, names[::-1]):
        assert acting_at("embedding", {name: HOOKED[name] for name in order}) == list(names)


def test_a_cap_bounds_scaled_scores_whatever_its_name() -> None:
    whole = made("late_qk_scaling", a_cap=Cap(3.0))
    scores_ts = 10 * torch.randn(1, 2, 2, 4, 4, dtype=torch.float64)
    expected_ts = 3 * torch.tanh(scores_ts * 4**-0.5 / 3)  # of heads of width 4
    torch.testing.assert_close(at(whole, "scores")(scores_ts), expected_ts)


@pytest.fixture(scope="module")
def plain() -> RunConfig:
    (config,) = configs("", shared=("intervention=[]",))
    return config


def run_of(config: RunConfig, *names: str) -> tuple[str, str]:
    """The id of a run with these interventions, and the one that its names and numbers alone would give."""
    config = replace(config, intervention={name: HOOKED[name] for name in names})
    card = {**identity.columns(config), "data_fingerprint": "x"}
    assert identity.identify(config, "x")[0] == store.run_id(card)
    return store.run_id(card), store.run_id({key: value for key, value in card.items() if key != store.ORDER})


def test_an_id_holds_an_order_that_is_not_that_of_the_names(plain: RunConfig) -> None:
    for a, b in (pair for pair in SHARING if not exclude(*pair)):
        now, by_names = run_of(plain, a, b)
        assert (now != by_names) == bool(non_alphabetical_orders({name: HOOKED[name] for name in (a, b)})), (a, b)
        assert now != by_names or (a, b) not in TURNED
        assert now == run_of(plain, b, a)[0]


def test_committed_runs_had_the_same_order_of_acts() -> None:
    tables = sorted((Path(__file__).parents[1] / "results").rglob("runs.parquet"))
    names = {name for path in tables for name in pd.read_parquet(path, columns=["intervention"])["intervention"]}
    assert len(names) > 20
    for name in names:
        entries = {each: HOOKED[each] for each in name.split("+") if each in HOOKED}
        assert not non_alphabetical_orders(entries), name


def test_a_claim_compares_runs_of_another_order() -> None:
    alone = planted.card(intervention="kappa_transplant+z_loss")
    both = planted.card(
        intervention="kappa_transplant+qk_layernorm+z_loss", **{store.ORDER: "qk_layernorm+kappa_transplant"}
    )
    evidence = Evidence("kappa", planted.records([alone, both]))
    (group,) = evidence.groups(["intervention.qk_layernorm"])
    assert len(group.curves) == 2
