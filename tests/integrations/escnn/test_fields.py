"""What escnn's users mix: fields of any type, masks, contexts, maps, circular images, all pixels in linear time."""

import pytest
import torch
from escnn import nn
from fields import GSPACES, block, field, of, regular, sides, trivial
from tg_equiattn.integrations.escnn import between_fields, group_from_gspace

from tg_equiattn.testing import act


def turned(mask, gspace, element):
    group = group_from_gspace(gspace)
    index = list(gspace.fibergroup.elements).index(element)
    return act(mask[:, None].double(), group, index)[:, 0] > 0.5


def layers(gspace, context=None, **options):
    hidden, wider, image = regular(gspace, 3), regular(gspace, 4), trivial(gspace, 2)
    options = {"heads": 2, "kernel_size": 3, **options}
    lifting, *others = (of(gspace, kind) for kind in ("LiftingAttention", "GroupAttention", "GlobalAttention"))
    made = [lifting(image, hidden, context_type=trivial(gspace, 5) if context else None, **options)]
    more = {"context_type": regular(gspace, 5) if context else None, **options}
    made += [layer(hidden, wider, **more) for layer in others]
    made.append(block(others[1](hidden, wider, **more)))
    return [layer.double() for layer in made]


@pytest.mark.parametrize(("name", "padding_mode"), [("rot4", "mask"), ("flipRot4", "circular"), ("half turns", "mask")])
def test_masks_and_contexts_under_escnns_transform(name, padding_mode, randomise):
    """For every element; where the mask or the context stays as it is, the check fails."""
    gspace = GSPACES[name]
    shape = (2, *sides(gspace, 5, 5))
    mask = torch.rand(shape) < 0.6
    for layer in layers(gspace, context=True, padding_mode=padding_mode):
        randomise(layer)
        x, context = field(layer.in_type, *shape), field(layer.context_type, *shape)
        out = layer(x, mask, context=context)
        assert out.type == layer.out_type
        for element in gspace.fibergroup.elements:
            moved, target = turned(mask, gspace, element), out.transform(element).tensor
            got = layer(x.transform(element), moved, context=context.transform(element)).tensor
            torch.testing.assert_close(got, target, rtol=0, atol=1e-10 * float(target.detach().abs().max()))
            if element != gspace.fibergroup.identity:
                wrong = layer(x.transform(element), mask, context=context.transform(element)).tensor
                assert (wrong - target).abs().max() > 1e-2
                wrong = layer(x.transform(element), moved, context=context).tensor
                assert (wrong - target).abs().max() > 1e-2


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
