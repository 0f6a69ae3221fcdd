"""Numbers of numpy are integers and floats like Python's, and none of them is left in a module."""

import numpy
import pytest
from torch import nn

from tg_equiattn import checks
from tg_equiattn.grids import PixelGrid, Window
from tg_equiattn.groups import cyclic, dihedral, dyadic
from tg_equiattn.nn import (
    CliffordMLP,
    GlobalGroupAttention,
    GroupAttention,
    GroupAttentionBlock,
    GroupLinear,
    GroupTransformer,
    LiftingAttention,
    PerformerAttention,
    RegularGlobalNorm,
    RegularLayerNorm,
    RelativePerformer,
    SE3Hyena,
    SE3HyenaOperator,
    VectorSelfAttention,
    VectorTransformer,
)

C4, EIGHTH = cyclic(4), 0.125  # exact in float32


def escnn(name):
    def make(n, f):
        pytest.importorskip("escnn")
        from escnn import gspaces
        from escnn import nn as fields
        from tg_equiattn.integrations import escnn as ours

        space = gspaces.rot2dOnR2(4)
        image, hidden = (fields.FieldType(space, 2 * [r]) for r in (space.trivial_repr, space.regular_repr))
        kind = getattr(ours, name)
        return kind(image if "Lifting" in name else hidden, hidden, heads=n(2), kernel_size=n(3), dropout=f(EIGHTH))

    return make


def pyg(name):
    def make(n, f):
        pytest.importorskip("torch_geometric")
        from tg_equiattn.integrations import pyg

        if name == "RelativePerformerConv":
            return pyg.RelativePerformerConv(n(12), n(15), n(3), cutoff=n(3), num_random_features=n(11))
        if name == "RelativeGPSBlock":
            return pyg.RelativeGPSBlock(n(12), None, n(3), dropout=f(EIGHTH), attn_kwargs={"pos_dim": n(2)})
        return pyg.PixelGraphClassifier(n(2), n(5), channels=n(12), num_layers=n(2), heads=n(3), cutoff=n(3))

    return make


def e3nn(name):
    def make(n, f):
        pytest.importorskip("e3nn")
        from tg_equiattn.integrations import e3nn

        irreps = "3x0e+2x1o"
        if name == "IrrepsEwaldAttention":
            return e3nn.IrrepsEwaldAttention(irreps, irreps, width=f(1.0), heads=n(1), lmax=n(1))
        if name == "TensorProductHyenaOperator":
            return e3nn.TensorProductHyenaOperator(irreps, irreps, irreps, short_conv=n(3))
        more = {} if name == "IrrepsVectorSelfAttention" else {"short_conv": n(3)}
        if name == "IrrepsSE3Hyena":
            more = {"irreps_hidden": irreps, "num_layers": n(2)}
        return getattr(e3nn, name)(irreps, irreps_out=irreps, **more)

    return make


