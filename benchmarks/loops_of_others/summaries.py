"""A small T5 that learns to sum up short reports in a line, with AdamW, linear warm-up and linear decay."""
import random

import torch
from torch import nn
from torch.nn import functional as F
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

import lab

torch.set_num_threads(1)

STEPS = 240
BATCH = 16
WIDTH = 32
PEAK = 8e-3
WARM_UP = 30

# ---------------------------------------------------------------- the text

PAD, END = 0, 1
NAMES = "anna boris clara dmitri eva felix greta hugo".split()
FOODS = "bread cheese soup rice fish apples cake beans".split()
CITIES = "rome paris oslo cairo lima delhi".split()
DAYS = "monday tuesday wednesday thursday friday saturday".split()
FILLERS = "well then they say that it was quite nice indeed".split()
WORDS = ["<pad>", "</s>", "ate", "had", "in", "on", *NAMES, *FOODS, *CITIES, *DAYS, *FILLERS]
IDS = {word: number for number, word in enumerate(WORDS)}


def report(rng: random.Random) -> tuple[list[int], list[int]]:
    """A rambling report of who ate what, sometimes where and when, and its summary."""
    name, food, city, day = (rng.choice(words) for words in (NAMES, FOODS, CITIES, DAYS))
    clauses, summary = [[name, "ate", food]], [name, rng.choice(["ate", "had"]), food]
    if rng.random() < 0.7:
        clauses.append(["in", city])
        summary += ["in", city]
    if rng.random() < 0.7:
        clauses.append(["on", day])
        summary += ["on", day]
    rng.shuffle(clauses)
    text = []
    for clause in clauses:
        text += rng.choices(FILLERS, k=rng.randint(0, 4)) + clause
    return [IDS[word] for word in text] + [END], [IDS[word] for word in summary] + [END]


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def collate(rows: list[tuple[list[int], list[int]]]) -> dict[str, torch.Tensor]:
    source = pad([text for text, _ in rows], PAD)
    return dict(input_ids=source, attention_mask=(source != PAD).long(), labels=pad([line for _, line in rows], -100))


class Loader:
    """Batches without end; `grouped` puts reports of like length together, as group_by_length does."""

    def __init__(self, seed: int, grouped: bool = False):
        self.rng = random.Random(seed)
        self.grouped = grouped
        self.ready = []

    def batch(self, size: int = BATCH) -> dict[str, torch.Tensor]:
        if not self.grouped:
            return collate([report(self.rng) for _ in range(size)])
        if not self.ready:
            rows = sorted([report(self.rng) for _ in range(8 * size)], key=lambda row: len(row[0]))
            self.ready = [rows[start:start + size] for start in range(0, len(rows), size)]
            self.rng.shuffle(self.ready)
        return collate(self.ready.pop())


# ---------------------------------------------------------------- model and optimizer

def make_model() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=len(WORDS), d_model=WIDTH, d_kv=8, num_heads=4, d_ff=64, num_layers=3,
                      num_decoder_layers=3, dropout_rate=0.0, pad_token_id=PAD, eos_token_id=END,
                      decoder_start_token_id=PAD, tie_word_embeddings=False, use_cache=False)
    model = T5ForConditionalGeneration(config)
    with torch.no_grad():  # transformers starts an untied head far too wide
        model.lm_head.weight.normal_(0, WIDTH ** -0.5)
    return model


def make_optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)


def make_scheduler(optimizer: torch.optim.Optimizer):
    return get_linear_schedule_with_warmup(optimizer, WARM_UP, STEPS)


