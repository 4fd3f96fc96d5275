"""The pytest plugin: lets another repository guard the learning-rate sensitivity of its recipe.

    pytest --lab-sweep smoke --lab-baseline baseline.json

trains the sweep and fails when its curves have got worse; so does a test that asks for the fixture::

    @pytest.mark.sensitivity(sweep="sweeps/mine.yaml", baseline="baselines/mine.json")
    def test_the_recipe_is_as_stable_as_it_was(sensitivity_curve):
        sensitivity_curve.check()
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


# Sweeps trained in this session, by sweep and overrides: the results folder, or why training failed.
TRAINED: pytest.StashKey[dict[tuple[str, ...], Path | RegressionError]] = pytest.StashKey()


class RegressionError(AssertionError):
    """Curves have got worse, or cannot be judged; its text is that of ``lab check``."""


def train(sweep: str, overrides: Sequence[str], folder: Path) -> Path | RegressionError:
    """Train a sweep; returns its folder, or the error that ``lab sweep`` printed."""
    from lab.core.files import quoted

    if folder.exists() and any(folder.iterdir()):
        return RegressionError(f"{folder} is not empty; a guarded recipe is trained anew each time")
    words = [sys.executable, "-m", "lab", "sweep", sweep, f"out={quoted(folder)}", *overrides]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return RegressionError(f"lab sweep {sweep} ended with exit code {done.returncode}\n{done.stderr}")
    return folder


class SensitivityCurve:
    """A trained sweep, and the baseline to compare it with."""

    def __init__(self, folder: Path, baseline: str | None, margin: float, strict: bool) -> None:
        self.folder, self.baseline, self.margin, self.strict = folder, baseline, margin, strict

    @cached_property
    def curves(self) -> pd.DataFrame:
        """A row per arm and size, as ``lab.analysis.by_curve`` makes them."""
        from lab import analysis

        return analysis.study([self.folder]).curves

    @cached_property
    def checked(self) -> Comparison:
        """The comparison of ``lab check``."""
        from lab.analysis.guard import check

        if self.baseline is None:
            raise RegressionError("no baseline; give --lab-baseline FILE, or baseline= in the marker")
        return check.check_folder(self.folder, Path(self.baseline), self.margin, self.strict)

    def check(self) -> None:
        """Compare with the baseline.

        Raises:
            RegressionError: the exit code of ``lab check`` would not be 0.
        """
        from lab.analysis.guard import render
        from lab.core.printing import printable

        __tracebackhide__ = True  # the verdict says it all
        if self.checked.exit_code:
            raise RegressionError(printable("\n".join(render.text(self.checked))))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("lab", "learning-rate sensitivity (instability-lab)")
    group.addoption("--lab-sweep", metavar="NAME|FILE", help="sweep to train and to hold against --lab-baseline")
    group.addoption("--lab-baseline", metavar="FILE", help="what `lab check --save` wrote, or a results folder")
    group.addoption("--lab-margin", metavar="5%", default="5%", help="part of the best loss that losses may rise by")
    group.addoption("--lab-strict", action="store_true", help="fail when the curves have certainly changed at all")
    group.addoption("--lab-out", metavar="DIR", help="keep records and page in this folder, one below it per sweep")


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker."""
    config.addinivalue_line(
        "markers", "sensitivity(sweep, baseline, margin, strict, overrides): what the fixture sensitivity_curve trains"
    )


@pytest.fixture
def sensitivity_curve(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SensitivityCurve:
    """The sweep of the test's marker ``sensitivity``, or that of the options."""
    marker = request.node.get_closest_marker("sensitivity")
    if marker and marker.args:
        raise pytest.UsageError("the marker `sensitivity` takes keys: sweep=, baseline=, margin=, strict=, overrides=")
    return _curve(request.config, tmp_path_factory, **(marker.kwargs if marker else {}))


def _curve(
    config: pytest.Config,
    folders: pytest.TempPathFactory,
    sweep: str | None = None,
    baseline: str | None = None,
    margin: str | None = None,
    strict: bool = False,
    overrides: Sequence[str] = (),
) -> SensitivityCurve:
    """Train a sweep, once per session; the options stand in for arguments that are not given."""
    from lab.analysis.guard.check import margin_of

    sweep, baseline = sweep or config.getoption("--lab-sweep"), baseline or config.getoption("--lab-baseline")
    if not sweep:
        raise pytest.UsageError("no sweep; give --lab-sweep NAME|FILE, or sweep= in the marker `sensitivity`")
    part = margin_of(margin or config.getoption("--lab-margin"))
    trained = config.stash.setdefault(TRAINED, {})
    key = (sweep, *overrides)
    if key not in trained:
        kept = config.getoption("--lab-out")
        name = Path(sweep).stem + f"-{len(trained)}" * bool(trained) + os.environ.get("PYTEST_XDIST_WORKER", "")
        trained[key] = train(sweep, overrides, Path(kept, name) if kept else folders.mktemp("sensitivity"))
    result = trained[key]
    if isinstance(result, RegressionError):
        raise result
    return SensitivityCurve(result, baseline, part, strict or config.getoption("--lab-strict"))


class _Guard(pytest.Item):
    """The test that --lab-sweep and --lab-baseline add."""

    def runtest(self) -> None:
        _curve(self.config, self.config._tmp_path_factory).check()  # type: ignore[attr-defined]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        return str(excinfo.value) if excinfo.errisinstance(RegressionError) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.config.rootpath, None, self.name


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test of the sweep in the options if no test uses it."""
    sweep, baseline = config.getoption("--lab-sweep"), config.getoption("--lab-baseline")
    is_used = any("sensitivity_curve" in getattr(item, "fixturenames", ()) and not _names_sweep(item) for item in items)
    if sweep and not is_used:
        if not baseline:
            raise pytest.UsageError("--lab-sweep without a test that uses it wants --lab-baseline FILE")
        items.append(_Guard.from_parent(session, name=f"lab check {sweep} against {baseline}"))
    if baseline and not sweep and not any("sensitivity_curve" in getattr(item, "fixturenames", ()) for item in items):
        raise pytest.UsageError("--lab-baseline wants --lab-sweep NAME|FILE")


def _names_sweep(item: pytest.Item) -> bool:
    marker = item.get_closest_marker("sensitivity")
    return marker is not None and "sweep" in marker.kwargs
