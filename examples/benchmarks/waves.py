"""Time and memory of Ewald attention: small clouds with energies and forces, and one large graph by each way.

Features are 32x0e+16x1o, 8 kernels, lmax 1, density 1, width 1, one thread; times are of the processor, medians of
rounds in turn. Beside large crystals: one charge's sum by torch-pme's particle mesh, where that is installed (pip
install torch-pme), of the same smearing at half of it between grid points.

    python -W ignore examples/benchmarks/waves.py                             # a few minutes
    python -W ignore examples/benchmarks/waves.py --sizes 100000 --gradients  # a quarter of an hour
"""

from __future__ import annotations

import argparse

import torch
from e3nn import o3
from measure import GIB, medians, resident
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

IRREPS = o3.Irreps("32x0e+16x1o")
CLOUDS, POINTS = 32, 20


def energy(layer: IrrepsEwaldAttention, x: torch.Tensor, pos: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    return layer(x, pos, **more).square().sum()


def small_clouds(repeats: int) -> list[str]:
    """A pass, a step on energies, a step on energies and forces, of 32 clouds of 20 points."""
    layer = IrrepsEwaldAttention(IRREPS, IRREPS, width=1.0)
    x, pos = IRREPS.randn(CLOUDS * POINTS, -1), POINTS ** (1 / 3) * torch.rand(CLOUDS * POINTS, 3)
    batch = torch.arange(CLOUDS).repeat_interleave(POINTS)

    def forward() -> None:
        with torch.no_grad():
            layer(x, pos, batch)

    def energies() -> None:
        energy(layer, x, pos, batch=batch).backward()

    def forces() -> None:
        places = pos.clone().requires_grad_()
        value = energy(layer, x, places, batch=batch)
        (slope,) = torch.autograd.grad(value, places, create_graph=True)
        (value + slope.square().sum()).backward()

    found = medians({"forward": forward, "energies": energies, "forces": forces}, repeats)
    ratio = found["forces"] / found["energies"]
    return [f"| {name} | {1e3 * value:.1f} ms |" for name, value in found.items()] + [
        f"| forces / energies | {ratio:.2f} |"
    ]


def large(size: int, kind: str, method: str, gradients: bool) -> str:
    """One graph; its time for each point, and the peak of the process."""
    layer = IrrepsEwaldAttention(IRREPS, IRREPS, width=1.0, method=method)
    side = size ** (1 / 3)
    x, pos = IRREPS.randn(size, -1), side * torch.rand(size, 3)
    more = {"cell": side * torch.eye(3)} if kind == "crystal" else {}
    pos.requires_grad_(gradients)

    def run() -> None:
        with torch.set_grad_enabled(gradients):
            value = energy(layer, x, pos, **more)
            if gradients:
                value.backward()

    taken = medians({"run": run}, 1, warmups=0)["run"]
    what = "forward+backward" if gradients else "forward"
    return f"| {size:,} | {kind} | {method} | {what} | {1e3 * taken / size:.2f} | {resident('VmHWM') / GIB:.2f} |"


def particle_mesh(size: int) -> str | None:
    """One charge's sum by torch-pme, milliseconds a point."""
    try:
        from torchpme import CoulombPotential, PMECalculator
    except ImportError:
        return None
    side = size ** (1 / 3)
    calculator = PMECalculator(CoulombPotential(smearing=1.0), mesh_spacing=0.5, interpolation_nodes=4)
    none = torch.zeros(0, 2, dtype=torch.long), torch.zeros(0)
    charges, pos = torch.randn(size, 1), side * torch.rand(size, 3)
    taken = medians({"run": lambda: calculator(charges, side * torch.eye(3), pos, *none)}, 3)["run"]
    return f"| {size:,} | crystal | torch-pme, one charge | forward | {1e3 * taken / size:.4f} | - |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1000, 4000, 10000], help="points of the large graphs")
    parser.add_argument("--kinds", nargs="+", default=["crystal", "open"], choices=["crystal", "open"])
    parser.add_argument("--methods", nargs="+", default=["auto", "nufft"], choices=["auto", "direct", "ewald", "nufft"])
    parser.add_argument("--gradients", action="store_true", help="backward, too, by features' weights and positions")
    parser.add_argument("--repeats", type=int, default=7)
    settings = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"| {CLOUDS} clouds of {POINTS} points | |\n| --- | --- |")
    print("\n".join(small_clouds(settings.repeats)), flush=True)
    print("\n| points | graph | method | what | ms a point | peak, GiB |\n| --- | --- | --- | --- | --- | --- |")
    for size in settings.sizes:
        for kind in settings.kinds:
            for method in settings.methods:
                print(large(size, kind, method, settings.gradients), flush=True)
        beside = particle_mesh(size)
        if beside:
            print(beside, flush=True)


if __name__ == "__main__":
    main()
