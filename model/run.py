"""The command line: `python -m model.run`.

Decides: in which order a process starts. Signals are heeded first; then its input is read, so that
`--help` and bad input are answered at once: loading torch and Transformers takes seconds.
Invariants: bad input is one line on stderr and exit code 2; text that the terminal's encoding lacks
is escaped, never an error.

Does not know: how a run goes (`session.py`), how it ends (`exits.py`).
"""

from model.cli.exits import leaves

if __name__ == "__main__":
    with leaves():
        import io
        import sys

        from model.cli.imports import importing
        from model.cli.progress import telling
        from model.cli.prompts import read_command_line

        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        job = read_command_line()

        with importing(), telling("loading torch and Transformers"):
            from model.cli.session import execute

        sys.exit(execute(*job))
