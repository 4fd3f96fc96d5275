"""SASRec: a small causal Transformer over histories of items, next-item prediction, made-up users, Adam."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
ITEMS = 161          # item 0 is the padding
GENRES = 8
LENGTH = 16
USERS = 1500
WIDTH = 32
HEADS = 2
BLOCKS = 3
BATCH = 24
RATE = 3e-3
WARMUP = 20
CLIP = 5.0

FAULTS = {
    "rate_raised": dict(
        what="After a move to more machines the learning rate is multiplied by 32, though the batch stays as it was.",
        kinds=["rate"], part="all"),
    "rate_at_floor": dict(
        what="The schedule is restored at its end, so the learning rate drops to a thousandth of what it should be.",
        kinds=["rate"], part="all"),
    "targets_of_other_users": dict(
        what="Inputs and targets are shuffled apart by the loader, so each history gets the targets of another user.",
        kinds=["data"], part="all"),
    "no_causal_mask": dict(
        what="The attention of every block lacks the causal mask, so each position sees the item it has to predict.",
        kinds=["attention", "data"], part="all", at=0),
    "padding_in_loss": dict(
        what="The loss is averaged over padded positions too, with the padding item as their target.",
        kinds=["data"], part="all", at=0),
    "unit_embedding": dict(
        what="The item table keeps the N(0, 1) values of nn.Embedding instead of 0.02, so the tied logits are huge.",
        kinds=["weights", "output_logits"], part="embedding", at=0),
    "no_zero_grad": dict(
        what="zero_grad is not called any more, so the gradients of all earlier batches add up.",
        kinds=["gradients"], part="all"),
    "block_frozen": dict(
        what="The middle block is frozen for a trial with new items and never thawed again.",
        kinds=["frozen"], part="block1"),
    "left_in_eval": dict(
        what="After an evaluation model.train() is forgotten, so the training goes on without dropout.",
        kinds=["data"], part="all"),
    "batch_without_targets": dict(
        what="A batch of users with a single event has no target, and the mean over its targets is 0 / 0.",
        kinds=["not_finite", "data"], part="all"),
    "moments_lost": dict(
        what="The run is restarted from the weights alone, so Adam begins with empty moments and a step count of 0.",
        kinds=["optimizer"], part="all"),
    "decay_in_adam": dict(
        what="A weight decay of 0.1 meant for AdamW is given to Adam, which adds it to the gradients as an L2 term.",
        kinds=["optimizer", "weights"], part="all"),
    "item_table_remade": dict(
        what="A refresh of the catalogue remakes the item table, and its trained values are replaced by random ones.",
        kinds=["weights"], part="embedding"),
}

HEALTHY = {
    "accumulation": "Each update uses the mean gradient of two half batches.",
    "evaluation": "Every 20 updates the hit rate on held-out users is taken in eval mode, then training goes on.",
    "resume": "The run goes on at step 60 from a checkpoint with weights, optimizer and all states.",
    "cosine": "The learning rate follows a cosine from its peak to a tenth of it, after the usual warm-up.",
    "weight_average": "An exponential average of the weights is kept aside for serving.",
}


# ---- data: users with two favourite genres, items with usual successors

def make_users(count, generator):
    per_genre = (ITEMS - 1) // GENRES
    genre_of = (torch.arange(ITEMS) - 1).clamp(min=0) // per_genre
    genre_of = genre_of.clamp(max=GENRES - 1)
    world = torch.Generator().manual_seed(7)
    offsets = torch.randint(per_genre, (ITEMS, 3), generator=world)
    successors = 1 + genre_of[:, None] * per_genre + offsets
    favourites = torch.randint(GENRES, (count, 2), generator=generator)

    def any_item():
        pick = torch.randint(2, (count, 1), generator=generator)
        genre = favourites.gather(1, pick)[:, 0]
        popular = torch.rand(count, generator=generator) ** 2          # some items are far more popular
        return 1 + genre * per_genre + (popular * per_genre).long()

    choice = torch.tensor([0.75, 0.2, 0.05])
    events = [any_item()]
    for _ in range(LENGTH):
        which = torch.multinomial(choice, count, replacement=True, generator=generator)
        following = successors[events[-1], which]
        jumps = torch.rand(count, generator=generator) < 0.2
        events.append(torch.where(jumps, any_item(), following))
    events = torch.stack(events, 1)
    lengths = torch.randint(5, LENGTH + 2, (count,), generator=generator)
    # padded on the left, as SASRec does
    return torch.where(torch.arange(LENGTH + 1) >= LENGTH + 1 - lengths[:, None], events, 0)


def pick_batch(users, size, generator):
    rows = users[torch.randint(len(users), (size,), generator=generator)]
    return rows[:, :-1], rows[:, 1:].masked_fill(rows[:, :-1] == 0, 0)


# ---- model

class Attention(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed):
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, HEADS, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~allowed, -1e9)
        mixed = self.dropout(scores.softmax(-1)) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention(dropout)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, allowed):
        x = x + self.dropout(self.attention(self.norm1(x), allowed))
        return x + self.dropout(self.feed(self.norm2(x)))


class SASRec(nn.Module):
    def __init__(self, dropout=0.1, item_std=0.02, causal=True):
        super().__init__()
        self.causal = causal
        self.items = nn.Embedding(ITEMS, WIDTH, padding_idx=0)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_normal_(module.weight)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.positions.weight, std=0.02)
        init_items(self.items, item_std)

    def forward(self, history):
        t = history.shape[1]
        x = self.items(history) * math.sqrt(WIDTH) + self.positions(torch.arange(t))
        x = self.dropout(x)
        real = (history != 0)[:, None, None, :]
        allowed = real
        if self.causal:
            allowed = allowed & torch.ones(t, t, dtype=torch.bool).tril()
        allowed = allowed | torch.eye(t, dtype=torch.bool)      # a padded position sees itself, so no row is empty
        for block in self.blocks:
            x = block(x, allowed)
        return self.norm(x) @ self.items.weight.T               # the item table is the head too


def init_items(items, std):
    nn.init.normal_(items.weight, std=std)
    with torch.no_grad():
        items.weight[0].zero_()


def loss_of(model, history, targets, padding_counts=False):
    losses = F.cross_entropy(model(history).flatten(0, 1), targets.flatten(), reduction="none")
    if padding_counts:
        return losses.mean()
    counted = (targets.flatten() != 0).float()
    return (losses * counted).sum() / counted.sum()


@torch.no_grad()
def hit_rate(model, users):
    logits = model(users[:, :-1])[:, -1]
    return (logits.topk(10).indices == users[:, -1:]).any(1).float().mean().item()


# ---- training

def rate_at(step, cosine=False):
    rate = RATE * min(1.0, (step + 1) / WARMUP)
    if cosine and step >= WARMUP:
        done = (step - WARMUP) / (STEPS - WARMUP)
        rate = RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    return rate


def make_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed + 1000)
    users = make_users(USERS, generator)
    held_out = make_users(100, generator)

    model = SASRec(item_std=1.0 if name == "unit_embedding" else 0.02, causal=name != "no_causal_mask")
    optimizer = make_optimizer(model)
    average = copy.deepcopy(model) if name == "weight_average" else None
    recorder = None
    if name != "resume":
        recorder = lab.record(model, optimizer, every=every, out=out)

    losses = []
    for step in range(STEPS):
        if name == "resume" and step == 60:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                                   "random": torch.get_rng_state()})
            model = SASRec()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["random"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if name == "evaluation" and step % 20 == 0:
            model.eval()
            hit_rate(model, held_out)
            model.train()

        if step == at:
            if name == "left_in_eval":
                model.eval()
                hit_rate(model, held_out)
            elif name == "block_frozen":
                model.blocks[1].requires_grad_(False)
            elif name == "moments_lost":
                optimizer.state.clear()
            elif name == "decay_in_adam":
                for group in optimizer.param_groups:
                    group["weight_decay"] = 0.1
            elif name == "item_table_remade":
                init_items(model.items, 0.02)

        rate = rate_at(step, cosine=name == "cosine")
        if name == "rate_raised" and step >= at:
            rate *= 32
        if name == "rate_at_floor" and step >= at:
            rate *= 1e-3
        for group in optimizer.param_groups:
            group["lr"] = rate

        history, targets = pick_batch(users, BATCH, generator)
        if name == "targets_of_other_users" and step >= at:
            targets = targets[torch.randperm(BATCH)]
        if name == "batch_without_targets" and step == at:
            history = torch.cat([torch.zeros_like(history[:, 1:]), history[:, -1:]], 1)
            targets = torch.zeros_like(targets)

        if name == "accumulation":
            loss = 0.0
            for half in range(2):
                part = loss_of(model, history[half::2], targets[half::2]) / 2
                part.backward()
                loss = loss + part.detach()
        else:
            loss = loss_of(model, history, targets, padding_counts=name == "padding_in_loss")
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "no_zero_grad" and step >= at):
            optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for kept, now in zip(average.parameters(), model.parameters()):
                    kept.lerp_(now, 0.01)
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses
