"""A small graph Transformer (Graphormer-like) predicts a property of drawn molecules; AdamW, squared error."""
import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
BATCH = 32
POOL = 3000
NODES = 10  # the most atoms that a molecule has
TYPES = 5  # kinds of atom; 0 is padding
TOKEN = TYPES + 1  # a further node before the atoms, seen by all, as in Graphormer
BONDS = 4  # 0 none, 1 single, 2 double, 3 aromatic
FAR = 7  # distances in bonds are clipped here
WIDTH, HEADS, DEPTH = 48, 4, 3
RATE, WARM_UP = 3e-3, 20


def draw_molecules(count, rng):
    """Random trees with some rings: atoms [count, N], bonds [count, N, N]."""
    rows = np.arange(count)
    size = rng.integers(5, NODES + 1, count)
    atoms = rng.choice(np.arange(1, TYPES + 1), (count, NODES), p=[0.5, 0.15, 0.15, 0.1, 0.1])
    atoms[np.arange(NODES)[None] >= size[:, None]] = 0
    bonds = np.zeros((count, NODES, NODES), dtype=np.int64)
    for node in range(1, NODES):
        parent = rng.integers(max(0, node - 3), node, count)
        kind = rng.choice([1, 2, 3], count, p=[0.7, 0.2, 0.1]) * (node < size)
        bonds[rows, node, parent] = bonds[rows, parent, node] = kind
    for _ in range(2):  # rings: a further bond between atoms that are five apart
        start = rng.integers(0, NODES - 5, count)
        ring = (start + 5 < size) & (rng.random(count) < 0.5)
        bonds[rows[ring], start[ring], start[ring] + 5] = 3
        bonds[rows[ring], start[ring] + 5, start[ring]] = 3
    return atoms, bonds


def distances(bonds):
    """Number of bonds on the shortest way between two atoms, FAR where there is none."""
    linked = (bonds > 0).astype(np.float32)
    reached = np.broadcast_to(np.eye(NODES, dtype=np.float32), linked.shape).copy()
    found = np.where(reached > 0, 0, FAR)
    for length in range(1, FAR):
        reached = ((reached + reached @ linked) > 0).astype(np.float32)
        found = np.where((found == FAR) & (reached > 0), length, found)
    return found


def measure(atoms, bonds, apart, rng):
    """The property: contributions of atoms, of bonds, and of charges two bonds apart, with a little noise."""
    of_atom = np.array([0.0, 1.2, 0.2, 2.0, -0.8, 0.7])
    charge = np.array([0.0, -0.2, 0.9, 1.0, -1.2, 0.5])
    of_bond = np.array([0.0, 0.3, 1.2, -0.6])
    pairs = charge[atoms][:, :, None] * charge[atoms][:, None, :]
    value = of_atom[atoms].sum(1) + 0.5 * of_bond[bonds].sum((1, 2)) + 0.2 * (pairs * (apart == 1)).sum((1, 2))
    return value + rng.normal(0.0, 0.1, len(value))


