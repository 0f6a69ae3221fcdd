"""The cases of defaults.py: layers at their defaults, and what a user may have instead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import torch
from e3nn import o3
from e3nn.math import soft_one_hot_linspace
from e3nn.nn import FullyConnectedNet
from torch import Tensor
from torch_geometric.nn import GPSConv, SAGEConv
from torch_geometric.nn.attention import PerformerAttention
from torch_geometric.utils import to_dense_batch

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention, IrrepsSE3HyenaOperator, IrrepsVectorSelfAttention
from tg_equiattn.integrations.escnn import R2GlobalAttention, R2GroupAttention, R2LiftingAttention
from tg_equiattn.integrations.pyg import RelativeGPSBlock, RelativePerformerConv

from tg_equiattn.neighbors import neighbor_list


@dataclasses.dataclass
class Case:
    """Two modules for the same input, and the module of ours that ``torch.compile`` gets."""

    ours: torch.nn.Module
    theirs: torch.nn.Module
    inputs: tuple[Tensor, ...]
    compilable: torch.nn.Module

    def to(self, device: str) -> Case:
        ours, theirs, compilable = (m.to(device) for m in (self.ours, self.theirs, self.compilable))
        return Case(ours, theirs, tuple(x.to(device) for x in self.inputs), compilable)


class OfTensors(torch.nn.Module):
    """An escnn module as a function of tensors."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(nn.GeometricTensor(x, self.module.in_type)).tensor


SIDES = {"tiny": 3, "small": 16, "medium": 32, "large": 64}  # of images


def fields(kind: Any, rotations: int, size: str, lifts: bool = False, **options: Any) -> Case:
    """A layer of 16 fields (4 if tiny) beside the 5 x 5 convolution between the same types; 4 images (1 if tiny)."""
    gspace, tiny = gspaces.rot2dOnR2(rotations), size == "tiny"
    hidden = nn.FieldType(gspace, (4 if tiny else 16) * [gspace.regular_repr])
    given = nn.FieldType(gspace, 3 * [gspace.trivial_repr]) if lifts else hidden
    layer = kind(given, hidden, **options)
    x = torch.randn(1 if tiny else 4, given.size, SIDES[size], SIDES[size])
    convolution = nn.R2Conv(given, hidden, 5, padding=2)
    return Case(OfTensors(layer), OfTensors(convolution), (x,), layer.export())


class Graphs(torch.nn.Module):
    """A layer of nodes as a function of (features, positions), with its edges and batch as buffers."""

    def __init__(self, layer: torch.nn.Module, call: Callable[..., Tensor], edges: Tensor, batch: Tensor) -> None:
        super().__init__()
        self.layer, self.call = layer, call
        self.register_buffer("edges", edges)
        self.register_buffer("batch", batch)

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        return self.call(self.layer, x, pos, self.edges, self.batch)


GRAPHS = {"tiny": (1, 8), "small": (64, 30), "medium": (16, 200), "large": (1, 3000)}  # number, and nodes of each


