"""Windows with a side for each axis, strides, and contexts with half or twice as many pixels along each axis."""

import pytest
import torch
import torch.nn.functional as F
from group_layers import GROUPS, LAYERS, block, image

from tg_equiattn.group import attention_layer
from tg_equiattn.groups import dihedral, from_generators
from tg_equiattn.testing import act, equivariance_error

CIRCULAR = {"padding_mode": "circular"}
D2, D4 = dihedral(2), GROUPS["D4"]
ABOUT_Z = from_generators([[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], [[1, 0, 0], [0, 1, 0], [0, 0, -1]]])
QUARTERS = from_generators([[[0.0, -1, 0], [1, 0, 0], [0, 0, 1]]])
KEPT = [(D2, (3, 5), (4, 6)), (D2, (5, 1), (3, 3)), (ABOUT_Z, (1, 3, 3), (2, 3, 4))]


def act_on_mask(mask, group, element):
    return act(mask[:, None].double(), group, element)[:, 0] > 0.5


@pytest.mark.parametrize(("group", "sides", "spatial"), KEPT)
@pytest.mark.parametrize("name", ["lifting", "frame", "relative", "global"])
def test_a_side_for_each_axis(name, group, sides, spatial, randomise):
    layer = randomise(LAYERS[name](group, kernel_size=sides)).double()
    x, mask = image(group, spatial, name != "lifting"), torch.rand(2, *spatial) < 0.7
    for g in range(len(group)):
        for given, moved in ((None, None), (mask, act_on_mask(mask, group, g))):
            wanted = act(layer(x, given), group, g)
            torch.testing.assert_close(layer(act(x, group, g), moved), wanted, rtol=0, atol=1e-10)


def test_other_elements_do_not_keep_the_window(monkeypatch, randomise):
    """Without the refusal, rotations by 90 degrees would not be symmetries; those by 180 degrees would."""
    with pytest.raises(ValueError, match=r"kernel_size must have equal sides .* elements of D4"):
        LAYERS["frame"](D4, kernel_size=(3, 5))
    monkeypatch.setattr(attention_layer, "check_sides", lambda *_: None)
    layer, x = randomise(LAYERS["frame"](D4, kernel_size=(3, 5))).double(), image(D4, (5, 5), True)
    errors = [equivariance_error(layer, D4, x, elements=[g]) for g in range(len(D4))]
    exchanged = D4.matrices[:, 0, 1].abs() > 0.5
    assert all((error > 1e-3) == exchanged[g] for g, error in enumerate(errors))


def test_rotations_off_the_lattice_about_the_short_axis():
    """A cylinder about the axis of the slices has equal sides along the axes that they exchange."""
    half = 0.5**0.5
    eighth = from_generators([[[half, -half, 0], [half, half, 0], [0, 0, 1.0]]])
    layer = LAYERS["frame"](eighth, kernel_size=(3, 5, 5))
    assert layer.window.shape == "disk"
    assert equivariance_error(layer.double(), eighth, image(eighth, (2, 4, 4), True, batch=1), elements=[2, 4]) < 1e-10
    with pytest.raises(ValueError, match="equal sides"):
        LAYERS["frame"](eighth, kernel_size=(5, 5, 3))


def test_equal_sides_are_one_number():
    assert LAYERS["frame"](D4, kernel_size=[3, 3]).settings()["kernel_size"] == 3
    loaded = LAYERS["frame"](D2, kernel_size=(3, 5))
    loaded.load_state_dict(LAYERS["frame"](D2, kernel_size=[3, 5]).state_dict())
    with pytest.raises(ValueError, match="kernel_size"):
        loaded.load_state_dict(LAYERS["frame"](D2, kernel_size=(5, 3)).state_dict())


def places(spatial, unit, start, margin=0):
    """Positions of the pixels ``unit * n + start``, and of a margin around them."""
    axes = (unit * torch.arange(-margin, n + margin).double() + start for n in spatial)
    *z, row, column = torch.meshgrid(*axes, indexing="ij")
    return torch.stack([column, -row, *z], -1).flatten(0, -2)


