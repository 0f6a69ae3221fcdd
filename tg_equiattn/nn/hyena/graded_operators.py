"""The operators of SE(3)-Hyena and vector self-attention on tokens kept as (rows, T) by grade.

Scalars are those of grades 0 and 3, vectors those of grades 1 and 2, side by side: products of two of one kind do not
ask which, so pseudoscalars and axial vectors pass through the same streams and keep their parity.
"""

from __future__ import annotations

import functools
from abc import abstractmethod

import torch
from torch import Tensor, nn

from ...functional.hyena.fft_convolution import fft_convolution, number_or_cross_product
from ...functional.hyena.softmax_attention import softmax_attention
from ...functional.hyena.vector_attention import vector_attention_by_component
from ...sequences import Sequences
from .clifford import CliffordLinear, GradedMLP
from .graded_network import GradedNetwork
from .grades import POSITION, Grades, join_channels
from .local_context import Edges, LocalContext
from .options import HyenaOptions, OperatorOptions
from .sequence_filters import LagFilter, ShortConv


class GradedOperator(GradedNetwork):
    """Projection to query, key and value; mixing along sequences; residual and output projection (Algorithm 1).

    Args:
        in_grades, out_grades: channels of a token.
        options: of its Clifford MLPs, and of local context.
        hidden_grades: channels of query, key and value; ``None`` means ``in_grades``.
        causal: whether tokens see earlier ones only.
        bias: of the projection to query, key and value.
    """

    out: GradedMLP

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        options: OperatorOptions,
        hidden_grades: Grades | None = None,
        *,
        causal: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__(
            in_grades, out_grades, local_context=options.local_context, edge_channels=options.edge_channels
        )
        self.hidden_grades = hidden = in_grades if hidden_grades is None else hidden_grades
        width = options.width(hidden)
        self.local = LocalContext(in_grades, width, options) if options.local_context else None
        self.project = GradedMLP(in_grades.plus(POSITION), hidden.times(3), width, options, bias)
        self.shortcut = None if in_grades == hidden else CliffordLinear(in_grades, hidden, bias=False)
        self.short_conv: ShortConv | None = None
        if options.short_conv is not None:
            self.short_conv = ShortConv(hidden.times(3).channels(), options.short_conv, causal)
        self.out = GradedMLP(hidden, out_grades, width, options)

    def reachable(self, given: Grades) -> Grades:
        products = len(self.out.blocks)
        return self.out_grades.only(self.hidden_grades.only(given.reachable(products)).reachable(products))

    def forward(self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None) -> Tensor:
        if self.local is not None and edges is not None:
            x = self.local(x, pos, edges)
        projected = self.project.by_blocks(x, pos, function=self._project)
        if self.short_conv is not None:
            projected = self.short_conv(projected, sequences)
        grades = [part.chunk(3, 1) for part in self.hidden_grades.times(3).split(projected)]
        scalars = [_join_streams(grades[0][n], grades[3][n]) for n in range(3)]
        vectors = [_join_streams(grades[1][n], grades[2][n]) for n in range(3)]
        mixed = [
            self.mix(kind, sequences, *three) if three[0].shape[1] else three[0]
            for kind, three in (("scalars", scalars), ("vectors", vectors))
        ]
        return self.out.by_blocks(x, scalars[2], vectors[2], *mixed, function=self._finish)

    def _project(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.project(join_channels((self.in_grades, x), (POSITION, pos))[1])

    def _finish(
        self, x: Tensor, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> Tensor:
        scalars, vectors = self.combine(scalars, vectors, mixed_scalars, mixed_vectors)
        c = self.hidden_grades
        rows = [scalars[:, : c.scalars], vectors[:, : c.vectors], vectors[:, c.vectors :], scalars[:, c.scalars :]]
        x = x if self.shortcut is None else self.shortcut(x)
        return self.out(x + torch.cat([part.flatten(0, 1) for part in rows]))

    @abstractmethod
    def mix(self, kind: str, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix tokens of (1, S, T) scalars or (3, V, T) vectors."""

    @abstractmethod
    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values and what was mixed, to what is added to the token."""


def _join_streams(x: Tensor, y: Tensor) -> Tensor:
    if not y.shape[1]:
        return x
    return torch.cat([x, y], 1) if x.shape[1] else y


class HyenaOperator(GradedOperator):
    """Mixes by long convolution, of queries and keys or of keys and a filter of the lag, times the query; gates by a
    Clifford MLP of what was mixed, and multiplies with the values."""

    def __init__(
        self, in_grades: Grades, out_grades: Grades, options: HyenaOptions, hidden_grades: Grades | None = None
    ) -> None:
        by_lag = options.filter == "lag"  # for which a token of zeros must make nothing
        super().__init__(in_grades, out_grades, options, hidden_grades, causal=options.causal, bias=not by_lag)
        c = self.hidden_grades
        self.scalars, self.vectors = c.scalars + c.pseudoscalars, c.vectors + c.bivectors
        mixed = Grades(scalars=self.scalars, bivectors=self.vectors)
        self.gate = GradedMLP(mixed, Grades(self.scalars + self.vectors), options.gate_channels, options)
        self.mode, self.norm, self.backend = options.known_mode, options.known_norm, options.backend
        self.filters: nn.ModuleDict | None = None
        if by_lag:
            kinds = {"scalars": self.scalars, "vectors": self.vectors}
            self.filters = nn.ModuleDict(
                {kind: LagFilter(n, options.causal, backend=options.backend) for kind, n in kinds.items() if n}
            )

    def mix(self, kind: str, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self.filters is None:
            convolve = functools.partial(fft_convolution, mode=self.mode, norm=self.norm, backend=self.backend)
            return sequences.mix(convolve, query, key)
        return number_or_cross_product(query, self.filters[kind](key, sequences))

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        gates = torch.sigmoid(self.gate(torch.cat([mixed_scalars.flatten(0, 1), mixed_vectors.flatten(0, 1)])))
        scalar_gates, vector_gates = gates.split([self.scalars, self.vectors])
        scalars = scalar_gates * mixed_scalars * scalars
        return scalars, torch.linalg.cross(vector_gates * mixed_vectors, vectors, dim=0)


class VectorAttentionOperator(GradedOperator):
    """Mixes vectors by cross-product attention and scalars by softmax attention; gating is attention's own."""

    def __init__(
        self, in_grades: Grades, out_grades: Grades, options: OperatorOptions, hidden_grades: Grades | None = None
    ) -> None:
        super().__init__(in_grades, out_grades, options, hidden_grades)
        self.backend = options.backend

    def mix(self, kind: str, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attention = softmax_attention if kind == "scalars" else vector_attention_by_component
        return sequences.mix(functools.partial(attention, backend=self.backend), query, key, value)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        return mixed_scalars, mixed_vectors
