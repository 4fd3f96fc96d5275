"""LoRA tuning on four instructions, prompt masked, of a small decoder that first learnt to copy; AdamW."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
WARM_UP = 15
RATE, CLIP = 8e-3, 1.0
BATCH = 24
DIM, HEADS, BLOCKS = 48, 3, 3
RANK, ALPHA, DROPOUT = 8, 16, 0.05

# Tokens: 12 small letters, 12 capitals, then marks; the last four are added for the instructions.
LETTERS = 12
PAD, BOS, TEXT, SEP, EOS = range(24, 29)
OLD_TOKENS = 29
UPPER, NEXT, HALF, TITLE = range(29, 33)
VOCABULARY = 33
SOURCE = 6
PROMPT = SOURCE + 3                 # BOS, instruction, letters, SEP
LENGTH = PROMPT + SOURCE + 1        # ... answer, EOS, padding
IGNORE = -100
TYPOS = 0.04                        # share of letters in the answers that are wrong

FAULTS = {
    "prompt_in_loss": dict(kinds=["data"], part="all",
        what="From a step on the prompt is no longer masked: its random letters count in the loss."),
    "eos_masked": dict(kinds=["data"], part="all", at=0,
        what="Padding is the end token, so masking it masks every end token: the model never learns to stop."),
    "empty_answers": dict(kinds=["data", "not_finite"], part="all",
        what="One batch is cut at the length of the prompt: no label is left, the mean over none is NaN."),
    "rate_too_high": dict(kinds=["rate", "instability"], part="all",
        what="From a step on the rate is 30 times what it should be."),
    "schedule_ran_out": dict(kinds=["rate", "frozen"], part="all",
        what="The schedule was told too few steps: from a step on the rate is 0 and nothing is trained."),
    "not_zeroed": dict(kinds=["gradients"], part="all",
        what="From a step on gradients are never zeroed and add up from update to update."),
    "decay_on_adapters": dict(kinds=["optimizer"], part="all",
        what="From a step on weight decay is 10 instead of 0.01 and pulls the adapters to zero."),
    "merged_twice": dict(kinds=["weights"], part="all", lasts=10,
        what="The adapters are merged into the base for an export and never taken out: they count twice."),
    "adapter_lost": dict(kinds=["weights"], part="block0", lasts=25,
        what="A checkpoint without the keys of block 0 is loaded (strict=False): its adapters start anew."),
    "tokens_resized": dict(kinds=["weights"], part="embedding", lasts=25,
        what="The table of added tokens is resized again at a step: their trained rows are random once more."),
    "not_in_optimizer": dict(kinds=["frozen", "optimizer"], part="block2", at=0,
        what="The adapters of block 2 were never given to the optimizer."),
    "alpha_wrong": dict(kinds=["activations"], part="block1",
        what="From a step on a pattern in the settings gives the adapters of block 1 eight times their alpha."),
    "causal_mask_lost": dict(kinds=["attention"], part="all",
        what="From a step on another attention code is used, without the causal mask: tokens see later ones."),
    "base_quantised": dict(kinds=["precision", "weights"], part="all",
        what="The base is reloaded in 4 bits, embeddings and head too, with one scale for all its matrices."),
    "temperature_left": dict(kinds=["output_logits"], part="head",
        what="The temperature 0.2 of a sampling run stays in the head: logits are five times too large."),
}

HEALTHY = {
    "accumulation": "Each update is made of two half batches, weighed by their answer tokens.",
    "cosine_to_zero": "After the warm-up the rate decays to zero along a cosine.",
    "evaluated": "Every 20 steps answers are generated in mode of evaluation, then training goes on.",
    "resumed": "At a step all is built anew from a checkpoint with all state and recorded on with first_step.",
    "rate_of_b_higher": "LoRA+: matrices B have four times the rate of matrices A, in a group of their own.",
}


def copying_batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first task: any letters, small or capital, and the same again."""
    g = torch.Generator().manual_seed(7_000_000 + seed * 10_000 + step)
    text = torch.randint(0, 2 * LETTERS, (BATCH, SOURCE), generator=g)
    bos, task, sep, eos = (torch.full((BATCH, 1), mark) for mark in (BOS, TEXT, SEP, EOS))
    tokens = torch.cat([bos, task, text, sep, text, eos], 1)
    labels = tokens.clone()
    labels[:, :PROMPT] = IGNORE
    return tokens, labels


