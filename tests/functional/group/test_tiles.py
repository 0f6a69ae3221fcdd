"""Windows of tiles: what is gathered, and that gradients go back to where it came from."""

import pytest
import torch

from tg_equiattn.functional.group.tiles import LocalTiling


@pytest.mark.parametrize(
    ("spatial", "kernel_size", "selection"),
    [
        ((5,), 3, ()),
        ((8, 7), 5, ()),
        ((5, 7), 3, (1, 3, 4, 5, 7)),
        ((4, 5, 6), 3, ()),
        ((4, 5, 6), 3, (4, 10, 12, 13, 14, 16, 22)),
    ],
)
def test_windows_and_their_gradients(spatial, kernel_size, selection, device):
    """With gradients, by slices, and without, by views and sums axis after axis. The last tile has fewer rows."""
    reference = torch.zeros((), device=device, dtype=torch.float64)
    lanes, rows = 2, 3
    width = lanes * rows * (torch.Size(spatial[1:]).numel())
    tiles = LocalTiling(spatial, kernel_size, selection, lanes, width, reference)
    assert [tile.stop - tile.start for tile in tiles][-1] < rows
    padded = torch.randn(2, 3, *[n + kernel_size - 1 for n in spatial], lanes, device=device, dtype=torch.float64)
    padded.requires_grad_()
    for tile in tiles:
        expected = tiles.gather(tiles.slab(padded, tile), tile)
        update = torch.randn_like(expected)
        (wanted,) = torch.autograd.grad(expected, padded, update)
        with torch.no_grad():
            assert torch.equal(tiles.gather(tiles.slab(padded, tile), tile), expected)
            got = torch.zeros_like(padded)
            tiles.scatter_(got, tile, update)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
