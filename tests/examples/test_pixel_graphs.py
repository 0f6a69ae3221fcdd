"""The examples on PyG graphs run end to end, and their graphs, shifts and layers are what they say."""

import dataclasses

import pytest
import torch
from image_writers import write_cifar
from running import rows_of, run_here

TINY = ("--quick", "--no-progress")


@pytest.fixture(scope="module")
def pixels():
    import pixel_graphs

    return pixel_graphs


@pytest.fixture(scope="module")
def mixed():
    import pyg_mixed_model

    return pyg_mixed_model


# Pixel graphs


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("position", ["window", "clipped"])
@pytest.mark.parametrize("periodic", [True, False])
def test_shifts_on_a_torus_change_nothing(pixels, position, periodic):
    """And at a border they do."""
    settings = dataclasses.replace(pixels.PRESETS["quick"], positions=(position,), size=12, periodic=periodic)
    model = pixels.build(1, settings).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    transform = pixels.PixelGraph(settings.max_distance, periodic=settings.periodic)
    images = torch.nn.functional.pad(torch.rand(5, 1, 12, 8), (2, 2))
    here, there = (
        pixels.predict(model, pixels.graphs(pixels.shifted(images, shift), torch.arange(5), transform))[0]
        for shift in (0, 2)
    )
    change = ((here - there).abs().max() / here.abs().max()).item()
    assert change < 1e-12 if periodic else change > 1e-7


def test_accuracies_at_shifts_count(pixels):
    """Against a model that looks at one column: right only where the bright column is shifted to it."""
    settings = dataclasses.replace(pixels.PRESETS["quick"], size=10, shift=2, progress=False)
    images = torch.zeros(5, 1, 10, 10)
    images[:, :, :, 4] = 1

    class Column(torch.nn.Module):
        def forward(self, x, edge_index, batch, pos, edge_offset, batch_size):
            bright = x.view(batch_size, 10, 10)[:, 0, 5]
            return torch.stack([1 - bright, bright], 1)

    found = pixels.accuracies_at_shifts(Column(), images, torch.tensor([1, 1, 1, 0, 1]), settings)
    assert found == {"-2": 20, "-1": 20, "0": 20, "1": 80, "2": 20}


def test_shiftable(pixels):
    images = torch.zeros(4, 1, 6, 7)
    images[1, 0, 3, 1] = images[2, 0, 3, 5] = images[3, 0, 3, 3] = 0.1
    assert pixels.shiftable(images, 2).tolist() == [True, False, False, True]
    assert pixels.shiftable(images, 1).tolist() == [True] * 4
    for shift in (-2, 2):
        assert pixels.shifted(images, shift).nonzero().tolist() == [
            [n, c, h, w + shift] for n, c, h, w in images.nonzero().tolist() if 0 <= w + shift < 7
        ]


def test_the_full_preset_is_the_papers_model(pixels):
    full = pixels.build(1, dataclasses.replace(pixels.PRESETS["full"], positions=("absolute",)))
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(4.7e6, rel=0.02)  # the paper's Table 1


def test_cifar_files(tmp_path):
    """The fifth batch chooses the epoch; random images cannot be shifted."""
    write_cifar(tmp_path, count=2)
    result = run_here("studies/pixel_graphs.py", *TINY, "--data", tmp_path, "--size", 8, "--positions", "none",
                      "--embedding", "lookup", "--output", tmp_path / "out")  # fmt: skip
    assert result.returncode == 0, result.stderr
    (row,) = rows_of(tmp_path / "out", "pixel_graphs")
    assert len(row.more["curve"]) == 1
    assert "shifts" not in row.more
    assert "No test image can be shifted so far" in result.stdout


# The mixed model


