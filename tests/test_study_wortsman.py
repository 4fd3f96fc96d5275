"""What the study of Wortsman et al. adds to training: a text that one window holds."""

from __future__ import annotations

import pytest

from lab.core.errors import RequestError
from lab.data.synthetic import Synthetic
from lab.studies.wortsman.plugin import SyntheticSample


def test_one_window_of_a_sample_is_its_whole_text() -> None:
    corpus = SyntheticSample(tokens=300).open()
    text = Synthetic().open().held_out(64).ravel()[:300]
    for seed, step in ((0, 0), (5, 77)):
        assert corpus.batch(seed, step, 1, 299).tolist() == [text.tolist()]
    assert corpus.held_out(299).tolist() == [text.tolist()]
    assert SyntheticSample(tokens=301).open().fingerprint != corpus.fingerprint
    with pytest.raises(RequestError, match="at most seq_len=299"):
        corpus.batch(0, 0, 1, 300)
