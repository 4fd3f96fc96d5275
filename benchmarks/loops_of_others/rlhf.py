"""RLHF: PPO with a value head on a small GPT-2, made-up reviews, rule-based reward and KL penalty, AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
WIDTH, BLOCKS, HEADS, DROPOUT = 32, 3, 2, 0.1
BATCH, EPOCHS = 24, 4              # responses in a batch of samples, PPO updates on each batch
PROMPT, RESPONSE = 5, 7
SFT_STEPS, SFT_LR = 50, 4e-3
LR, WARMUP, DECAY = 6e-4, 8, 0.01
BETA, CLIP, VALUE_CLIP, VALUE_COEF, ENTROPY_COEF = 0.08, 0.2, 0.4, 0.5, 0.005
GAMMA, LAM, MAX_NORM = 1.0, 0.95, 1.0

GOOD = ["great", "fine", "fun", "warm", "smart"]
BAD = ["bad", "dull", "weak", "slow", "cold"]
DETS, ADJS, NOUNS = ["the", "this", "that"], ["new", "old", "long"], ["film", "book", "song", "play", "show"]
VERBS, ADVS = ["was", "is", "felt"], ["so", "very", "quite"]
WORDS = ["<pad>", "<eos>", "i", "saw", "and"] + DETS + ADJS + NOUNS + VERBS + ADVS + GOOD + BAD
ID = {word: i for i, word in enumerate(WORDS)}
PAD, EOS = ID["<pad>"], ID["<eos>"]
VALENCE = torch.tensor([1.0 if w in GOOD else -1.0 if w in BAD else 0.0 for w in WORDS])

FAULTS: dict[str, dict] = {
    "lr_too_high": {"what": "The learning rate of PPO is a hundred times too high from the first step on.",
        "kinds": ["rate"], "part": "all", "at": 0},
    "ref_is_policy": {"what": "The reference is the policy itself, no frozen copy, so the KL is always zero.",
        "kinds": ["policy"], "part": "all", "at": 0},
    "logprobs_unshifted": {"what": "Log-probabilities are read one position late in training (no shift by one).",
        "kinds": ["policy", "data"], "part": "all", "at": 0},
    "no_kl": {"what": "The coefficient of the KL penalty falls to zero, so nothing holds the policy back.",
        "kinds": ["policy"], "part": "all"},
    "reward_constant": {"what": "The reward service fails and every response gets the default reward of zero.",
        "kinds": ["reward", "groups"], "part": "all"},
    "reward_scale": {"what": "The reward comes unnormalised, ten times as large as before.",
        "kinds": ["reward"], "part": "all"},
    "nan_reward": {"what": "The reward service returns NaN for one response of the batch.",
        "kinds": ["not_finite", "reward"], "part": "all"},
    "stale_sampler": {"what": "The sampling engine no longer gets the new weights; its samples are stale.",
        "kinds": ["policy"], "part": "all"},
    "dropout_on": {"what": "The policy is left in train mode: dropout is on in the updates, not in sampling.",
        "kinds": ["data", "policy"], "part": "all"},
    "pad_in_loss": {"what": "The response mask covers the padding after the end: pads count in KL and loss.",
        "kinds": ["data"], "part": "all"},
    "no_zero_grad": {"what": "Gradients are no longer zeroed between the updates and pile up.",
        "kinds": ["gradients"], "part": "all"},
    "frozen_block": {"what": "Block 1 is frozen with requires_grad_(False) and never unfrozen.",
        "kinds": ["frozen"], "part": "block1"},
    "sft_weights_back": {"what": "The supervised weights are loaded for a comparison, the policy's not put back.",
        "kinds": ["weights"], "part": "all", "lasts": 1},
}

HEALTHY: dict[str, str] = {
    "accumulation": "Each update accumulates the gradients of two halves of the batch of samples.",
    "evaluation": "Every 20 updates the policy's greedy responses to held-out prompts are scored.",
    "resumed": "The run goes on from a checkpoint of weights, optimizer and random state at update 40.",
    "cosine": "The learning rate follows a cosine to a tenth in place of the linear schedule.",
    "ema": "An exponential moving average of the policy's weights is kept aside.",
}


def make_prompt(rng):
    words = ["i", "saw"] * (rng.random() < 0.4) + [rng.choice(DETS)]
    return words + [rng.choice(ADJS)] * (rng.random() < 0.5) + [rng.choice(NOUNS)]


def make_response(rng):
    words = [rng.choice(VERBS)]
    for k in range(rng.integers(1, 3)):
        words += ["and"] * k + [rng.choice(ADVS)] * (rng.random() < 0.5) + [rng.choice(GOOD + BAD)]
    return words + ["<eos>"]


def prompts_of(rng, n):
    ids = torch.full((n, PROMPT), PAD)     # padded on the left
    for row in range(n):
        words = make_prompt(rng)
        ids[row, PROMPT - len(words):] = torch.tensor([ID[w] for w in words])
    return ids


def reviews_of(rng, n):
    responses = torch.full((n, RESPONSE), PAD)
    for row in range(n):
        words = make_response(rng)
        responses[row, :len(words)] = torch.tensor([ID[w] for w in words])
    return torch.cat([prompts_of(rng, n), responses], 1)


def score(responses):
    """The rule: a point for each good word, one off for each bad word, one off where the response has no end."""
    ended = (responses == EOS).any(1).float()
    return VALENCE[responses].sum(1).clamp(-2, 2) - (1 - ended)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x, mask):
        n, t, _ = x.shape
        q, k, v = self.qkv(self.ln_1(x)).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(n, t, WIDTH)
        x = x + self.drop(self.proj(mixed))
        return x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)))))


class PolicyWithValue(nn.Module):
    """A small GPT-2 (its head shares the embedding's weights) with a linear value head."""
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(WORDS), WIDTH), nn.Embedding(PROMPT + RESPONSE, WIDTH)
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.ln_f = nn.LayerNorm(WIDTH)
        self.lm_head, self.value_head = nn.Linear(WIDTH, len(WORDS), bias=False), nn.Linear(WIDTH, 1)
        self.lm_head.weight = self.wte.weight
        for key, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.06 / math.sqrt(2 * BLOCKS) if "proj" in key or "down" in key else 0.06)
            elif key.endswith("bias"):
                nn.init.zeros_(p)
        nn.init.zeros_(self.value_head.weight)

    def forward(self, ids):
        t = ids.shape[1]
        real = ids != PAD
        real[:, PROMPT:] = True
        mask = torch.ones(t, t, dtype=torch.bool).tril() & real[:, None, None] | torch.eye(t, dtype=torch.bool)
        x = self.drop(self.wte(ids) + self.wpe((real.cumsum(1) - 1).clamp(min=0)))
        for block in self.blocks:
            x = block(x, mask)
        x = self.ln_f(x)
        return self.lm_head(x), self.value_head(x).squeeze(-1)


