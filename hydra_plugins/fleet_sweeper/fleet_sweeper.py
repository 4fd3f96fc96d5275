"""Hydra's door to fleets: expands the points of a request and hands whole fleets to whatever launcher is chosen."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from lab.cli.compose import expand


@dataclass
class FleetSweeperConf:
    """``params`` are the swept keys of a sweep file; ``max_runs`` is the most in a fleet; ``one`` refuses more points.

    Without ``max_runs`` a fleet holds as many runs as fit into memory, on a CPU at most eight, where more gain nothing,
    and fewer where cores or GPUs would else be idle.  ``dry_run`` only estimates.
    ``shard`` i/n trains the i-th of n parts, for machines that share a folder and no scheduler.
    """

    _target_: str = "hydra_plugins.fleet_sweeper.fleet_sweeper.FleetSweeper"
    _recursive_: bool = False  # values of params are never made into objects
    params: dict[str, Any] = field(default_factory=dict)
    max_runs: int | None = None
    dry_run: bool = False
    one: bool = False
    shard: str = "1/1"


ConfigStore.instance().store(group="hydra/sweeper", name="fleet", node=FleetSweeperConf, provider="instability-lab")


class FleetSweeper(Sweeper):
    """Compose every point first, freeze the list, then train what is missing, fleet by fleet."""

    def __init__(self, params: DictConfig, max_runs: int | None, dry_run: bool, one: bool, shard: str) -> None:
        self.params = {str(key): value for key, value in params.items()}
        self.options: dict[str, Any] = {"max_runs": max_runs, "dry_run": dry_run, "one": one, "shard": shard}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader: Any = hydra_context.config_loader
        self.config = config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        from lab.sweep import run  # not above: Hydra imports every plugin into every program that uses Hydra

        written = [] if self.options["one"] else [f"{key}={value}" for key, value in self.params.items()]
        trees = list(self._compose(expand(self._parse([*written, *arguments]))))
        here = type(self.launcher).__name__ in ("BasicLauncher", "LocalLauncher")
        seats = getattr(self.launcher, "seats", [None])
        return run.run_sweep(trees, self._launch, here=here, seats=seats, **self.options)

    def _parse(self, overrides: Sequence[str]) -> list[Override]:
        parser = OverridesParser.create(config_loader=self.loader)
        return list(parser.parse_overrides(list(overrides)))

    def _launch(self, jobs: Sequence[Sequence[str]]) -> list[str]:
        """Runs of a job that died are missing, and so count as failed."""
        try:
            done = self.launcher.launch(jobs, initial_job_idx=0)
        except Exception as death:  # how submitit and Ray say that a job was killed
            return [f"{type(self.launcher).__name__} gave up: {type(death).__name__}: {shorten(str(death), 300)}"]
        return [f"a job died: {job._return_value}" for job in done if job.status is not JobStatus.COMPLETED]

    def _compose(self, points: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """One resolved tree per point.  Composing is slow, so points that choose the same files share it."""
        composed: dict[tuple[str, ...], DictConfig] = {}
        for point in points:
            overrides = self._parse(point)
            chooses = [self.loader.repository.group_exists(override.key_or_group) for override in overrides]
            files = tuple(text for text, is_file in zip(point, chooses, strict=True) if is_file)
            if files not in composed:
                composed[files] = self.loader.load_sweep_config(self.config, list(files))
            tree = deepcopy(composed[files])
            values = [override for override, is_file in zip(overrides, chooses, strict=True) if not is_file]
            self.loader._apply_overrides_to_config(values, tree)
            with open_dict(tree):
                del tree["hydra"], tree["fleet"]
            yield OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)  # type: ignore[misc]
