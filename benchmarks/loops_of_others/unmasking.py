"""Masked diffusion language model (LLaDA, MDLM) on sentences of a made-up lexicon, trained with AdamW."""

import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
LETTERS = 24
MASK = LETTERS
VOCAB = LETTERS + 1
WORDS, WORD, SENTENCE = 12, 4, 5
LENGTH = WORD * SENTENCE
WIDTH, HEADS, DEPTH = 32, 4, 3
BATCH = 16
DROPOUT = 0.1
RATE, WARMUP, FLOOR = 5e-3, 20, 0.1
DECAY = 0.1
CLIP = 1.0
T_MIN = 0.05
RESUME = 60

FAULTS = {
    "rate_jump": {
        "what": "From a restart with another configuration on, the learning rate is twenty times what it was.",
        "kinds": ["rate"], "part": "all",
    },
    "rate_low": {
        "what": "The peak learning rate was written as 5e-6 instead of 5e-3, so that the model hardly learns.",
        "kinds": ["rate"], "part": "all",
        "at": 0,
    },
    "causal": {
        "what": "Attention code taken over from an autoregressive model is still causal in every block.",
        "kinds": ["attention"], "part": "all",
        "at": 0,
    },
    "embedding_anew": {
        "what": "A resize of the vocabulary on resuming draws the whole embedding anew, at the default scale.",
        "kinds": ["weights"], "part": "embedding",
    },
    "frozen_block": {
        "what": "Block 2 still has requires_grad=False from an earlier experiment, and does not train.",
        "kinds": ["frozen"], "part": "block2",
        "at": 0,
    },
    "visible_in_loss": {
        "what": "The loss counts all tokens, those that the model can see too, instead of the masked ones only.",
        "kinds": ["data"], "part": "all",
    },
    "shifted_labels": {
        "what": "The labels are shifted by one as for next-token prediction.",
        "kinds": ["data"], "part": "all",
    },
    "foreign_shard": {
        "what": "For 30 steps the batches come from a shard that another tokenizer encoded: the ids are mixed up.",
        "kinds": ["data"], "part": "all",
        "lasts": 30,
    },
    "left_in_eval": {
        "what": "After an evaluation the model is not put back into training mode, and dropout stays off.",
        "kinds": ["data"], "part": "all",
    },
    "not_zeroed": {
        "what": "The gradients are no longer zeroed after an update, and add up from step to step.",
        "kinds": ["gradients"], "part": "all",
    },
    "decay_large": {
        "what": "The weight decay is 10 instead of 0.1, and shrinks all matrices.",
        "kinds": ["optimizer", "weights"], "part": "all",
    },
    "time_zero": {
        "what": "Masking rates are drawn without a lower bound, one is 0, and the weight 1/t makes the loss NaN.",
        "kinds": ["not_finite", "data"], "part": "all",
    },
    "pure_bfloat16": {
        "what": "The run goes on with weights and moments in bfloat16, without a float32 copy: small updates are lost.",
        "kinds": ["precision"], "part": "all",
    },
}

HEALTHY = {
    "accumulation": "Each update takes the mean gradient of four micro-batches of a quarter of the batch.",
    "evaluation": "Every 20 steps a held-out batch is scored in eval mode without gradients, then training goes on.",
    "resume": "The run goes on at step 60 from a checkpoint with model, optimizer and step.",
    "batch_ramp": "The batch grows from 8 over 12 to 16 sentences in the first 80 steps.",
    "average": "An exponential moving average of the weights is kept aside, for sampling.",
}


class Language:
    """Sentences of five four-letter words; each word has three words that may follow it."""

    def __init__(self, seed):
        made = torch.Generator().manual_seed(1234)
        self.lexicon = torch.randint(0, LETTERS, (WORDS, WORD), generator=made)
        self.follow = torch.stack([torch.randperm(WORDS, generator=made)[:3] for _ in range(WORDS)])
        self.other_ids = torch.randperm(LETTERS, generator=made)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, n):
        word = torch.randint(0, WORDS, (n,), generator=self.generator)
        words = [word]
        for _ in range(SENTENCE - 1):
            choice = torch.randint(0, 3, (n,), generator=self.generator)
            word = self.follow[word, choice]
            words.append(word)
        return self.lexicon[torch.stack(words, dim=1)].reshape(n, LENGTH)

    def times(self, n):
        # low-discrepancy sampling as in MDLM: one time in each n-th of the unit interval
        offset = torch.rand(1, generator=self.generator)
        u = (torch.arange(n) + offset) / n
        return T_MIN + (1 - T_MIN) * u

    def mask(self, n, t):
        return torch.rand(n, LENGTH, generator=self.generator) < t[:, None]


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, eps=1e-6)


