"""Long range in a MACE model: Ewald attention after product blocks, or energies of charges."""

from __future__ import annotations

import contextvars
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from ase.data import chemical_symbols
from e3nn import o3
from mace.modules.blocks import EquivariantProductBasisBlock
from mace.modules.models import MACE, ScaleShiftMACE
from mace.modules.utils import get_outputs
from mace.modules.wrapper_ops import get_layout
from mace.tools import torch_geometric
from mace.tools.scripts_utils import remove_pt_head
from torch import Tensor

from tg_equiattn.checks import arguments, must_hold, passes
from tg_equiattn.ewald.charges import ChargeLayer
from tg_equiattn.nn import PredictedChargeInteraction

from ..e3nn.atoms_attention import Atoms, AtomsEwaldAttention, blocks_of, total_charge_of
from ..e3nn.atoms_charges import (
    Layer,
    Sample,
    check_informative,
    fit_charges,
    interact,
    is_informative,
    layer_of_charges,
    slopes_of,
)


class Call(NamedTuple):
    """Data of one call of a model, which its blocks read, and the strain."""

    data: dict[str, Any]
    displacement: Tensor | None


class Calculation(NamedTuple):
    """Outputs that a calculator asks of models: Born charges if ``born``, and a dict of other outputs of each model."""

    born: bool
    outputs: list[dict[str, Any]]


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")
CALCULATION: contextvars.ContextVar[Calculation | None] = contextvars.ContextVar("calculation", default=None)


def atoms_of(data: dict[str, Any]) -> Atoms:
    """The atoms of the data of a call."""
    (first, second), pos = data["edge_index"], data["positions"]
    vectors = pos[second] - pos[first] + data["shifts"]
    return Atoms(data["node_attrs"].argmax(1), data["edge_index"], vectors, total_charge_of(data))


def graphs_of(data: dict[str, Any], displacement: Tensor | None) -> dict[str, Any]:
    """Positions, cells and graphs from the data of a call. MACE strains the positions in its data but not the cells,
    so cells are strained here."""
    if data.get("pbc") is None:
        raise ValueError("data must have pbc, got none: AtomicData.from_config reads it from configurations")
    cell = data["cell"].view(-1, 3, 3)
    if displacement is not None:
        cell = cell + cell @ (displacement + displacement.mT) / 2
    return {
        "pos": data["positions"],
        "batch": data["batch"],
        "cell": cell,
        "pbc": directions_of(data).expand(len(cell), 3),
        "batch_size": data["ptr"].numel() - 1,
    }


def directions_of(data: dict[str, Any]) -> Tensor:
    """The lattice vectors along which graphs repeat, (graphs or 1, 3). TorchSim has one bool, or three, for all."""
    pbc = torch.as_tensor(data["pbc"], device=data["positions"].device)
    return pbc.expand(1, 3) if pbc.numel() == 1 else pbc.view(-1, 3)


