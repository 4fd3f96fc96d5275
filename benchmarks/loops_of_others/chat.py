"""Chat fine-tuning of a small pretrained Mistral on packed made-up dialogues, answers only, with AdamW in bf16."""
import copy
import math

import lab
import numpy as np
import torch
import torch.nn.functional as F
from transformers import MistralConfig, MistralForCausalLM

STEPS = 240
PRETRAIN_STEPS = 60
PRETRAIN_LR = 4e-3
LR = 2e-3
WARMUP = 12
WEIGHT_DECAY = 0.01
CLIP = 1.0
MICRO = 2          # packed rows in a micro-batch
ACCUM = 2          # micro-batches in an update
LENGTH = 32
ROWS = 320         # an epoch of 80 updates
RESUME_AT = 60

PAD, BOS, EOS, USER, ASSISTANT = range(5)
CHAT_TOKENS = [EOS, USER, ASSISTANT]
TOPICS = 4
WORDS = 24
FIRST_TOPIC = 5
FIRST_WORD = FIRST_TOPIC + TOPICS
VOCAB = FIRST_WORD + WORDS
IGNORE = -100

FAULTS = {
    "lr_too_high": {
        "what": "From here on the learning rate is 30 times what the schedule says: a wrong value in the config.",
        "kinds": ["rate"], "part": "all"},
    "schedule_per_micro_batch": {
        "what": "The scheduler is stepped after each micro-batch, so that warmup and decay pass twice too fast.",
        "kinds": ["rate"], "part": "all", "at": 0},
    "loss_on_prompt": {
        "what": "A shard was made without the assistant mask: for 40 updates every token counts in the loss.",
        "kinds": ["data"], "part": "all", "lasts": 40},
    "labels_shifted_twice": {
        "what": "The collator shifts the labels by one and the loss shifts them once more.",
        "kinds": ["data"], "part": "all"},
    "packing_leak": {
        "what": "Packed chats see one another: the mask is only causal and positions go on across the chats of a row.",
        "kinds": ["data", "attention"], "part": "all"},
    "no_answer_left": {
        "what": "A micro-batch has prompts only (answers cut off), so the mean over no tokens gives a NaN loss.",
        "kinds": ["not_finite", "data"], "part": "all", "lasts": 1},
    "zero_grad_forgotten": {
        "what": "Gradients are no longer zeroed after an update and pile up over all updates.",
        "kinds": ["gradients"], "part": "all"},
    "loss_not_divided": {
        "what": "The loss of a micro-batch is not divided by the accumulation steps: gradients are a sum, not a mean.",
        "kinds": ["gradients"], "part": "all"},
    "block_left_frozen": {
        "what": "requires_grad of block 1 is switched off, so that it no longer trains in what should be full tuning.",
        "kinds": ["frozen"], "part": "block1"},
    "bf16_weights": {
        "what": "The model is loaded in bfloat16 without float32 master weights, so small updates round away.",
        "kinds": ["precision"], "part": "all", "at": 0},
    "weight_decay_too_high": {
        "what": "The weight decay is 10 instead of 0.01, so that all matrices shrink.",
        "kinds": ["optimizer", "weights"], "part": "all"},
    "shard_missing": {
        "what": "A checkpoint is loaded with a shard missing: block 2 is newly initialised, all else is as it was.",
        "kinds": ["weights"], "part": "block2"},
    "new_token_rows": {
        "what": "The chat tokens get rows from N(0, 1) in the embedding, far larger than pretrained rows.",
        "kinds": ["weights"], "part": "embedding", "at": 0},
}

HEALTHY = {
    "one_micro_batch": "The same rows in an update, but all at once, as memory allows it, without accumulation.",
    "evaluation": "Every 20 updates the loss on held-out chats is measured in eval mode without gradients.",
    "resume": "The run goes on at update 60 from a checkpoint of model, optimizer, schedule and data position.",
    "linear_schedule": "A linear decay to a tenth of the peak after a longer warmup instead of a cosine.",
    "weight_average": "An exponential moving average of the weights is kept aside for evaluation.",
}


