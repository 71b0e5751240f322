"""The KV caches: which layers share memory, how many blocks fit, host swap."""
