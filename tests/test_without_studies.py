"""A copy of the lab without its studies does everything but judge claims."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).parents[1]
COMMANDS = """
import sys
from lab import main
from lab.report import shelf
assert not shelf.studies()
for words in (
    ["report", "records"],
    ["leaderboard"],
    ["list"],
    ["stress", "--params", "1e9", "lr=3e-4"],
    ["watch", "log.csv"],
):
    try:
        code = main(words)
    except SystemExit as end:
        code = end.code
    assert not code, (words, code)
try:
    code = main(["claims"])
except SystemExit as end:
    code = end.code
assert code == 2, code
"""


def test_without_the_studies_every_other_command_works(tmp_path: Path) -> None:
    shutil.copytree(HOME / "lab", tmp_path / "lab", ignore=shutil.ignore_patterns("studies", "__pycache__"))
    for name in ("conf", "sweeps", "hydra_plugins", "results"):
        (tmp_path / name).symlink_to(HOME / name)
    shutil.copytree(HOME / "results" / "quickstart", tmp_path / "records")
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{step},{5 - step / 100}\n" for step in range(300)))
    ended = subprocess.run(
        [sys.executable, "-c", COMMANDS], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "lab/studies" in ended.stderr
    assert (tmp_path / "records" / "figures" / "learning_rate_sensitivity.svg").is_file()
