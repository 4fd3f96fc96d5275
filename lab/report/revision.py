"""Verdicts before the rules of the claims were revised, and the reasons why they have changed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from lab.analysis.judging.decision import NOT_TESTABLE
from lab.analysis.judging.verdicts import CONTROLLED, UNDERTRAINED, Verdict
from lab.core import files
from lab.core.errors import RequestError

FILE = "verdicts_before.json"


class EarlierVerdict(NamedTuple):
    """A verdict by an earlier rule.

    Attributes:
        sweep: the sweep that was judged.
        steps: numbers of training steps of its runs, in rising order.
        rule: how the rule has changed since, or why the claim was dropped. Empty if it has only gained what all rules
            have: controls, the caution about under-training, and presumptions.
    """

    figure: str
    claim: str
    verdict: str
    sweep: str
    steps: Sequence[int]
    rule: str


def earlier_verdicts(folders: Sequence[Path]) -> dict[str, EarlierVerdict]:
    """Earlier verdicts by name of the claim, from the first folder that has any; empty if none has.

    Raises:
        RequestError: the file cannot be read.
    """
    for path in (folder / FILE for folder in folders):
        if path.exists():
            try:
                entries = files.read_json(path, dict)
                return {name: EarlierVerdict(**entry) for name, entry in entries.items()}
            except (OSError, ValueError, TypeError, AttributeError):
                raise RequestError(f"{path} cannot be read as verdicts by name of the claim") from None
    return {}


def revised(earlier: EarlierVerdict | None, verdict: Verdict) -> str:
    """The earlier verdict, and the reasons if the present one differs; empty for a new claim."""
    if earlier is None:
        return ""
    if earlier.verdict == verdict.verdict:
        return earlier.verdict
    reasons = [earlier.rule, *_differences(earlier, verdict)]
    return f"{earlier.verdict}; since then: {'; '.join(filter(None, reasons)) or 'other runs'}"


def _differences(earlier: EarlierVerdict, verdict: Verdict) -> Iterator[str]:
    if verdict.reason.startswith(UNDERTRAINED):
        yield "under-training cautions every claim on S"
    if verdict.reason.startswith(CONTROLLED):
        yield "a control must fail"
    if verdict.verdict == NOT_TESTABLE:
        yield "the setting must show what the claim presumes"
    if verdict.sweep != earlier.sweep:
        yield f"judged on its own sweep, not on {earlier.sweep}"
    if list(verdict.steps) != list(earlier.steps):
        yield f"{_spell(verdict.steps)} steps, not {_spell(earlier.steps)}"


def _spell(steps: Sequence[int]) -> str:
    return " or ".join(map(str, steps)) or "no"


def dropped(earlier: Mapping[str, EarlierVerdict], names: Container[str]) -> Iterator[str]:
    """Yield a line for each earlier claim that is not among these names."""
    for name, entry in earlier.items():
        if name not in names:
            yield f'Figure {entry.figure}, dropped: "{entry.claim}" ({entry.verdict}); {entry.rule}'
