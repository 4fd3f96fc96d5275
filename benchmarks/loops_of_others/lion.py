"""Pretrains a small decoder-only language model (rotary, gated, grouped queries) with Lion under bf16 autocast."""
import copy
import math
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
WIDTH, BLOCKS, HEADS, KV_HEADS, HIDDEN = 40, 4, 4, 2, 80
LENGTH, BATCH = 32, 8
PEAK_RATE, WARM_UP, DECAY = 2e-3, 20, 0.1
RESUMED_AT = 100
STD = WIDTH ** -0.5
PAD = 0

NAMES = {"ann": "she", "bob": "he", "cleo": "she", "dan": "he", "eve": "she", "finn": "he"}
THINGS = {"ball": ["throws", "rolls"], "book": ["reads", "opens"], "cake": ["eats", "bakes"],
          "car": ["drives", "parks"], "song": ["sings", "plays"], "box": ["opens", "lifts"]}
COLOURS = ["red", "blue", "green", "old", "new", "small"]
MANNERS = ["slowly", "quickly", "again", "today"]
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]


def story(rng):
    name, thing, colour = rng.choice(list(NAMES)), rng.choice(list(THINGS)), rng.choice(COLOURS)
    words = [name, "has", "a", colour, thing, "."]
    words += [NAMES[name], rng.choice(THINGS[thing]), "the", colour, thing, rng.choice(MANNERS), "."]
    if rng.random() < 0.5:
        first = rng.randrange(len(NUMBERS) - 3)
        words += [name, "counts", *NUMBERS[first:first + 4], "."]
    return words


def make_text(seed, tokens):
    rng = random.Random(seed)
    verbs = sorted({verb for pair in THINGS.values() for verb in pair})
    vocabulary = ["<pad>", ".", "has", "a", "the", "counts", "she", "he",
                  *NAMES, *THINGS, *verbs, *COLOURS, *MANNERS, *NUMBERS]
    number = {word: i for i, word in enumerate(vocabulary)}
    ids = []
    while len(ids) < tokens:
        ids += [number[word] for word in story(rng)]
    return torch.tensor(ids[:tokens]), len(vocabulary)


class Loader:
    """Draws windows of the text; the labels are the next tokens."""

    def __init__(self, text, seed):
        self.text, self.rng = text, np.random.default_rng(seed)

    def next(self, rows):
        starts = self.rng.integers(0, len(self.text) - LENGTH - 1, rows)
        windows = torch.stack([self.text[s:s + LENGTH + 1] for s in starts])
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def rotate(x, turns):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(turns.float())).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("future", torch.ones(LENGTH, LENGTH).triu(1).bool(), persistent=False)
        angles = torch.outer(torch.arange(LENGTH).float(), 1000.0 ** (-torch.arange(0, self.size, 2) / self.size))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def forward(self, x):
        heads = self.qkv(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        qk, v = heads.split([HEADS + KV_HEADS, KV_HEADS], dim=1)
        q, k = rotate(qk, self.turns).split([HEADS, KV_HEADS], dim=1)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = (q / math.sqrt(self.size)) @ k.transpose(-1, -2)
        y = scores.masked_fill(self.future, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
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
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        self.norm2, self.feed_forward = nn.RMSNorm(WIDTH, eps=1e-6), FeedForward()
        self.fault = None

    def forward(self, x):
        if self.fault == "no_grad_block":
            with torch.no_grad():
                attended = self.attention(self.norm1(x))
                fed = self.feed_forward(self.norm2(x + attended))
            return x + attended + fed
        x = x + self.attention(self.norm1(x))
        if self.fault == "residual_lost":
            return self.feed_forward(self.norm2(x))
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, words, bias=False)
        self.logit_scale = 1.0
        for name, p in self.named_parameters():
            if p.ndim == 2:
                small = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=STD / math.sqrt(2 * BLOCKS) if small else STD)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.logit_scale


def loss_of(model, inputs, labels):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(inputs)
    losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none")
    counted = (labels.flatten() != PAD).float()
    return (losses * counted).sum() / counted.sum()


