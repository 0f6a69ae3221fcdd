"""Models of escnn, PyG and e3nn compiled ahead of time, which run where this library is not imported."""

import contextlib
import io
import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
AUTO = torch.export.Dim.AUTO
ALONE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
for inputs, expected in torch.load(sys.argv[1] + ".pt"):
    torch.testing.assert_close(run(*inputs), expected, rtol=1e-4, atol=1e-5)
print(any(name.split(".")[0] in ("tg_equiattn", "escnn", "torch_geometric", "e3nn") for name in sys.modules))
"""


def fields():
    """By this library's export, which leaves torch's own operators alone; batches and images of other sizes. One
    layer, which takes minutes."""
    with contextlib.redirect_stdout(io.StringIO()):
        from escnn import gspaces, nn

    from tg_equiattn.integrations.escnn import R2GroupAttention, to_standard_torch

    space = gspaces.rot2dOnR2(2)
    hidden = nn.FieldType(space, 3 * [space.regular_repr])
    attention = R2GroupAttention(hidden, hidden, heads=2, kernel_size=3)
    model = nn.SequentialModule(attention, nn.ReLU(hidden), nn.GroupPooling(hidden))
    return (
        to_standard_torch(model.eval()),
        [(torch.randn(*shape),) for shape in ((2, 6, 9, 8), (5, 6, 12, 7))],
        ({0: AUTO, 2: AUTO, 3: AUTO},),
    )


class Pair(torch.nn.Module):
    """A layer of two clouds of nine nodes at most, whose tensors have these names."""

    def __init__(self, layer, names):
        super().__init__()
        self.layer, self.names = layer.eval(), names.split()

    def forward(self, *tensors):
        return self.layer(**dict(zip(self.names, tensors, strict=True)), batch_size=2, max_num_nodes=9)


def waves():
    pytest.importorskip("e3nn")
    from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

    batches = [(torch.randn(n, 10), torch.randn(n, 3), (torch.arange(n) >= n // 2).long()) for n in (10, 14)]
    layer = IrrepsEwaldAttention("4x0e+2x1o", "4x0e+2x1o", width=1.0)
    return Pair(layer, "x pos batch"), batches, (({0: AUTO},) * 3,)


def graphs():
    """Attention along all pairs of nodes; by random features it is an operator of ours."""
    pytest.importorskip("torch_geometric")
    from tg_equiattn.integrations.pyg import RelativePerformerConv

    batches = []
    for n in (10, 14):
        edges, batch = torch.randint(n // 2, (2, 3 * n)), (torch.arange(n) >= n // 2).long()
        batches.append((torch.randn(n, 8), edges, batch, torch.randn(n, 2)))
    layer = RelativePerformerConv(8, 8, heads=2, offset="distance", cutoff=1.5, method="pairs")
    return Pair(layer, "x edge_index batch pos"), batches, (({0: AUTO}, {1: AUTO}, {0: AUTO}, {0: AUTO}),)


@pytest.mark.parametrize("make", [fields, graphs, waves])
def test_a_package_runs_alone(make, tmp_path):
    """For sizes that it was not exported at."""
    model, batches, sizes = make()
    path = str(tmp_path / "model.pt2")
    with torch.no_grad():
        program = torch.export.export(model, batches[0], dynamic_shapes=sizes)
        parts = [part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)]
        assert not any("tg_equiattn" in str(node.target) for part in parts for node in part.graph.nodes)
        torch._inductor.aoti_compile_and_package(program, package_path=path)
        torch.save([(inputs, model(*inputs)) for inputs in batches], path + ".pt")
    done = subprocess.run(
        [sys.executable, "-c", ALONE, path], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.strip() == "False", done.stderr
