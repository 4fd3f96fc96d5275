"""Comparisons with a baseline: worse recipes are regressions, others are not, and some cannot be judged."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

import planted
from lab.analysis.guard import baseline, compare
from lab.analysis.guard.baseline import Baseline
from lab.analysis.guard.matching import match_curves, runs_of
from lab.analysis.guard.quantities import DECADES, NATS
from lab.analysis.statistics import difference, holm
from planted import BOTH, LABELS, LRS, OFF_LABEL, ON_LABEL, records

cards = partial(planted.cards, widths=(64,))
Card = dict[str, Any]
WORSE, DRIFT, BETTER = "regression", "drift", "better"


def curves(change: Callable[[Card], dict[str, Any]] = lambda card: {}, name: str = "now", **more: Any) -> Baseline:
    """The baseline of planted curves of two arms, with each card changed."""
    made = [{**card, **change(card)} for card in cards(**more)]
    return baseline.from_records(records(made), name)


OLD = curves(name="then")


def check(change: Callable[[Card], dict[str, Any]] = lambda card: {}, margin: float = 0.05, **more: Any) -> Any:
    return compare.compare_baselines(OLD, curves(change, **more), margin)


def verdicts(comparison: compare.Comparison) -> dict[str, set[str]]:
    """Every verdict but `same`, by quantity."""
    by_quantity: dict[str, set[str]] = {}
    for change in comparison.changes:
        if change.verdict != "same":
            by_quantity.setdefault(change.quantity, set()).add(f"{change.verdict} {change.arm}")
    return by_quantity


def shifted(nats: float, arm: str = BOTH[1], above: float = 0.0) -> Callable[[Card], dict[str, Any]]:
    """Final losses of an arm, at learning rates from `above` up, moved by so much."""

    def change(card: Card) -> dict[str, Any]:
        moves = card["intervention"] == arm and card["optimizer.lr"] >= above
        return {"final_val_loss": card["final_val_loss"] + nats * moves}

    return change


def test_the_same_curves_are_the_same() -> None:
    comparison = check()
    assert comparison.verdict == "ok"
    assert comparison.remarks == []
    assert not verdicts(comparison)
    # eight quantities of two arms, and the order of the arms
    assert len(comparison.changes) == 8 * 2 + 1
    assert all((change.change, change.p) == (0, 1) for change in comparison.changes)
    assert comparison.moves == []


def test_other_seeds_of_the_same_recipe_are_the_same() -> None:
    assert check(seeds=(3, 4, 5, 6)).verdict == "ok"


@pytest.mark.parametrize(("nats", "verdict"), [(0.05, DRIFT), (0.2, WORSE), (-0.2, DRIFT)])
def test_losses_may_rise_by_the_margin_and_fall_by_any(nats: float, verdict: str) -> None:
    comparison = check(shifted(nats))
    assert comparison.verdict == verdict
    assert verdicts(comparison)["best loss"] == {f"{ {0.05: DRIFT, 0.2: WORSE, -0.2: BETTER}[nats] } {ON_LABEL}"}
    assert "LR sensitivity" not in verdicts(comparison)  # it does not see a shift of all losses


@pytest.mark.slow
def test_the_margin_is_the_users() -> None:
    assert check(shifted(0.08), margin=0.02).verdict == WORSE
    assert check(shifted(0.08), margin=0.1).verdict == DRIFT
    best = [change for change in check(shifted(0.08), margin=0.1).changes if change.quantity == "best loss"]
    assert all(change.margin == pytest.approx(0.1 * change.before) for change in best)


def test_instability_alone_is_found_and_told_from_under_training() -> None:
    comparison = check(shifted(1.0, above=3e-2))
    by_quantity = verdicts(comparison)
    assert comparison.verdict == WORSE
    assert by_quantity["its instability part"] == {f"{WORSE} {ON_LABEL}"}
    assert by_quantity["smallest unstable learning rate"] == {f"{WORSE} {ON_LABEL}"}
    assert "its under-training part" not in by_quantity
    assert "best loss" not in by_quantity


def test_an_arm_that_loses_its_intervention_is_found() -> None:
    lost = {(card["model.width"], card["optimizer.lr"], card["seed"]): card for card in cards(arms=BOTH[:1])}

    def off(card: Card) -> dict[str, Any]:
        twin = lost[card["model.width"], card["optimizer.lr"], card["seed"]]
        return {"final_val_loss": twin["final_val_loss"]}

    comparison = check(off)
    assert comparison.verdict == WORSE
    assert f"{WORSE} {ON_LABEL}" in verdicts(comparison)["LR sensitivity"]
    assert not any(OFF_LABEL in arms for arms in verdicts(comparison).values())


@pytest.mark.slow
def test_the_best_learning_rate_may_move_by_one_step_of_the_grid() -> None:
    def moved(steps: int) -> Callable[[Card], dict[str, Any]]:
        by_point = {
            (card["intervention"], card["model.width"], card["optimizer.lr"], card["seed"]): card for card in cards()
        }

        def change(card: Card) -> dict[str, Any]:
            index = min(max(LRS.index(card["optimizer.lr"]) + steps, 0), len(LRS) - 1)
            twin = by_point[card["intervention"], card["model.width"], LRS[index], card["seed"]]
            return {"final_val_loss": twin["final_val_loss"]}

        return change

    for steps in (1, -1):
        by_quantity = verdicts(check(moved(steps)))["best learning rate"]
        assert by_quantity == {f"unclear {arm}" for arm in LABELS}, "a grid is too coarse to be certain of one step"
    for steps in (2, -2):
        by_quantity = verdicts(check(moved(steps)))["best learning rate"]
        assert by_quantity == {f"{WORSE} {arm}" for arm in LABELS}


def test_arms_whose_order_turns_are_found() -> None:
    def swapped(card: Card) -> dict[str, Any]:
        return {"intervention": BOTH[1 - BOTH.index(card["intervention"])]}

    comparison = check(swapped)
    order = [change for change in comparison.changes if change.quantity.startswith("sensitivity of")]
    assert [change.verdict for change in order] == [WORSE]
    assert {(change.arm, change.quantity) for change in order} == {(ON_LABEL, f"sensitivity of {OFF_LABEL} above it")}


def test_an_arm_that_gets_better_is_no_regression() -> None:
    def cured(card: Card) -> dict[str, Any]:
        return {"final_val_loss": 2.0 + 0.001 * card["seed"]} if card["intervention"] == BOTH[0] else {}

    old = curves(shifted(0.6, arm=BOTH[0], above=3e-2), "then")
    comparison = compare.compare_baselines(old, curves(cured), 0.05)
    order = [change for change in comparison.changes if change.quantity.startswith("sensitivity of")]
    assert [change.verdict for change in order] == [BETTER]


def test_a_gap_below_the_margin_is_no_order() -> None:
    assert not any(change.quantity.startswith("sensitivity of") for change in check(margin=0.5).changes)


def test_infinite_attention_logits_have_grown() -> None:
    planted_records = records(list(cards()))
    late_logits = planted_records.metrics["probe"].eq("attention_logit_max") & planted_records.metrics["step"].gt(0)
    planted_records.metrics.loc[late_logits, "value"] = math.inf
    comparison = compare.compare_baselines(OLD, baseline.from_records(planted_records, "now"), 0.05)
    assert verdicts(comparison) == {"growth of the attention logits": {f"{WORSE} {arm}" for arm in LABELS}}


def test_attention_logits_that_grow_further_are_found() -> None:
    made = list(cards())
    for times, verdict in ((1.0, "ok"), (1.5, DRIFT), (3.0, WORSE), (0.1, DRIFT)):
        planted_records = records(made)
        late_logits = planted_records.metrics["probe"].eq("attention_logit_max") & planted_records.metrics["step"].gt(0)
        planted_records.metrics.loc[late_logits, "value"] *= times
        comparison = compare.compare_baselines(OLD, baseline.from_records(planted_records, "now"), 0.05)
        assert comparison.verdict == verdict
        assert set(verdicts(comparison)) <= {"growth of the attention logits"}


def test_without_that_probe_the_rest_is_judged_and_it_is_said() -> None:
    planted_records = records(list(cards()))
    without_logits = planted_records._replace(
        metrics=planted_records.metrics[planted_records.metrics["probe"] != "attention_logit_max"]
    )
    comparison = compare.compare_baselines(OLD, baseline.from_records(without_logits, "now"), 0.05)
    assert comparison.verdict == "ok"
    assert len(comparison.changes) == 7 * 2 + 1
    why = "growth of the attention logits was not compared, attention_logit_max was recorded on one side only"
    assert comparison.remarks == [f"{arm} at 98.6k parameters: {why}" for arm in LABELS]


def failing_at(rate: float) -> Callable[[Card], dict[str, Any]]:
    """Curves whose loss climbs to about that of a unigram model around a learning rate."""

    def change(card: Card) -> dict[str, Any]:
        return {"final_val_loss": 2.0 + 0.001 * card["seed"] + 1.2 / (1 + (rate / card["optimizer.lr"]) ** 8)}

    return change


def test_a_failing_rate_that_has_moved_is_told_in_decades() -> None:
    lrs = tuple(float(f"{0.01 * 10 ** (step / 10):.3g}") for step in range(16))
    old = curves(failing_at(0.1), "then", lrs=lrs)
    for rate, is_told in ((0.07, True), (0.14, True), (0.1, False), (1.0, False)):
        found = compare.compare_baselines(old, curves(failing_at(rate), lrs=lrs), 0.05)
        lines = [
            re.search(r": fails from (\S+) instead of (\S+), (\S+) \[.+\] decades$", line) for line in found.remarks
        ]
        assert len(lines) == len(found.remarks) == len(LABELS) * is_told
        for line in filter(None, lines):
            now, before, decades = map(float, line.groups())
            assert now / before == pytest.approx(rate / 0.1, rel=0.05)
            assert decades == pytest.approx(math.log10(rate / 0.1), abs=0.02)
    older = old._replace(runs=old.runs.assign(loss_unigram=math.nan))
    assert compare.compare_baselines(older, curves(failing_at(0.07), lrs=lrs), 0.05).remarks == []


def test_attention_logits_that_run_away_earlier_are_told() -> None:
    sides = []
    for times in (1.0, 40.0):
        made = records(list(cards()))
        logits = made.metrics["probe"].eq("attention_logit_max")
        lr = made.metrics["id"].map(made.runs.set_index("id")["optimizer.lr"])
        made.metrics.loc[logits, "value"] = 10 * (lr[logits] / 0.01) ** 3 * times
        sides.append(baseline.from_records(made, "now"))
    lines = compare.compare_baselines(*sides, 0.05).remarks
    told = "attention logits run away from 0.0079 instead of 0.027, -0.53 ["
    assert [told in line for line in lines] == [True] * len(LABELS)


def test_runs_that_diverge_are_judged_as_untrained() -> None:
    def dead(card: Card) -> dict[str, Any]:
        dies = card["intervention"] == BOTH[1] and card["optimizer.lr"] >= 1e-1
        return {"final_val_loss": math.nan, "status": "diverged", "diverged_at": 7} if dies else {}

    comparison = check(dead)
    assert comparison.verdict == WORSE
    changes = [
        change for change in comparison.changes if change.quantity == "its instability part" and change.arm == ON_LABEL
    ]
    assert all(change.change == pytest.approx(2 / 7 * 3.55, abs=0.2) for change in changes)


@pytest.mark.parametrize(
    ("more", "reason_part"),
    [
        ({"lrs": LRS[1:]}, "another grid of learning rates, 0.0003, 0.001"),
        ({"seeds": (0, 1)}, "too few seeds, 2 whole in now, an interval takes 3"),
        ({"data_fingerprint": "other"}, "other data, fingerprint a1b2c3d4e5f60718 in the baseline and other now"),
        ({"arms": BOTH[1:]}, f"no curve is {OFF_LABEL} at 98.6k parameters in now"),
        ({"widths": (32,)}, f"no curve is {OFF_LABEL} at 98.6k parameters in now"),
    ],
)
def test_what_cannot_be_judged_is_not(more: dict[str, Any], reason_part: str) -> None:
    comparison = check(**more)
    assert comparison.verdict == "cannot judge"
    assert comparison.changes == []
    assert any(reason_part in reason for reason in comparison.reasons)


def test_a_loss_at_initialization_that_is_no_number_cannot_be_judged() -> None:
    comparison = check(lambda card: {"loss_at_init": math.nan} if card["seed"] == 1 else {})
    assert comparison.verdict == "cannot judge"
    assert f"{OFF_LABEL} at 98.6k parameters: a loss at initialization is no number in now" in comparison.reasons


def test_rates_outside_the_window_leave_sensitivity_out() -> None:
    high = curves(lambda card: {"optimizer.lr": 1e4 * card["optimizer.lr"]}, "then")
    comparison = compare.compare_baselines(high, high, 0.05)
    assert comparison.verdict == "ok"
    assert any(
        "LR sensitivity was not compared, fewer than two learning rates lie" in remark for remark in comparison.remarks
    )


@pytest.mark.slow
def test_sizes_may_differ_by_what_gains_add() -> None:
    def sized(*counts: int) -> Baseline:
        parameters = dict(zip(BOTH, counts, strict=True))
        return curves(
            lambda card: {"parameters_without_embeddings": parameters[card["intervention"]]}, "x", widths=(32,)
        )

    assert compare.compare_baselines(sized(1000, 1049), sized(953, 1049), 0.05).verdict == "ok"
    assert compare.compare_baselines(sized(1000, 1000), sized(1050, 1000), 0.05).verdict == "ok"
    assert compare.compare_baselines(sized(1000, 1000), sized(1060, 1000), 0.05).verdict == "cannot judge"


def test_two_curves_that_fit_one_are_not_judged() -> None:
    both = [*cards(), *cards(**{"optimizer.eps": 1e-6})]
    comparison = compare.compare_baselines(OLD, baseline.from_records(records(both), "now"), 0.05)
    assert comparison.verdict == "cannot judge"
    assert any(reason.startswith("2 curves are") for reason in comparison.reasons)


def test_a_seed_that_lacks_a_learning_rate_does_not_count() -> None:
    partial = [card for card in cards(seeds=(0, 1, 2, 3)) if (card["seed"], card["optimizer.lr"]) != (1, LRS[2])]
    comparison = compare.compare_baselines(OLD, baseline.from_records(records(partial), "now"), 0.05)
    assert comparison.verdict == "ok"
    assert f"{OFF_LABEL} at 98.6k parameters: of now seed 1 is left out, not whole" in comparison.remarks
    fewer = [card for card in partial if card["seed"] != 3]
    assert compare.compare_baselines(OLD, baseline.from_records(records(fewer), "now"), 0.05).verdict == "cannot judge"


def test_other_config_and_other_arms_are_listed_not_refused() -> None:
    more = [*cards(**{"optimizer.eps": 1e-6, "batch_size": 32}), *cards(arms=["none"])]
    comparison = compare.compare_baselines(OLD, baseline.from_records(records(more), "now"), 0.05)
    assert comparison.verdict == "ok"
    assert "optimizer.eps: 1e-8 in the baseline, 1e-6 now" in comparison.remarks
    assert "batch_size: 16 in the baseline, 32 now" in comparison.remarks
    assert sum(remark.startswith("not in the baseline: ") for remark in comparison.remarks) == 1


def test_arms_are_matched_by_what_varies_in_the_baseline() -> None:
    def two(name: str, second: float) -> Baseline:
        both = [*cards(widths=(32,)), *cards(widths=(32,), **{"optimizer.weight_decay": second})]
        return baseline.from_records(records(both), name)

    assert compare.compare_baselines(two("then", 0.1), two("now", 0.1), 0.05).verdict == "ok"
    assert compare.compare_baselines(two("then", 0.1), two("now", 0.2), 0.05).verdict == "cannot judge"


@pytest.mark.parametrize("n", [3, 8])
def test_intervals_and_equivalence_are_those_of_the_textbook(n: int) -> None:
    chance = np.random.default_rng(n)
    old, new = pd.Series(chance.normal(2.0, 0.1, n)), pd.Series(chance.normal(2.1, 0.2, n))
    paired = difference(old, new)
    textbook = stats.ttest_rel(new, old)
    assert (paired.low, paired.high) == pytest.approx(tuple(textbook.confidence_interval(0.9)))
    low, high = (
        stats.ttest_rel(new, old - 0.3, alternative="greater"),
        stats.ttest_rel(new, old + 0.3, alternative="less"),
    )
    assert paired.equivalence(0.3) == pytest.approx(max(low.pvalue, high.pvalue))
    assert paired.effect == pytest.approx((new - old).mean() / (new - old).std())
    other = pd.Series(chance.normal(2.1, 0.2, n + 2), index=range(100, 102 + n))
    welch, textbook = difference(old, other), stats.ttest_ind(other, old, equal_var=False)
    assert (welch.low, welch.high) == pytest.approx(tuple(textbook.confidence_interval(0.9)))
    low, high = (
        stats.ttest_ind(other, old - 0.3, equal_var=False, alternative="greater"),
        stats.ttest_ind(other, old + 0.3, equal_var=False, alternative="less"),
    )
    assert welch.equivalence(0.3) == pytest.approx(max(low.pvalue, high.pvalue))


def test_seeds_are_paired_by_name() -> None:
    old, new = pd.Series([1.0, 2.0, 4.0], index=["0", "1", "2"]), pd.Series([1.1, 2.3, 4.2], index=["0", "1", "2"])
    assert difference(old, new[::-1]) == difference(old, new)
    others = difference(old, new.set_axis(["3", "4", "5"]))
    assert (others.low, others.high) == pytest.approx(
        tuple(stats.ttest_ind(new, old, equal_var=False).confidence_interval(0.9))
    )
    assert others.error > difference(old, new).error


def test_places_in_a_grid_are_never_certain_to_less_than_the_grid() -> None:
    unchanged = pd.Series([3.0, 3.0, 3.0])
    assert difference(unchanged, unchanged + 1).low == 1
    assert difference(unchanged, unchanged + 1, resolution=1.0).low < 0.5
    assert difference(unchanged, unchanged + 2, resolution=1.0).low > 1


def test_the_same_within_the_margin_is_what_the_equivalence_test_says() -> None:
    chance = np.random.default_rng(0)
    seen: set[str] = set()
    for shift in np.linspace(0, 0.3, 40):
        changed = difference(pd.Series(chance.normal(2, 0.05, 5)), pd.Series(chance.normal(2 + shift, 0.05, 5)))
        verdict = compare._verdict(changed, 0.15, 1)
        assert (verdict == "same") == (changed.equivalence(0.15) < 0.05)
        assert (verdict == WORSE) == (changed.low > 0.15)
        seen.add(verdict)
    assert seen == {"same", "unclear", WORSE}


def test_seeds_without_spread_are_judged_by_their_mean() -> None:
    same = pd.Series([1.0, 1.0, 1.0])
    for other in (same, pd.Series([1.0, 1.0, 1.0, 1.0])):
        unchanged, changed = difference(same, other), difference(same, other + 1)
        assert (unchanged.low, unchanged.high, unchanged.equivalence(0.1)) == (0, 0, 0)
        assert (changed.low, changed.high, changed.equivalence(0.1)) == (1, 1, 1)
        assert math.isnan(changed.effect)


def test_a_drift_is_certain_within_the_margin_and_fails_only_if_strict() -> None:
    small = shifted(0.05, above=0.1)
    comparison = check(small)
    assert (comparison.verdict, comparison.exit_code) == (DRIFT, 0)
    assert {change.verdict for change in comparison.changes if change.p < 0.05} == {DRIFT}
    strict = compare.compare_baselines(OLD, curves(small), 0.05, strict=True)
    assert (strict.verdict, strict.exit_code) == (DRIFT, 1)
    unclear = compare.compare_baselines(OLD, curves(seeds=(3, 4, 5, 6)), 0.05, strict=True)
    assert (unclear.verdict, unclear.exit_code) == ("ok", 0)


def test_a_certain_change_near_the_margin_is_a_drift() -> None:
    changes = check(shifted(0.1), seeds=(7, 8, 9, 10)).changes
    of_best_loss = [change for change in changes if change.quantity == "best loss" and change.arm == ON_LABEL]
    assert all(change.low < change.margin < change.high for change in of_best_loss)
    assert [change.verdict for change in of_best_loss] == [DRIFT]


def test_a_loss_at_initialization_may_neither_rise_nor_fall() -> None:
    for nats in (1.0, -1.0):
        by_quantity = verdicts(check(lambda card, nats=nats: {"loss_at_init": card["loss_at_init"] + nats}))
        assert by_quantity["loss at initialization"] == {f"{WORSE} {arm}" for arm in LABELS}


def test_of_many_learning_rates_one_moves_by_chance() -> None:
    """A p of 0.013 at one of seven; nothing else changed."""
    before = runs_of(OLD, 0)
    by_seed = {"0": 0.02, "1": 0.025, "2": 0.03}
    now = before.assign(loss=before["loss"] + before["seed"].map(by_seed) * (before["lr"] == LRS[3]))
    (move,) = compare.find_moves(("an arm", 1), before, now, {NATS: 0.0, DECADES: 0.0})
    assert (move.lr, move.is_certain) == (LRS[3], False)
    assert move.p == pytest.approx(7 * 0.01307, rel=1e-3)


def test_the_learning_rates_that_moved_are_named_with_what_moved() -> None:
    for nats in (0.05, 1.0):
        moves = check(shifted(nats, above=0.1)).moves
        assert {(move.arm, move.number, move.lr) for move in moves} == {(ON_LABEL, "final loss", lr) for lr in LRS[-2:]}
        assert all(move.is_certain for move in moves)
        assert all(move.change == pytest.approx(nats) for move in moves)


def test_what_rounds_otherwise_has_not_drifted() -> None:
    assert check(shifted(1e-5)).verdict == "ok"
    assert check(shifted(-1e-5), margin=0.0).verdict == DRIFT  # whoever allows nothing is told of everything


@pytest.mark.slow
def test_an_epsilon_that_probes_tell_of_is_a_regression() -> None:
    def with_epsilon(eps: float, name: str) -> Baseline:
        planted_records = records(list(cards()))
        gradients = planted_records.metrics.query("probe == 'grad_norm'")
        ratios = [gradients.assign(probe="eps_ratio", where=tensor, value=eps / 1e-3) for tensor in ("head", "block0")]
        return baseline.from_records(
            planted_records._replace(metrics=pd.concat([planted_records.metrics, *ratios])), name
        )

    then = with_epsilon(1e-8, "then")
    assert compare.compare_baselines(then, with_epsilon(1.5e-8, "now"), 0.05).verdict == DRIFT
    assert compare.compare_baselines(then, with_epsilon(1e-12, "now"), 0.05).verdict == DRIFT
    comparison = compare.compare_baselines(then, with_epsilon(1e-3, "now"), 0.05)
    assert verdicts(comparison) == {"Adam's epsilon over the gradients' RMS": {f"{WORSE} {arm}" for arm in LABELS}}
    assert {move.lr for move in comparison.moves} == set(LRS)
    assert all(move.change == pytest.approx(5) for move in comparison.moves)


@pytest.mark.parametrize(("arms", "label"), [(BOTH[1:], "with qk-layernorm and z-loss"), (BOTH, ON_LABEL)])
def test_an_intervention_that_is_removed_is_a_regression_of_its_arm(arms: tuple[str, ...], label: str) -> None:
    """Its arm is compared with the curve that lacks it, beside whatever other arms there are."""
    old, new = curves(name="then", arms=arms), curves(arms=BOTH[:1])
    comparison = compare.compare_baselines(old, new, 0.05)
    assert (comparison.verdict, comparison.reasons) == (WORSE, [])
    assert [line.partition(" at ")[0] for line in comparison.removed] == [label] * len(comparison.removed) != []
    assert all(line.endswith(" parameters: qk_layernorm is missing") for line in comparison.removed)
    assert verdicts(comparison)["its instability part"] == {f"{WORSE} {label}"}
    assert {move.arm for move in comparison.moves} == {label}
    told = "intervention: qk_layernorm+z_loss in the baseline, z_loss now"
    assert any(remark.startswith(told) for remark in comparison.remarks)
    assert compare.compare_baselines(new, old._replace(source="now"), 0.05).verdict == (
        "ok" if arms == BOTH else "cannot judge"  # one that is added has no arm to be compared with
    )


def test_of_arms_that_lack_an_intervention_the_nearest_stands_in() -> None:
    comparison = compare.compare_baselines(curves(name="then", arms=BOTH[1:]), curves(arms=["none", *BOTH[:1]]), 0.05)
    assert {line.split(": ")[1] for line in comparison.removed} == {"qk_layernorm is missing"}


def test_seeds_that_change_nothing_cannot_be_judged() -> None:
    first = {(card["intervention"], card["model.width"], card["optimizer.lr"]): card for card in cards(seeds=(0,))}

    def of_first_seed(card: Card) -> dict[str, Any]:
        twin = first[card["intervention"], card["model.width"], card["optimizer.lr"]]
        return {"final_val_loss": twin["final_val_loss"]}

    comparison = check(of_first_seed)
    assert comparison.verdict == "cannot judge"
    assert all("all seeds of now ended on the same losses" in reason for reason in comparison.reasons)


def test_p_is_adjusted_for_all_that_is_compared() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm 1979
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize("place", [0, 2])
def test_a_test_without_a_p_changes_no_other(place: int) -> None:
    ps = [0.03, 0.01]
    adjusted = holm([*ps[:place], math.nan, *ps[place:]])
    assert math.isnan(adjusted.pop(place))
    assert adjusted == holm(ps) == [0.03, 0.02]
    old, new = pd.Series([1.0, 2.0, 4.0]), pd.Series([1.2, 2.3, 4.1])
    assert difference(old, new).p() == pytest.approx(stats.ttest_rel(new, old).pvalue)
    assert difference(old, new).p(0.1) > difference(old, new).p()
    assert difference(old, new).p(0.3) == 1.0


def test_unlike_seeds_pool_by_degrees_of_freedom() -> None:
    old = pd.Series([1.0, 2.0, 4.0], index=list("abc"))
    new = pd.Series([1.1, 2.3, 4.2, 3.0, 9.0], index=list("defgh"))
    variances, rounding = (old.var(), new.var()), 0.6**2 / 12
    rounded = difference(old, new, resolution=0.6)
    assert rounded.error == pytest.approx(math.sqrt((variances[0] + rounding) / 3 + (variances[1] + rounding) / 5))
    pooled = math.sqrt((2 * variances[0] + 4 * variances[1]) / 6)
    assert difference(old, new).effect == pytest.approx((new.mean() - old.mean()) / pooled)


def test_an_arm_with_other_numbers_has_no_match() -> None:
    def with_coefficients(*coefficients: float) -> Baseline:
        key = "intervention.z_loss.coefficient"
        made = [card for each in coefficients for card in cards(arms=BOTH[:1], widths=(32,), **{key: each})]
        return baseline.from_records(records(made), "now")

    match = match_curves(with_coefficients(1e-4, 1e-3), with_coefficients(1e-2))
    assert match.pairs == {}
    assert len(match.reasons) == 2
