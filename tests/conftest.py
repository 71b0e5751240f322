"""Hypothesis profiles (docs/explanation/how-we-test.md), threads, and two fixtures for every test.

Networks and sums this small gain nothing from a second thread, and threads that wait for one
another take all cores: torch has one here, and in every process that a test starts.
One fixture keeps the collector away from what was imported, of which nothing is garbage; two start
programs fast.
"""

import gc
import importlib.util
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.forks import Forks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
gc.disable()  # a tenth of the time of imports; a fixture enables it

# Wall-clock deadlines say more about the machine than about the code.
SIZES = {"max_examples": 60, "stateful_step_count": 40, "deadline": None}
settings.register_profile("default", derandomize=True, print_blob=False, **SIZES)
settings.register_profile("search", derandomize=False, print_blob=True, **SIZES)
settings.register_profile(
    "ci",
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    print_blob=True,
)
settings.register_profile(
    "deep",
    max_examples=15_000,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("default")


@pytest.fixture(autouse=True, scope="module")
def frozen_imports():
    """A collection looks at what tests have made: torch and Transformers are a million objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def forks():
    """Starts programs that need not import torch, Transformers and the engine again."""
    with Forks() as started:
        yield started


@pytest.fixture(scope="session")
def interpreting():
    """Likewise, where Triton interprets its kernels, which is chosen before it is imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton has wheels for Linux only")
    with Forks("tests.backends.interpreter", TRITON_INTERPRET="1") as started:
        yield started
