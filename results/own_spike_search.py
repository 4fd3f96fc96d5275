"""Search for loss spikes of a model's own on text nearer to language: ``python results/own_spike_search.py``.

Trains the settings of ``own_spike_search.yaml``, or those that are named, each as one fleet of all learning rates,
beta2 and seeds, and writes a row per run into ``own_spike_search.csv``.  The losses of each step are kept in
``runs/own_spike_search``, and a setting that is there is not trained again.
"""

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts are loaded when they are used
import yaml
from numpy.typing import NDArray

from lab.analysis.spikes.trend import DEVIATIONS, LEAST_RISE, MISSES, PASTS, Span, TrendWatch, loss_spikes
from lab.core import machine, schema
from lab.core.registry import DATA
from lab.core.schema import PerRunSeed
from lab.core.windows import MERGE, Numbers, window_statistics
from lab.data.corpus import COUNTED, HELD_OUT, TRAINING, Corpus, Tokens, count_pairs, draw, fingerprint
from lab.data.synthetic import Echo, Trigram
from lab.data.text import StandardLibrary
from lab.sweeping.launch import compose_points
from studies.spikes.own_spikes import HELD_AFTER, RATE_STEPS, START, USUAL, find_spikes

RESULTS = Path(__file__).parent
SEARCH = Path(__file__).with_suffix(".yaml")
TABLE = Path(__file__).with_suffix(".csv")
LOSSES = RESULTS.parent / "runs" / SEARCH.stem
PAGE = RESULTS.parent / "docs" / "my_run_has_spiked.md"
MARKS = ("<!-- own spike search -->", "<!-- end of own spike search -->")

KINDS = ("copied", "echoed", "document", "padded", "turns")
HELD_OUT_TARGETS, COUNTED_ROWS = 8_192, 4_096
SPAN, DISTANCE, DOCUMENT, SHORT = 16, 3, 256, 8  # characters
# By alphabet: half of the vocabulary, and the token of padding.  An echo is the character plus half of the vocabulary.
ALPHABETS, PADS = {"bytes": 128, "letters": 32}, {"bytes": 0, "letters": 28}
DRAWN = 5  # numbers drawn for a row; two are not used, and without them rows would be others than those of the table
LETTERS, SPACE = 26, 26
SAME = 3  # spikes of two arms so many steps apart are at the same step


