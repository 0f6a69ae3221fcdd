"""Numbers of numpy are integers and floats like Python's, and none of them is left in a module."""

import numpy
import pytest

from tg_equiattn.groups import cyclic
from tg_equiattn.nn import GroupAttention


@pytest.mark.parametrize("integer", [numpy.int64, numpy.int32])
def test_a_layer_of_numpys_numbers_is_that_of_pythons(integer):
    def layer(n, x):
        return GroupAttention(cyclic(n(4)), n(3), n(5), heads=n(2), kernel_size=n(3), dropout=x(0.125), locality=x(4))

    made, plain = layer(integer, numpy.float32), layer(int, float)
    assert not [name for name, value in vars(made).items() if isinstance(value, numpy.generic)]
    assert repr(made) == repr(plain)
    plain.load_state_dict(made.state_dict())


@pytest.mark.parametrize("value", [numpy.bool_(True), True, numpy.float64(2), numpy.int64(0), "2", numpy.array(2)])
def test_what_is_no_positive_integer(value):
    with pytest.raises(ValueError, match="heads must be a positive integer, got"):
        GroupAttention(cyclic(4), 3, 5, heads=value)
