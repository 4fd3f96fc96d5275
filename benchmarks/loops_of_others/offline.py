"""A decision transformer (return, state, action tokens) on mixed-quality play of a small grid chase, with AdamW."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240
SIZE = 6  # the grid is SIZE x SIZE
LENGTH = 12  # the most moves in one game
MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
BATCH = 20
WIDTH = 32
BLOCKS = 3
RATE = 3e-3
RETURN_SCALE = 10.0

FAULTS = {
    "batch_repeats": dict(
        what="The sampler is seeded anew at every update, so from a step on the same batch comes again and again.",
        kinds=["data"], part="all"),
    "padding_counted": dict(
        what="From a step on the loss counts the padded moves behind the end of a game as if they had been played.",
        kinds=["data"], part="all"),
    "returns_unscaled": dict(
        what="From a step on returns-to-go are fed in raw, no longer divided by the scale.",
        kinds=["data", "reward"], part="all"),
    "rate_too_high": dict(
        what="The rate is thirty times as high from a step on, as after a wrong entry in a config at a restart.",
        kinds=["rate", "instability"], part="all"),
    "moments_lost": dict(
        what="At a restart the weights are loaded, but AdamW begins with empty moments and no warm-up.",
        kinds=["optimizer"], part="all", lasts=20),
    "block_not_loaded": dict(
        what="At a restart the keys of one block do not match (strict=False): it has new random weights.",
        kinds=["weights"], part="block2", lasts=20),
    "grads_not_zeroed": dict(
        what="From a step on zero_grad is no longer called, so gradients of all updates add up.",
        kinds=["gradients"], part="all"),
    "mask_lost": dict(
        what="Attention has no causal mask: a state sees the action that it has to predict.",
        kinds=["attention", "data"], part="all", at=0),
    "logits_squashed": dict(
        what="Logits go through the tanh of the version for continuous actions, so they stay between -1 and 1.",
        kinds=["output_logits"], part="head", at=0),
    "block_frozen": dict(
        what="One block is frozen for an experiment (requires_grad off) and never thawed.",
        kinds=["frozen", "dead"], part="block0"),
    "clip_before_unscale": dict(
        what="From a restart on the loss is scaled by 65536 as for fp16, and clipping sees gradients not yet unscaled.",
        kinds=["precision", "optimizer", "gradients"], part="all"),
    "empty_game": dict(
        what="A game without moves comes into the batch: its mean loss is 0/0.",
        kinds=["not_finite", "data"], part="all"),
    "no_residual": dict(
        what="One block forgets to add its input: both residual connections are missing.",
        kinds=["activations"], part="block1", at=0),
}

HEALTHY = {
    "long_warm_up": "The rate warms up over 100 steps.",
    "cosine_to_zero": "The rate decays to zero by a cosine over the whole run.",
    "accumulation": "Each update takes the mean gradient of two micro-batches, halves of a batch.",
    "rollouts": "Every 20 steps the model plays games in eval mode without gradients, then trains on in train mode.",
    "resumed": "Stopped halfway to `at` and resumed with first_step from a checkpoint with all its state.",
}


# ---- the game ----

def best_moves(player, goal):
    """Go along the axis on which the goal is farther."""
    gap = goal - player
    along_x = np.where(gap[:, 0] > 0, 0, 1)
    along_y = np.where(gap[:, 1] > 0, 2, 3)
    return np.where(np.abs(gap[:, 0]) >= np.abs(gap[:, 1]), along_x, along_y)


def new_games(count, rng):
    player = rng.integers(0, SIZE, (count, 2))
    goal = rng.integers(0, SIZE, (count, 2))
    same = (player == goal).all(1)
    goal[same, 0] = (goal[same, 0] + 3) % SIZE
    return player, goal


def to_state(player, goal):
    """Where the goal is as seen from the player, and where the player is."""
    return np.concatenate([(goal - player) / 2.4, (player - (SIZE - 1) / 2) / 1.7], 1)


def play(count, rng, choose):
    """Play games side by side; a move costs 1 and the goal, where a game ends, gives 10."""
    player, goal = new_games(count, rng)
    alive = np.ones(count, bool)
    states, actions = np.zeros((count, LENGTH, 4)), np.zeros((count, LENGTH), int)
    rewards, mask = np.zeros((count, LENGTH)), np.zeros((count, LENGTH))
    for t in range(LENGTH):
        state = to_state(player, goal)
        action = choose(t, player, goal, state, rewards)
        states[alive, t], actions[alive, t], mask[alive, t] = state[alive], action[alive], 1
        moved = np.clip(player + MOVES[action], 0, SIZE - 1)
        player = np.where(alive[:, None], moved, player)
        there = (player == goal).all(1)
        rewards[:, t] = np.where(alive, np.where(there, 10.0, -1.0), 0.0)
        alive &= ~there
    return states, actions, rewards, mask


def make_data(count, rng):
    """Games of experts, middling players and beginners."""
    skill = rng.choice([0.97, 0.7, 0.25], count, p=[0.5, 0.3, 0.2])

    def choose(t, player, goal, state, rewards):
        good = rng.random(count) < skill
        return np.where(good, best_moves(player, goal), rng.integers(0, 4, count))

    states, actions, rewards, mask = play(count, rng, choose)
    to_go = np.cumsum(rewards[:, ::-1], 1)[:, ::-1].copy()
    return dict(states=torch.tensor(states, dtype=torch.float32), actions=torch.tensor(actions),
                to_go=torch.tensor(to_go, dtype=torch.float32), mask=torch.tensor(mask, dtype=torch.float32))


def draw(data, seed, count=BATCH):
    rng = np.random.default_rng(seed)
    rows = torch.tensor(rng.choice(len(data["mask"]), count, replace=False))
    return {key: value[rows] for key, value in data.items()}


# ---- the model ----

class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.residual = True
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.05)

    def attend(self, x, causal):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(b, n, d))

    def forward(self, x, causal=True):
        y = self.drop(self.attend(self.norm1(x), causal))
        x = x + y if self.residual else y
        y = self.drop(self.down(F.gelu(self.up(self.norm2(x)))))
        return x + y if self.residual else y


class DecisionTransformer(nn.Module):
    def __init__(self, width=WIDTH, blocks=BLOCKS):
        super().__init__()
        self.embed_return = nn.Linear(1, width)
        self.embed_state = nn.Linear(4, width)
        self.embed_action = nn.Embedding(4, width)
        self.embed_time = nn.Embedding(LENGTH, width)
        self.norm_in = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm_out = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)
        self.causal, self.squash = True, False
        for embedding in (self.embed_action, self.embed_time):
            nn.init.normal_(embedding.weight, std=0.3)

    def forward(self, to_go, states, actions):
        b, n = actions.shape
        time = self.embed_time(torch.arange(n))
        tokens = [self.embed_return(to_go[..., None]), self.embed_state(states), self.embed_action(actions)]
        x = torch.stack([token + time for token in tokens], 2).view(b, 3 * n, -1)
        x = self.norm_in(x)
        for block in self.blocks:
            x = block(x, self.causal)
        logits = self.head(self.norm_out(x[:, 1::3]))  # an action is read off at its state's token
        return torch.tanh(logits) if self.squash else logits


def build(seed):
    torch.manual_seed(seed)
    model = DecisionTransformer()
    return model, torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)


def loss_of(model, batch, scale=RETURN_SCALE, count_padding=False):
    logits = model(batch["to_go"] / scale, batch["states"], batch["actions"])
    nll = F.cross_entropy(logits.transpose(1, 2), batch["actions"], reduction="none")
    mask = torch.ones_like(nll) if count_padding else batch["mask"]
    return ((nll * mask).sum(1) / mask.sum(1)).mean()  # every game weighs the same


def rollout(model, seed, count=16, wanted=6.0):
    """The mean return of games that the model plays when asked for a return of `wanted`."""
    model.eval()
    states, actions = torch.zeros(count, LENGTH, 4), torch.zeros(count, LENGTH, dtype=torch.long)
    to_go = torch.zeros(count, LENGTH)

    def choose(t, player, goal, state, rewards):
        states[:, t] = torch.tensor(state, dtype=torch.float32)
        to_go[:, t] = wanted - torch.tensor(rewards[:, :t].sum(1), dtype=torch.float32)
        with torch.no_grad():
            seen = slice(0, t + 1)
            logits = model(to_go[:, seen] / RETURN_SCALE, states[:, seen], actions[:, seen])
        actions[:, t] = logits[:, -1].argmax(-1)
        return actions[:, t].numpy()

    rewards = play(count, np.random.default_rng(seed), choose)[2]
    model.train()
    return float(rewards.sum(1).mean())


def rate_at(step, name):
    if name == "cosine_to_zero":
        return RATE * min(1, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return RATE * min(1, (step + 1) / (100 if name == "long_warm_up" else 20))


# ---- training ----

def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    data = make_data(6000, np.random.default_rng(1000 + seed))
    model, optimizer = build(seed)
    at = FAULTS.get(name, {}).get("at", at)
    halfway = at // 2 if name == "resumed" else None
    start_record = lambda first: lab.record(model, optimizer, every=every, out=out, first_step=first,
                                            extra={"reward": lambda: float(batch["to_go"][:, 0].mean())})
    recorder = None if name == "resumed" else start_record(0)
    losses = []
    for step in range(STEPS):
        planted = step >= at
        if step == halfway:
            saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
            random_state = torch.get_rng_state()
            model, optimizer = build(seed + 1)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(random_state)
            recorder = start_record(step)
        if name == "moments_lost" and step == at:
            optimizer.state.clear()
        if name == "block_not_loaded" and step == at:
            model.blocks[2].load_state_dict(Block(WIDTH).state_dict())
        if name == "block_frozen" and step == at:
            model.blocks[0].requires_grad_(False)
        if name == "no_residual" and step == at:
            model.blocks[1].residual = False
        if name == "logits_squashed":
            model.squash = planted
        if name == "mask_lost":
            model.causal = not planted
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name) * (30 if name == "rate_too_high" and planted else 1)

        batch_seed = at if name == "batch_repeats" and planted else step
        batch = draw(data, [seed, batch_seed])
        if name == "empty_game" and step == at:
            batch["mask"][3] = 0
        loss_scale = 65536.0 if name == "clip_before_unscale" and planted else 1.0
        if name == "accumulation":
            halves = [{key: value[rows] for key, value in batch.items()}
                      for rows in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH))]
            parts = [loss_of(model, half) / 2 for half in halves]
            for part in parts:
                part.backward()
            loss = sum(part.detach() for part in parts)
        else:
            loss = loss_of(model, batch,
                           scale=1.0 if name == "returns_unscaled" and planted else RETURN_SCALE,
                           count_padding=name == "padding_counted" and planted)
            (loss * loss_scale).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if name == "clip_before_unscale":
            for p in model.parameters():
                p.grad /= loss_scale
        optimizer.step()
        if not (name == "grads_not_zeroed" and planted):
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(loss)
        losses.append(float(loss.detach()))
        if name == "rollouts" and step % 20 == 19:
            rollout(model, [seed, step])
    if recorder is not None:
        recorder.close()
    train.last = model  # for a look at it afterwards
    return losses
