"""A class of the core and its PyG class have the same arguments with the same defaults."""

import inspect

import pytest
from tg_equiattn.integrations.pyg import PixelGraph, RelativePerformerConv

from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention

CLASSES = {
    "attention": (PerformerAttention, RelativePerformerConv, {"kwargs"}),  # those of MessagePassing
    "grid": (PixelGrid, PixelGraph, {"shape"}),  # of each image
}


@pytest.mark.parametrize("name", CLASSES)
def test_names_and_defaults(name):
    core, host, only_one = CLASSES[name]
    given = [inspect.signature(kind).parameters.values() for kind in (core, host)]
    found = [{p.name: p.default for p in parameters if p.name not in only_one} for parameters in given]
    assert found[0] == found[1]
    assert list(found[0]) == list(found[1])
    for p in given[1]:
        if p.kind is not p.VAR_KEYWORD and p.name not in (
            "in_channels",
            "out_channels",
            "num_classes",
            "heads",
            "cutoff",
        ):
            assert p.kind is p.KEYWORD_ONLY, p.name
