"""Isolated processes on one machine: as many jobs at once as there are GPUs or cores, each losing only itself."""

import math
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

LOOK_EVERY = 0.1  # seconds
MOST = 4096  # processes


@dataclass
class LocalLauncherConf:
    """How many jobs at once, where, and for how long.

    ``processes`` at once; 0 means one per device, or where there are none, one per core this process may use.
    ``devices`` are the GPUs to use, one per job; null means all that are visible, unless ``device=cpu``.
    ``timeout_minutes`` after which a job is taken for hung and killed; null means never.
    """

    _target_: str = "hydra_plugins.local_launcher.local_launcher.LocalLauncher"
    processes: int = 0
    devices: list[Any] | None = None
    timeout_minutes: float | None = None


ConfigStore.instance().store(group="hydra/launcher", name="local", node=LocalLauncherConf, provider="instability-lab")


class LocalLauncher(Launcher):
    """Every job in a fresh process; a job that dies is reported as failed, and the others go on."""

    def __init__(
        self, processes: int, devices: Sequence[Any] | None = None, timeout_minutes: float | None = None
    ) -> None:
        self.processes, self.devices, self.timeout_minutes = processes, devices, timeout_minutes
        self.running: set[Any] = set()
        self.stopping = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.seats = seats(self.processes, self._devices())
        if self.timeout_minutes is not None and not self.timeout_minutes > 0:
            raise _refusal(f"timeout_minutes must be above 0, not {self.timeout_minutes}; null means never")

    def _devices(self) -> list[str]:
        from lab.core import machine  # not above: Hydra imports every plugin into every program that uses Hydra

        if self.devices is None and self.config.device not in ("auto", "cuda"):
            return []
        there = machine.visible_gpus()
        asked = there if self.devices is None else [str(device) for device in self.devices]
        if unknown := [device for device in asked if device not in there]:
            raise _refusal(f"devices names {', '.join(unknown)}; there: {', '.join(there) or 'none'}")
        return asked

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from lab.core import machine

        setup_globals()
        processes = machine.clean_process_context()
        if sys.platform != "win32":
            _start_server()
        with machine.catching_sigterm() as self.told_to_stop:
            done = self._launch(processes, job_overrides, initial_job_idx)
            if self.told_to_stop() and any(job.status is not JobStatus.COMPLETED for job in done):
                raise SystemExit(machine.EXIT_PREEMPTED)
        return done

    def _launch(self, processes: Any, job_overrides: Sequence[Sequence[str]], first: int) -> Sequence[JobReturn]:
        self.free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for seat in self.seats:
            self.free.put(seat)
        pool = ThreadPoolExecutor(len(self.seats))
        try:
            jobs = [
                pool.submit(self._watch, processes, first + place, list(overrides))
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

    def _watch(self, processes: Any, index: int, overrides: list[str]) -> JobReturn:
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(index), index
        done = JobReturn(overrides=overrides, cfg=config)
        if self.told_to_stop():
            done.status = JobStatus.FAILED
            done.return_value = RuntimeError(f"job {index} was not begun")
            return done
        device = self.free.get()
        job = processes.Process(target=_job, args=(self.hydra_context, self.task_function, config, device))
        job.start()
        self.running.add(job)
        hung = self._wait(job)
        self.running.discard(job)
        self.free.put(device)
        done.status = JobStatus.COMPLETED if job.exitcode == 0 else JobStatus.FAILED
        end = f"was killed after {self.timeout_minutes:g} minutes" if hung else f"ended with exit code {job.exitcode}"
        done.return_value = RuntimeError(f"job {index} {end}") if job.exitcode else None
        return done

    def _wait(self, job: Any) -> bool:
        """Until a job has ended; true if it had to be killed because its time was over."""
        end = math.inf if self.timeout_minutes is None else time.monotonic() + 60 * self.timeout_minutes
        while job.exitcode is None:
            if time.monotonic() >= end:
                job.kill()  # what hangs may not hear a polite signal
                job.join()
                return True
            if self.stopping or self.told_to_stop():
                job.terminate()  # again and again: a job that has just begun may not have heard it
            job.join(LOOK_EVERY)
        return False


def _job(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig, device: str | None) -> None:
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device  # torch is loaded, but has not yet looked for devices
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
    from lab.core.errors import RequestError

    try:
        _ = done.return_value  # raises what the task raised
    except RequestError as refusal:  # a disk that is full, a plan that is damaged
        sys.exit(f"lab: {refusal}")


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


def seats(processes: int, devices: Sequence[str]) -> list[str | None]:
    """Where jobs may run at once, each on a device or, given none, on a core (None)."""
    from lab.core.machine import cores

    if processes < 0:
        raise _refusal(f"processes must be at least 0, not {processes}; 0 means one per device or core")
    if processes > MOST:
        raise _refusal(f"processes must be at most {MOST}, not {processes}")
    count = processes or len(devices) or cores()
    return [devices[place % len(devices)] if devices else None for place in range(count)]


def _refusal(line: str) -> Exception:
    from lab.core.errors import RequestError

    return RequestError(f"hydra.launcher.{line}")
