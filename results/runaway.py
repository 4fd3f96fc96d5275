"""From which learning rate do attention logits run away, from which does the loss fail, and what moves these rates?

``runaway/plan.yaml`` holds the estimands, the rule and the settings, written before any run. ``python
results/runaway.py --train lines factorial`` trains what is missing of these stages and adds a row for each run to
``runaway/runs.csv``; ``--refine`` instead of ``--train`` trains further rates in the brackets of crossings that are too
wide. ``python results/runaway.py`` prints every number that the study quotes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from faithful_toy import unigram_loss
from lab.analysis.crossings import halving_lrs, over_seeds, rate_text
from lab.analysis.rendering import layout
from lab.core import files, shipped
from lab.core.printing import say
from lab.data.text import StandardLibrary
from lab.records import store
from lab.records.plans import Setting
from lab.sweeping.bench import Bench
from lab.sweeping.progress import ProgressLog
from lab.sweeping.request import read_request
from studies.claims.public_claims import effect_text
from studies.real_runs.curves import UNIGRAM, failing_brackets, read_real_runs
from studies.runaway import figures
from studies.runaway.rates import (
    RATES,
    SETTINGS,
    as_settings,
    effects,
    error_of,
    errors_of_nulls,
    law,
    public_settings,
)
from studies.runaway.rates import ladders as ladders_of

HOME = Path(__file__).with_suffix("")
RUNS = HOME / "runs.csv"
TRAINED = "runs/runaway"
LARGEST = ["block_rms", "log_z", "eps_ratio", "grad_norm"]  # probes of which the largest value is kept
KEYS = ["stage", "row", "seed"]  # of a ladder
FELL, EVENT = 0.9, 10.0  # of the way in the middle of a run; the factor by which a probe jumps
MOST = 4  # rates by which a ladder is refined, at most one more
BASE = ["width", "depth", "steps", "decay", "batch"]  # settings of the factorial of which pairs have an effect
APART = ["qk-layernorm", "events"]  # stages of other models
NUMBERS = {
    "intervention": "intervention",
    "width": "model.width",
    "depth": "model.depth",
    "steps": "steps",
    "batch_size": "batch_size",
    "seq_len": "seq_len",
    "warm_up": "schedule.warmup",
    "head_width": "model.head_width",
    "optimizer": "optimizer.name",
    "weight_decay": "optimizer.weight_decay",
    "beta2": "optimizer.beta2",
    "eps": "optimizer.eps",
    "precision": "precision",
    "vocabulary": "data.vocabulary",
    "parameters": "parameters",
}


class Ladder(NamedTuple):
    """Runs that differ in their learning rate only.

    Attributes:
        stage: of the plan.
        row: its name within the stage.
        words: overrides after those that all runs share.
        seed: of weights and batches.
        rates: learning rates.
    """

    stage: str
    row: str
    words: tuple[str, ...]
    seed: int
    rates: tuple[float, ...]

    def settings(self) -> list[Setting]:
        """What a bench trains for it."""
        return [Setting((*self.words, f"seed={self.seed}"), lr) for lr in self.rates]


def rates(lowest: float, step: float, count: int) -> tuple[float, ...]:
    """A ladder of so many rates, so many decades apart."""
    return tuple(float(f"{lowest * 10 ** (step * rung):.3g}") for rung in range(count))


def factorial(plan: Mapping[str, Any]) -> Iterator[Ladder]:
    """The 32 rows of the factorial; the second seed of eight."""
    design = plan["factorial"]
    for row, levels in signs(plan).iterrows():
        chosen = {name: options[(levels[name] + 1) // 2] for name, options in design["factors"].items()}
        decay = plan["decays"][chosen.pop("decay")]
        words = (*decay, *(word for option in chosen.values() for word in option))
        width = int(chosen["width"][0].partition("=")[2])
        for seed in (design["seed"], *([design["again"]["seed"]] if int(row) in design["again"]["rows"] else [])):
            yield Ladder("factorial", str(row), words, seed, rates(*design["ladder"][width]))


def lines(plan: Mapping[str, Any]) -> Iterator[Ladder]:
    """The lines of the plan, along which one setting varies."""
    for line in plan["lines"]:
        for (width, ladder), steps, seed in product(line["widths"].items(), line["steps"], line["seeds"]):
            own = {word.partition("=")[0]: word for word in (*line.get("base", ()), *line.get("words", ()))}
            words = [*plan["decays"][line["decay"]], f"steps={steps}", f"model.width={width}", *own.values()]
            row = ", ".join([line["decay"], *line.get("words", ()), f"width {width}", f"{steps} steps"])
            yield Ladder(line["name"], row, tuple(words), seed, rates(*ladder))


def ladders() -> list[Ladder]:
    """Every ladder of the plan."""
    plan = shipped.load(HOME / "plan.yaml")
    return [*lines(plan), *factorial(plan)]


def train(chosen: Sequence[Ladder]) -> None:
    """Train what is missing of these ladders, and write a row for each run beside those that are there."""
    plan = shipped.load(HOME / "plan.yaml")
    request = read_request([*plan["shared"], f"out={TRAINED}"], "python results/runaway.py", name="runaway")
    bench = Bench(request, "the study has no row,")
    every = {setting: ladder for ladder in chosen for setting in ladder.settings()}
    bench.train(list(every), ProgressLog(len(every), say))
    of_id = {run: every[setting] for setting, runs in bench.ids.items() for run in runs}
    new = table(store.read(bench.folder), of_id)
    kept = files.read_csv(RUNS) if RUNS.exists() else pd.DataFrame(columns=new.columns)
    kept = kept[~kept["id"].isin(new["id"])]
    runs = pd.concat([kept, new]) if len(kept) else new
    files.write_csv(RUNS, runs.sort_values([*KEYS, "lr"]), float_format="%.6g")


def table(records: store.Records, of_id: Mapping[str, Ladder]) -> pd.DataFrame:
    """A row for each run: its ladder and numbers, losses in nats/token, and what its probes reached.

    ``logit`` is the largest attention logit of any block and step, ``jump`` the largest factor by which that of a block
    rose within a twentieth of the run, ``jump_at`` when (a share of the run); ``loss_at_half`` is the training loss in
    the middle, and ``last_loss`` at the end.
    """
    runs = records.runs[records.runs["id"].isin(of_id.keys())].set_index("id")
    metrics = records.metrics[records.metrics["id"].isin(runs.index)]
    rows = []
    for name, run in runs.iterrows():
        ladder, own = of_id[str(name)], metrics[metrics["id"] == name]
        losses = own[own["probe"] == "train_loss"].set_index("step")["value"].sort_index()
        logits = own[own["probe"] == "attention_logit_max"].pivot_table(index="step", columns="where", values="value")
        rises = (logits.shift(-2) / logits).max(axis=1).fillna(0)
        rows.append(
            {"stage": ladder.stage, "row": ladder.row, "seed": ladder.seed, "lr": run["optimizer.lr"], "id": name}
            | {own_name: run[column] for own_name, column in NUMBERS.items()}
            | {
                "status": run["status"],
                "loss": run["final_val_loss"],
                "loss_at_init": run["loss_at_init"],
                "loss_bigram": run["loss_bigram"],
                "logit": logits.max().max(),
                "jump": rises.max(),
                "jump_at": rises.idxmax() / run["steps"] if len(rises) else np.nan,
                "loss_at_half": losses[losses.index <= run["steps"] / 2].iloc[-1] if len(losses) else np.nan,
                "last_loss": losses.iloc[-1] if len(losses) else np.nan,
                "least_entropy": own.loc[own["probe"] == "attention_entropy", "value"].min(),
            }
            | {f"largest_{probe}": own.loc[own["probe"] == probe, "value"].max() for probe in LARGEST}
        )
    return pd.DataFrame(rows)


@cache
def unigram_losses() -> dict[int, float]:
    """The loss of a unigram model by vocabulary, nats per token."""
    tokens = {size: unigram_loss(StandardLibrary("bpe", size).open()) for size in (1024, 2048)}
    return {256: unigram_loss(StandardLibrary().open()), **tokens}


def read_ladders() -> pd.DataFrame:
    """A row for each ladder that was trained."""
    return ladders_of(files.read_csv(RUNS), unigram_losses())


def report() -> None:
    """Print every number that the study quotes, and draw its figures."""
    plan, table = shipped.load(HOME / "plan.yaml"), read_ladders()
    for stage, own in table.groupby("stage", sort=False):
        print(stage)
        for row in own.to_dict("records"):
            found = "  ".join(f"{name} {rate_text(over_seeds([row[name]]))}" for name in RATES)
            print(f"  {row['row']}, seed {row['seed']}: best {row['best_lr']:g} {row['best_loss']:.3f}  {found}")
    print_laws(table, plan)
    print_events(table)
    draw(table, plan)


def print_events(table: pd.DataFrame) -> None:
    """How steeply each ladder of the screen falls, and which of its runs fell on the way and came back."""
    runs, unigram = files.read_csv(RUNS), unigram_losses()
    for row in table[table["stage"] == "events"].to_dict("records"):
        own = runs[(runs[KEYS] == [row[key] for key in KEYS]).all(axis=1)]
        way = unigram[row["vocabulary"]] - row["best_loss"]
        halfway, end = ((own[name] - row["best_loss"]) / way for name in ("loss_at_half", "loss"))
        fell, back = halfway > FELL, (halfway > FELL) & (end < 0.5)
        events = own["jump"] > EVENT
        print(
            f"  {row['row']}, seed {row['seed']}: share {row['share']:.2f}; {events.sum()} of {len(own)} had an event;"
        )
        print(f"    {fell.sum()} were over {FELL:g} of the way in the middle, and {back.sum()} of these came back")


def draw(table: pd.DataFrame, plan: Mapping[str, Any]) -> None:
    """Draw the figures beside the runs."""
    real, alike = read_real_runs(), comparable(table)
    coupled = alike[alike["optimizer"] == "adamw_coupled"]
    public = public_settings(failing_brackets(real.curves), plan["real"])
    drawings = {
        "over_width": figures.over_width(table),
        "over_size": figures.over_size(coupled, public, law(alike, "runaway", SETTINGS)),
        "share_of_the_way": figures.share_of_the_way(
            files.read_csv(RUNS), unigram_losses(), real.curves, UNIGRAM["Step Law"]
        ),
    }
    for name, drawing in drawings.items():
        (HOME / f"{name}.svg").write_text(layout.svg(drawing, name), encoding="utf-8")


def comparable(table: pd.DataFrame) -> pd.DataFrame:
    """The ladders of one law: coupled decay, and independent decay that adds up to 1 over the run."""
    total = table["weight_decay"] * table["steps"]
    return table[~table["stage"].isin(APART) & ((table["optimizer"] == "adamw_coupled") | total.between(0.99, 1.01))]


def of_paper(plan: Mapping[str, Any], level: float) -> pd.DataFrame:
    """What the law says of the paper's two models: ``rate`` and its 95 % interval from ``low`` to ``high``, a row each.

    The paper's decay adds up to 10 over its run, so ladders with such decay are fitted, too, with an exponent of the
    total.
    """
    table, paper = ladders_of(files.read_csv(RUNS), unigram_losses(), level), plan["paper"]
    strong = table[~table["stage"].isin(APART) & table["total_if_independent"].between(9.9, 10.1)]
    fitted = law(pd.concat([comparable(table), strong]), "runaway", [*SETTINGS, "total_if_independent"])
    models = [{**paper["shared"], "width": width, "depth": depth} for width, depth in paper["shapes"].values()]
    found = map(fitted.predict, as_settings(pd.DataFrame(models)).to_dict("records"))
    return pd.DataFrame(found, index=[*paper["shapes"]]).set_axis(["rate", "low", "high"], axis="columns")


def print_laws(table: pd.DataFrame, plan: Mapping[str, Any]) -> None:
    """What moves the rates, the law of each decay, and what it says of public runs."""
    rows = table[table["stage"] == "factorial"]
    public = public_settings(failing_brackets(read_real_runs().curves), plan["real"])
    alike = comparable(table)
    coupled = alike[alike["optimizer"] == "adamw_coupled"]
    for rate in RATES:
        print(f"factorial, {rate}: decades between the two levels")
        print(
            *(f"  {name} {interval:.3f}" for name, interval in effects(rows, signs(plan), rate, BASE).items()), sep="\n"
        )
        fitted = law(alike, rate, SETTINGS)
        print(f"law of {rate}, scatter {fitted.scatter:.3f}, {fitted.freedom} degrees of freedom:")
        print(*(f"  {name} {fitted.exponent(name):.3f}" for name in fitted.exponents), sep="\n")
        off = error_of(fitted, public)
        print(f"  off public runs by {off:.2f}, absolute {np.abs(off.values).mean():.2f}")
        for (source, size), own in public.groupby(["source", "parameters"]):
            print(f"    {source} {size:.3g}: {error_of(fitted, own):.2f}")
        print(errors_of_nulls(coupled, rate, public).round(3))
    for level in plan["paper"]["levels"]:
        print(f"the paper's models, logits past {level:,}:")
        print(of_paper(plan, level).map("{:.3g}".format))


def finer(chosen: Sequence[Ladder], width: float) -> list[Ladder]:
    """The same ladders with the rates that halve the brackets of their crossings, of those that are too wide."""
    table, found = read_ladders().set_index(KEYS), []
    tried = files.read_csv(RUNS).groupby(KEYS)["lr"].agg(set)
    for ladder in chosen:
        key = (ladder.stage, ladder.row, ladder.seed)
        crossed = [table.at[key, rate] for rate in ("runaway", "failing")]
        lrs = [lr for lr in halving_lrs(crossed, width) if lr not in tried[key]]
        if lrs and len(tried[key]) < len(ladder.rates) + MOST:
            found.append(ladder._replace(rates=tuple(lrs)))
    return found


def quoted() -> dict[str, str]:
    """What pages quote of the study, by the name in their marks."""
    plan, alike = shipped.load(HOME / "plan.yaml"), comparable(read_ladders())
    public = public_settings(failing_brackets(read_real_runs().curves), plan["real"])
    laws = {rate: law(alike, rate, SETTINGS) for rate in RATES}
    off = error_of(laws["runaway"], public)
    nulls = errors_of_nulls(alike[alike["optimizer"] == "adamw_coupled"], "runaway", public)
    paper = plan["paper"]
    of_models = of_paper(plan, paper["levels"][0])
    too_low = np.log10(paper["lr"] / of_models.loc["stable", ["rate", "high", "low"]])
    return {
        **{f"scatter_of_{rate}": f"{laws[rate].scatter:.2f}" for rate in RATES},
        **{f"runaway_{name}": effect_text(*laws["runaway"].exponent(name)[:3]) for name in ("width", "steps")},
        "runaway_off": f"{off:.2f}",
        **{f"runaway_of_{fate}": effect_text(*rate) for fate, rate in of_models.iterrows()},
        "stable_too_low": "{:.2f} [{:.2f}, {:.2f}]".format(*too_low),
        "unfitted_off": f"{nulls.loc['(D/N^2)^(1/4)', 'absolute']:.2f}",
    }


def stages(names: Iterable[str]) -> list[Ladder]:
    """The ladders of these stages of the plan."""
    return [ladder for ladder in ladders() if ladder.stage in {*names}]


def signs(plan: Mapping[str, Any]) -> pd.DataFrame:
    """The two levels of each setting of the factorial, -1 or 1, by row."""
    design = plan["factorial"]
    base = [name for name in design["factors"] if name not in design["generators"]]
    table = pd.DataFrame(product((-1, 1), repeat=len(base)), columns=base)
    for name, of in design["generators"].items():
        table[name] = table[of].prod(axis=1)
    return table.set_index(pd.RangeIndex(1, len(table) + 1).astype(str))[[*design["factors"]]]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train(stages(sys.argv[2:]))
    elif sys.argv[1:2] == ["--refine"]:
        chosen = stages(sys.argv[2:])
        while further := finer(chosen, shipped.load(HOME / "plan.yaml")["refine"]):
            train(further)
    else:
        report()
