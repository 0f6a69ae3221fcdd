"""Time of a step, forward and backward, of Ewald attention in PyG by its settings: 700 nodes of a periodic cube.

Features are 16 channels, density 1 and width 1; times are of the processor, medians of rounds in turn.

    OMP_NUM_THREADS=1 python examples/benchmarks/ewald_settings.py  # half a minute
"""

from __future__ import annotations

import argparse
import functools

import torch
from measure import medians
from tg_equiattn.integrations.pyg import EwaldAttention

NODES, CHANNELS = 700, 16
POTENTIALS = {"num_gaussians": 0, "num_coulomb": 3, "error": 1e-2, "lmax": 0, "out_vectors": 0}
SETTINGS = {
    "defaults": {},
    "`width=1.5`": {"width": 1.5},
    "`width=0.75`": {"width": 0.75},
    "`in_vectors=8`": {"in_vectors": 8},
    "`out_vectors=0, lmax=0`": {"out_vectors": 0, "lmax": 0},
    "`num_coulomb=0`": {"num_coulomb": 0},
    "`error=1e-2`": {"error": 1e-2},
    "`num_gaussians=0, num_coulomb=3, error=1e-2, lmax=0, out_vectors=0`": POTENTIALS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.manual_seed(0)
    side = NODES ** (1 / 3)
    x, pos, cell = torch.randn(NODES, CHANNELS), side * torch.rand(NODES, 3), side * torch.eye(3)
    layers = {name: EwaldAttention(CHANNELS, CHANNELS, **{"width": 1.0, **own}) for name, own in SETTINGS.items()}

    def step(layer: EwaldAttention) -> None:
        vectors = torch.randn(NODES, layer.in_vectors, 3) if layer.in_vectors else None
        layer(x, pos.clone().requires_grad_(), vectors=vectors, cell=cell).square().sum().backward()

    times = medians({name: functools.partial(step, layer) for name, layer in layers.items()}, repeats)
    print("| settings | ms | relative |\n| --- | --- | --- |")
    for name, found in times.items():
        print(f"| {name} | {1000 * found:.0f} | {found / times['defaults']:.2f} |")


if __name__ == "__main__":
    main()
