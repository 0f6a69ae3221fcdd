"""Checks of arguments, which all modules share. Errors name the argument, the value, and what is allowed."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from .torch_state import is_autocast, is_mapped, is_readable, is_traced, read

_Made = TypeVar("_Made", bound=Callable[..., Any])


class Kind(NamedTuple):
    """A kind of argument, as the metadata of an annotation: its name for errors, and a test of values."""

    name: str
    fits: Callable[[Any], bool]


def arguments(made: _Made) -> _Made:
    """Decorate a class or a function: raise ValueError for an argument of another kind than its annotation, which may
    be :class:`Annotated` with a :class:`Kind`.

    NumPy numbers among arguments become Python numbers, also inside tuples, lists and dictionaries: saved settings and
    compilers support Python numbers only."""
    function: Callable[..., Any] = cast(Any, made).__init__ if isinstance(made, type) else made
    names = list(inspect.signature(function).parameters)

    @functools.cache
    def kinds() -> dict[str, Kind]:
        hints = get_type_hints(function, include_extras=True)
        return {name: _kind(hint) for name, hint in hints.items() if name in names}

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        if is_traced():  # compilers trace no NumPy numbers
            return function(*arguments, **named)
        arguments, named = tuple(map(_python_number, arguments)), _python_number(named)
        for name, value in (*zip(names, arguments, strict=False), *named.items()):
            if name in kinds():
                check(kinds()[name], **{name: value})
        return function(*arguments, **named)

    if not isinstance(made, type):
        return cast(_Made, checked)
    cast(Any, made).__init__ = checked
    return made


def arguments_of(base: type, *without: str) -> Callable[[_Made], _Made]:
    """Decorate a class that passes ``**arguments`` on: it shows the keyword-only arguments of another class, except
    some, as its own. An argument of both has the annotation and the default of the decorated class, whose own arguments
    are checked as :func:`arguments` does."""

    def decorate(made: Any) -> Any:
        if "__init__" in vars(made):
            arguments(made)
        constructor = made.__init__
        others, own = (inspect.signature(kind.__init__).parameters.values() for kind in (cast(Any, base), made))
        named = {p.name: p for p in (*others, *own) if p.kind is p.KEYWORD_ONLY and p.name not in without}
        first = {p.name: p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD}
        required = [p.name for p in named.values() if p.default is p.empty]

        @functools.wraps(constructor)
        def shown(*arguments: Any, **named: Any) -> None:
            for name in required:
                if name not in named:
                    raise TypeError(f"{type(arguments[0]).__name__}() needs the keyword argument {name!r}")
            constructor(*arguments, **named)

        shown.__signature__ = inspect.Signature([*{**first, **named, **first}.values()])  # type: ignore[attr-defined]
        made.__init__ = shown
        return made

    return decorate


def check(kind: Kind, **arguments: Any) -> None:
    """Raise ValueError unless every argument is of a kind."""
    for name, value in arguments.items():
        if not kind.fits(value):
            raise ValueError(f"{name} must be {kind.name}, got {_shown(value)}")


def refuse_unknown_arguments(public: Iterable[Any]) -> None:
    """Let the constructors of public classes refuse unknown keywords with an error that names the class and its
    arguments. Python's own error names the class that defines the constructor, which may be private."""
    for made in public:
        known = _known_arguments(made) if isinstance(made, type) else None
        if known is not None:
            made.__init__ = _refusing(made, made.__init__, known)


def _known_arguments(made: Any) -> list[str] | None:
    """The arguments of a class. A constructor with ``**kwargs`` passes them on to the next class; ``None`` if all
    constructors do."""
    known: list[str] = []
    for kind in made.__mro__:
        if "__init__" in vars(kind):
            _, *parameters = inspect.signature(kind.__init__).parameters.values()
            known += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                return known
    return None


