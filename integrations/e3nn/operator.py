"""SE(3)-Hyena and vector self-attention on irreps."""

from __future__ import annotations

from typing import Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn.nn.hyena.graded import AttentionOperator, GradedModel, HyenaOperator
from tg_equiattn.nn.hyena.tokens import Graded, check_order_name, check_reach, run
from tg_equiattn.sequences import Sequences

from .layout import Features, check_features, clifford_grades, describe, rows_by_grade


class IrrepsModule(torch.nn.Module):
    """Node features, flat with a sorted batch index, through a graded module; the shell of the modules here."""

    rows_in: Tensor
    columns_out: Tensor

    def __init__(self, irreps_in: o3.Irreps, irreps_out: o3.Irreps, module: Graded, order: str = "input") -> None:
        super().__init__()
        check_order_name(order)
        check_reach(module, "irreps_out")
        self.irreps_in, self.irreps_out, self.order = irreps_in, irreps_out, order
        self._features = Features.of(irreps_in)
        self.module = module
        self.register_buffer("rows_in", rows_by_grade(irreps_in), persistent=False)
        self.register_buffer("columns_out", rows_by_grade(irreps_out).argsort(), persistent=False)

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
            positions of shape ``(nodes, 3)``; they enter relative to the mean of their graph, as one more 1o

        batch : `torch.Tensor`, optional
            sorted graph index of each node, of shape ``(nodes,)``; without it all nodes are one graph

        edge_index : `torch.Tensor`, optional
            sources and targets, of shape ``(2, edges)``, with ``local_context=True``

        edge_attr : `torch.Tensor`, optional
            invariant scalars of shape ``(edges, edge_channels)``

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
        check_features("x", x, self._features, self.module.like)
        sequences = Sequences.checked(x, batch, batch_size, max_num_nodes)
        out = run(
            self.module, x.T.index_select(0, self.rows_in), pos, sequences,
            order=self.order if order is None else order, edge_index=edge_index, edge_attr=edge_attr,
        )  # fmt: skip
        return out.index_select(0, self.columns_out).T

    def reset_parameters(self) -> None:
        self.module.reset_parameters()

    def __repr__(self) -> str:
        return describe(self)


