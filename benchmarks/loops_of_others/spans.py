"""A small T5 (encoder-decoder, by hand) is pretrained by span corruption on a made-up language, with Adafactor."""
import contextlib
import copy
import math
import random

import lab
import torch
import torch.nn.functional as F
from torch import nn

STEPS = 240
BATCH = 16
PEAK = 0.02             # Adafactor scales it by the root mean square of each parameter
WARMUP = 30
DECAY = 0.03            # decoupled, times the rate; of the matrices alone

PAD, EOS = 0, 1
TOPICS, WORDS = 6, 8    # each topic has its own words, said in a fixed order, now and then with one left out
FIRST_WORD = 2
SENTINELS = 8
VOCAB = FIRST_WORD + TOPICS * WORDS + SENTINELS
WIDTH, HEADS, HIDDEN = 32, 4, 64
ENCODER_BLOCKS, DECODER_BLOCKS = 2, 1
BUCKETS = 24            # relative distances are cut off at half of it either way

FAULTS = {
    "rate_too_low": {
        "what": "Adafactor, which scales the rate by the parameters, gets the small one of a fine-tuning recipe.",
        "kinds": ["rate"], "part": "all", "at": 0},
    "head_large": {
        "what": "The untied output head is made with the initial values of the embedding (deviation 1).",
        "kinds": ["weights", "output_logits"], "part": "head", "at": 0},
    "not_shifted": {
        "what": "The decoder gets the targets themselves as its input, not shifted to the right by one.",
        "kinds": ["data"], "part": "all", "at": 0},
    "embedding_left_out": {
        "what": "The optimizer is made from the parameters of the blocks, norms and head; the embedding is left out.",
        "kinds": ["frozen"], "part": "embedding", "at": 0},
    "rate_times_ten": {
        "what": "The restarted job is given ten times the learning rate.",
        "kinds": ["rate"], "part": "all"},
    "zero_grad_lost": {
        "what": "The gradients are no longer zeroed between updates and add up.",
        "kinds": ["gradients"], "part": "all"},
    "targets_shuffled": {
        "what": "The new loader shuffles the inputs but not the targets: each input has another one's target.",
        "kinds": ["data"], "part": "all"},
    "padding_counted": {
        "what": "The padding of the targets is no longer ignored by the loss.",
        "kinds": ["data"], "part": "all"},
    "bad_shard": {
        "what": "A broken shard is read in which the words are random.",
        "kinds": ["data"], "part": "all", "lasts": 30},
    "block_frozen": {
        "what": "The last block of the encoder is set not to require gradients any more.",
        "kinds": ["frozen", "dead"], "part": "block1"},
    "half_overflow": {
        "what": "Training goes on in half precision with a fixed loss scale far too large and no check for overflow.",
        "kinds": ["precision", "not_finite"], "part": "all"},
    "embedding_new": {
        "what": "On a restart the key of the embedding does not match the checkpoint, and it is newly initialised.",
        "kinds": ["weights"], "part": "embedding"},
    "decay_large": {
        "what": "The weight decay is set a hundred times too large, so that all matrices shrink.",
        "kinds": ["optimizer", "weights"], "part": "all"},
}

HEALTHY = {
    "accumulate": "Each update is made of the gradients of two half-batches.",
    "resume": "The run goes on at update 60 from a checkpoint of the model and the optimizer.",
    "linear_decay": "After the warm-up the rate falls linearly to nearly zero, not by the inverse square root.",
    "batch_ramp": "The batch grows from 8 over 12 to 16 rows.",
    "average": "A moving average of the weights is kept aside and evaluated on held-out text every 40 updates.",
}


# ---------------------------------------------------------------- the language and its corruption

def sentence(rng):
    """Words of one topic in their order; one in ten times a word is left out."""
    first, place = FIRST_WORD + rng.randrange(TOPICS) * WORDS, rng.randrange(WORDS)
    words = []
    for _ in range(rng.randint(12, 30)):
        words.append(first + place % WORDS)
        place += 2 if rng.random() < 0.1 else 1
    return words


