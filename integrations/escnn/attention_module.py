"""What attention between fields takes beside its input, and the weights it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from escnn.nn import FieldType, GeometricTensor
from torch import Tensor, nn

from tg_equiattn.groups import FiniteGroup

from .module import RdModule


class RdAttentionModule(RdModule):
    """An :class:`RdModule` of attention, which can be told what pixels there are, and whose keys may be other fields'.

    Args:
        context_type (FieldType): fields of the context; ``None`` means the input type.
    """

    def __init__(
        self,
        core: nn.Module,
        group: FiniteGroup,
        in_type: FieldType,
        out_type: FieldType,
        lifts: bool,
        context_type: FieldType | None,
    ) -> None:
        super().__init__(core, group, in_type, out_type, lifts)
        self.context_type = in_type if context_type is None else context_type
        self._crosses = context_type is not None

    @property
    def _inputs(self) -> dict[str, FieldType]:
        return super()._inputs | ({"context": self.context_type} if self._crosses else {})

    def forward(
        self, input: GeometricTensor, mask: Tensor | None = None, *, context: GeometricTensor | None = None
    ) -> GeometricTensor:
        """Attend.

        Args:
            input: fields, which the queries are of.
            mask: bool ``(B, *spatial)`` or ``(1, *spatial)``, true where there are pixels; the others are no keys,
                whatever they hold, and their outputs are zero.
            context: fields of ``context_type`` on the same grid, which keys and values are of; ``None`` means the
                input.
        """
        return self._wrap(self.core(self._fields(input), mask, context=self._context(context)))

    def _context(self, context: GeometricTensor | None) -> Tensor | None:
        return None if context is None else self._fields(context, "context", self.context_type)

    def attention_map(
        self,
        input: GeometricTensor,
        pixel: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        mask: Tensor | None = None,
        *,
        context: GeometricTensor | None = None,
    ) -> Tensor:
        """The attention weights of chosen pixels, ``(row, column)`` or ``(depth, row, column)`` each, of all heads and
        elements.

        See :meth:`tg_equiattn.nn.GroupAttention.attention_map`, whose layout this has:
        ``(B, heads, |H|, T, S, *spatial)``, or ``(B, pixels, heads, |H|, T, S, *spatial)`` with several pixels;
        elements are in the order of ``fibergroup.elements``.
        """
        core: Any = self.core
        return core.attention_map(self._fields(input), pixel, mask, context=self._context(context))
