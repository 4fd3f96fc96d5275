"""Batches are the same windows, wherever the tokens lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

import lab.training.fleet
from lab import Corpus, PackedCorpus
from lab.data.corpus import Tokens
from lab.data.synthetic import Synthetic
from lab.training.fleet import BatchLoader
from pieces import CPU

SEEDS = (7, 2, 7)


def packed(vocabulary: int, kind: type[PackedCorpus] = PackedCorpus) -> PackedCorpus:
    """Random tokens, the largest of all among them."""
    tokens = np.random.default_rng(0).integers(vocabulary, size=5000)
    tokens[::50] = vocabulary - 1
    made = tokens.astype(np.min_scalar_type(vocabulary - 1))
    return kind(training=made, reserved=made, fingerprint="", notes={}, vocabulary=vocabulary)


def feed(corpus: Corpus, *, resident: bool) -> BatchLoader:
    return BatchLoader(corpus, SEEDS, 4, 12, CPU, resident=resident)


@pytest.mark.parametrize(
    ("vocabulary", "kind"),
    [(256, torch.uint8), (257, torch.int16), (2**15, torch.int16), (2**15 + 1, torch.int32), (2**17, torch.int32)],
)
def test_tokens_on_the_device_make_the_batches_that_would_be_sent(vocabulary: int, kind: torch.dtype) -> None:
    there, sent = (feed(packed(vocabulary), resident=resident) for resident in (True, False))
    assert there.tokens_n is not None
    assert there.tokens_n.dtype == kind
    assert sent.tokens_n is None
    for step in (0, 1, 999):
        windows_rbt = there.batch(step)
        assert windows_rbt.dtype == torch.int64
        assert windows_rbt.shape == (3, 4, 13)
        assert torch.equal(windows_rbt, sent.batch(step))
        assert torch.equal(windows_rbt[0], windows_rbt[2])
        assert not torch.equal(windows_rbt[0], windows_rbt[1])


@dataclass(frozen=True, eq=False, kw_only=True)
class Backwards(PackedCorpus):
    """Somebody's own."""

    def batch(self, seed: int, step: int, batch_size: int, seq_len: int) -> Tokens:
        return super().batch(seed, step, batch_size, seq_len)[:, ::-1].copy()


@pytest.mark.parametrize("corpus", [Synthetic().open(), packed(256, Backwards)], ids=["synthetic", "own"])
def test_what_is_not_windows_of_a_text_is_sent(corpus: Corpus) -> None:
    sent = feed(corpus, resident=True)
    assert sent.tokens_n is None
    assert np.array_equal(sent.batch(3)[1].numpy(), corpus.batch(SEEDS[1], 3, 4, 12))


def test_a_long_text_stays_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.training.fleet, "RESIDENT_TOKENS", 4999)
    assert feed(packed(256), resident=True).tokens_n is None
    monkeypatch.setattr(lab.training.fleet, "RESIDENT_TOKENS", 5000)
    assert feed(packed(256), resident=True).tokens_n is not None
