"""Models of a response to a history: scalars (B, N, S) and tensors (B, N, V, D) of one irrep in, and the same out.

D is 3 for vectors (1o) and 5 for traceless symmetric tensors (2e). Outputs at a time depend on no later one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from e3nn import o3
from tg_equiattn.integrations.e3nn import IrrepsSE3Hyena, TensorProductHyenaOperator
from torch import Tensor, nn
from torch.nn.functional import conv1d, pad, scaled_dot_product_attention

Parts = tuple[Tensor, Tensor]
Channels = tuple[int, int, int]  # scalars, tensors, and numbers of a tensor
PRODUCTS = 8


def lengths(tensors: Tensor) -> Tensor:
    return (tensors.square().sum(-1) + 1e-6).sqrt()


class Mix(nn.Module):
    """Linear maps of tensors, and products of two of their mixtures, with gates by a network of invariants."""

    def __init__(self, inside: Channels, scalars: int, tensors: int) -> None:
        super().__init__()
        count, channels, dim = inside
        self.left, self.right = (nn.Linear(channels, PRODUCTS, bias=False) for _ in range(2))
        self.invariants = nn.Sequential(
            nn.Linear(count + channels + PRODUCTS, 32), nn.SiLU(), nn.Linear(32, scalars + tensors)
        )
        self.tensors = nn.Linear(channels + PRODUCTS, tensors, bias=False)
        self.scalars = scalars
        self.register_buffer("product", o3.wigner_3j(*[dim // 2] * 3) * dim, persistent=False)

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        p, q = (linear(tensors.mT).mT for linear in (self.left, self.right))
        if p.shape[-1] == 3:
            products = torch.linalg.cross(p, q)
        else:
            products = ((p @ self.product.flatten(1)).unflatten(-1, (5, 5)) * q[..., None]).sum(-2)
        out = self.invariants(torch.cat([scalars, lengths(tensors), (p * q).sum(-1)], -1))
        gates = out[..., self.scalars :, None]
        return out[..., : self.scalars], self.tensors(torch.cat([tensors, products], -2).mT).mT * gates


class EquivariantGRU(nn.Module):
    """A gated recurrent network whose tensors have forget gates by invariants."""

    def __init__(self, inside: Channels, outside: Channels, scalars: int = 24, tensors: int = 16) -> None:
        super().__init__()
        _, channels, dim = inside
        both = 2 * scalars + 2 * tensors
        self.enter = Mix(inside, scalars, tensors)
        self.forget, self.update = nn.Linear(both, scalars + tensors), nn.Linear(both, scalars)
        self.tensors = nn.Linear(2 * tensors, tensors, bias=False)
        self.leave = Mix((2 * scalars, 2 * tensors + channels, dim), outside[0], outside[1])
        self.sizes = [scalars, tensors]
        nn.init.uniform_(self.forget.bias, 0, 4)  # times from 2 to 50 steps

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        x, v = self.enter(scalars, tensors)
        s, t, size = torch.zeros_like(x[:, 0]), torch.zeros_like(v[:, 0]), lengths(v)
        outs = []
        for n in range(x.shape[1]):
            seen = torch.cat([s, x[:, n], lengths(t), size[:, n]], 1)
            keep, hold = self.forget(seen).sigmoid().split(self.sizes, 1)
            s = keep * s + (1 - keep) * self.update(seen).tanh()
            new = self.tensors(torch.cat([t, v[:, n]], 1).mT).mT
            t = hold[..., None] * t + (1 - hold)[..., None] * new
            outs.append((s, t))
        s, t = (torch.stack(out, 1) for out in zip(*outs, strict=True))
        return self.leave(torch.cat([s, x], -1), torch.cat([t, v, tensors], 2))


class Layers(nn.Module):
    """Layers that mix times, each with a :class:`Mix` of what was there and what comes from earlier times."""

    def __init__(self, inside: Channels, outside: Channels, scalars: int = 24, tensors: int = 12, layers: int = 2):
        super().__init__()
        self.enter = Mix(inside, scalars, tensors)
        self.layers = nn.ModuleList(self.layer(scalars, tensors) for _ in range(layers))
        both = 2 * scalars, 2 * tensors, inside[2]
        self.mixes = nn.ModuleList(Mix(both, scalars, tensors) for _ in range(layers))
        self.leave = Mix((scalars, tensors + inside[1], inside[2]), outside[0], outside[1])

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        s, t = self.enter(scalars, tensors)
        for layer, mix in zip(self.layers, self.mixes, strict=True):
            earlier = layer(s, t)
            ds, dt = mix(torch.cat([s, earlier[0]], -1), torch.cat([t, earlier[1]], 2))
            s, t = s + ds, t + dt
        return self.leave(s, torch.cat([t, tensors], 2))


class Attention(nn.Module):
    """Causal softmax attention by invariants, with a learned bias of the lag."""

    def __init__(self, scalars: int, tensors: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.keys = nn.Linear(scalars + tensors, 2 * heads * 8)
        self.scalars, self.tensors = nn.Linear(scalars, scalars), nn.Linear(tensors, tensors, bias=False)
        self.bias = nn.Sequential(nn.Linear(4, 16), nn.SiLU(), nn.Linear(16, heads))

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        (batch, steps, *size), heads = tensors.shape, self.heads
        query, key = self.keys(torch.cat([scalars, lengths(tensors)], -1)).view(batch, steps, 2, heads, 8).unbind(2)
        values = self.scalars(scalars).view(batch, steps, heads, -1)
        vectors = self.tensors(tensors.mT).mT.reshape(batch, steps, heads, -1)
        time = torch.arange(steps, device=scalars.device)
        lag = time + 1.0
        of_lag = self.bias(torch.stack([lag.log(), (-lag / 64).exp(), lag**-0.5, (-lag / 8).exp()], 1)).T
        difference = time[:, None] - time
        bias = of_lag[:, difference.clamp(min=0)].masked_fill(difference < 0, -torch.inf)
        inputs = (x.transpose(1, 2) for x in (query, key, torch.cat([values, vectors], -1)))
        mixed = scaled_dot_product_attention(*inputs, attn_mask=bias[None]).transpose(1, 2)
        values, vectors = mixed.split([values.shape[3], vectors.shape[3]], 3)
        return values.flatten(2), vectors.reshape(batch, steps, *size)


class Recent(nn.Module):
    """Linear maps of the tensors of the last 12 steps."""

    def __init__(self, scalars: int, tensors: int, window: int = 12) -> None:
        super().__init__()
        self.weight = nn.Parameter((tensors * window) ** -0.5 * torch.randn(tensors, tensors, window))
        self.taps = nn.Parameter(window**-0.5 * torch.randn(scalars, 1, window))

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        batch, steps, channels, dim = tensors.shape
        before = self.weight.shape[2] - 1, 0
        rows = tensors.permute(0, 3, 2, 1).reshape(batch * dim, channels, steps)
        mixed = conv1d(pad(rows, before), self.weight).view(batch, dim, channels, steps).permute(0, 3, 2, 1)
        return conv1d(pad(scalars.mT, before), self.taps, groups=scalars.shape[2]).mT, mixed


class EquivariantTransformer(Layers):
    layer = Attention


class Window(Layers):
    layer = Recent


class Components(nn.Module):
    """A model of plain numbers: components of tensors are channels. Training turns its data at random."""

    augment = True

    def __init__(self, inside: Channels, outside: Channels, width: int) -> None:
        super().__init__()
        self.outside = outside
        self.numbers, self.out = inside[0] + inside[1] * inside[2], outside[0] + outside[1] * outside[2]
        self.leave = nn.Sequential(nn.Linear(width + self.numbers, width), nn.SiLU(), nn.Linear(width, self.out))

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        x = torch.cat([scalars, tensors.flatten(2)], 2)
        out = self.leave(torch.cat([self.states(x), x], 2))
        return out[..., : self.outside[0]], out[..., self.outside[0] :].unflatten(2, self.outside[1:])


class GRU(Components):
    def __init__(self, inside: Channels, outside: Channels, width: int = 64) -> None:
        super().__init__(inside, outside, width)
        self.cells = nn.GRU(self.numbers, width, 2, batch_first=True)

    def states(self, x: Tensor) -> Tensor:
        return self.cells(x)[0]


class Hyena(Components):
    """Gated long convolutions, with filters of the lag that decay, and MLPs."""

    def __init__(self, inside: Channels, outside: Channels, width: int = 32, layers: int = 2) -> None:
        super().__init__(inside, outside, width)
        self.enter = nn.Linear(self.numbers, width)
        make: list[Callable[[], nn.Module]] = [
            lambda: nn.LayerNorm(width), lambda: nn.Linear(width, 3 * width),
            lambda: nn.Sequential(nn.Linear(9, 32), nn.SiLU(), nn.Linear(32, width)),
            lambda: nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            ),
        ]  # fmt: skip
        self.layers = nn.ModuleList(nn.ModuleList(part() for part in make) for _ in range(layers))

    def states(self, x: Tensor) -> Tensor:
        x, steps = self.enter(x), x.shape[1]
        lag = torch.arange(steps, device=x.device) + 1.0
        of_lag = torch.stack([lag**-0.5, *((-lag / 2**n).exp() for n in range(8))], 1)
        for norm, project, filters, mlp in self.layers:
            query, key, value = project(norm(x)).chunk(3, 2)
            h = filters(of_lag) * lag[:, None] ** -0.5
            spectra = torch.fft.rfft(key * value, 2 * steps, 1) * torch.fft.rfft(h, 2 * steps, 0)
            x = x + query * torch.fft.irfft(spectra, 2 * steps, 1)[:, :steps] + value
            x = x + mlp(x)
        return x


class Ours(nn.Module):
    """Layers of this library on flat features of irreps."""

    def __init__(self, inside: Channels, outside: Channels, filter: str) -> None:
        super().__init__()
        self.outside, options = outside, {"filter": filter, "causal": True, "short_conv": 3}
        if inside[2] == 3:
            out = f"{outside[0]}x0e + {outside[1]}x1o"
            # the last of the vectors is a spin
            irreps = f"{inside[0]}x0e + {inside[1] - 1}x1o + 1x1e", out, "16x0e + 10x1o + 4x1e"
            self.layers = nn.ModuleList([IrrepsSE3Hyena(*irreps, num_layers=2, attn_kwargs=options)])
        else:
            irreps, hidden = f"{inside[0]}x0e + {inside[1]}x2e", "8x0e + 8x2e"
            out = f"{outside[0]}x0e + {outside[1]}x2e"
            pairs = (irreps, hidden), (hidden, out)
            self.layers = nn.ModuleList(TensorProductHyenaOperator(a, b, hidden, **options) for a, b in pairs)

    def forward(self, scalars: Tensor, tensors: Tensor) -> Parts:
        batch, steps = scalars.shape[:2]
        index = torch.arange(batch, device=scalars.device).repeat_interleave(steps)
        x = torch.cat([scalars, tensors.flatten(2)], 2).flatten(0, 1)
        for layer in self.layers:
            x = layer(x, batch=index, batch_size=batch, max_num_nodes=steps)
        out = x.view(batch, steps, -1)
        return out[..., : self.outside[0]], out[..., self.outside[0] :].unflatten(2, self.outside[1:])
