"""A small RoBERTa encoder fine-tuned for named-entity tags on made-up sentences, with AdamW."""
import copy

import lab
import numpy as np
import torch
from transformers import RobertaConfig, RobertaForMaskedLM, RobertaForTokenClassification

STEPS = 240
WARMUP = 24
BATCH = 16
PEAK = 6e-3             # of the head; each layer below has LAYER_DECAY of the one above
LAYER_DECAY = 0.9
WEIGHT_DECAY = 0.01
CLIP = 1.0
PRETRAIN = 25
LAYERS = 3
RESUME_AT = 80
IGNORE = -100
CLS, PAD, SEP, MASK = 0, 1, 2, 3
SPECIAL = 4
VOCAB = 160
TAGS = ["O", "B-PER", "I-PER", "B-ORG", "I-ORG", "B-LOC", "I-LOC"]

FAULTS: dict[str, dict] = {
    "rate_too_high": dict(
        what="After a restart with an edited config the peak learning rate of all groups is 20 times too high.",
        kinds=["rate"], part="all"),
    "schedule_too_short": dict(
        what="The schedule is rebuilt with too few total steps: the learning rate of all groups is zero from here on.",
        kinds=["rate"], part="all"),
    "labels_shifted": dict(
        what="The labels are aligned to the sub-words off by one, so every tag sits one token too far right.",
        kinds=["data"], part="all"),
    "padding_in_loss": dict(
        what="The collator pads the labels with 0 (tag O) in place of -100, so that padding counts in the loss.",
        kinds=["data"], part="all"),
    "mask_inverted": dict(
        what="The attention mask is the wrong way round (1 for padding), so that tokens attend to the padding alone.",
        kinds=["attention", "data"], part="all"),
    "left_in_eval": dict(
        what="After an evaluation the model is not put back into train mode, so that dropout is off from here on.",
        kinds=["data"], part="all"),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed after an update and add up over the steps.",
        kinds=["gradients"], part="all"),
    "empty_batch": dict(
        what="One batch has no labelled token, the mean over its labels is 0/0, and NaN reaches all weights.",
        kinds=["not_finite", "data"], part="all"),
    "layer_left_out": dict(
        what="The loop that makes the layer-wise groups stops one short, so the last layer is in no group of AdamW.",
        kinds=["frozen"], part="block2", at=0),
    "embedding_frozen": dict(
        what="The embeddings are frozen with requires_grad_(False) in the middle of the run and stay so.",
        kinds=["frozen"], part="embedding"),
    "head_lost": dict(
        what="A checkpoint without the classifier is loaded, and the head is newly initialised with random weights.",
        kinds=["weights"], part="head"),
    "pure_bf16": dict(
        what="The whole model is cast to bfloat16 without float32 master weights, small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
    "decay_without_rate": dict(
        what="Weight decay is applied by hand in the loop without the learning rate: weights shrink by 1 % a step.",
        kinds=["weights", "optimizer"], part="all"),
}

HEALTHY: dict[str, str] = {
    "accumulate": "Each update takes the mean gradient of two micro-batches of half the size.",
    "evaluate": "Every 30 steps the model is evaluated on held-out sentences and put back into train mode.",
    "resume": "The run goes on from a full checkpoint (model, optimizer, step) of its first 80 steps.",
    "batch_ramp": "The batch size is raised by plan, step by step, from 8 to 24 sentences over the run.",
    "average": "An exponential moving average of the weights is kept aside in a copy of the model.",
}


# ---- sentences ----

