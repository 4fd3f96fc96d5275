"""How many loss spikes the lab finds in logs of known spikes, and how many of its alarms are false.

    python benchmarks/planted_spikes.py             writes PLANTED_SPIKES.md
    python benchmarks/planted_spikes.py --tuning    prints the same of the logs on which the constants were chosen

The logs are synthetic.  The constants of the detector were chosen on the seeds of ``TUNING``; the page holds the scores
on those of ``FRESH``, and on the labelled runs of results/.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from lab.analysis.spikes.trend import Span, loss_spikes
from lab.core.spike_trigger import triggered
from lab.core.windows import MERGE, Numbers
from lab.records import store
from labwatch.events.attempts import Column, log_of, table_of
from labwatch.events.detectors import Log
from labwatch.events.logit_rounding import BF16
from labwatch.events.scores import score_runs, summarize

HERE = Path(__file__).parent
LABELLED = HERE.parent / "results" / "labelled_spikes"
TUNING, FRESH = (*range(240), *range(1000, 1400)), range(3000, 3400)
SPACINGS = (1, 10, 50)
# A planted spike counts where a filter that knew its form and the noise would see it at so many standard deviations;
# of the others it is only known that an alarm there is not false.
VISIBLE = 8.0
HEIGHTS, LENGTHS = (0.1, 3.0), (1, 200)  # nats, and steps
FORMS = ("jump", "plateau", "peak")


class PlantedSpike(NamedTuple):
    """A spike of a synthetic log: its steps, height in nats, and how visible it is in the rows that were logged."""

    steps: range
    height: float
    visibility: float
    falling: bool  # whether the loss fell by more than its noise times three over the hundred rows before


class SyntheticLog(NamedTuple):
    """A log, what was planted in it, and every how many steps it has a row."""

    log: Log
    spikes: list[PlantedSpike]
    spacing: int


def synthetic_log(seed: int) -> SyntheticLog:
    """A log of a run that never was: every second one is clean, and every fourth was restarted, so that steps stand in
    it twice.
    """
    random = np.random.default_rng(seed)
    spacing = int(random.choice(SPACINGS))
    rows = int(random.integers(1500, 5000))
    step_n = spacing * np.arange(rows) + (0 if random.random() < 0.7 else int(random.integers(0, 100_000)))
    usual_n = usual_loss(random, step_n)
    noise_n, about = noise(random, usual_n)
    added_n, spikes = np.zeros(rows), list[PlantedSpike]()
    averaged = bool(random.random() < 0.5)
    for _ in range(int(random.integers(2, 9)) if seed % 2 else 0):
        spikes += plant(random, step_n, spacing, averaged, about, usual_n, added_n, spikes)
    loss_n = np.round(usual_n + noise_n + added_n, int(random.choice([2, 3, 4, 6])))
    column, written = Column(), written_rows(seed, rows)
    last = {row: place for place, row in enumerate(written)}
    for place, row in enumerate(written):  # what was written before a restart had gone wrong
        column.add(int(step_n[row]), float(loss_n[row]) + (last[row] != place))
    return SyntheticLog(log_of(str(seed), table_of({"loss": column}), BF16), spikes, spacing)


def written_rows(seed: int, rows: int) -> list[int]:
    """The rows of a log in the order in which they are written: a run that is restarted writes some again."""
    random = np.random.default_rng([seed, 1])
    written = list[int]()
    restarts = sorted(random.integers(300, rows, int(random.integers(1, 4)))) if seed % 4 in (2, 3) else []
    for begin, end in zip([0, *restarts], [*restarts, rows], strict=True):
        written += range(max(0, begin - int(random.integers(1, 200))) if begin else 0, end)
    return written


def usual_loss(random: np.random.Generator, step_n: NDArray[np.int64]) -> Numbers:
    """A power law of the steps, from a uniform guess on, and a part that falls with the learning rate."""
    floor, power = random.uniform(1.4, 2.6), random.uniform(0.15, 0.6)
    start, offset = random.uniform(9.5, 11.5), 10 ** random.uniform(0.7, 2.7)
    total = step_n[-1]
    curve_n = floor + (start - floor) * (1 + step_n / offset) ** -power
    share_n = step_n / total
    warm_n = np.minimum(step_n / (0.02 * total), 1)
    schedule = random.choice(["constant", "cosine", "linear", "decay at the end"])
    lr_n = {
        "constant": np.ones(len(step_n)),
        "cosine": 0.55 + 0.45 * np.cos(math.pi * share_n),
        "linear": 1 - 0.9 * share_n,
        "decay at the end": np.clip((1 - share_n) / 0.2, 0.05, 1),
    }[str(schedule)]
    usual_n: Numbers = curve_n + random.uniform(0.0, 0.25) * (lr_n * warm_n - 1)
    return usual_n


class Noise(NamedTuple):
    """Standard deviation of each row, correlation of successive ones, and the share that drifts slowly."""

    deviation_n: Numbers
    memory: float
    drift: float

    def visibility(self, wave_n: Numbers) -> float:
        """At how many standard deviations a filter that knows the noise and the form of a wave would see it."""
        scaled_n = wave_n / self.deviation_n
        white_n = scaled_n - self.memory * np.concatenate([[0.0], scaled_n[:-1]])
        white = float(np.sum(white_n**2)) / (1 - self.memory**2)
        if not white:
            return 0.0
        slow = float(np.max(scaled_n)) / self.drift
        return float((1 / white + 1 / slow**2) ** -0.5)


def noise(random: np.random.Generator, usual_n: Numbers) -> tuple[Numbers, Noise]:
    """Noise of each row, which grows with the loss, keeps some memory, has heavy tails in some logs, and drifts slowly
    with the data.
    """
    rows = len(usual_n)
    deviation_n = 10 ** random.uniform(-2.5, -1.0) * (usual_n / usual_n.min()) ** random.uniform(0, 2)
    freedom = random.choice([5.0, 10.0, math.inf])
    white_n = random.standard_normal(rows)
    if math.isfinite(freedom):
        white_n = random.standard_t(freedom, rows) * math.sqrt((freedom - 2) / freedom)
    memory = float(random.choice([0.0, 0.0, 0.3, 0.6, 0.9]))
    remembered_n = remember(white_n, memory)
    drift = random.uniform(0, 0.5)
    drift_n = drift * remember(random.standard_normal(rows), 1 - 1 / random.uniform(50, 400))
    return deviation_n * (remembered_n + drift_n), Noise(deviation_n, memory, drift)


def remember(white_n: Numbers, memory: float) -> Numbers:
    """Autoregressive noise of standard deviation 1."""
    from scipy.signal import lfilter

    made_n: Numbers = lfilter([math.sqrt(1 - memory**2)], [1, -memory], white_n)
    return made_n


def plant(
    random: np.random.Generator,
    step_n: NDArray[np.int64],
    spacing: int,
    averaged: bool,
    about: Noise,
    usual_n: Numbers,
    added_n: Numbers,
    spikes: Sequence[PlantedSpike],
) -> list[PlantedSpike]:
    """Add a spike to the log; none where it would lie within 600 steps, or 60 rows, of another."""
    length = round(math.exp(random.uniform(*np.log(LENGTHS))))
    height = math.exp(random.uniform(*np.log(HEIGHTS)))
    early = random.random() < 0.3
    row = int(random.integers(30, 200) if early else random.integers(200, len(step_n) - 60))
    first = int(step_n[row]) - int(random.integers(0, spacing))
    apart = max(600, 60 * spacing)
    if any(first < each.steps.stop + apart and each.steps.start < first + length + apart for each in spikes):
        return []
    form = str(random.choice(FORMS))
    tail = 3 * length if form == "jump" else length
    every = np.arange(first, first + tail)
    place = (every - first) / length
    wave = {
        "jump": np.exp(-place),
        "plateau": np.ones(len(every)),
        "peak": 1 - np.abs(2 * place - 1),
    }[form]
    wave = height * (np.maximum(wave, 0.5 / length) if form == "peak" else wave)
    grid = np.zeros(int(step_n[-1]) + spacing + 1 - int(step_n[0]) + tail + 1)
    at = first - int(step_n[0])
    grid[at : at + tail] = wave
    if averaged:  # over the steps since the last row
        sums = np.concatenate([[0.0], np.cumsum(grid)])
        end_n = step_n - step_n[0] + 1
        rows_n = (sums[end_n] - sums[np.maximum(end_n - spacing, 0)]) / spacing
    else:
        rows_n = grid[step_n - step_n[0]]
    added_n += rows_n
    visibility = about.visibility(rows_n) if rows_n.max() >= HEIGHTS[0] else 0.0
    falling = bool(usual_n[max(0, row - 100)] - usual_n[row] > 3 * about.deviation_n[row])
    return [PlantedSpike(range(first, first + tail), height, visibility, falling)]


Find = Callable[[Log], Iterable[Span]]


def mean_and_deviations(log: Log) -> Iterator[Span]:
    """Losses above the mean of the 128 rows before by six standard deviations, the rule by which OLMo-core leaves out
    a step; alarms closer than ``MERGE`` rows are one.
    """
    loss_n = log.columns["loss"]
    past_nw = sliding_window_view(np.concatenate([np.full(128, math.nan), loss_n])[:-1], 128)[128:]
    high_n = np.flatnonzero(loss_n[128:] > past_nw.mean(1) + 6 * past_nw.std(1)) + 128
    for row in high_n[np.diff(high_n, prepend=-MERGE) >= MERGE]:
        yield Span(int(row), int(row), float(loss_n[row]))


DETECTORS: dict[str, Find] = {
    "the lab's detector": lambda log: loss_spikes(log.step_n, log.columns["loss"]),
    "the trigger of responses": lambda log: [Span(row, row, math.nan) for row in triggered(log.columns["loss"])],
    "mean and six deviations of 128 rows": mean_and_deviations,
}


def judge(made: SyntheticLog, find: Find) -> tuple[list[bool], int]:
    """Whether each planted spike was found, and how many alarms belong to none.

    An alarm belongs to a spike if it begins in it, or no more than three rows or 20 steps after it.
    """
    starts = [int(made.log.step_n[span.first]) for span in find(made.log)]
    slack = max(20, 3 * made.spacing)
    near = [
        [each.steps.start - 2 * made.spacing <= step < each.steps.stop + slack for step in starts]
        for each in made.spikes
    ]
    extra = sum(not any(hits[index] for hits in near) for index in range(len(starts)))
    return [any(hits) for hits in near], extra


def tables(seeds: Sequence[int]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A row for each visible spike, and one for each log, with what each detector found."""
    spikes, logs = [], []
    for seed in seeds:
        made = synthetic_log(seed)
        judged = {name: judge(made, find) for name, find in DETECTORS.items()}
        logs.append(
            {"clean": not seed % 2, "rows": len(made.log.step_n)} | {name: extra for name, (_, extra) in judged.items()}
        )
        for index, spike in enumerate(made.spikes):
            if spike.visibility >= VISIBLE:
                facts = {"height": spike.height, "length": len(spike.steps), "falling": spike.falling}
                found = {name: hits[index] for name, (hits, _) in judged.items()}
                spikes.append(facts | {"spacing": made.spacing} | found)
    return pd.DataFrame(spikes), pd.DataFrame(logs)


