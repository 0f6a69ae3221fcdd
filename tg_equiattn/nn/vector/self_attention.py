"""Vector self-attention with the projections and output of SE(3)-Hyena: its quadratic counterpart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import checks
from ...functional.softmax_attention import softmax_attention
from ...functional.vector.attention import vector_attention_impl
from ...node_batch import PaddedBatch
from .operator import TokenModel, TokenOperator
from .placement import TokenBatch
from .scalars_and_vectors import ScalarVectorModule


class VectorAttentionOperator(TokenOperator):
    """Mixes vectors by cross-product attention and scalars by softmax attention, without a gate."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenBatch) -> Tensor:
        def kernel(q: Tensor, k: Tensor, v: Tensor, rows: PaddedBatch) -> Tensor:
            if query.ndim == 2:
                return softmax_attention(q, k, v, rows.mask)
            return vector_attention_impl(q, k, v, rows.lengths)

        return tokens.graphs.mix(kernel, query, key, value)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        return mixed_scalars, mixed_vectors


@checks.python_numbers
class VectorSelfAttention(ScalarVectorModule):
    r"""Equivariant self-attention: vectors by cross products, scalars by softmax attention.

    The operator of :class:`SE3HyenaOperator` with :func:`~tg_equiattn.functional.vector_attention` in place of
    convolution and gate. It is equivariant to rotations, reflections and translations, and without ``short_conv`` to
    permutations. Time is O(N^2) and memory O(N). Second derivatives of scalar attention take O(N^2) memory.

    Args:
        scalar_channels: scalars of the input.
        vector_channels: vectors of the input.
        out_scalars: scalars of the output; ``None`` means those of the input.
        out_vectors: vectors of the output; ``None`` means those of the input.
        hidden_scalars: scalars of query, key and value; ``None`` means those of the input. If hidden and input channels
            differ, a linear map takes the input to the residual.
        hidden_vectors: vectors of query, key and value; ``None`` means those of the input.
        short_conv: taps, an odd number, of a short convolution of query, key and value, with one weight a channel and
            tap; ``None`` for none. Use 3 if neighbors along the sequence belong together (:doc:`/chains`); outputs
            then depend on the order of the tokens.
        local_context: update every token from its neighbors along ``edge_index`` first, by Clifford message passing.
            Use it if a graph of near neighbors is known.
        edge_channels: scalars of an edge, given as ``edge_attr``; they need ``local_context``.
        num_blocks: blocks of every Clifford MLP. Use 2 for more products of channels, at about twice the time.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: if an argument or an input does not fit; it names the argument.

    Source: se3-hyena appendix B; the projections and the output MLP are those of section 3.

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
        num_blocks: int = 1,
    ) -> None:
        super().__init__(
            VectorAttentionOperator, scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars,
            hidden_vectors, short_conv=short_conv, local_context=local_context, edge_channels=edge_channels,
            num_blocks=num_blocks,
        )  # fmt: skip


@checks.python_numbers
class VectorTransformer(ScalarVectorModule):
    r"""Linear embedding, vector self-attention with residual connections, and an equivariant MLP.

    :class:`SE3Hyena` with :class:`VectorSelfAttention` in place of its operators.

    Args:
        scalar_channels: scalars of the input.
        vector_channels: vectors of the input.
        out_scalars: scalars of the output; ``None`` means those of the input.
        out_vectors: vectors of the output; ``None`` means those of the input.
        hidden_scalars: scalars of a token between the layers.
        hidden_vectors: vectors of a token between the layers.
        num_layers: number of attention layers.
        num_blocks: blocks of every Clifford MLP. Use 2 for more products of channels, at about twice the time.
        pool: ``None``, or ``"mean"`` to take the mean over the tokens of each sequence before the MLP.
        attn_kwargs: ``short_conv``, ``local_context`` and ``edge_channels`` of :class:`VectorSelfAttention`.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again; to
        ``(B, out_scalars)`` and ``(B, out_vectors, 3)`` with ``pool="mean"``.

    Raises:
        ValueError: if an argument or an input does not fit; it names the argument.

    Source: se3-hyena sections 4.1.1 and 4.2.1, appendix B.

    Example:
        >>> import torch
        >>> model = VectorTransformer(
        ...     4, 1, 0, 1, hidden_scalars=8, hidden_vectors=16, num_layers=2, pool="mean"
        ... )
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
        num_layers: int = 3,
        num_blocks: int = 1,
        pool: str | None = None,
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        make = functools.partial(TokenModel, VectorAttentionOperator)
        super().__init__(
            make, scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors,
            num_layers=num_layers, num_blocks=num_blocks, pool=pool, attn_kwargs=attn_kwargs,
        )  # fmt: skip
