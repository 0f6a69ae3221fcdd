"""A module that draws the directions of random features, which are determined by a seed and the number of the draw."""

from __future__ import annotations

import functools
import math
import warnings
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ... import checks
from ...functional.performer.linear_attention import orthogonal_projection
from ...modes import goes_through, is_ordinary, ordinary_tensors
from ...tables import Tables
from ..modules import whole_numbers

if TYPE_CHECKING:
    from jaxtyping import Float

_BYTES = 5  # seeds are below 2^40
_CALLS = 256  # calls whose draws are kept for checkpoints


def draw_directions(seed: int, number: int, num_random_features: int, dim: int) -> Float[Tensor, "features dim"]:
    """The directions of draw ``number`` of a seed, in float64 on the CPU. They are equal on all machines and ranks."""
    generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + number) % 2**63)
    return orthogonal_projection(num_random_features, dim, generator)


def digits_of(seed: int) -> Float[Tensor, " digits"]:
    """A seed as small whole numbers, its bytes and a checksum, so that averages of equal seeds are exact."""
    text = seed.to_bytes(_BYTES, "big")
    return torch.tensor([*text, *zlib.crc32(text).to_bytes(4, "big")], dtype=torch.float32, device="cpu")


def seed_of(digits: Float[Tensor, " digits"]) -> int | None:
    """The seed of these digits; ``None`` for an average of different seeds, and for uninitialised memory."""
    numbers = whole_numbers(digits.nan_to_num(-1.0))
    if not all(0 <= n < 256 for n in numbers):
        return None
    seed = int.from_bytes(bytes(numbers[:_BYTES]), "big")
    return seed if numbers == digits_of(seed).tolist() else None


def _new_seed(generator: torch.Generator | None = None) -> int:
    return int(torch.randint(256**_BYTES, (), generator=generator, device="cpu"))


def _advance_generator() -> None:
    with ordinary_tensors():
        torch.rand((), device="cpu")


@torch.library.custom_op("tg_equiattn::random_directions", mutates_args=())
def _directions_of(digits: Tensor, number: int, num_random_features: int, dim: int) -> Tensor:
    """Directions of a seed, from its digits. ``torch.vmap`` may batch the digits, as in an ensemble of modules."""
    seed = seed_of(digits)
    if seed is None:
        raise RuntimeError("seed_digits must be stacked from those of modules, got other numbers")
    return draw_directions(seed, number, num_random_features, dim).to(digits.device)


@_directions_of.register_fake
def _(digits, number, num_random_features, dim):
    return digits.new_empty(num_random_features, dim, dtype=torch.float64)


@_directions_of.register_vmap
def _(info, in_dims, digits, number, num_random_features, dim):
    return torch.stack([_directions_of(x, number, num_random_features, dim) for x in digits.unbind(in_dims[0])]), 0


@torch.library.custom_op("tg_equiattn::redraw_when_due", mutates_args=("directions", "clock"))
def _redraw_when_due(directions: Tensor, clock: Tensor, seed: int, interval: int) -> None:
    """Count a training step in a compiled graph. After every ``interval`` steps, draw again in place."""
    clock[0] += 1
    if int(clock[0]) > interval:
        clock[0] = 1
        clock[1] += 1
        directions.copy_(draw_directions(seed, int(clock[1]), *directions.shape))


