"""Error of attention by random features in a new layer, for several kinds of features of equal number.

Queries, keys and values of 4 heads are linear maps of 64 channels of unit variance, as in a new layer, of 500 nodes;
and the same with queries and keys twice as long, whose attention is sharper.
The error is the root mean square difference of outputs from exact attention, as a share of how much outputs of nodes
differ, in the mean of some layers and draws. Kinds of features:

FAVOR+                  orthogonal blocks of directions (Choromanski et al. 2021)
simplex                 directions of each block are the corners of a regular simplex (Reid et al. 2023)
variance                importance sampling with one number for the variance (FAVOR++, Likhosherstov et al. 2022), at
                        the value with the smallest error in a new layer
dense exponential       the same with a matrix, the best one for these queries and keys (Likhosherstov et al. 2023)
opposite pairs          the second half of the directions are the negatives of the first
pairs, variance         both
pairs, dense            both, with a matrix
8 channels              pairs and variance, with fewer channels of queries and keys, which is another function
3 channels              the same with a variance of 12: what PerformerAttention starts from

    python examples/benchmarks/feature_errors.py                       # a minute
"""

from __future__ import annotations

import argparse
import math

import torch
from measure import add_arguments, machine, report, table
from torch import Tensor

from tg_equiattn.functional import orthogonal_projection
from tg_equiattn.nn.performer.positions import FeatureVariance

NODES, CHANNELS, HEADS = 500, 64, 4
KINDS = (
    "FAVOR+", "simplex", "variance", "dense exponential", "opposite pairs", "pairs, variance", "pairs, dense",
    "8 channels", "3 channels",
)  # fmt: skip


def directions(kind: str, features: int, dim: int) -> Tensor:
    """Draw (features, dim) directions."""
    if kind == "simplex":
        corners = torch.eye(dim) - 1 / dim
        blocks = [orthogonal_projection(dim, dim) for _ in range(math.ceil(features / dim))]
        drawn = torch.cat([corners @ torch.nn.functional.normalize(block) for block in blocks])[:features]
        return torch.nn.functional.normalize(drawn) * torch.randn(features, dim).norm(dim=1, keepdim=True)
    if "pairs" in kind or "channels" in kind:
        half = orthogonal_projection(features // 2, dim)
        return torch.cat([half, -half])
    return orthogonal_projection(features, dim)


def estimate(query: Tensor, key: Tensor, value: Tensor, w: Tensor, kind: str) -> Tensor:
    """Attention of one head by features of queries and keys (N, d), which are scaled by d to the power -1/4."""
    axes, scales = torch.eye(w.shape[1]), torch.ones(w.shape[1])  # variances along axes
    if "dense" in kind:
        means = query.mean(0), key.mean(0)
        moments = (query.T @ query + key.T @ key) / len(query) + torch.outer(*means) + torch.outer(*means[::-1])
        size, axes = torch.linalg.eigh(moments)
        scales = 1 - (1 - 2 * size - ((2 * size + 1) ** 2 + 8 * size).sqrt()) / 4
    elif kind not in ("FAVOR+", "simplex", "opposite pairs"):
        scales = FeatureVariance(1, w.shape[1])().detach().expand(w.shape[1])
    log_query, log_key = (
        x @ axes @ (scales.sqrt() * w).T + w.square() @ (1 - scales) / 4 - x.square().sum(1, keepdim=True) / 2
        for x in (query, key)
    )
    return (log_query + log_key.logsumexp(0)).softmax(-1) @ (log_key.softmax(0).T @ value)


def error(kind: str, features: int, layers: int, length: float) -> float:
    """The mean over layers of so many draws."""
    found, dim = [], int(kind.split()[0]) if "channels" in kind else CHANNELS // HEADS
    for seed in range(layers):
        torch.manual_seed(seed)
        x, bound = torch.randn(NODES, CHANNELS), CHANNELS**-0.5
        query, key, value = (
            x @ torch.empty(HEADS, CHANNELS, width).uniform_(-bound, bound) for width in (dim, dim, CHANNELS // HEADS)
        )
        query, key = (x * length * dim**-0.25 for x in (query, key))
        exact = (query @ key.mT).softmax(-1) @ value
        w = directions(kind, features, dim)
        out = torch.stack([estimate(*head, w, kind) for head in zip(query, key, value, strict=True)])
        spread = (exact - exact.mean(1, keepdim=True)).square().mean()
        found.append(float(((out - exact).square().mean() / spread).sqrt()))
    return sum(found) / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--layers", type=int, default=16)
    add_arguments(parser, "out/benchmarks/feature_errors.md")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    columns = [(m, length) for length in (1, 2) for m in options.features]
    rows = table(["features", *(f"{m}, %" if length == 1 else f"{m}, sharper, %" for m, length in columns)])
    for kind in KINDS:
        errors = (f"{100 * error(kind, m, options.layers, length):.0f}" for m, length in columns)
        rows.append(f"| {kind} | {' | '.join(errors)} |")
    report(machine(options.device), rows, options.output)


if __name__ == "__main__":
    main()
