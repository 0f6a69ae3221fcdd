"""The base class of graph modules with sums over all atoms of a frame. nequip-package takes this file along, so it
imports little."""

from __future__ import annotations

from typing import Any

import torch
from nequip.data import AtomicDataDict
from nequip.nn import GraphModuleMixin, model_modifier
from torch import Tensor

from tg_equiattn.modes import is_traced


class LongRangeModule(GraphModuleMixin, torch.nn.Module):
    """The base class of modules with sums over all atoms of a frame: what frames are, and along which vectors they
    repeat."""

    max_num_nodes: int | None
    repeats: tuple[bool, ...] | None

    def __init__(self, method: str, max_num_nodes: int | None) -> None:
        super().__init__()
        self.max_num_nodes = max_num_nodes
        self.repeats = (False,) * 3 if method == "direct" else None

    def read_frames(self, data: AtomicDataDict.Type) -> dict[str, Any]:
        """Positions, cells, and the frame of each atom, as layers of e3nn take them."""
        if AtomicDataDict.LMP_MLIAP_DATA_KEY in data or AtomicDataDict.NUM_LOCAL_GHOST_NODES_KEY in data:
            raise NotImplementedError(
                "long range needs sums over all atoms, and LAMMPS' ML-IAP gives each process a part of them: use ASE, "
                "or pair_nequip on one process"
            )
        pos, batch = data[AtomicDataDict.POSITIONS_KEY], data.get(AtomicDataDict.BATCH_KEY)
        cell, pbc = data.get(AtomicDataDict.CELL_KEY), data.get(AtomicDataDict.PBC_KEY)
        sizes, traced = {}, is_traced(pos)
        if cell is not None and (pbc is None or (traced and self.repeats is not None)):
            cell, pbc = self._repeating(data, cell.view(-1, 3, 3), pbc)
        if batch is not None:
            sizes["batch_size"] = data[AtomicDataDict.NUM_NODES_KEY].shape[0]
            if traced:
                sizes["max_num_nodes"] = pos.shape[0] if self.max_num_nodes is None else self.max_num_nodes
        return {"pos": pos, "batch": batch, "cell": cell, "pbc": pbc, **sizes}

    def _repeating(self, data: AtomicDataDict.Type, cell: Tensor, pbc: Tensor | None) -> tuple[Any, Any]:
        """The cell, and a mask (graphs, 3) of the lattice vectors along which frames repeat, which comes from edges if
        there is no ``pbc``. Both are None if no frame repeats."""
        if pbc is None:
            crossing = (data[AtomicDataDict.EDGE_CELL_SHIFT_KEY] != 0).to(cell.dtype)
            batch, source = data.get(AtomicDataDict.BATCH_KEY), data[AtomicDataDict.EDGE_INDEX_KEY][0]
            graph = torch.zeros_like(source) if batch is None else batch[source]
            crossed = cell.new_zeros(cell.shape[0], 3).index_add(0, graph, crossing) > 0
        else:
            crossed = pbc.view(-1, 3)
        if self.repeats is None:
            told, words = crossed | (cell == 0).all(2), "an edge must cross each lattice vector that is not zero, or "
            torch._assert_async(
                told.all(), words + "nequip-compile get --modifiers far_crystals, far_slabs or far_molecules"
            )
            return cell, crossed
        repeats = torch.tensor(self.repeats, device=cell.device).expand_as(crossed)
        torch._assert_async((repeats | ~crossed).all(), "no edge must cross lattice vectors that do not repeat")
        return (cell, repeats) if any(self.repeats) else (None, None)

    @classmethod
    def _all_are(cls, model: torch.nn.Module, *repeats: bool) -> torch.nn.Module:
        for module in model.modules():
            if isinstance(module, cls):
                module.repeats = repeats
        return model

    @model_modifier(persistent=False)
    @classmethod
    def far_crystals(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that repeat along all lattice vectors, whether edges cross them or not."""
        return cls._all_are(model, True, True, True)

    @model_modifier(persistent=False)
    @classmethod
    def far_slabs(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that repeat along the first two lattice vectors."""
        return cls._all_are(model, True, True, False)

    @model_modifier(persistent=False)
    @classmethod
    def far_molecules(cls, model: torch.nn.Module) -> torch.nn.Module:
        """Compile for frames that do not repeat, whatever their cells are."""
        return cls._all_are(model, False, False, False)
