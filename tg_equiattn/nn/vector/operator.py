"""Networks on tokens by grade: operators that mix tokens along sequences, and models of several operators.

Operators mix scalars (grades 0 and 3) and vectors (grades 1 and 2). A product of two channels of one kind has a
definite parity, so channels of both parities pass through side by side.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ... import checks
from ...edges import check_edges
from ...functional.tiles import map_tiles
from ...modes import full_precision
from ...neighbors import NeighborList
from ...node_batch import NodeBatch
from ...orders import ORDERS
from ..modules import StoresSettings, reset_children
from .clifford import CliffordLinear, MultivectorMLP
from .grades import GRADE_NAMES, POSITION, Grades, features, with_position
from .messages import LocalContext
from .placement import PositionUnit, TokenBatch, place_tokens
from .sequences import ChainArguments
from .short_conv import ShortConv

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TokenNetwork(StoresSettings):
    """Base class of networks that map tokens of some grades to tokens, or pooled sequences, of other grades. Subclasses
    have ``forward(x, tokens)``, and their last layers are ``out``."""

    out: nn.Module
    hidden_grades: Grades
    needs_positions: bool  # true if part of the output is zero without positions
    in_space: bool = False  # true if neighbors are the nearest nodes, instead of the next ones along a sequence
    no_ring: str = ""  # the setting that rules out rings
    causal: bool = False
    local_context: bool = False
    edge_channels: int = 0

    def __init__(
        self, in_grades: Grades, out_grades: Grades, *, order: str = "input", length: float = 1.0,
        pool: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        checks.choice("order", order, ORDERS)
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.order, self.pool = in_grades, out_grades, order, pool
        self.unit = PositionUnit(length, self.in_space or order == "radial")

    def run(
        self,
        x: Float[Tensor, "tokens dim"],
        pos: Tensor | None,
        node_batch: NodeBatch,
        along: ChainArguments,
        edge_index: Tensor | None,
        edge_attr: Tensor | None,
    ) -> Tensor:
        """Check the user's arguments, put tokens in order and call ``forward``. Features x must have been checked."""
        with full_precision(x.device):
            x, tokens = place_tokens(
                x.to(self.reference_parameter.dtype), pos, node_batch, along, by=self.order, causal=self.causal,
                invariants=[slice(0, self.in_grades.scalars)],
                needs_positions=self.needs_positions, unit=self.unit,
                no_ring=self.no_ring,
            )  # fmt: skip
            out = self(x, tokens._replace(edges=self._edges(edge_index, edge_attr, tokens)))
            return out if self.pool else tokens.restore(out)

    def _edges(self, edge_index: Tensor | None, edge_attr: Tensor | None, tokens: TokenBatch) -> NeighborList | None:
        if (edge_index is not None) != self.local_context:
            wanted = "given with local_context=True" if edge_index is None else "None without local_context=True"
            raise ValueError(f"edge_index must be {wanted}, got {'None' if edge_index is None else 'edges'}")
        if (edge_attr is not None) != bool(self.edge_channels):
            came = "None" if edge_attr is None else "some"
            raise ValueError(f"edge_attr must have edge_channels={self.edge_channels} scalars an edge, got {came}")
        if edge_index is None:
            return None
        graphs = tokens.graphs
        check_edges(edge_index, graphs.nodes)
        if tokens.slots is not None:
            edge_index = tokens.slots.slot[edge_index]
        if self.causal:
            _check_no_later_source(tokens.sequences.time[edge_index])
        return NeighborList.from_edges(
            edge_index, graphs.nodes, batch=graphs.batch, node_mask=graphs.mask, edge_dim=self.edge_channels,
            features=edge_attr, loops=True, checked=True,
        )  # fmt: skip

    def reachable(self, given: Grades) -> Grades:
        """The output channels that can differ from zero if the input has the independent channels ``given``."""
        return self.out_grades

    def check_reachable(self, name: str) -> None:
        """Raise ValueError if part of the output would always be zero. ``name`` is the argument of its channels."""
        reachable = self.reachable(self.in_grades if self.causal else self.in_grades.plus(POSITION))
        grades = zip(GRADE_NAMES, self.out_grades, reachable, strict=True)
        zero = [grade for grade, wanted, found in grades if wanted and not found]
        if zero:
            raise ValueError(
                f"{name} must be reachable by geometric products, got {' + '.join(zero)} that would always be zero: "
                "add it to the hidden channels, add vectors (such as steps to neighbors) to the input, or set "
                "num_blocks=2"
            )

    def settings(self) -> dict[str, Any]:
        return {
            "order": self.order, "pool": self.pool, "in_grades": self.in_grades, "out_grades": self.out_grades,
            "hidden_grades": self.hidden_grades, "length": self.unit.length,
        }  # fmt: skip

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter with the dtype and device that the input must have."""
        return next(self.out.parameters())

    def reset_parameters(self) -> None:
        reset_children(self)


def _check_no_later_source(time: Int[Tensor, "2 edges"]) -> None:
    """Raise ValueError unless sources come no later than targets."""
    earlier = time[0] <= time[1]

    def given() -> str:
        source, target = time[:, ~earlier][:, 0].tolist()
        return f", got an edge from {source} to {target} along the sequence: leave such edges out"

    checks.must_hold(earlier.all(), "edge_index must join no later token to an earlier one with causal=True", given)


class TokenOperator(TokenNetwork, ABC):
    """Base class of operators: projection to query, key and value, mixing of tokens, residual and output MLP (Algorithm
    1). Without ``bias`` the projection has no biases; :class:`.SE3HyenaOperator` describes the other arguments."""

    SETTINGS: ClassVar[tuple[str, ...]] = ("short_conv", "local_context", "edge_channels")
    """Names that ``attn_kwargs`` of a model may have."""
    out: MultivectorMLP

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        hidden_grades: Grades | None = None,
        *,
        causal: bool = False,
        short_conv: int | None = None,
        order: str = "input",
        length: float = 1.0,
        local_context: bool = False,
        edge_channels: int = 0,
        num_blocks: int = 1,
        bias: bool = True,
    ) -> None:
        super().__init__(in_grades, out_grades, order=order, length=length)
        checks.positive(num_blocks=num_blocks)
        checks.whole(edge_channels=edge_channels)
        if edge_channels and not local_context:
            raise ValueError(f"edge_channels={edge_channels} needs local_context=True: set it, or edge_channels=0")
        self.hidden_grades = hidden = in_grades if hidden_grades is None else hidden_grades
        self.causal, self.local_context, self.edge_channels = causal, local_context, edge_channels
        width = max(1, *hidden)
        self.gate: MultivectorMLP | None = None
        self.local = LocalContext(in_grades, width, edge_channels, num_blocks) if local_context else None
        self.project = MultivectorMLP(in_grades.plus(POSITION), hidden.times(3), width, num_blocks, bias)
        # if the input has no vectors, the residual has positions as vectors
        start = in_grades if in_grades.vectors or causal else in_grades.plus(POSITION)
        self.shortcut = None if in_grades == hidden else CliffordLinear(start, hidden, bias=False)
        channels = hidden.times(3).channels()
        self.short_conv = None if short_conv is None else ShortConv(channels, short_conv, causal)
        self.out = MultivectorMLP(hidden, out_grades, width, num_blocks)
        self.needs_positions = self.reachable(in_grades) != out_grades

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"causal": self.causal}

    def reachable(self, given: Grades) -> Grades:
        products = len(self.out.blocks)
        return self.out_grades.only(self.hidden_grades.only(given.reachable(products)).reachable(products))

    def forward(self, x: Float[Tensor, "tokens dim"], tokens: TokenBatch) -> Float[Tensor, "tokens out"]:
        pos = tokens.pos
        if self.local is not None and tokens.edges is not None:
            x = self.local(x, pos, tokens.edges)
        step = self.project.tokens_per_block(x.device)
        projected = map_tiles(_project, step, (x, pos), self.project, self.in_grades)
        if self.short_conv is not None:
            projected = self.short_conv(projected, tokens.sequences)
        grades = [part.chunk(3, 1) for part in self.hidden_grades.times(3).split(projected)]
        scalars = [_side_by_side(grades[0][n], grades[3][n])[..., 0] for n in range(3)]
        vectors = [_side_by_side(grades[1][n], grades[2][n]) for n in range(3)]
        mixed = [self.mix(q, k, v, tokens) if q.shape[1] else q for q, k, v in (scalars, vectors)]
        nodes, step = (x, pos, scalars[2], vectors[2], *mixed), self.out.tokens_per_block(x.device)
        others = self.combine, self.gate, self.in_grades, self.hidden_grades, self.shortcut, self.out
        return map_tiles(_finish, step, nodes, *others)

    @abstractmethod
    def mix(self, query: Tensor, key: Tensor, value: Tensor, tokens: TokenBatch) -> Tensor:
        """Mix scalars (T, S) or vectors (T, V, 3) of the tokens of sequences or graphs."""

    @staticmethod
    @abstractmethod
    def combine(
        scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor, gate: Any
    ) -> tuple[Tensor, Tensor]:
        """The update that is added to tokens, from values and mixed channels: scalars (1, S, T), vectors (3, V, T).
        Subclasses have a function of a module file here."""


def _project(x: Tensor, pos: Tensor, project: MultivectorMLP, grades: Grades) -> Tensor:
    return features(project(with_position(grades.parts(x), pos)))


def _finish(
    x: Tensor, pos: Tensor, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor,
    combine: Callable, gate: MultivectorMLP | None, grades: Grades, hidden: Grades, shortcut: CliffordLinear | None,
    out: MultivectorMLP,
) -> Tensor:  # fmt: skip
    streams = scalars, vectors, mixed_scalars, mixed_vectors
    scalars, vectors, *mixed = (y.permute(*reversed(range(y.ndim))).contiguous() for y in streams)
    scalars, vectors = combine(scalars[None], vectors, mixed[0][None], mixed[1], gate)
    parts = grades.parts(x)
    if shortcut is not None:
        parts = shortcut(parts if shortcut.in_grades == grades else with_position(parts, pos))
    first, second = hidden.scalars, hidden.vectors
    added = scalars[:, :first], vectors[:, :second], vectors[:, second:], scalars[:, first:]
    return features(out([a + b for a, b in zip(parts, added, strict=True)]))


def _side_by_side(x: Tensor, y: Tensor) -> Tensor:
    if not y.shape[1]:
        return x
    return torch.cat([x, y], 1) if x.shape[1] else y


class TokenModel(TokenNetwork):
    """A model: linear embedding, operators with residual connections, pooling and a Clifford MLP (Figure 2b)."""

    out: MultivectorMLP

    def __init__(
        self,
        operator: type[TokenOperator],
        in_grades: Grades,
        out_grades: Grades,
        hidden_grades: Grades,
        *,
        num_layers: int,
        num_blocks: int,
        pool: str | None,
        attn_kwargs: Mapping[str, Any] | None,
        order: str = "input",
        length: float = 1.0,
    ) -> None:
        self.in_space = operator.in_space
        super().__init__(in_grades, out_grades, order=order, length=length, pool=pool)
        checks.positive(num_layers=num_layers)
        settings = dict(attn_kwargs or {})
        unknown = [name for name in settings if name not in operator.SETTINGS]
        if unknown:
            raise ValueError(
                f"attn_kwargs must be a dictionary with keys among {operator.SETTINGS}, got {unknown[0]!r}"
            )
        self.hidden_grades = hidden_grades
        kinds = zip(GRADE_NAMES, in_grades, hidden_grades, strict=True)
        dropped = " + ".join(name for name, given, hidden in kinds if given and not hidden)
        if dropped:
            raise ValueError(
                f"hidden channels must have the kinds of the input, got {dropped} in the input alone, which would be "
                f"dropped: add {dropped} to the hidden channels, or leave it out of the input"
            )
        self.embed = CliffordLinear(in_grades.plus(POSITION), hidden_grades)
        operators = [
            operator(hidden_grades, hidden_grades, order=order, num_blocks=num_blocks, **settings)
            for _ in range(num_layers)
        ]
        self.operators = nn.ModuleList(operators)
        first = operators[0]
        self.causal, self.local_context, self.edge_channels = first.causal, first.local_context, first.edge_channels
        self.no_ring = first.no_ring
        self.out = MultivectorMLP(hidden_grades, out_grades, max(1, *hidden_grades), num_blocks)
        self.needs_positions = self.reachable(in_grades) != out_grades

    def reachable(self, given: Grades) -> Grades:
        position = given.vectors > self.in_grades.vectors
        independent = min(self.hidden_grades.vectors, given.vectors - position)
        given = self.hidden_grades.only(given.reachable(0))._replace(vectors=independent)
        for operator in self.operators:
            given = cast(TokenOperator, operator).reachable(given.plus(POSITION) if position else given)
        return self.out_grades.only(given.reachable(len(self.out.blocks)))

    def forward(self, x: Float[Tensor, "tokens dim"], tokens: TokenBatch) -> Float[Tensor, "tokens_or_graphs out"]:
        x = features(self.embed(with_position(self.in_grades.parts(x), tokens.pos)))
        for operator in self.operators:
            x = x + operator(x, tokens)
        if self.pool:
            x = tokens.graphs.mean(x)
        return map_tiles(_read_out, self.out.tokens_per_block(x.device), (x,), self.out, self.hidden_grades)


def _read_out(x: Tensor, out: MultivectorMLP, grades: Grades) -> Tensor:
    return features(out(grades.parts(x)))
