"""The fused kernel of local group attention against the torch path and the materialised formula."""

import copy
import itertools
import math

import pytest
import torch
from attention_operands import EXTREMES, Largest, assert_same, gradients, operands
from kernel_builds import SHARED_MEMORY, resources
from oracles import attention_materialised
from small_groups import GROUPS

from tg_equiattn.encodings import relation_index
from tg_equiattn.functional import group_attention, lifting_attention
from tg_equiattn.functional.group import tiled_attention
from tg_equiattn.functional.group.attention import checked_group_attention
from tg_equiattn.grids import Neighbourhood
from tg_equiattn.groups import cyclic, from_generators
from tg_equiattn.nn import GEViT, GroupAttention, LiftingAttention
from tg_equiattn.testing import TOLERANCE, equivariance_error

HALF_TURN = from_generators([[[1.0, 0, 0], [0, -1, 0], [0, 0, -1]]])
kernels = pytest.importorskip("tg_equiattn.functional.group.triton_attention", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("kernels_run")


def small(elements, spatial=(3, 4), kernel_size=3, device="cpu", dtype=torch.float64, **options):
    sizes = {"batch": 2, "heads": 1, "channels": 3, "value_channels": 2} | options
    return operands(elements, spatial, kernel_size, device=device, dtype=dtype, **sizes)


def both(tensors, index, neighbourhood, **options):
    """The same with both backends and the same seed."""
    out = []
    for backend in ("triton", "torch"):
        torch.manual_seed(7)
        out.append(group_attention(*tensors, index, neighbourhood=neighbourhood, backend=backend, **options))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["ge_vit", "lifted", "gsa"])
def test_matches_materialised_formula(relation, device):
    tensors, neighbourhood = small(3, device=device)
    index = relation_index(cyclic(3), relation).to(device)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood, backend="triton")
    assert_same(out, attention_materialised(*tensors, index, 3, 3**-0.5), tensors)


def test_windows_larger_than_the_image(device):
    tensors, neighbourhood = small(2, (2, 3), 5, batch=1, device=device)
    index = relation_index(cyclic(2), "ge_vit").to(device)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood, backend="triton")
    assert_same(out, attention_materialised(*tensors, index, 5, 3**-0.5), tensors)


def test_wrong_table_fails(device):
    """Negative control: the oracle notices a wrong relation."""
    tensors, neighbourhood = small(3, device=device)
    good, bad = (relation_index(cyclic(3), r).to(device) for r in ("ge_vit", "gsa"))
    out = group_attention(*tensors, bad, neighbourhood=neighbourhood, backend="triton")
    assert (out - attention_materialised(*tensors, good, 3, 3**-0.5)).abs().max() > 1e-2


IN_THE_GATE = [("C4", "lifted", False, 0.4), ("D2", "lifted", True, 0.0), ("D2", "relative", False, 0.4)]
KINDS = itertools.product(["C4", "D2"], ["lifted", "relative"], [False, True], [0.0, 0.4])


@pytest.mark.parametrize(
    ("name", "relation", "full", "dropout"),
    [pytest.param(*kind, marks=() if kind in IN_THE_GATE else pytest.mark.slow) for kind in KINDS],
)
def test_equals_the_torch_path(name, relation, full, dropout, device):
    """All kinds of encodings and relations, with the same weights dropped."""
    group = GROUPS[name]
    (*tensors, rho_space, rho_group), neighbourhood = small(4, (3, 3), batch=1, device=device)
    tensors += [(rho_space[:, :, None] * rho_group).detach().requires_grad_()] if full else [rho_space, rho_group]
    index = relation_index(group, relation).to(device)
    operands = [*tensors, None] if full else tensors
    assert_same(*both(operands, index, neighbourhood, dropout=dropout), tensors)


@pytest.mark.slow
def test_many_blocks_of_scores(device):
    """A block holds 2,048 scores, four rows of 16 x 32 here: five blocks of outputs and of query elements."""
    tensors, neighbourhood = small(17, (3, 3), batch=1, channels=2, device=device, std=0.5)
    index = relation_index(cyclic(17), "ge_vit").to(device)
    assert_same(*both(tensors, index, neighbourhood, dropout=0.3), tensors)


