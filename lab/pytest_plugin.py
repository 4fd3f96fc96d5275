"""The pytest plugin: lets another repository guard the learning-rate sensitivity and the card of its recipe.

    pytest --lab-sweep smoke --lab-baseline baseline.json
    pytest --lab-stress mine.yaml --lab-baseline card.json

trains the sweep, or crash-tests the recipe, and fails when curves or card have got worse; so do tests that ask for the
fixtures::

    @pytest.mark.sensitivity(sweep="sweeps/mine.yaml", baseline="baselines/mine.json")
    def test_the_recipe_is_as_stable_as_it_was(sensitivity_curve):
        sensitivity_curve.check()

    @pytest.mark.crash_test(recipe="mine.yaml", baseline="baselines/card.json")
    def test_the_recipe_stands_what_it_stood(crash_card):
        crash_card.check()
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import pandas as pd

    from lab.analysis.guard.compare import Comparison


# What was trained in this session, by the words of the command: the results folder, or why training failed.
TRAINED: pytest.StashKey[dict[tuple[str, ...], Path | RegressionError]] = pytest.StashKey()


class RegressionError(AssertionError):
    """Curves have got worse, or cannot be judged; its text is that of ``lab check``."""


def train(command: str, name: str, overrides: Sequence[str], folder: Path) -> Path | RegressionError:
    """Train a sweep or crash-test a recipe; returns its folder, or the error that ``lab sweep|stress`` printed."""
    from lab.core.files import quoted

    if folder.exists() and any(folder.iterdir()):
        return RegressionError(f"{folder} is not empty; a guarded recipe is trained anew each time")
    words = [sys.executable, "-m", "lab", command, name, f"out={quoted(folder)}", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return RegressionError(f"lab {command} {name} ended with exit code {done.returncode}\n{done.stderr}")
    return folder


class Trained:
    """A folder of results, and the baseline to compare it with."""

    def __init__(self, folder: Path, baseline: str | None, margin: float, strict: bool, fail_on: str) -> None:
        self.folder, self.baseline, self.margin, self.strict, self.fail_on = folder, baseline, margin, strict, fail_on

    @cached_property
    def checked(self) -> Comparison:
        """The comparison of ``lab check``."""
        from lab.features.guard import baselines

        if self.baseline is None:
            raise RegressionError("no baseline; give --lab-baseline FILE, or baseline= in the marker")
        comparison = baselines.check(self.folder, Path(self.baseline), self.margin, self.strict)
        return comparison._replace(fails_on_unclear=bool(self.fail_on))

    def check(self) -> None:
        """Compare with the baseline.

        Raises:
            RegressionError: the exit code of ``lab check`` would not be 0.
        """
        from lab.core.printing import printable
        from lab.features.guard.answer import answer_of

        __tracebackhide__ = True  # the verdict says it all
        if self.checked.exit_code:
            raise RegressionError(printable(answer_of(self.checked).text()))


class SensitivityCurve(Trained):
    """A trained sweep, and the baseline to compare it with."""

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row per arm and size, as ``lab.analysis.by_curve`` makes them."""
        from lab import analysis

        return analysis.study([self.folder]).curves


class CrashCard(Trained):
    """A recipe's card of the crash test, and the baseline to compare it with."""

    @cached_property
    def card(self) -> dict[str, Any]:
        """What ``lab stress --json`` prints."""
        from lab.core import files

        return files.read_json(self.folder / "card.json", dict)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("lab", "learning-rate sensitivity (instability-lab)")
    group.addoption("--lab-sweep", metavar="NAME|FILE", help="sweep to train and to hold against --lab-baseline")
    group.addoption("--lab-stress", metavar="RECIPE", help="recipe to crash-test and to hold against --lab-baseline")
    group.addoption("--lab-baseline", metavar="FILE", help="what `lab check --save` wrote, or a results folder")
    group.addoption("--lab-margin", metavar="5%", default="5%", help="part of the best loss that losses may rise by")
    group.addoption("--lab-strict", action="store_true", help="fail when anything has certainly changed at all")
    group.addoption("--lab-fail-on", choices=["unclear"], default="", help="fail on what seeds leave open, too")
    group.addoption("--lab-out", metavar="DIR", help="keep records and page in this folder, one below it per sweep")


def pytest_configure(config: pytest.Config) -> None:
    """Add the markers."""
    config.addinivalue_line(
        "markers", "sensitivity(sweep, baseline, margin, strict, fail_on, overrides): what sensitivity_curve trains"
    )
    config.addinivalue_line(
        "markers", "crash_test(recipe, baseline, margin, strict, fail_on, overrides): what crash_card trains"
    )


