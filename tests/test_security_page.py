"""Names from outside, as a page, a drawing, a table and a terminal show them: to be read, never obeyed."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pyarrow
import pytest

import planted
from lab import main
from lab.analysis.rendering import html
from lab.cli.commands import COMMANDS
from lab.core.printing import say
from lab.records import store
from lab.records.plans import FleetProgress
from lab.sweeping.terminal import Scene, Terminal

# Written into the page as it is, it would rename the page.
SCRIPT = "document.title = 'spr' + 'ung'"
TAGS = f'<script>{SCRIPT}</script><img src=x onerror="{SCRIPT}">'
HOSTILE = TAGS + " ]]>--></style></pre> $x^{2 \\foo$ \x1b[2J\x1b]0;x\x07\u202e"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study in which every word is hostile, and its page; Linux allows all but a slash in a name."""
    words = [
        "versions",
        "data_fingerprint",
        "data_notes",
        "reason",
        "notes",
        "model.name",
        "optimizer.name",
        "data.name",
    ]
    words += ["schedule.name", "parametrization.name", "probes.name", "scale.name", "precision", "out", "data.path"]
    hostile = {f"{HOSTILE}.key": HOSTILE, **dict.fromkeys(words, HOSTILE)}
    cards = list(planted.cards(arms=("z_loss", HOSTILE), widths=(32,), seeds=(0,), **hostile))
    cards[2] |= {"status": "diverged", "diverged_at": 200, "final_val_loss": math.nan}
    cards[4] |= {"status": "failed", "final_val_loss": None}
    folder = tmp_path_factory.mktemp("runs") / HOSTILE.replace("/", "")
    store.open_folder(folder, "eager")
    store.note_command(folder, f"lab sweep {HOSTILE}")
    for run in cards:
        rows = [] if run["status"] == "failed" else planted.heard(run)
        probe_rows = [(step, probe, where and HOSTILE, value) for step, probe, where, value in rows]
        store.write_run(folder, run, [*probe_rows, (0, HOSTILE, HOSTILE, 1.0)])
    return folder


