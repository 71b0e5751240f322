"""The common part of this backend's kernels: launches, layers' compile-time values, softmax."""
