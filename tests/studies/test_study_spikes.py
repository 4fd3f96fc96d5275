"""What the study of loss spikes adds to training: its texts, and two of its responses."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.contrib.data import BACKSLASH, ESCAPED, KINDS, Escapes, Mixture
from lab.contrib.responses import ActivationClamp, SoftLRGuard
from lab.core.hooks import HookPoint
from lab.data.synthetic import Trigram
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


# --- mixture --------------------------------------------------------------------------------------------------------

ONE_EACH = {name: Mixture(**{other: float(other == name) for other in KINDS}) for name in KINDS}


def test_each_row_is_of_the_kind_that_is_counted() -> None:
    """Tokens of 64 tell the alphabets apart; in runs most tokens are repeated, and echoes are alternately of a half."""
    corpus = Mixture(noise=0).open()
    rows = corpus.batch(3, 7, 2000, 32)
    is_script = (rows >= 32).all(axis=1)
    is_echo = (rows[:, ::2] < 16).all(axis=1) & ((rows[:, 1::2] >= 16) & (rows[:, 1::2] < 32)).all(axis=1)
    is_runs = (rows[:, 1:] == rows[:, :-1]).mean(axis=1) > 0.7
    counted = corpus.rows_by_source(3, 7, 2000)
    seen = {"script": is_script.sum(), "echo": is_echo.sum(), "runs": (is_runs & ~is_script).sum()}
    for name, count in seen.items():
        assert count == pytest.approx(counted[name], abs=25), name
    assert counted["noise"] == 0
    assert sum(counted.values()) == 2000


@pytest.mark.parametrize("name", KINDS)
def test_what_is_left_out_changes_no_other_share(name: str) -> None:
    corpus = Mixture(trigram=6.0, echo=3.0, without=name).open()
    counted = corpus.rows_by_source(5, 2, 40_000)
    assert counted[name] == 0
    weights = {kind: {"trigram": 6.0, "echo": 3.0}.get(kind, 1.0) * (kind != name) for kind in KINDS}
    for kind, weight in weights.items():
        assert counted[kind] / 40_000 == pytest.approx(weight / sum(weights.values()), abs=0.01)


def test_kinds_share_no_random_bits_in_a_batch() -> None:
    """The letters of echoes and of noise would be the same ones otherwise."""
    corpus = Mixture(trigram=0, script=0, runs=0).open()
    rows = corpus.batch(0, 0, 64, 32)
    is_echo = ((rows[:, 1::2] >= 16).all(axis=1)) & (rows[:, ::2] < 16).all(axis=1)
    assert 10 < is_echo.sum() < 54
    assert (rows[is_echo][:10, ::2] == rows[~is_echo][:10, ::2] % 16).mean() < 0.2


def test_a_run_repeats_its_token_for_sixteen_on_average() -> None:
    rows = ONE_EACH["runs"].open().batch(0, 0, 500, 256)
    # a new run repeats the token before it once in 32 times
    assert (rows[:, 1:] != rows[:, :-1]).mean() == pytest.approx(31 / 32 / 16, rel=0.03)


def test_every_kind_and_the_mixture_have_fingerprints_of_their_own() -> None:
    assert len({source.open().fingerprint for source in (*ONE_EACH.values(), Mixture())}) == len(KINDS) + 1


def test_the_mixture_is_the_same_on_every_machine() -> None:
    # These digests must hold on every machine and with every numpy, as those of the languages in test_data.py.
    corpus = Mixture().open()
    drawn = hashlib.sha256(corpus.batch(17, 12_345, 16, 64).astype("<i8").tobytes()).hexdigest()[:16]
    assert (drawn, corpus.fingerprint) == ("3d09acb0a50b9afc", "2cce8e5cb7423810")


# --- remedies within an update --------------------------------------------------------------------------------------


def test_the_soft_guard_divides_by_the_fourth_power_of_the_excess() -> None:
    guard, usual_r = SoftLRGuard(), torch.tensor([2.0, 2.0, torch.inf, 2.0], dtype=torch.float64)
    factor_r = guard.gate(torch.tensor(0), torch.tensor([3.0, 1.0, 5.0, torch.nan]), torch.ones(4), usual_r).lr_factor_r
    assert factor_r is not None
    assert factor_r.tolist() == pytest.approx([0.19753086, 1, 1, 1])
    assert guard.usual_loss(2.0, 4.0) == pytest.approx(2.4)
    assert guard.usual_loss(2.0, float("nan")) == 2.0


def test_activations_are_clamped_by_the_rms_of_their_own_run() -> None:
    clamp = ActivationClamp(torch.tensor([1.0, 2.0])).attach(HookPoint("block_output", ""), 2, None)
    x_rbtd = torch.tensor([[7.0, -7.0, 1.0, -1.0], [70.0, -70.0, 10.0, -10.0]]).view(2, 1, 1, 4)
    clamped_rbtd = torch.tensor([[5.0, -5.0, 1.0, -1.0], [70.0, -70.0, 10.0, -10.0]]).view(2, 1, 1, 4)
    torch.testing.assert_close(clamp(x_rbtd), clamped_rbtd)  # the RMS is 5, and 50
    leaf_rbtd = x_rbtd.clone().requires_grad_()
    clamp(leaf_rbtd).square().sum().backward()
    assert leaf_rbtd.grad is not None  # to which the limit is a constant
    assert leaf_rbtd.grad.flatten().tolist() == [0, 0, 2, -2, 140, -140, 20, -20]
