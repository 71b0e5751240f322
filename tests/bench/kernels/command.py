"""`python -m tests.bench kernels --backend NAME`: a ratio is the yardstick's time over ours."""

import torch

from backends import BackendError, get_backend
from tests.bench.kernels.cpu import bench_cpu
from tests.bench.kernels.gpu import ONLY, bench_gpu
from tests.bench.measure import BenchError, Row, Spread

HEADINGS = {
    "decode": "Attention with one query a sequence; N x L: N sequences of L tokens in the cache.",
    "prefill": "Attention with Q of N x L: Q queries for each of N sequences of L tokens.",
    "batch": "Attention of steps whose sequences differ.",
    "movement": "Keys and values are stored, blocks copied, slots computed.",
    "sparse": "An index of 64 heads of 128 chooses 2,048 tokens, which are attended to.",
    "states": "Recurrent states, one token of each of 64 sequences; chunks of one prompt.",
    "host": "What a call costs the host: arguments checked, kernels launched, nothing waited for.",
    "ceilings": "What this device can do: read 1 GiB, copy it, multiply matrices of 8192 x 8192.",
}
_KINDS = {
    "decode": "decode",
    "prefill": "prefill",
    "host:": "host",
    "sparse": "sparse",
    "state": "states",
    "read": "ceilings",
    "copy": "ceilings",
    "matmul": "ceilings",
}


def add_flags(parser):
    parser.add_argument("--backend", default="auto", help="auto, numba, triton or a plug-in's name")
    parser.add_argument("--only", choices=ONLY, help="on a GPU")


def rows(options):
    try:
        backend = get_backend(options.backend)
    except BackendError as error:
        raise BenchError(str(error)) from error
    is_cpu = backend.device.type == "cpu"
    device = f"{torch.get_num_threads()} threads" if is_cpu else torch.cuda.get_device_name()
    if is_cpu:
        found = bench_cpu(backend, quick=options.quick)
    else:
        found = bench_gpu(backend, quick=options.quick, only=options.only)
    for one in found:
        first = one.case.split()[0]
        is_move = first.startswith(("store_kv", "copy_blocks", "compute_slot"))
        yield Row(
            group="movement" if is_move else _KINDS.get(first, "batch"),
            case=one.case,
            subject=f"{backend.name}, {device}",
            unit="ns",
            cost=Spread(one.median_us * 1e3, one.low_us * 1e3, one.high_us * 1e3),
            ratios={name: Spread(ratio, ratio, ratio) for name, ratio in one.ratios.items()},
            rates={
                name: value
                for name, value in (("GB/s", one.gb_per_s), ("TFLOP/s", one.tflop_per_s))
                if value
            },
        )
