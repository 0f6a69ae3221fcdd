"""What SE(3)-Hyena and vector self-attention refuse: each error names the argument."""

import pytest
import torch
from clouds import EDGE, S, V

from tg_equiattn.nn import SE3HyenaOperator

X = {"scalars": torch.ones(2, 5, S), "vectors": torch.ones(2, 5, V, 3)}
F = {"scalars": torch.ones(6, S), "vectors": torch.ones(6, V, 3), "batch": torch.tensor([0, 0, 0, 1, 1, 1])}
POS, EDGES = {"pos": torch.ones(6, 3)}, {"edge_index": torch.tensor([[0, 1], [1, 2]])}
ATTR = {"edge_attr": torch.ones(2, EDGE)}


@pytest.mark.parametrize(
    ("message", "name", "arguments"),
    [
        (r"scalars must be \(B, N, 3\)", "plain", X | {"scalars": torch.ones(2, 5, 4)}),
        (r"vectors must be \(B, N, 2, 3\)", "plain", X | {"vectors": torch.ones(2, 5, V, 2)}),
        ("^vectors must be given", "plain", {"scalars": None, "vectors": None}),
        ("^vectors must be torch.float32", "plain", X | {"vectors": X["vectors"].double()}),
        ("batch must be None", "plain", X | {"batch": torch.zeros(10).long()}),
        ("lengths must be None", "plain", F | {"lengths": torch.tensor([3, 3])}),
        ("max_num_nodes must be at least 3", "plain", F | {"batch_size": 2, "max_num_nodes": 2}),
        (r"^pos must be real numbers of shape \(6, 3\)", "plain", F | {"pos": torch.ones(6, 2)}),
        ("^pos must be given with order='radial'", "radial", F),
        (r"index must have shape \(2, 5\)", "plain", X | {"index": torch.arange(10)}),
        ("edge_index must be given", "local", F | POS),
        ("edge_index must be None", "plain", F | EDGES),
        ("edge_attr must have edge_channels=4", "local", F | POS | EDGES),
        ("edge_attr must have edge_channels=0", "local bare", F | POS | EDGES | ATTR),
        (r"edge_attr must be real numbers of shape \(2, 4\)", "local", F | EDGES | {"edge_attr": torch.ones(2, 3)}),
        (r"edge_index must be int64 \(2, E\)", "local", F | ATTR | {"edge_index": torch.ones(2, 2)}),
    ],
)  # fmt: skip
def test_bad_input(message, name, arguments, make):
    with pytest.raises(ValueError, match=message):
        make(name, torch.float32)(**arguments)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("scalar_channels and vector_channels must not both be 0", {"scalar_channels": 0, "vector_channels": 0}),
        ("out_vectors must be reachable", {"hidden_vectors": 0}),
        ("short_conv must be None or an odd number", {"short_conv": 4}),
        ("edge_channels=2 needs local_context", {"edge_channels": 2}),
    ],
)
def test_bad_options(message, options):
    with pytest.raises(ValueError, match=message):
        SE3HyenaOperator(**{"scalar_channels": S, "vector_channels": V} | options)
