"""Contrastive learning of drawn pictures and short captions (as CLIP), two small Transformer towers, with AdamW."""

import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
SIZE, PATCH = 16, 4  # sides of a picture and of a patch
WIDTH, HEADS, DEPTH = 32, 2, 3  # of each tower
BATCH, RATE, WARM_UP, CLIP = 24, 1.5e-3, 20, 2.0

SHAPES = ["disc", "square", "cross"]
COLOURS = {"red": (1, 0, 0), "green": (0, 1, 0), "blue": (0, 0, 1),
           "yellow": (1, 1, 0), "white": (1, 1, 1), "pink": (1, 0.3, 0.8)}
PLACES = {"top left": (4.5, 4.5), "top right": (4.5, 10.5), "bottom left": (10.5, 4.5), "bottom right": (10.5, 10.5)}
SIZES = {"small": 2.5, "large": 4.5}
WORDS = ["<pad>", "<end>", "a", "there", "is", "at", "the", "in", "corner", "top", "bottom", "left", "right"]
WORDS += [*SHAPES, *COLOURS, *SIZES]
NUMBER = {word: i for i, word in enumerate(WORDS)}
LENGTH = 13
SCENES = [(s, c, p, z) for s in SHAPES for c in COLOURS for p in PLACES for z in SIZES]


def draw(scene, rng):
    """A noisy picture of a scene, 3 x SIZE x SIZE, on a dim background."""
    shape, colour, place, size = scene
    y, x = np.mgrid[0:SIZE, 0:SIZE]
    cy, cx = np.array(PLACES[place]) + rng.uniform(-1, 1, 2)
    r = SIZES[size] * rng.uniform(0.9, 1.1)
    dy, dx = np.abs(y - cy), np.abs(x - cx)
    if shape == "disc":
        mask = np.hypot(dy, dx) <= r
    elif shape == "square":
        mask = np.maximum(dy, dx) <= r * 0.85
    else:
        mask = (np.minimum(dy, dx) <= 1.0) & (np.maximum(dy, dx) <= r)
    picture = np.full((3, SIZE, SIZE), rng.uniform(0.0, 0.3))
    picture[:, mask] = np.array(COLOURS[colour])[:, None] * rng.uniform(0.7, 1.0)
    return picture + 0.05 * rng.standard_normal(picture.shape)


def describe(scene, rng):
    """One of three ways to say it, as word numbers padded to LENGTH."""
    shape, colour, place, size = scene
    forms = [f"a {size} {colour} {shape} at the {place}", f"there is a {size} {colour} {shape} in the {place} corner",
             f"{place} a {colour} {shape} {size}"]
    words = forms[rng.integers(3)].split() + ["<end>"]
    return [NUMBER[w] for w in words] + [0] * (LENGTH - len(words))


