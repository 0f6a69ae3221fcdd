"""Ewald attention and energies of charges as graph modules of NequIP. nequip-package takes this file along, so it
imports little."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from e3nn import o3
from nequip.data import AtomicDataDict
from nequip.nn import GraphModuleMixin, model_modifier, with_edge_vectors_
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.torch_state import is_traced

from ..e3nn.atoms_attention import Atoms, AtomsEwaldAttention
from ..e3nn.atoms_charges import energies_beside_kspace, interact, layer_of_charges

ENERGY, SHARED = "long_range_energy", "shared_charge"


class LongRangeModule(GraphModuleMixin, torch.nn.Module):
    """The base class of modules with sums over all atoms of a frame: what frames are, and along which vectors they
    repeat."""

    max_num_nodes: int | None
    repeats: tuple[bool, ...] | None

    def __init__(
        self, method: str, max_num_nodes: int | None, irreps_in: Mapping[str, Any], required: Sequence[str],
        irreps_out: dict[str, Any],
    ) -> None:  # fmt: skip
        super().__init__()
        self.max_num_nodes = max_num_nodes
        self.repeats = (False,) * 3 if method == "direct" else None
        fields = {AtomicDataDict.CELL_KEY: "1o", AtomicDataDict.PBC_KEY: None, AtomicDataDict.TOTAL_CHARGE_KEY: None}
        GraphModuleMixin._init_irreps(
            self, irreps_in=dict(irreps_in) | fields, required_irreps_in=list(required), irreps_out=irreps_out
        )

    def read_frames(self, data: AtomicDataDict.Type) -> dict[str, Any]:
        """Positions, cells, and the frame of each atom, as layers of e3nn take them."""
        if AtomicDataDict.LMP_MLIAP_DATA_KEY in data or AtomicDataDict.NUM_LOCAL_GHOST_NODES_KEY in data:
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS' ML-IAP gives each process a part of them: use ASE, "
                "or pair_nequip on one process"
            )
        pos, batch = data[AtomicDataDict.POSITIONS_KEY], data.get(AtomicDataDict.BATCH_KEY)
        cell, pbc = data.get(AtomicDataDict.CELL_KEY), data.get(AtomicDataDict.PBC_KEY)
        sizes, traced = {}, is_traced(pos)
        if cell is not None and (pbc is None or (traced and self.repeats is not None)):
            cell, pbc = self._repeating(data, cell.view(-1, 3, 3), pbc)
        if batch is not None:
            sizes["batch_size"] = data[AtomicDataDict.NUM_NODES_KEY].shape[0]
            if traced:
                sizes["max_num_nodes"] = pos.shape[0] if self.max_num_nodes is None else self.max_num_nodes
        return {"pos": pos, "batch": batch, "cell": cell, "pbc": pbc, **sizes}

    def read_atoms(self, data: AtomicDataDict.Type) -> Atoms:
        """Types, edges and total charges."""
        vectors = with_edge_vectors_(data, with_lengths=False)[AtomicDataDict.EDGE_VECTORS_KEY]
        types, charge = data[AtomicDataDict.ATOM_TYPE_KEY].flatten(), data.get(AtomicDataDict.TOTAL_CHARGE_KEY)
        return Atoms(types, data[AtomicDataDict.EDGE_INDEX_KEY], vectors, None if charge is None else charge.flatten())

    def _repeating(self, data: AtomicDataDict.Type, cell: Tensor, pbc: Tensor | None) -> tuple[Any, Any]:
        """The cell, and a mask (graphs, 3) of the lattice vectors along which frames repeat, which comes from edges if
        there is no ``pbc``. Both are None if no frame repeats."""
        if pbc is None:
            crossing = (data[AtomicDataDict.EDGE_CELL_SHIFT_KEY] != 0).to(cell.dtype)
            batch, source = data.get(AtomicDataDict.BATCH_KEY), data[AtomicDataDict.EDGE_INDEX_KEY][0]
            graph = torch.zeros_like(source) if batch is None else batch[source]
            crossed = cell.new_zeros(cell.shape[0], 3).index_add(0, graph, crossing) > 0
        else:
            crossed = pbc.view(-1, 3)
        if self.repeats is None:
            told, words = crossed | (cell == 0).all(2), "an edge must cross each lattice vector that is not zero, or "
            torch._assert_async(
                told.all(), words + "nequip-compile get --modifiers far_crystals, far_slabs or far_molecules"
            )
            return cell, crossed
        repeats = torch.tensor(self.repeats, device=cell.device).expand_as(crossed)
        torch._assert_async((repeats | ~crossed).all(), "no edge must cross lattice vectors that do not repeat")
        return (cell, repeats) if any(self.repeats) else (None, None)

    @classmethod
    def _all_are(cls, model: torch.nn.Module, *repeats: bool) -> torch.nn.Module:
        for module in model.modules():
            if isinstance(module, cls):
                module.repeats = repeats
        return model

    @model_modifier(persistent=False)
    @classmethod
    def far_crystals(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that repeat along all lattice vectors, whether edges cross them or not."""
        return cls._all_are(model, True, True, True)

    @model_modifier(persistent=False)
    @classmethod
    def far_slabs(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that repeat along the first two lattice vectors."""
        return cls._all_are(model, True, True, False)

    @model_modifier(persistent=False)
    @classmethod
    def far_molecules(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that do not repeat, whatever their cells are."""
        return cls._all_are(model, False, False, False)


@checks.arguments
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
    times ``charge`` of the data, or to zero if the data have none
    (:class:`tg_equiattn.integrations.e3nn.atoms_attention.NeutralSources`).

    Args:
        width: Width of the narrowest kernel, in the unit of positions. Use about half of the model's ``r_max``:
            messages already model shorter distances.
        method: ``"direct"`` sums over all pairs of nodes, in frames that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every frame: direct sums if it is open, and reciprocal sums
            if it repeats. In a wide cell with few atoms, parts of kernels that decay fast are summed over pairs and
            their nearest images. From some thousand atoms on, non-uniform transforms are used where they are installed
            and faster. In compiled models ``"ewald"`` leaves out what open frames need, ``"direct"`` what crystals
            need, and ``"auto"`` computes both.
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
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. It is at least twice ``width``.
            Each width is learned within an octave of its own between the two.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        kernels: Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
            ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains. Each
            layer keeps a copy. The default is ``None``.
        heads: Number of heads, 1 by default, each with its own queries and keys and a share of the values. They share
            kernels.
        lmax: Highest degree of the solid harmonics, 1 by default.
        output_scale: Constant by which sums are divided, 1 by default: the size of outputs of a new layer with 1.
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
        self, width: float, *, method: str = "auto", max_hkl: Sequence[int] | None = None,
        features: checks.Count | None = 16, gain: float = 0.0, max_num_nodes: checks.Count | None = None,
        type_names: Sequence[str], r_max: float, avg_num_neighbors: float = 1.0, irreps_in: Mapping[str, Any],
        **attn_kwargs: Any,
    ) -> None:  # fmt: skip
        field = AtomicDataDict.NODE_FEATURES_KEY
        super().__init__(method, max_num_nodes, irreps_in, [field], {field: irreps_in.get(field)})
        irreps = o3.Irreps(irreps_in[field])
        few = irreps if features is None else o3.Irreps([(min(mul, features), ir) for mul, ir in irreps])
        max_hkl = None if max_hkl is None else tuple(max_hkl)  # lists of configuration files cannot be packaged
        self.attention = AtomsEwaldAttention(
            few, few, num_elements=len(type_names), cutoff=r_max, avg_num_neighbors=avg_num_neighbors, width=width,
            method=method, max_hkl=max_hkl, **attn_kwargs,
        )  # fmt: skip
        self.before, self.after = o3.Linear(irreps, few), o3.Linear(few, irreps)
        self.gain = torch.nn.Parameter(torch.tensor(float(gain)))

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        graphs, x = self.read_frames(data), data[AtomicDataDict.NODE_FEATURES_KEY]
        attended = self.attention(self.before(x), atoms=self.read_atoms(data), **graphs)
        data[AtomicDataDict.NODE_FEATURES_KEY] = x + self.gain * self.after(attended)
        return data


