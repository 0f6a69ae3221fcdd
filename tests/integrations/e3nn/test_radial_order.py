"""Sorting by distance: symmetric clouds, whose points tie."""

import itertools
import math

import pytest
import torch
from e3nn import o3
from space import batch_of
from tg_equiattn.integrations.e3nn import IrrepsSE3HyenaOperator, TensorProductHyenaOperator


def ring(radius, count):
    angle = 2 * math.pi * torch.arange(count) / count
    return radius * torch.stack([angle.cos(), angle.sin(), torch.zeros(count)], 1)


CLOUDS = {
    "rings": lambda: torch.cat([ring(1.0, 5), ring(2.0, 7)]),
    "lattice": lambda: torch.tensor(list(itertools.product((0.0, 1.0, 2.0), repeat=3))),
    "pair": lambda: torch.tensor([(1.0, 0, 0), (-1, 0, 0)]),
    "octahedron": lambda: torch.cat([torch.eye(3), -torch.eye(3)]),
    "equal points": lambda: torch.randn(4, 3).repeat(3, 1),
    "one point": lambda: torch.randn(1, 3),
}
IRREPS = {IrrepsSE3HyenaOperator: "2x0e+3x1o+2x1e", TensorProductHyenaOperator: "2x0e+2x1o+1x2e"}


def features(irreps, count, scalars):
    """Random ones, so that those of tied points differ, but equal invariants."""
    x = o3.Irreps(irreps).randn(count, -1)
    x[:, o3.Irreps(irreps).slices()[0]] = scalars
    return x


@pytest.mark.parametrize("kind", IRREPS)
def test_equivariant_where_points_tie(kind, default_dtype, randomise):
    """One graph in many poses, as one batch: rounding differs from pose to pose, and must not decide the order."""
    module, poses = randomise(kind(IRREPS[kind], IRREPS[kind], order="radial")), 40
    turns = o3.rand_matrix(poses) * (1 - 2 * (torch.arange(poses) % 2))[:, None, None]
    acts = o3.Irreps(IRREPS[kind]).D_from_matrix(turns)
    for make in CLOUDS.values():
        pos = make()
        x = features(IRREPS[kind], len(pos), scalars=0.3)
        wanted = module(x, pos)
        moved = (pos @ turns.mT + torch.randn(poses, 1, 3)).flatten(0, 1)
        got = module((x @ acts.mT).flatten(0, 1), moved, batch_of([len(pos)] * poses)).unflatten(0, (poses, -1))
        allowed = 1e3 * torch.finfo(default_dtype).eps * max(1.0, float(wanted.detach().abs().max()))
        torch.testing.assert_close(got, wanted @ acts.mT, rtol=0, atol=allowed)
