"""Time and peak memory of linear attention on pixels, against other Performers and exact softmax attention.

All are layers of 8 heads of 32 with the same projections (256 channels in and out), on the pixels of one image: PyG's
PerformerAttention (which uses a ReLU kernel), performer-pytorch's SelfAttention (softmax kernel; ``pip install
performer-pytorch``, optional), torch's scaled_dot_product_attention plain and with the additive bias of the window's
table, and PerformerAttention with each position. "clipped, gathered" is the same layer with the published double sum
over the window, values gathered for every pair; "local term" is that sum alone, of four heads; "window, edges" is
RelativePerformerConv from a Tensor of edges, which it checks and sorts in every call. Tables that depend on the grid
alone (the bias; sorted pairs) are made before the clock starts and count in memory. Every measurement runs in a process
of its own, with warm-up; times are medians. Beside each stands its own algorithm's floor (floor.py).

On CUDA also torch's flash kernel, which takes half precision only and no bias (so positions cost it nothing), in a
layer wholly in half precision, and "window" under autocast; "SDPA + bias" is then its memory-efficient kernel.

    python examples/benchmarks/linear_attention.py                    # 32, 64 and 128 pixels a side, about 12 minutes
    python examples/benchmarks/linear_attention.py --sizes 32 64
    python examples/benchmarks/linear_attention.py --device cuda --sizes 32 64 128 256
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math

import torch
import torch.nn.functional as F
from counts import Floor, attention_layer, features, near_pairs, softmax_pairs
from floor import floor_cells, floor_note, machine_rates
from measure import (
    DIRECTIONS,
    add_arguments,
    cell,
    chosen,
    in_own_process,
    is_cuda,
    machine,
    measure,
    report,
    short,
    table,
)
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from tg_equiattn.functional import linear_attention, softmax_features
from tg_equiattn.functional.edge_products import edge_sum
from tg_equiattn.functional.performer.clipped import distance_bins
from tg_equiattn.grids import PixelGrid
from tg_equiattn.nn import PerformerAttention

HEADS, HEAD_CHANNELS = 8, 32
CHANNELS = HEADS * HEAD_CHANNELS
CLIPPED, WINDOW = 6, 4  # cutoff
BASE = "PyG Performer"
VARIANTS = (
    BASE, "performer-pytorch", "SDPA", "SDPA + bias", "None", "sinusoid", "clipped", "clipped, gathered", "window",
    "window, edges", "local term, clipped", "local term, clipped, gathered",
)  # fmt: skip
GPU_VARIANTS = ("SDPA flash, fp16", "SDPA flash, bf16", "window, bf16 autocast")
HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class SoftmaxAttention(nn.Module):
    """Exact attention by torch's own kernel, or a given one, with an additive bias (heads, N, N) or none."""

    def __init__(self, bias: Tensor | None = None, kernel: SDPBackend | None = None) -> None:
        super().__init__()
        self.kernel = kernel
        self.q, self.k, self.v = (nn.Linear(CHANNELS, CHANNELS, bias=False) for _ in range(3))
        self.out = nn.Linear(CHANNELS, CHANNELS)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        with contextlib.nullcontext() if self.kernel is None else sdpa_kernel(self.kernel):
            out = F.scaled_dot_product_attention(q, k, v, self.bias)
        return self.out(out.transpose(1, 2).flatten(2))


