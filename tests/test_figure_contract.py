"""Every figure can be read: no text over another or cut off, no word for what is absent, a text for every mark."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

import planted
from drawn_texts import complaints
from lab.__main__ import main
from lab.analysis import Records, judge, load, points
from lab.analysis.drawing.registry import NothingToDrawError
from lab.analysis.rendering import layout, marks, panels, style
from lab.analysis.rendering.layout import Drawing
from lab.analysis.sensitivity import HIGH, LOW
from lab.analysis.statistics import student_t
from lab.features.coordcheck.command import figure as coordinate_growth
from lab.features.predict.figures import gradient_forecast, logit_forecast
from lab.report.all_figures import FIGURES
from lab.report.build import first_figures

RESULTS = Path(__file__).parents[1] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/runs.parquet"))
COLUMN = style.Page(3.25, 8.0)
LRS = (1e-3, 1e-2, 1e-1)
EPS = "optimizer.eps"


def recorded(cards: list[dict[str, object]]) -> Records:
    """The cards, with values of every probe that a figure shows, at four steps."""
    rows = []
    for card in cards:
        lr, seed = float(card["optimizer.lr"]), int(card["seed"])  # type: ignore[arg-type, call-overload]
        for step in (0, 100, 200, 399):
            value = (1 + step / 100) * (1 + 30 * lr) * (1 + 0.1 * seed)
            whole = {
                "train_loss": 5 / (1 + step / 100) + 0.1 * seed,
                "output_logit_mean": -value,
                "log_z_square": value,
            }
            rows += [(card["id"], step, probe, "", number) for probe, number in whole.items()]
            for block in ("block0", "block1"):
                inside = dict.fromkeys(("attention_logit_max", "query_norm", "key_norm", "block_rms"), value)
                rows += [(card["id"], step, probe, block, number) for probe, number in inside.items()]
                rows.append((card["id"], step, "query_key_cosine", block, 0.1 * (1 + lr)))
                for tensor in ("mlp_up", "attention.key"):
                    where = f"{block}.{tensor}"
                    rows += [
                        (card["id"], step, "grad_rms", where, 1e-6 / value),
                        (card["id"], step, "update_rms", where, 0.3),
                    ]
    return planted.records_of(cards, rows)


def cards(seeds: int = 3, **shape: object) -> list[dict[str, object]]:
    """Planted cards, of which one diverged."""
    made = list(planted.cards(**{"lrs": LRS, "seeds": range(seeds), **shape}))  # type: ignore[arg-type]
    made[-1] |= {"status": "diverged", "diverged_at": 200, "final_val_loss": math.nan}
    return made


@cache
def small(name: str) -> Records:
    """Small records of every shape that a sweep has."""
    if name == "sizes":
        return recorded(cards())
    if name == "one size":
        return recorded(cards(widths=(32,)))
    if name == "one run":
        return recorded(cards(seeds=1, widths=(32,), arms=("z_loss",), lrs=(1e-2,)))
    if name == "many seeds":
        return recorded(cards(seeds=8, widths=(32,)))
    if name == "long names":
        arms = (
            "a_custom_model_with_a_long_name_and_no_break_at_all+z_loss",
            "qk_layernorm+z_loss with words of every length",
        )
        return recorded(cards(seeds=2, widths=(32, 64, 128), arms=arms))
    runs = [
        planted.card(**{EPS: eps, "optimizer.lr": lr, "seed": seed}, final_val_loss=2 + lr + 20 * eps + 0.01 * seed)
        for eps in (0.0, 1e-15, 1e-8, 1e-5, 1e-3)
        for lr in LRS
        for seed in range(3)
    ]
    return recorded(runs)


# Between them they use every kind of panel.
FEW = ("learning_rate_sensitivity", "best_loss_with_size", "loss_over_steps", "loss_against_setting")


def drawings(records: Records, names: Iterator[str] | None = None) -> Iterator[tuple[str, Drawing]]:
    """Every figure that applies, by name."""
    runs = judge(points(records.runs))
    for name in names or FIGURES:
        try:
            yield name, FIGURES[name](records, runs)
        except NothingToDrawError:
            continue


def wrong(shown: Iterator[tuple[str, Drawing]]) -> dict[str, list[str]]:
    """What is wrong with these figures, by name; at least one must be drawn."""
    found = {name: complaints(drawing) for name, drawing in shown}
    assert found
    return {name: sentences for name, sentences in found.items() if sentences}


def test_every_figure_can_be_read() -> None:
    assert not wrong(drawings(small("sizes")))
    assert not wrong(drawings(small("setting"), iter(["updates_by_epsilon"])))


@pytest.mark.parametrize("shape", ["one run", pytest.param("long names", marks=pytest.mark.slow)])
def test_figures_of_every_shape_can_be_read(shape: str) -> None:
    assert not wrong(drawings(small(shape), iter(FEW)))


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["setting"])
def test_figures_can_be_read_in_a_column_of_a_paper(shape: str) -> None:
    with style.drawn_for(COLUMN):
        shown = list(drawings(small(shape), iter([*FEW, "attention_logit_with_size"])))
        assert not wrong(iter(shown))
    assert {round(float(drawing.get_figwidth()), 6) for _, drawing in shown} == {3.25}


# One of many learning rates, and one of a single one.
@pytest.mark.parametrize("folder", [RESULTS / "mup", RESULTS / "embedding_gradients"], ids=lambda folder: folder.name)
def test_the_first_figure_of_every_sweep_can_be_read(folder: Path) -> None:
    runs = pd.read_parquet(folder / "runs.parquet")
    records = planted.records_of([])._replace(runs=runs)
    if runs.loc[runs["optimizer.lr"].between(LOW, HIGH), "optimizer.lr"].nunique() > 1:
        assert not wrong(drawings(records, iter(["learning_rate_sensitivity"])))
    else:
        assert not wrong(islice(drawings(load(folder), iter(first_figures())), 1))


@pytest.mark.slow
@pytest.mark.parametrize("page", [style.SCREEN, COLUMN], ids=["screen", "column"])
def test_every_figure_of_the_results_can_be_read(page: style.Page) -> None:
    """Each of the first sweep that has it."""
    left = list(FIGURES)
    with style.drawn_for(page):
        for folder in FOLDERS:
            shown = dict(drawings(load(folder), iter([*left])))
            found = {name: sentences for name, drawing in shown.items() if (sentences := complaints(drawing))}
            assert not found, folder.name
            left = [name for name in left if name not in shown]


def test_panels_are_as_high_as_asked_for_and_the_key_is_whole() -> None:
    """Long names of arms take room from neither; a key longer than the panels makes the figure longer."""

    def drawn(arms: int) -> Drawing:
        names = [f"intervention_number_{i}_of_a_long_and_wordy_kind+z_loss" for i in range(arms)]
        runs = planted.records(list(planted.cards(names, lrs=LRS))).runs
        ((_, drawing),) = drawings(planted.records_of([])._replace(runs=runs), iter(["best_loss_with_size"]))
        return drawing

    few, many = drawn(2), drawn(9)
    assert not complaints(many)
    assert many.get_figheight() > 1.3 * few.get_figheight()
    height = few.axes[0].get_position().height * few.get_figheight()
    assert height == pytest.approx(17 * style.SCREEN.size / 72, rel=0.01)


@pytest.mark.parametrize("page", [style.SCREEN, COLUMN], ids=["screen", "column"])
def test_no_label_of_an_axis_reaches_its_neighbour(page: style.Page) -> None:
    """Labels of both axes are longer than each of six panels is wide and high."""

    def draw() -> layout.Sheet:
        """Planted."""
        sheet, facet_axes = layout.facets(list("abcdef"), ["a quantity whose name is long (nats/token)"], 7.0)
        for (axes,) in facet_axes:
            panels.rows(axes, ["a name of a row that takes much room"], [])
            axes.set_xlabel("difference in the instability part of sensitivity\n(nats/token)")
        return sheet

    with style.drawn_for(page):
        assert not complaints(layout.styled(draw)())


def test_no_arm_looks_like_another_or_like_a_run_that_diverged() -> None:
    """A hollow mark of an arm's own shape ends its power law."""
    assert not {*style.ARM_MARKS} & {*marks.OUTCOMES.values()}
    looks = [panels.arm_look(position) for position in range(27)]
    assert len({str(look) for look in looks}) == 27
    assert len({look["color"] for look in looks[:9]}) == 9, "told apart where lines have no marks"
    assert len({(look["color"], str(look["linestyle"])) for look in looks}) == 27


