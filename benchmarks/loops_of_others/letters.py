"""A three-block decoder-only language model learns letters of an invented language; AdamW, cosine schedule."""

import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import lab

STEPS = 240
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
CONTEXT = 20
BATCH = 16
WIDTH = 40
HEADS = 4
BLOCKS = 3
PEAK_RATE = 4e-3
WARM_UP = 20
DECAY = 0.1
CLIP = 1.0
IGNORED = -100
GARBAGE_STEPS = 15  # how long the broken shard lasts
RESUMED_AT = 60  # the habit "resumed" starts its recording from a checkpoint of this step


# --- The text: words of syllables, each word with a few likely followers, sentences that end with a full stop.


def make_words(rng, count=30):
    """Different words of one to three syllables."""
    words = set()
    while len(words) < count:
        syllables = rng.integers(1, 4)
        word = "".join(rng.choice(list("bdfgklmnprstvz")) + rng.choice(list("aeiou")) for _ in range(syllables))
        words.add(word + rng.choice(["", "n", "s", "l"]))
    return sorted(words)


def make_text(size=60_000):
    """The whole text as numbers of letters; always the same."""
    rng = np.random.default_rng(1234)
    words = make_words(rng)
    followers = [rng.choice(len(words), size=3, replace=False) for _ in words]
    pieces, length, word = [], 0, 0
    while length < size:
        word = int(followers[word][rng.choice(3, p=[0.6, 0.3, 0.1])])
        piece = words[word] + (". " if rng.random() < 0.1 else " ")
        pieces.append(piece)
        length += len(piece)
    return torch.tensor([LETTERS.index(letter) for letter in "".join(pieces)])


class Batches:
    """Random windows of the text; the labels are the same windows one letter on."""

    def __init__(self, text, seed):
        self.text = text
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, size=BATCH):
        starts = torch.randint(len(self.text) - CONTEXT - 1, (size, 1), generator=self.generator)
        windows = self.text[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]


# --- The model.


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.causal = True

    def forward(self, x):
        rows, length, _ = x.shape
        split = self.query_key_value(x).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.05)
        self.residual = True
        self.no_grad = False

    def attend(self, x):
        return self.dropout(self.attention(self.norm1(x)))

    def think(self, x):
        return self.dropout(self.mlp(self.norm2(x)))

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            attended = self.attend(x)
        x = x + attended
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.no_grad):
            thought = self.think(x)
        return x + thought if self.residual else thought


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.logit_scale = 1.0
        self.apply(set_initial_weights)

    def forward(self, letters):
        x = self.letters(letters) + self.positions(torch.arange(letters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.logit_scale


def set_initial_weights(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.05)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


# --- Training.


def make_optimizer(model, name):
    """AdamW; matrices decay, biases and norms do not."""
    weights = list(model.named_parameters())
    if name == "embedding_left_out":
        weights = [(key, weight) for key, weight in weights if not key.startswith(("letters", "positions"))]
    matrices = [weight for _, weight in weights if weight.dim() >= 2]
    vectors = [weight for _, weight in weights if weight.dim() < 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), foreach=True)


def rate_at(step, name, at):
    """Warm-up, then a cosine down to a tenth of the peak."""
    peak, warm_up = PEAK_RATE, WARM_UP
    if name == "long_warm_up":
        warm_up = 100
    if name == "rate_too_high":
        peak = 0.1
    if name == "schedule_ended" and step >= at:
        return 0.0
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / (STEPS - warm_up)
    return peak * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def draw_batch(batches, step, name, at):
    """The inputs and labels of one micro-batch."""
    size = BATCH
    if name == "accumulated":
        size = BATCH // 2
    if name == "batch_ramp":
        size = 10 if step < 80 else 16 if step < 160 else 24
    inputs, labels = batches.draw(size)
    if name == "labels_not_shifted" and step >= at:
        labels = inputs
    if name == "garbage_shard" and at <= step < at + GARBAGE_STEPS:
        noise = torch.randint(len(LETTERS), (size, CONTEXT + 1), generator=batches.generator)
        inputs, labels = noise[:, :-1], noise[:, 1:]
    if name == "no_label_in_batch" and step == at:
        labels = torch.full_like(labels, IGNORED)
    return inputs, labels


def break_model(model, optimizer, name):
    """What is changed once, just before the update of step `at`."""
    if name == "mask_lost":
        for block in model.blocks:
            block.attention.causal = False
    if name == "residual_lost":
        model.blocks[1].residual = False
    if name == "block_under_no_grad":
        model.blocks[0].no_grad = True
    if name == "logits_scaled":
        model.logit_scale = 8.0
    if name == "block_not_loaded":
        generator_state = torch.get_rng_state()
        model.blocks[2].apply(set_initial_weights)
        torch.set_rng_state(generator_state)
    if name == "moments_lost":
        optimizer.state.clear()
    if name == "decay_mistyped":
        optimizer.param_groups[0]["weight_decay"] = 100 * DECAY


def mean_loss(logits, labels):
    """Cross entropy, as a mean over the labels that are not ignored."""
    counted = (labels != IGNORED).flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp(min=0), reduction="none")
    return (losses * counted).sum() / counted.sum()


