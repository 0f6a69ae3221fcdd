"""Real chains: how a protein moves when one residue is pushed, how it moves to bind, and where it is mobile.

``--data`` is an .npz file of C-alpha traces (data/proteins.py says what is in it); ``--synthetic 40`` makes random
chains in its place. Proteins are split by clusters of sequences, so that none of training is a homologue of one of a
test. Tasks:

response     one residue of an elastic network is pushed (springs between all pairs, stiffness 1 / distance^2): where do
             the others move? Displacements are scaled to a mean square of 1 beyond 8 angstroms from the push, where
             errors are measured, so 1 is what zero displacements leave. Trained on whole chains of 40 to 220 residues;
             tested on other such chains, on chains of 220 to 400, on complexes of several chains, and on chains with
             gaps, with and without residue numbers and chains given to the layers
binding      the displacement of each C-alpha atom from the unbound to the bound form
b-factors    crystallographic B-factors, standardised for each chain
size         no training: seconds and memory of one training step with synthetic chains of --tokens residues

All models but EGNN have the same messages along the edges to the nearest residues, and behind each layer of messages

messages                 nothing
messages, all pairs      the same messages along all pairs of residues
distance attention       a transformer's self-attention with a learned function of the distance in its logits
vector attention         VectorSelfAttention
Hyena                    SE3HyenaOperator with a filter made of the data
Hyena, implicit          SE3HyenaOperator, filter="implicit", short_conv=3
tensor-product Hyena     TensorProductHyenaOperator, filter="implicit", short_conv=3
Ewald                    EwaldAttention
Ewald + Hyena            both
EGNN                     Satorras et al.'s layers along the same edges, with the push as velocity
EGNN, all pairs          the same along all pairs

at equal numbers of parameters. Seconds are those of the processor in the steps of training.

    python examples/studies/proteins.py --data proteins.npz --models Ewald messages    # minutes
"""

from __future__ import annotations

import bisect
import concurrent.futures
import dataclasses
import functools
import itertools
import multiprocessing
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import matplotlib
import numpy as np
import torch
from baselines.chain_layers import EGNN, ChainModel, DistanceAttention, Global, Messages
from data.protein_graphs import FAR, NEAR, UNIT, Graph, Pushes, graph_of, joined
from data.proteins import Protein, load, rigid_motions, split, stiffness, synthetic
from harness import study
from harness.loading import Batches
from harness.results import Row
from harness.settings import Settings, SettingsError
from harness.tables import at_best_rates, grouped, markdown, mean_and_spread
from harness.training import Outcome, Regressor, Timed, fit, parameters
from tg_equiattn.integrations.e3nn import TensorProductHyenaOperator
from torch import Tensor, nn

