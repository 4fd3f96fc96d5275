"""Documents: every path, command and link in them is there, and the reference covers the public face."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import lab
import lab.analysis
from lab.cli.commands import COMMANDS

HOME = Path(__file__).parents[1]
PAGES = [
    *(HOME / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "results/README.md")),
    *sorted((HOME / "docs").rglob("*.md")),
    *sorted((HOME / "benchmarks").glob("*.md")),
    *(STUDIES := sorted((HOME / "studies").glob("*/README.md"))),
    *sorted((HOME / "notebooks").glob("*.ipynb")),
]
# The packages and their files; only the lab itself has a folder of this name.
LAB_PATH = re.compile(r"(?<![\w./-])lab/[\w/]+(?:\.(?:py|cpp))?")
# A command at the start of a line or of a piece of code; options may come first.
COMMAND = re.compile(r"(?:^|`|-m |bin/)lab (?!-)(\w+)", re.MULTILINE)
PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REFERENCE = (HOME / "docs" / "api.md").read_text(encoding="utf-8")
MODULES = {
    "lab": lab,
    "lab.analysis": lab.analysis,
    **{
        f"lab.analysis.{name}": value
        for name in lab.analysis.__all__
        if isinstance(value := getattr(lab.analysis, name), ModuleType)
    },
}


@cache
def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def missing_paths(text: str) -> list[str]:
    return [path for path in LAB_PATH.findall(text) if not (HOME / path).exists()]


def unknown_commands(text: str) -> list[str]:
    return [word for word in COMMAND.findall(text) if word not in (*COMMANDS, "WORD", "help", "version")]


def dead_links(text: str, folder: Path) -> list[str]:
    """Relative links, those of images included, that lead to no file."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [link for link in links if not link.startswith("https://") and not (folder / link).exists()]


def faults(find: Callable[[str], list[str]]) -> dict[str, list[str]]:
    """What is wrong with the pages, by page."""
    found = {str(page.relative_to(HOME)): find(text_of(page)) for page in PAGES}
    return {page: faults for page, faults in found.items() if faults}


def test_the_contents_of_the_site_list_every_page() -> None:
    """Else ``make docs`` fails, which draws all reports first."""
    contents = (HOME / "docs" / "conf.py").read_text(encoding="utf-8")
    pages = [page for folder in ("docs/*.md", "benchmarks/*.md", "notebooks/*.ipynb") for page in HOME.glob(folder)]
    names = [page.relative_to(HOME).with_suffix("").as_posix() for page in pages]
    assert [name for name in names if f"\n{name}\n" not in contents] == []


def test_what_pages_name_is_there() -> None:
    assert faults(missing_paths) == {}
    assert faults(unknown_commands) == {}
    assert [link for page in PAGES for link in dead_links(text_of(page), page.parent)] == []


def test_a_planted_fault_is_found() -> None:
    assert missing_paths("see `lab/optim/absent.py` and lab/core") == ["lab/optim/absent.py"]
    assert unknown_commands("`lab repot results`\nlab sweep x\n.venv/bin/lab jugde x") == ["repot", "jugde"]
    assert dead_links("[a](docs/none.md#b) [b](https://x.org) ![c](README.md)", HOME) == ["docs/none.md"]


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.parent.name)
def test_the_page_of_a_study_has_its_question_answer_cost_and_files(page: Path) -> None:
    text = text_of(page)
    assert re.findall(r"^\*\*(\w+)\.\*\* \S", text, re.MULTILINE) == ["Question", "Answer", "Cost"]
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    files = {path.name for path in page.parent.iterdir() if path.is_file()} - {"README.md", "__init__.py"}
    assert sorted(name for row in rows for name in re.findall(r"`([^`]+)`", row)) == sorted(files)


def test_every_study_has_a_page() -> None:
    studies = {path.parent.name for path in (HOME / "studies").glob("*/__init__.py")} - {"board", "claims"}
    assert studies == {page.parent.name for page in STUDIES}