def by_definition(layer, name, x, context, mask, queries_at, keys_at):
    """One output element after the other, from the positions of all queries and keys. Heads without content do not see
    the mask, by which values are zero."""
    q, k, v = (y.unsqueeze(3).flatten(4) if layer.lifts else y.flatten(4) for y in layer.project(x, context))
    offsets, sides, count = keys_at - queries_at[:, None], torch.tensor(layer.window.sides[::-1]), layer.content_heads
    lengths = 2 * offsets.abs() / sides
    inside = (lengths.norm(dim=-1) if layer.window.shape == "disk" else lengths.amax(-1)) <= 1
    inside, mask, v = inside[:, None], mask.flatten(1)[:, None, None, None], v * mask.flatten(1)[:, None, None, None]
    every, outs = list(range(k.shape[3])), []
    for h, matrix in enumerate(layer.group.matrices):
        rotated = (offsets @ matrix).flatten(0, 1)[None]  # h^-1 is the transpose
        rho, table = layer.encoding(rotated / layer.window.scale())
        bias, preference = layer.locality(rotated)
        rho, bias, out = rho.view(*offsets.shape[:2], -1), bias.view(-1, len(offsets), 1, offsets.shape[1]), 0
        index = None if layer.index is None else layer.index(x.device)[h]
        pairs = {
            "lifting": [(0, [0], None)], "frame": [(h, [h], None)], "relative": [(h, every, index)],
        }.get(name) or [(t, every, index[t]) for t in every]  # fmt: skip
        for t, s, u in pairs:
            scores = bias + (0 if u is None else preference[:, u][:, None, :, None])
            scores = scores.expand(len(x), -1, -1, len(s), -1)
            products = torch.einsum("becp,becsm->bepsm", q[..., t, :], k[:, :, :, s])
            products = products + torch.einsum("becp,pmc->bepm", q[..., t, :], rho).unsqueeze(3)
            if u is not None:
                products = products + torch.einsum("becp,sc->beps", q[..., t, :], table[u]).unsqueeze(-1)
            content = products * layer.head_channels**-0.5 + scores[:, :count]
            scores = torch.cat([content.masked_fill(~mask, -torch.inf), scores[:, count:]], 1)
            weights = scores.masked_fill(~inside, -torch.inf).flatten(3).softmax(-1).nan_to_num(0.0).view_as(scores)
            out = out + torch.einsum("bepsm,becsm->becp", weights, v[:, :, :, s])
        outs.append(out)
    return layer.out(torch.stack(outs, 3).unflatten(-1, x.shape[-layer.group.dim :]).flatten(1, 2))


# coarse grid, fine grid, options
GRIDS = {
    "pixels on pixels": ((2, 3), (3, 5), {}),
    "pixels between pixels": ((2, 1), (4, 2), {"kernel_size": 5}),
    "disk": ((2, 2), (3, 3), {"kernel_size": 5, "window_shape": "disk", "heads": 3, "content_heads": 2}),
    "disk between pixels": ((2, 1), (4, 2), {"window_shape": "disk", "content_heads": 1}),
    "one pixel": ((1, 3), (1, 5), {"content_heads": 1}),
    "volume": ((2, 1, 2), (3, 1, 3), {"heads": 3, "kernel_size": (5, 3, 3), "content_heads": 1}),
    "volume between pixels": ((1, 2, 1), (2, 4, 2), {"content_heads": 1}),
}
RELATIONS = ("lifting", "frame", "relative", "ge_vit")
slow = pytest.mark.slow
EVERY = [
    pytest.param(name, grids, finer, marks=slow if "volume" in grids and name in ("relative", "ge_vit") else ())
    for name in RELATIONS
    for grids in GRIDS
    for finer in (False, True)
]


def between(grids, finer_keys):
    """The sizes of both grids, and the unit and the first position of each."""
    coarse, fine, options = GRIDS[grids]
    half = 0.5 if fine[-1] % 2 == 0 else 0.0
    sides = (coarse, 2.0, half), (fine, 1.0, 0.0)
    return *(sides if finer_keys else sides[::-1]), options


def made(name, dim, randomise, group=None, **options):
    group = group or (D2 if dim == 2 else QUARTERS)
    return randomise(LAYERS[name](group, **{"context_channels": 5} | options)).double()


def images(layer, *grids):
    axes = [] if layer.lifts else [layer.group.order]
    return [torch.randn(2, c, *axes, *spatial).double() for c, spatial in zip((3, 5), grids, strict=True)]


@pytest.mark.parametrize(("name", "grids", "finer_keys"), EVERY)
def test_contexts_of_other_resolution_by_definition(name, grids, finer_keys, randomise):
    (queries, *at), (keys, *keys_at), options = between(grids, finer_keys)
    layer = made(name, len(keys), randomise, **options)
    x, context = images(layer, queries, keys)
    mask = torch.rand(2, *keys) < 0.7
    mask[1] = False
    mask[1].flatten()[-1] = True
    margin = int(max(layer.window.sides) / 2 / keys_at[0]) + 1
    padded, padded_mask = (F.pad(y, [margin] * 2 * len(keys)) for y in (context, mask))
    queries_at, keys_at = places(queries, *at), places(keys, *keys_at, margin)
    for given in (mask, torch.ones_like(mask)):
        there = padded_mask if given is mask else F.pad(given, [margin] * 2 * len(keys))
        wanted = by_definition(layer, name, x, padded, there, queries_at, keys_at)
        got = layer(x, context=context, context_mask=None if given is not mask else mask)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize("group", ["D4", pytest.param("C8", marks=slow), pytest.param("mirror", marks=slow)])
