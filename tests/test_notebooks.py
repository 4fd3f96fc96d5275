"""Notebooks: their outputs are those of the records in git; they define nothing, and explain what they show.

``python tests/test_notebooks.py [NAME ...]`` executes them and writes their outputs.
"""

from __future__ import annotations

import ast
import html
import io
import itertools
import re
import sys
import tempfile
from base64 import b64decode, b64encode
from copy import deepcopy
from functools import cache
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image
from traitlets.config import Config

from lab.analysis import forecast, load, probe_values, show, study, verdicts
from lab.analysis.sensitivity import WINDOW
from lab.core.errors import RequestError
from studies.claims import scoreboard
from studies.claims.verdicts import FIGURES_OF_THE_PAPER

HOME = Path(__file__).parents[1]
QUICKSTART = HOME / "results/quickstart"
NOTEBOOKS = sorted((HOME / "notebooks").glob("*.ipynb"))
TITLES = [
    "00_tour",
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
    "12_a_sweep_and_a_log_i_did_not_make",
    "13_crash_test",
    "14_experts",
    "15_my_model_while_it_trains",
]
TRAINS = "00_tour"  # alone, so its progress has times, and what it prints has numbers that may differ among processors
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.comprehension)
MOST_LINES = 4
MOST_BYTES = 2_500_000
COLOURS = 96
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

# A number with a decimal point or per cent in the text, and what a paragraph may name as the source of its numbers: a
# page or a file that is no notebook, or a command of the repository.
NUMBER = re.compile(r"(?<![\w.])(?P<number>\d+(?:\.(?P<digits>\d+)(?: ?%)?| ?%))")
SOURCE = re.compile(r"\]\((?![^)]*\.ipynb\))|`(?:python results/|lab predict )")
NO_PROSE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)

each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@cache
def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def sources(notebook: NotebookNode, kind: str) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == kind]


def test_all_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == TITLES


def executed(path: Path) -> NotebookNode:
    """The notebook with the outputs that git keeps, from its code alone, run as by ``jupyter execute``."""
    notebook = deepcopy(read(path))
    with tempfile.TemporaryDirectory() as place:  # its path is short enough for a socket
        # workers side by side would contend for ports
        config = Config({"KernelManager": {"transport": "ipc", "connection_file": f"{place}/kernel.json"}})
        folder = Path(place) / "notebooks" if path.stem == TRAINS else path.parent
        folder.mkdir(exist_ok=True)
        where = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, resources=where, config=config, record_timing=False).execute()
    notebook.metadata = METADATA
    for cell in notebook.cells:
        if cell.cell_type == "code" and "lab.sweep(" in cell.source:
            cell.outputs = []  # its progress
    for output in outputs_of(notebook):
        data = output.get("data", {})
        if "text/html" in data:  # what git keeps is small: a row in a line, and no style for every table
            rows = re.sub(r"<style.*?</style>", "", data["text/html"], flags=re.DOTALL)
            output.data = {"text/html": re.sub(r"\n\s*(?=<)(?!<tr)|(?<=>)\s*\n\s*(?!<tr)|(?<=\n) +(?=<tr)", "", rows)}
        if "image/png" in data:
            output.data["image/png"] = small(data["image/png"])
            del output.metadata["image/png"]["width"]
    return notebook


def small(picture: str) -> str:
    """A PNG at half its size and of few colours; both in base64."""
    with Image.open(io.BytesIO(b64decode(picture))) as image, io.BytesIO() as file:
        image.convert("RGB").reduce(2).quantize(COLOURS).save(file, "PNG", optimize=True)
        return b64encode(file.getvalue()).decode()