def phrase(rng, table, topic, word, count):
    words = []
    for _ in range(count):
        word = table[topic, word] if rng.random() < 0.93 else rng.integers(WORDS)
        words.append(int(word))
    return words


def chat(rng, table):
    """One dialogue by the template: tokens, and for each token whether the assistant wrote it."""
    tokens, answer = [BOS], [False]
    topic = int(rng.integers(TOPICS))
    for turn in range(2 if rng.random() < 0.2 else 1):
        asked = [int(w) for w in rng.integers(WORDS, size=rng.integers(1, 3))]
        prompt = [USER, FIRST_TOPIC + topic] + [FIRST_WORD + w for w in asked] + [EOS, ASSISTANT]
        reply = [FIRST_WORD + w for w in phrase(rng, table, topic, asked[-1], int(rng.integers(3, 6)))] + [EOS]
        tokens += prompt + reply
        answer += [False] * len(prompt) + [True] * len(reply)
    return tokens, answer


def pack(rng, table, rows):
    """Chats put one after another into rows of LENGTH, what is left of a row is padding."""
    ids = np.full((rows, LENGTH), PAD)
    labels = np.full((rows, LENGTH), IGNORE)
    positions = np.tile(np.arange(LENGTH), (rows, 1))
    segments = np.full((rows, LENGTH), -1)
    for row in range(rows):
        begin, number = 0, 0
        while True:
            tokens, answer = chat(rng, table)
            end = begin + len(tokens)
            if end > LENGTH:
                break
            ids[row, begin:end] = tokens
            labels[row, begin:end] = np.where(answer, tokens, IGNORE)
            positions[row, begin:end] = np.arange(len(tokens))
            segments[row, begin:end] = number
            begin, number = end, number + 1
    return {"ids": torch.tensor(ids), "labels": torch.tensor(labels),
            "positions": torch.tensor(positions), "segments": torch.tensor(segments)}


def texts(rng, table, rows, length=24):
    """Plain text for the pretraining: a topic and then words after that topic's rule."""
    out = []
    for _ in range(rows):
        topic = int(rng.integers(TOPICS))
        words = phrase(rng, table, topic, int(rng.integers(WORDS)), length - 2)
        out.append([BOS, FIRST_TOPIC + topic] + [FIRST_WORD + w for w in words])
    return torch.tensor(out)


def packed_mask(segments):
    """Causal, and only within the same chat: (batch, 1, length, length), True where a query may look."""
    same = segments[:, :, None] == segments[:, None, :]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return (same & causal)[:, None]


def take(data, rows):
    return {key: value[rows] for key, value in data.items()}


def make_model():
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, sliding_window=None, tie_word_embeddings=False,
        use_cache=False, pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, attn_implementation="sdpa")
    return MistralForCausalLM(config)


def pretrain(model, rng, table):
    optimizer = torch.optim.AdamW(model.parameters(), lr=PRETRAIN_LR, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(PRETRAIN_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = PRETRAIN_LR * min(1, (step + 1) / 10) * (1 - 0.9 * step / PRETRAIN_STEPS)
        ids = texts(rng, table, 6)
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def add_chat_tokens(model, name):
    """The rows of the tokens that pretraining never saw begin at the mean of the others."""
    with torch.no_grad():
        for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            weight[CHAT_TOKENS] = weight[FIRST_TOPIC:].mean(0)
        if name == "new_token_rows":
            rows = torch.randn(len(CHAT_TOKENS), model.config.hidden_size)
            model.get_input_embeddings().weight[CHAT_TOKENS] = rows


def make_optimizer(model):
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LR, betas=(0.9, 0.999), eps=1e-8)


def make_schedule(optimizer, name):
    def cosine(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        done = (step - WARMUP) / (STEPS - WARMUP)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))

    def linear(step):
        if step < 2 * WARMUP:
            return (step + 1) / (2 * WARMUP)
        return 1 - 0.9 * (step - 2 * WARMUP) / (STEPS - 2 * WARMUP)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, linear if name == "linear_schedule" else cosine)


