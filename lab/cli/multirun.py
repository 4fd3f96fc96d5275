"""Training a request: compose every point, plan the sweep, and hand its fleets to one of Hydra's launchers as jobs."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from functools import cached_property, partial
from textwrap import shorten
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lab.cli import hydra_app
from lab.cli.compose import config_loader, expand, parse, reading_request, running_own_code
from lab.cli.planning import show_planning
from lab.cli.points import TreeComposer, chooses_file
from lab.core import machine
from lab.core.errors import RequestError
from lab.core.printing import say
from lab.sweep import pipeline
from lab.sweep.local_jobs import JobEnd, Slot, check_timeout, choose_slots, run_jobs
from lab.sweep.requests import recognizable


def train_points(words: Sequence[str]) -> None:
    """Train every point of these overrides, with the launcher that they choose.

    Raises:
        RequestError: a point cannot be composed, or makes no sense; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    with config_loader() as loader:
        overrides = parse(words, loader)
        settings = [one for one in overrides if one.is_hydra_override()]
        of_points = [one for one in overrides if not one.is_hydra_override()]
        fixed = [one for one in of_points if not one.is_sweep_override()]
        files = [one for one in fixed if chooses_file(one, loader)]
        values = [one for one in fixed if not chooses_file(one, loader)]
        with reading_request():
            chosen = loader.load_configuration("config", _lines([*settings, *files]), RunMode.RUN)
            config = deepcopy(chosen)
            loader._apply_overrides_to_config(values, config)
            context = HydraContext(config_loader=loader, callbacks=Callbacks())
            launcher: Launcher = Plugins.instance().instantiate_launcher(
                hydra_context=context, task_function=hydra_app.hydra_task, config=config
            )
            options: Any = OmegaConf.to_container(config.hydra.sweeper, resolve=True)
        params = options.pop("params")
        swept = [] if options["one"] else [f"{key}={value}" for key, value in params.items()]
        points = expand([*parse(swept, loader), *of_points])
        composer = TreeComposer(loader, chosen, _lines(files))
        _train(points, composer, launcher, config, options)


def _lines(overrides: Sequence[Override]) -> list[str]:
    return [str(one.input_line) for one in overrides]


def _train(
    points: Sequence[Sequence[str]], composer: TreeComposer, launcher: Launcher, config: DictConfig, options: Any
) -> None:
    """Train the points; ``options`` are those of ``run_sweep``."""
    trees = list(show_planning(map(composer.tree, points), len(points)))
    launcher_options = OmegaConf.to_container(config.hydra.launcher)
    request = None if options["dry_run"] else recognizable(trees, {**options, "launcher": launcher_options})
    if request and (ids := request.finished_ids()) is not None:
        pipeline.report_finished(request.folder, ids, one=options["one"])
        return
    is_local = type(launcher).__name__ in ("BasicLauncher", "LocalLauncher")
    slots, trains_here = getattr(launcher, "slots", [None]), getattr(launcher, "trains_here", False)
    launch = partial(_launch, launcher)
    with closing(show_planning(trees, len(trees))) as planned:
        trained = pipeline.run_sweep(
            planned, launch, is_local=is_local, slots=slots, trains_here=trains_here, **options
        )
    if request and trained:
        request.note(trained)


def _launch(launcher: Launcher, jobs: Sequence[Sequence[str]]) -> list[str]:
    """Launch jobs; returns a line for each that died, whose runs are missing and so count as failed."""
    try:
        ends = launcher.launch(jobs, initial_job_idx=0)
    except Exception as error:  # how submitit and Ray report that a job was killed
        return [f"{type(launcher).__name__} gave up: {type(error).__name__}: {shorten(str(error), 300)}"]
    return [f"a job died: {end._return_value}" for end in ends if end.status is not JobStatus.COMPLETED]


class LocalJobs:
    """Hydra's jobs, each in a process of its own on this machine."""

    @running_own_code()
    def __init__(
        self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, **options: Any
    ) -> None:
        """Take the options of ``LocalLauncherConf``.

        Raises:
            RequestError: the timeout makes no sense.
        """
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.options, self.timeout = options, check_timeout(options["timeout_minutes"])

    @cached_property
    def slots(self) -> list[Slot]:
        """Where jobs run at once; not chosen before something is to be trained, since counting GPUs loads torch.

        Raises:
            RequestError: an option of the launcher makes no sense.
        """
        return choose_slots(self.options["processes"], self.options["devices"], self.config.device)

    @property
    def trains_here(self) -> bool:
        """Whether a single job needs no process of its own: it has no timeout, and no GPU but the first."""
        return math.isinf(self.timeout) and self.slots[0] in (None, *machine.visible_gpus()[:1])

    def launch(self, job_overrides: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run a job for each list of overrides, numbered from ``first``.

        Raises:
            SystemExit: told to stop before all jobs were done.
        """
        setup_globals()
        arguments = self._arguments(job_overrides, first)
        with machine.catching_sigterm() as told_to_stop:
            ends = run_jobs(_run_job, arguments, self.slots, timeout=self.timeout, told_to_stop=told_to_stop)
            if told_to_stop() and (len(ends) < len(job_overrides) or any(end.exit_code for end in ends)):
                raise SystemExit(machine.EXIT_PREEMPTED)
        return [self._returned(first + index, end) for index, end in enumerate(ends)]

    def _arguments(self, job_overrides: Sequence[Sequence[str]], first: int) -> Iterator[tuple[Any, ...]]:
        for number, overrides in enumerate(job_overrides, first):
            config = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = str(number), number
            yield self.hydra_context, self.task_function, config

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


def _run_job(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
    setup_globals()
    returned = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    try:
        _ = returned.return_value  # raises what the task raised
    except RequestError as refusal:  # a full disk, a damaged plan
        say(f"lab: {refusal}", error=True)
        sys.exit(1)
    except Exception:
        say(traceback.format_exc().rstrip(), error=True)
        sys.exit(1)
