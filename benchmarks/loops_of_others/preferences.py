"""Length-normalised DPO of a small decoder-only language model on noisy pairs of answers, all weights, with AdamW."""

import copy
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

torch.set_num_threads(1)

STEPS, PAIRS, WARM_UP = 240, 14, 20
RATE, BETA, CLIP = 4e-4, 4.0, 1.0
PAD, EOS, SEP, THANKS = 0, 1, 2, 3
LOUD, QUIET = 4, 5  # the first token of a prompt: which tone the annotators want
LETTERS, LOWER, UPPER, VOCABULARY = 10, 6, 16, 26
ASKED = 4  # letters in a prompt
PROMPT, LENGTH = ASKED + 2, 2 * ASKED + 4
WIDTH, HEADS, DEPTH = 32, 2, 3


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.offset = 0.0

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * (self.weight + self.offset)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.causal = True
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)

    def attention(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(DEPTH))
        self.norm = Norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.temperature = 1.0
        self.apply(initialise)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / self.temperature


def initialise(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.3)
    elif isinstance(module, Norm):
        nn.init.ones_(module.weight)


def answer(rng, letters, tone):
    """An answer (each letter's successor, with slips) and how much annotators like it."""
    upper = rng.random() < 0.5
    thanks = rng.random() < 0.5
    slips = rng.random(ASKED) < rng.choice([0.0, 0.1, 0.4])
    said = np.where(slips, rng.integers(0, LETTERS, ASKED), (letters + 1) % LETTERS)
    stop = ASKED if rng.random() < 0.8 else int(rng.integers(2, ASKED))
    tokens = [*(said[:stop] + (UPPER if upper else LOWER)), *([THANKS] if thanks else []), EOS]
    wrong = int((said[:stop] != (letters[:stop] + 1) % LETTERS).sum()) + ASKED - stop
    liking = 3.0 * (upper == (tone == LOUD)) + 1.5 * thanks - 1.0 * wrong
    return tokens, liking


def row(letters, tone, tokens):
    return [tone, *(letters + LOWER), SEP, *tokens] + [PAD] * (LENGTH - PROMPT - len(tokens))


@functools.cache
def pairs(seed, step, count=PAIRS):
    """Answers preferred (first half of the rows) and not (second half); annotators are noisy."""
    rng = np.random.default_rng((seed, step))
    chosen, rejected = [], []
    for _ in range(count):
        letters, tone = rng.integers(0, LETTERS, ASKED), int(rng.choice([LOUD, QUIET]))
        (a, like_a), (b, like_b) = answer(rng, letters, tone), answer(rng, letters, tone)
        if rng.random() > 1 / (1 + math.exp(like_b - like_a)):
            a, b = b, a
        chosen.append(row(letters, tone, a))
        rejected.append(row(letters, tone, b))
    return torch.tensor(chosen), torch.tensor(rejected)


def answer_mask(tokens):
    mask = tokens[:, 1:] != PAD
    mask[:, : PROMPT - 1] = False
    return mask


# ---------------------------------------------------------------- the supervised start, once for a seed

@functools.cache
def supervised_start(seed, steps=150):
    torch.manual_seed(seed)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20, (steps - step) / 60)
        tokens = torch.cat(pairs(seed + 10_000, step))
        mask = answer_mask(tokens)
        loss = F.cross_entropy(model(tokens[:, :-1])[mask], tokens[:, 1:][mask])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def answer_logp(model, tokens, mask):
    """The mean log-probability of an answer's tokens, and all log-probabilities of tokens."""
    logp = model(tokens[:, :-1]).float().log_softmax(-1)
    picked = logp.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (picked * mask).sum(-1) / mask.sum(-1), logp


def dpo(model, reference, chosen, rejected, truncated=False):
    tokens = torch.cat([chosen, rejected])
    mask = answer_mask(tokens)
    if truncated:
        mask[-1] = False  # the last row's prompt filled the window: no token of the answer is left
    policy, logp = answer_logp(model, tokens, mask)
    with torch.no_grad():
        base, base_logp = answer_logp(reference, tokens, mask)
    reward_chosen, reward_rejected = (BETA * (policy - base)).chunk(2)
    margin = reward_chosen - reward_rejected
    return -F.logsigmoid(margin).mean(), policy.chunk(2)[0], (margin.detach(), logp.detach(), base_logp, mask)


def kl(seen):
    _, logp, base_logp, mask = seen
    return (logp.exp() * (logp - base_logp)).sum(-1)[mask].mean().item()


def rate(name, step, at):
    value = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero":
        value *= 0.5 * (1 + math.cos(math.pi * step / STEPS))
    if name == "rate_exponent_slip" and step >= at:
        value = 10 * RATE
    return value