def test_pairs_of_digits(mixed):
    images = torch.rand(40, 1, 8, 8)
    draw = [mixed.pairs([images, torch.arange(40)], torch.Generator().manual_seed(seed), 23) for seed in (0, 0, 1)]
    boxes, labels, places = draw[0]
    assert labels.tolist() == list(range(40))
    assert places.amin(0).tolist() == [0, 0]
    assert places.amax(0).tolist() == [23 - 12, 23 - 20]
    lows, starts = set(), set()
    for image, box in zip(images, boxes[:, 0], strict=True):
        low = int(box[:, :8].sum(1).nonzero()[0])
        assert torch.equal(box[low : low + 8, :8], image[0])
        right = box[:, 8:].nonzero()
        (high, start), end = right.amin(0), right.amax(0)
        assert (end - right.amin(0)).tolist() == [7, 7]
        assert (images[:, 0] == box[high : high + 8, 8 + start : 16 + start]).flatten(1).all(1).sum() == 1
        lows.add(low), starts.add(int(start))
    assert lows == set(range(5))
    assert starts == {1, 2, 3, 4}
    assert all(torch.equal(one, same) for one, same in zip(draw[0], draw[1], strict=True))
    assert not torch.equal(draw[0][0], draw[2][0])


def test_a_graph_of_bright_pixels(mixed):
    box = torch.zeros(1, 12, 20)
    for n, (row, column) in enumerate(((1, 1), (2, 2), (2, 4), (11, 19))):
        box[0, row, column] = 0.5 + 0.1 * n
    box[0, 5, 5] = 0.2  # not bright
    data = mixed.graph(box, torch.tensor(3), torch.tensor([10, 20]))
    torch.testing.assert_close(data.x.flatten(), torch.tensor([0.5, 0.6, 0.7, 0.8]))
    assert data.pos.tolist() == [[11, 21], [12, 22], [12, 24], [21, 39]]
    assert data.edge_index.T.tolist() == [[0, 1], [1, 0]]  # those that touch
    assert data.edge_attr.tolist() == [[-1, -1], [1, 1]]  # of the source, seen from the target
    near = {tuple(pair) for pair in data.near_index.T.tolist()}
    assert near == {(i, j) for i in range(3) for j in range(3)} | {(3, 3)}
    other = mixed.graph(box, torch.tensor(3), torch.tensor([10, 20]), "near pairs")
    assert {tuple(pair) for pair in other.edge_index.T.tolist()} == {(i, j) for i, j in near if i != j}
    source, target = other.edge_index
    torch.testing.assert_close(mixed.REACH / 2 * other.edge_attr, other.pos[source] - other.pos[target])


def test_our_layer_is_gps_with_another_attention(mixed):
    """With the built-in attention in place of ours, its sums are GPSConv's."""
    built_in = mixed.BuiltInGPSConv(8, mixed.GINEConv(torch.nn.Linear(8, 8), edge_dim=2), 2)

    class Attention(torch.nn.Module):
        def forward(self, x, near_index, pos, batch):
            return built_in.attn(x[None])[0]

    layer = mixed.RelativeGPSConv(8, built_in.conv, Attention())
    state = {name: value for name, value in built_in.state_dict().items() if not name.startswith("attn.")}
    layer.load_state_dict(state)
    data = mixed.Batch.from_data_list([
        mixed.graph(torch.rand(1, 12, 20), torch.tensor(0), torch.tensor([0, 0]))
    ])  # fmt: skip
    x = torch.randn(data.num_nodes, 8)
    torch.testing.assert_close(layer(x, data), built_in(x, data))


@pytest.mark.parametrize("name", ["local only", "Performer", "Performer + positions", "ours", "ours, near only"])
def test_moving_a_graph(mixed, name):
    """Only absolute positions see it; alone equals in a batch but for the built-in Performer, which counts padding."""
    settings = dataclasses.replace(mixed.PRESETS["quick"], models=(name,), layers=2)
    model = mixed.build(settings).eval()
    torch.nn.init.normal_(model.head.weight)
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(3, 1, 8, 8, generator=generator) * torch.tensor([0.3, 0.6, 1.0]).view(3, 1, 1, 1)
    batch = mixed.pairs([images, torch.arange(3)], generator, 32)
    logits, _ = mixed.predict(model, batch)
    elsewhere, _ = mixed.predict(model, [*batch[:2], batch[2] + 40])
    change = (elsewhere - logits).abs().max() / logits.abs().max()
    assert change > 1e-3 if "positions" in name else change < 1e-5
    alone, _ = mixed.predict(model, [x[:1] for x in batch])
    if "Performer" not in name:
        torch.testing.assert_close(alone, logits[:1], rtol=1e-4, atol=1e-5)
