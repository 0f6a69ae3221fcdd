import math
import sys

import pytest
import torch
from attention_operands import EXTREMES, Largest, assert_same, gradients, operands, opposed
from oracles import attention_materialised
from small_groups import GROUPS

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional import group_attention, lifting_attention
from tg_equiattn.functional.group import factorised, tiled_attention
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic

DTYPE = torch.float64


@pytest.mark.parametrize("relation", ["ge_vit", "lifted", "gsa"])
@pytest.mark.parametrize("spatial", [(5, 6), (7, 3)])
def test_matches_materialised_formula(relation, spatial, device):
    group = cyclic(3)
    tensors, neighbourhood = operands(3, spatial, device=device)
    index = relation_index(group, relation).to(device)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood, scale=0.3)
    assert_same(out, attention_materialised(*tensors, index, 3, 0.3), tensors)


def test_wrong_table_fails(device):
    """Negative control: the oracle notices a wrong relation."""
    tensors, neighbourhood = operands(3, (5, 6), device=device)
    good, bad = (relation_index(cyclic(3), r).to(device) for r in ("ge_vit", "gsa"))
    out = group_attention(*tensors, bad, neighbourhood=neighbourhood)
    assert (out - attention_materialised(*tensors, good, 3, 5**-0.5)).abs().max() > 1e-2


@pytest.mark.parametrize("kernel_size", [3, None])
@pytest.mark.parametrize("spatial", [(4, 5), (3, 4, 3)])
@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
def test_direct_equals_factorised(relation, spatial, kernel_size, device):
    tensors, neighbourhood = operands(4, spatial, kernel_size, device=device)
    index = relation_index(GROUPS["D2"], relation).to(device)
    factorised = group_attention(*tensors, index, neighbourhood=neighbourhood, implementation="factorised")
    direct = group_attention(*tensors, index, neighbourhood=neighbourhood, implementation="direct")
    assert_same(factorised, direct, tensors)


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("kernel_size", [3, None])
def test_full_encoding(on_device, relation, kernel_size):
    """A full encoding that happens to be a sum gives what the sum gives."""
    tensors, neighbourhood = operands(4, (4, 5), kernel_size)
    *features, rho_space, rho_group = tensors
    index = relation_index(cyclic(4), relation)
    full = group_attention(*features, rho_space[:, :, None] + rho_group, None, index, neighbourhood=neighbourhood)
    assert_same(full, group_attention(*tensors, index, neighbourhood=neighbourhood), tensors)


def test_global_equals_a_window_that_sees_everything():
    """On 3 x 3 pixels a 5 x 5 window (on a padded grid) is global."""
    tensors, everywhere = operands(2, (3, 3), None)
    index = relation_index(cyclic(2), "ge_vit")
    *features, rho_space, rho_group = tensors
    out = group_attention(*tensors, index, neighbourhood=everywhere)
    content = torch.einsum("bnctp,bncsq->bntspq", features[0].flatten(4), features[1].flatten(4))
    row, column = torch.arange(9) // 3, torch.arange(9) % 3
    relative = (row[None] - row[:, None] + 2) * 5 + column[None] - column[:, None] + 2
    space = torch.einsum("bnctp,hpqc->bnhtpq", features[0].flatten(4), rho_space[:, relative])
    group = torch.einsum("bnctp,uc->bntup", features[0].flatten(4), rho_group)
    group = group[:, :, torch.arange(2)[None, :, None].expand_as(index), index]
    score = (content[:, :, None] + space[:, :, :, :, None] + group[..., None]) * 5**-0.5
    weight = score.movedim(4, 5).flatten(5).softmax(-1).unflatten(5, (2, 9))
    expected = torch.einsum("bnhtpsq,bncsq->bnchp", weight, features[2].flatten(4)).view_as(out)
    assert_same(out, expected, tensors)


def test_lifting_is_group_attention_from_the_trivial_group(device):
    tensors, neighbourhood = operands(1, (5, 4), outputs=4, device=device)
    *features, rho_space, _ = tensors
    lifted = lifting_attention(*(x.squeeze(3) for x in features), rho_space, neighbourhood=neighbourhood)
    nothing = torch.zeros(1, 5, dtype=DTYPE, device=device)
    expected = attention_materialised(
        *features, rho_space, nothing, torch.zeros(4, 1, 1, dtype=torch.int64, device=device), 3, 5**-0.5
    )
    assert_same(lifted, expected, [*features, rho_space])


