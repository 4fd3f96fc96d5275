"""Where did it begin? What is said of recordings with planted faults, and that nothing is said of healthy ones."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.__main__ import main
from labwatch.recordings.diagnosis import Finding, causes, diagnose
from labwatch.recordings.moves import moves_of
from labwatch.recordings.readings import quantities
from labwatch.recordings.recording import read_recording
from labwatch.recordings.words import checked, next_look, sentence
from labwatch.watch.pages import finding_figure
from labwatch.watch.watching import find_alarms

Row = dict[str, Any]
PARTS = ("block0", "block1", "block2", "block3", "embedding", "head")
BLOCKS = PARTS[:4]
# What a healthy recording has of each part, and the deviation of its logarithm from row to row.
USUAL = {
    "param_rms": (0.1, 1e-4),
    "grad_rms": (0.01, 0.1),
    "update_ratio": (2e-3, 0.05),
    "moment_ratio": (1.0, 0.05),
    "block_rms": (1.0, 0.02),
    "attention_entropy": (2.0, 0.02),
    "attention_logit_max": (3.0, 0.1),
    "grad_below_eps": (0.01, 0.3),
}
OF_BLOCKS = ("block_rms", "attention_entropy", "attention_logit_max")
STEPS, AT = 300, 200


def planted(
    out: Path,
    fault: Callable[[Row, int], None] = lambda row, step: None,
    every: int = 5,
    seed: int = 0,
    steps: int = STEPS,
) -> Path:
    """A recording in which a fault changes the rows from ``AT`` on."""
    rows = [row.copy() for row in healthy(every, seed, steps)]
    for row in rows:
        fault(row, row["step"])
    rows.insert(0, {"recorder": "0", "every": every, "not_found": []})
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return out


def in_lists(out: Path, lists: str) -> Path:
    """A recording whose blocks stand in lists of these names, a letter for each block."""
    header, *rows = out.read_text().splitlines()
    blocks = {block: f"{name}.{number}" for number, (block, name) in enumerate(zip(BLOCKS, lists, strict=True))}
    out.write_text("\n".join([json.dumps(json.loads(header) | {"blocks": blocks}), *rows, ""]))
    return out


@cache
def healthy(every: int, seed: int, steps: int) -> list[Row]:
    """The rows of a recording without a fault."""
    random, rows = np.random.default_rng(seed), list[Row]()
    for step in range(steps):
        row: Row = {"step": step, "loss": 2 + 2 / math.sqrt(step + 10) + random.normal(0, 0.03)}
        if step % every == 0:
            row["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
            for name, (usual, noise) in USUAL.items():
                for part in BLOCKS if name in OF_BLOCKS else PARTS:
                    row[f"{name}/{part}"] = usual * math.exp(random.normal(0, noise))
            row |= {f"change_over_updates/{part}": 0.8 for part in PARTS}
            row["input_rms"] = 0.5 * math.exp(random.normal(0, 0.02))
            for number, block in enumerate(BLOCKS):
                row[f"block_rms/{block}"] *= 1 + number
        rows.append(row)
    return rows


def times(
    factor: float, *columns: str, loss: float = 0.0, at: int = AT, until: int = STEPS
) -> Callable[[Row, int], None]:
    """A fault that multiplies columns, and adds to the loss, from a step on."""

    def fault(row: Row, step: int) -> None:
        if at <= step < until:
            row["loss"] += loss
            for column in columns:
                if column in row:
                    row[column] *= factor

    return fault


def of_all(name: str) -> list[str]:
    return [f"{name}/{part}" for part in (BLOCKS if name in OF_BLOCKS else PARTS)]


def sets(value: Any, *columns: str, at: int = AT) -> Callable[[Row, int], None]:
    """A fault that writes a value into rows that are recorded, from a step on; None takes the column away."""

    def fault(row: Row, step: int) -> None:
        if step >= at and "lr" in row:
            for column in columns:
                if value is None:
                    row.pop(column)
                else:
                    row[column] = value

    return fault


def both(*faults: Callable[[Row, int], None]) -> Callable[[Row, int], None]:
    def fault(row: Row, step: int) -> None:
        for each in faults:
            each(row, step)

    return fault


def holds(value: float, *columns: str) -> Callable[[Row, int], None]:
    return sets(value, *columns, at=0)


def sure(label_loss: float, deviation: float = 6.0) -> Callable[[Row, int], None]:
    """In all rows output logits have this standard deviation, and the labels such a loss."""
    logits = {"output_logit_rms": math.hypot(deviation, 1.0), "output_logit_mean": 1.0, "log_z": 13.0}
    return both(*(holds(value, name) for name, value in logits.items()), holds(label_loss, "label_loss"))


def moves_weights(*parts: str) -> Callable[[Row, int], None]:
    """At one row weights are far from where they were, and no update explains it."""
    return times(20, *(f"change_over_updates/{part}" for part in parts), until=AT + 1)


def named_weight(part: str) -> Callable[[Row, int], None]:
    return sets(["blocks.2.out.weight"], f"weight_moved/{part}")


def told(**settings: Any) -> Callable[[Row, int], None]:
    """A setting of two groups, the second one of block2 and block3, that jumps in the second one from step 203 on."""

    def tell(row: Row, step: int) -> None:
        if step == 0:
            first = {name: values[0] for name, values in settings.items()}
            row["settings"] = {"0.0": {"of": [*PARTS]} | first, "0.1": {"of": ["block2", "block3"]} | first}
        if step == AT + 3:
            row["settings"] = {"0.1": {name: [*values] for name, values in settings.items()}}

    return tell


AHEAD = [f"attention_ahead/{block}" for block in BLOCKS]
LEFT, EDIT = ([f"{name}/{part}" for part in PARTS] for name in ("grad_left", "grad_edit"))
WEIGHTS = ["loss_weight", "sample_weight", "sample_weight_rms"]
VARIETY = ["label_perplexity", "token_perplexity"]
SEEN = [f"attention_seen/{block}" for block in BLOCKS]
SIGNS, KEPT = ([f"{name}/{part}" for part in PARTS] for name in ("grad_signs", "state_kept"))


def calls(*parts: str, usual: str = "layer_norm(1e-05)", then: str = "layer_norm(1)") -> Callable[[Row, int], None]:
    """What parts call, which is told at the first row and where it changes."""
    before, after = (
        sets(["gelu", *name.split("; ")], *(f"functions/{part}" for part in places), at=at)
        for name, places, at in ((usual, PARTS, 0), (then, parts, AT))
    )

    def tell(row: Row, step: int) -> None:
        if step in (0, AT):
            (before if step == 0 else after)(row, step)

    return tell


def other_calls(part: str, *words: str, at: int = AT) -> Callable[[Row, int], None]:
    """A part calls the same functions with the outputs of others, or more or less often."""

    def tell(row: Row, step: int) -> None:
        if step in (0, at):
            row |= {f"code/{each}": step for each in ([*PARTS, part] if step == 0 else [part])}
        if step == at:
            row[f"calls/{part}"] = [*words]

    return tell


def loss_is_changed(row: Row, step: int) -> None:
    if step in (0, AT):
        row["functions/loss"] = ["Add", "Mul(0.01)"] if step == 0 else ["Add"]


def varies(columns: str | list[str], usual: float, noise: float = 0.1) -> Callable[[Row, int], None]:
    """Columns with noise."""

    def vary(row: Row, step: int) -> None:
        for column in [columns] if isinstance(columns, str) else columns:
            if "lr" in row:
                row[column] = usual * math.exp(np.random.default_rng(step).normal(0, noise))

    return vary


def labels_are_the_loss(row: Row, step: int) -> None:
    if "lr" in row:
        row["label_loss"] = row["loss"]


def counts(row: Row, step: int) -> None:
    """Steps of the optimizer, which are forgotten."""
    sets(float(step - AT * (step >= AT)), *(f"state_updates/{part}" for part in PARTS), at=0)(row, step)


FAULTS: dict[str, tuple[Callable[[Row, int], None], str, list[str]]] = {
    "gradients of a block": (times(1e3, "grad_rms/block1", until=AT + 3), "gradients", ["block1"]),
    "weights of a block": (both(moves_weights("block2"), named_weight("block2")), "weights", ["block2"]),
    "weights of all parts": (moves_weights(*PARTS), "weights", []),
    "data": (times(1, loss=1.5), "data", []),
    "data and gradients": (both(times(1, loss=1.5), times(20, *of_all("grad_rms"))), "data", []),
    "gradients of all parts": (times(30, *of_all("grad_rms")), "data", []),
    "gradients of all parts that vanish": (times(1e-3, *of_all("grad_rms")), "gradients", []),
    "gradients far below their second moments": (times(0.01, *of_all("moment_ratio")), "optimizer", []),
    "weights that do not follow their updates": (times(0.3, *of_all("change_over_updates")), "optimizer", []),
    "rate": (times(100, "lr", *of_all("update_ratio"), loss=1.0), "rate", []),
    "output of a block": (times(6, "block_rms/block2", "block_rms/block3", loss=1.0), "activations", ["block2"]),
    "attention": (times(200, "attention_logit_max/block3"), "attention", ["block3"]),
    "state of the optimizer": (times(5, *of_all("moment_ratio")), "optimizer", []),
    "rate of one group": (times(8, "update_ratio/head"), "optimizer", ["head"]),
    "epsilon": (sets(0.99, *of_all("grad_below_eps")), "optimizer", []),
    "frozen": (sets(None, "grad_rms/block0"), "frozen", ["block0"]),
    "no update": (sets(0.0, "update_ratio/block3"), "frozen", ["block3"]),
    "no update of some weights": (sets(["w.1"], "update_zero/block3"), "frozen", ["block3"]),
    "NaN in a gradient": (sets(["w.1"], "gradient_not_finite/block1"), "not_finite", ["block1"]),
    "NaN in a state": (sets(["w.1"], "update_not_finite/block1"), "not_finite", ["block1"]),
    "infinite activations": (sets(math.inf, "block_rms/block2", "block_rms/block3"), "not_finite", ["block2"]),
    "dead": (sets(["w.1"], "gradient_zero/block1"), "dead", ["block1"]),
    "initial weights": (times(9, "param_rms/block2", at=0), "weights", ["block2"]),
    "initial logits": (sure(label_loss=12.0), "output_logits", ["head"]),
    "initial embedding that is the head, too": (
        both(sure(label_loss=12.0), times(9, "param_rms/embedding", at=0), sets(None, "param_rms/head", at=0)),
        *("weights", ["embedding"]),
    ),
    "initial embedding that is the head, after a small matrix of this": (
        both(sure(label_loss=12.0), times(9, "param_rms/embedding", at=0), holds(0.4, "weight_gain/head")),
        *("weights", ["embedding"]),
    ),
    "initial embedding beside a large head": (
        both(sure(label_loss=12.0), times(9, "param_rms/embedding", at=0), holds(6.0, "weight_gain/head")),
        *("weights", ["head"]),
    ),
    "initial embedding that is large where it enters the first block": (
        both(
            sure(label_loss=12.0, deviation=1.0),
            times(12, "param_rms/embedding", at=0),
            times(10, "input_rms", *of_all("block_rms"), at=0),
        ),
        *("weights", ["embedding"]),
    ),
    "a reference that is the policy itself from the start": (
        both(varies("kl", 1e-8), holds(0.1, "excess_surprisal")),
        "policy",
        [],
    ),
    "dead from the start": (sets(["w.1"], "gradient_zero/block1", at=0), "dead", ["block1"]),
    "a mask that is gone": (both(holds(0.0, *AHEAD), sets(0.4, *AHEAD)), "attention", []),
    "a mask of one block": (both(holds(0.0, *AHEAD), sets(0.4, AHEAD[1])), "attention", ["block1"]),
    "dropout of one block": (
        both(holds(0.1, *(f"dropout/{block}" for block in BLOCKS)), sets(0.9, "dropout/block2")),
        "activations",
        ["block2"],
    ),
    "dropout outside of the blocks": (
        both(holds(0.1, "dropout", *(f"dropout/{block}" for block in BLOCKS)), sets(0.9, "dropout")),
        "data",
        [],
    ),
    "initial queries and keys": (times(0.001, "attention_logit_max/block2", at=0), "weights", ["block2"]),
    "dropout": (both(holds(0.1, "dropout/block2"), sets(0.0, "dropout/block2")), "data", []),
    "a sum for a mean": (both(holds(1.0, *WEIGHTS), sets(8.0, *WEIGHTS)), "gradients", []),
    "gradients that stay": (both(holds(0.0, *LEFT), sets(0.02, *LEFT)), "gradients", []),
    "gradients that are edited": (both(holds(1.0, *EDIT), sets(8.0, EDIT[2])), "gradients", ["block2"]),
    "gradients that are turned around": (both(holds(1.0, *SIGNS), sets(-1.0, SIGNS[2])), "gradients", ["block2"]),
    "labels that are all the same": (both(holds(90.0, *VARIETY), sets(1.0, "label_perplexity")), "data", []),
    "input": (both(times(5, *of_all("block_rms")), times(10, "input_rms")), "data", []),
    "rows that teach nothing": (both(holds(1.0, "row_share"), sets(0.125, "row_share")), "gradients", []),
    "rows of which all labels are masked": (
        both(holds(1.0, "row_share"), sets(0.125, "row_share"), labels_are_the_loss),
        "data",
        [],
    ),
    "labels that are not the next tokens": (both(holds(1.0, "label_next"), sets(0.04, "label_next")), "data", []),
    "labels that the model sees": (both(holds(0.05, "label_same"), sets(1.0, "label_same")), "data", []),
    "labels of all tokens": (both(varies("label_share", 0.25), times(4, "label_share")), "data", []),
    "labels that are not masked": (both(holds(0.0, "label_same"), sets(0.75, "label_same")), "data", []),
    "labels of tokens that were not sampled": (
        both(varies("label_share", 0.3, noise=0.3), sets(1.0, "label_share")),
        "data",
        [],
    ),
    "a mask that hides what comes": (both(varies(AHEAD, 0.4), sets(0.0, *AHEAD)), "attention", []),
    "a backward pass that grows": (
        times(5, "grad_rms/embedding", "grad_rms/block0", "grad_rms/block1"),
        "gradients",
        ["block1"],
    ),
    "gradients of a part that fall": (times(0.1, "grad_rms/embedding"), "gradients", ["embedding"]),
    "inputs that are not normalized": (both(varies("batch_rms", 1.0), times(9, "batch_rms")), "data", []),
    "tokens that weigh more in the loss": (
        both(holds(1.0, "sample_weight", "sample_weight_rms"), sets(3.0, "sample_weight_rms"), times(1, loss=1.5)),
        "data",
        [],
    ),
    "inputs that are a little larger": (both(varies("batch_rms", 1.0, 0.02), times(1.35, "batch_rms")), "data", []),
    "inputs that are divided twice": (both(varies("batch_rms", 1.0), times(0.1, "batch_rms")), "data", []),
    "gradients with other values": (both(holds(1.0, *EDIT), sets(0.75, EDIT[2])), "gradients", ["block2"]),
    "rows that are equal": (both(holds(1.0, "distinct_rows"), sets(0.5, "distinct_rows")), "data", []),
    "rows that are cut": (both(holds(192.0, "label_count"), sets(64.0, "label_count")), "data", []),
    "a mask of documents": (both(holds(1.0, *SEEN), sets(0.2, *SEEN)), "attention", [*BLOCKS]),
    "edited gradients, with which weights moved too far": (
        both(holds(1.0, *EDIT), sets(0.01, EDIT[1]), times(9, *of_all("change_over_updates"))),
        "gradients",
        ["block1"],
    ),
    "gradients that become zero": (both(holds(1.0, *SIGNS), sets(0.8, SIGNS[2])), "gradients", ["block2"]),
    "second moments of others": (both(sets(1.0, *KEPT, at=5), sets(0.6, *KEPT)), "optimizer", []),
    "steps that are forgotten": (counts, "optimizer", []),
    "no gradients at all": (
        both(sets(["w.1"], *(f"gradient_missing/{part}" for part in PARTS)), sets(None, *of_all("update_ratio"))),
        "frozen",
        [],
    ),
    "a part without gradients": (sets(["w.1"], "gradient_missing/block1"), "frozen", ["block1"]),
    "another epsilon": (both(calls(*BLOCKS, "head"), times(9, "block_rms/block0")), "activations", []),
    "another activation": (
        both(calls("block1"), times(9, *of_all("grad_rms")), sets(["w.1"], "gradient_missing/block1")),
        "activations",
        ["block1"],
    ),
    "a norm of queries that is skipped": (
        both(
            calls(*BLOCKS, usual="uses blocks.1.attention.query_norm.weight", then="gelu"),
            sets(["w.1"], *(f"gradient_missing/{block}" for block in BLOCKS)),
        ),
        "attention",
        [*BLOCKS],
    ),
    "a scale of scores": (
        both(calls("block1", "block2", then="mul(4)"), times(4, "attention_logit_max/block1")),
        "attention",
        ["block1", "block2"],
    ),
    "experts that are chosen": (calls("block1", usual="topk(2)", then="topk(1)"), "router", ["block1"]),
    "another number format": (
        calls(*BLOCKS, usual="linear", then="linear in float16"),
        "precision",
        [*BLOCKS],
    ),
    "another number format, with casts": (
        calls(*BLOCKS, usual="linear", then="linear in bfloat16; bfloat16 in bfloat16; to(torch.float32)"),
        "precision",
        [*BLOCKS],
    ),
    "gradients that a layer turns around": (
        calls("head", usual="linear; linear", then="linear; detach; mul; sub"),
        "gradients",
        ["head"],
    ),
    "what is taken out of the graph": (
        calls(*BLOCKS, usual="mul, which is not used", then="detach"),
        "gradients",
        [*BLOCKS],
    ),
    "a norm that is not used": (
        calls(*BLOCKS, usual="pow(2)", then="type_as, which is not used"),
        "activations",
        [*BLOCKS],
    ),
    "a router whose loss follows": (
        both(calls(*BLOCKS, usual="mul, which is not used", then="detach"), loss_is_changed),
        "gradients",
        [*BLOCKS],
    ),
    "labels of single tokens that are ignored": (
        both(holds(1.0, "label_share"), sets(0.85, "label_share")),
        "data",
        [],
    ),
    "gradients of all parts, of which one has less noise": (
        both(
            varies([f"grad_rms/{part}" for part in PARTS if part != "block2"], 1e-3, 0.6), times(5, *of_all("grad_rms"))
        ),
        "data",
        [],
    ),
    "gradients without signs, and a part of them": (
        both(holds(1.0, *SIGNS, *EDIT), sets(0.1, *SIGNS), sets(1.6, EDIT[1])),
        "gradients",
        [],
    ),
    "a weight that is taken out of the graph": (
        both(calls("embedding", then="detach of embedding.weight"), calls("head", then="linear, which is not used")),
        "gradients",
        ["embedding"],
    ),
    "a weight that is another tensor": (
        both(
            calls("head", usual="uses head.weight", then="uses a weight that is no part of the model"),
            sets(["head.weight"], "gradient_missing/head"),
        ),
        "frozen",
        ["head"],
    ),
    "a temperature": (both(calls("head"), times(1, loss=1.5)), "output_logits", ["head"]),
    "numbers that are not finite after it": (
        both(
            calls("block2"),
            sets(["w.1"], *(f"gradient_not_finite/{part}" for part in PARTS)),
            times(math.nan, "loss"),
        ),
        "not_finite",
        ["block2"],
    ),
    "a gradient of one part at any loss scale": (
        both(sets(2.0**20, "loss_scale", at=0), sets(1.0, "loss_scale"), sets(["w.1"], "gradient_not_finite/block2")),
        "precision",
        ["block2"],
    ),
    "gradients of one part that overflow at a scale that grew": (
        both(sets(2.0**10, "loss_scale", at=0), sets(2.0**20, "loss_scale"), sets(["w.1"], "gradient_not_finite/head")),
        "precision",
        [],
    ),
    "loss scale": (both(sets(2.0**20, "loss_scale", at=0), sets(1.0, "loss_scale")), "precision", []),
    "NaN that no loss scale mends": (
        both(
            sets(2.0**20, "loss_scale", at=0),
            sets(1.0, "loss_scale"),
            sets(["w.1"], *(f"gradient_not_finite/{part}" for part in PARTS)),
            sets(math.inf, *(f"block_rms/{block}" for block in BLOCKS)),
        ),
        *("not_finite", []),
    ),
    "NaN in what the model gets": (
        both(
            sets(math.inf, "input_rms", "block_rms/block0", "block_rms/block1"),
            sets(["w.1"], *(f"gradient_not_finite/{part}" for part in PARTS)),
        ),
        *("not_finite", []),
    ),
    "a format that follows from a residual that is gone": (
        both(
            other_calls("block1", "no longer add(add, down.linear)"),
            calls("block2", "block3", "head", usual="add; linear", then="add in bfloat16; linear"),
        ),
        *("activations", ["block1"]),
    ),
    "a residual that is gone and gives its own block another format": (
        both(
            other_calls(
                *("block1", "no longer mlp.add(input, out.linear)", "no longer mlp.add(add, down.linear)"),
                "now mlp.add(out.linear, down.linear)",
            ),
            calls("block1", "block2", usual="add; linear", then="add in bfloat16; linear"),
        ),
        *("activations", ["block1"]),
    ),
    "a cast before a residual": (
        both(
            other_calls("block1", "no longer add(input, out.linear)", "now add(to, out.linear)", "now to(input)"),
            calls("block1", usual="add", then="add in bfloat16; to(torch.bfloat16)"),
        ),
        *("precision", ["block1"]),
    ),
    "another number in 16 bits": (
        calls("head", usual="mul(1) in bfloat16", then="mul(6) in bfloat16"),
        *("output_logits", ["head"]),
    ),
    "a residual around attention": (
        other_calls(
            *("block2", "no longer attention.output.add(attention.output.dense.linear, input)"),
            "now attention.output.norm.layer_norm(attention.output.dense.linear, a weight, a weight)",
        ),
        *("activations", ["block2"]),
    ),
    "a mask that is kept in a buffer": (
        both(
            holds(0.0, *AHEAD),
            sets(0.4, AHEAD[1]),
            lambda row, step: row.update({"buffer_written/block1": ["mask"]} if step == AT else {}),
        ),
        *("attention", ["block1"]),
    ),
    "a mask in a buffer beside the blocks": (
        both(
            holds(0.0, *AHEAD),
            sets(0.4, *AHEAD),
            lambda row, step: row.update({"buffer_written/other": ["mask"]} if step == AT else {}),
        ),
        "attention",
        [],
    ),
    "a mask that is turned round before the blocks": (
        other_calls("embedding", "no longer invert(ge)", "no longer getitem(invert)", "now getitem(ge)"),
        *("attention", [*BLOCKS]),
    ),
    "a mask of one block that is turned round": (
        other_calls("block3", "now text.invert(text.getitem)"),
        *("attention", ["block3"]),
    ),
    "a block that is called without gradients": (
        both(
            other_calls("block3", "now add(input, out.linear)"),
            sets(None, "grad_rms/block3"),
            sets(["w.1"], "gradient_missing/block3"),
        ),
        *("frozen", ["block3"]),
    ),
    "labels that are all masked, so that no weight has a gradient": (
        both(
            holds(1.0, "row_share"),
            sets(0.0, "row_share"),
            sets(["w.1"], *(f"gradient_zero/{part}" for part in PARTS)),
            times(1, loss=1.5),
        ),
        *("data", []),
    ),
    "micro-batches that are not averaged, of which the head sees a view": (
        both(
            other_calls("head", "no longer view(contiguous)", "now view(getitem)"),
            *(holds(1.0, "loss_weight"), sets(4.0, "loss_weight")),
        ),
        *("gradients", []),
    ),
    "NaN that the first block makes": (
        both(
            sets(math.inf, "attention_logit_max/block2", "attention_logit_max/block3", *of_all("block_rms")),
            sets(["w.1"], *(f"gradient_not_finite/{part}" for part in PARTS)),
        ),
        *("not_finite", ["block0"]),
    ),
    "labels that count no more": (
        both(calls(*BLOCKS), sets(["w.1"], *(f"gradient_zero/{part}" for part in PARTS))),
        *("dead", []),
    ),
    "a decay without the rate": (
        lambda row, step: times(0.4 ** ((step - AT) / 5 + 1), *of_all("param_rms"), loss=0.5)(row, step),
        *("optimizer", []),
    ),
    "logits of a model without a head": (
        both(sets(None, "param_rms/head", at=0), calls("head", usual="normalize(2)", then="gelu")),
        *("output_logits", ["other"]),
    ),
}


def findings(out: Path) -> list[Finding]:
    return diagnose(read_recording(out)).findings


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_told_with_its_kind_part_and_step(name: str, tmp_path: Path) -> None:
    fault, kind, parts = FAULTS[name]
    first = findings(planted(tmp_path / "probes.jsonl", fault))[0]
    assert (first.kind, first.parts) == (kind, parts)
    is_from_start = name.startswith("initial") or name.endswith("start")
    assert (first.since, first.step) == ((None, 0) if is_from_start else (AT - 5, AT))
    text = sentence(first)
    assert all(part in text for part in parts)
    assert f"Look next at {next_look(first)}." in text


@pytest.mark.parametrize("every", [1, 5, 20, 100])
def test_nothing_is_said_of_healthy_recordings(every: int, tmp_path: Path) -> None:
    told = [
        finding for seed in range(4) for finding in findings(planted(tmp_path / "probes.jsonl", every=every, seed=seed))
    ]
    assert not told


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_of_a_recording_that_begins_late(tmp_path: Path) -> None:
    def later(row: Row, step: int) -> None:
        row["step"] = step + 1000

    assert not findings(planted(tmp_path / "probes.jsonl", later))


def test_what_moved_while_the_rate_warmed_up_is_no_cause_of_a_later_rise(tmp_path: Path) -> None:
    def warms_up(row: Row, step: int) -> None:
        if "lr" in row:
            row["lr"] *= min(step + 1, AT - 50) / (AT - 50)

    fault = both(warms_up, times(4, "grad_rms/block3", at=AT - 70), times(1, loss=1.5))
    first = findings(planted(tmp_path / "probes.jsonl", fault))[0]
    assert (first.kind, first.parts, first.step) == ("data", [], AT)


def test_gradients_that_are_zero_at_first_and_later_again_are_dead_from_then_on(tmp_path: Path) -> None:
    """Those of adapters, of which one matrix is zero at first, and which are not used any more."""

    def fault(row: Row, step: int) -> None:
        if "lr" in row and step != 5:
            row["gradient_zero/block1"] = ["w.1"]

    first = findings(planted(tmp_path / "probes.jsonl", fault))[0]
    assert (first.kind, first.parts, first.step) == ("dead", ["block1"], 10)


@pytest.mark.parametrize(("name", "kind"), [("attention_logit_max", "attention"), ("router_logit_max", "router")])
@pytest.mark.parametrize(("label_loss", "blocks", "is_said"), [(12.0, 4, True), (12.0, 3, False), (2.0, 4, False)])
def test_logits_that_are_sure_in_all_blocks_of_a_model_that_has_learned_nothing_are_said(
    name: str, kind: str, label_loss: float, blocks: int, is_said: bool, tmp_path: Path
) -> None:
    of_blocks = [f"{name}/{block}" for block in BLOCKS]
    fault = both(sure(label_loss, deviation=2.0), holds(3.0, *of_blocks), holds(12.0, *of_blocks[:blocks]))
    found = findings(planted(tmp_path / "probes.jsonl", fault))
    assert [(first.kind, first.parts, first.step) for first in found] == [(kind, [], 0)] * is_said


@pytest.mark.parametrize(
    ("label_loss", "gain", "others", "parts"),
    [
        (12.0, 5.7, 0.6, [*BLOCKS[:2]]),
        (12.0, 1.4, 0.6, None),
        (2.0, 5.7, 0.6, None),
        (2.0, 0.006, 0.006, []),
        (2.0, 0.006, 0.6, None),
        (12.0, 0.0, 0.0, None),
    ],
)
def test_initial_matrices_of_another_size_are_said(
    label_loss: float, gain: float, others: float, parts: list[str] | None, tmp_path: Path
) -> None:
    """But training may have made them large, and those of a part may be zero."""

    def tell(row: Row, step: int) -> None:
        if step == 0:
            row |= {f"weight_gain/{part}": gain if part in BLOCKS[:2] else others for part in (*BLOCKS, "head")}

    found = findings(planted(tmp_path / "probes.jsonl", both(sure(label_loss, deviation=2.0), tell)))
    assert [(first.kind, first.parts, first.step) for first in found] == [("weights", parts, 0)] * (parts is not None)


@pytest.mark.parametrize(
    ("factor", "label_loss", "until", "is_said"),
    [
        (200, 12.0, STEPS, True),
        (200, 2.0, STEPS, True),
        (50, 12.0, 5, False),
        (50, 12.0, STEPS, True),
        (20, 12.0, STEPS, False),
        (0.01, 12.0, STEPS, True),
        (0.01, 2.0, STEPS, False),
        (0.1, 12.0, STEPS, False),
    ],
)
def test_updates_of_another_size_than_those_of_models_that_learn_are_said(
    factor: float, label_loss: float, until: int, is_said: bool, tmp_path: Path
) -> None:
    """The first ones may be large; small ones are said only of a model that has learned nothing, not of fine-tuning."""
    fault = both(sure(label_loss, deviation=1.0), times(factor, *of_all("update_ratio"), at=0, until=until))
    said = [
        (found.kind, found.parts, found.since, found.step) for found in findings(planted(tmp_path / "a.jsonl", fault))
    ]
    assert said == [("rate", [], None, 0)] * is_said


@pytest.mark.parametrize(
    ("ahead", "share", "following", "is_said"),
    [(0.48, 1.0, 1.0, True), (0.48, 0.8, 1.0, True), (0.1, 0.75, 1.0, False), (0.48, 1.0, 0.1, False)],
)
def test_attention_to_the_tokens_that_are_to_be_predicted_is_said(
    ahead: float, share: float, following: float, is_said: bool, tmp_path: Path
) -> None:
    """And not of a prompt without labels, which may see itself whole, nor where labels are others."""
    fault = both(holds(ahead, *AHEAD), holds(share, "label_share"), holds(following, "label_next"))
    said = [(found.kind, found.parts, found.since) for found in findings(planted(tmp_path / "a.jsonl", fault))]
    assert said == [("attention", [*BLOCKS], None)] * is_said


def test_a_model_without_blocks_has_no_logits_that_run_away(tmp_path: Path) -> None:
    def without(row: Row, step: int) -> None:
        for column in [column for column in row if "/block" in column]:
            del row[column]

    assert not findings(planted(tmp_path / "a.jsonl", without))


@pytest.mark.parametrize(("learns", "is_said"), [(True, False), (False, True)])
def test_a_first_update_that_is_half_as_large_is_too_large_where_nothing_is_learned(
    learns: bool, is_said: bool, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        row["loss"] = row["loss"] if learns else 3 + np.random.default_rng(step).normal(0, 0.03)

    fault = both(tell, times(70, *of_all("update_ratio"), at=0, until=5))
    said = [(found.kind, found.parts, found.since) for found in findings(planted(tmp_path / "a.jsonl", fault))]
    assert said == [("rate", [], None)] * is_said


@pytest.mark.parametrize(
    ("before", "share", "until", "every", "is_said"),
    [
        (0.0, 0.25, STEPS, 5, True),
        (0.0, 0.25, AT + 5, 5, False),
        (0.5, 0.5, STEPS, 5, False),
        (0.0, 0.5, STEPS, 100, True),
        (0.0, 0.25, STEPS, 100, False),
    ],
)
def test_experts_that_get_no_gradient_any_more_are_said(
    before: float, share: float, until: int, every: int, is_said: bool, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        if step % every == 0:
            row |= {f"idle_experts/{block}": 0.0 for block in BLOCKS}
            row["idle_experts/block1"] = share if AT <= step < until else before

    said = [(each.kind, each.parts, each.step) for each in findings(planted(tmp_path / "probes.jsonl", tell, every))]
    assert said == [("router", ["block1"], AT)] * is_said


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (lambda: both(holds(0.0, "in_evaluation"), sets(1.0, "in_evaluation"), calls(*BLOCKS)), "data"),
        (lambda: both(holds(0.0, *LEFT), sets(0.01, *LEFT), times(1, loss=1.5, at=AT + 7)), "gradients"),
        (lambda: both(times(4, "attention_logit_max/block1"), calls("block1")), "attention"),
        (
            lambda: both(times(4, "attention_logit_max/block1"), times(9, "block_rms/block1"), calls("block1")),
            "activations",
        ),
    ],
    ids=["evaluation calls other functions", "gradients that are left", "attention", "a scale in all of a block"],
)
def test_what_is_known_exactly_decides_the_kind(fault: Callable[[], Any], kind: str, tmp_path: Path) -> None:
    assert findings(planted(tmp_path / "probes.jsonl", fault()))[0].kind == kind


@pytest.mark.parametrize(("begin", "end", "is_said"), [(AT, STEPS, True), (AT, AT + 15, False), (0, STEPS, False)])
def test_a_batch_that_comes_again_and_again_is_said(begin: int, end: int, is_said: bool, tmp_path: Path) -> None:
    """But not one that is the whole data from the start."""

    def tell(row: Row, step: int) -> None:
        if step % 5 == 0:
            row["token_perplexity"] = 20.0 if begin <= step < end else 20 + math.sin(step)

    said = [(each.kind, each.since, each.step) for each in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == [("data", AT - 5, AT)] * is_said


@pytest.mark.parametrize(
    ("at", "logits", "updates", "is_said"),
    [(50, 20, 20, True), (50, 100, 5, False), (50, 500, 1, True), (50, 6, 20, False), (0, 20, 20, False)],
)
def test_updates_that_are_large_for_long_are_too_large_if_logits_of_all_blocks_run_away(
    at: int, logits: float, updates: float, is_said: bool, tmp_path: Path
) -> None:
    """And not if these are as large from the first row on, as in a model that adapters tune."""
    grow = times(logits, *(f"attention_logit_max/{block}" for block in BLOCKS), at=at)
    fault = both(grow, times(updates, *of_all("update_ratio"), at=0))
    found = [(found.kind, found.parts, found.since) for found in findings(planted(tmp_path / "probes.jsonl", fault))]
    assert (found[:1] == [("rate", [], None)]) == is_said


@pytest.mark.parametrize(
    ("updates", "gradients", "is_said"),
    [(0.2, 1.0, True), (5.0, 1.0, True), (0.2, 0.2, False), (5.0, 5.0, False), (0.5, 1.0, False)],
)
def test_updates_that_change_and_their_gradients_do_not_are_said(
    updates: float, gradients: float, is_said: bool, tmp_path: Path
) -> None:
    """As of second moments that were read as their roots."""
    changed = [
        times(updates, *of_all("update_ratio"), until=AT + 15),
        times(gradients, *of_all("grad_rms"), until=AT + 15),
    ]
    found = [
        first for first in findings(planted(tmp_path / "probes.jsonl", both(*changed))) if first.kind == "optimizer"
    ]
    assert [(first.parts, first.step) for first in found] == [([], AT)] * is_said


def test_updates_that_follow_the_rate_of_their_own_group_are_no_alarm(tmp_path: Path) -> None:
    """Where the rate of the first group falls, and the others have another one."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            factor = 0.6 ** (min(6, max(0, step - AT) / 5))
            row |= {"lr": 1e-3 * factor, "update_ratio/embedding": row["update_ratio/embedding"] * factor}
            others = {"of": [part for part in PARTS if part != "embedding"], "lr": 1e-3}
            row["settings"] = {"0.0": {"of": ["embedding"], "lr": 1e-3 * factor}, "0.1": others}

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


