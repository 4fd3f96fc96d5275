"""The last words of a program: sentences of real trainers, those that only resemble them, and the alarm of a log."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from lab import main
from lab.core.errors import RequestError
from labwatch.events import detect
from labwatch.events.following import Alarm, Follower
from labwatch.events.log_lines import says_the_end
from labwatch.events.logs import read_logs

LINES = yaml.safe_load(Path(__file__).with_name("last_words.yaml").read_text())
SAID = "Loss is nan, stopping training"


@pytest.mark.parametrize("line", LINES["ends"])
def test_a_program_that_stops_since_training_diverged_says_so(line: str) -> None:
    assert says_the_end(line)


@pytest.mark.parametrize("line", LINES["others"])
def test_a_setting_a_skipped_update_and_other_ends_do_not(line: str) -> None:
    assert not says_the_end(line)


def rows(first: int, end: int, noise: float = 0.01) -> list[str]:
    """Rows of a loss that falls, in the manner of MAE's trainer."""
    return [
        f"Epoch: [3]  [{step:3d}/900]  lr: 0.0004  loss: {2 + 3 * math.exp(-step / 1500) + noise * (step % 7):.4f}"
        for step in range(first, end, 20)
    ]


@pytest.mark.parametrize("line", [SAID, 'FloatingPointError: Minimum loss scale reached (1e-4) <at "rank" 3>.'])
def test_the_line_is_quoted_at_the_last_step(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(["terminate_on_nan=True", *rows(0, 600), line, "[rank3]: ChildFailedError", ""]))
    assert main(["watch", str(path)]) == 1
    printed = capsys.readouterr().out
    assert f'train.log step 580: the program says that training diverged after this step: "{line}"' in printed
    assert main(["watch", str(path), "--json"]) == 1
    (event,) = json.loads(capsys.readouterr().out)["events"]
    assert (event["kind"], event["step"], event["ending"]) == ("last_words", 580, "diverged")


def test_a_line_after_which_training_goes_on_is_no_end(tmp_path: Path) -> None:
    """Unless it went back, as a relaunch does; a loss that is no number does not go on."""
    path = tmp_path / "train.log"

    def stopped() -> list[tuple[str, int]]:
        return [
            (log.name, event.step)
            for log in read_logs(path).runs
            for event in detect(log)
            if event.kind == "last_words"
        ]

    path.write_text("\n".join([*rows(0, 400), SAID, *rows(400, 600)]))
    assert stopped() == []
    path.write_text("\n".join([*rows(0, 400), SAID, *rows(200, 600, 0.02)]))
    assert stopped() == [("train.log attempt 1", 380)]
    path.write_text("\n".join([*rows(0, 400), SAID, "Epoch: [3]  [400/900]  lr: 0.0004  loss: nan"]))
    assert stopped() == [("train.log", 400)]


def test_of_passes_over_the_data_whose_steps_are_counted_on_the_last_one_stops(tmp_path: Path) -> None:
    lines = [f"[{step}/90] loss: {3 - (90 * epoch + step) / 400:.4f}" for epoch in range(3) for step in range(0, 90, 3)]
    (tmp_path / "train.log").write_text("\n".join([*lines, SAID]))
    (run,) = read_logs(tmp_path / "train.log").runs
    assert [(event.kind, event.step) for event in detect(run)] == [("last_words", run.step_n[-1])]


def test_a_log_that_grows_alarms_once_when_the_program_stops(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("\n".join(rows(0, 600)) + "\n")
    follower = Follower(path)
    assert list(follower.poll()) == []
    with path.open("a") as file:
        file.write(f"{SAID}\n")
    (alarm,) = follower.poll()
    assert isinstance(alarm, Alarm)
    assert (alarm.event.kind, alarm.event.step, alarm.log.last_words) == ("last_words", 580, SAID)
    follower.close()
    again = Follower(path)
    assert list(again.poll()) == []
    again.close()


def test_a_log_too_short_to_judge_is_refused_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join([*rows(0, 40), SAID]))
    with pytest.raises(RequestError, match="fewer than 3 rows.*" + SAID):
        read_logs(tmp_path / "train.log")


def test_of_two_logs_the_one_whose_program_stopped_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, more in (("a", []), ("b", [SAID])):
        (tmp_path / f"{name}.log").write_text("\n".join([*rows(0, 600), *more]))
    assert main(["compare", str(tmp_path / "a.log"), str(tmp_path / "b.log")]) == 0
    assert "B is worse, since B is lost from step 580 on" in " ".join(capsys.readouterr().out.split())
