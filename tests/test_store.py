"""Records appear whole or not at all, none is lost, none is overwritten, no column is dropped."""

from __future__ import annotations

import csv
import io
import math
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet
import pytest

import planted
from lab import main
from lab.core import files
from lab.core.errors import RequestError
from lab.records import plans, store


def leave(folder: Path, name: str, status: str = "finished", **card: object) -> None:
    """One run with two values."""
    rows = [(0, "train_loss", "", 5.0), (3, "grad_rms", "block0.attention.query", math.nan)]
    store.write_run(folder, {"id": name, "status": status, "final_val_loss": 2.0, **card}, rows)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store.open_folder(tmp_path / "out", "eager")
    return tmp_path / "out"


def test_what_is_written_is_read_back(folder: Path) -> None:
    leave(folder, "a", diverged_at=3, final_val_loss=math.nan, **{"optimizer.clip": math.inf, "optimizer.lr": 3e-4})
    runs, metrics, _ = store.read(folder)
    assert runs.loc[0, "optimizer.clip"] == math.inf
    assert runs.loc[0, "optimizer.lr"] == 3e-4
    assert runs.loc[0, "diverged_at"] == 3
    assert math.isnan(runs.loc[0, "final_val_loss"])
    assert metrics["step"].tolist() == [0, 3]
    assert metrics["where"].tolist() == ["", "block0.attention.query"]
    assert math.isnan(metrics["value"][1])


def test_a_step_that_a_run_made_again_is_there_twice(folder: Path) -> None:
    store.write_run(folder, {"id": "a", "status": "finished"}, [(3, "train_loss", "", 2.0)] * 2)
    assert store.gather(folder).metrics["value"].tolist() == [2.0, 2.0]


def test_tables_whose_text_has_either_type_are_read_together(tmp_path: Path) -> None:
    table = pd.DataFrame({"id": pd.array(["a", None], dtype="string"), "step": [0, 1]})
    texts = pyarrow.Table.from_pandas(table, preserve_index=False)
    large = pyarrow.schema([("id", pyarrow.large_string()), ("step", pyarrow.int64())], texts.schema.metadata)
    pyarrow.parquet.write_table(texts.cast(large), tmp_path / "large.parquet")
    files.write_table(tmp_path / "small.parquet", table)
    both = files.read_tables([tmp_path / "large.parquet", tmp_path / "small.parquet"])
    pd.testing.assert_frame_equal(both, pd.concat([table, table], ignore_index=True))


def test_no_column_is_dropped_and_the_fixed_ones_are_always_there(folder: Path) -> None:
    leave(folder, "a", **{"intervention.z_loss.coefficient": 1e-4})
    leave(folder, "b", **{"parametrization.base_width": 32})
    for runs in (store.read(folder).runs, store.gather(folder).runs, store.read(folder).runs):
        assert {*store.RUN_COLUMNS, "intervention.z_loss.coefficient", "parametrization.base_width"} == set(runs)
        assert list(runs)[: len(store.RUN_COLUMNS)] == list(store.RUN_COLUMNS)
        assert runs["intervention.z_loss.coefficient"].isna().tolist() == [False, True]
        assert {name: str(runs[name].dtype) for name in store.RUN_COLUMNS} == store.RUN_COLUMNS


def test_gathered_tables_stand_alone_and_take_later_runs_in(folder: Path) -> None:
    leave(folder, "a")
    whole = store.gather(folder)
    (folder / "runs" / "a").rename(folder.parent / "gone")
    pd.testing.assert_frame_equal(store.read(folder).runs, whole.runs)
    leave(folder, "b")
    assert store.gather(folder).runs["id"].tolist() == ["a", "b"]
    assert store.read(folder).metrics["id"].tolist() == ["a", "a", "b", "b"]


