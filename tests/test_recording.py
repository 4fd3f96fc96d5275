"""A recorder overhears any training loop: its numbers are those of the lab's probes, and training keeps its bits."""

from __future__ import annotations

import copy
import gzip
import json
import logging
import math
import pickle
import re
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lab
from lab import Fleet
from lab.__main__ import main
from lab.core.errors import RequestError
from lab.core.hooks import Probe
from lab.core.registry import MODELS, PROBES
from lab.probes.listener import probe
from lab.training.loop import train
from lab.training.recorder import Recorder
from labwatch.events.detectors import detect
from labwatch.events.logs import read_logs
from labwatch.recorder import attention, measuring
from labwatch.recorder import recorder as recording
from labwatch.recorder.attention import sampled
from labwatch.recorder.tally import Known, combined, of_whole
from labwatch.recordings.diagnosis import diagnose
from labwatch.recordings.readings import Readings, quantities
from labwatch.recordings.recording import read_recording
from labwatch.recordings.signs import CHECKS
from labwatch.recordings.words import GrowingRecording, sentence, what_moved
from small import configs
from test_engine import compiles
from test_ranks import ENVIRONMENT, TORCHRUN

HERE = Path(__file__).parent
SCHEMA = json.loads((HERE.parent / "docs" / "schema.json").read_text(encoding="utf-8"))
SHARES = ("grad_below", "grad_underflow", "moment_outliers", "weights_rounded")  # where rounding may decide on an entry
VOCABULARY, WIDTH, HEADS, DEPTH, LENGTH = 23, 16, 2, 3, 10
Row = dict[str, Any]


class Attention(nn.Module):
    """Causal attention by a fused kernel, with keys shared by two heads of queries."""

    heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # the gradient of a key's bias is nothing but rounding

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv_proj(x).unflatten(-1, (2, self.heads // HEADS, -1)).transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two of four experts for each token, each an MLP of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 2
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).topk(self.top_k)
        outputs = torch.stack([expert(x) for expert in self.experts], -2)
        return (share[..., None] * outputs.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))).sum(-2)


class Block(nn.Module):
    def __init__(self, mlp: Callable[[], nn.Module], *, dropout: float) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp, self.dropout = Attention(), mlp(), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.mlp(self.mlp_norm(x))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class Model(nn.Module):
    """A small Transformer as people write them."""

    def __init__(
        self,
        mlp: Callable[[], nn.Module] = dense,
        *,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
        is_checkpointed: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Block(mlp, dropout=dropout) for _ in range(DEPTH))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)
        self.is_checkpointed = is_checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        return self.lm_head(self.norm(x))


def built(**options: Any) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def batch(step: int, rows: int = 4) -> Tensor:
    return torch.randint(VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def run(
    model: nn.Module,
    out: Path | None,
    steps: int = 3,
    *,
    every: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    called: Callable[[Tensor], Tensor] | None = None,
) -> list[Row]:
    """Train, recorded if there is a file; the rows that were written, without the first, which says what was found."""
    made = optimizer(model.parameters(), lr=1e-2)
    recorder = lab.record(model, made, every=every, out=out) if out else None
    torch.manual_seed(1)
    for step in range(steps):
        loss = loss_of(model if called is None else called, batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
        made.zero_grad()
        if recorder:
            recorder.step(loss)
    if recorder:
        recorder.close()
    return written(out)[1:] if out and out.exists() else []


def written(out: Path) -> list[Row]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def same(ours: Row, theirs: Row, rel: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    assert ours.get("settings") == theirs.get("settings")
    for name, value in theirs.items():
        if name != "settings":
            assert ours[name] == pytest.approx(value, rel=rel, abs=1e-9), name


def test_the_gain_of_initial_matrices_is_written_once(tmp_path: Path) -> None:
    """The RMS times the root of the smaller side; embeddings look numbers up, and multiply nothing."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.linspace(-99, 0, 2 * LENGTH).view(2, LENGTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.bias[:, torch.arange(x.shape[1])].mean(0)[:, None]

    model = built()
    model.layers[2].attention_norm = Places()  # type: ignore[assignment]
    matrices = [weight for weight in model.layers[1].parameters() if weight.ndim == 2]
    with torch.no_grad():
        model.embedding.weight.normal_()
        matrices[0].normal_()
        rms = float(matrices[0].square().mean().sqrt())
    first, second, *_ = run(model, tmp_path / "probes.jsonl")
    gains = {name: value for name, value in first.items() if name.startswith("weight_gain/")}
    assert gains["weight_gain/block1"] == pytest.approx(rms * min(matrices[0].shape) ** 0.5, rel=1e-5)
    assert max(value for name, value in gains.items() if name != "weight_gain/block1") < 2
    assert not [name for name in second if name.startswith("weight_gain")]


def test_shares_of_a_large_weight_are_of_rows_that_lie_evenly(tmp_path: Path) -> None:
    model, small_o = nn.Linear(256, 1024, bias=False), torch.arange(1024) < 256
    optimizer = torch.optim.AdamW(model.parameters(), eps=1e-3)
    recorder = lab.record(model, optimizer, out=tmp_path / "probes.jsonl", every=1)
    for scale in [1.0] * 20 + [100.0]:
        loss = (model(torch.ones(1, 256)) * torch.where(small_o, 1e-6, scale)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)
    recorder.close()
    first, *_, last = written(tmp_path / "probes.jsonl")[1:]
    assert [row["grad_below_eps"] for row in (first, last)] == [0.25, 0.25]
    assert [row["moment_outliers"] for row in (first, last)] == [0.0, 0.75]


@pytest.mark.parametrize("new", [[], [1], [1, 2], [0, 1, 2]])
def test_a_block_that_was_not_loaded_is_said_where_all_others_were(new: list[int], tmp_path: Path) -> None:
    """Gains of its norms are ones still; of two such blocks, or of a new model, nothing is said."""
    model = built()
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            for vector in layer.parameters():
                if vector.ndim == 1 and number not in new:
                    vector += 0.01 * torch.randn(len(vector))
    first, second, *_ = run(model, tmp_path / "probes.jsonl")
    assert [first[f"constant_norms/block{number}"] for number in range(3)] == [n in new for n in range(3)]
    assert not [name for name in second if name.startswith("constant_norms")]
    findings = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert [(each.kind, each.parts, each.since) for each in findings] == [("weights", ["block1"], None)] * (new == [1])


def test_the_head_has_a_usual_name_and_stands_in_no_block(tmp_path: Path) -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(WIDTH, 3)
            self.layers = nn.ModuleList(
                nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "output": nn.Linear(WIDTH, WIDTH)}) for _ in range(3)
            )

    model = Classifier()
    recorder = lab.record(model, torch.optim.SGD(model.parameters()), out=tmp_path / "probes.jsonl")
    assert recorder.parts.head is model.classifier
    assert recorder.parts.where["classifier.weight"] == "head"
    recorder.close()


@pytest.mark.parametrize(("classes", "blocks"), [("eedd", 4), ("eddd", 0), ("e", 1), ("dddd", 4)])
def test_a_list_of_two_blocks_of_each_class_is_one_of_blocks(classes: str, blocks: int, tmp_path: Path) -> None:
    class Encoding(nn.Sequential): ...

    class Decoding(nn.Sequential): ...

    made = [(Encoding if of == "e" else Decoding)(nn.Linear(WIDTH, WIDTH)) for of in classes]
    model = nn.ModuleDict({"layers": nn.ModuleList(made), "heads": nn.ModuleDict({"box": nn.Linear(WIDTH, 4)})})
    recorder = lab.record(model, torch.optim.SGD(model.parameters()), out=tmp_path / "probes.jsonl")
    assert [*recorder.parts.blocks.values()] == made[:blocks]
    assert recorder.parts.where["heads.box.weight"] == "head"
    recorder.close()


@pytest.mark.parametrize("is_flat", [True, False])
def test_what_stands_beside_an_embedding_alone_is_of_it(is_flat: bool, tmp_path: Path) -> None:
    beside = {"words": nn.Embedding(5, WIDTH), "norm": nn.LayerNorm(WIDTH)}
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3))
    inner = nn.ModuleDict(beside if is_flat else {**beside, "layers": blocks})
    model = nn.ModuleDict({"inner": inner, **({"layers": blocks} if is_flat else {})})
    recorder = lab.record(model, torch.optim.SGD(model.parameters()), out=tmp_path / "probes.jsonl")
    assert recorder.parts.where["inner.words.weight"] == "embedding"
    assert recorder.parts.where["inner.norm.weight"] == ("embedding" if is_flat else "other")
    recorder.close()


@pytest.mark.parametrize("lacking", ["", "attention", "both"])
def test_a_block_that_lacks_the_residual_of_the_others_is_said(lacking: str, tmp_path: Path) -> None:
    class Lacking(Block):
        lacks = ""

        def forward(self, x: Tensor) -> Tensor:
            mixed = self.attention(self.attention_norm(x))
            x = mixed if self.lacks else x + mixed
            made = self.mlp(self.mlp_norm(x))
            return made if self.lacks == "both" else x + made

    model = built()
    model.layers = nn.ModuleList(Lacking(dense, dropout=0.0) for _ in range(3))
    model.layers[1].lacks = lacking  # type: ignore[assignment]
    run(model, tmp_path / "probes.jsonl", 3)
    findings = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    found = [(each.kind, each.parts, each.since) for each in findings]
    assert found == [("activations", ["block1"], None)] * bool(lacking)
    assert all("as the other blocks do (add(" in sentence(each) for each in findings)


# against the lab


NAMES = [
    *("train_loss", "grad_norm", "grad_norm_clipped", "grad_rms", "param_rms", "update_rms", "eps_ratio"),
    *("grad_below_eps", "moment_ratio", "moment_outliers", "grad_underflow_fp16", "grad_underflow_e4m3"),
    *("grad_underflow_mx", "block_rms", "block_kurtosis", "block_underflow_e4m3", "block_underflow_mx"),
    *("block_overflow_fp16", "block_overflow_mx", "attention_logit_max", "output_logit_mean", "output_logit_rms"),
    *("log_z", "log_z_square"),
]
UNREAD = {
    *("block_overflow_fp16", "block_overflow_mx", "block_underflow_e4m3", "block_underflow_mx", "code", "dead_experts"),
    *("expert_grad_rms", "expert_load", "expert_load_cv", "expert_param_rms", "expert_update_rms"),
    *("grad_underflow_e4m3", "grad_underflow_fp16", "grad_underflow_mx", "label_loss", "log_z_square", "lr"),
    *("output_logit_mean", "router_balance", "router_log_z", "settings", "step"),
}
OF_FLEET = ("probes.every=1", f"probes.names=[{','.join(NAMES)}]", "steps=4", "schedule=constant", "schedule.warmup=0")


@dataclass(frozen=True)
class Recorded:
    """The model of these tests as one of a fleet."""

    def build(self, shape: Any, vocabulary: int) -> nn.Module:
        return Model(vocabulary=vocabulary)


def test_every_number_is_that_of_the_labs_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "recorded", Recorded)
    recipe = (
        "intervention=[]",
        "optimizer.weight_decay=0",
        "optimizer.clip=0.1",
        "optimizer.lr=1e-2",
        "optimizer.eps=1e-5",
    )
    (config,) = configs("", shared=("+custom_model.recorded={}", *OF_FLEET, *recipe))
    fleet, model = Fleet([config]), Model(vocabulary=256)
    model.load_state_dict({name: weight[0].detach().clone() for name, weight in fleet.state.weights.items()})
    betas = (config.optimizer.links["adam"].beta1, config.optimizer.links["adam"].beta2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=betas, eps=1e-5, weight_decay=0)
    recorder = lab.record(model, optimizer, every=1, out=tmp_path / "probes.jsonl")
    for step in range(config.steps):
        tokens = fleet.feed.loader.batch(step)[0]
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)
    tape = Recorder(fleet)
    for result in train(fleet):
        tape.keep(result)
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    part = {name: f"block{name.split('.')[1]}" if name.startswith("layers") else "" for name in sizes}
    part |= {"embedding.weight": "embedding", "norm.weight": "other", "norm.bias": "other", "lm_head.weight": "head"}
    theirs = defaultdict[tuple[int, str, str], list[tuple[float, int]]](list)
    for step, name, where, value in tape.runs()[0].metrics:
        theirs[step, {"train_loss": "loss"}.get(name, name), part.get(where, where)].append(
            (value, sizes.get(where, 1))
        )
    rows = {row["step"]: row for row in written(tmp_path / "probes.jsonl")[1:]}
    assert len({name for _, name, _ in theirs}) == len(NAMES)
    for (step, name, where), numbers in theirs.items():
        total = sum(size for _, size in numbers)
        if name in ("grad_rms", "param_rms"):
            expected = math.sqrt(sum(value**2 * size for value, size in numbers) / total)
        elif name in ("update_rms", "eps_ratio", "moment_ratio"):
            expected = max(value for value, _ in numbers)
        else:
            expected = sum(value * size for value, size in numbers) / total
        found = rows[step][f"{name}/{where}" if where else name]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7), (step, name, where)


def test_every_column_is_on_the_page_and_held_against_the_labs_probe(tmp_path: Path) -> None:
    page = (HERE.parent / "docs" / "record_your_run.md").read_text(encoding="utf-8")
    words = {*re.findall(r"`(\w+)", page)}
    words |= {word.replace("FORMAT", fmt) for word in words for fmt in ("fp16", "e4m3", "mx")}
    rows = {mlp: run(built(mlp=mlp), tmp_path / f"{mlp.__name__}.jsonl") for mlp in (dense, Experts)}
    columns = {mlp: {name.partition("/")[0] for row in rows[mlp] for name in row} for mlp in rows}
    assert set.union(*columns.values()) - words == {"step"}
    # that of attention is measured of what a fused kernel was given, as below
    assert {name for name in columns[dense] if name in PROBES} - {*NAMES} == {"attention_entropy"}
    # what no move of which means anything, or which is read otherwise; and of other models, loops and updates
    known = {name for name, row in quantities().items() if "extra" not in row}
    assert set.union(*columns.values()) - known == UNREAD
    of_checks = {"loss_code", "token_weights", "same_batch", "probabilities"}  # of "code/loss", "sample_weight", ...
    assert known - set.union(*columns.values()) == {
        "batch_rms",
        "buffer_written",
        "lacks",
        "left_out",
        "updates_lost",
        *of_checks,
    }


# the forward pass, however it is made


@torch.no_grad()
def attention_of(model: Model, tokens: Tensor) -> list[tuple[float, float]]:
    """The largest score and the mean entropy of each block, with all scores written out."""
    found = []
    x = model.embedding(tokens)
    for layer in model.layers:
        y = layer.attention_norm(x)
        q = layer.attention.q_proj(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k = layer.attention.kv_proj(y).chunk(2, -1)[0][:, None]
        scores = 0.3 * q @ k.transpose(-1, -2) + torch.full((LENGTH, LENGTH), -math.inf).triu(1)
        weights = scores.softmax(-1)
        found.append((float(scores.max()), float(-(weights * weights.clamp(min=1e-30).log()).sum(-1).mean())))
        x = layer(x)
    return found


def test_scores_of_a_fused_kernel_are_those_written_out(tmp_path: Path) -> None:
    (row,) = run(built(), tmp_path / "probes.jsonl", 1)
    for number, (largest, entropy) in enumerate(attention_of(built(), batch(0)[:, :-1])):
        assert row[f"attention_logit_max/block{number}"] == pytest.approx(largest, rel=1e-5)
        assert row[f"attention_entropy/block{number}"] == pytest.approx(entropy, rel=1e-5)
    assert row["attention_logit_max"] == max(row[f"attention_logit_max/block{number}"] for number in range(DEPTH))
    assert row["attention_entropy"] == min(row[f"attention_entropy/block{number}"] for number in range(DEPTH))


def test_a_sink_takes_its_share_of_attention() -> None:
    torch.manual_seed(0)
    query, key, sink = torch.randn(2, HEADS, 5, 4), torch.randn(2, HEADS, 5, 4), torch.randn(HEADS)
    heard = sampled({"query": query, "key": key, "s_aux": sink, "scaling": 0.5}, "bhtk")
    scores = query @ key.transpose(-1, -2) * 0.5
    whole = torch.cat([scores, sink[:, None, None].expand(2, HEADS, 5, 1)], -1).softmax(-1)
    torch.testing.assert_close(heard.weights_rbhts[0], whole[..., :-1])
    torch.testing.assert_close(heard.scores_rbhts[0], scores)


class Padded(nn.Module):
    """A block of attention in which the first three tokens are padding, which nobody sees and which sees nobody."""

    def __init__(self, axes: str) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.axes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), axes
        self.mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        self.mask[:3], self.mask[:, :3] = False, False

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), x, self.v_proj(x)
        if "h" in self.axes:
            q, k, v = q[:, None], k[:, None], v[:, None]
        mask = self.mask.expand(len(x), -1, -1) if self.axes.startswith("b") else self.mask
        return x + F.scaled_dot_product_attention(q, k, v, mask[:, None] if self.axes == "bhts" else mask).view_as(x)


@pytest.mark.parametrize("axes", ["hts", "ts", "bts", "bhts"])
def test_padding_has_no_entropy_of_attention_and_one_head_needs_no_axis(tmp_path: Path, axes: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(9, WIDTH), "layers": nn.ModuleList([Padded(axes), Padded(axes)])})
    model.forward = lambda x: model.layers[1](model.layers[0](model.embedding(x)))  # type: ignore[method-assign]
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.randint(9, (2, LENGTH))
    hidden, (block, _) = model.embedding(x), model.layers
    scores = (block.q_proj(hidden) @ hidden.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(~block.mask, -math.inf)
    entropy = torch.special.entr(scores[:, 3:].softmax(-1)).sum(-1).mean().item()
    recorder = lab.record(model, optimizer, every=1, out=tmp_path / "probes.jsonl")
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    (row,) = written(tmp_path / "probes.jsonl")[1:]
    assert row["attention_entropy/block0"] == pytest.approx(entropy, rel=1e-5)
    assert row["attention_logit_max/block0"] == pytest.approx(scores.max().item(), rel=1e-5)


@pytest.mark.parametrize("values", [(math.nan, 3.0), (3.0, math.nan)])
def test_a_largest_number_that_is_unknown_in_part_is_unknown(values: tuple[float, float]) -> None:
    known = [Known(value, 1.0) for value in values]
    assert math.isnan(combined("attention_logit_max", known).value)
    assert combined("attention_logit_max", [Known(3.0, 1.0), Known(math.nan, 0.0)]).value == 3.0


PARTS = [Known(1.0, 1.0), Known(9.0, 1.0)]


@pytest.mark.parametrize(
    ("how", "of_ranks", "of_tensors", "of_parts"),
    [
        ({}, 5.0, 5.0, 9.0),
        ({"largest": True}, 9.0, 9.0, 9.0),
        ({"is_root": True}, math.sqrt(41), math.sqrt(41), 9.0),
        ({"largest_tensor": True}, 5.0, 9.0, 9.0),
        ({"falls": True}, 5.0, 5.0, 1.0),
    ],
)
def test_a_number_is_combined_as_its_probe_says(
    how: dict[str, bool], of_ranks: float, of_tensors: float, of_parts: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROBES._entries, "planted", Probe("planted", "block_output", measure=torch.amax, **how))
    for name in ("planted", "expert_planted"):
        assert combined(name, PARTS).value == pytest.approx(of_ranks)
        assert combined(name, PARTS, of_tensors=True).value == pytest.approx(of_tensors)
    assert of_whole("planted", {"block0": 1.0, "block1": 9.0}) == of_parts


def test_a_probe_added_to_those_of_blocks_is_the_largest_over_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PROBES, "_entries", {**PROBES._entries})
    sizes = iter([1.0] * DEPTH + [9.0] * DEPTH)

    @probe(event="block_output", largest=True)
    def planted(x_rbtd: Tensor) -> Tensor:
        return torch.tensor([next(sizes)])

    monkeypatch.setattr(measuring, "OF_BLOCK", (planted,))
    model, out = built(), tmp_path / "probes.jsonl"
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=1, out=out)
    losses = [loss_of(model, rows_bt) / 2 for rows_bt in batch(0).chunk(2)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    recorder.step(sum(losses))
    assert written(out)[1]["planted/block0"] == 9.0


@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=())
def flash(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool
) -> Tensor:  # pretends to be the kernel of a package, which has no other way in
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, scale=softmax_scale
    ).transpose(1, 2)


def by_a_foreign_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    mixed = torch.ops.flash_attn._flash_attn_forward(*(x.transpose(1, 2) for x in (q, k, v)), 0.0, 0.5, True)
    return mixed.transpose(1, 2)


def by_softmax(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return (0.5 * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1) @ v


def by_products_of_all_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.baddbmm(torch.where(mask, 0.0, -1e38), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5)
    return (F.softmax(scores, dim=-1) @ v.flatten(0, 1)).view_as(q)


def by_a_mask_of_truths(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, False, scale=0.5)


def by_an_added_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.where(mask, 0.0, -math.inf)[None, None], scale=0.5)


KERNELS = (by_a_foreign_kernel, by_softmax, by_products_of_all_heads, by_a_mask_of_truths, by_an_added_mask)


@pytest.mark.parametrize("kernel", KERNELS)
def test_attention_is_heard_whatever_computes_it(kernel: Callable[..., Tensor], tmp_path: Path) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def split(self, x: Tensor) -> Any:
            return self.qkv(x).unflatten(-1, (3, HEADS, -1)).transpose(1, 3).unbind(2)

        def forward(self, x: Tensor) -> Tensor:
            mixed = kernel(*self.split(x), torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())
            return x + mixed.detach().transpose(1, 2).flatten(2) + self.qkv(x)[..., :WIDTH]

    class Numbered(nn.Module):
        """Blocks that stand in no list."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
            self.block_0, self.block_1 = nn.Sequential(Attending()), nn.Sequential(Attending())

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.block_1(self.block_0(self.embedding(tokens))))

    torch.manual_seed(0)
    model = Numbered()
    x, largest = model.embedding(batch(0)[:, :-1]).detach(), []
    for block in (model.block_0, model.block_1):
        q, k, _ = block[0].split(x)
        largest.append((0.5 * q @ k.mT + torch.full((LENGTH, LENGTH), -math.inf).triu(1)).max().item())
        x = block(x)
    (row,) = run(model, tmp_path / "probes.jsonl", 1)
    assert [row[f"attention_logit_max/block{number}"] for number in range(2)] == pytest.approx(largest, rel=1e-5)


def test_of_a_large_batch_some_queries_meet_all_keys() -> None:
    q, k = torch.zeros(9, 1, 200, 4), torch.zeros(9, 1, 200, 4)
    q[..., 0], k[:, :, 150, 0] = 1.0, 50.0
    scores, weights, *_ = sampled({"query": q, "key": k, "is_causal": True}, "bhtk")
    assert scores.shape == (1, 4, 1, 64, 200)
    assert scores.max() == 25.0
    assert weights[0, 0, 0, -1].argmax() == 150
    q[-1, :, -1], k[-1] = 3.0, 100.0  # the last query of the last row is always among them
    assert sampled({"query": q, "key": k}, "bhtk").scores_rbhts.max() == 600.0


@pytest.mark.parametrize("hidden", [-math.inf, -1e9, torch.finfo(torch.float32).min])
def test_a_key_is_hidden_by_any_number_that_masks_use(hidden: float) -> None:
    band_ts = torch.ones(8, 8, dtype=torch.bool).tril().triu(-3)
    q = torch.zeros(1, 1, 8, 4)
    scores = sampled({"query": q, "key": q, "attn_mask": torch.where(band_ts, 0.0, hidden)}, "bhtk")
    assert scores.ahead == 0
    assert scores.seen.item() == pytest.approx(sum(min(t, 4) / t for t in range(1, 9)) / 8)


# training is what it was


def trained_weights(make: Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]], out: Path | None) -> list[Tensor]:
    model, called = make()
    run(model, out, 4, every=2, called=called)
    return [weight.detach() for weight in model.parameters()]


