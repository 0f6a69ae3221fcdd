import math
import os
import subprocess
import sys

import pytest
import torch
from attention_operands import EXTREMES, Largest, as_full, assert_same, gradients, group_attention, operands
from oracles import attention_materialised
from small_groups import GROUPS

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional.group import direct, factorised, tiled_attention
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic


@pytest.mark.parametrize("relation", ["ge_vit", "lifted", "gsa"])
@pytest.mark.parametrize("spatial", [(5, 6), (7, 3)])
def test_matches_materialised_formula(relation, spatial, device):
    group = cyclic(3)
    tensors, neighbourhood = operands(3, spatial, device=device)
    index = relation_index(group, relation).to(device)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood)
    assert_same(out, attention_materialised(*tensors, index, 3, 5**-0.5), tensors)


@pytest.mark.parametrize("form", [tuple, as_full])
def test_windows_larger_than_the_image(form, device):
    """Outside of the image is masked, as at any border: 7 x 7 windows on 3 x 4 and 1 x 2 pixels."""
    index = relation_index(cyclic(2), "ge_vit").to(device)
    for spatial in ((3, 4), (1, 2)):
        tensors, neighbourhood = operands(2, spatial, 7, device=device)
        out = group_attention(*form(tensors), index, neighbourhood=neighbourhood)
        assert_same(out, attention_materialised(*tensors, index, 7, 5**-0.5), tensors)


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
    direct = group_attention(*as_full(tensors), index, neighbourhood=neighbourhood)
    assert_same(group_attention(*tensors, index, neighbourhood=neighbourhood), direct, tensors)


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
def test_many_tiles_give_what_one_gives(relation):
    """A tile holds 2^20 numbers: those of 655 pixels with |H| = 8 and 25 neighbors, of 680 here."""
    tensors, neighbourhood = operands(8, (34, 20), 5, batch=1, heads=1, channels=3, value_channels=2)
    index = relation_index(cyclic(8), relation)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood)
    if relation == "relative":  # the plain composition has other tiles
        expected = group_attention(*tensors, index, neighbourhood=neighbourhood, backend="plain")
    else:
        expected = attention_materialised(*tensors, index, 5, 3**-0.5)
    assert_same(out, expected, tensors)


@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("form", [tuple, as_full])
def test_extreme_scores(form, extreme, device):
    index = relation_index(cyclic(2), "ge_vit")
    exact, neighbourhood = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected = attention_materialised(*exact, index, 3, 3**-0.5)
    out = group_attention(*form(single), index.to(device), neighbourhood=neighbourhood)
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


def tile(dtype, size):
    """Operands of the core for five queries: content and space prefer different neighbors by ``size``, or less."""
    t, d, h, s, c, p = 2, 3, 2, 2, 3, 5
    torch.manual_seed(3)
    query, key, value = torch.randn(t, c, p), torch.randn(d, s, c, p), torch.randn(d, s, c, p)
    space, group = torch.randn(t, d, h, p), torch.randn(t, s, p)
    query[:, 0], key[0, :, 0], key[1, :, 0] = 1.0, size, -size
    space[:, 0] -= size
    space[:, 1] += size
    index = relation_index(cyclic(2), "ge_vit")
    return [x.to(dtype) for x in (query, key, value, space, group)], index


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_factors_say_when_they_lost_precision(size):
    """At the core: float32 factors of extreme scores are wrong and their normaliser says so, doubles are right."""
    (query, key, value, space, group), index = tile(torch.float64, size)
    exact, _ = direct.forward(query, key, value, space, group, index, None, None)
    for dtype, right in ((torch.float64, True), (torch.float32, size < 2)):
        operands, _ = tile(dtype, size)
        out, smallest = factorised.forward(*operands, index, None, None)
        assert bool(smallest >= factorised.SMALLEST_NORMALISER[dtype]) == right
        assert bool((out.double() - exact).abs().max() < 1e-4) == right


