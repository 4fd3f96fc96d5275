"""Hydra's sweeper for fleets: a shell around ``lab.cli.multirun``."""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class FleetSweeperConf:
    """``params`` are the swept keys of a sweep file; ``max_runs`` is the most in a fleet; ``one`` refuses more points.

    Without ``max_runs`` a fleet holds as many runs as fit into memory, on a CPU at most eight, where more gain nothing,
    and fewer where cores or GPUs would otherwise be idle.  ``dry_run``, ``summary`` or ``full``, only estimates.
    ``shard`` i/n trains the i-th of n parts, for machines that share a folder and no scheduler.
    """

    _target_: str = "hydra_plugins.fleet_sweeper.fleet_sweeper.FleetSweeper"
    _recursive_: bool = False  # values of params are never made into objects
    params: dict[str, Any] = field(default_factory=dict)
    max_runs: int | None = None
    dry_run: str | None = None
    one: bool = False
    shard: str = "1/1"


ConfigStore.instance().store(group="hydra/sweeper", name="fleet", node=FleetSweeperConf, provider="instability-lab")


class FleetSweeper(Sweeper):
    """Trains what is missing of the points requested, fleet by fleet."""

    def __init__(self, params: DictConfig, **options: Any) -> None:
        self.params = {str(key): value for key, value in params.items()}
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config_loader, self.config = hydra_context.config_loader, config
        self.launcher: Launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from lab.cli import multirun  # not above: Hydra imports every plugin into every program that uses Hydra

        params = [] if self.options["one"] else [f"{key}={value}" for key, value in self.params.items()]
        multirun.sweep([*params, *arguments], self.config_loader, self.config, self.launcher, self.options)