class Molecules:
    """A pool of molecules with their property, raw and normalised, drawn from in batches."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        atoms, bonds = draw_molecules(POOL, rng)
        apart = distances(bonds)
        raw = measure(atoms, bonds, apart, rng)
        atoms = np.pad(atoms, ((0, 0), (1, 0)), constant_values=TOKEN)
        bonds = np.pad(bonds, ((0, 0), (1, 0), (1, 0)))
        apart = np.pad(apart, ((0, 0), (1, 0), (1, 0)), constant_values=FAR + 1)
        self.mean, self.spread = float(raw.mean()), float(raw.std())
        self.atoms, self.bonds, self.apart = (torch.tensor(a) for a in (atoms, bonds, apart))
        self.raw = torch.tensor(raw, dtype=torch.float32)
        self.target = (self.raw - self.mean) / self.spread
        self.draw = torch.Generator().manual_seed(seed + 1)

    def batch(self, size=BATCH):
        rows = torch.randint(0, POOL - 256, (size,), generator=self.draw)  # the last 256 are held out
        return self.take(rows)

    def take(self, rows):
        return dict(atoms=self.atoms[rows], bonds=self.bonds[rows], apart=self.apart[rows],
                    target=self.target[rows], raw=self.raw[rows])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.residual = True

    def attend(self, x, bias):
        count, nodes, _ = x.shape
        q, k, v = self.qkv(x).view(count, nodes, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(count, nodes, WIDTH))

    def forward(self, x, bias):
        x = x + self.drop(self.attend(self.norm1(x), bias))
        change = self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + change if self.residual else change


class GraphTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Embedding(TOKEN + 1, WIDTH)
        self.bonds_of = nn.Linear(BONDS - 1, WIDTH)  # of the numbers of an atom's bonds of each kind
        self.distance_bias = nn.Embedding(FAR + 2, HEADS)
        self.bond_bias = nn.Embedding(BONDS, HEADS)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(2 * WIDTH, 1)
        self.mask_inverted = False
        self.output_scale = 1.0
        nn.init.normal_(self.atom.weight, std=0.5)
        for table in (self.distance_bias, self.bond_bias):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, batch):
        atoms, real = batch["atoms"], batch["atoms"] > 0
        numbers = F.one_hot(batch["bonds"], BONDS).sum(2)[..., 1:]
        x = self.atom(atoms) + self.bonds_of(numbers.to(self.atom.weight.dtype))
        bias = (self.distance_bias(batch["apart"]) + self.bond_bias(batch["bonds"])).permute(0, 3, 1, 2)
        hidden = real if self.mask_inverted else ~real
        bias = bias.masked_fill(hidden[:, None, None, :], -1e9)
        for block in self.blocks:
            x = block(x, bias)
        atom = real & (atoms != TOKEN)
        total = (self.norm(x) * atom[..., None]).sum(1)
        pooled = torch.cat([total / NODES, total / atom.sum(1, keepdim=True)], -1)
        return self.head(self.drop(pooled))[:, 0] * self.output_scale


def rate_at(step, name, at):
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "cosine_to_zero":
        return rate * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    rate *= 1 - 0.8 * max(0, step - WARM_UP) / (STEPS - WARM_UP)
    if name == "rate_times_thirty" and step >= at:
        rate *= 30
    if name == "scheduler_every_batch" and step >= at:
        rate *= 0.8 ** (step - at + 1)
    return rate


def parameters_to_train(model, name):
    if name == "embedding_left_out":
        tables = ("atom.", "distance_bias.", "bond_bias.")
        return [p for key, p in model.named_parameters() if not key.startswith(tables)]
    return list(model.parameters())


def new_optimizer(model, name):
    return torch.optim.AdamW(parameters_to_train(model, name), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)


def plant(name, model, optimizer, data):
    """What is changed once, at the step at which the fault begins."""
    if name == "left_in_eval":
        model.eval()
    if name == "mask_inverted":
        model.mask_inverted = True
    if name == "decay_of_twenty":
        optimizer.param_groups[0]["weight_decay"] = 20.0
    if name == "block_not_loaded":
        torch.manual_seed(999)
        model.blocks[1].load_state_dict(Block().state_dict())
    if name == "residual_lost":
        model.blocks[2].residual = False
    if name == "scaled_twice":
        model.output_scale = data.spread
    if name == "pure_bfloat16":
        model.to(torch.bfloat16)
        for state in optimizer.state.values():
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key].to(torch.bfloat16)


def next_batch(data, step, name, at):
    size = BATCH // 2 if name == "accumulated" else BATCH
    if name == "growing_batch":
        size = BATCH // 2 + BATCH * min(step, STEPS // 2) * 2 // STEPS
    batch = data.batch(size)
    if name == "empty_molecule" and step == at:
        batch["atoms"][0, 1:] = 0  # a molecule that could not be read came through without atoms
        batch["bonds"][0] = 0
    if name == "raw_shard" and at <= step < at + 20:
        batch["target"] = batch["raw"]
    return batch


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        held_out = data.take(torch.arange(POOL - 256, POOL))
        error = (model(held_out) - held_out["target"]).abs().mean().item()
    model.train()
    return error


def resume(model, optimizer):
    """What a new process does: new objects, everything loaded from the checkpoint."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    random_state = torch.get_rng_state()
    model = GraphTransformer()
    optimizer = new_optimizer(model, "resumed")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    torch.set_rng_state(random_state)
    return model, optimizer


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    data = Molecules(seed)
    torch.manual_seed(seed)
    model = GraphTransformer()
    optimizer = new_optimizer(model, name)
    first = at // 2 if name == "resumed" else 0
    recorder = None
    losses = []
    for step in range(STEPS):
        if name == "resumed" and step == first:
            model, optimizer = resume(model, optimizer)
        if step == first:  # a run that is resumed records what follows its checkpoint
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        if step == at:
            plant(name, model, optimizer, data)
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name, at)

        micro_batches = 2 if name == "accumulated" else 1
        loss = 0.0
        for _ in range(micro_batches):
            batch = next_batch(data, step, name, at)
            part = F.mse_loss(model(batch).float(), batch["target"]) / micro_batches
            part.backward()
            loss = loss + part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 2.0)
        optimizer.step()
        if not (name == "not_zeroed" and step >= at - 1):  # step `at` is the first with old ones
            model.zero_grad()

        if name == "evaluated" and step % 20 == 19:
            evaluate(model, data)
        if recorder is not None:
            recorder.step(loss)
        losses.append(loss.item())
    recorder.close()
    return losses


