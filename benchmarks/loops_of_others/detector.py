"""A small DETR (patches, encoder, decoder with object queries) on drawn pictures, trained with AdamW."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment

import lab

STEPS = 240
BATCH = 8
SIDE, PATCH, WIDTH, HEADS = 32, 4, 32, 4
QUERIES, CLASSES, MOST = 8, 3, 3  # squares, discs, diamonds; at most three in a picture
RATE, WARMUP, DROP, DECAY, CLIP = 1e-3, 20, 200, 1e-4, 1.0
NO_OBJECT = 0.1  # the weight of "nothing here" in the class loss

FAULTS = {
    "rate_times_20": {
        "what": "The learning rate is raised to 20 times its value (a rate meant for another optimizer).",
        "kinds": ["rate"], "part": "all"},
    "rate_drops_each_update": {
        "what": "The drop of the rate meant for once an epoch is done at each update, so the rate is soon nothing.",
        "kinds": ["rate"], "part": "all"},
    "no_zero_grad": {
        "what": "The gradients are no longer set to zero after an update, so they add up over the updates.",
        "kinds": ["gradients"], "part": "all"},
    "left_in_eval": {
        "what": "After a validation the model is left in eval mode, so dropout is off for the rest of the training.",
        "kinds": ["data"], "part": "all"},
    "mask_inverted": {
        "what": "The padding mask is given inverted, so every attention over the picture sees only padding.",
        "kinds": ["attention", "data"], "part": "all"},
    "boxes_as_corners": {
        "what": "The labels' boxes come as corners (x0, y0, x1, y1) but the loss takes them as centre and size.",
        "kinds": ["data"], "part": "all"},
    "pixels_not_scaled": {
        "what": "The pictures are no longer divided by 255 before they are normalised: inputs are far too large.",
        "kinds": ["data"], "part": "all"},
    "optimizer_state_lost": {
        "what": "A checkpoint is loaded without the optimizer state: moments and step counts begin anew.",
        "kinds": ["optimizer"], "part": "all"},
    "patches_frozen": {
        "what": "The patch embedding is frozen (requires_grad off), as a pretrained backbone would be.",
        "kinds": ["frozen"], "part": "other"},
    "heads_not_in_optimizer": {
        "what": "The heads for class and box are missing from the optimizer's groups, so they are never updated.",
        "kinds": ["frozen"], "part": "head", "at": 0},
    "all_in_bfloat16": {
        "what": "The whole model is cast to bfloat16 with no float32 weights kept, so small updates are lost.",
        "kinds": ["precision"], "part": "all", "at": 0},
    "size_zero_in_label": {
        "what": "A picture's size is 0 in its label, so its boxes are infinite, then the loss and all weights are NaN.",
        "kinds": ["not_finite", "data"], "part": "all"},
    "last_block_made_new": {
        "what": "A checkpoint without the last decoder block is loaded (strict=False): that block is made new.",
        "kinds": ["weights"], "part": "block3"},
}

HEALTHY = {
    "accumulation": "Each update is made from the gradients of two half batches.",
    "evaluation": "Every 40 updates the model is evaluated on pictures kept aside, then put back in train mode.",
    "resumed": "The run goes on from a checkpoint of update 60, with the states of model and optimizer loaded.",
    "cosine": "The learning rate falls along a cosine after the warmup and not in one step late in the run.",
    "average": "An exponential average of the weights is kept aside for evaluation.",
}


def draw(batch, generator):
    """Pictures of 0..255 in a padded frame, which pixels are real, sizes, and the objects (pixels: centre, size)."""
    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(*shape, generator=generator)

    size = 4 * torch.randint(5, 8, (batch, 2), generator=generator).float()  # width, height: 20, 24 or 28
    count = torch.randint(1, MOST + 1, (batch,), generator=generator)
    labels = torch.randint(0, CLASSES, (batch, MOST), generator=generator)
    extent = uniform(6, 13, batch, MOST, 2)
    centre = extent / 2 + torch.rand(batch, MOST, 2, generator=generator) * (size[:, None] - extent)
    colour = uniform(0.2, 0.4, batch, MOST, 3) + 0.6 * F.one_hot(labels, 3)
    picture = uniform(0.0, 0.2, batch, 3, SIDE, SIDE)
    grid = torch.arange(SIDE) + 0.5
    for k in range(MOST):
        dx = (grid[None, None, :] - centre[:, k, 0, None, None]).abs() / (extent[:, k, 0, None, None] / 2)
        dy = (grid[None, :, None] - centre[:, k, 1, None, None]).abs() / (extent[:, k, 1, None, None] / 2)
        square, disc, diamond = torch.maximum(dx, dy) < 1, dx ** 2 + dy ** 2 < 1, dx + dy < 1
        inside = torch.stack([square, disc, diamond])[labels[:, k], torch.arange(batch)]
        inside = inside & (k < count)[:, None, None]
        picture = torch.where(inside[:, None], colour[:, k, :, None, None], picture)
    real = (grid[None, None, :] < size[:, 0, None, None]) & (grid[None, :, None] < size[:, 1, None, None])
    return (255 * picture).round(), real, size, torch.cat([centre, extent], -1), labels, count


def load(batch, generator, scale=1 / 255, corners=False, bad_size=False):
    """A batch as the model gets it: normalised pictures, mask of real pixels, boxes in parts of the picture's size."""
    picture, real, size, boxes, labels, count = draw(batch, generator)
    picture = (picture * scale - 0.2) / 0.25 * real[:, None]
    if bad_size:
        size[0] = 0
    boxes = boxes / size.repeat(1, 2)[:, None]
    if corners:
        boxes = to_corners(boxes)
    return picture, real, boxes, labels, count


