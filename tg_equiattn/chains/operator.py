"""Networks on tokens by grade: operators that mix tokens along sequences, and models of several operators.

Operators mix scalars (grades 0 and 3) and vectors (grades 1 and 2). A product of two channels of one kind has a
definite parity, so channels of both parities pass through side by side.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.edges import check_edges
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch, PaddedBatch
from ..modules import StoresSettings
from ..softmax_attention import softmax_attention
from ..tiles import joined, map_tiles
from ..torch_state import full_precision
from .clifford import GRADE_NAMES, POSITION, CliffordLinear, Grades, MultivectorMLP, features, with_position
from .clifford_algebra import cross_product
from .convolutions import ImplicitFilter, ShortConv
from .local_context import LocalContext
from .long_conv import long_convolution, vectors_of
from .sequences import ChainArguments, OperatorSettings, Placement, TokenBatch
from .vector_attention import vector_attention

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class TokenNetwork(StoresSettings):
    """Base class of networks that map tokens of some grades to tokens, or pooled sequences, of other grades. Subclasses
    have ``forward(x, tokens)`` on features with their channels first, and their last layers are ``out``."""

    out: nn.Module

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings,
        pool: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.hidden_grades = in_grades, out_grades, hidden_grades
        self.options, self.pool = options, pool
        self.placement = Placement(options, [slice(0, in_grades.scalars)])

    def run(
        self, x: Float[Tensor, "tokens dim"], pos: Tensor | None, node_batch: NodeBatch, along: ChainArguments,
        edge_index: Tensor | None, edge_attr: Tensor | None,
    ) -> Float[Tensor, "tokens_or_graphs out"]:  # fmt: skip
        """Check the user's arguments, put tokens in order and call ``forward``. Features x have been checked, and have
        the dtype of parameters."""
        with full_precision(x.device):
            x, tokens = self.placement(x, pos, node_batch, along)
            out = self(x, tokens._replace(edges=self._edges(edge_index, edge_attr, tokens)))
            return out.T if self.pool else tokens.restore(out)

    def _edges(self, edge_index: Tensor | None, edge_attr: Tensor | None, tokens: TokenBatch) -> NeighborList | None:
        channels, graphs = self.options.edge_channels, tokens.graphs
        if (edge_index is not None) != self.options.local_context:
            wanted = "given with local_context=True" if edge_index is None else "None without local_context=True"
            raise ValueError(f"edge_index must be {wanted}, got {'None' if edge_index is None else 'edges'}")
        if (edge_attr is not None) != bool(channels):
            text = "None" if edge_attr is None else "some"
            raise ValueError(f"edge_attr must have edge_channels={channels} scalars an edge, got {text}")
        if edge_index is None:
            return None
        check_edges(edge_index, graphs.nodes)
        if tokens.slots is not None:
            edge_index = tokens.slots.slot[edge_index]
        if self.options.causal:
            _check_no_later_source(tokens.sequences.time[edge_index])
        return NeighborList.from_edges(
            edge_index, graphs.nodes, batch=graphs.batch, node_mask=graphs.mask, edge_dim=channels,
            features=edge_attr, loops=True, checked=True,
        )  # fmt: skip

    def reachable(self, grades: Grades) -> Grades:
        """The output channels that can differ from zero if the input has the independent channels ``grades``."""
        return self.out_grades

    def check_reachable(self, name: str) -> None:
        """Raise ValueError if part of the output would always be zero. ``name`` is the argument of its channels."""
        reachable = self.reachable(self.in_grades if self.options.causal else self.in_grades.plus(POSITION))
        grades = zip(GRADE_NAMES, self.out_grades, reachable, strict=True)
        zero = [grade for grade, channels, possible in grades if channels and not possible]
        if zero:
            raise ValueError(
                f"{name} must be reachable by geometric products, got {' + '.join(zero)} that would always be zero: "
                "add it to hidden_scalars or hidden_vectors (or irreps_hidden), add vectors (such as steps to "
                "neighbors) to the input, or set num_blocks=2"
            )

    def settings(self) -> dict[str, Any]:
        return {
            "order": self.options.order, "pool": self.pool, "in_grades": self.in_grades, "out_grades": self.out_grades,
            "hidden_grades": self.hidden_grades, "length_scale": float(self.options.length_scale),
        }  # fmt: skip

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter with the dtype and device that the input must have."""
        return next(self.out.parameters())


def _check_no_later_source(time: Int[Tensor, "2 edges"]) -> None:
    """Raise ValueError unless sources come no later than targets."""
    earlier = time[0] <= time[1]

    def first() -> str:
        source, target = time[:, ~earlier][:, 0].tolist()
        return f", got an edge from {source} to {target} along the sequence: leave such edges out"

    checks.must_hold(earlier.all(), "edge_index must join no later token to an earlier one with causal=True", first)


