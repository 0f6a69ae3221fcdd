"""Networks on tokens by grade: operators that mix tokens along sequences, and models of several operators.

Operators mix scalars (grades 0 and 3) and vectors (grades 1 and 2). A product of two channels of one kind has a
definite parity, so channels of both parities pass through side by side.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.edges import check_edges
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch
from ..modules import NotScriptable, StoresSettings, read_tokens, reset_children
from ..tiles import map_tiles
from ..torch_state import full_precision, is_eager
from .clifford import GRADE_NAMES, POSITION, CliffordLinear, Grades, MultivectorMLP, features, joined, with_position
from .convolutions import ShortConv
from .sequences import ChainArguments, Placement, TokenBatch

if TYPE_CHECKING:
    from jaxtyping import Float, Int


FILTERS = ("data", "implicit")


@checks.arguments
@dataclasses.dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """Settings of operators, which :class:`.SE3HyenaOperator` describes. ``filter=None`` means no long convolution."""

    filter: str | None = None
    causal: bool = False
    short_conv: int | None = None
    order: str = "input"
    length: checks.Positive = 1.0
    local_context: bool = False
    edge_channels: checks.Whole = 0
    num_blocks: checks.Count = 1

    def __post_init__(self) -> None:
        if self.filter is not None:
            checks.choice("filter", self.filter, FILTERS)
        if self.causal and self.order == "radial":
            raise ValueError(
                "causal must be False with order='radial', got True: sorted by radius, no token is later than another; "
                "use order='input'"
            )
        if self.edge_channels and not self.local_context:
            raise ValueError(f"edge_channels={self.edge_channels} needs local_context=True: set it, or edge_channels=0")

    @property
    def mode(self) -> str:
        """Mode of the filter ``"data"``."""
        return "causal" if self.causal else "circular"

    @property
    def norm(self) -> str:
        """Normalisation of the filter ``"data"``: division by the length, as published, for tokens sorted by radius,
        and by the root of the length otherwise."""
        return "forward" if self.order == "radial" else "ortho"

    @property
    def no_ring(self) -> str:
        """The setting that rules out rings, or an empty text."""
        return "causal=True" if self.causal else "filter='data'" if self.filter == "data" else ""


class TokenNetwork(StoresSettings):
    """Base class of networks that map tokens of some grades to tokens, or pooled sequences, of other grades. Subclasses
    have ``forward(x, tokens)`` on features with their channels first, and their last layers are ``out``."""

    out: nn.Module
    in_space: bool = False  # true if neighbors are the nearest nodes, instead of the next ones along a sequence

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings,
        pool: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if pool not in (None, "mean"):
            raise ValueError(f"pool must be None or 'mean', got {pool!r}")
        self.in_grades, self.out_grades, self.hidden_grades = in_grades, out_grades, hidden_grades
        self.options, self.pool = options, pool
        self.placement = Placement(
            options.order, options.length, options.causal, options.no_ring, self.in_space,
            invariants=[slice(0, in_grades.scalars)],
        )  # fmt: skip

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
            "hidden_grades": self.hidden_grades, "length": self.placement.length,
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


class LocalContext(nn.Module):
    r"""A step of Clifford message passing, as in Geometric Hyena by the authors of SE(3)-Hyena.

    .. math:: x_i \leftarrow x_i + \psi\Big(x_i, \tfrac{1}{|N(i)|} \sum_{j \in N(i)} \phi(x_j - x_i, e_{ij})\Big)

    Here phi and psi are Clifford MLPs, and e are scalars of the edges. The position is one of the vectors of x. The
    mean is zero for a token without edges.
    """

    def __init__(self, grades: Grades, channels: int, edge_channels: int, num_blocks: int) -> None:
        super().__init__()
        self.grades, self.edge_grades, self.messages = grades, Grades(edge_channels), Grades(*[channels] * 4)
        inside = grades.plus(POSITION)
        self.message = MultivectorMLP(inside.plus(self.edge_grades), self.messages, channels, num_blocks)
        self.update = MultivectorMLP(inside.plus(self.messages), grades, channels, num_blocks)

    def forward(
        self, x: Float[Tensor, "dim tokens"], pos: Float[Tensor, "3 tokens"], edges: NeighborList
    ) -> Float[Tensor, "dim tokens"]:
        source, target = edges.source, edges.target
        scalars = x.new_zeros(source.shape[0], 0) if edges.features is None else edges.features.to(x.dtype)
        tokens, step = torch.cat([x, pos]).T.contiguous(), self.message.tokens_per_block(x.device)
        sums = x.new_zeros(tokens.shape[0], self.messages.dim)
        if torch.is_grad_enabled() or not is_eager():
            sums = sums.index_add(0, target, self._messages(tokens, source, target, scalars))
        else:  # messages of all edges together might not fit into memory
            for part in zip(*(y.split(16 * step) for y in (source, target, scalars)), strict=True):
                sums.index_add_(0, part[1], self._messages(tokens, *part))
        degree = x.new_zeros(tokens.shape[0]).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        mean = (sums / degree.clamp(min=1)[:, None]).T.contiguous()
        others, step = (self.update, self.grades, self.messages), self.update.tokens_per_block(x.device)
        return map_tiles(_update, step, (x, pos, mean), *others, dim=-1)

    def _messages(
        self, tokens: Float[Tensor, "tokens dim+3"], source: Int[Tensor, " edges"], target: Int[Tensor, " edges"],
        scalars: Float[Tensor, "edges channels"],
    ) -> Float[Tensor, "edges out"]:  # fmt: skip
        """Messages along edges, from tokens whose last columns are positions."""
        difference = tokens.index_select(0, source) - tokens.index_select(0, target)
        others, step = (self.message, self.grades, self.edge_grades), self.message.tokens_per_block(tokens.device)
        return map_tiles(_message, step, (difference, scalars), *others)


def _message(
    difference: Tensor, scalars: Tensor, message: MultivectorMLP, grades: Grades, edge_grades: Grades
) -> Tensor:
    x, pos = difference.T.contiguous().split([grades.dim, 3])
    parts = with_position(grades.parts(x), pos)
    return features(message(joined(parts, edge_grades.parts(scalars.T)))).T.contiguous()


def _update(x: Tensor, pos: Tensor, mean: Tensor, update: MultivectorMLP, grades: Grades, messages: Grades) -> Tensor:
    parts = with_position(grades.parts(x), pos)
    return x + features(update(joined(parts, messages.parts(mean))))


class TokenOperator(TokenNetwork, ABC):
    """Base class of operators: projection to query, key and value, mixing of tokens, residual and output MLP (Algorithm
    1). Without ``bias`` the projection has no biases."""

    SETTINGS: ClassVar[tuple[str, ...]] = ("short_conv", "local_context", "edge_channels")
    """Names that ``attn_kwargs`` of a model may have."""
    out: MultivectorMLP

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings,
        bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(in_grades, out_grades, hidden_grades, options)
        hidden, width, num_blocks = hidden_grades, max(1, *hidden_grades), options.num_blocks
        self.gate: MultivectorMLP | None = None
        self.local: LocalContext | None = None
        if options.local_context:
            self.local = LocalContext(in_grades, width, options.edge_channels, num_blocks)
        self.project = MultivectorMLP(in_grades.plus(POSITION), hidden.times(3), width, num_blocks, bias)
        # if the input has no vectors, the residual has positions as vectors
        start = in_grades if in_grades.vectors or options.causal else in_grades.plus(POSITION)
        self.shortcut = None if in_grades == hidden else CliffordLinear(start, hidden, bias=False)
        self.short_conv: ShortConv | None = None
        if options.short_conv is not None:
            self.short_conv = ShortConv(_channels(hidden), options.short_conv, options.causal)
        self.out = MultivectorMLP(hidden, out_grades, width, num_blocks)
        self.placement.needs_positions = self.reachable(in_grades) != out_grades

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"causal": self.options.causal}

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
        nodes, step = (x, pos, projected[2], self.mix(projected, tokens)), self.out.tokens_per_block(x.device)
        others = self.combine, self.gate, self.in_grades, self.hidden_grades, self.shortcut, self.out
        return map_tiles(_finish, step, nodes, *others, dim=-1)

    @property
    def scalars(self) -> int:
        """Number of scalars among the features of query, key and value."""
        return self.hidden_grades.scalars + self.hidden_grades.pseudoscalars

    @abstractmethod
    def mix(
        self, projected: Float[Tensor, "3 features tokens"], tokens: TokenBatch
    ) -> Float[Tensor, "features tokens"]:
        """Mix the tokens of sequences or graphs by query, key and value. Their features are the scalars of both
        parities, and then the vectors of both parities, with components outside of channels."""

    @staticmethod
    @abstractmethod
    def combine(value: Tensor, mixed: Tensor, scalars: int, gate: Any) -> tuple[Tensor, Tensor]:
        """The update that is added to tokens: scalars (S, T) and vectors (3, V, T), from values and mixed features.
        Subclasses have a function of a module file here."""


_ORDER = 0, 3, 1, 2, 1, 2, 1, 2  # grades of the features of query, key and value


def _channels(hidden: Grades) -> list[int]:
    """The channel of each feature of query, key and value, where channels of a grade are side by side."""
    first = [3 * sum(hidden[:grade]) for grade in range(4)]
    return [first[g] + n * hidden[g] + channel for n in range(3) for g in _ORDER for channel in range(hidden[g])]


def _project(x: Tensor, pos: Tensor, project: MultivectorMLP, grades: Grades) -> Float[Tensor, "3 features tokens"]:
    parts = project(with_position(grades.parts(x), pos))
    components = [iter(part.unflatten(1, (3, part.shape[1] // 3)).unbind()) for part in parts]
    ordered = [next(components[grade]) for grade in _ORDER]
    return torch.cat([component for component in ordered if component.shape[1]], 1)


def _finish(
    x: Tensor, pos: Tensor, value: Tensor, mixed: Tensor, combine: Callable, gate: MultivectorMLP | None,
    grades: Grades, hidden: Grades, shortcut: CliffordLinear | None, out: MultivectorMLP,
) -> Tensor:  # fmt: skip
    scalars, vectors = combine(value, mixed, hidden.scalars + hidden.pseudoscalars, gate)
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
        self, operator: type[TokenOperator], in_grades: Grades, out_grades: Grades, hidden_grades: Grades,
        options: OperatorSettings, *, num_layers: int, pool: str | None, attn_kwargs: Mapping[str, Any] | None,
    ) -> None:  # fmt: skip
        self.in_space = operator.in_space
        checks.positive(num_layers=num_layers)
        more = dict(attn_kwargs or {})
        unknown = [name for name in more if name not in operator.SETTINGS]
        if unknown:
            raise ValueError(
                f"attn_kwargs must be a dictionary with keys among {operator.SETTINGS}, got {unknown[0]!r}"
            )
        options = dataclasses.replace(options, **more)
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
        inside = dataclasses.replace(options, length=1.0)  # positions have been divided
        self.operators = nn.ModuleList(
            operator(hidden_grades, hidden_grades, hidden_grades, inside) for _ in range(num_layers)
        )
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


def _grades(default: Grades, **channels: int | None) -> Grades:
    """Grades from numbers of scalars and vectors. A number that is ``None`` is taken from ``default``."""
    chosen = {
        name: n if number is None else number for n, (name, number) in zip(default, channels.items(), strict=False)
    }
    checks.whole(**chosen)
    if not any(chosen.values()):
        raise ValueError(f"{' and '.join(chosen)} must not both be 0: give at least one channel")
    return Grades(*chosen.values())


def _flat(shape: tuple[int, ...], **arguments: Any) -> list[Any]:
    """Flatten arguments with a number for each token. Raise ValueError for padded tokens, (B, N), of another shape."""
    for name, value in arguments.items():
        if len(shape) == 2 and isinstance(value, Tensor) and tuple(value.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    return [x.flatten() if isinstance(x, Tensor) and len(shape) == 2 else x for x in arguments.values()]


class ScalarVectorModule(NotScriptable, torch.nn.Module):
    """A module that reads scalars and vectors as tokens by grade, calls a network, and splits its output. The function
    ``make`` builds the network from the grades of input, output and hidden tokens and the settings."""

    def __init__(
        self, make: Callable[..., TokenNetwork], options: OperatorSettings, scalar_channels: int, vector_channels: int,
        out_scalars: int | None = None, out_vectors: int | None = None, hidden_scalars: int | None = None,
        hidden_vectors: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = _grades(Grades(), scalar_channels=scalar_channels, vector_channels=vector_channels)
        outside = _grades(inside, out_scalars=out_scalars, out_vectors=out_vectors)
        hidden = _grades(inside, hidden_scalars=hidden_scalars, hidden_vectors=hidden_vectors)
        self.module = make(inside, outside, hidden, options)
        self.module.check_reachable("out_vectors")

    def forward(
        self, scalars: Tensor | None, vectors: Tensor | None, lengths: Tensor | None = None, *,
        batch: Tensor | None = None, index: Tensor | None = None, chain: Tensor | None = None,
        ring: Tensor | bool | None = None, pos: Tensor | None = None, order: Tensor | None = None,
        edge_index: Tensor | None = None, edge_attr: Tensor | None = None, batch_size: int | None = None,
        num_chains: int | None = None, max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Map scalars and vectors of tokens to scalars and vectors of tokens, or of sequences if the module pools.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` if there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` if there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each padded sequence. Tokens beyond it are never read, and zero
                in the output.
            batch: sorted int64 ``(T,)``, the sequence of each flat token. ``None`` means one sequence.
            index: integers ``(B, N)`` or ``(T,)``, the number of each token along its chain, for example its residue
                number. It must increase strictly. Convolutions take differences of it as lags, so that missing tokens
                count as zero; steps above 128 count as 128. ``None`` means that no token is missing.
            chain: integers ``(B, N)`` or ``(T,)``, any number for each chain. Convolutions run along each chain of a
                sequence by itself; positions are centred, and attention mixes, over the whole sequence. ``None`` means
                that each sequence is one chain.
            ring: bool ``(B, N)`` or ``(T,)``, true for the tokens of closed chains, or one bool for all chains. Lags
                then run the shortest way round the ring, in implicit filters and short convolutions. It needs
                ``filter="implicit"`` and ``causal=False``. ``None`` means that all chains are open.
            pos: positions ``(B, N, 3)`` or ``(T, 3)``. They enter relative to the mean of their sequence, divided by
                ``length``, as one more vector. They must be ``None`` with ``causal=True``, as later tokens change the
                mean. Give large coordinates (UTM: 5e6) in float64, whatever dtype the features have: float32 rounds
                them to 0.5.
            order: a permutation of the tokens of every sequence, used instead of the module's order: int64 ``(B, N)``
                of indices within the sequence, or ``(T,)`` of tokens.
            edge_index: int64 ``(2, E)``, source and target tokens, counted through the batch (b N + i). It is needed
                with ``local_context=True``. With ``causal=True``, no source may come later than its target.
            edge_attr: ``(E, edge_channels)``, scalars of the edges. They are needed if ``edge_channels`` is not 0.
            batch_size: number of flat sequences. By default it is read from ``batch``, which torch.compile cannot do.
            num_chains: number of chains in the batch, or a bound of it. By default it is read from ``chain``, which
                torch.compile cannot do.
            max_num_nodes: a bound of the lengths of flat sequences, and of the spans of ``index``. By default it is
                read from ``batch`` and ``index``, which torch.compile cannot do.
        """
        module = self.module
        inside, outside = module.in_grades, module.out_grades
        channels, reference = (inside.scalars, inside.vectors), module.reference_parameter
        tokens = read_tokens(scalars, vectors, channels, reference, lengths, batch, batch_size, max_num_nodes)
        shape, device = tokens.shape, tokens.scalars.device
        if isinstance(pos, Tensor):
            if tuple(pos.shape) != (*shape, 3):
                raise ValueError(f"pos must have shape {(*shape, 3)}, got {tuple(pos.shape)}")
            pos = pos.flatten(0, -2)
        order, index, chain, ring = _flat(shape, order=order, index=index, chain=chain, ring=ring)
        if order is not None and len(shape) == 2:
            order = order + (shape[1] * torch.arange(shape[0], device=device)).repeat_interleave(shape[1])
        vectors = tokens.vectors.permute(2, 1, 0).flatten(0, 1)
        x = torch.cat([tokens.scalars.T, vectors]).to(reference.dtype).T  # the network takes the transpose again
        along = ChainArguments(order, index, chain, num_chains, max_num_nodes, ring)
        out = module.run(x, pos, tokens.node_batch, along, edge_index, edge_attr)
        shape = (tokens.node_batch.count,) if module.pool else shape
        out_scalars, out_vectors = out.split([outside.scalars, 3 * outside.vectors], 1)
        out_vectors = out_vectors.unflatten(1, (3, outside.vectors)).transpose(1, 2).contiguous()
        return out_scalars.contiguous().view(*shape, outside.scalars), out_vectors.view(*shape, outside.vectors, 3)

    @property
    def order(self) -> str:
        """Order of the tokens along their sequence, ``"input"`` or ``"radial"``."""
        return self.module.options.order

    def reset_parameters(self) -> None:
        reset_children(self)

    def extra_repr(self) -> str:
        inside, outside = self.module.in_grades, self.module.out_grades
        return f"{inside.scalars}, {inside.vectors} -> {outside.scalars}, {outside.vectors}, order={self.order!r}"
