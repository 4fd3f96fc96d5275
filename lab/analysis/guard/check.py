"""Compare a results folder, or a baseline, with a baseline, as the command `lab check` does."""

from __future__ import annotations

from pathlib import Path

import lab.analysis.guard.baseline as baselines
from lab.analysis.guard.compare import Comparison, compare_baselines
from lab.analysis.sensitivity import Window, check_window
from lab.core.errors import RequestError

MARGIN = 0.05


def margin_of(text: str) -> float:
    """Read ``5%`` or ``0.05`` as a fraction.

    Raises:
        RequestError: the text has neither form.
    """
    try:
        fraction = float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction < 1:
        raise RequestError(f"--margin must be a part of the best loss, as in 5% or 0.05, not {text!r}")
    return fraction


def check_folder(
    folder: Path, baseline: Path, margin: float = MARGIN, strict: bool = False, window: Window | None = None
) -> Comparison:
    """Compare a results folder with a baseline.

    Args:
        folder: the results folder to check, or the file of a newer baseline.
        baseline: a baseline file or another results folder.
        margin: share of the best loss by which losses may rise.
        strict: whether a drift fails, too.
        window: the learning rates over which sensitivity is a mean; by default the baseline's.

    Returns:
        The comparison (see ``compare_baselines``). A folder or file that cannot be read is not an error: the verdict
        is ``cannot judge``, and its reason says what is wrong.

    Raises:
        RequestError: the two are of different windows, or too few learning rates lie in it.
    """
    try:
        old = baselines.read(baseline, window)
        new = baselines.read(folder, window or old.window)
    except RequestError as refusal:
        return Comparison(str(baseline), str(folder), margin, strict, [], [], [], [str(refusal)], [])
    check_window(new.runs, new.window)
    return compare_baselines(old, new, margin, strict)
