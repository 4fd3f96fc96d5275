"""Extractive question answering on made-up passages: a small ELECTRA with AdamW, linear warm-up and decay, clipping."""
import copy

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import ElectraConfig, ElectraForQuestionAnswering

import lab

STEPS = 240
WARM_UP = 24
BATCH = 20
PEAK = 4e-3
CLIP = 1.0

# The vocabulary: special tokens, three words that ask, three kinds of words that answer, and words in between.
PAD, CLS, SEP = 0, 1, 2
ASKING = [3, 4, 5]                                      # who, where, when
# An answer is a first word, up to two in the middle and a last one, as in given name ... family name, day ... year.
FIRST = [list(range(6 + 8 * k, 9 + 8 * k)) for k in range(3)]
MIDDLE = [list(range(9 + 8 * k, 11 + 8 * k)) for k in range(3)]
LAST = [list(range(11 + 8 * k, 14 + 8 * k)) for k in range(3)]
FILLERS = list(range(32, 48))
VOCABULARY = 48
LONGEST = 32
INPUTS = ("input_ids", "token_type_ids", "attention_mask")

FAULTS = {
    "shuffled_answers": dict(
        what="From a step on the collate function shuffles the passages but not their answers: the "
             "start and end positions belong to other rows of the batch.", kinds=["data"], part="all"),
    "cut_passages": dict(
        what="From a step on inputs are cut to 14 tokens; an answer behind the cut is said to be at "
             "[CLS].", kinds=["data"], part="all"),
    "inverted_mask": dict(
        what="From a step on the attention mask is 1 on padding and 0 on real tokens.",
        kinds=["attention", "data"], part="all"),
    "rate_slip": dict(
        what="From a step on the base rate is 30 times too high (a slip in a config that is read "
             "again).", kinds=["rate", "instability"], part="all"),
    "schedule_runs_ahead": dict(
        what="From a step on the scheduler is stepped eight times an update (once for each micro "
             "batch): the rate is soon zero.", kinds=["rate"], part="all"),
    "moments_lost": dict(
        what="At a step the run is taken up again with weights and schedule, but with an empty state "
             "of AdamW.", kinds=["optimizer"], part="all", lasts=20),
    "no_zero_grad": dict(
        what="From a step on gradients are no longer set to zero between updates and add up.",
        kinds=["gradients", "optimizer"], part="all"),
    "block_made_anew": dict(
        what="At a step a checkpoint is loaded that lacks block 2, whose weights are made anew at "
             "random.", kinds=["weights"], part="block2"),
    "head_not_trained": dict(
        what="The optimizer is given the parameters of the encoder only; the head of the answers keeps "
             "its first weights.", kinds=["frozen", "optimizer"], part="head", at=0),
    "no_answerable": dict(
        what="At a step a batch has no question with an answer; the mean over those with one is 0 / 0, "
             "and NaN goes into all weights.", kinds=["not_finite", "data"], part="all"),
    "weights_in_bf16": dict(
        what="From a step on weights are held in bfloat16 without a float32 copy: small updates are "
             "rounded away.", kinds=["precision"], part="all"),
    "residual_lost": dict(
        what="From a step on block 1 lacks both of its residual connections.",
        kinds=["activations"], part="block1"),
    "logits_times_eight": dict(
        what="From a step on the logits of start and end are multiplied by 8 (divided by a temperature "
             "left over from a search).", kinds=["output_logits"], part="head"),
}

HEALTHY = {
    "evaluates": "Every 20 steps the model is evaluated on fresh passages in eval mode and set back to train mode.",
    "accumulates": "Each batch is split into two halves whose gradients are added up before the update.",
    "resumed": "Stopped at step 60 and taken up again from a checkpoint of model, optimizer, schedule and generators.",
    "layerwise_rates": "As in ELECTRA's own recipe lower layers have lower rates; biases and norms are not decayed.",
    "batch_ramp": "The batch grows from 12 to 28 over the first 100 steps.",
}


def words_from(words, count, rng):
    return [words[i] for i in rng.integers(len(words), size=count)]


