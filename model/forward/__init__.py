"""The forward pass of a step: networks, CUDA graphs, memory profiling, draft models."""
