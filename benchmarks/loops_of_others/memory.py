"""A2C with GAE: a causal Transformer remembers a cue and walks to the hidden corner of a grid, with Adam."""
import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import lab

STEPS = 240
ENVS = 32           # games played side by side; one half is four steps ahead of the other
SEGMENT = 4         # steps of every game between two updates
HORIZON = 8         # steps of a game, which is also how far the memory reaches
SIZE = 5            # the grid is SIZE x SIZE, the agent begins in its middle
ACTIONS = 5         # up, down, left, right, stay
WIDTH, HEADS, LAYERS = 32, 4, 3
LR, WARMUP = 2e-3, 10
GAMMA, LAMBDA = 0.95, 0.95
VALUE_COEF, ENTROPY_COEF, CLIP = 0.5, 0.01, 0.5

FAULTS = {
    "lr_jump": dict(
        what="The learning rate is thirty times what the schedule says from this step on (a slip of units).",
        kinds=["rate"], part="all"),
    "lr_ends_early": dict(
        what="The schedule was counted for a shorter run, so the learning rate is zero from this step on.",
        kinds=["rate"], part="all"),
    "reward_unscaled": dict(
        what="The wrapper that scales the rewards is lost, so the rewards are ten times as large.",
        kinds=["reward"], part="all"),
    "cue_blank": dict(
        what="The observation no longer holds the cue (its field is always 0), so the corner cannot be known.",
        kinds=["data"], part="all"),
    "policy_sign": dict(
        what="The minus in front of the policy gradient loss is missing: good actions are made less likely.",
        kinds=["policy", "data"], part="all"),
    "no_zero_grad": dict(
        what="optimizer.zero_grad() is no longer called, so each update uses the sum of all gradients since.",
        kinds=["gradients"], part="all"),
    "stale_actor": dict(
        what="The actor that plays the games no longer gets the learner's weights; its games are off-policy.",
        kinds=["policy", "data"], part="all"),
    "frozen_block": dict(
        what="The middle block has requires_grad set to False and is no longer trained.",
        kinds=["frozen"], part="block1"),
    "mask_lost": dict(
        what="The causal mask is no longer applied: in the update the model sees later observations and actions.",
        kinds=["attention", "data"], part="all"),
    "entropy_nan": dict(
        what="Moves into walls get a logit of -inf, and 0 * -inf in the entropy makes the loss NaN.",
        kinds=["not_finite"], part="all"),
    "head_init": dict(
        what="The policy's head was made with a gain of 10 where 0.01 was meant: nearly sure actions at the start.",
        kinds=["weights", "output_logits"], part="head", at=0),
    "embedding_detached": dict(
        what="The embedded observations are detached, so that no gradient comes to the embeddings.",
        kinds=["dead", "frozen"], part="embedding", at=0),
    "weight_decay": dict(
        what="Adam got weight_decay=0.1 (added to the gradients), far more than the clipped gradients.",
        kinds=["optimizer", "weights"], part="all", at=0),
}

HEALTHY = {
    "accumulate": "Each update adds up the gradients of two halves of the games.",
    "evaluate": "Every 20 updates the greedy policy plays fresh games, without gradients, in eval mode.",
    "resume": "The run goes on from a checkpoint of model, optimizer and games that was written at update 60.",
    "cosine": "A cosine schedule with a longer warm-up takes the place of the linear one.",
    "average": "A moving average of the weights is kept aside for later use.",
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        n, t = x.shape[:2]
        q, k, v = self.qkv(x).view(n, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        if mask is not None:
            scores = scores.masked_fill(mask, float("-inf"))
        x = scores.softmax(-1) @ v
        return self.out(x.transpose(1, 2).reshape(n, t, WIDTH))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, mask):
        x = x + self.attention(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """What is seen at a step: the walls next to the agent, the cue (first step only), the last action."""

    def __init__(self):
        super().__init__()
        self.walls = nn.Embedding(16, WIDTH)
        self.cue = nn.Embedding(5, WIDTH)
        self.action = nn.Embedding(ACTIONS + 1, WIDTH)
        self.position = nn.Embedding(HORIZON, WIDTH)
        for table in self.children():
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, seen):
        places = torch.arange(seen.shape[1])
        return self.walls(seen[..., 0]) + self.cue(seen[..., 1]) + self.action(seen[..., 2]) + self.position(places)


class Agent(nn.Module):
    def __init__(self, policy_gain=0.01):
        super().__init__()
        self.embedding = Embedding()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.policy_head = nn.Linear(WIDTH, ACTIONS)
        self.value_head = nn.Linear(WIDTH, 1)
        self.causal = True
        self.detach_embedding = False
        for block in self.blocks:
            for linear in (block.attention.qkv, block.attention.out, block.mlp[0], block.mlp[2]):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
        nn.init.orthogonal_(self.policy_head.weight, gain=policy_gain)
        nn.init.orthogonal_(self.value_head.weight, gain=1.0)

    def forward(self, seen):
        t = seen.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).triu(1) if self.causal else None
        x = self.embedding(seen)
        if self.detach_embedding:
            x = x.detach()
        for block in self.blocks:
            x = block(x, mask)
        x = self.norm(x)
        return self.policy_head(x), self.value_head(x).squeeze(-1)


