"""Slow formulas that the kernels are held against, written from the papers and sharing no code with the library."""

from __future__ import annotations

import collections
import functools
import itertools
import math

import torch
import torch.nn.functional as F


def group_element(matrices, matrix):
    """Index of a matrix among the group's matrices, found by distance (no Cayley table)."""
    distance = (matrices - matrix).abs().amax((1, 2))
    assert distance.min() < 1e-6
    return int(distance.argmin())


def relation_argument(matrices, relation, h, t, s):
    """u of one (h, t, s), by multiplying matrices."""
    m = matrices
    product = {
        "ge_vit": m[h].T @ m[t] @ m[s].T @ m[t],
        "lifted": m[t].T @ m[s],
        "relative": m[t].T @ m[s],
        "gsa": m[h].T @ m[t].T @ m[s],
    }[relation]
    return group_element(matrices, product)


def positions(spatial):
    """Position (x, y) or (x, y, z) of every pixel, flattened in the order of the tensor."""
    *z, row, column = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in spatial), indexing="ij")
    return torch.stack([column, -row, *z], -1).flatten(0, -2)


def attention_by_definition(
    query, key, value, rho, matrices, *, argument, inside, scale, strides=None, bias=None, there=None, circular=False,
    far=None,
):  # fmt: skip
    """Group self-attention of (B, heads, C, T, *spatial), one (image, head, pixel, h, t) at a time.

    ``rho(offset, u)`` is the encoding of an already rotated offset; ``argument(h, t, s)`` is u, or None where they do
    not meet; ``inside(offset)`` whether an offset belongs to the neighbourhood; ``strides``, one an h, what its offsets
    are multiples of; ``bias(offset, u)``, (heads,) to add to the score; ``there``, true for the pixels that are keys;
    with ``circular`` the image goes on at the other side; ``far(query, key, u)`` (B, heads, keys, S) weighs all keys,
    (B, heads, C, S, keys), to which windows add exp(score). Without any key the output is zero."""
    batch, heads, _, elements, *spatial = query.shape
    argument = functools.cache(argument)
    rho, bias = _remembered(rho), None if bias is None else _remembered(bias)
    place = positions(spatial)
    q, k, v = (x.flatten(4) for x in (query, key, value))
    out = torch.zeros(batch, heads, value.shape[2], len(matrices), len(place), dtype=value.dtype)
    there = torch.ones(len(place), dtype=torch.bool) if there is None else there
    turns = itertools.product((-1, 0, 1), repeat=len(spatial)) if circular else [(0,) * len(spatial)]
    around = [torch.tensor(turn).double() * torch.tensor(spatial[::-1]) for turn in turns]
    for (i, x_i), (h, matrix) in itertools.product(enumerate(place), enumerate(matrices)):
        pairs = [(j, (x_j + a - x_i) / (strides[h] if strides else 1)) for j, x_j in enumerate(place) for a in around]
        pairs = [(j, offset) for j, offset in pairs if there[j] and inside(offset)]
        keys, offsets = [j for j, _ in pairs], [matrix.T @ offset for _, offset in pairs]
        if not keys and (far is None or not there.any()):
            continue
        encoding = _at_offsets(rho, offsets)
        added = None if bias is None else _at_offsets(bias, offsets)
        total = 0
        for t in range(elements):
            seen = [s for s in range(elements) if argument(h, t, s) is not None]
            if not seen:
                continue
            arguments = [argument(h, t, s) for s in seen]
            weight = value.new_zeros(batch, heads, len(place), len(seen))
            if far is not None:
                weight = far(q[:, :, :, t, i], k[:, :, :, seen], arguments) * there[:, None]
            if keys:
                positions_of_keys = torch.stack([encoding(u) for u in arguments], 1)  # (keys, S, C)
                with_position = k[:, :, :, seen][..., keys].permute(0, 1, 4, 3, 2) + positions_of_keys
                score = scale * torch.einsum("bnc,bnksc->bnks", q[:, :, :, t, i], with_position)
                if added is not None:
                    score = score + torch.stack([added(u) for u in arguments], 1).movedim(-1, 0)
                weight = weight.index_add(2, torch.tensor(keys), score.exp())
            weight = weight / weight.sum((2, 3), keepdim=True)
            total = total + torch.einsum("bnks,bncsk->bnc", weight, v[:, :, :, seen])
        out[:, :, :, h, i] = total
    return out.unflatten(-1, spatial)


