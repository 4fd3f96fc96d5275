"""A small encoder-decoder Transformer translates an invented language; Adam, inverse square-root schedule."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
WIDTH, HEADS, HIDDEN, LONGEST = 32, 2, 64, 24
ENCODER_BLOCKS, DECODER_BLOCKS = 1, 2
BATCH, WARM_UP, PEAK, CLIP = 16, 30, 5e-3, 1.0
PAD, START, END = 0, 1, 2
DETERMINERS, ADJECTIVES, NOUNS, VERBS = range(3, 6), range(6, 16), range(16, 34), range(34, 44)
VOCABULARY = 44  # of the source; the target has as many and a second word for each noun
TARGETS = VOCABULARY + len(NOUNS)

FAULTS = {
    "misaligned_lines": dict(
        what="The two files of the corpus slip by a line: each source gets the translation of the sentence before.",
        kinds=["data"], part="all"),
    "padding_counted": dict(
        what="The loss no longer ignores padding: a large share of the mean is trivial tokens.",
        kinds=["data"], part="all"),
    "garbled_shard": dict(
        what="A shard of the corpus was read with the wrong vocabulary: for 12 steps the targets are random words.",
        kinds=["data"], part="all", lasts=12),
    "warm_up_of_the_paper": dict(
        what="The warm-up of 4000 steps is left from the paper's recipe: in a run of 240 steps the rate stays tiny.",
        kinds=["rate"], part="all", at=0),
    "rate_with_a_slip": dict(
        what="After an edit of the settings the peak is 0.05 and not 0.005: ten times the rate, midway.",
        kinds=["rate", "instability"], part="all"),
    "decay_as_l2": dict(
        what="Weight decay of 0.1, meant for AdamW, is set in Adam, where it is added to the gradients as an L2 term.",
        kinds=["optimizer"], part="all"),
    "gradients_not_zeroed": dict(
        what="zero_grad is no longer called: gradients pile up from step to step.",
        kinds=["gradients"], part="all"),
    "embedding_not_scaled_down": dict(
        what="Embeddings begin with std 1 (the default) and not width ** -0.5, and sqrt(width) still multiplies them.",
        kinds=["weights", "activations"], part="embedding", at=0),
    "padding_mask_inverted": dict(
        what="The source's padding mask has the opposite meaning: attention sees padding and not the words.",
        kinds=["attention", "data"], part="all"),
    "causal_mask_missing": dict(
        what="A new attention call in block2 forgets the causal mask: the last decoder block sees the words to come.",
        kinds=["attention", "data"], part="block2", at=0),
    "block_frozen": dict(
        what="requires_grad of block0, switched off for an experiment, is never switched on again.",
        kinds=["frozen", "dead"], part="block0"),
    "residual_missing": dict(
        what="A rewritten forward pass of block1 returns the feed-forward part alone and forgets to add its input.",
        kinds=["activations"], part="block1"),
    "empty_sentence": dict(
        what="A source without a word is all padding: softmax over nothing but -inf gives NaN, then so do all weights.",
        kinds=["not_finite", "data", "attention"], part="all"),
    "weights_in_bfloat16": dict(
        what="Weights are kept in bfloat16 with no float32 copy: small updates are rounded away.",
        kinds=["precision"], part="all"),
    "logits_too_hot": dict(
        what="A temperature meant for sampling (0.2) divides the logits in training too.",
        kinds=["output_logits"], part="head"),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 100 steps.",
    "evaluation_between": "Every 25 steps the model is evaluated on held-out sentences, in eval mode and no_grad.",
    "accumulation": "Each update sums the gradients of two half batches, weighed by their tokens.",
    "resumed": "At the step model, optimizer and generators are saved, built anew and loaded; a new record goes on.",
    "decay_to_zero": "After the warm-up the rate falls linearly to zero at the last step.",
}


class Corpus:
    """Sentences of phrases `determiner adjective* noun verb`; the translation has adjectives after the noun."""

    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.dictionary = np.arange(VOCABULARY)
        self.dictionary[3:] = self.random.permutation(np.arange(3, VOCABULARY))

    def sentence(self) -> tuple[list[int], list[int]]:
        source, target = [], [START]
        for _ in range(self.random.integers(1, 3)):
            determiner, noun, verb = (int(self.random.choice(c)) for c in (DETERMINERS, NOUNS, VERBS))
            adjectives = [int(a) for a in self.random.choice(ADJECTIVES, self.random.integers(0, 3))]
            source += [determiner, *adjectives, noun, verb]
            synonym = self.random.random() < 0.3
            translated = VOCABULARY + noun - NOUNS[0] if synonym else self.dictionary[noun]
            target += [self.dictionary[determiner], translated, *self.dictionary[adjectives].tolist()]
            target += [self.dictionary[verb]]
        return source + [END], target + [END]

    def batch(self, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
        sources, targets = zip(*(self.sentence() for _ in range(size)))
        return padded(sources), padded(targets)


def padded(sentences) -> torch.Tensor:
    longest = max(len(s) for s in sentences)
    return torch.tensor([[int(w) for w in s] + [PAD] * (longest - len(s)) for s in sentences])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key_value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory, allowed):
        def split(t):
            return t.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        key, value = self.key_value(memory).chunk(2, dim=-1)
        q, k, v = split(self.query(x)), split(key), split(value)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        scores = scores.masked_fill(~allowed, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Pre-norm block; with `cross` it also attends to the encoder's output."""

    def __init__(self, cross: bool):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.cross = Attention() if cross else None
        self.norm2 = nn.LayerNorm(WIDTH) if cross else None
        self.norm3 = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
        self.dropout = nn.Dropout(0.05)
        self.skip_residual = self.skip_causal = False  # for the faults

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        if self.skip_causal:
            allowed = torch.ones_like(allowed)
        normed = self.norm1(x)
        x = x + self.dropout(self.attention(normed, normed, allowed))
        if self.cross is not None:
            x = x + self.dropout(self.cross(self.norm2(x), memory, memory_allowed))
        change = self.dropout(self.ffn(self.norm3(x)))
        return change if self.skip_residual else x + change