def test_updates_that_weights_round_away_as_the_rate_ends_are_no_alarm(tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row and step >= AT:
            factor = max(0.01, 1 - (step - AT) / 90)
            row["lr"] *= factor
            for column in of_all("update_ratio"):
                row[column] *= factor * (0.1 if factor < 0.05 else 1)

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


def test_updates_of_a_warm_up_that_goes_on_are_not_too_small(tmp_path: Path) -> None:
    def warms_up(row: Row, step: int) -> None:
        if "lr" in row:
            factor = (step + 1) / 1e5
            row |= {"lr": 1e-3 * factor} | {column: row[column] * factor for column in of_all("update_ratio")}

    assert not findings(planted(tmp_path / "probes.jsonl", both(sure(12.0, deviation=1.0), warms_up)))


@pytest.mark.parametrize(("factor", "is_said"), [(1e-3, True), (0.1, False)])
def test_an_embedding_that_is_tiny_at_first_is_said(factor: float, is_said: bool, tmp_path: Path) -> None:
    """Before what its first block makes of it."""
    logits = sets(0.01, "attention_logit_max/block0", at=0)
    tiny = [times(factor, "param_rms/embedding", at=0), *([logits] if is_said else [])]
    found = findings(planted(tmp_path / "probes.jsonl", both(sure(12.0, deviation=1.0), *tiny)))
    said = [(first.kind, first.parts, first.since, first.step) for first in found]
    assert said == [("weights", ["embedding"], None, 0)] * is_said


@pytest.mark.parametrize(("label_loss", "of_a_block", "is_said"), [(12, 1.0, True), (2, 1.0, False), (12, 1.2, False)])
def test_weights_and_a_residual_stream_that_are_large_at_first_are_said(
    label_loss: float, of_a_block: float, is_said: bool, tmp_path: Path
) -> None:
    """Of a model that has just been made, since training may have made them large, also of one with a new head."""
    grown = [times(50, "param_rms/embedding", at=0), times(20, *of_all("block_rms"), at=0)]
    trained = times(of_a_block, "param_rms/block2", at=0)
    found = findings(planted(tmp_path / "probes.jsonl", both(sure(label_loss, deviation=1.0), trained, *grown)))
    said = [(first.kind, first.parts, first.since, first.step) for first in found]
    assert said == [("weights", ["embedding"], None, 0), ("activations", [], None, 0)] * is_said


@pytest.mark.parametrize(("untrained", "is_said"), [(1.0, True), (0.0, False)])
def test_what_was_trained_for_another_task_is_not_of_initial_values(
    untrained: float, is_said: bool, tmp_path: Path
) -> None:
    """As GPT-2 with a new head, whose matrices have grown, and whose labels are no more likely than others."""

    def tell(row: Row, step: int) -> None:
        if step == 0:
            row |= {f"weight_gain/{block}": 5.7 for block in BLOCKS}
            row |= {f"constant_norms/{block}": untrained for block in BLOCKS}

    found = findings(planted(tmp_path / "probes.jsonl", both(sure(12.0, deviation=4.0), tell)))
    assert [each.kind for each in found] == ["weights", "output_logits"] * is_said


@pytest.mark.parametrize(("lists", "is_said"), [("aaaa", True), ("aaab", False), ("aabb", False)])
def test_a_block_that_is_untrained_is_said_beside_others_of_its_list(lists: str, is_said: bool, tmp_path: Path) -> None:
    shares = [holds(float(block == "block3"), f"constant_norms/{block}") for block in BLOCKS]
    found = findings(in_lists(planted(tmp_path / "probes.jsonl", both(*shares)), lists))
    assert [(each.kind, each.parts, each.since) for each in found] == [("weights", ["block3"], None)] * is_said


@pytest.mark.parametrize("is_known", [True, False])
def test_numbers_of_blocks_whose_matrices_are_as_usual_may_be_large_at_first(is_known: bool, tmp_path: Path) -> None:
    """As biases of positions are, which are looked up."""

    def tell(row: Row, step: int) -> None:
        if step == 0 and is_known:
            row |= {f"weight_gain/{block}": 0.6 for block in BLOCKS}

    grown = times(50, *(f"param_rms/{block}" for block in BLOCKS), at=0)
    found = findings(planted(tmp_path / "probes.jsonl", both(sure(12.0, deviation=1.0), grown, tell)))
    assert [first.kind for first in found] == ["weights"] * (not is_known)


@pytest.mark.parametrize("healthy", [sure(label_loss=2.0), sure(label_loss=12.0, deviation=1.0)])
def test_a_model_may_be_sure_and_right_from_the_first_row_or_know_nothing(healthy: Any, tmp_path: Path) -> None:
    """As one that was loaded, or one that has just been made."""
    assert not findings(planted(tmp_path / "probes.jsonl", healthy))


def searches_scale(row: Row, step: int) -> None:
    """A loss scaler halves a scale that is too large at first, and leaves out updates until it is not."""
    if "lr" in row:
        row["loss_scale"] = 2.0 ** max(26 - step, 8)
        row |= {f"gradient_not_finite/{part}": ["w.1"] for part in PARTS} if step < 18 else {}


def begins_at_zero(row: Row, step: int) -> None:
    """Behind two matrices that are zero at first, there are no gradients in two updates."""
    row |= {f"gradient_zero/{block}": ["w.1"] for block in BLOCKS} if step < 2 and "lr" in row else {}


@pytest.mark.parametrize("every", [1, 5, 20])
@pytest.mark.parametrize("begins", [searches_scale, begins_at_zero])
def test_nothing_is_said_of_how_training_may_begin(
    begins: Callable[[Row, int], None], every: int, tmp_path: Path
) -> None:
    assert not findings(planted(tmp_path / "probes.jsonl", begins, every=every))


OF_START = {
    "the loss falls ever faster": lambda row, step: row.update(loss=row["loss"] + 16 - (min(step, 120) / 30) ** 2),
    "the rate warms up": lambda row, step: row.update(lr=1e-5 * min(step, 120)) if "lr" in row else None,
}


@pytest.mark.parametrize("start", OF_START)
@pytest.mark.parametrize("leap", ["output_logit_rms", "block_rms/block2", "update_ratio/block2", "grad_rms/head"])
def test_changes_are_judged_once_training_has_settled(start: str, leap: str, tmp_path: Path) -> None:
    def logits(row: Row, step: int) -> None:
        if "lr" in row:
            row["output_logit_rms"] = 1 + 0.01 * math.sin(step)

    def said(at: int) -> list[Finding]:
        return findings(planted(tmp_path / "probes.jsonl", both(OF_START[start], logits, times(20, leap, at=at))))

    assert not said(100)
    assert said(AT)[0].step == AT


@pytest.mark.parametrize(("label_loss", "at", "is_said"), [(12.5, 60, False), (12.5, AT, True), (2.0, 60, True)])
def test_changes_of_a_model_that_knows_nothing_are_judged_once_its_loss_has_fallen(
    label_loss: float, at: int, is_said: bool, tmp_path: Path
) -> None:
    def plateau(row: Row, step: int) -> None:
        row["loss"] = 5 - 3 * min(1.0, max(0.0, (step - 70) / 10)) + np.random.default_rng(step).normal(0, 0.03)

    fault = both(plateau, sure(label_loss, deviation=1.0), times(20, "grad_rms/head", at=at))
    found = [(each.kind, each.step) for each in findings(planted(tmp_path / "probes.jsonl", fault))]
    assert found == [("gradients", at)] * is_said


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"lr": (1e-3, 0.0)}, "rate", "lr of the weights of block2 and block3 went from 0.001 to 0"),
        ({"lr": (1e-3, 1e-5)}, "rate", "lr of the weights of block2 and block3 went from 0.001 to 1e-5"),
        ({"lr": (1e-3, 5e-5)}, "rate", "lr of the weights of block2 and block3 went from 0.001 to 5e-5"),
        ({"lr": (1e-3, 3e-2)}, "rate", "lr of the weights of block2 and block3 went from 0.001 to 0.03"),
        ({"beta2": (0.95, 0.0)}, "optimizer", "beta2 of the weights of block2 and block3 went from 0.95 to 0"),
        (
            {"momentum": (0.9, 0.999)},
            "optimizer",
            "momentum of the weights of block2 and block3 went from 0.9 to 0.99",
        ),
        ({"weight_decay": (0.0, 0.1)}, "optimizer", "weight_decay of the weights of block2 and block3 went from 0 to"),
        ({"maximize": (0, 1)}, "optimizer", "maximize of the weights of block2 and block3 went from 0 to 1"),
        (
            {"weights_without_their_state": (0, 9)},
            "optimizer",
            "weights_without_their_state of the weights of",
        ),
        (
            {"updates_in_a_step": (1, 2)},
            "optimizer",
            "updates_in_a_step of the weights of block2 and block3",
        ),
        ({"updates_in_a_step": (1, 0)}, "frozen", "updates_in_a_step of the weights of block2 and block3"),
        ({"eps": (1e-8, 1.0), "beta1": (0.9, 0.0)}, "optimizer", "eps of the weights of block2 and block3 went from"),
    ],
)
@pytest.mark.parametrize("every", [5, 100])
def test_a_setting_that_jumps_is_said_with_both_values_its_step_and_its_weights(
    settings: Row, kind: str, words: str, every: int, tmp_path: Path
) -> None:
    """Also where the rows around it lie far apart, and whatever else moves at the next row."""
    fault = both(told(**settings), times(20, "grad_rms/block1", "output_logit_rms", at=AT + 3))
    first = findings(planted(tmp_path / "probes.jsonl", fault, every))[0]
    assert (first.kind, first.parts, first.since, first.step) == (kind, ["block2", "block3"], AT + 2, AT + 3)
    assert words in sentence(first)
    assert f"at step {AT + 3}" in sentence(first)


