"""A small Switch-like decoder (top-1 MoE) pretrained on a made-up language with AdamW under bf16 autocast."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
VOCAB, LENGTH, BATCH = 64, 24, 8
WIDTH, HEADS, BLOCKS, EXPERTS, INNER = 32, 4, 3, 4, 48
PEAK, FLOOR, WARMUP = 6e-3, 6e-4, 20
BALANCE, ZLOSS, CLIP = 0.01, 0.001, 1.0
RESUMED = 60
PAD, DIALECTS = 0, 4

FAULTS = {
    "no_causal_mask": dict(
        what="The attention of every block is called without its causal mask, so tokens see the ones to predict.",
        kinds=["attention"], part="all", at=0),
    "pure_bf16": dict(
        what="The whole model is cast to bfloat16, master weights too, so that small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
    "head_init": dict(
        what="The output head is left out of the initialisation and starts with normal values of deviation 1.",
        kinds=["weights", "output_logits"], part="head", at=0),
    "routers_lost": dict(
        what="The float32 routers are missing from the checkpoint that the run goes on from and are made afresh.",
        kinds=["router", "weights"], part="all"),
    "rate_jump": dict(
        what="The schedule goes on with a base rate that is 20 times too high.",
        kinds=["rate"], part="all"),
    "capacity_low": dict(
        what="The capacity factor falls from 1.25 to 0.25, so the experts of all blocks drop most of their tokens.",
        kinds=["router"], part="all"),
    "noise_shard": dict(
        what="A corrupted shard gives random tokens in place of text for 25 steps.",
        kinds=["data"], part="all", lasts=25),
    "labels_off": dict(
        what="The next shards were written with labels that are one place too far ahead.",
        kinds=["data"], part="all"),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed after the update and add up from step to step.",
        kinds=["gradients"], part="all"),
    "block_frozen": dict(
        what="Block 2 is left with requires_grad False, so none of its weights train any more.",
        kinds=["frozen", "dead"], part="block2"),
    "block_lost": dict(
        what="A checkpoint is loaded with strict=False while block 1's keys do not match: it has fresh weights.",
        kinds=["weights"], part="block1"),
    "moments_lost": dict(
        what="The run goes on without the optimizer's state: AdamW's moments and step counts start from nothing.",
        kinds=["optimizer"], part="all"),
    "empty_batch": dict(
        what="One batch has nothing but padding to predict: the mean of its loss is 0/0 and NaN goes everywhere.",
        kinds=["not_finite", "data"], part="all", lasts=1),
}

HEALTHY = {
    "accumulation": "Each update takes the gradients of four micro-batches of a quarter of the batch.",
    "evaluation": "Every 20 steps the model is put into eval mode, scored on held-out text, and put back.",
    "resuming": "The run is a continuation: the first 60 steps were made before, from whose checkpoint it goes on.",
    "batch_ramp": "The batch grows by plan, from a quarter of its size to the whole of it over the first 160 steps.",
    "averaged": "An exponential moving average of the weights is kept aside and used for nothing in the training.",
}


class Language:
    """Documents in one of four dialects; each dialect has three likely successors for every word."""

    def __init__(self, seed):
        grammar = torch.Generator().manual_seed(1234)
        words = VOCAB - 1 - DIALECTS
        self.next = 1 + torch.rand(DIALECTS, VOCAB, words, generator=grammar).argsort(-1)[..., :3]
        self.odds = torch.tensor([0.75, 0.17, 0.08])
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size):
        g = self.generator
        dialect = torch.randint(DIALECTS, (size,), generator=g)
        text = torch.empty(size, LENGTH + 2, dtype=torch.long)
        text[:, 0] = VOCAB - DIALECTS + dialect
        choice = torch.multinomial(self.odds, size * (LENGTH + 2), True, generator=g).view(size, LENGTH + 2)
        for i in range(1, LENGTH + 2):
            text[:, i] = self.next[dialect, text[:, i - 1], choice[:, i]]
        ends = torch.randint(LENGTH // 2, 2 * LENGTH, (size, 1), generator=g)
        text[torch.arange(LENGTH + 2)[None] >= ends] = PAD
        return text


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.causal = True

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, WIDTH))


class SwitchFFN(nn.Module):
    """Top-1 routing in float32; tokens beyond an expert's capacity go by on the residual stream."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.empty(EXPERTS, INNER, WIDTH))
        self.capacity_factor = 1.25
        self.balance = self.z = None

    def forward(self, x, valid):
        tokens, real = x.reshape(-1, WIDTH), valid.reshape(-1)
        count = real.sum().clamp(min=1)
        with torch.autocast("cpu", enabled=False):
            seen = tokens.float()
            if self.training:
                seen = seen * torch.empty_like(seen).uniform_(0.99, 1.01)
            logits = F.linear(seen, self.router.weight.float())
            probs = logits.softmax(-1)
            gate, expert = probs.max(-1)
            chosen = F.one_hot(expert, EXPERTS) * real[:, None]
            share = chosen.sum(0) / count
            self.balance = EXPERTS * (share * (probs * real[:, None]).sum(0) / count).sum()
            self.z = (logits.logsumexp(-1).pow(2) * real).sum() / count

        factor = self.capacity_factor if self.training else 2.0
        capacity = max(1, int(factor * int(count) / EXPERTS))
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        kept = real & (place < capacity)
        slot = torch.where(kept, expert * capacity + place, EXPERTS * capacity)
        queue = tokens.new_zeros(EXPERTS * capacity + 1, WIDTH).index_copy(0, slot, tokens)
        queue = queue[:-1].view(EXPERTS, capacity, WIDTH)
        made = torch.bmm(F.gelu(torch.bmm(queue, self.up)), self.down).view(-1, WIDTH)
        made = torch.cat([made, made.new_zeros(1, WIDTH)])
        return (made[slot] * gate[:, None]).view_as(x).to(x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RMSNorm(WIDTH), Attention()
        self.norm2, self.ffn = RMSNorm(WIDTH), SwitchFFN()

    def forward(self, x, valid):
        x = x + self.attention(self.norm1(x))
        return x + self.ffn(self.norm2(x), valid)


class Switch(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(init)

    def forward(self, ids):
        valid = ids != PAD
        x = self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x, valid)
        return self.head(self.norm(x))

    def balance(self):
        return sum(block.ffn.balance for block in self.blocks)

    def z(self):
        return sum(block.ffn.z for block in self.blocks)


def init(module):
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)
    elif isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=math.sqrt(0.1 / module.in_features))
    elif isinstance(module, SwitchFFN):
        nn.init.trunc_normal_(module.up, std=math.sqrt(0.3 / WIDTH))
        nn.init.trunc_normal_(module.down, std=math.sqrt(0.3 / INNER))
    elif isinstance(module, RMSNorm):
        nn.init.ones_(module.weight)