@pytest.mark.parametrize(
    ("full", "relation"),
    [*(pytest.param(full, "ge_vit", marks=pytest.mark.slow) for full in (False, True)), (False, "relative")],
)
def test_runs_change_nothing(full, relation, device):
    """Gradients of encodings, gathered from a few sites at a time."""
    (*tensors, rho_space, rho_group), _ = small(3, (3, 3), device=device)
    flat = [x.detach().flatten(0, 1) for x in tensors]
    rho = [rho_space[:, :, None] * rho_group, rho_group[:0]] if full else [rho_space, rho_group]
    options = (*(x.detach() for x in rho), relation_index(cyclic(3), relation).to(device))
    options += (None, torch.tensor(0, device=device), 3, (), False, 0.3)
    grads = torch.randn_like(flat[2]), torch.randn_like(flat[2][:, 0]) if relation == "relative" else torch.empty(0)
    expected = kernels.backward(*grads, *flat, *options)
    for some, all_at_once in zip(kernels.backward(*grads, *flat, *options, scratch=700), expected, strict=True):
        torch.testing.assert_close(some, all_at_once, rtol=0, atol=1e-12)


@pytest.mark.parametrize("relation", [pytest.param("lifted", marks=pytest.mark.slow), "relative"])
@pytest.mark.parametrize("padding_mode", ["mask", "circular"])
def test_masks_and_circular_windows(padding_mode, relation, device):
    """Where no key is in the window of a query that is left out itself, too; outputs and levels."""
    tensors, _ = small(3, (4, 3), channels=2, device=device)
    neighbourhood = Neighbourhood(2, 3, padding_mode=padding_mode)
    index = relation_index(cyclic(3), relation).to(device)
    mask = torch.ones(2, 4, 3, dtype=torch.bool, device=device)
    mask[0, 1:], mask[1, 2, 1] = False, False
    options = {"space_bias": None, "group_bias": None, "dropout": 0.0}
    results = [
        checked_group_attention(*tensors, index, neighbourhood=neighbourhood, mask=mask,
                                backend=backend, **options)
        for backend in ("triton", "torch")
    ]  # fmt: skip
    results = [(out, level.masked_fill(level < -1e20, 0.0)) for out, level in results]
    assert_same(*(torch.cat([out.flatten(), level.flatten()]) for out, level in results), tensors)


@pytest.mark.slow
def test_volumes_and_disks(device):
    tensors, neighbourhood = small(2, (3, 4, 3), batch=1, channels=2, device=device)
    index = relation_index(cyclic(2), "ge_vit").to(device)
    assert_same(*both(tensors, index, neighbourhood), tensors)
    (query, key, value, _, rho_group), _ = small(2, (5, 6), batch=1, channels=2, device=device)
    disk = Neighbourhood(2, 5, "disk")
    assert disk.count((5, 6)) < 25
    rho_space = torch.randn(2, disk.count((5, 6)), 2, dtype=torch.float64, device=device).requires_grad_()
    tensors = [query, key, value, rho_space, rho_group]
    assert_same(*both(tensors, index, disk), tensors)


def test_lifting(device):
    (query, key, value, rho_space, _), neighbourhood = small(1, outputs=3, device=device)
    tensors = [*(x[:, :, :, 0].detach().requires_grad_() for x in (query, key, value)), rho_space]
    out = [lifting_attention(*tensors, neighbourhood=neighbourhood, backend=b) for b in ("triton", "torch")]
    assert_same(*out, tensors)


@pytest.mark.slow
def test_no_tensor_holds_all_factors():
    """|H|^2 K^2 N numbers are never in memory at once, forward or backward."""
    tensors, _ = small(4, (7, 6), dtype=torch.float32)
    flat = [x.detach().flatten(0, 1) for x in tensors[:3]]
    options = (*(x.detach() for x in tensors[3:]), relation_index(cyclic(4), "ge_vit"), torch.tensor(0), 3, (), 0.0)
    with Largest() as largest:
        out = kernels.forward(*flat, *options)
        kernels.backward(*out, *flat, *options, scratch=1000)
    assert largest.count < 4**2 * 9 * 7 * 6 * len(flat[0]) / 4


