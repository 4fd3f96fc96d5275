"""RLOO on a small Llama-like decoder that copies digits in a learnt format, rule-based reward, KL, with AdamW."""
import copy
import math

import lab
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 240
SFT_STEPS = 60
RESUME_AT = 60
WARMUP = 10

DIGITS = 3                 # digits in a prompt and in its answer
PAD, BOS, ASK, CLOSE = 10, 11, 12, 13
VOCAB = 14
NEW = DIGITS + 1           # room for ddd>
WIDTH, HEADS, BLOCKS = 32, 4, 3

PROMPTS, GROUP = 8, 4
RATE = 4e-4
BETA = 0.05
CLIP = 1.0

FAULTS = {
    "rate_jump": dict(
        what="A wrong entry in the schedule multiplies the learning rate by 30.",
        kinds=["rate"], part="all"),
    "rate_zero": dict(
        what="The schedule was made for fewer updates than are run, so the learning rate is zero from here on.",
        kinds=["rate"], part="all"),
    "reward_timeout": dict(
        what="The reward service times out for 40 updates and every answer gets the reward zero.",
        kinds=["reward", "groups"], part="all", lasts=40),
    "reward_sign": dict(
        what="The rule's score is taken as a penalty: the reward has the wrong sign.",
        kinds=["reward"], part="all"),
    "greedy_rollouts": dict(
        what="Rollouts are decoded greedily, so that all answers of a group, and their rewards, are equal.",
        kinds=["groups", "policy"], part="all"),
    "kl_sign": dict(
        what="The KL to the reference is added to the score where it should be subtracted.",
        kinds=["policy"], part="all"),
    "reference_is_policy": dict(
        what="The reference is the policy itself and not a frozen copy, so the KL is always zero.",
        kinds=["policy"], part="all", at=0),
    "stale_rollouts": dict(
        what="The weights of the rollout engine are no longer synchronised, so answers come from an old policy.",
        kinds=["policy"], part="all"),
    "completion_mask": dict(
        what="The completion mask is lost: prompt tokens and padding after the end count in log-probs and KL.",
        kinds=["data", "policy"], part="all"),
    "right_padding": dict(
        what="Prompts are padded on the right before generation, so the answers begin after padding tokens.",
        kinds=["data"], part="all"),
    "no_zero_grad": dict(
        what="Gradients are no longer set to zero between updates and add up.",
        kinds=["gradients"], part="all"),
    "frozen_block": dict(
        what="The parameters of block 1 no longer require gradients, so the block does not train.",
        kinds=["frozen"], part="block1"),
    "std_without_eps": dict(
        what="Rewards are divided by the group's deviation without an epsilon: 0/0 is NaN in groups of equal rewards.",
        kinds=["not_finite", "groups"], part="all"),
}

HEALTHY = {
    "accumulation": "The prompts of an update are rolled out in two micro-batches whose gradients are accumulated.",
    "evaluation": "Every 20 updates the policy answers held-out prompts greedily in eval mode.",
    "resume": "The run goes on from a checkpoint of step 60 with the optimizer's state.",
    "cosine": "The learning rate falls by a cosine to a tenth in place of staying constant.",
    "average": "An exponential average of the weights is kept aside.",
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


def rotate(x, cos, sin):
    return x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin, mask):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).view(n, t, 3 * HEADS, -1).transpose(1, 2).split(HEADS, dim=1)
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).transpose(-1, -2) / math.sqrt(WIDTH // HEADS) + mask
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(n, t, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attn = RMSNorm(WIDTH), Attention()
        self.norm2, self.mlp = RMSNorm(WIDTH), MLP()

    def forward(self, x, cos, sin, mask):
        x = x + self.attn(self.norm1(x), cos, sin, mask)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.arange(32)[:, None] * 100.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", torch.cat([angles.cos(), angles.cos()], dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat([-angles.sin(), angles.sin()], dim=-1), persistent=False)
        self.register_buffer("mask", torch.full((32, 32), -1e9).triu(1), persistent=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.12 / math.sqrt(2 * BLOCKS) if deep else 0.12)

    def forward(self, tokens):
        t = tokens.shape[1]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t], self.mask[:t, :t])
        return self.head(self.norm(x))


def make_prompts(n, rng):
    digits = torch.randint(0, 10, (n, DIGITS), generator=rng)
    return torch.cat([torch.full((n, 1), BOS), digits, torch.full((n, 1), ASK)], dim=1)