def eager() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = built(dropout=0.1)
    return model, model


def compiled(backend: str = "eager") -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = torch.compile(built(dropout=0.1), backend=backend)
    return model, model


def compiled_in_place() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    model = built(dropout=0.1)
    model.compile(backend="eager")
    return model, model


def compiled_by_block() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    model = built(dropout=0.1)
    for layer in model.layers:
        layer.compile(backend="eager")
    return model, model


class Wrapped(nn.Module):
    """A module around the model that is never called itself, as in Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(built(dropout=0.1), backend="eager")


def compiled_inside() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    torch._dynamo.reset()
    model = Wrapped()
    return model, model.model


def checkpointed() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    model = built(dropout=0.1, is_checkpointed=True)
    return model, model


WAYS = (
    *(eager, compiled, checkpointed),
    *(pytest.param(make, marks=pytest.mark.slow) for make in (compiled_in_place, compiled_by_block, compiled_inside)),
)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which the compiler looks at
@pytest.mark.parametrize("make", WAYS)
def test_training_keeps_its_bits_and_the_numbers_do_not_depend_on_how_it_is_run(
    make: Callable[[], tuple[nn.Module, Callable[[Tensor], Tensor]]], tmp_path: Path
) -> None:
    """Dropout draws random numbers, so a pass more or less would show."""
    deaf, heard = trained_weights(make, None), trained_weights(make, tmp_path / "probes.jsonl")
    assert all(map(torch.equal, deaf, heard))
    trained_weights(eager, tmp_path / "eager.jsonl")
    ours, theirs = (written(tmp_path / f"{name}.jsonl") for name in ("probes", "eager"))
    assert ours[0] | {"blocks": {}} == theirs[0] | {"blocks": {}}
    assert [row["step"] for row in ours[1:]] == [0, 1, 2, 3]
    assert all("attention_logit_max/block1" in row for row in ours[1::2])
    assert [set(row) for row in ours[2::2]] == [{"step", "loss"}] * 2
    for our, their in zip(ours[1:], theirs[1:], strict=True):
        for name in (name for name in our if name.startswith("functions")):
            our[name] = [function.replace("uses model.", "uses ") for function in our[name]]  # of the module around it
        for name in ("code/embedding", "code/head"):  # in the same way
            assert (name in our) == (name in their)
            our[name] = their[name] = 0
        same(our, their)


@pytest.mark.slow
def test_a_model_that_is_compiled_afterwards_trains_on_and_is_not_heard(tmp_path: Path) -> None:
    """The hooks of the first step are compiled away, and the compiled module is not the one that was given."""

    def made() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        torch._dynamo.reset()
        model, inner = built(dropout=0.1), []

        def called(tokens: Tensor) -> Tensor:
            inner[:] = inner or [torch.compile(model, backend="eager")]
            return inner[0](tokens)

        return model, called

    assert all(map(torch.equal, trained_weights(made, None), trained_weights(made, tmp_path / "probes.jsonl")))
    header, *rows = written(tmp_path / "probes.jsonl")
    assert {"residual stream", "attention scores", "output logits"} <= set(header["not_found"])
    assert all("grad_rms" in row for row in rows[::2])


@pytest.mark.slow
@compiles
def test_a_model_that_is_really_compiled_keeps_its_bits_and_is_compiled_once(tmp_path: Path) -> None:
    deaf = trained_weights(lambda: compiled("inductor"), None)
    frames = dict(torch._dynamo.utils.counters["frames"])
    heard = trained_weights(lambda: compiled("inductor"), tmp_path / "probes.jsonl")
    assert all(map(torch.equal, deaf, heard))
    assert dict(torch._dynamo.utils.counters["frames"]) == frames
    assert "attention_logit_max/block2" in written(tmp_path / "probes.jsonl")[1]


def test_nothing_is_left_on_a_model_between_the_steps_that_are_measured(tmp_path: Path) -> None:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=3, out=tmp_path / "probes.jsonl")

    def hooks() -> int:
        of_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        of_steps = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
        return of_modules + of_steps - 3  # which read the settings and keep entries of weights at every step

    counts = []
    for step in range(5):
        counts.append(hooks())
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    assert [count > 0 for count in counts] == [True, False, False, True, False]


@pytest.mark.parametrize("clip", [True, False])
def test_around_a_rise_of_the_loss_sizes_are_written_of_every_update(clip: bool, tmp_path: Path) -> None:
    def trained(on_spike: bool) -> list[Tensor]:
        model = built()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        recorder = lab.record(model, optimizer, every=100, out=out, on_spike=on_spike)
        for step in range(120):
            loss = loss_of(model, batch(0))
            loss.backward()
            for weight in model.layers[1].parameters() if step == 60 else ():
                weight.grad.mul_(1e4)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss + 5 * (61 <= step < 70))
        recorder.close()
        assert not optimizer._optimizer_step_pre_hooks
        return [weight.detach().clone() for weight in model.parameters()]

    out = tmp_path / "plain.jsonl"
    plain = trained(False)
    out = tmp_path / "probes.jsonl"
    assert all(map(torch.equal, plain, trained(True)))
    recording = read_recording(out)
    assert recording.step_m.tolist() == [0, *range(41, 67), 100]
    rms_m = recording.columns["grad_rms", "block1"]
    assert rms_m[20] > 1e3 * rms_m[19]  # before clipping
    assert recording.columns["grad_norm", ""][20] == pytest.approx(max(recording.columns["grad_norm", ""]))
    first = diagnose(recording).findings[0]
    assert (first.kind, first.parts, first.since, first.step) == ("gradients", ["block1"], 59, 60)


def test_what_a_measured_pass_returned_does_not_outlive_its_step(tmp_path: Path) -> None:
    """Logits are the largest tensors of a pass, and the garbage collector does not see cycles through its graph."""
    model, returned = built(), list[weakref.ref[Tensor]]()
    model.lm_head.register_forward_hook(lambda _, __, logits: returned.append(weakref.ref(logits)))
    run(model, tmp_path / "probes.jsonl", steps=4)
    assert [logits() for logits in returned] == [None] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_model_may_be_copied_while_it_is_measured(copied: Callable[..., Any], tmp_path: Path) -> None:
    """As for an average of weights, a reference policy, or a file that holds the model."""

    def recorded(out: Path, is_copied: bool) -> list[dict[str, Any]]:
        model = built()
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = lab.record(model, optimizer, every=1, out=out)
        for step in range(2):
            loss = loss_of(model, batch(step))
            if is_copied:
                twin, its_optimizer = copied((model, optimizer))
                with torch.no_grad():
                    loss_of(twin, batch(step + 6))
                loss_of(twin, batch(step + 7)).backward()
                its_optimizer.step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step(loss)
        return written(out)

    assert recorded(tmp_path / "copied.jsonl", True) == recorded(tmp_path / "plain.jsonl", False)


@pytest.mark.parametrize("clip", [True, False])
def test_a_gradient_that_is_not_finite_is_named_before_clipping_spreads_it(clip: bool, tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=1, out=out)
    loss = loss_of(model, batch(0))
    loss.backward()
    name, weight = next((name, weight) for name, weight in model.named_parameters() if "layers.1" in name)
    weight.grad.view(-1)[0] = math.nan
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    recorder.step(loss)
    (row,) = written(out)[1:]
    assert {key: value for key, value in row.items() if key.startswith("gradient_not")} == {
        "gradient_not_finite/block1": [name]
    }
    assert len(row.get("update_not_finite/block0", [])) > 0 if clip else "update_not_finite/block0" not in row


def test_gradients_that_are_exactly_zero_are_named(tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"
    name, dead = next((name, weight) for name, weight in model.named_parameters() if "layers.1" in name)
    dead.register_hook(torch.zeros_like)
    (first, *_) = run(model, out)
    assert {key: value for key, value in first.items() if key.startswith("gradient_")} == {
        "gradient_zero/block1": [name]
    }


def test_what_a_loop_adds_is_recorded_where_it_is_measured(tmp_path: Path) -> None:
    model, out, calls = built(), tmp_path / "probes.jsonl", list[int]()

    def reward() -> Tensor:
        calls.append(len(calls))
        return torch.tensor(0.5 + len(calls))

    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=2, out=out, extra={"reward": reward})
    for step in range(4):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
    recorder.close()
    assert [row.get("reward") for row in written(out)[1:]] == [1.5, None, 2.5, None]


def test_an_evaluation_in_between_is_not_measured(tmp_path: Path) -> None:
    rows = []
    for is_evaluated in (False, True):
        model, out = built(), tmp_path / f"{is_evaluated}.jsonl"
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = lab.record(model, optimizer, every=1, out=out)
        if is_evaluated:
            with torch.no_grad():
                model(batch(9, rows=2)[:, :-1])
        loss = loss_of(model, batch(0))
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        rows.append(written(out)[1])
    assert rows[0] == rows[1]


OF_BATCH = ("block_kurtosis", "block_underflow_e4m3", "router_balance", "label_perplexity", "token_perplexity")


def test_micro_batches_count_together(tmp_path: Path) -> None:
    """Means over micro-batches of equal size are those of the whole batch; gradients are sums already."""
    rows = []
    for parts in (1, 2):
        model, out = built(mlp=Experts), tmp_path / f"{parts}.jsonl"
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = lab.record(model, optimizer, every=1, out=out)
        losses = [loss_of(model, rows_bt) / parts for rows_bt in batch(0).chunk(parts)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        recorder.step(sum(losses))
        rows.append(written(out)[1])
    uneven = [name for name in rows[0] if name.startswith((*OF_BATCH, "given"))]  # of the first one
    for row in rows:
        for name in uneven:
            del row[name]
    same(rows[1], rows[0], rel=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_and_a_loss_scale_are_seen_through(dtype: torch.dtype, tmp_path: Path) -> None:
    rows = []
    for is_mixed in (False, True):
        model, out = built(), tmp_path / f"{is_mixed}.jsonl"
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=is_mixed and dtype == torch.float16)
        recorder = lab.record(model, optimizer, every=1, out=out, scaler=scaler)
        with torch.autocast("cpu", dtype, enabled=is_mixed):
            loss = loss_of(model, batch(0))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        recorder.step(loss)
        rows.append(written(out)[1])
    full, mixed = rows
    assert full["grad_norm"] > 0.5
    assert full["grad_norm_clipped"] == pytest.approx(0.1, rel=1e-4) == mixed["grad_norm_clipped"]
    for name in ("grad_norm", "attention_logit_max/block1", "block_rms/block2", "param_rms/block0", "update_rms"):
        assert mixed[name] == pytest.approx(full[name], rel=0.03), name
    assert mixed.get("loss_scale") == (2.0**12 if dtype == torch.float16 else None)


@pytest.mark.parametrize(("is_unscaled", "scale"), [(True, 2.0**12), (False, 2.0**12), (True, 1.0)])
def test_clipping_under_a_loss_scale_is_seen(is_unscaled: bool, scale: float, tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    recorder = lab.record(model, optimizer, every=1, out=out, scaler=scaler)
    for step in range(3):
        loss = loss_of(model, batch(step))
        scaler.scale(loss).backward()
        if is_unscaled:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        recorder.step(loss)
    recorder.close()
    findings = diagnose(read_recording(out)).findings
    found = [(each.kind, each.parts, each.since) for each in findings]
    assert found == [("precision", [], None)] * (not is_unscaled)
    assert all("smaller by it (grad_norm_clipped is 2.44e-5), from" in sentence(each) for each in findings)


@pytest.mark.parametrize("spoiled", ["forward", "optimizer", "writing"])
def test_a_failure_of_the_recorder_ends_it_and_not_training(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "folder" / "probes.jsonl"
    out.parent.mkdir()

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("planted")

    # Hydra, in a test before this one, turns loggers off and lets the root pass errors only
    monkeypatch.setattr(logging.getLogger("lab"), "disabled", False)
    caplog.set_level("WARNING", "lab")
    if spoiled == "forward":
        monkeypatch.setattr(attention, "evenly", fail)
    elif spoiled == "optimizer":
        monkeypatch.setattr(measuring.updates, "param_rms", fail)
    else:
        monkeypatch.setattr(recording, "_write", fail)
    model = built()
    run(model, out, 3, every=2)
    deaf = built()
    run(deaf, None, 3)
    assert all(map(torch.equal, model.parameters(), deaf.parameters()))
    (warning,) = caplog.records
    assert "planted" in warning.getMessage()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch._C._len_torch_function_stack()


def test_a_recorder_that_is_dropped_lets_go_of_the_model(tmp_path: Path) -> None:
    """As in a notebook, where a cell is run again before the update that was to be measured."""
    backward, model = torch.autograd.backward, built()
    recorder = lab.record(model, torch.optim.AdamW(model.parameters()), out=tmp_path / "probes.jsonl")
    assert torch.autograd.backward is not backward
    del recorder
    assert torch.autograd.backward is backward
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# experts and optimizers


def test_routers_and_experts_are_measured_one_by_one(tmp_path: Path) -> None:
    model, (row,) = built(mlp=Experts), run(built(mlp=Experts), tmp_path / "probes.jsonl", 1)
    inputs = []
    for layer in model.layers:
        layer.mlp.router.register_forward_hook(lambda _, __, logits: inputs.append(logits.detach()))
    loss_of(model, batch(0)).backward()
    for number, logits_bte in enumerate(inputs):
        counts = logits_bte.topk(2).indices.flatten().bincount(minlength=4).tolist()
        assert row[f"expert_load/block{number}"] == counts
        assert row[f"expert_load_max/block{number}"] == pytest.approx(max(counts) / (sum(counts) / 4))
        assert row[f"dead_experts/block{number}"] == sum(count < 0.1 * sum(counts) / 4 for count in counts)
        assert row[f"router_logit_max/block{number}"] == pytest.approx(float(logits_bte.max()), rel=1e-5)
        assert row[f"router_log_z/block{number}"] == pytest.approx(float(logits_bte.logsumexp(-1).mean()), rel=1e-5)
        experts = [torch.cat([w.flatten() for w in e.parameters()]) for e in model.layers[number].mlp.experts]
        rms = [float(weights.detach().square().mean().sqrt()) for weights in experts]
        assert row[f"expert_param_rms/block{number}"] == pytest.approx(rms, rel=1e-5)
        assert len(row[f"expert_grad_rms/block{number}"]) == len(row[f"expert_update_rms/block{number}"]) == 4
    assert row["expert_load_max"] == max(row[f"expert_load_max/block{number}"] for number in range(DEPTH))


def test_experts_that_get_no_gradient_are_counted(tmp_path: Path) -> None:
    model: Any = built(mlp=Experts)
    model.layers[0].mlp.experts[1].register_forward_hook(lambda _, __, output: output * 0)
    (row,) = run(model, tmp_path / "probes.jsonl", 1)
    assert (row["idle_experts/block0"], row["idle_experts/block1"]) == (0.25, 0.0)


class Inside(nn.Module):
    """A router that holds what makes its logits, and returns the experts that it chose."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).softmax(-1).topk(2)