@pytest.mark.parametrize("draw", [logit_forecast, gradient_forecast])
@pytest.mark.parametrize("widths", [(32, 64)], ids=["two sizes"])
def test_forecasts_can_be_read(draw, widths: tuple[int, ...]) -> None:
    assert not complaints(draw(recorded(cards(widths=widths))))


def test_a_coordinate_check_can_be_read() -> None:
    names = ["block0.query", "block1.query", "block0.block_output", "logits"]
    changes = pd.DataFrame(
        [
            {
                **{"width": width, "depth": 2, "seed": seed, "step": 1},
                **{"coordinate": name, "change": width**0.3 * (1 + 0.1 * seed)},
            }
            for name in names
            for width in (32, 64, 128, 256)
            for seed in range(3)
        ]
    )
    assert not complaints(coordinate_growth(changes))


def overlap(figure: Drawing) -> None:
    box = figure.axes[0].get_position()
    figure.text(box.x0, box.y0 - 0.03, "planted over the numbers of the learning rates")


def clip(figure: Drawing) -> None:
    figure.axes[0].set_title("planted, and far longer than the figure is wide " * 4)


def invent(figure: Drawing) -> None:
    figure.caption += " The hollow triangles are planted."


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [(overlap, "lies over"), (clip, "is cut off"), (invent, "names what is not there")],
    ids=["overlap", "clipped", "caption"],
)
def test_a_planted_fault_is_seen(fault, sentence: str) -> None:
    figure = FIGURES["max_attention_logit"](recorded(list(planted.cards(lrs=LRS, widths=(32,)))))
    assert not complaints(figure)
    fault(figure)
    assert [complaint for complaint in complaints(figure) if sentence in complaint]