def _refusing(made: Any, constructor: Callable[..., None], known: list[str]) -> Callable[..., None]:
    """A constructor that refuses unknown keywords. ``old_arguments`` of a class says what to write for old ones."""

    @functools.wraps(constructor)
    def checked(*arguments: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                nearest, old = _nearest(name, known), getattr(made, "old_arguments", {}).get(name)
                hint = f"; {old}." if old else f"; did you mean {nearest[0]!r}?" if nearest else "."
                raise TypeError(
                    f"{made.__name__}() got an unexpected keyword argument {name!r}{hint} Its arguments are "
                    f"{', '.join(known)}"
                )
        constructor(*arguments, **named)

    return checked


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """The argument that has all words of a name, or whose words are all in the name, or that is spelled nearly so."""
    words = set(name.split("_"))
    alike = [x for x in known if words.issubset(x.split("_")) or words.issuperset(x.split("_"))]
    return difflib.get_close_matches(name, alike or known, 1, 0.0 if alike else 0.8)


def _python_number(x: Any) -> Any:
    if type(x) in (tuple, list):
        return type(x)(map(_python_number, x))
    if type(x) is dict:
        return {name: _python_number(value) for name, value in x.items()}
    if isinstance(x, Integral):
        return x if isinstance(x, int) else int(x)
    if isinstance(x, Real):
        return float(x)
    return bool(x) if type(x).__module__ == "numpy" and type(x).__name__ in ("bool", "bool_") else x


def _shown(x: Any) -> str:
    """A value in an error, or a description of it if its text is long."""
    text = described(x) if isinstance(x, Tensor) else repr(x)
    return text if len(text) < 100 else type(x).__name__


def _kind(hint: Any) -> Kind:
    """The kind of an annotation."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return hint.__metadata__[0]
    if origin in (Union, UnionType):
        options = [_kind(option) for option in inner]
        *names, last = sorted((kind.name for kind in options), key=lambda name: name != "None")
        return Kind(f"{', '.join(names)} or {last}", lambda x: any(kind.fits(x) for kind in options))
    if origin is Literal:
        return Kind(" or ".join(map(repr, inner)), lambda x: isinstance(x, str) and x in inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = _kind(inner[1])
        return Kind(f"a dictionary{_of(value)}", lambda x: isinstance(x, Mapping) and all(map(value.fits, x.values())))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        item, count = _kind(inner[0]), len(inner) if origin is tuple and inner[-1] is not ... else None
        return Kind(
            f"a tuple{_of(item, count)}",
            lambda x: _listed(x) and count in (None, len(x)) and all(map(item.fits, x)),
        )
    if isinstance(hint, type):
        return Kind(f"{'an' if hint.__name__[0] in 'AEIOU' else 'a'} {hint.__name__}", lambda x: isinstance(x, hint))
    return _ANY


def _of(kind: Kind, count: int | None = None) -> str:
    """Items of a kind, for the name of a list: "a positive integer" gives " of positive integers"."""
    return "" if kind is _ANY else f" of {f'{count} ' if count else ''}{kind.name.split(' ', 1)[1]}s"


def _whole(x: object) -> bool:
    """True if x is an integer of Python, numpy or a compiler, and no bool."""
    return isinstance(x, (int, torch.SymInt, Integral)) and not isinstance(x, bool)


def _real(x: object) -> bool:
    return isinstance(x, (int, float, Real)) and not isinstance(x, bool)


def _listed(x: object) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def _number(name: str, fits: Callable[[Any], bool]) -> Kind:
    """A kind of finite numbers."""
    return Kind(name, lambda x: _real(x) and -math.inf < x < math.inf and fits(x))


_COUNT = Kind("a positive integer", lambda x: _whole(x) and x >= 1)
_WHOLE = Kind("a non-negative integer", lambda x: _whole(x) and x >= 0)
_POSITIVE = _number("a positive number", lambda x: x > 0)
_NOT_NEGATIVE = _number("a finite number of at least 0", lambda x: x >= 0)
_PROBABILITY = _number("a number in [0, 1)", lambda x: 0 <= x < 1)

# annotations of arguments
Count = Annotated[int, _COUNT]
Whole = Annotated[int, _WHOLE]
LazyCount = Annotated[int, Kind("a positive integer or -1", lambda x: _COUNT.fits(x) or (_whole(x) and x == -1))]
Positive = Annotated[float, _POSITIVE]
NotNegative = Annotated[float, _NOT_NEGATIVE]
Probability = Annotated[float, _PROBABILITY]

# checks of named values outside of constructors
positive, not_negative = functools.partial(check, _COUNT), functools.partial(check, _NOT_NEGATIVE)
positive_number = functools.partial(check, _POSITIVE)

_ANY = Kind("anything", lambda x: True)
_PLAIN = {
    Any: _ANY, int: Kind("an integer", _whole), float: _number("a finite number", lambda x: True),
    bool: Kind("True or False", lambda x: isinstance(x, bool)), str: Kind("a string", lambda x: isinstance(x, str)),
    type(None): Kind("None", lambda x: x is None),
}  # fmt: skip


def choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise ValueError unless value is one of the allowed names."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")


def features(x: Tensor, channels: int, dim: int, elements: int | None, reference: Tensor, name: str = "input") -> None:
    """Raise ValueError unless x is (B, channels, [elements,] *spatial) in ``reference``'s dtype, on its device."""
    axes = (channels,) if elements is None else (channels, elements)
    tensor = isinstance(x, Tensor)
    if not tensor or x.ndim != 1 + len(axes) + dim or tuple(x.shape[1 : 1 + len(axes)]) != axes:
        layout = f"({', '.join(['B', *map(str, axes), {1: 'N', 2: 'H, W', 3: 'D, H, W'}[dim]])})"
        wanted = f"have shape {layout}" if tensor else f"be a torch.Tensor of shape {layout}"
        raise ValueError(f"{name} must {wanted}, got {shape_of(x)}")
    if min(x.shape[1 + len(axes) :]) < 1:
        raise ValueError(f"{name} must have at least one pixel on every spatial axis, got {tuple(x.shape)}")
    same_kind(x, reference, name)


def same_kind(x: Tensor, reference: Tensor, name: str = "input") -> None:
    """Raise ValueError unless x is floating point, in ``reference``'s dtype, on its device, and passes
    :func:`half_precision`."""
    if not x.is_floating_point():
        raise ValueError(f"{name} must be a floating point tensor, got {x.dtype}")
    if x.device != reference.device:
        raise ValueError(f"{name} must be on {reference.device} as the parameters are, got {x.device}")
    if x.dtype != reference.dtype and (not is_autocast(x) or x.dtype == torch.float64):  # which autocast leaves
        raise ValueError(f"{name} must be {reference.dtype} as the parameters are, got {x.dtype}")
    half_precision(**{name: x})


def half_precision(**tensors: Tensor) -> None:
    """Raise ValueError for half precision on the CPU outside autocast: FFTs do not support it, and geometry loses
    accuracy."""
    for name, x in tensors.items():
        half = x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu"
        if half and not is_autocast(x):
            raise ValueError(f"{name} must be float32 or float64 on the CPU, or under torch.autocast, got {x.dtype}")


def full_parameters(reference: Tensor) -> None:
    """Raise ValueError unless parameters are float32 or float64."""
    if reference.dtype not in (torch.float32, torch.float64):
        wanted = "float32 or float64 (torch.autocast does mixed precision)"
        raise ValueError(f"parameters must be {wanted}, got {reference.dtype}")


def of_points(x: Tensor, reference: Tensor, name: str = "input") -> None:
    """Raise ValueError unless features x of points have the dtype and device of the parameter ``reference``, float32 or
    float64."""
    full_parameters(reference)
    same_kind(x, reference, name)


def shape_of(x: object) -> str:
    """The shape of a value, or its type if it is no tensor, for an error."""
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def described(x: object) -> str:
    """A short description of a value, for an error."""
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}" if isinstance(x, Tensor) else type(x).__name__


