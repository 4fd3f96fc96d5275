"""GRPO with a verifiable reward for a small Qwen2-like decoder on short additions, with AdamW."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
PLUS, EQUALS, EOS, PAD, VOCAB = 10, 11, 12, 13, 14
PROMPT, ANSWER = 5, 3                       # "07+5=" and at most "20" with its end
WIDTH, HEADS, KV_HEADS, DEPTH = 32, 4, 2, 3
GROUP, PROMPTS, MINIBATCHES = 8, 4, 3       # samples of a prompt, prompts of an update, updates of a rollout
LR, WARMUP, PRETRAIN = 7e-4, 12, 160
CLIP, BETA, MAX_NORM = 0.2, 0.04, 1.0

FAULTS = {
    "lr_high": dict(
        what="The learning rate is multiplied by 30, as a mistyped exponent does after a restart.",
        kinds=["rate"], part="all"),
    "lr_of_a_large_model": dict(
        what="The learning rate 1e-6 was copied from a recipe for a model of billions of weights; nothing is learnt.",
        kinds=["rate"], part="all", at=0),
    "verifier_broken": dict(
        what="The verifier's parser does not find the answer any more, so that every sample gets reward 0.",
        kinds=["reward", "groups"], part="all"),
    "advantage_sign": dict(
        what="The advantage is the group's mean less the reward, so that wrong answers are reinforced.",
        kinds=["policy", "reward", "gradients"], part="all"),
    "cold_sampling": dict(
        what="Rollouts are sampled at temperature 0.02, so that a group's answers and rewards are nearly all equal.",
        kinds=["groups", "data"], part="all"),
    "std_without_eps": dict(
        what="Advantages are divided by the group's deviation without an epsilon: 0/0 in groups of equal rewards.",
        kinds=["not_finite", "groups"], part="all"),
    "kl_coefficient": dict(
        what="The coefficient of the KL to the reference is 4 where 0.04 was meant; the policy is pulled back to it.",
        kinds=["policy"], part="all"),
    "engine_mismatch": dict(
        what="Old log-probs are the sampling engine's at temperature 0.7, those of the update are at 1: wrong ratios.",
        kinds=["policy"], part="all"),
    "no_zero_grad": dict(
        what="Gradients are not zeroed after the update any more and add up.",
        kinds=["gradients"], part="all"),
    "frozen_block": dict(
        what="requires_grad of the middle block is switched off and it no longer trains.",
        kinds=["frozen"], part="block1"),
    "block_reset": dict(
        what="A reload with missing keys leaves the last block with freshly initialised weights.",
        kinds=["weights"], part="block2"),
    "dropout_on": dict(
        what="The policy is in train mode in its updates, so that dropout disturbs its log-probs and the ratios.",
        kinds=["data", "policy"], part="all"),
    "groups_mixed": dict(
        what="Rewards are reshaped in the wrong order, so that a group's mean is over samples of other prompts.",
        kinds=["groups", "policy"], part="all", at=0),
}

HEALTHY = {
    "accumulation": "Each update accumulates the gradients of two halves of its prompts.",
    "evaluation": "Every 20 updates greedy answers to all additions are checked, without gradients.",
    "resumed": "The run is stopped at half its length and goes on from a checkpoint of model and optimizer.",
    "cosine": "The learning rate falls along a cosine to a tenth instead of staying constant.",
    "batch_ramp": "The number of prompts of an update grows from 2 to 4 over the first half of the run.",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, KV_HEADS * self.size)
        self.v = nn.Linear(WIDTH, KV_HEADS * self.size)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        q = rotate(self.q(x).view(b, t, HEADS, self.size).transpose(1, 2), cos, sin)
        k = rotate(self.k(x).view(b, t, KV_HEADS, self.size).transpose(1, 2), cos, sin)
        v = self.v(x).view(b, t, KV_HEADS, self.size).transpose(1, 2)
        k, v = (z.repeat_interleave(HEADS // KV_HEADS, dim=1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, WIDTH))


class MLP(nn.Module):
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
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        self.norm2, self.mlp = nn.RMSNorm(WIDTH, eps=1e-6), MLP()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, cos, sin):
        x = x + self.dropout(self.attention(self.norm1(x), cos, sin))
        return x + self.dropout(self.mlp(self.norm2(x)))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.5)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        size = WIDTH // HEADS
        frequencies = 100.0 ** (-torch.arange(0, size, 2) / size)
        angles = torch.arange(PROMPT + ANSWER)[:, None] * frequencies
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.apply(init_weights)

    def forward(self, tokens):
        x, t = self.embedding(tokens), tokens.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:t], self.sin[:t])
        return self.head(self.norm(x))


def make_prompts(a, b):
    return torch.stack([a // 10, a % 10, torch.full_like(a, PLUS), b, torch.full_like(a, EQUALS)], dim=1)


def right_answers(a, b):
    total = a + b
    one = torch.stack([total, torch.full_like(a, EOS), torch.full_like(a, PAD)], dim=1)
    two = torch.stack([total // 10, total % 10, torch.full_like(a, EOS)], dim=1)
    return torch.where((total < 10)[:, None], one, two)


def problems(n, gen):
    return torch.randint(0, 12, (n,), generator=gen), torch.randint(0, 10, (n,), generator=gen)


def log_probs(model, tokens, temperature=1.0):
    logits = model(tokens[:, :-1])[:, PROMPT - 1:] / temperature
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def generate(model, prompts, temperature, gen):
    tokens, done = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(ANSWER):
        logits = model(tokens)[:, -1]
        if temperature > 0:
            uniform = torch.rand(logits.shape, generator=gen).clamp(1e-9, 1 - 1e-7)
            logits = logits / temperature - (-uniform.log()).log()
        token = logits.argmax(-1).masked_fill(done, PAD)
        done = done | (token == EOS)
        tokens = torch.cat([tokens, token[:, None]], dim=1)
    return tokens


def answer_mask(answers):
    ended = (answers == EOS).cumsum(1) - (answers == EOS).long()
    return (ended == 0).float()


def verify(answers, a, b):
    return (answers == right_answers(a, b)).all(dim=1).float()


def pretrain(model, gen):
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.99), weight_decay=0.01, fused=True)
    for step in range(PRETRAIN):
        optimizer.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 20)
        a, b = problems(32, gen)
        tokens = torch.cat([make_prompts(a, b), right_answers(a, b)], dim=1)
        mask = answer_mask(tokens[:, PROMPT:])
        loss = -(log_probs(model, tokens) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


@torch.no_grad()
def rollout(model, reference, fault, gen):
    """Sample a group of answers to each of new prompts, verify them, and give what the updates need."""
    a, b = problems(PROMPTS * MINIBATCHES, gen)
    a, b = a.repeat_interleave(GROUP), b.repeat_interleave(GROUP)
    temperature = {"cold_sampling": 0.02, "engine_mismatch": 0.7}.get(fault, 1.0)
    tokens = generate(model, make_prompts(a, b), temperature, gen)
    answers = tokens[:, PROMPT:]
    if fault == "verifier_broken":
        answers = answers.flip(1)
    rewards = verify(answers, a, b)
    old = log_probs(model, tokens, temperature if fault == "engine_mismatch" else 1.0)
    return dict(tokens=tokens, mask=answer_mask(tokens[:, PROMPT:]), rewards=rewards, old=old,
                reference=log_probs(reference, tokens))


def group_advantages(rewards, fault):
    groups = rewards.view(-1, GROUP)
    if fault == "groups_mixed":
        groups = rewards.view(GROUP, -1).t()
    mean, std = groups.mean(1, keepdim=True), groups.std(1, keepdim=True)
    centred = mean - groups if fault == "advantage_sign" else groups - mean
    advantages = centred / std if fault == "std_without_eps" else centred / (std + 1e-4)
    return advantages.reshape(-1), (std < 1e-6).float().mean().item()


def grpo_loss(model, batch, advantages, beta):
    mask, new = batch["mask"], log_probs(model, batch["tokens"])
    ratio = (new - batch["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    adv = advantages[:, None]
    surrogate = torch.min(ratio * adv, clipped * adv)
    delta = batch["reference"] - new
    kl = delta.exp() - delta - 1
    loss = ((beta * kl - surrogate) * mask).sum() / mask.sum()
    with torch.no_grad():
        outside = (((ratio - 1).abs() > CLIP).float() * mask).sum() / mask.sum()
        mean_kl = (kl * mask).sum() / mask.sum()
    return loss, mean_kl.item(), outside.item()


def learning_rate(name, step, fault):
    lr = LR * min(1.0, (step + 1) / WARMUP)
    if name == "cosine":
        lr *= 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    if fault == "lr_high":
        lr *= 30
    if fault == "lr_of_a_large_model":
        lr *= 1e-6 / LR
    return lr


def train(name, seed, at, every, out):
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(seed + 1000)
    model = Decoder()
    pretrain(model, gen)
    model.eval()                             # dropout only in pretraining
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = make_optimizer(model)
    stats = dict(reward=0.0, kl=0.0, zero_variance_groups=0.0, clip_ratio=0.0)
    extra = {key: (lambda key=key: stats[key]) for key in stats}
    recorder = lab.record(model, optimizer, every=every, out=out, extra=extra)
    losses = []
    for step in range(STEPS):
        fault = name if name in FAULTS and step >= at else None
        if name == "resumed" and step == STEPS // 2:
            recorder.close()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = Decoder().eval()
            model.load_state_dict(saved[0])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, extra=extra, first_step=step)
        if fault == "block_reset" and step == at:
            model.blocks[2].apply(init_weights)
        if fault == "frozen_block" and step == at:
            model.blocks[1].requires_grad_(False)

        turn = step % MINIBATCHES
        if turn == 0:
            samples = rollout(model, reference, fault, gen)
        prompts = PROMPTS
        if name == "batch_ramp":
            prompts = min(PROMPTS, 2 + 4 * step // STEPS)
        start = turn * PROMPTS * GROUP
        batch = {key: value[start:start + prompts * GROUP] for key, value in samples.items()}
        advantages, stats["zero_variance_groups"] = group_advantages(batch["rewards"], fault)
        stats["reward"] = batch["rewards"].mean().item()

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(name, step, fault)
        if fault == "dropout_on":
            model.train()
        beta = 100 * BETA if fault == "kl_coefficient" else BETA
        parts = 2 if name == "accumulation" else 1
        size = len(advantages) // parts
        loss, stats["kl"], stats["clip_ratio"] = 0.0, 0.0, 0.0
        for i in range(parts):
            rows = slice(i * size, (i + 1) * size)
            part = {key: value[rows] for key, value in batch.items()}
            part_loss, kl, outside = grpo_loss(model, part, advantages[rows], beta)
            (part_loss / parts).backward()
            loss = loss + part_loss.detach() / parts
            stats["kl"] += kl / parts
            stats["clip_ratio"] += outside / parts
        model.eval()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        if fault != "no_zero_grad":
            optimizer.zero_grad()
        recorder.step(loss)
        losses.append(loss.item())

        if name == "evaluation" and (step + 1) % 20 == 0:
            a, b = torch.arange(120) // 10, torch.arange(120) % 10
            answers = generate(model, make_prompts(a, b), 0.0, gen)[:, PROMPT:]
            stats["accuracy"] = verify(answers, a, b).mean().item()
    recorder.close()
    return losses