def supervised(model, rng):
    """Teaches the format ddd>; only about half of the digits in these answers are the right ones."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01, fused=True)
    for step in range(SFT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 10) * (1 - 0.9 * step / SFT_STEPS)
        prompts = make_prompts(48, rng)
        n = len(prompts)
        guess = torch.randint(0, 10, (n, DIGITS), generator=rng)
        keep = torch.rand(n, DIGITS, generator=rng) < 0.5
        answer = torch.where(keep, prompts[:, 1:1 + DIGITS], guess)
        tokens = torch.cat([prompts, answer, torch.full((n, 1), CLOSE)], dim=1)
        start = prompts.shape[1]
        logits = model(tokens[:, :-1])[:, start - 1:]
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), tokens[:, start:].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def generate(model, prompts, greedy=False):
    tokens = prompts
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(NEW):
        logits = model(tokens)[:, -1].float()
        if not greedy:   # Gumbel-max, temperature 1
            logits = logits - torch.log(-torch.log(torch.rand_like(logits).clamp(1e-9, 1 - 1e-7)))
        token = logits.argmax(-1).masked_fill(done, PAD)
        done = done | (token == CLOSE)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
    return tokens


def rule_reward(prompts, answers):
    """0.2 for the format ddd>, and up to 0.8 for right digits in it."""
    inner = answers[:, :DIGITS]
    formed = (inner < 10).all(1) & (answers[:, DIGITS] == CLOSE)
    right = (inner == prompts[:, 1:1 + DIGITS]).float().mean(1)
    return formed.float() * (0.2 + 0.8 * right)


def token_logps(model, tokens):
    logps = model(tokens[:, :-1]).float().log_softmax(-1)
    return logps.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def make_optimizer(model):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), eps=1e-8, fused=True)


def rloo_loss(model, ref, engine, prompts, fault):
    """One batch of groups: rollouts, rewards, leave-one-out advantages, REINFORCE loss."""
    prompts = prompts.repeat_interleave(GROUP, dim=0)
    if fault == "right_padding":
        prompts = F.pad(prompts, (0, -prompts.shape[1] % 8), value=PAD)
    start = prompts.shape[1]
    tokens = generate(engine, prompts, greedy=fault == "greedy_rollouts")
    answers = tokens[:, start:]

    reward = rule_reward(prompts, answers)
    if fault == "reward_timeout":
        reward = torch.zeros_like(reward)
    if fault == "reward_sign":
        reward = -reward

    mask = torch.zeros(tokens[:, 1:].shape)
    mask[:, start - 1:] = (answers != PAD).float()
    if fault == "completion_mask":
        mask = torch.ones_like(mask)

    logps = (token_logps(model, tokens) * mask).sum(1)
    with torch.no_grad():
        ref_logps = (token_logps(ref, tokens) * mask).sum(1)
    kl = logps.detach() - ref_logps

    grouped = reward.view(-1, GROUP)
    spread = grouped.std(1)
    stats = {"reward": reward.mean().item(), "kl": kl.mean().item(),
             "zero_variance_groups": (spread < 1e-6).float().mean().item()}

    if fault == "std_without_eps":
        grouped = (grouped - grouped.mean(1, keepdim=True)) / grouped.std(1, keepdim=True)
    if fault == "kl_sign":
        score = grouped + BETA * kl.view(-1, GROUP)
    else:
        score = grouped - BETA * kl.view(-1, GROUP)
    baseline = (score.sum(1, keepdim=True) - score) / (GROUP - 1)
    advantage = (score - baseline).view(-1)
    return -(advantage * logps).mean(), stats


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(seed + 1000)

    model = Decoder()
    supervised(model, rng)
    ref = model if name == "reference_is_policy" else copy.deepcopy(model).requires_grad_(False)
    engine = copy.deepcopy(model).requires_grad_(False)
    average = copy.deepcopy(model).requires_grad_(False) if name == "average" else None
    held_out = make_prompts(24, torch.Generator().manual_seed(7))
    optimizer = make_optimizer(model)

    stats = {"reward": 0.0, "kl": 0.0, "zero_variance_groups": 0.0}
    extra = {key: (lambda key=key: stats[key]) for key in stats}
    recorder = None
    if name != "resume":
        recorder = lab.record(model, optimizer, every=every, out=out, extra=extra)

    parts = 2 if name == "accumulation" else 1
    losses, scores = [], []
    for step in range(STEPS):
        fault = name if name in FAULTS and at <= step < at + lasts else None

        if name == "resume" and step == RESUME_AT:
            saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(optimizer.state_dict())}
            state = torch.get_rng_state()
            model = Decoder()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(state)
            recorder = lab.record(model, optimizer, every=every, out=out, extra=extra, first_step=RESUME_AT)

        factor = min(1.0, (step + 1) / WARMUP)
        if name == "cosine":
            factor *= 0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS))
        if fault == "rate_jump":
            factor *= 30
        if fault == "rate_zero":
            factor = 0.0
        for group in optimizer.param_groups:
            group["lr"] = RATE * factor

        if fault == "frozen_block":
            model.blocks[1].requires_grad_(False)
        if fault != "stale_rollouts":
            engine.load_state_dict(model.state_dict())

        total, collected = 0.0, []
        for prompts in make_prompts(PROMPTS, rng).chunk(parts):
            loss, part_stats = rloo_loss(model, ref, engine, prompts, fault)
            (loss / parts).backward()
            total += loss.item() / parts
            collected.append(part_stats)
        stats.update({key: sum(s[key] for s in collected) / parts for key in stats})

        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fault != "no_zero_grad":
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(total)
        losses.append(total)

        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)
        if name == "evaluation" and (step + 1) % 20 == 0:
            model.eval()
            answers = generate(model, held_out, greedy=True)[:, held_out.shape[1]:]
            scores.append(rule_reward(held_out, answers).mean().item())
            model.train()
    recorder.close()
    return losses
