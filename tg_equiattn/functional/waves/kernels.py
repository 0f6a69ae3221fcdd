"""Gaussians, smeared Coulomb potentials and ripples, in space and as waves, with their derivatives."""

# No strings for annotations: torch.package, which takes models along with their code, cannot load dataclasses then.

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor, int], Tensor]


@dataclasses.dataclass(frozen=True)
class EwaldKernels:
    r"""Some Gaussians, then some smeared Coulomb potentials, then some ripples, C kernels of each head.

    All have a width s. With :math:`t = r^2 / 2 s^2`,

    .. math:: K(r) = e^{-t} \quad \text{or} \quad s\, \mathrm{erf}(r / \sqrt 2 s) / r = \sqrt{2 / \pi}\, F_0(t)

    and their derivatives by a solid harmonic are :math:`s^l\, Y_l(\nabla) K = (-1)^l\, Y_l(r / s)\, f_l(t)` with
    :math:`f_l = e^{-t}` or :math:`\sqrt{2 / \pi}\, F_l(t)`, F Boys functions. As waves, :math:`Y_l(\nabla)` is
    :math:`Y_l(i k)`, and :math:`\hat K(k) = (2 \pi)^{3/2} s^3 e^{-s^2 k^2 / 2}` or
    :math:`4 \pi s\, e^{-s^2 k^2 / 2} / k^2`.

    Ripples have a wavenumber :math:`\kappa` too: :math:`K(r) = e^{-t} \cos \kappa r`, which tells one distance from the
    next within a width, as interference does. Their derivatives are in the unit
    :math:`(s^{-2} + \kappa^2)^{-1/2}` instead of s. As waves they are

    .. math:: \hat K(k) = (2 \pi)^{3/2} \frac{s^3}{2} \sum_{\pm} \Big( 1 \pm \frac{\kappa}{k} \Big)
        e^{-s^2 (k \pm \kappa)^2 / 2}

    Args:
        widths: ``(heads, C)``, s, each between its bounds.
        gains: ``(heads, C, lmax + 1)``, g, of each degree of harmonics.
        bounds: the least and the largest width of each kernel, as numbers: waves and margins hang on them alone.
        gaussians: how many kernels are Gaussians; those that follow are potentials.
        error: what is promised of sums by waves, relative to a kernel's largest value.
        max_waves: bounds of the three integers of a wave, along the lattice vectors, for the narrowest kernel: given,
            no cell is read, which torch.compile needs.
        wavenumbers: ``(heads, R)`` of the last R kernels, which are ripples, each at most ``fastest``.
        fastest: the largest wavenumber of each ripple, as a number.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """

    widths: Tensor
    gains: Tensor
    bounds: tuple[tuple[float, float], ...]
    gaussians: int
    error: float = 1e-4
    max_waves: tuple[int, int, int] | None = None
    wavenumbers: Tensor | None = None
    fastest: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        heads, count = self.widths.shape if self.widths.ndim == 2 else (0, 0)
        if not heads or self.gains.ndim != 3 or self.gains.shape[:2] != (heads, count):
            raise ValueError(
                "widths must be (heads, C) and gains (heads, C, lmax + 1), "
                f"got {tuple(self.widths.shape)} and {tuple(self.gains.shape)}"
            )
        if len(self.bounds) != count or not all(0 < low <= high < math.inf for low, high in self.bounds):
            raise ValueError(f"bounds must be {count} pairs of a least and a largest width, got {self.bounds}")
        ripples = len(self.fastest)
        given = (heads, 0) if self.wavenumbers is None else tuple(self.wavenumbers.shape)
        if given != (heads, ripples) or ripples > count or not all(0 < k < math.inf for k in self.fastest):
            raise ValueError(
                f"wavenumbers must be ({heads}, R), R at most {count}, and fastest R positive numbers, "
                f"got {given} and {self.fastest}"
            )
        if not 0 <= self.gaussians <= count - ripples:
            raise ValueError(f"gaussians must be in [0, {count - ripples}], got {self.gaussians}")
        if not 1e-14 <= self.error < 1:
            raise ValueError(f"error must be in [1e-14, 1), got {self.error}")

    @property
    def lmax(self) -> int:
        return self.gains.shape[2] - 1

    @property
    def ripples(self) -> int:
        """The first of those kernels that are ripples."""
        return len(self.bounds) - len(self.fastest)

    def every_wavenumber(self) -> Tensor | None:
        """(heads, C), zero of other kernels; ``None`` without ripples."""
        return None if self.wavenumbers is None else torch.nn.functional.pad(self.wavenumbers, (self.ripples, 0))

    def unit_gains(self) -> Tensor:
        """Gains as if all derivatives were in the unit s."""
        if self.wavenumbers is None:
            return self.gains
        turns = (self.widths[:, self.ripples :] * self.wavenumbers).square()  # (s kappa)^2
        degrees = torch.arange(self.lmax + 1, device=turns.device)
        scale = (1 + turns)[..., None] ** (-degrees / 2)
        return torch.cat([self.gains[:, : self.ripples], self.gains[:, self.ripples :] * scale], 1)

    def least(self, kernel: int) -> float:
        """The least width; of a ripple that of a Gaussian with as many waves."""
        low = self.bounds[kernel][0]
        return low if kernel < self.ripples else 1 / (1 / low + self.fastest[kernel - self.ripples] / self.phase)

    @property
    def phase(self) -> float:
        """The s k beyond which (s k)^(lmax + 2) exp(-(s k)^2 / 2), the waves of outputs and their second derivatives,
        is below ``error``; in space, the r / s beyond which kernels of that kind are."""
        phase = 2 * math.sqrt(self.lmax + 2)  # beyond the maximum, from where it falls
        for _ in range(40):  # x^n exp(-x^2 / 2) = error, solved for the x of the exponential
            phase = math.sqrt(2 * math.log(1 / self.error) + 2 * (self.lmax + 2) * math.log(phase))
        return phase

    def waves_of(self, parts: "Sequence[Part]") -> list[tuple[int, int, int]] | None:
        """The bounds of each part from those of the narrowest kernel."""
        if self.max_waves is None:
            return None
        least = min(map(self.least, range(len(self.bounds))))
        first, second, third = self.max_waves
        ratios = [least / self.least(part.kernel) for part in parts]
        return [(math.ceil(first * r), math.ceil(second * r), math.ceil(third * r)) for r in ratios]