@pytest.mark.slow
def test_without_a_compiler_it_runs_eagerly(tmp_path):
    code = """if True:
        import torch, warnings
        from tg_equiattn.groups import cyclic
        from tg_equiattn.nn import GroupAttention
        layer, x = GroupAttention(cyclic(2), 3, 4, heads=1, kernel_size=3), torch.randn(1, 3, 2, 4, 5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
        torch.testing.assert_close(out, layer(x))
        print(*(str(w.message) for w in caught if "runs eagerly" in str(w.message)))
    """
    environment = os.environ | {"CXX": str(tmp_path / "none"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("group attention could not be compiled and runs eagerly:")


def seeded_dropout(tensors, index, neighbourhood):
    torch.manual_seed(5)
    return group_attention(*tensors, index, neighbourhood=neighbourhood, dropout=0.4)


@pytest.mark.parametrize("form", [tuple, pytest.param(as_full, marks=pytest.mark.slow)])
def test_dropout_gradients_use_the_same_draw(form):
    tensors, neighbourhood = operands(2, (3, 3), batch=1, heads=2, channels=2, value_channels=1)
    index = relation_index(cyclic(2), "ge_vit")
    assert torch.autograd.gradcheck(lambda *x: seeded_dropout(form(x), index, neighbourhood), tensors)


def test_dropout_is_unbiased_and_seeded():
    tensors, neighbourhood = operands(2, (3, 4), batch=1, heads=1)
    index = relation_index(cyclic(2), "ge_vit")
    expected = group_attention(*tensors, index, neighbourhood=neighbourhood).detach()
    same = [seeded_dropout(tensors, index, neighbourhood) for _ in range(2)]
    assert torch.equal(*same)
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([
            group_attention(*tensors, index, neighbourhood=neighbourhood, dropout=0.4) for _ in range(1000)
        ])  # fmt: skip
    deviation = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(1000))
    assert draws.std(0).min() > 0
    assert deviation.max() < 5


@pytest.mark.parametrize("full", [False, True])
def test_no_tensor_holds_all_scores(full):
    """|H|^3 K^2 N scores are never in memory at once, forward or backward, nor |H|^2 K^2 N factors."""
    tensors, _ = operands(8, (24, 24), 5, batch=2, heads=3, channels=3, value_channels=2, dtype=torch.float32)
    query, key, value, rho_space, rho_group = (x.detach() for x in tensors)
    index = relation_index(cyclic(8), "ge_vit")
    if full:
        rho_space, rho_group = rho_space[:, :, None] + rho_group, rho_group[:0]
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    options = (rho_space, rho_group, index, None, torch.tensor(0), 5, (), False, 0.0, "eager")
    with Largest() as largest:
        out, _ = tiled_attention.group_attention_op._init_fn(*flat, *options)
        tiled_attention.group_attention_backward_op._init_fn(out, torch.empty(0), *flat, *options)
    factors, scores = (8**n * 25 * 24 * 24 * len(flat[0]) for n in (2, 3))
    assert largest.count < (scores / 8 if full else factors / 4)


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
            torch.tensor([[[True, False, True, True]] * 3]).expand(2, -1, -1).contiguous(),
            torch.tensor(0),
            3,
            (),
            False,
            0.0,
            "eager",
        ),
    )


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
        (lambda a, o: a.__setitem__(3, a[3][:, :, None].expand(-1, -1, 4, -1)), "rho_group be None"),
        (lambda a, o: a.__setitem__(5, a[5][:, :3]), "index must be int64 of shape"),
        (lambda a, o: a.__setitem__(5, a[5] * 0), "index must be a permutation"),
        (lambda a, o: o.update(dropout=1.0), r"dropout must be in \[0, 1\), got 1.0"),
        (lambda a, o: o.update(neighbourhood=3), "neighbourhood must be a tg_equiattn.grids.Neighbourhood, got int"),
        (lambda a, o: a.__setitem__(3, a[3].to("meta")), "rho_space must be on cpu as query is, got meta"),
        (lambda a, o: a.__setitem__(4, a[4].int()), "rho_group must be a floating point tensor, got torch.int32"),
        (lambda a, o: a.__setitem__(5, a[5].to("meta")), "index must be on cpu as query is, got meta"),
        (lambda a, o: o.update(neighbourhood=Neighbourhood(2, 7)), "rho_space must have 49 offsets on axis 1"),
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands(dtype, device):
    tensors, neighbourhood = operands(3, (5, 6), dtype=torch.float32, device=device)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    half = [x.detach().to(dtype) for x in tensors]
    out = group_attention(*half, index, neighbourhood=neighbourhood)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), group_attention(*tensors, index, neighbourhood=neighbourhood),
                               rtol=0, atol=0.15)  # fmt: skip