def make_passage(rng):
    """A passage with one answer of each kind (2 to 4 words) among fillers: its tokens and the span of each kind."""
    tokens, spans = [], {}
    for kind in rng.permutation(3):
        tokens += words_from(FILLERS, rng.integers(1, 5), rng)
        start = len(tokens)
        tokens += words_from(FIRST[kind], 1, rng) + words_from(MIDDLE[kind], rng.integers(3), rng)
        tokens += words_from(LAST[kind], 1, rng)
        spans[kind] = (start, len(tokens) - 1)
    tokens += words_from(FILLERS, rng.integers(1, 4), rng)
    return tokens, spans


def make_example(rng):
    """[CLS] question [SEP] passage [SEP], with the types of its tokens and where the answer starts and ends."""
    passage, spans = make_passage(rng)
    asked = rng.integers(3)
    question = [CLS, ASKING[asked], SEP]
    start, end = (p + len(question) for p in spans[asked])
    if rng.random() < 0.1:                              # annotators do not always agree where an answer ends
        end += 1
    types = [0] * len(question) + [1] * (len(passage) + 1)
    return question + passage + [SEP], types, start, end


def collate(examples):
    """Pad to the longest example."""
    length = max(len(tokens) for tokens, *_ in examples)
    shape = (len(examples), length)
    batch = {key: torch.full(shape, PAD) for key in INPUTS}
    for row, (tokens, types, _, _) in enumerate(examples):
        batch["input_ids"][row, :len(tokens)] = torch.tensor(tokens)
        batch["token_type_ids"][row, :len(tokens)] = torch.tensor(types)
        batch["attention_mask"][row, :len(tokens)] = 1
    batch["start"] = torch.tensor([int(example[2]) for example in examples])
    batch["end"] = torch.tensor([int(example[3]) for example in examples])
    batch["answerable"] = torch.ones(len(examples))
    return batch


def cut(batch, length):
    """Cut inputs to `length` tokens; answers that are no longer whole become position 0."""
    for key in INPUTS:
        batch[key] = batch[key][:, :length]
    gone = batch["end"] >= length
    batch["start"][gone] = batch["end"][gone] = 0


def next_batch(name, rng, step, at):
    size = 12 + 16 * min(step, 100) // 100 if name == "batch_ramp" else BATCH
    batch = collate([make_example(rng) for _ in range(size)])
    if name == "shuffled_answers" and step >= at:
        order = torch.from_numpy(rng.permutation(size))
        batch["start"], batch["end"] = batch["start"][order], batch["end"][order]
    if name == "cut_passages" and step >= at:
        cut(batch, 14)
    if name == "inverted_mask" and step >= at:
        batch["attention_mask"] = 1 - batch["attention_mask"]
    if name == "no_answerable" and step == at:
        batch["answerable"] = torch.zeros(size)
    return batch


def make_model():
    config = ElectraConfig(
        vocab_size=VOCABULARY, embedding_size=40, hidden_size=40, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=80, max_position_embeddings=LONGEST, hidden_dropout_prob=0.05,
        attention_probs_dropout_prob=0.0, initializer_range=0.12, pad_token_id=PAD)
    return ElectraForQuestionAnswering(config)


def drop_residual(output):
    """Make half a block forget its input: norm(dense(x)) in place of norm(dense(x) + input)."""
    def forward(hidden_states, input_tensor):
        return output.LayerNorm(output.dropout(output.dense(hidden_states)))
    output.forward = forward


def make_anew(block):
    for part in block.modules():
        if isinstance(part, torch.nn.Linear):
            torch.nn.init.normal_(part.weight, std=0.12)
            torch.nn.init.zeros_(part.bias)
        if isinstance(part, torch.nn.LayerNorm):
            torch.nn.init.ones_(part.weight)
            torch.nn.init.zeros_(part.bias)


def layerwise_groups(model):
    """Rates of 0.85 to the power of the depth below the head; no decay of vectors."""
    electra = model.electra
    groups = []
    for depth, part in enumerate([model.qa_outputs, *reversed(electra.encoder.layer), electra.embeddings]):
        rate = PEAK * 0.85 ** depth
        parameters = list(part.parameters())
        groups.append(dict(params=[p for p in parameters if p.ndim > 1], lr=rate, weight_decay=0.01))
        groups.append(dict(params=[p for p in parameters if p.ndim <= 1], lr=rate, weight_decay=0.0))
    return groups


