"""MACE models with long range."""

import pytest
import torch
from mace import modules
from mace_models import batch_of, make_mace, mixed
from tg_equiattn.integrations.mace import add_long_range


@pytest.fixture
def far():
    """A model with long range, of which every parameter counts."""

    def far(gain=0.5, after=(0,), batch=None, attn_kwargs=None, **options):
        torch.manual_seed(3)
        batch = batch_of(*mixed()) if batch is None else batch
        return add_long_range(make_mace(**options), after, batch=batch, gain=gain, **(attn_kwargs or {}))

    return far


@pytest.fixture
def charged(far):
    """A model as mace_run_train builds it, without a residual in its first block, of which every parameter counts."""

    def charged(after=(0,), **options):
        first = modules.interaction_classes["RealAgnosticInteractionBlock"]
        model = far(after=after, first=first, **options)
        with torch.no_grad():
            for name, x in model.named_parameters():
                if "long_range" in name and not name.endswith("gain"):
                    x += 0.2 * torch.randn_like(x)
        return model

    return charged
