"""Does the crash test order pairs of runs of one paper, of which one was unstable and the other was not?

``stress/pairs.csv`` has a row for each pair: two runs of one source, alike in size and data, that differ in one part of
the recipe. ``python results/paper_pairs.py`` trains what a card of either side takes, as far as it is missing, and
writes ``stress/pairs_runs.csv``, a row for each run; ``make results-readme`` writes what the functions below return.

The rule was written before anything was trained. A pair counts if two readers, who did not know what the cards say,
both find that its source reports one side as unstable (a divergence, spikes on which the authors acted or which they
call an instability) and the other as not, and that both sides can be written here. Of either side the number is that
of a card of one minute, with the seeds 20 to 22. A pair is ordered rightly if the unstable side has the worse number; a
tie counts half. A side that ends no better than a bigram model at any learning rate is worse than one that does, and a
pair of two such sides is left out. Pairs that change the same part are no independent trials, so the sign test is over
the parts: of each, whether most of its pairs are ordered rightly. Three numbers are tried, so p is Holm's.

Two nulls were added afterwards, which train nothing. Papers report changes that help, so the side with more
interventions is often the stable one, and so is the side that has the standard fix (``standard_fixes``). A number is
worth something where it is right and they are not.

Two more numbers come from fine ladders, by a rule that was written before these were trained. The rates that these
three read lie half a decade apart, and on such steps the rate from which a side fails is known to as much. So ``python
results/paper_pairs.py --ladders`` trains both sides of a pair again with ``LADDER_SEEDS``, at the card's rates from the
lowest that was best for one of these up to the first at which all had gone half of the way from their best loss to that
of a unigram model, and records the largest attention logit of any block at every tenth step. Wherever the loss of a
seed goes half of this way, or an attention logit passes the level of ``runaway.yaml``, the bracket is halved, until it
is at most ``WIDTH`` decades wide, by at most ``MOST`` rates a side. ``stress/pairs_ladders.csv`` has a row for each
run. A pair has no ladder where a side ends no better than a bigram model, since that decides it. The two numbers are
the learning rates of these two crossings, as a card reads them, in the mean of the logarithm over seeds. A seed that
does not cross counts as if it did at the farthest rate of any card, and one that is beyond already at its lowest rate
as if it crossed there; a side without attention logits does not cross. Ordering, ties and the sign test are as above,
and Holm's p is now of five numbers. A number gets a verdict only if its p is below 0.05, and if it also beats each of
the two nulls: of its pairs in which one is right and the other is not it is right in more, with a p of the sign test
below 0.05.

The ladders were read once before they were complete: with the seed 20 alone, brackets of 0.3 decades, and one pair for
each changed part, no number had a verdict (the failing rate was right where the standard fix was not in 5 pairs, and
the reverse in 2; the runaway rate in 6 and 5). All pairs, three seeds and brackets of 0.1 decades are what had been
planned at first, so they were trained afterwards whatever they would say, with those runs kept.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.crossings import failing, halving_lrs
from lab.analysis.runaway import FAILS_AT, HALF, read_runaways
from lab.analysis.statistics import holm
from lab.analysis.stress.battery import LARGEST, Battery, read_battery
from lab.analysis.stress.measures import Outcomes, beats_bigram, curve, failing_lrs, measure
from lab.analysis.stress.rates import LOGITS, Passing, fine_curve, passings
from lab.analysis.text import format_p, listed, markdown_table
from lab.core import files
from lab.core.printing import say
from lab.features.stress.card_bench import CardBench
from lab.features.stress.plan import read_plan
from lab.features.stress.progress import Progress
from lab.records.plans import Setting
from lab.sweeping import launch
from lab.sweeping.bench import Bench, compose_settings
from lab.sweeping.progress import ProgressLog
from lab.sweeping.refinement import MOST
from lab.sweeping.request import Request, read_request
from lab.training.config import run_config

PAIRS = Path(__file__).parent / "stress" / "pairs.csv"
RUNS = Path(__file__).parent / "stress" / "pairs_runs.csv"
LADDERS = Path(__file__).parent / "stress" / "pairs_ladders.csv"
LADDER_SEEDS, WIDTH = [20, 21, 22], 0.1  # of a ladder; decades, of the widest bracket of a crossing that stays
TESTS = ["lr_tolerance", "lr_x10"]
FAILING = "failing learning rate"
SIDES = ["stable", "unstable"]
COLUMNS = ["loss", "loss_at_init", "loss_bigram"]
NUMBERS = [*TESTS, FAILING]
RATES = {HALF: "failing rate on a fine ladder", LOGITS: "runaway rate on a fine ladder"}
PROBE = read_runaways()[LOGITS].probe
OF_LADDER = ["loss", "loss_at_init", "loss_unigram", LARGEST + PROBE]
FEWER, UNFIXED = "fewer interventions", "without the standard fix"
NULLS = {FEWER: "interventions", UNFIXED: "fixes"}
# Of the pairs in which a number and a null differ: how many each has right, and p.
BESIDE = {UNFIXED: ("alone", "fix alone", "alone p"), FEWER: ("more", "fewer alone", "more p")}
SIGNIFICANT = 0.05
# What is known to steady a run: norms of queries and keys, further norms, caps, z-loss, layer scale, spectral
# reparametrization; and links of an optimizer that clip updates or adapt the clip.
FIXES = {"qk_layernorm", "qk_rmsnorm", "qkv_norm", "peri_ln", "reordered_norm", "normformer", "embedding_layernorm"}
FIXES |= {"score_softcap", "logit_softcap", "z_loss", "router_z", "layerscale", "sigma_reparam"}
CLIPS = {"clip_update", "stable_adam", "adagc", "zclip"}
WITHOUT = {"post_layernorm": 1.0, "deepnorm": 0.5, "dyt": 1.0}  # what stands where pre-LN would, and its scale alone
FEW_RUNS = "Zoph"  # ST-MoE: 4 of 6 runs against 3 of 3, which is a label of little weight


def read_pairs() -> pd.DataFrame:
    """The pairs on which two readers agree: ``name``, ``change``, and the overrides of either side."""
    pairs = pd.read_csv(PAIRS)
    return pairs[pairs["first_reading"] & pairs["second_reading"]].reset_index(drop=True)


def read_runs(runs: pd.DataFrame) -> dict[str, Outcomes]:
    """The runs of each side by setting."""
    return {
        str(side): {Setting((), float(str(lr))): of_lr.set_index("seed") for lr, of_lr in of_side.groupby("lr")}
        for side, of_side in runs.groupby("side")
    }


def standard_fixes(tree: Mapping[str, Any]) -> float:
    """How many of the standard fixes a composed recipe has: ``FIXES``, ``CLIPS``, pre-LN, a warm-up, a low beta2."""
    names, optimizer = tree["intervention"], tree["optimizer"]
    steadied = [CLIPS & {*optimizer["chain"]}, tree["schedule"]["warmup"] > 0, optimizer["beta2"] < 0.99]
    return len(FIXES & {*names}) - sum(WITHOUT.get(name, 0.0) for name in names) + sum(map(bool, steadied))


def trained(side: str) -> pd.DataFrame:
    """The runs of a card of one minute of a side, given its overrides, trained as far as they are missing."""
    words = [*shlex.split(side), "seed=20,21,22", "out=runs/paper_pairs"]
    plan = read_plan(words, "python results/paper_pairs.py", names=TESTS, cures="none")
    progress = Progress(plan.recipe)
    try:
        bench = CardBench(plan, progress)
        bench.train_tests()
    finally:
        progress.end()
    (tree, *_) = compose_settings(plan.request, [first := next(iter(bench.done))])[first]
    own = {"side": side, "interventions": len(tree["intervention"]), "fixes": standard_fixes(tree)}
    return pd.concat([table[COLUMNS].assign(**own, lr=at.lr).reset_index() for at, table in bench.done.items()])


def ladder_request() -> Request:
    """What the runs of all ladders share."""
    shared = [word for word in read_battery().runs if not word.startswith("probes.")]
    seeds = ",".join(map(str, LADDER_SEEDS))
    words = [f"probes.names=[{PROBE}]", "probes.every=10", f"seed={seeds}", "out=runs/paper_pairs_ladders"]
    return read_request([*shared, *words], "python results/paper_pairs.py --ladders", name="paper_pairs_ladders")


def pairs_with_ladders() -> pd.DataFrame:
    """The pairs of which both sides end better than a bigram model."""
    pairs = read_pairs()
    is_trained = {side: beats_bigram(done) for side, done in read_runs(pd.read_csv(RUNS)).items()}
    return pairs[pairs["stable"].map(is_trained) & pairs["unstable"].map(is_trained)]


def coarse_ladders() -> dict[str, list[Setting]]:
    """What is trained of each side at first: the rates of its card from the best one to the first that fails."""
    usual = Setting((), read_battery().curve[0])
    config = run_config(compose_settings(ladder_request(), [usual])[usual][0])
    unigram = config.data.entry.open().loss_unigram(config.seq_len, config.validation_targets)
    asked, pairs, of_side = {}, pairs_with_ladders(), read_runs(pd.read_csv(RUNS))
    for side in sorted({*pairs[SIDES].to_numpy().ravel()}):
        losses = curve(of_side[side])[LADDER_SEEDS]
        fails = [failing(losses.index, loss, FAILS_AT * (unigram - loss.min())).high for _, loss in losses.items()]
        lowest, highest = losses.idxmin().min(), max(fails)
        asked[side] = [Setting(tuple(shlex.split(side)), at.lr) for at in of_side[side] if lowest <= at.lr <= highest]
    return asked


def crossings_of(done: Outcomes) -> Iterator[Passing]:
    """Where the loss of a side fails and its attention logits run away, given the runs of its ladder."""
    own = {setting._replace(words=()): table for setting, table in done.items()}
    return (found for found in passings(curve(own), fine_curve(own, {})) if found.quantity in RATES)


def finer(asked: Mapping[str, list[Setting]], done: Outcomes) -> list[Setting]:
    """What is trained next: for each side the rates that halve the brackets of its crossings that are too wide."""
    found = []
    for first, *others in asked.values():
        own = {setting: table for setting, table in done.items() if setting.words == first.words}
        crossed = [each for passing in crossings_of(own) for each in passing.seeds.values()]
        tried = {setting.lr for setting in own}
        left = MOST - (len(tried) - len(others) - 1)
        lrs = [lr for lr in halving_lrs(crossed, WIDTH) if lr not in tried][: max(left, 0)]
        found += [first._replace(lr=lr) for lr in lrs]
    return found


def train_ladders(asked: Mapping[str, list[Setting]]) -> pd.DataFrame:
    """The runs of the fine ladders of these sides, trained as far as they are missing."""
    bench = Bench(ladder_request(), "the ladders are not complete,")
    settings = [setting for of_side in asked.values() for setting in of_side]
    done: Outcomes = {}
    while settings:
        done = bench.train(settings, ProgressLog(len(settings), say))
        settings = finer(asked, done)
    side_of = {of_side[0].words: side for side, of_side in asked.items()}
    return pd.concat(
        [
            table.reindex(columns=OF_LADDER).assign(side=side_of[at.words], lr=at.lr).reset_index()
            for at, table in done.items()
        ]
    )


def numbers_of(done: Outcomes, battery: Battery) -> dict[str, float]:
    """How badly a recipe stands each test, and the learning rate from which it fails: the higher, the worse.

    Infinite for a recipe that ends no better than a bigram model at any learning rate.
    """
    if not beats_bigram(done):
        return dict.fromkeys(NUMBERS, np.inf)
    found = {name: measure(battery.tests[name], done, battery) for name in TESTS}
    worse = {name: battery.tests[name].share(float(each.seeds.mean())) for name, each in found.items() if each}
    losses = curve(done)
    fails = np.log10(pd.Series(failing_lrs(losses)).fillna(battery.farthest[1]))  # where the loss never rises so far
    return {**worse, FAILING: -float(fails.mean())}


def rates_of(done: Outcomes, battery: Battery) -> dict[str, float]:
    """How low the rates of a fine ladder are at which a side fails and its logits run away, in decades, negated."""
    farthest, found = math.log10(battery.farthest[1]), {passing.quantity: passing for passing in crossings_of(done)}

    def lowness(passing: Passing | None) -> float:
        seeds = passing.seeds.values() if passing else []
        return -float(np.mean([each.log_bound if each.times else farthest for each in seeds] or farthest))

    return {name: lowness(found.get(quantity)) for quantity, name in RATES.items()}


def measured(battery: Battery) -> pd.DataFrame:
    """The numbers of either side of each pair: a row for each pair and number, and for each null.

    Returns:
        Columns ``pair``, ``source``, ``change``, ``read`` (whether the first reader had its text), ``number``,
        ``stable`` and ``unstable``, where the higher number is the worse one.
    """
    runs, ladders = pd.read_csv(RUNS), read_runs(pd.read_csv(LADDERS))
    counts = runs.groupby("side")[[*NULLS.values()]].first()
    worse = {}
    for side, done in read_runs(runs).items():
        worse[side] = numbers_of(done, battery)
        has_ladder = not np.isinf(worse[side][FAILING])
        worse[side] |= rates_of(ladders.get(side, {}), battery) if has_ladder else dict.fromkeys(RATES.values(), np.inf)
        worse[side] |= {null: -float(counts.at[side, name]) for null, name in NULLS.items()}
    rows = [
        {
            "pair": pair["name"],
            "source": pair["source"].partition(",")[0],
            "change": pair["change"],
            "read": pair["read"],
        }
        | {"number": number, **{side: worse[pair[side]][number] for side in SIDES}}
        for pair in read_pairs().to_dict("records")
        for number in [*NUMBERS, *RATES.values(), *NULLS]
        if not all(np.isinf(worse[pair[side]][FAILING]) for side in SIDES)
    ]
    return pd.DataFrame(rows)


def ordered(rows: pd.DataFrame) -> pd.DataFrame:
    """How many pairs, and how many changed parts, each number orders rightly.

    Args:
        rows: as ``measured`` gives them.

    Returns:
        A row for each number: ``number``; ``right`` of ``pairs``; ``changes right`` of ``changes`` and ``sources
        right`` of ``sources``, without ties; ``p`` of a two-sided sign test over the changed parts, adjusted for all
        numbers (Holm), NaN for the nulls; ``read right`` of ``read`` pairs whose source was read; in ``alone`` pairs it
        is right and the standard fix is not, in ``fix alone`` that is right and it is not, with ``alone p`` of a sign
        test over these; the same beside the rule of fewer interventions in ``more``, ``fewer alone`` and ``more p``;
        and ``is_shown``, whether it beats both as the rule asks.
    """
    rows = rows.assign(told=np.sign(rows["unstable"] - rows["stable"]))
    right = {number: {*own.loc[own["told"] > 0, "pair"]} for number, own in rows.groupby("number")}
    scores = []
    for number, own in rows.groupby("number", sort=False):
        parts, sources = _signs(own, "change"), _signs(own, "source")
        beside: dict[str, float] = {}
        for null, names in BESIDE.items():
            by_null = right[null] & {*own["pair"]}
            alone, null_alone = len(right[number] - by_null), len(by_null - right[number])
            beside |= dict(zip(names, (alone, null_alone, _sign_p(alone, alone + null_alone)), strict=True))
        scores.append(
            {
                "number": number,
                "right": _right(own["told"]),
                "pairs": len(own),
                "changes right": parts[0],
                "changes": parts[1],
                "p": _sign_p(*parts) if number not in NULLS else math.nan,
                "sources right": sources[0],
                "sources": sources[1],
                "read right": _right(own.loc[own["read"], "told"]),
                "read": int(own["read"].sum()),
                **beside,
            }
        )
    table = pd.DataFrame(scores)
    table["p"] = holm(table["p"].tolist())
    beats = [(table[of] > table[null]) & (table[p] < SIGNIFICANT) for of, null, p in BESIDE.values()]
    return table.assign(is_shown=np.logical_and.reduce([table["p"] < SIGNIFICANT, *beats]))


def linked(rows: pd.DataFrame) -> int:
    """How many pairs hang together, each with some other of them by its changed part or by its source."""
    source, change = (pd.factorize(rows[name])[0] for name in ("source", "change"))
    is_alike = (source[:, None] == source) | (change[:, None] == change)
    return int(np.bincount(scipy.sparse.csgraph.connected_components(is_alike)[1]).max())


def remark(rows: pd.DataFrame) -> str:
    """How the failing rate does beside the standard fix, without the source of few runs, and how many pairs are linked.

    Args:
        rows: as ``measured`` gives them.
    """
    score = ordered(rows).set_index("number").loc[FAILING]
    own = rows[rows["number"] == FAILING]
    many = own[~own["source"].str.startswith(FEW_RUNS)]
    right = _right(np.sign(many["unstable"] - many["stable"]))
    alone, of_fix, pairs = score["alone"], score["fix alone"], len(own)
    return (
        f"Where one is right and the other is not, it is the failing rate in {alone:g} pairs and the standard fix in "
        f"{of_fix:g} (p {format_p(score['alone p'])}). {linked(own)} of the {pairs} pairs hang together by the changed "
        f"part, or by first author and year, so there are far fewer trials. Without the {pairs - len(many)} "
        f"pairs of ST-MoE the failing rate orders {right:g} of {len(many)}."
    )


def verdict(rows: pd.DataFrame) -> str:
    """Whether a number is shown to order pairs better than both rules that train nothing, by the rule.

    Args:
        rows: as ``measured`` gives them.
    """
    scores = ordered(rows).set_index("number")
    beside = [
        f"The {name} is right and the standard fix is not in {score['alone']} pairs, and the reverse in "
        f"{score['fix alone']} (p {format_p(score['alone p'])}); beside fewer interventions it is {score['more']} "
        f"against {score['fewer alone']} (p {format_p(score['more p'])})"
        for name, score in scores.loc[[*RATES.values()]].iterrows()
    ]
    shown = scores.index[scores["is_shown"]]
    said = f"So the {listed(shown)} beats both" if len(shown) else "So no number beats both, and none gets a verdict"
    return f"{'. '.join(beside)}. {said}."


def _right(told: pd.Series) -> float:
    """How many are ordered rightly; a tie counts half."""
    return float((told / 2 + 0.5).sum())


def _signs(rows: pd.DataFrame, by: str) -> tuple[int, int]:
    """Of how many groups most pairs are ordered rightly, and how many groups there are, without ties."""
    means = rows.groupby(by)["told"].mean()
    return int((means > 0).sum()), int((means != 0).sum())


def _sign_p(right: int, groups: int) -> float:
    return float(scipy.stats.binomtest(right, groups).pvalue) if groups else math.nan


def markdown(rows: pd.DataFrame, battery: Battery) -> str:
    """How many pairs each number orders rightly, as a Markdown table."""
    titles = {name: test.title for name, test in battery.tests.items()}
    shown = [
        {
            "number": titles.get(score["number"], score["number"]),
            "pairs ordered rightly": f"{score['right']:g} of {score['pairs']}",
            "changed parts": f"{score['changes right']} of {score['changes']}",
            "p (Holm)": format_p(score["p"]),
            "sources": f"{score['sources right']} of {score['sources']}",
            "pairs whose text was read": f"{score['read right']:g} of {score['read']}",
            "right where the standard fix is not": str(score["alone"]) * (score["number"] != UNFIXED),
            "only the fix is right": str(score["fix alone"]) * (score["number"] != UNFIXED),
            "p (not adjusted)": format_p(score["alone p"]),
        }
        for score in ordered(rows).to_dict("records")
    ]
    return markdown_table(pd.DataFrame(shown))


def main(*options: str) -> None:
    """Train what is missing of the cards, or with ``--ladders`` of the fine ladders; ``--dry-run`` tells their cost."""
    asked = coarse_ladders()
    if options == ("--ladders", "--dry-run"):
        request = ladder_request()
        trees = compose_settings(request, [setting for of_side in asked.values() for setting in of_side])
        launch.print_estimate(Bench(request).plan(trees, cautions=False), request)
    elif options == ("--ladders",):
        columns = ["side", "lr", "seed", *OF_LADDER]
        every = train_ladders(asked)[columns]
        files.write_csv(LADDERS, every.sort_values(columns[:3]), float_format="%.6g")
    else:
        columns = ["side", *NULLS.values(), "lr", "seed", *COLUMNS]
        every = pd.concat(map(trained, dict.fromkeys(read_pairs()[SIDES].to_numpy().ravel())))[columns]
        files.write_csv(RUNS, every.sort_values(["side", "lr", "seed"]), float_format="%.6g")


if __name__ == "__main__":
    main(*sys.argv[1:])
