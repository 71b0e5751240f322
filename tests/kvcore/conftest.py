"""A pool to try things on.

And what only the source can show is skipped, with the reason, where kvcore is compiled.
"""

import pytest

import kvcore.pool

COMPILED = not kvcore.pool.__file__.endswith(".py")


def pytest_collection_modifyitems(items):
    if COMPILED:
        sealed = pytest.mark.skip(reason="compiled classes cannot be subclassed or patched")
        for item in items:
            if item.get_closest_marker("source_build"):
                item.add_marker(sealed)


@pytest.fixture
def pool():
    """Seven blocks to hand out, of one token each."""
    return kvcore.BlockPool(8, 1)
