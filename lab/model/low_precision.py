"""Products whose operands are rounded to fp8, MX or NVFP4, forward and backward; sums are in fp32.

The two products of attention have operands in bf16 unless a config asks otherwise.

Formats and scales: arXiv:2209.05433 (fp8), Open Compute Project MX 1.0, arXiv:2509.25149 (NVFP4). Gradients of weights
in MX: Cim et al. 2026 (arXiv:2605.09825).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lab.core.axes import over
from lab.core.hooks import announce
from lab.core.number_formats import (
    E2M1,
    E4M3,
    FORMATS,
    GOLDEN,
    MX_BLOCK,
    NV_BLOCK,
    WORD,
    NumberFormat,
    begin_random,
    joined,
    mixed_bits,
    mx_blocks,
    next_random,
    nv_blocks,
    nv_scales,
    random_noise,
    rounded,
    rounded_to,
    signed,
    split,
    whole_blocks,
    within,
)

PRECISIONS = ("fp8_current", "fp8_delayed", "mxfp8", "mxfp4", "nvfp4")
HISTORY = 1024  # steps whose largest magnitudes delayed scaling knows
LARGEST_SCALE = 2.0**60  # so that the product of two is a number of fp32
OPERANDS = ("left", "right", "gradient")
OF_ATTENTION = (".attention.scores", ".attention.mixing")  # queries times keys, weights times values
# Signs of the random Hadamard transform of NVFP4, drawn once.
SIGNS = (1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, 1, -1, -1)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class LowPrecision:
    """How products round their operands, in the words of a config; ``at`` says it of one product.

    Attributes:
        precision: one of ``PRECISIONS``; ``bf16`` of a product of attention that does not round as all others do.
        gradient_format: of gradients in fp8 and MXFP8.
        stochastic_rounding: ``none``, ``gradients`` or ``all``: which operands are rounded at random.
        norm_gains: whether gains of norms are ``rounded``, too, or stay ``fp32``.
        kept_in_bf16: ``ends`` are the first block and the head; or ``none``.
        attention_precision: whether the two products of attention round the ``same`` as all others, or to ``bf16``. The
            second contracts positions, so blocks of MX and NVFP4 join a value with later ones: attention is not causal
            then.
        weight_gradients: how the product that makes the gradient of a weight rounds in MX: as all others (``rounded``),
            so after its operands were multiplied by a Hadamard matrix without random signs (``hadamard``), or to
            ``bf16``.
        operands: every operand that rounds, by product and name.
        where: the product.
    """

    precision: str
    gradient_format: str
    stochastic_rounding: str
    norm_gains: str
    kept_in_bf16: str
    attention_precision: str
    weight_gradients: str
    operands: dict[str, int] = field(default_factory=dict)
    where: str = ""

    def at(self, where: str) -> LowPrecision | torch.dtype:
        """The rounding of one product of the model, or of gains; bf16 at the ends if these are kept."""
        if where.endswith(OF_ATTENTION) and self.attention_precision == "bf16":
            return replace(self, where=where, precision="bf16")
        if self._is_kept(where):
            return torch.bfloat16
        for name in OPERANDS:
            self.operands.setdefault(f"{where}.{name}", len(self.operands))
        return replace(self, where=where)

    def rounds_gain(self, where: str) -> bool:
        """Whether the gain of a norm of this name is rounded."""
        return self.norm_gains == "rounded" and not self._is_kept(where)

    def _is_kept(self, where: str) -> bool:
        return self.kept_in_bf16 == "ends" and where.startswith(("block0.", "head", "readout"))

    @property
    def is_stateful(self) -> bool:
        """Whether a step depends on those before by more than its weights."""
        return self.precision == "fp8_delayed" or self.stochastic_rounding != "none"

    def begin(self, seeds: Sequence[int], device: torch.device) -> dict[str, Tensor]:
        """What is kept between steps: largest magnitudes ``[r operand step]``, and a random number of each run."""
        state: dict[str, Tensor] = {}
        if self.precision == "fp8_delayed":
            state["history"] = torch.zeros(len(seeds), len(self.operands), HISTORY, device=device)
            state["passes"] = torch.zeros(len(seeds), dtype=torch.int64, device=device)
        if self.stochastic_rounding != "none":
            state["random"] = begin_random(seeds, device)
        return state

    def format_of(self, operand: str) -> NumberFormat:
        """The format of an operand."""
        if self.precision in ("mxfp4", "nvfp4"):
            return E2M1
        return FORMATS[self.gradient_format] if operand == "gradient" else E4M3

    def is_random(self, operand: str) -> bool:
        """Whether an operand is rounded at random."""
        return self.stochastic_rounding == "all" or (self.stochastic_rounding == "gradients" and operand == "gradient")


class RoundingPass:
    """The forward and backward pass of a step: its scales of earlier steps, and its random numbers.

    Args:
        low: of the model.
        state: from ``LowPrecision.begin``.
    """

    def __init__(self, low: LowPrecision, state: Tensors) -> None:
        self.low, self.state = low, state
        self.seen: dict[int, Tensor] = {}  # largest magnitudes of this step, by operand
        if "history" in state:
            self.largest_ro = state["history"].amax(-1)
        if "random" in state:
            numbers_o = torch.arange(1, 1 + len(low.operands), device=state["random"].device) * GOLDEN & WORD
            self.keys_ro = mixed_bits(state["random"][:, None] ^ numbers_o)

    def largest(self, operand: str, now_r: Tensor) -> Tensor:
        """The largest magnitude of earlier steps ``[r]``, 0 without any; it notes this step's for later ones."""
        index = self.low.operands[operand]
        self.seen[index] = torch.where(now_r.isfinite(), now_r, 0.0)
        return self.largest_ro[:, index]

    def key(self, operand: str, salt: int) -> Tensor:
        """A random number of 32 bits in int32 for each run."""
        return signed(mixed_bits(self.keys_ro[:, self.low.operands[operand]] ^ salt))

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the largest magnitudes of this step in the place of the oldest, and draw the next random number."""
        if "history" in self.state:
            passes_r, history = self.state["passes"], self.state["history"]
            zero_r = torch.zeros_like(history[:, 0, 0])
            seen_ro1 = torch.stack([self.seen.get(index, zero_r) for index in range(history.shape[1])], 1)[..., None]
            history.scatter_(2, (passes_r % HISTORY)[:, None, None].expand_as(seen_ro1), seen_ro1)
            passes_r.add_(1)
        if "random" in self.state:
            self.state["random"].copy_(next_random(self.state["random"]))


_pass: ContextVar[RoundingPass | None] = ContextVar("pass", default=None)


@contextmanager
def rounding_pass(low: LowPrecision | None, state: Tensors) -> Iterator[RoundingPass | None]:
    """Within the block products round with this state; None if there is none to keep."""
    rounding = RoundingPass(low, state) if low and state else None
    token = _pass.set(rounding)
    try:
        yield rounding
    finally:
        _pass.reset(token)


class Rounding:
    """Rounds the operands of one product."""

    def __init__(self, low: LowPrecision) -> None:
        self.low, self.during = low, _pass.get()

    def noise(self, x_r: Tensor, operand: str, salt: int = 0) -> Tensor | None:
        """Random numbers of the shape of an operand, if it is rounded at random."""
        if self.during is None or not self.low.is_random(operand):
            return None
        return random_noise(x_r, self.during.key(f"{self.low.where}.{operand}", salt))

    def announce(self, operand: str, before: Tensor, after: Tensor, beyond: Tensor | float) -> None:
        """Announce an operand before and after its rounding, and where it saturates, all in one unit."""
        announce("rounding", f"{self.low.where}.{operand}", before, after, beyond)
        if operand == "gradient":
            announce("gradient_rounding", self.low.where, before, after, beyond)

    # --- one scale for each tensor ---

    def scaled(self, x_r: Tensor, operand: str) -> tuple[Tensor, Tensor]:
        """Codes of an operand in fp8, and the number per run that they are to be multiplied by."""
        kept_in, is_delayed = self.low.format_of(operand), self.low.precision == "fp8_delayed"
        largest_r = magnitude(x_r)
        if is_delayed:
            zero_r = torch.zeros_like(largest_r)
            largest_r = self.during.largest(f"{self.low.where}.{operand}", largest_r) if self.during else zero_r
        scale_r = torch.where(largest_r == 0, 1.0, kept_in.largest / largest_r).clamp(max=LARGEST_SCALE)
        before_r = x_r * over(scale_r, x_r)
        codes_r = (rounded_to if is_delayed else within)(before_r, kept_in, self.noise(x_r, operand))
        self.announce(operand, before_r, codes_r, kept_in.beyond)
        return codes_r, 1 / scale_r

    # --- a scale for each block along the contraction ---

    def blocked(self, x_r: Tensor, operand: str, axis: int, *, is_first: bool = True) -> Tensor:
        """An operand, rounded in blocks along an axis counted from the end; ``is_first`` of the two axes it has."""
        kept_in = self.low.format_of(operand)
        size = NV_BLOCK if self.low.precision == "nvfp4" else MX_BLOCK
        blocks = split(x_r, axis, size)
        noise = self.noise(blocks, operand, salt=int(not is_first))
        if self.low.precision == "nvfp4":
            of_tensor: Any = over(magnitude(x_r), blocks)
            scale = nv_scales(blocks.abs().amax(axis, keepdim=True), of_tensor)
            kept = nv_blocks(blocks, scale, noise)
        else:
            kept, scale = mx_blocks(blocks, axis, kept_in, noise)
        if is_first:
            self.announce(operand, blocks, kept, scale * kept_in.beyond)
        return joined(kept, axis, x_r.shape[axis])

    def in_squares(self, weight_r: Tensor) -> Tensor:
        """A weight in NVFP4, rounded in blocks of 16 by 16, alike for both products that it enters."""
        squares = split(split(weight_r, -1, NV_BLOCK), -3, NV_BLOCK)  # [... i 16 j 16]
        of_tensor: Any = over(magnitude(weight_r), squares)
        scale = nv_scales(squares.abs().amax((-1, -3), keepdim=True), of_tensor)
        kept = nv_blocks(squares, scale, self.noise(squares, "right"))
        self.announce("right", squares, kept, scale * E2M1.beyond)
        return joined(joined(kept, -3, weight_r.shape[-2]), -1, weight_r.shape[-1])


def magnitude(x_r: Tensor) -> Tensor:
    """Largest magnitude of each run ``[r]``; NaN where the run holds a NaN."""
    flat_rn = x_r.flatten(1)
    return torch.maximum(flat_rn.amax(1), -flat_rn.amin(1))


@cache
def _hadamard_matrix(dtype: torch.dtype, device: torch.device, has_signs: bool) -> Tensor:
    """Sylvester's matrix of 16 rows, orthogonal, with signs each column times its own."""
    row_i = torch.arange(NV_BLOCK)
    common_ij = row_i[:, None] & row_i
    odd_ij = torch.stack([common_ij >> bit & 1 for bit in range(4)]).sum(0) % 2
    signs_j = torch.tensor(SIGNS) if has_signs else torch.ones(NV_BLOCK, dtype=torch.int64)
    matrix_ij: Tensor = (1 - 2 * odd_ij) * signs_j * NV_BLOCK**-0.5
    return matrix_ij.to(device, dtype)


