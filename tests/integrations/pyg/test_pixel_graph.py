"""PixelGraph, and the classifier that runs on its graphs."""

import itertools

import pytest
import torch
from tg_equiattn.integrations.pyg import PixelGraph
from torch_geometric.data import Data

from tg_equiattn.grids import PixelGrid


@pytest.mark.parametrize(("shape", "distance", "periodic"), [((5, 7), 3, True), ((7, 5), 2.5, False)])
def test_edges_are_those_of_the_grid(shape, distance, periodic):
    """Which are all near pairs in tests/graphs/test_neighbors.py."""
    data = PixelGraph(distance, periodic=periodic)(Data(image=torch.rand(3, *shape)))
    edges, offsets = PixelGrid(shape, distance, periodic).edges()
    assert torch.equal(data.edge_index, edges)
    assert ("edge_offset" in data) == ("cell" in data) == periodic
    if periodic:
        assert torch.equal(data.edge_offset, offsets.to(data.edge_offset))
        assert data.cell.tolist() == [[[7.0, 0.0], [0.0, 5.0]]]
    else:
        assert torch.equal(data.pos[edges[0]] - data.pos[edges[1]], offsets.to(data.pos))


@pytest.mark.parametrize(
    ("shape", "distance", "spacing"),
    [((3, 5, 7), 3, 1), ((5, 7), 2.0, (0.5, 1.5)), ((3, 5, 2), 3.1, (2.0, 0.75, 1.25)), ((4, 5), 0.9, 0.3)],
)
def test_volumes_and_unequal_spacing(shape, distance, spacing, make_conv, equal):
    """Voxels at (x, y, z), y up; near by distances in the unit of the spacing; edges and grid agree."""
    transform = PixelGraph(distance, spacing=spacing)
    data = transform(Data(image=torch.rand(12, *shape, dtype=torch.float64)))
    units = (spacing,) * len(shape) if isinstance(spacing, (int, float)) else spacing
    for number, index in enumerate(itertools.product(*map(range, shape))):
        place = [n * unit for n, unit in zip(index, units, strict=True)][::-1]
        place[1] = (shape[-2] - 1 - index[-2]) * units[-2]
        torch.testing.assert_close(data.pos[number], torch.tensor(place, dtype=data.pos.dtype))
    source, target = data.edge_index
    apart = torch.cdist(data.pos.double(), data.pos.double(), p=1)
    assert data.edge_index.shape[1] == int(((apart > 0) & (apart < distance * (1 - 1e-6))).sum())
    offsets = PixelGrid(shape, distance, spacing=spacing).edges()[1].double()
    torch.testing.assert_close(offsets, data.pos[source].double() - data.pos[target], rtol=0, atol=1e-6)
    conv = make_conv(offset="mlp", pos_dim=len(shape), cutoff=float(distance))
    by_edges = conv(data.x, data.edge_index, edge_offset=offsets)
    equal(conv(data.x, neighbors=transform.grid(*shape)), by_edges, 1e-6 if spacing != 1 else 1e-12)
    if spacing != 1:
        table = make_conv(pos_dim=len(shape))
        with pytest.raises(ValueError, match="grid must have spacing 1 where offsets are counted"):
            table(data.x, neighbors=transform.grid(*shape))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int16, torch.bool])
def test_integer_images_give_floats(dtype):
    image = torch.randint(2 if dtype == torch.bool else 127, (3, 5, 7)).to(dtype)
    data = PixelGraph(3)(Data(image=image))
    assert data.x.dtype == torch.get_default_dtype()
    torch.testing.assert_close(data.x * (255 if dtype == torch.uint8 else 1), image.flatten(1).T.float())
