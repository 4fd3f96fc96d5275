"""A folder, a log, a baseline or a checkpoint from a stranger: read within limits, or refused in one line."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import planted
from lab import main
from lab.analysis.rendering.layout import Drawing
from lab.core import files
from lab.core.errors import RequestError
from lab.records import leases, plans, store
from lab.training.checkpoint import CheckpointConfig, Checkpointer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A study of 14 runs."""
    return planted.write(tmp_path / "theirs", list(planted.cards(widths=(32,), seeds=(0,))))


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    """The one line by which a command refuses, or nothing if it carries on."""
    capsys.readouterr()
    code = main(list(map(str, words)))
    message = capsys.readouterr().err
    assert code in (0, 1, 2), message
    assert message.count("\n") == (code == 2), message
    return message


LED_AWAY: dict[str, Callable[[Path], object]] = {
    "figures": lambda folder: main(["report", str(folder)]),
    "runs/new": lambda folder: store.write_run(folder, {"id": "new", "status": "finished"}, []),
    "checkpoints": lambda folder: plans.remove_checkpoints(folder, ["a"]),
    "plans": lambda folder: leases.hold(folder, ["a"]).__enter__(),
}


@pytest.mark.parametrize("name", LED_AWAY)
def test_nothing_is_changed_through_a_link_out_of_a_folder(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command, training and a job that takes hold of runs write through one, and the sweep deletes through one."""
    monkeypatch.setattr("lab.report.build.FIGURES", {"blank": lambda *_: Drawing()})
    mine, link = tmp_path / "mine", folder / name
    for precious in ("blank.svg", "run.json", f"{files.digest(['a'])}/fleet.json"):
        files.write_text(mine / precious, '["a"]')
    if link.exists():
        link.rename(tmp_path / "aside")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(mine)
    before = {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")}
    try:
        assert LED_AWAY[name](folder) == 2
        message = capsys.readouterr().err
    except RequestError as refusal:
        message = f"{refusal}\n"
    assert message.count("\n") == 1
    assert f"a link in {folder} leads {link}" in message
    assert {path: path.is_file() and path.read_bytes() for path in mine.rglob("*")} == before


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
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


def put(path: Path, what: str) -> None:
    """Something odd in place of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match what:
        case "pipe":
            os.mkfifo(path)
        case "endless":
            path.symlink_to("/dev/zero")
        case "huge":
            with open(path, "wb") as file:
                file.truncate(10**12)
        case text:
            path.write_text(text)


@pytest.mark.parametrize(
    ("name", "command", "what"),
    [
        ("runs/new/run.json", ["status", "{}"], "endless"),
        ("readings.csv", ["claims", "{}"], "huge"),
        ("baseline.json", ["check", "--show", "{}/baseline.json"], "[" * 100_000),
    ],
    ids=["endless", "huge", "deep"],
)
def test_an_odd_file_is_refused_or_left_out(
    name: str, command: list[str], what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.open_folder(tmp_path, "eager")
    put(tmp_path / name, what)
    answer(capsys, *(word.format(tmp_path) for word in command))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a": 1', f"[{2**63}]"])
def test_json_from_anybody_is_what_a_table_can_hold(content: str) -> None:
    for kind in (dict, list):
        with pytest.raises(ValueError, match=r"."):
            files.parse_json(content.encode(), kind)
    assert files.parse_json(f'[{2**63 - 1}, "\\ud83d\\ude00", {{}}]'.encode(), list) == [2**63 - 1, "😀", {}]


def test_a_pointer_of_git_lfs_is_told_from_what_it_points_to() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + 64 * b"0" + b"\nsize 637723\n"
    assert files.is_lfs_pointer(pointer)
    assert files.is_lfs_pointer(pointer.replace(b"\n", b"\r\n"))
    assert not files.is_lfs_pointer(b"")
    assert not files.is_lfs_pointer(b"version,loss\n1,2\n")
    assert not files.is_lfs_pointer(b"# " + pointer)


NUMBERS = ("optimizer.lr", "steps", "wall_seconds", "parameters_without_embeddings", "final_val_loss", "seed", "status")


def test_odd_numbers_on_a_card_are_drawn_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.report.build.FIGURES", {})
    cards = list(planted.cards(widths=(32,), seeds=(0,), lrs=(1e-3, 1e-2), arms=("z_loss",)))
    for key in NUMBERS:
        folder = tmp_path / key
        store.open_folder(folder, "eager")
        for card in cards:
            odd = {**card, key: {"a": 1}}
            store.write_run(folder, {**odd, "id": store.run_id(odd)}, [(0, "train_loss", "", 2.0)])
        for command in ("status", "report"):
            answer(capsys, command, folder)


def test_a_small_file_of_a_large_table_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_checkpoint_that_swells_is_not_opened(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "8.pt", "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("archive/data.pkl", bytes(10**6))
    with files.open_file(tmp_path / "8.pt") as file, pytest.raises(ValueError, match="larger inside than outside"):
        files.check_zip(file)


def test_an_odd_checkpoint_is_noted_and_passed_over(tmp_path: Path) -> None:
    keeper, notes = Checkpointer(tmp_path, ["a"], CheckpointConfig(1, 0, 1)), list[str]()
    put(keeper.folder / "8.pt", "pipe")
    put(keeper.folder / "1²", "text")
    assert keeper.restore({}, notes.append) is None
    assert len(notes) == 1