MODULES = {
    "GroupLinear": lambda n, f: GroupLinear(C4, n(3), n(5)),
    "RegularGlobalNorm": lambda n, f: RegularGlobalNorm(n(3), f(EIGHTH)),
    "RegularLayerNorm": lambda n, f: RegularLayerNorm(n(3), f(EIGHTH)),
    "LiftingAttention": lambda n, f: LiftingAttention(C4, n(3), n(5), heads=n(2), kernel_size=n(3), locality=f(4)),
    "GroupAttention": lambda n, f: GroupAttention(
        C4, n(3), n(5), heads=n(2), head_channels=n(5), kernel_size=n(3), locality=f(1), dropout=f(EIGHTH)
    ),
    "GroupAttention scales": lambda n, f: GroupAttention(dyadic(n(3)), n(3), n(5), heads=n(2), kernel_size=n(3)),
    "GlobalGroupAttention": lambda n, f: GlobalGroupAttention(C4, n(3), n(5), heads=n(2), kernel_size=n(3)),
    "GroupAttentionBlock": lambda n, f: GroupAttentionBlock(
        GroupAttention(dihedral(n(2)), n(3), n(5), heads=n(2)), dropout=f(EIGHTH), crop=n(1)
    ),
    "GroupTransformer": lambda n, f: GroupTransformer(
        C4, n(2), n(3), channels=(n(6), n(8)), heads=n(2), kernel_size=n(3), dropout=f(EIGHTH)
    ),
    "PerformerAttention": lambda n, f: PerformerAttention(
        n(12), n(15), n(3), cutoff=n(3), num_random_features=n(11), redraw_interval=n(5), dropout=f(EIGHTH)
    ),
    "PerformerAttention distance": lambda n, f: PerformerAttention(
        n(12), n(15), n(3), offset="distance", cutoff=f(1.5)
    ),
    "PerformerAttention clipped": lambda n, f: PerformerAttention(n(12), n(15), n(3), position="clipped", cutoff=n(3)),
    "RelativePerformer": lambda n, f: RelativePerformer(
        n(2), n(5), channels=n(12), num_layers=n(2), heads=n(3), cutoff=n(3), dropout=f(EIGHTH)
    ),
    "CliffordMLP": lambda n, f: CliffordMLP(n(3), n(5), hidden_channels=n(7), num_blocks=n(2)),
    "SE3HyenaOperator": lambda n, f: SE3HyenaOperator(
        n(3), n(5), hidden_scalars=n(2), filter="implicit", short_conv=n(3)
    ),
    "SE3Hyena": lambda n, f: SE3Hyena(n(3), n(5), num_layers=n(2)),
    "VectorSelfAttention": lambda n, f: VectorSelfAttention(n(3), n(5), local_context=True, edge_channels=n(5)),
    "VectorTransformer": lambda n, f: VectorTransformer(n(3), n(5), n(0), n(1), num_layers=n(1)),
    **{name: escnn(name) for name in ("R2LiftingAttention", "R2GroupAttention", "R2GlobalAttention")},
    **{name: pyg(name) for name in ("RelativePerformerConv", "RelativeGPSBlock", "PixelGraphClassifier")},
    **{
        name: e3nn(name)
        for name in (
            "IrrepsSE3HyenaOperator",
            "IrrepsSE3Hyena",
            "IrrepsVectorSelfAttention",
            "TensorProductHyenaOperator",
            "IrrepsEwaldAttention",
        )
    },
}
KINDS = [(numpy.int64, numpy.float64), (numpy.int32, numpy.float32)]


def found(x, path=""):
    """Where numpy's numbers are in what modules hold."""
    if isinstance(x, numpy.generic):
        yield path
    elif isinstance(x, nn.Module):
        for part in x.modules():
            for name, value in vars(part).items():
                if not name.startswith(("_modules", "_parameters", "_buffers")):
                    yield from found(value, f"{path}.{type(part).__name__}.{name}")
    elif isinstance(x, (list, tuple)):
        for value in x:
            yield from found(value, path)
    elif isinstance(x, dict):
        for name, value in x.items():
            yield from found(value, f"{path}[{name}]")
    elif type(x).__module__.startswith("tg_equiattn"):
        for name, value in getattr(x, "__dict__", {}).items():
            yield from found(value, f"{path}.{name}")


@pytest.mark.parametrize("kinds", KINDS, ids=["64", "32"])
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, kinds):
    make = MODULES[name]
    module, plain = make(*kinds), make(int, float)
    assert list(found(module)) == []
    assert repr(module) == repr(plain)
    plain.load_state_dict(module.state_dict())


def test_grids_and_groups():
    n, f = KINDS[1]
    assert PixelGrid((n(4), n(5)), n(2), spacing=(f(0.5), n(1))) == PixelGrid((4, 5), 2, spacing=(0.5, 1))
    assert Window(n(2), n(3), "disk") == Window(2, 3, "disk")
    assert list(found([PixelGrid((n(4), n(5)), f(2)), Window(n(2), n(3)), dyadic(n(2)), cyclic(n(3))])) == []


@pytest.mark.parametrize("value", [numpy.bool_(True), True, numpy.float64(2), numpy.int64(0), "2", numpy.array(2)])
def test_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="heads must be a positive integer, got"):
        GroupAttention(C4, 3, 5, heads=value)


def test_checks_take_them_as_they_are():
    """Arguments of a call, such as batch_size."""
    checks.positive(batch_size=numpy.int64(2))
    checks.positive_number(cutoff=numpy.float32(1.5))
    checks.not_negative(locality=numpy.int64(0))
    checks.probability(dropout=numpy.float32(0.5))
    with pytest.raises(ValueError, match=r"dropout must be in \[0, 1\)"):
        checks.probability(dropout=numpy.float32(1.5))