def broken_sentences(text: str) -> list[str]:
    """Lines that Markdown takes for the beginning of a list, though they go on with a sentence."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^(?!\s|\d+\. |[-+*#|>] |<!--)\S.*\n((?:1\.|[-+*]) .*)", prose, re.MULTILINE)


def test_no_sentence_breaks_into_a_list() -> None:
    assert faults(broken_sentences) == {}


def test_a_sentence_that_breaks_into_a_list_is_found() -> None:
    text = "The level rises at learning rate\n1. There\n\n- one\n  more\n- two\n\n```sh\n# a\n- b\n```\n1. one\n2. two"
    assert broken_sentences(text) == ["1. There"]


def test_every_command_is_on_a_page() -> None:
    used = {word for page in PAGES for word in COMMAND.findall(text_of(page))}
    assert set(COMMANDS) <= used


def test_the_architecture_page_finds_what_it_names() -> None:
    rows = re.findall(
        r"^\|.*\| `((?:lab|labwatch|studies)/[\w/]+\.py)` \| ((?:`\w+`(?:, )?)+) \|$",
        text_of(HOME / "docs/architecture.md"),
        re.MULTILINE,
    )
    assert len(rows) == 38
    for file, names in rows:
        source = (HOME / file).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"^(?:def |class )?{name}\b", source, re.MULTILINE), (file, name)


def test_the_architecture_page_has_the_table_of_packages() -> None:
    from test_house import PACKAGES, TRAINING_PARTS

    page = text_of(HOME / "docs/architecture.md")
    rows = re.findall(r"^\| `(?:lab/)?(\w+)(?:\.py)?` \| [^|]+ \| ([^|]*)\|$", page, re.MULTILINE)
    seen: set[str] = set()
    for package, cell in rows:
        imports = seen if cell.strip() == "all of the above" else {name for name in cell.strip().split(", ") if name}
        assert imports == PACKAGES[package], package
        seen = {*seen, package}
    assert seen == set(PACKAGES) - {"lab", "__main__"}
    assert seen > TRAINING_PARTS


def test_the_reference_has_every_public_module() -> None:
    sections = re.findall(r"^#+ (lab[\w.]*)$", REFERENCE, re.MULTILINE)
    drawn = re.findall(r"automodule:: ([\w.]+)$", REFERENCE, re.MULTILINE)
    assert sections == sorted(MODULES)
    assert drawn == [MODULES[name].__name__ for name in sections]


def test_every_public_name_introduces_itself() -> None:
    """``PerRun`` and ``PerRunSeed`` are annotations, which have no docstring; the reference describes them."""
    described = re.findall(r"py:data:: (\w+)", REFERENCE)
    assert set(described) <= set(lab.__all__)
    public = [(module, name) for module in MODULES.values() for name in getattr(module, "__all__", [])]
    silent = [name for module, name in public if not inspect.getdoc(getattr(module, name))]
    assert set(silent) <= set(described)


def test_the_release_has_one_version_and_one_date() -> None:
    version, date = re.findall(r"^## (\S+), (\S+)$", text_of(HOME / "CHANGELOG.md"), re.MULTILINE)[0]
    citation = yaml.safe_load((HOME / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert PROJECT["version"] == version


def wrong_installs(text: str) -> list[str]:
    """What pip is asked for of the lab, other than ``$LAB`` and one of its extras where the lab is there already."""
    asked = re.findall(r"pip install [^`\n]*?((?:'|\"|\b)(?:instability-lab|\$LAB)[^\s`]*)", text)
    extras = {f"'instability-lab[{name}]'" for name in PROJECT["optional-dependencies"]}
    return [word for word in asked if word not in {'"$LAB"', *extras}]


def test_the_lab_is_installed_from_where_the_readme_says() -> None:
    assert faults(wrong_installs) == {}
    saying = [page for page in PAGES if '"$LAB"' in text_of(page) and page.name != "README.md"]
    assert [page.name for page in saying if "../README.md#install" not in text_of(page)] == []


def test_an_install_from_nowhere_is_found() -> None:
    text = "`pip install instability-lab pytest`, `pip install 'instability-lab[slrm]'`, `pip install \"$LAB\"`"
    assert wrong_installs(text) == ["instability-lab", "'instability-lab[slrm]'"]


def test_the_workflow_runs_make_targets_on_all_versions_of_python() -> None:
    jobs = yaml.safe_load((HOME / ".github/workflows/ci.yml").read_text())["jobs"]
    targets = re.findall(r"^([\w-]+):", (HOME / "Makefile").read_text(), re.MULTILINE)
    runs = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert [words[:2] for words in runs] == [["make", "test"], ["make", "test-all"], ["make", "docs"]]
    assert {words[1] for words in runs} <= set(targets)
    (low, high) = re.findall(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (HOME / "pyproject.toml").read_text())[0]
    assert jobs["test"]["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(int(low), int(high))]


BEGINNINGS = [page for page in PAGES if page.suffix == ".md" and page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", BEGINNINGS, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_a_page_begins_with_a_sentence(page: Path) -> None:
    """Before any command, table, list, picture or heading."""
    title, first, *_ = re.split(r"\n{2,}", text_of(page))
    assert title.startswith("# ")
    assert re.match(r"(?!```|[|#>!-]|<!--|\d+\. ).+", first)
    assert re.search(r"[.?](?: |\n|$)", first)


def test_a_page_lists_every_notebook() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\]\(\.\./notebooks/(\w+)\.ipynb\)", text_of(HOME / "docs/notebooks.md"), re.MULTILINE
    )
    assert listed == [(page.stem, page.stem) for page in PAGES if page.suffix == ".ipynb"]


needs_sphinx = pytest.mark.skipif(not find_spec("myst_nb"), reason="needs the extra docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once; a warning is an error."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", "-d", folder / "trees"]
    built = subprocess.run([*command, ".", folder / "site"], cwd=HOME, capture_output=True, text=True, check=False)
    assert (built.returncode, built.stderr) == (0, "")
    return folder / "site"


def index_of(site: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads(re.sub(r"^[^(]*\(|\)\s*$", "", (site / "searchindex.js").read_text()))
    return index


@pytest.mark.extras
@pytest.mark.xdist_group("site")
@needs_sphinx
def test_the_site_has_every_public_name(site: Path) -> None:
    anchors = re.findall(r'id="(lab[\w.]*)"', (site / "docs/api.html").read_text())
    modules = [MODULES[name].__name__ for name in MODULES]
    public = [f"{module}.{name}" for module in ("lab", "lab.analysis") for name in MODULES[module].__all__]
    assert [name for name in public if name not in (*anchors, *MODULES)] == []
    assert [module for module in modules if not any(anchor.startswith(f"{module}.") for anchor in anchors)] == []
    notebooks = [page for page in PAGES if page.suffix == ".ipynb"]
    assert all((site / f"notebooks/{page.stem}.html").exists() for page in notebooks)
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert not [page for page in pages if re.search(r'<script[^>]* src="https?:', page)], "a network is needed"
    notebook = (site / "notebooks/01_lr_sensitivity.html").read_text()
    assert "<math" in notebook
    assert '<img alt="../_images/' in notebook
    index = index_of(site)
    found = [index["docnames"][number] for number in index["terms"]["warmup"]]
    assert "notebooks/01_lr_sensitivity" in found, "which says warm-up"


def first_results(index: dict[str, Any], query: str) -> list[str]:
    """The pages that the search of the site shows first, by the scores of Sphinx's ``searchtools.js``."""
    query, titles, scored = query.lower(), index["titles"], []
    for found, most in ((index["alltitles"], 15), (index["indexentries"], 100)):
        for text, places in found.items():
            if query in text.lower() and len(query) >= len(text) / 2:
                for page, _, *is_main in places:
                    of_page = most == 15 and titles[page] == text
                    scored.append((round(most * len(query) / len(text)) + of_page if is_main != [False] else 0, page))
    stemmer = importlib.import_module("sphinx.search.en").SearchEnglish({})
    words = {stemmer.stem(word) for word in query.split() if word not in stemmer.stopwords}
    by_word = [scores_of_word(index, word) for word in words]
    scored += [
        (max(scores[page] for scores in by_word), page)
        for page in range(len(titles))
        if all(page in scores for scores in by_word)
    ]
    ranked = sorted(scored, key=lambda each: (-each[0], titles[each[1]].lower()))
    return list(dict.fromkeys(index["docnames"][page] for _, page in ranked))[:3]


