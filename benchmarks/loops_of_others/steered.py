"""PPO with a KL penalty (RLHF in small) on a decoder-only language model of a toy grammar, with value head and Adam."""
import copy

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
VOCAB, WIDTH, HEADS, BLOCKS = 20, 32, 4, 3
PROMPT, ANSWER = 4, 12
LENGTH = PROMPT + ANSWER
SAMPLES, MINIBATCH, EPOCHS = 48, 24, 3
UPDATES = EPOCHS * SAMPLES // MINIBATCH  # updates per rollout
LR, BETA, CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT, LAMBDA, MAX_NORM = 1e-3, 0.05, 0.2, 0.1, 0.01, 0.95, 1.0

# ---- the grammar: a . | det [adj] noun verb det [adj] noun .
BOS, DOT = 0, 1
KIND, RUDE = (4, 5, 6), (7, 8, 9)
NOUNS = {2: (10, 11, 12), 3: (12, 13, 14)}  # by determiner
VERBS = (15, 16, 17, 18, 19)
CLASS = torch.tensor([0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5])
ALLOWED = torch.zeros(6, 6, dtype=torch.bool)  # class -> next class
for before, after in ((0, 2), (1, 2), (2, 3), (2, 4), (3, 4), (4, 5), (4, 1), (5, 2)):
    ALLOWED[before, after] = True


def pick(options, generator):
    return options[torch.randint(len(options), (1,), generator=generator).item()]


def phrase(generator):
    det = pick((2, 3), generator)
    words = [det]
    if torch.rand(1, generator=generator).item() < 0.6:
        words.append(pick(KIND + RUDE, generator))
    return words + [pick(NOUNS[det], generator)]


def corpus(rows, generator):
    lines = []
    for _ in range(rows):
        line = [BOS]
        while len(line) < LENGTH:
            line += phrase(generator) + [pick(VERBS, generator)] + phrase(generator) + [DOT]
        lines.append(line[:LENGTH])
    return torch.tensor(lines)


def score(tokens):
    """The rule: +1 for a kind adjective, -1 for a rude one, -1 for what the grammar forbids."""
    answer = tokens[:, PROMPT:]
    kind = torch.isin(answer, torch.tensor(KIND)).sum(1)
    rude = torch.isin(answer, torch.tensor(RUDE)).sum(1)
    classes = CLASS[tokens[:, PROMPT - 1:]]
    wrong = (~ALLOWED[classes[:, :-1], classes[:, 1:]]).sum(1)
    return (kind - rude - wrong).float()


# ---- the model
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(mixed.transpose(1, 2).reshape(rows, length, WIDTH)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(LENGTH, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.3)
        nn.init.normal_(self.position.weight, std=0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.value = nn.Linear(WIDTH, 1)
        nn.init.zeros_(self.value.weight)
        nn.init.zeros_(self.value.bias)

    def forward(self, tokens, temperature=1.0):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x).float() / temperature, self.value(x).float().squeeze(-1)


PRETRAINED = {}  # seed -> state


def pretrained(seed):
    """The language model after a short supervised training on the grammar."""
    torch.manual_seed(seed)
    model = Policy()
    if seed not in PRETRAINED:
        lines = corpus(512, torch.Generator().manual_seed(seed + 1))
        adam = torch.optim.Adam(model.parameters(), lr=4e-3)
        for step in range(120):
            batch = lines[(step % 8) * 64:(step % 8) * 64 + 64]
            logits, _ = model(batch)
            loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), batch[:, 1:].reshape(-1))
            adam.zero_grad()
            loss.backward()
            adam.step()
        PRETRAINED[seed] = copy.deepcopy(model.state_dict())
    model.load_state_dict(PRETRAINED[seed])
    return model


# ---- PPO
@torch.no_grad()
def sample(model, prompts, generator, greedy=False):
    tokens = prompts
    for _ in range(ANSWER):
        probs = model(tokens)[0][:, -1].softmax(-1)
        if not greedy:
            probs = probs / torch.empty_like(probs).exponential_(generator=generator)
        tokens = torch.cat([tokens, probs.argmax(-1, keepdim=True)], 1)
    return tokens


