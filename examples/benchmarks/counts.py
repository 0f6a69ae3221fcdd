"""How much work the benchmarked layers are at least: bytes moved, operations, exponentials.

Every count is a lower bound on what any implementation of that algorithm must do, and counts multiplications and
additions (a multiply-add is two). It leaves out what is small beside the rest: maxima, masks, activations, norms.
Passes that need all tokens (attention, convolution, projections before and after) each read their inputs and write
their outputs once. With backward, nothing is computed twice (``flops``) although nothing but inputs is kept
(``bytes``): each of the three is the least there can be by itself. The input of a layer has no gradient, and neither
does its output's gradient, that of a sum, take any memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tg_equiattn.functional.vector.clifford import PATHS

FLOAT = 4


@dataclass(frozen=True)
class Floor:
    """Bytes moved, operations and exponentials; ``half``: operations on 16-bit numbers."""

    bytes: float
    flops: float
    exponentials: float = 0.0
    half: bool = False


# Group self-attention


def window_pairs(size: int, kernel_size: int | None) -> int:
    """Pairs of a pixel and one in its window inside an image of size x size; with None all pairs."""
    reach = size - 1 if kernel_size is None else kernel_size // 2
    return sum(max(0, size - abs(step)) for step in range(-reach, reach + 1)) ** 2


def group_core(elements: int, width: int, pairs: int, pixels: int, backward: bool) -> tuple[int, int]:
    """Operations and exponentials of the factorised form, for one head of ``width`` channels; E elements.

    Forward, a pair (pixel, neighbour): logits <q(t), k(s)> and <q(t), rho(h^-1 D)> and W(h, s) v(s), 2 E^2 width each;
    A S, its sum over pairs, and W += A S (G / Z), 4 E^3; 2 E^2 exponentials. A pixel: <q(t), rho(u)>, 2 E^2 width, Z
    and G / Z, 3 E^3; E^2 exponentials.

    Backward, a pair: dW, dv, and the gradients of both factors of both logits, 12 E^2 width; the sum of A S dW,
    dlogit = A S (G/Z dW - G/Z r), and its sums over s and over h, 7 E^3. A pixel: the gradients of q and rho(u), and
    dG, 4 E^2 width + 6 E^3.
    """
    square, cube = elements**2, elements**3
    flops = pairs * (6 * square * width + 4 * cube) + pixels * (2 * square * width + 3 * cube)
    if backward:
        flops += pairs * (12 * square * width + 7 * cube) + pixels * (4 * square * width + 6 * cube)
    return flops, pairs * 2 * square + pixels * square


def _layer(core: tuple[int, int], elements: int, size: int, batch: int, in_channels: int, out_channels: int, heads: int,
           width: int, backward: bool) -> Floor:  # fmt: skip
    """Projections, the core, projection.

    Rows of numbers a pixel and element: the input and the output; q, k, v read and the mixed values written once. With
    backward the input and the mixed values again, and attention's q, k, v, gradient in and three gradients out.
    """
    inner, points = heads * width, batch * size**2 * elements
    rows = in_channels + out_channels + 4 * inner
    linear = 2 * points * inner * (3 * in_channels + out_channels)
    if backward:
        rows += in_channels + inner + 7 * inner
        linear += 2 * points * inner * (3 * in_channels + 2 * out_channels)
    return Floor(FLOAT * points * rows, core[0] + linear, core[1])


def group_attention(elements: int, kernel_size: int | None, size: int, batch: int, in_channels: int, out_channels: int,
                    heads: int, width: int, backward: bool) -> Floor:  # fmt: skip
    """A layer around factorised attention, in square windows or global."""
    images = batch * heads
    core = group_core(elements, width, images * window_pairs(size, kernel_size), images * size**2, backward)
    return _layer(core, elements, size, batch, in_channels, out_channels, heads, width, backward)


# Linear and softmax attention on pixels


def features(tokens: int, heads: int, width: int, count: int, softmax: bool, backward: bool) -> tuple[int, int]:
    """Attention by ``count`` random features, operations and exponentials: products of q and k with the directions,
    phi(k) v and its normaliser summed over keys, phi(q) times both; backward the two gradients of each product but
    for those of directions."""
    flops = 8 * width * count + 3 * count + (12 * width * count if backward else 0)
    return tokens * heads * flops, 2 * tokens * heads * count if softmax else 0


def near_pairs(size: int, distance: int) -> int:
    """Pairs of pixels of size x size closer than ``distance`` (Manhattan), each with itself too."""
    steps = range(1 - distance, distance)
    there = {step: max(0, size - abs(step)) for step in steps}
    return sum(there[a] * there[b] for a in steps for b in steps if abs(a) + abs(b) < distance)


def softmax_pairs(pairs: int, heads: int, width: int, bias: bool, backward: bool) -> tuple[int, int]:
    """Softmax attention over given pairs: the score, its bias, the weighted value and normaliser; backward the
    gradients of the weight, of v, q and k, and dscore = w (dw - mean)."""
    flops = 4 * width + 1 + bias + (8 * width + 2 + bias if backward else 0)
    return pairs * heads * flops, pairs * heads


def attention_layer(tokens: int, channels: int, core: tuple[int, int], backward: bool, half: bool = False,
                    bias_numbers: int = 0) -> Floor:  # fmt: skip
    """A layer around attention: channels x channels projections to q, k, v and out.

    Rows as those of ``group_attention``; weights are read, and their gradients written; a bias is read in each pass.
    """
    flops, exponentials = core
    rows, weights, linear = 6, 4 * channels**2, 8 * tokens * channels**2
    if backward:
        rows, weights, linear = rows + 9, 2 * weights, linear + 10 * tokens * channels**2
    numbers = rows * tokens * channels + weights + bias_numbers * (1 + backward)
    return Floor((2 if half else FLOAT) * numbers, flops + linear, exponentials, half)


# Long geometric context

PAIR = 23  # (q x k)^2 = |q|^2 |k|^2 - (q.k)^2: 8; p, q.v and k.v to the sums of p (q.v) k, p (k.v) and p: 15


def fft(length: int) -> float:
    """A real FFT, by the usual convention: half of 5 n log2 n, a complex one's."""
    return 2.5 * length * math.log2(max(length, 2))


