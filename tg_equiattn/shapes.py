"""Tensors with the names of their axes, for annotations. Type checkers see the types of jaxtyping; nothing evaluates
annotations when the library runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Complex, Float, Int, Num, Shaped
else:
    Bool = Complex = Float = Int = Num = Shaped = Any
