"""Time and peak memory of long geometric context, against the number of tokens.

    python examples/benchmarks/long_context.py                          # forward and backward, up to 2^20 tokens
    python examples/benchmarks/long_context.py --tokens 3500000 7000000 --layers hyena --directions forward
    python examples/benchmarks/long_context.py --device cuda            # the fused kernels too

Like the SE(3)-Hyena paper's Figure 5: one layer of 8 scalar and 16 vector channels on one random sequence, SE(3)-Hyena
against vector self-attention, until a layer takes longer than --patience. Beside it the vector long convolution
alone against the paper's Code 1, at batch 16. Every number comes from a process of its own. Peak memory is beyond what
the process had before.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import torch
from measure import DIRECTIONS, add_arguments, cell, in_own_process, machine, measure, report, table
from torch import Tensor, nn
from tqdm import tqdm

from tg_equiattn.chains.long_conv import long_convolution
from tg_equiattn.nn import SE3HyenaOperator, VectorSelfAttention

SCALARS, VECTORS, BATCH = 8, 16, 16
LAYERS = {
    "hyena": "SE(3)-Hyena", "hyena-short": "SE(3)-Hyena, short convolution",
    "hyena-implicit": "SE(3)-Hyena, implicit filter", "attention": "attention, streamed",
}  # fmt: skip


class PublishedConv(nn.Module):
    """The paper's Code 1: inputs expanded to six channels by matrices, three transforms of six, and reduced again."""

    def __init__(self) -> None:
        super().__init__()
        x, y, z = torch.eye(3).unbind()
        self.register_buffer("left", torch.stack([x, x, y, y, z, z]))
        self.register_buffer("right", torch.stack([y, -z, -x, z, x, -y]))
        axes = torch.tensor([2, 1, 2, 0, 1, 0])  # each pair's component of the cross product
        self.register_buffer("reduce", (torch.arange(3)[:, None] == axes).float())

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        tokens = q.shape[1]
        matrices = self.left, self.right, self.reduce
        left, right, reduce = (m.repeat(*q.shape[:2], 1, 1) for m in matrices)
        q, k = (left @ q[..., None]).squeeze(-1), (right @ k[..., None]).squeeze(-1)
        product = torch.fft.rfft(q, n=tokens, dim=1) * torch.fft.rfft(k, n=tokens, dim=1)
        out = torch.fft.irfft(product, n=tokens, dim=1)
        return (reduce @ out[..., None]).squeeze(-1) / tokens