def page(seeds: Sequence[int]) -> Iterator[str]:
    """The scores on these seeds, as Markdown."""
    spikes, logs = tables(seeds)
    names = list(DETECTORS)
    groups: Mapping[str, pd.Series] = {
        "all": spikes["height"] > 0,
        "0.1 to 0.2 nats": spikes["height"] < 0.2,
        "0.2 to 0.5 nats": spikes["height"].between(0.2, 0.5),
        "0.5 to 3 nats": spikes["height"] > 0.5,
        "1 to 5 steps": spikes["length"] <= 5,
        "6 to 40 steps": spikes["length"].between(6, 40),
        "more than 40 steps": spikes["length"] > 40,
        "where the loss falls steeply": spikes["falling"],
        **{f"a row every {spacing} steps": spikes["spacing"] == spacing for spacing in SPACINGS},
    }
    yield f"| planted spikes | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for group, kept in groups.items():
        chosen = spikes[kept]
        shares = [f"{chosen[name].sum()} of {len(chosen)} ({100 * chosen[name].mean():.0f} %)" for name in names]
        yield f"| {group} | {' | '.join(shares)} |"
    yield ""
    yield f"| false alarms in 10,000 rows | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for group, is_clean in (("logs with spikes", False), ("clean logs", True)):
        chosen = logs[logs["clean"] == is_clean]
        rates = [f"{1e4 * chosen[name].sum() / chosen['rows'].sum():.2f}" for name in names]
        yield f"| {group}, {chosen['rows'].sum():,} rows | {' | '.join(rates)} |"


