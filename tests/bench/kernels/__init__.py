"""Speed of a kernel backend against yardsticks measured in the same run.

On a CPU: attention against gather + SDPA and SDPA on contiguous K/V; movement against a plain copy.
On a GPU: decode, prefill and stores beside the ceilings for reading, copying and matrix products.
"""
