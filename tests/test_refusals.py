"""Shapes and settings that modules and functions refuse beyond what the tables of their own tests hold."""

import pytest
import torch

from tg_equiattn import functional as F
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic, dyadic
from tg_equiattn.nn import (
    EwaldAttention,
    GlobalPooling,
    GroupAttention,
    GroupAttentionBlock,
    LiftingAttention,
    PerformerAttention,
    SE3Hyena,
    SE3HyenaOperator,
)
from tg_equiattn.nn.group.linear import Pointwise
from tg_equiattn.nn.group.pooling import SpatialCrop, SpatialMaxPool
from tg_equiattn.nn.performer.attention import PositionalPerformerAttention
from tg_equiattn.nn.performer.pixel_model import PixelEmbedding
from tg_equiattn.pairs import Pairs, near_pairs
from tg_equiattn.testing import dilation_errors

C4, WINDOW, ONE = cyclic(4), Neighbourhood(2, 3), torch.ones(1, 2, 3, 4, 4)
EDGES = torch.tensor([[1], [0]])
BOX = {"cell": 5 * torch.eye(3)}
FLAT = {"scalars": torch.ones(5, 2), "vectors": torch.ones(5, 2, 3)}


def mapped(method, **box):
    layer = EwaldAttention(2, 2, width=1.0, method=method)
    return torch.vmap(lambda pos: layer(**FLAT, pos=pos, **box))(torch.rand(2, 5, 3))


CASES = [
    ("query must have shape", lambda: F.lifting_attention(*[ONE[0]] * 3, torch.ones(4, 9, 3), neighbourhood=WINDOW)),
    ("rho_space must have shape", lambda: F.lifting_attention(*[ONE] * 3, torch.ones(9, 3), neighbourhood=WINDOW)),
    ("element must be an isometry, one of the first 4, got 4", lambda: dyadic(2, C4).moved(4)),
    ("group must be made by tg_equiattn.groups.dyadic", lambda: dilation_errors(torch.nn.Identity(), C4, ONE)),
    (r"module must give \(B, C, 8, \*spatial\), got shape \(1, 2, 3, 4, 4\)", lambda: dilation_errors(
        torch.nn.Identity(), dyadic(2, C4), ONE)),
    ("group must be a tg_equiattn.groups.FiniteGroup, got int", lambda: GroupAttention(4, 8, 8, heads=1)),
    ("options must be a mapping", lambda: LiftingAttention(C4, 3, 8, heads=1, options="axial")),
    ("attention must be a GroupAttention", lambda: GroupAttentionBlock(LiftingAttention(C4, 3, 3, heads=1))),
    (r"input must have shape \(B, 3, ...\)", lambda: Pointwise(3, 5)(torch.ones(2, 5, 4))),
    ("input must have shape", lambda: GlobalPooling(None)(torch.ones(2, 3))),
    ("input must have shape", lambda: SpatialMaxPool(2)(torch.ones(2, 3, 4, 4))),
    ("input must have shape", lambda: SpatialCrop(1)(torch.ones(1, 1, 1))),
    ("pixel must be 2 whole numbers", lambda: GroupAttention(C4, 3, 3, heads=1).attention_map(
        torch.ones(1, 3, 4, 5, 5), "ab")),
    ("context_channels must be given with norm='batch'", lambda: GroupAttentionBlock(
        GroupAttention(C4, 3, 3, heads=1))(torch.ones(1, 3, 4, 5, 5), context=torch.ones(1, 3, 4, 5, 5))),
    ("kernels must be a number, or of Gaussians", lambda: EwaldAttention(3, 2, width=1.0, kernels=(1, 2, 3, 4))),
    ("max_waves must be a positive", lambda: EwaldAttention(3, 2, width=1.0, max_waves=(1, 0, 1))),
    ("max_width must be at least an octave above width, 2, got 1.5", lambda: EwaldAttention(
        3, 2, width=1.0, max_width=1.5)),
    ("method must be 'auto', 'waves' or 'mesh' for graphs that repeat, got 'pairs'", lambda: EwaldAttention(
        2, 2, width=1.0, method="pairs")(**FLAT, pos=torch.rand(5, 3), **BOX)),
    ("method must not be 'mesh' while a model is traced or mapped over", lambda: mapped("mesh")),
    ("method must be 'auto' or 'waves' with cell, got 'pairs'", lambda: mapped("pairs", **BOX)),
    ("max_waves must be given with cell while a model is traced or mapped over", lambda: mapped("waves", **BOX)),
    ("cell must have a lattice vector wherever pbc is true", lambda: near_pairs(
        torch.randn(3, 3), 1.0, cell=torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1]]), pbc=torch.ones(3).bool())),
    ("edge_index must be on meta as the input is", lambda: Pairs.from_edges(
        EDGES, 3, batch=torch.zeros(3, device="meta"))),
    ("weights must not be negative", lambda: Pairs(EDGES, 3, torch.ones(1, 1), weights=-torch.ones(1))),
    ("edge_attr must be on cpu as edge_index is", lambda: Pairs.from_edges(
        EDGES, 3, edge_dim=1, features=torch.ones(1, 1, device="meta"))),
    ("pos must not be what torch.vmap goes through", lambda: torch.vmap(
        lambda pos: near_pairs(pos, 1.0)[1])(torch.ones(2, 3, 3))),
    ("input must have 3 channels", lambda: PixelEmbedding(3, 5, "mlp")(torch.ones(2, 7, 2))),
    ("input must", lambda: PixelEmbedding(3, 5, "lookup")(torch.full((2, 7, 3), 300))),
    ("pos must be on cpu as the input is, got meta", lambda: PositionalPerformerAttention(
        12, 15, 3, position="sinusoid")(torch.ones(2, 5, 12), pos=torch.ones(2, 5, 2, device="meta"))),
    ("cutoff must be a positive integer", lambda: PerformerAttention(12, 15, 3, cutoff="auto")),
    ("cutoff must be a positive number or 'auto', got 'mean'", lambda: PerformerAttention(
        12, 15, 3, offset="mlp", cutoff="mean")),
    ("pos must be given with order='radial'", lambda: SE3HyenaOperator(2, 2, order="radial")(**FLAT)),
    ("pos must be given with order='radial'", lambda: SE3Hyena(2, 2, order="radial")(**FLAT)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "call"), CASES, ids=range(len(CASES)))
def test_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()
