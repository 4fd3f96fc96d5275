"""The curves of a board: the runs of one config, measured seed by seed over the grid of LRs, and their loss spikes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lab.analysis.curves import configs, load, points
from lab.analysis.events.scores import PER_STEPS
from lab.analysis.probe_values import training_losses
from lab.analysis.sensitivity import WINDOW, Window, judge, per_seed
from lab.analysis.text import listed
from lab.core.errors import RequestError
from lab.records import store
from lab.records.store import Records
from lab.studies.stress.measures import UNJUDGED, spike_rate


class Spikes(NamedTuple):
    """The learning rate at which the loss spikes of an arm are counted.

    Attributes:
        lr: the largest one of the grid that is at most half the arm's smallest unstable one; NaN if they are not
            counted.
        is_top: whether no learning rate is unstable, so that it is the highest of the grid instead.
        resolution: the rate of one spike in a run, per ``PER_STEPS`` steps.
        runs: the ids of the runs in which they are counted.
    """

    lr: float
    is_top: bool
    resolution: float
    runs: tuple[str, ...] = ()


NOT_COUNTED = Spikes(math.nan, False, 0.0)


def counted_at(lrs: tuple[float, ...], seeds: pd.DataFrame, steps: int) -> Spikes:
    """At which learning rate spikes are counted, from the unstable ones of all seeds of an arm.

    Args:
        lrs: the grid, in rising order.
        seeds: a row per seed with ``eta_div``, log10 of the smallest unstable learning rate, and ``censored``.
        steps: of a run.
    """
    unstable = seeds.loc[~seeds["censored"].astype(bool), "eta_div"]
    resolution = PER_STEPS / max(steps - UNJUDGED, 1)
    if unstable.empty:
        return Spikes(lrs[-1], True, resolution) if len(seeds) else NOT_COUNTED
    below = [lr for lr in lrs if lr <= 10 ** unstable.min() / 2]
    return Spikes(below[-1], False, resolution) if below else NOT_COUNTED


# Groups of keys that distinguish arms; all other keys are settings that a panel shares.
GROUPS = ("intervention", "optimizer", "schedule", "parametrization", "guest")
# Measures of one seed of an arm, in the order of their columns.
MEASURES = ("above", "total", "best", "range", "at_3", "at_10", "spikes")
PART, SPIKES = "above", "spikes"  # the measure of the rule, and the rate of loss spikes

Keys = Mapping[str, Hashable]
# The keys that a panel shares, with their values.
Setting = tuple[tuple[str, Hashable], ...]


class Curve(NamedTuple):
    """The runs of one config, which differ in learning rate and seed.

    Attributes:
        interventions: the names of its interventions.
        keys: the keys of its config that distinguish arms, with their values.
        setting: the other keys, with their values.
        seeds: a row per seed with the whole grid of learning rates. The columns are ``MEASURES`` and four more.
            ``eta_div`` is log10 of the smallest unstable learning rate, or one step above the grid. ``unstable`` is the
            number of unstable learning rates, and ``censored`` is whether there is none. ``trains`` is 1 if the best
            loss beats a bigram model.
        lrs: the grid, in rising order.
        incomplete: how many seeds are left out because a learning rate is missing.
        runs: how many runs were trained.
        parameters: number of all parameters of the model.
        seconds: wall time of a run by seed, a median over learning rates.
        source: the source of its records.
        spikes: at which learning rate loss spikes are counted; their rates are a column of ``seeds``.
        window: the learning rates over which sensitivity is a mean.
        losses: mean loss over these seeds, by learning rate; only for rates at which it is finite.
    """

    interventions: frozenset[str]
    keys: Keys
    setting: Setting
    seeds: pd.DataFrame
    lrs: tuple[float, ...]
    incomplete: int
    runs: int
    parameters: int
    seconds: pd.Series
    source: Source
    window: Window
    losses: Mapping[float, float]
    spikes: Spikes = NOT_COUNTED


class Source(NamedTuple):
    """The source of records: the days and commands, and the versions of the lab that trained the runs."""

    days: str
    command: str
    versions: str


def curves_of(records: Records, sources: Mapping[str, Source], window: Window = WINDOW) -> list[Curve]:
    """The curves of these records.

    Args:
        sources: the source of each run, by its id.
        window: the learning rates over which sensitivity is a mean.
    """
    ended = judge(points(records.runs))
    cards = records.runs.set_index("id")
    first = ended.drop_duplicates("curve")
    keys, of_key = configs(cards.loc[first["id"]].reset_index())
    ended = ended.drop(columns="parameters").join(cards[["wall_seconds", "steps", "parameters"]], on="id")
    runs_of, losses = dict(iter(ended.groupby("curve"))), training_losses(records)
    seeds_of = dict(iter(_by_seed(ended, window).set_index("seed").groupby("curve")))
    curves = []
    for number, key in zip(first["curve"], keys, strict=True):
        runs, mine = runs_of[number], seeds_of[number]
        config = of_key[key]
        names = frozenset(name for name in str(config["intervention"]).split("+") if name != "none")
        lrs = tuple(sorted(runs["lr"].unique()))
        whole = mine[mine["lrs_run"] == len(lrs)]
        seconds = runs["wall_seconds"].astype(float).groupby(runs["seed"].to_numpy()).median()
        within = runs[runs["seed"].isin(whole.index)]
        spikes = counted_at(lrs, whole, int(runs["steps"].iloc[0])) if losses else NOT_COUNTED
        counted = within.loc[within["lr"] == spikes.lr, ["seed", "id"]].set_index("seed")["id"]
        counted = counted[[run in losses for run in counted]]
        means = (within if len(within) else runs).groupby("lr")["capped"].mean()
        rates = {seed: spike_rate(losses[run]) for seed, run in counted.items()}
        curves.append(
            Curve(
                interventions=names,
                keys={name: value for name, value in config.items() if name.partition(".")[0] in GROUPS},
                setting=tuple((name, value) for name, value in config.items() if name.partition(".")[0] not in GROUPS),
                seeds=whole.drop(columns=["curve", "lrs_run"]).assign(spikes=pd.Series(rates, dtype=float)),
                lrs=lrs,
                incomplete=len(mine) - len(whole),
                runs=len(runs),
                parameters=int(runs["parameters"].iloc[0]) if runs["parameters"].notna().all() else 0,
                seconds=seconds.dropna(),
                source=sources.get(str(runs["id"].iloc[0]), Source("", "", "")),
                window=window,
                losses=dict(zip(means.index.tolist(), means.tolist(), strict=True)),
                spikes=spikes._replace(runs=tuple(counted)) if rates else NOT_COUNTED,
            )
        )
    return curves


def _by_seed(ended: pd.DataFrame, window: Window) -> pd.DataFrame:
    """The measures, with a row for each curve and seed."""
    seeds = per_seed(ended, *window).set_index(["curve", "seed"]).to_dict("index")
    places: dict[tuple[Hashable, ...], list[int]] = {}
    for place, at in enumerate(zip(ended["curve"], ended["seed"], strict=True)):
        places.setdefault(at, []).append(place)
    lrs, capped, bigram = (ended[name].to_numpy() for name in ("lr", "capped", "loss_bigram"))
    is_unstable = (ended["outcome"] != "").to_numpy()
    rows = []
    for (curve, seed), of_seed in places.items():
        measured, by_lr = seeds[curve, seed], sorted(of_seed, key=lrs.__getitem__)
        log_lr, loss = np.log10(lrs[by_lr]), capped[by_lr]
        best = int(loss.argmin())
        step = float(np.diff(log_lr).min()) if len(log_lr) > 1 else math.nan
        censored = bool(math.isnan(measured["eta_div"]))
        log_lost = log_lr[-1] + step if censored else math.log10(measured["eta_div"])
        at_3, at_10 = (_interpolated(log_lr, loss, log_lr[best] + math.log10(times)) for times in (3, 10))
        row = {"curve": curve, "seed": seed, "above": measured["above"], "total": measured["total"], "best": loss[best]}
        row |= {"range": log_lost - log_lr[best], "at_3": at_3, "at_10": at_10, "eta_div": log_lost}
        row |= {"unstable": int(is_unstable[by_lr].sum()), "censored": censored, "lrs_run": len(by_lr)}
        rows.append({**row, "trains": float(loss[best] < bigram[by_lr[0]])})
    return pd.DataFrame(rows)


def _interpolated(log_lr: np.ndarray, loss: np.ndarray, at: float) -> float:
    """The loss between two learning rates, straight in log LR; NaN outside the grid."""
    inside = at <= log_lr[-1] + 0.05  # tolerance: 3e-1 counts as 10 times 3e-2 in spite of rounding
    return float(np.interp(at, log_lr, loss)) if inside else math.nan


def read_curves(*folders: Path, window: Window = WINDOW) -> list[Curve]:
    """The curves of these results folders, read as one.

    Raises:
        RequestError: a folder cannot be read, none of its runs ended, or no learning rate lies in the window.
    """
    records, sources = load(*folders), dict[str, Source]()
    for folder in folders:
        runs = store.read(folder).runs
        requests = store.requests(folder)
        days = sorted({request.day for request in requests.values()} - {""})
        about = Source(" to ".join(dict.fromkeys([*days[:1], *days[-1:]])), "; ".join(store.commands(folder)), "")
        versions = zip(runs["id"], runs["versions"], strict=True)
        sources |= {run: about._replace(versions=str(its_versions)) for run, its_versions in versions}
    if not (records.runs["status"] != "failed").any():
        raise RequestError(f"no run of {listed(map(str, folders))} ended")
    lrs = sorted(records.runs.get("optimizer.lr", pd.Series([0.0])).dropna().unique())
    if not any(window.low <= lr <= window.high for lr in lrs):
        raise RequestError(
            f"no learning rate of {listed(map(str, folders))} lies from {window.low:g} to {window.high:g}; theirs are "
            f"{lrs[0]:g} to {lrs[-1]:g}"
        )
    return curves_of(records, sources, window)
