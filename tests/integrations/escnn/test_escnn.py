"""The escnn integration: against the core, against escnn's own actions and checks, and mixed with escnn's layers."""

import contextlib
import copy
import io
import pickle

import numpy as np
import pytest
import torch
from escnn import gspaces, nn
from fields import block, of, regular, sides, trivial
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GroupAttention,
    R2LiftingAttention,
    R2RegularLayerNorm,
    between_fields,
    group_from_gspace,
)

from tg_equiattn.testing import equivariance_error

GSPACES = {
    "rot4": gspaces.rot2dOnR2(4),
    "rot8": gspaces.rot2dOnR2(8),
    "flipRot4": gspaces.flipRot2dOnR2(4),
    "flipRot2": gspaces.flipRot2dOnR2(2),
    "flip": gspaces.flip2dOnR2(),
    "flip_other_axis": gspaces.flip2dOnR2(axis=0.0),
    "trivial": gspaces.trivialOnR2(),
    "volumes: half turns": gspaces.dihedralOnR3(2),
    "volumes: mirror": gspaces.mirOnR3(),
}


JOINT = {"encoding": "joint"}


def layers(gspace):
    image, hidden, wider = trivial(gspace), regular(gspace), regular(gspace, 8)
    return [
        of(gspace, "LiftingAttention")(image, hidden, heads=2, kernel_size=3),
        of(gspace, "GroupAttention")(hidden, wider, heads=2, kernel_size=3),
        of(gspace, "GroupAttention")(hidden, hidden, heads=2, kernel_size=None, relation="relative", options=JOINT),
        of(gspace, "GlobalAttention")(hidden, wider, heads=2, kernel_size=3),
        block(of(gspace, "GroupAttention")(hidden, wider, heads=2, kernel_size=3), crop=1),
        of(gspace, "RegularLayerNorm")(hidden),
    ]


IN_THE_GATE = ("rot8", "flipRot2", "flip_other_axis", "trivial")  # one of each kind


@pytest.fixture(params=[pytest.param(n, marks=() if n in IN_THE_GATE else pytest.mark.slow) for n in GSPACES])
def gspace(request):
    return GSPACES[request.param]


@pytest.mark.parametrize("gspace", GSPACES, indirect=True)
def test_group_has_escnn_products_and_action(gspace):
    """Same order of elements, same products, and the regular action is a permutation by the Cayley table."""
    group, elements = group_from_gspace(gspace), gspace.fibergroup.elements
    flip = np.diag([1, 1, -1][: group.dim])  # the first axis of a volume is -z to escnn
    for a, first in enumerate(elements):
        np.testing.assert_allclose(flip @ group.matrices[a].numpy() @ flip, gspace.basespace_action(first), atol=1e-12)
        for b, second in enumerate(elements):
            assert elements[int(group.cayley[a, b])] == first @ second
        permutation = torch.eye(len(group))[group.cayley[group.inverse[a]]]
        np.testing.assert_allclose(gspace.regular_repr(first), permutation, atol=1e-12)


def test_check_equivariance(on_device, gspace, randomise):
    for layer in layers(gspace):
        errors = randomise(layer).check_equivariance()
        assert len(errors) == int(group_from_gspace(gspace).lattice.sum())
        assert all(error < 1e-5 for _, error in errors)
        layer.double().check_equivariance(atol=1e-10, rtol=1e-10)


def test_check_agrees_with_escnn_transform(randomise):
    """Quarter turns by escnn's GeometricTensor.transform give the same verdict as the exact check."""
    for name in ("flipRot4", "flip"):
        for layer in layers(GSPACES[name]):
            x = nn.GeometricTensor(torch.randn(1, layer.in_type.size, 7, 7), layer.in_type)
            out = randomise(layer).eval()(x)
            for element in GSPACES[name].fibergroup.elements:
                moved, expected = layer(x.transform(element)).tensor, out.transform(element).tensor
                torch.testing.assert_close(moved, expected, rtol=0, atol=2e-4)


def test_escnn_check_finds_gsa_in_a_sequence(randomise):
    """escnn's own check, with its own transforms, also tells GSA-Nets from GE-ViT."""
    hidden = regular(GSPACES["rot4"])
    with pytest.warns(UserWarning, match="not equivariant"):
        layers = {
            r: R2GroupAttention(hidden, hidden, heads=2, kernel_size=3, relation=r, options=JOINT)
            for r in ("ge_vit", "gsa")
        }
    with contextlib.redirect_stdout(io.StringIO()):
        nn.SequentialModule(randomise(layers["ge_vit"])).check_equivariance(atol=1e-3, rtol=1e-3)
        with pytest.raises(AssertionError, match="too high"):
            nn.SequentialModule(randomise(layers["gsa"])).check_equivariance(atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "count"), [("rot8", 8), ("rot4", 4), ("third", 3)])
