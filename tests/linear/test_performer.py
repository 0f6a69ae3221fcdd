"""PerformerAttention and the Relative Performer."""

import pytest
import torch
from performers import EVERY
from space import error

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention, RelativePerformer
from tg_equiattn.testing import TOLERANCE

CHANNELS, OUT, HEADS, M, REACH = 12, 15, 3, 19, 3
EXACT = ("window", "mlp", "distance", "values", "distance values", "None values", "pairs", "clipped")
NAMES = (*EXACT, "sinusoid", "None")
REACHING = ("values", "distance values", "None values", "pairs")  # offsets of all nodes, which a torus has not
GRID = PixelGrid((5, 7), REACH)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def layer_of(name, **options):
    """By random features, where not by pairs."""
    options = {"num_random_features": M, "cutoff": REACH, **EVERY[name], **options}
    return PerformerAttention(CHANNELS, OUT, HEADS, **{"method": "features", **options})


@pytest.fixture
def make(randomise):
    def build(name="window", dtype=torch.float64, **options):
        return randomise(layer_of(name, **options), 0.4).to(dtype).eval()

    return build


def pixels(dtype=torch.float64, batch=2):
    x = torch.randn(batch, len(GRID), CHANNELS, dtype=dtype)
    return x, GRID.pos(x.device, dtype).expand(batch, -1, -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_translation(name, make, dtype, device):
    """Positions moved: exact for the window and strategy 2 whatever is drawn; the others see it, or have none."""
    layer = make(name, dtype).to(device)
    x, pos = (t.to(device) for t in pixels(dtype))
    for tau in ([3, -2], [-100, 41], [0.25, 0.5], [1e6, -1e6]):
        layer.redraw_features()
        expected = layer(x, pos=pos)
        start = pos.double() if tau[0] == 1e6 else pos  # float32 does not hold such positions
        moved = error(layer(x, pos=start + torch.tensor(tau).to(start)), expected)
        if name in (*EXACT, "None"):
            assert moved < TOLERANCE[dtype]
        else:
            assert moved > 1e-3


@pytest.mark.parametrize("shift", [(1, 0), (2, -5)])
def test_rolls_of_a_torus(on_device, name, make, shift):
    layer, (x, _) = make(name), pixels()
    grid = PixelGrid(GRID.shape, REACH, periodic=True)
    if name in REACHING:
        with pytest.raises(ValueError, match="grid must not be periodic with values='offset'"):
            layer(x, grid=grid)
        return

    def roll(t):
        return t.unflatten(1, grid.shape).roll(shift, (1, 2)).flatten(1, 2)

    moved = error(layer(roll(x), grid=grid), roll(layer(x, grid=grid)))
    assert moved < 1e-10 if name in (*EXACT, "None") else moved > 1e-3
    if name in EXACT:  # a border is seen
        assert error(layer(roll(x), grid=GRID), roll(layer(x, grid=GRID))) > 1e-3


def test_grid_positions_and_neighbors_agree(on_device, name, make):
    layer, (x, pos) = make(name), pixels()
    flat, batch = (t.flatten(0, 1) for t in (x, pos)), torch.arange(2).repeat_interleave(len(GRID))
    (nodes, places), expected = flat, layer(x, grid=GRID)
    others = [
        layer(x, pos=pos), layer(x, pos=pos, neighbors=GRID.neighbors(2, on_device)),
        layer(nodes, pos=places, batch=batch), layer(nodes, grid=GRID),
    ]  # fmt: skip
    torch.testing.assert_close([t.view_as(expected) for t in others], [expected] * 4, rtol=0, atol=1e-12)


@pytest.mark.parametrize("grid", [None, GRID])
def test_padding_changes_nothing(on_device, name, make, grid):
    """Masked nodes, NaN in features and positions, reach neither outputs nor gradients."""
    layer, (x, pos) = make(name), pixels()
    mask = torch.ones(2, len(GRID), dtype=torch.bool)
    mask[1, 20:] = False
    expected = layer(x[1:, :20], pos=pos[1:, :20])
    holes = torch.where(mask[..., None], x, torch.nan).requires_grad_()
    place = {"grid": grid} if grid else {"pos": torch.where(mask[..., None], pos, torch.nan)}
    out = layer(holes, mask=mask, **place)
    torch.testing.assert_close(out[1:, :20], expected, rtol=0, atol=1e-12)
    assert out[1, 20:].abs().max() == 0
    torch.testing.assert_close(out[:1], layer(x[:1], pos=pos[:1]), rtol=0, atol=1e-12)
    out.square().sum().backward()
    for parameter in layer.parameters():
        assert parameter.grad.isfinite().all()
    assert holes.grad[1, 20:].nan_to_num(0).abs().max() == 0
    if layer.far_offsets is not None:
        vectors = layer(holes, mask=mask, return_vectors=True, **place)[1]
        assert vectors[1, 20:].abs().max() == 0
        torch.testing.assert_close(vectors[:1], layer(x[:1], pos=pos[:1], return_vectors=True)[1], rtol=0, atol=1e-12)
    if name == "None values" and on_device == "cpu":  # where values are read; of batch mates too
        with pytest.raises(ValueError, match="pos must be finite"):
            layer(x, pos=torch.cat([pos[:1], torch.full_like(pos[:1], torch.nan)]))


@pytest.mark.parametrize(("position", "millions"), [(None, 4.7), ("sinusoid", 4.7), ("clipped", 4.5), ("window", 4.7)])
def test_the_paper_counts_the_same_parameters(position, millions):
    """relative-performer Table 1."""
    model = RelativePerformer(1, 10, position=position)
    biases = sum(block.attention.key_bias.weight.numel() for block in model.blocks)  # ours, not the paper's
    assert round((sum(p.numel() for p in model.parameters()) - biases) / 1e6, 1) == millions


def test_pairs_are_suggested_once_for_small_graphs():
    x, pos = torch.randn(1, 30, 6), torch.randn(1, 30, 2)
    layer = PerformerAttention(6, 6, 2, offset="mlp", cutoff=1.0, num_random_features=15)
    with pytest.warns(UserWarning, match="method='pairs' is exact and faster for graphs of up to 30 nodes, and the"):
        layer(x, pos=pos)
    layer(x, pos=pos)  # warnings are errors in these tests
    for other in ({"num_random_features": 14}, {"method": "features"}, {"method": "pairs"}):
        PerformerAttention(6, 6, 2, **{"offset": "mlp", "cutoff": 1.0, "num_random_features": 15, **other})(x, pos=pos)
