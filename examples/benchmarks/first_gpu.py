"""The first minutes on a GPU: is everything right there, and how fast is it.

Every result is a line of OUT/results.jsonl at once, and items that have a line are skipped, so a second start goes on
where the first ended. An item that fails is one line that says so. The report, OUT/report.md, is written at the end.

The order: the environment and one compiled exponential; every case of tests/helpers/cases.py of the installed hosts,
forward and backward against the CPU in float32, under float16 autocast, and without waiting for the device; the layers
of the launch table in eager mode and compiled.

    python examples/benchmarks/first_gpu.py                      # on a GPU
    python examples/benchmarks/first_gpu.py --device cpu --tiny  # a dry run

It needs torch alone. escnn, PyG, e3nn, finufft and the packages of the studies may be missing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import json
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "helpers")]

Item = Callable[["Machine"], dict[str, Any]]
HOSTS = ("torch", "escnn", "torch_geometric", "e3nn", "finufft", "cufinufft")


class Machine:
    """The device, how large inputs are, and whether compilation works there."""

    def __init__(self, device: str, tiny: bool) -> None:
        self.device, self.tiny, self.compiles = device, tiny, True
        self.is_cuda = device.startswith("cuda")

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
    found |= {name: getattr(__import__(name), "__version__", "installed") for name in HOSTS if has(name)}
    if machine.is_cuda:
        found["name"] = torch.cuda.get_device_name()
    try:
        x = torch.randn(1000, device=machine.device)
        found["compiled exponential"] = float((torch.compile(torch.exp)(x) - x.exp()).abs().max())
    except Exception as error:  # whatever a compiler raises, eager mode goes on
        machine.compiles, found["compiled exponential"] = False, f"{type(error).__name__}: {error}"[:300]
    return found


def difference(got: Any, wanted: Any) -> float:
    """The largest difference of outputs and gradients, relative to the largest value of each."""
    worst = 0.0
    for a, b in zip(tree_leaves(got), tree_leaves(wanted), strict=True):
        if isinstance(b, torch.Tensor) and b.numel():
            a, b = a.detach().double().cpu(), b.detach().double()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1.0)))
    return worst


def _floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


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
    with torch.autocast(machine.device.split(":")[0], torch.float16 if machine.is_cuda else torch.bfloat16):
        found["autocast"] = difference(run(module, inputs)[0], wanted[0])
    try:
        run(module, inputs)  # TorchScript settles in the first calls
        with waiting_is_an_error() if machine.is_cuda else contextlib.nullcontext():
            run(module, inputs)
        found["waits"] = False
    except RuntimeError as error:
        found["waits"] = str(error)[:300]
    return found


def timed(name: str, way: str, machine: Machine) -> dict[str, Any]:
    """A layer of the launch table: time of the host and of the device, and kernels, forward and in training."""
    from launches import LAYERS
    from torch.profiler import ProfilerActivity, profile

    if way == "compiled" and not machine.compiles:
        return {"left out": "nothing compiles here"}
    layer = LAYERS[name]
    module = layer.make().to(machine.device)
    inputs = machine.move(layer.given("small" if machine.tiny else "large"))
    inputs = tree_map(lambda x: torch.randn_like(x, requires_grad=True) if _floating(x) else x, inputs)
    torch.compiler.reset()  # each layer is a program of its own
    run = torch.compile(module) if way == "compiled" else module

    def forward() -> None:
        with torch.no_grad():
            run(**inputs)

    def training() -> None:
        sum(x.float().square().mean() for x in tree_leaves(run(**inputs)) if _floating(x)).backward()

    found: dict[str, Any] = {}
    for kind, call in (("forward", forward), ("training", training)):
        found[kind] = {"seconds": machine.seconds(call)}
        if machine.is_cuda and torch.backends.cuda.is_built():
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                call()
                machine.wait()
            events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
            found[kind] |= {"device seconds": sum(e.device_time for e in events) / 1e6, "kernels": len(events)}
    return found


def first_items(machine: Machine) -> dict[str, Item]:
    from cases import CASES
    from launches import LAYERS

    present = [name for name, made in CASES.items() if made.host == "torch" or has(made.host)]
    layers = [name for name in LAYERS if "Conv" not in name or has("torch_geometric")]
    present, layers = (present[::40], layers[:1]) if machine.tiny else (present, layers)
    items: dict[str, Item] = {"environment": environment}
    items |= {f"case: {name}": functools.partial(case, name) for name in present}
    for way in ("eager", "compiled"):
        items |= {f"{way}: {name}": functools.partial(timed, name, way) for name in layers}
    return items


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The results so far; a line that was cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def run_items(items: dict[str, Item], machine: Machine, path: Path) -> None:
    """Run what has no line yet."""
    done = {line["item"] for line in lines_of(path)}
    for number, (name, item) in enumerate(items.items(), 1):
        if name in done:
            continue
        start, line = time.perf_counter(), {"item": name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                line["result"] = item(machine)
        except Exception as error:  # one item is lost, and the line says why
            line["error"] = f"{type(error).__name__}: {error}"[:500]
        line["seconds"] = round(time.perf_counter() - start, 3)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"[{number}/{len(items)}] {name}: {(line.get('error') or json.dumps(line['result']))[:160]}", flush=True)


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
    parser.add_argument("--output", type=Path, default=ROOT / "out" / "first_gpu", help="folder of results and report")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help="run the items in whose name this regular expression is found")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few cases, for a dry run")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("first_gpu.py: --device must be cpu where torch finds no GPU, got cuda")
    options.output.mkdir(parents=True, exist_ok=True)
    path, machine = options.output / "results.jsonl", Machine(options.device, options.tiny)
    items = {name: item for name, item in first_items(machine).items() if re.search(options.only, name)}
    run_items(items, machine, path)
    (options.output / "report.md").write_text(report(path))
    print(f"The report is in {options.output / 'report.md'}")


if __name__ == "__main__":
    main()
