"""The whole way, once: the smoke sweep shows what it is there to show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.analysis import load
from lab.analysis.curves import points
from lab.analysis.sensitivity import paired


def test_qk_layernorm_lowers_sensitivity_beyond_the_spread_of_seeds(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "lab", "sweep", "smoke", f"out={tmp_path}", "probes=none"]
    subprocess.run(words, check=True, capture_output=True)
    runs = load(tmp_path).runs
    assert len(runs) == 40
    gain = paired(points(runs), "z_loss", "qk_layernorm+z_loss").iloc[0]
    assert gain["total"].n == 5
    assert gain["total"].low > 0
    assert gain["above"].low > 0  # and it is instability that qk-layernorm takes away
