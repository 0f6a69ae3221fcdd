"""Between e3nn's features, (nodes, irreps.dim) in the order of their irreps, and tokens (rows, nodes) by grade."""

from __future__ import annotations

from typing import NamedTuple

import torch
from e3nn import o3
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.nn.hyena import Grades
from tg_equiattn.nn.not_scriptable import NotScriptable

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


def channels(irreps: o3.Irreps) -> list[int]:
    """The channel of each column of a feature: one irrep of one multiplicity."""
    out: list[int] = []
    for mul, ir in irreps:
        first = 1 + max(out, default=-1)
        out += [first + n for n in range(mul) for _ in range(ir.dim)]
    return out


class Features(NamedTuple):
    """What forward asks of irreps, in plain values: torch.compile cannot look at irreps."""

    dim: int
    text: str

    @classmethod
    def of(cls, irreps: o3.Irreps) -> Features:
        return cls(irreps.dim, str(irreps))


def check_features(name: str, x: Tensor, features: Features, reference: Tensor, shape: str = "nodes") -> None:
    """Raise ValueError unless x is (nodes, dim), or (..., dim), in the dtype and on the device of ``reference``."""
    if not isinstance(x, Tensor) or x.ndim < 1 or (shape != "..." and x.ndim != 2) or x.shape[-1] != features.dim:
        came = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must have shape ({shape}, {features.dim}), of irreps {features.text}, got {came}")
    checks.full_parameters(reference)
    checks.same_kind(x, reference, name)
    checks.half_precision(**{name: x})


def describe(module: torch.nn.Module) -> str:
    """e3nn's way to print a module."""
    weights = sum(p.numel() for p in module.parameters())
    return f"{type(module).__name__}({module.irreps_in} -> {module.irreps_out} | {weights} weights)"


class GradeLayout(NotScriptable, torch.nn.Module):
    """Features of irreps that multivectors hold, to rows by grade and back; what the modules through them build on."""

    rows_in: Tensor
    columns_out: Tensor

    def __init__(self, irreps_in: o3.Irreps, irreps_out: o3.Irreps) -> None:
        super().__init__()
        self.irreps_in, self.irreps_out = irreps_in, irreps_out
        self.features_in = Features.of(irreps_in)
        self.register_buffer("rows_in", rows_by_grade(irreps_in), persistent=False)
        self.register_buffer("columns_out", rows_by_grade(irreps_out).argsort(), persistent=False)

    def to_rows(self, x: Tensor) -> Tensor:
        """(nodes, irreps_in.dim) to (rows, nodes)."""
        return x.T.index_select(0, self.rows_in)

    def to_features(self, rows: Tensor) -> Tensor:
        """(rows, nodes) to (nodes, irreps_out.dim)."""
        return rows.index_select(0, self.columns_out).T

    def __repr__(self) -> str:
        return describe(self)
