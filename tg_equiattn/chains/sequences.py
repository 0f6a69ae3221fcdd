"""Sequences of tokens for long and short convolutions, and the placement of tokens along them.

A sequence is a graph, or one of its chains, with its tokens in order, and with gaps where an index skips numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..graphs.neighbors import NeighborList
from ..graphs.node_batch import NodeBatch, PaddedBatch, Slots, inverse
from ..shapes import Bool, Float, Int
from ..torch_state import is_eager, is_readable, read

OF_CONVOLUTIONS = ("attention", "filter", "mixed_products", "causal", "order")  # settings that attention has not


@checks.arguments
@dataclass(frozen=True, kw_only=True)
class OperatorSettings:
    """Settings of operators, which :class:`.SE3HyenaOperator` describes. ``attention`` means vector self-attention
    instead of a long convolution."""

    attention: bool = False
    filter: Literal["data", "implicit", "exponential"] = "data"
    mixed_products: bool = True
    causal: bool = False
    short_conv: int | None = None
    order: Literal["input", "radial"] = "input"
    length_scale: checks.Positive = 1.0
    local_context: bool = False
    edge_channels: checks.Whole = 0
    num_blocks: checks.Count = 1

    def __post_init__(self) -> None:
        if self.causal and self.order == "radial":
            raise ValueError(
                "causal must be False with order='radial', got True: sorted by radius, no token is later than another; "
                "use order='input'"
            )
        if self.edge_channels and not self.local_context:
            raise ValueError(f"edge_channels={self.edge_channels} needs local_context=True: set it, or edge_channels=0")

    @property
    def by_lag(self) -> bool:
        """True for a long convolution with a filter of the lag."""
        return not self.attention and self.filter != "data"

    @property
    def mixes_by_lag(self) -> bool:
        """True for the operator that is linear in convolved keys, with products of scalars and vectors."""
        return self.by_lag and self.mixed_products

    def check_steps(self) -> None:
        """Raise ValueError if outputs cannot be computed token by token."""
        if self.attention:
            raise ValueError("attention must be False for step, got True: every token needs all earlier ones")
        for name, wanted in (("filter", "exponential"), ("causal", True), ("local_context", False)):
            if getattr(self, name) != wanted:
                why = "a state of fixed size holds no other memory, and no later tokens"
                raise ValueError(f"{name} must be {wanted!r} for step, got {getattr(self, name)!r}: {why}")

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
        return "causal=True" if self.causal else "" if self.attention or self.by_lag else "filter='data'"


def model_settings(attention: bool, attn_kwargs: Mapping[str, Any] | None, **shared: Any) -> OperatorSettings:
    """The settings of a model's operators. Raise ValueError for other keys in ``attn_kwargs`` than these have."""
    without = {*shared, "attention", *(OF_CONVOLUTIONS if attention else ())}
    allowed = tuple(field.name for field in fields(OperatorSettings) if field.name not in without)
    unknown = [name for name in attn_kwargs or {} if name not in allowed]
    if unknown:
        raise ValueError(f"attn_kwargs must be a dictionary with keys among {allowed}, got {unknown[0]!r}")
    return OperatorSettings(attention=attention, **shared, **attn_kwargs or {})


