"""What a person types or gives and the lab cannot carry out: exit code 2, one line that names it, and nothing written.

``refusals.yaml`` holds the requests. A row has the words of a command, then what its line must name: the offending key,
file or value and, where the lab suggests one, the nearest valid choice. The wording of the line is not tested.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import planted
from lab.__main__ import main
from lab.cli.commands import COMMANDS

# Of each run below, unless its row says otherwise.
RUN = ["data=synthetic", "model.width=16", "steps=12", "batch_size=4", "seq_len=12", "validation=short"]

TABLES = yaml.safe_load((Path(__file__).parent / "refusals.yaml").read_text())
# Rows that are too long to be written out.
LONG_WORDS = [[f"train out={300 * 'a'} --dry-run", "out", "too long"]]
LOG = "step,loss,log_z\n" + "".join(f"{step},2,9\n" for step in range(1000))
LONG_FILES = [
    ["log.csv", "step,loss\n" + 2**21 * "1", "watch log.csv", "1024 KiB"],
    ["log.csv", LOG, "watch log.csv --mantissa-bits=1", "2 to 23"],
    ["log.csv", LOG, "watch log.csv --mantissa-bits=7.5", "2 to 23"],
    ["my.yaml", "steps: [1\n" + 999 * "x: [\n", "sweep my.yaml", "my.yaml"],
    ["a.txt", 640 * "x", "train data=text data.path=a.txt seq_len=64", "seq_len=64", "seq_len=63"],
    ["pictures/a.png", 999 * "x", "train data=text data.path=pictures", "pictures"],
]


def refusal(capsys: pytest.CaptureFixture[str], words: str) -> str:
    """The line by which a command of these words is refused in an otherwise untouched folder."""
    command, *rest = shlex.split(words)
    asked = [command, *(RUN if command == "train" else []), *rest]
    before = written()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lab", *asked])
        code = main(asked)
    out, error = capsys.readouterr()
    assert (code, error.count("\n")) == (2, 1), error
    reasons = [error.strip().removeprefix("lab: ")]
    assert json.loads(out)["reasons"] == reasons if "--json" in asked else out == ""
    assert written() == before
    return error


def written() -> list[Path]:
    """The files here, but for the bytecode that Python may keep of a module of the user's."""
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


pytestmark = pytest.mark.usefixtures("here")


@pytest.mark.parametrize(("words", "named"), [(words, named) for words, *named in TABLES["requests"] + LONG_WORDS])
def test_requests(words: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, words)
    assert [part for part in named if part not in line] == [], line


@pytest.mark.parametrize(
    ("name", "content", "words", "named"), [(*row[:3], row[3:]) for row in TABLES["files"] + LONG_FILES]
)
def test_files(name: str, content: str, words: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(content)
    line = refusal(capsys, words)
    assert len(line) < 500
    assert Path(name).read_text() == content
    assert [part for part in named if part not in line] == [], line


def test_every_command_refuses_something() -> None:
    words = [word for rows in TABLES.values() for row in rows for word in row if isinstance(word, str)]
    assert {*COMMANDS} <= {word.partition(" ")[0] for word in words}


def table(**columns: Any) -> pd.DataFrame:
    """The runs of another trainer, a row each, with some of its columns changed."""
    rows = [
        {"lr": lr, "loss": 3.0 - size / 1e6, "n_params": size, "seed": seed, "clip": clip}
        for clip in ("off", "on")
        for size in (100_000, 400_000)
        for lr in (1e-3, 1e-2, 1e-1)
        for seed in range(2)
    ]
    return pd.DataFrame(rows).assign(**columns)


IMPORTS: list[tuple[pd.DataFrame, str, tuple[str, ...]]] = [
    (table(), "--lr learning_rat", ("--lr", "'learning_rat'")),
    (table(), "--arm clipp", ("--arm", "nearest: clip")),
    (table().drop(columns="n_params"), "", ("row 1", "row 7", "--keep")),
    (table().drop(columns="loss"), "", ("--loss",)),
    (table(lr=0.0), "", ("row 1", "learning rate")),
    (table(lr=math.inf), "", ("row 1", "learning rate")),
    (table(loss=["2.5", "low"] * 12), "", ("row 2", "'low'")),
    (table(loss=math.nan), "", ("row 1", "initial loss")),
    (table(loss=math.nan), "--initial-loss inf", ("--initial-loss", "'inf'")),
    (pd.concat([table(), table().tail(1)]), "", ("row 24", "row 25")),
    (table().head(0), "", ("rows",)),
    (table(seed=None), "", ("row 1", "seed")),
    (table(seed=0.5), "", ("row 1", "seed", "0.5")),
    (table(n_params=0.016), "", ("row 1", "size", "0.016")),
    (table(n_params=-1), "", ("row 1", "size", "-1")),
    (table(steps=-1), "", ("row 1", "steps", "-1")),
    (table(steps=[None, *[9] * 23]), "", ("row 1", "steps")),
    (table(decay=-1.0), "--axis decay", ("row 1", "decay", "-1")),
    (table(decay=math.inf), "--axis decay", ("row 1", "decay", "inf")),
    (table(decay=None), "--axis decay", ("row 1", "decay", "empty")),
]


@pytest.mark.parametrize(("frame", "options", "named"), IMPORTS)
def test_tables_of_runs(
    frame: pd.DataFrame, options: str, named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    frame.to_csv("runs.csv", index=False)
    line = refusal(capsys, f"import runs.csv out=out {options}")
    assert [part for part in named if part not in line] == [], line


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("refusals")
    planted.write(home / "pilot", list(planted.cards(seeds=(0, 1))))
    return home


@pytest.mark.parametrize(("words", "named"), TABLES["folders"])
def test_requests_about_folders(
    words: str, named: str, pilot: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(pilot)
    line = refusal(capsys, words)
    assert named in line
