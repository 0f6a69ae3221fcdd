"""Values of each constructor argument of every public module, and whether states load between them."""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from cases import CASES, GIVEN, PREDICTED
from ewald import Own
from hosts import HOSTS
from public_names import PUBLIC

from tg_equiattn.groups import cyclic, dihedral, dyadic
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention

TRAINING = "acts in training only"
START = "is the initial value of parameters"
SAME = "names the same function"


class Row(NamedTuple):
    values: tuple
    loads: str  # why states load; empty if they are refused
    tolerance: float
    others: dict[str, Any]  # arguments with which these values are allowed


class Together(dict):
    """Values of several arguments that fit each other."""


def refused(*values, **others):
    return Row(values, "", 0.0, others)


def equal(reason, *values, tolerance=1e-9, **others):
    return Row(values, reason, tolerance, others)


class Table(NamedTuple):
    """The rows of a module. A key is an argument, or an argument, a colon and what is special."""

    arguments: dict[str, Any]  # of the module, but for those of a row
    inputs: Callable[[], dict[str, Any]]
    rows: dict[str, Row]
    keywords: Callable[[], Any] | None = None  # what takes the keywords that the constructor passes on

    def make(self, kind, argument, value, others, made):
        """A module in eval mode, one for equal arguments. Values that are functions are called: no parts are shared."""
        given = self.arguments | others | (value if isinstance(value, Together) else {argument: value})
        defaults = {name: p.default for name, p in inspect.signature(kind).parameters.items()}
        key = repr(sorted((defaults | given).items()))
        if key not in made:
            made[key] = kind(**{name: x() if inspect.isfunction(x) else x for name, x in given.items()}).eval()
        return made[key]

    def names(self, kind):
        """Arguments of the constructor, and of what takes its keywords."""
        own = inspect.signature(kind).parameters
        passed_on = any(p.kind is p.VAR_KEYWORD for p in own.values())
        every = {**(inspect.signature(self.keywords()).parameters if passed_on else {}), **own}
        return {name for name, p in every.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}

    def rows_for(self, kind):
        """The rows, and the usual ones of arguments that have none."""
        without = self.names(kind) - {key.split(":")[0] for key in self.rows}
        return self.rows | {key: row for key, row in USUAL.items() if key.split(":")[0] in without}

    def missing(self, kind):
        """Arguments without a row, and rows without an argument."""
        return sorted(self.names(kind) ^ {key.split(":")[0] for key in self.rows_for(kind)})


C4, D2 = cyclic(4), dihedral(2)  # of one order


# --- rows of arguments that are alike in several classes -------------------------------------------------------------

