"""A small decoder-only Transformer (nanoGPT style) learns to add numbers digit by digit, with AdamW."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240

BASE, DIGITS = 3, 2               # numbers in base 3, of two digits; the answer has one more
PLUS, EQUAL, VOCAB = BASE, BASE + 1, BASE + 2
QUESTION = 2 * DIGITS + 2         # "a b + c d ="
LENGTH = QUESTION + DIGITS + 1    # and the answer, lowest digit first
WIDTH, HEADS, BLOCKS, DROPOUT = 32, 2, 3, 0.05
BATCH, MICRO = 64, 2              # sums in a micro-batch, micro-batches in an update
PEAK, LOWEST, WARM_UP = 5e-3, 5e-4, 20
DECAY, BETAS, CLIP = 0.1, (0.9, 0.99), 1.0

FAULTS = {
    "eval_left_on": dict(
        what="After an evaluation model.train() is forgotten: training goes on without dropout.",
        kinds=["data"], part="all"),
    "question_in_loss": dict(
        what="The mask of the loss is lost: the random digits of the question are in the loss, too.",
        kinds=["data"], part="all"),
    "empty_answers": dict(
        what="A micro-batch without one answer digit: its mean over no tokens is 0/0, and all weights become NaN.",
        kinds=["data", "not_finite"], part="all"),
    "rate_ten_times": dict(
        what="From a step on the rate is ten times what the schedule says.",
        kinds=["rate", "instability"], part="all"),
    "schedule_per_micro_batch": dict(
        what="The schedule counts micro-batches, not updates: the rate is at zero after half of the run.",
        kinds=["rate"], part="all", at=0),
    "moments_lost": dict(
        what="Resumed without the optimizer's state: AdamW begins with empty moments at the full rate.",
        kinds=["optimizer"], part="all", lasts=10),
    "zero_grad_forgotten": dict(
        what="Gradients are no longer zeroed: each update adds to those of all updates before.",
        kinds=["gradients", "optimizer"], part="all"),
    "block_frozen": dict(
        what="requires_grad is switched off for the weights of a block, which is no longer trained.",
        kinds=["frozen", "dead"], part="block1"),
    "residual_lost": dict(
        what="A block's MLP replaces the stream instead of being added to it.",
        kinds=["activations"], part="block2"),
    "causal_mask_lost": dict(
        what="Attention is no longer causal: each place sees the answer digits to its right (all but the last).",
        kinds=["attention", "data"], part="all"),
    "temperature_left_in": dict(
        what="The sampling temperature of 0.3 divides the logits in training, too.",
        kinds=["output_logits"], part="head"),
    "weights_in_bf16": dict(
        what="Weights are kept in bfloat16 after every update, with no float32 copy: small updates are lost.",
        kinds=["precision", "weights"], part="all"),
    "embedding_default_init": dict(
        what="The tied token embedding keeps PyTorch's initial deviation of 1 in place of 0.02.",
        kinds=["weights", "output_logits"], part="embedding", at=0),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 60 steps.",
    "evaluation_between": "Every 20 steps accuracy is measured in eval mode without gradients, then train mode again.",
    "resumed": "Stopped at step `at` and resumed by first_step, with weights, moments, data and random state.",
    "batch_ramp": "Micro-batches grow by plan: 32 sums, 48 from step 60 on, 64 from step 120 on.",
    "ema_aside": "An exponential average of the weights is kept in a copy of the model.",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.causal = True
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool(), persistent=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            scores = scores.masked_fill(~self.mask[:t, :t], float("-inf"))
        y = scores.softmax(dim=-1) @ v
        return self.drop(self.proj(y.transpose(1, 2).reshape(b, t, WIDTH)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.ln2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH),
                                 nn.Dropout(DROPOUT))
        self.residual = True

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        y = self.mlp(self.ln2(x))
        return x + y if self.residual else y


class Adder(nn.Module):
    def __init__(self, embedding_std=0.02):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        self.temperature = 1.0
        self.init_weights(embedding_std)

    def init_weights(self, embedding_std):
        for module in self.modules():
            if isinstance(module, nn.Linear) and module is not self.head:
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            for last in (block.attn.proj, block.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * BLOCKS))
        nn.init.normal_(self.tokens.weight, std=embedding_std)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, x):
        h = self.drop(self.tokens(x) + self.places(torch.arange(x.shape[1])))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        if self.temperature != 1.0:
            logits = logits / self.temperature
        return logits


def digits(numbers, count):
    return torch.stack([numbers // BASE ** i % BASE for i in range(count)], dim=1)


def make_batch(generator, size):
    """Inputs, targets and a mask that is 1 where the target is a digit of the answer."""
    a, b = torch.randint(0, BASE ** DIGITS, (2, size), generator=generator)
    plus, equal = torch.full((size, 1), PLUS), torch.full((size, 1), EQUAL)
    row = torch.cat([digits(a, DIGITS).flip(1), plus, digits(b, DIGITS).flip(1), equal,
                     digits(a + b, DIGITS + 1)], dim=1)
    mask = torch.zeros(size, LENGTH - 1)
    mask[:, QUESTION - 1:] = 1
    return row[:, :-1], row[:, 1:], mask


def masked_loss(logits, targets, mask):
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=decayed, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=PEAK, betas=BETAS, fused=True)


def rate_at(step, warm_up, lowest):
    if step < warm_up:
        return PEAK * (step + 1) / warm_up
    done = min(1.0, (step - warm_up) / (STEPS - warm_up))
    return lowest + (PEAK - lowest) * 0.5 * (1 + math.cos(math.pi * done))


def rate_of(name, step, at):
    if name == "long_warm_up":
        return rate_at(step, 60, LOWEST)
    if name == "schedule_per_micro_batch":
        return rate_at(MICRO * step, WARM_UP, 0.0)
    rate = rate_at(step, WARM_UP, LOWEST)
    if name == "rate_ten_times" and step >= at:
        rate = 10 * rate
    return rate


def micro_batch_size(name, step):
    if name == "batch_ramp":
        return 32 if step < 60 else 48 if step < 120 else BATCH
    return BATCH


@torch.no_grad()
def accuracy(model):
    model.eval()
    x, y, mask = make_batch(torch.Generator().manual_seed(999), 128)
    right = (model(x).argmax(-1) == y).float()
    model.train()
    return ((right * mask).sum() / mask.sum()).item()


def resume(model, optimizer, generator):
    """What a restart does: everything is saved, made anew and loaded."""
    saved = copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict(),
                               data=generator.get_state(), random=torch.get_rng_state()))
    model = Adder()
    model.load_state_dict(saved["model"])
    optimizer = make_optimizer(model)
    optimizer.load_state_dict(saved["optimizer"])
    generator = torch.Generator()
    generator.set_state(saved["data"])
    torch.set_rng_state(saved["random"])
    return model, optimizer, generator


def change_at(name, model, optimizer):
    """Faults that are planted once, at the beginning of their step."""
    if name == "eval_left_on":
        accuracy(model)
        model.eval()
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "block_frozen":
        model.blocks[1].requires_grad_(False)
    if name == "residual_lost":
        model.blocks[2].residual = False
    if name == "causal_mask_lost":
        for block in model.blocks:
            block.attn.causal = False
    if name == "temperature_left_in":
        model.temperature = 0.3


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    model = Adder(embedding_std=1.0 if name == "embedding_default_init" else 0.02)
    optimizer = make_optimizer(model)
    average = copy.deepcopy(model) if name == "ema_aside" else None
    recorder = lab.record(model, optimizer, every=every, out=out)
    model.train()
    losses = []
    for step in range(STEPS):
        if step == at and name == "resumed":
            recorder.close()
            model, optimizer, generator = resume(model, optimizer, generator)
            model.train()
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if step == at:
            change_at(name, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(name, step, at)

        total = 0.0
        for micro in range(MICRO):
            x, y, mask = make_batch(generator, micro_batch_size(name, step))
            if name == "question_in_loss" and step >= at:
                mask = torch.ones_like(mask)
            if name == "empty_answers" and step == at and micro == 1:
                mask = torch.zeros_like(mask)
            loss = masked_loss(model(x), y, mask) / MICRO
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "zero_grad_forgotten" and step >= at):
            optimizer.zero_grad(set_to_none=True)

        if name == "weights_in_bf16" and step >= at:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)
        recorder.step(total)
        losses.append(total)
        if name == "evaluation_between" and (step + 1) % 20 == 0:
            accuracy(model)
    recorder.close()
    return losses
