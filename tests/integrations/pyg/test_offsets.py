"""Offsets: whole ones where they are needed, far from the origin, smooth where a pair comes near, given twice."""

import copy

import pytest
import torch

LATTICE = torch.cartesian_prod(torch.arange(5), torch.arange(7))


@pytest.fixture(params=["window", "clipped"])
def whole_conv(request, make_conv):
    return make_conv(request.param)


def pairs_below(distance):
    apart = (LATTICE[:, None] - LATTICE).abs().sum(-1)
    return ((apart > 0) & (apart < distance)).nonzero().T


def ways(conv, x, pos):
    """Calls that have offsets of positions: found, along edges, and given for edges."""
    edges = pairs_below(3)
    return {
        "found": lambda: conv(x, pos=pos),
        "edges": lambda: conv(x, edges, pos=pos),
        "edge_offset": lambda: conv(x, edges, pos=pos, edge_offset=pos[edges[0]] - pos[edges[1]]),
    }


@pytest.mark.parametrize("scale", [0.5, 1 / 7, 1.01])
def test_fractional_offsets_are_refused(scale, whole_conv):
    """Rounded they would be those of other positions: of positions in [0, 1] all would be zero."""
    for call in ways(whole_conv, torch.randn(35, 12, dtype=torch.float64), LATTICE.double() * scale).values():
        with pytest.raises(ValueError, match=r"whole numbers.*scale pos to the unit of its grid; for points"):
            call()


SINGLE, DOUBLE = torch.float32, torch.float64
SHIFTS = (3.7, SINGLE), (3.7, DOUBLE), (1e5 / 3, SINGLE), (-1e6 / 7, DOUBLE), (5e6, SINGLE), (1e9 / 3, DOUBLE)


@pytest.mark.parametrize(("shift", "dtype"), SHIFTS)
def test_shifted_lattices_stay_lattices(shift, dtype, whole_conv, equal):
    x = torch.randn(35, 12, dtype=torch.float64)
    expected = whole_conv(x, pos=LATTICE)
    for call in ways(whole_conv, x, (LATTICE.double() + shift).to(dtype)).values():
        equal(call(), expected)


@pytest.mark.parametrize("offset", ["mlp", "distance"])
def test_float32_refuses_metres_of_a_map(offset, make_conv):
    """In float64 they are taken, with features in float32."""
    conv, x = make_conv(offset=offset, cutoff=2.0, method="pairs").float(), torch.randn(35, 12)
    pos = LATTICE + torch.tensor([4.5e5, 5.4e6], dtype=torch.float64) + 0.1 * torch.rand(35, 2)
    for edges in (pairs_below(2), None):
        assert conv(x, edges, torch.zeros(35).long(), pos=pos).isfinite().all()
        with pytest.raises(ValueError, match="pos must be float64 so far from the origin"):
            conv(x, edges, torch.zeros(35).long(), pos=pos.float())


def test_float32_refuses_positions_that_it_does_not_hold(whole_conv):
    pos = (LATTICE.double() + 1e9 / 3).float()
    for way in ("found", "edges"):
        with pytest.raises(ValueError, match="pos must be float64 so far from the origin"):
            ways(whole_conv, torch.randn(35, 12, dtype=torch.float64), pos)[way]()


REACH = 1.7


@pytest.mark.filterwarnings("ignore:offset='distance' leaves out")
@pytest.mark.parametrize(("offset", "values"), [("distance", "content"), ("distance", "offset"), ("mlp", "content")])
def test_distances_are_smooth_where_a_pair_comes_near(offset, values, make_conv):
    """With derivatives; an MLP of the offset jumps. Means of far offsets change by as little as the step."""
    conv = make_conv(pos_dim=3, cutoff=REACH, offset=offset, values=values)
    x = torch.randn(3, 12, dtype=torch.float64)
    places = torch.tensor([[0.0, 0, 0], [0.5, 0, 0], [0, 0, 0]], dtype=torch.float64)
    along = torch.tensor([0.0, 0, 1], dtype=torch.float64)

    def at(distance):
        pos = places.clone()
        pos[2] = distance * along
        pos.requires_grad_()
        out = conv(x, pos=pos)
        return out.detach(), torch.autograd.grad(out.square().sum(), pos)[0]

    step, limit = (1e-7, 1e-5) if values == "offset" else (1e-3, 1e-9)
    outs = [at(REACH + move) for move in (-step, step)]
    jump = max(float((a - b).abs().max()) for a, b in zip(*outs, strict=True))
    assert jump < limit if offset == "distance" else jump > 1e-3


def test_pairs_given_twice(make_conv):
    """In float32 as in float64, whatever their biases."""
    x, pos = torch.randn(4, 12, dtype=torch.float64), torch.rand(4, 2, dtype=torch.float64)
    edges = torch.tensor([[0, 1, 2, 0, 3], [1, 0, 1, 1, 2]])
    conv = make_conv(method="pairs", edge_dim=1, values="offset", offset="mlp")
    torch.nn.init.ones_(conv.attention.positions.edge_bias.weight)
    in_single = copy.deepcopy(conv).float()
    for size in (1.0, 300.0, -300.0):
        bonds = size * torch.tensor([[0.5], [1.0], [0.9], [0.2], [1.0]], dtype=torch.float64)
        assert conv.neighbors(edges, None, bonds, pos, num_nodes=4).repeats
        assert not conv.neighbors(edges[:, 1:], None, bonds[1:], pos, num_nodes=4).repeats
        single = in_single(x.float(), edges, None, bonds.float(), pos.float())
        torch.testing.assert_close(single.double(), conv(x, edges, None, bonds, pos), rtol=1e-3, atol=1e-3)
