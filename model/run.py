"""The command line: `python -m model.run`.

Decides: in which order a process starts. Its input is read first, so that `--help` and bad input
are answered at once: loading torch and Transformers takes seconds. Invariants: bad input is one
line on stderr and exit code 2; text that the terminal's encoding lacks is escaped, never an error.

Does not know: how a run goes (`session.py`), how it ends (`exits.py`).
"""

import io
import sys
from collections.abc import Sequence

from model.args import Options, parse_args
from model.exits import exits
from model.prompts import PromptSpec, read_prompts


def prepare(argv: Sequence[str] | None = None) -> tuple[Options, list[PromptSpec]]:
    """Read a command line, the process's own if None, and the prompts it names.

    Raises:
        ModelError: it does not say what to do.
    """
    options = parse_args(argv)
    return options, read_prompts(options, sys.stdin.buffer if sys.stdin else None)


if __name__ == "__main__":
    with exits():
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        job = prepare()

        from model.session import execute

        sys.exit(execute(*job))
