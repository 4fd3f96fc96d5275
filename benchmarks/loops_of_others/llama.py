"""Pretrains a small Llama (transformers) on packed, padded synthetic documents with AdamW and a linear schedule."""

import copy
import math
import types

import lab
import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import get_cosine_schedule_with_warmup as cosine_schedule
from transformers import get_linear_schedule_with_warmup as linear_schedule

STEPS = 240

PAD, BOS, EOS = 0, 1, 2
TOPICS, WORDS = 4, 24
FIRST_TOPIC = 3
FIRST_WORD = FIRST_TOPIC + TOPICS
VOCAB = FIRST_WORD + WORDS

WIDTH, LAYERS, HEADS = 32, 3, 4
ROW = 48  # tokens in a packed row
ROWS = 4  # rows in a micro-batch
MICRO_BATCHES = 2  # micro-batches that are accumulated for one update
RATE, WARM_UP, CLIP = 4e-3, 20, 1.0
IGNORE = -100


def make_grammar(seed: int) -> np.ndarray:
    """For each topic which word follows which."""
    rng = np.random.default_rng([seed, 99])
    return np.stack([rng.permutation(WORDS) for _ in range(TOPICS)])


def make_document(rng: np.random.Generator, grammar: np.ndarray) -> list[int]:
    """BOS, the topic, a chain of words that is random in one place of eight, EOS."""
    topic = int(rng.integers(TOPICS))
    word = int(rng.integers(WORDS))
    tokens = [BOS, FIRST_TOPIC + topic]
    for _ in range(int(rng.integers(6, 20))):
        tokens.append(FIRST_WORD + word)
        word = int(grammar[topic, word]) if rng.random() > 0.125 else int(rng.integers(WORDS))
    return tokens + [EOS]


def pack(rng: np.random.Generator, grammar: np.ndarray) -> tuple[np.ndarray, ...]:
    """Rows of whole documents, then padding: tokens, the number of the document (padding: 0), the position in it."""
    tokens = np.full((ROWS, ROW), PAD)
    documents = np.zeros((ROWS, ROW), dtype=int)
    positions = np.zeros((ROWS, ROW), dtype=int)
    for row in range(ROWS):
        start, number = 0, 1
        document = make_document(rng, grammar)
        while start + len(document) <= ROW:
            end = start + len(document)
            tokens[row, start:end] = document
            documents[row, start:end] = number
            positions[row, start:end] = range(len(document))
            start, number = end, number + 1
            document = make_document(rng, grammar)
    return tokens, documents, positions


def collate(tokens: np.ndarray, documents: np.ndarray, positions: np.ndarray, fault: str) -> dict[str, torch.Tensor]:
    """What the model takes: ids, labels (it shifts them by itself), positions, a mask that keeps documents apart."""
    ids, docs = torch.from_numpy(tokens), torch.from_numpy(documents)

    labels = ids.clone()
    labels[ids == BOS] = IGNORE
    labels[docs == 0] = IGNORE
    if fault == "padding_in_labels":
        labels[docs == 0] = PAD
    if fault == "labels_shifted_twice":
        labels = torch.cat([labels[:, 1:], torch.full((ROWS, 1), IGNORE)], dim=1)

    same = docs[:, :, None] == docs[:, None, :]
    causal = torch.ones(ROW, ROW, dtype=torch.bool).tril()
    mask = same & causal
    if fault == "document_mask_lost":
        mask = causal.expand_as(same)
    if fault == "causal_mask_lost":
        mask = same
    return dict(input_ids=ids, labels=labels, position_ids=torch.from_numpy(positions), attention_mask=mask[:, None])


def make_batch(seed: int, step: int, grammar: np.ndarray, count: int, fault: str) -> list[dict[str, torch.Tensor]]:
    """The micro-batches of one update."""
    batch = []
    for number in range(count):
        rng = np.random.default_rng([seed, step, number])
        tokens, documents, positions = pack(rng, grammar)
        if fault == "bad_shard":
            words = tokens >= FIRST_WORD
            tokens[words] = rng.integers(FIRST_WORD, VOCAB, size=int(words.sum()))
        batch.append(collate(tokens, documents, positions, fault))
    return batch


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=ROW,
        initializer_range=0.05,
        tie_word_embeddings=False,
        use_cache=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config).train()