def scores_of_word(index: dict[str, Any], word: str) -> dict[int, int]:
    """By page: a word counts more in a title, and less if it is only part of another word."""
    scores = {}
    for found, whole, part in ((index["terms"], 5, 2), (index["titleterms"], 15, 7)):
        terms = {word: whole} if word in found else {term: part for term in found if word in term}
        for term, score in terms.items():
            pages = found[term] if isinstance(found[term], list) else [found[term]]
            scores.update(dict.fromkeys(pages, score))
    return scores


@pytest.mark.extras
@pytest.mark.xdist_group("site")
@needs_sphinx
@pytest.mark.parametrize(
    ("query", "page"),
    [
        ("loss spike", "docs/my_run_has_spiked"),
        ("loss spikes", "docs/my_run_has_spiked"),
        ("diverges", "docs/my_run_has_spiked"),
        ("loss diverged", "docs/my_run_has_spiked"),
        ("NaN", "docs/my_run_has_spiked"),
        ("loss is nan", "docs/my_run_has_spiked"),
        ("learning rate too high", "docs/your_numbers"),
        ("batch size too large", "docs/which_batch_size"),
        ("fp8", "docs/low_precision"),
        ("dead experts", "docs/experts"),
    ],
)
def test_who_types_a_trouble_finds_the_page_that_answers_it(site: Path, query: str, page: str) -> None:
    assert page in first_results(index_of(site), query)


