"""Graphs whose nodes are shared among processes: what one process computes, and errors where a process is missing."""

import copy
import datetime
import functools
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from tg_equiattn.nn import EwaldAttention, PerformerAttention

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
GRAPHS, NODES = 4, 23
FAR = {"position": None, "values": "offset"}


@functools.cache
def data():
    """Four graphs: a cloud, an empty one, a crystal and a slab."""
    generator = torch.Generator().manual_seed(1)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    batch = torch.tensor([0] * 9 + [2] * 11 + [3] * 3)
    cell = torch.zeros(GRAPHS, 3, 3, dtype=torch.float64)
    cell[2:] = 2.3 * torch.eye(3) + 0.2 * draw(2, 3, 3)
    cell[3, 1] = 0.0
    return {"x": draw(NODES, 15), "pos": torch.rand(NODES, 3, generator=generator).double(), "batch": batch,
            "cell": cell}  # fmt: skip


def shares(world):
    """The rank of every node. Of four, one has none at all, and one but nodes of a single graph."""
    batch, node = data()["batch"], torch.arange(NODES)
    if world == 2:
        return torch.where(node % 3 == 0, 1, 0)
    return torch.where(batch == 3, 3, torch.where(node % 4 == 0, 2, 0))


def ewald(**options):
    return EwaldAttention(
        6, 3, width=0.8, out_channels=(6, 4), **{"heads": 2, "num_gaussians": 1, "num_coulomb": 1, **options}
    )


def of_irreps():
    from tg_equiattn.integrations.e3nn import IrrepsEwaldAttention

    return IrrepsEwaldAttention(
        "6x0e + 3x1o", "5x0e + 2x2e", width=0.8, num_gaussians=1, num_coulomb=1, method="ewald", lmax=2, error=0.05
    )


def performer(**options):
    return PerformerAttention(15, 12, 3, pos_dim=3, **options)


def message_passing():
    from tg_equiattn.integrations.pyg import RelativePerformerConv

    return RelativePerformerConv(15, 12, 3, pos_dim=3, method="features", **FAR)


CASES = {
    "clouds, crystals and slabs": lambda: ewald(method="ewald", error=0.01),
    "clouds": lambda: ewald(method="ewald", error=0.01),
    "nufft": lambda: ewald(method="nufft", error=1e-9, heads=1, num_gaussians=0, lmax=0),
    "irreps": of_irreps,
    "performer": lambda: performer(position=None, method="features"),
    "performer with far offsets": lambda: performer(**FAR, method="features"),
    "performer with sinusoids": lambda: performer(position="sinusoid", method="features"),
    "message passing": message_passing,
}
SHARED = [name for name in CASES if name not in ("clouds", "performer")]  # which others have in them
SETTINGS = [(name, world, one) for world, one in ((2, True), (4, False)) for name in SHARED]  # one: of a single graph
LONG = [("nufft", 4, False), ("irreps", 4, False)]
HOSTS = {"irreps": "e3nn", "message passing": "torch_geometric", "nufft": "finufft"}


def made(name, group=None):
    torch.manual_seed(0)
    layer = CASES[name]()
    layer.process_group = group
    assert layer.process_group is group
    layer.double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.3)
    return layer


def call(layer, x, cell, **more):
    more |= {"cell": cell} if "Ewald" in type(layer).__name__ else {}
    if type(layer) is not EwaldAttention:
        return layer(x, **more)
    scalars, vectors = layer(x[..., :6], x[..., 6:].unflatten(-1, (3, 3)), **more)
    return torch.cat([scalars, vectors.flatten(1)], 1)


def inputs(name, mine, one):
    """Of the nodes of a mask; of one graph, the third, or of all."""
    given = data()
    mine = mine & (given["batch"] == 2) if one else mine
    cell = None if name == "clouds" else given["cell"][2:3] if one else given["cell"]
    if name == "nufft" and not one:  # no boxes, whose reciprocal vectors would be many at so small an error
        cell = cell[2:3].expand(GRAPHS, 3, 3)
    x, pos = (given[key][mine].requires_grad_() for key in ("x", "pos"))
    return {"x": x, "pos": pos, "batch": None if one else given["batch"][mine], "cell": cell}


def results(name, layer, given, one):
    """Outputs of two steps with a draw between; gradients of an energy, and by parameters of it and its forces."""
    more = {} if one else {"batch_size": GRAPHS}
    outs = [call(layer, **given, **more) for _ in range(2)]
    energy = sum(out.square().sum() for out in outs)
    by = [given["x"]] + ([given["pos"]] if name != "performer" else [])
    first = torch.autograd.grad(energy, by, create_graph=True)
    loss = energy + sum(grad.square().sum() for grad in first)
    parameters = [p for p in layer.parameters() if p.requires_grad]
    second = torch.autograd.grad(loss, parameters)
    return [*outs, *first], list(second)


def on_ranks(number, device, folder, settings):
    pair = dist.new_group([0, 1])
    for name, world, one in settings:
        if number < world:
            layer = made(name, pair if world == 2 else dist.group.WORLD)
            mine = inputs(name, shares(world) == number, one)
            given = {k: v if v is None else v.to(device) for k, v in mine.items()}
            by_node, by_parameter = results(name, layer.to(device), given, one)
            for grad in by_parameter:
                dist.all_reduce(grad, group=layer.process_group)
            found = tree_map(lambda x: x.detach().cpu(), [by_node, by_parameter])
            torch.save(found, f"{folder}/{name} {world} {one} {number}.pt")
    if number < 2:
        check_refusals(number, device, pair)
    check_gradients_beside_data_parallel_training(number, device)


