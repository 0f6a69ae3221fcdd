"""The usual classifiers of point clouds, of PyG's layers: PointNet++ and DGCNN, here with neighbors that are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.nn import MLP, EdgeConv, PointNetConv


def edges(neighbors: Tensor, sources: int) -> Tensor:
    """Edges (2, E) from neighbors to their points, of indices (clouds, points, k) among each cloud's sources."""
    clouds, points, k = neighbors.shape
    first = torch.arange(clouds, device=neighbors.device)[:, None, None]
    target = torch.arange(clouds * points, device=neighbors.device).repeat_interleave(k)
    return torch.stack([(neighbors + sources * first).flatten(), target])


def from_mean(positions: Tensor) -> Tensor:
    """The distance of each point (B, N, 3) from the mean of its cloud, (B, N, 1)."""
    return (positions - positions.mean(1, keepdim=True)).norm(dim=-1, keepdim=True)


class PointNet2(nn.Module):
    """PointNet++: two times PointNet around fewer centres, then PointNet of all that are left.

    Centres are the first of a cloud's points.

    Args:
        channels: of the first layer.
        classes: how many.

    Shapes:
        positions (B, N, 3), and for each of the two layers the neighbors (B, centres, k) of its centres, indices
        among the points before -> (B, classes).

    Source: Qi et al., arXiv 1706.02413, with single-scale grouping, and widths in its proportions.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        c = channels
        perceptrons = [c, c, 2 * c], [2 * c, 2 * c, 4 * c]
        self.layers = nn.ModuleList(
            PointNetConv(MLP([first + 3, *rest], plain_last=False), add_self_loops=False)
            for first, rest in zip((1, 2 * c), perceptrons, strict=True)
        )
        self.last = MLP([4 * c + 3, 4 * c, 8 * c], plain_last=False)
        self.head = MLP([8 * c, 4 * c, classes], norm=None)

    def forward(self, positions: Tensor, neighbors: list[Tensor]) -> Tensor:
        x, clouds = from_mean(positions).flatten(0, 1), len(positions)
        for layer, near in zip(self.layers, neighbors, strict=True):
            centres = positions[:, : near.shape[1]]
            here, there = (p.flatten(0, 1) for p in (positions, centres))
            x = layer((x, None), (here, there), edges(near, positions.shape[1]))
            positions = centres
        x = self.last(torch.cat([x, positions.flatten(0, 1)], 1))
        return self.head(x.unflatten(0, (clouds, -1)).amax(1))


class DGCNN(nn.Module):
    """Dynamic graph CNN: edge convolutions, from the second on between nearest neighbors by features.

    Args:
        channels: of the first layer.
        classes: how many.

    Shapes:
        positions (B, N, 3) and the neighbors (B, N, k) by position -> (B, classes).

    Source: Wang et al., arXiv 1801.07829, as in PyG's example, and widths in its proportions.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        c = channels
        self.first = EdgeConv(MLP([8, c, c, c], plain_last=False), aggr="max")
        self.second = EdgeConv(MLP([2 * c, 2 * c], plain_last=False), aggr="max")
        self.mix = MLP([3 * c, 8 * c], plain_last=False)
        self.head = MLP([8 * c, 4 * c, classes], norm=None)

    def forward(self, positions: Tensor, neighbors: list[Tensor]) -> Tensor:
        (near,), (clouds, points, _) = neighbors, positions.shape
        inputs = torch.cat([positions, from_mean(positions)], -1)
        first = self.first(inputs.flatten(0, 1), edges(near, points))
        with torch.no_grad():
            features = first.unflatten(0, (clouds, points))
            near = torch.cdist(features, features).topk(near.shape[2], largest=False, sorted=False).indices
        second = self.second(first, edges(near, points))
        mixed = self.mix(torch.cat([first, second], 1))
        return self.head(mixed.unflatten(0, (clouds, points)).amax(1))