@pytest.mark.parametrize("shape", ["square", "disk"])
def test_disk_leaves_out_corners(shape):
    tensors, square = operands(2, (5, 6), 5)
    *features, rho_space, rho_group = tensors
    index = relation_index(cyclic(2), "ge_vit")
    disk = Neighbourhood(2, 5, "disk")
    chosen = list(disk.selection)
    corners = torch.ones(25, dtype=torch.bool)
    corners[chosen] = False
    # A square window whose corners are pushed far away is the disk.
    pushed = rho_space.clone()
    pushed[:, corners] = 0
    query = torch.cat([features[0], torch.ones_like(features[0][:, :, :1])], 2)
    key = torch.cat([features[1], torch.zeros_like(features[1][:, :, :1])], 2)
    last = torch.where(corners, -300.0 if shape == "disk" else 0.0, 0.0).to(DTYPE)[None, :, None].expand(2, -1, 1)
    masked = group_attention(
        query, key, features[2], torch.cat([pushed, last], -1), torch.cat([rho_group, torch.zeros(2, 1).double()], -1),
        index, neighbourhood=square, scale=1.0,
    )  # fmt: skip
    out = group_attention(*features, rho_space[:, chosen], rho_group, index, neighbourhood=disk, scale=1.0)
    difference = (out - masked).abs().max()
    assert difference < 1e-10 if shape == "disk" else difference > 1e-3


@pytest.mark.parametrize("budget", [1, 1 << 10, 1 << 30])
@pytest.mark.parametrize("kernel_size", [3, None])
def test_tiles_do_not_change_results(budget, kernel_size, monkeypatch):
    tensors, neighbourhood = operands(2, (5, 6), kernel_size)
    index = relation_index(cyclic(2), "ge_vit")
    expected = group_attention(*tensors, index, neighbourhood=neighbourhood)
    monkeypatch.setattr(tiled_attention, "_TILE_BUDGET", dict.fromkeys(tiled_attention._TILE_BUDGET, budget))
    assert_same(group_attention(*tensors, index, neighbourhood=neighbourhood), expected, tensors)


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("implementation", ["auto", "direct"])
def test_extreme_scores(implementation, extreme, device):
    index = relation_index(cyclic(2), "ge_vit")
    exact, neighbourhood = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected = attention_materialised(*exact, index, 3, 1.0)
    out = group_attention(
        *single, index.to(device), neighbourhood=neighbourhood, scale=1.0, implementation=implementation
    )
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


def test_extreme_scores_need_the_direct_formula(monkeypatch):
    """Negative control: without it the product of factors underflows and is wrong."""
    monkeypatch.setattr(factorised, "SMALLEST_NORMALISER", {torch.float32: -1.0})
    index = relation_index(cyclic(2), "ge_vit")
    exact, neighbourhood = opposed(torch.float64)
    out = group_attention(*(x.float() for x in exact), index, neighbourhood=neighbourhood, scale=1.0)
    assert (out.double() - attention_materialised(*exact, index, 3, 1.0)).abs().max() > 0.1


@pytest.mark.parametrize("extreme", EXTREMES)
def test_double_factors_do_without_the_direct_formula(extreme, monkeypatch):
    """The CUDA path, where nothing may wait for the value of a normaliser: factors in double, no second look."""
    monkeypatch.setattr(factorised, "factor_dtype", lambda query: torch.float64)
    monkeypatch.setattr(tiled_attention._Plan, "safe", lambda self, smallest: True)
    monkeypatch.setattr(factorised, "direct", None)
    index = relation_index(cyclic(2), "ge_vit")
    exact, neighbourhood = extreme(torch.float64)
    single = [x.detach().float().requires_grad_() for x in exact]
    expected = attention_materialised(*exact, index, 3, 1.0)
    out = group_attention(*single, index, neighbourhood=neighbourhood, scale=1.0)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


def test_without_a_compiler_it_runs_eagerly(monkeypatch):
    def broken(step, shape):
        def call(*operands):
            raise torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError("no C++ compiler"), None)

        return call

    tensors, neighbourhood = operands(2, (4, 5))
    index = relation_index(cyclic(2), "ge_vit")
    expected = group_attention(*tensors, index, neighbourhood=neighbourhood)
    monkeypatch.setattr(tiled_attention, "_compiled", broken)
    original = tiled_attention.group_attention_op
    module = sys.modules["tg_equiattn.functional.group_attention"]
    monkeypatch.setattr(module, "group_attention_op", lambda *x: original(*x[:-1], "compiled"))
    tiled_attention._warn_not_compiled.cache_clear()
    with pytest.warns(UserWarning, match="runs eagerly: .*no C.. compiler"):
        out = group_attention(*tensors, index, neighbourhood=neighbourhood)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(3))
