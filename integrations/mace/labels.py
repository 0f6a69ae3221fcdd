"""The size of long-range energies, from labels of a batch."""

from __future__ import annotations

import math

import torch
from mace.modules.models import MACE
from torch import Tensor


def lacking_energies(model: MACE, data: dict[str, Tensor], energy: Tensor) -> tuple[Tensor | None, bool]:
    """The energies of graphs that the model lacks, (graphs,), in the unit of readouts, ``None`` without labels that
    differ; and True if that is most of what they have beside single atoms, as before training."""
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
    """Size that energies of atoms (T, 1) should have, with a sign, from a fit of their sums to labels of graphs."""
    batch, counts = data["batch"], data["ptr"].diff().to(found.dtype)
    elements = found.new_zeros(len(counts), data["node_attrs"].shape[1]).index_add(0, batch, data["node_attrs"])
    others = elements if len(counts) > elements.shape[1] + 2 else counts[:, None]
    energies = found.new_zeros(len(counts), 1).index_add(0, batch, found)
    columns = torch.cat([energies, others], 1).to("cpu", torch.float64)
    factor = torch.linalg.lstsq(columns, labels[:, None].to(columns), driver="gelsd").solution[0, 0].item()
    size, spread = float(found.square().mean().sqrt()), float((labels / counts).std())
    return math.copysign(max(abs(factor) * size, spread), factor)