class Alone(nn.Module):
    """The same by a weight of its own, so that nothing returns the logits."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Any:
        return (x @ self.weight.T).softmax(-1).topk(2)


class Renamed(nn.Module):
    """Experts and their router by other names."""

    def __init__(self, usual: Experts, names: str, router: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        self.top_k, self.names = 2, names.split()
        for name, part in zip(self.names, (router(usual.router), usual.experts), strict=True):
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        router, experts = map(self.get_submodule, self.names)
        share, chosen = router(x)
        outputs = torch.stack([expert(x) for expert in experts.children()], -2)
        return (share[..., None] * outputs.gather(-2, chosen[..., None].expand(*chosen.shape, WIDTH))).sum(-2)


@pytest.mark.parametrize("names", ["gating experts", "switch ffns", "gate mlp_experts", "router experts"])
@pytest.mark.parametrize("router", [Inside, Alone])
def test_experts_of_any_name_are_a_list_beside_a_weight_with_a_row_for_each(
    names: str, router: Callable[[nn.Linear], nn.Module], tmp_path: Path
) -> None:
    (usual,) = run(built(mlp=Experts), tmp_path / "usual.jsonl", 1)
    model, out = built(mlp=Experts), tmp_path / "probes.jsonl"
    for layer in model.layers:
        layer.mlp = Renamed(layer.mlp, names, router)
    (row,) = run(model, out, 1)
    hears_logits = router is Inside
    assert written(out)[0]["not_found"] == ([] if hears_logits else ["router logits"])
    for name in usual:
        if "expert" in name or ("router" in name and hears_logits):
            assert row[name] == pytest.approx(usual[name], rel=1e-4), name


class Sorting(Inside):
    """The same by what nobody needs for a choice alone."""

    def forward(self, x: Tensor) -> Any:
        return [sorted_[..., :2] for sorted_ in self.linear(x).softmax(-1).sort(descending=True)]


class Asking(Inside):
    """The same, which also asks for the experts with the highest mean, and for the best tokens of each."""

    def forward(self, x: Tensor) -> Any:
        share = self.linear(x).softmax(-1)
        share.flatten(0, -2).mean(0).topk(1)
        share.topk(1, dim=0)
        return torch.topk(input=share, k=2)


@pytest.mark.parametrize("router", [Inside, Asking, Sorting])
def test_how_many_experts_are_chosen_is_unknown_unless_a_block_says_so_to_topk(
    router: Callable[[nn.Linear], nn.Module], tmp_path: Path
) -> None:
    (usual,) = run(built(mlp=Experts), tmp_path / "usual.jsonl", 1)
    model, out = built(mlp=Experts), tmp_path / "probes.jsonl"
    for layer in model.layers:
        layer.mlp = Renamed(layer.mlp, "router experts", router)
        del layer.mlp.top_k
    (row,) = run(model, out, 1)
    assert written(out)[0]["not_found"] == (["expert load"] if router is Sorting else [])
    assert "router_entropy" in row
    for name in ("router_balance/block1", "expert_load/block1"):
        assert row.get(name) == (None if router is Sorting else pytest.approx(usual[name], rel=1e-4))


class Scaled(torch.optim.SGD):
    """An optimizer that is unknown to the recorder."""


class OwnRate(torch.optim.Optimizer):
    """An optimizer that finds its rate itself, has three betas, and counts steps nowhere."""

    def __init__(self, weights: Any, lr: float) -> None:
        super().__init__(weights, {"lr": None, "betas": (0.9, 0.95, 0.99), "eps": (1e-30, 1e-3)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            self.state[weight]["exp_avg_sq"] = weight.grad.square()
            weight -= 1e-3 * weight.grad.sign()


@pytest.mark.parametrize("optimizer", [torch.optim.Adafactor, OwnRate, partial(torch.optim.SGD, lr=0.0)])
def test_an_optimizer_may_lack_what_others_have(optimizer: Any, tmp_path: Path) -> None:
    """Two epsilons, no learning rate or none yet, or moments of another kind end no recording."""
    model, out = built(), tmp_path / "probes.jsonl"
    optimizer = optimizer(model.parameters(), **({} if isinstance(optimizer, partial) else {"lr": 1e-2}))
    before = model.lm_head.weight.detach().clone()
    recorder = lab.record(model, optimizer, every=1, out=out)
    loss = loss_of(model, batch(0))
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    header, row = written(out)
    ratio = (before - model.lm_head.weight.detach()).norm() / before.norm()
    assert row["update_ratio/head"] == pytest.approx(float(ratio), rel=1e-4)
    assert header["not_found"] == []
    rate = optimizer.param_groups[0]["lr"]
    assert row.get("lr") == rate
    assert ("update_rms" in row) == bool(rate)


def test_the_update_of_any_optimizer_is_seen_in_the_weights(tmp_path: Path) -> None:
    weights = [weight.detach().clone() for weight in built().lm_head.parameters()]
    model = built()
    (row,) = run(model, tmp_path / "probes.jsonl", 1, optimizer=Scaled)
    step = (weights[0] - model.lm_head.weight.detach()) / 1e-2
    assert row["update_rms/head"] == pytest.approx(float(step.square().mean().sqrt()), rel=1e-4)
    assert row["update_ratio/head"] == pytest.approx(float(1e-2 * step.norm() / weights[0].norm()), rel=1e-4)
    assert "moment_ratio" not in row
    assert "eps_ratio" not in row
    assert "updates, of a sample of weights" in written(tmp_path / "probes.jsonl")[0]["found"]


def test_several_optimizers_share_a_model(tmp_path: Path) -> None:
    model = built()
    matrices = [weight for weight in model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(others, lr=1e-3)]
    recorder = lab.record(model, optimizers, every=1, out=tmp_path / "probes.jsonl")
    loss = loss_of(model, batch(0))
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    recorder.step(loss)
    row = written(tmp_path / "probes.jsonl")[1]
    assert row["update_rms/head"] == pytest.approx(1, rel=0.01)  # the first step of Adam
    assert 0.01 < row["update_rms/block0"] < 2
    assert row["grad_norm"] == pytest.approx(row["grad_norm_clipped"], rel=1e-6)


# what a loop decides, and what it should not touch


def looped(
    out: Path,
    *,
    weights: Callable[[int, Model], None] = lambda step, model: None,
    weight_of_loss: Callable[[int], float] = lambda step: 1.0,
    keeps_gradients: Callable[[int], bool] = lambda step: False,
    gradients: Callable[[int, Model], None] = lambda step, model: None,
    max_norm: Callable[[int], float] = lambda step: 0.5,
    settings: Callable[[int, torch.optim.Optimizer], None] = lambda step, optimizer: None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 16,
) -> dict[int, Row]:
    """Rows of a loop that is recorded every 5 steps, in which something acts; the second group is that of block1."""
    model = built()
    inside = {id(weight) for weight in model.layers[1].parameters()}
    groups = [[weight for weight in model.parameters() if (id(weight) in inside) == is_in] for is_in in (False, True)]
    made = optimizer([{"params": group} for group in groups], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / 1000)
    recorder = lab.record(model, made, every=5, out=out)
    for step in range(steps):
        with torch.no_grad():
            weights(step, model)
        loss = weight_of_loss(step) * loss_of(model, batch(step))
        if not keeps_gradients(step):
            made.zero_grad()
        loss.backward()
        gradients(step, model)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm(step))
        settings(step, made)
        made.step()
        schedule.step()
        recorder.step(loss)
    recorder.close()
    return {row["step"]: row for row in written(out)[1:]}


def test_settings_are_those_of_the_update_and_written_where_they_jump(tmp_path: Path) -> None:
    """Not those of the next one, for which the schedule has been stepped; and not at every step, as it does."""

    def forget(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 7:
            optimizer.param_groups[1]["betas"] = (0.9, 0.0)

    rows = looped(tmp_path / "probes.jsonl", settings=forget, steps=21)
    others = ["block0", "block2", "embedding", "head", "other"]
    usual = {"lr": 0.01, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    assert rows[0]["settings"] == {
        "clipping": {"max_norm": 0.5},
        "0.0": {"of": others} | usual,
        "0.1": {"of": ["block1"]} | usual,
    }
    assert rows[7] == {"step": 7, "loss": rows[7]["loss"], "settings": {"0.1": {"beta2": [0.999, 0.0]}}}
    assert [step for step, row in rows.items() if "settings" in row] == [0, 5, 7, 10, 15, 20]
    assert rows[5]["settings"] == {"0.0": {"lr": 0.00995}, "0.1": {"lr": 0.00995}}
    settings = {(each.name, *each.parts): each for each in read_recording(tmp_path / "probes.jsonl").settings}
    assert settings["beta2", "block1"].step_n == [0, 6, 7]
    assert settings["beta2", "block1"].value_n == [0.999, 0.999, 0.0]
    assert settings["lr", "block1"].step_n == [0, 5, 10, 15, 20]


@torch.no_grad()
def transpose(model: Model) -> None:
    weight = next(weight for weight in model.layers[1].parameters() if weight.shape == (WIDTH, WIDTH))
    weight.copy_(weight.T.clone())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9), torch.optim.NAdam])
def test_weights_that_something_else_has_written_moved_farther_than_updates_explain(
    optimizer: Any, tmp_path: Path
) -> None:
    """A transposed matrix has the same norm and the same distribution as before."""

    def act(step: int, model: Model) -> None:
        if step == 13:
            transpose(model)

    rows = looped(tmp_path / "probes.jsonl", weights=act, optimizer=optimizer)
    moved = {(step, name): value for step, row in rows.items() for name, value in row.items()}
    others = [moved[at] for at in moved if at != (15, "change_over_updates/block1") and "change_over" in at[1]]
    assert 0.1 < max(others) < 2
    weights = built().layers[1].named_parameters()
    name = next(name for name, weight in weights if weight.shape == (WIDTH, WIDTH))
    assert rows[15]["change_over_updates/block1"] > 5
    assert rows[15]["weight_moved/block1"][0] == f"layers.1.{name}"


@pytest.mark.parametrize("numbers", [8, 1])
def test_how_far_few_numbers_moved_says_nothing_of_who_moved_them(numbers: int, tmp_path: Path) -> None:
    """As the bias of a head of values, whose updates may nearly be zero in both rows, and not between them."""
    model = nn.Linear(WIDTH, numbers)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    recorder = lab.record(model, optimizer, every=5, out=tmp_path / "probes.jsonl")
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        model.bias.data += step == 3
    recorder.close()
    (found,) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings or [None]
    assert (found is not None and (found.kind, found.step) == ("weights", 5)) == (numbers == 8)


def test_a_learning_rate_that_was_high_between_two_rows_explains_what_it_moved(tmp_path: Path) -> None:
    def act(step: int, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4 if step % 5 == 0 else 1e-2

    rows = looped(tmp_path / "probes.jsonl", settings=act)
    beyond = [value for row in rows.values() for name, value in row.items() if name.startswith("change_over_updates")]
    assert 0.1 < max(beyond) < 2


def test_a_first_update_of_zero_says_nothing_of_those_that_follow(tmp_path: Path) -> None:
    """As of one factor of an adapter, while the other one is zero."""

    def act(step: int, model: Model) -> None:
        for weight in model.layers[1].parameters() if step % 5 == 0 else ():
            weight.grad.mul_(0 if step == 0 else 1e-4)

    rows = looped(tmp_path / "probes.jsonl", gradients=act, optimizer=partial(torch.optim.SGD, momentum=0.0))
    assert rows[5]["change_over_updates/block1"] <= 1 < rows[10]["change_over_updates/block1"]


@pytest.mark.parametrize("factor", [8.0, 0.25, -1.0])
def test_what_changes_gradients_before_they_are_clipped_is_measured(factor: float, tmp_path: Path) -> None:
    def act(step: int, model: Model) -> None:
        for weight in model.layers[1].parameters() if step >= 8 else ():
            weight.grad.mul_(factor)

    rows = looped(tmp_path / "probes.jsonl", gradients=act)
    others = [rows[5]["grad_edit/block1"], rows[10]["grad_edit/block0"], rows[10]["grad_edit/head"]]
    assert others == pytest.approx([1, 1, 1], rel=1e-6)
    assert rows[10]["grad_edit/block1"] == pytest.approx(abs(factor), rel=1e-5)
    assert rows[10]["grad_signs/block1"] == math.copysign(1, factor)
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("gradients", ["block1"], 5, 10)


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_what_changes_gradients_after_they_are_clipped_is_measured(max_norm: float, tmp_path: Path) -> None:
    """Settings are changed between clipping and the update, too."""

    def act(step: int, optimizer: torch.optim.Optimizer) -> None:
        for weight in optimizer.param_groups[1]["params"] if step >= 8 else ():
            weight.grad.mul_(-3)

    rows = looped(tmp_path / "probes.jsonl", settings=act, max_norm=lambda step: max_norm)
    assert rows[5]["grad_edit/block1"] == pytest.approx(1, rel=1e-5)
    assert rows[10]["grad_edit/block1"] == pytest.approx(3, rel=1e-5)
    assert rows[10]["grad_signs/block1"] == -1
    assert rows[10]["grad_edit/block0"] == pytest.approx(1, rel=1e-5)


def test_weights_that_a_pass_has_and_the_update_has_not_are_told(tmp_path: Path) -> None:
    """As of a gather that has not ended, which no write to a weight shows."""
    kept = dict[nn.Parameter, Tensor]()

    def other_weights(step: int, model: Model) -> None:
        for weight in model.layers[1].parameters() if step >= 8 else ():
            kept[weight], weight.data = weight.data, weight.data * (torch.arange(weight.numel()) % 2).view_as(weight)

    def own_weights(step: int, model: Model) -> None:
        for weight, values in kept.items():
            weight.data = values

    rows = looped(tmp_path / "probes.jsonl", weights=other_weights, gradients=own_weights)
    assert rows[5]["weights_in_pass/block1"] == rows[10]["weights_in_pass/block0"] == 1
    assert 0.4 < rows[10]["weights_in_pass/block1"] < 0.6
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("weights", ["block1"], 5, 10)


def test_another_number_of_heads_is_told(tmp_path: Path) -> None:
    def heads(step: int, model: Model) -> None:
        model.layers[1].attention.heads = 2 if step < 8 else 4

    rows = looped(tmp_path / "probes.jsonl", weights=heads)
    assert (rows[5]["attention_heads/block1"], rows[10]["attention_heads/block1"]) == (2, 4)
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("attention", ["block1"], 5, 10)


@pytest.mark.parametrize("kind", ["coefficient", "function", "order", "sign", "axis", "same", "double"])
def test_a_loss_that_is_computed_in_another_way_is_told(kind: str, tmp_path: Path) -> None:
    model = built()

    def loss(step: int) -> Tensor:
        tokens, changed = batch(step), kind if step >= 8 else "same"
        logits = model(tokens[:, :-1]).flatten(0, 1)
        penalty = logits.logsumexp(-1).square().mean()
        if changed == "function":
            penalty = penalty.sqrt()
        elif changed == "order":
            penalty = logits.logsumexp(-1).mean().square()
        elif changed == "axis":
            penalty = logits.logsumexp(0).square().mean()
        usual = torch.zeros(())
        distance = usual - penalty if changed == "sign" else penalty - usual
        scale = 0.5 if changed == "coefficient" else 0.001
        loss = F.cross_entropy(logits, tokens[:, 1:].flatten())
        return loss.double() * (1 + scale * distance.double()) if kind == "double" else loss + scale * distance

    told = {
        "coefficient": ["no longer Mul(0.001)", "now Mul(0.5)"],
        "function": ["now Sqrt", "no longer Sub(Mean)", "now Sqrt(Mean)", "now Sub(Sqrt)"],
        "order": [
            *("no longer Mean(Pow)", "no longer Pow(Logsumexp)", "no longer Sub(Mean)"),
            *("now Mean(Logsumexp)", "now Pow(Mean)", "now Sub(Pow)"),
        ],
        "sign": ["no longer Sub(Mean)", "now Sub(data, Mean)"],
        "axis": ["no longer Logsumexp(-1) of the model", "now Logsumexp(0) of the model"],
    }
    backward = torch.autograd.backward
    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: None, loss)
    assert torch.autograd.backward is backward
    assert sum("functions/loss" in row for row in rows) == 1 + (kind in ("coefficient", "function", "axis"))
    read = Readings(read_recording(tmp_path / "probes.jsonl"))
    check, _ = CHECKS["functions that are called"]
    signs, (found, checks) = [*check(read)], diagnose(read.recording)
    outcomes = {"coefficient": "alarm", "same": "passed", "double": "passed"}  # since with that gradients grow
    assert checks["functions that are called"] == outcomes.get(kind, "changed without harm")
    assert [(sign.kind, sign.parts, read.step_m[sign.row]) for sign in signs] == [("data", (), 10)] * (kind in told)
    assert [(each.kind, each.parts, each.since, each.step) for each in found] == [("data", [], 5, 10)] * (
        kind == "coefficient"
    )
    assert [sign.functions for sign in signs] == [told[kind] for _ in signs]
    assert all("the loss is computed in another way" in what_moved(each) for each in found)


@pytest.mark.parametrize(
    ("objective", "is_told"),
    [
        (lambda logits, labels: F.cross_entropy(logits.softmax(-1).flatten(0, 1), labels.flatten()), True),
        (lambda logits, labels: F.cross_entropy(logits.softmax(-1).double().mT, labels), True),
        (lambda logits, labels: F.binary_cross_entropy_with_logits(logits.sigmoid(), one_hot(labels)), True),
        (lambda logits, labels: F.cross_entropy(logits.log_softmax(-1).flatten(0, 1), labels.flatten()), False),
        (lambda logits, labels: F.nll_loss((logits.softmax(-1) + 1e-9).log().mT, labels), False),
        (lambda logits, _: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean(), False),
    ],
)
def test_a_loss_that_takes_probabilities_for_logits_is_told(objective: Any, is_told: bool, tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"

    def loss(step: int) -> Tensor:
        tokens = batch(step)
        return objective(model(tokens[:, :-1]), tokens[:, 1:])

    run_with(model, out, lambda step: None, loss)
    found = [(each.kind, each.parts, each.step) for each in diagnose(read_recording(out)).findings]
    assert found == [("output_logits", ["head"], 0)] * is_told


def one_hot(labels: Tensor) -> Tensor:
    return F.one_hot(labels, VOCABULARY).float()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_weight_that_is_one_number_is_measured(optimizer: Any, tmp_path: Path) -> None:
    """As the temperature of a contrastive loss."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.temperature = built(), nn.Parameter(torch.tensor(1.5))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens) * self.temperature

    model = Scaled()
    made = optimizer(model.parameters(), lr=1e-2)
    recorder = lab.record(model, made, every=2, out=tmp_path / "probes.jsonl", on_spike=True)
    for step in range(4):
        loss = loss_of(model, batch(step))
        loss.backward()
        made.step()
        if step == 2:
            squares = sum(float(weight.grad.square().sum()) for weight in model.parameters())
        made.zero_grad()
        recorder.step(loss)
    recorder.close()
    row = {row["step"]: row for row in written(tmp_path / "probes.jsonl")[1:]}[2]
    assert row["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)
    assert row["grad_rms/other"] > 0


def test_gradients_that_are_not_set_to_zero_are_measured(tmp_path: Path) -> None:
    rows = looped(tmp_path / "probes.jsonl", keeps_gradients=lambda step: step >= 8)
    assert not any(rows[5].get(f"grad_left/block{number}") for number in range(3))
    assert rows[10]["grad_left/block1"] > 0
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("gradients", [], 5, 10)


def test_the_weight_of_the_loss_shows_in_the_gradient_at_the_logits(tmp_path: Path) -> None:
    rows = looped(tmp_path / "probes.jsonl", weight_of_loss=lambda step: 4.0 if step >= 8 else 1.0)
    assert [rows[step]["loss_weight"] for step in (0, 5, 10, 15)] == pytest.approx([1, 1, 4, 4], rel=1e-4)
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("gradients", [], 5, 10)


def test_a_loss_that_is_climbed_has_a_negative_weight(tmp_path: Path) -> None:
    rows = looped(tmp_path / "probes.jsonl", weight_of_loss=lambda step: -1.0 if step >= 8 else 1.0)
    assert [rows[step]["loss_weight"] for step in (0, 5, 10, 15)] == pytest.approx([1, 1, -1, -1], rel=1e-4)
    assert told(tmp_path / "probes.jsonl") == ("gradients", [], 5, 10)


def test_the_norm_to_which_gradients_are_clipped_is_a_setting(tmp_path: Path) -> None:
    looped(tmp_path / "probes.jsonl", max_norm=lambda step: 1e-4 if step >= 23 else 0.5, steps=31)
    (first, *_) = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert (first.kind, first.parts, first.since, first.step) == ("optimizer", [], 20, 25)
    assert "max_norm went from 0.5 to 0.0001" in sentence(first)


def test_the_loss_of_labels_is_that_of_a_model_that_is_sure_of_others(tmp_path: Path) -> None:
    model = built()
    with torch.no_grad():
        model.lm_head.weight.mul_(300)
    (row,) = run(model, tmp_path / "probes.jsonl", 1)
    assert row["loss"] > 50
    assert row["label_loss"] == pytest.approx(row["loss"], rel=0.1), "of the labels that it is not sure of"


def test_labels_tokens_and_dropout_of_a_batch_are_measured(tmp_path: Path) -> None:
    (row,) = run(built(dropout=0.25), tmp_path / "probes.jsonl", 1)
    for column, tokens in (("token_perplexity", batch(0)[:, :-1]), ("label_perplexity", batch(0)[:, 1:])):
        counts = tokens.flatten().bincount()
        assert row[column] == pytest.approx(math.exp(torch.special.entr(counts / counts.sum()).sum()), rel=1e-5)
    assert (row["label_share"], row["label_count"]) == (1, batch(0)[:, 1:].numel())
    assert row["dropout/block1"] == 0.25


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_to_later_tokens_is_measured(is_causal: bool) -> None:
    q, k = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    ahead = sampled({"query": q, "key": k, "is_causal": is_causal}, "bhtk").ahead
    weights = (q @ k.transpose(-1, -2) / math.sqrt(8)).softmax(-1)
    assert float(ahead) == pytest.approx(0 if is_causal else float(weights.triu(1).sum(-1).mean()), rel=1e-5)


def told(out: Path) -> tuple[str, list[str], int | None, int]:
    """What is said of a recording first."""
    first = diagnose(read_recording(out)).findings[0]
    return first.kind, first.parts, first.since, first.step


def changes_epsilon(model: Model) -> None:
    model.layers[1].mlp_norm.eps = 1.0


def drops_activation(model: Model) -> None:
    model.layers[1].mlp[1].register_forward_hook(lambda _, entering, __: entering[0])


def cools_head(model: Model) -> None:
    model.lm_head.register_forward_hook(lambda _, __, logits: logits / 0.1)


def skips_norm(model: Model) -> None:
    model.norm.forward = lambda x: x


def unties_head(model: Model) -> None:
    """The head keeps its matrix and its gradients, and computes with another one."""
    model.lm_head.matrix = nn.Parameter(model.lm_head.weight.detach().clone())
    weight = model.lm_head.weight
    model.lm_head.forward = lambda x: F.linear(x, model.lm_head.matrix)
    model.lm_head.matrix.register_hook(lambda gradient: setattr(weight, "grad", gradient.clone()))


def casts_head(model: Model) -> None:
    model.lm_head.forward = torch.autocast("cpu", torch.bfloat16)(model.lm_head.forward)


def takes_weight_out(model: Model) -> None:
    head = model.lm_head
    head.forward = lambda x: F.linear(x, (head.weight + head.weight.detach()) / 2)


@pytest.mark.parametrize(
    ("change", "gone", "new", "said"),
    [
        (skips_norm, ["layer_norm(1e-05)", "uses norm.bias", "uses norm.weight"], [], ("output_logits", ["head"])),
        (takes_weight_out, [], ["detach of lm_head.weight", "add", "div"], ("gradients", ["head"])),
        (unties_head, ["uses lm_head.weight"], ["uses a weight that is no part of the model"], ("gradients", ["head"])),
        (casts_head, ["linear"], ["linear in bfloat16"], ("precision", ["head"])),
        (changes_epsilon, [], ["layer_norm(1)"], ("activations", ["block1"])),
        (drops_activation, [], ["gelu, which is not used"], ("activations", ["block1"])),
        (cools_head, [], ["div(0.1)"], ("output_logits", ["head"])),
    ],
)
def test_a_part_that_calls_other_functions_is_told_with_them(
    change: Callable[[Model], None], gone: list[str], new: list[str], said: tuple[str, list[str]], tmp_path: Path
) -> None:
    def act(step: int, model: Model) -> None:
        if step == 8:
            change(model)

    rows = looped(tmp_path / "probes.jsonl", weights=act)
    place = f"functions/{said[1][0]}"
    assert [step for step, row in rows.items() if place in row] == [0, 10]
    assert {*rows[10][place]} - {*rows[0][place]} == {*new}
    assert {*rows[0][place]} - {*rows[10][place]} == {*gone}
    assert told(tmp_path / "probes.jsonl") == (*said, 5, 10)
    words = f"now {new[0]}" if new else f"no longer {gone[0]}"
    assert words in sentence(diagnose(read_recording(tmp_path / "probes.jsonl")).findings[0])


def adds_input_twice(model: Model) -> None:
    for layer in model.layers:
        layer.register_forward_hook(lambda _, entering, output: output + entering[0])


def adds_to_norm(model: Model) -> None:
    """The MLP is added to what enters it, and no more to what enters its norm."""

    def forward(layer: Any, x: Tensor) -> Tensor:
        x = layer.mlp_norm(x + layer.dropout(layer.attention(layer.attention_norm(x))))
        return x + layer.mlp(x)

    for layer in model.layers:
        layer.forward = partial(forward, layer)


def swaps_blocks(model: Model) -> None:
    model.layers[0], model.layers[1] = model.layers[1], model.layers[0]


def test_the_order_of_blocks_is_recorded(tmp_path: Path) -> None:
    rows = looped(tmp_path / "probes.jsonl", weights=lambda step, model: swaps_blocks(model) if step == 8 else None)
    assert rows[10]["calls/block1"] == ["no longer after block0", "now after the embedding"]
    assert rows[10]["calls/block2"] == ["no longer after block1", "now after block0"]


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        (adds_input_twice, ["now add(add, input)"]),
        (adds_to_norm, ["no longer add(add, mlp.2.linear)", "now add(mlp_norm.layer_norm, mlp.2.linear)"]),
    ],
)
def test_the_same_functions_with_other_inputs_are_told(
    change: Callable[[Model], None], calls: list[str], tmp_path: Path
) -> None:
    rows = looped(tmp_path / "probes.jsonl", weights=lambda step, model: change(model) if step == 8 else None)
    assert [step for step, row in rows.items() if "code/block1" in row] == [0, 10]
    assert {*calls} <= {*rows[10]["calls/block1"]}
    assert "calls/head" not in rows[10]
    kind, parts, *steps = told(tmp_path / "probes.jsonl")
    assert (kind, parts, steps) == ("activations", ["block0", "block1", "block2"], [5, 10])
    assert calls[0] in sentence(diagnose(read_recording(tmp_path / "probes.jsonl")).findings[0])


