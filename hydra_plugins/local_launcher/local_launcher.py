"""Hydra's launcher for isolated processes on one machine: a shell around ``lab.cli.multirun``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LocalLauncherConf:
    """How many jobs at once, where, and for how long.

    ``processes`` at once; 0 means one per device, or where there are none, one per core this process may use.
    ``devices`` are the GPUs to use, one per job; null means all visible ones, unless ``device=cpu``.
    ``timeout_minutes`` after which a job is taken for hung and killed; null means never.
    """

    _target_: str = "hydra_plugins.local_launcher.local_launcher.LocalLauncher"
    processes: int = 0
    devices: list[Any] | None = None
    timeout_minutes: float | None = None


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="instability-lab")


class LocalLauncher(Launcher):
    """Each of several jobs in a fresh process; a job that dies is reported as failed, and the others go on.

    The config of a job holds its overrides alone, since a frozen plan says all else; so it serves the lab's jobs only.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lab.cli import multirun  # not above: Hydra imports every plugin into every program that uses Hydra

        self.jobs = multirun.LocalJobs(task_function, config.device, **self.options)

    @property
    def slots(self) -> list[str | None]:
        """See ``LocalJobs``."""
        return self.jobs.slots

    @property
    def trains_here(self) -> bool:
        """See ``LocalJobs``."""
        return self.jobs.trains_here

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.jobs.launch(job_overrides, initial_job_idx)