def answer(instruction: int, text: torch.Tensor) -> torch.Tensor:
    if instruction == UPPER:
        return text + LETTERS
    if instruction == NEXT:
        return (text + 1) % LETTERS
    if instruction == HALF:
        return text[: SOURCE // 2]
    return torch.cat([text[:1] + LETTERS, text[1:]])   # TITLE


def instruction_batch(seed: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts and answers, padded at the right; the labels count in the answer and its end only."""
    g = torch.Generator().manual_seed(1_000_000 + seed * 10_000 + step)
    texts = torch.randint(0, LETTERS, (BATCH, SOURCE), generator=g)
    wanted = torch.randint(UPPER, TITLE + 1, (BATCH,), generator=g)
    typo = torch.rand(BATCH, SOURCE, generator=g) < TYPOS
    wrong = torch.randint(0, LETTERS, (BATCH, SOURCE), generator=g)
    tokens = torch.full((BATCH, LENGTH), PAD)
    labels = torch.full((BATCH, LENGTH), IGNORE)
    for i in range(BATCH):
        reply = answer(int(wanted[i]), texts[i])
        n = len(reply)
        reply = torch.where(typo[i, :n], wrong[i, :n], reply)
        tokens[i, :PROMPT] = torch.tensor([BOS, int(wanted[i]), *texts[i].tolist(), SEP])
        tokens[i, PROMPT:PROMPT + n] = reply
        tokens[i, PROMPT + n] = EOS
        labels[i, PROMPT:PROMPT + n + 1] = tokens[i, PROMPT:PROMPT + n + 1]
    return tokens, labels


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.causal = True

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).reshape(b, t, DIM))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = Attention()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tokens(nn.Module):
    """The table of the base, and a second one for tokens that were added for tuning."""
    def __init__(self):
        super().__init__()
        self.old = nn.Embedding(OLD_TOKENS, DIM)
        self.added = nn.Embedding(VOCABULARY - OLD_TOKENS, DIM)
        for table in (self.old, self.added):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, tokens):
        return F.embedding(tokens, torch.cat([self.old.weight, self.added.weight]))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = Tokens()
        self.positions = nn.Embedding(LENGTH, DIM)
        nn.init.normal_(self.positions.weight, std=0.3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.temperature = 1.0

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / self.temperature


class LoRA(nn.Module):
    """A frozen linear layer plus B A x, scaled by alpha / rank; B starts at zero."""
    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.empty(RANK, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        self.dropout = nn.Dropout(DROPOUT)
        self.scale = ALPHA / RANK

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(self.dropout(x), self.a), self.b)


def adapters(module: nn.Module) -> list[LoRA]:
    return [m for m in module.modules() if isinstance(m, LoRA)]


def loss_of(model, tokens, labels, count=None):
    """The mean over tokens with a label; `count` is their number if the batch is only a part."""
    logits, labels = model(tokens)[:, :-1], labels[:, 1:]
    mask = (labels != IGNORE).float()
    each = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (each * mask).sum() / (mask.sum() if count is None else count)


BASES: dict[int, Decoder] = {}


def trained_base(seed: int) -> Decoder:
    """A copy of the model after the first task."""
    if seed not in BASES:
        torch.manual_seed(seed)
        model = Decoder()
        optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
        for step in range(150):
            for group in optimizer.param_groups:
                group["lr"] = 4e-3 * min(1.0, (step + 1) / 15) * (1 - step / 150)
            loss = loss_of(model, *copying_batch(seed, step))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        BASES[seed] = model
    return copy.deepcopy(BASES[seed])


def with_adapters(model: Decoder) -> Decoder:
    model.requires_grad_(False)
    for block in model.blocks:
        for owner, names in ((block.attention, "q v o"), (block, "up down")):
            for name in names.split():
                setattr(owner, name, LoRA(getattr(owner, name)))
    model.tokens.added.weight.requires_grad_(True)
    return model


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def make_optimizer(name: str, model: Decoder) -> torch.optim.AdamW:
    left_out = set(model.blocks[2].parameters()) if name == "not_in_optimizer" else set()
    weights = [p for p in trainable(model) if p not in left_out]
    groups = [dict(params=weights, factor=1.0)]
    if name == "rate_of_b_higher":
        high = {m.b for m in adapters(model)}
        groups = [dict(params=[p for p in weights if p not in high], factor=0.5),
                  dict(params=[p for p in weights if p in high], factor=2.0)]
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=0.01)


def rate_at(name: str, step: int, at: int) -> float:
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero" and step >= WARM_UP:
        rate *= 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))
    if name == "rate_too_high" and step >= at:
        rate *= 30
    if name == "schedule_ran_out" and step >= at:
        rate = 0.0
    return rate


def batch_at(name: str, seed: int, step: int, at: int):
    tokens, labels = instruction_batch(seed, step)
    if name == "prompt_in_loss" and step >= at:
        labels[:, :PROMPT] = tokens[:, :PROMPT]
    if name == "eos_masked":
        labels[labels == EOS] = IGNORE
    if name == "empty_answers" and step == at:
        tokens, labels = tokens[:, :PROMPT], labels[:, :PROMPT]
    return tokens, labels


@torch.no_grad()
def once_at(name: str, seed: int, model: Decoder, optimizer) -> None:
    """What happens at one step only, before its forward pass."""
    g = torch.Generator().manual_seed(seed)
    if name == "decay_on_adapters":
        optimizer.param_groups[0]["weight_decay"] = 10.0
    if name == "merged_twice":
        for m in adapters(model):
            m.base.weight += m.scale * m.b @ m.a
    if name == "adapter_lost":
        for m in adapters(model.blocks[0]):
            nn.init.kaiming_uniform_(m.a, a=math.sqrt(5), generator=g)
            m.b.zero_()
    if name == "tokens_resized":
        model.tokens.added.weight.normal_(std=0.3, generator=g)
    if name == "alpha_wrong":
        for m in adapters(model.blocks[1]):
            m.scale = 8 * ALPHA / RANK
    if name == "causal_mask_lost":
        for block in model.blocks:
            block.attention.causal = False
    if name == "base_quantised":
        tables = [p for p in model.parameters() if not p.requires_grad and p.dim() > 1]
        scale = max(p.abs().max() for p in tables) / 7
        for p in tables:
            p.copy_((p / scale).round() * scale)
    if name == "temperature_left":
        model.temperature = 0.2


def backward_of(model, tokens, labels, parts: int) -> torch.Tensor:
    """Gradients of a batch in so many parts; the loss is a mean over all its answer tokens."""
    count = (labels[:, 1:] != IGNORE).sum()
    total = torch.zeros(())
    for t, l in zip(tokens.chunk(parts), labels.chunk(parts)):
        loss = loss_of(model, t, l, count)
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def generated_right(model: Decoder, seed: int) -> float:
    """The share of answer letters and ends that greedy generation gets right."""
    model.eval()
    tokens, labels = instruction_batch(seed, 9_000)
    out = tokens[:, :PROMPT]
    for _ in range(LENGTH - PROMPT):
        out = torch.cat([out, model(out)[:, -1].argmax(-1, keepdim=True)], 1)
    model.train()
    return float((out == labels)[labels != IGNORE].float().mean())


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    base = trained_base(seed)
    torch.manual_seed(1_000 + seed)
    model = with_adapters(base)
    optimizer = make_optimizer(name, model)
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
            model = with_adapters(Decoder())
            optimizer = make_optimizer(name, model)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if step == at:
            once_at(name, seed, model, optimizer)
        for group in optimizer.param_groups:
            group["lr"] = group["factor"] * rate_at(name, step, at)
        tokens, labels = batch_at(name, seed, step, at)
        loss = backward_of(model, tokens, labels, parts=2 if name == "accumulation" else 1)
        torch.nn.utils.clip_grad_norm_(trainable(model), CLIP)
        optimizer.step()
        if not (name == "not_zeroed" and step >= at):
            model.zero_grad()
        recorder.step(loss)
        losses.append(float(loss.detach()))
        if name == "evaluated" and step % 20 == 19:
            generated_right(model, seed)
    recorder.close()
    return losses
