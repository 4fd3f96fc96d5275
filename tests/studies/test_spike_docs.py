"""The page "My run has spiked": its names exist, and its commands are accepted as they are written."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest

from lab.__main__ import main
from lab.analysis import load
from lab.core.shipped import data_folder
from labwatch.watch.replays import CAUSES
from studies.spikes.planted import arm_costs

PAGE = (Path(__file__).parents[2] / "docs" / "my_run_has_spiked.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
SCHEDULE = re.findall(r"```yaml\n(restarts:.*?)```", PAGE, re.DOTALL)[0]


def test_every_remedy_is_a_response() -> None:
    remedies = re.findall(r"^\| `(\w+)` \|.*\|.*\|.*", PAGE.split("## 3.")[1], re.MULTILINE)
    assert len(remedies) == 7
    assert {*remedies, "rewind_only"} <= {path.stem for path in data_folder("conf").glob("response/*.yaml")}


def test_the_cost_of_clipping_is_that_of_the_records() -> None:
    """Updates until the loss is back after rare tokens, the mean over seeds, without clipping and with ever more."""
    costs = arm_costs(load(Path(__file__).parents[2] / "results" / "optimizer_arms"))
    recovery = costs[costs["bad_batches"] == "rare_tokens"].groupby("name")["recovery"].mean()
    expected = [f"{recovery[name]:.0f}" for name in ("no clip", "clip 2.5", "recipe", "clip 0.3")]
    sentence = PAGE.split("After rare tokens their loss takes")[1].split("times that norm, ")[0]
    rest = PAGE.split("times that norm, ")[1].split("of it.")[0]
    assert re.findall(r"\d+", sentence + rest) == expected


def test_every_cause_is_on_the_page() -> None:
    table = PAGE.split("| cause |")[1].split("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(CAUSES)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_log_is_watched_and_a_restart_schedule_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [2.0 + 0.01 * (step % 3) for step in range(100)] + [6.0] * 5 + [2.0] * 50
    rows = "\n".join(f"{step},{loss},1.0" for step, loss in enumerate(losses))
    for name in ("log.csv", "replay.csv", "twin1.csv", "twin2.csv"):
        Path(name).write_text(f"step,loss,grad_norm\n{rows}\n")
    Path("mine.yaml").write_text(SCHEDULE)
    quick = [line.split()[1:] for line in COMMANDS if line.startswith(("lab watch log", "lab list", "lab train"))]
    codes = {" ".join(words): main(words) for words in quick if words[0] != "train" or "--dry-run" in words}
    assert codes == {line: int(line.startswith("watch")) for line in codes}
    assert len(codes) == 9
    output = capsys.readouterr().out
    assert "recovered" in output
    assert "likely cause: spike" in output
    assert list(Path("log.csv.alarms").glob("*.html"))


def test_the_scores_of_the_detector_are_those_that_were_measured() -> None:
    (shown,) = re.findall(r"<!-- planted spikes -->\n(.*?)<!-- end of planted spikes -->", PAGE, re.DOTALL)
    assert shown.count("\n") > 10
    assert shown in (Path(__file__).parents[2] / "benchmarks" / "PLANTED_SPIKES.md").read_text(encoding="utf-8")


FAKES = {
    "lab": 'exec "{python}" -m lab "$@"',
    "curl": 'cat > "got_by_curl.json"; echo "$@" > curl_words',
}


@pytest.mark.slow
@pytest.mark.skipif(not which("jq"), reason="the commands of the page use jq")
def test_a_command_on_alarms_reaches_its_service(tmp_path: Path) -> None:
    """As written, beside a `curl` that keeps what it gets."""
    (command,) = [line for line in COMMANDS if "--on-alarm" in line and "SLACK_WEBHOOK" in line]
    for name, script in FAKES.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script.format(python=sys.executable)}\n")
        (tmp_path / name).chmod(0o755)
    losses = [2.0 + 0.01 * (step % 3) for step in range(100)] + [6.0] * 5 + [2.0] * 50
    (tmp_path / "train.log").write_text(
        "".join(f"iter {step}: loss {loss}, time 1ms\n" for step, loss in enumerate(losses))
    )
    home = str(Path(__file__).parents[2])
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{tmp_path}:{home}"}
    environment |= {"SLACK_WEBHOOK": "https://hooks.example/x"}
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    got = tmp_path / "got_by_curl.json"
    until = time.monotonic() + 60
    while not (got.exists() and got.read_text().endswith(("}", "}\n"))) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert json.loads(got.read_text()) == {"text": "train.log step 100: loss spike, 2.01 to 6, not yet ended"}
    assert (tmp_path / "curl_words").read_text().split()[-1] == "https://hooks.example/x"
