"""What torch.compile refuses; how often it compiles is in the contract."""

import pytest
import torch


def test_an_unsorted_batch_is_refused(make_conv):
    """By an assertion in the graph: the values of batch are not known before."""
    conv, batch = make_conv(None), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    given = {"x": torch.randn(7, 12, dtype=torch.float64), "batch": batch, "batch_size": 2}
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given), conv(**given))
    with pytest.raises(RuntimeError, match="batch must be sorted"):
        compiled(**{**given, "batch": batch.flip(0)})
