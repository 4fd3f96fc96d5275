"""Every sweep file says what it asks, composes at every scale, and trains at the smallest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from lab.__main__ import main
from lab.cli import launch
from lab.cli.compose import expand
from lab.cli.hydra_app import data_folder
from lab.training.config import RunConfig, run_config

SWEEPS = launch.sweeps()
SCALES = sorted(path.stem for path in data_folder("conf").glob("scale/*.yaml"))
PLACES = ("Hypothesis: ", "Source: ", "Expected: ", "Cost: ")


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_opens_with_question_hypothesis_source_expectation_and_cost(name: str) -> None:
    header = [line[2:] for line in SWEEPS[name].read_text().splitlines() if line.startswith("# ")]
    assert header[0].endswith("?")
    said = [place for line in header for place in PLACES if line.startswith(place)]
    assert said == list(PLACES)


def composed(name: str, scale: str, which: int) -> RunConfig:
    """The first or the last point of a sweep at a scale, as types; no data is opened."""
    ConfigStore.instance().store(
        group="sweeps", name="requested", node=launch.read_sweep(SWEEPS[name]), package="_global_"
    )
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(data_folder("conf")), version_base="1.3"):
        chosen = ["sweeps=requested", f"scale={scale}"]
        params = compose("config", chosen, return_hydra_config=True).hydra.sweeper.params
        words = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
        tree: Any = OmegaConf.to_container(compose("config", [*chosen, *expand(words)[which]]), resolve=True)
    GlobalHydra.instance().clear()
    del tree["fleet"]
    return run_config(tree)


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_composes_where_it_costs_minutes_and_as_large_as_the_paper(name: str) -> None:
    ours, papers = composed(name, "cpu", 0), composed(name, "paper", -1)
    assert ours.steps <= 1000 or "hour" in SWEEPS[name].read_text()  # a longer one says so above itself
    assert name in ("smoke", "quickstart") or papers.steps >= 25_000


@pytest.mark.slow
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_composes_at_every_scale(name: str, scale: str) -> None:
    assert composed(name, scale, 0).scale.name == composed(name, scale, -1).scale.name == scale


@pytest.mark.slow
@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_trains_as_a_toy(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", name, "scale=toy", f"out={tmp_path / name}"]) == 0
    assert re.search(r"^\d+ trained, 0 already there, \d+ diverged, 0 failed;", capsys.readouterr().out, re.MULTILINE)
