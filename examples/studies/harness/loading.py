"""Batches whose order follows from the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_geometric.data import Data

Augment = Callable[[list[Tensor], torch.Generator], list[Tensor]]


class Batches:
    """Batches of ``get(indices)`` for a data set of this length.

    For training (``seed`` given) the order, and what ``augment(batch, generator)`` draws, follow from the seed and the
    epoch alone, so a run that resumes sees what the interrupted one would have; batches are whole, and the rest of an
    epoch's order is left out. Otherwise all examples come, in order, in batches whose sizes differ by one at most.
    """

    def __init__(
        self, get: Callable[[list[int]], Any], length: int, size: int, seed: int | None = None,
        augment: Augment | None = None,
    ) -> None:  # fmt: skip
        if not length:
            raise ValueError("a data set must hold at least one example, got none")
        self.get, self.length, self.size, self.seed, self.augment = get, length, min(size, length), seed, augment
        self.epoch = 0

    def __len__(self) -> int:
        return self.length // self.size if self.seed is not None else -(-self.length // self.size)

    def whole(self) -> Iterator[Any]:
        """The batches of an evaluation."""
        return (self.get(part.tolist()) for part in np.array_split(np.arange(self.length), len(self)))

    def __iter__(self) -> Iterator[Any]:
        if self.seed is None:
            yield from self.whole()
            return
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + self.epoch)
        order = torch.randperm(self.length, generator=generator)
        for indices in order[: len(self) * self.size].split(self.size):
            batch = self.get(indices.tolist())
            yield batch if self.augment is None else self.augment(batch, generator)


class FreshBatches(Batches):
    """Batches of new examples in every epoch: ``draw(length, seed)`` gives their tensors."""

    def __init__(
        self, draw: Callable[[int, int], Sequence[Tensor]], length: int, size: int, seed: int, device: str
    ) -> None:
        super().__init__(list, length, size, seed)
        self.draw, self.device = draw, device

    def __iter__(self) -> Iterator[list[Tensor]]:
        drawn = [x.to(self.device) for x in self.draw(self.length, 1000 * (self.seed + 1) + self.epoch)]
        self.get = lambda indices: [x[indices] for x in drawn]
        yield from super().__iter__()


def parted(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[tuple[Tensor, ...]]:
    """Tensors of several parts of a data set, so many examples each."""
    return list(zip(*(x.split(counts) for x in tensors), strict=True))


def tensor_batches(
    tensors: Sequence[Tensor], size: int, seed: int | None = None, augment: Augment | None = None, device: str = "cpu"
) -> Batches:
    """Batches of tensors that lie on the device: moved there once, and every batch one indexing of each."""
    tensors = [x.to(device) for x in tensors]
    return Batches(lambda indices: [x[indices] for x in tensors], len(tensors[0]), size, seed, augment)


def graph_batches(graphs: list[Data], size: int, device: str, seed: int | None = None) -> Batches:
    """Batches of PyG graphs that are on the device; shuffled in every epoch with a seed."""
    from torch_geometric.data import Batch

    graphs = [graph.to(device) for graph in graphs]
    return Batches(lambda indices: Batch.from_data_list([graphs[n] for n in indices]), len(graphs), size, seed)
