"""Dropout decided by a hash of a weight's place and a seed, the same for all tiles, devices and kernels: backward finds
the same draws again, and a CUDA graph that is replayed with a new seed drops new weights."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = (0x7FEB352D, 0x846CA68B - 2**32)  # of the finaliser lowbias32, as int32


def draw_seed(dropout: float, device: torch.device) -> Tensor:
    """From torch's generator, if anything is to be dropped."""
    return torch.randint(2**31, (), device=device) if dropout else torch.zeros((), dtype=torch.int64, device=device)


def scrambled(x: Tensor) -> Tensor:
    """int64 numbers to well mixed int32."""
    x = x & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return (x ^ (x >> 16)).to(torch.int32)


def places(rows: int, columns: int, seed: Tensor) -> tuple[Tensor, Tensor]:
    """int32 hashes of rows and of columns, whose combinations are the weights' places."""
    seed = scrambled(seed.to(torch.int64)).to(torch.int64)
    row = scrambled(torch.arange(rows, device=seed.device) + seed)
    column = scrambled(torch.arange(columns, device=seed.device) - seed)
    return row, column


def threshold(rate: float) -> int:
    """The int32 below which a hash, uniform over all int32, drops its weight."""
    return min(round(rate * 2**32) - 2**31, 2**31 - 1)


def keep(row: Tensor, column: Tensor, rate: float, dtype: torch.dtype) -> Tensor:
    """0 with probability ``rate``, else 1 / (1 - rate), for each combination of (broadcasting) rows and columns."""
    x = (row ^ column).mul_(MULTIPLIERS[0])
    x = x.bitwise_xor_((x >> 15) & 0x1FFFF).mul_(MULTIPLIERS[1])
    return (x >= threshold(rate)).to(dtype).div_(1 - rate)
