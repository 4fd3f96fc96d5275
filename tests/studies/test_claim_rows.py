"""Rows of claims: what they say is there, each name once, and a slip is refused in a line that names what is near."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_claims_planted import arms_of

from lab.core import shelf
from lab.core.errors import RequestError
from studies.claims.effects import Qualified
from studies.claims.registry import CLAIMS, PUBLIC_CLAIMS
from studies.claims.rows import read_claims

ROW = """
- about: a subject
  sweep: qk_layernorm
  claims:
    a_claim:
      figure: '1'
      sentence: something holds
      arms: [{intervention.qk_layernorm: null}, {intervention.qk_layernorm: 'on'}]
      frees: [intervention.qk_layernorm]
      effect: {difference: {of: total}}
      control: {value: {of: best, arm: 1}, above: 0.3}
"""


def read(folder: Path, text: str) -> list[object]:
    path = folder / "claims.yaml"
    path.write_text(text, encoding="utf-8")
    return list(read_claims(path, []))


def test_a_row_is_a_claim(tmp_path: Path) -> None:
    [claim] = read(tmp_path, ROW)
    assert (claim.name, claim.about, claim.side, claim.unit) == (
        "a_claim",
        "a subject",
        (0.0, float("inf")),
        "nats/token",
    )
    assert claim.cause == ("intervention.qk_layernorm",)
    assert claim.holds["parametrization.name"] == "standard"


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        (("sentence:", "sentense:"), "sentense"),
        (("sweep: qk_layernorm", "sweep: qk_layernrm"), "unknown sweep 'qk_layernrm'; nearest: qk_layernorm"),
        (("{difference:", "{diference:"), "unknown effect 'diference'; nearest: difference"),
        (("of: total}}", "ofs: total}}"), "'ofs'"),
        (("'on'", "on"), 'intervention.qk_layernorm: YAML reads on and off as truth values; write "on"'),
        (("arms: [", "arms: {ends_off: ["), "unknown choice of arms 'ends_off'; nearest: ends_of"),
    ],
)
def test_a_slip_in_a_row_is_refused_in_one_line(tmp_path: Path, slip: tuple[str, str], said: str) -> None:
    text = ROW.replace(*slip)
    text = text.replace("'on'}]", "'on'}]}") if "ends_off" in text else text
    with pytest.raises(RequestError) as refused:
        read(tmp_path, text)
    assert "claims.yaml: a_claim: " in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_every_row_of_every_study_is_read_under_a_name_of_its_own() -> None:
    """YAML keeps the last of two rows with one name, and says nothing."""
    rows = [
        name for path in shelf.HOME.glob("*/claims.yaml") for name in re.findall(r"(?m)^    (\w+):$", path.read_text())
    ]
    assert sorted(rows) == sorted([*CLAIMS, *PUBLIC_CLAIMS])


def test_effects_of_each_value_of_a_key_are_parts_named_by_it() -> None:
    """``each`` computes effect and control for the arms of a burst apart."""
    claim = CLAIMS["a_tight_clip_lowers_the_peak"]
    made = claim.effects(*arms_of(claim))
    assert isinstance(made, Qualified)
    bursts = list(dict.fromkeys(arm.setting("bad_batches") for arm in arms_of(claim)))
    assert list(made.table) == bursts
    assert made.control is not None
    assert list(made.control.table) == bursts
