"""What the benchmarks measure by: counts of work against brute force, the clock, the search, --device, and a run."""

import argparse
import itertools
import math

import counts
import pytest
import torch
from floor import Rates, floor_cells, floor_seconds
from harness.devices import add_device, checked_device, index_of
from measure import measure, timings, warm_up
from running import number, run
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tg_equiattn.functional.vector.clifford import PATH_OF, RIGHT


class Number:
    """A number that counts what is done with it."""

    operations = 0
    exponentials = 0

    def __init__(self, value):
        self.value = value

    def _with(self, value):
        Number.operations += 1
        return Number(value)

    def __add__(self, other):
        return self._with(self.value + getattr(other, "value", other))

    def __mul__(self, other):
        return self._with(self.value * other.value)

    def __sub__(self, other):
        return self._with(self.value - other.value)

    def __truediv__(self, other):
        return self._with(self.value / other.value)

    __radd__ = __add__  # sum() starts at 0: every term is a multiply-add

    def exp(self):
        Number.exponentials += 1
        return Number(math.exp(self.value))


@pytest.fixture(autouse=True)
def from_zero():
    Number.operations = Number.exponentials = 0


def numbers(*shape):
    if not shape:
        return Number(torch.randn(()).item())
    return [numbers(*shape[1:]) for _ in range(shape[0])]


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_group_attention_counts():
    """The factorised form written out on a 3 x 3 image, equal to the softmax, with every operation counted."""
    elements, width, size = 2, 3, 3
    pixels = list(itertools.product(range(size), repeat=2))
    each = range(elements)
    q, k, v = (dict(zip(pixels, numbers(len(pixels), elements, width), strict=True)) for _ in range(3))
    steps = list(itertools.product((-1, 0, 1), repeat=2))
    rho = {(h, d): numbers(width) for h in each for d in steps}
    rho_group = numbers(elements, width)
    index = [[[(h + t + s) % elements for s in each] for t in each] for h in each]
    out, pairs = {}, 0
    for i in pixels:
        near = [d for d in steps if (i[0] + d[0], i[1] + d[1]) in q]
        at = {d: (i[0] + d[0], i[1] + d[1]) for d in near}
        pairs += len(near)
        a = {(t, d, s): dot(q[i][t], k[at[d]][s]).exp() for t in each for d in near for s in each}
        space = {(t, d, h): dot(q[i][t], rho[h, d]).exp() for t in each for d in near for h in each}
        group = [[dot(q[i][t], rho_group[u]).exp() for u in each] for t in each]
        w = {(h, d, s): 0 for h in each for d in near for s in each}
        for h, t in itertools.product(each, each):
            product = {(d, s): space[t, d, h] * a[t, d, s] for d in near for s in each}
            summed = [sum(product[d, s] for d in near) for s in each]
            g = [group[t][index[h][t][s]] for s in each]
            z = dot(g, summed)
            scaled = [x / z for x in g]
            for d, s in product:
                w[h, d, s] = w[h, d, s] + product[d, s] * scaled[s]
        for h in each:
            out[i, h] = [sum(w[h, d, s] * v[at[d]][s][c] for d in near for s in each) for c in range(width)]
    assert pairs == counts.window_pairs(size, 3)
    done = Number.operations, Number.exponentials
    assert done == counts.group_core(elements, width, pairs, len(pixels), False)

    i, h, total = (0, 1), 1, [0.0] * width
    near = [d for d in steps if (i[0] + d[0], i[1] + d[1]) in q]
    for t in each:
        scores = {}
        for d, s in itertools.product(near, each):
            j = (i[0] + d[0], i[1] + d[1])
            keys = [x + y + z for x, y, z in zip(k[j][s], rho[h, d], rho_group[index[h][t][s]], strict=True)]
            scores[j, s] = math.exp(dot(q[i][t], keys).value)
        for (j, s), score in scores.items():
            for c in range(width):
                total[c] += score / sum(scores.values()) * v[j][s][c].value
    assert [x.value for x in out[i, h]] == pytest.approx(total)


def test_pairs_of_pixels():
    pixels = list(itertools.product(range(6), repeat=2))
    pairs = [(abs(a - c), abs(b - d)) for a, b in pixels for c, d in pixels]
    assert counts.window_pairs(6, 5) == sum(max(p) <= 2 for p in pairs)
    assert counts.window_pairs(6, None) == len(pairs)
    assert counts.near_pairs(6, 4) == sum(sum(p) < 4 for p in pairs)
    assert counts.near_pairs(2, 4) == 16


def products(function, *inputs):
    """Operations of the matrix products, forward and backward."""
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


def test_clifford_counts():
    """One token and channel of the product with weights, by paths."""
    x, y, weight = numbers(8), numbers(8), numbers(20)
    for j in range(8):
        by_path = {}
        for i in range(8):
            term = x[i] * y[RIGHT[j][i]]  # a sign costs nothing
            path = PATH_OF[j][i]
            by_path[path] = by_path[path] + term if path in by_path else term
        terms = [weight[path] * group for path, group in by_path.items()]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
    assert counts.clifford_product_flops(1, False) == Number.operations
    assert counts.clifford_product(2, 10, False).bytes == 3 * 8 * 2 * 10 * 4
    assert counts.clifford_product(2, 10, True).bytes == 7 * 8 * 2 * 10 * 4


def test_vector_attention_counts():
    """A pair of tokens: the squared length of the cross product, and what the sums over keys take."""
    q, k, v = numbers(3), numbers(3), numbers(3)
    q_square, k_square, kv = dot(q, q), dot(k, k), dot(k, v)  # of tokens, not of pairs
    sums, trace, total = numbers(3), Number(0.0), Number(0.0)
    Number.operations = 0
    product = q[0] * k[0] + q[1] * k[1] + q[2] * k[2]
    length = q_square * k_square - product * product
    p = Number(length.value**0.5).exp()
    scaled = p * (q[0] * v[0] + q[1] * v[1] + q[2] * v[2])
    sums = [s + scaled * c for s, c in zip(sums, k, strict=True)]
    trace, total = trace + p * kv, total + p
    assert Number.operations == counts.PAIR
    cross = torch.linalg.cross(*(torch.tensor([c.value for c in x]) for x in (q, k)), dim=0)
    assert length.value == pytest.approx(float(cross.square().sum()), rel=1e-4, abs=1e-5)


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
    result = measure(lambda: (layer, lambda: layer(torch.ones(2_000_000, 3))), True, 3, 1, "cpu")
    assert result["seconds"] > 0
    assert 3e7 < result["bytes"] < 3e8  # the input alone has 24 MB
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
