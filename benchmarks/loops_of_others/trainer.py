"""A small GPT-2 (transformers) as causal LM on made-up stories, a hand-written Trainer-like loop, AdamW."""
import copy
import math

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

import lab

STEPS = 240
RESUME_STEP = 60

FAULTS = {
    "lr_too_high": dict(
        what="learning_rate is 1e-1 in the arguments where the recipe says 2e-3.",
        kinds=["rate"], part="all", at=0),
    "schedule_over": dict(
        what="On resuming, the schedule counts micro-batches, not updates: it is past its end, lr is 0.",
        kinds=["rate"], part="all"),
    "shifted_twice": dict(
        what="The collator shifts the labels by one, and the model shifts them again: the token after next is taught.",
        kinds=["data"], part="all"),
    "pads_counted": dict(
        what="labels = input_ids without -100 on the padding: the pad tokens count in the loss.",
        kinds=["data"], part="all"),
    "no_labels_left": dict(
        what="The collator finds no beginning of an answer in any text and sets all labels to -100: the loss is NaN.",
        kinds=["data", "not_finite"], part="all"),
    "left_in_eval": dict(
        what="After an evaluation model.train() is not called: training goes on in eval mode, without dropout.",
        kinds=["data"], part="all"),
    "grads_not_zeroed": dict(
        what="zero_grad is no longer called: the gradients of all former updates add up.",
        kinds=["gradients"], part="all"),
    "accumulation_not_divided": dict(
        what="The batch is split into 4 micro-batches and their mean losses are summed, not divided by 4.",
        kinds=["gradients", "data"], part="all"),
    "block_frozen": dict(
        what="requires_grad is switched off for block 1 (transformer.h[1]) and never switched on again.",
        kinds=["frozen"], part="block1"),
    "decay_typo": dict(
        what="weight_decay is 1e1 instead of 1e-1 after a restart: the decayed weights shrink at each update.",
        kinds=["optimizer", "weights"], part="all"),
    "head_not_in_checkpoint": dict(
        what="The checkpoint has no lm_head.weight (thought to be tied): on resuming the head is newly initialised.",
        kinds=["weights"], part="head"),
    "pure_fp16": dict(
        what="The run is resumed with torch_dtype=float16: weights and Adam's state are in half, eps 1e-8 becomes 0.",
        kinds=["precision", "not_finite"], part="all"),
    "mask_not_causal": dict(
        what="An own 4D attention mask (padding only) replaces the model's mask: every token sees those after it.",
        kinds=["attention", "data"], part="all", at=0),
}

HEALTHY = {
    "accumulate": "gradient_accumulation_steps=2: two batches an update, each loss divided by two.",
    "evaluate": "Every 20 updates the loss on held-out texts is taken in eval mode without gradients, then train mode.",
    "resume": "The run goes on at update 60 from a whole checkpoint: model, optimizer, scheduler and random state.",
    "cosine": "lr_scheduler_type='cosine' instead of the linear schedule.",
    "ema": "An exponential average of the weights is kept aside, for evaluation at the end.",
}

# ----------------------------------------------------------------------------- the texts
NAMES = "mira tomas ilse jonah petra anselm ruth oskar".split()
COLOURS = "red blue old small heavy broken".split()
THINGS = "kettle lantern ladder basket clock drum wheel".split()
PLACES = "market harbour mill station garden chapel".split()
TAKES = "takes carries brings drags".split()
LEAVES = "sells leaves hides repairs".split()
WORDS = "<pad> <s> </s> . the to at there and then goes home without who has a new".split()
VOCAB = WORDS + NAMES + COLOURS + THINGS + PLACES + TAKES + LEAVES
PAD, BOS, EOS = 0, 1, 2
MAX_LENGTH = 40


def pick(items, g):
    return items[torch.randint(len(items), (1,), generator=g).item()]


def story(g):
    """Two to four sentences; the person, the thing and the place of the first come again in those after it."""
    name, colour, thing, place = pick(NAMES, g), pick(COLOURS, g), pick(THINGS, g), pick(PLACES, g)
    sentences = [
        f"{name} {pick(TAKES, g)} the {colour} {thing} to the {place} .",
        f"at the {place} {name} {pick(LEAVES, g)} the {colour} {thing} .",
        f"then {name} goes home without the {thing} .",
        f"there {pick(NAMES, g)} has a new {colour} {thing} .",
    ]
    n = 2 + torch.randint(3, (1,), generator=g).item()
    return " ".join(sentences[:n])


class Tokenizer:
    ids = {word: i for i, word in enumerate(VOCAB)}

    def __call__(self, text):
        return [BOS] + [self.ids[word] for word in text.split()] + [EOS]


def make_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    tokenizer = Tokenizer()
    return [tokenizer(story(g)) for _ in range(n)]


def collate(examples):
    """As DataCollatorForLanguageModeling(mlm=False), padding='max_length'."""
    ids = torch.full((len(examples), MAX_LENGTH), PAD)
    for row, example in zip(ids, examples):
        row[: len(example)] = torch.tensor(example[:MAX_LENGTH])
    mask = (ids != PAD).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def batches(dataset, size, seed):
    """Epoch after epoch, shuffled with the seed as the RandomSampler does it."""
    g = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(dataset), generator=g).tolist()
        for i in range(0, len(order) - size + 1, size):
            yield collate([dataset[j] for j in order[i:i + size]])


