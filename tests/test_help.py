"""The table of commands: usage, help and parsers agree, and help shows a config with the comments of its files."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.cli import commands
from lab.core import usage
from lab.sweeping import request
from labwatch.tables.columns import Columns
from sweeping import OutputOf


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


def test_every_command_stands_in_the_table_and_in_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(usage.COMMANDS) == list(commands.COMMANDS)
    lines = said(capsys, "--help").splitlines()
    assert [line.split()[1] for line in lines if line.startswith("lab ") and "COMMAND" not in line] == [*usage.COMMANDS]
    assert max(map(len, lines)) <= 130


def test_the_help_of_a_command_shows_form_options_and_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for word, command in usage.COMMANDS.items():
        lines = said(capsys, word, "--help").splitlines()
        assert lines[0].startswith(f"lab {word} {command.takes}")
        assert f"example: lab {word} {command.example}" in lines
        for form, meaning in command.options.items():
            assert any(line.split() == [*form.split(), *meaning.split()] for line in lines), form


def test_help_is_a_word_as_well(capsys: pytest.CaptureFixture[str], output_of: OutputOf) -> None:
    assert said(capsys, "help") == said(capsys, "--help")
    assert said(capsys, "help", "status") == said(capsys, "status", "--help") == said(capsys, "status", "-h")
    assert "nearest: status" in output_of("help", "stats", code=2)


def test_help_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for word in usage.COMMANDS.keys() - {"sweep", "train"}:
        example = shlex.split(usage.COMMANDS[word].example)
        for words in (["--help", word], [word, "-h", *example], [word, *example, "--help"], [word, "--json", "--help"]):
            assert said(capsys, *words) == usage.command_help(word) + "\n"
    for words in (["sweep", "--help"], ["sweep", "seed=1", "--help"]):
        assert said(capsys, *words) == usage.command_help("sweep") + "\n"
    assert said(capsys, "sweep", "-h", "smoke", "seed=7") == said(capsys, "sweep", "smoke", "seed=7", "--help")
    assert "  seed: 7" in said(capsys, "train", "--help", "seed=7").splitlines()


def test_every_command_that_answers_in_json_refuses_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    for word, command in usage.COMMANDS.items():
        if "--json" in command.parsed_options:
            assert main([word, "--bogus", "--json"]) == 2
            out, error = capsys.readouterr()
            assert json.loads(out) == {"verdict": "refused", "reasons": [error.strip().removeprefix("lab: ")]}
            assert main([word, "--bogus"]) == 2
            assert capsys.readouterr().out == ""


def test_an_example_is_read_by_the_parser_of_its_command() -> None:
    for word in usage.COMMANDS.keys() - {"sweep", "train", "coordcheck"}:
        usage.OptionParser(word).read(shlex.split(usage.COMMANDS[word].example))


def test_options_of_requests_are_those_that_requests_take() -> None:
    for word in ("sweep", "train"):
        assert {*usage.COMMANDS[word].parsed_options} <= {*request.OPTIONS}


def test_options_of_an_import_are_its_columns() -> None:
    columns = {f"--{key.replace('_', '-')}" for key in Columns._fields}
    assert {*usage.COMMANDS["import"].parsed_options} == {*columns, "--replace", "--json"}


def test_the_help_of_a_run_has_every_key_with_its_comment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    help_ = said(capsys, "train", "--help")
    for line in (
        "  tokens: null  # the length of the run in tokens, instead of steps",
        "  checkpoint:  # every so many steps or minutes, 0 is never; how many are kept",
        "    every: 25  # steps between two measurements; the first and the last step are always measured",
        "  scale: cpu, day, gpu, paper, toy",
    ):
        assert line in help_.splitlines()
    assert "fleet" not in {line.split(":")[0].strip() for line in help_.splitlines()}

    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/mine.yaml").write_text(
        "# Of my own.\ndefaults: [adamw]\nname: mine\nlr: 0.5 # large\nchain:\n  - peak # first\n"
    )
    mine = said(capsys, "train", "--config-dir", str(tmp_path), "optimizer=mine", "batch=increments", "--help")
    for line in (
        "  optimizer:  # Of my own.",
        "    lr: 0.5  # large",
        "    - peak",
        "  batch:  # Grow by equal increments, each held for the same number of sequences.",
        "    micro_batch: 4  # sequences in a forward and backward pass",
    ):
        assert line in mine.splitlines()


def test_the_help_of_a_sweep_is_of_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    help_ = said(capsys, "sweep", "smoke", "model.width=48", "--help")
    assert "    width: 48" in help_.splitlines()
    assert "    name: trigram" in help_.splitlines()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("scales", "toy    Any sweep in seconds: 2 learning rates, 1 seed, 4 steps"),
        ("arms", "clip_0_3                    Gradients are clipped at norm 0.3"),
        ("links", "peak"),
    ],
)
def test_lists_name_what_can_be_chosen(name: str, entry: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert any(line.startswith(entry) for line in said(capsys, "list", name).splitlines())
    assert f"{name}:" in said(capsys, "list").splitlines()