def test_moderately_large_scores(seed):
    torch.manual_seed(seed)
    exact, neighbourhood = operands(3, (4, 5), std=4.0)
    index = relation_index(cyclic(3), "ge_vit")
    expected = attention_materialised(*exact, index, 3, 1.0)
    out = group_attention(*(x.float() for x in exact), index, neighbourhood=neighbourhood, scale=1.0)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kernel_size", [3, None])
@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("implementation", ["factorised", "direct"])
def test_gradcheck(kernel_size, relation, implementation):
    tensors, neighbourhood = operands(2, (3, 4), kernel_size, batch=1, heads=2, channels=3, value_channels=2)
    index = relation_index(cyclic(2), relation)

    def attend(*x):
        return group_attention(*x, index, neighbourhood=neighbourhood, implementation=implementation)

    assert torch.autograd.gradcheck(attend, tensors)


def seeded_dropout(tensors, index, neighbourhood, **options):
    torch.manual_seed(5)
    return group_attention(*tensors, index, neighbourhood=neighbourhood, dropout=0.4, **options)


@pytest.mark.parametrize("implementation", ["factorised", "direct"])
def test_dropout_gradients_use_the_same_draw(implementation):
    tensors, neighbourhood = operands(2, (3, 4), batch=1, heads=2, channels=3, value_channels=2)
    index = relation_index(cyclic(2), "ge_vit")
    assert torch.autograd.gradcheck(
        lambda *x: seeded_dropout(x, index, neighbourhood, implementation=implementation), tensors
    )


def test_dropout_is_unbiased_and_seeded():
    tensors, neighbourhood = operands(2, (3, 4), batch=1, heads=1)
    index = relation_index(cyclic(2), "ge_vit")
    expected = group_attention(*tensors, index, neighbourhood=neighbourhood).detach()
    same = [seeded_dropout(tensors, index, neighbourhood) for _ in range(2)]
    assert torch.equal(*same)
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([
            group_attention(*tensors, index, neighbourhood=neighbourhood, dropout=0.4) for _ in range(2000)
        ])  # fmt: skip
    deviation = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(2000))
    assert draws.std(0).min() > 0
    assert deviation.max() < 5


def test_batch_mates_do_not_matter(on_device):
    tensors, neighbourhood = operands(3, (5, 6), batch=3)
    *features, rho_space, rho_group = (x.detach() for x in tensors)
    index = relation_index(cyclic(3), "ge_vit")

    def attend(x):
        return group_attention(*x, rho_space, rho_group, index, neighbourhood=neighbourhood)

    together = attend(features)
    for b in range(3):
        torch.testing.assert_close(attend([x[b : b + 1] for x in features])[0], together[b], rtol=0, atol=1e-12)
    poisoned = [x.clone() for x in features]
    for x in poisoned:
        x[1] = math.nan
    clean = attend(poisoned)
    torch.testing.assert_close(clean[[0, 2]], together[[0, 2]], rtol=0, atol=1e-12)
    assert bool(clean[1].isnan().all())


@pytest.mark.parametrize("implementation", ["factorised", "direct"])
def test_no_tensor_holds_all_scores(implementation, monkeypatch):
    """|H|^3 K^2 N scores are never in memory at once, forward or backward, nor |H|^2 K^2 N factors."""
    budget = 1 << 14
    monkeypatch.setattr(tiled_attention, "_TILE_BUDGET", dict.fromkeys(tiled_attention._TILE_BUDGET, budget))
    tensors, _ = operands(8, (12, 12), 5, dtype=torch.float32)
    query, key, value, rho_space, rho_group = (x.detach() for x in tensors)
    index = relation_index(cyclic(8), "ge_vit")
    if implementation == "direct":
        rho_space, rho_group = rho_space[:, :, None] + rho_group, rho_group[:0]
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    options = (rho_space, rho_group, index, torch.tensor(0), 5, (), 0.0, "eager")
    with Largest() as largest:
        out = tiled_attention.group_attention_op._init_fn(*flat, *options)
        tiled_attention.group_attention_backward_op._init_fn(out, *flat, *options)
    factors = 8**2 * 25 * 12 * 12 * len(flat[0])
    assert largest.count < factors / 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands(dtype, device):
    tensors, neighbourhood = operands(3, (5, 6), dtype=torch.float32, device=device)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    half = [x.detach().to(dtype) for x in tensors]
    out = group_attention(*half, index, neighbourhood=neighbourhood)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), group_attention(*tensors, index, neighbourhood=neighbourhood),
                               rtol=0, atol=0.15)  # fmt: skip


