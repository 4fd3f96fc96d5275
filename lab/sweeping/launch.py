"""From a request to records: compose its points, plan the sweep, and hand its fleets to a launcher as jobs."""

from __future__ import annotations

import io
import json
import math
import os
import secrets
import shutil
import sys
import time
import traceback
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stderr, suppress
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import hydra
import pandas as pd
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from lab.analysis.curves import LR
from lab.analysis.text import listed
from lab.core import distributed, machine
from lab.core.errors import RequestError
from lab.core.files import quoted
from lab.core.own_failures import OWN_CODE
from lab.core.printing import say
from lab.core.shipped import at_scale, data_folder
from lab.records import leases, plans, store
from lab.sweeping import own_code, refinement
from lab.sweeping.compose import Composer, Tree, Word, expand, parse, refusing, with_values
from lab.sweeping.progress import GrowingReport, ProgressLog, ProgressMonitor, Screen
from lab.sweeping.request import CONFIG_DIR, Request, read_options

if TYPE_CHECKING:
    from lab.sweeping.planner import Point, SweepPlan
    from lab.training.config import RunConfig

Item = TypeVar("Item")

LOOK_EVERY = 0.5  # seconds between two looks for runs that other commands train

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
        points: the words of every point.
        refine: the width of the brackets (decades) down to which crossings are refined; None not to refine any.
    """

    trees: Sequence[Tree]
    recipe_lrs: Mapping[int, float]
    launcher: Launcher
    max_runs: int | None
    points: Sequence[Sequence[Word]] = ()
    refine: float | None = None


class NoCallbacks:
    """The lab's callbacks of Hydra, which are none; launchers call them around every job."""

    def on_job_start(self, **_: Any) -> None:
        """Do nothing."""

    def on_job_end(self, **_: Any) -> None:
        """Do nothing."""


