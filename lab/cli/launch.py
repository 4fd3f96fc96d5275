"""From a request to records: compose its points, plan the sweep, and hand its fleets to a launcher as jobs."""

from __future__ import annotations

import io
import math
import os
import shutil
import sys
import time
import traceback
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lab.cli.compose import Composer, Tree, Word, compose_files, expand, hydra_configs, parse, refusing, with_values
from lab.cli.request import CONFIG_DIR, Request, check_swept, read_options
from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.shipped import at_scale
from lab.sweeping import pipeline

if TYPE_CHECKING:
    from lab.sweeping.planner import SweepPlan
    from lab.sweeping.progress import Screen

Item = TypeVar("Item")

LR = "optimizer.lr"
LOG_AFTER = 10.0  # seconds of planning
ALONG_AN_ARM = (LR, "seed", "data.seed")  # keys in which the runs of an arm differ


class Composed(NamedTuple):
    """The points and the launcher that Hydra composed from a request.

    Attributes:
        trees: the resolved config tree of every point.
        recipe_lrs: the learning rate of the recipe itself, by the index of the first point of each arm that is swept
            over learning rates.
        launcher: what runs the jobs.
        max_runs: the most runs in a fleet; None for as many as memory holds.
    """

    trees: Sequence[Tree]
    recipe_lrs: Mapping[int, float]
    launcher: Launcher
    max_runs: int | None


class NoCallbacks:
    """The lab's callbacks of Hydra, which are none; launchers call them around every job."""

    def on_job_start(self, **_: Any) -> None:
        """Do nothing."""

    def on_job_end(self, **_: Any) -> None:
        """Do nothing."""


def compose(request: Request) -> Composed:
    """Compose every point of a request, and make the launcher that it chooses.

    Raises:
        RequestError: Hydra cannot compose the request.
    """
    config_dir, settings = request.config_dir, _settings(request)
    with hydra_configs(request.files):
        config, composer = compose_files(settings, config_dir, return_hydra_config=True), Composer(config_dir)
        composer.keep([word for word in settings if word.chooses_file], config)
        values = [word for word in request.words if not (word.is_swept or word.is_setting or word.chooses_file)]
        config = with_values(config, values, config_dir)
        points = points_of(request, config)
        for key in _replaced_by_recipe(config.hydra.sweeper.params, request):
            say(f"lab: the recipe sets {key}, so what the sweep file gives for it is left out", error=True)
        callbacks: Any = NoCallbacks()
        context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=callbacks)
        with refusing():
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=hydra_task, config=config
            )
        try:
            trees = list(show_planning(map(composer.tree, points), len(points)))
        except RequestError as refusal:
            raise RequestError(at_scale(refusal, config.get("scale"))) from None
        return Composed(trees, _recipe_lrs(composer, points), launcher, config.hydra.sweeper.max_runs)


def points_of(request: Request, config: DictConfig) -> list[list[Word]]:
    """The words of every point of a request, given the config that Hydra composed from its settings and files.

    A recipe in the request takes the place of the interventions and optimizers that the file sweeps.

    Raises:
        RequestError: a value that is swept cannot be read.
    """
    with refusing():
        params: Any = OmegaConf.to_container(config.hydra.sweeper.params, resolve=True)
    check_swept(params, request.config_dir)
    replaced = _replaced_by_recipe(params, request)
    texts = [f"{key}={value}" for key, value in params.items() if key not in replaced]
    swept = [] if request.one else parse(texts, request.config_dir)
    return expand([*swept, *(word for word in request.words if not word.is_setting)], request.config_dir)


def _replaced_by_recipe(params: Mapping[str, Any], request: Request) -> list[str]:
    """The swept keys of a file that a recipe in the request sets."""
    is_asked_for = any(word.key == "recipe" for word in request.words)
    return [key for key in ("intervention", "optimizer") if is_asked_for and key in params]


def first_point(request: Request) -> tuple[DictConfig, Mapping[str, Any]]:
    """The config of the point that a request would train first, not resolved, and the file that each group chooses.

    Raises:
        RequestError: Hydra cannot compose it.
    """
    with hydra_configs(request.files):
        config = compose_files(_settings(request), request.config_dir, return_hydra_config=True)
        point = points_of(request, config)[0]
        files = [word for word in point if word.chooses_file]
        hydra = compose_files(files, request.config_dir, return_hydra_config=True).hydra
        return Composer(request.config_dir).config(point), {k: v for k, v in hydra.runtime.choices.items() if v}


def _settings(request: Request) -> list[Word]:
    """The words that Hydra composes before it is known which points there are."""
    return [word for word in request.words if not word.is_swept and (word.is_setting or word.chooses_file)]


def compose_points(arguments: Sequence[str]) -> list[Tree]:
    """Compose a resolved config tree for every point of these overrides.

    Raises:
        RequestError: a word is no override, or Hydra cannot compose them.
    """
    options = [word for word in arguments if word.startswith("-") and word.split("=")[0] not in CONFIG_DIR]
    if options:
        raise RequestError(f"unknown option {options[0]!r}; this command takes key=value and --config-dir only")
    given = read_options(arguments)
    words = parse(given.words, given.config_dir)
    with hydra_configs():
        composer = Composer(given.config_dir)
        return [composer.tree(point) for point in expand(words, given.config_dir)]


def show_planning(trees: Iterable[Item], count: int) -> Generator[Item, None, None]:
    """Yield ``trees`` and show that ``count`` points are planned: a bar in a terminal, elsewhere a line after 10 s."""
    text = f"planning {count:,} point{'s' * (count > 1)}"
    if sys.stderr.isatty():
        from rich.console import Console  # here, since a log needs none of it
        from rich.progress import track

        yield from track(trees, text, total=count, console=Console(stderr=True), transient=True)
        return
    due = time.monotonic() + LOG_AFTER
    for tree in trees:
        if time.monotonic() >= due:
            say(text, error=True)
            due = math.inf
        yield tree


