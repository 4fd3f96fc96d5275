"""Segmentation of drawn pictures (discs, squares, diamonds) by a small vision transformer with a light decoder, AdamW."""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH = 8
SIZE = 32
PATCH = 4
CLASSES = 4  # the background and three shapes
IGNORED = 255
WIDTH = 32
HEADS = 2
BLOCKS = 4
RATE = 2e-3
WARM_UP = 15
CLASS_WEIGHTS = torch.tensor([0.5, 1.0, 1.0, 1.0])
TINTS = torch.tensor([[0.7, 0.4, 0.4], [0.4, 0.7, 0.4], [0.4, 0.4, 0.7]])

# The library counts the patch embedding and the decoder to the part "other".
SKIP_BLOCK = 2
RELOADED_BLOCK = 1

FAULTS = {
    "masks_not_flipped": dict(
        what="Half of the pictures are mirrored as augmentation, but their masks no longer are.",
        kinds=["data"], part="all"),
    "images_not_scaled": dict(
        what="The loader hands over pictures of 0 to 255 that are not divided by 255 before they are normalised.",
        kinds=["data"], part="all"),
    "rate_ten_times": dict(
        what="The scheduler is built anew with ten times the base rate, so the rate jumps up tenfold.",
        kinds=["rate", "instability"], part="all"),
    "decay_too_strong": dict(
        what="Weight decay becomes 20 in place of 0.01: matrices of all parts shrink at each step.",
        kinds=["optimizer", "weights"], part="all"),
    "grad_not_zeroed": dict(
        what="zero_grad is no longer called, so each step adds to the gradients of those before.",
        kinds=["gradients", "optimizer"], part="all"),
    "embedding_not_trained": dict(
        what="The patch embedding and the positions were left out of the optimizer's list of weights.",
        kinds=["frozen", "optimizer"], part="other", at=0),
    "causal_mask": dict(
        what="A causal mask is on in the attention of all blocks: patches see only those before them.",
        kinds=["attention"], part="all"),
    "skip_lost": dict(
        what="The MLP of one block replaces its input: the residual connection is missing.",
        kinds=["activations"], part=f"block{SKIP_BLOCK}"),
    "softmax_twice": dict(
        what="The head applies a softmax before the cross entropy, which applies its own.",
        kinds=["output_logits", "data"], part="other"),
    "block_reset": dict(
        what="Weights of one block are fresh random ones (names missing in a checkpoint, loaded with strict=False).",
        kinds=["weights"], part=f"block{RELOADED_BLOCK}", lasts=1),
    "picture_with_nan": dict(
        what="One batch has a damaged picture with NaN pixels; loss, gradients and then all weights become NaN.",
        kinds=["not_finite", "data"], part="all"),
    "encoder_detached": dict(
        what="The decoder gets detached features, so nothing before it gets a gradient.",
        kinds=["dead", "frozen", "gradients"], part="all"),
    "weights_in_bf16": dict(
        what="Weights are kept in bfloat16 without a master copy: small updates are rounded away.",
        kinds=["precision", "weights"], part="all", at=0),
}

HEALTHY = {
    "accumulation": "Each update accumulates the gradients of two half batches.",
    "evaluation": "Every 20 steps the model is evaluated on held-out pictures in eval mode without gradients.",
    "resumed": "Resumed at step 60 from a checkpoint with all its state; recorded from there by first_step.",
    "ema": "An exponential average of the weights is kept aside.",
    "cosine": "Warm-up over 50 steps and then cosine decay, in place of 15 steps and polynomial decay.",
}


# ---- data

def draw(n, g):
    """Pictures in 0..1 and masks: up to three shapes each on a noisy ground, borders of shapes ignored."""
    line = torch.arange(SIZE).float()
    y, x = line[None, :, None], line[None, None, :]
    images = 0.5 + 0.2 * (torch.rand(n, 3, 1, 1, generator=g) - 0.5).expand(n, 3, SIZE, SIZE).clone()
    masks = torch.zeros(n, SIZE, SIZE, dtype=torch.long)
    for _ in range(3):
        kind = torch.randint(0, 3, (n,), generator=g)
        cy, cx = (4 + (SIZE - 8) * torch.rand(2, n, 1, 1, generator=g)).unbind(0)
        radius = 4 + 4 * torch.rand(n, 1, 1, generator=g)
        dy, dx = (y - cy).abs(), (x - cx).abs()
        distances = torch.stack([(dy ** 2 + dx ** 2).sqrt(), torch.maximum(dy, dx), (dy + dx) / 1.3])
        distance = distances[kind, torch.arange(n)]
        inside = distance < radius
        tint = TINTS[kind] + 0.15 * torch.randn(n, 3, generator=g)
        images = torch.where(inside[:, None], tint[:, :, None, None], images)
        masks = torch.where(inside, kind[:, None, None] + 1, masks)
        masks = torch.where((distance - radius).abs() < 0.4, torch.tensor(IGNORED), masks)
    images = images + 0.1 * torch.randn(images.shape, generator=g)
    return images.clamp(0, 1), masks


