"""Fine-tunes a small pretrained encoder to tell the mood of reviews: AdamW, layer-wise rates."""

import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
WARM_UP, PRETRAIN_STEPS, BATCH = 24, 60, 24
PEAK_RATE, WEIGHT_DECAY, CLIP = 2e-3, 0.01, 1.0
RATE_DECAY = 0.75  # from one layer to the one below it
WIDTH, HEADS, BLOCKS, MAX_LENGTH = 32, 2, 4, 26

FAULTS = {
    "classes_swapped": dict(what="From a step on two classes are swapped.", kinds=["data"], part="all"),
    "left_in_eval": dict(what="From a step on the model is left in evaluation mode.", kinds=["data"], part="all"),
    "padding_attended": dict(what="From a step on the padding mask is not passed on: all tokens attend to the padding.",
        kinds=["attention", "data"], part="all"),
    "schedule_ends_early": dict(what="The schedule was told too few steps in all: from a step on the rate is zero.",
        kinds=["rate", "frozen"], part="all"),
    "pretraining_rate": dict(what="The rate is 25 times too high and without warm-up, from the start.",
        kinds=["rate", "instability"], part="all", at=0),
    "zero_grad_missing": dict(what="From a step on gradients are not zeroed between updates and pile up.",
        kinds=["gradients", "optimizer"], part="all"),
    "block_not_restored": dict(what="At a step a block is random again.", kinds=["weights"], part="block1"),
    "block_left_out": dict(what="The last block is in no layer-wise group.",
        kinds=["frozen", "optimizer"], part="block3", at=0),
    "empty_review": dict(what="A review is empty: its softmax is NaN.",
        kinds=["not_finite", "data", "attention"], part="all"),
    "bf16_weights": dict(what="From a step on all weights are kept in bfloat16.",
        kinds=["precision", "weights"], part="all"),
    "residual_lost": dict(what="From a step on a block has no residual.", kinds=["activations"], part="block2"),
    "sharp_logits": dict(what="From a step on logits are divided by a temperature of 0.1.",
        kinds=["output_logits"], part="head"),
    "decay_typo": dict(what="From a step on weight decay is 1e2 in place of 1e-2.", kinds=["optimizer"], part="all"),
}

HEALTHY = {
    "accumulation": "Each update sums the gradients of four small batches.",
    "evaluations": "Every 20 steps the model is evaluated on held-out reviews and put back to training mode.",
    "ema_aside": "A moving average of the weights is kept aside and never used in training.",
    "resumed": "At a step the run is resumed from a checkpoint with model, optimizer and random state.",
    "length_buckets": "Batches are made of reviews of similar length, in random order, to save padding.",
}

GOOD = "good great lovely superb charming brilliant fresh friendly perfect fun".split()
BAD = "bad awful dull dreadful boring stale rude broken ugly poor".split()
PLAIN = "average usual ordinary normal standard plain".split()
NOUNS = "film food plot staff room actor music soup hotel ending service view story bed wine scene".split()
VERBS = "was seemed felt looked".split()
EXTRA = "we went there on monday with two friends and they came by train in the rain".split()
SMALL = "the a not very really and but .".split()
WORDS = ["[pad]", "[cls]", "[mask]"] + sorted(set(GOOD + BAD + PLAIN + NOUNS + VERBS + EXTRA + SMALL))
PAD, CLS, MASK = 0, 1, 2
INDEX = {word: i for i, word in enumerate(WORDS)}


def clause(rng, mood):
    """A few words which say something good (1), bad (-1) or neither (0)."""
    words = ["the", rng.choice(NOUNS), rng.choice(VERBS)]
    if mood and rng.random() < 0.25:
        words.append("not")
        mood = -mood
    if rng.random() < 0.3:
        words.append(rng.choice(["very", "really"]))
    return words + [rng.choice({1: GOOD, -1: BAD, 0: PLAIN}[mood])]


def review(rng):
    """The tokens of a review and its class: 0 negative, 1 neutral, 2 positive."""
    label = rng.randrange(3)
    mood = label - 1
    moods = [mood] + [mood if rng.random() < 0.6 else 0 for _ in range(rng.randrange(4))]
    rng.shuffle(moods)
    words = [word for m in moods for word in clause(rng, m) + [rng.choice([".", "and", "but"])]]
    if rng.random() < 0.4:
        start = rng.randrange(len(EXTRA) - 4)
        words += EXTRA[start:start + 4]
    if rng.random() < 0.04:  # some people click on the wrong star
        label = rng.randrange(3)
    return ([CLS] + [INDEX[w] for w in words])[:MAX_LENGTH], label


def make_reviews(seed, count):
    return [review(rng) for rng in [random.Random(seed)] for _ in range(count)]


def pad(rows):
    longest = max(len(tokens) for tokens, _ in rows)
    ids = torch.tensor([tokens + [PAD] * (longest - len(tokens)) for tokens, _ in rows])
    return ids, torch.tensor([label for _, label in rows])


def batches(reviews, seed, by_length=False):
    """Batches without end, epoch after epoch, each epoch in a new order."""
    rng = random.Random(1000 + seed)
    while True:
        rows = rng.sample(reviews, len(reviews))
        if by_length:
            pools = [rows[i:i + 8 * BATCH] for i in range(0, len(rows), 8 * BATCH)]
            rows = [row for pool in pools for row in sorted(pool, key=lambda r: len(r[0]))]
        starts = list(range(0, len(rows) - BATCH + 1, BATCH))
        rng.shuffle(starts)
        for start in starts:
            yield pad(rows[start:start + BATCH])



