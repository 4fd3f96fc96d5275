"""Which faults `lab check` finds: plants each in the guarded recipe; writes PLANTED_FAULTS.md and the page.

    python benchmarks/planted_faults.py [FOLDER]

The recipe is the arm with qk-layernorm of the smoke sweep, which is the example of docs/guard_your_recipe.md; the
baseline is that arm of the committed one.  Runs that FOLDER (default: runs/planted_faults) already holds are kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn

from lab.analysis.guard.baseline import Baseline, from_folder, read
from lab.analysis.guard.compare import MARGIN, Change, Comparison, compare_baselines
from lab.interventions.attention import QKLayerNorm
from lab.interventions.loss_terms import ZLoss
from lab.model import transformer
from lab.optim.links.adam import Adam
from lab.optim.links.clipping import Clip
from lab.optim.optimizer import Optimizer
from lab.training.fleet import BatchLoader

HERE = Path(__file__).parent
SMOKE = HERE.parent / "results" / "baselines" / "smoke.json"
PAGE = HERE.parent / "docs" / "guard_your_recipe.md"
GUARDED = "qk_layernorm+z_loss"
RECIPE = ("smoke", "intervention=[qk_layernorm,z_loss]")
Replacement = tuple[Any, str, Any]


class Fault(NamedTuple):
    """A fault: overrides of the config, or attributes of the code and what replaces them.

    Attributes:
        verdict: what `lab check` says of it.
        finder: words added to the guarded sweep, with which it shows what it cannot show without.
        verdict_of_finder: what `lab check` says of that sweep, against the same without the fault.
    """

    overrides: tuple[str, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    verdict: str = "regression"
    finder: tuple[str, ...] = ()
    verdict_of_finder: str = ""

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The code with the fault in it."""
        with ExitStack() as stack:
            for target, name, replacement in self.replacements:
                stack.enter_context(patch.object(target, name, replacement))
            yield


def _swapped(optimizer: Optimizer, *arguments: Any, step: Any = Optimizer.step) -> None:
    names = list(optimizer.links)
    position = {"peak": names.index("decay"), "decay": names.index("peak")}
    names = sorted(names, key=lambda name: position.get(name, names.index(name)))
    step(replace(optimizer, links={name: optimizer.links[name] for name in names}), *arguments)


def _large_epsilon(adam: Adam, *arguments: Any, call: Any = Adam.__call__) -> Any:
    return call(replace(adam, eps=torch.full_like(torch.as_tensor(adam.eps), 0.1)), *arguments)


def _flipped(term: ZLoss, predictions: Any, call: Any = ZLoss.__call__) -> Any:
    return -call(term, predictions)


def _one_data_seed(loader: Any, corpus: Any, seed: Sequence[int], *more: Any, **options: Any) -> None:
    _begin_loader(loader, corpus, [0] * len(seed), *more, **options)


def _doubled(layer: Any, name: str, seed: int, std: float, draw: Any = transformer.draw) -> Any:
    return draw(layer, name, seed, 2 * std)


_begin_loader = BatchLoader.__init__
FAULTS = {
    "qk-layernorm removed (config)": Fault(("intervention=[z_loss]",)),
    "z-loss removed (config)": Fault(("intervention=[qk_layernorm]",)),
    "epsilon 1e-3 instead of 1e-8 (config)": Fault(("optimizer.eps=1e-3",)),
    "warm-up dropped (config)": Fault(("schedule.warmup=0",), verdict="drift"),
    "weight decay times ten (config)": Fault(("optimizer.weight_decay=1e-3",), verdict="drift"),
    "second moment over 1000 steps: beta2 0.999 (config)": Fault(("optimizer.beta2=0.999",), verdict="drift"),
    "no cosine: constant schedule (config)": Fault(("schedule=constant",), verdict="drift"),
    "qk-layernorm silently off (code)": Fault(
        replacements=((QKLayerNorm, "attach", lambda term, kind, runs, config: nn.Identity()),)
    ),
    "epsilon 0.1 (code)": Fault(replacements=((Adam, "__call__", _large_epsilon),)),
    "decay coupled to the learning rate (code)": Fault(
        replacements=((Optimizer, "step", _swapped),),
        verdict="ok",
        finder=("optimizer.weight_decay=1e-2", "seed=0,1,2"),
        verdict_of_finder="drift",
    ),
    "z-loss sign flipped (code)": Fault(replacements=((ZLoss, "__call__", _flipped),), verdict="drift"),
    "rotary positions dropped (code)": Fault(
        replacements=((transformer, "rotate", lambda x_tk, scale=1.0: scale * x_tk),)
    ),
    "clip ignored (code)": Fault(replacements=((Clip, "__call__", lambda clip, updates, state, now: updates),)),
    "initial scale doubled (code)": Fault(replacements=((transformer, "draw", _doubled),)),
    "seed ignored by the data (code)": Fault(
        replacements=((BatchLoader, "__init__", _one_data_seed),),
        verdict="ok",
        finder=("seed=0", "data.seed=0,1,2"),
        verdict_of_finder="cannot judge",
    ),
}


