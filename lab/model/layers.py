"""Layers, whose weights lead with the run axis, and GELU."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from lab.core import machine
from lab.core.axes import in_whole_vectors
from lab.core.number_formats import Format, as_kept_in
from lab.core.roles import Role
from lab.model.low_precision import LowPrecision, low_precision_product, rounded_gain

GELU_SLOPE, GELU_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715
MULTIPLIES_BF16 = machine.multiplies_bf16()

Operands = Format | LowPrecision  # how products round


class Gelu(torch.autograd.Function):
    """GELU in its tanh form, written as x sigmoid(2 u) with u = sqrt(2/pi) (x + 0.044715 x^3).

    (1 + tanh u) / 2 equals sigmoid(2 u), which a CPU computes several times faster.

    References:
        Hendrycks & Gimpel, arXiv:1606.08415, sec. 2.
    """

    @staticmethod
    def forward(ctx: Any, x_r: Tensor) -> Tensor:
        gate_r = (
            torch.addcmul(x_r.new_full((), GELU_SLOPE), x_r, x_r, value=GELU_SLOPE * GELU_CUBE).mul_(x_r).sigmoid_()
        )
        ctx.save_for_backward(x_r, gate_r)
        return x_r * gate_r

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x_r, gate_r = ctx.saved_tensors
        bend_r = torch.addcmul(x_r.new_full((), GELU_SLOPE), x_r, x_r, value=3 * GELU_SLOPE * GELU_CUBE).mul_(x_r)
        inner_r: Tensor = torch.ops.aten.sigmoid_backward(bend_r, gate_r)
        return inner_r.add_(gate_r).mul_(gradients[0])


def gelu(x_rbtm: Tensor) -> Tensor:
    """Apply GELU to every entry; a run's result has the same bits at every index of the fleet."""
    return in_whole_vectors(Gelu.apply, x_rbtm)


# Standard deviation of a unit normal truncated at two standard deviations; initial values are divided by it.
TRUNCATED_STD = 0.87962566103423978
LAYERNORM_EPS = 1e-6


def rounding_at(operands: Operands | None, where: str) -> Operands | None:
    """How one product of the model rounds."""
    return operands.at(where) if isinstance(operands, LowPrecision) else operands


