"""`python -m tests.model.serve.hostile --requests 10000`: prints what came of them.

Starts a server as a process, with a tiny model that sees images, a polite client, and two dozen
hostile ones. In every other slice of time the hostile ones are polite: what their requests cost the
polite client is the load, and what hostile requests cost beyond that is counted. It exits with 1
where something is wrong.
"""

import argparse
import sys
from pathlib import Path

from tests.model.serve.hostile.run import Plan, run


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--slice-s", type=float, default=5.0)
    parser.add_argument("--kind", help="only attacks of this kind")
    parser.add_argument("--plants", default="", help="bugs of server.py, joined by commas")
    parser.add_argument("--log", type=Path, help="what the server says goes here")
    result = run(Plan(**vars(parser.parse_args())))
    print(result)
    return int(bool(result.wrong))


if __name__ == "__main__":
    sys.exit(main())
