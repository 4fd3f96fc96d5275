"""Masked-language pretraining of a small ESM-like protein model on made-up protein families, with AdamW."""
import copy
import math

import torch
import torch.nn.functional as F
from transformers import EsmConfig, EsmForMaskedLM

import lab

STEPS = 240
WARMUP = 24
PEAK = 4e-3
ACCUMULATE = 2
MICRO_BATCH = 6
CLIP = 1.0
MASKED = 0.15

TOKENS = ["<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>"]
CLS, PAD, EOS, MASK = 0, 1, 2, 32
FIRST, RESIDUES = 4, 20                 # the twenty standard amino acids
FAMILIES, LONGEST, SHORTEST = 6, 26, 10

FAULTS: dict[str, dict] = {
    "lr_too_high": dict(
        what="The rate of another recipe is used: twenty times too high, and without warm-up.",
        kinds=["rate"], part="all", at=0),
    "pure_bf16": dict(
        what="The whole model is cast to bfloat16, weights and AdamW's moments too, so small updates are rounded away.",
        kinds=["precision"], part="all", at=0),
    "embedding_init": dict(
        what="The token embedding was replaced by an nn.Embedding with its default N(0, 1) instead of N(0, 0.02).",
        kinds=["weights"], part="embedding", at=0),
    "head_left_out": dict(
        what="The optimizer's groups are built from model.esm alone, so the language-model head never trains.",
        kinds=["frozen", "optimizer"], part="head", at=0),
    "schedule_restarts": dict(
        what="After a restart the scheduler is not restored: warm-up begins again and the rate climbs to its peak.",
        kinds=["rate"], part="all"),
    "moments_lost": dict(
        what="After a restart AdamW's moments and step counts are not restored and begin at zero.",
        kinds=["optimizer"], part="all"),
    "no_zero_grad": dict(
        what="The gradients are no longer zeroed after an update and pile up over all updates.",
        kinds=["gradients"], part="all"),
    "labels_shifted": dict(
        what="The labels are those of the next position, as if the sequence had no <cls> in front.",
        kinds=["data"], part="all"),
    "eval_mode": dict(
        what="After an evaluation the model is not put back into train mode, so there is no dropout any more.",
        kinds=["data"], part="all"),
    "no_attention_mask": dict(
        what="The attention mask is no longer passed, so residues attend to the padding.",
        kinds=["attention", "data"], part="all"),
    "bad_shard": dict(
        what="A shard of nucleotide sequences (A, C, G, T) is among the protein data.",
        kinds=["data"], part="all", lasts=30),
    "empty_mask": dict(
        what="In one micro-batch no position was chosen to be masked; the mean over none of them is NaN.",
        kinds=["not_finite", "data"], part="all"),
    "block_frozen": dict(
        what="Block 1 is frozen: its parameters no longer require gradients.",
        kinds=["frozen"], part="block1"),
}

HEALTHY: dict[str, str] = {
    "evaluate": "Every 20 updates the model is evaluated on held-out sequences and put back into train mode.",
    "resume": "The first 60 updates were saved with all states; the recorded run goes on from that checkpoint.",
    "cosine": "The rate falls along a half cosine to a tenth of its peak, instead of linearly.",
    "batch_ramp": "The micro-batches grow by plan from 4 to 6 and 8 sequences, a stage every 60 updates.",
    "average": "An exponential average of the weights is kept aside for evaluation.",
}


class Proteins:
    """Families with a consensus each, made of the residues that the family prefers; members mutate and are cut."""

    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)
        world = torch.Generator().manual_seed(1234)             # the families are the same for all seeds
        self.profile, self.consensus = [], []
        for _ in range(FAMILIES):
            liked = torch.randperm(RESIDUES, generator=world)[:6]
            weights = torch.full((RESIDUES,), 0.01)
            weights[liked] = torch.tensor([0.35, 0.2, 0.15, 0.1, 0.1, 0.1])
            motif = torch.multinomial(weights, 6, replacement=True, generator=world)
            self.profile.append(weights)
            self.consensus.append(motif.repeat(math.ceil(LONGEST / 6) + 1))

    def member(self, nucleotides=False):
        length = int(torch.randint(SHORTEST, LONGEST + 1, (1,), generator=self.rng))
        family = int(torch.randint(FAMILIES, (1,), generator=self.rng))
        start = int(torch.randint(6, (1,), generator=self.rng))
        mutated = torch.rand(length, generator=self.rng) < 0.15
        other = torch.multinomial(self.profile[family], length, replacement=True, generator=self.rng)
        residues = torch.where(mutated, other, self.consensus[family][start:start + length]) + FIRST
        if nucleotides:
            letters = torch.tensor([TOKENS.index(letter) for letter in "ACGT"])
            residues = letters[torch.randint(4, (length,), generator=self.rng)]
        return torch.cat([torch.tensor([CLS]), residues, torch.tensor([EOS])])

    def batch(self, size, nucleotides=False):
        members = [self.member(nucleotides) for _ in range(size)]
        return torch.nn.utils.rnn.pad_sequence(members, batch_first=True, padding_value=PAD)

    def mask(self, tokens, share=MASKED):
        """BERT's masking: of the chosen positions 80 % become <mask>, 10 % another residue, 10 % stay."""
        chosen = (torch.rand(tokens.shape, generator=self.rng) < share) & (tokens >= FIRST)
        fate = torch.rand(tokens.shape, generator=self.rng)
        others = torch.randint(FIRST, FIRST + RESIDUES, tokens.shape, generator=self.rng)
        inputs = torch.where(chosen & (fate < 0.8), torch.full_like(tokens, MASK), tokens)
        inputs = torch.where(chosen & (fate >= 0.8) & (fate < 0.9), others, inputs)
        return inputs, chosen


