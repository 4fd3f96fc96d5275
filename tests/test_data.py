"""Data: batches are pure functions of (seed, step), held-out text stays held out, and refusals say what to do."""

import hashlib
import itertools
import json
import math
import os
import shutil
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_array

import lab.training.config  # noqa: F401  (fills the registry)
from lab import Corpus, PackedCorpus
from lab.core import schema
from lab.core.errors import RequestError
from lab.core.registry import DATA
from lab.core.schema import build
from lab.core.shipped import load, results
from lab.data import synthetic
from lab.data.corpus import BACKOFF, bigram_loss, count_pairs, unigram_loss
from lab.data.packing import HELD_OUT_EVERY
from lab.data.synthetic import (
    Echo,
    EchoCorpus,
    Synthetic,
    SyntheticCorpus,
    Trigram,
)
from lab.data.text import NOT_LIBRARY, StandardLibrary, Text
from lab.records import store
from lab.records.store import UNIGRAM_LOSSES

SENTENCES = b"the quick brown fox jumps over the lazy dog. " * 40


def files(folder: Path, count: int, suffix: str = ".txt") -> Path:
    """A folder of numbered files; each file is made of one byte of its own, so a window tells where it came from."""
    folder.mkdir(parents=True)
    for i in range(count):
        (folder / f"{i:03}{suffix}").write_bytes(bytes([i + 1]) * 500)
    return folder


def opened(path: object) -> Corpus:
    return Text(path=str(path)).open()


EXTRA = {"huggingface"}
SOURCES = [pytest.param(name, marks=pytest.mark.extras if name in EXTRA else ()) for name in DATA]


@pytest.fixture(params=SOURCES)
def corpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    """Every registered source, opened the way a config opens it."""
    monkeypatch.setenv("LAB_CACHE", str(tmp_path / "cache"))
    text = np.random.default_rng(0).integers(32, 127, 100_000).astype(np.uint8).tobytes().decode()
    (tmp_path / "rows").mkdir()
    (tmp_path / "text.txt").write_text(text)
    (tmp_path / "rows/text.jsonl").write_text("".join(json.dumps({"text": text[at::40]}) + "\n" for at in range(40)))
    pd.DataFrame({"text": [text[at::40] for at in range(40)]}).to_parquet(tmp_path / "text.parquet")
    paths = {"text": "text.txt", "jsonl": "rows/text.jsonl", "parquet": "text.parquet", "huggingface": "rows"}
    path = {"path": str(tmp_path / paths[request.param])} if request.param in paths else {}
    return schema.build(DATA[request.param], {"seed": 0, **path}, "data").open()


# --- every source ---------------------------------------------------------------------------------------------------


def test_a_batch_depends_on_seed_and_step_alone(corpus: Corpus) -> None:
    forwards = [corpus.batch(3, step, 4, 32) for step in range(6)]
    for step in (5, 0, 3):
        corpus.held_out(16)
        corpus.batch(9, step, 2, 8)
        assert np.array_equal(corpus.batch(3, step, 4, 32), forwards[step])
    assert forwards[0].shape == (4, 33)
    assert forwards[0].dtype == np.int64


def test_another_seed_or_step_is_another_batch(corpus: Corpus) -> None:
    drawn = [corpus.batch(seed, step, 4, 32).tobytes() for seed in (-1, 0, 1, 2, 2**40) for step in (0, 1, 2, 2**33)]
    assert len(set(drawn)) == len(drawn)


def test_more_rows_leave_the_first_rows_as_they_were(corpus: Corpus) -> None:
    assert np.array_equal(corpus.batch(0, 7, 16, 32)[:3], corpus.batch(0, 7, 3, 32))


def test_a_batch_is_the_callers_own(corpus: Corpus) -> None:
    before = corpus.batch(0, 0, 2, 8)
    corpus.batch(0, 0, 2, 8)[:] = 0
    assert np.array_equal(corpus.batch(0, 0, 2, 8), before)


