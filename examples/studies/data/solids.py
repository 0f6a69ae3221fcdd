"""Volumes of eight kinds of shapes in boxes of voxels, two of them the mirror images of two others.

Three are solids: ellipsoids, boxes and cones. Five are tubes around a curve: the torus, and a knot (the trefoil)
and a coil, each right- and left-handed. Proportions, size and place are random. Shapes stand upright, along z, with a
small random tilt and twist. A voxel is the smooth occupancy at its middle, computed from the (approximate) signed
distance to the surface, so that a shape can be had at any rotation with nothing interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation
from torch import Tensor

Distance = Callable[[NDArray], NDArray]  # points (N, 3) in [-1, 1] to signed distances (N,), negative inside
SIZE, SHIFT = (0.85, 1.0), 0.06  # factor, and the largest move along each axis; the box's half side is 1
TILT = 25  # degrees, of the rotation vector's coordinates at most
SOFTNESS = 0.3  # voxels, of the surface
STEPS = 120  # points of a curve


def middles(size: int) -> NDArray:
    """Middles of voxels (size^3, 3) in x, y, z; volumes have the axes z, -y, x."""
    line = (2 * np.arange(size) + 1 - size) / size
    z, y, x = np.meshgrid(line, -line, line, indexing="ij")
    return np.stack([x, y, z], -1).reshape(-1, 3)


def ellipsoid(draw: Generator) -> Distance:
    axes = draw.uniform(0.5, 0.7, 3)
    return lambda p: (np.linalg.norm(p / axes, axis=1) - 1) * axes.min()


def box(draw: Generator) -> Distance:
    sides = draw.uniform(0.38, 0.55, 3)
    return lambda p: outside(np.abs(p) - sides)


def cone(draw: Generator) -> Distance:
    radius, height = draw.uniform(0.55, 0.7), draw.uniform(0.5, 0.7)
    slope = np.array([2 * height, radius]) / math.hypot(2 * height, radius)

    def distance(p: NDArray) -> NDArray:
        from_apex = np.stack([np.linalg.norm(p[:, :2], axis=1), p[:, 2] - height], 1)
        return outside(np.stack([from_apex @ slope, -height - p[:, 2]], 1))

    return distance


def outside(excess: NDArray) -> NDArray:
    """Distance by how far (N, n) a point is beyond each face, exact for faces at right angles."""
    return np.linalg.norm(excess.clip(min=0), axis=1) + excess.max(1).clip(max=0)


def torus(draw: Generator) -> Distance:
    t = np.linspace(0, 2 * math.pi, STEPS)
    return tube(draw.uniform(0.45, 0.6) * np.stack([np.cos(t), np.sin(t), 0 * t], 1), draw.uniform(0.13, 0.22))


def knot(draw: Generator) -> Distance:
    width = draw.uniform(0.22, 0.26)
    return tube(trefoil(width, width * draw.uniform(1.2, 1.6)), draw.uniform(0.1, 0.14))


def coil(draw: Generator) -> Distance:
    turns, start = draw.uniform(1.4, 1.8), draw.uniform(0, 2 * math.pi)
    return tube(helix(draw.uniform(0.36, 0.5), draw.uniform(0.55, 0.66), turns, start), draw.uniform(0.1, 0.14))


def trefoil(width: float, height: float) -> NDArray:
    """Points (STEPS, 3) of a right-handed knot, that of three crossings: on a torus of radii 2 and 1 times width."""
    t = np.linspace(0, 2 * math.pi, STEPS)
    out = width * (2 + np.cos(3 * t))
    return np.stack([out * np.cos(2 * t), out * np.sin(2 * t), -height * np.sin(3 * t)], 1)


def helix(radius: float, height: float, turns: float, start: float) -> NDArray:
    """Points (STEPS, 3) of a right-handed screw about z, from -height to height."""
    t = np.linspace(-1, 1, STEPS)
    angle = math.pi * turns * t + start
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height * t], 1)


def tube(curve: NDArray, radius: float) -> Distance:
    return lambda p: np.sqrt(np.square(p[:, None] - curve).sum(-1).min(1)) - radius


def mirrored(shape: Callable[[Generator], Distance]) -> Callable[[Generator], Distance]:
    """The same with x reversed."""

    def maker(draw: Generator) -> Distance:
        distance = shape(draw)
        return lambda p: distance(p * [-1, 1, 1])

    return maker


SHAPES: dict[str, Callable[[Generator], Distance]] = {
    "ellipsoid": ellipsoid, "box": box, "cone": cone, "torus": torus, "right knot": knot,
    "left knot": mirrored(knot), "right coil": coil, "left coil": mirrored(coil),
}  # fmt: skip
KINDS = tuple(SHAPES)


def placed(shape: Distance, draw: Generator) -> Distance:
    """Of random size, tilt and place."""
    scale, shift = draw.uniform(*SIZE), draw.uniform(-SHIFT, SHIFT, 3)
    tilt = Rotation.from_rotvec(draw.uniform(-TILT, TILT, 3), degrees=True).as_matrix()
    return lambda p: scale * shape((p - shift) @ tilt / scale)  # rows times a matrix: its inverse acts


def shapes(count: int, seed: int) -> tuple[list[Distance], Tensor]:
    """Upright shapes and their classes (count,), as many of each up to one."""
    draw = np.random.default_rng(seed)
    labels = draw.permutation(np.arange(count) % len(SHAPES))
    makers = list(SHAPES.values())
    return [placed(makers[label](draw), draw) for label in labels], torch.from_numpy(labels)


def volumes(shapes: Sequence[Distance], size: int, turns: NDArray | None = None) -> Tensor:
    """Occupancies (N, 1, size, size, size) in [0, 1] of shapes, or of these turned about the middle of the box.

    Args:
        shapes: what is to be seen.
        size: voxels a side.
        turns: orthogonal matrices (N, 3, 3) in x, y, z.
    """
    points, soft = middles(size), SOFTNESS * 2 / size
    turns = np.broadcast_to(np.eye(3), (len(shapes), 3, 3)) if turns is None else turns
    distances = np.stack([shape(points @ turn) for shape, turn in zip(shapes, turns, strict=True)])
    return torch.from_numpy(0.5 * (1 - np.tanh(distances / (2 * soft)))).float().view(-1, 1, size, size, size)
