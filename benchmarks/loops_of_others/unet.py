"""A small diffusion U-Net learns to predict the noise in drawn pictures of discs, boxes and rings, with AdamW."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
SIZE, WIDTH, TIMES, BATCH = 12, 16, 200, 8
LR, WARMUP, DECAY, CLIP, EMA = 1e-3, 20, 0.01, 1.0, 0.999

FAULTS = {
    "lr_jump": {
        "what": "The learning rate becomes 30 times as high, as after a change of the config to another batch size.",
        "kinds": ["rate"], "part": "all"},
    "lr_zero": {
        "what": "The learning rate falls to zero, because the schedule was made for fewer steps than are trained.",
        "kinds": ["rate"], "part": "all"},
    "no_zero_grad": {
        "what": "The gradients are no longer zeroed, so that each update uses the sum of all those before.",
        "kinds": ["gradients"], "part": "all"},
    "raw_bytes": {
        "what": "The pictures come as bytes from 0 to 255 and are no longer brought to -1..1.",
        "kinds": ["data"], "part": "all"},
    "other_noise": {
        "what": "The loss compares with noise that is drawn anew, not with the noise that was added to the picture.",
        "kinds": ["data"], "part": "all"},
    "other_time": {
        "what": "The model is told another time, drawn anew, than the one at which the noise was added.",
        "kinds": ["data"], "part": "all"},
    "eval_left": {
        "what": "The model was put into eval mode to sample pictures and was never put back, so dropout is off.",
        "kinds": ["data"], "part": "all"},
    "ema_left": {
        "what": "The averaged weights were loaded into the model for sampling and the trained ones never put back.",
        "kinds": ["weights"], "part": "all"},
    "state_lost": {
        "what": "The moments of AdamW are lost, as when a run goes on from a checkpoint of the weights alone.",
        "kinds": ["optimizer"], "part": "all"},
    "blank_picture": {
        "what": "A blank picture is in each batch, and dividing it by its own maximum gives NaN.",
        "kinds": ["not_finite", "data"], "part": "all"},
    "attention_scale": {
        "what": "The logits of the attention in the middle are multiplied by sqrt(d) instead of divided by it.",
        "kinds": ["attention"], "part": "other"},
    "frozen_block": {
        "what": "The second block of the way down is frozen, as for a fine-tuning, and never thawed.",
        "kinds": ["frozen"], "part": "block1"},
    "bf16_weights": {
        "what": "The weights are kept in bfloat16 alone after each update, so that small updates are rounded away.",
        "kinds": ["precision", "weights"], "part": "all", "at": 0},
}

HEALTHY = {
    "accumulation": "Each update sums the gradients of two micro-batches, each with half of the loss.",
    "evaluation": "Every 40 updates the averaged weights are evaluated in eval mode on pictures held out.",
    "resume": "The run goes on at update 60 from a checkpoint with weights, moments, average and random state.",
    "cosine": "The learning rate falls by a cosine from the end of the warmup to a tenth at the last update.",
    "batch_ramp": "The batch grows from 4 over 8 to 12 pictures in three equal stages.",
}


# ---------------------------------------------------------------- data

def draw(n, generator=None):
    """n pictures as bytes, each a disc, a box or a ring somewhere, of some grey: (n, 1, SIZE, SIZE)"""
    r = torch.rand(n, 5, generator=generator)
    cx, cy = 3 + 6 * r[:, 0].view(n, 1, 1), 3 + 6 * r[:, 1].view(n, 1, 1)
    radius, shape = 2.0 + 2.0 * r[:, 2].view(n, 1, 1), (3 * r[:, 3]).long().view(n, 1, 1)
    grid = torch.arange(SIZE, dtype=torch.float32)
    dx, dy = (grid.view(1, 1, SIZE) - cx).abs(), (grid.view(1, SIZE, 1) - cy).abs()
    far = torch.sqrt(dx * dx + dy * dy)
    far = torch.where(shape == 1, torch.maximum(dx, dy), far)
    ink = (radius - far + 0.5).clamp(0, 1)
    ink = torch.where(shape == 2, (1.5 - (far - radius).abs()).clamp(0, 1), ink)
    grey = 128 + 127 * r[:, 4].view(n, 1, 1)
    return (ink * grey).to(torch.uint8).unsqueeze(1)


def normalise(pictures):
    """bytes to -1..1, each picture by its own maximum"""
    x = pictures.float()
    return x / x.amax(dim=(1, 2, 3), keepdim=True) * 2 - 1


def alpha_bars():
    """the cosine schedule of Nichol and Dhariwal"""
    s = torch.linspace(0, 1, TIMES + 1)
    f = torch.cos((s + 0.008) / 1.008 * math.pi / 2) ** 2
    betas = (1 - f[1:] / f[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - betas, dim=0)


ALPHA_BARS = alpha_bars()


def add_noise(x, t, noise):
    a = ALPHA_BARS[t].view(-1, 1, 1, 1)
    return a.sqrt() * x + (1 - a).sqrt() * noise


# ---------------------------------------------------------------- model

class TimeEmbedding(nn.Module):
    def __init__(self, dim, out):
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(dim, out), nn.SiLU(), nn.Linear(out, out))

    def forward(self, t):
        half = self.dim // 2
        freqs = torch.exp(-math.log(10000) * torch.arange(half) / (half - 1))
        angles = t.float()[:, None] * freqs[None]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], dim=1))


class ResBlock(nn.Module):
    def __init__(self, dim, out, time_dim, dropout=0.1):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, dim)
        self.conv1 = nn.Conv2d(dim, out, 3, padding=1)
        self.time = nn.Linear(time_dim, out)
        self.norm2 = nn.GroupNorm(4, out)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(dim, out, 1) if dim != out else nn.Identity()

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(temb))[:, :, None, None]
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return self.shortcut(x) + h


class Attention(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.norm = nn.GroupNorm(4, dim)
        self.qkv = nn.Conv2d(dim, 3 * dim, 1)
        self.proj = nn.Conv2d(dim, dim, 1)

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, 3, self.heads, c // self.heads, h * w).unbind(1)
        weights = (q.transpose(-1, -2) @ k * self.scale).softmax(dim=-1)
        out = (v @ weights.transpose(-1, -2)).reshape(b, c, h, w)
        return x + self.proj(out)


class UNet(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        w, time_dim = width, 4 * width
        self.time_embedding = TimeEmbedding(width, time_dim)
        self.conv_in = nn.Conv2d(1, w, 3, padding=1)
        self.downs = nn.ModuleList([
            ResBlock(w, w, time_dim),
            ResBlock(w, 2 * w, time_dim),
            ResBlock(2 * w, 2 * w, time_dim),
        ])
        self.mid1 = ResBlock(2 * w, 2 * w, time_dim)
        self.mid_attention = Attention(2 * w)
        self.mid2 = ResBlock(2 * w, 2 * w, time_dim)
        self.ups = nn.ModuleList([
            ResBlock(4 * w, 2 * w, time_dim),
            ResBlock(4 * w, w, time_dim),
            ResBlock(2 * w, w, time_dim),
        ])
        self.norm_out = nn.GroupNorm(4, w)
        self.conv_out = nn.Conv2d(w, 1, 3, padding=1)
        nn.init.zeros_(self.conv_out.weight)
        nn.init.zeros_(self.conv_out.bias)

    def forward(self, x, t):
        temb = self.time_embedding(t)
        h = self.conv_in(x)
        skips = []
        for i, down in enumerate(self.downs):
            if i > 0:
                h = F.avg_pool2d(h, 2)
            h = down(h, temb)
            skips.append(h)
        h = self.mid2(self.mid_attention(self.mid1(h, temb)), temb)
        for i, up in enumerate(self.ups):
            if i > 0:
                h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = up(torch.cat([h, skips.pop()], dim=1), temb)
        return self.conv_out(F.silu(self.norm_out(h)))


# ---------------------------------------------------------------- training

def make_optimizer(model):
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), fused=True)


def learning_rate(step, name):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    if name == "cosine":
        done = (step - WARMUP) / (STEPS - WARMUP)
        return LR * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    return LR


def batch_size(step, name):
    if name == "batch_ramp":
        return (4, 8, 12)[3 * step // STEPS]
    return BATCH


@torch.no_grad()
def round_to_bf16(model):
    for p in model.parameters():
        p.copy_(p.to(torch.bfloat16))


@torch.no_grad()
def update_ema(ema, model):
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - EMA)


@torch.no_grad()
def evaluate(model, ema):
    """loss of the averaged weights on pictures held out; the trained weights and the mode are put back"""
    trained = copy.deepcopy(model.state_dict())
    model.load_state_dict(ema.state_dict())
    model.eval()
    generator = torch.Generator().manual_seed(1234)
    x = normalise(draw(64, generator))
    noise = torch.randn(x.shape, generator=generator)
    t = torch.randint(0, TIMES, (64,), generator=generator)
    loss = F.mse_loss(model(add_noise(x, t, noise), t), noise).item()
    model.load_state_dict(trained)
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = UNet()
    if name == "bf16_weights":
        round_to_bf16(model)
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = make_optimizer(model)

    def batch_loss(n, faulty):
        pictures = draw(n)
        if faulty and name == "blank_picture":
            pictures[0] = 0
        x = pictures.float() if faulty and name == "raw_bytes" else normalise(pictures)
        t = torch.randint(0, TIMES, (n,))
        noise = torch.randn_like(x)
        noisy = add_noise(x, t, noise)
        if faulty and name == "other_time":
            t = torch.randint(0, TIMES, (n,))
        target = torch.randn_like(x) if faulty and name == "other_noise" else noise
        return F.mse_loss(model(noisy, t), target)

    def update(step):
        faulty = step >= at
        if step == at and name == "eval_left":
            model.eval()
        if step == at and name == "ema_left":
            model.load_state_dict(ema.state_dict())
        if step == at and name == "state_lost":
            optimizer.state.clear()
        if step == at and name == "frozen_block":
            model.downs[1].requires_grad_(False)
        if step == at and name == "attention_scale":
            model.mid_attention.scale = 1 / model.mid_attention.scale

        lr = learning_rate(step, name)
        if faulty and name == "lr_jump":
            lr = 30 * lr
        if faulty and name == "lr_zero":
            lr = 0.0
        for group in optimizer.param_groups:
            group["lr"] = lr

        parts = 2 if name == "accumulation" else 1
        total = 0.0
        for _ in range(parts):
            loss = batch_loss(batch_size(step, name) // parts, faulty) / parts
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if name == "bf16_weights":
            round_to_bf16(model)
        if not (faulty and name == "no_zero_grad"):
            optimizer.zero_grad()
        update_ema(ema, model)
        return total

    losses, first = [], 0
    if name == "resume":
        first = 60  # the part of the run before the checkpoint, then everything made anew and loaded
        for step in range(first):
            losses.append(update(step).item())
        checkpoint = copy.deepcopy({"model": model.state_dict(), "ema": ema.state_dict(),
                                    "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()})
        model = UNet()
        ema = copy.deepcopy(model).requires_grad_(False)
        optimizer = make_optimizer(model)
        model.load_state_dict(checkpoint["model"])
        ema.load_state_dict(checkpoint["ema"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        torch.set_rng_state(checkpoint["rng"])

    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
    for step in range(first, STEPS):
        loss = update(step)
        recorder.step(loss)
        losses.append(loss.item())
        if name == "evaluation" and (step + 1) % 40 == 0:
            evaluate(model, ema)
    recorder.close()
    return losses