@torch.no_grad()
def radial_order(
    pos: Float[Tensor, "nodes 3"], node_batch: NodeBatch, scalars: Float[Tensor, "nodes channels"] | None = None
) -> Int[Tensor, " nodes"]:
    r"""Sort the nodes of each graph by their distance to its centroid, nearest first.

    Rotations, reflections, translations and permutations of the nodes do not change the order. Nodes whose distances
    agree within rounding are ordered by further invariants, one after the other:
    :math:`x_i \cdot \sum_j |x_j|^2 x_j`, :math:`x_i \cdot \sum_j x_j x_j^\top x_i`, and a fixed combination of the
    node's scalars. **Nodes that agree in all of them stay in the order of the input.** Nodes that a symmetry of the
    cloud exchanges agree in all of them, so relabelling the points of a ring or a lattice changes their order.

    "Within rounding" means that no two neighbors among the sorted distances differ by more than 1e-6 of the cloud's
    radius for float32, by more than 1e-12 for float64, or by more than the rounding of positions far from the origin;
    scalars agree within 1e-5 and 1e-10. In float32 clouds of many thousand nodes distances come that close by chance:
    give positions in float64 then (features may stay in float32). Derivatives do not include jumps of the order.

    Args:
        pos: positions of the nodes.
        node_batch: the graphs.
        scalars: invariant scalars of the nodes. The default, ``None``, means none.

    Returns:
        ``order``: node ``order[p]`` of the input comes at place p. Padding stays at the end of its graph.
    """
    raw = node_batch.zero_padding(pos.double())
    x = node_batch.centred(raw)
    rounding, square = torch.finfo(pos.dtype).eps, x.square().sum(1)
    radius, size = (node_batch.spread(_largest(y, node_batch)) for y in (square.sqrt(), raw.square().sum(1).sqrt()))
    skew = node_batch.spread(node_batch.mean(square[:, None] * x))
    spread = node_batch.spread(node_batch.mean(x[:, :, None] * x[:, None]))
    # each invariant with its scale; a relative error of radii is four times as large in their fourth power
    keys = [
        (square.sqrt(), radius),
        ((x * skew).sum(1), 4 * radius**4),
        (((spread * x[:, None]).sum(2) * x).sum(1), 4 * radius**4),
    ]
    tolerances = 3 * [(8 * rounding * size / radius).clamp(min=max(1e-12, 8 * rounding))]
    if scalars is not None and scalars.shape[1]:
        mixture = torch.arange(1, scalars.shape[1] + 1, device=x.device, dtype=x.dtype).sqrt()
        keys.append(
            (scalars.double() @ mixture, node_batch.spread(_largest(scalars.double().abs() @ mixture, node_batch)))
        )
        tolerances.append(torch.full_like(radius, max(1e-10, 80 * torch.finfo(scalars.dtype).eps)))
    group = 2 * node_batch.batch if node_batch.mask is None else 2 * node_batch.batch + (~node_batch.mask).long()
    for (key, size), tolerance in zip(keys, tolerances, strict=True):
        key = torch.where(size > 0, key / size, 0.0)
        order = key.argsort(stable=True)
        order = order[group[order].argsort(stable=True)]
        apart = (key[order].diff() > tolerance[order][1:]) | (group[order].diff() != 0)
        group = torch.cat([apart.new_zeros(1), apart]).cumsum(0)[inverse(order)]
    return group.argsort(stable=True)  # ties in the order of the input, not in that of their rounded keys


def _largest(x: Float[Tensor, " nodes"], node_batch: NodeBatch) -> Float[Tensor, " graphs"]:
    """The maximum over each graph of numbers that are not negative."""
    return x.new_zeros(node_batch.count).scatter_reduce(0, node_batch.batch, x, "amax")


MAX_STEP = 128  # larger steps of an index count as this many tokens, so that slots stay few
_LENGTHS = 0.1, 10  # between which steps between neighbors are of about unit size
_SOME = 64  # nodes whose nearest neighbors are looked for


@dataclass
class ChainArguments:
    """Arguments of ``forward`` that say how flat tokens lie along their sequences. ``index`` and ``chain`` may have any
    integer type."""

    index: Int[Tensor, " tokens"] | None = None
    chain: Int[Tensor, " tokens"] | None = None
    ring: Bool[Tensor, " tokens"] | bool | None = None
    num_chains: int | None = None
    max_num_nodes: int | None = None

    def place(
        self, node_batch: NodeBatch, order: Int[Tensor, " tokens"] | None = None, no_ring: str = ""
    ) -> tuple[Int[Tensor, " tokens"] | None, Sequences]:
        """The order of the tokens, by chain if there are chains and else the given one, and the sequences of tokens in
        this order. Raise ValueError for arguments that do not fit the tokens, or ``no_ring``, the setting of the module
        that rules out rings."""
        shape, device = [(node_batch.nodes,)], node_batch.sizes.device
        for name in ("index", "chain"):
            value = getattr(self, name)
            if value is not None:
                if isinstance(value, Tensor) and value.dtype in checks.INTEGERS:
                    value = value.long()
                checks.tensor(name, value, torch.int64, shape, device, " or of another integer type")
                setattr(self, name, value)
        self.ring = None if self.ring is False else self.ring
        if self.ring is not None:
            if self.ring is not True:
                checks.tensor("ring", self.ring, torch.bool, shape, device, " or a bool")
            if no_ring:
                raise ValueError(
                    f"ring must be None with {no_ring}, got rings: use filter='implicit' or 'exponential', and "
                    "causal=False"
                )
        if self.num_chains is not None:
            checks.positive(num_chains=self.num_chains)
            if self.chain is None:
                raise ValueError(f"num_chains must be None without chain, got {self.num_chains}")
        if self.index is None and self.chain is None and self.ring is None:
            return order, Sequences(node_batch)
        if self.chain is None:
            return order, _sequences_of(node_batch, self)
        order = _by_chain(node_batch, self.chain)
        index = None if self.index is None else self.index[order]
        ring = self.ring[order] if isinstance(self.ring, Tensor) else self.ring
        return order, _sequences_of(node_batch, replace(self, index=index, chain=self.chain[order], ring=ring))


