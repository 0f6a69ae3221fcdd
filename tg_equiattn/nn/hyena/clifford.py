r"""Clifford group equivariant layers over Cl(3,0), on tokens kept as (rows, T).

The rows of a token are ordered by grade, then component, then channel: with c_g channels of grade g,

    c_0 scalars | x, y, z of c_1 polar vectors | x, y, z of c_2 axial vectors | c_3 pseudoscalars

(:class:`Grades`). Tokens come last, so that channels are mixed by matrix products and the rest runs along memory.
Norms are sqrt(x^2 + eps), whose derivative is finite at zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.backend import check_backend
from ...functional.hyena.clifford import (
    COMPONENTS,
    GRADE_SIZES,
    PATHS,
    channelwise_product,
    path_weights,
    right_factors,
)
from ...precision import full_precision
from ...sequences import token_blocks
from ..children import reset_children

PRODUCTS = ("channelwise", "full")
_EPS = 1e-12
_STEP = {"cpu": 1 << 16, "other": 1 << 22}  # channels times tokens of one block


class Grades(NamedTuple):
    """Numbers of channels of the grades 0 (0e), 1 (1o), 2 (1e), 3 (0o), and how a token's rows hold them."""

    scalars: int = 0
    vectors: int = 0
    bivectors: int = 0
    pseudoscalars: int = 0

    @property
    def dim(self) -> int:
        """Rows of a token."""
        return sum(size * channels for size, channels in zip(GRADE_SIZES, self, strict=True))

    def times(self, factor: int) -> Grades:
        return Grades(*(factor * channels for channels in self))

    def plus(self, other: Grades) -> Grades:
        return Grades(*(a + b for a, b in zip(self, other, strict=True)))

    def masked(self, there: tuple[bool, ...]) -> Grades:
        """Without the grades that are not there."""
        return Grades(*(channels if t else 0 for channels, t in zip(self, there, strict=True)))

    def split(self, x: Tensor) -> list[Tensor]:
        """Rows (dim, ...) to the four grades (components, channels, ...)."""
        sizes = [size * channels for size, channels in zip(GRADE_SIZES, self, strict=True)]
        parts = x.split(sizes)
        return [part.unflatten(0, (n, -1)) if len(part) else part.new_zeros(n, 0, *x.shape[1:])
                for n, part in zip(GRADE_SIZES, parts, strict=True)]  # fmt: skip

    def reached(self, products: int) -> tuple[bool, bool, bool, bool]:
        """Which grades so many geometric products can make of these; a bias makes scalars of nothing."""
        there = {0} | {grade for grade, channels in enumerate(self) if channels}
        for _ in range(products):
            there |= {j for i, k, j in PATHS if i in there and k in there}
        return tuple(grade in there for grade in range(4))  # type: ignore[return-value]


