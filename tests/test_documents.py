"""Documents: rows of files and of data sets become the corpus that files would, once; what is none is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from lab import PackedCorpus
from lab.core.errors import RequestError
from lab.data import huggingface, text, tokenizer
from lab.data.huggingface import HuggingFace
from lab.data.text import JsonLines, Parquet, Text
from small import forget_data

TEXTS = [
    f"document {place} says {'äß€ ' * (place % 3)}{place * place} times {chr(97 + place % 26) * 30}"
    for place in range(1, 61)
]
HELD_OUT = [TEXTS[19], TEXTS[39], TEXTS[59]]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("LAB_CACHE", str(place))
    forget_data()
    return place


def opened(source: Any) -> PackedCorpus:
    """As another process would open it."""
    forget_data()
    corpus = source.open()
    assert isinstance(corpus, PackedCorpus)
    return corpus


def jsonl(file: Path, texts: list[str], **more: object) -> Path:
    file.write_text("".join(json.dumps({"id": 0, "text": each, **more}) + "\n" for each in texts))
    return file


def parquet(file: Path, texts: list[str]) -> Path:
    pd.DataFrame({"id": 0, "text": texts}).to_parquet(file, row_group_size=7)
    return file


def said(tokens: np.ndarray) -> list[str]:
    return tokens.tobytes().decode().split("\0")


WRITTEN: dict[str, tuple[Callable[..., Path], Any]] = {"jsonl": (jsonl, JsonLines), "parquet": (parquet, Parquet)}


@pytest.fixture(params=WRITTEN)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- one's own tables -----------------------------------------------------------------------------------------------


def test_rows_are_documents_and_every_20th_is_held_out(tmp_path: Path, kind: str) -> None:
    write, source = WRITTEN[kind]
    for number in range(3):  # twenty documents each, in the order of the names
        write(tmp_path / f"{number}.{kind}", TEXTS[number * 20 : number * 20 + 20])
    corpus = opened(source(path=str(tmp_path)))
    assert said(corpus.training) == [each for each in TEXTS if each not in HELD_OUT]
    assert said(corpus.reserved) == HELD_OUT
    assert corpus.vocabulary == 256
    assert corpus.notes["files"] == 3
    assert corpus.notes["held_out_bytes"] == sum(len(each.encode()) for each in HELD_OUT)
    (tmp_path / "text").mkdir()
    for number, each in enumerate(TEXTS):
        (tmp_path / f"text/{number:02}.txt").write_text(each)
    assert corpus.fingerprint == opened(Text(path=str(tmp_path / "text"))).fingerprint


def test_a_file_and_a_pattern_give_what_they_name(tmp_path: Path, kind: str) -> None:
    write, source = WRITTEN[kind]
    (tmp_path / "x").mkdir()
    for number in range(3):
        write(tmp_path / f"x/{number}.other", TEXTS[number * 20 : number * 20 + 20])
    assert said(opened(source(path=str(tmp_path / "x/1.other"))).reserved) == [TEXTS[39]]
    assert said(opened(source(path=f"{tmp_path}/x/*[02].other")).reserved) == [TEXTS[19], TEXTS[59]]
    with pytest.raises(RequestError, match=rf"^data.path=.*/x holds no {kind} file$"):
        opened(source(path=str(tmp_path / "x")))


def test_another_field_is_other_documents(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", TEXTS, body="words of the body")
    assert set(said(opened(JsonLines(path=str(file), field="body")).training)) == {"words of the body"}
    assert said(opened(JsonLines(path=str(file))).reserved) == HELD_OUT


def test_rows_are_read_once_until_they_change(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, source = WRITTEN[kind]
    file, reads = write(tmp_path / f"a.{kind}", TEXTS), []
    read = text.READERS[kind]
    monkeypatch.setitem(text.READERS, kind, lambda file, field: reads.append(file) or read(file, field))
    first = opened(source(path=str(file)))
    assert opened(source(path=str(file))).fingerprint == first.fingerprint
    assert len(reads) == 1
    write(file, [*TEXTS[:-1], "changed"])
    assert opened(source(path=str(file))).fingerprint != first.fingerprint
    assert len(reads) == 2


def test_rows_are_also_read_as_learned_tokens(tmp_path: Path, kind: str) -> None:
    write, source = WRITTEN[kind]
    file = write(tmp_path / f"a.{kind}", TEXTS)
    corpus = opened(source(path=str(file), tokenizer="bpe", vocabulary=300))
    assert corpus.vocabulary == 300
    assert 256 <= corpus.training.max() < 300
    (tmp_path / "text").mkdir()
    for number, each in enumerate(TEXTS):
        (tmp_path / f"text/{number:02}.txt").write_text(each)
    assert corpus.fingerprint == opened(Text(path=str(tmp_path / "text"), tokenizer="bpe", vocabulary=300)).fingerprint


def test_hugging_face_without_the_extra_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(package: str) -> str:
        raise tokenizer.PackageNotFoundError(package)

    monkeypatch.setattr(tokenizer, "version", absent)
    with pytest.raises(RequestError, match=r"^data=huggingface needs an extra: pip install 'instability-lab\[data\]'$"):
        opened(HuggingFace(path=str(tmp_path)))


# --- Hugging Face ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Laid out like a data set of the Hub."""
    (tmp_path / "set").mkdir()
    parquet(tmp_path / "set/train-00000.parquet", TEXTS[:30])
    parquet(tmp_path / "set/train-00001.parquet", TEXTS[30:])
    return tmp_path / "set"


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer as the Hub has them: a token per word, one for what it does not know, and an end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    known = sorted({word for each in TEXTS for word in each.split()} - {"3481"})
    model = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, **{w: i for i, w in enumerate(known, 2)}}, "<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.enable_truncation(2)
    (tmp_path / "words").mkdir()
    model.save(str(tmp_path / "words/tokenizer.json"))
    return tmp_path / "words"


