"""What a shell runs: a network on tokens kept as (rows, T) by grade."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from ...sequences import Sequences
from ..children import reset_children
from .grades import POSITION, Grades
from .local_context import Edges
from .shell import TokenShell


class GradedNetwork(nn.Module, ABC):
    """Tokens of some grades to tokens, or to whole sequences, of others; its last layers are ``out``.

    Args:
        in_grades, out_grades: channels of a token.
        pool: ``None``, or ``"mean"`` where the output is of whole sequences.
        local_context: whether it takes edges.
        edge_channels: scalars of an edge.
    """

    out: nn.Module

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        *,
        pool: str | None = None,
        local_context: bool = False,
        edge_channels: int = 0,
    ) -> None:
        super().__init__()
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.pool = in_grades, out_grades, pool
        self.local_context, self.edge_channels = local_context, edge_channels

    @abstractmethod
    def forward(self, x: Tensor, pos: Tensor, sequences: Sequences, edges: Edges | None = None) -> Tensor:
        """x (rows, T) and centred positions (3, T), zero where there are none, to (rows, T), or (rows, B) if pooled."""

    def reachable(self, given: Grades) -> Grades:
        """Which output grades can differ from zero where only these input grades do."""
        return self.out_grades

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return next(self.out.parameters())

    def shell(self, order: str, out_name: str) -> TokenShell:
        """What brings users' tokens here; ValueError naming what users call the output, where part of it would be zero
        whatever comes in."""
        reachable = self.reachable(self.in_grades.plus(POSITION))
        if reachable != self.out_grades:
            names = ("0e", "1o", "1e", "0o")
            lost = [
                n for n, wanted, found in zip(names, self.out_grades, reachable, strict=True) if wanted and not found
            ]
            raise ValueError(
                f"{out_name} must be reachable by geometric products, got {' + '.join(lost)} that would always be "
                "zero: have it among the hidden channels, or more num_blocks"
            )
        return TokenShell(
            order,
            invariants=((0, self.in_grades.scalars),),
            needs_positions=self.reachable(self.in_grades) != self.out_grades,
            local_context=self.local_context,
            edge_channels=self.edge_channels,
            pools=self.pool is not None,
        )

    def reset_parameters(self) -> None:
        reset_children(self)
