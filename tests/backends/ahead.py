"""Attention cases run once in many processes, so that what they need is compiled side by side.

Triton keeps compiled kernels on disk: tests that follow find them there.
"""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import torch

import backends
from backends.conformance.cases import build


def compile_ahead(cases):
    """Run each case once, somewhere; what is wrong is for the tests to say."""
    context = multiprocessing.get_context("spawn")
    jobs = min(len(cases), os.cpu_count() or 1)
    one = {"initializer": torch.set_num_threads, "initargs": (1,)}  # as many as cores, else each
    with ProcessPoolExecutor(jobs, mp_context=context, **one) as pool:
        list(pool.map(_run, cases))


def _run(case):
    from backends.triton_gpu.decode import cascade  # noqa: PLC0415 - where there is a GPU alone

    backend = backends.get_backend("triton")
    cascade.WORTH_BYTES = cascade.WORTH_BYTES_A_SEQUENCE = cascade.FEWEST = 0
    build(case, backend.device).run(backend)