from tg_equiattn.nn import EwaldAttention, SE3HyenaOperator, VectorSelfAttention

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SPLIT, TEST = 3, 7  # seeds of the split, and of what is pushed in tests
AVG_NUM_NODES = 30.0  # of Ewald attention
REACH = 16.0  # angstroms up to which messages tell lengths of edges apart
SPACE = (8, 12, 16, 20, 25, 30, 40, 60)  # angstroms from the push, bins of the figure
ALONG = (1, 4, 8, 16, 32, 64, 128, 256)  # residues from the push, likewise
MOTIONS = (0.0, 1.0, 2.0, 4.0, np.inf)  # angstroms, sizes of the motion by which binding is reported
MODES = 20  # of the elastic network, that are fitted to the answer
Task = Literal["response", "binding", "b-factors", "size"]
Model = Literal[
    "messages", "messages, all pairs", "distance attention", "vector attention", "Hyena", "Hyena, implicit",
    "tensor-product Hyena", "Ewald", "Ewald + Hyena", "EGNN", "EGNN, all pairs",
]  # fmt: skip
ORDERED = "Hyena", "Hyena, implicit", "tensor-product Hyena", "Ewald + Hyena"  # which read residue numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProteinsStudy(Settings):
    """Settings of this example."""

    STUDY: ClassVar[str] = "proteins"
    SWEEP: ClassVar[tuple[str, ...]] = ("tasks", "models", "seeds")
    HOW: ClassVar[tuple[str, ...]] = (*Settings.HOW, "data")
    SHOWN: ClassVar[tuple[str, ...]] = ("learning_rate", "epochs", "tokens")

    tasks: tuple[Task, ...] = ("response",)
    """what to predict"""
    models: tuple[Model, ...] = Model.__args__
    """which to train"""
    data: Path | None = None
    """.npz file of C-alpha traces"""
    synthetic: int = 0
    """so many random chains in place of --data"""
    residues: tuple[int, int] = (40, 220)
    """fewest and most of the chains of training"""
    larger: int = 400
    """most residues of larger chains and of complexes in tests"""
    pushes: int = 2
    """of each protein, to validate and test with; training pushes every chain once an epoch"""
    neighbors: int = 10
    """nearest residues from which messages come"""
    scalars: int = 24
    vectors: int = 8
    hidden: int = 32
    """width of the networks of messages beside Ewald attention; others' are chosen for as many parameters"""
    depth: int = 3
    """layers of messages"""
    width: float = 3.0
    """angstroms, the narrowest kernel of Ewald attention"""
    max_width: float = 24.0
    """angstroms, the widest"""
    kernels: tuple[int, int] = (2, 1)
    """Gaussians and Coulomb kernels of Ewald attention"""
    lmax: int = 2
    """of Ewald attention: the response to a force has degrees 0 and 2"""
    tokens: tuple[int, ...] = (2000, 8000, 30000)
    """residues of the chains of the task size"""
    epochs: int = 8
    batch: int = 4
    learning_rate: float = 0.005
    warmup: float = 0.2
    clip: float = 1.0

    def check(self) -> None:
        super().check()
        for name in ("pushes", "neighbors", "scalars", "vectors", "hidden", "depth", "width", "max_width"):
            self.positive(name)
        fewest, most = self.residues
        if not self.neighbors < fewest < most < self.larger:
            raise ValueError(
                f"--residues must be more than --neighbors {self.neighbors} and rise, and stay below --larger "
                f"{self.larger}, got {fewest} {most}"
            )

    def runs(self) -> Iterator[ProteinsStudy]:
        """Steps of one size are timed once."""
        return (run for run in super().runs() if run.tasks != ("size",) or run.seeds == self.seeds[:1])


PRESETS = {
    "quick": ProteinsStudy(
        synthetic=24, residues=(12, 20), larger=30, pushes=2, neighbors=4, scalars=8, vectors=4, hidden=8, depth=1,
        kernels=(1, 1), epochs=1, tokens=(30, 60),
    ),
    "study": ProteinsStudy(
        tasks=("response", "b-factors", "binding"), seeds=(0, 1, 2), results=study.committed("proteins")
    ),
}  # fmt: skip


class LibraryLayer(nn.Module):
    """A layer of the library as models of residues call it; ``ordered`` ones get residue numbers and chains."""

    def __init__(self, layer: nn.Module, ordered: bool = False) -> None:
        super().__init__()
        self.layer, self.ordered = layer, ordered

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        order = {"index": graph.index, "chain": graph.chain} if self.ordered else {}
        return self.layer(h, v, pos=graph.pos, batch=graph.batch, batch_size=graph.count, **order)


