"""Attention as any kernel computes it: scores of a sample of queries with all keys, from what the kernel is given."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lab.model.watched import SOFTMAXES
from labwatch.recorder.parts import names

MASKED = -1e8  # far below any score; hand-written masks add or fill in -1e9
ROWS, POSITIONS = 4, 64  # of a batch, so many rows and positions in each are sampled, evenly


class Scores(NamedTuple):
    """Scores ``[r b h t s]`` of sampled queries before any cap, -inf where a key is not seen, and the weights.

    Attributes:
        ahead: the share of the weights that is on keys after the query.
        seen: the share of the keys up to the query that it may see.
    """

    scores_rbhts: Tensor
    weights_rbhts: Tensor
    ahead: Tensor
    seen: Tensor


Receive = Callable[[Callable[[], Scores]], None]  # gets a function that computes them


def evenly(length: int, most: int) -> list[int]:
    """At most so many indices, evenly spaced up to the last."""
    count = min(length, most)
    return [(number + 1) * length // count - 1 for number in range(count)]


class Attending(TorchFunctionMode):
    """Within it, ``receive`` gets the scores of each call of an attention kernel, or of a softmax over scores.

    Args:
        receive: is called with them.
        drop: is called with the share that a dropout drops.
        call: is called with each function of torch, what it is given and what it returns.
        shape: the batch size and length of the hidden states, by which a softmax is known to be of attention.
    """

    def __init__(
        self,
        receive: Receive,
        drop: Callable[[float], None],
        call: Callable[..., None],
        shape: Callable[[], tuple[int, int] | None],
    ) -> None:
        super().__init__()
        self.receive, self.drop, self.call, self.shape = receive, drop, call, shape

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.multi_head_attention_forward:  # torch's own module calls a kernel inside of it
            with self:
                return torch._C._skip_one_hop_torch_function(func, types, tuple(args), dict(given))
        if func is F.dropout:
            named = dict(zip(("input", "p", "training"), args, strict=False)) | dict(given)
            self.drop(named.get("p", 0.5) if named.get("training", True) else 0.0)
        kernel = names()["kernels"].get(getattr(func, "__name__", "").partition(".")[0])
        if kernel:
            named = dict(zip(kernel["arguments"], args, strict=False)) | dict(given)
            self.receive(lambda: sampled(named, kernel["axes"]))
            self.drop(named.get("dropout_p", 0.0))
        elif func in SOFTMAXES and (shape := self.shape()) and (scores := _of_heads(args[0], *shape)) is not None:
            self.receive(lambda: _of_softmax(scores))
        output = func(*args, **given)
        self.call(func, args, given, output)
        return output


def _of_heads(scores: Tensor, rows: int, length: int) -> Tensor | None:
    """Scores as ``[b h t s]``, which may be given as ``[(b h) t s]``; None if they are not of attention."""
    if scores.ndim == 3 and scores.shape[0] > rows and scores.shape[0] % rows == 0:
        scores = scores.reshape(rows, -1, *scores.shape[1:])
    return scores if scores.ndim == 4 and scores.shape[::2] == (rows, length) else None


@contextmanager
def intercepting_transformers(receive: Receive) -> Iterator[None]:
    """Within the block, ``receive`` gets the scores of attention functions of transformers that any config names."""
    interface: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", None)
    if not hasattr(interface, "get_interface"):
        yield
        return
    get = interface.get_interface

    def get_interface(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        function = get(*args, **kwargs)

        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any = None, *rest: Any, **options: Any) -> Any:
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", True) if causal is None else causal
            given = {**options, "query": query, "key": key, "attn_mask": mask, "is_causal": causal}
            receive(lambda: sampled(given, "bhtk"))
            return function(module, query, key, value, mask, *rest, **options)

        return attend

    interface.get_interface = get_interface
    try:
        yield
    finally:
        del interface.get_interface


@torch.no_grad()
def sampled(given: Mapping[str, Any], axes: str) -> Scores:
    """The scores of a sample of queries with all keys, as a kernel with these arguments computes them.

    Args:
        given: arguments by their names.
        axes: of queries and keys, ``bhtk``, which may lack the heads, or ``bthk``.
    """

    def argument(part: str) -> Any:
        return next((given[name] for name in names()["arguments"][part] if given.get(name) is not None), None)

    query, key, mask = argument("query"), argument("key"), argument("mask")
    if query.ndim == 3:  # of one head, or of all heads as rows
        query, key = query[:, None], key[:, None]
        mask = mask[:, None] if isinstance(mask, Tensor) and mask.ndim == 3 else mask
    query, key = (x if axes == "bhtk" else x.transpose(1, 2) for x in (query, key))
    length, keys = query.shape[-2], key.shape[-2]
    rows, positions = evenly(len(query), ROWS), evenly(length, POSITIONS)
    q_bhtk, k_bhsk = query[rows][:, :, positions].float(), key[rows].float()
    k_bhsk = k_bhsk.repeat_interleave(q_bhtk.shape[1] // k_bhsk.shape[1], 1)
    scale = argument("scale")
    scores_bhts = q_bhtk @ k_bhsk.transpose(-1, -2) * (q_bhtk.shape[-1] ** -0.5 if scale is None else scale)
    at_t, at_s = (torch.tensor(at, device=query.device) for at in (positions, range(keys)))
    seen_bhts = torch.ones_like(scores_bhts, dtype=torch.bool)
    bias_bhts = None
    if isinstance(mask, Tensor) and mask.ndim == 2 and mask.shape == (len(query), keys):  # of padded keys
        seen_bhts &= mask[rows].bool()[:, None, None]
    elif isinstance(mask, Tensor):
        mask_bhts = mask.expand(*query.shape[:2], length, keys)[rows][:, :, positions]
        if mask.dtype == torch.bool:
            seen_bhts &= mask_bhts
        else:
            seen_bhts &= _is_seen(mask_bhts)
            bias_bhts = mask_bhts.float()
    if argument("is_causal") and not (isinstance(mask, Tensor) and mask.ndim > 2):
        seen_bhts &= at_s <= at_t[:, None] + keys - length
        if window := argument("window"):
            seen_bhts &= at_s > at_t[:, None] + keys - length - window
    before_cap_bhts = torch.where(seen_bhts, scores_bhts, -math.inf)
    if cap := argument("softcap"):
        scores_bhts = cap * torch.tanh(scores_bhts / cap)
    if bias_bhts is not None:
        scores_bhts = scores_bhts + bias_bhts
    scores_bhts = torch.where(seen_bhts, scores_bhts, -math.inf)
    return _scores(before_cap_bhts, scores_bhts, at_t + keys - length, argument("sink"))


@torch.no_grad()
def _of_softmax(scores_bhts: Tensor) -> Scores:
    """The same from scores that are about to enter a softmax, masked as they are."""
    rows, positions = evenly(len(scores_bhts), ROWS), evenly(scores_bhts.shape[-2], POSITIONS)
    at_t = torch.tensor(positions, device=scores_bhts.device) + scores_bhts.shape[-1] - scores_bhts.shape[-2]
    scores_bhts = scores_bhts[rows][:, :, positions]
    masked_bhts = torch.where(_is_seen(scores_bhts), scores_bhts.float(), -math.inf)
    return _scores(masked_bhts, masked_bhts, at_t)


def _is_seen(score: Tensor) -> Tensor:
    """Where a score or a bias is not that of a masked key; NaN is not."""
    return ~(score <= max(torch.finfo(score.dtype).min / 2, MASKED))


def _scores(before_cap_bhts: Tensor, scores_bhts: Tensor, at_t: Tensor, sink_h: Tensor | None = None) -> Scores:
    """All from scores and the keys at which queries stand; a sink of each head, which is no key, may take a share."""
    sees_nothing_bht1 = (scores_bhts == -math.inf).all(-1, keepdim=True)  # as a query that is padding
    weights_bhts = torch.where(sees_nothing_bht1, 0.0, scores_bhts.softmax(-1))
    if sink_h is not None:
        weights_bhts *= (scores_bhts.logsumexp(-1, keepdim=True) - sink_h.float()[:, None, None]).sigmoid()
    is_ahead_ts = torch.arange(scores_bhts.shape[-1], device=at_t.device) > at_t[:, None]
    ahead = torch.where(is_ahead_ts, weights_bhts, 0.0).sum() / weights_bhts.sum().clamp(min=1)
    sees_bht = (scores_bhts > -math.inf).logical_and(~is_ahead_ts).sum(-1) / (at_t + 1)
    seen = sees_bht[~sees_nothing_bht1[..., 0]].double().mean()
    return Scores(before_cap_bhts[None], weights_bhts[None], ahead, seen)