def make_model(name):
    config = EsmConfig(
        vocab_size=len(TOKENS), mask_token_id=MASK, pad_token_id=PAD, hidden_size=32, num_hidden_layers=3,
        num_attention_heads=4, intermediate_size=64, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.0,
        max_position_embeddings=32, initializer_range=0.02, position_embedding_type="rotary", token_dropout=True,
        emb_layer_norm_before=False)
    model = EsmForMaskedLM(config)
    if name == "embedding_init":
        model.set_input_embeddings(torch.nn.Embedding(len(TOKENS), 32, padding_idx=PAD))
        model.tie_weights()
    if name == "pure_bf16":
        model = model.bfloat16()
    return model.train()


def make_optimizer(model, name):
    source = model.esm if name == "head_left_out" else model
    decayed = [p for p in source.parameters() if p.ndim >= 2]
    others = [p for p in source.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.98), eps=1e-8, fused=True)


def rate_at(step, name):
    if name == "lr_too_high":
        return 20 * PEAK * (STEPS - step) / STEPS
    if step < WARMUP:
        return PEAK * (step + 1) / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    if name == "cosine":
        return PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
    return PEAK * (1 - done)


def masked_loss(logits, labels, chosen):
    losses = F.cross_entropy(logits.float().transpose(1, 2), labels, reduction="none")
    return (losses * chosen).sum() / chosen.sum()


def evaluate(model, held_out):
    model.eval()
    with torch.no_grad():
        inputs, labels, chosen = held_out
        logits = model(input_ids=inputs, attention_mask=(inputs != PAD).long()).logits
        return masked_loss(logits, labels, chosen).item()


def make_held_out(seed):
    proteins = Proteins(seed + 9000)
    tokens = proteins.batch(16)
    inputs, chosen = proteins.mask(tokens)
    return inputs, tokens, chosen


def train(name: str, seed: int, at: int, every: int, out: str) -> list[float]:
    at = FAULTS.get(name, {}).get("at", at)
    until = at + FAULTS.get(name, {}).get("lasts", STEPS)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    proteins = Proteins(seed)
    held_out = make_held_out(seed)
    model = make_model(name)
    optimizer = make_optimizer(model, name)
    average = copy.deepcopy(model).eval() if name == "average" else None
    recorder = None
    if name != "resume":
        recorder = lab.record(model, optimizer, every=every, out=out)
    losses = []
    for step in range(STEPS):
        bad = at <= step < until

        if name == "resume" and step == 60:
            saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model = make_model(name)
            optimizer = make_optimizer(model, name)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            recorder = lab.record(model, optimizer, every=every, out=out, first_step=step)
        if name == "moments_lost" and step == at:
            optimizer.state.clear()
        if name == "block_frozen" and step == at:
            for parameter in model.esm.encoder.layer[1].parameters():
                parameter.requires_grad_(False)
        if name == "eval_mode" and step == at:
            evaluate(model, held_out)

        progress = step - at if name == "schedule_restarts" and bad else step
        for group in optimizer.param_groups:
            group["lr"] = rate_at(progress, name)

        size = MICRO_BATCH
        if name == "batch_ramp":
            size = (4, 6, 8, 8)[step // 60]
        total = 0.0
        for micro in range(ACCUMULATE):
            tokens = proteins.batch(size, nucleotides=name == "bad_shard" and bad)
            share = MASKED
            if name == "empty_mask" and step == at and micro == 1:
                share = 0.0
            inputs, chosen = proteins.mask(tokens, share)
            labels = tokens
            if name == "labels_shifted" and bad:
                labels = torch.cat([tokens[:, 1:], tokens[:, -1:]], dim=1)
            attention_mask = (tokens != PAD).long()
            if name == "no_attention_mask" and bad:
                attention_mask = None
            logits = model(input_ids=inputs, attention_mask=attention_mask).logits
            loss = masked_loss(logits, labels, chosen) / ACCUMULATE
            loss.backward()
            total = total + loss.detach()

        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if not (name == "no_zero_grad" and bad):
            model.zero_grad()
        if average is not None:
            with torch.no_grad():
                for kept, current in zip(average.parameters(), model.parameters()):
                    kept.lerp_(current, 0.02)
        if recorder is not None:
            recorder.step(total)
        losses.append(total.item())

        if name == "evaluate" and step % 20 == 19:
            evaluate(model, held_out)
            model.train()
    recorder.close()
    return losses
