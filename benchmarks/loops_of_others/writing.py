"""A small modern decoder-only language model spells a synthetic text by characters; Adam with decoupled decay, own code."""

import io
import math
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
import lab

STEPS = 240
LENGTH, ROWS = 32, 10
WIDTH, HEADS, KV_HEADS, HIDDEN, BLOCKS = 32, 4, 2, 64, 3
HEAD_WIDTH = WIDTH // HEADS
RATE, WARM_UP, COOL_DOWN, LOWEST, DECAY, CLIP = 4e-3, 20, 60, 0.1, 0.1, 1.0

PAD = 0
ALPHABET = "_ .,abcdefghijklmnopqrstuvwxyz"
NAMES, PLACES = ["anna", "bob", "clara", "otto"], ["garden", "river", "house", "forest"]
ADJECTIVES = ["old", "small", "green", "quiet", "happy"]
ANIMALS = ["cat", "dog", "horse", "owl", "mouse"]
VERBS = ["sees", "likes", "follows", "finds", "calls"]

def sentence(rng: random.Random) -> str:
    thing = f"the {rng.choice(ADJECTIVES)} {rng.choice(ANIMALS)}"
    subject = rng.choice([rng.choice(NAMES), f"the {rng.choice(ANIMALS)}"])
    text = f"{subject} {rng.choice(VERBS)} {thing}"
    if rng.random() < 0.4:
        text += f" in the {rng.choice(PLACES)}"
    return text + ". "

def documents(count: int = 2000) -> np.ndarray:
    """Documents of one or two sentences: cut to LENGTH + 1 characters, short ones are padded."""
    rng = random.Random(1234)
    table = np.full((count, LENGTH + 1), PAD, dtype=np.int64)
    for row in table:
        text = sentence(rng) + (sentence(rng) if rng.random() < 0.7 else "")
        start = rng.randrange(0, 12)
        text = text[start : start + LENGTH + 1]
        row[: len(text)] = [ALPHABET.index(letter) for letter in text]
    return table

def batch(table: np.ndarray, seed: int, step: int, rows: int) -> torch.Tensor:
    chosen = np.random.default_rng([seed, step]).integers(0, len(table), rows)
    return torch.from_numpy(table[chosen])

class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)

def rotary_tables():
    angle = torch.outer(torch.arange(LENGTH), 1000 ** -(torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH))
    return angle.cos(), angle.sin()

def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_WIDTH, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_WIDTH, WIDTH, bias=False)
        self.causal = True
    def forward(self, x, cos, sin):
        rows, length, _ = x.shape
        heads = self.qkv_proj(x).view(rows, length, -1, HEAD_WIDTH).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(rows, length, WIDTH))

class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm = RMSNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = RMSNorm(WIDTH)
        self.mlp = SwiGLU()
        self.residual, self.float8 = True, False
    def forward(self, x, cos, sin):
        x = x.to(torch.float8_e4m3fn).float() if self.float8 else x
        x = x + self.attention(self.attention_norm(x), cos, sin)
        x = x.to(torch.float8_e4m3fn).float() if self.float8 else x
        y = self.mlp(self.mlp_norm(x))
        return x + y if self.residual else y

class Writer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
        self.lm_head.weight = self.embed.weight
        self.logit_scale = 1.0
        self.cos, self.sin = rotary_tables()
        self.apply(initialize)
    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.lm_head(self.norm(x)) * self.logit_scale

