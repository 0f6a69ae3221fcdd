"""Classes of hosts have the settings of the core's: the same names, in the same order, with the same defaults."""

import importlib
import importlib.util
import inspect
import re

import pytest
from hosts import HOSTS

from tg_equiattn import grids, nn

FIELDS = {"in_type", "out_type", "context_type"}
CHANNELS = {"in_channels", "out_channels", "context_channels", "channels", "group"}  # are types
WIDTHS = {"scalar_channels", "vector_channels", "out_scalars", "out_vectors", "hidden_scalars", "hidden_vectors"}
IRREPS = {"irreps_in", "irreps_out", "irreps_hidden"}
VECTORS = {"in_channels", "out_channels", "in_vectors", "out_vectors"}
LAYERS = {  # of escnn
    "LiftingAttention": nn.LiftingAttention, "GroupAttention": nn.GroupAttention,
    "GlobalAttention": nn.GlobalGroupAttention, "AttentionBlock": nn.GroupAttentionBlock,
    "RegularLayerNorm": nn.RegularLayerNorm,
}  # fmt: skip
PAIRS = [  # the host, its class, that of the core, and arguments of the one and of the other alone
    *(("escnn", f"R{dim}{name}", core, FIELDS, CHANNELS) for dim in (2, 3) for name, core in LAYERS.items()),
    ("pyg", "RelativePerformerConv", nn.PerformerAttention, {"kwargs"}, set()),
    ("pyg", "PixelGraph", grids.PixelGrid, set(), {"shape"}),
    ("pyg", "EwaldAttention", nn.EwaldAttention, VECTORS, WIDTHS | {"out_channels"}),
    *(("e3nn", f"Irreps{name}", getattr(nn, name), IRREPS, WIDTHS)
      for name in ("SE3HyenaOperator", "SE3Hyena", "VectorSelfAttention")),
    ("e3nn", "IrrepsEwaldAttention", nn.EwaldAttention, IRREPS, WIDTHS | {"out_channels"}),
]  # fmt: skip


def settings(kind, without):
    """The kernel size comes first: of escnn's layers it may be positional, as of escnn's convolutions."""
    parameters = sorted(inspect.signature(kind).parameters.values(), key=lambda p: p.name != "kernel_size")
    return [(p.name, p.default) for p in parameters if p.name not in without]


def of(host, name):
    pytest.importorskip(HOSTS[host])
    return getattr(importlib.import_module(f"tg_equiattn.integrations.{host}"), name)


@pytest.mark.parametrize(("host", "name", "core", "own", "cores"), PAIRS)
def test_settings_are_the_cores(host, name, core, own, cores):
    assert settings(of(host, name), own) == settings(core, cores)


EWALD = {
    "pyg": ("EwaldAttention", VECTORS),
    "e3nn": ("IrrepsEwaldAttention", {"irreps_in", "irreps_out"}),
    "mace": (
        "add_long_range",
        {"model", "after", "batch", "gain", "charges", "learn", "dielectric", "exclude_near", "attn_kwargs"},
    ),
    "nequip": (
        "LongRange",
        {"features", "gain", "max_num_nodes", "irreps_in", "type_names", "r_max", "avg_num_neighbors", "attn_kwargs"},
    ),
}


@pytest.mark.parametrize("host", EWALD)
def test_settings_of_ewald_attention_are_described(host):
    """MACE and NequIP pass keywords to the layer of e3nn, and know a width of the model."""
    name, own = EWALD[host]
    function, core = of(host, name), dict(settings(nn.EwaldAttention, WIDTHS | {"out_channels"}))
    assert all(core[key] == default for key, default in settings(function, own) if key != "width")
    described = re.findall(r"^(?: {4})?(\w+)(?: \([\w., \[\]]+\))? ?: ", inspect.getdoc(function), re.MULTILINE)
    assert {x for x in described if not x.endswith("Error")} == {*core, *own} - {"attn_kwargs"}


def classes():
    for host in ("escnn", "pyg", "e3nn"):
        if importlib.util.find_spec(HOSTS[host]):
            module = importlib.import_module(f"tg_equiattn.integrations.{host}")
            yield from ((host, name) for name in module.__all__ if isinstance(getattr(module, name), type))


@pytest.mark.parametrize(("host", "name"), [*classes(), *(("nn", name) for name in nn.__all__)])
def test_an_unknown_argument_is_refused_by_the_public_class(host, name):
    """All arguments are named, those of MessagePassing, too."""
    kind = getattr(nn, name) if host == "nn" else of(host, name)
    if not isinstance(kind, type):
        pytest.skip("a function, whose error names it")
    with pytest.raises(TypeError) as error:
        kind(no_such=1)
    assert str(error.value).startswith(f"{name}() got an unexpected keyword argument 'no_such'. Its arguments are ")
    listed = str(error.value).split(" are ")[1].split(", ")
    assert {*inspect.signature(kind).parameters} - {"kwargs"} <= {*listed}


@pytest.mark.parametrize(
    ("host", "name", "argument", "right"),
    [
        ("escnn", "R2GroupAttention", "padding", "padding_mode"), ("escnn", "R3GlobalAttention", "num_heads", "heads"),
        ("escnn", "R2GlobalAttention", "num_features", "num_random_features"),
        ("escnn", "R2GroupAttention", "attn_type", None), ("escnn", "R2LiftingAttention", "dilation", None),
        ("pyg", "RelativePerformerConv", "num_heads", "heads"), ("pyg", "RelativeGPSBlock", "num_heads", "heads"),
        ("pyg", "RelativeGPSBlock", "attn_type", None), ("pyg", "RelativeGPSBlock", "act_kwargs", None),
        ("e3nn", "IrrepsEwaldAttention", "num_heads", "heads"),
        ("nn", "GroupTransformer", "kernal_size", "kernel_size"),
        # arguments of the base class or of the core that a layer does not have
        ("nn", "GroupTransformer", "depth", None),
        ("nn", "LiftingAttention", "relation", None), ("nn", "GlobalGroupAttention", "stride", None),
        ("escnn", "R2GroupAttention", "context_channels", None),
        ("escnn", "R2FrameTransformer", "pool", None),
    ],
)  # fmt: skip
def test_the_right_word(host, name, argument, right):
    kind = getattr(nn, name) if host == "nn" else of(host, name)
    with pytest.raises(TypeError) as error:
        kind(**{argument: 1})
    old = getattr(kind, "old_arguments", {}).get(argument)  # with what to write instead
    hint = f"; {old}." if old else "." if right is None else f"; did you mean {right!r}?"
    assert str(error.value).startswith(f"{name}() got an unexpected keyword argument {argument!r}{hint} Its arguments")


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("nn", "GroupTransformer"),
        ("nn", "GroupAttention"),
        ("nn", "EwaldAttention"),
        ("pyg", "EwaldAttention"),
        ("e3nn", "IrrepsEwaldAttention"),
    ],
)
def test_old_arguments(host, name):
    kind = getattr(nn, name) if host == "nn" else of(host, name)
    for old, new in kind.old_arguments.items():
        with pytest.raises(TypeError, match=rf"{name}\(\) got .* argument '{old}'; {re.escape(new)}\. Its "):
            kind(**{old: 1})
