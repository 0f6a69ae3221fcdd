"""Do scalar outputs change when a cloud is turned? Erwin, whose ball trees are cut along axes, and our layers.

    python examples/benchmarks/turned.py --erwin ~/erwin

``--erwin`` is a copy of github.com/maxxxzdn/erwin, which needs einops and balltree-erwin. Weights are those of the
start, in float64. A cloud of 512 points with random features is turned at random about its mean ten times. The table
has the largest and the root mean square of changes, relative to the spread (standard deviation) over points.
"""

import argparse
import sys
import types
from pathlib import Path

import torch
from e3nn import o3
from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention, IrrepsVectorSelfAttention

POINTS, TURNS = 512, 10
IRREPS = o3.Irreps("16x0e + 8x1o")


def erwin(folder):
    """The model of its README, with 16 scalars as inputs and outputs, without messages."""
    sys.path.append(str(folder.expanduser().absolute()))
    sys.modules.setdefault("torch_cluster", types.ModuleType("torch_cluster"))  # for edges, which are not asked for
    from models.erwin import ErwinTransformer

    model = ErwinTransformer(
        c_in=16, c_hidden=[16, 32], ball_sizes=[64, 64], enc_num_heads=[2, 4], enc_depths=[2, 2], dec_num_heads=[2],
        dec_depths=[2], strides=[2], mlp_ratio=4, decode=True, mp_steps=0, rotate=45,
    ).eval()  # fmt: skip
    return lambda x, pos: model(x, pos, torch.zeros(len(pos), dtype=torch.long))


def ours(kind, **options):
    layer = kind(IRREPS, "16x0e", **options).eval()
    return lambda x, pos: layer(torch.cat([x, torch.zeros(len(x), IRREPS.dim - 16)], 1), pos)


@torch.no_grad()
def changes(model):
    """The largest and the root mean square, relative to the spread over points."""
    x, pos = torch.randn(POINTS, 16), POINTS ** (1 / 3) * torch.rand(POINTS, 3)
    pos = pos - pos.mean(0)
    before, squares, largest = model(x, pos), [], 0.0
    for _ in range(TURNS):
        change = (model(x, pos @ o3.rand_matrix().T) - before) / before.std(0)
        squares.append(change.square().mean())
        largest = max(largest, float(change.abs().max()))
    return largest, float(torch.stack(squares).mean().sqrt())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--erwin", type=Path, help="folder of a copy of github.com/maxxxzdn/erwin")
    settings = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    kinds = {
        "`IrrepsEwaldAttention`": lambda: ours(IrrepsEwaldAttention, width=1.0),
        "`IrrepsVectorSelfAttention`": lambda: ours(IrrepsVectorSelfAttention),
    }
    if settings.erwin:
        kinds["Erwin"] = lambda: erwin(settings.erwin)
    print("| model | largest change | root mean square |\n| --- | --- | --- |")
    for name, make in kinds.items():
        torch.manual_seed(0)
        largest, rms = changes(make())
        print(f"| {name} | {largest:.1e} | {rms:.1e} |", flush=True)


if __name__ == "__main__":
    main()
