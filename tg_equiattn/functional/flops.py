"""Counts of floating point operations of our operators, for ``torch.utils.flop_counter.FlopCounterMode``.

Matrix products count two for each multiplication and addition, also those that backward computes again. Operations
element by element do not count. The definitions of some operators have no matrix products, so torch counts nothing for
them; these operators count

- products at the pairs of a sparse relation, and sums over them: two for each pair, head and channel;
- real FFTs of length n: 2.5 n log2 n, half of what is usual for complex ones;
- attention of group elements within windows: products of queries with keys, once for all outputs that need them, and
  with encodings, and sums of values, at all offsets of the window, also beyond the border;
- attention by cross products: the products of the six features of queries and keys that scores are made of, and of
  the weights with matrices of nine components.

Padding counts like other tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def flop_formula(name: str) -> Callable[[Callable[..., int]], Any]:
    """Decorate a function of the shapes of an operator's tensors and of its settings, which counts its FLOPs."""
    return register_flop_formula(getattr(torch.ops.tg_equiattn, name))


def real_ffts(number: int, length: int) -> int:
    """FLOPs of ``number`` real FFTs of a length."""
    return number * round(2.5 * length * math.log2(max(length, 1)))