def join(*parts: tuple[Grades, Tensor]) -> tuple[Grades, Tensor]:
    """Put the channels of several tokens side by side, grade by grade."""
    parts = tuple(part for part in parts if part[0].dim)
    if len(parts) == 1:
        return parts[0]
    total, split = Grades(), [grades.split(x) for grades, x in parts]
    for grades, _ in parts:
        total = total.plus(grades)
    rows = [torch.cat(grade, 1).flatten(0, 1) for n, grade in enumerate(zip(*split, strict=True)) if total[n]]
    return total, torch.cat(rows)


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

    over the twenty grade paths, per channel or (``product="full"``) summed over all channels of x too; then z is
    divided by its mean norm over channels and scaled.

    One linear map serves both sums, with which the published model of 16 scalars and 128 vectors has about the
    published 800 thousand parameters.

    ``backend`` is of the product by channels; one summed over all channels is a matrix product, and torch's throughout.

    Source: Ruhe et al. (2023), Clifford Group Equivariant Neural Networks.
    """

    def __init__(self, channels: int, product: str = "channelwise", backend: str = "auto") -> None:
        super().__init__()
        self.channels, self.product, self.backend = channels, product, backend
        self.gate = nn.Parameter(torch.empty(4, channels))
        self.gate_bias = nn.Parameter(torch.empty(4, channels))
        self.weight = nn.Parameter(torch.empty(4, channels, channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.grade_norm = nn.Parameter(torch.empty(4, channels))
        shape = (channels,) if product == "channelwise" else (channels, channels)
        self.paths = nn.Parameter(torch.empty(len(PATHS), *shape))
        self.scale = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.gate_bias)
        nn.init.normal_(self.weight, std=self.channels**-0.5)
        nn.init.zeros_(self.bias)
        nn.init.zeros_(self.grade_norm)
        fan_in = 4 if self.product == "channelwise" else 4 * self.channels
        nn.init.normal_(self.paths, std=fan_in**-0.5)
        nn.init.ones_(self.scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(0, (COMPONENTS, self.channels))
        squares = _square_norms(x)
        invariants = torch.cat([x[:1], squares[1:]])
        x = x * _by_component(torch.sigmoid(torch.addcmul(self.gate_bias[..., None], self.gate[..., None], invariants)))
        y = _by_component(self.weight) @ x
        y = torch.cat([y[:1] + self.bias[:, None], y[1:]])
        norms = (_square_norms(y) + _EPS).sqrt()
        normal = y / _by_component(torch.sigmoid(self.grade_norm)[..., None] * (norms - 1) + 1)
        if self.product == "channelwise":
            z = channelwise_product(x, normal, self.paths, self.backend)
        else:
            z = path_weights(self.paths).transpose(1, 2).flatten(2) @ (right_factors(normal) * x).flatten(1, 2)
        z = (y + z) * 0.5**0.5
        size = (z.square().sum(0) + _EPS).sqrt().mean(0)
        return (z * (self.scale[:, None] / (size + 1e-6))).flatten(0, 1)

    def extra_repr(self) -> str:
        backend = "" if self.backend == "auto" else f", backend={self.backend!r}"
        return f"{self.channels}, product={self.product!r}{backend}"


class GradedMLP(nn.Module):
    """Linear map into ``hidden`` full multivectors, blocks, linear map out; on tokens (rows, T).

    Args:
        in_grades, out_grades: channels by grade.
        hidden: channels of full multivectors between.
        num_blocks: how many blocks.
        product, backend: of :class:`CliffordBlock`.
    """

    def __init__(
        self,
        in_grades: Grades,
        out_grades: Grades,
        hidden: int,
        num_blocks: int = 1,
        product: str = "channelwise",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.in_grades, self.out_grades = in_grades, out_grades
        self.width = hidden if product == "channelwise" else 4 * hidden  # which decides how large a block is
        self.embed = CliffordLinear(in_grades, Grades(*[hidden] * 4))
        self.blocks = nn.Sequential(*(CliffordBlock(hidden, product, backend) for _ in range(num_blocks)))
        self.out = CliffordLinear(Grades(*[hidden] * 4), out_grades)

    def forward(self, x: Tensor) -> Tensor:
        """Without blocks of tokens, for use within one."""
        return self.out(self.blocks(self.embed(x)))

    def step(self, device: torch.device) -> int:
        """Tokens of one block."""
        return max(64, _STEP.get(device.type, _STEP["other"]) // self.width)

    @property
    def like(self) -> Tensor:
        """A parameter, whose dtype and device the input must have."""
        return next(self.out.parameters())

    def reset_parameters(self) -> None:
        reset_children(self)


class CliffordMLP(nn.Module):
    r"""An O(3)-equivariant multilayer perceptron on multivectors of Cl(3,0).

    A linear map (one channel matrix a grade), ``num_blocks`` blocks of activation, linear map, geometric product and
    layer normalisation (:class:`CliffordBlock`), and a linear map. Tokens are worked through in blocks, which backward
    computes again, so memory is that of inputs and outputs.

    Args:
        in_channels, out_channels: multivector channels.
        hidden_channels: multivector channels between; ``None`` means the larger of both.
        num_blocks: how many blocks.
        product: ``"channelwise"``, or ``"full"``: every output channel's product sums over all channels.
        backend: ``"auto"``, what was measured faster on the device, today torch; ``"torch"``; or ``"triton"``, fused
            kernels, which need a CUDA device or Triton's interpreter. ``"full"`` products are matrix products, and
            torch's whatever the backend.

    Shapes:
        ``(..., in_channels, 8)`` -> ``(..., out_channels, 8)``, components (1; e1, e2, e3; e23, e31, e12; e123).

    Raises:
        ValueError: naming the argument, what came and what is allowed.

    Source: se3-hyena section 3.2; Ruhe et al., Clifford Group Equivariant Neural Networks (2023).

    Example:
        >>> import torch
        >>> mlp = CliffordMLP(3, 5, hidden_channels=7)
        >>> mlp(torch.randn(2, 11, 3, 8)).shape
        torch.Size([2, 11, 5, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        hidden_channels: int | None = None,
        *,
        num_blocks: int = 1,
        product: str = "channelwise",
        backend: str = "auto",
    ) -> None:
        super().__init__()
        checks.positive(in_channels=in_channels, out_channels=out_channels, num_blocks=num_blocks)
        hidden_channels = max(in_channels, out_channels) if hidden_channels is None else hidden_channels
        checks.positive(hidden_channels=hidden_channels)
        checks.choice("product", product, PRODUCTS)
        check_backend(backend)
        self.in_channels, self.out_channels = in_channels, out_channels
        self.mlp = GradedMLP(
            Grades(*[in_channels] * 4), Grades(*[out_channels] * 4), hidden_channels, num_blocks, product, backend
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or tuple(x.shape[-2:]) != (self.in_channels, COMPONENTS):
            raise ValueError(f"input must be (..., {self.in_channels}, 8), got {tuple(x.shape)}")
        checks.full_parameters(self.mlp.like)
        checks.same_kind(x, self.mlp.like)
        checks.half_precision(input=x)
        with full_precision(x.device):
            rows = x.to(self.mlp.like.dtype).reshape(-1, *x.shape[-2:]).permute(2, 1, 0).flatten(0, 1)
            out = token_blocks(self.mlp, self.mlp.step(x.device), [rows])
            out = out.unflatten(0, (COMPONENTS, self.out_channels)).permute(2, 1, 0)
            return out.reshape(*x.shape[:-2], self.out_channels, COMPONENTS)

    def reset_parameters(self) -> None:
        self.mlp.reset_parameters()
