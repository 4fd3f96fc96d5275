"""A small diffusion transformer (3 blocks with adaptive norms) learns with AdamW to tell the noise in drawn pictures."""
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
SIDE, PATCH, CLASSES, TIMES = 16, 4, 4, 1000
WIDTH, HEADS, DEPTH = 32, 4, 3
BATCH = 24
RATE, WARM_UP, CLIP = 4e-3, 20, 1.0
EMA_DECAY = 0.99

FAULTS = {
    "times_shuffled": dict(what="From a step on the times that the model is told are shuffled: each picture gets that of another row.",
        kinds=["data"], part="all"),
    "loader_reseeded": dict(what="From a step on the loader's generator is seeded anew in every step: pictures, times and noise are always the same batch.",
        kinds=["data"], part="all"),
    "empty_picture": dict(what="From a step on pictures are divided by their own standard deviation, and one in each batch is empty: 0/0 gives NaN.",
        kinds=["not_finite", "data"], part="all"),
    "rate_too_high": dict(what="From a step on the rate is 15 times what it was (the value of another run's config).",
        kinds=["rate", "instability"], part="all"),
    "optimizer_state_lost": dict(what="At a step the run goes on from a checkpoint without the state of AdamW: moments and step count begin anew.",
        kinds=["optimizer"], part="all", lasts=10),
    "ema_left_in_model": dict(what="At a step the averaged weights are copied into the model for sampling, and the trained ones are not put back.",
        kinds=["weights"], part="all", lasts=1),
    "no_zero_grad": dict(what="From a step on gradients are no longer set to zero, and each step adds to those before.",
        kinds=["gradients"], part="all"),
    "block_not_in_optimizer": dict(what="The weights of block1 were never given to the optimizer, so that it stays as it was made.",
        kinds=["frozen", "optimizer", "dead"], part="block1", at=0),
    "detach_left_in_block": dict(what="From a step on a detach() left from debugging cuts the branches of block2 off from the backward pass.",
        kinds=["dead", "frozen", "gradients"], part="block2"),
    "residual_lost": dict(what="From a step on block2 returns its second branch alone: the residual is no longer added.",
        kinds=["activations"], part="block2"),
    "causal_mask": dict(what="From a step on attention over the patches has a causal mask, which is meant for text.",
        kinds=["attention"], part="all"),
    "output_clamped": dict(what="From a step on the predicted noise is clamped to -1...1, as if it were a picture.",
        kinds=["output_logits", "activations"], part="other"),
    "moments_in_fp16": dict(what="From a step on AdamW's moments are kept in float16: squares of small gradients become zero, their updates huge.",
        kinds=["precision", "optimizer"], part="all"),
}

HEALTHY = {
    "samples_between": "Every 30 steps pictures are sampled in eval mode with the averaged weights, and the trained ones are put back.",
    "accumulation": "Each update is made of two half batches whose losses are divided by two.",
    "decay_to_zero": "From a step on the rate falls to zero along a cosine until the end.",
    "resumed": "A new process goes on at a step from a checkpoint with weights, optimizer, averages and random state.",
    "batch_ramp": "The batch grows from 16 pictures over 24 to 32.",
}


