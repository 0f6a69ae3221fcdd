"""PixelGraph, and the classifier that runs on its graphs."""

import itertools

import pytest
import torch
from tg_equiattn.integrations.pyg import PixelGraph, PixelGraphClassifier
from torch_geometric.data import Batch, Data

from tg_equiattn.grids import PixelGrid

POSITIONS = ["window", "clipped", "sinusoid", "absolute", None]


@pytest.mark.parametrize(("shape", "distance", "periodic"), [((5, 7), 3, True), ((7, 5), 2.5, False)])
def test_edges_are_those_of_the_grid(shape, distance, periodic):
    """Which are all near pairs in tests/test_neighbors.py."""
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
    [
        ((3, 5, 7), 3, 1),
        ((2, 3, 5), 2.5, 0.5),
        ((5, 7), 2.0, (0.5, 1.5)),
        ((3, 5, 2), 3.1, (2.0, 0.75, 1.25)),
        ((4, 5), 0.9, 0.3),
        ((3, 3, 5), 2.1, 0.7),
        ((3, 5, 5), 6, (1.2, 0.6, 0.6)),
    ],
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


def images(shapes, channels=3):
    return [PixelGraph(3)(Data(image=torch.rand(channels, *s), y=n)) for n, s in enumerate(shapes)]


def double(data):
    return data.apply(lambda t: t.double() if t.is_floating_point() else t)


def arguments(data):
    given = {name: data[name] for name in ("x", "edge_index", "pos", "edge_offset", "cell") if name in data}
    return given if data.batch is None else {**given, "batch": data.batch}


def make_classifier(position="window", **options):
    options |= {"channels": 20, "num_layers": 2, "heads": 5, "cutoff": 3, "attn_kwargs": {"num_random_features": 19}}
    return PixelGraphClassifier(3, 11, position=position, **options)


@pytest.mark.parametrize("position", POSITIONS)
def test_classifier_in_batches_and_on_a_grid(on_device, position, randomise, equal):
    model = randomise(make_classifier(position), 0.4).double().eval()
    data = double(Batch.from_data_list(images([(5, 7), (1, 1), (2, 11), (7, 5)])))
    given = arguments(data)
    out = model(**given)
    assert out.shape == (4, 11)
    equal(model(**{**given, "batch": None, "ptr": data.ptr}), out)
    equal(model(**given, batch_size=4), out)
    order = torch.randperm(len(data.x))
    mixed = {name: given[name][order] for name in ("x", "pos", "batch")}
    equal(model(edge_index=order.argsort()[data.edge_index], **mixed), out)
    for number, graph in enumerate(data.to_data_list()):
        equal(model(**arguments(graph)), out[number : number + 1])
    data = double(Batch.from_data_list(images(3 * [(5, 7)])))
    equal(model(data.x, neighbors=PixelGraph(3).grid(5, 7)), model(**arguments(data)))
    assert float((out[0] - out[3]).abs().max().detach()) > 1e-3


@pytest.mark.parametrize("position", ["window", "clipped", "absolute", None])
def test_classifier_sees_rolls_by_its_position_alone(position, randomise):
    model = randomise(make_classifier(position), 0.4).double().eval()
    image, transform = torch.rand(3, 5, 7).double(), PixelGraph(3, periodic=True)
    first, second = (model(**arguments(double(transform(Data(image=i))))) for i in (image, image.roll((2, 3), (1, 2))))
    difference = float(((first - second).abs().max() / first.abs().max()).detach())
    assert (difference > 1e-6) if position == "absolute" else (difference <= 1e-10)


def test_classifier_has_the_papers_size():
    model = PixelGraphClassifier(1, 10)
    papers = [p for name, p in model.named_parameters() if not name.endswith("key_bias.weight")]
    assert sum(p.numel() for p in papers) == pytest.approx(4.7e6, abs=0.05e6)
    assert len(model.blocks) == 6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.int16, torch.bool])
def test_integer_images_give_floats(dtype):
    image = torch.randint(2 if dtype == torch.bool else 127, (3, 5, 7)).to(dtype)
    data = PixelGraph(3)(Data(image=image))
    assert data.x.dtype == torch.get_default_dtype()
    torch.testing.assert_close(data.x * (255 if dtype == torch.uint8 else 1), image.flatten(1).T.float())
    if dtype == torch.uint8:  # as the lookup of intensities reads them
        model = make_classifier(embedding="lookup").eval()
        levels = image.flatten(1).T
        torch.testing.assert_close(model(**arguments(data)), model(**{**arguments(data), "x": levels}))
