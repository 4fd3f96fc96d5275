"""Tokens: a learned vocabulary follows from the training part alone, and is made once; bytes stay what they are."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import decoders

from lab import PackedCorpus
from lab.core.errors import RequestError
from lab.data import packing, tokenizer
from lab.data.corpus import BACKOFF
from lab.data.text import StandardLibrary, Text
from lab.data.tokenizer import Pieces, learned
from small import forget_data

WORDS = ["lamp", "river", "stone", "bright", "under", "walking", "quietly", "seven", "orange", "window", "paper"]


def prose(seed: int, words: int = 300) -> str:
    return " ".join(np.random.default_rng(seed).choice(WORDS, words))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("LAB_CACHE", str(tmp_path_factory.mktemp("cache")))
    forget_data()
    yield
    forget_data()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty short documents."""
    for place in range(1, 41):
        (tmp_path / f"{place:02}.txt").write_text(prose(place))
    return tmp_path


def opened(path: Path, vocabulary: int = 300) -> PackedCorpus:
    """As another process would open it."""
    forget_data()
    corpus = Text(path=str(path), tokenizer="bpe", vocabulary=vocabulary).open()
    assert isinstance(corpus, PackedCorpus)
    return corpus


def kept() -> list[Path]:
    return sorted(Path(os.environ["LAB_CACHE"]).glob("tokens/*"))


def test_the_vocabulary_is_as_large_as_asked_and_no_token_lies_beyond(folder: Path) -> None:
    corpus = opened(folder, 310)
    assert corpus.vocabulary == 310
    assert 256 < corpus.training.max() < 310
    assert (corpus.training > 255).mean() > 0.7
    assert corpus.training.size < int(corpus.notes["training_bytes"]) / 2
    assert corpus.notes["training_tokens"] == corpus.training.size
    assert corpus.notes["held_out_tokens"] == corpus.reserved.size


def test_tokens_say_the_text_and_where_documents_end(folder: Path) -> None:
    corpus = opened(folder)
    written = [prose(place).encode() for place in range(1, 41)]
    pieces = learned([d for place, d in enumerate(written, 1) if place % 20], 300)
    (between,) = pieces.between
    pieces.model.decoder = decoders.ByteLevel()
    for tokens, places in ((corpus.training, [p for p in range(1, 41) if p % 20]), (corpus.reserved, [20, 40])):
        ends = np.flatnonzero(tokens == between)
        assert len(ends) == len(places) - 1
        split = [piece.tolist() for piece in np.split(tokens, ends)]
        said = [pieces.model.decode([token for token in piece if token != between]) for piece in split]
        assert said == [prose(place) for place in places]


def test_the_held_out_part_teaches_nothing(folder: Path) -> None:
    before = opened(folder)
    (folder / "20.txt").write_text("zyzzyva " * 500)
    after = opened(folder)
    assert np.array_equal(before.training, after.training)
    assert before.fingerprint != after.fingerprint
    (folder / "19.txt").write_text("zyzzyva " * 500)
    assert not np.array_equal(after.training[:1000], opened(folder).training[:1000])


@pytest.mark.slow
def test_learning_is_the_same_in_every_process(folder: Path) -> None:
    here = opened(folder).fingerprint
    code = "import sys; from lab.data.text import Text; print(Text(sys.argv[1], 'bpe', 300).open().fingerprint)"
    other = {**os.environ, "RAYON_NUM_THREADS": "1", "LAB_CACHE": str(folder / ".cache")}
    command = [sys.executable, "-c", code, str(folder)]
    assert subprocess.run(command, env=other, capture_output=True, text=True, check=True).stdout.strip() == here


