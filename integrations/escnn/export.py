"""Export escnn modules as modules of plain torch."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from escnn.gspaces import GSpace
from escnn.nn import EquivariantModule, FieldType, GeometricTensor, SequentialModule
from torch import Tensor, nn

from tg_equiattn.group.layers import Masked
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention
from tg_equiattn.torch_state import is_jit_traced

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
        if is_jit_traced(for_onnx=True):
            raise RuntimeError(
                "the ONNX exporter with dynamo=False traces the model and would make a file for images of one size; "
                "use torch.onnx.export(model, inputs, dynamo=True)"
            )
        context = None if context is None else self.before(context)
        options = {"mask": mask, "context": context, "context_mask": context_mask}
        return self.after(self.core(self.before(x), **{name: t for name, t in options.items() if t is not None}))


class ExportedModule(Masked, nn.Module):
    """An exported escnn module inside a torch module. It takes fields and returns fields, or tensors and tensors.

    ``typed`` says that ``module`` itself takes fields, since its code is that of an escnn module."""

    def __init__(self, module: nn.Module, original: EquivariantModule, typed: bool) -> None:
        super().__init__()
        self.module, self.typed, self.in_type, self.out_type = module, typed, original.in_type, original.out_type

    def forward(self, input: Tensor | GeometricTensor, *args: Any, **options: Any) -> Tensor | GeometricTensor:
        gets_fields = isinstance(input, GeometricTensor)
        if self.typed:
            out = self.module(input if gets_fields else GeometricTensor(input, self.in_type), *args, **options)
            return out if gets_fields else out.tensor
        tensors = {name: _tensor(value) for name, value in options.items()}
        out = self.module(*(_tensor(value) for value in (input, *args)), **tensors)
        return GeometricTensor(out, self.out_type) if gets_fields else out

    def mask_after(self, mask: Tensor) -> Tensor:
        change = getattr(self.module, "mask_after", None)
        return mask if change is None else change(mask)


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, GeometricTensor) else value


def _with_exported_parts(module: nn.Module) -> nn.Module:
    """A copy of a module, in whose code the escnn modules are exported ones. Field types are shared, not copied."""
    copied: dict[int, Any] = {}

    def visit(parent: nn.Module) -> None:
        copied.update({id(v): v for v in vars(parent).values() if isinstance(v, (FieldType, GSpace))})
        for child in parent.children():
            if isinstance(child, EquivariantModule):
                part = exported_copy(child)
                wrapped = isinstance(part, ExportedModule)
                copied[id(child)] = part if wrapped else ExportedModule(part, child, typed=False)
            else:
                visit(child)

    visit(module)
    return copy.deepcopy(module, copied)


def exported_copy(module: EquivariantModule) -> nn.Module:
    """``module.export()`` with what escnn leaves out: modules without an export of their own, the dtype of batch norms,
    and the padding of convolutions."""
    if type(module) is SequentialModule:
        return nn.Sequential(OrderedDict((name, exported_copy(child)) for name, child in module.named_children()))
    code = next(kind for kind in type(module).__mro__ if {"forward", "export"} & vars(kind).keys())
    # an inherited export does not know the code of a class
    exports = "export" in vars(code) or code.__module__.startswith(("escnn.", "tg_equiattn."))
    try:
        exported = module.export() if exports else None
    except NotImplementedError:
        exported = None
    if exported is None:
        return ExportedModule(_with_exported_parts(module), module, typed=True)
    if isinstance(exported, nn.modules.conv._ConvNd):
        exported.padding_mode = getattr(module, "padding_mode", "zeros")
    floats = [t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
    return exported.to(floats[0]) if floats else exported


def to_standard_torch(module: nn.Module) -> nn.Module:
    """Convert an escnn module, or any torch module that is made of escnn modules, to standard operators of torch.

    The method ``export()`` of a module is escnn's: its result is as fast as the module, and needs this library to run.
    Use this function for ``torch.export``, ``torch.jit.trace`` and for ONNX with ``torch.onnx.export(...,
    dynamo=True)``. Its attention layers use standard operators of torch only; these are slower and need more memory.
    Weights and statistics are constants: to train, use the model itself. The result is a copy.

    An escnn module becomes a module that takes and returns tensors, and masks and contexts where it takes them; it can
    be pickled if escnn can export all of its modules. In another torch module, such as a U-Net with skips, the escnn
    modules are exported, and the ``forward`` stays. It can still make and add fields, so this copy cannot be pickled:
    store the program of ``torch.export.export(to_standard_torch(model), ...)``.

    Args:
        module (torch.nn.Module): A module of escnn, or one made of such modules. It is set to eval mode.

    Raises:
        ValueError: if ``module`` is not a module, or by escnn, for batch norms without running statistics.

    Example:
        >>> import torch
        >>> from escnn import gspaces, nn
        >>> from tg_equiattn.integrations.escnn import R2GroupAttention, to_standard_torch
        >>> gspace = gspaces.rot2dOnR2(4)
        >>> fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
        >>> attention = R2GroupAttention(fields, fields, heads=2)
        >>> model = to_standard_torch(nn.SequentialModule(attention, nn.ReLU(fields)))
        >>> model(torch.randn(2, 16, 6, 6)).shape
        torch.Size([2, 16, 6, 6])
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    module.eval()
    exported = exported_copy(module) if isinstance(module, EquivariantModule) else _with_exported_parts(module)
    for part in exported.modules():
        if isinstance(part, ATTENTION):
            part.plain = True
    return exported
