"""Sets of proteins to train and test on, and batches of their graphs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness.loading import Batches
from harness.settings import SettingsError

from .protein_graphs import Drags, Graph, Pushes, joined
from .proteins import Protein, load, split, synthetic

SPLIT, TEST = 3, 7  # seeds of the split, and of what is pushed in tests


def proteins(data: Path | None, synthetic_count: int, residues: tuple[int, int], larger: int) -> list[list[Protein]]:
    """Proteins to train, validate and test on."""
    if data is not None:
        return split(load(data), SPLIT)
    if not synthetic_count:
        raise SettingsError("--data must be an .npz file of C-alpha traces, or --synthetic a number of random chains")
    kinds = [(*residues, 1), (*residues, 1), (residues[1] + 1, larger, 1), (residues[0], larger // 2, 2)]
    made = [synthetic(synthetic_count // 4, low, high, seed, chains) for seed, (low, high, chains) in enumerate(kinds)]
    gap = residues[0] // 3
    holes = [protein.part(torch.arange(len(protein)) // 3 != gap // 3) for protein in made[1]]
    return split([*made[0], *holes, *made[2], *made[3]], SPLIT, (0.2, 0.5))


def single_chains(found: list[Protein]) -> list[Protein]:
    """Each chain of some proteins by itself."""
    return [protein.part(protein.chain == n) for protein in found for n in protein.chain.unique()]


@functools.cache
def sets(
    data: Path | None, synthetic_count: int, residues: tuple[int, int], larger: int
) -> dict[str, tuple[Protein, ...]]:
    """Chains and proteins of training, validation and of each test.

    Training has whole chains of ``residues``; the largest of the tests have ``larger``.
    """
    training, validation, test = proteins(data, synthetic_count, residues, larger)
    fewest, most = residues

    def chains(found: list[Protein], low: int, high: int, whole: bool = True) -> tuple[Protein, ...]:
        every = single_chains(found)
        return tuple(chain for chain in every if low <= len(chain) <= high and chain.whole == whole)

    def several(found: list[Protein]) -> tuple[Protein, ...]:
        return tuple(p for p in found if p.chain.max() > 0 and 2 * fewest <= len(p) <= larger)

    return {
        "training": chains(training, fewest, most), "validation": chains(validation, fewest, most),
        "chains": chains(test, fewest, most), "larger": chains(test, most + 1, larger),
        "complexes": several(test), "gaps": chains(test, fewest, larger, whole=False),
    }  # fmt: skip


class Drawn(Batches):
    """Batches of graphs of similar size, each of the same proteins in every epoch.

    ``draws`` of each protein are made; what is drawn follows from seed, epoch and number.

    Args:
        draw: makes a graph of a protein's number and a generator.
        sizes: numbers of residues of the proteins.
        size: proteins of a batch.
    """

    def __init__(
        self, draw: Callable[[int, torch.Generator], Graph], sizes: list[int], size: int, device: str,
        seed: int | None = None, draws: int = 1,
    ) -> None:  # fmt: skip
        order = np.tile(np.argsort(sizes, kind="stable"), (draws, 1)).T.flatten()
        groups = np.array_split(np.arange(len(order)), -(-len(order) // size))

        def get(numbers: list[int]) -> Graph:
            start = TEST if seed is None else 1_000_003 * (seed + 1) + 10_007 * self.epoch
            drawn = [n for number in numbers for n in groups[number]]
            graphs = [draw(int(order[n]), torch.Generator().manual_seed(start + 101 * int(n))) for n in drawn]
            return joined(graphs).to(device)

        super().__init__(get, len(groups), 1, seed)


def without_order(graph: Graph) -> Graph:
    """Residues one after the other, as if nothing were missing and all were one chain."""
    sizes = torch.bincount(graph.batch, minlength=graph.count)
    index = torch.arange(len(graph.batch)) - (sizes.cumsum(0) - sizes)[graph.batch]
    return dataclasses.replace(graph, index=index, chain=torch.zeros_like(index))


@functools.cache
def drawing(task: str, proteins: tuple[Protein, ...], neighbors: int) -> Pushes | Drags:
    """The source of a task's graphs and targets, which all models share."""
    return (Drags if task == "drag" else Pushes)(list(proteins), neighbors)
