"""Wrap modules of the library as escnn EquivariantModules."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.testing import act, off_lattice_errors

from .export import ATTENTION, Exported
from .types import check_field_type, group_from_gspace


class RdModule(EquivariantModule):
    """An escnn module that applies a module of the library, ``core``, to fields.

    The fields of the input are regular, or trivial with ``lifts``. The core gets regular fields as ``(B, fields, |H|,
    *spatial)``, which is the memory order of escnn's regular field types.
    """

    dim: ClassVar[int]  # dimensionality of the gspaces that a class supports

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
        """The group of two field types. Raise ValueError if their gspaces differ, or if their dimensionality is not
        that of the class."""
        check_field_type("in_type", in_type)
        check_field_type("out_type", out_type)
        if in_type.gspace != out_type.gspace:
            raise ValueError(f"out_type must have the gspace of in_type, {in_type.gspace}, got {out_type.gspace}")
        cls.check_dimension(in_type, "in_type")
        return group_from_gspace(in_type.gspace)

    @classmethod
    def check_dimension(cls, field_type: FieldType, argument: str) -> None:
        """Raise ValueError, which names the class to use, for fields of another dimensionality than that of the
        class."""
        gspace = field_type.gspace
        if cls.dim != gspace.dimensionality:
            name = next(c.__name__ for c in cls.__mro__ if "dim" in vars(c))
            raise ValueError(
                f"{argument} must have a gspace of dimensionality {cls.dim}, got {gspace}; "
                f"use R{gspace.dimensionality}{name.removeprefix(f'R{cls.dim}')}"
            )

    def forward(self, input: GeometricTensor, mask: Tensor | None = None) -> GeometricTensor:
        """Apply the module to fields.

        Args:
            input: Fields of ``in_type``.
            mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels. Masked pixels have no effect on
                other pixels, and their outputs are zero. ``None`` means that all pixels are valid.
        """
        return self._wrap(self.core(self._fields(input), mask))

    def _wrap(self, x: Tensor) -> GeometricTensor:
        return GeometricTensor(x.flatten(1, 2), self.out_type)

    def _fields(self, x: GeometricTensor, name: str = "input", field_type: FieldType | None = None) -> Tensor:
        """Check that x has the given type, by default ``in_type``, and return its tensor in the layout of the core."""
        field_type = self.in_type if field_type is None else field_type
        if not isinstance(x, GeometricTensor) or x.type != field_type:
            got = x.type if isinstance(x, GeometricTensor) else type(x).__name__
            raise ValueError(f"{name} must be a GeometricTensor of type {field_type}, got {got}")
        return x.tensor if self.lifts else x.tensor.unflatten(1, (-1, len(self.group)))

    def mask_after(self, mask: Tensor) -> Tensor:
        """The mask of the output's valid pixels."""
        core: Any = self.core
        return core.mask_after(mask)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(input_shape) != 2 + self.group.dim or input_shape[1] != self.in_type.size:
            sides = "H, W" if self.group.dim == 2 else "D, H, W"
            raise ValueError(f"input_shape must be (B, {self.in_type.size}, {sides}), got {tuple(input_shape)}")
        return (input_shape[0], self.out_type.size, *input_shape[2:])

    @torch.no_grad()
    def check_equivariance(
        self, atol: float = 1e-5, rtol: float = 1e-5, *, size: tuple[int, ...] | None = None, off_lattice: bool = False
    ) -> list[tuple[Any, float]]:
        """Check equivariance for all elements that map the pixel grid to itself, without interpolation.

        Args:
            atol: Absolute tolerance. The largest allowed error is ``atol + rtol * max |output|``.
            rtol: Tolerance relative to the largest output.
            size: Height and width of the test image, or depth, height and width of the volume. ``None`` means a size
                that is larger than the windows.
            off_lattice: Also measure, but do not check, the errors of the other elements (rotations by 45 degrees) on
                smooth images; see :func:`tg_equiattn.testing.off_lattice_errors`. They are some percent, because of
                the pixel grid.

        Returns:
            A list of ``(element of gspace.fibergroup, mean absolute error)`` for the checked elements, followed by
            ``(element, relative error)`` for the measured elements.

        Raises:
            AssertionError: if the error of a checked element is too large.
            ValueError: if the identity is the only element to check (``rot2dOnR2(3)``), or if ``size`` has the wrong
                length.
        """
        if len(self.group) > 1 and int(self.group.lattice.sum()) == 1 and not off_lattice:
            raise ValueError(
                f"gspace must have elements that map the pixel grid to itself, got {self.space}; "
                "check_equivariance(off_lattice=True) measures the others on smooth images"
            )
        size, training = self.check_size if size is None else size, self.training
        if not isinstance(size, (tuple, list)) or len(size) != self.group.dim:
            raise ValueError(f"size must have {self.group.dim} sides of the test image or volume, got {size!r}")
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
            side += 1  # an odd side has a middle pixel
        counts = [len(field_type) for field_type in inputs.values()]
        batch = 8 if dim == 2 else 2  # volumes are expensive
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
            fields = x.unflatten(1, (len(field_type), -1))  # all fields have the same size: 1, or |H| if regular
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
        """Set eval mode and return a copy as a plain torch module, which takes tensors instead of fields and has the
        same outputs. It can be pickled, copied and compiled."""
        self.eval()
        before = nn.Identity() if self.lifts else nn.Unflatten(1, (-1, len(self.group)))
        return Exported(before, copy.deepcopy(self.core), nn.Flatten(1, 2)).eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> RdModule:
        """Copy the module but share its field types, which are immutable. escnn's elements of O(3) cannot be copied."""
        for shared in (self.space, self.in_type, self.out_type, self.context_type):
            memo[id(shared)] = shared
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        return f"{self.in_type}, {self.out_type}"
