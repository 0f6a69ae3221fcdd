"""One small checkpoint per family, with an input and the output it gave. Later versions must load it and agree.

    python tests/helpers/golden.py     # writes the files of tests/golden that do not exist; never write one again

A file that no longer loads means that users' checkpoints do not load: add a conversion, or say so in the changelog and
replace the file.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tg_equiattn import nn
from tg_equiattn.groups import cyclic

FOLDER = Path(__file__).parents[1] / "golden"


NODES = (1, 5, 2), (1, 5, 1, 3), {"pos": (1, 5, 3)}
FAMILIES = {  # a module, shapes of its arguments, and those of named ones
    "group": (lambda: nn.GEViT(cyclic(4), 1, 3, channels=(4, 4), heads=2, kernel_size=3), (1, 1, 7, 7), {}),
    "frames": (
        lambda: nn.GroupAttention(cyclic(4), 3, 2, heads=4, head_channels=3, kernel_size=3, content_heads=1),
        (1, 3, 4, 5, 6), {},
    ),
    "performer": (
        lambda: nn.PerformerAttention(
            4, 4, heads=2, num_random_features=5, pos_dim=2, offset="distance", cutoff=1.5
        ), (11, 4), {"pos": (11, 2)},
    ),
    "hyena": (lambda: nn.SE3Hyena(2, 1, 1, 1, hidden_scalars=3, hidden_vectors=2, num_layers=1), *NODES),
    "implicit": (
        lambda: nn.SE3HyenaOperator(2, 2, filter="implicit", mixed_products=False, short_conv=3),
        (1, 5, 2), (1, 5, 2, 3), {"pos": (1, 5, 3)},
    ),
    "vectors": (lambda: nn.VectorSelfAttention(2, 2), (1, 5, 2), (1, 5, 2, 3), {"pos": (1, 5, 3)}),
    "ewald": (lambda: nn.EwaldAttention(2, 1, width=1.0, output_scale=5), *NODES),
}  # fmt: skip


def made(name):
    """A module of a family in float64, and the arguments of its call; the same in every run."""
    torch.manual_seed(7)
    make, *shapes, named = FAMILIES[name]
    module, arguments = make(), tuple(torch.randn(shape).double() for shape in shapes)
    return module.double().eval(), arguments, {key: torch.randn(shape).double() for key, shape in named.items()}


def outputs(out):
    return list(out) if isinstance(out, tuple) else [out]


def write(name):
    """Random weights and what the module makes of a random input."""
    module, arguments, named = made(name)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        out = outputs(module(*arguments, **named))
    FOLDER.mkdir(exist_ok=True)
    torch.save({"state": module.state_dict(), "input": arguments, "named": named, "output": out}, FOLDER / f"{name}.pt")


if __name__ == "__main__":
    for name in FAMILIES:
        if not (FOLDER / f"{name}.pt").exists():
            write(name)