def without_runs(folder: Path) -> dict[str, bytes]:
    """The gathered tables, now that ``runs/`` is removed, as in a committed folder."""
    shutil.rmtree(folder / "runs")
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_runs_added_to_committed_tables_make_a_part_of_their_own(folder: Path) -> None:
    leave(folder, "a", "failed")
    leave(folder, "b")
    store.gather(folder)
    committed = without_runs(folder)
    leave(folder, "d")
    store.gather(folder)
    leave(folder, "a", final_val_loss=3.0)
    leave(folder, "c", **{"intervention.z_loss.coefficient": 1e-4})  # a part takes in what follows while it has runs
    whole = store.gather(folder)
    added = without_runs(folder)
    assert committed == {name: added.pop(name) for name in committed}
    assert set(added) == {"runs.2.parquet", "metrics.2.parquet"}
    assert whole.runs["id"].tolist() == ["a", "b", "c", "d"]
    assert whole.runs["final_val_loss"].tolist() == [3.0, 2.0, 2.0, 2.0]
    assert sorted(whole.metrics["id"]) == sorted("aabbccdd")
    for one, other in zip(store.read(folder), whole, strict=True):
        pd.testing.assert_frame_equal(one, other)
    assert store.statuses(folder) == dict.fromkeys("abcd", "finished")
    before = store.digest_of_tables(folder)
    assert before is not None
    store.gather(folder)
    assert {path.name: path.read_bytes() for path in folder.glob("*.parquet")} == {**committed, **added}
    (folder / "metrics.2.parquet").write_bytes(committed["metrics.parquet"])
    assert store.digest_of_tables(folder) != before


def test_a_damaged_part_is_made_again_or_refused_by_its_name(folder: Path) -> None:
    leave(folder, "a")
    store.gather(folder)
    without_runs(folder)
    leave(folder, "b")
    whole = store.gather(folder)
    (folder / "metrics.2.parquet").write_text("junk")
    assert store.statuses(folder) == {"a": "finished", "b": "finished"}
    pd.testing.assert_frame_equal(store.gather(folder).metrics, whole.metrics)
    for name in ("metrics.parquet", "runs.parquet"):  # what is in runs/ does not make them again
        (folder / name).write_text("junk")
        with pytest.raises(RequestError, match=f"the tables in .* are damaged: .*{name}"):
            store.read(folder)
        (folder / name).unlink()
    with pytest.raises(RequestError, match="damaged"):
        store.statuses(folder)


def test_equal_runs_give_equal_bytes_in_whatever_order_they_came(tmp_path: Path) -> None:
    rows = [(step, probe, where, 1.0) for step in (0, 5) for probe in ("q", "p") for where in ("b", "a")]
    happened = [(9, 9, "spike", 1.0, ""), (4, 10, "rewind", 5.0, ""), (9, 15, "spike", 1.0, "")]
    written = []
    for folder, names in ((tmp_path / "one", "ab"), (tmp_path / "other", "ba")):
        for name in names:
            store.write_run(folder, {"id": name, "status": "finished"}, rows[:: 1 if names == "ab" else -1], happened)
            store.gather(folder)
        written.append(without_runs(folder))
    assert len(written[0]) == 3
    assert written[0] == written[1]
    _, metrics, events = store.read(tmp_path / "one")
    order = list(zip(metrics["id"], metrics["step"], metrics["probe"], metrics["where"], strict=True))
    assert order == sorted(order)
    assert events["step"].tolist() == [9, 4, 9, 9, 4, 9]  # as they happened


