"""SE(3)-Hyena and vector self-attention on tokens kept as (rows, T); what every public module and host layer wraps.

Scalars are those of grades 0 and 3, vectors those of grades 1 and 2, side by side: products of two of one kind do not
ask which, so pseudoscalars and axial vectors pass through the same streams and keep their parity.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ... import checks
from ...functional.backend import check_backend
from ...functional.hyena.fourier_product import MODES, long_product
from ...functional.hyena.vector_attention import VARIANTS, stream
from ...sequences import Sequences, token_blocks
from ..children import reset_children
from .clifford import PRODUCTS, CliffordLinear, GradedMLP, Grades, join
from .local_context import POSITION, Edges, LocalContext


class GradedOperator(nn.Module, ABC):
    """Projection to query, key and value; mixing along sequences; residual and output projection (Algorithm 1).

    Args:
        in_grades, out_grades: channels of a token.
        hidden_grades: channels of query, key and value; ``None`` means ``in_grades``.
        mlp_channels: multivector channels within the projections; ``None`` means the most of any hidden grade.
        num_blocks, product: of every Clifford MLP.
        local_context: whether tokens are first updated from their neighbours.
        edge_channels: scalars of an edge.
        local_channels: multivector channels of messages; ``None`` means ``mlp_channels``.
        backend: of every Clifford MLP, and of vector attention.
    """

    pool: str | None = None  # a token stays a token

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        *,
        hidden_grades: Grades | None = None,
        mlp_channels: int | None = None,
        num_blocks: int = 1,
        product: str = "channelwise",
        local_context: bool = False,
        edge_channels: int = 0,
        local_channels: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        hidden = in_grades if hidden_grades is None else hidden_grades
        mlp_channels = max(1, *hidden) if mlp_channels is None else mlp_channels
        local_channels = mlp_channels if local_channels is None else local_channels
        checks.positive(num_blocks=num_blocks, mlp_channels=mlp_channels, local_channels=local_channels)
        checks.choice("product", product, PRODUCTS)
        check_backend(backend)
        if isinstance(edge_channels, bool) or not isinstance(edge_channels, int) or edge_channels < 0:
            raise ValueError(f"edge_channels must be an integer from 0 on, got {edge_channels!r}")
        if edge_channels and not local_context:
            raise ValueError(f"edge_channels must be 0 without local_context, got {edge_channels}")
        self.in_grades, self.out_grades, self.hidden_grades = in_grades, out_grades, hidden
        self.edge_channels = edge_channels
        self.backend = backend
        local, options = (in_grades, edge_channels, local_channels), (num_blocks, product, backend)
        self.local = LocalContext(*local, *options) if local_context else None
        self.project = GradedMLP(in_grades.plus(POSITION), hidden.times(3), mlp_channels, *options)
        self.shortcut = None if in_grades == hidden else CliffordLinear(in_grades, hidden, bias=False)
        self.out = GradedMLP(hidden, out_grades, mlp_channels, *options)

    def reached(self, there: Grades) -> Grades:
        """Which output grades can differ from zero where only these input grades do."""
        products = len(self.out.blocks)
        return self.out_grades.masked(self.hidden_grades.masked(there.reached(products)).reached(products))

    @property
    def like(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return self.out.like

    def forward(self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None) -> Tensor:
        """x (rows, T) and centred positions (3, T), zero where there are none."""
        if self.local is not None and edges is not None:
            x = self.local(x, pos, edges)
        projected = token_blocks(self._project, self.project.step(x.device), [x, pos])
        grades = [part.chunk(3, 1) for part in self.hidden_grades.times(3).split(projected)]
        scalars = [_side_by_side(grades[0][n], grades[3][n]) for n in range(3)]
        vectors = [_side_by_side(grades[1][n], grades[2][n]) for n in range(3)]
        mixed = [
            self.mix(kind, sequences, *three) if three[0].shape[1] else three[0]
            for kind, three in (("scalars", scalars), ("vectors", vectors))
        ]
        values = [scalars[2], vectors[2]]
        return token_blocks(self._finish, self.out.step(x.device), [x, *values, *mixed])

    def _project(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.project(join((self.in_grades, x), (POSITION, pos))[1])

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

    def reset_parameters(self) -> None:
        reset_children(self)


def _side_by_side(x: Tensor, y: Tensor) -> Tensor:
    if not y.shape[1]:
        return x
    return torch.cat([x, y], 1) if x.shape[1] else y


class HyenaOperator(GradedOperator):
    """Mixes by long convolution, gates by a Clifford MLP of what was mixed, and multiplies with the values.

    Args:
        mode: of the convolution, ``"circular"`` or ``"causal"``.
        gate_channels: multivector channels within the gate.
        options: of :class:`GradedOperator`.
    """

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        *,
        mode: str = "circular",
        gate_channels: int = 8,
        num_blocks: int = 1,
        product: str = "channelwise",
        backend: str = "auto",
        **options: Any,
    ) -> None:
        super().__init__(in_grades, out_grades, num_blocks=num_blocks, product=product, backend=backend, **options)
        checks.choice("mode", mode, MODES)
        checks.positive(gate_channels=gate_channels)
        self.mode = mode
        c = self.hidden_grades
        self.scalars, self.vectors = c.scalars + c.pseudoscalars, c.vectors + c.bivectors
        mixed = Grades(scalars=self.scalars, bivectors=self.vectors)
        self.gate = GradedMLP(mixed, Grades(self.scalars + self.vectors), gate_channels, num_blocks, product, backend)

    def mix(self, kind: str, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sequences.mix(lambda q, k, lengths: long_product(q, k, lengths, self.mode, False), query, key)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        gates = torch.sigmoid(self.gate(torch.cat([mixed_scalars.flatten(0, 1), mixed_vectors.flatten(0, 1)])))
        scalar_gates, vector_gates = gates.split([self.scalars, self.vectors])
        scalars = scalar_gates * mixed_scalars * scalars
        return scalars, torch.linalg.cross(vector_gates * mixed_vectors, vectors, dim=0)


class AttentionOperator(GradedOperator):
    """Mixes vectors by cross-product attention and scalars by softmax attention; gating is attention's own.

    Args:
        variant: of :func:`~tg_equiattn.functional.vector_attention`.
        options: of :class:`GradedOperator`.
    """

    def __init__(self, in_grades: Grades, out_grades: Grades, *, variant: str = "equations", **options: Any) -> None:
        super().__init__(in_grades, out_grades, **options)
        checks.choice("variant", variant, VARIANTS)
        self.variant = variant

    def mix(self, kind: str, sequences: Sequences, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return sequences.mix(attend if kind == "scalars" else self._attend_vectors, query, key, value)

    def _attend_vectors(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        return stream(q, k, v, lengths, self.variant, None, self.backend)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        return mixed_scalars, mixed_vectors


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
    """Softmax attention of (1, S, B, N), all channels one head."""
    mask = None
    if lengths is not None:
        there = torch.arange(q.shape[-1], device=q.device) < lengths.clamp(min=1)[:, None]  # one key at least: no NaN
        q, k, v = (torch.where(there, x, 0.0) for x in (q, k, v))
        mask = there[:, None, None]
    q, k, v = (x.permute(2, 0, 3, 1).contiguous() for x in (q, k, v))  # as kernels in O(N) memory want them
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.permute(1, 3, 0, 2)


class GradedModel(nn.Module):
    """Linear embedding, operators with residual connections, pooling, Clifford MLP (Figure 2b).

    Args:
        operator: class of the operators.
        in_grades, out_grades, hidden_grades: channels.
        depth: number of operators.
        pool: ``None``, or ``"mean"`` over the tokens of each sequence before the last MLP.
        options: of the operator.
    """

    def __init__(
        self,
        operator: type[GradedOperator],
        in_grades: Grades,
        out_grades: Grades,
        hidden_grades: Grades,
        *,
        depth: int = 3,
        pool: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        checks.positive(depth=depth)
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.hidden_grades = in_grades, out_grades, hidden_grades
        self.pool: str | None = pool
        self.embed = CliffordLinear(in_grades.plus(POSITION), hidden_grades)
        operators = [operator(hidden_grades, hidden_grades, **options) for _ in range(depth)]
        self.operators = nn.ModuleList(operators)
        self.local, self.edge_channels = operators[0].local is not None, operators[0].edge_channels
        width, blocks = options.get("mlp_channels"), options.get("num_blocks", 1)
        width = max(1, *hidden_grades) if width is None else width
        product, backend = options.get("product", "channelwise"), options.get("backend", "auto")
        self.out = GradedMLP(hidden_grades, out_grades, width, blocks, product, backend)

    def reached(self, there: Grades) -> Grades:
        """Which output grades can differ from zero where only these input grades do."""
        position = there.vectors > self.in_grades.vectors
        there = self.hidden_grades.masked(there.reached(0))
        for operator in self.operators:
            there = cast(GradedOperator, operator).reached(there.plus(POSITION) if position else there)
        return self.out_grades.masked(there.reached(len(self.out.blocks)))

    @property
    def like(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return self.out.like

    def forward(self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None) -> Tensor:
        x = self.embed(join((self.in_grades, x), (POSITION, pos))[1])
        for operator in self.operators:
            x = x + operator(x, pos, sequences, edges)
        if self.pool:
            x = sequences.mean(x)
        return token_blocks(self.out, self.out.step(x.device), [x])

    def reset_parameters(self) -> None:
        reset_children(self)
