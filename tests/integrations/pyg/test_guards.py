"""Guards against silent errors: edges left out, rounded or missing positions, old near pairs, ranks without nodes."""

import warnings

import pytest
import torch
from performers import EVERY
from tg_equiattn.integrations.pyg import RelativeGPSBlock, RelativePerformerConv
from torch_geometric.nn import GATv2Conv

CHAIN = torch.arange(11)
BONDS = torch.cat([torch.stack([CHAIN, CHAIN + 1]), torch.stack([CHAIN + 1, CHAIN])], 1)
POS = torch.nn.functional.pad(1.5 * torch.arange(12.0)[:, None], (0, 2))  # bonds of 1.5
SPACE = {"pos_dim": 3, "offset": "distance", "method": "pairs"}


@pytest.mark.parametrize("method", ["pairs", "features"])
def test_edges_beyond_the_cutoff_warn_once(method):
    """offset="distance" leaves them out with their features."""
    conv = RelativePerformerConv(12, 12, heads=3, **{**SPACE, "method": method}, cutoff=1.0, edge_dim=5)
    x, kinds = torch.randn(12, 12), torch.rand(22, 5)
    message = r"longer than cutoff=1, with their edge_attr: 22 of the 22 pairs .* 2 \* mean_edge_length"
    with pytest.warns(UserWarning, match=message):
        conv(x, BONDS, pos=POS, edge_attr=kinds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conv(x, BONDS, pos=POS, edge_attr=kinds)


@pytest.mark.parametrize("offset", ["distance", "mlp"])
def test_edges_within_the_cutoff_do_not_warn(offset):
    """Nor some that are longer, nor other offsets, which reach any edge."""
    conv = RelativePerformerConv(12, 12, heads=3, **{**SPACE, "offset": offset}, cutoff=1.6)
    pos = POS.clone()
    pos[:4] *= 10 if offset == "distance" else 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        conv(torch.randn(12, 12), BONDS, pos=pos)


@pytest.mark.parametrize("values", ["content", "offset"])
@pytest.mark.parametrize("edges", [BONDS, None], ids=["edges", "found"])
def test_a_node_without_a_position_is_refused(edges, values):
    """Also where no edge leads to it."""
    conv = RelativePerformerConv(12, 12, heads=3, **SPACE, cutoff=2.0, values=values)
    pos = torch.cat([POS, torch.full((1, 3), torch.nan)])
    with pytest.raises(ValueError, match=r"pos must be finite, got NaN or infinity"):
        conv(torch.randn(13, 12), edges, torch.zeros(13).long(), pos=pos)


@pytest.mark.parametrize("values", ["content", "offset"])
def test_near_pairs_of_other_positions_are_refused(values):
    """Moving all nodes alike is no other position."""
    block = RelativeGPSBlock(12, None, 3, attn_kwargs={**SPACE, "cutoff": 2.0, "values": values}).eval()
    x, near = torch.randn(12, 12), block.neighbors(BONDS, pos=POS, num_nodes=12)
    out = block(x, pos=POS, neighbors=near)
    torch.testing.assert_close(block(x, pos=POS + 7, neighbors=near), out, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"neighbors must be of the same positions as pos"):
        block(x, pos=POS + 0.1 * torch.randn(12, 3), neighbors=near)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("name", EVERY)
def test_every_parameter_has_numbers_and_a_gradient(name, heads, make_conv, point_graphs):
    """DistributedDataParallel waits for each in every step."""
    conv, data = make_conv(**{"heads": heads, "out_channels": 12, **EVERY[name]}).train(), point_graphs((13, 2, 17))
    conv(data.x, data.edge_index, data.batch, pos=data.pos).square().sum().backward()
    for parameter_name, parameter in conv.named_parameters():
        assert parameter.numel(), parameter_name
        assert parameter.grad is not None, parameter_name


@pytest.mark.parametrize("method", ["pairs", "features"])
@pytest.mark.parametrize("norm", ["batch_norm", "layer_norm", None])
def test_a_rank_without_nodes_gives_zero_gradients(norm, method):
    """To every parameter: DistributedDataParallel waits for each."""
    attention = {**SPACE, "cutoff": 2.0, "values": "offset", "edge_dim": 5, "method": method}
    conv = GATv2Conv(12, 4, heads=3, edge_dim=5)
    block = RelativeGPSBlock(12, conv, heads=3, norm=norm, attn_kwargs=attention)
    nodes, edges = {"batch": torch.zeros(0).long(), "pos": torch.zeros(0, 3)}, torch.zeros(2, 0).long()
    out = block(torch.randn(0, 12), edges, edge_attr=torch.zeros(0, 5), **nodes, batch_size=2)
    out.sum().backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name
