"""Group attention by tiles and by its definition: tiles, memory, derivatives; the operator of compiled programs."""

import functools

import pytest
import torch
from attention_operands import RELATIONS, Largest, table_operands

from tg_equiattn.grids import Window
from tg_equiattn.group.definition import windowed_attention_definition
from tg_equiattn.group.dense import dense_attention
from tg_equiattn.group.windowed import windowed_attention
from tg_equiattn.group.windows import flat_operands
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


def derivatives(out, lse, tensors, mask):
    """Outputs where queries are valid, and what a loss has of first and second derivatives."""
    out, lse = (torch.where(mask[:, None, None, None], x, 0.0) for x in (out, lse))
    options = {"allow_unused": True, "materialize_grads": True}  # tables without rows
    first = torch.autograd.grad(out.cos().sum() + lse.cos().sum(), tensors, create_graph=True, **options)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors, **options)
    return [out, lse, *first, *second]


def assert_equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        size = float(b.detach().abs().max()) if b.numel() else 0.0
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * max(1.0, size))


slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CHUNKED = [
    *((relation, (3, 2), 0.3) for relation in ("frame", "ge_vit")),
    *(slow(relation, (3, 2), 0.3) for relation in ("lifting", "relative")),
    slow("ge_vit", (2, 1, 2), 0.0),
    *(
        slow(relation, spatial, dropout)
        for relation in RELATIONS
        for spatial, dropout in (((3, 4), 0.0), ((2, 1, 3), 0.3))
    ),
]


