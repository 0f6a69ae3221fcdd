"""SE(3)-Hyena and vector self-attention on irreps."""

from __future__ import annotations

from typing import Any

from e3nn import o3
from e3nn.util.jit import compile_mode

from tg_equiattn.nn.hyena import (
    GradedModel,
    Grades,
    HyenaOperator,
    HyenaOptions,
    OperatorOptions,
    VectorAttentionOperator,
)

from .irreps_module import IrrepsModule
from .layout import clifford_grades


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

    A convolution depends on the order of the nodes. ``order='input'`` keeps it (chains, trajectories). With the paper's
    convolution, ``filter='data'``, it then knows absolute indices: shifting the sequence changes the output. With
    ``filter='lag'`` it knows lags alone, for chains whose beginning means nothing: :math:`u_i = q_i \otimes \sum_j
    h(i - j) k_j`, with h learned and no factor of the length; see :class:`tg_equiattn.nn.SE3HyenaOperator` for what is
    exact. ``order='radial'`` sorts by the distance to the centroid
    (:func:`tg_equiattn.orders.radial_order`). Outputs then jump where two nodes exchange distances, by 0.2 of their
    spread with 10 nodes (:doc:`/guarantees`), so energies made with it are not conserved: it is not for dynamics,
    relaxation or phonons. It makes the operator equivariant to permutations of clouds without ties; equivalent nodes of
    symmetric ones keep the order they came in, get different outputs, and exchange them when relabelled.

    From the `SE(3)-Hyena Operator for Scalable Equivariant Learning <https://arxiv.org/abs/2407.01049>`_ paper,
    Algorithm 1; local context is the refinement of its authors' follow-up.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        of 0e, 0o, 1o and 1e, with any multiplicities

    irreps_hidden : `e3nn.o3.Irreps`, optional
        of query, key and value; by default ``irreps_in``

    order : {'input', 'radial'}
        order of the nodes along the convolution; 'radial' needs ``pos``, and is not for energies, see above

    local_context : bool
        whether nodes are first updated from their neighbors along ``edge_index``, by one Clifford message passing step

    edge_channels : int
        number of invariant scalars of an edge

    filter : {'data', 'lag'}
        the keys, as published, or a learned one of the lag

    mode : {None, 'circular', 'linear', 'causal'}
        of the convolution; by default 'circular', or 'linear' with ``filter='lag'``

    norm : {None, 'ortho', 'forward', 'backward'}
        what the filter 'data' divides by: the root of the number of nodes, by default with ``order='input'``, the
        number, as published and by default with 'radial', or 1

    short_conv : int, optional
        taps of a short convolution along the order before the long one, an odd number

    options
        ``mlp_channels``, ``gate_channels``, ``num_blocks``, ``backend``: as
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
        filter: str = "data",
        mode: str | None = None,
        norm: str | None = None,
        short_conv: int | None = None,
        **options: Any,
    ) -> None:
        irreps_in, irreps_out, grades, out_grades, hidden = _grades(irreps_in, irreps_out, irreps_hidden)
        all_options = HyenaOptions(
            filter=filter, mode=mode, norm=norm, order=order, short_conv=short_conv,
            local_context=local_context, edge_channels=edge_channels, **options,
        )  # fmt: skip
        super().__init__(irreps_in, irreps_out, HyenaOperator(grades, out_grades, all_options, hidden), order)


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
        as :class:`SE3HyenaOperator`, with what is said there of jumps and ties; found once

    options
        ``filter``, ``mode``, ``norm``, ``short_conv``, ``local_context``, ``edge_channels``, ``mlp_channels``,
        ``gate_channels``, ``num_blocks``, ``backend``: as :class:`SE3HyenaOperator`

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
        irreps_in, irreps_out, grades, out_grades, hidden = _grades(irreps_in, irreps_out, irreps_hidden)
        all_options = HyenaOptions(order=order, **options)
        model = GradedModel(HyenaOperator, grades, out_grades, hidden, all_options, depth=depth, pool=pool)
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

    options
        ``short_conv`` (with which it is no longer equivariant to permutations), ``local_context``, ``edge_channels``,
        ``mlp_channels``, ``num_blocks``: as :class:`SE3HyenaOperator`; ``backend``: as
        :class:`tg_equiattn.nn.VectorSelfAttention`

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
        **options: Any,
    ) -> None:
        irreps_in, irreps_out, grades, out_grades, hidden = _grades(irreps_in, irreps_out, irreps_hidden)
        operator = VectorAttentionOperator(grades, out_grades, OperatorOptions(**options), hidden)
        super().__init__(irreps_in, irreps_out, operator, "input")


def _grades(
    irreps_in: o3.Irreps | str, irreps_out: o3.Irreps | str, irreps_hidden: o3.Irreps | str | None
) -> tuple[o3.Irreps, o3.Irreps, Grades, Grades, Grades]:
    irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
    irreps_hidden = irreps_in if irreps_hidden is None else o3.Irreps(irreps_hidden)
    named = (("irreps_in", irreps_in), ("irreps_out", irreps_out), ("irreps_hidden", irreps_hidden))
    inside, outside, hidden = (clifford_grades(name, irreps) for name, irreps in named)
    return irreps_in, irreps_out, inside, outside, hidden