def chat_loss(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch["ids"], attention_mask=batch["mask"], position_ids=batch["positions"]).logits
    logits = logits[:, :-1].float().reshape(-1, VOCAB)
    return F.cross_entropy(logits, batch["labels"][:, 1:].reshape(-1), ignore_index=IGNORE)


def collate(batch, name, on):
    batch = dict(batch, mask=packed_mask(batch["segments"]))
    if not on:
        return batch
    if name == "loss_on_prompt":
        batch["labels"] = torch.where(batch["ids"] == PAD, IGNORE, batch["ids"])
    if name == "labels_shifted_twice":
        batch["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORE)
    if name == "packing_leak":
        batch["mask"] = packed_mask(torch.zeros_like(batch["segments"]))
        batch["positions"] = torch.arange(LENGTH).expand_as(batch["positions"])
    if name == "no_answer_left":
        batch["labels"] = torch.full_like(batch["labels"], IGNORE)
    return batch


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    loss = chat_loss(model, collate(data, "plain", False)).item()
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    table = np.stack([rng.permutation(WORDS) for _ in range(TOPICS)])
    model = make_model()
    model.train()
    pretrain(model, rng, table)
    add_chat_tokens(model, name)
    data = pack(rng, table, ROWS)
    held_out = pack(rng, table, 16)
    if name == "bf16_weights":
        model.to(torch.bfloat16)

    optimizer = make_optimizer(model)
    schedule = make_schedule(optimizer, name)
    average = copy.deepcopy(model).eval() if name == "weight_average" else None
    micro, accum = (MICRO * ACCUM, 1) if name == "one_micro_batch" else (MICRO, ACCUM)
    recorder = None if name == "resume" else lab.record(model, optimizer, every=every, out=out)

    losses, evaluations = [], []
    per_update = MICRO * ACCUM
    for step in range(STEPS):
        on = at <= step < at + lasts
        first = step * per_update % ROWS
        if first == 0:
            order = rng.permutation(ROWS)
        if name == "resume" and step == RESUME_AT:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
            model = make_model()
            model.train()
            optimizer = make_optimizer(model)
            schedule = make_schedule(optimizer, name)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            schedule.load_state_dict(saved[2])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)

        if step == at and name == "shard_missing":
            for module in make_model().model.layers[2].named_parameters():
                model.model.layers[2].get_parameter(module[0]).data.copy_(module[1].data)
        if step == at and name == "block_left_frozen":
            model.model.layers[1].requires_grad_(False)
        if step == at and name == "weight_decay_too_high":
            optimizer.param_groups[0]["weight_decay"] = 10.0
        if step == at and name == "lr_too_high":
            schedule.base_lrs = [30 * LR for _ in schedule.base_lrs]
            for group in optimizer.param_groups:
                group["lr"] *= 30

        total = 0.0
        for index in range(accum):
            rows = order[first + index * micro:first + (index + 1) * micro]
            broken = on and (name != "no_answer_left" or index == accum - 1)
            batch = collate(take(data, rows), name, broken)
            loss = chat_loss(model, batch)
            if name == "loss_not_divided" and on:
                loss.backward()
            else:
                (loss / accum).backward()
            total += loss.item() / accum
            if name == "schedule_per_micro_batch" and index < accum - 1:
                schedule.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if not (name == "zero_grad_forgotten" and on):
            optimizer.zero_grad()
        losses.append(total)
        if recorder is not None:
            recorder.step(total)

        if average is not None:
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.lerp_(now, 0.02)
        if name == "evaluation" and (step + 1) % 20 == 0:
            evaluations.append(evaluate(model, held_out))
    recorder.close()
    return losses
