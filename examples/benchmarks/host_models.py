"""A training step of MACE and NequIP with and without Ewald attention: molecules, 1,000 atoms open and periodic.

One thread (or --device cuda), float32, forward, forces and the gradients of a loss of both, the models in turns. Atoms
are on a jittered grid 2 apart, or the first --frame of a file of water, which a third model with given charges gets,
too. With --boxes they are molecules alone in cubic cells that repeat, with --pairs two molecules apart, and charges are
predicted. Run where the host is installed:

    python host_models.py mace
    python host_models.py mace --boxes 15 20 30
    python host_models.py mace --pairs --repeats 30
    python host_models.py nequip --frame ~/water.xyz
"""

import argparse
import time
import warnings

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.build import molecule

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("host", choices=["mace", "nequip"])
parser.add_argument("--repeats", type=int, default=3)
parser.add_argument("--device", default="cpu")
parser.add_argument("--frame", help="file whose first frame, of H, C and O, takes the place of grids")
parser.add_argument("--boxes", type=float, nargs="*", default=[], help="sides of cells with a molecule each")
parser.add_argument("--pairs", action="store_true", help="two molecules, 6 A apart")
options = parser.parse_args()
torch.set_num_threads(1)
warnings.simplefilter("ignore")


def grid(shape, periodic, seed=0):
    random = np.random.default_rng(seed)
    points = 2.0 * np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 3)
    numbers = random.choice([1, 6, 8], len(points))
    return Atoms(numbers, points + 0.2 * random.normal(size=points.shape), cell=2.0 * np.array(shape), pbc=periodic)


MOLECULES = ("C6H6", "CH3COCH3", "CH3CH2OCH3", "isobutane")  # 10 to 14 atoms


def in_box(number, side):
    atoms = molecule(MOLECULES[number % len(MOLECULES)])
    atoms.rattle(0.05, seed=number)
    atoms.set_cell([side] * 3)
    atoms.pbc = True
    return atoms


def apart(number):
    first, second = (molecule(("H2O", "CH4", "CO", "CH3OH", "HCOOH")[n % 5]) for n in (number, 2 * number + 1))
    second.positions += [0, 0, 6]
    return first + second


predicted = options.boxes or options.pairs
with_charges = options.frame or predicted  # grids are not neutral
VARIANTS = ("alone", "attention", "charges") if with_charges else ("alone", "attention")
CHARGES = "predicted" if predicted else {"H": 0.4, "C": 0.0, "O": -0.8}
WARM_UPS = 1 if options.device == "cpu" else 3  # on a GPU, TorchScript compiles in the second call, too
SYSTEMS = {
    "32 molecules of 20 atoms": [grid((5, 2, 2), False, seed) for seed in range(32)],
    "1,000 atoms, open": [grid((10, 10, 10), False)],
    "1,000 atoms, periodic": [grid((10, 10, 10), True)],
}
if options.frame:
    read = ase.io.read(options.frame, 0)
    SYSTEMS = {f"{len(read)} atoms": [Atoms(read.numbers, read.positions, cell=read.cell, pbc=read.pbc)]}
if options.boxes:
    SYSTEMS = {f"32 molecules in boxes of {side:g}": [in_box(n, side) for n in range(32)] for side in options.boxes}
if options.pairs:
    SYSTEMS = {"10 pairs of molecules": [apart(n) for n in range(10)]}


def mace(far):
    from mace import data, modules, tools
    from mace.modules.models import o3
    from mace.tools.torch_geometric.dataloader import DataLoader
    from tg_equiattn.integrations.mace import add_long_range

    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=5.0, num_bessel=8, num_polynomial_cutoff=5, max_ell=2, interaction_cls=block, interaction_cls_first=block,
        num_interactions=2, num_elements=3, hidden_irreps=o3.Irreps("64x0e + 64x1o"), MLP_irreps=o3.Irreps("16x0e"),
        gate=torch.nn.functional.silu, atomic_energies=np.zeros(3), avg_num_neighbors=40.0, correlation=3,
        atomic_numbers=[1, 6, 8], atomic_inter_scale=1.0, atomic_inter_shift=0.0,
    )  # fmt: skip
    table = tools.AtomicNumberTable([1, 6, 8])

    def batch(systems):
        graphs = [data.AtomicData.from_config(data.config_from_atoms(atoms), table, cutoff=5.0) for atoms in systems]
        return next(iter(DataLoader(graphs, batch_size=len(graphs), shuffle=False))).to_dict()

    few = batch(next(iter(SYSTEMS.values()))[:4])
    if far == "attention":
        add_long_range(model, batch=few, gain=0.1)
    elif far == "charges":
        add_long_range(model, charges=CHARGES, batch=few | ({"total_charge": torch.ones(4)} if predicted else {}))
    return model, batch, lambda data: model(data, training=True), "energy"


def nequip(far):
    from nequip.data import AtomicDataDict, from_ase
    from nequip.data.transforms import ChemicalSpeciesToAtomTypeMapper, NeighborListTransform
    from nequip.model import NequIPGNNModel
    from nequip.utils.global_state import set_global_state
    from tg_equiattn.integrations.e3nn import IrrepsChargeInteraction
    from tg_equiattn.integrations.nequip import LongRangeNequIPGNNModel

    set_global_state()
    names = ["H", "C", "O"]
    more = {"alone": {}, "attention": {"after": [0], "long_range": {"gain": 0.1}}, "charges": {"charges": CHARGES}}[far]
    model = (LongRangeNequIPGNNModel if more else NequIPGNNModel)(
        seed=0, model_dtype="float32", type_names=names, r_max=5.0, num_layers=3, l_max=1, num_features=64,
        avg_num_neighbors=40.0, **more,
    ).train()  # fmt: skip
    for module in model.modules():
        if isinstance(module, IrrepsChargeInteraction):
            module.offsets.zero_()  # in place of a fit

    def batch(systems):
        frames = [NeighborListTransform(r_max=5.0)(ChemicalSpeciesToAtomTypeMapper(names)(from_ase(atoms)))
                  for atoms in systems]  # fmt: skip
        frames = AtomicDataDict.batched_from_list(frames)
        return {name: x.float() if x.dtype == torch.float64 else x for name, x in frames.items()}

    return model, batch, model, "total_energy"


def step(run, data, energy):
    """Seconds of one training step, of the processor if there is no other device."""
    given = {key: x.to(options.device, copy=True) if torch.is_tensor(x) else x for key, x in data.items()}
    clock = time.process_time if options.device == "cpu" else time.perf_counter
    start = clock()
    out = run(given)
    (out[energy].square().mean() + out["forces"].square().mean()).backward()
    if options.device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


for name, systems in SYSTEMS.items():
    steps = []
    for far in VARIANTS:
        torch.manual_seed(0)
        model, batch, run, energy = {"mace": mace, "nequip": nequip}[options.host](far)
        model.to(options.device)
        steps.append((run, batch(systems), energy))
    times = [[step(*one) for one in steps] for _ in range(WARM_UPS + options.repeats)][WARM_UPS:]
    alone, *others = map(min, zip(*times, strict=True))
    rest = ", ".join(f"{far} {x:.3f} s ({x / alone:.2f})" for far, x in zip(VARIANTS[1:], others, strict=True))
    print(f"{options.host}, {name}: alone {alone:.3f} s, {rest}", flush=True)