@pytest.fixture(scope="module")
def summary(folder: Path) -> str:
    """What the terminal shows of it."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        assert main(["report", str(folder)]) == 0
        assert main(["predict", str(folder)]) in (0, 2)
        assert main(["claims", str(folder)]) == 0
        assert main(["report", f"{folder}/nowhere"]) == 2
    return out.getvalue()


class Tags(HTMLParser):
    """Every tag of a page with the names of its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names |= {tag, *(name for name, _ in attributes)}


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_the_page_holds_what_we_wrote_and_no_more(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    names = Tags(page).names
    assert not {"img", "onerror", "iframe", "object", "link"} & names
    assert page.count("<script") == page.count(f"<script>{html.SCRIPT}</script>") == 1
    assert page.index("Content-Security-Policy") < page.index("<title>")
    assert {"svg", "table", "pre"} <= names
    assert page.count("&lt;script&gt;") > 10


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_the_page_holds_nothing_to_obey(folder: Path) -> None:
    """Whoever shows the file in a terminal sees what a terminal shows of the study."""
    assert main(["export", str(folder), "--to", "csv", "--out", str(folder / "tables")]) == 0
    assert {"losses.csv", "metrics.csv"} <= {path.name for path in folder.glob("tables/*.csv")}
    for written in (folder / "report.html", *folder.glob("figures/*.svg"), *folder.glob("tables/*.csv")):
        letters = written.read_bytes().decode()
        assert all(letter.isprintable() or letter == "\n" for letter in letters), written.name
    assert (folder / "report.html").read_text().count("\\x1b[2J") > 10


@pytest.mark.parametrize(
    "make",
    [
        lambda text: html.document(text, []),
        html.section,
        html.paragraph,
        lambda text: html.bullets([text]),
        html.block,
        lambda text: html.table(pd.DataFrame({text: [text]})),
        lambda text: html.figure("<svg ></svg>", f"{text}\n\n{text}"),
        lambda text: html.downloads({text: text}) + html.savers(text),
        lambda text: html.cards([html.Card(text, text, text, text, text, html.paragraph(text))]),
    ],
)
def test_every_piece_of_a_page_takes_text_for_text(make: Callable[[str], str]) -> None:
    plain, hostile = Tags(make("calm")), Tags(make(HOSTILE))
    assert hostile.names == plain.names
    assert make(HOSTILE).replace("\n", "").isprintable()


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_drawings_are_whole_and_run_nothing(folder: Path) -> None:
    drawings = list(folder.glob("figures/*.svg"))
    assert drawings
    for drawing in drawings:
        tags = {element.tag.rpartition("}")[2] for element in ET.parse(drawing).iter()}
        assert not {"script", "img", "image", "a", "foreignObject"} & tags


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_tables_have_a_row_per_row_and_give_names_back(folder: Path) -> None:
    tables = {
        path.stem: list(csv.DictReader(io.StringIO(path.read_bytes().decode()))) for path in folder.glob("tables/*.csv")
    }
    assert {row["arm"] for row in tables["losses"] if "script" in row["arm"]}
    assert len(tables["losses"]) == 13
    assert all(None not in row and None not in row.values() for rows in tables.values() for row in rows)


@pytest.mark.slow
def test_a_terminal_gets_nothing_to_obey(summary: str) -> None:
    assert "\\x1b[2J" in summary
    assert all(letter.isprintable() or letter == "\n" for letter in summary)


def test_whatever_is_printed_holds_nothing_to_obey(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where a fault of the lab quotes it, and in the live display."""

    def fail(_: list[str]) -> None:
        raise pyarrow.ArrowInvalid(HOSTILE)

    monkeypatch.setitem(COMMANDS, "list", fail)
    assert main(["list"]) == 70
    say(HOSTILE)
    terminal = Terminal(sys.stdout, Scene([(HOSTILE, [(HOSTILE, 0.1)])], []))
    terminal.say(HOSTILE)
    terminal.show({0: FleetProgress(1, 2, 1.0, 1.0, 0.0, [2.0], [], None)}, 0.5, 1.0)
    terminal.close()
    for shown in capsys.readouterr():
        assert "\\x1b[2J" in shown
        assert "\x1b[2J" not in shown
        assert "\u202e" not in shown


@pytest.fixture(scope="module")
def browser() -> str:
    browsers = [name for name in BROWSERS if shutil.which(name)]
    if not browsers:
        pytest.skip("no Chromium here")
    return browsers[0]


def shown(browser: str, page: Path, profile: Path) -> str:
    """The page as the browser has it after its scripts have run."""
    words = [browser, "--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    words += ["--no-sandbox"] * (hasattr(os, "geteuid") and os.geteuid() == 0) + ["--dump-dom", page.as_uri()]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


def test_the_policy_names_our_script_by_its_digest() -> None:
    """A script with a changed letter, or any other, is not run."""
    digest = base64.b64encode(hashlib.sha256(html.SCRIPT.encode()).digest()).decode()
    directives = dict(entry.split(" ", 1) for entry in html.POLICY.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == f"'sha256-{digest}'"
    assert directives["base-uri"] == directives["form-action"] == "'none'"
    assert f'content="{html.POLICY}"' in html.document("calm", [])
    assert "</script" not in html.SCRIPT
    assert "innerHTML" not in html.SCRIPT


@pytest.mark.slow
@pytest.mark.usefixtures("summary")
def test_a_browser_runs_nothing_of_it(browser: str, folder: Path, tmp_path: Path) -> None:
    page = (folder / "report.html").read_text()
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "raw.html").write_text(f"<title>calm</title>{HOSTILE}")
    (tmp_path / "planted.html").write_text(page.replace("<h1>", f"{TAGS}<h1>", 1))
    assert "<title>sprung</title>" in shown(browser, tmp_path / "raw.html", tmp_path / "profile")
    for name in ("page.html", "planted.html"):  # a mark-up that slips through is still not run
        dumped = shown(browser, tmp_path / name, tmp_path / "profile")
        assert "<title>sprung" not in dumped, name
        assert "&lt;script&gt;" in dumped
        assert 'id="tip"' in dumped, "our own script ran"


DRAWING = """<svg width="300" height="200" viewBox="0 0 300 200">
<circle cx="60" cy="90" r="3" data-hover="loss 2.5&#10;seeds 0, 1"/>
<circle cx="260" cy="150" r="3" data-hover="&lt;img src=x onerror=&quot;document.title=1&quot;&gt;"/></svg>"""
# Appended to a page without its policy: does what a reader would, and leaves what the page then shows in its title.
READER = """<script>
var points = document.querySelectorAll("[data-hover]"), tip = document.getElementById("tip"), seen = [];
function at(type, target, x, y) {
  target.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: x, clientY: y, pointerType: "mouse"}));
  seen.push(tip.hidden ? "hidden" : tip.textContent);
}
var box = points[0].getBoundingClientRect(), drawing = document.querySelector("svg");
at("pointermove", drawing, box.left + 12, box.top + 3);
var tipBox = tip.getBoundingClientRect();
seen.push(tipBox.left >= 0 && tipBox.right <= innerWidth && tipBox.height > 30 ? "two lines inside" : "outside");
at("pointermove", drawing, box.left + 90, box.top + 3);
at("pointerdown", points[1], box.left + 200, box.top);
document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
seen.push(tip.hidden ? "hidden" : "still there");
points[0].focus();
if (!document.hasFocus()) points[0].dispatchEvent(new FocusEvent("focus")); // a window that is not in front fires none
seen.push(tip.textContent);
points[0].dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
seen.push(document.activeElement === points[1] ? "second" : "not the second");
seen.push(document.querySelector("button[data-png]").hidden ? "no button" : "button");
var pdf = document.querySelector("button[data-pdf]"), printed = [];
window.print = function () {
  var page = document.body.innerHTML.includes("300pt 200pt");
  printed = [document.title, drawing.parentNode.parentNode === document.body, page];
};
pdf.click();
window.dispatchEvent(new Event("afterprint"));
seen.push([...printed, document.title, drawing.closest("figure") !== null].join(" "));
document.title = JSON.stringify(seen);
</script>"""


ROWS = pd.DataFrame(
    {
        "claim": ["it rises", "it falls", "it stays"],
        "verdict": ["reproduced", "contradicted", "not run"],
        "readings": ["contradicted on 3 seeds", "", "not run"],
    }
)
FILTERER = """<script>
var field = document.querySelector("input"), choice = document.querySelector("select"), seen = [];
function set(control, value) {
  control.value = value;
  control.dispatchEvent(new Event("input"));
  var rows = [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  seen.push(rows.map((row) => row.cells[0].textContent));
}
for (var words of ["it", "3 seeds", "Contradicted ", "contradicted seeds", "it"]) set(field, words);
if (choice) for (var kind of ["contradicted", "not run", ""]) set(choice, kind);
document.title = JSON.stringify(seen);
</script>"""


KEYED = """<svg width="300" height="200" viewBox="0 0 300 200">
<g class="sample" data-colour="#0072b2"><path style="stroke: #0072b2" d="M1 1L9 9"/></g>
<g class="key" data-colour="#0072b2"><text x="40" y="20">with</text></g>
<path id="line" style="fill: none; stroke: #0072b2" d="M1 50L99 50"/>
<path id="other" style="stroke: #d55e00" d="M1 60L99 60"/>
<circle cx="60" cy="50" r="3" style="fill: #0072b2" data-hover="loss 2.5"/></svg>"""
PRESSER = """<script>
var key = document.querySelector(".key"), seen = [], saved = null;
function visible(name) { return getComputedStyle(document.getElementById(name)).display !== "none"; }
function look() { seen.push([visible("line"), visible("other"), key.getAttribute("aria-pressed")].join(" ")); }
HTMLAnchorElement.prototype.click = function () { saved = [this.download, decodeURIComponent(this.href)]; };
var box = key.getBoundingClientRect();
look();
key.dispatchEvent(new MouseEvent("click", {bubbles: true, clientX: box.left + 1, clientY: box.top + 1}));
look();
document.querySelector("button[data-svg]").dispatchEvent(new MouseEvent("click"));
seen.push([saved[0], ...["line", "other"].filter((name) => saved[1].includes(`id="${name}"`))].join(" "));
key.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter", bubbles: true}));
look();
seen.push(document.querySelector("details").open ? "open" : "folded");
history.replaceState(null, "", "#further");
window.dispatchEvent(new Event("hashchange"));
seen.push(document.querySelector("details").open ? "open" : "folded");
document.title = JSON.stringify(seen);
</script>"""


@pytest.mark.slow
def test_a_key_hides_lines_and_a_link_opens_a_section(browser: str, tmp_path: Path) -> None:
    parts = [html.figure(KEYED, "A drawing", html.savers("drawing"))]
    parts += [html.section("Further", html.paragraph("more"), folded=True)]
    page = html.document("calm", parts).replace(html.POLICY, "").replace("</body>", f"{PRESSER}</body>")
    (tmp_path / "page.html").write_text(page)
    dumped = shown(browser, tmp_path / "page.html", tmp_path / "profile")
    assert json.loads(unescape(dumped[dumped.index("<title>") + 7 : dumped.index("</title>")])) == [
        "true true true",
        "false true false",
        "drawing.svg other",
        "true true true",
        "folded",
        "open",
    ]


@pytest.mark.slow
def test_rows_are_filtered_by_their_own_verdict(browser: str, tmp_path: Path) -> None:
    page = html.document("calm", [html.table(ROWS, sorts=True, kind="verdict")])
    (tmp_path / "page.html").write_text(page.replace(html.POLICY, "").replace("</body>", f"{FILTERER}</body>"))
    dumped = shown(browser, tmp_path / "page.html", tmp_path / "profile")
    everything = ["it rises", "it falls", "it stays"]
    assert json.loads(unescape(dumped[dumped.index("<title>") + 7 : dumped.index("</title>")])) == [
        everything,
        ["it rises"],
        ["it falls"],
        ["it rises"],
        everything,
        ["it falls"],
        ["it stays"],
        everything,
    ]


@pytest.mark.slow
def test_a_point_tells_its_numbers_to_mouse_touch_and_keyboard(browser: str, tmp_path: Path) -> None:
    page = html.document("calm", [html.figure(DRAWING, "A drawing", html.savers("drawing"))])
    assert html.POLICY in page
    (tmp_path / "page.html").write_text(page.replace(html.POLICY, "").replace("</body>", f"{READER}</body>"))
    dumped = shown(browser, tmp_path / "page.html", tmp_path / "profile")
    seen = json.loads(unescape(dumped[dumped.index("<title>") + 7 : dumped.index("</title>")]))
    hostile = '<img src=x onerror="document.title=1">'
    first = "loss 2.5\nseeds 0, 1"
    assert seen == [
        first,
        "two lines inside",
        "hidden",
        hostile,
        "hidden",
        first,
        "second",
        "button",
        "drawing true true calm true",
    ]