@contextmanager
def hydra_configs() -> Iterator[None]:
    """Within the block ``hydra.compose`` finds the lab's configs."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(data_folder("conf")), version_base="1.3", job_name="lab"):
        yield
    GlobalHydra.instance().clear()


def compose(request: Request) -> Composed:
    """Compose every point of a request, and make the launcher that it chooses.

    Raises:
        RequestError: Hydra cannot compose the request.
    """
    composer = Composer(request.config_dir, request.files)
    with hydra_configs():
        config = _with_hydra(composer, request)
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
        sweeper = config.hydra.sweeper
        refine = refinement.width_of(sweeper.refine)
        return Composed(trees, _recipe_lrs(composer, points), launcher, sweeper.max_runs, points, refine)


def _with_hydra(composer: Composer, request: Request) -> DictConfig:
    """The config of the words of a request that are not swept, with Hydra's settings, within ``hydra_configs``.

    Of these the command line sets some, and the files what is swept.
    """
    single = [word for word in request.words if not word.is_swept]
    settings = [word for word in single if word.is_setting]
    of_sweeper = [word for word in settings if word.key.startswith("hydra.sweeper.")]
    own = [f"hydra.searchpath=[{quoted(f'file://{request.config_dir}')}]"] if request.config_dir else []
    of_runs = [word for word in single if not word.is_setting]
    config = composer.config(of_runs)
    with refusing():
        texts = [*own, *(word.text for word in settings if word not in of_sweeper)]
        whole = hydra.compose("config", texts, return_hydra_config=True)
        with open_dict(whole.hydra.sweeper):
            whole.hydra.sweeper.merge_with(composer.of_files(of_runs).sweeper)
    with open_dict(config):
        config.hydra, config.fleet = whole.hydra, None
    return with_values(config, of_sweeper, request.config_dir)


def points_of(request: Request, config: DictConfig) -> list[list[Word]]:
    """The words of every point of a request, given the config of its words that are not swept.

    A recipe in the request takes the place of the interventions and optimizers that the file sweeps.

    Raises:
        RequestError: a value that is swept cannot be read, or a file sweeps settings of Hydra.
    """
    with refusing():
        params: Any = OmegaConf.to_container(config.hydra.sweeper.params, resolve=True)
    replaced = _replaced_by_recipe(params, request)
    texts = [f"{key}={value}" for key, value in params.items() if key not in replaced]
    swept = parse(texts, request.config_dir)
    for word in swept:
        if word.is_setting:
            raise RequestError(f"hydra.sweeper.params holds {word.key}, which is no key of a run")
    swept = [] if request.is_single else swept
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
    composer = Composer(request.config_dir, request.files)
    with hydra_configs():
        point = points_of(request, _with_hydra(composer, request))[0]
    choices = composer.of_files(point).choices
    return composer.config(point), {group: name for group, name in choices.items() if isinstance(name, str)}


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
            lr = OmegaConf.select(composer.of_files(points[index]).config, LR)
            if isinstance(lr, (int, float)) and 0 < lr < math.inf:
                found[index] = float(lr)
    return found


def plan(composed: Composed, request: Request, *, cautions: bool = True, by_any_probes: bool = False) -> SweepPlan:
    """Plan the sweep and print its ``cautions``; nothing is written.

    Args:
        by_any_probes: whether a run counts as recorded whatever probes observed it.

    Raises:
        RequestError: a point is invalid, the folder cannot take records, or its records lack what the request names.
    """
    from lab.sweeping import planner  # slow to load

    is_local = type(composed.launcher).__name__ in ("BasicLauncher", "LocalLauncher")
    slots = getattr(composed.launcher, "slots", [None])
    with closing(show_planning(composed.trees, len(composed.trees))) as trees:
        planned = planner.plan_sweep(
            trees,
            max_runs=composed.max_runs,
            is_single=request.is_single,
            shard=request.shard,
            is_local=is_local,
            slots=slots,
            by_any_probes=by_any_probes,
        )
    _check_measured(planned, request)
    if cautions:
        from lab.sweeping.cautions import find_cautions, find_single_rates

        for line in request.remarks:
            _warn(line)
        for line in find_cautions([point.config for point in planned.missing]):
            _warn(line)
        for line in find_single_rates([point.config for point in planned.requested]):
            _warn(line)
    return planned


def _check_measured(planned: SweepPlan, request: Request) -> None:
    """Say what the records of a request's runs lack.

    Raises:
        RequestError: the words or the file of the request ask for it themselves.
    """
    if not planned.unmeasured:
        return
    lacking = {what: asked_by for of_run in planned.unmeasured.values() for what, asked_by in of_run.items()}
    runs = f"{planned.folder} has {len(planned.unmeasured)} of these runs without {listed(lacking)}"
    keys = (word.key.split(".") for word in request.words)
    named = {key[-1] for key in keys if key[0] == "probes"}
    named |= {str(key) for content in request.files.values() for key in content.get("probes") or ()}
    if "probes" in named or named & {*lacking.values()}:
        raise RequestError(f"{runs}; to measure it give another out=, or else leave it out of probes")
    _warn(f"{runs}; another out= measures it")


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
    planned = plan(composed, request, by_any_probes=True)
    print_estimate(planned, request)
    if composed.refine:
        say(_cost_of_refining(composed, planned, request))


def print_estimate(plan: SweepPlan, request: Request) -> None:
    """Print the estimated cost of the plan's fleets, after a few throwaway steps of each shape."""
    from lab.sweeping.dry_run import estimate

    done = len(plan.mine) - len(plan.missing)
    for line in estimate(plan.fleets, done, plan.host, full=request.dry_run == "full", code=request.own_code):
        say(line)


def train(composed: Composed, request: Request, *, jobs_only: bool = False) -> None:
    """Train the points of a request that Hydra composed.

    Args:
        composed: the composed request.
        request: the request itself.
        jobs_only: whether even a single fleet trains in a process of its own; this one keeps its settings of torch.

    Raises:
        RequestError, SystemExit: see ``carry_out``.
    """
    launcher, planned = composed.launcher, plan(composed, request, by_any_probes=True)
    recipe_lrs = {planned.ids[index]: lr for index, lr in composed.recipe_lrs.items()}
    trains_here = getattr(launcher, "trains_here", False) and not jobs_only
    if composed.refine is None:
        train_plan(planned, launcher, request, recipe_lrs=recipe_lrs, trains_here=trains_here)
        return
    _warn(_cost_of_refining(composed, planned, request))
    elsewhere = train_missing(planned, launcher, request, recipe_lrs=recipe_lrs, trains_here=trains_here)
    asked, composer = refinement.lrs_of(composed.points), Composer(request.config_dir, request.files)
    trained = dict(zip(planned.ids, composed.points, strict=True))
    while more := refinement.finer_points(store.read(planned.folder), trained, asked, composed.refine):
        lrs = sorted({float(word.value) for point in more for word in point if word.key == LR})
        _warn(f"refining at {listed([f'{lr:g}' for lr in lrs])}")
        finer = plan(
            composed._replace(trees=[composer.tree(point) for point in more]),
            request,
            cautions=False,
            by_any_probes=True,
        )
        elsewhere |= train_missing(finer, launcher, request, recipe_lrs=recipe_lrs, trains_here=trains_here)
        trained |= dict(zip(finer.ids, more, strict=True))
        planned = planned.with_more(finer)
    _gather_and_report(planned, len(elsewhere), is_single=False)


