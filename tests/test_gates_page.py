"""The page of gates for programs: its commands print the JSON that it shows, with the exit codes that it promises."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from lab import main
from test_stress import card, planted, valley

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "gates.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\n([^`]*)\n```\n\n```json\n([^`]*)```", PAGE)
CODES = {"predict": 0, "check": 0, "watch": 1}  # the log that is watched has a spike


def is_in(shown: Any, printed: Any) -> bool:
    """Whether what is shown is part of what is printed; of lists some element must match, and numbers to 1 %."""
    if isinstance(shown, dict):
        return isinstance(printed, dict) and all(
            key in printed and is_in(value, printed[key]) for key, value in shown.items()
        )
    if isinstance(shown, list):
        return len(shown) <= len(printed) and all(any(is_in(value, other) for other in printed) for value in shown)
    if isinstance(shown, float):
        return isinstance(printed, float | int) and printed == pytest.approx(shown, rel=0.01, abs=1e-9)
    return bool(shown == printed or (isinstance(shown, int) and is_in(float(shown), printed)))


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=lambda text: text.split()[1])
def test_a_gate_prints_what_its_page_shows(
    command: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HOME)
    words = shlex.split(command)[1:]
    assert main(words) == CODES[words[0]]
    assert is_in(json.loads(shown), json.loads(capsys.readouterr().out))


def test_a_card_has_the_keys_that_the_page_names() -> None:
    content = json.loads(card(planted(valley(rise=0.2))).as_json())
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    of_tests, of_card = set[str](), set[str]()
    for row in rows:
        keys = re.findall(r"`(?:tests\[\])?\.?(\w+)`", row)
        (of_tests if "tests[]" in row else of_card).update(keys)
    assert len(of_card) > 5
    assert of_card <= content.keys()
    assert of_tests <= content["tests"][0].keys()
