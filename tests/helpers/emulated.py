"""An accelerator emulated on the CPU: tensors that say they are elsewhere, and refuse what a GPU would wait for.

``Emulated`` tensors report the device meta and hold a CPU tensor; within :func:`accelerator` factory functions make
them too. Synchronisation, mixing with the CPU's tensors and copies between the two raise an AssertionError that names
the operator. Bodies of this library's own operators run as well."""

import contextlib
import sys

import torch
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tg_equiattn.linear.random_features import RandomFeatures
from tg_equiattn.torch_state import Tables

DEVICE = torch.device("meta")
aten = torch.ops.aten
COPIES = {aten._to_copy, aten.copy_, aten.copy}
WAITS = {
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.allclose, aten.nonzero, aten.nonzero_numpy,
    aten.argwhere, aten.masked_select, aten.unique_dim, aten._unique, aten._unique2, aten.unique_consecutive,
    aten.unique_dim_consecutive, aten.bincount, aten.histc, aten.masked_scatter, aten.masked_scatter_,
    aten.repeat_interleave, aten.multinomial, aten._to_sparse, aten._to_sparse_csr, aten._linalg_check_errors,
    aten._linalg_eigh, aten._linalg_svd, aten.linalg_eig,
}  # fmt: skip
FLOATING = {  # which have no CUDA kernels for whole numbers
    aten.mm, aten.bmm, aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_, aten.addbmm, aten.mv, aten.addmv, aten.dot,
    aten.vdot, aten.convolution,
}  # fmt: skip
JOINED = {aten.cat, aten.stack}  # whose operands must all be on the device, numbers too


class Emulated(torch.Tensor):
    """A tensor on the emulated accelerator: ``inner`` holds its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        like = {}  # sparse ones look dense
        if inner.layout == torch.strided:
            like = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=DEVICE, **like)

    def __init__(self, inner):
        assert inner.device.type == "cpu"
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


def compute(func, args, kwargs):
    """An operator on the values within; what it wrote to comes back as the tensor that was given."""
    given = {id(x.inner): x for x in tree_leaves((args, kwargs)) if isinstance(x, Emulated)}
    args, kwargs = tree_map(values, (args, kwargs))
    there = "device" not in kwargs or kwargs["device"] is None or torch.device(kwargs["device"]) == DEVICE
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("cpu")
    out = func(*args, **kwargs)
    return tree_map(lambda x: given[id(x)] if id(x) in given else emulated(x), out) if there else out


SPARSE = {aten.sparse_compressed_tensor, aten.sparse_sampled_addmm, aten.values}


def sparse_fake(packet, matrix, *args, **_):
    """CSR matrices of fakes, which cannot be sparse: a number expanded to their shape, made of what is its ``csr``."""
    if packet is aten.values:
        return emulated(matrix.inner.csr[2])
    if packet is aten.sparse_sampled_addmm:
        parts, shape = (*matrix.inner.csr[:2], torch.empty_like(matrix.inner.csr[2])), matrix.shape
    else:
        parts, shape = (matrix.inner, args[0].inner, args[1].inner), args[2]
    out = emulated(parts[2].new_empty(()).expand(shape))
    out.inner.csr = parts
    return out


def values(x):
    """The CPU tensor of an emulated one; anything else as it is."""
    return x.inner if isinstance(x, Emulated) else x


def emulated(x):
    """A tensor on the emulated accelerator, apart from the autograd graph; anything else as it is."""
    if not isinstance(x, torch.Tensor) or isinstance(x, Emulated):
        return x
    return Emulated(x.detach().resolve_conj().resolve_neg())


def to_accelerator(module, there=emulated):
    """Put copies of a module's parameters, buffers and tables there, in place."""
    for part in module.modules():
        if isinstance(part, RandomFeatures):
            part.directions(torch.device("cpu"), torch.get_default_dtype())  # as Module.to makes them
        if isinstance(part, (Tables, RandomFeatures)):
            here = {kind: x for (device, kind), x in part._copies.items() if device.type == "cpu"}
            part._copies |= {(DEVICE, kind): tree_map(there, x) for kind, x in here.items()}
        for name, p in list(part._parameters.items()):
            if p is not None:
                setattr(part, name, torch.nn.Parameter(there(p.detach().clone()), p.requires_grad))
        for name, x in list(part._buffers.items()):
            if x is not None:
                setattr(part, name, there(x.clone()))
    return module


class WithBodies(TorchDispatchMode):
    """A mode under which the Python bodies of this library's operators run too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tg_equiattn":
            with self.inside(), self:
                return OPDEFS[func._schema.name]._init_fn(*args, **(kwargs or {}))
        return self.run(func, types, args, kwargs or {})

    def inside(self):
        """What else to enter for the body of an operator."""
        return contextlib.nullcontext()

    def run(self, func, types, args, kwargs):
        raise NotImplementedError


class Operators(WithBodies):
    """Record the operators that run on the CPU, to ask whether another device has kernels for them."""

    DEFAULTS = "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd"

    def __enter__(self):
        self.names = set()
        return super().__enter__()

    def run(self, func, types, args, kwargs):
        self.names.add(func.name())
        return func(*args, **kwargs)

    def without_kernel(self, device):
        """Names of operators that have neither a kernel for a device nor one for all devices."""
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        keys = (device, *self.DEFAULTS)
        cpu_only = {name for name in self.names if "_for_cpu" in name}  # which torch chooses by the device
        return sorted(name for name in self.names - cpu_only if not any(has(name, key) for key in keys))


class Calls(TorchFunctionMode):
    """Tensors of numbers given in Python are made on the CPU and copied, as for any device but meta."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.tolist, torch.Tensor.numpy) and isinstance(args[0], Emulated):
            raise AssertionError(f"{func.__name__} waits for the device")
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and isinstance(args[0], Emulated):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(i).to(DEVICE) if isinstance(i, list) else i for i in index)
            args = (args[0], index, *args[2:])
        if func in (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor):
            like = {"dtype": args[0].dtype, "device": args[0].device} if func is torch.Tensor.new_tensor else {}
            device = {**like, **kwargs}.get("device")
            if device is not None and torch.device(device) == DEVICE and not isinstance(args[len(like) > 0], Emulated):
                kwargs = {**like, **kwargs, "device": "cpu"}
                return (torch.tensor if like else func)(*args[len(like) > 0 :], **kwargs).to(DEVICE)
        return func(*args, **kwargs)