@checks.arguments
class LongRangeCharges(LongRangeModule):
    r"""Energies of charges of each type of atoms: a graph module for :class:`nequip.nn.SequentialGraphNetwork`, after
    the energies of atoms.

    .. math:: E_{\mathrm{long}} = \frac{e^2}{8 \pi \epsilon_0} \sum_{ij} S_i S_j\,
        \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}

    This is :class:`tg_equiattn.nn.ChargeInteraction` in eV and Å. It adds fields to the data of the model:
    ``long_range_energy`` of each frame, ``charges``, ``polarization`` (the dipole of each frame in e Å) and, if asked
    for, ``born_effective_charges``. Frames repeat as :class:`LongRange` describes it.

    With ``charges="predicted"`` it is :class:`tg_equiattn.nn.PredictedChargeInteraction`: charges are learned from the
    scalars of the last layer and sum to the total charge of each frame. The field ``shared_charge`` of a frame is what
    was missing to it.

    Training needs the callback :class:`FitCharges`, which fits a part of the energies for each type to the data.

    Args:
        charges: Charge of each type by its name, in e: oxidation states, or Born effective charges divided by the root
            of ``dielectric``. The charges of a frame must sum to its ``charge`` divided by the same root. "predicted"
            learns charges, without ``learn`` and ``born_charges``.
        learn: True if a factor of all charges and transfers of charge between neighbors are learned, for data with
            labels of charge. "scale" lets :class:`FitCharges` fit the factor to forces. The default, ``False``, holds
            charges.
        dielectric: Electronic dielectric constant of the data. Born charges are derivatives of the dipole times its
            root. The default is 1.
        born_charges: True if the model returns Born effective charges, with charges that are given. Compiled models
            never do. The default is ``False``.
        width: Width s of the kernel, in the unit of positions. The default, ``None``, means 0.4 ``r_max``, or 0.6
            ``r_max`` for predicted charges, so that the kernel does not compete with messages.
        exclude_near: With predicted charges, True, the default, takes their energy within ``r_max`` off again, which
            messages can learn. False keeps it, as checkpoints of earlier states have it.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of the kernel, 1e-4 by
            default.
        method: ``"direct"``, ``"ewald"``, ``"nufft"`` or ``"auto"``, as in :class:`LongRange`.
        max_hkl: Largest Miller indices along the three lattice vectors. The default, ``None``, reads cells. Compiled
            models need it if frames repeat.
        max_num_nodes: Number of atoms of the largest frame, for models that are compiled for batches. The default,
            ``None``, means all atoms of the batch.
        type_names: Names of the types of atoms, as NequIP's modules get them.
        r_max: Cutoff of the model's edges, in the unit of positions.
        avg_num_neighbors: Constant by which transfers are divided, 1 by default.
        irreps_in: Irreps of fields, as NequIP's modules pass them on.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one; in a call, if a type has no charge, or
            if charges of a frame do not sum to its total charge.
    """

    def __init__(
        self, charges: Mapping[str, float] | Literal["predicted"], *, learn: bool | Literal["scale"] = False,
        dielectric: float = 1.0, born_charges: bool = False, width: float | None = None, exclude_near: bool = True,
        error: float = 1e-4, method: str = "auto", max_hkl: Sequence[int] | None = None,
        max_num_nodes: int | None = None, type_names: Sequence[str], r_max: float, avg_num_neighbors: float = 1.0,
        irreps_in: Mapping[str, Any],
    ) -> None:  # fmt: skip
        field, features = AtomicDataDict.PER_ATOM_ENERGY_KEY, AtomicDataDict.NODE_FEATURES_KEY
        outputs = {ENERGY: "0e", AtomicDataDict.CHARGE_KEY: "0e", AtomicDataDict.POLARIZATION_KEY: "1o"}
        outputs |= {AtomicDataDict.BORN_CHARGE_KEY: None} if born_charges else {}
        outputs |= {SHARED: "0e"} if charges == "predicted" else {}
        super().__init__(method, max_num_nodes, irreps_in, [field, features], outputs)
        self.predicted, self.search, self.born_charges = charges == "predicted", learn == "scale", born_charges
        if self.predicted and born_charges:
            raise ValueError(
                'charges must be a charge for each type, or "predicted" without learn and born_charges, got '
                f"{charges!r} with born_charges={born_charges!r}"
            )
        irreps = o3.Irreps(irreps_in[features])
        self.interaction: Any = layer_of_charges(
            charges, learn, type_names, "type", (irreps, irreps), width, r_max, exclude_near,
            avg_num_neighbors=avg_num_neighbors, dielectric=dielectric, error=error, method=method,
            max_hkl=None if max_hkl is None else tuple(max_hkl),  # lists of configuration files cannot be packaged
        )  # fmt: skip
        self.interaction.offsets.fill_(torch.nan)  # until they are fitted
        self.kspace = False

    @model_modifier(persistent=False)
    @classmethod
    def charges_in_lammps(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile without the energy of charges, which LAMMPS's kspace adds
        (:func:`tg_equiattn.integrations.nequip.write_lammps`)."""
        for module in model.modules():
            if isinstance(module, cls):
                module.kspace = True
        return model

    def forward(self, data: AtomicDataDict.Type) -> AtomicDataDict.Type:
        if self.kspace:
            each = data[AtomicDataDict.PER_ATOM_ENERGY_KEY]
            types = data[AtomicDataDict.ATOM_TYPE_KEY].flatten()[: each.shape[0]]  # of ML-IAP, without ghost atoms
            added = energies_beside_kspace(self.interaction).index_select(0, types)[:, None]
            data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = each + added.to(each.dtype)
            return data
        layer, graphs = self.interaction, self.read_frames(data)
        fitted = ~layer.offsets.isnan().any()
        checks.must_hold(fitted, "charges must be fitted before training: add FitCharges to the trainer's callbacks")
        atoms = self.read_atoms(data)
        features = data[AtomicDataDict.NODE_FEATURES_KEY]
        out = interact(layer, atoms, features, graphs, neutral=not self.training)
        energies, each = out.energies[:, None], data[AtomicDataDict.PER_ATOM_ENERGY_KEY]
        batch = torch.zeros_like(atoms.elements) if graphs["batch"] is None else graphs["batch"]
        data[ENERGY] = energies.new_zeros(out.dipole.shape[0], 1).index_add(0, batch, energies)
        data[AtomicDataDict.PER_ATOM_ENERGY_KEY] = each + (energies - out.offsets[:, None]).to(each.dtype)
        data[AtomicDataDict.CHARGE_KEY], data[AtomicDataDict.POLARIZATION_KEY] = out.charges[:, None], out.dipole
        if self.predicted:
            data[SHARED] = out.shared[:, None]
        if self.born_charges and not is_traced(energies):
            data[AtomicDataDict.BORN_CHARGE_KEY] = layer.born_charges(out.dipole, graphs["pos"], self.training)
        return data
