"""Views of a whole manager: the invariants, recomputed, and a map of the pool."""
