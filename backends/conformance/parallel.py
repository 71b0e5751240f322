"""The kit in several processes, each with a share of the cases: where compiling takes longest."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from backends import conformance
from backends.conformance.report import Report
from backends.registry import get_backend


def run_in_processes(name: str, *, quick: bool = False, jobs: int) -> Report:
    """Run the kit on the backend of this name, which every process loads for itself.

    Raises:
        UnknownBackendError: no such name.
        BackendUnavailableError: it cannot run here.
    """
    get_backend(name)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        work = partial(_run_shard, name, quick, jobs)
        reports = list(pool.map(work, range(jobs)))
    findings = tuple(finding for report in reports for finding in report.findings)
    return Report(reports[0].backend, reports[0].device, findings)


def tell(line: str) -> None:
    """Write a line to stderr at once. O(line)."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _run_shard(name: str, quick: bool, jobs: int, index: int) -> Report:  # noqa: FBT001 - mapped
    torch.set_num_threads(max(1, torch.get_num_threads() // jobs))
    where = f"process {index + 1} of {jobs}: "
    return conformance.run(
        get_backend(name),
        quick=quick,
        shard=(index, jobs),
        tell=lambda line: tell(f"{where}{line}"),
    )
