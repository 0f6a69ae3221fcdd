"""Operations and memory of a module's forward and backward pass, counted on an emulated accelerator.

Every operation counts as one launch. On a GPU a Fourier transform takes up to four kernels and a stable sort about ten.
Tensors may be fakes, which hold no values: counts depend on sizes alone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from emulated import Emulated, accelerator, aten, emulated, to_accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
VIEWS = {aten._unsafe_view, aten.lift_fresh}  # whose schemas do not say so


@dataclass
class Counts:
    """Operations that run on the device (views and allocations apart), and the most memory held at once beyond the
    inputs. ``names`` says how often each operation ran."""

    operations: int = 0
    peak: int = 0
    names: Counter = field(default_factory=Counter)


def runs(func: Any, out: Any) -> bool:
    """True if an operation is a launch: it is no view, no allocation, and has something to do."""
    if func.overloadpacket in ALLOCATIONS | VIEWS:
        return False
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return False
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
    return not results or any(x.numel() for x in results)


class Watch:
    """Watches an emulated accelerator."""

    def __init__(self, *inputs: Any) -> None:
        self.counts = Counts()
        tensors = [x.inner for x in tree_leaves(inputs) if isinstance(x, Emulated)]
        self._given = {StorageWeakRef(x.untyped_storage()) for x in tensors}
        self._live: dict[StorageWeakRef, int] = {}

    def begin(self) -> Counts:
        """Count from zero on; what there was. What is held now came in."""
        counts, self.counts = self.counts, Counts()
        self._given |= self._live.keys()
        self._live = {}
        return counts

    def __call__(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        args, kwargs, out = tree_map(lambda x: x.inner if isinstance(x, Emulated) else x, (args, kwargs, out))
        self._live = {ref: size for ref, size in self._live.items() if not ref.expired()}
        for x in tree_leaves(out):
            if (
                isinstance(x, torch.Tensor)
                and x.layout == torch.strided
                and (ref := StorageWeakRef(x.untyped_storage())) not in self._given
            ):
                self._live[ref] = x.untyped_storage().nbytes()
        self.counts.peak = max(self.counts.peak, sum(self._live.values()))
        if runs(func, out):
            self.counts.operations += 1
            self.counts.names[str(func)] += 1


@contextlib.contextmanager
def counted(*inputs: Any, mode: FakeTensorMode):
    """A :class:`Watch` of what runs within on the emulated accelerator, whose values are fakes of a ``mode``; memory
    is counted beyond that of ``inputs``."""
    watch = Watch(*inputs)
    with accelerator(watch, mode):
        yield watch


def count(module: torch.nn.Module, inputs: dict[str, Any]) -> tuple[Counts, Counts]:
    """Counts of a forward pass without gradients, and of one with backward, both after a first one, in which a module
    may make tables. Of fakes only sizes are looked at."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def there(x: Any) -> Any:
        return emulated(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x)

    module, inputs = to_accelerator(module, there), tree_map(there, inputs)
    floating = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    leaves = inputs | {name: x.detach().requires_grad_() for name, x in floating.items()}
    wanted = [*(leaves[name] for name in floating), *(p for p in module.parameters() if p.requires_grad)]
    with counted(*module.parameters(), *module.buffers(), *inputs.values(), mode=mode) as watch:
        with torch.no_grad():
            module(**inputs)
            watch.begin()
            module(**inputs)
        forward = watch.begin()
        out = [x for x in tree_leaves(module(**leaves)) if isinstance(x, torch.Tensor) and x.requires_grad]
        if out and wanted:
            torch.autograd.grad(out, wanted, [torch.ones_like(x) for x in out], allow_unused=True)
        return forward, watch.begin()
