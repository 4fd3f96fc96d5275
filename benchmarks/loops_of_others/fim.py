"""Pretrains a small GPT-BigCode (multi-query attention) with AdamW on a toy programming language, half of it as FIM."""

import copy
import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM

import lab

STEPS = 240
ROWS, LENGTH = 10, 40
PEAK, FLOOR, WARM_UP = 5e-3, 0.1, 20
DECAY, BETAS, CLIP = 0.1, (0.9, 0.95), 1.0
FIM_SHARE = 0.5

SPECIAL = ["<eod>", "<pre>", "<suf>", "<mid>"]
NAMES = list("abcdefgh")
WORDS = SPECIAL + NAMES + list("0123456789") + list("+-*=<;(){}") + ["def", "if", "while", "return", "print"]
ID = {word: index for index, word in enumerate(WORDS)}
EOD, PRE, SUF, MID = (ID[word] for word in SPECIAL)

FAULTS = {
    "labels_before_fim": dict(
        what="From a step on the labels are made of the documents before their fill-in-the-middle rearrangement, while "
             "the inputs are rearranged.",
        kinds=["data"], part="all"),
    "loader_stuck": dict(
        what="From a step on the loader gives the same batch over and over.",
        kinds=["data"], part="all"),
    "schedule_restarted": dict(
        what="At a step the schedule starts anew from its own step 0 (its state is not restored): the rate warms up from "
             "nothing and goes to its peak again.",
        kinds=["rate"], part="all"),
    "rate_typo": dict(
        what="The peak of the rate is 20 times too high, from the first step on.",
        kinds=["rate", "instability"], part="all", at=0),
    "decay_typo": dict(
        what="From a step on the weight decay is 10 in place of 0.1.",
        kinds=["optimizer"], part="all"),
    "zero_grad_forgotten": dict(
        what="From a step on gradients are no longer set to zero after the update: they add up.",
        kinds=["gradients"], part="all"),
    "block_not_loaded": dict(
        what="At a step, as by a checkpoint in which its keys are missing, the weights of one block are drawn anew.",
        kinds=["weights"], part="block1", lasts=1),
    "gelu_lost": dict(
        what="From a step on the MLP of one block is without its activation function.",
        kinds=["activations"], part="block0"),
    "causal_mask_lost": dict(
        what="From a step on the mask of attention says only which tokens are of the same document and no longer hides "
             "what comes later.",
        kinds=["attention", "data"], part="all"),
    "logits_scaled": dict(
        what="From a step on the logits are multiplied by 6 before the softmax.",
        kinds=["output_logits"], part="head"),
    "embedding_not_in_optimizer": dict(
        what="The table of token embeddings is made anew (resized for the sentinels) after the optimizer was made, which "
             "so trains the old one: the tokens' embeddings never change.",
        kinds=["frozen", "optimizer"], part="embedding", at=0),
    "batch_without_labels": dict(
        what="At a step all documents of the batch are empty, no label counts, and the mean over none of them is NaN; all "
             "weights are NaN afterwards.",
        kinds=["not_finite", "data"], part="all"),
    "weights_in_float8": dict(
        what="From a step on weights are kept in float8 (e4m3) with no copy in float32: nearly all updates are too small "
             "and are lost in rounding.",
        kinds=["precision", "frozen"], part="all"),
}

HEALTHY = {
    "accumulated": "Each update is made of two halves of the batch, each weighed by its half.",
    "evaluated": "Each 20 steps the loss on held-out rows is measured in eval mode without gradients.",
    "resumed": "After 100 steps all is saved, loaded into a new model and optimizer and trained on; recorded from there.",
    "batch_ramp": "The batch has 6 rows at first, 8 from step 40 and 10 from step 80 on.",
    "warm_stable_decay": "The rate is constant after warm-up and goes down to zero in a line over the last 80 steps.",
}


# ---- the language ----

def expression(rng, known):
    """A variable or digit, now and then with an operation on another."""
    words = [rng.choice(known)]
    if rng.random() < 0.6:
        words += [rng.choice("+-*"), rng.choice("0123456789") if rng.random() < 0.5 else rng.choice(known)]
    return words


def statement(rng, known, deep=False):
    """One statement over the variables known so far; an assignment may make a new one known."""
    kind = rng.random()
    if kind < 0.55 or deep:
        right = expression(rng, known)
        target = rng.choice(known) if deep or rng.random() < 0.5 else rng.choice(NAMES)
        if target not in known:
            known.append(target)
        return [target, "=", *right, ";"]
    if kind < 0.75:
        return ["print", "(", rng.choice(known), ")", ";"]
    head = ["if" if kind < 0.9 else "while", rng.choice(known), "<", rng.choice("0123456789")]
    return [*head, "{", *statement(rng, known, deep=True), "}"]


def document(rng):
    """The ids of one function."""
    name, argument = rng.sample(NAMES, 2)
    known = [argument]
    words = ["def", name, "(", argument, ")", "{"]
    for _ in range(rng.randint(1, 4)):
        words += statement(rng, known)
    words += ["return", rng.choice(known), ";", "}"]
    return [ID[word] for word in words]


def rearranged(rng, ids):
    """Prefix, suffix, middle with their sentinels (PSM)."""
    left, right = sorted(rng.sample(range(1, len(ids)), 2))
    return [PRE, *ids[:left], SUF, *ids[right:], MID, *ids[left:right]]


