"""What the core refuses, but for what tables of modules hold; when checks read values, and what they convert."""

import math

import numpy
import pytest
import torch
from ewald import Own

from tg_equiattn import checks
from tg_equiattn import functional as F
from tg_equiattn.ewald.cells import cells_of
from tg_equiattn.graphs import NeighborList, neighbor_list
from tg_equiattn.grids import PixelGrid, Window, transform_grid
from tg_equiattn.group.encodings import GroupEncoding
from tg_equiattn.groups import FiniteGroup, cyclic, dyadic, from_generators, trivial
from tg_equiattn.nn import (
    CliffordMLP,
    EwaldAttention,
    GroupAttention,
    GroupAttentionBlock,
    PerformerAttention,
    RelativePerformer,
    SE3HyenaOperator,
)
from tg_equiattn.testing import act, dilation_errors, equivariance_error

C4, ONE = cyclic(4), torch.ones(1, 2, 3, 4, 4)
EDGES = torch.tensor([[1], [0]])
X, BATCH = torch.ones(5, 3), torch.tensor([0, 0, 1, 1, 1])
BOX = {"cell": 5 * torch.eye(3)}
FLAT = {"scalars": torch.ones(5, 2), "vectors": torch.ones(5, 2, 3)}
IMAGE = torch.randn(1, 1, 3, 3)
PAIR = torch.tensor([[1, 1], [0, 0]])
TURN = [[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]]  # an irrational part of a turn never closes


NODES = torch.ones(2, 35, 12)


def near(**options):
    return PerformerAttention(12, 15, 3, cutoff=3, **{"method": "features", **options})


def ewald(**change):
    return lambda: EwaldAttention(**{"scalar_channels": 2, "vector_channels": 2, "width": 0.8} | change)


def called(**change):
    return lambda: ewald()()(**FLAT | {"pos": X} | change)


def mapped(method, **box):
    layer = EwaldAttention(2, 2, width=1.0, method=method)
    return torch.vmap(lambda pos: layer(**FLAT, pos=pos, **box))(torch.rand(2, 5, 3))


def error_of(function, group=C4, **options):
    return equivariance_error(function, group, IMAGE, **options)


def turned_image(function):
    """Another function of images that are turned."""
    return lambda x: x if torch.equal(x, IMAGE) else function(x)


BOUNDS = ((0.8, 1.0), (1.0, 1.2), (0.8, 1.0), (1.0, 1.2))
KERNELS = {"widths": torch.ones(2, 4), "gains": torch.ones(2, 4, 2), "bounds": BOUNDS}
CUBE = torch.eye(3)


def sums(cell=None, pbc=None, **options):
    pos = torch.arange(18.0).view(6, 3).sin()
    return lambda: EwaldAttention(2, 0, width=0.8, **options)(torch.ones(6, 2), None, pos=pos, cell=cell, pbc=pbc)


def kernels(**change):
    return lambda: F.Gaussian(**KERNELS | change)


