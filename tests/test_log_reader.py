"""Logs of other programs: each format is known by its own lines, and what is none is refused with its first line."""

from __future__ import annotations

import gzip
import io
import json
import math
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import NoReturn

import numpy as np
import pandas as pd
import pytest

from lab import main
from lab.core.errors import RequestError
from lab.records import trackers
from labwatch.events import detect
from labwatch.events.log_names import given_columns, usual_columns
from labwatch.events.log_reader import LogReader
from labwatch.events.logs import read_logs
from labwatch.tables.run_folders import LOGS, OBJECTS, TABLES, TEXTS, read_run_folder
from sweeping import OutputOf
from test_watch import bump, calm

LOSS = np.round(calm() + bump(3.0), 4)
NORM = np.round(1 + 0.1 * LOSS, 4)
PREAMBLE = "using world size: 8\n------------------------ arguments ------------------------\n  lr ........ 0.0003\n"


SHORT = 200  # rows, of 1000, of a log in which forms matter and not how many rows they fill


def lines(form: str, count: int = 1000) -> str:
    """A line for each step."""
    return "".join(
        form.format(
            step=step,
            digit=step % 10,
            thousands=f"{step + 1000:,}",
            epoch=round(step / 1000, 3),
            loss=loss,
            bits=loss / np.log(2),
            ppl=np.exp(loss),
            less=loss - 0.1,
            more=loss + 0.1,
            norm=norm,
        )
        + "\n"
        for step, loss, norm in zip(range(count), LOSS.tolist(), NORM.tolist(), strict=False)
    )


