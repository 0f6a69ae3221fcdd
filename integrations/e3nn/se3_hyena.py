"""SE(3)-Hyena and vector self-attention on irreps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn.checks import python_numbers
from tg_equiattn.nn.hyena.se3_hyena import HyenaOperator, HyenaOptions
from tg_equiattn.nn.modules import NotScriptable
from tg_equiattn.nn.vector.grades import Grades
from tg_equiattn.nn.vector.network import TokenNetwork
from tg_equiattn.nn.vector.operator import TokenModel
from tg_equiattn.nn.vector.options import OperatorOptions, options_of
from tg_equiattn.nn.vector.self_attention import VectorAttentionOperator
from tg_equiattn.node_batch import NodeBatch
from tg_equiattn.tables import Tables

from .layout import Features, check_features, columns_by_grade, columns_by_irrep, describe, grades_of


class IrrepsModule(NotScriptable, torch.nn.Module):
    """Node features, flat with a sorted batch index, through a network on tokens by grade, and back."""

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        irreps_hidden: o3.Irreps | str | None,
        network: Callable[[Grades, Grades, Grades], TokenNetwork],
    ) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        hidden = self.irreps_in if irreps_hidden is None else o3.Irreps(irreps_hidden)
        named = (("irreps_in", self.irreps_in), ("irreps_out", self.irreps_out), ("irreps_hidden", hidden))
        grades = [grades_of(name, irreps) for name, irreps in named]
        self.module = network(*grades)
        self.module.check_reachable("irreps_out")
        self._features = Features.of(self.irreps_in)
        self.columns_in = Tables(functools.partial(columns_by_grade, str(self.irreps_in)))
        self.columns_out = Tables(functools.partial(columns_by_irrep, str(self.irreps_out)))

    @property
    def order(self) -> str:
        """Of the nodes along their sequence."""
        return self.module.order

    def forward(
        self,
        x: Tensor,
        pos: Tensor | None = None,
        batch: Tensor | None = None,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
        *,
        order: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate.

        Parameters
        ----------
        x : `torch.Tensor`
            features of shape ``(nodes, irreps_in.dim)``

        pos : `torch.Tensor`, optional
            positions of shape ``(nodes, 3)``; they enter relative to the mean of their graph, as one more 1o. Give
            large coordinates (UTM: 5e6) in float64, whatever the features are: float32 rounds them to 0.5

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        edge_index, edge_attr : `torch.Tensor`, optional
            with ``local_context=True``, sources and targets, of shape ``(2, edges)``, and invariant scalars of shape
            ``(edges, edge_channels)``

        order : `torch.Tensor`, optional
            a permutation of the nodes within each graph, of shape ``(nodes,)``, in place of the module's

        batch_size, max_num_nodes : int, optional
            number of graphs, and a bound of their sizes; read from ``batch`` where not given, which torch.compile
            cannot, and which waits for the device on CUDA

        Returns
        -------
        `torch.Tensor`
            features of shape ``(nodes, irreps_out.dim)``, or ``(batch_size, irreps_out.dim)`` where the module pools
        """
        check_features("x", x, self._features, self.module.reference_parameter)
        node_batch = NodeBatch.flat(x, batch, batch_size, max_num_nodes)
        x = x.index_select(1, self.columns_in(x.device))
        out = self.module.run(x, pos, node_batch, order, edge_index, edge_attr)
        return out.index_select(1, self.columns_out(out.device))

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def __repr__(self) -> str:
        return describe(self)


