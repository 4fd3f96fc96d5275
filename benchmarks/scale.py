"""How a sweep's own work grows with the number of its runs: writes SCALE.md.

    python benchmarks/scale.py [RUNS ...]

Each size is one request, given twice.  Jobs train nothing: they write made-up records, as many
values each as a toy run has, so what is timed is the lab's part alone.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).parent
COUNTS = (100, 1000, 10000)
ARMS, RATES = ("[z_loss]", "[qk_layernorm,z_loss]"), ("1e-3", "3e-3", "1e-2", "3e-2", "1e-1")
STAGES = {
    "start": "start, until the first point",
    "plan": "plan",
    "write": "write records",
    "gather": "gather",
    "report": "report",
    "again": "again: the whole command with nothing to do",
}
METHOD = """Times are in seconds of one core. A request has two arms, five learning rates and as many seeds as it needs,
at `scale=toy`; its records are made up. Growth is the exponent between the two largest sizes: 1 means proportional to
the runs. Memory is the peak of the process: of the first command, after planning and at its end, and of the same
command repeated.
"""


def request(runs: int) -> list[str]:
    """Return the words of a request for so many runs."""
    seeds = runs // (len(ARMS) * len(RATES))
    swept = [f"intervention={','.join(ARMS)}", f"optimizer.lr={','.join(RATES)}", f"seed=range({seeds})"]
    return ["train", "-m", "scale=toy", "data=synthetic", "out=runs", "hydra.sweeper.max_runs=250", *swept]


def peak() -> float:
    """Return the most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def made_up(folder: Path, plan: str, fleets: int) -> None:
    """Write a record of every run of a plan, as its jobs would."""
    from lab.records import plans, store
    from lab.training.config import run_config
    from lab.training.recorder import outcome, run_card

    sizes = {"parameters": 14_416, "parameters_without_embeddings": 6_224}
    speed = {"wall_seconds": 0.1, "model_steps_per_second": 40.0, "notes": None}
    for index in range(fleets):
        for point in plans.thaw(folder, plan, index):
            config = run_config(point["tree"])
            final = 4.0 + abs(math.log10(config.optimizer.lr) + 2) / 10 + (hash(point["id"]) % 97) / 1000
            card = run_card(point["id"], config, {**outcome(5.5, final, -1, config.steps), **sizes, **speed})
            probes = [(f"block{block}", name) for block in (0, 1) for name in config.probes.names]
            store.write_run(folder, card, [(s, name, where, final + s) for s in (0, 3) for where, name in probes])


def command(*words: str) -> None:
    """Run the lab's command line with made-up training, and print the seconds of each stage as JSON."""
    from lab.__main__ import main
    from lab.records import store
    from lab.sweeping import launch as launching
    from lab.sweeping import planner

    marks, memory = {"start": 0.0}, {}

    def timed(stage: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*arguments: Any, **options: Any) -> Any:
            began = marks["start"] if stage == "plan" else time.process_time()
            result = work(*arguments, **options)
            marks[stage] = marks.get(stage, 0.0) + time.process_time() - began
            memory[stage] = peak()
            return result

        return timing

    def launch(_: Any, jobs: Sequence[Sequence[str]]) -> list[str]:
        plan = jobs[0][0].removeprefix("fleet=").split("/")[0]
        made_up(Path("runs"), plan, len(jobs))
        return []

    def planning(*arguments: Any) -> Any:
        marks["start"] = marks["start"] or time.process_time()  # composing comes before checking
        return show_planning(*arguments)

    show_planning, launching.show_planning = launching.show_planning, planning
    planner.plan_sweep = timed("plan", planner.plan_sweep)
    launching._launch = timed("write", launch)
    store.gather = timed("gather", store.gather)
    launching._report = timed("report", launching._report)
    code = main(words)
    print(json.dumps({"seconds": marks, "memory": memory, "all": time.process_time(), "peak": peak()}), file=sys.stderr)
    raise SystemExit(code)


def measure(runs: int) -> dict[str, float]:
    """Return the seconds of each stage for so many runs, and the memory."""
    with TemporaryDirectory() as folder:
        first, again = (json.loads(_ran(request(runs), folder).splitlines()[-1]) for _ in range(2))
    planned = first["memory"]["plan"], first["peak"], again["peak"]
    seconds = first["seconds"]
    seconds["report"] -= seconds["gather"]  # a part of it
    return {**seconds, "again": again["all"], **dict(zip(("m1", "m2", "m3"), planned, strict=True))}


def _ran(words: Sequence[str], folder: str) -> str:
    """What this file says on its second channel when it runs the lab."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    return subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True, text=True).stderr


def page(costs: Mapping[int, Mapping[str, float]]) -> Iterator[str]:
    """Yield SCALE.md, line by line."""
    counts = list(costs)
    yield "# Scale\n\nWritten by `python benchmarks/scale.py`, which describes the requests.\n"
    yield METHOD
    yield f"| | {' | '.join(f'{runs:,} runs' for runs in counts)} | growth |"
    yield "|---" * (len(counts) + 2) + "|"
    for stage, name in STAGES.items():
        seconds = [costs[runs][stage] for runs in counts]
        growth = math.log(seconds[-1] / seconds[-2]) / math.log(counts[-1] / counts[-2]) if len(counts) > 1 else 0.0
        yield f"| {name} | {' | '.join(f'{value:.1f}' for value in seconds)} | {growth:.1f} |"
    for key, name in (("m1", "memory, planned"), ("m2", "at the end"), ("m3", "again")):
        yield f"| {name}, GB | {' | '.join(f'{costs[runs][key] / 1e9:.2f}' for runs in counts)} | |"


def main() -> None:
    """Measure, print, write."""
    costs = {}
    for runs in [int(word) for word in sys.argv[1:]] or COUNTS:
        costs[runs] = measure(runs)
        print(runs, costs[runs], flush=True)
    text = "\n".join(page(costs)) + "\n"
    (HERE / "SCALE.md").write_text(text)
    print(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        command(*sys.argv[1:])
    main()
