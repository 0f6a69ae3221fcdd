"""Every public module and function with inputs for it: one table for tests of devices."""

import contextlib
import importlib
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import group_layers
import pytest
import torch
from clouds import EDGE, S, V, dense, sample
from clouds import double as d
from space import batch_of
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tg_equiattn import functional as F
from tg_equiattn import nn as layers
from tg_equiattn.graphs import NeighborList
from tg_equiattn.grids import PixelGrid
from tg_equiattn.group.layers import RegularBatchNorm, SpatialCrop, SpatialMaxPool
from tg_equiattn.groups import cyclic, dihedral, dyadic, octahedral
from tg_equiattn.linear.attention import MeanReadout, PerformerBlock
from tg_equiattn.linear.random_features import RandomFeatures

C4, GRID, SIZES, RAGGED = cyclic(4), PixelGrid((5, 7), 3), [5, 11, 3], [2, 17, 1, 5]
SMALL = {"hidden_scalars": 5, "hidden_vectors": 7}
LOCAL = {"local_context": True, "edge_channels": EDGE}


class Case(NamedTuple):
    """A module, inputs for it, of other sizes for steps 0, 1, 2 ... where they vary, and the host it needs."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    host: str = "torch"
    varies: bool = True

    def build(self, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
        """The module with random parameters, in training mode, and its inputs, all on the CPU."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = self.make().to(dtype)
        with torch.no_grad():
            for p in module.parameters():
                p.normal_(std=0.4)
        return module, {name: _cast(x, dtype) for name, x in self.inputs(0).items()}


def is_floating(x: Any) -> bool:
    """True for floating point tensors."""
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _cast(x: Any, dtype: torch.dtype) -> Any:
    return x.to(dtype) if is_floating(x) else x


