"""`python -m backends.bench --backend NAME [--quick] [--json]`: speed against yardsticks."""

import argparse
import json
import signal
import sys
from dataclasses import asdict

import torch

from backends.bench.cpu import bench_cpu
from backends.bench.gpu import bench_gpu
from backends.errors import BackendError
from backends.registry import get_backend


def main(arguments: list[str] | None = None) -> int:
    """Measure one backend and print a table or JSON; 2 if it is unknown or cannot run here."""
    parser = argparse.ArgumentParser(prog="python -m backends.bench", description=__doc__)
    parser.add_argument("--backend", default="auto", help="auto, numba, triton or a plug-in's name")
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args(arguments)
    try:
        backend = get_backend(options.backend)
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    measure = bench_cpu if backend.device.type == "cpu" else bench_gpu
    rows = measure(backend, quick=options.quick)
    if options.json:
        report = {
            "backend": backend.name,
            "device": str(backend.device),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "rows": [asdict(row) for row in rows],
        }
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return 0
    header = f"{'case':<52} {'median us':>10} {'fastest .. slowest':>21} {'GB/s':>7}"
    sys.stdout.write(f"{header} {'TFLOP/s':>7}\n")
    for row in rows:
        spread = f"{row.low_us:.1f} .. {row.high_us:.1f}"
        against = "".join(f"  {ratio:.2f}x {name}" for name, ratio in row.ratios.items())
        line = f"{row.case:<52} {row.median_us:>10.1f} {spread:>21} {row.gb_per_s:>7.1f} "
        line += f"{row.tflop_per_s:>7.1f}" if row.tflop_per_s else " " * 7
        sys.stdout.write(line + against + "\n")
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that goes away ends this like any other tool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
