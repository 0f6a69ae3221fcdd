r"""Weights of relations that sum over t as products of three factors, on CPUs; see :mod:`.definition` for the sizes.

With additive encodings :math:`e^{\mathrm{score}} = A(t, s, D)\, S(h, t, D)\, G(h, t, s)` with :math:`A = e^{\langle q,
k \rangle}`, :math:`S = e^{\langle q, \rho_{space} \rangle}` and :math:`G = e^{\langle q, \rho_{group} \rangle}`: each
query takes :math:`|H|^2 (2 D + 1)` exponentials in place of :math:`|H|^3 D`. On one thread, with 8 elements, heads of 4
channels and 21 offsets, this saves 30 % of a forward pass and 23 % of a training step; with 4 elements nothing.

Every factor is divided by its maximum. Where their product is small everywhere, its sum has lost precision: then scores
are formed. To look at it an accelerator would have to wait.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .flat_operands import FlatOperands
from .masks import MASKED_SCORE

# Of the sum of products: beside it what exponentials are at least (FlatOperands.exponentials_) is rounding.
_SMALLEST = {torch.float32: 1e-16, torch.float64: 1e-190}


def has_three_factors(x: FlatOperands) -> bool:
    """True for a relation with a sum over t and additive encodings, on a CPU."""
    additive = x.offset_table.shape[2] == 1 and x.element_table.shape[1] > 0
    return x.elements.queries > 1 and additive and x.offset_table.device.type == "cpu"


def three_factors(
    x: FlatOperands, t: int, query: Tensor, one: Tensor, keys: Tensor, offset_table: Tensor, element_table: Tensor,
    penalty: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """A S (b, e, H, S, D, *flat rows), G (b, e, H, S, 1, *flat rows), and the logarithm (b, e, H, 1, 1, *flat rows) of
    what exponentials of scores are divided by to be A S G; arguments are those of :meth:`.FlatOperands.scores`."""
    rows = query.shape[4:]
    content = x.products(query, keys)
    position = x.position(one, offset_table, t).unflatten(-1, rows)
    argument = x.argument(one, element_table, t).unflatten(-1, rows).unsqueeze(4)
    if penalty is not None:  # in both, so that no maximum is at a masked key
        content += penalty
        position += penalty
    tops = []
    for factor, axes in ((content, (3, 4)), (position, (4,)), (argument, (3,))):
        tops.append(factor.amax(axes, keepdim=True))
        x.exponentials_(factor, tops[-1])
    return position * content, argument, tops[0] + tops[1] + tops[2]


def forward_weights(x: FlatOperands, *operands) -> tuple[Tensor, Tensor, Tensor] | None:
    """Weights, what they have to be multiplied with, and log-sum-exps (b, e, H, *flat rows); None if too small."""
    product, argument, top = three_factors(x, *operands)
    mass = (product.sum(4, keepdim=True) * argument).sum(3, keepdim=True)
    if mass.amin() < _SMALLEST[mass.dtype]:
        return None
    lse = mass.log().add_(top).clamp_(min=MASKED_SCORE)  # as with scores, where a window has no key
    return product, argument / mass, lse[:, :, :, 0, 0]


def backward_weights(x: FlatOperands, lse: Tensor, *operands) -> Tensor | None:
    """Weights, given log-sum-exps (b, e, H, 1, 1, *flat rows); None if too small."""
    product, argument, top = three_factors(x, *operands)
    inverse = (top - lse).exp_()
    if inverse.amax() > 1 / _SMALLEST[inverse.dtype]:
        return None
    return product.mul_(argument.mul_(inverse))
