"""Every bad argument raises a ValueError that names it."""

import pytest
import torch
from hyena_layers import as_model
from tg_equiattn.integrations.e3nn import (
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    LongTensorProduct,
    TensorProductHyenaOperator,
)

NODES, INSIDE, OUTSIDE = 7, "3x0e+2x1o", "2x0e+1x1o"
X, POS = torch.ones(NODES, 9), torch.arange(21.0).view(NODES, 3) / 7
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])
EDGES = torch.tensor([[0, 1, 2, 4, 5], [1, 0, 1, 5, 4]])
ATTR = torch.ones(5, 2)
OPERATORS = {"hyena": IrrepsSE3HyenaOperator, "model": IrrepsSE3Hyena, "attention": IrrepsVectorSelfAttention}
ALL = {**OPERATORS, "tensor": TensorProductHyenaOperator}


def call(kind="hyena", options=None, **arguments):
    """A correct call but for what the arguments replace."""
    options = options or {}
    module = ALL[kind](INSIDE, OUTSIDE, **(as_model(options) if kind == "model" else options))
    return module(**{"x": X, "pos": POS, "batch": BATCH, **arguments})


def call_local(kind="hyena", edge_channels=2, **arguments):
    edges = {"edge_index": EDGES, "edge_attr": ATTR if edge_channels else None}
    return call(kind, {"local_context": True, "edge_channels": edge_channels}, **{**edges, **arguments})


@pytest.mark.parametrize("kind", ALL)
def test_the_correct_call(kind):
    assert call(kind).shape == (NODES, 5)
    if kind != "tensor":
        assert call_local(kind).shape == (NODES, 5)
        assert call_local(kind, 1, edge_attr=ATTR[:, 0]).shape == (NODES, 5)
        assert call_local(kind, 0).shape == (NODES, 5)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"x must have shape \(nodes, 9\), of irreps 3x0e\+2x1o, got \(7, 8\)", {"x": X[:, :8]}),
        ("x must be a floating point tensor", {"x": X.long()}),
        ("x must be torch.float32 as the parameters are, got torch.float16", {"x": X.half()}),
        ("x must be on cpu", {"x": X.to("meta")}),
        (r"pos must have shape \(7, 3\), got \(7, 2\)", {"pos": POS[:, :2]}),
        ("pos must be real", {"pos": POS > 0}),
        ("pos must be on cpu", {"pos": POS.to("meta")}),
        ("batch must be sorted", {"batch": BATCH.flip(0)}),
        (r"batch must be int64 of shape \(7,\), got torch.float32", {"batch": BATCH.float()}),
        ("batch must be in", {"batch": BATCH - 1}),
        ("batch must be given where batch_size is 2", {"batch": None, "batch_size": 2}),
        ("batch must be on cpu", {"batch": BATCH.to("meta")}),
        ("batch_size must be a positive integer, got 0", {"batch_size": 0}),
        ("max_num_nodes must be at least 4, the largest graph, got 3", {"batch_size": 2, "max_num_nodes": 3}),
        ("order must be a permutation", {"order": torch.arange(7).flip(0)}),
        ("order must be int64 of shape .*7", {"order": torch.arange(5)}),
        ("order must be on cpu", {"order": torch.arange(7, device="meta")}),
    ],
)
def test_bad_calls(kind, message, arguments):
    with pytest.raises(ValueError, match=message):
        call(kind, **arguments)


