"""A folder, a log, a baseline or a checkpoint from a stranger: read within limits, or refused in one line."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import planted
from lab.__main__ import main
from lab.analysis.rendering.layout import Drawing
from lab.core import files
from lab.core.errors import RequestError
from lab.records import plans, store
from lab.training.checkpoint import CheckpointConfig, Checkpointer
from sampling import few

DEEP = "[" * 100_000
# Deep enough to be refused, and not so deep that Python's own reader refuses it.
DEEP_ENOUGH = "[" * 100 + "]" * 100


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of 14 runs."""
    return planted.write(tmp_path / "theirs", list(planted.cards(widths=(32,), seeds=(0,))))


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line by which a command refuses, or nothing if it carries on."""
    capsys.readouterr()
    code = main(list(map(str, words)))
    said = capsys.readouterr().err
    assert code in (0, 1, 2), said
    assert said.count("\n") == (code == 2), said
    return said


LED_AWAY: dict[str, Callable[[Path], object]] = {
    "figures": lambda folder: main(["report", str(folder)]),
    "figures/": lambda folder: main(["report", str(folder), "--format", "png"]),
    "tables": lambda folder: main(["report", str(folder)]),
    "alarms": lambda folder: main(["watch", str(folder)]),
    "log.csv.alarms": lambda folder: main(["watch", str(folder / "log.csv")]),
    "runs": lambda folder: store.write_run(folder, {"id": "new", "status": "finished"}, []),
    "runs/new": lambda folder: store.write_run(folder, {"id": "new", "status": "finished"}, []),
    "plans": lambda folder: plans.freeze(folder, [[{"id": "a"}]]),
    "plans/": lambda folder: plans.forget_progress(folder, "plan"),
    "checkpoints": lambda folder: Checkpointer(folder, ["a"], CheckpointConfig(1, 0, 1)).save(1, {}, {}),
    "checkpoints/": lambda folder: plans.remove_checkpoints(folder, ["a"]),
}


@pytest.mark.parametrize("name", LED_AWAY)
def test_nothing_is_changed_through_a_link_out_of_a_folder(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = {"blank": lambda *_: Drawing()}
    monkeypatch.setattr("lab.report.build.FIGURES", drawn)
    monkeypatch.setattr("lab.report.paper.FIGURES", drawn)
    log = "step,loss\n" + "".join(
        f"{step},{9 if step in range(500, 520) else 2 + step % 7 / 50}\n" for step in range(900)
    )
    (folder / "log.csv").write_text(log)
    rows = [(step, "train_loss", "", 9.0 if step in range(500, 520) else 2 + step % 7 / 50) for step in range(900)]
    store.write_run(folder, planted.card(steps=900), rows)
    mine = tmp_path / "mine"
    for precious in ("blank.svg", "blank.png", "losses.csv", "plan.progress/0", f"{files.digest(['a'])}/1.pt"):
        files.write_text(mine / precious, "precious")
    files.write_text(mine / files.digest(["a"]) / "fleet.json", '["a"]')
    link = folder / name.rstrip("/")
    if name == "runs/new":
        link.parent.mkdir(exist_ok=True)
    elif link.exists():
        link.rename(tmp_path / "aside")
    link.symlink_to(mine)
    before = {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")}
    try:
        assert LED_AWAY[name](folder) == 2
        said = capsys.readouterr().err
    except RequestError as refusal:
        said = f"{refusal}\n"
    assert said.count("\n") == 1
    assert f"a link in {folder} leads {link}" in said
    assert {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")} == before


def test_a_link_to_a_folder_and_a_link_inside_one_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk/figures").mkdir(parents=True)
    (tmp_path / "named").symlink_to(tmp_path / "disk")
    (tmp_path / "disk/drawings").symlink_to("figures")
    files.write_text(tmp_path / "named/drawings/a.svg", "drawn", within=tmp_path / "named")
    assert (tmp_path / "disk/figures/a.svg").read_text() == "drawn"


def test_a_link_in_place_of_a_file_is_replaced_or_deleted_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/precious").write_text("precious")
    (tmp_path / "theirs").mkdir()
    for target in ("mine", "mine/precious"):
        link = tmp_path / "theirs/link"
        link.symlink_to(tmp_path / target)
        files.remove(link, within=tmp_path / "theirs")
        assert not link.is_symlink()
    (tmp_path / "theirs/report.html").symlink_to(tmp_path / "mine/precious")
    files.write_text(tmp_path / "theirs/report.html", "page")
    assert (tmp_path / "mine/precious").read_text() == "precious"


READ = ("store.json", "commands.json", "requests.json", "report.json", "runs/new/run.json")
READ += ("plans/0123456789abcdef.jsonl", "baseline.json", "log.jsonl", "readings.csv", "outcomes.csv")
COMMANDS = {
    "readings.csv": ["claims", "{}"],
    "outcomes.csv": ["transfer", "{}/outcomes.csv"],
    "plans/0123456789abcdef.jsonl": ["status", "{}"],
    "baseline.json": ["baseline", "show", "{}/baseline.json"],
    "log.jsonl": ["watch", "{}/log.jsonl"],
}


def put(path: Path, what: str) -> None:
    """Something odd in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "dangling":
            path.symlink_to("nowhere")
        case "folder":
            path.mkdir()
        case "huge":
            with open(path, "wb") as file:
                file.truncate(10**12)
        case text:
            path.write_text(text)


