"""A small DeiT-like vision transformer classifies drawn shapes (mixup, random crops, EMA), trained with AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH, WIDTH, DEPTH, HEADS = 24, 32, 3, 4
SIZE, CROP, PATCH, CLASSES = 20, 16, 4, 8
PEAK, FLOOR, WARMUP, DECAY, CLIP = 3e-3, 3e-5, 20, 0.05, 1.0
SMOOTHING, MIXUP, DROP, DROP_PATH, EMA = 0.1, 0.2, 0.1, 0.1, 0.99

FAULTS = {
    "peak_rate": dict(
        what="The learning rate was taken from an SGD recipe (0.1), some thirty times too high for AdamW.",
        kinds=["rate"], part="all", at=0),
    "bfloat16_weights": dict(
        what="The weights are kept in bfloat16 without a float32 master copy, so that small updates are rounded away.",
        kinds=["precision"], part="all"),
    "softmax_twice": dict(
        what="The head returns softmax probabilities, and the cross-entropy takes the softmax of them again.",
        kinds=["output_logits", "data"], part="head", at=0),
    "rate_jump": dict(
        what="The schedule was replaced on the way by a constant rate of 0.05 in place of 0.0005.",
        kinds=["rate"], part="all"),
    "labels_shuffled": dict(
        what="The list of pictures was shuffled again without the list of labels, so that the labels are wrong.",
        kinds=["data"], part="all"),
    "raw_pixels": dict(
        what="One shard of pictures comes with raw pixel values of 0 to 255, not normalised.",
        kinds=["data"], part="all", lasts=12),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed between updates and pile up.",
        kinds=["gradients"], part="all"),
    "block_frozen": dict(
        what="A staged unfreezing with an index off by one froze block 1, which should train.",
        kinds=["frozen"], part="block1"),
    "average_not_undone": dict(
        what="Evaluation copies the averaged weights into the model and never puts the trained ones back.",
        kinds=["weights"], part="all"),
    "decay_typo": dict(
        what="The weight decay became 20 in place of 0.05, so that all weights shrink quickly.",
        kinds=["optimizer", "weights"], part="all"),
    "attention_scale": dict(
        what="The attention logits of all blocks are multiplied by the root of the head's width, not divided by it.",
        kinds=["attention"], part="all"),
    "blank_picture": dict(
        what="A picture of one colour is divided by its standard deviation of zero, and the batch contains NaN.",
        kinds=["not_finite", "data"], part="all"),
    "left_in_eval": dict(
        what="After an evaluation the model stays in eval mode: dropout and stochastic depth are off.",
        kinds=["data"], part="all"),
}

HEALTHY = {
    "accumulation": "Each update has the gradients of two micro-batches of half the size.",
    "evaluation": "Every thirty updates the averaged weights are evaluated, and the trained ones put back.",
    "resuming": "The run goes on at update 80 from a checkpoint of the model, the optimizer and the average.",
    "trapezoid": "The rate warms up, stays constant, and falls linearly over the last third, in place of a cosine.",
    "lion": "Lion with a tenth of the rate and three times the decay is used in place of AdamW.",
}


def draw(count, rng):
    """Pictures of one shape each, in random colours, places and sizes, with some noise; values 0 to 255."""
    ys, xs = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    pictures = np.empty((count, 3, SIZE, SIZE), np.float32)
    labels = rng.integers(0, CLASSES, count)
    for i, label in enumerate(labels):
        cy, cx = rng.uniform(8, 11, 2)
        r = rng.uniform(4.5, 6.5)
        dy, dx = np.abs(ys - cy), np.abs(xs - cx)
        far, box = np.sqrt(dy ** 2 + dx ** 2), np.maximum(dy, dx)
        if label == 0:
            mask = far < r
        elif label == 1:
            mask = (far < r) & (far > r - 2)
        elif label == 2:
            mask = box < r
        elif label == 3:
            mask = (box < r) & (box > r - 2)
        elif label == 4:
            mask = (box < r) & (np.minimum(dy, dx) < 1.2)
        elif label == 5:
            mask = (box < r) & (np.abs(dy - dx) < 1.5)
        elif label == 6:
            mask = (box < r) & ((ys - cy) % 4 < 2)
        else:
            mask = (box < r) & ((xs - cx) % 4 < 2)
        back, ink = rng.uniform(0, 110, 3), rng.uniform(140, 255, 3)
        pictures[i] = np.where(mask, ink[:, None, None], back[:, None, None])
    pictures += rng.normal(0, 12, pictures.shape)
    return torch.from_numpy(pictures.clip(0, 255)), torch.from_numpy(labels)


def normalise(x):
    """Each picture to mean 0 and standard deviation 1."""
    return (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True)


def crops(pictures, rng):
    """A random crop and a random flip of each picture."""
    out = []
    for picture in pictures:
        y, x = rng.integers(0, SIZE - CROP + 1, 2)
        crop = picture[:, y:y + CROP, x:x + CROP]
        out.append(crop.flip(2) if rng.random() < 0.5 else crop)
    return torch.stack(out)


class DropPath(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        mask = (torch.rand(len(x), 1, 1) < keep).to(x.dtype)
        return x * mask / keep


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, WIDTH))


class Block(nn.Module):
    def __init__(self, drop_path):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROP))
        self.drop_path = DropPath(drop_path)

    def forward(self, x):
        x = x + self.drop_path(self.attn(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class DeiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (CROP // PATCH) ** 2, WIDTH))
        self.pos_drop = nn.Dropout(DROP)
        self.blocks = nn.ModuleList(Block(DROP_PATH * i / (DEPTH - 1)) for i in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.trunc_normal_(self.cls_token, std=0.02)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                std = 0.02 if module is self.head else WIDTH ** -0.5 / 2
                nn.init.trunc_normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)
        self.probabilities = False

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        x = self.pos_drop(x + self.pos_embed)
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x)[:, 0])
        return x.softmax(-1) if self.probabilities else x


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((average * first + p.grad * (1 - first)).sign(), alpha=-group["lr"])
                average.lerp_(p.grad, 1 - second)


def make(name):
    model = DeiT()
    if name == "softmax_twice":
        model.probabilities = True
    decayed = [p for n, p in model.named_parameters() if p.ndim > 1 and n not in ("cls_token", "pos_embed")]
    others = [p for n, p in model.named_parameters() if p.ndim <= 1 or n in ("cls_token", "pos_embed")]
    if name == "lion":
        groups = [dict(params=decayed, weight_decay=3 * DECAY), dict(params=others, weight_decay=0.0)]
        return model, Lion(groups, lr=PEAK / 10)
    groups = [dict(params=decayed, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    return model, torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.999), foreach=True)


def rate(name, step):
    peak = {"peak_rate": 0.1, "lion": PEAK / 10}.get(name, PEAK)
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    if name == "trapezoid":
        return peak * min(1.0, (STEPS - step) / (STEPS / 3))
    done = (step - WARMUP) / (STEPS - WARMUP)
    return FLOOR + (peak - FLOOR) * (1 + math.cos(math.pi * done)) / 2


def criterion(logits, first, second, share):
    """Cross-entropy with label smoothing of pictures that are mixed from two."""
    target = share * F.one_hot(first, CLASSES) + (1 - share) * F.one_hot(second, CLASSES)
    return F.cross_entropy(logits, target, label_smoothing=SMOOTHING)


@torch.no_grad()
def evaluate(model, pictures, labels):
    model.eval()
    edge = (SIZE - CROP) // 2
    x = normalise(pictures[:, :, edge:edge + CROP, edge:edge + CROP])
    return (model(x).argmax(-1) == labels).float().mean().item()


@torch.no_grad()
def update_average(average, model, step):
    decay = min(EMA, (1 + step) / (10 + step))
    torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    pictures, labels = draw(1024, rng)
    held_pictures, held_labels = draw(128, rng)
    model, optimizer = make(name)
    average = copy.deepcopy(model).requires_grad_(False)
    start = 80 if name == "resuming" else 0
    recorder = None if start else lab.record(model, optimizer, every=every, out=out)
    micro = 2 if name == "accumulation" else 1
    losses = []
    for step in range(STEPS):
        on = at <= step < at + lasts
        if start and step == start:
            saved = copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict()))
            model, optimizer = make(name)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=start)
        lr = rate(name, step)
        if name == "rate_jump" and on:
            lr = 0.05
        for group in optimizer.param_groups:
            group["lr"] = lr
        if name == "labels_shuffled" and step == at:
            labels = labels[torch.from_numpy(rng.permutation(len(labels)))]
        if name == "block_frozen" and step == at:
            model.blocks[1].requires_grad_(False)
        if name == "decay_typo" and step == at:
            optimizer.param_groups[0]["weight_decay"] = 20
        if name == "attention_scale" and step == at:
            for block in model.blocks:
                block.attn.scale = (WIDTH // HEADS) ** 0.5
        if name == "average_not_undone" and on and (step - at) % 30 == 0:
            model.load_state_dict(average.state_dict())
            evaluate(model, held_pictures, held_labels)
            model.train()
        if name == "left_in_eval" and step == at:
            evaluate(model, held_pictures, held_labels)
        if name == "evaluation" and step and step % 30 == 0:
            trained = copy.deepcopy(model.state_dict())
            model.load_state_dict(average.state_dict())
            evaluate(model, held_pictures, held_labels)
            model.load_state_dict(trained)
            model.train()

        total = 0.0
        for _ in range(micro):
            chosen = torch.from_numpy(rng.choice(len(pictures), BATCH // micro, replace=False))
            x, y = crops(pictures[chosen], rng), labels[chosen]
            if name == "blank_picture" and step == at:
                x[0] = 255.0
            if not (name == "raw_pixels" and on):
                x = normalise(x)
            share = float(rng.beta(MIXUP, MIXUP))
            other = torch.from_numpy(rng.permutation(len(x)))
            x = share * x + (1 - share) * x[other]
            loss = criterion(model(x), y, y[other], share) / micro
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if name == "bfloat16_weights" and on:
            for p in model.parameters():
                p.data.copy_(p.data.bfloat16())
        if not (name == "no_zero_grad" and on):
            optimizer.zero_grad()
        update_average(average, model, step)
        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)
    recorder.close()
    return losses
