"""A small mixture-of-experts language model (RoPE, RMSNorm, SwiGLU, top-2 of 4) learns a toy grammar with AdamW."""

import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH, LENGTH = 12, 24
WIDTH, HEADS, LAYERS = 32, 4, 3
EXPERTS, TOP, HIDDEN = 4, 2, 48
RATE, WARM_UP, BALANCE = 4e-3, 20, 0.1

FAULTS = {
    "labels_unshifted": dict(
        what="From a step on labels are no longer shifted: each token's label is the token itself.",
        kinds=["data"], part="all"),
    "same_batch": dict(
        what="From a step on the loader hands out the same batch for ever, which is learned by heart.",
        kinds=["data"], part="all"),
    "rate_jump": dict(
        what="From a step on the learning rate is ten times the scheduled one.",
        kinds=["rate", "instability"], part="all"),
    "decay_typo": dict(
        what="From a step on the weight decay of AdamW is 10 rather than 0.1, so that matrices shrink at each step.",
        kinds=["optimizer", "weights"], part="all"),
    "no_zero_grad": dict(
        what="Gradients are never set to zero, so that each backward adds to all earlier ones.",
        kinds=["gradients"], part="all", at=0),
    "mask_lost": dict(
        what="From a step on attention has no causal mask, so that tokens see the label that they should predict.",
        kinds=["attention", "data"], part="all"),
    "empty_row_mask": dict(
        what="From a step on a left-padded row hides all keys of its first tokens: softmax over nothing gives NaN.",
        kinds=["not_finite", "attention", "data"], part="all"),
    "block_reinitialised": dict(
        what="At a step all weights of block1 are drawn anew, as where a checkpoint lacks its keys (strict=False).",
        kinds=["weights"], part="block1"),
    "embedding_frozen": dict(
        what="From a step on the embedding has requires_grad False and is no longer trained.",
        kinds=["frozen", "dead"], part="embedding"),
    "norm_skipped": dict(
        what="From a step on block0 feeds its experts and router the residual stream without RMSNorm.",
        kinds=["activations"], part="block0"),
    "balance_sign": dict(
        what="The balance loss has the wrong sign, which rewards sending all tokens to the same experts.",
        kinds=["router"], part="all", at=0),
    "expert_lost": dict(
        what="From a step on two of the four experts of block0 are never run: they add nothing and get no gradient.",
        kinds=["dead", "router"], part="block0"),
    "capacity_small": dict(
        what="From a step on an expert takes at most a quarter of its even share of tokens; the others are dropped.",
        kinds=["router"], part="all"),
    "bf16_weights": dict(
        what="The model and the moments of AdamW are bfloat16 with no fp32 copy, so small updates are rounded off.",
        kinds=["precision"], part="all", at=0),
    "logit_scale": dict(
        what="From a step on logits are multiplied by sqrt(width), a scale that the head was not trained for.",
        kinds=["output_logits"], part="head"),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 100 steps rather than 20.",
    "accumulation": "Each update adds up the gradients of two halves of a batch.",
    "evaluation": "Every 20 steps the model is evaluated on batches kept aside, in eval mode without gradients.",
    "resumed": "The record begins at step 60, resumed from a checkpoint with weights, optimizer and schedule.",
    "router_jitter": "The input of each router is multiplied by noise between 0.98 and 1.02 (Switch Transformers).",
}

# ---------------------------------------------------------------- text

NAMES = "anna boris clara david emma felix greta hugo".split()
ADJECTIVES = "red small old quick heavy bright green odd".split()
VERBS = "see like carry find push paint want lose".split()
TOPICS = ["cat dog cow horse hen goat".split(), "saw drill nail rope hammer file".split(),
          "bean plum pear nut onion carrot".split()]
WORDS = [".", "the", "a", "two", "three", "and", "with", *NAMES, *ADJECTIVES, *VERBS, *[v + "s" for v in VERBS]]
WORDS += [noun + end for topic in TOPICS for noun in topic for end in ("", "s")]
TOKEN = {word: number for number, word in enumerate(WORDS)}


def noun_phrase(rng: random.Random, topic: list[str]) -> list[str]:
    number = rng.choice(["the", "a", "two", "three"])
    end = "s" if number in ("two", "three") else ""
    adjective = [rng.choice(ADJECTIVES)] if rng.random() < 0.3 else []
    return [number, *adjective, rng.choice(topic) + end]


def sentence(rng: random.Random, people: list[str], topic: list[str], verbs: list[str]) -> list[str]:
    if rng.random() < 0.5:
        subject, plural = [rng.choice(people)], False
    else:
        subject, plural = [people[0], "and", people[1]], True
    verb = rng.choice(verbs) + ("" if plural else "s")
    words = [*subject, verb, *noun_phrase(rng, topic)]
    if rng.random() < 0.3:
        words += ["with", *noun_phrase(rng, topic)]
    return [*words, "."]


def make_batch(seed: int, step: int) -> torch.Tensor:
    """Rows of tokens; each row tells of two people, three verbs and things of one topic."""
    rng = random.Random(seed * 1_000_003 + step)
    rows = []
    for _ in range(BATCH):
        people, topic, verbs = rng.sample(NAMES, 2), rng.choice(TOPICS), rng.sample(VERBS, 3)
        words: list[str] = []
        while len(words) < LENGTH + 1:
            words += sentence(rng, people, topic, verbs)
        rows.append([TOKEN[word] for word in words[: LENGTH + 1]])
    return torch.tensor(rows)


# ---------------------------------------------------------------- model


class State:
    """What the blocks are told about the current step."""

    def __init__(self, seed: int):
        self.fault = "plain"
        self.noise = torch.Generator().manual_seed(seed + 77)


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


