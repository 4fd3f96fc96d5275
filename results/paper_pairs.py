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
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used

from lab.analysis.statistics import holm
from lab.analysis.stress.battery import Battery
from lab.analysis.stress.measures import Outcomes, beats_bigram, curve, failing_lrs, measure
from lab.analysis.text import format_p, markdown_table
from lab.core import files
from lab.features.stress.bench import CardBench
from lab.features.stress.plan import read_plan
from lab.features.stress.progress import Progress
from lab.records.plans import Setting
from lab.sweeping.bench import compose_settings

PAIRS = Path(__file__).parent / "stress" / "pairs.csv"
RUNS = Path(__file__).parent / "stress" / "pairs_runs.csv"
TESTS = ["lr_tolerance", "lr_x10"]
FAILING = "failing learning rate"
SIDES = ["stable", "unstable"]
COLUMNS = ["loss", "loss_at_init", "loss_bigram"]
NUMBERS = [*TESTS, FAILING]
FEWER, UNFIXED = "fewer interventions", "without the standard fix"
NULLS = {FEWER: "interventions", UNFIXED: "fixes"}
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


def numbers_of(done: Outcomes, battery: Battery) -> dict[str, float]:
    """How badly a recipe stands each test, and the learning rate from which it fails: the higher, the worse.

    Infinite for a recipe that ends no better than a bigram model at any learning rate.
    """
    if not beats_bigram(done):
        return dict.fromkeys(NUMBERS, np.inf)
    found = {name: measure(battery.tests[name], done, battery) for name in TESTS}
    worse = {name: battery.tests[name].share(float(each.seeds.mean())) for name, each in found.items() if each}
    losses = curve(done)
    failing = np.log10(pd.Series(failing_lrs(losses)).fillna(battery.farthest[1]))  # where the loss never rises so far
    return {**worse, FAILING: -float(failing.mean())}


def measured(battery: Battery) -> pd.DataFrame:
    """The numbers of either side of each pair: a row for each pair and number, and for each null.

    Returns:
        Columns ``source``, ``change``, ``read`` (whether the first reader had its text), ``number``, ``stable`` and
        ``unstable``, where the higher number is the worse one.
    """
    runs = pd.read_csv(RUNS)
    counts = runs.groupby("side")[[*NULLS.values()]].first()
    worse = {
        side: numbers_of(done, battery) | {null: -float(counts.at[side, name]) for null, name in NULLS.items()}
        for side, done in read_runs(runs).items()
    }
    rows = [
        {"source": pair["source"].partition(",")[0], "change": pair["change"], "read": pair["read"], "number": number}
        | {side: worse[pair[side]][number] for side in SIDES}
        for pair in read_pairs().to_dict("records")
        for number in [*NUMBERS, *NULLS]
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
        numbers (Holm), NaN for the nulls; in ``alone`` pairs it is right and the standard fix is not, in ``fix alone``
        that is right and it is not, with ``alone p`` of a sign test over these; and ``read right`` of ``read`` pairs
        whose source was read.
    """
    told = np.sign(rows["unstable"] - rows["stable"])
    by_fix = (told[rows["number"] == UNFIXED] > 0).to_numpy()
    scores = []
    for number, own in rows.assign(told=told).groupby("number", sort=False):
        parts, sources = _signs(own, "change"), _signs(own, "source")
        is_right = (own["told"] > 0).to_numpy()
        alone, fix_alone = int((is_right & ~by_fix).sum()), int((by_fix & ~is_right).sum())
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
                "alone": alone,
                "fix alone": fix_alone,
                "alone p": _sign_p(alone, alone + fix_alone),
                "read right": _right(own.loc[own["read"], "told"]),
                "read": int(own["read"].sum()),
            }
        )
    table = pd.DataFrame(scores)
    return table.assign(p=holm(table["p"].tolist()))


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


if __name__ == "__main__":
    sides = dict.fromkeys(read_pairs()[SIDES].to_numpy().ravel())
    columns = ["side", *NULLS.values(), "lr", "seed", *COLUMNS]
    every = pd.concat(map(trained, sides))[columns]
    files.write_csv(RUNS, every.sort_values(["side", "lr", "seed"]), float_format="%.6g")
