"""Batches in any order under torch.compile; how often it compiles is in the contract."""

import torch


def test_an_unsorted_batch_is_sorted(make_conv):
    """In the graph: the values of batch are not known before."""
    conv, batch = make_conv(None), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    given = {"x": torch.randn(7, 12, dtype=torch.float64), "batch": batch, "batch_size": 2}
    torch.compiler.reset()
    compiled = torch.compile(conv, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**given), conv(**given))
    mixed = {**given, "batch": batch[torch.tensor([6, 0, 3, 1, 5, 2, 4])]}
    torch.testing.assert_close(compiled(**mixed), conv(**mixed))