class GatheredClipped(PerformerAttention):
    """Strategy 2 as the paper writes it: the double sum over the window, values gathered for every pair.

    Of the ways tried (scatter_add, segment_reduce, one product of all heads) a product for each head was the fastest.
    """

    def window_of(self, grid: PixelGrid, device: str) -> GatheredClipped:
        _, source, offsets, exists = grid.pairs(device)
        self.source, self.exists = source.view(len(grid), -1), exists.view(len(grid), -1)
        self.distance = offsets.abs().sum(1)[: self.source.shape[1]]
        nn.init.constant_(self.positions.variance.log, math.log(0.5))  # variance 1, as linear_attention has it
        return self

    def forward(self, x: Tensor, *, grid: PixelGrid) -> Tensor:
        x, table, draws = x[0], self.positions.distance_table, self.features(x.device, x.dtype)
        query, value = (p(x).unflatten(-1, (self.heads, -1)) for p in (self.query, self.value))
        content = self.heads - len(table)
        key = self.key(x).unflatten(-1, (content, -1))
        first = linear_attention(query[:, :content], key, value[:, :content], draws)
        root = self.head_channels**0.25  # of the scale of scores
        weights = softmax_features(query[:, content:] / root, draws).transpose(0, 1)
        weights = (weights @ softmax_features(table / root, draws).mT).transpose(0, 1)
        far, own = weights[..., -1:], weights[..., :1]
        pairs = (weights[..., self.distance] - far) * self.exists[:, None]
        seen = value[:, content:]
        numerator = self.pair_sums(pairs, seen) + far * seen.sum(0) + (own - far) * seen
        second = numerator / (pairs.sum(-1, keepdim=True) + far * (len(x) - 1) + own)
        return self.out(torch.cat([first, second], 1).flatten(1))[None]

    def pair_sums(self, pairs: Tensor, value: Tensor) -> Tensor:
        """Sum over each node's window of weights (N, heads, pairs) times gathered values (N, heads, d)."""
        seen = value.transpose(0, 1).contiguous()
        sums = [(pairs[:, None, head] @ seen[head][self.source])[:, 0] for head in range(len(seen))]
        return torch.stack(sums, 1)


def local_term(gathered: bool, grid: PixelGrid, device: str):
    """The sum over the window alone, of both ways: from weights of every distance (N, heads, k) and values."""
    half = HEADS // 2
    weights = nn.Parameter(torch.rand(len(grid), half, CLIPPED, device=device))
    value = nn.Parameter(torch.randn(len(grid), half, HEAD_CHANNELS, device=device))
    layer = GatheredClipped(CHANNELS, CHANNELS, HEADS, position="clipped", cutoff=CLIPPED, method="features").to(device)
    layer.inputs = nn.ParameterList([weights, value])  # whose gradients are then dropped between calls
    if gathered:
        layer.window_of(grid, device)
        return layer, lambda: layer.pair_sums(weights[..., layer.distance] * layer.exists[:, None], value)
    bins = distance_bins(grid.neighbors(1, device), CLIPPED)
    ones = torch.ones(1, len(bins.col), device=device)

    def rings() -> Tensor:
        sums = edge_sum(ones, value.flatten(1)[None], bins)[0, :-1].view(len(grid), CLIPPED, half, HEAD_CHANNELS)
        return sum(weights[..., d, None] * sums[:, d] for d in range(CLIPPED))

    return layer, rings


def bias_of(grid: PixelGrid, table: Tensor) -> Tensor:
    """A window's table as the dense additive bias (1, heads, N, N); zero beyond the window."""
    target, source, offsets, exists = grid.pairs(table.device)
    side = 2 * WINDOW - 1
    index = (offsets[:, 0] + WINDOW - 1) * side + offsets[:, 1] + WINDOW - 1
    bias = table.new_zeros(1, HEADS, len(grid), len(grid))
    bias[0, :, target[exists], source[exists]] = table[:, index[exists]]
    return bias