_FLOATING = torch.float64, torch.float32, torch.float16, torch.bfloat16
INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8
_DTYPES: dict[Any, tuple[torch.dtype, ...]] = {"floating point": _FLOATING, "real numbers": _FLOATING + INTEGERS}


def tensor(
    name: str, value: Any, dtype: torch.dtype | str, shapes: Sequence[tuple], device: torch.device | None,
    note: str = "",
) -> None:  # fmt: skip
    """Raise ValueError unless value is a tensor of this kind, of one of these shapes, on this device."""
    dtypes = _DTYPES.get(dtype, (dtype,))
    if not isinstance(value, Tensor) or value.dtype not in dtypes or not is_one_of(value.shape, shapes):
        wanted = f"{str(dtype).removeprefix('torch.')} of shape {_any_of(shapes)}{note}"
        raise ValueError(f"{name} must be {wanted}, got {described(value)}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} as the input is, got {value.device}")


def is_one_of(shape: Sequence[int], shapes: Sequence[tuple]) -> bool:
    """True if a shape is in a list of shapes. While compiling, a tuple of symbols is never found in a list of tuples,
    but is equal to one; tuples of other lengths are not compared, as this would fix the sizes of exported programs."""
    for other in shapes:
        equal = len(shape) == len(other) and tuple(shape) == other
        if equal:
            return True
    return False


def _any_of(shapes: Sequence[tuple]) -> str:
    """Shapes as text for an error, for example (2 or 1, 5, 7)."""
    if len(shapes) == 1 or len({*map(len, shapes)}) > 1:
        return " or ".join(dict.fromkeys(str(tuple(map(int, shape))) for shape in shapes))
    sizes = (" or ".join(dict.fromkeys(str(int(n)) for n in axis)) for axis in zip(*shapes, strict=True))
    return f"({', '.join(sizes)})"


def passes(test: Callable[[], Any], *tensors: Tensor) -> bool:
    """False if reading each of the tensors costs nothing, and the test of their values returns false."""
    return not is_readable(*tensors) or bool(test())


