"""SE(3)-Hyena and vector self-attention on irreps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.chains.operator import TokenModel, TokenNetwork, token_attention, token_operator
from tg_equiattn.chains.sequences import OF_CONVOLUTIONS, ChainArguments, OperatorSettings
from tg_equiattn.graphs.node_batch import NodeBatch
from tg_equiattn.modules import NotScriptable, StoresSettings, reset_children
from tg_equiattn.torch_state import Tables

from .layout import Features, IrrepsLike, check_features, columns_by_grade, columns_by_irrep, describe, grades_of


@checks.arguments
class IrrepsModule(NotScriptable, StoresSettings):
    """A module that reads node features as tokens by grade, calls a network, and reorders its output. The function
    ``network`` of a subclass makes the network from the grades of input, output and hidden tokens, and settings."""

    network: ClassVar[Callable[..., TokenNetwork]]

    def __init__(
        self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, irreps_hidden: IrrepsLike | None = None, **settings: Any
    ) -> None:  # fmt: skip
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        hidden = self.irreps_in if irreps_hidden is None else o3.Irreps(irreps_hidden)
        named = (("irreps_in", self.irreps_in), ("irreps_out", self.irreps_out), ("irreps_hidden", hidden))
        self.module = self.network(*(grades_of(name, irreps) for name, irreps in named), **settings)
        self.module.check_reachable("irreps_out")
        self._features = Features.of(self.irreps_in)
        self.columns_in = Tables(functools.partial(columns_by_grade, str(self.irreps_in)))
        self.columns_out = Tables(functools.partial(columns_by_irrep, str(self.irreps_out)))

    def settings(self) -> dict[str, Any]:
        return {"irreps_in": str(self.irreps_in), "irreps_out": str(self.irreps_out)}

    def forward(
        self, x: Tensor, pos: Tensor | None = None, batch: Tensor | None = None, edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None, *, index: Tensor | None = None, chain: Tensor | None = None,
        ring: Tensor | bool | None = None, batch_size: int | None = None, num_chains: int | None = None,
        max_num_nodes: int | None = None,
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

        edge_index : `torch.Tensor`, optional
            source and target nodes, of shape ``(2, edges)``; needed with ``local_context=True``; with ``causal=True``,
            no source may come later than its target

        edge_attr : `torch.Tensor`, optional
            invariant scalars of the edges, of shape ``(edges, edge_channels)``; needed if ``edge_channels`` is not 0

        index : `torch.Tensor`, optional
            the number of each node along its chain, integers of shape ``(nodes,)``, for example its residue number; it
            must increase strictly; convolutions take differences of it as lags, so that missing nodes count as zero;
            steps above 128 count as 128; without it no node is missing

        chain : `torch.Tensor`, optional
            any number for each chain, integers of shape ``(nodes,)``; convolutions run along each chain of a graph by
            itself, while positions are centred, and attention mixes, over the whole graph; without it each graph is one
            chain

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
            features of shape ``(nodes, irreps_out.dim)``, or ``(batch_size, irreps_out.dim)`` if the module pools
        """
        reference = self.module.reference_parameter
        check_features("x", x, self._features, reference)
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes)
        x = x.to(reference.dtype).index_select(1, self.columns_in(x.device))
        along = ChainArguments(index, chain, ring, num_chains, max_num_nodes)
        out = self.module.run(x, pos, node_batch, along, edge_index, edge_attr)
        return out.index_select(1, self.columns_out(out.device))

    def step(self, state: tuple[Any, ...] | None, x: Tensor) -> tuple[tuple[Any, ...], Tensor]:
        """Evaluate one more node of each sequence, in a time that does not depend on the number of earlier ones.

        Outputs equal those of ``forward`` for the whole sequence. It needs ``filter='exponential'`` and
        ``causal=True``, and rules out ``local_context`` and ``pool``.

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
        reference = self.module.reference_parameter
        check_features("x", x, self._features, reference)
        state, out = self.module.run_step(state, x.to(reference.dtype).index_select(1, self.columns_in(x.device)))
        return state, out.index_select(1, self.columns_out(out.device))

    def reset_parameters(self) -> None:
        reset_children(self)

    def __repr__(self) -> str:
        return describe(self)


@compile_mode("unsupported")
@checks.arguments_of(OperatorSettings, "attention")
class IrrepsSE3HyenaOperator(IrrepsModule):
    r"""Global geometric context in :math:`O(N \log N)`: every node of a graph sees every other one.

    This is :class:`tg_equiattn.nn.SE3HyenaOperator` on irreps; that class has the formulas and sources. Axial vectors
    (1e) are processed with the vectors and pseudoscalars (0o) with the scalars, and all keep their parity. Outputs
    depend on the order of the nodes. With ``order='radial'`` they jump where two nodes exchange their distances
    (:doc:`/guarantees`): do not use it for dynamics, relaxation or phonons.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        irreps of the input: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        irreps of query, key and value, by default ``irreps_in``; if they differ from ``irreps_in``, a linear map takes
        the input to the residual

    filter : {'data', 'implicit', 'exponential'}
        filter of the long convolution: ``'data'``, the keys, as published, ``'implicit'``, a network of the lag, or
        ``'exponential'``, a learned sum of decaying exponentials of the lag; use ``'implicit'`` for chains whose
        beginning has no meaning, and ``'exponential'`` for sequences longer than in training and for :meth:`step`

    mixed_products : bool
        whether scalars of a node multiply the convolved vectors, beside cross products, with filters of the lag, and
        projections are linear, by default ``True``; ``False`` is the published operator with such a filter

    causal : bool
        whether nodes see earlier nodes of their chain only, by default ``False``; needs ``order='input'`` and rules out
        ``pos`` and edges from later nodes; with ``filter='data'`` outputs still depend on the size of the graph; use it
        to predict the next node

    short_conv : int, optional
        number of taps, odd, from 3 on, of a short convolution of query, key and value before the long one, with one
        weight for each channel and tap; by default there is none; recall needs it (:doc:`/chains`)

    order : {'input', 'radial'}
        ``'input'`` keeps the order of the nodes; ``'radial'`` sorts them by their distance to the centroid and needs
        ``pos`` and rules out ``index``, ``chain`` and ``ring``; use ``'radial'`` for clouds without an order

    length_scale : float
        length that ``pos`` is divided by, in the unit of ``pos``, by default 1; use the spacing of neighbors, for
        example 3.8 for residues in angstrom

    local_context : bool
        whether to update every node from its neighbors along ``edge_index`` first, by Clifford message passing, by
        default ``False``; use it if a graph of near neighbors is known

    edge_channels : int
        number of scalars of an edge, given as ``edge_attr``, by default 0; other numbers need ``local_context``

    num_blocks : int
        number of blocks of every Clifford MLP, by default 1; use 2 for more products of channels, at about twice the
        time

    Examples
    --------
    >>> import torch
    >>> operator = IrrepsSE3HyenaOperator("16x0e + 8x1o", "16x0e + 8x1o")
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> operator(torch.randn(12, 40), pos=torch.randn(12, 3), batch=batch).shape
    torch.Size([12, 40])
    """

    network = staticmethod(token_operator)


@compile_mode("unsupported")
@checks.arguments_of(TokenModel)
class IrrepsSE3Hyena(IrrepsModule):
    r"""The SE(3)-Hyena model: linear embedding, operators with residual connections, and a Clifford MLP.

    The operators are :class:`IrrepsSE3HyenaOperator` or :class:`IrrepsVectorSelfAttention`. This is
    :class:`tg_equiattn.nn.SE3Hyena` on irreps.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        irreps of the input: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        irreps of a node between the layers, which must hold every irrep of ``irreps_in``; by default the 16 scalars and
        128 vectors of the published model, and if ``irreps_in`` has 1e or 0o, also 128 axial vectors and 16
        pseudoscalars

    num_layers : int
        number of operators, by default 3

    num_blocks : int
        number of blocks of every Clifford MLP, by default 1; use 2 for more products of channels, at about twice the
        time

    pool : {None, 'mean'}
        ``'mean'`` takes the mean over the nodes of each graph before the MLP; by default there is no mean

    order : {'input', 'radial'}
        ``'input'`` keeps the order of the nodes; ``'radial'`` sorts them by their distance to the centroid and needs
        ``pos`` and rules out ``index``, ``chain`` and ``ring``; use ``'radial'`` for clouds without an order

    length_scale : float
        length that ``pos`` is divided by, in the unit of ``pos``, by default 1; use the spacing of neighbors, for
        example 3.8 for residues in angstrom

    attention : bool
        whether the operators are :class:`IrrepsVectorSelfAttention` instead of :class:`IrrepsSE3HyenaOperator`, by
        default ``False``; use it for clouds of up to a few thousand nodes without an order

    attn_kwargs : dict, optional
        further arguments of the operators: ``filter``, ``mixed_products``, ``causal``, ``short_conv``,
        ``local_context`` and ``edge_channels``; without the first three for ``attention``

    Examples
    --------
    >>> import torch
    >>> model = IrrepsSE3Hyena("2x0e + 1x1o", "1x0e", "8x0e + 8x1o", num_layers=2, pool="mean")
    >>> model(torch.randn(12, 5), pos=torch.randn(12, 3), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([2, 1])
    """

    network = TokenModel

    def __init__(
        self, irreps_in: IrrepsLike, irreps_out: IrrepsLike, irreps_hidden: IrrepsLike | None = None, **settings: Any
    ) -> None:  # fmt: skip
        if irreps_hidden is None:
            both = any(mul and ir.p * (-1) ** ir.l < 0 for mul, ir in o3.Irreps(irreps_in))
            irreps_hidden = "16x0e + 128x1o + 128x1e + 16x0o" if both else "16x0e + 128x1o"
        super().__init__(irreps_in, irreps_out, irreps_hidden, **settings)


@compile_mode("unsupported")
@checks.arguments_of(OperatorSettings, *OF_CONVOLUTIONS)
class IrrepsVectorSelfAttention(IrrepsModule):
    r"""Equivariant self-attention over the nodes of a graph: vectors by cross products, scalars by softmax attention.

    This is :class:`tg_equiattn.nn.VectorSelfAttention` on irreps; that class has the formulas and sources. Use it
    instead of :class:`IrrepsSE3HyenaOperator` for nodes without an order, up to a few thousand: it takes
    :math:`O(N^2)` time.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        irreps of the input: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_out : `e3nn.o3.Irreps`
        irreps of the output: 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        irreps of query, key and value, by default ``irreps_in``; if they differ from ``irreps_in``, a linear map takes
        the input to the residual

    short_conv : int, optional
        number of taps, odd, from 3 on, of a short convolution of query, key and value, with one weight for each channel
        and tap; by default there is none; with it, outputs depend on the order of the nodes

    length_scale : float
        length that ``pos`` is divided by, in the unit of ``pos``, by default 1; use the spacing of neighbors, for
        example 3.8 for residues in angstrom

    local_context : bool
        whether to update every node from its neighbors along ``edge_index`` first, by Clifford message passing, by
        default ``False``; use it if a graph of near neighbors is known

    edge_channels : int
        number of scalars of an edge, given as ``edge_attr``, by default 0; other numbers need ``local_context``

    num_blocks : int
        number of blocks of every Clifford MLP, by default 1; use 2 for more products of channels, at about twice the
        time

    Examples
    --------
    >>> import torch
    >>> attention = IrrepsVectorSelfAttention("16x0e + 8x1o", "16x0e + 8x1o")
    >>> attention(torch.randn(12, 40), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 40])
    """

    network = staticmethod(token_attention)
