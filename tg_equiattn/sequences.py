"""Batches of sequences of tokens: which token belongs where, in which order, and how sequences reach a dense kernel.

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

ORDERS = ("input", "radial")


class _Move(torch.autograd.Function):
    """x[..., to], zero where ``filled`` is false; ``back`` says where each token went, so backward is a gather too."""

    @staticmethod
    def forward(ctx, x: Tensor, to: Tensor, filled: Tensor | None, back: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(to, filled, back, kept)
        out = x[..., to]
        return out if filled is None else out.masked_fill_(~filled, 0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        to, filled, back, kept = ctx.saved_tensors
        return _Move.apply(grad, back, kept, to, filled), None, None, None, None


def _move(x: Tensor, to: Tensor, filled: Tensor | None, back: Tensor, kept: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling():
        return x[..., to] if filled is None else torch.where(filled, x[..., to], 0.0)
    return _Move.apply(x, to, filled, back, kept)


class Sequences:
    """Where the tokens of a batch of sequences lie.

    Make one with :meth:`dense` or :meth:`flat`.

    Attributes:
        tokens: T, of all sequences, with any padding that came with them.
        count: B, the number of sequences.
        batch: int64 ``(T,)``, the sequence of each token.
        sizes: int64 ``(B,)``, tokens of each sequence.
        there: bool ``(T,)``, false for padding; ``None`` where there is none.
    """

    def __init__(self, tokens: int, count: int, batch: Tensor, sizes: Tensor, there: Tensor | None) -> None:
        self.tokens, self.count, self.batch, self.sizes, self.there = tokens, count, batch, sizes, there
        self._groups: list[tuple[int, int, Tensor | None]] = []  # sequences, padded length, own lengths
        # the token of each slot, whether there is one, and the slot of each token; None where slots are the tokens
        self._slots: tuple[Tensor, Tensor | None, Tensor] | None = None

    @classmethod
    def dense(cls, count: int, length: int, lengths: Tensor | None, device: torch.device) -> Sequences:
        """Sequences padded to one length, of own lengths (count,)."""
        batch = torch.arange(count, device=device).repeat_interleave(length)
        there = None
        sizes = torch.full((count,), length, device=device)
        if lengths is not None:
            sizes, there = lengths, (torch.arange(length, device=device) < lengths[:, None]).flatten()
        out = cls(count * length, count, batch, sizes, there)
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
            out._slots = *_slots(starts[:-1], sizes, padded, tokens), batch * padded + within
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
            group_to, group_filled = _slots(starts[chosen], sizes[chosen], longest, tokens)
            to.append(group_to)
            filled.append(group_filled)
            base[chosen] = slots + longest * torch.arange(len(members), device=device)
            slots += longest * len(members)
        out._slots = torch.cat(to), torch.cat(filled) if slots > tokens else None, base[batch] + within
        return out

    @classmethod
    def checked(cls, x: Tensor, batch: Tensor | None, batch_size: int | None, max_num_nodes: int | None) -> Sequences:
        """:meth:`flat` for the tokens x (tokens, ...), with ``batch`` and ``batch_size`` as users give them."""
        if batch is not None or batch_size is not None:
            batch_size = checks.batch_index(batch, batch_size, x)
        return cls.flat(len(x), batch, x.device, batch_size, max_num_nodes)

    def ordered(self, order: Tensor) -> Sequences:
        """The same sequences with their tokens in another order: at place p comes token ``order[p]``, int64 (T,)."""
        out = Sequences(self.tokens, self.count, self.batch, self.sizes, self.there)
        out._groups = self._groups
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(self.tokens, device=order.device))
        if self._slots is None:
            out._slots = order, None, inverse
        else:
            to, filled, back = self._slots
            out._slots = order[to], filled, back[inverse]
        return out

    def mix(self, kernel: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """Let a kernel of (..., B, N) tensors and lengths (B,) or None mix the tokens of each sequence.

        Args:
            kernel: ``kernel(*streams, lengths)``.
            streams: ``(..., T)``; the output has these tokens too.
        """
        if not self._groups:
            return torch.zeros_like(streams[0])
        if self._slots is not None:
            to, filled, back = self._slots
            streams = tuple(_move(x, to, filled, back, None) for x in streams)
        widths = [count * length for count, length, _ in self._groups]
        parts = zip(*(x.split(widths, -1) for x in streams), strict=True)
        out = [
            kernel(*(x.unflatten(-1, (count, length)) for x in part), lengths).flatten(-2)
            for part, (count, length, lengths) in zip(parts, self._groups, strict=True)
        ]
        mixed = out[0] if len(out) == 1 else torch.cat(out, -1)
        return mixed if self._slots is None else _move(mixed, back, None, to, filled)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over each sequence: (rows, T) to (rows, B)."""
        if self.there is None and len(self._groups) == 1 and self._groups[0][::2] == (self.count, None):
            return x.unflatten(-1, self._groups[0][:2]).sum(-1)
        if self.there is not None:
            x = torch.where(self.there, x, 0.0)
        return x.new_zeros(self.count, len(x)).index_add(0, self.batch, x.T).T

    def mean(self, x: Tensor) -> Tensor:
        """Means over each sequence, zero for empty ones: (rows, T) to (rows, B)."""
        return self.sum(x) / self.sizes.clamp(min=1).to(x.dtype)

    def centred(self, pos: Tensor) -> Tensor:
        """Positions (3, T) relative to the mean of their sequence; means are taken in double precision."""
        mean = self.mean(pos.double())
        return (pos - mean[:, self.batch]).to(pos.dtype)

    def padding_is_zero(self, x: Tensor) -> Tensor:
        """(rows, T) with zeros for padding."""
        return x if self.there is None else torch.where(self.there, x, 0.0)


def _slots(starts: Tensor, sizes: Tensor, length: int, tokens: int) -> tuple[Tensor, Tensor]:
    """The token of each slot of sequences padded to ``length``, and whether there is one."""
    place = torch.arange(length, device=starts.device)
    to = (starts[:, None] + place).clamp(max=tokens - 1)
    return to.flatten(), (place < sizes[:, None]).flatten()


@torch.no_grad()
def radial_order(pos: Tensor, sequences: Sequences, scalars: Tensor | None = None) -> Tensor:
    r"""Tokens of each sequence by their distance to its centroid, nearest first: an order that rotations, reflections,
    translations and permutations of the tokens leave alone.

    Distances that agree within rounding are told apart by further invariants, one after the other:
    :math:`x_i \cdot \sum_j |x_j|^2 x_j`, :math:`x_i \cdot \sum_j x_j x_j^\top x_i`, and a fixed combination of the
    token's scalars. Tokens that agree in all of them, as those do that a symmetry of the cloud exchanges, stay as they
    came. "Within rounding" means 1e-6 of the cloud's radius for float32 and 1e-12 for float64. In float32 clouds of
    many thousand tokens radii come that close, and rounding decides: there give positions in float64, which features
    need not be.

    Args:
        pos: ``(3, T)``.
        sequences: which tokens belong together.
        scalars: ``(S, T)`` invariant features.

    Returns:
        ``order``, int64 ``(T,)``: token ``order[p]`` comes at place p. Padding stays at the end of its sequence.
    """
    x = sequences.padding_is_zero(sequences.centred(pos.double()))
    batch, tolerance = sequences.batch, 1e-12 if pos.dtype == torch.float64 else 1e-6
    square = x.square().sum(0)
    skew = sequences.mean(square * x)[:, batch]
    spread = sequences.mean((x[:, None] * x[None]).flatten(0, 1))[:, batch].unflatten(0, (3, 3))
    keys = [square.sqrt(), (x * skew).sum(0), (x * (spread * x).sum(1)).sum(0)]
    sizes = [square.sqrt(), square.square(), square.square()]  # what a key may be rounding's alone against
    if scalars is not None and len(scalars):
        mixture = torch.arange(1, len(scalars) + 1, device=x.device, dtype=x.dtype).sqrt()
        keys.append((mixture[:, None] * scalars.double()).sum(0))
        sizes.append((mixture[:, None] * scalars.double().abs()).sum(0))
    order = torch.arange(sequences.tokens, device=x.device)
    group = 2 * batch if sequences.there is None else 2 * batch + (~sequences.there).long()
    for key, size in zip(keys, sizes, strict=True):
        size = key.new_zeros(sequences.count).scatter_reduce(0, batch, size, "amax")[batch]
        key = torch.where(size > 0, key / size, 0.0)
        order = order[key[order].argsort(stable=True)]
        order = order[group[order].argsort(stable=True)]
        sorted_key, sorted_group = key[order], group[order]
        new = (sorted_key.diff() > tolerance) | (sorted_group.diff() != 0)
        group = torch.empty_like(group).scatter_(0, order, torch.cat([new.new_zeros(1), new]).cumsum(0))
    return order


def check_order(order: Tensor, sequences: Sequences) -> None:
    """Raise ValueError unless order (T,) is a permutation of the tokens of every sequence."""
    if not isinstance(order, Tensor):
        raise ValueError(f"order must be a permutation as a tensor, got {order!r}")
    if order.dtype != torch.int64 or tuple(order.shape) != (sequences.tokens,):
        raise ValueError(
            f"order must be int64 with {sequences.tokens} entries, got {order.dtype} of shape {tuple(order.shape)}"
        )
    if order.device != sequences.batch.device:
        raise ValueError(f"order must be on {sequences.batch.device} as the input is, got {order.device}")
    if not checks.values_are_free(order):
        return
    whole = bool((order.sort().values == torch.arange(len(order))).all())
    if not whole or not bool((sequences.batch[order] == sequences.batch).all()):
        raise ValueError("order must be a permutation of the tokens within every sequence")
    if sequences.there is not None and not bool((sequences.there[order] == sequences.there).all()):
        raise ValueError("order must keep padding at the end of every sequence")


def token_blocks(function: Callable[..., Tensor], step: int, streams: Iterable[Tensor]) -> Tensor:
    """Apply a function of tokens (..., T) -> (rows, T) to blocks of ``step`` tokens; backward computes them again."""
    streams = tuple(streams)
    tokens = streams[0].shape[-1]
    if tokens <= step or torch.compiler.is_compiling():
        return function(*streams)
    blocks = zip(*(x.split(step, -1) for x in streams), strict=True)
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
