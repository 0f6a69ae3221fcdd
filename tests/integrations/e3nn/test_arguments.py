"""Classes for e3nn have the settings of the core's: the same names, in the same order, with the same defaults."""

import inspect

import pytest
from tg_equiattn.integrations import e3nn as irreps_modules

from tg_equiattn import nn as core_modules

FORWARD = "batch", "index", "chain", "order", "batch_size", "num_chains", "max_num_nodes"
OUT_AND_HIDDEN = ("out_scalars", "out_vectors", "hidden_scalars", "hidden_vectors")  # said by irreps


def settings(kind):
    """Keyword-only arguments and their defaults."""
    arguments = inspect.signature(kind).parameters.values()
    keywords = [a for a in arguments if a.kind is a.KEYWORD_ONLY and a.name not in OUT_AND_HIDDEN]
    return [(a.name, a.default) for a in keywords]


def forward(kind):
    arguments = inspect.signature(kind.forward).parameters.values()
    return {a.name: a.default for a in arguments if a.name in FORWARD}


@pytest.mark.parametrize("name", ["SE3HyenaOperator", "SE3Hyena", "VectorSelfAttention"])
def test_same_settings(name):
    core, irreps = getattr(core_modules, name), getattr(irreps_modules, f"Irreps{name}")
    assert settings(core) == settings(irreps)
    assert forward(core) == forward(irreps)


def test_tensor_products_have_settings_of_the_operator():
    """Fewer, but no others."""
    allowed = settings(core_modules.SE3HyenaOperator)
    own = settings(irreps_modules.TensorProductHyenaOperator)
    assert own == [setting for setting in allowed if setting in own]
    assert len(own) == 4


def test_hidden_channels_of_the_models():
    core, irreps = core_modules.SE3Hyena, irreps_modules.IrrepsSE3Hyena
    arguments = inspect.signature(core).parameters
    hidden = inspect.signature(irreps).parameters["irreps_hidden"].default
    assert hidden == f"{arguments['hidden_scalars'].default}x0e + {arguments['hidden_vectors'].default}x1o"
