"""No kernel reads or writes outside its tensors, which values alone do not show: the interpreter's addresses do."""

import pytest
import torch
from group_layers import layer as small_layer

from tg_equiattn.functional import geometric_product, vector_attention
from tg_equiattn.functional.hyena.clifford import channelwise_product
from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GlobalGroupAttention, GroupAttention, LiftingAttention

interpreter = pytest.importorskip("triton.runtime.interpreter", reason="Triton is not installed")
kernels = pytest.importorskip("tg_equiattn.functional.group.triton_attention")
pytestmark = pytest.mark.usefixtures("kernels_run")


@pytest.fixture
def outside(monkeypatch):
    """Ranges of addresses that kernels touched, and that lie in none of their tensors."""
    ranges, bad = [], []

    def look(pointers, mask):
        touched = pointers.data[mask.data.astype(bool)] if mask is not None else pointers.data
        if touched.size:
            low = int(touched.min())
            high = int(touched.max()) + pointers.get_element_ty().primitive_bitwidth // 8
            if not any(start <= low and high <= stop for start, stop in ranges):
                bad.append((low, high))

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, atomic = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw
    prepare = executor._init_args_hst

    def masked_load(self, pointers, mask, *rest):
        look(pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self, pointers, value, mask, *rest):
        look(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def atomic_rmw(self, operation, pointers, value, mask, *rest):
        look(pointers, mask)
        return atomic(self, operation, pointers, value, mask, *rest)

    def arguments(self, args, kwargs):
        out = prepare(self, args, kwargs)
        values = [*out[0], *out[1].values()] if isinstance(out, tuple) else list(out)
        tensors = [x for x in (getattr(x, "base", x) for x in values) if isinstance(x, torch.Tensor)]
        ranges[:] = [(x.data_ptr(), x.data_ptr() + x.untyped_storage().nbytes()) for x in tensors]
        assert ranges
        return out

    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
    monkeypatch.setattr(builder, "create_atomic_rmw", atomic_rmw)
    monkeypatch.setattr(executor, "_init_args_hst", arguments)
    return bad


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
@pytest.mark.parametrize(("kind", "options"), [
    (GroupAttention, {"relation": "ge_vit"}), (GroupAttention, {"relation": "relative"}),
    (GroupAttention, {"relation": "ge_vit", "encoding": "full"}), (LiftingAttention, {}),
    (GlobalGroupAttention, {"relation": "relative", "padding_mode": "circular"}),
])  # fmt: skip
def test_group_attention(kind, options, dropout, outside):
    """Three elements, which fill no block."""
    layer = small_layer(kind, cyclic(3), 2, 2, heads=1, head_channels=3, dropout=dropout, backend="triton", **options)
    x = torch.randn(1, 2, 3, 4) if kind is LiftingAttention else torch.randn(1, 2, 3, 3, 4)
    layer(x, torch.rand(1, 3, 4) < 0.7 if dropout else None).sum().backward()
    assert not outside


def test_vectors_and_products(outside):
    q, k, v = (torch.randn(2, 13, 2, 3, requires_grad=True) for _ in range(3))
    vector_attention(q, k, v, torch.tensor([13, 5]), backend="triton").sum().backward()
    x, y = (torch.randn(8, 3, 11, requires_grad=True) for _ in range(2))
    channelwise_product(x, y, torch.randn(20, 3, requires_grad=True), "triton").sum().backward()
    geometric_product(x.movedim(0, -1), y.movedim(0, -1), backend="triton").sum().backward()
    assert not outside


def test_a_wrong_address_is_seen(outside, monkeypatch):
    """Negative control: hashes for fewer places than there are."""
    places = kernels.hashed_dropout.places
    monkeypatch.setattr(kernels.hashed_dropout, "places", lambda rows, columns, seed: places(rows, columns - 1, seed))
    options = {"heads": 1, "head_channels": 3, "kernel_size": 3, "relation": "ge_vit"}
    layer = GroupAttention(cyclic(4), 2, 2, **options, dropout=0.3, options={"backend": "triton"})
    layer(torch.randn(1, 2, 4, 3, 3))
    assert outside
