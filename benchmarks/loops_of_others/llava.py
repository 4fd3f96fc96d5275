"""A small LLaVA (ViT, MLP projector, Llama-like decoder) tuned on questions about drawn pictures with AdamW."""
import copy
import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import lab

STEPS = 240
BATCH = 8
WIDTH = 32
SIZE, PATCH = 16, 4
WARMUP = 12
IGNORE = -100

FAULTS = {
    "lr_too_high": {
        "what": "The second part of the run gets the learning rate of the projector's pretraining, 30 times too high.",
        "kinds": ["rate"], "part": "all"},
    "pictures_mixed": {
        "what": "A new data shard pairs every question with the picture of another sample of the batch.",
        "kinds": ["data"], "part": "all"},
    "prompt_not_masked": {
        "what": "The labels are a copy of the input tokens: the prompt is no longer masked and counts in the loss.",
        "kinds": ["data"], "part": "all"},
    "pixels_255": {
        "what": "The image processor is skipped: pictures come as raw pixels from 0 to 255, not normalised.",
        "kinds": ["data"], "part": "all"},
    "no_zero_grad": {
        "what": "The gradients are no longer zeroed after an update, so that they add up over the steps.",
        "kinds": ["gradients"], "part": "all"},
    "projector_frozen": {
        "what": "The projector's parameters are set to requires_grad=False (the flag that tunes the adapter is lost).",
        "kinds": ["frozen"], "part": "other"},
    "block_reset": {
        "what": "The second block of the language model is freshly initialised: its keys were missing in a checkpoint.",
        "kinds": ["weights"], "part": "block3"},
    "embedding_remade": {
        "what": "Adding tokens replaced the trained token embedding by a new nn.Embedding with values of deviation 1.",
        "kinds": ["weights"], "part": "embedding", "at": 0},
    "projector_init": {
        "what": "The projector is initialised with a standard deviation of 1, far too large.",
        "kinds": ["weights"], "part": "other", "at": 0},
    "no_causal_mask": {
        "what": "The language model loses its causal mask, so that all of its blocks see the answer's next tokens.",
        "kinds": ["attention"], "part": "all"},
    "answers_all_masked": {
        "what": "A tokenization mismatch masks all answers of one batch: a mean over no tokens, 0/0, makes all NaN.",
        "kinds": ["not_finite", "data"], "part": "all"},
    "moments_lost": {
        "what": "The run goes on from a checkpoint without AdamW's state: the moments and the count start at zero.",
        "kinds": ["optimizer"], "part": "all"},
    "bf16_weights": {
        "what": "The model is loaded in bfloat16 and trained so, without float32 master weights: updates get lost.",
        "kinds": ["precision"], "part": "all"},
}

HEALTHY = {
    "accumulation": "Each update adds up the gradients of two half batches.",
    "evaluation": "Every 20 updates the model is evaluated on held-out pictures, in eval mode without gradients.",
    "resume": "The run goes on at update 60 from a checkpoint with the states of the model and of the optimizer.",
    "frozen_tower": "The vision encoder is kept frozen by plan; only the projector and the language model are tuned.",
    "weight_average": "An exponential average of the weights is kept aside in a copy of the model.",
}

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220),
           "yellow": (230, 220, 50), "purple": (170, 50, 200), "white": (240, 240, 240)}
SHAPES = ["square", "ring", "cross", "bar"]
PLACES = ["top left", "top right", "bottom left", "bottom right"]
WORDS = ("<pad> <s> </s> user : assistant what which where colour shape is the shown ? it a at yes no , . "
         "top bottom left right").split() + list(COLOURS) + SHAPES
TOKEN = {word: i for i, word in enumerate(WORDS)}
PAD, END = TOKEN["<pad>"], TOKEN["</s>"]

