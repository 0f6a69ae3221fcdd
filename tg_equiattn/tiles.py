"""Formulas computed tile by tile, and again in backward: nothing but the tensors they are given is kept.

A function that is computed again reads the tensors it is given and nothing else. Between forward and backward a module
may get other weights, and a generator of random numbers moves on. So the function of a tile is a function of a module
file, and all that it gets besides tensors is frozen: numbers, names, and records of both. A module is given as its
parameters and buffers. Such functions draw no random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from .shapes import Shaped
from .torch_state import by_form, full_precision, is_eager, is_transformed, is_whole

WHOLE = ...  # the index of a tensor that is not cut
_FROZEN = (bool, int, float, complex, str, type(None), type(...), slice, range, type, torch.dtype, torch.device)

# glibc returns freed memory to the system, page by page, beyond twice the largest block that was freed before. To get
# the memory of tiles back in every call takes up to a fifth of a training step. This block is never written to.
torch.empty(24 << 20, dtype=torch.uint8, device="cpu")


class Tile(NamedTuple):
    """A part of a computation.

    Attributes:
        settings: the first argument of the function, without tensors.
        cut: an index for each tensor: the part of it that the function gets.
        place: an index for each result: where it is added.
    """

    settings: Any
    cut: Sequence[Any]
    place: Sequence[Any]


class Shape(NamedTuple):
    """The shape of a sum over tiles; ``once`` if each number of it is a result of exactly one tile."""

    size: Sequence[int]
    once: bool = False


def tiled(
    function: Callable[..., Any], tiles: Sequence[Tile], tensors: Sequence[Tensor | None], shapes: Sequence[Shape],
    once: Sequence[bool] | None = None, known: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results of all tiles, added up, without autocast. Derivatives of all orders are computed tile by tile, too.

    Args:
        function: a function of a module file. It gets the settings of a tile and parts of the tensors, and returns a
            tensor or a tuple of tensors.
        tiles: the tiles. If a single tile has only ``WHOLE`` places, its results are returned as they are.
        tensors: the tensors; ``None`` stays ``None``.
        shapes: the shape of each sum.
        once: true for each tensor whose numbers are each in exactly one tile. The default is false for all.
        known: keep the sums for backward. The function then gets its own results as ``known`` where only its first
            derivatives are wanted, which may save work.

    Raises:
        TypeError: if the function or the settings could read what they are not given.
    """
    if is_eager():
        for settings in {id(tile.settings): tile.settings for tile in tiles}.values():
            try:
                _check_settings(function, settings)
            except TypeError:  # or they have no hash
                _check_settings.__wrapped__(function, settings)
    once = (False,) * len(tensors) if once is None else tuple(once)
    return _run(Call(function, tuple(tiles), tuple(shapes), once, known), *tensors)


def gradients(
    call: Call, tensors: Sequence[Tensor | None], wanted: Sequence[bool], grads: Sequence[Tensor],
    sums: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the wanted tensors, tile by tile.

    Args:
        call: the arguments of :func:`tiled`.
        tensors: the tensors that it got.
        wanted: true for each tensor whose gradient is returned.
        grads: the gradients of the sums.
        sums: the sums, if the function wants to know them.
    """
    pulled = []
    for tile in call.tiles:
        to_inputs = tuple(cut for cut, want in zip(tile.cut, wanted, strict=True) if want)
        of_grads = (*tile.place, *(WHOLE,) * (len(grads) - len(tile.place)))
        settings = call.function, tile.settings, tuple(wanted), len(grads)
        pulled.append(Tile(settings, (*tile.cut, *of_grads, *of_grads[: len(sums)]), to_inputs))
    shapes = [Shape(x.shape, one) for x, one, w in zip(tensors, call.once, wanted, strict=True) if w]  # type: ignore
    alone = tuple(shape.once for shape in call.shapes) or (True,) * len(grads)
    once = (*call.once, *alone, *alone[: len(sums)])
    return _run(Call(_pullback, tuple(pulled), tuple(shapes), once), *tensors, *grads, *sums)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)`` with a checkpoint: only the tensors among the arguments are kept for backward.

    Arguments are tensors, modules, frozen settings, and tuples and frozen dataclasses of these. A module stands for its
    parameters and buffers: in backward it has those of the call. Where derivatives are not recorded, and in transforms
    and compilers, this is a plain call.
    """
    if not is_eager():
        return function(*arguments)
    tensors: list[Tensor] = []
    modules: list[nn.Module] = []
    call = _taken((function, arguments), tensors, modules)
    if not torch.is_grad_enabled():
        return function(*arguments)
    named = ((n, [*x.named_parameters(), *x.named_buffers()]) for n, x in enumerate(modules))
    weights = {f"{n}.{name}": x for n, each in named for name, x in each}
    tensors += weights.values()
    names, versions = tuple(weights), _versions(tensors)

    def again(*tensors: Tensor) -> Any:  # holds no tensor itself, so that those of a checkpoint around it are not kept
        if _versions(tensors) != versions:
            raise RuntimeError(
                "a tensor has been written to between forward and backward, which needs its old values: write to "
                "weights and inputs after backward"
            )
        rest = iter(tensors)
        function, arguments = call(rest)
        if not modules:
            return function(*arguments)
        weights = dict(zip(names, rest, strict=True))
        return torch.func.functional_call(_Modules(modules), weights, (function, arguments))

    return torch.utils.checkpoint.checkpoint(again, *tensors, use_reentrant=False, preserve_rng_state=False)


def map_tiles(
    function: Callable[..., Tensor], step: int, tensors: Iterable[Shaped[Tensor, "*before nodes *after"]], *others: Any,
    dim: int = 0,
) -> Shaped[Tensor, "*before nodes *after"]:  # fmt: skip
    """Apply a function of nodes, along an axis, to ``step`` nodes at a time, each time through :func:`recomputed`. The
    function gets parts of the tensors, and all of the ``others``."""
    tensors = tuple(tensors)
    nodes = tensors[0].shape[dim]
    if is_whole(tensors[0]) or nodes <= step:
        return function(*tensors, *others)
    parts = zip(*(x.split(step, dim) for x in tensors), strict=True)
    if torch.is_grad_enabled() or not is_eager():
        return torch.cat([recomputed(function, *part, *others) for part in parts], dim)
    first = function(*next(parts), *others)
    size = list(first.shape)
    size[dim] = nodes
    out = first.new_empty(size)
    tiles = out.split(step, dim)
    tiles[0].copy_(first)
    for tile, part in zip(tiles[1:], parts, strict=True):
        tile.copy_(function(*part, *others))
    return out


def joined(parts: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join the results of tiles. Often there is one, which is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


class Call(NamedTuple):
    """The arguments of :func:`tiled` without the tensors."""

    function: Callable[..., Any]
    tiles: tuple[Tile, ...]
    shapes: tuple[Shape, ...]
    once: tuple[bool, ...]
    known: bool = False


def _added(call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    sums: list[Tensor] = []
    for tile in call.tiles:
        parts = [x if x is None else _part(x, cut) for x, cut in zip(tensors, tile.cut, strict=True)]
        with full_precision(next(x.device for x in parts if x is not None)):
            results = call.function(tile.settings, *parts)
        results = (results,) if isinstance(results, Tensor) else results
        if len(call.tiles) == 1 and all(place is WHOLE for place in tile.place):
            return tuple(results)
        if not sums:
            shapes = zip(results, call.shapes, strict=True)
            sums = [(y.new_empty if shape.once else y.new_zeros)(shape.size) for y, shape in shapes]
        for total, place, y, shape in zip(sums, tile.place, results, call.shapes, strict=True):
            part = _part(total, place)
            part.copy_(y) if shape.once else part.add_(y)
    return tuple(sums)


def _part(x: Tensor, index: Any) -> Tensor:
    """x[index], or x itself if this is all of it: transforms have no rule for views of all of a tensor."""
    if index is WHOLE:
        return x
    along = zip(index if isinstance(index, tuple) else (index,), x.shape, strict=False)
    return x if all(isinstance(n, slice) and n.indices(size) == (0, size, 1) for n, size in along) else x[index]


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.call, sums = call, _added(call, *tensors)
        ctx.save_for_backward(*tensors, *(sums if call.known else ()))
        return sums

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved, wanted = ctx.saved_tensors, ctx.needs_input_grad[1:]  # torch unpacks once where it checkpoints
        tensors, sums = saved[: len(wanted)], [x.detach() for x in saved[len(wanted) :]]
        slopes = iter(gradients(ctx.call, tensors, wanted, grads, sums))
        return None, *(next(slopes) if want else None for want in wanted)


_run = by_form(_added, _Tiled.apply)


def _pullback(
    settings: tuple[Callable[..., Any], Any, tuple[bool, ...], int], *tensors: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of the wanted ones among the inputs of a tile's function, from its inputs, gradients of its results,
    and these results if they are known."""
    function, tile_settings, wanted, count = settings
    recorded, inputs, rest = torch.is_grad_enabled(), list(tensors[: len(wanted)]), tensors[len(wanted) :]
    grads, known = rest[:count], rest[count:]
    transformed = is_transformed(*grads)  # since the forward pass
    more = {"known": known} if known and not (recorded or transformed) else {}  # what is known has no derivatives
    chosen = [n for n, want in enumerate(wanted) if want]

    def results(*moving: Tensor) -> tuple[Tensor, ...]:
        for n, x in zip(chosen, moving, strict=True):
            inputs[n] = x
        out = function(tile_settings, *inputs, **more)
        return (out,) if isinstance(out, Tensor) else tuple(out)

    moving: list[Any] = [inputs[n] for n in chosen]
    if transformed:
        return torch.func.vjp(results, *moving)[1](grads)
    with torch.enable_grad():
        moving = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in moving]
        ends = [(y, grad) for y, grad in zip(results(*moving), grads, strict=True) if y.requires_grad]
        if not ends:
            return tuple(torch.zeros_like(x) for x in moving)
        outputs, slopes = zip(*ends, strict=True)
        return torch.autograd.grad(outputs, moving, slopes, create_graph=recorded, materialize_grads=True)


@functools.lru_cache(256)
def _check_settings(function: Callable[..., Any], settings: Any) -> None:
    contents: list[Any] = []
    _taken((function, settings), contents, contents)
    if contents:
        raise TypeError("settings of tiles must be frozen, got tensors among them: pass these as tensors")


class _Modules(nn.ModuleList):
    def forward(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        return function(*arguments)


def _versions(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(0 if x.is_inference() else x._version for x in tensors)


def _taken(x: Any, tensors: list[Tensor], modules: list[nn.Module]) -> Callable[[Iterator[Tensor]], Any]:
    """Move the tensors of x to a list. The result is a function that makes x of such tensors again.

    Raises:
        TypeError: if x holds anything but tensors, modules and frozen settings.
    """
    if isinstance(x, Tensor):
        tensors.append(x)
        return next
    if isinstance(x, nn.Module):
        modules.append(x)
    elif isinstance(x, tuple):
        parts, make = [_taken(y, tensors, modules) for y in x], type(x)
        if make in (tuple, torch.Size):
            return lambda rest: make([part(rest) for part in parts])
        return lambda rest: make(*(part(rest) for part in parts))
    elif dataclasses.is_dataclass(x) and not isinstance(x, type) and x.__dataclass_params__.frozen:  # type: ignore
        record = _taken(tuple(getattr(x, field.name) for field in dataclasses.fields(x)), tensors, modules)
        kind = type(x)
        return lambda rest: kind(*record(rest))
    elif not isinstance(x, _FROZEN) and not (
        isinstance(x, types.FunctionType) and x.__closure__ is None and x.__globals__.get(x.__qualname__) is x
    ):
        raise TypeError(
            "what is computed again in backward must be a function of a module file, and read nothing but tensors, "
            f"numbers and names that it is given, got {getattr(x, '__qualname__', type(x).__name__)}: pass tensors as "
            "tensors, and settings as tuples or frozen dataclasses"
        )
    return lambda rest: x
