"""One thread and the products that training uses for every test, whichever came before; what several share."""

from pathlib import Path

import pytest
import torch

from lab import machine, products, store
from sweeping import finish

machine.prepare()
torch.set_num_threads(1)
products.choose()


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of this process without figures, which take longer than a small command takes to train."""
    monkeypatch.setattr("lab.analysis.report.FIGURES", {})


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, store.Records]:
    """A sweep that nobody disturbed: its folder, not to be touched, and its records."""
    folder = tmp_path_factory.mktemp("alone") / "sweep"
    return folder, finish(folder)