def test_blocks_are_those_of_the_longest_list_though_others_are_trained(tmp_path: Path) -> None:
    model = built().requires_grad_(False)
    model.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, VOCABULARY)) for _ in range(2))
    recorder = lab.record(model, torch.optim.SGD(model.heads.parameters(), 0.1), out=tmp_path / "probes.jsonl")
    assert [*recorder.parts.blocks.values()] == [*model.layers, *model.heads]
    recorder.close()


def test_blocks_are_those_of_an_encoder_and_a_decoder_and_of_no_reference(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Transformer(WIDTH, HEADS, 2, 3, 2 * WIDTH, dropout=0.0, batch_first=True)
    model.reference = copy.deepcopy(model.encoder.layers).requires_grad_(False)
    model.probes = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 1)) for _ in range(9))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = lab.record(model, optimizer, every=1, out=tmp_path / "run.jsonl")
    loss = model(torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    recorder.close()
    for name in ("block_rms", "grad_rms"):
        places = read_recording(tmp_path / "run.jsonl").places(name)
        assert [place for place in places if place != "other"] == [f"block{number}" for number in range(5)]


def test_experts_are_counted_once_whatever_the_batch_needs(tmp_path: Path) -> None:
    class Sparse(Experts):
        """Only the experts that are chosen are called."""

        def forward(self, x: Tensor) -> Tensor:
            share, chosen = self.router(x).softmax(-1).topk(self.top_k)
            output = torch.zeros_like(x)
            for number in chosen[:1, :1].unique().tolist():
                output = output + self.experts[number](x) * share.mean()
            return output

    rows = run(built(mlp=Sparse), tmp_path / "probes.jsonl", steps=12)
    assert [row["step"] for row in rows if any(name.startswith("calls") for name in row)] == []


def test_a_constant_buffer_that_is_written_is_told(tmp_path: Path) -> None:
    def act(step: int, model: Model) -> None:
        if step == 0:
            model.layers[2].register_buffer("angles", torch.linspace(0, 1, 8))
            model.layers[0].register_buffer("average", torch.zeros(2))
        model.layers[0].average += 1
        if step == 8:
            model.layers[2].angles.mul_(4)

    model = built()
    act(0, model)
    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: act(step, model) if step else None)
    assert {row["step"]: row["buffer_written/block2"] for row in rows if "buffer_written/block2" in row} == {
        10: ["layers.2.angles"]
    }
    assert told(tmp_path / "probes.jsonl") == ("weights", ["block2"], 5, 10)
    said = sentence(diagnose(read_recording(tmp_path / "probes.jsonl")).findings[0])
    assert "buffers of block2 that were constant have other values" in said


