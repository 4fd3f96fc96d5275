"""Behaviour cloning of a drawn two-joint arm with action chunks (ACT, L1 loss and CVAE latent), with AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
BATCH = 16
WIDTH = 32
HEADS = 4
CHUNK = 8
LATENT = 8
SIZE = 24
PATCH = 8
EPISODES = 48
LENGTH = 30
LR = 1e-3
LR_BACKBONE = 5e-4
WARMUP = 20
KL_WEIGHT = 0.1
CLIP = 10.0
RESUME_AT = 60

FAULTS = {
    "lr_too_high": {
        "what": "The run goes on with a learning rate of 0.05 instead of the schedule's.",
        "kinds": ["rate"], "part": "all"},
    "episodes_in_degrees": {
        "what": "For 12 steps the batches come from demonstrations whose actions were stored in degrees, not radians.",
        "kinds": ["data"], "part": "all", "lasts": 12},
    "actions_shuffled": {
        "what": "The loader shuffles the action chunks apart from the observations, so labels belong to other samples.",
        "kinds": ["data"], "part": "all"},
    "padding_counted": {
        "what": "The mask of padded actions is dropped, so the zeros after an episode's end count in the L1 loss.",
        "kinds": ["data"], "part": "all"},
    "sensor_nan": {
        "what": "A joint sensor's drop-outs were stored as NaN, and one sample of each batch holds such a reading.",
        "kinds": ["not_finite", "data"], "part": "all"},
    "eval_left_on": {
        "what": "After a validation the model is not put back into train mode, so dropout stays off.",
        "kinds": ["data"], "part": "all"},
    "backbone_detached": {
        "what": "The image features are detached before the encoder, so the patch embedding gets no gradient any more.",
        "kinds": ["dead", "frozen"], "part": "other"},
    "block_left_out": {
        "what": "The last decoder block is in none of the optimizer's parameter groups.",
        "kinds": ["frozen"], "part": "block3", "at": 0},
    "gradients_not_zeroed": {
        "what": "zero_grad is no longer called, so the gradients of all steps since then pile up.",
        "kinds": ["gradients"], "part": "all"},
    "decay_too_large": {
        "what": "AdamW's weight decay is 10 instead of 1e-4, so all weights shrink by up to a percent a step.",
        "kinds": ["optimizer", "weights"], "part": "all", "at": 0},
    "head_reset": {
        "what": "A checkpoint is loaded with strict=False and lacks the action head, which starts anew.",
        "kinds": ["weights"], "part": "head"},
    "pure_bf16": {
        "what": "The whole model, its weights too, is cast to bfloat16, so small updates are rounded away.",
        "kinds": ["precision"], "part": "all", "at": 0},
    "moments_lost": {
        "what": "The run goes on from a checkpoint without AdamW's state, so both moments start again at zero.",
        "kinds": ["optimizer"], "part": "all"},
}

HEALTHY = {
    "accumulation": "Each update sums the gradients of two half batches, each loss divided by two.",
    "evaluation": "Every 30 steps the loss on held-out episodes is measured in eval mode, then training goes on.",
    "resumed": "The run goes on from a checkpoint of step 60 with the model's and the optimizer's state.",
    "constant_rate": "After the warm-up the learning rate stays constant, as in the original ACT, instead of a cosine.",
    "weight_average": "An exponential moving average of the weights is kept aside for the roll-outs.",
}


# ---------------------------------------------------------------- demonstrations

def forward_kinematics(q):
    """Elbow and hand of an arm with two links of length 0.5, base at the origin; q is (..., 2)."""
    a, b = q[..., 0], q[..., 0] + q[..., 1]
    elbow = 0.5 * np.stack([np.cos(a), np.sin(a)], -1)
    hand = elbow + 0.5 * np.stack([np.cos(b), np.sin(b)], -1)
    return elbow, hand


def draw(q, target):
    """Images (n, 3, SIZE, SIZE) in 0..1: the arm, its hand and the target, as soft dots."""
    axis = np.linspace(-0.6, 1.1, SIZE)
    yy, xx = np.meshgrid(axis, axis, indexing="ij")

    def dot(p, width):
        return np.exp(-((xx - p[:, 0, None, None]) ** 2 + (yy - p[:, 1, None, None]) ** 2) / (2 * width ** 2))

    elbow, hand = forward_kinematics(q)
    arm = np.zeros((len(q), SIZE, SIZE))
    for t in np.linspace(0, 1, 5):
        arm = np.maximum(arm, dot(t * elbow, 0.06))
        arm = np.maximum(arm, dot(elbow + t * (hand - elbow), 0.06))
    return np.stack([arm, dot(hand, 0.08), dot(target, 0.08)], 1)


class Demonstrations:
    """Episodes of an expert that moves the arm to the target and then closes the gripper."""

    def __init__(self, seed, episodes=EPISODES):
        rng = np.random.default_rng(1000 + seed)
        goal = rng.uniform([0.2, 0.5], [1.4, 2.0], (episodes, 2))
        q = rng.uniform([0.2, 0.5], [1.4, 2.0], (episodes, 2))
        target = forward_kinematics(goal)[1]
        joints, actions, images = [], [], []
        gripper = np.zeros(episodes)
        for _ in range(LENGTH):
            state = np.concatenate([q, gripper[:, None]], 1)
            images.append(draw(q, target))
            joints.append(state)
            q = q + np.clip(0.25 * (goal - q), -0.12, 0.12)
            near = np.abs(goal - q).max(1) < 0.1
            gripper = gripper + 0.3 * (near - gripper)
            actions.append(np.concatenate([q, gripper[:, None]], 1))
        self.images = np.stack(images, 1).astype(np.float32)
        joints, actions = np.stack(joints, 1), np.stack(actions, 1)
        self.raw_actions = actions
        self.mean, self.std = actions.mean((0, 1)), actions.std((0, 1))
        self.joints = ((joints - self.mean) / self.std).astype(np.float32)

    def batch(self, rng, size, degrees=False):
        e = rng.integers(0, len(self.joints), size)
        t = rng.integers(0, LENGTH, size)
        actions = np.zeros((size, CHUNK, 3))
        pad = np.ones((size, CHUNK), dtype=bool)
        for i in range(size):
            n = min(CHUNK, LENGTH - t[i])
            actions[i, :n] = self.raw_actions[e[i], t[i]:t[i] + n]
            pad[i, :n] = False
        if degrees:
            actions[..., :2] = np.rad2deg(actions[..., :2])
        actions = (actions - self.mean) / self.std
        images = self.images[e, t] + 0.02 * rng.standard_normal((size, 3, SIZE, SIZE))
        return (torch.tensor(images, dtype=torch.float32), torch.tensor(self.joints[e, t]),
                torch.tensor(actions, dtype=torch.float32), torch.tensor(pad))


# ---------------------------------------------------------------- policy

class EncoderBlock(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class DecoderBlock(EncoderBlock):
    def __init__(self, width, heads, dropout):
        super().__init__(width, heads, dropout)
        self.norm_cross = nn.LayerNorm(width)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x, memory):
        h = self.norm1(x)
        x = x + self.drop(self.attn(h, h, h, need_weights=False)[0])
        x = x + self.drop(self.cross(self.norm_cross(x), memory, memory, need_weights=False)[0])
        return x + self.drop(self.mlp(self.norm2(x)))


class ACT(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS, layers=2, dropout=0.1):
        super().__init__()
        self.backbone = nn.Conv2d(3, width, PATCH, stride=PATCH)
        self.joint_in = nn.Linear(3, width)
        self.style = nn.Sequential(nn.Linear(3 + 3 * CHUNK, 2 * width), nn.GELU(), nn.Linear(2 * width, 2 * LATENT))
        self.latent_in = nn.Linear(LATENT, width)
        self.positions = nn.Parameter(0.02 * torch.randn(2 + (SIZE // PATCH) ** 2, width))
        self.encoder = nn.ModuleList([EncoderBlock(width, heads, dropout) for _ in range(layers)])
        self.memory_norm = nn.LayerNorm(width)
        self.queries = nn.Embedding(CHUNK, width)
        self.decoder = nn.ModuleList([DecoderBlock(width, heads, dropout) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)
        self.detach_backbone = False
        for name, p in self.named_parameters():
            if p.dim() > 1 and not name.startswith(("positions", "queries", "head")):
                nn.init.xavier_uniform_(p.view(p.shape[0], -1))
        nn.init.normal_(self.queries.weight, std=0.5)

    def forward(self, images, joints, actions, pad):
        known = actions.masked_fill(pad[..., None], 0.0).flatten(1)  # the latent never sees padded actions
        mu, logvar = self.style(torch.cat([joints, known], 1)).chunk(2, -1)
        logvar = logvar.clamp(-8, 4)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else torch.zeros_like(mu)
        features = self.backbone(images).flatten(2).transpose(1, 2)
        if self.detach_backbone:
            features = features.detach()
        x = torch.cat([self.latent_in(z)[:, None], self.joint_in(joints)[:, None], features], 1) + self.positions
        for block in self.encoder:
            x = block(x)
        memory = self.memory_norm(x)
        y = self.queries.weight.expand(len(images), -1, -1)
        for block in self.decoder:
            y = block(y, memory)
        return self.head(self.norm(y)), mu, logvar


def act_loss(model, batch, count_padding=False):
    images, joints, actions, pad = batch
    dtype = model.head.weight.dtype
    predicted, mu, logvar = model(images.to(dtype), joints.to(dtype), actions.to(dtype), pad)
    l1 = F.l1_loss(predicted.float(), actions, reduction="none")
    if count_padding:
        l1 = l1.mean()
    else:
        l1 = (l1 * ~pad[..., None]).sum() / (3 * (~pad).sum())
    mu, logvar = mu.float(), logvar.float()
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).sum(-1).mean()
    return l1 + KL_WEIGHT * kl


@torch.no_grad()
def evaluate(model, demos, seed):
    model.eval()
    rng = np.random.default_rng(seed)
    return sum(act_loss(model, demos.batch(rng, BATCH)).item() for _ in range(2)) / 2


# ---------------------------------------------------------------- training

def make_optimizer(model, name):
    decay = 10.0 if name == "decay_too_large" else 1e-4
    backbone = [p for n, p in model.named_parameters() if n.startswith("backbone")]
    others = [p for n, p in model.named_parameters() if not n.startswith("backbone")]
    if name == "block_left_out":
        others = [p for n, p in model.named_parameters() if not n.startswith(("backbone", "decoder.1"))]
    return torch.optim.AdamW([{"params": others, "lr": LR, "base": LR},
                              {"params": backbone, "lr": LR_BACKBONE, "base": LR_BACKBONE}],
                             betas=(0.9, 0.999), weight_decay=decay)


def rate_factor(step, name):
    if step < WARMUP:
        return (step + 1) / WARMUP
    if name == "constant_rate":
        return 1.0
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    lasts = FAULTS.get(name, {}).get("lasts", STEPS)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    demos = Demonstrations(seed)
    held_out = Demonstrations(seed + 500, episodes=8) if name in ("evaluation", "eval_left_on") else None
    model = ACT()
    if name == "pure_bf16":
        model.to(torch.bfloat16)
    optimizer = make_optimizer(model, name)
    average = copy.deepcopy(model) if name == "weight_average" else None
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out)
    losses = []
    model.train()
    for step in range(STEPS):
        fault = name if name in FAULTS and at <= step < at + lasts else None

        if name == "resumed" and step == RESUME_AT:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = ACT()
            model.load_state_dict(saved["model"])
            optimizer = make_optimizer(model, name)
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)
            model.train()
        if fault == "head_reset" and step == at:
            checkpoint = {k: v for k, v in model.state_dict().items() if not k.startswith("head")}
            model.head.reset_parameters()
            model.load_state_dict(checkpoint, strict=False)
        if fault == "moments_lost" and step == at:
            optimizer.state.clear()
        if fault == "eval_left_on" and step == at:
            evaluate(model, held_out, seed)
        if fault == "backbone_detached":
            model.detach_backbone = True

        for group in optimizer.param_groups:
            group["lr"] = group["base"] * rate_factor(step, name)
            if fault == "lr_too_high":
                group["lr"] = 0.05

        rng = np.random.default_rng([seed, step])
        images, joints, actions, pad = demos.batch(rng, BATCH, degrees=fault == "episodes_in_degrees")
        if fault == "actions_shuffled":
            order = torch.from_numpy(rng.permutation(BATCH))
            actions, pad = actions[order], pad[order]
        if fault == "sensor_nan":
            joints[rng.integers(BATCH), 1] = float("nan")

        parts = 2 if name == "accumulation" else 1
        total = 0.0
        for micro in zip(images.chunk(parts), joints.chunk(parts), actions.chunk(parts), pad.chunk(parts)):
            loss = act_loss(model, micro, count_padding=fault == "padding_counted") / parts
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if fault != "gradients_not_zeroed":
            optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for kept, p in zip(average.parameters(), model.parameters()):
                    kept.lerp_(p, 0.01)
        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)
        if name == "evaluation" and (step + 1) % 30 == 0:
            evaluate(model, held_out, seed)
            model.train()
    recorder.close()
    return losses
