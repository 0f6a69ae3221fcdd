"""Launches, traffic and memory counted without a GPU: the counters by hand, and the table of the docs."""

import pytest
import torch
from cases import CASES, Call
from counting import count
from launches import LAYERS, ROWS, SIZES, measured, row, table
from torch import nn

from tg_equiattn.edges import CSR
from tg_equiattn.functional.backend import OPERATOR
from tg_equiattn.functional.hyena import fft_convolution
from tg_equiattn.functional.performer.edge_products import edge_dot, edge_sum

pytestmark = pytest.mark.filterwarnings("ignore")  # tracing on the device meta warns
FLOAT = 4
# which are too large for one at the large size
IN_TILES = ("GroupAttention, ge_vit",)
QUICK = ("GroupLinear", "GlobalPooling")


def eager(function, *shapes, parts=()):
    inputs = {name: torch.randn(*shape) for name, shape in zip("xyz", shapes, strict=False)}
    return count(Call(function, *parts), inputs)


def test_a_linear_layer_by_hand():
    """Forward reads input, weight and bias; backward forms two products and a sum, and reads what they take."""
    forward, training = eager(lambda linear, x: linear(x), (7, 3), parts=(nn.Linear(3, 5),))
    operands, out = 7 * 3 + 3 * 5 + 5, 7 * 5
    assert (forward.operations, forward.bytes, forward.peak) == (1, FLOAT * (operands + out), FLOAT * out)
    products = (out + 15 + 21) * 2  # gradient of the input: of 7 x 5 by 5 x 3; of the weight: of 5 x 7 by 7 x 3
    bias, ones = out + 5, out
    assert training.operations == 5
    assert training.bytes == forward.bytes + FLOAT * (products + bias + ones)
    assert training.peak == FLOAT * (out + out + 21 + 15 + 5)


@pytest.mark.parametrize(
    ("function", "launches", "numbers"),
    [
        (lambda x: x * x, 1, 2 * 35),  # an operand given twice is read once
        (lambda x: torch.zeros_like(x).copy_(x), 2, 3 * 35),  # zeros written, x read, the copy written
        (lambda x: x.clone().add_(1), 2, 4 * 35),
        (lambda x: x.sum(), 1, 36),
        # two int64 made and read
        (lambda x: x.index_select(0, torch.zeros(2, dtype=torch.int64, device=x.device)), 2, 2 * 14 + 2 * 4),
        (lambda x: x[:, :3] * 1, 1, 15 + 15),
        (lambda x: x[0].expand(11, 7) * 1, 1, 7 + 77),
        (lambda x: x.flatten().unfold(0, 5, 1) * 1, 1, 35 + 31 * 5),  # windows share what they hold
        (lambda x: x.mT.reshape(35)[7:].unflatten(0, (2, 14)).mT * 1, 2, 2 * 35 + 2 * 28),  # reshape copies here
    ],
)
def test_operations_by_hand(function, launches, numbers):
    """Views and allocations are no launches."""
    forward, _ = eager(function, (5, 7))
    assert (forward.operations, forward.bytes) == (launches, FLOAT * numbers)


def test_memory_is_given_back():
    """Of a chain of operations without gradients two results are there at once; with them what backward needs stays."""
    forward, training = eager(lambda x: x.exp().exp().exp().exp(), (1000,))
    assert forward.peak == 2 * 1000 * FLOAT
    assert training.peak >= 5 * 1000 * FLOAT


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("PerformerAttention, plain", (256, 64)),
        pytest.param("VectorSelfAttention", (4, 8192), marks=pytest.mark.slow),
        pytest.param("GroupAttention, relative", (32, 64), marks=pytest.mark.slow),
    ],
)
def test_tiles_take_what_is_stated(name, size):
    """Of inputs that go by several tiles, each of 2 GiB, with what lies beside a tile."""
    few, _ = count(LAYERS[name].make(), LAYERS[name].given("small"))
    inputs = LAYERS[name].inputs(*size)
    forward, training = count(LAYERS[name].make(), inputs)
    assert forward.operations > few.operations  # it loops
    assert forward.peak < 3 * 2**30
    assert training.peak < 5 * 2**30


def test_near_pairs_beyond_a_tile_are_sparse_products_unless_their_order_matters():
    """Of 2 million pairs with 8 heads of 16."""
    nodes, pairs = 200_000, 2_000_000
    row = torch.arange(nodes).repeat_interleave(pairs // nodes)
    relation = CSR.from_sorted(row, row, nodes, nodes)
    function = Call(
        lambda query, key, **tables: edge_sum(edge_dot(query, key, CSR(*tables.values())), key, CSR(*tables.values()))
    )
    inputs = {"query": torch.empty(8, nodes, 16), "key": torch.empty(8, nodes, 16)}
    inputs |= {f"table{n}": x for n, x in enumerate(relation)}
    sparse, _ = count(function, inputs)
    torch.use_deterministic_algorithms(True)
    try:
        gathered, training = count(function, inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert sparse.names["aten.sparse_sampled_addmm.default"] == 8
    assert gathered.names["aten.index_add.default"] == 1
    assert not [name for name in (gathered.names + training.names) if "sparse" in name]


def compiled_of(module, inputs):
    pytest.importorskip("triton")
    from compiling import compiled

    return compiled(module, inputs)


def test_compiled_kernels_by_hand():
    """A product and two kernels: what is elementwise, with a sum over rows, joins."""
    function = Call(lambda linear, x: linear(x).relu().softmax(1), nn.Linear(64, 64, bias=False))
    forward, training = compiled_of(function, {"x": torch.randn(128, 64)})
    assert [(g.kernels, g.libraries) for g in forward] == [(1, ["aten.mm.out"])]
    assert forward[0].bytes == FLOAT * (2 * 128 * 64 + 64 * 64 + 2 * 128 * 64)
    assert [len(g.libraries) for g in training] == [1, 2]


def test_bodies_of_own_operators_are_counted(monkeypatch):
    monkeypatch.setattr(fft_convolution, "choose_form", lambda *_, **__: OPERATOR)  # as of what is more than a tile
    (forward,), _ = compiled_of(*CASES["vector_long_conv"].build(torch.float32))
    assert [str(func) for func, *_ in forward.own] == ["tg_equiattn.fft_convolution.default"]
    found = forward.launches()
    assert found.launches > forward.kernels + found.libraries
    assert found.libraries == len(forward.libraries) + 3  # Fourier transforms of both, and back


def test_every_layer_has_a_row():
    assert list(table()[1]) == list(LAYERS)


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="the table is of torch 2.13")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in LAYERS]
)
def test_the_table_is_what_is_counted(name):
    pytest.importorskip("triton")
    for part, host in (("R2", "escnn"), ("Conv", "torch_geometric"), ("Irreps", "e3nn")):
        if part in name:
            pytest.importorskip(host)
    found = {size: measured(name, size) for size in SIZES}
    assert row(name, found) == table()[1][name]
    for way in ROWS[2:]:
        small, large = (found[size][way].launches for size in SIZES)
        assert name in IN_TILES or large <= small * 1.2 + 4, "launches hang on the size"  # long sums are two
