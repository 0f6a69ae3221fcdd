r"""Random features of the softmax kernel (FAVOR+), and their orthogonal draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ... import checks

if TYPE_CHECKING:
    from jaxtyping import Float


def orthogonal_projection(num_random_features: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw directions of random features: orthogonal within blocks of ``dim`` rows, each row N(0, I).

    Blocks are Haar-distributed orthogonal matrices (QR of a Gaussian with the signs of R's diagonal), and every row
    gets the length of an independent Gaussian vector. So each row has its exact distribution, and the estimate is
    unbiased.

    Args:
        num_random_features: Number of directions m.
        dim: Width d of queries and keys.
        generator: CPU generator for the draw. Default ``None``: torch's default generator.

    Returns:
        ``(num_random_features, dim)`` float64 on the CPU, so that all devices get the same numbers.

    Raises:
        ValueError: If ``num_random_features`` or ``dim`` is not a positive integer.

    Source: Choromanski et al., Rethinking attention with Performers (2021), section 3.
    """
    checks.positive(num_random_features=num_random_features, dim=dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=generator)

    blocks = math.ceil(num_random_features / dim)
    haar, triangle = torch.linalg.qr(normal(blocks, dim, dim))
    haar = haar * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return haar.flatten(0, 1)[:num_random_features] * normal(num_random_features, dim).norm(dim=1, keepdim=True)


def softmax_features(x: Tensor, projection: Tensor, variance: float | Tensor = 1.0) -> Tensor:
    r"""Positive random features of the softmax kernel.

    .. math:: \phi_m(x) = \tfrac{1}{\sqrt M} s^{d/4}
        \exp\!\big(\sqrt s\, \langle w_m, x \rangle + \tfrac{1 - s}{4} |w_m|^2 - \tfrac12 |x|^2\big), \qquad
        \mathbb{E}_w \langle \phi(q), \phi(k) \rangle = \exp\langle q, k \rangle

    Directions have variance s instead of 1, and features have the weights of importance sampling. The expectation is
    the same for every s > 1/2. With s = 1 the features are those of FAVOR+; with a larger s the error of large queries
    and keys is smaller.

    Attention does not call this function: :func:`linear_attention` works with logarithms, which do not overflow.

    Args:
        x: Queries or keys, ``(..., d)``.
        projection: Directions w, ``(M, d)``, as :func:`orthogonal_projection` draws them.
        variance: The variance s, greater than 1/2. Default 1.

    Returns:
        ``(..., M)``, positive.

    Source: Choromanski et al. (2021), Eq. 5 and Lemma 1; Likhosherstov et al., Chefs' random tables (2022), FAVOR++,
    for the variance (A = (1 - s) / 4 there).

    Example:
        >>> import torch
        >>> q, k = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.1, 0.4]])
        >>> w = orthogonal_projection(4096, 2, torch.Generator().manual_seed(0)).float()
        >>> estimate = softmax_features(q, w) @ softmax_features(k, w).T
        >>> bool((estimate / (q @ k.T).exp() - 1).abs() < 0.02)
        True
    """
    s = variance.to(x) if isinstance(variance, Tensor) else x.new_full((), variance)
    logs = s.sqrt() * (x @ projection.T) + log_weights(projection, s) / 2 - x.square().sum(-1, keepdim=True) / 2
    return logs.exp() / math.sqrt(projection.shape[0])


def log_weights(projection: Float[Tensor, "features d"], variance: Float[Tensor, ...]) -> Tensor:
    """Logarithms (..., features) of the importance weights of directions that are drawn with a variance."""
    s = variance[..., None]
    return (1 - s) / 2 * projection.square().sum(1) + projection.shape[1] / 2 * s.log()