def resume(model, optimizer, scheduler):
    """Model, optimizer and scheduler made anew, with all their state from a checkpoint."""
    saved = model.state_dict(), optimizer.state_dict(), scheduler.state_dict()
    model = make_model()
    model.load_state_dict(saved[0])
    optimizer = make_optimizer(model, PEAK)
    scheduler = make_scheduler(optimizer)
    optimizer.load_state_dict(saved[1])
    scheduler.load_state_dict(saved[2])
    return model.train(), optimizer, scheduler


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    loader = Loader(seed=12345)
    model.eval()
    losses = [model(**loader.batch()).loss.item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The loss of a batch; `name` is the fault or habit in force at this step."""
    source, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    decoder_input = None  # the model shifts the labels itself
    if name == "pads_in_labels":
        labels = labels.masked_fill(labels == -100, PAD)
    if name == "mask_inverted":
        mask = 1 - mask
    if name == "decoder_not_shifted":
        decoder_input = labels.masked_fill(labels == -100, PAD)
    if decoder_input is None:
        decoder_input = model.prepare_decoder_input_ids_from_labels(labels)
    logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=decoder_input).logits
    if name == "label_smoothing":
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, label_smoothing=0.1)
    counts = (labels != -100).float()
    scores = logits.float().log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(scores * counts).sum() / counts.sum()


def rows_at(step: int) -> int:
    """Rows of a batch in a ramp of batch sizes."""
    return 8 if step < 60 else 16 if step < 120 else 24


def plant(model: nn.Module, optimizer: torch.optim.Optimizer, name: str) -> None:
    """What happens just once, before the update of step `at`."""
    if name == "block_not_loaded":  # block4 is the second of the decoder
        model.decoder.block[1].load_state_dict(make_model().decoder.block[1].state_dict())
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "embedding_frozen":
        model.shared.requires_grad_(False)
    if name == "residual_lost":
        layer = model.encoder.block[1].layer[1]
        layer.forward = lambda hidden: layer.DenseReluDense(layer.layer_norm(hidden))
    if name == "logits_scaled":
        model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0] * WIDTH ** -0.5,))


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    loader = Loader(seed, grouped=name == "grouped_by_length")
    model = make_model().train()
    if name == "all_bf16":
        model.bfloat16()
    optimizer = make_optimizer(model, 0.08 if name == "rate_mistyped" else PEAK)
    scheduler = make_scheduler(optimizer)
    recorder = None
    if name != "resumed":
        recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if step == at:
            plant(model, optimizer, name)
            if name == "schedule_lost":
                scheduler = make_scheduler(optimizer)
            if name == "resumed":
                model, optimizer, scheduler = resume(model, optimizer, scheduler)
                recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)
        batch = loader.batch(rows_at(step) if name == "batches_grow" else BATCH)
        if name == "summaries_empty" and step == at:
            batch["labels"].fill_(-100)
        loss = loss_of(model, batch, name if step >= at or name in HEALTHY else "plain")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if not (name == "gradients_not_zeroed" and step >= at):
            optimizer.zero_grad()
        losses.append(loss.item())
        if recorder:
            recorder.step(loss)
        if name == "evaluated" and step % 40 == 39:
            evaluate(model)
    recorder.close()
    return losses


FAULTS = {
    "pads_in_labels": dict(what="From a step on padding in the labels is not -100, so that it counts in the loss.",
                           kinds=["data"], part="all"),
    "decoder_not_shifted": dict(what="From a step on the decoder is given the labels themselves, not shifted right, "
                                     "so that it sees each token it is to predict.", kinds=["data"], part="all"),
    "mask_inverted": dict(what="From a step on the attention mask is 1 at padding and 0 at words, as nn.MultiheadAttention "
                               "wants it and transformers does not.", kinds=["attention", "data"], part="all"),
    "schedule_lost": dict(what="At a step the schedule begins anew: the rate warms up again from 0 to its peak.",
                          kinds=["rate"], part="all"),
    "rate_mistyped": dict(what="The peak rate is 0.08 in place of 0.008.", kinds=["rate", "instability"], part="all", at=0),
    "moments_lost": dict(what="At a step AdamW's state is lost and begins anew, in the middle of the schedule.",
                         kinds=["optimizer"], part="all", lasts=10),
    "block_not_loaded": dict(what="At a step one block of the decoder has fresh weights, as where a checkpoint lacked it.",
                             kinds=["weights"], part="block4", lasts=1),
    "gradients_not_zeroed": dict(what="From a step on zero_grad is not called: gradients of all steps add up.",
                                 kinds=["gradients"], part="all"),
    "embedding_frozen": dict(what="From a step on the embedding needs no gradient and is no longer trained.",
                             kinds=["frozen"], part="embedding"),
    "summaries_empty": dict(what="A batch has only -100 as labels: the mean over none is NaN, and so are all weights then.",
                            kinds=["not_finite", "data"], part="all"),
    "all_bf16": dict(what="Weights, gradients and moments are all in bf16: small updates are rounded away.",
                     kinds=["precision"], part="all", at=0),
    "logits_scaled": dict(what="From a step on the input of the head is divided by the root of the width, as only a tied "
                               "head wants it.", kinds=["output_logits"], part="head"),
    "residual_lost": dict(what="From a step on the feed-forward layer of a block of the encoder lacks its residual.",
                          kinds=["activations"], part="block1"),
}
HEALTHY = {
    "evaluated": "Every 40 steps the model is evaluated on other reports, in evaluation mode and without gradients.",
    "batches_grow": "Batches are of 8 reports at first, of 16 from step 60 on and of 24 from step 120 on.",
    "resumed": "Recorded only from a step on, where it is resumed from a checkpoint with all its state.",
    "label_smoothing": "The loss has label smoothing of 0.1.",
    "grouped_by_length": "Batches are of reports of like length, in a random order.",
}
