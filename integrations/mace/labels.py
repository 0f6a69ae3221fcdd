"""Fits of the size of long-range energies to the labels of a batch: net forces on fragments, or energies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mace.modules.models import MACE
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

_RIDGE = 0.05  # penalty of energies of atoms, relative to the mean square of net forces


def lacking_energies(model: MACE, data: dict[str, Tensor], energy: Tensor) -> tuple[Tensor | None, bool]:
    """The difference between labels and energies of a model, and whether the model is untrained.

    Args:
        model: The model.
        data: The batch, with or without labels.
        energy: Energies of graphs from the model.

    Returns:
        The differences, (graphs,), in the unit of readouts; ``None`` if there are no labels, or if they do not differ
        among graphs. And True if the differences vary more than half as much as the labels without the energies of
        single atoms, as before training.
    """
    if data.get("energy") is None or data["ptr"].numel() < 3 or not bool(data["energy"].any()):
        return None, False
    single = model.atomic_energies_fn(data["node_attrs"])
    head = data["head"][data["batch"]] if "head" in data else data["batch"] * 0
    single = single.gather(1, head[:, None])[:, 0] if single.ndim == 2 else single
    binding = data["energy"].index_add(0, data["batch"], single.to(data["energy"].dtype), alpha=-1)
    lacking, counts = data["energy"] - energy.to(data["energy"].dtype), data["ptr"].diff()
    spread, wanted = ((x / counts).std() for x in (lacking, binding))
    scale = model.scale_shift.scale.abs().mean() if hasattr(model, "scale_shift") else 1.0
    return (lacking / scale if spread > 0 else None), bool(spread > 0.5 * wanted)


def fitted_size(labels: Tensor, found: Tensor, data: dict[str, Tensor]) -> float:
    """The size, with a sign, that energies of atoms ``found`` (T, 1) should have: their sums over graphs are fitted to
    labels of graphs, together with an energy of each element."""
    batch, counts = data["batch"], data["ptr"].diff().to(found.dtype)
    elements = found.new_zeros(len(counts), data["node_attrs"].shape[1]).index_add(0, batch, data["node_attrs"])
    others = elements if len(counts) > elements.shape[1] + 2 else counts[:, None]
    energies = found.new_zeros(len(counts), 1).index_add(0, batch, found)
    columns = torch.cat([energies, others], 1).to("cpu", torch.float64)
    factor = torch.linalg.lstsq(columns, labels[:, None].to(columns), driver="gelsd").solution[0, 0].item()
    size, spread = float(found.square().mean().sqrt()), float((labels / counts).std())
    return math.copysign(max(abs(factor) * size, spread), factor)


class NetForces(NamedTuple):
    """Net forces on the fragments that edges connect.

    Attributes:
        labels: forces of labels, summed over each fragment, (fragments, 3), in the unit of readouts.
        fragment: the fragment of each atom, (T,).
    """

    labels: Tensor
    fragment: Tensor

    def of_atoms(self, forces: Tensor) -> Tensor:
        return torch.zeros_like(self.labels).index_add(0, self.fragment, forces.to(self.labels))


def net_forces(model: MACE, data: dict[str, Tensor]) -> NetForces | None:
    """The net forces on fragments from labels; ``None`` if no graph has two fragments, or without labels of forces.

    Forces by message passing sum to zero on each fragment, so message passing cannot explain net forces.
    """
    forces, nodes = data.get("forces"), data["positions"].shape[0]
    if forces is None or not bool(forces.any()):
        return None
    first, second = data["edge_index"].cpu().numpy()
    count, fragment = connected_components(coo_array((first >= 0, (first, second)), (nodes, nodes)))
    if count == data["ptr"].numel() - 1:
        return None
    net = NetForces(forces.new_zeros(count, 3), torch.as_tensor(fragment, device=forces.device, dtype=torch.int64))
    scale = model.scale_shift.scale.abs().mean() if hasattr(model, "scale_shift") else 1.0
    return net._replace(labels=net.of_atoms(forces) / scale)


def fitted_kernels(forces: Sequence[Tensor], energies: Sequence[Tensor], net: NetForces) -> Tensor:
    """The factor of each kernel, (kernels,), from a ridge fit to net forces on fragments.

    ``forces`` and ``energies`` are those of atoms from each kernel, (T, 3) and (T, 1). Forces are fitted, and the
    penalty is on energies, so that kernels that act between fragments are preferred to kernels that act within them.
    """
    columns = torch.stack([net.of_atoms(each).flatten() for each in forces], 1).to("cpu", torch.float64)
    if not columns.any() or not net.labels.any():
        return columns.new_ones(columns.shape[1])
    each = torch.cat(list(energies), 1).to("cpu", torch.float64)
    sizes = each.square().mean(0).sqrt()
    sizes = sizes.clamp(min=1e-6 * float(sizes.max()))
    columns = columns / sizes
    square, labels = columns.mT @ columns, net.labels.flatten().to(columns)
    penalty = _RIDGE * square.diagonal().mean() * torch.eye(len(sizes), dtype=torch.float64)
    return torch.linalg.solve(square + penalty, columns.mT @ labels) / sizes