class Games:
    """The cue of the first step names one of four corners; each step costs the distance from that corner."""

    moves = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]])
    corners = torch.tensor([[0, 0], [0, SIZE - 1], [SIZE - 1, 0], [SIZE - 1, SIZE - 1]])

    def __init__(self, n, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = torch.arange(n)
        self.place = torch.zeros(n, 2, dtype=torch.long)
        self.goal, self.age = torch.zeros(n, dtype=torch.long), torch.zeros(n, dtype=torch.long)
        self.memory = torch.zeros(n, HORIZON, 3, dtype=torch.long)
        self.reset(torch.ones(n, dtype=torch.bool))

    def blocked(self):
        r, c = self.place.unbind(-1)
        return torch.stack([r == 0, r == SIZE - 1, c == 0, c == SIZE - 1, torch.zeros_like(r, dtype=torch.bool)], -1)

    def remember(self, which, cue, action):
        rows = self.rows[which]
        walls = (self.blocked()[:, :4].long() * torch.tensor([1, 2, 4, 8])).sum(-1)
        self.memory[rows, self.age[which]] = torch.stack([walls, cue, action], -1)[which]

    def reset(self, which):
        goals = torch.randint(4, self.goal.shape, generator=self.generator)
        self.goal = torch.where(which, goals, self.goal)
        self.place[which] = SIZE // 2
        self.age[which] = 0
        self.memory[which] = 0
        self.remember(which, self.goal + 1, torch.zeros_like(self.goal))

    def sample(self, logits):
        noise = torch.rand(logits.shape, generator=self.generator).clamp_min(1e-9)
        return (logits - torch.log(-torch.log(noise))).argmax(-1)

    def step(self, action):
        self.place = (self.place + self.moves[action]).clamp(0, SIZE - 1)
        distance = (self.place - self.corners[self.goal]).abs().sum(-1)
        self.age = self.age + 1
        going_on = self.age < HORIZON
        self.remember(going_on, torch.zeros_like(action), action + 1)
        return 0.5 - distance / 4, ~going_on


def play(actor, games, steps, greedy=False, cue_blank=False, mask_walls=False):
    """Plays some steps of all games; those that end are not begun anew here."""
    start = games.age.clone()
    actions, log_probs, rewards, dones, walls = [], [], [], [], []
    for _ in range(steps):
        seen = games.memory.clone()
        seen[..., 1] *= 1 - cue_blank
        with torch.no_grad():
            logits = actor(seen)[0][games.rows, games.age]
        walls.append(games.blocked())
        logits = logits.masked_fill(walls[-1] & mask_walls, float("-inf"))
        action = logits.argmax(-1) if greedy else games.sample(logits)
        reward, done = games.step(action)
        actions.append(action)
        log_probs.append(logits.log_softmax(-1).gather(-1, action[:, None])[:, 0])
        rewards.append(reward)
        dones.append(done)
    seen = games.memory.clone()
    seen[..., 1] *= 1 - cue_blank
    return {"seen": seen, "places": start[:, None] + torch.arange(steps), "next": games.age.clamp(max=HORIZON - 1),
            "actions": torch.stack(actions, 1), "log_probs": torch.stack(log_probs, 1),
            "rewards": torch.stack(rewards, 1), "dones": torch.stack(dones, 1), "walls": torch.stack(walls, 1)}


def advantages_and_returns(model, batch):
    with torch.no_grad():
        all_values = model(batch["seen"])[1]
    values = all_values.gather(1, batch["places"])
    following = all_values.gather(1, batch["next"][:, None])[:, 0]
    alive = (~batch["dones"]).float()
    advantages, gae = torch.zeros_like(values), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = batch["rewards"][:, t] + GAMMA * following * alive[:, t] - values[:, t]
        gae = delta + GAMMA * LAMBDA * alive[:, t] * gae
        advantages[:, t] = gae
        following = values[:, t]
    returns = advantages + values
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), returns