@compile_mode("unsupported")
@python_numbers
class IrrepsSE3HyenaOperator(IrrepsModule):
    r"""Global geometric context in :math:`O(N \log N)`: every node of a graph sees every other one.

    :class:`tg_equiattn.nn.SE3HyenaOperator`, where the formulas, errors and sources are, on irreps. Axial vectors (1e)
    and pseudoscalars (0o) pass through the vector and the scalar stream and keep their parity. A convolution depends on
    the order of the nodes: ``order='input'`` keeps it, for chains, trajectories; with ``'radial'`` outputs jump where
    two nodes exchange distances (:doc:`/guarantees`), so it is not for dynamics, relaxation or phonons.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        of query, key and value; by default ``irreps_in``

    order, local_context, edge_channels, filter, causal, short_conv
        as there

    Examples
    --------
    >>> import torch
    >>> operator = IrrepsSE3HyenaOperator("16x0e + 8x1o", "16x0e + 8x1o")
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> operator(torch.randn(12, 40), pos=torch.randn(12, 3), batch=batch).shape
    torch.Size([12, 40])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        irreps_hidden: o3.Irreps | str | None = None,
        *,
        order: str = "input",
        local_context: bool = False,
        edge_channels: int = 0,
        filter: str = "data",
        causal: bool = False,
        short_conv: int | None = None,
    ) -> None:
        options = HyenaOptions(
            filter=filter, causal=causal, short_conv=short_conv, local_context=local_context,
            edge_channels=edge_channels,
        )  # fmt: skip

        def network(inside: Grades, outside: Grades, hidden: Grades) -> TokenNetwork:
            return HyenaOperator(inside, outside, options, hidden, order=order)

        super().__init__(irreps_in, irreps_out, irreps_hidden, network)


@compile_mode("unsupported")
@python_numbers
class IrrepsSE3Hyena(IrrepsModule):
    r"""Linear embedding, :class:`IrrepsSE3HyenaOperator` s with residual connections, and a Clifford MLP.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`
        of the operators

    depth, pool, order, options
        as :class:`tg_equiattn.nn.SE3Hyena`

    Examples
    --------
    >>> import torch
    >>> model = IrrepsSE3Hyena("2x0e + 1x1o", "1x0e", "8x0e + 8x1o", depth=2, pool="mean")
    >>> model(torch.randn(12, 5), pos=torch.randn(12, 3), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        irreps_hidden: o3.Irreps | str = "16x0e + 16x1o",
        *,
        depth: int = 3,
        pool: str | None = None,
        order: str = "input",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        own = options_of(HyenaOptions, options)

        def network(inside: Grades, outside: Grades, hidden: Grades) -> TokenNetwork:
            return TokenModel(HyenaOperator, inside, outside, hidden, own, depth=depth, order=order, pool=pool)

        super().__init__(irreps_in, irreps_out, irreps_hidden, network)


@compile_mode("unsupported")
@python_numbers
class IrrepsVectorSelfAttention(IrrepsModule):
    r"""Equivariant self-attention over the nodes of a graph: vectors by cross products, scalars by softmax attention.

    :class:`tg_equiattn.nn.VectorSelfAttention`, where the formulas, errors and sources are, on irreps: the quadratic
    counterpart of :class:`IrrepsSE3HyenaOperator`.

    Parameters
    ----------
    irreps_in, irreps_out, irreps_hidden : `e3nn.o3.Irreps`
        as :class:`IrrepsSE3HyenaOperator`

    short_conv, local_context, edge_channels
        as there; with a short convolution it is no longer equivariant to permutations

    Examples
    --------
    >>> import torch
    >>> attention = IrrepsVectorSelfAttention("16x0e + 8x1o", "16x0e + 8x1o")
    >>> attention(torch.randn(12, 40), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 40])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        irreps_hidden: o3.Irreps | str | None = None,
        *,
        short_conv: int | None = None,
        local_context: bool = False,
        edge_channels: int = 0,
    ) -> None:
        options = OperatorOptions(short_conv=short_conv, local_context=local_context, edge_channels=edge_channels)

        def network(inside: Grades, outside: Grades, hidden: Grades) -> TokenNetwork:
            return VectorAttentionOperator(inside, outside, options, hidden)

        super().__init__(irreps_in, irreps_out, irreps_hidden, network)
