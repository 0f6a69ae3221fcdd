"""Offsets of pairs of nodes, and whether they are the whole numbers that tables and counted distances need."""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks

GIVEN = "offsets (edge_offset) must be"  # how an error of offsets begins that came without positions


def offsets_between(pos: Tensor, target: Tensor, source: Tensor, whole: bool) -> Tensor:
    """Offsets :math:`x_j - x_i` of pairs, ``(E, dim)``, as :func:`whole_offsets` where whole ones are wanted."""
    offsets = pos[source] - pos[target]
    if not whole or not offsets.is_floating_point():
        return offsets
    free = checks.values_are_free(pos) and pos.numel()
    if free and torch.finfo(pos.dtype).eps * float(pos.detach().abs().max()) >= 2:
        raise ValueError(
            f"pos must be float64 so far from the origin, where {pos.dtype} does not tell whole numbers apart"
        )
    return whole_offsets(offsets, pos)


def whole_offsets(offsets: Tensor, pos: Tensor | None = None, what: str = "differences of pos must be") -> Tensor:
    """Offsets (E, dim) rounded to whole numbers; ValueError, which begins with ``what``, for those farther from them
    than rounding at the size of positions explains: a grid shifted by 3.7 stays one."""
    if not offsets.is_floating_point():
        return offsets
    whole = offsets.round()
    if not checks.values_are_free(offsets) or torch.equal(offsets, whole):
        return whole
    size = (offsets if pos is None else pos).abs().max().double().clamp(min=1)
    exact = (16 * max(torch.finfo(t).eps for t in (offsets.dtype, torch.float32)) * size).clamp(max=0.25)
    apart = torch.where(offsets == whole, 0.0, offsets - whole).abs()  # infinity is Pairs' to refuse
    near = (apart <= exact).all(1)
    if not bool(near.all()):
        came = offsets[~near][0].tolist()
        raise ValueError(
            f"{what} whole numbers where offsets index a table or distances are counted (offset='table', "
            f"position='clipped'), got an offset of {came}: scale pos to the unit of its grid, or take offset='mlp' "
            "for points off a grid"
        )
    return whole