def _cost_of_refining(composed: Composed, planned: SweepPlan, request: Request) -> str:
    """What refining may cost at most, in a line.

    Raises:
        RequestError: there is no curve to refine, or a shard has only a part of it.
    """
    from lab.sweeping.planner import training_flops

    if request.shard != "1/1":
        raise RequestError("--refine looks at all seeds of a curve, so it takes no shard=")
    of_key = {refinement.key_of(point): run for run, point in zip(planned.ids, composed.points, strict=True)}
    runs, config_of = refinement.MOST * len(refinement.lrs_of(composed.points)), {p.id: p.config for p in planned.mine}
    flops = refinement.MOST * sum(training_flops(config_of[run]) for run in of_key.values())
    times = flops / sum(map(training_flops, config_of.values()))
    return (
        f"refining to {composed.refine:g} decades trains at most {refinement.MOST} learning rates more for each curve, "
        f"{runs} runs in all with {flops:.2g} FLOPs, {times:.1f} times those of the rates asked for"
    )


def train_plan(
    plan: SweepPlan,
    launcher: Launcher,
    request: Request,
    *,
    recipe_lrs: Mapping[str, float] | None = None,
    trains_here: bool = False,
) -> None:
    """Train what is missing of a plan, then gather and report; see ``train_missing``.

    Raises:
        RequestError: the folder cannot take records; nothing is written then.
        SystemExit: with status 1 when a run failed.
    """
    elsewhere = train_missing(plan, launcher, request, recipe_lrs=recipe_lrs, trains_here=trains_here)
    _gather_and_report(plan, len(elsewhere), is_single=request.is_single)


def train_missing(
    plan: SweepPlan,
    launcher: Launcher,
    request: Request,
    *,
    recipe_lrs: Mapping[str, float] | None = None,
    trains_here: bool = False,
    screen: Screen | None = None,
) -> set[str]:
    """Train what is missing of a plan, without a report.

    Args:
        plan: as ``plan_sweep`` makes it.
        launcher: runs the jobs.
        request: the request that was planned; the folder notes its command and its question.
        recipe_lrs: learning rates of the recipe itself, for the folder to note, see ``store.RecordedCommand``.
        trains_here: whether to train a single fleet in this process, which saves loading torch again.
        screen: shows the progress instead of the usual lines and display.

    Returns:
        The ids of the runs that other commands train.

    Raises:
        RequestError: the folder cannot take records, or the launcher cannot run here; nothing is written then.
    """
    if plan.fleets and type(launcher).__name__ == "SlurmLauncher" and not shutil.which("srun"):
        raise RequestError("there is no srun here, so no SLURM to launch jobs; hydra/launcher=local trains here")
    folder, fleets = plan.folder, plan.fleets
    store.open_folder(folder, plan.engine)
    store.note_command(folder, request.command, request.question, recipe_lrs)
    elsewhere = set[str]()  # runs that other commands train
    while fleets:
        elsewhere -= {point.id for fleet in fleets for point in fleet}
        elsewhere |= _train_fleets(
            plan._replace(fleets=fleets), launcher, request.own_code, trains_here=trains_here, screen=screen
        )
        left = _left_by_others(folder, elsewhere)
        fleets = [rest for fleet in plan.fleets if (rest := [point for point in fleet if point.id in left])]
    # noted again, since a shard that began at the same time may have overwritten it
    store.note_command(folder, request.command, request.question, recipe_lrs)
    return elsewhere


def _train_fleets(
    plan: SweepPlan, launcher: Launcher, code: own_code.Entries, *, trains_here: bool, screen: Screen | None
) -> set[str]:
    """Freeze a plan and train its fleets; returns the ids of the runs that other commands hold or have trained."""
    folder, fleets, request = plan.folder, plan.fleets, secrets.token_hex(8)
    # beside the id are the config and the data from which it follows
    entries = (
        [
            {"id": point.id, "tree": point.tree, "data_fingerprint": point.config.data.entry.open().fingerprint}
            for point in fleet
        ]
        for fleet in fleets
    )
    name = plans.freeze(folder, entries)
    deaths: list[str] = []
    with _monitor(plan, name, screen):
        if distributed.world_size() > 1:
            for index in range(len(fleets)):
                distributed.send_to_all((str(folder), name, index, code))
                train_planned_fleet(folder, name, index, request=request)
        elif trains_here and len(fleets) == 1:
            deaths = _train_here(folder, name, fleets[0], request)
        else:
            words = [f"out={quoted(folder.absolute())}", *([f"+own_code={quoted(json.dumps(code))}"] if code else [])]
            deaths = _launch(launcher, [[f"fleet={name}/{index}/{request}", *words] for index in range(len(fleets))])
    for death in deaths:
        _warn(death)
    return leases.left(folder, request)


