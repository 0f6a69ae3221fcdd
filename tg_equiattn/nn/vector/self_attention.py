"""Vector self-attention with the projections and output of SE(3)-Hyena: its quadratic counterpart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import checks
from ...functional.softmax_attention import softmax_attention
from ...functional.vector.attention import attend_to_vectors
from ...node_batch import NodeBatch, PaddedBatch
from .grades import grades_of_channels
from .operator import TokenModel, TokenOperator
from .options import OperatorOptions, options_of
from .scalars_and_vectors import ScalarVectorModule


class VectorAttentionOperator(TokenOperator):
    """Mixes vectors by cross-product attention and scalars by softmax attention; gating is attention's own."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, node_batch: NodeBatch) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, rows: PaddedBatch) -> Tensor:
            if query.ndim == 2:
                return softmax_attention(q, k, v, rows.mask)
            return attend_to_vectors(q, k, v, rows.lengths)

        return node_batch.mix(kernel, query, key, value)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        return mixed_scalars, mixed_vectors


@checks.python_numbers
class VectorSelfAttention(ScalarVectorModule):
    r"""Equivariant self-attention: vectors by cross products, scalars by softmax attention.

    :class:`SE3HyenaOperator` with :func:`~tg_equiattn.functional.vector_attention` in place of convolution and gate;
    equivariant as that is, without ``short_conv`` to permutations too. Time is O(N^2), memory O(N), but O(N^2) for
    second derivatives where scalars attend.

    Args:
        scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors, short_conv,
            local_context, edge_channels: as :class:`SE3HyenaOperator`.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena appendix B; what surrounds attention is section 3's.

    Example:
        >>> import torch
        >>> attention = VectorSelfAttention(8, 16)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        *,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        hidden_scalars: int | None = None,
        hidden_vectors: int | None = None,
        short_conv: int | None = None,
        local_context: bool = False,
        edge_channels: int = 0,
    ) -> None:
        inside, outside, hidden = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        options = OperatorOptions(short_conv=short_conv, local_context=local_context, edge_channels=edge_channels)
        super().__init__(VectorAttentionOperator(inside, outside, options, hidden))


@checks.python_numbers
class VectorTransformer(ScalarVectorModule):
    r"""Linear embedding, vector self-attention with residual connections, and an equivariant MLP.

    :class:`SE3Hyena` with :class:`VectorSelfAttention` in place of its operators; arguments and shapes as there,
    ``options`` being ``short_conv``, ``local_context``, ``edge_channels`` and ``num_blocks``.

    Source: se3-hyena sections 4.1.1 and 4.2.1, appendix B.

    Example:
        >>> import torch
        >>> model = VectorTransformer(4, 1, 0, 1, hidden_scalars=8, hidden_vectors=16, depth=2, pool="mean")
        >>> model(torch.randn(3, 33, 4), torch.randn(3, 33, 1, 3))[1].shape
        torch.Size([3, 1, 3])
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        *,
        hidden_scalars: int = 16,
        hidden_vectors: int = 128,
        depth: int = 3,
        pool: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        grades = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        own = options_of(OperatorOptions, options)
        super().__init__(TokenModel(VectorAttentionOperator, *grades, own, depth=depth, pool=pool))
