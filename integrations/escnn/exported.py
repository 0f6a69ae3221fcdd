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


def export(module: EquivariantModule, backend: str | None = None) -> nn.Module:
    """``module.export()`` of any escnn module, a ``SequentialModule`` too, with this backend in its attention layers.

    Those of this package take the backend themselves: ``layer.export(backend="plain")`` is the same. What they were
    copied from keeps its own.

    Args:
        module (EquivariantModule): whatever escnn can export. It is put in eval mode.
        backend: of the attention layers in what is returned; ``None`` leaves theirs. ``"plain"`` leaves only standard
            operators of torch, for ``torch.jit.trace`` and ONNX.

    Raises:
        ValueError: for a backend that one of the layers does not have.

    Example:
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2GroupAttention, export
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> model = nn.SequentialModule(R2GroupAttention(fields, fields, heads=2), nn.ReLU(fields))
        >>> export(model, backend="plain")[0].core.backend
        'plain'
    """
    exported = module.export()
    if backend is not None:
        for part in exported.modules():
            if isinstance(part, ATTENTION):
                part.backend = backend
    return exported