def response_logprobs(logits, ids, shift=1):
    """Log-probability of each response token: logits at t - 1 predict the token at t."""
    logits = logits[:, PROMPT - shift:PROMPT - shift + RESPONSE]
    return F.log_softmax(logits, -1).gather(-1, ids[:, PROMPT:, None]).squeeze(-1)


@torch.no_grad()
def generate(policy, prompts, greedy=False):
    """Responses with the log-probabilities under the policy that sampled them."""
    ids, logps = prompts, []
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(RESPONSE):
        logp = F.log_softmax(policy(ids)[0][:, -1], -1)
        noise = 0.0 if greedy else -torch.log(-torch.log(torch.rand_like(logp).clamp(1e-9, 1 - 1e-7)))
        token = (logp + noise).argmax(-1).masked_fill(done, PAD)
        logps.append(logp.gather(1, token[:, None]).squeeze(1))
        done = done | (token == EOS)
        ids = torch.cat([ids, token[:, None]], 1)
    return ids, torch.stack(logps, 1)


def masked_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def advantages_of(rewards, values, mask):
    """Generalised advantage estimation over the response tokens; whitened advantages and returns."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    values = values * mask
    for t in reversed(range(RESPONSE)):
        after = values[:, t + 1] if t + 1 < RESPONSE else torch.zeros(len(rewards))
        last = (rewards[:, t] + GAMMA * after - values[:, t] + GAMMA * LAM * last) * mask[:, t]
        advantages[:, t] = last
    returns = advantages + values
    mean = masked_mean(advantages, mask)
    std = masked_mean((advantages - mean) ** 2, mask).sqrt()
    return (advantages - mean) / (std + 1e-8), returns


def ppo_loss(model, batch, rows, shift):
    """Clipped loss of the policy, clipped loss of the values, entropy bonus; and the share of clipped ratios."""
    ids, mask = batch["ids"][rows], batch["mask"][rows]
    logits, values = model(ids)
    values = values[:, PROMPT - 1:-1]
    ratio = torch.exp(response_logprobs(logits, ids, shift) - batch["logp"][rows])
    adv, old_values, returns = (batch[key][rows] for key in ("adv", "values", "returns"))
    policy = torch.max(-adv * ratio, -adv * ratio.clamp(1 - CLIP, 1 + CLIP))
    near = old_values + (values - old_values).clamp(-VALUE_CLIP, VALUE_CLIP)
    value = 0.5 * torch.max((values - returns) ** 2, (near - returns) ** 2)
    logp = F.log_softmax(logits[:, PROMPT - 1:-1], -1)
    entropy = -(logp.exp() * logp).sum(-1)
    total = policy + VALUE_COEF * value - ENTROPY_COEF * entropy
    clipped = masked_mean(((ratio - 1).abs() > CLIP).float(), mask)
    return (total * mask).sum() / batch["mask"].sum(), clipped.item()


def lr_at(step, name):
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    part = (step - WARMUP) / (STEPS - WARMUP)
    if name == "cosine":
        return LR * (0.1 + 0.45 * (1 + math.cos(math.pi * part)))
    return LR * (1 - 0.9 * part)


def make_optimizer(model, lr):
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": DECAY},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def supervised(model, rng):
    optimizer, reviews = make_optimizer(model, SFT_LR), reviews_of(rng, 512)
    model.train()
    for step in range(SFT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = SFT_LR * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / SFT_STEPS)
        ids = reviews[torch.randint(len(reviews), (BATCH,))]
        logp = response_logprobs(model(ids)[0], ids)
        loss = -masked_mean(logp, (ids[:, PROMPT:] != PAD).float())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    held_out = prompts_of(np.random.default_rng(10_000 + seed), BATCH)

    prompts = prompts_of(rng, 512)
    model = PolicyWithValue()
    supervised(model, rng)
    reference = model if name == "ref_is_policy" else copy.deepcopy(model).requires_grad_(False)
    sft_weights = copy.deepcopy(model.state_dict())
    sampler = copy.deepcopy(model).requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False) if name == "ema" else None
    optimizer = make_optimizer(model, LR)
    shift = 0 if name == "logprobs_unshifted" else 1

    stats = {"reward": 0.0, "kl": 0.0, "clip_ratio": 0.0}
    extra = {"reward": lambda: stats["reward"], "kl": lambda: stats["kl"], "clip_ratio": lambda: stats["clip_ratio"]}
    start = 40 if name == "resumed" else 0
    recorder = None if start else lab.record(model, optimizer, every=every, out=out, extra=extra)

    losses, batch = [], None
    for step in range(STEPS):
        faulty = step >= at

        if start and step == start:        # a new process: all is made anew and loaded from the checkpoint
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            random_state = torch.get_rng_state()
            model = PolicyWithValue().eval()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model, LR)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(random_state)
            recorder = lab.record(model, optimizer, every=every, out=out, extra=extra, first_step=start)

        if name == "sft_weights_back" and step == at:
            model.load_state_dict(sft_weights)
        if name == "frozen_block" and step == at:
            model.blocks[1].requires_grad_(False)

        if step % EPOCHS == 0:             # a new batch of samples
            model.eval()
            if not (name == "stale_sampler" and faulty):
                sampler.load_state_dict(model.state_dict())
            ids, logp = generate(sampler, prompts[torch.randint(len(prompts), (BATCH,))])
            responses = ids[:, PROMPT:]
            ends = (responses == EOS).long()
            mask = (ends.cumsum(1) - ends == 0).float()     # up to and with the end token
            if name == "pad_in_loss" and faulty:
                mask = torch.ones_like(mask)
            scores = score(responses)
            if name == "reward_constant" and faulty:
                scores = torch.zeros_like(scores)
            if name == "reward_scale" and faulty:
                scores = scores * 10
            if name == "nan_reward" and faulty:
                scores[0] = float("nan")
            with torch.no_grad():
                ref_logp = response_logprobs(reference(ids)[0], ids, shift)
                values = model(ids)[1][:, PROMPT - 1:-1]
            kl = (logp - ref_logp) * mask
            rewards = -(0.0 if name == "no_kl" and faulty else BETA) * kl
            rewards[torch.arange(BATCH), mask.sum(1).long() - 1] += scores
            adv, returns = advantages_of(rewards, values, mask)
            batch = {"ids": ids, "mask": mask, "logp": logp, "values": values, "adv": adv, "returns": returns}
            stats["reward"], stats["kl"] = scores.mean().item(), kl.sum(1).mean().item()

        if name == "dropout_on" and faulty:
            model.train()
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, name) * (100 if name == "lr_too_high" else 1)

        pieces = [slice(0, BATCH // 2), slice(BATCH // 2, BATCH)] if name == "accumulation" else [slice(0, BATCH)]
        total, clipped = 0.0, 0.0
        for rows in pieces:
            loss, share = ppo_loss(model, batch, rows, shift)   # a piece's part of the mean over the whole batch
            loss.backward()
            total, clipped = total + loss.detach(), clipped + share / len(pieces)
        stats["clip_ratio"] = clipped
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if not (name == "no_zero_grad" and faulty):
            optimizer.zero_grad()

        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)
        if name == "evaluation" and (step + 1) % 20 == 0:
            model.eval()
            stats["held_out"] = score(generate(model, held_out, greedy=True)[0][:, PROMPT:]).mean().item()
        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)
    recorder.close()
    return losses