SUMS = {"method": "ewald", "error": 1e-2}
USUAL = {
    # of layers and models of images
    "group": refused(C4, D2), "in_channels": refused(3, 4), "out_channels": refused(12, 8), "channels": refused(3, 4),
    "heads": refused(2, 4), "head_channels": refused(3, 4), "kernel_size": refused(3, 5),
    "window_shape": refused("square", "disk", kernel_size=5), "padding_mode": refused("mask", "circular"),
    "encoding": refused("axial", "joint"), "relation": refused("frame", "relative"),
    "locality": refused(4.0, None), "locality: strength": equal(START, 4.0, 1.0), "content_heads": refused(1, 2),
    "context_channels": refused(None, 5), "context_channels: given": equal("says that calls need a context", None, 3),
    "stride": refused(1, 2), "scale_window": refused(1, 3, group=dyadic(2)), "bias": refused(True, False),
    "norm": refused("batch", "layer", "global"), "crop": refused(0, 1), "eps": refused(1e-5, 1e-2),
    "num_classes": refused(3, 4), "lifting_channels": refused(None, 5), "norm_between": refused(False, True),
    "pools": refused((), (0,), (1,)), "crops": refused(0, 1), "crops: each": equal(SAME, 1, (1,)),
    "mlp_ratio": refused(2.0, 4.0), "patch_size": refused(1, 2), "lifts": refused(True, False),
    # of training
    "dropout": equal(TRAINING, 0.0, 0.5), "drop_path": equal(TRAINING, 0.0, 0.5),
    "input_dropout": equal(TRAINING, 0.0, 0.5), "pool_dropout": equal(TRAINING, 0.0, 0.5, pools=(1,)),
    # of nodes and tokens
    "num_random_features": refused(7, 8), "num_layers": refused(1, 2), "num_blocks": refused(1, 2),
    "length_scale": refused(1.0, 2), "pool": refused(None, "mean"), "short_conv": refused(None, 3, 5),
    "attention": refused(False, True), "mixed_products": refused(True, False, filter="implicit"),
    "local_context": refused(False, True), "edge_channels": refused(0, 1, local_context=True),
    "filter": refused("data", "implicit", "exponential"), "causal": refused(False, True),
    "exclude_near": refused(True, False),
    "causal: implicit": refused(False, True, filter="implicit"), "order": refused("input", "radial"),
    "scalar_channels": refused(0, 2, 3), "vector_channels": refused(0, 2, 3), "out_scalars": refused(None, 0, 3),
    "out_vectors": refused(None, 0, 3), "hidden_scalars": refused(2, 3), "hidden_vectors": refused(2, 3),
    "irreps_in": refused("2x0e+2x1o", "2x1o+2x0e", "2x0e+2x1o+1x1e"),
    "irreps_out": refused("2x0e+2x1o", "2x1o+2x0e", "2x0e+2x1e", "2x0e+2x1o+1x1e"),
    "irreps_hidden": refused("2x0e+2x1o", "2x0e+3x1o", "2x0e+2x1o+2x0o", "2x0e+2x1o+2x1e"),
    "irreps_hidden: order": equal("counts channels by kind", "2x0e+2x1o", "2x1o+2x0e"),
    # of sums over waves, which are the same numbers up to the error, and of charges
    "error": equal("bounds the error of sums", 1e-2, 1e-3, **SUMS, tolerance=1e-2),
    "method": equal("is right up to error", "auto", "direct", "ewald", **SUMS, tolerance=1e-2),
    "max_hkl": equal("bounds the waves", None, (30, 30, 30), **SUMS, tolerance=1e-2),
    "width": refused(1.0, 0.9), "max_width": refused(2.0, 4.0), "num_gaussians": refused(1, 2),
    "num_coulomb": refused(0, 1), "kernels": refused(None, lambda: Own(), lambda: Own(count=3)), "lmax": refused(1, 2),
    "output_scale": refused(1.0, 2.0), "cutoff": refused(2.0, 3.0), "avg_num_neighbors": refused(1.0, 2.0),
    "dielectric": refused(1.0, 2.0),
    "charges": refused({"Na": 0.7, "Cl": -0.7}, {"Na": 0.7, "Br": -0.7}, {"Cl": -0.7, "Na": 0.7}, {"Na": 0.0}),
    "charges: values": equal("is a buffer", {"Na": 0.7, "Cl": -0.7}, {"Na": 0.6, "Cl": -0.6}),
    "names": refused(["Na", "Cl"], ["Na", "Br"], ["Cl", "Na"]), "num_elements": refused(2, 3),
}  # fmt: skip

# --- attention on groups ---------------------------------------------------------------------------------------------

LIFTING = {
    "group": refused(C4, D2), "kernel_size": refused(3, 5, None),
    "encoding": refused("axial", "joint"),
    "encoding: none": refused("axial", "joint", "rotary", None, kernel_size=None),
    "encoding: default": equal(SAME, "auto", "rotary", kernel_size=None),
    "locality: default": equal(SAME, "auto", None, kernel_size=None),
}  # fmt: skip
GROUP = {
    **LIFTING,
    "relation": refused("frame", "relative", "lifted", "ge_vit", "gsa"),
}
LAYER = {"group": C4, "in_channels": 3, "out_channels": 12, "heads": 2, "kernel_size": 3}
CLASSIFIES = {"in_channels": refused(1, 2), "channels": refused((8,), (8, 8), (4,))}
CLASSIFIER = {"group": C4, "in_channels": 1, "num_classes": 3, "channels": (8,), "heads": 2, "kernel_size": 3}
FRAMES = {"channels": refused(8, 4), "heads": refused(2, 4), "heads: default": equal(SAME, None, 1)}


def pixels(*shape):
    return lambda: {"x": torch.randn(2, *shape, 5, 6), "context": torch.randn(2, *shape, 5, 6)}


