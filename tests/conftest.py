"""One thread and the products that training uses for every test, whichever came before; what several share."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:  # the process that hands tests to others need not wait for torch
    from lab.records import store
    from sweeping import OutputOf

pytest_plugins = ["pytester"]

# A shell ignores interrupts for what it runs in the background, and children inherit that: tests interrupt some.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same few examples every time, so that a machine of CI's has no luck of its own; others and more with what is slow.
settings.register_profile(
    "quick", max_examples=5, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("slow", settings.get_profile("quick"), max_examples=100, derandomize=False, database=None)


def is_quick(config: pytest.Config) -> bool:
    """Whether tests that are slow are left out."""
    return "not slow" in config.option.markexpr


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if is_quick(config) else "slow")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Set torch up in the processes that run tests, before the first module is read.

    No file of this folder hears of the session, whose folder is the one above.
    """
    if isinstance(collector, pytest.Directory):
        import torch

        from lab.core import machine

        machine.configure_process()
        torch.set_num_threads(1)
        machine.choose_matmul_library()


def pytest_collection_finish() -> None:
    spare_the_collector()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After the last test of a file, too: what is kept from then on is kept for others."""
    if nextitem is not None and nextitem.path != item.path:
        spare_the_collector()


def spare_the_collector() -> None:
    """Let the collector walk what lives to the end, such as thousands of collected tests and torch, no more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # of new objects, of which small tables make hundreds each


@pytest.fixture(scope="session", autouse=True)
def remembered(pytestconfig: pytest.Config) -> Iterator[None]:
    """Quick tests read and merge the lab's own configs once for each choice of files; Hydra takes most of a request.

    Nor do they look for garbage after each fleet, which takes as long as a tiny fleet trains.
    """
    import composing

    with pytest.MonkeyPatch.context() as patch:
        if is_quick(pytestconfig):
            composing.remember(patch)
            patch.setattr("lab.core.machine.release_memory", lambda: None)
        yield


@pytest.fixture(autouse=True)
def denormals() -> Iterator[None]:
    """Training flushes denormal numbers to zero; tests that come after may want such numbers."""
    import torch

    yield
    torch.set_flush_denormal(False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def as_in_training() -> None:
    """The settings of torch with which a job trains."""
    from lab.core import machine

    machine.configure_torch()


@pytest.fixture
def output_of(capsys: pytest.CaptureFixture[str]) -> OutputOf:
    """What a command prints in this process; of exit code 2, its refusal."""
    from lab import main

    def output_of(*words: object, code: int = 0) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == code
        out, error = capsys.readouterr()
        return str(error if code == 2 else out)

    return output_of


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this process without figures, which take longer than a small command takes to train."""
    monkeypatch.setattr("lab.report.build.FIGURES", {})


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweeps of this process leave an empty page."""
    from sweeping import empty_page

    monkeypatch.setattr("lab.report.build.make_report", empty_page)


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fleets of this process with less held out."""
    from lab import Fleet
    from small import brief

    begin = Fleet.__init__

    def beginning(fleet: Fleet, *configs: Any) -> None:
        begin(fleet, *configs)
        brief(fleet)

    monkeypatch.setattr(Fleet, "__init__", beginning)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, store.Records]:
    """A sweep that nobody disturbed: its folder, not to be touched, and its records."""
    from sweeping import finish

    folder = tmp_path_factory.mktemp("alone") / "sweep"
    return folder, finish(folder, "basic")  # in this process, which has torch already
