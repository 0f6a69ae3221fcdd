"""The first ten minutes on a GPU: is everything right there, how fast is it, and what would be faster.

One process with a budget. Every result is a line of OUT/results.jsonl at once. Items that have a line are skipped, so a
second start goes on where the first ended. Each item has an alarm, and an item that fails or hangs is one line that
says so. The report, OUT/report.md, is written from the lines at the end, or at any time by `--report`.

The order: the environment and one compiled exponential; every case of tests/helpers/cases.py of the hosts that are
installed, forward and backward against the CPU in float32, under float16 autocast, and without waiting for the device;
large inputs; the layers of the launch table in eager mode and compiled; CUDA graphs of whole models. `--second`
compares our layers with what a user has instead.

    python examples/benchmarks/first_gpu.py                      # on a GPU
    python examples/benchmarks/first_gpu.py --second
    python examples/benchmarks/first_gpu.py --device cpu --tiny  # a dry run

It needs torch alone. escnn, PyG, e3nn, finufft and the packages of the studies may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib.util
import json
import platform
import re
import signal
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

Item = Callable[["Machine"], dict[str, Any]]
HOSTS = ("torch", "escnn", "torch_geometric", "e3nn", "finufft", "cufinufft", "triton")


class Machine:
    """The device, how large inputs are, and whether compilation works there."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny, self.compiles = device, tiny, True
        self.is_cuda = device.startswith("cuda")

    def size(self, full: int, tiny: int) -> int:
        return tiny if self.tiny else full

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any], repeats: int = 5) -> float:
        """The median time of a call, after two that are not counted."""
        times = []
        for _ in range(2 + (2 if self.tiny else repeats)):
            self.wait()
            start = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])

    def move(self, x: Any) -> Any:
        return tree_map(lambda t: t.to(self.device) if isinstance(t, torch.Tensor) else t, x)


def has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def environment(machine: Machine) -> dict[str, Any]:
    """Names and versions, and whether an exponential can be compiled."""
    found: dict[str, Any] = {"python": platform.python_version(), "device": machine.device}
    for name in HOSTS:
        if has(name):
            found[name] = getattr(__import__(name), "__version__", "installed")
    if machine.is_cuda:
        found["name"] = torch.cuda.get_device_name()
    try:
        x = torch.randn(1000, device=machine.device)
        error = (torch.compile(torch.exp)(x) - x.exp()).abs().max()
        found["compiled exponential"] = float(error)
    except Exception as error:  # whatever a compiler raises, eager mode goes on
        machine.compiles, found["compiled exponential"] = False, f"{type(error).__name__}: {error}"[:300]
    return found


