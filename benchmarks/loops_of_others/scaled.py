"""A small word GPT on made-up stories, trained in fp16 autocast with a GradScaler, clipping and AdamW."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
WIDTH, HEADS, DEPTH, LENGTH, BATCH = 32, 2, 4, 24, 12
RATE, WARM_UP, CLIP, DECAY = 4e-3, 20, 1.0, 0.1

FAULTS = {
    "clip_before_unscale": dict(
        what="The call of unscale_ is gone: the gradients are clipped to norm 1 while they still hold the loss scale.",
        kinds=["precision", "gradients", "optimizer"], part="all"),
    "scale_never_backs_off": dict(
        what="The loss scale is set to 2**36 by hand before each update: fp16 overflows and every step is skipped.",
        kinds=["precision", "not_finite"], part="all"),
    "empty_story": dict(
        what="Each batch has an empty row: all its keys are masked, softmax gives NaN, every gradient is NaN.",
        kinds=["attention", "not_finite", "data"], part="all"),
    "causal_mask_lost": dict(
        what="The attention of block0 is no longer told that it is causal: its words see those that come after them.",
        kinds=["attention", "data"], part="block0"),
    "same_batch": dict(
        what="The loader starts anew at each step with one seed: the same batch comes again and again.",
        kinds=["data"], part="all"),
    "labels_shifted_twice": dict(
        what="Both the loader and the loss shift the labels: the model is asked for the word after the next.",
        kinds=["data"], part="all"),
    "rate_times_ten": dict(
        what="The rate is scaled for more workers by mistake: it is ten times as high.",
        kinds=["rate", "instability"], part="all"),
    "decay_too_high": dict(
        what="AdamW's weight decay is 10 where 0.1 was meant: it shrinks all matrices by 4 percent at each step.",
        kinds=["optimizer"], part="all"),
    "hook_clamps_scaled": dict(
        what="A hook on block2's weights clamps gradients to one, but sees them with the loss scale on.",
        kinds=["gradients", "precision"], part="block2"),
    "embedding_no_grad": dict(
        what="A torch.no_grad is left around the embedding, which is no longer trained.",
        kinds=["frozen", "dead"], part="embedding"),
    "residual_lost": dict(
        what="The MLP of block1 replaces the residual stream instead of being added to it.",
        kinds=["activations"], part="block1"),
    "softmax_twice": dict(
        what="The head ends in a softmax, and cross_entropy applies another.",
        kinds=["output_logits", "data"], part="head", at=0),
    "ema_not_swapped_back": dict(
        what="Every 25 steps the model is evaluated with EMA weights, which then stay in it.",
        kinds=["weights"], part="all"),
}

HEALTHY = {
    "accumulation": "Each batch goes through in two halves, whose gradients are added up; each loss is divided by two.",
    "decay_to_zero": "After the warm-up the rate follows a cosine down to zero at the last step.",
    "resumed": "The run stops at step `at` and goes on from a checkpoint with weights, AdamW, scaler and random state.",
    "scale_search": "The scale starts at 2**32 and grows every 20 steps: a step is skipped now and then, as is usual.",
    "evaluation": "Every 20 steps a held-out batch is evaluated in eval mode, then the model is back in train mode.",
}

# ---------------------------------------------------------------- data

PEOPLE = {"anna": "she", "mary": "she", "lucy": "she", "tom": "he", "paul": "he", "ben": "he"}
VERBS = ["sees", "finds", "buys", "wants", "paints"]
COLOURS = ["red", "blue", "green", "black"]
THINGS = ["ball", "boat", "house", "hat", "kite", "lamp"]
OTHERS = ["<pad>", "<start>", "<end>", "a", "the", "likes", ".", "she", "he"]
WORDS = OTHERS + list(PEOPLE) + VERBS + COLOURS + THINGS
NUMBER = {word: i for i, word in enumerate(WORDS)}
PAD = NUMBER["<pad>"]


def story(generator: torch.Generator) -> list[int]:
    """One or two times: anna sees a red ball . she likes the red ball ."""

    def pick(items):
        return items[int(torch.randint(len(items), (1,), generator=generator))]

    words = ["<start>"]
    for _ in range(pick([1, 2, 2, 2])):
        who, thing, colour = pick(list(PEOPLE)), pick(THINGS), pick(COLOURS)
        words += [who, pick(VERBS), "a", colour, thing, "."]
        words += [PEOPLE[who], "likes", "the", colour, thing, "."]
    words = (words + ["<end>"])[:LENGTH + 2]
    return [NUMBER[w] for w in words] + [PAD] * (LENGTH + 2 - len(words))


def make_stories(seed: int, count: int = 1500) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 77)
    return torch.tensor([story(generator) for _ in range(count)])


def get_batch(stories, name, seed, step, at):
    if name == "same_batch" and step >= at:
        step = at
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rows = stories[torch.randint(len(stories), (BATCH,), generator=generator)]
    if name == "empty_story" and step >= at:
        rows[0] = PAD
    inputs, labels = rows[:, :LENGTH], rows[:, 1:LENGTH + 1]
    if name == "labels_shifted_twice" and step >= at:
        labels = rows[:, 2:LENGTH + 2]
    return inputs, labels.masked_fill(labels == PAD, -100)


# ---------------------------------------------------------------- model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale, self.causal = 1 / math.sqrt(WIDTH // HEADS), True

    def forward(self, x, mask):
        b, t, _ = x.shape
        if self.causal:
            mask = mask & torch.ones(t, t, dtype=torch.bool).tril()
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * self.scale
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.residual = True

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        y = self.down(F.relu(self.up(self.norm2(x))))
        return x + y if self.residual else y


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(len(WORDS), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.05)
        self.blocks = nn.ModuleList([Block() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(WORDS), bias=False)
        self.train_embedding, self.softmax = True, False
        self.apply(self.initialise)

    @staticmethod
    def initialise(module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.06)

    def forward(self, inputs):
        mask = (inputs != PAD)[:, None, None, :]
        with torch.set_grad_enabled(self.train_embedding and torch.is_grad_enabled()):
            x = self.words(inputs) + self.places(torch.arange(LENGTH))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))
        return logits.float().softmax(-1) if self.softmax else logits


def loss_of(model, inputs, labels):
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)


# ---------------------------------------------------------------- training


def build(name: str):
    model = GPT()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=vectors, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98))
    scaler = torch.amp.GradScaler("cpu")
    if name == "scale_search":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, growth_interval=20)
    return model, optimizer, scaler


def rate_at(name, step, at):
    rate = RATE * min(1, (step + 1) / WARM_UP)
    if name == "decay_to_zero" and step > WARM_UP:
        rate *= 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
    if name == "rate_times_ten" and step >= at:
        rate *= 10
    return rate


def plant(name, model, optimizer):
    """Faults that change the model or the optimizer once, before the update of step `at`."""
    if name == "causal_mask_lost":
        model.blocks[0].attention.causal = False
    if name == "residual_lost":
        model.blocks[1].residual = False
    if name == "embedding_no_grad":
        model.train_embedding = False
    if name == "decay_too_high":
        optimizer.param_groups[0]["weight_decay"] = 100 * DECAY
    if name == "hook_clamps_scaled":
        for weight in model.blocks[2].parameters():
            weight.register_hook(lambda gradient: gradient.clamp(-1, 1))


def update(name, model, optimizer, scaler, batches, step, at) -> torch.Tensor:
    for group in optimizer.param_groups:
        group["lr"] = rate_at(name, step, at)
    if name == "scale_never_backs_off" and step >= at:
        scaler.update(2.0**36)
    optimizer.zero_grad(set_to_none=True)
    total = 0.0
    for inputs, labels in batches:
        loss = loss_of(model, inputs, labels) / len(batches)
        scaler.scale(loss).backward()
        total = total + loss.detach()
    if not (name == "clip_before_unscale" and step >= at):
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    scaler.step(optimizer)
    scaler.update()
    return total


def evaluate(model, stories, seed):
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, *get_batch(stories, "plain", seed + 1000, 0, 0))
    model.train()
    return loss


@torch.no_grad()
def follow(ema, model, keep=0.98):
    for mean, weight in zip(ema.parameters(), model.parameters()):
        mean.lerp_(weight, 1 - keep)


def save(model, optimizer, scaler):
    return copy.deepcopy(dict(model=model.state_dict(), optimizer=optimizer.state_dict(),
                              scaler=scaler.state_dict(), random=torch.get_rng_state()))


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    stories, losses = make_stories(seed), []
    model, optimizer, scaler = build(name)
    model.softmax = name == "softmax_twice"
    ema = copy.deepcopy(model)
    recorder = lab.record(model, optimizer, every=every, out=out, scaler=scaler)
    for step in range(STEPS):
        if step == at and name == "resumed":
            recorder.close()
            checkpoint = save(model, optimizer, scaler)
            model, optimizer, scaler = build(name)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scaler.load_state_dict(checkpoint["scaler"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step, scaler=scaler)
            torch.set_rng_state(checkpoint["random"])
        if step == at:
            plant(name, model, optimizer)
        if name == "ema_not_swapped_back" and step >= at and (step - at) % 25 == 0:
            model.load_state_dict(ema.state_dict())
            evaluate(model, stories, seed)
        batches = [get_batch(stories, name, seed, step, at)]
        if name == "accumulation":
            batches = list(zip(*[rows.chunk(2) for rows in batches[0]]))
        loss = update(name, model, optimizer, scaler, batches, step, at)
        if name == "ema_not_swapped_back":
            follow(ema, model)
        recorder.step(loss)
        losses.append(float(loss))
        if name == "evaluation" and step % 20 == 19:
            evaluate(model, stories, seed)
    recorder.close()
    return losses
