"""Transformer blocks of frames beside the plain block of equal width, side by side in one process.

The plain block is timm's ``Block`` (``pip install timm torchvision``, torchvision of the same index as torch), without
positions; ours have rotary positions. With --octic, the block of octic ViTs (https://github.com/davnords/octic-vits,
D4, positions outside of the block) is measured, too; with --platonic, that of Platonic Transformers
(https://github.com/niazoys/PlatonicTransformers, with attention and rotary positions). Both are folders with a copy of
that code. Columns are the time of timm's block in milliseconds and that of the other block as a multiple of it, without
gradients and in training; bytes that autograd keeps for the backward pass, parameters included; parameters; and
products of a forward pass.

Times are medians of interleaved rounds, of the processor on one thread, or with --device cuda by the clock.

    python examples/benchmarks/transformers.py                          # an hour
    python examples/benchmarks/transformers.py --widths 384 --tokens 196 --repeats 3
    python examples/benchmarks/transformers.py --octic ../octic-vits --platonic ../PlatonicTransformers
    python examples/benchmarks/transformers.py --compiled --widths 384 768 --tokens 196
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from defaults import forward, table, training
from harness.devices import is_cuda
from measure import add_device, medians
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from tg_equiattn.grids import centred_positions
from tg_equiattn.groups import cyclic, dihedral, octahedral
from tg_equiattn.nn import FrameTransformerBlock

GROUPS = {"C4": cyclic(4), "D4": dihedral(4), "cube": octahedral()}


class Frames(nn.Module):
    """A block of frames within a model: Fourier coefficients in and out, on a grid of patches."""

    def __init__(self, name: str, width: int, tokens: int) -> None:
        super().__init__()
        group = GROUPS[name]
        self.block = FrameTransformerBlock(group, width // len(group))
        side = round(tokens ** (1 / group.dim))
        sides = [side] * (group.dim - 1) + [-(-tokens // side ** (group.dim - 1))]
        self.register_buffer("places", centred_positions(sides, torch.device("cpu"), torch.float32)[None, :tokens])

    def forward(self, x: Tensor) -> Tensor:
        return self.block.transform(x, self.places, None)


class Octic(nn.Module):
    """The block of octic ViTs with rows of all irreps in and out, which are views of one tensor."""

    def __init__(self, width: int, device: str) -> None:
        super().__init__()
        from octic_vits.d8_layers import BlockD8

        options = {} if is_cuda(device) else {"act_layer": OcticGelu}  # its own is a kernel for GPUs
        self.block = BlockD8(width, max(1, width // 64), qkv_bias=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        *one, two = x.split([x.shape[-1] // 8] * 4 + [x.shape[-1] // 2], -1)
        *one, two = self.block((*one, two.unflatten(-1, (2, -1))))
        return torch.cat([*one, two.flatten(-2)], -1)


class OcticGelu(nn.Module):
    """GELU of octic features by functions of that code that need no GPU."""

    def __init__(self) -> None:
        super().__init__()
        from octic_vits import d8_layers, d8_utils

        self.gelu, self.to, self.back = (
            d8_layers.GeluD8(), d8_utils.convert_5tuple_to_8tuple, d8_utils.convert_8tuple_to_5tuple
        )  # fmt: skip

    def forward(self, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.back(self.gelu(self.to(parts)))


class Platonic(nn.Module):
    """The block of Platonic Transformers at the places of ours, with heads as wide."""

    def __init__(self, name: str, width: int, tokens: int) -> None:
        super().__init__()
        from platonic_transformers.models.platoformer.block import PlatonicBlock

        ours = Frames(name, width, tokens)
        self.register_buffer("places", ours.places)
        kind = {"C4": "cyclic_4", "D4": "dihedral_4", "cube": "octahedron"}[name]
        group = ours.block.group
        self.block = PlatonicBlock(
            width, len(group) * ours.block.heads, 4 * width, kind, dropout=0.0, spatial_dims=group.dim, attention=True,
            use_key=True,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x, self.places.expand(len(x), -1, -1))


def plain(width: int) -> nn.Module:
    from timm.models.vision_transformer import Block

    return Block(width, max(1, width // 64), qkv_bias=True)


def kept(module: nn.Module, x: Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, and those of the parameters."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in module.parameters()}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = module(x)
    del out
    return sum(storages.values())


def products(module: nn.Module, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(x)
    return counter.get_total_flops()


def measure(make: Callable[[], nn.Module], width: int, tokens: int, options: Any) -> list[str]:
    """The cells of a row."""
    modules = {"theirs": plain(width), "ours": make()}
    modules = {name: module.to(options.device) for name, module in modules.items()}
    x, cells = torch.randn(options.batch, tokens, width, device=options.device), []
    static = [f"{kept(modules['ours'], x) / kept(modules['theirs'], x):.2f}"]
    counts = [sum(p.numel() for p in module.parameters()) for module in modules.values()]
    flops = [products(module, x) for module in modules.values()]
    static += [f"{counts[1] / counts[0]:.3f}", f"{flops[1] / flops[0]:.2f}"]
    torch.compiler.reset()  # or blocks of other rows count as compiled again
    runs = {name: torch.compile(m, fullgraph=True) if options.compiled else m for name, m in modules.items()}
    for direction in (forward, training):
        calls = {name: direction(run, (x,)) for name, run in runs.items()}
        taken = medians(calls, options.repeats, options.device)
        cells += [f"{1e3 * taken['theirs']:.1f}", f"{taken['ours'] / taken['theirs']:.2f}"]
    return cells + static


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--widths", type=int, nargs="*", default=[192, 384, 768, 1024], help="multiples of 8")
    parser.add_argument("--tokens", type=int, nargs="*", default=[64, 196, 1024])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--groups", nargs="*", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--octic", type=Path, help="a folder with the code of octic ViTs")
    parser.add_argument("--platonic", type=Path, help="a folder with the code of Platonic Transformers")
    parser.add_argument("--compiled", action="store_true", help="compile all blocks")
    add_device(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.path += [str(path) for path in (options.octic, options.platonic) if path is not None]
    rows = []
    for tokens in options.tokens:
        for width in options.widths:
            blocks = {name: lambda n=name, w=width, t=tokens: Frames(n, w, t) for name in options.groups}
            if options.octic is not None:
                blocks["octic ViT, D4"] = lambda w=width: Octic(w, options.device)
            if options.platonic is not None:
                for each in options.groups:
                    blocks[f"Platonic, {each}"] = lambda n=each, w=width, t=tokens: Platonic(n, w, t)
            for name, make in blocks.items():
                group = GROUPS.get(name.removeprefix("Platonic, "))
                if group is not None and width % (2 * len(group)):
                    continue  # the cube has no width of 1024
                rows.append([name, str(width), str(tokens), *measure(make, width, tokens, options)])
                print(" ".join(rows[-1]), file=sys.stderr, flush=True)
    head = [
        "block",
        "width",
        "tokens",
        "timm, forward, ms",
        "times",
        "timm, training, ms",
        "times",
        "kept",
        "parameters",
    ]
    table([*head, "products"], rows)


if __name__ == "__main__":
    main()