# correctness


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of outputs and gradients, relative to the largest value of each."""
    worst = 0.0
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if isinstance(b, torch.Tensor) and b.numel():
            a, b = a.detach().double().cpu(), b.detach().double()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1.0)))
    return worst


def case(name: str, machine: Machine) -> dict[str, Any]:
    """One module or function, forward and backward in float32, on the CPU and on the device, against float64."""
    from cases import CASES, run
    from devices import waiting_is_an_error

    module, inputs = CASES[name].build(torch.float32)
    doubles = {key: x.double() if _floating(x) else x for key, x in inputs.items()}
    wanted = run(copy.deepcopy(module).double(), doubles)
    found: dict[str, Any] = {"float32 of the CPU": difference(run(module, inputs), wanted)}
    module, inputs = module.to(machine.device), machine.move(inputs)
    found["float32"] = difference(run(module, inputs), wanted)
    try:
        with torch.autocast(machine.device.split(":")[0], torch.float16 if machine.is_cuda else torch.bfloat16):
            found["autocast"] = difference(run(module, inputs)[0], wanted[0])
    except Exception as error:  # recorded beside what is right
        found["autocast"] = f"{type(error).__name__}: {error}"[:300]
    try:
        run(module, inputs)  # TorchScript settles in the first calls
        with waiting_is_an_error() if machine.is_cuda else contextlib.nullcontext():
            run(module, inputs)
        found["waits"] = False
    except RuntimeError as error:
        found["waits"] = str(error)[:300]
    return found


def large_points(machine: Machine) -> dict[str, Any]:
    """Non-uniform FFTs against direct sums."""
    from tg_equiattn.functional.waves.nufft import nufft_available
    from tg_equiattn.nn import EwaldAttention

    if not nufft_available(machine.device.split(":")[0]):
        return {"left out": "no finufft for this device"}
    points = machine.size(2_000, 60)
    inputs = torch.randn(1, points, 4), torch.randn(1, points, 2, 3)
    pos, outs = points ** (1 / 3) * torch.rand(1, points, 3), {}
    for method in ("direct", "nufft"):
        torch.manual_seed(0)
        layer = EwaldAttention(4, 2, width=1.0, method=method).to(machine.device)
        outs[method] = layer(*machine.move(inputs), pos=pos.to(machine.device))
    return {"nufft against direct": difference(outs["nufft"], [x.cpu() for x in outs["direct"]])}


def sparse_products(machine: Machine) -> dict[str, Any]:
    """Sums over many edges against a gather."""
    from tg_equiattn.edges import CSR
    from tg_equiattn.functional.edge_products import edge_dot, edge_sum

    nodes, degree = machine.size(200_000, 50), 10
    row = torch.arange(nodes).repeat_interleave(degree)
    col = torch.randint(nodes, (nodes * degree,))
    query, key = torch.randn(8, nodes, 16), torch.randn(8, nodes, 16)
    wanted = (query[:, row] * key[:, col]).sum(-1)
    csr = CSR(*machine.move(tuple(CSR.from_sorted(row, col, nodes, nodes))))
    query, key = machine.move((query, key))
    dots = edge_dot(query, key, csr)
    seconds = machine.seconds(lambda: edge_sum(edge_dot(query, key, csr), key, csr))
    return {"error": difference(dots, wanted), "seconds": seconds}


def near_pairs(machine: Machine) -> dict[str, Any]:
    """Compare near pairs and the radial order of the device with the CPU's."""
    from tg_equiattn.neighbors import neighbor_list
    from tg_equiattn.node_batch import NodeBatch
    from tg_equiattn.orders import radial_order

    pos = torch.rand(machine.size(50_000, 200), 3, dtype=torch.float64)
    cutoff = (10 / len(pos)) ** (1 / 3)
    wanted, there = neighbor_list(pos, cutoff)[0], pos.to(machine.device)
    order = radial_order(there, NodeBatch.flat(there, None))
    return {
        "pairs agree": torch.equal(neighbor_list(there, cutoff)[0].cpu(), wanted),
        "orders agree": torch.equal(order.cpu(), radial_order(pos, NodeBatch.flat(pos, None))),
        "seconds": machine.seconds(lambda: neighbor_list(there, cutoff)),
    }


def long_sequence(tokens: int, machine: Machine) -> dict[str, Any]:
    """One training step of a SE(3)-Hyena operator."""
    from tg_equiattn.nn import SE3HyenaOperator

    layer = SE3HyenaOperator(8, 16).to(machine.device)
    x = torch.randn(1, tokens, 8, device=machine.device), torch.randn(1, tokens, 16, 3, device=machine.device)

    def train() -> None:
        sum(part.square().mean() for part in layer(*x)).backward()

    return {"tokens": tokens, "seconds": machine.seconds(train, 3), **memory(machine)}


def memory(machine: Machine) -> dict[str, Any]:
    return {"peak GiB": torch.cuda.max_memory_allocated() / 2**30} if machine.is_cuda else {}


# times


def timed(name: str, compiled: bool, machine: Machine) -> dict[str, Any]:
    """A layer of the launch table: time of the host and of the device, and kernels, forward and in training."""
    from launches import LAYERS
    from torch.profiler import ProfilerActivity, profile

    if compiled and not machine.compiles:
        return {"left out": "nothing compiles here"}
    layer = LAYERS[name]
    module = layer.make().to(machine.device)
    inputs = tree_map(
        lambda x: torch.randn_like(x) if _floating(x) else x, layer.given("small" if machine.tiny else "large")
    )
    inputs = tree_map(lambda x: x.requires_grad_() if _floating(x) else x, machine.move(inputs))
    torch.compiler.reset()  # each layer is a program of its own
    run = torch.compile(module) if compiled else module

    def forward() -> None:
        with torch.no_grad():
            run(**inputs)

    def training() -> None:
        sum(x.float().square().mean() for x in tree_leaves(run(**inputs)) if _floating(x)).backward()

    found: dict[str, Any] = {}
    for way, call in (("forward", forward), ("training", training)):
        found[way] = {"seconds": machine.seconds(call)}
        if machine.is_cuda and torch.backends.cuda.is_built():
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
                call()
                machine.wait()
            found[way] |= of_device(trace)
    return found | memory(machine)