class LongRangeFeatures(torch.nn.Module):
    """``gain`` times attention, with scales that are measured once, on some batches.

    Args:
        attention: The layer.
        gain: Initial value of the learned gain.
        features: Features of each batch, which attention reads. Outputs of attention are scaled to their size.
        batches: The batches.

    Raises:
        ValueError: if every graph of the batches is a single open atom.
    """

    scale_in: Tensor
    scale_out: Tensor

    def __init__(
        self, attention: AtomsEwaldAttention, gain: float, features: Sequence[Tensor],
        batches: Sequence[dict[str, Any]],
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = attention
        self.gain = torch.nn.Parameter(features[0].new_tensor(gain))
        self.register_buffer("scale_in", _sizes(features, attention.irreps_in))
        each = [graphs_of(data, None) for data in batches]
        joined = [(data["ptr"].diff() > 1) | graphs["pbc"].any(1) for data, graphs in zip(batches, each, strict=True)]
        if not torch.cat(joined).any():
            raise ValueError(
                f"batch must have graphs in which atoms attend to others, got {sum(map(len, joined))} open graphs of "
                "one atom each: attention has no size to measure there; pass a typical sample of the training data"
            )
        with torch.no_grad():
            results = [
                attention(x / self.scale_in, atoms=atoms_of(data), **graphs)
                for x, data, graphs in zip(features, batches, each, strict=True)
            ]
        self.register_buffer("scale_out", self.scale_in / _sizes(results, attention.irreps_out))

    def forward(self, x: Tensor) -> Tensor:
        call = CALL.get()
        out = self.attention(x / self.scale_in, atoms=atoms_of(call.data), **graphs_of(*call))
        return self.gain * self.scale_out * out


def _sizes(features: Sequence[Tensor], irreps: o3.Irreps) -> Tensor:
    """The root mean square of each irrep over batches, for each of its columns: (irreps.dim,), 1 if all are 0."""
    square = torch.cat(list(features)).square().mean(0)
    size = torch.cat(
        [square[columns].mean().sqrt().expand(columns.stop - columns.start) for columns in irreps.slices()]
    )
    return torch.where(size > 0, size, 1.0)


class LongRangeProduct(EquivariantProductBasisBlock):
    """MACE's product block, followed by attention."""

    long_range: LongRangeFeatures

    def forward(self, node_feats: Tensor, sc: Tensor | None, node_attrs: Tensor) -> Tensor:
        near = super().forward(node_feats, sc, node_attrs)
        return near + self.long_range(near)


class _Refusal:
    """A class attribute that raises NotImplementedError when it is read. It replaces e3nn's attribute that says how a
    module is compiled."""

    def __get__(self, module: object, owner: type) -> NoReturn:
        raise NotImplementedError(
            "MACE with long range does not support TorchScript: save it with torch.save(model, path), run it with "
            "MACECalculator(model_paths=path). LAMMPS cannot run it: it gives each process a part of the atoms, and "
            "long range needs sums over all. run_lammps of tg_equiattn.integrations.lammps runs it on one process, and "
            "write_lammps of tg_equiattn.integrations.mace writes models with charges that are given"
        )


class _LongRangeModel(MACE):
    """A MACE model that passes data and strain to its blocks with attention, or that has charges."""

    __e3nn_compile_mode__ = __prepare_scriptable__ = _Refusal()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__qualname__} is made by add_long_range(model, ...) alone: compile_mode, cuequivariance, "
            "LAMMPS' ML-IAP and everything else that builds a model from its configuration would lose its long range. "
            "To select a head call tg_equiattn.integrations.mace.select_head(model, head); to fine-tune run "
            "tg_equiattn_mace_train"
        )

    @property
    def long_range(self) -> Layer | None:
        """Energies of charges, or ``None``. They lie beside the last readout, so that MACE's optimizers find them."""
        return getattr(self.readouts[-1], "long_range", None)

    def forward(
        self, data: Mapping[str, Any], training: bool = False, compute_force: bool = True,
        compute_virials: bool = False, compute_stress: bool = False, compute_displacement: bool = False,
        compute_hessian: bool = False, compute_born_charges: bool = False, compute_long_range_energy: bool = False,
        compute_shared_charge: bool = False, **more: Any,
    ) -> dict[str, Tensor | None]:  # fmt: skip
        if more.get("lammps_mliap"):
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS gives each process a part of them: use ASE, or, on "
                "one process, run_lammps of tg_equiattn.integrations.lammps"
            )
        if more.get("compute_edge_forces") or more.get("compute_atomic_stresses"):
            raise NotImplementedError(
                "compute_edge_forces and compute_atomic_stresses share forces and stress among edges, which carry the "
                "short range only: ask a model with long range for forces, virials and stress of whole systems"
            )
        pos, calculation = data["positions"], CALCULATION.get()
        data, strained = dict(data), compute_virials or compute_stress or compute_displacement
        if strained and data.get("displacement") is None:
            data["displacement"] = pos.new_zeros(data["ptr"].numel() - 1, 3, 3).requires_grad_()
        if compute_stress and calculation is None:
            _warn_of_slabs(directions_of(data))
        call, layer = Call(data, data["displacement"] if strained else None), self.long_range
        derivatives = {"compute_force": compute_force, "compute_virials": compute_virials,
                       "compute_stress": compute_stress, "compute_hessian": compute_hessian}  # fmt: skip
        token = CALL.set(call)
        try:
            asked = derivatives if layer is None else dict.fromkeys(derivatives, False)
            out = super().forward(data, training, compute_displacement=strained, **asked, **more)
        finally:
            CALL.reset(token)
        if strained and out["displacement"] is not data["displacement"]:
            raise RuntimeError("stress would be wrong: this release of mace-torch does not take displacement from data")
        if layer is not None:
            born = compute_born_charges or data.get("born_charges") is not None or (calculation and calculation.born)
            energies, shared = _add_charges(layer, out, call, training, bool(born))
            if compute_long_range_energy or calculation is not None:  # programs stop at outputs that they do not know
                out["long_range_energy"] = energies
            if isinstance(layer, PredictedChargeInteraction) and (training or compute_shared_charge):
                out["shared_charge"] = shared
            results = get_outputs(
                energy=out.get("interaction_energy", out["energy"]), positions=pos, displacement=call.displacement,
                cell=data["cell"], training=training, **derivatives,
            )  # fmt: skip
            out.update(zip(("forces", "virials", "stress", "hessian"), results, strict=False))
        if calculation is not None:
            outputs = {name: out[name] for name in ("long_range_energy", "born_charges") if name in out}
            volume = torch.linalg.det(data["cell"].view(-1, 3, 3)[0]).abs()
            calculation.outputs.append(outputs | {"volume": volume})
        return out


