"""The search for spikes of a model's own on text nearer to language: its rows, what it counts, and what a page says."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from lab.data.corpus import Corpus

RESULTS = Path(__file__).parents[2] / "results"
SCRIPT = runpy.run_path(str(RESULTS / "own_spike_search.py"))
SEARCH: dict[str, Any] = yaml.safe_load((RESULTS / "own_spike_search.yaml").read_text())
LENGTH = 64


def corpus(kind: str, alphabet: str = "letters", period: int = 100) -> Corpus:
    opened: Corpus = SCRIPT["NearTextSource"](kind=kind, alphabet=alphabet, period=period).open()
    return opened


def rows(kind: str, alphabet: str = "letters") -> np.ndarray:
    return corpus(kind, alphabet).batch(seed=5, step=7, batch_size=200, seq_len=LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "alphabet"),
    [*((kind, "letters") for kind in SCRIPT["KINDS"] if kind != "turns"), ("echoed", "bytes"), ("turns", "bytes")],
)
def test_rows_are_a_function_of_seed_and_step_and_below_the_vocabulary(kind: str, alphabet: str) -> None:
    one = corpus(kind, alphabet)
    drawn = one.batch(5, 7, 16, LENGTH)
    np.testing.assert_array_equal(drawn, one.batch(5, 7, 16, LENGTH))
    assert not np.array_equal(drawn, one.batch(5, 8, 16, LENGTH))
    assert not np.array_equal(drawn, one.batch(6, 7, 16, LENGTH))
    for tokens in (drawn, one.held_out(LENGTH)):
        assert tokens.shape[1] == LENGTH + 1
        assert tokens.min() >= 0
        assert tokens.max() < one.vocabulary
    assert one.pair_counts().shape == (one.vocabulary, one.vocabulary)


def test_every_span_is_followed_by_its_copy() -> None:
    tokens, span = rows("copied"), SCRIPT["SPAN"]
    np.testing.assert_array_equal(tokens[:, :span], tokens[:, span : 2 * span])
    np.testing.assert_array_equal(tokens[:, 2 * span : 3 * span], tokens[:, 3 * span : 4 * span])
    assert (tokens[:, :span] != tokens[:, 2 * span : 3 * span]).any(axis=1).mean() > 0.9


def test_every_echo_is_the_letter_three_before() -> None:
    tokens, half, distance = rows("echoed"), SCRIPT["ALPHABETS"]["letters"], SCRIPT["DISTANCE"]
    fresh, echoes = tokens[:, ::2], tokens[:, 1::2]
    assert fresh.max() < half <= echoes.min()
    np.testing.assert_array_equal(echoes[:, distance:] - half, fresh[:, : echoes.shape[1] - distance])


def test_half_of_the_rows_are_from_the_document_and_an_eighth_are_long() -> None:
    one = corpus("document")
    document = "".join(map(chr, one.training[: SCRIPT["DOCUMENT"]]))  # type: ignore[attr-defined]
    inside = ["".join(map(chr, row)) in document for row in rows("document")]
    assert np.mean(inside) == pytest.approx(0.5, abs=0.12)
    is_padded = (rows("padded")[:, SCRIPT["SHORT"] :] == SCRIPT["PADS"]["letters"]).all(axis=1)
    assert np.mean(is_padded) == pytest.approx(7 / 8, abs=0.08)


def test_topics_take_turns_and_the_held_out_rows_have_all_of_them() -> None:
    one = corpus("turns", "bytes", period=10)
    topic_of = [set(np.digitize(one.batch(0, step, 8, 32), SCRIPT["FIRSTS"][1:]).ravel()) for step in range(40)]
    assert topic_of == [{step // 10 % 3} for step in range(40)]
    assert np.unique(np.digitize(one.held_out(32)[:3], SCRIPT["FIRSTS"][1:])).tolist() == [0, 1, 2]


def test_only_a_spike_that_the_held_out_loss_shows_is_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two arms of a seed: one spikes in both losses, the other at the same step in its training loss alone."""
    noise = np.random.default_rng(0).normal(0, 0.01, (2, 2, 1200))
    train_rn, held_rn = 2 + noise[0], 2 + noise[1, :, 1:]
    train_rn[:, 800:804] += 0.5
    held_rn[0, 799:803] += 0.4  # a step earlier in the array, since the first step has no held-out loss
    held_rn[:, -1] += 5  # measured on other rows
    made = {"made": {"data": {"period": 400}}}
    search = SEARCH | {"lr": [0.02], "beta2": [0.99, 0.999], "seeds": [0], "settings": made}
    monkeypatch.setitem(SCRIPT["losses"].__globals__, "LOSSES", tmp_path)
    np.savez(tmp_path / "made.npz", train=train_rn, held=held_rn, seconds=1.0, bigram=3.0)
    table = pd.DataFrame(SCRIPT["rows"](search, "made"))
    assert table["train_spikes"].tolist() == [1, 1]
    assert table["train_shared"].tolist() == [1, 1]
    assert table["own"].tolist() == [1, 0]
    assert table["held_out_spikes"].tolist() == [1, 0]
    assert table["held_out_shared"].tolist() == [0, 0]
    assert table["held_out_back"].tolist() == [1, 0]
    assert table["own_rise"][0] == pytest.approx(0.4, abs=0.05)
    assert abs(table["control_rise"][0]) < 0.05
    assert table["own_at_turns"].tolist() == table["held_out_at_turns"].tolist() == [1, 0]  # topics turn at step 800


def test_every_run_of_the_search_is_in_the_table() -> None:
    table = pd.read_csv(RESULTS / "own_spike_search.csv")
    expected = [(name, *point) for name in SEARCH["settings"] for point in SCRIPT["points"](SEARCH, name)]
    assert [tuple(row) for row in table[["setting", "lr", "beta2", "seed"]].to_numpy(dtype=object)] == expected


def test_the_page_has_the_table_of_the_search() -> None:
    table = pd.read_csv(RESULTS / "own_spike_search.csv")
    begin, end = SCRIPT["MARKS"]
    shown = SCRIPT["PAGE"].read_text(encoding="utf-8").partition(begin)[2].partition(end)[0]
    assert shown.strip().splitlines() == list(SCRIPT["shown"](SEARCH, table))