def test_what_moves_with_a_learning_rate_that_jumps_is_said_after_it(tmp_path: Path) -> None:
    fault = both(told(lr=(1e-3, 3e-2)), times(20, "grad_rms/block1", at=AT + 3))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert "With it or later: grad_rms of block1" in sentence(found)


SCHEDULES: dict[str, dict[str, list[tuple[int, Any]]]] = {
    "a warm-up from zero": {"lr": [(0, 0.0), *((step, [(step - 1) / 60, step / 60]) for step in (1, 2)), (60, 1.0)]},
    "step decay by tens": {"lr": [(0, 1.0), (150, [1.0, 0.1]), (250, [0.1, 0.01])]},
    "a rate that ends at zero": {"lr": [(0, 1.0), (200, 0.3), (299, [0.1, 0.0])]},
    "a cosine to zero": {"lr": [(0, 1.0), (200, 0.25), (298, [0.01, 0.0])]},
    "momentum in one cycle": {"momentum": [(0, 0.95), (100, 0.85), (200, 0.95)]},
    "a part that is unfrozen": {"lr": [(0, 0.0), (200, [0.0, 1.0])]},
    "a number that counts": {"k": [(0, 0), *((step, [step - 1, step]) for step in (1, 2, 3)), (100, 100)]},
    "an exponential decay": {"lr": [(step, 0.97**step) for step in range(0, 300, 5)]},
    "a constant rate with a decay at the end": {"lr": [(0, 1.0), (270, 1.0), (280, 0.1), (290, 1e-3), (299, 1e-6)]},
    "three drops": {"lr": [(0, 1.0), (100, [1.0, 0.1]), (180, [0.1, 0.01]), (250, [0.01, 1e-3])]},
    "restarts": {"lr": [(0, 1.0), (100, 0.2), (101, [0.2, 0.5]), (200, 0.1)]},
    "a step decay": {"lr": [(0, 1.0), (150, [1.0, 0.2]), (299, 0.2)]},
    "a weight decay that grows all the time": {
        "weight_decay": [(step, 0.01 * 1.02**step) for step in range(0, 300, 5)]
    },
    "a weight decay that ends": {
        "weight_decay": [(0, 0.1), *((step, 0.0005 * (300 - step)) for step in range(200, 300, 5))]
    },
    "a run without clipping that is resumed": {"max_norm": [(0, math.inf), (200, math.inf)]},
    "a weight decay that grows, told seldom": {"decay": [(step, 0.04 + step / 800) for step in range(0, 300, 100)]},
    "an update that a loss scaler leaves out": {"updates_in_a_step": [(150, [1, 0]), (151, [0, 1])]},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_no_jump(name: str, tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        for setting, values in SCHEDULES[name].items():
            for at, value in values if "loss" in row else ():
                if at == step:
                    row["settings"] = {"0.0": {"of": ["block0"], setting: value}}

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


@pytest.mark.parametrize("every", [5, 100])
def test_a_rate_that_warms_up_once_more_is_said(every: int, tmp_path: Path) -> None:
    told = [(0, 0.02), (50, 1.0), (203, [1.0, 0.05]), (204, [0.05, 0.1]), (205, 0.15), (222, 1.0)]

    def tell(row: Row, step: int) -> None:
        for at, value in told:
            if at == step:
                row["settings"] = {"0.0": {"of": ["block0"], "lr": value}}

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell, every))
    assert (found.kind, found.since, found.step) == ("rate", 202, 203)


