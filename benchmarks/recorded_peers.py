"""What other readers of logs say of the recordings of recorded_faults.py; writes RECORDED_PEERS.md.

    python benchmarks/recorded_peers.py BIN [FOLDER]

BIN is the ``bin`` of an environment in which the packages of ``PEERS`` are installed, and FOLDER has the recordings of
``recorded_faults.csv`` (default: runs/recorded_faults), whose rows tell what `lab watch` says; those that it lacks are
trained.
"""

from __future__ import annotations

import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import torch
from recorded_faults import TABLE, design, rates, recorded

PAGE = Path(__file__).with_name("RECORDED_PEERS.md")
KEYS = ["name", "is_fault", "model", "optimizer", "seed", "at", "block", "split"]  # of a run
HEAD = """# Other readers on the same recordings

Written by `python benchmarks/recorded_peers.py`. Four public packages read the [runs with planted
faults](RECORDED_FAULTS.md), with their default settings. Each gets what an ordinary loop would have logged: the loss at
every step, the learning rate and the gradient norm at recorded steps (the rate also where it jumps), and of policies
the reward, the KL divergence, the share of groups with equal rewards and that of clipped ratios, in the names of TRL.

- runmedic and trainspotter read logs of any training. A warning is a finding of severity `warning`, `error` or
  `critical`, at the step or the first step that the finding has. They cannot be given a validation loss, times of
  steps, use of memory or what was printed, which recordings do not hold. They take the loss of a policy, which need
  not fall, for one that should.
- rldoctor reads logs of policies that are trained on rewards, and should be judged by the policies. A warning is a
  finding of severity `WARNING` or `CRITICAL`, at any step that its summary or evidence names, since findings have
  none. It cannot be given the entropy of the policy, a held-out score, or lengths, which are constant here.
- trainscope records language models itself. Its recorder gets the loss, and the gradient norm as that of a model with
  one weight. A warning is a fired signal, a spike or an explosion in its report, which has no severities, at the step
  of each. It cannot be given layers, activations and routers, and its signal of the gradient norm needs three steps in
  a row, so it is there only in recordings of every step.

A package is said to warn of a recording if it raises any warning, whatever it says. The step is right if a warning
names one that is at most one recorded row from the first step of the fault. Of `lab watch` any alarm is a warning,
but only the step of the first finding counts. A package that fails on its input warns of nothing. Faults that cannot
be known in a recording are left out.

The comparison favors `lab watch`. It reads all that was recorded, such as weights, gradients and activations of each
block, and its rules were made on loops of this kind and length, 240 steps from the initial values, but those of the
packages on other runs. With a row every 100 steps packages have three gradient norms, so there is little but the loss
to go by, and almost any step in the middle is within one row of the fault.
"""
# How columns of a recording are called in a log, as of TRL.
NAMES = {
    "grad_norm": "grad_norm",
    "reward": "reward",
    "kl": "kl",
    "zero_variance_groups": "frac_reward_zero_std",
    "clip_ratio": "clip_ratio/region_mean",
}
REPLAY = """
import csv, sys, torch, trainscope
from trainscope.cli import cli
model = torch.nn.Linear(1, 1, bias=False)
config = trainscope.TrainScopeConfig(run_dir=sys.argv[1] + ".scope", run_name="run")
scope = trainscope.TrainScope(model, torch.optim.SGD(model.parameters()), config=config).attach()
for row in csv.DictReader(open(sys.argv[1])):
    model.weight.grad = torch.tensor([[float(row["grad_norm"])]]) if row["grad_norm"] else None
    scope.step(float(row["loss"]))
scope.detach()
cli(["report", "--run", config.run_dir + "/run", "--format", "json"])
"""
PEERS = {  # commands that print JSON of a log
    "runmedic": ["runmedic", "diagnose", "--json"],
    "trainspotter": ["trainspotter", "analyze", "--output", "json"],
    "rldoctor": ["rl-doctor", "diagnose", "--format", "json"],
    "trainscope": ["python", "-c", REPLAY],
}
SEVERE = ("warning", "error", "critical")


