"""GRPO on small string puzzles (copy, reverse, successor, complement): a 3-block transformer, clipped ratios, KL, AdamW."""

import copy
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240

PAD, EOS, EQUALS, FIRST_OP, FIRST_DIGIT, DIGITS = 0, 1, 2, 3, 7, 8
VOCABULARY = FIRST_DIGIT + DIGITS
LONGEST = 4  # digits in a puzzle, at most
PROMPT, ANSWER = LONGEST + 2, LONGEST + 1  # operator, digits, "=", then digits and the end of the sequence
WIDTH, HEADS, BLOCKS = 32, 2, 3

PUZZLES, GROUP, EPOCHS = 8, 8, 2  # each rollout is used for two updates
RATE, WARM_UP, CLIP, BETA, MAX_NORM = 1e-3, 10, 0.2, 0.05, 1.0


# ---- puzzles and their verifier


def solve(op: int, digits: list[int]) -> list[int]:
    if op == 0:
        return digits
    backwards = digits[::-1]
    if op == 1:
        return backwards
    return [(d + 1) % DIGITS if op == 2 else DIGITS - 1 - d for d in backwards]


def make_puzzles(n: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, padded on the left, and right answers, padded on the right."""
    prompts = np.full((n, PROMPT), PAD)
    answers = np.full((n, ANSWER), PAD)
    for row in range(n):
        op = int(rng.integers(4))
        digits = rng.integers(DIGITS, size=int(rng.integers(2, LONGEST + 1))).tolist()
        text = [FIRST_OP + op] + [FIRST_DIGIT + d for d in digits] + [EQUALS]
        right = [FIRST_DIGIT + d for d in solve(op, digits)] + [EOS]
        prompts[row, PROMPT - len(text) :] = text
        answers[row, : len(right)] = right
    return torch.from_numpy(prompts), torch.from_numpy(answers)


def verify(samples: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """The share of places that are right, over the longer of sample and answer."""
    used = (samples != PAD) | (answers != PAD)
    return ((samples == answers) & used).sum(1) / used.sum(1)


# ---- the model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.skip_norms = False

    def forward(self, x: torch.Tensor, mask: torch.Tensor, past: list[torch.Tensor] | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        h = x if self.skip_norms else self.norm1(x)
        q, k, v = self.qkv(h).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if past is not None:  # keys and values of earlier tokens, while sampling
            past[:] = [torch.cat([old, new], 2) for old, new in zip(past, (k, v))] if past else [k, v]
            k, v = past
        h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.drop(self.out(h.transpose(1, 2).reshape(rows, length, WIDTH)))
        h = x if self.skip_norms else self.norm2(x)
        return x + self.drop(self.down(F.gelu(self.up(h))))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(PROMPT + ANSWER, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.3)
        self.mask_padding = True
        self.logit_scale = 1.0

    def forward(self, ids: torch.Tensor, cache: list[list] | None = None) -> torch.Tensor:
        """Logits; with a cache, only those of the tokens which it lacks."""
        length = ids.shape[1]
        real = ids != PAD
        mask = torch.ones(length, length, dtype=torch.bool).tril()[None]
        if self.mask_padding:
            mask = mask & (real[:, None, :] | torch.eye(length, dtype=torch.bool))
        done = cache[0][0].shape[2] if cache and cache[0] else 0
        x = self.tokens(ids[:, done:]) + self.positions.weight[done:length]
        for i, block in enumerate(self.blocks):
            x = block(x, mask[:, None, done:], cache[i] if cache else None)
        return self.head(self.norm(x)) * self.logit_scale


@functools.lru_cache(maxsize=4)
def supervised_start(seed: int) -> Policy:
    """A short supervised start on answers of which the later ones have mistakes; never recorded."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(1000 + seed)
    model = Policy().eval()
    steps = 200
    optimizer = torch.optim.AdamW(model.parameters(), lr=7e-3, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 7e-3 * min((step + 1) / 20, 1.5 * (1 - step / steps), 1.0)
        prompts, answers = make_puzzles(64, rng)
        wrong = torch.from_numpy(rng.random(answers.shape) < (0.4 if step >= 150 else 0.0)) & (answers > EOS)
        noise = torch.from_numpy(rng.integers(FIRST_DIGIT, VOCABULARY, answers.shape))
        answers = torch.where(wrong, noise, answers)
        ids = torch.cat([prompts, answers], 1)
        logits = model(ids[:, :-1])[:, PROMPT - 1 :]
        loss = F.cross_entropy(logits.transpose(1, 2), answers, ignore_index=PAD)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


# ---- rollouts and the loss


@torch.no_grad()
def generate(
    model: Policy, prompts: torch.Tensor, generator: torch.Generator | None, same_noise: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples (the most likely tokens without a generator) and the log-probabilities of their tokens."""
    ids, logs, cache = prompts, [], [[] for _ in model.blocks]
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(ANSWER):
        log_p = model(ids, cache)[:, -1].log_softmax(-1)
        score = log_p
        if generator is not None:
            uniform = torch.rand(log_p.shape, generator=generator).clamp(1e-9, 1 - 1e-6)
            if same_noise:
                uniform = uniform[::GROUP].repeat_interleave(GROUP, 0)
            score = log_p - (-uniform.log()).log()
        token = score.argmax(-1)
        logs.append(log_p.gather(1, token[:, None])[:, 0])
        token = token.masked_fill(done, PAD)
        done = done | (token == EOS)
        ids = torch.cat([ids, token[:, None]], 1)
    return ids[:, PROMPT:], torch.stack(logs, 1)


def token_logs(model: Policy, prompts: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    logits = model(torch.cat([prompts, samples], 1)[:, :-1])[:, PROMPT - 1 :]
    return logits.log_softmax(-1).gather(2, samples[..., None])[..., 0]


def rollout(sampler: Policy, reference: Policy, rng, generator, name: str, stats: dict[str, float]) -> dict:
    """A group of samples for each puzzle, with their advantages; `name` is the fault that is on now."""
    prompts, answers = make_puzzles(PUZZLES, rng)
    prompts = prompts.repeat_interleave(GROUP, 0)
    answers = answers.repeat_interleave(GROUP, 0)
    samples, old = generate(sampler, prompts, generator, same_noise=name == "same_seed_in_group")
    if name == "answers_of_other_prompts":
        answers = answers.roll(GROUP, 0)
    rewards = verify(samples, answers).view(PUZZLES, GROUP)
    mean, std = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
    epsilon = 0.0 if name == "std_without_epsilon" else 1e-2
    advantages = ((rewards - mean) / (std + epsilon)).view(-1, 1)
    if name == "advantages_negated":
        advantages = -advantages
    with torch.no_grad():
        reference_logs = token_logs(reference, prompts, samples)
    stats["reward"] = rewards.mean().item()
    stats["zero_variance_groups"] = (std < 1e-6).float().mean().item()
    return dict(
        prompts=prompts, samples=samples, old=old, reference=reference_logs, advantages=advantages,
        mask=(samples != PAD).float(),
    )  # fmt: skip


def grpo_loss(policy: Policy, batch: dict, tokens: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """The loss, the KL to the reference and the share of clipped ratios, each summed over samples by `tokens`."""
    logs = token_logs(policy, batch["prompts"], batch["samples"])
    mask, advantages = batch["mask"], batch["advantages"]
    ratio = (logs - batch["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    gap = batch["reference"] - logs
    kl = gap.exp() - gap - 1
    loss = ((BETA * kl - gain) * mask).sum() / tokens
    outside = ((ratio != clipped).float() * mask).sum() / tokens
    return loss, ((kl * mask).sum() / tokens).item(), outside.item()


def halves(batch: dict) -> list[dict]:
    middle = len(batch["samples"]) // 2
    return [{k: v[:middle] for k, v in batch.items()}, {k: v[middle:] for k, v in batch.items()}]


def make_optimizer(model: Policy) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)


def rate_at(step: int, name: str) -> float:
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "decay_to_zero":
        rate *= 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return rate


# ---- the loop


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    start = supervised_start(seed)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    policy, sampler, reference = (copy.deepcopy(start) for _ in range(3))
    if name == "block_not_loaded":
        policy.blocks[2].load_state_dict(Block().state_dict())
    optimizer = make_optimizer(policy)
    stats = dict(reward=0.0, kl=0.0, zero_variance_groups=0.0, clip_ratio=0.0)
    extra = {key: functools.partial(stats.__getitem__, key) for key in stats}
    recorder = None
    if name != "resumed":
        recorder = lab.record(policy, optimizer, every=every, out=out, extra=extra)
    losses, kls, outsides, batch = [], [], [], {}
    for step in range(STEPS):
        fault = name if step >= at else "plain"
        if step == at and fault == "resumed":
            saved = copy.deepcopy([policy.state_dict(), optimizer.state_dict()])
            policy = Policy().eval()
            policy.load_state_dict(saved[0])
            optimizer = make_optimizer(policy)
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(policy, optimizer, every=every, out=out, first_step=at, extra=extra)
        if step == at and fault == "block_frozen":
            policy.blocks[0].requires_grad_(False)
        for model in (policy, sampler, reference):
            model.mask_padding = fault != "padding_not_masked"
            model.logit_scale = 0.25 if fault == "logits_scaled_down" else 1.0
            model.blocks[1].skip_norms = fault == "norms_skipped"

        if step % EPOCHS == 0:
            if fault != "sampler_not_synced":
                sampler.load_state_dict(policy.state_dict())
            if name == "reference_refreshed" and step > 0 and step % 60 == 0:
                reference.load_state_dict(policy.state_dict())
            if fault == "optimizer_remade":
                optimizer.state.clear()
            batch = rollout(sampler, reference, rng, generator, fault, stats)
            kls, outsides = [], []

        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name) * (25 if fault == "rate_too_high" else 1)
        policy.train(fault == "dropout_in_updates")
        loss = kl = outside = 0.0
        for part in halves(batch) if name == "accumulated" else [batch]:
            part_loss, part_kl, part_outside = grpo_loss(policy, part, batch["mask"].sum())
            part_loss.backward()
            loss, kl, outside = loss + part_loss.detach(), kl + part_kl, outside + part_outside
        nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
        optimizer.step()
        if fault != "gradients_not_zeroed":
            optimizer.zero_grad()
        policy.eval()
        if name == "bf16_weights":
            with torch.no_grad():
                for weight in policy.parameters():
                    weight.copy_(weight.bfloat16().float())

        kls.append(kl)
        outsides.append(outside)
        stats["kl"], stats["clip_ratio"] = float(np.mean(kls)), float(np.mean(outsides))
        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)
        if name == "evaluated" and step % 20 == 19:
            evaluate(policy)
        if WATCH is not None:
            WATCH(step, policy, stats)
    recorder.close()
    return losses


WATCH = None  # for the check alone: called after each update


def evaluate(policy: Policy) -> float:
    """The reward of greedy answers on puzzles kept aside."""
    prompts, answers = make_puzzles(64, np.random.default_rng(12345))
    return verify(generate(policy, prompts, None)[0], answers).mean().item()


FAULTS = {
    "answers_of_other_prompts": dict(kinds=["reward", "data"], part="all",
        what="The verifier compares samples with the answer of the puzzle before (rows out of line)."),
    "same_seed_in_group": dict(kinds=["groups"], part="all",
        what="All samples of a group are drawn with the same random numbers, so they are the same."),
    "sampler_not_synced": dict(kinds=["policy"], part="all",
        what="The sampler no longer gets the policy's new weights: samples and ratios are stale."),
    "advantages_negated": dict(kinds=["policy", "reward"], part="all",
        what="A sign error: advantages are the mean minus the reward, so the policy unlearns what earns reward."),
    "std_without_epsilon": dict(kinds=["not_finite", "groups"], part="all",
        what="Advantages are divided by a group's standard deviation with no epsilon: 0/0 in groups that all agree."),
    "rate_too_high": dict(kinds=["rate", "instability"], part="all",
        what="The learning rate is 25 times what it should be."),
    "optimizer_remade": dict(kinds=["optimizer"], part="all",
        what="AdamW is made anew at every rollout, so it never has moments older than two updates."),
    "gradients_not_zeroed": dict(kinds=["gradients", "optimizer"], part="all",
        what="zero_grad is not called any more: gradients add up over updates."),
    "block_not_loaded": dict(kinds=["weights"], part="block2", at=0,
        what="The supervised checkpoint was loaded without block2 of the policy, which starts from fresh weights."),
    "bf16_weights": dict(kinds=["precision", "weights"], part="all", at=0,
        what="The policy's weights are kept in bf16 with no fp32 master copy: small updates are rounded away."),
    "dropout_in_updates": dict(kinds=["data", "policy"], part="all",
        what="Dropout is on in the updates (model.train()), while samples and reference are without it."),
    "padding_not_masked": dict(kinds=["attention", "data"], part="all",
        what="Attention no longer masks the padding on the left of the prompts."),
    "norms_skipped": dict(kinds=["activations"], part="block1",
        what="The forward pass of block1 leaves out its two LayerNorms."),
    "logits_scaled_down": dict(kinds=["output_logits", "policy"], part="head",
        what="The head's logits are multiplied by 0.25, so the policy is four times as hot."),
    "block_frozen": dict(kinds=["frozen", "dead"], part="block0",
        what="block0 is set to requires_grad False and is no longer trained."),
}  # fmt: skip

HEALTHY = {
    "decay_to_zero": "The rate follows a cosine down to zero at the last step.",
    "accumulated": "Each update adds up the gradients of two half batches.",
    "reference_refreshed": "By plan the reference becomes a copy of the policy every 60 steps; the KL starts anew.",
    "evaluated": "Greedy evaluation on puzzles kept aside every 20 steps.",
    "resumed": "The recorded run goes on at a step from a checkpoint with all its state (first_step).",
}
