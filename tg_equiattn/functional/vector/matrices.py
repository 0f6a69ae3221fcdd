"""Products of vectors with 3 x 3 matrices T: vector self-attention gives y = T q - tr(T) q."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float


def outer(
    x: Float[Tensor, "groups tokens 3"], y: Float[Tensor, "groups tokens 3"]
) -> Float[Tensor, "groups tokens 3 3"]:
    """Outer products x y^T."""
    return x[..., :, None] * y[..., None, :]


def times(matrix: Float[Tensor, "groups tokens 3 3"], x: Float[Tensor, "groups tokens 3"]) -> Tensor:
    """T x."""
    return (matrix * x[..., None, :]).sum(-1)


def times_without_trace(matrix: Float[Tensor, "groups tokens 3 3"], x: Float[Tensor, "groups tokens 3"]) -> Tensor:
    """T x - tr(T) x."""
    return times(matrix, x) - matrix.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True) * x


def gradient_of_matrix(
    grad: Float[Tensor, "groups tokens 3"], x: Float[Tensor, "groups tokens 3"]
) -> Float[Tensor, "groups tokens 3 3"]:
    """The gradient of T, given that of T x - tr(T) x: grad x^T - <grad, x>."""
    out = outer(grad, x)
    out.diagonal(dim1=-2, dim2=-1).sub_((grad * x).sum(-1, keepdim=True))
    return out
