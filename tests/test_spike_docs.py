"""The page "My run has spiked": its names exist, and its commands are accepted as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.__main__ import main
from lab.analysis.curves import load
from lab.cli.hydra_app import data_folder
from lab.studies.alarms.replays import CAUSES
from lab.studies.spikes.optimizer_arms import arm_costs

PAGE = (Path(__file__).parents[1] / "docs" / "my_run_has_spiked.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
LEDGER = re.findall(r"```yaml\n(restarts:.*?)```", PAGE, re.DOTALL)[0]


def test_every_remedy_is_a_response() -> None:
    remedies = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*", PAGE.split("## 3.")[1], re.MULTILINE)
    assert len(remedies) == 7
    assert {*remedies, "rewind_only"} <= {path.stem for path in data_folder("conf").glob("response/*.yaml")}


def test_the_cost_of_clipping_is_that_of_the_records() -> None:
    """Updates until the loss is back after rare tokens, the mean over seeds, without clipping and with ever more."""
    costs = arm_costs(load(Path(__file__).parents[1] / "results" / "optimizer_arms"))
    recovery = costs[costs["burst"] == "rare_tokens"].groupby("name")["recovery"].mean()
    expected = [f"{recovery[name]:.0f}" for name in ("no clip", "clip 2.5", "recipe", "clip 0.3")]
    sentence = PAGE.split("After rare tokens their loss takes")[1].split("times that norm, ")[0]
    rest = PAGE.split("times that norm, ")[1].split("of it.")[0]
    assert re.findall(r"\d+", sentence + rest) == expected


def test_every_cause_is_on_the_page() -> None:
    table = PAGE.split("| cause |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(CAUSES)


def test_a_log_is_watched_and_a_ledger_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    header = re.findall(r"```text\n(step,.*?)\n```", PAGE)[0]
    losses = [2.0 + 0.01 * (step % 3) for step in range(100)] + [6.0] * 5 + [2.0] * 50
    rows = "\n".join(f"{step},{loss},1.0" for step, loss in enumerate(losses))
    for name in ("log.csv", "replay.csv"):
        Path(name).write_text(f"{header}\n{rows}\n")
    Path("mine.yaml").write_text(LEDGER)
    quick = [line.split()[1:] for line in COMMANDS if line.startswith(("lab watch log", "lab list", "lab train"))]
    codes = {" ".join(words): main(words) for words in quick if words[0] != "train" or "--dry-run" in words}
    assert codes == {line: int(line.startswith("watch")) for line in codes}
    assert len(codes) == 8
    output = capsys.readouterr().out
    assert "recovered" in output
    assert "likely cause: spike" in output
    assert list(Path("log.csv.alarms").glob("*.svg"))