def train(folder: Path, *words: str) -> Path:
    """Train what is missing of a sweep, in this process; return its folder."""
    from lab.__main__ import main as lab

    command = ["sweep", *words, "hydra/launcher=basic", f"out={folder}"]
    with patch.object(sys, "argv", ["lab", *command]), patch("lab.report.build.FIGURES", {}):
        code = lab(command)
    torch.set_flush_denormal(False)
    if code:
        raise SystemExit(code)
    return folder


def recipe_of(baseline: Baseline) -> Baseline:
    """The guarded arm of a baseline."""
    curves = {number: curve for number, curve in baseline.curves.items() if curve["intervention"] == GUARDED}
    return baseline._replace(runs=baseline.runs[baseline.runs["curve"].isin(curves)], curves=curves)


def check(name: str, folder: Path, *words: str) -> Comparison:
    """Train the guarded recipe with a fault in it and compare it with the committed baseline.

    Args:
        name: key of ``FAULTS``.
        folder: where its runs go.
        words: overrides of the sweep.
    """
    fault = FAULTS[name]
    with fault.planted():
        broken = train(folder / "broken", *RECIPE, *words, *fault.overrides)
    return compare_baselines(recipe_of(read(SMOKE)), from_folder(broken), MARGIN)


def check_finder(name: str, folder: Path) -> Comparison:
    """Train the sweep that finds a fault, without the fault and with it, and compare the two."""
    fault = FAULTS[name]
    whole = train(folder / "finder", *RECIPE, *fault.finder)
    with fault.planted():
        broken = train(folder / "finder_broken", *RECIPE, *fault.finder, *fault.overrides)
    return compare_baselines(from_folder(whole), from_folder(broken), MARGIN)


def row(name: str, comparison: Comparison) -> str:
    """A line of the table: the fault, the verdict, and the changes that make it, the clearest first."""
    worst = [change for change in comparison.changes if change.verdict == comparison.verdict]
    certain = worst or [change for change in comparison.changes if change.is_certain and not comparison.removed]
    lost = list(dict.fromkeys(line.partition(": ")[2] for line in comparison.removed))
    changed = [f"{change.quantity} {change.change:+.3g} {change.unit}" for change in _clearest(certain)]
    signs = "; ".join([*lost, *changed][:3])
    reasons = "; ".join(comparison.reasons).replace(comparison.folder, "the folder")
    at = ", ".join(f"{lr:g}" for lr in sorted({move.lr for move in comparison.moves if move.is_certain}))
    return f"| {name} | {comparison.verdict} | {signs or reasons} | {at} |"


def _clearest(changes: Sequence[Change]) -> list[Change]:
    return sorted(changes, key=lambda change: -abs(change.change) / max(change.margin, 1e-9))


def write_table(name: str, text: str, lines: Sequence[str]) -> None:
    """Write a text and a table to ``NAME.md``, and the table to the page, between the comments with that name."""
    table, title = "\n".join(lines) + "\n", name.lower().replace("_", " ")
    (HERE / f"{name}.md").write_text(text + table)
    before, opening, rest = PAGE.read_text().partition(f"<!-- {title} -->\n")
    _, closing, after = rest.partition(f"<!-- end of {title} -->")
    PAGE.write_text(before + opening + table + closing + after)


def main() -> None:
    """Train, print, write."""
    home = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/planted_faults")
    lines = ["| planted | verdict | clearest changes | learning rates that moved |", "|---|---|---|---|"]
    for number, (name, fault) in enumerate(FAULTS.items()):
        rows = [row(name, check(name, home / str(number)))]
        if fault.finder:
            rows.append(row(f"the same, with `{' '.join(fault.finder)}`", check_finder(name, home / str(number))))
        print(*rows, sep="\n", flush=True)
        lines += rows
    head = (
        "# Which planted faults `lab check` finds\n\nWritten by `python benchmarks/planted_faults.py`, which describes "
    )
    head += f"the sweep: 25 runs each, margin {100 * MARGIN:g} %.\n\n"
    write_table("PLANTED_FAULTS", head, lines)


if __name__ == "__main__":
    main()