def separable_by_definition(value, matrices, *, inside, bias, offsets, there=None, circular=False):
    """What a head that looks by place alone puts out, a pixel at a time: value (B, heads, C, H, *spatial),
    ``bias(offset)`` (heads,) of a rotated offset, all ``offsets`` there are, in the image or not."""
    spatial = value.shape[4:]
    place = [tuple(p.tolist()) for p in positions(spatial)]
    number, flat, out = {p: i for i, p in enumerate(place)}, value.flatten(4), torch.zeros_like(value.flatten(4))
    low = [min(p[axis] for p in place) for axis in range(len(spatial))]
    offsets = [offset for offset in offsets if inside(offset)]
    for h, matrix in enumerate(matrices):
        weight = torch.stack([bias(matrix.T @ offset) for offset in offsets], -1).softmax(-1)  # (heads, D)
        for i, start in enumerate(place):
            for d, offset in enumerate(offsets):
                end = [a + b for a, b in zip(start, offset.tolist(), strict=True)]
                if circular:
                    end = [(x - first) % side + first for x, first, side in zip(end, low, spatial[::-1], strict=True)]
                j = number.get(tuple(end))
                if j is not None and (there is None or there[j]):
                    out[:, :, :, h, i] += weight[:, d, None] * flat[:, :, :, h, j]
    return out.unflatten(-1, spatial)


def _remembered(function):
    """A function of an offset and u, called once for each."""
    known = {}

    def call(offset, u):
        key = (*(1e6 * offset).round().tolist(), u)
        if key not in known:
            known[key] = function(offset, u)
        return known[key]

    return call


def _at_offsets(function, offsets):
    """The function of u that stacks ``function(offset, u)`` of all offsets, each computed once."""
    return functools.cache(lambda u: torch.stack([function(offset, u) for offset in offsets]))


def positive_features(x, projection, variance=1.0):
    """exp(Wx - |x|^2 / 2), without the factor 1 / sqrt(m); of directions of another variance, importance sampled."""
    norm = projection.norm(dim=1)
    weight = variance ** (x.shape[-1] / 4) * (norm**2 * (1 - variance) / 4).exp()
    return weight * (x @ (variance**0.5 * projection).T - x.square().sum(-1, keepdim=True) / 2).exp()


def distance_waves(offset, cutoff):
    """The distance u in cutoffs, and sin(pi n u) / (pi n u) for n from 1 to 16."""
    u = math.sqrt(float((offset / cutoff).square().sum()))
    waves = [math.sin(math.pi * n * u) / (math.pi * n * u) if u else 1.0 for n in range(1, 17)]
    return u, torch.tensor(waves, dtype=offset.dtype, device=offset.device)


def offset_bias(attention, offset):
    """b of one offset, for every head, read from the parameters."""
    bias, k = attention.positions.offset_bias, attention.cutoff
    if attention.offset == "mlp":
        return bias.last.weight @ F.silu(bias.first.weight @ (offset / k) + bias.first.bias) + bias.last.bias
    if attention.offset == "distance":
        u, waves = distance_waves(offset, k)
        return bias.last.weight @ waves + (1 - 1 / (1 - u * u) if u < 1 else -math.inf)
    x, y = (int(o) + k - 1 for o in offset)
    return bias.table.view(-1, 2 * k - 1, 2 * k - 1)[:, x, y]


def offset_value(attention, offset):
    """g of one offset, (heads, d)."""
    values, k = attention.positions.offset_values, attention.cutoff
    if attention.offset == "distance":
        _, features = distance_waves(offset, k)
    else:
        first = values.first if attention.offset == "table" else attention.positions.offset_bias.first
        features = F.silu(first.weight @ (offset / k) + first.bias)
    return torch.einsum("r,hre->he", features, values.map)


def far_offsets(attention, means):
    """What mean offsets (heads, dim) of one node add to its output, read from the parameters."""
    means, weight = means / attention.cutoff, attention.far_offsets.map.weight
    if attention.offset != "distance":
        return weight @ means.flatten()
    heads = range(len(means))
    products = torch.stack([means[e] @ means[f] for e in heads for f in heads if e <= f])
    return weight @ (products / (1 + products**2) ** 0.25)