def segments(total, parts, rng):
    """Cuts `total` into `parts` lengths of at least one."""
    cuts = [0, *sorted(rng.sample(range(1, total), parts - 1)), total]
    return [end - start for start, end in zip(cuts, cuts[1:])]


def corrupt(words, rng, density=0.2, mean_span=2.0):
    """Span corruption: spans give way to sentinels in the source, and stand behind them in the target."""
    noise = max(1, round(len(words) * density))
    spans = max(1, round(noise / mean_span))
    kept, dropped = segments(len(words) - noise, spans, rng), segments(noise, spans, rng)
    source, target, place = [], [], 0
    for i in range(spans):
        sentinel = VOCAB - 1 - i
        source += [*words[place:place + kept[i]], sentinel]
        place += kept[i]
        target += [sentinel, *words[place:place + dropped[i]]]
        place += dropped[i]
    return source + [EOS], target + [EOS]


def pad(rows):
    longest = max(map(len, rows))
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def make_batch(size, rng, broken=False):
    rows = [sentence(rng) for _ in range(size)]
    if broken:
        rows = [[FIRST_WORD + rng.randrange(TOPICS * WORDS) for _ in row] for row in rows]
    pairs = [corrupt(row, rng) for row in rows]
    return pad([source for source, _ in pairs]), pad([target for _, target in pairs])


def shift_right(targets):
    return F.pad(targets, (1, 0), value=PAD)[:, :-1]


# ---------------------------------------------------------------- the model

