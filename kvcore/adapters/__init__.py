"""kvcore inside other engines; nothing of an adapter is imported before it is asked for."""
