"""Pretrains a small hybrid model (gated linear recurrence beside attention) on recall texts; Muon and AdamW."""
import copy

import lab
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 240
WIDTH, HEADS, BLOCKS, LENGTH, BATCH = 32, 2, 3, 27, 8
KEYS, VALUES, WORDS = 12, 12, 8
PAD = 0
VOCAB = 1 + KEYS + VALUES + WORDS

FAULTS = {
    "stuck_loader": dict(what="From a step on the loader gives one and the same batch again and again.",
                         kinds=["data"], part="all"),
    "foreign_shard": dict(what="For 12 steps the texts come from a shard with another tokenizer (ids permuted).",
                          kinds=["data"], part="all", lasts=12),
    "rate_jump": dict(what="From a step on both learning rates are ten times the schedule's.",
                      kinds=["rate", "instability"], part="all"),
    "heavy_decay": dict(what="From a step on weight decay is 2 in place of 0.02 in both optimizers.",
                        kinds=["optimizer"], part="all"),
    "no_zero_grad": dict(what="From a step on gradients are never set to zero and add up.",
                         kinds=["gradients"], part="all"),
    "noisy_reduce": dict(what="From a step on the gradients of block1 come with noise six times their size.",
                         kinds=["gradients"], part="block1"),
    "partial_load": dict(what="At a step block0 gets its initial weights again, as from an old checkpoint.",
                         kinds=["weights"], part="block0", lasts=1),
    "lost_norm": dict(what="From a step on block1 mixes without its RMSNorm before the attention and recurrence.",
                      kinds=["activations"], part="block1"),
    "no_causal_mask": dict(what="Attention sees the future in all blocks, from the first step.",
                           kinds=["attention", "data"], part="all", at=0),
    "scaled_logits": dict(what="From a step on the head's logits are divided by the root of the width.",
                          kinds=["output_logits"], part="head"),
    "left_out": dict(what="The weights of block2 are in no optimizer's list, from the first step.",
                     kinds=["frozen"], part="block2", at=0),
    "empty_batch": dict(what="At a step all texts are empty: the mean over no token is NaN, and then all weights are.",
                        kinds=["not_finite", "data"], part="all"),
    "fp8_weights": dict(what="From a step on weights are stored in fp8 (e4m3) after each update, with no fp32 copy.",
                        kinds=["precision", "weights"], part="all"),
}
HEALTHY = {
    "long_warm_up": "The rate warms up over 80 steps in place of 20.",
    "accumulation": "Each update adds the gradients of two half batches.",
    "evaluation": "Every 25 steps a held-out batch is evaluated in eval mode without gradients.",
    "resumed": "Recording starts at step 60, from a checkpoint with the state of model and both optimizers.",
    "batch_ramp": "The batch grows from 4 to 8 to 12 texts at steps 60 and 120.",
}


def batch(seed: int, step: int, size: int = BATCH) -> torch.Tensor:
    """Texts of sentences "key value word"; a text has three keys, each with its value, to be recalled at repeats."""
    rng = np.random.default_rng([seed, step])
    sentences = LENGTH // 3 + 1
    keys = rng.permuted(np.tile(np.arange(KEYS), (size, 1)), axis=1)[:, :3]
    values = rng.integers(0, VALUES, (size, 3))
    slots = rng.integers(0, 3, (size, sentences))
    key, value = np.take_along_axis(keys, slots, 1), np.take_along_axis(values, slots, 1)
    word = (value + key) % 4 + 4 * (rng.random(value.shape) < 0.1)
    text = np.stack([1 + key, 1 + KEYS + value, 1 + KEYS + VALUES + word], 2).reshape(size, -1)[:, :LENGTH + 1]
    lengths = rng.integers(LENGTH - 9, LENGTH + 2, size)
    text = np.where(np.arange(LENGTH + 1) < lengths[:, None], text, PAD)
    return torch.from_numpy(text)


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    inputs, targets = text[:, :-1], text[:, 1:]
    mask = (targets != PAD).float()
    each = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return (each * mask.flatten()).sum() / mask.sum()