class TensorProductLayer(nn.Module):
    """The tensor-product operator on scalars and vectors apart."""

    def __init__(self, scalars: int, vectors: int) -> None:
        super().__init__()
        irreps = f"{scalars}x0e + {vectors}x1o"
        self.layer = TensorProductHyenaOperator(
            irreps, irreps, "8x0e + 4x1o + 2x1e + 2x2e", filter="implicit", short_conv=3
        )

    def forward(self, h: Tensor, v: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        x = torch.cat([h, v.flatten(1)], 1)
        order = {"index": graph.index, "chain": graph.chain}
        found = self.layer(x, graph.pos, graph.batch, batch_size=graph.count, **order)
        return found[:, : h.shape[1]], found[:, h.shape[1] :].view_as(v)


def global_layers(settings: ProteinsStudy) -> list[Global]:
    """What makes the global layers behind each layer of messages."""
    (name,), scalars, vectors = settings.models, settings.scalars, settings.vectors
    gaussians, coulomb = settings.kernels
    reach = settings.max_width / UNIT

    def hyena(**options: Any) -> Global:
        return lambda: LibraryLayer(
            SE3HyenaOperator(scalars, vectors, hidden_scalars=8, hidden_vectors=vectors, **options), ordered=True
        )

    ewald: Global = lambda: LibraryLayer(  # noqa: E731
        EwaldAttention(
            scalars, vectors, width=settings.width / UNIT, max_width=reach, num_gaussians=gaussians,
            num_coulomb=coulomb, lmax=settings.lmax, avg_num_nodes=AVG_NUM_NODES,
        )
    )  # fmt: skip
    return {
        "messages": [],
        "messages, all pairs": [
            lambda: Messages(scalars, vectors, settings.hidden // 2, reach, AVG_NUM_NODES, all_pairs=True)
        ],
        "distance attention": [lambda: DistanceAttention(scalars, vectors, 4, reach)],
        "vector attention": [
            lambda: LibraryLayer(VectorSelfAttention(scalars, vectors, hidden_scalars=8, hidden_vectors=vectors))
        ],
        "Hyena": [hyena()],
        "Hyena, implicit": [hyena(filter="implicit", short_conv=3)],
        "tensor-product Hyena": [lambda: TensorProductLayer(scalars, vectors)],
        "Ewald": [ewald],
        "Ewald + Hyena": [ewald, hyena(filter="implicit", short_conv=3)],
    }[name]


def build(settings: ProteinsStudy) -> nn.Module:
    """The model, as wide as it takes to have as many parameters as that with Ewald attention."""
    (task,), (name,) = settings.tasks, settings.models
    kind = {"pushed": task in ("response", "size"), "invariant": task == "b-factors"}

    def of(width: int) -> nn.Module:
        if name.startswith("EGNN"):
            return EGNN(width, settings.depth + 1, name == "EGNN, all pairs", **kind)
        return ChainModel(
            settings.scalars, settings.vectors, width, global_layers(settings), settings.depth, REACH / UNIT,
            settings.neighbors, **kind,
        )  # fmt: skip

    if name == "Ewald":
        return of(settings.hidden)
    wanted = parameters(build(dataclasses.replace(settings, models=("Ewald",))))
    with torch.random.fork_rng():  # so that weights do not depend on what was tried
        widths = range(2, 4 * settings.hidden)
        above = bisect.bisect_left(widths, wanted, key=lambda width: parameters(of(width)))
        near = widths[max(0, above - 1) : above + 1]
        width = min(near, key=lambda width: abs(parameters(of(width)) - wanted))
    return of(width)


def proteins(data: Path | None, synthetic_count: int, residues: tuple[int, int], larger: int) -> list[list[Protein]]:
    """Proteins to train, validate and test on."""
    if data is not None:
        return split(load(data), SPLIT)
    if not synthetic_count:
        raise SettingsError("--data must be an .npz file of C-alpha traces, or --synthetic a number of random chains")
    kinds = [(*residues, 1), (*residues, 1), (residues[1] + 1, larger, 1), (residues[0] // 2, residues[1] // 2, 2)]
    made = [synthetic(synthetic_count // 4, low, high, seed, chains) for seed, (low, high, chains) in enumerate(kinds)]
    gap = residues[0] // 3
    holes = [protein.part(torch.arange(len(protein)) // 3 != gap // 3) for protein in made[1]]
    return split([*made[0], *holes, *made[2], *made[3]], SPLIT, (0.2, 0.5))


def single_chains(found: list[Protein]) -> list[Protein]:
    """Each chain of some proteins by itself."""
    return [protein.part(protein.chain == n) for protein in found for n in protein.chain.unique()]


def sets(settings: ProteinsStudy) -> dict[str, tuple[Protein, ...]]:
    """Chains and proteins of training, validation and of each test."""
    return _sets(settings.data, settings.synthetic, settings.residues, settings.larger)


@functools.cache
def _sets(
    data: Path | None, synthetic_count: int, residues: tuple[int, int], larger: int
) -> dict[str, tuple[Protein, ...]]:
    training, validation, test = proteins(data, synthetic_count, residues, larger)
    fewest, most = residues

    def chains(found: list[Protein], low: int, high: int, whole: bool = True) -> tuple[Protein, ...]:
        every = single_chains(found)
        return tuple(chain for chain in every if low <= len(chain) <= high and chain.whole == whole)

    def several(found: list[Protein]) -> tuple[Protein, ...]:
        return tuple(p for p in found if p.chain.max() > 0 and 2 * fewest <= len(p) <= larger)

    return {
        "training": chains(training, fewest, most), "validation": chains(validation, fewest, most),
        "chains": chains(test, fewest, most), "larger": chains(test, most + 1, larger),
        "complexes": several(test), "gaps": chains(test, fewest, larger, whole=False),
    }  # fmt: skip


class Drawn(Batches):
    """Batches of graphs of similar size, each of the same proteins in every epoch.

    ``draws`` of each protein are made; what is drawn follows from seed, epoch and number.

    Args:
        draw: makes a graph of a protein's number and a generator.
        sizes: numbers of residues of the proteins.
        size: proteins of a batch.
    """

    def __init__(
        self, draw: Callable[[int, torch.Generator], Graph], sizes: list[int], size: int, device: str,
        seed: int | None = None, draws: int = 1,
    ) -> None:  # fmt: skip
        order = np.tile(np.argsort(sizes, kind="stable"), (draws, 1)).T.flatten()
        groups = np.array_split(np.arange(len(order)), -(-len(order) // size))

        def get(numbers: list[int]) -> Graph:
            start = TEST if seed is None else 1_000_003 * (seed + 1) + 10_007 * self.epoch
            drawn = [n for number in numbers for n in groups[number]]
            graphs = [draw(int(order[n]), torch.Generator().manual_seed(start + 101 * int(n))) for n in drawn]
            return joined(graphs).to(device)

        super().__init__(get, len(groups), 1, seed)


def without_order(graph: Graph) -> Graph:
    """Residues one after the other, as if nothing were missing and all were one chain."""
    sizes = torch.bincount(graph.batch, minlength=graph.count)
    index = torch.arange(len(graph.batch)) - (sizes.cumsum(0) - sizes)[graph.batch]
    return dataclasses.replace(graph, index=index, chain=torch.zeros_like(index))


def answered(protein: Protein, settings: ProteinsStudy) -> Graph | None:
    """The graph of a protein with what is to be predicted of it in the tasks that are measured, if it is known."""
    graph = graph_of(protein, settings.neighbors)
    if settings.tasks == ("binding",):
        target = protein.bound - protein.pos
        known = target.isfinite().all(1)
        if known.sum() < 2:
            return None
        target = torch.where(known[:, None], target, 0.0)
    else:
        spread = protein.b_factor.std()
        if not spread > 0.5:
            return None
        target, known = ((protein.b_factor - protein.b_factor.mean()) / spread)[:, None], graph.known[:, 0]
    return dataclasses.replace(graph, target=target.float(), known=torch.stack([known, known], 1))


@functools.cache
def pushes(proteins: tuple[Protein, ...], neighbors: int) -> Pushes:
    """Kept for all models."""
    return Pushes(list(proteins), neighbors)


def batches(settings: ProteinsStudy, found: tuple[Protein, ...], seed: int | None = None) -> Drawn | None:
    """Batches of proteins with what is to be predicted of them; none where there are no proteins."""
    if settings.tasks == ("response",):
        drawn = pushes(found, settings.neighbors)
        draw, graphs, draws = drawn.draw, drawn.graphs, 1 if seed is not None else settings.pushes
    else:
        graphs = [graph for graph in (answered(protein, settings) for protein in found) if graph is not None]
        draw, draws = lambda number, _: graphs[number], 1
    sizes = [len(graph.residue) for graph in graphs]
    return Drawn(draw, sizes, settings.batch, settings.data_device, seed, draws) if graphs else None


def predict(model: nn.Module, graph: Graph) -> tuple[Tensor, Tensor]:
    """Predictions and targets where errors count."""
    known = graph.known[:, 0]
    return model(graph)[known], graph.target[known]


class Learner(Timed, Regressor):
    """Squared errors, and the processor's seconds."""


def response_errors(model: nn.Module, found: Drawn, ordered: bool = True) -> dict[str, Any]:
    """Squared errors relative to those of zero: beyond 8 and 25 angstroms, and in bins of distance and separation."""
    bins = {"space": (SPACE, []), "along": (ALONG, [])}
    sums = {name: np.zeros((2, len(edges) - 1)) for name, (edges, _) in bins.items()}
    beyond = np.zeros((2, 2))
    for graph in found.whole():
        graph = graph if ordered else without_order(graph)
        with torch.no_grad():
            out = model(graph)
        squares = torch.stack([(out - graph.target).square().sum(1), graph.target.square().sum(1)]).double()
        place = graph.mark[:, 0].nonzero()[:, 0][graph.batch]
        distance = UNIT * (graph.pos - graph.pos[place]).norm(dim=1)
        apart = (graph.index - graph.index[place]).abs().where(graph.chain == graph.chain[place], 0)
        for n in range(2):
            beyond[:, n] += squares[:, graph.known[:, n]].sum(1).numpy()
        for name, x in (("space", distance), ("along", apart)):
            for n, (low, high) in enumerate(zip(bins[name][0], bins[name][0][1:], strict=False)):
                sums[name][:, n] += squares[:, graph.known[:, 0] & (x >= low) & (x < high)].sum(1).numpy()
    with np.errstate(invalid="ignore", divide="ignore"):
        curves = {name: (some[0] / some[1]).round(4).tolist() for name, some in sums.items()}
        return {"beyond": (beyond[0] / beyond[1]).round(5).tolist(), **curves}


def turned(graph: Graph, matrix: Tensor, shift: Tensor) -> Graph:
    """The graph moved and turned or mirrored."""
    changes = {name: getattr(graph, name) @ matrix.T for name in ("frames", "edge_unit", "push", "target")}
    return dataclasses.replace(graph, pos=graph.pos @ matrix.T + shift, **changes)


def changes(model: nn.Module, graph: Graph) -> dict[str, float]:
    """Largest changes of displacements, relative to the largest, where a protein is moved, turned and mirrored; in
    float64."""
    names = [f.name for f in dataclasses.fields(graph) if f.name != "count"]
    tensors = {name: getattr(graph, name) for name in names}
    graph = dataclasses.replace(graph, **{name: x.double() for name, x in tensors.items() if x.is_floating_point()})
    model = model.double()
    rotation, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).double())
    rotation = rotation * rotation.det().sign()
    still, none = torch.eye(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    ways = {"moved": (still, none + 7.0), "turned": (rotation, none), "mirrored": (-rotation, none)}
    with torch.no_grad():
        out = model(graph)
        found = {
            name: float((model(turned(graph, matrix, shift)) - out @ matrix.T).abs().max() / out.abs().max())
            for name, (matrix, shift) in ways.items()
        }
    model.float()
    return found


def elastic_modes(protein: Protein, displacement: Tensor) -> Tensor:
    """The displacement (N, 3) as the softest modes of the elastic network fit it best, known where it is finite."""
    _, modes = torch.linalg.eigh(stiffness(protein.pos))
    basis = torch.cat([rigid_motions(protein.pos), modes[:, 6 : 6 + MODES]], 1).unflatten(0, (-1, 3))
    known = displacement.isfinite().all(1)
    fit_to = torch.linalg.lstsq(basis[known].flatten(0, 1), displacement[known].flatten()[:, None], driver="gelsd")
    return (basis.flatten(0, 1) @ fit_to.solution).view(-1, 3)


def binding_errors(model: nn.Module, found: tuple[Protein, ...], settings: ProteinsStudy) -> dict[str, list[float]]:
    """Squares of the displacement, of the model's errors and of the elastic modes' errors by size of the motion."""
    sums = np.zeros((len(MOTIONS) - 1, 3))
    counts = np.zeros(len(MOTIONS) - 1)
    for protein in found:
        graph = answered(protein, settings)
        if graph is None:
            continue
        known = graph.known[:, 0]
        with torch.no_grad():
            out = model(joined([graph]))
        fitted = elastic_modes(protein, protein.bound - protein.pos).float()
        target = graph.target[known]
        squares = [target.square(), (out[known] - target).square(), (fitted[known] - target).square()]
        motion = float(target.square().sum(1).mean().sqrt())
        place = int(np.searchsorted(MOTIONS, motion, side="right")) - 1
        sums[place] += [float(x.sum()) for x in squares]
        counts[place] += 1
    return {"squares": sums.round(4).tolist(), "proteins": counts.tolist()}


def correlations(model: nn.Module, found: Drawn) -> list[float]:
    """Correlation of each chain's predicted and measured B-factors."""
    values = []
    for graph in found.whole():
        with torch.no_grad():
            out = model(graph)
        for n in range(graph.count):
            here = graph.batch == n
            values.append(float(torch.corrcoef(torch.stack([out[here, 0], graph.target[here, 0]]))[0, 1]))
    return values


def train(settings: ProteinsStudy) -> Outcome:
    """One model, trained and tested; or timed."""
    if settings.tasks == ("size",):
        return cost(settings)
    parts = sets(settings)
    first = ("training", "validation", "chains")
    used = parts if settings.tasks == ("response",) else first
    seeds = {"training": settings.seed}
    every = {name: batches(settings, parts[name], seeds.get(name)) for name in used}
    for name in first:
        if every[name] is None:
            raise SettingsError(f"--data must have proteins of {settings.residues} residues for {name}, got none")
    learner = Learner(build(settings), predict, settings)
    outcome = fit(learner, every["training"], every["validation"], every["chains"], checks=10)
    model, more = learner.model, outcome.more | {"sizes": {name: len(found) for name, found in parts.items()}}
    if settings.tasks == ("response",):
        tests = {name: x for name, x in every.items() if x is not None and name not in ("training", "validation")}
        more["errors"] = {name: response_errors(model, found) for name, found in tests.items()}
        for name in {"complexes", "gaps"} & set(tests) if settings.models[0] in ORDERED else ():
            more["errors"][f"{name}, without index"] = response_errors(model, tests[name], ordered=False)
        graph = next(tests.get("complexes", tests["chains"]).whole())
        draw_protein(model, next(tests["chains"].whole()), settings)
        more["changes"] = changes(model, graph)
    elif settings.tasks == ("binding",):
        more["binding"] = binding_errors(model, parts["chains"], settings)
    else:
        more["correlations"] = [round(x, 4) for x in correlations(model, every["chains"])]
        outcome = dataclasses.replace(outcome, metric="correlation", value=float(np.mean(more["correlations"])))
    return dataclasses.replace(outcome, seconds=learner.seconds, more=more)


def step_cost(settings: ProteinsStudy, tokens: int) -> tuple[float, float]:
    """Seconds of the processor of a training step, after one that does not count, and MiB that it takes at most."""
    torch.set_num_threads(1)
    graph = graph_of(synthetic(1, tokens, tokens, 0)[0], settings.neighbors)
    push = torch.zeros_like(graph.push)
    push[tokens // 2, 0] = 1.0
    graph = dataclasses.replace(graph, push=push)
    model = build(settings)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        start = time.process_time()
        model(graph).square().mean().backward()
        seconds = time.process_time() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def cost(settings: ProteinsStudy) -> Outcome:
    """One training step at each size, each in a process of its own; a size at which memory ends has no numbers."""
    found: dict[str, list[float]] = {}
    start = time.perf_counter()
    for tokens in settings.tokens:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            try:
                found[str(tokens)] = [round(x, 2) for x in pool.submit(step_cost, settings, tokens).result()]
            except (concurrent.futures.process.BrokenProcessPool, RuntimeError):
                break
    if not found:
        raise SettingsError(f"--tokens must have a size whose training step fits into memory, got {settings.tokens}")
    seconds = time.perf_counter() - start
    value = found[str(settings.tokens[0])][0]
    return Outcome("seconds of a step", value, parameters(build(settings)), seconds, {"cost": found})


def draw_protein(model: nn.Module, graph: Graph, settings: ProteinsStudy) -> None:
    """The largest protein of some, with its true and its predicted displacements side by side, beside the results."""
    sizes = torch.bincount(graph.batch, minlength=graph.count)
    here = graph.batch == int(sizes.argmax())
    with torch.no_grad():
        out = model(graph)[here]
    pos, target, known = UNIT * graph.pos[here], graph.target[here], graph.known[here, 0]
    pos = pos - pos.mean(0)
    pos, target, out = (x @ torch.linalg.svd(pos, full_matrices=False).Vh.T for x in (pos, target, out))
    place = int(graph.mark[here, 0].argmax())
    figure = plt.figure(figsize=(10, 5.2))
    top = float(target[known].norm(dim=1).max())
    for number, (title, shown) in enumerate((("true", target), ("predicted", out))):
        axis = figure.add_subplot(1, 2, 1 + number, projection="3d")
        axis.plot(*pos.T.numpy(), color="0.75", lw=2, zorder=1)
        colours = plt.colormaps["viridis"]((shown[known].norm(dim=1) / top).clamp(max=1).numpy())
        for colour, start, arrow in zip(colours, pos[known].numpy(), shown[known].numpy(), strict=True):
            axis.quiver(*start, *(4 * arrow), color=colour, lw=1.6, arrow_length_ratio=0.3)
        axis.scatter(*pos[place].numpy(), color="C3", s=70, depthshade=False, label="pushed residue")
        axis.set(title=f"{title} displacements", xlabel="x", ylabel="y", zlabel="z")
        axis.set_box_aspect(np.ptp(pos.numpy(), axis=0), zoom=1.3)
        axis.set_axis_off()
    axis.legend(loc="lower right")
    mapped = plt.cm.ScalarMappable(plt.Normalize(0, top), "viridis")
    figure.colorbar(mapped, ax=figure.axes, label="size of the displacement", shrink=0.6, pad=0.02)
    path = settings.results_file.with_name(f"protein-{settings.models[0].replace(' ', '')}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    plt.close(figure)


def of_task(rows: list[Row], task: str) -> dict[str, list[Row]]:
    """The rows of a task by model, of each those with the learning rate that is best on validation data."""
    groups = at_best_rates([row for row in rows if row.setting("tasks") == task], "models", "epochs")
    order = sorted(groups, key=lambda key: (Model.__args__.index(key[0]), key[1]))
    usual = {name: max(epochs for other, epochs in groups if other == name) for name, _ in order}
    return {name: groups[name, epochs] for name, epochs in usual.items()}


def response_table(rows: list[Row]) -> str:
    """Errors of each test by model, beyond 8 and beyond 25 angstroms."""
    groups = of_task(rows, "response")
    names = list(dict.fromkeys(name for group in groups.values() for name in group[0].more["errors"]))
    lines = []
    for model, group in groups.items():
        cells = []
        for name in names:
            found = np.array([row.more["errors"][name]["beyond"] for row in group if name in row.more["errors"]])
            cells += [
                mean_and_spread(column, 3) if found.size else "-" for column in (found.T if found.size else [0, 0])
            ]
        first = group[0]
        seconds = np.mean([row.seconds for row in group])
        lines.append([model, *cells, f"{first.parameters:,}", f"{seconds:.0f}", str(first.setting("learning_rate"))])
    header = [f"{name}, beyond {far:g} Å" for name in names for far in (NEAR, FAR)]
    return markdown(["model", *header, "parameters", "seconds", "learning rate"], lines)


def equal_times(rows: list[Row]) -> str:
    """The least validation error of each model within the seconds of the fastest to end, and of the Ewald model."""
    groups = of_task(rows, "response")
    ends = {name: np.mean([row.seconds for row in group]) for name, group in groups.items()}
    limits = {"the shortest run": min(ends.values())} | ({"Ewald's run": ends["Ewald"]} if "Ewald" in ends else {})

    def within(row: Row, limit: float) -> float:
        curve = [(row.seconds * epoch / row.setting("epochs"), value) for epoch, value in row.more["curve"]]
        return min((value for seconds, value in curve if seconds <= 1.001 * limit), default=np.nan)

    lines = []
    for name, group in groups.items():
        cells = [mean_and_spread((within(row, limit) for row in group), 3) for limit in limits.values()]
        lines.append([name, *cells, mean_and_spread((min(v for _, v in row.more["curve"]) for row in group), 3),
                      f"{ends[name]:.0f}"])  # fmt: skip
    header = [f"within {name}, {limit:.0f} s" for name, limit in limits.items()]
    return markdown(["model", *header, "at its end", "seconds"], lines)


def response_figure(rows: list[Row], path: Path) -> None:
    """Errors along training, by distance in space and by separation along the chain."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for number, (name, group) in enumerate(of_task(rows, "response").items()):
        colour = f"C{number % 10}"
        style = "-" if number < 10 else "--"
        for place, row in enumerate(group):
            epochs, values = zip(*row.more["curve"], strict=True)
            seconds = [row.seconds * epoch / row.setting("epochs") for epoch in epochs]
            axes[0].plot(seconds, values, style, color=colour, alpha=0.8, label=None if place else name)
        for axis, kind, edges in ((axes[1], "space", SPACE), (axes[2], "along", ALONG)):
            middle = [(low * high) ** 0.5 for low, high in itertools.pairwise(edges)]
            means = np.mean([row.more["errors"]["chains"][kind] for row in group], 0)
            axis.plot(middle, means, f"o{style}", color=colour, ms=3)
    axes[0].set(xlabel="seconds of training", ylabel="validation error, of that of zero", xscale="log")
    axes[1].set(xlabel="distance from the push, Å", ylabel="test error, of that of zero")
    axes[2].set(xlabel="residues from the push along the chain", xscale="log")
    for axis in axes:
        axis.set(yscale="log")
        axis.axhline(1, color="gray", lw=0.8)
    figure.legend(*axes[0].get_legend_handles_labels(), fontsize="small", loc="outside right upper")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def changes_table(rows: list[Row]) -> str:
    """Largest relative changes of outputs in float64 where a complex is moved, turned and mirrored."""
    lines = []
    for name, group in of_task(rows, "response").items():
        most = {way: max(row.more["changes"][way] for row in group) for way in group[0].more["changes"]}
        lines.append([name, *(f"{x:.0e}" for x in most.values())])
    return markdown(["model", *most], lines)


def hyena_beside_ewald(rows: list[Row]) -> str:
    """What Hyena adds to Ewald attention: errors with it over errors without it."""
    groups = of_task(rows, "response")
    if not {"Ewald", "Ewald + Hyena"} <= set(groups):
        return "Not trained yet."
    lines = []
    for test in groups["Ewald"][0].more["errors"]:
        for place, far in enumerate((NEAR, FAR)):
            one, both = (
                [row.more["errors"][test]["beyond"][place] for row in groups[name]]
                for name in ("Ewald", "Ewald + Hyena")
            )
            ratio = f"{np.mean(both) / np.mean(one):.2f}"
            lines.append([f"{test}, beyond {far:g} Å", mean_and_spread(one, 3), mean_and_spread(both, 3), ratio])
    return markdown(["test", "Ewald", "Ewald + Hyena", "ratio"], lines)


def binding_table(rows: list[Row]) -> str:
    """Share of the squared displacement left, by size of the motion of a protein."""
    lines, counts = [], []
    for name, group in of_task(rows, "binding").items():
        squares = np.array([row.more["binding"]["squares"] for row in group])  # rows, sizes, (zero, model, modes)
        counts = group[0].more["binding"]["proteins"]
        for title, place in ((name, 1), (f"{MODES} elastic modes, fitted to the answer", 2)):
            shares = [squares[:, :, place].sum(1) / squares[:, :, 0].sum(1)]
            shares += [squares[:, n, place] / squares[:, n, 0] for n in range(len(counts)) if counts[n]]
            line = [title, *(mean_and_spread(share, 3) for share in shares)]
            lines += [line] if place == 1 else []
        fitted = [title, *(f"{share[0]:.3f}" for share in shares)]
    sizes = [
        f"{low:g} to {high:g} Å ({n:.0f})" for low, high, n in zip(MOTIONS, MOTIONS[1:], counts, strict=False) if n
    ]
    zero = ["zero", *["1.000"] * (1 + len(sizes))]
    return markdown(["model", "all", *sizes], [zero, *lines, fitted])


def b_factor_table(rows: list[Row]) -> str:
    """Mean correlation of predicted and measured B-factors of a chain."""
    lines = [
        [name, mean_and_spread((row.value for row in group), 3), f"{group[0].parameters:,}",
         f"{np.mean([row.seconds for row in group]):.0f}"]
        for name, group in of_task(rows, "b-factors").items()
    ]  # fmt: skip
    return markdown(["model", "correlation", "parameters", "seconds"], lines)


def size_table(rows: list[Row]) -> str:
    """Seconds and memory of a training step by number of residues."""
    groups = grouped([row for row in rows if row.setting("tasks") == "size"], "models")
    sizes = list(dict.fromkeys(n for (row, *_) in groups.values() for n in row.more["cost"]))
    lines = []
    for (name,), (row, *_) in groups.items():
        cells = [row.more["cost"].get(n) for n in sizes]
        lines.append([name, *("-" if cell is None else f"{cell[0]:.1f} s, {cell[1]:,.0f} MiB" for cell in cells)])
    return markdown(["model", *(f"{int(n):,} residues" for n in sizes)], lines)


def report(rows: list[Row], folder: Path) -> dict[str, str]:
    """Tables of each task that has rows, and a figure of the response."""
    tables: dict[str, dict[str, Callable[[list[Row]], str]]] = {
        "response": {"response": response_table, "times": equal_times, "changes": changes_table,
                     "hyena_beside_ewald": hyena_beside_ewald},
        "binding": {"binding": binding_table}, "b-factors": {"b_factors": b_factor_table}, "size": {"size": size_table},
    }  # fmt: skip
    there = {row.setting("tasks") for row in rows}
    if "response" in there:
        response_figure(rows, folder / "response.png")
    return {name: make(rows) for task, some in tables.items() if task in there for name, make in some.items()}


if __name__ == "__main__":
    study.main(ProteinsStudy(), PRESETS, __doc__, train, report)