class Accelerator(WithBodies):
    """Refuse what a GPU would wait for, and copies from the CPU, as a captured graph must. ``watch`` is told of every
    operator there: what, its arguments, what came out. Values are fakes of ``mode`` where there is one."""

    def __init__(self, watch=None, mode=None):
        super().__init__()
        self.watch, self.mode = watch, mode or contextlib.nullcontext()

    def inside(self):
        return Calls()

    def run(self, func, types, args, kwargs):
        if func._can_decompose():  # a few composite operators come whole
            with self:
                return func.decompose(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        if any(not issubclass(t, (Emulated, torch.nn.Parameter)) and t is not torch.Tensor for t in types):
            return NotImplemented  # a subclass around ours, which has operators of its own
        there = any(isinstance(x, Emulated) for x in tensors)
        wanted = kwargs.get("device")
        moves = func.overloadpacket in COPIES and (wanted is not None or len(tensors) > 1)
        if there:
            self._check(func, args, kwargs, tensors, moves)
        elif moves and wanted is not None and torch.device(wanted) == DEVICE:
            raise AssertionError(f"{func} copies from the CPU")
        if not there and (wanted is None or torch.device(wanted) != DEVICE):
            return func(*args, **kwargs)
        with self.mode:
            fake = not isinstance(self.mode, contextlib.nullcontext) and func.overloadpacket in SPARSE
            out = sparse_fake(func.overloadpacket, *args, **kwargs) if fake else compute(func, args, kwargs)
        if self.watch is not None:
            self.watch(func, args, kwargs, out)
        return out

    def _check(self, func, args, kwargs, tensors, moves):
        packet = func.overloadpacket
        if packet in WAITS and kwargs.get("output_size") is None:
            raise AssertionError(f"{func} waits for the device")
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
            mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
            if mask and (packet is aten.index or args[2].numel() != 1):
                raise AssertionError(f"{func} with a mask waits for the device")
        if packet in FLOATING and not (args[0].is_floating_point() or args[0].is_complex()):
            raise AssertionError(f"{func} has no CUDA kernel for {args[0].dtype}")
        here = [x for x in tensors if not isinstance(x, Emulated)]
        if moves and kwargs.get("device") is not None and torch.device(kwargs["device"]) != DEVICE:
            raise AssertionError(f"{func} to the CPU waits for the device")
        if moves and here:
            if here[0] is args[0]:
                raise AssertionError(f"{func} to the CPU waits for the device")
            raise AssertionError(f"{func} copies from the CPU")
        for x in here:
            if x.ndim or packet in JOINED:
                raise AssertionError(f"{func} met a tensor of shape {tuple(x.shape)} on {x.device}")


@contextlib.contextmanager
def accelerator(watch=None, mode=None):
    """Within, the device meta is the emulated accelerator; ``watch`` sees what runs on it, on fakes of a ``mode``."""
    _forget()
    try:
        with Calls(), Accelerator(watch, mode):
            yield
    finally:
        _forget()


def _forget():
    """Empty the library's caches, which keep tables for each device: this one is there within the mode only."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tg_equiattn"):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()


ATOMIC = {  # adds in any order on a GPU, but where torch.use_deterministic_algorithms asks for one
    aten.index_add, aten.index_add_, aten.index_put, aten.index_put_, aten._index_put_impl_, aten.scatter_add,
    aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_, aten.embedding_dense_backward,
    aten.convolution_backward,
}  # fmt: skip
UNORDERED = {  # has no fixed order on a GPU whatever is asked for: torch refuses, or (sparse products) does not know
    aten.avg_pool3d_backward, aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward,
    aten.adaptive_max_pool2d_backward, aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward,
    aten.upsample_trilinear3d_backward, aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.put_,
    aten.reflection_pad3d_backward, aten.nll_loss2d_forward, aten._ctc_loss_backward, aten.histc, aten.bincount,
    aten.kthvalue, aten.median, aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward, aten.cumsum, aten.cumprod,
    aten.sparse_sampled_addmm, aten.sparse_compressed_tensor, aten._sparse_mm,
}  # fmt: skip
GEOMETRY = 72  # numbers of float64 for a point, a pixel's offset or a wave: 24 rotations of three coordinates


class Exactly:
    """Refuses float64 but for geometry, and orders that are not fixed; ``atomic`` are those that a flag has to fix."""

    def __init__(self):
        self.atomic = set()

    def __call__(self, func, args, kwargs, out):
        packet = func.overloadpacket
        for x in tree_leaves(out):
            if isinstance(x, Emulated) and x.dtype == torch.float64 and x.numel() > GEOMETRY * max((*x.shape, 1)):
                raise AssertionError(f"{func} made float64 of shape {tuple(x.shape)}")
        if packet in ATOMIC:
            self.atomic.add(str(packet).removeprefix("aten."))
        if packet in UNORDERED and torch.are_deterministic_algorithms_enabled():
            whole = any(isinstance(x, Emulated) and not x.is_floating_point() for x in args[:1])
            if not (packet in (aten.cumsum, aten.cumprod) and whole):
                raise AssertionError(f"{func} is not deterministic")