@pytest.mark.parametrize(("relation", "spatial", "dropout"), CHUNKED)
def test_tiles_change_nothing(relation, spatial, dropout):
    """Tiles of images, of heads, of rows and of outputs give what the definition gives."""
    window, mask = Window(len(spatial), (5, 1, 3)[-len(spatial) :]), torch.rand(2, *spatial) < 0.8
    tensors, index = table_operands(relation, window, spatial, channels=2, value_channels=3)
    settings = index, mask, torch.tensor(5), window, dropout
    expected = derivatives(*windowed_attention_definition(*tensors, *settings), tensors, mask)
    whole = 2 * 2 * 3 * 3 * window.count() * torch.Size(spatial).numel()
    for share in (1, 3, 20, whole):
        assert_equal(derivatives(*windowed_attention(*tensors, *settings, 1, whole // share), tensors, mask), expected)


WINDOWS = {"square": {}, "disk": {"shape": "disk"}, "circular": {"shape": "disk", "padding_mode": "circular"}}


@pytest.mark.parametrize("masked", [slow(False), True])
@pytest.mark.parametrize("shape", WINDOWS)
@pytest.mark.parametrize("relation", RELATIONS)
def test_the_definition_of_windows(relation, shape, masked):
    """The definition computes the square around a disk. Pixels between the two have no weight, not even for queries
    whose keys are all masked. Windows may be wider than the image."""
    for spatial, side in (((5, 7), (5, 3)), ((2, 5, 3), 3), ((2, 4, 3), (1, 3, 5))):
        window = Window(len(spatial), side, **WINDOWS[shape])
        tensors, index = table_operands(relation, window, spatial, channels=2)
        mask = None
        if masked:
            mask = torch.rand(2, *spatial) < 0.4
            mask[0] = False
            mask[0].flatten()[-1] = True
        settings = index, mask, torch.tensor(11), window, 0.3
        found, expected = (f(*tensors, *settings) for f in (windowed_attention_definition, windowed_attention))
        assert_equal(found, expected)
        shown = torch.ones(2, *spatial, dtype=torch.bool) if mask is None else mask
        assert_equal(derivatives(*found, tensors, shown), derivatives(*expected, tensors, shown))


SIZES = ((3, 4), 1.0), ((3, 4), 30.0), ((2, 2, 3), 1.0)
FACTORS = [slow(shape, *size) for shape in WINDOWS for size in SIZES] + [
    ("disk", (2, 3), 30.0),
    ("square", (1, 2, 3), 1.0),
]


@pytest.mark.parametrize(("shape", "spatial", "size"), FACTORS)
def test_three_factors(shape, spatial, size):
    """Sums over the queries of 8 elements, also of scores as large as 200, where a product of factors underflows."""
    window, mask = Window(len(spatial), 3, **WINDOWS[shape]), torch.rand(2, *spatial) < 0.7
    mask[0] = False
    mask[0].flatten()[-1] = True
    tensors, index = table_operands("ge_vit", window, spatial, elements=8, channels=2, value_channels=2)
    with torch.no_grad():
        tensors[0] *= size
    settings = index, mask, None, window, 0.0
    expected = derivatives(*windowed_attention_definition(*tensors, *settings), tensors, mask)
    for chunk in (-1, 2000):
        assert_equal(derivatives(*windowed_attention(*tensors, *settings, 1, chunk), tensors, mask), expected)


@pytest.mark.parametrize("relation", [*map(slow, RELATIONS[:-1]), "ge_vit"])
def test_derivatives_of_the_operator(relation):
    """Of first and second order, as those of tiles."""
    mask = torch.rand(2, 3, 4) < 0.8
    tensors, index = table_operands(relation, Window(2, 3), (3, 4))
    operands = flat_operands(*tensors, index, mask, torch.tensor(5), Window(2, 3))
    out, lse = torch.ops.tg_equiattn.group_attention(*operands, 0.3, 200)
    out, lse = (x.unflatten(-1, (3, 6))[..., :4] for x in (out, lse))
    found = windowed_attention(*tensors, index, mask, torch.tensor(5), Window(2, 3), 0.3, 1, 200)
    expected = derivatives(*found, tensors, mask)
    assert_equal(derivatives(out, lse, tensors, mask), expected)


@pytest.mark.parametrize("relation", ["frame", "relative", "ge_vit"])
def test_no_tensor_holds_all_scores(relation):
    """Nor |H|^2 D N of them, which are factors of the sums over t."""
    window = Window(2, 5)
    tensors, index = table_operands(relation, window, (24, 24), 8, 3, 3, 2)
    tensors = [x.detach().float().requires_grad_() for x in tensors]
    with Largest() as largest:
        out, lse = windowed_attention(*tensors, index, None, None, window, 0.0, chunk=1 << 19)
        (out.sum() + lse.sum()).backward()
    power = {"frame": 1, "relative": 2}.get(relation, 3)
    scores = 2 * 3 * 8**power * window.count() * 24 * 24
    assert largest.count < scores / (1 if power == 1 else 8)


@pytest.mark.parametrize("index", [None, "relative", "ge_vit"])
def test_dense_chunks_change_nothing(index):
    """Over all pixels, of images, heads and query pixels; gradients too."""
    relation, spatial = index or "frame", (2, 3)
    (query, key, value, *_), index = table_operands(relation, Window(2, 3), spatial)
    shapes = (3, 15, 3), (2, 3, 15), (2, 0 if index is None else 3, 4)
    tables = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    tensors = [x for x in (query, key, value, *tables) if x.numel()]
    mask, found = torch.rand(2, 6) < 0.8, []
    operands = query, key.flatten(4), value.flatten(4), *tables, index, mask, torch.tensor(5)
    for chunk in (1 << 22, 150, 1):
        for dropout in (0.0, 0.3):
            out = dense_attention(*operands, dropout, chunk)
            found.append((dropout, [out, *torch.autograd.grad(out.square().sum(), tensors)]))
    for dropout, x in found[2:]:
        assert_equal(x, found[dropout > 0][1])


@pytest.mark.parametrize(("side", "recorded", "operators"), [slow(16, True, 0), slow(64, False, 0), (64, True, 1)])
def test_scores_of_a_backward_pass_fit_in_memory(side, recorded, operators):
    """On accelerators compilers get the definition, but where its backward would keep tens of GiB of scores."""
    layer = GroupAttention(cyclic(8), 32, 32, heads=8, kernel_size=5, relation="relative").to("meta")
    names = []

    def backend(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    with torch.set_grad_enabled(recorded):
        torch.compile(layer, backend=backend, fullgraph=True)(torch.empty(32, 32, 8, side, side, device="meta"))
    assert names.count("tg_equiattn.group_attention.default") == operators
