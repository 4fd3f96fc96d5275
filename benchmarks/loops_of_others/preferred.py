"""A reward model learns which of two answers people prefer (Bradley-Terry): a small GPT-NeoX with a scalar head, AdamW."""

import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXModel

import lab

STEPS = 240
PAIRS = 16
BLOCKS = 3
WIDTH = 32
PEAK = 3e-3
INIT = 0.1
WARM_UP = 20
RESUME_AT = 60

# Tokens: four topics, words of each topic (four per topic), rude words and fillers.
PAD, BOS, SEP, END = 0, 1, 2, 3
TOPICS = range(4, 8)
WORDS = [range(start, start + 4) for start in range(8, 24, 4)]
RUDE = range(24, 27)
FILLERS = range(27, 32)
VOCAB = 32
PROMPT = 5
LONGEST = PROMPT + 13


def draw_answer(rng: random.Random, topic: int) -> tuple[list[int], int]:
    """An answer and its score: words on topic are good, rude ones bad, and the first word should be on topic."""
    length = rng.randint(5, 12)
    focus = rng.choice((0.1, 0.4, 0.8))
    manners = rng.choice((0.0, 0.25))
    words, score = [], 0
    for place in range(length):
        draw = rng.random()
        if draw < manners:
            words.append(rng.choice(RUDE))
            score -= 2
        elif draw < manners + (1 - manners) * focus:
            words.append(rng.choice(WORDS[topic]))
            score += 1 + 2 * (place == 0)
        else:
            other = rng.randrange(5)
            words.append(rng.choice(FILLERS if other in (topic, 4) else WORDS[other]))
    return [*words, END], score


def draw_pairs(seed: int, step: int, pairs: int = PAIRS) -> dict[str, torch.Tensor]:
    """Pairs of answers to the same prompt: first all that were chosen, then all that were rejected."""
    rng = random.Random(1_000_000 * seed + step)
    rows: list[list[list[int]]] = [[], []]
    gaps = []
    for _ in range(pairs):
        topic = rng.randrange(4)
        prompt = [BOS, rng.choice(FILLERS), TOPICS[topic], rng.choice(FILLERS), SEP]
        (one, score), (two, other) = draw_answer(rng, topic), draw_answer(rng, topic)
        # Who judges goes by the score and errs where both are nearly as good.
        if rng.random() > 1 / (1 + math.exp(-2 * (score - other))):
            one, two = two, one
        rows[0].append(prompt + one)
        rows[1].append(prompt + two)
        gaps.append(abs(score - other))
    both = rows[0] + rows[1]
    tokens = torch.tensor([row + [PAD] * (LONGEST - len(row)) for row in both])
    mask = (tokens != PAD).long()
    return {"tokens": tokens, "mask": mask, "gap": torch.tensor(gaps, dtype=torch.float32)}


class RewardModel(nn.Module):
    """A backbone and a scalar head that reads the last real token."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = GPTNeoXModel(
            GPTNeoXConfig(
                vocab_size=VOCAB,
                hidden_size=WIDTH,
                num_hidden_layers=BLOCKS,
                num_attention_heads=4,
                intermediate_size=3 * WIDTH,
                max_position_embeddings=LONGEST,
                initializer_range=INIT,
                use_cache=False,
                attn_implementation="eager",
            )
        )
        self.score = nn.Linear(WIDTH, 1, bias=False)
        nn.init.normal_(self.score.weight, std=WIDTH**-0.5)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = self.backbone(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self.score(hidden[torch.arange(len(tokens)), last]).squeeze(-1)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    decayed = [weight for weight in model.parameters() if weight.ndim > 1]
    others = [weight for weight in model.parameters() if weight.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98))


def rate_at(step: int, peak: float = PEAK) -> float:
    """Linear warm-up, then a linear decay to a tenth."""
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    return peak * (1 - 0.9 * (step - WARM_UP) / (STEPS - WARM_UP))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The Bradley-Terry loss; `name` is "plain" before the fault begins."""
    tokens, mask = batch["tokens"], batch["mask"]
    last = mask.sum(1) - 1
    if name == "read_at_padding":
        last = torch.full_like(last, tokens.shape[1] - 1)
    if name == "prompt_masked":
        mask = mask.clone()
        mask[:, :PROMPT] = 0
    chosen, rejected = model(tokens, mask, last).float().chunk(2)
    if name == "pairs_swapped":
        chosen, rejected = rejected, chosen
    if name == "reward_scaled":
        chosen, rejected = 10 * chosen, 10 * rejected
    losses = -F.logsigmoid(chosen - rejected)
    if name == "weighed_by_gap":
        weight = 1 / batch["gap"]
        losses = losses * weight / weight.mean()
    if name == "centered":
        losses = losses + 0.01 * (chosen + rejected) ** 2
    return losses.mean()


