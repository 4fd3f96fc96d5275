"""A small masked autoencoder fills in hidden patches of drawn landscapes; transformer encoder, AdamW, cosine rate."""

import copy
import math

import lab
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 240
SIDE, PATCH = 20, 4
PATCHES = (SIDE // PATCH) ** 2
PIXELS = PATCH * PATCH
VISIBLE = 10  # of 25 patches, 60 % are hidden
WIDTH, HEADS, DEPTH, DECODER = 32, 2, 4, 32
BATCH = 24
PEAK, FLOOR, WARM_UP = 3e-3, 0.05, 15
DECAY, BETAS, CLIP = 0.05, (0.9, 0.95), 1.0
RESUME = 60

FAULTS = {
    "raw_pixels": dict(
        what="From a step on the pictures come as 0..255, not standardised (another loader without the transform).",
        kinds=["data"], part="all"),
    "loss_on_visible": dict(
        what="From a step on the mask is the wrong way round in the loss: it counts visible patches, not hidden ones.",
        kinds=["data"], part="all"),
    "blank_nan": dict(
        what="From a step on a blank picture is in each batch and is standardised without an epsilon: 0 / 0.",
        kinds=["not_finite", "data"], part="all"),
    "rate_scaled_twice": dict(
        what="From a step on the rate is multiplied by the batch size (24) once more.",
        kinds=["rate", "instability"], part="all"),
    "moments_lost": dict(
        what="At a step the optimizer is built anew, as at a resume without its state; the moments start from zero.",
        kinds=["optimizer"], part="all", lasts=10),
    "decay_30": dict(
        what="From a step on the group with weight decay has a decay of 30 and not 0.05.",
        kinds=["optimizer"], part="all"),
    "positions_reset": dict(
        what="At a step the learned position table of the encoder is drawn anew (a checkpoint loaded without it).",
        kinds=["weights"], part="other", lasts=1),
    "no_zero_grad": dict(
        what="From a step on gradients are not zeroed between updates.",
        kinds=["gradients"], part="all"),
    "skip_missing": dict(
        what="From a step on block1 has no residual connection around its attention (a change of code at a restart).",
        kinds=["activations"], part="block1"),
    "attention_unscaled": dict(
        what="From a step on logits of attention in block0 are multiplied by the root of the head's width, not divided.",
        kinds=["attention"], part="block0"),
    "head_scaled": dict(
        what="From a step on the head's output is multiplied by 4 (the pixels' scale is undone though targets have it).",
        kinds=["output_logits"], part="head"),
    "block_left_out": dict(
        what="From the first step the weights of block3 are missing in the optimizer's groups and are never trained.",
        kinds=["frozen", "optimizer"], part="block3", at=0),
    "bf16_weights": dict(
        what="From a step on weights are kept in bfloat16, with no fp32 copy: after each update they are rounded.",
        kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 80 steps.",
    "accumulation": "Each update sums the gradients of two half batches, each loss halved.",
    "ema_evaluated": "An average of the weights is kept aside; each 20 steps it is swapped in, evaluated, swapped out.",
    "resumed": "The first 60 steps ran before; all state is loaded from a checkpoint and recording starts at step 60.",
    "batch_doubled": "The batch doubles at a step, as planned.",
}


def draw(count: int, gen: torch.Generator) -> torch.Tensor:
    """Landscapes from 0 to 1: a bright sky over a sloping horizon, dark ground with stripes, a sun or moon."""
    def rand(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, generator=gen)

    axis = torch.arange(SIDE) / SIDE
    x, y = axis.view(1, 1, SIDE), axis.view(1, SIDE, 1)
    horizon = rand(0.25, 0.75) + rand(-0.4, 0.4) * (x - 0.5)
    sky = rand(0.6, 0.8) - 0.2 * y
    ground = rand(0.15, 0.35) + 0.08 * torch.sin(2 * math.pi * (3 * x + rand(0, 1)))
    disc = (x - rand(0.1, 0.9)) ** 2 + (y - rand(0.1, 0.3)) ** 2 < 0.12 ** 2
    sky = torch.where(disc, rand(0.3, 1.0), sky)
    picture = torch.where(y < horizon, sky, ground)
    return picture + 0.02 * torch.randn(picture.shape, generator=gen)


def to_patches(pictures: torch.Tensor) -> torch.Tensor:
    grid = SIDE // PATCH
    cut = pictures.view(-1, grid, PATCH, grid, PATCH).transpose(2, 3)
    return cut.reshape(-1, PATCHES, PIXELS)


def make_batch(count: int, gen: torch.Generator, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches, standardised by picture, and a random order of them by picture (the first VISIBLE are shown)."""
    pictures = draw(count, gen)
    order = torch.rand(count, PATCHES, generator=gen).argsort(1)
    epsilon = 1e-6
    if fault == "blank_nan":
        pictures[0] = 0.5
        epsilon = 0.0
    if fault == "raw_pixels":
        return to_patches(255 * pictures), order
    mean, std = pictures.mean((1, 2), keepdim=True), pictures.std((1, 2), keepdim=True)
    return to_patches((pictures - mean) / (std + epsilon)), order


class NoSkipLayer(nn.TransformerEncoderLayer):
    """As the usual layer (norms first), but attention replaces the stream and is not added to it."""

    def forward(self, x, *args, **kwargs):
        x = self._sa_block(self.norm1(x), None, None)
        return x + self._ff_block(self.norm2(x))


def sincos(width: int) -> torch.Tensor:
    """Positions to start from: sines and cosines of the row and of the column."""
    grid = SIDE // PATCH
    rates = torch.exp(-torch.arange(width // 4) * (math.log(20.0) / (width // 4)))
    angles = torch.arange(grid)[:, None] * rates
    axis = torch.cat([angles.sin(), angles.cos()], 1)
    rows = axis[:, None].expand(grid, grid, -1)
    columns = axis[None].expand(grid, grid, -1)
    return torch.cat([rows, columns], 2).reshape(1, PATCHES, width)


def layer(width: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, HEADS, 2 * width, dropout=0.0, activation="gelu", batch_first=True,
                                      norm_first=True)


class MaskedAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PIXELS, WIDTH)
        self.pos_embed = nn.Parameter(sincos(WIDTH))
        self.blocks = nn.ModuleList(layer(WIDTH) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder_embed = nn.Linear(WIDTH, DECODER)
        self.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, DECODER))
        self.decoder_pos_embed = nn.Parameter(sincos(DECODER))
        self.decoder_block = layer(DECODER)
        self.decoder_norm = nn.LayerNorm(DECODER)
        self.head = nn.Linear(DECODER, PIXELS)
        self.head_scale = 1.0

    def forward(self, patches: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        shown = order[:, :VISIBLE, None]
        x = self.patch_embed(patches) + self.pos_embed
        x = x.gather(1, shown.expand(-1, -1, WIDTH))
        for block in self.blocks:
            x = block(x)
        x = self.decoder_embed(self.norm(x))
        full = self.mask_token.expand(len(x), PATCHES, -1).scatter(1, shown.expand(-1, -1, DECODER), x)
        full = self.decoder_block(full + self.decoder_pos_embed)
        return self.head(self.decoder_norm(full)) * self.head_scale


def loss_of(model: nn.Module, patches: torch.Tensor, order: torch.Tensor, fault: str = "") -> torch.Tensor:
    """Mean squared error of the pixels in hidden patches."""
    hidden = torch.ones(order.shape).scatter(1, order[:, :VISIBLE], 0.0)
    if fault == "loss_on_visible":
        hidden = 1 - hidden
    error = F.mse_loss(model(patches, order), patches, reduction="none").mean(-1)
    return (error * hidden).sum() / hidden.sum()


def make_optimizer(model: nn.Module, fault: str) -> torch.optim.AdamW:
    """Matrices decay; biases, norms, positions and the mask token do not."""
    decayed, plain = [], []
    for key, weight in model.named_parameters():
        if fault == "block_left_out" and key.startswith("blocks.3."):
            continue
        (decayed if weight.ndim == 2 else plain).append(weight)
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, fused=True)


def rate_at(step: int, warm_up: int) -> float:
    if step < warm_up:
        return PEAK * (step + 1) / warm_up
    done = (step - warm_up) / (STEPS - warm_up)
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def evaluate_average(model: nn.Module, average: dict, gen: torch.Generator) -> float:
    """The loss of the averaged weights on pictures of their own; the model's weights are put back."""
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(average)
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, *make_batch(BATCH, gen, "")).item()
    model.train()
    model.load_state_dict(kept)
    return loss


def break_once(name: str, model: MaskedAutoencoder, optimizer: torch.optim.Optimizer) -> None:
    """What is done a single time, at the fault's first step."""
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "decay_30":
        optimizer.param_groups[0]["weight_decay"] = 30.0
    if name == "positions_reset":
        own = torch.Generator().manual_seed(1234)
        with torch.no_grad():
            model.pos_embed.copy_(0.02 * torch.randn(model.pos_embed.shape, generator=own))
    if name == "skip_missing":
        model.blocks[1].__class__ = NoSkipLayer
    if name == "attention_unscaled":
        factor = WIDTH / HEADS  # the root once for the missing scale, once more for multiplying by it
        model.blocks[0].self_attn.register_forward_pre_hook(lambda _, args: (factor * args[0], *args[1:]))
    if name == "head_scaled":
        model.head_scale = 4.0


def update(name: str, step: int, fault: str, model: nn.Module, optimizer: torch.optim.Optimizer,
           gen: torch.Generator, planned_batch: int) -> torch.Tensor:
    """One update; its loss."""
    rate = rate_at(step, 80 if name == "long_warm_up" else WARM_UP)
    if fault == "rate_scaled_twice":
        rate *= BATCH
    for group in optimizer.param_groups:
        group["lr"] = rate
    if fault != "no_zero_grad":
        optimizer.zero_grad()
    patches, order = make_batch(planned_batch, gen, fault)
    if name == "accumulation":
        half = planned_batch // 2
        loss = torch.zeros(())
        for part in (slice(0, half), slice(half, None)):
            piece = loss_of(model, patches[part], order[part]) / 2
            piece.backward()
            loss = loss + piece.detach()
    else:
        loss = loss_of(model, patches, order, fault)
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    if fault == "bf16_weights":
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
    return loss.detach()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    gen = torch.Generator().manual_seed(seed + 1000)
    eval_gen = torch.Generator().manual_seed(seed + 2000)
    start = FAULTS.get(name, {}).get("at", at)
    model = MaskedAutoencoder()
    optimizer = make_optimizer(model, name)
    losses, first = [], 0
    if name == "resumed":
        losses = [update(name, step, "", model, optimizer, gen, BATCH).item() for step in range(RESUME)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = MaskedAutoencoder()
        optimizer = make_optimizer(model, name)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        first = RESUME
    average = copy.deepcopy(model.state_dict())
    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
    for step in range(first, STEPS):
        fault = name if name in FAULTS and step >= start else ""
        if fault and step == start:
            break_once(name, model, optimizer)
        planned = 2 * BATCH if name == "batch_doubled" and step >= at else BATCH
        loss = update(name, step, fault, model, optimizer, gen, planned)
        if name == "ema_evaluated":
            for key, value in model.state_dict().items():
                average[key].lerp_(value, 0.02)
            if step % 20 == 19:
                evaluate_average(model, average, eval_gen)
        recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses
