"""Build the three distributions, and try each in a fresh environment, outside the checkout.

    python -m tests.distributions                   # build all into dist/, install and run each
    python -m tests.distributions kvcore-kernels    # only this one, and what it needs
    python -m tests.distributions --build-only

A wheel is built from its source distribution, so that both are tried. One pyproject.toml describes
all three: `[tool.kvcore.distributions]` says which package each ships, and which of the extras are
its dependencies; a distribution that is not at the top is built from a copy that has a
pyproject.toml made from that. Sets KVCORE_COMPILE=0 unless it is set: `.ci/run` tries a compiled
wheel with the whole test suite.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DISTRIBUTIONS = PROJECT["tool"]["kvcore"]["distributions"]
SHARED = ("requires-python", "license", "authors", "classifiers", "keywords", "urls")

INSTALL = """
from transformers import AutoModelForCausalLM
from kvcore.adapters.transformers import install
from model.tiny import CHECKPOINT_DIR
install(AutoModelForCausalLM.from_pretrained(CHECKPOINT_DIR), backend="numba")
"""

SHADOWED = """
import pathlib, subprocess, sys
pathlib.Path("model.py").write_text("raise SystemExit('a model.py of the user')")
for name, flags in [("kvcore", ["version"]), ("kvcore-engine", ["run", "--max-tokens", "4"])]:
    subprocess.run([pathlib.Path(sys.executable).with_name(name), *flags], check=True)
pathlib.Path("model.py").unlink()
"""

# What a user does first with each of them; it has to succeed outside of a checkout.
TRIALS = {
    "kvcore": (
        ["-c", "import kvcore; kvcore.KVCacheManager(num_blocks=8, block_size=4).open([1, 2])"],
    ),
    "kvcore-kernels": (["-m", "backends.conformance", "numba", "--quick"],),
    "kvcore-engine": (
        ["-m", "model.run", "--prompt", "A tuple is", "--max-tokens", "8", "--verify"],
        ["-m", "model.minimal", "A tuple is"],
        ["-c", SHADOWED],
        ["-c", "from model import Engine, LLM"],
        ["-c", INSTALL],
    ),
}


def extra(name):
    """The requirements of an extra, those of extras that it includes in their place."""
    found = []
    for line in PROJECT["project"]["optional-dependencies"][name]:
        included = re.fullmatch(r"kvcore\[([\w,]+)\]", line)
        if included is None:
            found.append(line)
        else:
            found += [one for inner in included[1].split(",") for one in extra(inner)]
    return found


def bare(requirement):
    """The name that a requirement begins with."""
    return re.match(r"[\w-]+", requirement)[0]


def project_of(name, version):
    """The pyproject.toml of a distribution that is not at the top, as a dictionary."""
    about = DISTRIBUTIONS[name]
    needs = [f"{one}=={version}" for one in about.get("distributions", ())]
    own = {line for part in about["requires"] for line in extra(part)}
    below = [DISTRIBUTIONS[one] for one in about.get("distributions", ())]
    parts = [part for one in [about, *below] for part in one.get("requires", ())]
    installed = {bare(line) for part in parts for line in extra(part)}
    files = [about["package"], "README.md", "LICENSE", "build_hook.py"]
    return {
        "build-system": PROJECT["build-system"],
        "project": {
            "name": name,
            "version": version,
            "description": about["description"],
            "dynamic": ["readme"],
            "license-files": ["LICENSE"],
            **{key: value for key, value in PROJECT["project"].items() if key in SHARED},
            "dependencies": [*needs, *sorted(own)],
            "scripts": about.get("scripts", {}),
            "optional-dependencies": {
                part: [
                    line for line in extra(part) if bare(line) not in installed and "==" not in line
                ]
                for part in about["extras"]
            },
        },
        "tool": {"hatch": {
            "metadata": {"hooks": {"custom": {"path": "build_hook.py"}}},
            "build": {"targets": {
                "wheel": {"packages": [about["package"]]},
                "sdist": {"include": [f"/{one}" for one in files]},
            }},
        }},
    }  # fmt: skip


def toml(table, path=()):
    """A dictionary of tables, texts and lists of texts as TOML."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"[{'.'.join(path)}]"] if plain else []
    for key, value in plain.items():
        inline = isinstance(value, list) and value and isinstance(value[0], dict)
        text = (
            "[" + ", ".join("{ name = " + json.dumps(one["name"]) + " }" for one in value) + "]"
            if inline
            else json.dumps(value)
        )
        lines.append(f"{key} = {text}")
    for key, value in table.items():
        if isinstance(value, dict):
            lines += toml(value, (*path, key)).splitlines()
    return "\n".join(lines) + "\n"


def staged(name, version, work):
    """The folder that a distribution is built from."""
    if name == "kvcore":
        return ROOT
    package = DISTRIBUTIONS[name]["package"]
    copy = work / name
    shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "docs" / "LICENSE", copy / "LICENSE")
    shutil.copy2(ROOT / package / "README.md", copy / "README.md")
    shutil.copy2(ROOT / "kvcore" / "build_hook.py", copy / "build_hook.py")
    (copy / "pyproject.toml").write_text(toml(project_of(name, version)), encoding="utf-8")
    return copy


def run(command, **options):
    print("$", *command, flush=True)  # noqa: T201  # a command line prints
    subprocess.run(command, check=True, **options)


def build(name, version, out, work):
    """Build the source distribution, and the wheel from it; return the wheel."""
    folder = staged(name, version, work)
    run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(out)], cwd=folder)
    stem = f"{name.replace('-', '_')}-{version}"
    env = {"KVCORE_COMPILE": "0", **os.environ}
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(out)]
    run([*pip, str(out / f"{stem}.tar.gz")], env=env)
    [wheel] = out.glob(f"{stem}-*.whl")
    return wheel


def needed(name):
    """A distribution and those that it needs, itself last."""
    below = [one for other in DISTRIBUTIONS[name].get("distributions", ()) for one in needed(other)]
    return [*dict.fromkeys([*below, name])]


def try_out(name, wheels, work):
    """Install a distribution into an environment of its own and use it there."""
    place = work / f"try-{name}"
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    constraints = work / "constraints.txt"
    pinned = [line for line in extra("run") if re.match(r"(torch|triton)==", line)]
    constraints.write_text("\n".join(pinned) + "\n", encoding="utf-8")
    local = [str(wheels[one]) for one in needed(name)]
    run([*install, "-c", str(constraints), *local], env=env)
    for arguments in TRIALS[name]:
        run([python, *arguments], cwd=place, env=env, stdout=subprocess.DEVNULL)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[[], *DISTRIBUTIONS], help="none: all three")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go")
    parser.add_argument("--build-only", action="store_true", help="install and run nothing")
    options = parser.parse_args()
    names = options.names or list(DISTRIBUTIONS)
    source = (ROOT / "kvcore" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)[1]
    out = options.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        every = [*dict.fromkeys(one for name in names for one in needed(name))]
        wheels = {name: build(name, version, out, work) for name in every}
        for name in [] if options.build_only else names:
            try_out(name, wheels, work)
            print(f"{name} {version}: installed by itself and tried", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
