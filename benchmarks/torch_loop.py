"""The training loop of a PyTorch user: one model, nn.Module, AdamW; plain, or tuned."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from shapes import BATCH, HEAD_WIDTH, LENGTH, VOCABULARY, depth
from torch import Tensor, nn

from lab.data.text import StandardLibrary


def rotate(x_bhtk: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
    """Apply rotary positions."""
    a_bhtk, b_bhtk = x_bhtk.chunk(2, -1)
    return torch.cat([a_bhtk * cos_tk - b_bhtk * sin_tk, b_bhtk * cos_tk + a_bhtk * sin_tk], -1)


class Block(nn.Module):
    """Attention, then an MLP; pre-LayerNorm, qk-layernorm, no biases."""

    def __init__(self, width: int, explicit: bool) -> None:
        super().__init__()
        self.explicit = explicit
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, eps=1e-6, bias=False) for _ in range(2))
        self.norm_q, self.norm_k = (nn.LayerNorm(HEAD_WIDTH, eps=1e-6, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def attend(self, q_bhtk: Tensor, k_bhsk: Tensor, v_bhsk: Tensor) -> Tensor:
        """Attend by PyTorch's own function, or by explicit scores, which are faster at short lengths in bf16."""
        if not self.explicit:
            return F.scaled_dot_product_attention(q_bhtk, k_bhsk, v_bhsk, is_causal=True)
        scores_bhts = (q_bhtk * HEAD_WIDTH**-0.5) @ k_bhsk.transpose(-1, -2)
        future_ts = torch.ones(scores_bhts.shape[-2:], dtype=torch.bool, device=scores_bhts.device).triu(1)
        return F.softmax(scores_bhts.masked_fill(future_ts, -torch.inf), -1) @ v_bhsk

    def forward(self, x_btd: Tensor, cos_tk: Tensor, sin_tk: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x_btd)).chunk(3, -1)
        q_bhtk, k_bhsk, v_bhsk = (part.unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for part in parts)
        q_bhtk, k_bhsk = rotate(self.norm_q(q_bhtk), cos_tk, sin_tk), rotate(self.norm_k(k_bhsk), cos_tk, sin_tk)
        x_btd = x_btd + self.out(self.attend(q_bhtk, k_bhsk, v_bhsk.type_as(q_bhtk)).transpose(1, 2).flatten(2))
        return x_btd + self.down(F.gelu(self.up(self.norm_2(x_btd)), approximate="tanh"))


class Model(nn.Module):
    """Tokens ``[b t]`` to logits ``[b t v]``."""

    def __init__(self, width: int, explicit: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY, bias=False)
        self.blocks = nn.ModuleList(Block(width, explicit) for _ in range(depth(width)))
        self.norm = nn.LayerNorm(width, eps=1e-6, bias=False)
        frequency_k = 10_000 ** (-torch.arange(0, HEAD_WIDTH, 2) / HEAD_WIDTH)
        angle_tk = torch.outer(torch.arange(float(LENGTH)), frequency_k)
        self.register_buffer("cos_tk", angle_tk.cos())
        self.register_buffer("sin_tk", angle_tk.sin())

    def forward(self, tokens_bt: Tensor) -> Tensor:
        x_btd = self.embedding(tokens_bt)
        for block in self.blocks:
            x_btd = block(x_btd, self.cos_tk, self.sin_tk)
        return self.head(self.norm(x_btd))


def loop(
    width: int, threads: int, *, amp: bool, compiled: bool, explicit: bool, device: str = "cpu"
) -> Callable[[], int]:
    """Build a step of one model; it returns the number of model-steps, 1."""
    torch.set_num_threads(threads)
    update, batch = _training(width, amp=amp, compiled=compiled, explicit=explicit, device=device)

    def step() -> int:
        update(batch())
        return 1

    return step


def captured_loop(width: int) -> Callable[[], int]:
    """Build a step of one compiled model in AMP on a GPU, the whole of it captured as one CUDA graph."""
    update, batch = _training(width, amp=True, compiled=True, explicit=False, device="cuda", capturable=True)
    tokens_bt = batch()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            update(tokens_bt)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        update(tokens_bt)

    def step() -> int:
        tokens_bt.copy_(batch())
        graph.replay()
        return 1

    return step


def _training(
    width: int, *, amp: bool, compiled: bool, explicit: bool, device: str, capturable: bool = False
) -> tuple[Callable[[Tensor], None], Callable[[], Tensor]]:
    """Return what updates a model by a batch, and what draws the next batch."""
    model = Model(width, explicit).to(device)
    forward = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=capturable
    )
    precision = torch.autocast(device, torch.bfloat16) if amp else contextlib.nullcontext()
    corpus, batches = StandardLibrary(seed=0).open(), itertools.count()

    def batch() -> Tensor:
        return torch.from_numpy(corpus.batch(0, next(batches), BATCH, LENGTH)).to(device)

    def update(tokens_bt: Tensor) -> None:
        with precision:
            logits_btv = forward(tokens_bt[:, :-1])
        logits_btv = logits_btv.float()
        loss = F.cross_entropy(logits_btv.flatten(0, 1), tokens_bt[:, 1:].flatten())
        loss = loss + 1e-4 * logits_btv.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update, batch