def _add_charges(layer: Layer, out: dict[str, Any], call: Call, training: bool, born: bool) -> tuple[Tensor, Tensor]:
    """Add energies of charges to the energies that MACE returned, and the outputs of charges. Return the energy of the
    charges and the shared charge of each graph."""
    data = call.data
    field, graphs = data.get("external_field"), graphs_of(*call)
    if field is not None and passes(lambda: field.any(), field):
        graphs["external_field"] = field
    result = interact(layer, atoms_of(data), out["node_feats"], graphs, neutral=True)
    each = torch.stack([result.energies, result.energies - result.offsets], 1)
    long_range, added = each.new_zeros(data["ptr"].numel() - 1, 2).index_add(0, data["batch"], each).unbind(1)
    for name, energies in (("energy", added), ("interaction_energy", added), ("node_energy", each[:, 1])):
        if name in out:
            out[name] = out[name] + energies
    out["charges"], out["dipole"] = result.charges, result.dipole
    if born:
        if isinstance(layer, PredictedChargeInteraction):
            must_hold(
                ~directions_of(data).any(),
                "born_charges must be asked of open graphs where charges are predicted, got graphs that repeat, whose "
                "dipole is not defined: give charges for elements",
            )
        out["born_charges"] = layer.born_charges(result.dipole, data["positions"], training)
    return long_range, result.shared


class LongRangeMACE(_LongRangeModel):
    """MACE with long range."""


class LongRangeScaleShiftMACE(_LongRangeModel, ScaleShiftMACE):
    """ScaleShiftMACE with long range."""


_LONG_RANGE = {MACE: LongRangeMACE, ScaleShiftMACE: LongRangeScaleShiftMACE}
# MACE's commands (mace_select_head, mace_eval_configs, mace_run_train, converters) ask for the name of a model's class
# before they read or build a model, and know only MACE's classes. So our classes have MACE's names. Commands that
# build a model get the error of __init__. pickle uses the qualified name, which differs from MACE's.
for _plain, _own in _LONG_RANGE.items():
    _own.__name__ = _plain.__name__


def _warn_of_slabs(pbc: Tensor) -> None:
    if not passes(lambda: (pbc.all(1) | ~pbc.any(1)).all(), pbc):
        warnings.warn(
            "MACE divides the stress of slabs by the volume of a padded cell; LongRangeCalculator divides it by the "
            "volume of the cell of the atoms",
            stacklevel=2,
        )


def select_head(model: MACE, head: str | None = None) -> MACE:
    """Make a model with one head of a model with long range, as MACE's ``remove_pt_head`` does for its own models.

    Args:
        model: A model made by :func:`add_long_range`. It stays as it is.
        head: Name of the head. The default, ``None``, means the first one that is not "pt_head".

    Raises:
        ValueError: if there is no such head.

    Example::

        torch.save(select_head(torch.load("far.model", weights_only=False), "dft"), "dft.model")
    """
    return copy_long_range(model, remove_pt_head(without_long_range(model), head))


