"""escnn's first import, in silence, and the warnings of what it builds on."""

import fields  # noqa: F401
import pytest


def pytest_itemcollected(item):
    kinds = [f"ignore::{kind}Warning" for kind in ("Deprecation", "PendingDeprecation", "Future")]
    item.add_marker(pytest.mark.filterwarnings(*kinds, "ignore:.*pre-computed.*:UserWarning"))