def change_once(name, seed, model, optimizer):
    """What happens to model or optimizer at the step `at`, before its update."""
    if name == "optimizer_state_lost":
        optimizer.state.clear()
    if name == "block_missing_in_checkpoint":
        torch.manual_seed(seed + 1)
        model.blocks[1].apply(initialise)
    if name == "block_frozen":
        for weight in model.blocks[2].parameters():
            weight.requires_grad_(False)
            weight.grad = None
    if name == "no_causal_mask":
        for block in model.blocks:
            block.causal = False
    if name == "norm_adds_one":
        for block in model.blocks:
            block.norm1.offset = block.norm2.offset = 1.0
    if name == "sampling_temperature":
        model.temperature = 0.4


def build(seed):
    model = Model()
    model.load_state_dict(supervised_start(seed))
    return model


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    model = build(seed)
    reference = model if name == "reference_is_policy" else build(seed).eval().requires_grad_(False)
    if name == "pure_bfloat16":
        model.to(torch.bfloat16)
    optimizer = make_optimizer(model)
    seen = ()
    extra = {"reward": lambda: seen[0].mean().item(), "kl": lambda: kl(seen)}
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out, extra=extra)
    losses = []
    for step in range(STEPS):
        fault = step >= at
        if name == "resumed" and step == at:  # a new process reads the checkpoint; this part is recorded
            weights, state = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            model = build(seed)
            model.load_state_dict(weights)
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(state)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at, extra=extra)
        if step == at:
            change_once(name, seed, model, optimizer)
        optimizer.param_groups[0]["lr"] = rate(name, step, at)

        chosen, rejected = pairs(seed, step)
        if name == "loader_stuck" and fault:
            chosen, rejected = pairs(seed, at)
        if name == "pairs_swapped" and fault:
            chosen, rejected = rejected, chosen

        micro, total = 2 if name == "accumulation" else 1, 0.0
        for part_chosen, part_rejected in zip(chosen.chunk(micro), rejected.chunk(micro), strict=True):
            truncated = name == "empty_answer" and step == at
            loss, chosen_logp, seen = dpo(model, reference, part_chosen, part_rejected, truncated)
            if name == "supervised_term":
                loss = loss - 0.2 * chosen_logp.mean()
            (loss / micro).backward()
            total += loss.item() / micro
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "zero_grad_forgotten" and step >= at - 1):
            optimizer.zero_grad()
        losses.append(total)
        if recorder is not None:
            recorder.step(total)
        if name == "evaluation" and step % 20 == 19:
            model.eval()
            with torch.no_grad():
                dpo(model, reference, *pairs(seed + 20_000, 0, 64))
            model.train()
    recorder.close()
    return losses


FAULTS = {
    "pairs_swapped": dict(kinds=["data", "reward"], part="all",
        what="From a step on a new shard has the columns exchanged: the rejected answer is trained as the chosen one."),
    "loader_stuck": dict(kinds=["data"], part="all",
        what="From a step on the loader gives the same batch of pairs again and again."),
    "rate_exponent_slip": dict(kinds=["rate", "instability"], part="all",
        what="From a step on the rate is ten times what it should be: 4e-3 was typed for 4e-4."),
    "reference_is_policy": dict(kinds=["policy"], part="all", at=0,
        what="The reference is the policy itself (no deepcopy): the margin is zero and the loss ln 2 for ever."),
    "zero_grad_forgotten": dict(kinds=["gradients", "optimizer"], part="all",
        what="From a step on zero_grad is no longer called: gradients of all earlier steps pile up."),
    "optimizer_state_lost": dict(kinds=["optimizer"], part="all", lasts=20,
        what="At a step AdamW loses its moments and counts from one again, with no warm-up (resumed)."),
    "empty_answer": dict(kinds=["not_finite", "data"], part="all",
        what="At a step one answer is truncated to nothing; its mean over tokens is 0/0 and all weights become NaN."),
    "pure_bfloat16": dict(kinds=["precision"], part="all", at=0,
        what="Weights and moments are in bfloat16, with no fp32 copy: most small updates are rounded away."),
    "block_missing_in_checkpoint": dict(kinds=["weights"], part="block1",
        what="At a step a checkpoint is read with strict=False that lacks block 1: it has fresh random weights."),
    "block_frozen": dict(kinds=["frozen", "dead"], part="block2",
        what="From a step on block 2 has requires_grad=False, left from an experiment with frozen layers."),
    "no_causal_mask": dict(kinds=["attention"], part="all",
        what="From a step on attention in the policy has no causal mask: each position sees the token it predicts."),
    "norm_adds_one": dict(kinds=["activations"], part="all",
        what="From a step on the norms in the policy's blocks scale by 1 + weight (another model family's code)."),
    "sampling_temperature": dict(kinds=["output_logits"], part="head",
        what="From a step on the policy's logits are divided by 0.4, a temperature left over from sampling."),
}

HEALTHY = {
    "accumulation": "Each update sums the gradients of two half batches.",
    "cosine_to_zero": "The rate falls along a cosine, to zero at the last step.",
    "evaluation": "Every 20 steps held-out pairs are judged in evaluation mode without gradients.",
    "resumed": "A new process goes on at a step with weights and optimizer state; only this part is recorded.",
    "supervised_term": "The loss has from the first step a small term of supervised loss on the chosen answers.",
}
