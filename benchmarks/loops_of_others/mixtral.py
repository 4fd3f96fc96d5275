"""A small Mixtral (4 experts, balance loss) on text of a toy grammar, with Muon for matrices and AdamW otherwise."""
import copy
import math
import random

import torch
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import lab

torch.set_num_threads(1)

STEPS = 240
ROWS, LENGTH = 10, 32
WARM_UP = 20
MUON_RATE, ADAM_RATE = 0.01, 1e-2
BALANCE = 0.02

FAULTS = {
    "labels_shifted_twice": dict(
        what="The loader hands over labels that are shifted already, and the model shifts them once more.",
        kinds=["data"], part="all"),
    "garbage_shard": dict(
        what="For 15 steps the batches come from a broken shard: tokens drawn at random.",
        kinds=["data"], part="all", lasts=15),
    "rate_for_32_devices": dict(
        what="After a resume both rates are multiplied by 32 devices (linear scaling), though the batch is no larger.",
        kinds=["rate", "instability"], part="all"),
    "decay_too_big": dict(
        what="Muon's weight decay becomes 10 where 0.1 was meant.",
        kinds=["optimizer", "weights"], part="all"),
    "block_not_loaded": dict(
        what="The keys of block1 do not match when a checkpoint is loaded: the block has fresh weights again.",
        kinds=["weights"], part="block1"),
    "not_zeroed": dict(
        what="zero_grad is lost when the loop is edited: gradients add up from step to step.",
        kinds=["gradients"], part="all"),
    "no_residual": dict(
        what="A rewrite of block2 forgets the residual: the block hands on only what it adds.",
        kinds=["activations"], part="block2"),
    "mask_lost": dict(
        what="Attention is no longer causal: each token sees the one that it shall foretell.",
        kinds=["attention", "data"], part="all"),
    "logits_scaled": dict(
        what="A multiplier of 4 on the logits comes in behind the head.",
        kinds=["output_logits"], part="head"),
    "balance_sign": dict(
        what="The balance loss is subtracted, without its coefficient of 0.02: routers collapse on two experts.",
        kinds=["router", "data"], part="all"),
    "experts_forgotten": dict(
        what="Muon takes matrices and AdamW vectors: the experts, stacked in three dimensions, are in no optimizer.",
        kinds=["frozen", "optimizer"], part="all", at=0),
    "empty_labels": dict(
        what="All labels of one row are masked: its mean over none is 0/0, and all weights are NaN after that update.",
        kinds=["not_finite", "data"], part="all"),
    "bf16_weights": dict(
        what="Weights are kept in bfloat16 without an fp32 copy: small updates are rounded away.",
        kinds=["precision"], part="all"),
}

HEALTHY = {
    "accumulation": "From the step on each update takes the gradients of two half batches.",
    "evaluation": "Every 25 steps the loss on held-out rows is measured in eval mode.",
    "decay_to_zero": "The rate is held after its warm-up, and falls on a line to zero over the last 100 steps.",
    "resumed": "At the step the run is saved and resumed with the state of the model, optimizers and loader.",
    "batch_ramp": "The batch grows from 6 rows by 8 to 10.",
}


# ---- text

def grammar() -> torch.Tensor:
    """A long text of a toy language of 64 words: verbs come last, chosen by the speaker and first noun."""
    rng = random.Random(1234)
    stop, comma, the, a, many, and_ = range(6)
    noun, nouns, verb, verbs, adjective, name = 6, 16, 26, 36, 46, 54
    does = [rng.sample(range(10), 10) for _ in range(2)]
    likes = rng.sample(range(10), 10)
    text = []

    def phrase(which: int, plural: bool) -> None:
        text.append(rng.choice([the, many] if plural else [the, a]))
        if rng.random() < 0.3:
            text.append(adjective + which % 8)
        text.append((nouns if plural else noun) + which)

    while len(text) < 60_000:
        who, which, plural = rng.randrange(10), rng.randrange(10), rng.random() < 0.4
        text.extend([name + who, comma])
        phrase(which, plural)
        phrase(likes[who], rng.random() < 0.4)
        text.append((verbs if plural else verb) + does[who % 2][which])
        if rng.random() < 0.5:
            text.extend([and_, name + (who + 1) % 10])
        text.append(stop)
    return torch.tensor(text)


TEXT = grammar()
HELD_OUT = TEXT[-16 * LENGTH:].view(16, LENGTH)


def draw(loader: torch.Generator, rows: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - 17 * LENGTH, (rows, 1), generator=loader)
    return TEXT[starts + torch.arange(LENGTH)]


# ---- model and optimizers

