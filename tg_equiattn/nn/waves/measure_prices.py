"""Measures the prices of the methods of Ewald attention on a device."""

from __future__ import annotations

import time
import warnings
from typing import NamedTuple

import torch

from ...functional.waves.methods import PRICES, Prices, number_of_vectors, time_of_steps
from ...functional.waves.nufft import nufft_available
from .ewald_attention import EwaldAttention


class _Sizes(NamedTuple):
    """Sizes of the measured graphs.

    Attributes:
        direct: nodes of an open graph.
        wide: side of a cell with one node.
        nodes: nodes of another cell.
        side: side of this cell.
    """

    direct: int
    wide: float
    nodes: int
    side: float


_ON_CPU = _Sizes(1500, 26.0, 1500, 13.0)
_ON_ACCELERATOR = _Sizes(8000, 80.0, 30_000, 26.0)  # smaller ones would measure the time of launches


def measure_ewald_prices(device: torch.device | str = "cpu") -> dict[str, float]:
    """Measure how fast a device computes Ewald attention, for ``method="auto"`` and the warnings of this process.

    ``"auto"`` takes the method that needs least time, by prices of its steps. They are those of one core of a CPU and
    of an H100 (a guess for non-uniform transforms on CUDA). Call this function once at the start of a program, with
    the number of threads that it will use, if graphs are large. It takes some seconds.

    Args:
        device: Device to measure, "cpu" by default. The prices are used for all devices of its kind.

    Returns:
        Time of direct sums, of sums over nodes and reciprocal vectors, of work for each reciprocal vector and of
        non-uniform transforms, relative to one core of a CPU.

    Example:
        >>> sorted(measure_ewald_prices())
        ['direct', 'nodes', 'nufft', 'vectors']
    """
    device = torch.device(device)
    sizes = _ON_CPU if device.type == "cpu" else _ON_ACCELERATOR
    found, steps = _run(device, "direct", sizes.direct, 0.0)
    prices = Prices(direct=found / steps.direct)
    found, steps = _run(device, "ewald", 1, sizes.wide)
    prices = prices._replace(vectors=found / steps.vectors)
    for name, method in (("nodes", "ewald"), ("nufft", "nufft")):
        if method == "ewald" or nufft_available(device.type):
            found, steps = _run(device, method, sizes.nodes, sizes.side)
            beside = found - prices.vectors * steps.vectors  # noise, if vectors take nearly all the time
            prices = prices._replace(**{name: max(beside, 0.1 * found) / getattr(steps, name)})
    PRICES[device.type] = prices
    return prices._asdict()


@torch.no_grad()
def _run(device: torch.device, method: str, size: int, side: float) -> tuple[float, Prices]:
    """The measured nanoseconds of a call and the expected ones of its steps, for nodes in a cubic cell of a side, or in
    an open graph if the side is 0."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        layer = EwaldAttention(8, 8, width=1.0, num_gaussians=2, num_coulomb=0, method=method).to(device)
        scalars, vectors = torch.randn(size, 8, device=device), torch.randn(size, 8, 3, device=device)
    pos, cell = 3 * vectors[:, 0], side * torch.eye(3, device=device) if side else None
    interaction = layer.interaction(pos)
    _, count = number_of_vectors(side**3, [], interaction)
    steps = Prices(*time_of_steps(size, count, interaction, (size, 1, 2, 4), 64, 1))

    def call() -> float:
        start = time.perf_counter_ns()
        layer(scalars, vectors, pos=pos, cell=cell)[0].sum().item()
        return time.perf_counter_ns() - start

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the wide cell is measured on purpose
        call()
        return min(call() for _ in range(3)), steps