def performer_double_sum(attention, x, edge_index, offsets, batch, features=None, pos=None, vectors=False):
    """A Performer layer from its parameters, one pair at a time; ``vectors``: and means of offsets (N, heads, dim)."""
    heads, d, k = attention.heads, attention.key_channels, attention.cutoff
    position, content = attention.position, attention.positions.key_heads
    near_pairs = position == "window"
    query = (x @ attention.query.weight.T).view(-1, heads, d)
    key = (x @ attention.key.weight.T).view(-1, content, d)
    value = (x @ attention.value.weight.T).view(-1, heads, attention.head_channels)
    biased = attention.key_bias is not None
    of_key = (x @ attention.key_bias.weight.T).exp() if biased else x.new_ones(len(x), content)
    if attention.features is not None:
        projection, m = attention.features.directions(x.device, x.dtype), attention.features.num_random_features
        phi_query, phi_key = (positive_features(t / d**0.25, projection) for t in (query, key))
        if content:
            variance = 0.5 + attention.positions.variance.log.exp()
            phi_query[:, :content], phi_key = (
                torch.stack([positive_features(t[:, h] / d**0.25, projection, variance[h]) for h in range(content)], 1)
                for t in (query, key)
            )
    edges = {(i, j): o for j, i, o in zip(*edge_index.tolist(), offsets, strict=True) if i != j}
    times = collections.Counter((i, j) for j, i in edge_index.T.tolist() if i != j)
    bonds = {}
    if features is not None:
        for j, i, f in zip(*edge_index.tolist(), features, strict=True):
            bonds[i, j] = f + (bonds.get((i, j), 0) if i == j else 0)  # loops of a node add up
    edges |= {(i, i): torch.zeros(attention.pos_dim).to(x) for i in range(len(x))}
    if position == "clipped":
        phi_table = positive_features(attention.positions.distance_table / d**0.25, projection)
    out, means = [], []
    for i in range(len(x)):
        total, normaliser, far = 0, 0, 0
        for j in range(len(x)):
            if batch[i] != batch[j]:
                continue
            if attention.features is None:
                weight = ((query[i] * key[j]).sum(-1) / math.sqrt(d)).exp()
            else:
                weight = (phi_query[i, :content] * phi_key[j]).sum(-1) / m
            weight = of_key[j] * weight
            offset = edges.get((i, j))
            if near_pairs:
                weight = attention.positions.far_bias.exp() * weight
                if offset is not None:
                    score = (query[i] * key[j]).sum(-1) / math.sqrt(d)
                    bond = bonds.get((i, j))
                    if bond is not None:
                        score = score + attention.positions.edge_bias.weight @ bond
                    near = (times[i, j] or 1) * of_key[j] * (score + offset_bias(attention, offset)).exp()
                    weight = weight + near
                    if attention.positions.offset_values is not None:
                        total = total + near[:, None] * offset_value(attention, offset)
            elif position == "clipped":
                distance = k if offset is None else min(int(offset.abs().sum()), k)
                weight = torch.cat([weight, (phi_query[i, content:] * phi_table[:, distance]).sum(-1)])
            total, normaliser = total + weight[:, None] * value[j], normaliser + weight
            if attention.far_offsets is not None:
                far = far + weight[:, None] * (pos[j] - pos[i])
        out.append((total / normaliser[:, None]).flatten() @ attention.out.weight.T + attention.out.bias)
        if attention.far_offsets is not None:
            means.append(far / normaliser[:, None])
            out[-1] = out[-1] + far_offsets(attention, means[-1])
    return (torch.stack(out), torch.stack(means)) if vectors else torch.stack(out)


def beyond(x, sizes):
    """Padded sequences (B, N, ...) with NaN beyond their own lengths, apart from the graph of x."""
    there = torch.arange(x.shape[1]) < torch.tensor(sizes)[:, None]
    return torch.where(there.view(*there.shape, *[1] * (x.ndim - 2)), x.detach(), torch.nan).requires_grad_()


