"""Dropout by a hash of a seed and of a weight's row and column.

The result does not depend on chunks, devices or kernels, so backward drops the weights that forward dropped. A CUDA
graph that is replayed with a new seed drops other weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Int

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # multipliers of the hash function lowbias32, as int32


def draw_seed(dropout: float, device: torch.device) -> Int[Tensor, ""]:
    """Draw a seed from torch's generator; zero without dropout."""
    return torch.randint(2**31, (), device=device) if dropout else torch.zeros((), dtype=torch.int64, device=device)


def scrambled(x: Tensor) -> Tensor:
    """Hash int64 numbers to int32 (lowbias32)."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)).to(torch.int32)


def hashes(rows: int, columns: int, seed: Int[Tensor, ""]) -> tuple[Int[Tensor, " rows"], Int[Tensor, " columns"]]:
    """The int32 hashes of the row and column indices of a matrix of weights."""
    seed = scrambled(seed.to(torch.int64)).to(torch.int64)
    row = scrambled(torch.arange(rows, device=seed.device) + seed)
    column = scrambled(torch.arange(columns, device=seed.device) - seed)
    return row, column


def threshold(rate: float) -> int:
    """The int32 below which a hash drops its weight; hashes are uniform over all int32."""
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)


def keep(row: Tensor, column: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """The factor of each weight: 0 with probability ``rate``, else 1 / (1 - rate). Hashes of rows and columns
    broadcast."""
    x = (row ^ column).mul_(MULTIPLIERS[0])
    x = x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(MULTIPLIERS[1])
    return (x >= threshold(rate)).to(dtype).div_(1 - rate)
