"""Checks of features, and conversion between features in the order of their irreps and tokens by grade."""

from __future__ import annotations

import copy
from typing import Annotated, Any, NamedTuple

import torch
from e3nn import o3
from torch import Tensor

from tg_equiattn import checks
from tg_equiattn.chains.clifford import Grades
from tg_equiattn.chains.clifford_algebra import GRADE_SIZES
from tg_equiattn.shapes import Int


def _irreps(x: Any) -> o3.Irreps:
    try:
        return o3.Irreps() if isinstance(x, Tensor) else o3.Irreps(x)
    except Exception:  # e3nn raises errors of many classes
        return o3.Irreps()


# annotations of arguments
_NAME = "irreps, at least one, such as '8x0e + 4x1o'"
IrrepsLike = Annotated[o3.Irreps | str, checks.Kind(_NAME, lambda x: _irreps(x).dim > 0)]
IrrepsOrZero = Annotated[o3.Irreps | str, checks.Kind(_NAME, lambda x: len(_irreps(x)) > 0)]  # with multiplicity zero
GRADE_OF = {(0, 1): 0, (1, -1): 1, (1, 1): 2, (0, -1): 3}  # (l, parity)


def grades_of(name: str, irreps: o3.Irreps) -> Grades:
    """Numbers of channels by grade. Raise ValueError without irreps, or for irreps that multivectors do not have."""
    counts = [0] * 4
    for mul, ir in irreps:
        if (ir.l, ir.p) not in GRADE_OF:
            raise ValueError(
                f"{name} must hold 0e, 0o, 1o and 1e only, the irreps of multivectors, got {irreps}; for other irreps "
                "use LongTensorProduct or TensorProductHyenaOperator"
            )
        counts[GRADE_OF[ir.l, ir.p]] += mul
    return Grades(*counts)


def columns_by_grade(irreps: str) -> Int[Tensor, " columns"]:
    """Column in features for each column of tokens by grade, where components are outside of channels."""
    parsed = o3.Irreps(irreps)
    first: list[list[int]] = [[] for _ in GRADE_SIZES]  # columns of the first component of each channel
    for (_, ir), part in zip(parsed, parsed.slices(), strict=True):
        first[GRADE_OF[ir.l, ir.p]] += range(part.start, part.stop, ir.dim)
    grades = zip(first, GRADE_SIZES, strict=True)
    return torch.tensor([column + n for columns, size in grades for n in range(size) for column in columns])


def columns_by_irrep(irreps: str) -> Int[Tensor, " columns"]:
    """The inverse of :func:`columns_by_grade`."""
    return columns_by_grade(irreps).argsort()


def channels(irreps: o3.Irreps) -> list[int]:
    """Channel of each column of features. The components of an irrep have one channel."""
    sizes = [ir.dim for mul, ir in irreps for _ in range(mul)]
    return [channel for channel, size in enumerate(sizes) for _ in range(size)]


def like_its_copies(product: o3.TensorProduct) -> o3.TensorProduct:
    """A copy of a product. e3nn adds buffers when it copies a product. Averages of models pair a model and its copy by
    the order of buffers, so both need the same buffers."""
    return copy.deepcopy(product)


class Features(NamedTuple):
    """The dimension and the text of irreps, for ``forward``: torch.compile cannot read irreps."""

    dim: int
    text: str

    @classmethod
    def of(cls, irreps: o3.Irreps) -> Features:
        return cls(irreps.dim, str(irreps))


def check_features(name: str, x: Tensor, features: Features, reference: Tensor) -> None:
    """Raise ValueError unless x is (nodes, dim) in the dtype and on the device of ``reference``."""
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] != features.dim:
        wanted = f"(nodes, {features.dim}), of irreps {features.text}"
        raise ValueError(f"{name} must have shape {wanted}, got {checks.shape_of(x)}")
    checks.of_points(x, reference, name)


def describe(module: torch.nn.Module) -> str:
    """The text of a module in e3nn's format."""
    weights = sum(p.numel() for p in module.parameters())
    return f"{type(module).__name__}({module.irreps_in} -> {module.irreps_out} | {weights} weights)"
