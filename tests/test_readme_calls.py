"""Every call that README advertises runs on the inputs that its sentence names, and does what the sentence says.

Symmetries are checked with random weights: parameters that start at zero hide the terms that they multiply.
"""

import ast
import importlib
import inspect
import re

import pytest
import readme
import torch
from hosts import HOSTS
from space import error, motion


def made(call, host, **names):
    """The module of a call, from the public names of a host's integration, in float64 and eval mode."""
    integration = importlib.import_module(f"tg_equiattn.integrations.{host}")
    module = eval(call, vars(integration) | names)
    assert isinstance(module, torch.nn.Module)
    return module.double().eval()


def randomised(module, std=0.3):
    for p in module.parameters():
        torch.nn.init.normal_(p, std=std)
    return module


@torch.no_grad()
def change(function, x, at, seen):
    """How much a change of ``x[at]`` changes ``function(x)[seen]``, relative to the largest output."""
    other, out = x.clone(), function(x)
    other[at] += torch.randn_like(other[at])
    return float((function(other) - out)[seen].abs().max() / out.abs().max())


# Calls under "Use it if"


def of_pixels(call):
    """Content at the other end of the image changes an output of a new layer."""
    gspaces, nn = importlib.import_module("escnn.gspaces"), importlib.import_module("escnn.nn")
    gspace = gspaces.flipRot2dOnR2(4)
    fields = nn.FieldType(gspace, 4 * [gspace.regular_repr])
    layer, x = made(call, "escnn", fields=fields), torch.randn(1, fields.size, 15, 15, dtype=torch.float64)
    corner, opposite = (..., 0, 0), (..., -1, -1)
    assert change(lambda x: layer(fields(x)).tensor, x, opposite, corner) > 1e-4
    randomised(layer).check_equivariance(atol=1e-10, rtol=1e-10)
    assert change(lambda x: layer(fields(x)).tensor, x, opposite, corner) > 1e-4


def molecules(dim):
    """Chains of 12 and 20 nodes, as one graph of PyG."""
    step, start = torch.randn(32, dim, dtype=torch.float64), torch.tensor([0, 12])
    batch = torch.repeat_interleave(torch.tensor([12, 20]))
    pos = step.cumsum(0)
    source = torch.tensor([n for n in range(31) if n != 11])
    bonds = torch.stack([torch.cat([source, source + 1]), torch.cat([source + 1, source])])
    return {"edge_index": bonds, "batch": batch}, pos, start


def outputs_of_molecules(block):
    graph, pos, start = molecules(2)
    x = torch.randn(len(pos), block.channels, dtype=torch.float64)
    return lambda pos: block(x, pos=pos, **graph), pos, start


