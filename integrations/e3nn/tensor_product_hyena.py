"""The Hyena operator on any irreps."""

from __future__ import annotations

import functools
import hashlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor
from torch.utils.checkpoint import set_checkpoint_early_stop

from tg_equiattn import checks
from tg_equiattn.chains.convolutions import LAG_FILTERS, ExponentialFilter, LagFilter, ShortConv
from tg_equiattn.chains.long_conv import bilinear_long_conv
from tg_equiattn.chains.sequences import ChainArguments, OperatorSettings, Placement, Sequences
from tg_equiattn.graphs.node_batch import NodeBatch, PaddedBatch, Slots
from tg_equiattn.modules import NotScriptable, StoresSettings
from tg_equiattn.shapes import Float
from tg_equiattn.torch_state import Tables, full_precision

from .layout import Features, IrrepsLike, IrrepsOrZero, channels, check_features, describe, like_its_copies


@compile_mode("unsupported")
@checks.arguments
class LongTensorProduct(NotScriptable, StoresSettings):
    r"""Tensor-product long convolution over the nodes of each graph, with learned path weights.

    .. math::

        u_i = \frac{1}{n} \sum_j x^{(1)}_j \otimes_w x^{(2)}_{i-j}

    Here :math:`\otimes_w` is an `e3nn.o3.TensorProduct`, and n is the graph's own number of nodes. Indices are taken
    modulo n; with ``causal=True`` the sum runs over past nodes only. The tensor product is bilinear, so it is evaluated
    at frequencies instead of pairs, three times for each frequency: this takes :math:`O(N \log N)` time. The path
    ``1o x 1o -> 1e`` is, except for its weight, the convolution of vectors in :class:`IrrepsSE3HyenaOperator`.

    The layer extends section 3.2 of the `SE(3)-Hyena Operator for Scalable Equivariant Learning
    <https://arxiv.org/abs/2407.01049>`_ paper from vectors to all irreps.

    Parameters
    ----------
    irreps_in1 : `e3nn.o3.Irreps`
        irreps of the first input

    irreps_in2 : `e3nn.o3.Irreps`
        irreps of the second input

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output

    instructions : list of tuple, optional
        paths of the product, as for `e3nn.o3.TensorProduct`; by default all that the selection rules allow, fully
        connected, so that the number of weights grows as the cube of multiplicities; use instructions with ``'uuu'``
        for few weights or none; all nodes share the weights

    causal : bool
        whether nodes see earlier nodes only, by default ``False``

    Examples
    --------
    >>> import torch
    >>> conv = LongTensorProduct("4x0e + 2x2e", "4x0e + 2x1o", "3x1o + 1x3o")
    >>> conv(torch.randn(12, 14), torch.randn(12, 10), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 16])
    """

    def __init__(
        self, irreps_in1: IrrepsOrZero, irreps_in2: IrrepsOrZero, irreps_out: IrrepsOrZero, *,
        instructions: list[tuple] | None = None, causal: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        irreps = o3.Irreps(irreps_in1), o3.Irreps(irreps_in2), o3.Irreps(irreps_out)
        if instructions is None:
            product: o3.TensorProduct = o3.FullyConnectedTensorProduct(*irreps, shared_weights=True)
        else:
            product = o3.TensorProduct(*irreps, instructions, shared_weights=True)
        self.tensor_product = like_its_copies(product)
        if not self.tensor_product.instructions:
            wanted = f"a path from {irreps[0]} x {irreps[1]}, by instructions if they are given"
            raise ValueError(f"irreps_out must have {wanted}, got {irreps[2]}")
        self.mode, self.norm = "causal" if causal else "circular", "forward"
        self.irreps_in1, self.irreps_in2 = self.tensor_product.irreps_in1, self.tensor_product.irreps_in2
        self.irreps_out = self.tensor_product.irreps_out
        self._dim: int = self.irreps_out.dim  # compilers do not look into irreps
        self._features = Features.of(self.irreps_in1), Features.of(self.irreps_in2)

    def settings(self) -> dict[str, Any]:
        paths = [(*path[:5], f"{path.path_weight:.6g}") for path in self.instructions]
        digest = hashlib.sha256(repr(paths).encode()).hexdigest()[:16]
        return {
            "causal": self.mode == "causal", "irreps_in1": str(self.irreps_in1), "irreps_in2": str(self.irreps_in2),
            "irreps_out": str(self.irreps_out),
            "instructions": {"digest": digest, "text": f"{len(paths)} paths ({digest})"},
        }  # fmt: skip

    @property
    def _reference(self) -> Tensor:
        """A tensor with the dtype and device of the module, with or without weights."""
        return self.tensor_product.weight

    @property
    def instructions(self):
        return self.tensor_product.instructions

    @property
    def weight_numel(self) -> int:
        return self.tensor_product.weight_numel

    def forward(
        self, x1: Tensor, x2: Tensor, batch: Tensor | None = None, *, index: Tensor | None = None,
        chain: Tensor | None = None, batch_size: int | None = None, num_chains: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Evaluate.

        Parameters
        ----------
        x1 : `torch.Tensor`
            features of shape ``(nodes, irreps_in1.dim)``

        x2 : `torch.Tensor`
            features of shape ``(nodes, irreps_in2.dim)``

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        index : `torch.Tensor`, optional
            the number of each node along its chain, integers of shape ``(nodes,)``, for example its residue number; it
            must increase strictly; convolutions take differences of it as lags, so that missing nodes count as zero;
            steps above 128 count as 128; without it no node is missing

        chain : `torch.Tensor`, optional
            any number for each chain, integers of shape ``(nodes,)``; convolutions run along each chain of a graph by
            itself; without it each graph is one chain

        batch_size : int, optional
            number of graphs; by default it is read from ``batch``, which torch.compile cannot do, and for which CUDA
            waits

        num_chains : int, optional
            number of chains in the batch, or a bound of it; by default it is read from ``chain``, which torch.compile
            cannot do, and for which CUDA waits

        max_num_nodes : int, optional
            a bound of the sizes of graphs, and of the spans of ``index``; by default it is read from ``batch`` and
            ``index``, which torch.compile cannot do, and for which CUDA waits

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        check_features("x1", x1, self._features[0], self._reference)
        check_features("x2", x2, self._features[1], self._reference)
        if x1.shape[0] != x2.shape[0]:
            raise ValueError(f"x2 must have the {x1.shape[0]} nodes of x1, got {x2.shape[0]}")
        node_batch = NodeBatch.flat(x1, batch, batch_size, max_num_nodes)
        order, sequences = ChainArguments(index, chain, None, num_chains, max_num_nodes).place(node_batch)
        slots = None if order is None else Slots.of_order(order)
        with full_precision(x1.device):
            x1, x2 = (x.to(self._reference.dtype) for x in (x1, x2))
            x1, x2 = (x if slots is None else slots.pack(x) for x in (x1, x2))
            out = self.convolve(x1.T, x2.T, sequences)
            return (out if slots is None else slots.unpack(out, 1)).T.contiguous()

    def convolve(
        self, x1: Float[Tensor, "dim1 nodes"], x2: Float[Tensor, "dim2 nodes"], sequences: Sequences
    ) -> Float[Tensor, "dim_out nodes"]:
        """Evaluate on checked features, with their channels first, and sequences."""
        if not x1.numel() or not x2.numel() or not self._dim:
            return x1.new_zeros(self._dim, x1.shape[1])

        def convolution(a: Tensor, b: Tensor, rows: PaddedBatch) -> Tensor:
            with _recomputed_whole(self.tensor_product):
                return bilinear_long_conv(
                    a, b, self.tensor_product, rows.lengths, self.mode, self.norm, sequences.counts(rows)
                )

        return sequences.mix(convolution, x1, x2)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.irreps_in1.simplify()} x {self.irreps_in2.simplify()} -> "
            f"{self.irreps_out.simplify()} | {len(self.instructions)} paths | {self.weight_numel} weights)"
        )


