"""In-context regression of random sparse linear functions by a small decoder-only Transformer with AdamW."""

import copy
import math

import torch
from torch import nn

import lab

STEPS = 240
DIM = 3  # numbers in an input vector
PAIRS = 16  # pairs (x, f(x)) in a row
ROWS = 32  # rows in a batch
WIDTH = 48
HEADS = 4
BLOCKS = 3
RATE = 3e-3
WARM_UP = 20
CLIP = 1.0
DECAY = 0.01


# ------------------------------------------------------------------------------------------------------------- data


def draw_batch(seed, step, rows=ROWS, pairs=PAIRS):
    """Rows of pairs of a function with two weights that are not zero; drawn from the seed and the step alone."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    xs = torch.randn(rows, pairs, DIM, generator=generator)
    chosen = torch.rand(rows, DIM, generator=generator).argsort(dim=1) < 2
    # the weights scatter around one: a prior that is learned at once, and the rest has to be read from the context
    weights = (1.0 + torch.randn(rows, DIM, generator=generator)) * chosen
    noise = 0.05 * torch.randn(rows, pairs, generator=generator)
    ys = (xs * weights[:, None, :]).sum(-1) / math.sqrt(2) + noise
    return xs, ys


def make_tokens(xs, ys):
    """Token i holds the question x_i and the pair before it, (x_{i-1}, y_{i-1})."""
    pairs = torch.cat([xs, ys[..., None]], dim=-1)
    before = torch.cat([torch.zeros_like(pairs[:, :1]), pairs[:, :-1]], dim=1)
    return torch.cat([xs, before], dim=-1)


# ------------------------------------------------------------------------------------------------------------ model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = True

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(mask, float("-inf"))
        mixed = logits.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.residual = True

    def forward(self, x):
        if not self.residual:
            x = self.attention(self.norm1(x))
            return self.mlp(self.norm2(x))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2 * DIM + 1, WIDTH)
        self.position = nn.Embedding(PAIRS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 1)
        self.detach_embedding = False
        self.output_scale = 1.0
        nn.init.normal_(self.position.weight, std=0.02)
        for block in self.blocks:
            for last in (block.attention.out, block.mlp[-1]):
                last.weight.data /= math.sqrt(2 * BLOCKS)

    def forward(self, tokens):
        x = self.embed(tokens)
        if self.detach_embedding:
            x = x.detach()
        x = x + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).squeeze(-1) * self.output_scale


# --------------------------------------------------------------------------------------------------------- training


def build(name, seed):
    torch.manual_seed(seed)
    model = Regressor()
    parameters = list(model.parameters())
    if name == "block_not_in_optimizer":
        left_out = {id(p) for p in model.blocks[1].parameters()}
        parameters = [p for p in parameters if id(p) not in left_out]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.98), weight_decay=DECAY)
    return model, optimizer


def rate_at(name, step, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "decay_to_zero":
        rate *= 0.5 * (1 + math.cos(math.pi * step / STEPS))
    if name == "rate_too_high" and step >= at:
        rate *= 20
    return rate


def batch_at(name, seed, step, at):
    pairs = PAIRS
    if name == "curriculum":
        pairs = min(PAIRS, 8 + step // 12)
    if name == "same_batch" and step >= at:
        step = at
    xs, ys = draw_batch(seed, step, pairs=pairs)
    tokens = make_tokens(xs, ys)
    if name == "labels_of_other_rows" and step >= at:
        ys = ys.roll(1, dims=0)
    if name == "nan_in_batch" and step == at:
        row = torch.zeros_like(tokens[5])  # an empty row of the file, normalised by its own spread
        tokens[5] = row / row.std()
    return tokens, ys


def begin_fault(name, model, optimizer, fresh):
    """What happens once, before the update of step `at`."""
    if name == "weight_decay_huge":
        for group in optimizer.param_groups:
            group["weight_decay"] = 10.0
    if name == "block_missing_in_checkpoint":
        model.blocks[2].load_state_dict(fresh.blocks[2].state_dict())
    if name == "causal_mask_lost":
        for block in model.blocks:
            block.attention.causal = False
    if name == "residual_lost":
        model.blocks[2].residual = False
    if name == "embedding_detached":
        model.detach_embedding = True
    if name == "output_scaled_twice":
        model.output_scale = 8.0


def backward(name, model, tokens, ys):
    """Gradients of the batch; its loss."""
    parts = 2 if name == "accumulation" else 1
    total = 0.0
    for some_tokens, some_ys in zip(tokens.chunk(parts), ys.chunk(parts)):
        loss = (model(some_tokens) - some_ys).square().mean() / parts
        loss.backward()
        total += loss.item()
    return total


def evaluate(model, seed):
    model.eval()
    with torch.no_grad():
        xs, ys = draw_batch(seed, 500_000)
        error = (model(make_tokens(xs, ys)) - ys).square().mean().item()
    model.train()
    return error


def update(name, model, optimizer, seed, step, at):
    tokens, ys = batch_at(name, seed, step, at)
    for group in optimizer.param_groups:
        group["lr"] = rate_at(name, step, at)
    loss = backward(name, model, tokens, ys)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    if name == "weights_in_bfloat16" and step >= at:
        with torch.no_grad():  # no master copy: the weights are kept in bfloat16 between updates
            for p in model.parameters():
                p.copy_(p.bfloat16())
    if not (name == "zero_grad_forgotten" and step >= at):
        model.zero_grad()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    model, optimizer = build(name, seed)
    fresh = copy.deepcopy(model)
    losses = []
    first = 0
    if name == "resumed":
        # a run that was stopped at `at`; a new model and optimizer go on from its checkpoint
        losses = [update(name, model, optimizer, seed, step, at) for step in range(at)]
        checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        model, optimizer = build(name, seed + 1)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = at
    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
    for step in range(first, STEPS):
        if step == at:
            begin_fault(name, model, optimizer, fresh)
        losses.append(update(name, model, optimizer, seed, step, at))
        recorder.step(losses[-1])
        if name == "evaluation" and step % 25 == 24:
            evaluate(model, seed)
    recorder.close()
    return losses


FAULTS = {
    "labels_of_other_rows": dict(
        what="From a step on the labels are those of the row before in the batch.", kinds=["data"], part="all"
    ),
    "same_batch": dict(
        what="From a step on the loader gives the same batch at every step.", kinds=["data"], part="all"
    ),
    "rate_too_high": dict(
        what="From a step on the learning rate is 20 times too high.", kinds=["rate", "instability"], part="all"
    ),
    "weight_decay_huge": dict(
        what="From a step on the weight decay of AdamW is 10 in place of 0.01.", kinds=["optimizer"], part="all"
    ),
    "zero_grad_forgotten": dict(
        what="From a step on gradients are not zeroed and add up from update to update.",
        kinds=["gradients"],
        part="all",
    ),
    "block_missing_in_checkpoint": dict(
        what="A checkpoint is loaded that lacks block2, which is back at its initial weights.",
        kinds=["weights"],
        part="block2",
    ),
    "causal_mask_lost": dict(
        what="From a step on attention has no causal mask, and the next token holds the answer.",
        kinds=["attention", "data"],
        part="all",
    ),
    "residual_lost": dict(
        what="From a step on block2 has no residual connections.", kinds=["activations"], part="block2"
    ),
    "block_not_in_optimizer": dict(
        what="The weights of block1 were never given to the optimizer.", kinds=["frozen"], part="block1", at=0
    ),
    "embedding_detached": dict(
        what="From a step on the embedded inputs are detached: no gradient for the linear input layer, part `other`.",
        kinds=["dead", "frozen"],
        part="other",
    ),
    "nan_in_batch": dict(
        what="A batch has a row of NaN (0 divided by a spread of 0), which makes all weights NaN.",
        kinds=["not_finite", "data"],
        part="all",
    ),
    "weights_in_bfloat16": dict(
        what="From a step on weights are kept in bfloat16 without a master copy; small updates are lost.",
        kinds=["precision"],
        part="all",
    ),
    "output_scaled_twice": dict(
        what="From a step on the head's output is multiplied by 8, the spread of labels that are not normalised.",
        kinds=["output_logits", "activations"],
        part="head",
    ),
}

HEALTHY = {
    "evaluation": "Every 25 steps the model is evaluated on held-out rows in eval mode, without gradients.",
    "accumulation": "The gradient of a batch is added up from two halves of it, each weighed by one half.",
    "decay_to_zero": "The rate falls to zero along a cosine after the warm-up.",
    "resumed": "The run goes on at a step from a checkpoint of model and optimizer, with first_step.",
    "curriculum": "The number of pairs in a row grows from 8 to 16 over the first 96 steps.",
}