def answer_logits(logits, shifted=False):
    """The logits that predict the answer's tokens."""
    return logits[:, PROMPT:] if shifted else logits[:, PROMPT - 1:-1]


def logprobs_of(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None]).squeeze(-1)


def advantages_of(rewards, values):
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    for t in reversed(range(ANSWER)):
        following = values[:, t + 1] if t + 1 < ANSWER else torch.zeros(len(rewards))
        last = rewards[:, t] + following - values[:, t] + LAMBDA * last
        advantages[:, t] = last
    return advantages


@torch.no_grad()
def rollout(model, reference, generator, beta, fault):
    prompts = corpus(SAMPLES, generator)[:, :PROMPT]
    tokens = sample(model, prompts, generator)
    logits, values = model(tokens)
    values = values[:, PROMPT - 1:-1]
    shifted = fault == "logprobs_off_by_one"
    old = logprobs_of(answer_logits(logits, shifted), tokens)
    kl = old - logprobs_of(answer_logits(reference(tokens)[0], shifted), tokens)
    scores = score(tokens)
    if fault == "reward_parser_fails":
        scores = torch.zeros(SAMPLES)
    rewards = beta * kl if fault == "kl_sign" else -beta * kl
    rewards[:, -1] += scores
    advantages = advantages_of(rewards, values)
    returns = advantages + values
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    buffer = dict(tokens=tokens, old=old, advantages=advantages, returns=returns)
    return buffer, scores.mean().item(), kl.sum(1).mean().item()


