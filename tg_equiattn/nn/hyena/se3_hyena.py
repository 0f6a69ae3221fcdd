"""SE(3)-Hyena: global geometric context by long convolution."""

from __future__ import annotations

from typing import Any

from .graded_model import GradedModel
from .graded_operators import HyenaOperator
from .grades import grades_of_channels
from .options import HyenaOptions
from .scalar_vector_module import ScalarVectorModule


class SE3HyenaOperator(ScalarVectorModule):
    r"""The SE(3)-Hyena operator: every token sees every other one in O(N log N), equivariantly.

    With Clifford MLPs phi, gamma, xi, scalars f and vectors x (Algorithm 1),

    .. math::
        q, k, v &= \phi(x, f) \\
        u &= q \otimes k \quad (\text{long convolution; of vectors by cross products}) \\
        \hat u &= \sigma(\gamma(u)) \cdot u \\
        x', f' &= \xi(x + \hat u^{eqv} \times v^{eqv},\; f + \hat u^{inv} \cdot v^{inv})

    It is equivariant to rotations and reflections: u, a cross product of polar vectors, is axial, and its product with
    v is polar again. Positions enter relative to their mean, so it is invariant to translations; add the output vectors
    to positions to predict positions.

    A convolution depends on the order of tokens. ``order="input"`` keeps it (chains, trajectories). With the paper's
    convolution, ``filter="data"``, it then knows absolute indices: shifting the sequence changes the output. With
    ``filter="lag"`` it knows lags alone, for chains whose beginning means nothing:

    .. math:: u_i = q_i \otimes \sum_j h(i - j)\, k_j

    with h learned and implicit (:class:`~tg_equiattn.nn.hyena.LagFilter`), and :math:`\otimes` the product of scalars,
    the cross product of vectors. There is no factor of the length, and the projections, without biases, make nothing
    of a token of zeros. So without ``pos`` and ``local_context`` a chain among zeros gives the same outputs wherever it
    stands, as alone; with ``short_conv`` of K taps, unless causal, where (K - 1) / 2 zeros or more are next to each of
    its ends. And with ``mode="causal"``, again without ``pos`` and in the order given, tokens that are appended change
    no earlier output.

    Order ``"radial"`` sorts by the distance to the centroid
    (:func:`~tg_equiattn.orders.radial_order`) and needs ``pos``. Outputs then jump where two tokens exchange distances,
    by 0.2 of their spread with 10 tokens (:doc:`/guarantees`), so energies made with it are not conserved: it is not
    for dynamics, relaxation or phonons. It makes the operator equivariant to permutations of clouds without ties;
    equivalent tokens of symmetric ones keep the order they came in, get different outputs, and exchange them when
    relabelled.

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        hidden_scalars, hidden_vectors: channels of query, key and value; ``None`` means those of the input. Where they
            differ, a linear map takes the input to the residual.
        mlp_channels: multivector channels within the projections and messages; ``None`` means the more of the hidden
            ones.
        gate_channels: multivector channels within the gate. There is one gate a channel (the paper has one for all).
        num_blocks: blocks of every Clifford MLP.
        filter: ``"data"``, the keys, as published, or ``"lag"``, a learned one of the lag, see above.
        mode: of the convolution: ``"circular"`` (``"linear"`` with ``filter="lag"``), which ``None`` means, or
            ``"causal"``: tokens see earlier ones only. With ``filter="data"`` a causal output still knows the
            sequence's length, by which ``norm`` divides, unless that is ``"backward"``.
        norm: what the filter ``"data"`` divides by, as of ``torch.fft``: ``"ortho"``, which ``None`` means with
            ``order="input"``, the root of the length, with which what random tokens say neither fades nor grows with
            their number (what tokens agree on grows as its root); ``"forward"``, which it means with ``"radial"``, the
            length, as published; ``"backward"``, nothing.
        short_conv: taps of a short convolution of query, key and value before the long one
            (:func:`~tg_equiattn.functional.short_conv`), an odd number, ``None`` for none: with 3, a token sees its
            neighbors on both sides, or with ``mode="causal"`` the two before. Recall needs it
            (:doc:`/chains`).
        order: ``"input"`` or ``"radial"``, see above.
        local_context: first update every token from its neighbors along ``edge_index``, by one step of Clifford
            message passing.
        edge_channels: scalars of an edge.
        backend: of the Clifford MLPs, as :class:`CliffordMLP`; the convolution is torch's.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena Algorithm 1, section 3.2; "grade-one and grade-two projections" there are grades 0 and 1. Poli et
    al., Hyena Hierarchy (2023), for the filter of the lag and the short convolution.

    Example:
        >>> import torch
        >>> operator = SE3HyenaOperator(8, 16)
        >>> scalars, vectors = operator(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        *,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        hidden_scalars: int | None = None,
        hidden_vectors: int | None = None,
        mlp_channels: int | None = None,
        gate_channels: int = 8,
        num_blocks: int = 1,
        filter: str = "data",
        mode: str | None = None,
        norm: str | None = None,
        short_conv: int | None = None,
        order: str = "input",
        local_context: bool = False,
        edge_channels: int = 0,
        backend: str = "auto",
    ) -> None:
        inside, outside, hidden = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        options = HyenaOptions(
            mlp_channels=mlp_channels, gate_channels=gate_channels, num_blocks=num_blocks, filter=filter, mode=mode,
            norm=norm, order=order, short_conv=short_conv, local_context=local_context,
            edge_channels=edge_channels, backend=backend,
        )  # fmt: skip
        super().__init__(HyenaOperator(inside, outside, options, hidden), order)


class SE3Hyena(ScalarVectorModule):
    r"""Linear embedding, SE(3)-Hyena operators with residual connections, and an equivariant MLP (Figure 2b).

    With the paper's 16 scalars and 128 vectors and three operators it has 0.8 million parameters, as published.

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        hidden_scalars, hidden_vectors: invariant and equivariant width.
        depth: number of operators.
        pool: ``None``, or ``"mean"``: the mean over each sequence's tokens before the MLP.
        order: ``"input"`` or ``"radial"``, found once.
        options: ``mlp_channels``, ``gate_channels``, ``num_blocks``, ``filter``, ``mode``, ``norm``, ``short_conv``,
            ``local_context``, ``edge_channels`` and ``backend`` as :class:`SE3HyenaOperator`; the published model has
            ``norm="forward"``.

    Shapes:
        As :class:`SE3HyenaOperator`; ``(B, out_scalars)`` and ``(B, out_vectors, 3)`` with ``pool="mean"``.

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena Figure 2b, sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = SE3Hyena(2, 1, 0, 1, hidden_scalars=8, hidden_vectors=16, depth=2)
        >>> charges, velocities, positions = torch.randn(4, 5, 2), torch.randn(4, 5, 1, 3), torch.randn(4, 5, 3)
        >>> (positions + model(charges, velocities, pos=positions)[1].squeeze(2)).shape
        torch.Size([4, 5, 3])
    """

    def __init__(
        self,
        scalar_channels: int,
        vector_channels: int,
        out_scalars: int | None = None,
        out_vectors: int | None = None,
        *,
        hidden_scalars: int = 16,
        hidden_vectors: int = 128,
        depth: int = 3,
        pool: str | None = None,
        order: str = "input",
        **options: Any,
    ) -> None:
        grades = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        all_options = HyenaOptions(order=order, **options)
        super().__init__(GradedModel(HyenaOperator, *grades, all_options, depth=depth, pool=pool), order)