def _left_by_others(folder: Path, elsewhere: Collection[str]) -> set[str]:
    """Wait for the runs that other commands train; returns those that nobody holds any more and nobody has recorded.

    Raises:
        SystemExit: a stop was requested meanwhile.
    """
    runs, is_said = {*elsewhere}, False
    with machine.catching_sigterm() as stop_requested:
        while runs := {run for run in runs if not store.is_recorded(folder, run)}:
            if stop_requested():
                raise SystemExit(machine.EXIT_PREEMPTED)
            unheld = runs - leases.held(folder)
            # looked up again, since a job records a run before it releases it
            if free := {run for run in unheld if not store.is_recorded(folder, run)}:
                return free
            if not is_said:
                _warn(f"waiting for another command, which trains {len(runs)} of these runs")
                is_said = True
            time.sleep(LOOK_EVERY)
    return set()


def _monitor(plan: SweepPlan, name: str, screen: Screen | None) -> ProgressMonitor:
    """A monitor of the plan frozen under this name; it prints lines, and draws a live display in a terminal.

    With a screen of its own it shows only that.
    """
    from lab.sweeping.planner import training_flops
    from lab.training.recorder import fleet_label

    folder, fleets = plan.folder, plan.fleets
    labels = [fleet_label([point.config for point in fleet]) for fleet in fleets]
    sizes = [sum(training_flops(point.config) for point in fleet) for fleet in fleets]
    if screen:
        return ProgressMonitor(folder, name, labels, sizes, lambda line: None, _warn, screen)
    # a shard does not know which seeds the other shards have completed
    growing = GrowingReport(folder, plan.mine, fleets) if len(plan.mine) == len(plan.requested) else None
    if not sys.stdout.isatty() or "utf" not in sys.stdout.encoding.lower():
        log = ProgressLog(len(fleets), _warn)
        return ProgressMonitor(folder, name, labels, sizes, say, _warn, log, growing)
    from lab.sweeping.terminal import Terminal, scene

    untrained = {point.id for point in plan.missing}
    done = [point for point in plan.mine if point.id not in untrained]
    losses = _last_losses(folder) if done else {}
    terminal = Terminal(sys.stdout, scene(fleets, [(point, losses[point.id]) for point in done]))
    return ProgressMonitor(folder, name, labels, sizes, terminal.say, _warn, terminal, growing)


def _last_losses(folder: Path) -> dict[str, float]:
    """The final loss of each run of a folder by id; infinite if it diverged."""
    runs = store.read(folder).runs
    return dict(zip(runs["id"], runs["final_val_loss"].where(runs["status"] != "diverged", math.inf), strict=True))


def train_planned_fleet(
    folder: Path, plan: str, index: int, configs: Mapping[str, RunConfig] | None = None, **how: Any
) -> None:
    """Train one fleet of a plan in this process; the arguments are those of ``train_fleet``.

    Raises:
        KeyboardInterrupt: see ``train_fleet``.
        SystemExit: a stop was requested, and a checkpoint is saved; or a run failed on one of several ranks, for which
            the others would wait forever.
    """
    from lab.sweeping import job

    try:
        succeeded = job.train_fleet(folder, plan, index, configs, **how)
    except job.Preempted:
        raise SystemExit(machine.EXIT_PREEMPTED) from None
    if not succeeded and distributed.world_size() > 1:
        raise SystemExit(1)


def _train_here(folder: Path, plan: str, fleet: Sequence[Point], request: str) -> list[str]:
    """Train the only fleet of a plan in this process; returns a line if it died, as a job would."""
    import torch

    try:
        configs = {point.id: point.config for point in fleet}
        train_planned_fleet(folder, plan, 0, configs, request=request, interrupts=True)
    except RequestError as refusal:  # a full disk
        return [f"a job died: {refusal}"]
    except Exception as error:
        say(traceback.format_exc().rstrip(), error=True)
        return [f"a job died: {type(error).__name__}: {error}"]
    finally:
        torch.set_flush_denormal(False)  # a setting for training, not for the report
    return []


