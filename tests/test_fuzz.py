"""Whatever is typed, the answer is a run or one line."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path

import pytest

from lab import app, request
from lab.__main__ import main
from lab.sweep import points

WORDS = [
    "d32",
    "d64",
    "stdlib",
    "synthetic",
    "text",
    "adamw",
    "cosine",
    "constant",
    "none",
    "all",
    "mup_simple",
    "z_loss",
    "qk_layernorm",
    "auto",
    "cpu",
    "fp32",
    "0",
    "1",
    "-1",
    "2.5",
    "1e-3",
    "1e400",
    "nan",
    "inf",
    "true",
    "null",
    "???",
    "[]",
    "{}",
    "[1,2]",
    "[z_loss]",
    "{a:1}",
    "''",
    '"x"',
    "${seed}",
    "${nothing}",
    "${oc.env:HOME}",
    "a,b",
    "0,1",
    "range(1,3)",
    "choice(1,2)",
    "interval(0,1)",
    "glob(*)",
    "[",
    "]",
    "{",
    "(",
    "\\",
    "ü",
    "é=1",
    "=",
    "==",
    "../..",
    ";",
    "<script>",
]


@cache
def keys() -> list[str]:
    """Those there are, and some there are not."""
    return [
        *request.known_keys(),
        "sweeps",
        "hydra.sweeper.max_runs",
        "hydra.job.name",
        "foo",
        "a.b",
        "model.",
        ".x",
        "",
        "é",
    ]


def override(chance: random.Random) -> str:
    """A likely or unlikely thing to type."""
    key = chance.choice(keys())
    if chance.random() < 0.15:
        place = chance.randrange(len(key) + 1)
        key = key[:place] + chance.choice("abz_.@/") + key[place:]
    before, between = chance.choice(["", "", "", "", "+", "++", "~"]), chance.choice(["=", "=", "=", "=", "", "=="])
    return f"{before}{key}{between}{chance.choice(WORDS)}"


@pytest.mark.parametrize("count", [40, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_random_request_is_carried_out_or_refused_in_one_line(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "run_sweep", lambda trees, *_, **__: points(trees))
    chance, codes = random.Random(count), []
    for _ in range(count):
        words = ["train", "-m", "data=synthetic", *(override(chance) for _ in range(chance.choice([1, 1, 2])))]
        monkeypatch.setattr(sys, "argv", ["lab", *words])
        codes.append(main(words))
        said = capsys.readouterr().err
        assert codes[-1] in (0, 2), f"{words}\n{said}"
        assert said.count("\n") == (codes[-1] == 2), f"{words}\n{said}"
    assert {0, 2} == set(codes)
    assert list(tmp_path.iterdir()) == []