class Attention(nn.Module):
    """Without a scale by the square root of the width, as T5 has it: the initial values of the queries hold it."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.normal_(self.q.weight, std=(WIDTH * WIDTH // HEADS) ** -0.5)
        nn.init.normal_(self.kv.weight, std=WIDTH ** -0.5)
        nn.init.normal_(self.o.weight, std=WIDTH ** -0.5)

    def forward(self, x, memory, bias):
        rows, length, _ = x.shape
        q = self.q(x).view(rows, length, HEADS, -1).transpose(1, 2)
        k, v = self.kv(memory).view(rows, memory.shape[1], 2, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(rows, length, WIDTH))


class FeedForward(nn.Module):
    """Gated GELU."""

    def __init__(self):
        super().__init__()
        self.wi = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)
        nn.init.normal_(self.wi.weight, std=WIDTH ** -0.5)
        nn.init.normal_(self.wo.weight, std=HIDDEN ** -0.5)

    def forward(self, x):
        gate, value = self.wi(x).chunk(2, -1)
        return self.wo(F.gelu(gate) * value)


class Block(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        if decoder:
            self.norm2, self.cross = nn.RMSNorm(WIDTH, eps=1e-6), Attention()
        self.norm3, self.ff = nn.RMSNorm(WIDTH, eps=1e-6), FeedForward()
        self.decoder = decoder

    def forward(self, x, bias, memory=None, memory_bias=None):
        h = self.norm1(x)
        x = x + self.attention(h, h, bias)
        if self.decoder:
            x = x + self.cross(self.norm2(x), memory, memory_bias)
        return x + self.ff(self.norm3(x))


class RelativeBias(nn.Module):
    """One bias for each head and distance, shared by the blocks of a stack."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS + 1, HEADS)
        nn.init.normal_(self.table.weight, std=WIDTH ** -0.5)

    def forward(self, length):
        places = torch.arange(length)
        distance = (places[None] - places[:, None]).clamp(-BUCKETS // 2, BUCKETS // 2)
        return self.table(distance + BUCKETS // 2).permute(2, 0, 1)[None]


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.ModuleList([Block(decoder=False) for _ in range(ENCODER_BLOCKS)])
        self.decoder = nn.ModuleList([Block(decoder=True) for _ in range(DECODER_BLOCKS)])
        self.encoder_bias, self.decoder_bias = RelativeBias(), RelativeBias()
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=WIDTH ** -0.5)

    def forward(self, source, decoder_input):
        hidden = torch.zeros(source.shape).masked_fill(source == PAD, -1e4)[:, None, None]
        future = torch.full((decoder_input.shape[1],) * 2, -1e4).triu(1)
        x = self.embedding(source)
        bias = self.encoder_bias(source.shape[1]) + hidden
        for block in self.encoder:
            x = block(x, bias)
        memory = self.encoder_norm(x)
        x = self.embedding(decoder_input)
        bias = self.decoder_bias(decoder_input.shape[1]) + future
        for block in self.decoder:
            x = block(x, bias, memory, hidden)
        return self.head(self.decoder_norm(x))


# ---------------------------------------------------------------- the training

def make_optimizer(parameters):
    groups = [{"params": [p for p in parameters if p.ndim > 1], "weight_decay": DECAY},
              {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.Adafactor(groups, lr=PEAK, foreach=True)


def rate_at(step, name):
    warm = min(1.0, (step + 1) / WARMUP)
    if name == "linear_decay":
        return PEAK * warm * min(1.0, (STEPS - step) / (STEPS - WARMUP))
    return PEAK * warm * math.sqrt(WARMUP / max(step + 1, WARMUP))


@torch.no_grad()
def evaluate(model, held_out):
    model.eval()
    source, targets = held_out
    logits = model(source, shift_right(targets))
    model.train()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD).item()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = random.Random(seed)
    held_out = make_batch(32, random.Random(10_000 + seed))

    model = T5()
    if name == "head_large":
        nn.init.normal_(model.head.weight, std=1.0)
    parameters = list(model.parameters())
    if name == "embedding_left_out":
        parameters = [p for key, p in model.named_parameters() if not key.startswith("embedding")]
    optimizer = make_optimizer(parameters)
    average = copy.deepcopy(model) if name == "average" else None
    first = 60 if name == "resume" else 0
    recorder = None if first else lab.record(model, optimizer, every=every, out=out)

    losses, scores = [], []
    for step in range(STEPS):
        if first and step == first:
            checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = T5()
            model.load_state_dict(checkpoint["model"])
            optimizer = make_optimizer(list(model.parameters()))
            optimizer.load_state_dict(checkpoint["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        faulty = name in FAULTS and at <= step < at + FAULTS[name].get("lasts", STEPS)
        begins = faulty and step == at

        if begins and name == "block_frozen":
            model.encoder[1].requires_grad_(False)
        if begins and name == "embedding_new":
            nn.init.normal_(model.embedding.weight, std=1.0)
        if begins and name == "decay_large":
            optimizer.param_groups[0]["weight_decay"] = 100 * DECAY

        rate = rate_at(step, name)
        if faulty and name == "rate_times_ten":
            rate *= 10
        if faulty and name == "rate_too_low":
            rate *= 1e-4 / PEAK
        for group in optimizer.param_groups:
            group["lr"] = rate

        size = BATCH
        if name == "batch_ramp":
            size = 8 if step < 80 else 12 if step < 160 else BATCH
        source, targets = make_batch(size, rng, broken=faulty and name == "bad_shard")
        if faulty and name == "targets_shuffled":
            source = source[rng.sample(range(size), size)]
        decoder_input = shift_right(targets)
        if faulty and name == "not_shifted":
            decoder_input = targets
        ignore = -100 if faulty and name == "padding_counted" else PAD

        half = faulty and name == "half_overflow"
        scale = 2.0 ** 24 if half else 1.0
        parts = 2 if name == "accumulate" else 1
        total = 0.0
        for s, d, t in zip(source.chunk(parts), decoder_input.chunk(parts), targets.chunk(parts)):
            with torch.autocast("cpu", torch.float16) if half else contextlib.nullcontext():
                logits = model(s, d)
            loss = F.cross_entropy(logits.float().flatten(0, 1), t.flatten(), ignore_index=ignore) / parts
            (loss * scale).backward()
            total = total + loss.detach()
        if half:
            for p in parameters:
                p.grad.div_(scale)
        optimizer.step()
        if not (faulty and name == "zero_grad_lost"):
            model.zero_grad()
        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)

        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.05)
            if (step + 1) % 40 == 0:
                scores.append(evaluate(average, held_out))
    recorder.close()
    return losses
