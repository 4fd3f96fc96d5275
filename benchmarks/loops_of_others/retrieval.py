"""Sentence embeddings for retrieval: a small Transformer bi-encoder on made-up questions and passages, InfoNCE, AdamW."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH = 32
WIDTH, HEADS, BLOCKS = 32, 2, 3
LENGTH = 9
TEMPERATURE = 0.08
RATE, WARM_UP = 5e-3, 20
WEIGHT_DECAY, CLIP, DROPOUT = 0.01, 1.0, 0.1
RESUME_AT = 80
LOSS_SCALE = 2.0**20

# The language. Names are the same in questions and passages, the words for a relation are not, and a passage
# names somebody else too, so that the encoder has to learn the synonyms and who does what.
PAD = 0
NAMES, RELATIONS, FILLERS = 12, 5, 8
NAME = 1
TOLD = NAME + NAMES
ASKED = TOLD + RELATIONS
FILLER = ASKED + RELATIONS
ASK = FILLER + FILLERS
VOCABULARY = ASK + 4

FAULTS = {
    "pairs_shifted": dict(
        what="From a step on each question's positive is the passage of the next row of the batch.",
        kinds=["data"], part="all"),
    "false_negatives": dict(
        what="From a step on the sampler reads a shard with 12 facts only, so that in-batch negatives are often right answers.",
        kinds=["data"], part="all"),
    "eval_left_on": dict(
        what="After an evaluation nobody calls model.train(): dropout is off from that step on.",
        kinds=["data"], part="all"),
    "mask_inverted": dict(
        what="From a step on the padding mask in attention is inverted: tokens attend to the padding only.",
        kinds=["attention", "data"], part="all"),
    "temperature_twice": dict(
        what="From a step on the similarities are divided by the temperature twice.",
        kinds=["output_logits", "data"], part="all"),
    "rate_jump": dict(
        what="From a step on the learning rate is ten times what was meant.",
        kinds=["rate", "instability"], part="all"),
    "decay_typo": dict(
        what="From a step on the weight decay is 10 in place of 0.01.",
        kinds=["optimizer"], part="all"),
    "block_reset": dict(
        what="At a step the first block is loaded from the checkpoint of step 0, its optimizer state is not.",
        kinds=["weights"], part="block0", lasts=1),
    "embedding_left_out": dict(
        what="The parameter groups leave out the embeddings, which are never trained.",
        kinds=["frozen"], part="embedding", at=0),
    "no_zero_grad": dict(
        what="From a step on gradients are no longer zeroed between updates.",
        kinds=["gradients"], part="all"),
    "empty_passage": dict(
        what="At a step an empty passage comes in: the mean over no tokens is NaN, and so is every weight afterwards.",
        kinds=["not_finite", "data"], part="all"),
    "scale_too_high": dict(
        what="From a step on gradients are in fp16 with a fixed loss scale of 2**20: they overflow, and the steps are skipped.",
        kinds=["precision", "not_finite", "frozen"], part="all"),
    "residual_missing": dict(
        what="The second block lacks the residual connection around its attention.",
        kinds=["activations"], part="block1", at=0),
}

HEALTHY = {
    "accumulation": "Each update adds up the gradients of two batches of half the size.",
    "evaluation_between": "Every 20 steps the model is evaluated on held-out draws and put back into training mode.",
    "cosine_to_zero": "The rate decays to zero by a cosine over the run.",
    "resumed": "The run is taken up at step 80 from a checkpoint with all its state.",
    "batch_ramp": "The batch grows from 16 to 32 pairs over the first 120 steps, by plan.",
}


def pad(words: list[int]) -> list[int]:
    return words + [PAD] * (LENGTH - len(words))


def some_fillers(rng: random.Random, most: int) -> list[int]:
    return [FILLER + rng.randrange(FILLERS) for _ in range(rng.randint(0, most))]


def question(rng: random.Random, subject: int, relation: int) -> list[int]:
    asked = [NAME + subject, ASKED + relation]
    if rng.random() < 0.5:
        asked.reverse()
    return pad([ASK + rng.randrange(4), *some_fillers(rng, 2), *asked, *some_fillers(rng, 2)])


def passage(rng: random.Random, subject: int, relation: int) -> list[int]:
    other = rng.randrange(NAMES)
    words = some_fillers(rng, 2)
    words += [NAME + subject, TOLD + relation, NAME + other]
    words += some_fillers(rng, 2)
    return pad(words)


def draw_batch(rng: random.Random, size: int, shard: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of a question and the passage that answers it; no fact comes twice in a batch."""
    if shard is None:
        facts = rng.sample(range(NAMES * RELATIONS), size)
    else:
        facts = [rng.randrange(shard) for _ in range(size)]
    pairs = [divmod(fact, RELATIONS) for fact in facts]
    questions = torch.tensor([question(rng, *pair) for pair in pairs])
    passages = torch.tensor([passage(rng, *pair) for pair in pairs])
    return questions, passages


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.residual = True

    def attend(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (WIDTH // HEADS) ** -0.5
        scores = scores.masked_fill(~visible[:, None, None, :], -1e9)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        attended = self.dropout(self.attend(self.norm1(x), visible))
        x = x + attended if self.residual else attended
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.invert_mask = False
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.positions.weight, std=0.1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        real = ids != PAD
        visible = ~real if self.invert_mask else real
        x = self.dropout(self.tokens(ids) + self.positions.weight)
        for block in self.blocks:
            x = block(x, visible)
        x = self.norm(x) * real[..., None]
        pooled = x.sum(1) / real.sum(1, keepdim=True)
        return F.normalize(self.head(pooled), dim=-1)


def info_nce(model: Encoder, questions: torch.Tensor, passages: torch.Tensor, temperature: float) -> torch.Tensor:
    q, p = model(torch.cat([questions, passages])).chunk(2)
    logits = q @ p.T / temperature
    target = torch.arange(len(questions))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def make_optimizer(name: str, model: Encoder) -> torch.optim.AdamW:
    groups = [p for block in model.blocks for p in block.parameters()]
    groups += [*model.norm.parameters(), *model.head.parameters()]
    if name != "embedding_left_out":
        groups += [*model.tokens.parameters(), *model.positions.parameters()]
    return torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY)


def rate_at(name: str, step: int, at: int) -> float:
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero" and step >= WARM_UP:
        rate *= 0.5 * (1 + float(torch.cos(torch.tensor((step - WARM_UP) / (STEPS - WARM_UP) * torch.pi))))
    if name == "rate_jump" and step >= at:
        rate *= 10
    return rate


def evaluate(model: Encoder) -> float:
    model.eval()
    with torch.no_grad():
        questions, passages = draw_batch(random.Random(1234), BATCH)
        best = (model(questions) @ model(passages).T).argmax(1)
    return (best == torch.arange(BATCH)).float().mean().item()


def next_batch(name: str, rng: random.Random, step: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = BATCH
    if name == "batch_ramp":
        size = min(BATCH, BATCH // 2 + BATCH // 2 * step // 120)
    if name == "accumulation":
        size = BATCH // 2
    shard = 12 if name == "false_negatives" and step >= at else None
    questions, passages = draw_batch(rng, size, shard)
    if name == "pairs_shifted" and step >= at:
        passages = passages.roll(-1, 0)
    if name == "empty_passage" and step == at:
        passages[5] = PAD
    return questions, passages


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Encoder()
    if name == "residual_missing":
        model.blocks[1].residual = False
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = make_optimizer(name, model)
    recorder = None
    if name != "resumed":
        recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == RESUME_AT:
            weights, state = model.state_dict(), optimizer.state_dict()
            random_state = torch.get_rng_state()
            model = Encoder()
            model.load_state_dict(weights)
            optimizer = make_optimizer(name, model)
            optimizer.load_state_dict(state)
            torch.set_rng_state(random_state)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if name == "evaluation_between" and step % 20 == 0:
            evaluate(model)
            model.train()
        if name == "eval_left_on" and step == at:
            evaluate(model)
        if name == "mask_inverted" and step == at:
            model.invert_mask = True
        if name == "block_reset" and step == at:
            prefix = "blocks.0."
            model.blocks[0].load_state_dict(
                {key.removeprefix(prefix): value for key, value in initial.items() if key.startswith(prefix)})
        temperature = TEMPERATURE
        if name == "temperature_twice" and step >= at:
            temperature = TEMPERATURE**2
        for group in optimizer.param_groups:
            group["lr"] = rate_at(name, step, at)
            if name == "decay_typo" and step >= at:
                group["weight_decay"] = 10.0

        pieces = 2 if name == "accumulation" else 1
        loss = torch.zeros(())
        for _ in range(pieces):
            piece = info_nce(model, *next_batch(name, rng, step, at), temperature) / pieces
            piece.backward()
            loss = loss + piece.detach()
        overflow = False
        if name == "scale_too_high" and step >= at:
            for p in model.parameters():
                p.grad = (p.grad * LOSS_SCALE).half().float() / LOSS_SCALE
            overflow = any(not p.grad.isfinite().all() for p in model.parameters())
        if not overflow:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
        if not (name == "no_zero_grad" and step >= at):
            model.zero_grad()
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
    if recorder is not None:
        recorder.close()
    return losses
