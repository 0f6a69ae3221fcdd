"""Errors of models of proteins."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from .protein_sets import Drawn, without_order


@torch.no_grad()
def response_errors(model: nn.Module, found: Drawn, ordered: bool = True) -> list[float]:
    """Squared errors relative to those of zero, beyond 8 and beyond 25 angstroms."""
    beyond = np.zeros((2, 2))
    for graph in found.whole():
        graph = graph.to("cpu")  # where models are after training
        out = model(graph if ordered else without_order(graph))
        squares = torch.stack([(out - graph.target).square().sum(1), graph.target.square().sum(1)]).double()
        for n in range(2):
            beyond[:, n] += squares[:, graph.known[:, n]].sum(1).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        return (beyond[0] / beyond[1]).round(5).tolist()
