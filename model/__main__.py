"""One way in: `python -m model COMMAND`, and `kvcore-engine COMMAND` where that is installed.

Decides: the names of the commands. Each is a module, which `python -m model.COMMAND` starts too, so
nothing of a command is loaded before it is chosen.

Does not know: their flags.
"""

import runpy
import sys
from importlib import import_module

from model.cli.exits import leaves
from model.errors import UsageError, shown

COMMANDS = {
    "run": "continue prompts; without any, built-in ones",
    "chat": "talk to a model in the terminal",
    "serve": "serve a model to OpenAI's clients",
    "bench": "measure latency, throughput, or a server that runs",
    "cluster": "serve it with several replicas",
    "view": "show a trace of a run in a browser",
    "minimal": "continue prompts with an engine that fits in one file",
}
_HELP = """\
usage: python -m model COMMAND [flags]

{commands}

python -m model COMMAND --help shows the common flags of a command, --help-all all of them;
--version shows the version.
"""


def main() -> None:
    """Run the command that the process was started with; it ends the process."""
    with leaves():
        command = sys.argv[1] if len(sys.argv) > 1 else "--help"
        if command == "--version":
            print(f"kvcore {import_module('kvcore').__version__}")
        elif command in {"-h", "--help", "--help-all"}:
            rows = [f"  {name:9}{words}" for name, words in COMMANDS.items()]
            print(_HELP.format(commands="\n".join(rows)), end="")
        elif command not in COMMANDS:
            raise UsageError(f"command: wanted {', '.join(COMMANDS)}, got {shown(command)}")
        else:
            del sys.argv[1]
            runpy.run_module(f"model.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