def ppo_loss(model, part, fault):
    logits, values = model(part["tokens"], temperature=0.5 if fault == "temperature_in_training_only" else 1.0)
    if fault == "minus_inf_in_entropy":
        logits = logits.masked_fill(torch.arange(VOCAB) == BOS, -torch.inf)
    logits = answer_logits(logits, fault == "logprobs_off_by_one")
    ratio = (logprobs_of(logits, part["tokens"]) - part["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy_loss = -torch.min(ratio * part["advantages"], clipped * part["advantages"]).mean()
    errors = (values[:, PROMPT - 1:-1] - part["returns"]) ** 2
    value_loss = errors.sum() if fault == "value_loss_summed" else errors.mean()
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
    clip_ratio = ((ratio - 1).abs() > CLIP).float().mean().item()
    return policy_loss + VALUE_WEIGHT * value_loss - ENTROPY_WEIGHT * entropy, clip_ratio


def rate_of(name, fault, step):
    rate = LR * min(1.0, (step + 1) / 10)
    if name == "decay_to_zero":
        rate *= 1 - step / STEPS
    if fault == "rate_too_high":
        rate *= 20
    return rate


def adam_of(model):
    return torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.999), eps=1e-8)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    model = pretrained(seed).eval()  # dropout off: sampler and trainer must agree
    reference = copy.deepcopy(model).requires_grad_(False)
    torch.manual_seed(seed + 2)
    generator = torch.Generator().manual_seed(seed + 3)
    start = FAULTS[name].get("at", at) if name in FAULTS else 0
    if name == "weights_in_bf16":
        model.bfloat16()
    optimizer = adam_of(model)
    stats = dict(reward=0.0, kl=0.0, clip_ratio=0.0)
    extra = {key: (lambda key=key: stats[key]) for key in stats}
    recorder, first, beta, losses = None, 60 if name == "resumed" else 0, BETA, []
    for step in range(STEPS):
        fault = name if name in FAULTS and step >= start else None
        if step == first:
            if name == "resumed":  # as from a file: all of the state into new objects
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = Policy().eval()
                optimizer = adam_of(model)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first, extra=extra)
        if fault == "block_frozen" and step == start:
            model.blocks[1].requires_grad_(False)
            optimizer.zero_grad()
        if fault == "block_not_in_checkpoint" and step == start:
            model.blocks[0].load_state_dict(Block().state_dict())
        inner = step % UPDATES
        if inner == 0:
            model.eval()
            buffer, stats["reward"], stats["kl"] = rollout(model, reference, generator, beta, fault)
            if name == "adaptive_kl":  # towards 4 nats
                beta *= 1 + 0.1 * max(-1.0, min(1.0, stats["kl"] / 4 - 1))
            if fault == "optimizer_made_anew":
                optimizer.state.clear()
        if inner % (SAMPLES // MINIBATCH) == 0:
            order = torch.randperm(SAMPLES, generator=generator)
        rows = order[(inner % (SAMPLES // MINIBATCH)) * MINIBATCH:][:MINIBATCH]
        if fault == "dropout_in_training":
            model.train()
        pieces = rows.chunk(2) if name == "accumulation" else [rows]
        if fault != "zero_grad_missing":
            optimizer.zero_grad()
        total, clip_ratio = 0.0, 0.0
        for piece in pieces:
            loss, clips = ppo_loss(model, {key: value[piece] for key, value in buffer.items()}, fault)
            (loss / len(pieces)).backward()
            total, clip_ratio = total + loss.item() / len(pieces), clip_ratio + clips / len(pieces)
        stats["clip_ratio"] = clip_ratio
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], MAX_NORM)
        for group in optimizer.param_groups:
            group["lr"] = rate_of(name, fault, step)
        optimizer.step()
        if recorder is not None:
            recorder.step(total)
        losses.append(total)
        if name == "evaluation" and step % 20 == 19:
            held_out = corpus(32, torch.Generator().manual_seed(seed + 4))[:, :PROMPT]
            score(sample(model, held_out, None, greedy=True)).mean()
    recorder.close()
    return losses


FAULTS = {
    "kl_sign": dict(what="From a step on the KL to the reference is added to the reward, not taken off.",
                    kinds=["policy", "reward"], part="all"),
    "reward_parser_fails": dict(what="From a step on the reward's parser finds nothing: every answer gets 0.",
                                kinds=["reward", "groups"], part="all"),
    "logprobs_off_by_one": dict(what="From a step on log-probs are read one position too late.",
                                kinds=["data", "policy"], part="all"),
    "dropout_in_training": dict(what="From a step on updates run in train mode: dropout on, in the sampler off.",
                                kinds=["data", "policy"], part="all"),
    "temperature_in_training_only": dict(what="From a step on updates divide logits by 0.5, the sampler does not.",
                                         kinds=["output_logits", "policy"], part="head"),
    "value_loss_summed": dict(what="The value loss is summed over tokens, not averaged; it drowns the policy's.",
                              kinds=["data", "policy"], part="all", at=0),
    "rate_too_high": dict(what="From a step on the learning rate is 20 times what it was.",
                          kinds=["rate", "instability"], part="all"),
    "optimizer_made_anew": dict(what="From a step on Adam starts with empty moments at every rollout.",
                                kinds=["optimizer"], part="all"),
    "zero_grad_missing": dict(what="From a step on gradients are no longer zeroed between updates.",
                              kinds=["gradients"], part="all"),
    "weights_in_bf16": dict(what="The policy is trained in bfloat16 without float32 weights: small updates are lost.",
                            kinds=["precision"], part="all", at=0),
    "minus_inf_in_entropy": dict(what="From a step on a token is masked by -inf; p log p in the entropy gives NaN.",
                                 kinds=["not_finite"], part="all"),
    "block_frozen": dict(what="From a step on block1 has requires_grad False.",
                         kinds=["frozen", "dead"], part="block1"),
    "block_not_in_checkpoint": dict(what="At a step all is reloaded, but block0, missing there, is newly initialised.",
                                    kinds=["weights"], part="block0"),
}
HEALTHY = {
    "decay_to_zero": "The rate decays linearly to zero.",
    "accumulation": "Each update's gradient is accumulated over two halves of the minibatch.",
    "evaluation": "Every 20 steps greedy answers to held-out prompts are scored.",
    "adaptive_kl": "The KL penalty's coefficient is steered towards a KL of 4.",
    "resumed": "Recorded from step 60 on, after a checkpoint with all state was loaded (first_step).",
}
