"""`lab watch LOG --follow`: each alarm once, whatever happens to the log or to the follower meanwhile."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lab.core.errors import RequestError
from labwatch.events.detectors import detect
from labwatch.events.following import CURSOR, Alarm, Follower
from labwatch.events.levels import Level
from labwatch.events.logs import read_logs
from sweeping import OutputOf
from test_watch import bump, calm

Start = Callable[[Path], Follower]
LOSS = calm() + bump(3.0) + bump(1.0, 800)
LINES = [f"{step},{loss:.4f}\n" for step, loss in enumerate(LOSS)]
HEADER = "step,loss\n"


def steps(follower: Follower) -> list[int]:
    """Steps of the alarms since the last look."""
    return [found.event.step for found in follower.poll() if isinstance(found, Alarm)]


def append(path: Path, *lines: str) -> None:
    with open(path, "a") as file:
        file.write("".join(lines))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.csv"
    path.write_text(HEADER)
    return path


@pytest.fixture
def follow() -> Iterator[Callable[[Path], Follower]]:
    """Starts followers, and ends them after the test."""
    started: list[Follower] = []

    def start(path: Path) -> Follower:
        started.append(Follower(path))
        return started[-1]

    yield start
    for follower in started:
        follower.close()


def test_a_follower_raises_what_a_reader_of_the_whole_log_finds(log: Path, follow: Start) -> None:
    random = np.random.default_rng(3)
    norms, epsilon = random.lognormal(0, 0.1, 1000), np.where(np.arange(1000) % 400 > 380, 2.0, 0.1)
    norms[[495, 640, 641]] = 30.0
    rows = [f"{step},{LOSS[step]:.4f},{norms[step]:.4f},{epsilon[step]}\n" for step in range(1000)]
    log.write_text("step,loss,grad_norm,eps_ratio\n")
    follower, raised = follow(log), []
    for start in range(0, 1000, 333):
        append(log, *rows[start : start + 333])
        raised += [found.event for found in follower.poll() if isinstance(found, Alarm)]
    whole = detect(read_logs(log).runs[0])
    assert len(whole) == 6
    assert [(each.step, each.kind, each.lead) for each in sorted(raised)] == [
        (each.step, each.kind, each.lead) for each in sorted(whole)
    ]


def test_a_level_is_passed_once_though_it_is_held(log: Path) -> None:
    log.write_text("step,loss,attention_logit_max\n")
    with closing(Follower(log, levels={"attention_logit_max": Level(100.0, is_above=True)})) as follower:
        raised = []
        for start in range(0, 300, 50):
            append(
                log, *(f"{step},{LOSS[step]:.4f},{20 if step < 120 else 110}\n" for step in range(start, start + 50))
            )
            raised += [found.event for found in follower.poll() if isinstance(found, Alarm)]
    (level,) = (event for event in raised if event.kind == "level_attention_logit_max")
    assert (level.step, level.usual, level.value) == (120, 100, 110)


def test_a_row_that_is_not_finished_is_read_once_it_is(log: Path, follow: Start) -> None:
    follower = follow(log)
    append(log, *LINES[:500], "500,")
    assert steps(follower) == []
    append(log, f"{LOSS[500]}\n")
    assert steps(follower) == [500]


def test_a_killed_follower_repeats_and_misses_nothing(log: Path, follow: Start) -> None:
    raised = []
    for start in range(0, 1000, 50):
        append(log, *LINES[start : start + 50])
        found = follow(log).poll()  # a new process at each look
        if start == 500:
            alarm = next(found)  # killed once it has raised the first alarm, before it has read the rest
            assert isinstance(alarm, Alarm)
            raised.append(alarm.event.step)
            continue
        raised += [each.event.step for each in found if isinstance(each, Alarm)]
    assert raised == [500, 800]
    assert steps(follow(log)) == []


def test_the_end_of_a_spike_is_said_and_is_no_alarm(log: Path, follow: Start) -> None:
    follower = follow(log)
    append(log, *LINES[:505])
    (alarm,) = follower.poll()
    assert isinstance(alarm, Alarm)
    assert alarm.event.ending == "none"
    append(log, *LINES[505:700])
    (said,) = follower.poll()
    assert isinstance(said, str)
    assert said.startswith("log.csv step 500: loss spike recovered at step 5")


def rotated(path: Path, text: str) -> None:
    path.rename(path.with_suffix(".1"))
    path.write_text(text)


def truncated(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.mark.parametrize(("change", "header"), [(rotated, HEADER), (truncated, ""), (truncated, "loss,step\n")])
def test_a_log_that_was_rotated_or_truncated_goes_on(
    change: Callable[[Path, str], None], header: str, log: Path, follow: Start
) -> None:
    """With the same columns, without a line that names them, or with others."""
    follower = follow(log)
    append(log, *LINES[:600])
    assert steps(follower) == [500]
    rest = LINES[600:]
    if header.startswith("loss"):
        rest = [",".join(reversed(line.strip().split(","))) + "\n" for line in rest]
    change(log, header + "".join(rest[:300]))
    assert steps(follower) == [800]


def test_the_end_of_a_rotated_log_is_read_first(log: Path, follow: Start) -> None:
    follower = follow(log)
    append(log, *LINES[:400])
    assert steps(follower) == []
    append(log, *LINES[400:600], "600,2")  # and a row that nobody will finish
    rotated(log, HEADER + "".join(LINES[600:]))
    assert steps(follower) == [500, 800]


def test_a_copy_that_grew_is_the_same_log(log: Path, follow: Start) -> None:
    """As where a log is fetched from another machine again and again."""
    follower = follow(log)
    append(log, *LINES[:600])
    assert steps(follower) == [500]
    copy = log.with_suffix(".new")
    copy.write_text(HEADER + "".join(LINES))
    copy.rename(log)
    assert steps(follower) == [800]


def test_a_log_appended_to_itself_raises_nothing_again(log: Path, follow: Start) -> None:
    follower = follow(log)
    append(log, *LINES)
    assert steps(follower) == [500, 800]
    append(log, *LINES, *LINES)
    said = list(follower.poll())
    assert said == ["log.csv: step 0 and others are written again; the last value of each counts"]


def test_another_run_in_the_place_of_the_log_has_alarms_of_its_own(log: Path, follow: Start) -> None:
    follower = follow(log)
    append(log, *LINES)
    assert steps(follower) == [500, 800]
    log.write_text(HEADER + "".join(LINES[:700]))
    assert steps(follower) == [500]


def test_a_run_that_goes_back_is_judged_by_its_new_losses(log: Path, follow: Start) -> None:
    """It spiked at 500, went back to 480, and spikes at 510 again."""
    follower = follow(log)
    append(log, *LINES[:520])
    assert steps(follower) == [500]
    again = calm() + bump(3.0, 510)
    append(log, *(f"{step},{again[step]:.4f}\n" for step in range(480, 700)))
    assert steps(follower) == [510]


def test_json_lines_of_several_runs_are_followed_each(tmp_path: Path, follow: Start) -> None:
    path = tmp_path / "log.jsonl"
    other = calm(1)
    rows = [
        json.dumps({"run": run, "step": step, "train": {"loss": float(losses[step])}})
        for step in range(1000)
        for run, losses in (("a", LOSS), ("b", other))
    ]
    path.write_text("\n".join(rows) + "\n")
    events = [found.event for found in follow(path).poll() if isinstance(found, Alarm)]
    assert [(event.run, event.step) for event in events] == [("a", 500), ("a", 800)]


def test_a_trainer_state_is_followed_though_it_is_written_anew(tmp_path: Path, follow: Start) -> None:
    path = tmp_path / "trainer_state.json"
    follower: Follower | None = None
    raised = []
    for rows in (300, 520, 900):
        history = [{"step": step, "loss": float(loss)} for step, loss in enumerate(LOSS[:rows])]
        path.write_text(json.dumps({"log_history": history}, indent=2))
        follower = follower or follow(path)
        raised.append(steps(follower))
    assert raised == [[], [500], [800]]
    assert steps(follow(path)) == []


def test_runs_of_mlflow_are_followed(tmp_path: Path, follow: Start) -> None:
    """New rows and new runs; what is half written is read once it is whole."""

    def log_metric(run: str, name: str, values: dict[int, float], end: str = "") -> None:
        path = tmp_path / "mlruns" / "1" / run / "metrics" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        append(path, *(f"{1_700_000_000_000 + step} {value} {step}\n" for step, value in values.items()), end)

    losses = dict(enumerate(LOSS.tolist()))
    log_metric("a", "loss", {step: losses[step] for step in range(500)}, f"1700000000500 {losses[500]} 5")
    follower = follow(tmp_path / "mlruns")
    assert steps(follower) == []
    log_metric("a", "loss", {}, "00\n")
    (alarm,) = follower.poll()  # and no remark on rows that are written again
    assert isinstance(alarm, Alarm)
    assert alarm.event.step == 500
    log_metric("a", "loss", {step: losses[step] for step in range(501, 600)})
    assert steps(follower) == []
    log_metric("b", "loss", {step: losses[step] for step in range(600)})
    assert steps(follower) == [500]
    log_metric("a", "loss", {step: losses[step] for step in range(600, 1000)})
    assert steps(follow(tmp_path / "mlruns")) == [800]


def test_alarms_of_reinforcement_learning_are_raised_once_each(tmp_path: Path, follow: Start) -> None:
    """In a log of more rows than are kept, which is read a few at a time."""
    random, row_n = np.random.default_rng(4), np.arange(900)
    columns = {
        "step": row_n,
        "loss": random.normal(0, 0.01, 900),
        "reward": (0.5 + random.normal(0, 0.03, 900)) * np.where(row_n < 650, 1, np.exp(-(row_n - 650) / 5)),
        "kl": random.lognormal(-4, 0.3, 900) * np.exp(np.clip((row_n - 720) / 5, 0, 5)),
        "grad_norm": random.lognormal(0, 0.3, 900) * (row_n < 800),
    }
    columns["loss"][800:] = 0
    columns["loss"][300:310] = 9
    path = tmp_path / "log.csv"
    path.write_text(",".join(columns) + "\n")
    follower, raised = follow(path), list[tuple[str, int]]()
    for start in range(0, 900, 30):
        append(
            path,
            *(",".join(str(column[row]) for column in columns.values()) + "\n" for row in range(start, start + 30)),
        )
        raised += [(found.event.kind, found.event.step) for found in follower.poll() if isinstance(found, Alarm)]
    assert [kind for kind, _ in raised] == ["reward_fall", "kl_growth", "nothing_learned"]
    assert [step for _, step in raised] == pytest.approx([651, 723, 800], abs=4)


def test_a_pointer_of_git_lfs_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("log.jsonl", "state.json"):
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        with pytest.raises(RequestError, match="pointer of Git LFS"):
            Follower(tmp_path / name)


def test_passes_over_the_data_are_counted_on_where_the_loss_goes_on(log: Path, follow: Start) -> None:
    """As a reader of the whole log counts them; another run under the same name is none."""
    follower = follow(log)
    losses = (2 + 4 * np.exp(-np.arange(500) / 60) + np.random.default_rng(0).normal(0, 0.02, 500)).tolist()
    losses[320] += 2.0
    append(log, *(f"{row % 100},{losses[row]:.4f}\n" for row in range(500)))
    assert steps(follower) == [320]
    append(log, *(f"{row},{8 - row / 100 + 3 * (row == 150):.4f}\n" for row in range(200)))
    assert steps(follower) == [150]


def test_a_log_without_rows_yet_is_waited_for(tmp_path: Path, follow: Start) -> None:
    path = tmp_path / "train.log"
    path.write_text("loading data\n")
    follower = follow(path)
    assert list(follower.poll()) == []
    assert not follower.is_judged()
    assert "its first line is 'loading data'" in follower.fault()
    append(path, *(f"iter {step}: loss {loss:.4f}, time 1ms\n" for step, loss in enumerate(LOSS)))
    assert steps(follower) == [500, 800]


def test_a_cursor_that_is_none_is_refused(log: Path, follow: Start) -> None:
    folder = log.with_name("log.csv.alarms")
    folder.mkdir()
    for text in ("{}", "[]", '{"raised": [[1]], "state": {}}'):
        (folder / CURSOR).write_text(text)
        with pytest.raises(RequestError, match="delete it to begin anew"):
            follow(log)


def following(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "lab", "watch", str(path), "--follow", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path.parent)


def ended(process: subprocess.Popen[str], number: int) -> tuple[int, list[str], list[str]]:
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    return process.returncode, out.splitlines(), err.splitlines()


def await_lines(path: Path, lines: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if path.exists() and path.read_text().count("\n") >= lines:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} has not {lines} lines")


def test_the_command_of_an_alarm_gets_it_as_json_and_may_fail(log: Path) -> None:
    """A follower that is killed outright goes on with the next alarm; SIGTERM and Ctrl-C end it with an exit code."""
    command = "cat >> got.jsonl; echo no network >&2; exit 3"
    append(log, *LINES[:520])
    process = following(log, "--on-alarm", command)
    await_lines(log.parent / "got.jsonl", 1)
    process.kill()
    process.communicate()
    append(log, *LINES[520:])
    process = following(log, "--on-alarm", command)
    assert process.stderr is not None
    assert process.stderr.readline() == "--on-alarm: exit code 3, no network\n"
    code, out, err = ended(process, signal.SIGTERM)
    events = [json.loads(line) for line in (log.parent / "got.jsonl").read_text().splitlines()]
    assert [(event["run"], event["step"], event["kind"]) for event in events] == [
        ("log.csv", 500, "spike"),
        ("log.csv", 800, "spike"),
    ]
    assert (code, err) == (1, [])
    assert [line.partition(":")[0] for line in out[1:-1]] == ["log.csv step 800"] * (len(out) - 2)
    assert out[-1] == "1 alarm raised"


@pytest.mark.slow
def test_ctrl_c_ends_a_calm_log_with_0_and_a_short_one_with_2(log: Path) -> None:
    append(log, *LINES[:490])
    short = log.with_name("short.csv")
    short.write_text(HEADER + "".join(LINES[:10]))
    codes = []
    for path in (log, short):
        process = following(path)
        await_lines(path.with_name(f"{path.name}.alarms") / CURSOR, 0)
        time.sleep(0.2)
        codes.append(ended(process, signal.SIGINT))
    assert codes[0] == (0, ["0 alarms raised"], [])
    code, _, err = codes[1]
    assert (code, len(err)) == (2, 1)
    assert "too few rows to judge: 10 of" in err[0]


MEMORY = """
import resource, sys
from pathlib import Path
from labwatch.events.following import Alarm, Follower
follower = Follower(Path(sys.argv[1]))
raised = [found.event.step % 10_000 for found in follower.poll() if isinstance(found, Alarm)]
print(len(raised), sum(5000 <= row < 5040 for row in raised), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def peak_memory(path: Path, rows: int) -> tuple[int, int, int]:
    """Alarms of a generated log, those among them at a planted spike, and peak memory of its follower, kB.

    A spike is planted in every 10,000 rows.
    """
    random = np.random.default_rng(0)
    with open(path, "w") as file:
        for start in range(0, rows, 10_000):
            losses = random.normal(2.5, 0.02, 10_000)
            losses[5000:5040] += 1.0
            for row, loss in enumerate(losses):
                step = start + row
                file.write(
                    f'{{"step": {step}, "train/loss": {loss:.6f}, "train/grad_norm": 1.0, "train/lr": 0.0003, '
                    f'"perf/tokens_per_second": 123456.7, "perf/mfu": 0.41, "time": "2026-01-01T00:00:00.000000"}}\n'
                )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)], check=True, capture_output=True, text=True, env=dict(os.environ)
    )
    alarms, planted, memory = map(int, done.stdout.split())
    return alarms, planted, memory