class TokenOperator(TokenNetwork):
    """An operator: projection to query, key and value, mixing of tokens, residual and output MLP (Algorithm 1).

    Tokens are mixed by a long convolution of queries and keys (``filter="data"``), by the product of queries with a
    long convolution of keys (``"implicit"``), or by vector self-attention (``attention``). After a convolution, a
    Clifford MLP of the result gates it, and it multiplies the values.
    """

    out: MultivectorMLP
    gate: MultivectorMLP | None
    filters: nn.ModuleDict | None

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings) -> None:
        super().__init__(in_grades, out_grades, hidden_grades, options)
        hidden, width, num_blocks = hidden_grades, max(1, *hidden_grades), options.num_blocks
        self.local: LocalContext | None = None
        if options.local_context:
            self.local = LocalContext(in_grades, width, options.edge_channels, num_blocks)
        # with an implicit filter, tokens of zeros must have no effect, so there is no bias
        bias = options.attention or options.filter != "implicit"
        self.project = MultivectorMLP(in_grades.plus(POSITION), hidden.times(3), width, num_blocks, bias)
        # if the input has no vectors, the residual has positions as vectors
        start = in_grades if in_grades.vectors or options.causal else in_grades.plus(POSITION)
        self.shortcut = None if in_grades == hidden else CliffordLinear(start, hidden, bias=False)
        self.short_conv: ShortConv | None = None
        if options.short_conv is not None:
            self.short_conv = ShortConv(_channels(hidden), options.short_conv, options.causal)
        self.out = MultivectorMLP(hidden, out_grades, width, num_blocks)
        self.placement.needs_positions = self.reachable(in_grades) != out_grades
        self.scalars, vectors = hidden.scalars + hidden.pseudoscalars, hidden.vectors + hidden.bivectors
        self.gate, self.filters, self.norm = None, None, options.norm
        if not options.attention:
            mixed = Grades(scalars=self.scalars, bivectors=vectors)
            self.gate = MultivectorMLP(mixed, Grades(self.scalars + vectors), GATE_CHANNELS, num_blocks)
        if not bias:
            kinds = {"scalars": self.scalars, "vectors": vectors}
            self.filters = nn.ModuleDict({kind: ImplicitFilter(n, options.causal) for kind, n in kinds.items() if n})

    def settings(self) -> dict[str, Any]:
        filter = None if self.options.attention else self.options.filter
        return super().settings() | {"causal": self.options.causal, "filter": filter}

    def reachable(self, grades: Grades) -> Grades:
        products = len(self.out.blocks)
        return self.out_grades.only(self.hidden_grades.only(grades.reachable(products)).reachable(products))

    def forward(self, x: Float[Tensor, "dim tokens"], tokens: TokenBatch) -> Float[Tensor, "out tokens"]:
        pos = tokens.pos
        if self.local is not None and tokens.edges is not None:
            x = self.local(x, pos, tokens.edges)
        step = self.project.tokens_per_block(x.device)
        projected = map_tiles(_project, step, (x, pos), self.project, self.in_grades, dim=-1)
        if self.short_conv is not None:
            projected = self.short_conv(projected.flatten(0, 1), tokens.sequences).view_as(projected)
        nodes = x, pos, projected[2], *self.mix(projected, tokens)
        others = self.gate, self.in_grades, self.hidden_grades, self.shortcut, self.out
        return map_tiles(_finish, step, nodes, *others, dim=-1)

    def mix(
        self, projected: Float[Tensor, "3 features tokens"], tokens: TokenBatch
    ) -> tuple[Float[Tensor, "scalars tokens"], Float[Tensor, "3 vectors tokens"]]:
        """Mix the tokens of sequences or graphs by query, key and value. Their features are the scalars of both
        parities, and then the vectors of both parities, with components outside of channels."""
        scalars, sequences = self.scalars, tokens.sequences
        if self.filters is not None:
            query, key = projected[0], projected[1]
            f, v = key[:scalars], vectors_of(key, scalars)
            f = self.filters["scalars"](f, sequences) if scalars else f
            v = self.filters["vectors"](v, sequences) if v.shape[1] else v
            return query[:scalars] * f, cross_product(vectors_of(query, scalars), v, 0)

        def convolve(x: Tensor, rows: PaddedBatch) -> Tensor:
            counts = sequences.counts(rows)
            return long_convolution(x[0], x[1], scalars, rows.lengths, self.options.mode, self.norm, counts)[None]

        def attend(x: Tensor, rows: PaddedBatch) -> Tensor:
            out = []
            if scalars:
                q, k, v = x[:, :scalars].movedim(1, -1)
                out.append(softmax_attention(q * scalars**-0.5, k, v, rows.mask).movedim(-1, 0))
            if scalars < x.shape[1]:
                q, k, v = x[:, scalars:].unflatten(1, (3, -1)).permute(0, 3, 2, 4, 1)
                out.append(vector_attention(q, k, v, rows.lengths).permute(3, 1, 0, 2).flatten(0, 1))
            return joined(out)[None]

        if self.gate is None:
            mixed = tokens.graphs.mix(attend, projected, dim=2)[0]
        else:
            mixed = sequences.mix(convolve, projected[:2])[0]
        return mixed[:scalars], vectors_of(mixed, scalars)


