import math
import os
import subprocess
import sys

import pytest
import torch
from attention_operands import EXTREMES, Largest, as_full, assert_same, gradients, group_attention, operands
from oracles import attention_materialised

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional.group import direct, factorised, tiled_attention
from tg_equiattn.groups import cyclic


def attend(tensors, index, neighbourhood, **options):
    return group_attention(*tensors, index, neighbourhood=neighbourhood, **options)


def formula(tensors, index, neighbourhood):
    """The direct formula; of the pointwise relation, whose table it does not take, the plain composition."""
    if index.ndim == 2:
        return attend(tensors, index, neighbourhood, backend="plain")
    return attention_materialised(*tensors, index, neighbourhood.kernel_size, tensors[0].shape[2] ** -0.5)


@pytest.mark.parametrize("form", [tuple, as_full])
def test_windows_larger_than_the_image(form, device):
    """Outside of the image is masked, as at any border: 7 x 7 windows on 3 x 4 and 1 x 2 pixels."""
    index = relation_index(cyclic(2), "ge_vit").to(device)
    for spatial in ((3, 4), (1, 2)):
        tensors, window = operands(2, spatial, 7, device=device)
        assert_same(attend(form(tensors), index, window), formula(tensors, index, window), tensors)


def test_wrong_table_fails(device):
    """Negative control: the oracle notices a wrong relation."""
    tensors, window = operands(3, (5, 6), device=device)
    good, bad = (relation_index(cyclic(3), r).to(device) for r in ("ge_vit", "gsa"))
    assert_same(attend(tensors, good, window), formula(tensors, good, window), tensors)
    assert (attend(tensors, bad, window) - formula(tensors, good, window)).abs().max() > 1e-2


def test_many_tiles_give_what_one_gives():
    """A tile holds 2^20 numbers: those of 655 pixels with |H| = 8 and 25 neighbors, of 680 here."""
    tensors, window = operands(8, (34, 20), 5, batch=1, heads=1, channels=3, value_channels=2)
    index = relation_index(cyclic(8), "ge_vit")
    assert_same(attend(tensors, index, window), formula(tensors, index, window), tensors)


@pytest.mark.parametrize("relation", ["ge_vit", "relative"])
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("form", [tuple, as_full])
def test_extreme_scores(form, extreme, relation, device):
    index = relation_index(cyclic(2), relation)
    exact, window = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected, out = formula(exact, index, window), attend(form(single), index.to(device), window)
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
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
        layer = GroupAttention(cyclic(2), 3, 4, heads=1, kernel_size=3, relation="ge_vit")
        x = torch.randn(1, 3, 2, 4, 5)
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
    return attend(tensors, index, neighbourhood, dropout=0.4)


@pytest.mark.parametrize("form", [tuple, as_full])
def test_dropout_gradients_use_the_same_draw(form):
    tensors, window = operands(2, (3, 3), batch=1, heads=2, channels=2, value_channels=1)
    index = relation_index(cyclic(2), "ge_vit")
    assert torch.autograd.gradcheck(lambda *x: seeded_dropout(form(x), index, window), tensors, fast_mode=True)


def test_dropout_is_unbiased_and_seeded():
    tensors, window = operands(2, (3, 4), batch=1, heads=1)
    index, count = relation_index(cyclic(2), "ge_vit"), 400
    expected = attend(tensors, index, window).detach()
    assert torch.equal(*(seeded_dropout(tensors, index, window) for _ in range(2)))
    torch.manual_seed(0)
    with torch.no_grad():
        draws = torch.stack([attend(tensors, index, window, dropout=0.4) for _ in range(count)])
    deviation = (draws.mean(0) - expected).abs() / (draws.std(0) / math.sqrt(count))
    assert draws.std(0).min() > 0
    assert deviation.max() < 5


@pytest.mark.parametrize(("relation", "full"), [("ge_vit", False), ("ge_vit", True), ("relative", False)])
def test_no_tensor_holds_all_scores(relation, full):
    """|H|^3 K^2 N scores are never in memory at once, forward or backward, nor |H|^2 K^2 N factors; of the pointwise
    relation there are as many scores as factors."""
    tensors, _ = operands(8, (24, 24), 5, batch=2, heads=3, channels=3, value_channels=2, dtype=torch.float32)
    query, key, value, rho_space, rho_group = (x.detach() for x in tensors)
    if full:
        rho_space, rho_group = rho_space[:, :, None] + rho_group, rho_group[:0]
    flat = [x.flatten(0, 1) for x in (query, key, value)]
    index = relation_index(cyclic(8), relation)
    options = (rho_space, rho_group, index, None, torch.tensor(0), 5, (), False, 0.0, "eager")
    with Largest() as largest:
        out, level = tiled_attention.group_attention_op._init_fn(*flat, *options)
        level = level if relation == "relative" else torch.empty(0)
        tiled_attention.group_attention_backward_op._init_fn(out, level, *flat, *options)
    factors, scores = (8**n * 25 * 24 * 24 * len(flat[0]) for n in (2, 3))
    assert largest.count < (factors / 8 if relation == "relative" else scores / 8 if full else factors / 4)


def test_operator_registration():
    tensors, _ = operands(2, (3, 4), batch=1, heads=2)
    features, mask = (
        (x[0].detach().requires_grad_() for x in tensors[:3]),
        torch.tensor([[[True, False, True, True]] * 3]),
    )
    settings = relation_index(cyclic(2), "ge_vit"), mask.expand(2, -1, -1).contiguous(), torch.tensor(0), 3, (), False
    torch.library.opcheck(tiled_attention.group_attention_op, (*features, *tensors[3:], *settings, 0.0, "eager"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_operands(dtype, device):
    tensors, neighbourhood = operands(3, (5, 6), dtype=torch.float32, device=device)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    out = attend([x.detach().to(dtype) for x in tensors], index, neighbourhood)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), attend(tensors, index, neighbourhood), rtol=0, atol=0.15)
