"""Scales: lifting and group attention on the dilation group, times a finite group; masks are test_masks.py's."""

import itertools
import math

import pytest
import torch
from attention_operands import assert_same
from group_layers import block
from group_layers import layer as small_layer
from torch import nn

from tg_equiattn.encodings import relation_index
from tg_equiattn.groups import cyclic, dihedral, dyadic, trivial
from tg_equiattn.nn import GEViT, GlobalGroupAttention, GroupAttention, LiftingAttention
from tg_equiattn.testing import TOLERANCE, dilation_errors, equivariance_error

ISOMETRIES = {"none": trivial(2), "C4": cyclic(4), "D4": dihedral(4), "volume": trivial(3)}
SIZES = {2: (5, 6), 3: (3, 4, 2)}


def lifting(group, **arguments):
    return small_layer(LiftingAttention, group, 2, 6, **{"head_channels": 5} | arguments).double()


def attention(group, **arguments):
    return small_layer(GroupAttention, group, 3, 6, **{"head_channels": 5} | arguments).double()


def image(group, spatial=None, batch=2):
    return torch.randn(batch, 2, *(spatial or SIZES[group.dim]), dtype=torch.float64)


def regular(group, spatial=None, batch=2):
    return torch.randn(batch, 3, len(group), *(spatial or SIZES[group.dim]), dtype=torch.float64)


def given(layer, **options):
    return (image if isinstance(layer, LiftingAttention) else regular)(layer.group, **options)


@pytest.fixture(params=list(ISOMETRIES))
def isometries(request):
    return ISOMETRIES[request.param]


@pytest.fixture(params=["lifting", "group"])
def layer(request, randomise):
    """On three scales and quarter turns."""
    return randomise((lifting if request.param == "lifting" else attention)(dyadic(3, cyclic(4))), 0.5)


