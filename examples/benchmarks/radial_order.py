"""What sorting by distance costs: jumps of outputs where two points exchange radii, and energy lost to them.

    python examples/benchmarks/radial_order.py

Operators at their start, in float64. A jump is the largest change of any output, relative to the outputs' spread
(standard deviation), when the two middle points of a cloud swap places in the order and nothing moves: the median and
the worst of 20 clouds. Dynamics: 10 points of mass 1 in a harmonic trap, velocity Verlet with step 0.005, on the energy
of the trap and of the sum of an operator's one output scalar, whose range is printed over 600 steps of constant total
energy, the worst of 5 clouds: with the order of the start kept, and sorted in every step.
"""

import argparse

import torch
from tg_equiattn.integrations.e3nn import IrrepsSE3HyenaOperator, TensorProductHyenaOperator

OPERATORS = (IrrepsSE3HyenaOperator, TensorProductHyenaOperator)
IRREPS = "16x0e+8x1o"


def cloud(count, seed):
    torch.manual_seed(seed)
    pos = torch.randn(count, 3)
    return pos - pos.mean(0)


@torch.no_grad()
def jump(kind, count, seed):
    pos = cloud(count, seed)
    operator = kind(IRREPS, IRREPS)
    x, order = operator.irreps_in.randn(count, -1), pos.norm(dim=1).argsort()
    swapped, middle = order.clone(), [count // 2 - 1, count // 2]
    swapped[middle] = order[middle[::-1]]
    before, after = operator(x, pos, order=order), operator(x, pos, order=swapped)
    return float((after - before).abs().max() / before.std())


def energy_range(kind, order, seed, steps, step=0.005):
    pos = cloud(10, seed)
    pos = pos[pos.norm(dim=1).argsort()]  # both orders agree at the start
    operator = kind(IRREPS, "1x0e", IRREPS, order=order)
    x, velocity, energies = operator.irreps_in.randn(10, -1), torch.randn(10, 3), []

    def potential(pos):
        pos = pos.detach().requires_grad_()
        energy = operator(x, pos).sum() + pos.square().sum() / 2
        return energy.detach(), -torch.autograd.grad(energy, pos)[0]

    energy, force = potential(pos)
    for _ in range(steps):
        velocity = velocity + step / 2 * force
        pos = pos + step * velocity
        energy, force = potential(pos)
        velocity = velocity + step / 2 * force
        energies.append(float(energy + velocity.square().sum() / 2))
    return max(energies) - min(energies)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clouds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    for kind in OPERATORS:
        for count in (10, 30, 100):
            jumps = torch.tensor([jump(kind, count, seed) for seed in range(options.clouds)])
            print(f"{kind.__name__}, {count} points: jump {jumps.median():.2f}, at worst {jumps.max():.2f}")
        for order in ("input", "radial"):
            ranges = [energy_range(kind, order, seed, options.steps) for seed in range(max(1, options.clouds // 4))]
            print(f"{kind.__name__}, order={order!r}: energy ranges over {max(ranges):.1e} in {options.steps} steps")


if __name__ == "__main__":
    main()