def pixels_alone(*shape):
    return lambda: {"x": torch.randn(2, *shape, 5, 6)}


def images():
    return {"x": torch.randn(2, 1, 8, 6)}


MODULES = {
    "LiftingAttention": Table(LAYER, pixels(3), LIFTING),
    "GroupAttention": Table(LAYER, pixels(3, 4), GROUP),
    "ScaleLiftingAttention": Table(LAYER | {"group": dyadic(2)}, pixels(3), {"group": refused(dyadic(2), dyadic(3))}),
    "ScaleGroupAttention": Table(LAYER | {"group": dyadic(2)}, pixels(3, 2), {"group": refused(dyadic(2), dyadic(3))}),
    "GlobalGroupAttention": Table(LAYER | {"num_random_features": 7}, pixels(3, 4), {}),
    "GroupAttentionBlock": Table(
        {"attention": lambda: GroupAttention(**LAYER, context_channels=3)}, pixels(3, 4), {
            "attention": refused(
                lambda: GroupAttention(**LAYER), lambda: GroupAttention(**LAYER, relation="relative"),
                lambda: GlobalGroupAttention(**LAYER), lambda: GroupAttention(**LAYER, context_channels=3),
            ),
        },
    ),
    "GroupLinear": Table(
        {"group": C4, "in_channels": 3, "out_channels": 5}, pixels(3, 4), {"out_channels": refused(5, 4)}
    ),
    "FrameTransformerBlock": Table({"group": C4, "channels": 8, "heads": 2}, pixels_alone(8, 4), FRAMES),
    "FrameTransformer": Table(
        {
            "group": C4, "in_channels": 1, "out_channels": 3, "patch_size": 2, "channels": 8, "num_layers": 2,
            "heads": 2,
        }, images,
        FRAMES | {"in_channels": refused(1, 2), "out_channels": refused(3, 4), "pool": refused(True, False)},
    ),
    "GroupTransformer": Table(CLASSIFIER, images, CLASSIFIES | {
        "group": refused(C4, D2), "group: scales": refused(dyadic(2), dyadic(3)),
        "relation": refused("frame", "relative", "ge_vit"),
        "attn_kwargs": refused({}, {"padding_mode": "circular"}),
    }),
    "GEViT": Table(CLASSIFIER, images, CLASSIFIES),
    "GlobalPooling": Table({}, pixels(3, 4), {
        "space": refused("mean", "max", "sum", None), "group": refused("max", "mean", "sum"),
    }),
    "RegularGlobalNorm": Table({"channels": 3}, pixels(3, 4), {}),
    "RegularLayerNorm": Table({"channels": 3}, pixels(3, 4), {}),
}  # fmt: skip

# --- linear attention ------------------------------------------------------------------------------------------------

PLAIN = {"offset": "table", "cutoff": 3, "values": "content"}
PERFORMER = {
    "in_channels": refused(6, 7), "heads": refused(2, 3), "heads: shapes": refused(2, 3, method="pairs"),
    "position": refused(None, "window", "clipped", "sinusoid", **PLAIN),
    "pos_dim": refused(2, 3), "pos_dim: shapes": refused(2, 3, offset="distance"),
    "cutoff": refused(3, 4), "cutoff: far offsets": refused(3, 4, position=None, offset="table"),
    "cutoff: unused": equal("has no near pairs", 3, 4, **PLAIN | {"position": None}),
    "offset": refused("table", "mlp", "distance", values="content"),
    "offset: none": refused("table", None, values="content", cutoff=None),
    "values": refused("content", "offset"), "key_channels": refused(None, 2), "edge_dim": refused(None, 3, 4),
    "method": refused("features", "pairs"), "method: default": equal(SAME, None, "features"),
}  # fmt: skip
ATTENTION = {
    "in_channels": 6, "out_channels": 12, "heads": 2, "offset": "mlp", "values": "offset", "cutoff": 3,
    "num_random_features": 7,
}  # fmt: skip
CONV = {
    **PERFORMER,
    "flow": refused("source_to_target", "target_to_source"),
    "flow: unused": equal("has no near pairs", "source_to_target", "target_to_source", **PLAIN | {"position": None}),
    "aggr": equal(SAME, "sum", "add"), "aggr_kwargs": equal("has no effect on sums", None, {}),
    "node_dim": equal("may be 0 only", 0), "decomposed_layers": equal("has no effect on attention", 1, 2),
}  # fmt: skip
IMAGES = {"in_channels": 1, "num_classes": 3, "channels": 12, "num_layers": 1, "heads": 2, "cutoff": 3}


