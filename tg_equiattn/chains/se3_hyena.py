"""SE(3)-Hyena: global geometric context by long convolution."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..graphs.node_batch import PaddedBatch
from ..tiles import joined
from .clifford import Grades, MultivectorMLP
from .clifford_algebra import cross_product
from .convolutions import ImplicitFilter
from .long_conv import long_convolution, products, vectors_of
from .operator import FILTERS, OperatorSettings, ScalarVectorModule, TokenModel, TokenOperator
from .sequences import TokenBatch

GATE_CHANNELS = 8  # hidden multivectors of the gate's MLP


def _gated(value: Tensor, mixed: Tensor, scalars: int, gate: MultivectorMLP) -> tuple[Tensor, Tensor]:
    mixed_scalars, mixed_vectors = mixed[None, :scalars], vectors_of(mixed, scalars)
    none = mixed_vectors[:, :0]
    gates = torch.sigmoid(gate([mixed_scalars, none, mixed_vectors, none[:1]])[0])
    gated = gates[0, :scalars] * mixed[:scalars], gates[:, scalars:] * mixed_vectors
    return gated[0] * value[:scalars], cross_product(gated[1], vectors_of(value, scalars), 0)


class HyenaOperator(TokenOperator):
    """The operator of SE(3)-Hyena on tokens by grade.

    It mixes tokens by a long convolution of queries and keys (``"data"``), or by the product of queries with a long
    convolution of the keys (``"implicit"``). A Clifford MLP of the result gates it, and it multiplies the values.
    """

    SETTINGS = ("filter", "causal", *TokenOperator.SETTINGS)
    filters: nn.ModuleDict | None

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden_grades: Grades, options: OperatorSettings) -> None:
        implicit = options.filter == "implicit"
        # with an implicit filter, tokens of zeros must have no effect, so there is no bias
        super().__init__(in_grades, out_grades, hidden_grades, options, bias=not implicit)
        channels = self.scalars, hidden_grades.vectors + hidden_grades.bivectors
        mixed = Grades(scalars=channels[0], bivectors=channels[1])
        self.gate = MultivectorMLP(mixed, Grades(sum(channels)), GATE_CHANNELS, options.num_blocks)
        self.norm, self.filters = options.norm, None
        if implicit:
            kinds = zip(("scalars", "vectors"), channels, strict=True)
            self.filters = nn.ModuleDict({kind: ImplicitFilter(n, options.causal) for kind, n in kinds if n})

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"filter": self.options.filter}

    def mix(self, projected: Tensor, tokens: TokenBatch) -> Tensor:
        sequences, scalars = tokens.sequences, self.scalars
        if self.filters is not None:
            query, key, _ = projected
            kinds = {"scalars": key[:scalars], "vectors": vectors_of(key, scalars)}
            filtered = [filter(kinds[kind], sequences).flatten(0, -2) for kind, filter in self.filters.items()]
            return products(query, joined(filtered), scalars)

        def kernel(x: Tensor, rows: PaddedBatch) -> Tensor:
            (q, k), counts = x, sequences.counts(rows)
            return long_convolution(q, k, scalars, rows.lengths, self.options.mode, self.norm, counts)[None]

        return sequences.mix(kernel, projected[:2])[0]

    combine = staticmethod(_gated)


@checks.arguments
class SE3HyenaOperator(ScalarVectorModule):
    r"""The SE(3)-Hyena operator: every token sees every other one in O(N log N), equivariantly.

    The operator has Clifford MLPs phi, gamma and xi. For scalars f and vectors x it computes (Algorithm 1)

    .. math::
        q, k, v &= \phi(x, f) \\
        u &= q \otimes k \quad (\text{long convolution; of vectors by cross products}) \\
        \hat u &= \sigma(\gamma(u)) \cdot u \\
        x', f' &= \xi(x + \hat u^{eqv} \times v^{eqv},\; f + \hat u^{inv} \cdot v^{inv})

    It is equivariant to rotations and reflections: u, a cross product of polar vectors, is axial, and its product with
    v is polar again. Positions enter relative to their mean, so it is invariant to translations. To predict positions,
    add the output vectors to positions.

    ``filter="data"`` is the paper's circular convolution, divided by the root of the sequence's length, or by the
    length with ``order="radial"``, as in the paper. It depends on absolute indices: shifting the sequence changes the
    output. ``filter="implicit"`` depends on lags only, for chains whose beginning has no meaning:

    .. math:: u_i = q_i \otimes \sum_j h(i - j)\, k_j

    with :math:`\otimes` the product of scalars or the cross product of vectors, and h a learned function: an MLP of the
    lag, times a learned power of it. It is not divided by the length, and projections have no biases. So without
    ``pos`` and ``local_context``, a chain among zeros has the same outputs wherever it stands (:doc:`/chains`), and
    with ``causal=True`` appended tokens change no earlier output. With ``index`` and ``chain`` in ``forward``, lags are
    differences of the index within a chain.

    ``order="radial"`` makes the operator equivariant to permutations of clouds without ties. Outputs then jump where
    two tokens exchange their distances (:doc:`/guarantees`): do not use it for dynamics, relaxation or phonons.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of query, key and value. ``None`` means as many as in the input. If hidden and
            input channels differ, a linear map takes the input to the residual.
        hidden_vectors: Number of vectors of query, key and value. ``None`` means as many as in the input.
        filter: Filter of the long convolution. ``"data"``, the default, means the keys, as published. ``"implicit"``
            means a learned function of the lag; use it for chains whose beginning has no meaning.
        causal: Whether tokens see earlier tokens of their chain only. It needs ``order="input"``, and rules out ``pos``
            and edges from later tokens. With ``filter="data"`` outputs still depend on the sequence's length. The
            default is ``False``; use ``True`` to predict the next token.
        short_conv: Number of taps, odd, of a short convolution of query, key and value before the long one. It has one
            weight for each channel and tap, and with ``causal=True`` it reaches back only. The default, ``None``, means
            no short convolution. Short trainings of recall need it (:doc:`/chains`).
        order: ``"input"``, the default, keeps the order of the tokens. ``"radial"`` sorts them by their distance to the
            centroid and needs ``pos``; use it for clouds without an order.
        length: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        local_context: Whether to update every token from its neighbors along ``edge_index`` first, by Clifford message
            passing. The default is ``False``. Use it if a graph of near neighbors is known.
        edge_channels: Number of scalars of an edge, which are given as ``edge_attr``. The default is 0; other numbers
            need ``local_context``.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena Algorithm 1, section 3.2; "grade-one and grade-two projections" there are grades 0 and 1. Poli et
    al., Hyena Hierarchy (2023), for the implicit filter and the short convolution.

    Example:
        >>> import torch
        >>> operator = SE3HyenaOperator(8, 16)
        >>> scalars, vectors = operator(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    def __init__(
        self, scalar_channels: int, vector_channels: int, *, out_scalars: int | None = None,
        out_vectors: int | None = None, hidden_scalars: int | None = None, hidden_vectors: int | None = None,
        filter: str = "data", causal: bool = False, short_conv: int | None = None, order: str = "input",
        length: float = 1.0, local_context: bool = False, edge_channels: int = 0, num_blocks: int = 1,
    ) -> None:  # fmt: skip
        checks.choice("filter", filter, FILTERS)
        options = OperatorSettings(
            filter=filter, causal=causal, short_conv=short_conv, order=order, length=length,
            local_context=local_context, edge_channels=edge_channels, num_blocks=num_blocks,
        )  # fmt: skip
        channels = scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors
        super().__init__(HyenaOperator, options, *channels)


@checks.arguments
class SE3Hyena(ScalarVectorModule):
    r"""The SE(3)-Hyena model: linear embedding, operators with residual connections, equivariant MLP (Figure 2b).

    The operators are :class:`SE3HyenaOperator`, and the model has their symmetries.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of a token between the layers. The default is 16.
        hidden_vectors: Number of vectors of a token between the layers. The default is 128.
        num_layers: Number of operators. The default is 3.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.
        pool: ``"mean"`` takes the mean over the tokens of each sequence before the MLP. The default, ``None``, does
            not.
        order: ``"input"``, the default, keeps the order of the tokens. ``"radial"`` sorts them once by their distance
            to the centroid and needs ``pos``; use it for clouds without an order.
        length: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        attn_kwargs: Further arguments of :class:`SE3HyenaOperator`: ``filter``, ``causal``, ``short_conv``,
            ``local_context`` and ``edge_channels``.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again; to
        ``(B, out_scalars)`` and ``(B, out_vectors, 3)`` with ``pool="mean"``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena Figure 2b, sections 4.1.1 and 4.2.1.

    Example:
        >>> import torch
        >>> model = SE3Hyena(2, 1, 0, 1, hidden_scalars=8, hidden_vectors=16, num_layers=2)
        >>> charges, velocities = torch.randn(4, 5, 2), torch.randn(4, 5, 1, 3)
        >>> positions = torch.randn(4, 5, 3)
        >>> (positions + model(charges, velocities, pos=positions)[1].squeeze(2)).shape
        torch.Size([4, 5, 3])
    """

    def __init__(
        self, scalar_channels: int, vector_channels: int, out_scalars: int | None = None,
        out_vectors: int | None = None, *, hidden_scalars: int = 16, hidden_vectors: int = 128, num_layers: int = 3,
        num_blocks: int = 1, pool: str | None = None, order: str = "input", length: float = 1.0,
        attn_kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        options = OperatorSettings(filter="data", order=order, length=length, num_blocks=num_blocks)
        make = functools.partial(TokenModel, HyenaOperator, num_layers=num_layers, pool=pool, attn_kwargs=attn_kwargs)
        channels = scalar_channels, vector_channels, out_scalars, out_vectors, hidden_scalars, hidden_vectors
        super().__init__(make, options, *channels)
