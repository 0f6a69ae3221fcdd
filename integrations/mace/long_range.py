"""Long range in a MACE model: Ewald attention after product blocks, or energies of charges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from ase.data import chemical_symbols
from e3nn import o3
from mace.modules.blocks import EquivariantProductBasisBlock
from mace.modules.models import MACE
from mace.modules.wrapper_ops import get_layout
from torch import Tensor

from tg_equiattn.checks import python_numbers

from ..e3nn.atoms_attention import AtomsEwaldAttention
from ..e3nn.atoms_charges import Layer, Sample, fit_charges, interact, layer_of_charges
from .model import _LONG_RANGE, LongRangeFeatures, LongRangeProduct, atoms_of, graphs_of


@python_numbers
def add_long_range(
    model: MACE,
    after: Sequence[int] | None = None,
    *,
    charges: Mapping[str, float] | Literal["predicted"] | None = None,
    batch: Any,
    learn: bool | Literal["scale"] = False,
    dielectric: float = 1.0,
    width: float | None = None,
    gain: float = 0.0,
    error: float = 1e-4,
    method: str = "auto",
    max_hkl: Sequence[int] | None = None,
    **attn_kwargs: Any,
) -> MACE:
    r"""Add long range between all atoms to a MACE model, in place: attention in its messages, or energies of charges.

    **Attention**, by default. Features x of a product block become

    .. math:: x' = x + g\, \sigma\, \mathrm{attention}(x / \sigma)

    with :math:`\sigma` their root mean square on ``batch``, one for each irrep. Attention is divided by its own root
    mean square on the same batch, so the learned ``gain`` g says how large it is relative to x. Attention also reads
    the element, so that atoms without neighbors take part. An atom does not attend to itself, so the energy of a single
    atom stays as it was. Sources of Coulomb kernels sum over each graph to a learned constant times ``total_charge`` of
    the data, or to zero if the data have none (:class:`tg_equiattn.integrations.e3nn.atoms_attention.NeutralSources`).

    **Charges**, with ``charges``. The energy gets :class:`tg_equiattn.nn.ChargeInteraction`,

    .. math:: E_{\mathrm{long}} = \frac{e^2}{8 \pi \epsilon_0} \sum_{ij} S_i S_j\,
        \frac{1}{r_{ij}}\, \mathrm{erf} \frac{r_{ij}}{\sqrt 2 s}

    and the model has the outputs ``charges`` and ``dipole``, and ``shared_charge`` if charges are predicted. Its call
    has the arguments ``compute_long_range_energy`` and ``compute_born_charges``, ``False`` by default, for the outputs
    ``long_range_energy`` and ``born_charges``; data with ``born_charges`` ask for the latter, too. At the start a part
    of :math:`E_{\mathrm{long}}` for each element is fitted to ``batch`` and taken off, and the scale of a
    ``ScaleShiftMACE`` is fitted to the forces of the data without those of charges. So atomic energies of the model
    are those of the data, as without long range. Charges that are predicted
    (:class:`tg_equiattn.nn.PredictedChargeInteraction`) are fitted to total charges of ``batch`` and to net forces
    between separate fragments; a message of level INFO says how much of these forces they explain.

    All parameters and buffers of the model keep their names, and all but the scale with charges their values: older
    checkpoints load with ``strict=False``. With attention a trained model predicts as before until g moves from 0.
    Forces, virials and stress include long range: cells are strained as positions are. Graphs repeat along the lattice
    vectors that ``pbc`` names; the wide cells that MACE puts around open directions are not read. Save with
    ``torch.save(model, path)``, run with ``MACECalculator`` or :class:`LongRangeCalculator`. TorchScript,
    ``compile_mode``, cuequivariance's layout, LAMMPS and quantities that MACE shares among edges (atomic stresses) are
    refused.

    Args:
        model: A ``MACE`` or ``ScaleShiftMACE``, trained or not.
        after: Product blocks, counted from 0, that attention follows. The default, ``None``, means ``(0,)``, or no
            attention with ``charges``. After the last block attention changes scalars alone.
        charges: Charge of each element by its symbol, in e: oxidation states, or Born effective charges divided by the
            root of ``dielectric``. The charges of a graph must sum to its ``total_charge`` divided by the same root.
            "predicted" learns charges, which sum to ``total_charge``, from the scalars of all blocks. The default,
            ``None``, means attention.
        batch: Sample of the training data, as MACE's loaders give it, typical of the data. With ``charges`` it may be
            several batches, such as a loader; it should have all elements and most compositions, and forces.
        learn: With ``charges``, True if a factor of all charges and transfers of charge between neighbors are learned,
            for data with labels of charge (:class:`ChargeLoss`). "scale" fits the factor to the forces of ``batch``
            before training, together with forces between pairs. The default, ``False``, holds charges.
        dielectric: With ``charges``, the electronic dielectric constant of the data. Born charges are derivatives of
            the dipole times its root. The default is 1.
        width: Width of the narrowest kernel, in the unit of positions. The default, ``None``, means half of the model's
            ``r_max``, and for charges 0.4 ``r_max``, or 0.6 ``r_max`` if they are predicted: messages already model
            shorter distances.
        gain: Initial value of the learned gain of attention. The default, 0, leaves a model as it is.
        max_width: Width of the widest kernel. The default, ``None``, means 8 ``width``. Each width is learned within an
            octave of its own between the two.
        num_gaussians: Number of Gaussian kernels, 4 by default.
        num_coulomb: Number of Coulomb kernels, which decay as 1 / r, 4 by default. Use 0 if nothing is charged.
        kernels: Module with kernels of your own, beside the others. It has an integer ``count``, and called with gains
            ``(heads, count, lmax + 1)`` it returns a :class:`tg_equiattn.functional.Kernel` with these gains. Each
            layer keeps a copy. The default is ``None``.
        heads: Number of heads, 1 by default, each with its own queries, keys and widths and a share of the values.
        lmax: Highest degree of the solid harmonics, 1 by default.
        avg_num_nodes: Constant by which sums are divided, 1 by default. It has no effect here, as the scale of
            attention is measured.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default.
        method: ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every graph: direct sums below 4,000 nodes if it
            is open, reciprocal sums if it repeats, and non-uniform transforms if it is larger.
        max_hkl: Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. The
            default, ``None``, reads cells.

    Returns:
        The same model, with a class that says that it has long range.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one; if an element of the data has no charge,
            or if charges of a graph do not sum to its total charge.
        TypeError: for models that are not exactly ``MACE`` or ``ScaleShiftMACE``.

    Example::

        model = add_long_range(model, charges={"Na": 1, "Cl": -1}, batch=train_loader)
        optimizer = torch.optim.Adam(model.parameters())
    """
    if type(model) not in _LONG_RANGE:
        raise TypeError(f"model must be a MACE or ScaleShiftMACE without long range, got {type(model).__qualname__}")
    like, sums = next(model.parameters()), {"error": error, "method": method, "max_hkl": max_hkl}
    if charges is not None:
        if after is not None or attn_kwargs or gain:
            raise ValueError(
                f"after, gain and settings of attention must be left out with charges, got after={after}, gain={gain}, "
                f"{attn_kwargs}: call add_long_range for one of the two"
            )
        names = [chemical_symbols[z] for z in model.atomic_numbers.tolist()]
        outputs = [product.linear.irreps_out for product in model.products]
        layer = layer_of_charges(
            charges, learn, names, "element", (sum(outputs, o3.Irreps()), outputs[-1]), width, float(model.r_max),
            avg_num_neighbors=float(model.interactions[-1].avg_num_neighbors), dielectric=dielectric, **sums,
        ).to(like.device, like.dtype)  # fmt: skip
        batches = [batch] if hasattr(batch, "to_dict") or isinstance(batch, Mapping) else batch
        batches = [_tensors(each, like) for each in batches]
        factor = fit_charges(layer, lambda: (_sample(model, layer, data) for data in batches), learn == "scale")
        if hasattr(model, "scale_shift"):
            model.scale_shift.scale.mul_(factor)
        model.__class__, model.readouts[-1].long_range = _LONG_RANGE[type(model)], layer
        return model
    if learn or dielectric != 1:
        raise ValueError(f"charges must be given with learn and dielectric, got None with {learn} and {dielectric}")
    count, blocks = len(model.products), (0,) if after is None else tuple(after)
    if not blocks or any(not isinstance(n, int) or not 0 <= n < count for n in blocks) or len({*blocks}) < len(blocks):
        raise ValueError(f"after must be different blocks from 0 to {count - 1}, got {after!r}")
    targets = [model.products[n] for n in blocks]
    for target in targets:
        if type(target) is not EquivariantProductBasisBlock:
            name = type(target).__name__
            raise TypeError(f"products of model must be EquivariantProductBasisBlock, got {name}")
        if (layout := get_layout(getattr(target, "cueq_config", None))) != "mul_ir":
            raise ValueError(
                f"model must have features in the layout mul_ir, as e3nn's, got {layout}: "
                "mace.cli.convert_cueq_e3nn makes such a model of one for cuequivariance"
            )
    data, layers, width = _tensors(batch, like), [], float(model.r_max) / 2 if width is None else width
    for n, x in zip(blocks, _seen(model, data, targets), strict=True):
        irreps = o3.Irreps(model.interactions[n].hidden_irreps)
        attention = AtomsEwaldAttention(
            irreps, irreps, width=width, num_elements=len(model.atomic_numbers), cutoff=float(model.r_max),
            avg_num_neighbors=float(model.interactions[n].avg_num_neighbors), **sums, **attn_kwargs,
        )  # fmt: skip
        layers.append(LongRangeFeatures(attention.to(like.device, like.dtype), gain, x, data))
    for target, features in zip(targets, layers, strict=True):
        target.__class__, target.long_range = LongRangeProduct, features
    model.__class__ = _LONG_RANGE[type(model)]
    return model


@torch.enable_grad()
def _sample(model: MACE, layer: Layer, data: dict[str, Any]) -> Sample:
    """Run a model without its charges, and the charges, on a batch."""
    data = dict(data)
    out = model(data, training=True)
    features, atoms, graphs = out["node_feats"], atoms_of(data), graphs_of(data, None)
    energies = interact(layer, atoms, features, graphs).energies
    (slopes,) = torch.autograd.grad(energies.sum(), graphs["pos"])
    scalars = None if layer.weights is None else layer.scalars_of(features[:, -layer.irreps_in.dim :])
    return Sample(atoms, graphs, data.get("forces"), scalars, energies, out["forces"], -slopes)


def _tensors(batch: Any, like: Tensor) -> dict[str, Tensor]:
    """The tensors of a batch, with the device and the dtype of a model."""
    items = dict(batch.to_dict() if hasattr(batch, "to_dict") else batch).items()
    return {name: x.to(like.device, like.dtype if x.is_floating_point() else None)
            for name, x in items if isinstance(x, Tensor)}  # fmt: skip


def _seen(model: MACE, data: dict[str, Any], targets: Sequence[torch.nn.Module]) -> list[Tensor]:
    """Run the model. Return the output of each of the product blocks ``targets``."""
    outputs: dict[torch.nn.Module, Tensor] = {}

    def see(target: torch.nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        outputs[target] = out.detach()

    hooks = [target.register_forward_hook(see) for target in targets]
    try:
        model(dict(data), compute_force=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [outputs[target] for target in targets]
