"""Supervised fine-tuning (all weights, prompt masked) of a small pretrained Qwen2 on instructions, with AdamW."""

import copy
import functools
import types

import lab
import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

STEPS = 240
WARM_UP = 20
PEAK = 4e-3
ACCUMULATE = 2
ROWS = 10  # of a micro-batch
EXAMPLES = 2400
IGNORED = -100

# The tokens: padding, end, the two roles, the instructions, the ways to close an answer, the letters.
PAD, EOS, USER, BOT = range(4)
COUNT_UP, COUNT_DOWN, FIRST, LAST = range(4, 8)
CLOSING, CLOSINGS = 8, 4
LETTER, LETTERS = 12, 10
VOCABULARY = LETTER + LETTERS

FAULTS = {
    "labels_shifted_twice": dict(
        what="From a step on the collator shifts the labels, which the model shifts once more.",
        kinds=["data"], part="all"),
    "prompt_not_masked": dict(
        what="From a step on the prompt is no longer masked: the loss counts its (random) tokens too.",
        kinds=["data"], part="all"),
    "answers_truncated": dict(
        what="From a step on rows are cut to 6 tokens: no label is left, the mean loss is 0/0 and teaches nothing.",
        kinds=["data", "not_finite", "dead"], part="all"),
    "schedule_restarted": dict(
        what="Resumed without the state of the scheduler: warm-up and the peak rate come once more.",
        kinds=["rate"], part="all"),
    "rate_too_high": dict(
        what="From a step on the rate is 10 times what it should be (that of another recipe's config).",
        kinds=["rate", "instability"], part="all"),
    "moments_lost": dict(
        what="Resumed without the state of the optimizer: AdamW begins with empty moments.",
        kinds=["optimizer"], part="all", lasts=10),
    "no_zero_grad": dict(
        what="From a step on gradients are not zeroed after an update, and so add up.",
        kinds=["gradients", "optimizer"], part="all"),
    "block_frozen": dict(
        what="From a step on the weights of a block do not require gradients, and stay as they are.",
        kinds=["frozen", "dead"], part="block1"),
    "head_missing": dict(
        what="Resumed from a checkpoint without lm_head (saved as if tied), which so gets new random weights.",
        kinds=["weights"], part="head"),
    "not_causal": dict(
        what="From a step on a mask is passed that hides padding but not what comes later: answers leak.",
        kinds=["attention"], part="all"),
    "pure_bf16": dict(
        what="The model is loaded and trained in bf16 with no fp32 weights: small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
    "logits_scaled": dict(
        what="From a step on the logits are multiplied by 1/8, as by a logit scale of another model.",
        kinds=["output_logits"], part="head"),
    "residual_missing": dict(
        what="From a step on a patched forward of a block forgets the residual around its MLP.",
        kinds=["activations"], part="block2"),
}

HEALTHY = {
    "packed": "Examples are packed into rows, each with its own positions and a mask that keeps them apart.",
    "evaluation": "Every 20 steps the loss on held-out examples is taken, in eval mode and without gradients.",
    "resumed": "Stopped at a step and resumed from a checkpoint of model and optimizer with first_step.",
    "larger_batches": "From a step on an update takes 4 micro-batches instead of 2.",
    "neftune": "Uniform noise is added to the embeddings in training, by the usual rule with alpha 1.",
}


def build() -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, use_cache=False,
        initializer_range=0.1, pad_token_id=PAD, eos_token_id=EOS))


def text(rng: np.random.Generator, rows: int, length: int = 24) -> torch.Tensor:
    """Text for the pretraining: letters that count up or down, or a passage again and again."""
    lines = []
    for _ in range(rows):
        sort = rng.integers(3)
        if sort < 2:
            line = rng.integers(LETTERS) + np.arange(length) * (1 if sort else -1)
        else:
            line = np.resize(rng.integers(LETTERS, size=rng.integers(1, 5)), length)
        lines.append(LETTER + line % LETTERS)
    return torch.tensor(np.array(lines))


