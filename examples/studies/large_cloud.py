"""One cloud of points over several processes: points a second and memory of training, and the same outputs.

Every process has a share of the points; what they tell each other are tables of sums. Points fill a box that repeats
evenly, and are the same however many processes there are. A step is forward and backward with DistributedDataParallel,
after one that does not count; memory is the largest of a process's peaks, all it holds included.

    python examples/studies/large_cloud.py    # 4,000,000 points over 1, 2 and 4 processes, minutes
    torchrun --nproc-per-node 8 examples/studies/large_cloud.py --device cuda    # those that torchrun starts, alone
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import torch
import torch.distributed as dist
from harness.devices import add_device
from harness.tables import markdown
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.nn import EwaldAttention, PerformerAttention

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BLOCK = 2**14  # points that are drawn together
CHANNELS = 8
LAYERS = ("EwaldAttention", "PerformerAttention")


class Cloud(nn.Module):
    """Scalars of points in a box of side 1, to scalars, by a layer whose points all processes share."""

    def __init__(self, name: str, method: str) -> None:
        super().__init__()
        group = dist.group.WORLD
        if name == "PerformerAttention":
            self.layer: Any = PerformerAttention(
                CHANNELS, CHANNELS, position="sinusoid", pos_dim=3, num_random_features=16, method="features"
            )
        else:
            self.layer = EwaldAttention(
                CHANNELS,
                0,
                width=0.1,
                num_gaussians=1,
                num_coulomb=1,
                lmax=0,
                avg_num_nodes=1e5,
                error=1e-3,
                method=method,
            )
        self.layer.process_group = group

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        if isinstance(self.layer, PerformerAttention):
            return self.layer(x, pos=pos)
        return self.layer(x, None, pos=pos, cell=torch.eye(3, device=x.device))[0]


def share(points: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """A rank's positions (n, 3) and scalars (n, CHANNELS) of all the points."""
    parts = []
    for number, start in enumerate(range(0, points, BLOCK)):
        if number % world == rank:
            generator = torch.Generator().manual_seed(number)
            parts.append(torch.rand(min(BLOCK, points - start), 3 + CHANNELS, generator=generator))
    return torch.cat([torch.empty(0, 3 + CHANNELS), *parts]).split([3, CHANNELS], 1)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """One training step after another, in every process at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    cuda = options.device != "cpu"
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Cloud(options.layer, options.method).to(device))
    pos, x = (t.to(device) for t in share(options.points, rank, world))
    times, loss = [], x.new_zeros(())
    for _ in range(1 + options.repeats):
        model.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        # gradients are means over processes, so a process's part of a sum counts as often as there are processes
        loss = world * model(x, pos).square().sum() / options.points
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if cuda else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    most = torch.tensor(float(peak), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    square = loss.detach().double() / world
    dist.all_reduce(square)
    gradient = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return {"processes": world, "seconds": statistics.median(times[1:]), "bytes": most.item(),
            "square": square.item(), "gradient": gradient**0.5}  # fmt: skip


def started(options: argparse.Namespace) -> dict[str, float]:
    """The measurement of a process that torchrun started."""
    timeout = datetime.timedelta(seconds=options.timeout)
    dist.init_process_group("nccl" if options.device != "cpu" else "gloo", timeout=timeout)
    try:
        return measure(options)
    finally:
        dist.destroy_process_group()


def launch(processes: int, arguments: list[str]) -> dict[str, float]:
    """The measurement over so many new processes."""
    run = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command = [*run, "--nproc-per-node", str(processes), __file__, *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def table(points: int, found: list[dict[str, float]]) -> str:
    """Points a second and memory, beside those of the first measurement."""
    lines = []
    for row in found:
        faster = found[0]["seconds"] / row["seconds"]
        lines.append([
            str(int(row["processes"])), f"{row['seconds']:.1f}", f"{points / row['seconds']:,.0f} ({faster:.2f})",
            f"{row['bytes'] / 2**30:.2f} ({row['bytes'] / found[0]['bytes']:.2f})",
            f"{row['square']:.6e}", f"{row['gradient']:.6e}",
        ])  # fmt: skip
    header = ["processes", "s a step", "points a second", "GiB a process", "mean square of outputs", "norm of gradient"]
    return markdown(header, lines)


def draw(points: int, found: list[dict[str, float]], path: Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    worlds = [row["processes"] for row in found]
    axes[0].plot(worlds, [points / row["seconds"] / 1e6 for row in found], "o-")
    axes[0].set(ylabel="million points a second")
    axes[1].plot(worlds, [row["bytes"] / 2**30 for row in found], "o-")
    axes[1].set(ylabel="GiB a process")
    for axis in axes:
        axis.set(xlabel="processes", xticks=worlds, ylim=(0, None))
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=4_000_000)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--layer", choices=LAYERS, default=LAYERS[0])
    parser.add_argument("--method", choices=("nufft", "ewald"), default="nufft", help="of EwaldAttention")
    parser.add_argument("--repeats", type=int, default=3, help="steps that are timed; the median counts")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds after which a lost process is an error")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder of the table and the figure")
    parser.add_argument("--json", action="store_true", help="print numbers as JSON, where torchrun started this")
    add_device(parser)
    options = parser.parse_args()
    for name in ("points", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be positive, got {getattr(options, name)}")
    if dist.is_torchelastic_launched():
        found = started(options)
        if os.environ["RANK"] == "0":
            print(json.dumps(found) if options.json else table(options.points, [found]))
        return
    arguments = ["--points", str(options.points), "--layer", options.layer, "--repeats", str(options.repeats)]
    arguments += ["--method", options.method, "--timeout", str(options.timeout), "--device", options.device]
    found = [launch(processes, arguments) for processes in tqdm(options.processes, desc="processes", disable=None)]
    options.output.mkdir(parents=True, exist_ok=True)
    text = f"{options.layer}, {options.points:,} points\n\n{table(options.points, found)}\n"
    (options.output / "large_cloud.md").write_text(text)
    draw(options.points, found, options.output / "large_cloud.png")
    print(f"{text}\n{options.output / 'large_cloud.md'}, {options.output / 'large_cloud.png'}")


if __name__ == "__main__":
    main()
