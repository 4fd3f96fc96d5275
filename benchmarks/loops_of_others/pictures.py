"""Classify drawn pictures (discs, frames, stripes, ...) with a small vision transformer, AdamW and cosine decay."""
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
CLASSES = 10
DRAWN, SIZE, PATCH = 24, 20, 4   # pictures are drawn 24 wide and cropped to 20 at random
PICTURES = 2048
BATCH = 36
WIDTH, DEPTH, HEADS = 40, 4, 2
PEAK, FLOOR, WARM_UP = 3e-3, 0.02, 20
WEIGHT_DECAY, SMOOTHING = 0.05, 0.1
DROPOUT, DROP_PATH = 0.1, 0.1


# ---------------------------------------------------------------- pictures

def shape_mask(kind, x, y, r):
    """True where the shape covers the pixel; x and y are measured from the centre of the shape."""
    far = np.maximum(np.abs(x), np.abs(y))
    round_ = np.sqrt(x * x + y * y)
    inside = far < r
    if kind == 0:                                   # disc
        return round_ < r
    if kind == 1:                                   # ring
        return (round_ < r) & (round_ > 0.55 * r)
    if kind == 2:                                   # square
        return inside
    if kind == 3:                                   # frame
        return inside & (far > 0.6 * r)
    if kind == 4:                                   # triangle
        return inside & (2 * np.abs(x) < y + r)
    if kind == 5:                                   # plus
        return inside & (np.minimum(np.abs(x), np.abs(y)) < 0.3 * r)
    if kind == 6:                                   # diagonal cross
        return inside & (np.abs(np.abs(x) - np.abs(y)) < 0.35 * r)
    if kind == 7:                                   # lying stripes
        return inside & (np.floor(y / 2) % 2 == 0)
    if kind == 8:                                   # standing stripes
        return inside & (np.floor(x / 2) % 2 == 0)
    return inside & ((np.floor(x / 3) + np.floor(y / 3)) % 2 == 0)     # chess board


def draw(count, seed):
    """Coloured shapes on a coloured ground with noise, values from 0 to 1, and their classes."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    rows, columns = np.mgrid[0:DRAWN, 0:DRAWN].astype(np.float32)
    pictures = np.empty((count, 3, DRAWN, DRAWN), np.float32)
    for i, kind in enumerate(labels):
        cx, cy = rng.uniform(10, 14, 2)
        mask = shape_mask(kind, columns - cx, rows - cy, rng.uniform(5, 8))
        ground, ink = rng.uniform(0.0, 0.45, 3), rng.uniform(0.55, 1.0, 3)
        if rng.random() < 0.2:
            ground, ink = ink, ground
        pictures[i] = np.where(mask, ink[:, None, None], ground[:, None, None])
    pictures += rng.normal(0, 0.06, pictures.shape)
    return torch.from_numpy(pictures.clip(0, 1).astype(np.float32)), torch.from_numpy(labels)


class Loader:
    """Shuffled batches without end; random crop and mirror; normalized with the mean and spread of the set."""

    def __init__(self, seed):
        self.pictures, self.labels = draw(PICTURES, seed + 1000)
        self.mean, self.std = self.pictures.mean(), self.pictures.std()
        self.generator = torch.Generator().manual_seed(seed + 2000)
        self.order = torch.empty(0, dtype=torch.long)

    def crop(self, pictures):
        left = torch.randint(0, DRAWN - SIZE + 1, (len(pictures), 2), generator=self.generator).tolist()
        mirror = (torch.rand(len(pictures), generator=self.generator) < 0.5).tolist()
        crops = []
        for picture, (top, start), flip in zip(pictures, left, mirror):
            part = picture[:, top:top + SIZE, start:start + SIZE]
            crops.append(part.flip(-1) if flip else part)
        return torch.stack(crops)

    def next(self):
        if len(self.order) < BATCH:
            self.order = torch.randperm(PICTURES, generator=self.generator)
        rows, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.crop(self.pictures[rows]), self.labels[rows]

    def normalize(self, pictures):
        return (pictures - self.mean) / self.std


# ---------------------------------------------------------------- model

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.out(seen.transpose(1, 2).reshape(b, t, WIDTH))


class DropPath(nn.Module):
    """Leaves out the branch for a picture with probability `rate`."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0:
            return x
        keep = (torch.rand(len(x), 1, 1) >= self.rate).float()
        return x * keep / max(1 - self.rate, 1e-3)


