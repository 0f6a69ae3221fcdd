"""SE(3)-Hyena with the paper's factor."""

from __future__ import annotations

from torch import nn

from tg_equiattn.chains.se3_hyena import HyenaOperator


def divided_by_length(model: nn.Module) -> nn.Module:
    """The model, its long convolutions divided by the length in the order given too, as published."""
    for part in model.modules():
        if isinstance(part, HyenaOperator):
            part.norm = "forward"
    return model
