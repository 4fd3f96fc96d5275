"""Classification of drawn tabular rows (numeric, categorical, some missing): feature-token Transformer with AdamW."""

import io
import math

import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
ROWS, HELD_OUT, BATCH = 8192, 256, 48
NUMERIC, LEVELS, CLASSES = 7, (4, 6, 8, 3), 4  # numeric columns, levels of each categorical column, classes
WIDTH, HEADS, DEPTH = 32, 4, 3
RATE, WARM_UP, CLIP = 1.5e-3, 20, 1.0


# ---------------------------------------------------------------- data


def make_table(seed: int) -> dict[str, torch.Tensor]:
    """Rows in raw units with NaN for missing numbers and level 0 for an unknown category, and a label each."""
    g = torch.Generator().manual_seed(1000 + seed)
    n = ROWS + HELD_OUT
    z = torch.randn(n, NUMERIC, generator=g)
    z[:, 1] = 0.6 * z[:, 0] + 0.8 * z[:, 1]  # two columns that go together
    cats = torch.stack([torch.randint(1, k + 1, (n,), generator=g) for k in LEVELS], dim=1)
    score = z @ torch.randn(NUMERIC, CLASSES, generator=g)
    score += torch.tanh(2 * z[:, :1]) * z[:, 2:3] * torch.randn(CLASSES, generator=g)
    for j, k in enumerate(LEVELS):
        score += 1.5 * torch.randn(k + 1, CLASSES, generator=g)[cats[:, j]]
    label = (2 * score + torch.randn(n, CLASSES, generator=g)).argmax(dim=1)
    scale = torch.tensor([12.0, 0.4, 30.0, 5.0, 1.5, 60.0, 8.0])
    centre = torch.tensor([40.0, 1.0, 120.0, 0.0, 7.0, 200.0, 15.0])
    raw = z * scale + centre
    raw[torch.rand(n, NUMERIC, generator=g) < 0.12] = math.nan
    cats[torch.rand(n, len(LEVELS), generator=g) < 0.05] = 0
    return {"raw": raw, "cats": cats, "label": label}


class Batches:
    """Shuffled batches, epoch after epoch; numbers are standardized with the table's mean and deviation."""

    def __init__(self, table: dict[str, torch.Tensor], seed: int) -> None:
        self.table = table
        self.g = torch.Generator().manual_seed(2000 + seed)
        self.mean = table["raw"][:ROWS].nanmean(dim=0)
        self.std = (table["raw"][:ROWS] - self.mean).square().nanmean(dim=0).sqrt()
        self.order = torch.empty(0, dtype=torch.long)

    def take(self, rows: torch.Tensor, fault: str = "") -> tuple[torch.Tensor, ...]:
        raw, cats, label = (self.table[k][rows] for k in ("raw", "cats", "label"))
        missing = raw.isnan()
        x = (raw - self.mean) / self.std
        if fault == "scaler_lost":
            x = raw
        if fault == "target_leak":
            x[:, 4] = label - 1.5
            missing[:, 4] = False
        if fault == "nan_cells":
            missing[:, 2] = False
            x[:, 2] = torch.log(raw[:, 2] - 100)  # NaN for each row below 100
        else:
            x = x.nan_to_num(0.0)
        if fault == "labels_misjoined":
            label = label.roll(7)
        return x, cats, missing, label

    def next(self, fault: str) -> tuple[torch.Tensor, ...]:
        if len(self.order) < BATCH:
            self.order = torch.randperm(ROWS, generator=self.g)
        rows, self.order = self.order[:BATCH], self.order[BATCH:]
        return self.take(rows, fault)

    def held_out(self) -> tuple[torch.Tensor, ...]:
        return self.take(torch.arange(ROWS, ROWS + HELD_OUT))


# ---------------------------------------------------------------- model


class Tokens(nn.Module):
    """One token a column and a class token in front."""

    def __init__(self) -> None:
        super().__init__()
        bound = WIDTH**-0.5
        self.weight = nn.Parameter(torch.empty(NUMERIC, WIDTH).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(NUMERIC + len(LEVELS), WIDTH).uniform_(-bound, bound))
        self.cls = nn.Parameter(torch.empty(1, 1, WIDTH).uniform_(-bound, bound))
        self.categories = nn.Embedding(sum(k + 1 for k in LEVELS), WIDTH)  # all columns, one after another
        nn.init.uniform_(self.categories.weight, -bound, bound)
        self.offsets = torch.tensor([sum(k + 1 for k in LEVELS[:j]) for j in range(len(LEVELS))])
        self.fault = ""

    def forward(self, x: torch.Tensor, cats: torch.Tensor) -> torch.Tensor:
        numbers = x[:, :, None] * self.weight
        levels = self.categories(cats + self.offsets)
        if self.fault == "categories_detached":
            levels = levels.detach()
        columns = torch.cat([numbers, levels], dim=1) + self.bias
        return torch.cat([self.cls.expand(len(x), -1, -1), columns], dim=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.05)
        self.fault = ""

    def attend(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None, :])
        return self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        keep = 0.0 if self.fault == "residual_lost" else 1.0
        x = keep * x + self.drop(self.attend(self.norm1(x), seen))
        return keep * x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class TabularTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.fault = ""

    def forward(self, x: torch.Tensor, cats: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x, cats)
        present = missing if self.fault == "mask_inverted" else ~missing  # missing numbers are not attended to
        seen = torch.ones(h.shape[:2], dtype=torch.bool)
        seen[:, 1 : 1 + NUMERIC] = present
        for block in self.blocks:
            h = block(h, seen)
        return self.head(self.norm(h[:, 0]))