def finite(name: str, value: Tensor) -> None:
    """Raise ValueError for values that are not finite, where they are read."""
    if not passes(lambda: value.isfinite().all(), value):
        raise ValueError(f"{name} must be finite, got NaN or infinity")


def lengths(value: Tensor | None, count: int, longest: int, device: torch.device) -> None:
    """Raise ValueError unless value is None or the lengths (count,) of sequences that are padded to ``longest``."""
    if value is None:
        return
    tensor("lengths", value, torch.int64, [(count,)], device)
    in_range("lengths", value, longest)


def in_range(name: str, value: Tensor, highest: int | None, note: str = "") -> None:
    """Raise ValueError unless values, where they are read, are in [0, highest], or not negative without ``highest``."""
    if is_readable(value) and value.numel():
        low, high = map(int, value.aminmax())
        if low < 0 or (highest is not None and high > highest):
            wanted = "at least 0" if highest is None else f"in [0, {highest}]"
            raise ValueError(f"{name} must be {wanted}{note}, got {low} to {high}")


def pixel_mask(
    value: Tensor | None, batch_size: int, spatial: Sequence[int], device: torch.device, name: str = "mask"
) -> None:
    """Raise ValueError unless value is None or a boolean mask (B or 1, *spatial) of images on this device."""
    if value is not None:
        shapes = [(batch_size, *spatial), (1, *spatial)]
        tensor(name, value, torch.bool, shapes, device, ", true where there are pixels")


def must_hold(condition: Tensor, message: str, detail: Callable[[], str] = str) -> None:
    """Raise ValueError unless a condition holds; the text that ``detail`` returns is added to the message.

    If reading the condition would wait for the device, the device raises a RuntimeError with the message instead.
    Under ``torch.vmap`` there is no check.
    """
    holds = read(condition)
    if holds is False:
        raise ValueError(message + detail())
    if holds is None and not is_mapped(condition):
        torch._assert_async(condition, message)


def batch_index(batch: Tensor | None, batch_size: int | None, x: Tensor, known_sorted: bool = False) -> int:
    """Return the number of graphs. Raise ValueError unless ``batch`` is None (one graph) or a sorted graph index of the
    nodes x."""
    if batch_size is not None and not (batch_size == 0 and not x.shape[0]):
        positive(batch_size=batch_size)
    if batch is None:
        if batch_size not in (None, 1):
            raise ValueError(f"batch must be given where batch_size is {batch_size}, got None")
        return 1
    tensor("batch", batch, torch.int64, [(x.shape[0],)], x.device)
    if not known_sorted:
        must_hold((batch[1:] >= batch[:-1]).all(), "batch must be sorted, got a graph index that decreases")
    if batch_size is None and is_mapped(batch):
        raise ValueError("batch_size must be given where torch.vmap goes over batch, got None")
    if is_readable(batch):
        ends = batch[:: max(1, len(batch) - 1)]
        in_range("batch", ends, None if batch_size is None else batch_size - 1)
    if batch_size is not None:
        return batch_size
    return int(batch[-1]) + 1 if x.shape[0] else 0


def positions(pos: Tensor | None, shape: tuple[int, ...], x: Tensor, why: str) -> Tensor:
    """Return pos, integers as int64. Raise ValueError unless pos has this shape, is on the device of x, and holds real
    numbers; if pos is None, the error says ``why`` it is needed."""
    if pos is None:
        raise ValueError(f"pos must be given, of shape {shape}: {why}; got None")
    tensor("pos", pos, "real numbers", [shape], x.device)
    return pos if pos.is_floating_point() else pos.long()  # small integers would wrap around


_ROUNDING = 0.01  # largest rounding of positions, in units of a length that matters


def exact_positions(pos: Tensor, **length: float) -> None:
    """Raise ValueError if positions are not finite, or are rounded by a large part of a named ``length``, if given."""
    if not pos.is_floating_point() or not is_readable(pos):
        return
    size = float(pos.detach().abs().max()) if pos.numel() else 0.0  # NaN if any is
    if not size < math.inf:
        raise ValueError("pos must be finite, got NaN or infinity; leave out nodes without a position, or mask them")
    rounding = torch.finfo(pos.dtype).eps * size
    for name, unit in length.items():
        if rounding > _ROUNDING * unit:
            raise ValueError(
                f"pos must be float64 so far from the origin: {pos.dtype} rounds {size:.3g} by up to {rounding:.2g}, "
                f"more than a hundredth of {name}, {unit:g}; convert before pos is rounded (x may stay as it is)"
            )
