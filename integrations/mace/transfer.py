"""Transfer of long range between models: to a model with one head, or to a fine-tuned model."""

from __future__ import annotations

import copy

from mace.modules.blocks import EquivariantProductBasisBlock
from mace.modules.models import MACE
from mace.tools.scripts_utils import remove_pt_head
from torch import nn

from tg_equiattn.nn.waves.charges import ChargeLayer

from .features import LongRangeFeatures
from .long_range import _LONG_RANGE, LongRangeProduct


def select_head(model: MACE, head: str | None = None) -> MACE:
    """Make a model with one head of a model with long range, as MACE's ``remove_pt_head`` does for its own models.

    Args:
        model: A model made by :func:`add_long_range`. It stays as it is.
        head: Name of the head. The default, ``None``, means the first one that is not "pt_head".

    Raises:
        ValueError: if there is no such head.

    Example::

        torch.save(select_head(torch.load("far.model", weights_only=False), "dft"), "dft.model")
    """
    return copy_long_range(model, remove_pt_head(without_long_range(model), head))


def copy_long_range(source: MACE, target: MACE) -> MACE:
    """Give a plain model, in place, the long range of another one, with its weights and scales.

    Args:
        source: A model made by :func:`add_long_range`.
        target: A ``MACE`` or ``ScaleShiftMACE`` with the same blocks and features. Its elements are among those of
            ``source``.

    Returns:
        The target, with long range.

    Raises:
        ValueError: if an element of ``target`` is not an element of ``source``.
    """
    known, wanted = source.atomic_numbers.tolist(), target.atomic_numbers.tolist()
    if unknown := [z for z in wanted if z not in known]:
        raise ValueError(f"target must have elements of source, {known}, got {unknown} beside them")
    rows, like = [known.index(z) for z in wanted], next(target.parameters())
    own = dict(target.named_modules())
    for name, module in source.named_modules():
        layer = getattr(module, "long_range", None)
        if isinstance(layer, (LongRangeFeatures, ChargeLayer)):
            layer = copy.deepcopy(layer).to(like.device, like.dtype).requires_grad_()  # frozen, as MACE saves stage two
            if isinstance(layer, LongRangeFeatures):
                neutral = layer.attention.neutral
                for of_elements in ("embedding", "constants", "log_weights"):
                    setattr(neutral, of_elements, nn.Parameter(getattr(neutral, of_elements).detach()[rows]))
                own[name].__class__ = LongRangeProduct
            else:
                layer.select(rows)  # type: ignore[operator]
            own[name].long_range = layer
    target.__class__ = _LONG_RANGE[type(target)]
    return target


def without_long_range(model: MACE) -> MACE:
    """Make a copy of a model without its long range, with the present weights.

    Args:
        model: A model made by :func:`add_long_range`. It stays as it is.
    """
    plain, kinds = copy.deepcopy(model), {own: kind for kind, own in _LONG_RANGE.items()}
    for module in list(plain.modules()):
        module.__class__ = (kinds | {LongRangeProduct: EquivariantProductBasisBlock}).get(type(module), type(module))
        if "long_range" in module._modules:
            del module.long_range
    return plain
