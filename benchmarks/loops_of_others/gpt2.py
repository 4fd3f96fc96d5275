"""A small GPT-2 of transformers (3 blocks, tied head, dropout 0.1) learns a synthetic language with AdamW and LambdaLR."""
import contextlib
import copy
import math
import os
import time

import numpy as np
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

import lab

logging.set_verbosity_error()

STEPS = 240
RATE = 8e-3
WARM_UP = 20
BATCH = 12
LENGTH = 28

# ---------------------------------------------------------------- the language
PAD, BOS, EOS, STOP, AND, NOT = range(6)
ARTICLES = {0: [6, 7], 1: [8, 9]}  # by gender: definite, indefinite
ADJECTIVES = {0: [10, 11, 12, 13], 1: [14, 15, 16, 17]}  # they agree with the noun
NOUNS = {  # by topic and gender
    topic: {gender: list(range(18 + 8 * topic + 4 * gender, 22 + 8 * topic + 4 * gender)) for gender in (0, 1)}
    for topic in range(3)}
VERBS = {topic: list(range(42 + 4 * topic, 46 + 4 * topic)) for topic in range(3)}
NAMES = list(range(54, 64))
VOCABULARY = 64

def pick(rng, words):
    """One of the words, the first ones more often."""
    return words[int(len(words) * rng.random() ** 2)]


def noun_phrase(rng, topic, name):
    """The document's name, or article, perhaps an adjective, and noun, all of one gender."""
    if rng.random() < 0.35:
        return [name]
    gender = int(rng.random() < 0.5)
    words = [pick(rng, ARTICLES[gender])]
    if rng.random() < 0.3:
        words.append(pick(rng, ADJECTIVES[gender]))
    return [*words, pick(rng, NOUNS[topic][gender])]


def document(rng):
    """Some sentences about one topic and one name: verb, object, subject, perhaps a negation."""
    topic, name = int(rng.integers(3)), NAMES[int(rng.integers(len(NAMES)))]
    words = [BOS, name]
    for _ in range(int(rng.integers(2, 6))):
        words += [pick(rng, VERBS[topic]), *noun_phrase(rng, topic, name)]
        if rng.random() < 0.2:
            words += [AND, *noun_phrase(rng, topic, name)]
        words += [STOP, *noun_phrase(rng, topic, name)]
        if rng.random() < 0.15:
            words.append(NOT)
    return [*words, EOS][:LENGTH]


def collate(documents):
    """Pad to the longest; padding is neither seen nor learned."""
    length = max(len(words) for words in documents)
    input_ids = torch.full((len(documents), length), PAD)
    for row, words in enumerate(documents):
        input_ids[row, : len(words)] = torch.tensor(words)
    attention_mask = (input_ids != PAD).long()
    labels = input_ids.masked_fill(attention_mask == 0, -100)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def split(batch, parts):
    """The batch in micro-batches."""
    return [{key: value.chunk(parts)[i] for key, value in batch.items()} for i in range(parts)]


# ---------------------------------------------------------------- model and optimizer
def make_model():
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=3, n_head=2, initializer_range=0.12,
        attn_pdrop=0.0, activation_function="gelu_pytorch_tanh",
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, use_cache=False)
    return GPT2LMHeadModel(config)


