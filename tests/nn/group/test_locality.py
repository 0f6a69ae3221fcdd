"""Group attention whose heads start at places of their own: that it can be a convolution, cost, copies, settings.

Definition and symmetry are test_attention.py's, whose layers have locality as all do by default."""

import pytest
import torch
import torch.nn.functional as F
from group_layers import attention, image, lifting
from small_groups import GROUPS

from tg_equiattn.groups import cyclic, dihedral
from tg_equiattn.nn import GEViT, GroupAttention, LiftingAttention
from tg_equiattn.testing import act, equivariance_error


def make(group, relation, **options):
    options = {"locality": 4.0} | options
    return lifting(group, **options) if relation is None else attention(group, relation=relation, **options)


@pytest.mark.parametrize("relation", [None, "relative"])
def test_places_that_do_not_turn_are_not_equivariant(relation, randomise):
    """Negative control: every element looks at the same pixels."""
    group = GROUPS["C4"]
    layer = randomise(make(group, relation)).double()
    turned = layer.locality.forward
    layer.locality.forward = lambda offsets: turned(offsets[:1].expand_as(offsets))
    assert equivariance_error(layer, group, image(group, (5, 5), relation is not None)) > 1e-3


@pytest.mark.parametrize("name", ["C4", "D4"])
def test_it_can_be_a_group_convolution(name):
    r"""With a head a tap, scores of content at zero and sharp starts, out(x, h) = sum psi(D, u) f(x + h D, h u)."""
    group, taps = GROUPS[name], 9 * len(GROUPS[name])
    layer = GroupAttention(
        group, 2, 3, heads=taps, head_channels=4, kernel_size=3, relation="relative", locality=60.0
    ).double()
    psi = torch.randn(3, 2, len(group), 3, 3, dtype=torch.float64)
    with torch.no_grad():
        layer.locality.preference *= 30
        for parameter in (layer.query.weight, layer.query.bias, layer.value.bias, layer.out.bias):
            parameter.zero_()
        layer.value.weight.zero_()
        layer.out.weight.zero_()
        for head in range(taps):  # each passes both channels on
            x, y = (int(n) for n in layer.locality.centre[head])
            element = layer.locality.preference[head].argmax()
            layer.value.weight[4 * head, 0] = layer.value.weight[4 * head + 1, 1] = 1
            layer.out.weight[:, 4 * head : 4 * head + 2, 0] = psi[:, :, element, 1 - y, 1 + x]
    f = torch.randn(2, 2, len(group), 8, 9, dtype=torch.float64)
    filters = [act(psi, group, h) for h in range(len(group))]  # turned, and their elements rolled
    if name == "C4":
        torch.testing.assert_close(filters[1], psi.roll(1, 2).rot90(1, (-2, -1)))
    convolved = torch.stack([F.conv2d(f.flatten(1, 2), w.flatten(1, 2)) for w in filters], 2)
    torch.testing.assert_close(layer(f)[..., 1:-1, 1:-1], convolved, rtol=0, atol=1e-5)
    with torch.no_grad():
        layer.locality.preference.zero_()
    assert (layer(f)[..., 1:-1, 1:-1] - convolved).abs().max() > 0.1  # sharpness alone is not enough


def test_where_it_is_on():
    """In every layer of a model by one argument, and in no preset of the papers."""
    model = GEViT(cyclic(4), 1, 10, channels=(6,), heads=2, kernel_size=3, attention={"locality": 2.5})
    layers = [m for m in model.modules() if isinstance(m, (LiftingAttention, GroupAttention))]
    assert [layer.locality.start for layer in layers] == [2.5, 2.5]
    assert "locality=2.5" in repr(layers[0])
    automatic = [lifting(group, locality="auto").locality.start for group in (cyclic(4), dihedral(4), cyclic(8))]
    assert automatic == [4.0, 4.0, 1.0]
    assert GroupAttention(cyclic(8), 3, 4, heads=1).locality.start == 1.0
    assert GroupAttention(cyclic(8), 3, 4, heads=1, locality=None).locality is None
    for preset in (GEViT.rotmnist, GEViT.cifar10, GEViT.patchcamelyon):
        assert not any("locality" in name for name in preset(cyclic(4)).state_dict())