def make_optimizer(name, model):
    parameters = model.electra.parameters() if name == "head_not_trained" else model.parameters()
    if name == "layerwise_rates":
        parameters = layerwise_groups(model)
    return torch.optim.AdamW(parameters, lr=PEAK, weight_decay=0.01)


def factor(step):
    """Linear warm-up, then linear decay to zero."""
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return max(0.0, (STEPS - step) / (STEPS - WARM_UP))


def loss_of(model, batch, scale=1.0):
    """Mean over the answerable questions of the cross entropies of start and end."""
    out = model(**{key: batch[key] for key in INPUTS})
    start = cross_entropy(scale * out.start_logits, batch["start"], reduction="none")
    end = cross_entropy(scale * out.end_logits, batch["end"], reduction="none")
    return ((start + end) / 2 * batch["answerable"]).sum() / batch["answerable"].sum()


def backward(name, model, batch, step, at):
    """Forward and backward of one update; its loss."""
    if name == "accumulates":
        total = 0.0
        for half in (slice(0, BATCH // 2), slice(BATCH // 2, BATCH)):
            loss = loss_of(model, {key: value[half] for key, value in batch.items()}) / 2
            loss.backward()
            total = total + loss.detach()
        return total
    scale = 8.0 if name == "logits_times_eight" and step >= at else 1.0
    loss = loss_of(model, batch, scale)
    loss.backward()
    return loss.detach()


def evaluate(model, seed):
    model.eval()
    rng = np.random.default_rng(10_000 + seed)
    with torch.no_grad():
        loss_of(model, collate([make_example(rng) for _ in range(BATCH)]))
    model.train()


def before_update(name, model, optimizer, schedule, step, at):
    """What happens to model, optimizer or schedule before the update of a step."""
    if name == "moments_lost" and step == at:
        optimizer.state.clear()
    if name == "block_made_anew" and step == at:
        make_anew(model.electra.encoder.layer[2])
    if name == "residual_lost" and step == at:
        drop_residual(model.electra.encoder.layer[1].attention.output)
        drop_residual(model.electra.encoder.layer[1].output)
    if name == "rate_slip" and step == at:
        schedule.base_lrs = [30 * rate for rate in schedule.base_lrs]
        for group in optimizer.param_groups:
            group["lr"] *= 30


def update(name, model, optimizer, schedule, batch, step, at):
    before_update(name, model, optimizer, schedule, step, at)
    loss = backward(name, model, batch, step, at)
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    if name == "weights_in_bf16" and step >= at:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16().float())
    schedule.step()
    if name == "schedule_runs_ahead" and step >= at:
        for _ in range(7):
            schedule.step()
    if not (name == "no_zero_grad" and step >= at):
        model.zero_grad()
    return loss


def build(name, seed):
    torch.manual_seed(seed)
    model = make_model().train()
    optimizer = make_optimizer(name, model)
    return model, optimizer, LambdaLR(optimizer, factor)


def first_part(seed, rng, until):
    """The first steps of a run that is stopped, and its checkpoint."""
    model, optimizer, schedule = build("plain", seed)
    losses = [float(update("plain", model, optimizer, schedule, next_batch("plain", rng, step, STEPS), step, STEPS))
              for step in range(until)]
    states = [copy.deepcopy(thing.state_dict()) for thing in (model, optimizer, schedule)]
    return losses, states, torch.get_rng_state()


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    """Train with the fault or habit `name` ("plain": nothing planted) from step `at` on; the losses."""
    torch.set_num_threads(1)
    rng, first, losses = np.random.default_rng(seed), 0, []
    if name == "resumed":
        first = 60
        losses, states, generator = first_part(seed, rng, first)
    model, optimizer, schedule = build(name, seed)
    if name == "resumed":
        for thing, state in zip((model, optimizer, schedule), states):
            thing.load_state_dict(state)
        torch.set_rng_state(generator)
    recorder = lab.record(model, optimizer, every=every, out=out, first_step=first)
    for step in range(first, STEPS):
        batch = next_batch(name, rng, step, at)
        loss = update(name, model, optimizer, schedule, batch, step, at)
        recorder.step(loss)
        losses.append(float(loss))
        if name == "evaluates" and step % 20 == 19:
            evaluate(model, seed)
    recorder.close()
    return losses