def hadamard(x_r: Tensor, *, has_signs: bool) -> Tensor:
    """Multiply blocks of 16 along the last axis but one by an orthogonal matrix of signs, the last block filled with 0.

    A product contracted over that axis stays, and an outlier is spread over its block.  Without ``has_signs`` the first
    number of a block becomes the sum of all over 4.
    """
    blocks = whole_blocks(x_r, -2, NV_BLOCK)  # [... n 16 k]
    flat = blocks.flatten(0, -3)
    mixed = torch.bmm(_hadamard_matrix(x_r.dtype, x_r.device, has_signs).expand(len(flat), -1, -1), flat)
    return mixed.view_as(blocks).flatten(-3, -2)


class ScaledProduct(torch.autograd.Function):
    """A product of ``[... i j]`` and ``[... j k]`` in fp8, with one scale for each operand and run."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, low: LowPrecision) -> Tensor:
        rounding = ctx.rounding = Rounding(low)
        ctx.context = copy_context()  # of who listens, since other threads carry out the backward pass on a GPU
        (a, a_unit_r), (b, b_unit_r) = rounding.scaled(a, "left"), rounding.scaled(b, "right")
        ctx.save_for_backward(a, a_unit_r, b, b_unit_r)
        return _times(torch.matmul(a, b), a_unit_r * b_unit_r)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        a, a_unit_r, b, b_unit_r = ctx.saved_tensors
        gradient, unit_r = ctx.context.run(ctx.rounding.scaled, gradients[0], "gradient")
        of_a, of_b = ctx.needs_input_grad[:2]
        return (
            _times(torch.matmul(gradient, b.transpose(-1, -2)), unit_r * b_unit_r) if of_a else None,
            _times(torch.matmul(a.transpose(-1, -2), gradient), unit_r * a_unit_r) if of_b else None,
            None,
        )


class BlockedProduct(torch.autograd.Function):
    """A product of ``[... i j]`` and ``[... j k]`` with scales of blocks along what is contracted.

    Each of three products contracts another axis, so each operand is rounded twice, save a weight in NVFP4.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, low: LowPrecision, has_weight: bool) -> Tensor:
        rounding = ctx.rounding = Rounding(low)
        ctx.context, ctx.is_nvfp4_weight = copy_context(), has_weight and low.precision == "nvfp4"
        ctx.weight_gradients = low.weight_gradients if has_weight else "rounded"
        kept_b = rounding.in_squares(b) if ctx.is_nvfp4_weight else rounding.blocked(b, "right", -2)
        ctx.save_for_backward(a, kept_b if ctx.is_nvfp4_weight else b)
        return torch.matmul(rounding.blocked(a, "left", -1), kept_b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        pair: tuple[Tensor | None, Tensor | None] = ctx.context.run(BlockedProduct._gradients, ctx, gradients[0])
        return *pair, None, None

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        of_a = of_b = None
        again: Callable[..., Tensor] = ctx.rounding.blocked
        if ctx.needs_input_grad[0]:
            kept_b = b if ctx.is_nvfp4_weight else again(b, "right", -1, is_first=False)
            of_a = torch.matmul(again(gradient, "gradient", -1), kept_b.transpose(-1, -2))
        if ctx.needs_input_grad[1]:
            if ctx.is_nvfp4_weight or ctx.weight_gradients == "hadamard":
                a, gradient = (hadamard(x, has_signs=ctx.is_nvfp4_weight) for x in (a, gradient))
            if ctx.weight_gradients == "bf16":
                kept_a, kept_gradient = rounded(a, torch.bfloat16), rounded(gradient, torch.bfloat16)
            else:
                kept_a, kept_gradient = (
                    again(x, operand, -2, is_first=False) for x, operand in ((a, "left"), (gradient, "gradient"))
                )
            of_b = torch.matmul(kept_a.transpose(-1, -2), kept_gradient)
        return of_a, of_b


class ProductOfBfloat16(torch.autograd.Function):
    """A product of ``[... i j]`` and ``[... j k]`` whose operands have bf16 values, and whose results stay fp32.

    So fused attention keeps scores: rounded to bf16, large ones are far from each other.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        a, b = rounded(a, torch.bfloat16), rounded(b, torch.bfloat16)
        ctx.save_for_backward(a, b)
        return torch.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        gradient = rounded(gradients[0], torch.bfloat16)
        return torch.matmul(gradient, b.transpose(-1, -2)), torch.matmul(a.transpose(-1, -2), gradient)


def _times(made_r: Tensor, number_r: Tensor) -> Tensor:
    factor: Any = over(number_r, made_r)
    return made_r.mul_(factor)


def low_precision_product(a: Tensor, b: Tensor, low: LowPrecision, *, has_weight: bool) -> Tensor:
    """Multiply over the last two axes with rounded operands; ``has_weight`` says that ``b`` is a weight."""
    if low.precision == "bf16":
        return ProductOfBfloat16.apply(a.float(), b.float())  # type: ignore
    if low.precision in ("fp8_current", "fp8_delayed"):
        return ScaledProduct.apply(a.float(), b.float(), low)  # type: ignore
    return BlockedProduct.apply(a.float(), b.float(), low, has_weight)  # type: ignore


class RoundedGain(torch.autograd.Function):
    """A gain ``[r ...]``, rounded as an operand of products is, with one scale or in blocks; its gradient is not."""

    @staticmethod
    def forward(ctx: Any, gain_r: Tensor, low: LowPrecision) -> Tensor:
        if low.precision == "nvfp4":
            blocks = split(gain_r, -1, NV_BLOCK)
            of_tensor: Any = over(magnitude(gain_r), blocks)
            kept = nv_blocks(blocks, nv_scales(blocks.abs().amax(-1, keepdim=True), of_tensor))
        elif low.precision in ("mxfp8", "mxfp4"):
            kept, _ = mx_blocks(split(gain_r, -1, MX_BLOCK), -1, low.format_of("right"))
        else:
            unit_r = magnitude(gain_r) / E4M3.largest
            unit_r = torch.where(unit_r == 0, 1.0, unit_r)
            return within(gain_r / over(unit_r, gain_r), E4M3) * over(unit_r, gain_r)
        return joined(kept, -1, gain_r.shape[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def rounded_gain(gain_r: Tensor, low: LowPrecision | None) -> Tensor:
    """A gain as the model computes with it."""
    return gain_r if low is None else RoundedGain.apply(gain_r, low)  # type: ignore
