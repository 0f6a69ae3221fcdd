"""Batches of random clouds: as flat arguments, padded, one alone, moved, permuted; for tests of operators on tokens."""

import torch
from space import batch_of, move

S, V, EDGE = 3, 2, 4  # scalars and vectors of a token, scalars of an edge
SIZES = [5, 1, 23, 7, 1, 0, 40, 2, 7]


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def sample(name, sizes, dtype=torch.float64, device=None, edges=3):
    total = sum(sizes)
    out = {
        "scalars": torch.randn(total, S, dtype=dtype), "vectors": torch.randn(total, V, 3, dtype=dtype),
        "pos": torch.randn(total, 3, dtype=dtype), "batch": batch_of(sizes),
    }  # fmt: skip
    if "causal" in name:  # positions are relative to their mean, which later tokens change
        del out["pos"]
    if "local" in name:
        starts = torch.tensor([sum(sizes[:b]) for b in range(len(sizes))])[out["batch"]]
        source = starts + (torch.rand(edges, total) * torch.tensor(sizes)[out["batch"]]).long()
        out["edge_index"] = torch.stack([source.flatten(), torch.arange(total).repeat(edges)])[:, edges:]
        if "bare" not in name:
            out["edge_attr"] = torch.randn(out["edge_index"].shape[1], EDGE, dtype=dtype)
    return out if device is None else {key: value.to(device) for key, value in out.items()}


def moved(x, r, shift):
    """The sample turned, and every sequence shifted by itself."""
    positions = {"pos": move(x["pos"], r) + shift[x["batch"]]} if "pos" in x else {}
    return {**x, "vectors": move(x["vectors"], r), **positions}


def permuted(x, p):
    """The sample with token p[i] at place i, edges relabelled and in another order."""
    out = {**x, **{key: value[p] for key, value in x.items() if "edge" not in key}}
    if "edge_index" in x:
        e = torch.randperm(x["edge_index"].shape[1])
        out["edge_index"] = p.argsort()[x["edge_index"][:, e]]
        if "edge_attr" in x:
            out["edge_attr"] = x["edge_attr"][e]
    return out


def within(sizes):
    return torch.cat([sum(sizes[:b]) + torch.randperm(n) for b, n in enumerate(sizes)])


def one(x, b):
    there = x["batch"] == b
    out = {key: value[there] for key, value in x.items() if key != "batch" and "edge" not in key}
    if "edge_index" in x:
        e = there[x["edge_index"][1]]
        out["edge_index"] = x["edge_index"][:, e] - int(there.int().argmax())
        if "edge_attr" in x:
            out["edge_attr"] = x["edge_attr"][e]
    return out


def dense(x, sizes, longest, fill):
    out, there = {"lengths": torch.tensor(sizes)}, torch.arange(longest) < torch.tensor(sizes)[:, None]
    for key in [key for key in x if key != "batch" and "edge" not in key]:
        out[key] = torch.full((*there.shape, *x[key].shape[1:]), fill, dtype=x[key].dtype)
        out[key][there] = x[key]
    if "edge_index" in x:
        out["edge_index"] = there.flatten().nonzero().squeeze(1)[x["edge_index"]]
        if "edge_attr" in x:
            out["edge_attr"] = x["edge_attr"]
    return out, there


def gradients(out, inputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    directions = [torch.randn(o.shape, generator=generator, dtype=o.dtype, device="cpu").to(o.device) for o in out]
    total = sum((o * d).sum() for o, d in zip(out, directions, strict=True))
    return torch.autograd.grad(total, inputs, allow_unused=True, materialize_grads=True)


def equal(got, wanted, inputs, rtol=1e-10, atol=1e-11):
    """Outputs and gradients."""
    torch.testing.assert_close(got, wanted, rtol=rtol / 100, atol=atol / 10)
    torch.testing.assert_close(*(gradients([x], inputs) for x in (got, wanted)), rtol=rtol, atol=atol)


def close(got, wanted, tolerance=1e-12):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
