"""`python -m tests.bench COMMAND [--quick] [--json] [--against TREE] [flags of the command]`.

Decides: which command runs and how what it found is shown. A command is a module with `HEADINGS`,
`add_flags(parser)`, `rows(options)` and, if it has one, `summary(rows, quick=)`; `options.rest` are
the flags that this command line does not know, which belong to the engine or the server.
"""

import argparse
import json
import signal
import sys

from tests.bench.measure import BenchError
from tests.bench.report import Text, as_json
from tests.bench.trees import against

COMMANDS = {
    "allocator": "kvcore's allocator, alone or beside others (--peer vllm)",
    "kernels": "a kernel backend beside yardsticks of the same run (--backend)",
    "engine": "requests through the engine in one process; takes the flags of model.run",
    "host": "what a decode step costs the host, beside the network",
    "recurrent": "decoding and second turns with recurrent layers, beside attention alone",
    "tiers": "host memory and disk behind the cache: a restart, agents, misses",
    "paging": "how much memory paging saves on a trace, by block size; counted, not timed",
    "capacity": "how many requests of hybrid models fit into a memory (--peer vllm); counted",
    "server": "`vllm bench serve` against the server; takes the flags of model.serve",
    "start": "how long imports, a first token and a server's start take",
    "turns": "prefix cache hits of chats, by how full the pool is; counted, not timed",
    "wire": "what publishing KV events and asking an index costs",
}


def main(command, chosen, arguments):
    """Run a command; 2 if it cannot run."""
    options = _parsed(command, chosen, arguments)
    found = []
    try:
        text = None if options.json else Text(chosen.HEADINGS)
        for row in _rows(command, chosen, options, arguments):
            found.append(row)
            if text is not None:
                text.row(row)
        if text is None:
            print(json.dumps(as_json(command, found, quick=options.quick), indent=1))
        elif hasattr(chosen, "summary"):
            text.say()
            for line in chosen.summary(found, quick=options.quick):
                text.say(line)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parsed(command, chosen, arguments):
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench {command}",
        description=COMMANDS[command],
        allow_abbrev=False,
    )
    parser.add_argument("--quick", action="store_true", help="small cases, few rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--against", metavar="TREE", help="a checkout or a folder of installed packages"
    )
    parser.add_argument("--processes", type=int, default=3, help="of each tree (default: 3)")
    chosen.add_flags(parser)
    options, options.rest = parser.parse_known_args(arguments)
    if options.rest and not getattr(chosen, "TAKES_MORE", False):
        parser.error(f"unrecognized arguments: {' '.join(options.rest)}")
    return options


def _rows(command, chosen, options, arguments):
    if options.against is None:
        return chosen.rows(options)
    once = [one for one in arguments if one != "--json"]
    for flag, value in (("--against", options.against), ("--processes", str(options.processes))):
        if flag in once:
            at = once.index(flag)
            del once[at : at + 2]
        once = [one for one in once if one != f"{flag}={value}"]
    return against([command, *once], options.against, options.processes)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # a reader that goes away ends this like any other tool
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    # Only what is asked for is imported: the allocator's wheel comes without torch.
    if name == "allocator":
        from tests.bench.allocator import command
    elif name == "kernels":
        from tests.bench.kernels import command
    elif name == "engine":
        from tests.bench.engine import command
    elif name == "host":
        from tests.bench.engine import host as command
    elif name == "recurrent":
        from tests.bench.engine import recurrent as command
    elif name == "tiers":
        from tests.bench.engine import tiers as command
    elif name == "paging":
        from tests.bench.engine import paging as command
    elif name == "capacity":
        from tests.bench.engine import capacity as command
    elif name == "server":
        from tests.bench import server as command
    elif name == "start":
        from tests.bench import start as command
    elif name == "turns":
        from tests.bench import turns as command
    elif name == "wire":
        from tests.bench import wire as command
    else:
        lines = [f"  {each:<10} {what}" for each, what in COMMANDS.items()]
        print("usage: python -m tests.bench COMMAND [--help]", "", *lines, sep="\n")
        raise SystemExit(0 if name in {"-h", "--help"} else 2)
    raise SystemExit(main(name, command, sys.argv[2:]))