def of_device(trace: Any) -> dict[str, Any]:
    """Time on the device, the number of kernels, and the operations that take most of the time, with their shares."""
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    beside = torch.autograd.DeviceType.CUDA, "Activity Buffer Request"  # kernels, and what the profiler does
    own = {
        e.key: e.self_device_time_total
        for e in trace.key_averages()
        if e.device_type not in beside and e.key not in beside
    }
    most = sorted(own, key=own.__getitem__, reverse=True)[:6]
    total = max(sum(own.values()), 1e-9)
    shares = {name[:80]: round(own[name] / total, 2) for name in most}
    return {"device seconds": sum(e.device_time for e in events) / 1e6, "kernels": len(events), "most time": shares}


def _floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def graph_of_model(name: str, machine: Machine) -> dict[str, Any]:
    """A captured forward pass of a whole model against the eager one, and the time of both."""
    from whole_models import Fixed

    if not machine.is_cuda:
        return {"left out": "CUDA graphs need CUDA"}
    model = Fixed(name).eval().to(machine.device)
    x = model.sample(machine.device)
    gc.collect()  # no graph of an earlier call may be alive
    with torch.no_grad():
        replayed = torch.cuda.make_graphed_callables(copy.deepcopy(model), (x,))  # which changes the module it is given
        other = model.sample(machine.device)
        error = difference(replayed(other), model(other).cpu())
        return {
            "error": error,
            "eager": machine.seconds(lambda: model(x)),
            "graph": machine.seconds(lambda: replayed(x)),
        }


def graph_of_training(name: str, machine: Machine) -> dict[str, Any]:
    """The gradients of a training step whose forward and backward passes are captured, against the eager ones."""
    from whole_models import Fixed

    if not machine.is_cuda:
        return {"left out": "CUDA graphs need CUDA"}
    model = Fixed(name).train().to(machine.device)
    x, other = model.sample(machine.device), model.sample(machine.device)
    captured = torch.cuda.make_graphed_callables(copy.deepcopy(model), (x,))

    def gradients(step: nn.Module) -> list[torch.Tensor | None]:
        return list(torch.autograd.grad(step(other).square().mean(), list(step.parameters()), allow_unused=True))

    error = difference(gradients(captured), [g if g is None else g.cpu() for g in gradients(model)])
    return {
        "error": error,
        "eager": machine.seconds(lambda: gradients(model)),
        "graph": machine.seconds(lambda: gradients(captured)),
    }


# what a user has instead


def compared(calls: dict[str, Callable[[], Any]], machine: Machine) -> dict[str, Any]:
    """The time of each call; one that fails is said and stops no other."""
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = machine.seconds(call)
        except Exception as error:  # recorded beside the others
            found[name] = f"{type(error).__name__}: {error}"[:200]
    return found