def nodes():
    return {"x": torch.randn(9, 6), "pos": torch.randn(9, 2)}


def gps():
    """A module and rows with layers of PyG."""
    from torch_geometric.nn import MLP, GINConv, SAGEConv

    gin = lambda: GINConv(MLP([12, 12, 12]))  # noqa: E731
    attention = {"offset": "mlp", "cutoff": 2.0}
    return Table(
        {"channels": 12, "conv": gin, "attn_kwargs": attention},
        lambda: {"x": torch.randn(9, 12), "pos": torch.randn(9, 2), "edge_index": torch.randint(9, (2, 20))},
        {
            "channels": refused(12, 6, conv=None), "conv": refused(gin, lambda: SAGEConv(12, 12), None),
            "heads": refused(2, 3),
            "act": refused("relu", "elu", lambda: torch.nn.LeakyReLU(0.1), lambda: torch.nn.LeakyReLU(0.2)),
            "norm": refused("batch_norm", "layer_norm", "instance_norm", "graph_norm"),
            "norm_kwargs": refused(None, {"eps": 0.1}, {"mode": "node"}, norm="layer_norm"),
            "attn_kwargs": refused(attention, attention | {"method": "features"}, attention | {"cutoff": 3.0}),
            "attn": refused(Together(attn="performer"), Together(attn="ewald", attn_kwargs={"width": 1.0})),
        },
    )  # fmt: skip


def message_passing():
    return importlib.import_module("torch_geometric.nn").MessagePassing


MODULES |= {
    "PerformerAttention": Table(ATTENTION, nodes, PERFORMER),
    "RelativePerformer": Table(IMAGES, lambda: {"image": torch.rand(2, 1, 5, 6)}, {
        "in_channels": refused(1, 2), "channels": refused(12, 8), "heads": refused(2, 3),
        "position": refused(None, "window", "clipped", "sinusoid"), "pos_dim": refused(2, 3), "cutoff": refused(2, 3),
        "norm": refused("layer", "batch"), "periodic": refused(False, True),
        "attn_kwargs": refused({}, {"values": "offset"}, {"num_random_features": 7}),
    }),
    "RelativePerformerConv": Table(ATTENTION, nodes, CONV, message_passing),
    "RelativeGPSBlock": gps,
}  # fmt: skip

# --- tokens and waves ------------------------------------------------------------------------------------------------

HYENA_KWARGS = refused(
    {}, {"filter": "implicit"}, {"filter": "implicit", "mixed_products": False}, {"causal": True}, {"short_conv": 3}
)
EWALD = {
    "heads": refused(1, 2),
    **{key: row._replace(others=row.others | {"lmax": 0}) for key, row in USUAL.items()
       if key in ("error", "method", "max_hkl")},
}  # fmt: skip
KERNELS = {"width": 1.0, "max_width": 2.0, "num_gaussians": 1, "num_coulomb": 1}
ALIKE = {"irreps_in": "2x0e+2x1o", "irreps_out": "2x0e+2x1o"}
SCALARS = {"irreps_in": "3x0e+1x1o"}
NETWORK = {
    "scalar_channels": 2, "vector_channels": 2, "hidden_scalars": 2, "hidden_vectors": 2, "num_layers": 1,
}  # fmt: skip


def tokens():
    return {"scalars": torch.randn(1, 4, 2), "vectors": torch.randn(1, 4, 2, 3), "pos": torch.rand(1, 4, 3)}


def features():
    return {"x": torch.randn(4, 8), "pos": torch.rand(4, 3)}


def with_elements():
    from tg_equiattn.integrations.e3nn.atoms_attention import Atoms

    edges, vectors = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[1.0, 0, 0], [-1, 0, 0]])
    return features() | {"atoms": Atoms(torch.tensor([0, 1, 0, 1]), edges, vectors, torch.ones(1))}


def charges(name, arguments, **rows):
    """With the inputs of the cases."""
    return Table({"width": 1.0, "cutoff": 2.0, **arguments}, functools.partial(CASES[name].inputs, 0), rows)