class Lion(torch.optim.Optimizer):
    """Sign of an interpolated momentum, with decoupled weight decay (Chen et al., 2023)."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))
        self.fault = None

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if "exp_avg" not in self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in params]
            grads = [p.grad.to(m.dtype) for p, m in zip(params, moments)]
            directions = torch._foreach_sign(torch._foreach_lerp(moments, grads, 1 - beta1))
            scale = 1 if self.fault == "decay_without_rate" else group["lr"]
            torch._foreach_mul_(params, 1 - scale * group["weight_decay"])
            torch._foreach_add_(params, directions, alpha=-group["lr"])
            torch._foreach_lerp_(moments, grads, 1 - beta2)


def make_optimizer(model, name):
    params = list(model.named_parameters())
    if name == "embedding_left_out":
        params = [(n, p) for n, p in params if not n.startswith("embedding")]
    return Lion([dict(params=[p for _, p in params if p.ndim == 2], weight_decay=DECAY),
                 dict(params=[p for _, p in params if p.ndim == 1], weight_decay=0.0)], lr=PEAK_RATE)


def rate(name, step, at):
    warm = min(1, (step + 1) / WARM_UP)
    if name == "stable_then_to_zero":
        return PEAK_RATE * warm * min(1, (STEPS - step) / (STEPS // 4))
    factor = 10 if name == "rate_of_adamw" and step >= at else 1
    return factor * PEAK_RATE * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))


def plant(name, model, optimizer, initial):
    """What is changed once, just before the update `at`."""
    if name == "decay_without_rate":
        optimizer.fault = name
    if name == "block_not_loaded":
        model.blocks[2].load_state_dict(initial)
    if name == "mask_lost":
        for block in model.blocks:
            block.attention.future.zero_()
    if name == "residual_lost":
        model.blocks[1].fault = name
    if name == "no_grad_block":
        model.blocks[3].fault = name
    if name == "logits_scaled":
        model.logit_scale = 6.0
    if name == "weights_in_bf16":
        model.bfloat16()


def next_batch(name, loader, step, at, last):
    if name == "stuck_loader" and step >= max(at, 1):
        return last
    inputs, labels = loader.next(BATCH + (2 * min(2, step // 40) if name == "growing_batch" else 0))
    if name == "labels_not_shifted" and step >= at:
        labels = inputs
    if name == "empty_labels" and step == at:
        labels = torch.full_like(labels, PAD)
    return inputs, labels


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    print("held-out loss", sum(loss_of(model, x, y).item() for x, y in batches) / len(batches))
    model.train()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text, words = make_text(seed, 20000)
    loader = Loader(text[2000:], seed)
    held_out = [Loader(text[:2000], seed + 1).next(BATCH) for _ in range(2)]
    model = Model(words)
    optimizer = make_optimizer(model, name)
    initial = copy.deepcopy(model.blocks[2].state_dict())
    average = copy.deepcopy(model) if name == "averaged_weights" else None
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out)
    batch, losses = None, []

    for step in range(STEPS):
        if name == "resumed" and step == min(RESUMED_AT, STEPS // 2):
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = Model(words)
            model.load_state_dict(saved[0])
            optimizer = make_optimizer(model, name)
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if step == at:
            plant(name, model, optimizer, initial)

        batch = next_batch(name, loader, step, at, batch)
        for group in optimizer.param_groups:
            group["lr"] = rate(name, step, at)
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        if not (name == "not_zeroed" and step >= at - 1):
            model.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)

        if name == "averaged_weights":
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)
        if name == "evaluation" and step % 25 == 24:
            evaluate(model, held_out)

    recorder.close()
    return losses


FAULTS = {  # each from a step on
    "labels_not_shifted": dict(what="The labels are the inputs, not the next tokens.", kinds=["data"], part="all"),
    "stuck_loader": dict(what="The loader gives one and the same batch again and again.", kinds=["data"], part="all"),
    "empty_labels": dict(what="One batch has only padding as labels: its mean loss is NaN, and so the momenta stay.",
                         kinds=["not_finite", "data"], part="all"),
    "rate_of_adamw": dict(what="The rate is ten times what Lion needs, as in a config for AdamW.",
                          kinds=["rate", "instability"], part="all"),
    "decay_without_rate": dict(what="Weight decay is no longer multiplied by the rate: a tenth a step.",
                               kinds=["optimizer"], part="all"),
    "block_not_loaded": dict(what="The weights of block2 are again the initial ones (a partly loaded file).",
                             kinds=["weights"], part="block2", lasts=1),
    "not_zeroed": dict(what="Gradients are not zeroed between updates and add up.", kinds=["gradients"], part="all"),
    "mask_lost": dict(what="Attention has no causal mask: it sees tokens to come.", kinds=["attention"], part="all"),
    "residual_lost": dict(what="The feed-forward of block1 has no residual.", kinds=["activations"], part="block1"),
    "logits_scaled": dict(what="The logits are multiplied by six.", kinds=["output_logits"], part="head"),
    "embedding_left_out": dict(what="The embedding was not given to the optimizer and stays as it was drawn.",
                               kinds=["frozen"], part="embedding", at=0),
    "no_grad_block": dict(what="Block3 is computed under no_grad and gets no gradient.",
                          kinds=["dead", "frozen"], part="block3"),
    "weights_in_bf16": dict(what="The weights are kept in bfloat16, where small updates are rounded away.",
                            kinds=["precision"], part="all"),
}

HEALTHY = {
    "growing_batch": "The batch has 8 rows at first, 10 from step 40 on and 12 from step 80 on.",
    "evaluation": "Every 25 steps the model is evaluated on two held-out batches.",
    "averaged_weights": "A moving average of the weights is kept aside.",
    "stable_then_to_zero": "The rate is constant after warm-up and falls linearly to zero in the last quarter.",
    "resumed": "Recorded from step 100 on, resumed from a checkpoint with all its state.",
}