def to_corners(boxes):
    centre, extent = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - extent / 2, centre + extent / 2], -1)


def generalized_iou(a, b):
    a, b = to_corners(a), to_corners(b)
    area_a = (a[..., 2:] - a[..., :2]).clamp(min=0).prod(-1)
    area_b = (b[..., 2:] - b[..., :2]).clamp(min=0).prod(-1)
    both = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    hull = (torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])).clamp(min=0).prod(-1)
    union = area_a + area_b - both
    return both / (union + 1e-6) - (hull - union) / (hull + 1e-6)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query, key, value, mask=None):
        def split(x):
            return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        y = F.scaled_dot_product_attention(split(self.q(query)), split(self.k(key)), split(self.v(value)), mask)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Dropout(0.1), nn.Linear(2 * WIDTH, WIDTH))


class EncoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp, self.dropout = Attention(), FeedForward(), nn.Dropout(0.1)

    def forward(self, x, position, mask):
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y + position, y + position, y, mask))
        return x + self.dropout(self.mlp(self.norm2(x)))


class DecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.cross, self.mlp = Attention(), Attention(), FeedForward()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, query, memory, position, mask):
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y + query, y + query, y))
        x = x + self.dropout(self.cross(self.norm2(x) + query, memory + position, memory, mask))
        return x + self.dropout(self.mlp(self.norm3(x)))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.queries = nn.Embedding(QUERIES, WIDTH)
        self.blocks = nn.ModuleList([EncoderBlock(), EncoderBlock(), DecoderBlock(), DecoderBlock()])
        self.memory_norm, self.norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleDict({
            "label": nn.Linear(WIDTH, CLASSES + 1),
            "box": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))})
        self.mask_is_padding = False

    def position(self, real):
        """Sines of the place in the real picture, half of the width for y and half for x."""
        y, x = real.cumsum(1) - 0.5, real.cumsum(2) - 0.5
        y, x = y / real.sum(1, keepdim=True).clamp(min=1), x / real.sum(2, keepdim=True).clamp(min=1)
        turns = math.pi * 2.0 ** torch.arange(WIDTH // 4).div(2)
        angles = [place.flatten(1)[..., None] * turns for place in (y, x)]
        return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], -1)

    def forward(self, picture, real):
        dtype = self.patches.weight.dtype
        x = self.patches(picture.to(dtype)).flatten(2).transpose(1, 2)
        real = real[:, ::PATCH, ::PATCH]
        position = self.position(real.float()).to(dtype)
        mask = real.flatten(1)[:, None, None, :]  # True: this patch takes part
        if self.mask_is_padding:
            mask = ~mask
        query = self.queries.weight.expand(len(x), -1, -1)
        for block in self.blocks[:2]:
            x = block(x, position, mask)
        memory = self.memory_norm(x)
        x = torch.zeros_like(query)
        for block in self.blocks[2:]:
            x = block(x, query, memory, position, mask)
        x = self.norm(x)
        return self.heads["label"](x).float(), self.heads["box"](x).float().sigmoid()


