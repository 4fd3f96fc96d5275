"""Drawn pictures as tile tokens: a class-conditional decoder-only Transformer with 2D positions, trained with AdamW."""
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
SIZE, TILE, SIDE = 20, 4, 5
TOKENS = SIDE * SIDE
CODES, CLASSES = 32, 6
WIDTH, HEADS, BLOCKS = 32, 4, 3
BATCH, RATE, WARM_UP, LABEL_DROP = 16, 3e-3, 20, 0.1

FAULTS = {
    "codebook_reordered": dict(
        what="The tile codebook is loaded again with its rows in another order, so that token ids mean other tiles.",
        kinds=["data"], part="all"),
    "shard_in_bytes": dict(
        what="Twenty batches come from a shard with pixels in 0..255 in place of 0..1, so most ink becomes one token.",
        kinds=["data"], part="all", lasts=20),
    "rate_too_high": dict(
        what="The learning rate is 30 times too high from a step on (a wrong value in the config of the second phase).",
        kinds=["rate", "instability"], part="all"),
    "decay_too_strong": dict(
        what="From a step on weight decay of all weights is 10 in place of 0.05.",
        kinds=["optimizer"], part="all"),
    "block_initialised_again": dict(
        what="A partly loaded checkpoint leaves block 2 with fresh random weights.",
        kinds=["weights"], part="block2"),
    "gradients_not_zeroed": dict(
        what="zero_grad is no longer called, so each update also holds the gradients of all updates before.",
        kinds=["gradients", "optimizer"], part="all"),
    "branches_detached": dict(
        what="Both branches of block 1 are detached before they are added to the stream: its weights get no gradient.",
        kinds=["dead", "frozen", "gradients"], part="block1"),
    "embedding_frozen": dict(
        what="Meant for the tile codebook, requires_grad_(False) is called for the token, class and position embeddings.",
        kinds=["frozen", "dead"], part="embedding"),
    "causal_mask_lost": dict(
        what="After a switch of the attention kernel is_causal is no longer passed: every tile sees the tiles to come.",
        kinds=["attention", "data"], part="all"),
    "temperature_left_on": dict(
        what="After a preview the sampler's temperature of 0.3 stays on and divides the logits in training too.",
        kinds=["output_logits"], part="head"),
    "blank_picture": dict(
        what="A blank picture has no ink to weigh its tiles by: 0/0 makes the loss NaN and then all weights.",
        kinds=["not_finite", "data"], part="all"),
    "weights_in_bfloat16": dict(
        what="Weights are kept in bfloat16 without a float32 copy: small updates are rounded away.",
        kinds=["precision", "weights"], part="all"),
    "residual_missing": dict(
        what="Block 1 lacks its residual sums: its output is its branches alone.",
        kinds=["activations"], part="block1", at=0),
}

HEALTHY = {
    "previews": "Every 40 steps pictures are sampled with guidance in evaluation mode, then training goes on.",
    "decay_to_zero": "From step 120 on the rate decays along a cosine to zero at the end.",
    "two_half_batches": "Each update sums the gradients of two half batches, each loss divided by two.",
    "resumed": "The run stops half way to `at` and goes on from a checkpoint with all its state, by first_step.",
    "batch_ramp": "The batch grows by plan: 8 pictures up to step 60, 12 up to step 120, then 16.",
}


def draw(rng, count):
    """Pictures of one shape each (count, SIZE, SIZE) and their classes."""
    labels = rng.integers(CLASSES, size=count)
    y, x = np.mgrid[:SIZE, :SIZE].astype(np.float32)
    cy, cx = rng.uniform(6, 13, (2, count, 1, 1))
    r = rng.uniform(3.5, 6.5, (count, 1, 1))
    dy, dx = np.abs(y - cy), np.abs(x - cx)
    dist = np.hypot(dy, dx)
    inside = np.maximum(dy, dx) < r
    shapes = [dist < r, np.abs(dist - r) < 1.2, inside, inside & (np.minimum(dy, dx) < 1.5),
              inside & ((y + np.floor(cy)) % 4 < 2), np.abs((y - cy) - (x - cx)) < r / 2.5]
    pictures = np.choose(labels[:, None, None], [s.astype(np.float32) for s in shapes])
    ink = rng.choice([0.6, 1.0], size=(count, 1, 1))
    pictures = pictures * ink + 0.04 * rng.standard_normal(pictures.shape)
    return pictures.astype(np.float32), labels


def cut(pictures):
    """Tiles (count, TOKENS, TILE * TILE) in reading order."""
    tiles = pictures.reshape(-1, SIDE, TILE, SIDE, TILE).transpose(0, 1, 3, 2, 4)
    return tiles.reshape(-1, TOKENS, TILE * TILE)


def nearest(tiles, codebook):
    distance = (codebook ** 2).sum(-1) - 2 * tiles @ codebook.T
    return distance.argmin(-1)


def fit_codebook(rng):
    """K-means over the tiles of some pictures, from an empty tile and tiles with ink."""
    tiles = cut(draw(rng, 200)[0]).reshape(-1, TILE * TILE)
    inked = tiles[tiles.mean(-1) > 0.1]
    codebook = inked[rng.choice(len(inked), CODES, replace=False)]
    codebook[0] = 0
    for _ in range(6):
        ids = nearest(tiles, codebook)
        for code in range(CODES):
            if (ids == code).any():
                codebook[code] = tiles[ids == code].mean(0)
    return codebook


