"""Self-distillation of drawn pictures (two views, EMA teacher, centring) with a small vision transformer and AdamW."""

import copy
import math

import lab
import torch
import torch.nn as nn
import torch.nn.functional as F

STEPS = 240
WIDTH, HEADS, DEPTH = 32, 2, 3
DRAWN, SIDE, PATCH = 20, 16, 4
PROTOTYPES, BOTTLENECK = 64, 32
BATCH = 20
RATE, WARM_UP, DECAY, CLIP = 2e-3, 20, 0.05, 1.0
STUDENT_TEMPERATURE, TEACHER_TEMPERATURE = 0.1, 0.05
EMA, CENTRE_EMA = 0.985, 0.9


def draw(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Coloured shapes on a dim background: pictures (count, 3, 20, 20) in 0..1 and the shape of each."""
    g = torch.Generator().manual_seed(seed)
    shape = torch.randint(0, 6, (count,), generator=g)
    centre = 10 + torch.randint(-2, 3, (count, 2), generator=g)
    size = 4 + 3 * torch.rand(count, 1, 1, generator=g)
    axis = torch.arange(DRAWN).float()
    y = (axis[None, :, None] - centre[:, 0, None, None]).expand(count, DRAWN, DRAWN)
    x = (axis[None, None, :] - centre[:, 1, None, None]).expand(count, DRAWN, DRAWN)
    radius = (x**2 + y**2).sqrt()
    box = torch.maximum(x.abs(), y.abs())
    forms = torch.stack([
        radius < size,                                             # disc
        box < size * 0.85,                                         # square
        (radius < size) & (radius > size - 2.5),                   # ring
        (torch.minimum(x.abs(), y.abs()) < 1.5) & (box < size),    # cross
        (box < size) & (y.remainder(4) < 2),                       # stripes
        (y < size * 0.8) & (y > -size) & (x.abs() * 2 < y + size),  # triangle
    ])
    inside = forms[shape, torch.arange(count)].float()[:, None]
    colour = 0.35 + 0.65 * torch.rand(count, 3, 1, 1, generator=g)
    ground = 0.3 * torch.rand(count, 3, 1, 1, generator=g)
    return inside * colour + (1 - inside) * ground, shape


def augment(pictures: torch.Tensor, g: torch.Generator) -> torch.Tensor:
    """Random crop, flip, colour jitter and noise."""
    count = len(pictures)
    top = torch.randint(0, DRAWN - SIDE + 1, (count, 1), generator=g) + torch.arange(SIDE)
    left = torch.randint(0, DRAWN - SIDE + 1, (count, 1), generator=g) + torch.arange(SIDE)
    row = torch.arange(count)[:, None, None]
    cut = pictures.permute(0, 2, 3, 1)[row, top[:, :, None], left[:, None, :]].permute(0, 3, 1, 2)
    flip = torch.rand(count, 1, 1, 1, generator=g) < 0.5
    cut = torch.where(flip, cut.flip(-1), cut)
    cut = cut * (0.7 + 0.6 * torch.rand(count, 3, 1, 1, generator=g))
    return cut + 0.05 * torch.randn(cut.shape, generator=g)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        nn.init.normal_(self.qkv.weight, std=WIDTH**-0.5)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** -0.5

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Block(nn.Module):
    def __init__(self, drop_path: float):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
        self.drop_path = drop_path
        self.no_residual = False

    def drop(self, branch):
        if not self.training or self.drop_path == 0:
            return branch
        keep = torch.rand(len(branch), 1, 1) >= self.drop_path
        return branch * keep / (1 - self.drop_path)

    def forward(self, x):
        x = x + self.drop(self.attn(self.norm1(x)))
        if self.no_residual:
            return self.drop(self.mlp(self.norm2(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, BOTTLENECK))
        self.last = nn.Linear(BOTTLENECK, PROTOTYPES, bias=False)
        self.normalise = True

    def forward(self, x):
        x = self.mlp(x)
        if self.normalise:
            x = F.normalize(x, dim=-1)
        return F.linear(x, F.normalize(self.last.weight, dim=-1))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIDE // PATCH) ** 2, WIDTH))
        self.blocks = nn.ModuleList([Block(0.05 * i / (DEPTH - 1)) for i in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = Head()

    def features(self, pictures):
        x = self.patch((pictures - 0.35) / 0.3).flatten(2).transpose(1, 2)
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x).mean(1)

    def forward(self, pictures):
        return self.head(self.features(pictures))


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim == 2 or p.ndim == 4]
    others = [p for p in model.parameters() if p.ndim not in (2, 4)]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": DECAY},
                              {"params": others, "weight_decay": 0.0}], lr=RATE, betas=(0.9, 0.99))


def rate_at(step: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def distil_loss(student_logits, teacher_logits, centre):
    """Cross-entropy of each view's student with the teacher of the other view; both hold view 1, then view 2."""
    target = ((teacher_logits - centre) / TEACHER_TEMPERATURE).softmax(-1)
    target = torch.cat(target.chunk(2)[::-1])
    return -(target * (student_logits / STUDENT_TEMPERATURE).log_softmax(-1)).sum(-1).mean()


@torch.no_grad()
def update_teacher(teacher, student, momentum):
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - momentum)