@pytest.mark.parametrize("page", [COLUMN], ids=["column"])
def test_figures_of_spikes_can_be_read(page: style.Page) -> None:
    records = spiked()
    with style.drawn_for(page):
        shown = list(drawings(records, iter(["responses", "anatomy_of_a_spike"])))
        assert not wrong(iter(shown))
    captions = {name: drawing.caption for name, drawing in shown}
    assert "there were 1 false alarms in" in captions["responses"]
    assert "All runs ended before their burst: skip update." in captions["responses"]
    assert "The dashed line marks the beginning of the burst" in captions["anatomy_of_a_spike"]


def test_the_leaderboard_is_paired_and_ranked_by_the_peak() -> None:
    figure = FIGURES["responses"](spiked())
    assert [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()] == [
        "rewind and skip (skip 75)",
        "rewind and skip (skip 0)",
        "none",
    ]
    change, lost = ([line for line in axes.get_lines() if line.get_marker() == "o"] for axes in figure.axes[2:4])
    assert [float(x) for x in change[0].get_xdata()] == pytest.approx([-0.25, 0.5])
    assert [float(x) for x in lost[0].get_xdata()] == [10 + 75, 10, 10]


def spiked() -> Records:
    """Runs without a response and with three, of which one never met its burst."""
    finals = {
        ("none", None): 2.5,
        ("rewind_and_skip", 75): 2.25,
        ("rewind_and_skip", 0): 3.0,
        ("skip_update", None): 4.0,
    }
    peaks = {
        ("none", None): 3.0,
        ("rewind_and_skip", 75): 0.01,
        ("rewind_and_skip", 0): 1.0,
        ("skip_update", None): 0.0,
    }
    made, rows, events = [], [], []
    for (response, skip), final in finals.items():
        for seed in range(3):
            outcome = {"spikes": 1, "rewound_steps": 10, "skipped_batches": skip or 0, "ending": "recovered"}
            made.append(
                planted.card(bad_batches="rare_tokens", response=response, **{"response.skip": skip}, seed=seed)
                | outcome
                | {"final_val_loss": final + 0.1 * seed}
            )
            name, met = made[-1]["id"], response != "skip_update"
            events += [(name, 240, 240, "burst", 1.0, "")] * met + [(name, 242, 242, "spike", 9.0 + seed, "")] * met
            for step in range(10, 390, 10):
                excess = peaks[response, skip] * (1 + 0.01 * seed) * (240 < step < 300)
                rows += [(name, step, probe, "", 2 + excess) for probe in ("val_loss", "train_loss")]
                rows += [
                    (name, step, probe, where, 1e-3 * (1 + excess))
                    for probe in ("grad_rms", "update_rms")
                    for where in ("embedding", "block0.mlp_up", "block1.mlp_up", "head")
                ]
    events.append((made[0]["id"], 100, 100, "spike", 3.0, ""))
    made[0]["spikes"] = 2
    return planted.records_of(made, rows, events)