GATE_CHANNELS = 8  # hidden multivectors of the gate's MLP


def _channels(hidden: Grades) -> list[int]:
    """The channel of each feature of query, key and value, where channels of a grade are side by side."""
    first, order = [3 * sum(hidden[:grade]) for grade in range(4)], (0, 3, 1, 2, 1, 2, 1, 2)
    return [first[g] + n * hidden[g] + channel for n in range(3) for g in order for channel in range(hidden[g])]


def _project(x: Tensor, pos: Tensor, project: MultivectorMLP, grades: Grades) -> Float[Tensor, "3 features tokens"]:
    parts = project(with_position(grades.parts(x), pos))
    rows: list[Tensor] = []
    for grade, component in ((0, 0), (3, 0), (1, 0), (2, 0), (1, 1), (2, 1), (1, 2), (2, 2)):
        channels = parts[grade][component]
        rows.append(channels.view(3, channels.shape[0] // 3, channels.shape[1]))
    return torch.cat(rows, 1)


def _finish(
    x: Tensor, pos: Tensor, value: Tensor, scalars: Tensor, vectors: Tensor, gate: MultivectorMLP | None,
    grades: Grades, hidden: Grades, shortcut: CliffordLinear | None, out: MultivectorMLP,
) -> Tensor:  # fmt: skip
    """The output from the mixed scalars and vectors of both parities."""
    if gate is not None:
        count, none = scalars.shape[0], vectors[:, :0]
        gates = torch.sigmoid(gate([scalars[None], none, vectors, none[:1]])[0])
        scalars = gates[0, :count] * scalars * value[:count]
        vectors = cross_product(gates[:, count:] * vectors, vectors_of(value, count), 0)
    parts = grades.parts(x)
    if shortcut is not None:
        parts = shortcut(parts if shortcut.in_grades == grades else with_position(parts, pos))
    updates = [*scalars[None].split([hidden.scalars, hidden.pseudoscalars], 1)]
    updates[1:1] = vectors.split([hidden.vectors, hidden.bivectors], 1)
    return features(out([part + update for part, update in zip(parts, updates, strict=True)]))


class TokenModel(TokenNetwork):
    """A model: linear embedding, operators with residual connections, pooling and a Clifford MLP (Figure 2b)."""

    out: MultivectorMLP

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings,
        num_layers: int, pool: str | None,
    ) -> None:  # fmt: skip
        checks.positive(num_layers=num_layers)
        super().__init__(in_grades, out_grades, hidden_grades, options, pool)
        kinds = zip(GRADE_NAMES, in_grades, hidden_grades, strict=True)
        dropped = " + ".join(name for name, inside, hidden in kinds if inside and not hidden)
        if dropped:
            raise ValueError(
                "hidden_scalars and hidden_vectors (or irreps_hidden) must have the kinds of the input, got "
                f"{dropped} in the input alone, which would be dropped: add {dropped} to them, or leave it out of the "
                "input"
            )
        self.embed = CliffordLinear(in_grades.plus(POSITION), hidden_grades)
        inside = dataclasses.replace(options, length_scale=1.0)  # positions have been divided
        grades = hidden_grades, hidden_grades, hidden_grades
        self.operators = nn.ModuleList(TokenOperator(*grades, inside) for _ in range(num_layers))
        self.out = MultivectorMLP(hidden_grades, out_grades, max(1, *hidden_grades), options.num_blocks)
        self.placement.needs_positions = self.reachable(in_grades) != out_grades

    def reachable(self, grades: Grades) -> Grades:
        position = grades.vectors > self.in_grades.vectors
        independent = min(self.hidden_grades.vectors, grades.vectors - position)
        grades = self.hidden_grades.only(grades.reachable(0))._replace(vectors=independent)
        for operator in self.operators:
            grades = cast(TokenOperator, operator).reachable(grades.plus(POSITION) if position else grades)
        return self.out_grades.only(grades.reachable(len(self.out.blocks)))

    def forward(self, x: Float[Tensor, "dim tokens"], tokens: TokenBatch) -> Float[Tensor, "out tokens_or_graphs"]:
        x = features(self.embed(with_position(self.in_grades.parts(x), tokens.pos)))
        for operator in self.operators:
            x = x + operator(x, tokens)
        if self.pool:
            x = tokens.graphs.mean(x.T).T
        return map_tiles(_read_out, self.out.tokens_per_block(x.device), (x,), self.out, self.hidden_grades, dim=-1)


def _read_out(x: Tensor, out: MultivectorMLP, grades: Grades) -> Tensor:
    return features(out(grades.parts(x)))
