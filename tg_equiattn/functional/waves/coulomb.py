"""Coulomb potentials of Gaussian charges, and their split into a short-range and a long-range part."""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from .kernel import Kernel, Range, per_wavenumber
from .special_functions import boys_functions


class Coulomb(Kernel):
    r"""Coulomb potentials of Gaussian charges. At large distances they are 1 / r, with r in units of the width.

    .. math:: K(r) = \frac{s}{r}\, \mathrm{erf} \frac{r}{\sqrt 2 s} = \sqrt{\frac{2}{\pi}}\, F_0(t), \qquad
        \hat K(k) = \frac{4 \pi s}{k^2}\, e^{-s^2 k^2 / 2}, \qquad
        s^l\, Y_l(\nabla) K = (-1)^l \sqrt{\frac{2}{\pi}}\, Y_l(r / s)\, F_l(t)

    with :math:`t = r^2 / 2 s^2` and Boys functions F.

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds.
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

    def split(self, width: float) -> tuple[ShortRangeCoulomb, LongRangeCoulomb]:
        """Split the kernel into a sum of two kernels: one that decays as a Gaussian, and the potential of charges of a
        larger ``width``, which needs few reciprocal vectors."""
        short = ShortRangeCoulomb(self.widths, self.gains, tuple((low, width) for low, _ in self.bounds))
        return short, LongRangeCoulomb(self.widths, self.gains, ((width, width),) * self.count)

    @staticmethod
    def split_ranges(low: float, width: float, scaled_cutoff: float) -> list[Range]:
        """The :meth:`Kernel.ranges` of both kernels from :meth:`split`, for one kernel with the smallest width ``low``.
        It makes no tensors, since many widths are tried."""
        short = Range(scaled_cutoff / low, scaled_cutoff * width, long_range=False)
        return [short, Range(scaled_cutoff / width, scaled_cutoff * width, long_range=True)]

    def radial_functions(self, t: Tensor) -> Tensor:
        return math.sqrt(2 / math.pi) * boys_functions(t, self.lmax)

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        return widths * (-square * widths.square() / 2).exp() * coulomb


class ShortRangeCoulomb(Kernel):
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
        own, outer = (boys_functions(x, self.lmax) for x in (t, t * ratio.square()))
        powers = torch.stack([ratio ** (2 * degree + 1) for degree in range(self.lmax + 1)])[:, None]
        return math.sqrt(2 / math.pi) * (own - powers * outer)

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        excess, zero = (self._outer**2 - widths.square()) / 2, square == 0
        safe = torch.where(zero, 1.0, square)
        remainder = torch.where(zero, excess, -torch.expm1(-safe * excess) / safe)
        return 4 * math.pi * widths * (-square * widths.square() / 2).exp() * remainder


class LongRangeCoulomb(Kernel):
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
