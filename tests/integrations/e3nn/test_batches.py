"""Batches of graphs: alone, of any size, with none, permuted; what one graph holds stays in it."""

import torch

SIZES = 13, 1, 5, 2, 11


def permuted(arguments, order):
    return {name: value[order] for name, value in arguments.items()}


def test_alone_equals_in_a_batch(on_device, any_module, graphs, equal):
    """Among graphs without nodes, too, and each moved far away."""
    arguments = graphs(any_module, SIZES)
    out = any_module(**arguments)
    assert out.isfinite().all()
    for number, wanted in enumerate(out.split(SIZES)):
        alone = {name: arguments[name][arguments["batch"] == number] for name in ("x", "pos") if name in arguments}
        equal(any_module(**alone), wanted)
        equal(any_module(**alone, batch=torch.zeros(len(wanted), dtype=torch.int64)), wanted)
    for batch, count in ((2 * arguments["batch"] + 1, 11), (arguments["batch"] + 3 * (arguments["batch"] > 1), 8)):
        skipping = arguments | {"batch": batch}
        equal(any_module(**skipping), out)
        equal(any_module(**skipping, batch_size=count), out)
        equal(any_module(**skipping, batch_size=count, max_num_nodes=17), out)
    if "pos" in arguments:
        arguments["pos"] = arguments["pos"] + 1e2 * torch.randn(5, 3)[arguments["batch"]]
    equal(any_module(**arguments), out, 1e-10)


def test_nan_stays_in_its_graph(on_device, any_module, graphs, equal):
    arguments = graphs(any_module, SIZES)
    out, others = any_module(**arguments), arguments["batch"] != 2
    for where in [name for name in ("x", "pos") if name in arguments]:
        hurt = arguments | {where: arguments[where].clone()}
        hurt[where][16] = torch.nan  # in the third graph
        got = any_module(**hurt)
        equal(got[others], out[others])
        assert got[~others].isnan().any()
        equal(any_module(**hurt, batch_size=5, max_num_nodes=13)[others], out[others])
