"""Forecasts noisy time series (patches in, a Gaussian over the next patch out): pre-norm encoder, Muon and AdamW, WSD."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BLOCKS = 4
WIDTH = 48
HEADS = 4
PATCH = 8  # values in a patch
PATCHES = 16  # patches in a window; each forecasts the next one
BATCH = 16  # windows in a batch
WARM_UP = 20
DECAY_FROM = 190
MUON_RATE = 1e-2
ADAM_RATE = 4e-3
CLIP = 1.0
MISSING = -999.0  # what the sensors send where they have no value
RESUME_AT = 90  # where the habit "resumed" loads its checkpoint


def raw_series(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Two waves with random periods, a trend and noise, each row around 300 (kelvins, say) and as wide as it likes."""

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(rows, 1, generator=generator)

    length = PATCH * (PATCHES + 1)
    time = torch.arange(length, dtype=torch.float32)[None]
    slow = uniform(0.7, 1.5) * torch.sin(2 * math.pi * (time / uniform(24, 48) + uniform(0, 1)))
    fast = uniform(0.2, 0.6) * torch.sin(2 * math.pi * (time / uniform(8, 12) + uniform(0, 1)))
    trend = uniform(-1, 1) * time / length
    noise = 0.25 * torch.randn(rows, length, generator=generator)
    return uniform(290, 310) + uniform(1, 4) * (slow + fast + trend + noise)


def windows(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize each row by its own mean and deviation, then cut it into patches: inputs and the patches after them."""
    rows = (raw - raw.mean(1, keepdim=True)) / raw.std(1, keepdim=True)
    patches = rows.view(len(rows), PATCHES + 1, PATCH)
    return patches[:, :-1], patches[:, 1:]


def make_batch(name: str, seed: int, step: int, at: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step; it depends on the seed and the step alone, so a resumed run sees the same ones."""
    on = step >= at
    if name == "loader_stuck" and on:
        step = at
    generator = torch.Generator().manual_seed(100_003 * (seed + 1) + step)
    raw = raw_series(rows, generator)
    if name == "missing_code_kept" and at <= step < at + FAULTS[name]["lasts"]:
        raw = torch.where(torch.rand(raw.shape, generator=generator) < 0.01, MISSING, raw)
    if name == "sensor_stands_still" and on:
        raw[0] = 1.0
    if name == "stored_in_bfloat16" and on:
        raw = raw.bfloat16().float()
    inputs, targets = windows(raw)
    if name == "targets_of_other_rows" and on:
        targets = targets.roll(1, 0)
    return inputs, targets


class Attention(nn.Module):
    """Causal self-attention over the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** -0.5
        self.causal = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    """A pre-norm block of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.05)
        self.residual = True
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.detached:
            x = x + self.dropout(self.attention(self.norm1(x))).detach()
            return x + self.dropout(self.mlp(self.norm2(x))).detach()
        x = x + self.dropout(self.attention(self.norm1(x)))
        update = self.dropout(self.mlp(self.norm2(x)))
        return x + update if self.residual else update


class Forecaster(nn.Module):
    """Patches to the mean and the log-variance of the values in the next patch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(PATCHES, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 2 * PATCH)
        self.multiplier = 1.0  # of the head's output
        for block in self.blocks:  # a block adds little at first
            for layer in (block.attention.out, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.1 / math.sqrt(2 * BLOCKS))
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(patches) + self.position
        for block in self.blocks:
            x = block(x)
        mean, log_variance = (self.multiplier * self.head(self.norm(x))).chunk(2, -1)
        return mean, log_variance.clamp(-8, 8)


def gaussian_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of a value, without its constant."""
    mean, log_variance = model(inputs)
    return 0.5 * (log_variance + (targets - mean) ** 2 * torch.exp(-log_variance)).mean()


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal by five steps of Newton-Schulz; matrices of one shape are done together."""

    def __init__(self, matrices: list, lr: float, momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        super().__init__(matrices, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[torch.Size, list] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes.setdefault(weight.shape, []).append(weight)
            for weights in shapes.values():
                directions = orthogonal(torch.stack([self.nesterov(weight, group["momentum"]) for weight in weights]))
                scale = 0.2 * math.sqrt(max(weights[0].shape))  # entries as large as those of AdamW's updates
                for weight, direction in zip(weights, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction, alpha=-group["lr"] * scale)

    def nesterov(self, weight: torch.Tensor, momentum: float) -> torch.Tensor:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        buffer = state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(buffer, momentum)


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest half-orthogonal matrices, roughly."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


def make_optimizers(model: Forecaster) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the embedding, the head, norms and biases."""
    matrices = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    muon = Muon(matrices, lr=MUON_RATE)
    adam = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return [muon, adam]


def rate_factor(name: str, step: int, at: int) -> float:
    """Warm-up, stable, decay."""
    warm_up = 80 if name == "long_warm_up" else WARM_UP
    floor = 0.0 if name == "decay_to_zero" else 0.1
    if name == "rate_times_ten" and step >= at:
        return 10.0
    if name == "schedule_over" and step >= at:  # the number of all steps was given too small: its decay ends at zero
        return 0.0
    if step < warm_up:
        return (step + 1) / warm_up
    if step < DECAY_FROM:
        return 1.0
    return 1.0 - (1.0 - floor) * (step - DECAY_FROM + 1) / (STEPS - DECAY_FROM)


def rows_at(name: str, step: int) -> int:
    """Windows in the batch of a step."""
    if name == "batch_ramp":
        return 8 if step < 50 else 16 if step < 140 else 32
    return BATCH


