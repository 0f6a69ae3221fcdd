"""Ewald attention between atoms, for the adapters of MACE and NequIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from e3nn import o3
from e3nn.util.jit import compile_mode
from torch import Tensor

from tg_equiattn.checks import of_values
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


def total_charge_of(data: Mapping[str, Any]) -> Tensor | None:
    """The total charge of each graph, which the data of hosts name ``total_charge`` or ``charge``; ``None`` without.

    Raises:
        ValueError: if both are given and differ.
    """
    found = [data[name].flatten() for name in ("total_charge", "charge") if data.get(name) is not None]
    if len(found) == 2:
        _check_equal(*found)
    return found[0] if found else None


@of_values
def _check_equal(total_charge: Tensor, charge: Tensor) -> None:
    if not torch.equal(total_charge.double(), charge.double()):
        raise ValueError(
            f"total_charge and charge are two names of the total charge and must be equal, got {total_charge.tolist()} "
            f"and {charge.tolist()}: leave out one of them"
        )