def labelled() -> Iterator[str]:
    """The scores on the labelled runs, as Markdown."""
    records = store.read(LABELLED)
    yield "| detector | bursts found | false alarms |"
    yield "|---|---|---|"
    for name, find in DETECTORS.items():
        (score, *_) = summarize(score_runs(records, find))
        found, false = score.found, score.false_alarms
        yield f"| {name} | {found.mean * found.n:.0f} of {found.n} | {false.n} in {score.clean_steps:,} steps |"


def text() -> str:
    """PLANTED_SPIKES.md."""
    return "\n".join(
        [
            "# Which loss spikes the lab finds",
            "",
            "Written by `python benchmarks/planted_spikes.py`. None of the logs comes from a real large run: the logs",
            "are synthetic, and the labelled runs are tiny models of the lab.",
            "",
            f"## {len(FRESH)} synthetic logs",
            "",
            "Every second log is clean. A log has 1,500 to 5,000 rows, one every 1, 10 or 50 steps, which sample the",
            "loss or average it. The loss starts at that of a uniform guess and is a power law of the steps, plus a",
            "part that follows a learning rate, which is constant, cosine or linear, or decays at the end. Its noise",
            "has a standard deviation of 0.003 to 0.1 nats that grows with the loss and drifts; it is autocorrelated",
            "(up to 0.9), and in some logs it has heavy tails. Half of the logs were restarted up to three times, so",
            "they hold some steps twice, of which the last value counts. Spikes of 0.1 to 3 nats and 1 to 200 steps",
            "jump and decay, last, or rise and fall. Three in ten lie in the first 200 rows. A spike counts if a",
            f"filter that knows its form and the noise would see it at {VISIBLE:g} standard deviations, and if a row",
            "is 0.1 nats higher.",
            "",
            f"The constants were chosen on {len(TUNING)} other logs; these have the seeds {FRESH[0]} to {FRESH[-1]}.",
            "",
            *page(FRESH),
            "",
            "## Labelled runs of the lab",
            "",
            "These are bursts of bad batches in the runs of `results/labelled_spikes`, with a row per step. We looked",
            "at these runs while choosing the constants of the detector.",
            "",
            *labelled(),
            "",
        ]
    )


if __name__ == "__main__":
    if "--tuning" in sys.argv[1:]:
        print("\n".join(page(TUNING)))
    else:
        (HERE / "PLANTED_SPIKES.md").write_text(text())
