"""The examples on PyG graphs run end to end, and their graphs, shifts and layers are what they say."""

import dataclasses

import pytest
import torch


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


def test_the_full_preset_is_the_papers_model(pixels):
    full = pixels.build(1, dataclasses.replace(pixels.PRESETS["full"], positions=("absolute",)))
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(4.7e6, rel=0.02)  # the paper's Table 1


# The mixed model


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