def layer_without_residual(self, hidden_states, **kwargs):
    """The layer of Llama, except that the residual around the MLP is forgotten."""
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
    hidden_states = hidden_states + attended
    return self.mlp(self.post_attention_layernorm(hidden_states))


def initialise(layer: nn.Module) -> None:
    """Write new weights into a layer, as for one that the checkpoint lacks."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.05)
        elif module is not layer and hasattr(module, "variance_epsilon"):
            nn.init.ones_(module.weight)


def scaled_head(self, hidden: torch.Tensor) -> torch.Tensor:
    """The head with a multiplier of 1 / sqrt(width) that belongs to another parametrisation."""
    return nn.functional.linear(hidden, self.weight) / math.sqrt(WIDTH)


def make_optimizer(model: nn.Module, name: str) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    decayed, plain = [], []
    for key, weight in model.named_parameters():
        if name == "head_left_out" and not key.startswith("model."):
            continue
        (decayed if weight.dim() > 1 and "embed" not in key else plain).append(weight)
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def make_schedule(optimizer: torch.optim.Optimizer, name: str):
    if name == "cosine_long_warm_up":
        return cosine_schedule(optimizer, 80, STEPS)
    return linear_schedule(optimizer, WARM_UP, STEPS)


def forward(model: nn.Module, micro_batch: dict[str, torch.Tensor], labelled: int) -> torch.Tensor:
    """The sum of the losses of a micro-batch, divided by the labelled tokens of the whole batch."""
    return model(**micro_batch, num_items_in_batch=labelled).loss


def count_labels(batch: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((micro_batch["labels"][:, 1:] != IGNORE).sum()) for micro_batch in batch)


@torch.no_grad()
def evaluate(model: nn.Module, seed: int, grammar: np.ndarray) -> float:
    """The loss on documents that are never trained on."""
    model.eval()
    batch = make_batch(seed, 10_000, grammar, 2, "plain")
    labelled = count_labels(batch)
    loss = sum(float(forward(model, micro_batch, labelled)) for micro_batch in batch)
    model.train()
    return loss


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float = 0.95) -> None:
    for kept, weight in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(weight, 1 - decay)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, schedule, name: str):
    """A new model, optimizer and schedule, with all that a checkpoint of the old ones holds."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), schedule.state_dict()))
    model = make_model()
    optimizer = make_optimizer(model, name)
    schedule = make_schedule(optimizer, name)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[2])
    return model, optimizer, schedule


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    grammar = make_grammar(seed)
    model = make_model()
    optimizer = make_optimizer(model, name)
    schedule = make_schedule(optimizer, name)
    average = copy.deepcopy(model) if name == "ema_evaluated" else None
    recorder = lab.record(model, optimizer, every=every, out=out)

    losses = []
    for step in range(STEPS):
        fault = name if step >= at else "plain"
        if name == "bad_shard" and step >= at + FAULTS[name]["lasts"]:
            fault = "plain"
        if name == "nan_sample_weight" and step != at:
            fault = "plain"

        if step == at:
            if name == "resumed":
                recorder.close()
                model, optimizer, schedule = resume(model, optimizer, schedule, name)
                recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
            if name == "schedule_restarted":
                schedule = make_schedule(optimizer, name)
            if name == "rate_ten_times":
                schedule.base_lrs = [10 * rate for rate in schedule.base_lrs]
            if name == "optimizer_state_lost":
                optimizer.state.clear()
            if name == "layer_not_in_checkpoint":
                initialise(model.model.layers[2])
            if name == "residual_lost":
                layer = model.model.layers[1]
                layer.forward = types.MethodType(layer_without_residual, layer)
            if name == "head_multiplier":
                model.lm_head.forward = types.MethodType(scaled_head, model.lm_head)
            if name == "weights_in_bf16":
                model.to(torch.bfloat16)
                optimizer.load_state_dict(optimizer.state_dict())  # casts the moments to the format of the weights

        count = MICRO_BATCHES
        if name == "batch_ramp":
            count = 1 if step < at // 2 else 2 if step < at else 3
        batch = make_batch(seed, step, grammar, count, fault)
        labelled = count_labels(batch)
        total = torch.zeros(())
        for micro_batch in batch:
            loss = forward(model, micro_batch, labelled)
            if fault == "nan_sample_weight":
                loss = loss * float("nan")
            loss.backward()
            total += loss.detach().float()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if fault != "zero_grad_forgotten":
            optimizer.zero_grad()
        recorder.step(total)
        losses.append(float(total))

        if average is not None:
            follow(average, model)
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, seed, grammar)
        if average is not None and step % 40 == 39:
            evaluate(average, seed, grammar)
    recorder.close()
    return losses