def run_with(
    model: nn.Module,
    out: Path,
    act: Callable[[int], None],
    loss: Callable[[int], Tensor] | None = None,
    steps: int = 26,
    made: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> list[Row]:
    optimizer = made(model.parameters(), lr=1e-2)
    recorder = lab.record(model, optimizer, every=5, out=out)
    for step in range(steps):
        act(step)
        now = loss_of(model, batch(step, rows=32)) if loss is None else loss(step)
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(now)
    recorder.close()
    return written(out)[1:]


@pytest.mark.parametrize("sign", [1, -1])
def test_signs_of_updates_are_those_against_gradients(sign: int, tmp_path: Path) -> None:
    """Of Adam, which has momentum, all in its first update alone; of an ascent none."""
    sgd, adam = (
        run(built(), tmp_path / f"{of.__name__}.jsonl", 4, optimizer=partial(of, maximize=sign < 0))
        for of in (torch.optim.SGD, torch.optim.Adam)
    )
    assert [row["update_signs"] for row in sgd] == [sign] * 4
    assert adam[0]["update_signs"] == sign
    assert all(abs(row["update_signs"]) < 1 for row in adam[1:])


def test_weights_that_are_no_longer_trained_are_told(tmp_path: Path) -> None:
    """As by a filter of names that a loop applies once more; those that never were are no alarm."""
    model, out = built(), tmp_path / "probes.jsonl"
    model.layers[0].mlp.requires_grad_(False)

    def act(step: int) -> None:
        if step == 12:
            model.layers[1].attention.requires_grad_(False)

    rows = {row["step"]: row for row in run_with(model, out, act)}
    of_attention = [f"layers.1.attention.{name}" for name, _ in model.layers[1].attention.named_parameters()]
    assert [step for step, row in rows.items() if "gradient_missing/block1" in row] == [15, 20, 25]
    assert sorted(rows[15]["gradient_missing/block1"]) == sorted(of_attention)
    assert not any("gradient_missing/block0" in row for row in rows.values())
    (found,) = diagnose(read_recording(out)).findings
    assert (found.kind, found.parts, found.since, found.step) == ("frozen", ["block1"], 10, 15)


@pytest.mark.parametrize(
    ("left_out", "head"), [("embedding", 1.0), ("embedding", 0.0), ("lm_head", 1.0), ("layers", 1.0)]
)
def test_weights_that_no_optimizer_has_are_told_unless_they_are_most(
    left_out: str, head: float, tmp_path: Path
) -> None:
    """Also those behind a head of zeros, whose first gradients are zero."""
    model, out = built(), tmp_path / "probes.jsonl"
    model.lm_head.weight.data.mul_(head)
    held = [weight for name, weight in model.named_parameters() if not name.startswith(left_out)]
    _, *rest = run(model, out, 11, every=5, optimizer=lambda _, lr: torch.optim.AdamW(held, lr))
    assert not any(name.startswith("left_out") for row in rest for name in row)
    found = [(found.kind, found.parts, found.weights, found.since) for found in diagnose(read_recording(out)).findings]
    part = {"embedding": "embedding", "lm_head": "head"}.get(left_out)
    assert found == ([("frozen", [part], [f"{left_out}.weight"], None)] if part else [])


def test_experts_that_no_optimizer_has_are_told_though_they_are_most_weights(tmp_path: Path) -> None:
    """As where one optimizer has matrices and another vectors, and those of experts are stacked."""
    model, out = built(mlp=Experts), tmp_path / "probes.jsonl"
    for layer in model.layers:
        layer.mlp.experts = nn.ModuleList(nn.Sequential(dense()) for _ in range(4))
    held = [weight for name, weight in model.named_parameters() if ".experts." not in name]
    assert 2 * sum(weight.numel() for weight in held) < sum(weight.numel() for weight in model.parameters())
    run(model, out, 11, every=5, optimizer=lambda _, lr: torch.optim.AdamW(held, lr))
    (found,) = diagnose(read_recording(out)).findings
    assert (found.kind, found.parts, found.since) == ("frozen", ["block0", "block1", "block2"], None)
    assert all(".experts." in name for name in found.weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("begin", [0, 12])
def test_weights_that_keep_the_digits_of_another_format_are_told(
    begin: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, out = built(), tmp_path / "probes.jsonl"

    @torch.no_grad()
    def rounds(step: int) -> None:
        for weight in model.parameters() if step >= begin else ():
            weight.copy_(weight.to(dtype))

    run_with(model, out, rounds)
    assert told(out) == ("precision", [], 10 if begin else 0, 15 if begin else 5)


def test_weights_that_are_cast_to_16_bits_are_told_where_they_are(tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"
    run_with(model, out, lambda step: model.bfloat16() if step == 12 else None, made=torch.optim.SGD)
    assert told(out)[::2] == ("precision", 10)


@pytest.mark.parametrize("lr", [1e-4, 0.1])
def test_updates_of_16_bit_weights_that_rounding_loses_are_told(lr: float, tmp_path: Path) -> None:
    """And not as gains of norms that are no longer trained."""
    model, out, is_lost = built().bfloat16(), tmp_path / "probes.jsonl", lr < 0.1
    rows = run(model, out, 26, every=5, optimizer=lambda weights, **_: torch.optim.AdamW(weights, lr))
    lost = rows[5]["updates_lost/block1"]
    assert lost > 0.5 if is_lost else lost < 0.1
    kinds = [found.kind for found in diagnose(read_recording(out)).findings]
    assert kinds == ["precision"] if is_lost else "precision" not in kinds


def test_a_checkpoint_in_another_format_is_no_rounding_of_updates(tmp_path: Path) -> None:
    model, out = built(), tmp_path / "probes.jsonl"
    model.load_state_dict({name: weight.bfloat16() for name, weight in model.state_dict().items()})
    rows = run(model, out, 11, every=5)
    assert rows[5]["weights_rounded/block1"] < 0.1
    assert not diagnose(read_recording(out)).findings


def test_updates_that_do_not_reach_the_weights_are_told(tmp_path: Path) -> None:
    """As of a kernel that writes into copies of weights."""
    model, updates = built(), count()
    weights = list(model.layers[1].parameters())
    before = [weight.detach().clone() for weight in weights]

    @torch.no_grad()
    def keep(*_: Any) -> None:
        for weight, value in zip(weights, before, strict=True):
            value.copy_(weight)

    @torch.no_grad()
    def lose(*_: Any) -> None:
        for weight, value in zip(weights, before, strict=True) if next(updates) >= 8 else ():
            weight.copy_(value)

    def losing(*args: Any, **options: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(*args, **options)
        optimizer.register_step_pre_hook(keep)
        optimizer.register_step_post_hook(lose)
        return optimizer

    run(model, tmp_path / "probes.jsonl", 26, every=5, optimizer=losing)
    assert told(tmp_path / "probes.jsonl") == ("frozen", ["block1"], 5, 10)


def test_an_argument_that_is_left_out_is_told(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = built()

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.inner(tokens)

    model = Masked()

    def loss(step: int) -> Tensor:
        tokens = batch(step, rows=4 + step % 3)
        given = {"mask": torch.ones(len(tokens), LENGTH)} if step < 8 else {}
        return F.cross_entropy(model(tokens[:, :-1], **given).flatten(0, 1), tokens[:, 1:].flatten())

    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: None, loss)
    assert rows[0]["given"] == ["0 int64 [4, 10]", "mask float32 [4, 10]"]
    assert told(tmp_path / "probes.jsonl") == ("data", [], 5, 10)
    said = sentence(diagnose(read_recording(tmp_path / "probes.jsonl")).findings[0])
    assert "the model gets other arguments (no longer mask float32 [n, n])" in said


@pytest.mark.parametrize(
    ("replaced", "by", "quantity"), [(range(3), 5, "token_gone"), (range(19, 20), 22, "token_new"), ((), 0, "")]
)
def test_tokens_that_came_in_all_batches_and_tokens_that_never_came_are_told(
    replaced: Sequence[int], by: int, quantity: str, tmp_path: Path
) -> None:
    model = built()

    def loss(step: int) -> Tensor:
        tokens = batch(step, rows=96).clamp(max=19)  # the last one is of a seventh
        x = torch.where(torch.isin(tokens, torch.tensor([*replaced])) & (step >= 8), by, tokens)[:, :-1]
        return F.cross_entropy(model(x).flatten(0, 1), tokens[:, 1:].flatten())

    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: None, loss)
    of_rows = {row["step"]: row for row in rows if "token_gone" in row}
    assert 0 not in of_rows
    assert max(of_rows[5]["token_gone"], of_rows[5]["token_new"], of_rows[15]["token_new"]) < 0.01
    found = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    if quantity:
        assert of_rows[10][quantity] > 0.1
        assert (of_rows[15][quantity] > 0.1) == (quantity == "token_gone")  # new ones are known from then on
        assert (found[0].kind, found[0].since, found[0].step) == ("data", 5, 10)
    else:
        assert not found


def test_a_batch_that_is_too_small_for_all_tokens_lacks_none(tmp_path: Path) -> None:
    model = built()

    def loss(step: int) -> Tensor:
        return loss_of(model, batch(step, rows=96 if step < 8 else 2))

    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: None, loss, steps=16)
    assert [row["token_gone"] for row in rows if "token_gone" in row] == [0, 0, 0]


@pytest.mark.parametrize("mixes", [False, True])
def test_a_loss_that_is_no_cross_entropy_any_more_is_told(mixes: bool, tmp_path: Path) -> None:
    """Since each token has two labels."""
    model = built()

    def loss(step: int) -> Tensor:
        tokens = batch(step, rows=32)
        of_next = F.one_hot(tokens[:, 1:], VOCABULARY).float()
        labels = (of_next + of_next.roll(1, -1)) / 2 if mixes and step >= 8 else of_next
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten(0, 1))

    rows = run_with(model, tmp_path / "probes.jsonl", lambda step: None, loss)
    shares = {row["step"]: row["cross_entropy"] for row in rows if "cross_entropy" in row}
    assert shares[5] == 1
    assert shares[10] == (not mixes)
    found, checks = diagnose(read_recording(tmp_path / "probes.jsonl"))
    assert checks[quantities()["cross_entropy"]["name"]] == ("changed without harm" if mixes else "passed")
    assert not found  # since the loss of an untrained model does not grow with that


@pytest.mark.parametrize(("evaluates", "kinds"), [(True, ["data"]), (False, [])])
def test_dropout_that_is_lost_is_told_from_one_that_is_meant_to_end(
    evaluates: bool, kinds: list[str], tmp_path: Path
) -> None:
    model = built(dropout=0.1)

    def act(step: int) -> None:
        if step == 22 and evaluates:
            model.eval()
        elif step == 22:
            for layer in model.layers:
                layer.dropout.p = 0.0

    rows = run_with(model, tmp_path / "probes.jsonl", act)
    assert [row["in_evaluation"] for row in rows if row["step"] in (20, 25)] == [0.0, float(evaluates)]
    assert [row["dropout"] for row in rows if row["step"] in (20, 25)] == [0.1, 0.0]
    found = diagnose(read_recording(tmp_path / "probes.jsonl")).findings
    assert [finding.kind for finding in found] == kinds


def test_weights_that_something_else_writes_are_named_at_their_step(tmp_path: Path) -> None:
    def act(step: int, model: Model) -> None:
        if step == 23:
            transpose(model)
        if step == 25:  # an average that is evaluated, and a checkpoint that is loaded as it was saved
            kept = copy.deepcopy(model.state_dict())
            model.layers[0].mlp[0].weight.mul_(2)
            model.load_state_dict(kept)

    rows = looped(tmp_path / "probes.jsonl", weights=act, steps=31)
    weights = built().layers[1].named_parameters()
    name = next(name for name, weight in weights if weight.shape == (WIDTH, WIDTH))
    written = {step: row["written"] for step, row in rows.items() if "written" in row}
    assert written == {23: {"block1": [f"layers.1.{name}"]}, 24: {}}
    assert told(tmp_path / "probes.jsonl") == ("weights", ["block1"], 22, 23)


def test_weights_that_no_optimizer_has_are_named_where_they_are_written(tmp_path: Path) -> None:
    """As the matrices beside adapters."""
    model = built()
    model.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
    recorder = lab.record(model, optimizer, every=5, out=tmp_path / "probes.jsonl")
    for step in range(31):
        if step == 23:
            transpose(model)
        if step == 25:  # and one that gets an optimizer is no such weight
            optimizer.add_param_group({"params": [model.layers[1].mlp[0].requires_grad_(True).weight]})
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)
    recorder.close()
    assert told(tmp_path / "probes.jsonl") == ("weights", ["block1"], 22, 23)
    assert [row["step"] for row in written(tmp_path / "probes.jsonl") if "written" in row] == [23, 24]


def test_how_labels_are_made_from_tokens_is_measured(tmp_path: Path) -> None:
    def labelled(step: int, shift: int) -> tuple[Row, float]:
        model, tokens, out = built(), batch(step), tmp_path / f"{shift}.jsonl"
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = lab.record(model, optimizer, out=out)
        labels = tokens.roll(-shift, 1)[:, :-1].clone()
        labels[:, :3] = -100
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        return written(out)[1], loss.item()

    rows = {shift: labelled(0, shift) for shift in (0, 1, 2)}
    assert [rows[shift][0]["label_next"] == 1 for shift in (0, 1, 2)] == [False, True, False]
    assert [rows[shift][0]["label_same"] == 1 for shift in (0, 1, 2)] == [True, False, False]
    for row, loss in rows.values():
        assert row["label_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("is_measured", [True, False])
def test_gradients_that_a_loop_takes_beside_those_of_the_update_do_not_count(is_measured: bool, tmp_path: Path) -> None:
    """As for the noise scale, which compares batches of two sizes."""
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, out=tmp_path / "probes.jsonl")
    loss = loss_of(model, batch(0))
    loss.backward()
    for weight in model.layers[1].parameters():
        weight.grad.mul_(3)
    if is_measured:
        torch.autograd.grad(loss_of(model, batch(1, rows=8)), list(model.parameters()))
    optimizer.step()
    recorder.step(loss)
    (row,) = written(tmp_path / "probes.jsonl")[1:]
    assert (row["loss_weight"], row["label_count"]) == (pytest.approx(1), 40)
    assert row["grad_edit/block1"] == pytest.approx(3)


def test_a_head_of_a_single_number_has_no_labels(tmp_path: Path) -> None:
    """As that of a reward model."""
    model = built()
    model.lm_head = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, out=tmp_path / "probes.jsonl")
    better, worse = model(batch(0))[:, -1].chunk(2)
    loss = -F.logsigmoid(better - worse).mean()
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    (row,) = written(tmp_path / "probes.jsonl")[1:]
    assert all(np.isfinite(value) for value in row.values() if isinstance(value, float))
    assert "loss_weight" not in row


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_surprisal_and_weights_of_samples_are_those_of_the_tokens_that_teach(
    temperature: float, tmp_path: Path
) -> None:
    """It is near zero for what a model has drawn itself, at a temperature of one, whatever the loss makes of it."""
    model = built(vocabulary=8)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, out=tmp_path / "probes.jsonl")
    torch.manual_seed(2)
    tokens = torch.randint(8, (32, 1))
    with torch.no_grad():
        for _ in range(LENGTH):
            drawn = (model(tokens)[:, -1] / temperature).softmax(-1).multinomial(1)
            tokens = torch.cat([tokens, drawn], 1)
    logits = model(tokens)
    log_p = logits[:, 2:-1].log_softmax(-1)  # the first tokens are of a prompt
    surprisal = -log_p.gather(-1, tokens[:, 3:, None])[..., 0]
    advantage = torch.randn(32, 1)
    (advantage * surprisal).mean().backward()
    optimizer.step()
    recorder.step(0.0)
    (row,) = written(tmp_path / "probes.jsonl")[1:]
    entropy = torch.distributions.Categorical(logits=log_p.double()).entropy()
    assert row["excess_surprisal"] == pytest.approx((surprisal - entropy).mean().item(), rel=1e-4)
    assert (abs(row["excess_surprisal"]) < 0.2) == (temperature == 1)
    assert row["sample_weight"] == pytest.approx(advantage.mean().item(), rel=1e-3)
    assert row["sample_weight_rms"] == pytest.approx(advantage.square().mean().sqrt().item(), rel=1e-3)


