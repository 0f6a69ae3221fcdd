"""Batches of sequences of tokens: which token belongs where, and how sequences reach a dense kernel.

Features of tokens are kept as (rows, T): the T tokens of all sequences side by side on the last axis, so that work by
token needs no padding. Kernels that mix the tokens of a sequence get (..., B, N), one or several groups of sequences
of similar lengths, each padded to the longest of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.utils.checkpoint
from torch import Tensor

from . import checks
from .transforms import transformed


class _Gather(torch.autograd.Function):
    """x[..., to], zero where ``filled`` is false; ``back`` says where each token went, so backward is a gather too."""

    @staticmethod
    def forward(ctx, x: Tensor, to: Tensor, filled: Tensor | None, back: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(to, filled, back, kept)
        out = x[..., to] if x.shape[-1] else x.new_zeros(*x.shape[:-1], to.shape[0])
        return out if filled is None else out.masked_fill_(~filled, 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        to, filled, back, kept = ctx.saved_tensors
        return _Gather.apply(grad, back, kept, to, filled), None, None, None, None


def _gather(x: Tensor, to: Tensor, filled: Tensor | None, back: Tensor, kept: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling() or transformed():
        return x[..., to] if filled is None else torch.where(filled, x[..., to], 0.0)
    return _Gather.apply(x, to, filled, back, kept)


def _inverse(order: Tensor) -> Tensor:
    """Where each token went: the inverse of a permutation (T,)."""
    places = torch.arange(order.shape[0], device=order.device)
    return torch.index_put(torch.zeros_like(order), (order,), places)


class Sequences:
    """Where the tokens of a batch of sequences lie.

    Make one with :meth:`dense` or :meth:`flat`.

    Attributes:
        tokens: T, of all sequences, with any padding that came with them.
        count: B, the number of sequences.
        batch: int64 ``(T,)``, the sequence of each token.
        sizes: int64 ``(B,)``, tokens of each sequence.
        mask: bool ``(T,)``, false for padding; ``None`` where there is none.
    """

    def __init__(self, tokens: int, count: int, batch: Tensor, sizes: Tensor, mask: Tensor | None) -> None:
        self.tokens, self.count, self.batch, self.sizes, self.mask = tokens, count, batch, sizes, mask
        self._groups: list[tuple[int, int, Tensor | None]] = []  # sequences, padded length, own lengths
        # the token of each slot, whether there is one, and the slot of each token; None where slots are the tokens
        self._slots: tuple[Tensor, Tensor | None, Tensor] | None = None

    @classmethod
    def dense(cls, count: int, length: int, lengths: Tensor | None, device: torch.device) -> Sequences:
        """Sequences padded to one length, of own lengths (count,)."""
        batch = torch.arange(count, device=device).repeat_interleave(length)
        mask = None
        sizes = torch.full((count,), length, device=device)
        if lengths is not None:
            sizes, mask = lengths, (torch.arange(length, device=device) < lengths[:, None]).flatten()
        out = cls(count * length, count, batch, sizes, mask)
        out._groups = [(count, length, lengths)]
        return out

    @classmethod
    def flat(
        cls,
        tokens: int,
        batch: Tensor | None,
        device: torch.device,
        batch_size: int | None = None,
        max_num_nodes: int | None = None,
    ) -> Sequences:
        """Sequences one after the other, told apart by a sorted ``batch`` index (tokens,).

        Their sizes are read, once, which waits for the device on CUDA; not so where ``batch_size`` and
        ``max_num_nodes`` are given, which torch.compile needs. Then all are padded to ``max_num_nodes``; otherwise
        groups of sequences whose lengths differ by less than twice are.
        """
        if batch is None:
            count = min(1, tokens) if batch_size is None else batch_size
            return cls.dense(count, tokens, None, device)
        padded = 0 if batch_size is None or max_num_nodes is None else max_num_nodes
        if torch.compiler.is_compiling() and not padded:
            raise ValueError("batch_size and max_num_nodes must be given with batch under torch.compile, got None")
        if batch_size is None:
            batch_size = int(batch[-1]) + 1 if tokens else 0
        starts = torch.searchsorted(batch, torch.arange(batch_size + 1, device=device))
        sizes = starts.diff()
        if padded and checks.values_are_free(sizes) and batch_size and int(sizes.max()) > padded:
            raise ValueError(f"max_num_nodes must be at least {int(sizes.max())}, the largest graph, got {padded}")
        out = cls(tokens, batch_size, batch, sizes, None)
        if not tokens:
            return out
        within = torch.arange(tokens, device=device) - starts[batch]
        if padded:
            out._groups = [(batch_size, padded, sizes)]
            out._slots = *_padded_slots(starts[:-1], sizes, padded, tokens), batch * padded + within
            return out
        known = sizes.tolist()
        if min(known) == max(known):
            out._groups = [(batch_size, known[0], None)]
            return out
        places: dict[int, list[int]] = {}
        for sequence, size in enumerate(known):
            if size:
                places.setdefault(size.bit_length(), []).append(sequence)
        to, filled, base, slots = [], [], sizes.new_zeros(batch_size), 0
        for members in places.values():
            longest, shortest = max(known[m] for m in members), min(known[m] for m in members)
            chosen = torch.tensor(members, device=device)
            out._groups.append((len(members), longest, None if longest == shortest else sizes[chosen]))
            group_to, group_filled = _padded_slots(starts[chosen], sizes[chosen], longest, tokens)
            to.append(group_to)
            filled.append(group_filled)
            base[chosen] = slots + longest * torch.arange(len(members), device=device)
            slots += longest * len(members)
        out._slots = torch.cat(to), torch.cat(filled) if slots > tokens else None, base[batch] + within
        return out

    @classmethod
    def from_batch(
        cls,
        x: Tensor,
        batch: Tensor | None,
        batch_size: int | None,
        max_num_nodes: int | None,
    ) -> Sequences:
        """:meth:`flat` for the tokens x (tokens, ...), with ``batch`` and ``batch_size`` as users give them."""
        if batch is not None or batch_size is not None:
            batch_size = checks.batch_index(batch, batch_size, x)
        return cls.flat(x.shape[0], batch, x.device, batch_size, max_num_nodes)

    @property
    def longest(self) -> int:
        """The length that the longest sequences are padded to; 0 where there are none."""
        if len(self._groups) == 1:  # as while compiling, where it may stand for any number
            return self._groups[0][1]
        return max([length for _, length, _ in self._groups], default=0)

    def ordered(self, order: Tensor) -> Sequences:
        """The same sequences with their tokens in another order: at place p comes token ``order[p]``, int64 (T,)."""
        out = Sequences(self.tokens, self.count, self.batch, self.sizes, self.mask)
        out._groups = self._groups
        back = _inverse(order)
        if self._slots is None:
            out._slots = order, None, back
        else:
            to, filled, slots = self._slots
            out._slots = order[to], filled, slots[back]
        return out

    def mix(self, kernel: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Let a kernel of (..., B, N) tensors and lengths (B,) or None mix the tokens of each sequence.

        Args:
            kernel: ``kernel(*tensors, lengths)``.
            tensors: ``(..., T)``; the output has these tokens too.
        """
        if not self._groups:
            return torch.zeros_like(tensors[0])
        if self._slots is not None:
            to, filled, back = self._slots
            tensors = tuple(_gather(x, to, filled, back, None) for x in tensors)
        widths = [count * length for count, length, _ in self._groups]
        parts = zip(*(x.split(widths, -1) for x in tensors), strict=True)
        out = [
            kernel(*(x.unflatten(-1, (count, length)) for x in part), lengths).flatten(-2)
            for part, (count, length, lengths) in zip(parts, self._groups, strict=True)
        ]
        mixed = out[0] if len(out) == 1 else torch.cat(out, -1)
        return mixed if self._slots is None else _gather(mixed, back, None, to, filled)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over each sequence: (rows, T) to (rows, B)."""
        if self.mask is None and len(self._groups) == 1 and self._groups[0][::2] == (self.count, None):
            return x.unflatten(-1, self._groups[0][:2]).sum(-1)
        if self.mask is not None:
            x = torch.where(self.mask, x, 0.0)
        return x.new_zeros(self.count, len(x)).index_add(0, self.batch, x.T).T

    def mean(self, x: Tensor) -> Tensor:
        """Means over each sequence, zero for empty ones: (rows, T) to (rows, B)."""
        return self.sum(x) / self.sizes.clamp(min=1).to(x.dtype)

    def centred(self, pos: Tensor) -> Tensor:
        """Positions (3, T) relative to the mean of their sequence; means are taken in double precision."""
        mean = self.mean(pos.double())
        return (pos - mean[:, self.batch]).to(pos.dtype)

    def zero_padding(self, x: Tensor) -> Tensor:
        """(rows, T) with zeros for padding."""
        return x if self.mask is None else torch.where(self.mask, x, 0.0)


def _padded_slots(starts: Tensor, sizes: Tensor, length: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The token of each slot of sequences padded to ``length``, and whether there is one."""
    place = torch.arange(length, device=starts.device)
    to = (starts[:, None] + place).clamp(max=tokens - 1)
    return to.flatten(), (place < sizes[:, None]).flatten()


def token_blocks(function: Callable[..., Tensor], step: int, tensors: Iterable[Tensor]) -> Tensor:
    """Apply a function of tokens (..., T) -> (rows, T) to blocks of ``step`` tokens; backward computes them again, but
    under torch's transforms, which refuse that."""
    tensors = tuple(tensors)
    tokens = tensors[0].shape[-1]
    if torch.compiler.is_compiling() or tokens <= step:
        return function(*tensors)
    blocks = zip(*(x.split(step, -1) for x in tensors), strict=True)
    if transformed():
        return torch.cat([function(*block) for block in blocks], -1)
    if torch.is_grad_enabled():
        done = [
            torch.utils.checkpoint.checkpoint(function, *block, use_reentrant=False, preserve_rng_state=False)
            for block in blocks
        ]
        return torch.cat(done, -1)
    first = function(*next(blocks))
    out = first.new_empty(*first.shape[:-1], tokens)
    out[..., :step] = first
    for n, block in enumerate(blocks, 1):
        out[..., n * step : (n + 1) * step] = function(*block)
    return out
