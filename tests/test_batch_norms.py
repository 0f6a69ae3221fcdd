"""Models with batch norms: converted to torch's SyncBatchNorm, and given no data.

SyncBatchNorm adds up statistics of several processes on CUDA only; on one process it runs on the CPU too.
"""

import pytest
import torch
from cases import CASES, agree, run
from group_layers import block
from torch.nn.modules.batchnorm import _BatchNorm

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupTransformer

C4 = cyclic(4)


def gps_block():
    from tg_equiattn.integrations.pyg import RelativeGPSBlock
    from torch_geometric.nn import SAGEConv

    return RelativeGPSBlock(12, SAGEConv(12, 12), 3, norm="batch_norm", attn_kwargs={"cutoff": 3, "offset": "distance"})


NAMES = (
    "GroupAttentionBlock",
    "GroupTransformer batch",
    "RelativePerformer batch",
    "R2AttentionBlock",
    "R3AttentionBlock",
)
MODELS = {name: CASES[name] for name in NAMES} | {
    "RelativeGPSBlock": CASES["RelativeGPSBlock"]._replace(make=gps_block)
}


def norms(module):
    return [m for m in module.modules() if isinstance(m, _BatchNorm)]


@pytest.fixture(params=MODELS)
def model(request):
    case = MODELS[request.param]
    pytest.importorskip(case.host)
    (module, inputs), (other, _) = case.build(torch.float64), case.build(torch.float64)
    run(module, inputs)  # statistics that are not those of the start
    other.load_state_dict(module.state_dict())
    return module, other, inputs


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_converted_to_sync_batch_norm(model, training):
    """The same outputs, gradients and running statistics."""
    module, other, inputs = model
    converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(other).train(training)
    assert all(isinstance(m, torch.nn.SyncBatchNorm) for m in norms(converted))
    agree(run(converted, inputs), run(module.train(training), inputs), 1e-10)
    for name, statistic in module.named_buffers():
        torch.testing.assert_close(dict(converted.named_buffers())[name], statistic)


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_converted_ones_refuse_masks(training):
    mask = torch.rand(2, 5, 6) < 0.7
    for module, x in (
        (block(C4), torch.randn(2, 3, 4, 5, 6)),
        (GroupTransformer(C4, 2, 3, channels=(6,), heads=2, kernel_size=3), torch.randn(2, 2, 5, 6)),
    ):
        converted = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module).train(training)
        assert converted(x).isfinite().all()
        with pytest.raises(RuntimeError, match=r"mask must be None with SyncBatchNorm, .* norm='layer'"):
            converted(x, mask)
