"""Transcription of made-up log-mel frames by a small Whisper-like encoder-decoder, trained with AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
BATCH = 16
FRAMES, MELS = 32, 16          # every clip is padded with silence to this length, as Whisper pads to 30 s
PHONES = 12
PAD, BOS, EOS = PHONES, PHONES + 1, PHONES + 2
VOCAB = PHONES + 3
MAX_TEXT = 6                   # at most five phones and the end
WIDTH, HEADS = 32, 2
LR, WARMUP = 3e-3, 20
CLIP = 1.0
RESUME_AT = 100

FAULTS = {
    "lr_peak_wrong": dict(
        what="After a restart the learning rate is fifteen times what the schedule should give.",
        kinds=["rate"], part="all"),
    "pairs_shuffled": dict(
        what="The collator sorts the clips by length and leaves the transcripts in the old order.",
        kinds=["data"], part="all"),
    "mel_in_decibel": dict(
        what="New shards hold spectrograms in raw decibel, without Whisper's clamping and scaling.",
        kinds=["data"], part="all"),
    "eval_left_on": dict(
        what="After a validation the model stays in eval mode, so dropout is off from then on.",
        kinds=["data"], part="all"),
    "silent_clip": dict(
        what="A clip of digital silence gets to the logarithm without a floor, and the input holds -inf.",
        kinds=["not_finite", "data"], part="all"),
    "mask_inverted": dict(
        what="The mask of padded frames is inverted: all attention to audio frames sees only the padding.",
        kinds=["attention", "data"], part="all"),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed between updates and pile up.",
        kinds=["gradients"], part="all"),
    "block_frozen": dict(
        what="The lowest encoder block was set to requires_grad=False and does not train any more.",
        kinds=["frozen"], part="block0"),
    "block_not_loaded": dict(
        what="At a restart the keys of the last decoder block did not match (strict=False): it has fresh weights.",
        kinds=["weights"], part="block3"),
    "decay_too_high": dict(
        what="The weight decay is 20 in place of 0.1, for all weights with norms and biases.",
        kinds=["optimizer", "weights"], part="all"),
    "stem_not_in_optimizer": dict(
        what="The two convolutions at the entrance were never given to the optimizer.",
        kinds=["frozen"], part="other", at=0),
    "head_init_too_large": dict(
        what="The output head is made with a standard deviation of 1 in place of 0.02, so the logits are huge.",
        kinds=["weights", "output_logits"], part="head", at=0),
    "pure_bf16": dict(
        what="The whole model is cast to bfloat16 without float32 master weights, so small updates are rounded off.",
        kinds=["precision"], part="all", at=0),
}

HEALTHY = {
    "accumulation": "Each update takes the gradients of two micro-batches of eight clips.",
    "evaluation": "Every 20 updates the loss on held-out clips is taken in eval mode, then train mode is set again.",
    "resuming": "The run goes on from a checkpoint of model and optimizer, taken after 100 updates.",
    "spec_augment": "SpecAugment hides a band and two frames of each clip from the first step on.",
    "ema": "An exponential average of the weights is kept aside for evaluation.",
}


class Speech:
    """Sentences of random phones, each spoken as four or five noisy frames of its own spectral template."""

    def __init__(self, seed):
        world = np.random.default_rng(1234)
        self.templates = 10.0 ** (1.5 * world.standard_normal((PHONES, MELS)))
        self.rng = np.random.default_rng(seed)

    def clip(self):
        rng = self.rng
        text = rng.integers(PHONES, size=int(rng.integers(3, MAX_TEXT)))
        durations = rng.choice([4, 5], len(text), p=[0.8, 0.2])
        sound = np.repeat(self.templates[text], durations, axis=0)
        sound = sound * np.exp(0.3 * rng.standard_normal(sound.shape)) * np.exp(0.5 * rng.standard_normal())
        return text, sound + 1e-3

    def batch(self, size=BATCH):
        power = np.full((size, FRAMES, MELS), 1e-4, dtype=np.float32)
        mask = np.zeros((size, FRAMES), dtype=bool)
        labels = np.full((size, MAX_TEXT), -100, dtype=np.int64)
        for i in range(size):
            text, sound = self.clip()
            length = min(len(sound), FRAMES - 4)
            power[i, :length] = sound[:length]
            mask[i, :length] = True
            labels[i, :len(text)] = text
            labels[i, len(text)] = EOS
        return torch.from_numpy(power), torch.from_numpy(mask), torch.from_numpy(labels)


def log_mel(power, floor=1e-10):
    """Whisper's log-mel: a floor, eight decades at most, and scaled to about -1 to 1."""
    mel = power.clamp(min=floor).log10()
    mel = torch.maximum(mel, mel.amax(dim=(1, 2), keepdim=True) - 8.0)
    return (mel + 4.0) / 4.0


def shift_right(labels):
    tokens = labels.masked_fill(labels == -100, PAD)
    return torch.cat([torch.full_like(tokens[:, :1], BOS), tokens[:, :-1]], dim=1)


