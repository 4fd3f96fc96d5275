"""Pretrains a small speedrun GPT (rotary, qk-norm, squared ReLU) on made-up text with Muon and AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
VOCAB, WIDTH, HEADS, DEPTH, CONTEXT, BATCH = 28, 32, 2, 3, 32, 8
BOS, SPACE = 0, 1
SOFTCAP = 15.0

FAULTS: dict[str, dict] = {
    "muon_rate_high": dict(
        what="The run goes on with a Muon learning rate of 0.3 where 0.02 was meant.",
        kinds=["rate"], part="all"),
    "schedule_ended": dict(
        what="The schedule was counted with too few total steps, so every learning rate is zero from here on.",
        kinds=["rate"], part="all"),
    "head_rate_high": dict(
        what="The head's AdamW group gets a learning rate 40 times too high (the embedding's was meant for another).",
        kinds=["rate"], part="head"),
    "stuck_loader": dict(
        what="The loader's position is no longer moved on, so every step sees the same batch again.",
        kinds=["data"], part="all"),
    "corrupt_shard": dict(
        what="A damaged shard is read: for 20 steps the tokens are random.",
        kinds=["data"], part="all", lasts=20),
    "empty_batch": dict(
        what="A batch holds nothing but separators, so the masked mean of the loss is 0/0 and all turns NaN.",
        kinds=["not_finite", "data"], part="all"),
    "block_not_loaded": dict(
        what="At a reload with strict=False the weights of block 1 did not match by name and are initial again.",
        kinds=["weights"], part="block1"),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed after the update, so they add up over the steps.",
        kinds=["gradients"], part="all"),
    "decay_not_scaled": dict(
        what="Muon's weight decay is no longer multiplied by the learning rate and shrinks the matrices 10% a step.",
        kinds=["optimizer", "weights"], part="all"),
    "no_causal_mask": dict(
        what="The attention is called without is_causal, so that every token sees what it is to predict.",
        kinds=["attention"], part="all", at=0),
    "head_init": dict(
        what="The head is drawn from a normal distribution of std 1 in place of being zero.",
        kinds=["weights", "output_logits"], part="head", at=0),
    "embedding_left_out": dict(
        what="When parameters were split between Muon and AdamW the embedding was put into neither.",
        kinds=["frozen"], part="embedding", at=0),
    "bf16_weights": dict(
        what="The weights are kept in bfloat16 after each update, with no float32 masters: small updates are lost.",
        kinds=["precision"], part="all", at=0),
}

HEALTHY: dict[str, str] = {
    "accumulation": "Each update is made from two micro-batches of half the size, their losses divided by two.",
    "evaluation": "Every 20 steps the model is evaluated on held-out text, in eval mode and without gradients.",
    "resume": "The run goes on at step 60 from a checkpoint with weights, both optimizers' states and the loader's.",
    "cosine": "The rates follow a cosine to a tenth after the warm-up, in place of a plateau and linear decay.",
    "ema": "An exponential average of the weights is kept aside for the final evaluation.",
}


# ---------------------------------------------------------------- data

def make_text(seed, length=60_000):
    """Made-up language: 48 words, each with a few words that may follow; documents begin with BOS."""
    rng = np.random.default_rng(seed)
    words = [rng.integers(2, VOCAB, rng.integers(2, 6)).tolist() for _ in range(48)]
    follow = rng.integers(0, len(words), (len(words), 4))
    chance = np.array([0.55, 0.25, 0.15, 0.05])
    tokens = []
    while len(tokens) < length:
        tokens.append(BOS)
        word = int(rng.integers(len(words)))
        picks = rng.choice(4, size=int(rng.integers(10, 60)), p=chance)
        for pick in picks:
            tokens += words[word] + [SPACE]
            word = int(follow[word, pick])
    return torch.tensor(tokens[:length])

class Loader:
    """Random windows of the token stream, drawn by a generator of its own."""

    def __init__(self, tokens, seed):
        self.tokens = tokens
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, size=BATCH):
        start = torch.randint(len(self.tokens) - CONTEXT - 1, (size, 1), generator=self.generator)
        window = self.tokens[start + torch.arange(CONTEXT + 1)]
        return window[:, :-1], window[:, 1:]


# ---------------------------------------------------------------- model

def norm(x):
    return F.rms_norm(x, (x.size(-1),))

class Rotary(nn.Module):
    def __init__(self, dim):
        super().__init__()
        freq = (1 / 1024) ** torch.linspace(0, 1, dim // 2)
        angle = torch.arange(CONTEXT)[:, None] * freq
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * self.cos + b * self.sin, b * self.cos - a * self.sin], dim=-1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.proj.weight)
        self.rotary = Rotary(WIDTH // HEADS)
        self.causal = True

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = self.rotary(norm(q)), self.rotary(norm(k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))

class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.proj = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        nn.init.zeros_(self.proj.weight)

    def forward(self, x):
        return self.proj(F.relu(self.fc(x)).square())

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()
        self.mlp = MLP()

    def forward(self, x):
        x = x + self.attn(norm(x))
        return x + self.mlp(norm(x))

class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, tokens, targets):
        x = norm(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(norm(x)).float()
        logits = SOFTCAP * torch.tanh(logits / SOFTCAP)
        each = F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1), reduction="none")
        counts = (targets.reshape(-1) != BOS).float()    # where a document ends cannot be foreseen
        return (each * counts).sum() / counts.sum()


# ---------------------------------------------------------------- optimizers

def newton_schulz(g, steps=5):
    """Brings the singular values of a stack of matrices near to one."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.mT if g.size(-2) > g.size(-1) else g
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if g.size(-2) > g.size(-1) else x

