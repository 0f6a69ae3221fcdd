"""Sorting by distance: symmetric clouds, whose points tie, and what sorting, or not sorting, costs."""

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
IRREPS, WIDE = {IrrepsSE3HyenaOperator: "2x0e+3x1o+2x1e", TensorProductHyenaOperator: "2x0e+2x1o+1x2e"}, "16x0e+8x1o"


def features(irreps, count, scalars=None):
    """Random ones, so that those of tied points differ; invariants equal to these where given."""
    x = o3.Irreps(irreps).randn(count, -1)
    if scalars is not None:
        x[:, o3.Irreps(irreps).slices()[0]] = scalars
    return x


def relative(got, wanted):
    return float((got - wanted).detach().abs().max() / wanted.detach().std())


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


@pytest.mark.parametrize("kind", IRREPS)
def test_outputs_jump_where_points_exchange_radii(kind, double):
    """Two pairs of opposite points, so that the centroid stays, pass through the sphere between them."""
    half = torch.nn.functional.normalize(torch.randn(5, 3), dim=1)
    x = features(WIDE, 10)

    def change(order, step):
        module, out = kind(WIDE, WIDE, order=order), []
        for sign in (-1, 1):
            radii = torch.tensor([0.5, 1 - sign * step, 1 + sign * step, 1.5, 2.0])
            out.append(module(x, torch.cat([half, -half]) * radii.repeat(2)[:, None]))
        return relative(*out)

    assert change("input", 1e-5) < 1e-3
    assert change("radial", 1e-5) > 1e-2
