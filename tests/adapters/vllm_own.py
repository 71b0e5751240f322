"""vLLM's own tests with kvcore's manager in the place of vLLM's: a pytest plugin.

    python -m pytest -p tests.adapters.vllm_own PATH/vllm-0.32.0/tests/v1/core/test_scheduler.py

What a test asks of the insides of vLLM's manager cannot be asked of kvcore: those are in `INSIDES`,
each with what it looks at, and are expected to fail, strictly.
"""

import os

import pytest

os.environ["VLLM_PLUGINS"] = "kvcore"

from vllm.v1.core import kv_cache_manager
from vllm.v1.core.sched import scheduler

from kvcore.adapters.vllm import register
from kvcore.adapters.vllm_manager import Manager

register()
kv_cache_manager.KVCacheManager = scheduler.KVCacheManager
made = []
begin = Manager.__init__


def counted(self, settings):
    made.append(1)
    begin(self, settings)


Manager.__init__ = counted

INSIDES = {}


def pytest_collection_modifyitems(items):
    for item in items:
        reason = INSIDES.get(item.originalname or item.name)
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{len(made)} managers were kvcore's")