def spec_augment(mel, rng):
    mel = mel.clone()
    for clip in mel:
        band, frame = int(rng.integers(MELS)), int(rng.integers(FRAMES - 1))
        mean = clip.mean()
        clip[:, band] = mean
        clip[frame:frame + 2] = mean
    return mel


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, source=None, mask=None, causal=False):
        k, v = self.key_value(x if source is None else source).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.query(x), k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, cross=False):
        super().__init__()
        self.attn_norm = nn.LayerNorm(WIDTH)
        self.attn = Attention()
        self.cross_norm = nn.LayerNorm(WIDTH) if cross else None
        self.cross_attn = Attention() if cross else None
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.1)

    def forward(self, x, mask, audio=None):
        if self.cross_attn is None:
            x = x + self.drop(self.attn(self.attn_norm(x), mask=mask))
        else:
            x = x + self.drop(self.attn(self.attn_norm(x), causal=True))
            x = x + self.drop(self.cross_attn(self.cross_norm(x), audio, mask=mask))
        return x + self.drop(self.mlp(self.mlp_norm(x)))


def sinusoids(length, channels):
    scales = torch.exp(-math.log(10000) / (channels // 2 - 1) * torch.arange(channels // 2))
    angles = torch.arange(length)[:, None] * scales[None]
    return torch.cat([angles.sin(), angles.cos()], dim=1)


class Encoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.conv1 = nn.Conv1d(MELS, WIDTH, 3, padding=1)
        self.conv2 = nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)
        self.register_buffer("positions", sinusoids(FRAMES // 2, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, mel, mask):
        x = F.gelu(self.conv1(mel.transpose(1, 2)))
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        x = x + self.positions
        for block in self.blocks:
            x = block(x, mask)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(torch.empty(MAX_TEXT, WIDTH))
        self.blocks = nn.ModuleList(Block(cross=True) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, audio, mask):
        x = self.embedding(tokens) + self.positions[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask, audio)
        return self.head(self.norm(x))


class Whisper(nn.Module):
    def __init__(self, head_std=0.02):
        super().__init__()
        self.encoder = Encoder()
        self.decoder = Decoder()
        for conv in (self.encoder.conv1, self.encoder.conv2):
            nn.init.kaiming_normal_(conv.weight)
        nn.init.normal_(self.decoder.embedding.weight, std=0.1)
        nn.init.normal_(self.decoder.positions, std=0.5)
        nn.init.normal_(self.decoder.head.weight, std=head_std)

    def forward(self, mel, frame_mask, tokens):
        mask = frame_mask[:, None, None, ::2]       # the second convolution halves the frames
        audio = self.encoder(mel.to(self.encoder.conv1.weight.dtype), mask)
        return self.decoder(tokens, audio, mask)


def transcription_loss(model, mel, mask, labels):
    logits = model(mel, mask, shift_right(labels))
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


def make_optimizer(model, without=()):
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith(tuple(without))]
    decayed = [p for n, p in named if p.ndim > 1]
    plain = [p for n, p in named if p.ndim <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
                             lr=LR, betas=(0.9, 0.98), eps=1e-6, fused=True)


def learning_rate(step):
    """Linear warm-up, then linear decay to a tenth."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (1.0 - 0.9 * (step - WARMUP) / (STEPS - WARMUP))


@torch.no_grad()
def evaluate(model, batch):
    model.eval()
    power, mask, labels = batch
    return transcription_loss(model, log_mel(power), mask, labels).item()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    speech = Speech(seed)
    held_out = Speech(seed + 1000).batch(32)
    augment_rng = np.random.default_rng(seed + 2000)

    model = Whisper(head_std=1.0 if name == "head_init_too_large" else 0.02)
    if name == "pure_bf16":
        model = model.to(torch.bfloat16)
    optimizer = make_optimizer(model, without=("encoder.conv",) if name == "stem_not_in_optimizer" else ())
    recorder = None
    if name != "resuming":
        recorder = lab.record(model, optimizer, every=every, out=out)
    average = copy.deepcopy(model) if name == "ema" else None
    micro_batches = 2 if name == "accumulation" else 1

    model.train()
    losses = []
    for step in range(STEPS):
        if name == "resuming" and step == RESUME_AT:
            checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = Whisper()
            model.load_state_dict(checkpoint["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(checkpoint["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)

        fault = name if name in FAULTS and step >= at else None
        if step == at:
            if fault == "block_frozen":
                model.encoder.blocks[0].requires_grad_(False)
            elif fault == "block_not_loaded":
                model.decoder.blocks[-1].load_state_dict(Block(cross=True).state_dict())
            elif fault == "eval_left_on":
                evaluate(model, held_out)
            elif fault == "decay_too_high":
                for group in optimizer.param_groups:
                    group["weight_decay"] = 20.0

        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step) * (15.0 if fault == "lr_peak_wrong" else 1.0)

        total = 0.0
        for _ in range(micro_batches):
            power, mask, labels = speech.batch(BATCH // micro_batches)
            mel = log_mel(power)
            if name == "spec_augment":
                mel = spec_augment(mel, augment_rng)
            if fault == "silent_clip":
                power[0] = 0.0
                mel = log_mel(power, floor=0.0)
            elif fault == "mel_in_decibel":
                mel = 10.0 * power.clamp(min=1e-10).log10()
            elif fault == "pairs_shuffled":
                order = mask.sum(1).argsort(descending=True, stable=True)
                mel, mask = mel[order], mask[order]
            elif fault == "mask_inverted":
                mask = ~mask
            loss = transcription_loss(model, mel, mask, labels) / micro_batches
            loss.backward()
            total = total + loss.detach()

        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fault != "no_zero_grad":
            model.zero_grad(set_to_none=True)
        if recorder is not None:
            recorder.step(total)
        losses.append(float(total))

        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.02)
        if name == "evaluation" and (step + 1) % 20 == 0:
            evaluate(model, held_out)
            model.train()
    recorder.close()
    return losses
