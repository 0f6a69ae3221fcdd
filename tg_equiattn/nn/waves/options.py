"""Options of Ewald attention, checked once for all hosts, and the kernels that follow from them."""

# No string annotations: torch.package, with which NequIP packages models, cannot load dataclasses that have them.

import dataclasses
import math
from collections.abc import Sequence

from ... import checks
from ...functional.waves.methods import METHODS


@dataclasses.dataclass(frozen=True)
class EwaldOptions:
    """Options of :class:`EwaldAttention`, by its names."""

    width: float
    max_width: float | None
    num_gaussians: int
    num_coulomb: int
    num_oscillating: int
    heads: int
    lmax: int
    avg_num_nodes: float
    error: float
    method: str
    max_hkl: Sequence[int] | None

    def __post_init__(self) -> None:
        checks.positive_number(width=self.width, avg_num_nodes=self.avg_num_nodes)
        if self.max_width is not None:
            checks.positive_number(max_width=self.max_width)
            if self.max_width < 2 * self.width:
                raise ValueError(
                    f"max_width must be at least an octave above width, {2 * self.width:g}, got {self.max_width:g}"
                )
        checks.positive(heads=self.heads)
        for name in ("num_gaussians", "num_coulomb", "num_oscillating", "lmax"):
            n = getattr(self, name)
            if isinstance(n, bool) or not isinstance(n, int) or n < 0:
                raise ValueError(f"{name} must be an integer from 0 on, got {n!r}")
        if not any(self.counts):
            raise ValueError("num_gaussians, num_coulomb or num_oscillating must be positive, got 0 for all of them")
        if not isinstance(self.error, float) or not 1e-14 <= self.error <= 0.1:
            raise ValueError(f"error must be in [1e-14, 0.1], got {self.error!r}")
        checks.choice("method", self.method, METHODS)
        if self.max_hkl is not None:
            if not isinstance(self.max_hkl, Sequence) or len(self.max_hkl) != 3:
                raise ValueError(f"max_hkl must be three integers, along each lattice vector, got {self.max_hkl!r}")
            for n in self.max_hkl:
                checks.positive(max_hkl=n)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Kernels of each kind: Gaussians, Coulomb, oscillating Gaussians."""
        return self.num_gaussians, self.num_coulomb, self.num_oscillating

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """The octave of each width. Those of Gaussians, and those of Coulomb kernels, are spread from ``width`` to
        ``max_width``; oscillating Gaussians all have the last one."""
        ratio = (8.0 if self.max_width is None else self.max_width / self.width) / 2
        spread = (self.num_gaussians, self.num_coulomb)
        steps = [n / max(1, count - 1) for count in spread for n in range(count)] + [1.0] * self.num_oscillating
        lows = [self.width * ratio**step for step in steps]
        return tuple((low, 2 * low) for low in lows)

    @property
    def band(self) -> float:
        """The range of wavenumbers that each oscillating Gaussian has: all of them reach from 0 to wavelengths of 4/3
        ``width``."""
        return 1.5 * math.pi / self.width / max(1, self.num_oscillating)

    @property
    def why_not_shared(self) -> str | None:
        """The reason why the nodes of a graph cannot be shared among processes, if there is one."""
        return "method='direct', which needs pairs of nodes of two processes" if self.method == "direct" else None
