"""Sweeps and runs from Python, such as in a notebook: they take the words of a command and return a ``Study``."""

from __future__ import annotations

import json
import multiprocessing
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from lab.analysis.sensitivity import WINDOW, Study, study
from lab.analysis.text import listed
from lab.core import machine, registry
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.core.printing import say
from lab.sweeping import launch, own_code
from lab.sweeping.compose import Tree, parse
from lab.sweeping.own_code import OwnCode
from lab.sweeping.request import find_sweep, is_override, read_request

if TYPE_CHECKING:
    from lab.features.stress.card import Card
    from lab.features.stress.pair import CardPair
    from lab.report.answer import Answer


def sweep(
    name: str | Path,
    *overrides: str,
    out: str | Path | None = None,
    window: Sequence[float] = WINDOW,
    **values: Any,
) -> Study:
    """Train the missing runs of a sweep, as ``lab sweep`` does, with its report and its lines of progress.

    Jobs are processes of their own, so a script must call this under ``if __name__ == "__main__":``. With the
    override ``hydra/launcher=basic`` the runs train in this process, as they do if they need what a notebook registers.

    Args:
        name: a name that ``lab list sweeps`` gives, or a file.
        overrides: as on the command line, such as ``"optimizer.lr=1e-3,1e-2"``.
        out: the results folder; ``runs/NAME`` unless given.
        window: as for ``lab.analysis.study``.
        values: overrides by key, after the others: ``steps=500``. A list is swept over: ``seed=[0, 1]`` is two seeds,
            and ``intervention=[[], ["relu", "z_loss"]]`` no intervention, and two at once. Keys with dots are given as
            ``**{"optimizer.lr": 1e-2}``. ``model`` and ``optimizer`` may be your own, as ``stress`` takes them.

    Returns:
        The study of the folder; ``Study.failed`` holds the cards of runs that failed.

    Raises:
        RequestError: the request cannot be carried out, all runs failed, or the window is invalid.
    """
    file = find_sweep(str(name))
    code, options, values = _own_code(values)
    overrides = _with_values(overrides, values, out)
    return _study(["sweep", str(name), *options], overrides, window, code, name=file.stem, sweep=file)


def train(*overrides: str, out: str | Path | None = None, window: Sequence[float] = WINDOW, **values: Any) -> Study:
    """Train without a sweep file, as ``lab train`` does: one run, or one for each combination of the listed values.

    ``lab.train("schedule=cosine", steps=500, seed=[0, 1])`` trains two runs. Arguments, result and errors are those of
    ``sweep``; the default folder is ``runs/train``.
    """
    code, options, values = _own_code(values)
    overrides = _with_values(overrides, values, out)
    is_single = not any(word.is_swept for word in parse(list(filter(is_override, overrides))))
    words = ["train", *["-m"] * (not is_single), *options]
    return _study(words, overrides, window, code, name="train", is_single=is_single)


def stress(
    *overrides: Any,
    minutes: int = 1,
    tests: Sequence[str] = (),
    cures: int | str | Sequence[str] | None = None,
    model: Any = None,
    optimizer: Any = None,
    probe: Mapping[str, str] = MappingProxyType({}),
    out: str | Path | None = None,
    **values: Any,
) -> Card | CardPair:
    """Crash-test a recipe, as ``lab stress`` does, and train what is missing for it; or two, side by side.

    Args:
        overrides: of the recipe, as on the command line, such as ``"recipe=qwen3"``. Before them may stand the name of
            a recipe or the file of one, ``"mine.yaml"``, or a list of two: ``["olmo2", "mine.yaml"]``.
        minutes: how long a card may take on two cores: 1, 5 or 30.
        tests: the names of the tests; all that fit unless given.
        cures: how many single changes to try on each failed test, or ``"all"``; or their names, which are tried on weak
            and open tests, too. None in a minute, else 10, unless given.
        model: a model of your own: a function or a class that builds a module, or as ``lab stress --model`` takes it;
            or the name of a size, such as ``"d64"``, or a list of two, which are put side by side.
        optimizer: an optimizer of your own, a class derived from ``torch.optim.Optimizer``, or as ``lab stress
            --optimizer`` takes it, to put beside the recipe's; or the name of one of the lab's.
        probe: names of modules of your model that attend, or that are its blocks, where they are not found by shape:
            ``{"attn": "layers.*.self_attn", "block": "layers.*"}``.
        out: the results folder; ``runs/stress/NAME`` unless given. With two recipes, the folder that holds theirs.
        values: overrides by key, as for ``sweep``.

    Returns:
        The card, which a notebook displays; ``Card.table`` holds a row per test. Of two recipes, both cards with a
        ``CardPair.table`` of their differences.

    Raises:
        RequestError: the recipe or a test is invalid, or does not fit into the minutes.
        SystemExit: a run failed.
    """
    from lab.features.stress.plan import read_plans  # here, since a sweep needs none of it
    from lab.features.stress.training import make_card, make_pair

    given = {kind: value for kind, value in (("model", model), ("optimizer", optimizer)) if value is not None}
    code, own_options, values = _own_code({**given, **values}, probe)
    given_words = [word for entry in overrides for word in ([entry] if isinstance(entry, str) else entry)]
    words = _checked(_with_values(given_words, values, out))
    options = [word for word in words if word.startswith("-")]
    chosen = str(cures) if isinstance(cures, int | str) else ",".join(cures) if cures is not None else None
    shown = {"--minutes": minutes if minutes != 1 else None, "--tests": ",".join(tests), "--cures": chosen}
    command = shlex.join(
        ["lab", "stress", *words, *own_options, *(f"{key}={value}" for key, value in shown.items() if value)]
    )
    own = [word for word in words if is_override(word)]
    recipes = [word for word in words if word not in (*own, *options)]
    plans = read_plans(recipes, own, command, names=tests, minutes=minutes, cures=chosen, options=options, code=code)
    return make_card(*plans) if len(plans) == 1 else make_pair(plans)