def exact_scales(scales, window, depth=1):
    """From which scale features go up one exactly: no end cuts a window of scales, there or above."""
    reach = depth * (window // 2)
    return [reach <= j < scales - 1 - reach for j in range(scales - 1)]


def by_definition(layer, x, there=None, output_power=0, key_power=0):
    """Every output by its keys, one at a time: pixels at the window's offsets times the scale, of the scales near.

    With powers the exponentials are divided by those powers of the output's and the key's scale.
    """
    q, k, v = (p if isinstance(layer, GroupAttention) else p.unsqueeze(3) for p in layer.project(x))
    group, size, sides = layer.group, layer.neighbourhood.kernel_size // 2, x.shape[-2:]
    elements = q.shape[3] // group.scales if isinstance(layer, GroupAttention) else 1
    out = torch.zeros(*v.shape[:3], len(group), *sides, dtype=x.dtype)
    for j, m, row, column in itertools.product(range(group.scales), range(len(group.isometries)), *map(range, sides)):
        if there is not None and not there[row, column]:
            continue
        scores, values = [], []
        turned = group.isometries.matrices[m]
        query = q[:, :, :, j * elements + m if elements > 1 or (layer.scale_window and k.shape[3] > 1) else 0]
        scales = range(group.scales) if k.shape[3] > 1 else [j]
        for down, right, other in itertools.product(range(-size, size + 1), range(-size, size + 1), scales):
            r, c, apart = row + 2**j * down, column + 2**j * right, other - j
            inside = 0 <= r < sides[0] and 0 <= c < sides[1] and (there is None or there[r, c])
            if not inside or abs(apart) > layer.scale_window // 2:
                continue
            offset = turned.T @ torch.tensor([right, -down], dtype=torch.float64)
            space, table = layer.encoding((offset / max(size, 1)).view(1, 1, -1))
            for n in range(elements):
                u = 0
                if k.shape[3] > 1:
                    between = int(group.isometries.cayley[group.isometries.inverse[m], n])
                    u = (apart + layer.scale_window // 2) * elements + between
                rho = space[0, 0, u] if space.ndim == 4 else space[0, 0] if table is None else space[0, 0] + table[u]
                place = other * elements + n if k.shape[3] > 1 else 0
                score = ((k[:, :, :, place, r, c] + rho) * query[..., row, column]).sum(2) * layer.head_channels**-0.5
                if layer.locality is not None:
                    score = score - layer.locality.sharpness.abs() * (offset - layer.locality.centre).square().sum(-1)
                    if layer.locality.preference is not None:
                        score = score + layer.locality.preference[:, u]
                scores.append(score - math.log(2) * (output_power * j + key_power * other))
                values.append(v[:, :, :, place, r, c])
        weights = torch.stack(scores).softmax(0)[:, :, :, None]
        out[:, :, :, j * len(group.isometries) + m, row, column] = (weights * torch.stack(values)).sum(0)
    out = layer.out(out.flatten(1, 2))
    return out if there is None else out * there


@pytest.mark.parametrize(("encoding", "masked"), [("axial", False), ("full", True)])
@pytest.mark.parametrize("make", [lifting, attention])
def test_definition(make, encoding, masked, randomise):
    """Outputs and gradients."""
    layer = randomise(make(dyadic(3, cyclic(2)), encoding=encoding), 0.5)
    x, there = given(layer, spatial=(3, 3), batch=1).requires_grad_(), torch.rand(3, 3) < 0.7 if masked else None
    out = layer(x, there[None] if masked else None)
    assert_same(out, by_definition(layer, x, there), [x, *layer.parameters()], 1e-10)


@pytest.mark.parametrize("encoding", ["axial", "joint", "full"])
def test_lifting_of_repeated_pixels(isometries, encoding, randomise):
    """Features go up one scale, borders included."""
    group = dyadic(3, isometries)
    layer = randomise(lifting(group, encoding=encoding), 0.5)
    for spatial in (SIZES[group.dim], (1, 3, 2)[: group.dim]):
        assert max(dilation_errors(layer, group, image(group, spatial))) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("window", [1, 3, 5])
def test_attention_to_repeated_pixels(isometries, window, randomise):
    """Exact for the scales whose window no end cuts, before and after; and for no other."""
    group = dyadic(5 if isometries is not ISOMETRIES["volume"] else 3, isometries)
    layer = randomise(attention(group, scale_window=window), 0.5)
    errors = dilation_errors(layer, group, regular(group, (2, 3, 2)[: group.dim], batch=1))
    for error, exact in zip(errors, exact_scales(group.scales, window), strict=True):
        assert error <= TOLERANCE[torch.float64] if exact else error > 1e-3


@pytest.mark.parametrize("name", ["disk", "circular", "no locality", "masked"])
def test_kinds_of_windows(name, randomise):
    group = dyadic(3, cyclic(4))
    options = {
        "disk": {"kernel_size": 5, "neighbourhood": "disk"},
        "circular": {"padding_mode": "circular"},
        "no locality": {"locality": None, "kernel_size": 5},
        "masked": {},
    }[name]
    for layer in (lifting(group, **options), attention(group, scale_window=1, **options)):
        x, module = given(randomise(layer, 0.5), spatial=(4, 8)), layer
        if name == "masked":
            mask = torch.rand(2, 4, 8) < 0.7

            def module(x, layer=layer, mask=mask):
                times = x.shape[-1] // 8
                return layer(x, mask.repeat_interleave(times, 1).repeat_interleave(times, 2))

        assert max(dilation_errors(module, group, x)) <= TOLERANCE[torch.float64]
        if name == "circular":
            rolled = layer(x.roll((1, -3), (-2, -1)))
            torch.testing.assert_close(rolled, layer(x).roll((1, -3), (-2, -1)), rtol=0, atol=1e-12)


class AsPrinted(nn.Module):
    """A layer with the factors of Eq. 20 (power d) or 21 (d + 1): what heads put out at scale h, times 1 / h^power."""

    def __init__(self, layer, power):
        super().__init__()
        self.layer, self.power = layer, power

    def forward(self, x):
        layer, group = self.layer, self.layer.group
        out = layer._weigh(*layer._operands(x, None, None), layer.index, None, 0.0)
        scales = 2.0 ** torch.arange(group.scales).repeat_interleave(len(group.isometries))
        return layer.out((out / scales[:, None, None] ** self.power).flatten(1, 2))


def test_factors_as_printed(randomise):
    """Negative control: outside of the softmax the factors of the paper break what they are meant to keep."""
    group = dyadic(3, cyclic(4))
    for layer, power in ((lifting(group), 2), (attention(group, scale_window=1), 3)):
        x = given(randomise(layer, 0.5))
        assert max(dilation_errors(layer, group, x)) <= TOLERANCE[torch.float64]
        assert min(dilation_errors(AsPrinted(layer, power), group, x)) > 1e-2


def test_factors_inside_the_softmax(randomise):
    """Of the output's scale they cancel; of the key's own scale they are a preference of scales, which is learned."""
    for make, power in ((lifting, 2), (attention, 3)):
        layer = randomise(make(dyadic(2)), 0.5)
        x = given(layer, spatial=(3, 4), batch=1)
        torch.testing.assert_close(by_definition(layer, x, output_power=power), layer(x), rtol=0, atol=1e-10)
    expected = by_definition(layer, x, key_power=3)
    assert float((expected - layer(x)).detach().abs().max()) > 1e-2
    with torch.no_grad():
        layer.locality.preference -= 3 * math.log(2) * torch.tensor([-1.0, 0, 1], dtype=torch.float64)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-10)


def test_isometries(isometries, randomise, device):
    group = dyadic(2, isometries)
    sizes = {2: ((3, 4), (4, 4)), 3: ((3, 4, 2), (2, 2, 2))}[group.dim]
    for make in (lifting, attention):
        layer, elements = randomise(make(group), 0.5).to(device), range(len(isometries))
        for (dtype, allowed), spatial in zip(TOLERANCE.items(), sizes, strict=True):
            x = given(layer, spatial=spatial).to(device, dtype)
            assert equivariance_error(layer.to(dtype), group, x, elements=elements) <= allowed


@pytest.mark.parametrize(("window", "scales", "isometries"), [(1, 3, cyclic(4)), (3, 6, trivial(2))])
@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_model(norm, window, scales, isometries, randomise):
    """Features of a whole model go up one scale; with windows of three scales those no end has reached."""
    group, options = dyadic(scales, isometries), {"channels": (4, 4), "heads": 2, "kernel_size": 3, "norm": norm}
    model = randomise(GEViT(group, 2, 5, attention={"scale_window": window}, **options).double(), 0.5).eval()
    side = 5 * 2 ** (scales - 3)  # wide for the largest scale
    errors = dilation_errors(model.features, group, image(group, (2, side), batch=1))
    assert model(image(group)).shape == (2, 5)
    for error, exact in zip(errors, exact_scales(scales, window, depth=2), strict=True):
        assert error <= TOLERANCE[torch.float64] if exact else error > 1e-7
    quarter = range(len(isometries))
    assert equivariance_error(model, group, image(group, (4, 4)), elements=quarter) <= TOLERANCE[torch.float64]


SCALES, FINITE = dyadic(3, cyclic(4)), "group must be finite, without scales"
REFUSED = [
    *((rf"relation must be 'relative'.*got '{r}'.*different pixels", lambda r=r: attention(SCALES, relation=r))
      for r in ("ge_vit", "lifted", "gsa")),
    *(("kernel_size must be a positive odd integer for groups of scales", lambda m=m: m(SCALES, kernel_size=None))
      for m in (lifting, attention)),
    *((rf"scale_window must be an odd integer from 1 to 5.*got {w}", lambda w=w: attention(SCALES, scale_window=w))
      for w in (0, 2, 7, -1, 1.0, True)),
    (r"scale_window must be None but for groups of scales .* got 3", lambda: attention(cyclic(4), scale_window=3)),
    (FINITE, lambda: GlobalGroupAttention(SCALES, 3, 6)),
    (FINITE, lambda: GEViT(SCALES, 1, 2, attention={"num_features": None})),
    (FINITE, lambda: relation_index(SCALES)),
    *((f"isometries must be a .*FiniteGroup, got .*{other!r:.6}", lambda other=other: dyadic(2, other))
      for other in ("C4", SCALES)),
    ("norm must be 'batch' or 'layer' for groups of scales", lambda: block(SCALES, norm="global")),
    ("crop must be .* for groups of scales.*twice as large", lambda: block(SCALES, crop=1)),
    ("crops must be .* for groups of scales.*twice as large",
     lambda: GEViT(SCALES, 1, 2, channels=(4, 4), options={"crops": (1, 0)})),
    ("pools must be .* for groups of scales.*twice as large", lambda: GEViT(SCALES, 1, 2, channels=(4, 4), pools=(1,))),
    (r"input sides must be multiples of the largest scale, 4.*\(4, 6\)",
     lambda: lifting(SCALES, padding_mode="circular")(image(SCALES, (4, 6)))),
    ("kernel_size must be at most",
     lambda: lifting(SCALES, padding_mode="circular", kernel_size=5)(image(SCALES, (4, 4)))),
    (r"input must have shape \(B, 3, 12, H, W\)", lambda: attention(SCALES)(regular(dyadic(2, cyclic(4))))),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), REFUSED, ids=range(len(REFUSED)))
def test_what_scales_do_not_allow(message, call):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_scales_have():
    layers = [attention(SCALES), attention(dyadic(5, cyclic(4))), attention(SCALES, scale_window=5)]
    assert (layers[0].relation, layers[0].scale_window) == ("relative", 3)
    few, more, wider = (sum(p.numel() for p in layer.parameters()) for layer in layers)
    assert few == more < wider


def test_context_of_other_features(layer):
    """Its scales move up as those of the input, whose window of scales is one wide here."""
    group, channels = layer.group, layer.in_channels
    make = type(layer)
    options = {} if make is LiftingAttention else {"scale_window": 1}
    cross = small_layer(make, group, channels, 6, head_channels=5, context_channels=channels, **options)
    x, context = given(layer), given(layer)
    both = lambda x: cross.double()(x[:, :channels], context=x[:, channels:])  # noqa: E731
    assert max(dilation_errors(both, group, torch.cat([x, context], 1))) <= TOLERANCE[torch.float64]
    assert float((cross(x, context=context) - cross(x, context=x)).detach().abs().max()) > 1e-2
