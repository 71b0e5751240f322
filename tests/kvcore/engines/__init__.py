"""Allocators to point `kvcore.testing` at: kvcore's own, plain lists, and broken ones."""

from tests.kvcore.engines.broken import BROKEN
from tests.kvcore.engines.dictionary import DictionaryAllocator
from tests.kvcore.engines.ours import OurAllocator, OurStates, OurWindows

__all__ = ["BROKEN", "DictionaryAllocator", "OurAllocator", "OurStates", "OurWindows"]
