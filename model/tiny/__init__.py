"""A tiny language model that speaks of Python: its checkpoint and its prompts.

Importing this package is cheap and needs only the standard library.
"""

from pathlib import Path

from model.tiny.prompts import DEMO_PROMPTS, ENDINGS, SHARED_PREFIX

__all__ = ["CHECKPOINT_DIR", "DEMO_PROMPTS", "ENDINGS", "SHARED_PREFIX"]

CHECKPOINT_DIR = Path(__file__).parent
"""The folder that `AutoModelForCausalLM` and `AutoTokenizer` load, offline."""
