"""Operators that mix tokens along sequences, and models of them. Scalars are those of grades 0 and 3, vectors those of
grades 1 and 2, side by side: products of two of one kind do not ask which, so all keep their parity."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.chunks import map_chunks
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from .clifford import CliffordLinear, MultivectorMLP
from .grades import POSITION, Grades, features, with_position
from .messages import LocalContext
from .network import TokenNetwork
from .options import OperatorOptions
from .short_conv import ShortConv


class TokenOperator(TokenNetwork):
    """Projection, with ``bias``, to query, key and value; mixing; residual and output projection (Algorithm 1)."""

    out: MultivectorMLP

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        options: OperatorOptions,
        hidden_grades: Grades | None = None,
        *,
        order: str = "input",
        causal: bool = False,
        bias: bool = True,
    ) -> None:
        local, edges = options.local_context, options.edge_channels
        super().__init__(in_grades, out_grades, order=order, local_context=local, edge_channels=edges)
        self.hidden_grades = hidden = in_grades if hidden_grades is None else hidden_grades
        self.causal = causal
        width, blocks = max(1, *hidden), options.num_blocks
        self.local = LocalContext(in_grades, width, options) if local else None
        self.project = MultivectorMLP(in_grades.plus(POSITION), hidden.times(3), width, blocks, bias)
        self.shortcut = None if in_grades == hidden else CliffordLinear(in_grades, hidden, bias=False)
        self.short_conv: ShortConv | None = None
        if options.short_conv is not None:
            self.short_conv = ShortConv(hidden.times(3).channels(), options.short_conv, causal)
        self.out = MultivectorMLP(hidden, out_grades, width, blocks)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"causal": self.causal}

    def reachable(self, given: Grades) -> Grades:
        products = len(self.out.blocks)
        return self.out_grades.only(self.hidden_grades.only(given.reachable(products)).reachable(products))

    def forward(self, x: Tensor, pos: Tensor, node_batch: NodeBatch, edges: NeighborList | None = None) -> Tensor:
        if self.local is not None and edges is not None:
            x = self.local(x, pos, edges)
        projected = map_chunks(self._project, self.project.tokens_per_block(x.device), (x, pos))
        if self.short_conv is not None:
            projected = self.short_conv(projected, node_batch)
        grades = [part.chunk(3, 1) for part in self.hidden_grades.times(3).split(projected)]
        scalars = [_side_by_side(grades[0][n], grades[3][n])[..., 0] for n in range(3)]
        vectors = [_side_by_side(grades[1][n], grades[2][n]) for n in range(3)]
        mixed = [self.mix(q, k, v, node_batch) if q.shape[1] else q for q, k, v in (scalars, vectors)]
        step = self.out.tokens_per_block(x.device)
        return map_chunks(self._finish, step, (x, scalars[2], vectors[2], *mixed))

    def _project(self, x: Tensor, pos: Tensor) -> Tensor:
        return features(self.project(with_position(self.in_grades.parts(x), pos)))

    def _finish(self, x: Tensor, *streams: Tensor) -> Tensor:
        scalars, vectors, mixed_scalars, mixed_vectors = (
            y.permute(*reversed(range(y.ndim))).contiguous() for y in streams
        )
        scalars, vectors = self.combine(scalars[None], vectors, mixed_scalars[None], mixed_vectors)
        c, parts = self.hidden_grades, self.in_grades.parts(x)
        parts = parts if self.shortcut is None else self.shortcut(parts)
        added = scalars[:, : c.scalars], vectors[:, : c.vectors], vectors[:, c.vectors :], scalars[:, c.scalars :]
        return features(self.out([a + b for a, b in zip(parts, added, strict=True)]))

    @abstractmethod
    def mix(self, query: Tensor, key: Tensor, value: Tensor, node_batch: NodeBatch) -> Tensor:
        """Mix tokens of scalars (T, S) or vectors (T, V, 3)."""

    @abstractmethod
    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values and what was mixed, (1, S, T) and (3, V, T), to what is added to the token."""


def _side_by_side(x: Tensor, y: Tensor) -> Tensor:
    if not y.shape[1]:
        return x
    return torch.cat([x, y], 1) if x.shape[1] else y


class TokenModel(TokenNetwork):
    """Linear embedding, operators with residual connections, pooling, Clifford MLP (Figure 2b)."""

    out: MultivectorMLP

    def __init__(
        self,
        operator: type[TokenOperator],
        in_grades: Grades,
        out_grades: Grades,
        hidden_grades: Grades,
        options: OperatorOptions,
        *,
        depth: int = 3,
        order: str = "input",
        pool: str | None = None,
    ) -> None:
        checks.positive(depth=depth)
        local, edges = options.local_context, options.edge_channels
        super().__init__(in_grades, out_grades, order=order, pool=pool, local_context=local, edge_channels=edges)
        self.hidden_grades = hidden_grades
        self.embed = CliffordLinear(in_grades.plus(POSITION), hidden_grades)
        self.operators = nn.ModuleList(
            [operator(hidden_grades, hidden_grades, options, order=order) for _ in range(depth)]
        )
        self.out = MultivectorMLP(hidden_grades, out_grades, max(1, *hidden_grades), options.num_blocks)

    def reachable(self, given: Grades) -> Grades:
        position = given.vectors > self.in_grades.vectors
        given = self.hidden_grades.only(given.reachable(0))
        for operator in self.operators:
            given = cast(TokenOperator, operator).reachable(given.plus(POSITION) if position else given)
        return self.out_grades.only(given.reachable(len(self.out.blocks)))

    def forward(self, x: Tensor, pos: Tensor, node_batch: NodeBatch, edges: NeighborList | None = None) -> Tensor:
        x = features(self.embed(with_position(self.in_grades.parts(x), pos)))
        for operator in self.operators:
            x = x + operator(x, pos, node_batch, edges)
        if self.pool:
            x = node_batch.mean(x)
        return map_chunks(self._finish, self.out.tokens_per_block(x.device), (x,))

    def _finish(self, x: Tensor) -> Tensor:
        return features(self.out(self.hidden_grades.parts(x)))
