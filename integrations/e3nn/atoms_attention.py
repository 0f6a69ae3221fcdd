"""Ewald attention between atoms, for the adapters of MACE and NequIP."""

from __future__ import annotations

from typing import Any

from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn.nn.waves.neutral_sources import Atoms

from .ewald_attention import IrrepsEwaldAttention


@compile_mode("unsupported")
class AtomsEwaldAttention(IrrepsEwaldAttention):
    r"""Ewald attention that reads elements, with neutral sources of Coulomb kernels.

    An embedding of the element is added to the scalars from which queries, keys and values are computed. The term of an
    atom with itself is left out, but not the terms with its periodic images. Sources of Coulomb kernels are those of
    :class:`tg_equiattn.nn.waves.neutral_sources.NeutralSources`.

    Parameters
    ----------
    irreps_in : `e3nn.o3.Irreps`
        Irreps of the input, with invariant scalars.

    irreps_out : `e3nn.o3.Irreps`
        Irreps of the output.

    num_elements : int
        Number of elements.

    cutoff : float
        Largest length of an edge.

    avg_num_neighbors : float
        Constant by which transfers along edges are divided.

    attn_kwargs
        Settings of `IrrepsEwaldAttention`.
    """

    def __init__(
        self, irreps_in: o3.Irreps, irreps_out: o3.Irreps | str, *, num_elements: int, cutoff: float,
        avg_num_neighbors: float, **attn_kwargs: Any,
    ) -> None:  # fmt: skip
        if not o3.Irreps(irreps_in).count(o3.Irrep("0e")):
            raise ValueError(f"irreps_in must have scalars 0e, which elements join, got {irreps_in}")
        super().__init__(irreps_in, irreps_out, **attn_kwargs)
        self.neutral = self.neutral_sources(num_elements, cutoff, avg_num_neighbors)

    def forward(  # type: ignore[override]  # atoms are required
        self, x: Tensor, pos: Tensor, batch: Tensor | None = None, *, atoms: Atoms, **graphs: Any
    ) -> Tensor:
        """Evaluate. ``atoms`` are the elements, edges and charges; the other arguments are those of
        `IrrepsEwaldAttention`."""
        return self.evaluate(x, pos, batch, neutral=self.neutral, atoms=atoms, **graphs)
