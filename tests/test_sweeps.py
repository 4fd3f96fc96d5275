"""Every sweep file says what it asks and costs, composes at every scale, and trains at the smallest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from composing import points_of
from lab.core import shipped
from lab.core.shipped import data_folder
from lab.sweeping.compose import Word
from lab.training.config import RunConfig, run_config
from lab.training.identity import run_id
from sampling import few, some
from sweeping import OutputOf

SWEEPS = shipped.sweeps()
SCALES = sorted(path.stem for path in data_folder("conf").glob("scale/*.yaml"))
HEADINGS = ("Hypothesis: ", "Source: ", "Expected: ", "Cost: ")
# Overrides that decide how large a run is.
SIZING = ("model=", "model.width=", "steps=", "batch=", "batch_size=", "optimizer=", "scale=", "scale.b")
SIZING += ("sweeps=", "arm=")
# They compare batches at one loss, or at one number of examples, and are as long as that takes.
AS_LONG_AS_IT_TAKES = ("steps_to_target", "learning_rate_and_batch")
# They ask about a text of their own, at the scale of the paper, too, and not about C4.
OF_THEIR_TEXT = {"source_filter": "mixture", "escape_characters": "escapes"}
HARD = ("escape_characters", "source_filter", "ledgers")  # texts of their own, many restarts


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_opens_with_its_question(name: str) -> None:
    header = [line[2:] for line in SWEEPS[name].read_text().splitlines() if line.startswith("# ")]
    assert header[0].endswith("?")
    assert [heading for line in header for heading in HEADINGS if line.startswith(heading)] == list(HEADINGS)


def requested(name: str, scale: str) -> tuple[list[list[Word]], Callable[[list[Word]], RunConfig]]:
    """The words of every point of a sweep at a scale, and what makes types of them; no data is opened."""
    composer, points = points_of(name, scale)
    return points, lambda point: run_config(composer.tree(point))


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_composes(name: str) -> None:
    points, composed = requested(name, "cpu")
    assert run_id(composed(points[0]), "")


def ends(numbers: Iterable[int]) -> tuple[int, int]:
    values = list(numbers)
    return min(values), max(values)


@pytest.mark.parametrize("name", few(SWEEPS, 2))
def test_the_cost_it_names_is_that_of_what_it_trains(name: str) -> None:
    """``Cost: 63 runs of width 64, 200 to 800 steps of 512 tokens; ...`` is what its points at the scale `cpu` are."""
    (cost,) = re.findall(
        r"^# Cost: ([\d,]+) runs of (.+), (.+) steps of (.+) tokens", SWEEPS[name].read_text(), re.MULTILINE
    )
    widths, steps, tokens = ([int(number) for number in re.findall(r"\d+", words)] for words in cost[1:])
    points, composed = requested(name, "cpu")
    sized = {tuple(word.text for word in point if word.text.startswith(SIZING)): point for point in points}
    configs = [composed(point) for point in sized.values()]
    assert int(cost[0].replace(",", "")) == len(points)
    assert ends(steps) == ends(config.steps for config in configs)
    assert ends(tokens) == ends(config.batch_size * config.seq_len for config in configs)
    assert ends(widths) == ends(config.model.width for config in configs)


@pytest.mark.parametrize(
    "name", few(sorted({*SWEEPS} - {"smoke", "quickstart", *AS_LONG_AS_IT_TAKES, *OF_THEIR_TEXT}), 2)
)
def test_a_sweep_is_as_long_as_the_papers_at_its_scale(name: str) -> None:
    points, composed = requested(name, "paper")
    assert composed(points[-1]).steps >= 25_000


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("scale", some(SCALES, ["paper"]))
def test_a_sweep_composes_at_every_scale(name: str, scale: str) -> None:
    """One point of each size and arm, up to the id that a plan gives it; no data are opened."""
    points, composed = requested(name, scale)
    sized = {tuple(word.text for word in point if word.text.startswith(SIZING)): point for point in points}
    configs = [composed(point) for point in sized.values()]
    assert {config.scale.name for config in configs} == {scale}
    assert all(run_id(config, "") for config in configs)
    if name in OF_THEIR_TEXT:
        assert {config.data.name for config in configs} == {OF_THEIR_TEXT[name]}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn", "briefly")
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_trains_as_a_toy(name: str, tmp_path: Path, output_of: OutputOf) -> None:
    text = [f"data.path={Path(__file__).parents[1] / 'docs'}/*.md"] * (name == "wide_output_logits")  # one's own
    assert re.search(
        r"^\d+ trained, 0 already there, \d+ diverged, 0 failed;",
        output_of("sweep", name, "scale=toy", *text, "hydra/launcher=basic", f"out={tmp_path / name}"),
        re.MULTILINE,
    )
