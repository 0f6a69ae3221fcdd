"""Canvases of two digits as graphs of pixels, and the study of what sees where they are."""

import dataclasses

import pytest
import torch


@pytest.mark.parametrize("name", ["local only", "Performer", "Performer + positions", "ours", "ours, near only"])
def test_moving_a_graph(study, name):
    """Only absolute positions see it; alone equals in a batch but for the built-in Performer, which counts padding."""
    settings = dataclasses.replace(study.PRESETS["quick"], models=(name,), layers=2)
    model = study.build(settings).eval()
    torch.nn.init.normal_(model.head.weight)
    generator = torch.Generator().manual_seed(2)
    images = torch.rand(3, 1, 8, 8, generator=generator) * torch.tensor([0.3, 0.6, 1.0]).view(3, 1, 1, 1)
    batch = study.pairs([images, torch.arange(3)], generator, 32)
    logits, _ = study.predict(model, batch)
    elsewhere, _ = study.predict(model, [*batch[:2], batch[2] + 40])
    change = (elsewhere - logits).abs().max() / logits.abs().max()
    assert change > 1e-3 if "positions" in name else change < 1e-5
    alone, _ = study.predict(model, [x[:1] for x in batch])
    if "Performer" not in name:
        torch.testing.assert_close(alone, logits[:1], rtol=1e-4, atol=1e-5)