def make_optimizer(model, rate):
    no_decay = ("bias", "ln_1.weight", "ln_2.weight", "ln_f.weight")
    groups = [
        {"params": [p for n, p in model.named_parameters() if not n.endswith(no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in model.named_parameters() if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, fused=True)


def make_scheduler(optimizer):
    def factor(step):
        if step < WARM_UP:
            return (step + 1) / WARM_UP
        done = min(1.0, (step - WARM_UP) / (STEPS - WARM_UP))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


@torch.no_grad()
def evaluate(model, batches):
    model.eval()
    return sum(model(**batch).loss.item() for batch in batches) / len(batches)


@torch.no_grad()
def average_into(kept, model, decay=0.98):
    for old, new in zip(kept.parameters(), model.parameters()):
        old.lerp_(new, 1 - decay)


def mean_of_documents(logits, labels):
    """Each document counts the same, however long."""
    logits, labels = logits[:, :-1], labels[:, 1:]
    loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (loss.sum(1) / (labels != -100).sum(1)).mean()


# ---------------------------------------------------------------- what is changed at step `at`
def spoil_batch(name, batch):
    if name == "labels_shifted_twice":
        batch["labels"] = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    if name == "causal_mask_lost":
        mask = batch["attention_mask"].bool()
        batch["attention_mask"] = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
    if name == "empty_document":
        batch["labels"][3] = -100
    return batch


def change(name, model, optimizer, scheduler, held_out):
    """Once, before the update of step `at`; the scheduler from then on."""
    blocks = model.transformer.h
    if name == "left_in_eval":
        evaluate(model, held_out)  # and no model.train()
    if name == "schedule_restarted":
        scheduler = make_scheduler(optimizer)
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "block_not_loaded":
        blocks[1].apply(model._init_weights)
        for norm in (blocks[1].ln_1, blocks[1].ln_2):
            norm.reset_parameters()
    if name == "lower_block_frozen":
        blocks[0].requires_grad_(False)
    if name == "weights_in_bf16":
        model.to(torch.bfloat16)
        optimizer.load_state_dict(optimizer.state_dict())  # casts the moments as a resumed run does
    if name == "no_activation":
        blocks[2].mlp.act = nn.Identity()
    return scheduler


def resume(model, optimizer, scheduler):
    """A new model, optimizer and schedule with all the state of the old ones, and the same random numbers."""
    random_state = torch.get_rng_state()
    new_model = make_model()
    new_model.load_state_dict(model.state_dict())
    new_optimizer = make_optimizer(new_model, RATE)
    new_scheduler = make_scheduler(new_optimizer)
    new_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    new_scheduler.load_state_dict(scheduler.state_dict())
    torch.set_rng_state(random_state)
    new_model.train()
    return new_model, new_optimizer, new_scheduler


# ---------------------------------------------------------------- the loop
def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    held_out = [collate([document(rng) for _ in range(BATCH)]) for _ in range(2)]
    model = make_model()
    if name == "embedding_init":
        nn.init.normal_(model.transformer.wte.weight)  # nn.Embedding's own, in place of the config's
    optimizer = make_optimizer(model, RATE * (30 if name == "rate_too_high" else 1))
    scheduler = make_scheduler(optimizer)
    model.train()
    averaged = copy.deepcopy(model) if name == "averaged_and_evaluated" else None
    autocast = torch.autocast("cpu", torch.bfloat16) if name == "autocast_bf16" else contextlib.nullcontext()

    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if step == at:
            scheduler = change(name, model, optimizer, scheduler, held_out)
            if name == "resumed":
                recorder.close()
                model, optimizer, scheduler = resume(model, optimizer, scheduler)
                recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)

        size = BATCH if name != "batch_ramp" else 6 if step < 60 else 12 if step < 120 else 18
        batch = collate([document(rng) for _ in range(size)])
        batch = spoil_batch(name, batch) if step >= at else batch

        pieces = split(batch, 2) if name == "accumulation" else [batch]
        loss = 0.0
        for piece in pieces:
            with autocast:
                output = model(**piece)
                part = output.loss / len(pieces)
                if name == "empty_document" and step >= at:
                    part = mean_of_documents(output.logits, piece["labels"])
            part.backward()
            loss = loss + part.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if not (name == "grads_not_zeroed" and step >= at):
            optimizer.zero_grad()
        recorder.step(loss)
        losses.append(loss.item())

        if averaged is not None:
            average_into(averaged, model)
            if step % 40 == 39:
                evaluate(averaged, held_out)
                evaluate(model, held_out)
                model.train()
    recorder.close()
    return losses


FAULTS = {
    "labels_shifted_twice": dict(
        what="The collator shifts the labels although the model shifts them itself: each token learns the next but one.",
        kinds=["data"], part="all"),
    "left_in_eval": dict(
        what="After an evaluation nobody calls model.train(): from then on the model trains without dropout.",
        kinds=["data"], part="all"),
    "causal_mask_lost": dict(
        what="A 4D mask of the padding alone replaces the causal one, so each token sees those that it is to predict.",
        kinds=["attention", "data"], part="all"),
    "schedule_restarted": dict(
        what="The schedule is built anew (as on resuming without its state): warm-up again, then the peak rate.",
        kinds=["rate"], part="all"),
    "rate_too_high": dict(
        what="The rate is 30 times too high from the first step.",
        kinds=["rate", "instability"], part="all", at=0),
    "moments_lost": dict(
        what="AdamW goes on without its state: moments and step counts begin at zero again.",
        kinds=["optimizer"], part="all"),
    "grads_not_zeroed": dict(
        what="zero_grad is no longer called, so gradients of all steps add up.",
        kinds=["gradients"], part="all"),
    "block_not_loaded": dict(
        what="Block 1 has fresh initial weights, as after a checkpoint loaded with strict=False that lacks it.",
        kinds=["weights"], part="block1"),
    "embedding_init": dict(
        what="The token embedding, tied to the head, begins with a deviation of 1 in place of the config's.",
        kinds=["weights", "output_logits"], part="embedding", at=0),
    "lower_block_frozen": dict(
        what="requires_grad of block 0 is switched off and stays so.",
        kinds=["frozen", "dead"], part="block0"),
    "empty_document": dict(
        what="A loss by hand, the mean over each document's labels, meets a document without any: 0 / 0, then NaN everywhere.",
        kinds=["not_finite", "data"], part="all"),
    "weights_in_bf16": dict(
        what="Weights and moments are cast to bfloat16 and trained so, without a copy in fp32: small updates are lost.",
        kinds=["precision"], part="all"),
    "no_activation": dict(
        what="The MLP of block 2 loses its GELU and is linear.",
        kinds=["activations"], part="block2"),
}
HEALTHY = {
    "accumulation": "Each batch in two micro-batches whose gradients are added, each loss halved.",
    "resumed": "At step `at` everything is built anew from a checkpoint with all its state and recorded with first_step.",
    "averaged_and_evaluated": "An EMA copy is kept aside; it and the model are evaluated every 40 steps, then model.train().",
    "autocast_bf16": "The forward pass runs in autocast to bfloat16, weights stay in fp32.",
    "batch_ramp": "The batch grows from 6 documents to 12 at step 60 and to 18 at step 120.",
}
