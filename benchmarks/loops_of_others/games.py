"""PPO with a value head: a small Transformer learns to gather food and shun a trap on a board, with Adam."""

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F

import lab

STEPS = 240
SIZE = 5  # the board has SIZE x SIZE cells
GAMES = 48
LENGTH = 3  # moves of each game in a rollout
PASSES = 3  # updates from one rollout
WIDTH, HEADS, BLOCKS = 32, 4, 3
RATE, WARM_UP = 3e-3, 10
LIMIT = 16  # moves after which a game is over
DISCOUNT, LAMBDA = 0.9, 0.9
CLIP, ENTROPY, VALUE = 0.2, 0.03, 0.5
MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])

FAULTS = {
    "rate_too_high": dict(
        what="From a step on the learning rate is 20 times what it was (a new config with a zero less).",
        kinds=["rate", "instability"], part="all"),
    "reward_negated": dict(
        what="From a step on a wrapper of the game gives the reward as a cost: its sign is wrong.",
        kinds=["reward"], part="all"),
    "returns_transposed": dict(
        what="From a step on advantages and returns are flattened game by game, the observations and actions "
             "move by move, so that they no longer belong together.",
        kinds=["data", "policy"], part="all"),
    "stale_actor": dict(
        what="From a step on the games are played by a copy of the model that gets no new weights.",
        kinds=["policy"], part="all"),
    "entropy_bonus_huge": dict(
        what="From a step on the bonus for entropy weighs 1 in place of 0.03.",
        kinds=["policy", "data"], part="all"),
    "no_zero_grad": dict(
        what="From a step on gradients are not zeroed: each update adds to all those before.",
        kinds=["gradients"], part="all"),
    "block_put_back": dict(
        what="At one step a half-read checkpoint puts the last block back to its initial weights.",
        kinds=["weights"], part="block2", lasts=1),
    "block_left_out": dict(
        what="The weights of the second block were never given to the optimizer.",
        kinds=["frozen"], part="block1", at=0),
    "causal_mask": dict(
        what="From a step on blocks attend with the causal mask of a language model: the player's token, which is "
             "the first, sees no other piece.",
        kinds=["attention"], part="all"),
    "head_starts_large": dict(
        what="The policy's head starts with weights of a deviation of 1 in place of 0.01: logits are large at once.",
        kinds=["output_logits", "weights"], part="head", at=0),
    "infinite_mask": dict(
        what="From a step on illegal moves are masked by -inf in the loss; the entropy has 0 * inf and is NaN.",
        kinds=["not_finite"], part="all"),
    "decay_in_gradient": dict(
        what="From a step on Adam has the weight_decay of 0.01 of a recipe for AdamW, which it adds to gradients.",
        kinds=["optimizer"], part="all"),
    "moments_in_half": dict(
        what="From a step on Adam's moments are kept in float16 to save memory: small squares underflow to zero.",
        kinds=["precision", "optimizer"], part="all"),
}

HEALTHY = {
    "decay_to_zero": "The rate falls linearly to zero at the end.",
    "entropy_annealed": "The bonus for entropy falls linearly to zero.",
    "more_games": "From a step on half as many games again are played at once.",
    "resumed": "At a step the run is stopped and resumed from a checkpoint with all its state.",
    "accumulated": "Gradients of two halves of each batch are added up before the update.",
}


