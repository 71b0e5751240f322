"""What all kernels of this backend share: launching, a layer's compile-time values, the softmax."""
