"""SE(3)-Hyena on batches: ragged, padded, empty, in many blocks of tokens."""

import pytest
import torch
from clouds import S, V, close, sample


@pytest.mark.parametrize("name", ["plain", "radial local", "pooled", "implicit", "implicit causal model", "attention"])
def test_nothing_and_one_token(name, make):
    layer, x = make(name), sample(name, [1])
    close([part[:1] for part in layer(**x)], layer(**{k: v for k, v in x.items() if k != "batch"}))
    nothing = {key: value[:0] if key != "edge_index" else value[:, :0] for key, value in x.items()}
    for size, b in ((None, 0), (3, 3)):
        scalars, vectors = layer(**nothing, batch_size=size)
        assert scalars.shape[0] == vectors.shape[0] == (b if layer.module.pool else 0)
        assert vectors.shape[1:] == (layer.module.out_grades.vectors, 3)
        (scalars.sum() + vectors.sum()).backward()
    for b, n in ((0, 5), (3, 0), (0, 0)):
        y = {"scalars": torch.ones(b, n, S), "vectors": torch.ones(b, n, V, 3)}
        y |= {"pos": torch.ones(b, n, 3)} if "pos" in x else {}
        y = {key: value.double() for key, value in y.items()} | {k: nothing[k] for k in nothing if "edge" in k}
        for lengths in (None, torch.zeros(b, dtype=torch.int64)):
            scalars, vectors = layer(**y, lengths=lengths)
            assert scalars.shape == ((b,) if layer.module.pool else (b, n)) + (layer.module.out_grades.scalars,)
            assert vectors.shape[:-2] == scalars.shape[:-1]
