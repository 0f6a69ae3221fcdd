"""Kernels of Ewald attention: forms in real and in reciprocal space, cutoffs and margins."""

# No string annotations: torch.package, with which NequIP packages models, cannot load dataclasses that have them.

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

Bounds = tuple[tuple[float, float], ...]
# Tensors that nodes pass on: keys (..., heads, C, A) and values (..., heads, V); or one tensor in place of their
# products, a source for each kernel (..., heads, C, V), with A = 1.
Sources = tuple[Tensor, ...]


class Product(NamedTuple):
    """A product of features and harmonics that is linear in both.

    Attributes:
        function: a function of a module file. Its arguments are features (..., V), harmonics (..., 2 l + 1), their
            degree l, and the operands. If harmonics are ``None``, features are (..., 2 l + 1, V) and have been
            multiplied by each of them.
        operands: tensors and settings that it needs.
    """

    function: Callable[..., Tensor]
    operands: tuple[Any, ...]

    def __call__(self, features: Tensor, harmonics: Tensor | None, degree: int) -> Tensor:
        return self.function(features, harmonics, degree, *self.operands)


class Range(NamedTuple):
    """The range of a kernel in both spaces.

    Attributes:
        cutoff: wavenumber beyond which the kernel is below the promised error.
        margin: distance beyond which it is below the promised error, or, with a long range, equal to 1 / r.
        long_range: true if the kernel decays as 1 / r; it is truncated along directions that do not repeat.
    """

    cutoff: float
    margin: float
    long_range: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Kernel:
    r"""C kernels of one kind for each head, with widths s: functions K(r) that enter attention as
    :math:`g_l\, u^l\, Y_l(\nabla) K`, with a gain for each degree of the solid harmonics Y and a unit of length u.

    This is the base class of :class:`Gaussian`, :class:`Coulomb` and kernels of your own: define
    :meth:`radial_functions` and :meth:`transform`, for kernels that decay as Gaussians. Define :meth:`ranges` too if
    yours reach further in distances or wavenumbers than Gaussians, and :meth:`unit_gains` if u is not s.

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds.
        gains: ``(heads, C, lmax + 1)``, the factor g of each degree.
        bounds: The smallest and the largest width of each of the C kernels, as Python numbers. The number of reciprocal
            vectors depends on them, and not on ``widths``.

    Raises:
        ValueError: if shapes do not fit or a bound is not positive.
    """

    widths: Tensor
    gains: Tensor
    bounds: Bounds

    long_range: ClassVar[bool] = False

    def __post_init__(self) -> None:
        heads, count = self.widths.shape if self.widths.ndim == 2 else (0, 0)
        if not heads or self.gains.ndim != 3 or self.gains.shape[:2] != (heads, count):
            raise ValueError(
                "widths must be (heads, C) and gains (heads, C, lmax + 1), "
                f"got {tuple(self.widths.shape)} and {tuple(self.gains.shape)}"
            )
        if len(self.bounds) != count or not all(0 < low <= high < math.inf for low, high in self.bounds):
            raise ValueError(f"bounds must be {count} pairs of a smallest and a largest width, got {self.bounds}")

    @property
    def count(self) -> int:
        """Kernels of each head."""
        return len(self.bounds)

    @property
    def lmax(self) -> int:
        """Highest degree of the solid harmonics."""
        return self.gains.shape[2] - 1

    def unit_gains(self) -> Tensor:
        """Gains ``(heads, C, lmax + 1)`` relative to the unit s: g (u / s)^l."""
        return self.gains

    def single(self, kernel: int) -> "Kernel":
        """The kernels of one index, as an object with C = 1."""
        these = slice(kernel, kernel + 1)
        values: list[Any] = [getattr(self, field.name) for field in dataclasses.fields(self)]
        chosen: list[Any] = [x[:, these] if isinstance(x, Tensor) else x[these] for x in values]
        return type(self)(*chosen)

    def ranges(self, scaled_cutoff: float) -> list[Range]:
        """Cutoff and margin of each of the C kernels, for an :attr:`Interaction.scaled_cutoff`."""
        return [Range(scaled_cutoff / low, scaled_cutoff * high, self.long_range) for low, high in self.bounds]

    def real_space(self, square: Tensor) -> Tensor:
        """R_l(r) at squared distances, with :math:`g_l u^l Y_l(\\nabla) K = R_l(r) Y_l(r)`: ``(B, n, m)`` to
        ``(lmax + 1, B, heads, C, n, m)``."""
        return self.radial(square) * self.scales(square.dtype)[:, None, :, :, None, None]

    def radial(self, square: Tensor) -> Tensor:
        """:meth:`real_space` without :meth:`scales`. If it is equal for all degrees, the first axis has size 1."""
        widths = self.widths.to(square.dtype)
        return self.radial_functions(square[:, None, None] / (2 * widths.square()[..., None, None]))

    def scales(self, dtype: torch.dtype) -> Tensor:
        """The factors :math:`g_l u^l (-1 / s^2)^l` of :meth:`real_space`, ``(lmax + 1, heads, C)``."""
        widths, gains = self.widths.to(dtype), self.unit_gains().to(dtype)
        return (gains * (-widths)[..., None] ** -degrees(gains)).movedim(2, 0)

    def reciprocal(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        r"""Fourier transforms :math:`g_l u^l \hat K(k)`, without the :math:`Y_l(i k)` that follows from
        :math:`Y_l(\nabla)`.

        Args:
            square: ``(B, D)``, squared wavenumbers.
            coulomb: ``(B, D)``, 4 pi / k² as it is truncated along directions that do not repeat, for long-range
                kernels.
            index: int64 ``(D,)`` or ``(1,)``, the kernel that each wavenumber is for.

        Returns:
            ``(B, D, heads, lmax + 1)``.
        """
        amplitudes = self.unit_gains() * self.widths[..., None] ** degrees(self.gains)
        amplitudes = amplitudes.movedim(1, 0).to(square.dtype)[index]
        transform = self.transform(square[..., None], coulomb[..., None], index)
        return transform[..., None] * amplitudes

    def radial_functions(self, t: Tensor) -> Tensor:
        """The functions :math:`f_l = (-d / dt)^l K` of t = r² / 2 s² ``(B, heads, C, n, m)``, smooth at t = 0, with
        :math:`Y_l(\\nabla) K = (-1 / s^2)^l f_l(t) Y_l(r)`. Degrees 0 to lmax come first, or one axis of size 1 if
        all f_l are equal."""
        raise NotImplementedError

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        """Fourier transform ``(B, D, heads)`` of K at squared wavenumbers ``(B, D, 1)``. Wavenumber d is for kernel
        ``index[d]``, so ``widths.mT[index]`` are the widths."""
        raise NotImplementedError


def degrees(gains: Tensor) -> Tensor:
    """Degrees 0 to lmax of gains ``(heads, C, lmax + 1)``."""
    return torch.arange(gains.shape[2], device=gains.device)


def per_wavenumber(x: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """Values of each kernel ``(heads, C)`` for each reciprocal vector: ``(D, heads)`` or ``(1, heads)``."""
    return x.mT.to(like.dtype)[index]


class Interaction(NamedTuple):
    """The settings of sums over nodes.

    Attributes:
        kernels: the kernels.
        product: the product of values with harmonics of one degree.
        error: promised error of reciprocal sums, relative to the largest value of a kernel.
        max_hkl: largest Miller indices for the kernel with the largest cutoff; ``None`` reads them from cells.
    """

    kernels: tuple[Kernel, ...]
    product: Product
    error: float
    max_hkl: Sequence[int] | None

    @property
    def lmax(self) -> int:
        """Highest degree of the solid harmonics."""
        return self.kernels[0].lmax

    @property
    def scaled_cutoff(self) -> float:
        """The x beyond which :math:`x^{l_{max} + 2} e^{-x^2 / 2}` is below ``error``: outputs and their second
        derivatives are that small at s k = x in reciprocal space, and at r / s = x in real space."""
        x = 2 * math.sqrt(self.lmax + 2)  # beyond the maximum
        for _ in range(40):
            x = math.sqrt(2 * math.log(1 / self.error) + 2 * (self.lmax + 2) * math.log(x))
        return x

    def part(self, kernels: tuple[Kernel, ...]) -> "Interaction":
        """The settings for some of the kernels, with the same reciprocal vectors."""
        bounds = self.hkl_bounds([own for kernel in kernels for own in kernel.ranges(self.scaled_cutoff)])
        most = None if bounds is None else tuple(max(each) for each in zip(*bounds, strict=True))
        return self._replace(kernels=kernels, max_hkl=most)

    def hkl_bounds(self, ranges: Sequence[Range]) -> list[tuple[int, int, int]] | None:
        """Largest Miller indices of each kernel: ``max_hkl`` in proportion to the cutoffs."""
        if self.max_hkl is None:
            return None
        scaled = self.scaled_cutoff
        largest = max(own.cutoff for kernel in self.kernels for own in kernel.ranges(scaled))
        h, k, l = self.max_hkl  # noqa: E741
        ratios = [own.cutoff / largest - 1e-9 for own in ranges]  # less a rounding error
        return [(math.ceil(h * r), math.ceil(k * r), math.ceil(l * r)) for r in ratios]