def follow_first_rank() -> None:
    """Train, on a rank that is not the first, every fleet that the first rank sends.

    Raises:
        SystemExit: the first rank has ended, and has printed why.
    """
    try:
        while (message := distributed.receive_from_first()) is not None:
            folder, plan, index, code = message
            own_code.register(code)
            train_planned_fleet(Path(folder), plan, index)
    except ConnectionError:
        raise SystemExit(1) from None


def _warn(text: str) -> None:
    say(f"lab: {text}", error=True)


def _gather_and_report(plan: SweepPlan, elsewhere: int, *, is_single: bool) -> None:
    """Gather the records, draw the report, and print what became of the runs, so many of them by other commands.

    Raises:
        SystemExit: with status 1 when a run failed.
    """
    folder, missing = plan.folder, len(plan.missing)
    requested, mine = [point.id for point in plan.requested], [point.id for point in plan.mine]
    statuses = store.statuses(folder)
    plans.remove_checkpoints(folder, [name for name, status in statuses.items() if status != "failed"])
    mine_statuses = [statuses.get(name, "failed") for name in mine]  # a run whose job died has no card
    others = len({*requested} - {*mine} - set(statuses))
    ending = f"{others} points of other shards are still missing in {folder}" if others else f"report: {folder}"
    if not others and {"finished", "diverged"} & set(statuses.values()):
        summary = _report(folder)
        if summary and not is_single:  # a table of one run has nothing to compare
            say(summary)
        ending = f"report: {folder / 'report.html'}"
    failed, diverged = (mine_statuses.count(status) for status in ("failed", "diverged"))
    by_others = f", {elsewhere} by another command" if elsewhere else ""
    counts = f"{missing - elsewhere - failed} trained{by_others}, {len(mine) - missing} already there"
    say(f"{counts}, {diverged} diverged, {failed} failed; {ending}")
    if is_single and not failed:
        runs = store.read(folder).runs
        say(outcome_line(runs[runs["id"] == requested[0]].iloc[0].to_dict()))
    if failed:
        if failed == len(mine):
            refuse_own_code(failures(folder, mine))
        raise SystemExit(1)


def failures(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """Why runs failed, by id, of these that did."""
    records = store.find(folder)
    runs = records.runs.set_index("id")[["status", "reason"]] if records else pd.DataFrame()
    cards = runs.to_dict("index")
    every = {name: cards.get(name, {"status": "failed", "reason": "its job died"}) for name in ids}
    return {name: str(card["reason"]) for name, card in every.items() if card["status"] == "failed"}


def refuse_own_code(reasons: Mapping[str, str], context: str = "") -> None:
    """Refuse a request if it is the user's own code that failed in all runs that did, whose ``failures`` these are.

    Raises:
        RequestError: it is; the message names the first failure.
    """
    if all(reason.startswith(OWN_CODE) for reason in reasons.values()):
        raise RequestError(f"{context}{next(iter(reasons.values()))}")


def _report(folder: Path) -> str:
    """Gather the records and draw the report, unless one was drawn since the tables were written; returns its summary.

    The summary of a report that is left as it is, is empty.
    """
    page, sources = folder / "report.html", [*folder.glob("*.parquet"), folder / "requests.json"]
    if store.digest_of_tables(folder) is None:
        store.gather(folder)
    elif page.exists() and page.stat().st_mtime_ns >= max(path.stat().st_mtime_ns for path in sources if path.exists()):
        return ""
    from lab.report import build  # slow to load

    return build.make_report([folder])[1]


def outcome_line(card: Mapping[Any, Any]) -> str:
    """The outcome of a run in a sentence, from its card: the final held-out loss, and whether the run diverged."""
    ending = "did not diverge"
    if card["status"] == "diverged":
        step = "" if pd.isna(card["diverged_at"]) else f" at step {card['diverged_at']}"
        ending = f"diverged{step}: {card['reason']}"
    return f"final held-out loss {card['final_val_loss']:.4f} nats/token; {ending}"


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
    machine.configure_process()
    if HydraConfig.initialized():  # true under a launcher of Hydra
        with suppress(FileNotFoundError):
            os.chdir(HydraConfig.get().runtime.cwd)  # cluster workers start anywhere; paths are relative to it
    own_code.register(json.loads(config.get("own_code", "[]")))
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