def warnings(name: str, said: Any) -> Iterator[float | None]:
    """The step of each warning in the JSON of a package."""
    if name == "trainscope":
        signals = said["signal_signature"]
        yield from [*signals["first_steps"].values(), *said["spike_steps"]]
        if signals["explosion_step"] is not None:
            yield signals["explosion_step"]
        return
    for finding in said[0]["findings"] if name == "runmedic" else said["findings"]:
        if finding["severity"].lower() not in SEVERE:
            continue
        if name == "rldoctor":
            text = " ".join([finding["summary"], *finding["evidence"]])
            yield from map(float, re.findall(r"\bstep (\d+)", text) or [math.nan])
        else:
            yield finding["step" if name == "runmedic" else "step_start"]


def logged(recording: Path) -> Iterator[dict[str, float]]:
    """What an ordinary loop would have logged of a recorded run, a row for each step."""
    rate = math.nan
    for row in map(json.loads, recording.read_text(encoding="utf-8").splitlines()):
        if "loss" not in row:
            continue
        log = {"step": row["step"], "loss": row["loss"]}
        told = row.get("settings", {}).get("0.0", {}).get("lr")  # if it changed; at a jump, from what to what
        if told is not None:
            rate = told[-1] if isinstance(told, list) else told
        if told is not None or "lr" in row:
            log["learning_rate"] = rate
        yield log | {name: row[column] for column, name in NAMES.items() if column in row}


def said_by(name: str, bins: Path, log: Path) -> list[float | None] | None:
    """The step of each warning of a package, or None if it fails."""
    program, *words = PEERS[name]
    done = subprocess.run([bins / program, *words, log], capture_output=True, text=True, check=False)
    return list(warnings(name, json.loads(done.stdout))) if done.returncode == 0 else None


def readings(bins: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each recording and reader; faults that cannot be known are left out."""
    # runs without faults that belong to several are recorded again if one of these is at every step
    ours = pd.read_csv(TABLE).drop_duplicates([*KEYS, "every"]).set_index([*KEYS, "every"])
    for planted in design():
        for every in rates(planted):
            key = (*(getattr(planted, name) for name in KEYS), every)
            if key not in ours.index:
                continue
            told: Any = ours.loc[key]
            if planted.is_fault and not told["counted"]:
                continue
            rows = list(logged(recorded(planted, every, folder)))
            said: dict[str, list[float | None] | None] = {"lab watch": [told["step"]] if told["alarms"] else []}
            with TemporaryDirectory() as temporary:
                log = Path(temporary) / "log.csv"
                with log.open("w", newline="", encoding="utf-8") as file:
                    table = csv.DictWriter(file, ["step", "loss", "learning_rate", *NAMES.values()])
                    table.writeheader()
                    table.writerows(rows)
                said |= {name: said_by(name, bins, log) for name in PEERS}
            for reader, steps in said.items():
                yield {
                    "split": planted.split,
                    "reader": reader,
                    "every": every,
                    "is_fault": planted.is_fault,
                    "is_policy": "reward" in rows[0],
                    "warned": bool(steps),
                    "right": any(step is not None and abs(step - planted.at) <= every for step in steps or ()),
                    "failed": steps is None,
                }


def page(table: pd.DataFrame, versions: list[str]) -> str:
    lines = [
        f"The runs are those of the split `{table['split'].iloc[0]}`; the packages are {', '.join(versions)}.",
        "",
        "| recordings | read by | faults with a warning | at the right step | healthy with a warning | failed |",
        "|---|---|---:|---:|---:|---:|",
    ]
    by_rate = [(f"every {every}", of_rate) for every, of_rate in table.groupby("every")]
    for group, of_group in [("all", table), *by_rate, ("of policies", table[table["is_policy"]])]:
        for reader, of_reader in of_group.groupby("reader", sort=False):
            faults, healthy = of_reader[of_reader["is_fault"]], of_reader[~of_reader["is_fault"]]
            shares = [faults["warned"], faults["right"], healthy["warned"]]
            cells = [f"{share.sum()} of {len(share)}" for share in shares]
            lines.append(f"| {group} | {reader} | {' | '.join(cells)} | {of_reader['failed'].sum()} |")
    return "\n".join([HEAD, *lines, ""])


def main(bins: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    command = [str(bins / "python"), "-m", "pip", "freeze"]
    installed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    versions = [line.replace("==", " ") for line in installed if line.partition("==")[0] in PEERS]
    PAGE.write_text(page(pd.DataFrame(readings(bins, folder)), versions), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "runs/recorded_faults"))
