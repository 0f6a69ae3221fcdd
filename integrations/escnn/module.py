"""The shell that makes a core module an escnn EquivariantModule."""

from __future__ import annotations

import copy
from typing import Any

import torch
from escnn.nn import EquivariantModule, FieldType, GeometricTensor
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup
from tg_equiattn.testing import act


class R2Module(EquivariantModule):
    """A core module on regular (or, with ``lifts``, trivial) fields between two field types.

    Fields are viewed as ``(B, fields, |H|, H, W)``, escnn's own order of a regular type.
    """

    check_size = (11, 13)

    def __init__(
        self, core: nn.Module, group: FiniteGroup, in_type: FieldType, out_type: FieldType, lifts: bool
    ) -> None:
        super().__init__()
        self.space, self.in_type, self.out_type = in_type.gspace, in_type, out_type
        self.group, self.core, self.lifts = group, core, lifts

    def forward(self, input: GeometricTensor) -> GeometricTensor:
        if not isinstance(input, GeometricTensor) or input.type != self.in_type:
            got = input.type if isinstance(input, GeometricTensor) else type(input).__name__
            raise ValueError(f"input must be a GeometricTensor of type {self.in_type}, got {got}")
        return GeometricTensor(self.join(self.core(self.split(input.tensor))), self.out_type)

    def split(self, x: Tensor) -> Tensor:
        """(B, size, H, W) to the layout of the core."""
        return x if self.lifts else x.unflatten(1, (-1, len(self.group)))

    def join(self, x: Tensor) -> Tensor:
        """The core's output to (B, size, H, W)."""
        return x.flatten(1, 2)

    def evaluate_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(input_shape) != 4 or input_shape[1] != self.in_type.size:
            raise ValueError(f"input_shape must be (B, {self.in_type.size}, H, W), got {tuple(input_shape)}")
        return (input_shape[0], self.out_type.size, *input_shape[2:])

    @torch.no_grad()
    def check_equivariance(
        self, atol: float = 1e-5, rtol: float = 1e-5, *, size: tuple[int, int] | None = None
    ) -> list[tuple[Any, float]]:
        """Check all elements that map the pixel grid to itself, without interpolation, on images.

        Args:
            atol, rtol: as ``numpy.allclose``.
            size: height and width of the test image.

        Returns:
            ``[(element, mean absolute error)]``, the elements those of ``gspace.fibergroup``.

        Raises:
            AssertionError: if an error is too high.
        """
        training = self.training
        self.eval()
        like = next(self.parameters())
        x = torch.randn(3, self.in_type.size, *(size or self.check_size), device=like.device, dtype=like.dtype)
        expected = self.core(self.split(x))
        errors = []
        for index, element in enumerate(self.space.fibergroup.elements):
            if not self.group.lattice[index]:
                continue
            moved = self.core(act(self.split(x), self.group, index))
            error = (moved - act(expected, self.group, index)).abs()
            if not bool((error <= atol + rtol * expected.abs().max()).all()):
                self.train(training)
                raise AssertionError(
                    f"The error found during equivariance check with element {element} is too high: "
                    f"max = {float(error.max())}, mean = {float(error.mean())}"
                )
            errors.append((element, float(error.mean())))
        self.train(training)
        return errors

    def export(self) -> nn.Module:
        """Set eval mode and return a plain torch module of equal outputs, which pickles, deep-copies and compiles."""
        self.eval()
        core = copy.deepcopy(self.core)
        if self.lifts:
            return nn.Sequential(core, nn.Flatten(1, 2)).eval()
        return nn.Sequential(nn.Unflatten(1, (-1, len(self.group))), core, nn.Flatten(1, 2)).eval()

    def extra_repr(self) -> str:
        return f"{self.in_type}, {self.out_type}"
