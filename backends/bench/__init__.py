"""Speed against yardsticks measured in the same run: `python -m backends.bench --backend NAME`.

On a CPU: attention against gather + SDPA and SDPA on contiguous K/V; movement against a plain copy.
On a GPU: decode, prefill and stores beside the ceilings for reading, copying and matrix products. A
ratio is the yardstick's time over ours: above 1, ours is faster.
"""