def test_tokens_are_below_the_vocabulary(corpus: Corpus) -> None:
    small = {"TrigramCorpus": 32, "EchoCorpus": 32, "MixtureCorpus": 64, "EscapedCorpus": 33}
    assert corpus.vocabulary == small.get(type(corpus).__name__, 256)
    for windows in (corpus.batch(0, 0, 64, 64), corpus.held_out(64)):
        assert windows.min() >= 0
        assert windows.max() < corpus.vocabulary


@pytest.mark.parametrize("seq_len", [48, 1000])
def test_validation_is_always_the_same_and_large_enough(corpus: Corpus, seq_len: int) -> None:
    seq_len = min(seq_len, corpus.longest)
    windows = corpus.held_out(seq_len)
    assert windows.shape[1] == seq_len + 1
    available = corpus.reserved.size - 1 if isinstance(corpus, PackedCorpus) else math.inf
    targets = 65_536 if isinstance(corpus, PackedCorpus | SyntheticCorpus) else 8_192
    assert windows[:, 1:].size >= min(targets, available - seq_len + 1)
    corpus.batch(1, 1, 2, 8)
    assert np.array_equal(corpus.held_out(seq_len), windows)


@pytest.mark.parametrize("source", [StandardLibrary, Synthetic])
def test_opening_twice_is_opening_once_whatever_the_seed(source: type[StandardLibrary] | type[Synthetic]) -> None:
    assert source(seed=0).open() is source(seed=1).open()


def test_the_unigram_loss_is_that_of_frequencies_alone(corpus: Corpus) -> None:
    windows = np.array([[0, 1, 1, 2]])
    assert unigram_loss(csr_array([[1, 2, 0], [0, 4, 0], [0, 0, 0]]), windows) == pytest.approx(
        -(2 * math.log(7 / 10) + math.log(1 / 10)) / 3
    )
    assert corpus.loss_bigram(64) - 0.3 < corpus.loss_unigram(64) < math.log(256)


def test_committed_records_get_the_unigram_loss_of_their_data() -> None:
    known, made = load(UNIGRAM_LOSSES), build(DATA["trigram"], {}, "data").open()
    assert known[made.fingerprint] == pytest.approx(made.loss_unigram(64), abs=1e-6)
    runs = store.read(results() / "quickstart_fp32").runs
    assert set(runs["loss_unigram"]) == {known[runs["data_fingerprint"].iloc[0]]}
    assert (runs["loss_unigram"] > runs["loss_bigram"]).all()


def test_the_bigram_loss_lies_between_the_unigram_and_nothing(corpus: Corpus) -> None:
    unigram = csr_array(np.tile(corpus.pair_counts().sum(0), (256, 1)))
    assert 0 < corpus.loss_bigram(64) <= bigram_loss(unigram, corpus.held_out(64)) + 0.3


# --- text -----------------------------------------------------------------------------------------------------------


def test_training_windows_never_show_a_held_out_file(tmp_path: Path) -> None:
    corpus = opened(files(tmp_path / "many", 45))
    seen = set(np.unique(np.concatenate([corpus.batch(seed, 0, 256, 64) for seed in range(20)])).tolist())
    reserved = {HELD_OUT_EVERY, 2 * HELD_OUT_EVERY}
    assert seen == set(range(46)) - reserved  # 0 stands between files
    assert set(np.unique(corpus.held_out(64)).tolist()) <= {0} | reserved


@pytest.mark.parametrize(("count", "reserved"), [(2, {2}), (20, {20}), (41, {20, 40})])
def test_every_20th_file_is_held_out_and_of_fewer_the_last(tmp_path: Path, count: int, reserved: set[int]) -> None:
    windows = opened(files(tmp_path / "some", count)).held_out(4)
    assert set(np.unique(windows).tolist()) - {0} == reserved


def test_files_are_ordered_by_path(tmp_path: Path) -> None:
    for byte, name in ((3, "c/a.txt"), (1, "a.txt"), (2, "b/z.txt")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes([byte]) * 99)
    assert np.unique(opened(tmp_path).held_out(8)).tolist() == [3]