FAULTS = {
    "labels_shifted_twice": dict(
        what="The collator shifts the labels by one token and the model shifts them once more.",
        kinds=["data"], part="all",
    ),
    "padding_in_labels": dict(
        what="Labels of padding are no longer -100: the model is trained to write padding.", kinds=["data"], part="all",
    ),
    "bad_shard": dict(
        what="A corrupt shard: for 12 steps the words of the documents are random.",
        kinds=["data"], part="all", lasts=12,
    ),
    "nan_sample_weight": dict(
        what="One batch has no quality score, so its loss is weighed by NaN: all weights are NaN after it.",
        kinds=["data", "not_finite"], part="all",
    ),
    "document_mask_lost": dict(
        what="Attention is only causal: tokens see the other documents that are packed before theirs.",
        kinds=["attention", "data"], part="all",
    ),
    "causal_mask_lost": dict(
        what="The mask keeps documents apart and is no longer causal: tokens see those that they should predict.",
        kinds=["attention"], part="all",
    ),
    "schedule_restarted": dict(
        what="The schedule is not loaded on resuming: it warms up from 0 again, to the full rate.",
        kinds=["rate"], part="all",
    ),
    "rate_ten_times": dict(
        what="The rate is ten times what the schedule says, by a typing error in the new configuration.",
        kinds=["rate", "instability"], part="all",
    ),
    "optimizer_state_lost": dict(
        what="The state of AdamW is not loaded on resuming: moments and their count of steps begin at 0.",
        kinds=["optimizer"], part="all", lasts=20,
    ),
    "zero_grad_forgotten": dict(
        what="Gradients are not zeroed after an update: each has the sum of all before.",
        kinds=["gradients", "optimizer"], part="all",
    ),
    "layer_not_in_checkpoint": dict(
        what="The last layer is missing in the checkpoint that is loaded, and gets new random weights.",
        kinds=["weights"], part="block2",
    ),
    "head_left_out": dict(
        what="The groups of the optimizer are built by name and leave out lm_head: it keeps its initial weights.",
        kinds=["frozen", "optimizer"], part="head", at=0,
    ),
    "residual_lost": dict(
        what="On resuming, the second layer is a rewritten one that forgets the residual around its MLP.",
        kinds=["activations"], part="block1",
    ),
    "head_multiplier": dict(
        what="The logits are multiplied by 1 / sqrt(width), as in another parametrisation.",
        kinds=["output_logits"], part="head",
    ),
    "weights_in_bf16": dict(
        what="The model is loaded in bfloat16: weights and moments too, so that small updates are rounded away.",
        kinds=["precision"], part="all",
    ),
}

HEALTHY = {
    "cosine_long_warm_up": "The rate warms up over 80 steps and decays by a cosine to zero.",
    "evaluation": "Every 20 steps the model is evaluated on other documents, in eval mode and without gradients.",
    "resumed": "Stopped at a step and resumed from a checkpoint with weights, moments, schedule and first_step.",
    "batch_ramp": "The batch grows: one micro-batch, then two, then three.",
    "ema_evaluated": "An average of the weights is kept aside, and evaluated every 40 steps.",
}