def test_check_off_the_lattice(name, count):
    """Elements off the lattice come after the others, with relative errors that the window decides."""
    gspace = gspaces.rot2dOnR2(3) if name == "third" else GSPACES[name]
    image, hidden = trivial(gspace), regular(gspace)
    worst = {}
    for shape in ("disk", "square"):
        layer = R2LiftingAttention(image, hidden, heads=2, locality=None, options={"neighbourhood": shape})
        exact = [] if name == "third" else layer.check_equivariance()
        errors = layer.check_equivariance(off_lattice=True)
        assert [element for element, _ in errors][: len(exact)] == [element for element, _ in exact]
        assert {element for element, _ in errors} == set(gspace.fibergroup.elements)
        assert len(errors) == count
        assert layer.training
        worst[shape] = max([error for _, error in errors[len(exact) or 1 :]], default=0.0)
    if name != "rot4":
        assert 1e-4 < worst["disk"] < 0.015 < worst["square"] < 0.3


def test_shapes_and_exports(gspace, randomise):
    spatial = sides(gspace, 7, 5)
    for layer in layers(gspace):
        x = torch.randn(2, layer.in_type.size, *spatial)
        exported = randomise(layer).export()
        assert not layer.training
        assert not isinstance(exported, nn.EquivariantModule)
        out = layer(layer.in_type(x))
        assert out.type == layer.out_type
        assert tuple(out.shape) == tuple(layer.evaluate_output_shape(tuple(x.shape)))
        for wrong in ((2, layer.in_type.size + 1, *spatial), (2, layer.in_type.size, *spatial, 3)):
            with pytest.raises(ValueError, match="input_shape must be"):
                layer.evaluate_output_shape(wrong)
        for module in (exported, copy.deepcopy(exported), pickle.loads(pickle.dumps(exported))):
            torch.testing.assert_close(module(x), out.tensor, rtol=0, atol=0)


def mixed(gspace):
    """Our layers between escnn's convolution, norm, nonlinearity and pooling."""
    image, hidden = trivial(gspace), regular(gspace)
    return nn.SequentialModule(
        nn.R2Conv(image, image, 3, padding=1),
        R2LiftingAttention(image, hidden, heads=2, kernel_size=3),
        nn.InnerBatchNorm(hidden),
        nn.ReLU(hidden),
        R2GroupAttention(hidden, hidden, heads=2, kernel_size=3),
        R2AttentionBlock(R2GroupAttention(hidden, hidden, heads=2, kernel_size=3)),
        nn.R2Conv(hidden, hidden, 3, padding=1),
        R2RegularLayerNorm(hidden),
        nn.GroupPooling(hidden),
    )


SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", ["rot4", "flip", *(pytest.param(n, marks=SLOW) for n in ("flipRot4", "trivial"))])
def test_mixed_model_passes_escnn_check(on_device, name):
    model = mixed(GSPACES[name])
    model(model.in_type(torch.randn(4, 3, 9, 9)))  # batch norm statistics
    model.eval()
    with contextlib.redirect_stdout(io.StringIO()):
        errors = model.check_equivariance(atol=1e-4, rtol=1e-4)
    assert len(errors) == 20


@pytest.mark.parametrize("name", ["rot4", pytest.param("flipRot4", marks=SLOW)])
def test_mixed_model_trains_exports_and_loads(name):
    gspace = GSPACES[name]
    model = mixed(gspace)
    x = torch.randn(4, 3, 9, 9)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(5):
        loss = (model(model.in_type(x)).tensor.mean((2, 3)) - 1).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.eval()
    expected = model(model.in_type(x)).tensor
    other = mixed(gspace).eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(other.in_type(x)).tensor, expected, rtol=0, atol=1e-6)
    exported = pickle.loads(pickle.dumps(model.export()))
    torch.testing.assert_close(exported(x), expected, rtol=0, atol=1e-5)


def test_equals_the_core(on_device, randomise):
    gspace = GSPACES["flipRot4"]
    layer = randomise(R2GroupAttention(regular(gspace), regular(gspace), heads=2, kernel_size=3)).double()
    x = torch.randn(2, 48, 5, 6, dtype=torch.float64)
    expected = layer.core(x.view(2, 6, 8, 5, 6)).reshape(2, 48, 5, 6)
    torch.testing.assert_close(layer(layer.in_type(x)).tensor, expected, rtol=0, atol=0)
    assert equivariance_error(layer.core, layer.group, x.view(2, 6, 8, 5, 6)) < 1e-10


ROT4, CONTINUOUS = GSPACES["rot4"], gspaces.rot2dOnR2()
SO2_ADVICE = r"gspace must be discrete, got SO\(2\).*RestrictionModule\(fields, N\), N > 0, .* then equivariant to C_N"


