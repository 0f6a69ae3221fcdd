"""What torch.compile makes of a module for an H100, counted where there is none: kernels, calls of libraries, bytes.

A module is traced on the device meta, which the library's plans take for an accelerator; its graphs are retargeted to
CUDA and lowered to the code that inductor would compile and run, and that code is read. This library's own operators
are calls that a compiler does not look into: what they launch is counted by :mod:`counting`.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from counting import Cell, counted, total
from emulated import emulated
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import compile_fx, ir
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import joint_graph, post_grad
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._pytree import tree_leaves, tree_map

CPU, META, CUDA = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 0)


HINTS = {
    "multi_processor_count": 132, "major": 9, "regs_per_multiprocessor": 65536, "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024, "warp_size": 32,
}  # fmt: skip
H100 = SimpleNamespace(
    name="NVIDIA H100", gcnArchName="", minor=0, total_memory=80 << 30, L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10, shared_memory_per_block=48 << 10,
    shared_memory_per_multiprocessor=228 << 10, **HINTS,
)  # fmt: skip


@contextlib.contextmanager
def h100():
    """Within, torch's questions about CUDA devices are answered for one H100; nothing can run on it."""
    hints = DeviceProperties(type="cuda", index=0, cc=90, **HINTS)
    answers = {
        "get_device_properties": H100, "is_available": True, "get_device_capability": (9, 0), "current_device": 0,
        "device_count": 1, "_lazy_init": None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack, mock.patch("torch._inductor.scheduler.has_triton", return_value=True):
        stack.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", return_value="sm_90"))
        # which asks for a driver where torch is a CUDA build
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context"))
        copy = lambda x, y, *more: torch.ops.aten.copy_.default(x, y, *more)  # noqa: E731 - a method asks for its device
        stack.enter_context(mock.patch.object(torch.Tensor, "copy_", copy))
        stack.enter_context(mock.patch.object(DeviceProperties, "create", return_value=hints))
        for name, answer in answers.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", return_value=answer))
        yield


@contextlib.contextmanager
def differentiable():
    """Within, operators that are made of others, where, FFTs and variances among them, are so on the device meta too.
    torch has kernels for it beside, without derivatives, so that what lies before would never be counted."""
    key = torch._C.DispatchKey
    packets = (getattr(torch.ops.aten, name) for name in torch.ops.aten._dir)
    ops = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = [op for op in ops if key.Meta in op.py_kernels and has(op.name(), "CompositeImplicitAutograd")]
    kernels = [op.py_kernels.pop(key.Meta) for op in ops]
    try:
        for op in ops:
            op._dispatch_cache.clear()
        yield
    finally:
        for op, kernel in zip(ops, kernels, strict=True):
            op.py_kernels[key.Meta] = kernel
            op._dispatch_cache.clear()


@dataclass
class Compiled:
    """Kernels that inductor made, calls of libraries (matrix products, FFTs, ...), and calls of this library's own
    operators."""

    kernels: int = 0
    libraries: list[str] = field(default_factory=list)
    own: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def launches(self) -> Cell:
        """Of all, those of the own operators' bodies included."""
        alone = Cell(self.kernels + len(self.libraries))
        return total([alone, *(of_body(*call) for call in self.own)])


@dataclass
class Shape:
    """A tensor without values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


def of_body(func: Any, args: Any, kwargs: Any) -> Cell:
    """What the body of an own operator asks of an accelerator."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def made(x: Any) -> Any:
        if not isinstance(x, Shape):
            return x
        with mode:
            return emulated(torch.empty_strided(x.size, x.stride, dtype=x.dtype))

    if func is torch.ops.tg_equiattn.redraw_when_due.default:
        return Cell()  # no draw is due
    args, kwargs = tree_map(made, (args, kwargs))
    with counted(args, kwargs, mode=mode) as watch:
        func(*args, **kwargs)
    return watch.begin().cell()


def _rename(gm: torch.fx.GraphModule, away: torch.device, device: torch.device) -> None:
    moved = lambda x: device if isinstance(x, torch.device) and x == away else x  # noqa: E731
    for node in gm.graph.nodes:
        node.args, node.kwargs = tree_map(moved, (node.args, node.kwargs))


def _to_cpu(gm: torch.fx.GraphModule) -> None:
    """Put a graph from the device meta on the CPU, where uniform values can be folded."""
    if gm.graph.find_nodes(op="get_attr"):
        raise NotImplementedError("constants that are tensors")
    _rename(gm, META, CPU)
    inputs = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    mode = next(x.fake_mode for x in inputs if isinstance(x, FakeTensor))
    with torch.no_grad(), mode:
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) if isinstance(x, FakeTensor) else x
                  for x in inputs]  # fmt: skip
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)


