"""What torch.compile does with batches of many sizes, and what it refuses."""

import pytest
import torch
from performers import EVERY
from tg_equiattn.integrations.pyg import RelativeGPSBlock
from torch._dynamo.testing import CompileCounter
from torch_geometric.nn import GCNConv


def batch_of(sizes):
    """Complete graphs of so many nodes: arguments of a call by name."""
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    edges = (batch[:, None] == batch).fill_diagonal_(False).nonzero().T.contiguous()
    pos = torch.rand(len(batch), 2, dtype=torch.float64)
    given = {"x": torch.randn(len(batch), 12, dtype=torch.float64), "edge_index": edges, "batch": batch, "pos": pos}
    return {**given, "batch_size": len(sizes), "max_num_nodes": max(sizes)}


MANY = (5, 9), (3, 4, 6), (1, 8, 9, 4), (3, 3, 3, 3, 3, 3)
ONE = (6,), (17,)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "mlp", "mlp values", "pairs", "block"])
def test_compilations(kind, make_conv):
    """One for several graphs, one for single ones; and one at first where sizes are not known to change."""
    options = {"offset": "mlp", "values": "offset", "method": kind} if kind in ("pairs", "auto") else EVERY.get(kind)
    if kind == "block":
        conv = RelativeGPSBlock(
            12, GCNConv(12, 12, add_self_loops=False), 3, attn_kwargs={"offset": "mlp", "cutoff": 3.0}
        )
        conv = conv.double().eval()
    else:
        conv = make_conv(**options)
    with torch._dynamo.config.patch(recompile_limit=8), torch.no_grad():
        for dynamic, first in ((True, 0), (None, 1)):
            torch.compiler.reset()
            counter = CompileCounter()
            compiled = torch.compile(conv, fullgraph=True, dynamic=dynamic, backend=counter)
            for batches, compilations in ((MANY, 1 + first), (ONE, 2 + first), (MANY, 2 + first)):
                for sizes in batches:
                    compiled(**batch_of(sizes))
                assert counter.frame_count == compilations


def test_an_unsorted_batch_is_refused(make_conv):
    """By an assertion in the graph: the values of batch are not known before."""
    conv = make_conv(None)
    given = {**batch_of((3, 4)), "pos": torch.arange(7)[:, None].expand(7, 2) % 3}
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given), conv(**given))
    with pytest.raises(RuntimeError, match="batch must be sorted"):
        compiled(**{**given, "batch": given["batch"].flip(0)})
    with pytest.raises(ValueError, match="batch must be sorted"):
        conv(**{**given, "batch": given["batch"].flip(0)})
