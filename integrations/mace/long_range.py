"""Ewald attention after product blocks of a MACE model, or in addition to its last readout."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from e3nn import o3
from mace.modules.blocks import EquivariantProductBasisBlock, LinearReadoutBlock, NonLinearReadoutBlock
from mace.modules.models import MACE, ScaleShiftMACE
from mace.modules.utils import get_outputs
from mace.modules.wrapper_ops import get_layout
from torch import Tensor

from tg_equiattn.checks import of_values, python_numbers

from ..e3nn.atoms_attention import AtomsEwaldAttention
from .charges import charges_for, fit_start, interact
from .features import CALCULATED, CALL, Call, LongRangeFeatures
from .labels import lacking_energies, net_forces


@python_numbers
def add_long_range(
    model: MACE,
    after: Sequence[int] | Literal["energies"] | None = None,
    *,
    batch: Any,
    charges: Mapping[str, float] | None = None,
    learn: bool = False,
    dielectric: float = 1.0,
    width: float | None = None,
    gain: float | None = None,
    **attn_kwargs: Any,
) -> MACE:
    r"""Add Ewald attention between all atoms to a MACE model, after some of its product blocks, in place.

    Features x of a block become

    .. math:: x' = x + g\, \sigma\, \mathrm{attention}(x / \sigma)

    with :math:`\sigma` their root mean square on ``batch``, one for each irrep. Attention is divided by its own root
    mean square on the same batch, so the learned ``gain`` g says how large it is relative to x. All parameters and
    buffers of the model keep their names and values: older checkpoints load with ``strict=False``, and a trained model
    predicts as before until g moves from 0.

    With ``after="energies"`` x stays as it is: attention of the last block's features is an energy of each atom, added
    in the same way to the energies of the last readout. Long-range energies are then sums over pairs of features of
    both atoms, as with charges, and energies of distant fragments add up.

    Forces, virials and stress include attention: cells are strained as positions are. Graphs repeat along the lattice
    vectors that ``pbc`` names; the wide cells that MACE puts around open directions are not read. Save with
    ``torch.save(model, path)``, run with ``MACECalculator`` or :class:`LongRangeCalculator`. TorchScript,
    ``compile_mode``, cuequivariance's layout, LAMMPS and quantities that MACE shares among edges (atomic stresses) are
    refused.

    Attention also reads the element, so that atoms without neighbors take part. An atom does not attend to itself,
    so the energy of a single atom stays as it was. Sources of Coulomb kernels sum over each graph to a learned
    constant times ``total_charge`` of the data, zero without one
    (:class:`tg_equiattn.nn.waves.neutral_sources.NeutralSources`).

    Args:
        model: A ``MACE`` or ``ScaleShiftMACE``, trained or not.
        after: Product blocks, counted from 0, that attention follows, or "energies". After the last block it changes
            scalars alone.
        batch: Sample of the training data, as MACE's loaders give it, on which the scales are measured. It should be
            typical of the data. With "energies" kernels are scaled by a fit to the forces of its labels, summed over
            each fragment that edges connect: messages leave these sums at zero. If no graph has two fragments, or
            without forces, the scale comes from a fit of long-range energies to the difference between labels and
            energies of the model, together with an energy of each element; long-range energies differ among graphs at
            least as much as these differences. Without labels it is the size of the outputs of the last readout.
        charges: Charge of each element by its symbol, in place of attention: energies of charges that interact by a
            smeared Coulomb kernel (:class:`tg_equiattn.nn.ChargeInteraction`) are added to those of the model.
            Oxidation states, or Born effective charges divided by the root of ``dielectric``. ``batch`` may be several
            batches then, to whose compositions an energy of each element is fitted, and to whose forces the scale of
            the model.
        learn: True if a factor of all charges and transfers between neighbors are learned. The default, ``False``,
            holds charges.
        dielectric: Electronic dielectric constant of the data, for charges. The default is 1.
        width: Width of the narrowest kernel, in the unit of positions. The default, ``None``, means half of the model's
            ``r_max``, or 0.4 ``r_max`` for charges: messages already model shorter distances.
        gain: Initial value of the learned gain. The default, ``None``, means 0, which leaves a model as it is. With
            "energies" it means 1 if the model does not explain the labels of ``batch`` yet, as before training.
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. Each width is learned within an
            octave of its own between the two.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        num_oscillating: Number of oscillating Gaussians, 0 by default. Use them for properties that alternate with the
            distance.
        heads: Number of heads, 1 by default, each with its own queries, keys and widths and a share of the values.
        lmax: Highest degree of the solid harmonics, 1 by default.
        avg_num_nodes: Constant by which sums are divided, 1 by default. It has no effect here, as the scale of
            attention is measured.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default.
        method: ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, takes for every graph the method that needs least time.
        max_hkl: Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. The
            default, ``None``, reads cells.

    Returns:
        The same model, with a class that says that it has long range.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.
        TypeError: for models that are not exactly ``MACE`` or ``ScaleShiftMACE``.

    Example::

        model = add_long_range(model, batch=next(iter(train_loader)))
        optimizer = torch.optim.Adam(model.parameters())
    """
    if type(model) not in _LONG_RANGE:
        raise TypeError(f"model must be a MACE or ScaleShiftMACE without long range, got {type(model).__qualname__}")
    if charges is not None:
        if after is not None or gain is not None:
            raise ValueError("after and gain must be None with charges, which need no attention: pass one or the other")
        batches = [batch] if hasattr(batch, "to_dict") or isinstance(batch, Mapping) else batch
        charged = charges_for(model, charges, learn, width, dielectric=dielectric, **attn_kwargs)
        factor = fit_start(model, charged, (_tensors(each, next(model.parameters())) for each in batches))
        if hasattr(model, "scale_shift"):
            model.scale_shift.scale.mul_(factor)
        model.__class__, model.long_range = _LONG_RANGE[type(model)], charged
        return model
    after = (0,) if after is None else after
    count, energies = len(model.products), after == "energies"
    blocks = (count - 1,) if energies else tuple(after)
    if not blocks or any(not isinstance(n, int) or not 0 <= n < count for n in blocks) or len({*blocks}) < len(blocks):
        raise ValueError(f'after must be "energies" or different blocks from 0 to {count - 1}, got {after!r}')
    targets = [model.readouts[-1]] if energies else [model.products[n] for n in blocks]
    for target in targets:
        if type(target) not in _WITH:
            allowed = " or ".join(kind.__name__ for kind in _WITH)
            raise TypeError(f"products and readouts of model must be {allowed}, got {type(target).__name__}")
    for layout in (get_layout(getattr(model.products[n], "cueq_config", None)) for n in blocks):
        if layout != "mul_ir":
            raise ValueError(
                f"model must have features in the layout mul_ir, as e3nn's, got {layout}: "
                "mace.cli.convert_cueq_e3nn makes such a model of one for cuequivariance"
            )
    like = next(model.parameters())
    data = _tensors(batch, like)
    layers, width = [], float(model.r_max) / 2 if width is None else width
    seen, energy = _seen(model, data, targets)  # before the model is touched
    labels, untrained = lacking_energies(model, data, energy) if energies else (None, False)
    net = net_forces(model, data) if energies else None
    gain = float(untrained) if gain is None else gain
    for n, (x, near) in zip(blocks, seen, strict=True):
        irreps = o3.Irreps(model.interactions[n].hidden_irreps)
        attention = AtomsEwaldAttention(
            irreps, "0e" if energies else irreps, width=width, num_elements=len(model.atomic_numbers),
            cutoff=float(model.r_max), avg_num_neighbors=float(model.interactions[n].avg_num_neighbors), **attn_kwargs,
        )  # fmt: skip
        attention = attention.to(like.device, like.dtype)
        layers.append(LongRangeFeatures(attention, gain, x, near, data, energies, labels, net))
    for target, layer in zip(targets, layers, strict=True):
        target.__class__, target.long_range = _WITH[type(target)], layer
    model.__class__ = _LONG_RANGE[type(model)]
    return model


def _tensors(batch: Any, like: Tensor) -> dict[str, Tensor]:
    """The tensors of a batch, with the device and the dtype of a model."""
    items = dict(batch.to_dict() if hasattr(batch, "to_dict") else batch).items()
    return {name: x.to(like.device, like.dtype if x.is_floating_point() else None)
            for name, x in items if isinstance(x, Tensor)}  # fmt: skip


class LongRangeProduct(EquivariantProductBasisBlock):
    """MACE's product block, followed by attention."""

    long_range: LongRangeFeatures

    def forward(self, node_feats: Tensor, sc: Tensor | None, node_attrs: Tensor) -> Tensor:
        near = super().forward(node_feats, sc, node_attrs)
        return near + self.long_range(near)