@pytest.mark.parametrize(("peak", "is_said"), [(20.0, True), (5.0, False)])
def test_a_rate_that_rises_to_another_peak_is_said_where_it_begins(peak: float, is_said: bool, tmp_path: Path) -> None:
    rates: dict[int, Any] = {200 + step: 1 + (peak - 1) * step / 30 for step in range(1, 31)}
    rates |= {0: 1.0, 201: [1.0, rates[201]]}

    def tell(row: Row, step: int) -> None:
        if step in rates:
            row["settings"] = {"0.0": {"of": PARTS, "lr": rates[step]}}

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == [("rate", 201)] * is_said


@pytest.mark.parametrize(("setting", "growth"), [("weight_decay", 1.3), ("max_norm", 0.95)])
def test_a_setting_that_was_constant_and_goes_away_step_by_step_is_said(
    setting: str, growth: float, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row and (step == 0 or step > AT):
            row["settings"] = {"0.0": {"of": PARTS, setting: 0.1 * growth ** max(0, step - AT - 2)}}

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell))
    assert (found.kind, found.since, found.step) == ("optimizer", AT, AT + 5)
    assert f"{setting} went from 0.1 to" in sentence(found)


def test_a_rate_that_drops_again_and_again_after_it_was_constant_is_said_at_the_first_drop(tmp_path: Path) -> None:
    """Of a scheduler that takes each step for one without progress."""
    told = [(0, 1.0), (203, [1.0, 0.1]), (213, [0.1, 0.01]), (223, [0.01, 1e-3])]

    def tell(row: Row, step: int) -> None:
        for at, value in told:
            if at == step:
                row["settings"] = {"0.0": {"of": ["block0"], "lr": value}}

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell))
    assert (found.kind, found.since, found.step) == ("rate", 202, 203)


@pytest.mark.parametrize("every", [5, 20])
def test_a_schedule_that_ends_long_before_the_run_is_said_where_it_hastens(every: int, tmp_path: Path) -> None:
    """Of a scheduler that is stepped with each of 16 micro-batches; nothing of one that always falls as fast."""

    def tell(hastens: int) -> Callable[[Row, int], None]:
        def schedule(row: Row, step: int) -> None:
            if step % every == 0:
                value = 0.995 ** (step + 15 * max(0, step - hastens))
                row["settings"] = {"0.0": {"of": ["block0"], "lr": value}}

        return schedule

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell(120), every))
    since = 120 - 120 % every
    assert (found.kind, found.since, found.step) == ("rate", since, since + every)
    assert not findings(planted(tmp_path / "probes.jsonl", tell(0), every))


def test_a_rate_that_is_as_good_as_zero_between_two_rows_is_said(tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if step % 100 == 0:
            row["settings"] = {"0.0": {"of": ["block0"], "lr": 1e-3 if step < AT else 1e-10}}

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell, 100))
    assert (found.kind, found.since, found.step) == ("rate", AT - 100, AT)


@pytest.mark.parametrize("every", [5, 100])
@pytest.mark.parametrize("schedule", [lambda part: 1 - part, lambda part: (1 + math.cos(math.pi * part)) / 2])
def test_a_schedule_that_is_at_zero_long_before_the_run_ends_is_said(
    schedule: Callable[[float], float], every: int, tmp_path: Path
) -> None:
    def tell(end: int) -> Callable[[Row, int], None]:
        def at(step: int) -> float:
            return max(0.0, schedule(step / end)) if step < end else 0.0

        def written(row: Row, step: int) -> None:
            jumps = step and at(step) < at(step - 1) / 1.5
            if jumps or step % every == 0:
                row["settings"] = {"0.0": {"of": ["block0"], "lr": [at(step - 1), at(step)] if jumps else at(step)}}

        return written

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell(203), every))
    assert (found.kind, found.step) == ("rate", 203)
    assert not findings(planted(tmp_path / "probes.jsonl", tell(STEPS), every))


@pytest.mark.parametrize("every", [5, 100])
@pytest.mark.parametrize("falls", [False, True])
@pytest.mark.parametrize("factor", [1 / 5, 2.5])
def test_a_rate_of_a_group_that_leaves_those_of_the_others_is_said(
    factor: float, falls: bool, every: int, tmp_path: Path
) -> None:
    """And not a schedule that moves all groups, nor groups of which rates never had one ratio."""

    def tell(of_first: float, of_second: float, drift: float = 0.0) -> Callable[[Row, int], None]:
        def written(row: Row, step: int) -> None:
            first, before = (1 - at / 600 if falls else 1.0 for at in (step, step - 1))
            second, before_it = (0.1 * value * (1 + drift * at) for value, at in ((first, step), (before, step - 1)))
            if step == AT + 3:
                row["settings"] = {"0.1": {"lr": [before_it, of_second * second]}}
                row["settings"] |= {"0.0": {"lr": [before, of_first * first]}} if of_first != 1 else {}
            elif step % every == 0:
                rates = {"0.0": first, "0.1": second} if step < AT + 3 else {"0.0": of_first * first}
                row["settings"] = {group: {"lr": rate, "of": PLACES[group]} for group, rate in rates.items()}

        return written

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell(1.0, factor), every))
    assert (found.kind, found.parts, found.since, found.step) == ("rate", ["head"], AT + 2, AT + 3)
    assert not findings(planted(tmp_path / "probes.jsonl", tell(factor, factor), every))
    assert not findings(planted(tmp_path / "probes.jsonl", tell(1.0, factor, drift=0.01), every))


PLACES = {"0.0": ["block0", "block1"], "0.1": ["head"]}


@pytest.mark.parametrize(
    ("parts", "every", "words", "shape", "is_said"),
    [
        (BLOCKS, 5, ["now add(add, input)"], None, True),
        (BLOCKS, 100, [], None, True),
        (["block1"], 5, [], None, True),
        (["block1"], 100, ["now add(add, input)"], None, True),
        (["block1"], 100, ["no longer mlp.add(mlp.down.linear, input)"], None, True),
        (["block1"], 100, ["no longer layer.1.add(layer.0.add, layer.1.mlp.linear)"], None, True),
        (["block1"], 100, ["no longer mlp.add(mlp.linear, input)", "no longer mlp.linear(input)"], None, False),
        (["block1"], 100, [], None, False),  # which may come after another one by chance
        (BLOCKS, 5, ["now add(add, input)"], [8, 16], False),
    ],
)
def test_calls_that_differ_are_said_unless_chance_or_the_shape_of_a_batch_makes_them_differ(
    parts: Sequence[str], every: int, words: list[str], shape: list[int] | None, is_said: bool, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        if step in (0, AT):
            row |= {f"code/{part}": step for part in (PARTS if step == 0 else parts)}
        if step == AT and words:
            row |= {f"calls/{part}": words for part in parts}
        if step == 0 or (shape and step == AT):
            row["given"] = [f"0 int64 {shape if step else [8, 32]}"]

    said = [
        (each.kind, each.parts, each.since, each.step)
        for each in findings(planted(tmp_path / "probes.jsonl", tell, every))
    ]
    assert said == [("activations", sorted(parts), AT - every, AT)] * is_said


def test_calls_of_the_head_are_told_in_few_rows(tmp_path: Path) -> None:
    other = other_calls("head", "no longer lm_head.linear(norm.layer_norm)", "now lm_head.linear(input)")
    found = findings(planted(tmp_path / "probes.jsonl", other, 100))
    assert [(each.kind, each.parts, each.step) for each in found] == [("output_logits", ["head"], AT)]


@pytest.mark.parametrize(("parts", "kind"), [(["embedding"], "data"), (["block1"], "activations")])
def test_code_of_positions_may_follow_from_the_shape_of_a_batch(parts: list[str], kind: str, tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if step in (0, AT):
            row["given"] = [f"0 int64 {[1 if step else 8, 24]}"]

    fault = both(tell, calls(*parts), holds(192.0, "label_count"), sets(24.0, "label_count"))
    assert findings(planted(tmp_path / "probes.jsonl", fault))[0].kind == kind


def test_a_module_that_calls_attention_otherwise_is_said_to_be_of_attention(tmp_path: Path) -> None:
    def tell(name: str) -> Callable[[Row, int], None]:
        def written(row: Row, step: int) -> None:
            if step in (0, AT):
                row |= {f"code/{part}": step for part in BLOCKS}
            if step == AT:
                row |= {f"calls/{part}": [f"now {name}.mul(input)"] for part in BLOCKS}
            if step >= AT and "lr" in row:
                row["attention_logit_max/block0"] *= 4

        return written

    for name, kind in (("self_attn", "attention"), ("mlp", "activations")):
        assert findings(planted(tmp_path / "probes.jsonl", tell(name)))[0].kind == kind


def writes(*steps: int) -> Callable[[Row, int], None]:
    def tell(row: Row, step: int) -> None:
        if step in steps and step - 1 not in steps:
            row["written"] = {"block1": ["blocks.1.w"], "head": ["head.w"]}
        if step - 1 in steps and step not in steps:
            row["written"] = {}

    return tell


@pytest.mark.parametrize("every", [5, 100])
@pytest.mark.parametrize("steps", [[203], range(203, STEPS), [203, 253]])
def test_weights_that_something_else_writes_are_said_with_their_step(
    steps: list[int], every: int, tmp_path: Path
) -> None:
    fault = both(writes(*steps), times(20, "block_rms/block2", "update_ratio/block0", at=203))
    first = findings(planted(tmp_path / "probes.jsonl", fault, every))[0]
    assert (first.kind, first.parts, first.since, first.step) == ("weights", ["head", "block1"], 202, 203)
    assert "weights of head and block1 moved first" in sentence(first)
    assert "(blocks.1.w, head.w), at step 203" in sentence(first)


@pytest.mark.parametrize("steps", [range(STEPS), range(10, STEPS, 50), range(100, STEPS, 50)])
def test_what_writes_weights_by_habit_is_no_alarm(steps: range, tmp_path: Path) -> None:
    assert not findings(planted(tmp_path / "probes.jsonl", writes(*steps)))


@pytest.mark.parametrize("often", [10, 45])
def test_what_begins_late_to_write_weights_again_and_again_is_said(often: int, tmp_path: Path) -> None:
    (found,) = findings(planted(tmp_path / "probes.jsonl", writes(*range(203, STEPS, often))))
    assert (found.kind, found.step) == ("weights", 203)


@pytest.mark.parametrize(
    ("frozen", "names", "said"),
    [
        (["block2"], "aaaa", ["block2"]),
        (["block0", "block1"], "aaaa", []),  # by plan
        (["block2", "block3"], "aabb", []),  # as a decoder that was trained before
        ([*BLOCKS], "aaaa", []),
    ],
)
def test_a_block_that_never_is_trained_is_said_if_one_before_it_is(
    frozen: list[str], names: str, said: list[str], tmp_path: Path
) -> None:
    def freeze(row: Row, step: int) -> None:
        for name in [name for name in row if name.partition("/")[2] in frozen and not name.startswith("block_rms")]:
            del row[name]

    found = findings(in_lists(planted(tmp_path / "probes.jsonl", freeze), names))
    assert [(each.kind, each.parts, each.since) for each in found] == [("frozen", said, None)] * bool(said)
    assert not found or sentence(found[0]).startswith("step 0: block2 is not trained, and a block before it is")


@pytest.mark.parametrize("every", [5, 100])
def test_gradients_that_are_left_again_are_said_beside_those_from_before_the_loop(every: int, tmp_path: Path) -> None:
    def leave(row: Row, step: int) -> None:
        if "lr" in row:
            row["grad_left/block0"] = 0.01 * (step == 0 or step >= AT)

    (found,) = findings(planted(tmp_path / "probes.jsonl", leave, every=every))
    assert (found.kind, found.step) == ("gradients", AT)
    assert "no longer zero" in sentence(found)


@pytest.mark.parametrize(("share", "is_said"), [(1.0, True), (0.75, False)])
def test_attention_that_sees_much_more_for_good_is_said(share: float, is_said: bool, tmp_path: Path) -> None:
    """As of documents in one row that see one another from a step on."""

    def see(row: Row, step: int) -> None:
        if "lr" in row:
            mask = 0.58 + 0.06 * math.sin(step) if step < AT else share
            row |= {f"attention_seen/{block}": mask for block in BLOCKS}

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", see))]
    assert said == [("attention", AT)] * is_said


@pytest.mark.parametrize(("share", "is_said"), [(0.8, True), (0.25, False)])
def test_labels_that_are_the_next_tokens_and_were_not_are_said(share: float, is_said: bool, tmp_path: Path) -> None:
    """As those of masked tokens that are shifted."""
    fault = both(holds(0.05, "label_next"), sets(share, "label_next"))
    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", fault))]
    assert said == [("data", AT)] * is_said


def test_what_is_written_beside_a_habit_is_said(tmp_path: Path) -> None:
    """As beside an average of the weights that is a part of the model."""

    def tell(row: Row, step: int) -> None:
        if step in (1, 203, 204):
            row["written"] = {"other": ["average.w"]} | ({"head": ["head.w"]} if step == 203 else {})

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell))
    assert (found.kind, found.parts, found.weights, found.step) == ("weights", ["head"], ["head.w"], 203)


