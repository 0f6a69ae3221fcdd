"""Vector self-attention with the projections and output of SE(3)-Hyena: its quadratic counterpart."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .. import checks
from ..graphs.node_batch import PaddedBatch
from ..softmax_attention import softmax_attention
from ..tiles import joined
from .long_conv import vectors_of
from .operator import OperatorSettings, ScalarVectorModule, TokenModel, TokenOperator
from .sequences import TokenBatch
from .vector_attention import vector_attention_impl


def _mixed_channels(value: Tensor, mixed: Tensor, scalars: int, gate: None) -> tuple[Tensor, Tensor]:
    return mixed[:scalars], vectors_of(mixed, scalars)


class VectorAttentionOperator(TokenOperator):
    """An operator that mixes vectors by cross-product attention and scalars by softmax attention, without a gate."""

    in_space = True

    def mix(self, projected: Tensor, tokens: TokenBatch) -> Tensor:
        scalars, graphs = self.scalars, tokens.graphs

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            out = []
            if scalars:
                q, k, v = x[:, :scalars].movedim(1, -1)
                out.append(softmax_attention(q * scalars**-0.5, k, v, rows.mask).movedim(-1, 0))
            if scalars < x.shape[1]:
                q, k, v = x[:, scalars:].unflatten(1, (3, -1)).permute(0, 3, 2, 4, 1)
                out.append(vector_attention_impl(q, k, v, rows.lengths).permute(3, 1, 0, 2).flatten(0, 1))
            return joined(out)[None]

        return graphs.mix(kernel, projected, dim=2)[0]

    combine = staticmethod(_mixed_channels)


@checks.arguments
class VectorSelfAttention(ScalarVectorModule):
    r"""Equivariant self-attention: vectors by cross products, scalars by softmax attention.

    The layer is :class:`SE3HyenaOperator` with :func:`~tg_equiattn.functional.vector_attention` instead of convolution
    and gate. It is equivariant to rotations, reflections and translations, and without ``short_conv`` to permutations.
    It takes O(N^2) time and O(N) memory. Second derivatives of scalar attention take O(N^2) memory.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of query, key and value. ``None`` means as many as in the input. If hidden and
            input channels differ, a linear map takes the input to the residual.
        hidden_vectors: Number of vectors of query, key and value. ``None`` means as many as in the input.
        short_conv: Number of taps, odd, of a short convolution of query, key and value with one weight for each channel
            and tap. The default, ``None``, means no short convolution. Use 3 if neighbors along the sequence belong
            together (:doc:`/chains`); outputs then depend on the order of the tokens.
        length: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        local_context: Whether to update every token from its neighbors along ``edge_index`` first, by Clifford message
            passing. The default is ``False``. Use it if a graph of near neighbors is known.
        edge_channels: Number of scalars of an edge, which are given as ``edge_attr``. The default is 0; other numbers
            need ``local_context``.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena appendix B; the projections and the output MLP are those of section 3.

    Example:
        >>> import torch
        >>> attention = VectorSelfAttention(8, 16)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    def __init__(
        self, scalar_channels: int, vector_channels: int, *, out_scalars: int | None = None,
        out_vectors: int | None = None, hidden_scalars: int | None = None, hidden_vectors: int | None = None,
        short_conv: int | None = None, length: float = 1.0, local_context: bool = False, edge_channels: int = 0,
        num_blocks: int = 1,
    ) -> None:  # fmt: skip
        options = OperatorSettings(
            short_conv=short_conv, length=length, local_context=local_context, edge_channels=edge_channels,
            num_blocks=num_blocks,
        )  # fmt: skip
        channels = scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors
        super().__init__(VectorAttentionOperator, options, *channels)


@checks.arguments
class VectorTransformer(ScalarVectorModule):
    r"""A model of vector self-attention: linear embedding, layers with residual connections, and an equivariant MLP.

    The model is :class:`SE3Hyena` with :class:`VectorSelfAttention` instead of its operators.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of a token between the layers. The default is 16.
        hidden_vectors: Number of vectors of a token between the layers. The default is 128.
        num_layers: Number of attention layers. The default is 3.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.
        pool: ``"mean"`` takes the mean over the tokens of each sequence before the MLP. The default, ``None``, does
            not.
        length: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        attn_kwargs: Further arguments of :class:`VectorSelfAttention`: ``short_conv``, ``local_context`` and
            ``edge_channels``.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again; to
        ``(B, out_scalars)`` and ``(B, out_vectors, 3)`` with ``pool="mean"``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

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
        self, scalar_channels: int, vector_channels: int, out_scalars: int | None = None,
        out_vectors: int | None = None, *, hidden_scalars: int = 16, hidden_vectors: int = 128, num_layers: int = 3,
        num_blocks: int = 1, pool: str | None = None, length: float = 1.0, attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        options = OperatorSettings(length=length, num_blocks=num_blocks)
        operator = VectorAttentionOperator
        make = functools.partial(TokenModel, operator, num_layers=num_layers, pool=pool, attn_kwargs=attn_kwargs)
        channels = scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors
        super().__init__(make, options, *channels)