# ---------------------------------------------------------------- training


def build(name: str) -> tuple[TabularTransformer, torch.optim.Optimizer]:
    model = TabularTransformer()
    named = list(model.named_parameters())
    if name == "head_not_in_optimizer":
        named = [(n, p) for n, p in named if not n.startswith("head")]
    groups = [
        {"params": [p for n, p in named if p.ndim == 2 and "tokens" not in n], "weight_decay": 0.01},
        {"params": [p for n, p in named if p.ndim != 2 or "tokens" in n], "weight_decay": 0.0},
    ]
    return model, torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99), foreach=True)


def rate_at(step: int, name: str, fault: str) -> float:
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero":
        rate *= 0.5 * (1 + math.cos(math.pi * step / STEPS))
    if fault == "rate_jump":
        rate *= 20
    return rate


def evaluate(model: nn.Module, batches: Batches) -> float:
    x, cats, missing, label = batches.held_out()
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(x, cats, missing), label).item()
    model.train()
    return loss


def resume(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[TabularTransformer, torch.optim.Optimizer]:
    """Through a checkpoint into a new model and optimizer; the random state goes on as it was."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved, random_state = torch.load(file), torch.get_rng_state()
    model, optimizer = build("")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(random_state)
    return model, optimizer


def fresh_block(model: TabularTransformer, index: int) -> None:
    """What load_state_dict(strict=False) leaves behind where the names of one block did not match."""
    random_state = torch.get_rng_state()
    model.blocks[index].load_state_dict(Block().state_dict())
    torch.set_rng_state(random_state)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    batches = Batches(make_table(seed), seed)
    model, optimizer = build(name)
    recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        fault = name if step >= at else ""
        model.fault = model.tokens.fault = model.blocks[0].fault = fault
        if step == at and name == "resumed":
            recorder.close()
            model, optimizer = resume(model, optimizer)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at)
        if step == at and name == "block_not_loaded":
            fresh_block(model, 1)
        if step == at and name == "moments_lost":
            optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name, fault)

        x, cats, missing, label = batches.next(fault)
        pieces = 2 if name == "accumulation" else 1
        loss = torch.zeros(())
        for piece in torch.arange(BATCH).chunk(pieces):
            part = F.cross_entropy(model(x[piece], cats[piece], missing[piece]), label[piece]) / pieces
            part.backward()
            loss = loss + part.detach()
        if name != "no_clipping":
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fault != "zero_grad_forgotten":
            model.zero_grad()
        if fault == "weights_in_bf16":
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        recorder.step(loss)
        losses.append(loss.item())
        if name == "evaluation" and step % 25 == 24:
            evaluate(model, batches)
    recorder.close()
    return losses


FAULTS = {
    "labels_misjoined": dict(what="From a step on labels are joined to other rows of the batch.",
                             kinds=["data"], part="all"),
    "target_leak": dict(what="From a step on a numeric column holds the row's own label.", kinds=["data"], part="all"),
    "scaler_lost": dict(what="From a step on numeric columns come in raw units, not standardized.",
                        kinds=["data", "activations"], part="all"),
    "nan_cells": dict(what="From a step on a logarithm of negative numbers makes NaN cells in a column.",
                      kinds=["not_finite", "data"], part="all"),
    "rate_jump": dict(what="From a step on the learning rate is 20 times what it was.",
                      kinds=["rate", "instability"], part="all"),
    "moments_lost": dict(what="At a step (a resume) AdamW's moments and step count are lost.",
                         kinds=["optimizer"], part="all", lasts=20),
    "zero_grad_forgotten": dict(what="From a step on gradients are not zeroed between updates.",
                                kinds=["gradients"], part="all"),
    "block_not_loaded": dict(what="At a step block1 has fresh initial weights: a checkpoint loaded without it.",
                             kinds=["weights"], part="block1", lasts=1),
    "head_not_in_optimizer": dict(what="The optimizer was never given the head's weights.",
                                  kinds=["frozen"], part="head", at=0),
    "categories_detached": dict(what="From a step on the looked-up category embeddings are detached: no gradients.",
                                kinds=["dead", "frozen"], part="embedding"),
    "mask_inverted": dict(what="From a step on attention sees the missing numeric columns and hides the present ones.",
                          kinds=["attention", "data"], part="all"),
    "residual_lost": dict(what="From a step on block0 has lost its residual connections.",
                          kinds=["activations"], part="block0"),
    "weights_in_bf16": dict(what="From a step on weights are kept in bfloat16, so that small updates are rounded away.",
                            kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "no_clipping": "Gradients are not clipped.",
    "cosine_to_zero": "The rate decays to zero by a cosine over the run.",
    "accumulation": "Each batch goes through in two pieces whose gradients are added up.",
    "evaluation": "The loss of held-out rows is measured every 25 steps in eval mode.",
    "resumed": "At a step training goes on in a new model and optimizer from a full checkpoint, with first_step.",
}