def numbers(params: float | str, **given: Any) -> Answer:
    """What the committed records say of a run by its numbers, as ``lab predict --params`` does; nothing is trained.

    Args:
        params: parameters without embeddings, such as ``7e9`` or ``"7B"``.
        given: numbers by name, such as ``lr=3e-4``, ``batch="4M"`` and ``qk_norm="no"``.

    Returns:
        The answer, which a notebook displays; its ``table`` holds a row for each risk.

    Raises:
        RequestError: a name is unknown, or its value is none.
    """
    from lab.features.predict.numbers import answer_of, read_numbers

    words = [f"{name}={value}" for name, value in given.items()]
    return answer_of(
        read_numbers([f"params={params}", *words]), shlex.join(["lab", "predict", "--params", str(params), *words])
    )


def _with_values(overrides: Sequence[str], values: Mapping[str, Any], out: str | Path | None) -> tuple[str, ...]:
    """Overrides, those of values by key, and that of the results folder if one is given."""
    given = values if out is None else {**values, "out": str(out)}
    return (*overrides, *(override(key, value) for key, value in given.items()))


def override(key: str, value: Any) -> str:
    """The override that sets a key to a value of Python, or sweeps it over the values of a list, a range or an array.

    Raises:
        RequestError: the value is none of a config, or the list is empty.
    """
    swept = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping | Set)
    words = [_word(key, item) for item in (value if swept else [value])]
    if not words:
        raise RequestError(f"{key} is swept over nothing; {key}=[[]] sets it to an empty list")
    return f"{key}={','.join(words)}"


def _word(key: str, value: Any) -> str:
    """A value as Hydra reads it."""
    if value is None:
        return "null"
    if isinstance(value, bool | np.bool_):
        return str(value).lower()
    if isinstance(value, Real):
        return repr(int(value) if isinstance(value, Integral) else float(value))
    if isinstance(value, list | tuple):
        return f"[{','.join(_word(key, item) for item in value)}]"
    if not isinstance(value, str | Path):
        raise RequestError(
            f"{key}: {value!r} is no value; it takes a number, text, True, False, None or a list; "
            "**{'optimizer.lr': 1e-2} sets a key with dots"
        )
    is_plain = re.fullmatch(r"[\w./-]+", str(value), re.ASCII) and parse([f"key={value}"])[0].value == str(value)
    return str(value) if is_plain else quoted(value)


def _own_code(
    values: Mapping[str, Any], probe: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[OwnCode], list[str], dict[str, Any]]:
    """The model and the optimizer of the user's own among these values, options that name them, and other values."""
    probes = own_code.read_probes([f"{kind}={pattern}" for kind, pattern in probe.items()])
    given = {kind: values[kind] for kind in own_code.KINDS if kind in values and own_code.is_code(values[kind])}
    code = [own_code.read(kind, value, probes) for kind, value in given.items()]
    options = [f"--{kind}={getattr(value, '__name__', value)}" for kind, value in given.items()]
    options += [f"--probe={kind}={pattern}" for kind, pattern in probes.items()]
    return code, options, {key: value for key, value in values.items() if key not in given}


def _study(
    words: Sequence[str],
    overrides: Sequence[str],
    window: Sequence[float],
    code: Sequence[OwnCode],
    *,
    name: str,
    sweep: Path | None = None,
    is_single: bool = False,
) -> Study:
    overrides = _checked(overrides)
    command = shlex.join(["lab", *words, *overrides])
    request = read_request(overrides, command, name=name, sweep=sweep, is_single=is_single, code=code)
    composed = launch.compose(request)
    if names := known_here_only(composed.trees):
        say(f"lab: training in this process, the only one that has {listed(names)}", error=True)
        others = [word for word in request.words if not word.key.startswith(("hydra/launcher", "hydra.launcher."))]
        request = replace(request, words=[*others, *parse(["hydra/launcher=basic"])])
        composed = launch.compose(request)
    try:
        launch.train(composed, request, jobs_only=True)
    except SystemExit as end:
        if end.code != 1:  # 1: some runs failed, which has been printed
            raise
    return study(composed.trees[0]["out"], window)


def _checked(overrides: Sequence[str]) -> Sequence[str]:
    """The overrides, from a process that is set up for training.

    Raises:
        RequestError: an option is among them, or this process is itself a job.
    """
    if multiprocessing.parent_process() is not None:
        raise RequestError('jobs import the script that began them: call lab.sweep under if __name__ == "__main__":')
    if flags := [
        word for word in overrides if word.startswith("-") and word.split("=")[0] not in ("--config-dir", "-cd")
    ]:
        raise RequestError(f"{flags[0]} is for the command line; here overrides are KEY=VALUE")
    machine.configure_process()
    return overrides


def known_here_only(trees: Sequence[Tree]) -> list[str]:
    """Entries in these configs that jobs cannot import, since a notebook or a session at a prompt registered them."""
    main = sys.modules["__main__"]
    if hasattr(main, "__file__") or getattr(main, "__spec__", None):  # a script, which jobs import again
        return []
    installed = {"lab", *registry.packages_of_others()}
    registered = {
        name: registry.source(entries[name]).__module__.split(".")[0]
        for entries in registry.KINDS.values()
        for name in entries
    }
    names = sorted(name for name, package in registered.items() if package not in installed)
    configs = json.dumps(list(trees)) if names else ""
    return [name for name in names if f'"{name}"' in configs]
