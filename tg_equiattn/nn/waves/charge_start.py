"""Fits to data before a model with charges is trained: offsets of elements, and sizes of charges and of forces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...functional.waves.charges import charge_energies
from ...node_batch import NodeBatch
from .charges import ChargeInteraction

if TYPE_CHECKING:
    from jaxtyping import Float

_RANK = 1e-2  # singular values of compositions below this, relative to the largest, are left to the model
_PAIRS = 8  # radial functions of forces between two elements
_NARROW = 0.3  # width over cutoff with which a factor of charges is fitted: the kernel is 1 / r beyond the cutoff
_TRAINED = 0.5  # error of a model's forces relative to labels, below which it counts as trained


class ChargeStart:
    """Fits to batches of data, which :meth:`add` takes one after the other and :meth:`finish` uses.

    Args:
        layer: Charges of a model before training.
        cutoff: Largest length of an edge.
        search: True if a common factor of the charges is fitted.
    """

    def __init__(self, layer: ChargeInteraction, cutoff: float, search: bool = False) -> None:
        self.layer, self.cutoff, self.search = layer, cutoff, search
        self.rows: list[Tensor] = []
        self.forces: list[tuple[Tensor, ...]] = []
        elements = len(layer.names)
        columns = _PAIRS * elements * (elements + 1) // 2 + 1 if search else 0
        self.square = torch.zeros(columns, columns, dtype=torch.float64)
        self.product = torch.zeros(columns, dtype=torch.float64)

    def add(
        self, elements: Tensor, graphs: dict[str, Any], edge_index: Tensor, edge_vectors: Tensor,
        total_charge: Tensor | None, labels: Tensor | None, own: Tensor,
    ) -> None:  # fmt: skip
        """Add a batch.

        Args:
            elements: number of the element of each node.
            graphs: ``pos``, ``batch``, ``cell``, ``pbc`` and ``batch_size``.
            edge_index: edges, in both directions.
            edge_vectors: vector of each edge.
            total_charge: total charge of each graph.
            labels: forces of the data; ``None`` without.
            own: forces of the model.
        """
        layer, batch, count = self.layer, graphs["batch"], graphs["batch_size"]
        node_batch = NodeBatch.flat(elements, batch, count)
        charges = layer.constants.index_select(0, elements).double()
        layer.check(charges, elements, total_charge, node_batch)
        energies, far = self._charges(charges, graphs, layer.width)
        content = torch.nn.functional.one_hot(elements, len(layer.names)).double()
        self.rows.append((node_batch.mean(torch.cat([content, energies[:, None]], 1))).cpu())
        if labels is None or not labels.any():
            return
        self.forces.append(tuple(x.detach().double().cpu() for x in (labels, own, far)))
        if self.search:
            narrow = self._charges(charges, graphs, _NARROW * self.cutoff)[1]
            pairs = self._pair_forces(elements, edge_index, edge_vectors.detach().double())
            columns = torch.cat([pairs, narrow[..., None]], 2).flatten(0, 1).cpu()
            self.square += columns.mT @ columns
            self.product += columns.mT @ self.forces[-1][0].flatten()

    @torch.no_grad()
    def finish(self) -> float:
        """Set the offsets of the layer, and with ``search`` its scale. Return the factor by which the scale of forces
        of the model changes.

        Offsets explain energies of charges by composition best, starting from the energies of single nodes. The factor
        of a new model is the size of labels without forces of charges, relative to that of labels. The factor of a
        trained model, times its own forces, fits labels without forces of charges best.
        """
        layer = self.layer
        if self.search:
            layer.scale.fill_(self._factor() ** 0.5)
        content, energies = torch.cat(self.rows).split([len(layer.names), 1], 1)
        single = layer.coulomb_constant * layer.constants.cpu().double().nan_to_num() ** 2
        single = single / (math.sqrt(2 * math.pi) * layer.width)
        lacking = energies - content @ single[:, None]
        fitted = torch.linalg.lstsq(content, lacking, rcond=_RANK, driver="gelsd").solution
        layer.offsets.copy_(single + fitted[:, 0])
        if not self.forces:
            return 1.0
        labels, own, far = (torch.cat(x) for x in zip(*self.forces, strict=True))
        rest = labels - float(layer.scale) ** 2 * far
        trained = (labels - own).norm() < _TRAINED * labels.norm()
        if trained and (own * rest).sum() > 0:
            return float((own * rest).sum() / own.square().sum())
        return float(rest.norm() / labels.norm())

    def _factor(self) -> float:
        """The factor of energies of charges that fits forces of labels best, together with forces between pairs."""
        size = self.square.diagonal().sqrt()
        size = torch.where(size > 0, size, 1.0)
        scaled = self.square / size / size[:, None]
        fitted = torch.linalg.lstsq(scaled, self.product / size, rcond=1e-10, driver="gelsd").solution
        if not (factor := float(fitted[-1] / size[-1])) > 0:
            raise ValueError(
                "charges must attract and repel as the forces of the data do to find their scale, got data whose "
                f"forces fit a factor of {factor:.3g}: give other charges, more frames with forces, or learn=False"
            )
        return factor

    def _charges(self, charges: Tensor, graphs: dict[str, Any], width: float) -> tuple[Tensor, Tensor]:
        """Energies of nodes, and forces."""
        pos, layer = graphs["pos"].detach().requires_grad_(), self.layer
        with torch.enable_grad():
            energies = layer.coulomb_constant * charge_energies(
                charges, **graphs | {"pos": pos}, width=width, method=layer.method, error=layer.error
            )
            (slopes,) = torch.autograd.grad(energies.sum(), pos)
        return energies.detach(), -slopes.double()

    def _pair_forces(self, elements: Tensor, edge_index: Tensor, vectors: Tensor) -> Float[Tensor, "nodes 3 columns"]:
        """Central forces between two elements, with radial functions that vanish at the cutoff."""
        first, second = edge_index
        low, high = torch.minimum(elements[first], elements[second]), torch.maximum(elements[first], elements[second])
        kinds = len(self.layer.names)
        pair, length = high * (high + 1) // 2 + low, vectors.norm(dim=1, keepdim=True)
        waves = math.pi * torch.arange(1, _PAIRS + 1, device=vectors.device) * length / self.cutoff
        radial = waves.sin() * (1 - (length / self.cutoff).square()).clamp(min=0) ** 2 / length
        out = vectors.new_zeros(len(elements) * kinds * (kinds + 1) // 2, 3, _PAIRS)
        out.index_add_(0, first * kinds * (kinds + 1) // 2 + pair, vectors[..., None] * radial[:, None])
        return out.unflatten(0, (len(elements), -1)).transpose(1, 2).flatten(2)