ANGLES = torch.arange(LENGTH)[:, None] * 100.0 ** -torch.linspace(0, 1, WIDTH // HEADS // 2)
COS, SIN = ANGLES.cos(), ANGLES.sin()
FUTURE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * COS - b * SIN, a * SIN + b * COS], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.causal = True

    def forward(self, x):
        b, t, _ = x.shape
        qkv = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(qkv[:2])
        y = F.scaled_dot_product_attention(q, k, qkv[2], is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Recurrence(nn.Module):
    """h[t] = a[t] h[t-1] + (1 - a[t]) u[t] with one decay per head, after a convolution of two taps."""

    def __init__(self):
        super().__init__()
        self.input = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.taps = nn.Parameter(0.5 * torch.ones(2, WIDTH))
        self.decay = nn.Linear(WIDTH, HEADS)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        u, gate = self.input(x).chunk(2, -1)
        u = u * self.taps[0] + F.pad(u, (0, 0, 1, -1)) * self.taps[1]
        log_a = F.logsigmoid(self.decay(x)).transpose(1, 2)
        total = log_a.cumsum(-1)
        kernel = (total[..., :, None] - total[..., None, :]).masked_fill(FUTURE, -torch.inf).exp()
        kernel = kernel * (1 - log_a.exp())[..., None, :]
        h = kernel @ u.view(b, t, HEADS, -1).transpose(1, 2)
        return self.out(h.transpose(1, 2).reshape(b, t, -1) * F.silu(gate))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.recurrence = Attention(), Recurrence()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.use_norm = True

    def forward(self, x):
        y = self.norm1(x) if self.use_norm else x
        x = x + self.attention(y) + self.recurrence(y)
        value, gate = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(value * F.silu(gate))


class Hybrid(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.logit_scale = 1.0
        nn.init.normal_(self.embed.weight, std=0.5)
        for part in self.modules():
            if isinstance(part, nn.Linear):
                nn.init.normal_(part.weight, std=0.5 * part.in_features ** -0.5)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.logit_scale


def orthogonal(g: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps for a stack of matrices with no more rows than columns."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weights = group["params"]
            grads = [p.grad for p in weights]
            averages = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in weights]
            torch._foreach_lerp_(averages, grads, 1 - group["momentum"])
            updates = torch._foreach_lerp(grads, averages, group["momentum"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            shapes = {}
            for p, u in zip(weights, updates):
                is_tall = len(p) > p.shape[1]
                shapes.setdefault(tuple(sorted(p.shape)), []).append((p.T, u.T) if is_tall else (p, u))
            for members in shapes.values():
                stack = orthogonal(torch.stack([u for _, u in members]))
                torch._foreach_add_([p for p, _ in members], list(stack), alpha=-group["lr"])


def optimizers_of(model: Hybrid, name: str) -> list:
    matrices, others = [], []
    for key, p in model.named_parameters():
        if name == "left_out" and key.startswith("blocks.2."):
            continue
        vector_like = p.ndim < 2 or "decay" in key or "taps" in key
        (others if vector_like or not key.startswith("blocks.") else matrices).append(p)
    muon = Muon([dict(params=matrices, peak=0.02)])
    adam = torch.optim.AdamW([dict(params=others, peak=4e-3)], betas=(0.9, 0.95), weight_decay=0.02, fused=True)
    return [muon, adam]


def schedule(step: int, warm_up: int) -> float:
    """Warm-up, stable, and a linear decay to zero over the last sixth."""
    return min(1.0, (step + 1) / warm_up, (STEPS - step) / (STEPS / 6))


def texts_at(name: str, seed: int, step: int, at: int) -> torch.Tensor:
    size = BATCH
    if name == "batch_ramp":
        size = 4 if step < 60 else 8 if step < 120 else 12
    if name == "stuck_loader":
        step = min(step, at)
    text = batch(seed, step, size)
    if name == "foreign_shard" and at <= step < at + 12:
        ids = np.random.default_rng(seed).permutation(VOCAB - 1) + 1
        text = torch.from_numpy(np.append(PAD, ids))[text]
    if name == "empty_batch" and step == at:
        text = torch.full_like(text, PAD)
    return text


def change_model(name: str, model: Hybrid, initial: dict, step: int, at: int) -> None:
    """Faults in the model's code or weights, before the forward pass."""
    if name == "no_causal_mask":
        for block in model.blocks:
            block.attention.causal = False
    if name == "lost_norm" and step == at:
        model.blocks[1].use_norm = False
    if name == "scaled_logits" and step == at:
        model.logit_scale = WIDTH ** -0.5
    if name == "partial_load" and step == at:
        model.blocks[0].load_state_dict(initial)


def set_rates(name: str, optimizers: list, step: int, at: int) -> None:
    factor = schedule(step, 80 if name == "long_warm_up" else 20)
    if name == "rate_jump" and step >= at:
        factor *= 10
    for group in (g for o in optimizers for g in o.param_groups):
        group["lr"] = group["peak"] * factor
        if name == "heavy_decay" and step >= at:
            group["weight_decay"] = 2.0


@torch.no_grad()
def evaluate(model: Hybrid, seed: int) -> None:
    model.eval()
    loss_of(model, batch(seed + 1000, 0, 24))
    model.train()


def resume(old: Hybrid, old_optimizers: list) -> tuple[Hybrid, list]:
    """A new model and new optimizers with the saved state of the old ones."""
    model = Hybrid()
    optimizers = optimizers_of(model, "plain")
    for new, saved in zip([model] + optimizers, [old] + old_optimizers):
        new.load_state_dict(copy.deepcopy(saved.state_dict()))
    return model, optimizers


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model, noise = Hybrid(), torch.Generator().manual_seed(seed)
    initial = copy.deepcopy(model.blocks[0].state_dict())
    optimizers = optimizers_of(model, name)
    first_step = 60 if name == "resumed" else 0
    recorder, losses = None, []
    for step in range(STEPS):
        if step == first_step > 0:
            model, optimizers = resume(model, optimizers)
        if step == first_step:
            recorder = lab.record(model, optimizers, every=every, out=out, first_step=first_step)
        change_model(name, model, initial, step, at)
        set_rates(name, optimizers, step, at)
        text = texts_at(name, seed, step, at)
        loss, pieces = 0.0, text.chunk(2 if name == "accumulation" else 1)
        for piece in pieces:
            part = loss_of(model, piece) / len(pieces)
            part.backward()
            loss = loss + part.detach()
        if name == "noisy_reduce" and step >= at:
            for p in model.blocks[1].parameters():
                p.grad += 6 * p.grad.square().mean().sqrt() * torch.randn(p.shape, generator=noise)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if not (name == "no_zero_grad" and step >= at):
            model.zero_grad()
        if name == "fp8_weights" and step >= at:
            for p in model.parameters():
                p.data.copy_(p.data.to(torch.float8_e4m3fn))
        losses.append(loss.item())
        if recorder:
            recorder.step(loss)
        if name == "evaluation" and step % 25 == 24:
            evaluate(model, seed)
    recorder.close()
    return losses