class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.scale_decay = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, beta = group["lr"], group["momentum"]
            shrink = 1 - (lr if self.scale_decay else 1.0) * group["weight_decay"]
            shapes = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                buffer = state["momentum_buffer"]
                buffer.lerp_(p.grad, 1 - beta)
                shapes.setdefault(p.shape, []).append((p, p.grad.lerp(buffer, beta)))    # Nesterov
            for shape, pairs in shapes.items():
                updates = newton_schulz(torch.stack([u for _, u in pairs]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for (p, _), update in zip(pairs, updates):
                    p.mul_(shrink).add_(update, alpha=-lr * scale)

def make_optimizers(model, with_embedding=True):
    muon = Muon([p for p in model.blocks.parameters() if p.ndim == 2], lr=0.02)
    groups = [dict(params=[model.lm_head.weight], lr=0.005)]
    if with_embedding:
        groups.append(dict(params=[model.embed.weight], lr=0.02))
    adam = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return muon, adam

def warmup_stable_decay(step, warmup=15, decay=60, floor=0.05):
    if step < warmup:
        return (step + 1) / warmup
    return floor + (1 - floor) * min(1.0, (STEPS - step) / decay)

def warmup_cosine(step, warmup=15, floor=0.1):
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / (STEPS - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))


# ---------------------------------------------------------------- training

def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)

    text = make_text(seed)
    loader = Loader(text[:54_000], seed)
    held_out = Loader(text[54_000:], seed + 1)

    model = GPT()
    if name == "head_init":
        nn.init.normal_(model.lm_head.weight)
    if name == "no_causal_mask":
        for block in model.blocks:
            block.attn.causal = False
    optimizers = muon, adam = make_optimizers(model, with_embedding=name != "embedding_left_out")
    schedule = warmup_cosine if name == "cosine" else warmup_stable_decay
    average = copy.deepcopy(model) if name == "ema" else None
    recorder = None if name == "resume" else lab.record(model, list(optimizers), every=every, out=out)

    losses = []
    for step in range(STEPS):
        if name == "resume" and step == 60:
            saved = copy.deepcopy(dict(model=model.state_dict(), muon=muon.state_dict(), adam=adam.state_dict(),
                                       loader=loader.generator.get_state()))
            model = GPT()
            optimizers = muon, adam = make_optimizers(model)
            model.load_state_dict(saved["model"])
            muon.load_state_dict(saved["muon"])
            adam.load_state_dict(saved["adam"])
            loader.generator.set_state(saved["loader"])
            recorder = lab.record(model, list(optimizers), every=every, out=out, first_step=step)

        if name == "block_not_loaded" and step == at:
            model.blocks[1].load_state_dict(Block().state_dict())
        if name == "muon_rate_high" and step == at:
            muon.param_groups[0]["initial_lr"] = 0.3
        if name == "head_rate_high" and step == at:
            adam.param_groups[0]["initial_lr"] = 0.2
        if name == "decay_not_scaled" and step == at:
            muon.scale_decay = False

        factor = schedule(step)
        if name == "schedule_ended" and step >= at:
            factor = 0.0
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        muon.param_groups[0]["momentum"] = 0.85 + 0.1 * min(1.0, step / 60)

        if name == "accumulation":
            total = 0.0
            for _ in range(2):
                tokens, targets = loader.batch(BATCH // 2)
                loss = model(tokens, targets) / 2
                loss.backward()
                total = total + loss.detach()
            loss = total
        else:
            if not (name == "stuck_loader" and step >= at):
                tokens, targets = loader.batch()
            if name == "corrupt_shard" and at <= step < at + FAULTS[name]["lasts"]:
                window = torch.randint(VOCAB, (BATCH, CONTEXT + 1))
                tokens, targets = window[:, :-1], window[:, 1:]
            if name == "empty_batch" and step == at:
                tokens, targets = torch.full_like(tokens, BOS), torch.full_like(targets, BOS)
            loss = model(tokens, targets)
            loss.backward()

        for optimizer in optimizers:
            optimizer.step()
        if name == "bf16_weights":
            for p in model.parameters():
                p.data.copy_(p.data.bfloat16())
        if not (name == "no_zero_grad" and step >= at):
            model.zero_grad(set_to_none=True)
        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)

        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)

        if name == "evaluation" and step % 20 == 19:
            model.eval()
            with torch.no_grad():
                for _ in range(4):
                    model(*held_out.batch())
            model.train()

    recorder.close()
    return losses