CASES = [
    ("at least one pixel on every spatial axis", lambda: checks.features(torch.ones(2, 3, 0, 5), 3, 2, None, X)),
    ("input must be on cpu as the parameters are, got meta", lambda: checks.same_kind(X.to("meta"), X)),
    (r"lengths must be int64 of shape \(1,\), got list", lambda: checks.lengths([5], 1, 5, X.device)),
    ("lengths must be on cpu as the input", lambda: checks.lengths(torch.tensor([5], device="meta"), 1, 5, X.device)),
    (r"mask must be bool of shape \(5, 3\), got torch.float32",
     lambda: checks.tensor("mask", X, torch.bool, [(5, 3)], None)),
    (r"batch must be in \[0, 0\], got 0 to 1", lambda: checks.batch_index(BATCH, 1, X)),
    ("pos must be real numbers of shape .* got torch.bool", lambda: checks.positions(X > 0, (5, 3), X, "")),
    (r"matrices must have shape .* got \(2, 2\)", lambda: FiniteGroup(torch.zeros(2, 2))),
    ("at least the identity", lambda: FiniteGroup(torch.zeros(0, 2, 2))),
    ("matrices must be orthogonal", lambda: FiniteGroup(2 * torch.eye(2)[None])),
    ("matrices must be distinct", lambda: FiniteGroup(torch.stack([torch.eye(2), torch.eye(2)]))),
    ("matrices must be closed under products", lambda: FiniteGroup(C4.matrices[:3])),
    ("dim must be 2 or 3, got 4", lambda: trivial(4)),
    (r"matrices must have shape \(n, d, d\)", lambda: from_generators(torch.zeros(3))),
    ("matrices must generate at most 200 elements", lambda: from_generators([TURN])),
    ("window_shape must be 'square' where kernel_size is None", lambda: Window(2, None, "disk")),
    (r"at least one pixel .* got \(4, 0\)", lambda: Window(2, 5).check((4, 0))),
    ("spatial must be given", lambda: Window(2, None).offsets()),
    ("signed permutation", lambda: transform_grid(torch.zeros(3, 3), cyclic(8).matrices[1])),
    (r"edge_index must be int64 \(2, E\), got list", lambda: NeighborList([[0], [1]], 3)),
    ("edge_index must be int64", lambda: NeighborList(torch.zeros(2, 2), 3)),
    ("offsets must have shape", lambda: NeighborList(PAIR, 3, torch.zeros(3, 2))),
    ("offsets .* must be finite", lambda: NeighborList(PAIR, 3, torch.full((2, 2), torch.nan))),
    (r"edge_index must be in \[0, 2\], the nodes", lambda: NeighborList(3 * PAIR, 3)),
    ("edge_index must join nodes that exist, got one beyond", lambda: SE3HyenaOperator(1, 0, local_context=True)(
        torch.ones(1, 3, 1), None, torch.tensor([2]), edge_index=torch.tensor([[0, 2], [1, 1]]))),
    ("must not join a pair twice", lambda: PerformerAttention(2, 2, position="clipped")(
        torch.ones(3, 2), neighbors=NeighborList(PAIR, 3, torch.tensor([[1, 0], [2, 0]])))),
    ("neighbors must be of 4 nodes in 2 dimensions, got 3 in 1", lambda: PerformerAttention(2, 2, method="features")(
        torch.ones(4, 2), neighbors=NeighborList(EDGES, 3, torch.ones(1, 1)))),
    ("element must be a lattice element", lambda: act(IMAGE, cyclic(8), 1)),
    (r"\|H\|=8 on axis 2, got 4", lambda: act(torch.zeros(1, 1, 4, 3, 3), cyclic(8), 2)),
    ("x must have 4 axes", lambda: act(IMAGE[0], cyclic(8), 2)),
    ("elements must name at least one", lambda: error_of(torch.relu, elements=[])),
    ("finite outputs", lambda: error_of(lambda x: x / 0)),
    ("must keep shapes", lambda: error_of(turned_image(lambda x: x[:, :, :1]))),
    ("not zero everywhere", lambda: error_of(lambda x: 0 * x)),
    ("lattice elements besides the identity", lambda: error_of(lambda x: x * torch.arange(3), cyclic(3))),
    ("element must be an isometry, one of the first 4, got 4", lambda: dyadic(2, C4).moved(4)),
    ("group must be made by tg_equiattn.groups.dyadic", lambda: dilation_errors(torch.nn.Identity(), C4, ONE)),
    (r"module must give \(B, C, 8, \*spatial\), got shape \(1, 2, 3, 4, 4\)", lambda: dilation_errors(
        torch.nn.Identity(), dyadic(2, C4), ONE)),
    ("head_channels must be at least 3 for the axial encoding, got 2", lambda: GroupEncoding("axial", 2, 2, 4)),
    ("pixel must be 2 integers", lambda: GroupAttention(C4, 3, 3, heads=1).attention_map(
        torch.ones(1, 3, 4, 5, 5), "ab")),
    ("context_channels must be given with norm='batch'", lambda: GroupAttentionBlock(
        GroupAttention(C4, 3, 3, heads=1))(torch.ones(1, 3, 4, 5, 5), context=torch.ones(1, 3, 4, 5, 5))),
    ("method must not be 'nufft' while a model is traced or mapped over", lambda: mapped("nufft")),
    ("method must be 'auto' or 'ewald' with cell, got 'direct'", lambda: mapped("direct", **BOX)),
    (r"max_width must be at least an octave above width, 1.6, got 1", ewald(max_width=1.0)),
    ("num_gaussians and num_coulomb must not both be 0 without kernels", ewald(num_gaussians=0, num_coulomb=0)),
    ("kernels must be a module with an integer count, got", ewald(kernels=torch.nn.Identity())),
    (r"widths must be \(heads, C\) or \(1, C\), and .*, got \(3, 2\) and \(1, 2, 2\)", ewald(kernels=Own(heads=3))),
    ("kernels must return a .*Kernel without long_range, got Coulomb", ewald(kernels=Own(F.Coulomb))),
    ("out_channels must be reachable .* lmax=0", ewald(lmax=0, vector_channels=0, out_channels=(1, 1))),
    (r"out_channels must not both be 0, got \(0, 0\)", ewald(out_channels=(0, 0))),
    (r"scalars must be \(B, N, 2\), or \(T, 2\) with batch", called(scalars=X[:, :1])),
    ("scalars must be torch.float32 as the parameters are", called(scalars=FLAT["scalars"].double())),
    (r"pos must be real numbers of shape \(5, 3\)", called(pos=X[:2])),
    ("max_hkl must be given with cell while a model is traced or mapped over", lambda: mapped("ewald", **BOX)),
    ("cell must have a lattice vector wherever pbc is true", lambda: cells_of(
        torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1]]), torch.ones(3).bool(), 1, torch.ones(3))),
    ("edge_index must be on meta as the input is", lambda: NeighborList(EDGES, 3).check_graphs(
        "edge_index", torch.zeros(3, device="meta"))),
    ("edge_attr must be on cpu as edge_index is", lambda: SE3HyenaOperator(
        1, 0, local_context=True, edge_channels=1)(
        torch.ones(1, 3, 1), None, edge_index=EDGES, edge_attr=torch.ones(1, 1, device="meta"))),
    ("pos must not be what torch.vmap goes through", lambda: torch.vmap(
        lambda pos: neighbor_list(pos, 1.0)[1])(torch.ones(2, 3, 3))),
    ("pos must be on cpu as the input is, got meta", lambda: PerformerAttention(
        12, 15, 3, position="sinusoid")(torch.ones(2, 5, 12), pos=torch.ones(2, 5, 2, device="meta"))),
    ("heads must divide out_channels=15, got 4", lambda: PerformerAttention(12, 15, 4)),
    ("edge_dim must be None with position=None, got 2", lambda: near(position=None, edge_dim=2)),
    ("offset must be 'table' with position='sinusoid', got 'mlp'", lambda: near(position="sinusoid", offset="mlp")),
    ("values must be 'content' with position='clipped'", lambda: near(position="clipped", values="offset")),
    ("method must be 'features' with position='clipped', got 'pairs'", lambda: PerformerAttention(
        12, 15, 3, position="clipped", method="pairs")),
    ("pos has 3 coordinates but pos_dim is 2: pass pos_dim=3.* in RelativeGPSBlock attn_kwargs=", lambda: near()(
        NODES, pos=NODES[..., :3])),
    ("cutoff must be given with offset='distance'", lambda: PerformerAttention(12, 15, 3, offset="distance")),
    ("pos must be given.*values='offset' or 'far' needs it", lambda: near(position=None, values="offset")(NODES)),
    ("return_vectors must be False with values='content'", lambda: near()(
        NODES, pos=NODES[..., :2], return_vectors=True)),
    ("input must be", lambda: near()(NODES[..., :5])),
    ("pos must be given", lambda: PerformerAttention(12, 15, 3, position="sinusoid")(NODES)),
    ("mask must be None", lambda: near()(NODES[0], pos=NODES[0, :, :2], mask=torch.ones(35, dtype=torch.bool))),
    ("batch must be None", lambda: near()(NODES, pos=NODES[..., :2], batch=torch.zeros(2).long())),
    ("grid must have 2 axes and as many pixels", lambda: near()(NODES, grid=PixelGrid((5, 6)))),
    ("offsets .* must be below cutoff=3", lambda: near()(NODES, grid=PixelGrid((5, 7), 5))),
    (r"input must be \(B, 1, H, W\)", lambda: RelativePerformer(1, 10, num_layers=1)(torch.ones(2, 3, 5, 7))),
    (r"input must be \(..., 3, 8\)", lambda: CliffordMLP(3, 5)(torch.ones(2, 4, 8))),
    ("input must be a floating point tensor, got torch.int64", lambda: CliffordMLP(3, 5)(torch.ones(3, 8).long())),
    ("parameters must be float32 or float64 .*, got torch.float16", lambda: CliffordMLP(3, 5).half()(
        torch.ones(3, 8).half())),
    ("method must be 'auto', 'ewald' or 'nufft' for graphs that repeat", sums(method="direct", cell=CUBE)),
    ("cell must be given with pbc, got None", sums(pbc=torch.ones(3) > 0)),
    (r"cell must be .* \(3, 3\) or \(1, 3, 3\), got .* \(2, 3, 3\)", sums(cell=torch.ones(2, 3, 3))),
    (r"cell must be floating point of shape \(3, 3\) or .*, got ndarray", sums(cell=CUBE.numpy())),
    ("cell must be floating point of shape .*, got torch.int64", sums(cell=CUBE.long())),
    ("cell must be finite", sums(cell=CUBE * math.nan)),
    ("cell must have a volume", sums(cell=torch.ones(3, 3) + 1e-9 * CUBE)),
    ("pbc must let graphs repeat along three directions, two or none, got one for graph 0: the potential of a wire",
     sums(cell=CUBE, pbc=torch.tensor([True, False, False]))),
    ("pbc must be bool", sums(cell=CUBE, pbc=torch.ones(3))),
    (r"width must be larger, .* reciprocal vectors shorter than", sums(cell=1e4 * CUBE, method="ewald")),
    (r"max_hkl must be larger .*; .* needs at least \(\d+, \d+, \d+\)", sums(cell=9 * CUBE, max_hkl=(2, 2, 2))),
    ("bounds must be 4 pairs", kernels(bounds=BOUNDS[:3])),
    (r"charges must be floating point of shape \(nodes,\), got", lambda: F.charge_energies(X, X, width=1.0)),
    (r"pos must be real numbers of shape \(4, 3\), got", lambda: F.charge_energies(X[:4, 0], X, width=1.0)),
    ("width must be a positive number, got 0", lambda: F.charge_energies(X[:, 0], X, width=0)),
    ("method must be 'auto', 'ewald' or 'nufft' for graphs that repeat",
     lambda: F.charge_energies(X[:, 0], X, width=1.0, method="direct", **BOX)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:cell of graph 0 is far wider")
@pytest.mark.parametrize(("message", "call"), CASES, ids=range(len(CASES)))
def test_bad_arguments_are_refused(message, call):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("integer", [numpy.int64, numpy.int32])
def test_a_layer_of_numpys_numbers_is_that_of_pythons(integer):
    def layer(n, x):
        return GroupAttention(cyclic(n(4)), n(3), n(5), heads=n(2), kernel_size=n(3), dropout=x(0.125), locality=x(4))

    made, plain = layer(integer, numpy.float32), layer(int, float)
    assert not [name for name, value in vars(made).items() if isinstance(value, numpy.generic)]
    assert repr(made) == repr(plain)
    plain.load_state_dict(made.state_dict())


@pytest.mark.parametrize("value", [numpy.bool_(True), True, numpy.float64(2), numpy.int64(0), "2", numpy.array(2)])
def test_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="heads must be a positive integer, got"):
        GroupAttention(cyclic(4), 3, 5, heads=value)
