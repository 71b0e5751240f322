"""`python -m backends.conformance NAME [--quick] [--json] [--jobs N]`: 0 if it conforms."""

import argparse
import json
import os
import signal
import sys

from backends import conformance
from backends.conformance.parallel import run_in_processes, tell
from backends.errors import BackendError
from backends.registry import get_backend


def main(arguments: list[str] | None = None) -> int:
    """Run the kit on one backend and print what it found.

    Returns:
        0: it conforms; 1: it does not; 2: it is unknown or cannot run here.
    """
    parser = argparse.ArgumentParser(prog="python -m backends.conformance", description=__doc__)
    parser.add_argument("name", help="a backend: auto, numba, triton or an installed plug-in's")
    parser.add_argument("--quick", action="store_true", help="few small cases, for an interpreter")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes to share the cases, never more than there are cores",
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: wanted at least 1, got {options.jobs}")
    jobs = min(options.jobs, os.cpu_count() or 1)
    try:
        if jobs > 1:
            report = run_in_processes(options.name, quick=options.quick, jobs=jobs)
        else:
            backend = get_backend(options.name)
            report = conformance.run(backend, quick=options.quick, tell=tell)
    except BackendError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    text = json.dumps(report.as_json(), indent=1) if options.json else report.as_text()
    sys.stdout.write(text + "\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that goes away ends this like any other tool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    raise SystemExit(main())