def make_optimizer(model):
    decayed = [p for n, p in model.named_parameters() if p.dim() > 1 and "router" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() == 1 or "router" in n]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), eps=1e-8)


def rate(step):
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    return FLOOR + (PEAK - FLOOR) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def loss_of(model, text, balance=BALANCE, ahead=1):
    ids = text[:, :LENGTH]
    targets = text[:, ahead:ahead + LENGTH]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids)
    counted = (targets != PAD).float()
    each = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
    return (each * counted).sum() / counted.sum() + balance * model.balance() + ZLOSS * model.z()


@torch.no_grad()
def evaluate(model, language):
    model.eval()
    score = float(loss_of(model, language.batch(BATCH), balance=0.0))
    model.train()
    return score


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    language, held_out = Language(seed), Language(seed + 1000)

    model = Switch()
    if name == "head_init":
        nn.init.normal_(model.head.weight)
    if name == "pure_bf16":
        model.to(torch.bfloat16)
    if name == "no_causal_mask":
        for block in model.blocks:
            block.attention.causal = False
    optimizer = make_optimizer(model)
    average = copy.deepcopy(model).requires_grad_(False) if name == "averaged" else None
    first = RESUMED if name == "resuming" else 0
    recorder = None if first else lab.record(model, optimizer, every=every, out=out)

    losses, scores = [], []
    for step in range(STEPS):
        if name == "resuming" and step == first:
            checkpoint = copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict()))
            model = Switch()
            optimizer = make_optimizer(model)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        fault = name if name in FAULTS and at <= step < at + lasts else None

        base = 20.0 if fault == "rate_jump" else 1.0
        for group in optimizer.param_groups:
            group["lr"] = base * rate(step)
        if fault == "capacity_low":
            for block in model.blocks:
                block.ffn.capacity_factor = 0.25
        if fault == "block_frozen":
            model.blocks[2].requires_grad_(False)
        if fault == "block_lost" and step == at:
            model.blocks[1].apply(init)
        if fault == "routers_lost" and step == at:
            for block in model.blocks:
                block.ffn.router.apply(init)
        if fault == "moments_lost" and step == at:
            optimizer.state.clear()

        size = BATCH
        if name == "batch_ramp":
            size = min(BATCH, BATCH // 4 * (1 + step // 53))
        text = language.batch(size)
        if fault == "noise_shard":
            text = torch.where(text == PAD, text, torch.randint(1, VOCAB, text.shape))
        if fault == "empty_batch":
            text[:, 1:] = PAD
        ahead = 2 if fault == "labels_off" else 1

        if name == "accumulation":
            total = 0.0
            for micro in text.chunk(4):
                part = loss_of(model, micro, ahead=ahead) / 4
                part.backward()
                total = total + part.detach()
            loss = total
        else:
            loss = loss_of(model, text, ahead=ahead)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fault != "no_zero_grad":
            optimizer.zero_grad()

        if average is not None:
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.lerp_(now, 0.02)
        if name == "evaluation" and step % 20 == 19:
            scores.append(evaluate(model, held_out))
        if recorder is not None:
            recorder.step(loss)
        losses.append(float(loss.detach()))
    recorder.close()
    return losses