def test_what_was_written_names_the_part_from_which_nothing_is_finite(tmp_path: Path) -> None:
    fault = both(writes(203), sets(["w.1"], *(f"weight_not_finite/{part}" for part in PARTS), at=203))
    first = findings(planted(tmp_path / "probes.jsonl", fault, every=50))[0]
    assert (first.kind, first.parts, first.since, first.step) == ("not_finite", ["head", "block1"], 202, 203)


def test_code_that_changes_from_row_to_row_is_no_alarm(tmp_path: Path) -> None:
    """As of experts that get no tokens, or of a batch without padding."""

    def tell(row: Row, step: int) -> None:
        if step % 50 == 0:
            row["functions/block1"] = ["gelu", "where"] if step % 100 else ["gelu"]

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


def test_weights_that_lack_a_gradient_now_and_then_are_no_alarm(tmp_path: Path) -> None:
    """As of a block that some batches skip."""

    def skip(row: Row, step: int) -> None:
        if step in (120, 200, 290):
            row["gradient_missing/block1"] = ["w.1"]

    assert not findings(planted(tmp_path / "probes.jsonl", skip))


def test_blocks_that_are_trained_in_turn_are_not_frozen(tmp_path: Path) -> None:
    """In each hundred steps another one, of which three rows show that two lose their gradients."""

    def tell(row: Row, step: int) -> None:
        for number, block in enumerate(BLOCKS if "lr" in row else ()):
            if number != step // 100:
                del row[f"grad_rms/{block}"]
            if number < step // 100:
                row[f"gradient_missing/{block}"] = [f"blocks.{number}.w"]

    assert not findings(planted(tmp_path / "probes.jsonl", tell, every=100))


def test_updates_that_are_zero_now_and_then_or_where_the_rate_is_low_are_no_alarm(tmp_path: Path) -> None:
    """As those of single numbers, of which signs are left out, and those that are rounded away at the end."""

    def skip(row: Row, step: int) -> None:
        if "lr" in row and step % 15 == 10:
            row["update_zero/block1"] = ["scale"] if step < STEPS - 5 else ["shift"]

    ends = both(times(0.1, "lr", at=AT - 50), sets(["w.1"], "update_zero/block1"))
    for fault in (skip, ends):
        assert "frozen" not in [found.kind for found in findings(planted(tmp_path / "probes.jsonl", fault))]


@pytest.mark.parametrize(
    ("name", "at", "is_said"),
    [
        ("blocks.2.norm1.weight", 0, False),
        ("blocks.2.norm1.weight", AT, True),
        ("blocks.2.norm1.bias", 0, True),
        ("blocks.2.up.weight", 0, True),
    ],
)
def test_a_norm_of_zeros_has_an_idle_gain(name: str, at: int, is_said: bool, tmp_path: Path) -> None:
    """As before the first block of a decoder that begins with queries of zeros."""
    for what, kind in (("gradient_zero", "dead"), ("update_zero", "frozen")):
        found = findings(planted(tmp_path / "probes.jsonl", sets([name], f"{what}/block2", at=at)))
        assert [(each.kind, each.parts) for each in found] == [(kind, ["block2"])] * is_said


@pytest.mark.parametrize("zero_at_first", [[], ["block0", "block2"]])
def test_gradients_that_are_zero_in_the_last_row_alone_are_said(zero_at_first: list[str], tmp_path: Path) -> None:
    """Of three rows, in which they never were before, though others may be, as behind adapters that begin at zero."""

    def at_first(row: Row, step: int) -> None:
        row |= {f"gradient_zero/{block}": ["w.0"] for block in (zero_at_first if step == 0 else ())}

    fault = both(at_first, sets(["w.1"], "gradient_zero/block1"))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault, every=100))
    assert (found.kind, found.parts, found.since, found.step) == ("dead", ["block1"], AT - 100, AT)


@pytest.mark.parametrize(
    ("column", "kind"),
    [("router_logit_max", "router"), ("attention_logit_max", "attention"), ("block_rms", "activations")],
)
def test_what_is_zero_in_the_last_row_alone_is_said(column: str, kind: str, tmp_path: Path) -> None:
    """Of three rows, since each hundredth update is recorded."""
    zero = both(holds(2.0, *(f"{column}/{block}" for block in BLOCKS)), sets(0.0, f"{column}/block2"))
    (found,) = findings(planted(tmp_path / "probes.jsonl", zero, every=100))
    assert (found.kind, found.parts, found.since, found.step) == (kind, ["block2"], AT - 100, AT)


@pytest.mark.parametrize(("blocks", "is_said"), [(1, True), (4, False)])
def test_attention_of_one_block_that_sees_one_token_in_the_last_row_is_said(
    blocks: int, is_said: bool, tmp_path: Path
) -> None:
    collapsed = sets(0.01, *of_all("attention_entropy")[:blocks])
    said = [(found.kind, found.parts) for found in findings(planted(tmp_path / "probes.jsonl", collapsed, every=100))]
    assert said == [("attention", ["block0"])] * is_said


def test_logits_that_are_negative_are_not_zero(tmp_path: Path) -> None:
    negative = sets(-0.1, *of_all("attention_logit_max"))
    assert not findings(planted(tmp_path / "probes.jsonl", negative, every=100))


@pytest.mark.parametrize(("lasts", "noise", "is_said"), [(STEPS, 0.02, True), (10, 0.02, False), (STEPS, 0.5, False)])
@pytest.mark.parametrize("fall", [0.35, 0.2])
def test_a_reward_that_falls_by_less_than_half_and_stays_there_is_said(
    fall: float, lasts: int, noise: float, is_said: bool, tmp_path: Path
) -> None:
    """But neither one that does so in two rows, nor one whose noise is as large."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            learned = 0.5 + 0.4 * min(1.0, step / 100) - fall * (AT <= step < AT + lasts)
            row["reward"] = learned + np.random.default_rng(step).uniform(-noise, noise)

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == [("reward", AT)] * is_said


def test_a_reward_that_falls_in_a_row_and_is_learned_anew_is_said(tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            fall = 0.3 * 0.6 ** ((step - AT) // 5) if step >= AT else 0
            row["reward"] = 0.5 + 0.4 * min(1.0, step / 100) - fall + np.random.default_rng(step).uniform(-0.02, 0.02)

    (found,) = findings(planted(tmp_path / "probes.jsonl", tell))
    assert (found.kind, found.step) == ("reward", AT)


@pytest.mark.parametrize(
    ("factor", "until", "is_said"),
    [(0.8, STEPS, True), (1.25, STEPS, True), (0.8, AT + 20, False), (0.97, STEPS, False)],
)
def test_tokens_that_differ_a_little_less_for_good_are_said(
    factor: float, until: int, is_said: bool, tmp_path: Path
) -> None:
    """But not if they do so in four rows, or by as little as noise does."""
    shifts = times(factor, "token_perplexity", until=until)
    said = findings(planted(tmp_path / "probes.jsonl", both(varies("token_perplexity", 24.0, noise=0.06), shifts)))
    assert [(found.kind, found.step) for found in said] == [("data", AT)] * is_said


@pytest.mark.parametrize(("lowest", "is_said"), [(0.5, True), (0.88, False)])
def test_a_reward_that_falls_slowly_is_said_where_its_divergence_turned(
    lowest: float, is_said: bool, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            noise = np.random.default_rng(step).uniform(-0.03, 0.03)
            row["reward"] = max(lowest, 0.5 + 0.4 * min(1.0, step / 100) - 0.004 * max(0, step - AT)) + noise
            row["kl"] = (0.3 if step < AT else 0.3 * 0.9 ** ((step - AT) / 5 + 2)) * math.exp(noise)

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == [("reward", AT)] * is_said


def test_a_shift_begins_where_rows_on_both_sides_of_it_differ_least(tmp_path: Path) -> None:
    """And not at a row before it that lies below all others by chance."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row and step == AT - 5:
            row["token_perplexity"] = 21.5

    shifts = both(varies("token_perplexity", 24.0, noise=0.02), times(0.7, "token_perplexity"), tell)
    (found,) = findings(planted(tmp_path / "probes.jsonl", shifts))
    assert (found.kind, found.since, found.step) == ("data", AT - 5, AT)


def test_tokens_that_differ_by_next_to_nothing_are_no_alarm(tmp_path: Path) -> None:
    shifts = both(varies("token_perplexity", 24.0, noise=1e-3), times(0.95, "token_perplexity"))
    assert not findings(planted(tmp_path / "probes.jsonl", shifts))


def test_a_shift_that_a_clear_sign_follows_is_told_by_that(tmp_path: Path) -> None:
    """A row before the shift may lie there by chance."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row and step in (AT - 10, AT - 5):
            row["token_perplexity"] = 14.0

    shifts = both(varies("token_perplexity", 24.0, noise=0.01), times(0.45, "token_perplexity"), tell)
    equal = both(holds(1.0, "distinct_rows"), sets(0.3, "distinct_rows"))
    (found,) = findings(planted(tmp_path / "probes.jsonl", both(shifts, equal)))
    assert (found.kind, found.since, found.step) == ("data", AT - 5, AT)


def correlated(seed: int, correlation: float, deviation: float) -> list[float]:
    """Noise of 300 rows, each correlated with the one before it."""
    values = [0.0]
    for noise in np.random.default_rng(seed).normal(size=STEPS)[1:]:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * noise)
    return [deviation * value for value in values]


@pytest.mark.parametrize("seed", range(4))
def test_tokens_whose_variety_varies_in_some_order_are_no_alarm(seed: int, tmp_path: Path) -> None:
    """As of shards with texts of one kind each."""
    values = correlated(seed, 0.9, 0.1)

    def tell(row: Row, step: int) -> None:
        row["token_perplexity"] = 24 * math.exp(values[step])

    assert not findings(planted(tmp_path / "probes.jsonl", tell, every=1))


@pytest.mark.parametrize(("seed", "correlation", "deviation"), [(42, 0.0, 0.1), (4, 0.7, 0.05), (8, 0.7, 0.05)])
def test_a_reward_that_varies_as_much_as_ever_is_no_alarm(
    seed: int, correlation: float, deviation: float, tmp_path: Path
) -> None:
    values = correlated(seed, correlation, deviation)

    def tell(row: Row, step: int) -> None:
        row["reward"] = 0.9 - 0.4 * math.exp(-step / 60) + values[step]

    assert not findings(planted(tmp_path / "probes.jsonl", tell, every=1))


@pytest.mark.parametrize("with_divergence", [True, False])
def test_a_reward_of_tasks_that_get_harder_is_no_alarm(with_divergence: bool, tmp_path: Path) -> None:
    """It falls slowly, and the policy stays as far from its reference as it was."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            noise = np.random.default_rng(step).uniform(-0.03, 0.03)
            row["reward"] = max(0.6, 0.5 + 0.4 * min(1.0, step / 100) - 0.004 * max(0, step - AT)) + noise
            row |= {"kl": 0.3 + noise} if with_divergence else {}

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