class LongConv(nn.Module):
    """The same by the convolution of the layers."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        out = long_convolution(q.permute(2, 0, 1), k.permute(2, 0, 1), 0, None, "circular")
        return out.permute(1, 2, 0)


def build(name: str) -> nn.Module:
    """One layer."""
    kind = SE3HyenaOperator if name.startswith("hyena") else VectorSelfAttention
    options = {"hyena-short": {"short_conv": 3}, "hyena-implicit": {"filter": "implicit", "mixed_products": False}}.get(
        name, {}
    )
    return kind(SCALARS, VECTORS, **options)


def measure_layer(name: str, tokens: int, direction: str, device: str, repeats: int, warmups: int = 2) -> dict:
    """Seconds and peak bytes of one layer, or of one convolution alone."""

    def prepare() -> tuple[nn.Module, Callable[[], Tensor]]:
        torch.manual_seed(0)
        if name in ("published", "conv"):
            module = (PublishedConv() if name == "published" else LongConv()).to(device)
            q, k = (nn.Parameter(torch.randn(BATCH, tokens, 3, device=device)) for _ in "qk")
            module.inputs = nn.ParameterList([q, k])  # whose gradients are then dropped between calls
            return module, lambda: module(q, k)
        layer = build(name).to(device)
        scalars = torch.randn(1, tokens, SCALARS, device=device)
        vectors = torch.randn(1, tokens, VECTORS, 3, device=device)
        return layer, lambda: layer(scalars, vectors)[1]

    return measure(prepare, direction != "forward", repeats, warmups, device)


def layers(options: argparse.Namespace) -> list[str]:
    """Rows of the table."""
    found: dict[tuple[str, int, str], dict | str] = {}
    jobs = [(d, n) for d in options.directions for n in options.tokens]
    before: dict[tuple[str, str], tuple[float, int]] = {}  # seconds, tokens
    for direction, tokens in tqdm(jobs, desc="layers", disable=None):
        for name in options.layers:
            seconds, last = before.get((name, direction), (0.0, tokens))
            linear = name.startswith("hyena")
            expected = seconds * (tokens / last) ** (1 if linear else 2)
            if not linear and expected > options.patience:
                value: dict | str = f"over {options.patience:.0f} s"
            else:
                slow = expected > 5 and not linear  # whose first call pays for its memory
                runs = (1, 0) if slow else (options.repeats, 2)
                value = in_own_process(os.path.abspath(__file__), name, tokens, direction, options.device, *runs)
            if not isinstance(value, str):
                before[name, direction] = value["seconds"], tokens
            found[name, tokens, direction] = value
    rows = table(["tokens", "pass", "layer", "s", "GiB"])
    for direction, tokens in jobs:
        base = found.get(("hyena", tokens, direction), "none")
        for name in options.layers:
            value = found[name, tokens, direction]
            cells = [_against(value, base, what) for what in ("seconds", "bytes")]
            rows.append(f"| {tokens:,} | {direction} | {LAYERS[name]} | {' | '.join(cells)} |")
    return rows


def _against(value: dict | str, base: dict | str, what: str) -> str:
    """A cell, with its multiple of SE(3)-Hyena's in brackets."""
    if isinstance(value, str) or isinstance(base, str) or value is base:
        return cell(value, value, what)
    return f"{cell(value, value, what)} ({value[what] / max(base[what], 1e-9):.1f}x)"


def convolutions(options: argparse.Namespace) -> list[str]:
    """Rows of the convolution alone against the published code."""
    rows = table(["tokens", "pass", "convolution", "s", "GiB"])
    for tokens in tqdm(options.lengths, desc="convolutions", disable=None):
        for direction in options.directions:
            base: dict | str = "-"
            for name, title in (("published", "Code 1"), ("conv", "long convolution")):
                value = in_own_process(
                    os.path.abspath(__file__), name, tokens, direction, options.device, 3 * options.repeats
                )
                base = value if name == "published" else base
                cells = [cell(value, base, what) for what in ("seconds", "bytes")]
                rows.append(f"| {tokens:,} | {direction} | {title} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [1024, 2048, 4096, 8192, 2**14, 20000, 30000, 2**16, 2**18, 2**20]
    parser.add_argument("--tokens", nargs="*", type=int, default=default)
    parser.add_argument("--lengths", nargs="*", type=int, default=[20000, 20011, 131072], help="of convolutions")
    parser.add_argument("--layers", nargs="+", choices=list(LAYERS), help="default all")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--patience", type=float, default=60.0, help="seconds a pass of attention may take")
    add_arguments(parser, "out/long_context/table.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_layer(*json.loads(options.measure))))
        return
    options.layers = options.layers or list(LAYERS)
    widths = f"{SCALARS} scalar and {VECTORS} vector channels, one sequence (convolutions: {BATCH} of one channel)"
    options.tokens = sorted(options.tokens)
    rows: list[str] = []
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if options.lengths:
        rows += [*convolutions(options), ""]
    if options.tokens:
        rows += layers(options)
    note = (
        f"{widths}; {machine(options.device)}. In brackets: a multiple of SE(3)-Hyena's; for convolutions, how many "
        "times faster, or less memory, than Code 1"
    )
    report(note, rows, options.output)


if __name__ == "__main__":
    main()