def copy_long_range(source: MACE, target: MACE) -> MACE:
    """Give a plain model, in place, the long range of another one, with its weights and scales.

    Args:
        source: A model made by :func:`add_long_range`.
        target: A ``MACE`` or ``ScaleShiftMACE`` with the same blocks and features. Its elements are among those of
            ``source``.

    Returns:
        The target, with long range.

    Raises:
        ValueError: if an element of ``target`` is not an element of ``source``.
    """
    known, wanted = source.atomic_numbers.tolist(), target.atomic_numbers.tolist()
    if unknown := [z for z in wanted if z not in known]:
        raise ValueError(f"target must have elements of source, {known}, got {unknown} beside them")
    rows, like = [known.index(z) for z in wanted], next(target.parameters())
    modules = dict(target.named_modules())
    for name, module in source.named_modules():
        layer = getattr(module, "long_range", None)
        if isinstance(layer, (LongRangeFeatures, ChargeLayer)):
            layer = copy.deepcopy(layer).to(like.device, like.dtype).requires_grad_()  # frozen, as MACE saves stage two
            if isinstance(layer, LongRangeFeatures):
                neutral = layer.attention.neutral
                for of_elements in ("embedding", "constants", "log_weights"):
                    setattr(neutral, of_elements, torch.nn.Parameter(getattr(neutral, of_elements).detach()[rows]))
                modules[name].__class__ = LongRangeProduct
            else:
                layer.select(rows)  # type: ignore[operator]
            modules[name].long_range = layer
    target.__class__ = _LONG_RANGE[type(target)]
    return target


def without_long_range(model: MACE) -> MACE:
    """Make a copy of a model without its long range, with the present weights.

    Args:
        model: A model made by :func:`add_long_range`. It stays as it is.
    """
    copied, kinds = copy.deepcopy(model), {own: kind for kind, own in _LONG_RANGE.items()}
    for module in list(copied.modules()):
        module.__class__ = (kinds | {LongRangeProduct: EquivariantProductBasisBlock}).get(type(module), type(module))
        if "long_range" in module._modules:
            del module.long_range
    return copied


@arguments
def add_long_range(
    model: Any, after: Any = None, *,
    charges: Mapping[str, float] | Literal["predicted"] | None = None, batch: Any,
    learn: bool | Literal["scale"] = False, dielectric: float = 1.0, width: float | None = None, gain: float = 0.0,
    exclude_near: bool = True, error: float = 1e-4, method: str = "auto", max_hkl: Sequence[int] | None = None,
    **attn_kwargs: Any,
) -> MACE:  # fmt: skip
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

    and the model has the outputs ``charges`` and ``dipole``. Its call has the arguments ``compute_long_range_energy``,
    ``compute_born_charges`` and, if charges are predicted, ``compute_shared_charge``, ``False`` by default, for the
    outputs ``long_range_energy``, ``born_charges`` and ``shared_charge``. Data with ``born_charges`` ask for Born
    charges, and ``training=True`` for the shared charge, too. An ``external_field`` of the data, in V/Å, acts on the
    dipole of graphs that do not repeat. At the start a part of :math:`E_{\mathrm{long}}` for each element is fitted to
    ``batch`` and taken off, and the scale of a ``ScaleShiftMACE`` is fitted to the forces of the data without those of
    charges. So the model keeps the atomic energies that it has without long range. Charges that are predicted with
    ``exclude_near`` have no energies of single atoms, and nothing is taken off. Charges that are predicted
    (:class:`tg_equiattn.nn.PredictedChargeInteraction`) are fitted to total charges of ``batch`` and to net forces
    between separate fragments; a message of level INFO says how much of these forces they explain. Data that have
    neither of these, nor labels of charge, are refused (:func:`can_predict_charges`): MACE alone learns them better.

    All parameters and buffers of the model keep their names, and all but the scale with charges their values: older
    checkpoints load with ``strict=False``. With attention a trained model predicts as before until g moves from 0. With
    charges its energies and forces move, so train it on. Forces, virials and stress include long range: cells are
    strained as positions are. Graphs repeat along the lattice vectors that ``pbc`` names; the wide cells that MACE puts
    around open directions are not read. Save with ``torch.save(model, path)``, run with ``MACECalculator`` or
    :class:`LongRangeCalculator`. TorchScript, ``compile_mode``, cuequivariance's layout, LAMMPS's ML-IAP and quantities
    that MACE shares among edges (atomic stresses) are refused. LAMMPS runs the model by
    :func:`tg_equiattn.integrations.lammps.run_lammps`, and models with charges that are given by :func:`write_lammps`.

    Args:
        model: A ``MACE`` or ``ScaleShiftMACE``, trained or not.
        after: Product blocks, counted from 0, that attention follows. The default, ``None``, means ``(0,)``, or no
            attention with ``charges``. After the last block attention changes scalars alone.
        charges: Charge of each element by its symbol, in e: oxidation states, or Born effective charges divided by the
            root of ``dielectric``. The charges of a graph must sum to its ``total_charge`` divided by the same root.
            "predicted" learns charges, which sum to ``total_charge``, from the scalars of all blocks. The default,
            ``None``, means attention.
        batch: Typical sample of the training data: a batch of MACE's loaders, an ``AtomicData``, or several of them,
            such as a loader or a list. Attention is scaled to the features of all of its atoms. With ``charges`` it
            should have all elements, most compositions, and forces.
        learn: With charges that are given, True if a factor of all charges and transfers of charge between neighbors
            are learned, for data with labels of charge (:class:`ChargeLoss`). "scale" fits the factor to the forces of
            ``batch`` before training, together with forces between pairs. The default, ``False``, holds charges.
        dielectric: With ``charges``, the electronic dielectric constant of the data. Born charges are derivatives of
            the dipole times its root. The default is 1.
        width: Width of the narrowest kernel, in the unit of positions. The default, ``None``, means half of the model's
            ``r_max``, and for charges 0.4 ``r_max``, or 0.6 ``r_max`` if they are predicted: messages already model
            shorter distances.
        gain: Initial value of the learned gain of attention. The default, 0, leaves a model as it is.
        exclude_near: With predicted charges, True, the default, takes their energy within ``r_max`` off again, which
            messages can learn. False keeps it, as checkpoints of earlier states have it.
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
        output_scale: Constant by which sums are divided, 1 by default. It has no effect here, as the scale of
            attention is measured.
        error: Promised error of sums over reciprocal vectors, relative to the largest value of a kernel, 1e-4 by
            default.
        method: ``"direct"`` sums over all pairs of nodes, in graphs that do not repeat. ``"ewald"`` sums over
            reciprocal vectors. ``"nufft"`` does so by non-uniform fast Fourier transforms, which need the extra
            ``nufft``. ``"auto"``, the default, chooses for every graph: direct sums if it is open, and reciprocal sums
            if it repeats. In a wide cell with few nodes, parts of kernels that decay fast are summed over pairs and
            their nearest images. From some thousand nodes on, non-uniform transforms are used where they are installed
            and faster.
        max_hkl: Largest Miller indices along the three lattice vectors, for the kernel with the largest cutoff. The
            default, ``None``, reads cells.

    Returns:
        The same model, with a class that says that it has long range.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one; if an element of the data has no charge,
            or if charges of a graph do not sum to its total charge; if charges are to be predicted, and ``batch`` does
            not say what they are.
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
            exclude_near, avg_num_neighbors=float(model.interactions[-1].avg_num_neighbors), dielectric=dielectric,
            **sums,
        ).to(like.device, like.dtype)  # fmt: skip
        batches = _batches(batch, like)
        if charges == "predicted":
            check_informative(_says_charges(data, "dipole", "born_charges") for data in batches)
        factor = fit_charges(layer, lambda: (_sample(model, layer, data) for data in batches), learn == "scale")
        if hasattr(model, "scale_shift"):
            model.scale_shift.scale.mul_(factor)
        model.__class__, model.readouts[-1].long_range = _LONG_RANGE[type(model)], layer
        return model
    if learn or dielectric != 1:
        raise ValueError(f"charges must be given with learn and dielectric, got None with {learn} and {dielectric}")
    blocks = blocks_of("blocks", after, len(model.products))
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
    batches, layers, width = _batches(batch, like), [], float(model.r_max) / 2 if width is None else width
    seen = [_seen(model, data, targets) for data in batches]
    for n, features in zip(blocks, zip(*seen, strict=True), strict=True):
        irreps = o3.Irreps(model.interactions[n].hidden_irreps)
        attention = AtomsEwaldAttention(
            irreps, irreps, width=width, num_elements=len(model.atomic_numbers), cutoff=float(model.r_max),
            avg_num_neighbors=float(model.interactions[n].avg_num_neighbors), **sums, **attn_kwargs,
        )  # fmt: skip
        layers.append(LongRangeFeatures(attention.to(like.device, like.dtype), gain, features, batches))
    for target, of_target in zip(targets, layers, strict=True):
        target.__class__, target.long_range = LongRangeProduct, of_target
    model.__class__ = _LONG_RANGE[type(model)]
    return model


def can_predict_charges(batch: Any) -> bool:
    """Return true if data say what predicted charges are: if a graph has a total charge, or forces on two separate
    fragments, which no path of edges joins. Other data are learned better and faster without long range, unless
    :class:`ChargeLoss` trains on labels of charge, which are not read here.

    Args:
        batch: The training data, as :func:`add_long_range` takes a sample of them.

    Example::

        if can_predict_charges(train_loader):
            model = add_long_range(model, charges="predicted", batch=train_loader)
    """
    return any(map(_says_charges, _each_batch(batch, torch.empty(()))))


def _says_charges(data: dict[str, Any], *labels: str) -> bool:
    """True if a batch says what predicted charges are. ``labels`` are names of labels of charge, which it may have."""
    return is_informative(atoms_of(data), graphs_of(data, None), data.get("forces"), *map(data.get, labels))


@torch.enable_grad()
def _sample(model: MACE, layer: Layer, data: dict[str, Any]) -> Sample:
    """Run a model without its charges, and the charges, on a batch."""
    data = dict(data)
    out = model(data, training=True)
    features, atoms, graphs = out["node_feats"], atoms_of(data), graphs_of(data, None)
    energies = interact(layer, atoms, features, graphs).energies
    (gradients,) = torch.autograd.grad(energies.sum(), graphs["pos"], retain_graph=True)
    scalars = None if layer.weights is None else layer.scalars_of(features[:, -layer.irreps_in.dim :])
    slopes = None if scalars is None else slopes_of(scalars, graphs["pos"])
    return Sample(atoms, graphs, data.get("forces"), scalars, slopes, energies, out["forces"], -gradients)


def _batches(batch: Any, like: Tensor) -> list[dict[str, Tensor]]:
    """The tensors of one or several batches or graphs, with the device and the dtype of a model."""
    if not (found := list(_each_batch(batch, like))):
        raise ValueError(f"batch must have a sample of the training data, got an empty {type(batch).__name__}")
    return found


def _each_batch(batch: Any, like: Tensor) -> Iterator[dict[str, Tensor]]:
    alone = not isinstance(batch, Iterable) or isinstance(batch, (Mapping, torch_geometric.Data))
    for graphs in [batch] if alone else batch:
        if isinstance(graphs, torch_geometric.Data) and "ptr" not in graphs:
            graphs = torch_geometric.Batch.from_data_list([graphs])
        items = graphs.to_dict() if hasattr(graphs, "to_dict") else graphs
        if not isinstance(items, Mapping) or "ptr" not in items:
            raise ValueError(
                "batch must be a batch of MACE's loaders, an AtomicData, or several of them (a loader, a list), got "
                f"{type(batch).__name__}" + ("" if alone else f" with {type(graphs).__name__}")
            )
        yield {name: x.to(like.device, like.dtype if x.is_floating_point() else None)
               for name, x in items.items() if isinstance(x, Tensor)}  # fmt: skip


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
