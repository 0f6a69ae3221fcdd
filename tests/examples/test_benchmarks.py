"""What the benchmarks measure by: counts of work against brute force, the clock, the search, --device, and a run."""

import argparse
import itertools

import counts
import pytest
import torch
from floor import Rates, floor_cells, floor_seconds
from harness.devices import add_device, checked_device, index_of
from measure import measure, timings, warm_up
from running import number, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def test_pairs_of_pixels():
    pixels = list(itertools.product(range(6), repeat=2))
    pairs = [(abs(a - c), abs(b - d)) for a, b in pixels for c, d in pixels]
    assert counts.window_pairs(6, 5) == sum(max(p) <= 2 for p in pairs)
    assert counts.window_pairs(6, None) == len(pairs)
    assert counts.near_pairs(6, 4) == sum(sum(p) < 4 for p in pairs)
    assert counts.near_pairs(2, 4) == 16


def products(function, *inputs):
    with FlopCounterMode(display=False) as counter:
        function(*inputs).sum().backward()
    return counter.get_total_flops()


def test_feature_and_softmax_counts():
    """All but a few operations a feature or pair are those of matrix products, which torch counts."""
    n, d, m = 13, 5, 7
    q, k, v = (torch.randn(n, d, requires_grad=True) for _ in range(3))
    directions = torch.randn(m, d)
    by_features = products(
        lambda q, k, v: (q @ directions.T).exp() @ ((k @ directions.T).exp().T @ v),
        q, k, v,
    )  # fmt: skip
    flops, exponentials = counts.features(n, 1, d, m, True, True)
    assert flops - by_features == n * 3 * m
    assert exponentials == 2 * n * m
    exact = products(lambda q, k, v: (q @ k.T).softmax(1) @ v, q, k, v)
    assert counts.softmax_pairs(n * n, 1, d, False, True) == (exact + 3 * n * n, n * n)
    layer = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(4))
    x = torch.randn(n, d)
    linear = products(lambda x: layer[3](layer[0](x) + layer[1](x) + layer[2](x)), x)
    assert counts.attention_layer(n, d, (0, 0), True).flops == linear


def test_floor():
    rates = Rates(10.0, 100.0, 5.0, 400.0)
    assert floor_seconds(counts.Floor(50, 100, 5), rates) == 5
    assert floor_seconds(counts.Floor(50, 1000, 5), rates) == 10
    assert floor_seconds(counts.Floor(50, 1000, 5, half=True), rates) == 5
    assert floor_seconds(counts.Floor(50, 100, 35), rates) == 7
    assert floor_cells({"seconds": 10.0}, counts.Floor(50, 100, 5), rates) == ["5.00", "2.00"]
    assert floor_cells("out of memory", None, rates) == ["-", "-"]


def test_measuring():
    calls = []
    assert len(timings(lambda: calls.append(1), 4, 1.0, "cpu")) == 4
    assert warm_up(lambda: calls.append(1), 3, "cpu") < 1
    assert len(calls) == 7
    layer = nn.Linear(3, 2)
    result = measure(lambda: (layer, lambda: layer(torch.ones(20_000_000, 3))), True, 3, 1, "cpu")
    assert result["seconds"] > 0
    assert 3e8 < result["bytes"] < 3e9  # the input alone has 240 MB, which malloc never takes from freed memory
    assert layer.weight.grad is None


def test_device_flag(capsys):
    assert [index_of(name) for name in ("cuda", "cuda:0", "cuda:3")] == [0, 0, 3]
    parser = argparse.ArgumentParser()
    add_device(parser)
    assert parser.parse_args([]).device == "cpu"
    assert parser.parse_args(["--device", "cpu"]).device == "cpu"
    for name in ("meta", "nonsense", "cuda:", "cuda:x", "CUDA", "cpu:0"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--device", name])
        assert f"error: --device must be cpu, cuda or cuda:N, got {name!r}" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"torch sees (no CUDA device|1 CUDA device,|[2-9] CUDA devices)"):
        checked_device("cuda:99")


RATES = "--rates", 1e10, 1e11, 1e9
RUNS = {  # flags; how rows begin and how many there are; columns of the time, of the floor and of their ratio
    "clifford_product": (["--tokens", 200, "--variants", "eager"], "| 200 ", 2, None),
    "graph_attention": (["--loads", "molecules", "--variants", "dense", "pairs, mlp"], ("| dense ", "| pairs, "), 4,
                        None),
    "global_attention": (["--sizes", 12], "| 12 x 12 ", 6, None),
    "linear_attention": (["--sizes", 8, 12, "--variants", "PyG Performer", "SDPA", "window", *RATES],
                         ("| window |", "| SDPA |"), 8, (1, 3, 4)),
    "group_attention": (["--cases", "C4", "--size", 6, "--batch", 1, "--variants", "baseline", "eager", *RATES], "| C4",
                        4, (4, 6, 7)),
    "long_context": (["--tokens", 20, 31, "--lengths", 17, "--directions", "forward", *RATES, "--layers", "hyena",
                      "attention", "pairs"], ("| 17 ", "| 20 ", "| 31 "), 8, None),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run(tmp_path, name):
    flags, begin, count, columns = RUNS[name]
    table = tmp_path / "table.md"
    result = run(f"benchmarks/{name}.py", *flags, "--repeats", 1, "--output", table)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith(begin)]
    assert len(rows) == count
    for row in rows:
        if columns is not None:
            time, floor, ratio = (number(row[column]) for column in columns)
            assert ratio == pytest.approx(time / floor, rel=0.02)
        assert "out of memory" not in row