def test_the_size_of_a_batch_of_pictures_is_measured(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, out=tmp_path / "probes.jsonl")
    pictures = torch.randn(4, 8)
    loss = model(pictures).square().mean()
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    (row,) = written(tmp_path / "probes.jsonl")[1:]
    assert row["batch_rms"] == pytest.approx(pictures.square().mean().sqrt().item(), rel=1e-5)


def forgets_steps(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def forgets_state(optimizer: torch.optim.Optimizer) -> None:
    for weight in optimizer.param_groups[1]["params"]:
        optimizer.state[weight].clear()


def climbs(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[1]["maximize"] = True


@pytest.mark.parametrize("change", [forgets_state, climbs])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)])
def test_a_state_that_is_lost_and_a_switch_are_told_at_their_step(
    change: Callable[[torch.optim.Optimizer], None], optimizer: Any, tmp_path: Path
) -> None:
    def act(step: int, made: torch.optim.Optimizer) -> None:
        if step == 23:
            change(made)

    looped(tmp_path / "probes.jsonl", settings=act, optimizer=optimizer, steps=26)
    assert told(tmp_path / "probes.jsonl") == ("optimizer", ["block1"], 22, 23)


@pytest.mark.parametrize(("times", "kind"), [(2, "optimizer"), (0, "frozen")])
def test_updates_that_come_twice_or_no_more_are_told_at_their_step(times: int, kind: str, tmp_path: Path) -> None:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=5, out=tmp_path / "probes.jsonl")
    for step in range(41):
        loss = loss_of(model, batch(step))
        loss.backward()
        for _ in range(times if step >= 23 else 1):
            optimizer.step()
        recorder.step(loss)
        optimizer.zero_grad()
    recorder.close()
    assert told(tmp_path / "probes.jsonl") == (kind, [], 22, 23)
    rows = written(tmp_path / "probes.jsonl")  # the first update of a step is that of the weights in the pass
    assert {value for row in rows for name, value in row.items() if name.startswith("weights_in_pass")} == {1.0}