def test_a_gathering_that_breaks_off_loses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(folder, "a")
    store.gather(folder)
    leave(folder, "b")
    write, left = files.write_table, [1]
    with monkeypatch.context() as broken:
        broken.setattr(
            files, "write_table", lambda *table, **how: write(*table, **how) if left and left.pop() else 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            store.gather(folder)
    for records in (store.read(folder), store.gather(folder)):
        assert records.runs["id"].tolist() == ["a", "b"]
        assert sorted(records.metrics["id"]) == ["a", "a", "b", "b"]


def test_a_finished_run_is_never_overwritten_and_a_failed_one_is(folder: Path) -> None:
    leave(folder, "a", "failed")
    store.gather(folder)
    leave(folder, "a", final_val_loss=3.0)
    leave(folder, "a", final_val_loss=4.0)
    runs = store.gather(folder).runs
    assert runs["final_val_loss"].tolist() == [3.0]
    assert store.statuses(folder) == {"a": "finished"}
    assert len(store.read(folder).metrics) == 2


@pytest.mark.parametrize("fault", ["card", "swapped", "no metrics"])
def test_a_damaged_run_counts_as_missing(folder: Path, fault: str) -> None:
    leave(folder, "a")
    leave(folder, "b", final_val_loss=1.0)
    card, metrics = folder / "runs/a/run.json", folder / "runs/a/metrics.parquet"
    match fault:
        case "card":
            card.write_text(card.read_text()[:-20])
        case "swapped":
            card.write_text((folder / "runs/b/run.json").read_text())
        case "no metrics":
            metrics.unlink()
    assert store.statuses(folder) == {"b": "finished"}
    leave(folder, "a")
    assert store.statuses(folder) == {"a": "finished", "b": "finished"}


def test_a_write_that_breaks_off_leaves_what_was_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "page.html"
    files.write_text(place, "before")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RequestError, match=r"cannot write .*page.html: disk full"):
        files.write_text(place, "after")
    assert place.read_text() == "before"
    assert {path.name for path in folder.iterdir() if path.is_file()} == {"page.html", "store.json"}


def test_two_that_write_a_file_at_once_each_write_it_whole(tmp_path: Path) -> None:
    with files.atomic_write(tmp_path / "file") as ours:
        ours.write_text("ours, ")
        files.write_text(tmp_path / "file", "theirs, which is longer")
        assert (tmp_path / "file").read_text() == "theirs, which is longer"
        with open(ours, "a") as more:
            more.write("whole")
    assert (tmp_path / "file").read_text() == "ours, whole"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("content", ['{"record_version": 2}', "{", "[]"])
def test_a_folder_of_another_version_is_refused(folder: Path, content: str) -> None:
    (folder / "store.json").write_text(content)
    for ask in (store.read, store.check_version, store.statuses):
        with pytest.raises(RequestError, match=r"version 2|cannot be read"):
            ask(folder)
    assert (folder / "store.json").read_text() == content


@pytest.mark.parametrize("content", ["", '{"record_version": 1', "[]", '{"record_version": 1, "engine": "ea'])
@pytest.mark.parametrize("is_gathered", [True, False])
def test_a_cut_header_of_a_folder_that_is_whole_is_made_anew(folder: Path, content: str, is_gathered: bool) -> None:
    """The runs tell the engine, be they in tables or not; a table that was imported has none."""
    header = folder / "store.json"
    store.open_folder(folder, "captured")
    whole = header.read_text()
    leave(folder, "a", engine="captured")
    if is_gathered:
        store.gather(folder)
        without_runs(folder)
    header.write_text(content)
    assert store.check_version(folder) == "captured"
    assert header.read_text() == whole
    imported = folder.parent / "imported"
    store.write_imported(
        imported, store.Records(*store.read(folder)[:2])._replace(runs=store.read(folder).runs.drop(columns="engine"))
    )
    (imported / "store.json").write_text(content)
    assert store.check_version(imported) is None
    assert len(store.read(imported).runs) == 1


def test_a_cut_header_is_no_help_where_runs_differ_or_are_damaged(folder: Path) -> None:
    leave(folder, "a", engine="captured")
    leave(folder, "b", engine="eager")
    (folder / "store.json").write_text("{")
    with pytest.raises(RequestError, match="cannot be read"):
        store.check_version(folder)
    for name in "ab":
        (folder / f"runs/{name}/run.json").write_text("{")
    with pytest.raises(RequestError, match="cannot be read"):
        store.check_version(folder)
    assert (folder / "store.json").read_text() == "{"


