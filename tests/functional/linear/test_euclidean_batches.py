"""Euclidean fast attention of batches: ragged, padded, empty; on meta tensors; what it refuses."""

import math

import pytest
import torch
from euclidean import operands
from space import batch_of

from tg_equiattn.encodings import direction_rule
from tg_equiattn.functional import euclidean_fast_attention

RULE = direction_rule(math.pi, 2, 1e-10)


@pytest.mark.parametrize("method", ["pairs", "directions", "auto"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_ragged_equals_each_alone(method, reduce):
    """And padded; whatever padding and other clouds hold."""
    sizes = [5, 0, 70, 1, 33, 64]
    query, key, value, pos, frequencies = operands(sum(sizes))
    batch, options = batch_of(sizes), {"lmax": 1, "method": method, "reduce": reduce}
    call = lambda *x, **more: euclidean_fast_attention(*x, frequencies, RULE, **options, **more)  # noqa: E731
    ends = torch.tensor(sizes).cumsum(0)
    alone = [
        call(*(t[end - n : end] for t in (query, key, value, pos))) for n, end in zip(sizes, ends.tolist(), strict=True)
    ]
    got = call(query, key, value, pos, batch=batch)
    torch.testing.assert_close(got, torch.cat(alone), rtol=1e-12, atol=1e-12)
    longest = max(sizes)
    there = torch.arange(longest + 3) < torch.tensor(sizes)[:, None]
    padded = []
    for t in (query, key, value, pos):
        full = torch.full((*there.shape, *t.shape[1:]), torch.nan, dtype=t.dtype)
        full[there] = t
        padded.append(full)
    dense = call(*padded, lengths=torch.tensor(sizes))
    bounded = call(query, key, value, pos, batch=batch, batch_size=len(sizes), max_num_nodes=longest + 3)
    tolerance = 1e-8 if method == "auto" else 1e-12  # a bound decides for all
    torch.testing.assert_close(dense[there], got, rtol=0, atol=tolerance)
    torch.testing.assert_close(bounded, got, rtol=0, atol=tolerance)
    assert not dense[~there].any()
    broken = [t.clone() for t in (query, key, value, pos)]
    for t in broken:
        t[10] = torch.nan
    others = batch != 2
    torch.testing.assert_close(call(*broken, batch=batch)[others], got[others], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["pairs", "directions"])
def test_no_points_and_one(method):
    for nodes in (0, 1):
        x = operands(nodes)
        out = euclidean_fast_attention(*x, RULE, lmax=1, method=method)
        assert out.shape == (nodes, 2, 20)
        dense = euclidean_fast_attention(*(t[None] for t in x[:4]), x[4], RULE, lmax=1, method=method)
        torch.testing.assert_close(dense[0], out)
    none = euclidean_fast_attention(*(t[:0, None] for t in x[:4]), x[4], RULE, method=method)
    assert none.shape == (0, 1, 2, 5)


X = dict(zip(("query", "key", "value", "pos", "frequencies"), operands(6), strict=True))
DENSE = {name: x[None] if name != "frequencies" else x for name, x in X.items()}


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("query must be a floating point tensor", X | {"query": X["query"].long()}),
        ("query must have 5 axes", X | {"query": X["query"][0]}),
        ("key must have the shape of query", X | {"key": X["key"][:5]}),
        (
            r"query must be .* with pairs of channels, got \(6, 2, 3, 1, 2\)",
            X | dict.fromkeys(("query", "key"), X["query"][:, :, :, :1]),
        ),
        (r"value must be \(6, 2\) and V, got \(6, 1, 5\)", X | {"value": X["value"][:, :1]}),
        ("value must be torch.float64", X | {"value": X["value"].float()}),
        (r"pos must have shape \(6, 3\)", X | {"pos": X["pos"][:, :2]}),
        ("pos must be given", X | {"pos": None}),
        ("pos must be real", X | {"pos": X["pos"] > 0}),
        (r"frequencies must be \(3,\) or \(2, 3\), got \(3, 2\)", X | {"frequencies": X["frequencies"].T}),
        ("frequencies must be floating point", X | {"frequencies": X["frequencies"].long()}),
        (r"rule must be directions \(D, 3\) and weights \(D,\)", X | {"rule": (RULE[0], RULE[1][:3])}),
        ("rule must be given with method='directions'", X | {"method": "directions", "rule": None}),
        ("method must be one of .*, got 'all'", X | {"method": "all"}),
        ("reduce must be one of", X | {"reduce": "max"}),
        ("backend must be one of", X | {"backend": "triton"}),
        (r"lmax must be an integer in \[0, 8\], got 9", X | {"lmax": 9}),
        ("lengths must be None where query is flat", X | {"lengths": torch.tensor([6])}),
        ("batch must be None where query is", DENSE | {"batch": torch.zeros(6).long()}),
        (r"lengths must be in \[0, 6\]", DENSE | {"lengths": torch.tensor([7])}),
        ("batch must be sorted", X | {"batch": torch.tensor([0, 0, 1, 0, 1, 1])}),
        ("query must be float32 or float64 on the CPU", X | {n: X[n].half() for n in ("query", "key", "value")}),
    ],
)
def test_bad_inputs(message, arguments):
    with pytest.raises(ValueError, match=message):
        euclidean_fast_attention(**{"rule": RULE, **arguments})


def test_meta_tensors():
    meta = {name: x.to("meta") for name, x in X.items()}
    out = euclidean_fast_attention(**meta, rule=tuple(t.to("meta") for t in RULE), method="directions", lmax=1)
    assert out.device.type == "meta"
    assert out.shape == (6, 2, 20)
