"""From a request to records: compose every point, plan the sweep, and hand its fleets to a launcher as jobs."""

from __future__ import annotations

import math
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property, partial
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

from hydra._internal.callbacks import Callbacks  # private: launchers of Hydra require them
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import OmegaConf

from lab.cli import hydra_app
from lab.cli.compose import Request, config_loader, expand, parse, reading_request
from lab.cli.planning import show_planning
from lab.cli.points import Tree, TreeComposer, chooses_file, with_values
from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.core.shipped import at_scale
from lab.records import store
from lab.sweeping import pipeline
from lab.sweeping.local_jobs import JobEnd, Slot, check_timeout, choose_slots, run_jobs
from lab.sweeping.requests import recognizable

LR = "optimizer.lr"
ALONG_AN_ARM = (LR, "seed", "data.seed")  # keys in which the runs of an arm differ

if TYPE_CHECKING:
    from lab.sweeping.planner import SweepPlan


class Composed(NamedTuple):
    """The points and the launcher that Hydra composed from a request.

    Attributes:
        trees: the resolved config tree of every point.
        recipe_lrs: the learning rate of the recipe itself, by the index of the first point of each arm that is swept
            over learning rates.
        launcher: what runs the jobs.
        settings: ``max_runs``, ``one``, ``shard`` and ``dry_run`` of the sweeper, and those of the ``launcher``.
    """

    trees: Sequence[Tree]
    recipe_lrs: Mapping[int, float]
    launcher: Launcher
    settings: Mapping[str, Any]


def compose(request: Request) -> Composed:
    """Compose every point of a request, and make the launcher that it chooses.

    Raises:
        RequestError: Hydra cannot compose the request.
    """
    with config_loader(request) as loader:
        overrides = parse(request.overrides, loader)
        settings = [one for one in overrides if one.is_hydra_override()]
        of_points = [one for one in overrides if not one.is_hydra_override()]
        fixed = [one for one in of_points if not one.is_sweep_override()]
        files = [one for one in fixed if chooses_file(one, loader)]
        values = [one for one in fixed if not chooses_file(one, loader)]
        with reading_request(request.config_dir):
            chosen = loader.load_configuration("config", _lines([*settings, *files]), RunMode.RUN)
            config = with_values(chosen, values, loader)
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            launcher: Launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=hydra_app.hydra_task, config=config
            )
            sweeper: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        params = sweeper.pop("params")
        swept = [] if sweeper["one"] else [f"{key}={value}" for key, value in params.items()]
        points = expand([*parse(swept, loader), *of_points])
        composer = TreeComposer(loader, chosen, _lines(files), request.config_dir)
        try:
            trees = list(show_planning(map(composer.tree, points), len(points)))
        except RequestError as refusal:
            raise RequestError(at_scale(refusal, chosen.get("scale"))) from None
        recipe_lrs = _recipe_lrs(composer, points)
    return Composed(trees, recipe_lrs, launcher, {**sweeper, "launcher": OmegaConf.to_container(config.hydra.launcher)})


def _recipe_lrs(composer: TreeComposer, points: Sequence[Sequence[str]]) -> dict[int, float]:
    """See ``Composed``; points of one arm differ in learning rate and seeds."""
    first: dict[tuple[str, ...], int] = {}
    for index, point in enumerate(points):
        arm = tuple(word for word in point if word.partition("=")[0] not in ALONG_AN_ARM)
        if any(word.startswith(f"{LR}=") for word in point):
            first.setdefault(arm, index)
    found = {index: composer.of_files(points[index], LR) for index in first.values()}
    return {index: float(lr) for index, lr in found.items() if isinstance(lr, (int, float)) and 0 < lr < math.inf}


def _lines(overrides: Sequence[Override]) -> list[str]:
    return [str(one.input_line) for one in overrides]


def plan(composed: Composed) -> SweepPlan:
    """Plan the sweep and print its cautions; nothing is written.

    Raises:
        RequestError: a point is invalid, or the folder cannot take records.
    """
    from lab.sweeping import planner  # slow to load

    trees, _, launcher, settings = composed
    limits = {key: settings[key] for key in ("max_runs", "one", "shard")}
    is_local = type(launcher).__name__ in ("BasicLauncher", "LocalLauncher")
    slots = getattr(launcher, "slots", [None])
    with closing(show_planning(trees, len(trees))) as planned:
        planned_sweep = planner.plan_sweep(planned, is_local=is_local, slots=slots, **limits)
    pipeline.print_cautions(planned_sweep)
    return planned_sweep