def _recomputed_whole(product: torch.nn.Module) -> AbstractContextManager[None]:
    """A context that disables the early stop of checkpoints. The early stop is an exception, which fails in the
    TorchScript of e3nn 0.4.4's products."""
    scripted = any(isinstance(part, torch.jit.ScriptModule) for part in product.children())
    return set_checkpoint_early_stop(False) if scripted else nullcontext()


_SMALL = 0.1  # mean square below which the norm changes little


@compile_mode("unsupported")
@checks.arguments_of(OperatorSettings, "attention", "mixed_products", "local_context", "edge_channels", "num_blocks")
class TensorProductHyenaOperator(NotScriptable, StoresSettings):
    r"""Global geometric context in :math:`O(N \log N)` on features of any irreps.

    The operator is :class:`IrrepsSE3HyenaOperator` with e3nn's maps instead of Clifford MLPs, and with
    :class:`LongTensorProduct` instead of convolutions of scalars and vectors. With ``filter='data'`` it computes

    .. math::

        q, k, v = N(\mathrm{Linear}(x)), \quad u = N(q \otimes_w k), \quad \hat u = \sigma(\gamma(u)) \cdot u,
        \quad x' = \mathrm{Linear}(N(\mathrm{Linear}(x) + \hat u \otimes_{w'} v))

    with one gate for each channel, where :math:`\gamma` is a linear map of the scalars and squared norms of u. N
    divides each irrep of a node by :math:`\sqrt{0.1 + m}`, where m is the mean square of its components over all
    channels, so that outputs start at unit variance, and are smooth where all of them pass through zero. With
    other filters, :math:`u_i = N(q_i \otimes_w \sum_j h(i - j) k_j)`. Positions relative to the mean of their
    graph are one more 1o of the input.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        irreps of the input

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output

    irreps_hidden : `e3nn.o3.Irreps`, optional
        irreps of query, key and value, which must hold every irrep of ``irreps_in``; by default ``irreps_in``; tensor
        products are fully connected, so weights grow as the cube of multiplicities

    filter : {'data', 'implicit', 'exponential'}
        filter of the long convolution: ``'data'``, the keys, as published, ``'implicit'``, a network of the lag, or
        ``'exponential'``, a learned sum of decaying exponentials of the lag; use ``'implicit'`` for chains whose
        beginning has no meaning, and ``'exponential'`` for sequences longer than in training and for :meth:`step`

    causal : bool
        whether nodes see earlier nodes of their chain only, by default ``False``; needs ``order='input'`` and rules out
        ``pos``; with ``filter='data'`` outputs still depend on the size of the graph; use it to predict the next node

    short_conv : int, optional
        number of taps, odd, from 3 on, of a short convolution of query, key and value before the long one, with one
        weight for each channel and tap; by default there is none; recall needs it (:doc:`/chains`)

    order : {'input', 'radial'}
        ``'input'`` keeps the order of the nodes; ``'radial'`` sorts them by their distance to the centroid and needs
        ``pos`` and rules out ``index``, ``chain`` and ``ring``; use ``'radial'`` for clouds without an order

    length_scale : float
        length that ``pos`` is divided by, in the unit of ``pos``, by default 1; use the spacing of neighbors, for
        example 3.8 for residues in angstrom

    Examples
    --------
    >>> import torch
    >>> operator = TensorProductHyenaOperator("8x0e + 4x1o + 2x2e + 1x3o", "4x0e + 2x2e")
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> operator(torch.randn(12, 37), pos=torch.randn(12, 3), batch=batch).shape
    torch.Size([12, 14])
    """

    def __init__(
        self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, irreps_hidden: IrrepsLike | None = None, **settings: Any
    ) -> None:  # fmt: skip
        super().__init__()
        self.options = options = OperatorSettings(**settings)
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        self.placement = Placement(self.options, _scalars(self.irreps_in))
        hidden = self.irreps_in if irreps_hidden is None else o3.Irreps(irreps_hidden)
        hidden = hidden.remove_zero_multiplicities().simplify()
        self.irreps_hidden = hidden
        dropped = " + ".join(str(ir) for ir in sorted({ir for mul, ir in self.irreps_in if mul and ir not in hidden}))
        if dropped:
            raise ValueError(
                f"irreps_hidden must hold every irrep of irreps_in, got {hidden} without {dropped}, which would be "
                f"dropped: add {dropped} to irreps_hidden, or leave it out of irreps_in"
            )
        if not _products({ir for _, ir in hidden}, {ir for _, ir in hidden}, hidden):
            raise ValueError(f"irreps_hidden must have an irrep of its product with itself, got {hidden}: add 0e")
        self.project = o3.Linear(self.irreps_in + o3.Irreps("1o"), hidden + hidden + hidden)
        columns = channels(hidden + hidden + hidden)
        taps, filter, causal = options.short_conv, options.filter, options.causal
        self.short_conv = None if taps is None else ShortConv(columns, taps, causal)
        self.implicit_filter: LagFilter | None = None  # of any kind: state dicts have this name
        if filter != "data":
            self.implicit_filter = LAG_FILTERS[filter](hidden.num_irreps, causal)
            self._channels = Tables(functools.partial(torch.tensor, channels(hidden)))
            self.tensor_product = like_its_copies(o3.FullyConnectedTensorProduct(hidden, hidden, hidden))
        else:
            self.convolution = LongTensorProduct(hidden, hidden, hidden, causal=causal)
            self.convolution.norm = self.options.norm
        self._scalars, self._sizes = _scalars(hidden), [mul * ir.dim for mul, ir in hidden]
        self.norm = o3.Norm(hidden, squared=True)
        invariants = hidden.num_irreps + sum(part.stop - part.start for part in self._scalars)
        self.gate = torch.nn.Linear(invariants, hidden.num_irreps)
        self.apply_gate = o3.ElementwiseTensorProduct(hidden, o3.Irreps([(hidden.num_irreps, (0, 1))]))
        self.multiply = like_its_copies(o3.FullyConnectedTensorProduct(hidden, hidden, hidden))
        # if the input has no vectors, the residual has positions as vectors
        self._starts_on_pos = not causal and not self.irreps_in.count(o3.Irrep("1o"))
        self.shortcut = o3.Linear(self.irreps_in + o3.Irreps("1o") if self._starts_on_pos else self.irreps_in, hidden)
        self.out = o3.Linear(hidden, self.irreps_out)
        without_pos = _reachable(self.irreps_in, hidden)
        possible = without_pos if causal else _reachable(self.irreps_in + o3.Irreps("1o"), hidden)
        if taps is None and all(ir == o3.Irrep("0e") for mul, ir in self.irreps_in if mul):
            possible -= {o3.Irrep("0o")}  # all vectors of a node lie along its position
        wanted = {ir for mul, ir in self.irreps_out if mul}
        zero = [str(ir) for ir in wanted - possible]
        if zero:
            raise ValueError(
                f"irreps_out must be reachable through irreps_hidden={hidden}, got {' + '.join(zero)} that would "
                "always be zero: add it to irreps_hidden; 0o also needs vectors (steps to neighbors) in irreps_in"
            )
        self.placement.needs_positions = bool(wanted - without_pos)
        self._features = Features.of(self.irreps_in)

    def settings(self) -> dict[str, Any]:
        options = {name: getattr(self.options, name) for name in ("order", "filter", "causal")}
        irreps = {name: str(getattr(self, name)) for name in ("irreps_in", "irreps_out", "irreps_hidden")}
        return options | irreps | {"length_scale": float(self.options.length_scale)}

    def forward(
        self, x: Tensor, pos: Tensor | None = None, batch: Tensor | None = None, *, index: Tensor | None = None,
        chain: Tensor | None = None, ring: Tensor | bool | None = None, batch_size: int | None = None,
        num_chains: int | None = None, max_num_nodes: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Evaluate.

        Parameters
        ----------
        x : `torch.Tensor`
            features of shape ``(nodes, irreps_in.dim)``

        pos : `torch.Tensor`, optional
            positions of shape ``(nodes, 3)``; they enter relative to the mean of their graph, divided by
            ``length_scale``, as one more 1o; they must be ``None`` with ``causal=True``, as later nodes change the
            mean; give large coordinates (UTM: 5e6) in float64, whatever dtype the features have: float32 rounds them to
            0.5

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        index : `torch.Tensor`, optional
            the number of each node along its chain, integers of shape ``(nodes,)``, for example its residue number; it
            must increase strictly; convolutions take differences of it as lags, so that missing nodes count as zero;
            steps above 128 count as 128; without it no node is missing

        chain : `torch.Tensor`, optional
            any number for each chain, integers of shape ``(nodes,)``; convolutions run along each chain of a graph by
            itself, while positions are centred over the whole graph; without it each graph is one chain

        ring : `torch.Tensor` or bool, optional
            true for the nodes of closed chains, bool of shape ``(nodes,)``, or one bool for all chains; lags then run
            the shortest way round the ring, in implicit and exponential filters and in short convolutions; needs
            ``causal=False`` and another filter than ``'data'``; without it all chains are open

        batch_size : int, optional
            number of graphs; by default it is read from ``batch``, which torch.compile cannot do, and for which CUDA
            waits

        num_chains : int, optional
            number of chains in the batch, or a bound of it; by default it is read from ``chain``, which torch.compile
            cannot do, and for which CUDA waits

        max_num_nodes : int, optional
            a bound of the sizes of graphs, and of the spans of ``index``; by default it is read from ``batch`` and
            ``index``, which torch.compile cannot do, and for which CUDA waits

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``
        """
        reference = self.out.weight
        check_features("x", x, self._features, reference)
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes)
        with full_precision(x.device):
            along = ChainArguments(index, chain, ring, num_chains, max_num_nodes)
            x, tokens = self.placement(x.to(reference.dtype), pos, node_batch, along)
            with_pos, sequences = torch.cat([x, tokens.pos]).T, tokens.sequences
            projected = self._projected(with_pos)
            if self.short_conv is not None:
                projected = self.short_conv(projected, sequences)
            query, key, value = projected.chunk(3)
            if self.implicit_filter is None:
                mixed = self.convolution.convolve(query, key, sequences).T
            else:
                filtered = self.implicit_filter(key, sequences, self._channels(key.device))
                mixed = self.tensor_product(query.T, filtered.T)
            return tokens.restore(self._finish(with_pos, mixed, value.T).T).contiguous()

    def step(self, state: tuple[Any, ...] | None, x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """Evaluate one more node of each sequence, in a time that does not depend on the number of earlier ones.

        Outputs equal those of ``forward`` for the whole sequence. It needs ``filter='exponential'`` and
        ``causal=True``.

        Parameters
        ----------
        state : tuple, optional
            the state that the last call returned, or ``None`` at the beginning

        x : `torch.Tensor`
            features of shape ``(sequences, irreps_in.dim)``

        Returns
        -------
        tuple
            the new state, and features of shape ``(sequences, irreps_out.dim)``
        """
        self.options.check_steps()
        check_features("x", x, self._features, self.out.weight)
        recent, sums = (None, None) if state is None else state
        with full_precision(x.device):
            with_pos = torch.cat([x.to(self.out.weight.dtype), x.new_zeros(x.shape[0], 3)], 1)
            projected = self._projected(with_pos)
            if self.short_conv is not None:
                recent, projected = self.short_conv.step(recent, projected)
            query, key, value = projected.chunk(3)
            sums, filtered = cast(ExponentialFilter, self.implicit_filter).step(sums, key, self._channels(key.device))
            return (recent, sums), self._finish(with_pos, self.tensor_product(query.T, filtered.T), value.T)

    def _projected(self, with_pos: Float[Tensor, "tokens dim_in+3"]) -> Float[Tensor, "dim tokens"]:
        """Query, key and value. The products of e3nn have channels last, convolutions have them first."""
        return _normed(self.project(with_pos), 3 * self._sizes).T

    def _finish(
        self, with_pos: Float[Tensor, "tokens dim_in+3"], mixed: Float[Tensor, "tokens hidden"],
        value: Float[Tensor, "tokens hidden"],
    ) -> Float[Tensor, "tokens dim_out"]:  # fmt: skip
        mixed = _normed(mixed, self._sizes)
        invariants = torch.cat([self.norm(mixed), *(mixed[:, part] for part in self._scalars)], 1)
        mixed = self.apply_gate(mixed, torch.sigmoid(self.gate(invariants)))
        residual = self.shortcut(with_pos if self._starts_on_pos else with_pos[:, :-3])
        return self.out(_normed(residual + self.multiply(mixed, value), self._sizes))

    def __repr__(self) -> str:
        return describe(self)


def _normed(x: Float[Tensor, "tokens dim"], sizes: list[int]) -> Float[Tensor, "tokens dim"]:
    """Each irrep, of these sizes, divided by the root of its mean square plus a constant: zero stays zero, smoothly."""
    parts = x.split(sizes, 1)
    return torch.cat([part * (part.square().mean(1, keepdim=True) + _SMALL).rsqrt() for part in parts], 1)


def _scalars(irreps: o3.Irreps) -> list[slice]:
    """The columns of scalars 0e."""
    return [part for (_, ir), part in zip(irreps, irreps.slices(), strict=True) if ir == o3.Irrep("0e")]


def _products(left: set[o3.Irrep], right: set[o3.Irrep], hidden: o3.Irreps) -> set[o3.Irrep]:
    """The irreps of ``hidden`` that occur in products of ``left`` and ``right``."""
    return {ir for _, ir in hidden if any(ir in a * b for a in left for b in right)}


def _reachable(irreps_in: o3.Irreps, hidden: o3.Irreps) -> set[o3.Irrep]:
    """The irreps of the output that can differ from zero by selection rules."""
    inside = {ir for mul, ir in irreps_in if mul}
    query = {ir for _, ir in hidden if ir in inside}
    return query | _products(_products(query, query, hidden), query, hidden)
