"""Made-up records with known curves: of the size and shape that real small runs leave behind."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from lab.analysis import Records
from lab.analysis.stress.battery import read_battery
from lab.features.stress.card import card_of
from lab.records import store
from lab.records.plans import Setting

LRS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
BOTH = ("z_loss", "qk_layernorm+z_loss")
# What a study of both calls them.
OFF_LABEL, ON_LABEL = LABELS = ("without qk-layernorm", "with qk-layernorm")
AT_INIT, BIGRAM, UNIGRAM = 5.62, 2.33, 3.26
# Final held-out loss over LRS by (width, qk-layernorm), as tiny runs on bytes of text show it.
LOSSES = {
    (32, False): (3.086, 2.437, 2.150, 2.028, 2.094, 2.325, 2.912),
    (32, True): (3.087, 2.442, 2.165, 2.033, 2.038, 2.082, 2.144),
    (64, False): (2.502, 2.157, 2.001, 1.980, 2.136, 2.464, 2.809),
    (64, True): (2.514, 2.183, 2.017, 1.956, 1.965, 2.026, 2.088),
    (128, False): (2.215, 1.995, 1.911, 2.002, 2.255, 2.545, 2.646),
    (128, True): (2.245, 2.016, 1.905, 1.896, 1.932, 2.006, 2.064),
}


def card(**changes: Any) -> dict[str, Any]:
    """The card of one finished run; dotted config keys go in as ``**{"optimizer.lr": 1e-3}``."""
    base = {
        "intervention": "z_loss",
        "status": "finished",
        "diverged_at": None,
        "reason": None,
        "loss_at_init": AT_INIT,
        "final_val_loss": 2.0,
        "loss_bigram": BIGRAM,
        "loss_unigram": UNIGRAM,
        "parameters": 41_000,
        "parameters_without_embeddings": 24_736,
        "model_steps_per_second": 900.0,
        "wall_seconds": 0.5,
        "versions": "lab 0.1.0, python 3.11.7, torch 2.13.0",
        "data_fingerprint": "a1b2c3d4e5f60718",
        "model.name": "d32",
        "model.width": 32,
        "model.depth": 2,
        "model.head_width": 16,
        "parametrization.name": "standard",
        "optimizer.name": "adamw",
        "optimizer.chain": ["clip", "adam", "peak", "decay", "schedule"],
        "optimizer.lr": 1e-2,
        "optimizer.weight_decay": 1e-4,
        "optimizer.eps": 1e-8,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.95,
        "optimizer.clip": 1.0,
        "schedule.name": "cosine",
        "schedule.warmup": 0.05,
        "schedule.floor": 1e-5,
        "data.name": "text",
        "data.seed": None,
        "probes.name": "paper",
        "probes.every": 4,
        "probes.names": "train_loss+val_loss+attention_logit_max",
        "scale.name": "small",
        "batch_size": 16,
        "seq_len": 32,
        "steps": 400,
        "seed": 0,
        "precision": "fp32",
        "device": "cpu",
        "out": "runs/planted",
        "intervention.z_loss.coefficient": 1e-4,
    }
    made = {**base, **changes}
    return {"id": made.pop("id", None) or store.run_id(made), **made}


def cards(
    arms: Sequence[str] = BOTH,
    widths: Sequence[int] = (32, 64),
    lrs: Sequence[float] = LRS,
    seeds: Sequence[int] = (0, 1, 2),
    **changes: Any,
) -> Iterator[dict[str, Any]]:
    """One card per arm, width, learning rate and seed, on the curves of ``LOSSES``, with seed noise."""
    for arm, width, lr, seed in itertools.product(arms, widths, lrs, seeds):
        normed = "qk_layernorm" in arm
        noise = np.random.default_rng([width, seed]).normal(0, 0.01)
        noise += np.random.default_rng([width, seed, normed, round(1e4 * lr)]).normal(0, 0.015)
        loss = float(np.interp(math.log(lr), np.log(LRS), LOSSES[width, normed]))
        yield card(
            **{
                "intervention": arm,
                "intervention.z_loss.coefficient": 1e-4 if "z_loss" in arm else None,
                "optimizer.lr": lr,
                "seed": seed,
                "model.name": f"d{width}",
                "model.width": width,
                "parameters_without_embeddings": 24 * width**2 + 5 * width + 64 * normed,
                "final_val_loss": loss + noise,
                "loss_at_init": AT_INIT + 0.02 * seed,
                **changes,
            }
        )


def heard(run: Mapping[str, Any], every: int = 25, tensors: Sequence[str] = ()) -> list[tuple[int, str, str, float]]:
    """What the probes of a planted run might have heard, as rows ``(step, probe, where, value)``."""
    steps, lr, final = run["steps"], run["optimizer.lr"], run["final_val_loss"]
    noise = np.random.default_rng([run["seed"], round(1e5 * lr)])
    grows = 0.6 if "qk_layernorm" in run["intervention"] else 1.6 + run["model.width"] / 80
    rows = []
    for step in sorted({*range(0, steps, every), steps - 1}):
        done = step / steps
        loss = final + (run["loss_at_init"] - final) * math.exp(-12 * done) + 0.03 * noise.normal()
        if run["diverged_at"] is not None and step >= run["diverged_at"]:
            loss = math.nan
        peak = 1 + 10 ** (grows * (math.log10(lr) + 3.5) * (1 - math.exp(-6 * done))) * math.exp(0.1 * noise.normal())
        rows += [(step, "train_loss", "", loss), (step, "attention_logit_max", "block0", peak)]
        rows += [(step, "attention_logit_max", "block1", 0.6 * peak), (step, "grad_norm", "", 1.0)]
        rows += [(step, probe, name, 1e-3) for probe in ("grad_rms", "update_rms", "param_rms") for name in tensors]
    return [*rows, (0, "val_loss", "", run["loss_at_init"]), (steps, "val_loss", "", final)]


def table(runs: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The runs table of these cards, as ``store.read`` would return it."""
    return store.declared(pd.DataFrame(list(runs)))