def plant(name: str, model: Forecaster) -> None:
    """The faults that change the model once, before the step at which they begin."""
    if name == "future_seen":
        for block in model.blocks:
            block.attention.causal = False
    if name == "attention_scale_inverted":
        model.blocks[1].attention.scale = (WIDTH // HEADS) ** 0.5
    if name == "residual_lost":
        model.blocks[2].residual = False
    if name == "block_detached":
        model.blocks[3].detached = True
    if name == "head_multiplier_inverted":
        model.multiplier = 3.0
    if name == "embedding_not_restored":
        with torch.no_grad():
            fresh, bound = torch.Generator().manual_seed(1), PATCH**-0.5
            model.embed.weight.uniform_(-bound, bound, generator=fresh)
            model.embed.bias.uniform_(-bound, bound, generator=fresh)
            model.position.normal_(std=0.02, generator=fresh)


def checkpoint(model: nn.Module, optimizers: list) -> dict:
    """All that a run needs to go on."""
    state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
    return copy.deepcopy(state) | {"random": torch.get_rng_state()}


def resume(state: dict) -> tuple[Forecaster, list[torch.optim.Optimizer]]:
    """A new model and new optimizers with the state of a checkpoint."""
    optimizers = make_optimizers(model := Forecaster())
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["random"])
    return model, optimizers


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module) -> None:
    """Weights averaged over the last steps, kept aside."""
    for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(weight, 0.05)


@torch.no_grad()
def evaluate(model: nn.Module, seed: int) -> float:
    """The loss on windows never trained on."""
    model.eval()
    loss = gaussian_loss(model, *make_batch("plain", seed + 7919, 0, 0, 2 * BATCH)).item()
    model.train()
    return loss


def update(name: str, step: int, at: int, model: Forecaster, optimizers: list, batch: tuple) -> torch.Tensor:
    """One step of training; its loss."""
    muon, adam = optimizers
    for group in muon.param_groups + adam.param_groups:
        group["lr"] = group["peak"] * rate_factor(name, step, at)
    loss = gaussian_loss(model, *batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if not (name == "muon_not_stepped" and step >= at):
        muon.step()
    adam.step()
    if not (name == "muon_not_zeroed" and step >= at):
        muon.zero_grad()
    adam.zero_grad()
    return loss.detach()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    at = FAULTS.get(name, {}).get("at", at)
    model = Forecaster()
    average = copy.deepcopy(model)
    optimizers = make_optimizers(model)
    recorder = None if name == "resumed" else lab.record(model, optimizers, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == RESUME_AT:  # the first part ran in another job
            model, optimizers = resume(checkpoint(model, optimizers))
            recorder = lab.record(model, optimizers, every=every, out=out, first_step=step)
        if name in FAULTS and step == at:
            plant(name, model)
        loss = update(name, step, at, model, optimizers, make_batch(name, seed, step, at, rows_at(name, step)))
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)
        if name == "average_evaluated":
            update_average(average, model)
            if step % 30 == 29:
                evaluate(model, seed)
                evaluate(average, seed)
    recorder.close()
    return losses


FAULTS = {
    "targets_of_other_rows": dict(what="From a step on the targets are those of the row before in the batch.",
                                  kinds=["data"], part="all"),
    "loader_stuck": dict(what="From a step on the loader gives the same batch again and again.",
                         kinds=["data"], part="all"),
    "missing_code_kept": dict(what="For six steps the code for a missing value, -999, stays in one value of a hundred.",
                              kinds=["data"], part="all", lasts=6),
    "sensor_stands_still": dict(what="From a step on one row is constant; divided by its deviation of zero it is NaN.",
                                kinds=["not_finite", "data"], part="all"),
    "rate_times_ten": dict(what="From a step on both rates are ten times too high.",
                           kinds=["rate", "instability"], part="all"),
    "schedule_over": dict(what="The schedule was told too few steps: from a step on both rates are zero.",
                          kinds=["rate", "frozen"], part="all"),
    "muon_not_stepped": dict(what="From a step on only AdamW is stepped: the matrices of all blocks stand still.",
                             kinds=["optimizer", "frozen"], part="all"),
    "muon_not_zeroed": dict(what="From a step on only AdamW's gradients are zeroed: those of the matrices pile up.",
                            kinds=["gradients"], part="all"),
    "block_detached": dict(what="A detach() left in the last block: from the start its weights get no gradient.",
                           kinds=["dead", "frozen", "gradients"], part="block3", at=0),
    "embedding_not_restored": dict(what="At a step the embedding and positions are random again (left out of a checkpoint).",
                                   kinds=["weights"], part="other"),
    "future_seen": dict(what="From a step on attention has no causal mask: each patch sees the one that it forecasts.",
                        kinds=["attention"], part="all"),
    "attention_scale_inverted": dict(what="From a step on one block multiplies its logits by sqrt(d) instead of dividing.",
                                     kinds=["attention"], part="block1"),
    "residual_lost": dict(what="From a step on one block returns its MLP's output without adding what came in.",
                          kinds=["activations"], part="block2"),
    "head_multiplier_inverted": dict(what="From a step on the head's output is multiplied by 3 (a width factor inverted).",
                                     kinds=["output_logits"], part="head"),
    "stored_in_bfloat16": dict(what="From a step on raw values near 300 pass through bfloat16, which rounds them to twos.",
                               kinds=["precision", "data"], part="all"),
}

HEALTHY = {
    "long_warm_up": "The rates warm up over 80 steps instead of 20.",
    "decay_to_zero": "The decay of the last 50 steps ends at zero, not at a tenth.",
    "batch_ramp": "The batch grows from 8 to 16 to 32 windows by plan.",
    "resumed": "Resumed at step 90 from a checkpoint with all its state, recorded from there with first_step.",
    "average_evaluated": "Averaged weights are kept aside; they and the model are evaluated every 30 steps.",
}