class _WithEnergies(torch.nn.Module):
    long_range: LongRangeFeatures

    def forward(self, x: Tensor, heads: Tensor | None = None) -> Tensor:
        CALL.get().energies = energies = self.long_range(x)
        return super().forward(x, heads) + energies


class LongRangeReadout(_WithEnergies, NonLinearReadoutBlock):
    """MACE's readout, plus energies by attention."""


class LongRangeLinearReadout(_WithEnergies, LinearReadoutBlock):
    """MACE's linear readout, plus energies by attention."""


_WITH: dict[type, type] = {
    EquivariantProductBasisBlock: LongRangeProduct,
    NonLinearReadoutBlock: LongRangeReadout,
    LinearReadoutBlock: LongRangeLinearReadout,
}


class _Refusal:
    """A class attribute that raises NotImplementedError when it is read. It replaces e3nn's attribute that says how a
    module is compiled."""

    def __get__(self, module: object, owner: type) -> NoReturn:
        raise NotImplementedError(
            "MACE with long range does not support TorchScript: save it with torch.save(model, path), run it with "
            "MACECalculator(model_paths=path). LAMMPS cannot run it: it gives each process a part of the atoms, and "
            "long range needs sums over all"
        )


class _LongRangeModel(MACE):
    """A MACE model that passes data and strain to its blocks with attention."""

    __e3nn_compile_mode__ = __prepare_scriptable__ = _Refusal()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__qualname__} is made by add_long_range(model, ...) alone: compile_mode, cuequivariance, "
            "LAMMPS' ML-IAP and everything else that builds a model from its configuration would lose its long range. "
            "To select a head call tg_equiattn.integrations.mace.select_head(model, head); to fine-tune run "
            "examples/mace_run_train.py"
        )

    def forward(
        self, data: Mapping[str, Any], training: bool = False, compute_force: bool = True,
        compute_virials: bool = False, compute_stress: bool = False, compute_displacement: bool = False,
        compute_hessian: bool = False, compute_born_charges: bool = False, **more: Any,
    ) -> dict[str, Tensor | None]:  # fmt: skip
        if more.get("lammps_mliap"):
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS gives each process a part of them: use ASE"
            )
        if more.get("compute_edge_forces") or more.get("compute_atomic_stresses"):
            raise NotImplementedError(
                "compute_edge_forces and compute_atomic_stresses share forces and stress among edges, which carry the "
                "short range only: ask a model with long range for forces, virials and stress of whole systems"
            )
        pos = data["positions"]
        data, strained = dict(data), compute_virials or compute_stress or compute_displacement
        if strained and data.get("displacement") is None:
            data["displacement"] = data["positions"].new_zeros(data["ptr"].numel() - 1, 3, 3).requires_grad_()
        if compute_stress and CALCULATED.get() is None:
            _warn_of_slabs(data["pbc"].view(-1, 3))
        call, charged = Call(data, data["displacement"] if strained else None), "long_range" in self._modules
        derivatives = {"compute_force": compute_force, "compute_virials": compute_virials,
                       "compute_stress": compute_stress, "compute_hessian": compute_hessian}  # fmt: skip
        token = CALL.set(call)
        try:
            own = dict.fromkeys(derivatives, False) if charged else derivatives
            out = super().forward(data, training, compute_displacement=compute_displacement or strained, **own, **more)
        finally:
            CALL.reset(token)
        if charged:
            born = compute_born_charges or data.get("born_charges") is not None
            self._add_charges(out, data, pos, call.displacement, training, born, derivatives)
        if call.energies is not None:
            out["long_range_energy"] = self._graph_energies(call.energies, data)
        if (outputs := CALCULATED.get()) is not None:
            volume = torch.linalg.det(data["cell"].view(-1, 3, 3)[0]).abs()
            outputs.append({"energy": out.get("long_range_energy"), "volume": volume})
        if strained and out["displacement"] is not data["displacement"]:
            raise RuntimeError("stress would be wrong: this release of mace-torch does not take displacement from data")
        return out

    def _add_charges(
        self, out: dict[str, Any], data: dict[str, Any], pos: Tensor, displacement: Tensor | None, training: bool,
        born: bool, derivatives: dict[str, bool],
    ) -> None:  # fmt: skip
        """Add energies of charges to the outputs of MACE without derivatives, and compute derivatives of all."""
        found = interact(self.long_range, data, displacement, out["node_feats"])
        offsets = self.long_range.offsets[data["node_attrs"].argmax(1)]
        zero = found.energies.new_zeros(data["ptr"].numel() - 1)
        out["long_range_energy"] = zero.index_add(0, data["batch"], found.energies)
        added = zero.index_add(0, data["batch"], found.energies - offsets)
        out["energy"] = out["energy"] + added
        out["node_energy"] = out["node_energy"] + found.energies - offsets
        if "interaction_energy" in out:
            out["interaction_energy"] = out["interaction_energy"] + added
        out["charges"], out["dipole"] = found.charges, found.dipole
        if born:
            out["born_charges"] = self.long_range.born_charges(found.dipole, data["positions"], training)
        names = ("forces", "virials", "stress", "hessian")
        results = get_outputs(
            energy=out.get("interaction_energy", out["energy"]), positions=pos, displacement=displacement,
            cell=data["cell"], training=training, **derivatives,
        )  # fmt: skip
        out.update(zip(names, results, strict=False))

    def _graph_energies(self, energies: Tensor, data: Mapping[str, Tensor]) -> Tensor:
        """The long-range energy of each graph, (graphs,), scaled as MACE scales the outputs of readouts."""
        if hasattr(self, "scale_shift"):
            scale, head = torch.atleast_1d(self.scale_shift.scale), data.get("head")
            energies = energies * (scale[:1] if head is None else scale[head[data["batch"]]])[:, None]
        return energies.new_zeros(data["ptr"].numel() - 1).index_add(0, data["batch"], energies[:, 0])


