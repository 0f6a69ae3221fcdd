"""Which path computes an operator of our own: itself, or a plain composition of torch's operations.

Operators are opaque to torch's transforms: ``torch.func``'s cannot look into them, and forward-mode differentiation
would take their tangents for zero. So each has its plain composition, which every transform understands; it is what
runs wherever a transform is at work, and where it is asked for.
"""

from __future__ import annotations

from torch.autograd import forward_ad

from ..modes import transformed


def use_plain(plain: bool = False) -> bool:
    """Whether an operator runs as its plain composition of torch's operations."""
    return plain or transformed()


def refuse_forward_mode() -> None:
    """RuntimeError inside one of our own operators while forward-mode differentiation is at work.

    Operators have no forward-mode rule, and torch would take their tangents for zero without a word. A layer or a
    function of ours never gets here; a compiled or exported program does, and the backward of an earlier graph.
    """
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "forward-mode differentiation cannot go through an operator of tg_equiattn in a compiled or exported "
            "program, or in the backward of a graph recorded before it began: tangents would be zero. Transform the "
            "module itself, and compile after that"
        )
