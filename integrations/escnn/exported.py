"""Plain torch modules of escnn models with attention in them."""

from __future__ import annotations

from escnn.nn import EquivariantModule
from torch import Tensor, nn

from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention

ATTENTION = (LiftingAttention, GroupAttention, GlobalGroupAttention)


class Exported(nn.Module):
    """A core between modules that give tensors its layout and take it back."""

    def __init__(self, before: nn.Module, core: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.before, self.core, self.after = before, core, after

    def forward(self, x: Tensor, mask: Tensor | None = None, *, context: Tensor | None = None) -> Tensor:
        options = {} if mask is None else {"mask": mask}
        if context is not None:
            options["context"] = self.before(context)
        return self.after(self.core(self.before(x), **options))


def export(module: EquivariantModule) -> nn.Module:
    """``module.export()`` of any escnn module, a ``SequentialModule`` too, on standard operators of torch alone, slower
    and in more memory: for ``torch.jit.trace`` and ONNX. What it was copied from stays as it is.

    Args:
        module (EquivariantModule): whatever escnn can export. It is put in eval mode.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2GroupAttention, export
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> model = export(nn.SequentialModule(R2GroupAttention(fields, fields, heads=2), nn.ReLU(fields)))
        >>> torch.jit.trace(model, torch.randn(1, 16, 6, 6))(torch.randn(2, 16, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
    """
    exported = module.export()
    for part in exported.modules():
        if isinstance(part, ATTENTION):
            part.plain = True
    return exported