class ProductInFp32(torch.autograd.Function):
    """The product of ``[... i j]`` and ``[... j k]`` in bf16, for a CPU that multiplies fp32 faster."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return torch.matmul(a.float(), b.float()).to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        gradient = gradients[0].float()
        of_a, of_b = ctx.needs_input_grad
        return (
            torch.matmul(gradient, b.float().transpose(-1, -2)).to(a.dtype) if of_a else None,
            torch.matmul(a.float().transpose(-1, -2), gradient).to(b.dtype) if of_b else None,
        )


def product(a: Tensor, b: Tensor, operands: Operands | None, *, has_weight: bool = False) -> Tensor:
    """Multiply matrices over the last two axes.

    Args:
        a: ``[... i j]``.
        b: ``[... j k]``.
        operands: the precision to which both operands are rounded first; None leaves them as they are.
        has_weight: whether ``b`` is a weight, which NVFP4 rounds otherwise.

    Returns:
        ``[... i k]``, in the precision ``operands`` if given; the caller casts it back.  The products of the backward
        pass round their operands and results alike, those of fp8, MX and NVFP4 their operands alone.  Emulated formats
        multiply in fp32, and their results stay fp32.
    """
    if operands is None:
        return torch.matmul(a, b)
    if isinstance(operands, LowPrecision):
        return low_precision_product(a, b, operands, has_weight=has_weight)
    if operands is not torch.bfloat16:
        return as_kept_in(torch.matmul(as_kept_in(a, operands), as_kept_in(b, operands)), operands)
    multiply = torch.matmul if a.device.type != "cpu" or MULTIPLIES_BF16 else ProductInFp32.apply
    return multiply(a.to(operands), b.to(operands))


class Layer(nn.Module):
    """A module that owns one weight ``[r ...]``.

    Args:
        runs: size of the run axis.
        shape: the shape of one run's weight.
        role: its role, by which the parametrization scales it.
        fan_in: number of inputs, which sets the initial scale.

    Attributes:
        gain_rounding: how the gain of a norm is rounded; other layers ignore it.
    """

    gain_rounding: LowPrecision | None = None

    def __init__(self, runs: int, shape: tuple[int, ...], role: Role, fan_in: int) -> None:
        super().__init__()
        self.role, self.fan_in = role, fan_in
        self.weight = nn.Parameter(torch.empty(runs, *shape))

    def fixed_value(self) -> Tensor | None:
        """Return the initial value of one run in float64 if it is the same for every seed, else None."""
        return torch.ones(self.weight.shape[1:], dtype=torch.float64) if self.role is Role.GAIN else None


class Embedding(Layer):
    """Tokens ``[r b t]`` to vectors ``[r b t d]``; initial values are normal, as in Flax."""

    def __init__(self, runs: int, vocabulary: int, width: int) -> None:
        super().__init__(runs, (vocabulary, width), Role.EMBEDDING, fan_in=width)

    def forward(self, tokens_rbt: Tensor) -> Tensor:
        runs, vocabulary, _ = self.weight.shape
        first_row_r = torch.arange(runs, device=tokens_rbt.device).view(-1, 1, 1) * vocabulary
        return F.embedding(tokens_rbt + first_row_r, self.weight.flatten(0, 1))


class Linear(Layer):
    """``x @ W`` per run, ``[r b t i]`` to ``[r b t o]``, without bias; initial values are truncated normal.

    The result has the precision ``operands``, as in ``product``.
    """

    def __init__(
        self, runs: int, fan_in: int, fan_out: int, operands: Operands | None, role: Role = Role.MATRIX
    ) -> None:
        super().__init__(runs, (fan_in, fan_out), role, fan_in)
        self.operands = operands

    def forward(self, x_rbti: Tensor) -> Tensor:
        x_rni = rearrange(x_rbti, "r b t i -> r (b t) i")
        return product(x_rni, self.matrix(), self.operands, has_weight=True).view(*x_rbti.shape[:3], -1)

    def matrix(self) -> Tensor:
        """Return the matrix ``[r i o]`` that multiplies."""
        return self.weight


class Scale(Layer):
    """Multiplies the last axes by a learned factor, and ``value`` at first.

    Args:
        runs: size of the run axis.
        shape: the shape of one run's factor.
        value: the factor at first.
        stored: the weight at first; a step of Adam changes the factor by ``value / stored`` times the learning rate.
    """

    def __init__(self, runs: int, shape: tuple[int, ...], value: float = 1.0, stored: float | None = None) -> None:
        super().__init__(runs, shape, Role.GAIN, fan_in=shape[-1])
        self.start = value if stored is None else stored
        self.unit = 1.0 if stored is None else value / stored

    def fixed_value(self) -> Tensor:
        return torch.full(self.weight.shape[1:], self.start, dtype=torch.float64)

    def factor(self, x_r: Tensor) -> Tensor:
        """Return the factor, shaped to meet the last axes of a tensor ``[r ...]``."""
        axes = self.weight.ndim - 1
        return self.unit * self.value().view(len(self.weight), *(1,) * (x_r.ndim - 1 - axes), *self.weight.shape[1:])

    def value(self) -> Tensor:
        """Return the weight as the model computes with it."""
        return self.weight

    def forward(self, x_r: Tensor) -> Tensor:
        return x_r.to(self.weight.dtype) * self.factor(x_r)


class LayerNorm(Layer):
    """LayerNorm over the last axis with a gain and no bias (epsilon 1e-6, as in Flax), in the gain's precision."""

    def __init__(self, runs: int, width: int) -> None:
        super().__init__(runs, (width,), Role.GAIN, fan_in=width)

    def forward(self, x_r: Tensor) -> Tensor:
        gain_r = rounded_gain(self.weight, self.gain_rounding).view(len(self.weight), *(1,) * (x_r.ndim - 2), -1)
        return F.layer_norm(x_r.to(gain_r.dtype), x_r.shape[-1:], eps=LAYERNORM_EPS) * gain_r


def draw(layer: Layer, name: str, seed: int, std: float) -> Tensor:
    """Draw one run's initial value from (seed, name) alone: arms that share a weight share its values.

    The CPU draws it in float64, so that every device and precision starts from the same numbers.

    Args:
        layer: gives the shape and the role.
        name: name of the weight.
        seed: seed of the run.
        std: standard deviation; unused for gains, which are ones.

    Returns:
        The value of one run, without a run axis, in float64.
    """
    shape, fixed = layer.weight.shape[1:], layer.fixed_value()
    if fixed is not None:
        return fixed
    if std == 0:  # a truncated normal needs a positive std
        return torch.zeros(shape, dtype=torch.float64)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    value = torch.empty(shape, dtype=torch.float64)
    if layer.role is Role.EMBEDDING:
        return value.normal_(0.0, std, generator=generator)
    untruncated = std / TRUNCATED_STD
    return nn.init.trunc_normal_(value, 0.0, untruncated, -2 * untruncated, 2 * untruncated, generator=generator)