def long_conv(tokens: int, scalars: int, vectors: int, backward: bool) -> float:
    """Convolutions: three FFTs and a complex product a scalar channel, nine and a complex cross product (42) a vector
    one; backward one FFT (three) for the gradient and two (six) back, and two products."""
    once = (3 * scalars + 9 * vectors) * fft(tokens) + (6 * scalars + 42 * vectors) * (tokens // 2 + 1)
    return once + ((3 * scalars + 9 * vectors) * fft(tokens) + (12 * scalars + 84 * vectors) * (tokens // 2 + 1)
                   if backward else 0)  # fmt: skip


def clifford_linear(inside: tuple[int, ...], outside: tuple[int, ...]) -> int:
    """A linear map of multivectors, channels by grade."""
    return 2 * sum(n * i * o for n, i, o in zip((1, 3, 3, 1), inside, outside, strict=True))


def clifford_mlp(inside: tuple[int, ...], outside: tuple[int, ...], width: int, backward: bool) -> int:
    """A Clifford MLP of one block, a token, of the grades that are there."""
    grades = [g for g, channels in enumerate(inside) if channels or not g]
    there = tuple(width * (g in grades) for g in range(4))
    linear = clifford_linear(inside, there) + clifford_linear(there, there) + clifford_linear((width,) * 4, outside)
    return linear * (3 if backward else 1) + clifford_product_flops(width, backward, grades)


def geometric_layer(kind: str, tokens: int, scalars: int, vectors: int, backward: bool) -> Floor:
    """SE(3)-Hyena (``kind="hyena"``) or vector self-attention, one sequence.

    Rows of numbers a token, scalars + 3 vectors each: the input; q, k (and attention's v) written, and read; the
    mixed written, and read; the output. Backward: input, q, k (v) read, gradients of the mixed, and of q, k (v),
    written and read.
    """
    token, width = scalars + 3 * vectors, max(1, scalars, vectors)
    grades, operands = (scalars, vectors, 0, 0), 2 if kind == "hyena" else 3
    first, three = (scalars, vectors + 1, 0, 0), (3 * scalars, 3 * vectors, 0, 0)
    mlps = clifford_mlp(first, three, width, backward) + clifford_mlp(grades, grades, width, backward)
    rows = 4 + 2 * operands
    if backward:
        mlps -= clifford_linear(first, (width,) * 4)  # the input has no gradient
        rows += 3 + 3 * operands
    if kind == "hyena":
        mlps += clifford_mlp((scalars, 0, vectors, 0), (scalars + vectors, 0, 0, 0), 8, backward)
        return Floor(FLOAT * tokens * token * rows, tokens * mlps + long_conv(tokens, scalars, vectors, backward))
    pairs = PAIR * vectors * (3 if backward else 1) + softmax_pairs(1, 1, scalars, False, backward)[0]
    return Floor(FLOAT * tokens * token * rows, tokens * mlps + tokens**2 * pairs, tokens**2 * (vectors + 1))


def vector_convolution(tokens: int, batch: int, backward: bool) -> Floor:
    """The convolution alone, one vector channel: q, k read and u written; backward q, k read, two gradients written."""
    rows = 21 if backward else 9
    return Floor(FLOAT * batch * tokens * rows, batch * long_conv(tokens, 0, 1, backward))


# The Clifford product


def clifford_product_flops(channels: int, backward: bool, grades: Sequence[int] = range(4)) -> int:
    """Channelwise products of some grades with weights, a token.

    Of all grades, 64 products x_i y_k fall into 44 groups of one output component and path: summed (20), weighted (44),
    summed (36). Backward: g w (44), times y and x (128) and summed (112), and for the weights g times the groups (44),
    summed (24).
    """
    sizes = (1, 3, 3, 1)
    paths = [path for path in PATHS if {path[0], path[1]} <= set(grades)]
    products = sum(6 if (sizes[i], sizes[k], sizes[j]) == (3, 3, 3) else max(sizes[i], sizes[k]) for i, k, j in paths)
    groups, made = sum(sizes[j] for _, _, j in paths), sum(sizes[j] for j in {path[2] for path in paths})
    there = sum(sizes[g] for g in grades)
    forward = products + (products - groups) + groups + (groups - made)
    back = groups + 2 * products + 2 * (products - there) + groups + (groups - len(paths))
    return channels * (forward + (back if backward else 0))


def clifford_product(channels: int, tokens: int, backward: bool) -> Floor:
    """x, y read and the product written; backward x and y read and two gradients written."""
    flops = tokens * clifford_product_flops(channels, backward)
    return Floor(FLOAT * 8 * channels * tokens * (7 if backward else 3), flops)
