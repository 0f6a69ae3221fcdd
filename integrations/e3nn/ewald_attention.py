"""Ewald attention on any irreps."""

from __future__ import annotations

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.waves.ewald_network import EwaldLayer, EwaldNetwork, EwaldOptions
from tg_equiattn.nn.waves.spherical_features import Irrep
from tg_equiattn.ragged import Ragged

from .layout import Features, check_features, describe


@compile_mode("unsupported")
class IrrepsEwaldAttention(EwaldLayer):
    r"""Attention in space through Gaussians and smeared Coulomb potentials: molecules, slabs, crystals, any size.

    :class:`tg_equiattn.nn.EwaldAttention`, which says what it computes, how exact, and its errors and sources, on any
    irreps: queries, keys and values are linear maps of the features, inner products are over all their irreps, and
    products of values with harmonics those of Clebsch and Gordan.

    Parameters
    ----------
    irreps_in, irreps_out : `e3nn.o3.Irreps`
        any irreps

    width, max_width, kernels, heads, lmax, avg_num_nodes, error, method, max_waves
        as there: ``width`` is that of the narrowest kernel, about half the cutoff of the messages beside it, ``lmax``
        the highest l of spherical harmonics, ``avg_num_nodes`` what sums are divided by

    Examples
    --------
    >>> import torch
    >>> attention = IrrepsEwaldAttention("16x0e + 8x1o + 4x2e", "16x0e + 8x1o", width=1.0)
    >>> batch = torch.tensor([0] * 5 + [1] * 7)
    >>> cell = 4 * torch.eye(3).expand(2, 3, 3)
    >>> pbc = torch.tensor([[False, False, False], [True, True, True]])
    >>> attention(torch.randn(12, 60), torch.randn(12, 3), batch, cell=cell, pbc=pbc).shape
    torch.Size([12, 40])
    """

    def __init__(
        self,
        irreps_in: o3.Irreps | str,
        irreps_out: o3.Irreps | str,
        *,
        width: float,
        max_width: float | None = None,
        kernels: int | tuple[int, ...] = 8,
        heads: int = 1,
        lmax: int = 1,
        avg_num_nodes: float = 1.0,
        error: float = 1e-4,
        method: str = "auto",
        max_waves: tuple[int, int, int] | None = None,
    ) -> None:
        irreps_in, irreps_out = o3.Irreps(irreps_in), o3.Irreps(irreps_out)
        for name, irreps in (("irreps_in", irreps_in), ("irreps_out", irreps_out)):
            if not irreps.dim:
                raise ValueError(f"{name} must have at least one irrep, got {irreps}")
        options = EwaldOptions(width, max_width, kernels, heads, lmax, avg_num_nodes, error, method, max_waves)
        given, wanted = ([Irrep(ir.l, ir.p, mul) for mul, ir in irreps] for irreps in (irreps_in, irreps_out))
        super().__init__(EwaldNetwork(given, wanted, _coupling, options, "irreps_out"))
        self.irreps_in, self.irreps_out = irreps_in, irreps_out
        self._features = Features.of(irreps_in)

    def forward(
        self,
        x: Tensor,
        pos: Tensor,
        batch: Tensor | None = None,
        *,
        cell: Tensor | None = None,
        pbc: Tensor | None = None,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Tensor:
        """Evaluate on features of shape ``(nodes, irreps_in.dim)`` and positions of shape ``(nodes, 3)``, to
        ``(nodes, irreps_out.dim)``; other arguments as of :class:`tg_equiattn.nn.EwaldAttention`, but as PyG batches
        them, cells may be ``(3 graphs, 3)`` and pbc ``(3 graphs,)``."""
        given = self.attention.given
        check_features("x", x, self._features, self.attention.octaves)
        pos = checks.positions(pos, (x.shape[0], 3), x, "attention depends on them")
        ragged = Ragged.flat(x, batch, batch_size, max_num_nodes, self.ranks)
        blocks = x.split([irrep.rows for irrep in given], 1)
        blocks = [block.unflatten(1, (irrep.channels, irrep.size)) for block, irrep in zip(blocks, given, strict=True)]
        return torch.cat([block.flatten(1) for block in self.attention(blocks, pos, ragged, cell, pbc)], 1)

    def __repr__(self) -> str:
        return describe(self)


def _coupling(first: int, second: int, out: int) -> Tensor:
    return o3.wigner_3j(first, second, out, dtype=torch.float64)