@pytest.mark.parametrize("command", ["status", "report", "export"])
def test_damaged_runs_that_no_table_holds_are_counted(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str], undrawn: None
) -> None:
    for card in planted.cards(arms=["none"], widths=[32], seeds=(0,), lrs=planted.LRS[:3]):
        store.write_run(folder, card, [(0, "val_loss", "", 5.0)])
    first, second, third = sorted(path.name for path in (folder / "runs").iterdir())
    store.gather(folder)
    (folder / f"runs/{first}/run.json").write_text("{")
    words = [command, str(folder), *(["--to", "csv", "--out", str(folder / "csv")] if command == "export" else [])]
    assert main(words) == 0
    assert "damaged" not in capsys.readouterr().err  # the tables hold it
    for path in folder.glob("*.parquet"):
        path.unlink()
    (folder / f"runs/{second}/metrics.parquet").unlink()
    (folder / "runs/unfinished").mkdir()  # written until the card is there
    assert main(words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "2 runs are damaged" in line
    assert [name for name in (first, second, third) if name in line] == [first, second]


def test_folders_without_runs_say_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no runs in"):
        store.read(folder)
    with pytest.raises(RequestError, match="no results folder"):
        store.read(tmp_path / "none")
    (folder / "runs.parquet").write_text("not parquet")
    (folder / "metrics.parquet").write_text("not parquet")
    with pytest.raises(RequestError, match=r"the tables in .* are damaged"):
        store.read(folder)


def test_equal_values_have_equal_digests_whatever_their_order() -> None:
    assert files.digest({"a": 1, "b": [1.5, None]}) == files.digest({"b": [1.5, None], "a": 1})
    assert files.digest({"a": 1}) != files.digest({"a": 2})


def test_commands_are_remembered_once_in_their_order(folder: Path) -> None:
    for command in ("lab b", "lab a", "lab b"):
        store.note_command(folder, command)
    assert store.commands(folder) == ["lab b", "lab a"]


def test_a_plan_is_frozen_and_progress_is_forgotten(folder: Path) -> None:
    fleets = [[{"id": "a"}], [{"id": "b"}, {"id": "c"}]]
    name = plans.freeze(folder, fleets)
    assert [plans.thaw(folder, name, index) for index in (0, 1)] == fleets
    with pytest.raises(RequestError, match="the same command writes it again"):
        plans.thaw(folder, name, 2)
    progress = plans.FleetProgress(1, 2, 3.0, 4.0, 0.0, [2.5], ["a note"], None)
    plans.write_progress(folder, name, 3, progress)
    assert plans.read_progress(folder, name) == {3: progress}
    plans.forget_progress(folder, name)
    assert plans.read_progress(folder, name) == {}
    assert plans.thaw(folder, name, 1) == fleets[1]


def test_a_run_without_gathered_metrics_is_read_from_its_files(folder: Path) -> None:
    leave(folder, "a")
    store.gather(folder)
    before = (folder / "metrics.parquet").read_bytes()
    leave(folder, "b")
    store.gather(folder)
    (folder / "metrics.parquet").write_bytes(before)
    assert store.read(folder).metrics["id"].tolist() == ["a", "a", "b", "b"]


def test_a_command_that_is_older_than_the_record_of_days_has_none(folder: Path) -> None:
    files.write_text(folder / "commands.json", '["lab old"]')
    for command in ("lab old", "lab new"):
        store.note_command(folder, command)
    assert {command: bool(request.day) for command, request in store.requests(folder).items()} == {
        "lab old": False,
        "lab new": True,
    }


def test_of_commands_that_name_the_rate_of_a_recipe_the_one_given_last_counts(folder: Path) -> None:
    for command, rate in (("lab a", 0.1), ("lab b", 0.2), ("lab a", 0.3)):
        store.note_command(folder, command, recipe_lrs={"one": rate})
    assert store.recipe_lrs(folder) == {"one": 0.3}
    assert store.commands(folder) == ["lab a", "lab b"]


def test_a_rate_of_a_recipe_that_no_run_can_have_is_none(folder: Path) -> None:
    rates = {"none": 0.0, "negative": -0.1, "endless": math.inf, "broken": math.nan, "small": 1e-300}
    store.note_command(folder, "lab a", recipe_lrs=rates)
    assert store.recipe_lrs(folder) == {"small": 1e-300}


def test_events_of_an_attempt_that_failed_are_gone_with_it(folder: Path) -> None:
    store.write_run(folder, {"id": "a", "status": "failed"}, [], [(1, 1, "spike", 9.0, "")])
    leave(folder, "a")
    assert store.statuses(folder) == {"a": "finished"}
    assert store.read(folder).events.empty


def test_tables_replaced_while_gathered_are_gathered_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(folder, "a")
    write, others = files.write_table, [1]

    def replaced(path: Path, table: pd.DataFrame, **how: Any) -> str:
        written = write(path, table, **how)
        if path.name == "runs.parquet" and others:
            others.pop()
            store.write_metrics(folder / "metrics.parquet", store.read(folder).metrics[:0])
        return written

    monkeypatch.setattr(files, "write_table", replaced)
    store.gather(folder)
    assert files.read_table(folder / "metrics.parquet")["id"].tolist() == ["a", "a"]


FORMULAS = ("=cmd()", "+1+1", "-2+3", "@sum", "\t=1", "\r=1", "=", "-", "+a", "-inf-")
PLAIN = ("-0.5", "+3", "-1e-3", "1=1", "a@b", "-inf", "", " x", "'=1", "3-2")


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay() -> None:
    table = pd.DataFrame({"=name": [*FORMULAS, *PLAIN], "number": -1.5, "-both": [-1, "-a", None, -2.5, True] * 4})
    head, *rows = csv.reader(io.StringIO(files.csv_text(table)))
    assert head == ["'=name", "number", "'-both"]
    cells = [row[0] for row in rows]
    assert not [cell for cell in cells[: len(FORMULAS)] if cell.startswith(files.FORMULA)]
    assert cells[0] == "'=cmd()"
    assert cells[len(FORMULAS) :] == list(PLAIN)
    assert {row[1] for row in rows} == {"-1.5"}
    assert [row[2] for row in rows[:5]] == ["-1", "'-a", "", "-2.5", "True"]
    assert table["=name"].tolist() == [*FORMULAS, *PLAIN]


def test_no_csv_of_an_imported_table_holds_what_a_terminal_or_a_spreadsheet_runs(tmp_path: Path, undrawn: None) -> None:
    """Not the tables of a report, nor an export; a text that was escaped is read back as it was."""
    rows = [
        {"arm": arm, "=who": "@me", "lr": lr, "loss": 3 + lr, "note": "\x1b[31mred"}
        for arm in ("=HYPERLINK(1)", "\x1b]0;title\x07", "-clip")
        for lr in (0.1, 0.2, 0.3)
    ]
    pd.DataFrame(rows).to_json(tmp_path / "a.jsonl", orient="records", lines=True)
    out = tmp_path / "out"
    assert main(["import", str(tmp_path / "a.jsonl"), f"out={out}"]) == 0
    assert main(["report", str(out)]) == 0
    assert main(["export", str(out), "--to", "csv", "--out", str(tmp_path / "csv")]) == 0
    written = [*(out / "tables").glob("*.csv"), *(tmp_path / "csv").glob("*.csv")]
    assert len(written) == 9
    arms = set[str]()
    for path in written:
        text = path.read_text()
        assert text.replace("\n", "").isprintable()
        table = pd.read_csv(io.StringIO(text), dtype=str, keep_default_na=False)
        cells = [*table, *table.to_numpy().ravel()]
        assert not [cell for cell in cells if cell.startswith(("=", "@")) or cell == "-clip"]
        arms |= set(table.get("arm", []))
    assert arms >= {"'=HYPERLINK(1)", "'-clip"}
    assert main(["import", str(tmp_path / "csv/runs.csv"), f"out={tmp_path / 'again'}"]) == 0
    again = set(store.read(tmp_path / "again").runs["arm"])
    assert {"=HYPERLINK(1)", "-clip"} < again
