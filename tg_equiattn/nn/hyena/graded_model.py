"""Whole models of operators on tokens kept as (rows, T) by grade."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from ... import checks
from ...sequences import Sequences
from .clifford import CliffordLinear, GradedMLP
from .graded_network import GradedNetwork
from .graded_operators import GradedOperator
from .grades import POSITION, Grades, join_channels
from .local_context import Edges
from .options import OperatorOptions


class GradedModel(GradedNetwork):
    """Linear embedding, operators with residual connections, pooling, Clifford MLP (Figure 2b).

    Args:
        operator: class of the operators.
        in_grades, out_grades, hidden_grades: channels.
        options: of the operators and the last MLP.
        depth: number of operators.
        pool: ``None``, or ``"mean"`` over the tokens of each sequence before the last MLP.
    """

    out: GradedMLP

    def __init__(
        self,
        operator: type[GradedOperator],
        in_grades: Grades,
        out_grades: Grades,
        hidden_grades: Grades,
        options: OperatorOptions,
        *,
        depth: int = 3,
        pool: str | None = None,
    ) -> None:
        checks.positive(depth=depth)
        super().__init__(
            in_grades,
            out_grades,
            pool=pool,
            local_context=options.local_context,
            edge_channels=options.edge_channels,
        )
        self.hidden_grades = hidden_grades
        self.embed = CliffordLinear(in_grades.plus(POSITION), hidden_grades)
        self.operators = nn.ModuleList([operator(hidden_grades, hidden_grades, options) for _ in range(depth)])
        self.out = GradedMLP(hidden_grades, out_grades, options.width(hidden_grades), options)

    def reachable(self, given: Grades) -> Grades:
        position = given.vectors > self.in_grades.vectors
        given = self.hidden_grades.only(given.reachable(0))
        for operator in self.operators:
            given = cast(GradedOperator, operator).reachable(given.plus(POSITION) if position else given)
        return self.out_grades.only(given.reachable(len(self.out.blocks)))

    def forward(self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None) -> Tensor:
        x = self.embed(join_channels((self.in_grades, x), (POSITION, pos))[1])
        for operator in self.operators:
            x = x + operator(x, pos, sequences, edges)
        if self.pool:
            x = sequences.mean(x)
        return self.out.by_blocks(x)
