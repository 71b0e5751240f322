"""Allocators to point `kvcore.testing` at: kvcore's own, a dictionary, and broken ones."""

from tests.kvcore.engines.broken import BROKEN
from tests.kvcore.engines.dictionary import DictionaryAllocator
from tests.kvcore.engines.ours import OurAllocator

__all__ = ["BROKEN", "DictionaryAllocator", "OurAllocator"]
