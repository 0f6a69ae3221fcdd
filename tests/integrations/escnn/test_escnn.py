"""The escnn integration: its checks and escnn's, shapes, exports, and models mixed with escnn's layers."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from escnn import gspaces, nn
from fields import GSPACES, field, layers, of, regular, sides, trivial
from tg_equiattn.integrations.escnn import (
    R2AttentionBlock,
    R2GroupAttention,
    R2LiftingAttention,
    R2RegularLayerNorm,
    between_fields,
    group_from_gspace,
)

IN_THE_GATE = ("rot8", "flip_other_axis", "trivial")  # one of each kind


@pytest.fixture(params=[pytest.param(n, marks=() if n in IN_THE_GATE else pytest.mark.slow) for n in GSPACES])
def gspace(request):
    return GSPACES[request.param]


def test_check_equivariance(on_device, gspace, randomise):
    for layer in layers(gspace):
        errors = randomise(layer).check_equivariance()
        assert len(errors) == int(group_from_gspace(gspace).lattice.sum())
        assert all(error < 1e-5 for _, error in errors)
        layer.double().check_equivariance(atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize(("name", "count"), [("rot8", 8), ("rot4", 4), ("third", 3)])
def test_check_off_the_lattice(name, count):
    """Elements off the lattice come after the others, with relative errors that the window decides."""
    gspace = gspaces.rot2dOnR2(3) if name == "third" else GSPACES[name]
    image, hidden = trivial(gspace), regular(gspace)
    worst = {}
    for shape in ("disk", "square"):
        layer = R2LiftingAttention(image, hidden, heads=2, locality=None, window_shape=shape)
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
        assert torch.equal(copy.copy(layer)(layer.in_type(x)).tensor, out.tensor)
        with pytest.raises(pickle.PicklingError, match=r"store state_dict\(\), or pickle .* export\(\) makes"):
            pickle.dumps(layer)


def mixed(gspace):
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


@pytest.mark.parametrize(
    "name", ["rot4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flip", "flipRot4", "trivial"))]
)
def test_mixed_model_learns_and_passes_escnns_check(device, name):
    """And what it learned is loaded and exported with escnn's, whose check is for the CPU."""
    model, x = mixed(GSPACES[name]).to(device), torch.randn(4, 3, 9, 9, device=device)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(5):
        loss = (model(model.in_type(x)).tensor.mean((2, 3)) - 1).square().mean()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model, x = model.cpu().eval(), x.cpu()
    with contextlib.redirect_stdout(io.StringIO()):
        assert len(model.check_equivariance(atol=1e-4, rtol=1e-4)) == 20
    expected = model(model.in_type(x)).tensor
    other = mixed(GSPACES[name]).eval()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(other.in_type(x)).tensor, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(model.export()(x), expected, rtol=0, atol=1e-5)


def types(gspace):
    irreps = [r for r in gspace.fibergroup.irreps() if not r.is_trivial()]
    group = gspace.fibergroup
    quotient = [gspace.quotient_repr(2)] if group.name == "C4" else []
    everything = [gspace.trivial_repr, *irreps, gspace.regular_repr, *quotient]
    return [nn.FieldType(gspace, r) for r in ([gspace.trivial_repr], 2 * irreps, quotient or [irreps[0]], everything)]


@pytest.mark.parametrize("name", ["rot4", "flipRot4", "flip", "half turns"])
def test_layers_between_fields_of_any_type(name, randomise):
    gspace = GSPACES[name]
    hidden = regular(gspace, 3)
    for in_type, out_type in zip(types(gspace), types(gspace)[::-1], strict=True):
        layer = of(gspace, "GroupAttention")(hidden, hidden, heads=2, kernel_size=3)
        model = between_fields(in_type, layer, out_type)
        assert isinstance(model, nn.SequentialModule)
        assert (model.in_type, model.out_type) == (in_type, out_type)
    randomise(model).double().eval()
    x = field(in_type, 2, *sides(gspace, 7, 7))
    out = model(x)
    for element in gspace.fibergroup.elements:
        torch.testing.assert_close(model(x.transform(element)).tensor, out.transform(element).tensor, rtol=0, atol=1e-9)
    wrong = nn.GeometricTensor(x.tensor.flip(1), in_type)  # components in another order are other fields
    element = gspace.fibergroup.elements[1]
    mixed = nn.GeometricTensor(x.transform(element).tensor.flip(1), in_type)
    assert (model(mixed).tensor - model(wrong).transform(element).tensor).abs().max() > 1e-3