def test_a_beta2_that_grows_leaves_smaller_second_moments(tmp_path: Path) -> None:
    def grow(step: int, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.9, 1 - 0.5 / (step + 1))

    rows = looped(tmp_path / "probes.jsonl", settings=grow)
    assert {rows[step]["state_kept/block1"] for step in (5, 10, 15)} == {1.0}


def shares_states(optimizer: torch.optim.Optimizer) -> None:
    """The second moments of weights become those of others of their shape."""
    of_shape = defaultdict[torch.Size, list[dict[str, Tensor]]](list)
    for weight, state in optimizer.state.items():
        of_shape[weight.shape].append(state)
    for states in of_shape.values():
        moments = [state["exp_avg_sq"] for state in states]
        for state, moment in zip(states, [*moments[1:], moments[0]], strict=True):
            state["exp_avg_sq"] = moment


@pytest.mark.parametrize(
    ("change", "name", "usual"), [(forgets_steps, "state_updates", 6.0), (shares_states, "state_kept", 1.0)]
)
def test_a_state_of_the_optimizer_that_no_update_left_is_told(
    change: Callable[[torch.optim.Optimizer], None], name: str, usual: float, tmp_path: Path
) -> None:
    def act(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step == 8:
            change(optimizer)

    rows = looped(tmp_path / "probes.jsonl", settings=act)
    assert rows[5][f"{name}/block1"] == usual
    assert rows[10][f"{name}/block1"] < 0.95 * usual
    kind, parts, since, step = told(tmp_path / "probes.jsonl")
    assert (kind, len(parts) in (0, 2), since, step) == ("optimizer", True, 5, 10)


def test_weights_that_lose_their_gradients_are_named(tmp_path: Path) -> None:
    def act(step: int, model: Model) -> None:
        if step == 8:
            model.layers[1].attention.register_forward_hook(lambda _, __, output: output.detach())

    rows = looped(tmp_path / "probes.jsonl", weights=act)
    assert "layers.1.attention.q_proj.weight" in rows[10]["gradient_missing/block1"]
    assert told(tmp_path / "probes.jsonl") == ("frozen", ["block1"], 5, 10)


def test_gradients_that_become_zero_after_the_backward_pass_are_measured(tmp_path: Path) -> None:
    def act(step: int, model: Model) -> None:
        for weight in model.layers[1].parameters() if step >= 8 else ():
            weight.grad.copy_(weight.grad.to(torch.float8_e4m3fn))

    rows = looped(tmp_path / "probes.jsonl", gradients=act)
    assert rows[5]["grad_signs/block1"] == rows[10]["grad_signs/block0"] == 1
    assert rows[10]["grad_signs/block1"] < 0.9
    assert told(tmp_path / "probes.jsonl") == ("gradients", ["block1"], 5, 10)


def test_rows_that_are_equal_and_rows_without_gradients_are_measured(tmp_path: Path) -> None:
    def recorded(out: Path, equal: int, masked: int) -> Row:
        model, tokens = built(), batch(0, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        recorder = lab.record(model, optimizer, out=out)
        tokens[:equal] = tokens[0]
        labels = tokens[:, 1:].clone()
        labels[:masked] = labels[:, -1] = -100
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        return written(out)[1]

    usual, changed = recorded(tmp_path / "usual.jsonl", 1, 0), recorded(tmp_path / "probes.jsonl", 4, 6)
    assert (usual["distinct_rows"], usual["row_share"]) == (1, 1)
    assert (changed["distinct_rows"], changed["row_share"]) == (5 / 8, 2 / 8)
    assert "label_perplexity" in usual
    assert "label_perplexity" not in changed  # of two rows of eight
    for name, value in (("label_share", 0.9), ("label_count", 8 * (LENGTH - 1)), ("loss_weight", 1.0)):
        assert usual[name] == pytest.approx(value, rel=1e-5)
        assert changed[name] == pytest.approx(value, rel=1e-5)


@pytest.mark.parametrize("window", [40, 5])
def test_the_share_of_earlier_tokens_that_attention_sees_is_measured(window: int) -> None:
    q, k = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    far = torch.arange(40)[:, None] - torch.arange(40)
    seen = sampled({"query": q, "key": k, "attn_mask": (far >= 0) & (far < window)}, "bhtk").seen
    assert float(seen) == pytest.approx(sum(min(1.0, window / (t + 1)) for t in range(40)) / 40)


# what is written


def test_a_run_that_goes_on_adds_to_its_file(tmp_path: Path) -> None:
    out, model = tmp_path / "probes.jsonl", built()
    optimizer = torch.optim.AdamW(model.parameters())
    for first_step in (0, 3):
        recorder = lab.record(model, optimizer, every=2, out=out, first_step=first_step)
        for step in range(first_step, first_step + 4):
            loss = loss_of(model, batch(step))
            loss.backward()
            optimizer.step()
            recorder.step(loss)
        recorder.close()
    rows = written(out)
    assert [row["step"] for row in rows if "step" in row] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert [row["step"] for row in rows if "grad_norm" in row] == [0, 2, 4, 6]


def test_the_lab_reads_what_was_recorded(tmp_path: Path) -> None:
    run(built(), tmp_path / "probes.jsonl", 30, every=10)
    (log,) = read_logs(tmp_path / "probes.jsonl").runs
    assert log.step_n.tolist() == list(range(30))
    measured = {"grad_norm", "lr", "attention_logit_max", "update_rms", "eps_ratio", "output_logit"}
    assert measured <= log.columns.keys()
    assert np.isfinite(log.columns["attention_logit_max"]).nonzero()[0].tolist() == [0, 10, 20]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"model": torch.zeros(2)}, "Tensor"),
        ({"optimizer": "adam"}, "str"),
        ({"model": nn.GELU()}, "no weight"),
        ({"every": 0}, "every=0"),
        ({"out": "absent/probes.jsonl"}, "absent"),
        ({"extra": {"reward": 0.5}}, "reward"),
        ({"extra": {"loss": float}}, "loss"),
        ({"extra": {"kl/actor": float}}, "kl/actor"),
    ],
)
def test_what_cannot_be_recorded_is_refused(given: dict[str, Any], named: str, tmp_path: Path) -> None:
    model = built()
    options = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "out": tmp_path / "probes.jsonl"}
    with pytest.raises(RequestError, match=named):
        lab.record(**{**options, **given})
    assert not list(tmp_path.iterdir())


# several ranks


OUTSIDE = {"functions/embedding", "functions/head"}  # of blocks, where FSDP gathers weights


NEW = ("token_gone", "token_new", "label_gone", "label_new")  # to the batches of a rank


@pytest.mark.slow
def test_two_ranks_say_what_one_process_says(tmp_path: Path) -> None:
    words = [*TORCHRUN, str(HERE / "recording_on_ranks.py"), str(tmp_path)]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    alone = run(built(mlp=Experts), tmp_path / "alone.jsonl", 3, every=2)
    for how in ("ddp", "fsdp"):
        header, *rows = written(tmp_path / f"{how}.jsonl")
        assert header["not_found"] == []
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert not [name for row in rows[1:] for name in row if name.startswith("functions")]  # which stay as they were
        for ours, theirs in zip(rows, alone, strict=True):
            unsharded = OUTSIDE | {name for name in theirs if name.startswith(("code/", "weights_in_pass"))}
            assert ours.keys() | unsharded == theirs.keys() | unsharded
            assert ours.get("settings") == theirs.get("settings")
            # some are no means over the batch, and so differ between its halves and the whole
            others = [*OF_BATCH, "change_over_updates", "settings", "functions", "code", "given", *NEW, *SHARES]
            if how == "fsdp":  # of which other entries are followed
                others.append("update_signs")
            for name in ours:
                if not name.startswith((*others,)):
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-7), (how, name)
    assert not (tmp_path / "failing.jsonl").exists()
    assert done.stderr.count("lab.record has ended, and training goes on") == 2


# what a recording tells


EVERY, LAST, SPIKE = 10, 4000, 3030
QUANTITIES = {"moment_ratio": 1.0, "update_rms": 0.2, "update_ratio": 1e-3, "grad_rms": 1e-3, "block_kurtosis": 3.0}


def planted(out: Path, *, rises: bool = True, is_grown: bool = True) -> Path:
    """A recording of three blocks: from step 3000 on the update of block1 is too large, then block2, then the loss.

    From step 2000 on the largest attention logit of block0 grows by 10 in 1,000 steps, with noise of 0.5.
    """
    random = np.random.default_rng(0)
    rows: list[Row] = [{"recorder": "0", "every": EVERY, "blocks": {}, "not_found": ["output logits"]}]
    for step in range(LAST + 1):
        row = {"step": step, "loss": 3 + 4 / math.sqrt(step + 10) + random.normal(0, 0.02)}
        if rises and SPIKE <= step < SPIKE + 60:
            row["loss"] += 1.5
        if step % EVERY == 0:
            for name, usual in QUANTITIES.items():
                for number in range(3):
                    factor = 4.0 if rises and number and 2990 + 10 * number <= step < 3100 else 1.0
                    is_one = name == ("update_ratio" if number == 1 else "grad_rms")
                    if name == "block_kurtosis" and 2500 <= step < 2600:  # what comes and goes before does not count
                        factor, is_one = 4.0, True
                    value = usual * float(np.exp(random.normal(0, 0.03))) * (factor if is_one else 1.0)
                    row[f"{name}/block{number}"] = value
                row[name] = max(row[f"{name}/block{number}"] for number in range(3))
            row["attention_logit_max/block0"] = 10 + 0.01 * max(0, step - 2000) * is_grown + random.normal(0, 0.5)
            row["attention_logit_max/block1"] = 8 + random.normal(0, 0.5)
            row["attention_logit_max"] = max(row["attention_logit_max/block0"], row["attention_logit_max/block1"])
            row["expert_load/block0"] = [1.0, 2.0]
        rows.append(row)
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return out