def check_refusals(number, device, group):
    """What is said where ranks disagree, and where they did not say."""
    performer, waves = made("performer", group).to(device), made("clouds", group).to(device)
    x, pos, batch = (data()[key].to(device) for key in ("x", "pos", "batch"))
    padded = r"process_group must be None (where the|for) input (is )?\(B, N, "
    for message, refuse in (
        (f"batch_size must be the same on all ranks of process_group, got {4 + number} here, and 4 to 5",
         lambda: performer(x, batch=batch, batch_size=GRAPHS + number)),
        ("batch_size must be given with batch and process_group", lambda: performer(x, batch=batch)),
        (padded, lambda: performer(x[None])),
        (padded, lambda: performer(x[None], mask=torch.ones(1, NODES, dtype=torch.bool, device=device))),
        (padded, lambda: call(waves, x[None], None, pos=pos[None])),
        ("set its process_group to None first", lambda: pickle.dumps(waves)),
    ):  # fmt: skip
        with pytest.raises((ValueError, TypeError), match=message):
            refuse()
    assert copy.deepcopy(waves).process_group is group


def check_gradients_beside_data_parallel_training(number, device):
    """Two pairs of processes, a graph each: the mean of gradients over graphs is what one process has."""
    mesh = dist.device_mesh.init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "nodes"))
    torch.manual_seed(number)  # ranks start unlike; DistributedDataParallel makes them alike
    model = PerformerAttention(15, 12, 3, position=None, method="features").double().to(device)
    alone, model.process_group = copy.deepcopy(model), mesh["nodes"].get_group()
    net = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None)
    alone.load_state_dict(model.state_dict())
    batch, x = data()["batch"].to(device), data()["x"].to(device)
    graph = batch == 2 * mesh.get_local_rank("data")
    mine = graph & (torch.arange(NODES, device=device) % 2 == mesh.get_local_rank("nodes"))
    (net(x[mine]).square().sum() * 2).backward()
    (sum(alone(x[batch == graph]).square().sum() for graph in (0, 2)) / 2).backward()
    for got, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [[setting for setting in SETTINGS if setting not in LONG], LONG],
    ids=["all", "long"],
)
@pytest.mark.slow
def test_processes_give_what_one_does(settings, tmp_path):
    """All of it in one test: processes take seconds to start."""
    for host in HOSTS.values():
        pytest.importorskip(host)
    hosts = ["tg_equiattn.integrations.e3nn", "tg_equiattn.integrations.pyg", "finufft"]
    ranks.run(functools.partial(on_ranks, settings=settings), tmp_path, 4, imports=hosts)
    for name, world, one in settings:
        layer = made(name)
        by_node, by_parameter = results(name, layer, inputs(name, torch.ones(NODES, dtype=torch.bool), one), one)
        there = shares(world)[data()["batch"] == 2] if one else shares(world)
        for number in range(world):
            got, summed = torch.load(f"{tmp_path}/{name} {world} {one} {number}.pt", weights_only=True)
            for a, b in zip([*got, *summed], [*(x[there == number] for x in by_node), *by_parameter], strict=True):
                scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10 * scale, msg=lambda s, n=name: f"{n}: {s}")
        alone = call(layer, **inputs(name, shares(world) == 0, one), **({} if one else {"batch_size": GRAPHS}))
        assert (alone - by_node[1][there == 0]).abs().max() > 1e-3  # the other ranks' nodes count


def convolution():
    return pytest.importorskip("tg_equiattn.integrations.pyg").RelativePerformerConv(4, 4, position=None)


NO_GROUP = r"process_group must be a torch\.distributed\.ProcessGroup that this process is in, got int"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PerformerAttention(4, 4, position=None), NO_GROUP),
        (convolution, NO_GROUP),
        (lambda: PerformerAttention(4, 4), "process_group must be None with near pairs, which may be of two processes"),
        (lambda: PerformerAttention(4, 4, position=None, method="pairs"), "method='pairs'"),
        (lambda: EwaldAttention(4, 0, width=1.0, method="direct"), "method='direct'"),
    ],
)
def test_bad_arguments(make, message):
    layer = make()
    with pytest.raises(ValueError, match=message):
        layer.process_group = 2


def leave(number, device, folder):
    """The second of two processes comes too late, then is gone."""
    hurried = dist.new_group(timeout=datetime.timedelta(seconds=2))
    layer = made("clouds", hurried)
    given = inputs("clouds", shares(2) == number, True)
    if number:
        time.sleep(5)
        return "alone"
    for group in (hurried, dist.group.WORLD):
        layer.process_group = group
        start = time.monotonic()
        with pytest.raises(RuntimeError):
            call(layer, **given)
        assert time.monotonic() - start < 20
    return "alone"


@pytest.mark.slow
def test_a_missing_process_is_an_error(tmp_path):
    """Of the other ones, after the group's timeout, not a hang."""
    ranks.run(leave, tmp_path, seconds=20)


PAGE = (Path(__file__).parents[1] / "docs" / "several_machines.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SCRIPTS = [text for text in "\n".join(BLOCKS).split("# torchrun --nproc-per-node 2 train.py\n") if text]
NAMES = ["DistributedDataParallel", "FSDP2", "Lightning", "Lightning and FSDP2", "one graph"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5), ids=NAMES)
def test_the_scripts_of_the_page_run_under_torchrun(number, tmp_path):
    assert len(SCRIPTS) == len(NAMES)
    if "Lightning" in NAMES[number]:
        pytest.importorskip("lightning")
    (tmp_path / "train.py").write_text(SCRIPTS[number])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
