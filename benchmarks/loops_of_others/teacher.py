"""A 3-block decoder-only student (width 32) distilled from a wider teacher on a toy grammar, with AdamW and a cosine schedule."""
import copy
import functools
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import lab

STEPS = 240

PAD, BOS, ECHO = 0, 1, 2
TOPICS = 3                      # tokens 3..5 name the topic
FIRST_WORD, VOCAB = 6, 24       # words are tokens 6..23
LENGTH = 20
BATCH = 16
PEAK_RATE = 3e-3
WARM_UP = 20
TEMPERATURE = 2.0
SOFT_SHARE = 0.7


# ---------------------------------------------------------------- data

def draw_sequence(rng, followers):
    """BOS, a topic, then a walk in the topic's table; after ECHO comes the word before the last once more."""
    topic = rng.integers(TOPICS)
    tokens = [BOS, 3 + topic, rng.integers(FIRST_WORD, VOCAB)]
    for _ in range(rng.integers(LENGTH // 2, LENGTH)):
        if tokens[-1] == ECHO:
            tokens.append(tokens[-3])
        elif rng.random() < 0.12 and tokens[-2] >= FIRST_WORD:
            tokens.append(ECHO)
        else:
            choice = rng.choice(3, p=[0.7, 0.2, 0.1])
            tokens.append(followers[topic, tokens[-1], choice])
    tokens = tokens[:LENGTH + 1]
    return tokens + [PAD] * (LENGTH + 1 - len(tokens))


@functools.cache
def corpus():
    rng = np.random.default_rng(1234)
    followers = rng.integers(FIRST_WORD, VOCAB, size=(TOPICS, VOCAB, 3))
    rows = [draw_sequence(rng, followers) for _ in range(3000)]
    return torch.tensor(np.array(rows), dtype=torch.long)


def get_batch(seed, step, size=BATCH, held_out=False):
    rng = np.random.default_rng([seed, step, int(held_out)])
    low, high = (2800, 3000) if held_out else (0, 2800)
    rows = corpus()[torch.from_numpy(rng.integers(low, high, size=size))]
    return rows[:, :-1], rows[:, 1:]


# ---------------------------------------------------------------- model

class Block(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, dropout=dropout, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)
        self.residual = True

    def forward(self, x, mask):
        h = self.norm1(x)
        h, _ = self.attn(h, h, h, attn_mask=mask, need_weights=False)
        x = x + self.drop(h)
        h = self.drop(self.mlp(self.norm2(x)))
        return x + h if self.residual else h


class Decoder(nn.Module):
    def __init__(self, width, heads, depth, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB)
        nn.init.normal_(self.tokens.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.1)
        self.causal = True
        self.logit_scale = 1.0

    def forward(self, x):
        length = x.shape[1]
        mask = None
        if self.causal:
            mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        h = self.tokens(x) + self.positions(torch.arange(length))
        for block in self.blocks:
            h = block(h, mask)
        return self.head(self.norm(h)) * self.logit_scale


@functools.cache
def get_teacher():
    """A wider model, trained once with plain cross-entropy and kept in memory."""
    torch.manual_seed(99)
    teacher = Decoder(width=64, heads=4, depth=2, dropout=0.1)
    steps = 120
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    for step in range(steps):
        x, y = get_batch(555, step, size=16)
        loss = F.cross_entropy(teacher(x).flatten(0, 1), y.flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(teacher.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return teacher.eval().requires_grad_(False)


# ---------------------------------------------------------------- loss, rate

def distillation_loss(student_logits, teacher_logits, y, soft_share):
    keep = y != PAD
    s, t, y = student_logits[keep], teacher_logits[keep], y[keep]
    hard = F.cross_entropy(s, y)
    log_q = F.log_softmax(s / TEMPERATURE, dim=-1)
    p = F.softmax(t / TEMPERATURE, dim=-1)
    soft = F.kl_div(log_q, p, reduction="batchmean")
    return soft_share * TEMPERATURE ** 2 * soft + (1 - soft_share) * hard


def rate_factor(step):
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_student():
    student = Decoder(width=32, heads=4, depth=3)
    optimizer = torch.optim.AdamW(student.parameters(), lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    return student, optimizer


@torch.no_grad()
def evaluate(student):
    student.eval()
    x, y = get_batch(0, 0, size=32, held_out=True)
    loss = F.cross_entropy(student(x).flatten(0, 1), y.flatten(), ignore_index=PAD)
    student.train()
    return loss.item()


# ---------------------------------------------------------------- training

def change_model(name, student, step, at):
    """Faults in the student and its code that are switched on once."""
    if name == "no_causal_mask" and step == 0:
        student.causal = False
    if step != at:
        return
    if name == "block_frozen":
        student.blocks[1].requires_grad_(False)
    if name == "residual_dropped":
        student.blocks[2].residual = False
    if name == "temperature_twice":
        student.logit_scale = 1 / TEMPERATURE
    if name == "block_reinitialised":
        student.blocks[1].load_state_dict(Block(32, 4, 0.0).state_dict())


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    teacher = get_teacher().eval()
    torch.manual_seed(seed)
    student, optimizer = make_student()
    recorder = lab.record(student, optimizer, every=every, out=out)
    average = copy.deepcopy(student) if name == "ema_aside" else None
    losses = []
    for step in range(STEPS):
        on = step >= at
        if name == "resumed" and step == at:
            recorder.close()
            saved = copy.deepcopy((student.state_dict(), optimizer.state_dict()))
            student, optimizer = make_student()
            student.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(student, optimizer, every=every, out=out, first_step=step)
        change_model(name, student, step, at)

        rate = PEAK_RATE * rate_factor(step)
        if name == "rate_too_high" and on:
            rate = 10 * PEAK_RATE
        if name == "schedule_too_short" and on:
            rate = 0.0
        for group in optimizer.param_groups:
            group["lr"] = rate
            if name == "weight_decay_typo" and on:
                group["weight_decay"] = 5.0

        soft_share = SOFT_SHARE
        if name == "soft_share_ramp":
            soft_share = min(SOFT_SHARE, 0.3 + 0.4 * step / 60)
        if name == "teacher_in_train_mode" and on:
            teacher.train()
        micro_batches = 2 if name == "accumulation" else 1
        loss_sum = 0.0
        for micro in range(micro_batches):
            x, y = get_batch(seed, step * micro_batches + micro, BATCH // micro_batches)
            with torch.no_grad():
                teacher_logits = teacher(x)
            if name == "teacher_rows_mixed" and on:
                teacher_logits = teacher_logits.roll(1, dims=0)
            if name == "unsure_tokens_masked" and on:
                unsure = teacher_logits.softmax(-1).amax(-1) < 0.5
                teacher_logits[unsure] = -math.inf
            loss = distillation_loss(student(x), teacher_logits, y, soft_share) / micro_batches
            loss.backward()
            loss_sum += loss.detach()

        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        if not (name == "zero_grad_forgotten" and on):
            optimizer.zero_grad()
        if name == "weights_in_bfloat16" and on:
            with torch.no_grad():
                for p in student.parameters():
                    p.copy_(p.bfloat16())
        if average is not None:
            with torch.no_grad():
                for a, p in zip(average.parameters(), student.parameters()):
                    a.lerp_(p, 0.02)
        recorder.step(loss_sum)
        losses.append(float(loss_sum))
        if name == "evaluation" and step % 20 == 19:
            evaluate(student)
    recorder.close()
    teacher.eval()
    return losses


FAULTS = {
    "teacher_rows_mixed": dict(what="From a step on the teacher's logits are those of another row of the batch.",
                               kinds=["data"], part="all"),
    "teacher_in_train_mode": dict(what="From a step on the teacher is in train mode: its dropout makes the targets noisy.",
                                  kinds=["data"], part="all"),
    "rate_too_high": dict(what="From a step on the schedule is lost: the rate is ten times the peak.",
                          kinds=["rate", "instability"], part="all"),
    "schedule_too_short": dict(what="The schedule was made for fewer steps: from a step on the rate is zero.",
                               kinds=["rate", "frozen"], part="all"),
    "weight_decay_typo": dict(what="From a step on the weight decay is 5 in place of 0.05.",
                              kinds=["optimizer"], part="all"),
    "zero_grad_forgotten": dict(what="From a step on gradients are not zeroed and add up over all steps.",
                                kinds=["gradients"], part="all"),
    "block_frozen": dict(what="From a step on requires_grad is off for the middle block.",
                         kinds=["frozen", "dead"], part="block1"),
    "residual_dropped": dict(what="From a step on the last block's MLP has no residual connection.",
                             kinds=["activations"], part="block2"),
    "no_causal_mask": dict(what="The student has no causal mask, it sees the tokens that it should predict.",
                           kinds=["attention", "data"], part="all", at=0),
    "temperature_twice": dict(what="From a step on the model divides its logits by the temperature, as the loss does.",
                              kinds=["output_logits", "data"], part="head"),
    "block_reinitialised": dict(what="At a step the middle block gets fresh random weights.",
                                kinds=["weights"], part="block1", lasts=1),
    "unsure_tokens_masked": dict(what="From a step on all the teacher's logits are -inf where it is unsure: softmax is NaN.",
                                 kinds=["not_finite", "data"], part="all"),
    "weights_in_bfloat16": dict(what="From a step on weights are kept in bfloat16, small updates are rounded away.",
                                kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "evaluation": "Every 20 steps the student is evaluated on held-out rows, then set back to train mode.",
    "accumulation": "Each update takes the mean over two micro-batches of half the rows.",
    "resumed": "The run stops at a step and goes on from a checkpoint with all its state, with first_step.",
    "ema_aside": "A running mean of the weights is kept aside.",
    "soft_share_ramp": "The share of the soft targets in the loss rises from 0.3 to 0.7 over the first 60 steps.",
}
