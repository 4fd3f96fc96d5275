"""A small speech recognizer: a convolution and a three-block Transformer encoder on drawn spectrograms, CTC, AdamW."""

import copy
import math
import os

import lab
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 240
BATCH, FRAMES, BINS, STRIDE = 16, 54, 24, 3
PHONES, BLANK = 10, 0  # labels 1 to 10; 0 is the blank of CTC
WIDTH, HEADS, BLOCKS, DROPOUT = 32, 4, 3, 0.2
PEAK, WARM_UP, CLIP = 4e-3, 30, 1.0
RESUMED_AT = 80

FAULTS = {
    "transcripts_shuffled": dict(
        what="From a step on the transcripts are shuffled within the batch: they no longer belong to the audio.",
        kinds=["data"], part="all"),
    "silent_shard": dict(
        what="A shard of ten batches has lost its audio (only noise is left), the transcripts are still there.",
        kinds=["data"], part="all", lasts=10),
    "eval_mode_stays": dict(
        what="After a validation at a step model.train() is forgotten: no dropout from there on.",
        kinds=["data"], part="all"),
    "rate_ten_fold": dict(
        what="From a step on the learning rate is ten times what the schedule says.",
        kinds=["rate", "instability"], part="all"),
    "rate_collapses": dict(
        what="A decay meant for each epoch is applied at each step: the rate halves at each step from a step on.",
        kinds=["rate"], part="all"),
    "moments_lost": dict(
        what="Resumed at a step without the state of AdamW: moments and step count begin at zero, no warm-up.",
        kinds=["optimizer"], part="all", lasts=1),
    "zero_grad_forgotten": dict(
        what="From a step on gradients are no longer zeroed: they add up over all batches.",
        kinds=["gradients", "optimizer"], part="all"),
    "block_not_loaded": dict(
        what="At a step a checkpoint is loaded that lacks block1: its weights are as drawn anew.",
        kinds=["weights"], part="block1", lasts=1),
    "head_not_in_optimizer": dict(
        what="The head is replaced after the optimizer was made, which so never trains it.",
        kinds=["frozen"], part="head", at=0),
    "mask_inverted": dict(
        what="From a step on the padding mask is inverted: attention sees only the padding.",
        kinds=["attention", "data"], part="all"),
    "residual_lost": dict(
        what="From a step on the feed-forward layer of block2 replaces its input in place of adding to it.",
        kinds=["activations"], part="block2"),
    "transcript_too_long": dict(
        what="At a step one transcript is longer than its audio: the CTC loss is infinite, all weights become NaN.",
        kinds=["not_finite", "data"], part="all"),
    "bfloat16_weights": dict(
        what="Weights and moments are kept in bfloat16 without a float32 copy: small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
}

HEALTHY = {
    "accumulation": "Each update takes the gradients of two half batches, each loss divided by two.",
    "validation": "Every 20 steps a validation in eval mode without gradients, then back to train mode.",
    "cosine_to_zero": "After the warm-up the rate falls to zero along a cosine.",
    "resumed": f"Resumed at step {RESUMED_AT} from a checkpoint with all its state; recorded from there on.",
    "spec_augment": "Each spectrogram has a band of bins and a span of frames masked.",
}


def draw_templates() -> np.ndarray:
    """The spectrum of each phone: two formants over the bins."""
    rng = np.random.default_rng(7)
    bins = np.arange(BINS)
    centres = np.stack([rng.permutation(np.linspace(2, 10, PHONES)), rng.permutation(np.linspace(12, 21, PHONES))], 1)
    return sum(2.5 * np.exp(-0.5 * ((bins[None] - centres[:, k : k + 1]) / 1.2) ** 2) for k in range(2))


TEMPLATES = np.stack([np.roll(draw_templates(), shift, axis=1) for shift in (-1, 0, 1)])  # voice, phone, bin


def draw_batch(seed: int, step: int):
    """Log spectrograms (BATCH, FRAMES, BINS), their lengths, transcripts and their lengths."""
    rng = np.random.default_rng([seed, step])
    audio = 0.4 * rng.standard_normal((BATCH, FRAMES, BINS), dtype=np.float32)
    phones = rng.integers(0, PHONES, (BATCH, 5))
    counts = rng.integers(3, 6, BATCH)
    durations, gaps = rng.integers(4, 8, (BATCH, 5)), rng.integers(2, 4, (BATCH, 5))
    voices, gains, starts = rng.integers(0, 3, BATCH), rng.uniform(0.7, 1.3, BATCH), rng.integers(0, 2, BATCH)
    lengths = np.zeros(BATCH, dtype=np.int64)
    for i in range(BATCH):
        frame = starts[i]
        for j in range(counts[i]):
            audio[i, frame : frame + durations[i, j]] += gains[i] * TEMPLATES[voices[i], phones[i, j]]
            frame += durations[i, j] + gaps[i, j]
        lengths[i] = frame
        audio[i, frame:] = 0.0
    return torch.from_numpy(audio), torch.from_numpy(lengths), torch.from_numpy(phones + 1), torch.from_numpy(counts)


def spec_augment(audio: torch.Tensor, seed: int, step: int) -> torch.Tensor:
    rng = np.random.default_rng([seed, step, 1])
    audio = audio.clone()
    for row in audio:
        low, start = int(rng.integers(BINS - 3)), int(rng.integers(FRAMES - 4))
        row[:, low : low + int(rng.integers(0, 4))] = 0.0
        row[start : start + int(rng.integers(0, 5))] = 0.0
    return audio


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, padding):
        rows, time, _ = x.shape
        q, k, v = self.qkv(x).view(rows, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = (q / math.sqrt(WIDTH // HEADS)) @ k.transpose(-1, -2)
        scores = scores.masked_fill(padding[:, None, None, :], -1e4)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, time, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.residual = True

    def forward(self, x, padding):
        x = x + self.dropout(self.attention(self.norm1(x), padding))
        change = self.dropout(self.down(F.relu(self.up(self.norm2(x)))))
        return x + change if self.residual else change


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Conv1d(BINS, WIDTH, kernel_size=5, stride=STRIDE, padding=2)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, PHONES + 1)
        self.register_buffer("positions", sinusoids(FRAMES // STRIDE))
        self.dropout = nn.Dropout(DROPOUT)
        self.invert_mask = False

    def forward(self, audio, lengths):
        x = F.gelu(self.front(audio.transpose(1, 2))).transpose(1, 2)
        x = self.dropout(x + self.positions)
        lengths = (lengths - 1) // STRIDE + 1  # the front strides over the frames
        padding = torch.arange(x.shape[1])[None] >= lengths[:, None]
        if self.invert_mask:
            padding = ~padding
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.norm(x)), lengths


def sinusoids(time: int) -> torch.Tensor:
    angle = torch.arange(time)[:, None] * torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1000.0) / WIDTH))
    return 0.5 * torch.cat([angle.sin(), angle.cos()], 1)