class Call(nn.Module):
    def __init__(self, function: Callable, *parts: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleList(parts)

    def forward(self, **inputs):
        return self.function(*self.parts, **inputs)


def fixed(make, inputs):
    return Case(make, lambda _: inputs(), varies=False)


def function(call, **shapes):
    """A function of tensors of these shapes, or of what is given instead of a shape."""
    make = lambda: {name: d(*s) if isinstance(s, tuple) else s() for name, s in shapes.items()}  # noqa: E731
    return fixed(lambda: Call(call), make)


def layer(make, *shape, axes=(0, -2, -1), masked=False, context=None):
    """A layer of features, masks of images and a context; ``axes`` may have any size."""

    def inputs(step):
        sizes = list(shape)
        for axis in axes:
            sizes[axis] += 2 * step
        more = {"mask": torch.rand(sizes[0], *sizes[-2:]) < 0.7} if masked else {}
        if context is not None:
            more |= {"context": d(sizes[0], context, *sizes[2:])} | {f"context_{n}": x for n, x in more.items()}
        return {"x": d(*sizes)} | more

    return Case(make, inputs)


def attention(kind, *shape, group=C4, masked=False, **options):
    make = lambda: group_layers.layer(kind, group, **{"head_channels": 5} | options)  # noqa: E731
    return layer(make, 2, 3, *shape, masked=masked, context=options.get("context_channels"))


def transformer(group=C4, in_channels=1, *, shape=(5, 6), masked=False, **options):
    options = {"channels": (6,), "heads": 2, "kernel_size": 3} | options
    return layer(
        lambda: layers.GroupTransformer(group, in_channels, 3, **options), 2, in_channels, *shape, masked=masked
    )


def lengths():
    return torch.tensor([11, 4, 0])


def flat_batch(sizes):
    return lambda: batch_of(sizes)


def tokens(make, *, flat=False, edges=False, causal=False):
    """Clouds for a module of scalars and vectors: ragged and padded, or flat with their sizes given."""

    def inputs(step):
        sizes = [SIZES[0] + step, SIZES[1] + 2 * step, *SIZES[2:], *[4] * step]
        x = sample("local" if edges else "causal" if causal else "plain", sizes)
        if flat:
            return {**x, "batch_size": len(sizes), "max_num_nodes": max(sizes)}
        return dense(x, sizes, 13 + 2 * step, 0.0)[0]

    return Case(make, inputs)


def chains(make):
    """Complexes of two chains with missing tokens, flat, with no values read."""
    flat = tokens(make, flat=True).inputs

    def inputs(step):
        x = flat(step)
        place = torch.arange(len(x["batch"]))
        chain = (place % 3 == 0).long()
        x |= {"chain": chain, "index": 2 * place - 3 * chain + (place > 7) * 2}
        return x | {"num_chains": 2 * x["batch_size"], "max_num_nodes": 2 * len(place) + 3}

    return Case(make, inputs)


def periodic(make):
    """Crystals and a cloud, flat, with no values read."""
    flat = tokens(make, flat=True).inputs

    def inputs(step):
        x = flat(step)
        cell = 3 * torch.eye(3, dtype=torch.float64).repeat(x["batch_size"], 1, 1) + 0.1 * d(x["batch_size"], 3, 3)
        pbc = torch.ones(x["batch_size"], 3, dtype=torch.bool)
        pbc[1] = False
        return {**x, "cell": cell, "pbc": pbc}

    return Case(make, inputs)


def ragged(step):
    return [RAGGED[0] + step, RAGGED[1] - 2 * step, *RAGGED[2:], *[3] * step]


def near(sizes):
    """Random pairs of a ragged batch with whole offsets, some of a node with itself."""
    batch = batch_of(sizes)
    pairs = ((batch[:, None] == batch) & (torch.rand(len(batch), len(batch)) < 0.4)).nonzero()
    pairs = pairs[torch.randperm(len(pairs))]
    return {"target": pairs[:, 0], "source": pairs[:, 1], "offsets": torch.randint(-2, 3, (len(pairs), 2)).double()}


def on_grid(make, masked=False):
    def inputs():
        mask = {"mask": torch.rand(2, len(GRID)) < 0.7} if masked else {}
        return {"x": d(2, len(GRID), 12), "grid": GRID} | mask

    return fixed(make, inputs)


def performer(position="window", form="grid", **options):
    options = {"num_random_features": 11, "cutoff": 3, "method": "features", **options}

    def make():
        return layers.PerformerAttention(12, 15, 3, position=position, **options)

    if form != "ragged":
        return on_grid(make, masked=form == "masked")

    def on_nodes(layer, x, pos, batch, batch_size, target, source, offsets):
        pairs = NeighborList(torch.stack([source, target]), x.shape[0], offsets) if layer.needs.neighbors else None
        return layer(x, pos=pos, batch=batch, batch_size=batch_size, neighbors=pairs)

    def inputs(step):
        batch = batch_of(ragged(step))
        nodes = {"x": d(len(batch), 12), "pos": d(len(batch), 2), "batch": batch, "batch_size": len(ragged(step))}
        return {**nodes, **near(ragged(step))}

    return Case(lambda: Call(on_nodes, make()), inputs)


def relative_performer(**options):
    options = {"channels": 12, "num_layers": 2, "heads": 3, "cutoff": 3, "dropout": 0.0, **options}
    bright = torch.tensor([0.1, 1.0, 3.0])[:, None, None, None]  # unlike means of images: a batch norm divides by them
    images = lambda: {"image": (bright * torch.rand(3, 2, 5, 7)).double()}  # noqa: E731
    return fixed(lambda: layers.RelativePerformer(2, 5, **options), images)


def charged(kind, columns, host="torch", **options):
    """A layer of charges. Clouds of two elements with features of these columns, and bonds between neighbors in the
    order: neutral ones, or with total charges where charges are predicted."""

    def inputs(step):
        sizes = [4 + 2 * step, 12, 2]
        first = torch.arange(0, sum(sizes), 2)
        edges = torch.stack([torch.cat([first, first + 1]), torch.cat([first + 1, first])])
        pos = d(sum(sizes), 3)
        return {
            "elements": torch.arange(sum(sizes)) % 2, "pos": pos, "batch": batch_of(sizes), "batch_size": 3,
            "features": d(sum(sizes), columns), "edge_index": edges, "edge_vectors": pos[edges[1]] - pos[edges[0]],
            "max_num_nodes": 32, **({"total_charge": d(3)} if "names" in options else {}),
        }  # fmt: skip

    def make():
        place = layers if host == "torch" else importlib.import_module("tg_equiattn.integrations.e3nn")
        return getattr(place, kind)(**options, width=1.0, cutoff=2.0)

    return Case(make, inputs, host)


GIVEN, PREDICTED = {"charges": {"Na": 0.7, "Cl": -0.7}}, {"names": ["Na", "Cl"]}


CORE = {
    "LiftingAttention": attention(layers.LiftingAttention, 4, 6, locality=4.0),
    "LiftingAttention volume": attention(layers.LiftingAttention, 3, 4, 5, group=octahedral(), heads=1),
    "GroupAttention": attention(layers.GroupAttention, 4, 4, 6),
    "GroupAttention ge_vit": attention(layers.GroupAttention, 4, 4, 6, relation="ge_vit"),
    "GroupAttention all pixels": attention(layers.GroupAttention, 4, 3, 4, kernel_size=None),
    "GroupAttention by content": attention(
        layers.GroupAttention, 4, 3, 4, kernel_size=None, encoding=None, relation="relative"
    ),
    "GroupAttention disk": attention(layers.GroupAttention, 4, 6, 5, kernel_size=5, window_shape="disk"),
    "GroupAttention relative": attention(layers.GroupAttention, 4, 4, 6, relation="relative", locality=1.0),
    "ScaleLiftingAttention": attention(layers.LiftingAttention, 5, 6, group=dyadic(3)),
    "ScaleGroupAttention": attention(layers.GroupAttention, 4, 5, 6, group=dyadic(2, cyclic(2))),
    "GroupAttention stride": attention(layers.GroupAttention, 4, 5, 7, stride=2, masked=True),
    "LiftingAttention finer context": fixed(
        lambda: group_layers.layer(layers.LiftingAttention, C4, head_channels=5),
        lambda: {"x": d(2, 3, 3, 2), "context": d(2, 3, 6, 4)},
    ),
    "GroupAttention coarser context": fixed(
        lambda: group_layers.layer(layers.GroupAttention, C4, head_channels=5),
        lambda: {"x": d(2, 3, 4, 5, 3), "context": d(2, 3, 4, 3, 2)},
    ),
    "GroupAttention masked": attention(layers.GroupAttention, 4, 4, 6, context_channels=4, masked=True),
    "GlobalGroupAttention": attention(
        layers.GlobalGroupAttention, 4, 4, 6, relation="relative", padding_mode="circular"
    ),
    "GlobalGroupAttention masked": attention(layers.GlobalGroupAttention, 4, 4, 6, masked=True),
    "GroupAttentionBlock masked": layer(
        lambda: group_layers.block(C4, 6, 8, layers.GlobalGroupAttention, crop=1, norm="global"),
        2, 6, 4, 5, 6, masked=True, context=6,
    ),
    "GroupAttentionBlock": layer(lambda: group_layers.block(C4, 6, 8), 2, 6, 4, 5, 4),
    "GroupTransformer": transformer(dihedral(2), 2, shape=(12, 10), channels=(6, 8), pools=(1,)),
    "GroupTransformer masked": transformer(masked=True, attn_kwargs={"padding_mode": "circular"}),
    "GroupTransformer batch": transformer(norm="batch"),
    "GroupAttention rotary": attention(
        layers.GroupAttention, 4, 3, 4, kernel_size=None, encoding="rotary", masked=True
    ),
    "GroupAttention rotary, relative": attention(
        layers.GroupAttention, 4, 3, 4, kernel_size=None, relation="relative", masked=True
    ),
    "LiftingAttention rotary": attention(layers.LiftingAttention, 3, 4, kernel_size=None, encoding="rotary"),
    "FrameTransformerBlock": layer(lambda: layers.FrameTransformerBlock(C4, 4, heads=2), 2, 4, 4, 3, 4, masked=True),
    "FrameTransformer": layer(
        lambda: layers.FrameTransformer(dihedral(2), 2, 3, patch_size=2, channels=4, num_layers=1, heads=2),
        2, 2, 4, 6, masked=True,
    ),
    "FrameTransformer fields": layer(
        lambda: layers.FrameTransformer(
            C4, 2, 3, patch_size=1, channels=4, num_layers=1, heads=2, lifts=False, pool=False
        ),
        2, 2, 4, 3, 4,
    ),
    "GroupLinear": layer(lambda: layers.GroupLinear(C4, 3, 5), 2, 3, 4, 5, axes=(0, -1)),
    "RegularGlobalNorm": layer(lambda: layers.RegularGlobalNorm(7), 2, 7, 4, 3, 5),
    "RegularLayerNorm": layer(lambda: layers.RegularLayerNorm(7), 2, 7, 4, 3, 5),
    "RegularBatchNorm": layer(lambda: RegularBatchNorm(7), 2, 7, 4, 3, 5),
    "GlobalPooling of the group": layer(lambda: layers.GlobalPooling(None, "max"), 2, 7, 4, 3, 5),
    "GlobalPooling": layer(layers.GlobalPooling, 2, 7, 4, 3, 5),
    "SpatialMaxPool": layer(lambda: SpatialMaxPool(2), 2, 7, 4, 6, 4),
    "SpatialCrop": layer(lambda: SpatialCrop(1), 2, 7, 4, 6, 4),
    "RandomFeatures": fixed(
        lambda: Call(lambda features, x: features(x.device, x.dtype), RandomFeatures(11, 5)),
        lambda: {"x": d(1)},
    ),
    "PerformerAttention": performer(position=None),
    "PerformerAttention window": performer(),
    "PerformerAttention mlp": performer(offset="mlp", values="offset"),
    "PerformerAttention distance": performer(offset="distance", values="offset"),
    "PerformerAttention masked window": performer(form="masked", values="offset"),
    "PerformerAttention masked pairs": performer(form="masked", method="pairs"),
    "PerformerAttention ragged": performer(form="ragged", position=None, values="offset"),
    "PerformerAttention ragged window": performer(form="ragged"),
    "PerformerAttention clipped": performer("clipped"),
    "PerformerAttention sinusoid": performer("sinusoid"),
    "PerformerAttention masked clipped": performer("clipped", "masked"),
    "PerformerAttention ragged clipped": performer("clipped", "ragged"),
    "PerformerAttention ragged sinusoid": performer("sinusoid", "ragged"),
    "PerformerBlock": on_grid(
        lambda: PerformerBlock(layers.PerformerAttention(12, 12, 3, cutoff=3, method="features"), 12)
    ),
    "MeanReadout": layer(lambda: MeanReadout(5, 3), 2, 7, 5, axes=(0, 1)),
    "RelativePerformer": relative_performer(),
    "RelativePerformer clipped": relative_performer(position="clipped"),
    "RelativePerformer batch": relative_performer(position=None, norm="batch", num_layers=1),
    "CliffordMLP": layer(lambda: layers.CliffordMLP(3, 5, num_blocks=2), 11, 3, 8, axes=(0,)),
    "SE3HyenaOperator": tokens(lambda: layers.SE3HyenaOperator(S, V)),
    "SE3HyenaOperator flat": tokens(lambda: layers.SE3HyenaOperator(S, V, causal=True), flat=True, causal=True),
    "SE3HyenaOperator radial": tokens(lambda: layers.SE3HyenaOperator(S, V, order="radial")),
    "SE3HyenaOperator radial local": tokens(
        lambda: layers.SE3HyenaOperator(S, V, order="radial", **LOCAL, **SMALL), flat=True, edges=True
    ),
    "SE3HyenaOperator lag causal flat": tokens(
        lambda: layers.SE3HyenaOperator(S, V, filter="implicit", causal=True, short_conv=3), flat=True, causal=True
    ),
    "SE3HyenaOperator exponential": tokens(
        lambda: layers.SE3HyenaOperator(S, V, filter="exponential", causal=True), causal=True
    ),
    "SE3Hyena": tokens(lambda: layers.SE3Hyena(S, V, num_layers=2, pool="mean", **SMALL)),
    "SE3Hyena chains": chains(
        lambda: layers.SE3Hyena(S, V, num_layers=1, attn_kwargs={"filter": "implicit", "short_conv": 3}, **SMALL)
    ),
    "SE3HyenaOperator chains": chains(lambda: layers.SE3HyenaOperator(S, V, short_conv=3)),
    "VectorSelfAttention": tokens(lambda: layers.VectorSelfAttention(S, V)),
    "VectorSelfAttention local": tokens(lambda: layers.VectorSelfAttention(S, V, **LOCAL), flat=True, edges=True),
    "EwaldAttention": tokens(lambda: layers.EwaldAttention(S, V, width=1.0, heads=2)),
    "EwaldAttention flat": tokens(lambda: layers.EwaldAttention(S, V, width=1.0, heads=2), flat=True),
    "EwaldAttention crystals": periodic(
        lambda: layers.EwaldAttention(S, V, width=1.0, num_gaussians=1, num_coulomb=1, lmax=0, error=0.01,
                                      max_hkl=(4, 4, 4))
    ),
    "charge_energies": function(
        lambda **t: F.charge_energies(**t, width=1.0, batch_size=len(RAGGED), max_num_nodes=17), charges=(25,),
        pos=(25, 3), batch=flat_batch(RAGGED),
    ),
    "ChargeInteraction": charged("ChargeInteraction", 3, scalars=3, **GIVEN),
    "PredictedChargeInteraction": charged("PredictedChargeInteraction", 3, scalars=3, **PREDICTED),
    "SE3Hyena attention": tokens(
        lambda: layers.SE3Hyena(S, V, 0, 1, attention=True, num_layers=1, pool="mean", **SMALL)
    ),
}  # fmt: skip


def fields_layer(kind, space, order, n, **options):
    """A layer of the escnn integration, of n fields of each kind, as a module of tensors."""
    import fields
    from escnn import gspaces

    space = getattr(gspaces, space)(*order)
    image, hidden = fields.trivial(space, n), fields.regular(space, n)
    if "Norm" in kind or "TransformerBlock" in kind:
        module = getattr(fields.escnn, kind)(hidden)
    elif "FrameTransformer" in kind:
        module = getattr(fields.escnn, kind)(image, hidden, patch_size=1, channels=4, num_layers=1)
    elif "Block" in kind:
        module = fields.block(fields.of(space, "GroupAttention")(hidden, hidden, **options))
    else:
        module = getattr(fields.escnn, kind)(image if "Lifting" in kind else hidden, hidden, **options)

    def run(module, x):
        out = module(fields.nn.GeometricTensor(x, module.in_type))
        return getattr(out, "tensor", out)

    return Call(run, module)


def on_fields(kind):
    volumes, more = kind.startswith("R3"), {"locality": 4.0} if "Lifting" in kind else {}
    space = ("invOnR3", ()) if volumes else ("flipRot2dOnR2", (2,))
    channels = 3 if "Lifting" in kind or "Frame" in kind else 3 * (2 if volumes else 4)
    sides = (2, 3, 4) if volumes else (5, 6)
    return Case(
        lambda: fields_layer(kind, *space, 3, heads=2, kernel_size=3, **more),
        lambda step: {"x": d(2 + step, channels, *(n + step for n in sides))},
        "escnn",
    )


def on_graphs(kind, **options):
    def make():
        from tg_equiattn.integrations import pyg

        wide = {"num_random_features": 11, "cutoff": 3, **options}
        if kind == "RelativePerformerConv":
            return pyg.RelativePerformerConv(12, 15, 3, **{"method": "features", **wide})
        from torch_geometric.nn import SAGEConv

        attention = {"method": "features", **wide}
        return pyg.RelativeGPSBlock(12, SAGEConv(12, 12), 3, norm="layer_norm", attn_kwargs=attention)

    def inputs(step):
        pairs, batch = near(sizes=ragged(step)), batch_of(ragged(step))
        given = {
            "x": d(len(batch), 12), "edge_index": torch.stack([pairs["source"], pairs["target"]]),
            "edge_offset": pairs["offsets"], "batch": batch, "batch_size": len(ragged(step)),
        }  # fmt: skip
        if kind == "RelativeGPSBlock" or "values" in options:  # offsets are those of positions
            del given["edge_offset"]
        more = {"pos": d(len(batch), 2)} if len(given) < 5 else {}
        return given | more | ({"max_num_nodes": max(ragged(step))} if options.get("method") == "pairs" else {})

    return Case(make, inputs, "torch_geometric")


def on_points():
    """Open graphs, with no values read."""

    def inputs(step):
        batch = batch_of(ragged(step))
        return {
            "x": d(len(batch), 5), "vectors": d(len(batch), V, 3), "pos": d(len(batch), 3), "batch": batch,
            "batch_size": len(ragged(step)), "max_num_nodes": max(ragged(step)), "return_vectors": True,
        }  # fmt: skip

    def make():
        from tg_equiattn.integrations import pyg

        return pyg.EwaldAttention(5, 4, width=1.0, heads=2, in_vectors=V, out_vectors=3)

    return Case(make, inputs, "torch_geometric")


@contextlib.contextmanager
def einsums_as_written(host):
    """Products of e3nn are made in less time and take more in a call: a test makes many."""
    if host != "e3nn":
        yield
        return
    e3nn = importlib.import_module(host)
    before = e3nn.get_optimization_defaults()
    e3nn.set_optimization_defaults(optimize_einsums=False)
    try:
        yield
    finally:
        e3nn.set_optimization_defaults(**before)


def on_irreps(kind, irreps_in="3x0o+2x1e+4x0e+3x1o", *arguments, **options):
    def make():
        from tg_equiattn.integrations import e3nn

        with einsums_as_written("e3nn"):
            return getattr(e3nn, kind)(irreps_in, *arguments, **options)

    def inputs(step):
        from e3nn import o3

        batch = batch_of(ragged(step))
        out = {"batch": batch, "batch_size": len(ragged(step)), "max_num_nodes": max(ragged(step))}
        if kind == "LongTensorProduct":
            first, second = (d(len(batch), o3.Irreps(irreps).dim) for irreps in (irreps_in, arguments[0]))
            return {"x1": first, "x2": second, **out}
        out |= {"x": d(len(batch), o3.Irreps(irreps_in).dim), "pos": d(len(batch), 3)}
        if "filter" in options:
            place = torch.arange(len(batch))
            out |= {"chain": place % 2, "index": 2 * place, "num_chains": 2 * out["batch_size"], "max_num_nodes": 67}
        if options.get("local_context"):
            pairs = near(sizes=ragged(step))
            out["edge_index"] = torch.stack([pairs["source"], pairs["target"]])
            out["edge_attr"] = d(out["edge_index"].shape[1], EDGE)
        return out

    return Case(make, inputs, "e3nn")


OUT = "2x1o+3x0e+1x1e+1x0o"
ON_FIELDS = (
    "R2LiftingAttention", "R2GroupAttention", "R2GlobalAttention", "R2AttentionBlock", "R2RegularLayerNorm",
    "R2TransformerBlock", "R2FrameTransformer", "R3TransformerBlock", "R3FrameTransformer",
    "R3LiftingAttention", "R3GroupAttention", "R3GlobalAttention", "R3AttentionBlock", "R3RegularLayerNorm",
)  # fmt: skip
CASES = {
    **CORE,
    **{kind: on_fields(kind) for kind in ON_FIELDS},
    "RelativePerformerConv": on_graphs("RelativePerformerConv"),
    "RelativePerformerConv mlp": on_graphs("RelativePerformerConv", offset="mlp", values="offset"),
    "RelativePerformerConv pairs": on_graphs("RelativePerformerConv", method="pairs", offset="mlp", values="offset"),
    "RelativeGPSBlock": on_graphs("RelativeGPSBlock", offset="distance"),
    "pyg EwaldAttention": on_points(),
    "LongTensorProduct": on_irreps("LongTensorProduct", "2x0e+1x1o", "1x1o", "2x1o+1x2e"),
    "IrrepsSE3HyenaOperator": on_irreps("IrrepsSE3HyenaOperator", irreps_out=OUT),
    "LongTensorProduct causal": on_irreps("LongTensorProduct", *["2x0e+1x1o"] * 3, causal=True),
    "IrrepsSE3HyenaOperator local": on_irreps("IrrepsSE3HyenaOperator", irreps_out=OUT, order="radial", **LOCAL),
    "IrrepsSE3Hyena": on_irreps(
        "IrrepsSE3Hyena", irreps_out=OUT, irreps_hidden="2x0e+3x1o+2x1e+1x0o", num_layers=1, pool="mean"
    ),
    "IrrepsVectorSelfAttention": on_irreps("IrrepsVectorSelfAttention", irreps_out=OUT),
    "IrrepsVectorSelfAttention local": on_irreps("IrrepsVectorSelfAttention", irreps_out=OUT, **LOCAL),
    "e3nn IrrepsEwaldAttention": on_irreps(
        "IrrepsEwaldAttention", "3x0e+2x1o+1x2e", "2x0e+1x2e+1x1e", width=1.0, lmax=2
    ),
    "IrrepsChargeInteraction": charged("IrrepsChargeInteraction", 6, "e3nn", irreps_in="3x0e+1x1o", **GIVEN),
    "IrrepsPredictedChargeInteraction": charged(
        "IrrepsPredictedChargeInteraction", 6, "e3nn", irreps_in="3x0e+1x1o", **PREDICTED
    ),
    "TensorProductHyenaOperator": on_irreps("TensorProductHyenaOperator", "3x0e+2x1o", "1x0e+2x1o"),
    "IrrepsSE3HyenaOperator implicit": on_irreps(
        "IrrepsSE3HyenaOperator", irreps_out=OUT, filter="implicit", short_conv=3
    ),
    "TensorProductHyenaOperator implicit": on_irreps(
        "TensorProductHyenaOperator", "3x0e+2x1o+1x2e", "2x0e+1x2e+1x1o", filter="implicit", short_conv=3
    ),
    "TensorProductHyenaOperator lag axial": on_irreps(
        "TensorProductHyenaOperator", *["3x0e+2x1o+2x1e"] * 3, filter="implicit", short_conv=3
    ),
    "TensorProductHyenaOperator radial": on_irreps(
        "TensorProductHyenaOperator", "2x2e+3x0e", "2x1o+3x0e", "2x0e+1x1o+1x2e", order="radial"
    ),
}
FIRST = {name.split(" ")[0]: name for name in reversed(CASES)}.values()
# what hosts add to the core, and one class a host of those that do no more than wrap it; the others are slow
OF_HOSTS = (
    "TensorProductHyenaOperator", "LongTensorProduct", "IrrepsSE3HyenaOperator", "RelativePerformerConv",
    "R2GroupAttention",
)  # fmt: skip
GATE = {name for name in FIRST if CASES[name].host == "torch" or name in OF_HOSTS}


def besides(kept, names=CASES):
    """These cases, slow but for those that are kept."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


ONE_A_NAME = besides(GATE)


def moved(inputs, device):
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs)


def run(module, inputs):
    """Outputs, and gradients of floating point inputs and of parameters."""
    inputs = {name: _leaf(x) for name, x in inputs.items()}
    out = [x for x in tree_leaves(module(**inputs)) if isinstance(x, torch.Tensor)]
    wanted = [x for x in (*inputs.values(), *module.parameters()) if isinstance(x, torch.Tensor) and x.requires_grad]
    total = sum((x * _probe(x)).sum() for x in out if x.requires_grad)
    return out, torch.autograd.grad(total, wanted, allow_unused=True) if wanted and isinstance(
        total, torch.Tensor
    ) else ()


def _leaf(x):
    return x.detach().requires_grad_() if is_floating(x) else x


def _probe(x):
    return torch.cos(torch.arange(x.numel(), dtype=x.dtype, device=x.device)).view_as(x)


def agree(got, wanted, tolerance):
    """Outputs and gradients are alike within a tolerance of the largest value; those of float32 within ten times it."""
    for part, (some, others) in enumerate(zip(got, wanted, strict=True)):
        for a, b in zip(some, others, strict=True):
            assert (a is None) == (b is None)
            if b is not None and b.numel():
                allowed = tolerance * (10 if part and b.dtype == torch.float32 else 1)
                scale = max(1.0, float(b.detach().abs().max()))
                torch.testing.assert_close(a.detach().cpu(), b.detach().cpu(), rtol=0, atol=allowed * scale)