class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm1 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.residual = True

    def attend(self, x, mask):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, WIDTH))

    def forward(self, x, mask):
        y = self.dropout(self.attend(x, mask))
        x = self.norm1(x + y if self.residual else y)
        y = self.dropout(self.down(F.gelu(self.up(x))))
        return self.norm2(x + y if self.residual else y)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(len(WORDS), WIDTH)
        self.positions = nn.Embedding(MAX_LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.classifier = nn.Linear(WIDTH, 3)
        self.temperature = 1.0
        self.apply(init_weights)

    def encode(self, ids, mask):
        x = self.tokens(ids) + self.positions.weight[:ids.shape[1]]
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        return x

    def forward(self, ids, mask):
        return self.classifier(self.encode(ids, mask)[:, 0]) / self.temperature


def init_weights(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.08)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


PRETRAINED = {}  # by seed


def pretrained(seed):
    """An encoder that has learned for a while to fill in masked words."""
    if seed not in PRETRAINED:
        torch.manual_seed(100 + seed)
        model = Encoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        source = batches(make_reviews(200 + seed, 1600), 300 + seed)
        for _ in range(PRETRAIN_STEPS):
            ids, _ = next(source)
            hidden = (torch.rand(ids.shape) < 0.15) & (ids > MASK)
            x = model.encode(ids.masked_fill(hidden, MASK), ids != PAD)
            loss = F.cross_entropy(x[hidden] @ model.tokens.weight.T, ids[hidden])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        PRETRAINED[seed] = model.state_dict()
    model = Encoder()
    model.load_state_dict(PRETRAINED[seed])
    return model



def make_optimizer(model, name):
    """AdamW with the full rate for the head and less and less for the layers below."""
    embeddings = nn.ModuleList([model.tokens, model.positions, model.norm])
    levels = [model.classifier, *reversed(model.layers), embeddings]
    groups = []
    for depth, level in enumerate(levels):
        if name == "block_left_out" and depth == 1:
            continue
        groups.append(dict(params=list(level.parameters()), peak=PEAK_RATE * RATE_DECAY ** depth))
    return torch.optim.AdamW(groups, lr=PEAK_RATE, weight_decay=WEIGHT_DECAY)


def schedule(name, step, at):
    if name == "pretraining_rate":
        return 25 * (1 - step / STEPS)
    if name == "schedule_ends_early" and step >= at:
        return 0.0
    return min((step + 1) / WARM_UP, (STEPS - step) / (STEPS - WARM_UP))


@torch.no_grad()
def accuracy(model, reviews):
    model.eval()
    ids, labels = pad(reviews)
    right = (model(ids, ids != PAD).argmax(-1) == labels).float().mean().item()
    model.train()
    return right


def resume(model, optimizer, seed, name):
    """What a new process would do with a checkpoint of these."""
    weights, state, rng = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    model = pretrained(seed).train()
    model.load_state_dict(weights)
    optimizer = make_optimizer(model, name)
    optimizer.load_state_dict(state)
    torch.set_rng_state(rng)
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    source = batches(make_reviews(seed, 1600), seed, by_length=name == "length_buckets")
    held_out = make_reviews(500 + seed, 200)
    model = pretrained(seed)
    torch.manual_seed(seed)
    init_weights(model.classifier)
    model.train()
    optimizer = make_optimizer(model, name)
    average = {key: value.clone() for key, value in model.state_dict().items()}
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if step == at:
            if name == "resumed":
                recorder.close()
                model, optimizer = resume(model, optimizer, seed, name)
                recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
            if name == "left_in_eval":
                model.eval()
            if name == "block_not_restored":
                model.layers[1].apply(init_weights)
            if name == "residual_lost":
                model.layers[2].residual = False
            if name == "sharp_logits":
                model.temperature = 0.1
            if name == "decay_typo":
                for group in optimizer.param_groups:
                    group["weight_decay"] = 1e2
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * schedule(name, step, at)
        ids, labels = next(source)
        if name == "classes_swapped" and step >= at:
            labels = 2 - labels
        if name == "empty_review" and step == at:
            ids[0] = PAD
        mask = ids != PAD
        if name == "padding_attended" and step >= at:
            mask = torch.ones_like(mask)
        if name == "accumulation":
            loss = 0.0
            for i in range(0, BATCH, BATCH // 4):
                part = slice(i, i + BATCH // 4)
                small = F.cross_entropy(model(ids[part], mask[part]), labels[part]) / 4
                small.backward()
                loss += small.detach()
        else:
            loss = F.cross_entropy(model(ids, mask), labels)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "zero_grad_missing" and step >= at):
            model.zero_grad()
        if name == "bf16_weights" and step >= at:
            for p in model.parameters():
                p.data = p.data.bfloat16().float()
        if name == "ema_aside":
            for key, value in model.state_dict().items():
                average[key].lerp_(value, 0.02)
        if name == "evaluations" and step % 20 == 19:
            accuracy(model, held_out)
        recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses
