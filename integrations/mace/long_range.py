"""Ewald attention behind the products of a MACE model, or beside its last readout."""

from __future__ import annotations

import contextvars
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from e3nn import o3
from mace.modules.blocks import EquivariantProductBasisBlock, LinearReadoutBlock, NonLinearReadoutBlock
from mace.modules.models import MACE, ScaleShiftMACE
from mace.modules.wrapper_ops import get_layout
from torch import Tensor

from ..e3nn import IrrepsEwaldAttention


def add_long_range(
    model: MACE,
    after: Sequence[int] | Literal["energies"] = (0,),
    *,
    batch: Any,
    width: float | None = None,
    max_width: float | None = None,
    kernels: int | tuple[int, ...] = 8,
    heads: int = 1,
    lmax: int = 1,
    error: float = 1e-4,
    method: str = "auto",
    gain: float = 0.0,
) -> MACE:
    r"""Let the atoms of a MACE model see all others: Ewald attention behind some of its products, in place.

    Features x of a block become

    .. math:: x' = x + g\, \sigma\, \mathrm{attention}(x / \sigma)

    with :math:`\sigma` their root mean square on ``batch``, one for each irrep; attention is divided by its own on the
    same batch, so that the learned ``gain`` g says how large it is beside what is near. All parameters and buffers of
    the model keep their names and values: checkpoints made before load with ``strict=False``, and a trained model
    predicts as it did until g has moved from 0.

    With ``after="energies"`` x stays as it is: attention of the last block's features is an energy of each atom, added
    in the same way to the last readout's. What is far is then a sum over pairs of what both atoms hold, as with
    charges, and parts of a system that are far from each other add up.

    Forces, virials and stress are derivatives of all of it: cells are strained as positions are. Only those directions
    repeat that ``pbc`` says: the wide cells that MACE puts around open directions are not read. Save with
    ``torch.save(model, path)``, run with ``MACECalculator``. TorchScript, ``compile_mode``, cuequivariance's layout,
    LAMMPS and what MACE shares among edges (atomic stresses) are refused.

    Args:
        model: a ``MACE`` or ``ScaleShiftMACE``, trained or not.
        after: the blocks behind whose products attention comes, from 0 on, or "energies". Behind the last block it
            changes scalars alone.
        batch: some of the data, as MACE's loaders give it; the more like what comes later the better.
        width: of the narrowest kernel, in the unit of positions; ``None`` means half the model's ``r_max``.
        max_width, kernels, heads, lmax, error, method: of :class:`tg_equiattn.integrations.e3nn.IrrepsEwaldAttention`.
        gain: at the start.

    Returns:
        The same model, whose class is now one of long range.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
        TypeError: for models that are not exactly ``MACE`` or ``ScaleShiftMACE``.

    Example::

        model = add_long_range(model, batch=next(iter(train_loader)))
        optimizer = torch.optim.Adam(model.parameters())
    """
    if type(model) not in _LONG_RANGE:
        raise TypeError(f"model must be a MACE or ScaleShiftMACE without long range, got {type(model).__name__}")
    count, energies = len(model.products), after == "energies"
    blocks = (count - 1,) if energies else tuple(after)
    if not blocks or any(not isinstance(n, int) or not 0 <= n < count for n in blocks) or len({*blocks}) < len(blocks):
        raise ValueError(f'after must be "energies" or different blocks from 0 to {count - 1}, got {after!r}')
    places = [model.readouts[-1]] if energies else [model.products[n] for n in blocks]
    for place in places:
        if type(place) not in _WITH:
            allowed = " or ".join(kind.__name__ for kind in _WITH)
            raise TypeError(f"products and readouts of model must be {allowed}, got {type(place).__name__}")
    for layout in (get_layout(getattr(model.products[n], "cueq_config", None)) for n in blocks):
        if layout != "mul_ir":
            raise ValueError(
                f"model must have features in the layout mul_ir, as e3nn's, got {layout}: "
                "mace.cli.convert_cueq_e3nn makes such a model of one for cuequivariance"
            )
    like = next(model.parameters())
    data = {name: x.to(like.device, like.dtype if x.is_floating_point() else None)
            for name, x in dict(batch.to_dict() if hasattr(batch, "to_dict") else batch).items()
            if isinstance(x, Tensor)}  # fmt: skip
    layers = []
    for n, (x, near) in zip(blocks, _seen(model, data, places), strict=True):  # before the model is touched
        irreps = o3.Irreps(model.interactions[n].hidden_irreps)
        attention = IrrepsEwaldAttention(
            irreps, "0e" if energies else irreps, width=float(model.r_max) / 2 if width is None else width,
            max_width=max_width, kernels=kernels, heads=heads, lmax=lmax, error=error, method=method,
        )  # fmt: skip
        layers.append(LongRangeFeatures(attention.to(like.device, like.dtype), gain, x, near, _atoms(data, None)))
    for place, layer in zip(places, layers, strict=True):
        place.__class__, place.long_range = _WITH[type(place)], layer
    model.__class__ = _LONG_RANGE[type(model)]
    return model


class LongRangeFeatures(torch.nn.Module):
    """What is near and, times ``gain``, attention of features, in scales that were measured once, on these atoms."""

    scale_in: Tensor
    scale_out: Tensor

    def __init__(
        self, attention: IrrepsEwaldAttention, gain: float, x: Tensor, near: Tensor, atoms: dict[str, Any]
    ) -> None:
        super().__init__()
        self.attention = attention
        self.gain = torch.nn.Parameter(x.new_tensor(gain))
        self.register_buffer("scale_in", _sizes(x, attention.irreps_in))
        with torch.no_grad():
            found = attention(x / self.scale_in, **atoms)
        self.register_buffer("scale_out", _sizes(near, attention.irreps_out) / _sizes(found, attention.irreps_out))

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        return near + self.gain * self.scale_out * self.attention(x / self.scale_in, **_atoms(*_DATA.get()))


