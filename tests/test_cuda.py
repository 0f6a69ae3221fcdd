"""What only a GPU shows: captured graphs, no synchronisation, the CPU's numbers."""

import gc

import pytest
import torch
from cases import agree, moved, run
from devices import DEVICES, waiting_is_an_error
from whole_models import MODELS, Fixed

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention

if len(DEVICES) == 1:
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.device


def close(got, wanted, tolerance=1e-4):
    scale = max(1e-3, float(wanted.detach().abs().max())) if wanted.numel() else 1.0
    torch.testing.assert_close(got.detach(), wanted.detach(), rtol=0, atol=tolerance * scale)


@pytest.fixture
def device():
    return DEVICES[1]


@pytest.fixture(params=MODELS)
def fixed(request):
    return Fixed(request.param).eval()


def test_reduce_overhead(fixed, device):
    fixed.to(device)
    compiled = torch.compile(fixed, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for _ in range(4):  # two of which warm up and record
            x = fixed.sample(device)
            close(compiled(x).clone(), fixed(x))


def test_nothing_waits(case, device):
    """Forward and backward, once caches are filled and TorchScript (e3nn's) has settled."""
    module, inputs = case.build(torch.float32)
    module, inputs = module.to(device), moved(inputs, device)
    for _ in range(3):
        run(module, inputs)
    with waiting_is_an_error():
        run(module, inputs)


def test_waiting_is_seen(device):
    """Negative control."""
    x = torch.ones(3, device=device)
    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-4)])
def test_a_gpu_gives_the_cpus_numbers(case, dtype, tolerance, device):
    module, inputs = case.build(dtype)
    expected = run(module, inputs)
    got = run(module.to(device), moved(inputs, device))
    assert all(x.device.type == device for x in got[0])
    agree(got, expected, tolerance)


# last, because after a failed capture all calls of the process fail


def captured(function):
    """A graph of it, warmed up on a side stream as it has to be, and what a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # no graph of an earlier call may be alive
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function()
    return graph, out


def test_training_step_in_a_cuda_graph(fixed, device):
    """Forward and backward captured together: gradients of a replay are those of an eager step."""
    fixed.to(device).train()
    x, parameters = fixed.sample(device), list(fixed.parameters())

    def step():
        loss = fixed(x).square().mean()
        return loss, torch.autograd.grad(loss, parameters, allow_unused=True)

    graph, (loss, grads) = captured(step)
    for _ in range(3):
        x.copy_(fixed.sample(device))
        graph.replay()
        expected, wanted = step()
        close(loss, expected)
        assert any(g is not None and bool(g.any()) for g in wanted)
        for a, b in zip(grads, wanted, strict=True):
            assert (a is None) == (b is None)
            if b is not None:
                close(a, b, 1e-3)


def test_a_replay_drops_other_weights(device):
    layer = GroupAttention(cyclic(4), 3, 7, heads=2, kernel_size=3, dropout=0.5).to(device)
    x = torch.randn(2, 3, 4, 6, 6, device=device)
    graph, out = captured(lambda: layer(x))
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
