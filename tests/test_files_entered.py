"""One call passes through few files, as CONTRIBUTING.md says."""

import sys
from pathlib import Path

import pytest
import torch

import tg_equiattn

LIBRARY = Path(tg_equiattn.__file__).parents[1]


def group_attention():
    from escnn import gspaces, nn
    from tg_equiattn.integrations.escnn import R2GroupAttention

    space = gspaces.rot2dOnR2(4)
    fields = nn.FieldType(space, 8 * [space.regular_repr])
    layer, x = R2GroupAttention(fields, fields, kernel_size=5), fields(torch.randn(2, 32, 16, 16))
    return lambda: layer(x)


def performer():
    from tg_equiattn.integrations.pyg import RelativePerformerConv

    layer = RelativePerformerConv(16, 16, heads=2, offset="mlp", cutoff=1.0, method="features")
    x, pos, edges, batch = torch.randn(40, 16), torch.randn(40, 2), torch.randint(40, (2, 160)), torch.zeros(40).long()
    return lambda: layer(x, edges, batch, pos=pos)


def of_irreps(name, **options):
    from tg_equiattn.integrations import e3nn

    layer = getattr(e3nn, name)("16x0e+16x1o", "16x0e+16x1o", **options)
    x, pos, batch = torch.randn(60, 64), 4 * torch.randn(60, 3), torch.arange(3).repeat_interleave(20)
    return lambda: layer(x, pos, batch)


CALLS = {
    "escnn": group_attention, "torch_geometric": performer,
    "e3nn, waves": lambda: of_irreps("IrrepsEwaldAttention", width=1.0),
    "e3nn, Hyena": lambda: of_irreps("IrrepsSE3HyenaOperator"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_files_entered(name):
    pytest.importorskip(name.split(",")[0])
    call, files = CALLS[name](), set()
    call()  # the first one fills tables

    def enter(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(LIBRARY) and not path.is_relative_to(LIBRARY / "tests"):
            files.add(path.relative_to(LIBRARY))

    sys.setprofile(enter)
    call()
    sys.setprofile(None)
    files = {file for file in files if file.parts[0] in ("tg_equiattn", "integrations")}
    assert 5 < len(files) <= 14, sorted(map(str, files))