def packed_row(rng):
    """A row of documents one after the other, and the same ones without rearrangement."""
    row, original = [], []
    while len(row) < LENGTH + 1 or len(original) < LENGTH + 1:
        ids = document(rng)
        row += (rearranged(rng, ids) if rng.random() < FIM_SHARE else ids) + [EOD]
        original += ids + [EOD]
    return row[:LENGTH + 1], original[:LENGTH + 1]


def make_batch(name, seed, step, at, rows=ROWS):
    """Inputs and labels of a step; sentinels that open a part are no labels."""
    if name == "loader_stuck" and step >= at:
        step = at
    rng = random.Random(seed * 100_003 + step)
    pairs = [packed_row(rng) for _ in range(rows)]
    ids = torch.tensor([row for row, _ in pairs])
    labels = ids[:, 1:].clone()
    if name == "labels_before_fim" and step >= at:
        labels = torch.tensor([original for _, original in pairs])[:, 1:]
    if name == "batch_without_labels" and step == at:
        ids[:] = EOD
        labels = torch.full_like(labels, -100)
    labels[(labels == PRE) | (labels == SUF)] = -100
    return ids[:, :-1], labels


# ---- the model and its training ----

def make_model():
    config = GPTBigCodeConfig(
        vocab_size=len(WORDS), n_positions=LENGTH, n_embd=48, n_layer=3, n_head=4, n_inner=128, multi_query=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.05, tie_word_embeddings=False,
        bos_token_id=EOD, eos_token_id=EOD, use_cache=False)
    return GPTBigCodeForCausalLM(config)


def make_optimizer(model):
    """AdamW that decays matrices only."""
    matrices = [weight for weight in model.parameters() if weight.dim() >= 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    return torch.optim.AdamW(
        [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)], lr=PEAK, betas=BETAS)


def rate(name, step, at):
    """Warm-up in a line, then half a cosine down to a tenth."""
    peak = PEAK
    if name == "rate_typo":
        peak = 20 * PEAK
    if name == "schedule_restarted" and step >= at:
        step -= at
    if step < WARM_UP:
        return peak * (step + 1) / WARM_UP
    if name == "warm_stable_decay":
        return peak * min(1.0, (STEPS - step) / 80)
    done = min(1.0, (step - WARM_UP) / (STEPS - WARM_UP))
    return peak * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * done)))


def same_document(ids):
    """Which tokens of a row are of the same document: a mask of rows, heads, queries and keys."""
    number = (ids == EOD).cumsum(1) - (ids == EOD).long()
    return (number[:, :, None] == number[:, None, :])[:, None]


def loss_of(model, ids, labels, name, faulty):
    """Mean cross-entropy over the labels that count."""
    mask = None
    if name == "causal_mask_lost" and faulty:
        mask = same_document(ids)
    logits = model(input_ids=ids, attention_mask=mask).logits
    if name == "logits_scaled" and faulty:
        logits = 6.0 * logits
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    counts = (labels.flatten() != -100).float()
    return (each * counts).sum() / counts.sum()


@torch.no_grad()
def held_out_loss(model, seed):
    model.eval()
    loss = loss_of(model, *make_batch("plain", seed + 7, 10**6, 0), "plain", False)
    model.train()
    return float(loss)


@torch.no_grad()
def draw_block_anew(model, index):
    """New initial weights for the attention and the MLP of a block."""
    for module in model.transformer.h[index].modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 0.05)
            module.bias.zero_()


@torch.no_grad()
def round_to_float8(model):
    for weight in model.parameters():
        weight.copy_(weight.to(torch.float8_e4m3fn))


def change_model(name, model, optimizer):
    """What happens once, just before the update of the step at which a fault begins."""
    if name == "block_not_loaded":
        draw_block_anew(model, 1)
    if name == "gelu_lost":
        model.transformer.h[0].mlp.act = nn.Identity()
    if name == "decay_typo":
        optimizer.param_groups[0]["weight_decay"] = 10.0


def rows_at(name, step):
    if name == "batch_ramp":
        return 6 if step < 40 else 8 if step < 80 else ROWS
    return ROWS


def update(name, seed, step, at, model, optimizer):
    """One update; its loss."""
    faulty = step >= at
    if step == at:
        change_model(name, model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = rate(name, step, at)
    ids, labels = make_batch(name, seed, step, at, rows_at(name, step))
    parts = 2 if name == "accumulated" else 1
    total = 0.0
    for some_ids, some_labels in zip(ids.chunk(parts), labels.chunk(parts)):
        loss = loss_of(model, some_ids, some_labels, name, faulty) / parts
        loss.backward()
        total += float(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    if name == "weights_in_float8" and faulty:
        round_to_float8(model)
    if not (name == "zero_grad_forgotten" and faulty):
        optimizer.zero_grad()
    return total


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make_model()
    optimizer = make_optimizer(model)
    if name == "embedding_not_in_optimizer":
        model.transformer.wte.weight = nn.Parameter(model.transformer.wte.weight.detach().clone())
    model.train()
    losses, first = [], 0
    if name == "resumed":
        first = 100
        losses = [update(name, seed, step, at, model, optimizer) for step in range(first)]
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        model = make_model().train()
        optimizer = make_optimizer(model)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
    for step in range(first, STEPS):
        losses.append(update(name, seed, step, at, model, optimizer))
        recorder.step(losses[-1])
        if name == "evaluated" and step % 20 == 19:
            held_out_loss(model, seed)
    recorder.close()
    return losses
