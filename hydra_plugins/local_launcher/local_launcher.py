"""Isolated processes on one machine: as many jobs at once as there are cores, each losing only itself."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

LOOK_EVERY = 0.1  # seconds


@dataclass
class LocalLauncherConf:
    """``processes`` at once; 0 means one per core this process may use."""

    _target_: str = "hydra_plugins.local_launcher.local_launcher.LocalLauncher"
    processes: int = 0


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="instability-lab")


class LocalLauncher(Launcher):
    """Every job in a fresh process; a job that dies is reported as failed, and the others go on."""

    def __init__(self, processes: int) -> None:
        self.processes = processes if processes > 0 else cores()
        self.running: set[Any] = set()
        self.stopping = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lab import machine  # not above: Hydra imports every plugin into every program that uses Hydra

        setup_globals()
        processes = machine.fresh_processes()
        if sys.platform != "win32":
            _start_server()
        with machine.heeding_sigterm() as told_to_stop:
            done = self._launch(processes, job_overrides, initial_job_idx, told_to_stop)
            if told_to_stop() and any(job.status is not JobStatus.COMPLETED for job in done):
                raise SystemExit(machine.PREEMPTED)
        return done

    def _launch(
        self, processes: Any, job_overrides: Sequence[Sequence[str]], first: int, told_to_stop: Callable[[], bool]
    ) -> Sequence[JobReturn]:
        pool = ThreadPoolExecutor(self.processes)
        try:
            jobs = [
                pool.submit(self._watch, processes, first + place, list(overrides), told_to_stop)
                for place, overrides in enumerate(job_overrides)
            ]
            return [job.result() for job in jobs]
        except BaseException:
            self.stopping = True
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self.running):
                process.terminate()
            raise
        finally:
            pool.shutdown()

    def _watch(self, processes: Any, index: int, overrides: list[str], told_to_stop: Callable[[], bool]) -> JobReturn:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(index), index
        job = processes.Process(target=_job, args=(self.hydra_context, self.task_function, config))
        done = JobReturn(overrides=overrides, cfg=config)
        if told_to_stop():
            done.status = JobStatus.FAILED
            done.return_value = RuntimeError(f"job {index} was not begun")
            return done
        job.start()
        self.running.add(job)
        while job.exitcode is None:
            if self.stopping or told_to_stop():
                job.terminate()  # again and again: a job that has just begun may not have heard it
            job.join(LOOK_EVERY)
        self.running.discard(job)
        done.status = JobStatus.COMPLETED if job.exitcode == 0 else JobStatus.FAILED
        done.return_value = RuntimeError(f"job {index} ended with exit code {job.exitcode}") if job.exitcode else None
        return done


def _job(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears it, and ends its jobs
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the process that forked this one ignores
    threading.Thread(target=_die_with_parent, daemon=True).start()
    setup_globals()
    done = run_job(
        hydra_context=hydra_context,
        task_function=task_function,
        config=config,
        job_dir_key="hydra.sweep.dir",
        job_subdir_key="hydra.sweep.subdir",
    )
    _ = done.return_value  # raises what the task raised


def _start_server() -> None:
    """Start the process that jobs are forked from; a SIGTERM to all must not end it before its jobs have saved."""
    from multiprocessing import forkserver  # there is none on Windows

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forkserver.ensure_running()
    signal.signal(signal.SIGTERM, before)


def _die_with_parent() -> None:
    """A killed sweep must not leave jobs behind that nobody waits for."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