def draw_pictures(rows, rng):
    """A disc, square, cross or bar, anywhere and of any size, on wallpaper of one small tile; and which it is."""
    label = torch.randint(CLASSES, (rows,), generator=rng)
    place = 4 + 8 * torch.rand(rows, 2, 1, 1, generator=rng)
    size = 2 + 2 * torch.rand(rows, 1, 1, generator=rng)
    tile = 1.6 * torch.rand(rows, PATCH, PATCH, generator=rng) - 1
    axis = torch.arange(SIDE).float()
    dy = (axis[None, :, None] - place[:, 0]).abs().expand(rows, SIDE, SIDE)
    dx = (axis[None, None, :] - place[:, 1]).abs().expand(rows, SIDE, SIDE)
    far, near = torch.maximum(dx, dy), torch.minimum(dx, dy)
    shapes = [size - (dx ** 2 + dy ** 2).sqrt(), size - far, torch.minimum(size + 1 - far, 1 - near), size / 2 - dy]
    depth = torch.stack(shapes)[label, torch.arange(rows)]
    paper = tile.repeat(1, SIDE // PATCH, SIDE // PATCH)
    ink = torch.sigmoid(4 * depth)
    return (ink + (1 - ink) * paper)[:, None], label


# the share of the picture's variance that is left at each time (cosine schedule)
LEVELS = torch.cos((torch.arange(TIMES) / TIMES + 0.008) / 1.008 * math.pi / 2) ** 2


def make_batch(rows, rng, name, faulty):
    picture, label = draw_pictures(rows, rng)
    if name == "empty_picture" and faulty:
        picture[0] = -1.0
        picture = picture - picture.mean((1, 2, 3), keepdim=True)
        picture = picture / picture.std((1, 2, 3), keepdim=True)
    # times spread evenly over the batch, which makes the loss less noisy
    start = torch.rand(1, generator=rng)
    t = ((start + 0.618034 * torch.arange(rows)) % 1.0 * TIMES).long().clamp(max=TIMES - 1)
    noise = torch.randn(picture.shape, generator=rng)
    level = LEVELS[t][:, None, None, None]
    noisy = level.sqrt() * picture + (1 - level).sqrt() * noise
    unlabelled = torch.rand(rows, generator=rng) < 0.1  # for guidance without a classifier
    label = torch.where(unlabelled, torch.full_like(label, CLASSES), label)
    return noisy, t, label, noise


def modulate(x, shift, scale):
    return x * (1 + scale[:, None]) + shift[:, None]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(2 * WIDTH, WIDTH))
        self.ada = nn.Linear(WIDTH, 6 * WIDTH)
        nn.init.zeros_(self.ada.weight)
        nn.init.zeros_(self.ada.bias)
        self.causal = self.detached = self.residual_lost = False

    def attention(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).reshape(b, n, WIDTH))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(F.silu(c)).chunk(6, dim=-1)
        branch = gate1[:, None] * self.attention(modulate(self.norm1(x), shift1, scale1))
        x = x + (branch.detach() if self.detached else branch)
        branch = gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))
        if self.residual_lost:
            return branch
        return x + (branch.detach() if self.detached else branch)


class TimeEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-math.log(10000.0) * torch.arange(16) / 16))
        self.mlp = nn.Sequential(nn.Linear(32, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, t):
        angle = t.float()[:, None] * self.freqs
        return self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.ada = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, PATCH * PATCH)
        for p in self.parameters():
            nn.init.zeros_(p)
        self.clamped = False

    def forward(self, x, c):
        shift, scale = self.ada(F.silu(c)).chunk(2, dim=-1)
        out = self.out(modulate(self.norm(x), shift, scale))
        return out.clamp(-1, 1) if self.clamped else out