def test_a_gradient_that_is_no_longer_that_of_a_cross_entropy_by_what_is_learned_is_no_alarm(tmp_path: Path) -> None:
    """As with a teacher whose part of the loss grows, which the code of the loss had from the start."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            row |= {"cross_entropy": 1.0 if step < AT else 0.05, "grad_norm": 1.0 if step < AT else 2.0}
        if step == 0:
            row["functions/loss"] = ["Add", "MseLoss", "NllLoss"]

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


@pytest.mark.parametrize("usual", [0.7, -0.7])
def test_a_reward_that_turns_negative_or_falls_further_is_said(usual: float, tmp_path: Path) -> None:
    def rewards(fall: float) -> Callable[[Row, int], None]:
        def tell(row: Row, step: int) -> None:
            if "lr" in row:
                row["reward"] = usual + 0.03 * math.sin(step) - (fall if step >= AT else 0)

        return tell

    (found,) = findings(planted(tmp_path / "probes.jsonl", rewards(1.4)))
    assert (found.kind, found.since, found.step) == ("reward", AT - 5, AT)
    assert "reward fell from" in sentence(found)
    assert not findings(planted(tmp_path / "probes.jsonl", rewards(0.05)))


def test_rewards_around_zero_are_no_alarm(tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            row["reward"] = float(np.random.default_rng(step).normal(0, 0.3))

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


@pytest.mark.parametrize(("factor", "parts"), [(16, [["block2"]]), (4, [])])
@pytest.mark.parametrize("every", [5, 100])
def test_logits_of_one_block_that_leap_apart_from_the_others_are_said(
    factor: float, parts: list[list[str]], every: int, tmp_path: Path
) -> None:
    fault = times(factor, "attention_logit_max/block2", at=190)
    assert [found.parts for found in findings(planted(tmp_path / "probes.jsonl", fault, every))] == parts
    of_small = both(times(0.01, *of_all("attention_logit_max"), at=0), fault)
    assert not findings(planted(tmp_path / "probes.jsonl", of_small, every))


@pytest.mark.parametrize(("early", "parts"), [(1.0, [["block2"]]), (2.0, [])])
def test_an_output_that_leaves_others_as_it_did_while_all_were_learning_is_no_alarm(
    early: float, parts: list[list[str]], tmp_path: Path
) -> None:
    at_once = [times(factor, "block_rms/block2", "block_rms/block3", at=at) for factor, at in ((early, 15), (2.5, AT))]
    assert [found.parts for found in findings(planted(tmp_path / "probes.jsonl", both(*at_once)))] == parts


@pytest.mark.parametrize(("factor", "outcome"), [(2.0, "alarm"), (1.0, "changed without harm")])
def test_an_output_that_leaves_others_is_no_alarm_where_neither_loss_nor_gradients_grow(
    factor: float, outcome: str, tmp_path: Path
) -> None:
    fault = both(
        varies("grad_norm", 1.0), times(factor, "grad_norm"), times(2.5, "block_rms/block2", "block_rms/block3")
    )
    made = diagnose(read_recording(planted(tmp_path / "probes.jsonl", fault)))
    assert made.checks["output against other blocks"] == outcome
    assert [found.parts for found in made.findings] == [["block2"]] * (outcome == "alarm")


@pytest.mark.parametrize(("ahead", "kind"), [(0.4, "attention"), (0.0, "activations")])
def test_code_after_which_attention_has_another_mask_is_of_attention(ahead: float, kind: str, tmp_path: Path) -> None:
    columns = [f"attention_ahead/{block}" for block in BLOCKS]
    fault = both(holds(0.0, *columns), sets(ahead, *columns), calls(*BLOCKS, usual="masked_fill(-inf)", then=""))
    for others in ([], [other_calls("block0", "no longer expand(input)", "no longer block.cumsum(input)")]):
        (found,) = findings(planted(tmp_path / "probes.jsonl", both(fault, *others)))
        assert (found.kind, found.step) == (kind, AT)


@pytest.mark.parametrize(
    ("seeing", "names", "following", "parts"),
    [
        (["block2"], "aaaa", 0.1, ["block2"]),
        (["block0", "block3"], "aaaa", 0.1, ["block3"]),  # the first is an encoder
        (["block0", "block1"], "aaaa", 0.1, []),
        (["block1", "block3"], "aaaa", 0.1, []),  # by plan in turns
        (["block2", "block3"], "aabb", 0.1, []),
        (["block0", "block1"], "aabb", 1.0, []),  # an encoder, beside a decoder that predicts next tokens
        (["block0", "block1", "block2"], "aabb", 1.0, ["block2"]),
        ([*BLOCKS], "aabb", 1.0, [*BLOCKS]),
    ],
)
def test_a_block_that_sees_ahead_and_is_of_no_encoder_is_said(
    seeing: list[str], names: str, following: float, parts: list[str], tmp_path: Path
) -> None:
    ahead = [holds(0.4 * (block in seeing), f"attention_ahead/{block}") for block in BLOCKS]
    out = planted(tmp_path / "probes.jsonl", both(*ahead, holds(following, "label_next"), holds(1.0, "label_share")))
    said = [(found.kind, found.parts, found.since) for found in findings(in_lists(out, names))]
    assert said == [("attention", parts, None)] * bool(parts)


@pytest.mark.parametrize(
    ("ahead", "loss", "kinds"),
    [(0.0, 0.01, ["data"]), (0.5, 0.01, []), (0.0, 0.3, [])],  # as of an encoder, and of actions that come later
)
def test_labels_that_are_not_shifted_are_said_where_a_decoder_copies_them(
    ahead: float, loss: float, kinds: list[str], tmp_path: Path
) -> None:
    def learn(row: Row, step: int) -> None:
        row["loss"] *= loss + (1 - loss) * math.exp(-step / 20)

    sees = [holds(ahead, f"attention_ahead/{block}") for block in BLOCKS]
    fault = both(learn, *sees, holds(1.0, "label_same"), holds(0.0, "label_next"), holds(1.0, "label_share"))
    said = findings(planted(tmp_path / "probes.jsonl", fault))
    assert [(found.kind, found.parts, found.since, found.step) for found in said] == [(k, [], None, 0) for k in kinds]


@pytest.mark.parametrize(("rise", "kind"), [(18.0, "reward"), (-18.0, "gradients")])
def test_rewards_on_another_scale_explain_gradients_that_grow(rise: float, kind: str, tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            row["reward"] = 1.5 + 0.3 * math.sin(step) + rise * (step >= AT)

    (found,) = findings(planted(tmp_path / "probes.jsonl", both(tell, times(40, *of_all("grad_rms")))))
    assert (found.kind, found.step) == (kind, AT)


@pytest.mark.parametrize(("loss", "kinds"), [(-1.0, []), (0.0, ["data"])])
def test_gradients_that_grow_with_what_is_learned_are_no_alarm(loss: float, kinds: list[str], tmp_path: Path) -> None:
    def learn(row: Row, step: int) -> None:
        row["loss"] += loss * min(1.0, max(0.0, (step - AT) / 20))

    fault = both(learn, times(12, *of_all("grad_rms"), until=AT + 20))
    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", fault))][:1] == kinds


@pytest.mark.parametrize(
    ("factor", "lasts", "steps"), [(0.5, STEPS, 1), (0.5, 6, 1), (0.5, STEPS, 20), (0.9, STEPS, 1)]
)
def test_a_loss_that_falls_in_one_step_and_stays_low_is_said(
    factor: float, lasts: int, steps: int, tmp_path: Path
) -> None:
    """But neither one that comes back, nor one that takes 20 steps, nor a small one."""

    def learn(row: Row, step: int) -> None:
        if 203 <= step < 203 + lasts:
            row["loss"] *= 1 - (1 - factor) * min(1.0, (step - 202) / steps)

    said = [
        (found.kind, found.since, found.step, sentence(found).count("the loss fell in one step"))
        for found in findings(planted(tmp_path / "probes.jsonl", learn))
    ]
    assert said == [("data", 202, 203, 1)] * ((factor, lasts, steps) == (0.5, STEPS, 1))


def test_a_loss_that_falls_with_the_learning_rate_is_no_alarm(tmp_path: Path) -> None:
    """As that of a vision model where the rate falls to a tenth."""

    def decays(row: Row, step: int) -> None:
        row["loss"] *= 0.5 if step >= AT else 1.0
        if step >= AT and "lr" in row:
            row |= {"lr": row["lr"] / 10} | {column: row[column] / 10 for column in of_all("update_ratio")}

    assert not findings(planted(tmp_path / "probes.jsonl", decays))


@pytest.mark.parametrize(("factor", "is_said"), [(0.1, True), (0.5, False)])
def test_no_model_learns_at_once_what_makes_its_loss_a_tenth(factor: float, is_said: bool, tmp_path: Path) -> None:
    """While it learns its first things, the loss may halve."""

    def learns(row: Row, step: int) -> None:
        falls = 3.5 - (step / 200) ** 2 + np.random.default_rng(step).normal(0, 1e-4)
        row["loss"] = falls * (factor if step >= AT else 1)

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", learns))]
    assert said == [("data", AT)] * is_said


def test_the_end_of_a_steep_fall_of_the_loss_is_no_rise(tmp_path: Path) -> None:
    def learn(row: Row, step: int) -> None:
        random = np.random.default_rng(step)
        row["loss"] = 3 - 1.5 / (1 + math.exp((AT - step) / 2)) + random.normal(0, 0.002 if step < AT else 0.01)

    out = planted(tmp_path / "probes.jsonl", learn)
    assert not findings(out)
    assert not any(find_alarms(out).events.values())


@pytest.mark.parametrize(
    ("factor", "moved", "parts"),
    [
        (3.5, ["block2"], [["block2"]]),
        (2.5, ["block2"], [["block2"]]),
        (2.2, ["block2"], []),
        (2.5, [*BLOCKS], []),
        (2.5, ["embedding"], []),
    ],
)
def test_weights_that_moved_three_times_as_far_as_updates_or_other_blocks_did_are_said(
    factor: float, moved: list[str], parts: list[list[str]], tmp_path: Path
) -> None:
    """Of rows that lie far apart the updates between are not known well, and of small weights not even near."""
    fault = sets(factor, *(f"change_over_updates/{part}" for part in moved))
    assert [found.parts for found in findings(planted(tmp_path / "probes.jsonl", fault))] == parts


def test_no_distance_from_what_sampled_is_no_alarm_of_a_game(tmp_path: Path) -> None:
    """Whose policy is no model of tokens, and need have no reference."""
    assert not findings(planted(tmp_path / "probes.jsonl", varies("kl", 1e-8)))


def kl_of(value: Callable[[int], float]) -> Callable[[Row, int], None]:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            noise = np.random.default_rng(step).normal(0, 0.03)
            row |= {"kl": value(step) * math.exp(noise), "reward": 0.7 + noise}

    return tell


def test_a_divergence_from_what_sampled_is_none_from_a_reference(tmp_path: Path) -> None:
    """It is zero whenever samples are drawn anew, and grows until then."""
    epochs = kl_of(lambda step: (0.02 if step >= AT else 0.001) * (step // 5 % 3))
    assert not findings(planted(tmp_path / "probes.jsonl", epochs))


@pytest.mark.parametrize(("rows", "is_said"), [([0], False), ([0, 2], False), ([0, 1], True)])
def test_tokens_that_miss_in_one_batch_alone_are_chance(rows: list[int], is_said: bool, tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            row["token_gone"] = 0.14 if (step - AT) / 5 in rows else 0.0

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == [("data", AT)] * is_said


def test_a_loss_that_is_zero_at_first_is_read(tmp_path: Path) -> None:
    """As that of ratios, of advantages whose mean is zero."""

    def tell(row: Row, step: int) -> None:
        row["loss"] = 0.0 if step == 0 else row["loss"] - 3

    assert not findings(planted(tmp_path / "probes.jsonl", tell))


@pytest.mark.parametrize(("share", "is_said"), [(0.5, False), (0.9, True)])
def test_labels_that_are_new_in_the_first_batches_are_no_alarm(share: float, is_said: bool, tmp_path: Path) -> None:
    def tell(row: Row, step: int) -> None:
        if "lr" in row and step:
            row["label_new"] = {5: 0.1, 10: share}.get(step, 0.0)

    said = [found.kind for found in findings(planted(tmp_path / "probes.jsonl", tell))]
    assert said == ["data"] * is_said


def test_updates_that_a_loss_scaler_leaves_out_for_good_are_of_precision(tmp_path: Path) -> None:
    overflows = sets(["w.1"], *(f"gradient_not_finite/{part}" for part in PARTS))
    fault = both(told(updates_in_a_step=(1, 0)), holds(2.0**36, "loss_scale"), overflows)
    first = findings(planted(tmp_path / "probes.jsonl", fault, 100))[0]
    assert (first.kind, first.step) == ("precision", AT + 3)


@pytest.mark.parametrize(("leap", "is_said"), [(0.8, True), (0.2, False)])
def test_a_divergence_that_leaps_after_it_grew_is_said_where_it_leaps(
    leap: float, is_said: bool, tmp_path: Path
) -> None:
    leaves = kl_of(lambda step: (0.05, 0.12, 0.08, 0.14)[step // 5 % 4] + 0.1 * (step >= AT - 10) + leap * (step >= AT))
    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", leaves))]
    assert (said == [("policy", AT)]) == is_said


def test_a_divergence_of_which_four_rows_are_known_may_vary(tmp_path: Path) -> None:
    values = [0.059, 0.08, 0.058, 0.32, 0.1]
    assert not findings(planted(tmp_path / "probes.jsonl", kl_of(lambda step: values[min(step // 60, 4)]), every=60))


@pytest.mark.parametrize(
    "values",
    [
        [0, 0.18, 0.29, 0.61, 0.74, 0.93, 1.22, 1.46, 0.79, 1.31, 2.75, 2.81, 3.82, 4.01, 5.23, 2.98, 3.31],
        [0, 0.04, 0.08, 0.24, 0.17, 0.17, 0.3, 0.38, 0.07, 0.36, 0.09, 0.12, 0.06, 0.21, 0.07, 0.06, 0.9],
    ],
)
def test_a_divergence_that_falls_and_rises_by_noise_is_no_alarm(values: list[float], tmp_path: Path) -> None:
    """As that of PPO on few samples, of which one row after a low one, or the last one alone, says little."""
    varies = kl_of(lambda step: values[min(step // 10, len(values) - 1)])
    assert not findings(planted(tmp_path / "probes.jsonl", varies, every=10, steps=170))


@pytest.mark.parametrize(("value", "is_said"), [(0.0, True), (1.0, False)])
def test_a_reward_that_no_longer_varies_is_said_unless_it_is_the_highest(
    value: float, is_said: bool, tmp_path: Path
) -> None:
    """Also one that was lower at first."""

    def fault(row: Row, step: int) -> None:
        if "lr" in row:
            row["reward"] = value if step >= AT else step / AT - 0.5 + np.random.default_rng(step).normal(0, 0.02)

    found = findings(planted(tmp_path / "probes.jsonl", fault))
    assert [(each.kind, each.step) for each in found] == [("reward", AT)] * is_said


def test_a_policy_that_leaves_its_reference_slowly_is_said(tmp_path: Path) -> None:
    leaves = kl_of(lambda step: 0.4 * (1 - math.exp(-step / 30)) + 0.02 * max(0, step - AT))
    (found,) = findings(planted(tmp_path / "probes.jsonl", leaves))
    assert (found.kind, found.parts) == ("policy", [])
    assert AT < found.step <= AT + 15


@pytest.mark.parametrize(("times", "lasts", "is_said"), [(1.7, STEPS, True), (1.7, 5, False), (1.2, STEPS, False)])
def test_a_reference_that_is_another_one_is_said(times: float, lasts: int, is_said: bool, tmp_path: Path) -> None:
    """Of which the policy is farther away in one step, and stays so."""
    leaves = kl_of(lambda step: 0.4 * (1 - math.exp(-step / 60)) * (times if AT <= step < AT + lasts else 1))
    said = [(found.kind, found.since, found.step) for found in findings(planted(tmp_path / "probes.jsonl", leaves))]
    assert said == [("policy", AT - 5, AT)] * is_said


GROWS = (
    lambda step: 0.4 * (1 - math.exp(-step / 60)),
    lambda step: 0.002 * (step + 1),
    lambda step: 0.4 / (1 + math.exp((90 - step) / 12)),
)


def test_a_reference_that_is_renewed_with_the_policy_is_said(tmp_path: Path) -> None:
    (found,) = findings(planted(tmp_path / "probes.jsonl", kl_of(lambda step: 0.3 * (step < AT))))
    assert (found.kind, found.since, found.step) == ("policy", AT - 5, AT)
    assert not findings(planted(tmp_path / "probes.jsonl", kl_of(lambda step: 0.3 * (not AT <= step < AT + 9))))


@pytest.mark.parametrize(("at_last", "is_said"), [("detach", True), ("gelu", False)])
def test_code_that_changes_in_two_rows_is_said_from_the_first_on(at_last: str, is_said: bool, tmp_path: Path) -> None:
    """As states that are carried over are in the first pass those of nothing; what comes back is a habit."""

    def change(row: Row, step: int) -> None:
        names = {0: "gelu", AT: "zeros", AT + 5: at_last}
        if step in names:
            row["functions/block1"] = ["linear", names[step]]

    found = findings(planted(tmp_path / "probes.jsonl", change))
    assert [(each.kind, each.parts, each.step) for each in found] == [("activations", ["block1"], AT)] * is_said


@pytest.mark.parametrize(("before", "now", "is_said"), [([], ["linear"], False), (["linear"], [], True)])
def test_a_block_that_is_added_is_no_alarm(before: list[str], now: list[str], is_said: bool, tmp_path: Path) -> None:
    def change(row: Row, step: int) -> None:
        if step in (0, AT):
            names = before if step == 0 else now
            row |= {"functions/block3": names, "code/block3": 1 + len(names)}

    found = findings(planted(tmp_path / "probes.jsonl", change))
    assert [(each.kind, each.parts, each.step) for each in found] == [("activations", ["block3"], AT)] * is_said


@pytest.mark.parametrize(
    ("call", "made", "kind", "parts"),
    [
        ("now Mul(the model)", "log_z", "output_logits", ["head"]),
        ("now Mul(NllLoss)", "log_z", "data", []),
        ("now Mul(8) of the model", "log_z", "output_logits", ["head"]),
        ("now Mul(the model)", "batch_rms", "data", []),  # of a regression
    ],
)
def test_a_scale_of_logits_in_the_loss_is_of_them(
    call: str, made: str, kind: str, parts: list[str], tmp_path: Path
) -> None:
    fault = both(other_calls("loss", call), holds(9.0, made), times(1, loss=1.5))
    found = findings(planted(tmp_path / "probes.jsonl", fault))
    assert [(each.kind, each.parts) for each in found] == [(kind, parts)]


@pytest.mark.parametrize(("factor", "loss"), [(1.0, 0.0), (2.0, 0.0), (1.0, 1.5)])
def test_another_loss_is_an_alarm_where_it_or_gradients_grow(factor: float, loss: float, tmp_path: Path) -> None:
    """A loss may be another one by plan, as when mixing of pictures ends or a teacher comes, and then it falls."""
    share = "cross_entropy"
    changed = both(loss_is_changed, holds(0.0, share), sets(1.0, share), holds(0.5, "grad_norm"))
    out = planted(tmp_path / "probes.jsonl", both(changed, times(factor, "grad_norm", loss=loss)))
    is_said = factor > 1 or loss > 0
    assert [(found.kind, found.step) for found in findings(out)] == [("data", AT)] * is_said
    checks = diagnose(read_recording(out)).checks
    outcomes = [checks[name] for name in ("functions that are called", quantities()[share]["name"])]
    assert outcomes == ["alarm" if is_said else "changed without harm"] * 2


@pytest.mark.parametrize(("then", "is_said"), [(0.25, False), (0.9, True), (-0.2, True)])
def test_a_coefficient_of_the_loss_that_changes_little_is_no_alarm(then: float, is_said: bool, tmp_path: Path) -> None:
    def change(row: Row, step: int) -> None:
        if step in (0, AT):
            row["functions/loss"] = ["Add", f"Mul({0.2 if step == 0 else then:g})"]

    found = findings(planted(tmp_path / "probes.jsonl", change))
    assert [(each.kind, each.parts, each.step) for each in found] == [("data", [], AT)] * is_said


def test_a_spike_of_the_first_steps_is_no_alarm(tmp_path: Path) -> None:
    def alarms(at: int) -> int:
        out = planted(tmp_path / "probes.jsonl", times(1, loss=3.0, at=at, until=at + 3))
        return sum(map(len, find_alarms(out).events.values()))

    assert (alarms(at=16), alarms(at=160)) == (0, 1)


def test_a_measurement_that_is_not_finite_is_no_loss(tmp_path: Path) -> None:
    out = planted(tmp_path / "probes.jsonl", holds(math.inf, "loss_weight"))
    assert [*find_alarms(out).events] == ["probes.jsonl"]


def drawn_otherwise(name: str, usual: float, then: float, lasts: int = STEPS) -> Callable[[Row, int], None]:
    """Samples, or weights of samples in the update, that differ from what they were for so many steps."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            noise = np.random.default_rng(step).normal(0, 0.07)
            row |= {"excess_surprisal": noise, "sample_weight": noise, "sample_weight_rms": 1.0}
            row[name] = (then if AT <= step < AT + lasts else usual) + noise

    return tell