def draw(rng, colour, shape, place):
    mask = np.zeros((6, 6), bool)
    if shape in ("square", "ring"):
        mask[:] = True
        mask[2:4, 2:4] = shape == "square"
    else:
        mask[2:4] = True
        mask[:, 2:4] |= shape == "cross"
    picture = np.full((SIZE, SIZE, 3), 90.0) + rng.normal(0, 12, (SIZE, SIZE, 3))
    y = 8 * (place // 2) + rng.integers(0, 3)
    x = 8 * (place % 2) + rng.integers(0, 3)
    picture[y:y + 6, x:x + 6][mask] = np.array(COLOURS[colour]) + rng.normal(0, 12, (int(mask.sum()), 3))
    return picture.clip(0, 255)

def sample(rng):
    colour = str(rng.choice(list(COLOURS)))
    shape, place, kind = (int(rng.integers(4)) for _ in range(3))
    if kind == 0:
        question, answer = "what colour is the shape ?", f"the shape is {colour} ."
    elif kind == 1:
        question, answer = "which shape is shown ?", f"it is a {SHAPES[shape]} ."
    elif kind == 2:
        question, answer = "where is the shape ?", f"it is at the {PLACES[place]} ."
    else:
        asked = colour if rng.random() < 0.5 else str(rng.choice(list(COLOURS)))
        question = f"is the shape {asked} ?"
        answer = f"{'yes' if asked == colour else 'no'} , it is {colour} ."
    prompt = [TOKEN[w] for w in f"<s> user : {question} assistant :".split()]
    target = [TOKEN[w] for w in answer.split()] + [END]
    picture = draw(rng, colour, SHAPES[shape], place)
    return picture, prompt, target, (list(COLOURS).index(colour), shape, place)

def make_batch(rng, size):
    samples = [sample(rng) for _ in range(size)]
    length = max(len(p) + len(t) for _, p, t, _ in samples)
    ids = torch.full((size, length), PAD)
    labels = torch.full((size, length), IGNORE)
    for row, (_, prompt, target, _) in enumerate(samples):
        ids[row, :len(prompt) + len(target)] = torch.tensor(prompt + target)
        labels[row, len(prompt):len(prompt) + len(target)] = torch.tensor(target)
    pixels = torch.tensor(np.stack([s[0] for s in samples]), dtype=torch.float32)
    return pixels, ids, labels, torch.tensor([s[3] for s in samples])

def preprocess(pixels):
    return (pixels / 255 - 0.4) / 0.2

class VisionBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class VisionTower(nn.Module):
    def __init__(self, width, layers=2, heads=4):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH * PATCH * 3, width)
        self.position = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, width) * 0.02)
        self.blocks = nn.ModuleList(VisionBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, pixels):
        b, n = len(pixels), SIZE // PATCH
        patches = pixels.view(b, n, PATCH, n, PATCH, 3).transpose(2, 3).reshape(b, n * n, -1)
        x = self.patch_embed(patches.to(self.patch_embed.weight.dtype)) + self.position
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

class DecoderBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, mask, cos, sin):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, n, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class LanguageModel(nn.Module):
    def __init__(self, width, layers=3, heads=4):
        super().__init__()
        self.causal = True
        self.embed = nn.Embedding(len(WORDS), width)
        self.blocks = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.lm_head = nn.Linear(width, len(WORDS), bias=False)
        self.frequencies = 100.0 ** -torch.linspace(0, 1, width // heads // 2)

    def forward(self, x, keep):
        n = x.shape[1]
        mask = keep[:, None, None, :]
        if self.causal:
            mask = mask & torch.ones(n, n, dtype=torch.bool).tril()
        angles = torch.arange(n)[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, mask, cos, sin)
        return self.lm_head(self.norm(x))

class Llava(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.vision = VisionTower(width)
        self.projector = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.lm = LanguageModel(width)
        self.apply(init_weights)

    def forward(self, pixels, ids):
        text = self.lm.embed(ids)
        picture = self.projector(self.vision(pixels))
        x = torch.cat([text[:, :1], picture, text[:, 1:]], 1)         # <s> <image> user : ...
        keep = torch.cat([torch.ones(picture.shape[:2], dtype=torch.bool), ids != PAD], 1)
        logits = self.lm(x, keep)
        return logits[:, picture.shape[1]:]                           # position j predicts token j + 1

def init_weights(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.1)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.1)

def answer_loss(logits, labels):
    """The mean over the tokens that are not masked."""
    logits, labels = logits[:, :-1].float(), labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
    return (losses * (labels != IGNORE)).sum() / (labels != IGNORE).sum()

def pretrain(model, rng, steps=25):
    """The vision encoder learns to name what is drawn, the language model to write questions and answers."""
    classifier = nn.Linear(WIDTH, len(COLOURS) + len(SHAPES) + len(PLACES))
    optimizer = torch.optim.AdamW([*model.vision.parameters(), *model.lm.parameters(), *classifier.parameters()],
                                  lr=3e-3, weight_decay=0.01)
    for _ in range(steps):
        pixels, ids, _, facts = make_batch(rng, BATCH)
        named = classifier(model.vision(preprocess(pixels)).mean(1)).split([len(COLOURS), len(SHAPES), len(PLACES)], 1)
        loss = sum(F.cross_entropy(part, facts[:, j]) for j, part in enumerate(named))
        loss = loss + answer_loss(model.lm(model.lm.embed(ids), ids != PAD), ids.masked_fill(ids == PAD, IGNORE))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()

def make_optimizer(model):
    return torch.optim.AdamW([
        {"params": list(model.lm.parameters()), "peak": 2e-3},
        {"params": list(model.projector.parameters()), "peak": 4e-3},
        {"params": list(model.vision.parameters()), "peak": 5e-4},
    ], lr=2e-3, betas=(0.9, 0.999), weight_decay=0.0)

def schedule(step):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))

def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    model = Llava()
    pretrain(model, rng)
    if name == "embedding_remade":
        model.lm.embed = nn.Embedding(len(WORDS), WIDTH)
    if name == "projector_init":
        for layer in (model.projector[0], model.projector[2]):
            nn.init.normal_(layer.weight, std=1.0)
    if name == "frozen_tower":
        model.vision.requires_grad_(False)
    held_out = make_batch(np.random.default_rng(seed + 1000), 32)
    average = copy.deepcopy(model)
    micro = 2 if name == "accumulation" else 1
    optimizer = make_optimizer(model)
    model.train()
    first = 60 if name == "resume" else 0
    recorder = lab.record(model, optimizer, every=every, out=out) if first == 0 else None
    losses = []
    for step in range(STEPS):
        if step == first > 0:                                         # a new process loads the checkpoint
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = Llava()
            optimizer = make_optimizer(model)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
        fault = name if step >= at else ""
        if step == at:
            if fault == "projector_frozen":
                model.projector.requires_grad_(False)
            elif fault == "block_reset":
                model.lm.blocks[1].apply(init_weights)
            elif fault == "no_causal_mask":
                model.lm.causal = False
            elif fault == "moments_lost":
                optimizer.state.clear()
            elif fault == "bf16_weights":
                model.to(torch.bfloat16)
                optimizer.load_state_dict(optimizer.state_dict())     # the state takes the parameters' format
        scale = schedule(step) * (30 if fault == "lr_too_high" else 1)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * scale
        total = 0.0
        for _ in range(micro):
            pixels, ids, labels, _ = make_batch(rng, BATCH // micro)
            if fault == "pictures_mixed":
                pixels = pixels.roll(1, 0)
            if fault == "prompt_not_masked":
                labels = ids.masked_fill(ids == PAD, IGNORE)
            if fault == "answers_all_masked" and step == at:
                labels = torch.full_like(labels, IGNORE)
            if fault != "pixels_255":
                pixels = preprocess(pixels)
            loss = answer_loss(model(pixels, ids), labels) / micro
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if fault != "no_zero_grad":
            optimizer.zero_grad()
        losses.append(float(total))
        if recorder is not None:
            recorder.step(total)
        if name == "weight_average":
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters()):
                    kept.lerp_(new, 0.02)
        if name == "evaluation" and step % 20 == 19:
            model.eval()
            with torch.no_grad():
                answer_loss(model(preprocess(held_out[0]), held_out[1]), held_out[2])
            model.train()
    recorder.close()
    return losses
