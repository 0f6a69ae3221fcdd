"""Attention with measured scales, and the data of a call of a model, which it reads."""

from __future__ import annotations

import contextvars
from typing import Any, NamedTuple

import torch
from e3nn import o3
from torch import Tensor

from tg_equiattn.nn.waves.neutral_sources import Atoms

from ..e3nn.atoms_attention import AtomsEwaldAttention, total_charge_of


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


class LongRangeFeatures(torch.nn.Module):
    """``gain`` times attention, with scales that are measured once, on the atoms of ``data``.

    Args:
        attention: The layer.
        gain: Initial value of the learned gain.
        x: Features that attention reads. Outputs of attention are scaled to their size.
        data: The batch.

    Raises:
        ValueError: if every graph of the batch is a single open atom.
    """

    scale_in: Tensor
    scale_out: Tensor

    def __init__(self, attention: AtomsEwaldAttention, gain: float, x: Tensor, data: dict[str, Any]) -> None:
        super().__init__()
        self.attention = attention
        self.gain = torch.nn.Parameter(x.new_tensor(gain))
        self.register_buffer("scale_in", _sizes(x, attention.irreps_in))
        atoms = atoms_of(data, None)
        if not bool(((data["ptr"].diff() > 1) | atoms["pbc"].any(1)).any()):
            raise ValueError(
                f"batch must have graphs in which atoms attend to others, got {x.shape[0]} open graphs of one atom "
                "each: attention has no size to measure there; pass a typical sample of the training data"
            )
        with torch.no_grad():
            found = attention(x / self.scale_in, **atoms)
        self.register_buffer("scale_out", self.scale_in / _sizes(found, attention.irreps_out))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * self.scale_out * self.attention(x / self.scale_in, **atoms_of(*CALL.get()))


def atoms_of(data: dict[str, Any], displacement: Tensor | None) -> dict[str, Any]:
    """Arguments of attention from the data of a call."""
    square = edge_vectors(data).square().sum(1)
    atoms = Atoms(data["node_attrs"], data["edge_index"], square, total_charge_of(data))
    return {"atoms": atoms} | graphs_of(data, displacement)


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


def edge_vectors(data: dict[str, Any]) -> Tensor:
    """The vector of each edge, from its first to its second atom."""
    first, second = data["edge_index"]
    return data["positions"][second] - data["positions"][first] + data["shifts"]


def _sizes(x: Tensor, irreps: o3.Irreps) -> Tensor:
    """The root mean square of each irrep, for each of its columns: (irreps.dim,), 1 if all features are 0."""
    sizes = [x[:, columns].square().mean().sqrt().expand(columns.stop - columns.start) for columns in irreps.slices()]
    size = torch.cat(sizes)
    return torch.where(size > 0, size, 1.0)