@pytest.mark.parametrize("what", ["pipe", "endless", "dangling", "folder", "huge", DEEP, DEEP_ENOUGH, "[]", "{}", "7"])
@pytest.mark.parametrize("name", READ)
def test_what_a_folder_holds_in_place_of_json_is_refused_or_left_out(
    name: str, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.open_folder(tmp_path, "eager")
    plans.freeze(tmp_path, [[{"id": "new"}]])
    put(tmp_path / name, what)
    answer(capsys, *(word.format(tmp_path) for word in COMMANDS.get(name, ["status", "{}"])))
    store.commands(tmp_path)
    store.requests(tmp_path)
    assert not plans.read_request(tmp_path, "0123456789abcdef")


@pytest.mark.parametrize("content", [DEEP, DEEP_ENOUGH, "7", '{"a": 1', '["\\ud800"]', f"[{'9' * 400}]", f"[{2**63}]"])
def test_json_from_anybody_is_what_a_table_can_hold(content: str) -> None:
    for kind in (dict, list):
        with pytest.raises(ValueError, match=r"."):
            files.parse_json(content.encode(), kind)
    assert files.parse_json(f'[{2**63 - 1}, "\\ud83d\\ude00", {{}}]'.encode(), list) == [2**63 - 1, "😀", {}]


@pytest.mark.parametrize("record", ['{"step": NaN}', '{"seconds": 1e300}', '{"rate": 1e-300}', '{"step": "x"}', "[]"])
def test_progress_that_makes_no_sense_is_left_out(
    record: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = plans.freeze(tmp_path, [[{"id": "a"}]])
    put(tmp_path / f"plans/{name}.progress/0", record)
    assert plans.read_progress(tmp_path, name) == {}
    assert not answer(capsys, "status", tmp_path)


@pytest.mark.parametrize("step", ["9" * 400, "inf", "-1", "1e300"])
def test_a_step_beyond_all_numbers_is_no_row_of_a_log(
    step: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [*range(40), step]
    (tmp_path / "log.csv").write_text("step,loss\n" + "".join(f"{each},2.0\n" for each in steps))
    (tmp_path / "log.jsonl").write_text("".join(f'{{"step": {each}, "loss": 2.0}}\n' for each in steps))
    for log in ("log.csv", "log.jsonl"):
        assert not answer(capsys, "watch", tmp_path / log)


ODD_NUMBERS = [math.nan, math.inf, -math.inf, "word", True, [1], {"a": 1}, 1e308, -1, 0]
NUMBERS = ("optimizer.lr", "steps", "wall_seconds", "parameters_without_embeddings", "final_val_loss", "seed", "status")


@pytest.mark.parametrize("number", few(ODD_NUMBERS, 4), ids=str)
def test_odd_numbers_on_a_card_are_drawn_or_refused(
    number: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.report.build.FIGURES", {})
    cards = list(planted.cards(widths=(32,), seeds=(0,), lrs=(1e-3, 1e-2), arms=("z_loss",)))
    for key in NUMBERS:
        folder = tmp_path / key
        store.open_folder(folder, "eager")
        for card in cards:
            odd = {**card, key: number}
            store.write_run(folder, {**odd, "id": store.run_id(odd)}, [(0, "train_loss", "", 2.0)])
        for command in ("status", "report"):
            answer(capsys, command, folder)


def test_a_table_that_is_small_on_disk_and_large_in_memory_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run of equal values takes a few bytes."""
    import pyarrow
    import pyarrow.parquet

    def swell(name: str, table: pyarrow.Table) -> str:
        pyarrow.parquet.write_table(table, folder / name, compression="zstd")
        assert (folder / name).stat().st_size < 2_000_000
        (folder / "runs").exists() and (folder / "runs").rename(folder / "aside")
        return answer(capsys, "status", folder)

    rows = pyarrow.nulls(files.MOST_CELLS // 5 + 1, pyarrow.int8())
    assert "more than 60,000,000" in swell("metrics.parquet", pyarrow.table(dict.fromkeys("abcde", rows)))
    wide = pyarrow.table({f"c{index}": [1] for index in range(files.MOST_COLUMNS + 1)})
    assert "2,001 columns, more than 2,000" in swell("runs.parquet", wide)


def test_a_checkpoint_that_is_larger_inside_than_outside_is_not_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "8.pt", "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("archive/data.pkl", bytes(10**6))
    with files.open_file(tmp_path / "8.pt") as file, pytest.raises(ValueError, match="larger inside than outside"):
        files.check_zip(file)


@pytest.mark.parametrize("what", ["pipe", "endless", "dangling", "folder", "huge", "text"])
def test_an_odd_checkpoint_is_noted_and_passed_over(what: str, tmp_path: Path) -> None:
    keeper, notes = Checkpointer(tmp_path, ["a"], CheckpointConfig(1, 0, 1)), list[str]()
    put(keeper.folder / "8.pt", what)
    put(keeper.folder / "1²", "text")
    assert keeper.restore({}, notes.append) is None
    assert len(notes) == 1
