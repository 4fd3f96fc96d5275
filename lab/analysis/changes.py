"""What changes do, beside the noise of a seed: single changes of a base, and trials of which some were kept."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lab.analysis.sensitivity import LOST, Study, capped
from lab.analysis.statistics import CHANGE_LEVEL, FEWEST_SEEDS, power_of, spread_within, t_quantile
from lab.analysis.text import count, number, shortened
from lab.core.windows import NORMAL
from lab.records.imported import SINGLE_CHANGE, TRIAL, UNKNOWN_SIZE
from lab.records.store import TABLE

POWER = 0.8
MOST_REPEATS = 10  # of a baseline and of a change, that anybody would train to tell them apart
FEWEST_NEIGHBOURS = 3  # differences of trials from which their spread is taken
MOST_NAMED = 3  # arms in which a kind of change broke
MOST_ROWS = 40  # changes that a terminal lists one by one
BEYOND, WITHIN = "beyond the noise", "within the noise"
# What a description says more when a trial is run again, as in ``baseline (rerun, seed 2)``; baselines may be numbered.
AGAIN = re.compile(
    r"\b(re-?runs?|re-?ran|repeat(ed)?|repetition|again|verify|verification|confirm(ed|ation)?|unmodified|unchanged|"
    r"(seed|run|try|attempt|trial|take)[ _.=#]*\d+(?=\W*$|\s*[),;:\]]))(?!\w)|#\d+|[^\w.+=-]+"
)
NUMBERED = re.compile(r"(?<=\bbaseline)[ _-]*\d+$")


class Noise(NamedTuple):
    """The standard deviation of the loss over seeds, and how it is known.

    Attributes:
        sd: of one run, in nats per token.
        freedom: its degrees of freedom.
        is_repeated: whether runs of one setting were repeated; else it comes from trials next to each other, and holds
            what their changes did.
    """

    sd: float
    freedom: float
    is_repeated: bool

    def verdict_on(self, effect: float, runs: int = 1, base_runs: int = 1) -> str:
        """Whether an effect is beyond the noise, within it, or how often to repeat the baseline in order to tell.

        It is beyond the noise if its 95 % interval excludes zero. Otherwise it is within the noise if more than
        ``MOST_REPEATS`` runs of each would be needed to find it with a probability of 80 %.
        """
        if not math.isfinite(effect):
            return ""
        error = self.sd * math.sqrt(1 / runs + 1 / base_runs)
        if abs(effect) > error * t_quantile(self.freedom, 1 - CHANGE_LEVEL):
            return BEYOND
        repeats = self.repeats_for(effect)
        return cannot_tell(repeats) if repeats else WITHIN

    def repeats_for(self, effect: float) -> int:
        """The fewest runs, of the baseline and of a change each, that find this effect; 0 if they are too many."""
        spread = self.sd * math.sqrt(2)
        for runs in range(2, MOST_REPEATS + 1) if effect and self.sd else ():
            if power_of(runs, abs(effect), spread, CHANGE_LEVEL, 2 * runs - 2) >= POWER:
                return runs
        return 0


def cannot_tell(repeats: int) -> str:
    """``cannot tell: repeat the baseline 3 times``."""
    return f"cannot tell: repeat the baseline {repeats} times"


def noise_of_repeats(groups: Iterable[Sequence[float]]) -> Noise | None:
    """The pooled spread of runs that repeat one another; None if none does."""
    spread = spread_within(np.asarray(group, float) for group in groups)
    return Noise(*spread, is_repeated=True) if spread.freedom else None


def noise_of_neighbours(differences: Sequence[float]) -> Noise | None:
    """The spread of runs by the differences of neighbours, robust to the few that differ by much; None if too few."""
    median = float(np.median(np.abs(differences))) if len(differences) >= FEWEST_NEIGHBOURS else 0.0
    if not median:
        return None
    return Noise(NORMAL * median / math.sqrt(2), len(differences), is_repeated=False)


def single_changes(study: Study) -> pd.DataFrame:
    """A row for each single change of a base in an imported table; no rows in any other.

    Returns:
        Columns ``arm`` and ``size`` of the base; ``key``, ``before``, ``value``; ``change``, such as ``x 2``; ``ratio``
        of the values, NaN where they have none; ``base_loss``, ``loss`` and ``effect``, means over runs (nats/token);
        ``n``; and ``broke``, whether a run diverged, ended more than ``LOST`` above its base, or above the loss at
        initialization.
    """
    columns = ["arm", "size", "key", "before", "value", "change", "ratio", "base_loss", "loss", "effect", "n", "broke"]
    if study.changes.empty:
        return pd.DataFrame(columns=columns)
    points = study.points.set_index("id")
    place = points.groupby(["curve", "lr"], sort=False).ngroup()
    changed = study.changes.rename(columns=lambda name: str(name).removeprefix(f"{SINGLE_CHANGE}."))
    changed = changed.rename(columns={"final_val_loss": "loss"})
    changed = changed[(changed["status"] != "failed") & changed["base"].isin(points.index)]
    changed = changed.assign(
        capped=capped(changed),
        place=place.loc[changed["base"]].astype(str).to_numpy(),
        seed=changed["seed"].astype(str),
    )
    bases = {str(at): runs for at, runs in points.groupby(place)}
    rows = []
    for names, runs in changed.groupby(["place", "key", "value"], sort=False):
        at, key, value = map(str, names)
        base = bases[at].set_index("seed")["capped"]
        shared = runs[runs["seed"].isin(base.index)]
        own, beside = (shared, base[shared["seed"]]) if len(shared) else (runs, base)
        loss, base_loss, before = own["capped"].mean(), beside.mean(), runs["before"].iloc[0]
        limit = np.fmin(base_loss + LOST, runs["loss_at_init"].astype(float))
        broke = (runs["status"] == "diverged") | ~(runs["loss"] <= limit)
        change, ratio = _change(before, value)
        row = [bases[at]["arm"].iloc[0], bases[at]["size"].iloc[0], key, before, value, change, ratio]
        rows.append([*row, base_loss, loss, loss - base_loss, len(own), bool(broke.any())])
    frame = pd.DataFrame(rows, columns=columns)
    # settings that broke runs come first, then those that cost most
    order = frame.assign(broken=frame.groupby("key")["broke"].transform("sum"))
    order["median"] = frame.groupby(["key", "change"])["effect"].transform("median").abs()
    order["median"] = order.groupby("key")["median"].transform("max")
    by = ["broken", "median", "key", "ratio", "change", "arm", "size"]
    order = order.sort_values(by, ascending=[False, False, *[True] * 5], kind="stable")
    return frame.loc[order.index].reset_index(drop=True)


def _change(before: str, value: str) -> tuple[str, float]:
    """A change in words, and the ratio of its values, NaN without one."""
    try:
        old, new = float(before), float(value)
    except ValueError:
        return (f"{before} to {value}" if before and value else value or "on"), math.nan
    if math.isclose(old, new, rel_tol=1e-3):
        return "as the base", 1.0
    if not old or not new or old * new < 0:
        return (f"off, from {number(old)}" if not new else f"{number(old)} to {number(new)}"), math.nan
    return f"{'up' if new > old else 'down'}, x {new / old:.3g}", new / old


def noise_of_bases(study: Study) -> Noise | None:
    """The noise of a seed over repeats of the bases of single changes; None if none was repeated."""
    groups = study.points[study.points["outcome"] == ""].groupby(["curve", "lr"], sort=False)["capped"]
    return noise_of_repeats(group.tolist() for _, group in groups)


def changes_as_text(study: Study, changes: pd.DataFrame) -> pd.DataFrame:
    """``single_changes`` for readers, one by one if they are few; many by key, direction and ratio."""
    noise = noise_of_bases(study)
    if len(changes) <= MOST_ROWS:
        base = [
            ", ".join([str(arm), *[count(size)] * (size != UNKNOWN_SIZE)])
            for arm, size in zip(changes["arm"], changes["size"], strict=True)
        ]
        table = pd.DataFrame({"base": base}) if len(set(base)) > 1 else pd.DataFrame(index=changes.index)
        table = table.assign(key=changes["key"], change=changes["change"], value=changes["value"].map(_short))
        table = table.assign(loss=changes["loss"].map("{:.3f}".format), effect=changes["effect"].map(_signed))
        table["broke"] = changes["broke"].map({True: "broke", False: ""})
        if noise:
            bases = study.points.groupby(["arm", "size"], sort=False)["seed"].nunique()
            of_arms = zip(changes["effect"], changes["n"], changes["arm"], changes["size"], strict=True)
            table["noise"] = [noise.verdict_on(effect, n, int(bases[arm, size])) for effect, n, arm, size in of_arms]
        return table
    rows = []
    for (key, change), of_kind in changes.groupby(["key", "change"], sort=False):
        effects, broken = of_kind["effect"], of_kind[of_kind["broke"]]
        arms = broken["arm"].unique().tolist()
        more = f"; {len(arms) - MOST_NAMED} more" if len(arms) > MOST_NAMED else ""
        row = {"key": key, "change": change, "bases": len(of_kind), "median effect": _signed(effects.median())}
        row |= {
            "from": _signed(effects.min()),
            "to": _signed(effects.max()),
            "broke": f"{len(broken)} of {len(of_kind)}",
        }
        rows.append({**row, "where": "; ".join(map(str, arms[:MOST_NAMED])) + more})
    return pd.DataFrame(rows)


def _signed(effect: float) -> str:
    return f"{effect:+.4f}" if abs(effect) < 0.1 else f"{effect:+.2f}"


def _short(value: object) -> str:
    return shortened(str(value), 40)


def has_trials(study: Study) -> bool:
    """Whether runs are trials, of which an imported table says which were kept."""
    return f"{TRIAL}.kept" in study.runs and bool(study.runs[f"{TRIAL}.kept"].notna().any())


class Trials(NamedTuple):
    """The trials of an imported table.

    Attributes:
        kept: a row for each that was kept: ``trial``, ``change``, ``loss``, ``effect`` (its loss minus that of the one
            kept before it, or of the mean of its repeats; nats/token) and ``verdict``, see ``Noise.verdict_on``.
        noise: of a seed; None if nothing says what it is.
        repeated: the trials that repeat one another.
        tried: how many changes ended, be they kept or not.
        best: the trial with the lowest loss, and what it changed.
    """

    kept: pd.DataFrame
    noise: Noise | None
    repeated: list[str]
    tried: int
    best: str


def tables_of_trials(study: Study) -> list[str]:
    """The tables whose runs are trials."""
    return list(study.runs.loc[study.runs[f"{TRIAL}.kept"].notna(), TABLE].unique()) if has_trials(study) else []


def trials(study: Study, table: str | None = None) -> Trials:
    """Judge each trial of a table that was kept by the noise of a seed; the first table by default.

    Trials repeat one another if their descriptions are alike but for words such as ``rerun`` and ``seed 2``, and
    nothing else was kept between them. Without any, the noise is that of trials next to each other that were
    discarded, by the median of their differences.
    """
    runs = study.runs.rename(columns=lambda name: str(name).removeprefix(f"{TRIAL}."))
    runs = runs[runs["id"].isin(study.points["id"]) & (runs[TABLE] == (table or tables_of_trials(study)[0]))]
    runs = runs.sort_values("order")
    runs = runs.assign(name=runs["id"].map(study.points.set_index("id")["arm"]), loss=runs["final_val_loss"])
    runs = runs[runs["loss"].notna()]
    losses, kept = runs["loss"].to_numpy(float), runs["kept"].to_numpy(bool)
    groups = _repeats([_description(text) for text in runs["text"].fillna("")], kept)
    noise = noise_of_repeats([losses[group].tolist() for group in groups])
    if noise is None:
        noise = noise_of_neighbours(np.diff(losses)[~kept[1:] & ~kept[:-1]].tolist())
    rows, before = [], list[int]()
    for now in (group for group in groups if kept[group].any()):
        effect = float(losses[now].mean() - losses[before].mean()) if before else math.nan
        verdict = cannot_tell(FEWEST_SEEDS) if noise is None else noise.verdict_on(effect, len(now), len(before))
        first = runs.iloc[now[0]]
        rows.append([first["name"], first["text"] or "", losses[now].mean(), effect, verdict if before else ""])
        before = now
    lowest = runs.iloc[int(losses.argmin())]
    description = f" ({shortened(str(lowest['text']))})" if lowest["text"] else ""
    best = f"{lowest['name']}{description}, {losses.min():.4f}"
    repeated = [str(runs["name"].iloc[at]) for group in groups if len(group) > 1 for at in group]
    columns = ["trial", "change", "loss", "effect", "verdict"]
    return Trials(pd.DataFrame(rows, columns=columns), noise, repeated, len(groups) - 1, best)


def _description(text: object) -> str:
    """What a trial changed, without words that say which repetition it is."""
    return NUMBERED.sub("", " ".join(AGAIN.sub(" ", str(text).lower()).split()))


def _repeats(descriptions: Sequence[str], kept: NDArray[np.bool_]) -> list[list[int]]:
    """The positions of trials that repeat one another, a list each, in the order of their first trials.

    None repeats an earlier one if another was kept since.
    """
    groups = list[list[int]]()
    for position, description in enumerate(descriptions):
        alike = [group for group in groups if description and descriptions[group[0]] == description]
        if alike and not kept[alike[-1][-1] + 1 : position].any():
            alike[-1].append(position)
        else:
            groups.append([position])
    return groups