def prepare(variant: str, size: int, device: str):
    """The layer and a call of it without arguments."""
    x = torch.randn(1, size * size, CHANNELS, device=device)
    if variant == BASE:
        from torch_geometric.nn.attention import PerformerAttention as Peer

        layer = Peer(CHANNELS, HEADS, HEAD_CHANNELS).to(device)
        return layer, lambda: layer(x)
    if variant == "performer-pytorch":
        from performer_pytorch import SelfAttention

        layer = SelfAttention(CHANNELS, heads=HEADS, dim_head=HEAD_CHANNELS).to(device)
        return layer, lambda: layer(x)
    grid = PixelGrid((size, size), CLIPPED if "clipped" in variant else WINDOW)
    if variant.startswith("local term"):
        return local_term("gathered" in variant, grid, device)
    if variant.startswith("SDPA flash"):
        dtype = HALF[variant.split(", ")[1]]
        layer, half = SoftmaxAttention(kernel=SDPBackend.FLASH_ATTENTION).to(device, dtype), x.to(dtype)
        return layer, lambda: layer(half)
    if variant.startswith("SDPA"):
        biased = "bias" in variant
        bias = bias_of(grid, torch.randn(HEADS, (2 * WINDOW - 1) ** 2, device=device)) if biased else None
        layer = SoftmaxAttention(bias, SDPBackend.EFFICIENT_ATTENTION if biased and is_cuda(device) else None)
        layer.to(device)
        return layer, lambda: layer(x)
    position = None if variant == "None" else variant.split(",")[0]
    if variant == "window, edges":
        from tg_equiattn.integrations.pyg import RelativePerformerConv

        layer = RelativePerformerConv(CHANNELS, CHANNELS, HEADS, cutoff=WINDOW, method="features").to(device)
        edge_index, offsets = (t.to(device) for t in grid.edges())
        return layer, lambda: layer(x[0], edge_index, edge_offset=offsets)
    sizes = CHANNELS, CHANNELS, HEADS
    kind = GatheredClipped if "gathered" in variant else PerformerAttention
    layer = kind(*sizes, position=position, cutoff=int(grid.cutoff), method="features")
    layer = layer.window_of(grid, device) if kind is GatheredClipped else layer
    layer = layer.to(device)
    if "autocast" in variant:
        return layer, lambda: autocast(lambda: layer(x, grid=grid), device)
    return layer, lambda: layer(x, grid=grid)


def autocast(call, device: str) -> Tensor:
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        return call()


def floor_of(variant: str, size: int, direction: str) -> Floor | None:
    """The floor of features, of features and a window, or of exact attention; none for the others."""
    tokens, backward = size**2, direction == "forward+backward"
    count = int(HEAD_CHANNELS * math.log(HEAD_CHANNELS))  # of random features, as in both other Performers
    if variant.startswith("SDPA"):
        core = softmax_pairs(tokens**2, HEADS, HEAD_CHANNELS, "bias" in variant, backward)
        return attention_layer(
            tokens, CHANNELS, core, backward, "flash" in variant, HEADS * tokens**2 if "bias" in variant else 0
        )
    if variant not in (BASE, "performer-pytorch", "None", "window", "window, edges", "window, bf16 autocast"):
        return None
    core = features(tokens, HEADS, HEAD_CHANNELS, count, variant != BASE, backward)
    if "window" in variant:
        near = softmax_pairs(near_pairs(size, WINDOW), HEADS, HEAD_CHANNELS, True, backward)
        core = core[0] + near[0], core[1] + near[1]
    return attention_layer(tokens, CHANNELS, core, backward, "autocast" in variant)


def measure_variant(variant: str, size: int, direction: str, repeats: int, device: str) -> dict:
    torch.manual_seed(0)
    prepare(variant, 8, device)[1]().sum().backward()  # what libraries load at the first call is not the layer's
    return measure(lambda: prepare(variant, size, device), direction == "forward+backward", repeats, 2, device)


def summary(results: dict, sizes: list[int]) -> list[str]:
    """How time grows with N, and from how many pixels each variant is faster than exact attention."""
    lines = []
    for direction in DIRECTIONS:
        for variant in VARIANTS[4:10]:
            times = {n: results[variant, n, direction] for n in sizes}
            if any(isinstance(t, str) for t in times.values()):
                continue
            growth = [
                (times[b]["seconds"] / times[a]["seconds"]) ** (1 / (2 * math.log2(b / a)))
                for a, b in itertools.pairwise(sizes)
            ]
            where = crossing(times, {n: results["SDPA", n, direction] for n in sizes}, sizes)
            growth = ", ".join(f"{g:.2f}" for g in growth)
            lines.append(f"{variant}, {direction}: time per doubling of N {growth or '-'}; faster than SDPA {where}")
    return lines


