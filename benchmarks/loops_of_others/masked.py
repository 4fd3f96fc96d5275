"""Masked-language modelling of a small BERT (transformers, from a config) on an invented language, with AdamW."""
import copy
import math
import random

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForMaskedLM

import lab

STEPS = 240
WARM_UP = 24
RATE = 5e-3
BATCH = 32
WIDTH = 40
BLOCKS = 3
LENGTH = 14

# ------------------------------------------------------------------ the language

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
PAD, CLS, SEP, MASK = range(4)
GENDERS, TOPICS = 2, 2
DETERMINERS = [["der", "ein"], ["die", "eine"]]
ADJECTIVES = [["roter", "alter"], ["rote", "alte"]]
PRONOUNS = ["er", "sie"]
PREPOSITIONS = ["in", "an"]
NOUNS = [[[f"n{t}{g}{i}" for i in range(2)] for g in range(GENDERS)] for t in range(TOPICS)]
VERBS = [[f"v{t}{i}" for i in range(2)] for t in range(TOPICS)]


def flat(words):
    return [words] if isinstance(words, str) else [w for part in words for w in flat(part)]


WORDS = SPECIAL + flat([DETERMINERS, ADJECTIVES, PRONOUNS, PREPOSITIONS, NOUNS, VERBS, "."])
NUMBER = {word: i for i, word in enumerate(WORDS)}


def noun_phrase(rng, topic):
    gender = rng.randrange(GENDERS)
    words = [rng.choice(DETERMINERS[gender])]
    if rng.random() < 0.5:
        words.append(rng.choice(ADJECTIVES[gender]))
    return words + [rng.choice(NOUNS[topic][gender])], gender


def sentence(rng, topic):
    """Subject, verb, preposition and object of one topic, then a pronoun for the subject and the same verb."""
    subject, gender = noun_phrase(rng, topic)
    thing, _ = noun_phrase(rng, topic)
    which = rng.randrange(2)
    verb = VERBS[topic][which]
    words = subject + [verb, PREPOSITIONS[topic]] + thing
    if rng.random() < 0.5:
        words += [PRONOUNS[gender], verb]
    return words + ["."]


def text(rng):
    return [CLS] + [NUMBER[w] for w in sentence(rng, rng.randrange(TOPICS))] + [SEP]


def draw_texts(rng, count):
    rows = [text(rng) for _ in range(count)]
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def mask_tokens(ids, generator, share=0.15):
    """As in BERT: of the chosen tokens 80% become [MASK], 10% another word, 10% stay; labels elsewhere are -100."""
    chosen = (torch.rand(ids.shape, generator=generator) < share) & (ids > SEP)
    fate = torch.rand(ids.shape, generator=generator)
    others = torch.randint(len(SPECIAL), len(WORDS), ids.shape, generator=generator)
    inputs = torch.where(chosen & (fate < 0.8), MASK, ids)
    inputs = torch.where(chosen & (fate >= 0.9), others, inputs)
    return inputs, torch.where(chosen, ids, -100)


# ------------------------------------------------------------------ model, optimizer, schedule


def make_model():
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=WIDTH, num_hidden_layers=BLOCKS, num_attention_heads=4,
        intermediate_size=2 * WIDTH, max_position_embeddings=LENGTH, initializer_range=0.1,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config).train()


def make_optimizer(model, name):
    """AdamW without decay for biases and norms."""
    named = list(model.named_parameters())
    if name == "block_not_in_optimizer":
        named = [(n, p) for n, p in named if "layer.0." not in n]
    groups = [
        dict(params=[p for n, p in named if p.ndim > 1], weight_decay=0.01),
        dict(params=[p for n, p in named if p.ndim == 1], weight_decay=0.0),
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), fused=True)


def share_of_rate(name, at, step):
    """Linear warm-up, then linear decay to a tenth of the rate."""
    last = 0.0 if name == "decay_to_zero" else 0.1
    if name == "rate_too_high":  # a rate for another model, and nobody thought of the warm-up
        return 10.0
    if name == "schedule_ran_out" and step >= at:
        return 0.0
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return 1 - (1 - last) * min(done, 1.0)


def make_all(name, at):
    model = make_model()
    if name == "pure_bf16":
        model.bfloat16()
    optimizer = make_optimizer(model, name)
    schedule = LambdaLR(optimizer, lambda step: share_of_rate(name, at, step))
    return model, optimizer, schedule


# ------------------------------------------------------------------ faults in the model


def plant_in_model(name, model, optimizer):
    """What is changed once, at the step where the fault begins."""
    if name == "left_in_eval":  # an evaluation without model.train() after it
        model.eval()
    if name == "moments_lost":  # resumed from the weights alone
        optimizer.state.clear()
    if name == "block_not_loaded":  # resumed with strict=False, and the names of one block did not match
        fresh = make_model()
        model.bert.encoder.layer[1].load_state_dict(fresh.bert.encoder.layer[1].state_dict())
    if name == "residual_lost":
        output = model.bert.encoder.layer[2].attention.output
        output.forward = lambda hidden, residual: output.LayerNorm(output.dropout(output.dense(hidden)))
    if name == "logits_scaled_down":  # tied weights with the scale of T5, which this model was not trained with
        decoder = model.cls.predictions.decoder
        decoder.register_forward_pre_hook(lambda module, inputs: (inputs[0] / math.sqrt(WIDTH),))