class Language:
    """Words of one to three sub-words; names whose type shows in the word before, or in the name."""

    def __init__(self, rng):
        self.rng = rng
        self.fillers = [self.word(SPECIAL + 20, SPECIAL + 90, 2) for _ in range(60)]
        self.names = {}
        for n, kind in enumerate(("PER", "ORG", "LOC")):
            low = SPECIAL + 90 + 22 * n
            self.names[kind] = [self.word(low, low + 22, 3) for _ in range(20)]
        self.cues = {kind: [[SPECIAL + 4 * n + i] for i in range(4)] for n, kind in enumerate(self.names)}
        self.all_names = sum(self.names.values(), [])

    def word(self, low, high, longest):
        return [int(piece) for piece in self.rng.randint(low, high, size=self.rng.randint(1, longest + 1))]

    def pick(self, words):
        return words[self.rng.randint(len(words))]

    def sentence(self):
        words, tags = [], []
        for _ in range(self.rng.randint(1, 3)):
            for _ in range(self.rng.randint(1, 4)):
                words.append(self.pick(self.fillers))
                tags.append("O")
            kind = self.pick(list(self.names))
            if self.rng.rand() < 0.3:               # the cue tells the type, the name may be any
                words.append(self.pick(self.cues[kind]))
                tags.append("O")
                pool = self.all_names
            else:                                   # the name alone tells the type
                pool = self.names[kind]
            for n in range(self.rng.randint(1, 3)):
                words.append(self.pick(pool))
                tags.append(("B-" if n == 0 else "I-") + kind)
        words.append(self.pick(self.fillers))
        tags.append("O")
        return self.encode(words, tags)

    def encode(self, words, tags):
        ids, labels = [CLS], [IGNORE]
        for word, tag in zip(words, tags):
            if self.rng.rand() < 0.02:              # annotators err
                tag = self.pick(TAGS)
            ids += word
            labels += [TAGS.index(tag)] + [IGNORE] * (len(word) - 1)
        return ids + [SEP], labels + [IGNORE]


def collate(sentences, label_pad=IGNORE):
    longest = max(len(ids) for ids, _ in sentences)
    ids = torch.full((len(sentences), longest), PAD)
    labels = torch.full((len(sentences), longest), label_pad)
    for row, (tokens, tags) in enumerate(sentences):
        ids[row, :len(tokens)] = torch.tensor(tokens)
        labels[row, :len(tags)] = torch.tensor(tags)
    return ids, (ids != PAD).long(), labels


def draw(corpus, rng, size):
    return [corpus[i] for i in rng.randint(len(corpus), size=size)]


# ---- model and optimizer ----

def make_config():
    return RobertaConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, type_vocab_size=1, pad_token_id=PAD, bos_token_id=CLS, eos_token_id=SEP,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, initializer_range=0.05, num_labels=len(TAGS))


