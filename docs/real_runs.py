"""Draw the figures of docs/held_to_real_runs.md from the committed numbers: ``python docs/real_runs.py``."""

from pathlib import Path

from lab.analysis.rendering import layout
from studies.real_runs import figures
from studies.real_runs.curves import read_real_runs

HOME = Path(__file__).parent

runs = read_real_runs()
for name in ("failing_rates", "cliff", "changes"):
    (HOME / f"{name}.svg").write_text(layout.svg(getattr(figures, name)(runs), name), encoding="utf-8")