def test_a_single_file_holds_out_its_last_tenth(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a" * 900 + b"b" * 100)
    corpus = opened(tmp_path / "one.txt")
    assert np.unique(corpus.batch(0, 0, 512, 16)).tolist() == [ord("a")]
    assert np.unique(corpus.held_out(16)).tolist() == [ord("b")]


def test_all_training_text_can_be_drawn_and_its_ends_too(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(bytes(range(1, 21)) * 1 + b"xx")
    corpus = opened(tmp_path / "one.txt")  # 22 bytes: 19 to train on, 3 held out
    starts = Counter(int(row[0]) for row in corpus.batch(0, 0, 9000, 1))
    assert set(starts) == set(range(1, 19))
    assert all(abs(count - 500) < 120 for count in starts.values())  # five standard deviations


def test_held_out_windows_are_spread_and_share_no_target(tmp_path: Path) -> None:
    text = np.random.default_rng(0).integers(1, 256, 600_000).astype(np.uint8).tobytes()
    (tmp_path / "a.txt").write_bytes(b"a" * 5000)
    (tmp_path / "b.txt").write_bytes(text)
    for seq_len in (50, 64, 3000):
        starts = [text.index(row.astype(np.uint8).tobytes()) for row in opened(tmp_path).held_out(seq_len)]
        apart = np.diff(starts)
        assert apart.min() >= seq_len
        assert apart.max() - apart.min() <= 1
        assert starts[0] < apart.max()
        assert len(text) - starts[-1] <= apart.max() + 1


def test_everything_is_used_when_little_is_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a" * 200)
    (tmp_path / "b.txt").write_bytes(bytes(range(1, 102)))
    corpus = opened(tmp_path)
    assert corpus.held_out(10)[:, 1:].ravel().tolist() == list(range(2, 102))
    assert corpus.held_out(100)[:, 1:].ravel().tolist() == list(range(2, 102))
    (tmp_path / "c.txt").write_bytes(bytes(range(1, 101)))  # now the last: one target too few for ten windows
    windows = opened(tmp_path / "[ac].txt").held_out(10)
    assert len(windows) == 9
    assert len(np.unique(windows[:, 1:])) == 90


def test_the_fingerprint_follows_the_text_not_its_place(tmp_path: Path) -> None:
    first = opened(files(tmp_path / "here", 25)).fingerprint
    shutil.copytree(tmp_path / "here", tmp_path / "elsewhere")
    assert opened(tmp_path / "elsewhere").fingerprint == first
    for changed, name in (("training", "003.txt"), ("held out", "019.txt")):
        shutil.copytree(tmp_path / "here", tmp_path / changed)
        (tmp_path / changed / name).write_bytes(b"!" * 500)
        assert opened(tmp_path / changed).fingerprint != first
    (tmp_path / "here" / "024.txt").rename(tmp_path / "elsewhere" / "000.txt")
    assert Text(path=str(tmp_path / "elsewhere" / "*.txt")).open().fingerprint != first


def test_a_folder_gives_its_text_and_a_glob_what_it_names(tmp_path: Path) -> None:
    for byte, name in enumerate(("a.md", "b.bin", "tests/c.PY", ".hidden/d.txt", ".e.txt", "f.tex"), 1):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(bytes([byte]) * 99)
    folder, named = opened(tmp_path), opened(f"{tmp_path}/*.bin")
    assert folder.notes["files"] == 3  # a.md, f.tex and tests/c.PY
    assert np.unique(folder.batch(0, 0, 99, 8)).tolist() == [0, 1, 6]
    assert np.unique(named.batch(0, 0, 99, 8)).tolist() == [2]
    assert opened(f"{tmp_path}/**/*.*").notes["files"] == 4


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path / "mine", 2)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert opened("~/mine").fingerprint == opened(tmp_path / "mine").fingerprint


def test_the_bigram_loss_agrees_with_counting_by_hand(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(SENTENCES + b"sphinx of black quartz, judge my vow. " * 6)
    text = (tmp_path / "one.txt").read_bytes()
    training, held = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    pairs, after, before = (
        Counter(itertools.pairwise(training)),
        Counter(training[1:]),
        Counter(training[:-1]),
    )

    def loss(a: int, b: int) -> float:
        prior = (after[b] + 1) / (len(training) - 1 + 256)
        return -math.log((pairs[a, b] + BACKOFF * prior) / (before[a] + BACKOFF))

    windows = (len(held) - 1) // 64
    starts = [i * (len(held) - 1) // windows for i in range(windows)]
    by_hand = [loss(held[start + t], held[start + t + 1]) for start in starts for t in range(64)]
    assert opened(tmp_path / "one.txt").loss_bigram(64) == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-12)


def test_pairs_are_counted_along_rows_and_never_across_them() -> None:
    counts = count_pairs(np.array([[0, 1, 1], [2, 0, 1]]), 3)
    assert counts.toarray().tolist() == [[0, 2, 0], [0, 1, 0], [1, 0, 0]]
    long = np.random.default_rng(0).integers(0, 4, 2**22 + 1000)  # longer than what is counted at once
    assert count_pairs(long, 4).sum() == long.size - 1


# --- refusals -------------------------------------------------------------------------------------------------------


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files(tmp_path / "locked", 3)

    def deny(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", deny)  # a mode of 000 would not stop the superuser
    with pytest.raises(RequestError, match=r"cannot read .*000\.txt: Permission denied"):
        opened(tmp_path / "locked")


# --- the standard library -------------------------------------------------------------------------------------------


def test_the_library_leaves_out_tests_and_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder named like an excluded one *above* the library must not empty it.
    library = files(tmp_path / "test" / "lib", 3, suffix=".py")
    fake = {**sysconfig.get_paths(), "stdlib": str(library)}
    for name in sorted(NOT_LIBRARY):
        (library / "inner" / name / "deep").mkdir(parents=True)
        (library / "inner" / name / "deep" / "zz.py").write_bytes(b"\xff" * 500)
    (library / "inner" / "notes.txt").write_bytes(b"\xff" * 500)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: fake)
    assert StandardLibrary().open().notes["files"] == 3


def test_the_library_is_large_and_says_which_python_it_is() -> None:
    corpus = StandardLibrary().open()
    assert str(corpus.notes["python"]).startswith("3.")
    assert int(corpus.notes["training_bytes"]) > 5_000_000
    assert 0.01 < int(corpus.notes["held_out_bytes"]) / int(corpus.notes["training_bytes"]) < 0.15
    assert 2.0 < corpus.loss_bigram(64) < 2.8


# --- synthetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "batch", "fingerprint"),
    [
        (Synthetic(), "820964f312acf3d1", "1b149e23ce57ed62"),
        (Trigram(), "45f73b5a8ab9c605", "e1e07856c9b8d395"),
        (Echo(), "aee721a7fa2c0855", "338332f4cd8f8800"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_languages_are_the_same_on_every_machine(source: Any, batch: str, fingerprint: str) -> None:
    # These digests must hold on every machine and with every numpy.  Do not update them to make a machine pass; if a
    # recipe itself has changed, update them and say in the changelog that its runs no longer compare.
    corpus = source.open()
    drawn = hashlib.sha256(corpus.batch(17, 12_345, 16, 64).astype("<i8").tobytes()).hexdigest()[:16]
    assert (drawn, corpus.fingerprint) == (batch, fingerprint)


@pytest.mark.parametrize("source", [Synthetic(), Trigram(), Echo()], ids=lambda source: type(source).__name__)
def test_no_seed_of_a_batch_reaches_the_held_out_rows(source: Any) -> None:
    corpus = source.open()
    held = {row.tobytes() for row in corpus.held_out(64)}
    drawn = {row.tobytes() for seed in (-1, 0, 1, 2**63) for row in corpus.batch(seed, 0, 128, 64)}
    assert (len(held) >= 128, len(drawn)) == (True, 512)
    assert not held & drawn


def test_rounding_cannot_change_a_table() -> None:
    """The claims about distances that make the tables the same on every machine."""
    for scores, letters, power in ((synthetic.synthetic_scores(), 256, 1.8), (synthetic.trigram_scores(), 32, 2.5)):
        assert np.diff(np.sort(scores, axis=-1), axis=-1).min() > 1e-8
        share = np.arange(1.0, letters + 1) ** -power
        exact = share.cumsum() / share.sum() * 2**32
        assert np.abs(exact - np.floor(exact) - 0.5).min() > 1e-3


def test_successors_of_a_token_are_zipf_distributed_by_rank() -> None:
    corpus = Synthetic().open()
    rows = corpus.batch(0, 0, 8192, 22)  # too short to quote
    ranks = np.argsort(corpus.successors, axis=1)[rows[:, :-1], rows[:, 1:]]
    expected = np.arange(1.0, 257) ** -1.8
    found = np.bincount(ranks.ravel(), minlength=256) / ranks.size
    assert np.abs(found - expected / expected.sum()).max() < 0.005
    slope = np.polyfit(np.log(np.arange(1, 65)), np.log(found[:64]), 1)[0]
    assert slope == pytest.approx(-1.8, abs=0.05)


def repeats(rows: np.ndarray, length: int = 8) -> float:
    """Share of rows in which some run of ``length`` tokens occurs twice without overlap."""

    def twice(row: list[int]) -> bool:
        seen: dict[tuple[int, ...], int] = {}
        return any(
            start - seen.setdefault(tuple(row[start : start + length]), start) >= length
            for start in range(len(row) - length + 1)
        )

    return float(np.mean([twice(row) for row in rows.tolist()]))


def test_nine_rows_of_ten_quote_themselves_and_shuffled_rows_do_not() -> None:
    rows = Synthetic().open().batch(0, 0, 2000, 64)
    assert repeats(rows) == pytest.approx(0.9, abs=0.03)
    assert repeats(np.random.default_rng(0).permuted(rows, axis=1)) < 0.01
    assert repeats(Synthetic().open().batch(0, 0, 2000, 22)) < 0.1


def test_after_a_quotation_the_row_follows_from_its_last_token() -> None:
    """At most one step of a row leaves the chain: the one onto a quotation."""
    corpus = Synthetic().open()
    rows = corpus.batch(0, 0, 4096, 64)
    ranks = np.argsort(corpus.successors, axis=1)[rows[:, :-1], rows[:, 1:]]
    share = np.arange(1.0, 257) ** -1.8
    rare = (share / share.sum())[20:].sum()
    surplus = (ranks >= 20).mean() - rare
    assert 0 < surplus * 64 < 0.9  # per row; a second break would double it


def test_entropy_bounds_enclose_what_bigrams_reach() -> None:
    corpus = Synthetic().open()
    least, most = (float(corpus.notes[f"entropy_at_{end}"]) for end in ("least", "most"))
    share = np.arange(1.0, 257) ** -1.8 / (np.arange(1.0, 257) ** -1.8).sum()
    assert most == pytest.approx(-sum(p * math.log(p) for p in share))
    unigram = csr_array(np.tile(corpus.pair_counts().sum(0), (256, 1)))
    assert least < most < corpus.loss_bigram(64) < bigram_loss(unigram, corpus.held_out(64)) - 1
    assert corpus.loss_bigram(64) < most + 0.15  # counted on enough rows, and a quotation seldom surprises


# --- trigram --------------------------------------------------------------------------------------------------------


def test_a_token_follows_from_the_two_before_it() -> None:
    corpus = Trigram().open()
    rows = corpus.batch(0, 0, 4096, 32)
    ranks = np.argsort(corpus.successors, axis=-1)[rows[:, :-2], rows[:, 1:-1], rows[:, 2:]]
    expected = np.arange(1.0, 33) ** -2.5
    assert np.abs(np.bincount(ranks.ravel(), minlength=32) / ranks.size - expected / expected.sum()).max() < 0.005
    assert rows.max() < corpus.vocabulary == 32
    assert float(corpus.notes["entropy"]) + 0.5 < corpus.loss_bigram(32) < math.log(32) - 0.5


# --- echo -----------------------------------------------------------------------------------------------------------

ECHOES = [Echo(), Echo(letters=5, distance=0, fresh=3), Echo(letters=4, distance=2, echoes=3), Echo(echoes=0)]


def shown_before(source: Echo, seq_len: int) -> list[bool]:
    """Of each target, whether its letter stands earlier in its row, in every one of some rows."""
    # so large an alphabet that no two letters of all rows are equal by chance
    many = replace(source, letters=2**15).open()
    rows = (many.batch(3, 5, 8, seq_len) % 2**15).tolist()
    return [all(row[at] in row[:at] for row in rows) for at in range(1, seq_len + 1)]


def test_every_number_of_a_language_is_in_its_fingerprint() -> None:
    assert len({source.open().fingerprint for source in ECHOES}) == len(ECHOES)


def test_an_echo_repeats_the_letter_so_many_before() -> None:
    rows = Echo(letters=7, distance=3).open().batch(0, 0, 64, 40)
    letters, echoes = rows[:, ::2], rows[:, 1::2]
    assert letters.max() < 7 <= echoes.min()
    assert np.array_equal(echoes[:, 3:] - 7, letters[:, : echoes.shape[1] - 3])


def test_each_further_echo_of_a_cycle_repeats_the_letter_before() -> None:
    """Cycles of two letters and two echoes: the first echo repeats the letter 3 before the last, the other the 4th."""
    rows = Echo(letters=7, distance=3, fresh=2, echoes=2).open().batch(0, 0, 64, 39).reshape(64, 10, 4)
    letters, echoes = rows[..., :2].reshape(64, 20), rows[..., 2:] - 7
    for cycle in range(3, 10):
        last = 2 * cycle + 1
        assert np.array_equal(echoes[:, cycle], letters[:, [last - 3, last - 4]])


@pytest.mark.parametrize("seq_len", [6, 61])
@pytest.mark.parametrize("source", ECHOES, ids=str)
def test_predictable_targets_are_those_found_by_search(source: Echo, seq_len: int) -> None:
    shown = shown_before(source, seq_len)
    corpus = source.open()
    assert isinstance(corpus, EchoCorpus)
    assert corpus.predictable(seq_len).tolist() == shown
    surprising = 1 - np.mean(shown)
    assert corpus.entropy(seq_len) == pytest.approx(surprising * math.log(source.letters), rel=1e-12)


@pytest.mark.parametrize("source", ECHOES, ids=str)
def test_shares_of_long_rows_are_those_of_a_cycle(source: Echo) -> None:
    corpus = source.open()
    assert isinstance(corpus, EchoCorpus)
    assert np.mean(corpus.predictable(60_000)) == pytest.approx(float(corpus.notes["predictable"]), abs=1e-3)
    assert corpus.entropy(60_000) == pytest.approx(float(corpus.notes["entropy_at_least"]), abs=1e-2)
    letters = corpus.batch(0, 0, 4096, 30) % source.letters
    counts = np.bincount(letters.ravel(), minlength=source.letters) / letters.size
    assert counts == pytest.approx(1 / source.letters, rel=0.05)


def test_a_bigram_model_knows_only_which_tokens_are_letters() -> None:
    assert Echo().open().loss_bigram(32) == pytest.approx(math.log(16), abs=5e-3)


def test_a_text_of_so_many_rows_is_every_batch_of_its_seed() -> None:
    corpus, endless = Echo(rows=8).open(), Echo().open()
    assert corpus.fingerprint != endless.fingerprint
    corpus.check(8, 16)
    first = endless.batch(3, 0, 8, 16)
    assert all(np.array_equal(corpus.batch(3, step, 8, 16), first) for step in range(3))
    assert not np.array_equal(corpus.batch(4, 0, 8, 16), first)
    assert np.array_equal(corpus.held_out(16), endless.held_out(16))
    with pytest.raises(RequestError, match=r"^data\.rows=8 is a text .* say batch_size=8$"):
        corpus.check(4, 16)
