"""Speed against yardsticks measured in the same run: `python -m backends.bench --backend NAME`.

On a CPU: attention against gather + SDPA and SDPA on contiguous K/V; movement against a plain copy.
On a GPU: decode, prefill and stores in microseconds beside the copy bandwidth. A ratio above 1
means that ours is faster.
"""
