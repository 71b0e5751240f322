"""What the tests of backends share: quiet threads for those that compute little at a time."""

import pytest

from backends import oracle


@pytest.fixture(scope="module")
def one_thread():
    """Sums this small gain nothing from a second thread, and lose much where cores are busy."""
    with oracle.one_thread():
        yield