def of_nodes(call):
    """Positions are in 2-D, wherever the graph lies; each node sees where distant nodes are, of its own graph alone."""
    channels = 64
    conv = importlib.import_module("torch_geometric.nn").GATv2Conv(channels, channels // 4, heads=4)
    block = made(call, "pyg", conv=conv)
    function, pos, (first, second) = outputs_of_molecules(block)
    function(pos).square().sum().backward()
    assert block.attention.attention.far_offsets.map.weight.grad.abs().max() > 1e-6  # far offsets start at zero
    randomised(block, 0.1)  # so that no weight of attention is next to zero
    assert error(function(pos + 7), function(pos)) < 1e-10
    assert error(function(pos.flip(1)), function(pos)) > 1e-3  # a negative control: offset="mlp" sees directions
    distant, cutoff = pos.clone(), block.attention.attention.cutoff
    distant[-1] += 5 * cutoff
    pos = distant
    assert (pos[second] - pos[-1]).norm() > cutoff
    assert change(function, pos, -1, second) > 1e-6
    assert change(function, pos, -1, first) == 0


def of_irreps(call, steps):
    """A new layer feels nodes at the other end; outputs transform as their irreps."""
    irreps = importlib.import_module("e3nn.o3").Irreps("8x0e + 8x1o")  # vectors as x, y, z
    layer, pos = made(call, "e3nn", irreps=irreps), steps.cumsum(0)
    x = irreps.randn(len(pos), -1).double()
    assert change(lambda x: layer(x, pos), x, -1, 0) > 1e-6
    randomised(layer)
    r = motion(reflect=True)
    d = torch.block_diag(torch.eye(8, dtype=r.dtype), *8 * [r])
    assert error(layer(x @ d.T, pos @ r.T + 3), layer(x, pos) @ d.T) < 1e-10
    assert error(layer(x @ d.T, pos), layer(x, pos) @ d.T) > 1e-6  # a negative control
    assert change(lambda x: layer(x, pos), x, -1, 0) > 1e-6


def of_distances(call):
    """Through a kernel of the distance: nodes 20 apart, ten times the width."""
    of_irreps(call, torch.tensor([[0.0, 0.0, 2.0]], dtype=torch.float64).repeat(11, 1))


def of_histories(call):
    """Outputs depend on the whole past, not on the future, and transform as their irreps."""
    irreps = importlib.import_module("e3nn.o3").Irreps("8x0e + 8x1o")
    layer, x = made(call, "e3nn", irreps=irreps), irreps.randn(64, -1).double()
    first, last = 0, -1
    assert change(layer, x, first, last) > 1e-6
    assert change(layer, x, last, slice(None, last)) < 1e-12
    randomised(layer)
    d = torch.block_diag(torch.eye(8, dtype=x.dtype), *8 * [motion(reflect=True)])
    assert error(layer(x @ d.T), layer(x) @ d.T) < 1e-10
    assert error(layer(x @ d.T), layer(x)) > 1e-3  # a negative control


def of_charges(call):
    """MACE has an environment of its own, where the same call is run (tests/integrations/mace)."""
    expression = ast.parse(call, mode="eval").body
    own, keywords = signature("mace", "add_long_range"), [word.arg for word in expression.keywords]
    own.bind(*expression.args, **dict.fromkeys(keywords))
    assert set(keywords) <= set(own.parameters)


def signature(host, name):
    """The signature of a function of a host's integration, which need not be installed."""
    files = sorted((readme.ROOT / "integrations" / host).glob("*.py"))
    functions = [node for file in files for node in ast.parse(file.read_text()).body]
    (found,) = [node for node in functions if isinstance(node, ast.FunctionDef) and node.name == name]
    found.body, found.returns, found.decorator_list = [ast.Pass()], None, []
    for argument in ast.walk(found.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    names = {}
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), host, "exec"), names)
    return inspect.signature(names[name])


CHECKS = {
    "R2GroupAttention": ("escnn", of_pixels),
    "RelativeGPSBlock": ("pyg", of_nodes),
    "add_long_range": (None, of_charges),
    "IrrepsEwaldAttention": ("e3nn", of_distances),
    "IrrepsSE3Hyena": ("e3nn", of_histories),
}


def test_every_call_has_a_check():
    assert set(readme.CALLS) == set(CHECKS)
    assert len(readme.CALLS) + len(readme.SETTINGS) == len(readme.SPANS)


@pytest.mark.parametrize("name", CHECKS)
def test_what_its_sentence_says(name):
    host, check = CHECKS[name]
    if host is not None:
        pytest.importorskip(HOSTS[host])
    check(readme.CALLS[name])


def test_settings_of_nequip():
    settings, place = readme.SETTINGS
    place = place.removeprefix("_target_: ").removeprefix("tg_equiattn.integrations.nequip.")
    arguments = pytest.importorskip("yaml").safe_load(settings)
    assert set(arguments) <= set(signature("nequip", place).parameters)
    signature("nequip", place).bind(**arguments)


# Blocks of code


def images(names):
    assert max(e.abs().max() for e in names["errors"]) < 1e-12
    layer, fields, x = names["layer"], names["fields"], names["x"].tensor
    assert change(lambda x: layer(fields(x)).tensor, x, (..., -1, -1), (..., 0, 0)) > 1e-4
    randomised(layer).check_equivariance(atol=1e-10, rtol=1e-10)


def water(names):
    block, bonds, pos = names["block"].double().eval(), names["bonds"], names["pos"].double()
    x = torch.randn(3, 32, dtype=torch.float64)
    assert error(randomised(block)(x, bonds, pos=pos @ motion().T - 2), block(x, bonds, pos=pos)) < 1e-10
    assert error(block(x, bonds, pos=1.1 * pos), block(x, bonds, pos=pos)) > 1e-3


