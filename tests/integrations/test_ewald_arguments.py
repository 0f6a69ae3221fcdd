"""Ewald attention has the same settings, by name and default, in the core and in every host."""

import inspect
import re

import pytest

from tg_equiattn import nn

OF_HOSTS = {
    "e3nn": ("IrrepsEwaldAttention", {"irreps_in", "irreps_out"}),
    "mace": ("add_long_range", {"model", "after", "batch", "gain", "charges", "learn", "dielectric"}),
    "nequip": (
        "LongRange",
        {"features", "gain", "max_num_nodes", "irreps_in", "type_names", "r_max", "avg_num_neighbors"},
    ),
}


def settings(function):
    """Keyword-only arguments and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {x.name: x.default for x in parameters if x.kind is inspect.Parameter.KEYWORD_ONLY}


CORE = settings(nn.EwaldAttention)
del CORE["out_channels"]  # hosts have irreps


@pytest.mark.parametrize("host", OF_HOSTS)
def test_settings_are_the_cores(host):
    pytest.importorskip(host)
    name, own = OF_HOSTS[host]
    function = getattr(pytest.importorskip(f"tg_equiattn.integrations.{host}"), name)
    given = {key: default for key, default in settings(function).items() if key not in own}
    if host == "e3nn":
        assert given == CORE
    else:  # which pass the other keywords to the layer of e3nn, and know a width of the model
        assert all(default == CORE[key] for key, default in given.items() if key != "width")
        assert "attn_kwargs" in inspect.signature(function).parameters


@pytest.mark.parametrize("host", OF_HOSTS)
def test_every_setting_is_described(host):
    pytest.importorskip(host)
    name, own = OF_HOSTS[host]
    function = getattr(pytest.importorskip(f"tg_equiattn.integrations.{host}"), name)
    described = re.findall(r"^(?: {4})?(\w+) ?: ", inspect.getdoc(function), re.MULTILINE)
    assert sorted(x for x in described if not x.endswith("Error")) == sorted({*CORE, *own})
