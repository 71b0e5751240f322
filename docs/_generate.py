"""The parts of pages that are made from code and data when the site is built.

Each function returns Markdown; `write_pages` writes them below `docs/_generated`, where the pages
include them. Nothing here is stored in git and no test compares it with a stored copy.
"""

import ast
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _picture import picture

DOCS = Path(__file__).parent
ROOT = DOCS.parent
DATA = DOCS / "data"
METRICS = ("model/serve/metrics.py", "model/cluster/metrics.py")
KINDS = {"Gauge": "gauge", "Counter": "counter", "Histogram": "histogram", "Info": "info"}


def flags() -> str:
    """Every flag of every command, a section a command and a table a group."""
    bench = importlib.import_module("model.bench")
    commands = [
        importlib.import_module("model.cli.args").run_flags(),
        importlib.import_module("model.chat").chat_flags(),
        importlib.import_module("model.serve.args").serve_flags(),
        *map(bench.bench_flags, bench.MEASUREMENTS),
        importlib.import_module("model.cluster.args").cluster_flags(),
    ]
    lines = []
    for command in commands:
        lines += [f"## {command.prog}", ""]
        for title, rows in command.rows().items():
            cells = [[_named(row.flag, row.value), _meaning(row.help, row.default)] for row in rows]
            lines += [f"### {title[0].upper()}{title[1:]}", ""]
            lines += table(["flag", "meaning"], cells)
    return "\n".join(lines)


def _named(flag: str, value: str) -> str:
    return f"{flag} `{value}`" if value else flag


def _meaning(text: str, default: str) -> str:
    return f"{text} (default: {default})" if default and "(default" not in text else text


def settings() -> str:
    """The fields of the declared settings, by the class that has them."""
    declared = importlib.import_module("model.control.settings")
    classes = [
        importlib.import_module("model.control.config").EngineConfig,
        importlib.import_module("model.control.params").SamplingParams,
        importlib.import_module("model.serve.config").ServeConfig,
    ]
    lines = []
    for cls in classes:
        rows = [
            [f"`{each.name}`", f"`{each.default!r}`", each.help]
            for each in declared.settings_of(cls)
            if each.help
        ]
        lines += [f"### {cls.__name__}", "", *table(["field", "default", "meaning"], rows)]
    return "\n".join(lines)


def metrics() -> str:
    """Every metric that a call in the modules of metrics names and describes."""
    rows = []
    for path in METRICS:
        if (ROOT / path).exists():
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            rows += [row for node in ast.walk(tree) for row in _metric(node)]
    return "\n".join(table(["metric", "kind", "meaning"], sorted(rows)))


def _metric(node: ast.AST) -> Iterator[list[str]]:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return
    name, says = node.args[:2]
    called = ast.unparse(node.func).lower()
    kind = next((kind for kind in KINDS.values() if kind in called), None)
    kind = kind or ("histogram" if "family" in called or "lifetime" in called else None)
    if isinstance(name, ast.Constant) and isinstance(says, ast.Constant) and kind:
        ending = "_total" if kind == "counter" else ""
        yield [f"`kvcore:{str(name.value).removeprefix('kvcore:')}{ending}`", kind, str(says.value)]


def errors() -> str:
    """Every public exception of the three packages, from its docstring."""
    lines = []
    for package in ("kvcore", "backends", "model"):
        module = importlib.import_module(package)
        rows = []
        for name in module.__all__:
            cls = getattr(module, name)
            if isinstance(cls, type) and issubclass(cls, Exception):
                bases = ", ".join(f"`{base.__name__}`" for base in cls.__bases__)
                rows.append([f"`{name}`", bases, _first_paragraph(cls)])
        lines += [f"### {package}", "", *table(["error", "is a", "means"], rows)]
    return "\n".join(lines)