class Block(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH),
                                 nn.Dropout(DROPOUT))
        self.drop_path = DropPath(rate)
        self.residual = True

    def forward(self, x):
        x = x + self.drop_path(self.attention(self.norm1(x)))
        branch = self.drop_path(self.mlp(self.norm2(x)))
        return x + branch if self.residual else branch


class VisionTransformer(nn.Module):
    def __init__(self, rates):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.3 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
        self.use_positions = True
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(rate) for rate in rates)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures):
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        if self.use_positions:
            x = x + self.positions
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def make_model(name):
    rates = [DROP_PATH * i / (DEPTH - 1) for i in range(DEPTH)]
    if name == "last_block_always_dropped":
        rates[-1] = 1.0
    return VisionTransformer(rates)


def make_optimizer(model, name):
    """AdamW; no decay on biases, norms and positions."""
    groups = {}
    for key, weight in model.named_parameters():
        factor = 1.0
        if name == "layerwise_rates" and not key.startswith(("head", "norm")):
            depth = int(key.split(".")[1]) + 1 if key.startswith("blocks") else 0
            factor = 0.8 ** (DEPTH + 1 - depth)
        decay = WEIGHT_DECAY if weight.dim() > 1 and key != "positions" else 0.0
        group = groups.setdefault((decay, factor), dict(params=[], weight_decay=decay, factor=factor))
        group["params"].append(weight)
    return torch.optim.AdamW(list(groups.values()), lr=PEAK, betas=(0.9, 0.99))


def rate_at(step):
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


# ---------------------------------------------------------------- training

def change_model(name, model, optimizer):
    """What a fault changes once, just before the update `at`."""
    if name == "block_not_in_checkpoint":
        fresh = Block(model.blocks[2].drop_path.rate)
        model.blocks[2].load_state_dict(fresh.state_dict())
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "attention_not_scaled":
        for block in model.blocks:
            block.attention.scale = 1.0
    if name == "residual_lost":
        model.blocks[1].residual = False
    if name == "positions_not_added":
        model.use_positions = False


def make_batch(name, planted, loader):
    pictures, labels = loader.next()
    if planted and name == "pictures_shuffled_alone":
        pictures = pictures[torch.randperm(len(pictures), generator=loader.generator)]
    if planted and name == "pixels_to_255":
        pictures = pictures * 255
    if planted and name == "blank_picture":
        pictures[0] = 0.5
        low, high = pictures.amin((1, 2, 3), keepdim=True), pictures.amax((1, 2, 3), keepdim=True)
        pictures = (pictures - low) / (high - low)       # stretch the contrast of each picture
    return loader.normalize(pictures), labels


def loss_of(name, model, pictures, labels, generator):
    if name == "mixup":
        share = 1 - 0.5 * torch.rand((), generator=generator) ** 2
        other = torch.randperm(len(labels), generator=generator)
        logits = model(share * pictures + (1 - share) * pictures[other])
        return (share * F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)
                + (1 - share) * F.cross_entropy(logits, labels[other], label_smoothing=SMOOTHING))
    logits = model(pictures)
    if name == "softmax_twice":
        logits = logits.softmax(dim=-1)
    return F.cross_entropy(logits, labels, label_smoothing=SMOOTHING)


@torch.no_grad()
def accuracy(model, loader, pictures, labels):
    """Share of held-out pictures that are right; leaves the model in the mode of evaluation."""
    model.eval()
    edge = (DRAWN - SIZE) // 2
    middle = pictures[:, :, edge:edge + SIZE, edge:edge + SIZE]
    return (model(loader.normalize(middle)).argmax(-1) == labels).float().mean().item()