@pytest.mark.parametrize("name", ["lifting", "frame", "relative", pytest.param("ge_vit", marks=slow)])
@torch.no_grad()
def test_equivariance_of_contexts_of_other_resolution(name, group, randomise):
    """For every element that maps pixels to pixels, if both images are moved."""
    group = GROUPS[group]
    for coarse, fine in (((3, 2), (5, 3)), ((2, 2), (4, 4))):
        for queries, keys in ((coarse, fine), (fine, coarse)):
            layer = made(name, 2, randomise, group, heads=3, content_heads=2)
            (x, context), mask = images(layer, queries, keys), torch.rand(2, *keys) < 0.7
            out, apart = layer(x, context=context, context_mask=mask), 0.0
            for g in group.lattice.nonzero().flatten().tolist():
                moved, beside, wanted = (act(y, group, g) for y in (x, context, out))
                got = layer(moved, context=beside, context_mask=act_on_mask(mask, group, g))
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
                if g != group.identity and beside.shape == context.shape and not apart:
                    apart = float((layer(moved, context=context, context_mask=mask) - wanted).abs().max())
            assert apart > 1e-3


STRIDED = [
    ("lifting", (5, 3), {}), ("lifting", (5, 3), {"content_heads": 0}), ("frame", (1, 5), {"content_heads": 1}),
    ("frame", (5, 5), {"content_heads": 0}), ("frame", (3, 1, 5), {"kernel_size": (3, 1, 1)}),
    ("relative", (3, 5), {"window_shape": "disk", "kernel_size": 5}), ("ge_vit", (3, 3), {}),
    ("ge_vit", (3, 5), {"content_heads": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "spatial", "options"), STRIDED)
def test_stride(name, spatial, options, randomise):
    """Every second output of the layer without a stride, whose keys are all pixels; equivariant for every element."""
    layer = made(name, len(spatial), randomise, stride=2, context_channels=None, **options)
    every = made(name, len(spatial), randomise, context_channels=None, **options)
    with pytest.raises(ValueError, match="stride"):
        every.load_state_dict(layer.state_dict())
    every.load_state_dict({n: x for n, x in layer.state_dict().items() if not n.endswith("_extra_state")}, strict=False)
    x, mask = image(layer.group, spatial, name != "lifting"), torch.rand(2, *spatial) < 0.7
    second = (..., *[slice(None, None, 2)] * len(spatial))
    for given in (None, mask):
        torch.testing.assert_close(layer(x, given), every(x, given)[second], rtol=0, atol=1e-12)
    assert torch.equal(layer.mask_after(mask), mask[second])
    assert equivariance_error(layer, layer.group, x) <= 1e-10
    larger, valid = F.pad(x, [0, 2] * len(spatial), value=torch.nan), F.pad(mask, [0, 2] * len(spatial))
    padded = layer(larger, valid)[(..., *(slice(n // 2 + 1) for n in spatial))]
    torch.testing.assert_close(padded, layer(x, mask), rtol=0, atol=1e-12)


def test_even_sides_by_a_pool_and_a_context(randomise):
    """Queries are pooled pixels. This is the stride for even sides; every second pixel would not be symmetric."""
    layer = randomise(LAYERS["frame"](D4)).double()
    x = image(D4, (4, 6), True)
    assert equivariance_error(lambda x: layer(F.max_pool3d(x, (1, 2, 2)), context=x), D4, x) <= 1e-10
    assert equivariance_error(lambda x: layer(x)[..., ::2, ::2], D4, x, elements=[1]) > 1e-2


def given(*queries, keys=None, **options):
    layer = LAYERS[options.pop("name", "frame")](D2, **options)
    context = {} if keys is None else {"context": torch.zeros(1, 3, 4, *keys)}
    return lambda: layer(torch.zeros(1, 3, 4, *queries), **context)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("stride must be 1 or 2, got 3", lambda: given(3, 3, stride=3)),
        ("stride must be 1 with context_channels, got 2", lambda: given(3, 3, stride=2, context_channels=5)),
        ("stride must be an integer, got True", lambda: given(3, 3, stride=True)),
        ("stride must be 1 with kernel_size=None or padding_mode=", lambda: given(3, 3, stride=2, **CIRCULAR)),
        ("stride must be 1 with kernel_size=None", lambda: given(3, 3, stride=2, kernel_size=None)),
        (r"input sides must be odd with stride=2, got \(3, 4\): .*pool even sides by 2", given(3, 4, stride=2)),
        ("stride must be 1 with a context, got 2", given(3, 3, stride=2, keys=(3, 3))),
        ("attention must have stride=1 in a block", lambda: block(D2, stride=2)),
        *((r"context must have the batch and the pixels .* 2 n or 2 n - 1", given(3, 4, keys=keys, **options))
          for keys, options in (
              ((7, 9), {}), ((5, 8), {}), ((6, 4), {}), ((2, 3), {}), ((6, 8), CIRCULAR), ((6, 8), {"name": "global"}),
              ((6, 8), {"kernel_size": None}))),
        ("context must have the batch and the pixels", given(3, 5, keys=(2, 3), kernel_size=1)),
        ("context must have the batch and the pixels", given(3, 5, keys=(2, 3), kernel_size=(1, 3))),
    ],
)  # fmt: skip
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
