"""A stand-in for SLURM on one machine: ``sbatch``, ``srun``, ``sacct``, ``scancel`` as far as submitit needs them.

``sbatch`` refuses a script that SLURM would refuse, and runs the tasks of its array, as many at once as it asks for.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

JOB = "1"
# The directives of sbatch(1) that may come: a misspelt one must be refused, as sbatch does.
DIRECTIVES = {
    *("account", "array", "constraint", "cpus-per-task", "error", "gpus-per-node", "gres", "job-name", "mem", "nodes"),
    *("ntasks-per-node", "open-mode", "output", "partition", "qos", "signal", "time", "wckey"),
}


def install(folder: Path) -> Path:
    """Put the four commands into a folder for PATH; what was submitted stays there as ``script.sh``."""
    folder.mkdir()
    for command in ("sbatch", "srun", "sacct", "scancel"):
        words = [sys.executable, str(Path(__file__).resolve()), command, str(folder)]
        (folder / command).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (folder / command).chmod(0o755)
    return folder


def directives(script: str) -> dict[str, str]:
    """What the ``#SBATCH`` lines of a script ask for; stops where SLURM stops reading them.

    Raises:
        SystemExit: sbatch would refuse the script.
    """
    found = {}
    first, *rest = script.splitlines()
    if not first.startswith("#!"):
        raise SystemExit("sbatch: error: This does not look like a batch script.")
    for line in rest:
        if line and not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            (word,) = shlex.split(line)[1:]
            key, _, value = word.removeprefix("--").partition("=")
            if key not in DIRECTIVES:
                raise SystemExit(f"sbatch: unrecognized option '--{key}'")
            found[key] = value
    return found


def sbatch(folder: Path, script: str) -> None:
    text = Path(script).read_text()
    asked = directives(text)
    (folder / "script.sh").write_text(text)
    print(f"Submitted batch job {JOB}", flush=True)
    subprocess.Popen(
        [sys.executable, __file__, "run", str(folder), asked["array"]],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def run(folder: Path, array: str) -> None:
    """What the cluster does with an array such as ``0-5%2``."""
    last, at_once = map(int, re.fullmatch(r"0-(\d+)%(\d+)", array).groups())  # type: ignore[union-attr]
    seats = threading.Semaphore(at_once)

    def task(index: int) -> None:
        numbers = {"ARRAY_JOB_ID": JOB, "ARRAY_TASK_ID": index, "JOB_ID": f"{100 + index}", "JOB_NUM_NODES": 1}
        numbers |= {"NTASKS": 1, "NODEID": 0, "PROCID": 0, "LOCALID": 0, "JOB_NODELIST": "localhost"}
        environment = {f"SLURM_{name}": str(value) for name, value in numbers.items()}
        with seats:
            (folder / f"{index}.state").write_text("RUNNING")
            ended = subprocess.run(["/bin/bash", folder / "script.sh"], env=os.environ | environment, check=False)
            (folder / f"{index}.state").write_text("FAILED" if ended.returncode else "COMPLETED")

    threads = [threading.Thread(target=task, args=(index,)) for index in range(last + 1)]
    for thread in threads:
        thread.start()


def srun(folder: Path, *words: str) -> None:
    place = words.index("--output")
    names = {"%A": JOB, "%a": os.environ["SLURM_ARRAY_TASK_ID"], "%t": "0"}
    log = re.sub("%[Aat]", lambda found: names[found[0]], words[place + 1])
    with open(log, "a") as output:
        command = words[place + 2 :]
        raise SystemExit(subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode)


def sacct(folder: Path, *_: str) -> None:
    print("JobID|State|NodeList")
    for path in sorted(folder.glob("*.state")):
        print(f"{JOB}_{path.stem}|{path.read_text()}|localhost")


def scancel(folder: Path, *_: str) -> None:
    """Nothing waits to be cancelled: tasks end with their sweep's folder."""


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