@dataclass(frozen=True)
class Sequences:
    """Sequences of tokens, as a batch of ``rows`` with a slot for each token and each missing one.

    Attributes:
        rows: the slots of all sequences, as a batch.
        slots: the slot of each token. ``None`` means that slots are tokens.
        tokens: number of tokens of each sequence. ``None`` means that none is missing.
        index: the index of each token, as users give it. ``None`` means that there is none.
        ring: true for closed sequences. ``None`` means that all are open, ``True`` that all are closed.
    """

    rows: NodeBatch
    slots: Slots | None = None
    tokens: Int[Tensor, " sequences"] | None = None
    index: Int[Tensor, " tokens"] | None = None
    ring: Bool[Tensor, " sequences"] | bool | None = None

    @property
    def time(self) -> Int[Tensor, " tokens"]:
        """The index of each token, or its number within its sequence if there is no index."""
        if self.index is not None:
            return self.index
        within = self.rows.within(self.rows.starts)
        return within if self.slots is None else within[self.slots.slot]

    def counts(self, padded: PaddedBatch) -> Int[Tensor, " rows"] | None:
        """The number of tokens of each padded row; ``None`` if none is missing."""
        return None if self.tokens is None else padded.of_graphs(self.tokens)

    def rings(self, padded: PaddedBatch) -> Bool[Tensor, " rows"] | bool | None:
        """``ring`` of each padded row."""
        return padded.of_graphs(self.ring) if isinstance(self.ring, Tensor) else self.ring

    def mix(self, kernel: Callable[..., Tensor], *tensors: Float[Tensor, "... tokens"]) -> Float[Tensor, "... tokens"]:
        """Let a kernel mix the tokens of each sequence, as :meth:`NodeBatch.mix` does. Missing tokens and padding are
        zero, and the results at their places are not read."""
        dim = tensors[0].ndim - 1
        if self.slots is None:
            return self.rows.mix(kernel, *[self.rows.zero_padding(x, dim) for x in tensors], dim=dim)
        packed = [self.slots.pack(x, dim) for x in tensors]
        return self.slots.unpack(self.rows.mix(kernel, *packed, dim=dim), dim)


def _by_chain(node_batch: NodeBatch, chain: Int[Tensor, " tokens"]) -> Int[Tensor, " tokens"]:
    """An order of tokens in which chains are contiguous. Tokens keep their order within a chain, graphs theirs, and
    padding stays at the end of its graph."""
    order = chain.argsort(stable=True)
    graph = 2 * node_batch.batch if node_batch.mask is None else 2 * node_batch.batch + (~node_batch.mask).long()
    return order[graph[order].argsort(stable=True)]


def _sequences_of(node_batch: NodeBatch, along: ChainArguments) -> Sequences:
    """Make the sequences of tokens whose chains are contiguous. Raise ValueError if the index does not increase along a
    sequence, or if ``ring`` changes along one."""
    index, chain, ring, max_num_nodes = along.index, along.chain, along.ring, along.max_num_nodes
    if not node_batch.nodes:
        return Sequences(node_batch)
    if index is None and chain is None:
        closed = _closed(ring, node_batch.batch, node_batch.count, node_batch.mask)
        return Sequences(node_batch, ring=closed)
    valid, graph = node_batch.mask, node_batch.batch
    first = _changes(graph) if chain is None else _changes(graph) | _changes(chain)
    first, step = first if valid is None else first & valid, torch.ones_like(graph)
    if index is not None:
        step = torch.cat([step[:1], torch.where(first[1:], 1, index.diff())])
        _check_increasing(step if valid is None else torch.where(valid, step, 1), index)
        step = step.clamp(max=MAX_STEP)
    step = step if valid is None else torch.where(valid, step, 0)
    count = node_batch.count if chain is None else _number_of_chains(first, along.num_chains)
    longest = node_batch.longest if index is None and max_num_nodes is None else max_num_nodes
    sequence = (first.cumsum(0) - 1).clamp(min=0)
    spans, tokens = (step.new_zeros(count).index_add(0, sequence, x) for x in (step, step.sign()))
    slot, closed = step.cumsum(0) - 1, _closed(ring, sequence, count, valid)
    if is_readable(spans, wait=longest is None):
        rows = _flat_rows(spans, longest)
    else:
        rows = _dense_rows(spans, longest)
        slot = slot - (spans.cumsum(0) - spans)[sequence] + sequence * rows.bound
    if index is None and valid is None and rows.nodes == node_batch.nodes:
        return Sequences(rows, ring=closed)
    return Sequences(rows, _slots_of_tokens(slot, rows.nodes, valid), None if index is None else tokens, index, closed)