def _first_paragraph(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def bad_input() -> str:
    """Every kind of bad input that the tests try, with its exit code and its message."""
    groups = importlib.import_module("tests.model.broken_inputs").GROUPS
    lines = []
    for title, cases in groups:
        rows = [[case.what, str(case.code), f"`{case.says}`"] for case in cases]
        lines += [f"### {title}", "", *table(["what is wrong", "code", "the message has"], rows)]
    return "\n".join(lines)


def architectures() -> str:
    """Which classes of Transformers run, and why the others do not, as the last walk found."""
    walk = importlib.import_module("tests.model.walk")
    head = f"Found with Transformers {walk.stored_for()}.\n\n"
    images = importlib.import_module("tests.model.vision").table()
    return head + str(walk.tables(walk.stored())) + f"\n{images}"


def published() -> str:
    """Well-known checkpoints, and whether they run."""
    return str(importlib.import_module("tests.model.published").table())


def formats() -> str:
    """The formats of quantised weights that load."""
    found = importlib.import_module("model.load.quantised").FORMATS.values()
    lines = ["| format | packages | stays quantised on |", "|---|---|---|"]
    for one in found:
        packages = ", ".join(f"`{name}`" for name in one.packages)
        lines.append(f"| {one.name} | {packages} | {', '.join(one.stays) or 'dequantised'} |")
    return "\n".join(lines)


def corpus() -> str:
    """The table of real bugs, from the tests."""
    return str(importlib.import_module("tests.kvcore.corpus").page())


def versions() -> str:
    """The versions that each package of ours asks for, and the combinations that were tried."""
    distributions = importlib.import_module("tests.distributions")
    ranges: dict[tuple[str, str], list[str]] = {}
    for part in ("cpu", "gpu", "model", "quantised", "serve", "cluster", "events", "testing"):
        for line in distributions.PROJECT["project"]["optional-dependencies"][part]:
            name, wanted = re.fullmatch(r"([\w-]+(?:\[\w+\])?)([^;]*).*", line).groups()  # type: ignore[union-attr]
            if name.partition("[")[0] != "kvcore":
                ranges.setdefault((name, wanted), []).append(part)
    vllm = importlib.import_module("kvcore.adapters.vllm.plugin").VERSIONS
    rows = [
        ["Python", distributions.PROJECT["project"]["requires-python"], ""],
        *([name, wanted, ", ".join(parts)] for (name, wanted), parts in ranges.items()),
        ["vLLM", ", ".join(vllm), "its plug-in"],
    ]
    tables = table(["package", "versions", "extra"], rows)
    return "\n".join([*tables, *_results(DATA / "versions.json")])


def measured() -> str:
    """Every data file of measured results."""
    return "\n".join(line for path in sorted(DATA.glob("[0-9]*.json")) for line in _results(path))


def _results(path: Path) -> list[str]:
    """The machine, the date, the commands and the tables of a data file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    lines = [f"## {found['title']}", "", f"{found['machine']} ({found['date']}).", ""]
    for part in found["parts"]:
        lines += [f"### {part['title']}", ""]
        lines += [part["note"], ""] if part.get("note") else []
        lines += ["```", part["command"], "```", ""] if part.get("command") else []
        lines += table(part["columns"], part["rows"])
    return lines


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, and an empty line."""
    lines = [_row(columns), "|" + "---|" * len(columns)]
    return [*lines, *(_row(row) for row in rows), ""]


def _row(cells: list[Any]) -> str:
    escaped = [re.sub(r"(?<!\\)\|", r"\\|", str(cell).strip()) for cell in cells]
    return f"| {' | '.join(escaped)} |"


def decode_picture() -> str:
    """The picture of the decode kernel, from the data file of the kernels."""
    found = json.loads((DATA / "3-kernels-h200.json").read_text(encoding="utf-8"))
    ceiling = float(re.search(r"read (\d+) GB/s", found["machine"])[1]) / 1000  # type: ignore[index]
    return picture(found["parts"][0]["rows"], ceiling)


PAGES: dict[str, Callable[[], str]] = {
    "flags.md": flags,
    "settings.md": settings,
    "metrics.md": metrics,
    "errors.md": errors,
    "bad-input.md": bad_input,
    "architectures.md": architectures,
    "formats.md": formats,
    "published.md": published,
    "corpus.md": corpus,
    "measured.md": measured,
    "versions.md": versions,
    "kernels.svg": decode_picture,
}


def write_pages(folder: Path) -> None:
    """Write every part below a folder; an unchanged part is not rewritten."""
    folder.mkdir(exist_ok=True)
    for name, make in PAGES.items():
        path, text = folder / name, make().rstrip() + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
