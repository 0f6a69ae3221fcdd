"""Arguments of the field layers have the names, the order and the defaults of the core's layers."""

import inspect

import pytest
from tg_equiattn.integrations import escnn

from tg_equiattn import nn

OWN = {"self", "in_type", "out_type", "context_type"}
OF_TYPES = {"self", "group", "in_channels", "out_channels", "context_channels", "channels"}
SCALES = {"scale_window"}  # escnn has no group of scales
PAIRS = {
    "LiftingAttention": nn.LiftingAttention, "GroupAttention": nn.GroupAttention,
    "GlobalAttention": nn.GlobalGroupAttention, "AttentionBlock": nn.GroupAttentionBlock,
    "RegularLayerNorm": nn.RegularLayerNorm,
}  # fmt: skip


def settings(kind, without):
    parameters = inspect.signature(kind.__init__).parameters
    return [(name, p.default, p.kind) for name, p in parameters.items() if name not in without]


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_arguments_are_those_of_the_core(dim, name):
    found, wanted = settings(getattr(escnn, f"R{dim}{name}"), OWN), settings(PAIRS[name], OF_TYPES | SCALES)
    assert found == wanted
    assert name == "RegularLayerNorm" or len(wanted) > 3