def test_captions_follow_the_figure() -> None:
    """The same figure of calm runs has no word on crosses, triangles, bars or power laws."""
    calm = list(planted.cards(lrs=(1e-3, 1e-2), widths=(32, 64), seeds=(0,), loss_bigram=9.0))
    captions = {name: drawing.caption for name, drawing in drawings(recorded(calm), iter(FEW))}
    for word in ("cross", "triangle", "Bands", "Bars", "hollow mark at its end"):
        assert not [name for name, caption in captions.items() if word in caption]
    assert (
        "Bands reach from the lowest to the highest of 3 seeds." in FIGURES["loss_over_steps"](small("sizes")).caption
    )
    assert "power law" in FIGURES["best_loss_with_size"](recorded(cards(widths=(32, 64, 128)))).caption


def test_a_number_is_written_one_way_on_axes_and_in_keys() -> None:
    figure = FIGURES["gradient_with_size"](recorded(cards(widths=(32, 64), lrs=(1e-3, 3e-3, 1e-2, 1e-1))))
    keys = {text.get_text() for text in figure.key_texts}
    ticks = {label.get_text() for label in figure.axes[1].get_xticklabels()}
    assert {"0.001", "0.003", "0.01", "0.1"} <= keys
    assert ticks == {"0.001", "0.01", "0.1"}
    assert style.literal("epsilon 1e-08, factor 0.6666666666666666, steps 1000000") == (
        "epsilon 1e-8, factor 0.6667, steps 1000000"
    )


def panels_by_title(figure: Drawing) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in figure.axes}


def test_arms_are_overlaid_in_the_panel_of_their_size() -> None:
    for name, widths in (("learning_rate_sensitivity", (32, 64)), ("max_attention_logit", (32, 64))):
        figure = FIGURES[name](recorded(cards(widths=widths)))
        titles = [title for title in panels_by_title(figure) if title]
        assert titles == ["24.7k parameters", "98.6k parameters"]
        for title in titles:
            colours = {line.get_color() for line in panels_by_title(figure)[title].get_lines()} - {style.INK}
            assert colours == set(style.ARM_COLOURS[:2])
        assert {"without qk-layernorm", "with qk-layernorm"} <= {text.get_text() for text in figure.key_texts}


@pytest.mark.slow
def test_keys_take_no_width_from_the_panels() -> None:
    """One arm: its sizes are lines, and their names stand at their ends."""
    figure = FIGURES["learning_rate_sensitivity"](recorded(cards(arms=("z_loss",))))
    panel = figure.axes[0]
    assert panel.get_position().width > 0.7
    (at_line,) = [text for text in panel.texts if text.get_text() == "98.6k"]
    lines = [line for line in panel.get_lines() if line.get_color() == at_line.get_color()]
    ends = [panel.transData.transform(line.get_xydata())[-1, 1] for line in lines if len(line.get_xdata()) > 2]
    box = at_line.get_window_extent()
    assert [(box.y0 + box.y1) / 2] == pytest.approx(ends, abs=16)
    assert "Each line is labelled with its parameters." in figure.caption
    for shape in ("sizes", "setting"):
        for _, each in drawings(small(shape), iter(FEW)):
            right = max(axes.get_position().x1 for axes in each.axes)
            assert right > 0.85, (shape, "panels reach the right side")


def test_a_key_tells_a_page_the_colour_that_it_names() -> None:
    drawn = layout.svg(FIGURES["learning_rate_sensitivity"](small("sizes")), "a")
    assert set(re.findall(r'<g class="key" data-colour="([^"]*)"', drawn)) == {c.lower() for c in style.ARM_COLOURS[:2]}
    for colour in style.ARM_COLOURS[:2]:
        assert len(re.findall(rf"stroke: {colour.lower()}", drawn)) > 2


def test_bands_of_many_seeds_leave_out_the_extremes() -> None:
    figure = FIGURES["learning_rate_sensitivity"](small("many seeds"))
    assert "Bands hold the middle 80 % of 8 seeds." in figure.caption
    runs = judge(points(small("many seeds").runs))
    values = runs[(runs["arm"] == runs["arm"].iloc[0]) & (runs["lr"] == 1e-3)]["capped"].to_numpy()
    (band, _) = [each for each in figure.axes[0].get_children() if str(each.get_gid()).startswith("middle")]
    ends = sorted({y for x, y in band.get_xy() if x == 1e-3})
    assert ends == pytest.approx(list(np.quantile(values, [0.1, 0.9])))
    assert values.min() < ends[0]
    assert ends[1] < values.max()