class Translator(nn.Module):
    def __init__(self, embedding_std: float = WIDTH**-0.5):
        super().__init__()
        self.source_embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=PAD)
        self.target_embedding = nn.Embedding(TARGETS, WIDTH, padding_idx=PAD)
        for embedding in (self.source_embedding, self.target_embedding):
            nn.init.normal_(embedding.weight, std=embedding_std)
        self.register_buffer("positions", sinusoids())
        # The encoder's blocks come first, then the decoder's.
        self.blocks = nn.ModuleList(Block(cross=i >= ENCODER_BLOCKS) for i in range(ENCODER_BLOCKS + DECODER_BLOCKS))
        self.encoder_norm = nn.LayerNorm(WIDTH)
        self.decoder_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TARGETS)
        self.temperature, self.invert_mask = 1.0, False  # for the faults

    def embed(self, embedding, tokens):
        return embedding(tokens) * math.sqrt(WIDTH) + self.positions[: tokens.shape[1]]

    def forward(self, source, target):
        words = (source != PAD)[:, None, None, :]
        if self.invert_mask:
            words = ~words | words.all(-1, keepdim=True)  # a sentence with no padding would have nothing to see
        x = self.embed(self.source_embedding, source)
        for block in self.blocks[:ENCODER_BLOCKS]:
            x = block(x, words)
        memory = self.encoder_norm(x)
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        x = self.embed(self.target_embedding, target)
        for block in self.blocks[ENCODER_BLOCKS:]:
            x = block(x, causal, memory, words)
        return self.head(self.decoder_norm(x)) / self.temperature


def sinusoids() -> torch.Tensor:
    angles = torch.arange(LONGEST)[:, None] / 100.0 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def loss_of(model, source, target, count_padding: bool = False) -> torch.Tensor:
    logits = model(source, target[:, :-1])
    ignored = -100 if count_padding else PAD
    return F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=ignored)


