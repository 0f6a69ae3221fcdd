"""Euclidean attention written twice as plainly as it can be, and random operands: by the published formula, with nodes
turned by matrices, and as a double sum of closed forms."""

import math

import torch


def harmonics(u):
    """Of unit vectors (..., 3), degrees 0 to 2, as lists of components; the mean of each square is 1."""
    x, y, z = u.unbind(-1)
    root = math.sqrt(15)
    second = [root * x * z, root * x * y, math.sqrt(5) * (y * y - (x * x + z * z) / 2), root * y * z]
    return [[torch.ones_like(x)], [math.sqrt(3) * c for c in (x, y, z)], [*second, root * (z * z - x * x) / 2]]


def bessel(z):
    """Of positive numbers, degrees 0 to 2."""
    return [
        z.sin() / z, z.sin() / z**2 - z.cos() / z, (3 / z**2 - 1) * z.sin() / z - 3 * z.cos() / z**2,
    ]  # fmt: skip


def double_sum(query, key, value, pos, frequencies, lmax):
    """One cloud: (N, heads, F, 2, K), (N, heads, V), (N, 3), (heads, F), to (N, heads, V, (lmax + 1)^2)."""
    nodes, heads, count, _, width = query.shape
    out = [[0] * nodes for _ in range(heads)]
    for h in range(heads):
        for i in range(nodes):
            for j in range(nodes):
                apart = pos[i] - pos[j]
                radius = apart.norm()
                parts = []
                for degree in range(lmax + 1):
                    (q1, q2), (k1, k2) = query[i, h].unbind(1), key[j, h].unbind(1)
                    score = (q1 * k1 + q2 * k2).sum(1) if degree % 2 == 0 else (q1 * k2 - q2 * k1).sum(1)
                    if i == j:
                        radial, angles = torch.full((count,), float(degree == 0)).to(score), harmonics(pos[0] * 0)
                    else:
                        radial = bessel(frequencies[h] * radius)[degree]
                        angles = harmonics(apart / radius)
                    sign = -1 if degree == 2 else 1
                    parts += [sign * (score * radial).sum() * y for y in angles[degree]]
                out[h][i] = out[h][i] + value[j, h][:, None] * torch.stack(parts)
    return torch.stack([torch.stack(rows) for rows in out], 1) / math.sqrt(count * 2 * width)


def published(query, key, value, pos, frequencies, directions, weights, lmax):
    """The same through a rule of the whole sphere: every direction turns queries and keys by its own matrix."""
    out = 0
    for u, w in zip(directions, weights, strict=True):
        angle = (pos @ u)[:, None, None] * frequencies  # N, heads, F
        c, s = angle.cos(), angle.sin()
        turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)
        q, k = turn @ query, turn @ key
        y = torch.stack([c for degree in harmonics(u)[: lmax + 1] for c in degree])
        table = torch.einsum("nhfpk,nhv,l->hfpkvl", k, value, y)
        out = out + w * torch.einsum("nhfpk,hfpkvl->nhvl", q, table)
    return out / math.sqrt(query[0, 0].numel())


def product_rule(degree):
    """Another rule for means over the sphere: Gauss-Legendre in height, evenly spaced angles."""
    n = degree // 2 + 1
    place = torch.arange(1, n, dtype=torch.float64)
    matrix = torch.diag(place / (4 * place**2 - 1).sqrt(), 1)
    height, vectors = torch.linalg.eigh(matrix + matrix.T)
    angle = 2 * math.pi * torch.arange(degree + 1, dtype=torch.float64) / (degree + 1)
    ring = (1 - height**2).sqrt()[:, None]
    grid = torch.stack([ring * angle.cos(), ring * angle.sin(), height[:, None].expand(n, degree + 1)], -1)
    weights = (vectors[0] ** 2)[:, None].expand(n, degree + 1) / (degree + 1)
    return grid.flatten(0, 1), weights.flatten()


def cloud(nodes, width=2.0):
    """Points no farther apart than ``width``."""
    direction = torch.nn.functional.normalize(torch.randn(nodes, 3, dtype=torch.float64), dim=-1)
    return direction * torch.rand(nodes, 1, dtype=torch.float64) ** (1 / 3) * width / 2


def operands(nodes, heads=2, frequencies=3, components=2, values=5, width=2.0):
    """query, key, value, pos and frequencies up to pi / width of one cloud."""
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    score = nodes, heads, frequencies, 2, components
    highest = torch.pi / width
    return (
        draw(*score),
        draw(*score),
        draw(nodes, heads, values),
        cloud(nodes, width),
        highest * torch.rand(heads, frequencies, dtype=torch.float64),
    )