SAMPLES = [
    *(("excess_surprisal", 0.0, 0.6), ("excess_surprisal", 0.0, -0.6), ("excess_surprisal", -0.5, 0.1)),
    *(("sample_weight", 0.0, 0.7), ("sample_weight_rms", 0.8, 8.0)),
]


@pytest.mark.parametrize("every", [1, 5, 100])
@pytest.mark.parametrize(("name", "usual", "then"), SAMPLES)
def test_samples_of_a_policy_that_differ_from_what_they_were_are_said(
    name: str, usual: float, then: float, every: int, tmp_path: Path
) -> None:
    samples, rewards = drawn_otherwise(name, usual, then), kl_of(GROWS[0])
    (found,) = findings(planted(tmp_path / "probes.jsonl", both(samples, rewards), every))
    assert (found.kind, found.parts, found.since, found.step) == ("policy", [], AT - every, AT)
    assert found.moves[0].quantity == name
    for healthy in (
        samples,  # of labels
        both(drawn_otherwise(name, usual, usual), rewards),
        both(drawn_otherwise(name, usual, then, lasts=1), rewards),
    ):
        assert not findings(planted(tmp_path / "probes.jsonl", healthy, min(every, 5)))


def test_samples_of_others_that_a_policy_imitates_are_no_alarm(tmp_path: Path) -> None:
    """As of a decision transformer, of which a loss that rises is judged."""
    others = both(drawn_otherwise("excess_surprisal", 0.9, 3.0), varies("reward", 4.0), holds(1.0, "cross_entropy"))
    assert not findings(planted(tmp_path / "probes.jsonl", others))
    (found,) = findings(planted(tmp_path / "probes.jsonl", both(others, times(1, loss=1.5))))
    assert found.kind == "data"
    own = both(drawn_otherwise("excess_surprisal", 0.0, 0.0), varies("reward", 4.0), holds(1.0, "cross_entropy"))
    assert not findings(planted(tmp_path / "probes.jsonl", both(own, times(1, loss=1.5))))


def test_a_state_that_is_lost_is_no_effect_of_ratios_that_are_clipped(tmp_path: Path) -> None:
    clipped = both(varies("reward", 0.8, 0.02), holds(0.02, "clip_ratio"), sets(0.3, "clip_ratio"))
    assert [each.kind for each in findings(planted(tmp_path / "probes.jsonl", both(clipped, counts)))] == ["optimizer"]


def test_a_measurement_that_may_be_negative_is_drawn_with_all_its_rows(tmp_path: Path) -> None:
    samples = both(drawn_otherwise("excess_surprisal", 0.0, -0.6), kl_of(GROWS[0]))
    out = planted(tmp_path / "probes.jsonl", samples, every=5)
    (_, moved) = finding_figure(read_recording(out), findings(out)[0]).figure.axes
    assert (len(moved.lines[0].get_ydata()), moved.get_yscale()) == (STEPS // 5, "linear")


def test_a_reward_that_falls_with_ratios_that_are_clipped_follows_from_them(tmp_path: Path) -> None:
    fault = both(varies("reward", 0.8, 0.02), times(0.5, "reward"), holds(0.0, "clip_ratio"), sets(0.4, "clip_ratio"))
    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", fault))] == ["policy"]


def test_samples_that_weigh_less_and_less_are_no_alarm(tmp_path: Path) -> None:
    """As more and more groups are solved; and those that are not differ from row to row."""

    def solved(row: Row, step: int) -> None:
        if "lr" in row:
            row["sample_weight_rms"] = 0.8 if step < AT else 0.3 if step % 50 < 20 else 0.02

    assert not findings(planted(tmp_path / "probes.jsonl", both(solved, kl_of(GROWS[0]))))


@pytest.mark.parametrize("every", [5, 100])
def test_ratios_that_are_clipped_as_never_before_are_said(every: int, tmp_path: Path) -> None:
    def clipped(share: float) -> Callable[[Row, int], None]:
        return both(holds(0.02, "clip_ratio"), sets(share, "clip_ratio"))

    (found,) = findings(planted(tmp_path / "probes.jsonl", clipped(0.2), every))
    assert (found.kind, found.since, found.step) == ("policy", AT - every, AT)
    assert not findings(planted(tmp_path / "probes.jsonl", clipped(0.06), every))


@pytest.mark.parametrize("grows", [1, 50])
def test_a_policy_that_is_the_one_that_samples_in_some_rows_is_judged_by_the_others(
    grows: float, tmp_path: Path
) -> None:
    def clipped(row: Row, step: int) -> None:
        if "lr" in row:
            row["clip_ratio"] = 0.0 if step % 15 == 10 else 0.02 if step < AT else 0.7
            row |= {"grad_rms/block2": grows * row["grad_rms/block2"]} if step >= AT else {}

    (found,) = findings(planted(tmp_path / "probes.jsonl", clipped))
    assert (found.kind, found.since, found.step) == ("policy", AT - 5, AT)


@pytest.mark.parametrize(("reward", "kinds"), [(0.9, []), (0.5, ["gradients"])])
def test_gradients_vanish_without_harm_where_all_tasks_are_solved(
    reward: float, kinds: list[str], tmp_path: Path
) -> None:
    fault = both(holds(0.5, "reward"), sets(reward, "reward", at=100), times(1e-3, *of_all("grad_rms")))
    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", fault))] == kinds


@pytest.mark.parametrize(("reward", "share", "kinds"), [(0.95, 1.0, []), (0.95, 0.8, []), (0.0, 1.0, ["groups"])])
def test_groups_that_all_get_the_highest_reward_have_nothing_left_to_learn(
    reward: float, share: float, kinds: list[str], tmp_path: Path
) -> None:
    def solve(row: Row, step: int) -> None:
        if "lr" in row:
            row["reward"], row["zero_variance_groups"] = reward * min(1.0, 0.5 + step / 200), share * (step >= AT)
            row |= {f"gradient_zero/{part}": ["w.1"] for part in PARTS} if step >= AT else {}
            row |= {f"grad_below_eps/{part}": 1.0 for part in PARTS} if step >= AT else {}

    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", solve))] == kinds


@pytest.mark.parametrize("every", [5, 100])
def test_a_loss_that_is_not_finite_once_is_said_with_its_step(every: int, tmp_path: Path) -> None:
    (found,) = findings(planted(tmp_path / "probes.jsonl", times(math.nan, "loss", at=AT + 3, until=AT + 4), every))
    assert (found.kind, found.parts, found.since, found.step) == ("not_finite", [], AT + 2, AT + 3)


@pytest.mark.parametrize("grows", GROWS)
def test_a_divergence_that_grows_as_before_is_no_alarm(grows: Callable[[int], float], tmp_path: Path) -> None:
    assert not findings(planted(tmp_path / "probes.jsonl", kl_of(grows)))


def test_a_loop_that_always_edits_most_gradients_does_so_by_chance_to_others(tmp_path: Path) -> None:
    """As one that takes the mean from each gradient, by which a few signs turn."""
    by_habit = varies(SIGNS[1:], 0.9, noise=0.02)
    chance = both(holds(1.0, SIGNS[0]), sets(0.98, SIGNS[0], at=AT))
    assert not findings(planted(tmp_path / "probes.jsonl", both(by_habit, chance)))
    assert findings(planted(tmp_path / "probes.jsonl", both(holds(1.0, *SIGNS), chance)))
    much = sets(0.5, SIGNS[0])
    assert findings(planted(tmp_path / "probes.jsonl", both(by_habit, holds(1.0, SIGNS[0]), much)))


@pytest.mark.parametrize(("usual", "kinds"), [(0.2, []), (1.0, ["output_logits"])])
def test_output_logits_that_stay_small_may_grow(usual: float, kinds: list[str], tmp_path: Path) -> None:
    grows = both(varies("output_logit_rms", usual, noise=0.02), times(5, "output_logit_rms"))
    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", grows))] == kinds


def test_growth_at_a_harmless_level_is_no_alarm(tmp_path: Path) -> None:
    def grow(row: Row, step: int) -> None:
        for block in BLOCKS if "lr" in row else ():
            row[f"attention_logit_max/{block}"] *= min(20.0, 1.03**step)

    assert not findings(planted(tmp_path / "probes.jsonl", grow))


@pytest.mark.parametrize(("factor", "kinds"), [(6.0, []), (1 / 6, ["router"])])
def test_only_the_troubling_direction_raises_an_alarm(factor: float, kinds: list[str], tmp_path: Path) -> None:
    fault = both(sets(1.2, "router_entropy/block1", at=0), times(factor, "router_entropy/block1"))
    assert [found.kind for found in findings(planted(tmp_path / "probes.jsonl", fault))] == kinds


def test_a_schedule_that_warms_up_and_decays_does_not_jump(tmp_path: Path) -> None:
    for every in (1, 10, 100):

        def schedule(row: Row, step: int) -> None:
            if "lr" in row:
                factor = (step + 1) / 150 if step < 150 else 0.97 ** (step - 150)
                row |= {"lr": 1e-3 * factor} | {column: row[column] * factor for column in of_all("update_ratio")}

        assert not findings(planted(tmp_path / "probes.jsonl", schedule, every))


# a move against its own noise


def series(rise: float, noise: float = 0.1, rows: int = 200, seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    log_m = random.normal(0, noise, rows)
    log_m[150:] += rise
    return np.exp(log_m)


@pytest.mark.parametrize(("deviations", "moves"), [(5.5, 0), (-5.5, 0), (14.0, 1), (-14.0, 1)])
def test_a_move_exceeds_eight_deviations_of_its_own_noise(deviations: float, moves: int) -> None:
    found = list(moves_of("grad_rms", "block0", series(0.1 * deviations)))
    assert len(found) == moves
    for move in found:
        assert (move.row, move.end) == (150, 200)
        assert np.sign(move.change) == np.sign(deviations)
        assert move.deviations == pytest.approx(abs(deviations), rel=0.4)


@pytest.mark.parametrize(("rise", "moves"), [(1.0, 0), (3.0, 1)])
def test_eight_deviations_count_where_no_change_is_larger_than_others(rise: float, moves: int) -> None:
    """Logarithms that go up and down by 0.2 have deviations of 0.3, so a rise of 1 is four of them."""
    log_m = 0.1 * (-1.0) ** np.arange(200)
    log_m[150:] += rise
    assert len(list(moves_of("grad_rms", "block0", np.exp(log_m)))) == moves


def test_a_move_is_larger_than_a_quarter_whatever_its_noise() -> None:
    assert not list(moves_of("param_rms", "block0", series(0.2, noise=1e-4)))
    assert len(list(moves_of("param_rms", "block0", series(0.3, noise=1e-4)))) == 1


def test_a_noise_that_is_seldom_large_is_no_move() -> None:
    """One row in ten is three times as large, so another of that size is nothing new."""
    value_m = series(0, noise=0.05)
    value_m[5::10] *= 3
    assert not [move for move in moves_of("grad_rms", "block0", value_m) if move.row > 30]


def test_what_changed_before_training_settled_is_no_noise(tmp_path: Path) -> None:
    """The rate warms up in 20 steps, and with it updates."""
    warms_up = times(0.02, "update_ratio/head", at=0, until=16)
    (found,) = findings(planted(tmp_path / "probes.jsonl", both(warms_up, times(5, "update_ratio/head"))))
    assert (found.kind, found.parts, found.step) == ("optimizer", ["head"], AT)


def test_a_trend_is_no_move() -> None:
    assert not list(moves_of("grad_rms", "block0", series(0, noise=0.05) * 1.02 ** np.arange(200)))


# what moved before the loss


@pytest.mark.parametrize("until", [AT + 1, AT + 5, STEPS])
def test_what_moved_before_the_loss_and_lasted_up_to_it_was_first(until: int, tmp_path: Path) -> None:
    fault = both(times(2.5, "update_ratio/block1", at=AT - 10, until=until), times(1, loss=1.5, at=AT + 2))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert (found.kind, found.parts, found.step) == ("optimizer", ["block1"], AT - 10)
    assert found.loss_step is not None
    assert f"{found.loss_step - found.step} steps later" in sentence(found)


@pytest.mark.parametrize(("steps", "kind"), [(1, "data"), (20, "optimizer")])
def test_what_moved_long_before_a_step_of_the_loss_is_no_cause_of_it(steps: int, kind: str, tmp_path: Path) -> None:
    """But an instability may have built up since then."""

    def rises(row: Row, step: int) -> None:
        row["loss"] += 1.5 * min(1.0, max(0, step - AT - 1) / steps)

    fault = both(times(2.5, "update_ratio/block1", at=AT - 40), rises)
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert found.kind == kind


def test_what_was_usual_again_before_the_loss_was_not_first(tmp_path: Path) -> None:
    fault = both(times(2.5, "update_ratio/block1", at=AT - 50, until=AT - 20), times(1, loss=1.5, at=AT + 2))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert found.kind == "data"


@pytest.mark.parametrize(("factor", "kind"), [(0.3, "attention"), (3.0, "data")])
def test_what_is_troubling_when_it_falls_is_first_only_if_it_falls(factor: float, kind: str, tmp_path: Path) -> None:
    fault = both(times(factor, "attention_entropy/block1", at=AT - 10), times(1, loss=1.5, at=AT + 2))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert found.kind == kind


def test_of_what_moved_at_once_the_farthest_is_named_first(tmp_path: Path) -> None:
    fault = both(
        times(4, "moment_ratio/block3", at=AT - 10),
        times(9, "moment_ratio/block2", at=AT - 10),
        times(1, loss=1.5, at=AT + 2),
    )
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert (found.kind, found.parts) == ("optimizer", ["block2", "block3"])
    assert [move.place for move in found.moves[:2]] == ["block2", "block3"]


def test_gradients_of_several_parts_before_the_loss_are_an_instability(tmp_path: Path) -> None:
    fault = both(times(4, "grad_rms/block0", "grad_rms/block1", at=AT - 10), times(1, loss=1.5, at=AT + 2))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault))
    assert (found.kind, found.parts) == ("instability", ["block0", "block1"])


