"""What the study of loss spikes adds to training: its texts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.data.synthetic import Trigram
from lab.studies.spikes.data_plugin import BACKSLASH, ESCAPED, Escapes
from sweeping import finished

# --- escapes --------------------------------------------------------------------------------------------------------


def test_damaged_rows_are_the_text_with_escapes() -> None:
    rows = Escapes(escapes=2).open().batch(4, 3, 200, 40)
    text = Trigram().open().batch(4, 2 * 3, 200, 40)
    for damaged, clean in zip(rows.tolist(), text.tolist(), strict=True):
        expected: list[int] = []
        for token in clean:
            expected += [BACKSLASH] * (2 * (token < ESCAPED)) + [token]
        assert damaged == expected[:41]


def test_damaged_rows_have_their_share_and_a_clean_twin() -> None:
    clean = Escapes(share=0.3).open().clean(1000)
    assert clean is not None
    assert clean.max() < BACKSLASH
    rows = Escapes(share=0.3).open().batch(0, 0, 5000, 40)
    assert (rows == BACKSLASH).any(axis=1).mean() == pytest.approx(0.3, abs=0.02)
    whole = Escapes(share=0.0).open()
    assert np.array_equal(whole.held_out(32), whole.clean(32))
    assert len({Escapes(share=share).open().fingerprint for share in (0.0, 0.5, 1.0)}) == 3
    assert Trigram().open().clean(32) is None


@pytest.mark.slow
def test_a_run_records_the_clean_loss_of_data_that_have_one(tmp_path: Path) -> None:
    words = ["train", "steps=4", "model=d32", "model.depth=1", "engine=eager", "validation=short", "probes.every=1"]
    words += ["probes.names=[train_loss,val_loss,clean_val_loss]"]
    metrics = finished(tmp_path / "a", *words, "data=escapes", "data.share=0").metrics
    values = metrics.pivot(index="step", columns="probe", values="value")
    assert values["clean_val_loss"].notna().all()
    # without damage both are the same text, between start and end the same slice of it
    assert values["clean_val_loss"][1:3].tolist() == values["val_loss"][1:3].tolist()
    assert "clean_val_loss" not in set(finished(tmp_path / "b", *words, "data=trigram").metrics["probe"])