def carry_out(request: Request) -> None:
    """Train the points of a request, or with --dry-run estimate what that would cost.

    Raises:
        RequestError: a point cannot be composed, or is invalid; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    composed = compose(request)
    if composed.settings["dry_run"]:
        _estimate(composed)
    else:
        train(composed, request)


def train(composed: Composed, request: Request, *, jobs_only: bool = False) -> None:
    """Train the points of a request that Hydra composed.

    Args:
        composed: the composed request.
        request: the request itself.
        jobs_only: whether even a single fleet trains in a process of its own; this one keeps its settings of torch.

    Raises:
        RequestError, SystemExit: see ``carry_out``.
    """
    noted: Any = {"command": request.command, "question": request.question, "one": composed.settings["one"]}
    known = recognizable(composed.trees, composed.settings)
    if known and (ids := known.finished_ids()) is not None:
        on_record = store.recipe_lrs(known.folder)
        if {*composed.recipe_lrs.values()} == {on_record[run] for run in ids if run in on_record}:
            pipeline.report_finished(known.folder, ids, **noted)
            return
    launcher = composed.launcher
    planned = plan(composed)
    if planned.fleets and type(launcher).__name__ == "SlurmLauncher" and not shutil.which("srun"):
        raise RequestError("there is no srun here, so no SLURM to launch jobs; hydra/launcher=local trains here")
    trains_here = getattr(launcher, "trains_here", False) and not jobs_only
    id_of = {id(point.tree): point.id for point in planned.requested}
    recipe_lrs = {
        id_of[tree]: lr for index, lr in composed.recipe_lrs.items() if (tree := id(composed.trees[index])) in id_of
    }
    ids = pipeline.train(planned, partial(_launch, launcher), trains_here=trains_here, recipe_lrs=recipe_lrs, **noted)
    if known:
        known.note(ids)


def _estimate(composed: Composed) -> None:
    kind = composed.settings["dry_run"]
    if kind not in ("summary", "full"):
        raise RequestError(f"hydra.sweeper.dry_run must be summary or full, not {kind!r}")
    if distributed.world_size() > 1:
        raise RequestError("--dry-run tries fleets in one process; run it without torchrun")
    pipeline.print_estimate(plan(composed), full=kind == "full")


def _launch(launcher: Launcher, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Launch jobs; returns a line for each that died, whose runs are missing and so count as failed."""
    try:
        ends = launcher.launch(jobs, initial_job_idx=0)
    except Exception as error:  # submitit and Ray raise when a job was killed
        return [f"{type(launcher).__name__} gave up: {type(error).__name__}: {shorten(str(error), 300)}"]
    # private: the public attribute prints the overrides of a job that failed
    return [f"a job died: {end._return_value}" for end in ends if end.status is not JobStatus.COMPLETED]


class LocalJobs:
    """Jobs of one task, each in a process of its own on this machine."""

    def __init__(self, task: TaskFunction, device: str, **options: Any) -> None:
        """Take the config key ``device`` and the options of ``LocalLauncherConf``.

        Raises:
            RequestError: the timeout is invalid.
        """
        self.task, self.device, self.options = task, device, options
        self.timeout = check_timeout(options["timeout_minutes"])

    @cached_property
    def slots(self) -> list[Slot]:
        """The slots on which jobs run at once; chosen only when there is work, since counting GPUs loads torch.

        Raises:
            RequestError: an option of the launcher is invalid.
        """
        return choose_slots(self.options["processes"], self.options["devices"], self.device)

    @property
    def trains_here(self) -> bool:
        """Whether a single job needs no process of its own: it has no timeout, and no GPU but the first."""
        return math.isinf(self.timeout) and self.slots[0] in (None, *machine.visible_gpus()[:1])

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run the task with each list of overrides as its whole config; jobs are numbered from ``first``.

        Raises:
            SystemExit: a signal asked to stop before all jobs were done.
        """
        values = ({one.key_or_group: one.value() for one in parse(overrides)} for overrides in job_overrides)
        arguments = ((self.task, each) for each in values)
        with machine.catching_sigterm() as stop_requested:
            ends = run_jobs(_run_job, arguments, self.slots, timeout=self.timeout, stop_requested=stop_requested)
            if stop_requested() and (len(ends) < len(job_overrides) or any(end.exit_code for end in ends)):
                raise SystemExit(machine.EXIT_PREEMPTED)
        return [self._returned(first + index, end) for index, end in enumerate(ends)]

    def _returned(self, number: int, end: JobEnd) -> JobReturn:
        if not end.exit_code:
            return JobReturn(status=JobStatus.COMPLETED)
        how = (
            f"was killed after {self.timeout / 60:g} minutes"
            if end.timed_out
            else f"ended with exit code {end.exit_code}"
        )
        returned = JobReturn(status=JobStatus.FAILED)
        returned.return_value = RuntimeError(f"job {number} {how}")
        return returned


def _run_job(task: TaskFunction, values: dict[str, Any]) -> None:
    try:
        task(OmegaConf.create(values))
    except RequestError as refusal:  # such as a full disk or a damaged plan
        say(f"lab: {refusal}", error=True)
        sys.exit(1)
    except Exception:
        say(traceback.format_exc().rstrip(), error=True)
        sys.exit(1)