@torch.no_grad()
def update_average(average, model):
    for kept, weight in zip(average.parameters(), model.parameters()):
        kept.lerp_(weight, 0.03)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    loader = Loader(seed)
    held_out = draw(128, seed + 3000)
    model = make_model(name)
    optimizer = make_optimizer(model, name)
    if name == "head_not_in_optimizer":
        model.head = nn.Linear(WIDTH, CLASSES)           # after the optimizer was made
    average = copy.deepcopy(model) if name == "average_validated" else None
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        planted = step >= at
        if step == at:
            change_model(name, model, optimizer)
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
            model = make_model(name)
            optimizer = make_optimizer(model, name)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        rate = rate_at(step)
        if planted and name == "rate_times_ten":
            rate *= 10
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]

        parts = 3 if name == "accumulation" else 1       # the batch goes through the model in so many parts
        pictures, labels = make_batch(name, planted, loader)
        total = 0.0
        for some, theirs in zip(pictures.chunk(parts), labels.chunk(parts)):
            loss = loss_of(name, model, some, theirs, loader.generator) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if not (name == "zero_grad_forgotten" and step + 1 >= at):
            optimizer.zero_grad()
        if planted and name == "weights_in_bfloat16":
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
        recorder.step(total)
        losses.append(float(total))

        if name == "average_validated":
            update_average(average, model)
            if step % 30 == 29:
                accuracy(average, loader, *held_out)
                accuracy(model, loader, *held_out)
                model.train()
        if name == "left_in_eval" and step + 1 == at:
            accuracy(model, loader, *held_out)           # and never model.train() again
    recorder.close()
    train.model = model                                  # for checks by hand
    return losses


FAULTS = {
    "pictures_shuffled_alone": dict(what="From a step on the pictures of a batch are shuffled, their labels are not.",
                                    kinds=["data"], part="all"),
    "pixels_to_255": dict(what="From a step on pictures come with values to 255, yet are normalized as from 0 to 1.",
                          kinds=["data"], part="all"),
    "left_in_eval": dict(what="After a validation the model stays in eval mode: no dropout, no drop path.",
                         kinds=["data"], part="all"),
    "rate_times_ten": dict(what="From a step on the rate is ten times what the schedule should give.",
                           kinds=["rate", "instability"], part="all"),
    "moments_lost": dict(what="Resumed without the state of the optimizer: AdamW's moments start anew.",
                         kinds=["optimizer"], part="all", lasts=20),
    "block_not_in_checkpoint": dict(what="A checkpoint loaded with strict=False lacks block2, which starts anew.",
                                    kinds=["weights"], part="block2"),
    "zero_grad_forgotten": dict(what="From a step on gradients are not zeroed first and add up.",
                                kinds=["gradients"], part="all"),
    "residual_lost": dict(what="From a step on block1 returns its MLP without the residual.",
                          kinds=["activations"], part="block1"),
    "attention_not_scaled": dict(what="From a step on attention logits are not divided by the root of the width.",
                                 kinds=["attention"], part="all"),
    "positions_not_added": dict(what="From a step on the position embedding is not added to the patches.",
                                kinds=["attention", "dead", "frozen"], part="other"),
    "softmax_twice": dict(what="The model returns softmax, and cross_entropy takes it for logits.",
                          kinds=["output_logits", "data"], part="head", at=0),
    "head_not_in_optimizer": dict(what="The head was replaced after the optimizer was made, and is never trained.",
                                  kinds=["frozen"], part="head", at=0),
    "last_block_always_dropped": dict(what="Drop path of the last block has rate 1: its branches are always left out.",
                                      kinds=["dead"], part="block3", at=0),
    "blank_picture": dict(what="From a step on a blank picture's contrast is stretched by 0 / 0: NaN in the batch.",
                          kinds=["not_finite", "data"], part="all"),
    "weights_in_bfloat16": dict(what="From a step on weights are kept in bfloat16, which loses small updates.",
                                kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "mixup": "Every batch is mixed up with itself.",
    "accumulation": "Each update has the gradients of three small batches, each loss divided by three.",
    "average_validated": "An average of the weights is kept aside; it and the model are validated every 30 steps.",
    "resumed": "Resumed from a checkpoint with all its state, and first_step.",
    "layerwise_rates": "Lower parts have lower rates, by a factor of 0.8 per block.",
}
