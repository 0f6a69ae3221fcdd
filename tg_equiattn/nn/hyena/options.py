"""What the Clifford MLPs and the operators of a model have in common: made and checked once, handed down whole."""

from __future__ import annotations

import dataclasses

from ... import checks
from ...functional.backend import check_backend
from ...functional.hyena.fft_convolution import SAME_LENGTH_MODES
from .grades import Grades


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """Of every operator.

    Args:
        mlp_channels: multivector channels within the projections and messages; ``None`` means the most of any hidden
            grade.
        num_blocks: blocks of every Clifford MLP.
        local_context: whether tokens are first updated from their neighbours.
        edge_channels: scalars of an edge.
        backend: of every Clifford MLP, and of vector attention.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    mlp_channels: int | None = None
    num_blocks: int = 1
    local_context: bool = False
    edge_channels: int = 0
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.positive(num_blocks=self.num_blocks)
        if self.mlp_channels is not None:
            checks.positive(mlp_channels=self.mlp_channels)
        check_backend(self.backend)
        edges = self.edge_channels
        if isinstance(edges, bool) or not isinstance(edges, int) or edges < 0:
            raise ValueError(f"edge_channels must be an integer from 0 on, got {edges!r}")
        if edges and not self.local_context:
            raise ValueError(f"edge_channels must be 0 without local_context, got {edges}")

    def width(self, hidden_grades: Grades) -> int:
        """Multivector channels within the projections."""
        return max(1, *hidden_grades) if self.mlp_channels is None else self.mlp_channels


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyenaOptions(OperatorOptions):
    """Of the operator with a long convolution.

    Args:
        mode: of the convolution, ``"circular"`` or ``"causal"``.
        gate_channels: multivector channels within the gate.
    """

    mode: str = "circular"
    gate_channels: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("mode", self.mode, SAME_LENGTH_MODES)
        checks.positive(gate_channels=self.gate_channels)
