"""Pretrains a small decoder-only Transformer with learned relative positions on synthetic melodies, with Adafactor."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH = 12
BARS, NOTES = 4, 4  # of a melody
PAD, START, FIRST_PITCH = 0, 1, 2
PITCHES, DURATIONS = 24, 4
FIRST_DURATION = FIRST_PITCH + PITCHES
VOCABULARY = FIRST_DURATION + DURATIONS
LENGTH = 2 * BARS * NOTES  # tokens that are predicted
WIDTH, HEADS, BLOCKS = 32, 4, 3
PEAK, WARM_UP = 0.03, 20

FAULTS = {
    "inputs_transposed": dict(
        what="From a step on a transposition by random semitones changes the inputs' pitches, not the targets'.",
        kinds=["data"], part="all"),
    "loader_stuck": dict(what="From a step on the loader gives the same batch again and again.",
                         kinds=["data"], part="all"),
    "causal_mask_lost": dict(what="From a step on no block masks the future: the next token is in the input.",
                             kinds=["attention", "data"], part="all"),
    "relative_reversed": dict(
        what="From a step on block0 reads its relative position biases in reversed order (near ones as far ones).",
        kinds=["attention"], part="block0"),
    "rate_tenfold": dict(what="From a step on the learning rate is ten times the planned one.",
                         kinds=["rate", "instability"], part="all"),
    "decay_huge": dict(what="From a step on the optimizer's weight decay is 10 in place of 0.01.",
                       kinds=["optimizer", "weights"], part="all"),
    "block_overwritten": dict(
        what="At a step block2 is overwritten by its initial weights, as by a checkpoint that loads in part.",
        kinds=["weights"], part="block2", lasts=1),
    "gradients_kept": dict(
        what="From a step on gradients are no longer zeroed between updates, so that they add up.",
        kinds=["gradients", "optimizer"], part="all"),
    "embedding_not_trained": dict(
        what="The embedding is not given to the optimizer, so it stays as initialised.",
        kinds=["frozen"], part="embedding", at=0),
    "residual_lost": dict(
        what="From a step on the residual around block1's feed-forward layer is missing.",
        kinds=["activations"], part="block1"),
    "logits_scaled": dict(
        what="From a step on the logits are multiplied by 6 before the loss, a sampling temperature left in.",
        kinds=["output_logits"], part="head"),
    "empty_batch": dict(
        what="At a step a batch is all padding: the loss is 0/0 and the update writes NaN into every weight.",
        kinds=["not_finite", "data"], part="all"),
    "weights_in_float8": dict(
        what="Weights are kept in float8 (e4m3) only: each is rounded after every update, and small updates are lost.",
        kinds=["precision", "weights"], part="all", at=0),
}

HEALTHY = {
    "accumulate": "Each update sums the gradients of two halves of the batch.",
    "cosine_to_zero": "The rate follows a cosine to zero at the last step in place of the inverse square root.",
    "evaluation": "Every 25 steps the model is evaluated on held-out melodies without gradients.",
    "batch_ramp": "The batch grows from 6 over 9 to 12 melodies at steps 60 and 120.",
    "resumed": "Halfway training goes on from a checkpoint with all its state; only then it is recorded.",
}


def melody(rng: np.random.Generator) -> list[int]:
    """A tune of pitch and duration events: a motif, its repetition, a shifted motif, and the motif again."""
    tonic = rng.integers(0, 6)
    scale = [0, 2, 4, 5, 7, 9, 11, 12, 14, 16, 17]
    degree, motif = int(rng.integers(0, 5)), []
    for _ in range(NOTES):
        motif.append(degree)
        degree = min(max(degree + int(rng.choice([-1, 1, 2], p=[0.3, 0.6, 0.1])), 0), 8)
    rhythm = [[0, 0, 1, 1], [1, 0, 0, 2], [2, 2, 2, 2], [3, 1, 1, 3]][rng.integers(0, 4)]
    bars = BARS if rng.random() < 0.7 else BARS - 1
    tokens = [START]
    for bar in range(bars):
        for note in range(NOTES):
            pitch = tonic + scale[motif[note] + (2 if bar == 2 else 0)]
            tokens += [FIRST_PITCH + pitch, FIRST_DURATION + rhythm[note]]
    return tokens + [PAD] * (LENGTH + 1 - len(tokens))


def draw(seed: int, step: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of a step."""
    rng = np.random.default_rng([seed, step])
    tokens = torch.tensor([melody(rng) for _ in range(size)])
    return tokens[:, :-1], tokens[:, 1:]