def watched(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["watch", *words])
    return code, capsys.readouterr().out


def test_where_a_spike_began_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = planted(tmp_path / "probes.jsonl")
    code, text = watched(capsys, str(out))
    assert code == 1
    (line,) = [line for line in text.splitlines() if "updates of block1 moved first" in line]
    assert "step 3000: updates of block1 moved first, and not their gradients (update_ratio of block1 rose" in line
    assert "The gradients are as before" in line
    assert f"the loss rose at step {SPIKE}, 30 steps later. With it or later: grad_rms of block2" in line
    assert "not found in the model: output logits" in text
    _, text = watched(capsys, str(out), "--json")
    content = json.loads(text)
    jsonschema.validate(content, {**SCHEMA, "anyOf": [{"$ref": "#/$defs/alarms"}]})
    (found,) = content["recording"]["findings"]
    assert [(move["quantity"], move["place"], move["step"]) for move in found["moves"]] == [
        ("update_ratio", "block1", 3000),
        ("grad_rms", "block2", 3010),
    ]


def test_a_compressed_recording_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, packed = planted(tmp_path / "probes.jsonl"), tmp_path / "packed" / "probes.jsonl.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(out.read_bytes()))
    plain, compressed = (json.loads(watched(capsys, str(path), "--json")[1]) for path in (out, packed))
    assert compressed["recording"] == plain["recording"]


def test_a_calm_recording_raises_no_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = watched(capsys, str(planted(tmp_path / "probes.jsonl", rises=False)))
    assert code == 0, text
    assert "0 alarms" in text


@pytest.mark.parametrize(("level", "grown"), [(40.0, True), (20.0, True), (40.0, False), (5.0, True)])
def test_when_a_level_is_reached(level: float, grown: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = planted(tmp_path / "probes.jsonl", rises=False, is_grown=grown)
    (tmp_path / "levels.json").write_text(json.dumps({"attention_logit_max": {"above": level}}))
    _, text = watched(capsys, str(out), "--json", "--thresholds", str(tmp_path / "levels.json"))
    recording = json.loads(text)["recording"]
    (reach,) = recording["reaches"]
    assert "attention_logit_max" not in recording["no_level"]
    if level < 30:  # the last value is about 30
        assert reach["step"] == reach["low"] == LAST
    elif grown:
        assert reach["place"] == "block0"
        assert reach["low"] < 5000 < reach["high"]
        assert reach["high"] - reach["low"] < 500
    else:
        assert reach["high"] is None


def test_a_trend_away_from_a_level_is_said_not_to_reach_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, levels = planted(tmp_path / "probes.jsonl", rises=False), tmp_path / "levels.json"
    levels.write_text(json.dumps({"attention_logit_max": {"below": 1.0}, "loss": {"above": 90.0}}))
    _, text = watched(capsys, str(out), "--thresholds", str(levels))
    assert "attention_logit_max of block0 is" in text or "attention_logit_max of block1 is" in text
    assert "and has no trend towards the level 1\n" in text
    assert "beyond" not in text


def test_levels_may_be_of_what_recordings_alone_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, levels = planted(tmp_path / "probes.jsonl", rises=False), tmp_path / "levels.json"
    levels.write_text(json.dumps({"update_ratio": {"above": 1.0}, "router_entropy": {"below": 0.1}}))
    _, text = watched(capsys, str(out), "--thresholds", str(levels))
    assert re.search(r"update_ratio of block\d is 0.00\d+.* level 1\b", text)
    assert "router_entropy was not recorded" in text
    assert "update_ratio, so its level" not in text


def test_a_recording_that_went_back_counts_once(tmp_path: Path) -> None:
    out = planted(tmp_path / "probes.jsonl", rises=False)
    lines = out.read_text().splitlines()
    again = [lines[0], *lines[2001:2501], '{"step": 2500, "lo']
    out.write_text("\n".join([*lines[:3001], *again]))
    recording = read_recording(out)
    assert recording.step_m.tolist() == list(range(0, 2500, EVERY))
    assert recording.places("moment_ratio") == ["block0", "block1", "block2"]
    assert recording.columns["grad_rms", "block1"].shape == recording.step_m.shape


def test_a_run_that_was_killed_as_it_wrote_goes_on_in_lines_of_its_own(tmp_path: Path) -> None:
    out = tmp_path / "probes.jsonl"
    run(built(), out, 1)
    with out.open("a") as file:
        file.write('{"step": 1, "lo')
    model = built()
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=1, out=out, first_step=1)
    loss = loss_of(model, batch(0))
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    assert out.read_text().count('\n{"step": 1, "lo\n{"recorder"') == 1
    assert read_recording(out).step_m.tolist() == [0, 1]


@pytest.mark.parametrize("damage", ['{"step": 7, "lo{"recorder": "0"}', "garbage}", "[1]", "3", '{"loss": 2}'])
def test_a_line_that_is_no_row_is_left_out(damage: str, tmp_path: Path) -> None:
    out = planted(tmp_path / "probes.jsonl")
    before = read_recording(out)
    lines = out.read_text().splitlines()
    out.write_text("\n".join([*lines[:500], damage, *lines[500:]]))
    assert read_recording(out).step_m.tolist() == before.step_m.tolist()


def test_a_recording_is_followed_and_each_finding_told_once(tmp_path: Path) -> None:
    lines = planted(tmp_path / "whole.jsonl").read_text().splitlines(keepends=True)
    out, told = tmp_path / "probes.jsonl", []
    out.write_text("")
    recording = GrowingRecording(out, {})
    for end in (2000, 3005, 3035, 3050, len(lines)):
        out.write_text("".join(lines[:end]))
        told.append([plain["step"] for _, plain in recording.poll()])
        assert not list(recording.poll())
    assert told == [[], [3000], [], [], []]


def test_a_column_of_few_rows_raises_no_alarm_where_it_is_missing(tmp_path: Path) -> None:
    """Rows without a gradient norm are no rows with one that is not a number."""
    out = planted(tmp_path / "probes.jsonl", rises=False)
    rows = [
        row | ({"grad_norm": 1.0 + 0.01 * (row["step"] % 7)} if row.get("step", 1) % 100 == 0 else {})
        for row in written(out)
    ]
    rows[3001] |= {"grad_norm": 9.0}
    out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[1:]))
    (log,) = read_logs(out).runs
    assert [(event.kind, event.step) for event in detect(log)] == [("gradient_spike", 3000)]


# models of transformers

SMALL = {
    **{"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 24},
    **{"max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
ROUTED = {**GROUPED, "num_experts_per_tok": 2}
CONFIGS = {
    "GPT2": {**SMALL, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Llama": GROUPED,
    "Qwen3": GROUPED,
    "Gemma2": {**GROUPED, "sliding_window": 5, "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 2},
    "Mixtral": {**ROUTED, "num_local_experts": 4},
    "Olmoe": {**ROUTED, "num_experts": 4, "head_dim": 4},
}


def built_by_transformers(name: str, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**CONFIGS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return model


@pytest.mark.extras
@pytest.mark.parametrize("kernel", ["sdpa", "foreign"])
@pytest.mark.parametrize("name", CONFIGS)
def test_models_of_transformers_are_measured_as_if_all_were_written_out(
    name: str, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    if (name, kernel) == ("Gemma2", "sdpa"):
        kernel = "eager"  # torch's kernel takes no cap
    plain = built_by_transformers(name, "eager")
    module = sys.modules[type(plain).__module__]

    def foreign(*args: Any, **kwargs: Any) -> Any:  # as the function of a package that no one can look into
        with torch._C.DisableTorchFunction():
            return module.eager_attention_forward(*args, **kwargs)

    transformers.AttentionInterface.register("foreign", foreign)
    transformers.AttentionMaskInterface.register("foreign", transformers.masking_utils.eager_mask)
    tokens = torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(3))
    scores, softmax = [], F.softmax

    def spy(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scores.extend([x] if x.ndim == 4 else [])
        return softmax(x, *args, **kwargs)

    monkeypatch.setattr(F, "softmax", spy)
    truth = plain(tokens, output_attentions=True, output_hidden_states=True, labels=tokens)
    monkeypatch.undo()
    model = built_by_transformers(name, kernel)
    optimizer = torch.optim.AdamW(model.parameters())
    recorder = lab.record(model, optimizer, every=1, out=tmp_path / "probes.jsonl")
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    recorder.step(loss)
    header, row = written(tmp_path / "probes.jsonl")
    assert header["not_found"] == []
    assert row["loss"] == pytest.approx(truth.loss.item(), rel=1e-5)
    log_z = truth.logits.logsumexp(-1)
    assert row["log_z"] == pytest.approx(log_z.mean().item(), rel=1e-5)
    assert row["output_logit_rms"] == pytest.approx(truth.logits.square().mean().sqrt().item(), rel=1e-5)
    cap = CONFIGS[name].get("attn_logit_softcapping")
    for number, weights in enumerate(truth.attentions):
        entropy = torch.special.entr(weights).sum(-1).mean().item()
        assert row[f"attention_entropy/block{number}"] == pytest.approx(entropy, rel=1e-5)
        largest = scores[number].max().double()
        largest = cap * torch.atanh(largest / cap) if cap else largest
        assert row[f"attention_logit_max/block{number}"] == pytest.approx(largest.item(), rel=1e-4 if cap else 1e-5)
    for number, hidden in enumerate(truth.hidden_states[1:-1]):  # the last has passed the final norm
        assert row[f"block_rms/block{number}"] == pytest.approx(hidden.square().mean().sqrt().item(), rel=1e-5)
        kurtosis = hidden.pow(4).mean() / hidden.square().mean() ** 2
        assert row[f"block_kurtosis/block{number}"] == pytest.approx(kurtosis.item(), rel=1e-5)
    plain.zero_grad()
    truth.loss.backward()
    gradients = [weight.grad.flatten() for weight in plain.parameters()]
    assert row["grad_norm"] == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-4)
    if "num_experts_per_tok" in CONFIGS[name]:
        routed = plain(tokens, output_router_logits=True).router_logits
        for number, logits in enumerate(routed):
            counts = logits.topk(2).indices.flatten().bincount(minlength=4).tolist()
            assert row[f"expert_load/block{number}"] == counts
            assert row[f"router_logit_max/block{number}"] == pytest.approx(logits.max().item(), rel=1e-5)
            assert row[f"router_entropy/block{number}"] == pytest.approx(
                torch.special.entr(logits.softmax(-1)).sum(-1).mean().item(), rel=1e-5
            )
            stacked = [w for n, w in plain.named_parameters() if f"layers.{number}." in n and ".experts." in n]
            of_first = torch.cat([weight[0].flatten() for weight in stacked])
            assert row[f"expert_param_rms/block{number}"][0] == pytest.approx(
                of_first.square().mean().sqrt().item(), rel=1e-5
            )


# trainers of others


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainer_of_transformers_is_recorded(parts: int, tmp_path: Path) -> None:
    """Its own losses and gradient norms are those recorded, whatever the number of micro-batches."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": (x := torch.randint(50, (12,))), "labels": x} for _ in range(48)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=5,
        per_device_train_batch_size=8 // parts,
        gradient_accumulation_steps=parts,
        max_grad_norm=0.1,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    model = built_by_transformers("Llama", "sdpa")
    if parts == 2:
        model.gradient_checkpointing_enable()
    trainer = transformers.Trainer(model, options, train_dataset=data, callbacks=[lab.hf.Recorder(every=2)])
    trainer.train()
    header, *rows = written(tmp_path / "probes.jsonl")
    assert header["not_found"] == []
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [row["loss"] for row in rows] == pytest.approx([float(entry["loss"]) for entry in told], rel=1e-5)
    norms = [float(entry["grad_norm"]) for entry in told]
    assert [row["grad_norm"] for row in rows[::2]] == pytest.approx(norms[::2], rel=1e-5)
    assert [row["grad_norm_clipped"] for row in rows[::2]] == pytest.approx([0.1] * 3, rel=1e-3)


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("parts", [1, 2])
def test_the_trainer_of_lightning_is_recorded(parts: int, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")

    class Training(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = built()

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            return loss_of(self.model, tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    rows_bt = [row for step in range(4) for row in batch(step)]
    trainer = lightning.Trainer(
        max_steps=4,
        accumulate_grad_batches=parts,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        default_root_dir=tmp_path,
        callbacks=[lab.lightning.Recorder(every=2)],
    )
    trainer.fit(Training(), torch.utils.data.DataLoader(rows_bt, batch_size=4 // parts))
    _, *rows = written(tmp_path / "probes.jsonl")
    alone = run(built(), tmp_path / "alone.jsonl", 4, every=2)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone], rel=1e-4)
    for ours, theirs in zip(rows[::2], alone[::2], strict=True):
        for name in ("grad_norm", "grad_norm_clipped", "update_rms", "attention_logit_max/block1"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3), name


def test_gradients_that_are_made_in_a_closure_are_measured(tmp_path: Path) -> None:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = lab.record(model, optimizer, every=1, out=tmp_path / "closure.jsonl")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch(0))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        return loss

    recorder.step(optimizer.step(closure))
    (theirs,) = run(built(), tmp_path / "plain.jsonl", 1)
    same(written(tmp_path / "closure.jsonl")[1], theirs)