# ------------------------------------------------------------------ the loop


def batch_size(name, step, at):
    if name == "ramp_of_batches":
        return BATCH // 2 if step < at // 2 else BATCH if step < at else 2 * BATCH
    return BATCH


def loss_of(model, ids, generator, fault):
    share = 0.0 if fault == "nothing_masked" else 0.15
    inputs, labels = mask_tokens(ids, generator, share)
    if fault == "labels_everywhere":
        labels = ids
    seen = (ids != PAD).long()
    if fault == "mask_inverted":  # the convention of nn.Transformer's key_padding_mask: true is padding
        seen = 1 - seen
    logits = model(input_ids=inputs, attention_mask=seen).logits.float()
    weights = (labels != -100).float()
    log_probs = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(log_probs * weights).sum() / weights.sum()


@torch.no_grad()
def evaluate(model, texts):
    """The loss on held-out texts, masked the same way each time."""
    model.eval()
    loss = loss_of(model, texts, torch.Generator().manual_seed(1), "plain").item()
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    held_out = draw_texts(random.Random(12345), 64)
    model, optimizer, schedule = make_all(name, at)
    recorder = lab.record(model, optimizer, every=every, out=out)
    pieces = 2 if name == "accumulation" else 1
    losses = []
    for step in range(STEPS):
        if step == at:
            plant_in_model(name, model, optimizer)
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), schedule.state_dict()])
            state = torch.get_rng_state()
            model, optimizer, schedule = make_all(name, at)
            for part, kept in zip((model, optimizer, schedule), saved):
                part.load_state_dict(kept)
            torch.set_rng_state(state)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        fault = name if step >= at else "plain"
        if name == "nothing_masked" and step != at:  # one batch only
            fault = "plain"

        total = 0.0
        for _ in range(pieces):
            ids = draw_texts(rng, batch_size(name, step, at) // pieces)
            loss = loss_of(model, ids, generator, fault) / pieces
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if fault != "gradients_not_zeroed":
            optimizer.zero_grad()
            if name == "block_not_in_optimizer":
                model.zero_grad()
        recorder.step(total)
        losses.append(total.item())
        if name == "evaluation_between" and (step + 1) % 25 == 0:
            evaluate(model, held_out)
    recorder.close()
    return losses


FAULTS = {
    "labels_everywhere": dict(
        what="Labels of tokens that were not masked (padding too) are no longer -100: the loss is mostly copying.",
        kinds=["data"], part="all"),
    "left_in_eval": dict(
        what="After an evaluation the model stays in eval mode: no dropout any more.",
        kinds=["data"], part="all"),
    "nothing_masked": dict(
        what="One batch has no masked token: the mean over none is NaN, and so are all weights after its update.",
        kinds=["not_finite", "data"], part="all"),
    "schedule_ran_out": dict(
        what="The schedule's number of steps was counted wrongly: the rate is zero from a step on.",
        kinds=["rate", "frozen"], part="all"),
    "rate_too_high": dict(
        what="The rate is ten times too high and has neither warm-up nor decay.",
        kinds=["rate", "instability"], part="all", at=0),
    "moments_lost": dict(
        what="Resumed from the weights alone: AdamW's moments and step count begin anew, without a warm-up.",
        kinds=["optimizer"], part="all", lasts=20),
    "gradients_not_zeroed": dict(
        what="zero_grad is no longer called: gradients add up over all steps.",
        kinds=["gradients"], part="all"),
    "block_not_loaded": dict(
        what="A checkpoint was loaded with strict=False: one block has fresh random weights.",
        kinds=["weights"], part="block1"),
    "mask_inverted": dict(
        what="The attention mask is inverted: tokens attend to padding and not to words.",
        kinds=["attention", "data"], part="all"),
    "residual_lost": dict(
        what="The residual around the attention of a block is gone after a refactoring.",
        kinds=["activations"], part="block2"),
    "logits_scaled_down": dict(
        what="The head divides its input, and so the logits, by the root of the width.",
        kinds=["output_logits"], part="head"),
    "block_not_in_optimizer": dict(
        what="A filter by name leaves the first block out of the optimizer: it is never updated.",
        kinds=["frozen", "optimizer"], part="block0", at=0),
    "pure_bf16": dict(
        what="Weights and AdamW's moments are bfloat16, without a float32 copy: small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
}
HEALTHY = {
    "evaluation_between": "Every 25 steps the loss on held-out texts is measured in eval mode, then model.train().",
    "accumulation": "Each update adds up the gradients of two half batches, each loss divided by two.",
    "decay_to_zero": "The rate decays linearly to zero at the last step, not to a tenth.",
    "resumed": "Training stops and goes on from a checkpoint of weights, optimizer, schedule and random state.",
    "ramp_of_batches": "Batches double in size twice, half-way to `at` and at `at`.",
}
