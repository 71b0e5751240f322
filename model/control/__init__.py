"""The schedule of steps: requests, admission, preemption, counts. No tensors."""
