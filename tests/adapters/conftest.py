from importlib import metadata

import pytest
import torch

# The adapter refuses other versions when it is imported.
SERVED = metadata.version("transformers").startswith("5.23.")
collect_ignore_glob = [] if SERVED else ["test_transformers_*"]


@pytest.fixture
def one_thread():
    """Small matrices are no work for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
