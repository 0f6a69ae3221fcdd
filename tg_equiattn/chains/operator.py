"""Networks on tokens by grade: operators that mix tokens along sequences, and models of several operators.

Operators mix scalars (grades 0 and 3) and vectors (grades 1 and 2). A product of two channels of one kind has a
definite parity, so channels of both parities pass through side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.edges import check_edges, check_graph_of_edges, of_edges
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch, PaddedBatch
from ..modules import StoresSettings
from ..shapes import Float, Int
from ..softmax_attention import softmax_attention
from ..tiles import joined, map_tiles
from ..torch_state import full_precision
from .clifford import (
    GRADE_NAMES,
    POSITION,
    CliffordLinear,
    GatedMLP,
    Grades,
    MultivectorMLP,
    features,
    join_channels,
    with_position,
)
from .clifford_algebra import cross_product
from .convolutions import LAG_FILTERS, ExponentialFilter, ShortConv
from .local_context import LocalContext
from .long_conv import long_convolution, split_features
from .sequences import ChainArguments, OperatorSettings, Placement, TokenBatch, model_settings
from .vector_attention import vector_attention


class TokenNetwork(StoresSettings):
    """Base class of networks that map tokens of some grades to tokens, or pooled sequences, of other grades. Subclasses
    have ``forward(x, tokens)`` on features with their channels first, and their last layers are ``out``."""

    out: nn.Module

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings,
        pool: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
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
        check_edges(edge_index, graphs.nodes, graphs.sizes.device)
        if tokens.slots is not None:
            edge_index = tokens.slots.slot[edge_index]
        if self.options.causal:
            _check_no_later_source(tokens.sequences.time[edge_index])
        check_graph_of_edges(edge_index[1], edge_index[0], graphs.batch, graphs.mask, "edge_index")
        features = of_edges("edge_attr", edge_attr, edge_index, channels)
        return NeighborList(edge_index, graphs.nodes, features=features, loops=True, checked=True)

    def reachable(self, grades: Grades) -> Grades:
        """The output channels that can differ from zero if the input has the independent channels ``grades``."""
        return self.out_grades

    def run_step(
        self, state: tuple[Any, ...] | None, x: Float[Tensor, "rows dim"]
    ) -> tuple[tuple[Any, ...], Float[Tensor, "rows out"]]:
        """Compute the outputs of one more token of each row, for features that have been checked. Raise ValueError if
        outputs cannot be computed token by token."""
        self.options.check_steps()
        if self.pool:
            raise ValueError(f"pool must be None for step, got {self.pool!r}: a mean needs all tokens")
        with full_precision(x.device):
            state, out = self.step(state, x.T.contiguous())
            return state, out.T

    def step(
        self, state: tuple[Any, ...] | None, x: Float[Tensor, "dim rows"]
    ) -> tuple[tuple[Any, ...], Float[Tensor, "out rows"]]:
        """The new state, and the outputs of one more token of each row."""
        raise NotImplementedError

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
    long convolution of keys (other filters), or by vector self-attention (``attention``). After a convolution, a
    Clifford MLP of the result gates it, and it multiplies the values. With a filter of the lag, scalars of the values
    also multiply the convolved vectors (:class:`MixedProducts`).
    """

    out: MultivectorMLP | GatedMLP
    gate: MultivectorMLP | None
    filters: nn.ModuleDict | None

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings) -> None:
        super().__init__(in_grades, out_grades, hidden_grades, options)
        hidden, width, num_blocks = hidden_grades, max(1, *hidden_grades), options.num_blocks
        self.local: LocalContext | None = None
        if options.local_context:
            self.local = LocalContext(in_grades, width, options.edge_channels, num_blocks)
        # with a filter of the lag, tokens of zeros must have no effect, so there is no bias
        inside, mixed = (in_grades.plus(POSITION), hidden.times(3)), options.mixes_by_lag
        self.project: CliffordLinear | MultivectorMLP
        if mixed:
            self.project = CliffordLinear(*inside, bias=False)
        else:
            self.project = MultivectorMLP(*inside, width, num_blocks, bias=not options.by_lag)
        # if the input has no vectors, the residual has positions as vectors
        start = in_grades if in_grades.vectors or options.causal else in_grades.plus(POSITION)
        self.shortcut = None if in_grades == hidden else CliffordLinear(start, hidden, bias=False)
        self.short_conv: ShortConv | None = None
        if options.short_conv is not None:
            self.short_conv = ShortConv(_channels(hidden), options.short_conv, options.causal)
        mlp, channels = (GatedMLP, hidden.times(2)) if mixed else (MultivectorMLP, hidden)
        self.out = mlp(channels, out_grades, width, num_blocks)
        self.placement.needs_positions = self.reachable(in_grades) != out_grades
        self.scalars, vectors = hidden.scalars + hidden.pseudoscalars, hidden.vectors + hidden.bivectors
        self.gate, self.filters, self.norm = None, None, options.norm
        if not options.attention and not mixed:
            of_mixed = Grades(scalars=self.scalars, bivectors=vectors)
            self.gate = MultivectorMLP(of_mixed, Grades(self.scalars + vectors), GATE_CHANNELS, num_blocks)
        self.products: MixedProducts | None = None
        if options.by_lag:
            make, kinds = LAG_FILTERS[options.filter], {"scalars": self.scalars, "vectors": vectors}
            self.filters = nn.ModuleDict({kind: make(n, options.causal) for kind, n in kinds.items() if n})
            self.products = MixedProducts(hidden) if mixed else None

    def settings(self) -> dict[str, Any]:
        options, mixed = self.options, self.options.mixes_by_lag
        return super().settings() | {
            "causal": options.causal, "mixed_products": mixed, "projections": "linear" if mixed else "Clifford MLP",
            "filter": None if options.attention else options.filter,
        }  # fmt: skip

    def reachable(self, grades: Grades) -> Grades:
        products = len(self.out.blocks)
        if not self.options.mixes_by_lag:
            return self.out_grades.only(self.hidden_grades.only(grades.reachable(products)).reachable(products))
        return self.out_grades.only(self.hidden_grades.only(grades.reachable(0)).times(2).reachable(products))

    def forward(self, x: Float[Tensor, "dim tokens"], tokens: TokenBatch) -> Float[Tensor, "out tokens"]:
        pos = tokens.pos
        if self.local is not None and tokens.edges is not None:
            x = self.local(x, pos, tokens.edges)
        step = self.out.tokens_per_block(x.device)
        projected = map_tiles(_project, step, (x, pos), self.project, self.in_grades, dim=-1)
        if self.short_conv is not None:
            projected = self.short_conv(projected.flatten(0, 1), tokens.sequences).view_as(projected)
        query, key, value = self._split(projected)
        if self.filters is not None:
            keys = dict(zip(("scalars", "vectors"), split_features(key, self.scalars), strict=True))
            for kind, filter in self.filters.items():
                keys[kind] = filter(keys[kind], tokens.sequences)
            mixed = self._by_query(query, keys)
        else:
            mixed = self._by_tokens(projected, tokens)
        nodes = x, pos, *split_features(value, self.scalars), *mixed
        return map_tiles(_finish, step, nodes, *self._rest, dim=-1)

    def step(
        self, state: tuple[Tensor | None, ...] | None, x: Float[Tensor, "dim rows"]
    ) -> tuple[tuple[Tensor | None, ...], Float[Tensor, "out rows"]]:
        recent, *sums = (None, None, None) if state is None else state
        pos = x.new_zeros(3, x.shape[1])
        projected = _project(x, pos, self.project, self.in_grades)
        if self.short_conv is not None:
            recent, flat = self.short_conv.step(recent, projected.flatten(0, 1))
            projected = flat.view_as(projected)
        query, key, value = self._split(projected)
        keys = dict(zip(("scalars", "vectors"), split_features(key, self.scalars), strict=True))
        for n, (kind, filter) in enumerate(cast(nn.ModuleDict, self.filters).items()):
            sums[n], keys[kind] = cast(ExponentialFilter, filter).step(sums[n], keys[kind])
        nodes = x, pos, *split_features(value, self.scalars), *self._by_query(query, keys)
        return (recent, *sums), _finish(*nodes, *self._rest)

    def _split(self, projected: Float[Tensor, "3 features tokens"]) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value. With mixed products, queries and values are bounded, so outputs grow linearly."""
        query, key, value = projected.unbind()
        return (query, key, value) if self.products is None else (_bounded(query), key, _bounded(value))

    @property
    def _rest(self) -> tuple[Any, ...]:
        """Arguments of :func:`_finish` beside tensors."""
        return self.gate, self.products, self.in_grades, self.hidden_grades, self.shortcut, self.out

    def _by_query(
        self, query: Float[Tensor, "features tokens"], keys: dict[str, Tensor]
    ) -> tuple[Float[Tensor, "scalars tokens"], Float[Tensor, "3 vectors tokens"], Float[Tensor, "3 some tokens"]]:
        """Products of queries with convolved keys: scalars and vectors of both parities. The third result is the
        convolved vectors for :class:`MixedProducts`."""
        scalars, vectors = split_features(query, self.scalars)
        crossed, convolved = cross_product(vectors, keys["vectors"], 0), keys["vectors"]
        return scalars * keys["scalars"], crossed, convolved if self.products is not None else convolved[:, :0]

    def _by_tokens(
        self, projected: Float[Tensor, "3 features tokens"], tokens: TokenBatch
    ) -> tuple[Float[Tensor, "scalars tokens"], Float[Tensor, "3 vectors tokens"], Float[Tensor, "3 0 tokens"]]:
        """Mix the tokens of sequences by a convolution of queries and keys, or of graphs by attention. Features are the
        scalars of both parities, and then the vectors of both parities, with components outside of channels."""
        scalars, sequences = self.scalars, tokens.sequences

        def convolve(x: Tensor, rows: PaddedBatch) -> Tensor:
            (q, k), counts = x.unbind(), sequences.counts(rows)
            return long_convolution(q, k, scalars, rows.lengths, self.options.mode, self.norm, counts)[None]

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
        first, vectors = split_features(mixed, scalars)
        return first, vectors, vectors[:, :0]


def token_operator(inside: Grades, outside: Grades, hidden: Grades, **settings: Any) -> TokenOperator:
    """An operator from :class:`OperatorSettings`."""
    return TokenOperator(inside, outside, hidden, OperatorSettings(**settings))


token_attention = functools.partial(token_operator, attention=True)


class MixedProducts(nn.Module):
    r"""Products of scalars of a token with convolved vectors, 0e x 1o and 0o x 1e to 1o, 0e x 1e and 0o x 1o to 1e.

    .. math:: y_i = (W s_i + b) \odot \sum_j h(i - j)\, x_j + W'' \Big( (W' p_i) \odot \sum_j h(i - j)\, x'_j \Big)

    Here s are scalars, p pseudoscalars, x vectors of the parity of y, and x' of the other one. Cross products alone, as
    published, cannot give the plain convolution of vectors.
    """

    def __init__(self, hidden: Grades) -> None:
        super().__init__()
        self.hidden, vectors = hidden, hidden.vectors + hidden.bivectors
        odd = vectors if hidden.pseudoscalars and hidden.vectors and hidden.bivectors else 0
        self.gates = CliffordLinear(Grades(hidden.scalars, 0, 0, hidden.pseudoscalars), Grades(vectors, 0, 0, odd))
        self.swap: CliffordLinear | None = None
        if odd:
            inside, outside = Grades(0, hidden.bivectors, hidden.vectors), Grades(0, hidden.vectors, hidden.bivectors)
            self.swap = CliffordLinear(inside, outside, bias=False)

    def forward(
        self, scalars: Float[Tensor, "scalars tokens"], vectors: Float[Tensor, "3 channels tokens"]
    ) -> Float[Tensor, "3 channels tokens"]:
        none, even = vectors[:, :0], self.hidden.scalars
        gates = self.gates([scalars[None, :even], none, none, scalars[None, even:]])
        out = gates[0] * vectors
        if self.swap is None:
            return out
        polar, axial = (gates[3] * vectors).split([self.hidden.vectors, self.hidden.bivectors], 1)
        return out + torch.cat(self.swap([none[:1], axial, polar, none[:1]])[1:3], 1)


GATE_CHANNELS = 8  # hidden multivectors of the gate's MLP


def _channels(hidden: Grades) -> list[int]:
    """The channel of each feature of query, key and value, where channels of a grade are side by side."""
    first, order = [3 * sum(hidden[:grade]) for grade in range(4)], (0, 3, 1, 2, 1, 2, 1, 2)
    return [first[g] + n * hidden[g] + channel for n in range(3) for g in order for channel in range(hidden[g])]


def _bounded(x: Float[Tensor, "features tokens"]) -> Float[Tensor, "features tokens"]:
    return x * (1 + (x * x).mean(0)).rsqrt()


def _project(
    x: Tensor, pos: Tensor, project: CliffordLinear | MultivectorMLP, grades: Grades
) -> Float[Tensor, "3 features tokens"]:
    parts = project(with_position(grades.parts(x), pos))
    components = [part.view(len(part), 3, part.shape[1] // 3, part.shape[2]).unbind() for part in parts]
    rows = [*components[0], *components[3]]
    for pair in zip(components[1], components[2], strict=True):
        rows += pair
    return torch.cat(rows, 1)


def _finish(
    x: Tensor, pos: Tensor, value_scalars: Tensor, value_vectors: Tensor, scalars: Tensor, vectors: Tensor,
    convolved: Tensor, gate: MultivectorMLP | None, products: MixedProducts | None, grades: Grades, hidden: Grades,
    shortcut: CliffordLinear | None, out: MultivectorMLP | GatedMLP,
) -> Tensor:  # fmt: skip
    """The output from values and mixed features, scalars and vectors of both parities."""
    if gate is not None:
        count, none = scalars.shape[0], vectors[:, :0]
        gates = torch.sigmoid(gate([scalars[None], none, vectors, none[:1]])[0])
        of_scalars, of_vectors = gates.split_with_sizes([count, gates.shape[1] - count], 1)
        scalars, vectors = of_scalars[0] * scalars, of_vectors * vectors
    if gate is not None or products is not None:
        scalars, vectors = scalars * value_scalars, cross_product(vectors, value_vectors, 0)
    if products is not None:
        vectors = vectors + products(value_scalars, convolved)
    parts = grades.parts(x)
    if shortcut is not None:
        parts = shortcut(parts if shortcut.in_grades == grades else with_position(parts, pos))
    updates = [*scalars[None].split([hidden.scalars, hidden.pseudoscalars], 1)]
    updates[1:1] = vectors.split([hidden.vectors, hidden.bivectors], 1)
    if products is not None:
        return features(out(join_channels(parts, updates)))
    return features(out([part + update for part, update in zip(parts, updates, strict=True)]))


@checks.arguments
class TokenModel(TokenNetwork):
    """A model: linear embedding, operators with residual connections, pooling and a Clifford MLP (Figure 2b)."""

    out: MultivectorMLP | GatedMLP

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, *, num_layers: checks.Count = 3,
        num_blocks: int = 1, pool: Literal["mean"] | None = None, order: str = "input", length_scale: float = 1.0,
        attention: bool = False, attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        shared = {"num_blocks": num_blocks, "order": order, "length_scale": length_scale}
        options = model_settings(attention, attn_kwargs, **shared)
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
        mlp = GatedMLP if options.mixes_by_lag else MultivectorMLP
        self.out = mlp(hidden_grades, out_grades, max(1, *hidden_grades), options.num_blocks)
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

    def step(
        self, state: tuple[Any, ...] | None, x: Float[Tensor, "dim rows"]
    ) -> tuple[tuple[Any, ...], Float[Tensor, "out rows"]]:
        states: list[Any] = []
        x = features(self.embed(with_position(self.in_grades.parts(x), x.new_zeros(3, x.shape[1]))))
        for n, operator in enumerate(self.operators):
            after, update = cast(TokenOperator, operator).step(None if state is None else state[n], x)
            states.append(after)
            x = x + update
        return tuple(states), _read_out(x, self.out, self.hidden_grades)


def _read_out(x: Tensor, out: MultivectorMLP | GatedMLP, grades: Grades) -> Tensor:
    return features(out(grades.parts(x)))