class RandomFeatures(nn.Module):
    r"""Directions of random features, ``(num_random_features, dim)``, orthogonal in blocks.

    Directions are determined by a seed and the number of the draw. They are not a buffer, so averages of weights and
    buffers do not change them. The seed is a buffer of small whole numbers, ``seed_digits``, which
    ``DistributedDataParallel`` makes equal on all ranks. The extra state holds the number of training steps since the
    last draw, the number of the draw, and the number of directions, which is compared on loading.

    Args:
        num_random_features: Number of directions m.
        dim: Width d of queries and keys.
        redraw_interval: Number of training steps between draws. Default ``None``: only :meth:`redraw_features` draws.
        paired: Whether the second half of the directions is the negative of the first half. The estimate is then still
            unbiased, and its errors of odd order cancel (Choromanski et al. 2021, Lemma 1). Default ``False``.

    Raises:
        ValueError: If ``num_random_features`` or ``redraw_interval`` is not a positive integer.
    """

    seed_digits: Tensor
    drawn: Tables

    def __init__(
        self, num_random_features: int, dim: int, redraw_interval: int | None = None, *, paired: bool = False
    ) -> None:
        super().__init__()
        if redraw_interval is not None:
            checks.positive(redraw_interval=redraw_interval)
        self.dim, self.redraw_interval, self.paired = dim, redraw_interval, paired
        self._set_number(num_random_features)
        with ordinary_tensors():
            self._seed = _new_seed()
            self._clock = torch.zeros(2, dtype=torch.int64, device="cpu")  # steps since the last draw, number of it
        self._seen = (0, 0)  # the digits that were read
        self._draw_of_drawn: tuple[int, int] | None = None
        self._calls: dict[int, tuple[tuple[int, int], bool]] = {}  # see _draw_of_call
        self.register_buffer("seed_digits", torch.empty(_BYTES + 4))
        self._write_digits()
        self._draw()

    @property
    def seed(self) -> int:
        """The seed that all draws follow from."""
        self._read_digits()
        return self._seed

    def redraw_features(self, generator: torch.Generator | None = None, num_random_features: int | None = None) -> None:
        """Draw new directions; :class:`DrawsFeatures` describes the arguments. Directions of the same number are
        written over the old ones, so that a captured graph reads them."""
        same = num_random_features in (None, self.num_random_features)
        if num_random_features is not None:
            self._set_number(num_random_features)
        if generator is None:
            self._count_draw()
        else:
            self._begin(_new_seed(generator))
        _advance_generator()
        self._draw(in_place=same)

    def reset_parameters(self) -> None:
        """Take a new seed from torch's generator, and start counting steps and draws again."""
        self._begin(_new_seed())

    def forward(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Count a training step, and return the directions on a device in a dtype."""
        if torch.compiler.is_compiling() and self.training and self.redraw_interval is not None:
            rows = self._drawn_rows(device, dtype)
            _redraw_when_due(rows, self._clock, self._seed, self.redraw_interval)
            return self._with_opposites(rows)
        if self.training and not torch.compiler.is_compiling():
            draw = self._draw_of_call()
            if draw != (self._seed, self._number()):
                return self._with_opposites(draw_directions(*draw, self._rows, self.dim).to(device, dtype))
        return self.directions(device, dtype)

    def _draw_of_call(self) -> tuple[int, int]:
        """The seed and the number of the draw for a call in training, which counts as a step.

        A checkpoint repeats calls in backward, where draws may have followed. As it restores the state of torch's
        generator, this state tells which call is repeated. So the state changes before every draw.
        """
        with ordinary_tensors():
            state = zlib.crc32(torch.get_rng_state().numpy().data)
        if torch._C._current_graph_task_id() != -1 and state in self._calls:  # repeated in backward
            draw, last = self._calls[state]
        else:
            last = self.redraw_interval is not None and self._count_step(self.redraw_interval)
            self._read_digits()
            draw = self._seed, self._number()
            self._calls.pop(state, None)
            self._calls[state] = draw, last
            if len(self._calls) > _CALLS:
                del self._calls[next(iter(self._calls))]
        if last:
            _advance_generator()
        return draw

    def directions(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The directions, without counting a step."""
        return self._with_opposites(self._drawn_rows(device, dtype))

    def _with_opposites(self, rows: Float[Tensor, "rows dim"]) -> Float[Tensor, "features dim"]:
        return torch.cat([rows, -rows])[: self.num_random_features] if self.paired else rows

    def _drawn_rows(self, device: torch.device, dtype: torch.dtype) -> Float[Tensor, "rows dim"]:
        if goes_through(self.seed_digits):
            found = _directions_of(self.seed_digits, self._number(), self._rows, self.dim)
            return found.to(device, dtype)
        self._prepare(device, dtype)
        return self.drawn(device, dtype)

    def _prepare(self, device: torch.device, dtype: torch.dtype) -> None:
        """Bring the directions up to date, before each call and once while torch.compile traces."""
        self._read_digits()
        self._draw()
        self.drawn(device, dtype)

    _prepare._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _set_number(self, num_random_features: int) -> None:
        checks.positive(num_random_features=num_random_features)
        self.num_random_features = num_random_features
        self._rows = (num_random_features + 1) // 2 if self.paired else num_random_features

    def _number(self) -> int:
        """The number of the draw."""
        with ordinary_tensors():
            return int(self._clock[1])

    _number._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _draw(self, in_place: bool = False) -> None:
        """Draw directions if the seed or the number of the draw has changed. A backward pass may still need the old
        ones, so they are written over only if ``in_place``."""
        draw = self._seed, self._number()
        if draw != self._draw_of_drawn:
            build = functools.partial(draw_directions, *draw, self._rows, self.dim)
            if in_place:
                self.drawn.rebuild(build)
            else:
                self.drawn = Tables(build)
            self._draw_of_drawn = draw

    def _count_draw(self) -> None:
        """Go on to the next draw of the seed, and start counting steps again."""
        self._read_digits()
        self._clock = self._clock + torch.tensor([0, 1], device="cpu")
        self._clock[0] = 0

    def _begin(self, seed: int) -> None:
        """Start counting steps and draws of a seed."""
        self._seed = seed
        self._clock = torch.zeros_like(self._clock)
        self._write_digits()

    @torch.no_grad()
    def _write_digits(self) -> None:
        if is_ordinary(self.seed_digits):
            self.seed_digits.copy_(digits_of(self._seed))
            self._seen = _write_of(self.seed_digits)

    def _read_digits(self) -> None:
        """Read the seed from its digits if they have been written to or replaced, which waits for an accelerator."""
        digits, now = self.seed_digits, _write_of(self.seed_digits)
        if now == self._seen or not is_ordinary(digits):
            return
        self._seen, seed = now, seed_of(digits)
        if seed is None:
            warnings.warn(
                f"seed_digits of {type(self).__name__} are no seed, as after averages of modules whose seeds differ: "
                "the module keeps its own seed",
                stacklevel=2,
            )
            self._write_digits()
        else:
            self._seed = seed

    def _count_step(self, interval: int) -> bool:
        """Count a training step. The result is true if directions are drawn for the next one."""
        with ordinary_tensors():
            if int(self._clock[0]) >= interval:
                if goes_through(self.seed_digits):
                    raise RuntimeError(
                        "random features cannot be redrawn while a transform of torch.func goes through seed_digits: "
                        "call eval(), or leave redraw_interval at None and call redraw_features() outside"
                    )
                self._count_draw()
            self._clock[0] += 1
            return int(self._clock[0]) >= interval

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomFeatures:
        self._read_digits()
        super()._apply(fn, recurse)
        self._write_digits()  # to_empty leaves other numbers
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._read_digits()
        self._draw(in_place=True)

    def get_extra_state(self) -> Tensor:
        return torch.cat([self._clock, torch.tensor([self.num_random_features], device="cpu")])

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the stored number of directions is another one than that of this module."""
        steps, draw, number = whole_numbers(state)
        if number != self.num_random_features:
            raise ValueError(
                f"state_dict must come from a layer with num_random_features={self.num_random_features}, like this "
                f"one, got {number}; call redraw_features(num_random_features={number}) before loading. To change the "
                "number of a trained layer, call redraw_features after loading"
            )
        self._clock = torch.tensor([steps, draw], device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        self._draw()  # a compiled graph has drawn in place
        return self.__dict__.copy()

    def extra_repr(self) -> str:
        return f"{self.num_random_features}, {self.dim}, redraw_interval={self.redraw_interval}"


class FeatureVariance(nn.Module):
    """The variance of the directions of random features, a learned number for each head, greater than 1/2.

    The estimate is unbiased for every variance (see :func:`softmax_features`). A small variance has a small error for
    short queries and keys, and a large variance for long ones, whose attention is sharp.

    With up to 4 channels it starts at 12: training then finds sharp attention, which it does not find from small
    variances (see docs/graph_settings.md). With more channels, features cannot follow sharp attention with any
    variance. The variance then starts where the error of a new layer is smallest, for an input of unit variance, with
    which |q|^2 + |k|^2 is 2 sqrt(dim) / 3.

    Source: Likhosherstov et al., Chefs' random tables (2022), FAVOR++, whose A is (1 - s) / 4 of the variance s.
    """

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.log = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        size = 2 * self.dim**0.5 / 3
        rho = (math.sqrt((2 * size + self.dim) ** 2 + 8 * self.dim * size) - 2 * size - self.dim) / (4 * size)
        start = 12.0 if self.dim <= 4 else (1 + 1 / rho) / 2
        nn.init.constant_(self.log, math.log(start - 0.5))

    def forward(self) -> Float[Tensor, " heads"]:
        return 0.5 + self.log.exp()


class DrawsFeatures(nn.Module):
    """A base class of modules that contain :class:`RandomFeatures`."""

    def redraw_features(self, generator: torch.Generator | None = None, num_random_features: int | None = None) -> None:
        """Draw new random features in every layer that has them. Call this method between training steps.

        Args:
            generator: CPU generator that draws new seeds; give every rank an equal one. Default ``None``: the next draw
                of each layer's own seed.
            num_random_features: Number of random features of each layer from now on. More are more exact and slower.
                Default ``None``: as many as before. A checkpoint that is saved afterwards has the new number.
        """
        for module in self.modules():
            if isinstance(module, RandomFeatures):
                module.redraw_features(generator, num_random_features)


def _write_of(x: Tensor) -> tuple[int, int]:
    """A mark that changes if the tensor is replaced or written to."""
    return id(x), 0 if x.is_inference() else x._version
