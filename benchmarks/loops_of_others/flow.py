"""Rectified flow on drawn curves (16 points each, six classes): a small adaLN Transformer that predicts velocities; AdamW."""
import copy
import io
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
POINTS, CLASSES, NO_CLASS = 16, 6, 6
WIDTH, HEADS, BLOCKS = 32, 4, 4
BATCH = 24
RATE, WARM_UP, DECAY, CLIP = 2e-3, 20, 0.01, 1.0
LABEL_DROP = 0.1
EMA_DECAY = 0.995
SHARD = 20          # steps that one shard of the data lasts
RESUME_AT = 80

FAULTS = {
    "time_flipped": dict(what="From a step on the model is told 1 - t where the curves are mixed with t.",
                         kinds=["data"], part="all"),
    "pixel_shard": dict(what="One shard of the curves comes in raw units, eight times as large as the normalised ones.",
                        kinds=["data"], part="all", lasts=SHARD),
    "rate_jump": dict(what="From a step on the rate is twenty times as high, without a warm-up.",
                      kinds=["rate", "instability"], part="all"),
    "schedule_ended": dict(what="The schedule was made for too few steps: from a step on the rate is 0.",
                           kinds=["rate", "frozen"], part="all"),
    "decay_too_strong": dict(what="From a step on AdamW's weight decay is 20 in place of 0.01.",
                             kinds=["optimizer"], part="all"),
    "gradients_kept": dict(what="From a step on zero_grad is not called, so gradients of former steps are added.",
                           kinds=["gradients"], part="all"),
    "ema_not_swapped_back": dict(what="From a step on an evaluation every 30 steps puts the EMA weights into the model "
                                      "and does not put the trained weights back.",
                                 kinds=["weights"], part="all"),
    "gate_and_output_zero": dict(what="In block2 the output layers are initialised to zero as well as the gates before "
                                      "them, so that none of its weights ever gets a gradient.",
                                 kinds=["weights", "dead"], part="block2", at=0),
    "causal_mask": dict(what="From a step on attention in all blocks has a causal mask, as in a language model, though "
                             "every point should see the whole curve.",
                        kinds=["attention"], part="all"),
    "residual_lost": dict(what="From a step on block3 returns its MLP's output without adding the residual.",
                          kinds=["activations"], part="block3"),
    "velocity_rescaled": dict(what="From a step on the head's velocities are multiplied by 4, a deviation that was "
                                   "already divided out.",
                              kinds=["output_logits", "activations"], part="head"),
    "weight_at_t_one": dict(what="From a step on the loss is weighed by 1 / (1 - t) and the times on a grid include "
                                 "t = 1, so that the loss is infinite.",
                            kinds=["not_finite", "data"], part="all"),
    "loss_scale_collapsed": dict(what="From a step on the loss scale is 2**-18, so that most gradients underflow to zero "
                                      "in fp16.",
                                 kinds=["precision", "gradients"], part="all"),
}
HEALTHY = {
    "linear_to_zero": "After the warm-up the rate falls linearly to zero at the last step.",
    "logit_normal_times": "Times are drawn from a logit-normal distribution, so more of them in the middle.",
    "evaluation_with_ema": "Every 20 steps curves are sampled with the EMA copy, in evaluation mode and without gradients.",
    "accumulation": "Each update adds the gradients of two half batches.",
    "resumed": "The first 80 steps ran before; the record starts at a checkpoint with all its state.",
}


# ---- data: drawn curves

def draw_curves(n, generator):
    """n curves of six classes as (n, POINTS, 2), about unit deviation, and their classes."""
    def rand(*shape):
        return torch.rand(*shape, generator=generator)

    classes = torch.randint(CLASSES, (n,), generator=generator)
    s = torch.linspace(0, 1, POINTS).expand(n, POINTS)
    angle = 2 * math.pi * s
    phase = 0.6 * (rand(n, 1) - 0.5)
    corner = torch.cos(angle + phase).abs().maximum(torch.sin(angle + phase).abs())
    shapes = torch.stack([
        torch.stack([torch.cos(angle + phase), torch.sin(angle + phase)], -1),                            # circle
        torch.stack([torch.sin(angle + phase), torch.sin(2 * (angle + phase))], -1),                      # eight
        torch.stack([1.4 * s * torch.cos(2 * angle + phase), 1.4 * s * torch.sin(2 * angle + phase)], -1),  # spiral
        torch.stack([3 * s - 1.5, torch.sin(1.5 * angle + phase)], -1),                                   # wave
        torch.stack([torch.cos(angle + phase) / corner, torch.sin(angle + phase) / corner], -1),          # square
        torch.stack([3 * s - 1.5, 4 * ((2 * s + phase) % 1 - 0.5).abs() - 1], -1),                        # zigzag
    ])
    curves = shapes[classes, torch.arange(n)]
    turn = 0.4 * (rand(n) - 0.5)
    rotation = torch.stack([torch.stack([turn.cos(), -turn.sin()], -1), torch.stack([turn.sin(), turn.cos()], -1)], -2)
    size = 0.8 + 0.4 * rand(n, 1, 1)
    return 1.35 * size * (curves @ rotation), classes


# ---- model

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = False

    def forward(self, x):
        n, length, _ = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, length, WIDTH))