def evaluate(model: nn.Module) -> float:
    """How often a held-out chosen answer gets the higher reward."""
    model.eval()
    batch = draw_pairs(10_000, 0, 32)
    with torch.no_grad():
        chosen, rejected = model(batch["tokens"], batch["mask"], batch["mask"].sum(1) - 1).chunk(2)
    model.train()
    return (chosen > rejected).float().mean().item()


def plant(name: str, model: RewardModel, optimizer: torch.optim.Optimizer) -> None:
    """Faults that are planted once, at their step."""
    if name == "head_fresh":
        nn.init.normal_(model.score.weight, std=WIDTH**-0.5)
    if name == "block_frozen":
        model.backbone.layers[2].requires_grad_(False)
    if name == "norm_skipped":
        model.backbone.layers[1].input_layernorm.forward = lambda hidden: hidden
    if name == "decay_typo":
        optimizer.param_groups[0]["weight_decay"] = 10.0
    if name == "all_in_bf16":
        model.to(torch.bfloat16)
        optimizer.load_state_dict(optimizer.state_dict())  # casts the moments to the format of the weights


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = RewardModel()
    optimizer = make_optimizer(model)
    begin = FAULTS[name].get("at", at) if name in FAULTS else 0
    peak = 20 * PEAK if name == "rate_too_high" else PEAK
    # A run that is resumed is recorded from there on.
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == RESUME_AT:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = RewardModel()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)
        if name in FAULTS and step == begin:
            plant(name, model, optimizer)
        now = name if step >= begin else "plain"
        pairs = PAIRS
        if name == "batch_ramp":
            pairs = 8 + 4 * min(step // 40, 3)
        batch = draw_pairs(seed, begin if now == "loader_stuck" else step, pairs)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, peak)
        if name == "accumulated":
            total = 0.0
            for part in range(2):
                half = draw_pairs(seed, 2 * step + part, PAIRS // 2)
                loss = loss_of(model, half, now) / 2
                loss.backward()
                total += loss.item()
            loss = torch.tensor(total)
        else:
            loss = loss_of(model, batch, now)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if now != "not_zeroed":
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
        if name == "evaluated" and step % 25 == 24:
            evaluate(model)
    if recorder is not None:
        recorder.close()
    return losses


# The recorder counts the scalar head to the part `other`.
FAULTS = {
    "pairs_swapped": dict(
        what="From a step on a new shard has its columns the other way round: rejected answers count as chosen.",
        kinds=["data"], part="all",
    ),
    "read_at_padding": dict(
        what="From a step on the reward is read at the last position, which is padding in nearly all rows.",
        kinds=["data", "output_logits"], part="all",
    ),
    "loader_stuck": dict(
        what="From a step on the loader returns the same batch again and again.",
        kinds=["data"], part="all",
    ),
    "prompt_masked": dict(
        what="From a step on the mask that hides the prompt from a loss is given as the mask of attention.",
        kinds=["attention", "data"], part="all",
    ),
    "rate_too_high": dict(
        what="The peak of the learning rate is twenty times that of the recipe.",
        kinds=["rate", "instability"], part="all", at=0,
    ),
    "decay_typo": dict(
        what="From a step on the weight decay is 10 in place of 0.01.",
        kinds=["optimizer"], part="all",
    ),
    "not_zeroed": dict(
        what="From a step on gradients are no longer zeroed and add up.",
        kinds=["gradients"], part="all",
    ),
    "head_fresh": dict(
        what="The checkpoint lacks the scalar head, so that the head is drawn anew at a step.",
        kinds=["weights"], part="other", lasts=20,
    ),
    "block_frozen": dict(
        what="One block was left out of the list of those to be trained.",
        kinds=["frozen"], part="block2", at=0,
    ),
    "reward_scaled": dict(
        what="From a step on rewards are multiplied by ten before the loss, as with a wrong temperature.",
        kinds=["output_logits", "data"], part="other",
    ),
    "norm_skipped": dict(
        what="From a step on the norm before the attention of one block returns its input.",
        kinds=["activations"], part="block1",
    ),
    "all_in_bf16": dict(
        what="From a step on weights and moments are kept in bfloat16, with no copy in float32.",
        kinds=["precision"], part="all",
    ),
    "weighed_by_gap": dict(
        what="From a step on pairs are weighed by one over the gap of their scores, which is zero in a tie.",
        kinds=["not_finite", "data"], part="all",
    ),
}

HEALTHY = {
    "evaluated": "Accuracy on held-out pairs is measured every 25 steps, in eval mode.",
    "accumulated": "Each update sums the gradients of two halves of a batch.",
    "resumed": "Resumed at step 60 from a checkpoint of weights and the optimizer's state.",
    "centered": "A small penalty keeps the sum of both rewards near zero.",
    "batch_ramp": "The batch grows from 8 to 20 pairs in four stages.",
}