@pytest.mark.parametrize("kind", ["hyena", "model", "tensor"])
def test_radial_order_needs_positions(kind):
    with pytest.raises(ValueError, match="pos must be given with order='radial'"):
        call(kind, {"order": "radial"}, pos=None)
    assert call(kind, {"order": "radial"}).shape == (NODES, 5)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("edge_index must be given with local_context=True, got None", {"edge_index": None}),
        ("edge_index must be int64", {"edge_index": EDGES.int()}),
        (r"edge_index must join nodes in \[0, 7\), got 5 to 9", {"edge_index": EDGES % 5 + 5}),
        ("edge_index must not join nodes of different", {"edge_index": EDGES[:, [0, 0, 0, 0, 0]] + 3}),
        ("edge_index must be on cpu", {"edge_index": EDGES.to("meta")}),
        ("edge_attr must have edge_channels=2 scalars an edge, got None", {"edge_attr": None}),
        (r"edge_attr must be real numbers of shape \(5, 2\)", {"edge_attr": ATTR[:, :1]}),
        ("edge_attr must have edge_channels=0 scalars an edge", {"edge_channels": 0, "edge_attr": ATTR}),
        ("edge_attr must be on cpu", {"edge_attr": ATTR.to("meta")}),
    ],
)
def test_bad_edges(kind, message, arguments):
    with pytest.raises(ValueError, match=message):
        call_local(kind, **arguments)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        *(
            case
            for make in OPERATORS.values()
            for case in (
                (
                    "irreps_in must hold 0e, 0o, 1o and 1e only.*LongTensorProduct",
                    lambda m=make: m("2x0e+1x2e", "1x0e"),
                ),
                ("irreps_out must hold .*LongTensorProduct", lambda m=make: m("2x0e", "1x3o+2x0e")),
                ("irreps_in must have at least one irrep", lambda m=make: m("", "1x0e")),
                ("irreps_in must have at least one irrep", lambda m=make: m("0x0e+0x1o", "1x0e")),
                ("irreps_out must have at least one irrep", lambda m=make: m("1x0e", "")),
            )
        ),
        *(
            case
            for make in OPERATORS.values()
            for case in (
                ("irreps_hidden must hold .*LongTensorProduct", lambda m=make: m(INSIDE, OUTSIDE, "2x0e+2x2e")),
                ("irreps_hidden must have at least one irrep", lambda m=make: m(INSIDE, OUTSIDE, "")),
                ("irreps_out must be reachable .* 0o ", lambda m=make: m("2x0e", "1x0e+1x0o", "2x0e")),
            )
        ),
        *(
            case
            for make in (IrrepsSE3HyenaOperator, IrrepsSE3Hyena, TensorProductHyenaOperator)
            for case in (
                ("order must be one of", lambda m=make: m(INSIDE, OUTSIDE, order="random")),
                ("order must be one of", lambda m=make: m(INSIDE, OUTSIDE, order=None)),
            )
        ),
        *(
            (message, lambda m=make, o=options: m(INSIDE, OUTSIDE, **o))
            for make in (IrrepsSE3HyenaOperator, IrrepsSE3Hyena, IrrepsVectorSelfAttention, TensorProductHyenaOperator)
            for message, options in (
                ("short_conv must be None or an odd", {"short_conv": 2}),
                ("filter must be one of", {"filter": "mlp"}),
                ("edge_channels must be 0 without", {"edge_channels": 2}),
                ("edge_channels must be an integer", {"edge_channels": -2, "local_context": True}),
            )
            if make is IrrepsSE3HyenaOperator
            or (make is IrrepsVectorSelfAttention and "filter" not in options)
            or (make is TensorProductHyenaOperator and "edge_channels" not in options)
        ),
        ("filter must be one of", lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, options={"filter": "mlp"})),
        ("num_blocks must be", lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, options={"num_blocks": 0})),
        ("options must be of .*, got 'norm'", lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, options={"norm": "ortho"})),
        ("pool must be None or 'mean'", lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, pool="max")),
        ("depth must be", lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, depth=0)),
        ("irreps_out must have a path from 2x0e x 1x1o", lambda: LongTensorProduct("2x0e", "1x1o", "1x2e")),
        ("irreps_in must have at least", lambda: TensorProductHyenaOperator("", "1x0e")),
        ("irreps_out must have at least", lambda: TensorProductHyenaOperator("1x0e", "")),
        ("irreps_hidden must have at least", lambda: TensorProductHyenaOperator("1x0e", "1x0e", "")),
        ("irreps_out must be reachable through irreps_hidden=1x0e", lambda: TensorProductHyenaOperator("1x0e", "1x2e")),
        ("irreps_out must", lambda: TensorProductHyenaOperator("4x0e", "2x1e", "4x0e+2x1e")),
    ],
)
def test_bad_options(message, make):
    with pytest.raises(ValueError, match=message):
        make()


X1, X2 = torch.ones(NODES, 9), torch.ones(NODES, 4)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"x1 must have shape \(nodes, 9\), of irreps 3x0e\+2x1o, got \(7, 4\)", {"x1": X2}),
        (r"x2 must have shape \(nodes, 4\), of irreps 1x0e\+1x1o, got \(7, 9\)", {"x2": X1}),
        ("x1 must be a floating point tensor", {"x1": X1.long()}),
        ("x1 must be torch.float32", {"x1": X1.double(), "x2": X2.double()}),
        ("x2 must be torch.float32", {"x2": X2.double()}),
        ("x2 must be on cpu", {"x2": X2.to("meta")}),
        ("x2 must have the 7 nodes of x1, got 5", {"x2": X2[:5]}),
        ("batch must be sorted", {"batch": BATCH.flip(0)}),
        ("batch must be int64", {"batch": BATCH.float()}),
        ("batch must be in", {"batch_size": 1}),
        ("max_num_nodes must be at least 4", {"batch_size": 2, "max_num_nodes": 3}),
        ("order must be a permutation", {"order": torch.arange(7).flip(0)}),
        ("order must be int64 of shape .*7", {"order": torch.arange(5)}),
    ],
)
def test_bad_products(message, arguments):
    conv = LongTensorProduct(INSIDE, "1x0e+1x1o", OUTSIDE)
    given = {"x1": X1, "x2": X2, "batch": BATCH}
    assert conv.weight_numel == 15
    assert conv(**given).shape == (NODES, 5)
    with pytest.raises(ValueError, match=message):
        conv(**{**given, **arguments})
