"""The benchmarks: --device, rows of tables, small runs."""

import batches
import long_context
import pytest
import torch
import turned
from defaults import CASES, measure, tiny
from running import run

RUNS = {  # flags; how rows begin and how many there are
    "graph_attention": (["--loads", "molecules", "--variants", "dense", "pairs, mlp"], ("| dense ", "| pairs, "), 4),
    "long_context": (["--tokens", 20, 31, "--lengths", 17, "--directions", "forward", "--layers", "hyena",
                      "attention"], ("| 17 ", "| 20 ", "| 31 "), 6),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_small_run(tmp_path, name):
    flags, begin, count = RUNS[name]
    table = tmp_path / "table.md"
    result = run(f"benchmarks/{name}.py", *flags, "--repeats", 1, "--output", table)
    assert result.returncode == 0, result.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith(begin)]
    assert len(rows) == count
    assert not [row for row in rows if "out of memory" in row]


@pytest.mark.parametrize("name", ["R2LiftingAttention, C4", "RelativePerformerConv, pairs", "IrrepsEwaldAttention"])
def test_a_row_of_the_table_at_the_defaults(name):
    _, make = CASES[name]
    cells = measure(make("tiny"), 1)
    assert len(cells) == 6
    assert all(float(cell) > 0 for cell in (*cells, *tiny(make, 1, "cpu")))


def test_outputs_of_a_graph_do_not_depend_on_its_batch():
    torch.set_default_dtype(torch.float64)
    try:
        first, larger = batches.graph(20), batches.graph(50)
        for name, make in batches.LAYERS.items():
            alike = name.startswith("`RelativeGPSBlock`")
            assert (batches.change(make().eval(), first, larger) < 1e-12) or not alike, name
    finally:
        torch.set_default_dtype(torch.float32)


def test_turned_clouds():
    assert max(turned.changes(turned.ours(turned.IrrepsVectorSelfAttention))) < 1e-4


def test_the_published_convolution_and_ours_compute_the_same():
    q, k = torch.randn(2, 3, 19, 3)
    torch.testing.assert_close(long_context.PublishedConv()(q, k), long_context.LongConv()(q, k), rtol=1e-4, atol=1e-5)