@pytest.mark.slow
@pytest.mark.parametrize("extreme", EXTREMES)
def test_extreme_scores(extreme, device):
    index = relation_index(cyclic(2), "ge_vit")
    exact, neighbourhood = extreme(torch.float64)
    single = [x.detach().float().to(device).requires_grad_() for x in exact]
    expected = attention_materialised(*exact, index, 3, 3**-0.5)
    out = group_attention(*single, index.to(device), neighbourhood=neighbourhood, backend="triton")
    torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=2e-3)
    for a, b in zip(gradients(out, single), gradients(expected, exact), strict=True):
        torch.testing.assert_close(a.cpu().double(), b, rtol=0, atol=2e-3 * max(1.0, float(b.abs().max())))


@pytest.mark.slow
def test_gradcheck(device):
    tensors, neighbourhood = small(2, (3, 3), batch=1, channels=2, value_channels=1, device=device)
    index = relation_index(cyclic(2), "ge_vit").to(device)

    def attend(*x):
        torch.manual_seed(3)
        return group_attention(*x, index, neighbourhood=neighbourhood, dropout=0.2, backend="triton")

    assert torch.autograd.gradcheck(attend, tensors, fast_mode=True, nondet_tol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, where NaN are compared and subtracted
def test_batch_mates_do_not_matter(device):
    tensors, neighbourhood = small(2, batch=3, device=device)
    *features, rho_space, rho_group = (x.detach() for x in tensors)
    index = relation_index(cyclic(2), "ge_vit").to(device)

    def attend(x):
        return group_attention(*x, rho_space, rho_group, index, neighbourhood=neighbourhood, backend="triton")

    together = attend(features)
    for x in features:
        x[1] = math.nan
    poisoned = attend(features)
    assert torch.equal(poisoned[[0, 2]], together[[0, 2]])
    assert bool(poisoned[1].isnan().all())
    torch.testing.assert_close(attend([x[2:] for x in features])[0], together[2], rtol=0, atol=1e-12)


def layer(group, kind=GroupAttention, **options):
    return kind(group, 3, 4, heads=1, head_channels=4, kernel_size=3, options={"backend": "triton"}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", ["C4", "D4", "volume"])
def test_equivariance(name, dtype, randomise, device):
    group = HALF_TURN if name == "volume" else GROUPS[name]
    module = randomise(layer(group)).to(device, dtype)
    x = torch.randn(1, 3, len(group), *(3,) * group.dim, dtype=dtype, device=device)
    assert equivariance_error(module, group, x) < TOLERANCE[dtype]
    lift = randomise(layer(group, LiftingAttention)).to(device, dtype)
    assert equivariance_error(lift, group, x[:, :, 0]) < TOLERANCE[dtype]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:relation='gsa'")
def test_gsa_is_not_equivariant(randomise, device):
    group = GROUPS["D4"]
    module = randomise(layer(group, relation="gsa")).to(device).double()
    assert equivariance_error(module, group, torch.randn(1, 3, 8, 3, 3, device=device).double(), elements=[1, 5]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, randomise, device):
    module = randomise(layer(cyclic(4)), std=0.3).to(device)
    x = torch.randn(1, 3, 4, 3, 4, device=device)
    expected = module(x)
    with torch.autocast(torch.device(device).type, dtype):
        out = module(x)
        out.float().sum().backward()
    assert bool(out.isfinite().all())
    torch.testing.assert_close(out.float(), expected, rtol=0, atol=0.1 * float(expected.detach().abs().max()))
    assert all(p.grad.isfinite().all() for p in module.parameters() if p.grad is not None)


@pytest.mark.slow
def test_compile(randomise, device):
    module = randomise(layer(cyclic(2))).to(device)
    twin = copy.deepcopy(module)
    x = torch.randn(1, 3, 2, 3, 4, device=device)
    out = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    expected = twin(x)
    torch.testing.assert_close(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.slow
def test_backends_share_checkpoints(randomise, device):
    options = {"channels": (4,), "heads": 1, "kernel_size": 3}
    fused = randomise(GEViT(cyclic(2), 1, 3, attention={"backend": "triton"}, **options), std=0.4).to(device).eval()
    plain = GEViT(cyclic(2), 1, 3, attention={"backend": "torch"}, **options).to(device).eval()
    plain.load_state_dict(fused.state_dict())
    x = torch.randn(1, 1, 4, 4, device=device)
    torch.testing.assert_close(fused(x), plain(x), rtol=1e-4, atol=1e-5)
    assert "backend='triton'" in repr(fused)
    assert "backend" not in repr(GEViT(cyclic(2), 1, 3, **options))


def test_auto_is_torch(monkeypatch, device):
    """Until a kernel has been measured faster on a GPU."""
    tensors, neighbourhood = small(2, device=device)
    index = relation_index(cyclic(2), "ge_vit").to(device)
    monkeypatch.setattr(kernels, "forward", None)
    group_attention(*tensors, index, neighbourhood=neighbourhood, backend="auto")
    with pytest.raises(TypeError, match="NoneType"):
        group_attention(*tensors, index, neighbourhood=neighbourhood, backend="triton")


@pytest.mark.slow
def test_transposed_encodings_compile(device):
    """Gradients are laid out as the operator's fake says, whatever the operands' strides."""
    (query, key, value, rho_space, rho_group), neighbourhood = small(3, (3, 3), batch=1, dtype=torch.float32)
    index = relation_index(cyclic(3), "ge_vit").to(device)
    leaves = [x.detach().to(device) for x in (query, key, value, rho_space.permute(2, 1, 0), rho_group.mT)]
    leaves = [x.contiguous().requires_grad_() for x in leaves]

    def attend(q, k, v, space, group, backend):
        return group_attention(
            q, k, v, space.permute(2, 1, 0), group.mT, index, neighbourhood=neighbourhood, backend=backend
        )

    for backend in ("torch", "triton"):
        compiled = torch.compile(lambda *x, b=backend: attend(*x, b), fullgraph=True)
        assert_same(compiled(*leaves), attend(*leaves, "torch"), leaves, atol=1e-5)


def test_operator_registration():
    (query, key, value, rho_space, rho_group), _ = small(2, (3, 3), batch=1)
    index = relation_index(cyclic(2), "ge_vit")
    operands = [x[0].detach().requires_grad_() for x in (query, key, value)]
    torch.library.opcheck(
        tiled_attention.group_attention_op,
        (*operands, rho_space, rho_group, index, None, torch.tensor(0), 3, (), True, 0.0, "triton"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_deterministic_algorithms_are_respected(device):
    tensors, neighbourhood = small(2, batch=1, device=device)
    index = relation_index(cyclic(2), "ge_vit").to(device)
    out = group_attention(*tensors, index, neighbourhood=neighbourhood, backend="triton")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="not deterministic"):
            torch.autograd.grad(out.sum(), tensors, retain_graph=True)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="not deterministic"):
            torch.autograd.grad(out.sum(), tensors)
    finally:
        torch.use_deterministic_algorithms(False)


BUILD = """
import torch
from tg_equiattn.groups import cyclic, dihedral, octahedral
from tg_equiattn.nn import GroupAttention
def build(group, kernel_size, relation=None, **options):
    layer = GroupAttention(
        group, 20, 20, heads=1, head_channels=10, kernel_size=kernel_size, relation=relation,
        options={"backend": "triton", **options},
    )
    layer(torch.randn(1, 20, len(group), *(7,) * group.dim)).sum().backward()
build(cyclic(8), kernel_size=5, neighbourhood="square")
build(cyclic(8), kernel_size=5, relation="relative")
build(dihedral(4), kernel_size=7, encoding="full")
build(octahedral(), kernel_size=3)
small = GroupAttention(cyclic(8), 20, 20, heads=1, head_channels=10, kernel_size=1, options={"backend": "triton"})
small(torch.randn(1, 20, 8, 1, 1)).sum().backward()
"""


@pytest.mark.slow
def test_builds_for_a_gpu():
    """Scores stay in registers: nothing is spilled to memory, and little shared memory is asked for."""
    built = resources(BUILD)
    assert [kernel["name"] for kernel in built] == ["weigh", "weigh", "differentiate"] * 5
    for kernel in built:
        assert kernel["spilled"] <= 16
        assert kernel["shared"] <= SHARED_MEMORY / 8
