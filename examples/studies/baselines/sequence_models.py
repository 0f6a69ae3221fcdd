"""Hyena and the transformer without equivariance, in the shell of SE(3)-Hyena: what the paper compares with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from tg_equiattn import checks
from tg_equiattn.chains.clifford import Grades
from tg_equiattn.chains.convolutions import ShortConv
from tg_equiattn.chains.long_conv import long_convolution
from tg_equiattn.chains.operator import TokenNetwork
from tg_equiattn.chains.se3_hyena import ScalarVectorModule
from tg_equiattn.chains.sequences import OperatorSettings, TokenBatch
from tg_equiattn.graphs.node_batch import PaddedBatch
from tg_equiattn.softmax_attention import softmax_attention

GATE_CHANNELS = 8  # as of SE(3)-Hyena


class SequenceOperator(nn.Module, ABC):
    """Query, key and value by a linear map and a short convolution; mixing; residual and output MLP. Tokens are (T,
    channels)."""

    def __init__(self, channels: int, short_conv: int | None) -> None:
        super().__init__()
        self.project = nn.Linear(channels, 3 * channels)
        self.short_conv = None if short_conv is None else ShortConv(range(3 * channels), short_conv)
        self.out = _mlp(channels, channels, channels)

    def forward(self, x: Tensor, tokens: TokenBatch) -> Tensor:
        projected = self.project(x)
        if self.short_conv is not None:
            projected = self.short_conv(projected.T, tokens.sequences).T
        query, key, value = projected.chunk(3, -1)
        return self.out(x + self.mix(tokens, query, key, value))

    @abstractmethod
    def mix(self, tokens: TokenBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix tokens along sequences, (T, channels)."""


class LongConvolution(SequenceOperator):
    """By circular long convolution, a gate and the values."""

    def __init__(self, channels: int, short_conv: int | None, norm: str = "ortho") -> None:
        super().__init__(channels, short_conv)
        self.norm = norm
        self.gate = _mlp(channels, GATE_CHANNELS, channels)

    def mix(self, tokens: TokenBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        def convolve(q: Tensor, k: Tensor, rows: PaddedBatch) -> Tensor:
            counts = tokens.sequences.counts(rows)
            return long_convolution(q, k, len(q), rows.lengths, "circular", self.norm, counts)

        mixed = tokens.sequences.mix(convolve, query.T, key.T).T
        return torch.sigmoid(self.gate(mixed)) * mixed * value


class SelfAttention(SequenceOperator):
    """By softmax attention, all channels one head."""

    def mix(self, tokens: TokenBatch, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return tokens.graphs.mix(lambda q, k, v, rows: softmax_attention(q, k, v, rows.mask), query, key, value)


def _mlp(inside: int, hidden: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inside, hidden), nn.SiLU(), nn.LayerNorm(hidden), nn.Linear(hidden, outside)
    )  # fmt: skip


class SequenceNetwork(TokenNetwork):
    """Embedding, operators with residual connections, pooling and MLP of scalars and vectors' components alike."""

    def __init__(
        self, operator: type[SequenceOperator], in_grades: Grades, out_grades: Grades, channels: int, num_layers: int,
        pool: str | None, **options: Any,
    ) -> None:  # fmt: skip
        checks.positive(channels=channels, num_layers=num_layers)
        super().__init__(in_grades, out_grades, Grades(0, 0), OperatorSettings(), pool)
        self.embed = nn.Linear(in_grades.dim + 3, channels)
        self.operators = nn.ModuleList([operator(channels, **options) for _ in range(num_layers)])
        self.out = _mlp(channels, channels, out_grades.dim)

    def forward(self, x: Tensor, tokens: TokenBatch) -> Tensor:
        x = self.embed(torch.cat([x, tokens.pos]).T)
        for operator in self.operators:
            x = x + operator(x, tokens)
        return self.out(tokens.graphs.mean(x) if self.pool else x).T


class Hyena(ScalarVectorModule):
    r"""The Hyena operator in the shell of :class:`SE3Hyena`, without equivariance: the paper's baseline.

    Vectors enter by their components; long convolution, gate and product with the values are those of the scalar
    stream.

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        channels: width. The paper has three times the equivariant models' widths, to match their parameters; with
            one linear map for query, key and value as here, the default does.
        num_layers: number of operators.
        pool: ``None``, or ``"mean"`` over each sequence's tokens.
        short_conv: taps of the short convolution, ``None`` for none.
        options: ``norm`` of the long convolution, ``"ortho"`` or the paper's ``"forward"``.

    Shapes:
        As :class:`SE3Hyena`.

    Source: Poli et al., Hyena Hierarchy (2023); se3-hyena sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = Hyena(4, 1, 0, 1, channels=24, num_layers=2, pool="mean")
        >>> model(torch.randn(3, 33, 4), torch.randn(3, 33, 1, 3))[1].shape
        torch.Size([3, 1, 3])
    """

    operator: type[SequenceOperator] = LongConvolution

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        *,
        channels: int = 224,
        num_layers: int = 3,
        pool: str | None = None,
        short_conv: int | None = None,
        **options: Any,
    ) -> None:
        settings = {"channels": channels, "num_layers": num_layers, "pool": pool, "short_conv": short_conv, **options}
        super().__init__(scalar_channels, vector_channels, out_scalars, out_vectors, **settings)

    def network(self, inside: Grades, outside: Grades, hidden: Grades, **settings: Any) -> SequenceNetwork:
        return SequenceNetwork(self.operator, inside, outside, **settings)


class Transformer(Hyena):
    r"""Softmax self-attention in the shell of :class:`SE3Hyena`, without equivariance: the paper's baseline.

    Arguments and shapes as of :class:`Hyena`, without ``norm``.

    Source: se3-hyena sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = Transformer(4, 1, 0, 1, channels=24, num_layers=2)
        >>> model(torch.randn(3, 33, 4), torch.randn(3, 33, 1, 3))[1].shape
        torch.Size([3, 33, 1, 3])
    """

    operator = SelfAttention
