"""A small decoder-only language model, pretrained briefly, learns to sort four digits by GRPO (group baseline, KL), AdamW."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
DIGITS, LENGTH = 10, 4          # a prompt is LENGTH digits and a separator; the answer is LENGTH digits
SEPARATOR, VOCAB = DIGITS, DIGITS + 1
PROMPT, TOTAL = LENGTH + 1, 2 * LENGTH + 1
WIDTH, HEADS, BLOCKS = 32, 2, 3
PROMPTS, GROUP = 6, 8           # prompts per update, samples per prompt
RATE, WARM_UP, BETA, CLIP = 7e-4, 10, 0.02, 1.0
PRETRAIN_STEPS = 56

_pretrained = {}                # seed -> state dict of the supervised start
history = {}                    # "rewards", "kls", "zero" of the last run, and "model"


# ---------------------------------------------------------------- model

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = True

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Embedding(TOTAL, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------- task

def draw_prompts(count, generator):
    digits = torch.randint(0, DIGITS, (count, LENGTH), generator=generator)
    return torch.cat([digits, torch.full((count, 1), SEPARATOR)], 1)


def right_answers(prompts):
    return prompts[:, :LENGTH].sort(1).values


def grade(prompts, answers):
    """The share of digits at their right places, and half a point more where all are right."""
    hits = (answers == right_answers(prompts)).float()
    return hits.mean(1) + 0.5 * hits.prod(1)


def pretrain(seed):
    """The supervised start: enough to answer often nearly right, seldom wholly."""
    if seed not in _pretrained:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed + 1000)
        model = LanguageModel()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        for _ in range(PRETRAIN_STEPS):
            prompts = draw_prompts(48, generator)
            ids = torch.cat([prompts, right_answers(prompts)], 1)
            logits = model(ids[:, :-1])[:, PROMPT - 1:]
            loss = F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, PROMPT:].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        _pretrained[seed] = copy.deepcopy(model.state_dict())
    return _pretrained[seed]


# ---------------------------------------------------------------- GRPO

@torch.no_grad()
def sample(model, prompts, generator, greedy=False):
    ids = prompts
    for _ in range(LENGTH):
        logits = model(ids)[:, -1]
        if not greedy:              # Gumbel noise: argmax is then a draw from the softmax
            uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-9)
            logits = logits - (-uniform.log()).log()
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


def log_probs(model, ids, shift=True):
    """Log-probabilities of the tokens of the answers."""
    logp = model(ids).log_softmax(-1)
    if shift:
        logp, targets = logp[:, PROMPT - 1:-1], ids[:, PROMPT:]
    else:
        logp, targets = logp[:, PROMPT:], ids[:, PROMPT:]
    return logp.gather(-1, targets[..., None])[..., 0]


def advantages_of(rewards, group, epsilon=1e-4):
    grouped = rewards.view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True) + epsilon)).view(-1)


def objective(model, reference, ids, advantages, shift=True):
    """REINFORCE with the advantages and the k3 estimate of the KL to the reference."""
    logp = log_probs(model, ids, shift)
    with torch.no_grad():
        reference_logp = log_probs(reference, ids, shift)
    difference = reference_logp - logp
    kl = (difference.exp() - 1 - difference).mean()
    return -(advantages[:, None] * logp).mean() + BETA * kl, kl.detach()


def rate_at(name, step, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "decay_to_zero":
        rate *= 1 - step / STEPS
    if name == "rate_too_high" and step >= at:
        rate *= 30
    return rate


def make_model(weights):
    model = LanguageModel()
    model.load_state_dict(weights)
    return model


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    start = pretrain(seed)
    torch.manual_seed(seed + 1)
    model, reference, sampler = make_model(start), make_model(start), make_model(start)
    reference.requires_grad_(False)
    sampler.requires_grad_(False)
    if name == "block_not_loaded":
        model.blocks[2] = Block()
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(seed + 2000)
    held_out = draw_prompts(64, torch.Generator().manual_seed(seed + 3000))

    now = {"reward": 0.0, "kl": 0.0, "zero": 0.0}
    extra = {"reward": lambda: now["reward"], "kl": lambda: now["kl"], "zero_variance_groups": lambda: now["zero"]}
    losses, rewards_seen, kls, zeros, evaluations = [], [], [], [], []
    recorder = None
    if name != "resumed":
        recorder = lab.record(model, optimizer, every=every, out=out, extra=extra)

    for step in range(STEPS):
        on = step >= at
        if name == "resumed" and step == at:        # the job ended here; a new one goes on from its checkpoint
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = make_model(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at, extra=extra)

        # the sampler gets the policy's weights, then answers
        if not (name == "sampler_not_synced" and on):
            sampler.load_state_dict(model.state_dict())
        group = 2 * GROUP if name == "larger_groups" and on else GROUP
        prompts = draw_prompts(PROMPTS, generator).repeat_interleave(group, 0)
        ids = sample(sampler, prompts, generator, greedy=name == "greedy_samples" and on)

        # rewards and advantages
        answers = ids[:, PROMPT:]
        if name == "parser_broken" and on:          # the text is cut one token too early: no digit is read
            answers = torch.full_like(answers, SEPARATOR)
        rewards = grade(prompts, answers)
        if name == "std_without_epsilon" and on:
            advantages = advantages_of(rewards, group, epsilon=0.0)
        else:
            advantages = advantages_of(rewards, group)
        if name == "sign_flipped" and on:
            advantages = -advantages

        # the update
        for setting in optimizer.param_groups:
            setting["lr"] = rate_at(name, step, at)
        if name == "block_frozen" and step == at:
            model.blocks[1].requires_grad_(False)
        if name == "mask_forgotten" and step == at:  # block 0 gets another attention kernel, without is_causal
            model.blocks[0].attention.causal = False
        shift = not (name == "no_shift" and on)
        pieces = 2 if name == "accumulation" else 1
        loss_value, kl_value = 0.0, 0.0
        for part, weight in zip(ids.chunk(pieces), advantages.chunk(pieces)):
            loss, kl = objective(model, reference, part, weight, shift)
            (loss / pieces).backward()
            loss_value += loss.item() / pieces
            kl_value += kl.item() / pieces
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if name == "optimizer_made_anew" and on:
            optimizer.state.clear()
        optimizer.step()
        if name == "bf16_weights" and on:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16().float())
        if not (name == "zero_grad_forgotten" and on):
            optimizer.zero_grad()

        now.update(reward=rewards.mean().item(), kl=kl_value,
                   zero=(rewards.view(-1, group).std(1) == 0).float().mean().item())
        losses.append(loss_value)
        rewards_seen.append(now["reward"])
        kls.append(now["kl"])
        zeros.append(now["zero"])
        if recorder is not None:
            recorder.step(loss_value)
        if name == "evaluation" and step % 20 == 19:
            model.eval()
            evaluations.append(grade(held_out, sample(model, held_out, None, greedy=True)[:, PROMPT:]).mean().item())
            model.train()
    if recorder is not None:
        recorder.close()
    history.update(rewards=rewards_seen, kls=kls, zero=zeros, model=model, evaluations=evaluations)
    return losses


FAULTS = {
    "sign_flipped": dict(what="From a step on the advantages have the wrong sign: bad answers are made likelier.",
                         kinds=["policy", "reward"], part="all"),
    "parser_broken": dict(what="From a step on the reader of the answers finds no digit, so every reward is zero.",
                          kinds=["reward", "groups"], part="all"),
    "greedy_samples": dict(what="From a step on answers are sampled greedily: all samples of a group are the same.",
                           kinds=["groups", "policy"], part="all"),
    "std_without_epsilon": dict(what="From a step on advantages are divided by the group's deviation without epsilon: "
                                     "0/0 in groups of equal rewards, and all weights are NaN.",
                                kinds=["not_finite", "groups"], part="all"),
    "rate_too_high": dict(what="From a step on the schedule gives thirty times the rate.",
                          kinds=["rate", "instability"], part="all"),
    "no_shift": dict(what="From a step on log-probabilities are read at the token itself, not at the one before it.",
                     kinds=["data", "policy"], part="all"),
    "block_frozen": dict(what="From a step on block 1 no longer requires gradients.",
                         kinds=["frozen", "dead"], part="block1"),
    "optimizer_made_anew": dict(what="From a step on AdamW's moments are thrown away before each update, as where the "
                                     "optimizer is made inside the loop.",
                                kinds=["optimizer"], part="all"),
    "block_not_loaded": dict(what="The checkpoint's block 2 was not loaded into the policy: it starts at random.",
                             kinds=["weights", "policy"], part="block2", at=0),
    "sampler_not_synced": dict(what="From a step on the sampler keeps its old weights and the policy learns from its "
                                    "stale samples without correction.",
                               kinds=["policy"], part="all"),
    "mask_forgotten": dict(what="From a step on the trainer's block 0 attends to later tokens, the sampler's does not.",
                           kinds=["attention", "policy"], part="block0"),
    "zero_grad_forgotten": dict(what="From a step on gradients are not zeroed after an update and pile up.",
                                kinds=["gradients"], part="all"),
    "bf16_weights": dict(what="From a step on weights are kept in bf16, so that small updates are rounded away.",
                         kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "decay_to_zero": "The rate falls linearly to zero over the run.",
    "accumulation": "Each update accumulates the gradients of two halves of the batch.",
    "evaluation": "Every 20 steps the model answers held-out prompts greedily in eval mode.",
    "larger_groups": "From a step on, by plan, there are 16 samples per prompt in place of 8.",
    "resumed": "The first part ran in an earlier job; this one resumes from its checkpoint with all state (first_step).",
}
