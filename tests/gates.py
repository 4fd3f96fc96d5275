"""Everything that a change of the code's shape must leave as it is, written as text: ``python tests/gates.py DIR``.

Write it before a change and after it, on one machine, and compare with ``diff -r``. It takes about 15 minutes of two
cores; ``python tests/gates.py DIR ids outputs`` writes these parts only.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from composing import points_of
from lab.__main__ import main
from lab.analysis import load, study, tables
from lab.analysis.drawing.registry import NothingToDrawError
from lab.core.errors import RequestError
from lab.core.shipped import data_folder, sweeps
from lab.report.all_figures import FIGURES
from lab.training.config import run_config
from lab.training.identity import run_id

RESULTS = Path(__file__).parents[1] / "results"
TIMES = ["wall_seconds", "model_steps_per_second", "out", "versions"]
TOY = [
    "data=synthetic",
    "model.width=16",
    "seq_len=16",
    "batch_size=4",
    "steps=60",
    "probes.every=1",
    "hydra/launcher=basic",
]
# One run of each kind that training treats in a way of its own.
KINDS = {
    "plain": ["optimizer=adamw"],
    "burst_and_response": ["bad_batches=huge_loss", "response=rewind_and_skip", "optimizer.lr=3e-2"],
    "restart_schedule": ["restarts=opt_175b"],
    "fp8": ["precision=fp8"],
    "mxfp8": ["precision=mxfp8"],
    "fp16": ["precision=fp16_emulated", "loss_scale=torch"],
    "adaptive_batch": ["batch=adaptive"],
    "muon": ["optimizer=muon"],
    "everything": ["intervention=[qk_layernorm,z_loss,swiglu]", "optimizer=adamw_coupled", "schedule=wsd"],
}
# Commands of the documentation that train nothing, or refuse.
COMMANDS = [
    "list",
    "claims",
    "claims {results} --json",
    "claims {results} --figure E.7",
    "claims {results} --source PaLM-540B",
    "leaderboard {results}/board --json",
    "predict {results}/logit_growth",
    "predict {results}/noise_scale",
    "compare {results}/quickstart {results}/logit_growth",
    "status {results}/quickstart",
    "check --show {results}/baselines/smoke.json",
    "check {results}/quickstart --baseline {results}/baselines/smoke.json",
    "watch {docs}/tables/log.csv",
    "sweep qwickstart",
    "train optimizer.lrr=1",
    "train steps=0",
    "report nowhere",
    "leaderbord",
]


def ids(out: Path) -> None:
    """The ids of all points of all sweeps at every scale, on a text with an empty fingerprint."""
    for scale in sorted(path.stem for path in data_folder("conf").glob("scale/*.yaml")):
        for name in sorted(sweeps()):
            try:
                composer, points = points_of(name, scale)
                lines = [run_id(run_config(composer.tree(point)), "") for point in points]
            except RequestError as refusal:
                lines = [f"refused: {refusal}"]
            write(out / "ids" / f"{name}.{scale}.txt", "\n".join(lines))


def records(out: Path) -> None:
    """Digests of what smoke, quickstart and one run of each kind leave behind."""
    with TemporaryDirectory() as scratch:
        for name in ("smoke", "quickstart"):
            run("sweep", name, "seed=0,1,2", f"out={scratch}/{name}")
            write(out / "records" / f"{name}.txt", digests(Path(scratch, name)))
        for name, words in KINDS.items():
            said = run("train", *TOY, *words, f"out={scratch}/{name}")
            folder = Path(scratch, name)
            write(out / "records" / f"{name}.txt", digests(folder) if (folder / "runs.parquet").exists() else said)


def digests(folder: Path) -> str:
    """A digest of each table of a folder, times left out; rows in one order."""
    records = load(folder)
    runs = records.runs.drop(columns=TIMES, errors="ignore").sort_values("id").sort_index(axis=1)
    metrics = records.metrics.astype({"id": str, "probe": str, "where": str})
    found = {"runs": runs, "metrics": metrics.sort_values(["id", "probe", "where", "step"])}
    if records.events is not None:
        found["events"] = records.events
    lines = (f"{name} {len(table)} {digest(table.to_csv(index=False))}" for name, table in found.items())
    return "\n".join([*lines, runs.to_csv(index=False)])


def outputs(out: Path) -> None:
    """What commands print, and their exit codes."""
    places = {"results": RESULTS, "docs": RESULTS.parent / "docs"}
    for number, command in enumerate(COMMANDS):
        name = command.replace("{results}", "").replace("{docs}", "").replace("/", "_").replace(" ", "_")
        write(out / "outputs" / f"{number:02}_{name}.txt", run(*command.format(**places).split()))


def reports(out: Path) -> None:
    """Every table of every report, and the numbers and words of every figure."""
    for folder in sorted(path.parent for path in RESULTS.rglob("runs.parquet")):
        name = folder.relative_to(RESULTS).as_posix().replace("/", "_")
        made = study(folder)
        for title, table in tables.files(made).items():
            write(out / "tables" / name / f"{title}.csv", table.to_csv(index=False, float_format="%.6g"))
        for title in FIGURES:
            draw = FIGURES[title]
            with contextlib.suppress(NothingToDrawError):
                write(out / "figures" / name / f"{title}.txt", drawn(draw(made.records, made.points, made.window)))


def drawn(figure: object) -> str:
    """Words of a figure and the numbers of its lines and marks, sorted, since artists have no order that matters."""
    lines = [getattr(figure, "caption", "")]
    for axes in figure.axes:  # type: ignore[attr-defined]
        words = [axes.get_title(), axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
        marks = [numbers(line.get_xydata()) for line in axes.lines]
        marks += [numbers(marks.get_offsets()) for marks in axes.collections]
        lines += [" | ".join(sorted(filter(None, words))), *sorted(marks)]
    return "\n".join(lines)


def numbers(points: object) -> str:
    array = np.ma.filled(np.ma.asarray(points, dtype=float), np.nan)
    return f"{len(array)} {digest(' '.join(f'{value:.5g}' for value in array.ravel()))}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def run(*words: str) -> str:
    """Standard output, standard error and exit code of a command."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(words)
    return f"exit {code}\n{said.getvalue()}{complained.getvalue()}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(str(RESULTS), "results") + "\n")


PARTS: dict[str, Callable[[Path], None]] = {"ids": ids, "outputs": outputs, "reports": reports, "records": records}

if __name__ == "__main__":
    out, *parts = sys.argv[1:]
    for part in parts or PARTS:
        PARTS[part](Path(out))
