"""Requests that cannot be carried out: exit code 2, one line that names what is at fault, and nothing is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import planted
from lab.__main__ import main

# Words of a command in a folder that holds ``pilot``, with two seeds, and what the line must name.
REFUSED = [
    ("claims nowhere", "nowhere"),
    ("claims pilot --source GLM-130", "GLM-130B"),
    ("claims pilot --figure E.77", "E.7"),
    ("claims pilot --verdict reproduce", "reproduced"),
    ("claims --power qk_layernorm_lowers_sensitivity", "lab claims DIR --power CLAIM"),
    ("claims pilot --effect 1", "lab claims DIR --power CLAIM"),
    ("claims pilot --power qk_layernorm_lowers_sensitivit", "qk_layernorm_lowers_sensitivity"),
    ("claims pilot --power qk_layernorm_lowers_sensitivity", "2 whole seeds"),
    ("claims pilot --power qk_layernorm_lowers_sensitivity --effect nan", "--effect"),
    ("claims pilot --power large_kappa_costs", "lab sweep kappa"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("refusals")
    planted.write(home / "pilot", list(planted.cards(seeds=(0, 1))))
    return home


@pytest.mark.parametrize(("words", "named"), REFUSED, ids=[words for words, _ in REFUSED])
def test_a_faulty_request_is_refused_in_one_line(
    words: str, named: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    assert main(shlex.split(words)) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert named in error
    assert sorted(folder.rglob("*")) == before