def initialize(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
    for last in (getattr(module, "down", None), getattr(module, "o_proj", None)):
        if last is not None:
            nn.init.normal_(last.weight, std=0.1 / math.sqrt(2 * BLOCKS))

def loss_of(model, tokens, targets, mask, labels):
    """The sum of the losses of all positions with a label, over the number of labels in the whole batch."""
    each = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / labels

class Adam(torch.optim.Optimizer):
    """Adam with bias correction; the decay is apart from the gradient and goes with the rate."""

    def __init__(self, groups, lr, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0):
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.decay_with_rate = True
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            decay = group["weight_decay"] * (group["lr"] if self.decay_with_rate else 1.0)
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
                state["t"] += 1
                state["m"].lerp_(p.grad, 1 - beta1)
                state["v"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                root = (state["v"] / (1 - beta2 ** state["t"])).sqrt_().add_(group["eps"])
                p.mul_(1 - decay)
                p.addcdiv_(state["m"], root, value=-group["lr"] / (1 - beta1 ** state["t"]))

def make_optimizer(model, left_out=()):
    left_out = {id(p) for p in left_out}
    weights = [p for p in model.parameters() if id(p) not in left_out]
    matrices = dict(params=[p for p in weights if p.ndim > 1], weight_decay=DECAY)
    gains = dict(params=[p for p in weights if p.ndim == 1], weight_decay=0.0)
    return Adam([matrices, gains], lr=RATE)

def trapezoid(step):
    return RATE * min(1.0, (step + 1) / WARM_UP, max(LOWEST, (STEPS - step) / COOL_DOWN))

@torch.no_grad()
def evaluate_average(model, average, held_out):
    """The held-out loss of the averaged weights, which are put in and taken out again."""
    kept = [p.clone() for p in model.parameters()]
    for p, mean in zip(model.parameters(), average):
        p.copy_(mean)
    model.eval()
    mask = (held_out[:, 1:] != PAD).float()
    loss = loss_of(model, held_out[:, :-1], held_out[:, 1:], mask, mask.sum())
    model.train()
    for p, old in zip(model.parameters(), kept):
        p.copy_(old)
    return loss.item()

def plant(name, model, optimizer):
    """What is changed once, when the fault begins."""
    for layer in model.layers:
        layer.attention.causal = name != "mask_lost"
        layer.float8 = name == "float8_stream"
    if name == "residual_lost":
        model.layers[0].residual = False
    if name == "logit_scale":
        model.logit_scale = 4.0
    if name == "decay_without_rate":
        optimizer.decay_with_rate = False
    if name == "block_not_loaded":
        model.layers[1].apply(initialize)

def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    table = documents()
    model = Writer()
    with torch.no_grad():
        model.embed.weight.normal_().mul_(1.0 if name == "embedding_default" else 0.1)
    left_out = model.layers[2].parameters() if name == "block_not_in_optimizer" else ()
    optimizer = make_optimizer(model, left_out)
    recorder = lab.record(model, optimizer, every=every, out=out)
    average = [p.detach().clone() for p in model.parameters()]
    losses = []

    for step in range(STEPS):
        on = step >= at
        if step == at:
            plant(name, model, optimizer)

        if name == "resumed" and step == STEPS // 3:
            recorder.close()
            file = io.BytesIO()
            torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict()), file)
            saved = torch.load(io.BytesIO(file.getvalue()))
            model = Writer()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)

        rate = trapezoid(step)
        if name == "decay_from_start":
            rate = RATE * min(1.0, (step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))
        if name == "rate_jump" and on:
            rate *= 10
        for group in optimizer.param_groups:
            group["lr"] = rate

        rows = ROWS
        if name == "batch_ramp":
            rows = 8 if step < 60 else 16 if step < 120 else 24
        text = batch(table, seed, step, rows)
        if name == "corrupt_shard" and at <= step < at + 12:
            text = torch.randint(1, len(ALPHABET), text.shape)
        tokens, targets = text[:, :-1], text[:, 1:]
        if name == "targets_not_shifted" and on:
            targets = tokens
        mask = (targets != PAD).float()
        if name == "no_labels" and step == at:
            mask = torch.zeros_like(mask)

        pieces = 2 if name == "accumulation" else 1
        total = 0.0
        for a, b, m in zip(tokens.chunk(pieces), targets.chunk(pieces), mask.chunk(pieces)):
            loss = loss_of(model, a, b, m, mask.sum())
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "not_zeroed" and on):
            optimizer.zero_grad()
        recorder.step(total)
        losses.append(total)

        if name == "average_evaluated":
            for mean, p in zip(average, model.parameters()):
                mean.lerp_(p.detach(), 0.05)
            if step % 25 == 24:
                evaluate_average(model, average, batch(table, 99, step, ROWS))

    recorder.close()
    return losses

FAULTS = {
    "targets_not_shifted": dict(what="From a step on the target of a position is its own character, not the next.",
        kinds=["data"], part="all"),
    "corrupt_shard": dict(what="For 12 steps the batches hold random characters, as from a corrupt file.",
        kinds=["data"], part="all", lasts=12),
    "no_labels": dict(what="A batch has no labels at all: its mean loss is 0/0 and all weights are NaN from there on.",
        kinds=["not_finite", "data"], part="all"),
    "rate_jump": dict(what="From a step on the rate is ten times that of the schedule.",
        kinds=["rate", "instability"], part="all"),
    "decay_without_rate": dict(what="From a step on the optimizer decays weights by 0.1 a step, not by 0.1 times the rate.",
        kinds=["optimizer", "weights"], part="all"),
    "not_zeroed": dict(what="From a step on gradients are not set to zero after an update and add up.",
        kinds=["gradients"], part="all"),
    "block_not_loaded": dict(what="At a step the linear weights of a block are drawn anew, as if missing from a checkpoint.",
        kinds=["weights"], part="block1"),
    "embedding_default": dict(what="The tied embedding begins with the default std of 1: first logits are huge.",
        kinds=["weights", "output_logits"], part="embedding", at=0),
    "mask_lost": dict(what="From a step on attention is not causal: each position sees the character it should predict.",
        kinds=["attention", "data"], part="all"),
    "residual_lost": dict(what="From a step on a block gives out its feed-forward part alone, with no residual around it.",
        kinds=["activations"], part="block0"),
    "logit_scale": dict(what="From a step on logits are multiplied by 4 after the head.",
        kinds=["output_logits"], part="head"),
    "block_not_in_optimizer": dict(what="The weights of a block were never given to the optimizer; they stay as drawn.",
        kinds=["frozen"], part="block2", at=0),
    "float8_stream": dict(what="From a step on the residual stream is cast to float8 with no scale: gradients underflow.",
        kinds=["precision", "gradients"], part="all"),
}

HEALTHY = {
    "accumulation": "Gradients of two halves of the batch are added up before each update.",
    "average_evaluated": "A moving average of the weights is kept aside and put in for an evaluation each 25 steps.",
    "batch_ramp": "The batch grows from 8 to 16 to 24 rows.",
    "resumed": "The run stops after a third and goes on from a checkpoint with all its state.",
    "decay_from_start": "The rate falls linearly to zero after the warm-up, with no flat part.",
}
