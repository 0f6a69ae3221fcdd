"""The cases of defaults.py: layers at their defaults, and what a user may have instead."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import measure  # noqa: F401 - which finds examples/studies
import torch
from baselines.message_passing import HIDDEN, MessagePassing
from graph_attention import Dense
from torch import Tensor
from torch_geometric.nn import GPSConv, SAGEConv
from torch_geometric.nn.attention import PerformerAttention

with contextlib.redirect_stdout(io.StringIO()):  # escnn reports the filling of its caches
    from escnn import gspaces, nn

from tg_equiattn.integrations.e3nn import (
    IrrepsEwaldAttention,
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
)
from tg_equiattn.integrations.escnn import R2GlobalAttention, R2GroupAttention, R2LiftingAttention
from tg_equiattn.integrations.pyg import RelativeGPSBlock, RelativePerformerConv

from tg_equiattn.graphs import neighbor_list
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


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


GRAPHS = {  # number, and nodes of each
    "tiny": (1, 8), "small": (64, 30), "medium": (16, 200), "large": (1, 3000),
    "8 of 40": (8, 40), "8 of 150": (8, 150), "1 of 1000": (1, 1000),
}  # fmt: skip


def published(relation: str, rotations: int) -> Case:
    """A layer of the size that GE-ViT's paper trains, beside its formula in operations of torch; 1 image of 28 x 28."""
    layers = [
        GroupAttention(
            cyclic(rotations), 20, 20, heads=9, head_channels=10, kernel_size=5, relation=relation, locality=None
        )
        for _ in range(2)
    ]
    layers[1].plain = True
    return Case(layers[0], layers[1], (torch.randn(1, 20, rotations, 28, 28),), layers[0])


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
    theirs = Dense(PerformerAttention(64, 8, 8))
    first = Graphs(ours, lambda layer, x, pos, edges, batch: layer(x, edges, pos=pos, batch=batch), edges, batch)
    second = Graphs(theirs, lambda layer, x, pos, edges, batch: layer(x, batch), edges, batch)
    return Case(first, second, (torch.randn(len(batch), 64), pos), first)


def gps(size: str, attn: str = "performer", heads: int = 8, **options: Any) -> Case:
    """A layer of a GPS network, beside PyG's with softmax attention."""
    pos, edges, batch = clouds(size)
    settings = options if attn == "ewald" else {"pos_dim": 3, "offset": "distance", "cutoff": 1.0, **options}
    ours = RelativeGPSBlock(64, SAGEConv(64, 64), heads, attn=attn, attn_kwargs=settings)
    theirs = GPSConv(64, SAGEConv(64, 64), heads, attn_type="multihead")
    first = Graphs(ours, lambda layer, x, pos, edges, batch: layer(x, edges, pos=pos, batch=batch), edges, batch)
    second = Graphs(theirs, lambda layer, x, pos, edges, batch: layer(x, edges, batch), edges, batch)
    return Case(first, second, (torch.randn(len(batch), 64), pos), first)


def irreps(kind: Any, size: str, **options: Any) -> Case:
    """A layer of 16 scalars and 8 vectors beside e3nn's message passing along near pairs."""
    pos, edges, batch = clouds(size)
    along = {"batch_size": GRAPHS[size][0], "max_num_nodes": GRAPHS[size][1]}
    placed = kind is IrrepsEwaldAttention

    def ours(layer: torch.nn.Module, x: Tensor, pos: Tensor, edges: Tensor, batch: Tensor) -> Tensor:
        return layer(x, batch=batch, **along, **({"pos": pos} if placed else {}))

    first = Graphs(kind(HIDDEN, HIDDEN, **options), ours, edges, batch)
    messages = MessagePassing(HIDDEN, 1.0)
    second = Graphs(messages, lambda layer, x, pos, edges, batch: layer(x, pos, edges), edges, batch)
    return Case(first, second, (HIDDEN.randn(len(batch), -1), pos), first)


GROUP_ATTENTION: dict[str, dict[str, Any]] = {
    "": {}, "1 of 8 heads by content, ": {"content_heads": 1}, "all heads by content, ": {"content_heads": 8},
    "relative, ": {"relation": "relative"},
    "relative, 2 of 8 heads by content, ": {"relation": "relative", "content_heads": 2},
}  # fmt: skip
# name: what it is beside, and the case for a size; add rows for other libraries here
CASES: dict[str, tuple[str, Callable[[str], Case]]] = {
    **{
        f"R2GroupAttention, {name}C{n}": (
            "R2Conv", lambda size, n=n, options=options: fields(R2GroupAttention, n, size, **options)
        )
        for name, options in GROUP_ATTENTION.items() for n in (4, 8)
    },
    "R2GroupAttention, all pixels, C4": (
        "R2Conv", lambda size: fields(R2GroupAttention, 4, size, kernel_size=None)
    ),
    **{
        f"R2LiftingAttention, C{n}": ("R2Conv", lambda size, n=n: fields(R2LiftingAttention, n, size, lifts=True))
        for n in (4, 8)
    },
    "R2GlobalAttention, C4": ("R2Conv", lambda size: fields(R2GlobalAttention, 4, size)),
    **{
        f"RelativePerformerConv, {method}": ("PerformerAttention", functools.partial(performer, method))
        for method in ("pairs", "features")
    },
    "RelativeGPSBlock": ("GPSConv", gps),
    "IrrepsSE3HyenaOperator": ("MessagePassing", functools.partial(irreps, IrrepsSE3HyenaOperator)),
    "IrrepsVectorSelfAttention": ("MessagePassing", functools.partial(irreps, IrrepsVectorSelfAttention)),
    "IrrepsEwaldAttention": ("MessagePassing", functools.partial(irreps, IrrepsEwaldAttention, width=1.0)),
}  # fmt: skip
EWALD = {"width": 1.0, "max_width": 8.0, "num_gaussians": 2, "num_coulomb": 2}
MEMORY = {"num_layers": 2, "attn_kwargs": {"filter": "exponential", "causal": True, "short_conv": 3}}
# the same for the calls that README advertises
README: dict[str, tuple[str, Callable[[str], Case]]] = {
    "R2GroupAttention, all pixels, relative, C4": (
        "R2Conv",
        lambda size: fields(
            R2GroupAttention, 4, size, kernel_size=None, heads=4, head_channels=8, relation="relative"
        ),
    ),
    "RelativeGPSBlock, far offsets": ("GPSConv", functools.partial(gps, offset="mlp", values="offset")),
    "IrrepsEwaldAttention, 2 + 2 kernels": ("MessagePassing", functools.partial(irreps, IrrepsEwaldAttention, **EWALD)),
    "IrrepsSE3Hyena, exponential, 2 layers": ("MessagePassing", functools.partial(irreps, IrrepsSE3Hyena, **MEMORY)),
}  # fmt: skip


# rows of a size of their own
OTHERS: dict[str, tuple[str, Callable[[], Case]]] = {
    **{
        f"GroupAttention, {relation}, C{n}": ("its formula", functools.partial(published, relation, n))
        for relation in ("ge_vit", "lifted") for n in (4, 8)
    },
    **{
        f"RelativeGPSBlock, attn='ewald', 4 heads, {size}": (
            "GPSConv", functools.partial(gps, size, attn="ewald", heads=4, width=1.0)
        )
        for size in ("8 of 40", "8 of 150", "1 of 1000")
    },
}  # fmt: skip


def shape_of(name: str, size: str) -> str:
    if name.startswith("R2"):
        return f"{SIDES[size]} x {SIDES[size]}"
    return "{} of {}".format(*GRAPHS[size])