class Block(nn.Module):
    """A pre-norm block whose norms and gates depend on time and class, as in DiT."""

    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)
        self.residual = True

    def forward(self, x, condition):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        y = gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)
        return x + y if self.residual else y


class Velocity(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Linear(2, WIDTH)
        self.position = nn.Parameter(0.5 * torch.randn(POINTS, WIDTH))
        self.label = nn.Embedding(CLASSES + 1, WIDTH)
        self.time = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2)
        self.register_buffer("frequencies", torch.logspace(0, 2, 16))
        self.output_scale = 1.0

    def forward(self, x, t, classes):
        waves = t[:, None] * self.frequencies
        condition = self.time(torch.cat([waves.sin(), waves.cos()], -1)) + self.label(classes)
        h = self.point(x) + self.position
        for block in self.blocks:
            h = block(h, condition)
        return self.output_scale * self.head(self.norm(h))


# ---- training

def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW([dict(params=decayed, weight_decay=DECAY), dict(params=others, weight_decay=0.0)],
                             lr=RATE, betas=(0.9, 0.99), foreach=True)


def rate_at(name, step, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "linear_to_zero" and step >= WARM_UP:
        rate = RATE * (STEPS - step) / (STEPS - WARM_UP)
    if name == "rate_jump" and step >= at:
        rate = 20 * RATE
    if name == "schedule_ended" and step >= at:
        rate = 0.0
    return rate


def flow_loss(name, step, at, model, n, generator):
    """Mean squared error of the velocity on the straight lines from noise to n curves."""
    curves, classes = draw_curves(n, generator)
    noise = torch.randn(curves.shape, generator=generator)
    t = torch.rand(n, generator=generator)
    drop = torch.rand(n, generator=generator) < LABEL_DROP
    classes = torch.where(drop, torch.full_like(classes, NO_CLASS), classes)
    if name == "pixel_shard" and at <= step < at + SHARD:
        curves = 8 * curves
    if name == "logit_normal_times":
        t = torch.randn(n, generator=generator).sigmoid()
    if name == "weight_at_t_one" and step >= at:
        t = torch.linspace(0, 1, n)
    mixed = (1 - t)[:, None, None] * noise + t[:, None, None] * curves
    told = t
    if name == "time_flipped" and step >= at:
        told = 1 - t
    error = (model(mixed, told, classes) - (curves - noise)).square().mean((1, 2))
    if name == "weight_at_t_one" and step >= at:
        error = error / (1 - t)
    return error.mean()


@torch.no_grad()
def update_ema(ema, model):
    torch._foreach_lerp_(list(ema.parameters()), list(model.parameters()), 1 - EMA_DECAY)


@torch.no_grad()
def round_to_fp16(model, scale):
    """Give the gradients what fp16 would have kept of them at this loss scale."""
    for p in model.parameters():
        p.grad.copy_((p.grad * scale).half().float() / scale)


@torch.no_grad()
def sample(model, n=12, steps=8):
    """Draw n curves by Euler steps from noise, with a generator of their own."""
    model.eval()
    x = torch.randn(n, POINTS, 2, generator=torch.Generator().manual_seed(1))
    classes = torch.arange(n) % CLASSES
    for i in range(steps):
        x = x + model(x, torch.full((n,), i / steps), classes) / steps
    model.train()
    return x


def checkpoint_and_reload(model, optimizer, ema):
    """Save to memory, then make everything anew and load it, as a new job would."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), ema.state_dict()], file)
    file.seek(0)
    states = torch.load(file)
    model, ema = Velocity(), Velocity()
    optimizer = make_optimizer(model)
    for target, state in zip([model, optimizer, ema], states):
        target.load_state_dict(state)
    return model, optimizer, ema


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    assert name == "plain" or name in FAULTS or name in HEALTHY, name
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    model = Velocity()
    if name == "gate_and_output_zero":
        for layer in (model.blocks[2].attention.out, model.blocks[2].mlp[2]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
    ema = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    recorder = None
    if name != "resumed":
        recorder = lab.record(model, optimizer, every=every, out=out)
    pieces = 2 if name == "accumulation" else 1
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == RESUME_AT:
            model, optimizer, ema = checkpoint_and_reload(model, optimizer, ema)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)
        if name == "causal_mask" and step == at:
            for block in model.blocks:
                block.attention.causal = True
        if name == "residual_lost" and step == at:
            model.blocks[3].residual = False
        if name == "velocity_rescaled" and step == at:
            model.output_scale = 4.0
        if name == "decay_too_strong" and step == at:
            optimizer.param_groups[0]["weight_decay"] = 20.0
        if name == "ema_not_swapped_back" and step >= at and (step - at) % 30 == 0:
            model.load_state_dict(ema.state_dict())
            sample(model)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(name, step, at)

        if not (name == "gradients_kept" and step >= at):
            optimizer.zero_grad()
        total = 0.0
        for _ in range(pieces):
            loss = flow_loss(name, step, at, model, BATCH // pieces, generator) / pieces
            loss.backward()
            total = total + loss.detach()
        if name == "loss_scale_collapsed" and step >= at:
            round_to_fp16(model, 2.0 ** -18)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        update_ema(ema, model)
        if recorder is not None:
            recorder.step(total)
        losses.append(total.item())
        if name == "evaluation_with_ema" and step % 20 == 19:
            sample(ema)
    if recorder is not None:
        recorder.close()
    return losses
