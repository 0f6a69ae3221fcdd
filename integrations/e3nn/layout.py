"""Between e3nn's features, (nodes, irreps.dim) in the order of their irreps, and tokens (rows, nodes) by grade."""

from __future__ import annotations

from typing import NamedTuple

import torch
from e3nn import o3
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.hyena.clifford import Grades

GRADE_OF = {(0, 1): 0, (1, -1): 1, (1, 1): 2, (0, -1): 3}  # (l, parity)


def clifford_grades(name: str, irreps: o3.Irreps) -> Grades:
    """Channels by grade; ValueError naming the argument for irreps that multivectors do not hold, or none at all."""
    counts = [0] * 4
    for mul, ir in irreps:
        if (ir.l, ir.p) not in GRADE_OF:
            raise ValueError(
                f"{name} must hold 0e, 0o, 1o and 1e only, which multivectors of Cl(3,0) do, got {irreps}; for other "
                "irreps use LongTensorProduct or TensorProductHyenaOperator"
            )
        counts[GRADE_OF[ir.l, ir.p]] += mul
    if not any(counts):
        raise ValueError(f"{name} must have at least one irrep, got {irreps}")
    return Grades(*counts)


def rows_by_grade(irreps: o3.Irreps) -> Tensor:
    """For each row of a token, the column of the feature it is: by grade, then component, then channel."""
    by_grade: list[list[Tensor]] = [[], [], [], []]
    for (mul, ir), part in zip(irreps, irreps.slices(), strict=True):
        columns = torch.arange(part.start, part.stop).view(mul, ir.dim)
        by_grade[GRADE_OF[ir.l, ir.p]].append(columns.T)
    return torch.cat([torch.cat(grade, 1).flatten() for grade in by_grade if grade])


class Features(NamedTuple):
    """What forward asks of irreps, in plain values: torch.compile cannot look at irreps."""

    dim: int
    text: str

    @classmethod
    def of(cls, irreps: o3.Irreps) -> Features:
        return cls(irreps.dim, str(irreps))


def check_features(name: str, x: Tensor, features: Features, like: Tensor, shape: str = "nodes") -> None:
    """Raise ValueError unless x is (nodes, dim), or (..., dim), in the dtype and on the device of ``like``."""
    if not isinstance(x, Tensor) or x.ndim < 1 or (shape != "..." and x.ndim != 2) or x.shape[-1] != features.dim:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must have shape ({shape}, {features.dim}), of irreps {features.text}, got {came}")
    checks.full_parameters(like)
    checks.same_kind(x, like, name)
    checks.half_precision(**{name: x})


def describe(module: torch.nn.Module) -> str:
    """e3nn's way to print a module."""
    weights = sum(p.numel() for p in module.parameters())
    return f"{type(module).__name__}({module.irreps_in} -> {module.irreps_out} | {weights} weights)"