@torch.no_grad()
def match(logits, boxes, true_boxes, labels, count):
    """For each picture the queries that stand for its objects, by the cheapest assignment."""
    probability = logits.softmax(-1).gather(2, labels[:, None].expand(-1, QUERIES, -1))
    a, b = boxes[:, :, None], true_boxes[:, None]
    cost = 5 * (a - b).abs().sum(-1) - 2 * generalized_iou(a, b) - probability
    cost = cost.nan_to_num(1e4, 1e4, -1e4).numpy()
    return [linear_sum_assignment(c[:, :n]) for c, n in zip(cost, count.tolist())]


def detection_loss(model, data):
    picture, real, true_boxes, labels, count = data
    logits, boxes = model(picture, real)
    pairs = match(logits, boxes, true_boxes, labels, count)
    row = torch.arange(len(logits)).repeat_interleave(count)
    query, which = (torch.cat([torch.as_tensor(pair[side]) for pair in pairs]) for side in (0, 1))
    target = torch.full((len(logits), QUERIES), CLASSES)
    target[row, query] = labels[row, which]
    weight = torch.ones(CLASSES + 1)
    weight[CLASSES] = NO_OBJECT
    label_loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), weight)
    ours, theirs = boxes[row, query], true_boxes[row, which]
    box_loss = (ours - theirs).abs().sum(-1).mean()
    iou_loss = (1 - generalized_iou(ours, theirs)).mean()
    return label_loss + 5 * box_loss + 2 * iou_loss


def make_optimizer(model, with_heads=True):
    names = {"patches": [], "transformer": [], "heads": []}
    for name, parameter in model.named_parameters():
        first = name.split(".")[0]
        names[first if first in names else "transformer"].append(parameter)
    groups = [{"params": names["patches"], "rate": RATE / 2}, {"params": names["transformer"], "rate": RATE}]
    if with_heads:
        groups.append({"params": names["heads"], "rate": RATE})
    return torch.optim.AdamW(groups, lr=RATE, weight_decay=DECAY)


def schedule(step, cosine):
    if step < WARMUP:
        return (step + 1) / WARMUP
    if cosine:
        return 0.5 + 0.5 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))
    return 1.0 if step < DROP else 0.1


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed + 1)
    model = Detector()
    if name == "all_in_bfloat16":
        model.bfloat16()
    optimizer = make_optimizer(model, with_heads=name != "heads_not_in_optimizer")
    recorder = None if name == "resumed" else lab.record(model, optimizer, every=every, out=out)
    if name == "evaluation":
        aside = load(64, torch.Generator().manual_seed(999))
    if name == "average":
        average = {key: value.clone() for key, value in model.state_dict().items()}
    losses = []
    for step in range(STEPS):
        wrong = name if name in FAULTS and step >= at else None
        if name == "resumed" and step == 60:
            saved = model.state_dict(), optimizer.state_dict()
            rng = torch.get_rng_state()
            model = Detector()
            optimizer = make_optimizer(model)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(rng)
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if wrong == "patches_frozen":
            model.patches.requires_grad_(False)
        if wrong == "last_block_made_new" and step == at:
            model.blocks[3].load_state_dict(DecoderBlock().state_dict())
        if wrong == "optimizer_state_lost" and step == at:
            optimizer.state.clear()
        model.train(wrong != "left_in_eval")
        model.mask_is_padding = wrong == "mask_inverted"

        factor = schedule(step, name == "cosine")
        if wrong == "rate_times_20":
            factor *= 20
        if wrong == "rate_drops_each_update":
            factor *= 0.1 ** (step - at + 1)
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * factor

        parts = 2 if name == "accumulation" else 1
        total = 0.0
        for _ in range(parts):
            data = load(BATCH // parts, generator,
                        scale=1.0 if wrong == "pixels_not_scaled" else 1 / 255,
                        corners=wrong == "boxes_as_corners",
                        bad_size=wrong == "size_zero_in_label" and step == at)
            loss = detection_loss(model, data) / parts
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if wrong != "no_zero_grad":
            optimizer.zero_grad()
        if recorder:
            recorder.step(total)
        losses.append(total)

        if name == "average":
            for key, value in model.state_dict().items():
                average[key].lerp_(value, 0.02)
        if name == "evaluation" and (step + 1) % 40 == 0:
            model.eval()
            with torch.no_grad():
                detection_loss(model, aside)
            model.train()
    recorder.close()
    return losses
