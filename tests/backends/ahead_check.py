"""What processes compile ahead is what their caller asks for; by test_triton_ahead.

For a GPU that need not be here. A program of its own, because it tells Triton of that GPU.
"""

import json
import sys
from functools import partial

import torch
import triton

from backends import AttentionTerms, KVCache, LayerCall
from backends.triton_gpu import ahead
from backends.triton_gpu.backend import TritonBackend
from backends.triton_gpu.warm_up import calls_at
from tests.backends.gpus import H100


def job(dtype):
    """Calls of a warm-up: prefill for Hopper and in its portable form, decode, copies."""
    k = torch.empty(100, 16, 1, 64, dtype=dtype, device="meta")
    sinks = torch.empty(2, device="meta")
    kinds = (AttentionTerms(0.125), AttentionTerms(0.125, sinks=sinks))
    cache = KVCache(k, torch.empty_like(k))
    layers = tuple(LayerCall(2, dtype, cache, terms, shared_prefix=True) for terms in kinds)
    return partial(calls_at, TritonBackend, layers, 2, 40)


def main():
    calls = job(torch.bfloat16)
    with ahead._Compilers(H100, calls) as compilers:
        numbers = sorted(iter(compilers.next_finished, None))
    triton.runtime.driver.set_active(ahead._Driver(H100))
    found = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    made = calls(ahead._Elsewhere(H100))
    assert numbers == list(range(len(made))), numbers
    written = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: written.append(what["compile"])
    for call in made:
        call()
    triton.knobs.runtime.jit_post_compile_hook = None
    assert len(found) > len(made), found
    assert all(found), found
    names = {json.loads(each["specialization_data"])["name"] for each in written}
    assert len(written) == len(found), (len(written), len(found))  # a hook serialises each
    assert any(name.endswith("decode._attend_chunk") for name in names), names
    job(torch.float32)(ahead._Elsewhere(H100))[-1]()  # not compiled yet
    assert not found[-1]
    sys.stdout.write("all is found\n")


if __name__ == "__main__":
    main()
