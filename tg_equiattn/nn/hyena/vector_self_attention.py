"""Vector self-attention in the shell of SE(3)-Hyena: its quadratic counterpart."""

from __future__ import annotations

from typing import Any

from .graded_model import GradedModel
from .graded_operators import VectorAttentionOperator
from .grades import grades_of_channels
from .options import OperatorOptions
from .scalar_vector_module import ScalarVectorModule


class VectorSelfAttention(ScalarVectorModule):
    r"""Equivariant self-attention: vectors by cross products, scalars by softmax attention.

    Projections, residual and output are those of :class:`SE3HyenaOperator`; attention stands in place of convolution
    and gate. Time is O(N^2), memory O(N): see :func:`~tg_equiattn.functional.vector_attention`. There are derivatives
    of any order, of which the second take O(N^2) memory where scalars attend. Equivariant to rotations, reflections
    and, without ``short_conv``, permutations, and to translations as :class:`SE3HyenaOperator` is.

    Args:
        scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors, mlp_channels,
            num_blocks, short_conv, local_context, edge_channels: as :class:`SE3HyenaOperator`.
        backend: of the Clifford MLPs and the attention of vectors, as :class:`CliffordMLP`; that of scalars is torch's.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena appendix B; the shell is section 3's.

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
        mlp_channels: int | None = None,
        num_blocks: int = 1,
        short_conv: int | None = None,
        local_context: bool = False,
        edge_channels: int = 0,
        backend: str = "auto",
    ) -> None:
        inside, outside, hidden = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        options = OperatorOptions(
            mlp_channels=mlp_channels, num_blocks=num_blocks, short_conv=short_conv, local_context=local_context,
            edge_channels=edge_channels, backend=backend,
        )  # fmt: skip
        super().__init__(VectorAttentionOperator(inside, outside, options, hidden))


class VectorTransformer(ScalarVectorModule):
    r"""Linear embedding, vector self-attention with residual connections, and an equivariant MLP.

    :class:`SE3Hyena` with :class:`VectorSelfAttention` in place of its operators; arguments and shapes as there,
    ``backend`` as :class:`VectorSelfAttention`.

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
        **options: Any,
    ) -> None:
        grades = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        super().__init__(
            GradedModel(VectorAttentionOperator, *grades, OperatorOptions(**options), depth=depth, pool=pool)
        )