def rate_at(step: int, warm_up: int = WARM_UP) -> float:
    """The original Transformer's schedule, as a share of its peak."""
    return PEAK * min((step + 1) / warm_up, math.sqrt(warm_up / (step + 1)))


def rate(name: str, step: int, at: int) -> float:
    if name == "warm_up_of_the_paper":
        return rate_at(step, warm_up=4000)
    if name == "rate_with_a_slip" and step >= at:
        return 10 * rate_at(step)
    if name == "long_warm_up":
        return rate_at(step, warm_up=100)
    if name == "decay_to_zero" and step >= WARM_UP:
        return PEAK * (STEPS - step) / (STEPS - WARM_UP)
    return rate_at(step)


def spoil_batch(name: str, step: int, at: int, seed: int, source, target):
    """The faults of the data from step `at` on."""
    if name == "misaligned_lines" and step >= at:
        target = target.roll(1, dims=0)
    if name == "garbled_shard" and at <= step < at + 12:
        drawn = torch.from_numpy(np.random.default_rng([seed, step]).integers(3, TARGETS, target.shape))
        target = torch.where(target > END, drawn, target)
    if name == "empty_sentence" and step == at:
        source = source.clone()
        source[0] = PAD
    return source, target


def plant(name: str, model: Translator, optimizer: torch.optim.Adam) -> None:
    """What is changed once, before the update at step `at`."""
    if name == "decay_as_l2":
        optimizer.param_groups[0]["weight_decay"] = 0.1
    if name == "padding_mask_inverted":
        model.invert_mask = True
    if name == "block_frozen":
        model.blocks[0].requires_grad_(False)
    if name == "residual_missing":
        model.blocks[1].skip_residual = True
    if name == "logits_too_hot":
        model.temperature = 0.2


def evaluate(model: Translator, held_out) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, *held_out).item()
    model.train()
    return loss


def backward(name: str, model: Translator, source, target, count_padding: bool) -> torch.Tensor:
    """Gradients of a batch; the loss."""
    if name != "accumulation":
        loss = loss_of(model, source, target, count_padding)
        loss.backward()
        return loss.detach()
    total, tokens = torch.zeros(()), (target[:, 1:] != PAD).sum()
    for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
        share = (target[half, 1:] != PAD).sum() / tokens
        loss = loss_of(model, source[half], target[half]) * share
        loss.backward()
        total += loss.detach()
    return total


def build(name: str) -> tuple[Translator, torch.optim.Adam]:
    std = 1.0 if name == "embedding_not_scaled_down" else WIDTH**-0.5
    model = Translator(std)
    model.blocks[2].skip_causal = name == "causal_mask_missing"
    return model, torch.optim.Adam(model.parameters(), lr=0.0, betas=(0.9, 0.98), eps=1e-9)


def resume(model: Translator, optimizer: torch.optim.Adam) -> tuple[Translator, torch.optim.Adam]:
    """A new process's model and optimizer with all the state of the old ones."""
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    model, optimizer = build("plain")
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    torch.set_rng_state(state[2])
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    corpus, held_out = Corpus(seed), None
    if name == "evaluation_between":
        other = Corpus(seed)  # the same dictionary, other sentences
        other.random = np.random.default_rng(seed + 1000)
        held_out = other.batch()
    model, optimizer = build(name)
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == at:
            recorder.close()
            model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)
        if step == at:
            plant(name, model, optimizer)
        source, target = spoil_batch(name, step, at, seed, *corpus.batch())
        optimizer.param_groups[0]["lr"] = rate(name, step, at)
        loss = backward(name, model, source, target, name == "padding_counted" and step >= at)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "gradients_not_zeroed" and step >= at):
            optimizer.zero_grad()
        if name == "weights_in_bfloat16" and step >= at:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.copy_(weight.bfloat16())
        losses.append(loss.item())
        recorder.step(loss)
        if held_out is not None and step % 25 == 24:
            evaluate(model, held_out)
    recorder.close()
    return losses