class DiT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        self.time_embed = TimeEmbedding()
        self.label_embed = nn.Embedding(CLASSES + 1, WIDTH)
        nn.init.normal_(self.label_embed.weight, std=0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = Head()

    def forward(self, picture, t, label):
        x = self.patch_embed(picture).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.time_embed(t) + self.label_embed(label)
        for block in self.blocks:
            x = block(x, c)
        return F.fold(self.head(x, c).transpose(1, 2), SIDE, PATCH, stride=PATCH)


def make_optimizer(model, name):
    params = list(model.parameters())
    if name == "block_not_in_optimizer":
        left_out = {id(p) for p in model.blocks[1].parameters()}
        params = [p for p in params if id(p) not in left_out]
    return torch.optim.AdamW(params, lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)


def rate_at(step, name, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "rate_too_high" and step >= at:
        rate *= 15
    if name == "decay_to_zero" and step >= at:
        rate *= 0.5 * (1 + math.cos(math.pi * (step - at) / (STEPS - at)))
    return rate


@torch.no_grad()
def update_ema(ema, model):
    torch._foreach_lerp_(ema, list(model.parameters()), 1 - EMA_DECAY)


@torch.no_grad()
def copy_into(model, weights):
    for p, w in zip(model.parameters(), weights):
        p.copy_(w)


@torch.no_grad()
def sample(model, ema, rows=8, hops=5):
    """A few pictures from the averaged weights by DDIM; the trained weights are put back."""
    kept = [p.detach().clone() for p in model.parameters()]
    copy_into(model, ema)
    model.eval()
    rng = torch.Generator().manual_seed(7)
    x = torch.randn(rows, 1, SIDE, SIDE, generator=rng)
    label = torch.arange(rows) % CLASSES
    times = torch.linspace(TIMES - 20, 0, hops + 1).long()
    for now, then in zip(times[:-1], times[1:]):
        noise = model(x, now.expand(rows), label)
        clean = ((x - (1 - LEVELS[now]).sqrt() * noise) / LEVELS[now].sqrt()).clamp(-1, 1)
        x = LEVELS[then].sqrt() * clean + (1 - LEVELS[then]).sqrt() * noise
    model.train()
    copy_into(model, kept)


def resume(model, optimizer, ema):
    """What a new process makes of a checkpoint."""
    new = DiT()
    new.load_state_dict(model.state_dict())
    new_optimizer = make_optimizer(new, "plain")
    new_optimizer.load_state_dict(optimizer.state_dict())
    return new, new_optimizer, [e.clone() for e in ema]


def batch_size(step, name, at):
    if name == "batch_ramp":
        return 16 if step < at // 2 else 24 if step < at else 32
    return BATCH


def plant(model, optimizer, ema, name, step, at):
    """Those faults which are in the state of the model or the optimizer."""
    if step != at:
        return
    if name == "optimizer_state_lost":
        optimizer.state.clear()
    if name == "ema_left_in_model":
        copy_into(model, ema)
    if name == "detach_left_in_block":
        model.blocks[2].detached = True
    if name == "residual_lost":
        model.blocks[2].residual_lost = True
    if name == "output_clamped":
        model.head.clamped = True
    if name == "causal_mask":
        for block in model.blocks:
            block.causal = True


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 1000)
    model = DiT()
    optimizer = make_optimizer(model, name)
    ema = [p.detach().clone() for p in model.parameters()]
    recorder = None
    if name != "resumed":  # the record of the first process is not this one
        recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        faulty = step >= at
        if name == "resumed" and step == at:
            model, optimizer, ema = resume(model, optimizer, ema)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)
        plant(model, optimizer, ema, name, step, at)
        if name == "samples_between" and step % 30 == 29:
            sample(model, ema)
        if name == "loader_reseeded" and faulty:
            rng.manual_seed(seed)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name, at)

        noisy, t, label, noise = make_batch(batch_size(step, name, at), rng, name, faulty)
        if name == "times_shuffled" and faulty:
            t = t[torch.randperm(len(t), generator=rng)]
        parts = 2 if name == "accumulation" else 1
        loss = 0.0
        for x, s, y, target in zip(*(v.chunk(parts) for v in (noisy, t, label, noise))):
            part_loss = F.mse_loss(model(x, s, y), target) / parts
            part_loss.backward()
            loss = loss + part_loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "no_zero_grad" and faulty):
            optimizer.zero_grad()
            if name == "block_not_in_optimizer":
                model.zero_grad()
        if name == "moments_in_fp16" and faulty:
            for state in optimizer.state.values():
                state["exp_avg"].copy_(state["exp_avg"].half())
                state["exp_avg_sq"].copy_(state["exp_avg_sq"].half())
        update_ema(ema, model)
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses
