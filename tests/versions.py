"""Try kvcore with other versions of the packages that it needs, in environments made for that.

    python -m tests.versions oldest newest vllm sglang --store   # those of the page, and write it
    python -m tests.versions oldest --python 3.12                # another Python than the usual one
    python -m tests.versions torch==2.14.0 transformers==5.20.2  # one combination of these
    python -m tests.versions newest --full                       # every test of each part

`oldest` has each lower bound of the extras, `newest` the latest releases, without upper bounds;
`vllm` and `sglang` have what these engines ask for. A combination takes minutes, and some GB of
disk until it is done. The exit status is 1 if a combination does not install or a part fails.
"""

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.distributions import PROJECT, bare, extra
from tests.kvcore.wheels import interpreter

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "data" / "versions.json"
EXTRAS = ("cpu", "gpu", "model", "serve", "events", "testing")
TOOLS = ("pytest", "pytest-xdist", "httpx", "greenlet", "peft", "openai")
SECONDS = 3600

# What an engine asks for of the packages that kvcore needs too, from the metadata of its wheel.
ENGINES = {
    "vllm": (
        "torch==2.14.0", "transformers>=5.16.1,<5.21", "numba==0.65.0", "fastapi>=0.133,<0.137",
        "llguidance>=1.7,<1.8", "tokenizers>=0.23.2", "pillow>=13", "openai>=2.25",
    ),
    "sglang": (
        "torch==2.14.1", "transformers==5.19.0", "numba==0.65.1", "llguidance>=1.7.6,<2",
        "tokenizers==0.23.2", "uvicorn>=0.51", "openai==2.8.0",
    ),
}  # fmt: skip
TITLES = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23"}
PYTHONS = {"oldest": "3.11", "newest": "3.13", "vllm": "3.12", "sglang": "3.12"}
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# An import of every module; those whose optional package is absent are counted apart.
IMPORTS = """
import importlib, pkgutil, sys
absent, count = {"hatchling", "nixl", "ray", "vllm"}, 0
for top in ("kvcore", "backends", "model"):
    for found in pkgutil.walk_packages(importlib.import_module(top).__path__, f"{top}."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in absent:
                raise SystemExit(f"{found.name}: {error}")
        else:
            count += 1
print(f"{count} passed")
"""
VERIFY = ["-m", "model.run", "--prompt", "A tuple is", "--max-tokens", "32", "--verify"]
QUICK = {
    "loading": ["tests/model/load/test_loader.py"],
    "attention": [f"tests/model/attention/test_{part}.py" for part in ("own_code", "compressed")],
    "adapters": [f"tests/adapters/test_transformers_{part}.py" for part in ("cache", "states")],
    "Triton's interpreter": [
        "tests/backends/test_triton.py", "tests/backends/test_triton_prefill.py",
        "-k", "contract or bfloat16",
    ],
    "server": ["tests/model/serve/test_endpoints.py"],
}  # fmt: skip
FULL = {
    "loading": ["tests/model/load"],
    "attention": ["tests/model/attention", "tests/model/forward"],
    "adapters": ["tests/adapters"],
    "kernels": ["tests/backends"],
    "server": ["tests/model/serve"],
}


@dataclass(frozen=True)
class Combination:
    """Versions to try together.

    Attributes:
        title: the head of its column.
        python: the minor version of Python.
        requirements: what is installed.
        pins: constraints on that.
    """

    title: str
    python: str
    requirements: tuple[str, ...]
    pins: tuple[str, ...]


def needs(parts, tools):
    """Return the requirements of extras and the tools of the tests, without exact versions."""
    found = [*PROJECT["project"]["dependencies"]]
    found += [line for part in parts for line in extra(part)]
    found += [line for line in extra("test") if bare(line) in tools]
    return tuple(dict.fromkeys(line for line in found if "==" not in line))


def lowest(requirements):
    """Return a constraint for each requirement that has a lower bound: the highest such bound."""
    bounds = {}
    for line in requirements:
        if bound := re.search(r">=([\d.]+)", line):
            number = tuple(map(int, bound[1].split(".")))
            bounds[bare(line)] = max(bounds.get(bare(line), ()), number)
    return tuple(f"{name}=={'.'.join(map(str, number))}" for name, number in bounds.items())


def uncapped(requirements):
    """Return the requirements without their upper bounds."""
    return tuple(re.sub(r",<[\d.]+", "", line) for line in requirements)


def combinations(names, python, *, full):
    """Return the combinations that a command line names; all of its pins together are one."""
    wanted = needs((*EXTRAS, "test"), [bare(line) for line in extra("test")]) if full else None
    wanted = wanted or needs(EXTRAS, TOOLS)
    pins = {"oldest": lowest(needs(EXTRAS, ())), "newest": (), **ENGINES}
    found = [
        Combination(
            TITLES.get(name, name),
            python or PYTHONS[name],
            uncapped(wanted) if name == "newest" else wanted,
            pins[name],
        )
        for name in names
        if name in pins
    ]
    given = tuple(name for name in names if name not in pins)
    for name in given:
        if not re.fullmatch(r"[\w.-]+(\[\w+\])?==[\w.+*]+", name):
            raise SystemExit(f"combination: wanted {', '.join(pins)} or NAME==VERSION, got {name}")
    if given:
        found.append(Combination(", ".join(given), python or OWN_PYTHON, wanted, given))
    return found


def tried(combination, steps, work, log):
    """Install a combination and try every part; return its column by the names of rows."""
    column = {"Python": combination.python, "date": str(dt.datetime.now(dt.UTC).date())}
    base = interpreter(combination.python)
    if base is None:
        return column | {"installs": f"not run: no Python {combination.python} here"}
    if not (work / "venv").exists():
        subprocess.run([str(base), "-m", "venv", str(work / "venv")], check=True)
    python = str(work / "venv" / "bin" / "python")
    pins = work / "constraints.txt"
    pins.write_text("\n".join(combination.pins) + "\n", encoding="utf-8")
    install = ["-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]
    done = ran([python, *install, "-c", str(pins), *combination.requirements], work, log)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        why = errors[0].removeprefix("ERROR: ") if errors else f"exit {done.returncode}"
        return column | {"installs": f"failed: {why}"}
    column["Python"] = ran([python, "-V"], work, log).stdout.split()[1]
    listed = json.loads(ran([python, "-m", "pip", "list", "--format=json"], work, log).stdout)
    versions = {each["name"].lower().replace("_", "-"): each["version"] for each in listed}
    for name in dict.fromkeys(bare(line) for line in needs(EXTRAS, ())):
        column[name] = versions.get(name.lower(), "-")
    column["installs"] = "passed"
    for name, arguments in steps.items():
        print(f"{combination.title}: {name}", flush=True)
        column[name] = outcome(ran([python, *arguments], work, log))
    return column


def ran(command, work, log):
    """Run a command on the checkout, in an environment that knows nothing of ours, and log it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    env["KVCORE_CACHE_DIR"] = str(work / "cache")
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 124, "", f"ran for more than {SECONDS} s")
    log.write(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}\n")
    log.flush()
    return done


def outcome(done):
    """Return the result of a part in a few words: pytest's counts, or the last line of an error."""
    lines = (done.stdout if "pytest" in done.args else done.stderr).strip().splitlines() or [""]
    counts = re.findall(r"\d+ (?:passed|failed|errors?)\b", lines[-1])
    if done.returncode == 0:
        return ", ".join(counts) or ("skipped" if "pytest" in done.args else "passed")
    return (
        ", ".join(counts)
        if any("passed" not in one for one in counts)
        else (f"failed: {lines[-1][:100]}")
    )


def is_bad(result):
    """True if a part did not run as it should."""
    return re.search("failed|error|not run|skipped", result) is not None


def merged(columns):
    """Return what is stored, with these columns in place of those of the same title and Python."""
    found = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    known = {}
    for part in found.get("parts", []):
        for place, title in enumerate(part["columns"][1:], 1):
            known[title] = {row[0]: row[place] for row in part["rows"]}
    for title, column in columns:
        known[f"{title}, {'.'.join(column['Python'].split('.')[:2])}"] = column
    return known


def table(known):
    """Return the head and the rows of a table of columns: versions first, then results."""
    names = [*dict.fromkeys(bare(line) for line in needs(EXTRAS, ()))]
    rows = ["date", "Python", *names, "installs", "imports", "verify", *QUICK, *FULL]
    there = [row for row in dict.fromkeys(rows) if any(row in one for one in known.values())]
    return ["", *known], [[row, *(one.get(row, "-") for one in known.values())] for row in there]


def store(known):
    """Write the data file of the page."""
    columns, rows = table(known)
    found = {
        "title": "What was tried together",
        "machine": f"CPUs, {platform.machine()}, {platform.system()}",
        "date": max(one["date"] for one in known.values()),
        "parts": [
            {
                "title": "By package and by part",
                "command": "python -m tests.versions oldest newest vllm sglang --store",
                "columns": columns,
                "rows": rows,
            }
        ],
    }
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def printed(columns, rows):
    """Return a table as text, its columns aligned."""
    lines = [columns, *rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", help="oldest, newest, vllm, sglang or NAME==VERSION")
    parser.add_argument("--python", metavar="3.X", help="the Python to use")
    parser.add_argument("--full", action="store_true", help="every test of each part: an hour")
    parser.add_argument("--store", action="store_true", help="write the table of the page")
    parser.add_argument("--keep", type=Path, help="a folder for environments, used again if there")
    parser.add_argument("--log", type=Path, default=os.devnull, help="where all output goes")
    options = parser.parse_args(arguments)
    chosen = combinations(options.names, options.python, full=options.full)
    tests = FULL if options.full else QUICK
    pytest = ["-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    steps = {"imports": ["-c", IMPORTS], "verify": VERIFY}
    steps |= {name: [*pytest, *paths] for name, paths in tests.items()}
    columns = []
    with Path(options.log).open("w", encoding="utf-8") as log:
        for one in chosen:
            with TemporaryDirectory() as made:
                work = options.keep / f"{one.title}-{one.python}" if options.keep else Path(made)
                work.mkdir(parents=True, exist_ok=True)
                columns.append((one.title, tried(one, steps, work, log)))
            if options.store:
                store(merged(columns[-1:]))
    print(printed(*table({f"{title}, {one['Python']}": one for title, one in columns})))
    results = [one.get(row, "") for _, one in columns for row in ("installs", *steps)]
    return any(is_bad(result) for result in results)


if __name__ == "__main__":
    sys.exit(main())
