"""Clifford group equivariant layers over Cl(3,0), on tokens kept as (rows, T) by grade (:class:`Grades`).

Norms are sqrt(x^2 + eps), whose derivative is finite at zero.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...functional.hyena.clifford import COMPONENTS, GRADE_SIZES, PATHS, channelwise_product
from ...sequences import token_blocks
from ..children import reset_children
from .grades import Grades
from .options import OperatorOptions

_EPS = 1e-12
_BLOCK_NUMBERS = {"cpu": 1 << 16, "other": 1 << 22}  # channels times tokens of one block


class CliffordLinear(nn.Module):
    """One channel matrix a grade, and a bias on grade 0; weights start as N(0, 1 / in_channels)."""

    def __init__(self, in_grades: Grades, out_grades: Grades, bias: bool = True) -> None:
        super().__init__()
        self.in_grades, self.out_grades = in_grades, out_grades
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.empty(o, i)) for i, o in zip(in_grades, out_grades, strict=True) if i and o]
        )
        self.bias = nn.Parameter(torch.empty(out_grades.scalars)) if bias and out_grades.scalars else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        weights = iter(self.weights)
        out = []
        for part, o in zip(self.in_grades.split(x), self.out_grades, strict=True):
            if o and part.shape[1]:
                out.append((next(weights) @ part).flatten(0, 1))
            elif o:
                out.append(x.new_zeros(o * len(part), x.shape[-1]))
        if self.bias is not None:
            out[0] = out[0] + self.bias[:, None]
        return torch.cat(out) if out else x.new_zeros(0, x.shape[-1])

    def extra_repr(self) -> str:
        return f"{tuple(self.in_grades)}, {tuple(self.out_grades)}"


def _by_component(x: Tensor) -> Tensor:
    """(4, ...) of grades to (8, ...) of their components."""
    return torch.cat([x[g : g + 1].expand(n, *x.shape[1:]) for g, n in enumerate(GRADE_SIZES)])


def _square_norms(x: Tensor) -> Tensor:
    """Squared norms of the four grades of multivectors: (8, ...) to (4, ...)."""
    square = x.square()
    return torch.stack([square[0], square[1:4].sum(0), square[4:7].sum(0), square[7]])


class CliffordBlock(nn.Module):
    r"""Activation, linear map, geometric product, layer normalisation of multivectors (8 C, T), C channels.

    With x the activated input (each grade times sigmoid(a inv + b), inv the scalar or the grade's squared norm),
    y = linear(x) and n = y with each grade divided by sigmoid(a)(\|y\| - 1) + 1,

    .. math:: z_j = \tfrac{1}{\sqrt 2} \Big( y_j + \sum_{i,k} w^{j}_{ik} \langle x_i\, n_k \rangle_j \Big)

    over the twenty grade paths, channel by channel; then z is divided by its mean norm over channels and scaled.

    One linear map serves both sums, with which the published model of 16 scalars and 128 vectors has about the
    published 800 thousand parameters.

    ``backend`` is of the product. Without ``bias`` zero stays zero.

    Source: Ruhe et al. (2023), Clifford Group Equivariant Neural Networks.
    """

    def __init__(self, channels: int, backend: str = "auto", bias: bool = True) -> None:
        super().__init__()
        self.channels, self.backend = channels, backend
        self.gate = nn.Parameter(torch.empty(4, channels))
        self.gate_bias = nn.Parameter(torch.empty(4, channels))
        self.weight = nn.Parameter(torch.empty(4, channels, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.grade_norm = nn.Parameter(torch.empty(4, channels))
        self.paths = nn.Parameter(torch.empty(len(PATHS), channels))
        self.scale = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.gate_bias)
        nn.init.normal_(self.weight, std=self.channels**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        nn.init.zeros_(self.grade_norm)
        nn.init.normal_(self.paths, std=0.5)  # four grades enter each
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (COMPONENTS, self.channels))
        squares = _square_norms(x)
        invariants = torch.cat([x[:1], squares[1:]])
        x = x * _by_component(torch.sigmoid(torch.addcmul(self.gate_bias[..., None], self.gate[..., None], invariants)))
        y = _by_component(self.weight) @ x
        if self.bias is not None:
            y = torch.cat([y[:1] + self.bias[:, None], y[1:]])
        norms = (_square_norms(y) + _EPS).sqrt()
        normal = y / _by_component(torch.sigmoid(self.grade_norm)[..., None] * (norms - 1) + 1)
        z = (y + channelwise_product(x, normal, self.paths, self.backend)) * 0.5**0.5
        size = (z.square().sum(0) + _EPS).sqrt().mean(0)
        return (z * (self.scale[:, None] / (size + 1e-6))).flatten(0, 1)

    def extra_repr(self) -> str:
        return f"{self.channels}" if self.backend == "auto" else f"{self.channels}, backend={self.backend!r}"


class GradedMLP(nn.Module):
    """Linear map into ``hidden`` full multivectors, blocks, linear map out; on tokens (rows, T).

    Args:
        in_grades, out_grades: channels by grade.
        hidden: channels of full multivectors between.
        options: ``num_blocks``, how many blocks, and ``backend``, theirs.
        bias: whether there are biases; without them zeros are mapped to zeros.
    """

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden: int, options: OperatorOptions, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_grades, self.out_grades, self.hidden = in_grades, out_grades, hidden
        self.embed = CliffordLinear(in_grades, Grades(*[hidden] * 4), bias)
        self.blocks = nn.Sequential(*(CliffordBlock(hidden, options.backend, bias) for _ in range(options.num_blocks)))
        self.out = CliffordLinear(Grades(*[hidden] * 4), out_grades, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Without blocks of tokens, for use within one."""
        return self.out(self.blocks(self.embed(x)))

    def by_blocks(self, *tensors: Tensor, function: Callable[..., Tensor] | None = None) -> Tensor:
        """Block after block of tokens: this MLP on rows, or a function of tensors (..., T) around it."""
        return token_blocks(function or self, self.tokens_per_block(tensors[0].device), tensors)

    def tokens_per_block(self, device: torch.device) -> int:
        """So many that what is between stays in the cache, or on a GPU fills it; backward computes blocks again."""
        return max(64, _BLOCK_NUMBERS.get(device.type, _BLOCK_NUMBERS["other"]) // self.hidden)

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return next(self.out.parameters())

    def reset_parameters(self) -> None:
        reset_children(self)