def long_convolution(q, k, lengths, mode):
    """1/n sum_j q_j . k_{i-j} of (B, N, C), of (B, N, C, 3) by cross products; zeros beyond the lengths n."""
    multiply, out = torch.linalg.cross if q.ndim == 4 else torch.mul, []
    for q_b, k_b, n in zip(q, k, lengths, strict=True):
        own = sequence_convolution(q_b[:n], k_b[:n], range(n), mode, multiply, "forward") if n else q_b[:0]
        out.append(torch.cat([own, q_b.new_zeros(len(q_b) - n, *q_b.shape[1:])]))
    return torch.stack(out)


def sequence_convolution(q, k, index, mode, multiply, norm):
    """sum_jm q_j . k_m over the tokens with index_j + index_m = index_i, of (N, ...), divided by the number of tokens;
    indices count from the first token, and modulo their span if circular."""
    n, span = len(index), index[-1] - index[0] + 1
    at = [i - index[0] for i in index]
    out = []
    for i in at:
        pairs = [(j, m) for j in range(n) for m in range(n)]
        met = [(j, m) for j, m in pairs if (at[j] + at[m] - i) % (span if mode == "circular" else 2 * span) == 0]
        zero = torch.zeros_like(multiply(q[0], k[0]))
        out.append(sum((multiply(q[j], k[m]) for j, m in met), zero))
    return torch.stack(out) / {"forward": n, "ortho": math.sqrt(n), "backward": 1}[norm]


def in_chains(function, index, chain, *tensors):
    """A function of tensors (N, ...) and the indices of their tokens, for each chain by itself."""
    out = {}
    for c in chain.unique().tolist():
        own = (chain == c).nonzero()[:, 0]
        out |= zip(own.tolist(), function(*(x[own] for x in tensors), index[own].tolist()), strict=True)
    return torch.stack([out[i] for i in range(len(chain))])


def lag_sums(x, h, first, index=None, ring=False):
    """sum_j h_{i-j} x_j of (N, C, ...) with filters (L, C) of the lags from ``first`` on, one pair at a time; lags are
    differences of ``index``, in rings the shortest way round."""
    out, at = [], range(len(x)) if index is None else index
    for i in range(len(x)):
        total = torch.zeros_like(x[i])
        for j in range(len(x)):
            lag, n = at[i] - at[j], at[-1] - at[0] + 1
            if ring:
                lag = lag % n if 2 * (lag % n) <= n else lag % n - n
            lag -= first
            if 0 <= lag < len(h):
                total = total + h[lag].view(-1, *[1] * (x.ndim - 2)) * x[j]
        out.append(total)
    return torch.stack(out) if out else x


