"""Gaussians."""

import math

from torch import Tensor

from .kernel import Kernel, per_wavenumber


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

    def radial_functions(self, t: Tensor) -> Tensor:
        return (-t).exp()[None]

    def transform(self, square: Tensor, coulomb: Tensor, index: Tensor) -> Tensor:
        widths = per_wavenumber(self.widths, index, square)
        return (2 * math.pi) ** 1.5 * widths**3 * (-square * widths.square() / 2).exp()