# ----------------------------------------------------------------------------- model, optimizer, schedule
ARGS = dict(
    learning_rate=2e-3, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, max_grad_norm=1.0,
    warmup_steps=20, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=1,
    lr_scheduler_type="linear", eval_steps=0, ema_decay=0.0,
)


def make_model():
    config = GPT2Config(
        vocab_size=len(VOCAB), n_positions=MAX_LENGTH, n_embd=32, n_layer=3, n_head=4, bos_token_id=BOS,
        eos_token_id=EOS, pad_token_id=PAD, tie_word_embeddings=False, use_cache=False,
    )
    return GPT2LMHeadModel(config)


def make_optimizer(model, args):
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": args["weight_decay"]}, {"params": no_decay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args["learning_rate"], betas=(args["adam_beta1"], args["adam_beta2"]),
                             eps=args["adam_epsilon"])


def make_scheduler(optimizer, args):
    make = get_cosine_schedule_with_warmup if args["lr_scheduler_type"] == "cosine" else get_linear_schedule_with_warmup
    return make(optimizer, num_warmup_steps=args["warmup_steps"], num_training_steps=args["max_steps"])


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    total = 0.0
    for i in range(0, len(dataset), 16):
        total += model(**collate(dataset[i:i + 16])).loss.item()
    return total / math.ceil(len(dataset) / 16)


def save_checkpoint(model, optimizer, scheduler):
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                          "scheduler": scheduler.state_dict(), "rng": torch.get_rng_state()})


# ----------------------------------------------------------------------------- faults
def fault_in_batch(name, batch):
    """The collators that go wrong."""
    ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
    if name == "shifted_twice":
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], dim=1)
    elif name == "pads_counted":
        labels = ids.clone()
    elif name == "no_labels_left":
        labels = torch.full_like(labels, -100)
    elif name == "mask_not_causal":
        mask = mask[:, None, None, :].bool().expand(-1, 1, MAX_LENGTH, -1)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def fault_begins(name, model, optimizer, scheduler, eval_set):
    """What goes wrong once, at the step where the fault begins."""
    if name == "schedule_over":
        scheduler.last_epoch = 4 * STEPS
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    elif name == "left_in_eval":
        evaluate(model, eval_set)
    elif name == "block_frozen":
        model.transformer.h[1].requires_grad_(False)
    elif name == "decay_typo":
        optimizer.param_groups[0]["weight_decay"] = 1e1
    elif name == "head_not_in_checkpoint":
        torch.nn.init.normal_(model.lm_head.weight, std=model.config.initializer_range)
    elif name == "pure_fp16":
        model.half()
        optimizer.load_state_dict(optimizer.state_dict())


# ----------------------------------------------------------------------------- the loop
def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    torch.set_num_threads(1)
    torch.manual_seed(seed)

    args = dict(ARGS)
    if name == "lr_too_high":
        args["learning_rate"] = 1e-1
    elif name == "accumulate":
        args["gradient_accumulation_steps"] = 2
    elif name == "evaluate":
        args["eval_steps"] = 20
    elif name == "cosine":
        args["lr_scheduler_type"] = "cosine"
    elif name == "ema":
        args["ema_decay"] = 0.98

    train_set, eval_set = make_dataset(600, seed=1000 + seed), make_dataset(32, seed=2000 + seed)
    loader = batches(train_set, args["per_device_train_batch_size"], seed)
    model = make_model()
    optimizer = make_optimizer(model, args)
    scheduler = make_scheduler(optimizer, args)
    averaged = copy.deepcopy(model).requires_grad_(False) if args["ema_decay"] else None

    recorder = None
    if name != "resume":
        recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    model.train()
    for step in range(args["max_steps"]):
        faulty = name in FAULTS and step >= at
        if faulty and step == at:
            fault_begins(name, model, optimizer, scheduler, eval_set)
        if name == "resume" and step == RESUME_STEP:
            checkpoint = save_checkpoint(model, optimizer, scheduler)
            model = make_model()
            optimizer = make_optimizer(model, args)
            scheduler = make_scheduler(optimizer, args)
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            scheduler.load_state_dict(checkpoint["scheduler"])
            torch.set_rng_state(checkpoint["rng"])
            model.train()
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=RESUME_STEP)

        micro_batches = [next(loader) for _ in range(args["gradient_accumulation_steps"])]
        if faulty:
            micro_batches = [fault_in_batch(name, batch) for batch in micro_batches]
        divisor = len(micro_batches)
        if faulty and name == "accumulation_not_divided":
            batch = micro_batches[0]
            micro_batches = [{key: value[i:i + 1] for key, value in batch.items()} for i in range(4)]

        tr_loss = torch.tensor(0.0)
        for batch in micro_batches:
            loss = model(**batch).loss / divisor
            loss.backward()
            tr_loss += loss.detach()

        torch.nn.utils.clip_grad_norm_(model.parameters(), args["max_grad_norm"])
        optimizer.step()
        scheduler.step()
        if not (faulty and name == "grads_not_zeroed"):
            optimizer.zero_grad()
        if recorder is not None:
            recorder.step(tr_loss)
        losses.append(tr_loss.item())

        if averaged is not None:
            with torch.no_grad():
                for kept, p in zip(averaged.parameters(), model.parameters()):
                    kept.lerp_(p, 1 - args["ema_decay"])
        if args["eval_steps"] and (step + 1) % args["eval_steps"] == 0:
            evaluate(model, eval_set)
            model.train()

    recorder.close()
    if averaged is not None:
        evaluate(averaged, eval_set)
    return losses
