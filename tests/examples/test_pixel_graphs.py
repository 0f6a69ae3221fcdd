"""The examples on PyG graphs run end to end, and their graphs, shifts and layers are what they say."""

import dataclasses

import pytest
import torch


@pytest.fixture(scope="module")
def mixed():
    import pyg_mixed_model

    return pyg_mixed_model


# Pixel graphs


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("position", ["window", "clipped"])
@pytest.mark.parametrize("periodic", [True, False])
def test_shifts_on_a_torus_change_nothing(study, position, periodic):
    """And at a border they do."""
    settings = dataclasses.replace(study.PRESETS["quick"], positions=(position,), size=12, periodic=periodic)
    model = study.build(1, settings).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    transform = study.PixelGraph(settings.max_distance, periodic=settings.periodic)
    images = torch.nn.functional.pad(torch.rand(5, 1, 12, 8), (2, 2))
    here, there = (
        study.predict(model, study.graphs(study.shifted(images, shift), torch.arange(5), transform))[0]
        for shift in (0, 2)
    )
    change = ((here - there).abs().max() / here.abs().max()).item()
    assert change < 1e-12 if periodic else change > 1e-7


def test_the_full_preset_is_the_papers_model(study):
    full = study.build(1, dataclasses.replace(study.PRESETS["full"], positions=("absolute",)))
    assert sum(p.numel() for p in full.parameters()) == pytest.approx(4.7e6, rel=0.02)  # the paper's Table 1


# The mixed model


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