def pretrain(config, corpus, rng):
    """A little masked-token modelling, so that the encoder knows the words."""
    model = RobertaForMaskedLM(config)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=WEIGHT_DECAY)
    for step in range(PRETRAIN):
        ids, mask, _ = collate(draw(corpus, rng, BATCH))
        hidden = (torch.rand(ids.shape) < 0.15) & (ids >= SPECIAL)
        labels = torch.where(hidden, ids, torch.tensor(IGNORE))
        loss = model(ids.masked_fill(hidden, MASK), attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        optimizer.step()
        optimizer.zero_grad()
    return model.roberta.state_dict()


def make_groups(model, layers=LAYERS):
    """Groups with layer-wise rates, each once with weight decay and once (biases, norms) without."""
    stages = [(model.roberta.embeddings, PEAK * LAYER_DECAY ** (LAYERS + 1))]
    for n in range(layers):
        stages.append((model.roberta.encoder.layer[n], PEAK * LAYER_DECAY ** (LAYERS - n)))
    stages.append((model.classifier, PEAK))
    groups = []
    for module, peak in stages:
        named = list(module.named_parameters())
        plain = [p for n, p in named if n.endswith("bias") or "LayerNorm" in n]
        decayed = [p for n, p in named if not (n.endswith("bias") or "LayerNorm" in n)]
        groups.append(dict(params=decayed, lr=peak, peak=peak, weight_decay=WEIGHT_DECAY))
        if plain:
            groups.append(dict(params=plain, lr=peak, peak=peak, weight_decay=0.0))
    return groups


def make_optimizer(model, layers=LAYERS):
    return torch.optim.AdamW(make_groups(model, layers), betas=(0.9, 0.98), eps=1e-8, foreach=True)


def schedule(step, total=STEPS):
    if step < WARMUP:
        return (step + 1) / WARMUP
    return max(0.0, (total - step) / (total - WARMUP))


def tag_loss(logits, labels):
    counted = (labels != IGNORE).float()
    log_probs = torch.log_softmax(logits.float(), -1)
    nll = -log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (nll * counted).sum() / counted.sum()


@torch.no_grad()
def evaluate(model, held_out):
    model.eval()
    ids, mask, labels = collate(held_out)
    guess = model(ids, attention_mask=mask).logits.argmax(-1)
    counted = labels != IGNORE
    return (guess == labels)[counted].float().mean().item()


# ---- training ----

def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = np.random.RandomState(seed)
    language = Language(rng)
    corpus = [language.sentence() for _ in range(600)]
    held_out = [language.sentence() for _ in range(64)]

    config = make_config()
    encoder = pretrain(config, corpus, rng)
    model = RobertaForTokenClassification(config)
    model.roberta.load_state_dict(encoder)
    if name == "pure_bf16":
        model.to(torch.bfloat16)
    model.train()
    optimizer = make_optimizer(model, layers=LAYERS - 1 if name == "layer_left_out" else LAYERS)
    average = copy.deepcopy(model) if name == "average" else None

    recorder = None
    if name != "resume":
        recorder = lab.record(model, optimizer, every=every, out=out)

    losses = []
    for step in range(STEPS):
        broken = name in FAULTS and step >= at

        if name == "resume" and step == RESUME_AT:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = RobertaForTokenClassification(config)
            model.load_state_dict(saved[0])
            model.train()
            optimizer = make_optimizer(model)
            optimizer.load_state_dict(saved[1])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_AT)
        if name == "evaluate" and step % 30 == 0:
            evaluate(model, held_out)
            model.train()
        if broken and step == at:
            if name == "left_in_eval":
                evaluate(model, held_out)
            elif name == "embedding_frozen":
                model.roberta.embeddings.requires_grad_(False)
            elif name == "head_lost":
                kept = {k: v.clone() for k, v in model.state_dict().items() if not k.startswith("classifier")}
                model.classifier.reset_parameters()
                model.load_state_dict(kept, strict=False)

        factor = schedule(step)
        if broken and name == "rate_too_high":
            factor = 20 * schedule(step)
        if broken and name == "schedule_too_short":
            factor = schedule(step, total=at)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor

        size = 8 + 16 * step // STEPS if name == "batch_ramp" else BATCH
        parts = 2 if name == "accumulate" else 1
        total = 0.0
        for _ in range(parts):
            label_pad = 0 if broken and name == "padding_in_loss" else IGNORE
            ids, mask, labels = collate(draw(corpus, rng, size // parts), label_pad)
            if broken and name == "labels_shifted":
                labels = torch.roll(labels, 1, dims=1)
            if broken and name == "empty_batch" and step == at:
                labels = torch.full_like(labels, IGNORE)
            if broken and name == "mask_inverted":
                mask = (ids == PAD).long()          # as key_padding_mask of torch has it
            logits = model(ids, attention_mask=mask).logits
            loss = tag_loss(logits, labels) / parts
            loss.backward()
            total = total + loss.detach()

        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if broken and name == "decay_without_rate":
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        p.mul_(1 - group["weight_decay"])
        if not (broken and name == "no_zero_grad"):
            optimizer.zero_grad()
        if name == "layer_left_out":
            model.zero_grad()                       # else the layer without a group would gather gradients
        if average is not None:
            with torch.no_grad():
                for kept_aside, p in zip(average.parameters(), model.parameters()):
                    kept_aside.lerp_(p, 0.02)

        losses.append(total.item())
        if recorder is not None:
            recorder.step(total)
    recorder.close()
    return losses
