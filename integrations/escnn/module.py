"""The shell that makes a core module an escnn EquivariantModule, and its way back to plain torch."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention
from tg_equiattn.testing import act, off_lattice_errors

from .types import check_field_type, group_from_gspace

ATTENTION = (LiftingAttention, GroupAttention, GlobalGroupAttention)


class RdModule(EquivariantModule):
    """A core module on regular (or, with ``lifts``, trivial) fields between two field types, which it sees as
    ``(B, fields, |H|, *spatial)``, escnn's own order of a regular type."""

    dim: ClassVar[int]  # of the gspaces that a class is for

    def __init__(
        self, core: nn.Module, group: FiniteGroup, in_type: FieldType, out_type: FieldType, lifts: bool = False,
        context_type: FieldType | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.space, self.in_type, self.out_type = in_type.gspace, in_type, out_type
        self.group, self.core, self.lifts, self.context_type = group, core, lifts, context_type
        windows = [m.window.kernel_size for m in core.modules() if isinstance(m, ATTENTION)]
        side = max([11 if group.dim == 2 else 5, *(size or 0 for size in windows)])
        self.check_size: tuple[int, ...] = (side, side + 2) if group.dim == 2 else (side, side + 1, side)

    @classmethod
    def group_of(cls, in_type: FieldType, out_type: FieldType) -> FiniteGroup:
        """The group of both types; ValueError for two gspaces, or of another dimension than the module's."""
        check_field_type("in_type", in_type)
        check_field_type("out_type", out_type)
        if in_type.gspace != out_type.gspace:
            raise ValueError(f"out_type must have the gspace of in_type, {in_type.gspace}, got {out_type.gspace}")
        cls.check_dimension(in_type, "in_type")
        return group_from_gspace(in_type.gspace)

    @classmethod
    def check_dimension(cls, field_type: FieldType, argument: str) -> None:
        """ValueError, with the class to use, for fields of another dimension than the module's."""
        gspace = field_type.gspace
        if cls.dim != gspace.dimensionality:
            name = next(c.__name__ for c in cls.__mro__ if "dim" in vars(c))
            raise ValueError(
                f"{argument} must have a gspace of dimensionality {cls.dim}, got {gspace}; "
                f"use R{gspace.dimensionality}{name.removeprefix(f'R{cls.dim}')}"
            )

    def forward(self, input: GeometricTensor, mask: Tensor | None = None) -> GeometricTensor:
        """``mask`` is bool, ``(B, *spatial)`` or ``(1, *spatial)``, true where there are pixels; the others count in
        nothing, whatever they hold, and outputs with pixels are zero there."""
        return self._wrap(self.core(self._fields(input), mask))

    def _wrap(self, x: Tensor) -> GeometricTensor:
        return GeometricTensor(x.flatten(1, 2), self.out_type)

    def _fields(self, x: GeometricTensor, name: str = "input", field_type: FieldType | None = None) -> Tensor:
        """Fields of the input's type, or of this one, in the layout of the core."""
        field_type = self.in_type if field_type is None else field_type
        if not isinstance(x, GeometricTensor) or x.type != field_type:
            got = x.type if isinstance(x, GeometricTensor) else type(x).__name__
            raise ValueError(f"{name} must be a GeometricTensor of type {field_type}, got {got}")
        return x.tensor if self.lifts else x.tensor.unflatten(1, (-1, len(self.group)))

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(input_shape) != 2 + self.group.dim or input_shape[1] != self.in_type.size:
            sides = "H, W" if self.group.dim == 2 else "D, H, W"
            raise ValueError(f"input_shape must be (B, {self.in_type.size}, {sides}), got {tuple(input_shape)}")
        return (input_shape[0], self.out_type.size, *input_shape[2:])

    @torch.no_grad()
    def check_equivariance(
        self, atol: float = 1e-5, rtol: float = 1e-5, *, size: tuple[int, ...] | None = None, off_lattice: bool = False
    ) -> list[tuple[Any, float]]:
        """Check all elements that map the pixel grid to itself, without interpolation; measure the others if asked.

        Args:
            atol, rtol: the largest error allowed is ``atol + rtol * max |output|``.
            size: height and width of the test image, or depth, height and width of the volume.
            off_lattice: also measure the elements that do not map the pixel grid to itself (rotations by 45 degrees),
                on smooth images (:func:`tg_equiattn.testing.off_lattice_errors`): percents that come from the pixels.

        Returns:
            ``[(element of gspace.fibergroup, mean absolute error)]`` of the elements that are checked, and then
            ``[(element, relative error)]`` of those that are measured.

        Raises:
            AssertionError: if an error of an element that is checked is too high.
            ValueError: if there is only the identity to check (``rot2dOnR2(3)``), or for another number of sides.
        """
        if len(self.group) > 1 and int(self.group.lattice.sum()) == 1 and not off_lattice:
            raise ValueError(
                f"gspace must have elements that map the pixel grid to itself, got {self.space}; "
                "check_equivariance(off_lattice=True) measures the others on smooth images"
            )
        size, training = self.check_size if size is None else size, self.training
        if not isinstance(size, (tuple, list)) or len(size) != self.group.dim:
            raise ValueError(f"size must be {self.group.dim} sides of the test image or volume, got {size!r}")
        inputs = {"input": self.in_type} | ({} if self.context_type is None else {"context": self.context_type})
        self.eval()
        try:
            errors = self._lattice_errors(inputs, atol, rtol, size)
            return errors + self._off_lattice_errors(inputs, max(size)) if off_lattice else errors
        finally:
            self.train(training)

    def _off_lattice_errors(self, inputs: dict[str, FieldType], side: int) -> list[tuple[Any, float]]:
        dim, like = self.group.dim, next(self.parameters())
        if self.evaluate_output_shape((1, self.in_type.size, *[side] * dim))[-1] % 2 == 0:
            side += 1  # so that one pixel is in the middle
        counts = [len(field_type) for field_type in inputs.values()]
        batch = 8 if dim == 2 else 2  # volumes are dear
        shape = (batch, sum(counts), *([] if self.lifts else [len(self.group)]), *[side] * dim)

        def run(x: Tensor) -> Tensor:
            first, *others = x.split(counts, 1)
            return self.core(first, **dict(zip(list(inputs)[1:], others, strict=True)))

        errors = off_lattice_errors(run, self.group, shape, dtype=like.dtype, device=like.device)
        return [(self.space.fibergroup.elements[index], error) for index, error in errors.items()]

    def _lattice_errors(self, inputs: dict[str, FieldType], atol: float, rtol: float, size) -> list[tuple[Any, float]]:
        kind, batch = next(self.parameters()), 3 if self.group.dim == 2 else 1
        given = {n: (torch.randn(batch, t.size, *size).to(kind), t) for n, t in inputs.items()}

        def move(x: Tensor, field_type: FieldType, index: int) -> Tensor:
            fields = x.unflatten(1, (len(field_type), -1))  # sizes are equal: 1, or |H| for regular fields
            regular = fields.shape[2] > 1
            return act(fields, self.group, index).flatten(1, 2) if regular else act(x, self.group, index)

        expected = self(**{n: GeometricTensor(x, t) for n, (x, t) in given.items()}).tensor
        errors = []
        for index, element in enumerate(self.space.fibergroup.elements):
            if not self.group.lattice[index]:
                continue
            moved = self(**{n: GeometricTensor(move(x, t, index), t) for n, (x, t) in given.items()}).tensor
            error = (moved - move(expected, self.out_type, index)).abs()
            if not bool((error <= atol + rtol * expected.abs().max()).all()):
                raise AssertionError(
                    f"The error found during equivariance check with element {element} is too high: "
                    f"max = {float(error.max())}, mean = {float(error.mean())}"
                )
            errors.append((element, float(error.mean())))
        return errors

    def export(self) -> nn.Module:
        """Set eval mode and return a plain torch module of equal outputs, which pickles, deep-copies and compiles, and
        takes tensors in place of fields."""
        self.eval()
        before = nn.Identity() if self.lifts else nn.Unflatten(1, (-1, len(self.group)))
        return Exported(before, copy.deepcopy(self.core), nn.Flatten(1, 2)).eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> RdModule:
        """A copy that shares the field types, which nothing changes: escnn's elements of O(3) cannot be copied."""
        for shared in (self.space, self.in_type, self.out_type, self.context_type):
            memo[id(shared)] = shared
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        return f"{self.in_type}, {self.out_type}"


class Exported(nn.Module):
    """A core between modules that give tensors its layout and take it back."""

    def __init__(self, before: nn.Module, core: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.core, self.after = before, core, after

    def forward(self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if torch.onnx.is_in_onnx_export() and torch.jit.is_tracing():
            raise RuntimeError(
                "the ONNX exporter that traces to TorchScript (dynamo=False) would make a file for images of one size; "
                "use torch.onnx.export(model, inputs, dynamo=True)"
            )
        options = {} if mask is None else {"mask": mask}
        if context is not None:
            options["context"] = self.before(context)
        return self.after(self.core(self.before(x), **options))


def export(module: EquivariantModule) -> nn.Module:
    """``module.export()`` of any escnn module, a ``SequentialModule`` too, on standard operators of torch alone, slower
    and in more memory: for ``torch.jit.trace`` and for ONNX by ``torch.onnx.export(..., dynamo=True)``. What it was
    copied from stays as it is.

    Args:
        module (EquivariantModule): whatever escnn can export. It is put in eval mode.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2GroupAttention, export
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> model = export(nn.SequentialModule(R2GroupAttention(fields, fields, heads=2), nn.ReLU(fields)))
        >>> model(torch.randn(2, 16, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
    """
    exported = module.export()
    for part in exported.modules():
        if isinstance(part, ATTENTION):
            part.plain = True
    return exported
