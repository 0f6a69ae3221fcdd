"""Compilation of the regions of a model that launch the most small kernels, each by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from .group.block import GroupAttentionBlock
from .performer.pixel_model import PerformerBlock
from .vector.clifford import MultivectorMLP

_REGIONS = (MultivectorMLP, GroupAttentionBlock, PerformerBlock)


def compile_regions(
    model: nn.Module, kinds: tuple[type[nn.Module], ...] = _REGIONS, **compile_kwargs: Any
) -> nn.Module:
    """Compile the regions of a model in place, each with :meth:`torch.nn.Module.compile`.

    In eager mode on a GPU, launching kernels takes most of the time of a small model. A compiled region launches a few
    fused kernels. Regions are compiled apart from each other, so that the code between them, such as a neighbor list or
    an FFT, stays as it is and may wait for the device. Parameters, their names and ``state_dict`` stay as they are.

    Args:
        model: The model. Regions inside a region are compiled with it.
        kinds: Classes of regions. The default is Clifford MLPs, the gates of :class:`SE3HyenaOperator` among them,
            :class:`GroupAttentionBlock` and the blocks of :class:`RelativePerformer`. Add the class of a block of your
            own to compile it.
        compile_kwargs: Arguments of :func:`torch.compile`, such as ``mode`` or ``dynamic``.

    Returns:
        The same model.

    Raises:
        ValueError: if the model has no such region.

    Example:
        >>> from tg_equiattn.nn import SE3Hyena
        >>> model = compile_regions(SE3Hyena(3, 2, 0, 1, hidden_scalars=8, hidden_vectors=8, num_layers=2))
    """
    regions = _outermost(model, kinds)
    if not regions:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ValueError(
            f"model must contain a module of kinds ({names}), got {type(model).__name__} without any; name the classes "
            "to compile in kinds, or call torch.compile(model)"
        )
    for region in regions:
        region.compile(**compile_kwargs)
    return model


def _outermost(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    """The modules of these kinds that are not inside another one of them."""
    if isinstance(module, kinds):
        return [module]
    return [region for child in module.children() for region in _outermost(child, kinds)]
