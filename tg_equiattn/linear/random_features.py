"""A module that draws the directions of random features, which are determined by a seed and the number of the draw."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..modules import whole_numbers
from ..shapes import Float
from ..torch_state import (
    Cache,
    is_backward,
    is_ordinary,
    is_traced,
    is_transformed_tensor,
    may_be_checkpointed,
    ordinary_tensors,
    untraced,
)

_BYTES = 5  # seeds are below 2^40
_CALLS = 256  # calls whose draws are kept for checkpoints


def draw_directions(
    seed: int, number: int, num_random_features: int, dim: int, paired: bool = False
) -> Float[Tensor, "features dim"]:
    """The directions of draw ``number`` of a seed, in float64 on the CPU. They are equal on all machines and ranks."""
    generator = torch.Generator("cpu").manual_seed((seed * 1_000_003 + number) % 2**63)
    if not paired:
        return _orthogonal(num_random_features, dim, generator)
    half = _orthogonal((num_random_features + 1) // 2, dim, generator)
    return torch.cat([half, -half])[:num_random_features]


def _orthogonal(count: int, dim: int, generator: torch.Generator) -> Float[Tensor, "features dim"]:
    """Directions that are orthogonal within blocks of ``dim`` rows, each row N(0, I).

    Blocks are Haar-distributed orthogonal matrices (QR of a Gaussian with the signs of R's diagonal), and every row
    gets the length of an independent Gaussian vector. So each row has its exact distribution, and the estimate is
    unbiased. Source: Choromanski et al., Rethinking attention with Performers (2021), section 3.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cpu", generator=generator)

    haar, triangle = torch.linalg.qr(normal(math.ceil(count / dim), dim, dim))
    haar = haar * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    return haar.flatten(0, 1)[:count] * normal(count, dim).norm(dim=1, keepdim=True)


def digits_of(seed: int) -> Float[Tensor, " digits"]:
    """A seed as its bytes: small whole numbers, so that averages of equal seeds are exact."""
    return torch.tensor([*seed.to_bytes(_BYTES, "big")], dtype=torch.float32, device="cpu")


def seed_of(digits: Float[Tensor, " digits"]) -> int:
    """The seed of these digits. Any numbers are a seed, an average of those of different seeds, too."""
    return int.from_bytes(bytes(whole_numbers(digits.nan_to_num().clamp(0, 255))), "big")


@torch.library.custom_op("tg_equiattn::random_directions", mutates_args=())
def _directions_of(digits: Tensor, number: int, num_random_features: int, dim: int, paired: bool) -> Tensor:
    """Directions of a seed, from its digits. ``torch.vmap`` may batch the digits, as in an ensemble of modules."""
    return draw_directions(seed_of(digits), number, num_random_features, dim, paired).to(digits.device)


@_directions_of.register_fake
def _(digits, number, num_random_features, dim, paired):
    return digits.new_empty(num_random_features, dim, dtype=torch.float64)


@_directions_of.register_vmap
def _(info, in_dims, digits, *settings):
    return torch.stack([_directions_of(x, *settings) for x in digits.unbind(in_dims[0])]), 0


class RandomFeatures(nn.Module):
    r"""Directions of random features, ``(num_random_features, dim)``, orthogonal in blocks.

    Directions are determined by a seed and the number of the draw. The seed is a buffer of small whole numbers, which
    averages of equal seeds leave as it is, and which ``DistributedDataParallel`` makes equal on all ranks. The extra
    state holds the number of the draw and the number of directions.

    Args:
        num_random_features: Number of directions m.
        dim: Width d of queries and keys.
        paired: Whether the second half of the directions is the negative of the first half. The estimate is then still
            unbiased, and its errors of odd order cancel (Choromanski et al. 2021, Lemma 1). Default ``False``.
    """

    seed_digits: Tensor

    def __init__(self, num_random_features: int, dim: int, *, paired: bool = False) -> None:
        super().__init__()
        self.num_random_features, self.dim, self.paired = num_random_features, dim, paired
        self._number = 0  # of the draw
        self._copies = Cache()  # of the directions
        self._calls: dict[int, tuple[tuple[int, int], bool]] = {}  # see _draw_of_call
        self._draw_of_copies = self._mark = (-1, -1)
        self.register_buffer("seed_digits", torch.empty(_BYTES))
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Take a new seed, from torch's generator by default, and start counting draws again."""
        self.seed, self._number = int(torch.randint(256**_BYTES, (), generator=generator, device="cpu")), 0
        if is_ordinary(self.seed_digits):
            self.seed_digits.copy_(digits_of(self.seed))

    def redraw_features(self, generator: torch.Generator | None = None, num_random_features: int | None = None) -> None:
        """Draw new directions; :class:`DrawsFeatures` describes the arguments. Directions of the same number are
        written over the old ones, so that a captured graph reads them."""
        if num_random_features not in (None, self.num_random_features):
            checks.positive(num_random_features=num_random_features)
            self.num_random_features, self._copies = num_random_features, Cache()
        if generator is None:
            self._number += 1
        else:
            self.reset_parameters(generator)
        self._update_copies()

    def forward(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The directions on a device in a dtype."""
        directions = self.directions(device, dtype)
        if not self.training or is_traced():
            return directions
        draw = self._draw_of_call()
        if draw != self._draw():
            return draw_directions(*draw, self.num_random_features, self.dim, self.paired).to(device, dtype)
        return directions.clone()  # for backward: the next draw is written over the copy

    def directions(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The directions of the present draw."""
        if is_transformed_tensor(self.seed_digits):
            settings = self._draw()[1], self.num_random_features, self.dim, self.paired
            return _directions_of(self.seed_digits, *settings).to(device, dtype)
        self._update_copies((device, dtype))
        return self._copies.kept((device, dtype))

    def _draw_of_call(self) -> tuple[int, int]:
        """The seed and the number of the draw for a call in training.

        A checkpoint repeats calls in backward, where draws may have followed. If it restores the state of torch's
        generator, this state tells which call is repeated: each call changes it. If it does not, the call must have had
        the present draw. RuntimeError if a call of another draw has not been repeated yet.
        """
        draw, calls = self._draw(), self._calls
        with ordinary_tensors():
            state = zlib.crc32(torch.get_rng_state().numpy().data)
            torch.rand((), device="cpu")
        if not is_backward():  # not repeated in backward
            if may_be_checkpointed():
                calls[state] = draw, True
            if len(calls) > _CALLS:
                del calls[next(iter(calls))]
            return draw
        if state not in calls:
            waiting = {state: of_call for state, (of_call, waits) in calls.items() if waits}
            if any(of_call != draw for of_call in waiting.values()):
                raise RuntimeError(
                    "random features were drawn between a call in torch.utils.checkpoint and its backward, got "
                    "preserve_rng_state=False, with which a repeated call does not find its draw; pass "
                    "preserve_rng_state=True, or call redraw_features after backward"
                )
            state = next(iter(waiting), state)
        of_call, _ = calls.get(state, (draw, False))
        calls[state] = of_call, False
        return of_call

    @untraced
    def _update_copies(self, *kinds: tuple[torch.device, torch.dtype]) -> None:
        """Write the current draw over all copies of the directions, and make those that are missing: before each call,
        and once while torch.compile traces."""
        draw = self._draw()
        if draw == self._draw_of_copies and self._copies.keys() >= {*kinds}:
            return
        with ordinary_tensors():
            exact = draw_directions(*draw, self.num_random_features, self.dim, self.paired)
            for copy in self._copies.values():
                copy.copy_(exact)
            self._copies |= {kind: exact.to(*kind) for kind in kinds if kind not in self._copies}
        self._draw_of_copies = draw

    @untraced
    def _draw(self) -> tuple[int, int]:
        """The seed and the number of the draw. Digits of the seed are read if they have been written to or replaced;
        this read waits for an accelerator."""
        digits = self.seed_digits
        mark = id(digits), 0 if digits.is_inference() else digits._version
        if mark != self._mark and is_ordinary(digits):
            self.seed, self._mark = seed_of(digits), mark
        return self.seed, self._number

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RandomFeatures:
        """Make the copy where the module moves to, so that no call has to wait for it."""
        self._draw()
        super()._apply(fn, recurse)
        if is_ordinary(self.seed_digits):
            self.seed_digits.copy_(digits_of(self.seed))  # to_empty leaves other numbers
            self._update_copies((self.seed_digits.device, torch.promote_types(self.seed_digits.dtype, torch.float32)))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        if (name := f"{prefix}seed_digits") in state_dict:
            state_dict[name] = state_dict[name][:_BYTES]  # earlier versions stored a checksum, too
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._update_copies()

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self._number, self.num_random_features], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the stored number of directions is another one than that of this module."""
        *_, draw, number = whole_numbers(state)
        if number != self.num_random_features:
            raise ValueError(
                f"state_dict must come from a layer with num_random_features={self.num_random_features}, like this "
                f"one, got {number}; call redraw_features(num_random_features={number}) before loading. To change the "
                "number of a trained layer, call redraw_features after loading"
            )
        self._number = draw

    def extra_repr(self) -> str:
        return f"{self.num_random_features}, {self.dim}"


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