def transpose(tokens: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    """Each melody's pitches moved by up to 6 semitones, and around at the ends of the range."""
    rng = np.random.default_rng([seed, step, 1])
    by = torch.tensor(rng.integers(1, 7, size=(len(tokens), 1)))
    is_pitch = (tokens >= FIRST_PITCH) & (tokens < FIRST_DURATION)
    return torch.where(is_pitch, FIRST_PITCH + (tokens - FIRST_PITCH + by) % PITCHES, tokens)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1))
        self.relative = nn.Parameter(-slopes[:, None] * torch.arange(LENGTH))  # by head and distance
        self.causal, self.reversed = True, False

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        index = LENGTH - 1 - distance.abs() if self.reversed else distance.abs()
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + self.relative[:, index]
        if self.causal:
            scores = scores.masked_fill(distance < 0, -math.inf)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.residual = True

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        fed = self.feed(self.norm2(x))
        return x + fed if self.residual else fed


class MelodyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rate(name: str, step: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero":
        return PEAK * warm * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return PEAK * min(warm, math.sqrt(WARM_UP / (step + 1)))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the tokens that are no padding."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    real = (targets.flatten() != PAD).float()
    return (each * real).sum() / real.sum()


def batch_of(name: str, seed: int, step: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = BATCH
    if name == "batch_ramp":
        size = 6 if step < 60 else 9 if step < 120 else BATCH
    if name == "loader_stuck":
        step = min(step, at)
    inputs, targets = draw(seed, step, size)
    if name == "inputs_transposed" and step >= at:
        inputs = transpose(inputs, seed, step)
    if name == "empty_batch" and step == at:
        inputs, targets = inputs * 0 + PAD, targets * 0 + PAD
    return inputs, targets


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MelodyModel()
    weights = list(model.parameters())
    if name == "embedding_not_trained":
        weights = weights[1:]  # the embedding is the first
    return model, torch.optim.Adafactor(weights, lr=PEAK, weight_decay=0.01, foreach=True)


def break_model(name: str, model: nn.Module, optimizer, initial: dict) -> None:
    """Plants, at its step, a fault that is in the model or the optimizer's settings."""
    for block in model.blocks:
        block.attention.causal = name != "causal_mask_lost"
    if name == "relative_reversed":
        model.blocks[0].attention.reversed = True
    if name == "residual_lost":
        model.blocks[1].residual = False
    if name == "decay_huge":
        optimizer.param_groups[0]["weight_decay"] = 10.0
    if name == "block_overwritten":
        model.blocks[2].load_state_dict(initial)


def gradients(name: str, model: nn.Module, step: int, at: int, inputs, targets) -> torch.Tensor:
    """Forward and backward pass of a step; the loss."""
    if name == "accumulate":
        real = (targets != PAD).sum()
        total = torch.zeros(())
        for x, y in zip(inputs.chunk(2), targets.chunk(2)):
            part = loss_of(model(x), y) * (y != PAD).sum() / real
            part.backward()
            total += part.detach()
        return total
    logits = model(inputs)
    if name == "logits_scaled" and step >= at:
        logits = logits * 6
    loss = loss_of(logits, targets)
    loss.backward()
    return loss


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    inputs, targets = draw(10**6, 0)
    value = loss_of(model(inputs), targets).item()
    model.train()
    return value


def resume(model: nn.Module, optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A new model and optimizer with all the state of a checkpoint."""
    saved, state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model, optimizer = build("plain")
    model.load_state_dict(saved)
    optimizer.load_state_dict(state)
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    at = FAULTS.get(name, {}).get("at", at)
    model, optimizer = build(name)
    initial = copy.deepcopy(model.blocks[2].state_dict())
    start = STEPS // 2 if name == "resumed" else 0
    recorder, losses = None, []
    for step in range(STEPS):
        if step == start:
            if name == "resumed":
                model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=start)
        if step == at:
            break_model(name, model, optimizer, initial)
        for group in optimizer.param_groups:
            group["lr"] = rate(name, step)
            if name == "rate_tenfold" and step >= at:
                group["lr"] *= 10
        inputs, targets = batch_of(name, seed, step, at)
        loss = gradients(name, model, step, at, inputs, targets)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if name == "weights_in_float8" and step >= at:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.to(torch.float8_e4m3fn))
        if not (name == "gradients_kept" and step >= at):
            model.zero_grad()
        if name == "evaluation" and step % 25 == 24:
            evaluate(model)
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)
    recorder.close()
    return losses