def tile_weights(tiles):
    """Tiles with much ink count more; one on average in each picture."""
    ink = np.abs(tiles).mean(-1)
    with np.errstate(invalid="ignore"):
        return 0.5 + 0.5 * ink / ink.mean(-1, keepdims=True)


def make_batch(rng, codebook, name, step, at):
    count = min(BATCH, 8 + 4 * (step // 60)) if name == "batch_ramp" else BATCH
    pictures, labels = draw(rng, count)
    if name == "shard_in_bytes" and at <= step < at + FAULTS[name]["lasts"]:
        pictures = pictures * 255
    if name == "blank_picture" and step == at:
        pictures[0] = 0
    if name == "codebook_reordered" and step >= at:
        codebook = codebook[np.random.default_rng(1).permutation(CODES)]
    tiles = cut(pictures)
    labels = np.where(rng.random(count) < LABEL_DROP, CLASSES, labels)
    return (torch.from_numpy(nearest(tiles, codebook)), torch.from_numpy(labels),
            torch.from_numpy(tile_weights(tiles)).float())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.05)
        self.causal, self.residual, self.detached = True, True, False

    def attend(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.drop(self.proj(y.transpose(1, 2).reshape(b, t, WIDTH)))

    def add(self, x, branch):
        if self.detached:
            branch = branch.detach()
        return x + branch if self.residual else branch

    def forward(self, x):
        x = self.add(x, self.attend(self.norm1(x)))
        return self.add(x, self.drop(self.down(F.gelu(self.up(self.norm2(x))))))


class TileModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(CODES, WIDTH)
        self.classes = nn.Embedding(CLASSES + 1, WIDTH)  # the last one: no label
        self.rows, self.columns = nn.Embedding(SIDE, WIDTH), nn.Embedding(SIDE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CODES)
        self.temperature = 1.0
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.1)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.08)
                nn.init.zeros_(module.bias)

    def forward(self, before, labels):
        """Logits of each tile, given its class and the tiles `before` it."""
        x = torch.cat([self.classes(labels)[:, None], self.tokens(before)], 1)
        place = torch.arange(x.shape[1])
        x = x + self.rows(place // SIDE) + self.columns(place % SIDE)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / self.temperature


@torch.no_grad()
def sample(model, generator, guidance=1.5, count=3):
    """Draw tile ids with classifier-free guidance, in evaluation mode."""
    model.eval()
    labels = torch.arange(count) % CLASSES
    ids = torch.zeros(count, 0, dtype=torch.long)
    for _ in range(TOKENS):
        both = model(ids.repeat(2, 1), torch.cat([labels, torch.full_like(labels, CLASSES)]))[:, -1]
        given, free = both.chunk(2)
        chances = (free + guidance * (given - free)).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    model.train()
    return ids


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.05)


def resume(model, optimizer):
    """A new model and optimizer with the state of the old ones."""
    random_state = torch.get_rng_state()
    new = TileModel()
    new.load_state_dict(model.state_dict())
    new_optimizer = make_optimizer(new)
    new_optimizer.load_state_dict(optimizer.state_dict())
    torch.set_rng_state(random_state)
    return new, new_optimizer


def rate_at(name, step, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "decay_to_zero" and step >= 120:
        rate *= 0.5 + 0.5 * math.cos(math.pi * (step - 120) / max(1, STEPS - 120))
    if name == "rate_too_high" and step >= at:
        rate *= 30
    return rate


def plant(name, step, at, model, optimizer):
    """Faults that change the model or the optimizer at one step."""
    if name == "residual_missing":
        model.blocks[1].residual = False
    if step != at:
        return
    if name == "decay_too_strong":
        optimizer.param_groups[0]["weight_decay"] = 10.0
    if name == "block_initialised_again":
        model.blocks[2].load_state_dict(Block().state_dict())
    if name == "branches_detached":
        model.blocks[1].detached = True
    if name == "embedding_frozen":
        for table in (model.tokens, model.classes, model.rows, model.columns):
            table.requires_grad_(False)
    if name == "causal_mask_lost":
        for block in model.blocks:
            block.causal = False
    if name == "temperature_left_on":
        model.temperature = 0.3


def loss_of(model, ids, labels, weights):
    logits = model(ids[:, :-1], labels)
    each = F.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
    return (each * weights).mean()


def backward(model, batch, name):
    """Gradients of one batch, and its loss."""
    halves = zip(*(t.chunk(2) for t in batch))
    parts = list(halves) if name == "two_half_batches" else [batch]
    total = 0.0
    for ids, labels, weights in parts:
        loss = loss_of(model, ids, labels, weights) / len(parts)
        loss.backward()
        total = total + loss.detach()
    return total


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    preview = torch.Generator().manual_seed(seed)
    codebook = fit_codebook(rng)
    model = TileModel()
    optimizer = make_optimizer(model)
    first = at // 2 if name == "resumed" else 0
    recorder = None if first else lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if first and step == first:
            model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        plant(name, step, at, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(name, step, at)
        if not (name == "gradients_not_zeroed" and step >= at):
            optimizer.zero_grad()
        loss = backward(model, make_batch(rng, codebook, name, step, at), name)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if name == "weights_in_bfloat16" and step >= at:
            for weight in model.parameters():
                weight.data.copy_(weight.data.bfloat16())
        if recorder:
            recorder.step(loss)
        losses.append(loss.item())
        if name == "previews" and step % 40 == 39:
            sample(model, preview)
    recorder.close()
    return losses