def _say(gm: torch.fx.GraphModule, device: torch.device) -> list[Any]:
    """Have all tensors of a graph say that they are on a device, as operators that would make them there look for it;
    its inputs."""
    for node in gm.graph.nodes:
        for x in _fakes(node):
            x.fake_device = device
    return [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]


def _fakes(node: torch.fx.Node) -> list[FakeTensor]:
    return [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, FakeTensor)]


def _partition(gm: torch.fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
    _to_cpu(gm)
    gm = compile_fx._recursive_joint_graph_passes(gm, input_device=CPU)
    return min_cut_rematerialization_partition(gm, joint_inputs, compiler="inductor", **options)


def _count(gm: torch.fx.GraphModule, inference: bool, backward: bool) -> Compiled:
    """Lower a graph for CUDA as ``torch._inductor.compile_fx`` does, and read what came of it."""
    out = Compiled()
    compile_fx.view_to_reshape(gm)
    with torch.no_grad():
        mode = compile_fx.fake_tensor_prop(gm, _say(gm, CPU))
    _rename(gm, CPU, CUDA)
    inputs = _say(gm, CUDA)
    with h100(), torch.no_grad(), V.set_fake_mode(mode), DebugContext():
        compile_fx._recursive_record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=inference)
        graph = GraphLowering(gm, example_inputs=inputs, is_inference=inference, is_backward=backward)
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*inputs)
            code, _ = graph.codegen()
            for node in graph.scheduler.nodes:
                if node.is_extern():
                    _library(node, out)
    out.kernels = len(re.findall(r"^    .*\.run\(", code.value, re.MULTILINE))
    return out


def _library(node: Any, out: Compiled) -> None:
    kernel = node.node
    func = getattr(kernel, "op_overload", None)
    if func is not None and func.namespace == "tg_equiattn":
        called = kernel.fx_node if hasattr(kernel, "fx_node") else kernel.origin_node
        out.own.append((func, *tree_map(_shape, (called.args, called.kwargs))))
    elif not isinstance(kernel, ir.MultiOutput) and (func is None or not func.is_view):
        out.libraries.append(str(func or getattr(kernel, "python_kernel_name", None) or type(kernel).__name__))


def _shape(x: Any) -> Any:
    x = x.meta["val"] if isinstance(x, torch.fx.Node) else x
    return Shape(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x


def compiled(module: torch.nn.Module, inputs: dict[str, Any]) -> tuple[list[Compiled], list[Compiled]]:
    """Of a forward pass without gradients, and of one with backward, in graphs."""
    return _graphs(module.to(META), tree_map(lambda x: x.to(META) if isinstance(x, torch.Tensor) else x, inputs))


@differentiable()
def _graphs(module: Any, inputs: dict[str, Any]) -> tuple[list[Compiled], list[Compiled]]:
    found: list[list[Compiled]] = [[], []]

    def compiler(which: int, inference: bool = False, backward: bool = False):
        def compile(gm: torch.fx.GraphModule, _: Any) -> Any:
            if inference:
                _to_cpu(gm)
                gm = compile_fx._recursive_joint_graph_passes(gm, input_device=CPU)
            shapes = [_shape(x) for x in gm.graph.output_node().args[0]]
            found[which].append(_count(gm, inference, backward))
            return lambda *_: tuple(_empty(x) for x in shapes)

        return compile

    backend = aot_autograd(
        fw_compiler=compiler(1), bw_compiler=compiler(1, backward=True), inference_compiler=compiler(0, inference=True),
        decompositions=select_decomp_table(), partition_fn=_partition, keep_inference_input_mutations=True,
    )  # fmt: skip
    joint_graph.lazy_init(CPU)  # patterns are traced on a device that is there
    post_grad.lazy_init()
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        run(**inputs)
    leaves = {n: x.requires_grad_() for n, x in inputs.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    out = [x for x in tree_leaves(run(**(inputs | leaves))) if isinstance(x, torch.Tensor) and x.requires_grad]
    wanted = [*leaves.values(), *(p for p in module.parameters() if p.requires_grad)]
    if out and wanted:
        torch.autograd.grad(out, wanted, [torch.ones_like(x) for x in out], allow_unused=True)
    return found[0], found[1]


def _empty(x: Any) -> Any:
    return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device=META) if isinstance(x, Shape) else x
