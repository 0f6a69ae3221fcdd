"""Gaussians and oscillating Gaussians."""

# No string annotations: torch.package, with which NequIP packages models, cannot load dataclasses that have them.

import dataclasses
import math

import torch
from torch import Tensor

from .kernel import Kernel, Range, degrees, per_wavenumber
from .special_functions import cosine_functions


class Gaussian(Kernel):
    r"""Gaussians of the distance.

    .. math:: K(r) = e^{-r^2 / 2 s^2}, \qquad \hat K(k) = (2 \pi)^{3/2} s^3 e^{-s^2 k^2 / 2},
        \qquad s^l\, Y_l(\nabla) K = (-1)^l\, Y_l(r / s)\, K(r)

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds.
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

    def _radial(self, t: Tensor) -> Tensor:
        return (-t).exp()[None]

    def _transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        return (2 * math.pi) ** 1.5 * widths**3 * (-square * widths.square() / 2).exp()


@dataclasses.dataclass(frozen=True, eq=False)
class OscillatingGaussian(Kernel):
    r"""Gaussians times cosines of the distance. Their sign alternates with the distance.

    .. math:: K(r) = e^{-r^2 / 2 s^2} \cos \kappa r, \qquad \hat K(k) = (2 \pi)^{3/2}\, \frac{s^3}{2}
        \sum_{\pm} \Big( 1 \pm \frac{\kappa}{k} \Big) e^{-s^2 (k \pm \kappa)^2 / 2}

    The unit of length of the derivatives is :math:`u = (s^{-2} + \kappa^2)^{-1/2}`.

    Args:
        widths: ``(heads, C)``, the widths s in the unit of positions, each within its bounds.
        gains: ``(heads, C, lmax + 1)``, the factor of each degree of the solid harmonics.
        bounds: The smallest and the largest width of each of the C kernels, as Python numbers in the unit of positions.
        wavenumbers: ``(heads, C)``, the wavenumbers :math:`\kappa` in radians per unit of positions.
        largest: The largest wavenumber of each of the C kernels, as Python numbers.

    Raises:
        ValueError: if shapes do not fit, or a bound or a largest wavenumber is not positive.

    Example:
        >>> import torch
        >>> ones = torch.ones(1, 1)
        >>> bounds, wavenumbers = ((0.5, 1.0),), torch.pi * ones
        >>> kernel = OscillatingGaussian(ones, ones[..., None], bounds, wavenumbers, largest=(4.0,))
        >>> kernel.real_space(torch.tensor([[[0.0, 1.0]]])).flatten()
        tensor([ 1.0000, -0.6065])
    """

    wavenumbers: Tensor
    largest: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wavenumbers.shape != self.widths.shape:
            wanted = tuple(self.widths.shape)
            raise ValueError(f"wavenumbers must be {wanted} as widths are, got {tuple(self.wavenumbers.shape)}")
        if len(self.largest) != self.count or not all(0 < x < math.inf for x in self.largest):
            raise ValueError(f"largest must be {self.count} positive wavenumbers, got {self.largest}")

    def unit_gains(self) -> Tensor:
        ratio = 1 + (self.widths * self.wavenumbers).square()  # (s / u)²
        return self.gains * ratio[..., None] ** (-degrees(self.gains) / 2)

    def ranges(self, scaled_cutoff: float) -> list[Range]:
        pairs = zip(super().ranges(scaled_cutoff), self.largest, strict=True)
        return [own._replace(cutoff=own.cutoff + largest) for own, largest in pairs]

    def _radial(self, t: Tensor) -> Tensor:
        # f_l = e^{-t} sum_m binomial(l, m) (s kappa)^2m C_m, by Leibniz' rule, with C_m the derivatives of the cosine
        ratio = (self.widths * self.wavenumbers).square()[..., None, None].to(t.dtype)
        cosines, decay = cosine_functions(ratio * t, self.lmax), (-t).exp()
        terms = [ratio**m * cosine for m, cosine in enumerate(cosines)]
        out = [sum(math.comb(degree, m) * terms[m] for m in range(degree + 1)) for degree in range(self.lmax + 1)]
        return torch.stack(out) * decay

    def _transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths, wavenumbers = (per_wavenumber(x, index, square) for x in (self.widths, self.wavenumbers))
        zero = square == 0
        safe = torch.where(zero, 1.0, square).sqrt()
        k = torch.where(zero, 0.0, safe)
        exponent = -2 * k * wavenumbers * widths.square()  # exponent of the second Gaussian minus that of the first
        slope = torch.where(zero, -2 * wavenumbers * widths.square(), torch.expm1(exponent) / safe)
        first = (-(widths * (k - wavenumbers)).square() / 2).exp()
        return (2 * math.pi) ** 1.5 * widths**3 / 2 * first * (1 + exponent.exp() + wavenumbers * slope)
