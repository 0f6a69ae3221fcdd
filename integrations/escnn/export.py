"""Export escnn modules as modules of plain torch."""

from __future__ import annotations

from typing import Any

import torch
from escnn.nn import EquivariantModule
from torch import Tensor, nn

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention
from tg_equiattn.nn.group.linear import Masked

ATTENTION = (LiftingAttention, GroupAttention, GlobalGroupAttention)


class Exported(Masked, nn.Module):
    """A core module between two modules that convert tensors to its layout and back."""

    def __init__(self, before: nn.Module, core: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.core, self.after = before, core, after

    def mask_after(self, mask: Tensor) -> Tensor:
        core: Any = self.core
        return core.mask_after(mask)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if torch.onnx.is_in_onnx_export() and torch.jit.is_tracing():
            raise RuntimeError(
                "the ONNX exporter with dynamo=False traces the model and would make a file for images of one size; "
                "use torch.onnx.export(model, inputs, dynamo=True)"
            )
        context = None if context is None else self.before(context)
        options = {"mask": mask, "context": context, "context_mask": context_mask}
        return self.after(self.core(self.before(x), **{name: t for name, t in options.items() if t is not None}))


def plain_copy(module: EquivariantModule) -> nn.Module:
    """``module.export()``, with what escnn leaves out: the dtype of batch norms, and the padding of convolutions."""
    plain = module.export()
    if isinstance(plain, nn.modules.conv._ConvNd):
        plain.padding_mode = getattr(module, "padding_mode", "zeros")
    floats = [t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    return plain.to(floats[0]) if floats else plain


def export(module: EquivariantModule) -> nn.Module:
    """Export an escnn module, also a ``SequentialModule``, to a plain torch module of standard operators.

    Use it for ``torch.jit.trace`` and for ONNX with ``torch.onnx.export(..., dynamo=True)``. It is ``module.export()``
    with attention layers that use standard operators of torch only; these are slower and need more memory. The result
    is a copy.

    Args:
        module (EquivariantModule): A module that escnn can export. It is set to eval mode.

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