def make_batch(name, on, g):
    images, masks = draw(BATCH, g)
    mirrored = torch.rand(BATCH, generator=g) < 0.5
    images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    if not (name == "masks_not_flipped" and on):
        masks = torch.where(mirrored[:, None, None], masks.flip(-1), masks)
    if name == "images_not_scaled" and on:
        images = (images * 255).round()
    return (images - 0.5) / 0.2, masks


# ---- model

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.causal = False
        self.skip = True

    def attend(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(n, t, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.norm1(x))
        change = self.down(F.gelu(self.up(self.norm2(x))))
        return x + change if self.skip else change


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.decoder = nn.Linear(WIDTH, CLASSES * PATCH * PATCH)
        self.detached = False
        self.softmax = False

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        if self.detached:
            x = x.detach()
        side = SIZE // PATCH
        logits = self.decoder(self.norm(x)).transpose(1, 2).reshape(len(x), -1, side, side)
        logits = F.pixel_shuffle(logits, PATCH)
        return logits.softmax(1) if self.softmax else logits


# ---- training

def make_optimizer(name, model):
    weights = dict(model.named_parameters())
    if name == "embedding_not_trained":
        weights = {key: w for key, w in weights.items() if key not in
                   ("patch_embed.weight", "patch_embed.bias", "pos_embed")}
    decayed = [w for w in weights.values() if w.ndim > 1]
    others = [w for w in weights.values() if w.ndim <= 1]
    return torch.optim.AdamW([dict(params=decayed, weight_decay=0.01), dict(params=others, weight_decay=0.0)], lr=RATE)


def rate_at(name, step, on):
    if name == "cosine":
        warm = min(1.0, (step + 1) / 50)
        return RATE * warm * 0.5 * (1 + math.cos(math.pi * max(0, step - 50) / (STEPS - 50)))
    rate = RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / STEPS) ** 0.9
    if name == "rate_ten_times" and on:
        rate *= 10
    return rate


def loss_of(model, images, masks):
    return F.cross_entropy(model(images), masks, weight=CLASS_WEIGHTS, ignore_index=IGNORED)


def backward(name, model, images, masks):
    """Gradients of the batch, in two halves where they are accumulated; the loss."""
    parts = 2 if name == "accumulation" else 1
    total = 0.0
    for some, labels in zip(images.chunk(parts), masks.chunk(parts)):
        loss = loss_of(model, some, labels) / parts
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def evaluate(model, pictures):
    model.eval()
    images, masks = pictures
    guessed = model((images - 0.5) / 0.2).argmax(1)
    model.train()
    known = masks != IGNORED
    return (guessed == masks)[known].float().mean().item()


@torch.no_grad()
def average(ema, model):
    for kept, w in zip(ema.parameters(), model.parameters()):
        kept.lerp_(w, 0.02)


@torch.no_grad()
def round_weights(model):
    for w in model.parameters():
        w.copy_(w.bfloat16().float())


def plant(name, model, optimizer, step, at):
    """Faults that change the model or the optimizer before a step."""
    on = step >= at
    for block in model.blocks:
        block.causal = name == "causal_mask" and on
    model.blocks[SKIP_BLOCK].skip = not (name == "skip_lost" and on)
    model.detached = name == "encoder_detached" and on
    model.softmax = name == "softmax_twice" and on
    if name == "decay_too_strong" and on:
        optimizer.param_groups[0]["weight_decay"] = 20.0
    if name == "block_reset" and step == at:
        model.blocks[RELOADED_BLOCK].load_state_dict(Block().state_dict())


def resume(model, optimizer):
    """A new model and optimizer from a checkpoint with all the state of the old ones."""
    saved = copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict()))
    model = Segmenter()
    model.load_state_dict(saved["model"])
    optimizer = make_optimizer("resumed", model)
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    at = FAULTS.get(name, {}).get("at", at)
    g = torch.Generator().manual_seed(seed + 1)
    held_out = draw(32, torch.Generator().manual_seed(seed + 2))
    model = Segmenter()
    optimizer = make_optimizer(name, model)
    ema = copy.deepcopy(model) if name == "ema" else None
    recorder = None
    if name != "resumed":
        recorder = lab.record(model, optimizer, every=every, out=out)
    if name == "weights_in_bf16":
        round_weights(model)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == 60:
            model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=60)
        on = step >= at
        images, masks = make_batch(name, on, g)
        if name == "picture_with_nan" and step == at:
            images[0, :, :4] = math.nan
        plant(name, model, optimizer, step, at)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(name, step, on)
        loss = backward(name, model, images, masks)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if name == "weights_in_bf16":
            round_weights(model)
        if not (name == "grad_not_zeroed" and on):
            model.zero_grad()
        if name == "ema":
            average(ema, model)
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, held_out)
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses
