"""Base classes and helpers that all modules share, and the arguments of modules on tokens."""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from . import checks
from .graphs.node_batch import NodeBatch
from .torch_state import is_transformed


def reset_children(module: nn.Module) -> None:
    """Call ``reset_parameters`` of every child that has this method, and descend into children that do not have it."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


def with_zero_gradients(module: nn.Module, out: Tensor) -> Tensor:
    """The output of a module for an input without nodes, from which every parameter gets a gradient of zero.

    DistributedDataParallel waits for a gradient of every parameter on every rank.
    """
    empty = [p.flatten()[:0].sum() for p in module.parameters() if not isinstance(p, nn.UninitializedParameter)]
    return out + sum(empty, out.new_zeros(())).to(out.dtype)


class LayerNorm(nn.LayerNorm):
    """``torch.nn.LayerNorm``, written out under transforms.

    Nested transforms of ``torch.func`` and nested forward-mode differentiation take the mean and the deviation inside
    torch's own operator for constants, and their second derivatives are wrong without a word (pytorch issue 196700).
    """

    def forward(self, input: Tensor) -> Tensor:
        if not is_transformed():
            return super().forward(input)
        axes = tuple(range(-len(self.normalized_shape), 0))
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        centred = wide - wide.mean(axes, keepdim=True)
        out = centred * (centred.square().mean(axes, keepdim=True) + self.eps).rsqrt()
        return (out * self.weight + self.bias).to(input.dtype)


class NotScriptable:
    """A mixin for modules that TorchScript does not support. ``torch.jit.script`` and ``torch.jit.trace`` raise an
    error that names the alternatives, also if the module is part of another one: a trace keeps the sizes of graphs, and
    is wrong for others. It stands before bases that are modules."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise NotImplementedError. torch.jit.script calls this method of a module and of all its submodules."""
        raise NotImplementedError(
            f"{type(self).__name__} does not support TorchScript (torch.jit.script, torch.jit.trace): use "
            "torch.compile, or torch.export to run a model without Python. A model of escnn can be traced after "
            "to_standard_torch(model)"
        )

    def _slow_forward(self, *inputs: Any, **options: Any) -> Any:
        """Raise NotImplementedError, but for attention of standard operators. torch.nn.Module calls this method in
        place of ``forward`` in torch.jit.trace."""
        if not getattr(self, "plain", False):
            self.__prepare_scriptable__()
        return super()._slow_forward(*inputs, **options)  # type: ignore[misc]


class StoresSettings(nn.Module):
    """A module that stores its settings in checkpoints and compares them on loading.

    :meth:`settings` returns the arguments that change the module's function but no parameter's shape. The state_dict
    holds them as the bytes of a text, which survive averaging of state_dicts with equal settings, in integers or in
    floating point.
    """

    def settings(self) -> dict[str, Any]:
        """The arguments to store, as a dict of JSON values. Of a value ``{"digest": ..., "text": ...}`` the digest is
        compared, and the text is shown in errors."""
        raise NotImplementedError

    def _text(self) -> str:
        return json.dumps(self.settings(), default=lambda number: number.item())  # NumPy numbers

    def get_extra_state(self) -> Tensor:
        text = self._text()
        return torch.tensor([*text.encode("ascii"), *_checksum(text)], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the stored settings differ from those of this module."""
        numbers = whole_numbers(state)
        text = bytes(n % 256 for n in numbers[:-4]).decode("latin1")
        if _checksum(text) != numbers[-4:]:
            raise ValueError(
                f"state_dict must come from one {type(self).__name__}, or be an average of several with equal "
                "settings, got an average of several with different settings"
            )
        own, stored = json.loads(self._text()), json.loads(text)
        stored = _BEFORE | {_RENAMED.get(name, name): value for name, value in stored.items()}
        own = _BEFORE | own
        for name in own | stored:
            (mine, shown), (saved, stored_text) = _compared(own.get(name)), _compared(stored.get(name))
            if mine != saved:
                raise ValueError(
                    f"state_dict must come from a {type(self).__name__} with {name}={shown}, like this one, got "
                    f"{stored_text}; to load the weights anyway, remove the keys that end in _extra_state and pass "
                    "strict=False"
                )


_RENAMED = {"length": "length_scale", "avg_num_nodes": "output_scale"}  # old names of settings
# settings that earlier checkpoints do not have
_BEFORE = {"mixed_products": False, "projections": "Clifford MLP", "exclude_near": False}


def _compared(value: Any) -> tuple[Any, str]:
    """The value of a setting to compare, and the text to show."""
    return (value["digest"], value["text"]) if isinstance(value, dict) else (value, repr(value))


def whole_numbers(state: Tensor) -> list[int]:
    """Round an extra state, which may have been averaged in floating point, to integers."""
    return state.detach().to("cpu", torch.float64).round().to(torch.int64).tolist()


def _checksum(text: str) -> list[int]:
    """The CRC-32 of a text as four bytes, by which an average of two different texts is recognised."""
    return list(zlib.crc32(text.encode()).to_bytes(4, "big"))


class Tokens(NamedTuple):
    """Checked tokens.

    Attributes:
        shape: (B, N) for dense input, (T,) for flat input.
        scalars: (T, S), with T = B N for dense input.
        vectors: (T, V, 3).
        node_batch: the sequences.
    """

    shape: tuple[int, ...]
    scalars: Tensor
    vectors: Tensor
    node_batch: NodeBatch


def read_tokens(
    scalars: Tensor | None, vectors: Tensor | None, channels: tuple[int, int], reference: Tensor,
    lengths: Tensor | None, batch: Tensor | None, batch_size: int | None, max_num_nodes: int | None,
) -> Tokens:  # fmt: skip
    """Read scalars ``(B, N, S)`` or ``(T, S)`` and vectors ``(B, N, V, 3)`` or ``(T, V, 3)``, or None for no channels.

    Raise ValueError, naming the argument, unless they have ``channels`` and the dtype and device of ``reference``."""
    first, axes = (scalars, 1) if scalars is not None else (vectors, 2)
    if first is None:
        raise ValueError("vectors must be given if scalars are None, got None")
    flat = isinstance(first, Tensor) and first.ndim == 1 + axes
    shape = tuple(first.shape[: 1 if flat else 2]) if isinstance(first, Tensor) else ()
    out = []
    for name, x, sizes in (("scalars", scalars, (channels[0],)), ("vectors", vectors, (channels[1], 3))):
        if x is None and not sizes[0]:
            x = first.new_zeros(*shape, *sizes)
        if not isinstance(x, Tensor) or x.ndim != len(shape) + len(sizes) or tuple(x.shape) != (*shape, *sizes):
            layout = f"(B, N, {', '.join(map(str, sizes))}), or (T, {', '.join(map(str, sizes))}) with batch"
            same = "with the same B, N or T in scalars and vectors"
            raise ValueError(f"{name} must be {layout}, {same}, got {checks.shape_of(x)}")
        checks.of_points(x, reference, name)
        out.append(x.flatten(0, len(shape) - 1))
    if flat:
        if lengths is not None:
            raise ValueError("lengths must be None for flat input (T, ...), got a tensor: use batch")
        return Tokens(shape, out[0], out[1], NodeBatch.flat(first, batch, batch_size, max_num_nodes))
    if batch is not None:
        raise ValueError("batch must be None for input (B, N, ...), got one: use lengths, or flat tokens (T, ...)")
    checks.lengths(lengths, shape[0], shape[1], first.device)
    return Tokens(shape, out[0], out[1], NodeBatch.dense(shape[0], shape[1], lengths, first.device))
