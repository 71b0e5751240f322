"""Prefill for GPUs of compute capability 9: warps that load, and warps that multiply."""