def _closed(
    ring: Bool[Tensor, " tokens"] | bool | None, sequence: Int[Tensor, " tokens"], count: int,
    valid: Bool[Tensor, " tokens"] | None,
) -> Bool[Tensor, " sequences"] | bool | None:  # fmt: skip
    """True for sequences that are rings."""
    if not isinstance(ring, Tensor):
        return ring
    ring = ring if valid is None else ring & valid
    closed = ring.new_zeros(count).index_put((sequence,), ring, accumulate=True)
    differs = closed[sequence] != ring
    differs = differs if valid is None else differs & valid
    checks.must_hold(~differs.any(), "ring must be the same for all tokens of a chain")
    return closed


def _changes(x: Int[Tensor, " tokens"]) -> Bool[Tensor, " tokens"]:
    """True for the first token and where x differs from its predecessor."""
    return torch.cat([torch.ones_like(x[:1], dtype=torch.bool), x.diff() != 0])


def _number_of_chains(first: Bool[Tensor, " tokens"], num_chains: int | None) -> int:
    """The number of chains, or a bound of it; ``first`` is true for the first token of each."""
    count, note = first.sum(), "num_chains must be at least the number of chains"
    if num_chains is not None:
        checks.must_hold(count <= num_chains, note, lambda: f", {int(count)}, got {num_chains}")
        return num_chains
    number = read(count, wait=True)
    if number is None:
        raise ValueError("num_chains must be given with chain that is traced or that torch.vmap goes over, got None")
    return max(1, number)


def _flat_rows(spans: Int[Tensor, " sequences"], longest: int | None) -> NodeBatch:
    """A batch of the slots of sequences, one sequence after the other. The spans are read."""
    known = read(spans, wait=True)
    if longest is not None and max(known) > longest:
        raise ValueError(f"max_num_nodes must be at least {max(known)}, the largest span of index, got {longest}")
    nodes = sum(known)
    sequence = torch.arange(len(known), device=spans.device).repeat_interleave(spans, output_size=nodes)
    return NodeBatch(nodes, spans, sequence, max(known), known)


def _dense_rows(spans: Int[Tensor, " sequences"], longest: int | None) -> NodeBatch:
    """A batch with ``longest`` slots for each sequence, for spans that cannot be read."""
    if longest is None:
        raise ValueError(
            "max_num_nodes must be given with index that is traced or that torch.vmap goes over, got None: pass a "
            "bound of the spans of index"
        )
    checks.must_hold((spans <= longest).all(), "max_num_nodes must be at least any span of index")
    return NodeBatch.dense(spans.shape[0], longest, spans, spans.device)


def _slots_of_tokens(slot: Int[Tensor, " tokens"], slots: int, valid: Bool[Tensor, " tokens"] | None) -> Slots:
    """The assignment of tokens to slots; padding has no slot."""
    place = slot if valid is None else torch.where(valid, slot, slots)
    node = torch.arange(slot.shape[0], device=slot.device)
    token = torch.full((slots + 1,), -1, device=slot.device).scatter(0, place, node)[:slots]
    return Slots(token.clamp(min=0), token >= 0, slot if valid is None else torch.where(valid, slot, 0), valid)


def _check_increasing(step: Int[Tensor, " tokens"], index: Int[Tensor, " tokens"]) -> None:
    """Raise ValueError unless steps are positive."""

    def first_step() -> str:
        at = int((step <= 0).nonzero()[0])
        return (
            f", got {int(index[at])} after {int(index[at - 1])}: pass chain if a graph has several chains; residue "
            "numbers of files repeat (insertion codes) and go back, so count residues along the sequence (label_seq_id "
            "of mmCIF), as 'Files of structures' in docs/chains.md shows"
        )

    checks.must_hold((step > 0).all(), "index must increase strictly within every chain", first_step)


class TokenBatch(NamedTuple):
    """Data of tokens that operators need in addition to features.

    Attributes:
        pos: positions relative to the mean of the graph, divided by ``length_scale``; zero for padding and without
            positions.
        graphs: the graphs, whose tokens attention mixes.
        sequences: the sequences that convolutions run along.
        slots: gathers from the order of the user, and back; ``None`` if the order is the user's.
        edges: the edges, for local context.
    """

    pos: Float[Tensor, "3 tokens"]
    graphs: NodeBatch
    sequences: Sequences
    slots: Slots | None = None
    edges: NeighborList | None = None

    def restore(self, x: Float[Tensor, "dim tokens"]) -> Float[Tensor, "tokens dim"]:
        """Features in the order of the user, zero for padding."""
        x = self.graphs.zero_padding(x, 1)
        return (x if self.slots is None else self.slots.unpack(x, 1)).T