def test_tokens_are_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(folder)

    def learn(*_: object) -> Pieces:
        raise AssertionError("learned again")

    monkeypatch.setattr(packing, "learned", learn)
    again = opened(folder)
    assert again.fingerprint == first.fingerprint
    assert again.notes == first.notes
    assert np.array_equal(again.batch(3, 5, 4, 32), first.batch(3, 5, 4, 32))
    with pytest.raises(AssertionError, match="learned again"):
        opened(folder, 301)


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_what_is_damaged_is_made_anew(folder: Path, damage: str) -> None:
    first = opened(folder)
    training, reserved = first.training.copy(), first.reserved.copy()
    (place,) = kept()
    match damage:
        case "changed":
            whole = bytearray((place / "reserved").read_bytes())
            whole[50] ^= 1
            (place / "reserved").write_bytes(whole)
        case "gone":
            (place / "reserved").unlink()
    again = opened(folder)
    assert np.array_equal(again.training, training)
    assert np.array_equal(again.reserved, reserved)
    assert kept() == [place]
    assert json.loads((place / "about.json").read_text())["fingerprint"] == first.fingerprint


def test_of_two_that_make_the_same_tokens_one_wins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = []

    def slow(*arguments: Any) -> Pieces:
        monkeypatch.setattr(packing, "learned", learned)
        others.append(opened(folder))  # another process was faster
        return learned(*arguments)

    monkeypatch.setattr(packing, "learned", slow)
    mine = opened(folder)
    assert mine.fingerprint == others[0].fingerprint
    assert np.array_equal(others[0].training, mine.training)
    assert len(kept()) == 1
    assert not [path for path in kept()[0].parent.iterdir() if path.name.startswith(".")]


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "vocabulary", "complaint"),
    [
        ("bytes", 300, "^data.tokenizer=bytes has 256 tokens, not 300; give data.tokenizer=bpe"),
        ("bpe", 256, "^data.tokenizer=bpe needs data.vocabulary above 256"),
        ("bpe", 50_000, r"^the text gives \d+ tokens, fewer than data.vocabulary=50000$"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(folder: Path, name: str, vocabulary: int, complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint):
        Text(path=str(folder), tokenizer=name, vocabulary=vocabulary).open()
    assert not kept()


def test_a_cache_that_cannot_be_written_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("LAB_CACHE", str(folder / "file"))
    with pytest.raises(RequestError, match=r"^cannot keep tokens in .*file/tokens: Not a directory; LAB_CACHE=DIR"):
        opened(folder)


def test_a_missing_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise tokenizer.PackageNotFoundError(package)

    monkeypatch.setattr(tokenizer, "version", absent)
    complaint = r"^data.tokenizer=bpe needs an extra: pip install 'instability-lab\[data\]'$"
    with pytest.raises(RequestError, match=complaint):
        opened(folder)


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_bytes_need_no_cache(folder: Path) -> None:
    corpus = Text(path=str(folder)).open()
    assert corpus.vocabulary == StandardLibrary().vocabulary == 256
    assert corpus.training.tobytes() == b"\0".join(prose(place).encode() for place in range(1, 41) if place % 20)
    assert not kept()


# --- many tokens ----------------------------------------------------------------------------------------------------


def test_bigrams_of_a_large_vocabulary_are_counted_without_a_table_of_all() -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 30_000).clip(max=2**17).astype(np.uint32) - 1
    corpus = PackedCorpus(
        training=tokens[:20_000], reserved=tokens[20_000:], fingerprint="", notes={}, vocabulary=2**17
    )
    pairs, before, after = (
        Counter(itertools.pairwise(corpus.training.tolist())),
        Counter(corpus.training[:-1].tolist()),
        Counter(corpus.training[1:].tolist()),
    )
    rows = corpus.held_out(64)
    losses = [
        -math.log((pairs[a, b] + BACKOFF * (after[b] + 1) / (19_999 + 2**17)) / (before[a] + BACKOFF))
        for a, b in zip(rows[:, :-1].ravel().tolist(), rows[:, 1:].ravel().tolist(), strict=True)
    ]
    assert corpus.loss_bigram(64) == pytest.approx(sum(losses) / len(losses), rel=1e-12)
