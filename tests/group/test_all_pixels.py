"""With ``kernel_size=None`` every pixel attends to every other pixel, from the start."""

import pytest
import torch

from tg_equiattn.group.encodings import RELATIONS
from tg_equiattn.groups import cyclic, octahedral
from tg_equiattn.nn import GroupAttention, LiftingAttention


def made(name, group=None, **options):
    """A new layer over all pixels: lifting, or group attention with a relation."""
    if name != "lifting":
        options["relation"] = name
    kind = LiftingAttention if name == "lifting" else GroupAttention
    return kind(group or cyclic(4), 3, 8, kernel_size=None, **options).double()


def change(layer, spatial):
    """The change of the output at the first pixel by the last pixel, relative to the largest output."""
    elements = () if layer.lifts else (len(layer.group),)
    x = torch.randn(1, 3, *elements, *spatial, dtype=torch.float64)
    other = x.clone()
    last, first = (..., *(-1 for _ in spatial)), (..., *(0 for _ in spatial))
    other[last] += 3
    with torch.no_grad():
        out = layer(x)
        return float((layer(other) - out)[first].abs().max() / out.abs().max())


@pytest.mark.filterwarnings("ignore:relation='gsa'")
@pytest.mark.parametrize("name", RELATIONS)
def test_a_new_layer_gives_weight_to_distant_pixels(name):
    assert change(made(name), (11, 12)) > 1e-4
    assert change(made(name, locality=4.0), (11, 12)) < 1e-10  # a negative control
    if name in ("lifting", "frame"):
        assert change(made(name, octahedral()), (5, 4, 6)) > 1e-5