@compile_mode("unsupported")
class SE3HyenaOperator(IrrepsModule):
    r"""Global geometric context in :math:`O(N \log N)`: every node of a graph sees every other one.

    With Clifford MLPs :math:`\phi, \gamma, \xi`, scalars f and vectors x,

    .. math::

        q, k, v = \phi(x, f), \qquad u = q \otimes k, \qquad \hat u = \sigma(\gamma(u)) \cdot u, \qquad
        x', f' = \xi(x + \hat u^{eqv} \times v^{eqv},\; f + \hat u^{inv} \cdot v^{inv})

    where :math:`\otimes` is a circular long convolution by FFT, at each graph's own length, of vectors by cross
    products. Equivariant to rotations, reflections and translations. Axial vectors (1e) and pseudoscalars (0o) pass
    through the vector and the scalar stream and keep their parity.

    A convolution depends on the order of the nodes: ``order='input'`` keeps it (chains, trajectories),
    ``order='radial'`` sorts by the distance to the centroid, which makes the operator equivariant to permutations
    (ties: :func:`tg_equiattn.sequences.radial_order`).

    From the `SE(3)-Hyena Operator for Scalable Equivariant Learning <https://arxiv.org/abs/2407.01049>`_ paper,
    Algorithm 1; local context is the refinement of its authors' follow-up.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        of query, key and value; by default ``irreps_in``

    order : {'input', 'radial'}
        order of the nodes along the convolution; 'radial' needs ``pos``

    local_context : bool
        whether nodes are first updated from their neighbours along ``edge_index``, by one Clifford message passing step

    edge_channels : int
        number of invariant scalars of an edge

    mode : {'circular', 'causal'}
        of the convolution

    options
        ``mlp_channels``, ``gate_channels``, ``local_channels``, ``num_blocks``, ``product``, ``backend``: as
        :class:`tg_equiattn.nn.SE3HyenaOperator`

    Examples
    --------
    >>> import torch
    >>> operator = SE3HyenaOperator("16x0e + 8x1o", "16x0e + 8x1o")
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
        mode: str = "circular",
        **options: Any,
    ) -> None:
        irreps_in, irreps_out, grades, out_grades, hidden = _grades(irreps_in, irreps_out, irreps_hidden)
        operator = HyenaOperator(
            grades, out_grades, hidden_grades=hidden, mode=mode, local_context=local_context,
            edge_channels=edge_channels, **options,
        )  # fmt: skip
        super().__init__(irreps_in, irreps_out, operator, order)


@compile_mode("unsupported")
class SE3Hyena(IrrepsModule):
    r"""Linear embedding, :class:`SE3HyenaOperator` s with residual connections, and a Clifford MLP.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`
        of the operators

    depth : int
        number of operators

    pool : {None, 'mean'}
        whether to average the nodes of each graph before the last MLP

    order : {'input', 'radial'}
        as :class:`SE3HyenaOperator`; found once

    options
        ``mode``, ``local_context``, ``edge_channels``, ``mlp_channels``, ``gate_channels``, ``local_channels``,
        ``num_blocks``, ``product``, ``backend``: as :class:`SE3HyenaOperator`

    Examples
    --------
    >>> import torch
    >>> model = SE3Hyena("2x0e + 1x1o", "1x0e", "8x0e + 8x1o", depth=2, pool="mean")
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
        **options: Any,
    ) -> None:
        irreps_in, irreps_out, *grades = _grades(irreps_in, irreps_out, irreps_hidden)
        model = GradedModel(HyenaOperator, *grades, depth=depth, pool=pool, **options)
        super().__init__(irreps_in, irreps_out, model, order)


@compile_mode("unsupported")
class VectorSelfAttention(IrrepsModule):
    r"""Equivariant self-attention over the nodes of a graph: vectors by cross products, scalars by softmax attention.

    .. math::

        S_{ij} = \mathrm{softmax}_j\Big(\tfrac{1}{\sqrt n} \|q_i \times k_j\|\Big) (q_i \times k_j), \qquad
        u_i = \tfrac{1}{n} \sum_j S_{ij} \times v_j

    The quadratic counterpart of :class:`SE3HyenaOperator`, streamed in O(N) memory, with its projections, residual and
    output. From the same paper, appendix B.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        of query, key and value; by default ``irreps_in``

    variant : {'equations', 'code'}
        Eq. 4-5, or what the paper's Code 2 computes

    options
        ``local_context``, ``edge_channels``, ``mlp_channels``, ``local_channels``, ``num_blocks``, ``product``: as
        :class:`SE3HyenaOperator`; ``backend``: as :class:`tg_equiattn.nn.VectorSelfAttention`

    Examples
    --------
    >>> import torch
    >>> attention = VectorSelfAttention("16x0e + 8x1o", "16x0e + 8x1o")
    >>> attention(torch.randn(12, 40), batch=torch.tensor([0] * 5 + [1] * 7)).shape
    torch.Size([12, 40])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        irreps_hidden: o3.Irreps | str | None = None,
        *,
        variant: str = "equations",
        **options: Any,
    ) -> None:
        irreps_in, irreps_out, grades, out_grades, hidden = _grades(irreps_in, irreps_out, irreps_hidden)
        operator = AttentionOperator(grades, out_grades, hidden_grades=hidden, variant=variant, **options)
        super().__init__(irreps_in, irreps_out, operator)


def _grades(irreps_in: o3.Irreps | str, irreps_out: o3.Irreps | str, irreps_hidden: o3.Irreps | str | None):
    irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
    irreps_hidden = irreps_in if irreps_hidden is None else o3.Irreps(irreps_hidden)
    named = (("irreps_in", irreps_in), ("irreps_out", irreps_out), ("irreps_hidden", irreps_hidden))
    return irreps_in, irreps_out, *(clifford_grades(name, irreps) for name, irreps in named)
