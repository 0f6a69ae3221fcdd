"""Every check names the argument, what came and what is allowed; modules and functions are wired to these."""

import pytest
import torch

from tg_equiattn import checks

X = torch.ones(5, 3)
BATCH = torch.tensor([0, 0, 1, 1, 1])

GOOD = [
    lambda: checks.positive(heads=1),
    lambda: checks.probability(dropout=0.0),
    lambda: checks.probability(dropout=0.99),
    lambda: checks.choice("mode", "a", ("a", "b")),
    lambda: checks.features(torch.ones(2, 3, 4, 5), 3, 2, None, X),
    lambda: checks.features(torch.ones(2, 3, 8, 4, 5, 6), 3, 3, 8, X),
    lambda: checks.same_kind(X, X),
    lambda: checks.alike(2, q=X, k=X),
    lambda: checks.full_parameters(X.double()),
    lambda: checks.lengths(None, 2, 5, X.device),
    lambda: checks.lengths(torch.tensor([0, 5]), 2, 5, X.device),
    lambda: checks.mask(None, (2, 5), X.device),
    lambda: checks.mask(torch.ones(2, 5) > 0, (2, 5), X.device),
    lambda: checks.batch_index(None, None, X),
    lambda: checks.batch_index(BATCH, 3, X),
    lambda: checks.positions(torch.ones(5, 2), (5, 2), X, ""),
]

BAD = [
    (lambda: checks.positive(heads=0), "heads must be a positive integer, got 0"),
    (lambda: checks.positive(heads=True), "heads must be a positive integer, got True"),
    (lambda: checks.positive(heads=2.0), "heads must be a positive integer, got 2.0"),
    (lambda: checks.probability(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
    (lambda: checks.probability(dropout="a"), r"dropout must be in \[0, 1\), got 'a'"),
    (lambda: checks.choice("mode", "c", ("a", "b")), r"mode must be one of \('a', 'b'\), got 'c'"),
    (lambda: checks.choice("mode", None, ("a", "b")), r"mode must be one of \('a', 'b'\), got None"),
    (lambda: checks.features([1], 3, 2, None, X), r"input must be a torch.Tensor of shape \(B, 3, H, W\), got list"),
    (lambda: checks.features(X, 3, 2, 8, X), r"input must have shape \(B, 3, 8, H, W\), got \(5, 3\)"),
    (lambda: checks.features(torch.ones(2, 3, 0, 5), 3, 2, None, X), "at least one pixel on every spatial axis"),
    (lambda: checks.same_kind(BATCH, X, "x"), "x must be a floating point tensor, got torch.int64"),
    (lambda: checks.same_kind(X.double(), X), "input must be torch.float32 as the parameters are, got torch.float64"),
    (lambda: checks.same_kind(X.to("meta"), X), "input must be on cpu as the parameters are, got meta"),
    (lambda: checks.alike(3, q=X), r"q must have 3 axes, got shape \(5, 3\)"),
    (lambda: checks.alike(2, q=X, k=X[:2]), r"k must have the shape of q, \(5, 3\), got \(2, 3\)"),
    (lambda: checks.alike(2, q=X, k=X.double()), "k must be torch.float32 on cpu as q is, got torch.float64 on cpu"),
    (lambda: checks.alike(2, q=[1]), "q must be a floating point tensor, got list"),
    (lambda: checks.alike(2, q=X.half()), "q must be float32 or float64 on the CPU, or under torch.autocast"),
    (lambda: checks.full_parameters(X.half()), r"parameters must be float32 or float64 .*, got torch.float16"),
    (lambda: checks.lengths([5], 1, 5, X.device), r"lengths must be int64 of shape \(1,\), got list"),
    (lambda: checks.lengths(torch.tensor([6]), 1, 5, X.device), r"lengths must be in \[0, 5\], got 6 to 6"),
    (lambda: checks.lengths(torch.tensor([5], device="meta"), 1, 5, X.device), "lengths must be on cpu as the input"),
    (lambda: checks.mask(X, (5, 3), X.device), r"mask must be bool of shape \(5, 3\), got torch.float32"),
    (lambda: checks.batch_index(None, 2, X), "batch must be given where batch_size is 2, got None"),
    (lambda: checks.batch_index(BATCH[:4], None, X), r"batch must be int64 of shape \(5,\), got torch.int64 of shape"),
    (lambda: checks.batch_index(BATCH.flip(0), None, X), "batch must be sorted, got a graph index that decreases"),
    (lambda: checks.batch_index(BATCH, 1, X), r"batch must be in \[0, 1\), got 0 to 1"),
    (lambda: checks.batch_index(BATCH, 0, X), "batch_size must be a positive integer, got 0"),
    (lambda: checks.positions(None, (5, 2), X, "why"), r"pos must be given, of shape \(5, 2\): why; got None"),
    (lambda: checks.positions(X, (5, 2), X, ""), r"pos must have shape \(5, 2\), got \(5, 3\)"),
    (lambda: checks.positions(X > 0, (5, 3), X, ""), "pos must be real numbers, got torch.bool"),
]


@pytest.mark.parametrize("call", GOOD)
def test_good_arguments_pass(call):
    call()


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_half_precision_passes_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        checks.alike(2, q=X.bfloat16())
        checks.same_kind(X.bfloat16(), X)


def test_small_integers_do_not_wrap_around():
    assert checks.positions(torch.ones(5, 2, dtype=torch.int8), (5, 2), X, "").dtype == torch.int64


def test_values_are_read_on_the_cpu_only():
    assert checks.values_are_free(X)
    assert not checks.values_are_free(X.to("meta"))
    assert checks.batch_index(BATCH.to("meta"), 1, X.to("meta")) == 1


def test_values_under_transforms():
    """Those of a tensor that vmap goes through are not there to be read, at any level of nested transforms."""
    seen, fixed = [], torch.zeros(3)

    def record(x):
        seen.append((checks.values_are_free(x), checks.values_are_free(fixed)))
        return x.sum()

    torch.func.grad(record)(torch.ones(2))
    torch.vmap(record)(torch.ones(2, 3))
    torch.vmap(torch.func.grad(record))(torch.ones(2, 3))
    torch.func.grad(lambda x: torch.vmap(record)(x).sum())(torch.ones(2, 3))
    assert seen == [(True, True), (False, True), (False, True), (False, True)]