def a2c_loss(model, batch, advantages, returns, sign=-1.0, mask_walls=False):
    logits, values = model(batch["seen"])
    logits = logits.gather(1, batch["places"][..., None].expand(-1, -1, ACTIONS))
    values = values.gather(1, batch["places"])
    logits = logits.masked_fill(batch["walls"] & mask_walls, float("-inf"))
    log_p = logits.log_softmax(-1)
    taken = log_p.gather(-1, batch["actions"][..., None])[..., 0]
    policy_loss = sign * (advantages * taken).mean()
    value_loss = F.mse_loss(values, returns)
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    kl = (batch["log_probs"] - taken).mean()
    return policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropy, entropy.item(), kl.item()


def learning_rate(step, cosine=False):
    if cosine:
        warm = min(1.0, (step + 1) / (3 * WARMUP))
        return LR * warm * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS)))
    return LR * min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / STEPS)


def evaluate(model, seed):
    model.eval()
    batch = play(model, Games(16, seed), HORIZON, greedy=True)
    model.train()
    return batch["rewards"].sum(1).mean().item()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = Agent(policy_gain=10 if name == "head_init" else 0.01)
    actor = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=1e-5,
                                 weight_decay=0.1 if name == "weight_decay" else 0.0)
    games = Games(ENVS, seed + 1000)
    for _ in range(SEGMENT):        # one half is ahead of the other, so that each update sees both ends of a game
        games.step(torch.randint(ACTIONS, (ENVS,), generator=games.generator))
    games.reset(games.rows < ENVS // 2)

    stats = {"reward": 0.0, "kl": 0.0, "entropy": 0.0}
    extra = {"reward": lambda: stats["reward"], "kl": lambda: stats["kl"], "entropy": lambda: stats["entropy"]}
    resume_at, recorder = 60 if name == "resume" else 0, None
    average, losses, scores = copy.deepcopy(model), [], []
    for step in range(STEPS):
        on = step >= at
        if step == resume_at:
            if name == "resume":
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                model = Agent()
                model.load_state_dict(saved[0])
                optimizer = torch.optim.Adam(model.parameters(), lr=LR, eps=1e-5)
                optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=resume_at, extra=extra)
        lr = learning_rate(step, cosine=name == "cosine")
        if on and name == "lr_jump":
            lr *= 30
        if on and name == "lr_ends_early":
            lr = 0.0
        for group in optimizer.param_groups:
            group["lr"] = lr
        if on and name == "frozen_block":
            model.blocks[1].requires_grad_(False)
        model.detach_embedding = on and name == "embedding_detached"
        model.causal = actor.causal = not (on and name == "mask_lost")

        if not (on and name == "stale_actor"):
            actor.load_state_dict(model.state_dict())
        mask_walls = on and name == "entropy_nan"
        batch = play(actor, games, SEGMENT, cue_blank=on and name == "cue_blank", mask_walls=mask_walls)
        games.reset(games.age >= HORIZON)
        if on and name == "reward_unscaled":
            batch["rewards"] = batch["rewards"] * 10
        advantages, returns = advantages_and_returns(model, batch)
        sign = 1.0 if on and name == "policy_sign" else -1.0
        parts = [slice(0, None, 2), slice(1, None, 2)] if name == "accumulate" else [slice(None)]
        total = 0.0
        for part in parts:
            piece = {key: value[part] for key, value in batch.items()}
            loss, entropy, kl = a2c_loss(model, piece, advantages[part], returns[part], sign, mask_walls)
            (loss / len(parts)).backward()
            total = total + loss.detach() / len(parts)
        stats.update(reward=batch["rewards"].mean().item(), entropy=entropy, kl=kl)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (on and name == "no_zero_grad"):
            optimizer.zero_grad()
        if name == "average":
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters()):
                    kept.lerp_(new, 0.05)
        if name == "evaluate" and step % 20 == 19:
            scores.append(evaluate(model, seed=7))
        if recorder is not None:
            recorder.step(total)
        losses.append(total.item())
    recorder.close()
    return losses
