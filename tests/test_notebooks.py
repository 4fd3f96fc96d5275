"""Notebooks: they hold no outputs, define nothing, explain what they show, and run on the records in git."""

from __future__ import annotations

import ast
import itertools
import re
import tempfile
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

from lab.analysis import forecast, load, probe_values, show, study, verdicts
from lab.analysis.judging.verdicts import FIGURES_OF_THE_PAPER
from lab.analysis.sensitivity import WINDOW
from lab.core.errors import RequestError
from lab.report import scoreboard
from sampling import few

HOME = Path(__file__).parents[1]
QUICKSTART = HOME / "results/quickstart"
NOTEBOOKS = sorted((HOME / "notebooks").glob("*.ipynb"))
TITLES = [
    "01_lr_sensitivity",
    "02_attention_logits",
    "03_output_logits",
    "04_optimizer_interventions",
    "05_scaling_and_mup",
    "06_predicting_instability",
    "07_your_own_question",
    "08_loss_spikes",
    "09_batch_size",
    "10_which_intervention",
    "11_own_spikes_and_low_precision",
]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.comprehension)
MOST_LINES = 4

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def sources(notebook: NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_all_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == TITLES


@each
def test_git_keeps_no_outputs(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count") is not None] == []
    assert notebook.metadata == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


@each
def test_code_is_short_defines_nothing_and_imports_the_analysis_alone(path: Path) -> None:
    for source in sources(read(path), "code"):
        tree = ast.parse(source)
        deeds = [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
        assert not deeds, f"a notebook defines nothing: {ast.unparse(deeds[0])}"
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports or len(tree.body) <= MOST_LINES, source
        for node in imports:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert all(name == "pandas" or f"{name}.".startswith("lab.analysis.") for name in names), names


@each
def test_text_comes_before_every_figure_and_table(path: Path) -> None:
    """A title first; after each output a text, before the next output of its kind."""
    notebook = read(path)
    assert notebook.cells[0].source.startswith("# ")
    for kind in ("show(", "verdicts("):
        explained = False
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                explained = True
            elif kind in cell.source:
                assert explained, cell.source
                explained = False


def test_together_they_cover_every_sweep_and_every_figure_of_the_paper() -> None:
    code = "\n".join(source for path in NOTEBOOKS for source in sources(read(path), "code"))
    judged = re.findall(r'verdicts\("[^"]+"((?:, "[\w.]+")+)\)', code)
    assert set(re.findall(r'"([\w.]+)"', "".join(judged))) == set(FIGURES_OF_THE_PAPER)
    results = HOME / "results"
    committed = {table.relative_to(results).parts[0] for table in results.rglob("runs.parquet")}
    assert set(re.findall(r'"\.\./results/(\w+)', code)) == committed


@pytest.mark.parametrize(("path", "following"), [*itertools.pairwise(NOTEBOOKS)], ids=lambda path: path.stem)
def test_each_leads_to_the_next(path: Path, following: Path) -> None:
    assert f"]({following.name})" in read(path).cells[-1].source


@pytest.mark.parametrize("path", few(NOTEBOOKS, 1), ids=lambda path: path.stem)
def test_its_code_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    names: dict[str, object] = {}
    for source in sources(read(path), "code"):
        exec(source, names)  # what a cell defines is there in the next


@pytest.mark.slow
@each
def test_it_runs_from_top_to_bottom(path: Path) -> None:
    """In its own folder, as ``jupyter execute`` does it."""
    notebook = read(path)
    with tempfile.TemporaryDirectory() as place:  # its path is short enough for a socket
        # workers side by side would contend for ports
        config = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{place}/kernel.json"}})
        where = {"metadata": {"path": str(path.parent)}}
        NotebookClient(notebook, timeout=300, resources=where, config=config).execute()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert [out.text for out in outputs if out.get("name") == "stderr" and "Warning" in out.text] == []
    assert any("<svg" in out.get("data", {}).get("text/html", "") for out in outputs)


@pytest.mark.parametrize("name", ["learning_rate_sensitivity", "logit_forecast"])
def test_a_figure_is_shown_with_its_caption(name: str) -> None:
    shown = show(load(QUICKSTART), name)
    assert "<svg" in shown._repr_html_()
    assert "95 %" in shown._repr_html_()
    assert "<svg" not in repr(shown)


def test_a_study_is_taken_for_its_records() -> None:
    records, made = load(QUICKSTART), study(QUICKSTART, window=(1e-3, 1e-1))
    name = "learning_rate_sensitivity"
    assert show(made, name) == show(records, name, (1e-3, 1e-1)) != show(records, name)
    assert show(made, name, WINDOW) == show(records, name)
    assert forecast.say(made) == forecast.say(records)
    assert probe_values.late(made, "grad_norm", "").equals(probe_values.late(records, "grad_norm", ""))


def test_verdicts_are_those_of_the_scoreboard() -> None:
    lines = [line for line in scoreboard.judge_all(scoreboard.read([QUICKSTART])) if line.claim.figure in ("1", "E.2")]
    table = verdicts(QUICKSTART, "E.2", "1")
    assert table["claim"].tolist() == [line.claim.sentence for line in lines]
    assert table["verdict"].tolist() == [line.verdict.verdict for line in lines]
    assert set(table["figure"]) == {"1", "E.2"}
    assert len(set(verdicts(QUICKSTART)["figure"])) > 20


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="no figure '14'"):
        verdicts(QUICKSTART, "14")
    with pytest.raises(RequestError, match="learning_rate_sensitivity"):
        show(load(QUICKSTART), "learning_rate_sensitivty")
