"""The operations of the manager on sequences: step, rewind, share, load, peak usage."""
