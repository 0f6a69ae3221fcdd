"""Checkpoints of earlier versions load and give their stored outputs."""

import golden
import pytest
import torch


@pytest.mark.parametrize("name", golden.FAMILIES)
def test_a_stored_checkpoint_gives_its_stored_output(name):
    stored = torch.load(golden.FOLDER / f"{name}.pt", weights_only=True)
    module, *_ = golden.made(name)
    module.load_state_dict(stored["state"])
    out = golden.outputs(module(*stored["input"], **stored["named"]))
    for given, wanted in zip(out, stored["output"], strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", golden.FAMILIES)
def test_other_weights_do_not_give_it(name):
    """A negative control: the stored output depends on the weights."""
    stored = torch.load(golden.FOLDER / f"{name}.pt", weights_only=True)
    module, *_ = golden.made(name)
    out = golden.outputs(module(*stored["input"], **stored["named"]))
    assert any((given - wanted).abs().max() > 1e-3 for given, wanted in zip(out, stored["output"], strict=True))