@pytest.mark.slow
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    *few, least = peak_memory(tmp_path / "short.jsonl", 10_000)
    *many, most = peak_memory(tmp_path / "long.jsonl", 60_000)
    assert (few, many) == ([1, 1], [6, 6])
    assert most - least < 4_000, "less than 4 MB more for a log of 8 MB more"


def table_of_losses() -> pd.DataFrame:
    """300 rows with a spike from step 200 on, and cells that are null."""
    loss = 3 + np.random.default_rng(0).normal(0, 0.02, 300)
    loss[200:206] += 2
    return pd.DataFrame({"_step": range(300), "train/loss": loss, "eval/loss": [3.0, *[None] * 299], "note": "a"})


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_table_in_parquet_is_a_log(is_packed: bool, tmp_path: Path, output_of: OutputOf) -> None:
    name = "run.parquet.gz" if is_packed else "run.parquet"
    table_of_losses().to_parquet(tmp_path / "run.parquet")
    content = (tmp_path / "run.parquet").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(content) if is_packed else content)
    assert f"{name} step 200: loss spike" in output_of("watch", tmp_path / name, code=1)
    assert "--follow takes a log that grows" in output_of("watch", tmp_path / name, "--follow", code=2)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.parquet", b"", "is empty"),
        ("empty.parquet.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("cut.parquet", b"PAR1" + bytes(100), "cannot be read as Parquet"),
        ("words.parquet", b"step 1 loss 2.0\n", "cannot be read as Parquet"),
        ("unpacked.parquet.gz", b"PAR1" + bytes(100), "cannot be read: Not a gzipped file"),
    ],
)
def test_what_is_wrong_with_a_table_is_said(
    name: str, content: bytes, said: str, tmp_path: Path, output_of: OutputOf
) -> None:
    (tmp_path / name).write_bytes(content)
    assert said in output_of("watch", tmp_path / name, code=2)
    assert "--follow takes a log that grows" in output_of("watch", tmp_path / name, "--follow", code=2)