def outputs_of(notebook: NotebookNode) -> list[NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def words(notebook: NotebookNode) -> list[dict[str, object]]:
    """The outputs without pictures, whose bytes depend on versions of libraries."""
    return [
        {**output, "data": {kind: text for kind, text in output.data.items() if kind != "image/png"}}
        if "data" in output
        else {**output}
        for output in outputs_of(notebook)
    ]


@each
def test_git_keeps_its_outputs_and_figures(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    for cell in code:
        kinds = [kind for output in cell.outputs for kind in output.get("data", {output.get("name"): ""})]
        assert {*kinds} <= {"image/png", "text/plain", "text/html", "stdout"}, cell.source
        assert kinds.count("image/png") == cell.source.count("show("), cell.source
        last = ast.parse(cell.source).body[-1]
        assert bool(kinds) == (isinstance(last, ast.Expr) and "set_option" not in cell.source), cell.source
        tables = [
            output.data["text/html"]
            for output in cell.outputs
            if "<table" in output.get("data", {}).get("text/html", "")
        ]
        assert all("<td>" in table for table in tables), f"an empty table: {cell.source}"
    assert any("show(" in cell.source for cell in code)


def test_together_they_are_small() -> None:
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST_BYTES


@each
def test_code_is_short_defines_nothing_and_imports_the_analysis_alone(path: Path) -> None:
    allowed = {"pandas", "lab"} if path.stem == TRAINS else {"pandas"}
    for source in sources(read(path), "code"):
        tree = ast.parse(source)
        deeds = [node for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
        assert not deeds, f"a notebook defines nothing: {ast.unparse(deeds[0])}"
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert imports or len(tree.body) <= MOST_LINES, source
        for node in imports:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            assert all(name in allowed or f"{name}.".startswith("lab.analysis.") for name in names), names


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


def sections(notebook: NotebookNode) -> list[list[NotebookNode]]:
    """The cells from each heading to the next."""
    found: list[list[NotebookNode]] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            found.append([])
        found[-1].append(cell)
    return found


def values_shown(section: list[NotebookNode]) -> list[float]:
    """All numbers in the code of a section, in its tables and in the text below its figures."""
    shown = [cell.source for cell in section if cell.cell_type == "code"]
    for cell in section:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            shown += [output.get("text", ""), data.get("text/plain", ""), data.get("text/html", "")]
    plain = re.sub(r"(?<=\d),(?=\d{3})", "", html.unescape(re.sub(r"<[^>]+>", " ", " ".join(shown))))
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", plain)]


def unsourced(notebook: NotebookNode) -> list[str]:
    """Numbers of the text that their section does not show, to their digits, and whose paragraph names no source."""
    found = []
    for section in sections(notebook):
        values = values_shown(section)
        text = "\n\n".join(cell.source for cell in section if cell.cell_type == "markdown")
        for paragraph in re.split(r"\n\n|\n(?=- )", text):
            for match in [] if SOURCE.search(paragraph) else NUMBER.finditer(NO_PROSE.sub("", paragraph)):
                written, digits = float(match["number"].rstrip(" %")), len(match["digits"] or "")
                alike = [*values, *(100 * value for value in values if "%" in match["number"])]
                if not any(abs(value - written) < 0.501 * 10**-digits for value in alike):
                    found.append(match["number"])
    return found


@each
def test_numbers_of_the_text_are_shown_or_have_a_source(path: Path) -> None:
    assert not unsourced(read(path))


def test_a_number_that_no_output_shows_is_found() -> None:
    notebook = deepcopy(read(HOME / "notebooks/09_batch_size.ipynb"))
    text = next(cell for cell in notebook.cells if cell.cell_type == "markdown" and "noise scale grows" in cell.source)
    text.source += (
        "\n\nShown: 0.174, 0.17 and 17 %.\n\nNot: 0.18, 0.4321 and 7.7 %.\n\nOn [this page](page.md): 0.4321."
    )
    assert unsourced(notebook) == ["0.18", "0.4321", "7.7 %"]
    text.source += " See [another](01_lr_sensitivity.ipynb).\n\nOnly in [another](01_lr_sensitivity.ipynb): 0.5678."
    assert unsourced(notebook) == ["0.18", "0.4321", "7.7 %", "0.5678"]


def test_together_they_cover_every_sweep_and_every_figure_of_the_paper() -> None:
    code = "\n".join(source for path in NOTEBOOKS for source in sources(read(path), "code"))
    judged = re.findall(r'verdicts\("[^"]+"((?:, "[\w.]+")+)\)', code)
    assert set(re.findall(r'"([\w.]+)"', "".join(judged))) == set(FIGURES_OF_THE_PAPER)
    results = HOME / "results"
    committed = {table.relative_to(results).parts[0] for table in results.rglob("runs.parquet")}
    assert set(re.findall(r'"\.\./results/(\w+)(?![.\w])', code)) == committed - {"quickstart_fp32"}


def test_each_leads_to_the_next() -> None:
    for path, following in itertools.pairwise(NOTEBOOKS):
        assert f"]({following.name})" in read(path).cells[-1].source


@pytest.mark.slow
@each
def test_its_outputs_are_those_of_its_code(path: Path) -> None:
    made, kept = words(executed(path)), words(read(path))
    if path.stem == TRAINS:
        made, kept = ([output for output in each if output["output_type"] != "stream"] for each in (made, kept))
        assert [output["data"]["text/plain"] for output in made if output["output_type"] == "execute_result"] == [
            "0",
            "1",
        ]
    assert made == kept


@pytest.mark.parametrize("name", ["learning_rate_sensitivity", "logit_forecast"])
def test_a_figure_is_shown_with_its_caption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a picture with a text alternative, and a text below it, which escapes what is no HTML."""
    shown = show(load(QUICKSTART), name)
    displayed: list[dict[str, str]] = []
    widths = []

    def display(data: dict[str, str], *, metadata: dict[str, dict[str, int]], raw: bool) -> None:
        displayed.append(data)
        widths.extend(look["width"] for look in metadata.values())

    monkeypatch.setattr("IPython.display.display", display)
    shown._replace(caption=f"{shown.caption}\n\n<b>")._ipython_display_()
    picture, caption = displayed
    with Image.open(io.BytesIO(b64decode(picture["image/png"]))) as image:
        assert image.format == "PNG"
        assert [image.width // 2] == widths, "two pixels a point, for screens of high density"
    assert picture["text/plain"] == shown.caption.split("\n\n")[0]
    assert "95 %" in caption["text/html"]
    assert "&lt;b&gt;" in caption["text/html"]
    assert repr(shown) == shown.caption


@pytest.mark.slow
def test_a_study_is_taken_for_its_records() -> None:
    records, made = load(QUICKSTART), study(QUICKSTART, window=(1e-3, 1e-1))
    name = "learning_rate_sensitivity"
    assert show(made, name) == show(records, name, (1e-3, 1e-1)) != show(records, name)
    assert show(made, name, WINDOW) == show(records, name)
    assert forecast.say(made) == forecast.say(records)
    assert probe_values.late(made, "grad_norm", "").equals(probe_values.late(records, "grad_norm", ""))


@pytest.mark.slow
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


if __name__ == "__main__":
    for path in NOTEBOOKS:
        if path.stem in (sys.argv[1:] or TITLES):
            nbformat.write(executed(path), path)
