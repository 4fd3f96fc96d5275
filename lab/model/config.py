"""The shape of a model."""

from __future__ import annotations

from dataclasses import dataclass

from lab.core.schema import bounded


@dataclass(frozen=True)
class ModelConfig:
    """Shape of a model.

    Attributes:
        name: label of the size.
        width: entries of the residual stream, a multiple of ``head_width``.
        depth: number of blocks; without any, the model is a bigram model.
        head_width: entries of a query or key, even.

    Raises:
        ValueError: the widths do not fit.
    """

    name: str
    width: int = bounded(above=0)
    depth: int = bounded(at_least=0)
    head_width: int = bounded(above=0)

    def __post_init__(self) -> None:
        if self.width % self.head_width:
            raise ValueError(f"width {self.width} is not a multiple of head_width {self.head_width}")
        if self.head_width % 2:
            raise ValueError(f"head_width must be even for rotary positions, not {self.head_width}")

    @property
    def heads(self) -> int:
        return self.width // self.head_width
