"""Hyena and the transformer without equivariance, in the shell of SE(3)-Hyena: what the paper compares with."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tg_equiattn import checks
from tg_equiattn.functional.hyena.fourier_product import MODES, long_product
from tg_equiattn.nn.children import reset_children
from tg_equiattn.nn.hyena.graded import attend
from tg_equiattn.nn.hyena.se3_hyena import channels as grades
from tg_equiattn.precision import full_precision
from tg_equiattn.sequences import Sequences


class SequenceOperator(nn.Module, ABC):
    """Query, key and value by a linear map; mixing; residual and output MLP. Tokens are (T, channels)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, 3 * channels)
        self.out = _mlp(channels, channels, channels)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        query, key, value = self.project(x).chunk(3, -1)
        return self.out(x + self.mix(sequences, query, key, value))

    @abstractmethod
    def mix(self, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix tokens along sequences, (T, channels)."""


class _Convolution(SequenceOperator):
    def __init__(self, channels: int, mode: str, gate_channels: int) -> None:
        super().__init__(channels)
        self.mode = mode
        self.gate = _mlp(channels, gate_channels, channels)

    def mix(self, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with full_precision(query.device):
            q, k = (x.to(torch.promote_types(x.dtype, torch.float32)).T[None] for x in (query, key))
            mixed = sequences.mix(lambda q, k, lengths: long_product(q, k, lengths, self.mode, False), q, k)[0].T
        return torch.sigmoid(self.gate(mixed)) * mixed * value


class _Attention(SequenceOperator):
    def mix(self, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sequences.mix(attend, query.T[None], key.T[None], value.T[None])[0].T


def _mlp(inside: int, hidden: int, outside: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inside, hidden), nn.SiLU(), nn.LayerNorm(hidden), nn.Linear(hidden, outside)
    )  # fmt: skip


class _SequenceModel(nn.Module):
    """Embedding, operators with residual connections, pooling and MLP of scalars and vectors' components alike."""

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        out_scalars: int | None,
        out_vectors: int | None,
        operators: list[SequenceOperator],
        width: int,
        pool: str | None,
    ) -> None:
        super().__init__()
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.inside, self.outside = grades(scalar_channels, vector_channels, (out_scalars, out_vectors), (1, 1))[:2]
        self.pool = pool
        self.embed = nn.Linear(self.inside.dim + 3, width)
        self.operators = nn.ModuleList(operators)
        self.out = _mlp(width, width, self.outside.dim)

    def forward(
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        pos: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scalars (B, N, S) and vectors (B, N, V, 3), None where there are none, and pos (B, N, 3)."""
        first = scalars if scalars is not None else vectors
        if first is None:
            raise ValueError("vectors must be given where scalars are None, got None")
        shape = first.shape[:2]
        checks.full_parameters(self.embed.weight)
        parts = []
        for name, x, tail in (
            ("scalars", scalars, (self.inside.scalars,)), ("vectors", vectors, (self.inside.vectors, 3)),
        ):  # fmt: skip
            if x is None and not tail[0]:
                continue
            if not isinstance(x, Tensor) or tuple(x.shape) != (*shape, *tail) or len(shape) != 2:
                came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be (B, N, {', '.join(map(str, tail))}), got {came}")
            checks.same_kind(x, self.embed.weight, name)
            parts.append(x.flatten(0, 1).flatten(1))
        checks.lengths(lengths, shape[0], shape[1], first.device)
        sequences = Sequences.dense(shape[0], shape[1], lengths, first.device)
        centred = first.new_zeros(3, sequences.tokens)
        if pos is not None:
            pos = checks.positions(pos, (*shape, 3), first, "").flatten(0, 1).T
            centred = sequences.centred(sequences.padding_is_zero(pos)).to(first.dtype)
        tokens = torch.cat([*parts, centred.T], -1)
        x = self.embed(sequences.padding_is_zero(tokens.T).T)
        for operator in self.operators:
            x = x + operator(x, sequences)
        out = self.out(sequences.mean(x.T).T if self.pool else x)
        if not self.pool:
            out = sequences.padding_is_zero(out.T).T.unflatten(0, tuple(shape))
        out_scalars, out_vectors = out.split([self.outside.scalars, 3 * self.outside.vectors], -1)
        return out_scalars, out_vectors.unflatten(-1, (self.outside.vectors, 3))

    def reset_parameters(self) -> None:
        reset_children(self)


class Hyena(_SequenceModel):
    r"""The Hyena operator in the shell of :class:`SE3Hyena`, without equivariance: the paper's baseline.

    Vectors enter by their components; long convolution, gate and product with the values are those of the scalar
    stream.

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        channels: width. The paper has three times the equivariant models' widths, to match their parameters; with
            one linear map for query, key and value as here, the default does.
        depth: number of operators.
        pool: ``None``, or ``"mean"`` over each sequence's tokens.
        mode: of the convolution, ``"circular"`` or ``"causal"``.
        gate_channels: width of the gate's hidden layer.

    Shapes:
        As :class:`SE3Hyena`, dense.

    Source: Poli et al., Hyena Hierarchy (2023); se3-hyena sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = Hyena(4, 1, 0, 1, channels=24, depth=2, pool="mean")
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
        channels: int = 224,
        depth: int = 3,
        pool: str | None = None,
        mode: str = "circular",
        gate_channels: int = 8,
    ) -> None:
        checks.positive(channels=channels, depth=depth, gate_channels=gate_channels)
        checks.choice("mode", mode, MODES)
        operators: list[SequenceOperator] = [_Convolution(channels, mode, gate_channels) for _ in range(depth)]
        super().__init__(scalar_channels, vector_channels, out_scalars, out_vectors, operators, channels, pool)


class Transformer(_SequenceModel):
    r"""Softmax self-attention in the shell of :class:`SE3Hyena`, without equivariance: the paper's baseline.

    Args:
        scalar_channels, vector_channels, out_scalars, out_vectors, channels, depth, pool: as :class:`Hyena`.

    Shapes:
        As :class:`Hyena`.

    Source: se3-hyena sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = Transformer(4, 1, 0, 1, channels=24, depth=2)
        >>> model(torch.randn(3, 33, 4), torch.randn(3, 33, 1, 3))[1].shape
        torch.Size([3, 33, 1, 3])
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        *,
        channels: int = 224,
        depth: int = 3,
        pool: str | None = None,
    ) -> None:
        checks.positive(channels=channels, depth=depth)
        operators: list[SequenceOperator] = [_Attention(channels) for _ in range(depth)]
        super().__init__(scalar_channels, vector_channels, out_scalars, out_vectors, operators, channels, pool)
