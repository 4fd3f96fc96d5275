"""fp8, MX and NVFP4 round the operands of every product as their specifications say, and nothing between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.core.number_formats import E4M3, E5M2, NumberFormat, rounded_to

TORCHS = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


def numbers() -> Tensor:
    """Of every sign and exponent, and many that lie halfway between two of a format."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=generator, dtype=torch.int64).to(torch.int32)
    steps = torch.arange(-4096, 4096, dtype=torch.float32)
    wild = bits.view(torch.float32)
    every = [wild[wild.abs() > 2.0**-126], *(steps * 2.0**power for power in range(-20, 5, 3))]
    return torch.cat([*every, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])


@pytest.mark.parametrize("kept_in", TORCHS, ids=lambda each: each.name)
def test_codes_of_fp8_are_those_of_torch(kept_in: NumberFormat) -> None:
    x = numbers()
    theirs = x.clamp(-kept_in.largest, kept_in.largest).to(TORCHS[kept_in]).float()
    torch.testing.assert_close(rounded_to(x, kept_in), theirs, rtol=0, atol=0, equal_nan=True)