class Board:
    """Many games at once. Pieces are the player, the food and a trap; each is a row and a column."""

    def __init__(self, games: int, generator: torch.Generator):
        self.generator = generator
        self.pieces, self.age = self.deal(games), torch.arange(games) % LIMIT

    def deal(self, games: int) -> torch.Tensor:
        cells = torch.rand(games, SIZE * SIZE, generator=self.generator).argsort(1)[:, :3]
        return torch.stack([cells // SIZE, cells % SIZE], dim=2)

    def add(self, games: int) -> None:
        self.pieces = torch.cat([self.pieces, self.deal(games)])
        self.age = torch.cat([self.age, torch.arange(games) % LIMIT])

    def distance(self) -> torch.Tensor:
        return (self.pieces[:, 0] - self.pieces[:, 1]).abs().sum(1)

    def move(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reward and whether the game has ended; ended games start anew."""
        before = self.distance()
        self.pieces = self.pieces.clone()
        self.pieces[:, 0] = (self.pieces[:, 0] + MOVES[action]).clamp(0, SIZE - 1)
        eaten = self.distance() == 0
        trapped = (self.pieces[:, :1] == self.pieces[:, 2:]).all(2).any(1)
        reward = 0.2 * (before - self.distance()).float() + eaten.float() - trapped.float() - 0.05
        self.age = self.age + 1
        done = eaten | trapped | (self.age >= LIMIT)
        self.pieces = torch.where(done[:, None, None], self.deal(len(done)), self.pieces)
        self.age[done] = 0
        return reward, done


def legal(pieces: torch.Tensor) -> torch.Tensor:
    target = pieces[:, :1] + MOVES
    return ((target >= 0) & (target < SIZE)).all(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.causal = False

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        logits = q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)
        if self.causal:
            logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        return self.out((logits.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Player(nn.Module):
    """A token for each piece; the player's own token gives the logits of the moves and the value."""

    def __init__(self):
        super().__init__()
        self.kind, self.row, self.column = (nn.Embedding(n, WIDTH) for n in (3, 2 * SIZE, 2 * SIZE))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.policy, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)
        nn.init.normal_(self.policy.weight, std=0.01)

    def forward(self, pieces: torch.Tensor, mask: float = -1e9) -> tuple[torch.Tensor, torch.Tensor]:
        seen = pieces.clone()
        seen[:, 1:] += SIZE - pieces[:, :1]  # the other pieces as seen from the player
        x = self.kind.weight + self.row(seen[..., 0]) + self.column(seen[..., 1])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x[:, 0])
        logits = self.policy(x).masked_fill(~legal(pieces), mask)
        return logits.log_softmax(1), self.value(x).squeeze(1)


@torch.no_grad()
def play(actor: nn.Module, board: Board, sign: float) -> dict[str, torch.Tensor]:
    """A rollout of all games, with advantages (GAE) and returns; all of the shape moves x games."""
    rows = []
    for _ in range(LENGTH):
        pieces = board.pieces
        logp, value = actor(pieces)
        noise = torch.rand(logp.shape, generator=board.generator).clamp(1e-9).log().neg().log()
        action = (logp - noise).argmax(1)
        reward, done = board.move(action)
        old = logp.gather(1, action[:, None]).squeeze(1)
        rows.append(dict(pieces=pieces, action=action, old=old, value=value, reward=sign * reward, done=done))
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    following, total, advantages = actor(board.pieces)[1], 0.0, []
    for t in reversed(range(LENGTH)):
        goes_on = 1.0 - batch["done"][t].float()
        delta = batch["reward"][t] + DISCOUNT * goes_on * following - batch["value"][t]
        total = delta + DISCOUNT * LAMBDA * goes_on * total
        advantages.insert(0, total)
        following = batch["value"][t]
    batch["advantage"] = torch.stack(advantages)
    batch["returns"] = batch["advantage"] + batch["value"]
    return batch


def flatten(batch: dict[str, torch.Tensor], transposed: bool) -> dict[str, torch.Tensor]:
    flat = {key: x.flatten(0, 1) for key, x in batch.items()}
    if transposed:
        for key in ("advantage", "returns"):
            flat[key] = batch[key].T.flatten()
    flat["advantage"] = (flat["advantage"] - flat["advantage"].mean()) / (flat["advantage"].std() + 1e-8)
    return flat


def ppo_loss(model: nn.Module, batch: dict, bonus: float, mask: float) -> tuple[torch.Tensor, dict]:
    logp, value = model(batch["pieces"], mask)
    new = logp.gather(1, batch["action"][:, None]).squeeze(1)
    ratio = (new - batch["old"]).exp()
    gain = torch.min(ratio * batch["advantage"], ratio.clamp(1 - CLIP, 1 + CLIP) * batch["advantage"]).mean()
    value_loss = F.mse_loss(value, batch["returns"])
    entropy = -(logp.exp() * logp).sum(1).mean()
    log = dict(kl=(ratio - 1 - (new - batch["old"])).mean().item(), entropy=entropy.item(),
               clip_ratio=((ratio - 1).abs() > CLIP).float().mean().item(), value_loss=value_loss.item())
    return -gain + VALUE * value_loss - bonus * entropy, log


def rate_at(step: int, name: str) -> float:
    rate = RATE * min(1.0, (step + 1) / WARM_UP)
    if name == "decay_to_zero":
        rate *= 1 - step / STEPS
    return rate


def build(name: str) -> tuple[Player, torch.optim.Optimizer]:
    model = Player()
    weights = list(model.parameters())
    if name == "head_starts_large":
        with torch.no_grad():
            model.policy.weight.mul_(100)
    if name == "block_left_out":
        left_out = set(model.blocks[1].parameters())
        weights = [w for w in weights if w not in left_out]
    return model, torch.optim.Adam(weights, lr=RATE, eps=1e-5, fused=True)


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.manual_seed(seed)
    model, optimizer = build(name)
    board = Board(GAMES, torch.Generator().manual_seed(seed + 1))
    initial, actor = copy.deepcopy(model), model
    log: dict[str, float] = {}
    names = ("reward", "kl", "clip_ratio", "entropy", "value_loss")
    extra = {key: (lambda key=key: log[key]) for key in names}
    recorder = lab.record(model, optimizer, every=every, out=out, extra=extra)
    losses = []
    for step in range(STEPS):
        now = step >= at
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model, optimizer = build(name)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            actor = model
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=at, extra=extra)
        if name == "more_games" and step == at:
            board.add(GAMES // 2)
        if name == "stale_actor" and step == at:
            actor = Player()
            actor.load_state_dict(model.state_dict())
        if name == "causal_mask" and step == at:
            for block in model.blocks:
                block.causal = True
        if name == "block_put_back" and step == at:
            model.blocks[2].load_state_dict(initial.blocks[2].state_dict())
        if step % PASSES == 0:
            rollout = play(actor, board, sign=-1.0 if name == "reward_negated" and now else 1.0)
            log["reward"] = rollout["reward"].mean().item()

        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, name)
            if name == "rate_too_high" and now:
                group["lr"] *= 20
            if name == "decay_in_gradient" and now:
                group["weight_decay"] = 0.01
        bonus = ENTROPY
        if name == "entropy_annealed":
            bonus *= 1 - step / STEPS
        if name == "entropy_bonus_huge" and now:
            bonus = 1.0
        mask = -math.inf if name == "infinite_mask" and now else -1e9

        batch = flatten(rollout, transposed=name == "returns_transposed" and now)
        parts = [batch]
        if name == "accumulated":
            parts = [{key: x[half::2] for key, x in batch.items()} for half in range(2)]
        total = 0.0
        for part in parts:
            loss, measured = ppo_loss(model, part, bonus, mask)
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
        log.update(measured)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not (name == "no_zero_grad" and now):
            model.zero_grad()
        if name == "moments_in_half" and now:
            for state in optimizer.state.values():
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key].copy_(state[key].half())
        recorder.step(total)
        losses.append(total)
    recorder.close()
    return losses