def test_operator_registration():
    tensors, _ = operands(2, (3, 4), batch=1, heads=2)
    query, key, value, rho_space, rho_group = tensors
    index = relation_index(cyclic(2), "ge_vit")
    torch.library.opcheck(
        tiled_attention.group_attention_op,
        (
            *(x[0].detach().requires_grad_() for x in (query, key, value)),
            rho_space,
            rho_group,
            index,
            torch.tensor(0),
            3,
            (),
            0.0,
            "eager",
        ),
    )


GOOD = {"elements": 4, "spatial": (5, 6)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, o: a.__setitem__(0, a[0][0]), "query must have shape"),
        (lambda a, o: a.__setitem__(1, a[1][..., :5]), r"key must have the shape of query"),
        (lambda a, o: a.__setitem__(2, a[2][:, :, :, :3]), "value must match query"),
        (
            lambda a, o: a.__setitem__(1, a[1].float()),
            "key must be torch.float64 on cpu as query is, got torch.float32",
        ),
        (lambda a, o: a.__setitem__(0, a[0].int()), "query must be a floating point tensor, got torch.int32"),
        (lambda a, o: a.__setitem__(3, a[3][:3]), "rho_space must have shape"),
        (lambda a, o: a.__setitem__(3, a[3][:, :8]), "rho_space must have 9 offsets on axis 1"),
        (lambda a, o: a.__setitem__(4, None), r"rho_group must have shape \(4, 5\), got None"),
        (lambda a, o: a.__setitem__(4, a[4][:3]), r"rho_group must have shape \(4, 5\), got \(3, 5\)"),
        (lambda a, o: a.__setitem__(3, a[3][:, :, None].expand(-1, -1, 4, -1)), "rho_group be None"),
        (lambda a, o: a.__setitem__(5, a[5][:, :3]), "index must be int64 of shape"),
        (lambda a, o: a.__setitem__(5, a[5] * 0), "index must be a permutation"),
        (lambda a, o: o.update(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (lambda a, o: o.update(implementation="fast"), "implementation must be one of"),
        (lambda a, o: o.update(scale=math.nan), "scale must be a finite number or None, got nan"),
        (lambda a, o: o.update(neighbourhood=3), "neighbourhood must be a tg_equiattn.grids.Neighbourhood, got int"),
        (lambda a, o: a.__setitem__(3, a[3].to("meta")), "rho_space must be on cpu as query is, got meta"),
        (lambda a, o: a.__setitem__(4, a[4].int()), "rho_group must be a floating point tensor, got torch.int32"),
        (lambda a, o: a.__setitem__(5, a[5].to("meta")), "index must be on cpu as query is, got meta"),
        (lambda a, o: o.update(neighbourhood=Neighbourhood(2, 7)), "at least kernel_size=7 wide"),
        (lambda a, o: o.update(neighbourhood=Neighbourhood(3, 3)), "must have 3 spatial axes"),
    ],
)
def test_bad_input(change, message):
    tensors, neighbourhood = operands(4, (5, 6))
    arguments = [*(x.detach() for x in tensors), relation_index(cyclic(4), "ge_vit")]
    options = {"neighbourhood": neighbourhood}
    group_attention(*arguments, **options)
    change(arguments, options)
    with pytest.raises(ValueError, match=message):
        group_attention(*arguments, **options)


def test_bad_full_and_lifting_input():
    tensors, neighbourhood = operands(4, (5, 6))
    index = relation_index(cyclic(4), "ge_vit")
    full = tensors[3][:, :, None].expand(-1, -1, 4, -1)
    with pytest.raises(ValueError, match="implementation must be 'auto' or 'direct' with a full encoding"):
        group_attention(*tensors[:3], full, None, index, neighbourhood=neighbourhood, implementation="factorised")
    with pytest.raises(ValueError, match="query must have shape"):
        lifting_attention(tensors[0][0, 0], tensors[1], tensors[2], tensors[3], neighbourhood=neighbourhood)
    with pytest.raises(ValueError, match="rho_space must have shape"):
        lifting_attention(*(x[:, :, :, 0] for x in tensors[:3]), full, neighbourhood=neighbourhood)