@dataclass(frozen=True, eq=False, kw_only=True)
class NearText(Corpus):
    """Rows of the standard library, changed as ``kind`` says, of bytes modulo 128 or of letters and spaces.

    Of kind ``turns`` are batches of one topic for ``period`` steps, then of the next; all have tokens of their own.
    """

    kind: str
    alphabet: str
    period: int
    training: Tokens
    reserved: Tokens

    @property
    def longest(self) -> int:
        """No row of the search is too long."""
        return sys.maxsize

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        """Rows ``[batch_size, seq_len + 1]`` of one step."""
        if self.kind == "turns":
            return self._topic(step // self.period % len(TOPICS), seed, step, batch_size, seq_len)
        return np.ascontiguousarray(self._rows(self.training, TRAINING, seed, step, batch_size, seq_len + 1))

    def held_out(self, seq_len: int) -> Tokens:
        """Rows ``[n, seq_len + 1]`` from the held-out text, or of all topics in turn."""
        rows = HELD_OUT_TARGETS // seq_len
        if self.kind == "turns":
            by_topic = [self._held_out_topic(topic, rows // len(TOPICS), seq_len) for topic in range(len(TOPICS))]
            return np.stack(by_topic, axis=1).reshape(-1, seq_len + 1)
        return np.ascontiguousarray(self._rows(self.reserved, HELD_OUT, 0, 0, rows, seq_len + 1))

    def pair_counts(self) -> scipy.sparse.csr_array:
        """How often a token follows another in rows drawn as batches are: ``[256, 256]``, sparse."""
        if self.kind == "turns":
            rows = np.concatenate([self._topic(topic, 0, 0, COUNTED_ROWS, 64) for topic in range(len(TOPICS))])
        else:
            rows = self._rows(self.training, COUNTED, 0, 0, COUNTED_ROWS, 65)
        return count_pairs(rows, self.vocabulary)

    def _topic(self, topic: int, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        return TOPICS[topic].open().batch(seed, step, batch_size, seq_len) % 128 + FIRSTS[topic]

    def _held_out_topic(self, topic: int, rows: int, seq_len: int) -> Tokens:
        windows = TOPICS[topic].open().held_out(seq_len)
        return windows[:: len(windows) // rows][:rows] % 128 + FIRSTS[topic]

    def _rows(self, text: Tokens, stream: int, seed: int, step: int, rows: int, length: int) -> Tokens:
        """Rows ``[rows, length]``: windows of the text drawn at random, and the copies that are made in them."""
        bits = draw(stream, seed, step, rows, DRAWN)
        start_n1 = (bits[:, :1] % np.uint64(text.size - length)).astype(np.int64)
        window_nt = text[start_n1 + np.arange(length)]
        half = ALPHABETS[self.alphabet]
        place_t = np.arange(length)
        if self.kind == "copied":
            cycle_t, in_cycle_t = np.divmod(place_t, 2 * SPAN)
            return window_nt[:, cycle_t * SPAN + in_cycle_t % SPAN]
        if self.kind == "echoed":
            is_echo_t = place_t % 2
            before_nt = text[start_n1 + np.arange(-DISTANCE, length)]  # the first echoes show what lies before
            return before_nt[:, place_t // 2 + DISTANCE * (1 - is_echo_t)] + half * is_echo_t
        drawn_n4 = bits[:, 1:]
        if self.kind == "document":
            is_document_n1 = drawn_n4[:, :1] % np.uint64(2) == 1
            first_n1 = (drawn_n4[:, 1:2] % np.uint64(DOCUMENT - length)).astype(np.int64)
            return np.where(is_document_n1, self.training[first_n1 + place_t], window_nt)
        is_long_n1 = drawn_n4[:, :1] % np.uint64(8) == 0
        return np.where(is_long_n1 | (place_t < SHORT), window_nt, PADS[self.alphabet])


TOPICS = (StandardLibrary(), Echo(), Trigram())
FIRSTS = (0, 128, 160)  # the token that is the first of each topic


@dataclass(frozen=True)
class NearTextSource:
    """Text of the standard library, changed as ``kind`` says."""

    kind: str = schema.one_of(*KINDS, default="copied")
    alphabet: str = schema.one_of(*ALPHABETS, default="bytes")
    period: int = schema.bounded(100, at_least=1)
    seed: PerRunSeed = schema.seed(0)

    def open(self) -> Corpus:
        """Read the library, once per process."""
        return _open(self.kind, self.alphabet, self.period)


@cache
def _open(kind: str, alphabet: str, period: int) -> Corpus:
    library: Any = StandardLibrary().open()
    convert = letters if alphabet == "letters" else ascii_bytes
    corpus = NearText(
        fingerprint="",
        notes={},
        vocabulary=2 * ALPHABETS[alphabet],
        kind=kind,
        alphabet=alphabet,
        period=period,
        training=convert(library.training),
        reserved=convert(library.reserved),
    )
    return replace(corpus, fingerprint=fingerprint(corpus.batch(0, 0, 64, 32), corpus.held_out(32)))


def ascii_bytes(text: NDArray[np.integer]) -> Tokens:
    """The bytes of a text modulo 128."""
    return (text % 128).astype(np.int64)


def letters(text: NDArray[np.integer]) -> Tokens:
    """Letters of a text without their case, from 0, with a single space for all between two words."""
    lower = (text | 32).astype(np.int64) - ord("a")
    symbols = np.where((lower >= 0) & (lower < LETTERS) & (text >= ord("A")) & (text <= ord("z")), lower, SPACE)
    is_second = (symbols[1:] == SPACE) & (symbols[:-1] == SPACE)
    return symbols[np.insert(~is_second, 0, True)]


def losses(search: dict[str, Any], setting: str) -> dict[str, NDArray[Any]]:
    """Training and held-out losses ``[runs, steps]`` of a setting, and the seconds of the processor it took."""
    file = LOSSES / f"{setting}.npz"
    if not file.exists():
        from lab.training.config import run_config
        from lab.training.fleet import Fleet
        from lab.training.loop import train

        machine.configure_process()
        machine.configure_torch()
        (tree,) = compose_points([*search["words"], *search["settings"][setting].get("words", [])])
        trees = []
        for lr, beta2, seed in points(search, setting):
            optimizer = tree["optimizer"] | {"lr": lr, "beta2": beta2}
            data = search["settings"][setting]["data"] | {"seed": seed}
            trees.append(tree | {"optimizer": optimizer, "data": data, "seed": seed})
        begun = time.process_time()
        fleet = Fleet([run_config(each) for each in trees])
        measured: list[list[NDArray[Any]]] = [[], []]
        for result in train(fleet):
            for name, rows in zip(("train_loss", "val_loss"), measured, strict=True):
                if (name, "") in result.probe_values and result.done:
                    rows.append(result.probe_values[name, ""].detach().numpy().copy())
        train_rn, held_rn = (np.array(rows).T for rows in measured)
        file.parent.mkdir(parents=True, exist_ok=True)
        bigram = fleet.corpus.loss_bigram(fleet.config.seq_len, fleet.config.validation_targets)
        seconds = time.process_time() - begun
        np.savez_compressed(file, train=train_rn, held=held_rn, seconds=seconds, bigram=bigram)
    with np.load(file) as kept:
        return dict(kept)


def points(search: dict[str, Any], setting: str) -> list[tuple[float, float, int]]:
    """Learning rate, beta2 and seed of each run of a setting."""
    own = search | search["settings"][setting]
    return list(product(own["lr"], own["beta2"], own["seeds"]))


def rows(search: dict[str, Any], setting: str) -> Iterator[dict[str, Any]]:
    """A row per run: its spikes, in the training loss and in the held-out loss, and their sizes in nats/token."""
    kept, arms = losses(search, setting), points(search, setting)
    period = search["settings"][setting]["data"].get("period", math.inf)
    runs = [_Run(*each) for each in zip(kept["train"].astype(float), kept["held"].astype(float), strict=True)]
    for (lr, beta2, seed), run in zip(arms, runs, strict=True):
        others = [other for other, arm in zip(runs, arms, strict=True) if arm[2] == seed and other is not run]
        yield {
            "setting": setting,
            "lr": lr,
            "beta2": beta2,
            "seed": seed,
            "steps": len(run.train_n) - START,
            **_counts("train", run.train_n, run.spikes, [span for other in others for span in other.spikes]),
            "own": len(run.own),
            "own_rise": _median([spike.held_out for spike in run.own]),
            "control_rise": _median([_rise(run.held_n, spike.control) for spike in run.own if spike.control >= 0]),
            **_counts("held_out", run.held_n, run.rises, [span for other in others for span in other.rises]),
            "own_at_turns": sum(spike.step % period <= MERGE for spike in run.own),
            "held_out_at_turns": sum(span.first % period <= MERGE for span in run.rises),
            "end": float(np.median(run.held_n[-USUAL:])),
            "bigram": float(kept["bigram"]),
            "core_seconds": float(kept["seconds"]) / len(runs),
        }


class _Run:
    """The losses ``[n]`` of a run at each step, and the spikes in them."""

    def __init__(self, train_n: Numbers, held_n: Numbers) -> None:
        # The held-out loss is not measured before the first step, and that of the last is on all held-out rows.
        self.train_n, self.held_n = train_n, np.concatenate([held_n[:1], held_n[:-1], held_n[-2:-1]])
        self.own = find_spikes({"": {("train_loss", ""): self.train_n, ("val_loss", ""): self.held_n}})
        self.spikes, self.rises = (_spikes(loss_n) for loss_n in (self.train_n, self.held_n))


def _spikes(loss_n: Numbers) -> list[Span]:
    return [span for span in loss_spikes(np.arange(len(loss_n)), loss_n) if span.first >= START]


def _counts(name: str, loss_n: Numbers, spikes: list[Span], others: list[Span]) -> dict[str, float]:
    """Spikes of a loss, how far it must rise for one, and how many others share or end as they should."""
    shared = [any(abs(spike.first - other.first) <= SAME for other in others) for spike in spikes]
    return {
        f"{name}_spikes": len(spikes),
        f"{name}_size": _median([float(loss_n[span.first : span.last + 1].max() - span.usual) for span in spikes]),
        f"{name}_needs": _least_rise(loss_n),
        f"{name}_back": sum(span.ending == "recovered" for span in spikes),
        f"{name}_shared": sum(shared),
    }


def _least_rise(loss_n: Numbers) -> float:
    """How far a single row must rise above the trend at the end of a run."""
    watch = TrendWatch()
    list(watch.add(np.arange(len(loss_n)), loss_n))
    _, deviation_n = window_statistics(watch.history[None, -PASTS[0] :, MISSES])
    return max(LEAST_RISE, DEVIATIONS[0] * float(deviation_n[0]))


def _rise(held_n: Numbers, step: int) -> float:
    return float(held_n[step : step + HELD_AFTER + 1].max() - np.median(held_n[step - USUAL : step]))


def _median(numbers: list[float]) -> float:
    return float(np.median(numbers)) if numbers else math.nan


def shown(search: dict[str, Any], table: pd.DataFrame) -> Iterator[str]:
    """The lines of the table on the page: a row for each setting, without spikes that begin where topics turn."""
    yield "| text and model | runs | learn | steps | training | own | held-out | most by seed | at most | end |"
    yield "|---|---:|---:|---:|---:|---:|---:|---|---:|---:|"
    for setting, runs in table.groupby("setting", sort=False):
        own = runs["own"] - runs["own_at_turns"]
        rises, steps = runs["held_out_spikes"] - runs["held_out_at_turns"], runs["steps"].sum()
        rise, control = runs["own_rise"].median(), runs["control_rise"].median()
        cells = [
            search["settings"][setting]["about"],
            f"{len(runs)}",
            f"{(runs['end'] < runs['bigram']).sum()}",
            f"{steps}",
            f"{runs['train_spikes'].sum()} ({runs['train_needs'].median():.2f})",
            f"{own.sum()} ({rise:.2f}, elsewhere {control:.2f})" if own.any() else "0",
            f"{rises.sum()} ({runs['held_out_needs'].median():.2f})",
            most_by_seed(runs, own if own.any() else rises),
            f"{highest_rate(rises.sum(), steps):.1f}",
            f"{runs['end'].min():.2f} to {runs['end'].max():.2f}",
        ]
        yield f"| {' | '.join(cells)} |"


def most_by_seed(runs: pd.DataFrame, spikes: pd.Series) -> str:
    """Spikes in 10,000 steps by seed, at the learning rate and beta2 that have most of them."""
    by_arm = (spikes * RATE_STEPS / runs["steps"]).groupby([runs["lr"], runs["beta2"]])
    lr, beta2 = by_arm.sum().idxmax()
    rates = " ".join(f"{rate:.0f}" for rate in by_arm.get_group((lr, beta2)))
    return f"{rates} (LR {lr:g}, beta2 {beta2:g})" if spikes.any() else "none"


def highest_rate(spikes: int, steps: int) -> float:
    """The largest rate, in 10,000 steps, at which so few spikes in so many steps are not rarer than 1 in 20."""
    return float(scipy.stats.chi2.ppf(0.95, 2 * (spikes + 1)) / 2) * RATE_STEPS / steps


def write_page(search: dict[str, Any], table: pd.DataFrame) -> None:
    """Put the table on its page, between its marks."""
    text, (begin, end) = PAGE.read_text(), MARKS
    first, _, rest = text.partition(begin)
    PAGE.write_text("\n".join([first + begin, *shown(search, table), end]) + rest.partition(end)[2])


if __name__ == "__main__":
    DATA.register("near_text")(NearTextSource)  # of this search alone, so not of every process that reads this file
    search = yaml.safe_load(SEARCH.read_text())
    for setting in sys.argv[1:] or search["settings"]:
        print(f"{setting}: {float(losses(search, setting)['seconds']):.0f} core-seconds", flush=True)
    trained = [name for name in search["settings"] if (LOSSES / f"{name}.npz").exists()]
    table = pd.DataFrame([row for name in trained for row in rows(search, name)]).round(4)
    table.to_csv(TABLE, index=False)
    write_page(search, pd.read_csv(TABLE))