def test_a_table_without_rows_is_empty_and_bytes_are_not_followed_as_text(tmp_path: Path, output_of: OutputOf) -> None:
    table_of_losses().iloc[:0].to_parquet(tmp_path / "none.parquet")
    assert "is empty" in output_of("watch", tmp_path / "none.parquet", code=2)
    (tmp_path / "run.log").write_bytes(bytes(10))
    assert "is binary" in output_of("watch", tmp_path / "run.log", "--follow", code=2)


def test_what_is_watched_in_a_folder_is_what_is_imported_from_one(tmp_path: Path, output_of: OutputOf) -> None:
    """Tables that are no logs, and what went to stderr, change no name of a run beside them."""
    for lr in (0.001, 0.01):
        folder = tmp_path / f"lr={lr}"
        folder.mkdir()
        table_of_losses().to_parquet(folder / "history.parquet")
        pd.DataFrame({"token": [1, 2, 3]}).to_parquet(folder / "data.parquet")
        (folder / "history.err").write_text("a warning\n")
    assert "history.parquet step 200: loss spike" in output_of("watch", tmp_path / "lr=0.01", code=1)
    imported = output_of("import", tmp_path, f"out={tmp_path / 'imported'}")
    assert "lr, 0.001 to 0.01" in imported
    assert "2 runs imported" in imported
