"""The page of gates for programs: its commands print the JSON that it shows, with the exit codes that it promises."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from lab import main
from lab.features.stress.pair import card_pair
from test_stress import card, planted, valley

HOME = Path(__file__).parents[1]
PAGE = (HOME / "docs" / "gates.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```sh\n([^`]*)\n```\n\n```json\n([^`]*)```", PAGE)
CODES = {"stress": 0, "predict": 0, "check": 0, "watch": 1}  # the log that is watched has a spike


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


SCHEMA = json.loads((HOME / "docs" / "schema.json").read_text(encoding="utf-8"))
# Commands whose outputs the page says to be in the schema, and the exit codes that they end with here.
OUTPUTS = {
    "lab predict --params 7e9 lr=3e-4 qk_norm=no --json": ("numbers", 0),
    "lab predict results/logit_growth --size 7B --lr 3e-3 --json": ("forecasts_at_a_size", 0),
    "lab predict results/logit_growth --json": ("forecasts", 0),
    "lab check results/quickstart --baseline results/quickstart --json": ("check", 0),
    "lab claims --json": ("verdicts", 0),
    "lab watch docs/tables/their_run.log --json": ("alarms", 1),
    "lab predict results/smoke --json": ("refusal", 2),
}


def validate(content: Any, name: str) -> None:
    jsonschema.validate(content, {**SCHEMA, "anyOf": [{"$ref": f"#/$defs/{name}"}]})


@pytest.mark.parametrize("command", OUTPUTS)
def test_outputs_are_what_the_schema_says(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_shipped = command.startswith("lab claims")  # and not judged anew
    monkeypatch.chdir(tmp_path if is_shipped else HOME)
    name, code = OUTPUTS[command]
    assert main(shlex.split(command)[1:]) == code
    validate(json.loads(capsys.readouterr().out), name)


def test_cards_are_what_the_schema_says() -> None:
    first, second = (card(planted(valley(rise=rise, spread=0.01))) for rise in (0.2, 0.3))
    validate(json.loads(first.answer.json()), "card")
    validate(json.loads(card_pair(first, second, "lab stress a b").answer.json()), "pair")
    (test, *_) = json.loads(first.answer.json())["tests"]
    assert test["n"] == len(test["seeds"])
    assert 0.5 < test["power"] <= 1
    with pytest.raises(jsonschema.ValidationError):
        validate({**json.loads(first.answer.json()), "tests": [{"name": "planted"}]}, "card")


def test_every_output_of_the_schema_is_on_the_page() -> None:
    outputs = {entry["$ref"].rpartition("/")[2] for entry in SCHEMA["anyOf"]}
    assert outputs == {name for name, _ in OUTPUTS.values()} | {"card", "pair", "selftest"}
    assert all(f"`{name}`" in PAGE for name in outputs)


def test_a_card_has_the_keys_that_the_page_names() -> None:
    content = json.loads(card(planted(valley(rise=0.2))).answer.json())
    rows = re.findall(r"^\| (`.*?) \| ", PAGE.partition("## One schema")[0], re.MULTILINE)
    of_tests, of_card = set[str](), set[str]()
    for row in rows:
        keys = re.findall(r"`(?:tests\[\])?\.?(\w+)`", row)
        (of_tests if "tests[]" in row else of_card).update(keys)
    assert len(of_card) > 5
    assert of_card <= content.keys()
    assert of_tests <= content["tests"][0].keys()
