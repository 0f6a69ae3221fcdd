r"""Random features of the softmax kernel (FAVOR+), and their orthogonal draws."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ... import checks


def orthogonal_projection(num_random_features: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw directions of random features: orthogonal within blocks of ``dim`` rows, each row N(0, I).

    Blocks are Haar-distributed orthogonal matrices (QR of a Gaussian with the signs of R's diagonal), and every row
    gets the length of an independent Gaussian vector, so the marginals are exact and the estimate stays unbiased.

    Args:
        num_random_features: rows, m.
        dim: columns, d.
        generator: CPU generator; ``None`` means torch's default one.

    Returns:
        ``(num_random_features, dim)`` float64 on the CPU: the same numbers whatever device they go to.

    Source: Choromanski et al., Rethinking attention with Performers (2021), section 3.
    """
    checks.positive(num_random_features=num_random_features, dim=dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=generator)

    blocks = math.ceil(num_random_features / dim)
    haar, triangle = torch.linalg.qr(normal(blocks, dim, dim))
    haar = haar * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return haar.flatten(0, 1)[:num_random_features] * normal(num_random_features, dim).norm(dim=1, keepdim=True)


def softmax_features(x: Tensor, projection: Tensor) -> Tensor:
    r"""Positive random features of the softmax kernel.

    .. math:: \phi(x) = \tfrac{1}{\sqrt m} \exp\!\big(W x - \tfrac12 |x|^2\big), \qquad
        \mathbb{E}_W \langle \phi(q), \phi(k) \rangle = \exp\langle q, k \rangle

    Attention itself never calls this: :func:`linear_attention` works with logarithms, which do not overflow.

    Args:
        x: ``(..., d)``.
        projection: ``(m, d)``, as :func:`orthogonal_projection` draws it.

    Returns:
        ``(..., m)``, positive.

    Source: Choromanski et al. (2021), Eq. 5 and Lemma 1.

    Example:
        >>> import torch
        >>> q, k = torch.tensor([[0.3, -0.2]]), torch.tensor([[0.1, 0.4]])
        >>> w = orthogonal_projection(4096, 2, torch.Generator().manual_seed(0)).float()
        >>> estimate = softmax_features(q, w) @ softmax_features(k, w).T
        >>> bool((estimate / (q @ k.T).exp() - 1).abs() < 0.02)
        True
    """
    return (x @ projection.T - x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(projection.shape[0])