def _recipe_lrs(composer: Composer, points: Sequence[Sequence[Word]]) -> dict[int, float]:
    """See ``Composed``; points of one arm differ in learning rate and seeds."""
    first: dict[tuple[str, ...], int] = {}
    for index, point in enumerate(points):
        if any(word.key == LR for word in point):
            first.setdefault(tuple(word.text for word in point if word.key not in ALONG_AN_ARM), index)
    found = dict[int, float]()
    for index in first.values():
        with suppress(OmegaConfBaseException):  # such as a reference to a key that the words add
            lr = OmegaConf.select(composer.of_files(points[index]), LR)
            if isinstance(lr, (int, float)) and 0 < lr < math.inf:
                found[index] = float(lr)
    return found


def plan(composed: Composed, request: Request, *, cautions: bool = True) -> SweepPlan:
    """Plan the sweep and print its ``cautions``; nothing is written.

    Raises:
        RequestError: a point is invalid, or the folder cannot take records.
    """
    from lab.sweeping import planner  # slow to load

    is_local = type(composed.launcher).__name__ in ("BasicLauncher", "LocalLauncher")
    slots = getattr(composed.launcher, "slots", [None])
    with closing(show_planning(composed.trees, len(composed.trees))) as trees:
        planned = planner.plan_sweep(
            trees, max_runs=composed.max_runs, one=request.one, shard=request.shard, is_local=is_local, slots=slots
        )
    if cautions:
        pipeline.print_cautions(planned)
    return planned


def carry_out(request: Request) -> None:
    """Train the points of a request, or with --dry-run estimate what that would cost.

    Raises:
        RequestError: a point cannot be composed, or is invalid; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    composed = compose(request)
    if not request.dry_run:
        train(composed, request)
        return
    if distributed.world_size() > 1:
        raise RequestError("--dry-run tries fleets in one process; run it without torchrun")
    pipeline.print_estimate(plan(composed, request), full=request.dry_run == "full")


def train(composed: Composed, request: Request, *, jobs_only: bool = False) -> None:
    """Train the points of a request that Hydra composed.

    Args:
        composed: the composed request.
        request: the request itself.
        jobs_only: whether even a single fleet trains in a process of its own; this one keeps its settings of torch.

    Raises:
        RequestError, SystemExit: see ``carry_out``.
    """
    launcher, planned = composed.launcher, plan(composed, request)
    _check_launcher(launcher, planned)
    id_of = {id(point.tree): point.id for point in planned.requested}
    recipe_lrs = {
        id_of[tree]: lr for index, lr in composed.recipe_lrs.items() if (tree := id(composed.trees[index])) in id_of
    }
    pipeline.train(
        planned,
        partial(_launch, launcher),
        command=request.command,
        question=request.question,
        recipe_lrs=recipe_lrs,
        one=request.one,
        trains_here=getattr(launcher, "trains_here", False) and not jobs_only,
    )


def train_runs(launcher: Launcher, planned: SweepPlan, command: str, screen: Screen | None) -> None:
    """Train what is missing of a plan, without a report.

    Args:
        launcher: runs the jobs.
        planned: the plan.
        command: the command line, for the folder to note.
        screen: shows the progress; None for the usual lines and display.

    Raises:
        RequestError: the folder cannot take records, or the launcher cannot run here; nothing is written then.
    """
    _check_launcher(launcher, planned)
    pipeline.train_missing(planned, partial(_launch, launcher), command=command, screen=screen)


def _check_launcher(launcher: Launcher, planned: SweepPlan) -> None:
    if planned.fleets and type(launcher).__name__ == "SlurmLauncher" and not shutil.which("srun"):
        raise RequestError("there is no srun here, so no SLURM to launch jobs; hydra/launcher=local trains here")


def _launch(launcher: Launcher, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Launch jobs; returns a line for each that died, whose runs are missing and so count as failed."""
    try:
        ends = launcher.launch(jobs, initial_job_idx=0)
    except Exception as error:  # submitit and Ray raise when a job was killed
        return [f"{type(launcher).__name__} gave up: {type(error).__name__}: {shorten(str(error), 300)}"]
    return list(_deaths(ends))


def _deaths(ends: Sequence[JobReturn]) -> Iterator[str]:
    for end in ends:
        try:
            with redirect_stderr(io.StringIO()):  # to which Hydra writes the overrides of a job that failed
                _ = end.return_value
            if end.status is not JobStatus.COMPLETED:
                yield "a job died"
        except Exception as error:
            yield f"a job died: {error}"


def hydra_task(config: DictConfig) -> None:
    """One job trains one fleet of a frozen plan; a launcher finds this function by its name in another process."""
    from lab.sweeping.pipeline import train_planned_fleet

    machine.configure_process()
    if HydraConfig.initialized():  # true under a launcher of Hydra
        with suppress(FileNotFoundError):
            os.chdir(HydraConfig.get().runtime.cwd)  # cluster workers start anywhere; paths are relative to it
    plan, index, request = str(config.fleet).split("/")
    train_planned_fleet(Path(config.out), plan, int(index), request=request)


def run_local_job(task: TaskFunction, overrides: Sequence[str]) -> None:
    """Run a task in a process of its own, with these overrides as its whole config; one line says why it failed."""
    try:
        task(OmegaConf.create({word.key: word.value for word in parse(overrides)}))
    except RequestError as refusal:  # such as a full disk or a damaged plan
        say(f"lab: {refusal}", error=True)
        sys.exit(1)
    except Exception:
        say(traceback.format_exc().rstrip(), error=True)
        sys.exit(1)
