"""Allocators to point `kvcore.testing` at: kvcore's own, plain lists, and broken ones."""

from tests.kvcore.engines.broken import BROKEN
from tests.kvcore.engines.dictionary import DictionaryAllocator
from tests.kvcore.engines.ours import OurAllocator, OurWindows
from tests.kvcore.engines.windows import BROKEN_WINDOWS, WindowAllocator

BROKEN = {**BROKEN, **BROKEN_WINDOWS}

__all__ = ["BROKEN", "DictionaryAllocator", "OurAllocator", "OurWindows", "WindowAllocator"]
