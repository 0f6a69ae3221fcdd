"""Within an e3nn model: linear maps, a gate, the operator, message passing along a radius graph."""

import pytest
import torch
from e3nn import nn, o3
from space import batch_of

SIZES, RADIUS = (7, 1, 11, 5), 1.5
INSIDE, HIDDEN, OUTSIDE = "3x0e+1x1o", "5x0e+3x1o+2x1e", "1x0e+1x1o"


class MessagePassing(torch.nn.Module):
    """x_i + sum_j x_j (x) Y(r_ij) over pairs of a graph that are near."""

    def __init__(self, irreps):
        super().__init__()
        self.sh = o3.Irreps.spherical_harmonics(2)
        self.product = o3.FullyConnectedTensorProduct(irreps, self.sh, irreps)

    def forward(self, x, pos, batch):
        near = (torch.cdist(pos, pos) < RADIUS) & (batch[:, None] == batch) & ~torch.eye(len(pos), dtype=torch.bool)
        i, j = near.nonzero().T
        sh = o3.spherical_harmonics(self.sh, pos[j] - pos[i], normalize=True, normalization="component")
        return x.index_add(0, i, self.product(x[j], sh))


class Model(torch.nn.Module):
    def __init__(self, context):
        super().__init__()
        gate = nn.Gate("5x0e", [torch.nn.functional.silu], "5x0e", [torch.sigmoid], "3x1o+2x1e")
        self.first = o3.Linear(INSIDE + "+1x1e", gate.irreps_in)
        self.gate = gate
        self.context = context(gate.irreps_out, HIDDEN)
        self.local = MessagePassing(o3.Irreps(HIDDEN))
        self.last = o3.Linear(HIDDEN, OUTSIDE)

    def forward(self, x, pos, batch):
        x = self.gate(self.first(x))
        x = x + self.context(x, pos, batch)
        return self.last(self.local(x, pos, batch))


@pytest.mark.parametrize("context", ["hyena", "attention", "tensor"])
def test_equivariant(context, default_dtype, randomise, new_module, check_equivariant):
    model = randomise(Model(lambda *irreps: new_module(context, *irreps)))
    x, pos, batch = o3.Irreps(INSIDE + "+1x1e").randn(24, -1), torch.randn(24, 3), batch_of(SIZES)
    irreps_in = [INSIDE + "+1x1e", "cartesian_points"]
    check_equivariant(lambda x, pos: model(x, pos, batch), [x, pos], irreps_in, OUTSIDE)
