"""Energies of molecules by MACE and by a small model of e3nn's layers, both with or without Ewald attention.

Batches are dictionaries as MACE has them: positions, node_attrs (one-hot elements), edge_index, batch, ptr and so on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

with contextlib.suppress(ImportError):
    import mace.modules  # before e3nn 0.4.4, which loads after it alone
from e3nn import o3
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention
from torch import Tensor, nn

from tg_equiattn.graphs import neighbor_list

from .message_passing import HIDDEN, ChannelwiseMessagePassing

Graph = dict[str, Tensor]


def graph_of(
    numbers: Tensor, pos: Tensor, elements: Sequence[int], cutoff: float, dtype: torch.dtype, cell: Tensor | None = None
) -> Graph:
    """One molecule, with edges between atoms nearer than the cutoff, in a cell so large that none cross it."""
    return {
        "cell": (torch.eye(3) if cell is None else cell).to(dtype),
        "pbc": torch.full((3,), cell is not None),
        "positions": pos.to(dtype),
        "node_attrs": (numbers[:, None] == torch.tensor(elements)).to(dtype),
        "edge_index": neighbor_list(pos, cutoff)[0],
    }


def batch_of(graphs: Sequence[Graph]) -> Graph:
    """Several in one."""
    sizes = torch.tensor([len(graph["positions"]) for graph in graphs])
    ptr = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    out = {name: torch.cat([graph[name] for graph in graphs]) for name in graphs[0] if name != "edge_index"}
    out["edge_index"] = torch.cat([g["edge_index"] + start for g, start in zip(graphs, ptr.tolist(), strict=False)], 1)
    nothing = out["positions"].new_zeros(out["edge_index"].shape[1], 3)
    return out | {
        "ptr": ptr,
        "batch": torch.arange(len(graphs)).repeat_interleave(sizes),
        "shifts": nothing,
        "unit_shifts": nothing,
    }


def neighbours(graphs: Sequence[Graph]) -> float:
    """Of an atom, on average."""
    return sum(g["edge_index"].shape[1] for g in graphs) / sum(len(g["positions"]) for g in graphs)


def mace(
    elements: Sequence[int], cutoff: float, irreps: str, layers: int, correlation: int, near: float, scale: float,
    linear: bool = False,
) -> nn.Module:  # fmt: skip
    """MACE's ScaleShiftMACE, whose energies are in units of ``scale``; the last readout is ``linear`` or not."""
    from mace import modules  # which not all need

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    hidden = o3.Irreps(irreps)
    return modules.ScaleShiftMACE(
        r_max=cutoff, num_bessel=8, num_polynomial_cutoff=5, max_ell=max(2, hidden.lmax), interaction_cls=block,
        interaction_cls_first=block, num_interactions=layers, num_elements=len(elements), hidden_irreps=hidden,
        correlation=correlation, MLP_irreps=o3.Irreps("16x0e"), gate=None if linear else nn.functional.silu,
        atomic_energies=torch.zeros(len(elements)).numpy(), avg_num_neighbors=near, atomic_numbers=list(elements),
        atomic_inter_scale=scale, atomic_inter_shift=0.0,
    )  # fmt: skip


class SmallPotential(nn.Module):
    """Messages of NequIP's kind between near atoms, attention after the first, and a perceptron.

    Attention has a residual and a learned gain, 0 at the start.

    Args:
        elements: how many.
        cutoff: of messages.
        near: neighbours of an atom.
        layers: of messages.
        scale: unit of energies.
        attention: options of ``IrrepsEwaldAttention``, or none of it.
    """

    def __init__(
        self, elements: int, cutoff: float, near: float, layers: int, scale: float,
        attention: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = scale
        self.embed = o3.Linear(f"{elements}x0e", HIDDEN)
        self.messages = nn.ModuleList(ChannelwiseMessagePassing(HIDDEN, cutoff, near, bumps=8) for _ in range(layers))
        self.attention = None if attention is None else IrrepsEwaldAttention(HIDDEN, HIDDEN, **attention)
        self.gain = None if attention is None else nn.Parameter(torch.zeros(()))
        self.out = nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 1))

    def forward(self, graph: Graph, compute_force: bool = False) -> dict[str, Tensor]:
        pos, batch, count = graph["positions"], graph["batch"], graph["ptr"].numel() - 1
        x = self.embed(graph["node_attrs"])
        for n, layer in enumerate(self.messages):
            x = layer(x, pos, graph["edge_index"])
            if n == 0 and self.attention is not None:
                x = x + self.gain * self.attention(x, pos, batch, batch_size=count)
        energies = self.scale * self.out(x[:, :16])[:, 0]
        return {"energy": energies.new_zeros(count).index_add(0, batch, energies)}