def crystal(names):
    """Forces and virial are differences of energies."""
    attention, x, cell = names["attention"].double(), names["x"].double(), names["cell"].double()
    pos, strain, tiny = names["pos"].detach().double(), torch.zeros(3, 3, dtype=torch.float64), 1e-4

    def energy(pos, strain):
        strained = torch.eye(3, dtype=torch.float64) + strain
        return attention(x, pos @ strained, cell=cell @ strained).sum()

    for given in (pos, strain):
        given.requires_grad_()
    slopes = torch.autograd.grad(energy(pos, strain), (pos, strain))
    assert slopes[0].sum(0).abs().max() < 1e-10 * slopes[0].abs().max()
    for number, slope in enumerate(slopes):
        way, ends = torch.randn_like(slope), []
        for step in (-tiny, tiny):
            moved = [y.detach() + step * way if n == number else y.detach() for n, y in enumerate((pos, strain))]
            ends.append(energy(*moved).item())
        assert abs((ends[1] - ends[0]) / (2 * tiny) - (way * slope).sum()) < 1e-6 * slope.norm() * way.norm()


BLOCKS = {"escnn": images, "pyg": water, "e3nn": crystal}


@pytest.mark.parametrize("host", BLOCKS)
def test_blocks(host, capsys):
    assert len(readme.BLOCKS) == len(BLOCKS)
    pytest.importorskip(HOSTS[host])
    (code,) = [code for code in readme.BLOCKS if f"tg_equiattn.integrations.{host}" in code]
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    BLOCKS[host](names)


def test_calls_under_pictures():
    """They run, and each is of a host that README names."""
    calls = re.findall(r"`(\w+\(.*?\))`", readme.TEXT.partition("## Who attends to whom\n")[2].partition("\n## ")[0])
    assert len(calls) == 4
    for host in ("escnn", "pyg", "e3nn"):
        pytest.importorskip(HOSTS[host])
    gspaces, nn = importlib.import_module("escnn.gspaces"), importlib.import_module("escnn.nn")
    gspace = gspaces.rot2dOnR2(4)
    names = {
        "image": nn.FieldType(gspace, [gspace.trivial_repr]),
        "fields": nn.FieldType(gspace, [gspace.regular_repr]),
    }
    names["irreps"] = "4x0e + 4x1o"
    for call, host in zip(calls, ("escnn", "pyg", "e3nn", "e3nn"), strict=True):
        made(call, host, **names)


# Tables of calls on the pages to which README leads, and commands


@pytest.mark.parametrize(("page", "host", "least"), [("from_r2conv", "escnn", 8), ("crystals", "e3nn", 5)])
def test_calls_of_tables(page, host, least):
    pytest.importorskip(HOSTS[host])
    text = (readme.ROOT / "docs" / f"{page}.md").read_text()
    text = text.partition("## In a model of e3nn\n")[2] if host == "e3nn" else text
    table = re.search(r"(^\|.*\|\n)+", text, re.MULTILINE)[0]  # the first one
    calls = [
        span for span in re.findall(r"`([^`]+)`", table) if re.fullmatch(r"(\w+ = )?(R[23]|Irreps)\w+\(.+\)", span)
    ]
    names = dict(vars(importlib.import_module(f"tg_equiattn.integrations.{host}")))
    if host == "escnn":
        gspaces, nn = importlib.import_module("escnn.gspaces"), importlib.import_module("escnn.nn")
        of = {"fields": gspaces.rot2dOnR2(4), "voxels": gspaces.octaOnR3(), "slices": gspaces.dihedralOnR3(4)}
        names |= {name: nn.FieldType(gspace, 4 * [gspace.regular_repr]) for name, gspace in of.items()}
        names["image"] = nn.FieldType(of["fields"], [of["fields"].trivial_repr])
    else:
        names |= {"irreps": "4x0e + 4x1o", "cutoff": 2.0, "side": 6.0}
    assert len(calls) >= least
    for call in calls:
        exec(call, names)


def test_commands():
    project, makefile = ((readme.ROOT / name).read_text() for name in ("pyproject.toml", "Makefile"))
    install = readme.TEXT.partition("\n## Install\n")[2].partition("\n## ")[0]
    commands = re.findall(r"`make (\S+)`", install)
    assert {"demo", "test"} <= set(commands)
    for command in commands:
        assert re.search(rf"^{command}:", makefile, re.MULTILINE)
    for extra in re.findall(r"'\.\[(.*?)\]'", install)[0].split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE)
