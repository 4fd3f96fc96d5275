"""The README's commands, run as they stand there, only smaller."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.__main__ import main

HOME = Path(__file__).parents[1]
README = (HOME / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines() if line]
SMALLER = ["scale=toy", "hydra/launcher=basic", "seed=0", "optimizer.lr=1e-2,1e-1"]
SMALLER_CHECK = ["model.width=32,128", "model.depth=1", "batch_size=8", "optimizer.lr=1e-1"]


def test_the_make_targets_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE)
    named = [shlex.split(line, comments=True)[1] for line in COMMANDS if line.startswith("make ")]
    assert {"quickstart", "test"} <= set(named) <= set(targets)


@pytest.mark.slow
@pytest.mark.usefixtures("briefly")
def test_the_lab_commands_work_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only ``lab report`` draws: one page with figures shows what all of them would.

    What is made smaller is no longer what the baseline is of, which ``lab check`` says.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").symlink_to(HOME / "results")
    (tmp_path / "README.md").write_text(README)
    ran = [shlex.split(line, comments=True)[1:] for line in COMMANDS if line.startswith("lab ")]
    assert len(ran) >= 6
    for words in ran:
        theirs = [word for word in words if not word.startswith("scale=")]  # none is as small
        mine = [key for key in SMALLER if not any(word.startswith(key.split("=")[0]) for word in theirs)]
        mine = {"sweep": mine, "train": mine, "coordcheck": SMALLER_CHECK}.get(words[0], [])
        smaller = [*(theirs if mine else words), *mine]
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["lab", *smaller])
            if words[0] in ("sweep", "train"):
                patch.setattr("lab.analysis.report.build.FIGURES", {})
            code, said = main(smaller), capsys.readouterr()
            assert code == (2 if words[0] == "check" else 0), said.err
            assert words[0] != "check" or said.out.startswith("cannot judge: ")


def test_what_the_readme_links_to_is_there() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("https://") or (HOME / link).exists(), link


@pytest.mark.slow
def test_quickstart_in_a_clean_clone(tmp_path: Path) -> None:
    subprocess.run(["git", "clone", "-q", str(HOME), str(tmp_path / "clone")], check=True)
    made = subprocess.run(
        ["make", "--no-print-directory", "quickstart"],
        cwd=tmp_path / "clone",
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "84 trained, 0 already there" in made.stdout.splitlines()[-1]
    assert (tmp_path / "clone/runs/quickstart/report.html").exists()
    left = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path / "clone", capture_output=True, check=True)
    assert left.stdout == b""