class EwaldNodes(NamedTuple):
    """Positions (..., 3) in double precision, queries and keys (..., H, C, A) and values (..., H, V): of flat nodes
    (T, ...), or of packed graphs (B, N, ...) with zeros for padding."""

    pos: Tensor
    query: Tensor
    key: Tensor
    value: Tensor


def every_product(lmax: int) -> Product:
    """Values times every harmonic up to a degree, each apart: (..., V) to (..., V (lmax + 1)**2)."""

    def product(features: Tensor, harmonics: Tensor, degree: int) -> Tensor:
        products = features[..., None] * harmonics[..., None, :]
        return torch.nn.functional.pad(products, (degree**2, (lmax + 1) ** 2 - (degree + 1) ** 2)).flatten(-2)

    return product


class Part(NamedTuple):
    r"""What is summed over the waves of one lattice: a kernel ("gaussian", "potential", "ripple"), or a part of a
    potential.

    With a width S beyond its own, the "far" part is :math:`s\, \mathrm{erf}(r / \sqrt 2 S) / r`, which has few waves,
    and what is left falls as a Gaussian does: "near". Waves and margins hang on the least and the largest width.
    """

    kernel: int
    least: float
    largest: float
    kind: str

    @property
    def ends(self) -> bool:
        """Whether it falls so slowly that it has to end where there are no more nodes."""
        return self.kind in ("potential", "far")


def spectrum(
    parts: Sequence[Part], ends: Tensor, square: Tensor, width: Tensor, wavenumber: Tensor | None = None
) -> Tensor:
    """As waves of square wavenumbers (B, D, 1), for widths and, where there are ripples, wavenumbers (D, H), zero for
    others; one that ends without 4 pi / k^2. Of whole kernels, of which potentials are told by ``ends`` (D, 1), or of
    one part of a potential."""
    first = parts[0]
    wave = width * (-square * (first.largest**2 if first.kind == "far" else width.square()) / 2).exp()
    if first.kind == "near":
        beyond = (first.largest**2 - width.square()) / 2
        some = torch.where(square == 0, 1.0, square)
        return 4 * math.pi * wave * torch.where(square == 0, beyond, -torch.expm1(-some * beyond) / some)
    if wavenumber is None:
        return wave * torch.where(ends, 1.0, (2 * math.pi) ** 1.5 * width.square())
    return torch.where(ends, wave, (2 * math.pi) ** 1.5 * width**3 * _ripples(square, width, wavenumber))


def _ripples(square: Tensor, width: Tensor, wavenumber: Tensor) -> Tensor:
    """Half of (1 - kappa / k) exp(-s^2 (k - kappa)^2 / 2) and the same with a plus; of kappa = 0 a Gaussian."""
    some = torch.where(square == 0, 1.0, square)
    k = torch.where(square == 0, 0.0, some.sqrt())
    fewer = -2 * k * wavenumber * width.square()
    slope = torch.where(square == 0, -2 * wavenumber * width.square(), torch.expm1(fewer) / some.sqrt())
    return (-(width * (k - wavenumber)).square() / 2).exp() * (1 + fewer.exp() + wavenumber * slope) / 2


def parts_of(kernels: EwaldKernels, splits: Sequence[float] = ()) -> list[Part]:
    """Of all kernels; potentials in two where there are widths to split them at, one a potential."""
    out = []
    for c, (low, high) in enumerate(kernels.bounds):
        if c >= kernels.ripples:
            out.append(Part(c, kernels.least(c), high, "ripple"))
        elif c < kernels.gaussians or not splits:
            out.append(Part(c, low, high, "gaussian" if c < kernels.gaussians else "potential"))
        else:
            out += split_at(c, low, splits[c - kernels.gaussians])
    return out


def split_at(kernel: int, low: float, width: float) -> list[Part]:
    """Near and far part of a potential."""
    return [Part(kernel, low, width, "near"), Part(kernel, width, width, "far")]
