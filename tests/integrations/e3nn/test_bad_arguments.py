"""What the irreps' modules refuse: each error names the argument. Tokens, batches and edges are checked by the core."""

import pytest
import torch
from e3nn import o3
from e3nn.util import jit
from tg_equiattn.integrations.e3nn import (
    IrrepsEwaldAttention,
    IrrepsSE3Hyena,
    IrrepsSE3HyenaOperator,
    IrrepsVectorSelfAttention,
    LongTensorProduct,
    TensorProductHyenaOperator,
)

NODES, INSIDE, OUTSIDE = 7, "3x0e+2x1o", "2x0e+1x1o"
X, POS = torch.ones(NODES, 9), torch.arange(21.0).view(NODES, 3) / 7
BATCH = torch.tensor([0, 0, 0, 0, 1, 1, 1])
OPERATORS = {"hyena": IrrepsSE3HyenaOperator, "model": IrrepsSE3Hyena, "attention": IrrepsVectorSelfAttention}
ALL = {**OPERATORS, "tensor": TensorProductHyenaOperator}


def check(module, given, wrong):
    """A correct call, and each of those that is not."""
    assert module(**given).shape == (NODES, 5)
    for message, arguments in wrong:
        with pytest.raises(ValueError, match=message):
            module(**given | arguments)


CALLS = [
    (r"x must have shape \(nodes, 9\), of irreps 3x0e\+2x1o, got \(7, 8\)", {"x": X[:, :8]}),
    (r"x must have shape .* got list", {"x": X.tolist()}),
    ("x must be a floating point tensor", {"x": X.long()}),
    ("x must be torch.float32 as the parameters are, got torch.float64", {"x": X.double()}),
    ("batch must be sorted", {"batch": BATCH.flip(0)}),
]


@pytest.mark.parametrize("kind", ALL)
def test_bad_calls(kind):
    given = {"x": X, "pos": POS, "batch": BATCH}
    check(ALL[kind](INSIDE, OUTSIDE), given, CALLS)
    if kind != "attention":
        radial = ALL[kind](INSIDE, OUTSIDE, order="radial")
        check(radial, given, [("pos must be given with order='radial'", {"pos": None})])


def test_bad_calls_of_ewald_attention():
    wrong = [
        ("pos must be given", {"pos": None}),
        (r"cell must be floating point of shape \(3, 3\) or", {"cell": torch.eye(3).expand(3, 3, 3)}),
    ]
    module = IrrepsEwaldAttention(INSIDE, OUTSIDE, width=1.0)
    check(module, {"x": X, "pos": POS, "batch": BATCH}, CALLS[:5] + wrong)


def test_bad_irreps():
    for message, irreps in [
        ("irreps_in must hold 0e, 0o, 1o and 1e only.*LongTensorProduct", ("2x0e+1x2e", "1x0e")),
        ("irreps_out must hold .*LongTensorProduct", ("2x0e", "1x3o+2x0e")),
        ("irreps_in must be irreps, at least one", ("0x0e+0x1o", "1x0e")),
        ("irreps_hidden must hold .*LongTensorProduct", (INSIDE, OUTSIDE, "2x0e+2x2e")),
        ("irreps_out must be reachable .* 0o ", ("2x0e", "1x0e+1x0o", "2x0e")),
    ]:
        with pytest.raises(ValueError, match=message):
            IrrepsSE3HyenaOperator(*irreps)


@pytest.mark.parametrize(
    ("message", "make"),
    [
        (
            "attn_kwargs must be .*'filter'.*, got 'norm'",
            lambda: IrrepsSE3Hyena(INSIDE, OUTSIDE, attn_kwargs={"norm": "ortho"}),
        ),
        ("irreps_out must have a path from 2x0e x 1x1o", lambda: LongTensorProduct("2x0e", "1x1o", "1x2e")),
        ("got 1e \\+ 0o in the input alone", lambda: IrrepsSE3Hyena("2x0e+1x1e+3x0o", "1x0e", "2x0e+2x1o")),
        (
            "hold every irrep of irreps_in, got .* without 2e",
            lambda: TensorProductHyenaOperator("1x2e", "1x0e", "1x0e"),
        ),
        ("irreps_out must be reachable through irreps_hidden=1x0e", lambda: TensorProductHyenaOperator("1x0e", "1x2e")),
        ("irreps_out must .* lmax=1, got 2x2e that", lambda: IrrepsEwaldAttention("1x0e", "2x2e", width=1.0)),
    ],
)
def test_bad_options(message, make):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_products():
    conv, x2 = LongTensorProduct(INSIDE, "1x0e+1x1o", OUTSIDE), torch.ones(NODES, 4)
    assert conv.weight_numel == 15
    wrong = [
        (r"x1 must have shape \(nodes, 9\), of irreps 3x0e\+2x1o, got \(7, 4\)", {"x1": x2}),
        (r"x2 must have shape .* got NoneType", {"x2": None}),
        ("x2 must have the 7 nodes of x1, got 5", {"x2": x2[:5]}),
    ]
    check(conv, {"x1": X, "x2": x2, "batch": BATCH}, wrong)


LAYERS = {
    **ALL,
    "ewald": lambda *irreps: IrrepsEwaldAttention(*irreps, width=1.0),
    "product": lambda *irreps: LongTensorProduct(INSIDE, *irreps),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_torchscript_is_refused(kind):
    """Alone and in a module, by torch and by e3nn."""
    module = LAYERS[kind](INSIDE, OUTSIDE)
    message = f"{type(module).__name__} does not support TorchScript"
    for script, given in (
        (jit.compile, module), (jit.script, torch.nn.Sequential(o3.Linear("2x0e", "2x0e"), module)),
        (torch.jit.script, module), (torch.jit.script, torch.nn.Sequential(torch.nn.Linear(2, 2), module)),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=message):
            script(given)
    with pytest.raises(NotImplementedError, match=message):
        torch.jit.trace(module, (X, X[:, :4] if kind == "product" else POS))
