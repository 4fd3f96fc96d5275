"""What the lab adds to Hydra: the settings of a sweep, and a launcher for isolated processes on one machine."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

# The lab is imported within functions, since Hydra imports every plugin into every program that uses Hydra.


@dataclass
class FleetSweeperConf:
    """``params`` are the swept keys of a sweep file; ``max_runs`` is the most in a fleet; ``refine``, see ``--refine``.

    Without ``max_runs`` a fleet holds as many runs as fit into memory, on a CPU at most eight, where more gain nothing,
    and fewer where cores or GPUs would otherwise be idle.
    """

    params: dict[str, Any] = field(default_factory=dict)
    max_runs: int | None = None
    refine: float | None = None


@dataclass
class LocalLauncherConf:
    """How many jobs at once, where, and for how long.

    ``processes`` at once; 0 means one per device, or where there are none, one per core this process may use.
    ``devices`` are the GPUs to use, one per job; null means all visible ones, unless ``device=cpu``.
    ``timeout_minutes`` after which a job is taken for hung and killed; null means never.
    """

    _target_: str = "hydra_plugins.instability_lab.LocalLauncher"
    processes: int = 0
    devices: list[Any] | None = None
    timeout_minutes: float | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="fleet", node=FleetSweeperConf, provider="instability-lab")
ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="instability-lab")


class LocalLauncher(Launcher):
    """Each of several jobs in a fresh process; a job that dies is reported as failed, and the others go on.

    The config of a job holds its overrides alone, since a frozen plan says all else; so it serves the lab's jobs only.
    """

    def __init__(self, processes: int, devices: Sequence[Any] | None, timeout_minutes: float | None) -> None:
        self.processes, self.devices, self.timeout_minutes = processes, devices, timeout_minutes

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from lab.sweeping.local_jobs import check_timeout

        self.task, self.device, self.timeout = task_function, config.device, check_timeout(self.timeout_minutes)

    @cached_property
    def slots(self) -> list[str | None]:
        """The slots on which jobs run at once; chosen only when there is work, since counting GPUs loads torch.

        Raises:
            RequestError: an option of the launcher is invalid.
        """
        from lab.sweeping.local_jobs import choose_slots

        return choose_slots(self.processes, self.devices, self.device)

    @property
    def trains_here(self) -> bool:
        """Whether a single job needs no process of its own: it has no timeout, and no GPU but the first."""
        from lab.core import machine

        return math.isinf(self.timeout) and self.slots[0] in (None, *machine.visible_gpus()[:1])

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs, numbered from ``initial_job_idx``.

        Raises:
            SystemExit: a signal asked to stop before all jobs were done.
        """
        from lab.core import machine
        from lab.sweeping.launch import run_local_job
        from lab.sweeping.local_jobs import run_jobs, saying_so

        arguments = ((self.task, list(overrides)) for overrides in job_overrides)
        with machine.catching_sigterm() as is_signalled:
            stop_requested = saying_so(is_signalled)
            ends = run_jobs(run_local_job, arguments, self.slots, timeout=self.timeout, stop_requested=stop_requested)
            if stop_requested() and (len(ends) < len(job_overrides) or any(end.exit_code for end in ends)):
                raise SystemExit(machine.EXIT_PREEMPTED)
        returns = []
        for number, end in enumerate(ends, initial_job_idx):
            job = JobReturn(status=JobStatus.FAILED if end.exit_code else JobStatus.COMPLETED)
            if end.exit_code:
                how = f"ended with exit code {end.exit_code}"
                if end.timed_out:
                    how = f"was killed after {self.timeout / 60:g} minutes"
                job.return_value = RuntimeError(f"job {number} {how}")
            returns.append(job)
        return returns