def records_of(
    runs: Iterable[Mapping[str, Any]], rows: Sequence[Sequence[Any]] = (), events: Sequence[Sequence[Any]] = ()
) -> Records:
    """These cards, values of probes and events, with the id of a run in front, as ``store.read`` would return them."""
    metrics = pd.DataFrame(rows, columns=list(store.METRIC_COLUMNS)).astype(store.METRIC_COLUMNS)
    happened = pd.DataFrame(events, columns=list(store.EVENT_COLUMNS)).astype(store.EVENT_COLUMNS)
    return Records(table(runs), metrics, happened)


def records(runs: Sequence[Mapping[str, Any]], **kept: Any) -> Records:
    """The cards, and what their probes might have heard."""
    return records_of(runs, [(r["id"], *row) for r in runs if r["status"] != "failed" for row in heard(r, **kept)])


def write(folder: Path, runs: Sequence[Mapping[str, Any]], **kept: Any) -> Path:
    """Leave the cards behind in a results folder, gathered; returns the folder."""
    store.write_imported(folder, records(runs, **kept))
    store.open_folder(folder, "eager")
    store.note_command(folder, f"lab sweep qk_layernorm out={folder.name}")
    return folder


def card_folder(folder: Path, rise: float, seeds: Sequence[int] = (0, 1, 2), **changes: Any) -> Path:
    """Leave a card of two tests behind, of a recipe whose loss rises by so much a decade around an LR of 0.03.

    Args:
        changes: of the cards of its runs.
    """
    battery = read_battery()
    write(folder, list(cards(seeds=(0,), **changes)))  # for versions, data and commands
    sizes = {"parameters": 41_000, "active": 41_000}
    of_setting = {"loss_at_init": AT_INIT, "loss_bigram": BIGRAM, **sizes, "log_rms": 1.0, "spikes": 0.0}
    done = {
        Setting((), lr): pd.DataFrame(
            {"loss": [2.0 + rise * abs(math.log10(lr / 0.03)) + 0.01 * (seed % 3) for seed in seeds], **of_setting},
            index=pd.Index(seeds, name="seed"),
        )
        for lr in battery.curve
    }
    tests = list(battery.tests.values())[:2]
    made = card_of("planted", "lab stress", folder, tests, done, battery)
    (folder / "card.json").write_text(made.answer.json())
    return folder