def hovers(drawn: str) -> list[list[str]]:
    """The lines that each mark says, as an XML reader has them."""
    uses = [element for element in ET.fromstring(drawn).iter() if element.tag.endswith("use")]
    return [element.attrib["data-hover"].split("\n") for element in uses if "data-hover" in element.attrib]


def test_every_mark_says_what_it_is() -> None:
    records = small("sizes")
    drawn = layout.svg(FIGURES["learning_rate_sensitivity"](records), "figure")
    said = hovers(drawn)
    runs = judge(points(records.runs))
    arm = runs["arm"].iloc[0]
    point = runs[(runs["arm"] == arm) & (runs["lr"] == 1e-2) & (runs["size"] == runs["size"].min())]
    interval = student_t(point["capped"])
    expected = [
        arm,
        "24.7k parameters",
        "learning rate 0.01",
        f"final held-out loss {interval:.4g} nats/token",
        "seeds 0, 1, 2",
        f"runs {', '.join(point['id'])}",
    ]
    assert expected in said
    curves = len(runs.groupby(["arm", "size"]))
    assert len(said) == curves * len(LRS) + 2 * curves
    assert [lines for lines in said if "1 of 3 diverged" in lines]
    assert [lines for lines in said if lines[-1].endswith("and 6 more")], "of a sensitivity there are nine runs"
    assert drawn == layout.svg(FIGURES["learning_rate_sensitivity"](records), "figure")


def test_each_mark_says_its_own_text_where_it_is() -> None:
    """The higher the mark, the higher the value it tells of."""
    figure = FIGURES["max_attention_logit"](small("one size"))
    drawn = ET.fromstring(layout.svg(figure, "figure"))
    marks = [element for element in drawn.iter() if "data-hover" in element.attrib]
    heights, values = [], []
    for mark in marks:
        (value,) = re.findall(r"largest attention logits (\S+)", mark.attrib["data-hover"])
        heights.append(-float(mark.attrib["y"]))
        values.append(math.log(float(value)))
    assert len(marks) == 2 * len(LRS)
    assert np.corrcoef(heights, values)[0, 1] > 0.9999


@pytest.mark.slow
def test_figures_for_a_paper(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "learning_rate_sensitivity"
    monkeypatch.setattr("lab.report.build.FIGURES", {name: FIGURES[name]})
    folder = planted.write(tmp_path / "study", list(planted.cards(lrs=LRS, widths=(32,))))
    assert main(["report", str(folder), "--format", "pdf", "--width", "3.5"]) == 0
    path = folder / "figures" / "learning_rate_sensitivity.pdf"
    assert f"figure: {path}" in capsys.readouterr().out
    content = path.read_bytes()
    assert re.search(rb"/MediaBox \[ 0 0 252 ", content)
    assert b"/FontFile2" in content, "text is text"
    assert not (folder / "report.html").exists()
    assert main(["report", str(folder), "--format", "pdf", "--width", "3.5"]) == 0
    assert path.read_bytes() == content
    capsys.readouterr()


def test_a_label_of_a_thousand_letters_is_shortened_with_both_its_ends() -> None:
    arms = tuple(f"{letter * 1000}_{letter}_end+z_loss" for letter in "ab")
    figure = FIGURES["learning_rate_sensitivity"](recorded(cards(arms=arms, widths=(32, 64))))
    assert not complaints(figure)
    texts = [text.get_text() for text in figure.key_texts]
    assert [text for text in texts if text.replace("\n", "").endswith("a-end")]
    assert [text for text in texts if text.replace("\n", "").endswith("b-end")]
    assert max(map(len, texts)) < 150
    assert max(len(lines[0]) for lines in hovers(layout.svg(figure, "a"))) <= 120


@pytest.mark.slow
def test_a_figure_of_many_arms_draws_the_first_of_them_and_says_so() -> None:
    runs = [
        planted.card(**{"parametrization.name": f"p{arm:02}", "optimizer.lr": lr}, final_val_loss=2 + lr)
        for arm in range(45)
        for lr in LRS
    ]
    figure = FIGURES["learning_rate_sensitivity"](recorded(runs))
    assert len([axes for axes in figure.axes if axes.get_title()]) == 40
    assert "Drawn are the first 40 of 45 arms; the tables have all." in figure.caption
