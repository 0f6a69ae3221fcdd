"""Kernels of Ewald attention: forms in real and in reciprocal space, cutoffs, margins, and Boys functions."""

# No string annotations: torch.package, with which NequIP packages models, cannot load dataclasses that have them.

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..torch_state import by_form, cached

Bounds = tuple[tuple[float, float], ...]
# Tensors that nodes pass on: keys (..., heads, C, A) and values (..., heads, V); or one tensor in place of their
# products, a source for each kernel (..., heads, C, V), with A = 1.
Sources = tuple[Tensor, ...]


class Product(NamedTuple):
    """A product of features and harmonics that is linear in both.

    Attributes:
        function: a function of a module file. Its arguments are a list of features (..., V) and harmonics
            (..., 2 l + 1), one pair for each degree l from 0 on, and the operands. It returns the sum over degrees. If
            harmonics are ``None``, features are (..., 2 l + 1, V) and have been multiplied by each of them.
        operands: tensors and settings that it needs.
    """

    function: Callable[..., Tensor]
    operands: tuple[Any, ...]

    def __call__(self, parts: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor:
        return self.function(parts, *self.operands)


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
    r"""C radial kernels K(r) for each head, of widths s. Degree l contributes :math:`g_l\, u^l\, Y_l(\nabla) K`, with
    a gain for each degree of the solid harmonics Y and a unit of length u.

    This is the base class of :class:`Gaussian`, :class:`Coulomb` and kernels of your own: define
    :meth:`radial_functions` and :meth:`transform`, for kernels that decay as Gaussians. Define :meth:`ranges` too if
    yours reach further in distances or wavenumbers than Gaussians, and :meth:`unit_gains` if u is not s.

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds, or ``(1, C)`` for widths
            that all heads share.
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
        if not heads or self.gains.ndim != 3 or count != self.gains.shape[1] or heads not in (1, len(self.gains)):
            raise ValueError(
                "widths must be (heads, C) or (1, C), and gains (heads, C, lmax + 1), "
                f"got {tuple(self.widths.shape)} and {tuple(self.gains.shape)}"
            )
        for low, high in self.bounds:
            count -= 0 < low <= high < math.inf
        if count:
            count = self.widths.shape[1]
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

    def select(self, columns: Sequence[int]) -> "Kernel":
        """Some of the C kernels."""
        values: list[Any] = [getattr(self, field.name) for field in dataclasses.fields(self)]
        chosen: list[Any] = [x[:, columns] if isinstance(x, Tensor) else tuple(x[c] for c in columns) for x in values]
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


class Gaussian(Kernel):
    r"""Gaussians of the distance.

    .. math:: K(r) = e^{-r^2 / 2 s^2}, \qquad \hat K(k) = (2 \pi)^{3/2} s^3 e^{-s^2 k^2 / 2},
        \qquad s^l\, Y_l(\nabla) K = (-1)^l\, Y_l(r / s)\, K(r)

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds, or ``(1, C)`` for widths
            that all heads share.
        gains: ``(heads, C, lmax + 1)``, the factor of each degree of the solid harmonics.
        bounds: The smallest and the largest width of each of the C kernels, as Python numbers in the unit of positions.

    Raises:
        ValueError: if shapes do not fit or a bound is not positive.

    Example:
        >>> import torch
        >>> kernel = Gaussian(torch.ones(1, 1), torch.ones(1, 1, 1), bounds=((0.5, 1.0),))
        >>> kernel.real_space(torch.tensor([[[0.0, 2.0]]])).flatten()
        tensor([1.0000, 0.3679])
    """

    def radial_functions(self, t: Tensor) -> Tensor:
        return (-t).exp()[None]

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        return (2 * math.pi) ** 1.5 * widths**3 * (-square * widths.square() / 2).exp()


class _Potential(Kernel):
    """Coulomb potentials, whose Fourier transforms are smaller than those of Gaussians by the square of s k."""

    def ranges(self, scaled_cutoff: float) -> list[Range]:
        end = _potential_cutoff(scaled_cutoff)
        return [reach._replace(cutoff=end / scaled_cutoff * reach.cutoff) for reach in super().ranges(scaled_cutoff)]


def _potential_cutoff(x: float) -> float:
    return math.sqrt(x**2 - 2 * math.log(x))


class Coulomb(_Potential):
    r"""Coulomb potentials of Gaussian charges. At large distances they are 1 / r, with r in units of the width.

    .. math:: K(r) = \frac{s}{r}\, \mathrm{erf} \frac{r}{\sqrt 2 s} = \sqrt{\frac{2}{\pi}}\, F_0(t), \qquad
        \hat K(k) = \frac{4 \pi s}{k^2}\, e^{-s^2 k^2 / 2}, \qquad
        s^l\, Y_l(\nabla) K = (-1)^l \sqrt{\frac{2}{\pi}}\, Y_l(r / s)\, F_l(t)

    with :math:`t = r^2 / 2 s^2` and Boys functions F.

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds, or ``(1, C)`` for widths
            that all heads share.
        gains: ``(heads, C, lmax + 1)``, the factor of each degree of the solid harmonics.
        bounds: The smallest and the largest width of each of the C kernels, as Python numbers in the unit of positions.

    Raises:
        ValueError: if shapes do not fit or a bound is not positive.

    Example:
        >>> import torch
        >>> kernel = Coulomb(torch.ones(1, 1), torch.ones(1, 1, 1), bounds=((0.5, 1.0),))
        >>> kernel.real_space(torch.tensor([[[0.0, 100.0]]])).flatten()
        tensor([0.7979, 0.1000])
    """

    long_range: ClassVar[bool] = True

    def split(self, width: float) -> tuple["ShortRangeCoulomb", "LongRangeCoulomb"]:
        """Split the kernel into a sum of two kernels: one that decays as a Gaussian, and the potential of charges of a
        larger ``width``, which needs few reciprocal vectors."""
        short = ShortRangeCoulomb(self.widths, self.gains, tuple((low, width) for low, _ in self.bounds))
        return short, LongRangeCoulomb(self.widths, self.gains, ((width, width),) * self.count)

    @staticmethod
    def split_ranges(low: float, width: float, scaled_cutoff: float) -> list[Range]:
        """The :meth:`Kernel.ranges` of both kernels from :meth:`split`, for one kernel with the smallest width ``low``.
        It makes no tensors, since many widths are tried."""
        end, margin = _potential_cutoff(scaled_cutoff), scaled_cutoff * width
        return [Range(end / low, margin, long_range=False), Range(end / width, margin, long_range=True)]

    def radial_functions(self, t: Tensor) -> Tensor:
        return math.sqrt(2 / math.pi) * boys_functions(t, self.lmax)

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        return widths * (-square * widths.square() / 2).exp() * coulomb


class ShortRangeCoulomb(_Potential):
    r"""Coulomb potentials without their long-range part: those of Gaussian charges of width s, surrounded by opposite
    charges of the largest width S of the bounds.

    .. math:: K(r) = \frac{s}{r} \Big( \mathrm{erf} \frac{r}{\sqrt 2 s} - \mathrm{erf} \frac{r}{\sqrt 2 S} \Big), \qquad
        \hat K(k) = \frac{4 \pi s}{k^2} \big( e^{-s^2 k^2 / 2} - e^{-S^2 k^2 / 2} \big)
    """

    @property
    def _outer(self) -> float:
        return self.bounds[0][1]

    def radial_functions(self, t: Tensor) -> Tensor:
        ratio = (self.widths / self._outer)[..., None, None].to(t.dtype)
        inner, outer = (boys_functions(x, self.lmax) for x in (t, t * ratio.square()))
        powers = torch.stack([ratio ** (2 * degree + 1) for degree in range(self.lmax + 1)])[:, None]
        return math.sqrt(2 / math.pi) * (inner - powers * outer)

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        excess, zero = (self._outer**2 - widths.square()) / 2, square == 0
        safe = torch.where(zero, 1.0, square)
        remainder = torch.where(zero, excess, -torch.expm1(-safe * excess) / safe)
        return 4 * math.pi * widths * (-square * widths.square() / 2).exp() * remainder


class LongRangeCoulomb(_Potential):
    r"""Long-range parts of Coulomb potentials, in reciprocal space: those of Gaussian charges of the width S that is
    both bounds, in units of the width s.

    .. math:: \hat K(k) = \frac{4 \pi s}{k^2}\, e^{-S^2 k^2 / 2}

    Where k = 0 is left out, in crystals, it takes off k = 0 of the short-range part.
    """

    long_range: ClassVar[bool] = True

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths, outer = per_wavenumber(self.widths, index, square), self.bounds[0][1]
        short = 2 * math.pi * widths * (outer**2 - widths.square())
        left_out = (square == 0) & (coulomb == 0)
        return torch.where(left_out, -short, widths * (-square * outer**2 / 2).exp() * coulomb)


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
        power, bound = self.lmax + 2, 2 * math.log(1 / self.error)
        x = 2 * math.sqrt(power)  # beyond the maximum
        for _ in range(40):
            x = math.sqrt(bound + 2 * power * math.log(x))
        return x

    @property
    def ranges(self) -> list[Range]:
        """Cutoff and margin of each kernel."""
        return [reach for kernel in self.kernels for reach in kernel.ranges(self.scaled_cutoff)]

    def part(self, kernels: tuple[Kernel, ...]) -> "Interaction":
        """The settings for some of the kernels, with the same reciprocal vectors."""
        some = self._replace(kernels=kernels)
        if self.max_hkl is None:
            return some
        ratio = max(reach.cutoff for reach in some.ranges) / max(reach.cutoff for reach in self.ranges)
        return some._replace(max_hkl=tuple(math.ceil(n * (ratio - 1e-9)) for n in self.max_hkl))

    def hkl_bounds(self) -> list[tuple[int, ...]] | None:
        """Largest Miller indices of each kernel: ``max_hkl`` in proportion to the cutoffs, less a rounding error."""
        if self.max_hkl is None:
            return None
        cutoffs = [reach.cutoff for reach in self.ranges]
        return [tuple(math.ceil(n * (cutoff / max(cutoffs) - 1e-9)) for n in self.max_hkl) for cutoff in cutoffs]


class _Ladder(torch.autograd.Function):
    """Boys functions F_0 to F_l of t, with dF_l / dt = -F_{l+1}. Forward computes one more degree, which backward uses.

    Backward calls this function with one more degree, so it has derivatives of any order, also at t = 0; a registered
    operator would need one more operator for each order.
    """

    @staticmethod
    def forward(ctx, t: Tensor, lmax: int) -> Tensor:
        out = _boys(t, lmax + 1)
        ctx.save_for_backward(t, out)
        ctx.lmax = lmax
        return out[:-1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        t, known = ctx.saved_tensors
        # to be differentiated again, slopes have to be a function of t in autograd's graph
        slopes = _Ladder.apply(t, ctx.lmax + 1) if torch.is_grad_enabled() else known
        return -(grad * slopes[1:]).sum(0), None


def _boys(t: Tensor, lmax: int) -> Tensor:
    r"""Boys functions :math:`F_l(t) = \int_0^1 u^{2 l} e^{-t u^2} du` for t >= 0, of degrees 0 to ``lmax``, in
    operations that autograd can differentiate: below ``edge`` the series of the highest degree, whose terms are all
    positive, and the recursion down; above it the error function and the recursion up."""
    edge = 1.5 + lmax
    small = t < edge
    near, far, exponential = t.clamp(max=edge), t.clamp(min=edge), (-t).exp()
    terms = [1 / (2 * lmax + 1)]  # F_l(t) exp(t) = sum_k (2 t)^k / (2 l + 1)(2 l + 3)...(2 l + 2 k + 1)
    while terms[-1] * edge ** (len(terms) - 1) > torch.finfo(t.dtype).eps / 8 * terms[0]:
        terms.append(terms[-1] * 2 / (2 * lmax + 2 * len(terms) + 1))
    down = [exponential * _polynomial(terms, near)]
    for degree in range(lmax, 0, -1):
        scaled = exponential if degree == 1 else exponential / (2 * degree - 1)
        down.append(torch.addcmul(scaled, near, down[-1], value=2 / (2 * degree - 1)))
    root, inverse = far.sqrt(), -0.5 / far
    up = [math.sqrt(math.pi) / 2 * torch.erf(root) / root]
    for degree in range(lmax):
        up.append(torch.sub(exponential, up[-1], alpha=2 * degree + 1) * inverse)
    return torch.where(small, torch.stack(down[::-1]), torch.stack(up))


boys_functions = by_form(_boys, _Ladder.apply)


def _polynomial(coefficients: Sequence[float], t: Tensor) -> Tensor:
    """The polynomial with these coefficients, the constant first, by Horner's rule."""
    *others, first, second = _constants(tuple(coefficients), t.dtype, t.device)
    out = first + t * second
    for coefficient in reversed(others):
        out = torch.addcmul(coefficient, out, t)
    return out


@cached(64)
def _constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Tensors of single numbers, made on the device, so that CUDA does not wait for a copy."""
    return tuple(torch.full((), value, dtype=dtype, device=device) for value in values)
