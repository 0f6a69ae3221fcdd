"""Gaussians times cosines of the distance, as kernels of one's own in Ewald attention (``kernels=``)."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from tg_equiattn.functional import Kernel


@dataclasses.dataclass(frozen=True, eq=False)
class OscillatingGaussian(Kernel):
    r"""Gaussians times cosines of the distance. Their sign alternates with the distance.

    .. math:: K(r) = e^{-r^2 / 2 s^2} \cos \kappa r, \qquad \hat K(k) = (2 \pi)^{3/2}\, \frac{s^3}{2}
        \sum_{\pm} \Big( 1 \pm \frac{\kappa}{k} \Big) e^{-s^2 (k \pm \kappa)^2 / 2}

    The unit of length of the derivatives is :math:`u = (s^{-2} + \kappa^2)^{-1/2}`.
    """

    wavenumbers: Tensor  # (heads, C), in radians per unit of positions
    largest: tuple[float, ...]  # the largest wavenumber of each of the C kernels

    def unit_gains(self) -> Tensor:
        ratio = 1 + (self.widths * self.wavenumbers).square()  # (s / u)²
        return self.gains * ratio[..., None] ** (-torch.arange(self.lmax + 1, device=ratio.device) / 2)

    def ranges(self, scaled_cutoff: float) -> list:
        pairs = zip(super().ranges(scaled_cutoff), self.largest, strict=True)
        return [own._replace(cutoff=own.cutoff + largest) for own, largest in pairs]

    def radial_functions(self, t: Tensor) -> Tensor:
        # e^{-t} sum_m binomial(l, m) (s kappa)^2m C_m, by Leibniz' rule, with C_m the derivatives of the cosine
        ratio = (self.widths * self.wavenumbers).square()[..., None, None].to(t.dtype)
        terms = [ratio**m * cosine for m, cosine in enumerate(cosine_functions(ratio * t, self.lmax))]
        out = [sum(math.comb(degree, m) * terms[m] for m in range(degree + 1)) for degree in range(self.lmax + 1)]
        return torch.stack(out) * (-t).exp()

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths, wavenumbers = (x.mT.to(square.dtype)[index] for x in (self.widths, self.wavenumbers))
        zero = square == 0
        safe = torch.where(zero, 1.0, square).sqrt()
        k = torch.where(zero, 0.0, safe)
        exponent = -2 * k * wavenumbers * widths.square()  # exponent of the second Gaussian minus that of the first
        slope = torch.where(zero, -2 * wavenumbers * widths.square(), torch.expm1(exponent) / safe)
        first = (-(widths * (k - wavenumbers)).square() / 2).exp()
        return (2 * math.pi) ** 1.5 * widths**3 / 2 * first * (1 + exponent.exp() + wavenumbers * slope)


class OscillatingGaussians(nn.Module):
    """Kernels of learned widths, within the octave below ``max_width``, and of learned wavenumbers, each in a band of
    its own, down to wavelengths of 4/3 ``width``."""

    def __init__(self, count: int, width: float, max_width: float, heads: int = 1) -> None:
        super().__init__()
        self.count, self.low, self.band = count, max_width / 2, 1.5 * math.pi / width / count
        self.octaves, self.bands = (nn.Parameter(torch.zeros(heads, count)) for _ in range(2))

    def forward(self, gains: Tensor) -> OscillatingGaussian:
        number = torch.arange(self.count, device=self.bands.device)
        return OscillatingGaussian(
            self.low * torch.exp2(self.octaves.sigmoid()), gains, ((self.low, 2 * self.low),) * self.count,
            self.band * (number + self.bands.sigmoid()), tuple(self.band * (n + 1) for n in range(self.count)),
        )  # fmt: skip


def cosine_functions(y: Tensor, lmax: int) -> list[Tensor]:
    r""":math:`C_l(y) = (-d / dy)^l \cos \sqrt{2 y}` for y >= 0, of degrees 0 to ``lmax``, smooth at y = 0: below
    ``edge`` the series, above it the recursion of spherical Bessel functions."""
    edge = (lmax + 2) ** 2 / 2
    small = y < edge
    near, far = torch.where(small, y, 0.0), torch.where(small, edge, y)
    root = (2 * far).sqrt()
    up = [root.cos(), root.sin() / root]
    for degree in range(1, lmax):
        up.append(((2 * degree - 1) * up[-1] - up[-2]) / (2 * far))
    out = []
    for degree in range(lmax + 1):
        terms = [2.0**degree * math.factorial(degree) / math.factorial(2 * degree)]
        while abs(terms[-1]) * edge ** (len(terms) - 1) > torch.finfo(y.dtype).eps / 8 * terms[0]:
            n = len(terms) + degree
            terms.append(-terms[-1] * n / len(terms) * 2 / (2 * n * (2 * n - 1)))
        series = torch.zeros_like(near)
        for coefficient in reversed(terms):
            series = series * near + coefficient
        out.append(torch.where(small, series, up[degree]))
    return out