ANGLE = torch.arange(LENGTH)[:, None] * 1000.0 ** (-torch.arange(WIDTH // HEADS // 2) / (WIDTH // HEADS // 2))
COS, SIN = ANGLE.cos(), ANGLE.sin()
CAUSAL = torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool).tril()


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions for queries or keys of the shape (batch, heads, length, size)."""
    a, b = x.chunk(2, -1)
    cos, sin = COS.to(x.dtype), SIN.to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Attention(nn.Module):
    def __init__(self, state: State):
        super().__init__()
        self.state = state
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        scores = rotate(q) @ rotate(k).transpose(-1, -2) / math.sqrt(width // HEADS)
        mask = CAUSAL[:batch]
        if self.state.fault == "mask_lost":
            mask = torch.ones_like(mask)
        if self.state.fault == "empty_row_mask":
            mask = mask.clone()
            mask[0, :, :, :3] = False  # left padding of the first row
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class MoE(nn.Module):
    def __init__(self, state: State, index: int):
        super().__init__()
        self.state, self.index = state, index
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.balance = torch.zeros(())
        self.load = torch.zeros(EXPERTS)

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        seen = flat
        if self.state.fault == "router_jitter" and self.training:
            seen = flat * (0.98 + 0.04 * torch.rand(flat.shape, generator=self.state.noise))
        chance = self.router(seen).float().softmax(-1)
        top, chosen = chance.topk(TOP, -1)
        top = (top / top.sum(-1, keepdim=True)).to(x.dtype)
        self.load = F.one_hot(chosen, EXPERTS).float().sum(1).mean(0) / TOP
        self.balance = EXPERTS * (self.load * chance.mean(0)).sum()
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if self.state.fault == "expert_lost" and self.index == 0 and number >= EXPERTS - 2:
                continue
            if self.state.fault == "capacity_small":
                most = len(flat) * TOP // EXPERTS // 4
                token, slot = token[:most], slot[:most]
            result = result.index_add(0, token, expert(flat[token]) * top[token, slot, None])
        return result.view_as(x)


class Block(nn.Module):
    def __init__(self, state: State, index: int):
        super().__init__()
        self.state, self.index = state, index
        self.norm1, self.attention = RMSNorm(WIDTH), Attention(state)
        self.norm2, self.moe = RMSNorm(WIDTH), MoE(state, index)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        normed = self.norm2(x)
        if self.state.fault == "norm_skipped" and self.index == 0:
            normed = x
        return x + self.moe(normed)


class Model(nn.Module):
    def __init__(self, state: State):
        super().__init__()
        self.state = state
        self.embed = nn.Embedding(len(WORDS), WIDTH)
        self.blocks = nn.ModuleList(Block(state, index) for index in range(LAYERS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(WORDS), bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        if self.state.fault == "logit_scale":
            logits = logits * math.sqrt(WIDTH)
        return logits.float()

    def balance(self):
        return torch.stack([block.moe.balance for block in self.blocks]).mean()


def initialise(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for key, weight in module.named_parameters():
        if weight.dim() < 2:
            nn.init.ones_(weight)
            continue
        std = 0.06 / math.sqrt(2 * LAYERS) if key.endswith(("out.weight", "down.weight")) else 0.06
        nn.init.normal_(weight, 0.0, std, generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    gains = [weight for weight in model.parameters() if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), fused=True)


def rate(step: int, warm_up: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    if step < warm_up:
        return RATE * (step + 1) / warm_up
    done = (step - warm_up) / (STEPS - warm_up)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def loss_of(model: Model, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of the language model, and the one to train on, which has the balance loss in it."""
    logits, labels = model(tokens[:, :-1]), tokens[:, 1:]
    if model.state.fault == "labels_unshifted":
        labels = tokens[:, :-1]
    text = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    share = -BALANCE if model.state.fault == "balance_sign" else BALANCE
    return text, text + share * model.balance()


@torch.no_grad()
def evaluate(model: Model, seed: int) -> float:
    model.eval()
    losses = [loss_of(model, make_batch(seed + 500, number))[0].item() for number in range(4)]
    model.train()
    return sum(losses) / len(losses)


def set_up(seed: int, name: str) -> tuple[Model, torch.optim.AdamW]:
    model = Model(State(seed))
    initialise(model, seed)
    if name == "bf16_weights":
        model.to(torch.bfloat16)
    return model, make_optimizer(model)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    at = 0 if name in HEALTHY else FAULTS.get(name, {}).get("at", at)
    model, optimizer = set_up(seed, name)
    first = 60 if name == "resumed" else 0
    recorder = None if first else lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        fault = name if step >= at else "plain"
        model.state.fault = fault
        if first and step == first:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = set_up(seed + 1, name)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        now = rate(step, 100 if name == "long_warm_up" else WARM_UP)
        if fault == "rate_jump":
            now *= 10
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = now
        if fault == "decay_typo":
            optimizer.param_groups[0]["weight_decay"] = 10.0
        if fault == "block_reinitialised" and step == at:
            initialise(model.blocks[1], seed + 9)
        if fault == "embedding_frozen":
            model.embed.weight.requires_grad_(False)

        tokens = make_batch(seed, at if fault == "same_batch" else step)
        parts = tokens.chunk(2) if name == "accumulation" else [tokens]
        text = 0.0
        for part in parts:
            piece, total = loss_of(model, part)
            (total / len(parts)).backward()
            text = text + piece.detach() / len(parts)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if fault != "no_zero_grad":
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(text)
        losses.append(text.item())
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, seed)
    recorder.close()
    return losses
