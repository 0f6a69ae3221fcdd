"""Batches of graphs: alone, of any size, with none, permuted; what one graph holds stays in it."""

import pytest
import torch
from devices import DEVICES
from e3nn import o3

SIZES = 13, 1, 5, 2, 11
PERMUTED = ["radial", "local", "tensor radial", "attention", "attention local"]
IN_ORDER = ["hyena", "causal", "model", "lag", "lag model", "tensor", "tensor lag"]


def parts(arguments, sizes):
    """The arguments of each graph alone."""
    batch, start = arguments["batch"], 0
    for number, size in enumerate(sizes):
        alone = {name: arguments[name][batch == number] for name in ("x", "pos")}
        if "edge_index" in arguments:
            own = batch[arguments["edge_index"][0]] == number
            alone["edge_index"] = arguments["edge_index"][:, own] - start
            alone["edge_attr"] = arguments["edge_attr"][own]
        start += size
        yield alone


def within(sizes):
    """A random order of the nodes of every graph."""
    starts = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return torch.cat([start + torch.randperm(n) for start, n in zip(starts, sizes, strict=False)])


def permuted(arguments, order):
    place = order.argsort()
    out = {name: arguments[name][order] for name in ("x", "pos", "batch")}
    if "edge_index" in arguments:
        out |= {"edge_index": place[arguments["edge_index"]], "edge_attr": arguments["edge_attr"]}
    return out


@pytest.mark.parametrize("device", DEVICES)
def test_alone_equals_in_a_batch(device, any_module, graphs, equal):
    module = any_module.to(device)
    arguments = graphs(module, SIZES, device)
    out = module(**arguments)
    assert out.isfinite().all()
    for alone, wanted in zip(parts(arguments, SIZES), out.split(SIZES), strict=True):
        equal(module(**alone), wanted)
        equal(module(**alone, batch=torch.zeros(len(wanted), dtype=torch.int64, device=device)), wanted)


def test_graphs_without_nodes(any_module, graphs, equal):
    arguments = graphs(any_module, SIZES)
    out = any_module(**arguments)
    for batch, count in ((2 * arguments["batch"] + 1, 11), (arguments["batch"] + 3 * (arguments["batch"] > 1), 8)):
        skipping = {**arguments, "batch": batch}
        equal(any_module(**skipping), out)
        equal(any_module(**skipping, batch_size=count), out)
        equal(any_module(**skipping, batch_size=count, max_num_nodes=17), out)


@pytest.mark.parametrize("where", ["x", "pos"])
def test_nan_stays_in_its_graph(on_device, where, any_module, graphs, equal):
    arguments = graphs(any_module, SIZES)
    out, others = any_module(**arguments), arguments["batch"] != 2
    arguments[where][16] = torch.nan  # in the third graph
    hurt = any_module(**arguments)
    equal(hurt[others], out[others])
    assert hurt[~others].isnan().any()
    equal(any_module(**arguments, batch_size=5, max_num_nodes=13)[others], out[others])


@pytest.mark.parametrize("kind", PERMUTED + IN_ORDER)
def test_permutation(on_device, kind, double, make_module, graphs, equal):
    module = make_module(kind)
    arguments, order = graphs(module, SIZES), within(SIZES)
    out, moved = module(**arguments), module(**permuted(arguments, order))
    if kind in PERMUTED:
        equal(moved, out[order])
        assert (moved - out).abs().max() > 1e-3
    else:
        assert (moved - out[order]).abs().max() > 1e-5


def test_order_given(on_device, any_module, graphs, equal):
    """Nodes come in this order, whatever the module's own is, and stay where they are."""
    arguments, order = graphs(any_module, SIZES), within(SIZES)
    got = any_module(**arguments, order=order)
    given = torch.arange(len(order))
    equal(got[order], any_module(**permuted(arguments, order), order=given))
    equal(got, any_module(**arguments, order=order, batch_size=5, max_num_nodes=13))


def test_radial_order_is_by_distance(double, make_module, graphs, equal):
    module = make_module("radial")
    arguments = graphs(module, SIZES)
    order = []
    for pos, start in zip(arguments["pos"].split(SIZES), (0, 13, 14, 19, 21), strict=True):
        order.append(start + (pos - pos.mean(0)).norm(dim=1).argsort())
    equal(module(**arguments, order=torch.cat(order)), module(**arguments))


@pytest.mark.parametrize("kind", ["hyena", *PERMUTED])
def test_translation_far_away(kind, double, make_module, graphs, equal):
    """Positions far from the origin, each graph's elsewhere."""
    module = make_module(kind)
    arguments = graphs(module, SIZES)
    out = module(**arguments)
    arguments["pos"] = arguments["pos"] + 1e2 * torch.randn(5, 3)[arguments["batch"]]
    equal(module(**arguments), out, 1e-10)


def turned(points):
    return torch.tensor(points, dtype=torch.float64) @ o3.rand_matrix(dtype=torch.float64)


CLOUDS = {
    "pair": [(1.0, 0, 0), (-1, 0, 0)],
    "square": [(1.0, 0, 0), (0, 1, 0), (-1, 0, 0), (0, -1, 0)],
    "rectangle": [(3.0, 1, 0), (-3, 1, 0), (3, -1, 0), (-3, -1, 0)],
    "octahedron": [(1.0, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)],
    "two pairs": [(1.0, 0, 0), (-1, 0, 0), (0.3, 2, 0), (-0.3, -2, 0), (0, 0, 0)],
}


@pytest.mark.parametrize("kind", ["radial", "tensor radial"])
@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_at_one_distance(cloud, kind, double, make_module, graphs, equal):
    """What rounding leaves of invariants that vanish decides nothing: the nodes' scalars tell them apart."""
    module, points = make_module(kind), CLOUDS[cloud]
    for _ in range(2):
        arguments = graphs(module, (len(points),))
        x = arguments.pop("x")
        pos, r, shift = turned(points), o3.rand_matrix(dtype=torch.float64), torch.randn(1, 3)
        inside, outside = (irreps.D_from_matrix(r).T for irreps in (module.irreps_in, module.irreps_out))
        out = module(x, **{**arguments, "pos": pos})
        equal(module(x @ inside, **{**arguments, "pos": pos @ r.T + shift}), out @ outside, 1e-10)
        order = torch.randperm(len(x))
        moved = permuted({**arguments, "x": x, "pos": pos}, order)
        equal(module(**moved), out[order], 1e-10)