def ewald_of_irreps():
    return importlib.import_module("tg_equiattn.integrations.e3nn").IrrepsEwaldAttention


UUU = [(0, 0, 0, "uuu", True), (1, 1, 2, "uuu", True)]
OTHERS = ([UUU[0], (1, 1, 0, "uuu", True)], [UUU[0], (*UUU[1], 0.3)])
ORDERS = refused("2x0e+2x1o", "2x1o+2x0e")
MODULES |= {
    "CliffordMLP": Table({"in_channels": 2, "out_channels": 3}, dict, {
        "in_channels": refused(2, 3), "out_channels": refused(3, 2),
    }),
    "SE3HyenaOperator": Table({"scalar_channels": 2, "vector_channels": 2}, tokens, {}),
    "VectorSelfAttention": Table({"scalar_channels": 2, "vector_channels": 2}, tokens, {}),
    "SE3Hyena": Table(NETWORK, tokens, {"attn_kwargs": HYENA_KWARGS}),
    "EwaldAttention": Table(
        {"scalar_channels": 2, "vector_channels": 2, **KERNELS}, tokens,
        EWALD | {"out_channels": refused(None, (2, 3), (2, 0), (0, 2))},
    ),
    "pyg.EwaldAttention": Table(
        {"in_channels": 2, "out_channels": 2, "in_vectors": 2, "out_vectors": 2, **KERNELS},
        lambda: {"x": torch.randn(4, 2), "vectors": torch.randn(4, 2, 3), "pos": torch.rand(4, 3)}, EWALD | {
            "in_channels": refused(2, 3), "out_channels": refused(2, 3), "in_vectors": refused(0, 2, 3),
            "out_vectors": refused(0, 2, 3),
        },
    ),
    "ChargeInteraction": charges("ChargeInteraction", GIVEN | {"scalars": 3}, scalars=refused(0, 2, 3)),
    "PredictedChargeInteraction": charges(
        "PredictedChargeInteraction", PREDICTED | {"scalars": 3}, scalars=refused(2, 3)
    ),
    "IrrepsChargeInteraction": charges(
        "IrrepsChargeInteraction", GIVEN | SCALARS, irreps_in=refused(None, *ORDERS.values)
    ),
    "IrrepsPredictedChargeInteraction": charges(
        "IrrepsPredictedChargeInteraction", PREDICTED | SCALARS, irreps_in=ORDERS
    ),
    "IrrepsEwaldAttention": Table(ALIKE | KERNELS, features, EWALD),
    "AtomsEwaldAttention": Table(  # with its neutral sources, the layer of MACE and NequIP
        {**ALIKE, "num_elements": 2, "cutoff": 2.0, "avg_num_neighbors": 1.0, **KERNELS}, with_elements, EWALD,
        ewald_of_irreps,
    ),
    "IrrepsSE3HyenaOperator": Table(ALIKE, features, {}),
    "IrrepsVectorSelfAttention": Table(ALIKE, features, {}),
    "IrrepsSE3Hyena": Table(
        ALIKE | {"irreps_hidden": "2x0e+2x1o+1x1e", "num_layers": 1}, features,
        {"attn_kwargs": HYENA_KWARGS},
    ),
    "TensorProductHyenaOperator": Table(
        {"irreps_in": "2x0e+1x1o", "irreps_out": "2x0e", "irreps_hidden": "2x0e+1x1o"}, features, {
            "irreps_in": refused("2x0e+1x1o", "1x1o+2x0e", "1x0e+2x1o"), "irreps_out": refused("2x0e", "1x0e+1x0e"),
            "irreps_hidden": refused("2x0e+1x1o", "2x0e+2x1o", "1x1o+2x0e"),
        },
    ),
    "LongTensorProduct": Table(
        {"irreps_in1": "2x0e+2x1o", "irreps_in2": "2x0e+2x1o", "irreps_out": "2x0e+2x1o+2x1e"}, dict, {
            "irreps_in1": ORDERS, "irreps_in2": ORDERS, "causal": refused(False, True),
            "irreps_out": refused("2x0e+2x1o+2x1e", "2x1o+2x0e+2x1e", "2x0e+2x1o"),
            "instructions": refused(None, UUU, *OTHERS),
        },
    ),
}  # fmt: skip