def ctc(model, audio, lengths, words, word_lengths):
    logits, lengths = model(audio.to(model.head.weight.dtype), lengths)
    log_probs = logits.float().log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probs, words, lengths, word_lengths, blank=BLANK)


def validate(model, seed: int) -> float:
    """The loss on held-out utterances; leaves the model in eval mode."""
    model.eval()
    with torch.no_grad():
        return ctc(model, *draw_batch(seed, 10**6)).item()


def rate_at(step: int, name: str, at: int) -> float:
    """Linear warm-up, then the inverse square root of the step."""
    rate = PEAK * min((step + 1) / WARM_UP, math.sqrt(WARM_UP / (step + 1)))
    if name == "cosine_to_zero" and step >= WARM_UP:
        rate = PEAK * 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
    if name == "rate_ten_fold" and step >= at:
        rate *= 10
    if name == "rate_collapses" and step >= at:
        rate *= 0.5 ** (step - at + 1)
    return rate


def batch_at(step: int, name: str, seed: int, at: int):
    audio, lengths, words, word_lengths = draw_batch(seed, step)
    if name == "transcripts_shuffled" and step >= at:
        order = torch.from_numpy(np.random.default_rng([seed, step, 2]).permutation(BATCH))
        words, word_lengths = words[order], word_lengths[order]
    if name == "silent_shard" and at <= step < at + 10:
        audio = 0.4 * torch.from_numpy(np.random.default_rng([seed, step, 3]).standard_normal(audio.shape)).float()
    if name == "transcript_too_long" and step == at:
        words = words.repeat(1, 8)
        word_lengths = word_lengths.clone()
        word_lengths[0] = words.shape[1]
    if name == "spec_augment":
        audio = spec_augment(audio, seed, step)
    return audio, lengths, words, word_lengths


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def build(name: str):
    model = Recognizer()
    if name == "bfloat16_weights":
        model.to(torch.bfloat16)
    optimizer = make_optimizer(model)
    if name == "head_not_in_optimizer":
        model.head = nn.Linear(WIDTH, PHONES + 1)
    return model, optimizer


def resume(model, optimizer):
    """A new model and optimizer from the checkpoint of the old ones, and the state of the random numbers."""
    saved = copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict(), rng=torch.get_rng_state()))
    model, optimizer = build("resumed")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["rng"])
    return model, optimizer


def change_model(model, optimizer, name: str, seed: int) -> None:
    """What happens once, before the update of step `at`."""
    if name == "eval_mode_stays":
        validate(model, seed)
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "block_not_loaded":
        model.blocks[1].load_state_dict(Block().state_dict())
    if name == "mask_inverted":
        model.invert_mask = True
    if name == "residual_lost":
        model.blocks[2].residual = False


def backward(model, batch, name: str) -> torch.Tensor:
    pieces = 2 if name == "accumulation" else 1
    total = 0.0
    for piece in zip(*(part.chunk(pieces) for part in batch)):
        loss = ctc(model, *piece) / pieces
        loss.backward()
        total = total + loss.detach()
    return total


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    model, optimizer = build(name)
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == RESUMED_AT:
            model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if step == at:
            change_model(model, optimizer, name, seed)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name, at)
        if not (name == "zero_grad_forgotten" and step >= at):
            model.zero_grad()
        loss = backward(model, batch_at(step, name, seed, at), name)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
        if name == "validation" and step % 20 == 19:
            validate(model, seed)
            model.train()
    recorder.close()
    return losses


def check(out: str = "speech.jsonl") -> None:
    """Print the losses of each run in tens, and from where on they differ from the plain run."""
    plain = train("plain", 0, 150, 10, out)
    for name in ["plain", *HEALTHY, *FAULTS]:
        losses = plain if name == "plain" else train(name, 0, 150, 10, out)
        differs = next((i for i in range(STEPS) if losses[i] != plain[i]), None)
        tens = [round(sum(losses[i : i + 10]) / 10, 2) for i in (0, 50, 100, 140, 150, 160, 180, 230)]
        print(f"{name:24s} differs from {differs}", tens, [round(x, 2) for x in losses[148:154]])
    os.remove(out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    check()