def clouds(size: str) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, the edges between nodes nearer than 1, about ten to a node, and the batch."""
    count, nodes = GRAPHS[size]
    batch = torch.arange(count).repeat_interleave(nodes)
    pos = torch.rand(len(batch), 3) * (nodes * 0.42) ** (1 / 3)
    return pos, neighbor_list(pos, 1.0, batch=batch)[0], batch


def performer(method: str, size: str) -> Case:
    """64 channels and 8 heads, with relative positions, beside PyG's Performer, which has none."""
    pos, edges, batch = clouds(size)
    ours = RelativePerformerConv(64, 64, 8, pos_dim=3, offset="distance", cutoff=1.0, method=method)
    theirs = PerformerAttention(64, 8, 8)

    def dense(layer: torch.nn.Module, x: Tensor, pos: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        x, mask = to_dense_batch(x, batch)
        return layer(x, mask)[mask]

    def relative(layer: torch.nn.Module, x: Tensor, pos: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return layer(x, edges, pos=pos, batch=batch)

    first, second = Graphs(ours, relative, edges, batch), Graphs(theirs, dense, edges, batch)
    return Case(first, second, (torch.randn(len(batch), 64), pos), first)


def gps(size: str) -> Case:
    """A layer of a GPS network with softmax attention, beside PyG's."""
    pos, edges, batch = clouds(size)
    settings = {"pos_dim": 3, "offset": "distance", "cutoff": 1.0}
    ours = RelativeGPSBlock(64, SAGEConv(64, 64), 8, attn_kwargs=settings)
    theirs = GPSConv(64, SAGEConv(64, 64), 8, attn_type="multihead")
    first = Graphs(ours, lambda layer, x, pos, edges, batch: layer(x, edges, pos=pos, batch=batch), edges, batch)
    second = Graphs(theirs, lambda layer, x, pos, edges, batch: layer(x, edges, batch), edges, batch)
    return Case(first, second, (torch.randn(len(batch), 64), pos), first)


IRREPS = o3.Irreps("32x0e + 16x1o")


class Convolution(torch.nn.Module):
    """e3nn's usual message passing: tensor products with spherical harmonics, weighted by functions of the distance."""

    def __init__(self) -> None:
        super().__init__()
        self.harmonics = o3.Irreps.spherical_harmonics(1)
        self.product = o3.FullyConnectedTensorProduct(IRREPS, self.harmonics, IRREPS, shared_weights=False)
        self.weights = FullyConnectedNet([8, 16, self.product.weight_numel], torch.nn.functional.silu)

    def forward(self, x: Tensor, pos: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        offset = pos[source] - pos[target]
        basis = soft_one_hot_linspace(offset.norm(dim=1), 0.0, 1.0, 8, "smooth_finite", cutoff=True)
        along = o3.spherical_harmonics(self.harmonics, offset, True, "component")
        messages = self.product(x[source], along, self.weights(basis))
        return x.new_zeros(len(x), messages.shape[1]).index_add(0, target, messages)


def irreps(kind: Any, size: str, **options: Any) -> Case:
    """A layer of 32 scalars and 16 vectors beside a convolution over near pairs."""
    pos, edges, batch = clouds(size)
    along = {"batch_size": GRAPHS[size][0], "max_num_nodes": GRAPHS[size][1]}
    placed = kind is IrrepsEwaldAttention

    def ours(layer: torch.nn.Module, x: Tensor, pos: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return layer(x, batch=batch, **along, **({"pos": pos} if placed else {}))

    first = Graphs(kind(IRREPS, IRREPS, **options), ours, edges, batch)
    second = Graphs(Convolution(), lambda layer, x, pos, edges, batch: layer(x, pos, edges), edges, batch)
    return Case(first, second, (IRREPS.randn(len(batch), -1), pos), first)


# name: what it is beside, and the case for a size; add rows for other libraries here
CASES: dict[str, tuple[str, Callable[[str], Case]]] = {
    **{
        f"R2GroupAttention, C{n}": ("R2Conv", lambda size, n=n: fields(R2GroupAttention, n, size)) for n in (4, 8)
    },
    **{
        f"R2LiftingAttention, C{n}": ("R2Conv", lambda size, n=n: fields(R2LiftingAttention, n, size, lifts=True))
        for n in (4, 8)
    },
    "R2GlobalAttention, C4": ("R2Conv", lambda size: fields(R2GlobalAttention, 4, size)),
    **{
        f"R2GroupAttention, relative, C{n}": (
            "R2Conv", lambda size, n=n: fields(R2GroupAttention, n, size, relation="relative")
        )
        for n in (4, 8)
    },
    **{
        f"RelativePerformerConv, {method}": ("PerformerAttention", functools.partial(performer, method))
        for method in ("pairs", "features")
    },
    "RelativeGPSBlock": ("GPSConv", gps),
    "IrrepsSE3HyenaOperator": ("convolution", functools.partial(irreps, IrrepsSE3HyenaOperator)),
    "IrrepsVectorSelfAttention": ("convolution", functools.partial(irreps, IrrepsVectorSelfAttention)),
    "IrrepsEwaldAttention": ("convolution", functools.partial(irreps, IrrepsEwaldAttention, width=1.0)),
}  # fmt: skip


def shape_of(name: str, size: str) -> str:
    if name.startswith("R2"):
        return f"{SIDES[size]} x {SIDES[size]}"
    return "{} of {}".format(*GRAPHS[size])