FAULTS = {
    "raw_shard": dict(what="For 20 steps a shard comes with targets in their raw units, not normalised.",
                      kinds=["data"], part="all", lasts=20),
    "left_in_eval": dict(what="After a validation the model stays in eval mode: no dropout any more.",
                         kinds=["data"], part="all"),
    "mask_inverted": dict(what="The mask of padding is inverted: atoms attend to padding, not to each other.",
                             kinds=["attention", "data"], part="all"),
    "rate_times_thirty": dict(what="The learning rate is 30 times as high from a step on.",
                              kinds=["rate", "instability"], part="all"),
    "scheduler_every_batch": dict(what="A scheduler meant for epochs is stepped at every batch: the rate dies away.",
                                  kinds=["rate"], part="all"),
    "decay_of_twenty": dict(what="Weight decay is 20 in place of 0.01 and shrinks all weights.",
                            kinds=["optimizer"], part="all"),
    "not_zeroed": dict(what="Gradients are no longer zeroed and pile up from step to step.",
                       kinds=["gradients", "optimizer"], part="all"),
    "block_not_loaded": dict(what="On a reload block 1 is missing from the checkpoint and gets initial weights.",
                             kinds=["weights"], part="block1"),
    "embedding_left_out": dict(what="The embedding tables are in none of the optimizer's groups of parameters.",
                               kinds=["frozen", "optimizer"], part="embedding", at=0),
    "empty_molecule": dict(what="One batch has a molecule without atoms: the mean over none is NaN, then all is.",
                           kinds=["not_finite", "data"], part="all"),
    "pure_bfloat16": dict(what="Weights and moments are kept in bfloat16, with no copy in float32.",
                          kinds=["precision"], part="all"),
    "residual_lost": dict(what="Block 2 no longer adds its input to what its MLP gives.",
                          kinds=["activations"], part="block2"),
    "scaled_twice": dict(what="The head's output is multiplied by the targets' spread, while targets are normalised.",
                         kinds=["output_logits"], part="head"),
}

HEALTHY = {
    "cosine_to_zero": "The rate falls to zero along a cosine.",
    "accumulated": "Each update adds up the gradients of two half batches, each with half its loss.",
    "evaluated": "Every 20 steps the model is evaluated on held-out molecules, then set back to train mode.",
    "resumed": "Resumed half way to `at` from a checkpoint with all its state, recorded from there by first_step.",
    "growing_batch": "The batch grows from 16 to 48 molecules over the first half.",
}