HALF = WIDTH // HEADS // 2
ANGLE = torch.arange(LENGTH)[:, None] * 100.0 ** (-torch.arange(HALF) / HALF)
COS, SIN = torch.cat([ANGLE.cos()] * 2, dim=-1), torch.cat([-ANGLE.sin(), ANGLE.sin()], dim=-1)


def rotate(x):
    return x * COS.to(x.dtype) + x.roll(HALF, dims=-1) * SIN.to(x.dtype)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.causal = False

    def forward(self, x):
        n, length, _ = x.shape
        qkv = self.qkv(x).view(n, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        (q, k), v = rotate(qkv[:2]), qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, length, WIDTH))


class SwiGLU(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.gate = nn.Linear(WIDTH, hidden, bias=False)
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = RMSNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = RMSNorm(WIDTH)
        self.mlp = SwiGLU()
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.apply(self.init)
        for block in self.blocks:  # the branches' last layers are smaller, as in GPT-2
            for layer in (block.attention.out, block.mlp.down):
                nn.init.normal_(layer.weight, std=0.15 / math.sqrt(2 * DEPTH))

    @staticmethod
    def init(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.15)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_optimizer(model):
    params = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": DECAY},
            {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=RATE, betas=(0.9, 0.95), eps=1e-8,
    )


def rate(step, peak=RATE):
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def diffusion_loss(model, noisy, labels, counted, t):
    logits = model(noisy).float()
    nll = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (nll * counted / t[:, None]).sum() / labels.numel()


def evaluate(model, language):
    model.eval()
    with torch.no_grad():
        clean, t = language.batch(64), language.times(64)
        masked = language.mask(64, t)
        loss = diffusion_loss(model, clean.masked_fill(masked, MASK), clean, masked, t).item()
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    language, held_out = Language(seed), Language(seed + 1000)

    model = Denoiser()
    if name == "causal":
        for block in model.blocks:
            block.attention.causal = True
    if name == "frozen_block":
        model.blocks[2].requires_grad_(False)
    optimizer = make_optimizer(model)
    peak = 5e-6 if name == "rate_low" else RATE
    average = copy.deepcopy(model).requires_grad_(False) if name == "average" else None

    recorder = None if name == "resume" else lab.record(model, optimizer, every=every, out=out)
    model.train()
    losses, scores = [], []
    for step in range(STEPS):
        faulty = at <= step < at + lasts

        if name == "resume" and step == RESUME:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            random = torch.get_rng_state()
            model = Denoiser()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(random)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME)
        if name == "pure_bfloat16" and step == at:
            model.to(torch.bfloat16)
            optimizer.load_state_dict(optimizer.state_dict())  # casts the moments to the weights' type
        if name == "embedding_anew" and step == at:
            nn.init.normal_(model.embedding.weight)
        if name == "left_in_eval" and step == at:
            evaluate(model, held_out)
            model.eval()
        if name == "decay_large" and step == at:
            optimizer.param_groups[0]["weight_decay"] = 10.0

        for group in optimizer.param_groups:
            group["lr"] = rate(step, peak)
            if name == "rate_jump" and faulty:
                group["lr"] *= 20

        size, parts = BATCH, 1
        if name == "batch_ramp":
            size = min(BATCH, 8 + 4 * (step // 40))
        if name == "accumulation":
            size, parts = BATCH // 4, 4

        total = 0.0
        for _ in range(parts):
            clean = language.batch(size)
            t = language.times(size)
            if name == "foreign_shard" and faulty:
                clean = language.other_ids[clean]
            if name == "time_zero" and faulty:
                t = torch.arange(size) / size
            masked = language.mask(size, t)
            noisy = clean.masked_fill(masked, MASK)
            labels, counted = clean, masked
            if name == "shifted_labels" and faulty:
                labels = clean.roll(-1, dims=1)
            if name == "visible_in_loss" and faulty:
                counted = torch.ones_like(masked)
            loss = diffusion_loss(model, noisy, labels, counted, t) / parts
            loss.backward()
            total = total + loss.detach()

        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "not_zeroed" and faulty):
            optimizer.zero_grad()
        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)

        if average is not None:
            decay = min(0.99, (1 + step) / (10 + step))
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 1 - decay)
        if name == "evaluation" and step % 20 == 19:
            scores.append(evaluate(model, held_out))
    recorder.close()
    return losses