def graph_attention(nodes: int, machine: Machine) -> dict[str, Any]:
    """All pairs and random features beside torch's attention without positions."""
    from tg_equiattn.nn import PerformerAttention

    x, pos = torch.randn(nodes, 64, device=machine.device), torch.rand(nodes, 3, device=machine.device)
    q = torch.randn(1, 8, nodes, 8, device=machine.device)
    calls: dict[str, Callable[[], Any]] = {
        "scaled_dot_product_attention": lambda: nn.functional.scaled_dot_product_attention(q, q, q)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for method in ("pairs", "features"):
            layer = PerformerAttention(64, 64, 8, pos_dim=3, offset="distance", cutoff=0.1, method=method)
            calls[method] = functools.partial(layer.to(machine.device), x, pos=pos)
        if has("torch_geometric"):
            from torch_geometric.nn.attention import PerformerAttention as Performer

            calls["PyG's PerformerAttention"] = functools.partial(Performer(64, 8, 8).to(machine.device), x[None])
        return compared(calls, machine)


def beside_convolutions(tf32: bool, machine: Machine) -> dict[str, Any]:
    """Attention in frames and lifting beside convolutions of the same shape, with TF32 on or off."""
    from tg_equiattn.groups import cyclic
    from tg_equiattn.nn import GroupAttention, LiftingAttention

    side, calls = machine.size(64, 8), {}
    image = torch.randn(16, 3, side, side, device=machine.device)
    for fields in (8, 32):
        x = torch.randn(16, fields, 8, side, side, device=machine.device)
        convolution = nn.Conv2d(8 * fields, 8 * fields, 5, padding=2).to(machine.device)
        frames = GroupAttention(cyclic(8), fields, fields).to(machine.device)
        calls[f"conv2d, {fields} fields"] = functools.partial(convolution, x.flatten(1, 2))
        calls[f"frames, {fields} fields"] = functools.partial(frames, x)
        if machine.compiles:
            calls[f"frames, {fields} fields, compiled"] = functools.partial(torch.compile(frames), x)
    calls["conv2d, image"] = functools.partial(nn.Conv2d(3, 64, 5, padding=2).to(machine.device), image)
    calls["lifting, image"] = functools.partial(LiftingAttention(cyclic(8), 3, 8).to(machine.device), image)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        return compared(calls, machine)
    finally:
        torch.set_float32_matmul_precision(before)


def flex(machine: Machine) -> dict[str, Any]:
    """A window of 5 x 5 by FlexAttention beside attention in frames over as many heads and pixels."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    from tg_equiattn.groups import cyclic
    from tg_equiattn.nn import GroupAttention

    side = machine.size(64, 16)
    q = torch.randn(16, 64, side**2, 16, device=machine.device)

    def near(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((i // side - j // side).abs() <= 2) & ((i % side - j % side).abs() <= 2)

    blocks = create_block_mask(near, None, None, side**2, side**2, device=machine.device)
    attend = torch.compile(flex_attention) if machine.compiles else flex_attention
    layer = GroupAttention(cyclic(8), 16, 16, heads=8, head_channels=16, content_heads=8).to(machine.device)
    x = torch.randn(16, 16, 8, side, side, device=machine.device)
    return compared({"FlexAttention": lambda: attend(q, q, q, block_mask=blocks), "frames": lambda: layer(x)}, machine)


def ewald(points: int, machine: Machine) -> dict[str, Any]:
    """Direct sums beside sums over reciprocal vectors, and what the layer chooses by itself."""
    from tg_equiattn.nn import EwaldAttention

    side = points ** (1 / 3)
    x = torch.randn(1, points, 8, device=machine.device), torch.randn(1, points, 4, 3, device=machine.device)
    pos, calls = side * torch.rand(1, points, 3, device=machine.device), {}
    for method in ("auto", "direct", "ewald"):
        layer = EwaldAttention(8, 4, width=1.0, method=method).to(machine.device)
        calls[method] = functools.partial(layer, *x, pos=pos)
    return compared(calls, machine)


def vectors(tokens: int, machine: Machine) -> dict[str, Any]:
    """Vector attention, streamed."""
    from tg_equiattn.functional import vector_attention

    q, k, v = (torch.randn(1, tokens, 16, 3, device=machine.device) for _ in range(3))
    return compared({"vector attention": lambda: vector_attention(q, k, v)}, machine) | memory(machine)


def reduced_overhead(name: str, machine: Machine) -> dict[str, Any]:
    """A whole model, eager and compiled with mode="reduce-overhead"."""
    from whole_models import Fixed

    model = Fixed(name).eval().to(machine.device)
    x = model.sample(machine.device)
    calls = {"eager": lambda: model(x)}
    if machine.compiles:
        compiled = torch.compile(model, mode="reduce-overhead")
        calls["reduce-overhead"] = lambda: compiled(x)
    with torch.no_grad():
        return compared(calls, machine)


# the run


def first_items(machine: Machine) -> dict[str, Item]:
    from cases import CASES
    from launches import LAYERS
    from whole_models import MODELS

    present = [name for name, made in CASES.items() if made.host == "torch" or has(made.host)]
    layers = [name for name in LAYERS if "Conv" not in name or has("torch_geometric")]
    present, layers = (present[::40], layers[:1]) if machine.tiny else (present, layers)
    items: dict[str, Item] = {"environment": environment}
    items |= {f"case: {name}": functools.partial(case, name) for name in present}
    items |= {"nufft": large_points, "sparse products": sparse_products, "near pairs": near_pairs}
    items["tokens"] = functools.partial(long_sequence, machine.size(131_072, 50))
    for compiled in (False, True):
        way = "compiled" if compiled else "eager"
        items |= {f"{way}: {name}": functools.partial(timed, name, compiled) for name in layers}
    # last, because after a failed capture all calls of the process fail
    graphs = {"CUDA graph": graph_of_model, "CUDA graph of training": graph_of_training}
    items |= {f"{kind}: {name}": functools.partial(make, name) for kind, make in graphs.items() for name in MODELS}
    return items


def second_items(machine: Machine) -> dict[str, Item]:
    from whole_models import MODELS

    nodes = [8] if machine.tiny else [2**n for n in range(7, 14)]
    points = [10] if machine.tiny else [100, 1_000, 10_000]
    tokens = [16] if machine.tiny else [1_024, 4_096, 16_384]
    items: dict[str, Item] = {"second: environment": environment}
    items |= {f"graph attention, {n} nodes": functools.partial(graph_attention, n) for n in nodes}
    items |= {f"convolutions, TF32 {on}": functools.partial(beside_convolutions, on) for on in (False, True)}
    items["FlexAttention"] = flex
    items |= {f"Ewald attention, {n} points": functools.partial(ewald, n) for n in points}
    items |= {f"vector attention, {n} tokens": functools.partial(vectors, n) for n in tokens}
    lengths = [64] if machine.tiny else [2**n for n in (14, 17, 20)]
    items |= {f"SE(3)-Hyena, {n} tokens": functools.partial(long_sequence, n) for n in lengths}
    items |= {f"reduce-overhead: {name}": functools.partial(reduced_overhead, name) for name in MODELS}
    return items


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise TimeoutError after so many seconds."""

    def ring(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The results so far; a line that was cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def run_items(items: dict[str, Item], machine: Machine, path: Path, seconds: float, patience: float) -> None:
    """Run what has no line yet, until the budget is spent."""
    end, done = time.monotonic() + seconds, {line["item"] for line in lines_of(path)}
    for number, (name, item) in enumerate(items.items(), 1):
        left = end - time.monotonic()
        if name in done:
            continue
        if left < 1:
            print("The budget is spent: start again to go on.", flush=True)
            return
        start, line = time.perf_counter(), {"item": name}
        try:
            with alarm(min(patience, left)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if machine.is_cuda and torch.backends.cuda.is_built():
                    torch.cuda.reset_peak_memory_stats()
                torch.manual_seed(0)
                line["result"] = item(machine)
        except Exception as error:  # one item is lost, and the line says why
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        line["seconds"] = round(time.perf_counter() - start, 3)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        said = line.get("error") or json.dumps(line["result"])
        print(f"[{number}/{len(items)}] {name}: {said[:160]}", flush=True)


def is_off(result: dict[str, Any]) -> bool:
    """True if a case waits for the device, or is less exact there than float32 is on the CPU."""
    return bool(result["waits"]) or result["float32"] > max(1e-3, 10 * result["float32 of the CPU"])


def report(path: Path) -> str:
    """Make the report: items that failed or differ first, then a table of all lines."""
    lines = lines_of(path)
    failed = [line for line in lines if "error" in line]
    cases = [line for line in lines if line["item"].startswith("case") and "result" in line]
    off = [line for line in cases if is_off(line["result"])]
    text = [f"{len(lines)} items, {len(failed)} failed, {len(off)} cases differ from the CPU or wait for the device."]
    text += [f"- **{line['item']}**: {line.get('error') or json.dumps(line['result'])}" for line in (*failed, *off)]
    text += ["", "| item | result |", "|---|---|"]
    text += [f"| {line['item']} | {line.get('error') or json.dumps(line['result'])} |" for line in lines]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=540, help="the budget of this start (default 540)")
    parser.add_argument("--patience", type=float, default=60, help="the longest that one item may take (default 60)")
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "first_gpu", help="folder of results and report")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--second", action="store_true", help="compare with what a user has instead")
    parser.add_argument("--only", default="", help="run the items in whose name this regular expression is found")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few cases, for a dry run")
    parser.add_argument("--report", action="store_true", help="write the report of the lines so far and run nothing")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("first_gpu.py: --device must be cpu where torch finds no GPU, got cuda")
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "results.jsonl"
    if not options.report:
        machine = Machine(options.device, options.tiny)
        machine.compiles = not (options.second and options.tiny)  # which would take minutes
        items = (second_items if options.second else first_items)(machine)
        items = {name: item for name, item in items.items() if re.search(options.only, name)}
        run_items(items, machine, path, options.seconds, options.patience)
    (options.output / "report.md").write_text(report(path))
    print(f"The report is in {options.output / 'report.md'}")


if __name__ == "__main__":
    main()
