"""Attention with measured scales, and the data of a call of a model, which it reads."""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from e3nn import o3
from torch import Tensor
from torch.func import functional_call

from tg_equiattn.nn.waves.neutral_sources import Atoms

from ..e3nn.atoms_attention import AtomsEwaldAttention
from .labels import NetForces, fitted_kernels, fitted_size

# Initial size of the differences of elements and of features in attention that gives energies.
_CONTENT = 0.1
# Factor of the weights of attention that gives energies. An optimizer moves all weights by the learning rate. With this
# factor, the product of five matrices changes about as much as the gain.
_SLOWNESS = 100.0
_FAST = ("neutral.constants", "neutral.charges")  # charges of elements and of graphs, which have no such factor


class Call:
    """Data of one call of a model, which its blocks read, and the long-range energies of atoms, (T, 1), which they
    write."""

    def __init__(self, data: dict[str, Any], displacement: Tensor | None) -> None:
        self.data, self.displacement = data, displacement
        self.energies: Tensor | None = None


CALL: contextvars.ContextVar[Call] = contextvars.ContextVar("call")
CALCULATED: contextvars.ContextVar[list[dict[str, Any]] | None] = contextvars.ContextVar("calculated", default=None)


class LongRangeFeatures(torch.nn.Module):
    """``gain`` times attention, with scales that are measured once, on the atoms of ``data``.

    With ``energies`` the output is an energy of each atom, and its scale should not change while messages do:

    - Values of all elements start with one sign, so that net forces are not small differences.
    - Features of an atom are bounded, since those of new models grow tenfold in a few steps.
    - Weights are stored multiplied by 100. A step of Adam does not depend on the size of a weight, so weights change
      more slowly by this factor, relative to their size.

    Args:
        attention: The layer.
        gain: Initial value of the learned gain.
        x: Features that attention reads.
        near: Output of the block or readout. Outputs of attention are scaled to its size.
        data: The batch.
        energies: True if the output is an energy. The default is ``False``.
        labels: Energies of graphs, to which the scale is fitted instead. The default, ``None``, means no labels.
        net: Net forces on fragments, to which all kernels are fitted instead. The default, ``None``, means none.
    """

    scale_in: Tensor
    scale_out: Tensor

    def __init__(
        self, attention: AtomsEwaldAttention, gain: float, x: Tensor, near: Tensor, data: dict[str, Any],
        energies: bool = False, labels: Tensor | None = None, net: NetForces | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention = attention
        self.gain = torch.nn.Parameter(x.new_tensor(gain))
        self.energies = energies
        self.register_buffer("scale_in", _sizes(x, attention.irreps_in))
        with torch.no_grad():
            if energies:
                attention.neutral.embedding.mul_(_CONTENT).add_(1)
                for weight in [*attention.value, *attention.product.weights, attention.neutral.charges]:
                    weight.abs_()
            for name, weight in attention.named_parameters() if energies else ():
                if name not in _FAST:
                    weight.mul_(_SLOWNESS)
        if net is not None:
            scale = self._fit_kernels(x, data, net)
        else:
            with torch.no_grad():
                found = self._attend(x, atoms_of(data, None))
            size = _sizes(near, attention.irreps_out) if labels is None else fitted_size(labels, found, data)
            scale = size / _sizes(found, attention.irreps_out)
        self.register_buffer("scale_out", scale)

    def forward(self, x: Tensor) -> Tensor:
        call = CALL.get()
        return self.gain * self.scale_out * self._attend(x, atoms_of(call.data, call.displacement))

    def _attend(self, x: Tensor, atoms: dict[str, Any]) -> Tensor:
        x = x / self.scale_in
        if not self.energies:
            return self.attention(x, **atoms)
        x = x / (1 + x.square().mean(1, keepdim=True)).sqrt() * _CONTENT
        weights = {n: w if n in _FAST else w / _SLOWNESS for n, w in self.attention.named_parameters()}
        return functional_call(self.attention, weights, (x,), atoms)

    def _fit_kernels(self, x: Tensor, data: dict[str, Any], net: NetForces) -> Tensor:
        """Scale the kernels by factors that fit net forces best, and return their common factor."""
        pos, gains = data["positions"].detach().requires_grad_(), self.attention.gains
        initial, forces, energies = gains.detach().clone(), [], []
        for kernel in range(gains.shape[1]):
            with torch.no_grad():
                gains.zero_()[:, kernel] = initial[:, kernel]
            found = self._attend(x, atoms_of(data | {"positions": pos}, None))
            forces.append(-torch.autograd.grad(found.sum(), pos)[0])
            energies.append(found.detach())
        factors = fitted_kernels(forces, energies, net).to(initial)
        common = factors.square().mean().sqrt()
        with torch.no_grad():
            gains.copy_(initial * (factors / common)[:, None])
        return common.expand(1)


def atoms_of(data: dict[str, Any], displacement: Tensor | None) -> dict[str, Any]:
    """Arguments of attention from the data of a call."""
    square = edge_vectors(data).square().sum(1)
    atoms = Atoms(data["node_attrs"], data["edge_index"], square, data.get("total_charge"))
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
        "pbc": data["pbc"].view(-1, 3).expand(len(cell), 3),  # TorchSim has one for all
        "batch_size": data["ptr"].numel() - 1,
    }


def edge_vectors(data: dict[str, Any]) -> Tensor:
    """The vector of each edge, from its first to its second atom."""
    first, second = data["edge_index"]
    return data["positions"][second] - data["positions"][first] + data["shifts"]


def _sizes(x: Tensor, irreps: o3.Irreps) -> Tensor:
    """The root mean square of each irrep, for each of its columns: (irreps.dim,), 1 if all features are 0."""
    sizes = [x[:, columns].square().mean().sqrt().expand(columns.stop - columns.start) for columns in irreps.slices()]
    size = torch.cat(sizes)
    return torch.where(size > 0, size, 1.0)
