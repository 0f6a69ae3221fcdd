"""Clouds of points on the surfaces of eight kinds of shapes, of random proportions, with noise.

Four are bodies with a skin: ellipsoids, boxes, cylinders, cones. Four are closed tubes around a curve: a ring, a coil
that winds but is not knotted, and two knots, the trefoil and the figure eight. Points lie uniformly by area. Shapes
stand upright, turned at random about their axis, z, and every second one on average is a mirror image, so that no class
is told from another by its handedness. Clouds are centred, and scaled to points at distance 1 from the centre in the
root mean square.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

Mesh = tuple[NDArray, NDArray]  # vertices (V, 3), triangles (F, 3)
STRETCH = 0.65, 1.5  # factors along each axis
TUBE = 0.25, 0.5  # radii of tubes, the curves being on a torus of radii 2 and 1


def clouds(count: int, points: int, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions (count, points, 3), float64, and labels (count,), as many of each class up to one.

    ``noise`` is the standard deviation along each axis, after scaling.
    """
    draw = np.random.default_rng(seed)
    makers = list(SHAPES.values())
    labels = draw.permutation(np.arange(count) % len(makers))
    positions = np.stack([normalised(sample(*makers[label](draw), points, draw), noise, draw) for label in labels])
    return torch.from_numpy(positions), torch.from_numpy(labels)


def sample(vertices: NDArray, triangles: NDArray, count: int, draw: Generator) -> NDArray:
    """Points (count, 3) on triangles, uniform by area."""
    corners = vertices[triangles]  # (F, 3, 3)
    sides = corners[:, 1:] - corners[:, :1]
    area = np.linalg.norm(np.cross(sides[:, 0], sides[:, 1]), axis=1)
    chosen = draw.choice(len(area), count, p=area / area.sum())
    along = draw.random((count, 2))
    along = np.where(along.sum(1, keepdims=True) > 1, 1 - along, along)
    return corners[chosen, 0] + np.einsum("ns,nsd->nd", along, sides[chosen])


def normalised(points: NDArray, noise: float, draw: Generator) -> NDArray:
    """Mirrored or not, turned about z, centred, scaled, with noise."""
    angle = draw.uniform(0, 2 * math.pi)
    cos, sin = math.cos(angle), math.sin(angle)
    points = points * [draw.choice([-1, 1]), 1, 1] @ np.array([[cos, sin, 0], [-sin, cos, 0], [0, 0, 1]])
    points = points - points.mean(0)
    points = points / np.sqrt(np.square(points).sum(1).mean())
    return points + noise * draw.standard_normal(points.shape)


def grid_triangles(rows: int, columns: int, closed: bool) -> NDArray:
    """Of vertices in rows and columns, the last column joined to the first, and rows too where they are closed."""
    row, column = np.meshgrid(np.arange(rows if closed else rows - 1), np.arange(columns), indexing="ij")
    below, right = (row + 1) % rows, (column + 1) % columns
    a, b, c, d = (r * columns + s for r, s in ((row, column), (below, column), (row, right), (below, right)))
    return np.concatenate([np.stack([a, b, c], -1), np.stack([d, c, b], -1)]).reshape(-1, 3)


def revolved(radius: NDArray, height: NDArray, sides: int, draw: Generator) -> Mesh:
    """A profile (m,), revolved about z in so many steps, stretched along the axes."""
    angle = 2 * math.pi * (np.arange(sides) + 0.5) / sides
    ring = np.stack([np.cos(angle), np.sin(angle), np.ones(sides)], -1)
    vertices = np.stack([radius, radius, height], -1)[:, None] * ring * draw.uniform(*STRETCH, 3)
    return vertices.reshape(-1, 3), grid_triangles(len(radius), sides, closed=False)


def tube(around: int, height: int, radial: int, draw: Generator, steps: int = 192, sides: int = 16) -> Mesh:
    """A tube about the closed curve of radius 2 + cos(radial t), angle around * t and height sin(height t)."""
    t = 2 * math.pi * np.arange(steps) / steps
    stretch, radius = draw.uniform(*STRETCH, 3), draw.uniform(*TUBE)
    outward = np.stack([np.cos(around * t), np.sin(around * t), np.zeros(steps)], -1) * stretch
    curve = (2 + np.cos(radial * t))[:, None] * outward + np.sin(height * t)[:, None] * [0, 0, stretch[2]]
    tangent = np.roll(curve, -1, 0) - np.roll(curve, 1, 0)
    across = np.cross(tangent, outward)  # never parallel: the angle always grows
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    normal = np.cross(across, tangent)
    normal /= np.linalg.norm(normal, axis=1, keepdims=True)
    angle = 2 * math.pi * np.arange(sides)[:, None] / sides
    vertices = curve[:, None] + radius * (np.cos(angle) * normal[:, None] + np.sin(angle) * across[:, None])
    return vertices.reshape(-1, 3), grid_triangles(steps, sides, closed=True)


def ellipsoid(draw: Generator) -> Mesh:
    angle = np.linspace(0, math.pi, 33)
    return revolved(np.sin(angle), np.cos(angle), 48, draw)


def box(draw: Generator) -> Mesh:
    return revolved(np.array([0, math.sqrt(2), math.sqrt(2), 0]), np.array([-1, -1, 1, 1]), 4, draw)


def cylinder(draw: Generator) -> Mesh:
    return revolved(np.array([0, 1, 1, 0]), np.array([-1, -1, 1, 1]), 48, draw)


def cone(draw: Generator) -> Mesh:
    return revolved(np.array([0, 1, 0]), np.array([-1, -1, 1]), 48, draw)


def ring(draw: Generator) -> Mesh:
    """Flat, or with waves up and down."""
    return tube(1, draw.choice([0, 2, 3, 4]), 0, draw)


def coil(draw: Generator) -> Mesh:
    """Torus curves that go around one way only once, which leaves them unknotted."""
    around, over = ((1, 2), (1, 3), (2, 1), (3, 1))[draw.integers(4)]
    return tube(around, over, over, draw)


def trefoil(draw: Generator) -> Mesh:
    around, over = ((2, 3), (3, 2))[draw.integers(2)]
    return tube(around, over, over, draw)


def figure_eight(draw: Generator) -> Mesh:
    return tube(3, 4, 2, draw)


SHAPES: dict[str, Callable[[Generator], Mesh]] = {
    "ellipsoid": ellipsoid, "box": box, "cylinder": cylinder, "cone": cone, "ring": ring, "coil": coil,
    "trefoil": trefoil, "figure eight": figure_eight,
}  # fmt: skip