def against_flash(results: dict, sizes: list[int]) -> list[str]:
    """Time of an image by the window and by the flash kernel."""
    lines = []
    for size, direction in itertools.product(sizes, DIRECTIONS):
        flash = [results[v, size, direction] for v in GPU_VARIANTS[:2]]
        flash = min((t["seconds"] for t in flash if not isinstance(t, str)), default=None)
        for variant in ("window", GPU_VARIANTS[2]):
            ours = results[variant, size, direction]
            if flash is not None and not isinstance(ours, str):
                side = "ahead" if ours["seconds"] < flash else "not ahead"
                lines.append(
                    f"{size} x {size}, {direction}: {variant} {1000 * ours['seconds']:.3f} ms an image, SDPA's flash "
                    f"kernel in half precision {1000 * flash:.3f} ms: {flash / ours['seconds']:.2f} times, {side}"
                )
    return lines


def crossing(ours: dict, exact: dict, sizes: list[int]) -> str:
    """Pixels from which ours is faster, interpolated between sizes on logarithmic axes."""
    if any(isinstance(t, str) for t in exact.values()):
        return "unknown"
    lead = [math.log(exact[n]["seconds"] / ours[n]["seconds"]) for n in sizes]
    if lead[0] > 0:
        return f"at {sizes[0] ** 2} pixels already"
    for n, (a, b) in enumerate(itertools.pairwise(lead)):
        if a <= 0 < b:
            low, high = (math.log(2 * sizes[k]) for k in (n, n + 1))
            side = math.exp(low - a * (high - low) / (b - a)) / 2
            return f"from about {round(side**2, -2):.0f} pixels"
    return f"not up to {sizes[-1] ** 2} pixels"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=int, default=[32, 64, 128], help="pixels a side")
    parser.add_argument("--variants", nargs="+", choices=(*VARIANTS, *GPU_VARIANTS),
                        help="default all; on the CPU not the last three")  # fmt: skip
    add_arguments(parser, "out/benchmarks/linear_attention.md")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure_variant(*json.loads(options.measure))))
        return

    every = *VARIANTS, *GPU_VARIANTS
    variants, rates = chosen(options.variants, every, options.device, GPU_VARIANTS), machine_rates(options)
    sizes = sorted(options.sizes)
    results: dict[tuple, dict | str] = dict.fromkeys(itertools.product(every, sizes, DIRECTIONS), "-")
    work = [(v, n, d) for n in sizes for d in DIRECTIONS for v in variants]
    for variant, size, direction in tqdm(work, desc="linear attention", disable=None):
        results[variant, size, direction] = in_own_process(
            __file__, variant, size, direction, options.repeats, options.device
        )
    rows = []
    for direction, n in itertools.product(DIRECTIONS, sizes):
        rows += ["", f"{n} x {n} pixels, {direction}:", ""]
        rows += table(["layer", "ms", "GiB", "floor, ms", "times floor"])
        for variant in variants:
            value = results[variant, n, direction]
            cells = [milliseconds(value, results[BASE, n, direction]), cell(value, "", "bytes")]
            cells += floor_cells(value, floor_of(variant, n, direction), rates, 1e-3)
            rows.append(f"| {variant} | {' | '.join(cells)} |")
    rows += ["", *(f"- {line}" for line in summary(results, sizes) + against_flash(results, sizes))]
    note = (
        f"{HEADS} heads of {HEAD_CHANNELS}, one image, whole layers with projections, cutoff {CLIPPED} (clipped) "
        f"and {WINDOW} (window); {machine(options.device)}. In brackets: time as a multiple of {BASE}'s; "
        f"{floor_note(rates)}"
    )
    report(note, rows, options.output)


def milliseconds(value: dict | str, base: dict | str) -> str:
    if isinstance(value, str):
        return value
    text = short(1000 * value["seconds"])
    return text if isinstance(base, str) else f"{text} ({value['seconds'] / base['seconds']:.2f})"


if __name__ == "__main__":
    main()