NANOGPT = "iter {step}: loss {loss}, time 123.45ms, mfu 31.02%"
LLM_C = "step {step:4d}/19560 | loss {loss} (+0.21z)| norm {norm} (-0.5z)| lr 3.00e-04 | 98 ms | 50% bf16 MFU | 5 tok/s"
MEGATRON = (
    " [2026-01-01 00:00:00] iteration {step:8d}/  500000 | consumed samples: 256 | elapsed time per iteration (ms): 9 "
    "| learning rate: 3.000E-04 | global batch size: 256 | lm loss: {loss:.6E} | loss scale: 65536.0 "
    "| grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
STATE = {
    "best_metric": None,
    "log_history": [
        *({"epoch": 0.1, "step": n, "loss": LOSS[n], "grad_norm": NORM[n], "learning_rate": 3e-4} for n in range(1000)),
        {"epoch": 1.0, "step": 999, "eval_loss": 9.0},
    ],
}
# Name, content, and what is read besides the loss.
FORMATS: dict[str, tuple[str, str, set[str]]] = {
    "nanoGPT": ("train.log", f"{PREAMBLE}step 0: train loss 9.1, val loss 9.2\n{lines(NANOGPT, SHORT)}", set()),
    "llm.c": ("main.txt", f"+-----+\n| Parameter |\n{lines(LLM_C, SHORT)}val loss 9.1\n", {"grad_norm", "lr"}),
    "Megatron": ("slurm.out", PREAMBLE * 500 + lines(MEGATRON, SHORT), {"grad_norm", "lr", "loss_scale"}),
    "Megatron, of one rank, in colours": (
        "log.txt",
        lines("\x1b[32m[default7]:\x1b[0m" + MEGATRON, SHORT),
        {"grad_norm", "lr", "loss_scale"},
    ),
    "trainer state": ("trainer_state.json", json.dumps(STATE, indent=2), {"grad_norm", "lr"}),
    "trainer state in a line": ("trainer_state.json", json.dumps(STATE), {"grad_norm", "lr"}),
    "W&B": (
        "wandb_export.csv",
        '"Step","sunny - 7 - train/loss","sunny - 7 - train/loss__MIN","sunny - 7 - train/loss__MAX"\n'
        + lines('"{step}","{loss}","0","99"', SHORT),
        set(),
    ),
    "nested JSON": (
        "log.jsonl",
        lines('{{"_step": {step}, "train": {{"loss": {loss}, "grad_norm": {norm}}}, "val": {{"loss": 9}}}}', SHORT),
        {"grad_norm"},
    ),
    "JSON after a config": (
        "log.jsonl",
        '{"model": {"layers": 12}, "lr": 0.1}\n' + lines('{{"iteration": {step}, "lm loss": {loss}}}', SHORT),
        set(),
    ),
    "CSV of tabs": (
        "log.tsv",
        "Iteration\tTraining Loss\tgnorm\n" + lines("{step}\t{loss}\t{norm}", SHORT),
        {"grad_norm"},
    ),
}


# Lines as programs print them, by the form of a step, and the columns that they hold besides the loss.
SHAPES: dict[str, tuple[str, set[str]]] = {
    "dictionaries without a step": ("{{'loss': {loss}, 'grad_norm': {norm}, 'epoch': {epoch}}}", {"grad_norm"}),
    "dictionaries of text": ("{{'loss': '{loss}', 'eval_loss': None, 'learning_rate': '1e-05'}}", {"lr"}),
    "current and total steps": ('{{"current_steps": {step}, "total_steps": 999, "loss": {loss}, "lr": 0.1}}', {"lr"}),
    "colons without spaces": ("step:{step}/20000 train_loss:{loss} train_time:80ms step_avg:39.8ms", set()),
    "colours and ranks": (
        "[rank0]:[titan] 2026-01-01 10:00:0{digit},338 - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32mloss: {loss}  "
        "\x1b[38;2;180;60;0mgrad_norm: {norm}  \x1b[34mmemory: 9.4GiB(64.9%)  tps: 7,282\x1b[39m\n"
        "[rank1]:[titan] 2026-01-01 10:00:0{digit},338 - root - INFO - step: {step:2d}  loss: 99  grad_norm: 99",
        {"grad_norm"},
    ),
    "words without colons": (
        " iteration {step}/ 3000 | elapsed time per iteration (ms): 12879.0 | learning rate 3.0E-05 | "
        "lm loss {loss:.6E} | loss scale 64.0 |",
        {"lr", "loss_scale"},
    ),
    "bits beside a perplexity": (
        '01:02:03 | INFO | train_inner | {{"epoch": 1, "update": {epoch}, "loss": "{bits}", "ppl": "{ppl}", '
        '"num_updates": "{step}", "gnorm": "{norm}"}}',
        {"grad_norm"},
    ),
    "a line for each value": (
        "[2026-01-01 01:02:03] INFO [train:816, rank=0] [step={step}/739328]\n    train/CrossEntropyLoss={loss}\n"
        "    train/Perplexity=24,571\n    throughput/total_tokens=4,194,304\n    optim/total_grad_norm={norm}",
        {"grad_norm"},
    ),
    "a progress bar": ("\r  1%|#9        | {step}/1000 [00:05<00:45,  2.00it/s, v_num=0, loss={loss}]", set()),
    "a running mean beside the loss": ("Epoch 1 step {step} loss {loss} (2.5) avg_loss 2.5 lr 0.1", {"lr"}),
    "a tensor": ("step {step}, loss: tensor({loss}, device='cuda:0', grad_fn=<NllLossBackward0>)", set()),
    "perplexities": ("step {step} | ppl {ppl} | gnorm {norm}", {"grad_norm"}),
    "thousands of steps": ("step {thousands} | train loss {loss} | aux_loss 9 | max_lr 1", set()),
    "a table of bars": ("{step} | {loss} | {norm}", {"grad_norm"}),
    "micro-batches": ("step {step} loss {less}\nstep {step} loss {more}", set()),
}
BEFORE = {
    "a table of bars": "iter | loss | grad norm\n",
    "colons without spaces": "import torch\nprint('step:1 is in the source')\ntrain_loss = 0\nlr = 0.0018\n"
    + 80 * "="
    + "\n",
}
FORMATS |= {
    name: ("train.log", BEFORE.get(name, "Downloading: 100%\n") + lines(form, SHORT), others)
    for name, (form, others) in SHAPES.items()
}


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_every_row(name: str, tmp_path: Path) -> None:
    file, text, others = FORMATS[name]
    path = tmp_path / file
    path.write_text(text)
    (log,) = read_logs(path).runs
    assert log.name == ("sunny - 7" if name == "W&B" else file)
    first = 1000 if name == "thousands of steps" else 0
    count = 1000 if file == "trainer_state.json" else SHORT
    assert log.step_n.tolist() == list(range(first, first + count))
    np.testing.assert_allclose(log.columns["loss"], LOSS[:count], rtol=1e-5)
    assert {*log.columns} - {"loss"} == others
    if "grad_norm" in others:
        np.testing.assert_allclose(log.columns["grad_norm"], NORM[:count])
    if name in ("llm.c", "Megatron", "trainer state"):
        np.testing.assert_allclose(log.columns["lr"], 3e-4)


def forms_of_a_log() -> dict[str, tuple[str, list[tuple[int, float]]]]:
    """By what is hard about it a log and its rows: steps and losses."""
    rows = [(10 * n, round(8 - n / 10, 2)) for n in range(1, 41)]
    splits = [f"train,{step},{loss}\n" + 3 * f"valid,{step},9\n" for step, loss in rows]
    passes = [(n + 1, loss) for n, (_, loss) in enumerate(rows)]  # counted on from 1 over passes of 10 steps

    def joined(form: str, *more: str) -> str:
        lines = (form.format(step=step, loss=loss, k=step / 10, less=loss / 2, n=step // 10) for step, loss in rows)
        return "".join(f"{line}\n" + "".join(f"{each}\n" for each in more) for line in lines)

    def in_passes(form: str) -> str:
        return "".join(
            form.format(step=(n - 1) % 10 + 1, epoch=(n - 1) // 10 + 1, loss=loss) + "\n" for n, loss in passes
        )

    evaluation = [f"eval {n}/15: loss {9 + n % 3}" for n in range(15)]
    validation = [f"[validation] batch={n} loss={9 + n % 3}" for n in range(15)]
    return {
        "a total before its parts": (joined("step {step} part_a_loss {less} z_loss 0.1 total_loss {loss}"), rows),
        "a total after its parts": (joined("it: 1 iter {step} loss {loss} loss_ce {less} loss_box {less}"), rows),
        "a total of another name": (joined("step {step} | enc_loss {less} | dec_loss {less} | sum_loss {loss}"), rows),
        "more lines of evaluation": (joined("step {step}: train_loss {loss}", *evaluation), rows),
        "steps of validation of their own": (joined("[train] step={step} loss={loss}", *validation), rows),
        "a table with a split": ("split,step,loss\n" + "".join(splits), rows),
        "N of M": (joined("Training [ {step}/400]  lr: 1e-4  loss: {loss} ({less})"), rows),
        "a percentage beside N of M": (joined("{less}% [{step}/400] loss: {loss}"), rows),
        "a date, a rate and N of M": (joined("2026/11/27 10/s {step}/400 [00:01<00:02, 3.1it/s, loss={loss}]"), rows),
        "a smaller whole than done": (joined("{n}5/4 {step}/400 loss {loss}"), rows),
        "passes that are counted in each row": (joined("epoch {n}/40 [{step}/400] loss {loss}"), rows),
        "bars of evaluation": (joined("{step}/400 loss {loss}", *(f"{n}/15 [00:01]" for n in range(15))), rows),
        "a share of the loss": (joined("step {step} loss 12%, loss {loss}"), rows),
        "thousands": (joined("step={k}K loss={loss}"), [(100 * step, loss) for step, loss in rows]),
        "millions": (joined("step={k}M loss={loss}"), [(100_000 * step, loss) for step, loss in rows]),
        "W&B": (joined('{{"_step": {n}, "train/global_step": {step}, "train/loss": {loss}}}'), rows),
        "bars of epochs": (in_passes("Epoch {epoch}/4: 10%|#| {step}/10 [00:01<00:02, loss={loss}]"), passes),
        "passes": (in_passes("epoch {epoch} step {step} loss {loss}"), passes),
        "pairs": (joined("{step} {loss}"), rows),
        "pairs with commas": (joined("{step}, {loss}"), rows),
        "Markdown": ("| Step | Training Loss |\n|---:|:--|\n" + joined("| {step} | {loss} |"), rows),
        "a box": ("┃ step ┃ loss ┃\n┡━━━╇━━━┩\n" + joined("│ {step} │ {loss} │"), rows),
        "a later table": ("step,val_loss\n10,9\n20,8\n\nstep,loss\n" + joined("{step},{loss}"), rows),
        "an average": (joined("step {step} running_loss 5 loss_avg 5 trainer/lm_loss {loss}"), rows),
        "another loss in few rows": (joined("step {step} train_batch_loss {loss}") + 3 * "step 999 loss 5\n", [*rows]),
    }


@pytest.mark.parametrize("form", forms_of_a_log())
def test_the_loss_of_training_and_its_steps_are_found_in_every_form(form: str, tmp_path: Path) -> None:
    text, rows = forms_of_a_log()[form]
    path = tmp_path / ("log.jsonl" if text.startswith("{") else "train.log")
    path.write_text(text)
    logs = read_logs(path)
    assert not any("left out" in note for note in logs.notes)
    (log,) = logs.runs
    assert list(zip(log.step_n.tolist(), log.columns["loss"].tolist(), strict=True)) == rows


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["version https://git-lfs.github.com/spec/v1", "oid sha256:0", "size 9"], "pointer of Git LFS"),
        (["step,loss", "1000,2.31"], "a single row with 'loss', as the summary of a run"),
        (['{"train_loss": 2.31, "train_runtime": 100.0}'], "a single row with 'train_loss', as the summary of a run"),
        ([f"{n} 1 {n}" for n in range(9)], "holds no measurement"),
        (["12 3.5", *(f"words of a text, {n}" for n in range(40))], "no column of losses"),
        ([*(f"{n} {n}.5" for n in range(5)), *(f"words of a text, {n}" for n in range(40))], "no column of losses"),
        ([], "is empty"),
    ],
)
@pytest.mark.parametrize("suffix", ["log", "json"])
def test_what_is_no_log_is_named_as_what_it_is(lines: list[str], why: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"train.{suffix}"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(RequestError, match=why):
        read_logs(path)


@pytest.mark.parametrize(("base", "unit"), [(math.e, "nats"), (2.0, "bits"), (3.0, "nats")])
def test_a_perplexity_beside_the_loss_tells_bits_from_nats(base: float, unit: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(f"step {n} loss {5 - n / 20} ppl {base ** (5 - n / 20)}\n" for n in range(40)))
    logs = read_logs(path)
    assert f"in {unit}" in logs.notes[0]
    assert logs.runs[0].columns["loss"][0] == pytest.approx(5 * (math.log(2) if unit == "bits" else 1))


def mlflow_metric(path: Path, values: dict[int, float], *, begin: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(
            f"{1_700_000_000_000 + begin + n} {value} {step}\n" for n, (step, value) in enumerate(values.items())
        )
    return path


def test_folders_and_files_of_mlflow_are_logs(tmp_path: Path) -> None:
    """Named as the runs were; measurements without steps are counted; a run that goes back is read as it went on."""
    metrics = tmp_path / "mlruns" / "1" / "0a1b" / "metrics"
    losses = {10 * n: 8 - n / 10 for n in range(40)}
    mlflow_metric(metrics / "train" / "loss", losses)
    mlflow_metric(metrics / "train" / "grad_norm", dict.fromkeys(losses, 1.5))
    mlflow_metric(metrics / "system" / "cpu", dict.fromkeys(losses, 50.0))
    (metrics.parent / "meta.yaml").write_text("run_name: sunny-7\n")
    for path in (tmp_path, tmp_path / "mlruns", metrics.parent, metrics):
        logs = read_logs(path)
        (log,) = logs.runs
        assert (log.name, log.step_n.tolist()) == ("sunny-7", list(losses))
        assert log.columns["loss"].tolist() == list(losses.values())
        assert set(log.columns["grad_norm"]) == {1.5}
        assert logs.notes == [f"{path.name}: loss 'train/loss' in nats, grad_norm 'train/grad_norm'"]
    with (metrics / "train" / "loss").open("a") as file:
        file.write("17000000000")  # a line that is being written
    assert len(read_logs(metrics).runs[0].step_n) == 40
    alone = mlflow_metric(tmp_path / "other" / "loss", {})
    alone.write_text("".join(f"170000000{n:04} {9 - n / 10} 0\n" for n in range(30)))
    assert read_logs(alone).runs[0].step_n.tolist() == list(range(30))
    (metrics / "train" / "loss").rename(metrics / "train" / "accuracy")
    with pytest.raises(RequestError, match="no column of losses among"):
        read_logs(metrics)


def test_a_run_of_mlflow_that_goes_back_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    """Also where a measurement that comes later in the alphabet was logged before the loss of its step."""
    metrics = tmp_path / "run" / "metrics"
    mlflow_metric(metrics / "loss", {n: 5 - n / 50 for n in range(60)})
    mlflow_metric(metrics / "lr", dict.fromkeys(range(60), 1e-3))
    mlflow_metric(metrics / "loss", {n: 5.01 - n / 50 for n in range(40, 90)}, begin=1000)
    mlflow_metric(metrics / "lr", dict.fromkeys(range(40, 90), 5e-4), begin=1000)
    first, second = read_logs(tmp_path / "run").runs
    assert (set(first.columns["lr"]), second.went_back and second.went_back.lr) == ({1e-3}, 5e-4)


ODD = ["a,1000,", 'a,"1,001",2.5,1', "run,step,loss,norm", "a,10.5,2,1", "b,7,NaN,1", "a,1002,2", "", "b,8, 2.25 ,inf"]


@pytest.mark.parametrize("odd", [None, *ODD])
def test_lines_read_together_give_the_rows_of_each(odd: str | None) -> None:
    """Of two runs, in a table with two columns of one name; 600 lines decide about the columns."""
    table = [f"{'ab'[n % 2]},{n},{LOSS[n]},{NORM[n]},0" for n in range(900)]
    table = ["run,step,loss,norm,norm", *table[:700], *([] if odd is None else [odd]), *table[700:]]
    together, alone = LogReader({}), LogReader({})
    rows = [row for piece in (table[:600], table[600:]) for row in together.read_lines("\r\n".join(piece) + "\r\n")]
    assert repr(rows) == repr([row for line in table for row in alone.read(line)])
    assert (together.state(), together.dropped) == (alone.state(), alone.dropped)
    assert len(rows) >= 900


def test_what_was_read_is_said(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    rows = lines("rank:0 step:{step} bpb:{loss} gnorm:{norm}") + "rank:1 step:999 bpb:9\nstep:1.5 bpb:3\n"
    path.write_text(BEFORE["colons without spaces"] + rows)
    assert read_logs(path).notes == [
        "train.log: step 'step', loss 'bpb' in bits, converted to nats, grad_norm 'gnorm'",
        "train.log: left out 1 rows of other ranks than 0",
        "train.log: left out 1 rows whose step is no whole number, such as 1.5",
    ]


def test_a_compressed_log_and_standard_input_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = lines(NANOGPT).encode()
    (tmp_path / "train.log.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    packed, piped, folder = (read_logs(path).runs for path in (tmp_path / "train.log.gz", Path("-"), tmp_path))
    for (log,) in (packed, piped, folder):
        np.testing.assert_allclose(log.columns["loss"], LOSS)
    (tmp_path / "broken.log.gz").write_bytes(gzip.compress(content)[:-300])
    with pytest.raises(RequestError, match="cannot be read"):
        read_logs(tmp_path / "broken.log.gz")


@pytest.mark.parametrize("name", ["history.JSON", "history.json.gz"])
def test_rows_in_one_line_of_json_are_read_whatever_their_file_is_called(tmp_path: Path, name: str) -> None:
    content = json.dumps(STATE["log_history"]).encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    (log,) = read_logs(tmp_path / name).runs
    np.testing.assert_allclose(log.columns["loss"], LOSS)
    (tmp_path / "broken.json.gz").write_bytes(gzip.compress(content)[:-300])
    with pytest.raises(RequestError, match="cannot be read"):
        read_logs(tmp_path / "broken.json.gz")


@pytest.mark.parametrize(
    "line",
    [
        '{{"step": {step}, "loss": 1' + 400 * "0" + "}}",
        "step {step} loss 1e308",
        "{step},1e308",
        "step {step} loss inf",
    ],
)
def test_a_loss_beyond_all_measure_is_infinite(line: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("step,loss\n" + "".join(line.format(step=step) + "\n" for step in range(50)))
    (log,) = read_logs(path).runs
    assert np.isinf(log.columns["loss"]).all()
    assert [event.ending for event in detect(log)] == ["diverged"]


def test_lines_without_a_loss_are_refused_with_the_likeliest(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("starting\n" + "".join(f"step {n} accuracy {n / 9}\n" for n in range(40)) + "done in 3 s\n")
    with pytest.raises(RequestError, match=r"no column of losses among .*its likeliest lines hold step, accuracy"):
        read_logs(path)


def test_several_runs_in_a_table_are_several_runs(tmp_path: Path) -> None:
    """Columns of an exported chart, of which cells are empty where a run has no row; and rows that name their run."""
    chart = tmp_path / "chart.csv"
    chart.write_text(
        '"trainer/global_step","a - train/loss","a - grad_norm","b - train/loss","b - train/loss__MAX"\n'
        + "".join(f'"{n}","{2 + n % 7}","1","{"" if n % 2 else 3}",""\n' for n in range(100))
    )
    first, second = read_logs(chart).runs
    assert (first.name, len(first.step_n), [*first.columns]) == ("a", 100, ["loss", "grad_norm"])
    assert (second.name, second.step_n.tolist()) == ("b", list(range(0, 100, 2)))
    rows = tmp_path / "rows.csv"
    rows.write_text("run,step,loss\n" + "".join(f"{run},{n},{n % 5}\n" for n in range(50) for run in "xy"))
    assert [(log.name, len(log.step_n)) for log in read_logs(rows).runs] == [("x", 50), ("y", 50)]


def test_a_folder_of_logs_names_what_it_did_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    for name in ("a.log", "b.log"):
        (tmp_path / name).write_text(lines(NANOGPT))
    (tmp_path / "notes.txt").write_text("nothing of use\n")
    (tmp_path / "weights.bin").write_bytes(b"\0" * 100)
    monkeypatch.chdir(tmp_path)
    out = output_of("watch", ".", code=1).splitlines()
    assert out[2].startswith("not read: notes.txt holds no measurement")
    assert [line.split(":")[0] for line in out if " step 500: " in line] == ["a.log step 500", "b.log step 500"]
    assert out[-1] == "2 alarms in 2 runs"
    assert sorted(path.name for path in (tmp_path / "alarms").iterdir()) == ["a.log.html", "b.log.html"]


def test_one_odd_file_does_not_end_the_watch_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(lines(NANOGPT))
    (tmp_path / "binary.log").write_bytes(b"step 1 loss 2\n\0\1\2")
    (tmp_path / "carriage.log").write_bytes(lines(NANOGPT).replace("\n", "\r").encode())
    (tmp_path / "one_line.log").write_text("x" * 2**21)
    logs, notes = read_logs(tmp_path)
    assert [log.name for log in logs] == ["a.log", "carriage.log"]
    assert [len(log.step_n) for log in logs] == [1000, 1000]
    assert [note.split()[2].rpartition("/")[2] for note in notes if note.startswith("not read")] == [
        "binary.log",
        "one_line.log",
    ]


def test_a_checkpoint_folder_is_read_at_its_newest_state(tmp_path: Path) -> None:
    for step in (900, 1000):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": STATE["log_history"][:step]}))  # type: ignore[index]
    (log,) = read_logs(tmp_path).runs
    assert len(log.step_n) == 1000


def test_columns_may_be_given(tmp_path: Path, output_of: OutputOf) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("tokens,loss,ce\n" + lines("{step},9,{loss}"))
    (event,) = json.loads(output_of("watch", odd, "--columns", "step=tokens,loss=ce", "--json", code=1))["events"]
    assert event["step"] == 500
    odd.with_suffix(".jsonl").write_text(lines('{{"tokens": {step}, "out": {{"ce": {loss}}}}}'))
    assert main(["watch", str(odd.with_suffix(".jsonl")), "--columns", "step=tokens,loss=out/ce", "--json"]) == 1


def test_given_columns_are_pairs() -> None:
    assert given_columns("step=a,loss=b/c") == {"step": "a", "loss": "b/c"}
    with pytest.raises(RequestError, match="nearest: grad_norm"):
        given_columns("step=a,gradnorm=b")


def test_text_that_is_no_number_is_absent_and_nan_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n0,2\n1,\n2,n/a\n3,NaN\n4,2,2\n5,inf\n6\n7,2")
    (log,) = read_logs(path).runs
    assert log.step_n.tolist() == [0, 3, 5, 7]
    assert np.isnan(log.columns["loss"][1])
    assert np.isinf(log.columns["loss"][2])


def test_what_was_logged_of_a_step_in_two_lines_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f'{{"step": {n}, "loss": 2.0}}\n{{"step": {n}, "grad_norm": {n}}}\n' for n in range(40)))
    read = read_logs(path)
    np.testing.assert_array_equal(read.runs[0].columns["grad_norm"], np.arange(40))
    assert read.notes == ["log.jsonl: step 'step', loss 'loss' in nats, grad_norm 'grad_norm'"]


def test_a_log_of_too_many_bytes_is_for_followers(tmp_path: Path, output_of: OutputOf) -> None:
    path = tmp_path / "log.csv"
    path.write_text("step,loss\n")
    with open(path, "r+b") as file:
        file.truncate(10**9)
    assert "is larger than 256 MiB; lab watch" in output_of("watch", path, code=2)


def write_events(folder: Path) -> None:
    """Two runs: one in the folder itself, whose second file goes on, and one below."""
    from torch.utils.tensorboard import SummaryWriter

    for part, rows in (("", range(600)), ("", range(600, 1000)), ("other", range(1000))):
        with SummaryWriter(str(folder / part), filename_suffix=f".{rows.start}") as writer:
            for step in rows:
                writer.add_scalar("train/loss", LOSS[step] if not part else 2.0, step)
                writer.add_scalar("grad_norm", NORM[step], step, new_style=True)


@pytest.mark.extras
def test_event_files_of_tensorboard_are_runs_by_folder(tmp_path: Path) -> None:
    write_events(tmp_path / "tb")
    first, second = read_logs(tmp_path / "tb").runs
    assert (first.name, second.name) == ("tb", "other")
    np.testing.assert_allclose(first.columns["loss"], LOSS, rtol=1e-6)
    np.testing.assert_allclose(second.columns["grad_norm"], NORM, rtol=1e-6)
    with pytest.raises(RequestError, match=r"has no column 'los'; nearest: train/loss|known"):
        read_logs(tmp_path / "tb", columns={"loss": "los"})


@pytest.mark.extras
def test_a_growing_folder_of_events_is_followed(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    from labwatch.events.following import Alarm, Follower

    folder, raised = tmp_path / "tb", []
    with SummaryWriter(str(folder)) as writer:
        for start in range(0, 1000, 100):
            for step in range(start, start + 100):
                writer.add_scalar("loss", LOSS[step], step)
            writer.flush()
            raised += [found.event.step for found in Follower(folder).poll() if isinstance(found, Alarm)]
    assert raised == [500]


def test_event_files_without_tensorboard_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_of: OutputOf
) -> None:
    (tmp_path / "events.out.tfevents.1.host").write_bytes(b"")

    def missing(package: str) -> NoReturn:
        raise PackageNotFoundError(package)

    monkeypatch.setattr(trackers, "distribution", missing)
    said = output_of("watch", tmp_path, code=2)
    assert "pip install 'instability-lab[tensorboard]'" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("name", ["attention_entropy", "router_entropy", "attn/entropy"])
def test_an_entropy_of_a_part_of_the_model_is_not_that_of_a_policy(name: str) -> None:
    assert "entropy" not in usual_columns(["step", "loss", name], {})
    assert usual_columns(["step", "loss", name, "policy/entropy"], {})["entropy"] == "policy/entropy"


@pytest.mark.parametrize("suffix", LOGS)
def test_a_log_of_every_suffix_is_watched_and_imported(suffix: str, tmp_path: Path) -> None:
    path, rows = tmp_path / f"log{suffix}", pd.DataFrame({"step": range(1000), "loss": LOSS})
    if suffix in TEXTS:
        path.write_text(lines("step {step} loss {loss}"))
    elif suffix in TABLES:
        rows.to_csv(path, sep="\t" if suffix == ".tsv" else ",", index=False)
    elif suffix in OBJECTS:
        rows.to_json(path, orient="records", lines=suffix != ".json")
    else:
        rows.to_parquet(path)
    (log,) = read_logs(path).runs
    np.testing.assert_allclose(log.columns["loss"], LOSS)
    found = read_run_folder(tmp_path, lambda _: {"loss": rows["loss"]})
    assert found.table["loss"].tolist() == pytest.approx([np.median(LOSS[-100:])], rel=0.01)


@pytest.mark.parametrize("suffix", LOGS)
@pytest.mark.parametrize("content", [b"", b"\n\n", bytes(range(256)) * 40, b"{" * 500, b"\xff\xfe" * 300])
def test_a_file_of_any_format_that_is_no_log_is_refused_in_a_line(tmp_path: Path, suffix: str, content: bytes) -> None:
    """A reader of another package may raise errors of its own, which are no refusals."""
    (tmp_path / f"log{suffix}").write_bytes(content)
    with pytest.raises(RequestError) as refusal:
        read_logs(tmp_path / f"log{suffix}")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["err", "gen", "err (%)"])
def test_a_single_loss_with_a_word_of_adversarial_training_is_asked_for_and_read_if_it_is_named(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "log.md"
    rows = [f"| {epoch} | {9 - epoch / 10:.1f} | 0.3 |" for epoch in range(8)]
    path.write_text("\n".join([f"| epoch | {name} | gnorm |", "|---|---|---|", *rows]))
    (log,) = read_logs(path, columns=given_columns(f"loss={name}")).runs
    np.testing.assert_allclose(log.columns["loss"], 9 - np.arange(8) / 10)
    with pytest.raises(RequestError, match=r"has no column of losses among epoch, .*--columns loss="):
        read_logs(path)