@functools.cache
def pretrained(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(200):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20, (200 - step) / 100)
        ids = text(rng, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def example(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """A prompt and its answer."""
    order = rng.integers(COUNT_UP, LAST + 1)
    letters = rng.integers(LETTERS, size=rng.integers(3, 7))
    if order in (COUNT_UP, COUNT_DOWN):
        answer = letters[-1] + np.arange(1, 6) * (1 if order == COUNT_UP else -1)
    else:
        answer = np.repeat(letters[0 if order == FIRST else -1], 3)
    prompt = [USER, order, *(LETTER + letters), BOT]
    closing = CLOSING + rng.integers(CLOSINGS)
    return [int(t) for t in prompt], [int(t) for t in (*(LETTER + answer % LETTERS), closing, EOS)]


def batches(examples: list, seed: int):
    """Micro-batches for ever, shuffled anew in each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(len(examples))
        for start in range(0, len(order) - ROWS + 1, ROWS):
            yield [examples[i] for i in order[start:start + ROWS]]


def collate(rows: list) -> dict[str, torch.Tensor]:
    """Rows padded on the right to the longest."""
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), longest), PAD)
    labels = torch.full((len(rows), longest), IGNORED)
    mask = torch.zeros((len(rows), longest), dtype=torch.long)
    for i, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt):end] = torch.tensor(answer)
        mask[i, :end] = 1
    return dict(input_ids=ids, attention_mask=mask, labels=labels)


def additive(allowed: torch.Tensor) -> torch.Tensor:
    """A mask (batch, 1, query, key) of what is added to the logits of attention."""
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def pack(rows: list, into: int = 2) -> dict[str, torch.Tensor]:
    """The examples one after the other in a few rows; none sees another."""
    parts = [rows[i::into] for i in range(into)]
    longest = max(sum(len(p) + len(a) for p, a in part) for part in parts)
    ids = torch.full((into, longest), PAD)
    labels = torch.full((into, longest), IGNORED)
    positions = torch.zeros((into, longest), dtype=torch.long)
    document = torch.full((into, longest), -1)
    for i, part in enumerate(parts):
        start = 0
        for n, (prompt, answer) in enumerate(part):
            end = start + len(prompt) + len(answer)
            ids[i, start:end] = torch.tensor(prompt + answer)
            labels[i, start + len(prompt):end] = torch.tensor(answer)
            positions[i, start:end] = torch.arange(end - start)
            document[i, start:end] = n
            start = end
    same = document[:, :, None] == document[:, None, :]
    causal = torch.ones(longest, longest, dtype=torch.bool).tril()
    return dict(input_ids=ids, attention_mask=additive(same & causal), position_ids=positions, labels=labels)


def prepare(rows: list, name: str, planted: bool) -> dict[str, torch.Tensor]:
    """What the model is given for the examples of a micro-batch."""
    if name == "packed":
        return pack(rows)
    batch = collate(rows)
    if not planted:
        return batch
    if name == "labels_shifted_twice":
        batch["labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    if name == "prompt_not_masked":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    if name == "answers_truncated":
        batch = {key: value[:, :6] for key, value in batch.items()}
    if name == "not_causal":
        seen = batch["attention_mask"].bool()
        batch["attention_mask"] = additive(seen[:, None, :].expand(-1, seen.shape[1], -1))
    return batch


def rate(step: int) -> float:
    """Linear warm-up, then linear decay to a tenth of the peak."""
    if step < WARM_UP:
        return PEAK * (step + 1) / WARM_UP
    return PEAK * max(0.1, 1 - 0.9 * (step - WARM_UP) / (STEPS - WARM_UP))


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.99), weight_decay=0.01, fused=True)


def forward_without_residual(layer, hidden_states, **kwargs):
    attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)
    return layer.mlp(layer.post_attention_layernorm(hidden_states + attended))


def add_noise(embedding, inputs, output):
    if not embedding.training:
        return output
    size = 1 / (output.shape[1] * output.shape[2]) ** 0.5
    return output + torch.empty_like(output).uniform_(-size, size)


def load(name: str, seed: int) -> Qwen2ForCausalLM:
    model = build()
    model.load_state_dict(pretrained(seed))
    if name == "pure_bf16":
        model.to(torch.bfloat16)
    if name == "neftune":
        model.model.embed_tokens.register_forward_hook(add_noise)
    return model


def plant(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What happens once, before the update of step `at`."""
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "block_frozen":
        model.model.layers[1].requires_grad_(False)
    if name == "head_missing":
        torch.nn.init.normal_(model.lm_head.weight, std=model.config.initializer_range)
    if name == "logits_scaled":
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits / 8)
    if name == "residual_missing":
        layer = model.model.layers[2]
        layer.forward = types.MethodType(forward_without_residual, layer)


@torch.no_grad()
def evaluate(model: torch.nn.Module, held_out: list) -> float:
    model.eval()
    loss = model(**collate(held_out)).loss.item()
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    pretrained(seed)
    torch.manual_seed(seed + 1)
    rng = np.random.default_rng(seed + 1)
    examples = [example(rng) for _ in range(EXAMPLES)]
    held_out = [example(rng) for _ in range(32)]
    stream = batches(examples, seed + 2)
    model = load(name, seed)
    model.train()
    optimizer = make_optimizer(model)
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        planted = step >= at
        if step == at:
            plant(name, model, optimizer)
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = build()
            model.load_state_dict(saved[0])
            model.train()
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
            if name == "schedule_restarted" and planted:
                group["lr"] = rate(step - at)
            if name == "rate_too_high" and planted:
                group["lr"] *= 10
        accumulate = 4 if name == "larger_batches" and planted else ACCUMULATE
        total = torch.zeros(())
        for _ in range(accumulate):
            loss = model(**prepare(next(stream), name, planted)).loss / accumulate
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not (name == "no_zero_grad" and planted):
            optimizer.zero_grad()
        recorder.step(total)
        losses.append(total.item())
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, held_out)
    recorder.close()
    return losses
