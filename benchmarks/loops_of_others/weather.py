"""Forecasts of a small simulated weather map: a spatio-temporal Transformer on patches, Huber error, NAdam, one-cycle rate."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
GRID, PATCH, FRAMES = 16, 4, 3  # a map has GRID x GRID cells; FRAMES maps go in, each one's successor comes out
PATCHES = (GRID // PATCH) ** 2
WIDTH, HEADS, BLOCKS = 32, 4, 4
BATCH, POOL = 10, 768
PEAK_RATE = 8e-3
EMA_DECAY = 0.98

FAULTS = {
    "inputs_flipped": dict(what="The augmentation mirrors the input maps of half of the batch, but not the target maps.",
                           kinds=["data"], part="all"),
    "missing_cell": dict(what="A new file has a missing observation: one cell of one map in each batch is NaN.",
                         kinds=["not_finite", "data"], part="all"),
    "peak_rate_too_high": dict(what="The peak of the one-cycle schedule is 0.4 in place of 0.008.",
                               kinds=["rate", "instability"], part="all", at=0),
    "schedule_starts_again": dict(what="The one-cycle schedule is built anew on resuming and warms up a second time.",
                                  kinds=["rate"], part="all"),
    "moments_lost": dict(what="The optimizer's moments are not in the checkpoint and start from nothing.",
                         kinds=["optimizer"], part="all", lasts=10),
    "ema_left_in_model": dict(what="Every 20 steps the EMA weights are put in the model for evaluation and not taken out.",
                              kinds=["weights"], part="all"),
    "block_loaded_afresh": dict(what="block2's keys are missing in a checkpoint read with strict=False: fresh weights.",
                                kinds=["weights"], part="block2"),
    "zero_grad_forgotten": dict(what="Gradients are no longer zeroed and add up from step to step.",
                                kinds=["gradients"], part="all"),
    "block_not_in_optimizer": dict(what="block1 was not among the parameters given to the optimizer.",
                                   kinds=["frozen", "optimizer"], part="block1", at=0),
    "future_not_masked": dict(what="The mask over time is lost: a map's tokens see the map that they should forecast.",
                              kinds=["attention", "data"], part="all"),
    "residual_lost": dict(what="The skip connection round the MLP of block1 is lost.",
                          kinds=["activations"], part="block1"),
    "head_denormalised": dict(what="The head gives the forecast in raw units (times 4), the targets are normalised.",
                              kinds=["output_logits", "activations"], part="head"),
    "weights_in_bfloat16": dict(what="The weights themselves are kept in bfloat16, without a copy in float32.",
                                kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "adamw_squared_error": "AdamW and the squared error in place of NAdam and Huber's.",
    "validation_between": "Every 25 steps the EMA copy and the model are evaluated on held-out maps; back to train mode.",
    "accumulation": "Each update sums the gradients of two half batches.",
    "resumed": "Steps 0 to 99 ran before; model, optimizer, schedule and EMA are restored and recorded from step 100.",
    "batch_ramp": "The batch grows from 8 to 16 sequences over the training.",
}


# ---- data: blobs that a wind carries over a periodic map while they diffuse

def make_weather(count, seed):
    """Normalised sequences (count, FRAMES + 1, GRID, GRID)."""
    gen = torch.Generator().manual_seed(seed)
    cells = torch.arange(GRID).float()
    blobs = 4
    centre = torch.rand(count, blobs, 2, generator=gen) * GRID
    size = 1.3 + torch.rand(count, blobs, generator=gen)
    height = 0.5 + torch.rand(count, blobs, generator=gen)
    apart = (cells[None, None, None] - centre[..., None] + GRID / 2) % GRID - GRID / 2  # count, blobs, 2, GRID
    bump = torch.exp(-apart ** 2 / (2 * size[..., None, None] ** 2))
    first = torch.einsum("nb,nby,nbx->nyx", height, bump[:, :, 0], bump[:, :, 1])

    wind = torch.tensor([0.6, 1.6]) + 0.4 * torch.randn(count, 2, generator=gen)  # cells a frame, mostly from the west
    wave = 2 * torch.pi * torch.fft.fftfreq(GRID)
    time = torch.arange(FRAMES + 1).float()[None, :, None, None]
    phase = wind[:, 0, None, None] * wave[None, :, None] + wind[:, 1, None, None] * wave[None, None, :]
    fade = 0.1 * (wave[:, None] ** 2 + wave[None, :] ** 2)
    move = torch.exp(-time * torch.complex(fade.expand_as(phase), phase)[:, None])
    fields = torch.fft.ifft2(torch.fft.fft2(first)[:, None] * move).real
    fields = fields + 0.02 * torch.randn(fields.shape, generator=gen)  # instruments are noisy
    return (fields - fields.mean()) / fields.std()


def to_patches(maps):
    """(batch, time, GRID, GRID) to (batch, time, PATCHES, PATCH * PATCH)."""
    batch, time = maps.shape[:2]
    side = GRID // PATCH
    maps = maps.reshape(batch, time, side, PATCH, side, PATCH)
    return maps.transpose(3, 4).reshape(batch, time, PATCHES, PATCH * PATCH)


# ---- model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.02)
        self.skip = True

    def forward(self, x, mask):
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, WIDTH))
        change = self.drop(self.mlp(self.norm2(x)))
        return x + change if self.skip else change


def waves_of_place():
    """First position embedding: sines and cosines of row and column, mixed at random; (1, 1, PATCHES, WIDTH)."""
    side = GRID // PATCH
    angle = 2 * torch.pi * torch.arange(side) / side
    wave = torch.stack([angle.sin(), angle.cos(), (2 * angle).cos()], dim=1)
    rows, columns = wave.repeat_interleave(side, dim=0), wave.repeat(side, 1)
    return (torch.cat([rows, columns], dim=1) @ torch.randn(6, WIDTH) * 0.5)[None, None]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.place = nn.Parameter(waves_of_place())
        self.time = nn.Parameter(0.5 * torch.randn(1, FRAMES, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, PATCH * PATCH)
        self.head_scale = 1.0
        frame = torch.arange(FRAMES).repeat_interleave(PATCHES)
        self.register_buffer("mask", frame[:, None] >= frame[None, :])  # a token sees its own frame and earlier ones

    def forward(self, patches):
        x = (self.embed(patches) + self.place + self.time).flatten(1, 2)
        for block in self.blocks:
            x = block(x, self.mask)
        return (self.head(self.norm(x)) * self.head_scale).view_as(patches)


# ---- training

def make_optimizer(name, model):
    weights = list(model.parameters())
    if name == "block_not_in_optimizer":
        left_out = {id(p) for p in model.blocks[1].parameters()}
        weights = [p for p in weights if id(p) not in left_out]
    if name == "adamw_squared_error":
        return torch.optim.AdamW(weights, lr=PEAK_RATE, weight_decay=0.01)
    return torch.optim.NAdam(weights, lr=PEAK_RATE, weight_decay=0.01, decoupled_weight_decay=True)


def make_schedule(name, optimizer):
    peak = 0.4 if name == "peak_rate_too_high" else PEAK_RATE
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak, total_steps=STEPS + 1, pct_start=0.25)


def next_batch(name, pool, step, at, gen):
    """Patches of the input maps and of their successors."""
    size = BATCH
    if name == "batch_ramp":
        size = 8 + 9 * step // STEPS
    maps = pool[torch.randint(len(pool), (size,), generator=gen)]
    inputs, targets = maps[:, :-1], maps[:, 1:]
    if name == "inputs_flipped" and step >= at:
        mirrored = (torch.arange(size) % 2 == 0)[:, None, None, None]
        inputs = torch.where(mirrored, inputs.flip(-1), inputs)
    if name == "missing_cell" and step >= at:
        inputs = inputs.clone()
        inputs[0, 1, 5, 9] = float("nan")
    return to_patches(inputs), to_patches(targets)


def error(name, forecast, targets):
    if name == "adamw_squared_error":
        return F.mse_loss(forecast, targets)
    return F.huber_loss(forecast, targets)


def backward(name, model, inputs, targets):
    parts = 2 if name == "accumulation" else 1
    total = 0.0
    for x, y in zip(inputs.chunk(parts), targets.chunk(parts)):
        loss = error(name, model(x), y) / parts
        loss.backward()
        total = total + loss.detach()
    return total


@torch.no_grad()
def update_ema(ema, model):
    for kept, weight in zip(ema.parameters(), model.parameters()):
        kept.lerp_(weight, 1 - EMA_DECAY)


@torch.no_grad()
def validate(net, maps):
    was_training = net.training
    net.eval()
    value = F.huber_loss(net(to_patches(maps[:, :-1])), to_patches(maps[:, 1:])).item()
    net.train(was_training)
    return value


@torch.no_grad()
def between_steps(name, model, ema, optimizer, step, at):
    """What is planted in the state of the training before step `step`."""
    if name == "moments_lost" and step == at:
        optimizer.state.clear()
    if name == "block_loaded_afresh" and step == at:
        model.blocks[2].load_state_dict(Block().state_dict())
    if name == "ema_left_in_model" and step >= at and (step - at) % 20 == 0:
        for weight, kept in zip(model.parameters(), ema.parameters()):
            weight.copy_(kept)
    if name == "residual_lost" and step == at:
        model.blocks[1].skip = False
    if name == "head_denormalised" and step == at:
        model.head_scale = 4.0
    if name == "future_not_masked" and step == at:
        model.mask.fill_(True)


def restore(name, model, ema, optimizer, schedule):
    """As a new process does it: everything is built again and filled from the checkpoint."""
    saved = copy.deepcopy([part.state_dict() for part in (model, ema, optimizer, schedule)])
    random_state = torch.get_rng_state()
    model, ema = Forecaster(), Forecaster()
    ema.requires_grad_(False)
    optimizer = make_optimizer(name, model)
    schedule = make_schedule(name, optimizer)
    for part, state in zip((model, ema, optimizer, schedule), saved):
        part.load_state_dict(state)
    torch.set_rng_state(random_state)
    return model, ema, optimizer, schedule


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    weather = make_weather(POOL + 32, seed)
    pool, held_out = weather[:POOL], weather[POOL:]
    gen = torch.Generator().manual_seed(seed + 1)
    model = Forecaster()
    ema = copy.deepcopy(model).requires_grad_(False)
    optimizer = make_optimizer(name, model)
    schedule = make_schedule(name, optimizer)

    begin = 100 if name == "resumed" else 0
    recorder = None
    losses = []
    for step in range(STEPS):
        if step == begin:
            if name == "resumed":
                model, ema, optimizer, schedule = restore(name, model, ema, optimizer, schedule)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=begin)
        between_steps(name, model, ema, optimizer, step, at)
        if name == "schedule_starts_again" and step == at:
            schedule = make_schedule(name, optimizer)

        inputs, targets = next_batch(name, pool, step, at, gen)
        loss = backward(name, model, inputs, targets)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if name == "weights_in_bfloat16" and step >= at:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
        if not (name == "zero_grad_forgotten" and step >= at - 1):  # the first step with too much is `at`
            model.zero_grad()
        schedule.step()
        update_ema(ema, model)
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
        if name == "validation_between" and step % 25 == 24:
            validate(model, held_out), validate(ema, held_out)
    recorder.close()
    train.last = dict(model=model, ema=ema, optimizer=optimizer, held_out=held_out)  # for checks by hand
    return losses
