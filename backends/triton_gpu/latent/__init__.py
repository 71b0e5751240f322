"""Attention over latents (MLA): kernels for every GPU, and one for Hopper."""
