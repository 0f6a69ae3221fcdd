"""SE(3)-Hyena: global geometric context by long convolution."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.hyena.fft_convolution import fft_convolution, number_or_cross_product
from ...node_batch import NodeBatch, PaddedBatch
from ..vector.clifford import MultivectorMLP
from ..vector.grades import Grades, grades_of_channels
from ..vector.operator import TokenModel, TokenOperator
from ..vector.options import OperatorOptions, options_of
from ..vector.scalars_and_vectors import ScalarVectorModule
from .lag_filter import LagFilter

FILTERS = ("data", "lag")
GATE_CHANNELS = 8  # multivectors within the gate


@dataclasses.dataclass(frozen=True, kw_only=True)
class HyenaOptions(OperatorOptions):
    """Of the operator with a long convolution."""

    filter: str = "data"
    causal: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.choice("filter", self.filter, FILTERS)


def norm_of(order: str) -> str:
    """How ``"data"`` is divided: by the length, as published, where tokens are sorted by radius; else by its root."""
    return "forward" if order == "radial" else "ortho"


class HyenaOperator(TokenOperator):
    """Mixes by long convolution, of queries and keys or of keys and a filter of the lag, times the query; gates by a
    Clifford MLP of what was mixed, and multiplies with the values."""

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        options: HyenaOptions,
        hidden_grades: Grades | None = None,
        *,
        order: str = "input",
    ) -> None:
        by_lag, causal = options.filter == "lag", options.causal
        super().__init__(  # a token of zeros must make nothing for the filter of the lag: no bias
            in_grades, out_grades, options, hidden_grades, order=order, causal=causal, bias=not by_lag
        )
        c = self.hidden_grades
        self.scalars, self.vectors = c.scalars + c.pseudoscalars, c.vectors + c.bivectors
        mixed, gates = Grades(scalars=self.scalars, bivectors=self.vectors), Grades(self.scalars + self.vectors)
        self.gate = MultivectorMLP(mixed, gates, GATE_CHANNELS, options.num_blocks)
        self.mode, self.norm = "causal" if causal else "circular", norm_of(order)
        self.filters: nn.ModuleDict | None = None
        if by_lag:
            kinds = {"scalars": self.scalars, "vectors": self.vectors}
            self.filters = nn.ModuleDict({kind: LagFilter(n, causal) for kind, n in kinds.items() if n})

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"filter": "data" if self.filters is None else "lag"}

    def mix(self, query: Tensor, key: Tensor, value: Tensor, node_batch: NodeBatch) -> Tensor:
        def kernel(q: Tensor, k: Tensor, rows: PaddedBatch) -> Tensor:
            return fft_convolution(q, k, rows.lengths, self.mode, self.norm)

        if self.filters is None:
            return node_batch.mix(kernel, query, key)
        vectors = query.ndim == 3
        filtered = self.filters["vectors" if vectors else "scalars"](key, node_batch)
        return number_or_cross_product(query, filtered, vectors)

    def combine(
        self, scalars: Tensor, vectors: Tensor, mixed_scalars: Tensor, mixed_vectors: Tensor
    ) -> tuple[Tensor, Tensor]:
        none = mixed_vectors[:, :0]
        gates = torch.sigmoid(self.gate([mixed_scalars, none, mixed_vectors, none[:1]])[0])
        scalar_gates, vector_gates = gates.split([self.scalars, self.vectors], 1)
        scalars = scalar_gates * mixed_scalars * scalars
        return scalars, torch.linalg.cross(vector_gates * mixed_vectors, vectors, dim=0)


@checks.python_numbers
class SE3HyenaOperator(ScalarVectorModule):
    r"""The SE(3)-Hyena operator: every token sees every other one in O(N log N), equivariantly.

    With Clifford MLPs phi, gamma, xi, scalars f and vectors x (Algorithm 1),

    .. math::
        q, k, v &= \phi(x, f) \\
        u &= q \otimes k \quad (\text{long convolution; of vectors by cross products}) \\
        \hat u &= \sigma(\gamma(u)) \cdot u \\
        x', f' &= \xi(x + \hat u^{eqv} \times v^{eqv},\; f + \hat u^{inv} \cdot v^{inv})

    Equivariant to rotations and reflections: u, a cross product of polar vectors, is axial, its product with v polar
    again. Positions enter relative to their mean, so it is invariant to translations; add the output vectors to
    positions to predict positions.

    The paper's convolution, ``filter="data"``, is circular, and divided by the root of the sequence's length, or, with
    ``order="radial"`` and in the paper, by the length. It knows absolute indices: shifting the sequence changes the
    output. ``filter="lag"`` knows lags alone, for chains whose beginning means nothing:

    .. math:: u_i = q_i \otimes \sum_j h(i - j)\, k_j

    with h learned and implicit (an MLP of the lag, times a learned power of it), and :math:`\otimes` the product of
    scalars, the cross product of vectors. There is no factor of the length, and projections have no biases: so without
    ``pos`` and ``local_context`` a chain among zeros gives the same outputs wherever it stands (:doc:`/chains` says
    with what around it), and with ``causal=True`` tokens that are appended change no earlier output.

    ``order="input"`` keeps the order of tokens. ``"radial"`` sorts by the distance to the centroid, needs ``pos``, and
    makes the operator equivariant to permutations of clouds without ties. Outputs then jump where two tokens exchange
    distances (:doc:`/guarantees`): it is not for dynamics, relaxation or phonons.

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        hidden_scalars, hidden_vectors: channels of query, key and value; ``None`` means those of the input. Where they
            differ, a linear map takes the input to the residual.
        filter: ``"data"``, the keys, as published, or ``"lag"``, a learned one of the lag.
        causal: whether tokens see earlier ones only. With ``filter="data"`` outputs still know the sequence's length.
        short_conv: taps, an odd number, of a short convolution of query, key and value before the long one, on both
            sides or with ``causal=True`` before, one weight a channel and tap; ``None`` for none. Recall needs it
            (:doc:`/chains`).
        order: ``"input"`` or ``"radial"``.
        local_context: first update every token from its neighbors along ``edge_index`` by Clifford message passing.
        edge_channels: scalars of an edge.

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
        filter: str = "data",
        causal: bool = False,
        short_conv: int | None = None,
        order: str = "input",
        local_context: bool = False,
        edge_channels: int = 0,
    ) -> None:
        inside, outside, hidden = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        options = HyenaOptions(
            filter=filter, causal=causal, short_conv=short_conv, local_context=local_context,
            edge_channels=edge_channels,
        )  # fmt: skip
        super().__init__(HyenaOperator(inside, outside, options, hidden, order=order))


@checks.python_numbers
class SE3Hyena(ScalarVectorModule):
    r"""Linear embedding, SE(3)-Hyena operators with residual connections, and an equivariant MLP (Figure 2b).

    Args:
        scalar_channels, vector_channels: of the input.
        out_scalars, out_vectors: channels of the output; ``None`` means those of the input.
        hidden_scalars, hidden_vectors: invariant and equivariant width.
        depth: number of operators.
        pool: ``None``, or ``"mean"``: the mean over each sequence's tokens before the MLP.
        order: ``"input"`` or ``"radial"``, found once.
        options: ``filter``, ``causal``, ``short_conv``, ``local_context`` and ``edge_channels``, as of
            :class:`SE3HyenaOperator`, and ``num_blocks``, how many blocks every Clifford MLP has, one by default.

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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        grades = grades_of_channels(
            scalar_channels, vector_channels, (out_scalars, out_vectors), (hidden_scalars, hidden_vectors)
        )
        own = options_of(HyenaOptions, options)
        super().__init__(TokenModel(HyenaOperator, *grades, own, depth=depth, order=order, pool=pool))
