"""What the Clifford MLPs and the operators of a model have in common: made and checked once, handed down whole."""

from __future__ import annotations

import dataclasses

from ... import checks
from ...functional.backend import check_backend
from ...functional.hyena import LAG_MODES, NORMS, SAME_LENGTH_MODES
from .grades import Grades


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorOptions:
    """Of every operator.

    Args:
        mlp_channels: multivector channels within the projections and messages; ``None`` means the most of any hidden
            grade.
        num_blocks: blocks of every Clifford MLP.
        local_context: whether tokens are first updated from their neighbors.
        edge_channels: scalars of an edge.
        short_conv: taps of a short convolution of query, key and value along the sequence, ``None`` for none.
        backend: of every Clifford MLP, and of vector attention.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    mlp_channels: int | None = None
    num_blocks: int = 1
    local_context: bool = False
    edge_channels: int = 0
    short_conv: int | None = None
    backend: str = "auto"

    def __post_init__(self) -> None:
        checks.positive(num_blocks=self.num_blocks)
        if self.mlp_channels is not None:
            checks.positive(mlp_channels=self.mlp_channels)
        check_backend(self.backend)
        check_short_conv(self.short_conv)
        edges = self.edge_channels
        if isinstance(edges, bool) or not isinstance(edges, int) or edges < 0:
            raise ValueError(f"edge_channels must be an integer from 0 on, got {edges!r}")
        if edges and not self.local_context:
            raise ValueError(f"edge_channels must be 0 without local_context, got {edges}")

    def width(self, hidden_grades: Grades) -> int:
        """Multivector channels within the projections."""
        return max(1, *hidden_grades) if self.mlp_channels is None else self.mlp_channels


FILTERS = {"data": SAME_LENGTH_MODES, "lag": LAG_MODES}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConvolutionOptions:
    """Of a long convolution.

    Args:
        filter: ``"data"``, or ``"lag"``.
        mode: ``"circular"`` or ``"causal"`` with the filter ``"data"``, ``"linear"`` or ``"causal"`` with ``"lag"``;
            ``None`` means the first.
        norm: of the filter ``"data"``: ``"ortho"``, ``"forward"`` or ``"backward"``; ``None`` means the first, and the
            second, the published one, where tokens are sorted by radius: outputs jump least with it.
        order: of the tokens, which the shell checks.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    filter: str = "data"
    mode: str | None = None
    norm: str | None = None
    order: str = "input"

    def __post_init__(self) -> None:
        checks.choice("filter", self.filter, FILTERS)
        if self.mode is not None:
            checks.choice(f"mode with filter={self.filter!r}", self.mode, FILTERS[self.filter])
        if self.norm is not None:
            if self.filter == "lag":
                raise ValueError(f"norm must be None with filter='lag', which has no factor, got {self.norm!r}")
            checks.choice("norm", self.norm, NORMS)

    @property
    def causal(self) -> bool:
        """Whether tokens see earlier ones only."""
        return self.mode == "causal"

    @property
    def known_mode(self) -> str:
        return FILTERS[self.filter][0] if self.mode is None else self.mode

    @property
    def known_norm(self) -> str:
        if self.norm is not None:
            return self.norm
        return "forward" if self.order == "radial" else "ortho"


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyenaOptions(ConvolutionOptions, OperatorOptions):
    """Of the operator with a long convolution.

    Args:
        gate_channels: multivector channels within the gate.
    """

    gate_channels: int = 8

    def __post_init__(self) -> None:
        ConvolutionOptions.__post_init__(self)
        OperatorOptions.__post_init__(self)
        checks.positive(gate_channels=self.gate_channels)


def check_short_conv(taps: int | None) -> None:
    """ValueError unless ``None`` or an odd number from 3 on."""
    if taps is not None and (isinstance(taps, bool) or not isinstance(taps, int) or taps < 3 or not taps % 2):
        raise ValueError(f"short_conv must be None or an odd number of taps from 3 on, got {taps!r}")
