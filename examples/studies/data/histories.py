"""Histories of motion and strain, and the responses of media with a memory.

``forces``: particles in a viscous fluid by the Maxey-Riley equation, without gradients of the flow, with the drag of
Schiller and Naumann and the lift of Rubinow and Keller. Lengths are in radii a, times in a^2 / nu, forces in
6 pi a mu U. With the slip w, the spin W, and Re = 10 |w|, the fluid pushes with

    F = (1 + 0.15 Re^0.687) w + 1 / sqrt(pi) int_0^t w'(s) / sqrt(t - s) ds + W x w / 6

``stresses``: a generalised Maxwell solid at finite strain (Simo 1987): the second Piola-Kirchhoff stress, from the
history of the right Cauchy-Green tensor C, of a Mooney-Rivlin solid with four Maxwell elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
from e3nn import o3
from torch import Tensor

STEP = 1 / 16  # of the data, in units of a^2 / nu
DISPLACED = 2 / 9  # mass of the displaced fluid over 6 pi a mu, in units of time
RATES = torch.logspace(-6, 4, 81, dtype=torch.float64)  # of exponentials in the kernel
BRANCHES = ((0.2, 0.5), (0.8, 0.4), (3.2, 0.3), (12.8, 0.2))  # times and shares of Maxwell elements
MODES = 12


@dataclasses.dataclass(frozen=True)
class Histories:
    """Scalars (n, N, S), tensors (n, N, V, D) and targets: scalars (n, N, S') and tensors (n, N, 1, D).

    ``world`` are the particles of :func:`forces`, whose motion can be rolled out.
    """

    scalars: Tensor
    tensors: Tensor
    target: tuple[Tensor, Tensor]
    world: World | None = None

    def __getitem__(self, chosen: slice | Tensor) -> Histories:
        return Histories(self.scalars[chosen], self.tensors[chosen], tuple(x[chosen] for x in self.target))


def kernel_weights() -> Tensor:
    """Weights c with 1 / sqrt(t) = sum_k c_k exp(-RATES_k t), from a sixteenth of a step on: the trapezoidal rule for
    the integral of exp(-s t) / sqrt(pi s) over log s, whose slowest rate stands for all slower ones."""
    spacing = math.log(RATES[1] / RATES[0])
    weights = spacing * (RATES / math.pi).sqrt()
    weights[0] += 2 * (RATES[0] / math.pi).sqrt() - spacing / 2 * (RATES[0] / math.pi).sqrt()
    return weights


class History:
    """int_0^t w'(s) / sqrt(t - s) ds of vectors (n, 3) that are linear in each step ``h``. The last step is integrated
    exactly, the earlier ones by exponentials (van Hinsberg et al., 2011, with a window of one step)."""

    def __init__(self, count: int, h: float) -> None:
        self.decay = torch.exp(-RATES * h)[:, None]
        self.gain = (1 - self.decay) / (RATES[:, None] * h)
        self.weights, self.h = kernel_weights(), h
        self.sums = torch.zeros(count, len(RATES), 3, dtype=torch.float64)

    def tail(self) -> Tensor:
        """The part of earlier steps at the end of the next one."""
        return torch.einsum("k,nkc->nc", self.weights, self.decay * self.sums)

    def add(self, change: Tensor) -> None:
        """Append a step with this change of w."""
        self.sums = self.decay * self.sums + self.gain * change[:, None]

    @property
    def last(self) -> float:
        """Factor of the change of w in the last step."""
        return 2 / math.sqrt(self.h)


def drag(w: Tensor) -> Tensor:
    return 1 + 0.15 * (10 * w.norm(dim=-1, keepdim=True)) ** 0.687


def smooth(generator: torch.Generator, count: int, rates: tuple[float, float]) -> Callable[[float], Tensor]:
    """Random functions of time, (count, 3) with unit variance: sums of waves, with angular frequencies between two."""
    low, high = (math.log(rate) for rate in rates)
    shape = (count, MODES, 1)
    frequency = (low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)).exp()
    phase = 2 * math.pi * torch.rand(shape, generator=generator, dtype=torch.float64)
    size = torch.randn(count, MODES, 3, generator=generator, dtype=torch.float64) * (2 / MODES) ** 0.5
    return lambda t: (size * torch.sin(frequency * t + phase)).sum(1)


class World:
    """Particles of some densities in a moving fluid."""

    def __init__(self, seed: int, count: int) -> None:
        g = torch.Generator().manual_seed(seed)
        slow, fast = smooth(g, count, (0.1, 1.0)), smooth(g, count, (1.0, 6.0))
        speed = torch.exp(torch.empty(count, 1).uniform_(math.log(0.3), math.log(1.5), generator=g)).double()
        turn = smooth(g, count, (0.2, 2.0))
        self.fluid: Callable[[float], Tensor] = lambda t: speed * (slow(t) + 0.5 * fast(t))
        self.spin: Callable[[float], Tensor] = lambda t: 4 * turn(t)
        self.weight = 0.5 * torch.randn(count, 3, generator=g, dtype=torch.float64)  # less buoyancy
        self.density = 5 + 10 * torch.rand(count, 1, generator=g, dtype=torch.float64)  # over that of the fluid
        self.inertia = DISPLACED * (self.density + 0.5)  # with the added mass
        self.count = count

    def drive(self, t: float, h: float) -> Tensor:
        """What changes the slip beside the force F, in the middle of a step that ends at t."""
        slope = (self.fluid(t) - self.fluid(t - h)) / h
        return DISPLACED * (self.density - 1) * slope - self.weight

    def motion(self, steps: int, substeps: int = 8) -> tuple[Tensor, Tensor]:
        """Slips and forces at the ends of steps, (n, N, 3), from w = 0 on. One step of the equation is implicit in the
        drag and in the last step of the history."""
        h, w = STEP / substeps, torch.zeros(self.count, 3, dtype=torch.float64)
        history, slope, rows = History(self.count, h), torch.zeros_like(w), [(w, torch.zeros_like(w))]
        for n in range(1, (steps - 1) * substeps + 1):
            t, guess, tail = n * h, w + h * slope, history.tail() / math.pi**0.5
            lift = torch.linalg.cross(self.spin(t), guess) / 6
            own = drag(guess)
            implicit = history.last * h / math.pi**0.5
            slope = (self.drive(t, h) - own * w - tail - lift) / (self.inertia + own * h + implicit)
            change = h * slope
            force = own * (w + change) + tail + implicit * slope + lift
            w = w + change
            history.add(change)
            if n % substeps == 0:
                rows.append((w, force))
        slips, forces = zip(*rows, strict=True)
        return torch.stack(slips, 1), torch.stack(forces, 1)

    def seen(self, slip: Tensor) -> tuple[Tensor, Tensor]:
        """What models see of slips (n, N, 3): scalars 1 and |w|; vectors w, a third of its change a unit of time, and
        an eighth of the spin."""
        spin = torch.stack([self.spin(n * STEP) for n in range(slip.shape[1])], 1)
        slope = torch.cat([torch.zeros_like(slip[:, :1]), slip.diff(dim=1)], 1) / STEP
        length = slip.norm(dim=2, keepdim=True)
        return torch.cat([torch.ones_like(length), length], 2), torch.stack([slip, slope / 3, spin / 8], 2)

    def roll_out(self, force: Callable[[Tensor, Tensor], Tensor], steps: int) -> Tensor:
        """Slips (n, N, 3) where ``force(scalars, tensors)`` gives the force at the end of a history: second-order
        Adams-Bashforth steps."""
        slips, before = [torch.zeros(self.count, 3, dtype=torch.float64)], None
        for n in range(1, steps):
            known = torch.stack(slips, 1)
            slope = (self.drive(n * STEP, STEP) - force(*self.seen(known))) / self.inertia
            step = slope if before is None else 1.5 * slope - 0.5 * before
            slips.append(slips[-1] + STEP * step)
            before = slope
        return torch.stack(slips, 1)


def forces(seed: int, count: int, steps: int) -> Histories:
    """Motions of particles and the forces on them."""
    world = World(seed, count)
    slip, force = world.motion(steps)
    scalars, vectors = (x.float() for x in world.seen(slip))
    return Histories(scalars, vectors, (scalars[..., :0], force.float()[:, :, None]), world)


def quadrature_force(world: World) -> Callable[[Tensor, Tensor], Tensor]:
    """The force of the equation itself, from histories at whole steps: what a perfect model gives in a roll-out."""

    def force(scalars: Tensor, tensors: Tensor) -> Tensor:
        slip, spin = tensors[:, :, 0], 8 * tensors[:, -1, 2]
        changes = slip.diff(dim=1)
        lag = STEP * torch.arange(slip.shape[1], dtype=torch.float64)
        kernel = (2 / STEP * lag.sqrt().diff()).flip(0)
        history = torch.einsum("j,njc->nc", kernel, changes) / math.pi**0.5
        w = slip[:, -1]
        return drag(w) * w + history + torch.linalg.cross(spin, w) / 6

    return force


def basis() -> Tensor:
    """Five orthonormal symmetric matrices without a trace, (3, 3, 5), in the order of e3nn's 2e."""
    return o3.wigner_3j(1, 1, 2, dtype=torch.float64) * 5**0.5


def parts(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric matrices (..., 3, 3) as 0e (..., 1) and 2e (..., 5), with the same sum of squares."""
    trace = matrix.diagonal(dim1=-2, dim2=-1).sum(-1, keepdim=True)
    return trace / 3**0.5, torch.einsum("...ij,ijk->...k", matrix, basis())


def matrices(scalar: Tensor, tensor: Tensor) -> Tensor:
    """The inverse of :func:`parts`."""
    eye = torch.eye(3, dtype=scalar.dtype)
    return scalar[..., None] * eye / 3**0.5 + torch.einsum("...k,ijk->...ij", tensor, basis())


def elastic(c: Tensor) -> tuple[Tensor, Tensor]:
    """Volumetric and isochoric second Piola-Kirchhoff stresses of Cauchy-Green tensors C."""
    inverse, eye = torch.linalg.inv(c), torch.eye(3, dtype=c.dtype)
    j = torch.linalg.det(c).sqrt()[..., None, None]
    scaled = c * j ** (-2 / 3)
    first = scaled.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    raw = 2 * ((0.5 + 0.3 * first) * eye - 0.3 * scaled)
    deviator = raw - (raw * c).sum((-2, -1), keepdim=True) / 3 * inverse
    return 2 * j * (j - 1) * inverse, j ** (-2 / 3) * deviator


def stresses(seed: int, count: int, steps: int, substeps: int = 4) -> Histories:
    """Histories of logarithmic strain and the stresses at their ends. The elements are exact for an isochoric stress
    that is linear in each substep."""
    g = torch.Generator().manual_seed(seed)
    slow, fast, more = (smooth(g, count, rates) for rates in ((0.1, 1.0), (0.5, 4.0), (0.2, 2.0)))
    size = torch.exp(torch.empty(count, 1).uniform_(math.log(0.05), math.log(0.25), generator=g)).double()
    h, start = STEP / substeps, None
    strains = []
    for n in range((steps - 1) * substeps + 1):
        six = torch.cat([slow(n * h), fast(n * h)], 1)  # five deviators, and the rest unused
        strain = matrices(0.1 * size * more(n * h)[:, :1], size * six[:, :5])
        start = strain if start is None else start
        strains.append(strain - start)
    strain = torch.stack(strains, 1)
    volumetric, isochoric = elastic(torch.linalg.matrix_exp(2 * strain))
    stress, changes = volumetric + isochoric, isochoric.diff(dim=1)
    for time, share in BRANCHES:
        q, rows = torch.zeros_like(changes[:, 0]), [torch.zeros_like(changes[:, 0])]
        decay = math.exp(-h / time)
        for change in changes.unbind(1):
            q = decay * q + share * (1 - decay) * time / h * change
            rows.append(q)
        stress = stress + torch.stack(rows, 1)
    strain, stress = strain[:, ::substeps], stress[:, ::substeps]
    slope = torch.cat([torch.zeros_like(strain[:, :1]), strain.diff(dim=1)], 1) / STEP
    (s, t), (ds, dt), out = parts(5 * strain), parts(2 * slope), parts(stress)
    scalars = torch.cat([torch.ones_like(s), 5 * s, 5 * ds], 2)
    return Histories(scalars.float(), torch.stack([t, dt], 2).float(), (out[0].float(), out[1][:, :, None].float()))
