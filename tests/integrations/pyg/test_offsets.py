"""Offsets where whole ones are needed, positions far from the origin, and clouds of too many near pairs."""

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