class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is made orthogonal by Newton-Schulz; tensors of three dimensions are stacks of matrices."""

    def __init__(self, weights, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(weights, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @staticmethod
    def orthogonal(m: torch.Tensor) -> torch.Tensor:
        tall = m.shape[-2] > m.shape[-1]
        x = m.mT if tall else m
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            square = x @ x.mT
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x.mT if tall else x

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, same in by_shape.items():
                directions = []
                for p in same:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    directions.append(p.grad.lerp(momentum, group["momentum"]))
                scale = group["lr"] * max(1, shape[-2] / shape[-1]) ** 0.5
                for p, update in zip(same, self.orthogonal(torch.stack(directions))):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def build(name: str, seed: int):
    torch.manual_seed(seed)
    model = MixtralForCausalLM(MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, initializer_range=0.05,
        output_router_logits=True, router_aux_loss_coef=BALANCE, tie_word_embeddings=False, use_cache=False,
        pad_token_id=None, bos_token_id=None, eos_token_id=None, attn_implementation="sdpa"))
    matrices, rest = [], []
    for key, p in model.named_parameters():
        outside = "embed" in key or "lm_head" in key or "gate.weight" in key
        if name == "experts_forgotten" and p.ndim == 3:
            continue
        (rest if outside or p.ndim < 2 else matrices).append(p)
    muon = Muon(matrices, lr=MUON_RATE)
    adamw = torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    return model, muon, adamw


def schedule(name: str, step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    if name == "decay_to_zero":
        return min(1.0, (STEPS - step) / 100)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


# ---- the loop

def plant(name: str, model: nn.Module, muon: Muon) -> None:
    """Changes that are made once."""
    layers = model.model.layers
    if name == "decay_too_big":
        muon.param_groups[0]["weight_decay"] = 10.0
    if name == "block_not_loaded":
        fresh = build("plain", 999)[0]
        layers[1].load_state_dict(fresh.model.layers[1].state_dict())
    if name == "no_residual":
        layers[2].register_forward_hook(lambda module, inputs, hidden: hidden - inputs[0])
    if name == "mask_lost":
        for layer in layers:
            layer.self_attn.is_causal = False
    if name == "logits_scaled":
        model.lm_head.register_forward_hook(lambda module, inputs, logits: 4.0 * logits)
    if name == "balance_sign":
        model.router_aux_loss_coef = -1.0


def batch(name: str, loader: torch.Generator, step: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = ROWS
    if name == "batch_ramp":
        rows = 6 if step < at // 2 else 8 if step < at else ROWS
    tokens = draw(loader, rows)
    if name == "garbage_shard" and at <= step < at + 15:
        tokens = torch.randint(64, tokens.shape, generator=torch.Generator().manual_seed(step))
    labels = tokens.clone()
    if name == "labels_shifted_twice" and step >= at:
        labels = torch.cat([tokens[:, 1:], torch.full((rows, 1), -100)], dim=1)
    if name == "empty_labels" and step == at:
        labels[0] = -100
    return tokens, labels


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over rows of each row's mean over its labels, and the balance loss."""
    output = model(input_ids=tokens)
    targets, known = labels[:, 1:].clamp(min=0), (labels[:, 1:] != -100).float()
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), targets, reduction="none")
    rows = (each * known).sum(1) / known.sum(1)
    return rows.mean() + model.router_aux_loss_coef * output.aux_loss


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    model.eval()
    loss = loss_of(model, HELD_OUT, HELD_OUT).item()
    model.train()
    return loss


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    model, muon, adamw = build(name, seed)
    model.train()
    loader = torch.Generator().manual_seed(seed + 1)
    recorder = lab.record(model, [muon, adamw], every=every, out=out)
    losses = []
    for step in range(STEPS):
        if step == at:
            plant(name, model, muon)
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy([part.state_dict() for part in (model, muon, adamw)])
            model, muon, adamw = build(name, seed + 100)
            model.train()
            for part, state in zip((model, muon, adamw), saved):
                part.load_state_dict(state)
            recorder = lab.record(model, [muon, adamw], every=every, out=out, first_step=step)
        factor = schedule(name, step)
        if name == "rate_for_32_devices" and step >= at:
            factor *= 32
        muon.param_groups[0]["lr"] = MUON_RATE * factor
        adamw.param_groups[0]["lr"] = ADAM_RATE * factor

        tokens, labels = batch(name, loader, step, at)
        pieces = 2 if name == "accumulation" and step >= at else 1
        loss = 0.0
        for some, targets in zip(tokens.chunk(pieces), labels.chunk(pieces)):
            piece = loss_of(model, some, targets) / pieces
            piece.backward()
            loss = loss + piece.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adamw.step()
        if not (name == "not_zeroed" and step >= at):
            model.zero_grad()
        if name == "bf16_weights" and step >= at:
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.bfloat16())
        recorder.step(loss)
        losses.append(loss.item())
        if name == "evaluation" and step % 25 == 24:
            evaluate(model)
    recorder.close()
    return losses