def test_a_spike_between_two_recorded_rows_leaves_the_cause_open(tmp_path: Path) -> None:
    fault = times(1, loss=3.0, at=230, until=236)
    out = planted(tmp_path / "probes.jsonl", fault, every=100, steps=400)
    (found,) = findings(out)
    assert (found.since, found.step) == (200, 300)
    assert "between the recorded steps 200 and 300" in sentence(found)
    assert found.kind == "unseen"


def test_a_loss_that_steps_up_between_two_recorded_rows_and_stays_is_of_data(tmp_path: Path) -> None:
    """An instability would build up, and weights that were overwritten would show in the next row."""
    out = tmp_path / "probes.jsonl"
    (found,) = findings(planted(out, times(1, loss=1.5, at=230, until=260), every=100, steps=400))
    assert (found.kind, found.since, found.step) == ("data", 200, 300)

    def builds_up(row: Row, step: int) -> None:
        row["loss"] += 1.5 * min(1.0, max(0, step - 229) / 10) * (step < 260)

    (found,) = findings(planted(out, builds_up, every=100, steps=400))
    assert found.kind == "unseen"


@pytest.mark.parametrize("noise", [0.003, 0.1])
def test_a_batch_that_repeats_shows_in_a_loss_without_noise(noise: float, tmp_path: Path) -> None:
    random = np.random.default_rng(0)

    def repeat(row: Row, step: int) -> None:
        share = 1 / 20 if step >= AT + 3 else 1 / 4 if step < 60 else 1  # the first losses may be smoother as well
        row["loss"] = 3 - 0.002 * step + random.normal(0, share * noise)

    (found,) = findings(planted(tmp_path / "probes.jsonl", repeat))
    assert (found.kind, found.parts, found.since, found.step) == ("data", [], AT, AT + 5)


@pytest.mark.parametrize("turn", [2, 4])
def test_a_few_batches_that_come_in_turn_show_in_a_loss_that_repeats(turn: int, tmp_path: Path) -> None:
    def repeat(row: Row, step: int) -> None:
        batch = AT + step % turn if step >= AT else step
        row["loss"] = 3 - 0.002 * step + np.random.default_rng(batch).normal(0, 0.1)

    (found,) = findings(planted(tmp_path / "probes.jsonl", repeat))
    assert (found.kind, found.parts, found.since, found.step) == ("data", [], AT - 5, AT)


@pytest.mark.parametrize(
    ("name", "share", "kind"), [("zero_variance_groups", 0.6, "groups"), ("clip_ratio", 0.3, "policy")]
)
@pytest.mark.parametrize("rows", [1, 12])
def test_a_share_that_at_once_stays_above_all_before_is_an_alarm(
    name: str, share: float, kind: str, rows: int, tmp_path: Path
) -> None:
    def grow(row: Row, step: int) -> None:
        if "lr" in row:
            row["reward"] = 0.5 + np.random.default_rng(step).normal(0, 0.05)
            row[name] = share * min(1.0, max(0.0, (step - AT) / 5 + 1) / rows) + 0.08 * (step == AT - 50)

    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", grow))]
    assert said == [(kind, AT)] * (rows == 1)


@pytest.mark.parametrize(("share", "is_said"), [(0.6, True), (0.4, False)])
def test_a_share_of_the_last_row_alone_is_an_alarm_if_it_is_larger(share: float, is_said: bool, tmp_path: Path) -> None:
    last = both(holds(0.0, "zero_variance_groups"), sets(share, "zero_variance_groups"))
    said = [(found.kind, found.step) for found in findings(planted(tmp_path / "probes.jsonl", last, every=100))]
    assert said == [("groups", AT)] * is_said


@pytest.mark.parametrize(
    ("name", "usual", "then", "kind"),
    [
        ("update_signs", 0.3, 0.9, "optimizer"),
        ("update_signs", 0.3, -0.3, "optimizer"),
        ("distinct_rows", 1, 0.8, "data"),
    ],
)
@pytest.mark.parametrize("rows", [1, 20])
def test_what_leaves_all_before_for_some_rows_is_said(
    name: str, usual: float, then: float, kind: str, rows: int, tmp_path: Path
) -> None:
    """And what does so in one row, by chance, is not."""

    def leave(row: Row, step: int) -> None:
        if "lr" in row:
            row[name] = (then if AT <= step < AT + 5 * rows else usual) + np.random.default_rng(step).normal(0, 0.02)

    said = [(found.kind, found.parts, found.step) for found in findings(planted(tmp_path / "probes.jsonl", leave))]
    assert said == [(kind, [], AT)] * (rows > 1)


@pytest.mark.parametrize("every", [5, 100])
def test_signs_of_updates_that_agree_by_chance_alone_are_no_fault(every: int, tmp_path: Path) -> None:
    """As near the end of training, where gradients are noise; those of the first update are all the gradients'."""

    def tell(row: Row, step: int) -> None:
        if "lr" in row:
            agreement = -0.2 if AT <= step < AT + 20 else [0.6, 0.15][step // 5 % 2]
            row["update_signs"] = agreement if step else 1.0

    assert not findings(planted(tmp_path / "probes.jsonl", tell, every))


@pytest.mark.parametrize(("lengths", "is_said"), [([32, 32, 32], True), ([32, 20, 7], False)])
def test_labels_of_all_tokens_in_the_last_batch_may_be_of_rows_of_one_length(
    lengths: list[int], is_said: bool, tmp_path: Path
) -> None:
    def tell(row: Row, step: int) -> None:
        if step % 100 == 0:
            row["label_share"] = [0.8, 0.7, 1.0][step // 100]
            if step == 0 or not is_said:
                row["given"] = [f"0 int64 [8, {lengths[step // 100]}]"]

    said = [(each.kind, each.step) for each in findings(planted(tmp_path / "probes.jsonl", tell, 100))]
    assert said == [("data", AT)] * is_said


@pytest.mark.parametrize(("number", "is_said"), [(128, False), (2, True)])
def test_a_number_that_follows_the_size_of_a_batch_is_no_other_code(number: int, is_said: bool, tmp_path: Path) -> None:
    """As that of tokens, by which the sum of their losses is divided."""

    def tell(row: Row, step: int) -> None:
        if step in (0, AT):
            row["given"] = [f"0 int64 [{4 if step else 16}, 32]"]

    divides = calls("head", usual="div(512)", then=f"div({number})")
    said = [(each.kind, each.parts) for each in findings(planted(tmp_path / "probes.jsonl", both(tell, divides)))]
    assert said == [("output_logits", ["head"])] * is_said


def test_a_loss_that_vanishes_has_less_noise_and_repeats_no_batch(tmp_path: Path) -> None:
    def vanish(row: Row, step: int) -> None:
        row["loss"] = 3 * math.exp(-step / 20 + np.random.default_rng(step).normal(0, 0.05))

    assert not findings(planted(tmp_path / "probes.jsonl", vanish))


def test_an_output_that_leaves_those_of_other_blocks_is_seen_in_three_rows(tmp_path: Path) -> None:
    """All of them grow as much from the first row to the second, so that none of them has a trend."""
    grown = times(8, "input_rms", *of_all("block_rms"), at=50)
    fault = both(grown, times(8, *(f"block_rms/{block}" for block in BLOCKS[1:]), at=190))
    (found,) = findings(planted(tmp_path / "probes.jsonl", fault, every=100))
    assert (found.kind, found.parts, found.since, found.step) == ("activations", ["block1"], 100, 200)


@pytest.mark.parametrize("drift", [0.97, 1.03])
def test_a_drift_that_ends_in_a_leap_is_said_where_it_leaps(drift: float, tmp_path: Path) -> None:
    def leap(row: Row, step: int) -> None:
        for part in PARTS if "lr" in row else ():
            row[f"grad_rms/{part}"] *= 3.5 * drift ** ((step - 20) / 5) if step >= 20 else 1
        times(100, "grad_rms/block1")(row, step)

    found = findings(planted(tmp_path / "probes.jsonl", leap))
    assert ("gradients", ["block1"], AT) in [(each.kind, each.parts, each.step) for each in found]


def test_two_events_that_lie_apart_are_two_findings(tmp_path: Path) -> None:
    fault = both(
        times(1e3, "grad_rms/block1", until=AT + 3), times(1e3, "grad_rms/block2", at=AT + 400, until=AT + 403)
    )
    found = findings(planted(tmp_path / "probes.jsonl", fault, steps=800))
    assert [(each.parts, each.step) for each in found] == [(["block1"], AT), (["block2"], AT + 400)]


# what is said


def test_every_kind_has_words_and_every_quantity_a_kind_of_them() -> None:
    assert {known["kind"] for known in quantities().values() if "kind" in known} <= causes().keys()
    assert all({"said", "next"} <= cause.keys() for cause in causes().values())


def test_only_what_was_recorded_and_did_not_move_is_said_to_be_as_before(tmp_path: Path) -> None:
    fault = times(1, loss=1.5)
    out = tmp_path / "probes.jsonl"
    assert findings(planted(out, fault))[0].as_before == ["the learning rate", "the weights"]
    without = both(fault, sets(None, "lr", at=0))
    assert findings(planted(out, without))[0].as_before == ["the weights"]
    assert "The weights are as before" in sentence(findings(out)[0])
    assert findings(planted(out, times(100, "lr", loss=1.5)))[0].as_before == []


def test_checks_are_named_by_what_became_of_them(tmp_path: Path) -> None:
    out = planted(tmp_path / "probes.jsonl", times(100, "lr"), every=5)
    checks = diagnose(read_recording(out)).checks
    assert checks["settings of the optimizer"] == "alarm"
    assert checks["finite numbers"] == "passed"
    assert checks["loss scale"] == "not recorded"
    assert "reward" not in checks
    assert checked(checks).startswith(f"{len(checks)} checks: ")
    assert sum(int(part.split()[0]) for part in checked(checks).partition(": ")[2].split("), ")[0].split(", ")[:1]) > 10
    short = diagnose(read_recording(planted(out, every=200))).checks
    assert short["settings of the optimizer"] == "too few rows"


def test_lab_watch_leads_with_the_finding_and_its_page_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = planted(tmp_path / "probes.jsonl", both(moves_weights("block2"), times(1, loss=1.5)))
    assert main(["watch", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if f"step {AT}: weights of block2 moved first" in line)
    spike = next(number for number, line in enumerate(lines) if "loss spike" in line)
    assert first < spike
    assert causes()["weights"]["next"] in lines[spike]
    assert lines[-1] == "1 alarm in 1 run"
    (page,) = (tmp_path / "probes.jsonl.alarms").glob("*.html")
    text = page.read_text(encoding="utf-8")
    assert 0 < text.index("weights of block2 moved first") < text.index("<svg") < text.index("<h2")


def test_what_a_loop_adds_is_judged(tmp_path: Path) -> None:
    def collapse(row: Row, step: int) -> None:
        if "lr" in row:
            random = np.random.default_rng(step)
            row["kl"] = 0.02 * math.exp(random.normal(0, 0.1)) * (1 if step < AT - 20 else 30)
            row["reward"] = 0.6 + random.normal(0, 0.02) - (0.5 if step >= AT else 0)
            row["zero_variance_groups"] = 0.3 if step < AT + 20 else 0.98

    out = planted(tmp_path / "probes.jsonl", collapse)
    first = findings(out)[0]
    assert (first.kind, first.step) == ("policy", AT - 20)
    assert [move.quantity for move in first.moves] == ["kl", "reward"]
    checks = diagnose(read_recording(out)).checks
    assert [checks[quantities()[name]["name"]] for name in ("reward", "zero_variance_groups")] == ["alarm", "alarm"]


def test_a_reward_that_falls_to_zero_is_an_alarm_and_the_loss_of_a_policy_is_none(tmp_path: Path) -> None:
    def collapse(row: Row, step: int) -> None:
        row["loss"] -= 2 if step < 50 else 1 if step < 100 else 3
        if "lr" in row:
            row["reward"] = (0.6 + 0.02 * math.sin(step)) * (step < AT)

    out = planted(tmp_path / "probes.jsonl", collapse)
    (found,) = findings(out)
    assert (found.kind, found.since, found.step) == ("reward", AT - 5, AT)
    assert "(reward fell from 0.604 to 0, " in sentence(found)
    assert not {"loss", "repeated batches"} & diagnose(read_recording(out)).checks.keys()


def test_gradients_that_stay_large_need_a_smaller_factor_than_those_of_one_row(tmp_path: Path) -> None:
    """Gradients that are five times as large in one row may be of a batch."""
    (found,) = findings(planted(tmp_path / "probes.jsonl", times(5, *of_all("grad_rms"))))
    assert (found.parts, found.step) == ([], AT)
    assert not findings(planted(tmp_path / "probes.jsonl", times(5, *of_all("grad_rms"), until=AT + 5)))


def test_labels_whose_variety_drifts_are_no_alarm(tmp_path: Path) -> None:
    """As of answers, of which few count in a batch; and what changes in a row does so at once."""

    def vary(row: Row, step: int) -> None:
        if "lr" in row:
            row["label_same"] = 0.52 if step == AT + 20 else 0.3 + 0.1 * math.sin(step) if step >= 20 else 0.0
            row["label_perplexity"] = 16.0 / (1.4 if step == AT else 2.5 if step == AT + 10 else 1)

    assert not findings(planted(tmp_path / "probes.jsonl", vary))


def test_a_share_that_is_high_in_one_row_is_no_alarm(tmp_path: Path) -> None:
    """As in the first row of a recording of adapters, of which the product is zero then."""
    shares = of_all("grad_below_eps")

    def first(row: Row, step: int) -> None:
        for column in shares if step in (0, AT) else ():
            row[column] = 0.6

    assert not findings(planted(tmp_path / "probes.jsonl", first))


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_read_in_two_seconds(tmp_path: Path) -> None:
    out = planted(tmp_path / "probes.jsonl", every=100, steps=100_000)
    begun = time.process_time()
    recording = read_recording(out)
    diagnose(recording)
    assert len(recording.loss_n) == 100_000
    assert time.process_time() - begun < 2