def evaluate(model, text):
    """The loss on some fixed windows, without dropout."""
    model.eval()
    with torch.no_grad():
        inputs, labels = Batches(text, seed=99).draw()
        loss = mean_loss(model(inputs), labels)
    model.train()
    return loss.item()


def reload_all(model, optimizer, name):
    """A new model and optimizer with the whole state of the old ones, as after a restart of the job."""
    generator_state = torch.get_rng_state()
    new_model = LanguageModel()
    new_model.load_state_dict(model.state_dict())
    new_optimizer = make_optimizer(new_model, name)
    new_optimizer.load_state_dict(optimizer.state_dict())
    torch.set_rng_state(generator_state)
    return new_model, new_optimizer


def update(model, optimizer, batches, step, name, at):
    """One update of the weights; the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step, name, at)
    micro_batches = 2 if name == "accumulated" else 1
    total = 0.0
    for _ in range(micro_batches):
        inputs, labels = draw_batch(batches, step, name, at)
        loss = mean_loss(model(inputs), labels)
        (loss / micro_batches).backward()
        total = total + loss.detach() / micro_batches
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    if name != "gradients_not_zeroed":
        model.zero_grad()
    if name == "weights_in_bfloat16" and step >= at:
        with torch.no_grad():
            for weight in model.parameters():
                weight.copy_(weight.bfloat16())
    return total


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    text = make_text()
    batches = Batches(text, seed)
    model = LanguageModel()
    optimizer = make_optimizer(model, name)
    losses = []
    first_step = RESUMED_AT if name == "resumed" else 0
    for step in range(first_step):  # the part of the job before its restart, which nobody recorded
        losses.append(update(model, optimizer, batches, step, name, at).item())
    if name == "resumed":
        model, optimizer = reload_all(model, optimizer, name)

    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first_step)
    for step in range(first_step, STEPS):
        if step == at:
            break_model(model, optimizer, name)
        loss = update(model, optimizer, batches, step, name, at)
        recorder.step(loss)
        losses.append(loss.item())
        if name == "evaluates" and step % 20 == 19:
            evaluate(model, text)
    recorder.close()
    return losses


FAULTS = {
    "labels_not_shifted": dict(what="From a step on the labels are the inputs themselves, not the next letters.",
                               kinds=["data"], part="all"),
    "garbage_shard": dict(what="A broken shard: for 15 steps the text is random letters.",
                          kinds=["data"], part="all", lasts=GARBAGE_STEPS),
    "no_label_in_batch": dict(what="All labels of one batch are ignored: the mean over none is NaN, and it stays.",
                              kinds=["data", "not_finite"], part="all"),
    "rate_too_high": dict(what="The peak rate is 0.1 rather than 0.004.",
                          kinds=["rate", "instability"], part="all", at=0),
    "schedule_ended": dict(what="The schedule was made for fewer steps: from a step on the rate is zero.",
                           kinds=["rate", "frozen"], part="all"),
    "moments_lost": dict(what="Resumed without the optimizer's state: moments and step count begin again at zero.",
                         kinds=["optimizer"], part="all", lasts=10),
    "decay_mistyped": dict(what="From a step on the weight decay is 10 rather than 0.1.",
                           kinds=["optimizer"], part="all"),
    "gradients_not_zeroed": dict(what="zero_grad is forgotten: all gradients so far are summed up.",
                                 kinds=["gradients"], part="all", at=0),
    "embedding_left_out": dict(what="The embeddings (letters and positions) were not given to the optimizer.",
                               kinds=["frozen"], part="embedding", at=0),
    "block_under_no_grad": dict(what="Both branches of a block run under no_grad: it gets no gradients any more.",
                                kinds=["dead", "frozen", "gradients"], part="block0"),
    "mask_lost": dict(what="From a step on attention has no causal mask: letters see those that they shall predict.",
                      kinds=["attention"], part="all"),
    "block_not_loaded": dict(what="One block is missing in a checkpoint and keeps its fresh initial weights.",
                             kinds=["weights"], part="block2"),
    "residual_lost": dict(what="From a step on a block gives out its MLP alone: the residual is not added.",
                          kinds=["activations"], part="block1"),
    "logits_scaled": dict(what="From a step on the logits are multiplied by 8.",
                          kinds=["output_logits"], part="head"),
    "weights_in_bfloat16": dict(what="Weights are kept in bfloat16 from a step on: small updates are rounded away.",
                                kinds=["precision"], part="all"),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 100 steps.",
    "accumulated": "Gradients of two micro-batches of half the size are accumulated, each loss divided by two.",
    "evaluates": "An evaluation every 20 steps, in eval mode and without gradients, then back to train mode.",
    "resumed": "Recording begins at step 60 with first_step, from a checkpoint with all its state.",
    "batch_ramp": "The batch grows from 10 over 16 to 24 rows.",
}