class LongRangeProduct(EquivariantProductBasisBlock):
    """MACE's product, and what is far."""

    long_range: LongRangeFeatures

    def forward(self, node_feats: Tensor, sc: Tensor | None, node_attrs: Tensor) -> Tensor:
        near = super().forward(node_feats, sc, node_attrs)
        return self.long_range(near, near)


class _WithEnergies(torch.nn.Module):
    long_range: LongRangeFeatures

    def forward(self, x: Tensor, heads: Tensor | None = None) -> Tensor:
        return self.long_range(x, super().forward(x, heads))


class LongRangeReadout(_WithEnergies, NonLinearReadoutBlock):
    """MACE's readout, and the energy of what is far."""


class LongRangeLinearReadout(_WithEnergies, LinearReadoutBlock):
    """MACE's linear readout, and the energy of what is far."""


_WITH: dict[type, type] = {
    EquivariantProductBasisBlock: LongRangeProduct,
    NonLinearReadoutBlock: LongRangeReadout,
    LinearReadoutBlock: LongRangeLinearReadout,
}


class _Refusal:
    """In place of e3nn's word for how a module is compiled: where it is read, the reason why it cannot be."""

    def __get__(self, module: object, owner: type) -> NoReturn:
        raise NotImplementedError(
            "MACE with long range does not support TorchScript: save it with torch.save(model, path), run it with "
            "MACECalculator(model_paths=path). LAMMPS cannot run it: it gives each process a part of the atoms, and "
            "long range needs sums over all"
        )


class _LongRangeModel(MACE):
    """What a model has to do for its products: to give them the data, and the strain, which MACE keeps to itself."""

    __e3nn_compile_mode__ = __prepare_scriptable__ = _Refusal()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} is made by add_long_range(model, ...) alone: compile_mode, cuequivariance and "
            "whatever else builds a model anew from its configuration would lose its long range"
        )

    def forward(self, data: Mapping[str, Any], training: bool = False, compute_force: bool = True,
                compute_virials: bool = False, compute_stress: bool = False, compute_displacement: bool = False,
                **more: Any) -> dict[str, Tensor | None]:  # fmt: skip
        if more.get("lammps_mliap"):
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS gives each process a part of them: use ASE"
            )
        if more.get("compute_edge_forces") or more.get("compute_atomic_stresses"):
            raise NotImplementedError(
                "compute_edge_forces and compute_atomic_stresses share forces and stress among edges, which carry only "
                "what is near: ask a model with long range for forces, virials and stress of whole systems"
            )
        data, strained = dict(data), compute_virials or compute_stress or compute_displacement
        if strained and data.get("displacement") is None:
            data["displacement"] = data["positions"].new_zeros(data["ptr"].numel() - 1, 3, 3).requires_grad_()
        token = _DATA.set((data, data["displacement"] if strained else None))
        try:
            out = super().forward(
                data, training, compute_force, compute_virials, compute_stress, compute_displacement, **more
            )
        finally:
            _DATA.reset(token)
        if strained and out["displacement"] is not data["displacement"]:
            raise RuntimeError("stress would be wrong: this release of mace-torch does not take displacement from data")
        return out


class LongRangeMACE(_LongRangeModel):
    """MACE with attention behind some of its products."""


class LongRangeScaleShiftMACE(_LongRangeModel, ScaleShiftMACE):
    """ScaleShiftMACE with attention behind some of its products."""


_LONG_RANGE = {MACE: LongRangeMACE, ScaleShiftMACE: LongRangeScaleShiftMACE}
_DATA: contextvars.ContextVar[tuple[dict[str, Any], Tensor | None]] = contextvars.ContextVar("data")


def _atoms(data: dict[str, Any], displacement: Tensor | None) -> dict[str, Any]:
    """Arguments of attention: positions, which MACE has strained in its dictionary, and cells, which it has not."""
    if data.get("pbc") is None:
        raise ValueError("data must have pbc, which AtomicData.from_config takes of configurations, got none")
    cell = data["cell"].view(-1, 3, 3)
    if displacement is not None:
        cell = cell + cell @ (displacement + displacement.mT) / 2
    return {
        "pos": data["positions"],
        "batch": data["batch"],
        "cell": cell,
        "pbc": data["pbc"].view(-1, 3).expand(len(cell), 3),  # TorchSim has one for all
        "batch_size": data["ptr"].numel() - 1,
    }


def _seen(model: MACE, data: dict[str, Any], places: Sequence[torch.nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Of these products and readouts, the features that attention will see and what they give."""
    found: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}

    def see(place: torch.nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        found[place] = (out if isinstance(place, EquivariantProductBasisBlock) else given[0]).detach(), out.detach()

    hooks = [place.register_forward_hook(see) for place in places]
    try:
        model(dict(data), compute_force=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[place] for place in places]


def _sizes(x: Tensor, irreps: o3.Irreps) -> Tensor:
    """The root mean square of each irrep, for each of its columns: (irreps.dim,), 1 where there is nothing."""
    sizes = [x[:, place].square().mean().sqrt().expand(place.stop - place.start) for place in irreps.slices()]
    size = torch.cat(sizes)
    return torch.where(size > 0, size, 1.0)
