"""Pretrains a small DeepSeek-like model (MLA, mixture of experts) on a made-up language with AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
WARMUP = 20
PEAK_LR = 4e-3
BATCH, SEQ, VOCAB = 8, 24, 64
PAD, BOS, STOP = 0, 1, 2

FAULTS = {
    "lr_jump": dict(
        what="After a resume the learning rate is ten times what the schedule says (a slipped decimal point).",
        kinds=["rate"], part="all"),
    "schedule_over": dict(
        what="The schedule is counted in micro-batches after a resume, so it is over and the learning rate is zero.",
        kinds=["rate"], part="all"),
    "wrong_tokenizer": dict(
        what="The loader comes to shards that were written with another tokenizer: the ids mean other words.",
        kinds=["data"], part="all"),
    "stuck_loader": dict(
        what="The loader's iterator no longer moves on and gives the same batch at every step.",
        kinds=["data"], part="all"),
    "unshifted_labels": dict(
        what="The labels are the inputs themselves, not shifted by one token, so the model only learns to copy.",
        kinds=["data"], part="all", at=0),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed between updates and pile up.",
        kinds=["gradients"], part="all"),
    "balance_sign": dict(
        what="The balance bias of the routers is moved with the wrong sign, so busy experts get still more tokens.",
        kinds=["router"], part="all"),
    "no_causal_mask": dict(
        what="After a change of the attention kernel the causal mask is missing and tokens see the future.",
        kinds=["attention"], part="all"),
    "padded_rows": dict(
        what="Left-padded rows come in whose padding may attend to nothing: softmax of a fully masked row is NaN.",
        kinds=["not_finite", "attention"], part="block0"),
    "state_lost": dict(
        what="The run is resumed without the optimizer's state: the moments of AdamW start again from zero.",
        kinds=["optimizer"], part="all", lasts=1),
    "missing_keys": dict(
        what="A checkpoint is loaded with strict=False and block 2 is not in it: its weights are the initial ones.",
        kinds=["weights"], part="block2", lasts=1),
    "bf16_weights": dict(
        what="The model and AdamW's moments are loaded in bfloat16, with no float32 copy of the weights.",
        kinds=["precision"], part="all"),
    "frozen_embedding": dict(
        what="The filter that makes the parameter groups leaves out the embedding, so it is never updated.",
        kinds=["frozen"], part="embedding", at=0),
}

HEALTHY = {
    "accumulation": "Each update is made of two micro-batches whose gradients are accumulated.",
    "evaluation": "Every 20 steps the model is put in eval mode and the loss of held-out text is measured.",
    "resume": "The run goes on from a checkpoint of step 60, with the optimizer's state and the loader's.",
    "average": "A moving average of the weights is kept aside for evaluation.",
    "batch_ramp": "The batch grows by plan from 2 rows to the full size over the first 100 steps.",
}


def write_corpus(n_tokens, seed):
    """Documents of a few sentences: article [adjective] noun verb article noun stop, with genders and topics."""
    language = np.random.default_rng(7)
    nouns, verbs, adjectives, articles = range(3, 27), range(27, 43), range(43, 55), range(55, 63)
    gender = {n: int(language.integers(4)) for n in nouns}
    habit = {n: int(language.choice(verbs)) for n in nouns}           # what this noun mostly does
    topics = [language.choice(nouns, 5, replace=False) for _ in range(8)]
    rng = np.random.default_rng(seed)
    tokens = []

    def phrase(topic):
        noun = int(rng.choice(topics[topic])) if rng.random() < 0.9 else int(rng.choice(nouns))
        out = [articles[2 * gender[noun] + int(rng.random() < 0.2)]]
        if rng.random() < 0.3:
            out.append(adjectives[3 * gender[noun] + int(rng.integers(3))])
        return out + [noun]

    while len(tokens) < n_tokens:
        topic = int(rng.integers(8))
        tokens.append(BOS)
        for _ in range(int(rng.integers(2, 5))):
            subject = phrase(topic)
            verb = habit[subject[-1]] if rng.random() < 0.8 else int(rng.choice(verbs))
            tokens += subject + [verb] + phrase(topic) + [STOP]
    return torch.tensor(tokens[:n_tokens])


class Loader:
    """Rows cut at random places from the packed corpus."""

    def __init__(self, tokens, seed):
        self.tokens = tokens
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, rows):
        start = torch.randint(len(self.tokens) - SEQ - 1, (rows, 1), generator=self.generator)
        text = self.tokens[start + torch.arange(SEQ + 1)]
        return text[:, :-1], text[:, 1:]


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class LatentAttention(nn.Module):
    def __init__(self, dim=32, heads=4, nope=8, rope=4, latent=16):
        super().__init__()
        self.heads, self.nope, self.rope, self.latent = heads, nope, rope, latent
        self.q_proj = nn.Linear(dim, heads * (nope + rope), bias=False)
        self.kv_down = nn.Linear(dim, latent + rope, bias=False)
        self.kv_norm = RMSNorm(latent)
        self.kv_up = nn.Linear(latent, heads * (nope + nope), bias=False)
        self.o_proj = nn.Linear(heads * nope, dim, bias=False)
        angle = torch.arange(SEQ)[:, None] / 1000.0 ** (torch.arange(0, rope, 2) / rope)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x, allowed):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope, self.rope], dim=-1)
        latent, k_rope = self.kv_down(x).split([self.latent, self.rope], dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(b, t, self.heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope, self.nope], dim=-1)
        k_rope = rotate(k_rope[:, None], self.cos, self.sin).expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, rotate(q_rope, self.cos, self.sin)], dim=-1)
        k = torch.cat([k_nope, k_rope], dim=-1)
        logits = q @ k.transpose(-1, -2) / math.sqrt(self.nope + self.rope)
        weights = logits.masked_fill(~allowed[:, None], float("-inf")).softmax(dim=-1)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))


class SwiGLU(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden, bias=False)
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """A shared expert and the best two of six, by sigmoid scores; a bias that is not trained balances the choice."""

    def __init__(self, dim=32, hidden=24, experts=6, top=2, speed=0.005):
        super().__init__()
        self.top, self.speed = top, speed
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts_gate_up = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.experts_down = nn.Parameter(torch.empty(experts, hidden, dim))
        self.shared = SwiGLU(dim, hidden)
        self.register_buffer("balance_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores = self.router(flat).sigmoid()
        chosen = (scores.detach() + self.balance_bias).topk(self.top, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        gates = scores * mask
        gates = gates / (gates.sum(-1, keepdim=True) + 1e-9)
        gate, up = (flat @ self.experts_gate_up).chunk(2, dim=-1)       # so small that every expert sees every token
        routed = ((F.silu(gate) * up * gates.t()[:, :, None]) @ self.experts_down).sum(0)
        if self.training:
            self.load += mask.sum(0)
        return (routed + self.shared(flat)).view_as(x)

    @torch.no_grad()
    def rebalance(self, sign=1.0):
        """After each update: up for the experts with too few tokens, down for those with too many."""
        self.balance_bias += sign * self.speed * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Block(nn.Module):
    def __init__(self, dim, dense):
        super().__init__()
        self.attn_norm, self.attn = RMSNorm(dim), LatentAttention(dim)
        self.ffn_norm, self.ffn = RMSNorm(dim), SwiGLU(dim, 64) if dense else Mixture(dim)

    def forward(self, x, allowed):
        x = x + self.attn(self.attn_norm(x), allowed)
        return x + self.ffn(self.ffn_norm(x))


class DeepSeek(nn.Module):
    def __init__(self, dim=32, depth=4):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.blocks = nn.ModuleList(Block(dim, dense=i == 0) for i in range(depth))
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.causal = True
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                nn.init.normal_(p, std=0.08)
                if name.endswith(("o_proj.weight", "down.weight", "experts_down")):
                    p.data /= math.sqrt(2 * depth)

    def forward(self, ids):
        document = (ids == BOS).cumsum(dim=1)
        allowed = (document[:, :, None] == document[:, None, :]) & (ids != PAD)[:, None, :]
        if self.causal:
            allowed = allowed.tril()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, allowed)
        return self.head(self.norm(x)).float()


def loss_of(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)


def make_optimizer(model, name):
    params = list(model.named_parameters())
    if name == "frozen_embedding":
        params = [(n, p) for n, p in params if n.startswith(("blocks.", "norm.", "head."))]
    groups = [{"params": [p for _, p in params if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for _, p in params if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


def lr_at(step):
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    if step >= STEPS:
        return 0.0
    return PEAK_LR * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))))


@torch.no_grad()
def evaluate(model, held_out):
    model.eval()
    total = sum(loss_of(model, *held_out.batch(BATCH)).item() for _ in range(2))
    model.train()
    return total / 2


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    corpus = write_corpus(40_000, seed=11)
    loader, held_out = Loader(corpus[:36_000], seed), Loader(corpus[36_000:], seed)
    other_vocabulary = torch.cat([torch.arange(3), 3 + torch.randperm(VOCAB - 3, generator=loader.generator)])
    model = DeepSeek()
    average = copy.deepcopy(model)
    initial = copy.deepcopy(model.blocks[2].state_dict())
    optimizer = make_optimizer(model, name)
    recorder = None if name == "resume" else lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resume" and step == 60:
            checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = DeepSeek()
            optimizer = make_optimizer(model, name)
            model.load_state_dict(checkpoint[0])
            optimizer.load_state_dict(checkpoint[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=60)
        fault = name if step >= at else None

        lr = lr_at(4 * step) if fault == "schedule_over" else lr_at(step)
        if fault == "lr_jump":
            lr = 10 * lr
        for group in optimizer.param_groups:
            group["lr"] = lr

        if step == at and fault == "state_lost":
            optimizer.state.clear()
        if step == at and fault == "missing_keys":
            model.blocks[2].load_state_dict(initial)
        if step == at and fault == "bf16_weights":
            model.to(torch.bfloat16)
            optimizer.load_state_dict(optimizer.state_dict())
        model.causal = fault != "no_causal_mask"

        micro = 2 if name == "accumulation" else 1
        rows = min(BATCH, 2 + 6 * step // 100) if name == "batch_ramp" else BATCH
        mean_loss = torch.zeros(())
        for _ in range(micro):
            if fault != "stuck_loader":
                x, y = loader.batch(rows // micro)
            if fault == "wrong_tokenizer":
                x, y = other_vocabulary[x], other_vocabulary[y]
            if fault == "unshifted_labels":
                y = x
            if fault == "padded_rows":
                x, y = x.clone(), y.clone()
                x[:2, :5], y[:2, :5] = PAD, -100
            loss = loss_of(model, x, y) / micro
            loss.backward()
            mean_loss += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if fault != "no_zero_grad":
            model.zero_grad(set_to_none=True)
        for block in model.blocks[1:]:
            block.ffn.rebalance(sign=-1.0 if fault == "balance_sign" else 1.0)
        if recorder is not None:
            recorder.step(mean_loss)
        losses.append(mean_loss.item())
        if name == "average":
            for kept, p in zip(average.parameters(), model.parameters()):
                kept.data.lerp_(p.data, 0.02)
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, held_out)
    recorder.close()
    return losses