class LongRangeMACE(_LongRangeModel):
    """MACE with attention after some of its product blocks."""


class LongRangeScaleShiftMACE(_LongRangeModel, ScaleShiftMACE):
    """ScaleShiftMACE with attention after some of its product blocks."""


for own, kind in ((LongRangeMACE, MACE), (LongRangeScaleShiftMACE, ScaleShiftMACE)):
    own.__name__ = kind.__name__  # MACE's tools ask for the name before they build a model; __init__ has the reason

_LONG_RANGE = {MACE: LongRangeMACE, ScaleShiftMACE: LongRangeScaleShiftMACE}


@of_values
def _warn_of_slabs(pbc: Tensor) -> None:
    if bool((pbc.any(1) & ~pbc.all(1)).any()):
        warnings.warn(
            "MACE divides the stress of slabs by the volume of a padded cell; LongRangeCalculator divides it by the "
            "volume of the cell of the atoms",
            stacklevel=2,
        )


def _seen(
    model: MACE, data: dict[str, Any], targets: Sequence[torch.nn.Module]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Run the model. Return, for each of the product blocks and readouts ``targets``, the features that attention will
    read and the output of the target; and the energy of each graph."""
    found: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

    def see(target: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        found[target] = (out if isinstance(target, EquivariantProductBasisBlock) else given[0]).detach(), out.detach()

    hooks = [target.register_forward_hook(see) for target in targets]
    try:
        energy = model(dict(data), compute_force=False)["energy"].detach()
    finally:
        for hook in hooks:
            hook.remove()
    return [found[target] for target in targets], energy
