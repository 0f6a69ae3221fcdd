"""Ewald attention as a graph module of NequIP. nequip-package takes this file along, so it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from e3nn import o3
from nequip.data import AtomicDataDict
from nequip.nn import GraphModuleMixin, with_edge_vectors_
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.waves.neutral_sources import Atoms

from ..e3nn.atoms_attention import AtomsEwaldAttention
from .frames import LongRangeModule


@checks.python_numbers
class LongRange(LongRangeModule):
    r"""Ewald attention between all atoms of a frame: a graph module for :class:`nequip.nn.SequentialGraphNetwork`.

    .. math:: x' = x + g\, B\, \mathrm{attention}(A x)

    with a learned ``gain`` g and linear maps A to fewer features and B back. NequIP strains positions and cells, so
    forces, virials and stress include it. Frames repeat along the lattice vectors that ``pbc`` names. NequIP's compiled
    models do not get ``pbc``: there frames repeat along the lattice vectors that edges cross. If no edge crosses a
    lattice vector, we cannot tell a molecule in a box from a crystal with vacuum, so the frame is refused, unless
    ``nequip-compile --modifiers`` says what all frames are: ``far_crystals``, ``far_slabs`` (along a and b) or
    ``far_molecules``.

    Attention also reads the element, so that atoms without neighbors take part. An atom does not attend to itself,
    so the energy of a single atom stays as it was. Sources of Coulomb kernels sum over each frame to a learned constant
    times ``charge`` of the data, zero without one (:class:`tg_equiattn.nn.waves.neutral_sources.NeutralSources`).

    Args:
        width: Width of the narrowest kernel, in the unit of positions. Use about half of the model's ``r_max``:
            messages already model shorter distances.
        method: ``"direct"`` sums over all pairs of nodes, in frames that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every frame: direct sums below 4,000 atoms if it is open,
            reciprocal sums if it repeats, and non-uniform transforms if it is larger. In compiled models ``"ewald"``
            leaves out what open frames need, ``"direct"`` what crystals need, and ``"auto"`` computes both.
        max_hkl: Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. The
            default, ``None``, reads cells. Compiled models need it if frames repeat.
        features: Largest number of channels of each irrep in attention. The default is 16, and ``None`` means all
            channels. More channels take more time.
        gain: Initial value of the learned gain. The default, 0, leaves a trained model as it is.
        max_num_nodes: Number of atoms of the largest frame, for models that are compiled for batches. The default,
            ``None``, means all atoms of the batch, so that each frame takes as long as one frame with all of them.
        type_names: Names of the types of atoms, as NequIP's modules get them.
        r_max: Cutoff of the model's edges, in the unit of positions.
        avg_num_neighbors: Constant by which transfers of Coulomb sources along edges are divided, 1 by default.
        irreps_in: Irreps of fields, as NequIP's modules pass them on.
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. Each width is learned within an
            octave of its own between the two.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        kernels: Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
            ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains. Each
            layer keeps a copy. The default is ``None``.
        heads: Number of heads, 1 by default, each with its own queries, keys and widths and a share of the values.
        lmax: Highest degree of the solid harmonics, 1 by default.
        avg_num_nodes: Constant by which sums are divided, 1 by default: the number of nodes a node attends to on
            average.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Example::

        layer = network.layer0_convnet
        far = LongRange(2.5, type_names=["H", "O"], r_max=5.0, irreps_in=layer.irreps_out)
        network.insert("far", far, after="layer0_convnet")
    """

    def __init__(
        self,
        width: float,
        *,
        method: str = "auto",
        max_hkl: Sequence[int] | None = None,
        features: int | None = 16,
        gain: float = 0.0,
        max_num_nodes: int | None = None,
        type_names: Sequence[str],
        r_max: float,
        avg_num_neighbors: float = 1.0,
        irreps_in: Mapping[str, Any],
        **attn_kwargs: Any,
    ) -> None:
        super().__init__(method, max_num_nodes)
        field = AtomicDataDict.NODE_FEATURES_KEY
        GraphModuleMixin._init_irreps(
            self,
            irreps_in=dict(irreps_in)
            | {AtomicDataDict.CELL_KEY: "1o", AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None},
            required_irreps_in=[field],
            irreps_out={field: irreps_in.get(field)},
        )
        given = {"features": features, "max_num_nodes": max_num_nodes}
        checks.positive(**{name: n for name, n in given.items() if n is not None})
        irreps = o3.Irreps(irreps_in[field])
        few = irreps if features is None else o3.Irreps([(min(mul, features), ir) for mul, ir in irreps])
        max_hkl = None if max_hkl is None else tuple(max_hkl)  # lists of configuration files cannot be packaged
        self.attention = AtomsEwaldAttention(
            few, few, num_elements=len(type_names), cutoff=r_max, avg_num_neighbors=avg_num_neighbors, width=width,
            method=method, max_hkl=max_hkl, **attn_kwargs,
        )  # fmt: skip
        self.num_types = len(type_names)
        self.before, self.after = o3.Linear(irreps, few), o3.Linear(few, irreps)
        self.gain = torch.nn.Parameter(torch.tensor(float(gain)))

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        graphs, x = self.read_frames(data), data[AtomicDataDict.NODE_FEATURES_KEY]
        found = self.attention(self.before(x), atoms=self._atoms(data, x), **graphs)
        data[AtomicDataDict.NODE_FEATURES_KEY] = x + self.gain * self.after(found)
        return data

    def _atoms(self, data: AtomicDataDict.Type, x: Tensor) -> Atoms:
        vectors = with_edge_vectors_(data, with_lengths=False)[AtomicDataDict.EDGE_VECTORS_KEY]
        types, charge = data[AtomicDataDict.ATOM_TYPE_KEY].flatten(), data.get(AtomicDataDict.TOTAL_CHARGE_KEY)
        return Atoms(
            (types[:, None] == torch.arange(self.num_types, device=x.device)).to(x.dtype),
            data[AtomicDataDict.EDGE_INDEX_KEY], vectors.square().sum(1),
            None if charge is None else charge.flatten(),
        )  # fmt: skip
