"""Draw the report of one folder of build/reports, or the overview of all: what `make docs` runs for what has changed.

`python docs/reports.py FOLDER` writes the report, and what the overview says of it into FOLDER/summary.json;
`python docs/reports.py` writes build/reports/index.html.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from lab.report import build

REPORTS = Path("build/reports")


def draw(folder: Path) -> None:
    report, _ = build.make_report([folder])
    (folder / "summary.json").write_text(json.dumps(report._asdict(), default=str))


def drawn(summary: Path) -> build.Report:
    report = build.Report(**json.loads(summary.read_text()))
    return report._replace(page=Path(report.page), thumbnail=report.thumbnail and Path(report.thumbnail))


if __name__ == "__main__":
    if sys.argv[1:]:
        draw(Path(sys.argv[1]))
    else:
        build.write_index(REPORTS, [drawn(path) for path in sorted(REPORTS.glob("*/summary.json"))], {})