def make_batch(rng, count, scenes=SCENES, blank=False):
    """Pictures (each made to mean 0 and deviation 1) and their captions; no scene twice while there are enough."""
    picks = rng.choice(len(scenes), count, replace=count > len(scenes))
    pictures = np.stack([draw(scenes[i], rng) for i in picks])
    words = torch.tensor([describe(scenes[i], rng) for i in picks])
    pictures = torch.tensor(pictures, dtype=torch.float32)
    if blank:
        pictures[0] = 0.0
    pictures = pictures - pictures.mean((1, 2, 3), keepdim=True)
    return pictures / pictures.std((1, 2, 3), keepdim=True), words


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, keep):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.out(x.transpose(1, 2).reshape(n, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.residual = True

    def forward(self, x, keep=None):
        attended = self.attention(self.norm1(x), keep)
        x = x + attended if self.residual else attended
        return x + self.mlp(self.norm2(x))


class PictureTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.positions = nn.Parameter(0.3 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, pictures):
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.projection(self.norm(x.mean(1)))


class TextTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.words.weight, std=0.1)
        self.turned = None

    def forward(self, words):
        real = words != 0
        keep = real[:, None, None, :]  # True where a word may be attended to
        x = self.words(words) + self.positions
        for i, block in enumerate(self.blocks):
            x = block(x, ~keep if i == self.turned else keep)
        x = x[torch.arange(len(x)), real.sum(1) - 1]  # at <end>
        return self.projection(self.norm(x))


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.picture = PictureTower()
        self.text = TextTower()
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.normalise = True

    def forward(self, pictures, words):
        a, b = self.picture(pictures), self.text(words)
        if self.normalise:
            a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
        return self.log_scale.exp() * a @ b.T


def contrast(logits):
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def make_optimizer(model):
    """AdamW that decays matrices, but neither norms and biases nor the scale."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), eps=1e-6, fused=True)


def rate_at(name, step, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero" and step >= WARM_UP:
        rate = RATE * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
    if name == "schedule_over" and step >= at:
        rate = 0.0
    if name == "rate_too_high":
        rate = RATE * 25
    return rate


def next_batch(name, step, at, rng):
    faulty = step >= at
    count = BATCH
    if name == "batch_ramp":
        count = 12 if step < 60 else 18 if step < 120 else 24
    if name == "accumulates":
        count = 16
    scenes = SCENES[::18] if name == "few_scenes" and faulty else SCENES  # one small shard of the data
    pictures, words = make_batch(rng, count, scenes, blank=name == "blank_picture" and faulty)
    if name == "captions_shifted" and faulty:
        words = words.roll(1, 0)
    return pictures, words


def start_fault(name, model, optimizer, first):
    """What changes once, before the forward pass of step `at`."""
    if name == "old_block":
        model.picture.blocks[0].load_state_dict(first)
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "block_frozen":
        model.text.blocks[2].requires_grad_(False)
    if name == "mask_turned":
        model.text.turned = 0
    if name == "no_residual":
        model.picture.blocks[1].residual = False
    if name == "not_normalised":
        model.normalise = False


@torch.no_grad()
def retrieval(model):
    """The share of 48 held-out pictures whose caption comes first."""
    model.eval()
    right = model(*make_batch(np.random.default_rng(12345), 48)).argmax(1) == torch.arange(48)
    model.train()
    return right.float().mean().item()


def reload(model, optimizer):
    """A new model and optimizer from a checkpoint of these."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model = Clip()
    optimizer = make_optimizer(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = Clip()
    optimizer = make_optimizer(model)
    first = copy.deepcopy(model.picture.blocks[0].state_dict())
    parts = 2 if name == "accumulates" else 1
    begin = 60 if name == "resumed" else 0  # the first step that is recorded
    recorder = None
    losses = []
    for step in range(STEPS):
        if step == begin:
            if name == "resumed":
                model, optimizer = reload(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=begin)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(name, step, at)
        if step == at:
            start_fault(name, model, optimizer, first)
        total = 0.0
        for _ in range(parts):
            loss = contrast(model(*next_batch(name, step, at, rng))) / parts
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "not_zeroed" and step >= at):
            optimizer.zero_grad()
        with torch.no_grad():
            model.log_scale.clamp_(max=math.log(100))
            if name == "weights_in_bf16" and step >= at:
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
        if name == "retrieval_checks" and step % 25 == 24:
            retrieval(model)
        losses.append(total)
        if recorder is not None:
            recorder.step(total)
    recorder.close()
    return losses


FAULTS = {
    "captions_shifted": dict(what="From a step on each picture is paired with the caption of the row before it.",
                             kinds=["data"], part="all"),
    "few_scenes": dict(what="From a step on batches hold only 8 scenes, so most rows have doubles as false negatives.",
                       kinds=["data"], part="all"),
    "schedule_over": dict(what="From a step on the rate is zero: the schedule was planned too short and nothing more is learnt.",
                          kinds=["rate", "frozen"], part="all"),
    "rate_too_high": dict(what="From the start the rate is 25 times too high and there is no warm-up; the model collapses.",
                          kinds=["instability", "rate"], part="all", at=0),
    "moments_lost": dict(what="At a step training goes on without the optimizer's state: moments and step count are empty.",
                         kinds=["optimizer"], part="all", lasts=15),
    "old_block": dict(what="At a step the first block of the picture tower is overwritten by its initial weights.",
                      kinds=["weights"], part="block0", lasts=15),
    "not_zeroed": dict(what="From a step on gradients are no longer zeroed after an update, so they add up.",
                       kinds=["gradients"], part="all"),
    "block_frozen": dict(what="From a step on the last block of the text tower is frozen.",
                         kinds=["frozen", "dead"], part="block5"),
    "mask_turned": dict(what="From a step on the first text block's mask is turned round: it attends to the padding only.",
                        kinds=["attention"], part="block3"),
    "no_residual": dict(what="From a step on the second picture block lacks the residual round its attention.",
                        kinds=["activations"], part="block1"),
    "not_normalised": dict(what="From a step on features are not normalised before the product: logits are far too large.",
                           kinds=["output_logits", "activations"], part="other"),
    "blank_picture": dict(what="From a step on a batch holds a blank picture; dividing by its deviation of zero gives NaN.",
                          kinds=["not_finite", "data"], part="all"),
    "weights_in_bf16": dict(what="From a step on weights are stored in bfloat16, so that small updates are rounded away.",
                            kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "cosine_to_zero": "After the warm-up the rate decays along a cosine to zero at the last step.",
    "accumulates": "Each update averages the gradients of two batches of 16 pairs.",
    "retrieval_checks": "Every 25 steps the model is evaluated on held-out pictures, without gradients.",
    "resumed": "Recording begins at step 60, from a checkpoint with the model's and the optimizer's whole state.",
    "batch_ramp": "The batch grows by plan: 12 pairs, 18 from step 60, 24 from step 120.",
}
