"""The command `kvcore`: `kvcore version`, `kvcore test MODULE:ADAPTER`, `kvcore events ENDPOINT`.

Decides: the names of the commands. Each is the module of the same command line
(`python -m kvcore.testing`, `python -m kvcore.wire`), imported when it is chosen.
"""

import os
import platform
import sys
from importlib import import_module

import kvcore

COMMANDS = {
    "test": ("kvcore.testing.command", "testing", "run the state machines over an allocator"),
    "events": ("kvcore.wire.__main__", "events", "print the KV events of a publisher"),
}
_HELP = """\
usage: kvcore COMMAND [flags]

  version  print the version and the kind of this installation
{commands}

kvcore COMMAND --help shows the flags of a command. The engine and the server are
commands of the package kvcore-engine: kvcore-engine --help, or python -m model --help.
"""


_READER_GONE = 141
"""The exit code of a command whose output is read no further, as a shell has it."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command with these arguments, by default those of the process; return its exit code."""
    try:
        try:
            return _run(arguments)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the interpreter would complain of what it cannot flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_GONE


def _run(arguments: list[str] | None) -> int:
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if command in {"version", "--version"}:
        python = f"Python {platform.python_version()}"
        print(f"kvcore {kvcore.__version__} ({kvcore.build}), {python}")
        return 0
    if command in {"-h", "--help"}:
        rows = [f"  {name:9}{words}" for name, (_, _, words) in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(rows)), end="")
        return 0
    if command not in COMMANDS:
        names = ", ".join(["version", *COMMANDS])
        print(f"command: wanted {names}, got {command!r}", file=sys.stderr)
        return 2
    module, extra, _ = COMMANDS[command]
    try:
        run = import_module(module).main
    except ImportError as error:
        print(f"kvcore {command}: {error}; pip install 'kvcore[{extra}]'", file=sys.stderr)
        return 2
    return int(run(rest))


if __name__ == "__main__":
    sys.exit(main())