@pytest.fixture
def sensitivity_curve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SensitivityCurve:
    """The sweep of the test's marker ``sensitivity``, or that of the options."""
    return SensitivityCurve(*_trained(request.config, tmp_path_factory, "sweep", **_marked(request, "sensitivity")))


@pytest.fixture
def crash_card(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CrashCard:
    """The card of the recipe of the test's marker ``crash_test``, or of that of the options."""
    return CrashCard(*_trained(request.config, tmp_path_factory, "stress", **_marked(request, "crash_test")))


# By the word of the command what it trains, as a marker names it.
SUBJECTS = {"sweep": "sweep", "stress": "recipe"}
FIXTURES = {"sweep": "sensitivity_curve", "stress": "crash_card"}


def _marked(request: pytest.FixtureRequest, name: str) -> dict[str, Any]:
    """The keys of a test's marker, what is trained as ``subject``."""
    marker = request.node.get_closest_marker(name)
    if marker and marker.args:
        subject = {"sensitivity": "sweep", "crash_test": "recipe"}[name]
        keys = f"{subject}=, baseline=, margin=, strict=, fail_on=, overrides="
        raise pytest.UsageError(f"the marker `{name}` takes keys: {keys}")
    return dict(marker.kwargs) if marker else {}


def _trained(
    config: pytest.Config,
    folders: pytest.TempPathFactory,
    command: str,
    baseline: str | None = None,
    margin: str | None = None,
    strict: bool = False,
    fail_on: str = "",
    overrides: Sequence[str] = (),
    **subject: str,
) -> tuple[Path, str | None, float, bool, str]:
    """Train a sweep or crash-test a recipe, once per session; the options stand in for arguments that are not given."""
    from lab.analysis.guard.compare import margin_of

    what = SUBJECTS[command]
    if unknown := set(subject) - {what}:
        raise pytest.UsageError(f"unknown key {min(unknown)!r} of a marker; it takes {what}=, baseline=, margin=, ...")
    name = subject.get(what) or config.getoption(f"--lab-{command}")
    baseline = baseline or config.getoption("--lab-baseline")
    if not name:
        raise pytest.UsageError(f"no {what}; give --lab-{command} NAME|FILE, or {what}= in the marker")
    if fail_on not in ("", "unclear"):
        raise pytest.UsageError(f"fail_on= takes 'unclear', not {fail_on!r}")
    part = margin_of(margin or config.getoption("--lab-margin"))
    trained = config.stash.setdefault(TRAINED, {})
    key = (command, name, *overrides)
    if key not in trained:
        kept = config.getoption("--lab-out")
        label = Path(name).stem + f"-{len(trained)}" * bool(trained) + os.environ.get("PYTEST_XDIST_WORKER", "")
        trained[key] = train(command, name, overrides, Path(kept, label) if kept else folders.mktemp(FIXTURES[command]))
    result = trained[key]
    if isinstance(result, RegressionError):
        raise result
    is_strict, fail_on = strict or config.getoption("--lab-strict"), fail_on or config.getoption("--lab-fail-on")
    return result, baseline, part, is_strict, fail_on


class _Guard(pytest.Item):
    """The test that --lab-sweep or --lab-stress adds with --lab-baseline."""

    command = ""

    def runtest(self) -> None:
        folders = self.config._tmp_path_factory  # type: ignore[attr-defined]
        Trained(*_trained(self.config, folders, self.command)).check()

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if excinfo.errisinstance(RegressionError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.config.rootpath, None, self.name


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test of what the options train if no test uses it."""
    baseline = config.getoption("--lab-baseline")
    given = {command: name for command in SUBJECTS if (name := config.getoption(f"--lab-{command}"))}
    for command, name in given.items():
        if any(_uses(item, command) and not _names_subject(item) for item in items):
            continue
        if not baseline:
            raise pytest.UsageError(f"--lab-{command} without a test that uses it wants --lab-baseline FILE")
        guard = _Guard.from_parent(session, name=f"lab check {name} against {baseline}")
        guard.command = command
        items.append(guard)
    if baseline and not given and not any(_uses(item, command) for item in items for command in SUBJECTS):
        raise pytest.UsageError("--lab-baseline wants --lab-sweep NAME|FILE, or --lab-stress RECIPE")


def _uses(item: pytest.Item, command: str) -> bool:
    return FIXTURES[command] in getattr(item, "fixturenames", ())


def _names_subject(item: pytest.Item) -> bool:
    """Whether the marker of a test says what is trained."""
    return any(what in marker.kwargs for what in SUBJECTS.values() for marker in item.iter_markers())
