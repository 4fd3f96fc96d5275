"""What the study of Wortsman et al. adds to training: a text that one window holds, and transplanted kappas."""

from __future__ import annotations

import pytest
import torch

from lab.contrib.data import SyntheticSample
from lab.contrib.interventions import KappaTransplant
from lab.core.errors import RequestError
from lab.core.hooks import HookPoint
from lab.data.synthetic import Synthetic
from lab.model.config import ModelConfig
from pieces import model, tokens
from test_interventions import inside


def test_one_window_of_a_sample_is_its_whole_text() -> None:
    corpus = SyntheticSample(tokens=300).open()
    text = Synthetic().open().held_out(64).ravel()[:300]
    for seed, step in ((0, 0), (5, 77)):
        assert corpus.batch(seed, step, 1, 299).tolist() == [text.tolist()]
    assert corpus.held_out(299).tolist() == [text.tolist()]
    assert SyntheticSample(tokens=301).open().fingerprint != corpus.fingerprint
    with pytest.raises(RequestError, match="at most seq_len=299"):
        corpus.batch(0, 0, 1, 300)


def test_kappa_is_the_mean_square_of_queries_and_keys() -> None:
    kappa_r = torch.tensor([1e-2, 1e4], dtype=torch.float64)
    made = model(0, 1, changes={"kappa_transplant": KappaTransplant(kappa_r)})
    for q_rbhtk, k_rbhsk, scale in inside(made, tokens(0, 1))["query_key"]:
        for turned, factor in ((q_rbhtk, scale), (k_rbhsk, 1.0)):  # turning changes no length
            square = (turned / factor).square().mean(-1)
            torch.testing.assert_close(square, kappa_r.view(2, 1, 1, 1).expand_as(square))


def test_kappa_of_a_zero_vector_is_zero_with_a_finite_gradient() -> None:
    change = KappaTransplant(torch.tensor([1e4])).attach(HookPoint("query", ""), 1, ModelConfig("", 4, 1, 4))
    z = torch.zeros(1, 4, requires_grad=True)
    out = change(z)
    out.sum().backward()
    assert out.eq(0).all()
    assert z.grad is not None
    assert z.grad.eq(100).all()  # as if its mean square were 1; fp16 ends at 65504