@pytest.mark.extras
def test_without_validation_every_20th_document_is_held_out(folder: Path, tmp_path: Path) -> None:
    corpus = opened(HuggingFace(path=str(folder), tokens=10**6))
    assert said(corpus.training) == [each for each in TEXTS if each not in HELD_OUT]
    assert said(corpus.reserved) == HELD_OUT
    (tmp_path / "lines").mkdir()
    jsonl(tmp_path / "lines/any.jsonl", TEXTS)
    assert opened(HuggingFace(path=str(tmp_path / "lines"), tokens=10**6)).fingerprint == corpus.fingerprint


@pytest.mark.extras
def test_a_data_set_with_validation_holds_that_out(folder: Path) -> None:
    parquet(folder / "validation-00000.parquet", ["never seen in training", "nor this"])
    corpus = opened(HuggingFace(path=str(folder), tokens=10**6))
    assert said(corpus.training) == TEXTS
    assert said(corpus.reserved) == ["never seen in training", "nor this"]


@pytest.mark.extras
def test_so_many_tokens_are_taken_and_no_more(folder: Path) -> None:
    corpus = opened(HuggingFace(path=str(folder), tokens=200))
    assert (corpus.training.size, corpus.reserved.size) == (200, 10)
    assert corpus.training.tobytes() == "\0".join(TEXTS).encode()[:200]
    assert corpus.notes["training_tokens"] == 200
    again = opened(HuggingFace(path=str(folder), tokens=300))
    assert np.array_equal(again.training[:200], corpus.training)


@pytest.mark.extras
def test_a_tokenizer_of_others_ends_documents_as_it_does(folder: Path, words: Path) -> None:
    corpus = opened(HuggingFace(path=str(folder), tokens=10**6, tokenizer=str(words), vocabulary=500))
    assert corpus.vocabulary == 500
    documents = np.split(corpus.reserved, np.flatnonzero(corpus.reserved == 1))
    assert [len(document) for document in documents] == [len(HELD_OUT[0].split())] + [
        len(t.split()) + 1 for t in HELD_OUT[1:]
    ]
    assert (corpus.training == 0).sum() == 1  # the one word it does not know
    with pytest.raises(RequestError, match=r"words has (\d+) tokens; give data.vocabulary=\1 or more$"):
        opened(HuggingFace(path=str(folder), tokens=10**6, tokenizer=str(words), vocabulary=10))


@pytest.mark.extras
def test_learned_tokens_come_from_the_training_part(folder: Path) -> None:
    asked = HuggingFace(path=str(folder), tokens=10**6, tokenizer="bpe", vocabulary=300)
    before = opened(asked)
    assert 256 <= before.training.max() < 300
    parquet(folder / "validation-00000.parquet", ["zyzzyva " * 500] * 3)
    after = opened(asked)
    held = before.reserved.size
    assert after.reserved.size != held
    parquet(folder / "validation-00000.parquet", ["other " * 500] * 3)
    assert np.array_equal(opened(asked).training, after.training)


@pytest.mark.extras
@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"split": "trian"}, "no split 'trian'; nearest: train$"),
        ({"field": "txt"}, "row 1: no field 'txt'; nearest: text$"),
        ({"subset": "en"}, "cannot read data.path=.*: .*'en' not found"),
        ({"tokenizer": "bytes", "vocabulary": 300}, "data.tokenizer=bytes has 256 tokens"),
        ({"tokens": 30}, "is too short: held out part of 1 tokens$"),
    ],
)
def test_what_is_not_in_a_data_set_is_told(folder: Path, values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(RequestError, match=complaint) as refusal:
        opened(HuggingFace(path=str(folder), **values))
    assert "\n" not in str(refusal.value)


@pytest.mark.extras
def test_without_a_network_it_is_told_within_seconds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    began = time.perf_counter()
    for values in (
        {"path": "allenai/c4"},
        {"path": str(folder), "tokenizer": "google-t5/t5-base", "vocabulary": 32101},
    ):
        with pytest.raises(RequestError, match=r"^cannot reach http://127\.0\.0\.1:9: .*refused"):
            opened(HuggingFace(**values))
    assert time.perf_counter() - began < 10


@pytest.mark.extras
def test_once_packed_nothing_is_streamed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = opened(HuggingFace(path=str(folder), seed=1))

    def stream(*_: object) -> None:
        raise AssertionError("streamed again")

    monkeypatch.setattr(huggingface, "_splits", stream)
    assert opened(HuggingFace(path=str(folder), seed=2)).fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="streamed again"):
        opened(HuggingFace(path=str(folder), tokens=500))
