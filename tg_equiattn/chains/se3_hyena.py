"""SE(3)-Hyena: global geometric context by long convolution. Vector self-attention is its quadratic counterpart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import checks
from ..modules import NotScriptable, read_tokens, reset_children
from .clifford import Grades
from .operator import TokenModel, TokenNetwork, token_attention, token_operator
from .sequences import OF_CONVOLUTIONS, ChainArguments, OperatorSettings


def _grades(default: Grades, **channels: int | None) -> Grades:
    """Grades from numbers of scalars and vectors. A number that is ``None`` is taken from ``default``."""
    chosen = {
        name: n if number is None else number for n, (name, number) in zip(default, channels.items(), strict=False)
    }
    if not any(chosen.values()):
        raise ValueError(f"{' and '.join(chosen)} must not both be 0: give at least one channel")
    return Grades(*chosen.values())


def _flat(name: str, x: Any, shape: tuple[int, ...]) -> Any:
    """Flatten an argument with values for each token, (B, N). Raise ValueError for another shape."""
    if len(shape) == 1 or not isinstance(x, Tensor):
        return x
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} must have shape {shape}, got {tuple(x.shape)}")
    return x.flatten(0, 1)


@checks.arguments
class ScalarVectorModule(NotScriptable, torch.nn.Module):
    """A module that reads scalars and vectors as tokens by grade, calls a network, and splits its output. The function
    ``network`` of a subclass makes the network from the grades of input, output and hidden tokens, and settings."""

    network: ClassVar[Callable[..., TokenNetwork]]

    def __init__(
        self, scalar_channels: checks.Whole, vector_channels: checks.Whole, out_scalars: checks.Whole | None = None,
        out_vectors: checks.Whole | None = None, *, hidden_scalars: checks.Whole | None = None,
        hidden_vectors: checks.Whole | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        inside = _grades(Grades(), scalar_channels=scalar_channels, vector_channels=vector_channels)
        outside = _grades(inside, out_scalars=out_scalars, out_vectors=out_vectors)
        hidden = _grades(inside, hidden_scalars=hidden_scalars, hidden_vectors=hidden_vectors)
        self.module = self.network(inside, outside, hidden, **settings)
        self.module.check_reachable("out_vectors")

    def forward(
        self, scalars: Tensor | None, vectors: Tensor | None, lengths: Tensor | None = None, *,
        batch: Tensor | None = None, index: Tensor | None = None, chain: Tensor | None = None,
        ring: Tensor | bool | None = None, pos: Tensor | None = None, edge_index: Tensor | None = None,
        edge_attr: Tensor | None = None, batch_size: int | None = None, num_chains: int | None = None,
        max_num_nodes: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Map scalars and vectors of tokens to scalars and vectors of tokens, or of sequences if the module pools.

        Args:
            scalars: ``(B, N, S)``, or flat ``(T, S)``; ``None`` if there are no scalar channels.
            vectors: ``(B, N, V, 3)``, or flat ``(T, V, 3)``; ``None`` if there are no vector channels.
            lengths: int64 ``(B,)``, the own length of each padded sequence. Tokens beyond it are never read, and zero
                in the output.
            batch: sorted int64 ``(T,)``, the sequence of each flat token. ``None`` means one sequence.
            index: integers ``(B, N)`` or ``(T,)``, the number of each token along its chain, for example its residue
                number. It must increase strictly. Convolutions take differences of it as lags, so that missing tokens
                count as zero; steps above 128 count as 128. ``None`` means that no token is missing.
            chain: integers ``(B, N)`` or ``(T,)``, any number for each chain. Convolutions run along each chain of a
                sequence by itself; positions are centred, and attention mixes, over the whole sequence. ``None`` means
                that each sequence is one chain.
            ring: bool ``(B, N)`` or ``(T,)``, true for the tokens of closed chains, or one bool for all chains. Lags
                then run the shortest way round the ring, in implicit and exponential filters and in short convolutions.
                It needs ``causal=False``, and another filter than ``"data"``. ``None`` means that all chains are open.
            pos: positions ``(B, N, 3)`` or ``(T, 3)``. They enter relative to the mean of their sequence, divided by
                ``length_scale``, as one more vector. They must be ``None`` with ``causal=True``, as later tokens change
                the mean. Give large coordinates (UTM: 5e6) in float64, whatever dtype the features have: float32
                rounds them to 0.5.
            edge_index: int64 ``(2, E)``, source and target tokens, counted through the batch (b N + i). It is needed
                with ``local_context=True``. With ``causal=True``, no source may come later than its target.
            edge_attr: ``(E, edge_channels)``, scalars of the edges. They are needed if ``edge_channels`` is not 0.
            batch_size: number of flat sequences. By default it is read from ``batch``, which torch.compile cannot do.
            num_chains: number of chains in the batch, or a bound of it. By default it is read from ``chain``, which
                torch.compile cannot do.
            max_num_nodes: a bound of the lengths of flat sequences, and of the spans of ``index``. By default it is
                read from ``batch`` and ``index``, which torch.compile cannot do.
        """
        module, inside = self.module, self.module.in_grades
        channels, reference = (inside.scalars, inside.vectors), module.reference_parameter
        tokens = read_tokens(scalars, vectors, channels, reference, lengths, batch, batch_size, max_num_nodes)
        shape = tokens.shape
        if isinstance(pos, Tensor) and len(shape) == 2:
            pos = _flat("pos", pos, (*shape, 3))
        index, chain, ring = (_flat(*given, shape) for given in (("index", index), ("chain", chain), ("ring", ring)))
        x = torch.cat([tokens.scalars, tokens.vectors.mT.flatten(1)], 1).to(reference.dtype)
        along = ChainArguments(index, chain, ring, num_chains, max_num_nodes)
        out = module.run(x, pos, tokens.node_batch, along, edge_index, edge_attr)
        return self._split(out, (tokens.node_batch.count,) if module.pool else shape)

    def step(
        self, state: tuple[Any, ...] | None, scalars: Tensor | None, vectors: Tensor | None
    ) -> tuple[tuple[Any, ...], tuple[Tensor, Tensor]]:
        """Map one more token of each sequence, in a time that does not depend on the number of earlier ones.

        Outputs equal those of :meth:`forward` for the whole sequence. It needs ``filter="exponential"`` and
        ``causal=True``, and rules out ``local_context`` and ``pool``.

        Args:
            state: The state that the last call returned, or ``None`` at the beginning.
            scalars: The scalars of the tokens, ``(B, S)``; ``None`` if there are no scalar channels.
            vectors: The vectors of the tokens, ``(B, V, 3)``; ``None`` if there are no vector channels.

        Returns:
            The new state, and scalars ``(B, out_scalars)`` and vectors ``(B, out_vectors, 3)``.
        """
        inside, reference = self.module.in_grades, self.module.reference_parameter
        tokens = read_tokens(scalars, vectors, (inside.scalars, inside.vectors), reference, None, None, None, None)
        x = torch.cat([tokens.scalars, tokens.vectors.mT.flatten(1)], 1).to(reference.dtype)
        state, out = self.module.run_step(state, x)
        return state, self._split(out, tokens.shape)

    def _split(self, out: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Scalars and vectors from the features of an output."""
        outside = self.module.out_grades
        scalars, vectors = out.split([outside.scalars, 3 * outside.vectors], 1)
        vectors = vectors.unflatten(1, (3, outside.vectors)).mT.contiguous()
        return scalars.contiguous().view(*shape, outside.scalars), vectors.view(*shape, outside.vectors, 3)

    def reset_parameters(self) -> None:
        reset_children(self)

    def extra_repr(self) -> str:
        inside, outside = self.module.in_grades, self.module.out_grades
        channels = f"{inside.scalars}, {inside.vectors} -> {outside.scalars}, {outside.vectors}"
        return f"{channels}, order={self.module.options.order!r}"


@checks.arguments_of(OperatorSettings, "attention")
class SE3HyenaOperator(ScalarVectorModule):
    r"""The SE(3)-Hyena operator: every token sees every other one in O(N log N), equivariantly.

    The operator has Clifford MLPs phi, gamma and xi. For scalars f and vectors x it computes (Algorithm 1)

    .. math::
        q, k, v &= \phi(x, f) \\
        u &= q \otimes k \quad (\text{long convolution; of vectors by cross products}) \\
        \hat u &= \sigma(\gamma(u)) \cdot u \\
        x', f' &= \xi(x + \hat u^{eqv} \times v^{eqv},\; f + \hat u^{inv} \cdot v^{inv})

    It is equivariant to rotations and reflections: u, a cross product of polar vectors, is axial, and its product with
    v is polar again. Positions enter relative to their mean, so it is invariant to translations. To predict positions,
    add the output vectors to positions.

    ``filter="data"`` is the paper's circular convolution, divided by the root of the sequence's length, or by the
    length with ``order="radial"``, as in the paper. It depends on absolute indices: shifting the sequence changes the
    output. ``filter="implicit"`` depends on lags only, for chains whose beginning has no meaning:

    .. math:: u_i = q_i \otimes \sum_j h(i - j)\, k_j

    with :math:`\otimes` the product of scalars or the cross product of vectors, and h a learned function: an MLP of the
    lag, times a learned power of it. It is not divided by the length, and projections have no biases. So without
    ``pos`` and ``local_context``, a chain among zeros has the same outputs wherever it stands (:doc:`/chains`), and
    with ``causal=True`` appended tokens change no earlier output. With ``index`` and ``chain`` in ``forward``, lags are
    differences of the index within a chain. ``filter="exponential"`` is the same with
    :math:`h(l) = \sum_n w_n e^{-r_n |l|}`, with other weights for negative lags.

    Cross products alone cannot give the plain convolution of vectors, :math:`y_i = \sum_j h(i - j)\, x_j`. So with
    filters of the lag the default, ``mixed_products=True``, is another operator, for forces and responses with a
    memory. q, k and v are linear maps of the token, q and v are divided by :math:`\sqrt{1 + m}` with m the mean square
    of their components, and with :math:`c_i = \sum_j h(i - j)\, k_j`

    .. math::
        f'', x'' = q^{inv} c^{inv} v^{inv},\; (q^{eqv} \times c^{eqv}) \times v^{eqv} + (W v^{inv} + b)\, c^{eqv}
        \qquad x', f' = \xi(x, f, x'', f'')

    The last term has a mirror image with pseudoscalars where tokens have them. Here :math:`\xi` multiplies linear maps
    of vectors, and of products of two vectors, by gates, which a network computes from scalars, lengths and dot
    products. Outputs grow linearly with the input. ``mixed_products=False`` is Algorithm 1 with the filter of the lag.

    ``order="radial"`` makes the operator equivariant to permutations of clouds without ties. Outputs then jump where
    two tokens exchange their distances (:doc:`/guarantees`): do not use it for dynamics, relaxation or phonons.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of query, key and value. ``None`` means as many as in the input. If hidden and
            input channels differ, a linear map takes the input to the residual.
        hidden_vectors: Number of vectors of query, key and value. ``None`` means as many as in the input.
        filter: Filter of the long convolution. ``"data"``, the default, means the keys, as published. ``"implicit"``
            means a network of the lag; use it for chains whose beginning has no meaning. ``"exponential"`` means a
            learned sum of decaying exponentials of the lag; use it for sequences longer than in training, and for
            :meth:`step`.
        mixed_products: Whether scalars of a token multiply the convolved vectors, beside cross products, with filters
            of the lag; projections are linear then. The default is ``True``. ``False`` is the published operator with
            such a filter.
        causal: Whether tokens see earlier tokens of their chain only. It needs ``order="input"``, and rules out ``pos``
            and edges from later tokens. With ``filter="data"`` outputs still depend on the sequence's length. The
            default is ``False``; use ``True`` to predict the next token.
        short_conv: Number of taps, odd, from 3 on, of a short convolution of query, key and value before the long one.
            It has one weight for each channel and tap, and with ``causal=True`` it reaches back only. The default,
            ``None``, means no short convolution. Short trainings of recall need it (:doc:`/chains`).
        order: ``"input"``, the default, keeps the order of the tokens. ``"radial"`` sorts them by their distance to the
            centroid, needs ``pos`` and rules out ``index``, ``chain`` and ``ring``; use it for clouds without an order.
        length_scale: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        local_context: Whether to update every token from its neighbors along ``edge_index`` first, by Clifford message
            passing. The default is ``False``. Use it if a graph of near neighbors is known.
        edge_channels: Number of scalars of an edge, which are given as ``edge_attr``. The default is 0; other numbers
            need ``local_context``.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena Algorithm 1, section 3.2; "grade-one and grade-two projections" there are grades 0 and 1. Poli et
    al., Hyena Hierarchy (2023), for the implicit filter and the short convolution.

    Example:
        >>> import torch
        >>> operator = SE3HyenaOperator(8, 16)
        >>> scalars, vectors = operator(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    network = staticmethod(token_operator)


@checks.arguments_of(OperatorSettings, *OF_CONVOLUTIONS)
class VectorSelfAttention(ScalarVectorModule):
    r"""Equivariant self-attention: vectors by cross products, scalars by softmax attention.

    The layer is :class:`SE3HyenaOperator` with attention instead of convolution and gate. Scalars have softmax
    attention. For vectors q, k and v, each channel by itself (Eq. 4-5),

    .. math::
        S_{ij} = \mathrm{softmax}_j\!\left(\tfrac{1}{\sqrt n} \|q_i \times k_j\|\right) (q_i \times k_j), \qquad
        u_i = \frac{1}{n} \sum_j S_{ij} \times v_j

    with n the number of tokens of the sequence. Lengths of cross products are computed as
    :math:`\|q \times k\|^2 = |q|^2 |k|^2 - (q \cdot k)^2`: if q and k are parallel to within the rounding of float32,
    scores are accurate to 1e-3 of :math:`|q||k|` only.

    The layer is equivariant to rotations, reflections and translations, and without ``short_conv`` to permutations.
    It takes O(N^2) time and O(N) memory. Second derivatives of scalar attention take O(N^2) memory.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of query, key and value. ``None`` means as many as in the input. If hidden and
            input channels differ, a linear map takes the input to the residual.
        hidden_vectors: Number of vectors of query, key and value. ``None`` means as many as in the input.
        short_conv: Number of taps, odd, from 3 on, of a short convolution of query, key and value with one weight for
            each channel and tap. The default, ``None``, means no short convolution. Use 3 if neighbors along the
            sequence belong together (:doc:`/chains`); outputs then depend on the order of the tokens.
        length_scale: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        local_context: Whether to update every token from its neighbors along ``edge_index`` first, by Clifford message
            passing. The default is ``False``. Use it if a graph of near neighbors is known.
        edge_channels: Number of scalars of an edge, which are given as ``edge_attr``. The default is 0; other numbers
            need ``local_context``.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena appendix B, Eq. 4-5 (its Code 2 computes something else); the projections and the output MLP are
    those of section 3.

    Example:
        >>> import torch
        >>> attention = VectorSelfAttention(8, 16)
        >>> scalars, vectors = attention(torch.randn(2, 101, 8), torch.randn(2, 101, 16, 3))
        >>> scalars.shape, vectors.shape
        (torch.Size([2, 101, 8]), torch.Size([2, 101, 16, 3]))
    """

    network = staticmethod(token_attention)


@checks.arguments_of(TokenModel)
class SE3Hyena(ScalarVectorModule):
    r"""The SE(3)-Hyena model: linear embedding, operators with residual connections, equivariant MLP (Figure 2b).

    The operators are :class:`SE3HyenaOperator`, or :class:`VectorSelfAttention`. The model has their symmetries.

    Args:
        scalar_channels: Number of scalars of a token in the input.
        vector_channels: Number of vectors of a token in the input.
        out_scalars: Number of scalars in the output. ``None`` means as many as in the input.
        out_vectors: Number of vectors in the output. ``None`` means as many as in the input.
        hidden_scalars: Number of scalars of a token between the layers. The default is 16.
        hidden_vectors: Number of vectors of a token between the layers. The default is 128.
        num_layers: Number of operators. The default is 3.
        num_blocks: Number of blocks of every Clifford MLP. The default is 1. Use 2 for more products of channels, at
            about twice the time.
        pool: ``"mean"`` takes the mean over the tokens of each sequence before the MLP. The default, ``None``, does
            not.
        order: ``"input"``, the default, keeps the order of the tokens. ``"radial"`` sorts them once by their distance
            to the centroid, needs ``pos`` and rules out ``index``, ``chain`` and ``ring``; use it for clouds without an
            order.
        length_scale: Length that ``pos`` is divided by, in the unit of ``pos``. The default is 1. Use the spacing of
            neighbors, for example 3.8 for residues in angstrom.
        attention: Whether the operators are :class:`VectorSelfAttention` instead of :class:`SE3HyenaOperator`. The
            default is ``False``. Use ``True`` for clouds of up to a few thousand points without an order.
        attn_kwargs: Further arguments of the operators: ``filter``, ``mixed_products``, ``causal``, ``short_conv``,
            ``local_context`` and ``edge_channels``; without the first three for ``attention``.

    Shapes:
        ``(B, N, S)`` and ``(B, N, V, 3)``, or flat ``(T, S)`` and ``(T, V, 3)`` with ``batch``, to both again; to
        ``(B, out_scalars)`` and ``(B, out_vectors, 3)`` with ``pool="mean"``.

    Raises:
        ValueError: if an argument is not allowed, or does not fit another one.

    Source: se3-hyena Figure 2b, sections 4.1.1 and 4.2.1, and appendix B for ``attention``.

    Example:
        >>> import torch
        >>> model = SE3Hyena(2, 1, 0, 1, hidden_scalars=8, hidden_vectors=16, num_layers=2)
        >>> charges, velocities = torch.randn(4, 5, 2), torch.randn(4, 5, 1, 3)
        >>> positions = torch.randn(4, 5, 3)
        >>> (positions + model(charges, velocities, pos=positions)[1].squeeze(2)).shape
        torch.Size([4, 5, 3])
    """

    network = TokenModel

    def __init__(
        self, scalar_channels: checks.Whole, vector_channels: checks.Whole, out_scalars: checks.Whole | None = None,
        out_vectors: checks.Whole | None = None, *, hidden_scalars: checks.Whole = 16,
        hidden_vectors: checks.Whole = 128, **settings: Any,
    ) -> None:  # fmt: skip
        hidden = {"hidden_scalars": hidden_scalars, "hidden_vectors": hidden_vectors}
        super().__init__(scalar_channels, vector_channels, out_scalars, out_vectors, **hidden, **settings)
