"""What the device does: batches, networks, caches, draws."""
