"""What escnn's users mix: fields of any type, masks, contexts, maps, circular images, all pixels in linear time."""

import pytest
import torch
from escnn import nn
from fields import GSPACES, field, of, regular, sides
from tg_equiattn.integrations.escnn import between_fields


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
