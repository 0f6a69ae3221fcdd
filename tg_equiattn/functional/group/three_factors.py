r"""Attention weights as products of three factors, for sums over t on CPUs; see :mod:`.definition` for the sizes.

:math:`e^{\mathrm{score}} = A(t, s, D)\, S(h, t, D)\, G(h, t, s)` with :math:`A = e^{\langle q,
k \rangle}`, :math:`S = e^{\langle q, \rho_{space} \rangle}` and :math:`G = e^{\langle q, \rho_{group} \rangle}`. Each
query then needs :math:`|H|^2 (2 D + 1)` exponentials instead of :math:`|H|^3 D`. On one thread, with 8 elements, heads
of 4 channels and 21 offsets, this saves 39 % of a forward pass and 13 % of a training step. With 4 elements it saves
less than 10 %.

Each factor is divided by its maximum. If the product is small everywhere, its sum has lost precision, and scores are
formed instead. Accelerators do not use this form, since reading the sum would synchronise them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .flat_operands import FlatOperands
from .masks import MASKED_SCORE

if TYPE_CHECKING:
    from jaxtyping import Float

# Smallest allowed sum of products. The lower bound of FlatOperands.exponentials_ is negligible beside it.
_SMALLEST = {torch.float32: 1e-16, torch.float64: 1e-190}


def has_three_factors(x: FlatOperands) -> bool:
    """True on a CPU for relations with a sum over t and encodings of u."""
    return x.elements.queries > 1 and x.element_table.shape[1] > 0 and x.offset_table.device.type == "cpu"


def three_factor_weights(
    x: FlatOperands, t: int, query: Tensor, one: Tensor, keys: Tensor, offset_table: Tensor, element_table: Tensor,
    penalty: Tensor | None,
) -> tuple[
    Float[Tensor, "b e H S D *rows"], Float[Tensor, "b e H S 1 *rows"], Float[Tensor, "b e H *rows"]
] | None:  # fmt: skip
    """Weights without normalisation, the factor that normalises them, and the log-sum-exps of scores. None if the
    product is too small to be precise. Arguments are those of :meth:`.FlatOperands.scores`."""
    rows = query.shape[4:]
    content = x.products(query, keys)
    position = x.position(one, offset_table).unflatten(-1, rows)
    argument = x.argument(one, element_table, t).unflatten(-1, rows).unsqueeze(4)
    if penalty is not None:  # in both, so that maxima are at valid keys
        content += penalty
        position += penalty
    tops = []
    for factor, axes in ((content, (3, 4)), (position, (4,)), (argument, (3,))):
        tops.append(factor.amax(axes, keepdim=True))
        x.exponentials_(factor, tops[-1])
    shape = torch.broadcast_shapes(position.shape, content.shape)
    product = torch.mul(position, content, out=x.memory("weight", shape))
    mass = (product.sum(4, keepdim=True) * argument).sum(3, keepdim=True)
    if mass.amin() < _SMALLEST[mass.dtype]:
        return None
    lse = mass.log().add_(tops[0] + tops[1] + tops[2]).clamp_(min=MASKED_SCORE)  # the value without a valid key
    return product, argument / mass, lse[:, :, :, 0, 0]