def test_make_draws_the_reports_of_folders_that_changed_and_no_others(tmp_path: Path) -> None:
    """With a stand-in for the program that draws."""
    for path in ("lab/a.py", "sweeps/a.yaml", "docs/reports.py", "pyproject.toml", "constraints.txt"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).touch()
    for name in ("one", "two"):
        (tmp_path / "results" / name).mkdir(parents=True)
        for file in ("store.json", "runs.parquet"):
            (tmp_path / "results" / name / file).touch()
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ntouch "${2:-build/reports}/${2:+report.html}" build/reports/index.html\n')
    python.chmod(0o755)
    for each in ("installed", "installed-docs"):
        (python.parent.parent / each).touch()
    shutil.copy(HOME / "Makefile", tmp_path)

    def drawn() -> list[str]:
        words = ["make", "reports", "PYTHON=python3", "TORCH_INDEX="]
        made = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        return re.findall(r"reports\.py build/reports/(\w+)", made)

    def change(path: str) -> None:
        later = max(each.stat().st_mtime for each in tmp_path.rglob("*")) + 2
        os.utime(tmp_path / path, (later, later))
        for each in (tmp_path / "build").rglob("report.html"):
            os.utime(each, (later - 1, later - 1))

    assert sorted(drawn()) == ["one", "two"]
    assert drawn() == []
    change("results/two/runs.parquet")
    assert drawn() == ["two"]
    change("lab/a.py")
    assert sorted(drawn()) == ["one", "two"]


def test_figures_on_white_turn_dark_with_the_site() -> None:
    """All that pages and notebooks show, but for the terminal, which is drawn on a dark ground."""
    style = (HOME / "docs/_static/wide.css").read_text(encoding="utf-8")
    dark = re.findall(r"body[^{]* article img([^{ ]*) \{\s*filter: invert[^}]*\}", style)
    assert dark == [':not([src*="/terminal"])'] * 2, "by the switch of the site, and by the browser"
    shown = {name for page in PAGES for name in FIGURE.findall(text_of(page))}
    assert {"card", "cliff", "failing_learning_rate"} <= shown
    assert [name for name in shown if "terminal" in name] == ["terminal"]
    assert not re.search(r"code[^{]*\{[^}]*overflow-wrap: anywhere", style)


FIGURE = re.compile(r"\((?:[\w./]+/)?(\w+)\.svg\)")