class Placement:
    """Checks the arguments of a call that say where tokens are, puts tokens in order, and centres positions. At its
    first use on the CPU, it warns if neighbors are not about ``length_scale`` apart.

    Args:
        options: the settings of the module.
        invariants: columns of features with invariants, which order tokens at equal radii.

    Attributes:
        needs_positions: true if part of the output would be zero without positions.
    """

    def __init__(self, options: OperatorSettings, invariants: Sequence[slice]) -> None:
        self.options, self.invariants = options, invariants
        self.in_space = options.attention or options.order == "radial"  # neighbors are the nearest nodes
        self.needs_positions = self.checked = False

    def __call__(
        self, x: Float[Tensor, "tokens dim"], pos: Tensor | None, node_batch: NodeBatch, along: ChainArguments
    ) -> tuple[Float[Tensor, "dim tokens"], TokenBatch]:
        """Features with their channels first, and the data of the tokens."""
        order, radial = None, self.options.order == "radial"
        if radial:
            for name in ("index", "chain", "ring"):
                if getattr(along, name) is not None:
                    raise ValueError(
                        f"{name} must be None with order='radial', got one: {name} says where tokens are in their "
                        "sequence; use order='input'"
                    )
        if pos is None and radial:
            raise ValueError("pos must be given with order='radial', got None: pass pos, or use order='input'")
        if pos is None and self.needs_positions:
            raise ValueError(
                "pos must be given, got None: without positions and vectors, part of the output would always be zero"
            )
        if pos is not None and self.options.causal:
            raise ValueError(
                "pos must be None with causal=True, got positions: they are relative to the mean over all tokens, "
                "which later tokens change; pass differences of positions as vectors"
            )
        x, centred = node_batch.zero_padding(x), x.new_zeros(node_batch.nodes, 3)
        if pos is not None:
            pos = checks.positions(pos, (node_batch.nodes, 3), x, "")
            if radial:
                invariants = [x[:, :0], *(x[:, part] for part in self.invariants)]
                floating = pos if pos.is_floating_point() else pos.double()
                order = radial_order(floating, node_batch, torch.cat(invariants, 1))
            centred = (node_batch.centred(pos) / self.options.length_scale).to(x.dtype)
        order, sequences = along.place(node_batch, order, self.options.no_ring)
        slots, chain = None, along.chain
        if order is not None:
            slots, chain = Slots.of_order(order), None if chain is None else chain[order]
            x, centred = slots.pack(x), slots.pack(centred)
        if pos is not None and not self.checked and is_eager() and is_readable(centred) and node_batch.nodes:
            self._check_length_scale(centred, node_batch, chain)
        return x.T.contiguous(), TokenBatch(centred.T.contiguous(), node_batch, sequences, slots)

    def _check_length_scale(
        self, pos: Float[Tensor, "tokens 3"], node_batch: NodeBatch, chain: Int[Tensor, " tokens"] | None
    ) -> None:
        """Warn if steps between neighbors are not of about unit size. ``pos``, which has been divided, and ``chain``
        are in the order of the sequence."""
        valid = slice(None) if node_batch.mask is None else node_batch.mask
        pos, graph = pos.detach()[valid], node_batch.batch[valid]
        if self.in_space:
            pos = pos[graph == graph[:1]]
            far = torch.cdist(pos[:_SOME], pos, compute_mode="donot_use_mm_for_euclid_dist")  # exact for near ones
            steps = far.fill_diagonal_(torch.inf).amin(1) if len(pos) > 1 else pos[:0, 0]
        else:
            chain = torch.zeros_like(graph) if chain is None else chain[valid]
            steps = pos.diff(dim=0).norm(dim=1)[(graph.diff() == 0) & (chain.diff() == 0)]
        size = steps.square().mean().sqrt().item() if len(steps) else 0.0
        self.checked = size > 0
        if self.checked and not _LENGTHS[0] <= size <= _LENGTHS[1]:
            kind, scale = "nearest in space" if self.in_space else "along the chain", self.options.length_scale
            warnings.warn(
                f"length_scale={scale:g} is not of the size of pos: steps between neighbors ({kind}) are "
                f"{size * scale:.3g} (root mean square), and should be between {_LENGTHS[0]} and {_LENGTHS[1]} length "
                f"scales; pass length_scale={size * scale:.2g}, the spacing of neighbors in the unit of pos",
                stacklevel=2,
            )
