"""The base class of modules that apply a network on tokens by grade to scalars and vectors, dense or flat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ..modules import NotScriptable, reset_children
from ..tokens import read_tokens
from .clifford import Grades
from .operator import OperatorSettings, TokenNetwork
from .sequences import ChainArguments


def _grades(default: Grades, **channels: int | None) -> Grades:
    """Grades from numbers of scalars and vectors. A number that is ``None`` is taken from ``default``."""
    chosen = {name: n if given is None else given for n, (name, given) in zip(default, channels.items(), strict=False)}
    checks.whole(**chosen)
    if not any(chosen.values()):
        raise ValueError(f"{' and '.join(chosen)} must not both be 0: give at least one channel")
    return Grades(*chosen.values())


def _flat(shape: tuple[int, ...], **arguments: Any) -> list[Any]:
    """Flatten arguments with a number for each token. Raise ValueError for padded tokens, (B, N), of another shape."""
    for name, value in arguments.items():
        if len(shape) == 2 and isinstance(value, Tensor) and tuple(value.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(value.shape)}")
    return [x.flatten() if isinstance(x, Tensor) and len(shape) == 2 else x for x in arguments.values()]


class ScalarVectorModule(NotScriptable, torch.nn.Module):
    """A module that reads scalars and vectors as tokens by grade, calls a network, and splits its output. The function
    ``make`` builds the network from the grades of input, output and hidden tokens and the settings."""

    def __init__(
        self, make: Callable[..., TokenNetwork], options: OperatorSettings, scalar_channels: int, vector_channels: int,
        out_scalars: int | None = None, out_vectors: int | None = None, hidden_scalars: int | None = None,
        hidden_vectors: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = _grades(Grades(), scalar_channels=scalar_channels, vector_channels=vector_channels)
        outside = _grades(inside, out_scalars=out_scalars, out_vectors=out_vectors)
        hidden = _grades(inside, hidden_scalars=hidden_scalars, hidden_vectors=hidden_vectors)
        self.module = make(inside, outside, hidden, options)
        self.module.check_reachable("out_vectors")

    def forward(
        self,
        scalars: Tensor | None,
        vectors: Tensor | None,
        lengths: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        index: Tensor | None = None,
        chain: Tensor | None = None,
        ring: Tensor | bool | None = None,
        pos: Tensor | None = None,
        order: Tensor | None = None,
        edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None,
        batch_size: int | None = None,
        num_chains: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map scalars and vectors of tokens to scalars and vectors of tokens, or of sequences if the module pools.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` if there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` if there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each padded sequence. Tokens beyond it are never read, and zero
                in the output.
            batch: sorted int64 ``(T,)``, the sequence of each flat token. ``None`` means one sequence.
            index: integers ``(B, N)`` or ``(T,)``, the number of each token along its chain, for example its residue
                number. It must increase strictly. Convolutions take differences of it as lags, so that missing tokens
                count as zero; steps above 128 count as 128. ``None`` means that no token is missing.
            chain: integers ``(B, N)`` or ``(T,)``, any number for each chain. Convolutions run along each chain of a
                sequence by itself; positions are centred, and attention mixes, over the whole sequence. ``None`` means
                that each sequence is one chain.
            ring: bool ``(B, N)`` or ``(T,)``, true for the tokens of closed chains, or one bool for all chains. Lags
                then run the shortest way round the ring, in implicit filters and short convolutions. It needs
                ``filter="implicit"`` and ``causal=False``. ``None`` means that all chains are open.
            pos: positions ``(B, N, 3)`` or ``(T, 3)``. They enter relative to the mean of their sequence, divided by
                ``length``, as one more vector. They must be ``None`` with ``causal=True``, as later tokens change the
                mean. Give large coordinates (UTM: 5e6) in float64, whatever dtype the features have: float32 rounds
                them to 0.5.
            order: a permutation of the tokens of every sequence, used instead of the module's order: int64 ``(B, N)``
                of indices within the sequence, or ``(T,)`` of tokens.
            edge_index: int64 ``(2, E)``, source and target tokens, counted through the batch (b N + i). It is needed
                with ``local_context=True``. With ``causal=True``, no source may come later than its target.
            edge_attr: ``(E, edge_channels)``, scalars of the edges. They are needed if ``edge_channels`` is not 0.
            batch_size: number of flat sequences. By default it is read from ``batch``, which torch.compile cannot do.
            num_chains: number of chains in the batch, or a bound of it. By default it is read from ``chain``, which
                torch.compile cannot do.
            max_num_nodes: a bound of the lengths of flat sequences, and of the spans of ``index``. By default it is
                read from ``batch`` and ``index``, which torch.compile cannot do.
        """
        module = self.module
        inside, outside = module.in_grades, module.out_grades
        channels, reference = (inside.scalars, inside.vectors), module.reference_parameter
        tokens = read_tokens(scalars, vectors, channels, reference, lengths, batch, batch_size, max_num_nodes)
        shape, device = tokens.shape, tokens.scalars.device
        if isinstance(pos, Tensor):
            if tuple(pos.shape) != (*shape, 3):
                raise ValueError(f"pos must have shape {(*shape, 3)}, got {tuple(pos.shape)}")
            pos = pos.flatten(0, -2)
        order, index, chain, ring = _flat(shape, order=order, index=index, chain=chain, ring=ring)
        if order is not None and len(shape) == 2:
            order = order + (shape[1] * torch.arange(shape[0], device=device)).repeat_interleave(shape[1])
        vectors = tokens.vectors.permute(2, 1, 0).flatten(0, 1)
        x = torch.cat([tokens.scalars.T, vectors]).to(reference.dtype).T  # the network takes the transpose again
        along = ChainArguments(order, index, chain, num_chains, max_num_nodes, ring)
        out = module.run(x, pos, tokens.node_batch, along, edge_index, edge_attr)
        shape = (tokens.node_batch.count,) if module.pool else shape
        out_scalars, out_vectors = out.split([outside.scalars, 3 * outside.vectors], 1)
        out_vectors = out_vectors.unflatten(1, (3, outside.vectors)).transpose(1, 2).contiguous()
        return out_scalars.contiguous().view(*shape, outside.scalars), out_vectors.view(*shape, outside.vectors, 3)

    @property
    def order(self) -> str:
        """Order of the tokens along their sequence, ``"input"`` or ``"radial"``."""
        return self.module.options.order

    def reset_parameters(self) -> None:
        reset_children(self)

    def extra_repr(self) -> str:
        inside, outside = self.module.in_grades, self.module.out_grades
        return f"{inside.scalars}, {inside.vectors} -> {outside.scalars}, {outside.vectors}, order={self.order!r}"
