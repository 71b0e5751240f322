import pytest
import torch


@pytest.fixture
def one_thread():
    """Small matrices are no work for two."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
