import doctest
import importlib
import pkgutil

import pytest

import tg_equiattn

CORE = [
    m.name for m in pkgutil.walk_packages(tg_equiattn.__path__, "tg_equiattn.") if "integrations" not in m.name
]  # fmt: skip
ESCNN = [f"tg_equiattn.integrations.escnn.{name}" for name in ("attention", "block", "ge_vit", "module", "types")]
PYG = [f"tg_equiattn.integrations.pyg.{name}" for name in ("block", "classifier", "conv", "graph", "pixel_graph")]
E3NN = [
    f"tg_equiattn.integrations.e3nn.{name}"
    for name in ("clifford", "layout", "long_tensor_product", "operator", "tensor_product_hyena")
]


@pytest.mark.parametrize("name", CORE + ESCNN + PYG + E3NN)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.failed == 0


def test_some_examples_exist():
    attempted = sum(doctest.testmod(importlib.import_module(n)).attempted for n in CORE)
    assert attempted >= 10