def taps(x, weight, causal=False, index=None, ring=False):
    """Sums over neighbors of (N, C, ...) with weights (C, K): a filter whose last tap is of the lag zero if causal."""
    return lag_sums(x, weight.flip(1).T, 0 if causal else -(weight.shape[1] // 2), index, ring)


def implicit_sums(layer, x, index, channels=slice(None), ring=False):
    """The convolution of one sequence (N, C, ...) with a filter of the lag, from its parameters."""
    span = index[-1] - index[0] + 1
    first = 0 if layer.causal else 1 - span
    at = exponential_filter if hasattr(layer, "log_rate") else implicit_filter
    h = torch.stack([at(layer, lag) for lag in range(first, span)])
    return lag_sums(x, h[:, channels], first, index, ring)


def implicit_filter(layer, lag):
    """An ImplicitFilter from its parameters, (C,) of one lag."""
    size, sign = math.log(1 + abs(lag)), (lag > 0) - (lag < 0)
    waves = [2 * math.pi * lag / 2**k for k in range(2, 12)]
    x = [size / 4, sign * size / 4, *(math.sin(w) for w in waves), *(math.cos(w) for w in waves)]
    x = torch.tensor(x, dtype=layer.decay.dtype)
    for linear in (layer.inside, layer.between):
        x = torch.sin(linear.weight @ x + linear.bias)
    return (layer.outside.weight @ x + layer.outside.bias) / (1 + abs(lag)) ** torch.log1p(torch.exp(layer.decay))


def exponential_filter(layer, lag):
    """An ExponentialFilter from its parameters, (C,) of one lag."""
    weight, power, out = layer.weight[1 if lag < 0 else 0], torch.log1p(torch.exp(layer.decay)), 0
    for n, log_rate in enumerate(layer.log_rate):
        rate = torch.exp(log_rate)
        out = out + weight[:, n] * rate**power * torch.exp(-rate * abs(lag))
    return out


def cross_product_attention(q, k, v, lengths):
    """Vector self-attention of (B, N, C, 3), one pair at a time."""
    cross, out = torch.linalg.cross, []
    for q_b, k_b, v_b, n in zip(q, k, v, lengths, strict=True):
        places = [torch.zeros_like(x) for x in q_b]
        for i in range(n):
            products = [cross(q_b[i], k_b[j]) for j in range(n)]
            weights = torch.stack([n**-0.5 * torch.linalg.vector_norm(c, dim=-1) for c in products]).softmax(0)
            for w, c, v_j in zip(weights, products, v_b[:n], strict=True):
                places[i] = places[i] + cross(w[:, None] * c, v_j) / n
        out.append(torch.stack(places) if places else torch.zeros_like(q_b))
    return torch.stack(out)


PAULI = torch.tensor([[[0, 1], [1, 0]], [[0, -1j], [1j, 0]], [[1, 0], [0, -1]]], dtype=torch.complex128)


def pauli_product(x, y):
    """The geometric product by 2x2 complex matrices: e_i is the Pauli matrix i, e23 = i e1 and so on, e123 = i."""

    pauli, one = PAULI.to(x.device), torch.eye(2, device=x.device)

    def matrix(x):
        x = x.to(torch.float64)
        vector = torch.einsum("...a,aij->...ij", torch.complex(x[..., 1:4], x[..., 4:7]), pauli)
        return torch.complex(x[..., 0], x[..., 7])[..., None, None] * one + vector

    product = matrix(x) @ matrix(y)
    scalar = product.diagonal(0, -2, -1).sum(-1, keepdim=True) / 2
    vector = torch.einsum("...ij,aji->...a", product, pauli) / 2
    return torch.cat([scalar.real, vector.real, vector.imag, scalar.imag], -1)


def grade(x, g):
    """Multivectors (..., 8) without the other grades."""
    return x * (torch.tensor([0, 1, 1, 1, 2, 2, 2, 3]) == g)


def grade_paths():
    """Which grades j the products of grades i and k have parts in, found from products of random multivectors."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, 8, generator=generator, dtype=torch.float64, device="cpu")
    every = itertools.product(range(4), repeat=3)
    return [(i, k, j) for i, k, j in every if grade(pauli_product(grade(x, i), grade(y, k)), j).abs().max() > 1e-9]


SIZES = (1, 3, 3, 1)


def clifford_linear(layer, grades):
    """A CliffordLinear from its parameters, of four tensors (N, channels, components)."""
    weights, out = iter(layer.weights), []
    for x, channels, size in zip(grades, layer.out_grades, SIZES, strict=True):
        mixed = x.new_zeros(len(x), channels, size)
        if channels and x.shape[1]:
            mixed = torch.einsum("oc,ncd->nod", next(weights), x)
        out.append(mixed)
    if layer.bias is not None:
        out[0] = out[0] + layer.bias[:, None]
    return out


def clifford_block(block, x):
    """A CliffordBlock from its parameters, of multivectors (N, C, 8)."""

    def norms(x):  # (N, C, 4), squared
        return torch.stack([part.square().sum(-1) for part in x.split(SIZES, -1)], -1)

    def spread(x):
        return torch.cat([x[..., g : g + 1].expand(*x.shape[:-1], n) for g, n in enumerate(SIZES)], -1)

    invariant = torch.cat([x[..., :1], norms(x)[..., 1:]], -1)
    x = x * spread(torch.sigmoid(block.gate.T * invariant + block.gate_bias.T))
    y = sum(grade(torch.einsum("oc,ncd->nod", block.weight[g], x), g) for g in range(4))
    y = y if block.bias is None else y + F.pad(block.bias[:, None], (0, 7))
    norm = (norms(y) + 1e-12).sqrt()
    normal = y / spread(torch.sigmoid(block.grade_norm.T) * (norm - 1) + 1)
    total = y
    for weight, (i, k, j) in zip(block.paths, grade_paths(), strict=True):
        total = total + weight[:, None] * grade(pauli_product(grade(x, i), grade(normal, k)), j)
    z = total / math.sqrt(2)
    size = (z.square().sum(-1) + 1e-12).sqrt().mean(-1)
    return block.scale[:, None] * z / (size + 1e-6)[:, None, None]


def gated_products(layer, grades):
    """A GatedProducts from its parameters, of four tensors (N, channels, components)."""
    scalars, rest = grades[0], [grades[0][:, :0], *grades[1:]]
    invariants = [scalars[..., 0], *((part.square().sum(-1) + 1e-4).sqrt() for part in grades[1:])]
    if any(part.shape[1] for part in rest):
        factors = [
            x if x.shape[1] else x.new_zeros(len(x), 16, n)
            for x, n in zip(clifford_linear(layer.factors, rest), SIZES, strict=True)
        ]
        p, q = torch.cat(factors, -1).split(8, 1)
        p = p / (1 + p.square().sum(-1, keepdim=True)).sqrt()
        products = [
            weight[:, None] * grade(pauli_product(grade(p, i), grade(q, k)), j)
            for weight, (i, k, j) in zip(layer.paths, grade_paths(), strict=True)
        ]
        products = [x[:, :n] for x, n in zip(sum(products).split(SIZES, -1), layer.products, strict=True)]
        invariants.append(products[0][..., 0])
        rest = beside(rest, [products[0][:, :0], *products[1:]])
    x = torch.cat(invariants, 1)
    hidden = F.silu(F.linear(x / (1 + x**2).sqrt(), layer.inside.weight, layer.inside.bias))
    out, *gates = F.linear(hidden, layer.outside.weight, layer.outside.bias).split(list(layer.out_grades), 1)
    mixed = clifford_linear(layer.mix, rest)[1:]
    return [out[..., None], *(gate[..., None] * x for gate, x in zip(gates, mixed, strict=True))]


def bounded(grades):
    """Tokens divided by sqrt(1 + the mean square of their numbers)."""
    size = (1 + torch.cat([part.flatten(1) for part in grades], 1).square().mean(1)).sqrt()
    return [part / size[:, None, None] for part in grades]


def clifford_mlp(mlp, grades):
    """A MultivectorMLP or GatedMLP from its parameters, of four tensors (N, channels, components)."""
    if not hasattr(mlp, "embed"):
        for layer in mlp:
            grades = gated_products(layer, grades)
        return grades
    embedded = clifford_linear(mlp.embed, grades)
    x = torch.cat([x if x.shape[1] else x.new_zeros(len(x), mlp.hidden, x.shape[2]) for x in embedded], -1)
    for block in mlp.blocks:
        x = clifford_block(block, x)
    return clifford_linear(mlp.out, x.split(SIZES, -1))


def beside(*parts):
    """Channels of several four tensors (N, channels, components) side by side."""
    return [torch.cat(grades, 1) for grades in zip(*parts, strict=True)]


def only(scalars=None, vectors=None, bivectors=None):
    """Four tensors (N, channels, components) of (N, S), (N, V, 3) and (N, V, 3); none where None."""
    given = next(x for x in (scalars, vectors, bivectors) if x is not None)
    empty = [given.new_zeros(len(given), 0, n) for n in SIZES]
    parts = (None if scalars is None else scalars[..., None], vectors, bivectors, None)
    return [none if part is None else part for none, part in zip(empty, parts, strict=True)]


def local_context(local, x, pos, edge_index, edge_attr):
    """A LocalContext from its parameters, one edge at a time."""
    here = beside(x, only(vectors=pos[:, None]))
    total = [part.new_zeros(len(pos), channels, n) for part, channels, n in zip(x, local.messages, SIZES, strict=True)]
    degree = [0] * len(pos)
    for e, (j, i) in enumerate(edge_index.T.tolist()):
        difference = [part[j : j + 1] - part[i : i + 1] for part in here]
        message = clifford_mlp(local.message, beside(difference, only(scalars=edge_attr[e : e + 1])))
        degree[i] += 1
        total = [t.index_add(0, torch.tensor([i]), m) for t, m in zip(total, message, strict=True)]
    mean = [t / torch.tensor(degree).clamp(min=1)[:, None, None] for t in total]
    update = clifford_mlp(local.update, beside(here, mean))
    return [a + b for a, b in zip(x, update, strict=True)]


def algorithm_1(operator, x, pos, edge_index=None, edge_attr=None, index=None, chain=None, ring=False):
    """An operator from its parameters, of one graph: four tensors and centred positions."""
    index = torch.arange(len(pos)) if index is None else index
    chain = torch.zeros(len(pos)).long() if chain is None else chain
    n, attention = len(pos), operator.options.attention
    if edge_index is not None:
        x = local_context(operator.local, x, pos, edge_index, edge_attr)
    here = beside(x, only(vectors=pos[:, None]))
    mixed = operator.products is not None
    projected = (clifford_linear if mixed else clifford_mlp)(operator.project, here)
    by_lag = not attention and operator.filters is not None
    causal = operator.options.causal
    if operator.short_conv is not None:
        weights = operator.short_conv.weight.split([part.shape[1] for part in projected])
        short = lambda w: lambda x, index: taps(x, w, causal, index, ring)  # noqa: E731
        projected = [
            in_chains(short(weight), index, chain, part) if part.numel() else part
            for part, weight in zip(projected, weights, strict=True)
        ]
    query, key, value = zip(*(part.chunk(3, 1) for part in projected), strict=True)
    if mixed:
        query, value = bounded(query), bounded(value)
    if attention:
        f = torch.softmax(query[0][..., 0] @ key[0][..., 0].T / math.sqrt(max(1, query[0].shape[1])), -1)
        scalars = (f @ value[0][..., 0])[..., None]
        vectors = cross_product_attention(*(t[1][None] for t in (query, key, value)), [n])[0]
    else:
        q0, k0, q1, k1 = query[0][..., 0], key[0][..., 0], query[1], key[1]

        def convolution(kind, q, k, multiply):
            if not q.shape[1]:
                return q
            if by_lag:
                sums = lambda k, index: implicit_sums(operator.filters[kind], k, index, ring=ring)  # noqa: E731
                return multiply(q, in_chains(sums, index, chain, k))
            mode, norm = operator.options.mode, operator.norm
            conv = lambda q, k, index: sequence_convolution(q, k, index, mode, multiply, norm)  # noqa: E731
            return in_chains(conv, index, chain, q, k)

        u, w = convolution("scalars", q0, k0, torch.mul), convolution("vectors", q1, k1, torch.linalg.cross)
        if not mixed:
            gate = torch.sigmoid(clifford_mlp(operator.gate, only(scalars=u, bivectors=w))[0])
            u, w = gate[:, : u.shape[1], 0] * u, gate[:, u.shape[1] :] * w
        scalars, vectors = u[..., None] * value[0], torch.linalg.cross(w, value[1])
        if mixed:
            sums = lambda k, index: implicit_sums(operator.filters["vectors"], k, index, ring=ring)  # noqa: E731
            scale = clifford_linear(operator.products.gates, only(scalars=value[0][..., 0]))[0]
            vectors = vectors + scale * in_chains(sums, index, chain, k1)
    if operator.shortcut is not None:
        x = clifford_linear(operator.shortcut, x if operator.shortcut.in_grades == operator.in_grades else here)
    if mixed:
        return clifford_mlp(operator.out, beside(x, [scalars, vectors, x[2][:, :0], x[3][:, :0]]))
    return clifford_mlp(operator.out, [x[0] + scalars, x[1] + vectors, x[2], x[3]])


def token_network(
    module, scalars, vectors, pos=None, edge_index=None, edge_attr=None, index=None, chain=None, ring=False
):
    """An operator or a model (Figure 2b) on one graph, scalars (N, S) and vectors (N, V, 3), to both again."""
    pos = torch.zeros_like(vectors[:, 0]) if pos is None else pos - pos.mean(0)
    if edge_index is not None and edge_attr is None:
        edge_attr = scalars.new_zeros(edge_index.shape[1], 0)
    x = only(scalars, vectors)
    if not hasattr(module, "operators"):
        x = algorithm_1(module, x, pos, edge_index, edge_attr, index, chain, ring)
    else:
        x = clifford_linear(module.embed, beside(x, only(vectors=pos[:, None])))
        for operator in module.operators:
            update = algorithm_1(operator, x, pos, edge_index, edge_attr, index, chain, ring)
            x = [a + b for a, b in zip(x, update, strict=True)]
        x = [part.mean(0, keepdim=True) for part in x] if module.pool else x
        x = clifford_mlp(module.out, x)
    return x[0][..., 0], x[1]
