"""Wrap modules of the library as escnn EquivariantModules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.testing import equivariance_error, off_lattice_errors, warn_of_zeros

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
        sides = [side for m in core.modules() if isinstance(m, ATTENTION) for side in m.window.sides]
        side = max([11 if group.dim == 2 else 5, *sides])
        self.check_size: tuple[int, ...] = (side, side + 2, side)[: group.dim]  # odd sides, for strides

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
        return x.tensor if self.lifts else x.tensor.unflatten(1, (-1, self.group.order))

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
        """Check equivariance for all elements that map the pixel grid to itself, without interpolation. Terms that are
        multiplied by parameters that start at zero are not checked in a new layer; a warning names these parameters.

        Args:
            atol: Absolute tolerance. The largest allowed error is ``atol + rtol * max |output|``.
            rtol: Tolerance relative to the largest output.
            size: Height and width of the test image, or depth, height and width of the volume. ``None`` means a size
                that is at least that of the windows.
            off_lattice: Also measure, but do not check, the errors of the other elements (rotations by 45 degrees) on
                smooth images; see :func:`tg_equiattn.testing.off_lattice_errors`. They are some percent, because of
                the pixel grid.

        Returns:
            A list of ``(element of gspace.fibergroup, error)``: for the checked elements the largest error relative to
            the largest output, followed by the errors of the measured elements.

        Raises:
            AssertionError: if the error of a checked element is too large.
            ValueError: if the identity is the only element to check (``rot2dOnR2(3)``), if ``size`` has the wrong
                length, or if the output is not finite or zero everywhere.
        """
        group, elements, dim = self.group, self.space.fibergroup.elements, self.group.dim
        if len(group) > 1 and int(group.lattice.sum()) == 1 and not off_lattice:
            raise ValueError(
                f"gspace must have elements that map the pixel grid to itself, got {self.space}; "
                "check_equivariance(off_lattice=True) measures the others on smooth images"
            )
        size, training = self.check_size if size is None else size, self.training
        if not isinstance(size, (tuple, list)) or len(size) != dim:
            raise ValueError(f"size must have {dim} sides of the test image or volume, got {size!r}")
        names = ["input"] if self.context_type is None else ["input", "context"]
        counts = [len(self.in_type)] + ([] if self.context_type is None else [len(self.context_type)])
        lead, like = (sum(counts), *([] if self.lifts else [len(group)])), next(self.parameters())

        def run(x: Tensor) -> Tensor:
            first, *others = x.split(counts, 1)
            return self.core(first, **dict(zip(names[1:], others, strict=True)))

        self.eval()
        try:
            x = torch.randn(3 if dim == 2 else 1, *lead, *size).to(like)
            warn_of_zeros(self)
            allowed, errors = rtol + atol / float(run(x).abs().max()), []
            for index in group.lattice.nonzero().flatten().tolist():
                error = equivariance_error(run, group, x, elements=[index])
                if not error <= allowed:
                    raise AssertionError(
                        f"The error found during equivariance check with element {elements[index]} is too high: "
                        f"{error} of the largest output, allowed are {allowed}"
                    )
                errors.append((elements[index], error))
            if off_lattice:
                side = max(size)  # an odd side has a middle pixel
                while self.evaluate_output_shape((1, self.in_type.size, *[side] * dim))[-1] % 2 == 0:
                    side += 1
                shape = 8 if dim == 2 else 2, *lead, *[side] * dim  # volumes are expensive
                measured = off_lattice_errors(run, group, shape, dtype=like.dtype, device=like.device)
                errors += [(elements[index], error) for index, error in measured.items()]
            return errors
        finally:
            self.train(training)

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

    def __copy__(self) -> RdModule:
        copied = type(self).__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise pickle.PicklingError(
            f"{type(self).__name__} cannot be pickled, because escnn's groups cannot: store state_dict(), or pickle the"
            " plain torch module that export() makes"
        )

    def extra_repr(self) -> str:
        return f"{self.in_type}, {self.out_type}"


class RdAttentionModule(RdModule):
    """An :class:`RdModule` of attention. Keys and values may come from other fields, of type ``context_type``."""

    def forward(
        self, input: GeometricTensor, mask: Tensor | None = None, *, context: GeometricTensor | None = None,
        context_mask: Tensor | None = None,
    ) -> GeometricTensor:  # fmt: skip
        """Attention of the pixels of ``input`` to its own pixels or to those of a context.

        Args:
            input: Fields of ``in_type``.
            mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels of ``input``. Masked pixels have no
                effect on other pixels, and their outputs are zero. ``None`` means that all pixels are valid.
            context: Fields of ``context_type`` from which keys and values are made; without a ``context_type``, fields
                of ``in_type``. In lifting and group attention within a window without circular padding, they may have
                half or twice as many pixels along each axis: n for 2 n or 2 n - 1. With ``encoding=None`` or
                ``"rotary"`` they may have any size. ``None`` means ``input``.
            context_mask: Bool ``(B, *spatial)`` or ``(1, *spatial)``, true at valid pixels of the context. Masked
                pixels are not keys. A query without a valid key has zero weights, so its attention is the bias of the
                output projection. It must be given with ``mask`` and a context.
        """
        out = self.core(self._fields(input), mask, context=self._context(context), context_mask=context_mask)
        return self._wrap(out)

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        if context is None and self.context_type is not None:
            raise ValueError(
                f"context must be given, with fields of context_type, {self.context_type}, got None; for "
                "self-attention, make the layer with context_type=None"
            )
        return None if context is None else self._fields(context, "context", self.context_type)

    def attention_map(
        self, input: GeometricTensor, pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None, *, context: GeometricTensor | None = None, context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention weights of chosen query pixels. Arguments and result are those of
        :meth:`tg_equiattn.nn.GroupAttention.attention_map`, with fields for ``x`` and ``context``. Group elements are
        in the order of ``fibergroup.elements``."""
        core: Any = self.core
        fields, context_fields = self._fields(input), self._context(context)
        return core.attention_map(fields, pixel, mask, context=context_fields, context_mask=context_mask)