@torch.no_grad()
def nearest_neighbour(model, pictures, shape) -> float:
    """How often the nearest picture in feature space has the same shape."""
    model.eval()
    f = F.normalize(model.features(pictures[:, :, 2:18, 2:18]), dim=-1)
    model.train()
    half = len(f) // 2
    return (shape[:half][(f[half:] @ f[:half].T).argmax(1)] == shape[half:]).float().mean().item()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    pictures, shape = draw(1024, seed)
    test_pictures, test_shape = draw(256, seed + 10_000)
    g = torch.Generator().manual_seed(seed + 1)
    student = ViT()
    teacher = copy.deepcopy(student).eval().requires_grad_(False)
    with torch.no_grad():
        centre = teacher(pictures[:64, :, 2:18, 2:18]).mean(0)
    optimizer = make_optimizer(student)
    recorder = None if name == "resumed" else lab.record(student, optimizer, every=every, out=out)
    losses = []

    for step in range(STEPS):
        faulty = step >= at
        if name == "resumed" and step == at:  # a new process reads the checkpoint and is recorded from here
            saved = copy.deepcopy((student.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
            student = ViT()
            student.load_state_dict(saved[0])
            optimizer = make_optimizer(student)
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            recorder = lab.record(student, optimizer, every=every, out=out, first_step=at)
        if name == "block_not_loaded" and step == at:
            student.blocks[0].load_state_dict(Block(0.0).state_dict())
        if name == "residual_lost" and step == at:
            for model in (student, teacher):
                model.blocks[1].no_residual = True
        if name == "attention_unscaled" and step == at:
            for model in (student, teacher):
                model.blocks[2].attn.scale = 1.0
        if name == "head_not_normalised" and step == at:
            student.head.normalise = teacher.head.normalise = False

        rate = rate_at(step)
        if name == "schedule_restarted" and faulty:
            rate = rate_at(step - at)
        if name == "rate_too_high":
            rate = 30 * rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        if name == "decay_ramp":
            optimizer.param_groups[0]["weight_decay"] = DECAY * (1 + 4 * (1 - math.cos(math.pi * step / STEPS)) / 2)
        if name == "decay_too_strong" and faulty:
            optimizer.param_groups[0]["weight_decay"] = 500 * DECAY

        batch = pictures[torch.randint(0, len(pictures), (BATCH,), generator=g)]
        view1, view2 = augment(batch, g), augment(batch, g)
        if name == "views_same" and faulty:
            view2 = view1
        if name == "blank_picture" and step == at:  # scaled by its own deviation: 0 / 0
            blank = torch.zeros_like(view1[0])
            view1[0] = blank / blank.std()

        parts = 2 if name == "accumulates" else 1
        loss, teacher_logits = 0.0, []
        for v1, v2 in zip(view1.chunk(parts), view2.chunk(parts)):
            both = torch.cat([v1, v2])
            with torch.no_grad():
                teacher_logits.append(teacher(both))
            used = centre
            if name == "not_centred" and faulty:
                used = torch.zeros_like(centre)
            part_loss = distil_loss(student(both), teacher_logits[-1], used) / parts
            part_loss.backward()
            loss = loss + part_loss.detach()
        if name == "head_frozen" and faulty:
            for p in student.head.parameters():
                p.grad = None
        torch.nn.utils.clip_grad_norm_(student.parameters(), CLIP)
        optimizer.step()
        if not (name == "not_zeroed" and faulty):
            optimizer.zero_grad()
        if name == "weights_in_bfloat16" and faulty:
            with torch.no_grad():
                for p in student.parameters():
                    p.copy_(p.bfloat16().float())

        momentum = EMA
        if name == "momentum_ramp":
            momentum = 1 - (1 - EMA) * 0.5 * (1 + math.cos(math.pi * step / STEPS))
        update_teacher(teacher, student, momentum)
        centre = CENTRE_EMA * centre + (1 - CENTRE_EMA) * torch.cat(teacher_logits).mean(0)

        losses.append(loss.item())
        if recorder is not None:
            recorder.step(loss)
        if name == "evaluates" and step % 20 == 19:
            nearest_neighbour(student, test_pictures, test_shape)

    recorder.close()
    train.last = dict(student=student, teacher=teacher, where=recorder.parts.where, blocks=recorder.parts.blocks,
                      accuracy=nearest_neighbour(student, test_pictures, test_shape))
    return losses


FAULTS = {
    "views_same": dict(what="From a step on both views are one and the same augmented picture.",
                       kinds=["data"], part="all"),
    "not_centred": dict(what="From a step on the centre is not subtracted from the teacher's logits: collapse.",
                        kinds=["data", "output_logits"], part="all"),
    "blank_picture": dict(what="A blank picture is divided by its own deviation, 0: NaN in the batch and then everywhere.",
                          kinds=["not_finite", "data"], part="all"),
    "schedule_restarted": dict(what="The schedule begins again at its first step, with its warm-up and its peak.",
                               kinds=["rate"], part="all"),
    "rate_too_high": dict(what="The rate is 30 times too high from the first step on.",
                          kinds=["rate", "instability"], part="all", at=0),
    "decay_too_strong": dict(what="From a step on weight decay is 500 times as strong as meant: weights shrink.",
                             kinds=["optimizer"], part="all"),
    "block_not_loaded": dict(what="A block is not found in the checkpoint (strict=False) and has fresh weights.",
                             kinds=["weights"], part="block0"),
    "not_zeroed": dict(what="From a step on zero_grad is not called: gradients add up over steps.",
                       kinds=["gradients"], part="all"),
    "head_frozen": dict(what="From a step on gradients of the head are cancelled (as by freeze_last_layer): no training.",
                        kinds=["frozen", "dead"], part="other"),
    "residual_lost": dict(what="From a step on the MLP of block1 has no residual connection.",
                          kinds=["activations"], part="block1"),
    "attention_unscaled": dict(what="From a step on logits of attention of a block are not divided by sqrt(d).",
                               kinds=["attention"], part="block2"),
    "head_not_normalised": dict(what="From a step on the head's features are not L2-normalised before the prototypes.",
                                kinds=["output_logits", "activations"], part="other"),
    "weights_in_bfloat16": dict(what="From a step on weights are kept in bfloat16: small updates are rounded away.",
                                kinds=["precision", "weights"], part="all"),
}

HEALTHY = {
    "evaluates": "Every 20 steps features are evaluated by nearest neighbours in eval mode, then train mode again.",
    "momentum_ramp": "The teacher's momentum rises to 1 along a cosine.",
    "decay_ramp": "Weight decay rises fivefold along a cosine.",
    "accumulates": "Two micro-batches of half the pictures make an update.",
    "resumed": "The recorded run starts at a checkpoint with all its state (first_step).",
}
