"""Transfer of long range between models: to a model with one head, or to a fine-tuned model."""

from __future__ import annotations

import copy

import torch
from mace.modules.models import MACE
from mace.tools.scripts_utils import remove_pt_head
from torch import nn

from .features import LongRangeFeatures
from .long_range import _LONG_RANGE, _WITH


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
        if isinstance(layer := getattr(module, "long_range", None), LongRangeFeatures):
            layer = copy.deepcopy(layer).to(like.device, like.dtype).requires_grad_()  # frozen, as MACE saves stage two
            neutral = layer.attention.neutral
            for of_elements in ("embedding", "constants", "log_weights"):
                setattr(neutral, of_elements, nn.Parameter(getattr(neutral, of_elements).detach()[rows]))
            own[name].__class__, own[name].long_range = _WITH[type(own[name])], layer
    target.__class__ = _LONG_RANGE[type(target)]
    return target


def without_long_range(model: MACE) -> MACE:
    """Make a copy of a model without its long range, with the present weights.

    Args:
        model: A model made by :func:`add_long_range`. It stays as it is.
    """
    plain = copy.deepcopy(model)
    kinds = {own: kind for kind, own in (_WITH | _LONG_RANGE).items()}
    for module in plain.modules():
        if type(module) in kinds:
            module.__class__ = kinds[type(module)]
            if isinstance(getattr(module, "long_range", None), torch.nn.Module):
                del module.long_range
    return plain
