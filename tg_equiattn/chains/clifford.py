"""Clifford group equivariant layers over Cl(3,0), and the layout of tokens by grade.

The grades are scalars 0e | polar vectors 1o | axial vectors 1e | pseudoscalars 0o. Channels come first and tokens last,
from the projection of a layer to its output. Tokens are stored as *features* (dim, tokens), with the grades one after
the other and the components of a grade outside of its channels, or as *parts*, four tensors (components, channels,
tokens), which are views of features. Norms are computed as sqrt(x^2 + eps), so that derivatives are finite at zero.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import checks
from ..modules import reset_children
from ..operators import tile_numbers
from ..shapes import Float
from ..tiles import map_tiles
from ..torch_state import Tables, full_precision, is_traced
from . import clifford_algebra as algebra

Parts = list[Tensor]
GRADE_NAMES = ("0e", "1o", "1e", "0o")
FEW_NUMBERS = 1 << 17, 1 << 11  # on accelerators, on CPUs: channels times tokens for which calls take most of the time
PRODUCTS, GATE_WIDTH = 8, 32  # of gated products: channels of factors, and the width of the network
SMOOTH = 1e-4  # added to squared norms that enter gates
BLOCK_NUMBERS = 120_000  # channels times tokens of a tile on a CPU


class Grades(NamedTuple):
    """Numbers of channels of the grades 0 (0e), 1 (1o), 2 (1e) and 3 (0o)."""

    scalars: int = 0
    vectors: int = 0
    bivectors: int = 0
    pseudoscalars: int = 0

    @property
    def dim(self) -> int:
        """Number of features of a token."""
        return sum(size * channels for size, channels in zip(algebra.GRADE_SIZES, self, strict=True))

    def times(self, factor: int) -> Grades:
        return Grades(*(factor * channels for channels in self))

    def plus(self, other: Grades) -> Grades:
        return Grades(*(a + b for a, b in zip(self, other, strict=True)))

    def only(self, wanted: tuple[bool, ...]) -> Grades:
        """The channels of the ``wanted`` grades, and 0 for the others."""
        return Grades(*(channels if want else 0 for channels, want in zip(self, wanted, strict=True)))

    def parts(self, x: Float[Tensor, "dim tokens"]) -> Parts:
        """Views of features as parts."""
        parts, end = [], 0
        for size, channels in zip(algebra.GRADE_SIZES, self, strict=True):
            start, end = end, end + size * channels
            parts.append(x[start:end].view(size, channels, x.shape[1]))
        return parts

    def reachable(self, products: int) -> tuple[bool, bool, bool, bool]:
        """True for grades that can differ from zero after this number of geometric products and a bias of scalars, if
        the channels are independent. A mirror through one or two polar vectors changes no scalar and none of these
        vectors, so they give no pseudoscalar; one gives no axial vector."""
        grades = {0} | {grade for grade, channels in enumerate(self) if channels}
        for _ in range(products):
            grades |= set(algebra.grades_of_products(grades))
        if not self.bivectors and not self.pseudoscalars:
            grades -= {2, 3} if self.vectors < 2 else {3} if self.vectors < 3 else set()
        return tuple(grade in grades for grade in range(4))  # type: ignore[return-value]


POSITION = Grades(vectors=1)


def join_channels(*tokens: Parts) -> Parts:
    """Concatenate the channels of several parts, grade by grade."""
    return [torch.cat(grade, 1) for grade in zip(*tokens, strict=True)]


def features(parts: Parts) -> Float[Tensor, "dim tokens"]:
    """Join parts to features."""
    grades = [part.flatten(0, 1) for part in parts if part.shape[1]]
    return grades[0] if len(grades) == 1 else torch.cat(grades)


def with_position(parts: Parts, pos: Float[Tensor, "3 tokens"]) -> Parts:
    """Add positions to parts as one more polar vector."""
    return [parts[0], torch.cat([parts[1], pos[:, None]], 1), *parts[2:]]


class CliffordLinear(nn.Module):
    """A linear map of channels with a matrix for each grade, and a bias for grade 0. Weights are drawn from N(0, 1 / C)
    with C input channels of the grade. The bias starts at zero, or without input scalars from N(0, 1), as the weight of
    a constant scalar."""

    def __init__(self, in_grades: Grades, out_grades: Grades, bias: bool = True) -> None:
        super().__init__()
        self.in_grades, self.out_grades = in_grades, out_grades
        sizes = [(o, i) for i, o in zip(in_grades, out_grades, strict=True)]
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(size)) for size in sizes if all(size)])
        names = map(str, range(len(self.weights)))
        self._names = [next(names) if all(size) else None for size in sizes]  # of the weight of each grade
        self.bias = nn.Parameter(torch.empty(out_grades.scalars)) if bias and out_grades.scalars else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in self.weights:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        if self.bias is not None:
            (nn.init.zeros_ if self.in_grades.scalars else nn.init.normal_)(self.bias)

    def forward(self, parts: Parts) -> Parts:
        """Map parts; those of grades without channels or components are zero."""
        weights, out = self.weights, []
        bias = None if self.bias is None else self.bias[None, :, None]
        for part, size, name, o in zip(parts, algebra.GRADE_SIZES, self._names, self.out_grades, strict=True):
            if name is None or not part.shape[0] * part.shape[1]:
                zeros = part.new_zeros(size, o, part.shape[2])
                out.append(zeros if bias is None else zeros + bias)
            else:
                weight = getattr(weights, name).expand(size, -1, -1)  # iterating over a ParameterList takes longer
                out.append(torch.bmm(weight, part) if bias is None else torch.baddbmm(bias, weight, part))
            bias = None  # only scalars have one
        return out

    def extra_repr(self) -> str:
        return f"{tuple(self.in_grades)}, {tuple(self.out_grades)}"


class CliffordBlock(nn.Module):
    r"""Activation, linear map, geometric product and layer normalisation of multivectors.

    .. math:: z_j = \tfrac{1}{\sqrt 2} \Big( y_j + \sum_{i,k} w^{j}_{ik} \langle x_i\, n_k \rangle_j \Big)

    Here x is the activated input: each grade is multiplied by sigmoid(a inv + b), where inv is the scalar or the
    squared norm of the grade. y = linear(x), and n is y with each grade divided by sigmoid(a)(\|y\| - 1) + 1. The sum
    runs over the twenty grade paths, channel by channel. The output is z divided by its mean norm over channels, times
    a learned scale.

    Args:
        channels: Number of channels C of input and output.
        grades: Grades of the input. The output also has the grades of products of these.
        bias: Whether the linear map has a bias. Without it, a zero input gives a zero output.

    Source: Ruhe et al. (2023), Clifford Group Equivariant Neural Networks.
    """

    def __init__(self, channels: int, grades: Sequence[int], bias: bool = True) -> None:
        super().__init__()
        self.channels, self.grades = channels, tuple(grades)
        self.tables = Tables(functools.partial(algebra.product_tables, self.grades))
        self.gate = nn.Parameter(torch.empty(4, channels))
        self.gate_bias = nn.Parameter(torch.empty(4, channels))
        self.weight = nn.Parameter(torch.empty(4, channels, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.grade_norm = nn.Parameter(torch.empty(4, channels))
        self.paths = nn.Parameter(torch.empty(len(algebra.PATHS), channels))
        self.scale = nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.gate)
        nn.init.zeros_(self.gate_bias)
        nn.init.normal_(self.weight, std=self.channels**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        nn.init.zeros_(self.grade_norm)
        nn.init.normal_(self.paths, std=0.5)  # all four grades of the left factor enter each grade of a product
        nn.init.ones_(self.scale)

    def forward(self, x: Float[Tensor, "components channels tokens"]) -> Float[Tensor, "components channels tokens"]:
        tables: algebra.ProductTables = self.tables(x.device, x.dtype)
        gate = self.gate.index_select(0, tables.present)[..., None]
        gate_bias = self.gate_bias.index_select(0, tables.present)[..., None]
        grade_norm = self.grade_norm.index_select(0, tables.present)[..., None]
        gates = torch.sigmoid(torch.addcmul(gate_bias, gate, torch.cat([x[:1], *self._sums(x * x)[1:]])))
        x = x * gates.index_select(0, tables.position)
        weight = self.weight.index_select(0, tables.grade)
        bias = None if self.bias is None else self.bias[:, None] * tables.scalar
        y = torch.bmm(weight, x) if bias is None else torch.baddbmm(bias, weight, x)
        norms = torch.cat(self._sums(torch.addcmul(tables.eps, y, y))).sqrt()
        n = y / torch.lerp(tables.one, norms, torch.sigmoid(grade_norm)).index_select(0, tables.position)
        if not is_traced(x) and x[0].numel() <= FEW_NUMBERS[x.device.type == "cpu"]:
            z = algebra.channelwise_product_of_components(self.paths, x, n, tables)
        else:
            z = algebra.channelwise_product(self.paths, x, n, self.grades)
        z = y + z if len(z) == len(y) else z.index_add(0, tables.place, y)
        size = torch.addcmul(tables.eps_out, z, z).sum(0).sqrt().mean(0)  # the factor 1 / sqrt(2) of z cancels
        return z * (self.scale[:, None] / (size + 2**0.5 * 1e-6))

    def _sums(self, squares: Float[Tensor, "components channels tokens"]) -> list[Tensor]:
        """Squared norms of grade 0, of grades 1 and 2, and of grade 3, from the squares of components."""
        vectors, last = (1 in self.grades) + (2 in self.grades), 3 in self.grades
        scalar, squares, pseudoscalar = squares.split_with_sizes((1, 3 * vectors, int(last)))
        return [scalar, squares.unflatten(0, (vectors, 3)).sum(1), pseudoscalar]

    def extra_repr(self) -> str:
        return f"{self.channels}"


class MultivectorMLP(nn.Module):
    """A linear map to ``hidden`` multivectors, blocks (:class:`CliffordBlock`) and a linear map, on parts by grade.
    With ``bias=False`` a zero input gives a zero output, unless the input has no scalars: then the first map keeps its
    bias. Without it, layer normalisation would divide out the length of a vector and be discontinuous at zero."""

    def __init__(
        self, in_grades: Grades, out_grades: Grades, hidden: int, num_blocks: int = 1, bias: bool = True
    ) -> None:
        super().__init__()
        self.in_grades, self.out_grades, self.hidden = in_grades, out_grades, hidden
        full = Grades(*[hidden] * 4)
        self.embed = CliffordLinear(in_grades, full.only(in_grades.reachable(0)), bias or not in_grades.scalars)
        grades, blocks = [g for g, present in enumerate(in_grades.reachable(0)) if present], []
        for _ in range(num_blocks):
            blocks.append(CliffordBlock(hidden, grades, bias))
            grades = algebra.grades_of_products(grades)
        self.blocks, self._sizes = nn.Sequential(*blocks), algebra.component_counts(grades)
        self.out = CliffordLinear(full, out_grades, bias)

    def forward(self, parts: Parts) -> Parts:
        embedded = torch.cat([*itertools.compress(self.embed(parts), self.embed.out_grades)])
        return self.out(self.blocks(embedded).split_with_sizes(self._sizes))

    def tokens_per_block(self, device: torch.device) -> int:
        """The number of tokens of a tile. On a CPU, its intermediate results fit into the cache."""
        return max(64, tile_numbers(device, BLOCK_NUMBERS, 10 * algebra.COMPONENTS) // self.hidden)

    @property
    def reference_parameter(self) -> Tensor:
        """A parameter with the dtype and device that the input must have."""
        return next(self.out.parameters())


class GatedProducts(nn.Module):
    r"""Linear maps of vectors and of their products, times gates that a network computes from invariants.

    .. math::
        y = g \odot W\, [x,\; \langle p\, q \rangle], \qquad
        (f', g) = \mathrm{MLP}\big(b([f,\; \|x\|,\; \langle p\, q \rangle_0])\big)

    Here f are scalars, and x vectors of both parities and pseudoscalars. p and q are linear maps of x, and their
    geometric products are formed channel by channel. p = b(p') and b(z) = z / sqrt(1 + |z|^2): gates are bounded, and
    y grows linearly with x. With constant gates and W = 0 for products, y is a linear map of x.
    """

    def __init__(self, in_grades: Grades, out_grades: Grades) -> None:
        super().__init__()
        self.in_grades, self.out_grades = in_grades, out_grades
        self.grades = [grade for grade in (1, 2, 3) if in_grades[grade]]
        factors, products = (
            Grades(*(PRODUCTS * (grade in some) for grade in range(4)))
            for some in (self.grades, algebra.grades_of_products(self.grades) if self.grades else [])
        )
        self.factors = CliffordLinear(in_grades._replace(scalars=0), factors.times(2), bias=False)
        self.paths = nn.Parameter(torch.empty(len(algebra.PATHS), PRODUCTS if self.grades else 0))
        self.products, inside = products, in_grades.plus(products)
        self.mix = CliffordLinear(inside._replace(scalars=0), out_grades._replace(scalars=0), bias=False)
        self.inside = nn.Linear(products.scalars + sum(in_grades), GATE_WIDTH)
        self.outside = nn.Linear(GATE_WIDTH, sum(out_grades))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        reset_children(self)
        nn.init.normal_(self.paths, std=0.5)
        nn.init.ones_(self.outside.bias[self.out_grades.scalars :])

    def forward(self, parts: Parts) -> Parts:
        nothing, vectors = parts[0][:, :0], parts[1:]
        invariants = [parts[0][0], *((part * part).sum(0).add(SMOOTH).sqrt() for part in vectors)]
        if self.grades:
            pairs = [part.chunk(2, 1) for part in self.factors([nothing, *vectors])[1:]]
            p, q = (torch.cat(factor) for factor in zip(*(pairs[grade - 1] for grade in self.grades), strict=True))
            p = p * (1 + (p * p).sum(0)).rsqrt()
            z = algebra.channelwise_product(self.paths, p, q, self.grades)
            counts = [size * (n > 0) for size, n in zip(algebra.GRADE_SIZES, self.products, strict=True)]
            first, *rest = z.split_with_sizes(counts)
            invariants.append(first[0])
            vectors = [torch.cat([x, y], 1) if y.shape[0] else x for x, y in zip(vectors, rest, strict=True)]
        x = torch.cat(invariants)
        hidden = torch.addmm(self.inside.bias[:, None], self.inside.weight, x * (1 + x * x).rsqrt())
        out = torch.addmm(self.outside.bias[:, None], self.outside.weight, nn.functional.silu(hidden))
        scalars, *gates = out[None].split_with_sizes(list(self.out_grades), 1)
        mixed = self.mix([nothing, *vectors])[1:]
        return [scalars, *(gate * y for gate, y in zip(gates, mixed, strict=True))]


class GatedMLP(nn.Sequential):
    """Some :class:`GatedProducts`, the last of which gives the output, on parts by grade. Between them are ``hidden``
    channels of each grade."""

    def __init__(self, in_grades: Grades, out_grades: Grades, hidden: int, num_blocks: int = 1) -> None:
        grades = [in_grades]
        for _ in range(num_blocks - 1):
            grades.append(Grades(*[hidden] * 4).only(grades[-1].reachable(1)))
        super().__init__(*(GatedProducts(*pair) for pair in itertools.pairwise([*grades, out_grades])))
        self.in_grades, self.out_grades, self.hidden = in_grades, out_grades, hidden

    @property
    def blocks(self) -> GatedMLP:
        """The layers, each of which forms products as a block of :class:`MultivectorMLP` does."""
        return self

    def tokens_per_block(self, device: torch.device) -> int:
        """The number of tokens of a tile."""
        return max(64, tile_numbers(device, BLOCK_NUMBERS, 10 * algebra.COMPONENTS) // self.hidden)


@checks.arguments
class CliffordMLP(nn.Module):
    r"""An O(3)-equivariant multilayer perceptron on multivectors of Cl(3,0).

    It consists of a linear map (one matrix of channels for each grade), ``num_blocks`` blocks of activation, linear
    map, geometric product and layer normalisation, and a linear map. Only inputs and outputs of all tokens are in
    memory: tokens are processed in tiles, which backward computes again.

    Args:
        in_channels: Number of multivectors of the input. The blocks have the larger of both numbers.
        out_channels: Number of multivectors of the output.
        num_blocks: Number of blocks. With 2, the default, scalars and vectors reach every grade.

    Shapes:
        ``(..., in_channels, 8)`` -> ``(..., out_channels, 8)``, components (1; e1, e2, e3; e23, e31, e12; e123).

    Raises:
        ValueError: if an argument is not allowed, or if the input has another shape, dtype or device.

    Source: se3-hyena section 3.2; Ruhe et al., Clifford Group Equivariant Neural Networks (2023).

    Example:
        >>> import torch
        >>> mlp = CliffordMLP(3, 5)
        >>> mlp(torch.randn(2, 11, 3, 8)).shape
        torch.Size([2, 11, 5, 8])
    """

    def __init__(self, in_channels: checks.Count, out_channels: checks.Count, *, num_blocks: checks.Count = 2) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        inside, outside = Grades(*[in_channels] * 4), Grades(*[out_channels] * 4)
        self.mlp = MultivectorMLP(inside, outside, max(in_channels, out_channels), num_blocks)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or tuple(x.shape[-2:]) != (self.in_channels, algebra.COMPONENTS):
            raise ValueError(f"input must be (..., {self.in_channels}, 8), got {tuple(x.shape)}")
        reference = self.mlp.reference_parameter
        checks.of_points(x, reference)
        with full_precision(x.device):
            tokens = x.to(reference.dtype).reshape(-1, *x.shape[-2:])
            out = map_tiles(_of_tokens, self.mlp.tokens_per_block(x.device), (tokens,), self.mlp)
            return out.view(*x.shape[:-2], self.out_channels, algebra.COMPONENTS)

    def reset_parameters(self) -> None:
        reset_children(self)


def _of_tokens(
    x: Float[Tensor, "tokens channels components"], mlp: MultivectorMLP
) -> Float[Tensor, "tokens out components"]:
    out = torch.cat(mlp(list(x.permute(2, 1, 0).contiguous().split(algebra.GRADE_SIZES))))
    return out.permute(2, 1, 0).contiguous()