# --- escnn -----------------------------------------------------------------------------------------------------------


def on_fields(name):
    """A layer of escnn, with the rows of the core's and with field types."""
    import fields

    kind, volumes, gspaces = name[2:], name.startswith("R3"), fields.gspaces
    spaces = (gspaces.invOnR3(), gspaces.mirOnR3()) if volumes else (gspaces.rot2dOnR2(4), gspaces.flipRot2dOnR2(2))
    made = fields.trivial if kind == "LiftingAttention" else fields.regular

    def types(space, n=3):
        return {"in_type": made(space, n), "out_type": fields.regular(space, 12)}

    def inputs():
        x = fields.field(made(spaces[0], 3), 2, *(3, 4, 5)[-spaces[0].dimensionality :])
        return {"input": x, "context": x}

    def alone(made, n):
        return {"input": fields.field(made(spaces[0], n), 2, *(2, 4, 6)[-spaces[0].dimensionality :])}

    def attention(**more):
        return fields.of(spaces[0], "GroupAttention")(**types(spaces[0]), heads=2, kernel_size=3, **more)

    def crossing():
        return attention(context_type=made(spaces[0], 3))

    in_type, wider = made(spaces[0], 3), made(spaces[0], 4)
    if kind == "RegularLayerNorm":
        return Table({"in_type": in_type}, dict, {"in_type": refused(in_type, wider)})
    if kind == "AttentionBlock":
        attentions = refused(attention, crossing, lambda: attention(relation="relative"))
        return Table({"attention": crossing}, inputs, {"attention": attentions})
    if kind == "TransformerBlock":
        fits = refused(fields.regular(spaces[0], 8), fields.regular(spaces[0], 4))
        rows = {key: row for key, row in FRAMES.items() if key != "channels"} | {"in_type": fits}
        return Table({"in_type": fields.regular(spaces[0], 8), "heads": 2}, lambda: alone(fields.regular, 8), rows)
    if kind == "FrameTransformer":
        out_type = fields.regular(spaces[0], 12)
        given = {"in_type": fields.trivial(spaces[0], 3), "out_type": out_type, "patch_size": 1, "channels": 8}
        first = refused(fields.trivial(spaces[0], 3), in_type, wider)
        rows = FRAMES | {"in_type": first, "out_type": refused(out_type, wider)}
        return Table(given | {"num_layers": 1, "heads": 2}, lambda: alone(fields.trivial, 3), rows)
    rows = {"LiftingAttention": LIFTING, "GroupAttention": GROUP, "GlobalAttention": {}}[kind]
    return Table(
        {**types(spaces[0]), "heads": 2, "kernel_size": 3}, inputs, {
            **{key: row for key, row in rows.items() if not key.startswith("group")},
            "in_type": refused(in_type, wider),
            "in_type: gspace": refused(*(Together(types(space)) for space in spaces)),
            "out_type": refused(fields.regular(spaces[0], 12), fields.regular(spaces[0], 8)),
            "context_type": refused(None, wider),
            "context_type: given": equal("says that calls need a context", None, in_type),
        },
    )  # fmt: skip


# --- all of them -----------------------------------------------------------------------------------------------------

PLACES = ("nn", "integrations.escnn", "integrations.pyg", "integrations.e3nn")
NO_MODULES = {"PixelGraph", "PeriodicRadiusGraph", "MaskedSequential"}  # transforms, and a list of modules
CLASSES = {n: place for place in PLACES[::-1] for n in PUBLIC[place] if n[0].isupper() and n not in NO_MODULES}
CLASSES["pyg.EwaldAttention"] = "integrations.pyg"
CLASSES["AtomsEwaldAttention"] = "integrations.e3nn.atoms_attention"


def public_class(name):
    """The class of a name, its table, and the package that it needs; skips the test without this package."""
    place = CLASSES[name]
    host = "torch" if place == "nn" else HOSTS[place.split(".")[1]]
    pytest.importorskip(host)
    kind = getattr(importlib.import_module(f"tg_equiattn.{place}"), name.rpartition(".")[2])
    table = on_fields(name) if host == "escnn" else MODULES[name]
    return kind, table() if callable(table) else table, host