def mixed_fields(gspace):
    return nn.FieldType(gspace, [gspace.trivial_repr, gspace.irrep(1), gspace.regular_repr])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: R2LiftingAttention(regular(ROT4), regular(ROT4), heads=1),
         r"in_type must consist of trivial fields, .*R2Conv\(in_type, fields, kernel_size=1\), .*trivial_repr"),
        (lambda: R2LiftingAttention(trivial(ROT4), trivial(ROT4), heads=1),
         r"out_type must consist of regular fields, .* escnn.nn.R2Conv\(fields, out_type, kernel_size=1\)"),
        (lambda: R2LiftingAttention(regular(ROT4), regular(ROT4), heads=1), "use R2GroupAttention, which takes"),
        (lambda: R2LiftingAttention(mixed_fields(ROT4), regular(ROT4), heads=1),
         r"use R2GroupAttention after escnn.nn.R2Conv\(in_type, fields, kernel_size=1\), .*regular_repr.* or keep only "
         r"what is invariant, with escnn.nn.R2Conv\(in_type, .*trivial_repr"),
        (lambda: R2GroupAttention(mixed_fields(ROT4), regular(ROT4), heads=1),
         r"convert with escnn.nn.R2Conv\(in_type, fields, kernel_size=1\), .*regular_repr"),
        (lambda: R2GroupAttention(regular(ROT4), mixed_fields(ROT4), heads=1),
         r"convert with escnn.nn.R2Conv\(fields, out_type, kernel_size=1\), .*regular_repr"),
        (lambda: R2AttentionBlock(R2LiftingAttention(trivial(ROT4), regular(ROT4), heads=1)),
         "attention must be an R2GroupAttention or an R2GlobalAttention, got R2LiftingAttention"),
        (lambda: R2GroupAttention(regular(ROT4), regular(ROT4), options={"context_channels": 3}),
         "options must leave context_channels to context_type, got both"),
        (lambda: R2GroupAttention(regular(ROT4), regular(ROT4), options={"eps": 3}), "options must be of .* got eps"),
        (lambda: R2GroupAttention(regular(ROT4), regular(GSPACES["rot8"]), heads=1),
         "out_type must have the gspace of in_type"),
        (lambda: R2LiftingAttention(trivial(CONTINUOUS), trivial(CONTINUOUS), heads=1), SO2_ADVICE),
        (lambda: R2GroupAttention(trivial(CONTINUOUS), regular(ROT4), heads=1), SO2_ADVICE),
        (lambda: group_from_gspace(CONTINUOUS), SO2_ADVICE),
        (lambda: group_from_gspace(gspaces.flipRot2dOnR2()), r"RestrictionModule\(fields, \(axis, N\)\).* to D_N"),
        (lambda: group_from_gspace(gspaces.no_base_space(ROT4.fibergroup)), "gspace must be one of images or volumes"),
        (lambda: group_from_gspace("rot"), "gspace must be an escnn.gspaces.GSpace, got str"),
        (lambda: R2GroupAttention(12, regular(ROT4), heads=1), "in_type must be an escnn.nn.FieldType, got int"),
        (lambda: R2GroupAttention(regular(ROT4), regular(ROT4), heads=1, kernel_size=4), "kernel_size must be"),
        (lambda: R2LiftingAttention(trivial(ROT4), regular(ROT4), heads=1, locality=-1.0),
         "locality must be a finite number of at least 0, got -1.0"),
        (lambda: R2GroupAttention(regular(ROT4), regular(ROT4), heads=1, locality="high"), "locality must be"),
    ],
)  # fmt: skip
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_bad_input():
    layer = R2GroupAttention(regular(ROT4), regular(ROT4), heads=1, kernel_size=3)
    for x in (torch.randn(1, 24, 5, 5), trivial(ROT4)(torch.randn(1, 3, 5, 5))):
        with pytest.raises(ValueError, match="input must be a GeometricTensor of type"):
            layer(x)
    with pytest.raises(ValueError, match="at least one pixel"):
        layer(regular(ROT4)(torch.randn(1, 24, 0, 5)))
    with pytest.raises(ValueError, match="size must be 2 sides of the test image or volume, got 4"):
        layer.check_equivariance(size=4)
    with pytest.raises(ValueError, match=r"gspace must have elements .* check_equivariance\(off_lattice=True\)"):
        R2RegularLayerNorm(regular(gspaces.rot2dOnR2(3))).check_equivariance()
    assert [type(m) for m in between_fields(regular(ROT4), layer, regular(ROT4))] == [R2GroupAttention]
    assert "[C4_on_R2[(None, 4)]: {regular (x6)}(24)]" in repr(layer)
    vectors = nn.FieldType(ROT4, [ROT4.irrep(1)])
    with pytest.raises(ValueError, match=r"use R2GroupAttention after .*regular_repr\]\)$"):
        R2LiftingAttention(vectors, regular(ROT4), heads=1)
